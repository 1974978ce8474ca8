//! Who prefills for others: what the config says at the start, what the planner finds better later, and what an operator asks for.
//!
//! A role is told to the worker and comes back with its state; only what comes back counts for the router. Where neither the config nor
//! an operator said anything, a worker keeps the role that it was started with.

use std::time::{Duration, Instant};

use penstock_proto::frames::{Batch, DownBody, Role, SetRole};
use penstock_router::WorkerId;
use penstock_router::roles::{Flip, Planner, RoleLimits, WorkerLoad};
use tracing::info;

use super::super::config::Follow;
use super::Actor;

/// How often the planner looks.
const LOOK: Duration = Duration::from_secs(1);

/// Weight of the last look in a worker's share of prefill.
const FRESH: f64 = 0.3;

/// What is known of one worker's work.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    /// Seconds of prefill since the last look.
    prefill: f64,
    /// Share of its time, smoothed.
    busy: f64,
    /// What it should be; `None`: what it likes.
    wanted: Option<Role>,
}

/// See the module header.
pub(super) struct Roles {
    follow: Follow,
    planner: Planner,
    works: Vec<Work>,
    looked: Instant,
    /// What the planner would do, in a dry run.
    pub(super) advice: Option<String>,
}

impl Roles {
    /// For a pool of `workers`, of which the first `prefill` prefill for the others.
    pub(super) fn new(follow: Follow, limits: RoleLimits, workers: usize, prefill: usize, now: Instant) -> Self {
        let wanted = |at: usize| match prefill {
            0 => None,
            _ if at < prefill => Some(Role::Prefill),
            _ => Some(limits.decode_role),
        };
        let works = (0..workers).map(|at| Work { wanted: wanted(at), ..Work::default() }).collect();
        Self { follow, planner: Planner::new(limits), works, looked: now, advice: None }
    }

    /// A worker computed a step.
    pub(super) fn observe(&mut self, worker: WorkerId, batch: &Batch) {
        let (prefill, decodes) = (f64::from(batch.prefill_tokens), f64::from(batch.decodes));
        if prefill > 0.0 && batch.seconds.is_finite() && batch.seconds > 0.0 {
            self.works[usize::from(worker.0)].prefill += batch.seconds * prefill / (prefill + decodes);
        }
    }
}

impl Actor {
    /// Tells a worker its role, if it should have another.
    pub(super) fn tell_role(&mut self, worker: WorkerId) {
        let Some(role) = self.roles.works[usize::from(worker.0)].wanted else { return };
        let member = self.member(worker);
        if member.link.is_some() && member.state.role != role as i32 {
            self.send(worker, DownBody::SetRole(SetRole { role: role as i32 }));
        }
    }

    /// What an operator asks for; it stays until the planner, if there is one, finds better.
    pub(super) fn set_role(&mut self, worker: WorkerId, role: Role) {
        self.roles.works[usize::from(worker.0)].wanted = Some(role);
        self.tell_role(worker);
    }

    /// Lets the planner look at the pool.
    pub(super) fn roles_tick(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.roles.looked);
        if self.roles.follow == Follow::Off || elapsed < LOOK {
            return;
        }
        self.roles.looked = now;
        for work in &mut self.roles.works {
            let share = (std::mem::take(&mut work.prefill) / elapsed.as_secs_f64()).min(1.0);
            work.busy += (share - work.busy) * FRESH;
        }
        let loads: Vec<WorkerLoad> = (0..self.members.len()).map(|at| self.load(at)).collect();
        let waiting = self.router.waiting_seconds();
        if let Some(flip) = self.roles.planner.look(&loads, waiting, self.began.elapsed()) {
            self.flip(&flip);
        }
    }

    fn load(&self, at: usize) -> WorkerLoad {
        let member = &self.members[at];
        let state = &member.state;
        let finite = |value: f64| if value.is_finite() { value.max(0.0) } else { 0.0 };
        WorkerLoad {
            worker: WorkerId(at as u8),
            role: state.role(),
            ready: member.takes_requests(),
            prefill_busy: self.roles.works[at].busy,
            queue_seconds: finite(state.queue_seconds),
            step_seconds: finite(state.step_seconds),
            fill: penstock_router::cost::fill(state, 0),
            running: state.running.saturating_sub(state.stalled),
            sequences_max: member.ready.as_ref().map_or(1, |ready| ready.sequences_max),
        }
    }

    fn flip(&mut self, flip: &Flip) {
        let name = self.member(flip.worker).name.clone();
        let loads = |(prefill, decode): (f64, f64)| format!("{prefill:.2} / {decode:.2}");
        let (before, after) = (loads(flip.before), loads(flip.after));
        let (from, to) = (flip.from, flip.to);
        self.roles.advice = Some(format!("{name}: {from:?} → {to:?}, load of prefill / decode {before} → {after}"));
        let dry_run = self.roles.follow == Follow::DryRun;
        info!(worker = %name, ?from, ?to, before, after, dry_run, "role of a worker follows the load");
        if !dry_run {
            self.counts.role_flips += 1;
            self.set_role(flip.worker, flip.to);
        }
    }
}
