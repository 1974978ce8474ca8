//! Errors of store operations.

use std::time::Duration;

use tokio::time::timeout;

/// Error of a store operation. A missing object is no error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The disk, or the configured size of the store, is used up. Nothing was changed.
    #[error("the store is full")]
    Full,
    /// The tenant's quota is used up.
    #[error("the tenant's share of the store is used up: {used} of {max}")]
    Quota {
        /// Amount that the tenant uses, with the requested one.
        used: u64,
        /// Largest amount that the tenant may use.
        max: u64,
    },
    /// An object is too long to be read or extended as a whole.
    #[error("more than {max} {what}")]
    TooLong {
        /// What there is too much of: items, turns, bytes.
        what: &'static str,
        /// Largest number of them.
        max: u64,
    },
    /// The store is overloaded or did not answer in time. Nothing was changed, unless the operation was already under
    /// way.
    #[error("the store is busy")]
    Busy,
    /// The counts are lost: the server was restarted or emptied. Nothing was changed.
    #[error("the shared counters have lost their counts")]
    Lost,
    /// The request contradicts the stored state or a bound: a bug of the caller, or of another process.
    #[error("invalid request to the store: {0}")]
    Misuse(&'static str),
    /// The store cannot be read or written, for this reason.
    #[error("the store failed: {0}")]
    Broken(String),
}

impl StoreError {
    /// Result of a call to the store, with [`StoreError::Busy`] at the deadline: the call is then given up.
    ///
    /// # Errors
    /// The error of the call; [`StoreError::Busy`] if the call takes longer than `limit`.
    pub async fn in_time<T>(limit: Duration, call: impl Future<Output = Result<T, Self>>) -> Result<T, Self> {
        timeout(limit, call).await.unwrap_or(Err(Self::Busy))
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test]
    async fn a_call_without_an_answer_is_busy() {
        let limit = Duration::from_millis(1);
        assert_eq!(StoreError::in_time(limit, ready(Ok(7))).await, Ok(7));
        assert_eq!(StoreError::in_time(limit, ready(Err::<(), _>(StoreError::Full))).await, Err(StoreError::Full));
        assert_eq!(StoreError::in_time(limit, pending::<Result<(), _>>()).await, Err(StoreError::Busy));
    }
}
