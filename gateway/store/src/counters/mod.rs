//! Counters that several gateways share: what one is granted, no other gets.
//!
//! ```text
//!   used = spent + leases that have not lapsed          granted = min(want, max − used), or nothing if that is less than `least`
//!   take:   used grows by what is granted, as a lease of its holder        settle: a part of the lease ends, what it was for is spent
//! ```
//!
//! A gateway takes in portions and serves most requests from its portion without asking. What it holds when it dies comes back when the
//! lease lapses (`until`), so requests in flight lease for seconds and renew; money leases to the end of its window, so that what a dead
//! gateway may have spent stays spent. **A grant never makes `used` exceed `max`**: the comparison and the change are one step of the
//! store, and that is the only place where `used` grows but for [`Counters::settle`], which may note more than was leased (the answer was
//! longer than anybody could know) and then stops the next grants.
//!
//! Time is the asker's: gateways that share counters need clocks that agree to within a second or so (NTP). A lease's holder must stop
//! using it at `until` by its own clock.

mod memory;

pub use memory::MemoryCounters;

use std::time::Duration;

use async_trait::async_trait;

use crate::StoreError;

/// Largest amount; more, as a maximum, is as good as none. Stores compute in doubles (Lua), which are exact up to here.
pub const AMOUNT_MAX: u64 = (1 << 53) - 1;
/// Asks of one [`Counters::take`].
pub const ASKS_MAX: usize = 64;
/// Longest name of a counter or a holder.
pub const COUNTER_NAME_BYTES_MAX: usize = 512;

/// A stretch of time that is counted by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Window {
    /// Unix seconds.
    pub start: u64,
    /// Its length; 0: it never ends.
    pub seconds: u64,
}

impl Window {
    /// The window of that length that `now` lies in; they begin at multiples of their length.
    pub fn at(now: u64, seconds: u64) -> Self {
        Self { start: if seconds == 0 { 0 } else { now - now % seconds }, seconds }
    }

    /// The first second behind it; `None`: it never ends.
    pub fn end(&self) -> Option<u64> {
        (self.seconds > 0).then(|| self.start.saturating_add(self.seconds))
    }

    /// The one before, and how much of it still counts at `now` in a sliding window: numerator and denominator.
    pub(crate) fn before(&self, now: u64) -> Option<(Window, u64, u64)> {
        let start = self.start.checked_sub(self.seconds).filter(|_| self.seconds > 0)?;
        let left = self.end()?.saturating_sub(now).min(self.seconds);
        Some((Window { start, seconds: self.seconds }, left, self.seconds))
    }
}

/// What is asked of one counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Its name.
    pub counter: String,
    /// The stretch of time.
    pub window: Window,
    /// Also count what the window before used, in the proportion in which the last `window.seconds` seconds still overlap it, rounded
    /// up.
    pub sliding: bool,
    /// What all may have together.
    pub max: u64,
    /// What is wanted; 0 renews the lease and tells what is used.
    pub want: u64,
    /// Less than this is not wanted at all.
    pub least: u64,
    /// Unix seconds at which the holder's lease of this counter lapses, unless it is to lapse later already.
    pub until: u64,
}

/// What was granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Now.
    pub granted: u64,
    /// All that this holder leases of this counter, this grant included. Less than it thinks: the lease had lapsed.
    pub leased: u64,
    /// All that is used, this grant included (and the window before, if sliding).
    pub used: u64,
}

/// The end of a lease, or of a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settlement {
    /// The counter.
    pub counter: String,
    /// The stretch of time.
    pub window: Window,
    /// How much of the lease ends; beyond what is leased (it has lapsed) it means nothing.
    pub leased: u64,
    /// What is spent for good: all, less, or more.
    pub spent: u64,
}

/// What a counter has to say at least, once it has lost what it had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The counter.
    pub counter: String,
    /// The stretch of time.
    pub window: Window,
    /// Spent, or leased by the holder.
    pub amount: u64,
    /// Unix seconds at which a lease lapses.
    pub until: u64,
}

/// What [`Counters::begin`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// What was counted is there.
    Whole,
    /// It is gone, or was never seen by this client: to be restored now. Nobody is granted anything for that long, so that all who
    /// count here have the time.
    Anew(Duration),
}

