//! JSON encoding of values in stores.

use serde::Serialize;

use crate::StoreError;

/// Encodes a value as JSON. Only maps with non-string keys could fail, and no stored value has one.
pub(crate) fn to_json(value: &impl Serialize) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|_| StoreError::Misuse("a value that is no JSON"))
}
