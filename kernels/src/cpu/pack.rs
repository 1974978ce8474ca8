//! The right operand: weights packed once, in the layout that every kernel reads.
//!
//! ```text
//! [n / 32 panels][k / 32][2 tiles][16 k-pairs][16 columns][2]   bf16, zero padded, 64-byte aligned, huge pages
//! ```
//!
//! One KiB of it is an AMX B tile, and 64 bytes are an AVX-512 register with two consecutive k of sixteen columns. A
//! panel of one matrix is contiguous, so a product with few rows streams memory. Gate and up share panels: tile 0 has
//! sixteen columns of gate, tile 1 the same sixteen of up. The embedding table looks its rows up in this layout, so a
//! tied head exists once. Weights in integers have panels of their own (`integer/`), with the same columns, and so have codes that products expand
//! to this layout (`narrow/`).
//!
//! Matrices stacked side by side may be stored in different formats (GGUF files mix them): each run of panels of one format is a
//! [`Section`]. Where formats, or lists of groups, would share a panel, the whole weight is expanded to bf16.

use std::ops::Range;

use super::integer::{Form, ROW_COLUMNS_MAX};
use super::lanes::to_bf16;
use super::low_rank::Adapters;
use super::narrow;
use super::operand::Shared;
use super::pool::{Items, Pool};
use super::tile::fetch;
use crate::blocks::{Layout, RowBlocks};
use crate::device::{CodeGroups, DType, Held, KernelError};
use crate::host::{Arena, Frozen};
use crate::source::{CodeMemory, Source};

/// Values in 32 k of one panel.
pub(super) const BLOCK: usize = 1024;

/// Matrix of a linear layer `y = x·Wᵀ`, packed in panels of 32 outputs.
pub(super) struct Packed {
    /// Runs of panels of one format, in order.
    pub(super) sections: Vec<Section>,
    /// Number of panels of all sections.
    pub(super) panels: usize,
    /// Number of columns of x divided by 32, rounded up.
    pub(super) k_blocks: usize,
    /// Number of columns of x: inputs of the layer.
    pub(super) columns: usize,
    /// Number of columns of y: rows of the checkpoint's matrix (of gate alone where gate and up are interleaved).
    pub(super) rows: usize,
    /// Bias, padded to whole panels, in their order of columns.
    pub(super) bias: Option<Vec<f32>>,
    /// Low-rank additions to the product.
    pub(super) adapters: Adapters,
}

/// Panels of one format.
pub(super) struct Section {
    /// Index of the first panel.
    pub(super) first: usize,
    pub(super) panels: usize,
    pub(super) k_blocks: usize,
    values: Values,
}

/// Packed values of a section, one variant per kind of kernel.
enum Values {
    Half(Frozen<u16>),
    Integers(Form, Frozen<u8>),
    Codes(narrow::Form, Frozen<u8>),
}

/// Form of a matrix before it is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Half,
    Integers(Form),
    Codes(narrow::Form),
}

impl Kind {
    fn of(source: &Source<'_>, held: Held) -> Result<Self, KernelError> {
        let stored = Kind::stored(source);
        let kind = rounded(held).filter(|_| !held.keeps(stored.bits())).map_or(stored, Kind::Integers);
        if kind == Kind::Integers(Form::Rows) && source.columns > ROW_COLUMNS_MAX {
            let (name, got) = ("a matrix held as int8".into(), vec![source.rows, source.columns]);
            return Err(KernelError::Shape { name, got, want: format!("at most {ROW_COLUMNS_MAX} columns") });
        }
        Ok(kind)
    }

    /// Form of a matrix that is not rounded.
    fn stored(source: &Source<'_>) -> Self {
        if source.integers(0).is_some() {
            return Kind::Integers(Form::Rows);
        }
        match Layout::of(source.dtype) {
            Some(layout) => Kind::Integers(Form::Blocks(layout)),
            None => narrow::Form::of_source(source).map_or(Kind::Half, Kind::Codes),
        }
    }

    /// Form of panels that matrices of different forms share.
    fn shared(held: Held) -> Self {
        rounded(held).map_or(Kind::Half, Kind::Integers)
    }

    /// Bits per weight, scales not counted.
    fn bits(self) -> u8 {
        match self {
            Kind::Half => 16,
            Kind::Integers(form) => form.bits(),
            Kind::Codes(form) => form.bits(),
        }
    }
}

