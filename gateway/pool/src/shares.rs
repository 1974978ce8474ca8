//! Shares of the machine after the number of local workers has changed.
//!
//! Running workers stay warm with the share of cores and memory that they were started with. Where that is not the
//! share they would get now, they are restarted, one after another and each while another one serves. The requests of
//! the restarted worker move there first, so only its cache is lost. If only one worker serves, it is restarted when no
//! request has been open for `calm_after`; a request that arrives meanwhile waits for it.

use super::member::{Member, Process, Seat, Session};
use super::members::Members;
use super::steering::Steering;
use penstock_router::WorkerId;
use std::time::{Duration, Instant};

/// Time that the requests of a restarted worker get to finish, where they cannot be moved.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// Pause after a restart; covers a worker that refuses because another gateway holds it.
const AGAIN: Duration = Duration::from_secs(60);

/// Schedule of the restarts by which workers get their present share of the machine.
pub(super) struct Shares {
    /// Earliest instant of the next restart; `None`: no such restarts.
    next: Option<Instant>,
    /// Time without requests after which the only serving worker may be restarted.
    calm_after: Duration,
}

impl Shares {
    /// Schedule without restarts.
    pub(super) fn new(calm_after: Duration) -> Self {
        Self { next: None, calm_after }
    }

    /// Begins the restarts: no other process holds the workers any more.
    pub(super) fn arrange(&mut self, now: Instant) {
        self.next = Some(now);
    }

    /// Ends the pause of [`AGAIN`] early, because a worker has started.
    pub(super) fn started(&mut self, now: Instant) {
        self.next = self.next.map(|at| at.min(now));
    }

    /// The next worker to be restarted, if the pool can do without it now. `idle`: time without requests.
    pub(super) fn due(&mut self, members: &Members, idle: Duration, now: Instant) -> Option<WorkerId> {
        if self.next.is_none_or(|at| now < at) || members.find(is_changing).is_some() {
            return None;
        }
        let worker = members.find(is_displaced)?;
        if idle < self.calm_after && !members.any_other(worker, Member::takes_requests) {
            return None;
        }
        self.next = Some(now + AGAIN);
        Some(worker)
    }
}

/// Returns true if a worker runs with an outdated share, serves, and is neither held, restarting nor leaving.
fn is_displaced(member: &Member) -> bool {
    matches!(&member.process, Some(Process { is_running: true, displaced: true, .. }))
        && (member.seat, member.steering) == (Seat::On, Steering::Free)
        && member.session == Session::Ready
}

/// Returns true if a worker is starting, stopping or restarting.
fn is_changing(member: &Member) -> bool {
    matches!(member.steering, Steering::Restarting { .. } | Steering::Leaving)
        || matches!(member.seat, Seat::Emptying(_) | Seat::Ending(_) | Seat::Going(_))
        || member.process.is_some() && member.seat == Seat::On && member.session != Session::Ready
}

#[cfg(test)]
mod tests {
    use super::super::members::tests::{absent, connect};
    use super::*;

    const CALM: Duration = Duration::from_secs(60);

    fn displaced(members: &mut Members, worker: WorkerId) {
        members[worker].process = Some(Process { is_running: true, displaced: true, ..Process::default() });
    }

    #[test]
    fn displaced_workers_restart_one_after_another_while_others_serve() {
        let now = Instant::now();
        let mut members = absent(2, now);
        let workers = [WorkerId(0), WorkerId(1)];
        let _far = workers.map(|worker| connect(&mut members, worker, 1, now));
        workers.into_iter().for_each(|worker| displaced(&mut members, worker));
        let mut shares = Shares::new(CALM);
        assert_eq!(shares.due(&members, CALM, now), None, "nobody arranges");
        shares.arrange(now);
        assert_eq!(shares.due(&members, Duration::ZERO, now), Some(workers[0]));
        assert_eq!(shares.due(&members, Duration::ZERO, now), None, "a pause");
        members[workers[0]].process = Some(Process { is_running: true, ..Process::default() });
        shares.started(now);
        members[workers[0]].session = Session::Suspected;
        assert_eq!(shares.due(&members, CALM, now), None, "the first one does not serve yet");
        members[workers[0]].session = Session::Ready;
        assert_eq!(shares.due(&members, Duration::ZERO, now), Some(workers[1]));
    }

    #[test]
    fn the_only_worker_restarts_when_nobody_asks() {
        let now = Instant::now();
        let mut members = absent(1, now);
        let _far = connect(&mut members, WorkerId(0), 1, now);
        displaced(&mut members, WorkerId(0));
        let mut shares = Shares::new(CALM);
        shares.arrange(now);
        assert_eq!(shares.due(&members, CALM - Duration::from_millis(1), now), None);
        assert_eq!(shares.due(&members, CALM, now), Some(WorkerId(0)));
        members[WorkerId(0)].steering = Steering::Held;
        assert_eq!(shares.due(&members, CALM, now + AGAIN), None, "an operator holds it");
    }
}
