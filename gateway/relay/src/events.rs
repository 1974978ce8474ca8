//! Events of a relayed answer: first a race of attempts, then the winner's own events.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use penstock_proto::ErrorKind;
use penstock_types::ChatEvent;
use tokio::time::{Sleep, sleep_until};

use super::core::Core;
use super::prefix::Share;
use super::race::{Race, RaceStart, Winner, timeout};
use super::target::Permit;
use super::verdict::{Health, judge};
use penstock_base::error::Failure;
use penstock_govern::prices::Price;
use penstock_telemetry::Attempt;
use penstock_telemetry::Metric;
use penstock_upstream::call::Call;
use penstock_upstream::{Course, Events, Facts, Origin};

/// Header field of the answer with the id of the target that gave it.
const TARGET: HeaderName = HeaderName::from_static("x-penstock-target");
/// Header field of the answer with the number of attempts that it took.
const ATTEMPTS: HeaderName = HeaderName::from_static("x-penstock-attempts");
/// Header field with the targets of abandoned hedges, which may bill too.
const HEDGED: HeaderName = HeaderName::from_static("x-penstock-hedged");

/// Answer of a relay over several targets: first a race of attempts, then the winner's events.
pub(super) struct Relayed {
    core: Arc<Core>,
    state: State,
    deadline: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
    headers: Vec<(HeaderName, HeaderValue)>,
    attempts: Vec<Attempt>,
    hedged: Vec<Arc<str>>,
    price: Option<Price>,
    /// Predicted cached part of the prompt at the target that answers.
    share: Option<Share>,
}

enum State {
    Racing(Box<Race>),
    Speaking(Speaking),
    Failed,
}

impl Relayed {
    pub(super) fn new(core: Arc<Core>, call: Arc<Call>, mut origin: Origin, ready: RaceStart, now: Instant) -> Self {
        let own = core.rules.timeout.map(|limit| now + limit);
        let deadline = own.into_iter().chain(origin.deadline).min();
        origin.deadline = deadline;
        let race = Race::new(core.clone(), call, origin, ready, now);
        Self {
            timer: None,
            core,
            state: State::Racing(Box::new(race)),
            deadline,
            headers: Vec::new(),
            attempts: Vec::new(),
            hedged: Vec::new(),
            price: None,
            share: None,
        }
    }

    fn speak(&mut self, winner: Winner) {
        self.price = self.core.price(winner.index);
        self.headers = winner.events.headers().to_vec();
        if self.core.explain || self.attempts.len() > 1 {
            let mut add = |name, text: &str| {
                if let Ok(value) = HeaderValue::from_str(text) {
                    self.headers.push((name, value));
                }
            };
            add(TARGET, &winner.permit.target.id);
            add(ATTEMPTS, &self.attempts.len().to_string());
            if !self.hedged.is_empty() {
                add(HEDGED, &self.hedged.join(", "));
            }
        }
        self.state = State::Speaking(Speaking {
            events: winner.events,
            permit: winner.permit,
            idle: self.core.rules.idle_timeout,
            deadline: self.deadline,
            quiet_since: None,
        });
    }

    /// Handles an answer that broke after its first token: the client sees the failure, the target's breaker counts it.
    fn broke(&mut self, failure: &Failure, now: Instant) {
        let State::Speaking(speaking) = &mut self.state else { return };
        let verdict = judge(failure);
        let target = speaking.permit.target.id.clone();
        if let Health::Sick(why) = verdict.health {
            speaking.permit.failed(why, now, None);
        }
        self.core.count(Metric::Attempts, &[("target", &target), ("outcome", "broke")]);
        if let Some(last) = self.attempts.iter_mut().rev().find(|attempt| attempt.outcome == "answered") {
            last.outcome = "broke";
        }
    }
}

impl Relayed {
    /// Observes the predicted and the reported cached tokens of the prompt, once at the end.
    fn tally(&mut self) {
        let (Some(share), State::Speaking(speaking)) = (self.share.take(), &self.state) else { return };
        self.core.tally(&speaking.permit.target.id, share, speaking.events.facts().cached_tokens);
    }

