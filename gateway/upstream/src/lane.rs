//! Health of an upstream per client key: one circuit breaker for each key that has seen failures, and one for everybody.
//!
//! A failure can be the fault of the upstream or of the request, and a status code does not tell which. So no key's
//! failures alone close an upstream to everybody. Each key (an [`Asker`]) has a [`Breaker`] of its own, created at its
//! first failure. The common breaker opens on evidence that stands without the key that failed most: in a row of
//! failures one key counts at most twice, the failure rate is taken without the worst key, and a Retry-After counts
//! when two keys were told it and no request was answered since.
//!
//! Nothing is ever shut altogether. Where no other target is left, a *trial* goes through: one per key at a time, and a
//! few at once over all keys. A trial that is answered closes the breakers. So a failing upstream gets a few requests,
//! and a request that would work is refused only while another trial of its own key is in flight.
//!
//! A target has a lane for each surface (chat, embeddings …), a provider's key one for each model and path. Pure: time is an argument.

use std::time::{Duration, Instant};

use super::breaker::{Admission, Breaker, Rules, Ticket};
use crate::Asker;

/// Failures of one key that count in a common row: five in a row then come from three keys or more.
const ROW_SHARE: u32 = 2;
/// Keys that must have been told a Retry-After before it applies to everybody.
const LIMITED_MIN: usize = 2;
/// Most trials in flight over all keys of one lane.
const TRIALS_MAX: u32 = 8;
/// Most keys with a breaker of their own in one lane. Beyond that the key that failed longest ago loses its breaker.
const OWN_MAX: usize = 128;
/// Most keys whose failures are counted apart in half a window.
const RATED_MAX: usize = 32;
/// Interval of trials during a Retry-After, as a fraction of it (1/10), within [`TRIAL_MIN`] and [`TRIAL_MAX`].
const TRIAL_PART: u32 = 10;
/// Least interval of trials during a Retry-After, however short the Retry-After is.
const TRIAL_MIN: Duration = Duration::from_secs(1);
/// Longest interval of trials during a Retry-After, however long the Retry-After is.
const TRIAL_MAX: Duration = Duration::from_secs(30);

/// Reason that an upstream gets no requests, for the client and the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The upstream answers requests with errors of its own.
    Errors,
    /// The upstream does not answer within the time limit.
    Silence,
    /// The upstream says that it is overloaded.
    Busy,
    /// The upstream does not know the model or the operation.
    Absent,
    /// The upstream rejects the gateway's key.
    Refused,
    /// The gateway's account has no credit left.
    Credit,
    /// The upstream asks for fewer requests: 429 or a Retry-After.
    Limited,
    /// The active health checks of the upstream fail.
    Checks,
}

impl Why {
    /// Predicate for a message, behind "The upstream …".
    pub fn says(self) -> &'static str {
        match self {
            Why::Errors => "answers with errors",
            Why::Silence => "does not answer in time",
            Why::Busy => "is overloaded",
            Why::Absent => "does not have this model or operation",
            Why::Refused => "refuses the gateway's key",
            Why::Credit => "has no credit left for the gateway",
            Why::Limited => "asks for fewer requests",
            Why::Checks => "is down by its health check",
        }
    }

    /// Value of the log field that names the reason.
    pub fn name(self) -> &'static str {
        match self {
            Why::Errors => "errors",
            Why::Silence => "silence",
            Why::Busy => "busy",
            Why::Absent => "not_found",
            Why::Refused => "key_refused",
            Why::Credit => "no_credit",
            Why::Limited => "rate_limit",
            Why::Checks => "health_check",
        }
    }
}

/// Change of a lane's state after an outcome, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// True if the change applies to everybody, not only to the request's key.
    pub everybody: bool,
    /// New state: 0 good, 2 last choice, 3 left alone.
    pub level: u8,
    /// Reason why requests are held back; without meaning where the state is good (level 0).
    pub why: Why,
}

impl Change {
    /// Value of the log field that names the new state.
    pub fn name(self) -> &'static str {
        match self.level {
            0 => "good",
            2 => "last_choice",
            _ => "left_alone",
        }
    }
}

/// Permission to send one request; consumed with the request's outcome.
#[derive(Debug)]
pub struct Pass {
    asker: Asker,
    common: Ticket,
    own: Option<Ticket>,
    trial: bool,
}

impl Pass {
    /// Returns true if the request goes through although the breaker is open.
    pub fn is_trial(&self) -> bool {
        self.trial
    }
}

