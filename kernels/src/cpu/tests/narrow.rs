//! Codes of 4 and 8 bits: the same bits as the matrix in bf16, expanded and multiplied, on every path and for every number of rows.

use super::model::Noise;
use super::*;
use crate::cpu::narrow::Expander;
use crate::cpu::pack::BLOCK;
use crate::device::{CodeForm, CodeGroups, CodeKind, CodeRows, E4M3, KvFormat, RowReader, WeightSpec};
use crate::source::Source;

/// A matrix of codes.
#[derive(Clone, Debug)]
struct Matrix {
    shape: [usize; 2],
    kind: CodeKind,
    /// Columns of a group, where groups are runs.
    size: usize,
    /// Group of each column, where they are listed.
    list: Option<Vec<[u8; 4]>>,
    codes: Vec<u8>,
    /// Scales, `[rows, groups]`; `zeros` has the same shape.
    scales: Vec<f32>,
    zeros: Vec<u8>,
}

/// Matrix as a device sees it that knows no codes.
#[derive(Debug)]
struct Plain<'a>(&'a Matrix);

impl Matrix {
    /// Random codes and scales of many magnitudes, some of them negative. `size` 0: groups of 32 columns, which are listed in a random order.
    fn new(kind: CodeKind, size: usize, shape: [usize; 2], seed: u64) -> Self {
        let (mut noise, [rows, columns]) = (Noise(seed * 2 + 1), shape);
        let is_listed = size == 0;
        let size = if is_listed { 32 } else { size };
        let groups = columns.div_ceil(size);
        let list = is_listed.then(|| (0..columns).map(|_| (noise.below(groups) as u32).to_le_bytes()).collect());
        let code = |noise: &mut Noise| match kind {
            CodeKind::Four => noise.below(16) as u8,
            CodeKind::Eight => noise.below(256) as u8,
            // Numbers alone.
            CodeKind::Float8 => Some(noise.below(256) as u8).filter(|code| code & 127 != 127).unwrap_or(0x85),
        };
        let codes = (0..rows * columns).map(|_| code(&mut noise)).collect();
        let scale = |noise: &mut Noise| {
            let value = (noise.next() as f32 / (1u32 << 30) as f32 - 1.0) * (noise.below(30) as f32 - 20.0).exp2();
            // As f32, bf16 and f16 have them: the products of short numbers are often in the middle of two of bf16.
            match noise.below(3) {
                0 => value,
                1 => lanes::from_bf16(lanes::to_bf16(value)),
                // Never 0.
                _ => half::f16::from_f32(value.clamp(-60_000.0, 60_000.0)).to_f32() + f32::from_bits(1 << 27),
            }
        };
        let scales = (0..rows * groups).map(|_| scale(&mut noise)).collect();
        let zeros = (0..rows * groups).map(|_| code(&mut noise)).collect();
        Self { shape, kind, size, list, codes, scales, zeros }
    }

    fn groups(&self) -> usize {
        self.shape[1].div_ceil(self.size)
    }

    fn value(&self, row: usize, column: usize) -> f32 {
        let group = self.list.as_ref().map_or(column / self.size, |list| u32::from_le_bytes(list[column]) as usize);
        let at = row * self.groups() + group;
        let code = self.codes[row * self.shape[1] + column];
        match self.kind {
            CodeKind::Float8 => E4M3[usize::from(code)] * self.scales[at],
            CodeKind::Four | CodeKind::Eight => (i32::from(code) - i32::from(self.zeros[at])) as f32 * self.scales[at],
        }
    }

    fn host<'a>(&'a self, reader: &'a dyn RowReader) -> HostTensor<'a> {
        let order = RowOrder::Plain;
        HostTensor { name: "w", dtype: DType::F32, shape: &self.shape, bytes: &[], order, reader: Some(reader) }
    }
}

impl RowReader for Matrix {
    fn read(&self, first: usize, out: &mut [f32]) {
        for (row, out) in (first..).zip(out.chunks_exact_mut(self.shape[1])) {
            out.iter_mut().enumerate().for_each(|(column, out)| *out = self.value(row, column));
        }
    }

    fn integers(&self, _: usize) -> Option<(&[u8], f32)> {
        None
    }

    fn codes(&self) -> Option<CodeForm<'_>> {
        let groups = match &self.list {
            Some(of) => CodeGroups::Listed { of, count: self.groups() },
            None => CodeGroups::Runs(self.size),
        };
        Some(CodeForm { kind: self.kind, groups })
    }

    fn read_codes(&self, first: usize, out: &mut CodeRows<'_>) {
        let (columns, groups) = (self.shape[1], self.groups());
        let rows = out.codes.len() / columns;
        out.codes.copy_from_slice(&self.codes[first * columns..][..rows * columns]);
        out.scales.copy_from_slice(&self.scales[first * groups..][..rows * groups]);
        out.zeros.copy_from_slice(&self.zeros[first * groups..][..rows * groups]);
    }
}

