//! Order in force for one worker, from an operator or a planner: held, leaving, restarting, or none.
//!
//! A held worker finishes its requests and gets no new ones. A worker to be restarted is held, told to exit when its
//! requests have finished, and killed when its time is over; requests that are then still open go on elsewhere or at
//! its next life.

use super::holds::Holds;
use super::member::{Member, Seat};
use super::{Steer, SteerError};
use penstock_proto::Epoch;
use penstock_proto::frames::Drain;
use std::time::{Duration, Instant};

/// Time within which a worker that was told to exit must report `draining`: two heartbeats, which say so even in the middle
/// of a long step, and some slack.
pub(super) const DRAIN_NOTICE: Duration = Duration::from_millis(1500);

/// Order in force for a worker, from an operator or from the planner of replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Steering {
    /// No order: the router may bind requests to the worker.
    #[default]
    Free,
    /// An operator holds the worker: it keeps its requests and gets no new ones.
    Held,
    /// Nothing new is bound to the worker, because the load needs fewer workers.
    Leaving,
    /// An operator restarts the worker: it gets no new requests, and its life with this epoch ends by `until`.
    Restarting { epoch: Epoch, asked: Instant, until: Instant },
}

/// Slack of a worker's own deadline in a restart: the gateway kills it before.
const PATIENCE_SLACK: Duration = Duration::from_secs(2);

/// Order to exit, to a worker whose requests have ended or are given up; its own deadline holds.
pub(super) const EXIT: Drain = Drain { exit: true, patience_seconds: 0 };

/// Consequence of an order in force for a new session of its worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Resumed {
    /// No order is in force.
    Nothing,
    /// The restart is complete: the worker lives again.
    Release,
    /// The worker gets no new requests.
    Suspend,
    /// The worker gets no new requests, and is told to exit.
    Drain(Drain),
}

/// End of a restart that does not go as told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// The worker does not drain, as when another gateway uses it.
    Refuses,
    /// The time of the worker's requests is over.
    Kill,
}

impl Steering {
    /// Frame that tells a worker to exit within the time of its restart.
    pub(super) fn drain(self, now: Instant) -> Drain {
        let Self::Restarting { until, .. } = self else { return EXIT };
        let patience = until.saturating_duration_since(now) + PATIENCE_SLACK;
        Drain { exit: true, patience_seconds: u32::try_from(patience.as_secs()).unwrap_or(u32::MAX) }
    }

    /// Consequence of the order for a new session of the worker, in its life of this epoch, that begins `now`.
    pub(super) fn resumed(self, epoch: Epoch, now: Instant) -> Resumed {
        match self {
            Self::Free => Resumed::Nothing,
            Self::Held | Self::Leaving => Resumed::Suspend,
            Self::Restarting { epoch: old, .. } if old != epoch => Resumed::Release,
            Self::Restarting { .. } => Resumed::Drain(self.drain(now)),
        }
    }
}

impl Member {
    /// Epoch of the worker's life; 0 before its first session.
    pub(super) fn epoch(&self) -> Epoch {
        self.ready.as_ref().map_or(Epoch::default(), |ready| Epoch(ready.epoch))
    }

    /// Checks that the worker can follow an order now.
    ///
    /// # Errors
    /// The order is to have no effect.
    pub(super) fn check_order(&self, steer: Steer) -> Result<(), SteerError> {
        let is_restarting = matches!(self.steering, Steering::Restarting { .. });
        match steer {
            Steer::Hold | Steer::Release | Steer::Restart { .. } if self.seat != Seat::On => Err(SteerError::Stopped),
            Steer::Hold | Steer::Release if is_restarting => Err(SteerError::Restarting),
            _ => Ok(()),
        }
    }

    /// Change of the order in force that the operator's holds ask for; true: the worker is to be held.
    pub(super) fn to_hold(&self, holds: &Holds) -> Option<bool> {
        match (self.steering, holds.has(&self.name)) {
            (Steering::Free, true) if self.seat == Seat::On => Some(true),
            (Steering::Held, false) => Some(false),
            _ => None,
        }
    }

