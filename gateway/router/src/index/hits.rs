//! How much of a prompt each worker has, by how far away the blocks may be.

use crate::{WORKERS_MAX, WorkerId};
use penstock_proto::frames::Tier;

/// Levels of possession, each allowing more than the one before.
pub(super) const LEVELS: usize = 5;
/// Resident on the device.
pub(super) const DEVICE: usize = 0;
/// ... or promised: it will be on the device when whoever asked for it first has it.
pub(super) const PROMISED: usize = 1;

/// Tiers that a level allows: that many of the first.
pub(super) fn tiers(level: usize) -> usize {
    level.max(1)
}

/// The tier that a level adds.
pub(super) fn tier(level: usize) -> Option<usize> {
    (level != PROMISED).then(|| tiers(level) - 1)
}

/// Leading blocks per worker, from one walk; see [`crate::KvIndex::hits_by_tier`].
///
/// Each number counts an unbroken beginning, so they only grow: `on_device ≤ ready ≤ within(Host) ≤ within(Disk) ≤ any`. What has to be
/// loaded from the disk, say, is `within(Disk) - within(Host)` blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hits {
    depths: [[u32; WORKERS_MAX]; LEVELS],
}

impl Hits {
    pub(super) fn none() -> Self {
        Self { depths: [[0; WORKERS_MAX]; LEVELS] }
    }

    pub(super) fn set(&mut self, level: usize, worker: WorkerId, depth: u32) {
        self.depths[level][usize::from(worker.0)] = depth;
    }

    /// Leading blocks that the worker says are on its device.
    pub fn on_device(&self, worker: WorkerId) -> u32 {
        self.depths[DEVICE][usize::from(worker.0)]
    }

    /// Leading blocks that are on the device or that the worker was asked to compute.
    pub fn ready(&self, worker: WorkerId) -> u32 {
        self.depths[PROMISED][usize::from(worker.0)]
    }

    /// Leading blocks that are ready or in a tier up to this one.
    pub fn within(&self, worker: WorkerId, tier: Tier) -> u32 {
        self.depths[PROMISED + tier as usize][usize::from(worker.0)]
    }

    /// Leading blocks that the worker has anywhere.
    pub fn any(&self, worker: WorkerId) -> u32 {
        self.within(worker, Tier::Remote)
    }

    /// [`Self::any`] of all workers.
    pub fn into_any(self) -> [u32; WORKERS_MAX] {
        let [.., any] = self.depths;
        any
    }
}
