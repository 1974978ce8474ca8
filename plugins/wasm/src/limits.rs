//! Bounds of a plugin's resources.

use std::time::Duration;

/// Bounds of a plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest module, in bytes.
    pub module_bytes_max: usize,
    /// Largest memory of one instance, in bytes.
    pub memory_bytes_max: usize,
    /// Instructions of one callback. Each byte of a body that it is shown adds to them.
    pub fuel: u64,
    /// Most instances that run side by side.
    pub instances: usize,
    /// Most requests of one instance at once.
    pub streams_max: usize,
    /// Largest body that a plugin may make, and the most of an answer that it may hold back, in bytes.
    pub body_bytes_max: usize,
    /// Longest time for which a plugin may have a request wait.
    pub pause: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // SDKs with a runtime of their own make modules of up to 10 MB.
            module_bytes_max: 16 << 20,
            memory_bytes_max: 16 << 20,
            // About 5 ms: a loop of additions takes 1.5 ms for ten million (`tests/all/cost.rs`), loads and calls more.
            fuel: 30_000_000,
            instances: 2,
            streams_max: 4096,
            body_bytes_max: 32 << 20,
            pause: Duration::from_secs(10),
        }
    }
}