/// Form of the integers that matrices are rounded to; `None` for those that are held as they are stored.
fn rounded(held: Held) -> Option<Form> {
    match held {
        Held::Int8 => Some(Form::Rows),
        Held::Stored | Held::Int4 | Held::Int8Blocks => held.layout().map(Form::Blocks),
    }
}

/// Bytes of a matrix of `rows` × `columns`, stored as `dtype`, in the form that the device holds it in.
pub(super) fn held_bytes(dtype: DType, held: Held, rows: usize, columns: usize) -> u64 {
    let stored = Layout::of(dtype).map(Form::Blocks);
    let form = rounded(held).filter(|_| !held.keeps(stored.map_or(16, Form::bits))).or(stored);
    let k_blocks = columns.div_ceil(32);
    let panel = form.map_or(k_blocks.checked_mul(BLOCK * 2), |form| form.panel_bytes(k_blocks));
    panel.and_then(|panel| panel.checked_mul(rows.div_ceil(32))).map_or(u64::MAX, |bytes| bytes as u64)
}

/// Source of each column of a panel: a matrix and a row of it; `None` beyond the last.
type Find<'f, 'a> = &'f (dyn Fn(usize, usize) -> Option<(Source<'a>, usize)> + Sync);

impl Packed {
    /// Stacks `parts` (equal columns, checked) along their rows.
    pub(super) fn stack(
        arena: &mut Arena,
        pool: &mut Pool,
        parts: &[Source<'_>],
        bias: Option<Vec<f32>>,
        held: Held,
    ) -> Result<Self, KernelError> {
        let rows = parts.iter().map(|part| part.rows).sum::<usize>();
        let find = |n: usize| {
            let mut n = n;
            parts.iter().find_map(|part| {
                let here = (n < part.rows).then_some((*part, n));
                n = n.wrapping_sub(part.rows);
                here
            })
        };
        let mut packed = Self::new(parts[0].columns, rows);
        for (panels, kind) in runs(parts, held)? {
            packed.add(arena, pool, panels, kind, &|panel, n| find(panel * 32 + n))?;
        }
        packed.bias = bias.map(|mut bias| {
            bias.resize(packed.panels * 32, 0.0);
            bias
        });
        Ok(packed)
    }

    /// Interleaves gate and up, of equal shape (checked).
    pub(super) fn gate_up(
        arena: &mut Arena,
        pool: &mut Pool,
        gate: Source<'_>,
        up: Source<'_>,
        biases: Option<[Vec<f32>; 2]>,
        held: Held,
    ) -> Result<Self, KernelError> {
        let (kind, other) = (Kind::of(&gate, held)?, Kind::of(&up, held)?);
        let kind = if kind == other && list_of(&gate) == list_of(&up) { kind } else { Kind::shared(held) };
        let mut packed = Self::new(gate.columns, gate.rows);
        packed.add(arena, pool, gate.rows.div_ceil(16), kind, &|panel, n| {
            let (source, row) = (if n < 16 { gate } else { up }, panel * 16 + n % 16);
            (row < gate.rows).then_some((source, row))
        })?;
        packed.bias = biases.map(|biases| {
            let column = |n: usize| biases[n % 32 / 16].get(n / 32 * 16 + n % 16).copied().unwrap_or(0.0);
            (0..packed.panels * 32).map(column).collect()
        });
        Ok(packed)
    }

    fn new(columns: usize, rows: usize) -> Self {
        let k_blocks = columns.div_ceil(32);
        Self { sections: Vec::new(), panels: 0, k_blocks, columns, rows, bias: None, adapters: Vec::new() }
    }

    /// Packs `panels` more panels from the rows that `find(panel, n)` names; columns without a row stay zero.
    fn add(
        &mut self,
        arena: &mut Arena,
        pool: &mut Pool,
        panels: usize,
        kind: Kind,
        find: Find<'_, '_>,
    ) -> Result<(), KernelError> {
        let (first, k_blocks) = (self.panels, self.k_blocks);
        let size = |panel: Option<usize>| panel.and_then(|size| size.checked_mul(panels)).unwrap_or(usize::MAX);
        let values = match kind {
            Kind::Half => {
                let count = size(k_blocks.checked_mul(BLOCK));
                Values::Half(arena.hold(count, "a packed weight", |values: &mut [u16]| {
                    fill_halves(pool, values, k_blocks, &|panel, n| find(first + panel, n));
                })?)
            }
            Kind::Integers(form) => {
                let panel_bytes = form.panel_bytes(k_blocks);
                let filled = arena.hold(size(panel_bytes), "a packed weight", |values: &mut [u8]| {
                    let size = panel_bytes.expect("it was allocated");
                    fill_integers(pool, values, form, size, &|panel, n| find(first + panel, n));
                })?;
                Values::Integers(form, filled)
            }
            Kind::Codes(form) => {
                let bytes = size(Some(form.panel_bytes())).saturating_add(form.list_bytes());
                let filled = arena.hold(bytes, "a packed weight", |values: &mut [u8]| {
                    fill_codes(pool, values, form, panels, &|panel, n| find(first + panel, n));
                })?;
                Values::Codes(form, filled)
            }
        };
        self.sections.push(Section { first, panels, k_blocks, values });
        self.panels += panels;
        Ok(())
    }

    /// Biases of the 32 columns of a panel.
    pub(super) fn bias_of(&self, panel: usize) -> Option<&[f32; 32]> {
        self.bias.as_ref().map(|bias| &bias.as_chunks::<32>().0[panel])
    }

    /// True if a product with this weight rounds its activations to integers.
    pub(super) fn has_integers(&self) -> bool {
        self.sections.iter().any(|section| section.form().is_some())
    }

    /// Row `row` of the checkpoint's matrix as f32, zero beyond its columns. `out`: `[32 · k_blocks]`.
    pub(super) fn gather(&self, row: usize, out: &mut [f32]) {
        let panel = row / 32;
        let section = self.sections.iter().rev().find(|section| section.first <= panel).expect("the first has panel 0");
        match &section.values {
            Values::Integers(form, _) => form.gather(section.bytes(panel - section.first), row % 32, out),
            Values::Codes(form, values) => {
                narrow::Panel::new(*form, values, panel - section.first).gather(row % 32, out)
            }
            Values::Half(_) => {
                let start = column_start(row % 32);
                let blocks = section.halves(panel - section.first).as_chunks::<BLOCK>().0;
                for (block, out) in blocks.iter().zip(out.as_chunks_mut::<32>().0) {
                    for (pair, out) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                        let at = start + pair * 32;
                        *out = [
                            f32::from_bits(u32::from(block[at]) << 16),
                            f32::from_bits(u32::from(block[at + 1]) << 16),
                        ];
                    }
                }
            }
        }
    }
}

