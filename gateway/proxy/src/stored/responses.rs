//! Routes of `/v1/responses`, and the part of the store in answering them.
//!
//! A request that needs the store ([`prepare`]) is resolved here: earlier turns go in front, its answer is collected
//! beside the stream. A request that wants nothing stored goes on as any other.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, header};
use penstock_dialects::openai::{Listed, ResponseForm, ResponseStatus as Word, ResponsesRequest, StoreNeeds};
use penstock_proto::ErrorKind;
use penstock_store::{
    ResponseChange, ResponseId, ResponseRecord, ResponseRoom, ResponseStatus, StoreError, Tenant, Turn,
};
use penstock_types::error_shape::ErrorShape;
use penstock_types::{AnswerMeta, ApiError, Bounds};

use super::edits;
use super::events::{Follower, not_streamed};
use super::keeping::{Draft, Keeping};
use super::talk::{self, Keep, LOCK_WAIT, Talk};
use super::{Keeper, SHOWN_TIMES, Visit, absent, answer, failed, json};
use crate::answer::KeepAnswer;
use crate::event_log::Log;
use crate::gateway::Gateway;
use crate::handler::End;
use crate::list_query as query;
use crate::saving::Looks;
use penstock_auth::Principal;
use penstock_base::clock::unix_seconds;
use penstock_base::error::Failure;
use penstock_config::StoreConfig;
use penstock_upstream::answer_memory::Hold;
use penstock_upstream::call::{Call, off_io};

/// Most stored responses of one key, passed to the store with the bounds on bytes.
const RESPONSES_MAX: u64 = 1_000_000;
/// Most stored turns of one conversation that a request can build on.
const TURNS_MAX: u32 = 1000;
/// Number of events of a response that waits in the background.
pub(super) const QUEUED_EVENTS: u64 = ResponseForm::QUEUED_EVENTS;

/// Shape of a `previous_response_id` that does not exist.
const NO_PREVIOUS: ErrorShape =
    ErrorShape { status: 404, kind: "invalid_request_error", code: Some("previous_response_not_found") };

/// Outcome of [`prepare`]: the call is answered now or later.
pub(crate) enum Prepared {
    /// The call is answered now, and stored if there is a collector.
    Ask(Box<Call>, Option<Box<dyn KeepAnswer>>),
    /// The call is answered later; this body is sent now.
    Queued(Bytes),
    /// The call is answered later; its events are sent as they come.
    Followed(ResponseId, Arc<Log>),
}

/// Bounds by which the store makes room for another response: count, bytes per key, bytes in all.
pub(super) fn room(config: &StoreConfig) -> ResponseRoom {
    ResponseRoom {
        tenant_max: RESPONSES_MAX,
        tenant_bytes_max: config.key_response_bytes_max,
        bytes_max: config.response_bytes_max,
    }
}

