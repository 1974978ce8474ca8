//! [`Ledger`] in PostgreSQL. A batch of entries is one statement, its rows sent as one JSON value.

use std::collections::HashSet;

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::Postgres;
use super::held::{cell, int, number};
use crate::json::to_json;
use crate::ledger::{SILENT_SECONDS_MAX, check_batch, check_usage};
use crate::sql::{direction, listing};
use crate::{
    Entry, EntryFilter, Group, Held, Ledger, Listing, OpenEntry, Page, StoreError, Subject, Tokens, UsageQuery,
    UsageRow,
};

const OPEN_COLUMNS: &str = "request, gateway, at, key_id, team_id, user_id, model, provider, route, tags, held_input, held_output, held_usd, state";
const OPEN_TYPES: &str = "request text, gateway text, at bigint, key_id text, team_id text, user_id text, model text, provider text, \
                          route text, tags jsonb, held_input bigint, held_output bigint, held_usd bigint, state bigint";
const END_COLUMNS: &str =
    "input, input_cached, input_written, output, reasoning, micro_usd, status, outcome, attempts, first_ms, total_ms";
const END_TYPES: &str = "input bigint, input_cached bigint, input_written bigint, output bigint, reasoning bigint, micro_usd bigint, \
                         status bigint, outcome text, attempts bigint, first_ms bigint, total_ms bigint";
/// Entries deleted in one transaction.
const SWEEP_MAX: i64 = 2000;

const OPEN: i64 = 0;
const SETTLED: i64 = 1;
const ASSUMED: i64 = 2;

fn open_row(entry: OpenEntry, state: i64) -> Value {
    let who = entry.subject.bounded();
    json!({
        "request": entry.request, "gateway": entry.gateway.replace('\0', ""), "at": int(entry.at),
        "key_id": who.key, "team_id": who.team, "user_id": who.user, "model": who.model, "provider": who.provider,
        "route": who.route, "tags": who.tags, "held_input": int(entry.held.input),
        "held_output": int(entry.held.output), "held_usd": int(entry.held.micro_usd), "state": state,
    })
}

fn end_row(entry: Entry) -> Value {
    let tokens = entry.tokens;
    let end = json!({
        "input": int(tokens.input), "input_cached": int(tokens.input_cached),
        "input_written": int(tokens.input_written), "output": int(tokens.output),
        "reasoning": int(tokens.reasoning), "micro_usd": int(entry.micro_usd), "status": entry.status,
        "outcome": entry.outcome.replace('\0', ""), "attempts": entry.attempts, "first_ms": int(entry.first_ms),
        "total_ms": int(entry.total_ms),
    });
    let Entry { request, gateway, at, subject, held, assumed, .. } = entry;
    let mut row = open_row(OpenEntry { request, gateway, at, subject, held }, if assumed { ASSUMED } else { SETTLED });
    if let (Value::Object(row), Value::Object(end)) = (&mut row, end) {
        row.extend(end);
    }
    row
}

fn open_entry(row: &Row) -> Result<OpenEntry, StoreError> {
    Ok(OpenEntry {
        request: cell(row, 0)?,
        gateway: cell(row, 1)?,
        at: number(row, 2)?,
        subject: Subject {
            key: cell(row, 3)?,
            team: cell(row, 4)?,
            user: cell(row, 5)?,
            model: cell(row, 6)?,
            provider: cell(row, 7)?,
            route: cell(row, 8)?,
            tags: cell(row, 9)?,
        },
        held: Held { input: number(row, 10)?, output: number(row, 11)?, micro_usd: number(row, 12)? },
    })
}

