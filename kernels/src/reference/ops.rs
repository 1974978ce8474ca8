//! The operations of [`ReferenceDevice`], one function each, in the order of a transformer layer.

use super::{Expert, Loaded, Matrix, ReferenceDevice, round_row};
use crate::device::{
    Activation, AttentionSpec, Buffer, HeadNorms, KvFormat, LogitsSpec, RoutingSpec, Rows, Scoring, Weight,
};
use crate::pooling::{self, PoolRule};
use crate::step::Pooled;

/// Sum of products in one order for every caller: sixteen partial sums, then left to right (so that compilers vectorise it).
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a16, a_tail), (b16, b_tail)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    let mut sums = [0.0f32; 16];
    for (x, y) in a16.iter().zip(b16) {
        for lane in 0..16 {
            sums[lane] += x[lane] * y[lane];
        }
    }
    let tail: f32 = a_tail.iter().zip(b_tail).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f32>() + tail
}

/// Matrix product `out[row][j] = x[row] · matrix[j]`; weights are the outer loop, so that each is read once per step.
fn matmul(x: &[f32], matrix: &Matrix) -> Vec<f32> {
    let rows = x.len() / matrix.columns;
    let mut out = vec![0.0; rows * matrix.rows];
    for j in 0..matrix.rows {
        let weights = matrix.row(j);
        for row in 0..rows {
            out[row * matrix.rows + j] = dot(&x[row * matrix.columns..][..matrix.columns], weights);
        }
    }
    out
}