/// Adds the stored turns of the conversation to a request, and decides whether it runs in the background.
pub(crate) async fn prepare(
    gateway: &Gateway,
    principal: &Arc<Principal>,
    mut call: Call,
) -> Result<Prepared, Failure> {
    let Some(keeper) = gateway.keeper() else { return Ok(Prepared::Ask(Box::new(call), None)) };
    let body = call.body.clone();
    let request = match off_io(body.len(), move || ResponsesRequest::decode(&body, &Bounds::default())).await? {
        Ok(request) => request,
        Err(error) => {
            let call = unread(gateway, principal, keeper, call, error).await?;
            return Ok(Prepared::Ask(Box::new(call), None));
        }
    };
    let alone = request.previous_response_id.is_none() && request.conversation.is_none();
    if !request.store && !request.background && alone {
        return Ok(Prepared::Ask(Box::new(call), None));
    }
    // Before anything is kept: what may not be asked is told at once.
    let serving = gateway.serving();
    serving.upstream(&call.model, principal)?;
    let config = serving.config.clone();
    let (tenant, created) = (Tenant::new(principal.tenant()), unix_seconds());
    let mut record = ResponseRecord {
        id: ResponseId::random(),
        status: ResponseStatus::Ended,
        previous: request.previous_response_id.as_deref().and_then(ResponseId::parse),
        created,
        expires: created + config.store.response_days * 86_400,
        body: Bytes::new(),
        input: request.input_items(),
        output: Bytes::from_static(b"[]"),
        request: Bytes::new(),
        event_bytes: 0,
    };
    let (store, background, stream) = (request.store, request.background, request.stream);
    check_background(&request)?;
    let keep = Keep { seconds: config.store.response_days * 86_400, room: room(&config.store) };
    // A response in the background takes its conversation when its turn comes.
    let found = match &request.conversation {
        Some(id) if !background => taken(keeper, &tenant, id, &record, keep).await.map(Some),
        _ => Ok(None),
    };
    let found = match found {
        Ok(talk) => {
            before(keeper, &tenant, &request.needs(), config.http.body_bytes_max).await.map(|turns| (turns, talk))
        }
        Err(failure) => Err(failure),
    };
    let (turns, talk) = match found {
        Err(failure) if failure.kind == ErrorKind::NotFound && !background => {
            // A provider that keeps responses itself may know it.
            call.unresolved = Some(Box::new(failure));
            call.read_edits_with(edits::partial(ResponsesRequest::decode));
            return Ok(Prepared::Ask(Box::new(call), None));
        }
        found => found?,
    };
    let memory = gateway.answer_memory(principal.tenant(), &config.http);
    let (earlier, kept) = edits::charged(&memory, edits::bytes_of(&turns), !config.plugins.is_empty())?;
    call.holds(earlier);
    call.own = !turns.is_empty();
    let resolved = match edits::resolve(request, turns, ResponsesRequest::decode, kept).await? {
        Ok(resolved) => resolved,
        // The items may be known to the provider alone; an upstream that cannot take the client's bytes refuses them.
        Err(_) if alone && !background => return Ok(Prepared::Ask(Box::new(call), None)),
        Err(error) => return Err(error.into()),
    };
    let form = resolved.form.clone();
    if background {
        record.status = ResponseStatus::Queued;
        record.body = form.resource(&meta(&record), Word::Queued, b"", None);
        record.request = call.body.clone();
        let (said, id) = (record.body.clone(), record.id.clone());
        let queued = stream.then(|| form.queued_events(&meta(&record)));
        // A request that its key may not send now is not stored for later.
        resolved.put(&mut call, meta(&record));
        let entry = serving.entry_of(&call, principal)?;
        penstock_governed::would_admit(&gateway.governor, &serving.rules, principal, &mut call, &entry).await?;
        gateway.guard.keep_identity(keeper.store.as_ref(), principal).await.map_err(failed)?;
        // The runner finds the log that the client follows.
        let log = queued.map(|queued| keeper.logs.of(&id, || Log::new(&queued, config.store.response_event_bytes_max)));
        keeper.store.save_response(&tenant, record, room(&config.store)).await.map_err(failed)?;
        keeper.wake_responses.notify_one();
        return Ok(match log {
            Some(log) => Prepared::Followed(id, log),
            None => Prepared::Queued(said),
        });
    }
    let keeping = match store || talk.is_some() {
        true => {
            let collector = Box::new(form.collector(&meta(&record)));
            let draft = Draft::Response { record: record.clone(), collector, store, talk };
            let mut keeping = Keeping::new(keeper.clone(), tenant, draft, keep.room, memory.hold());
            keeping.cover()?;
            Some(Box::new(keeping) as Box<dyn KeepAnswer>)
        }
        false => None,
    };
    resolved.put(&mut call, meta(&record));
    Ok(Prepared::Ask(Box::new(call), keeping))
}

