//! What one request holds until it has ended.

use std::sync::Arc;

use http::{HeaderName, HeaderValue};
use penstock_dialects::Dialect;
use penstock_govern::{By, Claim, Hold, Limit, Unit};

use super::bill::{self, Billing};
use super::emitted::Emitted;
use super::estimate::Guess;
use super::{Account, Governor};
use crate::call::Call;
use crate::relay::models::Entry;
use crate::telemetry::Metric;
use crate::upstream::{Course, Facts};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Its answer is complete.
    Complete,
    /// The upstream, or the way to it, failed.
    Failed,
    /// Nobody waits any more: the client left, a batch was cancelled, a handler panicked.
    Gone,
}

/// What a request has used, as far as anybody knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Used {
    /// Counts, the upstream's or ours.
    pub(super) facts: Facts,
    /// Billionths of a dollar, of every attempt that may bill.
    pub(super) nano_usd: u64,
    /// They are ours.
    pub(super) estimated: bool,
}

/// What a request holds. Settled when it is dropped, by what it was told last.
pub(crate) struct Reservation {
    governor: Arc<Governor>,
    hold: Option<Hold>,
    pub(super) guess: Guess,
    pub(super) dialect: Dialect,
    model: Arc<str>,
    billing: Arc<Billing>,
    /// Nobody understands what is passed on.
    opaque: bool,
    /// Limits that count by provider.
    by_provider: Vec<Arc<Limit>>,
    fields: Vec<(HeaderName, HeaderValue)>,
    end: End,
    facts: Facts,
    course: Course,
    emitted: Emitted,
}

impl Reservation {
    pub(super) fn new(governor: Arc<Governor>, call: &Call, entry: &Entry, guess: Guess) -> Self {
        let mut reservation = Self::opaque(governor, entry);
        (reservation.guess, reservation.dialect, reservation.opaque) = (guess, call.dialect(), false);
        reservation
    }

    pub(super) fn opaque(governor: Arc<Governor>, entry: &Entry) -> Self {
        Self {
            governor,
            hold: None,
            guess: Guess::default(),
            dialect: Dialect::OpenAi,
            model: entry.name.clone(),
            billing: entry.billing.clone(),
            opaque: true,
            by_provider: Vec::new(),
            fields: Vec::new(),
            end: End::Gone,
            facts: Facts::default(),
            course: Course::default(),
            emitted: Emitted::default(),
        }
    }

    /// What a claim is known by: 0, or which provider it is for.
    pub(super) fn tag(&mut self, limit: &Arc<Limit>, subject: &str) -> u16 {
        if limit.by != By::Provider {
            return 0;
        }
        if !self.by_provider.iter().any(|have| Arc::ptr_eq(have, limit)) {
            self.by_provider.push(limit.clone());
        }
        self.billing.providers.iter().position(|provider| **provider == *subject).map_or(0, |at| at as u16 + 1)
    }

    pub(super) fn hold(&mut self, hold: Hold, fields: Vec<(HeaderName, HeaderValue)>) {
        self.hold = Some(hold);
        self.fields = fields;
    }

    /// Header fields that say how the limits stand.
    pub(crate) fn fields(&self) -> &[(HeaderName, HeaderValue)] {
        &self.fields
    }

    /// The request has ended like this, unless it is said otherwise later.
    pub(super) fn ended(&mut self, end: End, facts: Facts, course: Course, emitted: Emitted) {
        (self.end, self.facts, self.course, self.emitted) = (end, facts, course, emitted);
    }

    /// Nothing was begun: the upstream refused.
    pub(crate) fn refused(mut self) {
        self.end = End::Failed;
    }

    /// What it has used if it ended like this.
    pub(super) fn used(&self, end: End, facts: Facts, course: &Course, emitted: Emitted) -> Used {
        if self.opaque {
            return Used::default();
        }
        let (facts, estimated) = self.counted(end, facts, course, emitted);
        let target = course.target.as_deref();
        let price = target.map_or(self.billing.dearest, |target| self.billing.price_of(target));
        let answered = price.map_or(0, |price| bill::nano_of(&price, &facts));
        let abandoned = self.billing.abandoned_nano(course, self.prompt_tokens());
        Used { facts, nano_usd: answered + abandoned, estimated }
    }

