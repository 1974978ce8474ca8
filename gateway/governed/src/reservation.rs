//! Reservation of one request: its holds until it has ended.

use std::sync::Arc;
use std::time::Instant;

use http::{HeaderName, HeaderValue};
use penstock_govern::{By, Claim, Hold, Learned, Limit, Now, Reserve, Unit};
use penstock_proto::ErrorKind;
use penstock_store::{Entry, Held, OpenEntry, Subject, Tokens};
use penstock_types::Dialect;

use super::emitted::Emitted;
use super::estimate::Guess;
use super::handover::{Claimed, Given};
use super::journal::Slot;
use super::shared::{Portion, Shared};
use super::{Governor, State};
use penstock_base::error::Failure;
use penstock_relay::models::Entry as Model;
use penstock_relay::{Billing, Reason, bill, judge};
use penstock_telemetry::Metric;
use penstock_upstream::Account;
use penstock_upstream::call::Call;
use penstock_upstream::{Course, Facts, Sent};

/// Tag bit of a claim whose limit reserves the upper bound: with unknown use that amount counts.
const STRICT: u16 = 1 << 15;

/// Tag of ledger entries whose token counts are estimates.
const ESTIMATED: &str = "estimated";

/// Kind of a request's end, which decides how much of the reservation is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The answer is complete and was read to its end.
    Complete,
    /// The upstream, or the connection to it, failed.
    Failed,
    /// Nobody waits any more: the client left, a batch was cancelled, a handler panicked.
    Gone,
}

/// Use of a request, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Used {
    /// Counts, reported by the upstream or estimated.
    pub(super) facts: Facts,
    /// Cost in nano-dollars, over every attempt that may bill.
    pub(super) nano_usd: u64,
    /// True if the token counts are estimates because the upstream reported none.
    pub(super) estimated: bool,
}

/// Ledger entry of a request under way, with times and outcome for its settlement.
pub(super) struct Noted {
    pub(super) slot: Slot,
    pub(super) began: Instant,
    pub(super) first: Option<Instant>,
    pub(super) outcome: &'static str,
}

