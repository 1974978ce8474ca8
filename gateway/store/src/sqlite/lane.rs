//! Lanes: threads that own connections, behind bounded queues.
//!
//! The write lane takes up to [`GROUP_MAX`] queued jobs, runs each in a savepoint of one transaction, commits, and only
//! then answers (group commit): all jobs that queued meanwhile share the cost of one fsync. The read lanes, one for
//! objects with two connections and one for keys, never wait for the writer (WAL). An in-memory database has one
//! connection, so all are the same lane.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, InterruptHandle};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::{Stats, StoreError};

/// Capacity of the queue; further callers wait for a place.
const QUEUE_MAX: usize = 256;
/// Most queued jobs that share one transaction, and so one commit.
const GROUP_MAX: usize = 64;
/// Longest wait for a place in the queue; then the call fails as busy.
const ENTER_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for the outcome of a job that is queued.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Work on a connection (`None`: no transaction could be opened). Returns what to tell the caller once the transaction
/// has ended.
type Job = Box<dyn FnOnce(Option<&Connection>) -> Outcome + Send>;
type Told = Box<dyn FnOnce(Result<(), StoreError>) + Send>;

struct Outcome {
    ok: bool,
    tell: Told,
}

/// Handle of a lane of work: queues jobs for the threads that own its connections.
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
    /// True if the last transaction could not be committed, so that only the first of several failures is logged.
    failing: AtomicBool,
}

impl Lane {
    /// Starts the thread that runs queued changes on the one writing connection.
    pub(super) fn writer(connection: Connection) -> std::io::Result<Self> {
        let (queue, jobs) = mpsc::channel(QUEUE_MAX);
        let counts = Arc::new(LaneCounts::default());
        let own = counts.clone();
        std::thread::Builder::new().name("store-write".into()).spawn(move || write(&connection, jobs, &own))?;
        Ok(Self { queue, counts })
    }

    /// Starts a read lane with a thread per connection.
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

    /// Runs `work` on the lane and waits for its result.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.run_within(ANSWER_TIMEOUT, work).await
    }

    /// Runs a read that may take long, for a caller that waits for `patience`. It is interrupted once the caller has given
    /// up, so that the thread is free for others.
    pub(super) async fn read_within<T: Send + 'static>(
        &self,
        patience: Duration,
        work: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let reading = Arc::new(Mutex::new(Reading::Queued));
        let _caller = Caller(reading.clone());
        let read = move |connection: &Connection| {
            let _running = Running::begin(&reading, connection)?;
            work(connection)
        };
        self.run_within(patience, read).await
    }

    async fn run_within<T: Send + 'static>(
        &self,
        patience: Duration,
        work: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (sender, answer) = oneshot::channel();
        let job: Job = Box::new(move |connection| {
            // A panic would end the thread, and with it every later call: it fails this one, whose savepoint is undone.
            let caught =
                |connection| catch_unwind(AssertUnwindSafe(|| work(connection))).unwrap_or_else(|_| panicked());
            let done = connection.map_or(Err(StoreError::Busy), caught);
            let ok = done.is_ok();
            // The caller may have given up.
            let tell: Told = Box::new(move |committed| drop(sender.send(committed.and(done))));
            Outcome { ok, tell }
        });
        let entered = timeout(ENTER_TIMEOUT, self.queue.send(job)).await.map_err(|_| StoreError::Busy)?;
        entered.map_err(|_| StoreError::Broken("its thread has ended".into()))?;
        let answered = timeout(patience, answer).await.map_err(|_| StoreError::Busy);
        let result = answered.and_then(|done| done.unwrap_or(Err(StoreError::Broken("its thread has ended".into()))));
        let failed = matches!(result, Err(StoreError::Full | StoreError::Busy | StoreError::Broken(_)));
        if failed {
            self.counts.errors.fetch_add(1, Ordering::Relaxed);
        }
        self.counts.down.store(failed, Ordering::Relaxed);
        result
    }

    /// Counters of the lane's transactions and failures.
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

/// State of a read whose caller may give up.
enum Reading {
    Queued,
    Runs(InterruptHandle),
    /// It has ended, or its caller has given up.
    Over,
}

fn locked(reading: &Mutex<Reading>) -> MutexGuard<'_, Reading> {
    reading.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Caller of a read, who gives up when this is dropped.
struct Caller(Arc<Mutex<Reading>>);

impl Drop for Caller {
    fn drop(&mut self) {
        // Locked until the interrupt is sent: the read cannot end meanwhile, and another call be interrupted in its place.
        let mut reading = locked(&self.0);
        if let Reading::Runs(handle) = std::mem::replace(&mut *reading, Reading::Over) {
            handle.interrupt();
        }
    }
}

/// Read that runs, until this is dropped.
struct Running<'r>(&'r Mutex<Reading>);

impl<'r> Running<'r> {
    /// Begins a read.
    ///
    /// # Errors
    /// [`StoreError::Busy`] if the caller has given up already.
    fn begin(reading: &'r Mutex<Reading>, connection: &Connection) -> Result<Self, StoreError> {
        let mut now = locked(reading);
        if matches!(*now, Reading::Over) {
            return Err(StoreError::Busy);
        }
        *now = Reading::Runs(connection.get_interrupt_handle());
        Ok(Self(reading))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        *locked(self.0) = Reading::Over;
    }
}

