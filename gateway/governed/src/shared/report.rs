//! Background task of the shared counters: reports used amounts, renews and returns leases, and restores a store that
//! has lost its counters.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use penstock_store::{AMOUNT_MAX, Ask, Begun, Grant, Kept, Settlement, StoreError};
use tokio::time::{sleep, timeout};

use super::{Cell, IDLE, IN_FLIGHT_SECONDS, Key, Shared, State, Sum, kept, key};
use penstock_base::clock;
use penstock_base::panics::caught;

/// Interval at which spent and returned amounts are reported to the store.
const REPORT: Duration = Duration::from_millis(200);
/// Deadline of one report to the store.
const REPORT_MAX: Duration = Duration::from_secs(2);
/// Most leases that the log names at a time; more are counted.
const LINES_MAX: usize = 16;
/// Most counters in one call of the store.
pub(super) const REPORTS: usize = 64;
/// Time within which other gateways have written their settled entries to the ledger, so that its sums are complete.
const LEDGER_LAG: Duration = Duration::from_millis(400);
/// Interval at which cells are dropped while the ledger is summed up, which may take minutes.
const FORGET: Duration = Duration::from_secs(5);
/// Interval at which an otherwise idle store is checked for the leases: well within the time in which a store that
/// begins anew grants nothing.
const LOOK: Duration = Duration::from_millis(700);

impl Shared {
    /// Runs without end: reports used amounts, renews leases, returns idle ones. `begun` is signalled after the first
    /// attempt to reach the store.
    pub(crate) async fn report(&self, begun: std::sync::mpsc::SyncSender<()>) {
        loop {
            if let Err(panic) = caught(self.turn()).await {
                tracing::error!(panic, "the report to the shared counters panicked: it is made again");
                let _ = self.down::<()>("panic");
            }
            // The start waits for the first signal only.
            let _ = begun.try_send(());
            sleep(REPORT).await;
        }
    }

    /// Makes one turn of the report: checks the store, corrects leases, tells amounts.
    pub(super) async fn turn(&self) {
        if self.begin().await && self.correct().await {
            self.report_once(Instant::now()).await;
        } else {
            self.forget_needless();
        }
        self.tell_lapsed();
    }

    /// Drops cells of which the store need not be told: while it is away or restored nothing else drops them, and every
    /// second may begin a window.
    fn forget_needless(&self) {
        let now = clock::unix_seconds();
        self.state().cells.retain(|(_, window), cell| !cell.is_needless(window, now));
    }