/// The call of a count, with the stored turns of its conversation in front. Where they are not here, only a provider
/// that keeps responses itself can count it.
pub(super) async fn with_turns(gateway: &Gateway, principal: &Principal, mut call: Call) -> Result<Call, Failure> {
    let Some(keeper) = gateway.keeper() else { return Ok(call) };
    let body = call.body.clone();
    let decode = move || ResponsesRequest::decode_count(&body, &Bounds::default());
    let request = match off_io(call.body.len(), decode).await? {
        Ok(request) => request,
        Err(error) => return unread(gateway, principal, keeper, call, error).await,
    };
    if request.previous_response_id.is_none() && request.conversation.is_none() {
        return Ok(call);
    }
    let (tenant, config) = (Tenant::new(principal.tenant()), gateway.serving().config.clone());
    let turns = match before(keeper, &tenant, &request.needs(), config.http.body_bytes_max).await {
        Err(failure) if failure.kind == ErrorKind::NotFound => {
            call.unresolved = Some(Box::new(failure));
            call.read_edits_with(edits::partial(ResponsesRequest::decode_count));
            return Ok(call);
        }
        turns => turns?,
    };
    let memory = gateway.answer_memory(principal.tenant(), &config.http);
    let (earlier, kept) = edits::charged(&memory, edits::bytes_of(&turns), !config.plugins.is_empty())?;
    call.holds(earlier);
    call.own = true;
    let resolved = edits::resolve(request, turns, ResponsesRequest::decode_count, kept).await??;
    let meta = call.meta();
    resolved.put(&mut call, meta);
    Ok(call)
}

/// Call for a body that breaks one of the gateway's rules. A provider of the Responses API gets the client's bytes
/// unchanged, since it may know tools and fields that the gateway does not; every other upstream refuses the body when
/// it is decoded.
///
/// # Errors
/// `error`, if the request needs what is kept here: a response in the background, or earlier turns; or if it names both a
/// conversation and a response.
async fn unread(
    gateway: &Gateway,
    principal: &Principal,
    keeper: &Keeper,
    mut call: Call,
    error: ApiError,
) -> Result<Call, Failure> {
    let body = call.body.clone();
    let needs = off_io(body.len(), move || StoreNeeds::read(&body, &Bounds::default())).await?;
    let Ok(needs) = needs else { return Err(error.into()) };
    // No provider takes both.
    let names_two = needs.conversation.is_some() && needs.previous_response_id.is_some();
    if needs.background || names_two {
        return Err(error.into());
    }
    let (tenant, config) = (Tenant::new(principal.tenant()), gateway.serving().config.clone());
    let alone = needs.conversation.is_none() && needs.previous_response_id.is_none();
    match before(keeper, &tenant, &needs, config.http.body_bytes_max).await {
        Err(failure) if failure.kind == ErrorKind::NotFound => call.unresolved = Some(Box::new(failure)),
        Err(failure) => return Err(failure),
        Ok(_) if alone => {}
        Ok(_) => return Err(error.into()),
    }
    Ok(call)
}

fn check_background(request: &ResponsesRequest) -> Result<(), ApiError> {
    if request.background && !request.store {
        return Err(ApiError::invalid("background", "background: needs store, since the answer is fetched later"));
    }
    Ok(())
}

/// Id and time of an answer. The id is without the prefix that its dialect puts in front.
pub(super) fn meta(record: &ResponseRecord) -> AnswerMeta {
    let id = record.id.as_str();
    AnswerMeta::new(id.strip_prefix("resp_").unwrap_or(id).to_owned(), record.created)
}

fn no_previous(id: &str) -> Failure {
    let shown: String = id.chars().take(80).collect();
    let message = format!("Previous response with id '{shown}' not found.");
    let failure = Failure::new(ErrorKind::NotFound, message).param("previous_response_id");
    Failure { shape: Some(Box::new(NO_PREVIOUS)), ..failure }
}

/// The conversation of a request, held for its response.
async fn taken(
    keeper: &Arc<Keeper>,
    tenant: &Tenant,
    id: &str,
    record: &ResponseRecord,
    keep: Keep,
) -> Result<Talk, Failure> {
    Talk::take(keeper, tenant, &talk::parsed(id)?, record.input.clone(), keep, LOCK_WAIT).await
}