impl RowReader for Plain<'_> {
    fn read(&self, first: usize, out: &mut [f32]) {
        self.0.read(first, out);
    }

    fn integers(&self, _: usize) -> Option<(&[u8], f32)> {
        None
    }
}

/// Kinds with sizes of groups, 0 being listed groups; all are held as codes where `columns` are as many.
fn forms(columns: usize) -> Vec<(CodeKind, usize)> {
    let sizes = [0, 32, 64, 128, columns, columns + 7];
    let all = [CodeKind::Four, CodeKind::Eight, CodeKind::Float8].into_iter();
    all.flat_map(|kind| sizes.map(|size| (kind, size))).filter(|form| *form != (CodeKind::Float8, 0)).collect()
}

/// The matrices below each other, held as codes and in bf16.
fn packed(all: &[&Matrix]) -> [Packed; 2] {
    let (mut arena, mut pool) = (Arena::default(), Pool::new(2, None).unwrap());
    let plain: Vec<Plain<'_>> = all.iter().map(|matrix| Plain(matrix)).collect();
    let order = RowOrder::Pairs { head_dim: 2, plain: 0, rotated: 2 };
    let mut stack = |readers: Vec<&dyn RowReader>| {
        let hosts = all.iter().zip(readers).map(|(matrix, reader)| HostTensor {
            // Rows in pairs come one by one, others all together.
            order: if matrix.shape[0] % 4 == 2 { order } else { RowOrder::Plain },
            ..matrix.host(reader)
        });
        let sources: Vec<Source<'_>> = hosts.map(|host| Source::new(&host, 2).unwrap()).collect();
        Packed::stack(&mut arena, &mut pool, &sources, None, Held::Stored).unwrap()
    };
    [stack(all.iter().map(|matrix| *matrix as _).collect()), stack(plain.iter().map(|plain| plain as _).collect())]
}

/// Checks that what the codes expand to, and what is looked up, is what is held in bf16.
fn check(codes: &Packed, halves: &Packed, what: &str) {
    assert_eq!((codes.sections.len(), codes.panels), (1, halves.panels), "{what}");
    let (section, want) = (&codes.sections[0], &halves.sections[0]);
    let mut out = vec![0; codes.k_blocks * BLOCK];
    for panel in 0..codes.panels {
        let held = section.codes(panel).expect("held as codes");
        let want = want.halves(panel);
        for expander in [Expander::Portable, Expander::best()] {
            for step in [1, 3, codes.k_blocks] {
                out.fill(7);
                for k in (0..codes.k_blocks).step_by(step) {
                    let k = k..codes.k_blocks.min(k + step);
                    expander.expand(&held, k.clone(), &mut out[k.start * BLOCK..k.end * BLOCK]);
                }
                let wrong = out.iter().zip(want).position(|(out, want)| out != want);
                let seen = wrong.map(|at| (at, out[at], want[at]));
                assert_eq!(seen, None, "{what}, {expander:?}, panel {panel}, {step} blocks at once");
            }
        }
    }
    let [mut got, mut want] = [(); 2].map(|()| vec![9.0; codes.k_blocks * 32]);
    for row in 0..codes.rows {
        codes.gather(row, &mut got);
        halves.gather(row, &mut want);
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&want), "{what}, row {row}");
    }
}

#[test]
fn codes_expand_to_the_bits_of_bf16() {
    for (seed, columns) in [5, 32, 41, 64, 141, 160, 330].into_iter().enumerate() {
        for (kind, size) in forms(columns) {
            for rows in [1, 32, 45, 70] {
                let matrix = Matrix::new(kind, size, [rows, columns], (seed * 100 + rows) as u64);
                let what = format!("{kind:?}, groups of {size}, {rows} × {columns}");
                let [codes, halves] = packed(&[&matrix]);
                check(&codes, &halves, &what);
                assert!((0..codes.panels).all(|panel| !codes.sections[0].codes(panel).unwrap().is_odd()), "{what}");
            }
        }
    }
}

