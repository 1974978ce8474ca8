//! Blocks of keys and values that enter and leave the device: evicted ones to an [`Offload`], imported and exported ones, transfers between engines.

use super::Engine;
use crate::forward::{Forward, Geometry, Pages};
use crate::scheduler::Scheduler;
use crate::sequence::Status;
use crate::transfer::{Missing, PageSink};
use penstock_kv::Evicted;
use penstock_proto::frames::{Generate, KvEvent};
use penstock_proto::{BLOCK_TOKENS, BlockHash, BlockHasher, WorkId};

/// Receiver of blocks that leave the device, called while their bytes are still there.
pub trait Offload: Send {
    /// Returns true if the block is wanted; asked before the bytes are read.
    fn wants(&mut self, parent: Option<BlockHash>, hash: BlockHash) -> bool;

    /// Number of blocks that can be taken now.
    fn room(&mut self) -> usize;

    /// Reports the number of wanted blocks that found no room.
    fn missed(&mut self, blocks: usize);

    /// Takes the bytes of a block, in wire order.
    fn take(&mut self, parent: Option<BlockHash>, hash: BlockHash, bytes: Vec<u8>);
}

/// Result of importing a block's KV, from a tier or another worker, into the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Imported {
    /// The block is stored in a page and can be read now.
    Stored,
    /// The block was in the prefix cache already; the bytes are not needed.
    Known,
    /// Every page is in use by a sequence or a hold, or the next to be evicted is the block before this one: the rest of its
    /// chain has no room.
    NoRoom,
    /// The bytes have the wrong length, or this engine keeps no blocks.
    Refused,
}

/// Mover of whole blocks between the pages of a device and memory in wire order.
pub(super) struct BlockMover {
    offload: Option<Box<dyn Offload>>,
    /// Bytes of one page of one layer in wire order.
    page_bytes: usize,
    /// Bytes of one block in wire order; 0: blocks cannot be moved.
    pub(super) block_bytes: usize,
    /// True if blocks are kept for other sequences.
    keeps_blocks: bool,
}

impl BlockMover {
    pub(super) fn new(geometry: &Geometry, keeps_blocks: bool) -> Self {
        Self { offload: None, page_bytes: geometry.page_bytes, block_bytes: geometry.block_bytes(), keeps_blocks }
    }

    /// Hands on the blocks that `work` evicts. `work` writes no page: bytes are read after it.
    pub(super) fn evicting<T>(
        &mut self,
        scheduler: &mut Scheduler,
        pages: &dyn Pages,
        work: impl FnOnce(&mut Scheduler) -> T,
    ) -> T {
        // Blocks that are evicted elsewhere are not handed on: their pages may be written at any time.
        if self.offload.is_some() {
            scheduler.pool.keep_evicted();
        }
        let done = work(scheduler);
        self.hand_on(scheduler, pages);
        done
    }

    fn hand_on(&mut self, scheduler: &mut Scheduler, pages: &dyn Pages) {
        let Some(mut offload) = self.offload.take() else { return };
        let mut wanted = scheduler.pool.take_evicted();
        wanted.retain(|block| offload.wants(block.parent, block.hash));
        // Chains are evicted last block first; the first blocks are useful without the others, not the other way
        // round.
        let missed = wanted.len().saturating_sub(offload.room());
        offload.missed(missed);
        for Evicted { parent, hash, page } in wanted.into_iter().skip(missed) {
            let mut bytes = Vec::new();
            self.copy_out(pages, page.0, &mut bytes);
            offload.take(parent, hash, bytes);
        }
        self.offload = Some(offload);
    }

    fn copy_out(&self, pages: &dyn Pages, page: u32, out: &mut Vec<u8>) {
        let begin = out.len();
        out.resize(begin + self.block_bytes, 0);
        let layers = out[begin..].chunks_exact_mut(self.page_bytes);
        layers.enumerate().for_each(|(layer, bytes)| pages.read_page(layer, page, bytes));
    }

    fn import(
        &mut self,
        scheduler: &mut Scheduler,
        forward: &mut dyn Forward,
        (parent, hash): (Option<BlockHash>, BlockHash),
        bytes: &[u8],
    ) -> Imported {
        if bytes.len() != self.block_bytes || bytes.is_empty() || !self.keeps_blocks {
            return Imported::Refused;
        }
        if scheduler.pool.find(hash).is_some() {
            return Imported::Known;
        }
        if parent.is_some() && scheduler.pool.next_evicted() == parent {
            return Imported::NoRoom;
        }
        let page = self.evicting(scheduler, forward.pages(), |scheduler| scheduler.pool.allocate());
        let Some(page) = page else { return Imported::NoRoom };
        let layers = bytes.chunks_exact(self.page_bytes);
        layers.enumerate().for_each(|(layer, bytes)| forward.write_page(layer, page.0, bytes));
        scheduler.pool.adopt(page, parent, hash);
        Imported::Stored
    }
}