    /// Polls the race or the answer as of `now`, so that tests can set the time.
    pub(super) fn poll_at(
        &mut self,
        context: &mut Context<'_>,
        now: Instant,
        out: &mut Vec<ChatEvent>,
    ) -> Poll<Result<bool, Failure>> {
        match &mut self.state {
            State::Speaking(speaking) => {
                let polled = speaking.poll(context, now, out);
                if let Poll::Ready(Err(failure)) = &polled {
                    self.broke(failure, now);
                }
                if let Poll::Ready(Ok(false)) = polled {
                    self.tally();
                }
                polled
            }
            State::Racing(race) => {
                let outcome = std::task::ready!(race.poll(context, now));
                self.attempts = race.attempts(now);
                self.hedged = race.hedged().to_vec();
                self.share = outcome.as_ref().ok().and_then(|winner| race.share(winner.index));
                let mut winner = match outcome {
                    Ok(winner) => winner,
                    Err(failure) => {
                        self.state = State::Failed;
                        return Poll::Ready(Err(failure));
                    }
                };
                out.append(&mut winner.said);
                let more = winner.more;
                self.speak(winner);
                if !more {
                    self.tally();
                }
                Poll::Ready(Ok(more))
            }
            State::Failed => Poll::Ready(Ok(false)),
        }
    }

    fn facts_by(&self, read: impl FnOnce(&dyn Events) -> Facts) -> Facts {
        match &self.state {
            State::Racing(race) => race.facts(read),
            State::Speaking(speaking) => read(speaking.events.as_ref()),
            State::Failed => Facts::default(),
        }
    }

    /// Instant of the next timeout, retry or hedge; `None`: none is due.
    pub(super) fn due(&self) -> Option<Instant> {
        match &self.state {
            State::Racing(race) => race.due(),
            State::Speaking(speaking) => speaking.due(),
            State::Failed => None,
        }
    }
}

impl Events for Relayed {
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        loop {
            let now = Instant::now();
            if let Poll::Ready(done) = self.poll_at(context, now, out) {
                return Poll::Ready(done);
            }
            let Some(due) = self.due() else { return Poll::Pending };
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due.into())));
            // The timer is moved when it fires too early, so an answer that flows never touches it.
            if timer.deadline() > due.into() || timer.is_elapsed() {
                timer.as_mut().reset(due.into());
            }
            std::task::ready!(timer.as_mut().poll(context));
        }
    }

    fn facts(&self) -> Facts {
        self.facts_by(|events| events.facts())
    }

    fn facts_at_end(&self) -> Facts {
        self.facts_by(|events| events.facts_at_end())
    }

    fn score(&self, choice: u32) -> Option<f32> {
        match &self.state {
            State::Speaking(speaking) => speaking.events.score(choice),
            State::Racing(_) | State::Failed => None,
        }
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        &self.headers
    }

    fn epilogue(&self) -> Option<Bytes> {
        match &self.state {
            State::Speaking(speaking) => speaking.events.epilogue(),
            State::Racing(_) | State::Failed => None,
        }
    }

    fn course(&self) -> Course {
        let (attempts, hedged, target) = match &self.state {
            State::Racing(race) => (race.attempts(Instant::now()), race.hedged().to_vec(), None),
            State::Speaking(speaking) => {
                (self.attempts.clone(), self.hedged.clone(), Some(speaking.permit.target.id.clone()))
            }
            State::Failed => (self.attempts.clone(), self.hedged.clone(), None),
        };
        let below = match &self.state {
            State::Speaking(speaking) => speaking.events.course(),
            State::Racing(_) | State::Failed => Course::default(),
        };
        Course { target, attempts, hedged, price: self.price, ..below }
    }
}

/// Answer that has begun: no other target is asked any more.
struct Speaking {
    events: Box<dyn Events>,
    permit: Permit,
    idle: Option<Duration>,
    deadline: Option<Instant>,
    /// Start of the present wait for the upstream. Time between polls does not count: a slow client delays them.
    quiet_since: Option<Instant>,
}

impl Speaking {
    fn poll(
        &mut self,
        context: &mut Context<'_>,
        now: Instant,
        out: &mut Vec<ChatEvent>,
    ) -> Poll<Result<bool, Failure>> {
        if let Poll::Ready(done) = self.events.poll_events(context, out) {
            self.quiet_since = None;
            return Poll::Ready(done);
        }
        let quiet_since = *self.quiet_since.get_or_insert(now);
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            let message = "The answer was not complete within the time that this gateway allows.";
            return Poll::Ready(Err(Failure::new(ErrorKind::DeadlineExceeded, message)));
        }
        if self.idle.is_some_and(|idle| now >= quiet_since + idle) {
            return Poll::Ready(Err(timeout("The upstream stopped in the middle of its answer.")));
        }
        Poll::Pending
    }

    fn due(&self) -> Option<Instant> {
        let silent = self.idle.zip(self.quiet_since).map(|(idle, since)| since + idle);
        silent.into_iter().chain(self.deadline).min()
    }
}