/// Holds of a request, settled on drop with the last reported use.
pub struct Reservation {
    governor: Arc<Governor>,
    hold: Option<Hold>,
    pub(super) guess: Guess,
    pub(super) dialect: Dialect,
    model: Arc<str>,
    billing: Arc<Billing>,
    /// True if the request is forwarded unread, so that its tokens are not counted.
    opaque: bool,
    /// Holds of the shared counters, where the request is under any of them.
    portions: Option<(Arc<Shared>, Vec<Portion>)>,
    /// Limits that count by provider; settled when the answering provider is known.
    by_provider: Vec<Arc<Limit>>,
    fields: Vec<(HeaderName, HeaderValue)>,
    /// Whether the request has reached its upstream, which may then bill the prompt.
    sent: Sent,
    /// True if the answer has begun.
    is_begun: bool,
    /// True if the request failed and the upstream may bill it all the same: after a timeout, or where its answer found no room.
    may_bill: bool,
    /// Entry in the ledger while the request runs; `None`: the ledger does not note the request.
    entry: Option<Noted>,
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
            sent: Sent::default(),
            is_begun: false,
            may_bill: false,
            entry: None,
            status: 0,
            end: End::Gone,
            facts: Facts::default(),
            course: Course::default(),
            emitted: Emitted::default(),
        }
    }

    /// Tag of a claim: whether its limit is strict, and the number of its provider, or 0.
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

    pub(super) fn hold(&mut self, hold: Hold) {
        self.hold = Some(hold);
    }

    pub(super) fn tell(&mut self, fields: Vec<(HeaderName, HeaderValue)>) {
        self.fields = fields;
    }

    pub(super) fn share(&mut self, shared: Arc<Shared>, portions: Vec<Portion>) {
        self.portions = Some((shared, portions));
    }

    /// Settles with nothing used: the request was not admitted after all.
    pub(super) fn undo(mut self) {
        if let Some(hold) = self.hold.take() {
            let (mut state, now) = self.governor.state();
            settle_hold(hold, |_, _| Some(0), &mut state, now);
        }
    }

    /// Settles with nothing used, shared counters included: only an answer was wanted.
    pub(super) fn withdraw(mut self) {
        if let Some((shared, portions)) = self.portions.take() {
            shared.settle(portions, |_, _| Some(0));
        }
        self.undo();
    }

    /// Opens the request's entry in the ledger, if the governor has one.
    pub(super) fn note(&mut self, mut open: OpenEntry) {
        open.held = Held {
            input: self.guess.held(Unit::InputTokens),
            output: self.guess.held(Unit::OutputTokens),
            micro_usd: self.guess.held(Unit::NanoUsd).div_ceil(1000),
        };
        if let Some(journal) = self.governor.journal() {
            let slot = journal.open(open);
            self.entry = Some(Noted { slot, began: Instant::now(), first: None, outcome: "client_gone" });
        }
    }

    /// Notes that the answer has begun: status 200, and the time of its first event.
    pub(super) fn begun(&mut self) {
        (self.status, self.is_begun) = (200, true);
        self.entry.iter_mut().for_each(|entry| entry.first = entry.first.or_else(|| Some(Instant::now())));
    }

    /// Notes that the answer is complete, as its outcome in the ledger.
    pub(super) fn completed(&mut self) {
        self.entry.iter_mut().for_each(|entry| entry.outcome = "complete");
    }

    /// Notes the failure: its status, its outcome in the ledger, and whether the upstream may bill the request all the same.
    pub(super) fn failed(&mut self, failure: &Failure) {
        self.status = failure.status();
        self.may_bill = is_timeout(failure) || failure.is_unheld();
        self.entry.iter_mut().for_each(|entry| entry.outcome = failure.shape().code.unwrap_or("error"));
    }

    /// Links the flag that tells whether the request has been sent.
    pub(crate) fn goes(&mut self, sent: &Sent) {
        self.sent = sent.clone();
    }

    /// Header fields of the answer with the standings of the request's limits.
    pub fn fields(&self) -> &[(HeaderName, HeaderValue)] {
        &self.fields
    }

    /// Records the state of the request for the case that it is dropped now.
    pub(super) fn ended(&mut self, end: End, facts: Facts, course: Course, emitted: Emitted) {
        (self.end, self.facts, self.course, self.emitted) = (end, facts, course, emitted);
    }

    /// Ends the reservation of a request that its upstream refused before an answer.
    pub fn refused(mut self, failure: &Failure) {
        self.failed(failure);
        self.end = End::Failed;
    }

    /// Ends the reservation of a request that the gateway answered itself.
    pub fn free(mut self) {
        self.begun();
        self.completed();
        self.end = End::Failed;
    }

    /// Use of the request, if it ended now in this way.
    pub(super) fn used(&self, end: End, facts: Facts, course: &Course, emitted: Emitted) -> Used {
        if self.opaque {
            return Used::default();
        }
        let (facts, estimated) = self.counted(end, facts, course, emitted);
        let target = course.target.as_deref();
        let price = target.map_or(self.billing.dearest, |target| self.billing.price_of(target));
        let answered = price.map_or(0, |price| bill::nano_of(&price, &facts, self.guess.tier));
        let abandoned = self.billing.abandoned_nano(course, self.prompt_tokens(), self.guess.tier);
        let nano_usd = if self.is_unanswered(course) { abandoned } else { answered + abandoned };
        Used { facts, nano_usd, estimated }
    }

    /// Returns true if several targets may have been asked and none has answered: each costs its own prompt.
    fn is_unanswered(&self, course: &Course) -> bool {
        !self.billing.own && course.target.is_none() && !course.attempts.is_empty()
    }

    /// Returns true if some target has the prompt and may bill for it: it was given up, or its answer has begun.
    fn has_prompt(&self, end: End, course: &Course) -> bool {
        match course.attempts.is_empty() {
            true => self.sent.get() && (end == End::Gone || self.may_bill || self.is_begun),
            false => course.attempts.iter().any(|attempt| bill::may_bill(attempt) || bill::has_begun(attempt)),
        }
    }

    /// Counts of the answer, and whether they are estimated. Counts reported before the answer was complete are at best
    /// a part of it. The prompt of a request without an answer counts once, however many targets were asked.
    fn counted(&self, end: End, facts: Facts, course: &Course, emitted: Emitted) -> (Facts, bool) {
        let own = self.billing.own;
        // Our own pools report the prompt's tokens when they begin to compute it.
        let is_known = if own { facts.completion_tokens > 0 } else { facts.is_known() };
        let is_silent = self.is_unanswered(course) || (!is_known && emitted.tokens() == 0);
        match end {
            End::Complete if own || facts.is_known() => return (facts, false),
            End::Failed | End::Gone if is_silent && !self.has_prompt(end, course) => return (Facts::default(), false),
            _ if own => return (facts, false),
            End::Failed | End::Gone if self.is_unanswered(course) => {
                return (Facts { prompt_tokens: self.prompt_tokens(), ..Facts::default() }, true);
            }
            End::Complete | End::Failed | End::Gone => {}
        }
        let bound = if self.guess.bounded && self.guess.obeyed { self.guess.output() } else { u64::MAX };
        let completion_tokens = emitted.tokens().min(bound).max(facts.completion_tokens);
        let prompt_tokens = if facts.prompt_tokens > 0 { facts.prompt_tokens } else { self.prompt_tokens() };
        (Facts { prompt_tokens, completion_tokens, ..facts }, true)
    }

    /// Prompt tokens of an attempt without reported counts.
    fn prompt_tokens(&self) -> u64 {
        if self.guess.counted {
            return self.guess.input();
        }
        let mean = self.governor.learned(&self.model).prompt_tokens_mean(self.guess.body_bytes);
        // There is no estimate where only the ledger counts.
        if self.guess.input() > 0 { mean.min(self.guess.input()) } else { mean }
    }

    /// Reserved and used amounts of the request so far, for the access log.
    pub(super) fn account(&self, used: &Used) -> Account {
        Account {
            reserved_tokens: self.guess.held(Unit::Tokens),
            reserved_nano_usd: self.guess.held(Unit::NanoUsd),
            tokens: used.facts.total(),
            nano_usd: used.nano_usd,
            estimated: used.estimated,
        }
    }

    fn settle(&mut self) {
        let used = self.used(self.end, self.facts, &self.course, self.emitted);
        if let Some(entry) = self.entry.take() {
            self.enter(entry, &used);
        }
        let (hold, portions, learns) = (self.hold.take(), self.portions.take(), self.learns(&used));
        if hold.is_some() || learns {
            let ending = Ending::new(self, &used);
            let elsewhere = if hold.is_some() { ending.elsewhere(&self.by_provider) } else { Vec::new() };
            if let Some((shared, portions)) = portions {
                shared.settle(portions, |tag, unit| ending.spent(tag, unit));
                shared.spend(&elsewhere);
            }
            let (mut state, now) = self.governor.state();
            if let Some(hold) = hold {
                ending.release(hold, &elsewhere, &mut state, now);
            }
            if learns {
                self.learn(&used, &mut state);
            }
        }
        self.measure(&self.account(&used));
    }

    /// Returns true if the use improves later estimates: only complete answers with counts from a provider.
    fn learns(&self, used: &Used) -> bool {
        self.end == End::Complete && !used.estimated && !self.billing.own && self.guess.body_bytes > 0
    }

    fn learn(&self, used: &Used, state: &mut State) {
        let output = if self.guess.bounded { 0 } else { used.facts.completion_tokens / self.guess.choices.max(1) };
        if !state.learned.contains_key(&self.model) {
            state.learned.insert(self.model.clone(), Learned::default());
        }
        if let Some(learned) = state.learned.get_mut(&self.model) {
            learned.see(self.guess.body_bytes, used.facts.prompt_tokens, output);
        }
    }

    /// Settles the request's ledger entry with the used amounts.
    fn enter(&self, noted: Noted, used: &Used) {
        let Some(journal) = self.governor.journal() else { return };
        let Noted { slot, began, first, outcome } = noted;
        let Facts { prompt_tokens, cached_tokens, cache_write_tokens, completion_tokens, reasoning_tokens, .. } =
            used.facts;
        let tokens = Tokens {
            input: prompt_tokens,
            input_cached: cached_tokens,
            input_written: cache_write_tokens,
            output: completion_tokens,
            reasoning: reasoning_tokens,
        };
        let total_ms = began.elapsed().as_millis() as u64;
        journal.settle(slot, |mut opened| {
            self.tell_end(&mut opened.subject, used);
            let micro_usd = self.governor.rounding.micro_usd(&opened, used.nano_usd);
            Entry {
                opened,
                tokens,
                micro_usd,
                status: self.status,
                outcome: outcome.into(),
                attempts: self.course.attempts.len().max(1) as u32,
                first_ms: first.map_or(0, |first| (first - began).as_millis() as u64),
                total_ms,
                assumed: false,
            }
        });
    }

    /// Completes the entry's subject at the request's end; mostly it is unchanged.
    fn tell_end(&self, subject: &mut Arc<Subject>, used: &Used) {
        let provider = self.course.target.as_deref().and_then(|target| target.split('/').next());
        if let Some(provider) = provider.filter(|provider| *provider != subject.provider) {
            Arc::make_mut(subject).provider = provider.to_owned();
        }
        if used.estimated {
            let tags = &mut Arc::make_mut(subject).tags;
            let at = tags.partition_point(|tag| tag.as_str() < ESTIMATED);
            tags.insert(at, ESTIMATED.to_owned());
        }
    }

    /// Counts the reserved and the used amounts of a request whose tokens or money a limit counts.
    fn measure(&self, account: &Account) {
        let governor = &self.governor;
        if !self.guess.metered || account.reserved_tokens + account.tokens == 0 {
            return;
        }
        let usd = |nano: u64| nano as f64 / 1e9;
        let tokens = (account.reserved_tokens as f64, account.tokens as f64);
        let money = (usd(account.reserved_nano_usd), usd(account.nano_usd));
        for (tallies, (reserved, settled)) in governor.tallies.iter().zip([tokens, money]) {
            tallies.reserved.observe(reserved);
            tallies.settled.observe(settled);
            if settled > reserved {
                governor.metrics.observe(Metric::LimitExceeded, &[("unit", tallies.unit)], settled - reserved);
            }
        }
    }
}

