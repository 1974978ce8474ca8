//! Attention over the paged cache: one algorithm for prefill, chunks and decode, and for texts whose tokens see all others.
//!
//! A context is cut into splits of 256 tokens at absolute multiples. For a row and a split: scores q·Kᵀ, softmax relative to the
//! split's own maximum, weighted sum p·V (p in bf16, sums in f32); then partials are merged in ascending order. A row's bits so
//! depend on its position and its context alone: tokens that it does not see have weight exactly zero, and adding them is
//! exact. What differs between prefill and decode is only who computes which split:
//!
//! - an *inline* item is (sequence, kv head, block of rows), and walks over all splits of its rows;
//! - where there are few items and several splits (long contexts, few sequences, many threads), a *split* item is
//!   (sequence, kv head, block of rows, split); its partial is stored, and a second pass merges.
//!
//! The query heads that share a kv head are rows of the same product, so a page of K or V is loaded once for all of them.
//! A cache of integers is expanded to bf16 for an item and a split, and the scales go into the scores and the weights: the products are the same.

use std::ops::Range;

use super::kv::KvCache;
use super::operand::{Groups, Out, Shared};
use super::pack::BLOCK;
use super::pool::{Items, Pool};
use super::scratch::Scratch;
use super::tile::{Ahead, Blocks, Kernel, Product, fetch};
use super::vector::{Offsets, PageScales, Partial, Scores, VectorOps};
use crate::device::{AttentionSpec, PAGE_TOKENS};
use crate::step::Step;

/// Tokens of the context whose partial softmax is computed at once; partials are merged in order.
const SPLIT: usize = 256;
const SPLIT_PAGES: usize = SPLIT / PAGE_TOKENS;
/// Rows (tokens × query heads of a kv head) of one item: K and V of a split, 128 KiB, are read into L2 once for eight groups.
const ITEM_ROWS: usize = 96;

/// Arguments of one attention call.
pub(super) struct Attention<'a> {
    pub(super) kernel: &'a Kernel,
    pub(super) vector: &'a VectorOps,
    pub(super) kv: &'a KvCache,
    pub(super) step: &'a Step,
    pub(super) spec: &'a AttentionSpec,
    /// Sink of each head.
    pub(super) sinks: Option<&'a [f32]>,
    /// Numbers of [`AttentionSpec::offsets`].
    pub(super) offsets: Option<&'a [f32]>,
    pub(super) layer: usize,
    /// Queries, `[rows][heads][32 · key_blocks]`, zero beyond `head_dim`.
    pub(super) queries: Shared<u16>,
    pub(super) out: Out,
}

/// Some rows of one sequence and one kv head.
#[derive(Clone, Debug)]
struct Item {
    span: usize,
    kv_head: usize,
    /// Rows of the batch that the item computes: consecutive tokens of its sequence.
    tokens: Range<usize>,
    /// Splits that at least one of the rows sees.
    splits: Range<usize>,
}

/// Buffers that a call reuses from the last one.
#[derive(Default)]
pub(super) struct AttentionScratch {
    items: Vec<Item>,
    /// Index of the item, split, and row from which its partial is stored.
    parts: Vec<(usize, usize, usize)>,
    partials: Scratch,
}

