//! Hashes that are equal in every process and release, for choices that gateways must make alike.

/// Hash that is equal in every process: FNV-1a, finished by [`mix`].
pub fn stable(bytes: &[u8]) -> u64 {
    mix(bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)))
}

/// Finalizer of SplitMix64: spreads every input bit over all 64 output bits.
pub fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
