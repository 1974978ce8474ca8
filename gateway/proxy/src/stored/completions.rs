//! Routes of stored chat completions, and the part of the store in answering one with `store`.
//!
//! A completion is kept as a stored response is: collected beside its answer, saved when the answer is complete, under
//! an id of the store's own. A provider that is sent the client's bytes is sent `store` with them, and keeps the
//! completion itself.

use bytes::Bytes;
use penstock_dialects::openai::{Listed, StoredChat, decode_metadata, metadata_entry, with_metadata};
use penstock_store::{Listing, ObjectFilter, ObjectId, ObjectKind, ObjectRecord, Order, Tenant};
use penstock_types::{AnswerMeta, ApiError, Bounds};
use serde_json::value::RawValue;

use super::keeping::{Draft, Keeping};
use super::responses::{room, say};
use super::{SHOWN_TIMES, Visit, absent, answer, failed, json};
use crate::answer::KeepAnswer;
use crate::gateway::Gateway;
use crate::handler::{End, decoded, read_body};
use crate::list_query as query;
use crate::saving::Looks;
use penstock_auth::Principal;
use penstock_base::clock::unix_seconds;
use penstock_base::error::Failure;
use penstock_upstream::answer_memory::Hold;
use penstock_upstream::call::{Call, off_io};

/// Most bytes of one page of a list; a longer list has more pages.
pub(super) const PAGE_BYTES_MAX: u64 = 16 << 20;
/// Most entries of metadata that a list can be filtered by.
const FILTERS_MAX: usize = 16;

/// A chat call, and the collector that stores its answer: for a request with `store`, if the gateway has a store. A
/// body that cannot be read is refused where it is decoded, or by its provider.
pub(super) async fn prepare(
    gateway: &Gateway,
    principal: &Principal,
    mut call: Call,
) -> Result<(Call, Option<Box<dyn KeepAnswer>>), Failure> {
    let Some(keeper) = gateway.keeper().filter(|_| call.peek.stores) else { return Ok((call, None)) };
    let body = call.body.clone();
    let Ok(chat) = off_io(body.len(), move || StoredChat::read(&body, &Bounds::default())).await? else {
        return Ok((call, None));
    };
    let (config, created) = (gateway.serving().config.clone(), unix_seconds());
    let record = ObjectRecord {
        id: ObjectId::random(ObjectKind::Completion),
        created,
        expires: created + config.store.response_days * 86_400,
        model: call.model.clone(),
        metadata: chat.metadata.clone(),
        body: Bytes::new(),
        input: chat.messages.clone(),
    };
    let id = record.id.as_str().strip_prefix(ObjectKind::Completion.prefix()).unwrap_or_default().to_owned();
    let hold = gateway.answer_memory(principal.tenant(), &config.http).hold();
    let tenant = Tenant::new(principal.tenant());
    let draft = Draft::Chat { record, chat, request_id: call.request_id.clone(), collector: None };
    let mut keeping = Keeping::new(keeper.clone(), tenant, draft, room(&config.store), hold);
    keeping.cover()?;
    call.answer_meta = Some(AnswerMeta::new(id, created));
    Ok((call, Some(Box::new(keeping))))
}

/// A completion, and the memory charge that is held until it has been sent.
async fn held(visit: &Visit<'_>, id: &str) -> Result<(ObjectRecord, Hold), Failure> {
    let known = ObjectId::parse(ObjectKind::Completion, id).ok_or_else(|| absent("ChatCompletion", id))?;
    visit.keeper.saving.settled(id).await;
    let store = &visit.keeper.store;
    let found = Looks::new(store.is_shared()).find(|| store.object(&visit.tenant, &known)).await.map_err(failed)?;
    let record = found.ok_or_else(|| absent("ChatCompletion", id))?;
    let hold = visit.charged(SHOWN_TIMES * record.bytes() as usize)?;
    Ok((record, hold))
}

fn shown(record: &ObjectRecord) -> Bytes {
    with_metadata(&record.body, &record.metadata)
}

pub(super) async fn show(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let (record, _hold) = held(visit, id).await?;
    say(visit, shown(&record)).await
}