    /// Checks that the store still has its counters, or restores them. False if it does not answer.
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
                // The leases reported below replace whatever became of these.
                Some(_) => self.state().doubted.iter_mut().for_each(|one| one.leased = 0),
            }
            // Such grants are lost with the rest, or belong to a request that stopped waiting: nobody would return them.
            let _alone = self.turn.write().await;
            self.state().unheard.clear();
            let second = clock::unix_seconds();
            self.lease_all(&self.leases(second), second).await?;
        }
        if let Some(until) = owed {
            self.restore(until).await?;
            self.state().owed = None;
        }
        Ok(())
    }

    /// Restores the spent amounts of a store that has lost everything, and waits until all gateways have had the time to report.
    async fn restore(&self, until: Instant) -> Result<(), StoreError> {
        let mut pause = None;
        if let Some(ledger) = &self.ledger {
            sleep(LEDGER_LAG).await;
            // Amounts waiting to be reported are in the ledger by the time it is read, and would count twice. Those that
            // come later are not in it: the ledger pauses until the counters have been told of them. Another gateway that
            // restores at the same time reads it then, and would count them beside what this one tells.
            let untold: HashMap<Key, u64> =
                self.state().cells.iter().map(|(key, cell)| (key.clone(), cell.spent)).collect();
            pause = ledger.pause();
            let own = |sum: &Sum| {
                let Kept { counter, window, .. } = kept(sum);
                untold.get(&(counter, window)).copied().unwrap_or(0)
            };
            let mut spent = pin!(ledger.spent(pause.as_ref(), &own));
            let sums = loop {
                match timeout(FORGET, spent.as_mut()).await {
                    Ok(sums) => break sums?,
                    Err(_) => self.forget_needless(),
                }
            };
            let spent: Vec<Kept> = sums.iter().map(kept).collect();
            for chunk in spent.chunks(REPORTS) {
                self.counters.restore(chunk, clock::unix_seconds()).await?;
            }
            let mut state = self.state();
            for (key, own) in spent.into_iter().map(|one| (one.counter, one.window)).zip(sums.iter().map(|sum| sum.own))
            {
                let in_doubt = state.doubted.iter_mut().find(|one| (&one.counter, one.window) == (&key.0, key.1));
                in_doubt.into_iter().for_each(|one| one.spent = 0);
                if let Some(cell) = state.cells.get_mut(&key) {
                    cell.spent = cell.spent.saturating_sub(own);
                }
            }
        }
        // Before that, a gateway that comes restores as well: this one may end in the middle.
        self.counters.restored().await?;
        self.settle_doubted().await?;
        sleep(until.saturating_duration_since(Instant::now())).await;
        if pause.is_some() {
            self.forget_needless();
            self.report_once(Instant::now()).await;
        }
        drop(pause);
        self.restored.fetch_add(1, Ordering::Relaxed);
        tracing::warn!("the shared counters had lost their counts: amounts spent were restored from the ledger");
        Ok(())
    }

    /// Reports the leases of counters with unknown grants. False if the store does not answer.
    pub(super) async fn correct(&self) -> bool {
        if self.state().unheard.is_empty() {
            return true;
        }
        let _alone = self.turn.write().await;
        let now = clock::unix_seconds();
        let kept: Vec<Kept> = {
            let mut state = self.state();
            let unheard = std::mem::take(&mut state.unheard);
            state.is_reporting = true;
            unheard.iter().filter_map(|key| Some(state.cells.get(key)?.kept(key))).collect()
        };
        let told = self.lease_all(&kept, now).await;
        self.state().is_reporting = false;
        match told {
            Ok(()) => true,
            Err(why) => {
                self.failed(&why);
                false
            }
        }
    }

    /// Reports the leases as they are, and logs those that are held again.
    async fn lease_all(&self, leases: &[Kept], now: u64) -> Result<(), StoreError> {
        let mut told = 0;
        let mut answer = Ok(());
        for chunk in leases.chunks(REPORTS) {
            answer = StoreError::in_time(REPORT_MAX, self.counters.lease(&self.holder, chunk, now)).await;
            if answer.is_err() {
                break;
            }
            told += chunk.len();
        }
        self.held_again(&leases[..told]);
        answer
    }

    /// Leases of this gateway that have not lapsed, and those of places that are in use although they have.
    fn leases(&self, now: u64) -> Vec<Kept> {
        let mut state = self.state();
        for ((_, window), cell) in &mut state.cells {
            if window.seconds == 0 && cell.lapses <= now && cell.held > 0 {
                (cell.leased, cell.lapses) = (cell.held, now + IN_FLIGHT_SECONDS);
            }
        }
        let leased = state.cells.iter().filter(|(_, cell)| cell.lapses > now);
        leased.map(|(key, cell)| cell.kept(key)).collect()
    }

    /// Logs leases of places in use that have lapsed because the store could not be told in time, once each.
    pub(super) fn tell_lapsed(&self) {
        let now = clock::unix_seconds();
        // Most rounds find none, and clone no key.
        let is_news = |key: &Key, cell: &Cell| key.1.seconds == 0 && cell.lapses <= now && cell.is_loss();
        let has_lapsed = |(key, cell): (&Key, &Cell)| is_news(key, cell).then(|| key.clone());
        let lapsed: Vec<Key> = self.state().cells.iter().filter_map(has_lapsed).collect();
        self.lost_leases(&lapsed, "not renewed in time");
    }

    /// Logs the leases that are lost although requests use them, once each.
    fn lost_leases(&self, keys: &[Key], why: &str) {
        let mut lost = Vec::new();
        let mut state = self.state();
        for key in keys {
            let Some(cell) = state.cells.get_mut(key).filter(|cell| cell.is_loss()) else { continue };
            cell.is_lost = true;
            lost.push((&key.0, cell.held));
        }
        drop(state);
        tell(
            &lost,
            |(counter, in_use)| {
                tracing::warn!(
                    counter,
                    in_use,
                    why,
                    "a lease of places in flight is lost: other gateways may use the same places"
                );
            },
            |leases| {
                tracing::warn!(leases, why, "further leases of places in flight are lost, beside those named above")
            },
        );
    }

    /// Logs the leases that were lost and that the store has again.
    fn held_again(&self, kept: &[Kept]) {
        let (mut again, now) = (Vec::new(), clock::unix_seconds());
        let mut state = self.state();
        for one in kept {
            let cell = state.cells.get_mut(&(one.counter.clone(), one.window));
            let Some(cell) = cell.filter(|cell| cell.is_lost && cell.lapses > now) else { continue };
            cell.is_lost = false;
            again.push((&one.counter, cell.held));
        }
        drop(state);
        tell(
            &again,
            |(counter, in_use)| tracing::info!(counter, in_use, "a lost lease of places in flight is held again"),
            |leases| {
                tracing::info!(
                    leases,
                    "further lost leases of places in flight are held again, beside those named above"
                );
            },
        );
    }

    pub(crate) async fn report_once(&self, at: Instant) {
        let now = clock::unix_seconds();
        let settlements = self.due(at, now);
        self.tell_all(&settlements, at, now).await;
        self.state().is_reporting = false;
    }

    /// Reports settlements and renews leases, as far as the store answers; the rest is told again.
    async fn tell_all(&self, settlements: &[Settlement], at: Instant, now: u64) {
        let mut rest = Rest { shared: self, settlements };
        for chunk in settlements.chunks(REPORTS) {
            {
                let mut state = self.state();
                state.nth += 1;
                state.doubted = chunk.to_vec();
            }
            rest.settlements = &rest.settlements[chunk.len()..];
            if let Err(why) = self.settle_doubted().await {
                return self.failed(&why);
            }
        }
        let renewals = self.renewals(at, now);
        let (dropped, answer) = self.renew(&renewals, now).await;
        self.lost_leases(&dropped, "dropped by the shared counters");
        // The leases are reported as they are.
        self.state().unheard.extend(dropped);
        if let Err(why) = answer {
            return self.failed(&why);
        }
        if !(settlements.is_empty() && renewals.is_empty()) {
            self.up();
        }
    }

    /// Renews leases, as far as the store answers; returns the leases of which the store has less than this gateway.
    async fn renew(&self, renewals: &[(Ask, u64)], now: u64) -> (Vec<Key>, Result<(), StoreError>) {
        let mut dropped = Vec::new();
        for chunk in renewals.chunks(REPORTS) {
            let asks: Vec<Ask> = chunk.iter().map(|(ask, _)| ask.clone()).collect();
            let grants =
                match StoreError::in_time(REPORT_MAX, self.counters.take(&self.holder, &asks, false, now)).await {
                    Ok(grants) => grants,
                    Err(why) => return (dropped, Err(why)),
                };
            let renewed = chunk.iter().zip(&grants);
            let is_dropped = |((_, leased), grant): &(&(Ask, u64), &Grant)| grant.leased < *leased;
            dropped.extend(renewed.filter(is_dropped).map(|((ask, _), _)| key(ask)));
        }
        (dropped, Ok(()))
    }

    /// Sends the settlements that may or may not have been applied: under the same number the store applies them once.
    async fn settle_doubted(&self) -> Result<(), StoreError> {
        let (nth, doubted) = {
            let state = self.state();
            (state.nth, state.doubted.clone())
        };
        if !doubted.is_empty() {
            let settled = StoreError::in_time(
                REPORT_MAX,
                self.counters.settle(&self.holder, nth, &doubted, clock::unix_seconds()),
            )
            .await;
            match settled {
                // Nothing was sent, and asking again would end no differently.
                Err(StoreError::Misuse(why)) => {
                    tracing::error!(
                        why,
                        settlements = doubted.len(),
                        "the shared counters cannot be told of amounts spent"
                    );
                }
                settled => settled?,
            }
            self.state().doubted.clear();
        }
        Ok(())
    }

    /// Takes the amounts to report out of the cells, and drops cells that are done.
    fn due(&self, at: Instant, now: u64) -> Vec<Settlement> {
        let (mut out, mut unused) = (Vec::new(), Vec::new());
        let mut state = self.state();
        let State { cells, unheard, is_ending, .. } = &mut *state;
        let is_ending = *is_ending;
        cells.retain(|key, cell| {
            let (counter, window) = key;
            if cell.is_lost && cell.held == 0 {
                cell.is_lost = false;
                unused.push(counter.clone());
            }
            let idle = is_ending || cell.used_at.is_none_or(|used| at.saturating_duration_since(used) >= IDLE);
            let ended = cell.lapses <= now;
            let back = if idle || ended { cell.leased.saturating_sub(cell.held) } else { 0 };
            cell.leased -= back;
            let (leased, spent) = (std::mem::take(&mut cell.over) + back, std::mem::take(&mut cell.spent));
            // A provider may report any number, and one that the store does not take would lose the whole report.
            let (leased, spent) = (leased.min(AMOUNT_MAX), spent.min(AMOUNT_MAX));
            if leased > 0 || spent > 0 {
                out.push(Settlement { counter: counter.clone(), window: *window, leased, spent });
            }
            // Of a question that was given up, the store may hold a grant that this cell is to take back.
            cell.held > 0 || cell.leased > 0 || !(idle || ended) || unheard.contains(key)
        });
        state.is_reporting = !out.is_empty();
        drop(state);
        tell(
            &unused,
            |counter| {
                tracing::info!(
                    counter,
                    "a lost lease of places in flight is not needed any more: its requests have ended"
                );
            },
            |leases| {
                tracing::info!(
                    leases,
                    "further lost leases of places in flight are not needed any more: their requests have ended"
                );
            },
        );
        out
    }

    fn untold(&self, settlements: &[Settlement]) {
        let mut state = self.state();
        for one in settlements {
            let cell = state.cells.entry((one.counter.clone(), one.window)).or_default();
            cell.over = cell.over.saturating_add(one.leased);
            cell.spent = cell.spent.saturating_add(one.spent);
        }
    }

    /// Renewals of the leases of places in flight, as a sign of life, each with the amount of the lease.
    fn renewals(&self, at: Instant, now: u64) -> Vec<(Ask, u64)> {
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
            let max = u64::MAX >> 12;
            out.push((Ask { counter, window: *window, sliding: false, max, want: 0, least: 0, until }, cell.leased));
        }
        out
    }
}

/// Settlements that were taken out of the cells and are not told yet: they go back if the report ends before.
struct Rest<'a> {
    shared: &'a Shared,
    settlements: &'a [Settlement],
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        self.shared.untold(self.settlements);
    }
}

/// Logs each of the first [`LINES_MAX`] by `one`, and the number of the others by `more`.
fn tell<T>(all: &[T], one: impl FnMut(&T), more: impl FnOnce(usize)) {
    all.iter().take(LINES_MAX).for_each(one);
    if let others @ 1.. = all.len().saturating_sub(LINES_MAX) {
        more(others);
    }
}
