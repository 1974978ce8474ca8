//! Scheduler: order of the sequences, pages for them, one token budget per step.
//!
//! Order is (priority, turn, arrival) everywhere. A step serves decode rows first, then prefills, running and waiting
//! ones alike. Only a sequence whose whole text fits is started, and the first that does not fit blocks those behind
//! it, so a large one is not starved. When a running sequence needs a page and none is left, the last in order is
//! preempted (stalled ones before all others): it gives up its pages and waits at its old place; its sealed blocks
//! stay in the cache. A sequence of an encoder is computed whole in one step, and waits for one with room for all of it. The first in order can take every page and no sequence is longer than the pool, so it always
//! advances: no deadlock.
//!
//! A sequence that waits for its reader (window used up) computes nothing and gives way to any other. A sequence whose
//! next block is just being written by an earlier one waits until it can read that block: the choices of one request
//! compute their prompt once, and so do a hundred requests with one system prompt.

use crate::request::Request;
use crate::sequence::{Sequence, Status};
use penstock_kv::{BlockPool, PageId};
use penstock_proto::{BLOCK_TOKENS, BlockHash, WorkId};
use std::collections::{BTreeMap, HashMap};

/// Place of a sequence in the order of work, by priority, fair-share turn and arrival: lower first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Order {
    pub(crate) priority: i32,
    /// Fair-share turn of the request's tenant, lower first; see [`penstock_proto::frames::Generate::turn`].
    pub(crate) turn: i64,
    pub(crate) arrival: u64,
}

/// Rows of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) order: Order,
    pub(crate) rows: usize,
    /// Number of rows whose logits are wanted, the last ones.
    pub(crate) samples: usize,
    /// Number of rows that are drafts of the sequence, the last ones.
    pub(crate) drafts: usize,
}

/// Budgets of a step and the rows given out.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) runs: Vec<Run>,
    rows_left: usize,
    samples_left: usize,
    /// Price of a draft in this step.
    pub(crate) draft_price: f64,
}

impl Plan {
    fn take(&mut self, run: Run) {
        self.rows_left -= run.rows;
        self.samples_left -= run.samples;
        self.runs.push(run);
    }

    fn add_drafts(&mut self, at: usize, drafts: usize) {
        self.rows_left -= drafts;
        self.samples_left -= drafts;
        let run = &mut self.runs[at];
        (run.rows, run.samples, run.drafts) = (run.rows + drafts, run.samples + drafts, drafts);
    }

    /// Takes the drafts out of the plan, as if none of them had stood.
    pub(crate) fn drop_drafts(&mut self) {
        for run in &mut self.runs {
            run.rows -= std::mem::take(&mut run.drafts);
        }
    }

    fn give_back(&mut self, order: Order) {
        if let Some(at) = self.runs.iter().position(|run| run.order == order) {
            let run = self.runs.remove(at);
            self.rows_left += run.rows;
            self.samples_left += run.samples;
        }
    }
}

/// Sizes the scheduler works with; see [`crate::EngineConfig`].
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    pub(crate) sequences_max: usize,
    pub(crate) batch_tokens: usize,
    pub(crate) chunk_tokens: usize,
    pub(crate) samples_max: usize,
    pub(crate) prefix_cache: bool,
    /// Most drafts of a sequence in one step.
    pub(crate) prompt_lookup: usize,
    /// True if a sequence is computed whole in one step, as encoders need it.
    pub(crate) whole: bool,
}

/// Choices of one request that have not ended.
#[derive(Debug)]
struct Group {
    attempt: u32,
    members: Vec<Order>,
}

pub(crate) struct Scheduler {
    pub(crate) pool: BlockPool,
    pub(crate) sequences: BTreeMap<Order, Sequence>,
    pub(crate) sizes: Sizes,
    pub(crate) preemptions: u64,
    /// Prompt tokens of started sequences, and the number of them found in the cache.
    pub(crate) looked_up: (u64, u64),
    groups: HashMap<WorkId, Group>,
    arrivals: u64,
    /// Blocks that prefills of this step complete next, with the first sequence that completes each.
    writing: HashMap<BlockHash, Order>,
    /// List of sequence orders, kept between steps to reuse its allocation.
    places: Vec<Order>,
    /// Pages held for transfers, and for requests that wait for their first step after a transfer; in order of their
    /// chains.
    holds: BTreeMap<WorkId, Vec<PageId>>,
}