fn entry(row: &Row) -> Result<Entry, StoreError> {
    let opened = open_entry(row)?;
    Ok(Entry {
        request: opened.request,
        gateway: opened.gateway,
        at: opened.at,
        subject: opened.subject,
        held: opened.held,
        assumed: cell::<i64>(row, 13)? == ASSUMED,
        tokens: Tokens {
            input: number(row, 14)?,
            input_cached: number(row, 15)?,
            input_written: number(row, 16)?,
            output: number(row, 17)?,
            reasoning: number(row, 18)?,
        },
        micro_usd: number(row, 19)?,
        status: number(row, 20)? as u16,
        outcome: cell(row, 21)?,
        attempts: number(row, 22)? as u32,
        first_ms: number(row, 23)?,
        total_ms: number(row, 24)?,
    })
}

/// Values of a statement that is put together.
type Values = Vec<Box<dyn ToSql + Sync + Send>>;

fn refer(values: &Values) -> Vec<&(dyn ToSql + Sync)> {
    values.iter().map(|value| value.as_ref() as &(dyn ToSql + Sync)).collect()
}

/// Conditions of a filter, and their values, numbered from 1.
fn conditions(filter: &EntryFilter) -> (String, Values) {
    let mut sql = format!("state > {OPEN} AND at >= $1 AND at < $2");
    let mut values: Values = vec![Box::new(int(filter.from)), Box::new(int(filter.until))];
    for (column, value) in [
        ("key_id", &filter.key),
        ("team_id", &filter.team),
        ("user_id", &filter.user),
        ("model", &filter.model),
        ("provider", &filter.provider),
        ("route", &filter.route),
    ] {
        if let Some(value) = value {
            values.push(Box::new(value.clone()));
            sql.push_str(&format!(" AND {column} = ${}", values.len()));
        }
    }
    if let Some(tag) = &filter.tag {
        values.push(Box::new(tag.clone()));
        let at = values.len();
        sql.push_str(&format!(" AND (${at} = ANY (tags) OR (${at} = '' AND cardinality(tags) = 0))"));
    }
    (sql, values)
}

fn column(group: Group) -> &'static str {
    match group {
        Group::Key => "key_id",
        Group::Team => "team_id",
        Group::User => "user_id",
        Group::Model => "model",
        Group::Provider => "provider",
        Group::Route => "route",
        Group::Day => "(at - at % 86400)::text COLLATE \"C\"",
        Group::Hour => "(at - at % 3600)::text COLLATE \"C\"",
        Group::Tag => "coalesce(tag, '') COLLATE \"C\"",
    }
}

fn usage_row(row: &Row, groups: usize) -> Result<UsageRow, StoreError> {
    Ok(UsageRow {
        requests: number(row, 0)?,
        failed: number(row, 1)?,
        tokens: Tokens {
            input: number(row, 2)?,
            input_cached: number(row, 3)?,
            input_written: number(row, 4)?,
            output: number(row, 5)?,
            reasoning: number(row, 6)?,
        },
        micro_usd: number(row, 7)?,
        values: (8..8 + groups).map(|at| cell(row, at)).collect::<Result<_, _>>()?,
    })
}

/// The question as SQL, and its values.
fn usage_sql(query: &UsageQuery) -> (String, Values) {
    let (mut sql, mut values) = conditions(&query.filter);
    let columns = query.groups.iter().map(|group| column(*group)).collect::<Vec<_>>();
    if let Some(after) = query.after.as_ref().filter(|after| !after.is_empty()) {
        let first = values.len() + 1;
        values.extend(after.iter().map(|value| Box::new(value.clone()) as Box<dyn ToSql + Sync + Send>));
        let places = (first..=values.len()).map(|at| format!("${at}")).collect::<Vec<_>>().join(", ");
        sql.push_str(&format!(" AND ROW({}) > ROW({places})", columns.join(", ")));
    }
    values.push(Box::new(i64::from(query.limit) + 1));
    let tags = if query.groups.contains(&Group::Tag) { "LEFT JOIN LATERAL unnest(tags) tag ON true" } else { "" };
    let selected = columns.iter().map(|column| format!(", {column}")).collect::<String>();
    let places = (9..9 + columns.len()).map(|at| at.to_string()).collect::<Vec<_>>().join(", ");
    let grouped = match places.as_str() {
        "" => "HAVING count(*) > 0".to_owned(),
        places => format!("GROUP BY {places} ORDER BY {places}"),
    };
    let sums = ["input", "input_cached", "input_written", "output", "reasoning", "micro_usd"]
        .map(|column| format!("least(sum({column}), 9007199254740991)::bigint"))
        .join(", ");
    let sql = format!(
        "SELECT count(*), count(*) FILTER (WHERE status = 0 OR status >= 400), {sums}{selected}
         FROM penstock.ledger {tags} WHERE {sql} {grouped} LIMIT ${}",
        values.len()
    );
    (sql, values)
}

