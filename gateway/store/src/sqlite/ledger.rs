//! [`Ledger`] in SQLite.

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, ToSql, params, params_from_iter};

use super::Sqlite;
use super::keys::json;
use crate::json::to_json;
use crate::ledger::{SILENT_SECONDS_MAX, check_batch, check_usage};
use crate::sql::{direction, listing};
use crate::{
    Entry, EntryFilter, Group, Held, Ledger, Listing, OpenEntry, Page, StoreError, Subject, Tokens, UsageQuery,
    UsageRow,
};

const OPEN_COLUMNS: &str =
    "request, gateway, at, key, team, user, model, provider, route, tags, held_input, held_output, held_usd, state";
const END_COLUMNS: &str =
    "input, input_cached, input_written, output, reasoning, micro_usd, status, outcome, attempts, first_ms, total_ms";
/// Entries deleted in one transaction.
const SWEEP_MAX: u32 = 2000;

const OPEN: u8 = 0;
const SETTLED: u8 = 1;
const ASSUMED: u8 = 2;

fn open_entry(row: &Row<'_>) -> rusqlite::Result<OpenEntry> {
    Ok(OpenEntry {
        request: row.get(0)?,
        gateway: row.get(1)?,
        at: row.get(2)?,
        subject: Subject {
            key: row.get(3)?,
            team: row.get(4)?,
            user: row.get(5)?,
            model: row.get(6)?,
            provider: row.get(7)?,
            route: row.get(8)?,
            tags: json(row, 9)?,
        },
        held: Held { input: row.get(10)?, output: row.get(11)?, micro_usd: row.get(12)? },
    })
}

fn entry(row: &Row<'_>) -> rusqlite::Result<Entry> {
    let opened = open_entry(row)?;
    Ok(Entry {
        request: opened.request,
        gateway: opened.gateway,
        at: opened.at,
        subject: opened.subject,
        held: opened.held,
        assumed: row.get::<_, u8>(13)? == ASSUMED,
        tokens: Tokens {
            input: row.get(14)?,
            input_cached: row.get(15)?,
            input_written: row.get(16)?,
            output: row.get(17)?,
            reasoning: row.get(18)?,
        },
        micro_usd: row.get(19)?,
        status: row.get(20)?,
        outcome: row.get(21)?,
        attempts: row.get(22)?,
        first_ms: row.get(23)?,
        total_ms: row.get(24)?,
    })
}

fn open(connection: &Connection, entries: Vec<OpenEntry>) -> Result<(), StoreError> {
    let sql = format!(
        "INSERT INTO ledger ({OPEN_COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, {OPEN})
         ON CONFLICT (request) DO NOTHING"
    );
    let mut statement = connection.prepare(&sql)?;
    for entry in entries {
        let (who, held) = (entry.subject.bounded(), entry.held);
        statement.execute(params![
            entry.request,
            entry.gateway,
            entry.at,
            who.key,
            who.team,
            who.user,
            who.model,
            who.provider,
            who.route,
            to_json(&who.tags)?,
            held.input,
            held.output,
            held.micro_usd
        ])?;
    }
    Ok(())
}

fn settle(connection: &Connection, entries: Vec<Entry>) -> Result<Vec<bool>, StoreError> {
    let sql = format!(
        "INSERT INTO ledger ({OPEN_COLUMNS}, {END_COLUMNS})
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?23, ?24, ?25)
         ON CONFLICT (request) DO UPDATE SET gateway = ?2, at = ?3, key = ?4, team = ?5, user = ?6, model = ?7, provider = ?8,
         route = ?9, tags = ?10, held_input = ?11, held_output = ?12, held_usd = ?13, state = ?14, input = ?15, input_cached = ?16,
         input_written = ?17, output = ?18, reasoning = ?19, micro_usd = ?20, status = ?21, outcome = ?22, attempts = ?23,
         first_ms = ?24, total_ms = ?25
         WHERE ledger.state = {OPEN} OR (ledger.state = {ASSUMED} AND excluded.state = {SETTLED})"
    );
    let mut statement = connection.prepare(&sql)?;
    let mut kept = Vec::with_capacity(entries.len());
    for entry in entries {
        let (who, held, tokens) = (entry.subject.bounded(), entry.held, entry.tokens);
        let changed = statement.execute(params![
            entry.request,
            entry.gateway,
            entry.at,
            who.key,
            who.team,
            who.user,
            who.model,
            who.provider,
            who.route,
            to_json(&who.tags)?,
            held.input,
            held.output,
            held.micro_usd,
            if entry.assumed { ASSUMED } else { SETTLED },
            tokens.input,
            tokens.input_cached,
            tokens.input_written,
            tokens.output,
            tokens.reasoning,
            entry.micro_usd,
            entry.status,
            entry.outcome,
            entry.attempts,
            entry.first_ms,
            entry.total_ms
        ])?;
        kept.push(changed > 0);
    }
    Ok(kept)
}

