//! Sums of the ledger by which counters of days and months are restored: at start this process's own ([`at_start`](super::at_start)), and
//! later shared ones that were lost ([`Sums`]).
//!
//! Orphaned entries of earlier processes have been settled before ([`orphans`](super::orphans)). The use in the current
//! day and month is summed per limit: entries carry the limits that counted them as tags. Windows of an hour and less
//! begin at zero, and so do counters by address, which the ledger does not hold.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_govern::{By, Limit, Measure, Span, Unit, began};
use penstock_store::{
    EntryFilter, Group, KeyId, KeyRecord, Keys, Ledger, OwnerKind, OwnerRecord, Store, StoreError, USAGE_ROWS_MAX,
    UsageQuery, UsageRow,
};

use tokio::time::{Instant, sleep};

use super::journal::{Journal, Pause};
use super::rules::{POOLS, covers_parent};
use penstock_auth::DEPTH_MAX;
use penstock_base::clock;

/// Longest wait for this gateway's own settled entries to be written before the sums are read.
const WRITTEN_MAX: Duration = Duration::from_secs(5);
/// Interval of the checks whether this gateway's entries are written.
const WRITTEN_LOOK: Duration = Duration::from_millis(20);
/// Deadline for summing up the ledger: of the start, and of the first try to restore counters. The entries of the day
/// and month are read once for each limit that has such a measure, millions of them in some seconds.
pub(super) const SUMMED_MAX: Duration = Duration::from_secs(60);
/// Most times that the deadline doubles for the next try to restore counters: 16 minutes for the sums of one limit.
pub(super) const DOUBLINGS_MAX: u32 = 4;
/// End of a sum without one.
pub(super) const ALWAYS: u64 = u64::MAX >> 1;
/// Seconds by which the times of the gateways of a store may differ.
const CLOCKS_APART: u64 = 86_400;

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

impl InForce {
    /// Unix second from which on the ledger's entries are needed at `now`: the days and months that run are restored from
    /// them. `None`: no limit has such a measure.
    pub fn needed_from(&self, now: u64) -> Option<u64> {
        let from = parts_at(self, now * 1000).into_iter().map(|part| part.from).min();
        from.map(|from| from.saturating_sub(CLOCKS_APART))
    }
}

/// Sum of the ledger for one counter of the current day or month.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) limit: Arc<str>,
    pub(super) subject: String,
    pub(super) measure: Measure,
    pub(super) amount: u64,
    /// Begin of the day or month, in Unix seconds.
    pub(super) from: u64,
    /// Part of the amount that this gateway has yet to tell the counters.
    pub(super) own: u64,
}

/// Reader of the ledger, for shared counters that were lost.
pub(super) struct Sums {
    ledger: Arc<dyn Ledger>,
    keys: Arc<dyn Keys>,
    in_force: Box<dyn Fn() -> InForce + Send + Sync>,
    /// Writer of this gateway's entries, which pauses while the sums are read.
    journal: Option<Journal>,
    progress: Mutex<Progress>,
}

/// Progress of a restore over its tries: a try that ends early leaves its sums to the next one.
#[derive(Default)]
struct Progress {
    done: Vec<(Part, Vec<Sum>)>,
    /// Number of tries since the last success that took all their time.
    late: u32,
}

/// Limit and the day or month whose entries are summed for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) limit: Arc<Limit>,
    pub(super) span: Span,
    pub(super) from: u64,
}

impl Sums {
    pub(super) fn new(
        store: Arc<dyn Store>,
        in_force: impl Fn() -> InForce + Send + Sync + 'static,
        journal: Option<Journal>,
    ) -> Self {
        Self::of(store.clone(), store, in_force, journal)
    }

    fn of(
        ledger: Arc<dyn Ledger>,
        keys: Arc<dyn Keys>,
        in_force: impl Fn() -> InForce + Send + Sync + 'static,
        journal: Option<Journal>,
    ) -> Self {
        Self { ledger, keys, in_force: Box::new(in_force), journal, progress: Mutex::default() }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pause of this gateway's journal; `None`: its entries are not in this ledger.
    pub(super) fn pause(&self) -> Option<Pause<'_>> {
        self.journal.as_ref().map(Journal::pause)
    }