#[async_trait]
impl Ledger for Postgres {
    async fn open_entries(&self, entries: Vec<OpenEntry>) -> Result<(), StoreError> {
        check_batch(entries.iter().map(|entry| &entry.request))?;
        let rows: Vec<Value> = entries.into_iter().map(|entry| open_row(entry, OPEN)).collect();
        let sql = format!(
            "INSERT INTO penstock.ledger ({OPEN_COLUMNS})
             SELECT {} FROM jsonb_to_recordset($1::text::jsonb) AS new({OPEN_TYPES}) ORDER BY request
             ON CONFLICT (request) DO NOTHING",
            OPEN_COLUMNS.replace("tags", "ARRAY(SELECT jsonb_array_elements_text(tags))")
        );
        self.held().await?.execute(&sql, &[&to_json(&rows)?]).await.map(drop)
    }

    async fn settle_entries(&self, entries: Vec<Entry>) -> Result<Vec<bool>, StoreError> {
        check_batch(entries.iter().map(|entry| &entry.request))?;
        // One statement cannot change a row twice: of several entries of one request the first counts.
        let mut seen = HashSet::new();
        let ids: Vec<(String, bool)> =
            entries.iter().map(|entry| (entry.request.clone(), seen.insert(entry.request.clone()))).collect();
        let first = entries.into_iter().zip(&ids).filter(|(_, (_, first))| *first);
        let rows: Vec<Value> = first.map(|(entry, _)| end_row(entry)).collect();
        let set = format!("{OPEN_COLUMNS}, {END_COLUMNS}").split(", ").skip(1).fold(String::new(), |sql, column| {
            format!("{sql}{}{column} = excluded.{column}", if sql.is_empty() { "" } else { ", " })
        });
        // In one order everywhere, so that two gateways never wait for each other's rows.
        let sql = format!(
            "INSERT INTO penstock.ledger AS old ({OPEN_COLUMNS}, {END_COLUMNS})
             SELECT {}, {END_COLUMNS} FROM jsonb_to_recordset($1::text::jsonb) AS new({OPEN_TYPES}, {END_TYPES}) ORDER BY request
             ON CONFLICT (request) DO UPDATE SET {set}
             WHERE old.state = {OPEN} OR (old.state = {ASSUMED} AND excluded.state = {SETTLED})
             RETURNING request",
            OPEN_COLUMNS.replace("tags", "ARRAY(SELECT jsonb_array_elements_text(tags))")
        );
        let rows = self.held().await?.change(&sql, &[&to_json(&rows)?]).await?;
        let kept = rows.iter().map(|row| cell(row, 0)).collect::<Result<HashSet<String>, _>>()?;
        Ok(ids.iter().map(|(id, first)| *first && kept.contains(id)).collect())
    }

    async fn orphans(&self, before: u64, gateway: Option<&str>, limit: u32) -> Result<Vec<OpenEntry>, StoreError> {
        let sql = format!(
            "SELECT {OPEN_COLUMNS} FROM penstock.ledger WHERE state = {OPEN} AND at < $1 AND ($2::text IS NULL OR gateway = $2)
             ORDER BY at, seq LIMIT $3"
        );
        let rows = self.held().await?.query(&sql, &[&int(before), &gateway, &i64::from(limit)]).await?;
        rows.iter().map(open_entry).collect()
    }