#[test]
fn odd_scales_and_codes_that_are_no_numbers_expand_to_the_bits_of_bf16() {
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-40, -3e-39, 1.2e-38, 3e38, -2e38, 1e-36, 1e36];
    for (kind, size) in forms(70) {
        for (at, scale) in odd.into_iter().enumerate() {
            let mut matrix = Matrix::new(kind, size, [45, 70], at as u64);
            let groups = matrix.groups();
            matrix.scales[(at * 3 % 45) * groups] = scale;
            let [codes, halves] = packed(&[&matrix]);
            check(&codes, &halves, &format!("{kind:?}, groups of {size}, scale {scale}"));
        }
    }
    for code in [127, 255] {
        let mut matrix = Matrix::new(CodeKind::Float8, 32, [45, 70], 3);
        matrix.codes[44 * 70 + 69] = code;
        let [codes, halves] = packed(&[&matrix]);
        check(&codes, &halves, &format!("code {code}"));
        assert!(!codes.sections[0].codes(0).unwrap().is_odd() && codes.sections[0].codes(1).unwrap().is_odd());
    }
}

#[test]
fn forms_share_a_section_where_they_are_alike_and_panels_never() {
    let of = |kind, size, rows, seed| Matrix::new(kind, size, [rows, 96], seed);
    let kinds = |all: &[&Matrix]| {
        let [codes, _] = packed(all);
        codes.sections.iter().map(|section| section.is_half()).collect::<Vec<_>>()
    };
    let (four, other) = (of(CodeKind::Four, 32, 45, 1), of(CodeKind::Four, 32, 7, 2));
    assert_eq!(kinds(&[&four, &other]), [false]);
    let (aligned, wide) = (of(CodeKind::Four, 32, 64, 1), of(CodeKind::Four, 96, 9, 2));
    assert_eq!(kinds(&[&aligned, &wide]), [false, false]);
    assert_eq!(kinds(&[&four, &wide]), [true]);
    // Listed groups: the same list, or another one.
    let listed = of(CodeKind::Four, 0, 45, 1);
    let alike = Matrix { list: listed.list.clone(), ..of(CodeKind::Four, 0, 7, 2) };
    assert_eq!(kinds(&[&listed, &alike]), [false]);
    assert_eq!(kinds(&[&listed, &of(CodeKind::Four, 0, 7, 2)]), [true]);
    assert_eq!(kinds(&[&of(CodeKind::Eight, 0, 64, 1), &of(CodeKind::Eight, 0, 7, 2)]), [false, false]);
    // Groups that are no whole blocks are expanded while they are packed.
    assert_eq!(kinds(&[&of(CodeKind::Float8, 40, 45, 1)]), [true]);
    let bytes = |kind, size, rows, columns| CpuDevice::codes_bytes(kind, CodeGroups::Runs(size), rows, columns);
    assert_eq!(bytes(CodeKind::Float8, 40, 45, 96), None);
    // Codes, scales of 4 bytes and zero points of 1 for each group and row of whole panels, and a line of flags for each.
    assert_eq!(bytes(CodeKind::Four, 128, 33, 1024), Some(64 * (512 + 8 * 5) + 2 * 64));
    assert_eq!(bytes(CodeKind::Float8, 128, 64, 1000), Some(64 * (1024 + 8 * 4) + 2 * 64));
    let list = CodeGroups::Listed { of: &[], count: 8 };
    assert_eq!(CpuDevice::codes_bytes(CodeKind::Eight, list, 32, 1024), Some(32 * (1024 + 8 * 5) + 64 + 2048));
}

/// Inputs of the products, several blocks that are expanded at once and a part of one.
const COLUMNS: usize = 330;
/// Rows of the parts of a linear weight, which share panels, and of gate and up.
const PARTS: [usize; 3] = [20, 45, 7];
const INNER: usize = 64;

/// Matrices of one form.
struct All {
    table: Matrix,
    parts: Vec<Matrix>,
    gate: Matrix,
    up: Matrix,
    /// Gate, up and down of each expert.
    experts: Vec<[Matrix; 3]>,
}

impl All {
    fn new(kind: CodeKind, size: usize) -> Self {
        let mut seed = 0;
        let mut list = std::collections::HashMap::new();
        let mut of = |rows: usize, columns: usize| {
            seed += 1;
            let mut matrix = Matrix::new(kind, size, [rows, columns], seed);
            // Matrices that share panels have one order of columns.
            matrix.list = matrix.list.map(|own| list.entry(columns).or_insert(own).clone());
            matrix.scales.iter_mut().for_each(|scale| *scale = scale.signum() * 0.01 + *scale % 0.005);
            matrix
        };
        Self {
            table: of(50, COLUMNS),
            parts: PARTS.map(|rows| of(rows, COLUMNS)).into(),
            gate: of(INNER, COLUMNS),
            up: of(INNER, COLUMNS),
            experts: (0..3).map(|_| [of(INNER, COLUMNS), of(INNER, COLUMNS), of(COLUMNS, INNER)]).collect(),
        }
    }

