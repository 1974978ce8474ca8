//! Queue of requests that wait for a worker, fair among tenants.
//!
//! ```text
//! resumed ones → lower priority numbers → tenants that were served least → earliest due time
//! ```
//! Service is counted in engine seconds after cache credit, by weight (virtual token counters, Sheng et al. 2024, in
//! seconds): prefill when a request is bound, decode as tokens come. Tenants whose counters are within one *bound* of
//! each other are equals, and among equals the earliest due time goes first. So a short request may overtake others, by
//! that much and no further.
//!
//! A tenant that returns after a silence starts at the *level* (virtual time), whatever its counter was: the lowest
//! counter at which a request was bound that has no first token yet. While tenants at the level are served, it rises as
//! if one more was served in turn: an endless flow of newcomers does not starve tenants that were waiting before.
//!
//! A request takes its tenant's counter along to its worker, as its *turn* ([`Rank`]): prompts not computed yet are
//! computed in this order there too (start-time fair queueing, Goyal et al. 1996).
//!
//! The *due time* is arrival plus the TTFT objective, where the pool has one, else plus the request's own prefill, two
//! seconds at most. A request that can no longer meet its objective lets those pass that can, until it is late by
//! several objectives. Except while KV is short: if blocks that a request waits for are evicted, the requests that pass
//! it cause the evictions, and it becomes later still. Then the earliest due time goes first.
//!
//! Bounded: when `limit` new requests wait, the last one of the tenant with most of them is put out. A resumed request
//! is never refused: it was admitted once, and its client has read half an answer.

use crate::lines::Lines;
use crate::slo::Slo;
use crate::view::{FIRST, Rank, View};
use crate::waiting::{Lane, Waiting};
use penstock_proto::RequestId;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// Most tenants of one bucket that are searched for the least service.
const EQUALS_MAX: usize = 256;

/// Most seconds of own prefill that count for the due time without an objective.
const DUE_MAX: f64 = 2.0;
/// Lateness, in objectives, from which on a request goes before those that are not late, against starvation.
const STARVED_AFTER: u32 = 4;
/// Time after an eviction of blocks that a request waited for, in which no request overtakes late ones.
const SHORT_FOR: Duration = Duration::from_secs(30);
/// Most tenants without a waiting request whose counters are remembered.
const IDLE_TENANTS_MAX: usize = 4096;

/// Service that a tenant has had, and its waiting requests, for fair queueing.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// Service that the tenant has had, in engine seconds divided by its weight.
    served: f64,
    share: f64,
    waiting: usize,
    /// Estimated prefill of the tenant's waiting requests, in seconds.
    seconds: f64,
}

impl Account {
    /// Waiting requests per weight, as sortable bits of the number; `None`: none wait.
    fn load(&self) -> Option<Reverse<u64>> {
        (self.waiting > 0).then(|| Reverse((self.waiting as f64 / self.share.max(1.0)).to_bits()))
    }
}

/// Queue of the requests of a pool that wait for a worker; see the module header.
pub(crate) struct Queue {
    waiting: HashMap<RequestId, Waiting>,
    lanes: BTreeMap<Lane, Lines>,
    accounts: HashMap<Arc<str>, Account>,
    /// Tenants with waiting requests, most per weight first; ties by name.
    most: BTreeSet<(Reverse<u64>, Arc<str>)>,
    deadlines: BTreeSet<(Duration, RequestId)>,
    arrivals: u64,
    new: usize,
    seconds: f64,
    /// Service counter at which a tenant starts when it comes or returns, so that absence saves up nothing. Never
    /// falls.
    level: f64,
    /// Highest counter at which a tenant was served.
    latest: f64,
    /// Sum of the weights of tenants with waiting requests.
    waiting_share: f64,
    /// Engine seconds by which tenants may differ and still count as equals.
    bound: f64,
    slo: Option<Slo>,
    /// End of a shortage of blocks, during which no request passes late ones.
    short_until: Duration,
}

/// One tenant's next request while an order is made. Keys are reversed, since the heap yields the greatest first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Head {
    key: Reverse<(i64, u8, Duration, u64)>,
    tenant: usize,
}