    async fn alive(&self, gateway: &str, now: u64) -> Result<(), StoreError> {
        let gateway = gateway.to_owned();
        check_batch([&gateway].into_iter())?;
        let mut held = self.held().await?;
        // Another gateway may be deleting the same.
        let sql = "WITH silent AS (
                     DELETE FROM penstock.lives WHERE gateway IN (
                       SELECT gateway FROM penstock.lives WHERE seen < $3 AND gateway <> $1 FOR UPDATE SKIP LOCKED))
                   INSERT INTO penstock.lives AS old (gateway, seen) VALUES ($1, $2)
                   ON CONFLICT (gateway) DO UPDATE SET seen = greatest(old.seen, excluded.seen)";
        held.execute(sql, &[&gateway, &int(now), &int(now.saturating_sub(SILENT_SECONDS_MAX))]).await?;
        Ok(())
    }

    async fn left(&self, before: u64, ancient: u64, limit: u32) -> Result<Vec<OpenEntry>, StoreError> {
        let sql = format!(
            "SELECT {OPEN_COLUMNS} FROM penstock.ledger
             WHERE state = {OPEN} AND gateway NOT IN (SELECT gateway FROM penstock.lives WHERE seen >= $1)
             AND (at < $2 OR gateway IN (SELECT gateway FROM penstock.lives)) ORDER BY at, seq LIMIT $3"
        );
        let rows = self.held().await?.query(&sql, &[&int(before), &int(ancient), &i64::from(limit)]).await?;
        rows.iter().map(open_entry).collect()
    }

    async fn entry(&self, request: &str) -> Result<Option<Entry>, StoreError> {
        let sql =
            format!("SELECT {OPEN_COLUMNS}, {END_COLUMNS} FROM penstock.ledger WHERE request = $1 AND state > {OPEN}");
        self.held().await?.one(&sql, &[&request]).await?.as_ref().map(entry).transpose()
    }

    async fn entries(&self, filter: &EntryFilter, page: &Page) -> Result<Listing<Entry>, StoreError> {
        let (order, beyond) = direction(page.order);
        let (mut sql, mut values) = conditions(filter);
        if let Some(after) = &page.after {
            values.push(Box::new(after.clone()));
            let place = format!("(SELECT seq FROM penstock.ledger WHERE request = ${})", values.len());
            sql.push_str(&format!(" AND seq {beyond} {place}"));
        }
        values.push(Box::new(i64::from(page.limit) + 1));
        let sql = format!(
            "SELECT {OPEN_COLUMNS}, {END_COLUMNS} FROM penstock.ledger WHERE {sql} ORDER BY seq {order} LIMIT ${}",
            values.len()
        );
        let rows = self.held().await?.query(&sql, &refer(&values)).await?;
        Ok(listing(rows.iter().map(entry).collect::<Result<_, _>>()?, page.limit))
    }

    async fn usage(&self, query: &UsageQuery) -> Result<Listing<UsageRow>, StoreError> {
        check_usage(query)?;
        let (sql, values) = usage_sql(query);
        let rows = self.held().await?.query(&sql, &refer(&values)).await?;
        let rows = rows.iter().map(|row| usage_row(row, query.groups.len())).collect::<Result<_, _>>()?;
        Ok(listing(rows, query.limit))
    }

    async fn sweep_entries(&self, before: u64) -> Result<u64, StoreError> {
        let sql = format!(
            "DELETE FROM penstock.ledger WHERE seq IN (
               SELECT seq FROM penstock.ledger WHERE at < $1 AND state > {OPEN} LIMIT $2 FOR UPDATE SKIP LOCKED)"
        );
        self.held().await?.execute(&sql, &[&int(before), &SWEEP_MAX]).await
    }
}
