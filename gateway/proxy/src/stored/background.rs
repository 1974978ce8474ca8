//! Runner of background responses, whose clients do not wait.
//!
//! The store is the truth: a response is queued there before its client is told, and ends there once. A killed gateway
//! runs open responses again when it starts: a model may be asked more than once, the response is answered once.
//!
//! A response that is streamed keeps its events (`events`) while it is answered. Once one of them may have been told, the
//! answer is not begun again: a failure, or a gateway that ends or is killed, ends the response as failed.
//!
//! Of several gateways on one store the leader begins responses, each under a claim (`claims`). A gateway that has lost
//! the lead goes on with those that it has begun, and the next leader leaves them alone while it lives.
//!
//! Keys share the places (`places`). A place is held for one attempt: a response that waits for its next one, because
//! an upstream failed or its key's own limit is used up, rests in the store meanwhile.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use penstock_dialects::openai::{
    FinishedResponse, ResponseCollector, ResponseFailure, ResponseForm, ResponseStatus as Word, ResponsesRequest,
};
use penstock_proto::ErrorKind;
use penstock_store::{
    ObjectId, OpenResponse, ResponseChange, ResponseId, ResponseRecord, ResponseRoom, ResponseStatus, StoreError,
    Tenant,
};
use penstock_types::{AnswerMeta, Bounds, ChatEvent, Surface, WholeCollector};
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::Keeper;
use super::edits::{Resolved, bytes_of, charged, resolve};
use super::places::Turns;
use super::responses::{QUEUED_EVENTS, before, meta, room};
use super::talk::{self, Keep, Talk, is_locked};
use crate::background_answer::answer_events;
use crate::event_log::Log;
use crate::gateway::Gateway;
use crate::keeper::patiently;
use penstock_base::asker::Asker;
use penstock_base::error::Failure;
use penstock_base::panics::caught;
use penstock_config::StoreConfig;
use penstock_http::exchange::new_request_id;
use penstock_http::{Body, BodyLease};
use penstock_types::ask::Ask;
use penstock_upstream::answer_memory::Hold;
use penstock_upstream::call::{Call, off_io};

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
/// Pause before a response looks again at its conversation, which another response holds; doubles with each look.
const LOCKED_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause before a response looks again at its conversation.
const LOCKED_PAUSE_MAX: Duration = Duration::from_secs(8);
/// Most attempts at one response; then it fails.
const ATTEMPTS_MAX: u32 = 5;
/// Backoff after the first attempt; doubles with each further one.
const PAUSE: Duration = Duration::from_millis(500);

/// Error of a response whose request this version cannot read.
const UNREADABLE: &str = "This gateway's version cannot read the stored request. Send it again.";
/// Error of a response that needs more memory than the whole budget has for one.
const TOO_LARGE: &str = "The request and its response need more memory than the gateway has for one background response \
    (server.body_memory_bytes_max). Send the request without `background`.";

/// Error of a response whose earlier turns need more memory than the whole budget has for one.
const EARLIER_TOO_LARGE: &str = "The earlier turns of the response need more memory than the gateway has for one response \
    (server.answer_memory_bytes_max).";

/// Response that has a place and is being answered.
struct Active {
    tenant: Tenant,
    waited: Waiting,
    task: AbortHandle,
}

/// Response that rests until its next attempt.
struct Rest {
    attempts: u32,
    until: Instant,
    /// Conversation that another response holds, and the looks at it so far.
    locked: Option<(ObjectId, u32)>,
}

/// Attempts of a response that waits for a place, and the conversation that it has found held.
#[derive(Clone, Default)]
struct Waiting {
    attempts: u32,
    locked: Option<(ObjectId, u32)>,
}

/// Outcome of one attempt at a background response.
enum Left {
    /// The response has ended, and the store has its result; or another gateway runs it.
    Ended,
    /// The response is tried again after a pause; the flag says whether the attempt counts.
    Again(Duration, bool),
    /// Another response holds the conversation of this one.
    Locked(ObjectId),
}

#[derive(Default)]
struct Runner {
    tasks: JoinSet<(ResponseId, Left)>,
    active: HashMap<ResponseId, Active>,
    resting: HashMap<ResponseId, Rest>,
    turns: Turns,
}

