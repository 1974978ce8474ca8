//! Counters that several gateways share: an amount granted to one is not granted to another.
//!
//! ```text
//!   used    = spent + leases that have not lapsed
//!   granted = min(want, max − used), or nothing if that is less than `least`
//!   take:   used grows by the grant, as a lease of its holder
//!   settle: a part of the lease ends, an amount is spent
//! ```
//!
//! A gateway takes portions and serves most requests from its portion without asking. The lease of a gateway that dies
//! returns when it lapses (`until`), so requests in flight lease for seconds and renew; money leases to the end of its
//! window, so that an amount that a dead gateway may have spent stays spent. **A grant never makes `used` exceed
//! `max`**: the comparison and the change are one step of the store, and `used` grows nowhere else except in
//! [`Counters::settle`], which may spend more than was leased (the answer was longer than expected); later grants are
//! then refused.
//!
//! Times are the caller's: gateways that share counters need clocks that agree to within a second or so (NTP). The
//! holder of a lease must stop using it at `until` by its own clock.

mod memory;

pub use memory::MemoryCounters;

use std::time::Duration;

use async_trait::async_trait;

use crate::StoreError;

/// Largest amount; a larger maximum means no bound. Stores compute in doubles (Lua), which are exact up to here.
pub const AMOUNT_MAX: u64 = (1 << 53) - 1;
/// Most asks in one call of [`Counters::take`]; more are refused as misuse. A request asks for each measure of each of
/// its limits, for up to eight keys of a chain.
pub const ASKS_MAX: usize = 1024;
/// Longest name of a counter or a holder, in bytes.
pub const COUNTER_NAME_BYTES_MAX: usize = 512;

/// Time window in which a counter counts, from zero at its begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Window {
    /// First second of the window, in Unix seconds.
    pub start: u64,
    /// Length in seconds; 0: the window never ends.
    pub seconds: u64,
}

impl Window {
    /// Window of that length around `now`; windows begin at multiples of their length.
    pub fn at(now: u64, seconds: u64) -> Self {
        Self { start: if seconds == 0 { 0 } else { now - now % seconds }, seconds }
    }

    /// First second behind the window; `None`: it never ends.
    pub fn end(&self) -> Option<u64> {
        (self.seconds > 0).then(|| self.start.saturating_add(self.seconds))
    }

    /// Previous window, and the part of it that still counts at `now` in a sliding window: numerator and denominator.
    pub(crate) fn before(&self, now: u64) -> Option<(Window, u64, u64)> {
        let start = self.start.checked_sub(self.seconds).filter(|_| self.seconds > 0)?;
        let left = self.end()?.saturating_sub(now).min(self.seconds);
        Some((Window { start, seconds: self.seconds }, left, self.seconds))
    }
}

/// Request for a portion (lease) of one counter's maximum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Name of the counter, shared by all gateways.
    pub counter: String,
    /// Time window in which the counter counts.
    pub window: Window,
    /// Sliding window: also count the usage of the previous window, in the proportion in which the last
    /// `window.seconds` seconds still overlap it, rounded up.
    pub sliding: bool,
    /// Upper bound of the amount in use by all holders.
    pub max: u64,
    /// Wanted amount; 0 renews the lease and reports the usage.
    pub want: u64,
    /// Least useful amount: if less is free, nothing is granted.
    pub least: u64,
    /// Time in Unix seconds at which the holder's lease of this counter lapses, unless it lapses later already.
    pub until: u64,
}

/// Answer to an [`Ask`]: the granted amount, and the counter's use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Amount granted by this call; 0: nothing.
    pub granted: u64,
    /// Holder's whole lease of this counter, this grant included. Less than the holder expects: its lease had lapsed.
    pub leased: u64,
    /// Amount in use by all, this grant included (and the share of the previous window, if sliding).
    pub used: u64,
}

/// End of a holder's lease of a counter, or of a part of it, with the amount spent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settlement {
    /// Name of the counter, as in the [`Ask`].
    pub counter: String,
    /// Window of the counter, as in the [`Ask`].
    pub window: Window,
    /// Part of the lease that ends; an amount beyond the lease (which may have lapsed) is ignored.
    pub leased: u64,
    /// Amount spent for good: equal to the lease, less, or more.
    pub spent: u64,
}

/// Least value that a counter must be restored to after it was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Name of the counter to restore.
    pub counter: String,
    /// Window of the counter to restore.
    pub window: Window,
    /// Amount that was spent, or that the holder has leased.
    pub amount: u64,
    /// Time in Unix seconds at which the holder's lease lapses.
    pub until: u64,
}

/// Result of [`Counters::begin`]: whether the store still has its counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// The store has all counts that it had.
    Whole,
    /// The counts are gone, or this client has never seen them, and nobody has restored them yet: restore now. Nothing is
    /// granted to anybody for that long, so that all gateways have time to restore.
    Anew(Duration),
}

