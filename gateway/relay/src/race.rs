//! The attempts of one request until one of them emits its first token.
//!
//! One attempt runs, two while a hedge is in flight. An attempt is lost when it fails, ends without an answer, or
//! exceeds the first-token timeout (which does not run while it waits for the upstream's pace); its events so far are
//! discarded, since none has gone out. The next target is chosen by [`Race::after`] alone. Time is an argument:
//! [`Race::due`] says when to poll again.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use penstock_proto::ErrorKind;
use penstock_types::{ChatEvent, FaultClass, ProviderFault};

use super::bill::UNHELD;
use super::core::{Asked, Choice, Core, Reach};
use super::prefix::{Prefix, Share};
use super::target::Permit;
use super::verdict::{Health, Reason, Verdict, judge, rank};
use penstock_base::error::Failure;
use penstock_telemetry::access_log::millis;
use penstock_telemetry::{Attempt, Metric};
use penstock_upstream::call::Call;
use penstock_upstream::lane::Why;
use penstock_upstream::{Events, Facts, Open, Origin, Sent, Waited};

/// Backoff before the same target is asked again: longer than a refused connection takes, shorter than a person notices.
const PAUSE: Duration = Duration::from_millis(100);

type Opening = Pin<Box<dyn Future<Output = Result<Box<dyn Events>, Failure>> + Send>>;

enum Stage {
    Opening(Opening),
    Live(Box<dyn Events>),
}

/// Part that an attempt plays in its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The first attempt, or one at the fallback list.
    Ordinary,
    /// An attempt after a failure, paid by the retry budget.
    Retry,
    /// A second attempt beside one that has not answered, paid by the retry budget.
    Hedge,
}

/// One attempt that has not emitted a token yet.
struct Runner {
    index: usize,
    stage: Stage,
    permit: Permit,
    began: Instant,
    role: Role,
    said: Vec<ChatEvent>,
    sent: Sent,
    waited: Waited,
}

/// Attempt that emitted the first token; the others are dropped.
pub(super) struct Winner {
    pub(super) index: usize,
    pub(super) events: Box<dyn Events>,
    pub(super) permit: Permit,
    pub(super) said: Vec<ChatEvent>,
    pub(super) more: bool,
}

/// Next step of the race when no attempt runs.
#[derive(Clone, Copy, Debug)]
enum Next {
    /// Ask the first target: none was asked yet.
    First,
    /// Ask the target with this index in this role, for this reason of the failure before.
    Start(usize, Role, Option<Reason>),
    /// Ask the same target again at this instant, after a backoff.
    Again(usize, Instant),
    /// Fail the request: no target may be asked any more.
    GiveUp,
}

/// Lost attempt, as far as it decides about the next one.
#[derive(Clone, Copy, Debug)]
struct Lost {
    index: usize,
    verdict: Verdict,
    next: Cost,
}

/// Price of an attempt at an equal target after a lost one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cost {
    /// A retry of the budget.
    Retry,
    /// None: the lost attempt is a retry that was paid, and was sent nothing.
    Paid,
    /// None: the target was at its limit and was sent nothing, so that going on adds no load and counts as no retry.
    Free,
}

/// Results of the work before the first attempt.
#[derive(Default)]
pub(super) struct RaceStart {
    /// Estimates of the prompt's prefix in each target's cache; `None`: not `cache_aware`.
    pub(super) prefix: Option<Prefix>,
    /// Start of the call at the first target, where that has measured it.
    pub(super) first: Option<Box<dyn Open>>,
}

/// Race of the attempts at one request, until one emits a token or none is left.
pub(super) struct Race {
    core: Arc<Core>,
    call: Arc<Call>,
    origin: Origin,
    /// Id of the client's key (its tenant), for the log.
    key: Arc<str>,
    asked: Asked,
    prefix: Option<Prefix>,
    /// Start of the call at the first target, once.
    first: Option<Box<dyn Open>>,
    running: Vec<Runner>,
    next: Next,
    /// First attempt that was lost while its hedge ran.
    outlived: Option<Lost>,
    /// Failed attempt that the last retry repeats.
    repeated: Option<Lost>,
    /// Bitmask of the targets tried, by index.
    tried: u32,
    retries: u32,
    /// Instant at which a second target is asked too; `None`: no hedge.
    hedge_at: Option<Instant>,
    deadline: Option<Instant>,
    /// Failure with the highest [`rank`], for the client.
    told: Option<Failure>,
    /// Shortest Retry-After that a target has asked for so far.
    soonest: Option<Duration>,
    /// Ids of the targets of abandoned hedges, which may bill too.
    hedged: Vec<Arc<str>>,
    attempts: Vec<Attempt>,
}

