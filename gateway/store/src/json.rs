//! Values that stores keep as JSON.

use serde::Serialize;

use crate::StoreError;

/// As JSON. Only maps with keys that are no strings could fail, and there are none.
pub(crate) fn to_json(value: &impl Serialize) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|_| StoreError::Misuse("a value that is no JSON"))
}