/// Runs of panels of one kind: one per part where formats differ and parts end with a panel, otherwise one.
fn runs(parts: &[Source<'_>], held: Held) -> Result<Vec<(usize, Kind)>, KernelError> {
    let kinds = parts.iter().map(|part| Kind::of(part, held)).collect::<Result<Vec<_>, _>>()?;
    let rows = parts.iter().map(|part| part.rows).sum::<usize>();
    let list = list_of(&parts[0]);
    if kinds.iter().all(|kind| *kind == kinds[0]) && parts.iter().all(|part| list_of(part) == list) {
        return Ok(vec![(rows.div_ceil(32), kinds[0])]);
    }
    let aligned = parts[..parts.len() - 1].iter().all(|part| part.rows.is_multiple_of(32));
    if !aligned {
        return Ok(vec![(rows.div_ceil(32), Kind::shared(held))]);
    }
    Ok(parts.iter().zip(kinds).map(|(part, kind)| (part.rows.div_ceil(32), kind)).collect())
}

/// Groups of the columns of a matrix of codes, where they are listed. Panels have one list.
fn list_of<'a>(source: &Source<'a>) -> Option<&'a [[u8; 4]]> {
    match source.codes()?.groups {
        CodeGroups::Listed { of, .. } => Some(of),
        CodeGroups::Runs(_) => None,
    }
}

impl Section {
    /// Form of the integers; `None` for bf16, and codes that become bf16.
    pub(super) fn form(&self) -> Option<Form> {
        match self.values {
            Values::Half(_) | Values::Codes(..) => None,
            Values::Integers(form, _) => Some(form),
        }
    }

    /// True if the section is held in bf16.
    pub(super) fn is_half(&self) -> bool {
        matches!(self.values, Values::Half(_))
    }

