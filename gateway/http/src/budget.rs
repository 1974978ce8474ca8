//! Process-wide memory budgets: one for request bodies, charged as bytes arrive and released when the body is dropped,
//! and another for answers (`answer_memory`).
//!
//! A sender that announces much and sends little holds little. An eighth of the budget is reserved for small bodies, so
//! that slow senders of large ones cannot lock everybody out: a body that outgrows [`SMALL_BYTES_MAX`] must fit into
//! the rest, and returns what it took of the reserve.
//!
//! The leases of one asker (a key, or a client's address where no key is required) hold at most half of the budget
//! together, or one largest body where that is more; the rest is left to others.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use penstock_base::asker::Asker;
use penstock_base::error::Failure;
use penstock_proto::ErrorKind;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Granularity of the budget in bytes: leases are rounded up to whole units.
const UNIT_BYTES: usize = 4096;
/// Largest body in bytes that may use the reserve for small bodies.
pub const SMALL_BYTES_MAX: usize = 64 * 1024;

/// Sizes to which the buffer of a growing body can grow, for bytes that do not fit: the first that the budget covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Twice the bytes that are held, or the whole body where that is less.
    pub double: usize,
    /// An eighth more, for a time without memory for more than that.
    pub eighth: usize,
}

impl Growth {
    /// Sizes for a buffer that holds `held` bytes of a body of at most `whole`, when `more` come. Both have room for them.
    pub fn of(held: usize, more: usize, whole: usize) -> Self {
        let grown = |by: usize| (held + by).min(whole).max(held + more);
        Self { double: grown(held), eighth: grown(held / 8) }
    }
}

/// Process-wide memory budget; clones share it.
#[derive(Clone, Debug)]
pub struct BodyBudget(Arc<Budgets>);

/// Current budget, and earlier ones of which leases still exist (after [`BodyBudget::resize`]).
#[derive(Debug)]
struct Budgets {
    now: ArcSwap<Units>,
    before: Mutex<Vec<Weak<Units>>>,
    shares: Arc<Shares>,
}

#[derive(Debug)]
struct Units {
    shared: Arc<Semaphore>,
    small: Arc<Semaphore>,
    units_max: usize,
    /// Units of `shared` while there is no lease.
    shared_max: usize,
    sizes: (usize, usize),
}

/// Lease of bytes from the budget; released when dropped.
#[derive(Debug)]
pub struct BodyLease {
    budget: Arc<Units>,
    shared: Option<OwnedSemaphorePermit>,
    small: Option<OwnedSemaphorePermit>,
    /// Asker whose share the lease counts towards; `None`: nobody's.
    owner: Option<(Arc<Shares>, Asker)>,
}

/// Reason why a lease cannot grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetExhausted {
    /// Too few bytes of the budget are left.
    All,
    /// The asker's leases would hold more than its share.
    Share,
}

impl BudgetExhausted {
    /// Refusal of a request whose body finds no memory.
    pub fn failure(self) -> Failure {
        let message = match self {
            Self::All => "Too many large requests are in flight. Try again shortly.",
            Self::Share => {
                "Requests of this key (without a key: of this client address) hold its whole share of the memory for request bodies. Try again shortly."
            }
        };
        Failure::new(ErrorKind::Overloaded, message).retry_after(Duration::from_secs(1))
    }
}

/// Units that the leases of each asker hold; an asker without any is not in it.
#[derive(Debug, Default)]
struct Shares(Mutex<HashMap<Asker, usize>>);

impl Shares {
    /// Changes what one lease of the asker holds from `before` to `after` units.
    ///
    /// # Errors
    /// [`BudgetExhausted::Share`] if the lease grows and the asker would hold more than `most`; nothing is changed then.
    fn change(&self, asker: Asker, before: usize, after: usize, most: usize) -> Result<(), BudgetExhausted> {
        let mut shares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match shares.entry(asker) {
            Entry::Vacant(_) if after == 0 => {}
            Entry::Vacant(_) if after > most => return Err(BudgetExhausted::Share),
            Entry::Vacant(entry) => _ = entry.insert(after),
            Entry::Occupied(mut entry) => {
                let held = entry.get() - before + after;
                if after > before && held > most {
                    return Err(BudgetExhausted::Share);
                }
                *entry.get_mut() = held;
                if held == 0 {
                    entry.remove();
                }
            }
        }
        Ok(())
    }
}

