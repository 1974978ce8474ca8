//! JSON of records as the API shows them, and of the lines of a batch's files.

use bytes::Bytes;
use penstock_store::{BatchRecord, BatchStatus, FileRecord};
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

/// Value of `errors` in a batch whose input file has faults.
#[derive(Serialize)]
struct BatchErrors<'a> {
    object: &'static str,
    data: Vec<BatchFault<'a>>,
}

/// One fault of a batch's input file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct BatchFault<'a> {
    /// Error code, for programs.
    pub(crate) code: &'a str,
    /// Text of the fault, for the client.
    pub(crate) message: String,
    /// Field of the line that is at fault; `None`: the line as a whole.
    pub(crate) param: Option<&'a str>,
    /// Line of the file, from 1; `None`: the file as a whole.
    pub(crate) line: Option<u32>,
}

/// JSON of the field `errors` of a batch, made of these faults.
pub(crate) fn batch_error(data: Vec<BatchFault<'_>>) -> String {
    serde_json::to_string(&BatchErrors { object: "list", data }).unwrap_or_default()
}

#[derive(Serialize)]
struct ResultLine<'a> {
    id: &'a str,
    custom_id: &'a str,
    response: Option<LineResponse<'a>>,
    error: Option<LineError<'a>>,
}

#[derive(Serialize)]
struct LineResponse<'a> {
    status_code: u16,
    request_id: &'a str,
    body: &'a RawValue,
}

#[derive(Serialize)]
struct LineError<'a> {
    code: &'a str,
    message: &'a str,
}

/// Line of the output file or of the errors file, for a request that was answered. `None`: the body is not JSON.
pub(crate) fn result_line(id: &str, custom_id: &str, status: u16, request_id: &str, body: &[u8]) -> Option<Bytes> {
    let text = std::str::from_utf8(body).ok()?;
    // Outside strings a line end is only white space, and inside it cannot be: the answer of an upstream becomes one line.
    let text =
        if text.contains(['\n', '\r']) { text.replace(['\n', '\r'], " ").into() } else { std::borrow::Cow::from(text) };
    let body: &RawValue = serde_json::from_str(text.trim()).ok()?;
    let response = Some(LineResponse { status_code: status, request_id, body });
    serde_json::to_vec(&ResultLine { id, custom_id, response, error: None }).ok().map(Bytes::from)
}

/// Line of the errors file for a request that was not answered.
pub(crate) fn error_line(id: &str, custom_id: &str, code: &str, message: &str) -> Bytes {
    let line = ResultLine { id, custom_id, response: None, error: Some(LineError { code, message }) };
    serde_json::to_vec(&line).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pretty_answer_becomes_one_line() {
        let line = result_line("batch_req_1", "a\"b", 200, "req_1", b"{\n  \"x\": \"a\\nb\"\r\n}\n").expect("JSON");
        assert_eq!(
            String::from_utf8_lossy(&line),
            r#"{"id":"batch_req_1","custom_id":"a\"b","response":{"status_code":200,"request_id":"req_1","body":{   "x": "a\nb"  }},"error":null}"#
        );
        assert_eq!(result_line("a", "b", 200, "c", b"<html>"), None);
        assert_eq!(result_line("a", "b", 200, "c", b"{}{}"), None);
    }

    #[test]
    fn what_was_not_answered_has_no_response() {
        assert_eq!(
            String::from_utf8_lossy(&error_line("batch_req_1", "a", "batch_expired", "Too late.")),
            r#"{"id":"batch_req_1","custom_id":"a","response":null,"error":{"code":"batch_expired","message":"Too late."}}"#
        );
    }
}