/// Runs background responses until another process serves, or this one ends. Does nothing without a store.
pub(crate) async fn run(gateway: Arc<Gateway>) {
    let Some(keeper) = gateway.keeper().cloned() else { return };
    let mut runner = Runner::default();
    loop {
        let looked = runner.turn(&gateway).await;
        if let Err(error) = &looked {
            tracing::warn!(%error, "background responses could not be read from the store");
        }
        keeper.responses_running.store(runner.active.len() as u64, Ordering::Relaxed);
        if !gateway.begins_work() && runner.tasks.is_empty() {
            return;
        }
        let look = Instant::now() + POLL;
        // A store that fails is not asked again at once for a response whose rest is over.
        let rests = runner.resting.values().map(|rest| rest.until).filter(|_| looked.is_ok());
        let next = rests.min().map_or(look, |until| until.min(look));
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
        let Some(Active { waited: Waiting { attempts, locked }, .. }) = self.active.remove(&id) else { return };
        let now = Instant::now();
        let rest = match left {
            Left::Ended => return,
            Left::Again(pause, counts) => {
                Rest { attempts: attempts + u32::from(counts), until: now + pause, locked: None }
            }
            Left::Locked(conversation) => {
                let looks = locked.map_or(0, |(_, looks)| looks);
                let pause = LOCKED_PAUSE.saturating_mul(1 << looks.min(8)).min(LOCKED_PAUSE_MAX);
                Rest { attempts, until: now + pause, locked: Some((conversation, looks + 1)) }
            }
        };
        self.resting.insert(id, rest);
    }

    async fn turn(&mut self, gateway: &Arc<Gateway>) -> Result<(), StoreError> {
        let Some(keeper) = gateway.keeper() else { return Ok(()) };
        while let Some(ended) = self.tasks.try_join_next() {
            self.left(ended);
        }
        if !gateway.begins_work() || !keeper.store.lead().await? {
            // Responses that wait here are run by the process that leads, or will lead; those that run are this one's.
            self.resting.clear();
            return self.stop_closed(gateway, &[]).await;
        }
        keeper.response_bytes.store(keeper.store.response_bytes().await?, Ordering::Relaxed);
        let open = keeper.store.open_responses(OF_KEY_MAX, LOOK_MAX).await?;
        self.stop_closed(gateway, &open).await?;
        let now = Instant::now();
        let mut resting = std::mem::take(&mut self.resting);
        let mut waiting = Vec::new();
        // Of responses that have found one conversation held, the oldest looks for all of them.
        let mut looked_at: HashSet<ObjectId> = HashSet::new();
        for OpenResponse { tenant, id } in open {
            match resting.remove(&id) {
                _ if self.active.contains_key(&id) || keeper.claims.is_elsewhere(id.as_str()) => {}
                Some(rest)
                    if rest.until > now || rest.locked.as_ref().is_some_and(|(at, _)| looked_at.contains(at)) =>
                {
                    looked_at.extend(rest.locked.iter().map(|(conversation, _)| conversation.clone()));
                    self.resting.insert(id, rest);
                }
                Some(Rest { attempts, locked, .. }) => {
                    looked_at.extend(locked.iter().map(|(conversation, _)| conversation.clone()));
                    waiting.push((tenant, (id, Waiting { attempts, locked })));
                }
                None => waiting.push((tenant, (id, Waiting::default()))),
            }
        }
        let mut taken = HashMap::new();
        self.active.values().for_each(|active| *taken.entry(active.tenant.clone()).or_default() += 1);
        let next = self.turns.next(&waiting, taken, PLACES);
        for (tenant, (id, waited)) in next {
            let task = self.tasks.spawn(attend(gateway.clone(), tenant.clone(), id.clone(), waited.attempts));
            self.active.insert(id.clone(), Active { tenant: tenant.clone(), waited: waited.clone(), task });
        }
        // A waiting response without a place goes back to rest, with what it has tried.
        for (_, (id, Waiting { attempts, locked })) in &waiting {
            if (*attempts > 0 || locked.is_some()) && !self.active.contains_key(id) {
                self.resting.insert(id.clone(), Rest { attempts: *attempts, until: now, locked: locked.clone() });
            }
        }
        Ok(())
    }

    /// Stops tasks whose response was cancelled or deleted: dropping the task cancels its request upstream.
    async fn stop_closed(&mut self, gateway: &Gateway, open: &[OpenResponse]) -> Result<(), StoreError> {
        let Some(keeper) = gateway.keeper() else { return Ok(()) };
        let listed: HashSet<&ResponseId> = open.iter().map(|open| &open.id).collect();
        for (id, active) in self.active.iter().filter(|(id, _)| !listed.contains(id)) {
            // A response that is not listed may only be too far behind in its key's queue.
            let state = keeper.store.response_state(&active.tenant, id).await?;
            if state.is_none_or(|state| state.status == ResponseStatus::Ended) {
                active.task.abort();
                // It was ended at another gateway: the store says how.
                keeper.logs.find(id).iter().for_each(|log| log.close());
            }
        }
        Ok(())
    }
}

