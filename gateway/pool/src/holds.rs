//! Holds of an operator on workers, as all pools of these workers see them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Names of the workers that an operator holds. A pool and the one that takes its workers over share them, so that a hold ends when the operator
/// ends it, and with nothing else.
#[derive(Clone, Debug, Default)]
pub struct Holds(Arc<Mutex<BTreeSet<String>>>);

impl Holds {
    /// Names of the workers that are held.
    pub fn names(&self) -> Vec<String> {
        self.lock().iter().cloned().collect()
    }

    /// Holds these workers and no others. Names that the pool does not know mean nothing.
    pub fn replace(&self, names: impl IntoIterator<Item = String>) {
        *self.lock() = names.into_iter().collect();
    }

    pub(super) fn set(&self, name: &str, is_held: bool) {
        if is_held {
            self.lock().insert(name.to_owned());
        } else {
            self.lock().remove(name);
        }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.lock().contains(name)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
