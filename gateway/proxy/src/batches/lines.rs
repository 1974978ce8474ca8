//! Execution of a batch's lines, some at a time, each until its result is stored.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use penstock_proto::ErrorKind;
use penstock_store::{BatchId, BatchRecord, FileId, Line, LineResult, StoreError, Tenant};
use penstock_types::{Dialect, Surface};
use tokio::sync::{SemaphorePermit, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep, sleep_until};

use super::Bench;
use super::outputs::{Output, Pending};
use super::slots::Queue;
use crate::background_answer::{Whole, answer_whole};
use crate::batch_text::{self, MESSAGES, error_line, message_line, result_line, surface_of};
use crate::keeper::patiently;
use penstock_auth::Principal;
use penstock_base::asker::Asker;
use penstock_base::clock::unix_seconds;
use penstock_base::error::Failure;
use penstock_base::panics::caught;
use penstock_http::budget::BudgetExhausted;
use penstock_http::exchange::new_request_id;
use penstock_http::{Body, BodyLease};
use penstock_telemetry::Metric;
use penstock_types::ask::Ask;
use penstock_upstream::call::Call;

/// Lines of a batch read from the store per page.
const PAGE_LINES: u32 = 256;
/// Lines of one batch, per slot, that run or wait for their next attempt: a waiting line must not hold a slot, and
/// their number is bounded.
const WAITING_PER_SLOT: usize = 4;
/// Backoff after the first failed attempt; doubles with each further one.
const PAUSE: Duration = Duration::from_millis(500);
/// Longest backoff between two attempts at a line, where the doubling ends.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Code of the error of lines that are not run, since the tenant's batches keep as much as they may.
const QUOTA: &str = "storage_quota_exceeded";

/// State that the lines of one batch share: its ids, endpoint and deadline.
struct Job {
    bench: Arc<Bench>,
    tenant: Tenant,
    id: BatchId,
    input: FileId,
    endpoint: String,
    /// Queue of the tenant's lines for slots.
    queue: Arc<Queue>,
    /// Bytes that the results of the tenant's batches keep.
    output: Arc<Output>,
    /// End of the batch's completion window; lines without an answer then expire.
    deadline: Instant,
    /// Turns true when lines without an answer are to stop.
    stop: watch::Sender<bool>,
}

impl Job {
    fn surface(&self) -> Result<Surface, Failure> {
        surface_of(&self.endpoint).ok_or_else(|| Failure::internal("a batch for an unknown endpoint"))
    }
}

/// Outcome of the attempts at a line.
struct Answered<'a> {
    /// Slot of the line, given on when its result counts.
    slot: SemaphorePermit<'a>,
    request_id: String,
    answered: Result<Whole, Failure>,
}

/// Runs lines until every one has a result, the window ends, or the batch is cancelled; then the batch is finalizing or
/// cancelling. However it ends, answers that are there are kept first.
pub(super) async fn run(
    bench: &Arc<Bench>,
    tenant: &Tenant,
    batch: &BatchRecord,
    cancelled: &mut watch::Receiver<bool>,
) -> Result<(), StoreError> {
    let left = batch.times.expires.saturating_sub(unix_seconds());
    let job = Arc::new(Job {
        queue: bench.slots.queue(tenant),
        output: bench.outputs.of(tenant),
        bench: bench.clone(),
        tenant: tenant.clone(),
        id: batch.id.clone(),
        input: batch.input.clone(),
        endpoint: batch.endpoint.clone(),
        deadline: Instant::now() + Duration::from_secs(left),
        stop: watch::Sender::new(false),
    });
    let mut tasks = JoinSet::new();
    let ended = tokio::select! {
        biased;
        // An error: nobody is there to cancel.
        Ok(_) = cancelled.wait_for(|cancelled| *cancelled) => Ok(false),
        () = sleep_until(job.deadline) => Ok(true),
        all = all(&job, &mut tasks) => all,
    };
    job.stop.send_replace(true);
    let mut kept = Ok(());
    while let Some(ended) = tasks.join_next().await {
        kept = kept.and(done(ended));
    }
    let ended = ended?;
    kept?;
    match ended {
        true => bench.keeper().store.finalize_batch(&batch.id, unix_seconds()).await,
        false => Ok(()),
    }
}

/// Runs the lines to the end. `false`: another process goes on with the batch, and the lines that ran here have ended.
async fn all(job: &Arc<Job>, tasks: &mut JoinSet<Result<(), StoreError>>) -> Result<bool, StoreError> {
    let store = &job.bench.keeper().store;
    let at_once = || job.bench.gateway.serving().config.batches.concurrency * WAITING_PER_SLOT;
    let (mut page, mut from, mut dry) = (VecDeque::new(), 0, false);
    loop {
        if page.is_empty() && !dry {
            page.extend(patiently(job.id.as_str(), || store.waiting_lines(&job.id, from, PAGE_LINES)).await?);
            dry = page.is_empty();
            from = page.back().map_or(from, |line: &Line| line.line + 1);
        }
        while tasks.len() < at_once()
            && job.bench.gateway.begins_work()
            && let Some(line) = page.pop_front()
        {
            tasks.spawn(one(job.clone(), line));
        }
        match tasks.join_next().await {
            Some(ended) => done(ended)?,
            None => return Ok(job.bench.gateway.begins_work()),
        }
    }
}

