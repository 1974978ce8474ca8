//! Supervisor of one local worker process: adopts it or starts it, learns of its end through a pidfd, and starts it
//! again with exponential backoff and jitter. It never waits for a child process, so the worker's parent does not
//! matter.

use super::adapters::Lists;
use super::config::LocalWorkers;
use super::copies::Copy;
use super::epitaph::Witness;
use super::lease::{self, Lease};
use super::session::Event;
use penstock_router::WorkerId;
use rustix::fd::OwnedFd;
use rustix::process::{Signal, pidfd_send_signal};
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tracing::{error, info, warn};

/// First and longest backoff before a restart; doubles each time, plus up to a third of random jitter.
const PAUSE_FIRST: Duration = Duration::from_millis(200);
const PAUSE_LAST: Duration = Duration::from_secs(30);

/// Run time after which a worker counts as settled: its next end starts the backoff anew.
const SETTLED: Duration = Duration::from_secs(60);

/// Consecutive ends without settling from which on the worker is in a crash loop.
const CRASH_LOOP: u32 = 5;

/// Name of the worker's process in `ps`.
const WORKER_NAME: &str = "penstock-worker";

/// Size above which the log is truncated when the worker starts.
const LOG_BYTES_MAX: u64 = 16 << 20;

/// Report of a supervisor to the pool's actor on the process of its worker.
#[derive(Debug)]
pub(super) enum Update {
    /// The process runs. `displaced`: with another share of the machine than a new process would get.
    Running { adopted: bool, displaced: bool },
    /// The process has ended and will be started after `retry_in`. `how`: description of the end that a client may
    /// read; `why`: the same with the last line of its log. `loops`: the worker is in a crash loop.
    Down { retry_in: Duration, how: String, why: String, loops: bool },
    /// The process has ended because the actor ordered it; none is started until the next order.
    Stopped,
}

/// Order of the pool's actor to the supervisor of a worker's process.
pub(super) enum Order {
    /// Kill the process, which shows no sign of life or does not end a step, so that it is started again.
    Kill,
    /// Start a process, if there is none.
    Start,
    /// The worker has been told over its session to end: the end of its process is no fault, and [`Order::End`] follows.
    Told,
    /// End the process, and start none until [`Order::Start`]; the worker has been told over its session.
    Stop,
    /// End the process and the supervisor. `told`: the worker was told over its session, so it gets `exit_deadline`.
    End { told: bool, ended: oneshot::Sender<()> },
}

/// State of the supervisor of one local worker; see the module header.
pub(super) struct Supervisor {
    worker: WorkerId,
    at: usize,
    name: String,
    local: LocalWorkers,
    events: mpsc::Sender<Event>,
    orders: mpsc::Receiver<Order>,
    /// True if a process is started at the beginning. A running one is adopted in any case.
    pub(super) starts: bool,
    /// Adapters that a process is started with.
    adapters: Arc<Lists>,
    /// Packed weights of the process, held for the one that follows it.
    copy: Option<Arc<Copy>>,
}

/// State that the supervisor enters next.
enum Next {
    /// Run a process, adopted or started.
    Start,
    /// Run no process until the actor orders one.
    Park,
    /// End the supervisor itself.
    Leave,
}

struct Running {
    pidfd: AsyncFd<OwnedFd>,
    pid: i32,
    child: Option<Child>,
    adopted: bool,
    displaced: bool,
    since: Instant,
    witness: Witness,
}

/// Description of a process's end, once for clients and once for the log.
struct End {
    /// Description that a client may read: without the last line of the process's log.
    how: String,
    /// Description with the last line of the process's log, for logs and operators.
    why: String,
}

impl Supervisor {
    pub(super) fn new(
        worker: WorkerId,
        at: usize,
        name: &str,
        (local, adapters): (LocalWorkers, Arc<Lists>),
        events: mpsc::Sender<Event>,
        orders: mpsc::Receiver<Order>,
    ) -> Self {
        Self { worker, at, name: name.into(), local, events, orders, starts: true, adapters, copy: None }
    }

    /// Runs until told to end, or until the actor is gone.
    pub(super) async fn run(mut self) {
        let is_there = self.starts || lease::find(&self.file("json")).is_some();
        let mut next = if is_there { Next::Start } else { Next::Park };
        loop {
            next = match next {
                Next::Start => self.keep().await,
                Next::Park => self.park().await,
                Next::Leave => return,
            };
        }
    }

