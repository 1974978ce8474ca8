//! What one request holds until it has ended.

use std::sync::Arc;
use std::time::Instant;

use http::{HeaderName, HeaderValue};
use penstock_dialects::Dialect;
use penstock_govern::{By, Claim, Hold, Limit, Reserve, Unit};
use penstock_store::{Entry, Held, OpenEntry, Tokens};

use super::bill::{self, Billing};
use super::emitted::Emitted;
use super::estimate::Guess;
use super::shared::{Portion, Shared};
use super::{Account, Governor};
use crate::call::Call;
use crate::error::Failure;
use crate::relay::models::Entry as Model;
use crate::telemetry::Metric;
use crate::upgrade::Given;
use crate::upstream::{Course, Facts};

/// The claim's limit reserves the most: where nobody knows what was used, that counts.
const STRICT: u16 = 1 << 15;

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

/// What the ledger says of a request.
pub(super) struct Noted {
    pub(super) open: OpenEntry,
    pub(super) began: Instant,
    pub(super) first: Option<Instant>,
    pub(super) outcome: &'static str,
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
    /// What it has of the counters that all gateways share.
    portions: Option<(Arc<Shared>, Vec<Portion>)>,
    /// Limits that count by provider.
    by_provider: Vec<Arc<Limit>>,
    fields: Vec<(HeaderName, HeaderValue)>,
    /// Its entry in the ledger.
    entry: Option<Box<Noted>>,
    status: u16,
    end: End,
    facts: Facts,
    course: Course,
    emitted: Emitted,
}

impl Reservation {
    pub(super) fn new(governor: Arc<Governor>, call: &Call, entry: &Model, guess: Guess) -> Self {
        let mut reservation = Self::opaque(governor, entry);
        (reservation.guess, reservation.dialect, reservation.opaque) = (guess, call.dialect(), false);
        reservation
    }

    pub(super) fn opaque(governor: Arc<Governor>, entry: &Model) -> Self {
        Self {
            governor,
            hold: None,
            guess: Guess::default(),
            dialect: Dialect::OpenAi,
            model: entry.name.clone(),
            billing: entry.billing.clone(),
            opaque: true,
            portions: None,
            by_provider: Vec::new(),
            fields: Vec::new(),
            entry: None,
            status: 0,
            end: End::Gone,
            facts: Facts::default(),
            course: Course::default(),
            emitted: Emitted::default(),
        }
    }

    /// What a claim is known by: whether its limit is strict, and which provider it is for, or 0.
    pub(super) fn tag(&mut self, limit: &Arc<Limit>, subject: &str) -> u16 {
        let strict = if limit.reserve == Reserve::Most { STRICT } else { 0 };
        if limit.by != By::Provider {
            return strict;
        }
        if !self.by_provider.iter().any(|have| Arc::ptr_eq(have, limit)) {
            self.by_provider.push(limit.clone());
        }
        strict | self.billing.providers.iter().position(|provider| **provider == *subject).map_or(0, |at| at as u16 + 1)
    }

    pub(super) fn hold(&mut self, hold: Hold, fields: Vec<(HeaderName, HeaderValue)>) {
        self.hold = Some(hold);
        self.fields = fields;
    }

    pub(super) fn share(&mut self, shared: Arc<Shared>, portions: Vec<Portion>) {
        self.portions = Some((shared, portions));
    }

    /// It was not let in after all: nothing was used.
    pub(super) fn undo(mut self) {
        if let Some(hold) = self.hold.take() {
            let (mut state, now) = self.governor.state();
            state.book.settle(hold, now, |_, _| Some(0));
        }
    }

    /// It is noted in the ledger.
    pub(super) fn note(&mut self, mut open: OpenEntry) {
        open.held = Held {
            input: self.guess.input(),
            output: self.guess.output(),
            micro_usd: self.guess.nano_usd().div_ceil(1000),
        };
        if let Some(journal) = &self.governor.journal() {
            journal.open(open.clone());
            self.entry = Some(Box::new(Noted { open, began: Instant::now(), first: None, outcome: "client_gone" }));
        }
    }

    /// Its answer has begun.
    pub(super) fn begun(&mut self) {
        self.status = 200;
        self.entry.iter_mut().for_each(|entry| entry.first = entry.first.or_else(|| Some(Instant::now())));
    }

    /// Its answer is complete.
    pub(super) fn completed(&mut self) {
        self.entry.iter_mut().for_each(|entry| entry.outcome = "complete");
    }

