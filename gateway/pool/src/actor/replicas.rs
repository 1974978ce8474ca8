//! Number of workers: carries out the replica planner's advice, one worker at a time.
//!
//! ```text
//! Off ──start──▶ On ──stop──▶ Emptying ──nothing is left there──▶ Ending ──agreed──▶ Going ──gone──▶ Off
//!                 ▲              │ needed after all                 │ refused           │ it stays
//!                 └──────────────┴──────────────────────────────────┴───────────────────┘
//! ```
//! Local workers are processes that their supervisors start and stop. Remote workers belong to somebody else: a hook
//! asks for them, in a task of its own. A failed action is followed by a pause that doubles each time. A worker that
//! appears without having been asked for counts as wanted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use penstock_proto::frames::{DownBody, Drain};
use penstock_router::load::{Promises, Seen, Traffic, WorkerLoad};
use penstock_router::replicas::{Advice, Change, Replicas as Planner, Sight};
use penstock_router::{Slo, WorkerId};
use tracing::{info, warn};

use super::super::config::{Follow, PoolConfig};
use super::super::member::{Member, Seat};
use super::super::members::Members;
use super::super::scaler::{Action, Hook, Wish};
use super::super::session::Event;
use super::super::status::ReplicaStatus;
use super::super::steering::Steering;
use super::super::supervisor::Order;
use super::super::{ReplicaError, ReplicaOrder};
use super::{Actor, DRAIN_NOTICE};

/// Time for the requests at a leaving worker to move or finish; after that the worker is stopped all the same.
const EMPTY_MAX: Duration = Duration::from_secs(600);

/// Time for a stopped remote worker to disappear; after that the stop counts as failed.
const GONE_MAX: Duration = Duration::from_secs(120);

/// First and longest pause after a failure; doubles each time.
const PAUSE_FIRST: Duration = Duration::from_secs(5);
const PAUSE_LAST: Duration = Duration::from_secs(300);

/// Time to listen for remote workers at the start before a missing one counts as absent.
const LISTEN: Duration = Duration::from_secs(5);

/// State of the planner of replicas in the pool's actor; see the module header.
pub(super) struct Replicas {
    follow: Follow,
    paused: bool,
    planner: Planner,
    hook: Option<Arc<Hook>>,
    pub(super) promises: Promises,
    slo: Option<Slo>,
    /// Set once somebody else, another process or pool, decides on the number of workers.
    pub(super) settled: Arc<AtomicBool>,
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

    /// Promised TTFT of a prompt of `tokens` tokens, from the SLO or, without one, from the planner's limits.
    pub(super) fn promised(&self, tokens: usize) -> Duration {
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
}

impl Actor {
    /// Runs the planners on the pool's load, about once a second.
    pub(super) fn planners_tick(&mut self, wall: Instant) {
        let now = self.began.elapsed();
        if !self.watch.is_due(now) {
            return;
        }
        let members = self.members.iter();
        let seen: Vec<Seen<'_>> = members
            .map(|(worker, member)| Seen {
                worker,
                state: &member.state,
                ready: member.takes_requests(),
                sequences_max: member.ready.as_ref().map_or(1, |ready| ready.sequences_max),
                base_seconds: self.router.fit(worker).map_or(0.0, |fit| fit.step_seconds(0.0, 0.0)),
            })
            .collect();
        let loads = self.watch.look(&seen, now);
        let traffic = self.router.traffic();
        self.plan_roles(&loads, &traffic, now);
        self.plan_replicas(&loads, traffic, wall);
    }

    fn plan_replicas(&mut self, loads: &[WorkerLoad], traffic: Traffic, wall: Instant) {
        if self.replicas.follow == Follow::Off || self.ending.is_some() {
            return;
        }
        self.replicas.late = self.replicas.promises.look();
        let settled = self.replicas.settled.load(Ordering::Relaxed);
        if settled || self.replicas.begins.is_none_or(|begins| wall < begins) {
            return;
        }
        // A worker that an operator holds does not count.
        let counts = |load: &&WorkerLoad| {
            let member = &self.members[load.worker];
            matches!(member.seat, Seat::On | Seat::Emptying(_)) && member.steering != Steering::Held
        };
        let there: Vec<WorkerLoad> = loads.iter().filter(counts).copied().collect();
        let leaving = there.iter().map(|load| load.worker).find(|worker| self.seat_of(*worker) != Seat::On);
        let sight = Sight { loads: &there, leaving, traffic, late: self.replicas.late };
        let is_going = |member: &Member| matches!(member.seat, Seat::Ending(_) | Seat::Going(_));
        if self.replicas.paused || self.members.find(is_going).is_some() {
            return;
        }
        let advice = self.replicas.planner.look(&sight, self.began.elapsed());
        self.replicas.advice = Some(advice);
        if let Some(change) = advice.change {
            self.carry_out(change, &advice, there.len());
        }
    }

