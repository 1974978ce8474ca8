//! Ledger statements in the dialect of each SQL store, and the decoding of their rows, shared by all stores.

use std::sync::Arc;

use super::direction;
use crate::{Entry, EntryFilter, Group, Held, OpenEntry, Page, Subject, Tokens, UsageQuery, UsageRow};

/// Columns of an entry at its opening.
pub(crate) const OPEN_COLUMNS: &str = "at, request, gateway, key_id, team_id, user_id, model, provider, route, tags, held_input, held_output, held_usd, state";
/// Columns that are added when an entry is settled.
pub(crate) const END_COLUMNS: &str =
    "input, input_cached, input_written, output, reasoning, micro_usd, status, outcome, attempts, first_ms, total_ms";
/// Most entries deleted in one transaction.
const SWEEP_MAX: u32 = 2000;

/// Value of `state`: the request is in progress.
pub(crate) const OPEN: u8 = 0;
/// Value of `state`: settled by its gateway.
pub(crate) const SETTLED: u8 = 1;
/// Value of `state`: settled with the reservation, since its gateway died.
pub(crate) const ASSUMED: u8 = 2;

/// Differences between the SQL dialects of the stores.
pub(crate) struct Words {
    /// Name of the table with the ledger's entries.
    pub(crate) table: &'static str,
    /// Name of the table of gateways' lives.
    pub(crate) lives: &'static str,
    /// Prefix of a placeholder, before its number, which counts from 1.
    pub(crate) place: char,
    /// Converts a number to text that is compared byte by byte.
    pub(crate) text: fn(number: &str) -> String,
    /// Sum of a column as a 64-bit number that does not overflow.
    pub(crate) sum: fn(column: &str) -> String,
    /// Condition that an entry has the tag at a placeholder.
    pub(crate) has_tag: fn(place: &str) -> String,
    /// Condition that an entry has no tags.
    pub(crate) untagged: &'static str,
    /// Join of an entry with each of its tags, or with none.
    pub(crate) join_tags: &'static str,
    /// Column of the tag in the join with an entry's tags.
    pub(crate) tag: &'static str,
    /// Lock clause of a query for rows to be deleted.
    pub(crate) lock: &'static str,
}

/// Value of a statement's parameter.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// Number; values beyond the store's largest one saturate.
    Number(u64),
    Text(String),
}

/// Statement with its parameter values, in the order of their placeholders.
pub(crate) struct Question {
    pub(crate) sql: String,
    pub(crate) values: Vec<Value>,
    place: char,
}

impl Question {
    /// Adds a parameter value and returns its placeholder.
    fn with(&mut self, value: Value) -> String {
        self.values.push(value);
        format!("{}{}", self.place, self.values.len())
    }

    fn with_text(&mut self, text: &str) -> String {
        self.with(Value::Text(text.to_owned()))
    }
}

impl Words {
    /// Insert of open entries; `rows` is their source (`VALUES` or a select).
    pub(crate) fn open(&self, rows: &str) -> String {
        format!("INSERT INTO {} ({OPEN_COLUMNS}) {rows} ON CONFLICT (at, request) DO NOTHING", self.table)
    }

    /// Insert or update of settled entries; `rows` is their source.
    pub(crate) fn settle(&self, rows: &str) -> String {
        let columns = format!("{OPEN_COLUMNS}, {END_COLUMNS}");
        let set = columns.split(", ").skip(2).map(|column| format!("{column} = excluded.{column}"));
        format!(
            "INSERT INTO {} AS old ({columns}) {rows} ON CONFLICT (at, request) DO UPDATE SET {}
             WHERE old.state = {OPEN} OR (old.state = {ASSUMED} AND excluded.state = {SETTLED})",
            self.table,
            set.collect::<Vec<_>>().join(", ")
        )
    }

    fn ask(&self) -> Question {
        Question { sql: String::new(), values: Vec::new(), place: self.place }
    }