/// Returns true if a failure is a timeout of the upstream, which may have computed the prompt.
fn is_timeout(failure: &Failure) -> bool {
    failure.kind == ErrorKind::DeadlineExceeded || judge(failure).reason == Some(Reason::Timeout)
}

/// Amounts that a reservation is settled with, claim by claim.
struct Ending<'a> {
    used: &'a Used,
    /// Estimate that the reserved amounts came from.
    guess: &'a Guess,
    /// Providers of the claims, in the order of their tags.
    providers: &'a [Arc<str>],
    /// Provider (or pool) that has answered; `None`: the target is not known.
    answered: Option<&'a str>,
}

impl<'a> Ending<'a> {
    fn new(reservation: &'a Reservation, used: &'a Used) -> Self {
        let answered = reservation.course.target.as_deref().and_then(|target| target.split('/').next());
        Self { used, guess: &reservation.guess, providers: &reservation.billing.providers, answered }
    }

    fn of(&self, unit: Unit) -> u64 {
        let Used { facts, nano_usd, .. } = self.used;
        match unit {
            Unit::Requests => 1,
            Unit::InFlight => 0,
            Unit::Tokens => facts.total(),
            Unit::InputTokens => facts.prompt_tokens,
            Unit::OutputTokens => facts.completion_tokens,
            Unit::NanoUsd => *nano_usd,
        }
    }