    fn seat_of(&self, worker: WorkerId) -> Seat {
        self.members[worker].seat
    }

    fn carry_out(&mut self, change: Change, advice: &Advice, running: usize) {
        let dry_run = self.replicas.follow == Follow::DryRun;
        let reason = advice.why.to_string();
        let chosen = match change {
            Change::Stop(worker) => Some(worker),
            Change::Start => self.members.find(|member| member.seat == Seat::Off),
            Change::Keep => self.members.find(|member| matches!(member.seat, Seat::Emptying(_))),
        };
        let name = chosen.map_or_else(|| "a worker".into(), |worker| self.members.name(worker));
        let what = match change {
            Change::Start => "start",
            Change::Stop(_) => "stop",
            Change::Keep => "keep",
        };
        let last = format!("{what} {name}: {reason} ({:.0} % of {running})", advice.load.min(99.0) * 100.0);
        if !dry_run || self.replicas.told.last.as_ref() != Some(&last) {
            let (load, wanted) = (advice.load, advice.wanted);
            info!(pool = %self.config.id, worker = %name, what, reason, load, running, wanted, dry_run, "number of workers follows the load");
        }
        self.replicas.told.last = Some(last);
        let Some(worker) = chosen.filter(|_| !dry_run) else { return };
        self.replicas.reason = reason;
        match change {
            Change::Start => self.start_worker(worker),
            Change::Stop(_) => self.empty(worker),
            Change::Keep => self.take_back(worker),
        }
    }

    pub(super) fn start_worker(&mut self, worker: WorkerId) {
        self.members[worker].seat = Seat::On;
        self.members[worker].steering = Steering::Free;
        if self.members[worker].process.is_some() {
            self.replicas.told.starts += 1;
            self.order(worker, Order::Start);
        } else {
            self.ask(worker, Action::Start);
        }
    }

    /// Begins to stop a worker: what is bound to it moves or ends first.
    pub(super) fn empty(&mut self, worker: WorkerId) {
        self.members[worker].seat = Seat::Emptying(Instant::now());
        self.hold(worker, Steering::Leaving);
    }

    /// Notes the last change for the status, with its reason.
    pub(super) fn tell_last(&mut self, last: String, reason: &str) {
        self.replicas.told.last = Some(last);
        reason.clone_into(&mut self.replicas.reason);
    }

    /// Keeps a worker that was to be stopped.
    pub(super) fn take_back(&mut self, worker: WorkerId) {
        self.members[worker].seat = Seat::On;
        self.release(worker);
    }

    /// Asks the operator's hook to start or stop a worker, in a task of its own.
    fn ask(&mut self, worker: WorkerId, action: Action) {
        let Some(hook) = self.replicas.hook.clone() else { return };
        let index =
            self.members.iter().take(usize::from(worker.0)).filter(|(_, member)| member.process.is_none()).count();
        let replicas = self.members.seated();
        let wish = Wish {
            pool: self.config.id.clone(),
            action,
            worker: self.members[worker].name.to_string(),
            index,
            replicas,
            reason: self.replicas.reason.clone(),
        };
        let events = self.sender.clone();
        tokio::spawn(async move {
            let outcome = hook.call(&wish).await;
            // Err: the pool has ended, and with it the interest in the outcome.
            let _ = events.send(Event::Asked { worker, action, outcome }).await;
        });
    }

    /// Takes in the outcome of a hook's call.
    pub(super) fn asked(&mut self, worker: WorkerId, action: Action, outcome: Result<(), String>, now: Instant) {
        match (action, outcome) {
            (Action::Start, Ok(())) => {
                self.replicas.pause = PAUSE_FIRST;
                self.replicas.told.starts += 1;
            }
            (Action::Stop, Ok(())) => {
                self.members[worker].seat = Seat::Going(now);
            }
            (Action::Start, Err(why)) => {
                // The worker may have come despite the error.
                if self.members[worker].link.is_none() {
                    self.members[worker].seat = Seat::Off;
                }
                self.failed(worker, "start", &why, now);
            }
            (Action::Stop, Err(why)) => {
                self.take_back(worker);
                self.failed(worker, "stop", &why, now);
            }
        }
    }

    /// Takes in the hook's answer on the number of workers: the first `count` are on.
    pub(super) fn counted(&mut self, outcome: Result<Option<usize>, String>, now: Instant) {
        match outcome {
            Ok(count) => {
                self.replicas.begins = Some(now + LISTEN);
                self.replicas.pause = PAUSE_FIRST;
                self.members.iter_mut().take(count.unwrap_or(0)).for_each(|member| member.seat = Seat::On);
            }
            Err(why) => {
                self.replicas.asks_at = now + self.replicas.pause;
                self.failed(WorkerId(0), "count", &why, now);
            }
        }
    }

