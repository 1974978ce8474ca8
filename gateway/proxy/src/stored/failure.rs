//! What the store says, as failures.

use std::time::Duration;

use penstock_dialects::openai::errors::ErrorShape;
use penstock_proto::ErrorKind;
use penstock_store::StoreError;

use crate::error::Failure;

/// The store is full: nothing is wrong with the request, and trying again soon does not help (RFC 4918, section 11.5).
const FULL: ErrorShape = ErrorShape { status: 507, kind: "server_error", code: Some("storage_full") };
/// The key has as much as it may have.
const QUOTA: ErrorShape =
    ErrorShape { status: 403, kind: "invalid_request_error", code: Some("storage_quota_exceeded") };
/// No such thing, or another key's.
const ABSENT: ErrorShape = ErrorShape { status: 404, kind: "invalid_request_error", code: None };

/// A failure of the store, for the client.
#[expect(clippy::needless_pass_by_value, reason = "an argument of map_err")]
pub(crate) fn failed(error: StoreError) -> Failure {
    match &error {
        StoreError::Full => {
            let message =
                "The gateway's storage is full. Nothing was changed; delete files, or ask the operator for space.";
            Failure { shape: Some(Box::new(FULL)), ..Failure::new(ErrorKind::Internal, message).log(error.to_string()) }
        }
        StoreError::Quota { used, max } => {
            let message =
                format!("This key may keep no more: {used} would be kept, {max} may be. Delete what is not needed.");
            Failure { shape: Some(Box::new(QUOTA)), ..Failure::new(ErrorKind::Forbidden, message) }
        }
        StoreError::Busy => {
            let failure = Failure::new(ErrorKind::Overloaded, "The gateway's storage is busy.").log(error.to_string());
            failure.retry_after(Duration::from_secs(1))
        }
        StoreError::Lost | StoreError::Misuse(_) | StoreError::Broken(_) => Failure::internal(error.to_string()),
    }
}

/// There is no `what` with that id.
pub(crate) fn absent(what: &str, id: &str) -> Failure {
    let shown: String = id.chars().take(80).collect();
    let message = format!("No such {what} object: {shown}");
    Failure { shape: Some(Box::new(ABSENT)), ..Failure::new(ErrorKind::NotFound, message).param("id") }
}
