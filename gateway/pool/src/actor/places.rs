//! Shares of the machine after the number of local workers has changed.
//!
//! Running workers stay warm with the share of cores and memory that they were started with. Where that is not the
//! share they would get now, they are restarted, one after another and each while another one serves. The requests of
//! the restarted worker move there first, so only its cache is lost. If only one worker serves, it is restarted when no
//! request has been open for `calm_after`; a request that arrives meanwhile waits for it.

use super::super::member::{Member, Process, Seat, Session};
use super::super::steering::Steering;
use super::Actor;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tracing::info;

/// Time that the requests of a restarted worker get to finish, where they cannot be moved.
const PATIENCE: Duration = Duration::from_secs(600);

/// Pause after a restart; covers a worker that refuses because another gateway holds it.
const AGAIN: Duration = Duration::from_secs(60);

impl Actor {
    /// Restarts the next worker whose share is outdated, if the pool can do without it.
    pub(super) fn places_tick(&mut self, now: Instant) {
        if !self.requests.is_empty() {
            self.asked_last = now;
        }
        let is_settled = self.ending.is_some() || self.settled();
        if is_settled || self.arranges_at.is_none_or(|at| now < at) || self.members.find(is_changing).is_some() {
            return;
        }
        let Some(worker) = self.members.find(is_displaced) else { return };
        let is_calm = now.saturating_duration_since(self.asked_last) >= self.config.calm_after;
        if !is_calm && !self.members.any_other(worker, Member::takes_requests) {
            return;
        }
        info!(worker = %self.members[worker].name, "worker restarts with its new share of cores and memory");
        self.arranges_at = Some(now + AGAIN);
        // Err: the worker has no process of this gateway, and then no share.
        let _ = self.restart(worker, PATIENCE);
    }

    /// Ends the pause of [`AGAIN`] early, because a worker has started.
    pub(super) fn places_started(&mut self, now: Instant) {
        self.arranges_at = self.arranges_at.map(|at| at.min(now));
    }

    fn settled(&self) -> bool {
        self.replicas.settled.load(Ordering::Relaxed)
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
