//! Attempts to get an answer, as the access log lists them.

use std::sync::Arc;

use serde::Serialize;

/// One attempt to get an answer from a target, as the access log lists it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Attempt {
    /// Target that was asked: a pool, or `provider/model`.
    #[serde(serialize_with = "text")]
    pub target: Arc<str>,
    /// Outcome of the attempt: `answered`, or the kind of failure.
    pub outcome: &'static str,
    /// HTTP status of the failure; 0 where there was none.
    #[serde(skip_serializing_if = "is_zero")]
    pub status: u16,
    /// Milliseconds from the start of the attempt to its outcome.
    pub ms: f64,
    /// True if the request had gone out to the target, which may then bill it.
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