/// Runs one attempt. When the store fails, a later attempt begins again.
async fn attend(gateway: Arc<Gateway>, tenant: Tenant, id: ResponseId, attempts: u32) -> (ResponseId, Left) {
    let left = Box::pin(claimed(&gateway, &tenant, &id, attempts)).await.unwrap_or_else(|error| {
        tracing::warn!(response = %id, %error, "a background response pauses: the store failed");
        Left::Again(STORE_PAUSE, false)
    });
    (id, left)
}

/// Runs one attempt under a claim on the response, for as long as this process has the claim.
async fn claimed(gateway: &Gateway, tenant: &Tenant, id: &ResponseId, attempts: u32) -> Result<Left, StoreError> {
    let Some(keeper) = gateway.keeper() else { return Ok(Left::Ended) };
    // Another gateway has begun it since the last look at the claims.
    let Some(mut claim) = keeper.claims.take(id.as_str()).await? else { return Ok(Left::Ended) };
    let left = tokio::select! {
        biased;
        () = claim.lost() => {
            tracing::warn!(response = %id, "a background response stops: another gateway of the store has taken it over");
            // The store says how it goes on.
            keeper.logs.find(id).iter().for_each(|log| log.close());
            Ok(Left::Ended)
        }
        left = drive(gateway, tenant, id, attempts) => left,
    };
    claim.release().await;
    left
}