impl Scheduler {
    pub(crate) fn new(pages: usize, sizes: Sizes) -> Self {
        Self {
            pool: BlockPool::new(pages),
            sequences: BTreeMap::new(),
            sizes,
            preemptions: 0,
            looked_up: (0, 0),
            groups: HashMap::new(),
            arrivals: 0,
            writing: HashMap::new(),
            places: Vec::new(),
            holds: BTreeMap::new(),
        }
    }

    /// Holds pages, which the caller owns, under a number until [`Self::let_go`] or [`Self::take_hold`], or until they
    /// are reclaimed.
    pub(crate) fn hold(&mut self, id: WorkId, pages: Vec<PageId>) {
        self.let_go(id);
        self.holds.insert(id, pages);
    }

    /// Pages held under a number; `None` when there are none, or they were reclaimed.
    pub(crate) fn held(&self, id: WorkId) -> Option<&[PageId]> {
        self.holds.get(&id).map(Vec::as_slice)
    }

    /// Hands held pages over to the caller.
    pub(crate) fn take_hold(&mut self, id: WorkId) -> Option<Vec<PageId>> {
        self.holds.remove(&id)
    }

    /// Frees the pages held under a number; sealed ones stay in the cache.
    pub(crate) fn let_go(&mut self, id: WorkId) {
        let pages = self.holds.remove(&id).unwrap_or_default();
        pages.into_iter().rev().for_each(|page| self.pool.release(page));
    }

    /// Reclaims the pages held under the newest number; false if nothing is held.
    fn reclaim(&mut self) -> bool {
        let newest = self.holds.keys().next_back().copied();
        newest.inspect(|id| self.let_go(*id)).is_some()
    }

    /// Ends a completely computed sequence; its pages are held under `id`.
    pub(crate) fn retire(&mut self, order: Order, id: WorkId) {
        let sequence = self.sequence(order);
        let pages = std::mem::take(&mut sequence.table).into_iter().map(PageId).collect();
        self.remove(order);
        self.hold(id, pages);
    }

    /// Attempt of a request with open choices.
    pub(crate) fn attempt(&self, request: WorkId) -> Option<u32> {
        self.groups.get(&request).map(|group| group.attempt)
    }

    /// Open choices of a request, in order of their start.
    pub(crate) fn members(&self, request: WorkId) -> &[Order] {
        self.groups.get(&request).map_or(&[], |group| &group.members)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.sequences.values().filter(|sequence| sequence.status == Status::Waiting).count()
    }

    pub(crate) fn insert(&mut self, (priority, turn): (i32, i64), sequence: Sequence) -> Order {
        let order = Order { priority, turn, arrival: self.arrivals };
        self.arrivals += 1;
        let Request { id, attempt, .. } = *sequence.request;
        let group = Group { attempt, members: Vec::new() };
        self.groups.entry(id).or_insert(group).members.push(order);
        self.sequences.insert(order, sequence);
        let cached = self.lookup(order).pages.len();
        self.sequence(order).cached_hint = cached * BLOCK_TOKENS;
        order
    }

    /// Ends a sequence and frees its pages.
    ///
    /// # Panics
    /// If there is no sequence at that order.
    pub(crate) fn remove(&mut self, order: Order) -> Sequence {
        let mut sequence = self.sequences.remove(&order).expect("the place is taken");
        sequence.take_pages().for_each(|page| self.pool.release(page));
        let id = sequence.request.id;
        let group = self.groups.get_mut(&id).expect("an open choice has a group");
        group.members.retain(|member| *member != order);
        if group.members.is_empty() {
            self.groups.remove(&id);
            self.let_go(id);
        }
        sequence
    }

