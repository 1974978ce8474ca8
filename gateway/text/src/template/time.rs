//! `strftime` for `strftime_now`, in UTC and English.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Formats the time `unix_s`; unknown directives stay as they are.
pub(super) fn strftime(format: &str, unix_s: i64) -> String {
    let now = Civil::new(unix_s);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            // Without padding, as glibc reads it.
            Some('-') => match chars.next() {
                Some(directive) => out.push_str(now.field(directive).trim_start_matches('0')),
                None => out.push_str("%-"),
            },
            Some(directive) => out.push_str(&now.field(directive)),
            None => out.push('%'),
        }
    }
    out
}

struct Civil {
    year: i64,
    /// Month, from 1.
    month: usize,
    day: i64,
    /// Day of the year, from 1.
    day_of_year: i64,
    /// Weekday; 0 is Sunday.
    weekday: usize,
    second_of_day: i64,
}

impl Civil {
    /// Civil date of a Unix time. Days to year, month and day after Howard Hinnant, "chrono-Compatible Low-Level Date
    /// Algorithms", `civil_from_days`.
    fn new(unix_s: i64) -> Self {
        let days = unix_s.div_euclid(86_400);
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_from_march + 2) / 153;
        let day = day_from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
        Self {
            year,
            month: month as usize,
            day,
            day_of_year: before + day + i64::from(leap && month > 2),
            weekday: (days + 4).rem_euclid(7) as usize,
            second_of_day: unix_s.rem_euclid(86_400),
        }
    }

    fn field(&self, directive: char) -> String {
        let (hour, minute, second) = (self.second_of_day / 3600, self.second_of_day / 60 % 60, self.second_of_day % 60);
        let hour12 = (hour + 11) % 12 + 1;
        match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'B' => MONTHS[self.month - 1].into(),
            'b' | 'h' => MONTHS[self.month - 1][..3].into(),
            'A' => DAYS[self.weekday].into(),
            'a' => DAYS[self.weekday][..3].into(),
            'u' => (if self.weekday == 0 { 7 } else { self.weekday }).to_string(),
            'w' => self.weekday.to_string(),
            'H' => format!("{hour:02}"),
            'I' => format!("{hour12:02}"),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'f' => "000000".into(),
            'p' => (if hour < 12 { "AM" } else { "PM" }).into(),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'D' => format!("{:02}/{:02}/{:02}", self.month, self.day, self.year.rem_euclid(100)),
            'R' => format!("{hour:02}:{minute:02}"),
            'Z' => "UTC".into(),
            'z' => "+0000".into(),
            'n' => "\n".into(),
            't' => "\t".into(),
            '%' => "%".into(),
            other => format!("%{other}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_as_python_writes_them() {
        let check = |unix_s, format, expected: &str| assert_eq!(strftime(format, unix_s), expected);
        check(0, "%A %d %B %Y %j", "Thursday 01 January 1970 001");
        check(1_709_164_800, "%a %-d %b %y %j %H:%M:%S", "Thu 29 Feb 24 060 00:00:00");
        check(1_735_689_599, "%F %T %I%p %z", "2024-12-31 23:59:59 11PM +0000");
        check(-1, "%Y-%m-%d %w", "1969-12-31 3");
        check(4_102_444_800, "%d %b %Y 100%% %q", "01 Jan 2100 100% %q");
    }
}
