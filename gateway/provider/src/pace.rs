//! Pacing of one provider key: requests and tokens per minute, as the provider publishes them.
//!
//! Requests are spaced by GCRA (the `governor` crate); tokens are reserved before a request is sent and settled by the
//! usage of its answer ([`Book`]). A request that does not fit yet waits in a line: client keys take turns, a full line
//! evicts from the key with the most waiting, and a request whose turn is predicted to come too late is refused at
//! once. [`Pace`] is pure, with time as an argument; [`Pacer`] waits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use governor::clock::Clock;
use governor::middleware::NoOpMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use penstock_govern::{Book, Claim, Hold, Measure, Now, Span, Unit};
use tokio::sync::Notify;

use crate::PacingConfig;
use penstock_upstream::Asker;

/// Most requests that wait in the line of one key.
const LINE_MAX: usize = 1024;
/// Burst as a part of the requests per minute: a tenth. The spacing of the others is chosen such that no minute exceeds
/// the published number.
const BURST_PART: u32 = 10;
/// Window that the provider's published rates refer to.
const MINUTE: Duration = Duration::from_secs(60);

type Limiter = RateLimiter<NotKeyed, InMemoryState, Told, NoOpMiddleware<Duration>>;

/// Clock for the limiter that is set to the time of each call.
#[derive(Clone, Debug, Default)]
struct Told(Arc<AtomicU64>);

impl Clock for Told {
    type Instant = Duration;

    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// Request that waits in the line of a provider key for its turn.
#[derive(Debug)]
struct Waiter {
    id: u64,
    asker: Asker,
    tokens: u64,
    /// Round of the waiter: the first waiter of each client key comes before the second of any.
    turn: u64,
    wake: Arc<Notify>,
}

/// Result of joining the line of a key: send, wait, or refused.
#[derive(Debug)]
pub(super) enum Joined {
    /// Send now, with the reservation of tokens.
    Go(Option<Hold>),
    /// Wait; the notification wakes the waiter when it becomes the first.
    Waits(u64, Arc<Notify>),
    /// Refused: the wait would be at least this long.
    Refused(Duration),
}

/// Next step of a request that waits in the line of a key.
#[derive(Debug)]
pub(super) enum Step {
    /// Send now, with the reservation of tokens.
    Go(Option<Hold>),
    /// First in the line: look again after this time.
    Wait(Duration),
    /// Behind others: wait for the notification.
    Behind,
    /// Evicted in favour of another client key.
    Out,
}

/// Pace of one provider key: its limiter of requests, its count of tokens, and the line of waiting requests.
pub(super) struct Pace {
    began: Instant,
    clock: Told,
    requests: Option<Limiter>,
    tokens: Option<(Book, Arc<str>, Measure)>,
    /// Spacing between two requests beyond the burst.
    apart: Duration,
    line: Vec<Waiter>,
    next: u64,
    turn: u64,
    /// Time at which the first in the line can be sent, as of the last look.
    due: Option<Instant>,
}

impl Pace {
    pub(super) fn new(config: &PacingConfig, now: Instant) -> Self {
        let clock = Told::default();
        let count = config.requests_per_minute / config.gateways.max(1);
        let count = if config.requests_per_minute > 0 { count.max(1) } else { 0 };
        let burst = (count / BURST_PART).max(1);
        // A burst, and the rest of a minute's requests at this spacing; one nanosecond more, since the division rounds
        // down.
        let apart = MINUTE / (count.saturating_sub(burst) + 1) + Duration::from_nanos(1);
        let quota = Quota::with_period(apart).zip(std::num::NonZeroU32::new(burst));
        let quota = quota.filter(|_| count > 0).map(|(quota, burst)| quota.allow_burst(burst));
        let tokens = config.tokens_per_minute / u64::from(config.gateways.max(1));
        let measure = Measure { unit: Unit::Tokens, span: Span::Minute, max: tokens.max(1) };
        Self {
            began: now,
            requests: quota.map(|quota| RateLimiter::direct_with_clock(quota, clock.clone())),
            tokens: (config.tokens_per_minute > 0).then(|| (Book::new(), "pace".into(), measure)),
            apart: if count > 0 { apart } else { Duration::ZERO },
            clock,
            line: Vec::new(),
            next: 0,
            turn: 0,
            due: None,
        }
    }

    fn now(&self, now: Instant) -> Now {
        let mono_ms = now.saturating_duration_since(self.began).as_millis() as u64;
        Now { mono_ms, wall_ms: mono_ms }
    }