    /// End of the worker's restart, if it does not drain or its time is over.
    pub(super) fn overdue(&self, now: Instant) -> Option<Overdue> {
        let Steering::Restarting { asked, until, .. } = self.steering else { return None };
        let refuses = self.link.is_some() && !self.state.draining && now > asked + DRAIN_NOTICE;
        if refuses { Some(Overdue::Refuses) } else { (now >= until).then_some(Overdue::Kill) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::members::tests::{absent, connect};
    use super::*;
    use penstock_router::WorkerId;

    const MINUTE: Duration = Duration::from_secs(60);

    fn restarting(now: Instant) -> Steering {
        Steering::Restarting { epoch: Epoch(3), asked: now, until: now + MINUTE }
    }

    #[test]
    fn an_order_outlives_the_session_and_a_restart_ends_with_the_epoch() {
        let now = Instant::now();
        let restarting = restarting(now);
        let check = |steering: Steering, epoch, expected| {
            assert_eq!(steering.resumed(Epoch(epoch), now + MINUTE / 2), expected, "{steering:?}");
        };
        check(Steering::Free, 3, Resumed::Nothing);
        check(Steering::Held, 3, Resumed::Suspend);
        check(Steering::Leaving, 4, Resumed::Suspend);
        check(restarting, 3, Resumed::Drain(Drain { exit: true, patience_seconds: 32 }));
        check(restarting, 4, Resumed::Release);
        assert_eq!(restarting.drain(now + 2 * MINUTE).patience_seconds, 2, "0 would be the worker's own deadline");
    }

    #[test]
    fn orders_that_contradict_what_the_worker_does_are_refused() {
        let now = Instant::now();
        let mut members = absent(1, now);
        let member = &mut members[WorkerId(0)];
        let restart = Steer::Restart { patience: MINUTE };
        let role = Steer::Role(penstock_proto::frames::Role::Mixed);
        assert_eq!(member.check_order(Steer::Hold), Ok(()));
        member.steering = restarting(now);
        assert_eq!(member.check_order(Steer::Hold), Err(SteerError::Restarting));
        assert_eq!(member.check_order(Steer::Release), Err(SteerError::Restarting));
        assert_eq!(member.check_order(restart), Ok(()));
        member.seat = Seat::Off;
        assert_eq!(member.check_order(restart), Err(SteerError::Stopped));
        assert_eq!(member.check_order(role), Ok(()));
    }

    #[test]
    fn a_hold_given_elsewhere_is_followed_and_other_orders_come_first() {
        let now = Instant::now();
        let (mut members, holds) = (absent(2, now), Holds::default());
        let elsewhere = holds.clone();
        let member = &mut members[WorkerId(0)];
        assert_eq!(member.to_hold(&holds), None);
        elsewhere.set("a-0", true);
        assert_eq!(member.to_hold(&holds), Some(true));
        for steering in [Steering::Held, Steering::Leaving, restarting(now)] {
            member.steering = steering;
            assert_eq!(member.to_hold(&holds), None, "{steering:?}");
        }
        (member.steering, member.seat) = (Steering::Free, Seat::Off);
        assert_eq!(member.to_hold(&holds), None, "it is not there");
        (member.steering, member.seat) = (Steering::Held, Seat::On);
        elsewhere.replace(["a-1".to_owned(), "gone".to_owned()]);
        assert_eq!(member.to_hold(&holds), Some(false));
        assert_eq!(members[WorkerId(1)].to_hold(&holds), Some(true));
        assert_eq!(holds.names(), ["a-1", "gone"]);
    }

    #[test]
    fn a_restart_ends_when_the_worker_refuses_or_is_late() {
        let now = Instant::now();
        let mut members = absent(1, now);
        let _far = connect(&mut members, WorkerId(0), 1, now);
        let member = &mut members[WorkerId(0)];
        assert_eq!(member.overdue(now + MINUTE), None, "no restart");
        member.steering = restarting(now);
        assert_eq!(member.overdue(now + DRAIN_NOTICE), None);
        assert_eq!(member.overdue(now + 2 * DRAIN_NOTICE), Some(Overdue::Refuses));
        member.state.draining = true;
        assert_eq!(member.overdue(now + 2 * DRAIN_NOTICE), None);
        assert_eq!(member.overdue(now + MINUTE), Some(Overdue::Kill));
    }
}