/// Conditions of a filter, and their values, numbered from 1.
fn conditions(filter: &EntryFilter) -> (String, Vec<Box<dyn ToSql>>) {
    let mut sql = format!("state > {OPEN} AND at >= ?1 AND at < ?2");
    // Beyond what SQLite counts to there is no time.
    let time = |at: u64| Box::new(i64::try_from(at).unwrap_or(i64::MAX)) as Box<dyn ToSql>;
    let mut values = vec![time(filter.from), time(filter.until)];
    for (column, value) in [
        ("key", &filter.key),
        ("team", &filter.team),
        ("user", &filter.user),
        ("model", &filter.model),
        ("provider", &filter.provider),
        ("route", &filter.route),
    ] {
        if let Some(value) = value {
            values.push(Box::new(value.clone()));
            sql.push_str(&format!(" AND {column} = ?{}", values.len()));
        }
    }
    if let Some(tag) = &filter.tag {
        values.push(Box::new(tag.clone()));
        let at = values.len();
        sql.push_str(&format!(
            " AND (EXISTS (SELECT 1 FROM json_each(ledger.tags) one WHERE one.value = ?{at}) OR (?{at} = '' AND ledger.tags = '[]'))"
        ));
    }
    (sql, values)
}

fn list(connection: &Connection, filter: &EntryFilter, page: &Page) -> Result<Listing<Entry>, StoreError> {
    let (order, beyond) = direction(page.order);
    let (mut sql, mut values) = conditions(filter);
    if let Some(after) = &page.after {
        values.push(Box::new(after.clone()));
        sql.push_str(&format!(" AND seq {beyond} (SELECT seq FROM ledger WHERE request = ?{})", values.len()));
    }
    values.push(Box::new(u64::from(page.limit) + 1));
    let sql = format!(
        "SELECT {OPEN_COLUMNS}, {END_COLUMNS} FROM ledger WHERE {sql} ORDER BY seq {order} LIMIT ?{}",
        values.len()
    );
    let mut statement = connection.prepare(&sql)?;
    let rows = statement.query_map(params_from_iter(values), entry)?;
    Ok(listing(rows.collect::<Result<_, _>>()?, page.limit))
}

fn column(group: Group) -> &'static str {
    match group {
        Group::Key => "key",
        Group::Team => "team",
        Group::User => "user",
        Group::Model => "model",
        Group::Provider => "provider",
        Group::Route => "route",
        Group::Day => "CAST(at - at % 86400 AS TEXT)",
        Group::Hour => "CAST(at - at % 3600 AS TEXT)",
        Group::Tag => "coalesce(tag.value, '')",
    }
}

fn usage(connection: &Connection, query: &UsageQuery) -> Result<Listing<UsageRow>, StoreError> {
    let (mut sql, mut values) = conditions(&query.filter);
    let columns = query.groups.iter().map(|group| column(*group)).collect::<Vec<_>>().join(", ");
    if let Some(after) = query.after.as_ref().filter(|after| !after.is_empty()) {
        let first = values.len() + 1;
        values.extend(after.iter().map(|value| Box::new(value.clone()) as Box<dyn ToSql>));
        let places = (first..=values.len()).map(|at| format!("?{at}")).collect::<Vec<_>>().join(", ");
        sql.push_str(&format!(" AND ({columns}) > ({places})"));
    }
    values.push(Box::new(u64::from(query.limit) + 1));
    let tags = if query.groups.contains(&Group::Tag) { "LEFT JOIN json_each(ledger.tags) tag" } else { "" };
    let (grouped, comma) = match columns.as_str() {
        "" => (String::from("HAVING count(*) > 0"), ""),
        columns => (format!("GROUP BY {columns} ORDER BY {columns}"), ","),
    };
    let sql = format!(
        "SELECT count(*), total(status = 0 OR status >= 400), total(input), total(input_cached), total(input_written), total(output),
         total(reasoning), total(micro_usd){comma}{columns} FROM ledger {tags} WHERE {sql} {grouped} LIMIT ?{}",
        values.len()
    );
    let mut statement = connection.prepare(&sql)?;
    let groups = query.groups.len();
    let rows = statement.query_map(params_from_iter(values), |row| usage_row(row, groups))?;
    Ok(listing(rows.collect::<Result<_, _>>()?, query.limit))
}