/// Stored turns before a request, oldest first; none where it names neither a response nor a conversation.
pub(super) async fn before(
    keeper: &Keeper,
    tenant: &Tenant,
    needs: &StoreNeeds,
    bytes_max: usize,
) -> Result<Vec<Turn>, Failure> {
    if let Some(id) = &needs.conversation {
        return talk::turns(keeper, tenant, &talk::parsed(id)?, bytes_max).await;
    }
    let Some(id) = &needs.previous_response_id else { return Ok(Vec::new()) };
    let id = &ResponseId::parse(id).ok_or_else(|| no_previous(id))?;
    keeper.saving.settled(id.as_str()).await;
    let look = || keeper.store.conversation(tenant, id, TURNS_MAX, bytes_max as u64);
    match looks(keeper, id).find(look).await {
        Ok(Some(turns)) => Ok(turns),
        Ok(None) => Err(no_previous(id.as_str())),
        Err(error @ StoreError::TooLong { .. }) => {
            let message = format!("The conversation is too long: {error}.");
            Err(Failure::new(ErrorKind::ContextLength, message).param("previous_response_id"))
        }
        Err(error) => Err(failed(error)),
    }
}

/// A response, and the memory charge that is held until it has been sent.
async fn held(visit: &Visit<'_>, id: &str) -> Result<(ResponseRecord, Hold), Failure> {
    let known = settled(visit, id).await?;
    let look = || visit.keeper.store.response(&visit.tenant, &known);
    let found = looks(visit.keeper, &known).find(look).await.map_err(failed)?;
    let record = found.ok_or_else(|| absent("Response", id))?;
    let hold = visit.charged(SHOWN_TIMES * record.bytes() as usize)?;
    Ok((record, hold))
}

/// Id of a response, once it is not being saved.
async fn settled(visit: &Visit<'_>, id: &str) -> Result<ResponseId, Failure> {
    let known = ResponseId::parse(id).ok_or_else(|| absent("Response", id))?;
    visit.keeper.saving.settled(known.as_str()).await;
    Ok(known)
}

/// Looks for a response that is not there. Only a gateway's own can be on its way: ids of providers are told at once.
fn looks(keeper: &Keeper, id: &ResponseId) -> Looks {
    Looks::new(id.is_own_form() && keeper.store.is_shared())
}

pub(super) async fn say(visit: &mut Visit<'_>, body: Bytes) -> Result<(), End> {
    let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    Ok(visit.exchange.respond(200, &json, body).await?)
}

pub(super) async fn show(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let target = &visit.exchange.head.target;
    if query::value(target, "stream").map_err(Failure::from)?.is_some_and(|stream| stream == "true") {
        let after = query::value(target, "starting_after").map_err(Failure::from)?;
        let bad = || ApiError::invalid("starting_after", "starting_after: must be the sequence number of an event");
        let next = after.map(|after| after.parse::<u64>().ok().and_then(|after| after.checked_add(1)).ok_or_else(bad));
        let next = next.transpose().map_err(Failure::from)?.unwrap_or(0);
        return follow(visit, id, next).await;
    }
    let (record, _hold) = held(visit, id).await?;
    say(visit, record.body).await
}

/// Sends the events of a response from number `next` on, as they come.
async fn follow(visit: &mut Visit<'_>, id: &str, next: u64) -> Result<(), End> {
    let known = settled(visit, id).await?;
    let look = || visit.keeper.store.response_state(&visit.tenant, &known);
    let found = looks(visit.keeper, &known).find(look).await.map_err(failed)?;
    let state = found.ok_or_else(|| absent("Response", id))?;
    let log = visit.keeper.logs.find(&known);
    let is_streamed = match state.status {
        ResponseStatus::Ended => state.event_bytes > 0,
        // The request is read only where nobody here follows or answers it; it is large, and not kept while one follows.
        _ => log.is_some() || unfinished(visit, id).await?.is_none_or(|open| open.is_streamed),
    };
    if !is_streamed {
        return Err(not_streamed().into());
    }
    let follower = Follower { gateway: visit.gateway, keeper: visit.keeper, tenant: &visit.tenant, id: &known };
    follower.follow(visit.exchange, log, next).await
}

/// Response that waits or runs in the background, as far as its request says.
struct Unfinished {
    id: ResponseId,
    meta: AnswerMeta,
    form: ResponseForm,
    /// Returns true if the events of the response are kept.
    is_streamed: bool,
}

