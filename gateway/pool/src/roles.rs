//! Roles of the workers: set by the config at the start, changed by the planner as the load shifts, or by an operator.
//!
//! A role is sent to the worker and comes back with its state; only the reported role counts for the router. Where
//! neither the config nor an operator set one, a worker keeps the role that it was started with.

use penstock_proto::frames::Role;
use penstock_router::WorkerId;
use penstock_router::load::{Traffic, WorkerLoad};
use penstock_router::roles::{Flip, Planner, RoleLimits};
use std::time::Duration;
use tracing::info;

use super::config::Follow;
use super::members::Members;

/// Roles that the workers should have, with the planner that changes them; see the module header.
pub(super) struct Roles {
    follow: Follow,
    planner: Planner,
    /// Role that each worker should have; `None`: the one it was started with.
    wanted: Vec<Option<Role>>,
    /// Last change of a role that the planner made or, in a dry run, would have made.
    pub(super) advice: Option<String>,
    /// Number of changes that the planner has made.
    pub(super) flips: u64,
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
        Self { follow, planner: Planner::new(limits), wanted, advice: None, flips: 0 }
    }

    /// Role that a worker is to be told: it should have another one than it reports.
    pub(super) fn untold(&self, worker: WorkerId, members: &Members) -> Option<Role> {
        let (wanted, member) = (self.wanted[usize::from(worker.0)], &members[worker]);
        wanted.filter(|role| member.link.is_some() && member.state.role != *role as i32)
    }

    /// Sets a role at an operator's or the planner's wish; it stays until either sets another.
    pub(super) fn want(&mut self, worker: WorkerId, role: Role) {
        self.wanted[usize::from(worker.0)] = Some(role);
    }

    /// Runs the planner on the pool's load. Returns the worker that has another role from now on.
    pub(super) fn plan(
        &mut self,
        loads: &[WorkerLoad],
        traffic: &Traffic,
        members: &Members,
        now: Duration,
    ) -> Option<WorkerId> {
        if self.follow == Follow::Off {
            return None;
        }
        let flip = self.planner.look(loads, traffic, now)?;
        self.follows(&flip, members).then_some(flip.worker)
    }

    /// Notes the planner's advice, and follows it unless this is a dry run. Returns true if it was followed.
    fn follows(&mut self, flip: &Flip, members: &Members) -> bool {
        let name = members.name(flip.worker);
        let loads = |(prefill, decode): (f64, f64)| format!("{prefill:.2} / {decode:.2}");
        let (before, after) = (loads(flip.before), loads(flip.after));
        let (from, to) = (flip.from, flip.to);
        self.advice = Some(format!("{name}: {from:?} → {to:?}, load of prefill / decode {before} → {after}"));
        let dry_run = self.follow == Follow::DryRun;
        info!(worker = %name, ?from, ?to, before, after, dry_run, "role of a worker follows the load");
        if !dry_run {
            self.flips += 1;
            self.want(flip.worker, to);
        }
        !dry_run
    }
}

#[cfg(test)]
mod tests {
    use super::super::members::tests::{absent, connect};
    use super::*;
    use penstock_base::testing::logged;
    use std::time::Instant;

    const FIRST: WorkerId = WorkerId(0);
    const SECOND: WorkerId = WorkerId(1);

    fn flip() -> Flip {
        Flip { worker: FIRST, from: Role::Mixed, to: Role::Prefill, before: (1.0, 0.5), after: (0.75, 0.75) }
    }

    fn roles(follow: Follow, prefill: usize) -> Roles {
        Roles::new(follow, RoleLimits::default(), 2, prefill)
    }

    #[test]
    fn a_connected_worker_is_told_a_role_that_it_does_not_report() {
        let now = Instant::now();
        let mut members = absent(2, now);
        let mut roles = roles(Follow::Off, 1);
        assert_eq!(roles.untold(FIRST, &members), None, "no session");
        let _far = [FIRST, SECOND].map(|worker| connect(&mut members, worker, 1, now));
        assert_eq!(roles.untold(FIRST, &members), Some(Role::Prefill));
        members[FIRST].state.role = Role::Prefill as i32;
        assert_eq!(roles.untold(FIRST, &members), None);
        roles.want(FIRST, Role::Mixed);
        assert_eq!(roles.untold(FIRST, &members), Some(Role::Mixed));
        let none = self::roles(Follow::Off, 0);
        assert_eq!(none.untold(SECOND, &members), None, "nobody set its role");
    }

    #[test]
    fn each_change_of_a_role_is_one_line_with_the_worker_and_both_roles() {
        let members = absent(2, Instant::now());
        for (follow, dry_run) in [(Follow::On, "dry_run=false"), (Follow::DryRun, "dry_run=true")] {
            let mut roles = roles(follow, 0);
            let log = logged(|| {
                let back = Flip { from: Role::Prefill, to: Role::Decode, ..flip() };
                for flip in [flip(), back] {
                    roles.follows(&flip, &members);
                }
            });
            let lines: Vec<_> = log.lines().collect();
            assert_eq!(lines.len(), 2, "{log}");
            for (line, change) in lines.iter().zip([["from=Mixed", "to=Prefill"], ["from=Prefill", "to=Decode"]]) {
                let always = ["INFO", "worker=a-0", "role of a worker follows the load", dry_run];
                for part in always.iter().chain(&change) {
                    assert!(line.contains(part), "{part} is not in: {line}");
                }
            }
        }
    }

    #[test]
    fn a_dry_run_advises_and_changes_nothing() {
        let members = absent(2, Instant::now());
        let mut dry = roles(Follow::DryRun, 0);
        assert!(!dry.follows(&flip(), &members));
        assert_eq!((dry.flips, dry.wanted[0]), (0, None));
        let advice = "a-0: Mixed → Prefill, load of prefill / decode 1.00 / 0.50 → 0.75 / 0.75";
        assert_eq!(dry.advice.as_deref(), Some(advice));
        let mut on = roles(Follow::On, 0);
        assert!(on.follows(&flip(), &members));
        assert_eq!((on.flips, on.wanted[0]), (1, Some(Role::Prefill)));
    }
}
