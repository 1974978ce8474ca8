//! One JSON line per request. No prompt, no completion, no key.
//!
//! Requests leave their lines in a buffer; a thread writes what has gathered there, so that a request pays for no system call and a
//! slow disk or pipe delays nobody. The buffer is bounded: lines that find it full are lost and counted. An orderly stop writes
//! everything ([`AccessLog::flush`]); a killed process loses what came within the last `GATHER`.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;

use crate::upstream::Attempt;

/// Time in which lines gather for one write.
const GATHER: Duration = Duration::from_millis(50);
/// Lines that are written at once instead: a pipe's default size.
const GATHER_BYTES: usize = 64 * 1024;
/// Lines that wait at most: ten thousand requests.
const WAITING_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Longest wait for a log that cannot be written.
const FLUSH_MAX: Duration = Duration::from_secs(5);

/// What a line says. Absent values are left out.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Record<'a> {
    /// Unix milliseconds of the end.
    pub time_ms: u64,
    /// Also in the response's x-request-id.
    pub request_id: &'a str,
    /// Peer address, without port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// `h1` or `h2`.
    pub protocol: &'a str,
    /// Bounded name of the route, or `-`.
    pub route: &'a str,
    /// Id of the API key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Model asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Streamed or whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<bool>,
    /// HTTP status; 0 when the client left before there was one.
    pub status: u16,
    /// Kind of the failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What only the log says about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Finish reasons of the choices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub finish: Vec<&'static str>,
    /// Milliseconds to the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    /// Milliseconds per output token after the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<f64>,
    /// Prompt tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Of these, from the prefix cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// Output tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// What it cost, by the price table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<f64>,
    /// Tokens that its limits held for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_tokens: Option<u64>,
    /// Tokens that its limits counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub charged_tokens: Option<u64>,
    /// Dollars that its limits held for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_usd: Option<f64>,
    /// Dollars that its limits counted: every attempt that may bill.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub charged_usd: Option<f64>,
    /// The upstream did not say what it used: counted here.
    #[serde(skip_serializing_if = "is_false")]
    pub estimated: bool,
    /// The limit and measure that refused it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// Who answered: a provider, or one of the targets of the model.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "name")]
    pub target: Option<Arc<str>>,
    /// The worker that answered, where it was one of ours.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "name")]
    pub worker: Option<Arc<str>>,
    /// Everybody who was asked, when that was not one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub attempts: Vec<Attempt>,
    /// Who was asked too and not waited for; may bill, and is not in `cost_usd`.
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "names")]
    pub hedged: Vec<Arc<str>>,
    /// Continuations after a lost worker.
    #[serde(skip_serializing_if = "is_zero")]
    pub resumes: u32,
    /// A continuation was not bit-exact.
    #[serde(skip_serializing_if = "is_false")]
    pub inexact: bool,
    /// Moves to another worker.
    #[serde(skip_serializing_if = "is_zero")]
    pub moves: u32,
    /// Longest time without a token while the request changed its worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_ms: Option<f64>,
    /// `complete`, `failed`, or `client_gone`.
    pub end: &'static str,
    /// The client left before the end.
    #[serde(skip_serializing_if = "is_false")]
    pub client_gone: bool,
    /// What plugins say about the request.
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "pairs")]
    pub tags: Vec<(String, String)>,
    /// Names of request fields that were ignored.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignored: Vec<String>,
    /// Head complete to end.
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

/// The log.
#[derive(Debug)]
pub struct AccessLog {
    writer: Option<Writer>,
}

/// The thread that writes, and what it shares with requests.
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
    /// The thread holds lines that it has not written yet.
    writing: bool,
    /// Somebody waits for the lines.
    urgent: bool,
    closing: bool,
    lost: u64,
}

impl AccessLog {
    /// `off`, `-` for standard output, or a path, which is appended to.
    pub fn open(target: &str) -> io::Result<Self> {
        let out: Box<dyn Write + Send> = match target {
            "off" => return Ok(Self { writer: None }),
            "-" => Box::new(io::stdout()),
            path => Box::new(OpenOptions::new().create(true).append(true).open(Path::new(path))?),
        };
        Self::to(out)
    }

    /// To anything that can be written to.
    pub(crate) fn to(out: Box<dyn Write + Send>) -> io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let shared = queue.clone();
        let thread = std::thread::Builder::new().name("access-log".into()).spawn(move || shared.write_all(out))?;
        Ok(Self { writer: Some(Writer { queue, thread: Some(thread) }) })
    }

    /// Whether lines go anywhere.
    pub fn is_on(&self) -> bool {
        self.writer.is_some()
    }

    /// Leaves one line for the writer. A log that cannot be written never fails or delays a request.
    pub fn write(&self, record: &Record<'_>) {
        if self.writer.is_none() {
            return;
        }
        let Ok(mut line) = serde_json::to_vec(record) else { return };
        line.push(b'\n');
        self.line(&line);
    }

    /// Leaves a line of somebody else's, with its end.
    pub fn line(&self, line: &[u8]) {
        self.writer.iter().for_each(|writer| writer.queue.push(line));
    }

    /// Waits until everything so far is written, or cannot be.
    pub fn flush(&self) {
        let Some(writer) = &self.writer else { return };
        let mut state = writer.queue.lock();
        state.urgent = true;
        writer.queue.changed.notify_all();
        let waiting = |state: &mut State| !state.lines.is_empty() || state.writing;
        drop(writer.queue.changed.wait_timeout_while(state, FLUSH_MAX, waiting));
    }

    /// Lines lost because the log could not be written as fast as requests ended.
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

    /// The thread: gathers and writes until closed.
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
            batch.shrink_to(2 * GATHER_BYTES);
        }
    }

    /// Waits for lines and takes them; `false`: closed, and nothing is left.
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
            // It cannot panic while it holds lines; if it could, they would be lost either way.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps what is written and counts the writes; waits at a gate before each.
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