    /// Amount used for the claim with this tag; `None`: the reserved amount.
    fn spent(&self, tag: u16, unit: Unit) -> Option<u64> {
        let at = usize::from(tag & !STRICT).checked_sub(1);
        let provider = at.and_then(|at| self.providers.get(at));
        let elsewhere = provider.zip(self.answered).is_some_and(|(provider, answered)| **provider != *answered);
        match unit.is_metered() {
            // The reserved amount, or the use where it is higher.
            true if self.used.estimated && tag & STRICT != 0 => {
                let excess = !elsewhere && self.of(unit) > self.guess.of_unit(unit, Reserve::Most);
                excess.then(|| self.of(unit))
            }
            _ if elsewhere => Some(0),
            _ => Some(self.of(unit)),
        }
    }

    /// Use by a provider of `fallback`, for which nothing was reserved, in the limits by provider.
    fn elsewhere<'b>(&'b self, by_provider: &'b [Arc<Limit>]) -> Vec<Claim<'b>> {
        let is_fallback = |answered: &&str| !self.providers.iter().any(|provider| **provider == **answered);
        let Some(provider) = self.answered.filter(is_fallback) else { return Vec::new() };
        by_provider
            .iter()
            .flat_map(|limit| limit.measures.iter().map(move |measure| (limit, *measure)))
            .map(|(limit, measure)| {
                let amount = self.of(measure.unit);
                Claim { limit: &limit.id, subject: provider, measure, amount, tag: 0 }
            })
            .collect()
    }

    /// Replaces the request's holds in the counters by the amounts used, and adds `claims` for which nothing was held.
    fn release(&self, hold: Hold, claims: &[Claim<'_>], state: &mut State, now: Now) {
        let id = hold.id();
        settle_hold(hold, |tag, unit| self.spent(tag, unit), state, now);
        claims.iter().for_each(|claim| state.book.restore(claim, now));
        if let Some(give) = state.give.as_ref().filter(|_| !claims.is_empty()) {
            // The number is free again; without amounts a hold counts as it is.
            let _ = give.try_send(Given::Held { id, claims: claims.iter().map(Claimed::from).collect() });
            let _ = give.try_send(Given::Settled { id, amounts: Vec::new() });
        }
    }
}

/// Replaces a hold in the counters by the amounts used, here and in the process that goes on with them, if there is one.
fn settle_hold(hold: Hold, spent: impl Fn(u16, Unit) -> Option<u64>, state: &mut State, now: Now) {
    let Some(give) = &state.give else { return state.book.settle(hold, now, spent) };
    let (id, mut amounts) = (hold.id(), Vec::new());
    state.book.settle(hold, now, |tag, unit| {
        let amount = spent(tag, unit);
        amounts.extend(amount.map(|amount| (tag, unit, amount)));
        amount
    });
    // A full channel or an ended process: there the hold counts with its reserved amount.
    let _ = give.try_send(Given::Settled { id, amounts });
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // Without hold and entry the request was not admitted.
        if self.hold.is_some() || self.entry.is_some() {
            self.settle();
        }
    }
}
