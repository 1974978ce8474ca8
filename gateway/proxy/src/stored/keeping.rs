//! Collection of a response beside its stream, and its write into the store when it has ended, off the client's path.
//!
//! A client can continue a response the moment it has it, which can be before it is saved. So a lookup of a response
//! that is being saved waits for that write.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use penstock_dialects::openai::ResponseCollector;
use penstock_store::{ResponseId, ResponseRecord, ResponseRoom, Tenant};
use penstock_types::{ChatEvent, WholeCollector};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::timeout;

use super::Keeper;
use penstock_base::error::Failure;
use penstock_upstream::answer_memory::Hold;

/// Most responses that are saved at once; beyond that the store is too slow, and a further response is not stored.
const SAVING_MAX: usize = 1024;
/// Longest wait of a lookup for a response that is being saved.
const SAVED_TIMEOUT: Duration = Duration::from_secs(5);
/// Responses that are being saved right now; a lookup waits for them.
pub(crate) struct Saving {
    now: Mutex<HashMap<ResponseId, watch::Receiver<()>>>,
    places: Arc<Semaphore>,
}

impl Default for Saving {
    fn default() -> Self {
        Self { now: Mutex::default(), places: Arc::new(Semaphore::new(SAVING_MAX)) }
    }
}

impl Saving {
    /// Waits until the response is not being saved, or [`SAVED_TIMEOUT`] is over.
    pub(super) async fn settled(&self, id: &ResponseId) {
        let saved = self.now.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned();
        if let Some(mut saved) = saved {
            // The sender sends nothing; it is dropped when the response is saved. After the timeout the lookup finds no
            // response.
            let _ = timeout(SAVED_TIMEOUT, saved.changed()).await;
        }
    }

    /// Returns true if every answered response is saved, so that the process may end.
    pub(crate) fn is_idle(&self) -> bool {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    fn begin(keeper: &Arc<Keeper>, id: &ResponseId) -> Option<Place> {
        let place = keeper.saving.places.clone().try_acquire_owned().ok()?;
        let (over, saved) = watch::channel(());
        keeper.saving.now.lock().unwrap_or_else(PoisonError::into_inner).insert(id.clone(), saved);
        Some(Place { keeper: keeper.clone(), id: id.clone(), _place: place, _over: over })
    }
}

/// Registration of a response that is being saved, removed on drop.
struct Place {
    keeper: Arc<Keeper>,
    id: ResponseId,
    _place: OwnedSemaphorePermit,
    _over: watch::Sender<()>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.keeper.saving.now.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

/// Response whose answer is collected and then saved in the store.
pub(crate) struct Keeping {
    keeper: Arc<Keeper>,
    tenant: Tenant,
    /// Record without the fields that the answer brings.
    record: ResponseRecord,
    collector: ResponseCollector,
    room: ResponseRoom,
    /// Memory charged for the collected answer, until the response is saved.
    hold: Hold,
}

impl Keeping {
    pub(super) fn new(
        keeper: Arc<Keeper>,
        tenant: Tenant,
        record: ResponseRecord,
        collector: ResponseCollector,
        room: ResponseRoom,
        hold: Hold,
    ) -> Self {
        Self { keeper, tenant, record, collector, room, hold }
    }

    /// Charges the memory for the collected events, and for the documents that are made of them.
    ///
    /// # Errors
    /// The budget is used up.
    pub(crate) fn cover(&mut self) -> Result<(), Failure> {
        self.hold.cover(self.record.input.len() + 2 * self.bytes())
    }

    /// Gives up the store copy; the client has its answer all the same.
    pub(crate) fn give_up(self, why: &Failure) {
        self.keeper.unsaved(&self.record.id, &why.message);
    }

    /// Adds one event of the answer to the collected response.
    pub(crate) fn event(&mut self, event: &ChatEvent) {
        self.collector.event(event);
    }

    /// Bytes of the answer that the collector holds.
    pub(crate) fn bytes(&self) -> usize {
        WholeCollector::bytes(&self.collector)
    }

    /// Saves the complete answer, which is about to be sent. An incomplete answer is not stored.
    pub(crate) fn end(self) {
        let Self { keeper, tenant, mut record, collector, room, hold } = self;
        let Some(finished) = collector.finished() else { return };
        (record.body, record.output) = (finished.body, finished.output);
        let Some(place) = Saving::begin(&keeper, &record.id) else {
            keeper.unsaved(&record.id, "too many are being saved");
            return;
        };
        tokio::spawn(async move {
            let id = record.id.clone();
            if let Err(error) = keeper.store.save_response(&tenant, record, room).await {
                keeper.unsaved(&id, &error.to_string());
            }
            drop((place, hold));
        });
    }
}
