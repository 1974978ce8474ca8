//! [`Ledger`] in PostgreSQL. The statements are those of `sql::ledger`; a batch of entries is one statement, with its
//! rows as one JSON value.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::Postgres;
use super::held::{cell, int, number};
use crate::json::to_json;
use crate::ledger::{SILENT_SECONDS_MAX, check_batch, check_id, check_usage};
use crate::sql::ledger::{
    ASSUMED, Columns, END_COLUMNS, OPEN, OPEN_COLUMNS, Question, SETTLED, Value, Words, entry, open_entry, usage_row,
};
use crate::sql::listing;
use crate::{Entry, EntryFilter, Ledger, Listing, OpenEntry, Page, StoreError, Subject, UsageQuery, UsageRow};

const WORDS: Words = Words {
    table: "penstock.ledger",
    lives: "penstock.lives",
    place: '$',
    text: |number| format!("{number}::text COLLATE \"C\""),
    sum: |column| format!("least(sum({column}), 9007199254740991)::bigint"),
    has_tag: |place| format!("{place} = ANY (tags)"),
    untagged: "cardinality(tags) = 0",
    join_tags: "LEFT JOIN LATERAL unnest(tags) tag ON true",
    tag: "coalesce(tag, '') COLLATE \"C\"",
    lock: " FOR UPDATE SKIP LOCKED",
};
const OPEN_TYPES: &str = "at bigint, request text, gateway text, key_id text, team_id text, user_id text, model text, provider text, \
                          route text, tags jsonb, held_input bigint, held_output bigint, held_usd bigint, state bigint";
const END_TYPES: &str = "input bigint, input_cached bigint, input_written bigint, output bigint, reasoning bigint, micro_usd bigint, \
                         status bigint, outcome text, attempts bigint, first_ms bigint, total_ms bigint";

/// Open entry as JSON; the names are those of the columns.
#[derive(Serialize)]
struct OpenRow<'a> {
    at: i64,
    request: &'a str,
    gateway: Cow<'a, str>,
    key_id: Cow<'a, str>,
    team_id: Cow<'a, str>,
    user_id: Cow<'a, str>,
    model: Cow<'a, str>,
    provider: Cow<'a, str>,
    route: Cow<'a, str>,
    tags: Cow<'a, [String]>,
    held_input: i64,
    held_output: i64,
    held_usd: i64,
    state: u8,
}

/// Settled entry as JSON; the names are those of the columns.
#[derive(Serialize)]
struct EndRow<'a> {
    #[serde(flatten)]
    open: OpenRow<'a>,
    input: i64,
    input_cached: i64,
    input_written: i64,
    output: i64,
    reasoning: i64,
    micro_usd: i64,
    status: u16,
    outcome: Cow<'a, str>,
    attempts: u32,
    first_ms: i64,
    total_ms: i64,
}

/// Text without NUL, which PostgreSQL does not accept.
fn plain(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { text.replace('\0', "").into() } else { text.into() }
}

impl<'a> OpenRow<'a> {
    fn new(entry: &'a OpenEntry, state: u8) -> Self {
        let Subject { key, team, user, model, provider, route, tags } = match entry.subject.bounded() {
            Cow::Borrowed(who) => return Self::of(entry, who, state),
            Cow::Owned(who) => who,
        };
        Self {
            key_id: key.into(),
            team_id: team.into(),
            user_id: user.into(),
            model: model.into(),
            provider: provider.into(),
            route: route.into(),
            tags: tags.into(),
            ..Self::of(entry, &entry.subject, state)
        }
    }

    fn of(entry: &'a OpenEntry, who: &'a Subject, state: u8) -> Self {
        Self {
            at: int(entry.at),
            request: &entry.request,
            gateway: plain(&entry.gateway),
            key_id: who.key.as_str().into(),
            team_id: who.team.as_str().into(),
            user_id: who.user.as_str().into(),
            model: who.model.as_str().into(),
            provider: who.provider.as_str().into(),
            route: who.route.as_str().into(),
            tags: who.tags.as_slice().into(),
            held_input: int(entry.held.input),
            held_output: int(entry.held.output),
            held_usd: int(entry.held.micro_usd),
            state,
        }
    }
}

impl<'a> EndRow<'a> {
    fn new(entry: &'a Entry) -> Self {
        let tokens = entry.tokens;
        Self {
            open: OpenRow::new(&entry.opened, if entry.assumed { ASSUMED } else { SETTLED }),
            input: int(tokens.input),
            input_cached: int(tokens.input_cached),
            input_written: int(tokens.input_written),
            output: int(tokens.output),
            reasoning: int(tokens.reasoning),
            micro_usd: int(entry.micro_usd),
            status: entry.status,
            outcome: plain(&entry.outcome),
            attempts: entry.attempts,
            first_ms: int(entry.first_ms),
            total_ms: int(entry.total_ms),
        }
    }
}

/// Select of the rows in the JSON value at `$1`, always in the same order, so that two gateways cannot deadlock.
fn rows(columns: &str, types: &str) -> String {
    let read = columns.replace("tags", "ARRAY(SELECT jsonb_array_elements_text(tags))");
    format!("SELECT {read} FROM jsonb_to_recordset($1::text::jsonb) AS new({types}) ORDER BY at, request")
}

impl Columns for Row {
    type Error = StoreError;

    fn number(&self, at: usize) -> Result<u64, StoreError> {
        number(self, at)
    }

    fn text(&self, at: usize) -> Result<String, StoreError> {
        cell(self, at)
    }

    fn texts(&self, at: usize) -> Result<Vec<String>, StoreError> {
        cell(self, at)
    }
}

