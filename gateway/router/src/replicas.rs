//! Planner of replicas: the number of workers follows the load, one worker at a time.
//!
//! The offered work is counted in engine seconds per second. A worker does not give all its time to it: every step has
//! the duration of an empty one as its base, and may not exceed the promised TPOT.
//!
//! ```text
//! n workers; D: seconds of prefill and of decoding a second, and what waits for it against the TTFT
//! load(n) = max(D / n / (1 - base / TPOT), KV fill / n, (running + waiting) / slots of n)
//! more    when load(n) > 80 %, or too many first tokens are late while it is above half of that, `hold` long
//! fewer   when load(n - 1) < 60 % and nothing waits or is late, `idle` long
//! ```
//! One change at a time: the next one is considered when the last one's worker serves and its effect is known. A worker
//! to be stopped is emptied first, and kept if it is needed after all. Pure: time is an argument.

use crate::WorkerId;
use crate::load::{Traffic, WorkerLoad};
use std::fmt;
use std::time::Duration;

/// Load above which more workers are wanted.
const HIGH: f64 = 0.8;

/// Load that fewer workers would have to stay below.
const LOW: f64 = 0.6;

/// Least share of a worker's time assumed to be left for work.
const ROOM_MIN: f64 = 0.05;

/// Weight of the last look in the smoothed queue.
const FRESH: f64 = 0.3;

/// Divisor of the rest after a start while more than one worker is missing.
const HURRY: u32 = 3;

/// Bounds of the number of workers, promises to keep, and times between changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplicaLimits {
    /// Lower bound of the number of workers, at least 1.
    pub min: usize,
    /// Upper bound of the number of workers.
    pub max: usize,
    /// TTFT in seconds that the pool promises.
    pub ttft: f64,
    /// TPOT in seconds that the pool promises.
    pub tpot: f64,
    /// Share of first tokens that may be late.
    pub late_max: f64,
    /// Time that more workers must be needed before one is started.
    pub hold: Duration,
    /// Time without changes after a worker came.
    pub rest: Duration,
    /// Time that fewer workers must be enough before one is stopped.
    pub idle: Duration,
    /// Time after which a worker that does not serve is no longer waited for.
    pub start: Duration,
    /// True if the last worker is the one to stop, rather than the one with least to finish.
    pub in_order: bool,
}

impl Default for ReplicaLimits {
    fn default() -> Self {
        Self {
            min: 1,
            max: 1,
            ttft: 1.0,
            tpot: 0.1,
            late_max: 0.1,
            hold: Duration::from_secs(3),
            rest: Duration::from_secs(10),
            idle: Duration::from_secs(120),
            start: Duration::from_secs(300),
            in_order: false,
        }
    }
}

/// State of the pool at one moment, as the planner of replicas sees it.
#[derive(Clone, Copy, Debug)]
pub struct Sight<'a> {
    /// Loads of the pool's workers: serving, starting, and the one being emptied.
    pub loads: &'a [WorkerLoad],
    /// Worker that is being emptied so that it can be stopped; `None`: no worker is.
    pub leaving: Option<WorkerId>,
    /// Load that waits in front of the workers.
    pub traffic: Traffic,
    /// Share of first tokens that came late, if enough came to tell.
    pub late: Option<f64>,
}

/// Change of the number of workers that the pool is to carry out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Start one more worker.
    Start,
    /// Move the requests of this worker elsewhere or let them finish, then stop it.
    Stop(WorkerId),
    /// Stop emptying the worker that was to be stopped, and use it again.
    Keep,
}

/// Reason of the number of workers that the planner wants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Why {
    /// The present number of workers is enough, and not too high.
    Enough,
    /// The number of workers is below [`ReplicaLimits::min`].
    Least,
    /// The number of workers is above [`ReplicaLimits::max`].
    Most,
    /// The workers' load is above the share from which more are wanted.
    Load,
    /// More first tokens than allowed were late; the field is their share.
    Late(f64),
    /// Fewer workers would be enough; the field is the load that they would have.
    Idle(f64),
    /// More workers are needed than [`ReplicaLimits::max`] allows.
    Full,
}

impl fmt::Display for Why {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| (share * 100.0).round();
        match self {
            Self::Enough => write!(out, "they are enough"),
            Self::Least => write!(out, "fewer than the least"),
            Self::Most => write!(out, "more than the most"),
            Self::Load => write!(out, "their load is above {:.0} %", percent(HIGH)),
            Self::Late(share) => write!(out, "{:.0} % of the first tokens were late", percent(*share)),
            Self::Idle(load) => write!(out, "fewer would have a load of {:.0} %", percent(*load)),
            Self::Full => write!(out, "more are needed, and there are as many as there may be"),
        }
    }
}