impl Engine {
    /// All blocks of the prefix cache, for a gateway that starts anew.
    pub fn snapshot(&self) -> Vec<KvEvent> {
        self.scheduler.pool.snapshot()
    }

    /// Bytes of one block in wire order; see [`Geometry::block_bytes`]. 0 if blocks cannot be moved.
    pub fn block_bytes(&self) -> usize {
        self.blocks.block_bytes
    }

    /// Sends evicted blocks through `offload` from now on. Without effect where blocks cannot be moved.
    pub fn set_offload(&mut self, offload: Box<dyn Offload>) {
        if self.blocks.block_bytes > 0 && self.blocks.keeps_blocks {
            self.blocks.offload = Some(offload);
        }
    }

    /// Evicts the next idle block through `offload`; false if none is idle.
    pub fn offload_one(&mut self) -> bool {
        self.blocks.evicting(&mut self.scheduler, self.forward.pages(), |scheduler| scheduler.pool.shrink())
    }

    /// Returns true if a block can be read on the device now.
    pub fn holds(&self, hash: BlockHash) -> bool {
        self.scheduler.pool.find(hash).is_some()
    }

    /// Seconds to compute one block of prefill at the measured speed; 0 until measured.
    pub fn block_seconds(&self) -> f64 {
        let rate = self.stats.prefill_tokens_per_second();
        if rate > 0.0 { BLOCK_TOKENS as f64 / rate } else { 0.0 }
    }

    /// Bytes of one page of one layer in wire order; see [`Geometry::page_bytes`].
    pub fn page_bytes(&self) -> usize {
        self.blocks.page_bytes
    }

    /// Appends the bytes of a block to `out`, `[layer][page]` in wire order; false if the block cannot be read now.
    pub fn export(&self, hash: BlockHash, out: &mut Vec<u8>) -> bool {
        let Some(page) = self.scheduler.pool.find(hash).filter(|_| self.blocks.block_bytes > 0) else { return false };
        self.blocks.copy_out(self.forward.pages(), page.0, out);
        true
    }

    /// Imports a block that was computed elsewhere in the same numerics; it becomes idle in the prefix cache, to be evicted
    /// just before its parent. `parent`: the hash of the block before it. The caller has checked that the bytes match the
    /// hash.
    pub fn import(&mut self, parent: Option<BlockHash>, hash: BlockHash, bytes: &[u8]) -> Imported {
        self.blocks.import(&mut self.scheduler, &mut *self.forward, (parent, hash), bytes)
    }

    /// Block that an import would evict now; `None` while a page is free, or if no block is idle.
    pub fn next_evicted(&self) -> Option<BlockHash> {
        self.scheduler.pool.next_evicted()
    }

    /// Returns true if a choice of a request waits to start.
    pub fn awaits(&self, id: WorkId) -> bool {
        let mut members = self.scheduler.members(id).iter();
        members.any(|order| self.scheduler.sequences[order].status == Status::Waiting)
    }

    /// Marks the first blocks of a chain as used soon, so that imports evict others first.
    pub fn touch(&mut self, chain: &[BlockHash]) {
        self.scheduler.pool.touch(chain.iter().copied());
    }

    /// Hashes of the blocks that a request needs before its first step, and that a transfer can bring.
    pub fn chain(&self, generate: &Generate) -> Vec<BlockHash> {
        let hasher = BlockHasher::for_request(&generate.salt, &self.limits.numerics);
        let emitted = match generate.choices.as_slice() {
            [only] => only.emitted.as_slice(),
            _ => &[],
        };
        let tokens = [&generate.prompt[..], emitted].concat();
        let logprobs = generate.sampling.as_ref().is_some_and(|sampling| sampling.prompt_logprobs >= 0);
        // The last token is always computed here, and all tokens are when each row is wanted.
        let readable = if logprobs { 0 } else { tokens.len().saturating_sub(1).min(self.limits.context_tokens) };
        hasher.chain(&tokens[..readable])
    }

    /// Begins to receive the missing blocks of a chain, under a number like those of requests: holds the blocks that
    /// are here, and pages for the rest as far as spare ones exist.
    pub fn receive(&mut self, id: WorkId, chain: Vec<BlockHash>) -> Missing {
        let receive = |scheduler: &mut Scheduler| self.transfers.receive(id, chain, scheduler);
        self.blocks.evicting(&mut self.scheduler, self.forward.pages(), receive)
    }

