//! Pacing of one provider key: requests and tokens per minute, as the provider publishes them.
//!
//! Requests are spaced by GCRA (the `governor` crate); tokens are reserved before a request is sent and settled by the
//! usage of its answer ([`Book`]). A request that does not fit yet waits in a line: client keys take turns, a full line
//! evicts from the key with the most waiting, and a request whose turn is predicted to come too late is refused at
//! once. Extra attempts (retries and hedges) come last and leave three quarters of the burst and a quarter of the tokens
//! untouched: a client key whose requests fail takes no more of the rate than one whose requests succeed. [`Pace`] is pure,
//! with time as an argument; `Pacer` waits.
//!
//! Gateways that count together ([`SharedPace`]) each pace at the published rate, and ask the shared counters before they
//! send. A gateway without them, or whose counters are away, paces at its part ([`Part`]).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use governor::clock::Clock;
use governor::middleware::StateInformationMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use penstock_govern::{Book, Claim, Hold, Measure, Now, Span, Unit};
use tokio::sync::Notify;

use crate::PacingConfig;
use crate::shared_pace::{SharedAnswer, SharedAsk, SharedHold, SharedPace};
use penstock_upstream::Asker;

/// Most requests that wait in the line of one key.
const LINE_MAX: usize = 1024;
/// Burst as a part of the requests per minute: a tenth. The spacing of the others is chosen such that no minute exceeds
/// the published number.
const BURST_PART: u32 = 10;
/// Window that the provider's published rates refer to.
const MINUTE: Duration = Duration::from_secs(60);
/// Least and longest time between two questions to shared counters whose minute is full.
const AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));

/// Longest wait of a request for its turn, from `now`: `wait`, or less where the first token or the whole answer is due
/// sooner. Half of the time to the first token is left to the provider: a request that used up all of it in the queue would
/// be cut off unanswered.
pub fn patience(wait: Duration, first_by: Option<Instant>, deadline: Option<Instant>, now: Instant) -> Duration {
    let left = |by: Instant| by.saturating_duration_since(now);
    let first = first_by.map(|by| left(by) / 2);
    first.into_iter().chain(deadline.map(left)).fold(wait, Duration::min)
}

type Limiter = RateLimiter<NotKeyed, InMemoryState, Told, StateInformationMiddleware>;

/// Part of a rate (numerator, denominator) that first attempts have to themselves: an extra attempt is sent only if this
/// part of the burst is there, and if it leaves this part of the minute's tokens.
const FIRSTS: (u32, u32) = (3, 4);

/// Clock for the limiter that is set to the time of each call.
#[derive(Clone, Debug, Default)]
struct Told(Arc<AtomicU64>);

impl Clock for Told {
    type Instant = Duration;

    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// Request that asks for its turn at a pace.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Client key, for fairness among client keys.
    pub asker: Asker,
    /// Estimated tokens of prompt and answer.
    pub tokens: u64,
    /// True for a retry or a hedge, which takes only what first attempts leave.
    pub is_extra: bool,
}

impl Request {
    /// Part of a minute's amount that may be in use with this request: all of it, or for an extra attempt what it need not
    /// leave to first attempts, but never less than the request itself needs.
    pub(crate) fn most_of(&self, max: u64, needed: u64) -> u64 {
        let most = max * u64::from(FIRSTS.0) / u64::from(FIRSTS.1);
        if self.is_extra { most.max(needed).min(max) } else { max }
    }
}

/// Request that waits in the line of a provider key for its turn.
#[derive(Debug)]
struct Waiter {
    id: u64,
    request: Request,
    /// Round of the waiter: the first waiter of each client key comes before the second of any. Extra attempts have
    /// rounds of their own, behind all others.
    turn: u64,
    wake: Arc<Notify>,
}

impl Waiter {
    /// Place in the line, compared with those of others: extra attempts come after all first ones.
    fn place(&self) -> (bool, u64) {
        (self.request.is_extra, self.turn)
    }

    /// Returns true if a request of this kind and client key comes behind this one in any case.
    fn is_in_row(&self, other: Request) -> bool {
        (self.request.asker, self.request.is_extra) == (other.asker, other.is_extra)
    }
}

/// Result of joining the line of a key: send, wait, or refused.
#[derive(Debug)]
pub enum Joined {
    /// Send now, with the reservation of tokens.
    Go(Option<Hold>),
    /// Wait; the notification wakes the waiter when it becomes the first.
    Waits(u64, Arc<Notify>),
    /// Refused: the wait would be at least this long.
    Refused(Duration),
}