impl Queue {
    pub(crate) fn new(bound: f64, slo: Option<Slo>) -> Self {
        Self {
            waiting: HashMap::new(),
            lanes: BTreeMap::new(),
            accounts: HashMap::new(),
            most: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            arrivals: 0,
            new: 0,
            seconds: 0.0,
            level: 0.0,
            latest: 0.0,
            waiting_share: 0.0,
            bound: bound.max(1e-3),
            slo,
            short_until: Duration::ZERO,
        }
    }

    /// Adds a request. When `limit` new ones wait already: `Err` with the request that was put out for it, or with this one.
    pub(crate) fn push(&mut self, mut waiting: Waiting, limit: usize) -> Result<(), RequestId> {
        let request = waiting.request;
        self.remove(request);
        let out = if !waiting.view.resumed && self.new >= limit { Some(self.last_of_most(&waiting)) } else { None };
        if out == Some(request) {
            return Err(request);
        }
        out.map(|out| self.remove(out));
        self.arrivals += 1;
        let allowed = match &self.slo {
            Some(slo) => slo.ttft(waiting.view.tokens.len()),
            None => Duration::from_secs_f64(waiting.estimate.clamp(0.0, DUE_MAX)),
        };
        waiting.place.due = waiting.since.saturating_add(allowed);
        waiting.place.arrival = self.arrivals;
        self.enter(&waiting);
        self.waiting.insert(request, waiting);
        out.map_or(Ok(()), Err)
    }

    fn enter(&mut self, waiting: &Waiting) {
        let Waiting { request, view, place, .. } = waiting;
        let beginner = Account { served: self.level, ..Account::default() };
        let account = self.accounts.entry(Arc::clone(&view.tenant)).or_insert(beginner);
        let before = account.load();
        if account.waiting == 0 {
            account.served = account.served.max(self.level);
        } else {
            self.waiting_share -= account.share;
        }
        account.share = view.share();
        self.waiting_share += account.share;
        account.waiting += 1;
        account.seconds += waiting.estimate;
        let (after, bucket) = (account.load(), bucket(account.served, self.bound));
        self.rerank(&view.tenant, before, after);
        self.new += usize::from(!view.resumed);
        self.seconds += waiting.estimate;
        let lines = self.lanes.entry(place.lane).or_default();
        lines.insert(&view.tenant, bucket, (place.due, place.arrival), *request);
        self.deadlines.extend(view.deadline.map(|deadline| (deadline, *request)));
        self.forget_idle();
    }

    /// Updates a tenant's position among those with most waiting requests.
    fn rerank(&mut self, tenant: &Arc<str>, before: Option<Reverse<u64>>, after: Option<Reverse<u64>>) {
        if before != after {
            before.map(|load| self.most.remove(&(load, Arc::clone(tenant))));
            after.map(|load| self.most.insert((load, Arc::clone(tenant))));
        }
    }

    /// Removes a request; `None` when it does not wait.
    pub(crate) fn remove(&mut self, request: RequestId) -> Option<Waiting> {
        let waiting = self.waiting.remove(&request)?;
        let Waiting { view, place, .. } = &waiting;
        if let Some(lane) = self.lanes.get_mut(&place.lane) {
            lane.remove(&view.tenant, (place.due, place.arrival));
            if lane.is_empty() {
                self.lanes.remove(&place.lane);
            }
        }
        if let Some(account) = self.accounts.get_mut(&view.tenant) {
            let before = account.load();
            account.waiting -= 1;
            if account.waiting == 0 {
                self.waiting_share = (self.waiting_share - account.share).max(0.0);
            }
            account.seconds = (account.seconds - waiting.estimate).max(0.0);
            let after = account.load();
            self.rerank(&view.tenant, before, after);
        }
        view.deadline.map(|deadline| self.deadlines.remove(&(deadline, request)));
        self.new -= usize::from(!view.resumed);
        self.seconds = (self.seconds - waiting.estimate).max(0.0);
        Some(waiting)
    }

    /// Raises the level to the first turn of requests that were bound and have no first token yet, which newcomers compete with too.
    pub(crate) fn raise_level(&mut self, first_turn: Option<i64>) {
        let there = first_turn.map_or(self.latest, |turn| turn as f64 / 1e6);
        self.level = self.level.max(there);
    }

