//! Integer products of every form: against sums in f64, against each other, and in groups of every height.

use super::super::operand::{Groups, Shared};
use super::super::tests::model::Noise;
use super::activations::{Memory, quantize};
use super::*;
use crate::device::DType;

/// Most rows of a group of any kernel.
const ROWS_MAX: usize = 32;

/// A kernel under test.
#[derive(Clone, Copy)]
struct Set {
    name: &'static str,
    kernel: fn(Form) -> IntegerFn,
    rows_max: usize,
    /// Lines of a part; 0 where a form has none.
    at_once: fn(Form) -> usize,
}

/// Kernels that this machine can run, and those of AMX on a model of its tiles where there is AVX-512.
fn sets() -> Vec<Set> {
    let all = Integers::all(true);
    let mut sets: Vec<Set> = all
        .iter()
        .map(|set| match set {
            Integers::Portable => PORTABLE,
            #[cfg(target_arch = "x86_64")]
            Integers::Avx2 => Set { name: "avx2", kernel: avx2::kernel, rows_max: set.rows_max(), ..PORTABLE },
            #[cfg(target_arch = "x86_64")]
            Integers::Vnni => Set { name: "vnni", kernel: vnni::kernel, rows_max: set.rows_max(), ..PORTABLE },
            #[cfg(target_arch = "x86_64")]
            Integers::Amx => Set { name: "amx", kernel: amx::kernel, ..AMX },
        })
        .collect();
    #[cfg(target_arch = "x86_64")]
    if all.contains(&Integers::Vnni) {
        sets.push(Set { name: "model of amx", kernel: amx::model::kernel, ..AMX });
    }
    sets
}

/// Kernel that states the arithmetic; it takes groups of any height.
const PORTABLE: Set = Set { name: "portable", kernel: |_| portable::product, rows_max: ROWS_MAX, at_once: |_| 0 };

#[cfg(target_arch = "x86_64")]
const AMX: Set = Set { at_once: |form| Integers::Amx.lines_at_once(form), ..PORTABLE };

/// A panel in one format, its weights as f32, and rows of activations.
struct Case {
    form: Form,
    panel: Vec<[u64; 8]>,
    /// Weights, `[32 columns][32 · k_blocks]`.
    weights: Vec<Vec<f32>>,
    x: Vec<Vec<f32>>,
    k_blocks: usize,
}

fn forms() -> Vec<(Form, Option<DType>)> {
    let of = |dtype| Layout::of(dtype).map(|layout| (Form::Blocks(layout), Some(dtype)));
    DType::ALL.into_iter().filter_map(of).chain([(Form::Rows, None)]).collect()
}

impl Case {
    fn new(form: Form, dtype: Option<DType>, k_blocks: usize, seed: u64) -> Self {
        let (mut noise, columns) = (Noise(seed), k_blocks * 32);
        let size = form.panel_bytes(k_blocks).unwrap();
        let mut panel = vec![[0u64; 8]; size.div_ceil(64)];
        // SAFETY: as many bytes as the panel has, borrowed for the lines below.
        let bytes = unsafe { std::slice::from_raw_parts_mut(panel.as_mut_ptr().cast::<u8>(), size) };
        let weights = (0..32)
            .map(|n| {
                let mut weights = vec![0.0; columns];
                if let Some(dtype) = dtype {
                    let row = noise.weights(dtype, columns, 0.1);
                    let mut blocks = RowBlocks::default();
                    blocks.decode(dtype, columns, &row);
                    blocks.to_f32(form.layout(), &mut weights);
                    form.scatter(bytes, n, &blocks);
                } else {
                    let values: Vec<i8> = (0..columns).map(|_| (noise.below(255) as i32 - 127) as i8).collect();
                    weights.iter_mut().zip(&values).for_each(|(w, v)| *w = 0.25 * f32::from(*v));
                    form.scatter_row(bytes, n, &values, 0.25);
                }
                weights
            })
            .collect();
        let mut value = || (noise.next() as f32 / (1u32 << 30) as f32 - 1.0) * (noise.below(9) as f32 - 4.0).exp2();
        let x = (0..ROWS_MAX).map(|_| (0..columns).map(|_| value()).collect()).collect();
        Self { form, panel, weights, x, k_blocks }
    }

    fn bytes(&self) -> &[u8] {
        let size = self.form.panel_bytes(self.k_blocks).unwrap();
        // SAFETY: the panel has as many bytes, borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.panel.as_ptr().cast(), size) }
    }

    /// C of rows `from..from + count`, all lines at once.
    fn run(&self, set: Set, from: usize, count: usize) -> Vec<f32> {
        self.run_by(set, from, count, self.k_blocks)
    }