    /// Runs a process, again after each end, until the actor wants none.
    async fn keep(&mut self) -> Next {
        let mut fast_ends = 0_u32;
        loop {
            let End { how, why } = match self.start().await {
                Ok(mut running) => {
                    let Running { adopted, displaced, .. } = running;
                    if !self.tell(Update::Running { adopted, displaced }).await {
                        return Next::Leave;
                    }
                    let end = match self.watch(&mut running).await {
                        Ok(end) => end,
                        Err(next) => return next,
                    };
                    fast_ends = if running.since.elapsed() > SETTLED { 0 } else { fast_ends + 1 };
                    end
                }
                Err(error) => {
                    fast_ends += 1;
                    let why = format!("cannot start {}: {error}", self.local.program.display());
                    End { how: "it cannot be started".into(), why }
                }
            };
            let retry_in = pause(fast_ends);
            let log = self.file("log");
            let loops = fast_ends >= CRASH_LOOP;
            if loops {
                error!(worker = %self.name, why, starts = fast_ends, log = %log.display(), retry_in_ms = retry_in.as_millis() as u64, "worker keeps ending: restarts back off");
            } else {
                warn!(worker = %self.name, why, log = %log.display(), retry_in_ms = retry_in.as_millis() as u64, "worker ended");
            }
            if !self.tell(Update::Down { retry_in, how, why, loops }).await {
                return Next::Leave;
            }
            match self.rest(retry_in).await {
                Next::Start => {}
                next => return next,
            }
        }
    }

    /// Waits without a process until the actor wants one.
    async fn park(&mut self) -> Next {
        // Nobody restarts the worker: its weights go, unless another one uses them.
        self.copy = None;
        loop {
            match self.orders.recv().await {
                Some(Order::Start) => return Next::Start,
                Some(Order::Kill | Order::Stop | Order::Told) => {}
                Some(Order::End { ended, .. }) => {
                    let _ = ended.send(());
                    return Next::Leave;
                }
                None => return Next::Leave,
            }
        }
    }

    /// Removes the lease and reports that the process has ended as ordered.
    async fn stopped(&self) -> Next {
        // A missing file is as good.
        let _ = fs::remove_file(self.file("json"));
        if self.tell(Update::Stopped).await { Next::Park } else { Next::Leave }
    }

    async fn tell(&self, update: Update) -> bool {
        self.events.send(Event::Process { worker: self.worker, update }).await.is_ok()
    }

    /// Waits for the backoff before the next start, or for an order.
    async fn rest(&mut self, pause: Duration) -> Next {
        match timeout(pause, self.orders.recv()).await {
            // There is nothing to kill: the order means a start at once.
            Err(_) | Ok(Some(Order::Kill | Order::Start)) => Next::Start,
            Ok(Some(Order::Stop)) => self.stopped().await,
            Ok(Some(Order::Told)) => {
                let _ = fs::remove_file(self.file("json"));
                Next::Park
            }
            Ok(Some(Order::End { ended, .. })) => {
                let _ = fs::remove_file(self.file("json"));
                let _ = ended.send(());
                Next::Leave
            }
            Ok(None) => Next::Leave,
        }
    }

    /// Waits for the end of the process and returns its description; `Err` when the actor ordered the end.
    async fn watch(&mut self, running: &mut Running) -> Result<End, Next> {
        let mut told = false;
        loop {
            tokio::select! {
                // Orders first: one may say that the end is no fault.
                biased;
                order = self.orders.recv() => match order {
                    Some(Order::Start) => {}
                    Some(Order::Told) => told = true,
                    Some(Order::Kill) => {
                        warn!(worker = %self.name, pid = running.pid, "worker is killed: no sign of life, or a step that does not end");
                        running.witness.kills();
                        signal(running, Signal::KILL);
                    }
                    Some(Order::Stop) => {
                        self.end(running, true).await;
                        return Err(self.stopped().await);
                    }
                    Some(Order::End { told, ended }) => {
                        self.end(running, told).await;
                        let _ = ended.send(());
                        return Err(Next::Leave);
                    }
                    None => return Err(Next::Leave),
                },
                // Of a worker that was told to end, the order to end is waited for, and finds the process gone.
                _ = running.pidfd.readable(), if !told => return Ok(self.epitaph(running)),
            }
        }
    }

    /// Ends the process: after `exit_deadline` if it was told over its session, else at once, SIGTERM, then 2 s later SIGKILL.
    async fn end(&self, running: &mut Running, told: bool) {
        let first = if told { self.local.exit_deadline } else { Duration::ZERO };
        for (patience, next) in [(first, Signal::TERM), (Duration::from_secs(2), Signal::KILL)] {
            if timeout(patience, running.pidfd.readable()).await.is_ok() {
                break;
            }
            signal(running, next);
        }
        let _ = timeout(Duration::from_secs(5), running.pidfd.readable()).await;
        self.epitaph(running);
        info!(worker = %self.name, pid = running.pid, "worker ended as requested");
        // A missing file is as good.
        let _ = fs::remove_file(self.file("json"));
    }

    /// Describes the process's end; reaps it if it is a child of this gateway.
    fn epitaph(&self, running: &mut Running) -> End {
        let status = running.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
        let how = running.witness.how(status);
        let why = self.last_words().map_or_else(|| how.clone(), |words| format!("{how}: {words}"));
        End { how, why }
    }