fn normalise(out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    let mean = dot(x, x) / x.len() as f32;
    let inverse = 1.0 / (mean + eps).sqrt();
    for ((o, &v), &w) in out.iter_mut().zip(x).zip(weight) {
        *o = v * inverse * w;
    }
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// GELU in its approximation by tanh (Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2).
fn gelu_tanh(x: f32) -> f32 {
    let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

/// GELU by the error function, in f64: `erf` is an integral, by Taylor's series where that converges fast and by a continued fraction elsewhere.
fn gelu_erf(x: f32) -> f32 {
    let wide = f64::from(x);
    (wide * 0.5 * erfc(-wide / std::f64::consts::SQRT_2)) as f32
}

/// Complement of the error function (Abramowitz & Stegun 1964, 7.1.5 and 7.1.14); NaN for NaN.
fn erfc(z: f64) -> f64 {
    let (a, square) = (z.abs(), z * z);
    let half = if a < 2.5 {
        // 2/√π · Σ (-1)ⁿ z²ⁿ⁺¹ / (n! (2n + 1))
        let (mut term, mut sum) = (a, a);
        for n in 1..64 {
            term *= -square / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        1.0 - sum * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let fraction = (1..64).rev().fold(a, |below, n| a + f64::from(n) / 2.0 / below);
        (-square).exp() / fraction / std::f64::consts::PI.sqrt()
    };
    if z < 0.0 { 2.0 - half } else { half }
}

/// Function of one value.
fn of_one(x: f32, activation: Activation) -> f32 {
    match activation {
        Activation::Silu => silu(x),
        Activation::GeluTanh => gelu_tanh(x),
        Activation::GeluErf => gelu_erf(x),
        Activation::Tanh => x.tanh(),
        Activation::ClampedSwiglu { .. } => panic!("ClampedSwiglu needs gate and up together"),
    }
}

/// Output of a gated MLP before its last projection.
fn activated(gate: f32, up: f32, activation: Activation) -> f32 {
    match activation {
        Activation::ClampedSwiglu { limit, alpha } => {
            let (gate, up) = (at_most(gate, limit), -at_most(-at_most(up, limit), limit));
            gate / (1.0 + (-alpha * gate).exp()) * (up + 1.0)
        }
        of_gate => of_one(gate, of_gate) * up,
    }
}

/// Minimum of both; a NaN stays one, which `f32::min` would drop.
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

fn soft_capped(x: f32, cap: Option<f32>) -> f32 {
    cap.map_or(x, |cap| cap * (x / cap).tanh())
}

impl ReferenceDevice {
    fn rows_of(&self, buffer: Buffer) -> usize {
        match self.buffers[buffer.0 as usize].domain {
            Rows::Batch => self.step.rows(),
            Rows::Sampled => self.step.sampled.len(),
        }
    }

    /// Copies out the rows of this step, which keeps borrows simple in the oracle.
    pub(super) fn read(&self, buffer: Buffer, columns: usize) -> Vec<f32> {
        let stored = &self.buffers[buffer.0 as usize];
        assert_eq!(stored.columns, columns, "columns of buffer {}", buffer.0);
        stored.values[..self.rows_of(buffer) * columns].to_vec()
    }

    fn write(&mut self, buffer: Buffer, columns: usize, values: &[f32]) {
        let rows = self.rows_of(buffer);
        let stored = &mut self.buffers[buffer.0 as usize];
        assert_eq!((stored.columns, rows * columns), (columns, values.len()), "shape of buffer {}", buffer.0);
        stored.values[..values.len()].copy_from_slice(values);
    }

    fn heads(&self, weight: Weight) -> &[Matrix] {
        let Loaded::Heads(heads) = &self.weights[weight.0 as usize] else {
            panic!("weight {} is not a matrix per head", weight.0)
        };
        heads
    }

    fn vector(&self, weight: Weight) -> &[f32] {
        let Loaded::Vector(values) = &self.weights[weight.0 as usize] else {
            panic!("weight {} is not a vector", weight.0)
        };
        values
    }
}

pub(super) fn embed(device: &mut ReferenceDevice, out: Buffer, table: Weight, scale: f32) {
    let Loaded::Embedding(matrix) = &device.weights[table.0 as usize] else {
        panic!("weight {} is not an embedding", table.0)
    };
    let columns = matrix.columns;
    let rows = device.step.tokens.iter().flat_map(|&token| matrix.row(token as usize));
    let values: Vec<f32> = rows.map(|value| value * scale).collect();
    device.write(out, columns, &values);
}

pub(super) fn add_table(device: &mut ReferenceDevice, residual: Buffer, table: Weight) {
    let Loaded::Table(matrix, index) = &device.weights[table.0 as usize] else {
        panic!("weight {} is not a table", table.0)
    };
    let columns = matrix.columns;
    let mut values = device.read(residual, columns);
    for (row, values) in values.chunks_exact_mut(columns).enumerate() {
        let added = matrix.row(device.step.table_row(row, *index));
        values.iter_mut().zip(added).for_each(|(value, added)| *value += added);
    }
    device.write(residual, columns, &values);
}

pub(super) fn layer_norm(
    device: &mut ReferenceDevice,
    out: Buffer,
    x: Buffer,
    weight: Weight,
    bias: Option<Weight>,
    eps: f32,
) {
    let weight = device.vector(weight);
    let columns = weight.len();
    let bias = bias.map_or_else(|| vec![0.0; columns], |bias| device.vector(bias).to_vec());
    assert_eq!(bias.len(), columns, "values of the bias");
    let mut values = device.read(x, columns);
    for row in values.chunks_exact_mut(columns) {
        let mean = row.iter().sum::<f32>() / columns as f32;
        row.iter_mut().for_each(|value| *value -= mean);
        let inverse = 1.0 / (dot(row, row) / columns as f32 + eps).sqrt();
        for ((value, weight), bias) in row.iter_mut().zip(weight).zip(&bias) {
            *value = *value * inverse * weight + bias;
        }
    }
    device.write(out, columns, &values);
}

pub(super) fn linear_activated(
    device: &mut ReferenceDevice,
    out: Buffer,
    x: Buffer,
    weight: Weight,
    activation: Activation,
) {
    let mut values = projected(device, x, weight);
    values.iter_mut().for_each(|value| *value = of_one(*value, activation));
    let columns = device.buffers[out.0 as usize].columns;
    device.write(out, columns, &values);
}

pub(super) fn pool(device: &mut ReferenceDevice, out: Buffer, x: Buffer) {
    let columns = device.buffers[x.0 as usize].columns;
    let all = device.read(x, columns);
    let mut values = Vec::with_capacity(device.step.sampled.len() * columns);
    for index in 0..device.step.sampled.len() {
        let Pooled { rows, rule, skipped } = device.step.pooled(index);
        let one = |column: usize| {
            let mut column = rows.clone().map(|row| all[row * columns + column]);
            let count = rows.len() as f32;
            match rule {
                PoolRule::Mean => column.sum::<f32>() / count,
                PoolRule::RootMean => column.sum::<f32>() / count.sqrt(),
                PoolRule::WeightedMean => {
                    let (first, all) = pooling::weights(skipped, rows.len());
                    column.zip(0u32..).map(|(value, at)| value * (first + at as f32)).sum::<f32>() / all
                }
                PoolRule::Max => {
                    let first = column.next().expect("a row is left");
                    column.fold(first, pooling::larger)
                }
            }
        };
        values.extend((0..columns).map(one));
    }
    device.write(out, columns, &values);
}

pub(super) fn rmsnorm(device: &mut ReferenceDevice, out: Buffer, x: Buffer, weight: Weight, eps: f32) {
    let columns = device.vector(weight).len();
    let mut values = device.read(x, columns);
    for row in values.chunks_exact_mut(columns) {
        let input = row.to_vec();
        normalise(row, &input, device.vector(weight), eps);
    }
    device.write(out, columns, &values);
}

/// Linear projection with bias of the rows of `x`.
fn projected(device: &ReferenceDevice, x: Buffer, weight: Weight) -> Vec<f32> {
    let (matrix, bias) = match &device.weights[weight.0 as usize] {
        Loaded::Linear { matrix, bias } => (matrix, bias.as_deref()),
        Loaded::Embedding(matrix) => (matrix, None),
        _ => panic!("weight {} is not a matrix", weight.0),
    };
    let input = device.read(x, matrix.columns);
    let mut out = matmul(&input, matrix);
    if device.buffers[x.0 as usize].domain == Rows::Batch {
        for (row, out) in out.chunks_exact_mut(matrix.rows).enumerate() {
            adapt(device, weight, row, &input[row * matrix.columns..][..matrix.columns], out);
        }
    }
    if let Some(bias) = bias {
        add_to_rows(&mut out, bias);
    }
    out
}

/// Adds the low-rank additions of a row's adapter to the outputs of a weight. `input`: the row; `out`: its product, `[outputs]`.
fn adapt(device: &ReferenceDevice, weight: Weight, row: usize, input: &[f32], out: &mut [f32]) {
    let Some(slot) = device.step.adapter_of(row) else { return };
    for part in device.adapters.get(&(weight.0, slot)).into_iter().flatten() {
        let low: Vec<f32> = part.a.chunks_exact(input.len()).map(|a| part.scale * dot(a, input)).collect();
        let added = part.b.chunks_exact(part.rank).map(|b| dot(b, &low));
        out[part.outputs.clone()].iter_mut().zip(added).for_each(|(value, added)| *value += added);
    }
}

fn add_to_rows(values: &mut [f32], bias: &[f32]) {
    for row in values.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
    }
}

pub(super) fn qkv(
    device: &mut ReferenceDevice,
    out: Buffer,
    x: Buffer,
    weight: Weight,
    spec: &AttentionSpec,
    layer: usize,
) {
    let (dim, heads) = (spec.head_dim, spec.heads + 2 * spec.kv_heads);
    let mut projected = projected(device, x, weight);
    assert_eq!(projected.len(), device.step.rows() * heads * dim, "rows of weight {}", weight.0);
    let mut queries = Vec::with_capacity(device.step.rows() * spec.heads * dim);
    for (row, values) in projected.chunks_exact_mut(heads * dim).enumerate() {
        let position = device.step.positions[row];
        let (of_queries, rest) = values.split_at_mut(spec.heads * dim);
        let of_keys = &mut rest[..spec.kv_heads * dim];
        match spec.norms {
            HeadNorms::None => {}
            HeadNorms::Each { query, key } => {
                normalise_each(of_queries, device.vector(query), dim, spec.norm_eps);
                normalise_each(of_keys, device.vector(key), dim, spec.norm_eps);
            }
            HeadNorms::Together { query, key } => {
                normalise_each(of_queries, device.vector(query), spec.heads * dim, spec.norm_eps);
                normalise_each(of_keys, device.vector(key), spec.kv_heads * dim, spec.norm_eps);
            }
        }
        for values in of_queries.chunks_exact_mut(dim).chain(of_keys.chunks_exact_mut(dim)) {
            rotate(device, values, spec, position);
        }
        queries.extend_from_slice(&values[..spec.heads * dim]);
        let (page, slot) = device.step.slot(&device.step.spans[device.step.span_of[row]], position);
        let kv = device.kv.as_mut().expect("kv() is called before qkv()");
        for part in 0..2 {
            for head in 0..spec.kv_heads {
                let from = (spec.heads + part * spec.kv_heads + head) * dim;
                let to = kv.at(layer, page, part, head, slot);
                let stored = &mut kv.values[to..to + dim];
                stored.copy_from_slice(&values[from..from + dim]);
                if kv.spec.format == KvFormat::Int8 {
                    round_row(stored);
                }
            }
        }
    }
    device.write(out, spec.heads * dim, &queries);
}

/// Normalises each run of `count` values with the same weights.
fn normalise_each(values: &mut [f32], weight: &[f32], count: usize, eps: f32) {
    assert_eq!(weight.len(), count, "values of the norm of heads");
    for values in values.chunks_exact_mut(count) {
        let input = values.to_vec();
        normalise(values, &input, weight, eps);
    }
}

/// Rotates the pairs of one head that the table of rotations has; the values behind them stay.
fn rotate(device: &ReferenceDevice, values: &mut [f32], spec: &AttentionSpec, position: usize) {
    let Some(rope) = spec.rope else { return };
    let rope = &device.ropes[rope.0 as usize];
    assert!(2 * rope.half <= values.len(), "rotations of {} values in heads of {}", 2 * rope.half, values.len());
    let (low, high) = values[..2 * rope.half].split_at_mut(rope.half);
    for (i, (a, b)) in low.iter_mut().zip(high).enumerate() {
        let (cosine, sine) = (rope.cosines[position * rope.half + i], rope.sines[position * rope.half + i]);
        (*a, *b) = (*a * cosine - *b * sine, *b * cosine + *a * sine);
    }
}

pub(super) fn latent_keys(device: &mut ReferenceDevice, x: Buffer, norm: Weight, spec: &AttentionSpec, layer: usize) {
    let (latent, dim) = (spec.latent.expect("a latent"), spec.head_dim);
    let mut keys = device.read(x, dim);
    for (row, key) in keys.chunks_exact_mut(dim).enumerate() {
        let position = device.step.positions[row];
        normalise_each(&mut key[..latent], device.vector(norm), latent, spec.norm_eps);
        rotate(device, &mut key[latent..], spec, position);
        let (page, slot) = device.step.slot(&device.step.spans[device.step.span_of[row]], position);
        let kv = device.kv.as_mut().expect("kv() is called before latent_keys()");
        assert_eq!((kv.spec.latent, kv.spec.kv_heads), (Some(latent), 1), "shape of the KV cache");
        let to = kv.at(layer, page, 0, 0, slot);
        kv.values[to..to + dim].copy_from_slice(key);
    }
}

pub(super) fn latent_queries(device: &mut ReferenceDevice, out: Buffer, x: Buffer, keys: Weight, spec: &AttentionSpec) {
    let latent = spec.latent.expect("a latent");
    let heads = device.heads(keys);
    let (plain, turned) = (heads[0].columns, spec.head_dim - latent);
    assert_eq!((heads.len(), heads[0].rows), (spec.heads, latent), "shape of weight {}", keys.0);
    let width = plain + turned;
    let input = device.read(x, spec.heads * width);
    let mut queries = Vec::with_capacity(input.len() / width * spec.head_dim);
    for (i, values) in input.chunks_exact(width).enumerate() {
        let (row, head) = (i / spec.heads, i % spec.heads);
        queries.extend(matmul(&values[..plain], &device.heads(keys)[head]));
        let mut rest = values[plain..].to_vec();
        rotate(device, &mut rest, spec, device.step.positions[row]);
        queries.extend(rest);
    }
    device.write(out, spec.heads * spec.head_dim, &queries);
}

pub(super) fn per_head(device: &mut ReferenceDevice, out: Buffer, x: Buffer, weight: Weight) {
    let heads = device.heads(weight);
    let (columns, outputs) = (heads.len() * heads[0].columns, heads.len() * heads[0].rows);
    let input = device.read(x, columns);
    let rows = input.chunks_exact(columns).flat_map(|row| row.chunks_exact(heads[0].columns).zip(heads));
    let values: Vec<f32> = rows.flat_map(|(values, matrix)| matmul(values, matrix)).collect();
    device.write(out, outputs, &values);
}

pub(super) fn attention(
    device: &mut ReferenceDevice,
    out: Buffer,
    queries: Buffer,
    spec: &AttentionSpec,
    layer: usize,
) {
    let queries = device.read(queries, spec.heads * spec.head_dim);
    let mut values = vec![0.0; device.step.rows() * spec.heads * spec.value_dim()];
    let outputs = values.chunks_exact_mut(spec.value_dim());
    for (i, (query, out)) in queries.chunks_exact(spec.head_dim).zip(outputs).enumerate() {
        attend(device, out, query, i / spec.heads, i % spec.heads, spec, layer);
    }
    device.write(out, spec.heads * spec.value_dim(), &values);
}

/// One query head of one row over its whole context: scores, softmax, weighted sum of values.
fn attend(
    device: &ReferenceDevice,
    out: &mut [f32],
    query: &[f32],
    row: usize,
    head: usize,
    spec: &AttentionSpec,
    layer: usize,
) {
    let kv = device.kv.as_ref().expect("kv() is called before attention()");
    let span = &device.step.spans[device.step.span_of[row]];
    let position = device.step.positions[row];
    let first = spec.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let next = spec.window.map_or(usize::MAX, |window| position.saturating_add(window - 1));
    let last = if spec.causal { position } else { next.min(device.step.context(row) - 1) };
    let kv_head = head / (spec.heads / spec.kv_heads);
    let at = |part, token| {
        let (page, slot) = device.step.slot(span, token);
        &kv.values[kv.at(layer, page, part, kv_head, slot)..]
            [..if part == 0 { spec.head_dim } else { spec.value_dim() }]
    };
    let offset = |token: usize| {
        spec.offsets.map_or(0.0, |bias| {
            let index = (token + bias.reach).saturating_sub(position).min(2 * bias.reach);
            device.vector(bias.values)[head * bias.width() + index]
        })
    };
    let score = |token| soft_capped(dot(query, at(0, token)) * spec.scale, spec.soft_cap) + offset(token);
    let scores: Vec<f32> = (first..=last).map(score).collect();
    let highest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = scores.iter().map(|score| (score - highest).exp()).collect();
    // A sink takes its share of the softmax and gives no value.
    let sink = spec.sinks.map_or(0.0, |sinks| (device.vector(sinks)[head] - highest).exp());
    let total = weights.iter().sum::<f32>() + sink;
    for (token, weight) in (first..=last).zip(&weights) {
        for (o, v) in out.iter_mut().zip(at(1, token)) {
            *o += weight / total * v;
        }
    }
}

pub(super) fn linear_add(device: &mut ReferenceDevice, residual: Buffer, x: Buffer, weight: Weight, scale: f32) {
    let added = projected(device, x, weight);
    let columns = device.buffers[residual.0 as usize].columns;
    let mut values = device.read(residual, columns);
    assert_eq!(values.len(), added.len(), "shape of weight {}", weight.0);
    values.iter_mut().zip(&added).for_each(|(v, a)| *v += a * scale);
    device.write(residual, columns, &values);
}

pub(super) fn linear(device: &mut ReferenceDevice, out: Buffer, x: Buffer, weight: Weight) {
    let values = projected(device, x, weight);
    let columns = device.buffers[out.0 as usize].columns;
    device.write(out, columns, &values);
}

pub(super) fn norm_add(device: &mut ReferenceDevice, residual: Buffer, x: Buffer, weight: Weight, eps: f32) {
    let columns = device.vector(weight).len();
    let (mut values, added) = (device.read(residual, columns), device.read(x, columns));
    let mut normalised = vec![0.0; columns];
    for (row, added) in values.chunks_exact_mut(columns).zip(added.chunks_exact(columns)) {
        normalise(&mut normalised, added, device.vector(weight), eps);
        row.iter_mut().zip(&normalised).for_each(|(value, added)| *value += added);
    }
    device.write(residual, columns, &values);
}

pub(super) fn gate_up(device: &mut ReferenceDevice, out: Buffer, x: Buffer, weight: Weight, activation: Activation) {
    let Loaded::GateUp { gate, up, biases } = &device.weights[weight.0 as usize] else {
        panic!("weight {} is not a gate and an up matrix", weight.0)
    };
    let (input, columns) = (device.read(x, gate.columns), gate.rows);
    let (mut values, mut multiplied) = (matmul(&input, gate), matmul(&input, up));
    for (row, (gated, up)) in values.chunks_exact_mut(columns).zip(multiplied.chunks_exact_mut(columns)).enumerate() {
        let mut both = [&*gated, &*up].concat();
        adapt(device, weight, row, &input[row * gate.columns..][..gate.columns], &mut both);
        gated.copy_from_slice(&both[..columns]);
        up.copy_from_slice(&both[columns..]);
    }
    if let Some([of_gate, of_up]) = biases {
        add_to_rows(&mut values, of_gate);
        add_to_rows(&mut multiplied, of_up);
    }
    values.iter_mut().zip(multiplied).for_each(|(g, u)| *g = activated(*g, u, activation));
    device.write(out, columns, &values);
}

pub(super) fn route(device: &mut ReferenceDevice, out: Buffer, x: Buffer, router: Weight, routing: &RoutingSpec) {
    let logits = projected(device, x, router);
    let experts = device.buffers[out.0 as usize].columns;
    let correction = routing.correction.map(|correction| device.vector(correction));
    let weights: Vec<f32> = logits.chunks_exact(experts).flat_map(|row| routed(row, routing, correction)).collect();
    device.write(out, experts, &weights);
}

/// Weights of one row's experts, 0 for those not chosen.
fn routed(logits: &[f32], routing: &RoutingSpec, correction: Option<&[f32]>) -> Vec<f32> {
    assert!((1..=logits.len()).contains(&routing.chosen), "{} of {} experts", routing.chosen, logits.len());
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (scores, choice): (Vec<f32>, Vec<f32>) = match routing.scores {
        // Logits have the order of their shares, and more bits. Adding 0 makes both zeros equal.
        Scoring::Softmax => logits.iter().map(|logit| ((logit - highest).exp(), logit + 0.0)).unzip(),
        Scoring::Sigmoid => {
            let correction = correction.map_or_else(|| vec![0.0; logits.len()], <[f32]>::to_vec);
            let both = logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).zip(correction);
            both.map(|(score, correction)| (score, score + correction)).unzip()
        }
    };
    let mut order: Vec<usize> = (0..logits.len()).collect();
    if let Some(groups) = routing.groups {
        let size = logits.len() / groups.count;
        let of_group = |group: usize| {
            let mut best = choice[group * size..][..size].to_vec();
            best.sort_by(|a, b| b.total_cmp(a));
            best[..groups.best].iter().sum::<f32>()
        };
        let mut best: Vec<(usize, f32)> = (0..groups.count).map(|group| (group, of_group(group))).collect();
        best.sort_by(|a, b| b.1.total_cmp(&a.1));
        order.retain(|expert| best[..groups.chosen].iter().any(|(group, _)| *group == expert / size));
    }
    // A stable sort, so equal ones stay in ascending order of experts.
    order.sort_by(|&a, &b| choice[b].total_cmp(&choice[a]));
    order.truncate(routing.chosen);
    order.sort_unstable();
    let total: f32 = match (routing.scores, routing.normalized) {
        (Scoring::Softmax, true) => order.iter().map(|&e| scores[e]).sum(),
        (Scoring::Softmax, false) => scores.iter().sum(),
        (Scoring::Sigmoid, true) => order.iter().map(|&e| scores[e]).sum::<f32>() + 1e-20,
        (Scoring::Sigmoid, false) => 1.0,
    };
    let total = if logits.iter().all(|logit| logit.is_finite()) { total } else { f32::NAN };
    let mut weights = vec![0.0; logits.len()];
    order.iter().for_each(|&expert| weights[expert] = scores[expert] / total * routing.scale);
    weights
}

pub(super) fn experts(
    device: &mut ReferenceDevice,
    residual: Buffer,
    x: Buffer,
    routes: Buffer,
    experts: Weight,
    activation: Activation,
) {
    let Loaded::Experts(all) = &device.weights[experts.0 as usize] else {
        panic!("weight {} is not a list of experts", experts.0)
    };
    let (columns, inputs) = (all[0].down.rows, all[0].gate.columns);
    let (input, weights) = (device.read(x, inputs), device.read(routes, all.len()));
    let mut values = device.read(residual, columns);
    for (row, input) in input.chunks_exact(inputs).enumerate() {
        for (index, expert) in all.iter().enumerate() {
            let weight = weights[row * all.len() + index];
            if weight == 0.0 {
                continue;
            }
            let out = output_of(expert, input, activation);
            values[row * columns..][..columns].iter_mut().zip(out).for_each(|(value, y)| *value += weight * y);
        }
    }
    device.write(residual, columns, &values);
}

/// Output of one expert for one row.
fn output_of(expert: &Expert, input: &[f32], activation: Activation) -> Vec<f32> {
    let biased = |mut values: Vec<f32>, bias: usize| {
        if let Some(biases) = &expert.biases {
            add_to_rows(&mut values, &biases[bias]);
        }
        values
    };
    let (mut inner, up) = (biased(matmul(input, &expert.gate), 0), biased(matmul(input, &expert.up), 1));
    inner.iter_mut().zip(up).for_each(|(g, u)| *g = activated(*g, u, activation));
    biased(matmul(&inner, &expert.down), 2)
}

pub(super) fn select(device: &mut ReferenceDevice, out: Buffer, x: Buffer) {
    let columns = device.buffers[x.0 as usize].columns;
    let all = device.read(x, columns);
    let values: Vec<f32> =
        device.step.sampled.iter().flat_map(|&row| &all[row * columns..][..columns]).copied().collect();
    device.write(out, columns, &values);
}

pub(super) fn logits(device: &mut ReferenceDevice, x: Buffer, weight: Weight, spec: LogitsSpec) {
    assert_eq!(device.buffers[x.0 as usize].domain, Rows::Sampled, "logits are of sampled rows");
    let logits = projected(device, x, weight);
    device.logits = logits.into_iter().map(|logit| soft_capped(logit / spec.divisor, spec.soft_cap)).collect();
}

#[cfg(test)]
impl ReferenceDevice {
    /// The rows of a buffer, for tests of other devices.
    pub(crate) fn peek(&self, buffer: Buffer) -> Vec<f32> {
        self.read(buffer, self.buffers[buffer.0 as usize].columns)
    }
}
