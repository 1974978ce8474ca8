//! Memory budget for held answers: one for the whole process, as there is one for request bodies.
//!
//! An answer that is passed on as it comes holds nothing and pays nothing. Charged are the bytes that stay: a whole
//! answer that is being read, an event that has not ended, the state of a translation, a copy for the store. A holder
//! that cannot get more memory fails as a request does that finds none: with a 503 before the head, as a broken stream
//! after it.
//!
//! The answers of one key hold at most half of the budget together (or one largest answer, where that is more); the rest is left to other keys.

use std::sync::LazyLock;
use std::time::Duration;

use penstock_proto::ErrorKind;

use penstock_base::asker::Asker;
use penstock_base::error::Failure;
use penstock_http::HttpLimits;
use penstock_http::budget::{BodyBudget, BodyLease, BudgetExhausted, SMALL_BYTES_MAX};

/// Bytes that one answer may hold: the collected text of a whole answer, the unsent bytes of a stream. Also the bound
/// of prompts that a plan may echo into the answer.
pub const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Uncharged bytes per holder: the cut event at the end of a piece, which nearly every piece has.
const FREE_BYTES: usize = 16 * 1024;
/// Interval between two attempts of a holder that waits for memory.
const LOOK: Duration = Duration::from_millis(50);

/// Memory budget of the process for held answers, and what each key's answers hold of it; clones share both.
#[derive(Clone, Debug)]
pub struct AnswerBudget {
    bytes: BodyBudget,
}

impl AnswerBudget {
    /// A budget of `bytes_max`.
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes: BodyBudget::new(bytes_max, ANSWER_BYTES_MAX) }
    }

    /// Changes the size for later charges.
    pub fn resize(&self, bytes_max: usize) {
        self.bytes.resize(bytes_max, ANSWER_BYTES_MAX);
    }

    /// Lease of no bytes, of no key.
    pub fn lease(&self) -> BodyLease {
        self.bytes.lease()
    }

    /// Bytes held by all answers at this moment.
    pub fn bytes_held(&self) -> usize {
        self.bytes.bytes_held()
    }
}

/// Handle of one key on the budget, with the largest sizes of events.
#[derive(Clone, Debug)]
pub struct AnswerMemory {
    budget: BodyBudget,
    /// The key; nobody where none is required, or the answers are nobody's.
    owner: Asker,
    event_bytes_max: usize,
    image_event_bytes_max: usize,
}

impl Default for AnswerMemory {
    /// A handle on a budget without a bound, for tests and callers that hold nothing.
    fn default() -> Self {
        static UNBOUNDED: LazyLock<AnswerBudget> = LazyLock::new(|| AnswerBudget::new(usize::MAX));
        Self::new(&UNBOUNDED, "", &HttpLimits::default())
    }
}

impl AnswerMemory {
    /// Handle on `budget` for the answers of `key` (empty: no key is required), with the event sizes of `limits`.
    pub fn new(budget: &AnswerBudget, key: &str, limits: &HttpLimits) -> Self {
        let HttpLimits { event_bytes_max, image_event_bytes_max, .. } = *limits;
        let (budget, owner) = (budget.bytes.clone(), Asker::new(key, None));
        Self { budget, owner, event_bytes_max, image_event_bytes_max }
    }

    /// New holder on this budget, with nothing charged to it yet.
    pub fn hold(&self) -> Hold {
        Hold { lease: self.budget.lease_of(self.owner) }
    }

    /// Most bytes that the holders of the key can be charged for together; a handle of no key has no such bound.
    pub fn share_bytes_max(&self) -> usize {
        self.budget.share_bytes_max()
    }

    /// Most bytes that a holder of no key can be charged for while there is no other.
    pub fn hold_bytes_max(&self) -> usize {
        self.budget.lease_bytes_max()
    }

    /// Largest event of a stream, in bytes; `images`: for streams whose events can carry images.
    pub fn event_bytes_max(&self, images: bool) -> usize {
        if images { self.image_event_bytes_max } else { self.event_bytes_max }
    }
}

/// Bytes of the answer memory charged to one holder; given back on drop.
#[derive(Debug)]
pub struct Hold {
    lease: BodyLease,
}

