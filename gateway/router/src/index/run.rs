//! One run: a chain of blocks, and the parts of it that each worker has.

use super::hits::{DEVICE, Hits, LEVELS, PROMISED};
use super::spans::{self, Span};
use super::{Bits, TIERS, bit, bits};
use crate::WorkerId;
use penstock_proto::BlockHash;
use std::ops::Range;

/// Most blocks of a run: bounds the cost of one change.
pub(super) const RUN_BLOCKS_MAX: usize = 4096;

/// Run of adjacent blocks with their hashes and holders; see the module header.
#[derive(Default)]
pub(super) struct Run {
    pub(super) hashes: Vec<BlockHash>,
    /// Depth of the first block; the table holds depths, which stay valid when the run is trimmed.
    pub(super) base: u32,
    /// Workers that hold all blocks of the run, by tier.
    pub(super) full: [Bits; TIERS],
    /// Parts of the run that workers hold, sorted by owner ([`slot`]: a worker in a tier).
    pub(super) parts: Vec<Span>,
    /// Promised parts, by owner = worker; these may overlap and repeat.
    pub(super) promised: Vec<Span>,
}

/// Owner of a resident part: a worker in a tier.
pub(super) fn slot(worker: WorkerId, tier: usize) -> u16 {
    u16::from(worker.0) * TIERS as u16 + tier as u16
}

impl Run {
    pub(super) fn len(&self) -> u32 {
        self.hashes.len() as u32
    }

    /// Workers that have the whole run in some tier.
    pub(super) fn any_full(&self) -> Bits {
        self.full.iter().fold(0, |set, tier| set | tier)
    }

    /// Returns true if a block may be appended for `worker`: no other worker may have the whole run, or it would no longer.
    pub(super) fn can_grow(&self, worker: WorkerId) -> bool {
        self.hashes.len() < RUN_BLOCKS_MAX
            && self.base < u32::MAX - 2 * RUN_BLOCKS_MAX as u32
            && self.any_full() & !bit(worker) == 0
    }

    /// Appends a block that no worker has yet.
    pub(super) fn push(&mut self, hash: BlockHash) {
        self.unfill();
        self.append(hash);
    }

    /// Appends a block that all workers with the whole run have too.
    pub(super) fn append(&mut self, hash: BlockHash) {
        if self.hashes.len() == self.hashes.capacity() {
            // Little slack, because most runs are written once.
            self.hashes.reserve_exact((self.hashes.len() / 4).max(1));
        }
        self.hashes.push(hash);
    }

    /// Turns the bits of workers with the whole run into spans, because the run is about to grow.
    fn unfill(&mut self) {
        if self.any_full() == 0 {
            return;
        }
        let len = self.len();
        for tier in 0..TIERS {
            for worker in bits(std::mem::take(&mut self.full[tier])) {
                spans::add(&mut self.parts, slot(worker, tier), 0..len);
            }
        }
    }

    /// Turns spans that cover the whole run into bits.
    pub(super) fn refill(&mut self) {
        let (len, full) = (self.len(), &mut self.full);
        self.parts.retain(|span| {
            let is_full = span.start == 0 && span.end == len;
            if is_full {
                full[usize::from(span.owner) % TIERS] |= 1 << (usize::from(span.owner) / TIERS);
            }
            !is_full
        });
    }

    /// Number of `blocks` that the worker does not have in this tier.
    pub(super) fn lacks(&self, worker: WorkerId, tier: usize, blocks: Range<u32>) -> u32 {
        if self.full[tier] & bit(worker) != 0 {
            return 0;
        }
        spans::missing(&self.parts[spans::of(&self.parts, slot(worker, tier))], blocks)
    }

    /// Number of blocks in the range that no worker holds in any tier.
    pub(super) fn unheld(&self, blocks: Range<u32>) -> u32 {
        if self.any_full() != 0 { 0 } else { spans::missing(&self.parts, blocks) }
    }