impl Race {
    pub(super) fn new(core: Arc<Core>, call: Arc<Call>, origin: Origin, ready: RaceStart, now: Instant) -> Self {
        let RaceStart { prefix, first } = ready;
        let asked = core.asked(&call, &origin, prefix.as_ref());
        core.earn(asked.who.asker, now);
        Self {
            hedge_at: core.rules.hedge_after.map(|after| now + after),
            retries: core.rules.retries,
            next: Next::First,
            outlived: None,
            repeated: None,
            running: Vec::with_capacity(1),
            tried: 0,
            told: None,
            soonest: None,
            hedged: Vec::new(),
            attempts: Vec::with_capacity(1),
            core,
            call,
            asked,
            prefix,
            first,
            deadline: origin.deadline,
            key: origin.tenant.as_str().into(),
            origin,
        }
    }

    /// Predicted cached part of the prompt at a target.
    pub(super) fn share(&self, index: usize) -> Option<Share> {
        self.prefix.as_ref()?.share(index)
    }

    /// Token counts of the attempt that runs, for the log, as `read` takes them.
    pub(super) fn facts(&self, read: impl FnOnce(&dyn Events) -> Facts) -> Facts {
        match self.running.first().map(|runner| &runner.stage) {
            Some(Stage::Live(events)) => read(events.as_ref()),
            Some(Stage::Opening(_)) | None => Facts::default(),
        }
    }

    /// All attempts for the log; those still running count as abandoned.
    pub(super) fn attempts(&self, now: Instant) -> Vec<Attempt> {
        let running = self.running.iter().map(|runner| runner.note("abandoned", 0, now));
        self.attempts.iter().cloned().chain(running).collect()
    }

    /// Ids of the targets of abandoned hedges, which may bill too.
    pub(super) fn hedged(&self) -> &[Arc<str>] {
        &self.hedged
    }

    /// Polls the attempts until one emits a token or no target is left.
    pub(super) fn poll(&mut self, context: &mut Context<'_>, now: Instant) -> Poll<Result<Winner, Failure>> {
        loop {
            if self.deadline.is_some_and(|deadline| now >= deadline) {
                return Poll::Ready(Err(self.late(now)));
            }
            if self.running.is_empty() && !self.start_next(now) {
                return Poll::Ready(Err(self.give_up(now)));
            }
            if let Some(winner) = self.poll_runners(context, now) {
                return Poll::Ready(Ok(winner));
            }
            let waits = !self.running.is_empty() || matches!(self.next, Next::Again(..));
            if waits && !self.hedge(now) && self.due().is_none_or(|due| due > now) {
                return Poll::Pending;
            }
        }
    }

    /// Starts the next attempt when it is due; false when there is none.
    fn start_next(&mut self, now: Instant) -> bool {
        if let Next::First = self.next {
            self.next = self.first(now);
        }
        match self.next {
            Next::First | Next::GiveUp => return false,
            Next::Again(_, at) if now < at => return true,
            Next::Start(index, role, reason) => {
                if self.core.fallback().contains(&index) {
                    let reason = reason.map_or("ejected", Reason::name);
                    self.core.count(Metric::Fallbacks, &[("reason", reason)]);
                }
                self.start(index, role, now);
            }
            Next::Again(index, _) => self.start(index, Role::Retry, now),
        }
        true
    }