impl Attention<'_> {
    /// Number of query heads per kv head.
    fn fan(&self) -> usize {
        self.spec.heads / self.spec.kv_heads
    }

    /// Values of a query and a key, padded.
    fn key_dim(&self) -> usize {
        self.kv.key_blocks * 32
    }

    /// Values of an output, padded.
    fn value_dim(&self) -> usize {
        self.kv.value_blocks * 32
    }

    /// Size of a stored partial per row, in f32: values, maximum, sum.
    fn partial_size(&self) -> usize {
        self.value_dim() + 2
    }

    pub(super) fn run(&self, pool: &mut Pool, scratch: &mut [Scratch], shared: &mut AttentionScratch) {
        self.plan(&mut shared.items);
        let splits: usize = shared.items.iter().map(|item| item.splits.len()).sum();
        let few = shared.items.len() < 4 * pool.threads() && pool.threads() > 1;
        if few && splits > shared.items.len() {
            self.run_split(pool, scratch, shared);
        } else {
            let (items, scratch) = (Items::new(shared.items.len()), Shared::new(scratch));
            let plan = &shared.items;
            // K and V of a split, for each group of rows.
            let bytes = plan
                .iter()
                .map(|item| item.splits.len() * item.tokens.len().div_ceil(self.kernel.rows_max))
                .sum::<usize>();
            pool.run_if_worth(bytes * SPLIT * (self.key_dim() + self.value_dim()) * 2, &|thread| {
                // SAFETY: borrowed for this run; each thread has its own.
                let scratch = &mut unsafe { scratch.slice(thread, 1) }[0];
                while let Some(item) = items.take() {
                    self.inline(&plan[item], scratch);
                }
            });
        }
        Self::pad(self.out, self.step.rows(), self.spec.heads * self.spec.value_dim());
    }

    /// Cuts the step into items, the longest first.
    fn plan(&self, items: &mut Vec<Item>) {
        items.clear();
        let tokens = (ITEM_ROWS / self.fan()).max(1);
        for (index, span) in self.step.spans.iter().enumerate() {
            for start in span.rows.clone().step_by(tokens) {
                let rows = start..span.rows.end.min(start + tokens);
                let first = self.step.positions[start];
                let seen = self.spec.window.map_or(0, |window| (first + 1).saturating_sub(window));
                let splits = seen / SPLIT..(self.end(rows.end - 1) - 1) / SPLIT + 1;
                items.extend((0..self.spec.kv_heads).map(|kv_head| Item {
                    span: index,
                    kv_head,
                    tokens: rows.clone(),
                    splits: splits.clone(),
                }));
            }
        }
        items.sort_by_key(|item| std::cmp::Reverse(item.splits.len() * item.tokens.len()));
    }

    /// First position that a row of the batch does not see, though it lies in its sequence's pages.
    fn end(&self, row: usize) -> usize {
        if self.spec.causal {
            return self.step.positions[row] + 1;
        }
        let next = self.spec.window.map_or(usize::MAX, |window| self.step.positions[row].saturating_add(window));
        next.min(self.step.context(row))
    }

    /// Computes all splits of an item, one after the other.
    fn inline(&self, item: &Item, scratch: &mut Scratch) {
        let rows = item.tokens.len() * self.fan();
        let groups = Groups::new(rows, self.kernel.rows_max);
        let mut space = self.space(scratch, rows, &groups);
        self.gather(item, &groups, space.queries);
        space.whole.highest[..rows].fill(f32::NEG_INFINITY);
        for split in item.splits.clone() {
            self.expand(item, split, &mut space);
            for group in (0..groups.count()).map(|group| groups.range(group)) {
                self.one_split(item, split, &group, &mut space);
                let mut whole = space.whole.rows(&group, self.value_dim());
                let part = space.part.rows(&(0..group.len()), self.value_dim());
                // SAFETY: the table is this machine's.
                unsafe { (self.vector.merge)(&mut whole, &part) };
            }
        }
        for group in (0..groups.count()).map(|group| groups.range(group)) {
            self.finish(item, &group, &mut space.whole);
        }
    }

    /// Computes splits as items of their own, then merges in one pass over rows.
    fn run_split(&self, pool: &mut Pool, scratch: &mut [Scratch], shared: &mut AttentionScratch) {
        let AttentionScratch { items: plan, parts, partials } = shared;
        parts.clear();
        let mut rows = 0;
        for (index, item) in plan.iter().enumerate() {
            for split in item.splits.clone() {
                parts.push((index, split, rows));
                rows += item.tokens.len() * self.fan();
            }
        }
        let stored = Shared::new(partials.singles(rows * self.partial_size()));
        let (items, scratch) = (Items::new(parts.len()), Shared::new(scratch));
        pool.run(&|thread| {
            // SAFETY: borrowed for this run; each thread has its own.
            let scratch = &mut unsafe { scratch.slice(thread, 1) }[0];
            while let Some(part) = items.take() {
                let (item, split, row) = parts[part];
                self.store_split(&plan[item], split, row, scratch, stored);
            }
        });
        let items = Items::new(plan.len());
        pool.run(&|thread| {
            // SAFETY: as above.
            let scratch = &mut unsafe { scratch.slice(thread, 1) }[0];
            while let Some(item) = items.take() {
                let first = parts.partition_point(|part| part.0 < item);
                self.merge_stored(&plan[item], parts[first].2, scratch, stored);
            }
        });
    }

    /// Computes one split of an item and stores its partial from row `row` on.
    fn store_split(&self, item: &Item, split: usize, row: usize, scratch: &mut Scratch, stored: Shared<f32>) {
        let rows = item.tokens.len() * self.fan();
        let groups = Groups::new(rows, self.kernel.rows_max);
        let mut space = self.space(scratch, rows, &groups);
        self.gather(item, &groups, space.queries);
        self.expand(item, split, &mut space);
        for group in (0..groups.count()).map(|group| groups.range(group)) {
            self.one_split(item, split, &group, &mut space);
            let part = space.part.rows(&(0..group.len()), self.value_dim());
            let start = (row + group.start) * self.partial_size();
            // SAFETY: rows of different (item, split) are apart, and one thread has this one.
            let to = unsafe { stored.slice(start, group.len() * self.partial_size()) };
            let (values, rest) = to.split_at_mut(group.len() * self.value_dim());
            let (highest, sums) = rest.split_at_mut(group.len());
            values.copy_from_slice(part.values);
            highest.copy_from_slice(part.highest);
            sums.copy_from_slice(part.sums);
        }
    }

    /// Merges the stored partials of an item in ascending order of splits.
    fn merge_stored(&self, item: &Item, first: usize, scratch: &mut Scratch, stored: Shared<f32>) {
        let rows = item.tokens.len() * self.fan();
        let groups = Groups::new(rows, self.kernel.rows_max);
        let mut space = self.space(scratch, rows, &groups);
        for group in (0..groups.count()).map(|group| groups.range(group)) {
            space.whole.highest[group.clone()].fill(f32::NEG_INFINITY);
            for split in 0..item.splits.len() {
                let start = (first + split * rows + group.start) * self.partial_size();
                // SAFETY: all partials were stored in the run before, and only this thread reads this item's.
                let from = unsafe { stored.slice(start, group.len() * self.partial_size()) };
                let (values, rest) = from.split_at_mut(group.len() * self.value_dim());
                let (highest, sums) = rest.split_at_mut(group.len());
                let mut whole = space.whole.rows(&group, self.value_dim());
                // SAFETY: the table is this machine's.
                unsafe { (self.vector.merge)(&mut whole, &Partial { values, highest, sums }) };
            }
            self.finish(item, &group, &mut space.whole);
        }
    }

    /// Working space for `rows` rows of an item.
    fn space<'s>(&self, scratch: &'s mut Scratch, rows: usize, groups: &Groups) -> Space<'s> {
        let expanded = if self.kv.has_codes() { SPLIT * (self.key_dim() + self.value_dim()) } else { 0 };
        Space::new(scratch, rows, (self.key_dim(), self.value_dim()), expanded, groups)
    }

    /// Copies the queries of an item into the order of a left operand; row = token · fan + query head.
    fn gather(&self, item: &Item, groups: &Groups, queries: &mut [u16]) {
        let (fan, dim) = (self.fan(), self.key_dim());
        for row in 0..groups.rows() {
            let head = item.kv_head * fan + row % fan;
            let from = ((item.tokens.start + row / fan) * self.spec.heads + head) * dim;
            // SAFETY: queries are only read during attention.
            let from = unsafe { self.queries.slice(from, dim) };
            let group = groups.of(row);
            for (k, line) in from.chunks_exact(32).enumerate() {
                let to = group.start * dim + (k * group.len() + row - group.start) * 32;
                queries[to..to + 32].copy_from_slice(line);
            }
        }
    }

    /// Position of a row of an item.
    fn position(&self, item: &Item, row: usize) -> usize {
        self.step.positions[item.tokens.start + row / self.fan()]
    }

    /// First position that a row of an item sees.
    fn lowest(&self, item: &Item, row: usize) -> usize {
        self.spec.window.map_or(0, |window| (self.position(item, row) + 1).saturating_sub(window))
    }

    /// Pages of a split, counted from the first of the sequence, that some row of `rows` sees.
    fn seen(&self, item: &Item, split: usize, rows: &Range<usize>) -> Range<usize> {
        let start = (split * SPLIT).max(self.lowest(item, rows.start)) / PAGE_TOKENS;
        let end = self.end(item.tokens.start + (rows.end - 1) / self.fan());
        let end = end.min((split + 1) * SPLIT).div_ceil(PAGE_TOKENS);
        start..end.max(start)
    }

    /// Expands the pages of a split that some row of the item sees to bf16, into `space.expanded`, if they are integers.
    fn expand(&self, item: &Item, split: usize, space: &mut Space<'_>) {
        if !self.kv.has_codes() {
            return;
        }
        let (pages, size) = (self.step.pages(&self.step.spans[item.span]), self.key_dim() + self.value_dim());
        for at in self.seen(item, split, &(0..item.tokens.len() * self.fan())) {
            let of_page = |at: usize| self.kv.codes(self.layer, pages[at] as usize, item.kv_head);
            if let Some((codes, _)) = of_page(at) {
                let to = &mut space.expanded[(at - split * SPLIT_PAGES) * size * PAGE_TOKENS..][..size * PAGE_TOKENS];
                // SAFETY: the table is this machine's.
                unsafe { (self.vector.expand)(codes, to) };
            }
        }
    }

    /// Computes the partial of one split for one group, into `space.part`.
    fn one_split(&self, item: &Item, split: usize, group: &Range<usize>, space: &mut Space<'_>) {
        let span = &self.step.spans[item.span];
        let Range { start, end } = self.seen(item, split, group);
        let count = end - start;
        if count == 0 {
            return space.part.highest[..group.len()].fill(f32::NEG_INFINITY);
        }
        let pages = &self.step.pages(span)[start..end];
        let height = group.len();
        let (keys, size) = (self.key_dim() * PAGE_TOKENS, (self.key_dim() + self.value_dim()) * PAGE_TOKENS);
        let first = start - split * SPLIT_PAGES;
        let expanded: &[u16] = space.expanded;
        let blocks_of = |i: usize| match self.kv.has_codes() {
            true => &expanded[(first + i) * size..][..size],
            false => self.kv.halves(self.layer, pages[i] as usize, item.kv_head),
        };
        const NONE: &PageScales = &[[0.0; 16]; 4];
        let mut scales = [NONE; SPLIT_PAGES];
        for (scales, page) in scales.iter_mut().zip(pages) {
            *scales = self.kv.codes(self.layer, *page as usize, item.kv_head).map_or(NONE, |(_, scales)| scales);
        }
        for (i, row) in group.clone().enumerate() {
            let from_page = |token: usize| token.saturating_sub(start * PAGE_TOKENS).min(count * PAGE_TOKENS);
            let end = self.end(item.tokens.start + row / self.fan());
            space.visible[i] = from_page(self.lowest(item, row))..from_page(end);
            let head = item.kv_head * self.fan() + row % self.fan();
            space.places[i] = (head, (start * PAGE_TOKENS) as isize - self.position(item, row) as isize);
        }
        let queries = &space.queries[group.start * self.key_dim()..group.end * self.key_dim()];
        for (i, c) in space.scores.chunks_exact_mut(height * 32).enumerate().take(count) {
            let blocks = blocks_of(i);
            if group.start == 0 && !self.kv.has_codes() {
                // Pages are too short for the hardware to see a stream: fetch these values and the next keys meanwhile.
                fetch(&blocks[keys..]);
                if let Some(next) = self.step.pages(span).get(start + i + 1) {
                    fetch(&self.kv.halves(self.layer, *next as usize, item.kv_head)[..keys]);
                }
            }
            self.product(queries, height, Blocks::Contiguous(blocks.as_ptr()), self.kv.key_blocks, c);
        }
        let size = count * height * 32;
        let mut scores = Scores {
            scores: &mut space.scores[..size],
            weights: &mut space.weights[..size],
            scale: self.spec.scale,
            soft_cap: self.spec.soft_cap,
            offsets: self.spec.offsets.zip(self.offsets).map(|(bias, values)| Offsets {
                values,
                width: bias.width(),
                places: &space.places[..height],
            }),
            visible: &space.visible[..height],
            highest: &mut space.part.highest[..height],
            sums: &mut space.part.sums[..height],
            scales: self.kv.has_codes().then_some(&scales[..count]),
        };
        // SAFETY: the table is this machine's.
        unsafe { (self.vector.softmax)(&mut scores) };
        let mut blocks = [std::ptr::null(); SPLIT_PAGES];
        for (d, c) in space.part.values.chunks_exact_mut(height * 32).take(self.kv.value_blocks).enumerate() {
            for (i, block) in blocks.iter_mut().enumerate().take(count) {
                *block = blocks_of(i)[keys + d * BLOCK..].as_ptr();
            }
            self.product(&space.weights[..size], height, Blocks::List(&blocks[..count]), count, c);
        }
    }

    fn product(&self, a: &[u16], rows: usize, b: Blocks<'_>, k_blocks: usize, c: &mut [f32]) {
        assert!(rows <= self.kernel.rows_max && a.len() >= rows * k_blocks * 32 && c.len() == rows * 32, "tile shape");
        let product =
            Product { a: a.as_ptr(), rows, b, k_blocks, c: c.as_mut_ptr(), accumulate: false, ahead: Ahead::Nothing };
        // SAFETY: the kernel is this machine's; A and C have the sizes (asserted), C is aligned as `Scratch` lays it out; B is
        // `key_blocks` blocks of one page, or a list of `k_blocks` blocks of pages.
        unsafe { (self.kernel.run)(&product) };
    }

    /// Adds the heads' sinks to the sums, divides by them, and writes the rows of a group to their places in the operand.
    fn finish(&self, item: &Item, group: &Range<usize>, whole: &mut PartialSpace<'_>) {
        let part = whole.rows(group, self.value_dim());
        for (i, row) in group.clone().enumerate() {
            let head = item.kv_head * self.fan() + row % self.fan();
            let out = self.out.row(item.tokens.start + row / self.fan());
            let (dim, values) = (self.spec.value_dim(), &part.values[i * 32..]);
            if let Some(sinks) = self.sinks {
                // SAFETY: the table is this machine's.
                unsafe { (self.vector.add_sink)(&mut part.sums[i], part.highest[i], sinks[head]) };
            }
            // SAFETY: the table is this machine's; (token, head) is this item's alone.
            unsafe { (self.vector.finish_row)(values, group.len() * 32, part.sums[i], dim, head * dim, out) };
        }
    }

    /// Zeroes the columns of the operand beyond the last head.
    pub(super) fn pad(out: Out, rows: usize, columns: usize) {
        for row in 0..rows {
            for column in columns..columns.next_multiple_of(32) {
                // SAFETY: all threads are done; the column exists.
                unsafe { out.row(row).put(column, 0.0) };
            }
        }
    }
}

