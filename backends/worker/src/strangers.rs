//! Peers that have not proved the pool key.
//!
//! A peer with the key proves it in moments; a peer without may hold its connection open for as long as a handshake
//! may take. So there are a few places for strangers, apart from those of peers, and when they are full the oldest
//! stranger is dropped: to keep others out it is not enough to hold connections open, an attacker would have to open
//! them faster than a proof takes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Bounded set of places for peers that have not proved the pool key.
pub(crate) struct Strangers {
    places: usize,
    here: Mutex<Here>,
}

#[derive(Default)]
struct Here {
    next: u64,
    /// Waiting strangers, oldest first. A dropped sender tells a stranger that it has lost its place.
    waiting: VecDeque<(u64, oneshot::Sender<()>)>,
}

impl Strangers {
    pub(crate) fn new(places: usize) -> Arc<Self> {
        Arc::new(Self { places: places.max(1), here: Mutex::default() })
    }

    fn here(&self) -> MutexGuard<'_, Here> {
        self.here.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a stranger; the oldest is dropped if there are too many.
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

/// A place among strangers, held until the proof or until dropped.
pub(crate) struct Stranger {
    all: Arc<Strangers>,
    id: u64,
    displaced: oneshot::Receiver<()>,
}

impl Stranger {
    /// Runs the proof for as long as the stranger has its place, and then frees the place. `None` if the place was
    /// needed for another.
    pub(crate) async fn within<T>(mut self, proving: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            _ = &mut self.displaced => None,
            done = proving => self.leave().then_some(done),
        }
    }

    /// Frees the place; false when it was lost before.
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
