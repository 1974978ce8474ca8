//! Seats: whether each worker shall run, and the steps by which a worker leaves.
//!
//! ```text
//! Off ──start──▶ On ──stop──▶ Emptying ──nothing is left there──▶ Ending ──agreed──▶ Going ──gone──▶ Off
//!                 ▲              │ needed after all                 │ refused           │ it stays
//!                 └──────────────┴──────────────────────────────────┴───────────────────┘
//! ```
//! A worker that appears without having been asked for counts as wanted.

use super::member::{Member, Seat};
use super::steering::{DRAIN_NOTICE, Steering};
use std::time::{Duration, Instant};

/// Time for the requests at a leaving worker to move or finish; after that the worker is stopped all the same.
const EMPTY_MAX: Duration = Duration::from_secs(600);

/// Time for a stopped remote worker to disappear; after that the stop counts as failed.
const GONE_MAX: Duration = Duration::from_secs(120);

/// Next action for a worker that is leaving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The worker is needed after all.
    TakeBack,
    /// No requests are left at the worker, or their time is over: it is to end.
    End,
    /// The local worker drains as told: its supervisor is not to start it again.
    Going,
    /// The remote worker has gone.
    Gone,
    /// The worker did not end, for this reason.
    Stays(&'static str),
}

impl Member {
    /// Next action for the worker, if it is leaving. `settled`: another process or pool decides on the number of
    /// workers and has use for this one, as far as is known here.
    pub(super) fn leaving(&self, settled: bool, now: Instant) -> Option<Step> {
        let is_empty = self.link.is_none() || self.bound.is_empty();
        match self.seat {
            Seat::Emptying(_) if settled => Some(Step::TakeBack),
            Seat::Emptying(since) => (is_empty || now > since + EMPTY_MAX).then_some(Step::End),
            Seat::Ending(since) if self.process.is_some() => {
                let why = "the worker did not begin to drain, as when another gateway uses it";
                let refuses = now > since + DRAIN_NOTICE;
                let ends = self.link.is_none() || self.state.draining;
                if ends { Some(Step::Going) } else { refuses.then_some(Step::Stays(why)) }
            }
            Seat::Going(since) if self.process.is_none() => {
                let stays = now > since + GONE_MAX;
                let is_gone = self.link.is_none();
                if is_gone { Some(Step::Gone) } else { stays.then_some(Step::Stays("the worker is still connected")) }
            }
            _ => None,
        }
    }

    /// Marks the worker as wanted because it is there, whoever started it.
    pub(super) fn is_there(&mut self) {
        if self.seat == Seat::Off {
            (self.seat, self.steering) = (Seat::On, Steering::Free);
        }
    }

    /// Takes in the end of the worker. Returns true if it was stopped.
    pub(super) fn is_gone(&mut self) -> bool {
        let is_stopped = matches!(self.seat, Seat::Going(_));
        if is_stopped {
            (self.seat, self.steering) = (Seat::Off, Steering::Free);
        }
        is_stopped
    }
}

#[cfg(test)]
mod tests {
    use super::super::members::Members;
    use super::super::members::tests::{absent, connect};
    use super::*;
    use penstock_proto::frames::Down;
    use penstock_router::WorkerId;
    use tokio::sync::mpsc::Receiver;

    const ONE: WorkerId = WorkerId(0);
    const MOMENT: Duration = Duration::from_millis(1);

    /// A connected worker with one request.
    fn busy(now: Instant) -> (Members, Receiver<Down>) {
        let mut members = absent(1, now);
        let far = connect(&mut members, ONE, 1, now);
        members[ONE].bound.insert(penstock_proto::RequestId(7));
        (members, far)
    }

    #[test]
    fn a_worker_ends_when_it_is_empty_or_its_time_is_over() {
        let now = Instant::now();
        let (mut members, _far) = busy(now);
        let member = &mut members[ONE];
        assert_eq!(member.leaving(true, now), None, "it is wanted");
        member.seat = Seat::Emptying(now);
        assert_eq!(member.leaving(false, now + EMPTY_MAX), None);
        assert_eq!(member.leaving(false, now + EMPTY_MAX + MOMENT), Some(Step::End));
        assert_eq!(member.leaving(true, now), Some(Step::TakeBack));
        member.bound.clear();
        assert_eq!(member.leaving(false, now), Some(Step::End));
    }

    #[test]
    fn a_local_worker_must_begin_to_drain() {
        let now = Instant::now();
        let (mut members, _far) = busy(now);
        let member = &mut members[ONE];
        member.seat = Seat::Ending(now);
        assert_eq!(member.leaving(false, now + DRAIN_NOTICE), None);
        let late = now + DRAIN_NOTICE + MOMENT;
        assert!(
            matches!(member.leaving(false, late), Some(Step::Stays(why)) if why.contains("did not begin to drain"))
        );
        member.state.draining = true;
        assert_eq!(member.leaving(false, late), Some(Step::Going));
        member.seat = Seat::Going(now);
        assert_eq!(member.leaving(false, now + 2 * GONE_MAX), None, "its supervisor reports its end");
    }

    #[test]
    fn a_remote_worker_must_disappear() {
        let now = Instant::now();
        let (mut members, _far) = busy(now);
        let member = &mut members[ONE];
        member.process = None;
        member.seat = Seat::Ending(now);
        assert_eq!(member.leaving(false, now + 2 * GONE_MAX), None, "the hook answers in its time");
        member.seat = Seat::Going(now);
        assert_eq!(member.leaving(false, now + GONE_MAX), None);
        let stays = Step::Stays("the worker is still connected");
        assert_eq!(member.leaving(false, now + GONE_MAX + MOMENT), Some(stays));
        member.link = None;
        assert_eq!(member.leaving(false, now), Some(Step::Gone));
    }

    #[test]
    fn a_worker_that_comes_uncalled_is_wanted_and_one_that_was_stopped_is_off() {
        let now = Instant::now();
        let mut members = absent(1, now);
        let member = &mut members[ONE];
        (member.seat, member.steering) = (Seat::Off, Steering::Leaving);
        member.is_there();
        assert_eq!((member.seat, member.steering), (Seat::On, Steering::Free));
        assert!(!member.is_gone() && member.seat == Seat::On, "it was not stopped");
        member.seat = Seat::Going(now);
        assert!(member.is_gone() && member.seat == Seat::Off);
    }
}
