//! A KV tier below the device: the plan of its slots, the medium that holds the bytes, its counters, and its health.
//!
//! A disk that fails again and again is switched off, and tried again after a pause that doubles. A server rests by itself
//! (`remote`).

use super::disk::Found;
use super::io::{Failure, Io};
use penstock_kv::load::LoadTime;
use penstock_kv::tier::Link;
use penstock_kv::{Placed, SlotId, TierPool};
use penstock_proto::BlockHash;
use penstock_proto::frames::{KvEvent, Tier, TierState};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Failures in a row after which a disk is switched off for a while.
const DISK_FAILURES_MAX: u32 = 3;

/// First and longest pause before a disk that was switched off is tried again; doubles until a block was read or
/// written.
pub(super) const REVIVE_FIRST: Duration = Duration::from_secs(5);
const REVIVE_LAST: Duration = Duration::from_secs(300);

/// Medium that holds the bytes of a tier's blocks.
pub(crate) enum Medium {
    /// Host memory, with the bytes of one block per slot.
    Memory(Vec<Vec<u8>>),
    /// Files or a server, written and read by I/O threads of their own.
    Store(Io),
}

/// KV tier: its plan of slots, the medium with the bytes, and its health.
pub(crate) struct Level {
    pub(super) plan: TierPool,
    pub(super) medium: Medium,
    pub(super) time: LoadTime,
    pub(super) state: TierState,
    pub(super) writes_waiting: usize,
    failures: u32,
    /// Number of unanswered loads and queries.
    pub(super) reads: usize,
    pub(super) finds: usize,
    /// Start of the current silence, if there are unanswered jobs.
    pub(super) silent_since: Instant,
    /// Set while the tier is off after a failure.
    pub(super) off: Option<Off>,
    /// Last pause before the tier was tried again.
    pause: Duration,
    /// Unreported changes of a plan that has been replaced.
    pub(super) events: Vec<KvEvent>,
    /// Unreported switches: off with the reason, or on.
    pub(super) changes: Vec<Option<String>>,
}

/// State of a tier that is off.
#[derive(Clone, Copy)]
pub(super) struct Off {
    /// Time of the next attempt to open the store again.
    pub(super) until: Instant,
    /// True if an attempt to open the store is in progress.
    pub(super) is_asked: bool,
}

/// Report of a tier that was switched off or on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) tier: Tier,
    /// Reason why the tier is off; `None` if it is on again.
    pub(crate) off: Option<String>,
}

impl Level {
    pub(crate) fn new(plan: TierPool, medium: Medium) -> Self {
        let state = TierState { tier: plan.tier() as i32, ..Default::default() };
        Self {
            plan,
            medium,
            time: LoadTime::default(),
            state,
            writes_waiting: 0,
            failures: 0,
            reads: 0,
            finds: 0,
            silent_since: Instant::now(),
            off: None,
            pause: Duration::ZERO,
            events: Vec::new(),
            changes: Vec::new(),
        }
    }

    /// Creates a tier that could not be opened, and is tried again.
    pub(crate) fn off(tier: Tier, medium: Medium, why: String) -> Self {
        let mut level = Self::new(TierPool::new(tier, 0), medium);
        level.rest(Instant::now());
        level.changes.push(Some(why));
        level
    }

    /// Switches the tier off for a while, longer each time.
    fn rest(&mut self, now: Instant) {
        self.pause = (self.pause * 2).clamp(REVIVE_FIRST, REVIVE_LAST);
        self.off = Some(Off { until: now + self.pause, is_asked: false });
    }

    /// Records that the store has read or written a block: its failures and pause begin anew.
    fn worked(&mut self) {
        (self.failures, self.pause) = (0, Duration::ZERO);
    }

