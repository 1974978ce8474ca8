//! The arithmetic of integer products in plain loops.

use super::{COLUMNS, Form, IntegerProduct, paired};
use crate::blocks::{LINE, from_f16};

/// Product of any form; see [`super::IntegerFn`].
///
/// # Safety
/// As [`super::IntegerFn`].
pub(super) unsafe fn product(p: &IntegerProduct) {
    let bytes = p.form.panel_bytes(p.k_blocks).expect("the panel exists");
    // SAFETY: the caller's promise, for each of the four.
    let panel = unsafe { std::slice::from_raw_parts(p.panel, bytes) };
    // SAFETY: as above.
    let c = unsafe { std::slice::from_raw_parts_mut(p.c, p.rows * COLUMNS) };
    // SAFETY: as above.
    let a = unsafe { std::slice::from_raw_parts(p.a, p.k_blocks * p.rows * LINE) };
    let (c, a) = (c.as_chunks_mut::<COLUMNS>().0, a.as_chunks::<LINE>().0);
    match p.form {
        Form::Rows => {
            // SAFETY: as above.
            let scales = unsafe { std::slice::from_raw_parts(p.scales, p.rows) };
            rows(panel, p.k_blocks, a, scales, c);
        }
        Form::Blocks(_) => {
            // SAFETY: as above.
            let scales = unsafe { std::slice::from_raw_parts(p.scales, p.k_blocks * p.rows) };
            c.as_flattened_mut().fill(0.0);
            for (k, (a, scales)) in a.chunks_exact(p.rows).zip(scales.chunks_exact(p.rows)).enumerate() {
                line(p.form, panel, k, a, scales, c);
            }
        }
    }
}

/// Sums of each half of a line for all columns.
fn sums(weights: &[[i16; COLUMNS]; LINE], a: &[i8; LINE]) -> [[i32; COLUMNS]; 2] {
    let mut sums = [[0i32; COLUMNS]; 2];
    for (k, weights) in weights.iter().enumerate() {
        for (sum, weight) in sums[k / 16].iter_mut().zip(weights) {
            *sum += i32::from(*weight) * i32::from(a[k]);
        }
    }
    sums
}

/// Weights of line `k` less the zero, by k and column.
fn unpack(form: Form, values: &[u8]) -> [[i16; COLUMNS]; LINE] {
    let zero = i32::from(form.layout().zero);
    std::array::from_fn(|k| std::array::from_fn(|n| (form.value(values, n, k) - zero) as i16))
}

fn line(form: Form, panel: &[u8], k: usize, a: &[[i8; LINE]], scales: &[f32], c: &mut [[f32; COLUMNS]]) {
    let (layout, (at, head)) = (form.layout(), form.line_at(k));
    let bits = |at: usize| u16::from_le_bytes([panel[at], panel[at + 1]]);
    let weights = unpack(form, &panel[at + form.sub_bytes()..]);
    // Factor of the half `half` of the line, and of its minimum.
    let sub = |n: usize, half: usize| {
        let at = at + half.min(layout.subs.saturating_sub(1)) * COLUMNS + n;
        match (layout.subs, layout.minimum) {
            (0, _) => (1, 1),
            (_, false) => (i32::from(panel[at] as i8), 1),
            (subs, true) => (i32::from(panel[at] as i8), i32::from(panel[at + subs * COLUMNS])),
        }
    };
    for ((a, &x_scale), c) in a.iter().zip(scales).zip(c) {
        let sums = sums(&weights, a);
        let of_a = [0, 16].map(|from| a[from..from + 16].iter().map(|&x| i32::from(x)).sum::<i32>());
        for (n, c) in c.iter_mut().enumerate() {
            let [first, second] = [sub(n, 0), sub(n, 1)];
            let sum = first.0 * sums[0][n] + second.0 * sums[1][n];
            *c = (sum as f32).mul_add(layout.scale(bits(head + n * 2)) * x_scale, *c);
            if layout.minimum {
                let sum = first.1 * of_a[0] + second.1 * of_a[1];
                *c = (sum as f32).mul_add(from_f16(bits(head + 64 + n * 2)) * x_scale, *c);
            }
        }
    }
}

fn rows(panel: &[u8], k_blocks: usize, a: &[[i8; LINE]], scales: &[f32], c: &mut [[f32; COLUMNS]]) {
    let (values, of_columns) = panel.split_at(panel.len() - COLUMNS * 4);
    for (row, (c, &x_scale)) in c.iter_mut().zip(scales).enumerate() {
        let mut total = [0i32; COLUMNS];
        for (k, values) in values.chunks_exact(LINE * COLUMNS).enumerate() {
            let a = &a[paired(k_blocks, scales.len(), k, row)];
            let [first, second] = sums(&unpack(Form::Rows, values), a);
            for (n, total) in total.iter_mut().enumerate() {
                *total += first[n] + second[n];
            }
        }
        for ((c, total), scale) in c.iter_mut().zip(total).zip(of_columns.as_chunks::<4>().0) {
            *c = total as f32 * (f32::from_le_bytes(*scale) * x_scale);
        }
    }
}