/// Values, maxima and sums of a partial: `[dim / 32][rows][32]` per group, groups one after the other.
struct PartialSpace<'a> {
    values: &'a mut [f32],
    highest: &'a mut [f32],
    sums: &'a mut [f32],
}

impl PartialSpace<'_> {
    fn rows(&mut self, group: &Range<usize>, dim: usize) -> Partial<'_> {
        Partial {
            values: &mut self.values[group.start * dim..group.end * dim],
            highest: &mut self.highest[group.clone()],
            sums: &mut self.sums[group.clone()],
        }
    }
}

/// A thread's working space for one item; every piece begins on a cache line.
struct Space<'a> {
    /// Queries of one item in bf16, `[groups][key_dim / 32][rows][32]`.
    queries: &'a mut [u16],
    /// Products q·k of one group, `[pages][rows][32]`.
    scores: &'a mut [f32],
    weights: &'a mut [u16],
    /// K and V of the pages of a split in bf16, `[pages][K|V blocks]`; empty if the cache has them so.
    expanded: &'a mut [u16],
    /// Partial of one group and one split.
    part: PartialSpace<'a>,
    /// Partials of all groups, merged over the splits.
    whole: PartialSpace<'a>,
    visible: Vec<Range<usize>>,
    /// Query head of each row, and offset from its position to the first token of the first page.
    places: Vec<(usize, isize)>,
}

