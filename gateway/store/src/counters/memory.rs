//! [`Counters`] of one process, in memory.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;

use super::{AMOUNT_MAX, Ask, Counters, Grant, Kept, Settlement, Window};
use super::{check_asks, check_kept, check_settlements, granted};
use crate::StoreError;

/// Most counters; ended windows are removed to make room.
const COUNTERS_MAX: usize = 1_000_000;
/// Number of counters from which on ended windows are swept.
const SWEEP_FROM: usize = 1024;

/// Counters in memory, lost with the process.
#[derive(Default)]
pub struct MemoryCounters {
    book: Mutex<Book>,
}

#[derive(Default)]
struct Book {
    cells: HashMap<(String, Window), Cell>,
    /// Number of the last settlement of each holder.
    settled: HashMap<String, u64>,
    /// Number of cells at which the next sweep is due: twice the number after the last one, so that a sweep costs a
    /// constant per new cell (amortized).
    sweep_at: usize,
}

#[derive(Default)]
struct Cell {
    spent: u64,
    leases: HashMap<String, Lease>,
}

struct Lease {
    amount: u64,
    until: u64,
}

impl Cell {
    fn used(&self, now: u64) -> u64 {
        let leased = self.leases.values().filter(|lease| lease.until > now).map(|lease| lease.amount);
        leased.fold(self.spent, u64::saturating_add).min(AMOUNT_MAX)
    }

    /// Adds `amount` to the lease of `holder`; returns the whole lease. Lapsed and empty leases are removed.
    fn lease(&mut self, holder: &str, amount: u64, until: u64, now: u64) -> u64 {
        let lease = self.leases.entry(holder.to_owned()).or_insert(Lease { amount: 0, until: 0 });
        if lease.until <= now {
            lease.amount = 0;
        }
        lease.amount += amount;
        lease.until = lease.until.max(until);
        let leased = lease.amount;
        self.leases.retain(|_, lease| lease.until > now && lease.amount > 0);
        leased
    }
}

impl Book {
    fn used(&self, ask: &Ask, now: u64) -> u64 {
        let of = |window| self.cells.get(&(ask.counter.clone(), window)).map_or(0, |cell| cell.used(now));
        let before = ask.window.before(now).filter(|_| ask.sliding);
        let slid = before.map_or(0, |(window, part, whole)| {
            (u128::from(of(window)) * u128::from(part)).div_ceil(u128::from(whole)) as u64
        });
        (of(ask.window) + slid).min(AMOUNT_MAX)
    }

    fn make_place(&mut self, now: u64) -> Result<(), StoreError> {
        if self.cells.len() >= self.sweep_at.max(SWEEP_FROM) {
            // A sliding window also counts the one before it: keep a window for two lengths.
            self.cells.retain(|(_, window), cell| match window.end() {
                Some(end) => end.saturating_add(window.seconds) > now,
                None => cell.used(now) > 0,
            });
            self.sweep_at = self.cells.len() * 2;
        }
        if self.cells.len() >= COUNTERS_MAX { Err(StoreError::Full) } else { Ok(()) }
    }

    fn take(&mut self, holder: &str, asks: &[Ask], whole: bool, now: u64) -> Result<Vec<Grant>, StoreError> {
        self.make_place(now)?;
        let used: Vec<u64> = asks.iter().map(|ask| self.used(ask, now)).collect();
        let mut got: Vec<u64> = asks.iter().zip(&used).map(|(ask, used)| granted(ask, *used)).collect();
        if whole && asks.iter().zip(&got).any(|(ask, got)| *got < ask.least) {
            got.fill(0);
        }
        let grants = asks.iter().zip(used).zip(got).map(|((ask, used), granted)| {
            let cell = self.cells.entry((ask.counter.clone(), ask.window)).or_default();
            let leased = cell.lease(holder, granted, ask.until, now);
            Grant { granted, leased, used: used + granted }
        });
        Ok(grants.collect())
    }

    fn set(&mut self, holder: &str, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        self.make_place(now)?;
        for one in kept {
            let cell = self.cells.entry((one.counter.clone(), one.window)).or_default();
            cell.leases.remove(holder);
            cell.lease(holder, one.amount.min(AMOUNT_MAX), one.until, now);
        }
        Ok(())
    }

    fn restore(&mut self, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        self.make_place(now)?;
        for one in kept {
            let cell = self.cells.entry((one.counter.clone(), one.window)).or_default();
            cell.spent = cell.spent.max(one.amount.min(AMOUNT_MAX));
        }
        Ok(())
    }

    fn settle(&mut self, holder: &str, nth: u64, settlements: &[Settlement], now: u64) -> Result<(), StoreError> {
        self.make_place(now)?;
        let last = self.settled.entry(holder.to_owned()).or_default();
        if *last >= nth {
            return Ok(());
        }
        *last = nth;
        for one in settlements {
            let cell = self.cells.entry((one.counter.clone(), one.window)).or_default();
            if let Some(lease) = cell.leases.get_mut(holder) {
                lease.amount = lease.amount.saturating_sub(one.leased);
            }
            // An empty lease is removed, so that a later lease does not inherit its end.
            cell.leases.retain(|_, lease| lease.amount > 0);
            cell.spent = cell.spent.saturating_add(one.spent).min(AMOUNT_MAX);
        }
        Ok(())
    }
}

#[async_trait]
impl Counters for MemoryCounters {
    async fn take(&self, holder: &str, asks: &[Ask], whole: bool, now: u64) -> Result<Vec<Grant>, StoreError> {
        check_asks(holder, asks)?;
        self.book.lock().unwrap_or_else(PoisonError::into_inner).take(holder, asks, whole, now)
    }

    async fn restore(&self, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        check_kept("ledger", kept)?;
        self.book.lock().unwrap_or_else(PoisonError::into_inner).restore(kept, now)
    }

    async fn lease(&self, holder: &str, kept: &[Kept], now: u64) -> Result<(), StoreError> {
        check_kept(holder, kept)?;
        self.book.lock().unwrap_or_else(PoisonError::into_inner).set(holder, kept, now)
    }

    async fn settle(&self, holder: &str, nth: u64, settlements: &[Settlement], now: u64) -> Result<(), StoreError> {
        check_settlements(holder, nth, settlements)?;
        self.book.lock().unwrap_or_else(PoisonError::into_inner).settle(holder, nth, settlements, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn in_memory_they_are_counters() {
        crate::conformance::counters(&MemoryCounters::default(), "memory").await;
    }

    #[test]
    fn ended_windows_make_place() {
        let mut book = Book::default();
        for second in 0..100_000 {
            let window = Window { start: second, seconds: 1 };
            let ask = Ask { counter: "a".into(), window, sliding: false, max: 1, want: 1, least: 0, until: second + 1 };
            assert_eq!(book.take("g", &[ask], false, second).expect("taken")[0].granted, 1);
        }
        assert!(book.cells.len() < 3000, "{}", book.cells.len());
    }
}