    /// Adds engine seconds, divided by the weight, to a tenant's service.
    pub(crate) fn serve(&mut self, tenant: &Arc<str>, weight: u32, seconds: f64) {
        if !seconds.is_finite() {
            return;
        }
        let share = f64::from(weight.max(1));
        let beginner = Account { served: self.level, ..Account::default() };
        let account = self.accounts.entry(Arc::clone(tenant)).or_insert(beginner);
        let before = account.served;
        account.served += seconds / share;
        let bucket = bucket(account.served, self.bound);
        self.lanes.values_mut().for_each(|lines| lines.stand(tenant, bucket));
        self.latest = self.latest.max(before);
        if before <= self.level {
            // As if one more tenant waited and was served in turn.
            let own = if account.waiting == 0 { share } else { 0.0 };
            self.level += seconds / (self.waiting_share + own + 1.0);
        }
    }

    /// Rank that a request has at its worker if it is bound now.
    pub(crate) fn rank(&self, view: &View) -> Rank {
        let served = || self.accounts.get(&view.tenant).map_or(self.level, |account| account.served);
        (view.priority, if view.resumed { FIRST } else { micros(served()) })
    }

    /// Notes an eviction of blocks that a request waited for.
    pub(crate) fn fall_short(&mut self, now: Duration) {
        self.short_until = now.saturating_add(SHORT_FOR);
    }

    /// The first `count` waiting requests in order, as if each was charged its estimate.
    pub(crate) fn order(&self, now: Duration, count: usize) -> Vec<RequestId> {
        let mut order = Vec::with_capacity(count.min(self.waiting.len()));
        for lane in self.lanes.values() {
            if order.len() >= count {
                break;
            }
            self.order_lane(lane, now, count, &mut order);
        }
        order
    }

    fn order_lane(&self, lane: &Lines, now: Duration, count: usize, order: &mut Vec<RequestId>) {
        // Late requests and those in time of each tenant, with the tenant's service.
        let split = self.slo.filter(|_| now >= self.short_until).map_or(Duration::ZERO, |_| now);
        let mut tenants: Vec<_> = lane
            .first(split, count)
            .into_iter()
            .map(|(tenant, line)| {
                let account = self.accounts.get(tenant).copied().unwrap_or_default();
                let (late, in_time) = (line.requests.range(..(split, 0)), line.requests.range((split, 0)..));
                (late.peekable(), in_time.peekable(), account.served, account.share.max(1.0))
            })
            .collect();
        let mut heap = BinaryHeap::with_capacity(tenants.len());
        for (at, (late, in_time, served, _)) in tenants.iter_mut().enumerate() {
            let heads = (late.peek().map(|(key, id)| (**key, **id)), in_time.peek().map(|(key, id)| (**key, **id)));
            heap.extend(self.head(at, heads, *served, now));
        }
        while let Some(Head { key: Reverse((_, class, ..)), tenant: at }) = heap.pop() {
            let (late, in_time, served, share) = &mut tenants[at];
            let Some((_, request)) = (if class == IN_TIME { in_time.next() } else { late.next() }) else { continue };
            order.push(*request);
            if order.len() >= count {
                return;
            }
            *served += self.waiting.get(request).map_or(0.0, |waiting| waiting.estimate) / *share;
            let heads = (late.peek().map(|(key, id)| (**key, **id)), in_time.peek().map(|(key, id)| (**key, **id)));
            heap.extend(self.head(at, heads, *served, now));
        }
    }

    /// Next request of a tenant: of the first late one and the first one in time.
    fn head(&self, tenant: usize, heads: (Next, Next), served: f64, now: Duration) -> Option<Head> {
        let bucket = bucket(served, self.bound);
        let late = heads.0.map(|((due, arrival), request)| {
            let starved = self
                .waiting
                .get(&request)
                .is_some_and(|waiting| now.saturating_sub(due) > due.saturating_sub(waiting.since) * STARVED_AFTER);
            (bucket, if starved { STARVED } else { LATE }, due, arrival)
        });
        let in_time = heads.1.map(|((due, arrival), _)| (bucket, IN_TIME, due, arrival));
        let key = late.into_iter().chain(in_time).min()?;
        Some(Head { key: Reverse(key), tenant })
    }

