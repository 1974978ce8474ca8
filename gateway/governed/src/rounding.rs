//! Costs of ledger entries in whole millionths of a dollar, whose sums are right although one request may cost less than one.
//!
//! A cost is rounded up, and what that adds is taken off the next cost of the same subject on the same day. The sum over any
//! days and dimensions is then never below the cost, and above it by less than a millionth for each subject and day.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, PoisonError};

use penstock_store::{OpenEntry, Subject};

/// Nano-dollars per millionth of a dollar.
const NANO_PER_MICRO: u64 = 1000;
/// Seconds of a day.
const DAY: u64 = 86_400;
/// Most subjects that are remembered; all are forgotten when it is reached, and their next costs are rounded up anew.
const SUBJECTS_MAX: usize = 8192;

/// Nano-dollars that entries have in excess, by the hash of their subject and day.
#[derive(Debug, Default)]
pub(super) struct Rounding {
    excess: Mutex<HashMap<u64, u64>>,
    hasher: RandomState,
}

impl Rounding {
    /// Cost in millionths of a dollar for the ledger entry of a request that has cost `nano_usd`.
    pub(super) fn micro_usd(&self, opened: &OpenEntry, nano_usd: u64) -> u64 {
        if nano_usd == 0 {
            return 0;
        }
        let Subject { key, team, user, model, provider, route, tags } = &*opened.subject;
        let hash = self.hasher.hash_one((opened.at / DAY, key, team, user, model, provider, route, tags));
        let mut excess = self.excess.lock().unwrap_or_else(PoisonError::into_inner);
        if excess.len() >= SUBJECTS_MAX && !excess.contains_key(&hash) {
            excess.clear();
        }
        let excess = match excess.entry(hash) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(0),
        };
        let micro_usd = nano_usd.saturating_sub(*excess).div_ceil(NANO_PER_MICRO);
        *excess = micro_usd.saturating_mul(NANO_PER_MICRO).saturating_add(*excess).saturating_sub(nano_usd);
        micro_usd
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn entry(key: &str, at: u64) -> OpenEntry {
        OpenEntry { at, subject: Arc::new(Subject { key: key.into(), ..Subject::default() }), ..OpenEntry::default() }
    }

    #[test]
    fn sums_are_right_to_a_millionth() {
        let rounding = Rounding::default();
        for nano in [200, 999, 1000, 1001, 3, 123_456] {
            let (entry, mut sum) = (entry(&nano.to_string(), 7), 0);
            for count in 1..=500 {
                sum += rounding.micro_usd(&entry, nano);
                let cost = nano * count;
                assert!((cost..cost + NANO_PER_MICRO).contains(&(sum * NANO_PER_MICRO)), "{count} of {nano}: {sum}");
            }
        }
    }

    #[test]
    fn each_subject_and_day_is_rounded_up_for_itself() {
        let rounding = Rounding::default();
        let of = |key: &str, at: u64| rounding.micro_usd(&entry(key, at), 200);
        assert_eq!([of("a", 0), of("b", 0), of("a", DAY - 1), of("a", DAY), of("b", 1)], [1, 1, 0, 1, 0]);
        assert_eq!(rounding.micro_usd(&entry("c", 0), 0), 0);
    }

    #[test]
    fn subjects_are_bounded() {
        let rounding = Rounding::default();
        (0..3 * SUBJECTS_MAX).for_each(|key| assert_eq!(rounding.micro_usd(&entry(&key.to_string(), 0), 200), 1));
        assert!(rounding.excess.lock().expect("no panic").len() <= SUBJECTS_MAX);
    }
}
