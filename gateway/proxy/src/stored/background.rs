//! Runner of background responses, whose clients do not wait.
//!
//! The store is the truth: a response is queued there before its client is told, and ends there once. A killed gateway
//! runs open responses again when it starts: a model may be asked more than once, the response is answered once.
//!
//! Keys share the places (`places`). A place is held for one attempt: a response that waits for its next one, because
//! an upstream failed or its key's own limit is used up, rests in the store meanwhile.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use penstock_dialects::openai::{
    FinishedResponse, ResponseCollector, ResponseFailure, ResponseForm, ResponseStatus as Word,
};
use penstock_proto::ErrorKind;
use penstock_store::{OpenResponse, ResponseId, ResponseRecord, ResponseStatus, StoreError, Tenant};
use penstock_types::{ChatEvent, ChatRequest, Decoded, Request, Surface, WholeCollector};
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::places::Turns;
use super::responses::{meta, rebuilt, room};
use crate::background_answer::answer_events;
use crate::gateway::Gateway;
use crate::phases::caught;
use penstock_base::error::Failure;
use penstock_http::exchange::new_request_id;
use penstock_http::{Body, BodyLease};
use penstock_types::ask::Ask;
use penstock_upstream::answer_memory::Hold;
use penstock_upstream::call::Call;

/// Number of places: responses that are answered at once; the others wait in the store.
const PLACES: usize = 128;
/// Most responses of one key that a turn looks at: those that have a place, and more that could have one while some
/// rest.
const OF_KEY_MAX: u32 = 256;
/// Most responses of all keys that one turn of the runner looks at.
const LOOK_MAX: u32 = 8192;
/// Polling interval of the store without a notification.
const POLL: Duration = Duration::from_secs(2);
/// Pause before a response whose store failed is tried again.
const STORE_PAUSE: Duration = Duration::from_secs(5);
/// Pause before a response whose request found no memory is tried again.
const MEMORY_PAUSE: Duration = Duration::from_secs(1);
/// Most attempts at one response; then it fails.
const ATTEMPTS_MAX: u32 = 5;
/// Backoff after the first attempt; doubles with each further one.
const PAUSE: Duration = Duration::from_millis(500);

/// Response that has a place and is being answered.
struct Active {
    tenant: Tenant,
    attempts: u32,
    task: AbortHandle,
}

/// Response that rests until its next attempt.
struct Rest {
    attempts: u32,
    until: Instant,
}

/// Outcome of one attempt at a background response.
enum Left {
    /// The response has ended, and the store has its result.
    Ended,
    /// The response is tried again after a pause; the flag says whether the attempt counts.
    Again(Duration, bool),
}

#[derive(Default)]
struct Runner {
    tasks: JoinSet<(ResponseId, Left)>,
    active: HashMap<ResponseId, Active>,
    resting: HashMap<ResponseId, Rest>,
    turns: Turns,
}

/// Runs background responses until another process serves. Does nothing without a store.
pub(crate) async fn run(gateway: Arc<Gateway>) {
    let Some(keeper) = gateway.keeper().cloned() else { return };
    let mut runner = Runner::default();
    loop {
        if let Err(error) = runner.turn(&gateway).await {
            tracing::warn!(%error, "background responses could not be read from the store");
        }
        keeper.responses_running.store(runner.active.len() as u64, Ordering::Relaxed);
        if gateway.is_leaving() && runner.tasks.is_empty() {
            return;
        }
        let look = Instant::now() + POLL;
        let next = runner.resting.values().map(|rest| rest.until).min().map_or(look, |until| until.min(look));
        tokio::select! {
            () = keeper.wake_responses.notified() => {}
            () = sleep_until(next) => {}
            Some(ended) = runner.tasks.join_next(), if !runner.tasks.is_empty() => runner.left(ended),
        }
    }
}

impl Runner {
    /// Notes that a task has ended, or was stopped.
    fn left(&mut self, ended: Result<(ResponseId, Left), JoinError>) {
        let (id, left) = match ended {
            Ok(ended) => ended,
            Err(error) => return self.active.retain(|_, active| active.task.id() != error.id()),
        };
        if let Some(active) = self.active.remove(&id)
            && let Left::Again(pause, counts) = left
        {
            let rest = Rest { attempts: active.attempts + u32::from(counts), until: Instant::now() + pause };
            self.resting.insert(id, rest);
        }
    }