    fn start(&mut self, index: usize, role: Role, now: Instant) {
        self.tried |= 1 << index;
        self.next = Next::GiveUp;
        let target = &self.core.targets[index];
        let need = (self.asked.size.stream, self.asked.own_tokens(index));
        let permit = target.enter(self.asked.who, &self.key, now, need);
        if let Some(prefix) = &self.prefix {
            prefix.goes_to(&self.core, index, now);
        }
        let (sent, waited) = (Sent::default(), Waited::default());
        let (upstream, call) = (target.upstream.clone(), self.call.clone());
        let first_by = self.core.silent_at(now, self.asked);
        let is_extra = role != Role::Ordinary;
        let origin = Origin { sent: sent.clone(), waited: waited.clone(), first_by, is_extra, ..self.origin.clone() };
        let first = if index == 0 { self.first.take() } else { None };
        let stage = Stage::Opening(Box::pin(async move {
            match first {
                Some(first) => first.open(call, origin).await,
                None => upstream.open(call, origin).await,
            }
        }));
        self.running.push(Runner { index, stage, permit, began: now, role, said: Vec::new(), sent, waited });
    }

    /// Polls the running attempts; a lost one is removed and judged.
    fn poll_runners(&mut self, context: &mut Context<'_>, now: Instant) -> Option<Winner> {
        let mut at = 0;
        while let Some(runner) = self.running.get_mut(at) {
            let failure = match runner.poll(context) {
                Poll::Ready(Ok(more)) => return self.win(at, more, now),
                Poll::Ready(Err(failure)) => failure,
                Poll::Pending if self.core.silent_at(runner.asked_at(), self.asked).is_some_and(|at| now >= at) => {
                    timeout("The upstream did not begin to answer in time.")
                }
                Poll::Pending => {
                    at += 1;
                    continue;
                }
            };
            let loser = self.running.remove(at);
            self.lose(loser, failure, now);
        }
        None
    }

    fn win(&mut self, at: usize, more: bool, now: Instant) -> Option<Winner> {
        let mut runner = self.running.swap_remove(at);
        runner.permit.answered(now);
        self.note(&runner, "answered", 0, now);
        for loser in std::mem::take(&mut self.running) {
            self.note(&loser, "overtaken", 0, now);
            self.hedged.push(loser.permit.target.id.clone());
            self.core.count(Metric::Hedges, &[("outcome", if runner.role == Role::Hedge { "won" } else { "lost" })]);
        }
        let Runner { index, stage: Stage::Live(events), permit, said, .. } = runner else { return None };
        Some(Winner { index, events, permit, said, more })
    }

    fn lose(&mut self, mut loser: Runner, failure: Failure, now: Instant) {
        let verdict = judge(&failure);
        settle(&mut loser.permit, &failure, verdict, now);
        let status = failure.upstream.as_ref().map_or_else(|| failure.status(), |upstream| upstream.status);
        let outcome = if failure.is_unheld() { UNHELD } else { verdict.reason.map_or("refused", Reason::name) };
        self.note(&loser, outcome, status, now);
        if !loser.sent.get() && verdict.reason == Some(Reason::RateLimit) && loser.role != Role::Ordinary {
            self.lose_unsent(&loser, now);
            return;
        }
        let is_free = !loser.sent.get() && verdict.reason == Some(Reason::RateLimit);
        let lost = Lost { index: loser.index, verdict, next: if is_free { Cost::Free } else { Cost::Retry } };
        self.soonest = self.soonest.into_iter().chain(failure.retry_after).min();
        // A hedge that its target refused says nothing of the first attempt, which may have failed before it.
        let is_hedge = loser.role == Role::Hedge;
        let is_refused_hedge = is_hedge && !failure.is_unheld() && !verdict.reason.is_some_and(Reason::is_target_fault);
        if self.told.as_ref().is_none_or(|told| rank(&failure) >= rank(told)) {
            self.told = Some(failure);
        }
        if !is_hedge {
            self.drop_hedges(verdict.reason.is_none(), now);
        }
        if !self.running.is_empty() {
            self.outlived = (!is_hedge).then_some(lost);
            return;
        }
        if self.told.as_ref().is_some_and(Failure::is_unheld) {
            // An answer was made that found no room: another one would be billed again, and might find none either.
            self.next = Next::GiveUp;
            return;
        }
        let first = self.outlived.take().filter(|_| is_refused_hedge);
        self.next = first.map_or(Next::GiveUp, |first| self.after(first, now));
        if let Next::GiveUp = self.next {
            self.next = self.after(lost, now);
        }
    }

