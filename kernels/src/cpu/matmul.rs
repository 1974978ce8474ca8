//! The blocked product: operand × packed weight, dealt out over threads, with the epilogue run while a tile is in cache.
//!
//! A work item is a *unit* of neighbouring panels times a range of row groups. Sketch for one thread (48 KiB L1, 1 MiB L2, K = 1024):
//!
//! - many rows: a unit (4 panels, 256 KiB) stays in L2; each group (12 rows, 24 KiB) is read into L1 once per unit and meets
//!   four panels there. A comes from L3 once per unit: 3–4 GB/s.
//! - one group: a unit is a stretch of memory read once, in order.
//! - codes of 4 and 8 bits (`narrow/`) are expanded to bf16 first, once per item: block by block of k into L1 for few rows, all panels of the unit into L2
//!   for many.
//! - AMX wants its panel of B in L1: for a block of k, panel by panel, all groups of the item; C waits in scratch (256 to 512 KiB at the widths of models).

use std::ops::Range;

use super::integer::activations::Integral;
use super::integer::{Form, IntegerProduct};
use super::low_rank::Added;
use super::operand::{Groups, Operand, Shared};
use super::pack::{BLOCK, Packed, Section};
use super::pool::{Items, Pool};
use super::scratch::Scratch;
use super::tile::{Ahead, Blocks, Kernel, Product};

/// Bytes of B that a unit should not exceed: a part of L2 that leaves room for A and scratch.
pub(super) const UNIT_BYTES: usize = 320 << 10;
/// Bytes of A that one item walks over; the panels of a matrix are walked over again for each piece of so many rows. Without the bound,
/// A of 2048 rows (4 to 12 MiB) comes from memory for each unit: 75 instead of 82 % of peak on one thread.
const PIECE_BYTES: usize = 1536 << 10;
/// Row groups of one item for kernels that block k: 16 groups of 32 rows.
const GROUPS_BLOCKED: usize = 16;

/// Panels of an item of such kernels where A does not stay in L2: a block of k of 512 rows (512 KiB) is read from L3 once for all of them,
/// and C (512 KiB) fits beside it.
const PANELS_BLOCKED: usize = 8;
/// Bytes of A, read again for each item, that stay in L2 between items.
const A_BYTES_KEPT: usize = 1 << 20;

/// Row groups for which reading a panel from L3 or memory again is a few per cent of the work.
const GROUPS_PIECE: usize = 8;

/// Most row groups for which codes are expanded by blocks of k; more would read and write C for each.
const GROUPS_CUT: usize = 4;
/// Blocks of k that are expanded at once: 16 KiB, half of a first-level cache.
const K_BLOCKS_EXPANDED: usize = 8;

/// A finished piece of a product, passed to the epilogue: some panels of one row group.
pub(super) struct Finished<'a> {
    /// Index of the first panel (32 columns of the result) in `tile`.
    pub(super) panel: usize,
    /// Rows of the left operand that the piece covers, one row group.
    pub(super) rows: Range<usize>,
    /// Values of the result, `[panels][rows][32]`.
    pub(super) tile: &'a [f32],
}

impl Finished<'_> {
    /// Index and 32 values of each (panel, row).
    pub(super) fn lines(&self) -> impl Iterator<Item = (usize, usize, &[f32; 32])> {
        let panels = self.tile.chunks_exact(self.rows.len() * 32).enumerate();
        panels.flat_map(move |(panel, lines)| {
            let rows = self.rows.clone().zip(lines.as_chunks::<32>().0);
            rows.map(move |(row, line)| (self.panel + panel, row, line))
        })
    }

    /// Columns `first..` (counted from the first panel) of the row that is number `row` of the group.
    pub(super) fn gather(&self, first: usize, row: usize, out: &mut [f32]) {
        let mut column = first;
        let mut rest = out;
        while !rest.is_empty() {
            let count = (32 - column % 32).min(rest.len());
            let from = (column / 32 * self.rows.len() + row) * 32 + column % 32;
            let (to, after) = rest.split_at_mut(count);
            to.copy_from_slice(&self.tile[from..from + count]);
            column += count;
            rest = after;
        }
    }
}

