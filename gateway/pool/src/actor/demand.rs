//! Workers on demand: all of a pool's local workers are started when somebody asks, and stopped when nobody has for `keep_alive`.
//!
//! Requests wait in the router's queue while the workers load, as they do when a worker is started again. Before the first load the
//! gateway does not know the model's context, so calls wait in front of the pool, counted in `Mailbox::waking`.

use super::super::config::OnDemand;
use super::super::member::{Member, Seat};
use super::super::steering::Steering;
use super::Actor;
use penstock_router::WorkerId;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tracing::info;

/// Least time that workers stay: the request that has woken them is still on its way from the handler when they are ready.
const STAY_MIN: Duration = Duration::from_millis(500);

/// What the workers of a pool on demand are to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Run,
    Stop,
    /// Go on as they are.
    Keep,
}

impl Actor {
    /// Starts the workers of a pool on demand when somebody asks, and stops them when nobody has for long enough.
    pub(super) fn demand(&mut self, now: Instant) {
        let Some(rule) = self.config.on_demand else { return };
        if self.ending.is_some() || self.replicas.settled.load(Ordering::Relaxed) {
            return;
        }
        // At once, not at the next tick: who asks meanwhile waits for the end.
        self.seats_tick(now);
        let is_asked = !self.requests.is_empty() || self.mailbox.waking.load(Ordering::Relaxed) > 0;
        if is_asked {
            self.asked_last = self.asked_last.max(now);
        }
        let wish = wish(rule, is_asked, now.saturating_duration_since(self.asked_last));
        for worker in self.members.ids() {
            let member = &self.members[worker];
            match (wish, member.seat) {
                (Wish::Run, Seat::Off) => {
                    self.say(worker, "start", "a request waits");
                    self.start_worker(worker);
                }
                (Wish::Run, Seat::Emptying(_)) => self.take_back(worker),
                (Wish::Stop, Seat::On) if may_stop(member) => {
                    self.say(worker, "stop", "nobody has asked for keep_alive");
                    self.empty(worker);
                }
                _ => {}
            }
        }
    }

    fn say(&mut self, worker: WorkerId, what: &str, reason: &str) {
        let name = self.members[worker].name.clone();
        info!(pool = %self.config.id, worker = %name, what, reason, "worker on demand");
        self.tell_last(format!("{what} {name}: {reason}"), reason);
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
}
