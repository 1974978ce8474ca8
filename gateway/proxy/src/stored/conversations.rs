//! Routes of `/v1/conversations`.

use bytes::Bytes;
use penstock_dialects::openai::{decode_conversation, decode_items, decode_metadata};
use penstock_store::{Append, Change, Item, Listing, ObjectId, ObjectKind, ObjectRecord, StoreError};
use serde::Serialize;
use serde_json::value::RawValue;

use super::completions::PAGE_BYTES_MAX;
use super::responses::{room, say};
use super::talk::{ITEMS_MAX, locked, long, make_id, no_conversation, stored};
use super::{Visit, absent, answer, failed, json};
use crate::handler::{End, decoded, read_body};
use crate::list_query as query;
use penstock_base::clock::unix_seconds;
use penstock_base::error::Failure;
use penstock_types::ApiError;

/// Conversation as the API shows it.
#[derive(Serialize)]
struct Shown<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    metadata: Box<RawValue>,
}

fn shown(record: &ObjectRecord) -> Result<Shown<'_>, Failure> {
    let metadata = RawValue::from_string(record.metadata.clone());
    let metadata = metadata.map_err(|error| Failure::internal(error.to_string()))?;
    Ok(Shown { id: record.id.as_str(), object: "conversation", created_at: record.created, metadata })
}

fn known(id: &str) -> Result<ObjectId, Failure> {
    ObjectId::parse(ObjectKind::Conversation, id).ok_or_else(|| missing(id))
}

/// Failure of a URL that names no conversation.
fn missing(id: &str) -> Failure {
    Failure { param: None, ..no_conversation(id) }
}

async fn find(visit: &Visit<'_>, id: &str) -> Result<ObjectRecord, Failure> {
    let found = visit.keeper.store.object(&visit.tenant, &known(id)?).await.map_err(failed)?;
    found.ok_or_else(|| missing(id))
}

/// Time at which a conversation that changes now is deleted by itself.
fn expires(visit: &Visit<'_>) -> u64 {
    unix_seconds() + visit.gateway.serving().config.store.response_days * 86_400
}

pub(super) async fn create(visit: &mut Visit<'_>) -> Result<(), End> {
    let headers = std::mem::take(&mut visit.exchange.head.headers);
    let body = read_body(&visit.gateway.bodies, visit.exchange, &headers).await?;
    let (new, _lease) = decoded(body, |body, bounds| decode_conversation(body, bounds, &mut make_id())).await?;
    let record = ObjectRecord {
        id: ObjectId::random(ObjectKind::Conversation),
        created: unix_seconds(),
        expires: expires(visit),
        model: String::new(),
        metadata: new.metadata,
        body: Bytes::new(),
        input: Bytes::new(),
    };
    let room = room(&visit.gateway.serving().config.store);
    let saved = visit.keeper.store.save_object(&visit.tenant, record.clone(), stored(new.items), room);
    saved.await.map_err(failed)?;
    answer(visit.exchange, &shown(&record)?).await
}

pub(super) async fn show(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let record = find(visit, id).await?;
    answer(visit.exchange, &shown(&record)?).await
}

pub(super) async fn update(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let headers = std::mem::take(&mut visit.exchange.head.headers);
    let body = read_body(&visit.gateway.bodies, visit.exchange, &headers).await?;
    let (metadata, _lease) = decoded(body, decode_metadata).await?;
    let mut record = find(visit, id).await?;
    let room = room(&visit.gateway.serving().config.store);
    if !visit.keeper.store.label_object(&visit.tenant, &record.id, &metadata, room).await.map_err(failed)? {
        return Err(missing(id).into());
    }
    record.metadata = metadata;
    answer(visit.exchange, &shown(&record)?).await
}

pub(super) async fn delete(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    if !visit.keeper.store.delete_object(&visit.tenant, &known(id)?).await.map_err(failed)? {
        return Err(missing(id).into());
    }
    answer(visit.exchange, &json::DeletedObject { id, object: "conversation.deleted", deleted: true }).await
}

