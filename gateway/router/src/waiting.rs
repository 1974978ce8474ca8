//! Requests that wait in the router, with what was found for each: index hits, block hashes, and its place in the queue.

use crate::WorkerId;
use crate::explain::Found;
use crate::view::View;
use penstock_proto::{BlockHash, BlockHasher, RequestId};
use std::sync::Arc;
use std::time::Duration;

/// Least loss of cached tokens that counts as an eviction.
const LOST_MIN: u32 = 1024;

/// Wait of a request for a busy worker that costs less than the free ones, its queue included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) since: Duration,
    /// Wait in seconds that was predicted when the request began to wait for the worker.
    pub(crate) promised: f64,
}

/// Look at a request that could not be bound then, and let the requests behind it pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passed {
    pub(crate) at: Duration,
    /// Worker that the request waits for; `None`: none suits.
    pub(crate) worker: Option<WorkerId>,
    /// Seconds of prefill that the request will bring there.
    pub(crate) seconds: f64,
    /// KV blocks that the request will take there.
    pub(crate) blocks: u32,
}

/// A request in the router's queue, with the index hits and hashes cached for it.
pub(crate) struct Waiting {
    pub(crate) request: RequestId,
    pub(crate) view: View,
    pub(crate) since: Duration,
    /// Seconds of prefill at the worker with the least, as estimated at the arrival.
    pub(crate) estimate: f64,
    pub(crate) held: Option<Held>,
    /// Last look at the request; `None`: there was none, or it gathers credits.
    pub(crate) passed: Option<Passed>,
    /// Cached tokens found at each worker, valid for a short time after `found_at`.
    pub(crate) found: Vec<(WorkerId, Found)>,
    pub(crate) found_at: Duration,
    /// True if a prefetch for the request was considered already.
    pub(crate) is_ahead: bool,
    /// Most tokens of the prompt found at any worker, its tiers included, during the wait.
    pub(crate) most_found: u32,
    /// True if most of these were evicted during the wait and are in no tier.
    pub(crate) has_lost: bool,
    pub(crate) place: Place,
    hashes: Vec<(Arc<str>, Arc<[BlockHash]>)>,
}

impl Waiting {
    pub(crate) fn new(request: RequestId, view: View, since: Duration) -> Self {
        let place = Place { lane: Lane { new: !view.resumed, priority: view.priority }, due: since, arrival: 0 };
        Self {
            request,
            view,
            since,
            estimate: 0.0,
            held: None,
            passed: None,
            found: Vec::new(),
            found_at: Duration::ZERO,
            is_ahead: false,
            most_found: 0,
            has_lost: false,
            place,
            hashes: Vec::new(),
        }
    }

    /// Compares the new index hits with the best ones so far.
    pub(crate) fn note_found(&mut self) {
        let held = |found: &Found| found.device + found.promised + found.host + found.disk + found.remote;
        let most = self.found.iter().map(|(_, found)| held(found)).max().unwrap_or(0);
        self.has_lost |= self.most_found.saturating_sub(most) > (self.most_found / 4).max(LOST_MIN);
        self.most_found = if self.has_lost { most } else { self.most_found.max(most) };
    }

    /// Block hashes as a worker of these numerics computes them; cached per numerics.
    pub(crate) fn hashes(&mut self, numerics_id: &Arc<str>) -> Arc<[BlockHash]> {
        if let Some((_, hashes)) = self.hashes.iter().find(|(id, _)| id == numerics_id) {
            return Arc::clone(hashes);
        }
        let hashes: Arc<[BlockHash]> =
            BlockHasher::for_request(&self.view.salt, numerics_id).chain(&self.view.tokens).into();
        self.hashes.push((Arc::clone(numerics_id), Arc::clone(&hashes)));
        hashes
    }
}

/// Lane of the queue: resumed before new, then by priority.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lane {
    pub(crate) new: bool,
    pub(crate) priority: i32,
}

/// Place of a request in the queue: its lane, due time, and number of its arrival.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) lane: Lane,
    pub(crate) due: Duration,
    pub(crate) arrival: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_follow_the_numerics() {
        let view = View { tokens: (0..70).collect(), ..View::default() };
        let mut waiting = Waiting::new(RequestId(1), view, Duration::ZERO);
        let (a, b): (Arc<str>, Arc<str>) = ("cpu".into(), "cuda".into());
        assert_eq!(waiting.hashes(&a).len(), 2);
        assert_ne!(waiting.hashes(&a), waiting.hashes(&b));
        assert_eq!(*waiting.hashes(&a), BlockHasher::for_request(b"", "cpu").chain(&(0..70).collect::<Vec<_>>())[..]);
    }
}
