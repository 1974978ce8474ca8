//! Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
//!
//! A random number is a pure function of (seed, choice, position, draw). No state moves along with a sequence, so a token
//! drawn again after preemption, on another worker or in another batch is the same token.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Four random words of `counter` under `key`.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for round in 0..ROUNDS {
        if round > 0 {
            k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
        }
        let a = u64::from(MULTIPLIERS[0]) * u64::from(c[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(c[2]);
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
    }
    c
}

/// Index of a random number: the request's seed, the choice, the index of the token in the output, and the draw for
/// that token.
///
/// The seed fills the 64-bit key; choice, position and draw are words of the counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// Seed of the request: the 64-bit key of the generator.
    pub seed: u64,
    /// Index of the choice within its request, from 0.
    pub choice: u32,
    /// Index of the token in the output.
    pub position: u32,
    /// Number of the draw for this token, from 0.
    pub draw: u32,
}

impl Draw {
    /// Uniform random number in [0, 1), 53 bits.
    pub fn uniform(self) -> f64 {
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let [high, low, ..] = philox4x32([self.position, self.draw, self.choice, 0], key);
        let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
        bits as f64 * (1.0 / (1_u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution (`kat_vectors`, philox4x32 10).
    #[test]
    fn known_answers() {
        let check = |counter, key, out| assert_eq!(philox4x32(counter, key), out);
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn each_coordinate_changes_the_number() {
        let base = Draw { seed: 1, choice: 2, position: 3, draw: 4 };
        let others = [
            Draw { seed: 1 << 40, ..base },
            Draw { choice: 0, ..base },
            Draw { position: 0, ..base },
            Draw { draw: 0, ..base },
        ];
        for other in others {
            assert_ne!(base.uniform(), other.uniform());
        }
    }

    #[test]
    fn uniform_in_mean_and_variance() {
        let draws: Vec<f64> =
            (0..20_000).map(|position| Draw { seed: 9, choice: 0, position, draw: 0 }.uniform()).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|u| (u - mean).powi(2)).sum::<f64>() / draws.len() as f64;
        assert!((mean - 0.5).abs() < 0.01 && (variance - 1.0 / 12.0).abs() < 0.003, "{mean} {variance}");
        assert!(draws.iter().all(|u| (0.0..1.0).contains(u)));
    }
}
