//! Answers that are being saved.
//!
//! A client can continue a response the moment it has it, which can be before it is saved. So a lookup of an object
//! that is being saved waits for that write; where other processes write to the store, a lookup that finds nothing looks
//! again for a while ([`Looks`]).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use penstock_store::Tenant;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{sleep, timeout};

/// Most responses that are saved at once; beyond that the store is too slow, and a further response is not stored.
pub(crate) const SAVING_MAX: usize = 1024;
/// Longest wait of a lookup for a response that is being saved.
const SAVED_TIMEOUT: Duration = Duration::from_secs(5);

/// Pauses between the looks for an object that another process may be saving, in milliseconds: 775 in all, longer than most
/// writes.
const LOOK_AGAIN_MS: [u64; 5] = [25, 50, 100, 200, 400];

/// Owner of each object that is being saved, by its id, and a receiver whose sender is dropped at the end.
type Saves = HashMap<String, (Tenant, watch::Receiver<()>)>;

/// Objects that are being saved right now; a lookup waits for them. Copies share one list.
#[derive(Clone)]
pub(crate) struct Saving {
    now: Arc<Mutex<Saves>>,
    places: Arc<Semaphore>,
}

impl Default for Saving {
    fn default() -> Self {
        Self { now: Arc::default(), places: Arc::new(Semaphore::new(SAVING_MAX)) }
    }
}

impl Saving {
    /// Waits until the object is not being saved, or [`SAVED_TIMEOUT`] is over.
    pub(crate) async fn settled(&self, id: &str) {
        let saved = self.now.lock().unwrap_or_else(PoisonError::into_inner).get(id).map(|(_, saved)| saved.clone());
        if let Some(mut saved) = saved {
            // The sender sends nothing; it is dropped when the object is saved. After the timeout the lookup finds
            // none.
            let _ = timeout(SAVED_TIMEOUT, saved.changed()).await;
        }
    }

    /// Waits until nothing of the tenant's that was answered by now is being saved, or [`SAVED_TIMEOUT`] is over.
    pub(crate) async fn all_settled(&self, tenant: &Tenant) {
        let now: Vec<_> = {
            let now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
            now.values().filter(|(owner, _)| owner == tenant).map(|(_, saved)| saved.clone()).collect()
        };
        let all = async {
            for mut saved in now {
                let _ = saved.changed().await;
            }
        };
        let _ = timeout(SAVED_TIMEOUT, all).await;
    }

    /// Returns true if every answered object is saved, so that the process may end.
    pub(crate) fn is_idle(&self) -> bool {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Registers an object that is being saved. `None`: too many are.
    pub(crate) fn begin(&self, tenant: &Tenant, id: &str) -> Option<Place> {
        let place = self.places.clone().try_acquire_owned().ok()?;
        let (over, saved) = watch::channel(());
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.insert(id.to_owned(), (tenant.clone(), saved));
        drop(now);
        Some(Place { saving: self.clone(), id: id.to_owned(), _place: place, _over: over })
    }
}

/// Looks for an object that was not there, and may just be being saved.
pub(crate) struct Looks {
    pauses_ms: std::slice::Iter<'static, u64>,
}

impl Looks {
    /// Looks for an object; `is_awaited`: another process may be saving it.
    pub(crate) fn new(is_awaited: bool) -> Self {
        Self { pauses_ms: if is_awaited { LOOK_AGAIN_MS.iter() } else { [].iter() } }
    }

    /// Result of the first look that finds the object or fails; the first of all is at once. `None`: the object is absent.
    pub(crate) async fn find<T, E, F>(mut self, look: impl Fn() -> F) -> Result<Option<T>, E>
    where
        F: Future<Output = Result<Option<T>, E>>,
    {
        loop {
            match look().await? {
                None if self.again().await => {}
                found => return Ok(found),
            }
        }
    }

    /// Waits for the time of the next look. `false`: there is none.
    async fn again(&mut self) -> bool {
        match self.pauses_ms.next() {
            Some(pause) => {
                sleep(Duration::from_millis(*pause)).await;
                true
            }
            None => false,
        }
    }
}

/// Registration of an object that is being saved, removed on drop.
pub(crate) struct Place {
    saving: Saving,
    id: String,
    _place: OwnedSemaphorePermit,
    _over: watch::Sender<()>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.saving.now.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_another_process_may_be_saving_is_looked_for_again() {
        for (is_awaited, looks_max, waited_ms) in [(true, 6, 775), (false, 1, 0)] {
            for found_at in 1..=looks_max {
                let looks = Cell::new(0);
                let look = || async {
                    looks.set(looks.get() + 1);
                    Ok::<_, ()>((looks.get() == found_at).then_some(found_at))
                };
                assert_eq!(Looks::new(is_awaited).find(look).await, Ok(Some(found_at)));
                assert_eq!(looks.get(), found_at);
            }
            let (looks, began) = (Cell::new(0), Instant::now());
            let look = || async {
                looks.set(looks.get() + 1);
                Ok::<Option<()>, ()>(None)
            };
            assert_eq!(Looks::new(is_awaited).find(look).await, Ok(None));
            assert_eq!((looks.get(), began.elapsed()), (looks_max, Duration::from_millis(waited_ms)));
        }
    }
}