    /// Plans the next step; the pages that it writes are in the block tables. `prefill_rows_max` bounds prefill beside
    /// decode. `draft_price`: see [`crate::lookup::RowCost::price`].
    pub(crate) fn schedule(&mut self, prefill_rows_max: usize, draft_price: impl Fn(usize) -> f64) -> Plan {
        let Sizes { batch_tokens, samples_max, .. } = self.sizes;
        let mut plan = Plan { rows_left: batch_tokens, samples_left: samples_max, ..Plan::default() };
        self.continue_decodes(&mut plan);
        self.draft(&mut plan, draft_price);
        if !plan.runs.is_empty() {
            plan.rows_left = plan.rows_left.min(prefill_rows_max);
        }
        self.prefill(&mut plan);
        plan
    }

    fn places(&mut self, keep: impl Fn(&Sequence) -> bool) -> Vec<Order> {
        let mut places = std::mem::take(&mut self.places);
        places.clear();
        places.extend(self.sequences.iter().filter(|(_, sequence)| keep(sequence)).map(|(order, _)| *order));
        places
    }

    fn continue_decodes(&mut self, plan: &mut Plan) {
        let places = self.places(|s| s.status == Status::Running && !s.stalled() && s.decodes());
        for (at, &order) in places.iter().enumerate() {
            // An earlier sequence may have preempted it in the meantime.
            if self.sequences[&order].status == Status::Running && plan.rows_left > 0 && self.grow(order, plan) {
                // Forced tokens take what is left after a row for each of the others.
                let others = places.len() - 1 - at;
                self.plan_rows(order, plan.rows_left.saturating_sub(others).max(1), plan);
            }
        }
        self.places = places;
    }

    /// Adds drafts to the decodes of a plan, in their order, from the rows and samples that the slots leave.
    fn draft(&mut self, plan: &mut Plan, price: impl Fn(usize) -> f64) {
        let Sizes { prompt_lookup, sequences_max, batch_tokens, samples_max, .. } = self.sizes;
        if prompt_lookup == 0 || plan.runs.is_empty() {
            return;
        }
        let spare = batch_tokens.min(samples_max) - sequences_max;
        let mut left = spare.min(plan.rows_left).min(plan.samples_left);
        plan.draft_price = price(plan.runs.len());
        for at in 0..plan.runs.len() {
            let Run { order, rows, samples, .. } = plan.runs[at];
            let sequence = self.sequence(order);
            if samples == 0 || rows < sequence.wanted() || !sequence.request.takes_drafts() {
                continue;
            }
            let proposed = sequence.draft(prompt_lookup.min(left), plan.draft_price);
            let drafts = proposed.min(self.draft_room(order, proposed));
            self.sequence(order).drafts.truncate(drafts);
            left -= drafts;
            plan.add_drafts(at, drafts);
        }
    }

    /// Number of drafts that fit into the pages of a sequence. They get further pages only if that leaves one for each
    /// sequence: a draft preempts nobody.
    fn draft_room(&mut self, order: Order, drafts: usize) -> usize {
        let needed = (self.sequences[&order].len() + drafts).div_ceil(BLOCK_TOKENS);
        while self.sequences[&order].table.len() < needed && self.pool.available() > self.sequences.len() {
            let page = self.pool.allocate().expect("some are available");
            self.sequence(order).table.push(page.0);
        }
        let sequence = &self.sequences[&order];
        sequence.table.len() * BLOCK_TOKENS - sequence.len()
    }

    /// Plans prefill: running prefills and waiting sequences by their order, since a later arrival may be first in
    /// order.
    fn prefill(&mut self, plan: &mut Plan) {
        let prefills = |s: &Sequence| s.status == Status::Waiting || !s.decodes();
        let places = self.places(|s| !s.stalled() && prefills(s));
        self.writing.clear();
        (0..plan.runs.len()).for_each(|run| self.note_writing(plan.runs[run].order));
        let mut has_room = true;
        for &order in &places {
            if plan.rows_left == 0 {
                break;
            }
            if self.sequences[&order].status == Status::Waiting {
                if !has_room || self.is_to_wait(order, plan) {
                    continue;
                }
                has_room = self.make_room(order, plan);
                if !has_room {
                    continue;
                }
                self.start(order);
            }
            self.plan_rows(order, plan.rows_left, plan);
            self.note_writing(order);
        }
        self.places = places;
    }

