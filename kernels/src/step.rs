//! The batch of one step, checked and owned: kept by [`Device::begin`](crate::Device::begin) for the operations after
//! it.

use std::ops::Range;

use crate::device::{AdapterSlot, KernelError, PAGE_TOKENS, StepBatch, TableIndex};
use crate::pooling::{Pool, PoolRule};

/// Sizes of the device's objects, for the checks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) rows_max: usize,
    pub(crate) sampled_max: usize,
    /// Rows of the smallest embedding loaded: token ids of a batch must be below.
    pub(crate) vocab: usize,
    /// Positions of the shortest rope table: contexts of a batch may be no longer.
    pub(crate) positions: usize,
    /// Rows of the smallest table of types: types of a batch must be below.
    pub(crate) types: usize,
    pub(crate) pages: usize,
    /// Number of slots with adapters: those of a batch must be below.
    pub(crate) adapters: usize,
}

impl Bounds {
    pub(crate) fn new(limits: crate::device::Limits) -> Self {
        let (rows_max, sampled_max) = (limits.rows_max, limits.sampled_max);
        Self {
            rows_max,
            sampled_max,
            vocab: usize::MAX,
            positions: usize::MAX,
            types: usize::MAX,
            pages: 0,
            adapters: 0,
        }
    }
}

impl Bounds {
    /// Lowers the bounds to what a table of `rows` rows has.
    pub(crate) fn has_table(&mut self, rows: usize, index: TableIndex) {
        match index {
            TableIndex::Position { first } => self.positions = self.positions.min(rows.saturating_sub(first)),
            TableIndex::Type => self.types = self.types.min(rows),
        }
    }
}

/// Rows that become one.
pub(crate) struct Pooled {
    pub(crate) rows: Range<usize>,
    pub(crate) rule: PoolRule,
    /// Number of rows of the span that are left out, from its first on.
    pub(crate) skipped: usize,
}

/// One sequence's rows in the step; `pages` are read from [`Step::pages`].
#[derive(Clone, Debug)]
pub(crate) struct OwnedSpan {
    pub(crate) rows: Range<usize>,
    pub(crate) adapter: Option<AdapterSlot>,
    table: Range<usize>,
}

/// A step whose every index has been checked. Vectors are reused from step to step.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub(crate) tokens: Vec<u32>,
    pub(crate) spans: Vec<OwnedSpan>,
    pub(crate) sampled: Vec<usize>,
    /// Type of each row, `[rows]`, or empty where all are 0.
    types: Vec<u32>,
    /// Pooling of each sampled row, `[sampled]`; empty: no row is pooled.
    pools: Vec<Pool>,
    /// Position of each row in its sequence, `[rows]`.
    pub(crate) positions: Vec<usize>,
    /// Index of the span to which each row belongs, `[rows]`.
    pub(crate) span_of: Vec<usize>,
    tables: Vec<u32>,
    /// Last step that writes each page, `[pages]`, so that two rows never write the same place.
    written: Vec<u64>,
    count: u64,
}

impl Step {
    /// Block table of `span`, as long as its context needs.
    pub(crate) fn pages(&self, span: &OwnedSpan) -> &[u32] {
        &self.tables[span.table.clone()]
    }

    /// Page and slot of `position` in `span`.
    pub(crate) fn slot(&self, span: &OwnedSpan, position: usize) -> (usize, usize) {
        (self.pages(span)[position / PAGE_TOKENS] as usize, position % PAGE_TOKENS)
    }

    pub(crate) fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Index of the row of a table that the token of `row` has.
    pub(crate) fn table_row(&self, row: usize, index: TableIndex) -> usize {
        match index {
            TableIndex::Position { first } => self.positions[row] + first,
            TableIndex::Type => self.types.get(row).map_or(0, |kind| *kind as usize),
        }
    }

    /// Rows and rule of pooling of sampled row `index`: the rows of its span, or the row alone.
    pub(crate) fn pooled(&self, index: usize) -> Pooled {
        let row = self.sampled[index];
        match self.pools.get(index) {
            None | Some(Pool::Row) => Pooled { rows: row..row + 1, rule: PoolRule::Mean, skipped: 0 },
            Some(&Pool::Span { rule, skipped }) => {
                let Range { start, end } = self.spans[self.span_of[row]].rows;
                Pooled { rows: start + skipped..end, rule, skipped }
            }
        }
    }

    /// Tokens of the sequence that `row` belongs to.
    pub(crate) fn context(&self, row: usize) -> usize {
        self.positions[self.spans[self.span_of[row]].rows.end - 1] + 1
    }