/// Answers with a list of items, which are JSON text already.
async fn answer_items(visit: &mut Visit<'_>, listing: Listing<Item>) -> Result<(), End> {
    let bytes = listing.items.iter().map(|item| item.json.len()).sum::<usize>();
    let _hold = visit.charged(2 * bytes)?;
    let raw = |item: Item| -> Result<(String, Box<RawValue>), Failure> {
        let text = String::from_utf8(item.json.into()).map_err(|error| Failure::internal(error.to_string()))?;
        Ok((item.id, RawValue::from_string(text).map_err(|error| Failure::internal(error.to_string()))?))
    };
    let items = listing.items.into_iter().map(raw).collect::<Result<_, _>>()?;
    let listing = Listing { items, more: listing.more };
    let list = json::list(&listing, |(id, _): &(String, Box<RawValue>)| id.as_str(), |(_, item)| item);
    answer(visit.exchange, &list).await
}

pub(super) async fn add_items(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let headers = std::mem::take(&mut visit.exchange.head.headers);
    let body = read_body(&visit.gateway.bodies, visit.exchange, &headers).await?;
    let (items, _lease) = decoded(body, |body, bounds| decode_items(body, bounds, &mut make_id())).await?;
    let conversation = known(id)?;
    let items = stored(items);
    visit.keeper.saving.settled(id).await;
    let append = Append {
        holder: None,
        items: items.clone(),
        now: unix_seconds(),
        expires: expires(visit),
        items_max: ITEMS_MAX,
        room: room(&visit.gateway.serving().config.store),
    };
    let changed = visit.keeper.store.append_items(&visit.tenant, &conversation, append).await;
    match changed.map_err(full)? {
        Change::Done => answer_items(visit, Listing { items, more: false }).await,
        Change::Locked => Err(locked().into()),
        Change::Taken => {
            Err(Failure::internal("a new item has the id of an item that the conversation already holds").into())
        }
        Change::Absent | Change::NoItem => Err(missing(id).into()),
    }
}

/// Failure of a conversation that takes no more items.
fn full(error: StoreError) -> Failure {
    match &error {
        StoreError::TooLong { .. } => {
            ApiError::invalid("items", format!("items: the conversation would have {error}")).into()
        }
        _ => failed(error),
    }
}

pub(super) async fn list_items(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let page = query::page(&visit.exchange.head.target, 20, 100).map_err(Failure::from)?;
    let conversation = known(id)?;
    visit.keeper.saving.settled(id).await;
    let store = &visit.keeper.store;
    let listing = store.items(&visit.tenant, &conversation, &page, PAGE_BYTES_MAX).await.map_err(long)?;
    answer_items(visit, listing.ok_or_else(|| missing(id))?).await
}

pub(super) async fn show_item(visit: &mut Visit<'_>, id: &str, item: &str) -> Result<(), End> {
    let conversation = known(id)?;
    visit.keeper.saving.settled(id).await;
    let found = visit.keeper.store.item(&visit.tenant, &conversation, item).await.map_err(failed)?;
    let Some(found) = found else {
        find(visit, id).await?;
        return Err(absent("Item", item).into());
    };
    let _hold = visit.charged(found.json.len())?;
    say(visit, found.json).await
}

pub(super) async fn delete_item(visit: &mut Visit<'_>, id: &str, item: &str) -> Result<(), End> {
    let record = find(visit, id).await?;
    visit.keeper.saving.settled(id).await;
    let changed = visit.keeper.store.delete_item(&visit.tenant, &record.id, item, unix_seconds()).await;
    match changed.map_err(failed)? {
        Change::Done => answer(visit.exchange, &shown(&record)?).await,
        Change::Locked => Err(locked().into()),
        Change::NoItem | Change::Taken => Err(absent("Item", item).into()),
        Change::Absent => Err(missing(id).into()),
    }
}
