//! Load balancing over the targets of a model: pure choices over a view of each target.
//!
//! Weights are spread by smooth weighted round-robin, without random draws: a canary of 5 % gets exactly one of twenty
//! requests, and never two in a row.

use std::time::{Duration, Instant};

/// Load balancing policy of a model: the rule that chooses among its healthy targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Smooth weighted round-robin: exact shares, never bunched.
    Weighted,
    /// The first target in the config's order that is healthy.
    Order,
    /// The target with the fewest requests in flight per weight.
    LeastBusy,
    /// The target with the lowest TTFT times requests in flight.
    Latency,
    /// The target where this request is estimated to cost least.
    Cost,
    /// The fewest prompt tokens to compute: the request's uncached part and the prefill already queued there.
    CacheAware,
}

/// Snapshot of a target at the moment of a choice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    /// Index of the target among the model's targets.
    pub(crate) index: usize,
    /// Weight of the target against the others; its share of the requests.
    pub(crate) weight: u32,
    /// Requests in flight at the target.
    pub(crate) in_flight: usize,
    /// Moving average of the target's TTFT in seconds; 0: unknown.
    pub(crate) seconds: f64,
    /// Estimated price of this request at the target, in dollars.
    pub(crate) usd: f64,
    /// Prompt tokens of other requests at the target that are probably not computed yet.
    pub(crate) pending_tokens: u64,
    /// Prompt tokens of this request that the target would have to compute.
    pub(crate) own_tokens: u64,
    /// Hash of the target's id, for rendezvous hashing.
    pub(crate) hash: u64,
}

/// Chooses a target by the policy, or by `sticky` alone (the hash of a key that stays at one target), weighted either way.
pub(crate) fn choose(policy: Policy, sticky: Option<u64>, views: &[View], smooth: &mut Smooth) -> Option<usize> {
    if let Some(key) = sticky {
        return least(views, |view| rendezvous(key, view));
    }
    match policy {
        Policy::Order => views.first().map(|view| view.index),
        Policy::Weighted => smooth.next(views),
        Policy::LeastBusy => even(views, smooth, |view| (view.in_flight + 1) as f64 / f64::from(view.weight)),
        Policy::Latency => even(views, smooth, |view| view.seconds * (view.in_flight + 1) as f64),
        Policy::Cost => even(views, smooth, |view| view.usd),
        Policy::CacheAware => even(views, smooth, work),
    }
}

/// Weight of a prompt's uncached tokens as delay to the requests after it.
const OWN: f64 = 1.0;
/// Weight of a prompt's uncached tokens as delay to each answer in decode at the target.
const HARM: f64 = 0.2;
/// Cost of one answer in decode at the target, in prompt tokens.
const ANSWER_TOKENS: f64 = 64.0;

/// Cost of a request at a target, in prompt tokens: the router's cost (`penstock_router::cost`) for servers of unknown
/// speed. Terms: the prefill queued there, the request's own uncached part for itself and for others, and the answers
/// in decode there. The constants come from the simulator over traces of chats and agents (docs/benchmarks.md): others'
/// long prefills are what delays answers at a server that admits every request at once.
fn work(view: &View) -> f64 {
    let (own, busy) = (view.own_tokens as f64, view.in_flight as f64);
    let tokens = view.pending_tokens as f64 + own * (1.0 + OWN) + HARM * own * busy + ANSWER_TOKENS * busy;
    tokens / f64::from(view.weight)
}

/// The target of least cost; equal ones share by weight.
fn even(views: &[View], smooth: &mut Smooth, cost: impl Fn(&View) -> f64) -> Option<usize> {
    let best = views.iter().map(&cost).min_by(f64::total_cmp)?;
    let equal: Vec<View> = views.iter().filter(|view| cost(view) <= best).copied().collect();
    match equal.as_slice() {
        [one] => Some(one.index),
        _ => smooth.next(&equal),
    }
}

fn least(views: &[View], cost: impl Fn(&View) -> f64) -> Option<usize> {
    views.iter().min_by(|left, right| cost(left).total_cmp(&cost(right))).map(|view| view.index)
}