    /// Sums of all gateways, as far as their entries are written; this gateway's own, up to the `pause`, are written first.
    /// `own`: the part of a sum that this gateway had yet to tell the counters when the pause began. A try that takes too
    /// long leaves the sums of the limits that it has finished to the next one, which may take twice as long.
    ///
    /// # Errors
    /// [`StoreError::Busy`] for a try that takes too long, and the store's own.
    pub(super) async fn spent(
        &self,
        pause: Option<&Pause<'_>>,
        own: &(dyn Fn(&Sum) -> u64 + Sync),
    ) -> Result<Vec<Sum>, StoreError> {
        let deadline = Instant::now() + WRITTEN_MAX;
        while pause.is_some_and(|pause| !pause.is_reached()) && Instant::now() < deadline {
            sleep(WRITTEN_LOOK).await;
        }
        let in_force = (self.in_force)();
        let wanted = parts(&in_force);
        let allowed = {
            let mut progress = self.progress();
            progress.done.retain(|(part, _)| wanted.contains(part));
            SUMMED_MAX * 2_u32.pow(progress.late.min(DOUBLINGS_MAX))
        };
        let began = Instant::now();
        let read = self.read(&in_force, &wanted, allowed, own);
        if let Err(error) = StoreError::in_time(allowed, read).await {
            let mut progress = self.progress();
            // One that is busy before that does not say that the sums need more time.
            progress.late += u32::from(error == StoreError::Busy && began.elapsed() >= allowed);
            let (done, all, seconds) = (progress.done.len(), wanted.len(), allowed.as_secs());
            drop(progress);
            tracing::warn!(%error, done, all, seconds, "summing up the ledger takes longer than this try: limits wait, and the next try reads the sums that are missing");
            return Err(error);
        }
        let Progress { done, late: _ } = std::mem::take(&mut *self.progress());
        let mut out: Vec<Sum> = done.into_iter().flat_map(|(_, sums)| sums).collect();
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

    /// Reads the sums that are wanted and not done.
    async fn read(
        &self,
        in_force: &InForce,
        wanted: &[Part],
        allowed: Duration,
        own: &(dyn Fn(&Sum) -> u64 + Sync),
    ) -> Result<(), StoreError> {
        let mut known = Known::new(self.keys.as_ref());
        for part in wanted {
            if self.progress().done.iter().any(|(done, _)| done == part) {
                continue;
            }
            let mut sums = Vec::new();
            let mut take = |sum: Sum| sums.push(Sum { own: own(&sum), ..sum });
            sum(self.ledger.as_ref(), &mut known, in_force, part, allowed, &|| ALWAYS, &mut take).await?;
            self.progress().done.push((part.clone(), sums));
        }
        Ok(())
    }
}

/// Limits with measures by day or month, of which the ledger has the use.
pub(super) fn parts(in_force: &InForce) -> Vec<Part> {
    parts_at(in_force, clock::since_epoch().as_millis() as u64)
}

fn parts_at(in_force: &InForce, now_ms: u64) -> Vec<Part> {
    let (day, month) = began(now_ms);
    let mut out = Vec::new();
    for limit in in_force.limits.iter().filter(|limit| limit.by != By::Address) {
        for (span, from) in [(Span::Day, day / 1000), (Span::Month, month / 1000)] {
            if limit.measures.iter().any(|measure| measure.span == span) {
                out.push(Part { limit: limit.clone(), span, from });
            }
        }
    }
    out
}

/// Sums up a part, each question within `patience`. `until`: end of the entries that are summed, which may come closer meanwhile.
pub(super) async fn sum(
    ledger: &dyn Ledger,
    known: &mut Known<'_>,
    in_force: &InForce,
    Part { limit, span, from }: &Part,
    patience: Duration,
    until: &(dyn Fn() -> u64 + Sync),
    take: &mut (dyn FnMut(Sum) + Send),
) -> Result<(), StoreError> {
    let measures: Vec<Measure> = limit.measures.iter().filter(|measure| measure.span == *span).copied().collect();
    let from = *from;
    let groups = match limit.by {
        By::All => vec![],
        By::Model => vec![Group::Model],
        By::Provider => vec![Group::Provider],
        By::Team => vec![Group::Team, Group::Key],
        By::User => vec![Group::User, Group::Key],
        By::Key | By::Address => vec![Group::Key],
    };
    let filter = EntryFilter { from, tag: Some(tag(&limit.id)), ..EntryFilter::default() };
    let mut after = None;
    loop {
        let rows = loop {
            let filter = EntryFilter { until: until(), ..filter.clone() };
            let (groups, after, limit) = (groups.clone(), after.clone(), USAGE_ROWS_MAX);
            let query = UsageQuery { filter, groups, after, limit };
            let rows = StoreError::in_time(patience, ledger.usage_within(&query, patience)).await?;
            // Else the answer may have entries beyond the end.
            if until() == query.filter.until {
                break rows;
            }
        };
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
                for measure in &measures {
                    let amount = used(row, measure.unit);
                    let (limit, subject) = (limit.id.clone(), subject.to_owned());
                    take(Sum { limit, subject, measure: *measure, amount, from, own: 0 });
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
pub(super) struct Known<'s> {
    store: &'s dyn Keys,
    keys: HashMap<String, Option<KeyRecord>>,
    owners: HashMap<(OwnerKind, String), Option<OwnerRecord>>,
}

impl<'s> Known<'s> {
    pub(super) fn new(store: &'s dyn Keys) -> Self {
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

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use async_trait::async_trait;
    use penstock_govern::{For, OnStoreFailure, Reserve, Unmetered};
    use penstock_store::{Entry, Listing, OpenEntry, Page, Sqlite, SqliteOptions};

    use super::*;

    /// Ledger in which every sum is 5 requests and takes some time.
    pub(crate) struct Slow {
        takes: Duration,
        pub(crate) is_busy: AtomicBool,
        /// Tag and patience of each question.
        asked: Mutex<Vec<(String, u64)>>,
        /// End of the entries that each question asks for.
        pub(crate) ends: Mutex<Vec<u64>>,
    }

    impl Slow {
        pub(crate) fn new(takes: Duration) -> Arc<Self> {
            Arc::new(Self { takes, is_busy: AtomicBool::new(false), asked: Mutex::default(), ends: Mutex::default() })
        }
    }

    const UNASKED: StoreError = StoreError::Misuse("not asked by the test");

    #[async_trait]
    impl Ledger for Slow {
        async fn usage_within(&self, query: &UsageQuery, patience: Duration) -> Result<Listing<UsageRow>, StoreError> {
            let tag = query.filter.tag.clone().unwrap_or_default();
            self.asked.lock().expect("no panic").push((tag, patience.as_secs()));
            self.ends.lock().expect("no panic").push(query.filter.until);
            sleep(self.takes).await;
            if self.is_busy.load(Ordering::Relaxed) {
                return Err(StoreError::Busy);
            }
            Ok(Listing { items: vec![UsageRow { requests: 5, ..UsageRow::default() }], more: false })
        }

        async fn open_entries(&self, _: Arc<[OpenEntry]>) -> Result<(), StoreError> {
            Err(UNASKED)
        }

        async fn settle_entries(&self, _: Arc<[Entry]>) -> Result<Vec<bool>, StoreError> {
            Err(UNASKED)
        }

        async fn orphans(&self, _: u64, _: Option<&str>, _: u32) -> Result<Vec<OpenEntry>, StoreError> {
            Ok(Vec::new())
        }

        async fn alive(&self, _: &str, _: u64) -> Result<(), StoreError> {
            Err(UNASKED)
        }

        async fn left(&self, _: u64, _: u64, _: u32) -> Result<Vec<OpenEntry>, StoreError> {
            Err(UNASKED)
        }

        async fn entry(&self, _: u64, _: &str) -> Result<Option<Entry>, StoreError> {
            Err(UNASKED)
        }

        async fn entries(&self, _: &EntryFilter, _: &Page) -> Result<Listing<Entry>, StoreError> {
            Err(UNASKED)
        }

        async fn usage(&self, _: &UsageQuery) -> Result<Listing<UsageRow>, StoreError> {
            Err(UNASKED)
        }

        async fn sweep_entries(&self, _: u64) -> Result<u64, StoreError> {
            Err(UNASKED)
        }
    }

    pub(crate) fn limit(id: &str) -> Arc<Limit> {
        Arc::new(Limit {
            id: id.into(),
            measures: vec![Measure { unit: Unit::Requests, span: Span::Month, max: 100 }],
            by: By::All,
            applies: For::Everyone,
            models: Vec::new(),
            reserve: Reserve::default(),
            unmetered: Unmetered::default(),
            on_store_failure: OnStoreFailure::Open,
            max_tokens_default: None,
            max_tokens_max: None,
            surge: None,
        })
    }

    fn slow(limits: &'static [&str], takes: u64) -> (Arc<Slow>, Sums) {
        let ledger = Slow::new(Duration::from_secs(takes));
        let in_force = || InForce { limits: limits.iter().map(|id| limit(id)).collect(), ..InForce::default() };
        (ledger.clone(), Sums::of(ledger, nobody(), in_force, None))
    }

    /// Store without keys.
    pub(crate) fn nobody() -> Arc<dyn Keys> {
        Arc::new(Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("a database"))
    }

    pub(crate) fn asked(ledger: &Slow) -> Vec<(String, u64)> {
        std::mem::take(&mut ledger.asked.lock().expect("no panic"))
    }

    /// Two of the three limits are summed within a minute.
    #[tokio::test(start_paused = true)]
    async fn the_next_try_goes_on_with_the_limits_that_are_left() {
        let (ledger, sums) = slow(&["a", "b", "c"], 25);
        let tagged = |all: &[(&str, u64)]| all.iter().map(|(id, patience)| (tag(id), *patience)).collect::<Vec<_>>();
        assert_eq!(sums.spent(None, &|_| 1).await, Err(StoreError::Busy));
        assert_eq!(asked(&ledger), tagged(&[("a", 60), ("b", 60), ("c", 60)]));
        let read = sums.spent(None, &|_| 2).await.expect("summed");
        assert_eq!(asked(&ledger), tagged(&[("c", 120)]));
        let told: Vec<_> = read.iter().map(|sum| (&*sum.limit, sum.amount, sum.own)).collect();
        // What this gateway has to tell is that of the time at which each limit was summed.
        assert_eq!(told, [("a", 5, 1), ("b", 5, 1), ("c", 5, 2)]);
        // The next loss begins with none of it.
        assert_eq!(sums.spent(None, &|_| 3).await, Err(StoreError::Busy));
        assert_eq!(asked(&ledger), tagged(&[("a", 60), ("b", 60), ("c", 60)]));
    }

    #[test]
    fn the_entries_of_the_running_month_and_day_are_needed() {
        // 2027-01-15 08:00 UTC.
        let (now, day) = (1_800_000_000, 86_400);
        let of = |span, by| {
            let measures = vec![Measure { unit: Unit::Requests, span, max: 1 }];
            let limit = Arc::new(Limit { measures, by, ..Limit::clone(&limit("a")) });
            InForce { limits: vec![limit], ..InForce::default() }.needed_from(now)
        };
        assert_eq!(of(Span::Month, By::All), Some(now - 14 * day - 8 * 3600 - day));
        assert_eq!(of(Span::Day, By::Key), Some(now - 8 * 3600 - day));
        assert_eq!(
            (of(Span::Hour, By::All), of(Span::Month, By::Address)),
            (None, None),
            "the ledger restores neither"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_try_may_take_twice_as_long_as_the_one_before_up_to_a_bound() {
        let (ledger, sums) = slow(&["a"], 100_000);
        for _ in 0..7 {
            assert_eq!(sums.spent(None, &|_| 0).await, Err(StoreError::Busy));
        }
        let patience: Vec<_> = asked(&ledger).into_iter().map(|(_, patience)| patience).collect();
        assert_eq!(patience, [60, 120, 240, 480, 960, 960, 960]);
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_try_that_took_all_its_time_makes_the_next_one_longer() {
        let (ledger, sums) = slow(&["a"], 100);
        let patience = || asked(&ledger).into_iter().map(|(_, patience)| patience).collect::<Vec<_>>();
        assert_eq!(sums.spent(None, &|_| 0).await, Err(StoreError::Busy));
        ledger.is_busy.store(true, Ordering::Relaxed);
        for _ in 0..2 {
            assert_eq!(sums.spent(None, &|_| 0).await, Err(StoreError::Busy));
        }
        ledger.is_busy.store(false, Ordering::Relaxed);
        assert_eq!(sums.spent(None, &|_| 0).await.map(|read| read.len()), Ok(1));
        assert_eq!(patience(), [60, 120, 120, 120]);
        // After a success the next loss begins as the first one did.
        assert_eq!(sums.spent(None, &|_| 0).await, Err(StoreError::Busy));
        assert_eq!(patience(), [60]);
    }
}
