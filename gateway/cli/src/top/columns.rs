//! Columns of the tables, and the choice of those that fit a line.
//!
//! A figure is shown whole or not at all. Names and reasons may be shortened, with `…` at the end.

use serde_json::Value;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::admin::{table, value};

/// Spaces between two columns.
pub(super) const GAP: usize = 2;
/// Width below which a text is not shortened.
const TEXT_MIN: usize = 16;
/// Width to which a wider text is shortened where columns behind it need the room.
const TEXT_MAX: usize = 40;

/// Kind of a column's values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Figure,
}

/// Column: its head, and the path of its values.
pub(super) struct Column {
    pub(super) head: &'static str,
    pub(super) path: &'static str,
    pub(super) kind: Kind,
}

const fn figure(head: &'static str, path: &'static str) -> Column {
    Column { head, path, kind: Kind::Figure }
}

const fn text(head: &'static str, path: &'static str) -> Column {
    Column { head, path, kind: Kind::Text }
}

/// Columns of pools, the most wanted first: a narrow terminal shows the first ones.
pub(super) const POOLS: &[Column] = &[
    text("pool", "id"),
    figure("ready", "ready"),
    figure("open", "open"),
    figure("waiting", "waiting"),
    figure("first token in", "ttft"),
    figure("tokens/s", "tokens_rate"),
    figure("hits", "hits"),
    figure("failed", "counts.failed"),
    figure("resumed", "counts.resumed"),
    figure("moved", "counts.moves"),
    figure("apart", "counts.prefilled_apart"),
    figure("first there", "transfers.first_tokens"),
    figure("kv moved", "kv_moved"),
    figure("hidden", "hidden"),
    text("roles", "role_advice"),
    figure("wanted", "replicas_wanted"),
    text("because", "replicas.reason"),
    figure("late", "late"),
    text("last change", "replicas.last_change"),
    text("last failure", "replicas.last_failure"),
];

/// Columns of workers, the most wanted first.
pub(super) const WORKERS: &[Column] = &[
    text("worker", "name"),
    text("phase", "phase"),
    text("role", "role"),
    figure("running", "sequences_running"),
    figure("waiting", "sequences_waiting"),
    figure("queue", "queue"),
    figure("tokens/s", "tokens_rate"),
    figure("kv", "kv"),
    figure("hits", "hits"),
    figure("step", "step"),
    figure("step p99", "step_p99"),
    figure("kv in", "kv_in"),
    figure("kv out", "kv_out"),
    figure("shared weights", "shared_weights"),
    figure("gpu", "gpu_busy"),
    figure("gpu memory", "gpu_memory"),
    figure("power", "gpu_power"),
    figure("sm clock", "gpu_clock"),
    figure("gpu temp", "gpu_temperature"),
    text("slowed by", "gpu_throttled"),
];

/// Columns at the end of [`WORKERS`] that only workers on a GPU have.
const GPU_COLUMNS: usize = 6;

/// Columns for these workers: those of GPUs only where there is one.
pub(super) fn of_workers(workers: &[Value]) -> &'static [Column] {
    let has_gpu = workers.iter().any(|worker| worker["gpu"].is_object());
    if has_gpu { WORKERS } else { &WORKERS[..WORKERS.len() - GPU_COLUMNS] }
}

/// Whole text of each column.
pub(super) fn cells(columns: &[Column], row: &Value) -> Vec<String> {
    columns.iter().map(|column| value(row, column.path)).collect()
}

/// Columns that fit a line of `width`, with their widths: the first one, then those from `from` on.
pub(super) fn fit(columns: &[Column], rows: &[Vec<String>], width: usize, from: usize) -> Vec<(usize, usize)> {
    let natural = |at: usize| {
        let cells = rows.iter().map(|row| row[at].width());
        cells.chain([columns[at].head.width()]).max().unwrap_or(0)
    };
    let mut fitted = vec![(0, natural(0).min((width / 3).max(8)).min(width))];
    let mut used = fitted[0].1;
    for (at, column) in columns.iter().enumerate().skip(from.max(1)) {
        let wanted = match column.kind {
            Kind::Figure => natural(at),
            Kind::Text => natural(at).min(TEXT_MAX),
        };
        let least = if column.kind == Kind::Text { wanted.min(TEXT_MIN) } else { wanted };
        let room = width.saturating_sub(used + GAP);
        if room < least {
            break;
        }
        fitted.push((at, wanted.min(room)));
        used += GAP + wanted.min(room);
    }
    // Left over: to texts that were shortened.
    for (at, have) in &mut fitted {
        let more = natural(*at).saturating_sub(*have).min(width.saturating_sub(used));
        *have += more;
        used += more;
    }
    fitted
}

/// `text` in at most `width` columns.
pub(super) fn shorten(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut used = 0;
    let fits = |letter: &char| {
        used += letter.width().unwrap_or(0);
        used < width
    };
    let mut out: String = text.chars().take_while(fits).collect();
    if width > 0 {
        out.push('…');
    }
    out
}

/// Table as text. In a terminal that is too narrow, further columns follow below, behind the names again.
pub(super) fn plain(columns: &[Column], rows: &[Value], width: Option<usize>) -> String {
    let Some(width) = width else {
        let pairs: Vec<_> = columns.iter().map(|column| (column.head, column.path)).collect();
        return table(rows, &pairs);
    };
    let rows: Vec<_> = rows.iter().map(|row| cells(columns, row)).collect();
    let heads: Vec<_> = columns.iter().map(|column| column.head.to_owned()).collect();
    let (mut out, mut from) = (String::new(), 1);
    while from < columns.len() {
        let fitted = fit(columns, &rows, width, from);
        for row in std::iter::once(&heads).chain(&rows) {
            let mut line = String::new();
            for (at, width) in &fitted {
                let cell = shorten(&row[*at], *width);
                line += &cell;
                line.extend(std::iter::repeat_n(' ', width + GAP - cell.width()));
            }
            out += line.trim_end();
            out.push('\n');
        }
        // No room for another column than the name: the rest is left out.
        let Some((last, _)) = fitted.get(1..).and_then(<[_]>::last) else { break };
        from = last + 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_text_is_shortened_by_columns_of_the_terminal() {
        for (text, width, want) in
            [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("日本語", 5, "日本…"), ("日本語", 4, "日…"), ("ab", 1, "…")]
        {
            assert_eq!(shorten(text, width), want);
        }
        assert_eq!(shorten("ab", 0), "");
    }

    #[test]
    fn a_snapshot_of_a_narrow_terminal_has_every_figure_whole() {
        let rows =
            [json!({ "name": "a-worker-with-a-long-name-in-pool-chat-large-0", "phase": "ready", "role": "mixed",
            "sequences_running": 123_456, "sequences_waiting": 7, "queue": "1234.5 s", "step": "250 ms",
            "step_p99": "251 ms", "tokens_rate": "98765", "hits": "45 %", "kv": "67 %", "kv_in": "1024.5 MB/s",
            "kv_out": "2048.5 MB/s" })];
        for width in 40..160 {
            let text = plain(WORKERS, &rows, Some(width));
            assert!(text.lines().all(|line| line.width() <= width), "{width}:\n{text}");
            for figure in cells(WORKERS, &rows[0]).iter().skip(1) {
                assert!(
                    text.lines().flat_map(|line| line.split("  ")).any(|cell| cell.trim() == figure),
                    "{figure} at {width}:\n{text}"
                );
            }
        }
        let wide = plain(WORKERS, &rows, None);
        assert_eq!(wide.lines().count(), 2, "{wide}");
    }
}
