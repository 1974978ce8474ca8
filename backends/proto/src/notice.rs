//! Notices of a worker to the operator: troubles that cost time and fail no request.

use prost::Message;

/// A trouble of a worker that costs time but fails no request: begun, going on, or over. Sent when it begins and ends,
/// and now and then in between.
#[derive(Clone, PartialEq, Message)]
pub struct Notice {
    /// [`NoticeKind`] of the trouble, as its number.
    #[prost(enumeration = "NoticeKind", tag = "1")]
    pub kind: i32,
    /// Part concerned: the address of a peer, the name of a tier.
    #[prost(string, tag = "2")]
    pub subject: String,
    /// Reason; empty when the trouble is over.
    #[prost(string, tag = "3")]
    pub why: String,
    /// Number of occurrences since the last notice about it.
    #[prost(uint64, tag = "4")]
    pub count: u64,
}

/// Kinds of [`Notice`], by the part that is in trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum NoticeKind {
    /// KV transfers from a peer fail; the missing blocks are computed.
    Transfer = 0,
    /// A KV tier (host, disk or remote) is switched off after failures.
    Tier = 1,
}

impl NoticeKind {
    /// Name of the kind: `transfer`, `tier`.
    pub fn name(self) -> &'static str {
        match self {
            NoticeKind::Transfer => "transfer",
            NoticeKind::Tier => "tier",
        }
    }
}
