//! Answers responses that their clients do not wait for.
//!
//! The store is the truth: a response is queued there before its client is told, and ends there once. A gateway that is killed runs
//! what had not ended again when it starts: perhaps more than once asked, once answered.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use penstock_dialects::openai::{
    FinishedResponse, ResponseCollector, ResponseFailure, ResponseForm, ResponseStatus as Word,
};
use penstock_dialects::{ChatEvent, ChatRequest, Decoded, Request, Surface};
use penstock_proto::ErrorKind;
use penstock_store::{OpenResponse, ResponseId, ResponseStatus, StoreError};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep};

use super::responses::{meta, rebuilt};
use crate::call::{Ask, Call};
use crate::error::Failure;
use crate::gateway::Gateway;
use crate::http::Body;
use crate::http::exchange::new_request_id;
use crate::phases::caught;
use crate::whole::answer_events;

/// Responses answered at once; the others wait in the store.
const ACTIVE_MAX: u32 = 64;
/// The store is looked at this often, though nothing woke us.
const POLL: Duration = Duration::from_secs(2);
/// Pause of a response whose store failed.
const STORE_PAUSE: Duration = Duration::from_secs(5);
/// Attempts for one response.
const ATTEMPTS_MAX: u32 = 5;
/// Pause after the first; doubles.
const PAUSE: Duration = Duration::from_millis(500);

/// Ends when another process serves. The gateway has a store.
pub(crate) async fn run(gateway: Arc<Gateway>) {
    let Some(keeper) = gateway.keeper().cloned() else { return };
    let (mut tasks, mut active) = (JoinSet::new(), HashMap::new());
    loop {
        if let Err(error) = turn(&gateway, &mut tasks, &mut active).await {
            tracing::warn!(%error, "the store's responses could not be read");
        }
        if gateway.is_leaving() && tasks.is_empty() {
            return;
        }
        tokio::select! {
            () = keeper.wake_responses.notified() => {}
            () = sleep(POLL) => {}
            Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
        }
    }
}

async fn turn(
    gateway: &Arc<Gateway>,
    tasks: &mut JoinSet<()>,
    active: &mut HashMap<ResponseId, AbortHandle>,
) -> Result<(), StoreError> {
    let Some(keeper) = gateway.keeper() else { return Ok(()) };
    active.retain(|_, task| !task.is_finished());
    if gateway.is_leaving() || !keeper.store.lead().await? {
        return Ok(());
    }
    let open = keeper.store.open_responses(ACTIVE_MAX).await?;
    // What runs and is not open any more was cancelled or deleted: dropping it stops its upstream.
    active.iter().filter(|(id, _)| open.iter().all(|open| open.response.id != **id)).for_each(|(_, task)| task.abort());
    for open in open {
        let id = open.response.id.clone();
        active.entry(id).or_insert_with(|| tasks.spawn(attend(gateway.clone(), open)));
    }
    Ok(())
}

/// Takes a response to its end. When the store fails, a later turn begins it again.
async fn attend(gateway: Arc<Gateway>, open: OpenResponse) {
    if let Err(error) = drive(&gateway, &open).await {
        tracing::warn!(response = %open.response.id, %error, "a response waits for the store");
        sleep(STORE_PAUSE).await;
    }
}

async fn drive(gateway: &Gateway, open: &OpenResponse) -> Result<(), StoreError> {
    let Some(keeper) = gateway.keeper() else { return Ok(()) };
    let OpenResponse { tenant, response } = open;
    let limit = gateway.serving().config.http.body_bytes_max;
    let (chat, form) = match rebuilt(keeper, tenant, response, limit).await {
        Ok(rebuilt) => rebuilt,
        // What it goes on from was deleted in the meantime. Without its request there is no form to say that in.
        Err(failure) => {
            tracing::warn!(response = %response.id, reason = %failure.message, "a queued response cannot be answered");
            let body = response.body.clone();
            return keeper
                .store
                .update_response(&response.id, ResponseStatus::Ended, body, response.output.clone())
                .await
                .map(drop);
        }
    };
    let meta = meta(response);
    let begun = form.resource(&meta, Word::InProgress, b"", None);
    let none = Bytes::from_static(b"[]");
    if !keeper.store.update_response(&response.id, ResponseStatus::InProgress, begun, none).await? {
        return Ok(());
    }
    let finished = attempts(gateway, open, &chat, &form).await;
    keeper.store.update_response(&response.id, ResponseStatus::Ended, finished.body, finished.output).await.map(drop)
}

async fn attempts(gateway: &Gateway, open: &OpenResponse, chat: &ChatRequest, form: &ResponseForm) -> FinishedResponse {
    let mut attempt = 1;
    loop {
        let mut collector = form.collector(&meta(&open.response));
        let answered = caught(once(gateway, open, chat, form, &mut collector)).await;
        let failure = match answered.unwrap_or_else(|panic| Err(Failure::internal(panic))) {
            Ok(()) => match collector.finished() {
                Some(finished) => return finished,
                None => Failure::internal("the upstream ended before the response had finished"),
            },
            Err(failure) => failure,
        };
        if !failure.should_retry() || attempt == ATTEMPTS_MAX {
            let code = match failure.kind {
                ErrorKind::RateLimited => "rate_limit_exceeded",
                ErrorKind::InvalidRequest | ErrorKind::ContextLength | ErrorKind::Unsupported => "invalid_prompt",
                _ => "server_error",
            };
            let failure = ResponseFailure { code, message: failure.message.into() };
            return collector.failed(Word::Failed, Some(&failure));
        }
        sleep((PAUSE * (1 << attempt)).max(failure.retry_after.unwrap_or_default())).await;
        attempt += 1;
    }
}

async fn once(
    gateway: &Gateway,
    open: &OpenResponse,
    chat: &ChatRequest,
    form: &ResponseForm,
    collector: &mut ResponseCollector,
) -> Result<(), Failure> {
    let serving = gateway.serving();
    let keeper = gateway.keeper().ok_or_else(|| Failure::internal("a stored response without a store"))?;
    let (store, tenant) = (keeper.store.as_ref(), open.tenant.as_str());
    let principal = gateway.guard.recall(&serving.identity, store, tenant, Surface::Responses).await?;
    let body = Body { bytes: open.response.request.clone(), lease: gateway.bodies.lease() };
    let mut call = Call::new(Ask::new(Surface::Responses), body, new_request_id(), HeaderMap::new()).await?;
    let decoded = Decoded { request: Request::Chat(Box::new(chat.clone())), form: Box::new(form.clone()) };
    call.answer_as(meta(&open.response), decoded);
    (call.background, call.own) = (true, true);
    let deadline = serving.config.request_timeout.map(|limit| (Instant::now() + limit).into_std());
    let mut take = |event: &ChatEvent| collector.event(event);
    answer_events(gateway, &principal, call, deadline, &mut take).await.map(drop)
}