    /// Goes on after a retry or hedge that found no turn at its target's pace: as if it had not been made. The failure that
    /// it repeats decides what follows and what the client is told.
    fn lose_unsent(&mut self, loser: &Runner, now: Instant) {
        let before = match loser.role {
            Role::Hedge => {
                self.tried &= !(1 << loser.index);
                self.outlived.take()
            }
            Role::Retry | Role::Ordinary => {
                self.drop_hedges(false, now);
                self.repeated.map(|before| Lost { next: Cost::Paid, ..before })
            }
        };
        if self.running.is_empty() {
            self.next = before.map_or(Next::GiveUp, |before| self.after(before, now));
        } else if loser.role != Role::Hedge {
            self.outlived = before;
        }
    }

    /// Drops the hedges of a first attempt that has failed: all of them where the request itself is at fault, and those
    /// that wait for the pace of their target, whom the request can now ask as its next one.
    fn drop_hedges(&mut self, is_at_fault: bool, now: Instant) {
        let (dropped, kept) = std::mem::take(&mut self.running)
            .into_iter()
            .partition(|hedge: &Runner| is_at_fault || hedge.waited.is_waiting());
        self.running = kept;
        for hedge in dropped {
            self.note(&hedge, "abandoned", 0, now);
            self.tried &= !(1 << hedge.index);
        }
    }

    fn first(&mut self, now: Instant) -> Next {
        match self.core.first(0, self.asked, now) {
            Choice::Target(index) => Next::Start(index, Role::Ordinary, None),
            Choice::None(until) => self.none(until, now),
        }
    }

    /// Next step after a failure: an equal target within the retries, then the fallback list.
    fn after(&mut self, lost: Lost, now: Instant) -> Next {
        let Lost { index, verdict, next } = lost;
        let Some(reason) = verdict.reason else { return Next::GiveUp };
        if reason.is_target_fault()
            && (self.retries > 0 || next != Cost::Retry)
            && self.core.tier().contains(&index)
            && let Some(next) = self.retry(lost, now)
        {
            return next;
        }
        if !self.core.rules.fallback_on.contains(&reason) {
            return Next::GiveUp;
        }
        match self.core.any_fallback(self.tried, self.asked, now) {
            Choice::Target(index) => Next::Start(index, Role::Ordinary, Some(reason)),
            Choice::None(until) => self.none(until, now),
        }
    }

    fn retry(&mut self, lost: Lost, now: Instant) -> Option<Next> {
        let Lost { index, verdict, next: cost } = lost;
        let role = if cost == Cost::Free { Role::Ordinary } else { Role::Retry };
        let next = match self.core.choose(self.tried, self.asked, Reach::Good, now) {
            Choice::Target(other) => Next::Start(other, role, verdict.reason),
            Choice::None(until) => {
                self.none(until, now);
                let alone = cost == Cost::Retry && verdict.again && self.core.is_open(index, self.asked, now);
                alone.then(|| Next::Again(index, now + PAUSE))?
            }
        };
        if cost != Cost::Retry {
            return Some(next);
        }
        if !self.core.spend(self.asked.who.asker, now) {
            self.core.count(Metric::RetriesDenied, &[]);
            return None;
        }
        self.retries -= 1;
        self.repeated = Some(lost);
        Some(next)
    }

    fn none(&mut self, until: Option<Instant>, now: Instant) -> Next {
        let wait = until.map(|until| until.saturating_duration_since(now));
        self.soonest = self.soonest.into_iter().chain(wait).min();
        Next::GiveUp
    }

    /// Starts the hedge when it is due, a target is left and the retry budget allows it.
    fn hedge(&mut self, now: Instant) -> bool {
        if self.running.len() != 1 || self.hedge_at.is_none_or(|at| now < at) {
            return false;
        }
        self.hedge_at = None;
        let fallback = self.core.rules.fallback_on.contains(&Reason::Timeout);
        let choice = match self.core.choose(self.tried, self.asked, Reach::Good, now) {
            Choice::None(_) if fallback => self.core.next_fallback(self.tried, self.asked, Reach::Good, now),
            choice => choice,
        };
        let Choice::Target(index) = choice else { return false };
        if !self.core.spend(self.asked.who.asker, now) {
            self.core.count(Metric::RetriesDenied, &[]);
            return false;
        }
        self.start(index, Role::Hedge, now);
        true
    }

