//! Limits and budgets of requests: reserved before a request is sent on, settled when it has ended, however it ends.
//!
//! [`admit()`] finds the limits of a call ([`Rules`]), estimates its use (`estimate`), and reserves all of it in the book
//! at once. The result is a `Reservation`, which settles itself on drop. It travels with the call until the answer's
//! events carry it (`events`), so every way for a request to end passes there. A request without a limit and without a
//! ledger entry skips all of this at no cost.
//!
//! The arithmetic is in [`penstock_govern`]; this crate holds the rest: subjects of the counters (`rules`), header fields
//! and refusals for clients (`limit_headers`), the ledger (`journal`), counters that gateways share (`shared`).
#![forbid(unsafe_code)]

mod admit;
mod at_start;
mod emitted;
mod estimate;
mod events;
mod handover;
mod journal;
mod limit_headers;
mod orphans;
mod paces;
mod refusals;
mod reservation;
mod restore;
mod rounding;
mod rules;
mod shared;
mod status;
mod subjects;
mod surge;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use penstock_govern::{Book, BookState, Calendar, Claim, Denied, Hold, Learned, Limit, Measure, Now, Standing, Unit};
use penstock_store::{Counters, Store};

pub use admit::{Plain, Uses, admit, admit_plain, close, would_admit};
pub use events::open;
pub use handover::{Claimed, Give, Given};
pub use reservation::Reservation;
pub use restore::InForce;
pub use rules::Rules;
pub use status::status;
pub use status::{CounterState, Effect, LimitState};

use at_start::AtStart;
use journal::Journal;
use orphans::Watch;
use penstock_base::clock;
use penstock_telemetry::{Gauge, Metric, Metrics, Tally};
use refusals::Refusals;
use restore::Sums;
use rounding::Rounding;
use shared::{BEGIN_MAX, Shared};
use subjects::Subjects;

/// Start of the windows' monotonic clock: ten days, so that windows of a process before this one have a place on it.
const CLOCK_BASE: Duration = Duration::from_secs(10 * 86_400);

/// State of the limits, for the life of the process.
pub struct Governor {
    state: Mutex<State>,
    began: Instant,
    metrics: Arc<Metrics>,
    /// Metrics of reserved and used amounts: of tokens and of money.
    tallies: [Tallies; 2],
    /// Counters of admitted requests, by id of the limit.
    allowed: ArcSwap<HashMap<Arc<str>, Tally>>,
    /// Writer of the ledger; empty without a store.
    journal: OnceLock<Journal>,
    subjects: Subjects,
    /// Rounding of costs for the ledger.
    rounding: Rounding,
    /// Debounced log of the counters that refuse requests.
    refusals: Refusals,
    /// Counters shared with other gateways; empty where this gateway counts alone.
    shared: OnceLock<Arc<Shared>>,
    /// Number of ledger entries of dead processes that were settled with assumed amounts.
    assumed: Arc<AtomicU64>,
    /// Ids of the limits whose use before this process is still to be read from the ledger.
    unread: ArcSwap<HashSet<Arc<str>>>,
}

/// Counters of reserved and used amounts of one unit (tokens or usd), over all requests.
struct Tallies {
    unit: &'static str,
    reserved: Tally,
    settled: Tally,
}

impl Tallies {
    fn new(metrics: &Metrics, unit: &'static str) -> Self {
        let of = |metric| metrics.tally(metric, &[("unit", unit)]);
        Self { unit, reserved: of(Metric::LimitReserved), settled: of(Metric::LimitSettled) }
    }
}

struct State {
    book: Book,
    calendar: Calendar,
    /// Last reading of the wall clock: the monotonic time of the reading, and its value, in ms.
    wall: (u64, u64),
    learned: HashMap<Arc<str>, Learned>,
    swept_ms: u64,
    /// Channel to a process that continues with the book, during a handover: it gets every hold and settlement made here.
    give: Option<Give>,
    /// True if the counters are another process's, which has read the ledger.
    is_imported: bool,
}

/// Time between readings of the wall clock, which only tells days and months apart.
const WALL_MS: u64 = 10;
/// Most limits with a metric of their own in the map; configs may have named any number of limits.
const TALLIES_MAX: usize = 512;
/// Interval at which counters that are back at zero are dropped.
const SWEEP_MS: u64 = 60_000;