    async fn turn(&mut self, gateway: &Arc<Gateway>) -> Result<(), StoreError> {
        let Some(keeper) = gateway.keeper() else { return Ok(()) };
        while let Some(ended) = self.tasks.try_join_next() {
            self.left(ended);
        }
        if gateway.is_leaving() || !keeper.store.lead().await? {
            return Ok(());
        }
        keeper.response_bytes.store(keeper.store.response_bytes().await?, Ordering::Relaxed);
        let open = keeper.store.open_responses(OF_KEY_MAX, LOOK_MAX).await?;
        self.stop_closed(gateway, &open).await?;
        let now = Instant::now();
        let mut resting = std::mem::take(&mut self.resting);
        let mut waiting = Vec::new();
        for OpenResponse { tenant, id } in open {
            match resting.remove(&id) {
                _ if self.active.contains_key(&id) => {}
                Some(rest) if rest.until > now => {
                    self.resting.insert(id, rest);
                }
                rest => waiting.push((tenant, (id, rest.map_or(0, |rest| rest.attempts)))),
            }
        }
        let mut taken = HashMap::new();
        self.active.values().for_each(|active| *taken.entry(active.tenant.clone()).or_default() += 1);
        let next = self.turns.next(&waiting, taken, PLACES);
        for (tenant, (id, attempts)) in next {
            let task = self.tasks.spawn(attend(gateway.clone(), tenant.clone(), id.clone(), *attempts));
            self.active.insert(id.clone(), Active { tenant: tenant.clone(), attempts: *attempts, task });
        }
        // A waiting response without a place goes back to rest, with the attempts that it has had.
        for (_, (id, attempts)) in
            waiting.iter().filter(|(_, (id, attempts))| *attempts > 0 && !self.active.contains_key(id))
        {
            self.resting.insert(id.clone(), Rest { attempts: *attempts, until: now });
        }
        Ok(())
    }

    /// Stops tasks whose response was cancelled or deleted: dropping the task cancels its request upstream.
    async fn stop_closed(&mut self, gateway: &Gateway, open: &[OpenResponse]) -> Result<(), StoreError> {
        let Some(keeper) = gateway.keeper() else { return Ok(()) };
        let listed: std::collections::HashSet<&ResponseId> = open.iter().map(|open| &open.id).collect();
        for (id, active) in self.active.iter().filter(|(id, _)| !listed.contains(id)) {
            // A response that is not listed may only be too far behind in its key's queue.
            let record = keeper.store.response(&active.tenant, id).await?;
            if record.is_none_or(|record| record.status == ResponseStatus::Ended) {
                active.task.abort();
            }
        }
        Ok(())
    }
}

/// Runs one attempt. When the store fails, a later attempt begins again.
async fn attend(gateway: Arc<Gateway>, tenant: Tenant, id: ResponseId, attempts: u32) -> (ResponseId, Left) {
    let left = drive(&gateway, &tenant, &id, attempts).await.unwrap_or_else(|error| {
        tracing::warn!(response = %id, %error, "a background response pauses: the store failed");
        Left::Again(STORE_PAUSE, false)
    });
    (id, left)
}