    /// Adapter of a row.
    pub(crate) fn adapter_of(&self, row: usize) -> Option<AdapterSlot> {
        self.spans[self.span_of[row]].adapter
    }

    /// Checks and stores `batch`. On an error the step is empty, so that operations after it do nothing.
    pub(crate) fn take(&mut self, batch: &StepBatch<'_>, bounds: &Bounds) -> Result<(), KernelError> {
        self.clear();
        let taken = self.check_rows(batch, bounds).and_then(|()| self.take_spans(batch, bounds));
        let taken = taken.and_then(|()| self.check_pools(batch));
        if taken.is_err() {
            self.clear();
            return taken;
        }
        self.tokens.extend_from_slice(batch.tokens);
        self.sampled.extend_from_slice(batch.sampled);
        self.types.extend_from_slice(batch.types);
        self.pools.extend_from_slice(batch.pools);
        Ok(())
    }

    /// Checks that every pooled span keeps at least one row.
    fn check_pools(&self, batch: &StepBatch<'_>) -> Result<(), KernelError> {
        batch.sampled.iter().zip(batch.pools).try_for_each(|(row, pool)| match pool {
            Pool::Row => Ok(()),
            Pool::Span { skipped, .. } => {
                below("rows that are left out", *skipped, self.spans[self.span_of[*row]].rows.len())
            }
        })
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.spans.clear();
        self.sampled.clear();
        self.types.clear();
        self.pools.clear();
        self.positions.clear();
        self.span_of.clear();
        self.tables.clear();
    }

    fn check_rows(&self, batch: &StepBatch<'_>, bounds: &Bounds) -> Result<(), KernelError> {
        below("rows of the step", batch.tokens.len(), bounds.rows_max.saturating_add(1))?;
        below("sampled rows of the step", batch.sampled.len(), bounds.sampled_max.saturating_add(1))?;
        for &token in batch.tokens {
            below("token", token as usize, bounds.vocab)?;
        }
        for &kind in batch.types {
            below("type of a token", kind as usize, bounds.types)?;
        }
        for (what, got, wanted) in [
            ("types of tokens", batch.types.len(), batch.tokens.len()),
            ("pools of sampled rows", batch.pools.len(), batch.sampled.len()),
        ] {
            if got > 0 && got != wanted {
                return Err(KernelError::Batch { what, got, limit: wanted });
            }
        }
        let mut first_free = 0;
        for &row in batch.sampled {
            below("sampled row", row, batch.tokens.len())?;
            if row < first_free {
                return Err(KernelError::Batch { what: "sampled row out of order", got: row, limit: first_free });
            }
            first_free = row + 1;
        }
        Ok(())
    }

    fn take_spans(&mut self, batch: &StepBatch<'_>, bounds: &Bounds) -> Result<(), KernelError> {
        self.written.resize(bounds.pages, 0);
        self.count += 1;
        let mut next = 0;
        for (index, span) in batch.spans.iter().enumerate() {
            if span.rows.start != next || span.rows.end <= span.rows.start {
                return Err(KernelError::Batch { what: "first row of a span", got: span.rows.start, limit: next });
            }
            next = span.rows.end;
            below("last row of a span", next - 1, batch.tokens.len())?;
            below("context of a span", span.context, bounds.positions.saturating_add(1))?;
            below("rows of a span", span.rows.len(), span.context.saturating_add(1))?;
            if let Some(AdapterSlot(slot)) = span.adapter {
                below("adapter of a span", usize::from(slot), bounds.adapters)?;
            }
            let blocks = span.context.div_ceil(PAGE_TOKENS);
            below("blocks of a span's context", blocks, span.block_table.len().saturating_add(1))?;
            for &page in &span.block_table[..blocks] {
                below("page", page as usize, bounds.pages)?;
            }
            let first_position = span.context - span.rows.len();
            for &page in &span.block_table[first_position / PAGE_TOKENS..blocks] {
                if std::mem::replace(&mut self.written[page as usize], self.count) == self.count {
                    return Err(KernelError::Batch { what: "page written twice", got: page as usize, limit: 0 });
                }
            }
            let start = self.tables.len();
            self.tables.extend_from_slice(&span.block_table[..blocks]);
            self.positions.extend(first_position..span.context);
            self.span_of.resize(next, index);
            let table = start..self.tables.len();
            self.spans.push(OwnedSpan { rows: span.rows.clone(), adapter: span.adapter, table });
        }
        if next != batch.tokens.len() {
            return Err(KernelError::Batch { what: "rows covered by spans", got: next, limit: batch.tokens.len() });
        }
        Ok(())
    }
}

