//! Routes of `/v1/responses`, and the part of the store in answering them.
//!
//! A request that needs the store ([`prepare`]) is resolved here: earlier turns go in front, its answer is collected
//! beside the stream. A request that wants nothing stored goes on as any other.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, header};
use penstock_dialects::openai::{ResponseForm, ResponseStatus as Word, ResponsesRequest};
use penstock_proto::ErrorKind;
use penstock_store::{Order, ResponseId, ResponseRecord, ResponseRoom, ResponseStatus, StoreError, Tenant, Turn};
use penstock_types::error_shape::ErrorShape;
use penstock_types::{AnswerMeta, ApiError, Bounds, ChatRequest, Decoded, Request};
use serde_json::Value;

use super::keeping::Keeping;
use super::{Keeper, Visit, absent, answer, failed, json, query};
use crate::auth::Principal;
use crate::config::StoreConfig;
use crate::gateway::Gateway;
use crate::governed;
use crate::phases::End;
use penstock_base::clock::unix_seconds;
use penstock_base::error::Failure;
use penstock_upstream::answer_memory::Hold;
use penstock_upstream::call::Call;

/// Most stored responses of one key, passed to the store with the bounds on bytes.
const RESPONSES_MAX: u64 = 1_000_000;
/// Most stored turns of one conversation that a request can build on.
const TURNS_MAX: u32 = 1000;

/// Shape of a `previous_response_id` that does not exist.
const NO_PREVIOUS: ErrorShape =
    ErrorShape { status: 404, kind: "invalid_request_error", code: Some("previous_response_not_found") };

/// Outcome of [`prepare`]: the call is answered now or later.
pub(crate) enum Prepared {
    /// The call is answered now, and stored if there is a collector.
    Ask(Box<Call>, Option<Box<Keeping>>),
    /// The call is answered later; this body is sent now.
    Queued(Bytes),
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
    let request =
        penstock_upstream::call::off_io(body.len(), move || ResponsesRequest::decode(&body, &Bounds::default()))
            .await??;
    if !request.store && !request.background && request.previous_response_id.is_none() {
        return Ok(Prepared::Ask(Box::new(call), None));
    }
    // Before anything is kept: what may not be asked is told at once.
    let serving = gateway.serving();
    serving.upstream(&call.model, principal)?;
    let config = serving.config.clone();
    let (tenant, created) = (Tenant::new(principal.tenant()), unix_seconds());
    let previous = request.previous_response_id.as_deref();
    let previous = match previous.map(|id| ResponseId::parse(id).ok_or_else(|| no_previous(id))).transpose() {
        Err(failure) if !request.background => {
            call.unresolved = Some(Box::new(failure));
            return Ok(Prepared::Ask(Box::new(call), None));
        }
        previous => previous?,
    };
    let mut record = ResponseRecord {
        id: ResponseId::random(),
        status: ResponseStatus::Ended,
        previous,
        created,
        expires: created + config.store.response_days * 86_400,
        body: Bytes::new(),
        input: request.input_items(),
        output: Bytes::from_static(b"[]"),
        request: Bytes::new(),
    };
    let (store, background) = (request.store, request.background);
    check_background(&request)?;
    let turns = match earlier(keeper, &tenant, record.previous.as_ref(), config.http.body_bytes_max).await {
        Err(failure) if failure.kind == ErrorKind::NotFound && !background => {
            // A provider that keeps responses itself may know it.
            call.unresolved = Some(Box::new(failure));
            return Ok(Prepared::Ask(Box::new(call), None));
        }
        turns => turns?,
    };
    let memory = gateway.answer_memory(&config.http);
    let mut earlier = memory.hold();
    earlier.cover(turns.iter().map(|turn| turn.input.len() + turn.output.len()).sum())?;
    call.holds(earlier);
    call.own = !turns.is_empty();
    let (chat, form) = resolve(request, turns).await?;
    if background {
        record.status = ResponseStatus::Queued;
        record.body = form.resource(&meta(&record), Word::Queued, b"", None);
        record.request = call.body.clone();
        let said = record.body.clone();
        // A request that its key may not send now is not stored for later.
        call.answer_as(meta(&record), Decoded { request: Request::Chat(Box::new(chat)), form: Box::new(form) });
        let entry = serving.entry_of(&call, principal)?;
        governed::would_admit(&gateway.governor, &serving, principal, &mut call, &entry).await?;
        gateway.guard.keep_identity(keeper.store.as_ref(), principal).await.map_err(failed)?;
        keeper.store.save_response(&tenant, record, room(&config.store)).await.map_err(failed)?;
        keeper.wake_responses.notify_one();
        return Ok(Prepared::Queued(said));
    }
    let keeping = match store {
        true => {
            let (collector, hold) = (form.collector(&meta(&record)), memory.hold());
            let mut keeping =
                Keeping::new(keeper.clone(), tenant, record.clone(), collector, room(&config.store), hold);
            keeping.cover()?;
            Some(Box::new(keeping))
        }
        false => None,
    };
    call.answer_as(meta(&record), Decoded { request: Request::Chat(Box::new(chat)), form: Box::new(form) });
    Ok(Prepared::Ask(Box::new(call), keeping))
}