/// Weighted rendezvous hashing: the least score wins, and a target that leaves moves only its own keys.
fn rendezvous(key: u64, view: &View) -> f64 {
    let unit = ((penstock_base::hash::mix(key ^ view.hash) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
    -unit.ln() / f64::from(view.weight)
}

/// Smooth weighted round-robin as in nginx: each target earns its weight, the richest is chosen and pays the total.
#[derive(Clone, Debug)]
pub(crate) struct Smooth {
    credit: Vec<i64>,
}

impl Smooth {
    /// Round-robin state for `targets` targets, none favoured.
    pub(crate) fn new(targets: usize) -> Self {
        Self { credit: vec![0; targets] }
    }

    fn next(&mut self, views: &[View]) -> Option<usize> {
        let mut total = 0;
        for view in views {
            self.credit[view.index] += i64::from(view.weight);
            total += i64::from(view.weight);
        }
        // Of equal credits the first in the config's order.
        let best = views.iter().rev().max_by_key(|view| self.credit[view.index])?;
        self.credit[best.index] -= total;
        Some(best.index)
    }
}

/// Peak-sensitive moving average of a latency: rises at once and decays over [`Latency::MEMORY`]. Without new
/// measurements it fades to zero, so that a target that was slow is tried again.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Latency {
    seconds: f64,
    at: Option<Instant>,
}

impl Latency {
    const MEMORY: Duration = Duration::from_secs(30);

    /// Adds one measured latency in seconds, taken at `now`.
    pub(crate) fn add(&mut self, seconds: f64, now: Instant) {
        let keep = self.at.map_or(0.0, |at| decay(at, now));
        self.seconds = seconds.max(self.seconds * keep + seconds * (1.0 - keep));
        self.at = Some(now);
    }

    /// Expected latency at `now` in seconds, by the moving average; 0: unknown.
    pub(crate) fn expected(&self, now: Instant) -> f64 {
        self.at.map_or(0.0, |at| self.seconds * decay(at, now))
    }
}

fn decay(from: Instant, now: Instant) -> f64 {
    (-now.saturating_duration_since(from).as_secs_f64() / Latency::MEMORY.as_secs_f64()).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn views(weights: &[u32]) -> Vec<View> {
        let view = |(index, weight): (usize, &u32)| View {
            index,
            weight: *weight,
            in_flight: 0,
            seconds: 0.0,
            usd: 0.0,
            pending_tokens: 0,
            own_tokens: 0,
            hash: penstock_base::hash::stable(&[index as u8]),
        };
        weights.iter().enumerate().map(view).collect()
    }

    fn counts(times: usize, targets: usize, mut pick: impl FnMut(usize) -> Option<usize>) -> Vec<usize> {
        let mut out = vec![0; targets];
        (0..times).for_each(|at| out[pick(at).expect("a target")] += 1);
        out
    }

    #[test]
    fn weights_are_exact_and_smooth() {
        let (views, mut smooth) = (views(&[9, 1]), Smooth::new(2));
        for _ in 0..10 {
            let round = counts(10, 2, |_| choose(Policy::Weighted, None, &views, &mut smooth));
            assert_eq!(round, [9, 1]);
        }
    }

    #[test]
    fn each_policy_minimizes_its_own() {
        let mut views = views(&[1, 1, 2]);
        let (busy, seconds, usd) = ([3, 1, 4], [0.2, 0.5, 0.1], [0.3, 0.2, 0.9]);
        for (at, view) in views.iter_mut().enumerate() {
            (view.in_flight, view.seconds, view.usd) = (busy[at], seconds[at], usd[at]);
        }
        for (policy, best) in [(Policy::Order, 0), (Policy::LeastBusy, 1), (Policy::Latency, 2), (Policy::Cost, 1)] {
            assert_eq!(choose(policy, None, &views, &mut Smooth::new(3)), Some(best), "{policy:?}");
        }
        assert_eq!(choose(Policy::Weighted, None, &[], &mut Smooth::new(0)), None);
    }

    #[test]
    fn a_cached_prompt_goes_where_it_is_until_that_is_too_busy() {
        let mut views = views(&[1, 1]);
        let choose = |views: &[View]| choose(Policy::CacheAware, None, views, &mut Smooth::new(2));
        (views[0].own_tokens, views[1].own_tokens) = (8000, 500);
        assert_eq!(choose(&views), Some(1));
        views[1].in_flight = 8;
        assert_eq!(choose(&views), Some(1), "answers that are being made weigh less than a long prompt");
        views[1].pending_tokens = 30_000;
        assert_eq!(choose(&views), Some(0), "what is ahead of it weighs more");
    }

    #[test]
    fn a_key_stays_and_moves_only_when_its_target_leaves() {
        let views = views(&[3, 1, 1]);
        let at = |key: usize, views: &[View]| {
            choose(Policy::Weighted, Some(penstock_base::hash::stable(&key.to_le_bytes())), views, &mut Smooth::new(3))
                .expect("a target")
        };
        let spread = counts(5000, 3, |key| Some(at(key, &views)));
        assert!((2800..3200).contains(&spread[0]) && (850..1150).contains(&spread[1]), "{spread:?}");
        let fewer = [views[0], views[2]];
        for key in 0..1000 {
            let before = at(key, &views);
            assert!(before == 1 || at(key, &fewer) == before, "{key} moved");
        }
    }

    #[test]
    fn latency_rises_at_once_falls_slowly_and_is_forgotten() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut latency = Latency::default();
        assert!(latency.expected(start) <= 0.0);
        latency.add(0.1, start);
        latency.add(2.0, start);
        assert!((latency.expected(start) - 2.0).abs() < 1e-9, "a peak counts at once");
        latency.add(0.1, start + second);
        let after = latency.expected(start + second);
        assert!((1.5..2.0).contains(&after), "{after}");
        assert!(latency.expected(start + 300 * second) < 0.01, "it gets another try");
    }
}