    /// It failed so.
    pub(super) fn failed(&mut self, failure: &Failure) {
        self.status = failure.status();
        self.entry.iter_mut().for_each(|entry| entry.outcome = failure.shape().code.unwrap_or("error"));
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
    pub(crate) fn refused(mut self, failure: &Failure) {
        self.failed(failure);
        self.end = End::Failed;
    }

    /// It was answered without asking anybody.
    pub(crate) fn free(mut self) {
        self.begun();
        self.completed();
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
        let mean = self.governor.learned(&self.model).prompt_tokens_mean(self.guess.body_bytes);
        // Nothing was guessed where only the ledger counts.
        if self.guess.input() > 0 { mean.min(self.guess.input()) } else { mean }
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

    fn settle(&mut self) {
        let used = self.used(self.end, self.facts, &self.course, self.emitted);
        if let Some(entry) = self.entry.take() {
            self.enter(*entry, &used);
        }
        if let Some(hold) = self.hold.take() {
            self.release(hold, &used);
        }
        self.learn(&used);
        self.measure(&self.account(&used));
    }

    /// Puts what was used in the place of what was held.
    fn release(&mut self, hold: Hold, used: &Used) {
        let of = |unit: Unit| match unit {
            Unit::Requests => 1,
            Unit::InFlight => 0,
            Unit::Tokens => used.facts.prompt_tokens + used.facts.completion_tokens,
            Unit::InputTokens => used.facts.prompt_tokens,
            Unit::OutputTokens => used.facts.completion_tokens,
            Unit::NanoUsd => used.nano_usd,
        };
        let target = self.course.target.clone();
        let answered = target.as_deref().and_then(|target| target.split('/').next());
        let billing = self.billing.clone();
        let providers = &billing.providers;
        let governor = self.governor.clone();
        let spent = |tag: u16, unit: Unit| {
            let at = usize::from(tag & !STRICT).checked_sub(1);
            let provider = at.and_then(|at| providers.get(at));
            let elsewhere = provider.zip(answered).is_some_and(|(provider, answered)| **provider != *answered);
            match unit.is_metered() {
                true if used.estimated && tag & STRICT != 0 => None,
                _ if elsewhere => Some(0),
                _ => Some(of(unit)),
            }
        };
        if let Some((shared, portions)) = self.portions.take() {
            shared.settle(portions, spent);
        }
        let (mut state, now) = governor.state();
        let (id, mut settled) = (hold.id(), Vec::new());
        state.book.settle(hold, now, |tag, unit| {
            let amount = spent(tag, unit);
            settled.extend(amount.map(|amount| (tag, unit, amount)));
            amount
        });
        if let Some(give) = &state.give {
            // Full, or the other process is gone: there it counts as it was reserved.
            let _ = give.try_send(Given::Settled { id, amounts: settled });
        }
        let fallback = answered.filter(|answered| !providers.iter().any(|provider| **provider == **answered));
        for (limit, provider) in self.by_provider.iter().flat_map(|limit| fallback.map(|provider| (limit, provider))) {
            for measure in &limit.measures {
                let claim =
                    Claim { limit: &limit.id, subject: provider, measure: *measure, amount: of(measure.unit), tag: 0 };
                state.book.restore(&claim, now);
            }
        }
    }

    /// Learns what requests to the model need, from those whose upstream has said it.
    fn learn(&self, used: &Used) {
        if self.end != End::Complete || used.estimated || self.billing.own || self.guess.body_bytes == 0 {
            return;
        }
        let output = if self.guess.bounded { 0 } else { used.facts.completion_tokens / self.guess.choices.max(1) };
        let (mut state, _) = self.governor.state();
        let learned = state.learned.entry(self.model.clone()).or_default();
        learned.see(self.guess.body_bytes, used.facts.prompt_tokens, output);
    }

    /// Writes the entry of the ledger.
    fn enter(&self, noted: Noted, used: &Used) {
        let Some(journal) = self.governor.journal() else { return };
        let Noted { open, began, first, outcome } = noted;
        let OpenEntry { request, gateway, at, mut subject, held } = open;
        if let Some(target) = &self.course.target {
            subject.provider = target.split('/').next().unwrap_or_default().to_owned();
        }
        let Facts { prompt_tokens, cached_tokens, cache_write_tokens, completion_tokens, reasoning_tokens, .. } =
            used.facts;
        let tokens = Tokens {
            input: prompt_tokens,
            input_cached: cached_tokens,
            input_written: cache_write_tokens,
            output: completion_tokens,
            reasoning: reasoning_tokens,
        };
        if used.estimated {
            subject.tags.push("estimated".to_owned());
        }
        journal.settle(Entry {
            request,
            gateway,
            at,
            subject,
            held,
            tokens,
            micro_usd: used.nano_usd.div_ceil(1000),
            status: self.status,
            outcome: outcome.to_owned(),
            attempts: self.course.attempts.len().max(1) as u32,
            first_ms: first.map_or(0, |first| (first - began).as_millis() as u64),
            total_ms: began.elapsed().as_millis() as u64,
            assumed: false,
        });
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
        // Without either the request was not let in.
        if self.hold.is_some() || self.entry.is_some() {
            self.settle();
        }
    }
}
