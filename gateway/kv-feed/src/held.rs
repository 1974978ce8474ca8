//! Index of one server's prefix cache: written by its feed's task one block at a time, read by requests, which never
//! wait for it.
//!
//! A write takes a step or two in a table. A request that finds a write in progress spins for some dozen tries and then
//! goes without the index, since the writer's thread may be descheduled. Slow work, such as freeing the memory of
//! millions of blocks, happens outside of the lock.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use penstock_proto::BlockHash;
use penstock_proto::frames::Tier;
use penstock_router::foreign::Holdings;
use penstock_router::{Hits, KvIndex, WorkerId};

use super::SERVER;

/// Most blocks of one server that are followed: 64 million tokens.
const BLOCKS_MAX: usize = 1 << 21;

/// Most tries of a request to read the index: some microseconds.
const LOOKS_MAX: u32 = 64;

/// Index with a lock for short writes; the module header has the rules.
pub(super) struct Held {
    index: RwLock<KvIndex>,
    /// Number of blocks in the index, readable without the lock.
    blocks: AtomicUsize,
}

impl Default for Held {
    fn default() -> Self {
        Self { index: RwLock::new(empty()), blocks: AtomicUsize::new(0) }
    }
}

fn empty() -> KvIndex {
    let mut index = KvIndex::default();
    index.join(SERVER, BLOCKS_MAX);
    index
}

impl Held {
    /// Cached part of a prompt, by tier; `None`: a write is in progress, and the caller must not wait.
    pub(super) fn hits(&self, hashes: &[BlockHash]) -> Option<Hits> {
        self.glance().map(|index| index.hits_by_tier(hashes, [SERVER]))
    }

    /// Number of blocks in the index of the server's cache.
    pub(super) fn blocks(&self) -> usize {
        self.blocks.load(Ordering::Relaxed)
    }

    fn glance(&self) -> Option<RwLockReadGuard<'_, KvIndex>> {
        for _ in 0..LOOKS_MAX {
            match self.index.try_read() {
                Ok(index) => return Some(index),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        None
    }

    fn change<T>(&self, change: impl FnOnce(&mut KvIndex) -> T) -> T {
        let mut index: RwLockWriteGuard<'_, KvIndex> = self.index.write().unwrap_or_else(PoisonError::into_inner);
        let done = change(&mut index);
        self.blocks.store(index.sizes().0, Ordering::Relaxed);
        done
    }
}

/// Write access for the one task that follows the server.
impl Holdings for &Held {
    fn holds(&self, worker: WorkerId, tier: Tier, hash: BlockHash) -> bool {
        self.index.read().unwrap_or_else(PoisonError::into_inner).holds(worker, tier, hash)
    }

    fn stored(&mut self, worker: WorkerId, tier: Tier, before: Option<BlockHash>, hash: BlockHash) {
        self.change(|index| index.stored(worker, tier, before, [hash]));
    }

    fn removed(&mut self, worker: WorkerId, tier: Tier, hash: BlockHash) {
        self.change(|index| index.removed(worker, tier, [hash]));
    }

    fn cleared(&mut self, _: WorkerId) {
        let new = empty();
        // Dropped after the lock is released: freeing millions of blocks takes long.
        drop(self.change(|index| std::mem::replace(index, new)));
    }
}
