//! Memory budget for held answers: one for the whole process, as there is one for request bodies.
//!
//! An answer that is passed on as it comes holds nothing and pays nothing. Charged are the bytes that stay: a whole
//! answer that is being read, an event that has not ended, the state of a translation, a copy for the store. A holder
//! that cannot get more memory fails as a request does that finds none: with a 503 before the head, as a broken stream
//! after it.

use std::sync::LazyLock;
use std::time::Duration;

use penstock_proto::ErrorKind;

use penstock_base::error::Failure;
use penstock_http::HttpLimits;
use penstock_http::budget::{BodyBudget, BodyLease, SMALL_BYTES_MAX};

/// Bytes that one answer may hold: the collected text of a whole answer, the unsent bytes of a stream. Also the bound
/// of prompts that a plan may echo into the answer.
pub const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Uncharged bytes per holder: the cut event at the end of a piece, which nearly every piece has.
const FREE_BYTES: usize = 16 * 1024;
/// Interval between two attempts of a holder that waits for memory.
const LOOK: Duration = Duration::from_millis(50);

/// Handle on the budget, with the largest sizes of events.
#[derive(Clone, Debug)]
pub struct AnswerMemory {
    budget: BodyBudget,
    event_bytes_max: usize,
    image_event_bytes_max: usize,
}

impl Default for AnswerMemory {
    /// A handle on a budget without a bound, for tests and callers that hold nothing.
    fn default() -> Self {
        static UNBOUNDED: LazyLock<BodyBudget> = LazyLock::new(BodyBudget::unbounded);
        Self::new(&UNBOUNDED, &HttpLimits::default())
    }
}

impl AnswerMemory {
    /// Handle on `budget`, with the event sizes of `limits`.
    pub fn new(budget: &BodyBudget, limits: &HttpLimits) -> Self {
        let HttpLimits { event_bytes_max, image_event_bytes_max, .. } = *limits;
        Self { budget: budget.clone(), event_bytes_max, image_event_bytes_max }
    }

    /// New holder on this budget, with nothing charged to it yet.
    pub fn hold(&self) -> Hold {
        Hold(self.budget.lease())
    }

    /// Largest event of a stream, in bytes; `images`: for streams whose events can carry images.
    pub fn event_bytes_max(&self, images: bool) -> usize {
        if images { self.image_event_bytes_max } else { self.event_bytes_max }
    }
}

/// Bytes of the answer memory charged to one holder; given back on drop.
#[derive(Debug)]
pub struct Hold(BodyLease);

impl Hold {
    /// Charges the holder for `bytes` in total, instead of what it was charged before. Cheap while `bytes` is small or
    /// hardly changes: a charge shrinks only when less than half of it is left.
    ///
    /// # Errors
    /// 503 when the budget is used up.
    pub fn cover(&mut self, bytes: usize) -> Result<(), Failure> {
        let covered = self.0.bytes();
        if bytes > covered && bytes > FREE_BYTES {
            return self.0.cover(bytes).map_err(|_| exhausted());
        }
        if covered > SMALL_BYTES_MAX && bytes < covered / 2 {
            self.0.shrink(bytes);
        }
        Ok(())
    }

    /// Charges like [`Self::cover`], but polls until there is memory: for answers that no client waits for.
    /// Cancel-safe.
    pub async fn wait(&mut self, bytes: usize) {
        while self.cover(bytes).is_err() {
            tokio::time::sleep(LOOK).await;
        }
    }
}

fn exhausted() -> Failure {
    let message = "The memory for answers is used up: too many large ones are in progress. Try again shortly.";
    Failure::new(ErrorKind::Overloaded, message).retry_after(Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn memory(bytes_max: usize) -> (BodyBudget, AnswerMemory) {
        let budget = BodyBudget::new(bytes_max, 0);
        let memory = AnswerMemory::new(&budget, &HttpLimits::default());
        (budget, memory)
    }

    #[test]
    fn what_passes_through_pays_nothing() {
        let (budget, memory) = memory(1 << 20);
        let mut hold = memory.hold();
        for bytes in [0, 100, FREE_BYTES, 7] {
            assert!(hold.cover(bytes).is_ok());
            assert_eq!(budget.bytes_held(), 0);
        }
        assert!(hold.cover(FREE_BYTES + 1).is_ok());
        let held = budget.bytes_held();
        assert!(held > FREE_BYTES, "{held}");
        assert!(hold.cover(100).is_ok());
        assert_eq!(budget.bytes_held(), held, "a little is kept, so that the next piece does not ask again");
        assert!(hold.cover(500_000).is_ok() && hold.cover(1).is_ok());
        assert!(budget.bytes_held() <= FREE_BYTES, "and much is not");
    }

    /// Steps of some holders, as a hostile upstream or many clients cause them: each holds another amount at each step,
    /// or ends.
    fn steps() -> impl Strategy<Value = Vec<(usize, Option<usize>)>> {
        let amount = prop_oneof![0..40_000_usize, 0..700_000_usize, Just(usize::MAX / 2)];
        prop::collection::vec((0..24_usize, prop::option::weighted(0.85, amount)), 1..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 96, ..Default::default() })]

        /// The sum of the charges never passes the budget, and all of it comes back, whatever the holders do.
        #[test]
        fn what_is_held_never_passes_the_budget(steps in steps()) {
            const MAX: usize = 2 << 20;
            let (budget, memory) = memory(MAX);
            let mut holders: Vec<(Hold, usize)> = (0..24).map(|_| (memory.hold(), 0)).collect();
            for (who, amount) in steps {
                match amount {
                    None => holders[who] = (memory.hold(), 0),
                    Some(bytes) => match holders[who].0.cover(bytes) {
                        Ok(()) => holders[who].1 = bytes,
                        // The holder ends: its charge is dropped with it.
                        Err(failure) => {
                            prop_assert_eq!(failure.status(), 503);
                            prop_assert!(failure.retry_after.is_some());
                            holders[who] = (memory.hold(), 0);
                        }
                    },
                }
                let charged: usize = holders.iter().map(|(_, held)| *held).filter(|held| *held > FREE_BYTES).sum();
                prop_assert!(charged <= budget.bytes_held(), "{} held, {} charged", charged, budget.bytes_held());
                prop_assert!(budget.bytes_held() <= MAX);
            }
            drop(holders);
            prop_assert_eq!(budget.bytes_held(), 0);
        }
    }
}
