//! Bar charts of results, for a terminal; `page.rs` draws the same bars for a browser.

use std::fmt::Write;

use crate::out::harmless;

/// Longest bar, in characters.
pub(crate) const BAR: usize = 40;
/// Longest label, in characters: a line fits into 80.
const LABEL_CHARS_MAX: usize = 24;
/// Least width of the labels, in characters.
const LABEL_CHARS: usize = 6;

/// One bar of a chart.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bar {
    pub(crate) label: String,
    pub(crate) value: f64,
    /// Parts whose sum is the value, in the order of the chart's legend; empty: a bar of one colour.
    pub(crate) parts: Vec<f64>,
}

impl Bar {
    /// Bar of one colour.
    pub(crate) fn new(label: impl Into<String>, value: f64) -> Self {
        Self { label: label.into(), value, parts: Vec::new() }
    }
}

/// Largest value of the bars that is finite and above zero, or a value that makes every bar empty.
pub(crate) fn most(bars: &[Bar]) -> f64 {
    bars.iter().map(|bar| bar.value).filter(|value| value.is_finite()).fold(f64::MIN_POSITIVE, f64::max)
}

/// Share of a value of the largest one; 0 for a value that is not finite.
pub(crate) fn share(value: f64, most: f64) -> f64 {
    if value.is_finite() { (value / most).clamp(0.0, 1.0) } else { 0.0 }
}

/// Chart as lines of text: an empty line, the title, and a line for each bar.
pub(crate) fn lines(title: &str, bars: &[Bar]) -> String {
    let mut out = format!("\n{title}\n");
    let labels: Vec<String> = bars.iter().map(|bar| cut(&harmless(&bar.label))).collect();
    let width = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0).max(LABEL_CHARS);
    let most = most(bars);
    for (bar, label) in bars.iter().zip(&labels) {
        let _ = writeln!(out, "{label:>width$} {} {}", drawn(share(bar.value, most)), number(bar.value));
    }
    out
}

/// Label, cut to [`LABEL_CHARS_MAX`] characters.
pub(crate) fn cut(label: &str) -> String {
    if label.chars().count() <= LABEL_CHARS_MAX {
        return label.to_owned();
    }
    label.chars().take(LABEL_CHARS_MAX - 1).chain(['…']).collect()
}

/// Number with three significant digits, or all before the point; small ones with four places.
pub(crate) fn number(value: f64) -> String {
    match value {
        value if !value.is_finite() => "never".to_owned(),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value if value >= 0.1 || value == 0.0 => format!("{value:.2}"),
        value => format!("{value:.4}"),
    }
}

/// Bar of a share of the longest one, in eighths of a character.
fn drawn(share: f64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * (BAR * 8) as f64).round() as usize;
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_eighths() {
        assert_eq!((drawn(0.0), drawn(1.0 / 320.0), drawn(2.0)), (String::new(), "▏".to_owned(), "█".repeat(BAR)));
        assert_eq!(drawn(9.0 / 320.0), "█▏");
    }

    #[test]
    fn a_chart_lines_up_and_bears_any_label_and_value() {
        let long = format!("a\u{1b}{}", "b".repeat(40));
        let bars = [Bar::new("x", 2.0), Bar::new(long, 1.0), Bar::new("y", f64::INFINITY), Bar::new("z", 0.0)];
        let text = lines("seconds", &bars);
        let rows: Vec<_> = text.lines().collect();
        assert_eq!(rows[..2], ["", "seconds"]);
        assert_eq!(rows[2], format!("{:>24} {} 2.00", "x", "█".repeat(40)));
        assert_eq!(rows[3], format!("a\u{fffd}{}… {} 1.00", "b".repeat(21), "█".repeat(20)));
        assert_eq!(rows[4..], [format!("{:>24}  never", "y"), format!("{:>24}  0.00", "z")]);
        assert_eq!(lines("none", &[Bar::new("a", 0.0)]), "\nnone\n     a  0.00\n");
    }

    #[test]
    fn numbers_keep_what_matters() {
        let all = [1234.5, 12.34, 1.234, 0.01234, 0.0];
        assert_eq!(all.map(number), ["1234", "12.3", "1.23", "0.0123", "0.00"].map(str::to_owned));
    }
}