impl<'a> Space<'a> {
    fn new(
        scratch: &'a mut Scratch,
        rows: usize,
        (key, value): (usize, usize),
        expanded: usize,
        groups: &Groups,
    ) -> Self {
        let height = groups.range(0).len();
        let line = |count: usize| count.next_multiple_of(32);
        let (scores, values) = (SPLIT * height, value * height);
        let singles = scores + values + value * rows + 2 * line(height) + 2 * line(rows);
        let halves = key * rows + scores + expanded;
        let (singles, rest) = scratch.singles(singles + halves.div_ceil(2)).split_at_mut(singles);
        let rest = Shared::halved(rest);
        // SAFETY: `rest` is borrowed for 'a, as the whole scratch is, and nobody else has it.
        let halves: &'a mut [u16] = unsafe { std::slice::from_raw_parts_mut(rest.at(0), halves) };
        let (queries, halves) = halves.split_at_mut(key * rows);
        let (weights, expanded) = halves.split_at_mut(scores);
        let (scores, singles) = singles.split_at_mut(scores);
        let (part, singles) = singles.split_at_mut(values);
        let (whole, singles) = singles.split_at_mut(value * rows);
        let (part_highest, singles) = singles.split_at_mut(line(height));
        let (part_sums, singles) = singles.split_at_mut(line(height));
        let (whole_highest, whole_sums) = singles.split_at_mut(line(rows));
        let part = PartialSpace { values: part, highest: part_highest, sums: part_sums };
        let whole = PartialSpace { values: whole, highest: whole_highest, sums: whole_sums };
        Self {
            queries,
            scores,
            weights,
            expanded,
            part,
            whole,
            visible: vec![0..0; height],
            places: vec![(0, 0); height],
        }
    }
}
