//! Peers that have not proved the pool key yet.
//!
//! Whoever has the key proves it in moments; whoever has not may hold its connection open for as long as a handshake may take. So there are
//! a few places for strangers, apart from those of peers, and when they are full the one that came first makes room: to keep others
//! out it is not enough to hold connections open, one would have to open them faster than a proof takes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// See the module header.
pub(crate) struct Strangers {
    places: usize,
    here: Mutex<Here>,
}

#[derive(Default)]
struct Here {
    next: u64,
    /// Oldest first. One that is dropped here has lost its place.
    waiting: VecDeque<(u64, oneshot::Sender<()>)>,
}

impl Strangers {
    pub(crate) fn new(places: usize) -> Arc<Self> {
        Arc::new(Self { places: places.max(1), here: Mutex::default() })
    }

    fn here(&self) -> MutexGuard<'_, Here> {
        self.here.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more; the oldest goes if there are too many.
    pub(crate) fn enter(self: &Arc<Self>) -> Stranger {
        let (place, displaced) = oneshot::channel();
        let mut here = self.here();
        here.next += 1;
        let id = here.next;
        here.waiting.push_back((id, place));
        if here.waiting.len() > self.places {
            here.waiting.pop_front();
        }
        Stranger { all: Arc::clone(self), id, displaced }
    }
}

/// A place among strangers, until the proof or until it is dropped.
pub(crate) struct Stranger {
    all: Arc<Strangers>,
    id: u64,
    displaced: oneshot::Receiver<()>,
}

impl Stranger {
    /// Lets it prove itself, for as long as it has its place; it is no stranger afterwards. `None`: its place was needed.
    pub(crate) async fn within<T>(mut self, proving: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            _ = &mut self.displaced => None,
            done = proving => self.leave().then_some(done),
        }
    }

    /// False when it had lost its place.
    fn leave(&self) -> bool {
        let mut here = self.all.here();
        let at = here.waiting.iter().position(|(id, _)| *id == self.id);
        at.is_some_and(|at| here.waiting.remove(at).is_some())
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};

    #[tokio::test]
    async fn who_proves_nothing_makes_room() {
        let strangers = Strangers::new(2);
        let [first, second, third] = [(); 3].map(|()| strangers.enter());
        assert_eq!(first.within(pending::<()>()).await, None, "three are too many");
        assert_eq!(second.within(ready(7)).await, Some(7));
        assert_eq!(strangers.here().waiting.len(), 1, "one that proved itself needs no place");
        drop(third);
        assert!(strangers.here().waiting.is_empty());
    }
}
