//! Stored responses: requests and answers that a later request can continue from.

use async_trait::async_trait;
use bytes::Bytes;

use crate::{ResponseId, StoreError, Tenant};

/// State of a stored response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseStatus {
    /// The response waits for its turn in the background.
    Queued,
    /// The response is being answered in the background.
    InProgress,
    /// The response has ended and does not change any more.
    Ended,
}

/// Stored response. All documents are JSON text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseRecord {
    /// Id of the response, as clients see it.
    pub id: ResponseId,
    /// State of the response; only an unfinished one can be changed.
    pub status: ResponseStatus,
    /// Id of the response that this one continues; `None`: the first turn of a conversation.
    pub previous: Option<ResponseId>,
    /// Time of creation in Unix seconds.
    pub created: u64,
    /// Time of automatic deletion in Unix seconds.
    pub expires: u64,
    /// Response document as the API returns it.
    pub body: Bytes,
    /// List of the input items of the request.
    pub input: Bytes,
    /// List of the output items of the answer.
    pub output: Bytes,
    /// Request document while the response waits or runs in the background; else empty.
    pub request: Bytes,
    /// Bytes of the events kept for a response that was streamed in the background and has ended; else 0. Read by
    /// [`Responses::response_events`].
    pub event_bytes: u64,
}

/// New state of an unfinished response, with its documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseChange {
    /// State of the response from now on.
    pub status: ResponseStatus,
    /// Response document as the API returns it.
    pub body: Bytes,
    /// List of the output items of the answer.
    pub output: Bytes,
    /// Events of a response that was streamed in the background; else empty.
    pub events: Bytes,
}

/// One turn of a conversation, for the input of the next: a request's items and the answer's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// List of the input items of the request.
    pub input: Bytes,
    /// List of the output items of the answer.
    pub output: Bytes,
}

/// Unfinished background response, for the process that runs them. Its documents are read when its turn comes, since
/// they can be large.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenResponse {
    /// Tenant that the response belongs to.
    pub tenant: Tenant,
    /// Id of the unfinished response.
    pub id: ResponseId,
}

/// State of a response without its documents, which can be large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseState {
    /// State of the response.
    pub status: ResponseStatus,
    /// Bytes of its events, as [`ResponseRecord::event_bytes`].
    pub event_bytes: u64,
}

/// Bytes that a response counts besides its documents: ids, times, index entries.
pub const RESPONSE_ROW_BYTES: u64 = 512;

impl ResponseRecord {
    /// Bytes that the response counts against bounds.
    pub fn bytes(&self) -> u64 {
        let documents = [&self.body, &self.input, &self.output, &self.request];
        RESPONSE_ROW_BYTES + self.event_bytes + documents.iter().map(|document| document.len() as u64).sum::<u64>()
    }
}

/// Bounds of stored responses. When a bound is reached, ended responses are deleted, oldest first: the tenant's own for
/// its bounds, and those of the tenant with the most bytes for the bound of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseRoom {
    /// Most responses that one tenant may have.
    pub tenant_max: u64,
    /// Most bytes that one tenant's responses may have in all.
    pub tenant_bytes_max: u64,
    /// Most bytes of the responses of all tenants.
    pub bytes_max: u64,
}

/// Store of responses, which clients read, continue and delete by id.
#[async_trait]
pub trait Responses: Send + Sync + 'static {
    /// Stores a new response. Room is made before anything is written, by deleting older responses that have ended.
    ///
    /// # Errors
    /// [`StoreError::Quota`] if there is no room beside the unfinished responses; then nothing is deleted.
    async fn save_response(
        &self,
        tenant: &Tenant,
        response: ResponseRecord,
        room: ResponseRoom,
    ) -> Result<(), StoreError>;

    /// Reads one response of the tenant; `None`: no such response.
    async fn response(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<ResponseRecord>, StoreError>;

    /// Reads the state of one response of the tenant; `None`: no such response.
    async fn response_state(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<ResponseState>, StoreError>;

    /// Deletes a response. `false`: no such response.
    async fn delete_response(&self, tenant: &Tenant, id: &ResponseId) -> Result<bool, StoreError>;

    /// Reads the events kept for a response that was streamed in the background. `None`: no such response.
    async fn response_events(&self, tenant: &Tenant, id: &ResponseId) -> Result<Option<Bytes>, StoreError>;

    /// Changes an unfinished response: status, body, output and events. `false`: it has ended or was deleted. Additional bytes
    /// are taken from `room` as in [`Responses::save_response`]; `None`: without a bound, for the gateway's own
    /// documents that report a lack of room.
    ///
    /// # Errors
    /// [`StoreError::Quota`] if there is no room; then the response is unchanged.
    async fn update_response(
        &self,
        id: &ResponseId,
        change: ResponseChange,
        room: Option<ResponseRoom>,
    ) -> Result<bool, StoreError>;

    /// Reads the conversation that ends with response `id`, oldest turn first. `None`: no such response. The
    /// conversation begins behind the last turn that was deleted.
    ///
    /// # Errors
    /// [`StoreError::Quota`] if it has more than `turns_max` turns or `bytes_max` bytes.
    async fn conversation(
        &self,
        tenant: &Tenant,
        id: &ResponseId,
        turns_max: u32,
        bytes_max: u64,
    ) -> Result<Option<Vec<Turn>>, StoreError>;

    /// Lists unfinished background responses: the oldest `each` of every tenant, at most `limit`. The oldest of every
    /// tenant come first, then the second oldest of each, and so on.
    async fn open_responses(&self, each: u32, limit: u32) -> Result<Vec<OpenResponse>, StoreError>;

    /// Bytes of all responses, as counted against bounds.
    async fn response_bytes(&self) -> Result<u64, StoreError>;

    /// Deletes some expired responses; returns their number.
    async fn sweep_responses(&self, now: u64) -> Result<u64, StoreError>;
}