    /// Takes capacity for one request, or returns the time until there is some.
    fn take(&mut self, tokens: u64, now: Instant) -> Result<Option<Hold>, Duration> {
        let (at, time) = (self.now(now), now.saturating_duration_since(self.began));
        let mut hold = None;
        if let Some((book, limit, measure)) = &mut self.tokens {
            // A request of more than a minute's tokens waits for an empty minute.
            let amount = tokens.min(measure.max);
            let claim = Claim { limit, subject: "", measure: *measure, amount, tag: 0 };
            match book.reserve(&[claim], at) {
                Ok(held) => hold = Some(held),
                Err(denied) => return Err(Duration::from_millis(denied.wait_ms.unwrap_or(1000).max(1))),
            }
        }
        self.clock.0.store(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        let refused = self.requests.as_ref().and_then(|limiter| limiter.check().err());
        match refused {
            None => Ok(hold),
            Some(until) => {
                hold.into_iter().for_each(|hold| self.settle(hold, Some(0), now));
                Err(until.wait_time_from(time).max(Duration::from_millis(1)))
            }
        }
    }

    /// Sends a request at once if nobody waits and there is capacity; else returns the predicted wait of a newcomer.
    pub(super) fn at_once(&mut self, asker: Asker, tokens: u64, now: Instant) -> Result<Option<Hold>, Duration> {
        if !self.line.is_empty() {
            return Err(self.predicted(asker, now));
        }
        self.take(tokens, now)
    }

    /// Predicted wait of a newcomer of that client key.
    fn predicted(&self, asker: Asker, now: Instant) -> Duration {
        let turn = self.turn_of(asker);
        let before = self.line.iter().filter(|waiter| waiter.turn <= turn).count() as u32;
        self.due.map_or(Duration::ZERO, |due| due.saturating_duration_since(now)) + self.apart * before
    }

    fn turn_of(&self, asker: Asker) -> u64 {
        let own = self.line.iter().filter(|waiter| waiter.asker == asker).map(|waiter| waiter.turn).max();
        own.unwrap_or(self.turn).max(self.turn) + 1
    }

    /// Sends a request, or adds it to the line if its turn comes within `limit`.
    pub(super) fn join(&mut self, asker: Asker, tokens: u64, limit: Duration, now: Instant) -> Joined {
        let wait = match self.at_once(asker, tokens, now) {
            Ok(hold) => return Joined::Go(hold),
            Err(wait) => wait,
        };
        if wait > limit || (self.line.len() >= LINE_MAX && !self.make_room(asker)) {
            return Joined::Refused(wait);
        }
        if self.line.is_empty() {
            self.due = Some(now + wait);
        }
        let (id, turn, wake) = (self.next, self.turn_of(asker), Arc::<Notify>::default());
        self.next += 1;
        self.line.push(Waiter { id, asker, tokens, turn, wake: wake.clone() });
        if self.first() == Some(self.line.len() - 1) {
            wake.notify_one();
        }
        Joined::Waits(id, wake)
    }

    /// Evicts the newest waiter of the client key with the most waiters, unless the newcomer's key would then have as
    /// many.
    fn make_room(&mut self, newcomer: Asker) -> bool {
        let count = |asker: Asker| self.line.iter().filter(|waiter| waiter.asker == asker).count();
        let most = self.line.iter().map(|waiter| waiter.asker).max_by_key(|asker| count(*asker));
        let Some(most) = most.filter(|most| count(*most) > count(newcomer) + 1) else { return false };
        if let Some(at) = self.line.iter().rposition(|waiter| waiter.asker == most) {
            self.line.remove(at).wake.notify_one();
        }
        true
    }

    fn first(&self) -> Option<usize> {
        let order = |(_, waiter): &(usize, &Waiter)| (waiter.turn, waiter.id);
        self.line.iter().enumerate().min_by_key(order).map(|(at, _)| at)
    }

    /// Next step of the waiter `id`.
    pub(super) fn step(&mut self, id: u64, now: Instant) -> Step {
        let Some(at) = self.line.iter().position(|waiter| waiter.id == id) else { return Step::Out };
        if self.first() != Some(at) {
            return Step::Behind;
        }
        match self.take(self.line[at].tokens, now) {
            Ok(hold) => {
                self.turn = self.line[at].turn;
                self.line.remove(at);
                self.due = Some(now + self.apart);
                self.wake_first();
                Step::Go(hold)
            }
            Err(wait) => {
                self.due = Some(now + wait);
                Step::Wait(wait)
            }
        }
    }

    /// Removes a waiter that gave up.
    pub(super) fn leave(&mut self, id: u64) {
        if let Some(at) = self.line.iter().position(|waiter| waiter.id == id) {
            self.line.remove(at);
            self.wake_first();
        }
    }

    fn wake_first(&self) {
        if let Some(at) = self.first() {
            self.line[at].wake.notify_one();
        }
    }

    /// Settles a reservation with the tokens used; `None`: unknown, the reserved amount counts.
    pub(super) fn settle(&mut self, hold: Hold, used: Option<u64>, now: Instant) {
        let at = self.now(now);
        if let Some((book, ..)) = &mut self.tokens {
            book.settle(hold, at, |_, _| used);
        }
    }
}

/// Pacer of one key, shared by its requests.
pub(super) struct Pacer {
    pace: Mutex<Pace>,
}

/// Permission to send one request. When dropped, its reservation is settled with the reported tokens, or as reserved.
pub(crate) struct Paced {
    pacer: Arc<Pacer>,
    hold: Option<Hold>,
    used: Option<u64>,
}

/// Place in the line, given up when dropped.
struct Place<'p>(&'p Pacer, u64);

impl Pacer {
    pub(super) fn new(config: &PacingConfig, now: Instant) -> Arc<Self> {
        Arc::new(Self { pace: Mutex::new(Pace::new(config, now)) })
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn paced(self: &Arc<Self>, hold: Option<Hold>) -> Paced {
        Paced { pacer: self.clone(), hold, used: None }
    }

    /// Permission to send now, or the time until there could be one.
    pub(super) fn at_once(self: &Arc<Self>, asker: Asker, tokens: u64) -> Result<Paced, Duration> {
        let taken = self.pace().at_once(asker, tokens, Instant::now());
        taken.map(|hold| self.paced(hold))
    }

    /// Waits for permission to send, at most `limit`; an error is the predicted wait. Dropping the future gives the
    /// place up.
    pub(super) async fn wait(self: &Arc<Self>, asker: Asker, tokens: u64, limit: Duration) -> Result<Paced, Duration> {
        let deadline = Instant::now() + limit;
        let joined = self.pace().join(asker, tokens, limit, Instant::now());
        let (id, wake) = match joined {
            Joined::Go(hold) => return Ok(self.paced(hold)),
            Joined::Refused(wait) => return Err(wait),
            Joined::Waits(id, wake) => (id, wake),
        };
        let place = Place(self, id);
        loop {
            let now = Instant::now();
            let step = self.pace().step(place.1, now);
            let until = match step {
                Step::Go(hold) => return Ok(self.paced(hold)),
                Step::Out => return Err(limit),
                Step::Wait(wait) if now + wait > deadline => return Err(wait),
                Step::Wait(wait) => now + wait,
                Step::Behind => deadline,
            };
            if now >= deadline {
                return Err(self.pace().predicted(asker, now).max(Duration::from_secs(1)));
            }
            tokio::select! {
                () = wake.notified() => {}
                () = tokio::time::sleep_until(until.into()) => {}
            }
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.pace().leave(self.1);
    }
}

impl Paced {
    /// Reports the tokens that the answer used.
    pub(super) fn used(&mut self, tokens: u64) {
        self.used = Some(tokens);
    }
}

impl Drop for Paced {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            self.pacer.pace().settle(hold, self.used, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn pace(requests_per_minute: u32, tokens_per_minute: u64, gateways: u32, now: Instant) -> Pace {
        let config = PacingConfig { requests_per_minute, tokens_per_minute, gateways, wait: Duration::from_secs(5) };
        Pace::new(&config, now)
    }

    fn asker(name: u8) -> Asker {
        Asker::new(&name.to_string(), None)
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn wait(pace: &mut Pace, name: u8, limit: u64, now: Instant) -> Option<u64> {
        match pace.join(asker(name), 0, seconds(limit), now) {
            Joined::Waits(id, _) => Some(id),
            Joined::Go(_) => panic!("at once"),
            Joined::Refused(_) => None,
        }
    }

    #[test]
    fn no_minute_has_more_requests_than_are_published() {
        for (published, gateways, share) in [(1, 1, 1), (2, 1, 2), (60, 1, 60), (500, 1, 500), (500, 4, 125), (3, 5, 1)]
        {
            let start = Instant::now();
            let mut pace = pace(published, 0, gateways, start);
            let mut sent: Vec<u64> = Vec::new();
            for ms in (0..180_000).step_by(20) {
                if pace.at_once(asker(1), 0, start + ms as u32 * MS).is_ok() {
                    sent.push(ms);
                }
            }
            let busiest =
                sent.iter().map(|from| sent.iter().filter(|at| (*from..from + 60_000).contains(at)).count()).max();
            assert!(busiest.is_some_and(|most| most <= share), "{published} / {gateways}: {busiest:?}");
            assert!(
                sent.len() >= share * 5 / 2 - share / 4,
                "{published} / {gateways}: only {} in three minutes",
                sent.len()
            );
        }
    }

    #[test]
    fn tokens_are_reserved_and_settled() {
        let start = Instant::now();
        let mut pace = pace(0, 1000, 1, start);
        let hold = pace.at_once(asker(1), 900, start).expect("it fits").expect("a hold");
        assert!(pace.at_once(asker(1), 200, start).is_err());
        pace.settle(hold, Some(100), start);
        assert!(pace.at_once(asker(1), 900, start).is_ok());
        let later = pace.at_once(asker(1), 5000, start).expect_err("full");
        assert!((seconds(55)..=seconds(62)).contains(&later), "{later:?}");
        assert!(pace.at_once(asker(1), 5000, start + seconds(62)).is_ok(), "more than a minute has gets a whole one");
    }

    #[test]
    fn keys_take_turns_and_whose_turn_comes_too_late_does_not_wait() {
        let start = Instant::now();
        let mut pace = pace(60, 0, 1, start);
        while pace.at_once(asker(1), 0, start).is_ok() {}
        let greedy: Vec<u64> = (0..10).map_while(|_| wait(&mut pace, 1, 5, start)).collect();
        assert!((3..=5).contains(&greedy.len()), "{greedy:?}");
        let modest = wait(&mut pace, 2, 5, start).expect("there is room for another key");
        let mut order = Vec::new();
        for ms in (0..20_000).step_by(10) {
            for id in greedy.iter().chain([&modest]) {
                if matches!(pace.step(*id, start + ms as u32 * MS), Step::Go(_)) {
                    order.push(*id);
                }
            }
        }
        assert_eq!(order.len(), greedy.len() + 1);
        assert_eq!(order.iter().position(|id| *id == modest), Some(1), "behind the first of the other key");
    }

    #[test]
    fn a_full_line_makes_room_for_whoever_has_less_in_it() {
        let start = Instant::now();
        let mut pace = pace(600_000, 0, 1, start);
        while pace.at_once(asker(1), 0, start).is_ok() {}
        let greedy: Vec<u64> = (0..LINE_MAX).map_while(|_| wait(&mut pace, 1, 60, start)).collect();
        assert_eq!((greedy.len(), wait(&mut pace, 1, 60, start)), (LINE_MAX, None));
        assert!(wait(&mut pace, 2, 60, start).is_some());
        assert!(matches!(pace.step(greedy[LINE_MAX - 1], start), Step::Out));
    }

    proptest! {
        /// Property: every waiter is sent or leaves, a leaver delays nobody, and the line never exceeds the key's pace.
        #[test]
        fn everybody_in_line_is_sent_or_leaves(steps in prop::collection::vec((0_u8..4, 0_u64..400, any::<bool>()), 1..120)) {
            let start = Instant::now();
            let mut now = start;
            let mut pace = pace(120, 0, 1, start);
            let mut line = Vec::new();
            for (name, ms, leaves) in steps {
                now += ms as u32 * MS;
                match pace.join(asker(name), 0, seconds(30), now) {
                    Joined::Waits(id, _) if leaves => pace.leave(id),
                    Joined::Waits(id, _) => line.push(id),
                    Joined::Go(_) | Joined::Refused(_) => {}
                }
                line.retain(|id| !matches!(pace.step(*id, now), Step::Go(_)));
            }
            for _ in 0..1000 {
                now += 100 * MS;
                line.retain(|id| !matches!(pace.step(*id, now), Step::Go(_)));
            }
            prop_assert!(line.is_empty() && pace.line.is_empty());
        }
    }

    #[tokio::test]
    async fn who_waits_is_woken_and_who_gives_up_holds_up_nobody() {
        let config = PacingConfig { requests_per_minute: 6000, tokens_per_minute: 0, gateways: 1, wait: seconds(30) };
        let pacer = Pacer::new(&config, Instant::now());
        while pacer.at_once(asker(1), 0).is_ok() {}
        let waiting = |name| {
            let pacer = pacer.clone();
            tokio::spawn(async move { pacer.wait(asker(name), 0, seconds(30)).await.is_ok() })
        };
        let mut all: Vec<_> = (0..20).map(|at| waiting(at % 3)).collect();
        all.remove(0).abort();
        for one in all {
            assert!(tokio::time::timeout(seconds(60), one).await.expect("in time").expect("no panic"));
        }
        assert!(pacer.pace().line.is_empty());
    }
}