/// Result of a line's task. Panics are caught where a line is answered; one anywhere else is a bug that must not end the
/// batch wrongly.
fn done(ended: Result<Result<(), StoreError>, JoinError>) -> Result<(), StoreError> {
    ended.unwrap_or_else(|error| Err(StoreError::Broken(format!("a line's task: {error}"))))
}

/// Runs one line until its result is stored, or until it is to stop without an answer.
async fn one(job: Arc<Job>, line: Line) -> Result<(), StoreError> {
    let mut stop = job.stop.subscribe();
    let answered = tokio::select! {
        // A line that gets the slot of one that has stopped does not begin. Dropping an attempt stops it at its upstream.
        biased;
        _ = stop.wait_for(|stop| *stop) => None,
        answered = attempts(&job, &line) => answered?,
    };
    let Some(Answered { slot, request_id, answered }) = answered else { return Ok(()) };
    // The answer was paid for: from here on only a lost claim stops the line. Until the result is kept, the memory of
    // the answer is its memory.
    let (answered, _hold) = match answered {
        Ok(whole) => {
            let (body, hold) = whole.charged().await;
            (Ok(body), Some(hold))
        }
        Err(failure) => (Err(failure), None),
    };
    let result = result(&job, &line, &request_id, answered);
    let outcome = if result.ok { "completed" } else { "failed" };
    // Before another line gets the slot, and asks whether there is room.
    let pending = job.output.hold(&result);
    drop(slot);
    keep(&job, &line, result, outcome, pending).await
}

/// Attempts at a line until one has an answer, or a failure that stays. `None`: the line is the next process's, or was not
/// run, since there is no room for its result.
async fn attempts<'a>(job: &'a Job, line: &Line) -> Result<Option<Answered<'a>>, StoreError> {
    let (keeper, gateway) = (job.bench.keeper(), &job.bench.gateway);
    let attempts_max = gateway.serving().config.batches.attempts_max;
    let mut attempt = 1;
    loop {
        let slot = job.bench.slots.take(&job.queue).await?;
        if !gateway.begins_work() {
            return Ok(None);
        }
        let bytes_max = gateway.serving().config.batches.key_output_bytes_max;
        if patiently(job.id.as_str(), || job.output.is_full(keeper.store.as_ref(), bytes_max)).await? {
            drop(slot);
            let result = refused(job, line, bytes_max);
            let pending = job.output.hold(&result);
            return keep(job, line, result, QUOTA, pending).await.map(|()| None);
        }
        let running = Guard::new(&keeper.running.lines);
        let request_id = new_request_id();
        let answered = match caught(answer(job, line, &request_id)).await {
            Ok(answered) => answered?,
            Err(panic) => {
                gateway.metrics.count(Metric::Panics, &[]);
                Err(Failure::internal(panic))
            }
        };
        drop(running);
        match answered {
            // This process ends: the line is the next one's, whatever it failed of here.
            Err(_) if gateway.live.is_background_over() => return Ok(None),
            // The window has ended, maybe before this task was told: the line expires.
            Err(_) if Instant::now() >= job.deadline => return Ok(None),
            Err(failure) if failure.should_retry() && attempt < attempts_max => {
                drop(slot);
                gateway.metrics.count(Metric::BatchLines, &[("outcome", "retried")]);
                tracing::debug!(batch = %job.id, line = line.line, attempt, kind = ?failure.kind, "a batch line is retried");
                tokio::select! {
                    () = sleep(pause(attempt, failure.retry_after)) => attempt += 1,
                    // The next attempt is the other process's, which gets the lead when nothing runs here any more.
                    () = gateway.work_over() => return Ok(None),
                }
            }
            answered => return Ok(Some(Answered { slot, request_id, answered })),
        }
    }
}

/// Backoff before the next attempt: doubles per attempt, but is as long as the upstream asked for where it did.
fn pause(attempt: u32, asked: Option<Duration>) -> Duration {
    let doubled = PAUSE.saturating_mul(1 << attempt.saturating_sub(1).min(16));
    doubled.min(PAUSE_MAX).max(asked.unwrap_or_default())
}

/// Makes one attempt at a line. The line's text is read from the store here, charged like the body of a request, and
/// dropped when the attempt ends. A line that waits for a slot or for its next attempt holds no text in memory.
///
/// # Errors
/// The store could not read the text. If the attempt itself fails, the inner result has the failure.
async fn answer(job: &Job, line: &Line, request_id: &str) -> Result<Result<Whole, Failure>, StoreError> {
    let (principal, lease) = match admitted(job, line).await {
        Ok(admitted) => admitted,
        Err(failure) => return Ok(Err(failure)),
    };
    let range = line.at..line.at + u64::from(line.bytes);
    let store = &job.bench.keeper().store;
    let text = patiently(job.id.as_str(), || store.read(&job.tenant, &job.input, range.clone())).await?;
    let text = text.ok_or(StoreError::Misuse("the input file of the batch is gone"))?;
    Ok(answer_text(job, text, lease, &principal, request_id).await)
}