/// Breaker of one key within a lane, with the state of its trials.
#[derive(Debug)]
struct Own {
    asker: Asker,
    breaker: Breaker,
    touched: Instant,
    /// True if a trial of the key is in flight; a key has at most one.
    busy: bool,
    trial_after: Option<Instant>,
    why: Why,
    /// Level of the last [`Change`] of this key alone.
    told: u8,
}

/// Breakers of one surface of a target, or of one use of a provider's key.
#[derive(Debug)]
pub struct Lane {
    rules: Rules,
    common: Breaker,
    own: Vec<Own>,
    /// Failures that count for everybody since the last success of any key, by key.
    row: Vec<(Asker, u32)>,
    /// Keys that were told a Retry-After since the last success of any key, with its end.
    limited: Vec<(Asker, Instant)>,
    rate: Rate,
    /// Trials in flight over all keys, at most [`TRIALS_MAX`].
    trials: u32,
    trial_after: Option<Instant>,
    why: Why,
    /// Level of the last [`Change`] for everybody.
    told: u8,
}

impl Lane {
    /// A lane that admits every key, with no failure counted.
    pub fn new(rules: Rules) -> Self {
        // The common breaker judges no rate of its own: it is judged here, without the worst key.
        let common = Breaker::new(Rules { answers_min: u32::MAX, ..rules });
        Self {
            rules,
            common,
            own: Vec::new(),
            row: Vec::new(),
            limited: Vec::new(),
            rate: Rate::default(),
            trials: 0,
            trial_after: None,
            why: Why::Errors,
            told: 0,
        }
    }

    /// Whether a request of the key `asker` may be sent now, and if not, until when.
    pub fn look(&self, asker: Asker, now: Instant) -> Admission {
        let own = self.find(asker).map_or(Admission::Yes, |own| own.breaker.look(now));
        match self.common.look(now).worse(own) {
            Admission::No(until) if self.has_trial(asker, now) => Admission::Trial(until),
            other => other,
        }
    }

    /// Returns true if a trial of this key may be sent now, within the bounds on trials.
    pub fn has_trial(&self, asker: Asker, now: Instant) -> bool {
        let is_over = |at: Option<Instant>| at.is_none_or(|at| now >= at);
        let own = |own: &Own| !own.busy && !own.breaker.is_probing() && is_over(own.trial_after);
        self.trials < TRIALS_MAX && is_over(self.trial_after) && self.find(asker).is_none_or(own)
    }

    /// Admits a request of this key. `trial`: it goes through although the breaker is open.
    pub fn enter(&mut self, asker: Asker, trial: bool, now: Instant) -> Pass {
        if trial {
            self.trials += 1;
            self.own(asker, now).busy = true;
        }
        let common = self.common.enter(now);
        let own = self.find_mut(asker).map(|own| own.breaker.enter(now));
        Pass { asker, common, own, trial }
    }

    /// Counts a request that was answered; returns the change of the lane's state, if any. The end of a pause by time counts
    /// as a change here, at the first answer after it.
    pub fn succeed(&mut self, pass: Pass, now: Instant) -> Option<Change> {
        let (who, mut before) = (pass.asker, self.kinds(pass.asker, now));
        self.settle_good(pass, now);
        let (common, own) = self.kinds(who, now);
        if common == 0 {
            before.0 = before.0.max(self.told);
        }
        if own == 0 {
            before.1 = before.1.max(self.find(who).map_or(0, |own| own.told));
        }
        self.change(who, before, now)
    }

    fn settle_good(&mut self, pass: Pass, now: Instant) {
        self.end(&pass);
        let Pass { asker, common, own: ticket, trial } = pass;
        if trial || self.common.is_current(&common) {
            self.row.clear();
            self.limited.clear();
            self.rate.add(asker, false, self.rules.window, now);
        }
        if let Some(own) = self.find_mut(asker) {
            match ticket {
                _ if trial => {
                    own.breaker.prove(now);
                    own.trial_after = None;
                }
                Some(ticket) => own.breaker.succeed(ticket, now),
                None => {}
            }
        }
        let was_closed = self.common.is_closed();
        match trial {
            true => {
                self.common.prove(now);
                self.trial_after = None;
            }
            false => self.common.succeed(common, now),
        }
        if !was_closed && self.common.is_closed() {
            self.rate = Rate::default();
        }
    }

    /// Counts a request that failed before its first event; returns the change of the lane's state, if any.
    pub fn fail(&mut self, pass: Pass, why: Why, now: Instant) -> Option<Change> {
        let (who, before) = (pass.asker, self.kinds(pass.asker, now));
        self.settle_bad(pass, why, now);
        self.change(who, before, now)
    }

