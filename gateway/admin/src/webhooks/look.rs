//! State that webhooks tell of, as it is at one moment.

use std::collections::BTreeMap;
use std::time::Duration;

use penstock_govern::Unit;
use penstock_store::{KeyFilter, Order, Page};

use super::Watched;
use super::edges::{Budget, Now, Seen};

/// Interval at which issued keys are read.
const KEYS_EACH: Duration = Duration::from_secs(60);
/// Timeout of the store for a page of keys.
const KEYS_TIMEOUT: Duration = Duration::from_secs(5);
/// Keys on one page of the store.
const PAGE: u32 = 500;
/// Most keys with an end that are followed.
const KEYS_MAX: usize = 10_000;
/// Level of a target's breaker that lets no request through.
const OPEN_HARD: u32 = 3;

/// Issued keys that have an end, as they were read last.
#[derive(Default)]
pub(super) struct Keys {
    read: Option<Duration>,
    ends: Vec<(String, u64)>,
}

/// State of the gateway now.
pub(super) async fn seen(watched: &Watched, keys: &mut Keys, now: Now) -> Seen {
    if keys.read.is_none_or(|read| now.since.saturating_sub(read) >= KEYS_EACH) {
        keys.read = Some(now.since);
        if let Some(ends) = issued(watched).await {
            keys.ends = ends;
        }
    }
    let serving = watched.gateway.serving();
    let own = serving.config.auth.keys.iter().filter_map(|key| Some((key.id.to_string(), key.scope.expires?)));
    Seen {
        budgets: budgets(watched).await,
        providers: providers(watched),
        workers: workers(watched),
        keys: own.chain(keys.ends.iter().cloned()).collect(),
    }
}

async fn budgets(watched: &Watched) -> Vec<Budget> {
    let mut out = Vec::new();
    for limit in
        watched.gateway.limits().into_iter().map(|state| state.limit).filter(|limit| limit.measures(Unit::NanoUsd))
    {
        for counter in watched.gateway.governor.counters_together(&limit).await {
            if counter.measure.starts_with("usd_") {
                let (limit, measure) = (limit.id.to_string(), counter.measure.to_owned());
                let (subject, used, max) = (counter.subject, counter.used - counter.reserved, counter.max);
                out.push(Budget { limit, subject, measure, used, max });
            }
        }
    }
    out
}

/// A provider is down where none of its targets takes requests.
fn providers(watched: &Watched) -> Vec<(String, bool)> {
    let serving = watched.gateway.serving();
    let mut up: BTreeMap<String, bool> = BTreeMap::new();
    for target in serving.models().targets() {
        let Some((provider, _)) = target.id.split_once('/') else { continue };
        let is_up = up.entry(provider.to_owned()).or_default();
        *is_up |= u32::from(target.level) < OPEN_HARD && target.unready.is_none();
    }
    up.into_iter().map(|(provider, is_up)| (provider, !is_up)).collect()
}

fn workers(watched: &Watched) -> Vec<(String, u64, u64)> {
    let mut out = Vec::new();
    for (_, pool) in watched.fleet.pools() {
        out.extend(pool.status().workers.iter().map(|worker| (worker.name.clone(), worker.starts, worker.deaths)));
    }
    out
}

/// Issued keys that are valid and have an end; `None`: the store did not answer.
async fn issued(watched: &Watched) -> Option<Vec<(String, u64)>> {
    let filter = KeyFilter { team: None, user: None, parent: None, revoked: Some(false) };
    let (mut out, mut after) = (Vec::new(), None);
    loop {
        let page = Page { after, limit: PAGE, order: Order::Ascending };
        let listing = tokio::time::timeout(KEYS_TIMEOUT, watched.store.keys(&filter, &page)).await.ok()?.ok()?;
        after = listing.items.last().map(|key| key.id.to_string());
        out.extend(listing.items.into_iter().filter_map(|key| Some((key.id.to_string(), key.scope.expires?))));
        if !listing.more || after.is_none() || out.len() >= KEYS_MAX {
            return Some(out);
        }
    }
}
