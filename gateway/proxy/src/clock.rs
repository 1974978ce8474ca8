//! The wall clock, read nowhere else: for time stamps that people and templates see. Deadlines use `Instant`, which never jumps.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Since 1970; zero on a machine whose clock is before that.
pub(crate) fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Unix seconds.
pub(crate) fn unix_seconds() -> u64 {
    since_epoch().as_secs()
}
