//! Choice between loading a block and computing it again, by seconds that the worker itself has measured.
//!
//! A tier is asked for a run of blocks only when loading them is expected to take less time than computing them. An
//! unmeasured tier is tried. A tier that was once found too slow would never be measured again, so its estimate
//! shrinks with every refusal.

/// Weight of the past at each measured load.
const FADE: f64 = 0.8;

/// Factor by which a refusal shrinks an estimate.
const FORGET: f64 = 0.97;

/// Measured load time of a tier per block.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadTime {
    seconds: f64,
}

impl LoadTime {
    /// Estimated seconds to load one block; 0 until measured.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Adds a measurement: `blocks` blocks were loaded in `seconds`.
    pub fn measured(&mut self, blocks: usize, seconds: f64) {
        if blocks == 0 || !seconds.is_finite() || seconds < 0.0 {
            return;
        }
        let one = seconds / blocks as f64;
        self.seconds = if self.seconds > 0.0 { self.seconds * FADE + one * (1.0 - FADE) } else { one };
    }

    /// Records that blocks of the tier were computed again instead of loaded.
    pub fn refused(&mut self) {
        self.seconds *= FORGET;
    }
}

/// Number of blocks worth loading, from the first one of a prefix that is not on the device. `loads`: seconds to load
/// each, in order; `recompute`: seconds to compute one; 0 means unknown in both. `hidden`: seconds that the request
/// waits anyway.
///
/// A part of the run may pay when the whole does not, and a block is useless without those before it: the result is
/// the length with the largest gain.
pub fn worth_loading(loads: &[f64], recompute: f64, hidden: f64) -> usize {
    if recompute <= 0.0 {
        return loads.len();
    }
    let (mut best, mut best_gain, mut load) = (0, 0.0, 0.0);
    for (block, seconds) in loads.iter().enumerate() {
        load += seconds;
        let gain = recompute * (block + 1) as f64 - (load - hidden).max(0.0);
        if gain > best_gain {
            (best, best_gain) = (block + 1, gain);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheaper_way_is_taken() {
        let check = |loads: &[f64], recompute, hidden, expected| {
            assert_eq!(worth_loading(loads, recompute, hidden), expected, "{loads:?} {recompute} {hidden}");
        };
        check(&[0.001; 4], 0.01, 0.0, 4);
        check(&[0.1; 4], 0.01, 0.0, 0);
        // Two fast blocks of a disk, then a slow store.
        check(&[0.001, 0.001, 0.5, 0.5], 0.01, 0.0, 2);
        // A slow block in front pays when many fast ones follow.
        check(&[0.05, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001], 0.01, 0.0, 7);
        // Loads behind a queue cost nothing.
        check(&[0.1; 4], 0.01, 1.0, 4);
        // Unmeasured tiers are tried.
        check(&[0.0; 4], 0.01, 0.0, 4);
        check(&[9.0; 4], 0.0, 0.0, 4);
        check(&[], 0.01, 0.0, 0);
    }

    #[test]
    fn a_slow_tier_gets_another_chance() {
        let mut time = LoadTime::default();
        time.measured(1, f64::NAN);
        assert_eq!(time.seconds(), 0.0);
        time.measured(2, 2.0);
        let mut refusals = 0;
        while worth_loading(&[time.seconds()], 0.01, 0.0) == 0 {
            time.refused();
            refusals += 1;
        }
        assert!((100..300).contains(&refusals), "{refusals}");
    }
}
