//! The conversation that a response goes on with: held while the response is answered, extended when it is complete.
//!
//! One response at a time holds a conversation, at whatever gateway, by a lock in the store that is renewed until the
//! response has ended; so the items of two responses never mix. A response that comes while another holds the
//! conversation waits shortly, since the one before it may only be being saved, and is then told to come later.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use penstock_dialects::openai::{NamedItem, named_items, own_items};
use penstock_proto::ErrorKind;
use penstock_store::{Append, Change, Item, ObjectId, ObjectKind, ResponseRoom, StoreError, Tenant, Turn, random_id};
use penstock_types::error_shape::ErrorShape;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use super::{Keeper, failed};
use penstock_base::clock::unix_seconds;
use penstock_base::error::Failure;

/// Most items of one conversation.
pub(super) const ITEMS_MAX: u64 = 10_000;
/// Seconds for which a lock is taken: after as many, a dead gateway's conversation is free.
const LOCK_SECONDS: u64 = 60;
/// Interval at which a lock is renewed.
const RENEW: Duration = Duration::from_secs(20);
/// Longest wait of a request for a conversation that another response holds.
pub(super) const LOCK_WAIT: Duration = Duration::from_secs(2);
/// Pause between two looks at a conversation that another response holds.
const LOCK_LOOK: Duration = Duration::from_millis(50);

/// Shape of a conversation that does not exist, or is another key's.
const ABSENT: ErrorShape = ErrorShape { status: 404, kind: "invalid_request_error", code: None };
/// Shape of a conversation that another response holds, as the API has it.
const LOCKED: ErrorShape = ErrorShape { status: 400, kind: "invalid_request_error", code: Some("conversation_locked") };

/// Failure of an id that names no conversation.
pub(super) fn no_conversation(id: &str) -> Failure {
    let shown: String = id.chars().take(80).collect();
    let message = format!("Conversation with id '{shown}' not found.");
    let failure = Failure::new(ErrorKind::NotFound, message).param("conversation");
    Failure { shape: Some(Box::new(ABSENT)), ..failure }
}

/// Failure of a change to a conversation that another response holds.
pub(super) fn locked() -> Failure {
    let message = "Another process is currently operating on this conversation. Please retry in a few seconds.";
    let failure = Failure::new(ErrorKind::InvalidRequest, message).param("conversation");
    Failure { shape: Some(Box::new(LOCKED)), ..failure }
}

/// Whether a failure says that another response holds the conversation.
pub(super) fn is_locked(failure: &Failure) -> bool {
    failure.shape.as_ref().is_some_and(|shape| shape.code == LOCKED.code)
}

/// Failure of a store operation on the items of a conversation.
pub(super) fn long(error: StoreError) -> Failure {
    match &error {
        StoreError::TooLong { .. } => {
            let message = format!("The conversation is too long: {error}.");
            Failure::new(ErrorKind::ContextLength, message).param("conversation")
        }
        _ => failed(error),
    }
}

/// Maker of items' ids.
pub(super) fn make_id() -> impl FnMut(&str) -> String {
    random_id
}

/// Items as the store keeps them.
pub(super) fn stored(items: Vec<NamedItem>) -> Vec<Item> {
    items.into_iter().map(|NamedItem { id, json }| Item { id, json }).collect()
}

/// Id of a conversation in a request.
///
/// # Errors
/// 404: no conversation can have it.
pub(super) fn parsed(id: &str) -> Result<ObjectId, Failure> {
    ObjectId::parse(ObjectKind::Conversation, id).ok_or_else(|| no_conversation(id))
}

/// Items of a conversation as one turn in front of a request.
///
/// # Errors
/// There is no such conversation, or it is longer than a request may be.
pub(super) async fn turns(
    keeper: &Keeper,
    tenant: &Tenant,
    id: &ObjectId,
    bytes_max: usize,
) -> Result<Vec<Turn>, Failure> {
    keeper.saving.settled(id.as_str()).await;
    let items = keeper.store.all_items(tenant, id, ITEMS_MAX, bytes_max as u64).await.map_err(long)?;
    let items = items.ok_or_else(|| no_conversation(id.as_str()))?;
    let mut input = BytesMut::with_capacity(items.iter().map(|item| item.json.len() + 1).sum::<usize>() + 2);
    input.put_u8(b'[');
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            input.put_u8(b',');
        }
        input.put_slice(&item.json);
    }
    input.put_u8(b']');
    Ok(vec![Turn { input: input.freeze(), output: Bytes::from_static(b"[]") }])
}