pub(super) async fn list(visit: &mut Visit<'_>) -> Result<(), End> {
    let target = &visit.exchange.head.target;
    let page = query::page_in(target, 20, 100, Order::Ascending).map_err(Failure::from)?;
    let filter = filter(target).map_err(Failure::from)?;
    visit.keeper.saving.all_settled(&visit.tenant).await;
    let store = &visit.keeper.store;
    let listing = store.objects(&visit.tenant, ObjectKind::Completion, &filter, &page, PAGE_BYTES_MAX).await;
    let Listing { items, more } = listing.map_err(failed)?;
    let _hold = visit.charged(2 * items.iter().map(|record| record.bytes() as usize).sum::<usize>())?;
    let document = |record: &ObjectRecord| -> Result<(String, Box<RawValue>), Failure> {
        let text = String::from_utf8(shown(record).into()).map_err(|error| Failure::internal(error.to_string()))?;
        let raw = RawValue::from_string(text).map_err(|error| Failure::internal(error.to_string()))?;
        Ok((record.id.as_str().to_owned(), raw))
    };
    let items = items.iter().map(document).collect::<Result<_, _>>()?;
    let listing = Listing { items, more };
    let list = json::list(&listing, |(id, _): &(String, Box<RawValue>)| id.as_str(), |(_, document)| document);
    answer(visit.exchange, &list).await
}

/// Filters of the query: `model=…`, and `metadata[name]=value` for each entry.
fn filter(target: &str) -> Result<ObjectFilter, ApiError> {
    let mut metadata = Vec::new();
    for (name, value) in query::under(target, "metadata")? {
        if metadata.len() == FILTERS_MAX {
            return Err(ApiError::invalid("metadata", format!("metadata: more than {FILTERS_MAX} entries")));
        }
        metadata.push(metadata_entry(&name, &value));
    }
    Ok(ObjectFilter { model: query::value(target, "model")?, metadata })
}

pub(super) async fn update(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let headers = std::mem::take(&mut visit.exchange.head.headers);
    let body = read_body(&visit.gateway.bodies, visit.exchange, &headers).await?;
    let (metadata, _lease) = decoded(body, decode_metadata).await?;
    let (mut record, _hold) = held(visit, id).await?;
    let room = room(&visit.gateway.serving().config.store);
    if !visit.keeper.store.label_object(&visit.tenant, &record.id, &metadata, room).await.map_err(failed)? {
        return Err(absent("ChatCompletion", id).into());
    }
    record.metadata = metadata;
    say(visit, shown(&record)).await
}

pub(super) async fn delete(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let known = ObjectId::parse(ObjectKind::Completion, id).ok_or_else(|| absent("ChatCompletion", id))?;
    visit.keeper.saving.settled(id).await;
    let store = &visit.keeper.store;
    let delete =
        || async { store.delete_object(&visit.tenant, &known).await.map(|is_deleted| is_deleted.then_some(())) };
    let deleted = Looks::new(store.is_shared()).find(delete).await.map_err(failed)?;
    deleted.ok_or_else(|| absent("ChatCompletion", id))?;
    answer(visit.exchange, &json::DeletedObject { id, object: "chat.completion.deleted", deleted: true }).await
}

pub(super) async fn messages(visit: &mut Visit<'_>, id: &str) -> Result<(), End> {
    let page = query::page_in(&visit.exchange.head.target, 20, 100, Order::Ascending).map_err(Failure::from)?;
    let (record, _hold) = held(visit, id).await?;
    let bytes = record.input.len();
    let shown = move || {
        let messages = Listed::messages(&record.input, record.id.as_str())?;
        json::page_of(&query::cut(messages, &page, |message| &message.id), Listed::message)
    };
    let body = off_io(bytes, shown).await?.map_err(Failure::from)?;
    say(visit, body).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_read_from_the_query() {
        let read = filter("/v1/chat/completions?model=a%2Fb&metadata%5Ba%5D=1&metadata[b]=%22x&limit=2").expect("read");
        assert_eq!(read.model.as_deref(), Some("a/b"));
        assert_eq!(read.metadata, [r#""a":"1""#, r#""b":"\"x""#]);
        let many: String = (0..17).map(|at| format!("metadata[{at}]=x&")).collect();
        assert!(filter(&format!("/?{many}")).is_err());
        assert!(filter("/?metadata[a]=%ff").is_err());
    }
}
