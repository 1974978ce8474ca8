//! Effects of the planners: roles are told, workers start and stop, the hook is called. What changes, and when, is decided in `roles.rs`,
//! `replicas.rs`, `seats.rs`, `demand.rs` and `shares.rs`.

use super::super::demand::Change as OnDemandChange;
use super::super::member::Seat;
use super::super::scaler::Action;
use super::super::seats::Step;
use super::super::session::Event;
use super::super::shares::PATIENCE;
use super::super::steering::{EXIT, Steering};
use super::super::supervisor::Order;
use super::super::{ReplicaError, ReplicaOrder};
use super::Actor;
use penstock_proto::frames::{DownBody, Role, SetRole};
use penstock_router::WorkerId;
use penstock_router::load::Seen;
use penstock_router::replicas::Change;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tracing::info;

impl Actor {
    /// Runs the planners on the pool's load, about once a second.
    pub(super) fn planners_tick(&mut self, wall: Instant) {
        let now = self.placement.clock(Instant::now());
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
                base_seconds: self.placement.router.fit(worker).map_or(0.0, |fit| fit.step_seconds(0.0, 0.0)),
            })
            .collect();
        let loads = self.watch.look(&seen, now);
        let traffic = self.placement.router.traffic();
        if let Some(worker) = self.roles.plan(&loads, &traffic, &self.members, now) {
            self.tell_role(worker);
        }
        if self.ending.is_some() {
            return;
        }
        match self.replicas.plan(&loads, traffic, &self.members, (wall, self.placement.clock(Instant::now()))) {
            Some((Change::Start, worker)) => self.start_worker(worker),
            Some((Change::Stop(_), worker)) => self.empty(worker),
            Some((Change::Keep, worker)) => self.take_back(worker),
            None => {}
        }
    }

    // ---- roles ----

    /// Sends a worker its role, if the reported role is another.
    pub(super) fn tell_role(&mut self, worker: WorkerId) {
        if let Some(role) = self.roles.untold(worker, &self.members) {
            self.members.send(worker, DownBody::SetRole(SetRole { role: role as i32 }));
        }
    }

    /// Sets a role at an operator's wish.
    pub(super) fn set_role(&mut self, worker: WorkerId, role: Role) {
        self.roles.want(worker, role);
        self.tell_role(worker);
    }

    // ---- on demand, shares ----

    /// Starts the workers of a pool on demand when somebody asks, and stops them when nobody has for long enough.
    pub(super) fn demand(&mut self, now: Instant) {
        if !self.demand.has_rule() || self.ending.is_some() || self.replicas.is_settled() {
            return;
        }
        // At once, not at the next tick: who asks meanwhile waits for the end.
        self.seats_tick(now);
        let is_asked = !self.requests.is_empty() || self.inputs.mailbox.waking.load(Ordering::Relaxed) > 0;
        let wish = self.demand.wish(is_asked, now);
        for worker in self.members.ids() {
            match wish.change(&self.members[worker]) {
                Some(OnDemandChange::Start) => {
                    self.say(worker, "start", "a request waits");
                    self.start_worker(worker);
                }
                Some(OnDemandChange::Keep) => self.take_back(worker),
                Some(OnDemandChange::Stop) => {
                    self.say(worker, "stop", "nobody has asked for keep_alive");
                    self.empty(worker);
                }
                None => {}
            }
        }
    }

    fn say(&mut self, worker: WorkerId, what: &str, reason: &str) {
        let name = self.members.name(worker);
        info!(pool = %self.config.id, worker = %name, what, reason, "worker on demand");
        self.replicas.tell_last(format!("{what} {name}: {reason}"), reason);
    }

    /// Restarts the next worker whose share of the machine is outdated, if the pool can do without it.
    pub(super) fn shares_tick(&mut self, now: Instant) {
        if !self.requests.is_empty() {
            self.demand.asked(now);
        }
        if self.ending.is_some() || self.replicas.is_settled() {
            return;
        }
        let Some(worker) = self.shares.due(&self.members, self.demand.idle(now), now) else { return };
        info!(worker = %self.members[worker].name, "worker restarts with its new share of cores and memory");
        // Err: the worker has no process of this gateway, and then no share.
        let _ = self.restart(worker, PATIENCE);
    }

    // ---- replicas ----

    /// Starts a worker: its process, or by a call of the hook.
    fn start_worker(&mut self, worker: WorkerId) {
        let member = &mut self.members[worker];
        (member.seat, member.steering) = (Seat::On, Steering::Free);
        if member.process.is_some() {
            self.replicas.starts_local();
            self.processes.order(worker, Order::Start);
        } else {
            self.ask(worker, Action::Start);
        }
    }

    /// Begins to stop a worker: what is bound to it moves or ends first.
    fn empty(&mut self, worker: WorkerId) {
        self.members[worker].seat = Seat::Emptying(Instant::now());
        self.hold(worker, Steering::Leaving);
    }

    /// Keeps a worker that was to be stopped.
    fn take_back(&mut self, worker: WorkerId) {
        self.members[worker].seat = Seat::On;
        self.release(worker);
    }

    /// Asks the operator's hook to start or stop a worker, in a task of its own.
    fn ask(&mut self, worker: WorkerId, action: Action) {
        let Some((hook, wish)) = self.replicas.call(worker, action, &self.members) else { return };
        let events = self.inputs.sender.clone();
        tokio::spawn(async move {
            let outcome = hook.call(&wish).await;
            // Err: the pool has ended, and with it the interest in the outcome.
            let _ = events.send(Event::Asked { worker, action, outcome }).await;
        });
    }

    /// Takes in the outcome of a hook's call.
    pub(super) fn asked(&mut self, worker: WorkerId, action: Action, outcome: Result<(), String>, now: Instant) {
        match (action, outcome) {
            (Action::Start, Ok(())) => self.replicas.started(),
            (Action::Stop, Ok(())) => self.members[worker].seat = Seat::Going(now),
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
                self.replicas.counted(now);
                self.members.iter_mut().take(count.unwrap_or(0)).for_each(|member| member.seat = Seat::On);
            }
            Err(why) => {
                self.replicas.not_counted(now);
                self.failed(WorkerId(0), "count", &why, now);
            }
        }
    }

    fn failed(&mut self, worker: WorkerId, what: &'static str, why: &str, now: Instant) {
        self.replicas.failed(&self.members[worker].name, what, why, self.placement.clock(Instant::now()));
        self.publish(now);
    }

    /// Takes in the expected end of a worker.
    pub(super) fn seat_off(&mut self, worker: WorkerId) {
        if self.members[worker].is_gone() {
            // The one that is started next is another.
            self.config.holds.set(&self.members[worker].name, false);
            self.replicas.stopped();
        }
    }

    /// Advances the workers that are leaving, and asks the hook for the number of workers when that is due.
    pub(super) fn seats_tick(&mut self, now: Instant) {
        self.count_workers(now);
        for worker in self.members.ids() {
            match self.members[worker].leaving(self.replicas.is_settled(), now) {
                Some(Step::TakeBack) => self.take_back(worker),
                Some(Step::End) => self.end_worker(worker, now),
                Some(Step::Going) => {
                    self.members[worker].seat = Seat::Going(now);
                    self.processes.order(worker, Order::Stop);
                }
                Some(Step::Gone) => self.seat_off(worker),
                Some(Step::Stays(why)) => self.stays(worker, why, now),
                None => {}
            }
        }
    }

    fn count_workers(&mut self, now: Instant) {
        let Some(hook) = self.replicas.asks(now) else { return };
        let events = self.inputs.sender.clone();
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
            self.members.send(worker, DownBody::Drain(EXIT));
        }
    }

    fn stays(&mut self, worker: WorkerId, why: &str, now: Instant) {
        // On demand: the other gateway's use of it counts as use.
        self.demand.asked(now + self.replicas.pause());
        self.take_back(worker);
        self.failed(worker, "stop", why, now);
    }

    /// Applies an operator's order: bounds and pause of the planner.
    pub(super) fn order_replicas(&mut self, order: ReplicaOrder) -> Result<(), ReplicaError> {
        self.replicas.order(order, self.members.len())?;
        self.publish(Instant::now());
        Ok(())
    }
}
