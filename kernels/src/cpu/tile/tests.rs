//! Products of every path: against a sum in f64, against each other, against themselves in another shape.

use proptest::prelude::*;

use super::super::detect::PATHS;
use super::super::lanes::{from_bf16, to_bf16};
use super::*;

/// Name of the portable kernel that is compiled for the oldest processors.
pub(in crate::cpu) const WITHOUT_FMA: &str = "portable without fma";

/// Kernels that this machine runs, and the model of AMX.
pub(in crate::cpu) fn kernels() -> Vec<(&'static str, Kernel)> {
    let mut all: Vec<_> = PATHS.iter().filter(|p| p.missing().is_none()).map(|p| (p.name(), kernel(*p))).collect();
    let model = Kernel { run: amx::model_product, rows_max: 32, k_blocks_at_once: 16, ..portable_kernel() };
    all.push(("amx model", model));
    let (integers, expander) = (Integers::Portable, Expander::Portable);
    all.push((WITHOUT_FMA, Kernel { run: portable::product, integers, expander, ..portable_kernel() }));
    all
}

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line<T, const N: usize>([T; N]);

type Half = Line<u16, 32>;
type Single = Line<f32, 16>;

/// Rows by k and columns by k, from a seed, over seven magnitudes.
struct Case {
    a: Vec<[u16; 32]>,
    b: Vec<Half>,
    k_blocks: usize,
}

impl Case {
    fn new(rows: usize, k_blocks: usize, seed: u64) -> Self {
        let mut state = seed.wrapping_mul(2).wrapping_add(1);
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            to_bf16(((state >> 40) as f32 / 8_388_608.0 - 1.0) * ((state >> 33 & 7) as f32 - 3.0).exp2())
        };
        let a = (0..rows * k_blocks).map(|_| std::array::from_fn(|_| next())).collect();
        let b = (0..k_blocks * 32).map(|_| Line(std::array::from_fn(|_| next()))).collect();
        Self { a, b, k_blocks }
    }

    /// C of rows `from..from + count`, in pieces of `k_step` blocks, B given as a list or contiguous.
    fn run(&self, kernel: &Kernel, from: usize, count: usize, k_step: usize, list: bool) -> Vec<f32> {
        let mut c = vec![Line([f32::NAN; 16]); count * 2];
        for k in (0..self.k_blocks).step_by(k_step) {
            let k_blocks = k_step.min(self.k_blocks - k);
            let a: Vec<Half> = (k..k + k_blocks)
                .flat_map(|k| (from..from + count).map(move |r| Line(self.a[r * self.k_blocks + k])))
                .collect();
            let blocks: Vec<*const u16> = (k..k + k_blocks).map(|k| self.b[k * 32..].as_ptr().cast()).collect();
            let b = if list { Blocks::List(&blocks) } else { Blocks::Contiguous(blocks[0]) };
            let product = Product {
                a: a.as_ptr().cast(),
                rows: count,
                b,
                k_blocks,
                c: c.as_mut_ptr().cast::<f32>(),
                accumulate: k > 0,
                ahead: Ahead::Stream,
            };
            // SAFETY: kernels() gives kernels of this machine; the vectors have the sizes and alignment that TileFn asks.
            unsafe { (kernel.run)(&product) };
        }
        c.iter().flat_map(|line: &Single| line.0).collect()
    }

    fn exact(&self, row: usize, column: usize) -> (f64, f64) {
        let mut sum = (0.0, 0.0);
        for k in 0..self.k_blocks * 32 {
            let x = f64::from(from_bf16(self.a[row * self.k_blocks + k / 32][k % 32]));
            let line = &self.b[k / 32 * 32 + column / 16 * 16 + k % 32 / 2];
            let term = x * f64::from(from_bf16(line.0[column % 16 * 2 + k % 2]));
            sum = (sum.0 + term, sum.1 + term.abs());
        }
        sum
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn products_are_right_on_every_path(rows in 1..=32usize, k_blocks in 1..40usize, seed: u64) {
        let case = Case::new(rows, k_blocks, seed);
        for (name, kernel) in kernels() {
            let rows = rows.min(kernel.rows_max);
            let c = case.run(&kernel, 0, rows, k_blocks, false);
            for (i, got) in c.iter().enumerate() {
                let (want, magnitude) = case.exact(i / 32, i % 32);
                // Each of k additions rounds once: at most k·2^-24 of the sum of magnitudes, usually far less.
                let bound = magnitude * (k_blocks * 32) as f64 * 2f64.powi(-24);
                prop_assert!((f64::from(*got) - want).abs() <= bound, "{name} [{i}]: {got} {want}");
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_every_shape(rows in 1..=32usize, k_blocks in 1..40usize, step in 1..20usize, seed: u64) {
        let case = Case::new(rows, k_blocks, seed);
        for (name, kernel) in kernels() {
            let rows = rows.min(kernel.rows_max);
            let whole = case.run(&kernel, 0, rows, k_blocks, false);
            prop_assert_eq!(bits(&whole), bits(&case.run(&kernel, 0, rows, step, true)), "{} in pieces", name);
            let alone = case.run(&kernel, rows - 1, 1, k_blocks, true);
            prop_assert_eq!(bits(&whole[(rows - 1) * 32..]), bits(&alone), "{} alone", name);
        }
    }

    #[test]
    fn a_family_shares_its_bits(rows in 1..=32usize, k_blocks in 1..40usize, seed: u64) {
        let case = Case::new(rows, k_blocks, seed);
        let mut families = std::collections::HashMap::new();
        for (name, kernel) in kernels() {
            for row in [0, rows - 1] {
                let c = bits(&case.run(&kernel, row, 1, k_blocks, false));
                let (first, want) = families.entry((kernel.family, row)).or_insert_with(|| (name, c.clone()));
                prop_assert_eq!(&*want, &c, "{} and {}", first, name);
            }
        }
        prop_assert!(families.keys().any(|(family, _)| *family == CANONICAL));
    }
}

#[test]
fn the_families_differ() {
    // The reason for two numerics strings; if this fails, there is one family and the code can be simplified.
    let case = Case::new(1, 32, 7);
    let of =
        |family| kernels().into_iter().find(|(_, k)| k.family == family).map(|(_, k)| case.run(&k, 0, 1, 32, false));
    if let Some(other) = of("vdpbf16ps") {
        assert_ne!(bits(&other), bits(&of(CANONICAL).unwrap()));
    }
}
