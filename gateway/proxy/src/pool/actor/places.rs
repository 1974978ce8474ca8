//! Shares of the machine after the number of local workers has changed.
//!
//! Workers that run stay, warm, with the share of cores and memory that they were started with. Where that is not what they would be started
//! with now, they start anew, one after another and each while another one serves: what it has moves there first, so nothing is lost but its
//! cache. The only one that serves starts anew when nobody has asked for a while; who asks meanwhile waits for it.

use super::super::member::{Member, Process, Seat, Session};
use super::Actor;
use super::steer::Steering;
use penstock_router::WorkerId;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tracing::info;

/// What a worker has to finish, and cannot give away, may take so long.
const PATIENCE: Duration = Duration::from_secs(600);

/// Pause after one that did not start anew: another gateway holds it.
const AGAIN: Duration = Duration::from_secs(60);

impl Actor {
    /// Lets the next one start anew.
    pub(super) fn places_tick(&mut self, now: Instant) {
        if !self.requests.is_empty() {
            self.asked_last = now;
        }
        let is_settled = self.ending.is_some() || self.settled();
        if is_settled || self.arranges_at.is_none_or(|at| now < at) || self.members.iter().any(is_changing) {
            return;
        }
        let Some(at) = self.members.iter().position(is_displaced) else { return };
        let serves = |(other, member): (usize, &Member)| other != at && member.takes_requests();
        let is_calm = now.saturating_duration_since(self.asked_last) >= self.config.calm_after;
        if !is_calm && !self.members.iter().enumerate().any(serves) {
            return;
        }
        info!(worker = %self.members[at].name, "worker restarts with its new share of cores and memory");
        self.arranges_at = Some(now + AGAIN);
        // Err: it has no process of ours, and then no share.
        let _ = self.restart(WorkerId(at as u8), PATIENCE);
    }

    /// One has started: the next one need not wait.
    pub(super) fn places_started(&mut self, now: Instant) {
        self.arranges_at = self.arranges_at.map(|at| at.min(now));
    }

    fn settled(&self) -> bool {
        self.replicas.settled.load(Ordering::Relaxed)
    }
}

/// Whether it runs with a share that is not its own, and nobody has other plans for it.
fn is_displaced(member: &Member) -> bool {
    matches!(&member.process, Some(Process { is_running: true, displaced: true, .. }))
        && (member.seat, member.steering) == (Seat::On, Steering::Free)
        && member.session == Session::Ready
}

/// Whether it comes, goes or starts anew.
fn is_changing(member: &Member) -> bool {
    matches!(member.steering, Steering::Restarting { .. } | Steering::Leaving)
        || matches!(member.seat, Seat::Emptying(_) | Seat::Ending(_) | Seat::Going(_))
        || member.process.is_some() && member.seat == Seat::On && member.session != Session::Ready
}
