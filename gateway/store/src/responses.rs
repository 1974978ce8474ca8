//! Stored responses: what was asked and answered, so that a later request can go on from there.

use async_trait::async_trait;
use bytes::Bytes;

use crate::{ResponseId, StoreError, Tenant};

/// Where a response is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseStatus {
    /// Waits for its turn in the background.
    Queued,
    /// Is being answered in the background.
    InProgress,
    /// Nothing changes any more.
    Ended,
}

/// A stored response. All documents are JSON text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseRecord {
    /// Its id.
    pub id: ResponseId,
    /// Where it is.
    pub status: ResponseStatus,
    /// The response that it goes on from.
    pub previous: Option<ResponseId>,
    /// Unix seconds.
    pub created: u64,
    /// When it is deleted by itself.
    pub expires: u64,
    /// The resource as it is answered.
    pub body: Bytes,
    /// List of the items that came with the request.
    pub input: Bytes,
    /// List of the items that were answered.
    pub output: Bytes,
    /// The request, while it waits or runs in the background; else empty.
    pub request: Bytes,
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// List of the items that came with the request.
    pub input: Bytes,
    /// List of the items that were answered.
    pub output: Bytes,
}

/// A response that waits or runs in the background, for whoever runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenResponse {
    /// Whose it is.
    pub tenant: Tenant,
    /// The response.
    pub response: ResponseRecord,
}

/// Keeps responses.
#[async_trait]
pub trait Responses: Send + Sync + 'static {
    /// Keeps a new response.
    ///
    /// # Errors
    /// [`StoreError::Quota`] when the tenant has `tenant_max` already.
    async fn save_response(&self, tenant: &Tenant, response: ResponseRecord, tenant_max: u64)
    -> Result<(), StoreError>;

    /// One response.
    async fn response(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<ResponseRecord>, StoreError>;

    /// Deletes a response. `false`: there is none.
    async fn delete_response(&self, tenant: &Tenant, id: &ResponseId) -> Result<bool, StoreError>;

    /// Changes a response that has not ended: status, body and output. `false`: it has ended, or is gone.
    async fn update_response(
        &self,
        id: &ResponseId,
        status: ResponseStatus,
        body: Bytes,
        output: Bytes,
    ) -> Result<bool, StoreError>;

    /// The conversation that ends with response `id`, oldest turn first. `None`: there is no such response. Turns that were
    /// deleted end it.
    ///
    /// # Errors
    /// [`StoreError::Quota`] when it has more than `turns_max` turns or `bytes_max` bytes.
    async fn conversation(
        &self,
        tenant: &Tenant,
        id: &ResponseId,
        turns_max: u32,
        bytes_max: u64,
    ) -> Result<Option<Vec<Turn>>, StoreError>;

    /// Responses that wait or run in the background, oldest first.
    async fn open_responses(&self, limit: u32) -> Result<Vec<OpenResponse>, StoreError>;

    /// Deletes responses that have expired. How many.
    async fn sweep_responses(&self, now: u64) -> Result<u64, StoreError>;
}