/// The batch's owner with the rights that it has now, and a lease that covers the line's text.
async fn admitted(job: &Job, line: &Line) -> Result<(Arc<Principal>, BodyLease), Failure> {
    let gateway = &job.bench.gateway;
    let (serving, store) = (gateway.serving(), job.bench.keeper().store.as_ref());
    let principal = gateway.guard.recall(&serving.identity, store, job.tenant.as_str(), job.surface()?).await?;
    let mut lease = gateway.bodies.lease_of(Asker::new(principal.tenant(), None));
    lease.cover(line.bytes as usize).map_err(BudgetExhausted::failure)?;
    Ok((principal, lease))
}

async fn answer_text(
    job: &Job,
    text: Bytes,
    lease: BodyLease,
    principal: &Arc<Principal>,
    request_id: &str,
) -> Result<Whole, Failure> {
    let gateway = &job.bench.gateway;
    let request = batch_text::request(&text, &job.endpoint).map_err(|fault| {
        Failure::new(ErrorKind::InvalidRequest, fault.message).param(fault.param.unwrap_or_default())
    })?;
    drop(text);
    let body = Body { bytes: request.body, lease };
    let ask = Ask::new(job.surface()?);
    let mut call = Call::new(ask, body, request_id.to_owned(), HeaderMap::new(), penstock_dialects::decode).await?;
    call.background = true;
    let deadline = gateway.serving().config.request_timeout.map(|limit| Instant::now() + limit);
    let deadline = deadline.map_or(job.deadline, |deadline| deadline.min(job.deadline));
    answer_whole(gateway, principal, call, Some(deadline.into_std())).await
}

/// Line of the output file or of the errors file.
fn result(job: &Job, line: &Line, request_id: &str, answered: Result<Bytes, Failure>) -> LineResult {
    if job.endpoint == MESSAGES {
        return message_result(line, request_id, answered);
    }
    let id = format!("batch_{request_id}");
    let (ok, status, body) = match answered {
        Ok(body) => (true, 200, body),
        Err(failure) => (false, failure.status(), failure.body(Dialect::OpenAi, request_id)),
    };
    match result_line(&id, &line.custom_id, status, request_id, &body) {
        Some(text) => LineResult { ok, text },
        None => {
            let message = "The upstream's answer was not JSON.";
            LineResult { ok: false, text: error_line(&id, &line.custom_id, "invalid_answer", message) }
        }
    }
}

/// Line of the results of a batch of messages.
fn message_result(line: &Line, request_id: &str, answered: Result<Bytes, Failure>) -> LineResult {
    let failed = |failure: &Failure| {
        let body = failure.body(Dialect::Anthropic, request_id);
        LineResult { ok: false, text: message_line(&line.custom_id, Ok((false, &body))).unwrap_or_default() }
    };
    match answered {
        Ok(body) => match message_line(&line.custom_id, Ok((true, &body))) {
            Some(text) => LineResult { ok: true, text },
            None => failed(&Failure::internal("an answer that is no JSON")),
        },
        Err(failure) => failed(&failure),
    }
}

/// Result of a line that is not run, since the results of the tenant's batches fill what they may keep.
fn refused(job: &Job, line: &Line, bytes_max: u64) -> LineResult {
    let message = format!(
        "This request was not run: the results of this key's batches have the {bytes_max} bytes that they may have. \
         Delete files of results, then ask again."
    );
    if job.endpoint == MESSAGES {
        let failure = Failure::new(ErrorKind::Forbidden, message);
        return message_result(line, &new_request_id(), Err(failure));
    }
    let id = format!("batch_{}", new_request_id());
    LineResult { ok: false, text: error_line(&id, &line.custom_id, QUOTA, &message) }
}

/// Stores a result; waits for a store that is full or away, since the line has run and may have been paid for.
async fn keep(
    job: &Job,
    line: &Line,
    result: LineResult,
    outcome: &'static str,
    pending: Pending<'_>,
) -> Result<(), StoreError> {
    let store = &job.bench.keeper().store;
    if patiently(job.id.as_str(), || store.finish_line(&job.id, line.line, result.clone())).await? {
        pending.stored().await;
        job.bench.gateway.metrics.count(Metric::BatchLines, &[("outcome", outcome)]);
    }
    Ok(())
}

/// Guard that keeps a gauge one higher for as long as it lives.
struct Guard<'a>(&'a AtomicU64);

impl<'a> Guard<'a> {
    fn new(count: &'a AtomicU64) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_minute_and_obey_the_upstream() {
        assert_eq!(pause(1, None), Duration::from_millis(500));
        assert_eq!(pause(3, None), Duration::from_secs(2));
        assert_eq!(pause(40, None), PAUSE_MAX);
        assert_eq!(pause(1, Some(Duration::from_secs(90))), Duration::from_secs(90));
    }
}
