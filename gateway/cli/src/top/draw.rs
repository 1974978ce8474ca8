//! Drawing of the screen: a line about the gateway, two tables, the selected row, and the keys.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Paragraph, Row};
use unicode_width::UnicodeWidthStr;

use super::columns::{GAP, fit, shorten};
use super::view::{HELP, Table, View};

/// Styles with attributes alone, which can be read on every background.
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);
const CHOSEN: Style = Style::new().add_modifier(Modifier::REVERSED);

const KEYS: &str = "q quit  ? help  p hold  Tab table  ↑↓ row  ←→ columns  s sort  r reverse";

/// Lines of a table's caption and heads.
const HEAD_LINES: u16 = 2;

/// Draws one frame.
pub(super) fn draw(frame: &mut Frame<'_>, view: &mut View) {
    let area = frame.area();
    let width = usize::from(area.width);
    let below = if view.help { Vec::new() } else { below(view, width) };
    let third = area.height / 3;
    let rows = |table: &Table| HEAD_LINES + u16::try_from(table.rows.len()).unwrap_or(u16::MAX);
    let [title, pools, workers, details, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(rows(&view.tables[0]).min(third.max(HEAD_LINES + 1))),
        Constraint::Min(HEAD_LINES + 1),
        Constraint::Length(u16::try_from(below.len()).unwrap_or(u16::MAX).min(third)),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Line::styled(shorten(&heading(view), width), BOLD), title);
    if view.help {
        let body = Rect { height: keys.y.saturating_sub(pools.y), ..pools };
        frame.render_widget(Paragraph::new(HELP), body);
    } else {
        for (at, area) in [pools, workers].into_iter().enumerate() {
            draw_table(frame, &mut view.tables[at], view.focus == at, area);
        }
        frame.render_widget(Text::from_iter(below), details);
    }
    let (text, style) = view.failure.as_ref().map_or((KEYS, DIM), |failure| (failure.as_str(), BOLD));
    frame.render_widget(Line::styled(shorten(text, width), style), keys);
}

fn heading(view: &View) -> String {
    let held = if view.held { "  HELD: p goes on" } else { "" };
    let old = if view.failure.is_some() { "  NO ANSWER: the figures are old" } else { "" };
    format!("penstock top{held}{old}  every {} s  {}", view.every, view.address)
}

fn draw_table(frame: &mut Frame<'_>, table: &mut Table, is_focus: bool, area: Rect) {
    let fitted = fit(table.columns, &table.rows, area.width.into(), table.from);
    let [caption, body] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    let style = if is_focus { BOLD } else { DIM };
    frame.render_widget(Line::styled(shorten(&said(table, &fitted), area.width.into()), style), caption);
    let cells =
        |row: &[String]| -> Vec<String> { fitted.iter().map(|(at, width)| shorten(&row[*at], *width)).collect() };
    let heads: Vec<String> = table.columns.iter().map(|column| column.head.to_owned()).collect();
    let rows: Vec<_> = table.rows.iter().map(|row| Row::new(cells(row))).collect();
    let widths = fitted.iter().map(|(_, width)| Constraint::Length(u16::try_from(*width).unwrap_or(u16::MAX)));
    let drawn = ratatui::widgets::Table::new(rows, widths)
        .header(Row::new(cells(&heads)).style(DIM))
        .column_spacing(GAP as u16)
        .row_highlight_style(if is_focus { CHOSEN } else { Style::new() });
    frame.render_stateful_widget(drawn, body, &mut table.state);
}

/// Line above a table: number of rows, their order, and the columns that are out of sight.
fn said(table: &Table, fitted: &[(usize, usize)]) -> String {
    let mut out = format!("{} {}", table.rows.len(), table.name);
    if let Some(at) = table.sorted {
        out += &format!("  by {}", table.columns[at].head);
    }
    if table.reversed {
        out += "  reversed";
    }
    let last = fitted.last().map_or(0, |(at, _)| *at);
    let (left, right) = (table.from - 1, table.columns.len() - 1 - last.max(table.from - 1));
    if left > 0 {
        out += &format!("  ← {left} more");
    }
    if right > 0 {
        out += &format!("  → {right} more columns");
    }
    out
}

