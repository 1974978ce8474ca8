//! `/status`: the limits of a principal, the standing of its counters, and the reason where a limit has no effect.

use std::net::IpAddr;
use std::sync::Arc;

use penstock_govern::{For, Limit, Unit};
use serde_json::{Value, json};

use super::rules::{self, Who};
use super::{Governor, Rules};
use penstock_auth::Principal;
use penstock_relay::models::Entry;

/// Limits in force, with what they can have an effect on.
pub struct Effect<'a> {
    /// Limits of the config.
    pub rules: &'a Rules,
    /// Models that are served.
    pub models: &'a [Entry],
    /// Ids of the limits that each key and team of the config names.
    pub named: Vec<&'a [String]>,
}

impl Effect<'_> {
    /// All limits, with reasons for those without effect.
    pub fn limits(&self) -> Vec<LimitState> {
        let state = |limit: &Arc<Limit>| LimitState { limit: limit.clone(), why_not: ineffective(self, limit) };
        self.rules.limits().iter().map(state).collect()
    }
}

/// Limits that the principal is under, with its own counters. Counters of others are visible to them and to the operator only.
pub fn status(governor: &Governor, effect: &Effect<'_>, principal: &Principal, from: Option<IpAddr>) -> Value {
    let own = effect.rules.limits().iter().filter(|limit| is_own(limit, principal));
    let limits: Vec<Value> = own.map(|limit| one(governor, effect, limit, principal, from)).collect();
    json!({ "limits": limits })
}

/// Returns true if the limit applies to requests of the principal.
fn is_own(limit: &Limit, principal: &Principal) -> bool {
    limit.applies == For::Everyone
        || (limit.applies == For::Anonymous && principal.key.is_none())
        || principal.limits.iter().any(|id| **id == *limit.id)
}

fn one(
    governor: &Governor,
    effect: &Effect<'_>,
    limit: &Arc<Limit>,
    principal: &Principal,
    from: Option<IpAddr>,
) -> Value {
    let why = ineffective(effect, limit);
    let measures: Vec<Value> = limit
        .measures
        .iter()
        .map(|measure| {
            let shown = |amount: u64| match measure.unit {
                Unit::NanoUsd => json!(amount as f64 / 1e9),
                _ => json!(amount),
            };
            let mut out = json!({ "measure": measure.name(), "max": shown(measure.max) });
            let who = Who { principal, model: "", providers: &[], from };
            let subjects = rules::subjects(&[limit], &who);
            let (mut state, now) = governor.state();
            let own = &subjects[subjects.len() - 1].1;
            let standing = state.book.standing(&limit.id, own, *measure, now);
            drop(state);
            out["used"] = shown(standing.used);
            out["reserved"] = shown(standing.reserved);
            out["reset_ms"] = json!(standing.reset_ms);
            out
        })
        .collect();
    json!({
        "id": &*limit.id,
        "for": limit.applies,
        "by": limit.by,
        "models": limit.models,
        "measures": measures,
        "yours": true,
        "effective": why.is_none(),
        "why_not": why,
        "counted_by": governor.counted_by(),
        "on_store_failure": limit.on_store_failure,
        "max_tokens_default": limit.max_tokens_default,
        "max_tokens_max": limit.max_tokens_max,
        "surge": limit.surge,
    })
}

/// Reason that a limit has no effect, or less than it seems to; `None`: it is effective.
fn ineffective(effect: &Effect<'_>, limit: &Limit) -> Option<String> {
    let covered: Vec<_> = effect.models.iter().filter(|entry| limit.covers(&entry.name)).collect();
    if covered.is_empty() {
        return Some("no model that it is for is served".into());
    }
    let named = |limits: &[String]| limits.iter().any(|id| **id == *limit.id);
    if limit.applies == For::Named && !effect.named.iter().any(|limits| named(limits)) {
        return Some("no key or team of the config names it; issued keys may".into());
    }
    if limit.measures(Unit::NanoUsd) && covered.iter().all(|entry| entry.billing.dearest.is_none()) {
        return Some("it counts money, and no model that it is for has a price".into());
    }
    None
}

/// One limit of the config with its effectiveness, for the admin API.
#[derive(Clone, Debug)]
pub struct LimitState {
    /// Limit with its id, measures and scope, as the config has it.
    pub limit: Arc<Limit>,
    /// Reason that the limit has no effect, or less than it seems to.
    pub why_not: Option<String>,
}

/// One counter of a limit: a subject and a measure, with the use so far.
#[derive(Clone, Debug, PartialEq)]
pub struct CounterState {
    /// Subject of the counter: id of a key or a team, an address, …
    pub subject: String,
    /// Name of the measure, such as requests per minute.
    pub measure: &'static str,
    /// Bound of the measure in its unit; money in dollars.
    pub max: f64,
    /// Amount used in the window, reservations included; money in dollars.
    pub used: f64,
    /// Part of `used` that is reserved by requests in progress.
    pub reserved: f64,
    /// Milliseconds until the counter is back at zero, if nothing more is used.
    pub reset_ms: u64,
}

impl Governor {
    /// Counters of the limit that are in use, each with its subject, bound, use and reset time.
    pub fn counters(&self, limit: &Limit) -> Vec<CounterState> {
        let mut out = Vec::new();
        let (mut state, now) = self.state();
        for measure in &limit.measures {
            let amount = |amount: u64| if measure.unit == Unit::NanoUsd { amount as f64 / 1e9 } else { amount as f64 };
            state.book.standings(&limit.id, *measure, now, &mut |subject, standing| {
                out.push(CounterState {
                    subject: subject.to_owned(),
                    measure: measure.name(),
                    max: amount(measure.max),
                    used: amount(standing.used),
                    reserved: amount(standing.reserved),
                    reset_ms: standing.reset_ms,
                });
            });
        }
        out
    }
}
