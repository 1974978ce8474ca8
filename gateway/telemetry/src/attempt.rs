//! Attempts to get an answer, as the access log lists them.

use std::sync::Arc;

use serde::Serialize;

/// One attempt to get an answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Attempt {
    /// Target that was asked: a pool, or `provider/model`.
    #[serde(serialize_with = "text")]
    pub target: Arc<str>,
    /// `answered`, or the kind of failure.
    pub outcome: &'static str,
    /// HTTP status of the failure; 0 where there was none.
    #[serde(skip_serializing_if = "is_zero")]
    pub status: u16,
    /// Milliseconds to the outcome.
    pub ms: f64,
    /// Whether the request had gone out.
    #[serde(skip)]
    pub sent: bool,
}

fn text<S: serde::Serializer>(text: &str, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(text)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(value: &u16) -> bool {
    *value == 0
}
