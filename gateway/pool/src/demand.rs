//! Workers on demand: all of a pool's local workers are started when somebody asks, and stopped when nobody has for `keep_alive`.
//!
//! Requests wait in the router's queue while the workers load, as they do when a worker is started again. Before the first load the
//! gateway does not know the model's context, so calls wait in front of the pool, counted in `Mailbox::waking`.

use super::config::OnDemand;
use super::member::{Member, Seat};
use super::steering::Steering;
use std::time::{Duration, Instant};

/// Least time that workers stay: the request that has woken them is still on its way from the handler when they are ready.
const STAY_MIN: Duration = Duration::from_millis(500);

/// Task of the workers of a pool on demand for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Run,
    Stop,
    /// Go on as they are.
    Keep,
}

/// Use of the pool over time, and the rule by which workers on demand follow it.
pub(super) struct Demand {
    /// Rule of workers on demand; `None`: the workers run all the time.
    rule: Option<OnDemand>,
    /// Instant at which a request was last known to be open. In the future while a worker cannot be stopped.
    asked_last: Instant,
}

/// Change of one worker on demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Start the worker: a request waits.
    Start,
    /// Keep the worker, which was to be stopped.
    Keep,
    /// Begin to stop the worker: nobody has asked for `keep_alive`.
    Stop,
}

impl Demand {
    /// Demand for workers that are used from now on.
    pub(super) fn new(rule: Option<OnDemand>, now: Instant) -> Self {
        Self { rule, asked_last: now }
    }

    /// Returns true if workers are started by the first request.
    pub(super) fn has_rule(&self) -> bool {
        self.rule.is_some()
    }

    /// Notes that a request is open at this instant.
    pub(super) fn asked(&mut self, at: Instant) {
        self.asked_last = at;
    }

    /// Time since a request was open last.
    pub(super) fn idle(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.asked_last)
    }

    /// Task of the workers for now. `is_asked`: a request is open, or a call waits for the model.
    pub(super) fn wish(&mut self, is_asked: bool, now: Instant) -> Wish {
        if is_asked {
            self.asked_last = self.asked_last.max(now);
        }
        self.rule.map_or(Wish::Keep, |rule| wish(rule, is_asked, self.idle(now)))
    }
}

impl Wish {
    /// Change of this worker that the wish asks for, if any.
    pub(super) fn change(self, member: &Member) -> Option<Change> {
        match (self, member.seat) {
            (Wish::Run, Seat::Off) => Some(Change::Start),
            (Wish::Run, Seat::Emptying(_)) => Some(Change::Keep),
            (Wish::Stop, Seat::On) if may_stop(member) => Some(Change::Stop),
            _ => None,
        }
    }
}

/// `idle`: time since somebody asked last.
fn wish(rule: OnDemand, is_asked: bool, idle: Duration) -> Wish {
    match rule.keep_alive {
        _ if is_asked => Wish::Run,
        Some(keep_alive) if idle >= keep_alive.max(STAY_MIN) => Wish::Stop,
        _ => Wish::Keep,
    }
}

/// Returns true for a local worker that no operator holds or restarts.
fn may_stop(member: &Member) -> bool {
    member.process.is_some() && member.steering == Steering::Free
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_run_while_somebody_asks_and_for_keep_alive_after() {
        let check = |keep_alive: Option<u64>, is_asked, idle_ms, expected| {
            let rule = OnDemand { keep_alive: keep_alive.map(Duration::from_secs) };
            let idle = Duration::from_millis(idle_ms);
            assert_eq!(wish(rule, is_asked, idle), expected, "{keep_alive:?} {is_asked} {idle_ms}");
        };
        check(Some(5), true, 0, Wish::Run);
        check(Some(5), false, 4_999, Wish::Keep);
        check(Some(5), false, 5_000, Wish::Stop);
        check(Some(0), false, 499, Wish::Keep);
        check(Some(0), false, 500, Wish::Stop);
        check(Some(0), true, 10_000, Wish::Run);
        check(None, false, 1 << 40, Wish::Keep);
    }

    #[test]
    fn each_worker_changes_by_its_seat() {
        let now = Instant::now();
        let check = |wish: Wish, seat, expected| {
            let address = "unix:///tmp/a.sock".parse().expect("an address");
            let mut member = Member::new("a-0".into(), address, true, now);
            member.seat = seat;
            assert_eq!(wish.change(&member), expected, "{wish:?} {seat:?}");
            member.steering = Steering::Held;
            assert_ne!(wish.change(&member), Some(Change::Stop), "an operator holds it");
        };
        check(Wish::Run, Seat::Off, Some(Change::Start));
        check(Wish::Run, Seat::On, None);
        check(Wish::Run, Seat::Emptying(now), Some(Change::Keep));
        check(Wish::Run, Seat::Ending(now), None);
        check(Wish::Stop, Seat::On, Some(Change::Stop));
        check(Wish::Stop, Seat::Off, None);
        check(Wish::Keep, Seat::On, None);
    }

    #[test]
    fn a_use_that_is_still_to_come_keeps_the_workers() {
        let now = Instant::now();
        let minute = Duration::from_secs(60);
        let mut demand = Demand::new(Some(OnDemand { keep_alive: Some(Duration::ZERO) }), now);
        demand.asked(now + minute);
        assert_eq!((demand.wish(true, now), demand.idle(now + minute)), (Wish::Run, Duration::ZERO));
        assert_eq!(demand.wish(false, now + minute), Wish::Keep);
        assert_eq!(demand.wish(false, now + minute + STAY_MIN), Wish::Stop);
        assert_eq!(Demand::new(None, now).wish(false, now + minute), Wish::Keep, "no rule");
    }
}
