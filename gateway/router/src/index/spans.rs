//! Parts of a run by owner: sorted, disjoint spans.
//!
//! An owner is a small number (a worker and a tier, or a worker). Spans of one owner never touch: they are merged. Each
//! span covers at least one block that its owner announced, so their number is bounded by the blocks that owners may
//! announce.

use std::ops::Range;

/// Span `start..end` of a run that `owner` has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) owner: u16,
    pub(super) start: u32,
    pub(super) end: u32,
    /// Number of equal promises; 1 for resident spans.
    pub(super) count: u32,
}

/// Index range of the spans of one owner; `spans` are sorted by owner.
pub(super) fn of(spans: &[Span], owner: u16) -> Range<usize> {
    owners(spans, owner..=owner)
}

/// Index range of the spans of the owners in the range; `spans` are sorted by owner.
pub(super) fn owners(spans: &[Span], owners: std::ops::RangeInclusive<u16>) -> Range<usize> {
    let from = spans.partition_point(|span| span.owner < *owners.start());
    let to = from + spans[from..].partition_point(|span| span.owner <= *owners.end());
    from..to
}

/// Gives `blocks` to `owner`, merging spans that touch; returns how many are new.
pub(super) fn add(spans: &mut Vec<Span>, owner: u16, blocks: Range<u32>) -> u32 {
    let mine = of(spans, owner);
    let from = mine.start + spans[mine.clone()].partition_point(|span| span.end < blocks.start);
    let to = from + spans[from..mine.end].partition_point(|span| span.start <= blocks.end);
    let touched = &spans[from..to];
    let had: u32 = touched.iter().map(|span| overlap(span, &blocks)).sum();
    let start = touched.first().map_or(blocks.start, |span| span.start.min(blocks.start));
    let end = touched.last().map_or(blocks.end, |span| span.end.max(blocks.end));
    let merged = Span { owner, start, end, count: 1 };
    match to - from {
        0 => spans.insert(from, merged),
        count => {
            spans[from] = merged;
            spans.drain(from + 1..from + count);
        }
    }
    (blocks.end - blocks.start) - had
}

/// Takes `blocks` from `owner`; returns how many it had.
pub(super) fn cut(spans: &mut Vec<Span>, owner: u16, blocks: Range<u32>) -> u32 {
    let mine = of(spans, owner);
    let from = mine.start + spans[mine.clone()].partition_point(|span| span.end <= blocks.start);
    let to = from + spans[from..mine.end].partition_point(|span| span.start < blocks.end);
    let touched = &spans[from..to];
    let (Some(first), Some(last)) = (touched.first().copied(), touched.last().copied()) else { return 0 };
    let had = touched.iter().map(|span| overlap(span, &blocks)).sum();
    let left = Span { end: blocks.start.min(first.end), ..first };
    let right = Span { start: blocks.end.max(last.start), ..last };
    let rest = [left, right].into_iter().filter(|span| span.start < span.end);
    spans.splice(from..to, rest);
    had
}

/// Number of `blocks` in no span. Cost: spans × gaps.
pub(super) fn missing(spans: &[Span], blocks: Range<u32>) -> u32 {
    let mut missing = 0;
    gaps(spans, blocks, |gap| missing += gap.end - gap.start);
    missing
}

/// Calls `found` with each part of `blocks` in no span, in order.
pub(super) fn gaps(spans: &[Span], blocks: Range<u32>, mut found: impl FnMut(Range<u32>)) {
    let mut at = blocks.start;
    while at < blocks.end {
        let (mut reach, mut next) = (at, blocks.end);
        for span in spans {
            if span.start > at {
                next = next.min(span.start);
            } else {
                reach = reach.max(span.end);
            }
        }
        if reach == at {
            found(at..next);
            reach = next;
        }
        at = reach;
    }
}

/// End of the blocks covered from `at` on without a hole, by the spans for which `counts` is true.
pub(super) fn reach(spans: &[Span], at: u32, counts: impl Fn(&Span) -> bool) -> u32 {
    let mut reach = at;
    loop {
        let further = spans.iter().filter(|span| counts(span) && span.start <= reach).map(|span| span.end).max();
        match further {
            Some(end) if end > reach => reach = end,
            _ => return reach,
        }
    }
}

fn overlap(span: &Span, blocks: &Range<u32>) -> u32 {
    span.end.min(blocks.end).saturating_sub(span.start.max(blocks.start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Checked against one flag per owner and block.
        #[test]
        fn spans_are_sets(ops in prop::collection::vec((0..3_u16, 0..20_u32, 0..8_u32, any::<bool>()), 0..60)) {
            let (mut spans, mut model) = (Vec::new(), [[false; 32]; 3]);
            for (owner, start, len, is_add) in ops {
                let blocks = start..start + len + 1;
                let flags = &mut model[usize::from(owner)][start as usize..blocks.end as usize];
                let changes = flags.iter().filter(|has| **has != is_add).count() as u32;
                flags.fill(is_add);
                let told = if is_add { add(&mut spans, owner, blocks) } else { cut(&mut spans, owner, blocks) };
                prop_assert_eq!(told, changes);
                for pair in spans.windows(2) {
                    prop_assert!((pair[0].owner, pair[0].end) < (pair[1].owner, pair[1].start), "{:?}", spans);
                }
            }
            for (owner, flags) in (0..).zip(&model) {
                let reached = reach(&spans, 3, |span| span.owner == owner);
                prop_assert_eq!(reached as usize, 3 + flags[3..].iter().take_while(|has| **has).count());
            }
            let nobody = (0..32).filter(|&block| model.iter().all(|flags| !flags[block])).count();
            prop_assert_eq!(missing(&spans, 0..32) as usize, nobody);
        }
    }
}