    /// Instant of the next timeout, retry or hedge; `None`: none is due.
    pub(super) fn due(&self) -> Option<Instant> {
        let again = match self.next {
            Next::Again(_, at) if self.running.is_empty() => Some(at),
            _ => None,
        };
        let hedge = self.hedge_at.filter(|_| self.running.len() == 1);
        let silent = self.running.iter().filter_map(|runner| self.core.silent_at(runner.asked_at(), self.asked)).min();
        [self.deadline, again, hedge, silent].into_iter().flatten().min()
    }

    fn note(&mut self, runner: &Runner, outcome: &'static str, status: u16, now: Instant) {
        self.core.count(Metric::Attempts, &[("target", &runner.permit.target.id), ("outcome", outcome)]);
        self.attempts.push(runner.note(outcome, status, now));
    }

    /// Ends the race at the request's deadline; returns the failure for the client.
    fn late(&mut self, now: Instant) -> Failure {
        for runner in std::mem::take(&mut self.running) {
            self.note(&runner, "abandoned", 0, now);
        }
        Failure::new(ErrorKind::DeadlineExceeded, "The answer was not there within the time that this gateway allows.")
    }

    fn give_up(&mut self, now: Instant) -> Failure {
        let failure = self.told.take().unwrap_or_else(|| {
            let why = self.core.why(self.asked, now).unwrap_or(Why::Errors);
            let message = format!(
                "No upstream of this model can be asked now: the first of them {}. Try again shortly.",
                why.says()
            );
            Failure::new(ErrorKind::Unavailable, message)
                .log(format!("the circuit breakers of all targets are open: {}", why.name()))
        });
        match self.soonest {
            Some(after) if judge(&failure).reason.is_some() => failure.retry_after(after),
            _ => failure,
        }
    }
}

impl Drop for Race {
    fn drop(&mut self) {
        for runner in &self.running {
            self.core.count(Metric::Attempts, &[("target", &runner.permit.target.id), ("outcome", "abandoned")]);
        }
    }
}

impl Runner {
    /// Polls until the first token; events before it are kept back with it.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<bool, Failure>> {
        loop {
            match &mut self.stage {
                Stage::Opening(opening) => match opening.as_mut().poll(context) {
                    Poll::Ready(Ok(events)) => self.stage = Stage::Live(events),
                    Poll::Ready(Err(failure)) => return Poll::Ready(Err(failure)),
                    Poll::Pending => return Poll::Pending,
                },
                Stage::Live(events) => match events.poll_events(context, &mut self.said) {
                    Poll::Ready(Ok(more)) => {
                        if self.said.iter().any(binds) {
                            return Poll::Ready(Ok(more));
                        }
                        if !more {
                            return Poll::Ready(Err(empty()));
                        }
                    }
                    Poll::Ready(Err(failure)) => return Poll::Ready(Err(failure)),
                    Poll::Pending => return Poll::Pending,
                },
            }
        }
    }

    /// Instant from which the upstream's silence counts: the start of the attempt plus its wait for the upstream's pace.
    fn asked_at(&self) -> Instant {
        self.began + self.waited.get()
    }

    fn note(&self, outcome: &'static str, status: u16, now: Instant) -> Attempt {
        let ms = millis((now - self.began).as_secs_f64());
        Attempt { target: self.permit.target.id.clone(), outcome, status, ms, sent: self.sent.get() }
    }
}

/// Reports a lost attempt to the breakers of its target.
pub(super) fn settle(permit: &mut Permit, failure: &Failure, verdict: Verdict, now: Instant) {
    let cooling = failure.retry_after.filter(|_| failure.upstream.is_some());
    match verdict.health {
        Health::Unknown => permit.unused(now),
        Health::Works => permit.refused(now, cooling.map(|time| (time, Why::Limited))),
        Health::Sick(why) => permit.failed(why, now, cooling),
    }
}

/// Returns true if the event is part of the answer itself.
fn binds(event: &ChatEvent) -> bool {
    !matches!(event, ChatEvent::Usage(_))
}

/// Failure of an upstream that was silent for too long.
pub(super) fn timeout(message: &str) -> Failure {
    Failure::provider(ProviderFault::new(FaultClass::Timeout, message))
}

fn empty() -> Failure {
    let message = "The upstream ended its answer before it had begun.";
    Failure::provider(ProviderFault::new(FaultClass::Truncated, message))
}