async fn drive(gateway: &Gateway, tenant: &Tenant, id: &ResponseId, attempts: u32) -> Result<Left, StoreError> {
    let Some(keeper) = gateway.keeper() else { return Ok(Left::Ended) };
    let store = &keeper.store;
    let Some(response) = store.response(tenant, id).await? else { return Ok(Left::Ended) };
    if response.status == ResponseStatus::Ended {
        return Ok(Left::Ended);
    }
    // The request's texts stay in memory while it is answered.
    let bytes = response.request.len() + response.body.len();
    if bytes > gateway.bodies.lease_bytes_max() {
        tracing::warn!(
            response = %id,
            bytes,
            bytes_max = gateway.bodies.lease_bytes_max(),
            "a background response ends as failed: its stored request and response need more memory than one response can have (server.body_memory_bytes_max)"
        );
        end_unread(keeper, id, &response.body, TOO_LARGE).await?;
        return Ok(Left::Ended);
    }
    let mut lease = text_lease(gateway, tenant, bytes);
    if lease.cover(bytes).is_err() {
        return Ok(Left::Again(MEMORY_PAUSE, false));
    }
    let config = gateway.serving().config.clone();
    let request = match decoded(&response).await {
        Ok(request) => request,
        Err(error) => {
            tracing::warn!(
                response = %id,
                error = &*error.message,
                "the stored request of a background response cannot be read (written by another version of the gateway): the response ends as failed"
            );
            end_unread(keeper, id, &response.body, UNREADABLE).await?;
            return Ok(Left::Ended);
        }
    };
    let is_streamed = request.stream;
    let form = request.form();
    let mut ending = Ending { keeper, id, meta: meta(&response), form, log: None };
    if is_streamed {
        let kept = keeper.logs.find(id);
        let begun = response.status == ResponseStatus::InProgress;
        if begun || kept.as_ref().is_some_and(|log| log.next() > QUEUED_EVENTS) {
            // Clients have had events of an attempt that is gone, or may have had them at the gateway that made it: another
            // answer would contradict them. The log here says nothing of that: a client that follows makes one.
            ending.log = kept;
            let message = "The gateway ended before this response was complete, or its store failed. Ask again.";
            ending.failed("server_error", message.into()).await?;
            return Ok(Left::Ended);
        }
        let queued = ending.form.queued_events(&ending.meta);
        ending.log = Some(keeper.logs.of(id, || Log::new(&queued, config.store.response_event_bytes_max)));
    }
    let talk = match taken(keeper, tenant, &request, &response, &config.store).await {
        Err(failure) if is_locked(&failure) => {
            let held = request.conversation.as_deref().and_then(|id| talk::parsed(id).ok());
            return Ok(held.map_or(Left::Again(STORE_PAUSE, false), Left::Locked));
        }
        talk => talk,
    };
    let rebuilt = match talk {
        Ok(talk) => rebuilt(gateway, tenant, request).await.map(|made| (made, talk)),
        Err(failure) => Err(failure),
    };
    // The earlier turns stay charged until the response has ended.
    let (resolved, _earlier, talk) = match rebuilt {
        Ok((Some((resolved, earlier)), talk)) => (resolved, earlier, talk),
        Ok((None, _)) => return Ok(Left::Again(MEMORY_PAUSE, false)),
        Err(failure) if failure.should_retry() => return Ok(Left::Again(STORE_PAUSE, false)),
        // The previous response or the conversation was deleted in the meantime.
        Err(failure) => {
            ending.failed("invalid_prompt", failure.message.into()).await?;
            return Ok(Left::Ended);
        }
    };
    let form = resolved.form.clone();
    let begun = form.resource(&meta(&response), Word::InProgress, b"", None);
    let begun = open_as(ResponseStatus::InProgress, begun);
    if !patiently(id.as_str(), || store.update_response(id, begun.clone(), None)).await? {
        return Ok(Left::Ended);
    }
    let open = Open { tenant, response: &response, form: &form, log: ending.log.as_deref() };
    let mut hold = gateway.answer_memory(tenant.as_str(), &config.http).hold();
    let (finished, last) = match attempt(gateway, &open, resolved, lease, &mut hold, attempts).await {
        Ok(finished) => finished,
        Err(left) => {
            // Nothing was told yet, so whoever goes on, after a restart too, may begin anew.
            if is_streamed {
                let queued = open_as(ResponseStatus::Queued, response.body.clone());
                patiently(id.as_str(), || store.update_response(id, queued.clone(), None)).await?;
            }
            return Ok(left);
        }
    };
    let FinishedResponse { body, output, status } = finished;
    let events = ending.log.as_ref().map_or_else(Bytes::new, |log| log.document(&last));
    let change = ResponseChange { status: ResponseStatus::Ended, body, output: output.clone(), events };
    match end(keeper, tenant, id, &change, Some(room(&config.store))).await {
        Err(StoreError::Quota { .. }) => {
            let message = "The answer does not fit into what this key may keep (store.key_response_bytes_max).";
            ending.failed("server_error", message.into()).await?;
        }
        // The response was cancelled or deleted meanwhile: clients that follow are told so by the store.
        Ok(false) => ending.log.iter().for_each(|log| log.close()),
        Ok(true) => {
            // The end comes first: a conversation has the items of complete responses only. A gateway that is killed
            // between the two leaves them out.
            if let Some(talk) = talk.filter(|_| status != Word::Failed)
                && let Err(error) = talk.extend(&output).await
            {
                keeper.unsaved(id.as_str(), &format!("its conversation was not extended: {error}"));
            }
            ending.log.iter().for_each(|log| log.end(&last));
        }
        Err(error) => return Err(error),
    }
    Ok(Left::Ended)
}

/// Ends a response in the store, which is waited for while it is away. `false`: the response was ended or deleted by
/// somebody else.
async fn end(
    keeper: &Keeper,
    tenant: &Tenant,
    id: &ResponseId,
    change: &ResponseChange,
    room: Option<ResponseRoom>,
) -> Result<bool, StoreError> {
    let store = &keeper.store;
    let mut asked = 0;
    let ended = patiently(id.as_str(), || {
        asked += 1;
        store.update_response(id, change.clone(), room)
    });
    if ended.await? {
        return Ok(true);
    }
    if asked < 2 {
        return Ok(false);
    }
    // An ask whose answer was lost may have ended it.
    let kept = patiently(id.as_str(), || store.response(tenant, id)).await?;
    Ok(kept.is_some_and(|kept| kept.status == ResponseStatus::Ended && kept.body == change.body))
}

