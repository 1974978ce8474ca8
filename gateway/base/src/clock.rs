//! The wall clock, read nowhere else: for time stamps that people and templates see. Deadlines use `Instant`, which never jumps.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use time::{Date, Month, OffsetDateTime, PrimitiveDateTime};

/// Time since 1970; zero on a machine whose clock is before that.
pub fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Wall clock time in Unix seconds.
pub fn unix_seconds() -> u64 {
    since_epoch().as_secs()
}

/// Unix seconds of `2027-01-31`, `2027-01-31T18:00:00`, `2027-01-31T18:00:00Z` or `2027-01-31T18:00:00+02:00`; without an offset in UTC,
/// fractions of a second dropped. `None`: not one of these, or before 1970.
pub fn parse(text: &str) -> Option<u64> {
    let (date, rest) = text.split_at_checked(10)?;
    let [year, month, day] = numbers(date, '-')?;
    let month = Month::try_from(u8::try_from(month).ok()?).ok()?;
    let date = Date::from_calendar_date(i32::try_from(year).ok()?, month, u8::try_from(day).ok()?).ok()?;
    let days = (date - OffsetDateTime::UNIX_EPOCH.date()).whole_days();
    let seconds = match rest.strip_prefix(['T', 't', ' ']) {
        None if rest.is_empty() => 0,
        None => return None,
        Some(time) => {
            let (clock, zone) = time.split_at_checked(8)?;
            let [hours, minutes, seconds] = numbers(clock, ':')?;
            let in_range = hours < 24 && minutes < 60 && seconds < 60;
            in_range.then_some(hours * 3600 + minutes * 60 + seconds)? - offset(zone)?
        }
    };
    u64::try_from(days * 86_400 + seconds).ok()
}

/// Seconds east of UTC of `Z`, `+02:00` or nothing, behind an optional fraction.
fn offset(zone: &str) -> Option<i64> {
    let zone = match zone.strip_prefix('.') {
        Some(fraction) => fraction.trim_start_matches(|digit: char| digit.is_ascii_digit()),
        None => zone,
    };
    let (sign, clock) = match zone.split_at_checked(1) {
        None | Some(("Z" | "z", "")) => return Some(0),
        Some(("+", clock)) => (1, clock),
        Some(("-", clock)) => (-1, clock),
        Some(_) => return None,
    };
    let [hours, minutes] = numbers(clock, ':')?;
    (hours < 24 && minutes < 60).then_some(sign * (hours * 3600 + minutes * 60))
}

fn numbers<const COUNT: usize>(text: &str, separator: char) -> Option<[i64; COUNT]> {
    let mut parts = text.split(separator);
    let mut out = [0; COUNT];
    for (at, number) in out.iter_mut().enumerate() {
        let width = if at == 0 && separator == '-' { 4 } else { 2 };
        let part = parts.next().filter(|part| part.len() == width && part.bytes().all(|byte| byte.is_ascii_digit()))?;
        *number = part.parse().ok()?;
    }
    parts.next().is_none().then_some(out)
}

/// `2027-01-31T18:00:00Z`; a time after the year 9999 as the last second of that.
pub fn format(seconds: u64) -> String {
    let at = i64::try_from(seconds).ok().and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    let at = at.unwrap_or(PrimitiveDateTime::MAX.assume_utc());
    let (year, month, day) = at.to_calendar_date();
    let (hour, minute, second) = at.to_hms();
    format!("{year:04}-{:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z", u8::from(month))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_read_and_written() {
        for (text, expected) in [
            ("1970-01-01", Some(0)),
            ("1970-01-01T00:00:01Z", Some(1)),
            ("2000-03-01", Some(951_868_800)),
            ("2026-11-21T18:30:00+02:00", Some(1_795_278_600)),
            ("2026-11-21T16:30:00.5Z", Some(1_795_278_600)),
            ("2026-11-21 16:30:00", Some(1_795_278_600)),
            ("2028-02-29", Some(1_835_395_200)),
            ("2027-02-29", None),
            ("2027-13-01", None),
            ("2027-1-1", None),
            ("2027-01-01T25:00:00Z", None),
            ("2027-01-01T00:00:00X", None),
            ("1969-12-31", None),
            ("+027-01-01", None),
            ("1970-01-01T00:00:00+02:00", None),
            ("", None),
            ("äääää", None),
        ] {
            assert_eq!(parse(text), expected, "{text}");
        }
        for seconds in (0..4_102_444_800).step_by(86_399 * 7) {
            assert_eq!(parse(&format(seconds)), Some(seconds), "{}", format(seconds));
        }
    }
}