/// Left operand of a product, in the forms that the weight's sections read.
#[derive(Clone, Copy)]
pub(super) struct Left {
    /// For sections of bf16.
    pub(super) half: Option<Operand>,
    /// For sections of integers.
    pub(super) integral: Option<Integral>,
}

/// A product of an operand and a packed weight.
pub(super) struct Matmul<'a> {
    pub(super) kernel: &'a Kernel,
    pub(super) left: Left,
    pub(super) weight: &'a Packed,
    /// Number of panels that the epilogue must see together; 1 if it does not care.
    pub(super) together: usize,
    /// Low-rank additions to the product, before the epilogue.
    pub(super) added: Option<Added<'a>>,
}

impl Matmul<'_> {
    /// Computes all rows × all panels; `epilogue` gets each piece once, from any thread.
    pub(super) fn run(&self, pool: &mut Pool, scratch: &mut [Scratch], epilogue: &(dyn Fn(&Finished<'_>) + Sync)) {
        for section in &self.weight.sections {
            let part = Part { added: self.added.as_ref(), ..Part::new(self.kernel, self.left, section) };
            if part.groups.count() > 0 {
                part.run(self.together, pool, scratch, epilogue);
            }
        }
    }
}

/// Left operand of one section.
#[derive(Clone, Copy)]
enum Operands {
    Half(Operand),
    Integral(Integral),
}

impl Operands {
    fn groups(&self) -> Groups {
        match self {
            Operands::Half(operand) => operand.groups,
            Operands::Integral(operand) => operand.groups,
        }
    }

    fn k_blocks(&self) -> usize {
        match self {
            Operands::Half(operand) => operand.k_blocks,
            Operands::Integral(operand) => operand.k_blocks,
        }
    }

    /// Bytes of a line of 32 values, with what belongs to it.
    fn line_bytes(&self) -> usize {
        match self {
            Operands::Half(_) => 64,
            Operands::Integral(_) => 40,
        }
    }
}

/// Product of an operand and one section of a weight.
pub(super) struct Part<'a> {
    kernel: &'a Kernel,
    left: Operands,
    groups: Groups,
    section: &'a Section,
    added: Option<&'a Added<'a>>,
}

/// Panels of one item: a multiple of `together` that fits the cache and leaves every thread several items of the `all` panels of a run.
pub(super) fn unit(section: &Section, all: usize, together: usize, threads: usize) -> usize {
    let fit = UNIT_BYTES / section.panel_bytes();
    (fit.min(all / (threads * 8)) / together).max(1) * together
}

/// Panel that is multiplied next, to be fetched meanwhile.
pub(super) type Next<'a> = Option<(&'a Section, usize)>;

impl<'a> Part<'a> {
    pub(super) fn new(kernel: &'a Kernel, left: Left, section: &'a Section) -> Self {
        let left = match section.form() {
            None => Operands::Half(left.half.expect("an operand for sections of bf16")),
            Some(_) => Operands::Integral(left.integral.expect("an operand for sections of integers")),
        };
        assert_eq!(left.k_blocks(), section.k_blocks, "columns of the operand");
        Self { kernel, left, groups: left.groups(), section, added: None }
    }

