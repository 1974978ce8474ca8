//! Routes of Anthropic's `/v1/messages/batches`, over the same store and runner as OpenAI's batches.
//!
//! The requests of a batch become its input file, a line each; the runner answers the lines and writes the files of
//! results, in Anthropic's shapes. These files and batches are not visible in OpenAI's API, nor those of OpenAI's in this
//! one. Ids differ in their prefix alone: `msgbatch_X` here is `batch_X` in the store.

use std::collections::HashSet;

use bytes::Bytes;
use http::{HeaderValue, header};
use penstock_dialects::anthropic::rfc3339;
use penstock_proto::ErrorKind;
use penstock_store::{
    BatchId, BatchRecord, BatchStatus, Cancelled, Deleted, Listed, Listing, NewBatch, NewFile, Order, Page,
};
use penstock_types::json::{Fault, Reader};
use penstock_types::{ApiError, Bounds};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::batches::BATCHES_MAX;
use super::{Visit, absent, answer, failed, files};
use crate::batch_text::{MESSAGE_BATCH, MESSAGES, Tally, message_request};
use crate::handler::{End, decoded, read_body};
use crate::list_query as query;
use penstock_base::clock::unix_seconds;
use penstock_base::error::Failure;

/// Seconds in which a batch is to be answered, as the API has it.
const WINDOW_SECONDS: u64 = 24 * 3600;
/// Seconds for which results are kept after the end of a batch: 29 days.
const RESULT_SECONDS: u64 = 29 * 86_400;
/// Prefixes of an id in this API and in the store.
const PREFIXES: (&str, &str) = ("msgbatch_", "batch_");

/// Body of a request that makes a batch.
#[derive(Deserialize)]
struct Form<'a> {
    #[serde(borrow)]
    requests: Option<&'a RawValue>,
}

/// Batch as the API shows it.
#[derive(Serialize)]
struct Shown {
    id: String,
    r#type: &'static str,
    processing_status: &'static str,
    request_counts: ShownCounts,
    ended_at: Option<String>,
    created_at: String,
    expires_at: String,
    archived_at: Option<String>,
    cancel_initiated_at: Option<String>,
    results_url: Option<String>,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct ShownCounts {
    processing: u64,
    succeeded: u64,
    errored: u64,
    canceled: u64,
    expired: u64,
}

/// Page of a list, in this API's form.
#[derive(Serialize)]
struct ShownPage {
    data: Vec<Shown>,
    has_more: bool,
    first_id: Option<String>,
    last_id: Option<String>,
}

#[derive(Serialize)]
struct ShownDeleted<'a> {
    id: &'a str,
    r#type: &'static str,
}

fn shown_id(id: &BatchId) -> String {
    format!("{}{}", PREFIXES.0, id.as_str().strip_prefix(PREFIXES.1).unwrap_or_default())
}

fn known(id: &str) -> Option<BatchId> {
    BatchId::parse(&format!("{}{}", PREFIXES.1, id.strip_prefix(PREFIXES.0)?))
}

/// Counts: every request is processing until the batch has ended, as in the API.
fn counts(batch: &BatchRecord) -> ShownCounts {
    let asked = batch.metadata.parse().unwrap_or(0);
    if !batch.status.is_end() {
        return ShownCounts { processing: asked.max(batch.counts.total), ..ShownCounts::default() };
    }
    if batch.status == BatchStatus::Failed {
        return ShownCounts { errored: asked, ..ShownCounts::default() };
    }
    let Tally { canceled, expired } = Tally::parse(&batch.faults);
    let errored = batch.counts.failed.saturating_sub(canceled + expired);
    ShownCounts { processing: 0, succeeded: batch.counts.completed, errored, canceled, expired }
}

fn shown(visit: &Visit<'_>, batch: &BatchRecord) -> Shown {
    let ended = batch.status.is_end();
    let archived = batch.times.ended.map(|at| at + RESULT_SECONDS).filter(|at| *at <= unix_seconds());
    let id = shown_id(&batch.id);
    Shown {
        r#type: "message_batch",
        processing_status: match batch.status {
            BatchStatus::Cancelling => "canceling",
            _ if ended => "ended",
            _ => "in_progress",
        },
        request_counts: counts(batch),
        ended_at: batch.times.ended.map(rfc3339),
        created_at: rfc3339(batch.times.created),
        expires_at: rfc3339(batch.times.expires),
        archived_at: archived.map(rfc3339),
        cancel_initiated_at: batch.times.cancelling.map(rfc3339),
        results_url: (ended && archived.is_none())
            .then(|| format!("{}/v1/messages/batches/{id}/results", origin(visit))),
        id,
    }
}