    /// Codes of panel `panel` of the section, which products expand; `None` for other forms.
    pub(super) fn codes(&self, panel: usize) -> Option<narrow::Panel<'_>> {
        match &self.values {
            Values::Half(_) | Values::Integers(..) => None,
            Values::Codes(form, values) => Some(narrow::Panel::new(*form, values, panel)),
        }
    }

    /// Bytes of one panel as kernels read it, codes expanded.
    pub(super) fn panel_bytes(&self) -> usize {
        match &self.values {
            Values::Half(_) | Values::Codes(..) => self.k_blocks * BLOCK * 2,
            Values::Integers(_, values) => values.len() / self.panels,
        }
    }

    /// The bf16 values of panel `panel` of the section, blocks of 32 k in order.
    pub(super) fn halves(&self, panel: usize) -> &[u16] {
        let Values::Half(values) = &self.values else { panic!("a section of integers or codes has no halves") };
        &values[panel * self.k_blocks * BLOCK..][..self.k_blocks * BLOCK]
    }

    /// The bytes of panel `panel` of the section, for a form of integers.
    pub(super) fn bytes(&self, panel: usize) -> &[u8] {
        let Values::Integers(_, values) = &self.values else { panic!("a section of halves has no bytes") };
        &values[panel * self.panel_bytes()..][..self.panel_bytes()]
    }

    /// Fetches part `part` of `parts` of some bytes of panel `panel`, as far as they exist, into the second-level cache, if it is a panel of integers.
    pub(super) fn fetch_part(&self, panel: usize, bytes: Range<usize>, part: usize, parts: usize) {
        if panel < self.panels && matches!(self.values, Values::Integers(..)) {
            let all = self.bytes(panel);
            let bytes = &all[bytes.start.min(all.len())..bytes.end.min(all.len())];
            let share = bytes.len().div_ceil(parts);
            fetch(&bytes[(part * share).min(bytes.len())..((part + 1) * share).min(bytes.len())]);
        }
    }
}

/// Fills panels of bf16.
fn fill_halves(pool: &mut Pool, values: &mut [u16], k_blocks: usize, find: Find<'_, '_>) {
    let size = k_blocks * BLOCK;
    let (items, values) = (Items::new(values.len() / size), Shared::new(values));
    pool.run(&|_| {
        let mut rows = Vec::new();
        while let Some(panel) = items.take() {
            // SAFETY: borrowed for this run; each panel is one item, so one thread has it.
            let out = unsafe { values.slice(panel * size, size) };
            Source::each_row(32, &mut rows, |n| find(panel, n), |n, row| scatter(out, n, row, k_blocks));
        }
    });
}

/// Fills panels of codes, and the list of groups behind them.
fn fill_codes(pool: &mut Pool, values: &mut [u8], form: narrow::Form, panels: usize, find: Find<'_, '_>) {
    let size = form.panel_bytes();
    let (values, list) = values.split_at_mut(panels * size);
    let codes = find(0, 0).and_then(|(source, _)| source.codes());
    form.write_list(codes.expect("a matrix of codes").groups, list);
    let (items, values) = (Items::new(panels), Shared::new(values));
    pool.run(&|_| {
        let mut memory = CodeMemory::default();
        while let Some(panel) = items.take() {
            // SAFETY: borrowed for this run; each panel is one item, so one thread has it.
            let out = unsafe { values.slice(panel * size, size) };
            form.clear(out);
            Source::each_codes(32, &mut memory, |n| find(panel, n), |n, row| form.scatter(out, n, row));
        }
    });
}

/// Fills panels of integers, `size` bytes each.
fn fill_integers(pool: &mut Pool, values: &mut [u8], form: Form, size: usize, find: Find<'_, '_>) {
    let (items, values) = (Items::new(values.len() / size), Shared::new(values));
    pool.run(&|_| {
        let (mut blocks, mut rows, mut rounded) = (RowBlocks::default(), Vec::new(), Vec::new());
        while let Some(panel) = items.take() {
            // SAFETY: borrowed for this run; each panel is one item, so one thread has it.
            let out = unsafe { values.slice(panel * size, size) };
            let mut to_round = [false; 32];
            for (n, to_round) in to_round.iter_mut().enumerate() {
                let Some((source, index)) = find(panel, n) else { continue };
                match form {
                    Form::Blocks(layout) if Layout::of(source.dtype) == Some(layout) => {
                        blocks.decode(source.dtype, source.columns, source.row(index));
                        form.scatter(out, n, &blocks);
                    }
                    Form::Blocks(_) => *to_round = true,
                    Form::Rows => match source.integers(index) {
                        Some((integers, scale)) => {
                            rounded.clear();
                            rounded.extend(integers.iter().map(|&value| value as i8));
                            form.scatter_row(out, n, &rounded, scale);
                        }
                        None => *to_round = true,
                    },
                }
            }
            let find = |n: usize| to_round[n].then(|| find(panel, n)).flatten();
            Source::each_row(32, &mut rows, find, |n, row| match form {
                Form::Blocks(layout) => {
                    blocks.round(layout, row);
                    form.scatter(out, n, &blocks);
                }
                Form::Rows => {
                    let scale = round_row(row, &mut rounded);
                    form.scatter_row(out, n, &rounded, scale);
                }
            });
        }
    });
}