async fn drive(gateway: &Gateway, tenant: &Tenant, id: &ResponseId, attempts: u32) -> Result<Left, StoreError> {
    let Some(keeper) = gateway.keeper() else { return Ok(Left::Ended) };
    let store = &keeper.store;
    let Some(response) = store.response(tenant, id).await? else { return Ok(Left::Ended) };
    if response.status == ResponseStatus::Ended {
        return Ok(Left::Ended);
    }
    // The request's texts stay in memory while it is answered.
    let mut lease = gateway.bodies.lease();
    if lease.cover(response.request.len() + response.body.len()).is_err() {
        return Ok(Left::Again(MEMORY_PAUSE, false));
    }
    let config = gateway.serving().config.clone();
    let (chat, form) = match rebuilt(keeper, tenant, &response, config.http.body_bytes_max).await {
        Ok(rebuilt) => rebuilt,
        // The previous response was deleted in the meantime. Without the request there is no form for an error body.
        Err(failure) => {
            tracing::warn!(response = %id, reason = %failure.message, "a queued background response cannot be answered");
            let (body, output) = (response.body.clone(), response.output.clone());
            store.update_response(id, ResponseStatus::Ended, body, output, None).await?;
            return Ok(Left::Ended);
        }
    };
    let begun = form.resource(&meta(&response), Word::InProgress, b"", None);
    let none = Bytes::from_static(b"[]");
    if !store.update_response(id, ResponseStatus::InProgress, begun, none, None).await? {
        return Ok(Left::Ended);
    }
    let open = Open { tenant, response: &response, chat: &chat, form: &form };
    let mut hold = gateway.answer_memory(&config.http).hold();
    let finished = match attempt(gateway, &open, lease, &mut hold, attempts).await {
        Ok(finished) => finished,
        Err(left) => return Ok(left),
    };
    let FinishedResponse { body, output, .. } = finished;
    match store.update_response(id, ResponseStatus::Ended, body, output, Some(room(&config.store))).await {
        Err(StoreError::Quota { .. }) => {
            let message = "The answer does not fit into what this key may keep (store.key_response_bytes_max).";
            let failure = ResponseFailure { code: "server_error", message: message.into() };
            let FinishedResponse { body, output, .. } =
                form.collector(&meta(&response)).failed(Word::Failed, Some(&failure));
            store.update_response(id, ResponseStatus::Ended, body, output, None).await?;
        }
        updated => drop(updated?),
    }
    Ok(Left::Ended)
}

/// Background response that is being answered, with its request decoded.
struct Open<'a> {
    tenant: &'a Tenant,
    response: &'a ResponseRecord,
    chat: &'a ChatRequest,
    form: &'a ResponseForm,
}

/// Asks the model once. A failure that can pass leads to another attempt later; a wait for the key's own limit counts
/// as no attempt.
async fn attempt(
    gateway: &Gateway,
    open: &Open<'_>,
    lease: BodyLease,
    hold: &mut Hold,
    attempts: u32,
) -> Result<FinishedResponse, Left> {
    let mut collector = open.form.collector(&meta(open.response));
    let answered = caught(once(gateway, open, lease, &mut collector, hold)).await;
    let failure = match answered.unwrap_or_else(|panic| Err(Failure::internal(panic))) {
        Ok(()) => match collector.finished() {
            Some(finished) => return Ok(finished),
            None => Failure::internal("the upstream ended before the response had finished"),
        },
        Err(failure) => failure,
    };
    let own_limit = failure.refusal.is_some();
    if failure.should_retry() && (own_limit || attempts + 1 < ATTEMPTS_MAX) {
        let pause = (PAUSE * (1 << (attempts + 1))).max(failure.retry_after.unwrap_or_default());
        return Err(Left::Again(pause, !own_limit));
    }
    let code = match failure.kind {
        ErrorKind::RateLimited => "rate_limit_exceeded",
        ErrorKind::InvalidRequest | ErrorKind::ContextLength | ErrorKind::Unsupported => "invalid_prompt",
        _ => "server_error",
    };
    let failure = ResponseFailure { code, message: failure.message.into() };
    Ok(collector.failed(Word::Failed, Some(&failure)))
}

async fn once(
    gateway: &Gateway,
    open: &Open<'_>,
    lease: BodyLease,
    collector: &mut ResponseCollector,
    hold: &mut Hold,
) -> Result<(), Failure> {
    let serving = gateway.serving();
    let keeper = gateway.keeper().ok_or_else(|| Failure::internal("a stored response without a store"))?;
    let (store, tenant) = (keeper.store.as_ref(), open.tenant.as_str());
    let principal = gateway.guard.recall(&serving.identity, store, tenant, Surface::Responses).await?;
    let body = Body { bytes: open.response.request.clone(), lease };
    let mut call =
        Call::new(Ask::new(Surface::Responses), body, new_request_id(), HeaderMap::new(), penstock_dialects::decode)
            .await?;
    let decoded = Decoded { request: Request::Chat(Box::new(open.chat.clone())), form: Box::new(open.form.clone()) };
    call.answer_as(meta(open.response), decoded);
    (call.background, call.own) = (true, true);
    let deadline = serving.config.request_timeout.map(|limit| (Instant::now() + limit).into_std());
    // The collected answer is encoded once more when it is stored.
    let mut take = |event: &ChatEvent| {
        collector.event(event);
        hold.cover(2 * WholeCollector::bytes(collector))
    };
    answer_events(gateway, &principal, call, deadline, &mut take).await.map(drop)
}