    /// C of rows `from..from + count`, `at_once` lines at a time.
    fn run_by(&self, set: Set, from: usize, count: usize, at_once: usize) -> Vec<f32> {
        let mut memory = Memory::default();
        let groups = Groups::new(count, ROWS_MAX);
        let operand = memory.operand(groups, self.k_blocks, self.form == Form::Rows);
        for row in 0..count {
            // SAFETY: one thread.
            unsafe { quantize(&self.x[from + row], operand.row(row)) };
        }
        let mut c = vec![f32::NAN; count * 32];
        let mut product = IntegerProduct {
            a: operand.values.at(0),
            scales: operand.scales.at(0),
            sums: operand.sums.at(0),
            rows: count,
            panel: self.bytes().as_ptr(),
            form: self.form,
            k_blocks: self.k_blocks,
            from: 0,
            until: 0,
            c: Shared::new(&mut c).at(0),
        };
        for first in (0..self.k_blocks).step_by(at_once) {
            (product.from, product.until) = (first, self.k_blocks.min(first + at_once));
            // SAFETY: the machine has the kernel; the operand and C have the sizes that `IntegerFn` asks; parts follow each other.
            unsafe { (set.kernel)(self.form)(&product) };
        }
        c
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn weights_come_back_from_the_packed_layout() {
    for (form, dtype) in forms() {
        let case = Case::new(form, dtype, 16, 3);
        for (n, want) in case.weights.iter().enumerate() {
            let mut got = vec![f32::NAN; want.len()];
            form.gather(case.bytes(), n, &mut got);
            assert_eq!(bits(&got), bits(want), "{dtype:?}, column {n}");
        }
    }
}

#[test]
fn products_are_right_in_every_form() {
    for (form, dtype) in forms() {
        for seed in 0..4 {
            let case = Case::new(form, dtype, 24, seed);
            for set in sets() {
                for (i, got) in case.run(set, 0, 5).iter().enumerate() {
                    let (x, weights) = (&case.x[i / 32], &case.weights[i % 32]);
                    // The products are exact up to the rounding of x: half a step of its line's or row's largest.
                    let line = if form == Form::Rows { x.len() } else { 32 };
                    let (mut want, mut bound) = (0.0f64, 0.0f64);
                    for (x, w) in x.chunks(line).zip(weights.chunks(line)) {
                        let step = f64::from(x.iter().fold(0.0f32, |peak, x| peak.max(x.abs()))) / 127.0;
                        for (x, w) in x.iter().zip(w) {
                            want += f64::from(*x) * f64::from(*w);
                            bound += f64::from(w.abs()) * step * 0.51;
                        }
                    }
                    let far = (f64::from(*got) - want).abs();
                    assert!(far <= bound, "{dtype:?} {} [{i}]: {got} {want}, {bound}", set.name);
                    assert!(bound > 0.0);
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_every_height_and_kernel() {
    for (form, dtype) in forms() {
        // K-quants have scales of eight lines; others may have any number of lines, as MXFP4's 90 of 2,880 columns.
        let odd = if form.layout().lines == 1 { &[1, 2, 3, 7, 18, 90][..] } else { &[] };
        for &k_blocks in [8, 40].iter().chain(odd) {
            let case = Case::new(form, dtype, k_blocks, 7);
            let want = bits(&case.run(PORTABLE, 0, ROWS_MAX));
            for set in sets() {
                for count in 1..=set.rows_max {
                    let from = ROWS_MAX - count;
                    let got = bits(&case.run(set, from, count));
                    assert!(got == want[from * 32..], "{dtype:?}, {}, {count} rows of {k_blocks} lines", set.name);
                }
            }
        }
    }
}

#[test]
fn parts_of_a_product_add_up_to_the_same_bits() {
    for set in sets().into_iter().filter(|set| (set.at_once)(Form::Rows) > 0) {
        let at_once = (set.at_once)(Form::Rows);
        for k_blocks in [1, 15, 16, 17, 18, 32, 33, 49, 90] {
            let case = Case::new(Form::Rows, None, k_blocks, 11);
            let want = bits(&case.run(PORTABLE, 0, ROWS_MAX));
            for count in [1, 5, 16, 17, 31, 32] {
                let got = bits(&case.run_by(set, 0, count, at_once));
                assert!(got == want[..count * 32], "{}, {count} rows of {k_blocks} lines", set.name);
            }
        }
    }
}

#[test]
fn extreme_values_do_not_overflow() {
    // All weights at the ends of their ranges, all activations at theirs.
    for (form, dtype) in forms() {
        let Some(dtype) = dtype else { continue };
        for byte in [0u8, 0x77, 0x80, 0xff] {
            let (columns, (values, size)) = (512, dtype.block());
            let mut row = vec![byte; columns / values * size];
            let scale = half::f16::from_f32(0.5).to_le_bytes();
            for block in row.chunks_exact_mut(size) {
                match dtype {
                    DType::Q2K => block[80..84].copy_from_slice(&[scale, scale].concat()),
                    DType::Q3K | DType::Q6K => block[size - 2..].copy_from_slice(&scale),
                    DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => {
                        block[..4].copy_from_slice(&[scale, scale].concat());
                    }
                    DType::Mxfp4 => block[0] = 126,
                    _ => block[..2].copy_from_slice(&scale),
                }
            }
            let mut case = Case::new(form, Some(dtype), columns / 32, 1);
            let mut blocks = RowBlocks::default();
            blocks.decode(dtype, columns, &row);
            let bytes = case.panel.len() * 64;
            case.panel.fill([0; 8]);
            // SAFETY: the panel's own bytes.
            let panel = unsafe { std::slice::from_raw_parts_mut(case.panel.as_mut_ptr().cast::<u8>(), bytes) };
            (0..32).for_each(|n| form.scatter(panel, n, &blocks));
            for sign in [1.0, -1.0] {
                case.x.iter_mut().for_each(|x| x.fill(sign * 3.0));
                let want = case.run(PORTABLE, 0, ROWS_MAX);
                assert!(want.iter().all(|value| value.is_finite()));
                for set in sets() {
                    let got = case.run(set, 0, set.rows_max);
                    assert_eq!(bits(&got), bits(&want[..set.rows_max * 32]), "{dtype:?} {} {byte:#x}", set.name);
                }
            }
        }
    }
}
