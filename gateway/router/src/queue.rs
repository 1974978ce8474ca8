//! Who is next: requests that wait for a worker, ordered by priority, then by arrival; resumed ones first.
//!
//! Bounded: `Queue::push` refuses above its limit. A resumed request is never refused: it was admitted once, and its client
//! has read half an answer.

use penstock_proto::{BlockHash, BlockHasher};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// What the router knows about a request. What is left out is as for a request of nobody in particular.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The tokens a worker has to hold before it can emit: the prompt, and for a resumed request what was emitted.
    pub tokens: Arc<[u32]>,
    /// Salt of its block hashes.
    pub salt: Arc<[u8]>,
    /// Lower runs first; 0 is normal.
    pub priority: i32,
    /// Sequences it needs (open choices), at least 1.
    pub sequences: u32,
    /// For a resumed request that has emitted tokens: the numerics they were computed in.
    pub numerics_id: Option<Arc<str>>,
    /// Resumed: goes before all others, and is never refused.
    pub resumed: bool,
    /// Whose it is: waiting requests of several tenants share the workers fairly.
    pub tenant: Arc<str>,
    /// The tenant's share against others'; 0 counts as 1.
    pub weight: u32,
    /// What keeps the requests of one conversation together under a policy that does so.
    pub session: Option<u64>,
    /// When it is no use any more: it is refused when it still waits then.
    pub deadline: Option<Duration>,
}

/// A request that waits.
pub(crate) struct Waiting {
    pub(crate) request: u64,
    pub(crate) view: View,
    pub(crate) since: Duration,
    hashes: Vec<(Arc<str>, Arc<[BlockHash]>)>,
}

impl Waiting {
    /// Block hashes as a worker of these numerics would compute them; computed once per numerics.
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

/// Orders: resumed before new, then priority, then arrival.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    new: bool,
    priority: i32,
    arrival: u64,
}

/// The queue; see the module header.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: BTreeMap<Key, Waiting>,
    keys: HashMap<u64, Key>,
    arrivals: u64,
    tokens: usize,
}

impl Queue {
    /// Adds a request, or says that `limit` new ones wait already.
    pub(crate) fn push(&mut self, request: u64, view: View, now: Duration, limit: usize) -> bool {
        if !view.resumed && self.waiting.len() >= limit {
            return false;
        }
        self.remove(request);
        self.arrivals += 1;
        let key = Key { new: !view.resumed, priority: view.priority, arrival: self.arrivals };
        self.tokens += view.tokens.len();
        self.keys.insert(request, key);
        self.waiting.insert(key, Waiting { request, view, since: now, hashes: Vec::new() });
        true
    }

    /// Takes a request out; `None` when it does not wait.
    pub(crate) fn remove(&mut self, request: u64) -> Option<Waiting> {
        let key = self.keys.remove(&request)?;
        let waiting = self.waiting.remove(&key)?;
        self.tokens -= waiting.view.tokens.len();
        Some(waiting)
    }

    /// Those that wait, next first.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Waiting> {
        self.waiting.values_mut()
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Prompt tokens that wait.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(priority: i32, resumed: bool) -> View {
        View {
            tokens: vec![1; 10].into(),
            salt: Arc::from(&b""[..]),
            priority,
            sequences: 1,
            resumed,
            ..View::default()
        }
    }

    #[test]
    fn order_is_resumed_then_priority_then_arrival() {
        let mut queue = Queue::default();
        for (request, priority, resumed) in [(1, 0, false), (2, -5, false), (3, 0, false), (4, 9, true), (5, 0, true)] {
            assert!(queue.push(request, view(priority, resumed), Duration::ZERO, 10));
        }
        assert_eq!(queue.iter_mut().map(|w| w.request).collect::<Vec<_>>(), [5, 4, 2, 1, 3]);
        assert_eq!(queue.remove(2).map(|w| w.request), Some(2));
        assert!(queue.remove(2).is_none());
        assert_eq!((queue.len(), queue.tokens()), (4, 40));
    }

    #[test]
    fn a_full_queue_refuses_new_requests_only() {
        let mut queue = Queue::default();
        assert!(queue.push(1, view(0, false), Duration::ZERO, 1));
        assert!(!queue.push(2, view(-9, false), Duration::ZERO, 1));
        assert!(queue.push(3, view(0, true), Duration::ZERO, 1));
    }

    #[test]
    fn hashes_follow_the_numerics() {
        let mut queue = Queue::default();
        queue.push(1, View { tokens: (0..70).collect(), ..view(0, false) }, Duration::ZERO, 1);
        let waiting = queue.iter_mut().next().expect("pushed");
        let (a, b): (Arc<str>, Arc<str>) = ("cpu".into(), "cuda".into());
        assert_eq!(waiting.hashes(&a).len(), 2);
        assert_ne!(waiting.hashes(&a), waiting.hashes(&b));
        assert_eq!(*waiting.hashes(&a), BlockHasher::for_request(b"", "cpu").chain(&(0..70).collect::<Vec<_>>())[..]);
    }
}