impl Governor {
    /// A governor with empty counters, reporting to `metrics`.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        let base = CLOCK_BASE.as_millis() as u64;
        let wall_ms = clock::since_epoch().as_millis() as u64;
        let (calendar, wall) = (Calendar::new(base, wall_ms), (base, wall_ms));
        let (book, learned) = (Book::new(), HashMap::new());
        let state = State { book, calendar, wall, learned, swept_ms: base, give: None, is_imported: false };
        Self {
            state: Mutex::new(state),
            began: Instant::now(),
            tallies: ["tokens", "usd"].map(|unit| Tallies::new(&metrics, unit)),
            allowed: ArcSwap::default(),
            metrics,
            journal: OnceLock::new(),
            subjects: Subjects::default(),
            rounding: Rounding::default(),
            refusals: Refusals::default(),
            shared: OnceLock::new(),
            assumed: Arc::default(),
            unread: ArcSwap::default(),
        }
    }

    /// Starts the ledger in `store` and restores the counters of the current day and month from it. Called once, before
    /// requests are served. A ledger that cannot be read within a minute is read on by a thread: until then limits begin at
    /// zero, and closed ones refuse requests.
    ///
    /// # Errors
    /// The system has no thread for it. A store that does not answer is no error, and the log says so.
    pub fn keep_ledger(
        self: &Arc<Self>,
        store: &Arc<dyn Store>,
        in_force: InForce,
        is_shared: bool,
    ) -> std::io::Result<()> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(std::io::Error::other)?;
        let gateway: Arc<str> = format!("{:016x}", u64::from_le_bytes(random)).into();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let reader = Arc::new(AtStart::new(self, store, in_force, gateway.clone(), is_shared));
        let mut run = Box::pin({
            let reader = reader.clone();
            async move { reader.run().await }
        });
        if !runtime.block_on(reader.wait(&mut run)) {
            std::thread::Builder::new().name("restore".into()).spawn(move || runtime.block_on(run))?;
        }
        let watch = is_shared.then(|| Watch::new(store.clone(), gateway.clone(), self.assumed.clone()));
        let journal = Journal::start(store.clone(), gateway, watch)?;
        let _ = self.journal.set(journal);
        Ok(())
    }

    /// Starts counting together with other gateways. Called once, before requests are served and after
    /// [`Self::keep_ledger`]. `in_force`: the limits whose days and months are restored from the ledger in `store` when
    /// the counters have lost them. Waits for the shared counters for up to 5 s.
    ///
    /// # Errors
    /// The system has no thread for it.
    pub fn share(
        &self,
        counters: Arc<dyn Counters>,
        store: Arc<dyn Store>,
        in_force: impl Fn() -> InForce + Send + Sync + 'static,
    ) -> std::io::Result<()> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(std::io::Error::other)?;
        let holder = format!("{:016x}", u64::from_le_bytes(random));
        let sums = Sums::new(store, in_force, self.journal().cloned());
        let shared = Arc::new(Shared::new(counters, holder, Some(sums)));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (begun, has_begun) = std::sync::mpsc::sync_channel(1);
        let reports = shared.clone();
        let report = move || runtime.block_on(async move { reports.report(begun).await });
        std::thread::Builder::new().name("counters".into()).spawn(report)?;
        // Unavailable counters are no reason not to serve.
        let _ = has_begun.recv_timeout(BEGIN_MAX);
        let _ = self.shared.set(shared);
        Ok(())
    }

    /// Place where limits are counted, in the words of `/status`.
    pub fn counted_by(&self) -> &'static str {
        match self.shared.get().map(|shared| shared.is_up()) {
            None => "this gateway",
            Some(true) => "all gateways together",
            Some(false) => "this gateway: the shared counters are away",
        }
    }

    fn journal(&self) -> Option<&Journal> {
        self.journal.get()
    }

    /// Returns true if the process may end: the ledger has every entry, and the shared counters, if they answer, every
    /// amount and what this gateway has leased of them beyond the holds of requests. To be called repeatedly by a process
    /// that ends: from the first call on, entries and leases are kept back no longer.
    pub fn is_saved(&self) -> bool {
        let is_written = self.journal().is_none_or(Journal::is_emptied);
        let is_returned = self.shared.get().is_none_or(|shared| shared.is_returned());
        is_written && is_returned
    }

    /// State and current time, for a few look-ups; sweeps the counters when that is due.
    fn state(&self) -> (MutexGuard<'_, State>, Now) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mono_ms = (CLOCK_BASE + self.began.elapsed()).as_millis() as u64;
        if mono_ms >= state.wall.0 + WALL_MS {
            state.wall = (mono_ms, clock::since_epoch().as_millis() as u64);
        }
        let (read_ms, wall_ms) = state.wall;
        let now = state.calendar.now(mono_ms, wall_ms + mono_ms.saturating_sub(read_ms));
        if now.mono_ms >= state.swept_ms + SWEEP_MS {
            state.swept_ms = now.mono_ms;
            state.book.sweep(now);
            self.refusals.sweep(now.mono_ms);
        }
        (state, now)
    }

    fn learned(&self, model: &str) -> Learned {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).learned.get(model).copied().unwrap_or_default()
    }

    /// Exports everything counted and held, for a process that continues with it; from now on `give` gets holds and settlements made here.
    pub fn give_away(&self, give: Give) -> BookState {
        let (mut state, now) = self.state();
        state.give = Some(give);
        state.book.export(now)
    }

    /// Ends the reports of holds and settlements to the process that takes over.
    pub fn keep(&self) {
        self.state().0.give = None;
    }

    /// Replaces the counters by another process's, which are more recent than the ledger's.
    pub fn import(&self, book: BookState) {
        let (mut state, now) = self.state();
        if state.book.open() == 0 {
            state.book = Book::new();
        }
        state.book.import(book, now);
        state.is_imported = true;
        drop(state);
        self.unread.store(Arc::default());
    }

    /// Adopts a hold that the other process has made since the export.
    pub fn adopt(&self, id: u64, claims: &[Claimed]) {
        let limits: Vec<Arc<str>> = claims.iter().map(|claim| claim.limit.as_str().into()).collect();
        let claims: Vec<_> = claims
            .iter()
            .zip(&limits)
            .map(|(Claimed { subject, measure, amount, tag, .. }, limit)| Claim {
                limit,
                subject,
                measure: *measure,
                amount: *amount,
                tag: *tag,
            })
            .collect();
        let (mut state, now) = self.state();
        state.book.adopt(id, &claims, now);
    }

    /// Settles an adopted hold as the other process reports it.
    pub fn settle_adopted(&self, id: u64, amounts: &[(u16, Unit, u64)]) {
        let (mut state, now) = self.state();
        let of = |tag, unit| amounts.iter().find(|one| (one.0, one.1) == (tag, unit)).map(|one| one.2);
        state.book.settle_id(id, now, of);
    }

    /// Settles the adopted holds left by the other process, which has ended, with their reserved amounts.
    pub fn end_adopted(&self) {
        let (mut state, now) = self.state();
        state.book.end_adopted(now);
    }

    /// Adds the gauges of limits, ledger and shared counters for `/metrics`.
    pub fn gauges(&self, out: &mut Vec<(Gauge, String, f64)>) {
        let (state, _) = self.state();
        out.push((Gauge::LimitCounters, String::new(), state.book.len() as f64));
        if let Some((waiting, lost)) = self.journal().map(Journal::counts) {
            out.push((Gauge::LedgerWaiting, String::new(), waiting as f64));
            out.push((Gauge::LedgerLost, String::new(), lost as f64));
            out.push((Gauge::LedgerAssumed, String::new(), self.assumed.load(Ordering::Relaxed) as f64));
        }
        out.push((Gauge::LimitHolds, String::new(), state.book.open() as f64));
        if let Some(shared) = self.shared.get() {
            out.push((Gauge::StoreUp, "counters".to_owned(), f64::from(u8::from(shared.is_up()))));
            out.push((Gauge::CountersRestored, String::new(), shared.restored() as f64));
            out.push((Gauge::CountersSlow, String::new(), shared.slow() as f64));
        }
    }

    /// Standing of the counter of `measure` for `subject` under `limit`: its bound and its use.
    fn standing(&self, limit: &str, subject: &str, measure: Measure) -> Standing {
        let (mut state, now) = self.state();
        state.book.standing(limit, subject, measure, now)
    }

    /// Reserves all claims in the book; returns the hold or the denial, and the standings afterwards.
    fn hold(&self, claims: &[Claim<'_>]) -> (Result<Hold, Denied>, Vec<(Measure, Standing)>, Now) {
        let (mut state, now) = self.state();
        let held = state.book.reserve(claims, now);
        if let (Some(give), Ok(hold)) = (&state.give, &held) {
            // A full channel or an ended process: the hold is then counted here alone.
            let _ = give.try_send(Given::Held { id: hold.id(), claims: claims.iter().map(Claimed::from).collect() });
        }
        let standings = limit_headers::standings(&mut state.book, claims, now);
        (held, standings, now)
    }

    fn count_allowed(&self, limit: &Limit) {
        if let Some(tally) = self.allowed.load().get(&limit.id) {
            return tally.count();
        }
        let labels = [("limit", &*limit.id), ("decision", "allowed")];
        if self.allowed.load().len() >= TALLIES_MAX {
            return self.metrics.count(Metric::LimitDecisions, &labels);
        }
        let tally = self.metrics.tally(Metric::LimitDecisions, &labels);
        tally.count();
        self.allowed.rcu(|known| {
            let mut known = HashMap::clone(known);
            known.insert(limit.id.clone(), tally.clone());
            known
        });
    }
}
