//! What is said to the store behind the requests, by one task: what was used, what is leased and what goes back; and what has to be
//! restored to a store that has lost it.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use penstock_store::{Ask, Begun, Kept, Settlement, StoreError};
use tokio::time::{sleep, timeout};

use super::{IDLE, IN_FLIGHT_SECONDS, Key, Shared, kept};
use crate::clock;

/// Between two reports.
const REPORT: Duration = Duration::from_millis(200);
/// Longest wait for a report.
const REPORT_MAX: Duration = Duration::from_secs(2);
/// Reports at once.
pub(super) const REPORTS: usize = 64;
/// Others write what they have settled into the ledger within this, and only then it says all.
const LEDGER_LAG: Duration = Duration::from_millis(400);
/// Between two looks at whether the store still has what was leased, where nothing else is said to it: well within the time in which one
/// that begins anew grants nothing.
const LOOK: Duration = Duration::from_millis(700);

impl Shared {
    /// Tells the store what was used, renews leases, gives back what is idle. Never ends. `begun` hears of the first beginning, or that
    /// there was none.
    pub(in crate::governed) async fn report(&self, begun: std::sync::mpsc::SyncSender<()>) {
        loop {
            if self.begin().await && self.correct().await {
                self.report_once(Instant::now()).await;
            }
            // Only the first is waited for.
            let _ = begun.try_send(());
            sleep(REPORT).await;
        }
    }

    /// Whether the store has what was counted, or has it again.
    pub(super) async fn begin(&self) -> bool {
        let now = Instant::now();
        {
            let mut state = self.state();
            let looked = state.looked_at.is_some_and(|at| now.duration_since(at) < LOOK);
            if state.is_begun && (looked || state.cells.values().all(|cell| cell.leased == 0)) {
                return true;
            }
            if state.down_until.is_some_and(|until| now < until) {
                return false;
            }
            state.looked_at = Some(now);
        }
        match self.begun(now).await {
            Ok(()) => {
                self.state().is_begun = true;
                self.up();
                true
            }
            Err(error) => self.down::<()>(&error.to_string()).is_ok(),
        }
    }

    async fn begun(&self, now: Instant) -> Result<(), StoreError> {
        if let Begun::Anew(wait) = self.counters.begin().await? {
            let mut state = self.state();
            (state.is_begun, state.owed) = (false, Some(now + wait));
        }
        let (was_away, owed) = {
            let state = self.state();
            (!state.is_begun, state.owed)
        };
        if was_away {
            match owed {
                None => self.settle_doubted().await?,
                // Whatever became of that: what is leased is what is said now.
                Some(_) => self.state().doubted.iter_mut().for_each(|one| one.leased = 0),
            }
            // Lost with the rest, or granted to a request that had stopped waiting: nobody would give that back.
            let _alone = self.turn.write().await;
            self.state().unheard.clear();
            let second = clock::unix_seconds();
            for chunk in self.leases(second).chunks(REPORTS) {
                in_time(self.counters.lease(&self.holder, chunk, second)).await?;
            }
        }
        if let Some(until) = owed {
            self.restore(until).await?;
            self.state().owed = None;
        }
        Ok(())
    }

    /// Tells a store that has lost everything what is spent, and waits until all have had the time to.
    async fn restore(&self, until: Instant) -> Result<(), StoreError> {
        let now = clock::unix_seconds();
        if let Some(ledger) = &self.ledger {
            sleep(LEDGER_LAG).await;
            // What waits to be told is in the ledger when that is read: it would count twice.
            let untold: HashMap<Key, u64> =
                self.state().cells.iter().map(|(key, cell)| (key.clone(), cell.spent)).collect();
            let spent: Vec<Kept> = ledger.spent().await?.iter().map(|sum| kept(sum, now)).collect();
            for chunk in spent.chunks(REPORTS) {
                self.counters.restore(chunk, now).await?;
            }
            let mut state = self.state();
            for key in spent.into_iter().map(|one| (one.counter, one.window)) {
                let in_doubt = state.doubted.iter_mut().find(|one| (&one.counter, one.window) == (&key.0, key.1));
                in_doubt.into_iter().for_each(|one| one.spent = 0);
                if let (Some(known), Some(cell)) = (untold.get(&key), state.cells.get_mut(&key)) {
                    cell.spent = cell.spent.saturating_sub(*known);
                }
            }
        }
        self.settle_doubted().await?;
        sleep(until.saturating_duration_since(Instant::now())).await;
        self.restored.fetch_add(1, Ordering::Relaxed);
        tracing::warn!("the shared counters had lost their counts: amounts spent were restored from the ledger");
        Ok(())
    }