    /// Last line of the worker's log, if that is an error or a panic.
    fn last_words(&self) -> Option<String> {
        let mut file = fs::File::open(self.file("log")).ok()?;
        let size = file.metadata().ok()?.len();
        file.seek(SeekFrom::Start(size.saturating_sub(4096))).ok()?;
        let mut tail = Vec::new();
        file.take(4096).read_to_end(&mut tail).ok()?;
        let text = String::from_utf8_lossy(&tail);
        said(text.lines().rev().find(|line| !line.trim().is_empty())?)
    }

    fn file(&self, extension: &str) -> PathBuf {
        self.local.file(&self.name, extension)
    }

    /// Adopts the running worker or starts one, under a lock, so that two gateways never start it twice.
    async fn start(&mut self) -> io::Result<Running> {
        let lock = self.lock().await?;
        let lease_path = self.file("json");
        let running = if let Some((lease, pidfd)) = lease::find(&lease_path) {
            let displaced = lease.place != self.place().join(" ");
            info!(worker = %self.name, pid = lease.pid, displaced, "running worker adopted");
            self.copy = self.local.weights.as_ref().and_then(|shared| shared.copies.adopt(&lease));
            let (pidfd, since) = (watched(pidfd)?, Instant::now());
            let witness = Witness::new(lease.pid);
            Running { pidfd, pid: lease.pid, child: None, adopted: true, displaced, since, witness }
        } else {
            self.spawn(&lease_path)?
        };
        drop(lock);
        Ok(running)
    }

    async fn lock(&self) -> io::Result<fs::File> {
        let path = self.file("lock");
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            if let Some(lock) = lease::lock(&path)? {
                return Ok(lock);
            }
            if Instant::now() > until {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("{} is locked by another gateway", path.display()),
                ));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Memory of the packed weights of a new process: that of the last one, if its files are still the same, or of another worker.
    fn offer(&mut self) {
        let Some(shared) = &self.local.weights else { return };
        let key = (shared.key)();
        if self.copy.as_ref().is_some_and(|copy| copy.key() == key) {
            return;
        }
        self.copy = None;
        match shared.get(&key) {
            Ok(copy) => self.copy = Some(copy),
            Err(error) => {
                warn!(worker = %self.name, %error, "no memory for weights to share: the worker packs its own")
            }
        }
    }

    fn spawn(&mut self, lease_path: &std::path::Path) -> io::Result<Running> {
        self.offer();
        let log_path = self.file("log");
        let is_large = fs::metadata(&log_path).is_ok_and(|file| file.len() > LOG_BYTES_MAX);
        let mut options = OpenOptions::new();
        options.create(true).mode(0o600);
        let log = if is_large { options.write(true).truncate(true) } else { options.append(true) }.open(&log_path)?;
        let mut command = Command::new(&self.local.program);
        // The name of the gateway stays free for `pidof penstock` and `pkill penstock`.
        command.arg0(WORKER_NAME);
        command.args(&self.local.args).arg("--listen").arg(format!("unix://{}", self.file("sock").display()));
        let place = self.place();
        command.args(&place).args(self.conditions()).args(self.adapters.arguments()).arg("--own-session");
        let (weights, stdin) = match &self.copy {
            Some(copy) => {
                command.arg("--shared-weights");
                (copy.key().to_owned(), copy.descriptor()?.into())
            }
            None => (String::new(), Stdio::null()),
        };
        let mut child = command.stdin(stdin).stdout(log.try_clone()?).stderr(log).spawn()?;
        let pid = child.id() as i32;
        let held = hold(pid, place.join(" "), weights, lease_path);
        let pidfd = or_killed(&mut child, held)?;
        info!(worker = %self.name, pid, log = %log_path.display(), "worker started");
        let (since, witness) = (Instant::now(), Witness::new(pid));
        Ok(Running { pidfd, pid, child: Some(child), adopted: false, displaced: false, since, witness })
    }

    /// Command line arguments about the pool's other workers, and about workers that are to end, for a new process. A running worker is adopted whether or
    /// not it has them.
    fn conditions(&self) -> Vec<&'static str> {
        let LocalWorkers { varies, gpu_leavers, .. } = &self.local;
        let varies = varies.then_some("--machine-share-varies");
        varies.into_iter().chain(gpu_leavers.are_there().then_some("--keep-to-gpu")).collect()
    }

    /// The worker's share of the machine, as command line arguments.
    fn place(&self) -> Vec<String> {
        let LocalWorkers { count, cores: all, .. } = &self.local;
        let mut place = vec!["--machine-share".to_owned(), count.to_string()];
        if let Some(cores) = cores(all, *count, self.at) {
            place.extend(["--cores".to_owned(), cores]);
        }
        place
    }
}

