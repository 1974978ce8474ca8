//! When a target is left alone: a circuit breaker as a pure state machine. Time is an argument.
//!
//! Failures in a row open it *hard*: nothing goes there until a probe has succeeded. A high rate of failures opens it *softly*: others
//! are preferred, but a model whose other targets are all worse still uses it, so that statistics alone never end a service. The
//! open time grows with every opening that follows soon upon the last. What began before an opening says nothing afterwards: its ticket
//! is of an older generation.

use std::time::{Duration, Instant};

/// When to open, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Failures in a row that open hard.
    pub(crate) in_a_row: u32,
    /// Time over which the rate is taken; also how long a breaker must have been closed for its next opening to be short again.
    pub(crate) window: Duration,
    /// Fewer answers than this in the window say nothing.
    pub(crate) answers_min: u32,
    /// Per cent of failures in the window that open softly.
    pub(crate) percent: u32,
    /// First open time; doubles.
    pub(crate) open_min: Duration,
    /// Longest open time.
    pub(crate) open_max: Duration,
}

impl Rules {
    /// Five in a row as Envoy and Istio eject; 1 s to 60 s: a restart of a server fits between two probes, and no outage is noticed
    /// as over more than a minute late.
    pub(crate) const DEFAULT: Rules = Rules {
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
    /// One probe is out.
    Probing {
        hard: bool,
    },
}

/// Whether a request may go there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Yes.
    Yes,
    /// Only if nothing better is there.
    Last,
    /// Only if nothing else is there at all, as one of a few; others not before that time.
    Trial(Instant),
    /// Not before that time.
    No(Instant),
}

impl Admission {
    /// The stricter of two.
    pub(crate) fn worse(self, other: Self) -> Self {
        let rank = |admission: Self| match admission {
            Admission::Yes => (0, None),
            Admission::Last => (1, None),
            Admission::Trial(until) => (2, Some(until)),
            Admission::No(until) => (3, Some(until)),
        };
        if rank(other) > rank(self) { other } else { self }
    }
}

/// Leave to send one request; given back with its outcome.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    generation: u32,
    probe: bool,
}

impl Ticket {
    /// Whether its outcome decides whether the breaker closes.
    pub(crate) fn is_probe(&self) -> bool {
        self.probe
    }
}

/// The breaker of one target.
#[derive(Debug)]
pub(crate) struct Breaker {
    rules: Rules,
    state: State,
    generation: u32,
    /// Failures in a row.
    row: u32,
    /// Openings of which each came soon after the one before.
    openings: u32,
    /// The target said how long it wants to be left alone.
    cooling: Option<Instant>,
    window: Window,
}

impl Breaker {
    /// Closed.
    pub(crate) fn new(rules: Rules) -> Self {
        let state = State::Closed { since: None };
        Self { rules, state, generation: 0, row: 0, openings: 0, cooling: None, window: Window::default() }
    }

    /// Whether a request may go there now.
    pub(crate) fn look(&self, now: Instant) -> Admission {
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

    /// A request goes there. The first after an open time is the probe.
    pub(crate) fn enter(&mut self, now: Instant) -> Ticket {
        let probe = matches!(self.state, State::Open { until, .. } if now >= until);
        if let State::Open { hard, .. } = self.state
            && probe
        {
            self.state = State::Probing { hard };
        }
        Ticket { generation: self.generation, probe }
    }

    /// The target has answered.
    #[expect(clippy::needless_pass_by_value, reason = "a ticket counts once")]
    pub(crate) fn succeed(&mut self, ticket: Ticket, now: Instant) {
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

    /// The target has failed.
    #[expect(clippy::needless_pass_by_value, reason = "a ticket counts once")]
    pub(crate) fn fail(&mut self, ticket: Ticket, now: Instant) {
        if ticket.generation == self.generation {
            self.count(ticket.probe, now);
        }
    }

    /// It has failed after it began to answer, which its ticket said already.
    pub(crate) fn broke(&mut self, now: Instant) {
        self.count(false, now);
    }

    /// The request ended without an outcome. A probe may then be sent again.
    #[expect(clippy::needless_pass_by_value, reason = "a ticket counts once")]
    pub(crate) fn abandon(&mut self, ticket: Ticket, now: Instant) {
        if let State::Probing { hard } = self.state
            && ticket.probe
            && ticket.generation == self.generation
        {
            self.state = State::Open { until: now, hard };
        }
    }

    /// The target wants no requests until then.
    pub(crate) fn cool(&mut self, until: Instant) {
        self.cooling = self.cooling.max(Some(until));
    }

    /// A request that went there although it was open was answered: it closes.
    pub(crate) fn prove(&mut self, now: Instant) {
        self.cooling = None;
        self.row = 0;
        if !self.is_closed() {
            self.generation += 1;
            self.window = Window::default();
            self.state = State::Closed { since: Some(now) };
        }
    }

    /// Too many requests fail, by the count of somebody else: it opens softly. Whether it did.
    pub(crate) fn soften(&mut self, now: Instant) -> bool {
        let is_closed = self.is_closed();
        if is_closed {
            self.open(now, false);
        }
        is_closed
    }

    /// Whether it is closed; it may still have been told to wait.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }

    /// Whether a probe is out.
    pub(crate) fn is_probing(&self) -> bool {
        matches!(self.state, State::Probing { .. })
    }

    /// 0 closed, 2 open softly, 3 open hard or told to wait; a probe changes nothing.
    pub(crate) fn kind(&self, now: Instant) -> u8 {
        match self.state {
            _ if self.is_cooling(now) => 3,
            State::Closed { .. } => 0,
            State::Open { hard, .. } | State::Probing { hard } => 2 + u8::from(hard),
        }
    }

    /// Whether the target wants no requests now.
    pub(crate) fn is_cooling(&self, now: Instant) -> bool {
        self.cooling.is_some_and(|until| now < until)
    }

    /// Whether a ticket is of the state that the breaker is in.
    pub(crate) fn is_current(&self, ticket: &Ticket) -> bool {
        ticket.generation == self.generation
    }

    /// Whether the next to enter is a probe.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        matches!(self.state, State::Open { until, .. } if now >= until)
    }

    /// Opens hard: the target is known to be down.
    pub(crate) fn trip(&mut self, now: Instant) {
        if let State::Closed { .. } = self.state {
            self.open(now, true);
        }
    }

    /// 0 closed, 1 probing, 2 open softly, 3 open hard: as the metric shows it.
    pub(crate) fn level(&self, now: Instant) -> u8 {
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
            // Its last resort fails all the time: it is no longer that.
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

/// Outcomes of the last one to two halves of a window.
#[derive(Debug, Default)]
struct Window {
    began: Option<Instant>,
    /// (answers, of these failures), now and in the half before.
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
