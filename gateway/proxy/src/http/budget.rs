//! Memory for request bodies: one budget for the whole process, taken as bytes arrive and given back when the body is dropped.
//!
//! A sender that announces much and sends little holds little.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Granularity of the budget.
const UNIT_BYTES: usize = 4096;

/// The process-wide budget.
#[derive(Clone, Debug)]
pub struct BodyBudget {
    units: Arc<Semaphore>,
    units_max: usize,
}

/// Bytes taken from the budget; given back on drop.
#[derive(Debug)]
pub struct BodyLease {
    budget: BodyBudget,
    permit: Option<OwnedSemaphorePermit>,
    units: usize,
}

/// The budget is used up.
#[derive(Debug, PartialEq, Eq)]
pub struct BudgetExhausted;

impl BodyBudget {
    /// A budget of that many bytes.
    pub fn new(bytes_max: usize) -> Self {
        let units_max = bytes_max.div_ceil(UNIT_BYTES).min(Semaphore::MAX_PERMITS);
        Self { units: Arc::new(Semaphore::new(units_max)), units_max }
    }

    /// Nothing taken yet.
    pub fn lease(&self) -> BodyLease {
        BodyLease { budget: self.clone(), permit: None, units: 0 }
    }

    /// Bytes taken by all leases.
    pub fn bytes_held(&self) -> usize {
        self.units_max.saturating_sub(self.units.available_permits()) * UNIT_BYTES
    }
}

impl BodyLease {
    /// Makes the lease cover `bytes` in all.
    pub fn cover(&mut self, bytes: usize) -> Result<(), BudgetExhausted> {
        let units = bytes.div_ceil(UNIT_BYTES);
        let more = u32::try_from(units.saturating_sub(self.units)).map_err(|_| BudgetExhausted)?;
        if more == 0 {
            return Ok(());
        }
        let permit = self.budget.units.clone().try_acquire_many_owned(more).map_err(|_| BudgetExhausted)?;
        match &mut self.permit {
            Some(held) => held.merge(permit),
            none => *none = Some(permit),
        }
        self.units = units;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_share_one_budget_and_give_back() {
        let budget = BodyBudget::new(5 * UNIT_BYTES);
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
}
