//! State of the screen, and the effect of keys on it. No terminal here.

use std::cmp::Ordering;

use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::widgets::TableState;
use serde_json::Value;

use super::columns::{Column, Kind, POOLS, WORKERS, cells, of_workers};
use super::figures::troubles;

/// Help on keys, for the screen and the command.
pub(super) const HELP: &str = "\
Keys:
  q, Ctrl-C            leave
  ?, h                 show or hide these lines
  p, Space             hold the figures, and go on
  Tab                  pools or workers
  Up, Down, PgUp,
  PgDn, Home, End      choose a row; its values stand below the tables
  Left, Right          show other columns
  s, S                 sort by the next or the previous column
  r                    the other way round";

/// Rows of a step with PgUp and PgDn.
const PAGE_ROWS: isize = 10;

/// Effect of a key on the program.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Then {
    Stay,
    Leave,
}

/// One of the two tables.
pub(super) struct Table {
    pub(super) name: &'static str,
    pub(super) columns: &'static [Column],
    /// Whole texts, in the order in which they are shown.
    pub(super) rows: Vec<Vec<String>>,
    /// Column to sort by; the gateway's order without one.
    pub(super) sorted: Option<usize>,
    pub(super) reversed: bool,
    /// First column that is shown behind the names.
    pub(super) from: usize,
    /// Selected row, and the number of rows scrolled off.
    pub(super) state: TableState,
    arrived: Vec<Vec<String>>,
}

impl Table {
    fn new(name: &'static str, columns: &'static [Column]) -> Self {
        let state = TableState::new().with_selected(Some(0));
        let (rows, arrived) = (Vec::new(), Vec::new());
        Self { name, columns, rows, sorted: None, reversed: false, from: 1, state, arrived }
    }

    /// Selected row.
    pub(super) fn selected(&self) -> Option<&Vec<String>> {
        self.rows.get(self.state.selected()?)
    }

    fn update(&mut self, rows: &[Value]) {
        self.arrived = rows.iter().map(|row| cells(self.columns, row)).collect();
        self.arrange();
    }

    /// Takes other columns, of which the first ones stay.
    fn show(&mut self, columns: &'static [Column]) {
        self.columns = columns;
        self.sorted = self.sorted.filter(|at| *at < columns.len());
        self.from = self.from.min(columns.len() - 1);
    }

    /// Sorts the rows, and keeps the selected row selected wherever it goes.
    fn arrange(&mut self) {
        let name = self.selected().map(|row| row[0].clone());
        self.rows = self.arrived.clone();
        if let Some(at) = self.sorted {
            self.rows.sort_by(|a, b| compare(self.columns[at].kind, &a[at], &b[at]));
        }
        if self.reversed {
            self.rows.reverse();
        }
        let last = self.rows.len().saturating_sub(1);
        let now = self.rows.iter().position(|row| Some(&row[0]) == name.as_ref());
        self.state.select(Some(now.unwrap_or(self.state.selected().unwrap_or(0)).min(last)));
    }

    fn sort(&mut self, forth: bool) {
        // None, then each column, and around.
        let count = self.columns.len() + 1;
        let now = self.sorted.map_or(0, |at| at + 1);
        let next = if forth { now + 1 } else { now + count - 1 } % count;
        self.sorted = next.checked_sub(1);
        self.arrange();
    }

    fn choose(&mut self, by: isize) {
        let last = self.rows.len().saturating_sub(1);
        let now = self.state.selected().unwrap_or(0);
        self.state.select(Some(now.saturating_add_signed(by).min(last)));
    }
}

/// Order of two cells: largest figures first, texts in their order, empty cells last.
fn compare(kind: Kind, a: &str, b: &str) -> Ordering {
    match kind {
        Kind::Text => (a == "-").cmp(&(b == "-")).then_with(|| a.cmp(b)),
        Kind::Figure => magnitude(b).unwrap_or(f64::NEG_INFINITY).total_cmp(&magnitude(a).unwrap_or(f64::NEG_INFINITY)),
    }
}

/// Number at the beginning of a figure; times in seconds.
fn magnitude(text: &str) -> Option<f64> {
    let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
    let number: f64 = number.parse().ok()?;
    Some(if unit == "ms" { number / 1e3 } else { number })
}

/// State of the whole screen.
pub(super) struct View {
    pub(super) address: String,
    pub(super) every: f64,
    /// Tables of pools and workers.
    pub(super) tables: [Table; 2],
    /// Index of the table that the keys act on.
    pub(super) focus: usize,
    pub(super) troubles: Vec<String>,
    pub(super) held: bool,
    pub(super) help: bool,
    /// Reason why the figures are old.
    pub(super) failure: Option<String>,
}

impl View {
    pub(super) fn new(address: String, every: f64) -> Self {
        Self {
            address,
            every,
            tables: [Table::new("pools", POOLS), Table::new("workers", WORKERS)],
            focus: 1,
            troubles: Vec::new(),
            held: false,
            help: false,
            failure: None,
        }
    }

