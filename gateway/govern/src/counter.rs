//! Counters of one measure: over a sliding window, over a calendar day or month, or of the present level.
//!
//! A sliding window is cut into slices. All slices that the window touches count, so a use inside the window is never
//! missed, and an amount expires at most one slice late (a sixtieth of a minute or hour, a twentieth of a second).
//! Amounts belong to the moment of their reservation: settling corrects them there.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::limit::Span;
use crate::time::{Now, day, month};

/// Used amount of one unit in one span.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Counter {
    /// Slices of a sliding window: index and amount, oldest first.
    Sliding { span: Span, slices: VecDeque<(u64, u64)>, sum: u64 },
    /// Sum of the present day or month.
    Calendar { span: Span, index: u64, sum: u64 },
    /// Amount in use at present, such as requests in flight.
    Level { sum: u64 },
}

/// Index of the slice, day or month in which an amount was counted.
pub(crate) type Mark = u64;

/// Width of a slice in milliseconds, and number of slices in a span.
fn cut(span: Span) -> (u64, u64) {
    match span {
        Span::Second => (50, 20),
        Span::Hour => (60_000, 60),
        _ => (1000, 60),
    }
}

impl Counter {
    pub(crate) fn new(span: Span) -> Self {
        match span {
            Span::Now => Counter::Level { sum: 0 },
            Span::Day | Span::Month => Counter::Calendar { span, index: 0, sum: 0 },
            Span::Second | Span::Minute | Span::Hour => Counter::Sliding { span, slices: VecDeque::new(), sum: 0 },
        }
    }

    /// Drops slices and periods that are over.
    pub(crate) fn advance(&mut self, now: Now) {
        match self {
            Counter::Sliding { span, slices, sum } => {
                let (width, count) = cut(*span);
                let first = (now.mono_ms / width).saturating_sub(count);
                while let Some((_, amount)) = slices.front().filter(|(index, _)| *index < first) {
                    *sum -= amount;
                    slices.pop_front();
                }
            }
            Counter::Calendar { span, index, sum } => {
                let current = period(*span, now).0;
                if current > *index {
                    (*index, *sum) = (current, 0);
                }
            }
            Counter::Level { .. } => {}
        }
    }

    /// Used amount, as of the last [`Counter::advance`].
    pub(crate) fn used(&self) -> u64 {
        match self {
            Counter::Sliding { sum, .. } | Counter::Calendar { sum, .. } | Counter::Level { sum } => *sum,
        }
    }

    /// Adds `amount`, after a call of [`Counter::advance`] by the caller.
    pub(crate) fn add(&mut self, amount: u64, now: Now) -> Mark {
        match self {
            Counter::Sliding { span, slices, sum } => {
                let index = now.mono_ms / cut(*span).0;
                *sum += amount;
                match slices.back_mut().filter(|(last, _)| *last >= index) {
                    Some((last, have)) => {
                        *have += amount;
                        *last
                    }
                    None => {
                        slices.push_back((index, amount));
                        index
                    }
                }
            }
            Counter::Calendar { index, sum, .. } => {
                *sum += amount;
                *index
            }
            Counter::Level { sum } => {
                *sum += amount;
                0
            }
        }
    }

    /// Corrects an amount counted as `from` at `mark` to `to`. If that slice or period is over, an excess counts now,
    /// since it was never counted.
    pub(crate) fn correct(&mut self, mark: Mark, from: u64, to: u64, now: Now) {
        self.advance(now);
        match self {
            Counter::Sliding { slices, sum, .. } => {
                if let Ok(at) = slices.binary_search_by_key(&mark, |(index, _)| *index) {
                    let have = &mut slices[at].1;
                    *sum -= *have;
                    *have = have.saturating_sub(from) + to;
                    *sum += *have;
                    return;
                }
            }
            Counter::Calendar { index, sum, .. } => {
                if *index == mark {
                    *sum = sum.saturating_sub(from) + to;
                    return;
                }
            }
            Counter::Level { sum } => {
                *sum = sum.saturating_sub(from) + to;
                return;
            }
        }
        self.add(to.saturating_sub(from), now);
    }

    /// Milliseconds until `need` more fit under `max`; `None`: when other requests end, or never.
    pub(crate) fn wait_ms(&self, need: u64, max: u64, now: Now) -> Option<u64> {
        if need > max {
            return None;
        }
        match self {
            Counter::Sliding { span, slices, sum } => {
                let (width, count) = cut(*span);
                let mut left = *sum;
                for (index, amount) in slices {
                    if left + need <= max {
                        break;
                    }
                    left -= amount;
                    if left + need <= max {
                        return Some(((index + count + 1) * width).saturating_sub(now.mono_ms));
                    }
                }
                Some(0)
            }
            Counter::Calendar { span, .. } => Some(period(*span, now).1),
            Counter::Level { .. } => None,
        }
    }

