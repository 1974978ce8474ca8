//! Access log: one JSON line per request. No prompt, no completion, no key.
//!
//! Requests append their lines to a buffer; one thread (`access-log`) writes the buffer in batches, so that a request
//! pays for no system call and a slow disk or pipe delays nobody. The buffer is bounded: lines that find it full are
//! lost and counted. An orderly stop writes everything ([`AccessLog::flush`]); a killed process loses the lines of the
//! last `GATHER`.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;

use crate::Attempt;

/// Longest time in which lines gather for one write.
const GATHER: Duration = Duration::from_millis(50);
/// Bytes of waiting lines that are written at once: a pipe's default size.
const GATHER_BYTES: usize = 64 * 1024;
/// Most bytes of waiting lines, about ten thousand requests; further lines are lost.
const WAITING_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Longest wait of a flush for a destination that cannot be written.
const FLUSH_MAX: Duration = Duration::from_secs(5);

/// Milliseconds of a time in seconds, rounded to a microsecond.
pub fn millis(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e3
}

/// Seconds per token after the first, of an answer of `tokens` tokens; `between`: time from the first to the last. `None`: the
/// answer has one token at most, or its times are not known.
pub fn tpot(between: Option<Duration>, tokens: u64) -> Option<f64> {
    between.filter(|_| tokens > 1).map(|between| between.as_secs_f64() / (tokens - 1) as f64)
}

/// Attempts as a line has them: a single one that answered is left out.
pub fn told(attempts: Vec<Attempt>, has_failed: bool) -> Vec<Attempt> {
    if attempts.len() > 1 || has_failed { attempts } else { Vec::new() }
}

/// Fields of one access log line; absent values are left out of the JSON.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Record<'a> {
    /// End of the request in Unix milliseconds.
    pub time_ms: u64,
    /// Request id, also in the response's `x-request-id`.
    pub request_id: &'a str,
    /// Address of the connection's peer, without its port; absent for a Unix socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Protocol of the connection: `h1`, `h2` or `console`; `ext_proc` for a request to the endpoint picker.
    pub protocol: &'a str,
    /// Bounded name of the route, or `-`.
    pub route: &'a str,
    /// Id of the API key; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Model that the request names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Whether the answer is streamed; absent for requests without a model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<bool>,
    /// HTTP status; 0 when the client left before there was one.
    pub status: u16,
    /// Kind of the failure, as clients see it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Detail of the failure that is only logged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Finish reasons of the choices, in their order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub finish: Vec<&'static str>,
    /// Time to first token (TTFT) in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    /// Time per output token after the first (TPOT) in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<f64>,
    /// Prompt tokens of the request, cached ones included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Prompt tokens that the prefix cache held.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// Output tokens of the answer, those of reasoning included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// Cost in dollars by the price table; absent without a price.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<f64>,
    /// Tokens that limits reserved for the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_tokens: Option<u64>,
    /// Tokens that limits charged at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub charged_tokens: Option<u64>,
    /// Dollars that limits reserved for the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_usd: Option<f64>,
    /// Dollars that limits charged at the end, for every attempt that may be billed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub charged_usd: Option<f64>,
    /// True if the usage was counted by the gateway because the upstream reported none.
    #[serde(skip_serializing_if = "is_false")]
    pub estimated: bool,
    /// Limit and measure that refused the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// Target that answered: a provider, or one of the model's targets.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "name")]
    pub target: Option<Arc<str>>,
    /// Id of the worker that answered; absent unless a pool did.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "name")]
    pub worker: Option<Arc<str>>,
    /// Reason of the endpoint picker's choice or refusal, as in `penstock_picks_total`; absent for other requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    /// Endpoints that the endpoint picker named, in the order in which the proxy shall ask them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub endpoints: Vec<SocketAddr>,
    /// Attempts at targets in the order of their outcome; empty if there was exactly one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub attempts: Vec<Attempt>,
    /// Hedges that lost the race; the provider may bill them, and `cost_usd` leaves them out.
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "names")]
    pub hedged: Vec<Arc<str>>,
    /// Number of times that the request was resumed after a lost worker.
    #[serde(skip_serializing_if = "is_zero")]
    pub resumes: u32,
    /// True if a resumed part was not bit-exact.
    #[serde(skip_serializing_if = "is_false")]
    pub inexact: bool,
    /// Number of moves to another worker while running.
    #[serde(skip_serializing_if = "is_zero")]
    pub moves: u32,
    /// Longest time without a token during a change of worker, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_ms: Option<f64>,
    /// Outcome of the request: `complete`, `failed`, or `client_gone`; of one to the endpoint picker also `cut` (the proxy
    /// showed no end of the answer) or `unseen` (the proxy shows no bodies of answers).
    pub end: &'static str,
    /// True if the client left before the end.
    #[serde(skip_serializing_if = "is_false")]
    pub client_gone: bool,
    /// Tags that plugins attached to the request.
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "pairs")]
    pub tags: Vec<(String, String)>,
    /// Names of request fields that were ignored.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignored: Vec<String>,
    /// Milliseconds from the complete head to the end.
    pub duration_ms: f64,
}

