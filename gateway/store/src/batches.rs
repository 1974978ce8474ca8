//! Batches: an input file of requests, its lines, and the result of each line.
//!
//! States of a batch:
//!
//! ```text
//! Validating ─► InProgress ─► Finalizing ─► Completed
//!      │             ├─► Finalizing (past its window) ─► Expired
//!      ├─► Failed    └─► Cancelling ─► Cancelled
//!      └─► Cancelling
//! ```

use async_trait::async_trait;
use bytes::Bytes;

use crate::{BatchId, Deleted, FileId, Listing, Page, StoreError, Tenant};

/// State of a batch, from the reading of its input file to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchStatus {
    /// The input file is being read.
    Validating,
    /// The input file cannot be used.
    Failed,
    /// The batch's lines are being run as requests.
    InProgress,
    /// All lines have run, and the results are being written to files.
    Finalizing,
    /// All lines have results, and the output files are sealed.
    Completed,
    /// The window ended before all lines had run.
    Expired,
    /// The batch was cancelled; lines in progress end.
    Cancelling,
    /// The batch has ended after a cancellation.
    Cancelled,
}

impl BatchStatus {
    /// Every status, with its name in the API and in stores.
    pub const NAMES: [(BatchStatus, &'static str); 8] = [
        (BatchStatus::Validating, "validating"),
        (BatchStatus::Failed, "failed"),
        (BatchStatus::InProgress, "in_progress"),
        (BatchStatus::Finalizing, "finalizing"),
        (BatchStatus::Completed, "completed"),
        (BatchStatus::Expired, "expired"),
        (BatchStatus::Cancelling, "cancelling"),
        (BatchStatus::Cancelled, "cancelled"),
    ];

    /// Name of the status in the API and in stores.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(status, _)| *status == self).map_or("failed", |(_, name)| name)
    }

    /// Status with that name; `None` for an unknown one.
    pub fn parse(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(_, known)| *known == name).map(|(status, _)| *status)
    }

    /// Returns true if the status is final: the batch changes no more.
    pub fn is_end(self) -> bool {
        matches!(self, BatchStatus::Failed | BatchStatus::Completed | BatchStatus::Expired | BatchStatus::Cancelled)
    }
}

/// Fields of a new batch, as the client asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBatch {
    /// URL path that every line of the input file asks for.
    pub endpoint: String,
    /// Input file, whose lines are the requests.
    pub input: FileId,
    /// Completion window as the client wrote it: `24h`.
    pub window: String,
    /// End of the window in Unix seconds; lines that have not run by then expire.
    pub expires: u64,
    /// Metadata of the client: a JSON object, or empty.
    pub metadata: String,
    /// Retention of the output files in seconds; `None`: without end.
    pub output_expires_after: Option<u64>,
    /// Time of creation in Unix seconds.
    pub created: u64,
    /// Most open batches of the tenant, this one included.
    pub tenant_open_max: u64,
    /// Most batches of the tenant, this one included. The oldest that have ended and whose files of results are gone make
    /// room.
    pub tenant_batches_max: u64,
    /// Most bytes of results that the tenant's batches may keep: a tenant with as many creates no further batch.
    pub tenant_output_bytes_max: u64,
}

/// Times of a batch's transitions, in Unix seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchTimes {
    /// Time at which the batch was created.
    pub created: u64,
    /// Time at which the completion window ends.
    pub expires: u64,
    /// Time at which the lines began to run; `None` before that.
    pub in_progress: Option<u64>,
    /// Begin of writing the output files.
    pub finalizing: Option<u64>,
    /// Time at which the cancellation was asked for; `None`: it was not.
    pub cancelling: Option<u64>,
    /// Time at which the batch ended, in whatever way; `None` before that.
    pub ended: Option<u64>,
}

/// Numbers of a batch's lines, by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of all lines of the input file.
    pub total: u64,
    /// Number of lines with an answer.
    pub completed: u64,
    /// Number of lines with an error.
    pub failed: u64,
}

/// Batch as the store keeps it: the client's fields, state, files and counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRecord {
    /// Id of the batch, as clients see it.
    pub id: BatchId,
    /// Present state of the batch.
    pub status: BatchStatus,
    /// URL path that every line of the input file asks for.
    pub endpoint: String,
    /// Input file, whose lines are the requests.
    pub input: FileId,
    /// File of the answers, once the batch has ended.
    pub output: Option<FileId>,
    /// File of the errors, once the batch has ended.
    pub errors: Option<FileId>,
    /// Completion window as the client wrote it.
    pub window: String,
    /// Metadata of the client: a JSON object, or empty.
    pub metadata: String,
    /// Faults of an input file that cannot be used: JSON, or empty.
    pub faults: String,
    /// Retention of the output files in seconds; `None`: without end.
    pub output_expires_after: Option<u64>,
    /// Times of the batch's transitions, in Unix seconds.
    pub times: BatchTimes,
    /// Numbers of the batch's lines, by result.
    pub counts: Counts,
}

/// Unfinished batch with its tenant, for the process that runs batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenBatch {
    /// Tenant that created the batch.
    pub tenant: Tenant,
    /// Record of the batch, as the store keeps it.
    pub batch: BatchRecord,
}

/// Line of a batch's input file: its place in the file and the client's id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewLine {
    /// Index of the line in the input file, from 0.
    pub line: u32,
    /// Id that the client gave the line, unique within its file.
    pub custom_id: String,
    /// Byte offset of the line in the file.
    pub at: u64,
    /// Length of the line in bytes, for reading it from the file.
    pub bytes: u32,
}

