//! Counters of reloads, and version and age of the config in force, for `/metrics`.

use std::sync::atomic::{AtomicU64, Ordering};

use penstock_telemetry::Gauge;

/// Outcome of one reload of the config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The reload put another config in force.
    Applied,
    /// The reload found the config that is in force already.
    Unchanged,
    /// The reload was refused and changed nothing.
    Refused,
}

const OUTCOMES: [(Outcome, &str); 3] =
    [(Outcome::Applied, "applied"), (Outcome::Unchanged, "unchanged"), (Outcome::Refused, "refused")];

/// Counters of reloads, and version and time of the config in force.
#[derive(Debug, Default)]
pub struct Marks {
    version: AtomicU64,
    in_force_since: AtomicU64,
    /// 1 while the file could not be read, or its text was refused, and no good one has come since.
    file_bad: AtomicU64,
    last_at: AtomicU64,
    pending: AtomicU64,
    counts: [AtomicU64; OUTCOMES.len()],
}

impl Marks {
    pub(super) fn begin(&self, version: u64, now: u64) {
        self.version.store(version, Ordering::Relaxed);
        self.in_force_since.store(now, Ordering::Relaxed);
    }

    /// Version of the config in force.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    pub(super) fn done(&self, outcome: Outcome, version: u64, pending: usize, now: u64) {
        if self.version.swap(version, Ordering::Relaxed) != version {
            self.in_force_since.store(now, Ordering::Relaxed);
        }
        self.pending.store(pending as u64, Ordering::Relaxed);
        self.count(outcome, now);
    }

    pub(super) fn refused(&self, now: u64) {
        self.count(Outcome::Refused, now);
    }

    /// Notes whether a restart could begin with the file, as it was read last. What an admin applies says nothing about it, unless it is the
    /// file's text then.
    pub(super) fn file(&self, is_good: bool) {
        self.file_bad.store(u64::from(!is_good), Ordering::Relaxed);
    }

    fn count(&self, outcome: Outcome, now: u64) {
        self.counts[outcome as usize].fetch_add(1, Ordering::Relaxed);
        self.last_at.store(now, Ordering::Relaxed);
    }

    /// Adds the gauges of the config and its reloads for `/metrics`.
    pub(crate) fn gauges(&self, out: &mut Vec<(Gauge, String, f64)>) {
        let read = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let mut one = |gauge, value: u64| out.push((gauge, String::new(), value as f64));
        one(Gauge::ConfigVersion, read(&self.version));
        one(Gauge::ConfigSince, read(&self.in_force_since));
        one(Gauge::ConfigLastReloadOk, 1 - read(&self.file_bad));
        one(Gauge::ConfigLastReload, read(&self.last_at));
        one(Gauge::ConfigPending, read(&self.pending));
        for (outcome, name) in OUTCOMES {
            out.push((Gauge::ConfigReloads, name.into(), read(&self.counts[outcome as usize]) as f64));
        }
    }
}