/// The unfinished response of an id; `None`: it has ended.
async fn unfinished(visit: &Visit<'_>, id: &str) -> Result<Option<Unfinished>, Failure> {
    let (record, _hold) = held(visit, id).await?;
    if record.status == ResponseStatus::Ended {
        return Ok(None);
    }
    let (meta, bytes, id) = (meta(&record), record.request.len(), record.id.clone());
    let request = off_io(bytes, move || ResponsesRequest::decode(&record.request, &Bounds::default())).await??;
    Ok(Some(Unfinished { id, meta, form: request.form(), is_streamed: request.stream }))
}

pub(super) async fn delete(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let known = settled(visit, id).await?;
    let (store, tenant) = (&visit.keeper.store, &visit.tenant);
    let delete = || async { store.delete_response(tenant, &known).await.map(|is_deleted| is_deleted.then_some(())) };
    let deleted = looks(visit.keeper, &known).find(delete).await.map_err(failed)?;
    deleted.ok_or_else(|| absent("Response", id))?;
    // The response may be running: the runner is to cancel it.
    visit.keeper.wake_responses.notify_one();
    visit.keeper.logs.find(&known).iter().for_each(|log| log.close());
    answer(visit.exchange, &json::DeletedObject { id, object: "response", deleted: true }).await
}

pub(super) async fn cancel(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    if let Some(open) = unfinished(visit, id).await? {
        let body = open.form.resource(&open.meta, Word::Cancelled, b"", None);
        if end_cancelled(visit, &open, &body).await? {
            visit.keeper.wake_responses.notify_one();
            return say(visit, body).await;
        }
    }
    // Cancelled before: it is what was asked for.
    let (record, _hold) = held(visit, id).await?;
    if status(&record.body).as_deref() == Some("cancelled") {
        return say(visit, record.body).await;
    }
    let message = "Only a response that is being made in the background can be cancelled.";
    Err(Failure::new(ErrorKind::InvalidRequest, message).param("id").into())
}

/// Ends a response as cancelled, in the store and for the clients that follow. `false`: it has ended otherwise.
async fn end_cancelled(visit: &Visit<'_>, open: &Unfinished, body: &Bytes) -> Result<bool, Failure> {
    let log = visit.keeper.logs.find(&open.id);
    let last = |number| open.form.closing_event(&open.meta, number, Word::Cancelled, None);
    let _hold = visit.charged(log.as_ref().map_or(0, |log| 2 * log.bytes()))?;
    // The answer may still go on: nobody who follows gets an event that the store will not have.
    let _held = log.as_ref().map(|log| log.hold_back());
    let all = match &log {
        _ if !open.is_streamed => Bytes::new(),
        Some(log) => log.document_with(last),
        None => last(QUEUED_EVENTS),
    };
    let store = &visit.keeper.store;
    let update = |events, room| {
        let output = Bytes::from_static(b"[]");
        store.update_response(
            &open.id,
            ResponseChange { status: ResponseStatus::Ended, body: body.clone(), output, events },
            room,
        )
    };
    let changed = match update(all, Some(room(&visit.gateway.serving().config.store))).await {
        // Without room for the events, only the end is kept.
        Err(StoreError::Quota { .. } | StoreError::Full) => {
            update(if open.is_streamed { last(QUEUED_EVENTS) } else { Bytes::new() }, None).await
        }
        changed => changed,
    };
    let changed = changed.map_err(failed)?;
    if changed && let Some(log) = &log {
        log.end_with(last);
    }
    Ok(changed)
}

/// Value of `status` in the JSON of a response's body.
fn status(body: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Status {
        status: String,
    }
    serde_json::from_slice(body).ok().map(|Status { status }| status)
}

pub(super) async fn input_items(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let page = query::page(&visit.exchange.head.target, 20, 100).map_err(Failure::from)?;
    let (record, _hold) = held(visit, id).await?;
    let bytes = record.input.len();
    let shown = move || {
        let items = Listed::items(&record.input, &meta(&record).id)?;
        json::page_of(&query::cut(items, &page, |item| &item.id), Listed::item)
    };
    let body = off_io(bytes, shown).await?.map_err(Failure::from)?;
    say(visit, body).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_is_read_from_a_body() {
        assert_eq!(status(b"{\"status\":\"cancelled\"}").as_deref(), Some("cancelled"));
        assert_eq!(status(b"{}"), None);
    }
}