    /// Counts of the answer, and whether they are ours. What an upstream said before its answer was complete is a part of it at best.
    fn counted(&self, end: End, facts: Facts, course: &Course, emitted: Emitted) -> (Facts, bool) {
        let known = facts.prompt_tokens + facts.completion_tokens > 0;
        let nobody = course.target.is_none() && !course.attempts.is_empty();
        let silent = !known && emitted.tokens() == 0;
        match end {
            _ if self.billing.own || (end == End::Complete && known) => return (facts, false),
            // Whoever was asked counts by its attempt.
            _ if nobody => return (Facts::default(), false),
            End::Failed if silent => return (Facts::default(), false),
            End::Complete | End::Failed | End::Gone => {}
        }
        let bound = if self.guess.bounded { self.guess.output() } else { u64::MAX };
        let completion_tokens = emitted.tokens().min(bound).max(facts.completion_tokens);
        let prompt_tokens = if facts.prompt_tokens > 0 { facts.prompt_tokens } else { self.prompt_tokens() };
        (Facts { prompt_tokens, completion_tokens, ..facts }, true)
    }

    /// Prompt tokens of an attempt that did not say.
    fn prompt_tokens(&self) -> u64 {
        if self.guess.counted {
            return self.guess.input();
        }
        let learned = self.governor.learned(&self.model);
        learned.prompt_tokens_mean(self.guess.body_bytes).min(self.guess.input().max(1))
    }

    /// For the log, as it stands.
    pub(super) fn account(&self, used: &Used) -> Account {
        Account {
            reserved_tokens: self.guess.input() + self.guess.output(),
            reserved_nano_usd: self.guess.nano_usd(),
            tokens: used.facts.prompt_tokens + used.facts.completion_tokens,
            nano_usd: used.nano_usd,
            estimated: used.estimated,
        }
    }

    fn settle(&mut self, hold: Hold) {
        let used = self.used(self.end, self.facts, &self.course, self.emitted);
        let of = |unit: Unit| match unit {
            Unit::Requests => 1,
            Unit::InFlight => 0,
            Unit::Tokens => used.facts.prompt_tokens + used.facts.completion_tokens,
            Unit::InputTokens => used.facts.prompt_tokens,
            Unit::OutputTokens => used.facts.completion_tokens,
            Unit::NanoUsd => used.nano_usd,
        };
        let answered = self.course.target.as_deref().and_then(|target| target.split('/').next());
        let providers = &self.billing.providers;
        let governor = self.governor.clone();
        let (mut state, now) = governor.state();
        let (id, mut settled) = (hold.id(), Vec::new());
        state.book.settle(hold, now, |tag, unit| {
            let provider = (tag as usize).checked_sub(1).and_then(|at| providers.get(at));
            let elsewhere = provider.zip(answered).is_some_and(|(provider, answered)| **provider != *answered);
            let amount = if elsewhere { 0 } else { of(unit) };
            settled.push((tag, unit, amount));
            amount
        });
        if let Some(give) = &state.give {
            // Full, or the other process is gone: there it counts as it was reserved.
            let _ = give.try_send((id, settled));
        }
        let fallback = answered.filter(|answered| !providers.iter().any(|provider| **provider == **answered));
        for (limit, provider) in self.by_provider.iter().flat_map(|limit| fallback.map(|provider| (limit, provider))) {
            for measure in &limit.measures {
                let claim =
                    Claim { limit: &limit.id, subject: provider, measure: *measure, amount: of(measure.unit), tag: 0 };
                state.book.restore(&claim, now);
            }
        }
        if self.end == End::Complete && !used.estimated && !self.billing.own && self.guess.body_bytes > 0 {
            let output = if self.guess.bounded { 0 } else { used.facts.completion_tokens / self.guess.choices.max(1) };
            let learned = state.learned.entry(self.model.clone()).or_default();
            learned.see(self.guess.body_bytes, used.facts.prompt_tokens, output);
        }
        drop(state);
        self.measure(&self.account(&used));
    }

    fn measure(&self, account: &Account) {
        let usd = |nano: u64| nano as f64 / 1e9;
        let metrics = &self.governor.metrics;
        if account.reserved_tokens + account.tokens == 0 {
            return;
        }
        for (unit, reserved, settled) in [
            ("tokens", account.reserved_tokens as f64, account.tokens as f64),
            ("usd", usd(account.reserved_nano_usd), usd(account.nano_usd)),
        ] {
            metrics.observe(Metric::LimitReserved, &[("unit", unit)], reserved);
            metrics.observe(Metric::LimitSettled, &[("unit", unit)], settled);
            if settled > reserved {
                metrics.observe(Metric::LimitExceeded, &[("unit", unit)], settled - reserved);
            }
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            self.settle(hold);
        }
    }
}
