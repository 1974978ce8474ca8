//! Why the store did not do it.

/// A failure of the store. What is merely not there is no failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The disk, or the size that the store may have, is used up. Nothing was changed.
    #[error("the store is full")]
    Full,
    /// The tenant has as much as it may have.
    #[error("the tenant's share of the store is used up: {used} of {max}")]
    Quota {
        /// What there is, with what was asked for.
        used: u64,
        /// What there may be.
        max: u64,
    },
    /// More work waits than is done in time. Nothing was changed, unless it was already being done.
    #[error("the store is busy")]
    Busy,
    /// What was counted is gone: the server was restarted or emptied. Nothing was changed.
    #[error("the shared counters have lost their counts")]
    Lost,
    /// What was asked for does not fit what is there: a bug of the caller, or of another process.
    #[error("invalid request to the store: {0}")]
    Misuse(&'static str),
    /// The store cannot be read or written.
    #[error("the store failed: {0}")]
    Broken(String),
}