#[expect(
    deprecated,
    reason = "register() is unsafe; the condition it states, that the value owns its descriptor, holds for OwnedFd"
)]
fn watched(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(pidfd)
}

/// Takes hold of a new process: its pidfd, and the lease by which another gateway finds it.
fn hold(pid: i32, place: String, weights: String, lease_path: &std::path::Path) -> io::Result<AsyncFd<OwnedFd>> {
    let pidfd = watched(lease::hold(pid)?)?;
    // 0 for a process that has ended already; its pidfd is readable at once.
    let start_time = lease::start_time(pid).unwrap_or(0);
    lease::write(lease_path, &Lease { pid, start_time, place, weights })?;
    Ok(pidfd)
}

/// Passes an outcome on; after an error the process is killed and reaped, since nobody would watch it.
fn or_killed<T>(child: &mut Child, outcome: io::Result<T>) -> io::Result<T> {
    if outcome.is_err() {
        // The only failure is that the process has ended, which is the aim.
        let _ = child.kill();
        let _ = child.wait();
    }
    outcome
}

fn signal(running: &Running, signal: Signal) {
    // The only failure is that the process is gone, which is the aim.
    let _ = pidfd_send_signal(running.pidfd.get_ref(), signal);
}

/// Message of a log line: the whole line if it is not JSON, the error of a JSON line at level ERROR, nothing of lower levels.
fn said(line: &str) -> Option<String> {
    let short = |text: &str| text.chars().take(300).collect::<String>();
    let Ok(entry) = serde_json::from_str::<serde_json::Value>(line) else { return Some(short(line)) };
    let field = |name: &str| entry["fields"][name].as_str().map(short);
    if entry["level"] != "ERROR" {
        return None;
    }
    field("error").or_else(|| field("message"))
}

fn pause(fast_ends: u32) -> Duration {
    let pause = PAUSE_FIRST.saturating_mul(1 << fast_ends.saturating_sub(1).min(16)).min(PAUSE_LAST);
    let mut random = [0_u8; 4];
    // Without random numbers there is no jitter.
    let _ = getrandom::fill(&mut random);
    pause.mul_f64(1.0 + f64::from(u32::from_le_bytes(random)) / f64::from(u32::MAX) / 3.0)
}

/// Cores of worker `at` of `count`: an even share of `cores`, in order and without overlap. `None` with fewer cores
/// than workers (all of them float), with no cores given, or with a single worker, which would only be kept off the
/// cores that the gateway leaves idle.
fn cores(cores: &[usize], count: usize, at: usize) -> Option<String> {
    if cores.len() < count || count < 2 {
        return None;
    }
    let share = &cores[cores.len() * at / count..cores.len() * (at + 1) / count];
    Some(share.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_shared_out_disjoint() {
        let all: Vec<usize> = (0..7).collect();
        let shares: Vec<String> = (0..3).filter_map(|at| cores(&all, 3, at)).collect();
        assert_eq!(shares, ["0,1", "2,3", "4,5,6"]);
        assert_eq!(cores(&all[..2], 3, 0), None);
        assert_eq!((cores(&[], 1, 0), cores(&all, 1, 0)), (None, None));
    }

    #[tokio::test]
    async fn a_process_whose_lease_cannot_be_written_does_not_run_on() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("a process");
        let pid = child.id() as i32;
        // A folder that is not there fails as a full one does.
        let held = hold(pid, String::new(), String::new(), "/nonexistent/folder/a.json".as_ref());
        assert!(or_killed(&mut child, held).is_err());
        assert!(child.try_wait().is_ok_and(|status| status.is_some()), "it is dead, and reaped");
        let mut other = Command::new("sleep").arg("60").spawn().expect("a process");
        assert!(or_killed(&mut other, Ok(())).is_ok());
        assert!(other.try_wait().is_ok_and(|status| status.is_none()), "it runs");
        or_killed::<()>(&mut other, Err(io::ErrorKind::Other.into())).expect_err("as told");
    }

    #[test]
    fn the_last_words_are_an_error_or_nothing() {
        let error = r#"{"level":"ERROR","fields":{"message":"worker ends","error":"model.safetensors: too short"}}"#;
        assert_eq!(said(error).as_deref(), Some("model.safetensors: too short"));
        assert_eq!(said(r#"{"level":"INFO","fields":{"message":"model loaded"}}"#), None);
        assert_eq!(said("thread 'x' panicked at y").as_deref(), Some("thread 'x' panicked at y"));
    }

    #[test]
    fn pauses_grow_to_a_limit() {
        assert!(pause(1) < Duration::from_millis(300));
        assert!(pause(4) >= Duration::from_millis(1600));
        assert!(pause(1000) <= PAUSE_LAST.mul_f64(1.34));
    }
}
