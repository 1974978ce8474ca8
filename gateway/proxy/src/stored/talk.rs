//! The conversation that a response goes on with: held while the response is answered, extended when it is complete.
//!
//! One response at a time holds a conversation, at whatever gateway, by a lock in the store that is renewed until the
//! response has ended; so the items of two responses never mix. A response that comes while another holds the
//! conversation waits shortly, since the one before it may only be being saved, and is then told to come later.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use penstock_dialects::openai::{NamedItem, named_items, own_items};
use penstock_proto::ErrorKind;
use penstock_store::{Append, Change, Item, ObjectId, ObjectKind, ResponseRoom, StoreError, Tenant, Turn, random_id};
use penstock_types::error_shape::ErrorShape;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::{Keeper, failed};
use penstock_base::clock::unix_seconds;
use penstock_base::error::Failure;

/// Most items of one conversation.
pub(super) const ITEMS_MAX: u64 = 10_000;
/// Seconds for which a lock is taken: after as many, a dead gateway's conversation is free.
const LOCK_SECONDS: u64 = 60;
/// Interval at which a lock is renewed.
const RENEW: Duration = if cfg!(test) { Duration::from_millis(5) } else { Duration::from_secs(20) };
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
    /// Name of the lock's holder.
    holder: String,
    /// True where the lock may be held: it was taken, or asked for without an answer.
    may_hold: bool,
    /// Renewal of the lock, while it is held.
    renewal: Option<Renewal>,
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
        let began = Instant::now();
        let (keeper, tenant, id, holder) = (keeper.clone(), tenant.clone(), id.clone(), random_id("hold_"));
        let (keep_seconds, room) = (keep.seconds, keep.room);
        let mut talk = Self { keeper, tenant, id, holder, may_hold: false, renewal: None, input, keep_seconds, room };
        loop {
            // From here on the lock is given up however this ends, also where the store's answer is lost.
            talk.may_hold = true;
            let taken = hold(&talk.keeper, &talk.tenant, &talk.id, &talk.holder).await.map_err(failed)?;
            talk.may_hold = matches!(taken, Change::Done);
            match taken {
                Change::Done => break,
                Change::Locked if began.elapsed() < wait => sleep(LOCK_LOOK).await,
                Change::Locked => return Err(locked()),
                Change::Absent | Change::NoItem | Change::Taken => return Err(no_conversation(talk.id.as_str())),
            }
        }
        talk.renewal = Some(Renewal::begin(&talk));
        Ok(talk)
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
        // A renewal behind the append would take the lock again.
        let may_renew = match self.renewal.take() {
            Some(renewal) => renewal.end().await,
            None => false,
        };
        match self.keeper.store.append_items(&self.tenant, &self.id, append).await? {
            Change::Done => self.may_hold = may_renew,
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

/// Takes or renews the lock.
async fn hold(keeper: &Keeper, tenant: &Tenant, id: &ObjectId, holder: &str) -> Result<Change, StoreError> {
    let now = unix_seconds();
    keeper.store.hold_conversation(tenant, id, holder, now, now + LOCK_SECONDS).await
}

/// Task that renews a lock.
struct Renewal {
    task: JoinHandle<()>,
    /// True while the store has not answered to a renewal.
    asks: Arc<AtomicBool>,
}

impl Renewal {
    fn begin(talk: &Talk) -> Self {
        let asks = Arc::<AtomicBool>::default();
        let (keeper, tenant, id) = (talk.keeper.clone(), talk.tenant.clone(), talk.id.clone());
        let (holder, asking) = (talk.holder.clone(), asks.clone());
        let task = tokio::spawn(async move {
            loop {
                sleep(RENEW).await;
                asking.store(true, Ordering::SeqCst);
                let renewed = hold(&keeper, &tenant, &id, &holder).await;
                if renewed.is_ok() {
                    asking.store(false, Ordering::SeqCst);
                }
                if matches!(renewed, Ok(Change::Absent | Change::Locked)) {
                    return;
                }
            }
        });
        Self { task, asks }
    }

    /// Ends the renewal: the store is asked no more. `true`: an ask without an answer may still take effect.
    async fn end(self) -> bool {
        self.task.abort();
        // Until it has stopped; why does not matter.
        let _ = self.task.await;
        self.asks.load(Ordering::SeqCst)
    }
}

impl Drop for Talk {
    fn drop(&mut self) {
        let renewal = self.renewal.take();
        renewal.iter().for_each(|renewal| renewal.task.abort());
        if !self.may_hold {
            return;
        }
        // A process that ends waits for what is being saved, so for this too; then the next one finds the lock free.
        let place = self.keeper.saving.begin(&self.tenant, self.id.as_str());
        let (keeper, tenant) = (self.keeper.clone(), self.tenant.clone());
        let (id, holder) = (self.id.clone(), std::mem::take(&mut self.holder));
        // Outside of a runtime nothing is served any more, and the lock ends by itself.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if let Some(renewal) = renewal {
                    renewal.end().await;
                }
                if let Err(error) = keeper.store.release_conversation(&tenant, &id, &holder).await {
                    tracing::warn!(conversation = %id, %error, "the lock of a conversation may not have been given up: responses with it are then answered conversation_locked for up to a minute");
                }
                drop(place);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use penstock_store::{ObjectRecord, Sqlite, SqliteOptions};

    use super::*;

    const ROOM: ResponseRoom = ResponseRoom { tenant_max: 10, tenant_bytes_max: 1 << 30, bytes_max: 1 << 30 };
    const KEEP: Keep = Keep { seconds: 86_400, room: ROOM };

    fn keeper() -> Arc<Keeper> {
        let store = Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("opens");
        Arc::new(Keeper::new(Arc::new(store)))
    }

    fn tenant() -> Tenant {
        Tenant::new("a")
    }

    /// A new conversation with these items.
    fn save(keeper: Arc<Keeper>, items: Vec<Item>) -> (ObjectId, impl Future<Output = ()> + Send) {
        let id = ObjectId::random(ObjectKind::Conversation);
        let (model, metadata, body, input) = (String::new(), "{}".into(), Bytes::new(), Bytes::new());
        let (created, expires) = (unix_seconds(), unix_seconds() + KEEP.seconds);
        let record = ObjectRecord { id: id.clone(), created, expires, model, metadata, body, input };
        let save = async move { keeper.store.save_object(&tenant(), record, items, ROOM).await.expect("saved") };
        (id, save)
    }

    /// Keeps the writer of the store for some hundred milliseconds: what comes now waits in its queue.
    async fn occupy(keeper: &Arc<Keeper>) {
        let json = Bytes::from_static(b"{}");
        let items = (0..100_000).map(|number| Item { id: format!("msg_{number}"), json: json.clone() }).collect();
        let (_, save) = save(keeper.clone(), items);
        tokio::spawn(save);
        tokio::task::yield_now().await;
    }

    async fn is_free(keeper: &Keeper, id: &ObjectId) -> bool {
        keeper.saving.settled(id.as_str()).await;
        let now = unix_seconds();
        let taken = keeper.store.hold_conversation(&tenant(), id, "other", now, now + 1).await.expect("asked");
        matches!(taken, Change::Done)
    }

    #[tokio::test]
    async fn a_conversation_is_free_when_an_answer_was_added_however_long_that_took() {
        let keeper = keeper();
        let (id, save) = save(keeper.clone(), Vec::new());
        save.await;
        let input = Bytes::from_static(br#"[{"role":"user","content":"hello"}]"#);
        let talk = Talk::take(&keeper, &tenant(), &id, input, KEEP, LOCK_WAIT).await.expect("taken");
        // The lock is renewed.
        sleep(4 * RENEW).await;
        assert!(!is_free(&keeper, &id).await);
        occupy(&keeper).await;
        let began = Instant::now();
        talk.extend(b"[]").await.expect("added");
        assert!(began.elapsed() > 4 * RENEW, "as long as some renewals: {:?}", began.elapsed());
        assert!(is_free(&keeper, &id).await);
        let items = keeper.store.all_items(&tenant(), &id, 10, 1 << 20).await.expect("read").expect("there");
        assert_eq!(items.len(), 1);
    }

    #[tokio::test]
    async fn a_conversation_is_free_when_whoever_asked_for_it_left_before_the_answer() {
        let keeper = keeper();
        let (id, save) = save(keeper.clone(), Vec::new());
        save.await;
        occupy(&keeper).await;
        let owner = tenant();
        let mut take = Box::pin(Talk::take(&keeper, &owner, &id, Bytes::from_static(b"[]"), KEEP, LOCK_WAIT));
        let is_pending = std::future::poll_fn(|context| Poll::Ready(take.as_mut().poll(context).is_pending())).await;
        assert!(is_pending, "the store is busy");
        drop(take);
        assert!(is_free(&keeper, &id).await);
    }
}
