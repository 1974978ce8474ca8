//! Monotonic and calendar time. Windows slide over a monotonic clock; days and months need the wall clock, which people and machines set.
//!
//! [`Calendar`] reads the wall clock without trusting it: it advances with the monotonic clock and is pulled towards
//! the wall clock by at most 1 % of the time that passes. So a clock set an hour forward or back, and back again,
//! neither begins a new day nor delays the next. A difference of more than a day means that the calendar was wrong, and
//! is taken over at once.

use ::time::{Date, Duration, Month, OffsetDateTime};
use serde::{Deserialize, Serialize};

/// Time of a decision, by both clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Now {
    /// Time in milliseconds by the monotonic clock, for sliding windows.
    pub mono_ms: u64,
    /// Milliseconds since 1970 by the [`Calendar`].
    pub wall_ms: u64,
}

/// Difference of the clocks from which on a jump counts as a correction, in ms.
const CORRECTION_MS: u64 = 86_400_000;
/// Time in which the calendar moves by 1 ms towards the wall clock, in ms.
const PULL: u64 = 100;

/// Wall clock that is slewed rather than set: small corrections never make it go back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calendar {
    mono_ms: u64,
    wall_ms: u64,
    /// Milliseconds passed that do not yet make up 1 ms of pull.
    rest_ms: u64,
}

impl Calendar {
    /// Starts at the readings of both clocks.
    pub fn new(mono_ms: u64, wall_ms: u64) -> Self {
        Self { mono_ms, wall_ms, rest_ms: 0 }
    }

    /// Advances the calendar to the given readings, and returns the time.
    pub fn now(&mut self, mono_ms: u64, wall_ms: u64) -> Now {
        let gone = mono_ms.saturating_sub(self.mono_ms);
        self.mono_ms += gone;
        self.wall_ms += gone;
        let pull = (self.rest_ms + gone) / PULL;
        self.rest_ms = (self.rest_ms + gone) % PULL;
        let off = self.wall_ms.abs_diff(wall_ms);
        if off > CORRECTION_MS {
            self.wall_ms = wall_ms;
        } else if wall_ms > self.wall_ms {
            self.wall_ms += pull.min(off);
        } else {
            self.wall_ms -= pull.min(off);
        }
        Now { mono_ms: self.mono_ms, wall_ms: self.wall_ms }
    }
}

const DAY_MS: u64 = 86_400_000;

/// Days since 1970, and milliseconds until the next.
pub(crate) fn day(wall_ms: u64) -> (u64, u64) {
    (wall_ms / DAY_MS, DAY_MS - wall_ms % DAY_MS)
}

/// Months since year 0, and milliseconds until the next.
pub(crate) fn month(wall_ms: u64) -> (u64, u64) {
    let days = wall_ms / DAY_MS;
    let (year, month) = year_and_month(days);
    let next = if month == 12 { first_day(year + 1, 1) } else { first_day(year, month + 1) };
    (year * 12 + month - 1, (next * DAY_MS).saturating_sub(wall_ms))
}

/// Milliseconds since 1970 at which the day and the month of `wall_ms` began.
pub fn began(wall_ms: u64) -> (u64, u64) {
    let (year, month) = year_and_month(wall_ms / DAY_MS);
    (wall_ms - wall_ms % DAY_MS, first_day(year, month) * DAY_MS)
}

/// Year, month and day of month of a day counted from 1970.
pub fn civil(days: u64) -> (u64, u64, u64) {
    let (year, month) = year_and_month(days);
    (year, month, days - first_day(year, month) + 1)
}

/// Year and month (from 1) of a day counted from 1970; a day after the year 9999 as its last month.
fn year_and_month(days: u64) -> (u64, u64) {
    let date = i64::try_from(days)
        .ok()
        .and_then(|days| OffsetDateTime::UNIX_EPOCH.date().checked_add(Duration::days(days)))
        .unwrap_or(Date::MAX);
    (date.year() as u64, u8::from(date.month()).into())
}

/// Days from 1970 to the first of a month.
fn first_day(year: u64, month: u64) -> u64 {
    let month = Month::try_from(month as u8).unwrap_or(Month::January);
    let date = Date::from_calendar_date(year as i32, month, 1).unwrap_or(Date::MAX);
    (date - OffsetDateTime::UNIX_EPOCH.date()).whole_days() as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOUR: u64 = 3_600_000;

    #[test]
    fn months_are_those_of_the_calendar() {
        for (days, year, month) in [(0, 1970, 1), (58, 1970, 2), (59, 1970, 3), (11_016, 2000, 2), (20_513, 2026, 3)] {
            assert_eq!(year_and_month(days), (year, month), "{days}");
        }
        for (year, month) in (1970..2200).flat_map(|year| (1..=12).map(move |month| (year, month))) {
            let first = first_day(year, month);
            assert_eq!(year_and_month(first), (year, month));
            assert!(first == 0 || year_and_month(first - 1) != (year, month));
        }
        // A clock that is thousands of years ahead breaks nothing.
        let far = super::month(10_000 * 366 * DAY_MS);
        assert_eq!(far, (9999 * 12 + 11, 0));
        let (index, left) = super::month(20_513 * DAY_MS + 5);
        assert_eq!((index, left), (2026 * 12 + 2, (first_day(2026, 4) - 20_513) * DAY_MS - 5));
    }

    #[test]
    fn a_jump_of_an_hour_moves_the_calendar_by_seconds() {
        let start = 100 * DAY_MS - HOUR / 2;
        for jump in [HOUR as i64, -(HOUR as i64)] {
            let mut calendar = Calendar::new(0, start);
            let mut last = start;
            for second in 1..=600 {
                let (mono, wall) = (second * 1000, start.wrapping_add_signed(jump) + second * 1000);
                let now = calendar.now(mono, wall);
                let true_now = start + second * 1000;
                assert!(now.wall_ms.abs_diff(true_now) <= second * 10 && now.wall_ms >= last, "{jump} {second}");
                assert_eq!(day(now.wall_ms).0, 99, "half an hour before midnight it stays today");
                last = now.wall_ms;
            }
        }
    }

    #[test]
    fn a_clock_that_was_wrong_by_years_is_believed() {
        let mut calendar = Calendar::new(0, 0);
        assert_eq!(calendar.now(10, 1_700_000_000_000).wall_ms, 1_700_000_000_000);
    }

    proptest! {
        /// Invariant for any wall clock within a day: the calendar only goes forward, with a rate error of at most 1 %.
        #[test]
        fn it_never_goes_back(steps in proptest::collection::vec((0u64..100_000, -(HOUR as i64)..HOUR as i64), 1..200)) {
            let start = 1_000 * DAY_MS;
            let mut calendar = Calendar::new(0, start);
            let (mut mono, mut last) = (0, start);
            for (gone, jump) in steps {
                mono += gone;
                let now = calendar.now(mono, (start + mono).wrapping_add_signed(jump));
                prop_assert!(now.wall_ms >= last);
                prop_assert!(now.wall_ms.abs_diff(start + mono) <= mono / PULL + 1);
                last = now.wall_ms;
            }
        }
    }
}