fn panicked<T>() -> Result<T, StoreError> {
    tracing::error!("a call of the store panicked: nothing that it wrote is kept");
    Err(StoreError::Broken("a call panicked".into()))
}

fn write(connection: &Connection, mut jobs: mpsc::Receiver<Job>, counts: &LaneCounts) {
    while let Some(first) = jobs.blocking_recv() {
        let began = Instant::now();
        let mut told = Vec::new();
        let committed = group(connection, first, &mut jobs, &mut told);
        let writes = told.len() as u64;
        told.into_iter().for_each(|tell| tell(committed.clone()));
        if let Err(error) = committed {
            if !counts.failing.swap(true, Ordering::Relaxed) {
                tracing::error!(%error, writes, "the store cannot commit: all writes fail until \"the store commits again\" is logged; check the disk's space and the file's permissions");
            }
            continue;
        }
        if counts.failing.swap(false, Ordering::Relaxed) {
            tracing::info!("the store commits again");
        }
        counts.commits.fetch_add(1, Ordering::Relaxed);
        counts.writes.fetch_add(writes, Ordering::Relaxed);
        counts.commit_micros.fetch_add(began.elapsed().as_micros() as u64, Ordering::Relaxed);
    }
}

/// Runs one transaction of up to [`GROUP_MAX`] jobs. No transaction is open afterwards, whatever happened.
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
                // The transaction has failed already; if this fails too, the next BEGIN reports it.
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

/// Runs one job in a savepoint. An error ends the whole transaction: SQLite has rolled it back (a full disk), or the
/// savepoint failed.
fn step(connection: &Connection, job: Job, told: &mut Vec<Told>) -> Result<(), StoreError> {
    if let Err(error) = connection.execute_batch("SAVEPOINT job") {
        told.push(job(None).tell);
        return Err(fault(&error));
    }
    let outcome = job(Some(connection));
    told.push(outcome.tell);
    // SQLite has rolled the transaction back by itself, as it does on a full disk.
    if connection.is_autocommit() {
        return Err(StoreError::Full);
    }
    let end = if outcome.ok { "RELEASE job" } else { "ROLLBACK TO job; RELEASE job" };
    connection.execute_batch(end).map_err(|error| fault(&error))
}

/// Error of the store for an error of SQLite.
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

#[cfg(test)]
mod tests {
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata};

    use super::*;

    /// Levels of the lines that were logged.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<Level>>>);

    impl tracing::Subscriber for Log {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            self.0.lock().expect("no panic").push(*event.metadata().level());
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    fn number(connection: &Connection, sql: &str) -> Result<i64, StoreError> {
        Ok(connection.query_row(sql, [], |row| row.get(0))?)
    }

    /// The only thread of the lane would go on with the read, and with those that wait behind it.
    #[tokio::test]
    async fn a_read_ends_when_its_caller_has_given_up() {
        const ENDLESS: &str =
            "WITH RECURSIVE one(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM one) SELECT count(*) FROM one";
        let lane = Lane::readers(vec![Connection::open_in_memory().expect("memory")]).expect("a thread");
        let (soon, late) = (Duration::from_millis(100), Duration::from_secs(900));
        for _ in 0..2 {
            let began = Instant::now();
            let answer = lane.read_within(soon, |connection| number(connection, ENDLESS)).await;
            assert_eq!(answer, Err(StoreError::Busy));
            assert!(began.elapsed() >= soon);
            let read = || lane.read_within(late, |connection| number(connection, ENDLESS));
            let both = timeout(soon, async { tokio::join!(read(), read()) }).await;
            assert!(both.is_err(), "{both:?}");
            let next = timeout(Duration::from_secs(30), lane.run(|connection| number(connection, "SELECT 7"))).await;
            assert_eq!(next, Ok(Ok(7)), "the thread is free");
        }
    }

    #[test]
    fn a_store_that_cannot_commit_is_logged_once_and_so_is_its_return() {
        let (connection, counts, log) =
            (Connection::open_in_memory().expect("memory"), LaneCounts::default(), Log::default());
        // Each write is a transaction.
        let writes = || {
            for _ in 0..5 {
                let (queue, jobs) = mpsc::channel::<Job>(1);
                let job: Job = Box::new(|connection| Outcome { ok: connection.is_some(), tell: Box::new(drop) });
                queue.try_send(job).map_err(drop).expect("room");
                drop(queue);
                write(&connection, jobs, &counts);
            }
        };
        tracing::subscriber::with_default(log.clone(), || {
            for _ in 0..2 {
                connection.execute_batch("BEGIN").expect("a transaction that is in the way of others");
                writes();
                connection.execute_batch("COMMIT").expect("ended");
                writes();
            }
        });
        let lines = log.0.lock().expect("no panic").clone();
        assert_eq!(lines, [Level::ERROR, Level::INFO, Level::ERROR, Level::INFO]);
    }
}