/// Address of this gateway as its client knows it; empty for a client that names none.
fn origin(visit: &Visit<'_>) -> String {
    let text = |name: &str| visit.exchange.head.headers.get(name).and_then(|value| value.to_str().ok());
    let Some(host) = text("host") else { return String::new() };
    let is_tls = visit.exchange.peer().is_some() && visit.gateway.certificate.get().is_some();
    let scheme = if is_tls || text("x-forwarded-proto") == Some("https") { "https" } else { "http" };
    format!("{scheme}://{host}")
}

async fn find(visit: &Visit<'_>, id: &str) -> Result<BatchRecord, Failure> {
    let none = || absent("MessageBatch", id);
    let found = visit.keeper.store.batch(&visit.tenant, &known(id).ok_or_else(none)?).await.map_err(failed)?;
    found.filter(|batch| batch.endpoint == MESSAGES).ok_or_else(none)
}

pub(super) async fn create(visit: &mut Visit<'_>) -> Result<(), End> {
    let headers = visit.exchange.head.headers.clone();
    let body = read_body(&visit.gateway.bodies, visit.exchange, &headers).await?;
    let config = visit.gateway.serving().config.clone();
    let lines_max = config.batches.lines_max as usize;
    let ((content, count), _lease) = decoded(body, move |bytes, _: &Bounds| read(bytes, lines_max)).await?;
    if content.len() as u64 > config.store.file_bytes_max {
        let message = format!("The requests of a batch may have {} bytes.", config.store.file_bytes_max);
        return Err(Failure::new(ErrorKind::TooLarge, message).into());
    }
    // First: a batch of somebody whom nobody knows could not run, and no client could delete its file.
    let store = visit.keeper.store.clone();
    visit.gateway.guard.keep_identity(store.as_ref(), visit.principal).await.map_err(failed)?;
    let now = unix_seconds();
    let file = NewFile {
        purpose: MESSAGE_BATCH.into(),
        name: "requests.jsonl".into(),
        bytes: content.len() as u64,
        created: now,
        expires: Some(now + WINDOW_SECONDS + RESULT_SECONDS),
        tenant_bytes_max: config.store.key_bytes_max,
        tenant_files_max: files::FILES_MAX,
    };
    let file = files::put(visit, file, content).await?;
    let new = NewBatch {
        endpoint: MESSAGES.to_owned(),
        input: file.id.clone(),
        window: "24h".to_owned(),
        expires: now + WINDOW_SECONDS,
        // These batches have no metadata of clients: the number of requests stands there until the runner has counted them.
        metadata: count.to_string(),
        output_expires_after: Some(RESULT_SECONDS),
        created: now,
        tenant_open_max: config.batches.open_max,
        tenant_batches_max: BATCHES_MAX,
        tenant_output_bytes_max: config.batches.key_output_bytes_max,
    };
    let made = store.create_batch(&visit.tenant, new).await;
    let batch = match made {
        Ok(Some(batch)) => batch,
        refused => {
            // A failed delete is repeated by the sweeper when the file expires.
            let _ = store.delete_file(&visit.tenant, &file.id).await;
            refused.map_err(failed)?;
            return Err(Failure::internal("the requests of a new batch are gone").into());
        }
    };
    visit.keeper.wake.notify_one();
    visit.exchange.head.headers = headers;
    let shown = shown(visit, &batch);
    answer(visit.exchange, &shown).await
}