    fn run(
        &self,
        together: usize,
        pool: &mut Pool,
        scratch: &mut [Scratch],
        epilogue: &(dyn Fn(&Finished<'_>) + Sync),
    ) {
        let (section, groups) = (self.section, self.groups.count());
        let unit = self.unit(together, pool.threads());
        let units = section.panels.div_ceil(unit);
        let pieces = self.row_pieces(units, groups, pool.threads());
        let (items, scratch) = (Items::new(units * pieces), Shared::new(scratch));
        let bytes = section.panels * section.panel_bytes() * groups;
        pool.run_if_worth(bytes, &|thread| {
            // SAFETY: borrowed for this run; each thread has its own.
            let scratch = &mut unsafe { scratch.slice(thread, 1) }[0];
            let panels = |item: usize| item % units * unit..((item % units + 1) * unit).min(section.panels);
            // An item is taken before the one before it is done, so that its panels can be fetched meanwhile.
            let mut next = items.take();
            while let Some(item) = next {
                next = items.take();
                let (piece, after) = (item / units, next.map(|next| (section, panels(next).start)));
                let groups = piece * groups / pieces..(piece + 1) * groups / pieces;
                self.walk(panels(item), after, groups, scratch, epilogue);
            }
        });
    }

    /// Panels of one item, a multiple of `together`.
    fn unit(&self, together: usize, threads: usize) -> usize {
        let panels = self.section.panels;
        let rows = self.groups.rows().min(GROUPS_BLOCKED * self.rows_max());
        let a_bytes = rows * self.section.k_blocks * self.left.line_bytes();
        let unit = unit(self.section, panels, together, threads);
        if self.blocks_k() && a_bytes > A_BYTES_KEPT {
            return (PANELS_BLOCKED.min(panels / (threads * 2)) / together * together).max(unit);
        }
        unit
    }

    /// Multiplies all row groups with some panels, on the calling thread.
    pub(super) fn panels(
        &self,
        panels: Range<usize>,
        after: Next<'_>,
        scratch: &mut Scratch,
        epilogue: &dyn Fn(&Finished<'_>),
    ) {
        let (count, at_once) = (self.groups.count(), if self.blocks_k() { GROUPS_BLOCKED } else { usize::MAX });
        for first in (0..count).step_by(at_once) {
            self.walk(panels.clone(), after, first..count.min(first.saturating_add(at_once)), scratch, epilogue);
        }
    }

    fn walk(
        &self,
        panels: Range<usize>,
        after: Next<'_>,
        groups: Range<usize>,
        scratch: &mut Scratch,
        epilogue: &dyn Fn(&Finished<'_>),
    ) {
        if self.section.codes(0).is_some() {
            self.expanded(&panels, groups, scratch, epilogue);
        } else if self.blocks_k() {
            self.blocked_k(&panels, after, groups, scratch, epilogue);
        } else {
            self.whole_k(panels, after, groups, scratch, epilogue);
        }
    }

    /// True if k is taken in blocks. One group of integers is not, since it has nothing to share a block with.
    fn blocks_k(&self) -> bool {
        self.k_at_once() > 0 && (self.section.form().is_none() || self.groups.count() > 1)
    }

    /// Blocks of k that the kernel takes at once; 0 for all.
    fn k_at_once(&self) -> usize {
        match self.section.form() {
            None => self.kernel.k_blocks_at_once,
            Some(form) => self.kernel.integers.lines_at_once(form),
        }
    }

    /// Most rows of a group.
    fn rows_max(&self) -> usize {
        match self.left {
            Operands::Half(_) => self.kernel.rows_max,
            Operands::Integral(_) => self.kernel.integers.rows_max(),
        }
    }

    /// Number of ranges into which the row groups are cut.
    fn row_pieces(&self, units: usize, groups: usize, threads: usize) -> usize {
        // A piece reads its panels again, so it should have rows enough to pay for that.
        let fair = if threads == 1 { 1 } else { (threads * 16).div_ceil(units).min(groups / GROUPS_PIECE).max(1) };
        let fit = if self.blocks_k() {
            groups.div_ceil(GROUPS_BLOCKED)
        } else {
            (self.groups.rows() * self.section.k_blocks * self.left.line_bytes()).div_ceil(PIECE_BYTES)
        };
        fair.max(fit).min(groups)
    }

    fn whole_k(
        &self,
        panels: Range<usize>,
        after: Next<'_>,
        groups: Range<usize>,
        scratch: &mut Scratch,
        epilogue: &dyn Fn(&Finished<'_>),
    ) {
        // Each group fetches its share of the next item's lines, 32 per block of k.
        let share = if groups.len() == 1 { 0 } else { 32usize.div_ceil(groups.len()) };
        let (first_group, groups_count) = (groups.start, groups.len());
        for group in groups {
            let skip = (group - first_group) * share;
            let rows = self.groups.range(group);
            let size = rows.len() * 32;
            let tile = scratch.singles(panels.len() * size);
            for (panel, c) in panels.clone().zip(tile.chunks_exact_mut(size)) {
                match self.left {
                    Operands::Integral(operand) => {
                        if let Some((section, first)) = after.filter(|_| share > 0) {
                            let bytes = 0..section.panel_bytes();
                            section.fetch_part(first + panel - panels.start, bytes, group - first_group, groups_count);
                        }
                        self.integer_product(&operand, panel, 0..self.section.k_blocks, &rows, c);
                    }
                    Operands::Half(operand) => {
                        let next = after.map(|(section, first)| (section, first + panel - panels.start));
                        let ahead = match next {
                            _ if share == 0 => Ahead::Stream,
                            Some((section, next)) if skip < 32 && next < section.panels && section.is_half() => {
                                Ahead::Next { from: section.halves(next)[skip * 32..].as_ptr(), lines: share }
                            }
                            _ => Ahead::Nothing,
                        };
                        self.product(&operand, self.section.halves(panel), 0..self.section.k_blocks, &rows, c, ahead);
                    }
                }
            }
            self.finish(panels.start, rows, tile, epilogue);
        }
    }

    /// Passes a piece on, with what is added to it. `panel`: index of its first panel in the section.
    fn finish(&self, panel: usize, rows: Range<usize>, tile: &mut [f32], epilogue: &dyn Fn(&Finished<'_>)) {
        let panel = self.section.first + panel;
        if let Some(added) = self.added {
            added.add(panel, &rows, tile);
        }
        epilogue(&Finished { panel, rows, tile });
    }

    fn blocked_k(
        &self,
        panels: &Range<usize>,
        after: Next<'_>,
        groups: Range<usize>,
        scratch: &mut Scratch,
        epilogue: &dyn Fn(&Finished<'_>),
    ) {
        let per_group = panels.len() * self.rows_max() * 32;
        let all = scratch.singles(groups.len() * per_group);
        let (k_blocks, at_once) = (self.section.k_blocks, self.k_at_once());
        let share = 32usize.div_ceil(groups.len());
        for first in (0..k_blocks).step_by(at_once) {
            let k = first..k_blocks.min(first + at_once);
            for (i, panel) in panels.clone().enumerate() {
                // What is multiplied next: the same blocks of the next panel, the next blocks of the first one, or the next item.
                let next = if panel + 1 < panels.end {
                    Some((self.section, panel + 1, first))
                } else if k.end < k_blocks {
                    Some((self.section, panels.start, k.end))
                } else {
                    after.filter(|(section, panel)| *panel < section.panels).map(|(section, panel)| (section, panel, 0))
                };
                for ((at, group), c) in groups.clone().enumerate().zip(all.chunks_exact_mut(per_group)) {
                    let rows = self.groups.range(group);
                    let size = rows.len() * 32;
                    let c = &mut c[i * size..][..size];
                    let operand = match &self.left {
                        Operands::Half(operand) => operand,
                        Operands::Integral(operand) => {
                            if let Some((section, panel, k)) = next {
                                // A byte for each value.
                                section.fetch_part(panel, k * BLOCK..(k + at_once) * BLOCK, at, groups.len());
                            }
                            self.integer_product(operand, panel, k.clone(), &rows, c);
                            continue;
                        }
                    };
                    let b = &self.section.halves(panel)[k.start * BLOCK..k.end * BLOCK];
                    let ahead = match next {
                        _ if groups.len() == 1 => Ahead::Stream,
                        // Each group fetches its share of a block's 32 lines.
                        Some((section, panel, k)) if at * share < 32 && section.is_half() => {
                            let from = section.halves(panel)[k * BLOCK + at * share * 32..].as_ptr();
                            Ahead::Next { from, lines: share.min(32 - at * share) }
                        }
                        _ => Ahead::Nothing,
                    };
                    self.product(operand, b, k.clone(), &rows, c, ahead);
                }
            }
        }
        self.finish_all(panels, groups, all, per_group, epilogue);
    }

    /// Passes the tiles of some groups on, `[groups]` of `per_group` values.
    fn finish_all(
        &self,
        panels: &Range<usize>,
        groups: Range<usize>,
        all: &mut [f32],
        per_group: usize,
        epilogue: &dyn Fn(&Finished<'_>),
    ) {
        for (group, c) in groups.zip(all.chunks_exact_mut(per_group)) {
            let rows = self.groups.range(group);
            let tile = &mut c[..panels.len() * rows.len() * 32];
            self.finish(panels.start, rows, tile, epilogue);
        }
    }

    /// Multiplies row groups with panels of codes, which are expanded in scratch.
    fn expanded(
        &self,
        panels: &Range<usize>,
        groups: Range<usize>,
        scratch: &mut Scratch,
        epilogue: &dyn Fn(&Finished<'_>),
    ) {
        let Operands::Half(operand) = &self.left else { unreachable!("codes are multiplied with bf16") };
        let (k_blocks, expander) = (self.section.k_blocks, self.kernel.expander);
        let codes = |panel: usize| self.section.codes(panel).expect("a section of codes");
        let at_once = match self.kernel.k_blocks_at_once {
            0 if groups.len() <= GROUPS_CUT => K_BLOCKS_EXPANDED,
            0 => {
                let (size, rows_max) = (k_blocks * BLOCK, self.kernel.rows_max);
                let (wide, all) = scratch.halves_and_singles(panels.len() * size, panels.len() * rows_max * 32);
                for (panel, wide) in panels.clone().zip(wide.chunks_exact_mut(size)) {
                    expander.expand(&codes(panel), 0..k_blocks, wide);
                }
                for group in groups {
                    let rows = self.groups.range(group);
                    let tile = &mut all[..panels.len() * rows.len() * 32];
                    for (wide, c) in wide.chunks_exact(size).zip(tile.chunks_exact_mut(rows.len() * 32)) {
                        self.product(operand, wide, 0..k_blocks, &rows, c, Ahead::Nothing);
                    }
                    self.finish(panels.start, rows, tile, epilogue);
                }
                return;
            }
            at_once => at_once,
        };
        let per_group = panels.len() * self.kernel.rows_max * 32;
        let (wide, all) = scratch.halves_and_singles(at_once * BLOCK, groups.len() * per_group);
        for k in (0..k_blocks).step_by(at_once) {
            let k = k..k_blocks.min(k + at_once);
            for (i, panel) in panels.clone().enumerate() {
                let wide = &mut wide[..k.len() * BLOCK];
                expander.expand(&codes(panel), k.clone(), wide);
                for (group, c) in groups.clone().zip(all.chunks_exact_mut(per_group)) {
                    let rows = self.groups.range(group);
                    let size = rows.len() * 32;
                    self.product(operand, wide, k.clone(), &rows, &mut c[i * size..][..size], Ahead::Nothing);
                }
            }
        }
        self.finish_all(panels, groups, all, per_group, epilogue);
    }

    /// Computes blocks `k` of one panel, whose values are `b`, times one group, into `c` or added to it.
    fn product(&self, operand: &Operand, b: &[u16], k: Range<usize>, rows: &Range<usize>, c: &mut [f32], ahead: Ahead) {
        assert!(rows.len() <= self.kernel.rows_max && c.len() == rows.len() * 32, "shape of a tile");
        assert_eq!((b.len(), b.as_ptr().align_offset(64)), (k.len() * BLOCK, 0), "blocks of a panel");
        let last = operand.values.at((rows.end * operand.k_blocks) * 32);
        let a = operand.group(rows.start).wrapping_add(k.start * rows.len() * 32);
        debug_assert!(a <= last);
        let product = Product {
            a,
            rows: rows.len(),
            b: Blocks::Contiguous(b.as_ptr()),
            k_blocks: k.len(),
            c: c.as_mut_ptr(),
            accumulate: k.start > 0,
            ahead,
        };
        // SAFETY: the kernel is this machine's; A has `k_blocks` blocks from `k.start` on (the group ends inside of the operand,
        // checked by `at`); B is a slice of that length, aligned (asserted); C is an exclusive slice of the size, aligned as `Scratch` is.
        unsafe { (self.kernel.run)(&product) };
    }

    /// Multiplies lines `k` of one panel of integers with one group. The first lines begin the sums in `c`, later lines are added to them, and the last
    /// lines make them the result.
    fn integer_product(&self, operand: &Integral, panel: usize, k: Range<usize>, rows: &Range<usize>, c: &mut [f32]) {
        assert!(rows.len() <= self.kernel.integers.rows_max() && c.len() == rows.len() * 32, "shape of a tile");
        let (form, k_blocks) = (self.section.form().expect("a section of integers"), self.section.k_blocks);
        let (first, lines) = (operand.group(rows.start), rows.len() * k_blocks);
        assert_eq!(operand.by_row, form == Form::Rows, "scales of the operand");
        assert!(
            k == (0..k_blocks) || self.k_at_once() > 0 && k.start.is_multiple_of(self.k_at_once()),
            "lines of a part"
        );
        assert!(k.start < k.end && k.end <= k_blocks, "lines of a panel");
        let scales = if operand.by_row { (rows.start, rows.len()) } else { (first, lines) };
        // Bounds of all that the kernel reads; `at` checks them.
        let _ = (operand.values.at((first + lines) * 32), operand.sums.at(first + lines));
        let _ = operand.scales.at(scales.0 + scales.1);
        let product = IntegerProduct {
            a: operand.values.at(first * 32),
            scales: operand.scales.at(scales.0),
            sums: operand.sums.at(first),
            rows: rows.len(),
            panel: self.section.bytes(panel).as_ptr(),
            form,
            k_blocks,
            from: k.start,
            until: k.end,
            c: c.as_mut_ptr(),
        };
        // SAFETY: the kernel is this machine's and made for the form; the operand's lines, scales and sums of the group exist (checked by
        // `at`); the panel is a whole one; C is an exclusive slice of the size.
        unsafe { (self.kernel.integers.kernel(form))(&product) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::integer::activations::{Memory, quantize};
    use super::super::tests::model::Noise;
    use super::super::tile::tests::kernels;
    use super::*;
    use crate::device::{DType, Held, HostTensor, RowOrder};
    use crate::host::Arena;
    use crate::source::Source;

    #[test]
    fn integers_in_several_groups_and_blocks_have_the_bits_of_one_row_alone() {
        // 1,184 columns are two blocks of k and a part of one, with an odd number of lines; 576 rows more groups than an item has.
        const COLUMNS: usize = 1184;
        const OUT: usize = 96;
        let (mut arena, mut pool) = (Arena::default(), Pool::new(2, None).unwrap());
        let mut noise = Noise(5);
        let bytes = noise.weights(DType::Bf16, OUT * COLUMNS, 0.1);
        let (shape, order) = (&[OUT, COLUMNS], RowOrder::Plain);
        let host = HostTensor { name: "noise", dtype: DType::Bf16, shape, bytes: &bytes, order, reader: None };
        let sources = [Source::new(&host, 2).unwrap()];
        let weight = Packed::stack(&mut arena, &mut pool, &sources, None, Held::Int8).unwrap();
        let x: Vec<f32> = (0..576 * COLUMNS).map(|_| noise.next() as f32 / (1u32 << 30) as f32 - 1.0).collect();
        let mut product = |kernel: &Kernel, first: usize, rows: usize| {
            let mut memory = Memory::default();
            let integral = memory.operand(Groups::new(rows, kernel.integers.rows_max()), COLUMNS / 32, true);
            for row in 0..rows {
                // SAFETY: one thread.
                unsafe { quantize(&x[(first + row) * COLUMNS..][..COLUMNS], integral.row(row)) };
            }
            let left = Left { half: None, integral: Some(integral) };
            let product = Matmul { kernel, left, weight: &weight, together: 1, added: None };
            let seen = std::sync::Mutex::new(vec![0; rows * OUT]);
            product.run(&mut pool, &mut [Scratch::default(), Scratch::default()], &|finished| {
                for (panel, row, line) in finished.lines() {
                    let to = &mut seen.lock().unwrap()[row * OUT + panel * 32..][..32];
                    to.iter_mut().zip(line).for_each(|(to, value)| *to = value.to_bits());
                }
            });
            seen.into_inner().unwrap()
        };
        for (name, kernel) in kernels() {
            let alone: Vec<Vec<u32>> = [0, 50, 575].map(|row| product(&kernel, row, 1)).into();
            for rows in [40, 70, 576] {
                let all = product(&kernel, 576 - rows, rows);
                for (row, want) in [0, 50, 575].into_iter().zip(&alone).filter(|(row, _)| row + rows >= 576) {
                    assert_eq!(&all[(row + rows - 576) * OUT..][..OUT], want, "{name}, row {row} of {rows}");
                }
            }
        }
    }

    #[test]
    fn rows_larger_than_a_piece_are_multiplied_in_whole_groups() {
        // Sixteen rows are one group on every path, with 1.6 MB of activations.
        const ROWS: usize = 16;
        const COLUMNS: usize = 81_920;
        let (mut arena, mut pool) = (Arena::default(), Pool::new(1, None).unwrap());
        let bytes = [0x80, 0x3f].repeat(COLUMNS);
        let (shape, order) = (&[1, COLUMNS], RowOrder::Plain);
        let host = HostTensor { name: "ones", dtype: DType::Bf16, shape, bytes: &bytes, order, reader: None };
        let sources = [Source::new(&host, 2).unwrap()];
        let weight = Packed::stack(&mut arena, &mut pool, &sources, None, Held::Int8).unwrap();
        for (name, kernel) in kernels() {
            let mut memory = Memory::default();
            let integral = memory.operand(Groups::new(ROWS, kernel.integers.rows_max()), COLUMNS / 32, true);
            assert!(integral.groups.count() * PIECE_BYTES < ROWS * COLUMNS / 32 * 40);
            for row in 0..ROWS {
                // SAFETY: one thread.
                unsafe { quantize(&[1.0 + row as f32; COLUMNS], integral.row(row)) };
            }
            let left = Left { half: None, integral: Some(integral) };
            let product = Matmul { kernel: &kernel, left, weight: &weight, together: 1, added: None };
            let seen = std::sync::Mutex::new(vec![0.0; ROWS]);
            product.run(&mut pool, &mut [Scratch::default()], &|finished| {
                for (_, row, line) in finished.lines() {
                    seen.lock().unwrap()[row] += line[0];
                }
            });
            for (row, sum) in seen.into_inner().unwrap().into_iter().enumerate() {
                let want = (1.0 + row as f32) * COLUMNS as f32;
                assert!((sum / want - 1.0).abs() < 1e-5, "{name}, row {row}: {sum}");
            }
        }
    }
}
