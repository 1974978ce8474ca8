//! Who prefills for others: what the config says at the start, what the planner finds better later, and what an operator asks for.
//!
//! A role is told to the worker and comes back with its state; only what comes back counts for the router. Where neither the config nor
//! an operator said anything, a worker keeps the role that it was started with.

use penstock_proto::frames::{Batch, DownBody, Role, SetRole};
use penstock_router::WorkerId;
use penstock_router::roles::{Flip, RoleLimits, Seen, Watch};
use tracing::info;

use super::super::config::Follow;
use super::Actor;

/// See the module header.
pub(super) struct Roles {
    follow: Follow,
    watch: Watch,
    /// What each worker should be; `None`: what it likes.
    wanted: Vec<Option<Role>>,
    /// What the planner would do, in a dry run.
    pub(super) advice: Option<String>,
}

impl Roles {
    /// For a pool of `workers`, of which the first `prefill` prefill for the others.
    pub(super) fn new(follow: Follow, limits: RoleLimits, workers: usize, prefill: usize) -> Self {
        let wanted = |at: usize| match prefill {
            0 => None,
            _ if at < prefill => Some(Role::Prefill),
            _ => Some(limits.decode_role),
        };
        let wanted = (0..workers).map(wanted).collect();
        Self { follow, watch: Watch::new(limits, workers), wanted, advice: None }
    }

    /// A worker computed a step.
    pub(super) fn observe(&mut self, worker: WorkerId, batch: &Batch) {
        self.watch.observe(worker, batch);
    }
}

impl Actor {
    /// Tells a worker its role, if it should have another.
    pub(super) fn tell_role(&mut self, worker: WorkerId) {
        let Some(role) = self.roles.wanted[usize::from(worker.0)] else { return };
        let member = self.member(worker);
        if member.link.is_some() && member.state.role != role as i32 {
            self.send(worker, DownBody::SetRole(SetRole { role: role as i32 }));
        }
    }

    /// What an operator asks for; it stays until the planner, if there is one, finds better.
    pub(super) fn set_role(&mut self, worker: WorkerId, role: Role) {
        self.roles.wanted[usize::from(worker.0)] = Some(role);
        self.tell_role(worker);
    }

    /// Lets the planner look at the pool.
    pub(super) fn roles_tick(&mut self) {
        let now = self.began.elapsed();
        if self.roles.follow == Follow::Off || !self.roles.watch.is_due(now) {
            return;
        }
        let members = (0..).zip(&self.members);
        let seen: Vec<Seen<'_>> = members
            .map(|(at, member)| Seen {
                worker: WorkerId(at),
                state: &member.state,
                ready: member.takes_requests(),
                sequences_max: member.ready.as_ref().map_or(1, |ready| ready.sequences_max),
                base_seconds: self.router.fit(WorkerId(at)).map_or(0.0, |fit| fit.step_seconds(0.0, 0.0)),
            })
            .collect();
        if let Some(flip) = self.roles.watch.look(&seen, &self.router.traffic(), now) {
            self.flip(&flip);
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