    /// Open entries from before a time, of one gateway's life or of all.
    pub(crate) fn orphans(&self, before: u64, gateway: Option<&str>, limit: u32) -> Question {
        let mut question = self.ask();
        let mut rule = format!("state = {OPEN} AND at < {}", question.with(Value::Number(before)));
        if let Some(gateway) = gateway {
            rule += &format!(" AND gateway = {}", question.with_text(gateway));
        }
        let limit = question.with(Value::Number(limit.into()));
        question.sql =
            format!("SELECT {OPEN_COLUMNS} FROM {} WHERE {rule} ORDER BY at, request LIMIT {limit}", self.table);
        question
    }

    /// Open entries of lives that are silent since before a time, and those from before `ancient` of lives that never
    /// reported.
    pub(crate) fn left(&self, before: u64, ancient: u64, limit: u32) -> Question {
        let (mut question, lives) = (self.ask(), self.lives);
        let (before, ancient) = (question.with(Value::Number(before)), question.with(Value::Number(ancient)));
        let limit = question.with(Value::Number(limit.into()));
        question.sql = format!(
            "SELECT {OPEN_COLUMNS} FROM {} WHERE state = {OPEN} AND gateway NOT IN (SELECT gateway FROM {lives} WHERE seen >= {before})
             AND (at < {ancient} OR gateway IN (SELECT gateway FROM {lives})) ORDER BY at, request LIMIT {limit}",
            self.table
        );
        question
    }

    /// Statement that reads the settled entry of a request that arrived at `at`.
    pub(crate) fn entry(&self, at: u64, request: &str) -> Question {
        let mut question = self.ask();
        let (at, request) = (question.with(Value::Number(at)), question.with_text(request));
        question.sql = format!(
            "SELECT {OPEN_COLUMNS}, {END_COLUMNS} FROM {} WHERE at = {at} AND request = {request} AND state > {OPEN}",
            self.table
        );
        question
    }

    /// Settled entries of a page; `None`: the page's position is invalid.
    pub(crate) fn entries(&self, filter: &EntryFilter, page: &Page) -> Option<Question> {
        let (order, beyond) = direction(page.order);
        let mut question = self.ask();
        let mut rule = self.rule(filter, &mut question);
        if let Some(after) = &page.after {
            let (at, request) = after.split_once('.')?;
            let (at, request) = (question.with(Value::Number(at.parse().ok()?)), question.with_text(request));
            rule += &format!(" AND (at, request) {beyond} ({at}, {request})");
        }
        let limit = question.with(Value::Number(u64::from(page.limit) + 1));
        question.sql = format!(
            "SELECT {OPEN_COLUMNS}, {END_COLUMNS} FROM {} WHERE {rule} ORDER BY at {order}, request {order} LIMIT {limit}",
            self.table
        );
        Some(question)
    }

    /// Sums of settled entries: eight numbers, then the values of the groups.
    pub(crate) fn usage(&self, query: &UsageQuery) -> Question {
        let mut question = self.ask();
        let mut rule = self.rule(&query.filter, &mut question);
        let columns: Vec<_> = query.groups.iter().map(|group| self.column(*group)).collect();
        if let Some(after) = query.after.as_ref().filter(|after| !after.is_empty()) {
            let places: Vec<_> = after.iter().map(|value| question.with_text(value)).collect();
            rule += &format!(" AND ({}) > ({})", columns.join(", "), places.join(", "));
        }
        let sums = ["input", "input_cached", "input_written", "output", "reasoning", "micro_usd"].map(self.sum);
        let selected: String = columns.iter().map(|column| format!(", {column}")).collect();
        let places: Vec<_> = (9..9 + columns.len()).map(|at| at.to_string()).collect();
        let grouped = match places.join(", ").as_str() {
            "" => "HAVING count(*) > 0".to_owned(),
            places => format!("GROUP BY {places} ORDER BY {places}"),
        };
        let tags = if query.groups.contains(&Group::Tag) { self.join_tags } else { "" };
        let limit = question.with(Value::Number(u64::from(query.limit) + 1));
        question.sql = format!(
            "SELECT count(*), count(*) FILTER (WHERE status = 0 OR status >= 400), {}{selected}
             FROM {} {tags} WHERE {rule} {grouped} LIMIT {limit}",
            sums.join(", "),
            self.table
        );
        question
    }

