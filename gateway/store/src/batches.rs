//! Batches: a file of requests, its lines, and the result of each.
//!
//! ```text
//! Validating ─► InProgress ─► Finalizing ─► Completed
//!      │             ├─► Finalizing (past its window) ─► Expired
//!      ├─► Failed    └─► Cancelling ─► Cancelled
//!      └─► Cancelling
//! ```

use async_trait::async_trait;
use bytes::Bytes;

use crate::{BatchId, FileId, Listing, Page, StoreError, Tenant};

/// Where a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchStatus {
    /// Its file is being read.
    Validating,
    /// Its file cannot be used.
    Failed,
    /// Its lines run.
    InProgress,
    /// Its results are being written to files.
    Finalizing,
    /// All lines have results.
    Completed,
    /// Its window ended before all lines had run.
    Expired,
    /// It was cancelled; lines in progress end.
    Cancelling,
    /// It has ended after a cancellation.
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

    /// As the API says it.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(status, _)| *status == self).map_or("failed", |(_, name)| name)
    }

    /// The status of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(_, known)| *known == name).map(|(status, _)| *status)
    }

    /// Whether nothing changes any more.
    pub fn is_end(self) -> bool {
        matches!(self, BatchStatus::Failed | BatchStatus::Completed | BatchStatus::Expired | BatchStatus::Cancelled)
    }
}

/// What a new batch is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBatch {
    /// URL path that every line is for.
    pub endpoint: String,
    /// Its requests.
    pub input: FileId,
    /// As the client wrote it: `24h`.
    pub window: String,
    /// When what has not run by then expires.
    pub expires: u64,
    /// JSON object, or empty.
    pub metadata: String,
    /// When the files that it makes are deleted by themselves.
    pub output_expires_after: Option<u64>,
    /// Now, in Unix seconds.
    pub created: u64,
    /// Batches of the tenant that may be open, this one included.
    pub tenant_open_max: u64,
}

/// When a batch came to a status; Unix seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchTimes {
    /// It was made.
    pub created: u64,
    /// Its window ends.
    pub expires: u64,
    /// Its lines began to run.
    pub in_progress: Option<u64>,
    /// Its files began to be written.
    pub finalizing: Option<u64>,
    /// It was cancelled.
    pub cancelling: Option<u64>,
    /// It ended.
    pub ended: Option<u64>,
}

/// Lines of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All.
    pub total: u64,
    /// With an answer.
    pub completed: u64,
    /// With an error.
    pub failed: u64,
}

/// A batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchRecord {
    /// Its id.
    pub id: BatchId,
    /// Where it is.
    pub status: BatchStatus,
    /// URL path that every line is for.
    pub endpoint: String,
    /// Its requests.
    pub input: FileId,
    /// Answers, once it has ended.
    pub output: Option<FileId>,
    /// Errors, once it has ended.
    pub errors: Option<FileId>,
    /// As the client wrote it.
    pub window: String,
    /// JSON object, or empty.
    pub metadata: String,
    /// Why its file cannot be used: JSON, or empty.
    pub faults: String,
    /// Seconds for which the files that it makes are kept.
    pub output_expires_after: Option<u64>,
    /// When.
    pub times: BatchTimes,
    /// Its lines.
    pub counts: Counts,
}

/// A batch that has not ended, for whoever runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenBatch {
    /// Whose it is.
    pub tenant: Tenant,
    /// The batch.
    pub batch: BatchRecord,
}

/// A line found in the input file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewLine {
    /// Place in the file, from 0.
    pub line: u32,
    /// The client's name for it.
    pub custom_id: String,
    /// Where it begins in the file.
    pub at: u64,
    /// Its size.
    pub bytes: u32,
}

/// A line that has no result yet.
pub type Line = NewLine;

/// The result of one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineResult {
    /// It was answered; else it goes to the errors file.
    pub ok: bool,
    /// The line of the output file, without its end.
    pub text: Bytes,
}

/// What became of a cancellation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// It is cancelling, now or already.
    Yes(BatchRecord),
    /// It has ended, or its files are being written.
    TooLate(BatchRecord),
    /// There is none.
    Absent,
}

/// How a batch ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedBatch {
    /// An end.
    pub status: BatchStatus,
    /// Unsealed file of the answers; sealed with the end.
    pub output: Option<FileId>,
    /// The same for the errors.
    pub errors: Option<FileId>,
    /// JSON, or empty.
    pub faults: String,
    /// Now, in Unix seconds.
    pub now: u64,
}

/// Keeps batches. The first methods are for clients; the others for the one process that runs batches.
#[async_trait]
pub trait Batches: Send + Sync + 'static {
    /// Makes a batch. `None`: there is no such input file.
    ///
    /// # Errors
    /// [`StoreError::Quota`] when the tenant has too many open.
    async fn create_batch(&self, tenant: &Tenant, new: NewBatch) -> Result<Option<BatchRecord>, StoreError>;

    /// One batch.
    async fn batch(&self, tenant: &Tenant, id: &BatchId) -> Result<Option<BatchRecord>, StoreError>;

    /// Batches.
    async fn batches(&self, tenant: &Tenant, page: &Page) -> Result<Listing<BatchRecord>, StoreError>;

    /// Asks a batch to end early.
    async fn cancel_batch(&self, tenant: &Tenant, id: &BatchId, now: u64) -> Result<Cancelled, StoreError>;

    /// Batches that have not ended, oldest first.
    async fn open_batches(&self, limit: u32) -> Result<Vec<OpenBatch>, StoreError>;

    /// Adds lines to a batch that is being validated; a line that is there already stays as it is.
    async fn admit_lines(&self, id: &BatchId, lines: Vec<NewLine>) -> Result<(), StoreError>;

    /// From validating to in progress; no change in any other status.
    async fn start_batch(&self, id: &BatchId, now: u64) -> Result<(), StoreError>;

    /// Lines without a result, from `from` on, in order.
    async fn waiting_lines(&self, id: &BatchId, from: u32, limit: u32) -> Result<Vec<Line>, StoreError>;

    /// Keeps the result of a line and counts it. `false`: the line has one already, and this one is dropped.
    async fn finish_line(&self, id: &BatchId, line: u32, result: LineResult) -> Result<bool, StoreError>;

    /// To finalizing, from in progress; no change in any other status.
    async fn finalize_batch(&self, id: &BatchId, now: u64) -> Result<(), StoreError>;

    /// Bytes of all results with that outcome, without line ends, and how many there are.
    async fn result_bytes(&self, id: &BatchId, ok: bool) -> Result<(u64, u64), StoreError>;

    /// Results with that outcome from line `from` on, in order: as many as fit into `bytes_max`, at least one.
    async fn results(
        &self,
        id: &BatchId,
        ok: bool,
        from: u32,
        bytes_max: usize,
    ) -> Result<Vec<(u32, Bytes)>, StoreError>;

    /// Ends a batch, seals its files and drops its lines, all at once. `false`: it had ended.
    async fn end_batch(&self, id: &BatchId, end: EndedBatch) -> Result<bool, StoreError>;
}
