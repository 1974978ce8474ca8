//! State of the gateway as the console shows it, taken at most twice a second however many look.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

/// Age up to which a state is shown again instead of being taken anew.
const FRESH: Duration = Duration::from_millis(400);

/// Last state that was taken, as JSON.
#[derive(Default)]
pub(crate) struct Pulse(Mutex<Option<(Instant, Bytes)>>);

impl Pulse {
    /// Last state; what `take` returns where that is too old.
    pub(crate) fn json(&self, take: impl FnOnce() -> Bytes) -> Bytes {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, json)) = &*last
            && at.elapsed() < FRESH
        {
            return json.clone();
        }
        let json = take();
        *last = Some((Instant::now(), json.clone()));
        json
    }
}
