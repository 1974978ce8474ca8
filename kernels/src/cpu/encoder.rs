//! Operations that encoders have beyond those of decoders: tables of positions and types, layer norms, layers with an activation, rules of pooling.

use super::layer::{for_rows, vector_of};
use super::low_rank::Added;
use super::matmul::Matmul;
use super::{Content, CpuDevice, Loaded, Table};
use crate::device::{Activation, Buffer, Rows, TableIndex, Weight};
use crate::pooling::{self, PoolRule};
use crate::source::Source;
use crate::step::Pooled;

impl Table {
    pub(super) fn new(source: Source<'_>, index: TableIndex) -> Self {
        let stride = source.columns.next_multiple_of(32);
        let mut values = vec![0.0; source.rows * stride];
        values.chunks_exact_mut(stride).enumerate().for_each(|(row, out)| source.read(row, &mut out[..source.columns]));
        Self { values, columns: source.columns, index }
    }
}

impl CpuDevice {
    pub(super) fn run_add_table(&mut self, residual: Buffer, table: Weight) {
        let (values, stride) = self.singles(residual);
        let Loaded::Table(table) = &self.weights[table.0 as usize] else { panic!("weight {} is not a table", table.0) };
        let stored = &self.buffers[residual.0 as usize];
        assert_eq!((stored.columns, stored.domain), (table.columns, Rows::Batch), "buffer {}", residual.0);
        let (step, vector) = (&self.step, self.vector);
        for_rows(&mut self.pool, step.rows(), stride, &|row| {
            // SAFETY: borrowed for this operation; each row once.
            let values = unsafe { values.slice(row * stride, stride) };
            let added = &table.values[step.table_row(row, table.index) * stride..][..stride];
            // SAFETY: the table of functions is this machine's.
            unsafe { (vector.add_row)(values, added) };
        });
    }

    pub(super) fn run_layer_norm(&mut self, out: Buffer, x: Buffer, weight: Weight, bias: Option<Weight>, eps: f32) {
        let (columns, rows) = (self.buffers[x.0 as usize].columns, self.rows_of(x));
        assert_eq!(self.rows_of(out), rows, "rows of buffers {} and {}", out.0, x.0);
        let (values, stride) = self.singles(x);
        let to = (out != x).then(|| self.out(out, columns));
        let weight = vector_of(&self.weights, weight, columns);
        let bias = bias.map(|bias| vector_of(&self.weights, bias, columns));
        let vector = self.vector;
        for_rows(&mut self.pool, rows, stride, &|row| {
            // SAFETY: borrowed for this operation; each row once.
            let x = unsafe { values.slice(row * stride, stride) };
            match &to {
                // SAFETY: the table is this machine's; each row once.
                Some(to) => unsafe { (vector.layer_norm)(x, weight, bias, columns, eps, to.row(row)) },
                // SAFETY: the table is this machine's.
                None => unsafe { (vector.layer_norm_in_place)(x, weight, bias, columns, eps) },
            }
        });
    }

    pub(super) fn run_activated(&mut self, out: Buffer, x: Buffer, weight: Weight, activation: Activation) {
        let rows = self.matrix(weight).rows;
        assert_eq!(self.rows_of(out), self.rows_of(x), "rows of buffers {} and {}", out.0, x.0);
        assert_ne!(out, x, "activated in place");
        let (left, low) = (self.left(x, weight), self.project(x, weight));
        // The few sampled rows are those of a head, which may have a norm behind the activation: they stay f32.
        let is_sampled = self.buffers[out.0 as usize].domain == Rows::Sampled;
        let out = if is_sampled { self.singles_out(out, rows) } else { self.out(out, rows) };
        let Loaded::Matrix(packed) = &self.weights[weight.0 as usize] else {
            panic!("weight {} is not linear", weight.0)
        };
        let vector = self.vector;
        let added = Added::new(low, &mut self.low, vector, &self.step, packed);
        let matmul = Matmul { kernel: &self.kernel, left, weight: packed, together: 1, added };
        matmul.run(&mut self.pool, &mut self.scratch, &|piece| {
            for (panel, row, line) in piece.lines() {
                // SAFETY: the table is this machine's; a panel of a row is one thread's.
                unsafe { (vector.activate)(line, packed.bias_of(panel), activation, panel * 32, &out.row(row)) };
            }
        });
    }

    pub(super) fn run_pool(&mut self, out: Buffer, x: Buffer) {
        let (from, to) = (&self.buffers[x.0 as usize], &self.buffers[out.0 as usize]);
        assert_eq!((from.domain, to.domain), (Rows::Batch, Rows::Sampled), "rows of buffers {} and {}", x.0, out.0);
        assert_eq!(from.columns, to.columns, "columns of buffers {} and {}", x.0, out.0);
        self.buffers[out.0 as usize].content = Content::Single;
        let ((from, stride), (to, _)) = (self.singles(x), self.singles(out));
        let (step, vector) = (&self.step, self.vector);
        for index in 0..step.sampled.len() {
            let Pooled { rows, rule, skipped } = step.pooled(index);
            let count = rows.len() as f32;
            let (mut weight, all) = pooling::weights(skipped, rows.len());
            // SAFETY: two buffers, one thread.
            let to = unsafe { to.slice(index * stride, stride) };
            to.fill(if rule == PoolRule::Max { f32::NEG_INFINITY } else { 0.0 });
            for row in rows.clone() {
                // SAFETY: two buffers, one thread; this one is only read.
                let from = unsafe { from.slice(row * stride, stride) };
                let pairs = to.iter_mut().zip(from.iter());
                match rule {
                    // SAFETY: the table is this machine's.
                    PoolRule::Mean | PoolRule::RootMean => unsafe { (vector.add_row)(to, from) },
                    PoolRule::WeightedMean => pairs.for_each(|(to, from)| *to += weight * from),
                    PoolRule::Max => pairs.for_each(|(to, from)| *to = pooling::larger(*to, *from)),
                }
                weight += 1.0;
            }
            let factor = match rule {
                PoolRule::Mean => 1.0 / count,
                PoolRule::RootMean => 1.0 / count.sqrt(),
                PoolRule::WeightedMean => 1.0 / all,
                PoolRule::Max => 1.0,
            };
            if rows.len() > 1 || rule == PoolRule::WeightedMean {
                // SAFETY: the table is this machine's.
                unsafe { (vector.scale)(to, factor) };
            }
        }
    }
}