    /// Handles the result of opening the tier again.
    pub(super) fn revived(&mut self, result: Result<(usize, Vec<Found>), String>, now: Instant) {
        let (slots, found) = match result {
            Ok(opened) => opened,
            Err(why) => {
                self.rest(now);
                let retry_in_s = self.pause.as_secs();
                info!(tier = self.plan.tier().name(), why, retry_in_s, "a KV tier could not be reopened");
                return;
            }
        };
        self.events.extend(self.plan.take_events());
        self.plan = TierPool::new(self.plan.tier(), slots);
        let blocks = self.plan.adopt(found);
        info!(tier = self.plan.tier().name(), slots, blocks, "a KV tier was reopened");
        (self.off, self.failures) = (None, 0);
        self.changes.push(None);
    }

    /// Duration of the tier's silence, while jobs are unanswered.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        let is_asked = self.reads + self.finds > 0;
        if is_asked { now.saturating_duration_since(self.silent_since) } else { Duration::ZERO }
    }

    /// Starts the silence clock before a job, if none is pending.
    pub(super) fn asked(&mut self, now: Instant) {
        if self.reads + self.finds == 0 {
            self.silent_since = now;
        }
    }

    /// Size, use and speed of the tier.
    pub(super) fn state(&self) -> TierState {
        TierState {
            blocks_total: self.plan.total() as u64,
            blocks_used: self.plan.used() as u64,
            load_seconds_per_block: self.time.seconds(),
            ..self.state
        }
    }

    /// Handles the result of a write: the block is there, or the plan loses its slot.
    pub(super) fn written(&mut self, slot: SlotId, result: Result<(), Failure>, slots: usize, now: Instant) {
        self.writes_waiting -= 1;
        match result {
            Ok(()) => {
                self.plan.stored(slot);
                self.state.stored += 1;
                self.worked();
            }
            Err(failure) => {
                self.plan.lost(slot);
                self.state.dropped += 1;
                let shrinks = self.plan.total() > slots;
                // Of several writes that wanted another file, the first has lowered the capacity.
                if failure == Failure::Full && slots > 0 && (shrinks || slot.index() >= slots) {
                    if shrinks {
                        warn!(blocks = slots, "the disk is full: the KV tier stops growing");
                    }
                    self.plan.cap(slots);
                } else {
                    self.failed(now);
                }
            }
        }
    }

    /// Handles the result of a load: the block's bytes, if they came and are those of its name.
    pub(super) fn read(
        &mut self,
        slot: SlotId,
        result: Result<Vec<u8>, Failure>,
        seconds: f64,
        now: Instant,
    ) -> Option<Vec<u8>> {
        self.reads -= 1;
        match result {
            Ok(bytes) => {
                self.plan.loaded(slot);
                self.state.loaded += 1;
                self.state.load_seconds += seconds;
                self.time.measured(1, seconds);
                self.worked();
                return Some(bytes);
            }
            Err(Failure::Broken | Failure::Full) => {
                self.plan.unread(slot);
                self.failed(now);
            }
            Err(failure) => {
                self.plan.lost(slot);
                self.state.corrupt += u64::from(failure == Failure::Corrupt);
            }
        }
        None
    }

    /// Counts a failure. A remote store rests by itself; a disk that fails again and again is switched off for a
    /// while.
    fn failed(&mut self, now: Instant) {
        self.failures += 1;
        if self.plan.tier() == Tier::Disk && self.failures >= DISK_FAILURES_MAX && !self.plan.is_closed() {
            self.plan.close();
            self.rest(now);
            self.changes.push(Some(format!("{} reads or writes in a row failed", self.failures)));
        }
    }

    /// Records blocks that the remote tier has, whichever worker stored them.
    pub(super) fn adopt(&mut self, hashes: &[BlockHash]) {
        for (n, &hash) in hashes.iter().enumerate() {
            let parent = n.checked_sub(1).map(|parent| hashes[parent]);
            if let Placed::Slot { slot, .. } = self.plan.store(Link { parent, hash }) {
                self.plan.stored(slot);
            }
        }
    }
}