#[expect(clippy::ref_option, reason = "serde's signature")]
fn name<S: serde::Serializer>(name: &Option<Arc<str>>, out: S) -> Result<S::Ok, S::Error> {
    name.as_deref().serialize(out)
}

fn names<S: serde::Serializer>(names: &[Arc<str>], out: S) -> Result<S::Ok, S::Error> {
    out.collect_seq(names.iter().map(|name| &**name))
}

fn pairs<S: serde::Serializer>(pairs: &[(String, String)], out: S) -> Result<S::Ok, S::Error> {
    out.collect_map(pairs.iter().map(|(name, value)| (name, value)))
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_false(value: &bool) -> bool {
    !value
}

/// Handle on the access log: lines go to a thread that writes them; without a writer it is off.
#[derive(Debug)]
pub struct AccessLog {
    writer: Option<Writer>,
}

/// Writer thread with the queue that it shares with requests.
#[derive(Debug)]
struct Writer {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: Vec<u8>,
    /// True if the thread holds lines that it has not written yet.
    writing: bool,
    /// True if a flush waits, so that the thread must not gather further.
    urgent: bool,
    closing: bool,
    lost: u64,
}

impl AccessLog {
    /// Opens a log: `off`, `-` for standard output, or the path of a file to append to.
    pub fn open(target: &str) -> io::Result<Self> {
        let out: Box<dyn Write + Send> = match target {
            "off" => return Ok(Self { writer: None }),
            "-" => Box::new(io::stdout()),
            path => Box::new(OpenOptions::new().create(true).append(true).open(Path::new(path))?),
        };
        Self::to(out)
    }

    /// Opens a log on any writer and starts the thread that writes its lines.
    pub fn to(out: Box<dyn Write + Send>) -> io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let shared = queue.clone();
        let thread = std::thread::Builder::new().name("access-log".into()).spawn(move || shared.write_all(out))?;
        Ok(Self { writer: Some(Writer { queue, thread: Some(thread) }) })
    }

    /// Returns true if lines have a destination; without one, callers need not render them.
    pub fn is_on(&self) -> bool {
        self.writer.is_some()
    }

    /// Queues the line of a request. Never fails or delays the request: a line that finds the buffer full is counted as
    /// lost.
    pub fn write(&self, record: &Record<'_>) {
        if self.writer.is_none() {
            return;
        }
        let Ok(mut line) = serde_json::to_vec(record) else { return };
        line.push(b'\n');
        self.line(&line);
    }

    /// Queues a line of another source, with its line break.
    pub fn line(&self, line: &[u8]) {
        self.writer.iter().for_each(|writer| writer.queue.push(line));
    }

    /// Waits until all queued lines are written, at most `FLUSH_MAX`.
    pub fn flush(&self) {
        let Some(writer) = &self.writer else { return };
        let mut state = writer.queue.lock();
        state.urgent = true;
        writer.queue.changed.notify_all();
        let waiting = |state: &mut State| !state.lines.is_empty() || state.writing;
        drop(writer.queue.changed.wait_timeout_while(state, FLUSH_MAX, waiting));
    }

    /// Number of lines lost because the destination was slower than requests, or failed.
    pub fn lost(&self) -> u64 {
        self.writer.as_ref().map_or(0, |writer| writer.queue.lock().lost)
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: &[u8]) {
        let mut state = self.lock();
        let before = state.lines.len();
        if before + line.len() > WAITING_BYTES_MAX {
            state.lost += 1;
            return;
        }
        state.lines.extend_from_slice(line);
        let gathered = before < GATHER_BYTES && state.lines.len() >= GATHER_BYTES;
        drop(state);
        if before == 0 || gathered {
            self.changed.notify_all();
        }
    }

    /// Body of the thread: gathers and writes until closed.
    fn write_all(&self, mut out: Box<dyn Write + Send>) {
        let mut batch = Vec::new();
        while self.gather(&mut batch) {
            let written = out.write_all(&batch).and_then(|()| out.flush());
            let mut state = self.lock();
            if written.is_err() {
                state.lost += batch.iter().filter(|byte| **byte == b'\n').count() as u64;
            }
            state.writing = false;
            drop(state);
            self.changed.notify_all();
            batch.clear();
            // Return the memory of a burst.
            batch.shrink_to(2 * GATHER_BYTES);
        }
    }

    /// Waits for lines and takes them; `false`: the log is closed and the buffer empty.
    fn gather(&self, batch: &mut Vec<u8>) -> bool {
        let none = |state: &mut State| state.lines.is_empty() && !state.closing;
        let state = self.changed.wait_while(self.lock(), none).unwrap_or_else(PoisonError::into_inner);
        let few = |state: &mut State| state.lines.len() < GATHER_BYTES && !state.urgent && !state.closing;
        let (mut state, _) =
            self.changed.wait_timeout_while(state, GATHER, few).unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut state.lines, batch);
        state.urgent = false;
        state.writing = !batch.is_empty();
        state.writing
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.queue.lock().closing = true;
        self.queue.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread would lose the lines it holds; there is nothing else to report.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_per_token_are_those_between_the_first_and_the_last() {
        let second = Some(Duration::from_secs(1));
        assert_eq!([tpot(second, 5), tpot(second, 1), tpot(second, 0), tpot(None, 5)], [Some(0.25), None, None, None]);
        assert_eq!(tpot(Some(Duration::ZERO), 2), Some(0.0), "all at one instant");
        assert_eq!(millis(0.001_234_567), 1.235);
    }

    /// Test writer that keeps its input, counts the writes, and waits at a gate before each.
    #[derive(Clone, Default)]
    struct Gate {
        open: Arc<(Mutex<bool>, Condvar)>,
        written: Arc<Mutex<Vec<Vec<u8>>>>,
        broken: bool,
    }

    impl Gate {
        fn open(&self) {
            *self.open.0.lock().expect("no panic") = true;
            self.open.1.notify_all();
        }

        fn text(&self) -> String {
            String::from_utf8(self.written.lock().expect("no panic").concat()).expect("text")
        }
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            drop(self.open.1.wait_while(self.open.0.lock().expect("no panic"), |open| !*open));
            if self.broken {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.written.lock().expect("no panic").push(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn record(id: &str) -> Record<'_> {
        Record { request_id: id, route: "/health", protocol: "h1", status: 200, ..Record::default() }
    }

    #[test]
    fn a_line_is_one_json_object_without_absent_values() {
        let path = std::env::temp_dir().join(format!("penstock-access-{}.log", std::process::id()));
        let log = AccessLog::open(path.to_str().expect("utf-8")).expect("open");
        log.write(&record("req_1"));
        log.flush();
        let text = std::fs::read_to_string(&path).expect("read");
        std::fs::remove_file(&path).expect("remove");
        let value: serde_json::Value = serde_json::from_str(&text).expect("json");
        assert_eq!((value["status"].as_u64(), value.get("model"), text.lines().count()), (Some(200), None, 1));
    }

    #[test]
    fn lines_gather_and_keep_their_order_and_none_is_lost_at_the_end() {
        let gate = Gate::default();
        gate.open();
        let log = AccessLog::to(Box::new(gate.clone())).expect("a thread");
        for number in 0..1000 {
            log.write(&record(&number.to_string()));
        }
        drop(log);
        let text = gate.text();
        let ids = text.lines().map(|line| line.split('"').nth(5).expect("an id").to_owned());
        assert!(ids.eq((0..1000).map(|number| number.to_string())), "{text}");
        assert!(gate.written.lock().expect("no panic").len() < 100, "many lines share a write");
    }

    #[test]
    fn a_log_that_cannot_be_written_costs_lines_and_nothing_else() {
        let (gate, id) = (Gate::default(), "x".repeat(100_000));
        let log = AccessLog::to(Box::new(gate.clone())).expect("a thread");
        for _ in 0..200 {
            log.write(&record(&id));
        }
        let lost = log.lost();
        // One batch may be with the writer besides what waits.
        assert!((200 - 2 * 41..=200 - 41).contains(&lost), "{lost}");
        gate.open();
        log.flush();
        assert_eq!((gate.text().lines().count() as u64, log.lost()), (200 - lost, lost));
        let broken = AccessLog::to(Box::new(Gate { broken: true, ..gate })).expect("a thread");
        broken.write(&record("req_1"));
        broken.flush();
        assert_eq!(broken.lost(), 1);
    }
}
