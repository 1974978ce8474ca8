//! What days and months have used: read from the ledger at start, for this process's own counters, and again for shared ones that were lost.
//!
//! What a process before this one left open has been settled before ([`orphans`](super::orphans)). The usage of the current day and month
//! is summed up, limit by limit: entries carry the limits that they were counted in as tags. Windows of hours and less begin anew,
//! and so do counters by address, which the ledger does not know.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_govern::{By, Claim, Limit, Measure, Span, Unit, began};
use penstock_store::{EntryFilter, Group, KeyId, OwnerKind, Store, StoreError, UsageQuery, UsageRow};

use tokio::time::{sleep, timeout};

use super::Governor;
use super::journal::Journal;
use super::rules::{POOLS, covers_parent};
use crate::auth::DEPTH_MAX;
use crate::clock;

/// Longest wait for what this gateway has settled to be written.
const WRITTEN_MAX: Duration = Duration::from_secs(5);
/// Between two looks at that.
const WRITTEN_LOOK: Duration = Duration::from_millis(20);
/// Longest time for reading the ledger again.
const SUMMED_MAX: Duration = Duration::from_secs(30);

/// Rows read at once.
const PAGE: u32 = 1000;

/// The tag of entries that a limit counts.
pub(super) fn tag(limit: &str) -> String {
    format!("limit:{limit}")
}

/// The limits in force, and who is under them by the config. (The store says it of issued keys, and of the teams that it has.)
#[derive(Debug, Default)]
pub struct InForce {
    /// The limits.
    pub limits: Vec<Arc<Limit>>,
    /// Ids of those that name a team of the config.
    pub teams: HashMap<String, Vec<String>>,
}

/// Counts what the ledger has of the current day and month.
pub(super) async fn restore(governor: &Governor, store: &dyn Store, in_force: &InForce) -> Result<(), StoreError> {
    let mut count = |sum: Sum| {
        let Sum { limit, subject, measure, amount } = &sum;
        let (mut state, now) = governor.state();
        let claim = Claim { limit, subject, measure: *measure, amount: *amount, tag: 0 };
        state.book.restore(&claim, now);
    };
    sums(store, in_force, &mut count).await
}

/// What the ledger says that a counter of the current day or month has used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) limit: Arc<str>,
    pub(super) subject: String,
    pub(super) measure: Measure,
    pub(super) amount: u64,
}

/// The ledger, for counters that were lost.
pub(super) struct Sums {
    pub(super) store: Arc<dyn Store>,
    pub(super) in_force: Box<dyn Fn() -> InForce + Send + Sync>,
    /// What is on its way into the ledger.
    pub(super) journal: Option<Journal>,
}

impl Sums {
    /// What all gateways together have spent, as far as they have written it down; this one writes first.
    pub(super) async fn spent(&self) -> Result<Vec<Sum>, StoreError> {
        let deadline = Instant::now() + WRITTEN_MAX;
        while self.journal.as_ref().is_some_and(|journal| !journal.is_idle()) && Instant::now() < deadline {
            sleep(WRITTEN_LOOK).await;
        }
        let mut out = Vec::new();
        let summed = async { sums(self.store.as_ref(), &(self.in_force)(), &mut |sum| out.push(sum)).await };
        timeout(SUMMED_MAX, summed).await.map_err(|_| StoreError::Busy)??;
        // Several keys may be one's children.
        fn name(sum: &Sum) -> (&str, &str, &'static str) {
            (&sum.limit, &sum.subject, sum.measure.name())
        }
        out.sort_by(|one, other| name(one).cmp(&name(other)));
        out.dedup_by(|later, first| {
            let same = name(later) == name(first);
            first.amount += if same { later.amount } else { 0 };
            same
        });
        Ok(out)
    }
}

async fn sums(store: &dyn Store, in_force: &InForce, take: &mut (dyn FnMut(Sum) + Send)) -> Result<(), StoreError> {
    let (day, month) = began(clock::since_epoch().as_millis() as u64);
    for limit in &in_force.limits {
        for (span, from) in [(Span::Day, day), (Span::Month, month)] {
            let measures: Vec<_> = limit.measures.iter().filter(|measure| measure.span == span).copied().collect();
            if !measures.is_empty() && limit.by != By::Address {
                sum(store, in_force, limit, &measures, from / 1000, take).await?;
            }
        }
    }
    Ok(())
}

async fn sum(
    store: &dyn Store,
    in_force: &InForce,
    limit: &Arc<Limit>,
    measures: &[Measure],
    from: u64,
    take: &mut (dyn FnMut(Sum) + Send),
) -> Result<(), StoreError> {
    let groups = match limit.by {
        By::All => vec![],
        By::Model => vec![Group::Model],
        By::Provider => vec![Group::Provider],
        By::Team => vec![Group::Team, Group::Key],
        By::User => vec![Group::User, Group::Key],
        By::Key | By::Address => vec![Group::Key],
    };
    let filter = EntryFilter { from, until: u64::MAX >> 1, tag: Some(tag(&limit.id)), ..EntryFilter::default() };
    let mut after = None;
    loop {
        let query = UsageQuery { filter: filter.clone(), groups: groups.clone(), after: after.clone(), limit: PAGE };
        let rows = store.usage(&query).await?;
        for row in &rows.items {
            let subject = match limit.by {
                By::All => Some("all"),
                // What pools have answered has no provider.
                By::Provider => row.values.first().map(|provider| if provider.is_empty() { POOLS } else { provider }),
                // The first that is known, as when it was counted.
                _ => row.values.iter().map(String::as_str).find(|value| !value.is_empty()),
            };
            let Some(subject) = subject else { continue };
            let parents =
                if limit.by == By::Key { parents(store, in_force, limit, subject).await? } else { Vec::new() };
            for subject in parents.iter().map(String::as_str).chain([subject]) {
                for measure in measures {
                    let amount = used(row, measure.unit);
                    take(Sum { limit: limit.id.clone(), subject: subject.to_owned(), measure: *measure, amount });
                }
            }
        }
        after = rows.items.last().map(|row| row.values.clone());
        if !rows.more || after.is_none() {
            return Ok(());
        }
    }
}

/// The keys that a key was made from, as far as they are under the limit: what it has spent is theirs too.
async fn parents(store: &dyn Store, in_force: &InForce, limit: &Limit, key: &str) -> Result<Vec<String>, StoreError> {
    let mut out = Vec::new();
    let mut next = KeyId::parse(key);
    for depth in 0..=DEPTH_MAX {
        let Some(id) = next else { break };
        let Some(record) = store.key(&id).await? else { break };
        if depth > 0 {
            let mut named = record.limits.clone();
            if let Some(team) = &record.team {
                named.extend(match in_force.teams.get(team) {
                    Some(limits) => limits.clone(),
                    None => store.owner(OwnerKind::Team, team).await?.map_or_else(Vec::new, |team| team.limits),
                });
            }
            out.extend(covers_parent(limit, &named).then(|| id.to_string()));
        }
        next = record.parent;
    }
    Ok(out)
}

fn used(row: &UsageRow, unit: Unit) -> u64 {
    match unit {
        Unit::Requests => row.requests,
        Unit::Tokens => row.tokens.input + row.tokens.output,
        Unit::InputTokens => row.tokens.input,
        Unit::OutputTokens => row.tokens.output,
        Unit::NanoUsd => row.micro_usd.saturating_mul(1000),
        Unit::InFlight => 0,
    }
}