    /// Outputs of all operations with `rows` rows, as bits.
    fn outputs(&self, device: &mut CpuDevice, as_codes: bool, counts: &[usize]) -> Vec<Vec<u32>> {
        let experts = self.experts.iter().flatten();
        let all: Vec<&Matrix> =
            [&self.table].into_iter().chain(&self.parts).chain([&self.gate, &self.up]).chain(experts).collect();
        let plain: Vec<Plain<'_>> = all.iter().map(|matrix| Plain(matrix)).collect();
        let mut hosts =
            all.iter().zip(&plain).map(|(matrix, plain)| matrix.host(if as_codes { *matrix } else { plain }));
        let mut host = || hosts.next().unwrap();
        let mut load = |spec: WeightSpec<'_>| device.load(&spec, Held::Stored).unwrap();
        let table = load(WeightSpec::Embedding(host()));
        let linear = load(WeightSpec::Linear { parts: (0..3).map(|_| host()).collect(), biases: vec![] });
        let gate_up = load(WeightSpec::GateUp { gate: host(), up: host(), biases: None });
        let bytes: Vec<u8> = (0..3 * COLUMNS).flat_map(|i| ((i % 7) as f32 - 3.0).to_le_bytes()).collect();
        let router = HostTensor { bytes: &bytes, reader: None, shape: &[3, COLUMNS], ..self.table.host(&self.table) };
        let router = load(WeightSpec::Linear { parts: vec![router], biases: vec![] });
        let experts: Vec<_> = (0..3).map(|_| [host(), host(), host()].into()).collect();
        let experts = device.load_experts(&experts, Held::Stored).unwrap();
        let has = |weight: Weight| match &device.weights[weight.0 as usize] {
            Loaded::Matrix(packed) | Loaded::GateUp(packed) | Loaded::Embedding(packed) => packed.sections[0].is_half(),
            _ => unreachable!("not asked"),
        };
        assert_eq!([table, linear, gate_up].map(has), [!as_codes; 3]);
        let rows = |columns| BufferSpec { rows: Rows::Batch, columns };
        let [x, residual] = [0; 2].map(|_| device.buffer(rows(COLUMNS)).unwrap());
        let out = device.buffer(rows(PARTS.iter().sum())).unwrap();
        let (inner, routes) = (device.buffer(rows(INNER)).unwrap(), device.buffer(rows(3)).unwrap());
        device
            .kv(KvSpec { layers: 1, kv_heads: 1, head_dim: 32, latent: None, format: KvFormat::Own, pages: 8 })
            .unwrap();
        let pages: Vec<u32> = (0..8).collect();
        let mut seen = vec![];
        for &count in counts {
            let tokens: Vec<u32> = (0..count).map(|i| (i * 7 % 50) as u32).collect();
            let spans = [Span { rows: 0..count, context: count, block_table: &pages, adapter: None }];
            device.begin(&StepBatch { tokens: &tokens, spans: &spans, sampled: &[], ..Default::default() }).unwrap();
            device.embed(x, table, 1.0);
            device.embed(residual, table, 1.0);
            device.linear(out, x, linear);
            device.gate_up(inner, x, gate_up, Activation::Silu);
            device.route(routes, x, router, &RoutingSpec::softmax(2, true));
            device.experts(residual, x, routes, experts, Activation::Silu);
            for buffer in [x, out, inner, residual] {
                seen.push(device.peek(buffer).iter().map(|value| value.to_bits()).collect());
            }
        }
        seen
    }
}

#[test]
fn products_with_codes_have_the_bits_of_those_with_bf16() {
    // Rows in one group, in a few, and in more than are multiplied block by block of k.
    let counts = [1, 3, 5, 9, 17, 40, 150];
    for (kind, size) in [
        (CodeKind::Four, 32),
        (CodeKind::Four, 0),
        (CodeKind::Four, COLUMNS),
        (CodeKind::Eight, 128),
        (CodeKind::Eight, 0),
        (CodeKind::Float8, 128),
        (CodeKind::Float8, COLUMNS),
    ] {
        let all = All::new(kind, size);
        for threads in [1, 3] {
            let pairs = devices(threads).into_iter().zip(devices(threads));
            for ((path, mut codes), (_, mut halves)) in pairs {
                let [got, want] = [(&mut codes, true), (&mut halves, false)]
                    .map(|(device, as_codes)| all.outputs(device, as_codes, &counts));
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert!(want.iter().any(|bits| *bits != 0), "output {i}");
                    assert!(
                        got == want,
                        "{kind:?} by {size}, {path}, {threads} threads, {} rows, {}",
                        counts[i / 4],
                        i % 4
                    );
                }
            }
        }
    }
}