/// Conversation that this response holds. Dropped, it is given up as it is.
pub(super) struct Talk {
    keeper: Arc<Keeper>,
    tenant: Tenant,
    id: ObjectId,
    /// Name of the lock's holder; empty once the lock is given up.
    holder: String,
    /// Task that renews the lock.
    renewal: AbortHandle,
    /// Items of the request, a JSON list.
    input: Bytes,
    /// Seconds that the conversation is kept from its last item on.
    keep_seconds: u64,
    room: ResponseRoom,
}

/// Bounds of a conversation that is extended.
#[derive(Clone, Copy)]
pub(super) struct Keep {
    /// Seconds that the conversation is kept from its last item on.
    pub(super) seconds: u64,
    /// Bounds by which room is made.
    pub(super) room: ResponseRoom,
}

impl Talk {
    /// Takes the conversation for a response with these input items; waits for `wait` while another response holds it.
    ///
    /// # Errors
    /// There is no such conversation, or it is held for longer.
    pub(super) async fn take(
        keeper: &Arc<Keeper>,
        tenant: &Tenant,
        id: &ObjectId,
        input: Bytes,
        keep: Keep,
        wait: Duration,
    ) -> Result<Self, Failure> {
        keeper.saving.settled(id.as_str()).await;
        let (holder, began) = (random_id("hold_"), Instant::now());
        loop {
            let now = unix_seconds();
            let taken = keeper.store.hold_conversation(tenant, id, &holder, now, now + LOCK_SECONDS);
            match taken.await.map_err(failed)? {
                Change::Done => break,
                Change::Locked if began.elapsed() < wait => sleep(LOCK_LOOK).await,
                Change::Locked => return Err(locked()),
                Change::Absent | Change::NoItem | Change::Taken => return Err(no_conversation(id.as_str())),
            }
        }
        let renewed = renew(keeper.clone(), tenant.clone(), id.clone(), holder.clone());
        let renewal = tokio::spawn(renewed).abort_handle();
        let (keeper, tenant, id) = (keeper.clone(), tenant.clone(), id.clone());
        Ok(Self { keeper, tenant, id, holder, renewal, input, keep_seconds: keep.seconds, room: keep.room })
    }

    /// Id of the conversation.
    pub(super) fn id(&self) -> &ObjectId {
        &self.id
    }

    /// Adds the items of the request and of the answer (a JSON list), and gives the conversation up. An answer that was
    /// added before changes nothing: a response that is answered again after a crash counts once.
    ///
    /// # Errors
    /// The store's; then nothing is added. A conversation that was deleted meanwhile is none.
    pub(super) async fn extend(mut self, output: &[u8]) -> Result<(), StoreError> {
        let odd = |_| StoreError::Misuse("the items of a response are no JSON list of items with ids");
        let said = own_items(output).map_err(odd)?;
        if let Some(first) = said.first()
            && self.keeper.store.item(&self.tenant, &self.id, &first.id).await?.is_some()
        {
            return Ok(());
        }
        let mut items = stored(named_items(&self.input, &mut make_id()).map_err(odd)?);
        items.extend(stored(said));
        let now = unix_seconds();
        let append = Append {
            holder: Some(self.holder.clone()),
            items,
            now,
            expires: now + self.keep_seconds,
            items_max: ITEMS_MAX,
            room: self.room,
        };
        match self.keeper.store.append_items(&self.tenant, &self.id, append).await? {
            Change::Done => self.holder.clear(),
            change => {
                tracing::info!(
                    conversation = %self.id,
                    ?change,
                    "the items of an answer were not added: the conversation was deleted (Absent), or its lock was lost (Locked)"
                );
            }
        }
        Ok(())
    }
}

async fn renew(keeper: Arc<Keeper>, tenant: Tenant, id: ObjectId, holder: String) {
    loop {
        sleep(RENEW).await;
        let now = unix_seconds();
        let renewed = keeper.store.hold_conversation(&tenant, &id, &holder, now, now + LOCK_SECONDS).await;
        if matches!(renewed, Ok(Change::Absent | Change::Locked)) {
            return;
        }
    }
}

impl Drop for Talk {
    fn drop(&mut self) {
        self.renewal.abort();
        if self.holder.is_empty() {
            return;
        }
        // A process that ends waits for what is being saved, so for this too; then the next one finds the lock free.
        let place = self.keeper.saving.begin(&self.tenant, self.id.as_str());
        let (keeper, tenant) = (self.keeper.clone(), self.tenant.clone());
        let (id, holder) = (self.id.clone(), std::mem::take(&mut self.holder));
        // Outside of a runtime nothing is served any more, and the lock ends by itself.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if let Err(error) = keeper.store.release_conversation(&tenant, &id, &holder).await {
                    tracing::warn!(conversation = %id, %error, "the lock of a conversation was not given up: responses with it are answered conversation_locked for up to a minute");
                }
                drop(place);
            });
        }
    }
}
