//! All runs of the index, and the look-up of a block's place by its hash.
//!
//! Runs need no links between them: a caller that walks a chain knows its hashes, and where one run ends or a fork
//! leaves it, the next hash is looked up. So a fork never splits a run. A block that no worker has stays in its run
//! until it is at the run's end or most of the run is like it; so a place costs memory at most twice.

use super::run::{RUN_BLOCKS_MAX, Run, slot};
use super::spans::{self, Span};
use super::table::{Place, Table};
use super::{TIERS, bit};
use crate::WorkerId;
use penstock_proto::BlockHash;
use std::ops::Range;

/// Largest run, in blocks, that is appended to another one: bounds the work that one request does for later ones.
const JOIN_BLOCKS_MAX: u32 = 64;

/// Position of a block in the index: its run, and the offset in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) run: u32,
    pub(super) offset: u32,
}

impl At {
    pub(super) fn next(self) -> Self {
        Self { offset: self.offset + 1, ..self }
    }
}

/// All runs of blocks and the table of their places; see the module header.
#[derive(Default)]
pub(super) struct Chains {
    runs: Vec<Run>,
    free: Vec<u32>,
    table: Table,
    resident: usize,
    promised: usize,
}

impl Chains {
    /// Number of distinct blocks: resident at some worker, and promised by some worker.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.resident, self.promised)
    }

    /// Number of runs in use, and of blocks with a place in one.
    pub(super) fn shape(&self) -> (usize, usize) {
        (self.runs.len() - self.free.len(), self.table.len())
    }

    pub(super) fn run(&self, run: u32) -> &Run {
        &self.runs[run as usize]
    }

    pub(super) fn find(&self, hash: BlockHash) -> Option<At> {
        let place = self.table.find(hash, |place| hash_at(&self.runs, place))?;
        Some(At { run: place.run, offset: place.depth - self.run(place.run).base })
    }

    /// Returns true if the block at that position has this hash.
    pub(super) fn is_at(&self, at: At, hash: BlockHash) -> bool {
        self.run(at.run).hashes.get(at.offset as usize) == Some(&hash)
    }

    /// Position of `hash`; the one behind `previous` is tried before the table.
    pub(super) fn follow(&self, previous: Option<At>, hash: BlockHash) -> Option<At> {
        previous.map(At::next).filter(|at| self.is_at(*at, hash)).or_else(|| self.find(hash))
    }

    /// Creates a place for a hash that has none: at the end of the run of `previous` if that is the run's last block
    /// and the run may grow, else in a new run. No worker has the block yet.
    pub(super) fn create(&mut self, previous: Option<At>, hash: BlockHash, worker: WorkerId) -> At {
        let end = previous.filter(|at| {
            let run = self.run(at.run);
            at.offset + 1 == run.len() && run.can_grow(worker)
        });
        let run = end.map_or_else(|| self.new_run(), |at| at.run);
        self.runs[run as usize].push(hash);
        let Run { hashes, base, .. } = &self.runs[run as usize];
        let offset = hashes.len() as u32 - 1;
        let place = Place { run, depth: base + offset };
        self.table.insert(hash, place, |place| hash_at(&self.runs, place));
        At { run, offset }
    }

    /// Appends a short run that begins at `at` to the run that ends with `previous`, if the same workers have all of
    /// both. So blocks that were reported one by one become one run once a request asks for their chain. Returns the
    /// new position of `at`.
    pub(super) fn join(&mut self, previous: At, at: At) -> Option<At> {
        let (front, back) = (self.run(previous.run), self.run(at.run));
        let plain = |run: &Run| run.parts.is_empty() && run.promised.is_empty();
        let fits = back.len() <= JOIN_BLOCKS_MAX && front.hashes.len() + back.hashes.len() <= RUN_BLOCKS_MAX;
        let adjoin = at.offset == 0 && previous.offset + 1 == front.len() && previous.run != at.run;
        if !adjoin || !fits || front.full != back.full || !plain(front) || !plain(back) {
            return None;
        }
        let back = std::mem::take(&mut self.runs[at.run as usize]);
        self.free.push(at.run);
        let front = &mut self.runs[previous.run as usize];
        for (depth, hash) in (back.base..).zip(&back.hashes) {
            let to = Place { run: previous.run, depth: front.base + front.len() };
            front.append(*hash);
            self.table.moved(*hash, Place { run: at.run, depth }, to);
        }
        Some(previous.next())
    }

    /// Notes that a worker has these blocks; returns how many are new.
    pub(super) fn hold(&mut self, run: u32, worker: WorkerId, tier: usize, blocks: Range<u32>) -> usize {
        let run = &mut self.runs[run as usize];
        self.resident += run.unheld(blocks.clone()) as usize;
        run.hold(worker, tier, blocks) as usize
    }

    /// Notes that a worker has lost these blocks; returns how many it had. Places of blocks that no worker has may go.
    pub(super) fn lose(&mut self, run: u32, worker: WorkerId, tier: usize, blocks: Range<u32>) -> usize {
        let view = &mut self.runs[run as usize];
        let before = view.unheld(blocks.clone());
        let lost = view.lose(worker, tier, blocks.clone());
        self.resident -= (view.unheld(blocks) - before) as usize;
        self.settle(run);
        lost as usize
    }

    /// Notes that a worker was asked to compute the blocks of the run in this range.
    pub(super) fn promise(&mut self, run: u32, worker: WorkerId, blocks: Range<u32>) {
        self.promised += self.runs[run as usize].promise(worker, blocks) as usize;
    }

    /// Takes back one promise of exactly the blocks of the run in this range.
    pub(super) fn unpromise(&mut self, run: u32, worker: WorkerId, blocks: Range<u32>) {
        self.promised -= self.runs[run as usize].unpromise(worker, blocks) as usize;
        self.settle(run);
    }

    /// Forgets the worker's blocks in these tiers. Cost: a visit of every run, and a removal per block that no other worker has.
    pub(super) fn clear(&mut self, worker: WorkerId, tiers: Range<usize>) {
        let owners = slot(worker, tiers.start)..=slot(worker, tiers.end - 1);
        for id in 0..self.runs.len() {
            let run = &mut self.runs[id];
            let mine = spans::owners(&run.parts, owners.clone());
            if mine.is_empty() && run.full[tiers.clone()].iter().all(|full| full & bit(worker) == 0) {
                continue;
            }
            let before = run.unheld(0..run.len());
            run.parts.drain(mine);
            run.full[tiers.clone()].iter_mut().for_each(|full| *full &= !bit(worker));
            self.resident -= (run.unheld(0..run.len()) - before) as usize;
            self.settle(id as u32);
        }
    }

    /// Forgets the worker's promises. Cost: a visit of every run.
    pub(super) fn clear_promises(&mut self, worker: WorkerId) {
        for id in 0..self.runs.len() {
            let run = &mut self.runs[id];
            let mine = spans::of(&run.promised, u16::from(worker.0));
            if mine.is_empty() {
                continue;
            }
            let before = spans::missing(&run.promised, 0..run.len());
            run.promised.drain(mine);
            self.promised -= (spans::missing(&run.promised, 0..run.len()) - before) as usize;
            self.settle(id as u32);
        }
    }

    fn new_run(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.runs.push(Run::default());
            u32::try_from(self.runs.len() - 1).expect("workers may not announce four thousand million blocks")
        })
    }

    /// Frees the places of blocks that no worker has: those at the run's end, and all of them once they are most of the run.
    fn settle(&mut self, id: u32) {
        let run = &self.runs[id as usize];
        if run.any_full() != 0 {
            return;
        }
        let (len, parts) = (run.len(), run.parts.iter().chain(&run.promised));
        let (end, from_start) = parts.fold((0, 0), |(end, from_start), span| {
            (end.max(span.end), if span.start == 0 { from_start.max(span.end) } else { from_start })
        });
        if end < len {
            self.truncate(id, end);
        }
        if from_start < end {
            self.compact(id);
        }
    }

    fn truncate(&mut self, id: u32, len: u32) {
        let run = &mut self.runs[id as usize];
        for (depth, hash) in (run.base + len..).zip(&run.hashes[len as usize..]) {
            self.table.remove(*hash, Place { run: id, depth });
        }
        if len == 0 {
            *run = Run::default();
            self.free.push(id);
            return;
        }
        run.hashes.truncate(len as usize);
        if run.hashes.capacity() > 2 * run.hashes.len() {
            run.hashes.shrink_to_fit();
        }
        run.refill();
    }

    /// Splits a run of which workers hold less than half into the parts that some worker holds.
    fn compact(&mut self, id: u32) {
        let run = &self.runs[id as usize];
        let mut union: Vec<Span> = Vec::new();
        run.parts.iter().chain(&run.promised).for_each(|span| {
            spans::add(&mut union, 0, span.start..span.end);
        });
        let alive: u32 = union.iter().map(|span| span.end - span.start).sum();
        if alive * 2 >= run.len() {
            return;
        }
        let old = std::mem::take(&mut self.runs[id as usize]);
        spans::gaps(&union, 0..old.len(), |gap| {
            for offset in gap {
                self.table.remove(old.hashes[offset as usize], Place { run: id, depth: old.base + offset });
            }
        });
        // The largest part keeps its places.
        let largest = union.iter().map(|span| span.end - span.start).max().unwrap_or(0);
        union.sort_unstable_by_key(|span| span.end - span.start != largest);
        for (number, part) in union.iter().enumerate() {
            let keep = number == 0;
            let to = if keep { id } else { self.new_run() };
            self.runs[to as usize] = old.part(part.start..part.end, keep);
            if !keep {
                for offset in part.start..part.end {
                    let from = Place { run: id, depth: old.base + offset };
                    let to = Place { run: to, depth: offset - part.start };
                    self.table.moved(old.hashes[offset as usize], from, to);
                }
            }
        }
    }
}

impl Run {
    /// A run of some of the blocks, with the spans inside. `keep`: depths stay as they are.
    fn part(&self, blocks: Range<u32>, keep: bool) -> Self {
        let within = |all: &[Span]| -> Vec<Span> {
            let inside = all.iter().filter(|span| span.start >= blocks.start && span.end <= blocks.end);
            inside
                .map(|span| Span { start: span.start - blocks.start, end: span.end - blocks.start, ..*span })
                .collect()
        };
        let mut part = Self {
            hashes: self.hashes[blocks.start as usize..blocks.end as usize].to_vec(),
            base: if keep { self.base + blocks.start } else { 0 },
            full: [0; TIERS],
            parts: within(&self.parts),
            promised: within(&self.promised),
        };
        part.refill();
        part
    }
}

fn hash_at(runs: &[Run], place: Place) -> BlockHash {
    let run = &runs[place.run as usize];
    run.hashes[(place.depth - run.base) as usize]
}
