//! Connection of the pool during one operation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use deadpool_postgres::{HookError, Object, Pool, PoolError};
use tokio::time::timeout;
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{FromSql, ToSql};

use super::ANSWER_TIMEOUT;
use crate::{Stats, StoreError};

/// Values of a statement's parameters, from `$1` on.
pub(super) type Values<'a> = &'a [&'a (dyn ToSql + Sync)];

#[derive(Default)]
pub(super) struct Counts {
    commits: AtomicU64,
    writes: AtomicU64,
    commit_micros: AtomicU64,
    errors: AtomicU64,
    down: AtomicBool,
}

impl Counts {
    pub(super) fn stats(&self) -> Stats {
        Stats {
            commits: self.commits.load(Ordering::Relaxed),
            writes: self.writes.load(Ordering::Relaxed),
            commit_seconds: self.commit_micros.load(Ordering::Relaxed) as f64 / 1e6,
            errors: self.errors.load(Ordering::Relaxed),
            down: self.down.load(Ordering::Relaxed),
        }
    }

    fn error(&self, error: StoreError) -> StoreError {
        self.errors.fetch_add(1, Ordering::Relaxed);
        if matches!(error, StoreError::Broken(_) | StoreError::Busy | StoreError::Full) {
            self.down.store(true, Ordering::Relaxed);
        }
        error
    }
}

/// Connection held by one operation. If it is dropped during a statement or a transaction, the connection is closed,
/// which ends the work on the server.
pub(super) struct Held {
    client: Option<Object>,
    counts: Arc<Counts>,
    began: Instant,
    /// Time limit for the answer to a statement.
    patience: Duration,
    /// True if a statement awaits its answer.
    waits: bool,
    /// True if a transaction is open on the connection.
    open: bool,
}

impl Held {
    pub(super) async fn from_pool(pool: &Pool, counts: &Arc<Counts>) -> Result<Self, StoreError> {
        let client = pool.get().await.map_err(|error| counts.error(unreachable(&error)))?;
        let (began, patience) = (Instant::now(), ANSWER_TIMEOUT);
        Ok(Self { client: Some(client), counts: counts.clone(), began, patience, waits: false, open: false })
    }

    /// Sets the time limit of the further statements of the open transaction, here and at the server.
    pub(super) async fn wait_for(&mut self, patience: Duration) -> Result<(), StoreError> {
        // The server gives up later than the caller, as for other statements.
        self.batch(&format!("SET LOCAL statement_timeout = {}", 2 * patience.as_millis())).await?;
        self.patience = patience;
        Ok(())
    }

    /// Runs `work` on the connection, within the time limit.
    async fn run<T>(
        &mut self,
        work: impl AsyncFnOnce(&Object) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, StoreError> {
        let Some(client) = self.client.as_ref().filter(|_| !self.waits) else {
            return Err(StoreError::Broken("its connection was given up".into()));
        };
        self.waits = true;
        let answered = timeout(self.patience, work(client)).await;
        let result = match answered {
            Ok(done) => {
                self.waits = false;
                done.map_err(|error| fault(&error))
            }
            Err(_) => Err(StoreError::Busy),
        };
        if result.is_ok() {
            self.counts.down.store(false, Ordering::Relaxed);
        }
        result.map_err(|error| self.counts.error(error))
    }

    /// Runs a query and returns its rows.
    pub(super) async fn query(&mut self, sql: &str, values: Values<'_>) -> Result<Vec<Row>, StoreError> {
        self.run(async |client| client.query(&client.prepare_cached(sql).await?, values).await).await
    }

    /// Runs a query and returns its first row, if there is one.
    pub(super) async fn one(&mut self, sql: &str, values: Values<'_>) -> Result<Option<Row>, StoreError> {
        Ok(self.query(sql, values).await?.into_iter().next())
    }

    /// Runs a query; whether the first column of the first row is true.
    pub(super) async fn is(&mut self, sql: &str, values: Values<'_>) -> Result<bool, StoreError> {
        self.one(sql, values).await?.map_or(Ok(false), |row| cell(&row, 0))
    }

    /// Runs a change, in its own transaction unless one is open; returns the number of rows.
    pub(super) async fn execute(&mut self, sql: &str, values: Values<'_>) -> Result<u64, StoreError> {
        let changed = self.run(async |client| client.execute(&client.prepare_cached(sql).await?, values).await).await?;
        self.counts.writes.fetch_add(1, Ordering::Relaxed);
        if !self.open {
            self.committed();
        }
        Ok(changed)
    }

    /// Runs a change that returns rows, in its own transaction unless one is open.
    pub(super) async fn change(&mut self, sql: &str, values: Values<'_>) -> Result<Vec<Row>, StoreError> {
        let rows = self.query(sql, values).await?;
        self.counts.writes.fetch_add(1, Ordering::Relaxed);
        if !self.open {
            self.committed();
        }
        Ok(rows)
    }

    /// Runs several statements, separated by semicolons and without parameters.
    pub(super) async fn batch(&mut self, sql: &str) -> Result<(), StoreError> {
        self.run(async |client| client.batch_execute(sql).await).await
    }

    pub(super) async fn begin(&mut self) -> Result<(), StoreError> {
        self.open = true;
        self.batch("BEGIN").await
    }

    pub(super) async fn commit(&mut self) -> Result<(), StoreError> {
        self.batch("COMMIT").await?;
        (self.open, self.patience) = (false, ANSWER_TIMEOUT);
        self.committed();
        Ok(())
    }

    /// Rolls the transaction back and returns `result`.
    pub(super) async fn undo<T>(&mut self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        if self.batch("ROLLBACK").await.is_ok() {
            self.open = false;
        }
        result
    }

    fn committed(&self) {
        self.counts.commits.fetch_add(1, Ordering::Relaxed);
        self.counts.commit_micros.fetch_add(self.began.elapsed().as_micros() as u64, Ordering::Relaxed);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(client) = self.client.take_if(|_| self.waits || self.open) {
            // Detached from the pool, so that dropping it closes the connection.
            drop(Object::take(client));
        }
    }
}

fn unreachable(error: &PoolError) -> StoreError {
    match error {
        PoolError::Timeout(_) => StoreError::Busy,
        PoolError::Backend(error) => fault(error),
        PoolError::PostCreateHook(error) => unprepared(error),
        other => StoreError::Broken(other.to_string()),
    }
}

/// Maps an error of the settings of a new connection.
pub(super) fn unprepared(error: &HookError) -> StoreError {
    match error {
        HookError::Backend(error) => fault(error),
        HookError::Message(_) => StoreError::Busy,
    }
}

/// Maps an error of PostgreSQL. The server's message is kept; its details are dropped, since they quote values.
pub(super) fn fault(error: &tokio_postgres::Error) -> StoreError {
    let Some(said) = error.as_db_error() else { return StoreError::Broken(chain(error)) };
    match *said.code() {
        SqlState::DISK_FULL => StoreError::Full,
        // Raised by our own functions (`schema`).
        ref code if code.code() == "PS001" => StoreError::Lost,
        SqlState::QUERY_CANCELED
        | SqlState::TOO_MANY_CONNECTIONS
        | SqlState::T_R_SERIALIZATION_FAILURE
        | SqlState::T_R_DEADLOCK_DETECTED
        | SqlState::LOCK_NOT_AVAILABLE
        | SqlState::CANNOT_CONNECT_NOW => StoreError::Busy,
        _ => StoreError::Broken(format!("PostgreSQL: {} ({})", said.message(), said.code().code())),
    }
}

/// Text of an error and its causes.
fn chain(error: &tokio_postgres::Error) -> String {
    let mut text = format!("PostgreSQL: {error}");
    let mut next = std::error::Error::source(error);
    while let Some(error) = next {
        text.push_str(&format!(": {error}"));
        next = error.source();
    }
    text
}

/// Value of a row's column, by its index; a value of another type is an error.
pub(super) fn cell<'a, T: FromSql<'a>>(row: &'a Row, at: usize) -> Result<T, StoreError> {
    row.try_get(at).map_err(|error| fault(&error))
}

/// Column with a number; negative values read as 0.
pub(super) fn number(row: &Row, at: usize) -> Result<u64, StoreError> {
    Ok(cell::<i64>(row, at)?.max(0).unsigned_abs())
}

/// Value of a nullable column with a number; negative values read as 0.
pub(super) fn maybe(row: &Row, at: usize) -> Result<Option<u64>, StoreError> {
    Ok(cell::<Option<i64>>(row, at)?.map(|number| number.max(0).unsigned_abs()))
}

/// Value of a column with JSON text, parsed into `T`.
pub(super) fn json<T: serde::de::DeserializeOwned>(row: &Row, at: usize) -> Result<T, StoreError> {
    serde_json::from_str(cell(row, at)?).map_err(|_| StoreError::Broken("a row that cannot be read".into()))
}

/// Number as a signed 64-bit one; larger values saturate.
pub(super) fn int(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Error of a row whose content does not fit its type.
pub(super) fn odd() -> StoreError {
    StoreError::Broken("a row that cannot be read".into())
}