    /// The request to put out for `waiting` in a full queue: the last of the tenant with most by weight, or `waiting` itself.
    fn last_of_most(&self, waiting: &Waiting) -> RequestId {
        let own = self.accounts.get(&waiting.view.tenant).copied().unwrap_or_default();
        let own_load = (own.waiting as f64 + 1.0) / waiting.view.share();
        let Some((Reverse(most), tenant)) = self.most.first() else { return waiting.request };
        if own_load >= f64::from_bits(*most) {
            return waiting.request;
        }
        let lines = self.lanes.iter().rev().filter(|(lane, _)| lane.new);
        let last = lines.filter_map(|(_, lane)| lane.get(tenant)?.requests.last_key_value()).next();
        last.map_or(waiting.request, |(_, request)| *request)
    }

    /// Lowest rank among the waiting requests: the one whose turn comes first.
    pub(crate) fn first_rank(&self) -> Option<Rank> {
        let turn = |lane: &Lane, lines| self.least(lines).filter(|_| lane.new).map_or(FIRST, micros);
        self.lanes.iter().map(|(lane, lines)| (lane.priority, turn(lane, lines))).min()
    }

    /// Least service of a tenant in these lines; of many equals, the start of their bucket.
    fn least(&self, lines: &Lines) -> Option<f64> {
        let (bucket, tenants) = lines.lowest()?;
        let equals = tenants.take(EQUALS_MAX).filter_map(|tenant| self.accounts.get(tenant));
        let served: Vec<f64> = equals.map(|account| account.served).collect();
        let is_many = served.len() == EQUALS_MAX;
        if is_many { Some(bucket as f64 * self.bound) } else { served.into_iter().min_by(f64::total_cmp) }
    }

    /// Forgets idle tenants when there are many: they return as newcomers.
    fn forget_idle(&mut self) {
        if self.accounts.len() > 2 * IDLE_TENANTS_MAX + self.waiting.len() {
            let level = self.level;
            let mut ahead: Vec<f64> =
                self.accounts.values().filter(|account| account.waiting == 0).map(|account| account.served).collect();
            ahead.sort_by(f64::total_cmp);
            let least = ahead.get(ahead.len().saturating_sub(IDLE_TENANTS_MAX)).copied().unwrap_or(level);
            self.accounts.retain(|_, account| account.waiting > 0 || account.served > least);
        }
    }

    /// A request whose deadline has passed, if any.
    pub(crate) fn expired(&self, now: Duration) -> Option<RequestId> {
        self.deadlines.first().filter(|(deadline, _)| *deadline <= now).map(|(_, request)| *request)
    }

    /// Upper bound of the seconds of prefill that go before a new request of this tenant.
    pub(crate) fn ahead(&self, tenant: &str, weight: u32) -> f64 {
        let own = self.accounts.get(tenant).copied().unwrap_or_default();
        let others = self.waiting_share - if own.waiting > 0 { own.share } else { 0.0 };
        let share = f64::from(weight.max(1));
        (own.seconds * (others.max(0.0) + share) / share).min(self.seconds)
    }

    /// A waiting request, and its rank.
    pub(crate) fn get_mut(&mut self, request: RequestId) -> Option<(Rank, &mut Waiting)> {
        let rank = self.rank(&self.waiting.get(&request)?.view);
        self.waiting.get_mut(&request).map(|waiting| (rank, waiting))
    }

    /// Returns true if any waiting request is a resumed one.
    pub(crate) fn has_resumed(&self) -> bool {
        self.waiting.len() > self.new
    }

    /// Number of requests in the queue, of all tenants.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Estimated prefill of all waiting requests, in seconds.
    pub(crate) fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Tenants with waiting requests: name, requests, engine seconds served by weight.
    pub(crate) fn tenants(&self) -> impl Iterator<Item = (&Arc<str>, usize, f64)> {
        let waiting = self.accounts.iter().filter(|(_, account)| account.waiting > 0);
        waiting.map(|(tenant, account)| (tenant, account.waiting, account.served))
    }
}

/// Bucket of a service: tenants of one bucket count as equals.
fn bucket(served: f64, bound: f64) -> i64 {
    (served / bound).floor() as i64
}

