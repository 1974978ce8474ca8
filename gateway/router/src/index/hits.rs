//! Lengths of the prefix that each worker has, by the tiers that are allowed.

use crate::{WORKERS_MAX, WorkerId};
use penstock_proto::frames::Tier;

/// Number of levels; each allows more than the one before.
pub(super) const LEVELS: usize = 5;
/// Level of the blocks that are resident on the worker's device.
pub(super) const DEVICE: usize = 0;
/// Level: also promised, which will be on the device once the earlier request has computed it.
pub(super) const PROMISED: usize = 1;

/// Number of tiers that a level allows, counted from the first.
pub(super) fn tiers(level: usize) -> usize {
    level.max(1)
}

/// Tier of the KV cache that a level adds to the one before; `None` for promised blocks.
pub(super) fn tier(level: usize) -> Option<usize> {
    (level != PROMISED).then(|| tiers(level) - 1)
}

/// Leading blocks per worker, from one walk; see [`crate::KvIndex::hits_by_tier`].
///
/// Each number counts an unbroken prefix, so the numbers only grow: `on_device ≤ ready ≤ within(Host) ≤ within(Disk) ≤
/// any`. The blocks to be loaded from the disk, for example, are `within(Disk) - within(Host)`.
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

    /// Leading blocks that the worker reports on its device.
    pub fn on_device(&self, worker: WorkerId) -> u32 {
        self.depths[DEVICE][usize::from(worker.0)]
    }

    /// Leading blocks on the device or promised by the worker.
    pub fn ready(&self, worker: WorkerId) -> u32 {
        self.depths[PROMISED][usize::from(worker.0)]
    }

    /// Leading blocks that are ready, or in a tier up to this one.
    pub fn within(&self, worker: WorkerId, tier: Tier) -> u32 {
        self.depths[PROMISED + tier as usize][usize::from(worker.0)]
    }

    /// Leading blocks that the worker has in any tier, promised ones included.
    pub fn any(&self, worker: WorkerId) -> u32 {
        self.within(worker, Tier::Remote)
    }

    /// Values of [`Self::any`] for all workers, indexed by worker.
    pub fn into_any(self) -> [u32; WORKERS_MAX] {
        let [.., any] = self.depths;
        any
    }
}