fn check_background(request: &ResponsesRequest) -> Result<(), ApiError> {
    if request.background && !request.store {
        return Err(ApiError::invalid("background", "background: needs store, since the answer is fetched later"));
    }
    if request.background && request.stream {
        let message = "stream: a response in the background is not streamed; ask for it by its id";
        return Err(ApiError::unsupported_value("stream", message));
    }
    Ok(())
}

/// Id and time of an answer. The id is without the prefix that its dialect puts in front.
pub(super) fn meta(record: &ResponseRecord) -> AnswerMeta {
    let id = record.id.as_str();
    AnswerMeta { id: id.strip_prefix("resp_").unwrap_or(id).to_owned(), created: record.created }
}

fn no_previous(id: &str) -> Failure {
    let shown: String = id.chars().take(80).collect();
    let message = format!("Previous response with id '{shown}' not found.");
    let failure = Failure::new(ErrorKind::NotFound, message).param("previous_response_id");
    Failure { shape: Some(Box::new(NO_PREVIOUS)), ..failure }
}

/// Stored turns before a request, oldest first; none without `previous`.
pub(super) async fn earlier(
    keeper: &Keeper,
    tenant: &Tenant,
    previous: Option<&ResponseId>,
    bytes_max: usize,
) -> Result<Vec<Turn>, Failure> {
    let Some(id) = previous else { return Ok(Vec::new()) };
    keeper.saving.settled(id).await;
    match keeper.store.conversation(tenant, id, TURNS_MAX, bytes_max as u64).await {
        Ok(Some(turns)) => Ok(turns),
        Ok(None) => Err(no_previous(id.as_str())),
        Err(StoreError::Quota { max, .. }) => {
            let message = format!("The conversation is too long: more than {max} turns or bytes.");
            Err(Failure::new(ErrorKind::ContextLength, message).param("previous_response_id"))
        }
        Err(error) => Err(failed(error)),
    }
}

/// Chat request made of a request and its earlier turns.
pub(super) async fn resolve(
    request: ResponsesRequest,
    turns: Vec<Turn>,
) -> Result<(ChatRequest, ResponseForm), Failure> {
    let bytes: usize = turns.iter().map(|turn| turn.input.len() + turn.output.len()).sum();
    let stored = request.store;
    let work = move || {
        let lists: Vec<&[u8]> = turns.iter().flat_map(|turn| [turn.input.as_ref(), turn.output.as_ref()]).collect();
        request.resolve(&lists, stored)
    };
    Ok(penstock_upstream::call::off_io(bytes, work).await??)
}

/// A response, and the memory charge that is held until it has been sent.
async fn held(visit: &Visit<'_>, id: &str) -> Result<(ResponseRecord, Hold), Failure> {
    let record = find(visit, id).await?;
    let mut hold = visit.gateway.answer_memory(&visit.gateway.serving().config.http).hold();
    hold.cover(record.bytes() as usize)?;
    Ok((record, hold))
}

async fn find(visit: &Visit<'_>, id: &str) -> Result<ResponseRecord, Failure> {
    let known = ResponseId::parse(id).ok_or_else(|| absent("Response", id))?;
    visit.keeper.saving.settled(&known).await;
    let found = visit.keeper.store.response(&visit.tenant, &known).await.map_err(failed)?;
    found.ok_or_else(|| absent("Response", id))
}

async fn say(visit: &mut Visit<'_>, body: Bytes) -> Result<(), End> {
    let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    Ok(visit.exchange.respond(200, &json, body).await?)
}

pub(super) async fn show(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let target = &visit.exchange.head.target;
    if query::value(target, "stream").map_err(Failure::from)?.is_some_and(|stream| stream == "true") {
        let message = "stream: stored responses are not streamed; ask for the response as it is";
        return Err(Failure::from(ApiError::unsupported_value("stream", message)).into());
    }
    let (record, _hold) = held(visit, id).await?;
    say(visit, record.body).await
}