impl Hold {
    /// Charges the holder for `bytes` in total, instead of what it was charged before. Cheap while `bytes` is small or
    /// hardly changes: a charge shrinks only when less than half of it is left.
    ///
    /// # Errors
    /// 503 when the budget is used up, or the key's half of it.
    pub fn cover(&mut self, bytes: usize) -> Result<(), Failure> {
        let covered = self.lease.bytes();
        if bytes > covered && bytes > FREE_BYTES {
            return self.lease.cover(bytes).map_err(exhausted);
        }
        if covered > SMALL_BYTES_MAX && bytes < covered / 2 {
            self.lease.shrink(if bytes > FREE_BYTES { bytes } else { 0 });
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

fn exhausted(why: BudgetExhausted) -> Failure {
    let what = match why {
        BudgetExhausted::All => "The memory for answers is used up",
        BudgetExhausted::Share => "Answers of this key hold its whole share of the memory for answers",
    };
    let message = format!("{what}: too many large ones are in progress.");
    Failure::new(ErrorKind::Overloaded, message).retry_after(Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Budget with an eighth for small answers, which a real one has whatever the size of the largest.
    fn budget(bytes_max: usize) -> AnswerBudget {
        AnswerBudget { bytes: BodyBudget::new(bytes_max, 0) }
    }

    fn memory(bytes_max: usize) -> (AnswerBudget, AnswerMemory) {
        let budget = budget(bytes_max);
        let memory = AnswerMemory::new(&budget, "", &HttpLimits::default());
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

        /// Whatever the answers of one key do, those of another find memory, up to what is left of the other half beside the
        /// reserve for small ones; and nothing stays counted for a key.
        #[test]
        fn one_key_leaves_the_others_memory(steps in steps(), victim in prop::collection::vec(0..220_000_usize, 200)) {
            const MAX: usize = 2 << 20;
            let budget = budget(MAX);
            let limits = HttpLimits::default();
            let (greedy, other) = (AnswerMemory::new(&budget, "greedy", &limits), AnswerMemory::new(&budget, "other", &limits));
            let mut holders: Vec<Hold> = (0..24).map(|_| greedy.hold()).collect();
            let mut victims: Vec<Hold> = (0..3).map(|_| other.hold()).collect();
            for (at, (who, amount)) in steps.into_iter().enumerate() {
                match amount {
                    Some(bytes) if holders[who].cover(bytes).is_ok() => {}
                    _ => holders[who] = greedy.hold(),
                }
                let held: usize = holders.iter().map(|hold| hold.lease.bytes()).sum();
                prop_assert!(held <= MAX / 2, "{} held by one key", held);
                victims[at % 3] = other.hold();
                let asked = victim[at];
                prop_assert!(victims[at % 3].cover(asked).is_ok(), "{} bytes of another key", asked);
            }
            drop((holders, victims));
            prop_assert_eq!(budget.bytes_held(), 0);
        }
    }

    #[test]
    fn one_largest_answer_of_a_key_fits_the_smallest_budget() {
        let budget = AnswerBudget::new(ANSWER_BYTES_MAX);
        let memory = AnswerMemory::new(&budget, "one", &HttpLimits::default());
        let mut largest = memory.hold();
        assert!(largest.cover(ANSWER_BYTES_MAX).is_ok());
        assert!(memory.hold().cover(FREE_BYTES + 1).is_err());
    }

    #[test]
    fn a_key_that_has_its_half_is_told_so_and_gets_more_when_some_is_given_back() {
        let budget = budget(1 << 20);
        let memory = AnswerMemory::new(&budget, "one", &HttpLimits::default());
        let mut holds: Vec<Hold> = (0..2).map(|_| memory.hold()).collect();
        assert!(holds[0].cover(300_000).is_ok() && holds[1].cover(200_000).is_ok());
        let refused = holds[1].cover(400_000).expect_err("more than half");
        assert!(refused.message.contains("of this key"), "{}", refused.message);
        let other = AnswerMemory::new(&budget, "two", &HttpLimits::default());
        assert!(other.hold().cover(300_000).is_ok(), "another key");
        assert!(AnswerMemory::new(&budget, "", &HttpLimits::default()).hold().cover(300_000).is_ok(), "nobody's");
        assert!(holds[0].cover(1000).is_ok() && holds[1].cover(400_000).is_ok(), "it shrank");
        holds.remove(1);
        assert!(memory.hold().cover(500_000).is_ok());
    }
}
