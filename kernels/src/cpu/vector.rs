//! Elementwise functions between the matrix products, written once over [`Lanes`] and compiled per instruction set
//! into a table.
//!
//! Sums run over sixteen lanes in one fixed structure, so a row's bits depend neither on the path nor on its
//! neighbours.

use super::integer::activations::{self, IntegralRow};
use super::lanes::{Array, Lanes, highest, sum};
use super::math::{clamped_swiglu, exp, gelu_erf, gelu_tanh, silu, soft_capped, tanh};
use super::operand::{RowLines, RowOut};
use crate::device::{Activation, ExpertGroups, RoutingSpec, Scoring};

/// Scores of one group of rows over some pages of one split, with the outputs of the softmax. See
/// [`VectorOps::softmax`].
pub(super) struct Scores<'a> {
    /// Products q·k, `[pages][rows][32]`; overwritten by the softmax.
    pub(super) scores: &'a mut [f32],
    /// Softmax weights `e^(score − highest)` in bf16, not divided by their sum, `[pages][rows][32]`.
    pub(super) weights: &'a mut [u16],
    pub(super) scale: f32,
    /// Soft cap of the scaled products.
    pub(super) soft_cap: Option<f32>,
    /// Numbers that are added to the capped products.
    pub(super) offsets: Option<Offsets<'a>>,
    /// Tokens that each row sees, `[rows]`, counted from the first token of the first page.
    pub(super) visible: &'a [std::ops::Range<usize>],
    /// Maximum of each row's scaled attention scores over these pages, `[rows]`; -inf if all tokens of these pages are
    /// masked for the row.
    pub(super) highest: &'a mut [f32],
    /// Sum of each row's weights, `[rows]`.
    pub(super) sums: &'a mut [f32],
    /// Scales of the keys and of the values of each page, where the cache keeps integers: the products are those of the integers, and the weights are
    /// written times the scales of the values.
    pub(super) scales: Option<&'a [&'a PageScales]>,
}

/// Scales of one page and head: of the keys of 32 tokens, and of their values.
pub(super) type PageScales = [[f32; 16]; 4];

/// Numbers that are added to scores by the offset from query to key: [`crate::device::OffsetBias`].
pub(super) struct Offsets<'a> {
    /// Numbers of all heads, `[heads][width]`; the middle one is that of the query's own position.
    pub(super) values: &'a [f32],
    pub(super) width: usize,
    /// Query head of each row, and offset from its position to the first token of the first page, `[rows]`.
    pub(super) places: &'a [(usize, isize)],
}

impl Offsets<'_> {
    /// Numbers of a row for sixteen tokens from `first` on.
    #[inline(always)]
    fn lane(&self, row: usize, first: usize) -> [f32; 16] {
        let (head, offset) = self.places[row];
        let values = &self.values[head * self.width..][..self.width];
        let begin = offset + first as isize + (self.width / 2) as isize;
        if let Ok(begin) = usize::try_from(begin)
            && let Some(lane) = values.get(begin..).and_then(|rest| rest.first_chunk())
        {
            return *lane;
        }
        let mut lane = [0.0; 16];
        for (i, value) in lane.iter_mut().enumerate() {
            *value = values[(begin + i as isize).clamp(0, self.width as isize - 1) as usize];
        }
        lane
    }
}

/// Softmax state of some rows of one head: `values` is `[head_dim / 32][rows][32]`, not yet divided by `sums`.
pub(super) struct Partial<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) highest: &'a mut [f32],
    pub(super) sums: &'a mut [f32],
}

