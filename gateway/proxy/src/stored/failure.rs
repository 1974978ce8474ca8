//! Errors of the store as failures for the client.

use std::time::Duration;

use penstock_proto::ErrorKind;
use penstock_store::StoreError;
use penstock_types::error_shape::ErrorShape;

use penstock_base::error::Failure;

/// Shape of a full store: the request is not at fault, and a retry soon does not help (RFC 4918, section 11.5).
const FULL: ErrorShape = ErrorShape { status: 507, kind: "server_error", code: Some("storage_full") };
/// Shape of a key that has stored as much as it may.
const QUOTA: ErrorShape =
    ErrorShape { status: 403, kind: "invalid_request_error", code: Some("storage_quota_exceeded") };
/// Shape of a thing that does not exist, or is another key's.
const ABSENT: ErrorShape = ErrorShape { status: 404, kind: "invalid_request_error", code: None };

/// Failure for the client, made of an error of the store.
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
        StoreError::TooLong { .. } => Failure::new(ErrorKind::ContextLength, format!("It is too long: {error}.")),
        StoreError::Busy => {
            let failure = Failure::new(ErrorKind::Overloaded, "The gateway's storage is busy.").log(error.to_string());
            failure.retry_after(Duration::from_secs(1))
        }
        // A restart or a failover of the server: the request is not at fault, and can be made again.
        StoreError::Broken(_) => {
            let message = "The gateway's storage cannot be reached or used now.";
            Failure::new(ErrorKind::Unavailable, message).log(error.to_string())
        }
        StoreError::Lost | StoreError::Misuse(_) => Failure::internal(error.to_string()),
    }
}

/// Failure of an id that names no `what`.
pub(crate) fn absent(what: &str, id: &str) -> Failure {
    let shown: String = id.chars().take(80).collect();
    let message = format!("No such {what} object: {shown}");
    Failure { shape: Some(Box::new(ABSENT)), ..Failure::new(ErrorKind::NotFound, message).param("id") }
}