/// Rounds a row of weights to integers of −127 to 127; returns their scale. A row with a weight that is not finite has the scale NaN.
fn round_row(row: &[f32], out: &mut Vec<i8>) -> f32 {
    out.clear();
    let peak = row.iter().fold(0.0f32, |peak, &w| if w.abs() > peak || w.is_nan() { w.abs() } else { peak });
    if !peak.is_finite() || row.iter().any(|w| w.is_nan()) {
        out.resize(row.len(), 0);
        return f32::NAN;
    }
    // Below, the inverse overflows; such a row has no weight that matters.
    let factor = if peak < 1e-30 { 0.0 } else { 127.0 / peak };
    out.extend(row.iter().map(|w| (w * factor).round_ties_even() as i8));
    peak / 127.0
}

/// Index at which column `n` of a panel begins inside of a block.
fn column_start(n: usize) -> usize {
    n / 16 * 512 + n % 16 * 2
}

/// Writes `row` as column `n` of the panel `out`.
fn scatter(out: &mut [u16], n: usize, row: &[f32], k_blocks: usize) {
    let start = column_start(n);
    for k_block in 0..k_blocks {
        let block = &mut out[k_block * BLOCK..][..BLOCK];
        for (k, &value) in row[k_block * 32..].iter().take(32).enumerate() {
            block[start + k / 2 * 32 + k % 2] = to_bf16(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{HostTensor, RowOrder, RowReader};

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn rows_come_back_from_the_packed_layout() {
        let (n, k) = (45, 50);
        let values: Vec<f32> = (0..n * k).map(|i| (i % 251) as f32 - 100.0).collect();
        let raw = bytes(&values);
        let shapes = [[20, k], [25, k]];
        let order = RowOrder::Plain;
        let part = |shape: &'static [usize], bytes| HostTensor {
            name: "w",
            dtype: DType::F32,
            shape,
            bytes,
            order,
            reader: None,
        };
        let shapes: &'static [[usize; 2]; 2] = Box::leak(Box::new(shapes));
        let sources = [
            Source::new(&part(&shapes[0], &raw[..20 * k * 4]), 2).unwrap(),
            Source::new(&part(&shapes[1], &raw[20 * k * 4..]), 2).unwrap(),
        ];
        let (mut arena, mut pool) = (Arena::default(), Pool::new(2, None).unwrap());
        let packed = Packed::stack(&mut arena, &mut pool, &sources, Some(vec![1.0; n]), Held::Stored).unwrap();
        assert_eq!((packed.panels, packed.k_blocks, packed.rows), (2, 2, n));
        assert_eq!(packed.bias.as_ref().map(Vec::len), Some(64));
        for row in 0..n {
            let mut out = vec![9.0; 64];
            packed.gather(row, &mut out);
            assert_eq!((&out[..k], &out[k..]), (&values[row * k..][..k], &[0.0; 14][..]));
        }
    }

    #[test]
    fn gate_and_up_share_panels() {
        let (gate, up): (Vec<f32>, Vec<f32>) = (0..40).map(|i| (i as f32, 100.0 + i as f32)).unzip();
        let (gate, up) = (bytes(&gate), bytes(&up));
        let order = RowOrder::Plain;
        let tensor = |bytes| HostTensor { name: "w", dtype: DType::F32, shape: &[20, 2], bytes, order, reader: None };
        let source = |bytes| Source::new(&tensor(bytes), 2).unwrap();
        let (mut arena, mut pool) = (Arena::default(), Pool::new(1, None).unwrap());
        let biases = [0.5, 0.25].map(|bias| (0..20).map(|n| bias + n as f32).collect());
        let packed =
            Packed::gate_up(&mut arena, &mut pool, source(&gate), source(&up), Some(biases), Held::Stored).unwrap();
        assert_eq!((packed.panels, packed.k_blocks), (2, 1));
        let pair = |panel: usize, tile: usize, n: usize| &packed.sections[0].halves(panel)[tile * 512 + n * 2..][..2];
        assert_eq!(pair(1, 0, 3), [38.0f32, 39.0].map(to_bf16));
        assert_eq!(pair(1, 1, 3), [138.0f32, 139.0].map(to_bf16));
        assert_eq!(pair(1, 1, 4), [0, 0]);
        let bias = packed.bias.as_ref().unwrap();
        assert_eq!((bias.len(), bias[2], bias[16 + 2], bias[32 + 3]), (64, 2.5, 2.25, 19.5));
        assert_eq!((bias[48 + 3], bias[48 + 4]), (19.25, 0.0));
    }

    /// Integers of a matrix `[rows, columns]` with a scale per row, read as such or as numbers.
    #[derive(Debug)]
    struct Codes {
        columns: usize,
        values: Vec<i8>,
        bytes: Vec<u8>,
        as_rows: bool,
    }

    impl Codes {
        fn new(rows: usize, columns: usize, as_rows: bool) -> Self {
            // Every code, the lowest among them.
            let values: Vec<i8> = (0..rows * columns).map(|i| (i * 89) as u8 as i8).collect();
            let bytes = values.iter().map(|&value| value as u8).collect();
            Self { columns, values, bytes, as_rows }
        }

        fn scale(row: usize) -> f32 {
            (row + 1) as f32 / 512.0
        }

        fn value(&self, row: usize, column: usize) -> f32 {
            f32::from(self.values[row * self.columns + column]) * Self::scale(row)
        }
    }

    impl RowReader for Codes {
        fn read(&self, first: usize, out: &mut [f32]) {
            for (row, out) in (first..).zip(out.chunks_exact_mut(self.columns)) {
                out.iter_mut().enumerate().for_each(|(column, out)| *out = self.value(row, column));
            }
        }

        fn integers(&self, row: usize) -> Option<(&[u8], f32)> {
            let row_of = || &self.bytes[row * self.columns..][..self.columns];
            self.as_rows.then(|| (row_of(), Self::scale(row)))
        }
    }

    #[test]
    fn rows_of_a_reader_are_packed_as_it_gives_them() {
        let (mut arena, mut pool) = (Arena::default(), Pool::new(2, None).unwrap());
        let (shape, order) = ([45, 50], RowOrder::Plain);
        for (as_rows, held) in [(false, Held::Stored), (true, Held::Stored), (true, Held::Int8)] {
            let codes = Codes::new(45, 50, as_rows);
            let of = |order| HostTensor {
                name: "w",
                dtype: DType::F32,
                shape: &shape,
                bytes: &[],
                order,
                reader: Some(&codes),
            };
            let source = |order| Source::new(&of(order), 2).unwrap();
            let pairs = RowOrder::Pairs { head_dim: 15, plain: 3, rotated: 8 };
            let parts = [source(order), source(pairs)];
            let packed = Packed::stack(&mut arena, &mut pool, &parts, None, held).unwrap();
            assert_eq!(packed.has_integers(), as_rows);
            let mut out = vec![0.0; packed.k_blocks * 32];
            for row in 0..90 {
                packed.gather(row, &mut out);
                let stored = if row < 45 { row } else { pairs.stored(row - 45) };
                for (column, got) in out[..50].iter().enumerate() {
                    let want = codes.value(stored, column);
                    // Integers stay what they are, −128 too; other values are rounded to bf16.
                    let near = if as_rows { want } else { f32::from_bits(u32::from(to_bf16(want)) << 16) };
                    assert_eq!(*got, near, "{as_rows}, {held:?}, row {row}, column {column}");
                }
            }
            // Beside a matrix of numbers, integers become numbers too where gate and up share panels.
            let numbers = Codes::new(45, 50, false);
            let up = Source::new(&HostTensor { reader: Some(&numbers), ..of(order) }, 2).unwrap();
            let packed = Packed::gate_up(&mut arena, &mut pool, source(order), up, None, Held::Stored).unwrap();
            assert!(!packed.has_integers());
        }
        let bytes = [0; 4];
        let codes = Codes::new(45, 50, false);
        let odd =
            HostTensor { name: "w", dtype: DType::F32, shape: &shape, bytes: &bytes, order, reader: Some(&codes) };
        assert!(Source::new(&odd, 2).is_err());
        assert!(Source::new(&HostTensor { dtype: DType::Bf16, bytes: &[], ..odd.clone() }, 2).is_err());
        assert!(Source::new(&HostTensor { shape: &[45], bytes: &[], ..odd }, 1).is_err());
    }
}
