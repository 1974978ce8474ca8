//! Process-wide memory budgets: one for request bodies, charged as bytes arrive and released when the body is dropped,
//! and another for answers (`answer_memory`).
//!
//! A sender that announces much and sends little holds little. An eighth of the budget is reserved for small bodies, so
//! that slow senders of large ones cannot lock everybody out: a body that outgrows [`SMALL_BYTES_MAX`] must fit into
//! the rest, and returns what it took of the reserve.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use arc_swap::ArcSwap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Granularity of the budget in bytes: leases are rounded up to whole units.
const UNIT_BYTES: usize = 4096;
/// Largest body in bytes that may use the reserve for small bodies.
pub const SMALL_BYTES_MAX: usize = 64 * 1024;

/// Process-wide memory budget; clones share it.
#[derive(Clone, Debug)]
pub struct BodyBudget(Arc<Budgets>);

/// Current budget, and earlier ones of which leases still exist (after [`BodyBudget::resize`]).
#[derive(Debug)]
struct Budgets {
    now: ArcSwap<Units>,
    before: Mutex<Vec<Weak<Units>>>,
}

#[derive(Debug)]
struct Units {
    shared: Arc<Semaphore>,
    small: Arc<Semaphore>,
    units_max: usize,
    sizes: (usize, usize),
}

/// Lease of bytes from the budget; released when dropped.
#[derive(Debug)]
pub struct BodyLease {
    budget: Arc<Units>,
    shared: Option<OwnedSemaphorePermit>,
    small: Option<OwnedSemaphorePermit>,
}

/// Error that the memory budget has too few bytes left for a lease to grow.
#[derive(Debug, PartialEq, Eq)]
pub struct BudgetExhausted;

impl BodyBudget {
    /// Creates a budget of `bytes_max`. An eighth is reserved for small bodies, or less if a body of `largest` bytes
    /// would otherwise not fit.
    pub fn new(bytes_max: usize, largest: usize) -> Self {
        let now = ArcSwap::from_pointee(Units::new(bytes_max, largest));
        Self(Arc::new(Budgets { now, before: Mutex::default() }))
    }

    /// Creates a budget that is never used up, for tests of something else.
    pub fn unbounded() -> Self {
        Self::new(usize::MAX, 0)
    }

    /// Changes the size for future leases; existing leases stay with the budget that they were taken from.
    pub fn resize(&self, bytes_max: usize, largest: usize) {
        if self.0.now.load().sizes == (bytes_max, largest) {
            return;
        }
        let old = self.0.now.swap(Arc::new(Units::new(bytes_max, largest)));
        let mut before = self.0.before.lock().unwrap_or_else(PoisonError::into_inner);
        before.retain(|units| units.strong_count() > 0);
        before.push(Arc::downgrade(&old));
    }

    /// Creates a lease of no bytes on this budget, which the holder grows as data arrives.
    pub fn lease(&self) -> BodyLease {
        BodyLease { budget: self.0.now.load_full(), shared: None, small: None }
    }

    /// Bytes held by all leases of the budget at this moment.
    pub fn bytes_held(&self) -> usize {
        let before = self.0.before.lock().unwrap_or_else(PoisonError::into_inner);
        let before: usize = before.iter().filter_map(Weak::upgrade).map(|units| units.bytes_held()).sum();
        self.0.now.load().bytes_held() + before
    }
}

impl Units {
    fn new(bytes_max: usize, largest: usize) -> Self {
        let units_max = bytes_max.div_ceil(UNIT_BYTES).min(Semaphore::MAX_PERMITS);
        let small = (units_max / 8).min(units_max.saturating_sub(largest.div_ceil(UNIT_BYTES)));
        let (shared, small) = (Semaphore::new(units_max - small), Semaphore::new(small));
        Self { shared: Arc::new(shared), small: Arc::new(small), units_max, sizes: (bytes_max, largest) }
    }

    fn bytes_held(&self) -> usize {
        let free = self.shared.available_permits() + self.small.available_permits();
        self.units_max.saturating_sub(free) * UNIT_BYTES
    }
}

impl BodyLease {
    /// Extends the lease to cover `bytes` in all, rounded up to whole units. Never waits: an error leaves the lease as
    /// it was.
    pub fn cover(&mut self, bytes: usize) -> Result<(), BudgetExhausted> {
        let units = bytes.div_ceil(UNIT_BYTES);
        let (shared, small) = (held(self.shared.as_ref()), held(self.small.as_ref()));
        if bytes > SMALL_BYTES_MAX {
            take(&self.budget.shared, &mut self.shared, units.saturating_sub(shared))?;
            self.small = None;
            return Ok(());
        }
        let more = units.saturating_sub(shared + small);
        take(&self.budget.shared, &mut self.shared, more).or_else(|_| take(&self.budget.small, &mut self.small, more))
    }
}

impl Drop for BodyLease {
    fn drop(&mut self) {
        self.count_freed(self.bytes());
    }
}

impl BodyLease {
    /// Counts `bytes` as freed memory if they are more than a small body.
    fn count_freed(&self, bytes: usize) {
        if bytes > SMALL_BYTES_MAX {
            penstock_base::freed::count(bytes);
        }
    }

    /// Bytes that the budget has in all, and those of the largest body that it was made for.
    pub fn budget_sizes(&self) -> (usize, usize) {
        self.budget.sizes
    }