/// Shared counters.
///
/// A server may lose what it has (it is emptied, or restarted without what it had). It then says [`StoreError::Lost`] to everybody who
/// counted there before, until they begin again and say what they know: what is spent ([`Counters::restore`]), what they lease
/// ([`Counters::lease`]).
#[async_trait]
pub trait Counters: Send + Sync + 'static {
    /// Asks for portions of counters, each named once; answers in the order of the asks. `whole`: if one gets less than its `least`,
    /// none gets anything. `holder` is one life of one gateway.
    ///
    /// When it fails, it is not known whether something was granted: it then lapses. Not to be retried within the lease.
    ///
    /// # Errors
    /// [`StoreError::Misuse`]: a counter asked for twice, too many asks, a name that is too long. [`StoreError::Full`]: too many counters.
    async fn take(&self, holder: &str, asks: &[Ask], whole: bool, now: u64) -> Result<Vec<Grant>, StoreError>;

    /// Begins, or looks whether what was counted is still there. Stores that lose nothing have nothing to do.
    async fn begin(&self) -> Result<Begun, StoreError> {
        Ok(Begun::Whole)
    }

    /// Lifts what is spent to what is known. Twice the same is once.
    async fn restore(&self, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        let _ = (kept, now);
        Ok(())
    }

    /// Sets what `holder` leases, whatever the maximum is: what was granted and lost, and nothing of what was granted without its
    /// learning of it: an ask that is on its way when this is done grants nothing. Not while it asks for more.
    async fn lease(&self, holder: &str, kept: &[Kept], now: u64) -> Result<(), StoreError>;

    /// Ends leases, and notes what was spent. All settlements or none, and once: `nth` is their number, greater than those of all that
    /// `holder` settled before, and what has a number that was done, or one before it, is done.
    ///
    /// When it fails, it is not known whether it was done. It is to be sent again under its number, as it was, before the holder settles
    /// anything else or says what it leases.
    async fn settle(&self, holder: &str, nth: u64, settlements: &[Settlement], now: u64) -> Result<(), StoreError>;
}

/// The numbers of what holders of leases said last ([`Counters::lease`]); a process has one or two. Every ask bears the number, and one that
/// comes behind a later number changes nothing: it was on its way when its holder stopped waiting for it.
#[cfg(any(feature = "postgres", feature = "redis"))]
#[derive(Default)]
pub(crate) struct Words(std::sync::Mutex<std::collections::HashMap<String, u64>>);

#[cfg(any(feature = "postgres", feature = "redis"))]
impl Words {
    fn known(&self) -> std::sync::MutexGuard<'_, std::collections::HashMap<String, u64>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The last one.
    pub(crate) fn of(&self, holder: &str) -> u64 {
        self.known().get(holder).copied().unwrap_or(0)
    }

    /// The next one was said.
    pub(crate) fn said(&self, holder: &str, word: u64) {
        self.known().insert(holder.to_owned(), word);
    }
}

/// What an ask gets of a counter of which `used` is used: the one rule, for stores that compute here.
pub(crate) fn granted(ask: &Ask, used: u64) -> u64 {
    let got = ask.want.min(ask.max.min(AMOUNT_MAX).saturating_sub(used));
    if got < ask.least { 0 } else { got }
}

/// The same for what is to be restored.
pub(crate) fn check_kept(holder: &str, kept: &[Kept]) -> Result<(), StoreError> {
    check_names(holder, kept.iter().map(|one| (&one.counter, one.window)))
}

/// Refuses what no store answers.
pub(crate) fn check_asks(holder: &str, asks: &[Ask]) -> Result<(), StoreError> {
    check_names(holder, asks.iter().map(|ask| (&ask.counter, ask.window)))?;
    if asks.iter().any(|ask| ask.want > AMOUNT_MAX || ask.least > ask.want) {
        return Err(StoreError::Misuse("an amount that cannot be"));
    }
    Ok(())
}

/// The same for settlements.
pub(crate) fn check_settlements(holder: &str, nth: u64, settlements: &[Settlement]) -> Result<(), StoreError> {
    check_names(holder, settlements.iter().map(|one| (&one.counter, one.window)))?;
    if nth == 0 || nth > AMOUNT_MAX {
        return Err(StoreError::Misuse("a number that cannot be"));
    }
    if settlements.iter().any(|one| one.leased > AMOUNT_MAX || one.spent > AMOUNT_MAX) {
        return Err(StoreError::Misuse("an amount that cannot be"));
    }
    Ok(())
}

fn check_names<'a>(holder: &str, counters: impl Iterator<Item = (&'a String, Window)>) -> Result<(), StoreError> {
    let mut seen = std::collections::HashSet::new();
    for (name, window) in counters {
        if name.len() > COUNTER_NAME_BYTES_MAX || name.contains('\0') {
            return Err(StoreError::Misuse("a counter of that name"));
        }
        if window.start > AMOUNT_MAX || window.seconds > AMOUNT_MAX {
            return Err(StoreError::Misuse("a window that cannot be"));
        }
        if !seen.insert((name, window)) {
            return Err(StoreError::Misuse("a counter that is named twice"));
        }
    }
    if holder.is_empty() || holder.len() > COUNTER_NAME_BYTES_MAX || holder.contains('\0') {
        return Err(StoreError::Misuse("a holder of that name"));
    }
    if seen.len() > ASKS_MAX { Err(StoreError::Misuse("too many counters at once")) } else { Ok(()) }
}