    fn settle_bad(&mut self, pass: Pass, why: Why, now: Instant) {
        self.end(&pass);
        let Pass { asker, common, own: ticket, trial } = pass;
        let is_current = self.common.is_current(&common);
        let own = self.own(asker, now);
        own.why = why;
        match ticket {
            Some(ticket) if ticket.is_probe() || !trial => own.breaker.fail(ticket, now),
            // A failed trial neither reopens nor prolongs what is open already.
            _ if trial => {}
            _ => own.breaker.broke(now),
        }
        if common.is_probe() {
            self.why = why;
            return self.common.fail(common, now);
        }
        if trial || !is_current {
            return;
        }
        if self.counts(asker) {
            self.common.fail(common, now);
            self.why = why;
        }
        self.rated(asker, why, now);
    }

    /// Counts an answer to the key that broke off after it had begun.
    pub fn broke(&mut self, asker: Asker, why: Why, now: Instant) -> Option<Change> {
        let before = self.kinds(asker, now);
        let is_first = self.find(asker).is_none();
        let own = self.own(asker, now);
        own.why = why;
        if is_first {
            // The answer had begun, which a new breaker has to count first.
            let ticket = own.breaker.enter(now);
            own.breaker.succeed(ticket, now);
        }
        own.breaker.broke(now);
        if self.counts(asker) {
            self.common.broke(now);
            self.why = why;
        }
        self.rated(asker, why, now);
        self.change(asker, before, now)
    }

    /// Returns a permission whose request had no outcome (cancelled before the answer).
    pub fn abandon(&mut self, pass: Pass, now: Instant) {
        self.end(&pass);
        self.common.abandon(pass.common, now);
        if let (Some(own), Some(ticket)) = (self.find_mut(pass.asker), pass.own) {
            own.breaker.abandon(ticket, now);
        }
    }

    /// Notes that the key was told (Retry-After) to come back at `until`.
    pub fn cool(&mut self, asker: Asker, until: Instant, why: Why, now: Instant) -> Option<Change> {
        let before = self.kinds(asker, now);
        let apart = (until.saturating_duration_since(now) / TRIAL_PART).clamp(TRIAL_MIN, TRIAL_MAX);
        self.limited.retain(|(_, until)| *until > now);
        if self.limited.len() < LIMITED_MIN && !self.limited.iter().any(|(other, _)| *other == asker) {
            self.limited.push((asker, until));
        }
        let is_common = self.limited.len() >= LIMITED_MIN;
        let own = self.own(asker, now);
        own.why = why;
        own.breaker.cool(until);
        // A key that was told before tries again after those that may try for the first time.
        own.trial_after = Some(now + if is_common { apart * 2 } else { apart });
        if is_common {
            self.why = why;
            self.common.cool(until);
            self.trial_after = Some(now + apart);
        }
        self.change(asker, before, now)
    }

    /// Reason why requests of the key `asker` are not sent.
    pub fn why(&self, asker: Asker, now: Instant) -> Why {
        let own = self.find(asker).filter(|own| matches!(own.breaker.look(now), Admission::No(_)));
        own.map_or(self.why, |own| own.why)
    }

    /// State as the metric shows it: 0 good, 1 probing, 2 last choice, 3 left alone. A single key's state counts while
    /// no other key was answered since.
    pub fn level(&self, now: Instant) -> u8 {
        let own = self.own.iter().map(|own| own.breaker.level(now)).max().unwrap_or(0);
        let is_undisputed = !self.row.is_empty() || !self.limited.is_empty();
        self.common.level(now).max(if is_undisputed { own } else { 0 })
    }

    /// States of the common breaker and of this key's own: 0 good, 2 last choice, 3 left alone.
    fn kinds(&self, asker: Asker, now: Instant) -> (u8, u8) {
        let own = self.find(asker).map_or(0, |own| own.breaker.kind(now));
        (self.common.kind(now), own)
    }

    fn change(&mut self, asker: Asker, before: (u8, u8), now: Instant) -> Option<Change> {
        let (common, level) = self.kinds(asker, now);
        if common != before.0 {
            self.told = common;
            return Some(Change { everybody: true, level: common, why: self.why });
        }
        if level == before.1 {
            return None;
        }
        let common_why = self.why;
        let why = self.find_mut(asker).map_or(common_why, |own| {
            own.told = level;
            own.why
        });
        Some(Change { everybody: false, level, why })
    }

    /// Returns true if a Retry-After that any key was told is still running.
    pub fn is_cooling(&self, now: Instant) -> bool {
        self.common.is_cooling(now) || self.own.iter().any(|own| own.breaker.is_cooling(now))
    }

    /// Returns true if the lane holds no more than a new one.
    pub fn is_idle(&self, now: Instant) -> bool {
        self.trials == 0 && self.level(now) == 0 && !self.is_cooling(now)
    }