    /// Bytes that the lease covers, in whole units.
    pub fn bytes(&self) -> usize {
        (held(self.shared.as_ref()) + held(self.small.as_ref())) * UNIT_BYTES
    }

    /// Releases what the lease covers beyond `bytes`.
    pub fn shrink(&mut self, bytes: usize) {
        let mut over = (self.bytes() / UNIT_BYTES).saturating_sub(bytes.div_ceil(UNIT_BYTES));
        self.count_freed(over * UNIT_BYTES);
        for permit in [&mut self.shared, &mut self.small] {
            let given = over.min(held(permit.as_ref()));
            over -= given;
            drop(permit.as_mut().and_then(|permit| permit.split(given)));
        }
    }
}

fn held(permit: Option<&OwnedSemaphorePermit>) -> usize {
    permit.map_or(0, OwnedSemaphorePermit::num_permits)
}

fn take(from: &Arc<Semaphore>, into: &mut Option<OwnedSemaphorePermit>, units: usize) -> Result<(), BudgetExhausted> {
    if units == 0 {
        return Ok(());
    }
    let units = u32::try_from(units).map_err(|_| BudgetExhausted)?;
    let permit = from.clone().try_acquire_many_owned(units).map_err(|_| BudgetExhausted)?;
    match into {
        Some(held) => held.merge(permit),
        none => *none = Some(permit),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_share_one_budget_and_give_back() {
        let budget = BodyBudget::new(5 * UNIT_BYTES, 5 * UNIT_BYTES);
        let (mut first, mut second) = (budget.lease(), budget.lease());
        assert_eq!(first.cover(3 * UNIT_BYTES), Ok(()));
        assert_eq!(first.cover(2 * UNIT_BYTES), Ok(()), "never shrinks, never doubles");
        assert_eq!(second.cover(2 * UNIT_BYTES + 1), Err(BudgetExhausted));
        assert_eq!(second.cover(2 * UNIT_BYTES), Ok(()));
        assert_eq!(budget.bytes_held(), 5 * UNIT_BYTES);
        drop(first);
        assert_eq!(second.cover(5 * UNIT_BYTES), Ok(()));
        drop(second);
        assert_eq!(budget.bytes_held(), 0);
    }

    #[test]
    fn large_bodies_leave_a_part_for_small_ones() {
        let budget = BodyBudget::new(256 * UNIT_BYTES, 128 * UNIT_BYTES);
        let (mut large, mut more, mut small) = (budget.lease(), budget.lease(), budget.lease());
        assert_eq!(large.cover(224 * UNIT_BYTES), Ok(()), "seven eighths");
        assert_eq!(more.cover(SMALL_BYTES_MAX), Ok(()), "as long as it is small");
        assert_eq!(more.cover(SMALL_BYTES_MAX + 1), Err(BudgetExhausted), "then it has to fit beside the large one");
        assert_eq!(small.cover(SMALL_BYTES_MAX), Ok(()));
        assert_eq!(budget.lease().cover(1), Err(BudgetExhausted), "the part is bounded too");
        drop(large);
        assert_eq!(more.cover(100 * UNIT_BYTES), Ok(()));
        assert_eq!(budget.bytes_held(), 100 * UNIT_BYTES + SMALL_BYTES_MAX, "the part was given back");
        drop((more, small));
        assert_eq!(budget.bytes_held(), 0);
    }

    #[test]
    fn what_is_not_needed_any_more_goes_back() {
        let budget = BodyBudget::new(256 * UNIT_BYTES, 128 * UNIT_BYTES);
        let (mut large, mut other) = (budget.lease(), budget.lease());
        assert_eq!(large.cover(200 * UNIT_BYTES), Ok(()));
        large.shrink(10 * UNIT_BYTES + 1);
        assert_eq!((large.bytes(), budget.bytes_held()), (11 * UNIT_BYTES, 11 * UNIT_BYTES));
        large.shrink(100 * UNIT_BYTES);
        assert_eq!(large.bytes(), 11 * UNIT_BYTES, "shrinking never takes");
        assert_eq!(other.cover(213 * UNIT_BYTES), Ok(()));
        large.shrink(0);
        assert_eq!((large.bytes(), budget.bytes_held()), (0, 213 * UNIT_BYTES));
        assert_eq!(large.cover(11 * UNIT_BYTES), Ok(()));
    }

    #[test]
    fn another_size_counts_for_what_comes() {
        let budget = BodyBudget::new(4 * UNIT_BYTES, 4 * UNIT_BYTES);
        let mut first = budget.lease();
        assert_eq!(first.cover(4 * UNIT_BYTES), Ok(()));
        budget.resize(2 * UNIT_BYTES, 2 * UNIT_BYTES);
        let mut second = budget.lease();
        assert_eq!(second.cover(3 * UNIT_BYTES), Err(BudgetExhausted));
        assert_eq!(second.cover(2 * UNIT_BYTES), Ok(()));
        assert_eq!(budget.bytes_held(), 6 * UNIT_BYTES, "what was taken before counts on");
        drop((first, second));
        assert_eq!(budget.bytes_held(), 0);
    }

    #[test]
    fn the_largest_body_always_fits_alone() {
        for largest in [1, 100 * UNIT_BYTES, 255 * UNIT_BYTES, 256 * UNIT_BYTES] {
            assert_eq!(BodyBudget::new(256 * UNIT_BYTES, largest).lease().cover(largest), Ok(()), "{largest}");
        }
    }
}