/// Defines the table, and one instance of each function per instruction set.
macro_rules! vector_ops {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*);)*) => {
        /// Functions of one instruction set. All sets give the same bits.
        ///
        /// # Safety
        /// Each function: the machine has the table's instruction set (`ops` sees to it), and lines of an operand that it is
        /// given to write are nobody else's.
        pub(super) struct VectorOps {
            $($(#[$doc])* pub(super) $name: unsafe fn($($arg: $type),*),)*
        }

        #[cfg(target_arch = "x86_64")]
        mod avx512 {
            use super::*;
            $(
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                pub(super) unsafe fn $name($($arg: $type),*) {
                    super::$name::<super::super::lanes::Zmm>($($arg),*)
                }
            )*
            pub(super) static OPS: VectorOps = VectorOps { $($name),* };
        }

        #[cfg(target_arch = "x86_64")]
        mod avx2 {
            use super::*;
            $(
                #[target_feature(enable = "avx2,fma")]
                pub(super) unsafe fn $name($($arg: $type),*) {
                    super::$name::<Array>($($arg),*)
                }
            )*
            pub(super) static OPS: VectorOps = VectorOps { $($name),* };
        }

        mod baseline {
            use super::*;
            $(
                pub(super) unsafe fn $name($($arg: $type),*) {
                    super::$name::<Array>($($arg),*)
                }
            )*
            pub(super) static OPS: VectorOps = VectorOps { $($name),* };
        }
    };
}

vector_ops! {
    /// RMS norm `out = x / rms(x) · weight` for one row. `x`, `weight`: `[32 · k_blocks]`, zero beyond `columns`.
    fn rmsnorm(x: &[f32], weight: &[f32], columns: usize, eps: f32, out: RowOut);
    /// Converts one row to bf16.
    fn narrow(x: &[f32], out: RowLines);
    /// Rounds one row to integers of 8 bits.
    fn quantize(x: &[f32], out: IntegralRow);
    /// Adds a tile: `values += tile (+ bias)`, 32 columns of one row.
    fn add(values: &mut [f32; 32], tile: &[f32; 32], bias: Option<&[f32; 32]>);
    /// Adds a weighted tile: `values += weight · (tile (+ bias))`, 32 columns of one row.
    fn add_weighted(values: &mut [f32; 32], tile: &[f32; 32], bias: Option<&[f32; 32]>, weight: f32);
    /// Converts one row of an operand to f32. `out`: `[32 · k_blocks]`.
    fn widen(x: RowLines, out: &mut [f32]);
    /// Products of one row with [`RANKS`] rows of a low-rank matrix, times `scales`. `x`: `[32 · k_blocks]`; `a`: bf16
    /// `[k / 16][RANKS][16]`.
    fn project(x: &[f32], a: &[u16], scales: &[f32; RANKS], out: &mut [f32; RANKS]);
    /// Low-rank addition to sixteen columns of one row: `values += Σ low[r] · b[r]`. `b`: bf16 `[low.len()][16]`.
    fn add_low_rank(values: &mut [f32; 16], b: &[u16], low: &[f32]);
    /// Makes the logits of one row's experts their weights, 0 for those not chosen. `values`: padded to 32 columns.
    /// `correction`: [`RoutingSpec::correction`], padded too.
    fn route(values: &mut [f32], experts: usize, routing: &RoutingSpec, correction: Option<&[f32]>);
    /// Gated MLP: `activation(gate (+ bias)) · (up (+ bias))`, or the activation of both, of sixteen columns, from `column` on.
    /// The row is passed by reference: a copy of one just made is read in wider pieces than it was written in, and waits for all stores before it.
    fn gate_up(tile: &[f32; 32], bias: Option<&[f32; 32]>, activation: Activation, column: usize, out: &RowOut);
    /// Activation of a tile: `activation(tile (+ bias))` of 32 columns, from `column` on.
    fn activate(tile: &[f32; 32], bias: Option<&[f32; 32]>, activation: Activation, column: usize, out: &RowOut);
    /// Layer norm of one row. `x`, `weight`, `bias`: `[32 · k_blocks]`, zero beyond `columns`.
    fn layer_norm(x: &[f32], weight: &[f32], bias: Option<&[f32]>, columns: usize, eps: f32, out: RowOut);
    /// Layer norm of one row, in place.
    fn layer_norm_in_place(values: &mut [f32], weight: &[f32], bias: Option<&[f32]>, columns: usize, eps: f32);
    /// Adds rows of the same length, a multiple of 16: `values += added`.
    fn add_row(values: &mut [f32], added: &[f32]);
    /// Adds a normed row: `values += x / rms(x) · weight`. All: `[32 · k_blocks]`, zero beyond `columns`.
    fn norm_add(values: &mut [f32], x: &[f32], weight: &[f32], columns: usize, eps: f32);
    /// Multiplies a row; its length is a multiple of 16.
    fn scale(values: &mut [f32], factor: f32);
    /// Soft cap of each value.
    fn soft_cap(values: &mut [f32; 32], cap: f32);
    /// RMS norm of one head, in place. `values`: zero beyond `dim`, both slices padded to 32.
    fn head_norm(values: &mut [f32], weight: &[f32], dim: usize, eps: f32);
    /// Rotates the pairs (i, i + dim/2) of one head. `turn`: cosines and sines, `[dim / 2]` each.
    fn rotate(values: &mut [f32], turn: (&[f32], &[f32]));
    /// Converts to bf16; equal lengths, multiples of 16.
    fn narrow_slice(x: &[f32], out: &mut [u16]);
    /// Rounds a key or value to integers and their scale; equal lengths, multiples of 32.
    fn round_row(x: &[f32], out: &mut [i8], scale: &mut f32);
    /// Converts integers to bf16, exactly; equal lengths, multiples of 32.
    fn expand(codes: &[i8], out: &mut [u16]);
    /// Softmax weights of one split, relative to the split's own maximum.
    fn softmax(s: &mut Scores<'_>);
    /// Merges `part`, a later split of the same rows, into `whole`.
    fn merge(whole: &mut Partial<'_>, part: &Partial<'_>);
    /// Adds a sink's weight to the sum of one row, whose highest score is `highest`.
    fn add_sink(sum: &mut f32, highest: f32, sink: f32);
    /// Writes `values / sum` of one row to columns `column..column + dim` of `out`. `values`: `[dim / 32]` lines,
    /// `stride` f32 apart.
    fn finish_row(values: &[f32], stride: usize, sum: f32, dim: usize, column: usize, out: RowOut);
}

/// Table for a machine with AVX-512, with AVX2 and FMA, or without either.
pub(super) fn ops(avx512: bool, avx2: bool) -> &'static VectorOps {
    #[cfg(target_arch = "x86_64")]
    {
        if avx512 {
            return &avx512::OPS;
        }
        if avx2 {
            return &avx2::OPS;
        }
    }
    let _ = (avx512, avx2);
    &baseline::OPS
}

/// Sum of squares: four accumulators in turn over lines of 64 values, then a tree.
#[inline(always)]
fn square_sum<V: Lanes>(x: &[f32]) -> f32 {
    let mut sums = [V::splat(0.0); 4];
    for (i, lane) in x.as_chunks::<16>().0.iter().enumerate() {
        let v = V::load(lane);
        sums[i % 4] = v.fma(v, sums[i % 4]);
    }
    sum(sums[0].add(sums[1]).add(sums[2].add(sums[3])))
}

#[inline(always)]
fn inverse_rms<V: Lanes>(x: &[f32], columns: usize, eps: f32) -> f32 {
    1.0 / (square_sum::<V>(x) / columns as f32 + eps).sqrt()
}

#[inline(always)]
fn rmsnorm<V: Lanes>(x: &[f32], weight: &[f32], columns: usize, eps: f32, out: RowOut) {
    let inverse = V::splat(inverse_rms::<V>(x, columns, eps));
    let lines = x.as_chunks::<16>().0.iter().zip(weight.as_chunks::<16>().0);
    for (i, (x, w)) in lines.enumerate() {
        // SAFETY: the row is nobody else's (`VectorOps`).
        unsafe { out.put16(i * 16, V::load(x).mul(inverse).mul(V::load(w))) };
    }
}

#[inline(always)]
fn narrow<V: Lanes>(x: &[f32], out: RowLines) {
    for (i, x) in x.as_chunks::<16>().0.iter().enumerate() {
        // SAFETY: the row is nobody else's (`VectorOps`).
        V::load(x).to_bf16(unsafe { out.half(i * 16) });
    }
}

#[inline(always)]
fn quantize<V: Lanes>(x: &[f32], out: IntegralRow) {
    // SAFETY: the row is nobody else's (`VectorOps`).
    unsafe { activations::quantize(x, out) };
}

#[inline(always)]
fn add<V: Lanes>(values: &mut [f32; 32], tile: &[f32; 32], bias: Option<&[f32; 32]>) {
    for (i, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let mut v = V::load(values).add(V::load(&tile.as_chunks::<16>().0[i]));
        if let Some(bias) = bias {
            v = v.add(V::load(&bias.as_chunks::<16>().0[i]));
        }
        v.store(values);
    }
}

#[inline(always)]
fn add_weighted<V: Lanes>(values: &mut [f32; 32], tile: &[f32; 32], bias: Option<&[f32; 32]>, weight: f32) {
    for (i, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let mut added = V::load(&tile.as_chunks::<16>().0[i]);
        if let Some(bias) = bias {
            added = added.add(V::load(&bias.as_chunks::<16>().0[i]));
        }
        added.fma(V::splat(weight), V::load(values)).store(values);
    }
}

/// Rows of a low-rank matrix that [`VectorOps::project`] takes at once: their sums fill half of AVX2's registers.
pub(super) const RANKS: usize = 4;

#[inline(always)]
fn widen<V: Lanes>(x: RowLines, out: &mut [f32]) {
    for (i, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // SAFETY: the row is only read while others read it too (`VectorOps`).
        V::from_bf16(unsafe { x.half(i * 16) }).store(out);
    }
}

#[inline(always)]
fn project<V: Lanes>(x: &[f32], a: &[u16], scales: &[f32; RANKS], out: &mut [f32; RANKS]) {
    let mut sums = [V::splat(0.0); RANKS];
    for (x, a) in x.as_chunks::<16>().0.iter().zip(a.as_chunks::<{ RANKS * 16 }>().0) {
        let x = V::load(x);
        for (sum, a) in sums.iter_mut().zip(a.as_chunks::<16>().0) {
            *sum = V::from_bf16(a).fma(x, *sum);
        }
    }
    for ((out, lanes), scale) in out.iter_mut().zip(sums).zip(scales) {
        *out = sum(lanes) * scale;
    }
}

#[inline(always)]
fn add_low_rank<V: Lanes>(values: &mut [f32; 16], b: &[u16], low: &[f32]) {
    let mut added = V::splat(0.0);
    for (b, &low) in b.as_chunks::<16>().0.iter().zip(low) {
        added = V::from_bf16(b).fma(V::splat(low), added);
    }
    V::load(values).add(added).store(values);
}

/// Most experts that a row may choose.
const CHOSEN_MAX: usize = 64;

#[inline(always)]
fn route<V: Lanes>(values: &mut [f32], experts: usize, routing: &RoutingSpec, correction: Option<&[f32]>) {
    assert!((1..=experts.min(CHOSEN_MAX)).contains(&routing.chosen), "{} of {experts} experts", routing.chosen);
    // A finite logit times 0 is 0; NaN and infinities make the sum NaN.
    let is_finite = values[..experts].iter().map(|logit| logit * 0.0).sum::<f32>() == 0.0;
    // A softmax has the order of its logits; sigmoids are compared as such, with their correction.
    let is_sigmoid = routing.scores == Scoring::Sigmoid;
    if is_sigmoid {
        for lane in values.as_chunks_mut::<16>().0 {
            let (one, x) = (V::splat(1.0), V::load(lane));
            one.div(one.add(exp(V::splat(0.0).sub(x)))).store(lane);
        }
    }
    let choice = |expert: usize| values[expert] + correction.map_or(0.0, |correction| correction[expert]);
    let open = routing.groups.map_or(u64::MAX, |groups| open_groups(&groups, experts / groups.count, &choice));
    let size = routing.groups.map_or(experts, |groups| experts / groups.count);
    // Scores in descending order, equal ones in ascending order of experts.
    let mut best = [(f32::NEG_INFINITY, usize::MAX); CHOSEN_MAX];
    let mut found = 0;
    for expert in (0..experts).filter(|expert| open >> (expert / size) & 1 == 1) {
        let score = choice(expert);
        let mut at = found;
        while at > 0 && score > best[at - 1].0 {
            at -= 1;
        }
        if at < routing.chosen {
            best.copy_within(at..routing.chosen - 1, at + 1);
            best[at] = (score, expert);
            found = (found + 1).min(routing.chosen);
        }
    }
    let chosen = &mut best[..routing.chosen];
    let highest = values[..experts].iter().copied().fold(f32::NEG_INFINITY, f32::max);
    chosen.sort_unstable_by_key(|(_, expert)| *expert);
    let mut total = 0.0;
    if !is_sigmoid {
        values[experts..].fill(f32::NEG_INFINITY);
        let mut all = V::splat(0.0);
        for lane in values.as_chunks_mut::<16>().0 {
            let shares = exp(V::load(lane).sub(V::splat(highest)));
            all = all.add(shares);
            shares.store(lane);
        }
        total = if routing.normalized { 0.0 } else { sum(all) };
    }
    for (share, expert) in &mut *chosen {
        *share = values[*expert];
        total += if routing.normalized { *share } else { 0.0 };
    }
    if is_sigmoid {
        total = if routing.normalized { total + 1e-20 } else { 1.0 };
    }
    values.fill(0.0);
    for (share, expert) in chosen {
        values[*expert] = if is_finite { *share / total * routing.scale } else { f32::NAN };
    }
}

/// Bits of the groups with the largest scores, of `size` experts each; the first ones among equals.
#[inline(always)]
fn open_groups(groups: &ExpertGroups, size: usize, choice: &impl Fn(usize) -> f32) -> u64 {
    assert!(groups.count <= ExpertGroups::MAX && groups.best <= size && size > 0, "{groups:?} of {size} experts");
    let mut scores = [f32::NEG_INFINITY; ExpertGroups::MAX];
    for (group, score) in scores[..groups.count].iter_mut().enumerate() {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for value in (group * size..(group + 1) * size).map(choice) {
            if value > first {
                (first, second) = (value, first);
            } else if value > second {
                second = value;
            }
        }
        *score = if groups.best == 1 { first } else { first + second };
    }
    let mut open = 0u64;
    for _ in 0..groups.chosen {
        let mut best: Option<usize> = None;
        for group in (0..groups.count).filter(|group| open >> group & 1 == 0) {
            if best.is_none_or(|best| scores[group] > scores[best]) {
                best = Some(group);
            }
        }
        open |= best.map_or(0, |best| 1 << best);
    }
    open
}

/// Gate and up of a tile, with their biases.
#[inline(always)]
fn gate_and_up<V: Lanes>(tile: &[f32; 32], bias: Option<&[f32; 32]>) -> (V, V) {
    let (tile, bias) = (tile.as_chunks::<16>().0, bias.map(|bias| bias.as_chunks::<16>().0));
    let (mut gate, mut up) = (V::load(&tile[0]), V::load(&tile[1]));
    if let Some(bias) = bias {
        (gate, up) = (gate.add(V::load(&bias[0])), up.add(V::load(&bias[1])));
    }
    (gate, up)
}

#[inline(always)]
fn gate_up<V: Lanes>(tile: &[f32; 32], bias: Option<&[f32; 32]>, activation: Activation, column: usize, out: &RowOut) {
    let (gate, up) = gate_and_up::<V>(tile, bias);
    let activated = match activation {
        Activation::Silu => silu(gate).mul(up),
        Activation::GeluTanh => gelu_tanh(gate).mul(up),
        Activation::GeluErf => gelu_erf(gate).mul(up),
        Activation::Tanh => tanh(gate).mul(up),
        Activation::ClampedSwiglu { limit, alpha } => clamped_swiglu(gate, up, limit, alpha),
    };
    // SAFETY: the row's columns of this panel are nobody else's (`VectorOps`).
    unsafe { out.put16(column, activated) };
}

#[inline(always)]
fn activate<V: Lanes>(tile: &[f32; 32], bias: Option<&[f32; 32]>, activation: Activation, column: usize, out: &RowOut) {
    let bias = bias.map(|bias| bias.as_chunks::<16>().0);
    for (i, tile) in tile.as_chunks::<16>().0.iter().enumerate() {
        let mut x = V::load(tile);
        if let Some(bias) = bias {
            x = x.add(V::load(&bias[i]));
        }
        let activated = match activation {
            Activation::Silu => silu(x),
            Activation::GeluTanh => gelu_tanh(x),
            Activation::GeluErf => gelu_erf(x),
            Activation::Tanh => tanh(x),
            Activation::ClampedSwiglu { .. } => panic!("ClampedSwiglu needs gate and up together"),
        };
        // SAFETY: the row's columns of this panel are nobody else's (`VectorOps`).
        unsafe { out.put16(column + i * 16, activated) };
    }
}

/// Sum of a row: four accumulators in turn over lines of 64 values, then a tree.
#[inline(always)]
fn row_sum<V: Lanes>(x: &[f32]) -> f32 {
    let mut sums = [V::splat(0.0); 4];
    for (i, lane) in x.as_chunks::<16>().0.iter().enumerate() {
        sums[i % 4] = sums[i % 4].add(V::load(lane));
    }
    sum(sums[0].add(sums[1]).add(sums[2].add(sums[3])))
}

/// Mean of a row of `columns` values, and the inverse of their deviation from it.
#[inline(always)]
fn moments<V: Lanes>(x: &[f32], columns: usize, eps: f32) -> (V, V) {
    let mean = V::splat(row_sum::<V>(x) / columns as f32);
    let mut sums = [V::splat(0.0); 4];
    for (i, lane) in x.as_chunks::<16>().0.iter().enumerate() {
        let v = centred(V::load(lane), mean, columns, i);
        sums[i % 4] = v.fma(v, sums[i % 4]);
    }
    let squares = sum(sums[0].add(sums[1]).add(sums[2].add(sums[3])));
    (mean, V::splat(1.0 / (squares / columns as f32 + eps).sqrt()))
}

/// Lane `i` of a row less the mean; columns beyond the last stay 0.
#[inline(always)]
fn centred<V: Lanes>(lane: V, mean: V, columns: usize, i: usize) -> V {
    lane.sub(mean).keep(mask(&(0..columns), i * 16), 0.0)
}

/// Centred values of lane `i` times the inverse deviation and the weights, with the bias.
#[inline(always)]
fn weighted<V: Lanes>(centred: V, inverse: V, weight: &[f32; 16], bias: Option<&[[f32; 16]]>, i: usize) -> V {
    let normed = centred.mul(inverse).mul(V::load(weight));
    match bias {
        Some(bias) => normed.add(V::load(&bias[i])),
        None => normed,
    }
}

#[inline(always)]
fn layer_norm<V: Lanes>(x: &[f32], weight: &[f32], bias: Option<&[f32]>, columns: usize, eps: f32, out: RowOut) {
    let (mean, inverse) = moments::<V>(x, columns, eps);
    let (weight, bias) = (weight.as_chunks::<16>().0, bias.map(|bias| bias.as_chunks::<16>().0));
    for (i, (lane, weight)) in x.as_chunks::<16>().0.iter().zip(weight).enumerate() {
        let centred = centred(V::load(lane), mean, columns, i);
        // SAFETY: the row is nobody else's (`VectorOps`).
        unsafe { out.put16(i * 16, weighted(centred, inverse, weight, bias, i)) };
    }
}

#[inline(always)]
fn layer_norm_in_place<V: Lanes>(values: &mut [f32], weight: &[f32], bias: Option<&[f32]>, columns: usize, eps: f32) {
    let (mean, inverse) = moments::<V>(values, columns, eps);
    let (weight, bias) = (weight.as_chunks::<16>().0, bias.map(|bias| bias.as_chunks::<16>().0));
    for (i, (lane, weight)) in values.as_chunks_mut::<16>().0.iter_mut().zip(weight).enumerate() {
        let centred = centred(V::load(lane), mean, columns, i);
        weighted(centred, inverse, weight, bias, i).store(lane);
    }
}

#[inline(always)]
fn add_row<V: Lanes>(values: &mut [f32], added: &[f32]) {
    for (values, added) in values.as_chunks_mut::<16>().0.iter_mut().zip(added.as_chunks::<16>().0) {
        V::load(values).add(V::load(added)).store(values);
    }
}

#[inline(always)]
fn norm_add<V: Lanes>(values: &mut [f32], x: &[f32], weight: &[f32], columns: usize, eps: f32) {
    let inverse = V::splat(inverse_rms::<V>(x, columns, eps));
    let lines = x.as_chunks::<16>().0.iter().zip(weight.as_chunks::<16>().0);
    for (values, (x, w)) in values.as_chunks_mut::<16>().0.iter_mut().zip(lines) {
        V::load(values).add(V::load(x).mul(inverse).mul(V::load(w))).store(values);
    }
}

#[inline(always)]
fn scale<V: Lanes>(values: &mut [f32], factor: f32) {
    for values in values.as_chunks_mut::<16>().0 {
        V::load(values).mul(V::splat(factor)).store(values);
    }
}

#[inline(always)]
fn soft_cap<V: Lanes>(values: &mut [f32; 32], cap: f32) {
    for values in values.as_chunks_mut::<16>().0 {
        soft_capped(V::load(values), cap).store(values);
    }
}

#[inline(always)]
fn head_norm<V: Lanes>(values: &mut [f32], weight: &[f32], dim: usize, eps: f32) {
    let inverse = V::splat(inverse_rms::<V>(values, dim, eps));
    for (v, w) in values.as_chunks_mut::<16>().0.iter_mut().zip(weight.as_chunks::<16>().0) {
        V::load(v).mul(inverse).mul(V::load(w)).store(v);
    }
}

#[inline(always)]
fn rotate<V: Lanes>(values: &mut [f32], (cosines, sines): (&[f32], &[f32])) {
    let half = cosines.len();
    let (low, high) = values.split_at_mut(half);
    for (((a, b), c), s) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

#[inline(always)]
fn narrow_slice<V: Lanes>(x: &[f32], out: &mut [u16]) {
    for (x, out) in x.as_chunks::<16>().0.iter().zip(out.as_chunks_mut::<16>().0) {
        V::load(x).to_bf16(out);
    }
}

#[inline(always)]
fn round_row<V: Lanes>(x: &[f32], out: &mut [i8], scale: &mut f32) {
    *scale = activations::round_row(x, out);
}

#[inline(always)]
fn expand<V: Lanes>(codes: &[i8], out: &mut [u16]) {
    for (codes, out) in codes.as_chunks::<32>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        for (code, out) in codes.iter().zip(out) {
            // An integer of 8 bits has no more digits than a bf16.
            *out = (f32::from(*code).to_bits() >> 16) as u16;
        }
    }
}

/// Bits of the lanes of tokens `first..first + 16` that are in `visible`.
#[inline(always)]
fn mask(visible: &std::ops::Range<usize>, first: usize) -> u16 {
    let below =
        |end: usize| if end >= first + 16 { u16::MAX } else { ((1u32 << end.saturating_sub(first)) - 1) as u16 };
    below(visible.end) & !below(visible.start)
}

#[inline(always)]
fn softmax<V: Lanes>(s: &mut Scores<'_>) {
    let rows = s.visible.len();
    let pages = s.scores.len() / (rows * 32);
    for row in 0..rows {
        let at = |page: usize, half: usize| (page * rows + row) * 2 + half;
        let scores = s.scores.as_chunks_mut::<16>().0;
        let weights = s.weights.as_chunks_mut::<16>().0;
        let mut top = V::splat(f32::NEG_INFINITY);
        for page in 0..pages {
            for half in 0..2 {
                let scores = &mut scores[at(page, half)];
                let seen = mask(&s.visible[row], page * 32 + half * 16);
                let mut scaled = V::load(scores);
                if let Some(scales) = s.scales {
                    scaled = scaled.mul(V::load(&scales[page][half]));
                }
                scaled = scaled.mul(V::splat(s.scale));
                if let Some(cap) = s.soft_cap {
                    scaled = soft_capped(scaled, cap);
                }
                if let Some(offsets) = &s.offsets {
                    scaled = scaled.add(V::load(&offsets.lane(row, page * 32 + half * 16)));
                }
                let scaled = scaled.keep(seen, f32::NEG_INFINITY);
                scaled.store(scores);
                top = top.max(scaled);
            }
        }
        let top = highest(top);
        let mut sums = [V::splat(0.0); 2];
        // A row that sees nothing here has weights exp(-inf - 0) = 0, not exp(-inf + inf) = NaN.
        let shift = V::splat(if top == f32::NEG_INFINITY { 0.0 } else { top });
        for page in 0..pages {
            for (half, sum) in sums.iter_mut().enumerate() {
                let weight = exp(V::load(&scores[at(page, half)]).sub(shift));
                *sum = sum.add(weight);
                let weight = match s.scales {
                    Some(scales) => weight.mul(V::load(&scales[page][2 + half])),
                    None => weight,
                };
                weight.to_bf16(&mut weights[at(page, half)]);
            }
        }
        s.highest[row] = top;
        s.sums[row] = sum(sums[0].add(sums[1]));
    }
}

/// Exponential of one value. A function, not a closure: closures in here would be compiled without the kernel's
/// instruction set.
#[inline(always)]
fn exp_one<V: Lanes>(x: f32) -> f32 {
    let mut out = [0.0; 16];
    exp(V::splat(x)).store(&mut out);
    out[0]
}

#[inline(always)]
fn merge<V: Lanes>(whole: &mut Partial<'_>, part: &Partial<'_>) {
    let rows = whole.sums.len();
    let lines = whole.values.len() / (rows * 32);
    for row in 0..rows {
        let (old, new) = (whole.highest[row], part.highest[row]);
        if new == f32::NEG_INFINITY {
            continue;
        }
        let top = if old > new { old } else { new };
        // The first split that a row sees is taken over as it is; `values` holds nothing before.
        let first = old == f32::NEG_INFINITY;
        let (a, b) = (exp_one::<V>(old - top), exp_one::<V>(new - top));
        whole.highest[row] = top;
        whole.sums[row] = if first { part.sums[row] } else { whole.sums[row] * a + part.sums[row] * b };
        let (to, from) = (whole.values.as_chunks_mut::<16>().0, part.values.as_chunks::<16>().0);
        for line in 0..lines {
            for half in 0..2 {
                let at = (line * rows + row) * 2 + half;
                let new = V::load(&from[at]);
                let both = if first { new } else { V::load(&to[at]).mul(V::splat(a)).add(new.mul(V::splat(b))) };
                both.store(&mut to[at]);
            }
        }
    }
}

#[inline(always)]
fn add_sink<V: Lanes>(sum: &mut f32, highest: f32, sink: f32) {
    *sum += exp_one::<V>(sink - highest);
}

#[inline(always)]
fn finish_row<V: Lanes>(values: &[f32], stride: usize, sum: f32, dim: usize, column: usize, out: RowOut) {
    for d in (0..dim).step_by(16) {
        let lane = &values[d / 32 * stride + d % 32..];
        let divided = V::load(lane.first_chunk().expect("lines of 32 values")).div(V::splat(sum));
        if (column + d).is_multiple_of(16) && d + 16 <= dim {
            // SAFETY: the row's columns of this head are nobody else's (`VectorOps`).
            unsafe { out.put16(column + d, divided) };
        } else {
            let mut whole = [0.0; 16];
            divided.store(&mut whole);
            for (i, &value) in whole.iter().enumerate().take(dim - d) {
                // SAFETY: as above, one value.
                unsafe { out.put(column + d + i, value) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_follow_the_visible_range() {
        assert_eq!(mask(&(0..100), 16), u16::MAX);
        assert_eq!(mask(&(0..20), 16), 0b1111);
        assert_eq!(mask(&(18..20), 16), 0b1100);
        assert_eq!(mask(&(0..16), 16), 0);
        assert_eq!(mask(&(40..50), 16), 0);
        assert_eq!(mask(&(5..5), 0), 0);
    }
}