fn below(what: &'static str, got: usize, limit: usize) -> Result<(), KernelError> {
    if got < limit { Ok(()) } else { Err(KernelError::Batch { what, got, limit }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Span;

    const BOUNDS: Bounds =
        Bounds { rows_max: 8, sampled_max: 2, vocab: 10, positions: 64, types: 2, pages: 4, adapters: 2 };

    fn span(rows: Range<usize>, context: usize, block_table: &[u32]) -> Span<'_> {
        Span { rows, context, block_table, adapter: None }
    }

    #[track_caller]
    fn refused(what: &str, tokens: &[u32], spans: &[Span<'_>], sampled: &[usize]) {
        let mut step = Step::default();
        match step.take(&StepBatch { tokens, spans, sampled, ..Default::default() }, &BOUNDS) {
            Err(KernelError::Batch { what: got, .. }) => assert_eq!(got, what),
            other => panic!("{other:?}"),
        }
        assert_eq!((step.rows(), step.spans.len(), step.positions.len()), (0, 0, 0));
    }

    #[test]
    fn every_index_is_checked() {
        let one = [0u32];
        refused("token", &[10], &[span(0..1, 1, &one)], &[]);
        refused("rows of the step", &[0; 9], &[], &[]);
        refused("sampled rows of the step", &[0; 3], &[], &[0, 1, 2]);
        refused("sampled row", &[1], &[span(0..1, 1, &one)], &[1]);
        refused("sampled row out of order", &[1, 2], &[span(0..2, 2, &one)], &[1, 0]);
        refused("page", &[1], &[span(0..1, 1, &[4])], &[]);
        refused("blocks of a span's context", &[1], &[span(0..1, 33, &one)], &[]);
        refused("context of a span", &[1], &[span(0..1, 65, &[0, 1, 2])], &[]);
        refused("rows of a span", &[1, 2], &[span(0..2, 1, &one)], &[]);
        refused("first row of a span", &[1, 2], &[span(0..1, 1, &one), span(0..1, 1, &[1])], &[]);
        refused("last row of a span", &[1], &[span(0..2, 2, &one)], &[]);
        refused("rows covered by spans", &[1, 2], &[span(0..1, 1, &one)], &[]);
        refused("page written twice", &[1, 2], &[span(0..1, 1, &one), span(1..2, 1, &one)], &[]);
        refused("page written twice", &[1; 2], &[span(0..2, 33, &[1, 1])], &[]);
        refused("adapter of a span", &[1], &[Span { adapter: Some(AdapterSlot(2)), ..span(0..1, 1, &one) }], &[]);
        let spans = [span(0..1, 1, &one)];
        let batch = |types, pools| StepBatch { tokens: &[1], spans: &spans, sampled: &[0], types, pools };
        for (what, types, pools) in [
            ("type of a token", &[2][..], &[][..]),
            ("types of tokens", &[0, 1], &[]),
            ("pools of sampled rows", &[], &[Pool::MEAN, Pool::Row]),
            ("rows that are left out", &[], &[Pool::Span { rule: PoolRule::Max, skipped: 1 }]),
        ] {
            let error = Step::default().take(&batch(types, pools), &BOUNDS).unwrap_err();
            assert!(matches!(error, KernelError::Batch { what: got, .. } if got == what), "{error:?}");
        }
        let empty = Range { start: 1, end: 0 };
        refused("first row of a span", &[], &[span(empty, 1, &one)], &[]);
    }

    #[test]
    fn shared_prefix_pages_are_fine() {
        let mut step = Step::default();
        let adapter = Some(AdapterSlot(1));
        let spans = [span(0..1, 33, &[0, 1]), Span { adapter, ..span(1..3, 34, &[0, 2, 3]) }];
        step.take(&StepBatch { tokens: &[1, 2, 3], spans: &spans, sampled: &[0, 2], ..Default::default() }, &BOUNDS)
            .unwrap();
        assert_eq!(step.positions, [32, 32, 33]);
        assert_eq!(step.span_of, [0, 1, 1]);
        assert_eq!((step.adapter_of(0), step.adapter_of(2)), (None, adapter));
        assert_eq!(step.slot(&step.spans[1], 33), (2, 1));
        assert_eq!(step.pages(&step.spans[1]), [0, 2]);
    }
}