impl BodyBudget {
    /// Creates a budget of `bytes_max`. An eighth is reserved for small bodies, or less if a body of `largest` bytes
    /// would otherwise not fit.
    pub fn new(bytes_max: usize, largest: usize) -> Self {
        let now = ArcSwap::from_pointee(Units::new(bytes_max, largest));
        Self(Arc::new(Budgets { now, before: Mutex::default(), shares: Arc::default() }))
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

    /// Creates a lease of no bytes on this budget, which the holder grows as data arrives; the lease counts towards no
    /// asker's share.
    pub fn lease(&self) -> BodyLease {
        self.lease_of(Asker::default())
    }

    /// Creates a lease of no bytes on this budget, which counts towards the asker's share.
    pub fn lease_of(&self, asker: Asker) -> BodyLease {
        let owner = (!asker.is_nobody()).then(|| (Arc::clone(&self.0.shares), asker));
        BodyLease { budget: self.0.now.load_full(), shared: None, small: None, owner }
    }

    /// Most bytes that the leases of one asker can cover together.
    pub fn share_bytes_max(&self) -> usize {
        self.0.now.load().share_max().saturating_mul(UNIT_BYTES)
    }

    /// Most bytes that one lease of nobody's share can cover while there is no other.
    pub fn lease_bytes_max(&self) -> usize {
        self.0.now.load().shared_max.saturating_mul(UNIT_BYTES)
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
        let shared_max = units_max - small;
        let (shared, small) = (Arc::new(Semaphore::new(shared_max)), Arc::new(Semaphore::new(small)));
        Self { shared, small, units_max, shared_max, sizes: (bytes_max, largest) }
    }

    /// Most units that the leases of one asker hold together: half of the budget, or one largest body where that is more.
    fn share_max(&self) -> usize {
        (self.units_max / 2).max(self.sizes.1.div_ceil(UNIT_BYTES).min(self.units_max))
    }

    fn bytes_held(&self) -> usize {
        let free = self.shared.available_permits() + self.small.available_permits();
        self.units_max.saturating_sub(free) * UNIT_BYTES
    }
}

impl BodyLease {
    /// Extends the lease to cover `bytes` in all, rounded up to whole units. Never waits: an error leaves the lease as
    /// it was.
    ///
    /// # Errors
    /// The budget has too few bytes left, or the asker holds its share.
    pub fn cover(&mut self, bytes: usize) -> Result<(), BudgetExhausted> {
        let units = bytes.div_ceil(UNIT_BYTES);
        let (shared, small) = (held(self.shared.as_ref()), held(self.small.as_ref()));
        let kept = if bytes > SMALL_BYTES_MAX { shared } else { shared + small };
        let (before, after) = (shared + small, units.max(kept));
        self.share(before, after)?;
        let taken = if bytes > SMALL_BYTES_MAX {
            take(&self.budget.shared, &mut self.shared, after - kept).map(|()| self.small = None)
        } else {
            take(&self.budget.shared, &mut self.shared, after - kept)
                .or_else(|_| take(&self.budget.small, &mut self.small, after - kept))
        };
        if taken.is_err() {
            self.unshare(after, before);
        }
        taken
    }

    /// Counts the lease as `after` units of its asker's share instead of `before`.
    fn share(&self, before: usize, after: usize) -> Result<(), BudgetExhausted> {
        match &self.owner {
            Some((shares, asker)) if before != after => shares.change(*asker, before, after, self.budget.share_max()),
            _ => Ok(()),
        }
    }