/// Next step of a request that waits in the line of a key.
#[derive(Debug)]
pub enum Step {
    /// Send now, with the reservation of tokens.
    Go(Option<Hold>),
    /// First in the line: look again after this time.
    Wait(Duration),
    /// Behind others: wait for the notification.
    Behind,
    /// Evicted in favour of another client key.
    Out,
}

/// Part of the published rate that this gateway may use by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it: the shared counters are asked too.
    Whole,
    /// The part of one of `pace_gateways`.
    Own,
}

/// Rate at which one gateway uses a key.
struct Rate {
    requests: Option<Limiter>,
    burst: u32,
    /// Time of the last request, since the start of the pace, and what it left of the burst.
    left: (Duration, u32),
    /// Spacing between two requests beyond the burst.
    apart: Duration,
    tokens: Option<Measure>,
}

impl Rate {
    fn new(config: &PacingConfig, gateways: u32, clock: &Told) -> Self {
        let count = config.requests_per_minute / gateways.max(1);
        let count = if config.requests_per_minute > 0 { count.max(1) } else { 0 };
        let burst = (count / BURST_PART).max(1);
        // A burst, and the rest of a minute's requests at this spacing; one nanosecond more, since the division rounds
        // down.
        let apart = MINUTE / (count.saturating_sub(burst) + 1) + Duration::from_nanos(1);
        let quota = Quota::with_period(apart).zip(std::num::NonZeroU32::new(burst));
        let quota = quota.filter(|_| count > 0).map(|(quota, burst)| quota.allow_burst(burst));
        let max = (config.tokens_per_minute / u64::from(gateways.max(1))).max(1);
        Self {
            requests: quota.map(|quota| {
                RateLimiter::direct_with_clock(quota, clock.clone()).with_middleware::<StateInformationMiddleware>()
            }),
            burst,
            left: (Duration::ZERO, burst),
            apart: if count > 0 { apart } else { Duration::ZERO },
            tokens: (config.tokens_per_minute > 0).then_some(Measure { unit: Unit::Tokens, span: Span::Minute, max }),
        }
    }

    /// Time until so much of the burst is there that an extra attempt may be sent.
    fn until_spare(&self, time: Duration) -> Duration {
        let needed = (self.burst * FIRSTS.0).div_ceil(FIRSTS.1);
        let (at, left) = self.left;
        (at + self.apart * needed.saturating_sub(left)).saturating_sub(time)
    }

    /// Sends one request, or returns the time until it could be sent. `time`: since the start of the pace.
    fn send(&mut self, is_extra: bool, time: Duration) -> Result<(), Duration> {
        let Some(limiter) = &self.requests else { return Ok(()) };
        let wait = if is_extra { self.until_spare(time) } else { Duration::ZERO };
        if !wait.is_zero() {
            return Err(wait);
        }
        match limiter.check() {
            Ok(state) => self.left = (time, state.remaining_burst_capacity()),
            Err(until) => return Err(until.wait_time_from(time).max(Duration::from_millis(1))),
        }
        Ok(())
    }
}

/// Pace of one provider key: its limiter of requests, its count of tokens, and the line of waiting requests.
pub struct Pace {
    began: Instant,
    clock: Told,
    whole: Rate,
    own: Rate,
    tokens: (Book, Arc<str>),
    /// Time until which the shared counters are not asked again for first attempts, and for extra ones: their minute had no
    /// room.
    shut: [Option<Instant>; 2],
    line: Vec<Waiter>,
    next: u64,
    turn: u64,
    /// Time at which the first in the line can be sent, as of the last look.
    due: Option<Instant>,
}

impl Pace {
    /// A pace at which nothing was sent yet.
    pub fn new(config: &PacingConfig, now: Instant) -> Self {
        let clock = Told::default();
        Self {
            began: now,
            whole: Rate::new(config, 1, &clock),
            own: Rate::new(config, config.gateways, &clock),
            tokens: (Book::new(), "pace".into()),
            clock,
            shut: [None; 2],
            line: Vec::new(),
            next: 0,
            turn: 1,
            due: None,
        }
    }

    fn rate(&self, part: Part) -> &Rate {
        match part {
            Part::Whole => &self.whole,
            Part::Own => &self.own,
        }
    }