    /// Returns true if a waiting sequence is better started in a later step: no sample rows are left for it, another one is
    /// just computing a block that it lacks, or it has to be whole and there are rows for a part of it.
    fn is_to_wait(&mut self, order: Order, plan: &Plan) -> bool {
        let sequence = &self.sequences[&order];
        if self.sizes.whole {
            return plan.samples_left == 0 || plan.rows_left < sequence.wanted();
        }
        let samples_all = sequence.collecting().is_some() || sequence.wanted() == 1 && sequence.draws();
        plan.samples_left == 0 && samples_all || self.follows(order)
    }

    /// Gives a sequence as many rows as it wants and as chunk and budgets allow, `rows_max` at most.
    fn plan_rows(&self, order: Order, rows_max: usize, plan: &mut Plan) {
        let sequence = &self.sequences[&order];
        let wanted = sequence.wanted();
        let mut rows = wanted.min(self.sizes.chunk_tokens).min(rows_max);
        let mut samples = 0;
        if sequence.collecting().is_some() {
            // A quarter of the samples stays for others: a long prompt collects log-probabilities for hundreds of
            // steps.
            let spare = self.sizes.samples_max / 4;
            rows = rows.min(plan.samples_left.saturating_sub(spare).max(1)).min(plan.samples_left);
            samples = rows;
        } else if rows == wanted && sequence.draws() {
            rows -= usize::from(plan.samples_left == 0);
            samples = plan.samples_left.min(1);
        }
        if rows > 0 {
            plan.take(Run { order, rows, samples, drafts: 0 });
        }
    }

    /// Allocates pages for the tokens after the computed ones, if they begin blocks; false if the sequence was preempted itself.
    fn grow(&mut self, order: Order, plan: &mut Plan) -> bool {
        let needed = self.sequences[&order].len().div_ceil(BLOCK_TOKENS);
        while self.sequences[&order].table.len() < needed {
            if let Some(page) = self.pool.allocate() {
                self.sequence(order).table.push(page.0);
                continue;
            }
            if self.reclaim() {
                continue;
            }
            let victim = self.victim(order).expect("the sequence itself is running");
            self.preempt(victim, plan);
            if victim == order {
                return false;
            }
        }
        true
    }

    /// Sequence to preempt for `order`: a stalled one, else the last in order, `order` itself included.
    fn victim(&self, order: Order) -> Option<Order> {
        let running = || self.sequences.iter().rev().filter(|(_, s)| s.status == Status::Running);
        let stalled = running().find(|(_, sequence)| sequence.stalled());
        let last = || running().next().filter(|(place, _)| **place >= order);
        stalled.or_else(last).map(|(place, _)| *place)
    }

    /// Preempts a running sequence; its sealed blocks stay in the cache.
    fn preempt(&mut self, order: Order, plan: &mut Plan) {
        plan.give_back(order);
        self.preemptions += 1;
        let pages = self.sequence(order).take_pages();
        pages.for_each(|page| self.pool.release(page));
    }

    /// Records the next block that a running prefill completes: others wait for it rather than write it too.
    fn note_writing(&mut self, order: Order) {
        if let Some(hash) = self.sequence(order).writing().filter(|_| self.sizes.prefix_cache) {
            self.writing.entry(hash).and_modify(|writer| *writer = order.min(*writer)).or_insert(order);
        }
    }