    /// Says what is leased of counters of which nobody heard what they granted. Whether the store has heard that.
    pub(super) async fn correct(&self) -> bool {
        if self.state().unheard.is_empty() {
            return true;
        }
        let _alone = self.turn.write().await;
        let now = clock::unix_seconds();
        let kept: Vec<Kept> = {
            let mut state = self.state();
            let unheard = std::mem::take(&mut state.unheard);
            unheard.iter().filter_map(|key| Some(state.cells.get(key)?.kept(key))).collect()
        };
        for chunk in kept.chunks(REPORTS) {
            if let Err(why) = in_time(self.counters.lease(&self.holder, chunk, now)).await {
                self.failed(&why);
                return false;
            }
        }
        true
    }

    /// What this gateway was granted and has not given back; also of counters of which it knows nothing.
    fn leases(&self, now: u64) -> Vec<Kept> {
        let state = self.state();
        let leased = state.cells.iter().filter(|(_, cell)| cell.lapses > now);
        leased.map(|(key, cell)| cell.kept(key)).collect()
    }

    pub(super) async fn report_once(&self, at: Instant) {
        let now = clock::unix_seconds();
        let settlements = self.due(at, now);
        let mut chunks = settlements.chunks(REPORTS);
        while let Some(chunk) = chunks.next() {
            {
                let mut state = self.state();
                state.nth += 1;
                state.doubted = chunk.to_vec();
            }
            if let Err(why) = self.settle_doubted().await {
                chunks.for_each(|chunk| self.untold(chunk));
                return self.failed(&why);
            }
        }
        let renewals = self.renewals(at, now);
        for chunk in renewals.chunks(REPORTS) {
            if let Err(why) = in_time(self.counters.take(&self.holder, chunk, false, now)).await {
                return self.failed(&why);
            }
        }
        if !(settlements.is_empty() && renewals.is_empty()) {
            self.up();
        }
    }

    /// Settles what may have been settled already, or not: under the same number it is done once.
    async fn settle_doubted(&self) -> Result<(), StoreError> {
        let (nth, doubted) = {
            let state = self.state();
            (state.nth, state.doubted.clone())
        };
        if !doubted.is_empty() {
            in_time(self.counters.settle(&self.holder, nth, &doubted, clock::unix_seconds())).await?;
            self.state().doubted.clear();
        }
        Ok(())
    }

    /// What is to be told, taken out of the cells; cells that are over are forgotten.
    fn due(&self, at: Instant, now: u64) -> Vec<Settlement> {
        let mut out = Vec::new();
        self.state().cells.retain(|(counter, window), cell| {
            let idle = cell.used_at.is_none_or(|used| at.saturating_duration_since(used) >= IDLE);
            let ended = cell.lapses <= now;
            let back = if idle || ended { cell.leased.saturating_sub(cell.held) } else { 0 };
            cell.leased -= back;
            let (leased, spent) = (std::mem::take(&mut cell.over) + back, std::mem::take(&mut cell.spent));
            if leased + spent > 0 {
                out.push(Settlement { counter: counter.clone(), window: *window, leased, spent });
            }
            cell.held > 0 || cell.leased > 0 || !(idle || ended)
        });
        out
    }

    fn untold(&self, settlements: &[Settlement]) {
        let mut state = self.state();
        for one in settlements {
            let cell = state.cells.entry((one.counter.clone(), one.window)).or_default();
            cell.over += one.leased;
            cell.spent += one.spent;
        }
    }

    /// Leases of what is in flight: their gateway lives.
    fn renewals(&self, at: Instant, now: u64) -> Vec<Ask> {
        let due = Duration::from_secs(IN_FLIGHT_SECONDS / 3);
        let mut out = Vec::new();
        for ((counter, window), cell) in &mut self.state().cells {
            let old = cell.renewed_at.is_none_or(|renewed| at.saturating_duration_since(renewed) >= due);
            if window.seconds > 0 || cell.leased == 0 || !old {
                continue;
            }
            cell.renewed_at = Some(at);
            cell.lapses = now + IN_FLIGHT_SECONDS;
            let (counter, until) = (counter.clone(), cell.lapses);
            out.push(Ask { counter, window: *window, sliding: false, max: u64::MAX >> 12, want: 0, least: 0, until });
        }
        out
    }
}

/// What the store says to a report.
async fn in_time<T>(told: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    timeout(REPORT_MAX, told).await.unwrap_or(Err(StoreError::Busy))
}