    fn rate_mut(&mut self, part: Part) -> &mut Rate {
        match part {
            Part::Whole => &mut self.whole,
            Part::Own => &mut self.own,
        }
    }

    fn now(&self, now: Instant) -> Now {
        let mono_ms = now.saturating_duration_since(self.began).as_millis() as u64;
        Now { mono_ms, wall_ms: mono_ms }
    }

    /// Takes capacity for one request, or returns the time until there is some.
    fn take(&mut self, request: Request, part: Part, now: Instant) -> Result<Option<Hold>, Duration> {
        let (at, time) = (self.now(now), now.saturating_duration_since(self.began));
        let shut = self.shut[usize::from(request.is_extra)].max(self.shut[0]).filter(|_| part == Part::Whole);
        if let Some(until) = shut
            && until > now
        {
            return Err(until - now);
        }
        let mut hold = None;
        if let Some(mut measure) = self.rate(part).tokens {
            // A request of more than a minute's tokens waits for an empty minute.
            let amount = request.tokens.min(measure.max);
            measure.max = request.most_of(measure.max, amount);
            let (book, limit) = &mut self.tokens;
            let claim = Claim { limit, subject: "", measure, amount, tag: 0 };
            match book.reserve(&[claim], at) {
                Ok(held) => hold = Some(held),
                Err(denied) => return Err(Duration::from_millis(denied.wait_ms.unwrap_or(1000).max(1))),
            }
        }
        self.clock.0.store(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        let sent = self.rate_mut(part).send(request.is_extra, time);
        if sent.is_err() {
            hold.take().into_iter().for_each(|hold| self.settle(hold, Some(0), now));
        }
        sent.map(|()| hold)
    }

    /// Notes that all gateways together have left no room for such a request in the last minute; returns the time until
    /// they are asked again.
    fn full(&mut self, request: Request, now: Instant) -> Duration {
        let wait = self.whole.apart.clamp(AGAIN.0, AGAIN.1);
        self.shut[usize::from(request.is_extra)] = Some(now + wait);
        if !request.is_extra {
            self.due = self.due.max(Some(now + wait));
        }
        wait
    }

    /// Sends a request at once if nobody waits before it and there is capacity; else returns its predicted wait.
    pub(super) fn at_once(&mut self, request: Request, part: Part, now: Instant) -> Result<Option<Hold>, Duration> {
        if !self.is_next(request) {
            return Err(self.predicted(request, part, now));
        }
        self.take(request, part, now)
    }

    /// Returns true if nobody in the line comes before this newcomer.
    fn is_next(&self, newcomer: Request) -> bool {
        self.line.iter().all(|waiter| waiter.request.is_extra && !newcomer.is_extra)
    }

    /// Predicted wait of a newcomer.
    fn predicted(&self, newcomer: Request, part: Part, now: Instant) -> Duration {
        let (place, rate) = ((newcomer.is_extra, self.turn_of(newcomer)), self.rate(part));
        let before = self.line.iter().filter(|waiter| waiter.place() <= place).count() as u32;
        let first = self.due.map_or(Duration::ZERO, |due| due.saturating_duration_since(now));
        let spare = rate.until_spare(now.saturating_duration_since(self.began));
        let first = if newcomer.is_extra { first.max(spare) } else { first };
        first + rate.apart * before
    }

    fn turn_of(&self, newcomer: Request) -> u64 {
        let own = self.line.iter().filter(|waiter| waiter.is_in_row(newcomer)).map(|waiter| waiter.turn).max();
        own.unwrap_or(self.turn).max(self.turn) + 1
    }

    /// Longest wait of a request: `limit`, or the spacing of two requests for an extra attempt. First attempts go before it
    /// meanwhile, so that a longer wait would mostly be in vain, and the request can be asked elsewhere.
    pub fn longest_wait(&self, request: Request, limit: Duration, part: Part) -> Duration {
        if request.is_extra { limit.min(self.rate(part).apart) } else { limit }
    }

    /// Sends a request, or adds it to the line if its turn comes within `limit` ([`Pace::longest_wait`]).
    pub fn join(&mut self, request: Request, limit: Duration, part: Part, now: Instant) -> Joined {
        let limit = self.longest_wait(request, limit, part);
        let is_next = self.is_next(request);
        let wait = match self.at_once(request, part, now) {
            Ok(hold) => return Joined::Go(hold),
            Err(wait) => wait,
        };
        let is_full = self.line.len() >= LINE_MAX;
        if wait > limit || (is_full && (request.is_extra || !self.make_room(request.asker))) {
            return Joined::Refused(wait);
        }
        if is_next {
            self.due = Some(now + wait);
        }
        let (id, wake) = self.queue(request, self.turn_of(request));
        Joined::Waits(id, wake)
    }

    fn queue(&mut self, request: Request, turn: u64) -> (u64, Arc<Notify>) {
        let (id, wake) = (self.next, Arc::<Notify>::default());
        self.next += 1;
        self.line.push(Waiter { id, request, turn, wake: wake.clone() });
        if self.first() == Some(self.line.len() - 1) {
            wake.notify_one();
        }
        (id, wake)
    }

    /// Puts a request that was let go back to the front of the line: all gateways together had no room for it.
    fn put_back(&mut self, request: Request) -> (u64, Arc<Notify>) {
        self.queue(request, self.turn.saturating_sub(1))
    }

    /// Evicts the newest waiter of the client key with the most waiters, unless the newcomer's key would then have as many.
    fn make_room(&mut self, newcomer: Asker) -> bool {
        let mut counts = HashMap::new();
        for waiter in &self.line {
            *counts.entry(waiter.request.asker).or_insert(0_usize) += 1;
        }
        let own = counts.get(&newcomer).copied().unwrap_or(0);
        let most = counts.iter().max_by_key(|(asker, count)| (**count, **asker));
        let Some(most) = most.filter(|(_, count)| **count > own + 1).map(|(asker, _)| *asker) else { return false };
        if let Some(at) = self.line.iter().rposition(|waiter| waiter.request.asker == most) {
            self.line.remove(at).wake.notify_one();
        }
        true
    }

    fn first(&self) -> Option<usize> {
        let order = |(_, waiter): &(usize, &Waiter)| (waiter.place(), waiter.id);
        self.line.iter().enumerate().min_by_key(order).map(|(at, _)| at)
    }

    /// Next step of the waiter `id`.
    pub fn step(&mut self, id: u64, part: Part, now: Instant) -> Step {
        let Some(at) = self.line.iter().position(|waiter| waiter.id == id) else { return Step::Out };
        if self.first() != Some(at) {
            return Step::Behind;
        }
        match self.take(self.line[at].request, part, now) {
            Ok(hold) => {
                self.turn = self.turn.max(self.line[at].turn);
                self.line.remove(at);
                self.due = Some(now + self.rate(part).apart);
                self.wake_first();
                Step::Go(hold)
            }
            Err(wait) => {
                self.due = Some(now + wait);
                Step::Wait(wait)
            }
        }
    }

    /// Removes a waiter that gave up. Each later request of the same client key moves up by one turn; otherwise a client key
    /// whose requests give up would lose its turns to keys whose requests can wait longer.
    pub fn leave(&mut self, id: u64) {
        let Some(at) = self.line.iter().position(|waiter| waiter.id == id) else { return };
        let gone = self.line.remove(at);
        let is_behind = |waiter: &&mut Waiter| waiter.is_in_row(gone.request) && waiter.turn > gone.turn;
        let mut behind: Vec<&mut Waiter> = self.line.iter_mut().filter(is_behind).collect();
        behind.sort_unstable_by_key(|waiter| waiter.turn);
        let mut turn = gone.turn;
        for waiter in behind {
            turn = std::mem::replace(&mut waiter.turn, turn);
        }
        self.wake_first();
    }

    fn wake_first(&self) {
        if let Some(at) = self.first() {
            self.line[at].wake.notify_one();
        }
    }

    /// Settles a reservation with the tokens used; `None`: unknown, the reserved amount counts.
    pub fn settle(&mut self, hold: Hold, used: Option<u64>, now: Instant) {
        let at = self.now(now);
        self.tokens.0.settle(hold, at, |_, _| used);
    }
}

/// Pacer of one key, shared by its requests.
pub(super) struct Pacer {
    pace: Mutex<Pace>,
    config: PacingConfig,
}

/// Counters that gateways share, and the name of the key in them.
#[derive(Clone, Copy)]
pub(super) struct Together<'a> {
    pub(super) counters: &'a dyn SharedPace,
    pub(super) key: &'a str,
}