/// Input file of a batch, and the number of its requests.
fn read(bytes: &[u8], lines_max: usize) -> Result<(Bytes, usize), ApiError> {
    let form: Form<'_> = serde_json::from_slice(bytes)
        .map_err(|error| ApiError::malformed(format!("The body cannot be read: {error}.")))?;
    let bad = |why: &str| ApiError::invalid("requests", format!("requests: {why}"));
    let requests = form.requests.ok_or_else(|| bad("required, but missing"))?;
    let (mut ids, mut out) = (HashSet::new(), String::with_capacity(bytes.len()));
    let mut each = |at: usize, text: &str| -> Result<(), ApiError> {
        if at == lines_max {
            return Err(bad(&format!("must hold 1 to {lines_max} requests, got more")));
        }
        // Outside strings a line end is only white space, and inside it cannot be: every request becomes one line.
        let from = out.len();
        out.extend(text.chars().map(|c| if matches!(c, '\n' | '\r') { ' ' } else { c }));
        let read = message_request(&Bytes::copy_from_slice(&out.as_bytes()[from..])).map_err(|fault| {
            let param = fault.param.map_or_else(|| format!("requests[{at}]"), |name| format!("requests[{at}].{name}"));
            ApiError::invalid(param.clone(), format!("{param}: {}", fault.message))
        })?;
        if !ids.insert(read.custom_id) {
            let param = format!("requests[{at}].custom_id");
            return Err(ApiError::invalid(param.clone(), format!("{param}: an earlier request has it")));
        }
        out.push('\n');
        Ok(())
    };
    // Read one by one: a list of a million short values is refused at the first that is too many.
    let list = Reader::new(requests.get().as_bytes()).and_then(|mut reader| {
        reader.array(|reader, at| {
            let text = reader.raw()?.text;
            each(at, text).map_err(Fault::Refused)
        })
    });
    list.map_err(Fault::into_error)?;
    match ids.len() {
        0 => Err(bad(&format!("must hold 1 to {lines_max} requests, got 0"))),
        count => Ok((out.into(), count)),
    }
}

pub(super) async fn show(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let batch = find(visit, id).await?;
    let shown = shown(visit, &batch);
    answer(visit.exchange, &shown).await
}

/// Place of a list that the query asks for: a page behind or before an id.
fn page(target: &str) -> Result<(Page, bool), ApiError> {
    let limit = query::page(target, 20, 1000)?.limit;
    let place = |name: &str| -> Result<Option<String>, ApiError> {
        let stored = |id: String| known(&id).map_or_else(|| "batch_".to_owned(), |id| id.as_str().to_owned());
        Ok(query::value(target, name)?.map(stored))
    };
    match (place("after_id")?, place("before_id")?) {
        (Some(_), Some(_)) => Err(ApiError::invalid("before_id", "before_id: not allowed with after_id")),
        (None, Some(before)) => Ok((Page { after: Some(before), limit, order: Order::Ascending }, true)),
        (after, None) => Ok((Page { after, limit, order: Order::Descending }, false)),
    }
}

pub(super) async fn list(visit: &mut Visit<'_>) -> Result<(), End> {
    let (page, is_before) = page(&visit.exchange.head.target).map_err(Failure::from)?;
    let listing = visit.keeper.store.batches(&visit.tenant, Listed::Of(MESSAGES), &page).await.map_err(failed)?;
    let Listing { mut items, more } = listing;
    if is_before {
        // The newest stand first in every page.
        items.reverse();
    }
    let id = |batch: Option<&BatchRecord>| batch.map(|batch| shown_id(&batch.id));
    let (first_id, last_id) = (id(items.first()), id(items.last()));
    let data = items.iter().map(|batch| shown(visit, batch)).collect();
    answer(visit.exchange, &ShownPage { data, has_more: more, first_id, last_id }).await
}

pub(super) async fn cancel(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let batch = find(visit, id).await?;
    match visit.keeper.store.cancel_batch(&visit.tenant, &batch.id, unix_seconds()).await.map_err(failed)? {
        Cancelled::Yes(batch) => {
            visit.keeper.wake.notify_one();
            let shown = shown(visit, &batch);
            answer(visit.exchange, &shown).await
        }
        Cancelled::TooLate(batch) => {
            let message = format!("Batch {id} cannot be canceled: its requests have been processed.");
            tracing::debug!(batch = %batch.id, status = batch.status.name(), "a batch is cancelled too late");
            Err(Failure::new(ErrorKind::InvalidRequest, message).into())
        }
        Cancelled::Absent => Err(absent("MessageBatch", id).into()),
    }
}

