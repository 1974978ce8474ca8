//! `/status`: the limits of a principal, the standing of its counters, and the reason where a limit has no effect.

use std::net::IpAddr;
use std::sync::Arc;

use penstock_govern::{Claim, For, Limit, Measure, Standing, Unit};
use serde_json::{Value, json};

use super::rules::{self, Who};
use super::{Governor, Rules, shared};
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

/// Limits that the principal is under, with its own counters: of all gateways together, where they share them. Counters
/// of others are visible to them and to the operator only.
pub async fn status(governor: &Governor, effect: &Effect<'_>, principal: &Principal, from: Option<IpAddr>) -> Value {
    let own: Vec<&Arc<Limit>> = effect.rules.limits().iter().filter(|limit| is_own(limit, principal)).collect();
    let who = Who { principal, model: "", providers: &[], from };
    let mut counted: Vec<Counted> = own.iter().flat_map(|limit| of_limit(governor, limit, &who)).collect();
    // One look for all limits: a store that is slow or away is waited for once.
    governor.look(&mut counted).await;
    let mut rest = counted.as_slice();
    let mut limits = Vec::new();
    for limit in own {
        let (counted, others) = rest.split_at(limit.measures.len());
        rest = others;
        limits.push(one(governor, effect, limit, counted));
    }
    json!({ "limits": limits })
}

/// Returns true if the limit applies to requests of the principal.
fn is_own(limit: &Limit, principal: &Principal) -> bool {
    limit.applies == For::Everyone
        || (limit.applies == For::Anonymous && principal.key.is_none())
        || principal.limits.iter().any(|id| **id == *limit.id)
}

/// Counters of the limit for whoever asks, one per measure.
fn of_limit(governor: &Governor, limit: &Arc<Limit>, who: &Who<'_>) -> Vec<Counted> {
    let subjects = rules::subjects(&[limit], who);
    let own = &subjects[subjects.len() - 1].1;
    let counted = |measure: &Measure| Counted {
        limit: limit.id.clone(),
        subject: own.to_string(),
        measure: *measure,
        standing: governor.standing(&limit.id, own, *measure),
    };
    limit.measures.iter().map(counted).collect()
}

fn one(governor: &Governor, effect: &Effect<'_>, limit: &Arc<Limit>, counted: &[Counted]) -> Value {
    let why = ineffective(effect, limit);
    let measure = |Counted { measure, standing, .. }: &Counted| {
        let shown = |amount: u64| match measure.unit {
            Unit::NanoUsd => json!(amount as f64 / 1e9),
            _ => json!(amount),
        };
        json!({
            "measure": measure.name(),
            "max": shown(measure.max),
            "used": shown(standing.used),
            "reserved": shown(standing.reserved),
            "reset_ms": standing.reset_ms,
        })
    };
    let measures: Vec<Value> = counted.iter().map(measure).collect();
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

/// Standing of one counter of a limit.
struct Counted {
    limit: Arc<str>,
    subject: String,
    measure: Measure,
    standing: Standing,
}

impl From<Counted> for CounterState {
    fn from(Counted { subject, measure, standing, .. }: Counted) -> Self {
        let amount = |amount: u64| if measure.unit == Unit::NanoUsd { amount as f64 / 1e9 } else { amount as f64 };
        Self {
            subject,
            measure: measure.name(),
            max: amount(measure.max),
            used: amount(standing.used),
            reserved: amount(standing.reserved),
            reset_ms: standing.reset_ms,
        }
    }
}

impl Governor {
    /// Counters of the limit that are in use here, as this gateway counts them.
    pub fn counters(&self, limit: &Limit) -> Vec<CounterState> {
        self.counted(limit).into_iter().map(CounterState::from).collect()
    }

    /// Counters of the limit that are in use here, each with its subject, bound, use and reset time. Counters that
    /// gateways share have the use by all of them, the others' leases included, as the shared store last told it.
    pub async fn counters_together(&self, limit: &Limit) -> Vec<CounterState> {
        let mut counted = self.counted(limit);
        self.look(&mut counted).await;
        counted.into_iter().map(CounterState::from).collect()
    }

    fn counted(&self, limit: &Limit) -> Vec<Counted> {
        let mut out = Vec::new();
        let (mut state, now) = self.state();
        for measure in &limit.measures {
            state.book.standings(&limit.id, *measure, now, &mut |subject, standing| {
                let (limit, subject) = (limit.id.clone(), subject.to_owned());
                out.push(Counted { limit, subject, measure: *measure, standing });
            });
        }
        out
    }

    /// Raises the standings to the use by all gateways together, where they share their counters.
    async fn look(&self, counted: &mut [Counted]) {
        let Some(shared) = self.shared.get() else { return };
        let mut claims = Vec::with_capacity(counted.len());
        for Counted { limit, subject, measure, .. } in &*counted {
            claims.push(Claim { limit, subject, measure: *measure, amount: 0, tag: 0 });
        }
        let used = shared.look(&claims).await;
        for (Counted { measure, standing, .. }, used) in counted.iter_mut().zip(used) {
            if used > standing.used {
                standing.used = used;
                standing.reset_ms = standing.reset_ms.max(shared::wait_ms(measure.span).unwrap_or(0));
            }
        }
    }
}
