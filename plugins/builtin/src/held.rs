//! Events of an answer that a plugin holds back until somebody has judged the whole of it.
//!
//! The events lie in one place for the plugin and for the work that it waits for: the work takes them when it lets them
//! go, and as long as it has not, the plugin can release them. Nothing is copied.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_plugins::{PluginError, event_bytes};
use penstock_types::ChatEvent;

/// Most memory of the events of one answer that is held back, in bytes, with log-probabilities and all.
const HELD_BYTES_MAX: usize = 64 << 20;

/// Events that are held back; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeldBack(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    events: Vec<ChatEvent>,
    bytes: usize,
}

impl HeldBack {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `events` behind those that are held.
    ///
    /// # Errors
    /// The answer is larger than any that is held back; `events` stay where they are.
    pub(crate) fn add(&self, events: &mut Vec<ChatEvent>) -> Result<(), PluginError> {
        let mut inner = self.inner();
        let bytes = inner.bytes + events.iter().map(event_bytes).sum::<usize>();
        if bytes > HELD_BYTES_MAX {
            return Err(PluginError::new("the answer is too large to be held back"));
        }
        inner.bytes = bytes;
        inner.events.append(events);
        Ok(())
    }

    /// Memory of the events, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.inner().bytes
    }

    /// Takes out all events.
    pub(crate) fn take(&self) -> Vec<ChatEvent> {
        std::mem::take(&mut *self.inner()).events
    }
}
