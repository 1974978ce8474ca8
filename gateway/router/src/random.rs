//! Random numbers from a seed (SplitMix64): a replay draws the same ones again.

/// Stream of random numbers, determined by the seed.
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// A stream of random numbers from this seed; equal seeds give equal streams.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Next 64 random bits of the stream.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform integer from 0 to `limit` − 1; 0 if `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// Uniform number from 0 to 1, 1 excluded.
    pub fn share(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Standard normal number: mean 0, deviation 1 (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let (a, b) = (1.0 - self.share(), self.share());
        (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }
}
