//! Number of workers: the replica planner with its bounds, its pauses, and what it has done.
//!
//! The planner's advice is carried out one worker at a time, by the steps in `seats.rs`. Local workers are processes that their
//! supervisors start and stop. Remote workers belong to somebody else: a hook asks for them, in a task of its own. A failed action is
//! followed by a pause that doubles each time.

use super::config::{Follow, PoolConfig};
use super::member::{Member, Seat};
use super::members::Members;
use super::scaler::{Action, Hook, Wish};
use super::status::ReplicaStatus;
use super::steering::Steering;
use super::{ReplicaError, ReplicaOrder};
use penstock_router::load::{Promises, Traffic, WorkerLoad};
use penstock_router::replicas::{Advice, Change, Replicas as Planner, Sight};
use penstock_router::{Slo, WorkerId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// First and longest pause after a failure; doubles each time.
const PAUSE_FIRST: Duration = Duration::from_secs(5);
const PAUSE_LAST: Duration = Duration::from_secs(300);

/// Time to listen for remote workers at the start before a missing one counts as absent.
const LISTEN: Duration = Duration::from_secs(5);

/// Planner of replicas of one pool with all that its advice depends on; see the module header.
pub(super) struct Replicas {
    /// Id of the pool, for the log and the hook.
    pool: String,
    follow: Follow,
    paused: bool,
    planner: Planner,
    hook: Option<Arc<Hook>>,
    promises: Promises,
    slo: Option<Slo>,
    /// Set once somebody else, another process or pool, decides on the number of workers.
    settled: Arc<AtomicBool>,
    /// Earliest time at which the planner may change the number of workers; `None` until the hook has reported the
    /// current number of workers.
    begins: Option<Instant>,
    /// Instant at which the hook is asked for the number of workers.
    asks_at: Instant,
    advice: Option<Advice>,
    late: Option<f64>,
    /// Reason of the start or stop in progress, in words.
    reason: String,
    pause: Duration,
    told: ReplicaStatus,
    /// The workers are started by the first request; no planner decides.
    on_demand: bool,
    /// Most workers that the config's bounds allow, for an order while nothing is carried out.
    most: usize,
}

impl Replicas {
    pub(super) fn new(config: &PoolConfig, settled: Arc<AtomicBool>, now: Instant) -> Self {
        let asked = &config.replicas;
        let begins = match &asked.hook {
            Some(hook) if hook.is_in_order() => None,
            Some(_) => Some(now + LISTEN),
            None => Some(now),
        };
        Self {
            pool: config.id.clone(),
            follow: asked.follow,
            paused: false,
            planner: Planner::new(asked.limits),
            hook: asked.hook.clone(),
            promises: Promises::default(),
            slo: config.limits.slo,
            settled,
            begins,
            asks_at: now,
            advice: None,
            late: None,
            reason: String::new(),
            pause: PAUSE_FIRST,
            told: ReplicaStatus::default(),
            on_demand: config.on_demand.is_some(),
            most: config.replicas.limits.max,
        }
    }

    /// Seats at the start: the first `at_start` local workers are on, none on demand; remote workers are off until they are found.
    pub(super) fn seat(&self, members: &mut Members, config: &PoolConfig) {
        let first = match self.follow {
            _ if self.on_demand => 0,
            Follow::On if config.local.is_some() => config.replicas.at_start,
            Follow::On => 0,
            Follow::Off | Follow::DryRun => return,
        };
        members.iter_mut().skip(first).for_each(|member| member.seat = Seat::Off);
    }

    /// Returns true once somebody else, another process or pool, decides on the number of workers.
    pub(super) fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Relaxed)
    }

    /// Counts a first token of a prompt of `tokens` tokens that came `waited` after its request.
    pub(super) fn first_token(&mut self, waited: Duration, tokens: usize) {
        self.promises.first_token(waited, self.promised(tokens));
    }

    /// Counts a request that was refused, as a first token that never came.
    pub(super) fn refused(&mut self) {
        self.promises.first_token(Duration::MAX, Duration::ZERO);
    }

    /// Promised TTFT of a prompt of `tokens` tokens, from the SLO or, without one, from the planner's limits.
    fn promised(&self, tokens: usize) -> Duration {
        let least = || Duration::from_secs_f64(self.planner.limits().ttft);
        self.slo.map_or_else(least, |slo| slo.ttft(tokens))
    }

    /// Status of the planner for the pool's snapshot; `None` without a planner.
    pub(super) fn status(&self, members: &Members) -> Option<ReplicaStatus> {
        if self.follow == Follow::Off && !self.on_demand {
            return None;
        }
        let running = members.seated();
        if self.on_demand {
            let (max, why) = (members.len(), "on demand".to_owned());
            return Some(ReplicaStatus { max, wanted: running, running, why, ..self.told.clone() });
        }
        let limits = self.planner.limits();
        let advice = self.advice.as_ref();
        Some(ReplicaStatus {
            dry_run: self.follow == Follow::DryRun,
            paused: self.paused,
            min: limits.min,
            max: limits.max,
            wanted: advice.map_or(running, |advice| advice.wanted),
            running,
            load: advice.map_or(0.0, |advice| advice.load),
            late: self.late,
            why: advice.map_or_else(String::new, |advice| advice.why.to_string()),
            ..self.told.clone()
        })
    }

    /// Runs the planner on the pool's load. Returns the change to carry out, and its worker.
    pub(super) fn plan(
        &mut self,
        loads: &[WorkerLoad],
        traffic: Traffic,
        members: &Members,
        (wall, now): (Instant, Duration),
    ) -> Option<(Change, WorkerId)> {
        if self.follow == Follow::Off {
            return None;
        }
        self.late = self.promises.look();
        if self.is_settled() || self.begins.is_none_or(|begins| wall < begins) {
            return None;
        }
        // A worker that an operator holds does not count.
        let counts = |load: &&WorkerLoad| {
            let member = &members[load.worker];
            matches!(member.seat, Seat::On | Seat::Emptying(_)) && member.steering != Steering::Held
        };
        let there: Vec<WorkerLoad> = loads.iter().filter(counts).copied().collect();
        let leaving = there.iter().map(|load| load.worker).find(|worker| members[*worker].seat != Seat::On);
        let sight = Sight { loads: &there, leaving, traffic, late: self.late };
        let is_going = |member: &Member| matches!(member.seat, Seat::Ending(_) | Seat::Going(_));
        if self.paused || members.find(is_going).is_some() {
            return None;
        }
        let advice = self.planner.look(&sight, now);
        self.advice = Some(advice);
        let change = advice.change?;
        Some((change, self.choose(change, &advice, there.len(), members)?))
    }

    /// Notes the planner's advice and finds the worker to change; `None`: there is none, or this is a dry run.
    fn choose(&mut self, change: Change, advice: &Advice, running: usize, members: &Members) -> Option<WorkerId> {
        let dry_run = self.follow == Follow::DryRun;
        let reason = advice.why.to_string();
        let chosen = match change {
            Change::Stop(worker) => Some(worker),
            Change::Start => members.find(|member| member.seat == Seat::Off),
            Change::Keep => members.find(|member| matches!(member.seat, Seat::Emptying(_))),
        };
        let name = chosen.map_or_else(|| "a worker".into(), |worker| members.name(worker));
        let what = match change {
            Change::Start => "start",
            Change::Stop(_) => "stop",
            Change::Keep => "keep",
        };
        let last = format!("{what} {name}: {reason} ({:.0} % of {running})", advice.load.min(99.0) * 100.0);
        if !dry_run || self.told.last.as_ref() != Some(&last) {
            let (load, wanted) = (advice.load, advice.wanted);
            info!(pool = %self.pool, worker = %name, what, reason, load, running, wanted, dry_run, "number of workers follows the load");
        }
        self.told.last = Some(last);
        let chosen = chosen.filter(|_| !dry_run)?;
        self.reason = reason;
        Some(chosen)
    }

    /// Notes the last change for the status, with its reason.
    pub(super) fn tell_last(&mut self, last: String, reason: &str) {
        self.told.last = Some(last);
        reason.clone_into(&mut self.reason);
    }

    /// Counts the start of a local worker.
    pub(super) fn starts_local(&mut self) {
        self.told.starts += 1;
    }

    /// Call of the hook that starts or stops a remote worker; `None`: there is no hook.
    pub(super) fn call(&self, worker: WorkerId, action: Action, members: &Members) -> Option<(Arc<Hook>, Wish)> {
        let remote = |(at, member): &(WorkerId, &Member)| *at < worker && member.process.is_none();
        let wish = Wish {
            pool: self.pool.clone(),
            action,
            worker: members.name(worker).to_string(),
            index: members.iter().filter(remote).count(),
            replicas: members.seated(),
            reason: self.reason.clone(),
        };
        Some((Arc::clone(self.hook.as_ref()?), wish))
    }

    /// Takes in the hook's report that a remote worker was started.
    pub(super) fn started(&mut self) {
        self.pause = PAUSE_FIRST;
        self.told.starts += 1;
    }

    /// Takes in that a worker has stopped as it was told.
    pub(super) fn stopped(&mut self) {
        self.told.stops += 1;
        self.pause = PAUSE_FIRST;
    }

    /// Hook to be asked for the number of workers now; `None` while that is not due.
    pub(super) fn asks(&mut self, now: Instant) -> Option<Arc<Hook>> {
        if self.begins.is_some() || self.asks_at > now {
            return None;
        }
        let hook = self.hook.clone()?;
        self.asks_at = now + hook.deadline + LISTEN;
        Some(hook)
    }

    /// Takes in the hook's answer on the number of workers: from now on the planner may change it.
    pub(super) fn counted(&mut self, now: Instant) {
        self.begins = Some(now + LISTEN);
        self.pause = PAUSE_FIRST;
    }

    /// Takes in that the hook does not know the number of workers: it is asked again after the pause.
    pub(super) fn not_counted(&mut self, now: Instant) {
        self.asks_at = now + self.pause;
    }

    /// Pause after the next failure.
    pub(super) fn pause(&self) -> Duration {
        self.pause
    }

    /// Takes in a failed action: the planner rests, and the next pause is twice as long.
    pub(super) fn failed(&mut self, name: &str, what: &'static str, why: &str, now: Duration) {
        let pause = self.pause;
        warn!(pool = %self.pool, worker = %name, what, why, pause_s = pause.as_secs(), "number of workers could not be changed");
        self.told.failures += 1;
        self.told.last_failure = Some(format!("{what} {name}: {why}"));
        self.planner.rest_until(now + pause);
        self.pause = (pause * 2).min(PAUSE_LAST);
    }

    /// Applies an operator's order to the planner of a pool with `workers` workers.
    ///
    /// # Errors
    /// [`ReplicaError`]; nothing has changed.
    pub(super) fn order(&mut self, order: ReplicaOrder, workers: usize) -> Result<(), ReplicaError> {
        if self.follow == Follow::Off {
            return Err(ReplicaError::Fixed);
        }
        let limits = self.planner.limits();
        let (min, max) = (order.min.unwrap_or(limits.min), order.max.unwrap_or(limits.max));
        let most = if self.follow == Follow::On { workers } else { self.most };
        if min < 1 || max < min || max > most {
            return Err(ReplicaError::Bounds(most));
        }
        self.planner.bound(min, max);
        self.paused = order.paused.unwrap_or(self.paused);
        let paused = self.paused;
        info!(pool = %self.pool, min, max, paused, "bounds for the number of workers changed by an operator");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::members::tests::{absent, connect};
    use super::*;
    use penstock_router::replicas::Why;

    const ONE: WorkerId = WorkerId(0);

    fn config(follow: Follow) -> PoolConfig {
        let mut config = PoolConfig::new("a");
        config.replicas.follow = follow;
        config
    }

    fn replicas(follow: Follow, now: Instant) -> Replicas {
        Replicas::new(&config(follow), Arc::default(), now)
    }

    fn advice(change: Change) -> Advice {
        Advice { wanted: 2, load: 0.5, why: Why::Idle(0.25), change: Some(change) }
    }

    #[test]
    fn pauses_double_after_failures_and_end_with_a_success() {
        let now = Instant::now();
        let mut replicas = replicas(Follow::On, now);
        for expected in [PAUSE_FIRST, 2 * PAUSE_FIRST, 4 * PAUSE_FIRST] {
            assert_eq!(replicas.pause(), expected);
            replicas.failed("a-0", "start", "no room", Duration::ZERO);
        }
        (0..10).for_each(|_| replicas.failed("a-0", "stop", "no", Duration::ZERO));
        assert_eq!(replicas.pause(), PAUSE_LAST);
        let status = replicas.status(&absent(1, now)).expect("a planner");
        assert_eq!((status.failures, status.last_failure.as_deref()), (13, Some("stop a-0: no")));
        replicas.stopped();
        assert_eq!((replicas.pause(), replicas.told.stops), (PAUSE_FIRST, 1));
    }

    #[test]
    fn a_change_finds_its_worker_unless_it_is_a_dry_run() {
        let now = Instant::now();
        let mut members = absent(3, now);
        members[WorkerId(1)].seat = Seat::Off;
        members[WorkerId(2)].seat = Seat::Emptying(now);
        let check = |follow, change, expected| {
            let mut replicas = replicas(follow, now);
            assert_eq!(replicas.choose(change, &advice(change), 2, &members), expected, "{change:?}");
            replicas.told.last
        };
        check(Follow::On, Change::Start, Some(WorkerId(1)));
        check(Follow::On, Change::Keep, Some(WorkerId(2)));
        check(Follow::On, Change::Stop(ONE), Some(ONE));
        let last = check(Follow::DryRun, Change::Stop(ONE), None).expect("advice");
        assert!(last.starts_with("stop a-0: ") && last.ends_with("(50 % of 2)"), "{last}");
    }

    #[test]
    fn an_order_keeps_to_the_workers_that_there_are() {
        let now = Instant::now();
        let bounds = |min, max| ReplicaOrder { min: Some(min), max: Some(max), paused: None };
        assert_eq!(replicas(Follow::Off, now).order(bounds(1, 1), 2), Err(ReplicaError::Fixed));
        let mut on = replicas(Follow::On, now);
        assert_eq!(on.order(bounds(1, 3), 2), Err(ReplicaError::Bounds(2)));
        assert_eq!(on.order(bounds(0, 2), 2), Err(ReplicaError::Bounds(2)));
        assert_eq!(on.order(bounds(2, 1), 2), Err(ReplicaError::Bounds(2)));
        assert_eq!(on.order(bounds(2, 2), 2), Ok(()));
        assert_eq!(on.order(ReplicaOrder { paused: Some(true), ..ReplicaOrder::default() }, 2), Ok(()));
        let status = on.status(&absent(2, now)).expect("a planner");
        assert_eq!((status.min, status.max, status.paused), (2, 2, true));
    }

    #[test]
    fn nothing_is_planned_for_workers_of_somebody_else_or_too_early() {
        let now = Instant::now();
        let mut members = absent(1, now);
        let _far = connect(&mut members, ONE, 1, now);
        let mut replicas = replicas(Follow::On, now);
        let plan = |replicas: &mut Replicas| {
            replicas.plan(&[], Traffic::default(), &members, (now, Duration::ZERO));
            replicas.advice.take().is_some()
        };
        assert!(plan(&mut replicas));
        replicas.begins = Some(now + LISTEN);
        assert!(!plan(&mut replicas), "remote workers are still listened for");
        replicas.begins = Some(now);
        replicas.paused = true;
        assert!(!plan(&mut replicas));
        replicas.paused = false;
        replicas.settled.store(true, Ordering::Relaxed);
        assert!(!plan(&mut replicas) && replicas.is_settled());
    }

    #[test]
    fn workers_are_seated_as_the_config_says() {
        let now = Instant::now();
        let seated = |config: &PoolConfig| {
            let mut members = absent(3, now);
            Replicas::new(config, Arc::default(), now).seat(&mut members, config);
            members.seated()
        };
        assert_eq!(seated(&config(Follow::Off)), 3);
        assert_eq!(seated(&config(Follow::On)), 0, "remote workers are off until they are found");
        let on_demand = PoolConfig { on_demand: Some(crate::OnDemand { keep_alive: None }), ..config(Follow::Off) };
        assert_eq!(seated(&on_demand), 0);
    }
}