    /// Deletion of some settled entries from before a time.
    pub(crate) fn sweep(&self, before: u64) -> Question {
        let (mut question, table) = (self.ask(), self.table);
        let before = question.with(Value::Number(before));
        question.sql = format!(
            "DELETE FROM {table} WHERE (at, request) IN (
               SELECT at, request FROM {table} WHERE at < {before} AND state > {OPEN} LIMIT {SWEEP_MAX}{})",
            self.lock
        );
        question
    }

    /// Condition for the entries of a filter.
    fn rule(&self, filter: &EntryFilter, question: &mut Question) -> String {
        let (from, until) = (question.with(Value::Number(filter.from)), question.with(Value::Number(filter.until)));
        let mut rule = format!("state > {OPEN} AND at >= {from} AND at < {until}");
        for (column, value) in [
            ("key_id", &filter.key),
            ("team_id", &filter.team),
            ("user_id", &filter.user),
            ("model", &filter.model),
            ("provider", &filter.provider),
            ("route", &filter.route),
        ] {
            if let Some(value) = value {
                rule += &format!(" AND {column} = {}", question.with_text(value));
            }
        }
        match filter.tag.as_deref() {
            Some("") => rule += &format!(" AND {}", self.untagged),
            Some(tag) => rule += &format!(" AND {}", (self.has_tag)(&question.with_text(tag))),
            None => {}
        }
        rule
    }

    fn column(&self, group: Group) -> String {
        match group {
            Group::Key => "key_id".into(),
            Group::Team => "team_id".into(),
            Group::User => "user_id".into(),
            Group::Model => "model".into(),
            Group::Provider => "provider".into(),
            Group::Route => "route".into(),
            Group::Day => (self.text)("(at - at % 86400)"),
            Group::Hour => (self.text)("(at - at % 3600)"),
            Group::Tag => self.tag.into(),
        }
    }
}

/// Row of a query result. Columns count from 0.
pub(crate) trait Columns {
    type Error;
    fn number(&self, at: usize) -> Result<u64, Self::Error>;
    fn text(&self, at: usize) -> Result<String, Self::Error>;
    fn texts(&self, at: usize) -> Result<Vec<String>, Self::Error>;
}

/// Reads an open entry from a row with [`OPEN_COLUMNS`].
pub(crate) fn open_entry<R: Columns>(row: &R) -> Result<OpenEntry, R::Error> {
    Ok(OpenEntry {
        at: row.number(0)?,
        request: row.text(1)?,
        gateway: row.text(2)?.into(),
        subject: Arc::new(Subject {
            key: row.text(3)?,
            team: row.text(4)?,
            user: row.text(5)?,
            model: row.text(6)?,
            provider: row.text(7)?,
            route: row.text(8)?,
            tags: row.texts(9)?,
        }),
        held: Held { input: row.number(10)?, output: row.number(11)?, micro_usd: row.number(12)? },
    })
}

/// Decodes a row of [`OPEN_COLUMNS`] and [`END_COLUMNS`].
pub(crate) fn entry<R: Columns>(row: &R) -> Result<Entry, R::Error> {
    Ok(Entry {
        opened: open_entry(row)?,
        assumed: row.number(13)? == u64::from(ASSUMED),
        tokens: tokens(row, 14)?,
        micro_usd: row.number(19)?,
        status: row.number(20)? as u16,
        outcome: row.text(21)?.into(),
        attempts: row.number(22)? as u32,
        first_ms: row.number(23)?,
        total_ms: row.number(24)?,
    })
}

/// Reads the sums of one group from a row of [`Words::usage`], whose first `groups` columns are the group's values.
pub(crate) fn usage_row<R: Columns>(row: &R, groups: usize) -> Result<UsageRow, R::Error> {
    Ok(UsageRow {
        requests: row.number(0)?,
        failed: row.number(1)?,
        tokens: tokens(row, 2)?,
        micro_usd: row.number(7)?,
        values: (8..8 + groups).map(|at| row.text(at)).collect::<Result<_, _>>()?,
    })
}

/// Token counts from five columns, of which `at` is the index of the first.
fn tokens<R: Columns>(row: &R, at: usize) -> Result<Tokens, R::Error> {
    Ok(Tokens {
        input: row.number(at)?,
        input_cached: row.number(at + 1)?,
        input_written: row.number(at + 2)?,
        output: row.number(at + 3)?,
        reasoning: row.number(at + 4)?,
    })
}