    fn failed(&mut self, worker: WorkerId, what: &'static str, why: &str, now: Instant) {
        let pause = self.replicas.pause;
        let name = self.members[worker].name.clone();
        warn!(pool = %self.config.id, worker = %name, what, why, pause_s = pause.as_secs(), "number of workers could not be changed");
        self.replicas.told.failures += 1;
        self.replicas.told.last_failure = Some(format!("{what} {name}: {why}"));
        self.replicas.planner.rest_until(self.began.elapsed() + pause);
        self.replicas.pause = (pause * 2).min(PAUSE_LAST);
        self.publish(now);
    }

    /// Marks a worker as wanted because it is there, whoever started it.
    pub(super) fn seat_ready(&mut self, worker: WorkerId) {
        let member = &mut self.members[worker];
        if member.seat == Seat::Off {
            (member.seat, member.steering) = (Seat::On, Steering::Free);
        }
    }

    /// Takes in the expected end of a worker.
    pub(super) fn seat_off(&mut self, worker: WorkerId) {
        let member = &mut self.members[worker];
        if matches!(member.seat, Seat::Going(_)) {
            (member.seat, member.steering) = (Seat::Off, Steering::Free);
            self.replicas.told.stops += 1;
            self.replicas.pause = PAUSE_FIRST;
        }
    }

    /// Advances the workers that are leaving, and asks the hook for the number of workers when that is due.
    pub(super) fn seats_tick(&mut self, now: Instant) {
        if self.replicas.begins.is_none() && self.replicas.asks_at <= now {
            self.count_workers(now);
        }
        for worker in self.members.ids() {
            let settled = self.replicas.settled.load(Ordering::Relaxed);
            let member = &self.members[worker];
            let is_empty = member.link.is_none() || member.bound.is_empty();
            match member.seat {
                // The new owner of the number has use for the worker, as far as is known here.
                Seat::Emptying(_) if settled => self.take_back(worker),
                Seat::Emptying(since) if is_empty || now > since + EMPTY_MAX => self.end_worker(worker, now),
                Seat::Ending(since) if member.process.is_some() => self.ending_tick(worker, since, now),
                Seat::Going(since) if member.process.is_none() => self.going_tick(worker, since, now),
                _ => {}
            }
        }
    }

    fn count_workers(&mut self, now: Instant) {
        let Some(hook) = self.replicas.hook.clone() else { return };
        self.replicas.asks_at = now + hook.deadline + LISTEN;
        let events = self.sender.clone();
        tokio::spawn(async move {
            let _ = events.send(Event::Counted(hook.count().await)).await;
        });
    }

    /// Stops a worker that has no requests left.
    fn end_worker(&mut self, worker: WorkerId, now: Instant) {
        self.members[worker].seat = Seat::Ending(now);
        if self.members[worker].process.is_none() {
            self.ask(worker, Action::Stop);
        } else {
            self.members.send(worker, DownBody::Drain(Drain { exit: true }));
        }
    }

    /// Checks that a local worker drains as told; a worker that another gateway holds does not, and stays.
    fn ending_tick(&mut self, worker: WorkerId, since: Instant, now: Instant) {
        let member = &mut self.members[worker];
        if member.link.is_none() || member.state.draining {
            member.seat = Seat::Going(now);
            self.order(worker, Order::Stop);
        } else if now > since + DRAIN_NOTICE {
            self.stays(worker, "the worker did not begin to drain, as when another gateway uses it", now);
        }
    }

    /// Checks that a remote worker has gone after its stop.
    fn going_tick(&mut self, worker: WorkerId, since: Instant, now: Instant) {
        if self.members[worker].link.is_none() {
            self.seat_off(worker);
        } else if now > since + GONE_MAX {
            self.stays(worker, "the worker is still connected", now);
        }
    }

    fn stays(&mut self, worker: WorkerId, why: &str, now: Instant) {
        // On demand: the other gateway's use of it counts as use.
        self.asked_last = now + self.replicas.pause;
        self.take_back(worker);
        self.failed(worker, "stop", why, now);
    }

    /// Applies an operator's order: bounds and pause of the planner.
    pub(super) fn order_replicas(&mut self, order: ReplicaOrder) -> Result<(), ReplicaError> {
        let replicas = &mut self.replicas;
        if replicas.follow == Follow::Off {
            return Err(ReplicaError::Fixed);
        }
        let limits = replicas.planner.limits();
        let (min, max) = (order.min.unwrap_or(limits.min), order.max.unwrap_or(limits.max));
        let most = if replicas.follow == Follow::On { self.members.len() } else { self.config.replicas.limits.max };
        if min < 1 || max < min || max > most {
            return Err(ReplicaError::Bounds(most));
        }
        replicas.planner.bound(min, max);
        replicas.paused = order.paused.unwrap_or(replicas.paused);
        let paused = replicas.paused;
        info!(pool = %self.config.id, min, max, paused, "bounds for the number of workers changed by an operator");
        self.publish(Instant::now());
        Ok(())
    }
}