    /// Lowers the lease's units in its asker's share from `before` to `after`, which is never refused.
    fn unshare(&self, before: usize, after: usize) {
        let granted = self.share(before, after);
        debug_assert_eq!(granted, Ok(()), "less than before");
    }
}

impl Drop for BodyLease {
    fn drop(&mut self) {
        self.unshare(self.bytes() / UNIT_BYTES, 0);
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

    /// Bytes that the lease covers, in whole units.
    pub fn bytes(&self) -> usize {
        (held(self.shared.as_ref()) + held(self.small.as_ref())) * UNIT_BYTES
    }

    /// Releases what the lease covers beyond `bytes`.
    pub fn shrink(&mut self, bytes: usize) {
        let mut over = (self.bytes() / UNIT_BYTES).saturating_sub(bytes.div_ceil(UNIT_BYTES));
        self.count_freed(over * UNIT_BYTES);
        let before = self.bytes() / UNIT_BYTES;
        self.unshare(before, before - over);
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
    let units = u32::try_from(units).map_err(|_| BudgetExhausted::All)?;
    let permit = from.clone().try_acquire_many_owned(units).map_err(|_| BudgetExhausted::All)?;
    match into {
        Some(held) => held.merge(permit),
        none => *none = Some(permit),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn leases_share_one_budget_and_give_back() {
        let budget = BodyBudget::new(5 * UNIT_BYTES, 5 * UNIT_BYTES);
        let (mut first, mut second) = (budget.lease(), budget.lease());
        assert_eq!(first.cover(3 * UNIT_BYTES), Ok(()));
        assert_eq!(first.cover(2 * UNIT_BYTES), Ok(()), "never shrinks, never doubles");
        assert_eq!(second.cover(2 * UNIT_BYTES + 1), Err(BudgetExhausted::All));
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
        assert_eq!(
            more.cover(SMALL_BYTES_MAX + 1),
            Err(BudgetExhausted::All),
            "then it has to fit beside the large one"
        );
        assert_eq!(small.cover(SMALL_BYTES_MAX), Ok(()));
        assert_eq!(budget.lease().cover(1), Err(BudgetExhausted::All), "the part is bounded too");
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
        assert_eq!(second.cover(3 * UNIT_BYTES), Err(BudgetExhausted::All));
        assert_eq!(second.cover(2 * UNIT_BYTES), Ok(()));
        assert_eq!(budget.bytes_held(), 6 * UNIT_BYTES, "what was taken before counts on");
        drop((first, second));
        assert_eq!(budget.bytes_held(), 0);
    }

    fn asker(name: &str) -> Asker {
        Asker::new(name, None)
    }

    #[test]
    fn an_asker_holds_half_and_is_told_so() {
        let budget = BodyBudget::new(256 * UNIT_BYTES, 0);
        let (mut one, mut more) = (budget.lease_of(asker("a")), budget.lease_of(asker("a")));
        assert_eq!(one.cover(100 * UNIT_BYTES), Ok(()));
        assert_eq!(more.cover(28 * UNIT_BYTES), Ok(()));
        assert_eq!(more.cover(29 * UNIT_BYTES), Err(BudgetExhausted::Share));
        assert_eq!((more.bytes(), budget.bytes_held()), (28 * UNIT_BYTES, 128 * UNIT_BYTES), "nothing was changed");
        assert_eq!(budget.lease_of(asker("a")).cover(1), Err(BudgetExhausted::Share), "a small one neither");
        let mut other = budget.lease_of(asker("b"));
        assert_eq!(other.cover(96 * UNIT_BYTES), Ok(()), "all but the reserve is there for another");
        assert_eq!(other.cover(97 * UNIT_BYTES), Err(BudgetExhausted::All));
        assert_eq!(budget.lease_of(asker("c")).cover(SMALL_BYTES_MAX), Ok(()), "and the reserve");
        one.shrink(50 * UNIT_BYTES);
        assert_eq!(more.cover(78 * UNIT_BYTES), Ok(()), "what it gave back is its own again");
        drop((one, more, other));
        assert_eq!(budget.bytes_held(), 0);
        assert_eq!(budget.lease_of(asker("a")).cover(128 * UNIT_BYTES), Ok(()));
        assert!(shares(&budget).is_empty(), "nobody stays counted");
        assert_eq!(budget.lease().cover(200 * UNIT_BYTES), Ok(()), "nobody's has no share");
    }

    #[test]
    fn a_refused_lease_counts_for_nothing() {
        let budget = BodyBudget::new(256 * UNIT_BYTES, 0);
        let (mut nobodys, mut one) = (budget.lease(), budget.lease_of(asker("a")));
        assert_eq!(nobodys.cover(200 * UNIT_BYTES), Ok(()));
        assert_eq!(one.cover(100 * UNIT_BYTES), Err(BudgetExhausted::All));
        assert!(shares(&budget).is_empty());
        drop(nobodys);
        assert_eq!(one.cover(128 * UNIT_BYTES), Ok(()));
    }

    #[test]
    fn one_largest_body_of_an_asker_fits() {
        let budget = BodyBudget::new(5 * UNIT_BYTES, 4 * UNIT_BYTES + 1);
        let mut largest = budget.lease_of(asker("a"));
        assert_eq!(largest.cover(4 * UNIT_BYTES + 1), Ok(()));
        budget.resize(256 * UNIT_BYTES, 0);
        assert_eq!(
            budget.lease_of(asker("a")).cover(124 * UNIT_BYTES),
            Err(BudgetExhausted::Share),
            "what was taken before counts on"
        );
        assert_eq!(budget.lease_of(asker("a")).cover(123 * UNIT_BYTES), Ok(()));
    }

    #[test]
    fn what_can_be_covered_at_most_can_be_and_no_more() {
        let sizes = [(256, 0), (256, 128), (256, 200), (256, 256), (5, 5), (5, 0), (1, 1), (16, 8)];
        for (units, largest) in sizes {
            let budget = BodyBudget::new(units * UNIT_BYTES, largest * UNIT_BYTES);
            let (share, all) = (budget.share_bytes_max(), budget.lease_bytes_max());
            assert!(share <= all, "{units} {largest}");
            assert_eq!(budget.lease_of(asker("a")).cover(share), Ok(()), "{units} {largest}");
            assert_eq!(budget.lease_of(asker("a")).cover(share + 1), Err(BudgetExhausted::Share), "{units} {largest}");
            assert_eq!(budget.lease().cover(all), Ok(()), "{units} {largest}");
            assert_eq!(budget.lease().cover(all + 1), Err(BudgetExhausted::All), "{units} {largest}");
        }
        assert!(BodyBudget::unbounded().lease_bytes_max() > usize::MAX / 16, "none that a body reaches");
    }

    fn shares(budget: &BodyBudget) -> HashMap<Asker, usize> {
        budget.0.shares.0.lock().expect("no panic").clone()
    }

    /// Steps of some leases, each of one asker: it covers more, shrinks, or ends.
    fn steps() -> impl Strategy<Value = Vec<(usize, Option<usize>, usize)>> {
        let amount = prop_oneof![0..2 * SMALL_BYTES_MAX, 0..700_000_usize, Just(usize::MAX / 2)];
        prop::collection::vec((0..24_usize, prop::option::weighted(0.85, amount), 0..220_000_usize), 1..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 96, ..Default::default() })]

        /// Whatever the leases of one asker do, they never hold more than half, their share says what they hold, and
        /// another asker finds what is left beside the reserve for small bodies.
        #[test]
        fn one_asker_leaves_the_others_memory(steps in steps()) {
            const MAX: usize = 2 << 20;
            let budget = BodyBudget::new(MAX, 0);
            let mut leases: Vec<BodyLease> = (0..24).map(|_| budget.lease_of(asker("greedy"))).collect();
            let mut victims: Vec<BodyLease> = (0..3).map(|_| budget.lease_of(asker("other"))).collect();
            for (at, (who, amount, victim)) in steps.into_iter().enumerate() {
                match amount {
                    None => leases[who] = budget.lease_of(asker("greedy")),
                    Some(bytes) if bytes < leases[who].bytes() => leases[who].shrink(bytes),
                    Some(bytes) => _ = leases[who].cover(bytes),
                }
                let held: usize = leases.iter().map(BodyLease::bytes).sum();
                prop_assert!(held <= MAX / 2, "{} held by one asker", held);
                prop_assert_eq!(shares(&budget).get(&asker("greedy")).map_or(0, |units| units * UNIT_BYTES), held);
                victims[at % 3] = budget.lease_of(asker("other"));
                prop_assert_eq!(victims[at % 3].cover(victim), Ok(()));
                prop_assert!(budget.bytes_held() <= MAX);
            }
            drop((leases, victims));
            prop_assert_eq!(budget.bytes_held(), 0);
            prop_assert!(shares(&budget).is_empty());
        }
    }

    #[test]
    fn the_largest_body_always_fits_alone() {
        for largest in [1, 100 * UNIT_BYTES, 255 * UNIT_BYTES, 256 * UNIT_BYTES] {
            assert_eq!(BodyBudget::new(256 * UNIT_BYTES, largest).lease().cover(largest), Ok(()), "{largest}");
        }
    }
}