/// Lease for the texts of a response, `bytes` in all. The lease counts towards the key's share, or towards none where the
/// texts exceed a share, since they would wait for ever.
fn text_lease(gateway: &Gateway, tenant: &Tenant, bytes: usize) -> BodyLease {
    if bytes > gateway.bodies.share_bytes_max() {
        return gateway.bodies.lease();
    }
    gateway.bodies.lease_of(Asker::new(tenant.as_str(), None))
}

/// Ends a response as failed whose request was not read.
async fn end_unread(keeper: &Keeper, id: &ResponseId, body: &Bytes, message: &str) -> Result<(), StoreError> {
    let (body, output) = (failed_body(body, message), Bytes::from_static(b"[]"));
    let change = ResponseChange { status: ResponseStatus::Ended, body, output, events: Bytes::new() };
    keeper.store.update_response(id, change, None).await?;
    keeper.logs.find(id).iter().for_each(|log| log.close());
    Ok(())
}

/// Request of a response that waits or runs.
async fn decoded(response: &ResponseRecord) -> Result<ResponsesRequest, Failure> {
    let request = response.request.clone();
    Ok(off_io(request.len(), move || ResponsesRequest::decode(&request, &Bounds::default())).await??)
}

/// Body of a response whose request is not read: the stored body, which has failed.
fn failed_body(body: &Bytes, message: &str) -> Bytes {
    let Ok(serde_json::Value::Object(mut fields)) = serde_json::from_slice(body) else { return body.clone() };
    fields.insert("status".into(), "failed".into());
    fields.insert("error".into(), serde_json::json!({"code": "server_error", "message": message}));
    serde_json::Value::Object(fields).to_string().into()
}

/// An unfinished response with this body.
fn open_as(status: ResponseStatus, body: Bytes) -> ResponseChange {
    ResponseChange { status, body, output: Bytes::from_static(b"[]"), events: Bytes::new() }
}

/// Response in the background, as far as its end without an answer needs it.
struct Ending<'a> {
    keeper: &'a Keeper,
    id: &'a ResponseId,
    meta: AnswerMeta,
    form: ResponseForm,
    /// Events of a response that is streamed.
    log: Option<Arc<Log>>,
}

impl Ending<'_> {
    /// Ends the response with a failure, in the store and for the clients that follow.
    async fn failed(&self, code: &'static str, message: String) -> Result<(), StoreError> {
        let failure = ResponseFailure { code, message };
        let FinishedResponse { body, output, .. } =
            self.form.collector(&self.meta).failed(Word::Failed, Some(&failure));
        let number = self.log.as_ref().map_or(QUEUED_EVENTS, |log| log.next());
        let last = self.form.closing_event(&self.meta, number, Word::Failed, Some(&failure));
        // Whatever was streamed is part of no answer: only the end is kept.
        let change = ResponseChange { status: ResponseStatus::Ended, body, output, events: last.clone() };
        let store = &self.keeper.store;
        let changed = patiently(self.id.as_str(), || store.update_response(self.id, change.clone(), None)).await?;
        // Where it was cancelled or deleted meanwhile, clients that follow are told so by the store.
        self.log.iter().for_each(|log| if changed { log.end(&last) } else { log.close() });
        Ok(())
    }
}

/// The conversation that a background response goes on with, held for it.
async fn taken(
    keeper: &Arc<Keeper>,
    tenant: &Tenant,
    request: &ResponsesRequest,
    response: &ResponseRecord,
    config: &StoreConfig,
) -> Result<Option<Talk>, Failure> {
    let Some(id) = &request.conversation else { return Ok(None) };
    let keep = Keep { seconds: config.response_days * 86_400, room: room(config) };
    let id = talk::parsed(id)?;
    Talk::take(keeper, tenant, &id, response.input.clone(), keep, Duration::ZERO).await.map(Some)
}