/// Findings of one look at the load: the wanted number of workers, and the step towards it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Advice {
    /// Number of workers that the load calls for, within the bounds.
    pub wanted: usize,
    /// Load of the workers that serve; 1 is their capacity.
    pub load: f64,
    /// Reason of the wanted number, for logs and status.
    pub why: Why,
    /// Action to take now, if any.
    pub change: Option<Change>,
}

/// Planner of the number of workers of one pool; see the module header.
#[derive(Debug, Default)]
pub struct Replicas {
    limits: ReplicaLimits,
    /// Seconds of prefill in the gateway's queue, smoothed.
    queued: f64,
    busy_since: Option<Duration>,
    idle_since: Option<Duration>,
    /// Instant since which a worker is missing: on its way, or gone.
    coming_since: Option<Duration>,
    rests_until: Duration,
}

/// Demand on the pool by work, KV memory and sequences, each in numbers of workers.
struct Demand {
    /// Work per worker: D of the module header over a worker's time for it.
    work: f64,
    fill: f64,
    /// Number of sequences, divided by the sequences that one worker can run.
    places: f64,
}

impl Demand {
    fn at(&self, workers: usize) -> f64 {
        self.work.max(self.fill).max(self.places) / workers.max(1) as f64
    }

    /// Least number of workers whose load is at most [`HIGH`].
    fn workers(&self) -> usize {
        // The demand may be any number; a cast from a float saturates.
        (self.at(1) / HIGH).ceil().max(1.0) as usize
    }
}