/// Permission to send one request. When dropped, its reservation is settled with the reported tokens, or as reserved.
pub(crate) struct Paced {
    pacer: Arc<Pacer>,
    hold: Option<Hold>,
    shared: Option<Box<dyn SharedHold>>,
    /// False until the permission is complete: a request that was never let go has used nothing.
    is_sent: bool,
    used: Option<u64>,
}

/// Place in the line, given up when dropped.
struct Place<'p>(&'p Pacer, u64);

impl Pacer {
    pub(super) fn new(config: &PacingConfig, now: Instant) -> Arc<Self> {
        Arc::new(Self { pace: Mutex::new(Pace::new(config, now)), config: *config })
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Completes the permission that this gateway has given to itself by asking the others.
    ///
    /// # Errors
    /// The time until they can be asked again.
    async fn agreed(
        self: &Arc<Self>,
        hold: Option<Hold>,
        request: Request,
        together: Option<Together<'_>>,
        part: Part,
    ) -> Result<Paced, Duration> {
        let mut paced = Paced { pacer: self.clone(), hold, shared: None, is_sent: false, used: Some(0) };
        if let (Part::Whole, Some(Together { counters, key })) = (part, together) {
            match counters.take(&SharedAsk::new(key, &self.config, request)).await {
                SharedAnswer::Counted(shared) => paced.shared = Some(shared),
                SharedAnswer::Full => return Err(self.pace().full(request, Instant::now())),
                SharedAnswer::Away(shared) => {
                    paced.shared = Some(shared);
                    let now = Instant::now();
                    let mut pace = self.pace();
                    paced.hold.take().into_iter().for_each(|hold| pace.settle(hold, Some(0), now));
                    let own = pace.take(request, Part::Own, now);
                    drop(pace);
                    paced.hold = own?;
                }
            }
        }
        (paced.is_sent, paced.used) = (true, None);
        Ok(paced)
    }

    /// Permission to send now, or the time until there could be one.
    pub(super) async fn at_once(
        self: &Arc<Self>,
        request: Request,
        together: Option<Together<'_>>,
    ) -> Result<Paced, Duration> {
        let part = part(together);
        let taken = self.pace().at_once(request, part, Instant::now());
        self.agreed(taken?, request, together, part).await
    }

    /// Waits for permission to send, at most `limit`; an error is the predicted wait. Dropping the future gives the
    /// place up.
    pub(super) async fn wait(
        self: &Arc<Self>,
        request: Request,
        limit: Duration,
        together: Option<Together<'_>>,
    ) -> Result<Paced, Duration> {
        let limit = self.pace().longest_wait(request, limit, part(together));
        let deadline = Instant::now() + limit;
        let joined = self.pace().join(request, limit, part(together), Instant::now());
        let (id, mut wake) = match joined {
            Joined::Go(hold) => match self.agreed(hold, request, together, part(together)).await {
                Ok(paced) => return Ok(paced),
                Err(_) => self.pace().put_back(request),
            },
            Joined::Refused(wait) => return Err(wait),
            Joined::Waits(id, wake) => (id, wake),
        };
        let mut place = Place(self, id);
        loop {
            let (now, part) = (Instant::now(), part(together));
            let step = self.pace().step(place.1, part, now);
            let until = match step {
                Step::Go(hold) => match self.agreed(hold, request, together, part).await {
                    Ok(paced) => return Ok(paced),
                    Err(_) => {
                        (place.1, wake) = self.pace().put_back(request);
                        continue;
                    }
                },
                Step::Out => return Err(limit),
                Step::Wait(wait) if now + wait > deadline => return Err(wait),
                Step::Wait(wait) => now + wait,
                Step::Behind => deadline,
            };
            if now >= deadline {
                return Err(self.pace().predicted(request, part, now).max(Duration::from_secs(1)));
            }
            tokio::select! {
                () = wake.notified() => {}
                () = tokio::time::sleep_until(until.into()) => {}
            }
        }
    }
}

/// Part of the rate that is this gateway's while its shared counters answer, or do not.
fn part(together: Option<Together<'_>>) -> Part {
    if together.is_some_and(|together| together.counters.is_up()) { Part::Whole } else { Part::Own }
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
        if let Some(shared) = self.shared.take() {
            shared.settle(self.is_sent, self.used);
        }
    }
}

#[cfg(test)]
mod tests;
