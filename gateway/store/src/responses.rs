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

/// A response that waits or runs in the background, for whoever runs it. Its documents are read when its turn comes: they can be large.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenResponse {
    /// Whose it is.
    pub tenant: Tenant,
    /// Its id.
    pub id: ResponseId,
}

/// Bytes that a response counts beside its documents: ids, times, places in indexes.
pub const RESPONSE_ROW_BYTES: u64 = 512;

impl ResponseRecord {
    /// Bytes that it counts in the store.
    pub fn bytes(&self) -> u64 {
        let documents = [&self.body, &self.input, &self.output, &self.request];
        RESPONSE_ROW_BYTES + documents.iter().map(|document| document.len() as u64).sum::<u64>()
    }
}

/// Room for stored responses. When it is used up, responses that have ended are deleted, oldest first: those of the tenant for its own
/// bounds, those of the tenant that keeps most for the bound of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseRoom {
    /// Responses of one tenant.
    pub tenant_max: u64,
    /// Bytes of one tenant's responses.
    pub tenant_bytes_max: u64,
    /// Bytes of all responses.
    pub bytes_max: u64,
}

/// Keeps responses.
#[async_trait]
pub trait Responses: Send + Sync + 'static {
    /// Keeps a new response. Its room is taken before anything is written, and older responses that have ended make it.
    ///
    /// # Errors
    /// [`StoreError::Quota`] when there is no room beside responses that have not ended; then nothing is deleted.
    async fn save_response(
        &self,
        tenant: &Tenant,
        response: ResponseRecord,
        room: ResponseRoom,
    ) -> Result<(), StoreError>;

    /// One response.
    async fn response(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<ResponseRecord>, StoreError>;

    /// Deletes a response. `false`: there is none.
    async fn delete_response(&self, tenant: &Tenant, id: &ResponseId) -> Result<bool, StoreError>;

    /// Changes a response that has not ended: status, body and output. `false`: it has ended, or is gone. What it needs more is taken of
    /// `room`, as in [`Responses::save_response`]; `None`: whatever it needs, for documents of our own that say that there is no room.
    ///
    /// # Errors
    /// [`StoreError::Quota`] when there is no room; then it is as it was.
    async fn update_response(
        &self,
        id: &ResponseId,
        status: ResponseStatus,
        body: Bytes,
        output: Bytes,
        room: Option<ResponseRoom>,
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

    /// Responses that wait or run in the background: the oldest `each` of every tenant, at most `limit`. The oldest of every tenant
    /// come first, then the next of every tenant.
    async fn open_responses(&self, each: u32, limit: u32) -> Result<Vec<OpenResponse>, StoreError>;

    /// Bytes of all responses.
    async fn response_bytes(&self) -> Result<u64, StoreError>;

    /// Deletes responses that have expired. How many.
    async fn sweep_responses(&self, now: u64) -> Result<u64, StoreError>;
}
