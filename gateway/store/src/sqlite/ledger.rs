//! [`Ledger`] in SQLite. The statements are those of `sql::ledger`; this module binds and reads the rows.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::types::ToSqlOutput;
use rusqlite::{Connection, OptionalExtension, Row, Statement, ToSql, params, params_from_iter};

use super::Sqlite;
use super::keys::json;
use super::lane::ANSWER_TIMEOUT;
use crate::json::to_json;
use crate::ledger::{SILENT_SECONDS_MAX, check_batch, check_id, check_usage};
use crate::sql::ledger::{ASSUMED, Columns, OPEN, Question, SETTLED, Value, Words, entry, open_entry, usage_row};
use crate::sql::listing;
use crate::{Entry, EntryFilter, Ledger, Listing, OpenEntry, Page, StoreError, Subject, Tokens, UsageQuery, UsageRow};

const WORDS: Words = Words {
    table: "ledger",
    lives: "lives",
    place: '?',
    text: |number| format!("CAST({number} AS TEXT)"),
    // `total` is a double, exact up to 2^53, and cannot overflow as `sum` does.
    sum: |column| format!("CAST(total({column}) AS INTEGER)"),
    has_tag: |place| format!("EXISTS (SELECT 1 FROM json_each(ledger.tags) one WHERE one.value = {place})"),
    untagged: "ledger.tags = '[]'",
    join_tags: "LEFT JOIN json_each(ledger.tags) tag",
    tag: "coalesce(tag.value, '')",
    lock: "",
};

impl ToSql for Value {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(match self {
            Value::Number(number) => i64::try_from(*number).unwrap_or(i64::MAX).into(),
            Value::Text(text) => text.as_str().into(),
        })
    }
}

impl Columns for Row<'_> {
    type Error = rusqlite::Error;

    fn number(&self, at: usize) -> rusqlite::Result<u64> {
        self.get(at)
    }

    fn text(&self, at: usize) -> rusqlite::Result<String> {
        self.get(at)
    }

    fn texts(&self, at: usize) -> rusqlite::Result<Vec<String>> {
        json(self, at)
    }
}

/// Statement that inserts rows one by one. Bound values persist, so values equal to the previous row's, most of a row,
/// are not bound again.
struct Rows<'c> {
    statement: Statement<'c>,
    gateway: Option<Arc<str>>,
    subject: Option<Arc<Subject>>,
}

impl<'c> Rows<'c> {
    fn new(connection: &'c Connection, say: fn(&Words, &str) -> String, columns: usize) -> Result<Self, StoreError> {
        let places: Vec<_> = (1..=columns).map(|at| format!("?{at}")).collect();
        let statement = connection.prepare(&say(&WORDS, &format!("VALUES ({})", places.join(", "))))?;
        Ok(Self { statement, gateway: None, subject: None })
    }

    fn bind_open(&mut self, entry: &OpenEntry, state: u8) -> Result<(), StoreError> {
        let statement = &mut self.statement;
        statement.raw_bind_parameter(1, entry.at)?;
        statement.raw_bind_parameter(2, &entry.request)?;
        if self.gateway.as_ref().is_none_or(|last| !Arc::ptr_eq(last, &entry.gateway)) {
            statement.raw_bind_parameter(3, &*entry.gateway)?;
            self.gateway = Some(entry.gateway.clone());
        }
        // Another thread of the gateway has its own `Arc` of an equal subject.
        if self.subject.as_ref().is_none_or(|last| !Arc::ptr_eq(last, &entry.subject) && last != &entry.subject) {
            let who = entry.subject.bounded();
            for (at, name) in (4..).zip([&who.key, &who.team, &who.user, &who.model, &who.provider, &who.route]) {
                statement.raw_bind_parameter(at, name)?;
            }
            statement.raw_bind_parameter(10, to_json(&who.tags)?)?;
            self.subject = Some(entry.subject.clone());
        }
        for (at, number) in (11..).zip([entry.held.input, entry.held.output, entry.held.micro_usd, state.into()]) {
            statement.raw_bind_parameter(at, number)?;
        }
        Ok(())
    }

    fn bind_end(&mut self, entry: &Entry) -> Result<(), StoreError> {
        let Tokens { input, input_cached, input_written, output, reasoning } = entry.tokens;
        let statement = &mut self.statement;
        let numbers = [input, input_cached, input_written, output, reasoning, entry.micro_usd, entry.status.into()];
        for (at, number) in (15..).zip(numbers) {
            statement.raw_bind_parameter(at, number)?;
        }
        statement.raw_bind_parameter(22, &*entry.outcome)?;
        for (at, number) in (23..).zip([entry.attempts.into(), entry.first_ms, entry.total_ms]) {
            statement.raw_bind_parameter(at, number)?;
        }
        Ok(())
    }
}