pub(super) async fn delete(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let batch = find(visit, id).await?;
    match visit.keeper.store.delete_batch(&visit.tenant, &batch.id).await.map_err(failed)? {
        Deleted::Yes => answer(visit.exchange, &ShownDeleted { id, r#type: "message_batch_deleted" }).await,
        Deleted::Absent => Err(absent("MessageBatch", id).into()),
        Deleted::InUse => {
            let message =
                format!("Batch {id} cannot be deleted while it is processed. Cancel it, or wait for its end.");
            Err(Failure::new(ErrorKind::InvalidRequest, message).into())
        }
    }
}

/// Sends the results piece by piece: those that succeeded, then the others.
pub(super) async fn results(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let batch = find(visit, id).await?;
    if !batch.status.is_end() {
        let message = format!("Batch {id} has no results until its processing has ended.");
        return Err(Failure::new(ErrorKind::NotFound, message).into());
    }
    let mut records = Vec::new();
    for file in [&batch.output, &batch.errors].into_iter().flatten() {
        let found = visit.keeper.store.file(&visit.tenant, file).await.map_err(failed)?;
        let gone = || Failure::new(ErrorKind::NotFound, format!("The results of batch {id} are not kept any more."));
        records.push(found.ok_or_else(gone)?);
    }
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/x-jsonl")),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ];
    let bytes = records.iter().map(|record| record.bytes).sum();
    visit.exchange.begin(200, &headers, Some(bytes)).await?;
    for record in &records {
        files::send(visit, record).await?;
    }
    Ok(visit.exchange.write(Bytes::new(), true).await?)
}

#[cfg(test)]
mod tests {
    use penstock_store::{BatchTimes, Counts, FileId};

    use super::*;

    fn refused(body: &str, param: Option<&str>) {
        let error = read(body.as_bytes(), 3).expect_err(body);
        assert_eq!(error.param.as_deref(), param, "{body}: {error}");
    }

    #[test]
    fn requests_become_lines() {
        let body = "{\"requests\": [{\"custom_id\": \"a\",\n \"params\": {\"model\": \"m\"}}, {\"params\":{},\"custom_id\":\"b\"}]}";
        let (content, count) = read(body.as_bytes(), 3).expect("read");
        assert_eq!(count, 2);
        assert_eq!(
            content,
            "{\"custom_id\": \"a\",  \"params\": {\"model\": \"m\"}}\n{\"params\":{},\"custom_id\":\"b\"}\n".as_bytes()
        );
        refused("{}", Some("requests"));
        refused(r#"{"requests":[]}"#, Some("requests"));
        let many: Vec<_> = (0..4).map(|at| format!(r#"{{"custom_id":"{at}","params":{{}}}}"#)).collect();
        refused(&format!(r#"{{"requests":[{}]}}"#, many.join(",")), Some("requests"));
        refused(r#"{"requests":[{"params":{}}]}"#, Some("requests[0].custom_id"));
        refused(r#"{"requests":[{"custom_id":"a b","params":{}}]}"#, Some("requests[0].custom_id"));
        refused(r#"{"requests":[{"custom_id":"a","params":[]}]}"#, Some("requests[0].params"));
        refused(r#"{"requests":[{"custom_id":"a"}]}"#, Some("requests[0].params"));
        refused(
            r#"{"requests":[{"custom_id":"a","params":{}},{"custom_id":"a","params":{}}]}"#,
            Some("requests[1].custom_id"),
        );
        refused(r#"{"requests":[1]}"#, Some("requests[0]"));
        refused("[", None);
    }

    #[test]
    fn requests_are_counted_when_all_have_ended() {
        let mut batch = BatchRecord {
            id: BatchId::random(),
            status: BatchStatus::InProgress,
            endpoint: MESSAGES.into(),
            input: FileId::random(),
            output: None,
            errors: None,
            window: "24h".into(),
            metadata: "7".into(),
            faults: String::new(),
            output_expires_after: None,
            times: BatchTimes::default(),
            counts: Counts { total: 7, completed: 3, failed: 1 },
        };
        assert_eq!(counts(&batch), ShownCounts { processing: 7, ..ShownCounts::default() });
        batch.status = BatchStatus::Cancelled;
        batch.counts = Counts { total: 7, completed: 3, failed: 4 };
        batch.faults = Tally { canceled: 2, expired: 1 }.text();
        let ended = ShownCounts { processing: 0, succeeded: 3, errored: 1, canceled: 2, expired: 1 };
        assert_eq!(counts(&batch), ended);
        assert_eq!(known(&shown_id(&batch.id)), Some(batch.id));
        assert_eq!(known("batch_1"), None);
    }

    #[test]
    fn pages_are_behind_or_before_an_id() {
        let of = |query: &str| page(&format!("/v1/messages/batches?{query}"));
        let (all, before) = of("limit=3").expect("a page");
        assert_eq!((all.after, all.limit, all.order, before), (None, 3, Order::Descending, false));
        let (newer, before) = of("before_id=msgbatch_1").expect("a page");
        assert_eq!((newer.after.as_deref(), newer.order, before), (Some("batch_1"), Order::Ascending, true));
        assert!(of("before_id=msgbatch_1&after_id=msgbatch_2").is_err() && of("limit=0").is_err());
    }
}