impl Replicas {
    /// A planner with these limits that has seen no load yet.
    pub fn new(limits: ReplicaLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Sets the bounds of the number of workers.
    pub fn bound(&mut self, min: usize, max: usize) {
        (self.limits.min, self.limits.max) = (min.max(1), max.max(min).max(1));
    }

    /// Bounds and times in force now, orders of operators included.
    pub fn limits(&self) -> &ReplicaLimits {
        &self.limits
    }

    /// Pauses changes until this time, after a failure or a change by others.
    pub fn rest_until(&mut self, until: Duration) {
        self.rests_until = self.rests_until.max(until);
    }

    /// Looks at the pool, about once a second. A change is returned once; the planner then counts on it (in a dry run,
    /// on what the next look shows).
    pub fn look(&mut self, sight: &Sight<'_>, now: Duration) -> Advice {
        let limits = self.limits;
        let staying: Vec<&WorkerLoad> = sight.loads.iter().filter(|load| Some(load.worker) != sight.leaving).collect();
        let (count, serving) = (staying.len(), staying.iter().filter(|load| load.ready).count());
        self.queued += (sight.traffic.waiting_seconds.max(0.0) - self.queued) * FRESH;
        let demand = self.demand(sight);
        let load = demand.at(serving);
        let (wanted, why) = self.wanted(&demand, (count, serving), sight.late);
        let coming = self.is_coming(serving < count, wanted > count + 1, now);
        let quiet = sight.traffic.waiting == 0 && sight.late.is_none_or(|late| late <= limits.late_max);
        let spare = demand.at(serving.saturating_sub(1));
        let idle = wanted <= count && count > limits.min && serving > 1 && quiet && spare < LOW;
        since(&mut self.busy_since, wanted > count, now);
        since(&mut self.idle_since, idle, now);
        let long =
            |began: Option<Duration>, least: Duration| began.is_some_and(|began| now.saturating_sub(began) >= least);
        let advice = |wanted: usize, why: Why, change: Option<Change>| Advice { wanted, load, why, change };
        if sight.leaving.is_some() {
            // Keeping a worker that is there is better than starting another one.
            let keep = wanted > count && count < limits.max;
            return advice(wanted, why, keep.then(|| self.done(Change::Keep, now)));
        }
        if count > limits.max {
            let change = self.least(sight).filter(|_| now >= self.rests_until);
            return advice(limits.max, Why::Most, change.map(|worker| self.done(Change::Stop(worker), now)));
        }
        if wanted > count {
            let due = count < limits.min || long(self.busy_since, limits.hold);
            let due = due && now >= self.rests_until && !coming;
            return advice(wanted, why, due.then(|| self.done(Change::Start, now)));
        }
        if idle && long(self.idle_since, limits.idle) && now >= self.rests_until && !coming {
            let change = self.least(sight).map(|worker| self.done(Change::Stop(worker), now));
            return advice(count - 1, Why::Idle(spare), change);
        }
        advice(wanted, why, None)
    }

    /// Number of workers needed, and the reason. `count`: present workers; `serving`: those that serve.
    fn wanted(&self, demand: &Demand, (count, serving): (usize, usize), late: Option<f64>) -> (usize, Why) {
        let limits = &self.limits;
        if count < limits.min {
            return (limits.min, Why::Least);
        }
        // Nothing is known of workers that start; the need that started them counts as met.
        let needed = if serving == 0 { count } else { demand.workers() };
        let late = late.filter(|late| *late > limits.late_max && demand.at(serving) > HIGH / 2.0);
        let (needed, why) = match late {
            _ if needed > count => (needed, Why::Load),
            Some(late) if serving == count => (count + 1, Why::Late(late)),
            _ => (count, Why::Enough),
        };
        match needed > limits.max {
            true if count >= limits.max => (count, Why::Full),
            true => (limits.max, why),
            false => (needed, why),
        }
    }

    /// Returns true if a worker is being waited for. After its arrival the figures are still those of fewer workers, so a rest
    /// follows, a short one while the pool is `far` from enough.
    fn is_coming(&mut self, missing: bool, far: bool, now: Duration) -> bool {
        if self.coming_since.is_some() && !missing {
            self.rests_until = self.rests_until.max(now + self.limits.rest / if far { HURRY } else { 1 });
            (self.busy_since, self.idle_since) = (None, None);
        }
        since(&mut self.coming_since, missing, now);
        self.coming_since.is_some_and(|began| now.saturating_sub(began) < self.limits.start)
    }

    fn done(&mut self, change: Change, now: Duration) -> Change {
        let short = matches!(change, Change::Keep | Change::Start);
        self.rests_until = now + self.limits.rest / if short { HURRY } else { 1 };
        (self.busy_since, self.idle_since, self.coming_since) = (None, None, None);
        change
    }

    /// Worker to stop first: one that does not serve, else the one with least to finish.
    fn least(&self, sight: &Sight<'_>) -> Option<WorkerId> {
        if self.limits.in_order {
            return sight.loads.iter().map(|load| load.worker).max();
        }
        let weight = |load: &WorkerLoad| match load.ready {
            false => -1.0,
            true => load.queue_seconds + f64::from(load.running) * load.step_seconds.max(1e-6),
        };
        // Of equals the last one: pools shrink from their end.
        let loads = sight.loads.iter().rev();
        loads.min_by(|a, b| weight(a).total_cmp(&weight(b))).map(|load| load.worker)
    }

    fn demand(&self, sight: &Sight<'_>) -> Demand {
        let ready = || sight.loads.iter().filter(|load| load.ready || Some(load.worker) == sight.leaving);
        let count = ready().count().max(1) as f64;
        let sum = |of: fn(&WorkerLoad) -> f64| ready().map(of).sum::<f64>();
        let base = sum(|load| load.base_seconds) / count;
        let decodes = ready().any(|load| load.running > 0);
        let tpot = self.limits.tpot;
        // More workers do not make empty steps shorter.
        let room = if decodes && base < tpot { (1.0 - base / tpot).max(ROOM_MIN) } else { 1.0 };
        let waits = (sum(|load| load.queue_seconds.max(0.0)) + self.queued) / self.limits.ttft.max(1e-3);
        let work = sum(|load| load.prefill_busy.clamp(0.0, 1.0) + load.decode_busy.clamp(0.0, 1.0));
        let slots = sum(|load| f64::from(load.sequences_max.max(1))) / count;
        let sequences = sum(|load| f64::from(load.running)) + sight.traffic.waiting as f64;
        Demand {
            work: (work + waits) / room,
            fill: sum(|load| load.fill.clamp(0.0, 1.0)),
            places: sequences / slots.max(1.0),
        }
    }
}

/// Sets the start of a condition when it begins, and clears it when it ends.
fn since(began: &mut Option<Duration>, is_so: bool, now: Duration) {
    *began = if is_so { began.or(Some(now)) } else { None };
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_proto::frames::Role;
    use proptest::prelude::*;

    fn limits(min: usize, max: usize) -> ReplicaLimits {
        ReplicaLimits { min, max, idle: Duration::from_secs(30), ..ReplicaLimits::default() }
    }

    fn worker(at: usize, ready: bool) -> WorkerLoad {
        WorkerLoad {
            worker: WorkerId(at as u8),
            role: Role::Mixed,
            ready,
            prefill_busy: 0.0,
            decode_busy: 0.0,
            queue_seconds: 0.0,
            step_seconds: 0.02,
            base_seconds: 0.02,
            fill: 0.0,
            running: 1,
            sequences_max: 32,
        }
    }

    /// A pool that follows the planner: a worker takes `start` seconds to start, and three to be emptied.
    struct World {
        planner: Replicas,
        /// Second from which on each worker serves; `None`: not there.
        serves: Vec<Option<u64>>,
        leaving: Option<(usize, u64)>,
        start: u64,
    }

    impl World {
        fn new(limits: ReplicaLimits, count: usize, start: u64) -> Self {
            let serves = (0..16).map(|at| (at < count).then_some(0)).collect();
            Self { planner: Replicas::new(limits), serves, leaving: None, start }
        }

        fn count(&self) -> usize {
            self.serves.iter().flatten().count()
        }

        /// One second with this much work, in workers.
        fn second(&mut self, now: u64, work: f64, late: Option<f64>) -> Advice {
            if let Some((at, _)) = self.leaving.filter(|(_, until)| now >= *until) {
                (self.serves[at], self.leaving) = (None, None);
            }
            let there = self.serves.iter().enumerate().filter_map(|(at, serves)| Some((at, (*serves)?)));
            let there: Vec<(usize, bool)> = there.map(|(at, serves)| (at, serves <= now)).collect();
            let serving = there.iter().filter(|(_, ready)| *ready).count().max(1) as f64;
            let share = work / serving;
            let load = |(at, ready): &(usize, bool)| WorkerLoad {
                prefill_busy: if *ready { share.min(1.0) } else { 0.0 },
                queue_seconds: if *ready { (share - 1.0).max(0.0) } else { 0.0 },
                ..worker(*at, *ready)
            };
            let loads: Vec<WorkerLoad> = there.iter().map(load).collect();
            let leaving = self.leaving.map(|(at, _)| WorkerId(at as u8));
            let sight = Sight { loads: &loads, leaving, traffic: Traffic::default(), late };
            let advice = self.planner.look(&sight, Duration::from_secs(now));
            match advice.change {
                None => {}
                Some(Change::Keep) => self.leaving = None,
                Some(Change::Stop(worker)) => self.leaving = Some((usize::from(worker.0), now + 3)),
                Some(Change::Start) => {
                    let free = self.serves.iter().position(Option::is_none).expect("a free place");
                    self.serves[free] = Some(now + self.start);
                }
            }
            advice
        }

        fn run(&mut self, from: u64, seconds: u64, work: f64) -> Vec<(u64, Change)> {
            (from..from + seconds).filter_map(|now| Some((now, self.second(now, work, None).change?))).collect()
        }
    }

    #[test]
    fn workers_come_with_the_load_one_by_one_and_go_slowly() {
        let mut world = World::new(limits(1, 8), 1, 5);
        assert_eq!(world.run(0, 100, 0.5), []);
        let starts = world.run(100, 100, 2.6);
        assert!(starts.iter().all(|(_, change)| *change == Change::Start), "{starts:?}");
        assert_eq!((world.count(), starts[0].0), (5, 103), "2.6 / (1 - 20 ms / 100 ms) / 0.8: {starts:?}");
        assert!(starts.windows(2).all(|two| two[1].0 - two[0].0 >= 5 + 3), "one at a time: {starts:?}");
        let stops = world.run(200, 400, 0.2);
        assert_eq!((world.count(), stops.len()), (1, 4), "{stops:?}");
        assert!(stops.windows(2).all(|two| two[1].0 - two[0].0 >= 30), "slowly: {stops:?}");
    }

    #[test]
    fn a_burst_starts_nobody_and_noise_keeps_the_number() {
        let mut world = World::new(limits(1, 8), 2, 5);
        let busy = |now: u64| if now % 10 < 2 { 2.0 } else { 1.0 };
        let changes: Vec<_> = (0..600).filter_map(|now| world.second(now, busy(now), None).change).collect();
        assert_eq!(changes, []);
    }

    #[test]
    fn what_is_late_needs_more_unless_nobody_works() {
        let mut world = World::new(limits(1, 4), 1, 5);
        let idle = (0..60).filter_map(|now| world.second(now, 0.1, Some(1.0)).change).count();
        assert_eq!((idle, world.count()), (0, 1), "prompts that are too long for one are too long for two");
        let advice = (60..64).map(|now| world.second(now, 0.45, Some(0.5))).last().expect("a look");
        assert_eq!((advice.wanted, advice.why, advice.change), (2, Why::Late(0.5), Some(Change::Start)));
    }

    #[test]
    fn the_one_that_is_being_emptied_is_taken_back() {
        let mut world = World::new(limits(1, 4), 2, 5);
        let stop = world.run(0, 40, 0.2);
        assert!(matches!(stop[..], [(at, Change::Stop(WorkerId(1)))] if at >= 30), "{stop:?}");
        let mut world = World::new(limits(1, 4), 2, 5);
        let (at, _) = (0..40).find_map(|now| Some((now, world.second(now, 0.2, None).change?))).expect("a stop");
        let advice = world.second(at + 1, 1.5, None);
        assert_eq!((advice.change, world.count()), (Some(Change::Keep), 2));
    }

    #[test]
    fn the_least_is_there_at_once_and_the_most_is_kept() {
        let mut world = World::new(limits(3, 4), 1, 5);
        assert_eq!(world.second(0, 0.0, None).why, Why::Least);
        world.run(1, 60, 0.0);
        assert_eq!(world.count(), 3);
        let advice = (61..200).map(|now| world.second(now, 50.0, None)).last().expect("a look");
        assert_eq!((world.count(), advice.wanted, advice.why), (4, 4, Why::Full));
        world.planner.bound(1, 2);
        world.run(200, 60, 50.0);
        assert_eq!(world.count(), 2, "an operator's word counts at once");
        world.planner.bound(1, 4);
        world.planner.rest_until(Duration::from_secs(400));
        assert_eq!(world.run(300, 99, 50.0), [], "what failed is not tried at once");
        assert_ne!(world.run(400, 20, 50.0), []);
    }

    #[test]
    fn who_does_not_come_is_not_waited_for_for_ever() {
        let mut world = World::new(ReplicaLimits { start: Duration::from_secs(60), ..limits(1, 8) }, 1, 100_000);
        let starts = world.run(0, 200, 3.0);
        assert!((2..=4).contains(&starts.len()), "{starts:?}");
        assert_eq!(
            Replicas::new(limits(1, 2))
                .look(&Sight { loads: &[], leaving: None, traffic: Traffic::default(), late: None }, Duration::ZERO)
                .change,
            Some(Change::Start),
            "a pool without workers gets its least"
        );
    }

    #[test]
    fn in_order_the_last_one_goes() {
        let mut world = World::new(ReplicaLimits { in_order: true, ..limits(1, 4) }, 3, 5);
        let stops: Vec<_> = world.run(0, 200, 0.1).into_iter().map(|(_, change)| change).collect();
        assert_eq!(stops, [Change::Stop(WorkerId(2)), Change::Stop(WorkerId(1))]);
    }

    proptest! {
        #[test]
        fn the_number_stays_in_bounds_and_enough_stay(
            works in prop::collection::vec((0.0..8.0_f64, 1..40_u64), 20), min in 1..4_usize, more in 0..6_usize, start in 1..60_u64
        ) {
            let max = min + more;
            let mut world = World::new(limits(min, max), min, start);
            let (mut now, mut last) = (0, None::<(u64, Change)>);
            for (work, seconds) in works {
                for _ in 0..seconds {
                    now += 1;
                    let serving = world.serves.iter().flatten().filter(|serves| **serves <= now).count();
                    let leaving = world.leaving.is_some();
                    let advice = world.second(now, work, None);
                    prop_assert!((min..=max).contains(&world.count()), "{} of {min}..{max}", world.count());
                    prop_assert!((min..=max).contains(&advice.wanted));
                    match advice.change {
                        Some(Change::Stop(_)) => {
                            prop_assert!(serving > 1 && work < LOW * (serving - 1) as f64, "{work} on {serving}");
                            prop_assert!(!leaving);
                        }
                        Some(Change::Keep) => prop_assert!(leaving),
                        Some(Change::Start) => prop_assert!(!leaving && serving == world.count() - 1, "one at a time"),
                        None => {}
                    }
                    if let Some(change) = advice.change {
                        prop_assert!(change == Change::Keep || last.is_none_or(|(at, _)| now - at >= 3), "{last:?} {now}");
                        last = Some((now, change));
                    }
                }
            }
        }
    }
}