fn micros(seconds: f64) -> i64 {
    (seconds * 1e6) as i64
}

type Next = Option<((Duration, u64), RequestId)>;

/// Classes of requests in their order within a bucket.
const STARVED: u8 = 0;

const IN_TIME: u8 = 1;

const LATE: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WorkerId;
    use crate::explain::Found;
    use proptest::prelude::*;

    fn waiting(request: u64, tenant: &str, priority: i32, resumed: bool, estimate: f64, since: u64) -> Waiting {
        let tokens = vec![1; 10].into();
        let view = View { tokens, priority, sequences: 1, resumed, tenant: tenant.into(), ..View::default() };
        let mut waiting = Waiting::new(RequestId(request), view, Duration::from_secs(since));
        waiting.estimate = estimate;
        waiting
    }

    fn queue() -> Queue {
        Queue::new(1.0, None)
    }

    fn order_at(queue: &Queue, seconds: f64) -> Vec<u64> {
        queue.order(Duration::from_secs_f64(seconds), 1000).into_iter().map(|request| request.0).collect()
    }

    fn order(queue: &Queue) -> Vec<u64> {
        order_at(queue, 100.0)
    }

    #[test]
    fn order_is_resumed_then_priority_then_arrival() {
        let mut queue = queue();
        for (request, priority, resumed) in [(1, 0, false), (2, -5, false), (3, 0, false), (4, 9, true), (5, 0, true)] {
            assert_eq!(queue.push(waiting(request, "", priority, resumed, 0.0, 0), 10), Ok(()));
        }
        assert_eq!(order(&queue), [5, 4, 2, 1, 3]);
        assert_eq!(queue.remove(RequestId(2)).map(|w| w.request), Some(RequestId(2)));
        assert!(queue.remove(RequestId(2)).is_none());
        assert_eq!(queue.len(), 4);
    }

    #[test]
    fn a_full_queue_puts_out_the_last_of_who_has_most() {
        let mut queue = queue();
        assert_eq!(queue.push(waiting(1, "a", 0, false, 0.0, 0), 2), Ok(()));
        assert_eq!(queue.push(waiting(2, "a", 0, false, 0.0, 0), 2), Ok(()));
        assert_eq!(queue.push(waiting(3, "a", -9, false, 0.0, 0), 2), Err(RequestId(3)), "its own is the last");
        assert_eq!(queue.push(waiting(4, "b", 0, false, 0.0, 0), 2), Err(RequestId(2)), "the other tenant has more");
        assert_eq!(queue.push(waiting(5, "b", 0, false, 0.0, 0), 2), Err(RequestId(5)), "now both have one");
        assert_eq!(queue.push(waiting(6, "b", 0, true, 0.0, 0), 2), Ok(()), "a resumed one is never refused");
        assert_eq!(order(&queue).len(), 3);
    }

    #[test]
    fn a_flood_does_not_stand_in_the_way() {
        let mut queue = queue();
        for request in 0..50 {
            assert_eq!(queue.push(waiting(request, "flood", 0, false, 1.0, 0), 100), Ok(()));
        }
        for request in 0..3 {
            assert_eq!(order(&queue)[0], request);
            queue.remove(RequestId(request));
            queue.serve(&"flood".into(), 1, 1.0);
        }
        for request in 50..53 {
            assert_eq!(queue.push(waiting(request, "other", 0, false, 1.0, 9), 100), Ok(()));
        }
        let order = order(&queue);
        assert_eq!(order[0], 50, "a newcomer is a bound ahead: {order:?}");
        assert!(order[..8].contains(&52), "then they take turns: {order:?}");
    }

    #[test]
    fn strangers_that_come_once_do_not_put_a_regular_behind_for_ever() {
        let mut queue = queue();
        let regular: Arc<str> = "regular".into();
        queue.serve(&regular, 1, 1.0);
        for request in 0..1000 {
            assert_eq!(queue.push(waiting(request, &format!("stranger {request}"), 0, false, 0.1, 0), 9), Ok(()));
            let stranger = queue.remove(RequestId(request)).expect("it waits").view.tenant;
            queue.serve(&stranger, 1, 0.1);
        }
        (1000..1003).for_each(|n| assert_eq!(queue.push(waiting(n, "regular", 0, false, 0.1, 0), 99), Ok(())));
        (2000..2080).for_each(|n| assert_eq!(queue.push(waiting(n, "new", 0, false, 0.1, 0), 99), Ok(())));
        let first = order(&queue)[..40].iter().filter(|request| **request < 2000).count();
        assert_eq!(first, 3, "a bound is ten requests");
    }

    #[test]
    fn strangers_are_served_in_the_order_they_came() {
        let mut queue = queue();
        for request in 0..50 {
            assert_eq!(
                queue.push(waiting(request, &format!("stranger {request}"), 0, false, 0.1, request), 99),
                Ok(())
            );
        }
        assert!(order(&queue).into_iter().eq(0..50));
    }

    #[test]
    fn strangers_without_end_do_not_starve_who_was_served_much() {
        let mut queue = queue();
        let regular: Arc<str> = "regular".into();
        (0..1000).for_each(|_| queue.serve(&regular, 1, 0.1));
        queue.raise_level(None);
        for request in 0..10 {
            assert_eq!(queue.push(waiting(request, "regular", 0, false, 0.1, 0), 99), Ok(()));
        }
        let mut served = Vec::new();
        for now in 0..2000_u64 {
            // Fifty requests wait at any moment.
            for request in 50 * now..50 * now + (60 - queue.len() as u64) {
                let name = format!("stranger {request}");
                assert_eq!(queue.push(waiting(1000 + request, &name, 0, false, 0.1, now), 99), Ok(()));
            }
            let next = queue.order(Duration::from_secs(now), 1)[0];
            let tenant = queue.remove(next).expect("it waits").view.tenant;
            queue.serve(&tenant, 1, 0.1);
            served.extend((next.0 < 1000).then_some(now));
        }
        assert_eq!(served.len(), 10, "{served:?}");
        assert!(served[9] < 500, "{served:?}");
    }

    #[test]
    fn what_is_served_counts_by_weight() {
        let mut queue = queue();
        let name: [Arc<str>; 2] = ["light".into(), "heavy".into()];
        for request in 0..30 {
            let mut one = waiting(request, &name[(request % 2) as usize], 0, false, 1.0, 0);
            one.view.weight = 1 + (request % 2) as u32 * 2;
            assert_eq!(queue.push(one, 100), Ok(()));
        }
        let heavy = order(&queue)[..12].iter().filter(|request| *request % 2 == 1).count();
        assert!((8..=10).contains(&heavy), "three of four: {heavy}");
    }

    #[test]
    fn little_work_overtakes_among_equals_only() {
        let mut queue = queue();
        assert_eq!(queue.push(waiting(1, "a", 0, false, 9.0, 10), 9), Ok(()));
        assert_eq!(queue.push(waiting(2, "a", 0, false, 0.1, 11), 9), Ok(()));
        assert_eq!(queue.push(waiting(3, "a", 0, false, 0.1, 13), 9), Ok(()));
        assert_eq!(order(&queue), [2, 1, 3], "by two seconds at most");
        queue.serve(&"a".into(), 1, 5.0);
        assert_eq!(queue.push(waiting(4, "b", 0, false, 9.0, 13), 9), Ok(()));
        assert_eq!(order(&queue)[0], 4, "a tenant that was served less goes first");
    }

    #[test]
    fn who_can_still_make_it_goes_first_and_nobody_starves() {
        let slo = Slo { ttft: Duration::from_secs(1), ttft_per_1k: Duration::ZERO, ..Slo::default() };
        let mut queue = Queue::new(1e9, Some(slo));
        for (request, since) in [(1, 90), (2, 97), (3, 98), (4, 99)] {
            assert_eq!(queue.push(waiting(request, "a", 0, false, 0.1, since), 9), Ok(()));
        }
        let at = |seconds: f64| order_at(&queue, seconds);
        assert_eq!(at(98.5), [1, 3, 4, 2], "1 has starved, 3 and 4 are in time, 2 is late");
        assert_eq!(at(99.5), [1, 4, 2, 3]);
    }

    #[test]
    fn nobody_passes_who_is_late_while_kv_is_short() {
        let slo = Slo { ttft: Duration::from_secs(1), ttft_per_1k: Duration::ZERO, ..Slo::default() };
        let mut queue = Queue::new(1e9, Some(slo));
        for (request, since) in [(2, 97), (3, 98), (4, 99)] {
            assert_eq!(queue.push(waiting(request, "a", 0, false, 0.1, since), 9), Ok(()));
        }
        assert_eq!(order_at(&queue, 98.5), [3, 4, 2]);
        queue.fall_short(Duration::from_secs(98));
        assert_eq!(order_at(&queue, 98.5), [2, 3, 4]);
        assert_eq!(order_at(&queue, 129.0), [2, 3, 4], "all have starved");
        let mut one = waiting(5, "a", 0, false, 0.1, 128);
        one.found = vec![(WorkerId(0), Found { device: 80_000, ..Found::default() })];
        one.note_found();
        assert!(!std::mem::take(&mut one.has_lost));
        one.found = vec![(WorkerId(0), Found { device: 70_000, ..Found::default() })];
        one.note_found();
        assert!(!std::mem::take(&mut one.has_lost), "the end of a chain is evicted all the time");
        one.found = vec![(WorkerId(0), Found { device: 10_000, ..Found::default() })];
        one.note_found();
        assert!(std::mem::take(&mut one.has_lost));
        one.note_found();
        assert!(!one.has_lost, "it is told once");
    }

    #[test]
    fn deadlines_and_what_is_ahead() {
        let mut queue = queue();
        let mut one = waiting(1, "a", 0, false, 4.0, 0);
        one.view.deadline = Some(Duration::from_secs(5));
        assert_eq!(queue.push(one, 9), Ok(()));
        assert_eq!((queue.ahead("a", 1), queue.ahead("b", 1)), (4.0, 0.0));
        assert_eq!(queue.expired(Duration::from_secs(4)), None);
        assert_eq!(queue.expired(Duration::from_secs(5)), Some(RequestId(1)));
        queue.remove(RequestId(1));
        assert_eq!(queue.expired(Duration::from_secs(5)), None);
        assert_eq!(queue.seconds(), 0.0);
    }

    proptest! {
        /// Invariant: the order has every request once, and the sums match the waiting requests.
        #[test]
        fn the_order_is_complete(
            ops in prop::collection::vec((0..40_u64, 0..14_u8, -1..2_i32, any::<bool>(), 0.0..3.0_f64, 0..3_u8), 0..120),
            slo in any::<bool>(),
        ) {
            let mut queue = Queue::new(1.0, slo.then(Slo::default));
            let mut here = BTreeSet::new();
            for (at, (request, tenant, priority, resumed, estimate, op)) in (0..).zip(ops) {
                if op == 0 {
                    prop_assert_eq!(queue.remove(RequestId(request)).is_some(), here.remove(&request));
                    continue;
                }
                here.remove(&request);
                match queue.push(waiting(request, &tenant.to_string(), priority, resumed, estimate, at), 20) {
                    Ok(()) => { here.insert(request); }
                    Err(out) if out.0 == request => {}
                    Err(out) => { prop_assert!(here.remove(&out.0)); here.insert(request); }
                }
                queue.serve(&tenant.to_string().into(), 1, estimate);
            }
            let loads = queue.accounts.values().filter_map(Account::load);
            prop_assert_eq!(queue.most.first().map(|(load, _)| *load), loads.min(), "who has most is known");
            let order = queue.order(Duration::from_secs(60), 1000);
            if !slo {
                let first = queue.order(Duration::from_secs(60), 5);
                prop_assert_eq!(&order[..first.len()], first, "who is next does not depend on how many are asked for");
            }
            let order: BTreeSet<u64> = order.into_iter().map(|request| request.0).collect();
            prop_assert_eq!(&order, &here);
            prop_assert_eq!(queue.len(), here.len());
            here.iter().for_each(|request| drop(queue.remove(RequestId(*request))));
            prop_assert!(queue.seconds() < 1e-6 && queue.lanes.is_empty() && queue.deadlines.is_empty());
            prop_assert!(queue.most.is_empty() && queue.waiting_share < 1e-6);
        }
    }
}
