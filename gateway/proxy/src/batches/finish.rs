//! End of a batch: lines without a result get one that says so, results become files, and the batch ends in one
//! transaction with them. A crash before that transaction leaves an unsealed file, which is swept, and the whole step
//! is done again.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use penstock_store::{
    BatchRecord, BatchStatus, CHUNK_BYTES_MAX, EndedBatch, FileId, LineResult, NewFile, Store, StoreError, Tenant,
};

use super::Bench;
use crate::batch_text::{MESSAGE_BATCH, MESSAGES, Tally, Unanswered, error_line, message_line};
use crate::keeper::patiently;
use penstock_base::clock::unix_seconds;
use penstock_http::exchange::new_request_id;
use penstock_telemetry::Metric;

/// Result lines read from the store per page.
const PAGE_LINES: u32 = 256;

/// Ends a batch that is finalizing or cancelling.
pub(super) async fn run(bench: &Arc<Bench>, tenant: &Tenant, batch: &BatchRecord) -> Result<(), StoreError> {
    let store = &bench.keeper().store;
    let (status, code, message, why) = match batch.status {
        BatchStatus::Cancelling => {
            let message = "This request had no result when the batch was cancelled.";
            (BatchStatus::Cancelled, "batch_cancelled", message, Unanswered::Canceled)
        }
        _ => {
            let message = "This request had no result when the completion window ended.";
            (BatchStatus::Expired, "batch_expired", message, Unanswered::Expired)
        }
    };
    let is_messages = batch.endpoint == MESSAGES;
    let kept = bench.outputs.of(tenant);
    loop {
        let waiting = store.waiting_lines(&batch.id, 0, PAGE_LINES).await?;
        if waiting.is_empty() {
            break;
        }
        for line in waiting {
            let text = match is_messages {
                true => message_line(&line.custom_id, Err(why)).unwrap_or_default(),
                false => error_line(&format!("batch_{}", new_request_id()), &line.custom_id, code, message),
            };
            let result = LineResult { ok: false, text };
            let pending = kept.hold(&result);
            if store.finish_line(&batch.id, line.line, result).await? {
                pending.stored().await;
            }
            bench.gateway.metrics.count(Metric::BatchLines, &[("outcome", code)]);
        }
    }
    // The time when it began to be finalized is kept, so a crash in between changes nothing.
    let in_time = batch.times.finalizing.is_some_and(|at| at < batch.times.expires);
    let status = if status == BatchStatus::Expired && in_time { BatchStatus::Completed } else { status };
    let mut files = Vec::new();
    let ended = async {
        let mut tally = Tally::default();
        let output = write(store.as_ref(), tenant, batch, true, &mut files, &mut tally).await?;
        let errors = write(store.as_ref(), tenant, batch, false, &mut files, &mut tally).await?;
        let faults = if is_messages { tally.text() } else { String::new() };
        let end = EndedBatch { status, output, errors, faults, now: unix_seconds() };
        patiently(batch.id.as_str(), || store.end_batch(&batch.id, end.clone())).await
    };
    let ended = ended.await;
    let mut is_over = matches!(ended, Ok(true));
    if !is_over {
        // An ask whose answer was lost may have ended the batch with these files.
        let now = patiently(batch.id.as_str(), || store.batch(tenant, &batch.id)).await?;
        for id in unused(&files, now.as_ref()) {
            // A failed delete is repeated by the sweeper.
            let _ = store.delete_file(tenant, id).await;
        }
        // A server that has lost that the batch was to end may have taken over: its lines run on.
        is_over = now.is_none_or(|batch| batch.status.is_end());
    }
    if is_messages && is_over {
        // The requests were the gateway's own copy; a failed delete is repeated by the sweeper when the file expires.
        let _ = store.delete_file(tenant, &batch.input).await;
    }
    ended.map(drop)
}

/// Files that a batch does not name, as it stands in the store.
fn unused<'a>(files: &'a [FileId], batch: Option<&'a BatchRecord>) -> impl Iterator<Item = &'a FileId> {
    let is_named = move |id: &FileId| {
        batch.is_some_and(|batch| batch.output.as_ref() == Some(id) || batch.errors.as_ref() == Some(id))
    };
    files.iter().filter(move |id| !is_named(id))
}

/// Writes the results of one outcome to a file, unsealed, and counts those without an answer; `None`: there are no such
/// results.
async fn write(
    store: &dyn Store,
    tenant: &Tenant,
    batch: &BatchRecord,
    ok: bool,
    files: &mut Vec<FileId>,
    tally: &mut Tally,
) -> Result<Option<FileId>, StoreError> {
    let (bytes, count) = store.result_bytes(&batch.id, ok).await?;
    if count == 0 {
        return Ok(None);
    }
    let now = unix_seconds();
    let new = NewFile {
        purpose: if batch.endpoint == MESSAGES { MESSAGE_BATCH } else { "batch_output" }.into(),
        name: format!("{}_{}.jsonl", batch.id, if ok { "output" } else { "errors" }),
        bytes: bytes + count,
        created: now,
        expires: batch.output_expires_after.map(|seconds| now + seconds),
        // Results were paid for, so the key's quota does not apply to them.
        tenant_bytes_max: u64::MAX,
        tenant_files_max: u64::MAX,
    };
    let id = store.begin_file(tenant, new).await?;
    files.push(id.clone());
    let (mut buffer, mut at, mut from) = (BytesMut::new(), 0, 0);
    loop {
        let results = store.results(&batch.id, ok, from, CHUNK_BYTES_MAX).await?;
        let Some((last, _)) = results.last() else { break };
        from = last + 1;
        for (_, text) in &results {
            tally.canceled += u64::from(Unanswered::Canceled.is_in(text));
            tally.expired += u64::from(Unanswered::Expired.is_in(text));
            buffer.extend_from_slice(text);
            buffer.extend_from_slice(b"\n");
        }
        while buffer.len() >= CHUNK_BYTES_MAX {
            at = append(store, tenant, &id, at, buffer.split_to(CHUNK_BYTES_MAX).freeze()).await?;
        }
    }
    if !buffer.is_empty() {
        append(store, tenant, &id, at, buffer.freeze()).await?;
    }
    Ok(Some(id))
}

async fn append(store: &dyn Store, tenant: &Tenant, id: &FileId, at: u64, piece: Bytes) -> Result<u64, StoreError> {
    let end = at + piece.len() as u64;
    store.append(tenant, id, at, piece).await?;
    Ok(end)
}
