//! `strftime` for `strftime_now`, in UTC and English.

use time::OffsetDateTime;

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

/// Directives of numbers, which `-` frees of their padding.
const NUMBERS: &str = "CdefgGHIjklmMsSuUVwWyY";

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
                Some(directive) if NUMBERS.contains(directive) => {
                    let field = now.field(directive);
                    let digits = field.trim_start_matches(['0', ' ']);
                    out.push_str(if digits.is_empty() { "0" } else { digits });
                }
                Some(directive) => out.push_str(&now.field(directive)),
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
    /// Number of the month, from 1.
    month: usize,
    day: i64,
    /// Day of the year, from 1.
    day_of_year: i64,
    /// Number of the weekday, from 0 for Sunday.
    weekday: usize,
    second_of_day: i64,
    /// Weeks of the year that begin on Sunday and on Monday, as `%U` and `%W` count them.
    weeks: [u8; 2],
    /// Year and week of ISO 8601.
    iso: (i64, u8),
    unix_s: i64,
}

impl Civil {
    /// Civil date of a Unix time; one outside the years -9999 to 9999 as the epoch.
    fn new(unix_s: i64) -> Self {
        let at = OffsetDateTime::from_unix_timestamp(unix_s).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        let (year, month, day) = at.to_calendar_date();
        let (hour, minute, second) = at.to_hms();
        Self {
            year: year.into(),
            month: u8::from(month).into(),
            day: day.into(),
            day_of_year: at.ordinal().into(),
            weekday: at.weekday().number_days_from_sunday().into(),
            second_of_day: i64::from(hour) * 3600 + i64::from(minute) * 60 + i64::from(second),
            weeks: [at.sunday_based_week(), at.monday_based_week()],
            iso: (at.to_iso_week_date().0.into(), at.iso_week()),
            unix_s: at.unix_timestamp(),
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
            'k' => format!("{hour:2}"),
            'l' => format!("{hour12:2}"),
            'P' => (if hour < 12 { "am" } else { "pm" }).into(),
            'r' => format!("{hour12:02}:{minute:02}:{second:02} {}", self.field('p')),
            'C' => format!("{:02}", self.year.div_euclid(100)),
            'U' => format!("{:02}", self.weeks[0]),
            'W' => format!("{:02}", self.weeks[1]),
            'G' => self.iso.0.to_string(),
            'g' => format!("{:02}", self.iso.0.rem_euclid(100)),
            'V' => format!("{:02}", self.iso.1),
            's' => self.unix_s.to_string(),
            'c' => ['a', 'b', 'e', 'T', 'Y'].map(|part| self.field(part)).join(" "),
            'f' => "000000".into(),
            'p' => (if hour < 12 { "AM" } else { "PM" }).into(),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'T' | 'X' => format!("{hour:02}:{minute:02}:{second:02}"),
            'D' | 'x' => format!("{:02}/{:02}/{:02}", self.month, self.day, self.year.rem_euclid(100)),
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
        check(0, "%-H:%-M:%-S %-w %-e %-I %-%", "0:0:0 4 1 12 %");
        check(946_684_800, "%-y %C %-C %k %l %P %p %r", "0 20 20  0 12 am AM 12:00:00 AM");
        check(
            1_709_164_800,
            "%c|%x|%X|%U %W %V %G %g %s",
            "Thu Feb 29 00:00:00 2024|02/29/24|00:00:00|08 09 09 2024 24 1709164800",
        );
        check(1_735_689_599, "%c|%U %W %V %G %-D %-l", "Tue Dec 31 23:59:59 2024|52 53 01 2025 12/31/24 11");
        check(4_102_444_800, "%d %b %Y 100%% %q", "01 Jan 2100 100% %q");
    }
}
