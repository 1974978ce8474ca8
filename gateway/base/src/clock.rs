//! The wall clock, read nowhere else: for time stamps that people and templates see. Deadlines use `Instant`, which never jumps.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time since 1970; zero on a machine whose clock is before that.
pub fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Unix seconds.
pub fn unix_seconds() -> u64 {
    since_epoch().as_secs()
}

/// Unix seconds of `2027-01-31`, `2027-01-31T18:00:00`, `2027-01-31T18:00:00Z` or `2027-01-31T18:00:00+02:00`; without an offset in UTC,
/// fractions of a second dropped. `None`: not one of these, or before 1970.
pub fn parse(text: &str) -> Option<u64> {
    let (date, rest) = text.split_at_checked(10)?;
    let [year, month, day] = numbers(date, '-')?;
    let is_month = (1970..10_000).contains(&year) && (1..=12).contains(&month);
    let days = (is_month && (1..=month_days(year, month)).contains(&day)).then(|| days(year, month, day))?;
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

fn month_days(year: i64, month: i64) -> i64 {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    [31, if is_leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][month as usize - 1]
}

/// Days since 1970-01-01, for years from 1970 on.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let before = year - 1;
    let leaps = before / 4 - before / 100 + before / 400 - 477;
    (year - 1970) * 365 + leaps + (1..month).map(|month| month_days(year, month)).sum::<i64>() + day - 1
}

/// `2027-01-31T18:00:00Z`
pub fn format(seconds: u64) -> String {
    let (mut days, clock) = (seconds as i64 / 86_400, seconds % 86_400);
    let (mut year, mut month) = (1970, 1);
    loop {
        let length = if month_days(year, 2) == 29 { 366 } else { 365 };
        if days < length || year > 9999 {
            break;
        }
        (days, year) = (days - length, year + 1);
    }
    while month < 12 && days >= month_days(year, month) {
        (days, month) = (days - month_days(year, month), month + 1);
    }
    format!("{year:04}-{month:02}-{:02}T{:02}:{:02}:{:02}Z", days + 1, clock / 3600, clock / 60 % 60, clock % 60)
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