impl Postgres {
    /// Runs a statement of the ledger and returns its rows.
    async fn found(&self, question: Question) -> Result<Vec<Row>, StoreError> {
        let Question { sql, values, .. } = question;
        let values = owned(values);
        self.held().await?.query(&sql, &refer(&values)).await
    }
}

fn owned(values: Vec<Value>) -> Vec<Box<dyn ToSql + Sync + Send>> {
    let one = |value| match value {
        Value::Number(number) => Box::new(int(number)) as Box<dyn ToSql + Sync + Send>,
        Value::Text(text) => Box::new(text),
    };
    values.into_iter().map(one).collect()
}

fn refer(values: &[Box<dyn ToSql + Sync + Send>]) -> Vec<&(dyn ToSql + Sync)> {
    values.iter().map(|value| value.as_ref() as &(dyn ToSql + Sync)).collect()
}

#[async_trait]
impl Ledger for Postgres {
    async fn open_entries(&self, entries: Arc<[OpenEntry]>) -> Result<(), StoreError> {
        check_batch(entries.iter())?;
        let values: Vec<_> = entries.iter().map(|entry| OpenRow::new(entry, OPEN)).collect();
        let sql = WORDS.open(&rows(OPEN_COLUMNS, OPEN_TYPES));
        self.held().await?.execute(&sql, &[&to_json(&values)?]).await.map(drop)
    }

    async fn settle_entries(&self, entries: Arc<[Entry]>) -> Result<Vec<bool>, StoreError> {
        check_batch(entries.iter().map(|entry| &entry.opened))?;
        // One statement cannot change a row twice: of several entries of one request, only the first counts.
        let mut seen = HashSet::new();
        let key = |entry: &Entry| (int(entry.opened.at), entry.opened.request.clone());
        let firsts: Vec<bool> = entries.iter().map(|entry| seen.insert(key(entry))).collect();
        let first = entries.iter().zip(&firsts).filter(|(_, first)| **first);
        let json = to_json(&first.map(|(entry, _)| EndRow::new(entry)).collect::<Vec<_>>())?;
        let columns = format!("{OPEN_COLUMNS}, {END_COLUMNS}");
        let settle = WORDS.settle(&rows(&columns, &format!("{OPEN_TYPES}, {END_TYPES}")));
        let changed = self.held().await?.change(&format!("{settle} RETURNING at, request"), &[&json]).await?;
        let read = |row: &Row| Ok::<(i64, String), StoreError>((cell(row, 0)?, cell(row, 1)?));
        let kept = changed.iter().map(read).collect::<Result<HashSet<_>, _>>()?;
        Ok(entries.iter().zip(firsts).map(|(entry, first)| first && kept.contains(&key(entry))).collect())
    }

    async fn orphans(&self, before: u64, gateway: Option<&str>, limit: u32) -> Result<Vec<OpenEntry>, StoreError> {
        self.found(WORDS.orphans(before, gateway, limit)).await?.iter().map(open_entry).collect()
    }

    async fn alive(&self, gateway: &str, now: u64) -> Result<(), StoreError> {
        check_id(gateway)?;
        // Skip rows that another gateway is deleting.
        let sql = "WITH silent AS (
                     DELETE FROM penstock.lives WHERE gateway IN (
                       SELECT gateway FROM penstock.lives WHERE seen < $3 AND gateway <> $1 FOR UPDATE SKIP LOCKED))
                   INSERT INTO penstock.lives AS old (gateway, seen) VALUES ($1, $2)
                   ON CONFLICT (gateway) DO UPDATE SET seen = greatest(old.seen, excluded.seen)";
        let silent = int(now.saturating_sub(SILENT_SECONDS_MAX));
        self.held().await?.execute(sql, &[&gateway, &int(now), &silent]).await.map(drop)
    }

    async fn left(&self, before: u64, ancient: u64, limit: u32) -> Result<Vec<OpenEntry>, StoreError> {
        self.found(WORDS.left(before, ancient, limit)).await?.iter().map(open_entry).collect()
    }

    async fn entry(&self, at: u64, request: &str) -> Result<Option<Entry>, StoreError> {
        self.found(WORDS.entry(at, request)).await?.first().map(entry).transpose()
    }

    async fn entries(&self, filter: &EntryFilter, page: &Page) -> Result<Listing<Entry>, StoreError> {
        let Some(question) = WORDS.entries(filter, page) else { return Ok(listing(Vec::new(), page.limit)) };
        let rows = self.found(question).await?;
        Ok(listing(rows.iter().map(entry).collect::<Result<_, _>>()?, page.limit))
    }

    async fn usage(&self, query: &UsageQuery) -> Result<Listing<UsageRow>, StoreError> {
        check_usage(query)?;
        let rows = self.found(WORDS.usage(query)).await?;
        let rows = rows.iter().map(|row| usage_row(row, query.groups.len())).collect::<Result<_, _>>()?;
        Ok(listing(rows, query.limit))
    }

    async fn usage_within(&self, query: &UsageQuery, patience: Duration) -> Result<Listing<UsageRow>, StoreError> {
        check_usage(query)?;
        let Question { sql, values, .. } = WORDS.usage(query);
        let values = owned(values);
        let mut held = self.held().await?;
        held.begin().await?;
        held.wait_for(patience).await?;
        let rows = match held.query(&sql, &refer(&values)).await {
            Ok(rows) => held.commit().await.map(|()| rows)?,
            Err(error) => return held.undo(Err(error)).await,
        };
        let rows = rows.iter().map(|row| usage_row(row, query.groups.len())).collect::<Result<_, _>>()?;
        Ok(listing(rows, query.limit))
    }

    async fn sweep_entries(&self, before: u64) -> Result<u64, StoreError> {
        let Question { sql, values, .. } = WORDS.sweep(before);
        let values = owned(values);
        self.held().await?.execute(&sql, &refer(&values)).await
    }
}
