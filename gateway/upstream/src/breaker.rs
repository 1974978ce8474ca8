//! Circuit breaker of a target, as a pure state machine that takes the time as an argument.
//!
//! Failures in a row open it *hard*: nothing goes to the target until a probe has succeeded. A high failure rate opens
//! it *softly*: other targets are preferred, but a model whose other targets are all worse still uses this one, so that
//! statistics alone never end a service. The open time doubles with every opening soon after the last. Outcomes of
//! requests sent before a change of state do not count: their tickets are of an older generation.

use std::time::{Duration, Instant};

/// Thresholds and open times of a circuit breaker.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Consecutive failures that open the breaker hard: no requests but a probe.
    pub(crate) in_a_row: u32,
    /// Time window of the failure rate; also how long a breaker must have been closed for its next open time to be short again.
    pub(crate) window: Duration,
    /// Least number of answers in the window for a rate to count.
    pub(crate) answers_min: u32,
    /// Percentage of failures in the window that opens the breaker softly.
    pub(crate) percent: u32,
    /// First open time; doubles with each opening that comes soon after the last.
    pub(crate) open_min: Duration,
    /// Upper bound of the open time, where the doubling ends.
    pub(crate) open_max: Duration,
}

impl Rules {
    /// Five in a row, as Envoy and Istio eject. Open times of 1 s to 60 s: a server's restart fits between two probes,
    /// and the end of an outage is noticed at most a minute late.
    pub const DEFAULT: Rules = Rules {
        in_a_row: 5,
        window: Duration::from_secs(30),
        answers_min: 20,
        percent: 50,
        open_min: Duration::from_secs(1),
        open_max: Duration::from_secs(60),
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed {
        since: Option<Instant>,
    },
    Open {
        until: Instant,
        hard: bool,
    },
    /// One probe is in flight; its outcome closes or reopens the breaker.
    Probing {
        hard: bool,
    },
}

/// Whether a request may go to a target, from the least strict to the strictest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The breaker is closed: the target is open to every request.
    Yes,
    /// Soft opening: the target gets requests only if no better target is left.
    Last,
    /// Only if no other target is left at all, as one of a few trials; ordinary requests not before this time.
    Trial(Instant),
    /// No requests before this time: hard opening, or a Retry-After.
    No(Instant),
}

impl Admission {
    /// The stricter of two admissions; of two with a time, the later one.
    pub fn worse(self, other: Self) -> Self {
        let rank = |admission: Self| match admission {
            Admission::Yes => (0, None),
            Admission::Last => (1, None),
            Admission::Trial(until) => (2, Some(until)),
            Admission::No(until) => (3, Some(until)),
        };
        if rank(other) > rank(self) { other } else { self }
    }
}

/// Permission to send one request; consumed with the request's outcome.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    generation: u32,
    probe: bool,
}

impl Ticket {
    /// Returns true if the request's outcome decides if the breaker closes.
    pub fn is_probe(&self) -> bool {
        self.probe
    }
}

/// Circuit breaker of one target: a pure state machine that takes the time as an argument.
#[derive(Debug)]
pub struct Breaker {
    rules: Rules,
    state: State,
    generation: u32,
    /// Consecutive failures since the last success, compared with `in_a_row`.
    row: u32,
    /// Openings that each came soon after the one before; exponent of the open time.
    openings: u32,
    /// Instant until which the target asked to get no requests (Retry-After).
    cooling: Option<Instant>,
    window: Window,
}

impl Breaker {
    /// A closed breaker with no failures counted.
    pub fn new(rules: Rules) -> Self {
        let state = State::Closed { since: None };
        Self { rules, state, generation: 0, row: 0, openings: 0, cooling: None, window: Window::default() }
    }

    /// Whether a request may go to the target at `now`; changes nothing.
    pub fn look(&self, now: Instant) -> Admission {
        if let Some(until) = self.cooling.filter(|until| now < *until) {
            return Admission::No(until);
        }
        match self.state {
            State::Closed { .. } => Admission::Yes,
            State::Open { until, .. } if now >= until => Admission::Yes,
            State::Open { hard: false, .. } | State::Probing { hard: false } => Admission::Last,
            State::Open { until, hard: true } => Admission::No(until),
            State::Probing { hard: true } => Admission::No(now + self.rules.open_min),
        }
    }

    /// Admits a request. The first one after an open time is the probe.
    pub fn enter(&mut self, now: Instant) -> Ticket {
        let probe = matches!(self.state, State::Open { until, .. } if now >= until);
        if let State::Open { hard, .. } = self.state
            && probe
        {
            self.state = State::Probing { hard };
        }
        Ticket { generation: self.generation, probe }
    }

    /// Counts a request that was answered; a ticket of an older generation does not count.
    #[expect(clippy::needless_pass_by_value, reason = "a ticket counts once")]
    pub fn succeed(&mut self, ticket: Ticket, now: Instant) {
        if ticket.generation != self.generation {
            return;
        }
        if ticket.probe {
            self.generation += 1;
            self.window = Window::default();
            self.state = State::Closed { since: Some(now) };
        }
        self.row = 0;
        self.window.add(now, self.rules.window, false);
    }

    /// Counts a request that failed; a ticket of an older generation does not count.
    #[expect(clippy::needless_pass_by_value, reason = "a ticket counts once")]
    pub fn fail(&mut self, ticket: Ticket, now: Instant) {
        if ticket.generation == self.generation {
            self.count(ticket.probe, now);
        }
    }

