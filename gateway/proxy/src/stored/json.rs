//! JSON of records as the API shows them, and of the lines of a batch's files.

use bytes::{BufMut, Bytes, BytesMut};
use penstock_dialects::openai::Listed;
use penstock_store::{BatchRecord, BatchStatus, FileRecord, Listing};
use penstock_types::{ApiError, write};
use serde::Serialize;
use serde_json::value::RawValue;

#[derive(Serialize)]
pub(super) struct FileObject<'a> {
    id: &'a str,
    object: &'static str,
    bytes: u64,
    created_at: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<u64>,
    filename: &'a str,
    purpose: &'a str,
    // Deprecated, and still read by clients that wait for it.
    status: &'static str,
}

pub(super) fn file(record: &FileRecord) -> FileObject<'_> {
    FileObject {
        id: record.id.as_str(),
        object: "file",
        bytes: record.bytes,
        created_at: record.created,
        expires_at: record.expires,
        filename: &record.name,
        purpose: &record.purpose,
        status: "processed",
    }
}

/// One page of a listing, in the API's form for lists.
#[derive(Serialize)]
pub(super) struct ListObject<T> {
    object: &'static str,
    data: Vec<T>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

pub(super) fn list<'a, R, T: Serialize>(
    listing: &'a penstock_store::Listing<R>,
    id: impl Fn(&R) -> &str,
    show: impl Fn(&'a R) -> T,
) -> ListObject<T> {
    ListObject {
        object: "list",
        first_id: listing.items.first().map(|item| id(item).to_owned()),
        last_id: listing.items.last().map(|item| id(item).to_owned()),
        data: listing.items.iter().map(show).collect(),
        has_more: listing.more,
    }
}

/// JSON of one page of a list whose entries are written by `show`.
///
/// # Errors
/// Those of `show`.
pub(super) fn page_of<'a>(
    listing: &Listing<Listed<'a>>,
    show: impl Fn(&Listed<'a>) -> Result<Bytes, ApiError>,
) -> Result<Bytes, ApiError> {
    let mut out = BytesMut::from(&b"{\"object\":\"list\",\"data\":["[..]);
    for (at, entry) in listing.items.iter().enumerate() {
        if at > 0 {
            out.put_u8(b',');
        }
        out.put_slice(&show(entry)?);
    }
    out.put_u8(b']');
    for (name, entry) in [("first_id", listing.items.first()), ("last_id", listing.items.last())] {
        out.put_slice(format!(",\"{name}\":").as_bytes());
        match entry {
            Some(entry) => write::string(&mut out, &entry.id),
            None => out.put_slice(b"null"),
        }
    }
    out.put_slice(format!(",\"has_more\":{}}}", listing.more).as_bytes());
    Ok(out.freeze())
}

#[derive(Serialize)]
pub(super) struct DeletedObject<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) deleted: bool,
}

#[derive(Serialize)]
pub(super) struct BatchObject<'a> {
    id: &'a str,
    object: &'static str,
    endpoint: &'a str,
    errors: Option<Box<RawValue>>,
    input_file_id: &'a str,
    completion_window: &'a str,
    status: &'static str,
    output_file_id: Option<&'a str>,
    error_file_id: Option<&'a str>,
    created_at: u64,
    in_progress_at: Option<u64>,
    expires_at: u64,
    finalizing_at: Option<u64>,
    completed_at: Option<u64>,
    failed_at: Option<u64>,
    expired_at: Option<u64>,
    cancelling_at: Option<u64>,
    cancelled_at: Option<u64>,
    request_counts: CountsObject,
    metadata: Option<Box<RawValue>>,
}

#[derive(Serialize)]
struct CountsObject {
    total: u64,
    completed: u64,
    failed: u64,
}

/// JSON text from the store; null where it cannot be read.
fn raw(text: &str) -> Option<Box<RawValue>> {
    RawValue::from_string(text.to_owned()).ok()
}

pub(super) fn batch(record: &BatchRecord) -> BatchObject<'_> {
    let ended = |status| record.times.ended.filter(|_| record.status == status);
    BatchObject {
        id: record.id.as_str(),
        object: "batch",
        endpoint: &record.endpoint,
        errors: raw(&record.faults),
        input_file_id: record.input.as_str(),
        completion_window: &record.window,
        status: record.status.name(),
        output_file_id: record.output.as_ref().map(|id| id.as_str()),
        error_file_id: record.errors.as_ref().map(|id| id.as_str()),
        created_at: record.times.created,
        in_progress_at: record.times.in_progress,
        expires_at: record.times.expires,
        finalizing_at: record.times.finalizing,
        completed_at: ended(BatchStatus::Completed),
        failed_at: ended(BatchStatus::Failed),
        expired_at: ended(BatchStatus::Expired),
        cancelling_at: record.times.cancelling,
        cancelled_at: ended(BatchStatus::Cancelled),
        request_counts: CountsObject {
            total: record.counts.total,
            completed: record.counts.completed,
            failed: record.counts.failed,
        },
        metadata: raw(&record.metadata),
    }
}
