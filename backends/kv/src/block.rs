//! State machine of one block:
//!
//! ```text
//! Free ──take──▶ Writing ──seal──▶ Shared(refs) ◀──share/release──▶ Cached ──evict──▶ Free
//!                   └──release (unfinished)──▶ Free
//! ```
//!
//! Only a sealed block has a name, and only a named block is shared, so a page never has two writers or a reader
//! beside its writer. Each transition returns the effect that the caller has to apply.

use penstock_proto::BlockHash;

/// State of one block, with its name and readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// Empty: the page may be taken by a writer.
    Free,
    /// Being written by one sequence; no other may read it.
    Writing,
    /// Complete and read by `refs` sequences, at least one.
    Shared {
        /// Hash that names the block's tokens and all before them.
        hash: BlockHash,
        /// Number of sequences that have the block in their block table.
        refs: u32,
    },
    /// Complete, used by no sequence, readable until evicted.
    Cached {
        /// Hash that names the block's tokens and all before them.
        hash: BlockHash,
    },
}

/// Work for the owner of the block after a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing to do: index, eviction queue and free list stay as they are.
    Nothing,
    /// Put the hash in the index and tell the router.
    Store(BlockHash),
    /// The block became idle: it may be evicted.
    Idle,
    /// The block is used again: it must not be evicted.
    Busy,
    /// The page goes back to the free list.
    Free,
    /// The page is free, and the hash leaves the index; tell the router.
    Retract(BlockHash),
}

impl Block {
    /// Takes the free page for a sequence to write.
    ///
    /// # Panics
    /// If the block is not free (a bug of the pool).
    pub fn take(&mut self) -> Effect {
        let Block::Free = *self else { panic!("take of {self:?}") };
        *self = Block::Writing;
        Effect::Nothing
    }

    /// Names a completely written block, so that others can read it.
    ///
    /// # Panics
    /// If the block is not being written.
    pub fn seal(&mut self, hash: BlockHash) -> Effect {
        let Block::Writing = *self else { panic!("seal of {self:?}") };
        *self = Block::Shared { hash, refs: 1 };
        Effect::Store(hash)
    }

    /// Adds one reading sequence.
    ///
    /// # Panics
    /// If the block is not sealed.
    pub fn share(&mut self) -> Effect {
        match *self {
            Block::Shared { hash, refs } => {
                *self = Block::Shared { hash, refs: refs + 1 };
                Effect::Nothing
            }
            Block::Cached { hash } => {
                *self = Block::Shared { hash, refs: 1 };
                Effect::Busy
            }
            Block::Free | Block::Writing => panic!("share of {self:?}"),
        }
    }

    /// Removes one sequence; an unfinished block has no name and becomes free.
    ///
    /// # Panics
    /// If no sequence holds it.
    pub fn release(&mut self) -> Effect {
        match *self {
            Block::Writing => {
                *self = Block::Free;
                Effect::Free
            }
            Block::Shared { hash, refs: 1 } => {
                *self = Block::Cached { hash };
                Effect::Idle
            }
            Block::Shared { hash, refs } => {
                *self = Block::Shared { hash, refs: refs - 1 };
                Effect::Nothing
            }
            Block::Free | Block::Cached { .. } => panic!("release of {self:?}"),
        }
    }

    /// Evicts the block from the device.
    ///
    /// # Panics
    /// If the block is not cached: someone evicted a block that is in use.
    pub fn evict(&mut self) -> Effect {
        let Block::Cached { hash } = *self else { panic!("evict of {self:?}") };
        *self = Block::Free;
        Effect::Retract(hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H: BlockHash = BlockHash(7);

    #[track_caller]
    fn check(start: Block, op: fn(&mut Block) -> Effect, end: Block, effect: Effect) {
        let mut block = start;
        assert_eq!((op(&mut block), block), (effect, end));
    }

    #[test]
    fn a_life() {
        check(Block::Free, Block::take, Block::Writing, Effect::Nothing);
        check(Block::Writing, |b| b.seal(H), Block::Shared { hash: H, refs: 1 }, Effect::Store(H));
        check(Block::Shared { hash: H, refs: 1 }, Block::share, Block::Shared { hash: H, refs: 2 }, Effect::Nothing);
        check(Block::Shared { hash: H, refs: 2 }, Block::release, Block::Shared { hash: H, refs: 1 }, Effect::Nothing);
        check(Block::Shared { hash: H, refs: 1 }, Block::release, Block::Cached { hash: H }, Effect::Idle);
        check(Block::Cached { hash: H }, Block::share, Block::Shared { hash: H, refs: 1 }, Effect::Busy);
        check(Block::Cached { hash: H }, Block::evict, Block::Free, Effect::Retract(H));
        check(Block::Writing, Block::release, Block::Free, Effect::Free);
    }

    #[test]
    #[should_panic(expected = "evict of Shared")]
    fn a_block_in_use_is_not_evicted() {
        Block::Shared { hash: H, refs: 1 }.evict();
    }

    #[test]
    #[should_panic(expected = "share of Writing")]
    fn an_unfinished_block_is_not_shared() {
        Block::Writing.share();
    }
}