    /// Takes new figures; drops them while the old ones are held.
    pub(super) fn update(&mut self, pools: &[Value], workers: &[Value]) {
        self.failure = None;
        if self.held {
            return;
        }
        self.troubles = troubles(workers);
        self.tables[0].update(pools);
        self.tables[1].show(of_workers(workers));
        self.tables[1].update(workers);
    }

    /// Notes that there are no new figures, and why.
    pub(super) fn failed(&mut self, why: &str) {
        self.failure = Some(crate::out::harmless(why));
    }

    /// Applies a key.
    pub(super) fn on(&mut self, event: &Event) -> Then {
        match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => self.key(*key),
            _ => Then::Stay,
        }
    }

    fn key(&mut self, key: KeyEvent) -> Then {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if key.code == KeyCode::Char('c') { Then::Leave } else { Then::Stay };
        }
        let table = &mut self.tables[self.focus];
        match key.code {
            KeyCode::Esc if self.help => self.help = false,
            KeyCode::Char('q') | KeyCode::Esc => return Then::Leave,
            KeyCode::Char('?' | 'h') => self.help = !self.help,
            KeyCode::Char('p' | ' ') => self.held = !self.held,
            KeyCode::Tab | KeyCode::BackTab => self.focus = 1 - self.focus,
            KeyCode::Char('s') => table.sort(true),
            KeyCode::Char('S') => table.sort(false),
            KeyCode::Char('r') => {
                table.reversed = !table.reversed;
                table.arrange();
            }
            KeyCode::Up | KeyCode::Char('k') => table.choose(-1),
            KeyCode::Down | KeyCode::Char('j') => table.choose(1),
            KeyCode::PageUp => table.choose(-PAGE_ROWS),
            KeyCode::PageDown => table.choose(PAGE_ROWS),
            KeyCode::Home => table.choose(isize::MIN),
            KeyCode::End => table.choose(isize::MAX),
            KeyCode::Left => table.from = (table.from - 1).max(1),
            KeyCode::Right => table.from = (table.from + 1).min(table.columns.len() - 1),
            _ => {}
        }
        Then::Stay
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn press(view: &mut View, code: KeyCode) -> Then {
        view.on(&Event::Key(KeyEvent::new(code, KeyModifiers::NONE)))
    }

    fn names(view: &View) -> Vec<&str> {
        view.tables[1].rows.iter().map(|row| row[0].as_str()).collect()
    }

    fn view() -> View {
        let mut view = View::new("127.0.0.1:9".into(), 1.0);
        let worker = |name: &str, running: u64, queue: &str| json!({ "name": name, "sequences_running": running, "queue": queue });
        view.update(&[], &[worker("b", 2, "900 ms"), worker("a", 10, "1.5 s"), worker("c", 1, "-")]);
        view
    }

    #[test]
    fn rows_are_sorted_by_what_figures_mean() {
        let mut view = view();
        assert_eq!(names(&view), ["b", "a", "c"], "the gateway's order");
        let mut sorted_by = |head: &str| {
            while view.tables[1].sorted.is_none_or(|at| WORKERS[at].head != head) {
                press(&mut view, KeyCode::Char('s'));
            }
            names(&view).concat()
        };
        assert_eq!(["worker", "running", "queue"].map(&mut sorted_by), ["abc", "abc", "abc"]);
        press(&mut view, KeyCode::Char('r'));
        assert_eq!(names(&view), ["c", "b", "a"]);
        press(&mut view, KeyCode::Char('S'));
        assert_eq!(view.tables[1].sorted.map(|at| WORKERS[at].head), Some("waiting"));
    }

    #[test]
    fn the_chosen_row_stays_chosen() {
        let mut view = view();
        press(&mut view, KeyCode::Down);
        assert_eq!(view.tables[1].selected().unwrap()[0], "a");
        press(&mut view, KeyCode::Char('s'));
        assert_eq!((view.tables[1].selected().unwrap()[0].as_str(), view.tables[1].state.selected()), ("a", Some(0)));
        view.update(&[], &[json!({ "name": "c" }), json!({ "name": "b" })]);
        assert_eq!(view.tables[1].selected().unwrap()[0], "b", "the one in its place");
        for (code, want) in [(KeyCode::End, "c"), (KeyCode::Home, "b"), (KeyCode::PageDown, "c"), (KeyCode::Up, "b")] {
            press(&mut view, code);
            assert_eq!(view.tables[1].selected().unwrap()[0], want, "{code:?}");
        }
    }

    #[test]
    fn figures_can_be_held_and_the_screen_left() {
        let mut view = view();
        press(&mut view, KeyCode::Char('p'));
        view.update(&[], &[]);
        assert_eq!(names(&view).len(), 3);
        press(&mut view, KeyCode::Char(' '));
        view.update(&[], &[]);
        assert_eq!(names(&view).len(), 0);
        assert_eq!(press(&mut view, KeyCode::Down), Then::Stay, "there is nothing to choose");
        press(&mut view, KeyCode::Char('?'));
        assert!(view.help);
        assert_eq!((press(&mut view, KeyCode::Esc), view.help), (Then::Stay, false));
        assert_eq!(press(&mut view, KeyCode::Char('q')), Then::Leave);
        assert_eq!(view.on(&Event::Key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL))), Then::Leave);
    }
}
