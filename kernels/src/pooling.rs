//! Rules by which the rows of a text become one.

/// Sampled row as [`Device::pool`](crate::Device::pool) makes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pool {
    /// The row itself.
    #[default]
    Row,
    /// Rows of the span behind the skipped ones, pooled into one row.
    Span {
        /// Rule of the pooling.
        rule: PoolRule,
        /// Number of first rows that are left out, fewer than the span has.
        skipped: usize,
    },
}

impl Pool {
    /// Mean of all rows of a span.
    pub const MEAN: Self = Self::Span { rule: PoolRule::Mean, skipped: 0 };
}

/// Rule by which several rows become one, column by column, in the order of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolRule {
    /// Mean.
    Mean,
    /// Sum over the root of the number of rows.
    RootMean,
    /// Mean in which a row weighs as much as its place in the span, counted from 1 and with the rows that are left out.
    WeightedMean,
    /// Largest value.
    Max,
}

/// Weight of the first of `rows` rows behind `skipped` others, and the sum of the weights of all `rows`, under [`PoolRule::WeightedMean`].
pub(crate) fn weights(skipped: usize, rows: usize) -> (f32, f32) {
    let (first, last) = (skipped + 1, skipped + rows);
    (first as f32, ((first + last) * rows) as f32 / 2.0)
}

/// Larger of two values; NaN if one of the two is NaN.
pub(crate) fn larger(value: f32, other: f32) -> f32 {
    if other > value || other.is_nan() { other } else { value }
}
