//! Threads that own connections, and the bounded queues before them.
//!
//! One lane writes: it takes what waits, up to [`GROUP_MAX`] jobs, runs each in a savepoint of one transaction, commits, and only then
//! answers: the cost of making changes durable is shared by all that came in the meantime. The other lane reads, with two
//! connections, and never waits for the writer (WAL). A database in memory has one connection, so there both are the same lane.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::{Stats, StoreError};

/// Jobs that wait; more wait for a place.
const QUEUE_MAX: usize = 256;
/// Jobs of one transaction.
const GROUP_MAX: usize = 64;
/// Longest wait for a place in the queue.
const ENTER_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for the answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// What is done with a connection; `None`: it is not done. It says what is to be told once the transaction has ended.
type Job = Box<dyn FnOnce(Option<&Connection>) -> Outcome + Send>;
type Told = Box<dyn FnOnce(Result<(), StoreError>) + Send>;

struct Outcome {
    ok: bool,
    tell: Told,
}

/// Sends jobs to the threads of a lane.
#[derive(Clone)]
pub(super) struct Lane {
    queue: mpsc::Sender<Job>,
    counts: Arc<LaneCounts>,
}

#[derive(Default)]
struct LaneCounts {
    commits: AtomicU64,
    writes: AtomicU64,
    commit_micros: AtomicU64,
    errors: AtomicU64,
    down: AtomicBool,
}

impl Lane {
    /// A lane that writes.
    pub(super) fn writer(connection: Connection) -> std::io::Result<Self> {
        let (queue, jobs) = mpsc::channel(QUEUE_MAX);
        let counts = Arc::new(LaneCounts::default());
        let own = counts.clone();
        std::thread::Builder::new().name("store-write".into()).spawn(move || write(&connection, jobs, &own))?;
        Ok(Self { queue, counts })
    }

    /// A lane that reads.
    pub(super) fn readers(connections: Vec<Connection>) -> std::io::Result<Self> {
        let (queue, jobs) = mpsc::channel::<Job>(QUEUE_MAX);
        let jobs = Arc::new(Mutex::new(jobs));
        for connection in connections {
            let jobs = jobs.clone();
            std::thread::Builder::new().name("store-read".into()).spawn(move || {
                loop {
                    let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).blocking_recv();
                    let Some(job) = job else { return };
                    (job(Some(&connection)).tell)(Ok(()));
                }
            })?;
        }
        Ok(Self { queue, counts: Arc::default() })
    }

    /// Runs `work` on the lane.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (sender, answer) = oneshot::channel();
        let job: Job = Box::new(move |connection| {
            let done = connection.map_or(Err(StoreError::Busy), work);
            let ok = done.is_ok();
            // Whoever asked may have given up.
            let tell: Told = Box::new(move |committed| drop(sender.send(committed.and(done))));
            Outcome { ok, tell }
        });
        let entered = timeout(ENTER_TIMEOUT, self.queue.send(job)).await.map_err(|_| StoreError::Busy)?;
        entered.map_err(|_| StoreError::Broken("its thread has ended".into()))?;
        let answered = timeout(ANSWER_TIMEOUT, answer).await.map_err(|_| StoreError::Busy);
        let result = answered.and_then(|done| done.unwrap_or(Err(StoreError::Broken("its thread has ended".into()))));
        let failed = matches!(result, Err(StoreError::Full | StoreError::Busy | StoreError::Broken(_)));
        if failed {
            self.counts.errors.fetch_add(1, Ordering::Relaxed);
        }
        self.counts.down.store(failed, Ordering::Relaxed);
        result
    }

    /// Counts of this lane.
    pub(super) fn stats(&self) -> Stats {
        Stats {
            commits: self.counts.commits.load(Ordering::Relaxed),
            writes: self.counts.writes.load(Ordering::Relaxed),
            commit_seconds: self.counts.commit_micros.load(Ordering::Relaxed) as f64 / 1e6,
            errors: self.counts.errors.load(Ordering::Relaxed),
            down: self.counts.down.load(Ordering::Relaxed),
        }
    }
}

fn write(connection: &Connection, mut jobs: mpsc::Receiver<Job>, counts: &LaneCounts) {
    while let Some(first) = jobs.blocking_recv() {
        let began = Instant::now();
        let mut told = Vec::new();
        let committed = group(connection, first, &mut jobs, &mut told);
        let writes = told.len() as u64;
        told.into_iter().for_each(|tell| tell(committed.clone()));
        if let Err(error) = committed {
            tracing::error!(%error, writes, "a transaction of the store could not be committed");
            continue;
        }
        counts.commits.fetch_add(1, Ordering::Relaxed);
        counts.writes.fetch_add(writes, Ordering::Relaxed);
        counts.commit_micros.fetch_add(began.elapsed().as_micros() as u64, Ordering::Relaxed);
    }
}

/// One transaction. Afterwards none is open, whatever happened.
fn group(
    connection: &Connection,
    first: Job,
    jobs: &mut mpsc::Receiver<Job>,
    told: &mut Vec<Told>,
) -> Result<(), StoreError> {
    if let Err(error) = connection.execute_batch("BEGIN IMMEDIATE") {
        told.push(first(None).tell);
        return Err(fault(&error));
    }
    let mut next = Some(first);
    while let Some(job) = next {
        if let Err(error) = step(connection, job, told) {
            if !connection.is_autocommit() {
                // Already failing; the next BEGIN would say so.
                let _ = connection.execute_batch("ROLLBACK");
            }
            return Err(error);
        }
        next = if told.len() < GROUP_MAX { jobs.try_recv().ok() } else { None };
    }
    connection.execute_batch("COMMIT").map_err(|error| {
        if !connection.is_autocommit() {
            let _ = connection.execute_batch("ROLLBACK");
        }
        fault(&error)
    })
}

/// One job in a savepoint. An error ends the whole transaction: SQLite has rolled it back (a full disk), or the savepoint failed.
fn step(connection: &Connection, job: Job, told: &mut Vec<Told>) -> Result<(), StoreError> {
    if let Err(error) = connection.execute_batch("SAVEPOINT job") {
        told.push(job(None).tell);
        return Err(fault(&error));
    }
    let outcome = job(Some(connection));
    told.push(outcome.tell);
    if connection.is_autocommit() {
        return Err(StoreError::Full);
    }
    let end = if outcome.ok { "RELEASE job" } else { "ROLLBACK TO job; RELEASE job" };
    connection.execute_batch(end).map_err(|error| fault(&error))
}

/// What SQLite says, in our words.
pub(super) fn fault(error: &rusqlite::Error) -> StoreError {
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => StoreError::Full,
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => StoreError::Busy,
        _ => StoreError::Broken(error.to_string()),
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        fault(&error)
    }
}