fn open(connection: &Connection, entries: &[OpenEntry]) -> Result<(), StoreError> {
    let mut rows = Rows::new(connection, Words::open, 14)?;
    for entry in entries {
        rows.bind_open(entry, OPEN)?;
        rows.statement.raw_execute()?;
    }
    Ok(())
}

fn settle(connection: &Connection, entries: &[Entry]) -> Result<Vec<bool>, StoreError> {
    let mut rows = Rows::new(connection, Words::settle, 25)?;
    let mut kept = Vec::with_capacity(entries.len());
    for entry in entries {
        rows.bind_open(&entry.opened, if entry.assumed { ASSUMED } else { SETTLED })?;
        rows.bind_end(entry)?;
        kept.push(rows.statement.raw_execute()? > 0);
    }
    Ok(kept)
}

/// Runs a question and decodes its rows.
fn found<T>(
    connection: &Connection,
    question: &Question,
    read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<Vec<T>, StoreError> {
    let mut statement = connection.prepare(&question.sql)?;
    let rows = statement.query_map(params_from_iter(&question.values), read)?;
    Ok(rows.collect::<Result<_, _>>()?)
}

#[async_trait]
impl Ledger for Sqlite {
    async fn open_entries(&self, entries: Arc<[OpenEntry]>) -> Result<(), StoreError> {
        check_batch(entries.iter())?;
        self.writer.run(move |connection| open(connection, &entries)).await
    }

    async fn settle_entries(&self, entries: Arc<[Entry]>) -> Result<Vec<bool>, StoreError> {
        check_batch(entries.iter().map(|entry| &entry.opened))?;
        self.writer.run(move |connection| settle(connection, &entries)).await
    }

    async fn orphans(&self, before: u64, gateway: Option<&str>, limit: u32) -> Result<Vec<OpenEntry>, StoreError> {
        let question = WORDS.orphans(before, gateway, limit);
        self.reader.run(move |connection| found(connection, &question, |row| open_entry(row))).await
    }

    async fn alive(&self, gateway: &str, now: u64) -> Result<(), StoreError> {
        check_id(gateway)?;
        let gateway = gateway.to_owned();
        let note = move |connection: &Connection| {
            let sql = "INSERT INTO lives (gateway, seen) VALUES (?1, ?2)
                       ON CONFLICT (gateway) DO UPDATE SET seen = max(seen, excluded.seen)";
            connection.execute(sql, params![gateway, now])?;
            let silent = now.saturating_sub(SILENT_SECONDS_MAX);
            connection.execute("DELETE FROM lives WHERE seen < ?1", [silent])?;
            Ok(())
        };
        self.writer.run(note).await
    }

    async fn left(&self, before: u64, ancient: u64, limit: u32) -> Result<Vec<OpenEntry>, StoreError> {
        let question = WORDS.left(before, ancient, limit);
        self.reader.run(move |connection| found(connection, &question, |row| open_entry(row))).await
    }

    async fn entry(&self, at: u64, request: &str) -> Result<Option<Entry>, StoreError> {
        let question = WORDS.entry(at, request);
        let find = move |connection: &Connection| {
            let mut statement = connection.prepare(&question.sql)?;
            Ok(statement.query_row(params_from_iter(&question.values), |row| entry(row)).optional()?)
        };
        self.reader.run(find).await
    }

    async fn entries(&self, filter: &EntryFilter, page: &Page) -> Result<Listing<Entry>, StoreError> {
        let Some(question) = WORDS.entries(filter, page) else { return Ok(listing(Vec::new(), page.limit)) };
        let items = self.reader.run(move |connection| found(connection, &question, |row| entry(row))).await?;
        Ok(listing(items, page.limit))
    }

    async fn usage(&self, query: &UsageQuery) -> Result<Listing<UsageRow>, StoreError> {
        self.usage_within(query, ANSWER_TIMEOUT).await
    }

    async fn usage_within(&self, query: &UsageQuery, patience: Duration) -> Result<Listing<UsageRow>, StoreError> {
        check_usage(query)?;
        let (question, groups) = (WORDS.usage(query), query.groups.len());
        let read = move |row: &Row<'_>| usage_row(row, groups);
        let items = self.reader.read_within(patience, move |connection| found(connection, &question, read)).await?;
        Ok(listing(items, query.limit))
    }

    async fn sweep_entries(&self, before: u64) -> Result<u64, StoreError> {
        let Question { sql, values, .. } = WORDS.sweep(before);
        self.writer.run(move |connection| Ok(connection.execute(&sql, params_from_iter(values))? as u64)).await
    }
}
