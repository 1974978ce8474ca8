//! Random numbers of the simulation: SplitMix64 (Steele et al. 2014). Not the engine's generator, which the test must
//! not share.

/// Stream of random numbers from a seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

/// One mixing step: a well-spread 64-bit hash of `x`.
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Random {
    /// Creates the stream of random numbers of one seed.
    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// Next 64 random bits of the stream.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Uniform integer in `low..=high`; its modulo bias is negligible.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + (self.bits() % (high - low + 1) as u64) as usize
    }

    /// True with probability 1/`n`.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.between(1, n) == 1
    }

    /// One of the values, picked at random.
    pub fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.between(0, values.len() - 1)]
    }
}