/// Lines below the tables: the workers' troubles, and all values of the selected row.
fn below(view: &View, width: usize) -> Vec<Line<'static>> {
    let mut lines: Vec<_> =
        view.troubles.iter().flat_map(|text| wrapped(text, width)).map(|line| Line::styled(line, BOLD)).collect();
    let table = &view.tables[view.focus];
    let Some(row) = table.selected() else { return lines };
    let pairs = table.columns.iter().zip(row).filter(|(_, cell)| *cell != "-");
    let pairs = pairs.map(|(column, cell)| format!("{} {cell}", column.head));
    lines.push(Line::default());
    lines.extend(flowed(pairs, width).into_iter().map(Line::raw));
    lines
}

/// Pieces on as few lines as they need; a piece that is wider than a line is wrapped.
fn flowed(pieces: impl Iterator<Item = String>, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for piece in pieces {
        match lines.last_mut() {
            Some(line) if line.width() + 3 + piece.width() <= width => *line += &format!(" · {piece}"),
            _ => lines.extend(wrapped(&piece, width)),
        }
    }
    lines
}

/// `text` broken between words; a word that is wider than a line is shortened.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.width() + 1 + word.width() <= width => *line += &format!(" {word}"),
            _ => lines.push(shorten(word, width)),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
    use serde_json::{Value, json};

    use super::super::columns::Kind;
    use super::*;

    fn workers() -> Vec<Value> {
        let worker = |at: usize| {
            json!({ "name": format!("{at:02}-pool-of-chat-models-with-a-long-name-量化"), "phase": "ready", "role": "prefill",
                "sequences_running": 1000 + at, "sequences_waiting": 31, "queue": "1234.5 s", "step": "251 ms",
                "step_p99": "1.5 s", "tokens_rate": "123456", "hits": "98 %", "kv": "100 %", "kv_in": "1024.5 MB/s",
                "kv_out": "2048.5 MB/s", "troubles": if at == 0 { json!(["KV tier disk is off: it failed"]) } else { json!([]) } })
        };
        (0..40).map(worker).collect()
    }

    fn pools() -> Vec<Value> {
        let pool = |at: usize| {
            json!({ "id": format!("{at}-a-pool-with-an-uncommonly-long-name"), "ready": "12 of 16", "open": 2345, "waiting": 678,
                "ttft": "12.5 s", "tokens_rate": "1234567", "hits": "87 %", "kv_moved": "123456.7 MB", "hidden": "99 %",
                "role_advice": "two more for prefill", "replicas_wanted": "16 (1 to 16, dry run)", "late": "2 %",
                "counts": { "prefilled_apart": 987_654, "moves": 12, "resumed": 3, "failed": 44 }, "transfers": { "first_tokens": 55 },
                "replicas": { "reason": "more than one in twenty requests waited longer for its first token than it may",
                    "last_failure": "fork/exec: no such file or directory" } })
        };
        (0..3).map(pool).collect()
    }

    fn screen(view: &mut View, (width, height): (u16, u16)) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, view)).unwrap();
        let buffer = terminal.backend().buffer();
        // A wide letter takes two cells, and is the symbol of the first.
        let line = |y| {
            let (mut line, mut x) = (String::new(), 0);
            while x < width {
                let symbol = buffer[(x, y)].symbol();
                line += symbol;
                x += (symbol.width() as u16).max(1);
            }
            line.trim_end().to_owned()
        };
        (0..height).map(line).collect()
    }

    fn press(view: &mut View, code: KeyCode) {
        view.on(&Event::Key(KeyEvent::new(code, KeyModifiers::NONE)));
    }

    fn view() -> View {
        let mut view = View::new("127.0.0.1:9090".into(), 1.0);
        view.update(&pools(), &workers());
        view
    }

    /// Cells of a row as the screen has them. Two spaces separate cells; no text of the tests has two.
    fn parts(line: &str) -> Vec<&str> {
        line.split("  ").map(str::trim).filter(|part| !part.is_empty()).collect()
    }

    /// Checks that each cell is whole, or is a text that ends with `…`.
    fn are_whole(lines: &[String], table: &Table) -> usize {
        let mut seen = 0;
        for line in lines {
            let begins = line.split('…').next().unwrap_or_default().split("  ").next().unwrap_or_default();
            let Some(row) =
                table.rows.iter().find(|row| parts(line).len() > 1 && begins.len() > 6 && row[0].starts_with(begins))
            else {
                continue;
            };
            for part in parts(line).into_iter().skip(1) {
                let is_text = part.strip_suffix('…').is_some_and(|start| {
                    let mut cells = row.iter().zip(table.columns);
                    cells.any(|(cell, column)| column.kind == Kind::Text && cell.starts_with(start))
                });
                assert!(is_text || row.iter().any(|cell| cell == part), "{part:?} of {line:?} is no cell of {row:?}");
                seen += 1;
            }
        }
        seen
    }

    #[test]
    fn no_figure_is_cut_at_any_width() {
        for width in (24..220).step_by(5).chain([80, 120, 500]) {
            let mut view = view();
            for _ in 0..8 {
                let lines = screen(&mut view, (width, 24));
                assert!(lines.iter().all(|line| line.width() <= usize::from(width)));
                let seen: usize = view.tables.iter().map(|table| are_whole(&lines, table)).sum();
                assert!(width < 60 || seen >= 10, "{width}: {seen} figures:\n{}", lines.join("\n"));
                for at in [0, 1] {
                    view.focus = at;
                    (0..3).for_each(|_| press(&mut view, KeyCode::Right));
                }
            }
        }
    }

    #[test]
    fn eighty_columns_show_both_tables_the_chosen_row_and_the_keys() {
        let mut view = view();
        let lines = screen(&mut view, (80, 24));
        let text = lines.join("\n");
        for want in [
            "penstock top  every 1 s  127.0.0.1:9090",
            "3 pools  → 14 more columns",
            "40 workers  → 7 more columns",
            "12 of 16",
            "00-pool-of-chat-",
            "…  ready  prefill  1000",
            "KV tier disk is off: it failed",
            "kv out 2048.5 MB/s",
            "step p99 1.5 s",
            KEYS,
        ] {
            assert!(text.contains(want), "{want}:\n{text}");
        }
        press(&mut view, KeyCode::End);
        assert!(
            screen(&mut view, (80, 24)).join("\n").contains("running 1039"),
            "the chosen row is in sight, its values below"
        );
        press(&mut view, KeyCode::Tab);
        assert!(screen(&mut view, (80, 24)).join(" ").contains("waited longer for its first token than it may"));
        view.failed("cannot reach 127.0.0.1:9090");
        let text = screen(&mut view, (80, 24)).join("\n");
        assert!(
            text.contains("NO ANSWER: the figures are old") && text.contains("cannot reach 127.0.0.1:9090"),
            "{text}"
        );
        press(&mut view, KeyCode::Char('?'));
        let text = screen(&mut view, (80, 24)).join("\n");
        assert!(HELP.lines().all(|line| text.contains(line)), "{text}");
    }

    #[test]
    fn a_wide_terminal_shows_every_column_and_long_names_whole() {
        let mut view = view();
        let text = screen(&mut view, (400, 60)).join("\n");
        assert!(!text.contains('…') && !text.contains("more columns"), "{text}");
        assert!(text.contains("last failure") && text.contains("fork/exec: no such file or directory"));
    }

    #[test]
    fn no_size_is_too_small() {
        for size in [(1, 1), (2, 9), (9, 2), (20, 5), (80, 3)] {
            let mut view = view();
            assert_eq!(screen(&mut view, size).len(), usize::from(size.1));
            view.update(&[], &[]);
            screen(&mut view, size);
        }
    }
}
