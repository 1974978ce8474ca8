//! The index of one server: written by its feed's task one block at a time, read by requests, which never wait for it.
//!
//! A write is a step or two in a table. So a request that finds one under way looks again at once, some dozen times, and then does without:
//! the writer's thread may have been put aside in the middle of it. What takes long (giving back the memory of millions of blocks) happens
//! outside of the lock.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use penstock_proto::BlockHash;
use penstock_proto::frames::Tier;
use penstock_router::foreign::Holdings;
use penstock_router::{Hits, KvIndex, WorkerId};

use super::SERVER;

/// Blocks of one server that are followed at most: 64 million tokens.
const BLOCKS_MAX: usize = 1 << 21;

/// Times that a request looks whether a write is over: some microseconds.
const LOOKS_MAX: u32 = 64;

/// See the module header.
pub(super) struct Held {
    index: RwLock<KvIndex>,
    /// As many as the index has.
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
    /// How much of a prompt is held; `None`: that cannot be told without waiting.
    pub(super) fn hits(&self, hashes: &[BlockHash]) -> Option<Hits> {
        self.glance().map(|index| index.hits_by_tier(hashes, [SERVER]))
    }

    /// Blocks that are held.
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

/// For the one task that follows the server.
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
        // Dropped when nobody is kept from reading any more.
        drop(self.change(|index| std::mem::replace(index, new)));
    }
}
