//! Restores counters of days and months from the ledger: at start for this process's own, and later for shared ones that were lost.
//!
//! Orphaned entries of earlier processes have been settled before ([`orphans`](super::orphans)). The use in the current
//! day and month is summed per limit: entries carry the limits that counted them as tags. Windows of an hour and less
//! begin at zero, and so do counters by address, which the ledger does not hold.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_govern::{By, Claim, Limit, Measure, Span, Unit, began};
use penstock_store::{
    EntryFilter, Group, KeyId, KeyRecord, OwnerKind, OwnerRecord, Store, StoreError, USAGE_ROWS_MAX, UsageQuery,
    UsageRow,
};

use tokio::time::{sleep, timeout};

use super::Governor;
use super::journal::{Journal, Pause};
use super::rules::{POOLS, covers_parent};
use penstock_auth::DEPTH_MAX;
use penstock_base::clock;

/// Longest wait for this gateway's own settled entries to be written before the sums are read.
const WRITTEN_MAX: Duration = Duration::from_secs(5);
/// Interval of the checks whether this gateway's entries are written.
const WRITTEN_LOOK: Duration = Duration::from_millis(20);
/// Deadline for summing up the ledger: at start, and when shared counters are restored. The entries of the day and month are
/// read once for each limit that has such a measure, millions of them in some seconds.
pub(super) const SUMMED_MAX: Duration = Duration::from_secs(60);

/// Tag by which ledger entries name a limit that counts them.
pub(super) fn tag(limit: &str) -> String {
    format!("limit:{limit}")
}

/// Limits in force, and their teams by the config. (Issued keys, and teams of the store, are looked up there.)
#[derive(Debug, Default)]
pub struct InForce {
    /// All limits of the config in force.
    pub limits: Vec<Arc<Limit>>,
    /// Ids of the limits that name a team of the config, by team.
    pub teams: HashMap<String, Vec<String>>,
}

/// Adds the ledger's sums of the current day and month to the counters.
pub(super) async fn restore(governor: &Governor, store: &dyn Store, in_force: &InForce) -> Result<(), StoreError> {
    let mut count = |sum: Sum| {
        let Sum { limit, subject, measure, amount } = &sum;
        let (mut state, now) = governor.state();
        let claim = Claim { limit, subject, measure: *measure, amount: *amount, tag: 0 };
        state.book.restore(&claim, now);
    };
    sums(store, in_force, &mut count).await
}

/// Sum of the ledger for one counter of the current day or month.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) limit: Arc<str>,
    pub(super) subject: String,
    pub(super) measure: Measure,
    pub(super) amount: u64,
}

/// Reader of the ledger, for shared counters that were lost.
pub(super) struct Sums {
    pub(super) store: Arc<dyn Store>,
    pub(super) in_force: Box<dyn Fn() -> InForce + Send + Sync>,
    /// Writer of this gateway's entries, which pauses while the sums are read.
    pub(super) journal: Option<Journal>,
}

impl Sums {
    /// Pause of this gateway's journal; `None`: its entries are not in this ledger.
    pub(super) fn pause(&self) -> Option<Pause<'_>> {
        self.journal.as_ref().map(Journal::pause)
    }

    /// Sums of all gateways, as far as their entries are written; this gateway's own, up to the `pause`, are written first.
    pub(super) async fn spent(&self, pause: Option<&Pause<'_>>) -> Result<Vec<Sum>, StoreError> {
        let deadline = Instant::now() + WRITTEN_MAX;
        while pause.is_some_and(|pause| !pause.is_reached()) && Instant::now() < deadline {
            sleep(WRITTEN_LOOK).await;
        }
        let mut out = Vec::new();
        let summed = async { sums(self.store.as_ref(), &(self.in_force)(), &mut |sum| out.push(sum)).await };
        timeout(SUMMED_MAX, summed).await.map_err(|_| StoreError::Busy)??;
        // Several keys may share a parent, which then has several sums.
        fn name(sum: &Sum) -> (&str, &str, &'static str) {
            (&sum.limit, &sum.subject, sum.measure.name())
        }
        out.sort_by(|one, other| name(one).cmp(&name(other)));
        out.dedup_by(|later, first| {
            let same = name(later) == name(first);
            first.amount = first.amount.saturating_add(if same { later.amount } else { 0 });
            same
        });
        Ok(out)
    }
}