    fn end(&mut self, pass: &Pass) {
        if pass.trial {
            self.trials = self.trials.saturating_sub(1);
            if let Some(own) = self.find_mut(pass.asker) {
                own.busy = false;
            }
        }
    }

    /// Returns true if a failure of the key counts in the common breaker, too.
    fn counts(&mut self, asker: Asker) -> bool {
        let total: u32 = self.row.iter().map(|(_, count)| count).sum();
        if total >= self.rules.in_a_row {
            return false;
        }
        match self.row.iter_mut().find(|(other, _)| *other == asker) {
            Some((_, count)) if *count >= ROW_SHARE => return false,
            Some((_, count)) => *count += 1,
            None => self.row.push((asker, 1)),
        }
        true
    }

    fn rated(&mut self, asker: Asker, why: Why, now: Instant) {
        self.rate.add(asker, true, self.rules.window, now);
        if self.rate.is_bad(&self.rules) && self.common.soften(now) {
            self.why = why;
            self.rate = Rate::default();
        }
    }

    fn find(&self, asker: Asker) -> Option<&Own> {
        self.own.iter().find(|own| own.asker == asker)
    }

    fn find_mut(&mut self, asker: Asker) -> Option<&mut Own> {
        self.own.iter_mut().find(|own| own.asker == asker)
    }

    /// State of this key, created on first use; the longest idle key without a trial makes room.
    fn own(&mut self, asker: Asker, now: Instant) -> &mut Own {
        let at = match self.own.iter().position(|own| own.asker == asker) {
            Some(at) => at,
            None => {
                if self.own.len() >= OWN_MAX {
                    let idle = self.own.iter().enumerate().filter(|(_, own)| !own.busy);
                    let oldest = idle.min_by_key(|(_, own)| own.touched).map_or(0, |(at, _)| at);
                    self.own.swap_remove(oldest);
                }
                let breaker = Breaker::new(self.rules);
                self.own.push(Own {
                    asker,
                    breaker,
                    touched: now,
                    busy: false,
                    trial_after: None,
                    why: Why::Errors,
                    told: 0,
                });
                self.own.len() - 1
            }
        };
        self.own[at].touched = now;
        &mut self.own[at]
    }
}

/// Outcomes of the last one half to one whole window, with the failures by key.
#[derive(Debug, Default)]
struct Rate {
    began: Option<Instant>,
    halves: [Half; 2],
}

#[derive(Debug, Default)]
struct Half {
    answers: u32,
    failures: u32,
    /// Per key with failures: answers since its first failure, and failures.
    by: Vec<(Asker, u32, u32)>,
}

impl Rate {
    fn add(&mut self, asker: Asker, failed: bool, window: Duration, now: Instant) {
        let began = *self.began.get_or_insert(now);
        let age = now.saturating_duration_since(began);
        if age >= window / 2 {
            let before = std::mem::take(&mut self.halves[0]);
            self.halves[1] = if age < window { before } else { Half::default() };
            self.began = Some(now);
        }
        let half = &mut self.halves[0];
        half.answers += 1;
        half.failures += u32::from(failed);
        let has_room = half.by.len() < RATED_MAX;
        match half.by.iter_mut().find(|(other, ..)| *other == asker) {
            Some((_, answers, failures)) => {
                *answers += 1;
                *failures += u32::from(failed);
            }
            None if failed && has_room => half.by.push((asker, 1, 1)),
            None => {}
        }
    }

    /// Returns true if the rate is bad without the key that failed most.
    fn is_bad(&self, rules: &Rules) -> bool {
        let mut by: Vec<(Asker, u32, u32)> = self.halves[0].by.clone();
        for (asker, answers, failures) in &self.halves[1].by {
            match by.iter_mut().find(|(other, ..)| other == asker) {
                Some(sum) => {
                    sum.1 += answers;
                    sum.2 += failures;
                }
                None => by.push((*asker, *answers, *failures)),
            }
        }
        let worst = by.iter().max_by_key(|(_, _, failures)| *failures).map_or((0, 0), |(_, a, f)| (*a, *f));
        let sum = |of: fn(&Half) -> u32| self.halves.iter().map(of).sum::<u32>();
        let answers = sum(|half| half.answers).saturating_sub(worst.0);
        let failures = sum(|half| half.failures).saturating_sub(worst.1);
        answers >= rules.answers_min && u64::from(failures) * 100 >= u64::from(answers) * u64::from(rules.percent)
    }
}

#[cfg(test)]
#[path = "lane_tests.rs"]
mod tests;