    /// Takes one received page of one layer. `block` counts from the first missing one. False if the page was not
    /// expected, came before, or was reclaimed; the transfer is useless then.
    pub fn accept(&mut self, id: WorkId, block: usize, layer: usize, bytes: &[u8]) -> bool {
        self.transfers.accept(id, (block, layer), bytes, &self.scheduler, &mut *self.forward)
    }

    /// Ends [`Self::receive`]: of the received blocks, the complete ones among the first `vouched` can be read from
    /// now on. With `keep` the chain is held for the request of the same number, which is submitted next. Returns the
    /// number of leading blocks of the chain that can be read.
    pub fn settle(&mut self, id: WorkId, vouched: usize, keep: bool) -> usize {
        self.transfers.settle(id, vouched, keep, &mut self.scheduler)
    }

    /// Sends the leading blocks of `hashes`, part of a chain, that can be read here; returns their number.
    pub fn send(&mut self, id: WorkId, hashes: &[BlockHash], sink: Box<dyn PageSink>) -> usize {
        self.transfers.send(id, hashes, sink, &mut self.scheduler)
    }

    /// Stops the outgoing transfer `id` of [`Self::send`] or [`Self::prefill`] before its end.
    pub fn stop(&mut self, id: WorkId) {
        self.transfers.stop(id, &mut self.scheduler);
    }

    /// Returns true if [`Self::send`] or [`Self::prefill`] of this number goes on.
    pub fn is_sending(&self, id: WorkId) -> bool {
        self.transfers.is_sending(id)
    }

    /// Returns true if [`Self::give`] would send a page or end a lost transfer now.
    pub fn can_give(&mut self) -> bool {
        self.transfers.can_give(&self.scheduler)
    }

    /// Gives one page to a sink that has room; false if there is nothing to give now.
    pub fn give(&mut self) -> bool {
        self.transfers.give(&mut self.scheduler, &*self.forward)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::Sizes;
    use std::sync::{Arc, Mutex};

    /// Pages whose bytes are their layer and number.
    struct Numbered;

    impl Pages for Numbered {
        fn read_page(&self, layer: usize, page: u32, out: &mut [u8]) {
            out.fill((10 * layer) as u8 + page as u8);
        }
    }

    /// Number of missed blocks, and the blocks taken.
    type Told = (usize, Vec<(BlockHash, Vec<u8>)>);

    /// Offload with room for one block, which wants all but one hash.
    #[derive(Clone, Default)]
    struct One(Arc<Mutex<Told>>);

    impl Offload for One {
        fn wants(&mut self, _: Option<BlockHash>, hash: BlockHash) -> bool {
            hash != BlockHash(9)
        }

        fn room(&mut self) -> usize {
            1
        }

        fn missed(&mut self, blocks: usize) {
            self.0.lock().expect("no panic").0 += blocks;
        }

        fn take(&mut self, _: Option<BlockHash>, hash: BlockHash, bytes: Vec<u8>) {
            self.0.lock().expect("no panic").1.push((hash, bytes));
        }
    }

    #[test]
    fn of_a_chain_that_is_evicted_the_first_blocks_are_handed_on() {
        let sizes = Sizes {
            sequences_max: 1,
            batch_tokens: 1,
            chunk_tokens: 1,
            samples_max: 1,
            prefix_cache: true,
            prompt_lookup: 0,
            whole: false,
        };
        let mut scheduler = Scheduler::new(4, sizes);
        let chain = [(None, 1), (Some(1), 2), (Some(2), 3), (None, 9)];
        let pages = chain.map(|(parent, hash)| {
            let page = scheduler.pool.allocate().expect("four pages");
            scheduler.pool.seal(page, parent.map(BlockHash), BlockHash(hash))
        });
        pages.into_iter().rev().for_each(|page| scheduler.pool.release(page));
        let one = One::default();
        let mut mover =
            BlockMover { offload: Some(Box::new(one.clone())), page_bytes: 2, block_bytes: 4, keeps_blocks: true };
        let evicted =
            mover.evicting(&mut scheduler, &Numbered, |scheduler| (0..5).filter(|_| scheduler.pool.shrink()).count());
        assert_eq!(evicted, 4);
        let first = pages[0].0 as u8;
        let (missed, taken) = std::mem::take(&mut *one.0.lock().expect("no panic"));
        assert_eq!((missed, taken), (2, vec![(BlockHash(1), vec![first, first, 10 + first, 10 + first])]));
        // What is evicted outside is not handed on: its pages may have been written.
        let page = scheduler.pool.allocate().expect("a page");
        let page = scheduler.pool.seal(page, None, BlockHash(5));
        scheduler.pool.release(page);
        assert!(scheduler.pool.shrink());
        mover.evicting(&mut scheduler, &Numbered, |_| ());
        assert_eq!(*one.0.lock().expect("no panic"), (0, Vec::new()));
    }
}
