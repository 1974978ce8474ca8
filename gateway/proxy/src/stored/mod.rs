//! Objects that clients keep here: files, batches, stored responses, chat completions and conversations.
//!
//! `route` maps URLs, `serve` answers them; `Keeper` is the gateway's handle on the store. Every operation runs as the
//! tenant of the request's key: another key's objects are as absent as those that never were.

pub(crate) mod background;
mod batches;
mod completions;
mod conversations;
mod edits;
mod events;
mod failure;
mod files;
mod json;
mod keeping;
mod message_batches;
mod open;
mod places;
mod responses;
mod talk;

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, header};
use penstock_store::Tenant;
use serde::Serialize;

use crate::answer::KeepAnswer;
use crate::gateway::Gateway;
use crate::handler::End;
use crate::keeper::Keeper;
use penstock_auth::Principal;
use penstock_auth::StoredRoute;
use penstock_base::error::Failure;
use penstock_http::Exchange;
use penstock_types::Surface;
use penstock_upstream::answer_memory::Hold;
use penstock_upstream::call::Call;
use responses::Prepared;

pub(crate) use failure::{absent, failed};
pub use open::{OpenError, Shared, open, shared};

/// Copies of a stored object in memory while a part of it is shown: as it was read, its entries, and the answer.
const SHOWN_TIMES: usize = 3;

/// One request for a stored object, with all that its handler needs.
struct Visit<'a> {
    gateway: &'a Gateway,
    keeper: &'a Keeper,
    exchange: &'a mut Exchange,
    principal: &'a Principal,
    tenant: Tenant,
}

impl Visit<'_> {
    /// Memory charge for `bytes` of stored objects, held until they have been sent.
    fn charged(&self, bytes: usize) -> Result<Hold, Failure> {
        let mut hold = self.gateway.answer_memory(self.tenant.as_str(), &self.gateway.serving().config.http).hold();
        hold.cover(bytes)?;
        Ok(hold)
    }
}

/// Answers a request for files, batches or stored responses.
pub(crate) async fn serve(
    gateway: &Gateway,
    exchange: &mut Exchange,
    route: StoredRoute,
    principal: &Principal,
) -> Result<(), End> {
    let none = || Failure::new(penstock_proto::ErrorKind::Unavailable, "This gateway has no store.");
    let keeper = gateway.keeper().ok_or_else(none)?;
    let mut visit = Visit { gateway, keeper, exchange, principal, tenant: Tenant::new(principal.tenant()) };
    match route {
        StoredRoute::UploadFile => files::upload(&mut visit).await,
        StoredRoute::ListFiles => files::list(&mut visit).await,
        StoredRoute::File(id) => files::show(&mut visit, &id).await,
        StoredRoute::FileContent(id) => files::content(&mut visit, &id).await,
        StoredRoute::DeleteFile(id) => files::delete(&mut visit, &id).await,
        StoredRoute::CreateBatch => batches::create(&mut visit).await,
        StoredRoute::ListBatches => batches::list(&mut visit).await,
        StoredRoute::Batch(id) => batches::show(&mut visit, &id).await,
        StoredRoute::CancelBatch(id) => batches::cancel(&mut visit, &id).await,
        StoredRoute::Response(id) => responses::show(&mut visit, &id).await,
        StoredRoute::DeleteResponse(id) => responses::delete(&mut visit, &id).await,
        StoredRoute::CancelResponse(id) => responses::cancel(&mut visit, &id).await,
        StoredRoute::InputItems(id) => responses::input_items(&mut visit, &id).await,
        StoredRoute::CreateMessageBatch => message_batches::create(&mut visit).await,
        StoredRoute::ListMessageBatches => message_batches::list(&mut visit).await,
        StoredRoute::MessageBatch(id) => message_batches::show(&mut visit, &id).await,
        StoredRoute::CancelMessageBatch(id) => message_batches::cancel(&mut visit, &id).await,
        StoredRoute::DeleteMessageBatch(id) => message_batches::delete(&mut visit, &id).await,
        StoredRoute::MessageBatchResults(id) => message_batches::results(&mut visit, &id).await,
        StoredRoute::CreateConversation => conversations::create(&mut visit).await,
        StoredRoute::Conversation(id) => conversations::show(&mut visit, &id).await,
        StoredRoute::UpdateConversation(id) => conversations::update(&mut visit, &id).await,
        StoredRoute::DeleteConversation(id) => conversations::delete(&mut visit, &id).await,
        StoredRoute::AddItems(id) => conversations::add_items(&mut visit, &id).await,
        StoredRoute::ListItems(id) => conversations::list_items(&mut visit, &id).await,
        StoredRoute::Item(id, item) => conversations::show_item(&mut visit, &id, &item).await,
        StoredRoute::DeleteItem(id, item) => conversations::delete_item(&mut visit, &id, &item).await,
        StoredRoute::ListCompletions => completions::list(&mut visit).await,
        StoredRoute::Completion(id) => completions::show(&mut visit, &id).await,
        StoredRoute::UpdateCompletion(id) => completions::update(&mut visit, &id).await,
        StoredRoute::DeleteCompletion(id) => completions::delete(&mut visit, &id).await,
        StoredRoute::CompletionMessages(id) => completions::messages(&mut visit, &id).await,
    }
}

/// Adds stored turns to a call that needs them, and returns the collector that stores its answer; `None`: the answer
/// comes later, and the client has been told.
pub(crate) async fn recall(
    gateway: &Gateway,
    exchange: &mut Exchange,
    principal: &Arc<Principal>,
    call: Call,
) -> Result<Option<(Call, Option<Box<dyn KeepAnswer>>)>, End> {
    match call.ask.surface {
        Surface::Responses => {}
        Surface::Chat => return Ok(Some(completions::prepare(gateway, principal, call).await?)),
        _ => return Ok(Some((call, None))),
    }
    match responses::prepare(gateway, principal, call).await? {
        Prepared::Ask(call, keeping) => Ok(Some((*call, keeping))),
        Prepared::Queued(body) => {
            let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
            exchange.respond(200, &json, body).await?;
            Ok(None)
        }
        Prepared::Followed(id, log) => {
            let keeper = gateway.keeper().ok_or_else(|| Failure::internal("a stored response without a store"))?;
            let tenant = Tenant::new(principal.tenant());
            let follower = events::Follower { gateway, keeper, tenant: &tenant, id: &id };
            follower.follow(exchange, Some(log), 0).await?;
            Ok(None)
        }
    }
}

/// Adds stored turns to a call whose input tokens are counted.
pub(crate) async fn recall_count(gateway: &Gateway, principal: &Principal, call: Call) -> Result<Call, Failure> {
    match call.ask.surface {
        Surface::Responses => responses::with_turns(gateway, principal, call).await,
        _ => Ok(call),
    }
}

/// Answers 200 with `document` as JSON.
async fn answer(exchange: &mut Exchange, document: &impl Serialize) -> Result<(), End> {
    let body = serde_json::to_vec(document).map_err(|error| Failure::internal(error.to_string()))?;
    let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    Ok(exchange.respond(200, &json, Bytes::from(body)).await?)
}
