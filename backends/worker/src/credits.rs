//! Division of a worker's credits among the gateways that it serves.
//!
//! Each gateway binds as many requests as it is granted; with the same number, two gateways bind twice as many, and
//! the excess waits at the worker, where no gateway can send it elsewhere. So the grants are divided by the number of
//! requests waiting at each gateway, as reported with its last request. A gateway without waiting requests may have
//! one the next moment and is granted an equal share, at least one. A share of less than one is granted in some states and not in others: an
//! idle engine, which makes none, reports its state at each tick while a gateway was granted nothing.

use penstock_proto::frames::EngineState;
use std::time::Duration;

/// Time for which a gateway's report of its waiting requests is valid.
pub(crate) const WAITING_TTL: Duration = Duration::from_secs(2);
/// Fraction of the golden ratio: multiples of it are spread evenly.
const GOLDEN: f64 = 0.618_033_988_749_894_9;

/// Tolerance within which a sum of shares counts as whole.
const ROUNDING: f64 = 1e-9;

/// Divides `state` among sessions: one state for each entry of `waiting`, in order. `round` counts states: remainders
/// rotate with it.
pub(crate) fn divided(state: &EngineState, waiting: &[u32], round: u64) -> Vec<EngineState> {
    let credits = split(state.credits, waiting, round);
    let rows = split(state.prefill_rows_free, waiting, round);
    let states = credits.into_iter().zip(rows).map(|(credits, rows)| {
        // Zero rows on the wire would mean "unknown".
        let prefill_rows_free = if state.prefill_rows_free > 0 { rows.max(1) } else { 0 };
        EngineState { credits, prefill_rows_free, ..state.clone() }
    });
    states.collect()
}

fn split(all: u32, waiting: &[u32], round: u64) -> Vec<u32> {
    if waiting.len() <= 1 {
        return vec![all; waiting.len()];
    }
    let sum: f64 = waiting.iter().map(|waiting| f64::from(*waiting)).sum();
    let equal = all.div_ceil(waiting.len() as u32);
    // Systematic sampling: each session gets its share rounded down or up, in the long run its exact share, and all
    // together the whole.
    let start = (round as f64 * GOLDEN).fract();
    let mut reached = start;
    let parts = waiting.iter().map(|waiting| {
        if *waiting == 0 {
            return equal;
        }
        let before = (reached + ROUNDING).floor();
        reached += f64::from(all) * f64::from(*waiting) / sum;
        ((reached + ROUNDING).floor() - before) as u32
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_gateway_has_all() {
        assert_eq!((split(7, &[0], 3), split(7, &[9], 4)), (vec![7], vec![7]));
        assert!(split(7, &[], 0).is_empty());
    }

    #[test]
    fn what_is_granted_to_those_that_wait_is_what_there_is() {
        for waiting in [vec![1, 1], vec![3, 1], vec![5, 0, 2], vec![1; 7], vec![u32::MAX, 1, u32::MAX]] {
            for all in [0, 1, 2, 7, 256] {
                let mut sums = vec![0u64; waiting.len()];
                for round in 0..1000 {
                    let parts = split(all, &waiting, round);
                    let granted: u32 = parts.iter().zip(&waiting).filter(|(_, w)| **w > 0).map(|(part, _)| part).sum();
                    assert_eq!(granted, all, "{waiting:?}");
                    sums.iter_mut().zip(&parts).for_each(|(sum, part)| *sum += u64::from(*part));
                }
                let total: f64 = waiting.iter().map(|waiting| f64::from(*waiting)).sum();
                for (sum, waiting) in sums.iter().zip(&waiting).filter(|(_, waiting)| **waiting > 0) {
                    let share = f64::from(all) * 1000.0 * f64::from(*waiting) / total;
                    assert!((*sum as f64 - share).abs() <= 4.0, "{sum} of {share}, {all} for {waiting}");
                }
            }
        }
    }

    #[test]
    fn who_has_nothing_waiting_may_still_come() {
        assert_eq!(split(1, &[40, 0, 0], 5), [1, 1, 1]);
        assert_eq!(split(8, &[0, 0], 5), [4, 4]);
        assert_eq!(split(0, &[40, 0], 5), [0, 0]);
    }

    #[test]
    fn rows_that_are_free_are_never_said_to_be_unknown() {
        let state = EngineState { credits: 1, prefill_rows_free: 1, ..EngineState::default() };
        assert!(divided(&state, &[1, 1], 0).iter().all(|state| state.prefill_rows_free == 1));
        let silent = EngineState { credits: 1, ..EngineState::default() };
        assert!(divided(&silent, &[1, 1], 0).iter().all(|state| state.prefill_rows_free == 0));
    }
}