/// Shared counters.
///
/// A server may lose its counts (emptied, or restarted without its data). Every client that counted there then gets
/// [`StoreError::Lost`], until it begins again and restores what it knows: spent amounts ([`Counters::restore`]) and
/// its own leases ([`Counters::lease`]).
#[async_trait]
pub trait Counters: Send + Sync + 'static {
    /// Asks for portions of counters, each named once; answers in the order of the asks. `whole`: if one gets less than
    /// its `least`, none gets anything. `holder` is one life of one gateway.
    ///
    /// After an error it is unknown whether a portion was granted; such a lease lapses. Do not retry within the lease.
    ///
    /// # Errors
    /// [`StoreError::Misuse`]: a counter asked for twice, too many asks, a name that is too long. [`StoreError::Full`]:
    /// too many counters.
    async fn take(&self, holder: &str, asks: &[Ask], whole: bool, now: u64) -> Result<Vec<Grant>, StoreError>;

    /// Begins to count, or checks that the store answers and has its counts. A store in this process does nothing.
    async fn begin(&self) -> Result<Begun, StoreError> {
        Ok(Begun::Whole)
    }

    /// Raises spent amounts to at least the known ones. Idempotent.
    async fn restore(&self, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        let _ = (kept, now);
        Ok(())
    }

    /// Notes that all spent amounts of the ledger are restored: clients that begin from now on need not restore them. Idempotent.
    async fn restored(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Sets the leases of `holder`, whatever the maximum is: restores lost ones, and drops grants whose answers never
    /// arrived. An ask that is still under way when this is done grants nothing. Must not run beside the holder's own
    /// asks.
    async fn lease(&self, holder: &str, kept: &[Kept], now: u64) -> Result<(), StoreError>;

    /// Ends leases and records spent amounts: all settlements or none, and exactly once. `nth` is their idempotency
    /// number, greater than those of all earlier settlements of `holder`; a call with a number at or below the last one
    /// done changes nothing.
    ///
    /// After an error it is unknown whether the call took effect. Retry it unchanged under its number before the holder
    /// settles anything else or sets its leases.
    async fn settle(&self, holder: &str, nth: u64, settlements: &[Settlement], now: u64) -> Result<(), StoreError>;
}

/// Number of the last [`Counters::lease`] of each holder; a process has one or two holders. Every ask carries the
/// number, and an ask that arrives after a later lease call changes nothing: it was under way when its holder stopped
/// waiting for it.
#[cfg(any(feature = "postgres", feature = "redis"))]
#[derive(Default)]
pub(crate) struct Words(std::sync::Mutex<std::collections::HashMap<String, u64>>);

#[cfg(any(feature = "postgres", feature = "redis"))]
impl Words {
    fn known(&self) -> std::sync::MutexGuard<'_, std::collections::HashMap<String, u64>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Number of the holder's last lease call; 0 before the first.
    pub(crate) fn of(&self, holder: &str) -> u64 {
        self.known().get(holder).copied().unwrap_or(0)
    }

    /// Records the number of a lease call that the server has completed.
    pub(crate) fn said(&self, holder: &str, word: u64) {
        self.known().insert(holder.to_owned(), word);
    }
}

/// Amount that an ask is granted if `used` is in use: the rule for stores that compute in this process.
pub(crate) fn granted(ask: &Ask, used: u64) -> u64 {
    let got = ask.want.min(ask.max.min(AMOUNT_MAX).saturating_sub(used));
    if got < ask.least { 0 } else { got }
}

/// Checks the holder, and the names, windows and number of counters to be restored.
pub(crate) fn check_kept(holder: &str, kept: &[Kept]) -> Result<(), StoreError> {
    check_names(holder, kept.iter().map(|one| (&one.counter, one.window)))
}

/// Checks the number, names and amounts of asks before they are sent.
pub(crate) fn check_asks(holder: &str, asks: &[Ask]) -> Result<(), StoreError> {
    check_names(holder, asks.iter().map(|ask| (&ask.counter, ask.window)))?;
    if asks.iter().any(|ask| ask.want > AMOUNT_MAX || ask.least > ask.want) {
        return Err(StoreError::Misuse("an amount that cannot be"));
    }
    Ok(())
}

/// Checks the holder, number, names and amounts of settlements before they are sent.
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

/// Returns true if a counter or a holder can have the name.
pub fn is_counter_name(name: &str) -> bool {
    name.len() <= COUNTER_NAME_BYTES_MAX && !name.contains('\0')
}

fn check_names<'a>(holder: &str, counters: impl Iterator<Item = (&'a String, Window)>) -> Result<(), StoreError> {
    let mut seen = std::collections::HashSet::new();
    for (name, window) in counters {
        if !is_counter_name(name) {
            return Err(StoreError::Misuse("a counter of that name"));
        }
        if window.start > AMOUNT_MAX || window.seconds > AMOUNT_MAX {
            return Err(StoreError::Misuse("a window that cannot be"));
        }
        if !seen.insert((name, window)) {
            return Err(StoreError::Misuse("a counter that is named twice"));
        }
    }
    if holder.is_empty() || !is_counter_name(holder) {
        return Err(StoreError::Misuse("a holder of that name"));
    }
    if seen.len() > ASKS_MAX { Err(StoreError::Misuse("too many counters at once")) } else { Ok(()) }
}
