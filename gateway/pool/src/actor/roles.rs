//! Roles of the workers: set by the config at the start, changed by the planner as the load shifts, or by an operator.
//!
//! A role is sent to the worker and comes back with its state; only the reported role counts for the router. Where
//! neither the config nor an operator set one, a worker keeps the role that it was started with.

use penstock_proto::frames::{DownBody, Role, SetRole};
use penstock_router::WorkerId;
use penstock_router::load::{Traffic, WorkerLoad};
use penstock_router::roles::{Flip, Planner, RoleLimits};
use std::time::Duration;
use tracing::info;

use super::super::config::Follow;
use super::Actor;

/// State of the planner of roles in the pool's actor; see the module header.
pub(super) struct Roles {
    follow: Follow,
    planner: Planner,
    /// Role that each worker should have; `None`: the one it was started with.
    wanted: Vec<Option<Role>>,
    /// Last change of a role that the planner made or, in a dry run, would have made.
    pub(super) advice: Option<String>,
}

impl Roles {
    /// Roles for a pool of `workers`, of which the first `prefill` prefill for the others.
    pub(super) fn new(follow: Follow, limits: RoleLimits, workers: usize, prefill: usize) -> Self {
        let wanted = |at: usize| match prefill {
            0 => None,
            _ if at < prefill => Some(Role::Prefill),
            _ => Some(limits.decode_role),
        };
        let wanted = (0..workers).map(wanted).collect();
        Self { follow, planner: Planner::new(limits), wanted, advice: None }
    }
}

impl Actor {
    /// Sends a worker its role, if the reported role is another.
    pub(super) fn tell_role(&mut self, worker: WorkerId) {
        let Some(role) = self.roles.wanted[usize::from(worker.0)] else { return };
        let member = &mut self.members[worker];
        if member.link.is_some() && member.state.role != role as i32 {
            self.members.send(worker, DownBody::SetRole(SetRole { role: role as i32 }));
        }
    }

    /// Sets a role at an operator's or the planner's wish; it stays until either sets another.
    pub(super) fn set_role(&mut self, worker: WorkerId, role: Role) {
        self.roles.wanted[usize::from(worker.0)] = Some(role);
        self.tell_role(worker);
    }

    /// Runs the planner of roles on the pool's load.
    pub(super) fn plan_roles(&mut self, loads: &[WorkerLoad], traffic: &Traffic, now: Duration) {
        if self.roles.follow != Follow::Off
            && let Some(flip) = self.roles.planner.look(loads, traffic, now)
        {
            self.flip(&flip);
        }
    }

    fn flip(&mut self, flip: &Flip) {
        let name = self.members[flip.worker].name.clone();
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