    /// Notes that the worker has these blocks; returns how many are new.
    pub(super) fn hold(&mut self, worker: WorkerId, tier: usize, blocks: Range<u32>) -> u32 {
        if self.full[tier] & bit(worker) != 0 {
            return 0;
        }
        let (owner, len) = (slot(worker, tier), self.len());
        let mine = spans::of(&self.parts, owner);
        let had: u32 = self.parts[mine].iter().map(|span| span.end - span.start).sum();
        let added = spans::missing(&self.parts[spans::of(&self.parts, owner)], blocks.clone());
        if had + added < len {
            return spans::add(&mut self.parts, owner, blocks);
        }
        self.parts.drain(spans::of(&self.parts, owner));
        self.full[tier] |= bit(worker);
        if self.parts.is_empty() {
            self.parts = Vec::new();
        }
        added
    }

    /// Notes that the worker has lost these blocks; returns how many it had.
    pub(super) fn lose(&mut self, worker: WorkerId, tier: usize, blocks: Range<u32>) -> u32 {
        let (owner, len) = (slot(worker, tier), self.len());
        if self.full[tier] & bit(worker) != 0 {
            self.full[tier] &= !bit(worker);
            spans::add(&mut self.parts, owner, 0..len);
        }
        spans::cut(&mut self.parts, owner, blocks)
    }

    /// Adds one promise of these blocks; returns how many had none before.
    pub(super) fn promise(&mut self, worker: WorkerId, blocks: Range<u32>) -> u32 {
        let span = Span { owner: u16::from(worker.0), start: blocks.start, end: blocks.end, count: 1 };
        if let Some(same) = self.promised_at(span) {
            self.promised[same].count += 1;
            return 0;
        }
        let new = spans::missing(&self.promised, blocks);
        let at = self.promised.partition_point(|other| other.owner < span.owner);
        self.promised.insert(at, span);
        new
    }

    /// Removes one promise of exactly these blocks; returns how many have none now.
    pub(super) fn unpromise(&mut self, worker: WorkerId, blocks: Range<u32>) -> u32 {
        let span = Span { owner: u16::from(worker.0), start: blocks.start, end: blocks.end, count: 1 };
        let Some(at) = self.promised_at(span) else { return 0 };
        self.promised[at].count -= 1;
        if self.promised[at].count > 0 {
            return 0;
        }
        self.promised.remove(at);
        if self.promised.is_empty() {
            self.promised = Vec::new();
        }
        spans::missing(&self.promised, blocks)
    }

    fn promised_at(&self, span: Span) -> Option<usize> {
        spans::of(&self.promised, span.owner).find(|at| Span { count: 1, ..self.promised[*at] } == span)
    }

    /// Removes from `left` the workers that do not have all of `offset..offset + count`, and notes in `hits` the length
    /// they reach. The first of these blocks is number `depth` of the question. `left`: one set per level of [`Hits`].
    pub(super) fn narrow(&self, offset: u32, count: u32, depth: u32, left: &mut [Bits; LEVELS], hits: &mut Hits) {
        let mut full = 0;
        let mut doubtful = 0;
        for (level, left) in left.iter().enumerate() {
            full |= super::hits::tier(level).map_or(0, |tier| self.full[tier]);
            doubtful |= left & !full;
        }
        for worker in bits(doubtful) {
            let all = spans::owners(&self.parts, slot(worker, 0)..=slot(worker, TIERS - 1));
            let parts = &self.parts[all];
            let promised = &self.promised[spans::of(&self.promised, u16::from(worker.0))];
            let end = offset + count;
            let mut reach = offset;
            for (level, left) in left.iter_mut().enumerate() {
                // A level that reaches the end does so for all levels that allow more.
                if reach < end {
                    reach = self.reach(worker, level, reach, parts, promised);
                }
                if reach < end && *left & bit(worker) != 0 {
                    *left &= !bit(worker);
                    hits.set(level, worker, depth + (reach - offset));
                }
            }
        }
    }

    /// End of the blocks that the worker has from `at` on without a hole, at this level.
    fn reach(&self, worker: WorkerId, level: usize, at: u32, parts: &[Span], promised: &[Span]) -> u32 {
        let tiers = super::hits::tiers(level);
        if self.full[..tiers].iter().any(|full| full & bit(worker) != 0) {
            return self.len();
        }
        let mut reach = at;
        loop {
            let before = reach;
            reach = spans::reach(parts, reach, |span| usize::from(span.owner) % TIERS < tiers);
            if level >= PROMISED {
                reach = spans::reach(promised, reach, |_| true);
            }
            if reach == before || level == DEVICE {
                return reach;
            }
        }
    }
}