    /// Returns true if the first block that a waiting sequence lacks is being written by an earlier one.
    fn follows(&mut self, order: Order) -> bool {
        let cached = self.lookup(order).pages.len();
        let sequence = self.sequences.get_mut(&order).expect("the place is taken");
        let lacks = (cached < sequence.readable_blocks()).then(|| sequence.hash(cached));
        lacks.and_then(|hash| self.writing.get(&hash)).is_some_and(|writer| *writer < order)
    }

    /// Makes room for a waiting sequence, a slot and pages; preempts stalled sequences and lower priorities. False if
    /// there is no room now.
    fn make_room(&mut self, order: Order, plan: &mut Plan) -> bool {
        loop {
            let running = self.sequences.values().filter(|s| s.status == Status::Running);
            let (slots, moving) =
                running.fold((0, 0), |(slots, moving), s| (slots + 1, moving + usize::from(!s.stalled())));
            if slots < self.sizes.sequences_max && self.fits(order, moving) {
                return true;
            }
            // Held pages may belong to sequences behind this one, which cannot start before it.
            if slots == 0 && self.reclaim() {
                continue;
            }
            let Some(victim) = self.victim(order) else { return false };
            if victim.priority == order.priority && !self.sequences[&victim].stalled() {
                return false;
            }
            self.preempt(victim, plan);
        }
    }

    /// Returns true if all tokens of the sequence fit into pages, and each of `moving` others can still begin one block.
    fn fits(&mut self, order: Order, moving: usize) -> bool {
        let cached = self.lookup(order);
        let needed = self.sequences[&order].len().div_ceil(BLOCK_TOKENS) - cached.pages.len();
        self.pool.available() - cached.idle >= needed + moving
    }

    fn lookup(&mut self, order: Order) -> penstock_kv::Lookup {
        if !self.sizes.prefix_cache {
            return penstock_kv::Lookup::default();
        }
        let sequence = self.sequences.get_mut(&order).expect("the place is taken");
        let blocks = sequence.readable_blocks();
        self.pool.lookup((0..blocks).map(|block| sequence.hash(block)))
    }

    /// Takes cached blocks, and pages for the rest; [`Self::make_room`] has checked that they exist.
    fn start(&mut self, order: Order) {
        let cached = self.lookup(order).pages;
        self.pool.share(&cached);
        let Self { sequences, pool, looked_up, .. } = self;
        let sequence = sequences.get_mut(&order).expect("the place is taken");
        let blocks = sequence.len().div_ceil(BLOCK_TOKENS);
        sequence.status = Status::Running;
        sequence.sealed = cached.len();
        sequence.computed = cached.len() * BLOCK_TOKENS;
        sequence.table.extend(cached.iter().map(|page| page.0));
        let fresh = (cached.len()..blocks).map(|_| pool.allocate().expect("room was made").0);
        sequence.table.extend(fresh);
        if sequence.cached_tokens.is_none() {
            let prompt = sequence.request.prompt.len();
            let hit = sequence.computed.min(prompt);
            sequence.cached_tokens = Some(hit as u32);
            *looked_up = (looked_up.0 + prompt as u64, looked_up.1 + hit as u64);
        }
        // The sequence now has the pages itself, so its hold can end.
        let id = sequence.request.id;
        self.let_go(id);
    }

    /// Advances a sequence after its step: rows are computed, and full blocks are sealed.
    pub(crate) fn advance(&mut self, run: Run) {
        let Self { sequences, pool, sizes, .. } = self;
        let sequence = sequences.get_mut(&run.order).expect("what ran is there");
        sequence.computed += run.rows;
        if !sizes.prefix_cache {
            return;
        }
        while (sequence.sealed + 1) * BLOCK_TOKENS <= sequence.computed {
            let block = sequence.sealed;
            let parent = block.checked_sub(1).map(|block| sequence.hash(block));
            let hash = sequence.hash(block);
            sequence.table[block] = pool.seal(PageId(sequence.table[block]), parent, hash).0;
            sequence.sealed += 1;
        }
    }

    pub(crate) fn sequence(&mut self, order: Order) -> &mut Sequence {
        self.sequences.get_mut(&order).expect("the place is taken")
    }
}