fn usage_row(row: &Row<'_>, groups: usize) -> rusqlite::Result<UsageRow> {
    // `total` is a double, exact up to 2^53, and cannot overflow as `sum` does.
    let sum = |at: usize| row.get::<_, f64>(at).map(|sum| sum as u64);
    Ok(UsageRow {
        requests: row.get(0)?,
        failed: sum(1)?,
        tokens: Tokens {
            input: sum(2)?,
            input_cached: sum(3)?,
            input_written: sum(4)?,
            output: sum(5)?,
            reasoning: sum(6)?,
        },
        micro_usd: sum(7)?,
        values: (8..8 + groups).map(|at| row.get(at)).collect::<Result<_, _>>()?,
    })
}

#[async_trait]
impl Ledger for Sqlite {
    async fn open_entries(&self, entries: Vec<OpenEntry>) -> Result<(), StoreError> {
        check_batch(entries.iter().map(|entry| &entry.request))?;
        self.writer.run(move |connection| open(connection, entries)).await
    }

    async fn settle_entries(&self, entries: Vec<Entry>) -> Result<Vec<bool>, StoreError> {
        check_batch(entries.iter().map(|entry| &entry.request))?;
        self.writer.run(move |connection| settle(connection, entries)).await
    }

    async fn orphans(&self, before: u64, gateway: Option<&str>, limit: u32) -> Result<Vec<OpenEntry>, StoreError> {
        let gateway = gateway.map(str::to_owned);
        let find = move |connection: &Connection| {
            let sql = format!(
                "SELECT {OPEN_COLUMNS} FROM ledger WHERE state = {OPEN} AND at < ?1 AND (?2 IS NULL OR gateway = ?2)
                 ORDER BY at, seq LIMIT ?3"
            );
            let mut statement = connection.prepare(&sql)?;
            let rows = statement.query_map(params![before, gateway, limit], open_entry)?;
            Ok(rows.collect::<Result<_, _>>()?)
        };
        self.reader.run(find).await
    }

    async fn alive(&self, gateway: &str, now: u64) -> Result<(), StoreError> {
        let gateway = gateway.to_owned();
        check_batch([&gateway].into_iter())?;
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
        let find = move |connection: &Connection| {
            let sql = format!(
                "SELECT {OPEN_COLUMNS} FROM ledger
                 WHERE state = {OPEN} AND gateway NOT IN (SELECT gateway FROM lives WHERE seen >= ?1)
                 AND (at < ?2 OR gateway IN (SELECT gateway FROM lives)) ORDER BY at, seq LIMIT ?3"
            );
            let mut statement = connection.prepare(&sql)?;
            let rows = statement.query_map(params![before, ancient, limit], open_entry)?;
            Ok(rows.collect::<Result<_, _>>()?)
        };
        self.reader.run(find).await
    }

    async fn entry(&self, request: &str) -> Result<Option<Entry>, StoreError> {
        let request = request.to_owned();
        let find = move |connection: &Connection| {
            let sql = format!("SELECT {OPEN_COLUMNS}, {END_COLUMNS} FROM ledger WHERE request = ?1 AND state > {OPEN}");
            Ok(connection.prepare(&sql)?.query_row([request], entry).optional()?)
        };
        self.reader.run(find).await
    }

    async fn entries(&self, filter: &EntryFilter, page: &Page) -> Result<Listing<Entry>, StoreError> {
        let (filter, page) = (filter.clone(), page.clone());
        self.reader.run(move |connection| list(connection, &filter, &page)).await
    }

    async fn usage(&self, query: &UsageQuery) -> Result<Listing<UsageRow>, StoreError> {
        check_usage(query)?;
        let query = query.clone();
        self.reader.run(move |connection| usage(connection, &query)).await
    }

    async fn sweep_entries(&self, before: u64) -> Result<u64, StoreError> {
        let sql = format!(
            "DELETE FROM ledger WHERE seq IN (SELECT seq FROM ledger WHERE at < ?1 AND state > {OPEN} LIMIT {SWEEP_MAX})"
        );
        self.writer.run(move |connection| Ok(connection.execute(&sql, [before])? as u64)).await
    }
}