async fn sums(store: &dyn Store, in_force: &InForce, take: &mut (dyn FnMut(Sum) + Send)) -> Result<(), StoreError> {
    let (day, month) = began(clock::since_epoch().as_millis() as u64);
    let mut known = Known::new(store);
    for limit in &in_force.limits {
        for (span, from) in [(Span::Day, day), (Span::Month, month)] {
            let measures: Vec<_> = limit.measures.iter().filter(|measure| measure.span == span).copied().collect();
            if !measures.is_empty() && limit.by != By::Address {
                sum(&mut known, in_force, limit, &measures, from / 1000, take).await?;
            }
        }
    }
    Ok(())
}

async fn sum(
    known: &mut Known<'_>,
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
        let query =
            UsageQuery { filter: filter.clone(), groups: groups.clone(), after: after.clone(), limit: USAGE_ROWS_MAX };
        let rows = known.store.usage_within(&query, SUMMED_MAX).await?;
        for row in &rows.items {
            let subject = match limit.by {
                By::All => Some("all"),
                // Answers of our own pools have no provider.
                By::Provider => row.values.first().map(|provider| if provider.is_empty() { POOLS } else { provider }),
                // The first known value, as when the request was counted.
                _ => row.values.iter().map(String::as_str).find(|value| !value.is_empty()),
            };
            let Some(subject) = subject else { continue };
            let above = match (limit.by, row.values.last()) {
                (By::Key | By::Team | By::User, Some(key)) => above(known, in_force, limit, key, subject).await?,
                _ => Vec::new(),
            };
            for subject in above.iter().map(String::as_str).chain([subject]) {
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

/// Subjects above `own` in a limit, for use of `key`: the keys that it was derived from, or their users or teams, as far
/// as they are under the limit. Each is named once, as when a request is counted.
async fn above(
    known: &mut Known<'_>,
    in_force: &InForce,
    limit: &Limit,
    key: &str,
    own: &str,
) -> Result<Vec<String>, StoreError> {
    let mut parents = Vec::new();
    let mut next = KeyId::parse(key);
    for depth in 0..=DEPTH_MAX {
        let Some(id) = next else { break };
        let Some(mut record) = known.key(&id).await? else { break };
        next = record.parent.take();
        if depth > 0 {
            parents.push(record);
        }
    }
    let mut out = Vec::new();
    let (mut user, mut team) = (None, None);
    // A user or team that a key leaves open is taken from the key above it.
    for record in parents.into_iter().rev() {
        let (mut named, mut own_team) = (record.limits, record.team);
        if let Some(owner) = known.owner(OwnerKind::User, record.user.as_deref()).await? {
            named.extend(owner.limits.into_iter().chain(owner.budgets));
            own_team = own_team.or(owner.team);
        }
        if let Some(limits) = own_team.as_ref().and_then(|team| in_force.teams.get(team)) {
            named.extend_from_slice(limits);
        } else if let Some(owner) = known.owner(OwnerKind::Team, own_team.as_deref()).await? {
            named.extend(owner.limits.into_iter().chain(owner.budgets));
        }
        (user, team) = (record.user.or(user), own_team.or(team));
        let subject = match limit.by {
            By::User => user.clone(),
            By::Team => team.clone(),
            _ => Some(record.id.to_string()),
        };
        let is_new = |subject: &String| subject != own && !out.contains(subject);
        out.extend(subject.filter(|subject| covers_parent(limit, &named) && is_new(subject)));
    }
    Ok(out)
}

/// Issued keys and owners of the store, each read once: many keys share a parent, a user or a team, and every limit asks again.
struct Known<'s> {
    store: &'s dyn Store,
    keys: HashMap<String, Option<KeyRecord>>,
    owners: HashMap<(OwnerKind, String), Option<OwnerRecord>>,
}

impl<'s> Known<'s> {
    fn new(store: &'s dyn Store) -> Self {
        Self { store, keys: HashMap::new(), owners: HashMap::new() }
    }

    async fn key(&mut self, id: &KeyId) -> Result<Option<KeyRecord>, StoreError> {
        if let Some(known) = self.keys.get(id.as_str()) {
            return Ok(known.clone());
        }
        let found = self.store.key(id).await?;
        self.keys.insert(id.to_string(), found.clone());
        Ok(found)
    }

    async fn owner(&mut self, kind: OwnerKind, id: Option<&str>) -> Result<Option<OwnerRecord>, StoreError> {
        let Some(id) = id else { return Ok(None) };
        if let Some(known) = self.owners.get(&(kind, id.to_owned())) {
            return Ok(known.clone());
        }
        let found = self.store.owner(kind, id).await?;
        self.owners.insert((kind, id.to_owned()), found.clone());
        Ok(found)
    }
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