/// Line of a batch that has no result yet.
pub type Line = NewLine;

/// Result of one line, for the output file or the errors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineResult {
    /// True if the line was answered; else the result goes to the errors file.
    pub ok: bool,
    /// Line of the output file, without its line end.
    pub text: Bytes,
}

/// Outcome of the request to cancel a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// The batch is being cancelled or was cancelled, now or by an earlier request.
    Yes(BatchRecord),
    /// The batch has ended, or its files are being written.
    TooLate(BatchRecord),
    /// The tenant has no such batch.
    Absent,
}

/// Final state of a batch, with the files to seal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedBatch {
    /// Final status of the batch, one of those with [`BatchStatus::is_end`].
    pub status: BatchStatus,
    /// Unsealed file of the answers; it is sealed in the same transaction.
    pub output: Option<FileId>,
    /// Unsealed file of the errors; it is sealed in the same transaction.
    pub errors: Option<FileId>,
    /// Faults of the input file: JSON, or empty.
    pub faults: String,
    /// Time of the end in Unix seconds.
    pub now: u64,
}

/// Batches that a list shows, by their endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listed<'a> {
    /// Batches of this endpoint.
    Of(&'a str),
    /// Batches of every other endpoint.
    Except(&'a str),
}

impl<'a> Listed<'a> {
    /// Endpoint, and whether batches of it are listed.
    pub(crate) fn parts(self) -> (&'a str, bool) {
        match self {
            Listed::Of(endpoint) => (endpoint, true),
            Listed::Except(endpoint) => (endpoint, false),
        }
    }
}

/// Store of batches. The first five methods are for clients; the others are for the one process that runs batches.
#[async_trait]
pub trait Batches: Send + Sync + 'static {
    /// Creates a batch. `None`: the tenant has no such input file.
    ///
    /// # Errors
    /// [`StoreError::Quota`] if the tenant has too many batches, open or in all, or if its batches keep too many bytes;
    /// [`StoreError::Full`] without room.
    async fn create_batch(&self, tenant: &Tenant, new: NewBatch) -> Result<Option<BatchRecord>, StoreError>;

    /// Reads one batch of the tenant; `None`: no such batch.
    async fn batch(&self, tenant: &Tenant, id: &BatchId) -> Result<Option<BatchRecord>, StoreError>;

    /// Lists the tenant's batches by the time of their creation.
    async fn batches(
        &self,
        tenant: &Tenant,
        listed: Listed<'_>,
        page: &Page,
    ) -> Result<Listing<BatchRecord>, StoreError>;

    /// Deletes a batch that has ended, with its files. [`Deleted::InUse`]: it has not ended.
    async fn delete_batch(&self, tenant: &Tenant, id: &BatchId) -> Result<Deleted, StoreError>;

    /// Requests that a batch end early.
    async fn cancel_batch(&self, tenant: &Tenant, id: &BatchId, now: u64) -> Result<Cancelled, StoreError>;

    /// Lists unfinished batches of all tenants: the oldest of each tenant, then the second of each, and so on.
    async fn open_batches(&self, limit: u32) -> Result<Vec<OpenBatch>, StoreError>;

    /// Adds lines to a batch that is being validated; lines that exist already are kept.
    async fn admit_lines(&self, id: &BatchId, lines: Vec<NewLine>) -> Result<(), StoreError>;

    /// Moves a batch from validating to in progress; no change in any other status.
    async fn start_batch(&self, id: &BatchId, now: u64) -> Result<(), StoreError>;

    /// Lists lines without a result, from index `from` on, in order.
    async fn waiting_lines(&self, id: &BatchId, from: u32, limit: u32) -> Result<Vec<Line>, StoreError>;

    /// Stores the result of a line and counts it, in one transaction. `false`: the line has a result already, and this
    /// one is dropped.
    async fn finish_line(&self, id: &BatchId, line: u32, result: LineResult) -> Result<bool, StoreError>;

    /// Moves a batch from in progress to finalizing; no change in any other status.
    async fn finalize_batch(&self, id: &BatchId, now: u64) -> Result<(), StoreError>;

    /// Total bytes of all results with that outcome, without line ends, and the number of these results.
    async fn result_bytes(&self, id: &BatchId, ok: bool) -> Result<(u64, u64), StoreError>;

    /// Total bytes that the batches of a tenant keep: files of results, and results of batches that have not ended, with a
    /// line end each. Cost: no result is read.
    async fn output_bytes(&self, tenant: &Tenant) -> Result<u64, StoreError>;

    /// Results with that outcome from index `from` on, in order: as many as fit into `bytes_max`, at least one.
    async fn results(
        &self,
        id: &BatchId,
        ok: bool,
        from: u32,
        bytes_max: usize,
    ) -> Result<Vec<(u32, Bytes)>, StoreError>;

    /// Ends a batch and seals its files, in one transaction; its lines are deleted afterwards, in pieces. `false`: the batch
    /// had ended before.
    async fn end_batch(&self, id: &BatchId, end: EndedBatch) -> Result<bool, StoreError>;

    /// Deletes some batches that ended before `before` and whose files of results are gone, and some lines that ended
    /// batches have left; returns the number of both.
    async fn sweep_batches(&self, before: u64) -> Result<u64, StoreError>;
}