/// Request of a waiting response, with its earlier turns read anew. Their memory is charged to `hold`: to the key's
/// share, or, if the turns exceed a share, to the whole memory alone, since they would never fit the share. `None`: no
/// memory is free now.
///
/// # Errors
/// The turns are gone, or need more memory than there is.
async fn rebuilt(
    gateway: &Gateway,
    tenant: &Tenant,
    request: ResponsesRequest,
) -> Result<Option<(Resolved, Hold)>, Failure> {
    let keeper = gateway.keeper().ok_or_else(|| Failure::internal("a stored response without a store"))?;
    let config = gateway.serving().config.clone();
    let http = &config.http;
    let turns = before(keeper, tenant, &request.needs(), http.body_bytes_max).await?;
    // As part of the request, and once more until the plugins have run.
    let (bytes, has_plugins) = (bytes_of(&turns), !config.plugins.is_empty());
    let all = if has_plugins { 2 * bytes } else { bytes };
    let nobodys = gateway.answer_memory("", http);
    if all > nobodys.hold_bytes_max() {
        return Err(Failure::new(ErrorKind::TooLarge, EARLIER_TOO_LARGE));
    }
    let memory = if all > nobodys.share_bytes_max() { nobodys } else { gateway.answer_memory(tenant.as_str(), http) };
    let Ok((hold, kept)) = charged(&memory, bytes, has_plugins) else { return Ok(None) };
    let resolved = resolve(request, turns, ResponsesRequest::decode, kept).await??;
    Ok(Some((resolved, hold)))
}

/// Background response that is being answered.
struct Open<'a> {
    tenant: &'a Tenant,
    response: &'a ResponseRecord,
    form: &'a ResponseForm,
    /// Events of a response that is streamed.
    log: Option<&'a Log>,
}

/// Asks the model once; returns the answer, and the last event of one that is streamed. A failure that can pass leads to another attempt later; a wait for the key's own limit counts
/// as no attempt.
async fn attempt(
    gateway: &Gateway,
    open: &Open<'_>,
    resolved: Resolved,
    lease: BodyLease,
    hold: &mut Hold,
    attempts: u32,
) -> Result<(FinishedResponse, Bytes), Left> {
    let mut collector = match open.log {
        Some(_) => open.form.telling_collector(&meta(open.response)),
        None => open.form.collector(&meta(open.response)),
    };
    let answered = caught(once(gateway, open, resolved, lease, &mut collector, hold)).await;
    let failure = match answered.unwrap_or_else(|panic| Err(Failure::internal(panic))) {
        Ok(()) => match collector.finished() {
            Some(finished) => {
                collector.close(finished.status, None);
                return Ok((finished, collector.take_events()));
            }
            None => Failure::internal("the upstream ended before the response had finished"),
        },
        Err(failure) => failure,
    };
    let own_limit = failure.refusal.is_some();
    let is_untold = open.log.is_none_or(|log| log.next() <= QUEUED_EVENTS);
    if is_untold && gateway.live.is_background_over() {
        // This process ends: the next one begins anew, whatever it failed of here.
        return Err(Left::Again(PAUSE, false));
    }
    if is_untold && failure.should_retry() && (own_limit || attempts + 1 < ATTEMPTS_MAX) {
        let pause = (PAUSE * (1 << (attempts + 1))).max(failure.retry_after.unwrap_or_default());
        return Err(Left::Again(pause, !own_limit));
    }
    let code = match failure.kind {
        ErrorKind::RateLimited => "rate_limit_exceeded",
        ErrorKind::InvalidRequest | ErrorKind::ContextLength | ErrorKind::Unsupported => "invalid_prompt",
        _ => "server_error",
    };
    let failure = ResponseFailure { code, message: failure.message.into() };
    collector.close(Word::Failed, Some(&failure));
    Ok((collector.failed(Word::Failed, Some(&failure)), collector.take_events()))
}

async fn once(
    gateway: &Gateway,
    open: &Open<'_>,
    resolved: Resolved,
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
    resolved.put(&mut call, meta(open.response));
    // The events are written here; the answer to the call itself is whole.
    (call.background, call.own, call.stream) = (true, true, false);
    let deadline = serving.config.request_timeout.map(|limit| (Instant::now() + limit).into_std());
    // The collected answer is encoded once more when it is stored.
    let mut take = |event: &ChatEvent| {
        collector.event(event);
        let told = collector.take_events();
        open.log.iter().for_each(|log| log.push(&told));
        hold.cover(2 * WholeCollector::bytes(collector) + open.log.map_or(0, Log::bytes))
    };
    answer_events(gateway, &principal, call, deadline, &mut take).await.map(drop)
}