    /// Counts an answer that broke after it had begun; its ticket was consumed at the first event.
    pub(crate) fn broke(&mut self, now: Instant) {
        self.count(false, now);
    }

    /// Returns a ticket without an outcome. An abandoned probe may then be repeated.
    #[expect(clippy::needless_pass_by_value, reason = "a ticket counts once")]
    pub fn abandon(&mut self, ticket: Ticket, now: Instant) {
        if let State::Probing { hard } = self.state
            && ticket.probe
            && ticket.generation == self.generation
        {
            self.state = State::Open { until: now, hard };
        }
    }

    /// Blocks the target until the instant it asked for.
    pub(crate) fn cool(&mut self, until: Instant) {
        self.cooling = self.cooling.max(Some(until));
    }

    /// Closes the breaker, because a request that went through in spite of it was answered.
    pub fn prove(&mut self, now: Instant) {
        self.cooling = None;
        self.row = 0;
        if !self.is_closed() {
            self.generation += 1;
            self.window = Window::default();
            self.state = State::Closed { since: Some(now) };
        }
    }

    /// Opens a closed breaker softly, by a failure rate counted elsewhere. True if it was closed.
    pub(crate) fn soften(&mut self, now: Instant) -> bool {
        let is_closed = self.is_closed();
        if is_closed {
            self.open(now, false);
        }
        is_closed
    }

    /// Returns true if the breaker is closed; the target may still have asked for a pause.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }

    /// Returns true if a probe is in flight, whose outcome the breaker waits for.
    pub(crate) fn is_probing(&self) -> bool {
        matches!(self.state, State::Probing { .. })
    }

    /// State without regard to probes: 0 closed, 2 open softly, 3 open hard or paused at the target's wish.
    pub fn kind(&self, now: Instant) -> u8 {
        match self.state {
            _ if self.is_cooling(now) => 3,
            State::Closed { .. } => 0,
            State::Open { hard, .. } | State::Probing { hard } => 2 + u8::from(hard),
        }
    }

    /// Returns true if the target has asked for a pause that is not over.
    pub(crate) fn is_cooling(&self, now: Instant) -> bool {
        self.cooling.is_some_and(|until| now < until)
    }

    /// Returns true if a ticket belongs to the breaker's present generation.
    pub(crate) fn is_current(&self, ticket: &Ticket) -> bool {
        ticket.generation == self.generation
    }

    /// Returns true if the next request to enter is a probe.
    pub fn is_due(&self, now: Instant) -> bool {
        matches!(self.state, State::Open { until, .. } if now >= until)
    }

    /// Opens a closed breaker hard: the target is known to be down.
    pub fn trip(&mut self, now: Instant) {
        if let State::Closed { .. } = self.state {
            self.open(now, true);
        }
    }

    /// State as the metric shows it: 0 closed, 1 probing, 2 open softly, 3 open hard.
    pub fn level(&self, now: Instant) -> u8 {
        match (self.look(now), self.state) {
            (_, State::Probing { .. }) | (Admission::Yes, State::Open { .. }) => 1,
            (Admission::Yes, _) => 0,
            (Admission::Last, _) => 2,
            (Admission::Trial(_) | Admission::No(_), _) => 3,
        }
    }

    fn count(&mut self, probe: bool, now: Instant) {
        self.row += 1;
        self.window.add(now, self.rules.window, true);
        match self.state {
            State::Probing { hard } if probe => self.open(now, hard),
            State::Closed { .. } if self.row >= self.rules.in_a_row => self.open(now, true),
            State::Closed { .. } if self.window.is_bad(&self.rules) => self.open(now, false),
            // The last resort fails all the time, so it is no longer one.
            State::Open { until, hard: false } if self.row >= self.rules.in_a_row => {
                self.state = State::Open { until, hard: true };
            }
            State::Closed { .. } | State::Open { .. } | State::Probing { .. } => {}
        }
    }

    fn open(&mut self, now: Instant, hard: bool) {
        if let State::Closed { since } = self.state {
            let soon = since.is_some_and(|since| now.saturating_duration_since(since) < self.rules.window);
            self.openings = if soon { self.openings + 1 } else { 0 };
        } else {
            self.openings += 1;
        }
        let time = self.rules.open_min.saturating_mul(1 << self.openings.min(16)).min(self.rules.open_max);
        self.state = State::Open { until: now + time, hard };
        self.generation += 1;
    }
}

/// Sliding window of outcomes, kept in two halves: covers the last one half to one whole window.
#[derive(Debug, Default)]
struct Window {
    began: Option<Instant>,
    /// Answers and, of these, failures: in the present half and in the one before.
    halves: [(u32, u32); 2],
}

impl Window {
    fn add(&mut self, now: Instant, window: Duration, failed: bool) {
        let began = *self.began.get_or_insert(now);
        let age = now.saturating_duration_since(began);
        if age >= window / 2 {
            let before = if age < window { self.halves[0] } else { (0, 0) };
            self.halves = [(0, 0), before];
            self.began = Some(now);
        }
        self.halves[0].0 += 1;
        self.halves[0].1 += u32::from(failed);
    }

    fn is_bad(&self, rules: &Rules) -> bool {
        let answers = self.halves[0].0 + self.halves[1].0;
        let failures = self.halves[0].1 + self.halves[1].1;
        answers >= rules.answers_min && u64::from(failures) * 100 >= u64::from(answers) * u64::from(rules.percent)
    }
}

#[cfg(test)]
#[path = "breaker_tests.rs"]
mod tests;