pub(super) async fn delete(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let record = find(visit, id).await?;
    if !visit.keeper.store.delete_response(&visit.tenant, &record.id).await.map_err(failed)? {
        return Err(absent("Response", id).into());
    }
    // The response may be running: the runner is to cancel it.
    visit.keeper.wake_responses.notify_one();
    answer(visit.exchange, &json::DeletedObject { id, object: "response", deleted: true }).await
}

pub(super) async fn cancel(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let record = find(visit, id).await?;
    if record.status != ResponseStatus::Ended {
        let limit = visit.gateway.serving().config.http.body_bytes_max;
        let (_, form) = rebuilt(visit.keeper, &visit.tenant, &record, limit).await?;
        let body = form.resource(&meta(&record), Word::Cancelled, b"", None);
        let output = Bytes::from_static(b"[]");
        let store = &visit.keeper.store;
        let changed = store.update_response(&record.id, ResponseStatus::Ended, body.clone(), output, None);
        if changed.await.map_err(failed)? {
            visit.keeper.wake_responses.notify_one();
            return say(visit, body).await;
        }
    }
    // Cancelled before: it is what was asked for.
    let record = find(visit, id).await?;
    if status(&record.body).as_deref() == Some("cancelled") {
        return say(visit, record.body).await;
    }
    let message = "Only a response that is being made in the background can be cancelled.";
    Err(Failure::new(ErrorKind::InvalidRequest, message).param("id").into())
}

/// Request of a response that waits or runs, as it was when it came.
pub(super) async fn rebuilt(
    keeper: &Keeper,
    tenant: &Tenant,
    record: &ResponseRecord,
    bytes_max: usize,
) -> Result<(ChatRequest, ResponseForm), Failure> {
    let request = ResponsesRequest::decode(&record.request, &Bounds::default())?;
    let turns = earlier(keeper, tenant, record.previous.as_ref(), bytes_max).await?;
    resolve(request, turns).await
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
    let items = named_items(&record).map_err(|error| Failure::internal(error.to_string()))?;
    let items: Vec<_> = if page.order == Order::Descending { items.into_iter().rev().collect() } else { items };
    let from = match &page.after {
        None => 0,
        Some(after) => items.iter().position(|(id, _)| id == after).map_or(items.len(), |at| at + 1),
    };
    let shown = items[from..].iter().take(page.limit as usize).cloned().collect();
    let more = items.len() - from > page.limit as usize;
    let listing = penstock_store::Listing { items: shown, more };
    let list = json::list(&listing, |(id, _): &NamedItem| id.as_str(), |(_, item)| item);
    answer(visit.exchange, &list).await
}

/// Id of an input item, with the item's JSON.
type NamedItem = (String, serde_json::Map<String, Value>);

/// Items that came with the request. An item without an id gets one, the same each time.
fn named_items(record: &ResponseRecord) -> Result<Vec<NamedItem>, serde_json::Error> {
    let items: Vec<serde_json::Map<String, Value>> = serde_json::from_slice(&record.input)?;
    let mut out = Vec::with_capacity(items.len());
    for (at, mut item) in items.into_iter().enumerate() {
        let own = item.get("id").and_then(Value::as_str).map(str::to_owned);
        let id = own.unwrap_or_else(|| format!("item_{}_{at}", meta(record).id));
        item.insert("id".into(), Value::String(id.clone()));
        out.push((id, item));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_without_an_id_get_one() {
        let record = ResponseRecord {
            id: ResponseId::parse("resp_1").expect("an id"),
            status: ResponseStatus::Ended,
            previous: None,
            created: 1,
            expires: 2,
            body: Bytes::from_static(b"{\"status\":\"cancelled\"}"),
            input: Bytes::from_static(br#"[{"role":"user","content":"a"},{"id":"fc_1","type":"x"},{"id":null}, { }]"#),
            output: Bytes::new(),
            request: Bytes::new(),
        };
        let items = named_items(&record);
        let items = items.expect("a list of objects");
        let said: Vec<_> = items.iter().map(|(_, item)| serde_json::to_string(item).expect("JSON")).collect();
        assert_eq!(
            said,
            [
                r#"{"role":"user","content":"a","id":"item_1_0"}"#,
                r#"{"id":"fc_1","type":"x"}"#,
                r#"{"id":"item_1_2"}"#,
                r#"{"id":"item_1_3"}"#,
            ]
        );
        assert_eq!(status(&record.body).as_deref(), Some("cancelled"));
    }
}