    /// Milliseconds until the counter is at zero, if nothing is added.
    pub(crate) fn reset_ms(&self, now: Now) -> u64 {
        match self {
            Counter::Sliding { span, slices, .. } => {
                let (width, count) = cut(*span);
                slices.back().map_or(0, |(index, _)| ((index + count + 1) * width).saturating_sub(now.mono_ms))
            }
            Counter::Calendar { span, .. } => period(*span, now).1,
            Counter::Level { .. } => 0,
        }
    }

    /// Returns true if the counter is equivalent to a new one, after a call of [`Counter::advance`] by the caller.
    pub(crate) fn is_idle(&self, now: Now) -> bool {
        match self {
            Counter::Sliding { slices, .. } => slices.is_empty(),
            Counter::Calendar { span, index, sum } => *sum == 0 || period(*span, now).0 > *index,
            Counter::Level { sum } => *sum == 0,
        }
    }

    /// Shifts the slices to the monotonic clock of another process: its time `theirs` is `ours` here.
    pub(crate) fn moved(&mut self, theirs: u64, ours: u64) {
        if let Counter::Sliding { span, slices, .. } = self {
            let width = cut(*span).0;
            let (theirs, ours) = (theirs / width, ours / width);
            for (index, _) in slices.iter_mut() {
                *index = moved(*index, theirs, ours);
            }
        }
    }

    /// Shifts the mark of an amount counted by the other process.
    pub(crate) fn moved_mark(&self, mark: Mark, theirs: u64, ours: u64) -> Mark {
        match self {
            Counter::Sliding { span, .. } => moved(mark, theirs / cut(*span).0, ours / cut(*span).0),
            Counter::Calendar { .. } | Counter::Level { .. } => mark,
        }
    }
}

/// Index that lies as far before `ours` as `index` does before `theirs`.
fn moved(index: u64, theirs: u64, ours: u64) -> u64 {
    ours.saturating_sub(theirs.saturating_sub(index))
}

/// Index of the day or month, and milliseconds until the next.
fn period(span: Span, now: Now) -> (u64, u64) {
    if span == Span::Month { month(now.wall_ms) } else { day(now.wall_ms) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(mono_ms: u64) -> Now {
        Now { mono_ms, wall_ms: 1_700_000_000_000 + mono_ms }
    }

    proptest! {
        /// Uses within the span always count; uses older by a slice never do.
        #[test]
        fn a_window_is_never_short_and_at_most_a_slice_late(
            span in prop_oneof![Just(Span::Second), Just(Span::Minute), Just(Span::Hour)],
            steps in proptest::collection::vec((0u64..40, 1u64..100), 1..200),
        ) {
            let (width, count) = cut(span);
            let mut counter = Counter::new(span);
            let (mut now, mut log) = (1_000_000_007, Vec::new());
            for (gone, amount) in steps {
                now += gone * width / 3;
                counter.advance(at(now));
                let within = |ms: u64| log.iter().filter(|(when, _)| when + ms > now).map(|(_, amount)| *amount).sum::<u64>();
                prop_assert!(counter.used() >= within(width * count));
                prop_assert!(counter.used() <= within(width * (count + 1)));
                counter.add(amount, at(now));
                log.push((now, amount));
                let full = counter.used();
                if let Some(wait) = counter.wait_ms(amount, full, at(now)) {
                    let mut later = counter.clone();
                    later.advance(at(now + wait));
                    prop_assert!(later.used() + amount <= full, "what was said about waiting is true");
                }
            }
        }
    }

    #[test]
    fn what_is_settled_is_corrected_where_it_was_counted() {
        let mut counter = Counter::new(Span::Minute);
        let mark = counter.add(100, at(0));
        counter.add(1, at(30_000));
        counter.correct(mark, 100, 40, at(30_000));
        assert_eq!(counter.used(), 41);
        counter.correct(mark, 40, 50, at(200_000));
        assert_eq!(counter.used(), 10, "the minute is over; what exceeds it counts now");
    }

    #[test]
    fn days_begin_at_midnight_and_never_go_back() {
        let mut counter = Counter::new(Span::Day);
        let now = |hours: u64| Now { mono_ms: hours, wall_ms: hours * 3_600_000 };
        counter.advance(now(47));
        let mark = counter.add(7, now(47));
        assert_eq!(counter.wait_ms(1, 7, now(47)), Some(3_600_000));
        counter.advance(now(48));
        assert_eq!(counter.used(), 0);
        counter.correct(mark, 7, 9, now(48));
        assert_eq!(counter.used(), 2);
        counter.advance(now(47));
        assert_eq!(counter.used(), 2, "yesterday is not opened again");
    }
}
