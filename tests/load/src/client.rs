//! Closed loop: each connection sends its next request when the last is answered.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{interval, sleep, timeout};

use crate::process::{cpu_seconds, memory_bytes};
use crate::report::{Tally, Watched, line};
use crate::{RunArgs, mock};

/// Pause after a wave, before its memory is read.
const REST: Duration = Duration::from_secs(1);

/// Start of a prompt where every request has a prompt of its own; the request's number takes its place.
const NUMBER: &str = "0123456789";

/// State shared by all connections.
struct Run {
    host: String,
    body: Bytes,
    /// Offset of [`NUMBER`] in the body; `None` if every request repeats one prompt.
    number_at: Option<usize>,
    stream: bool,
    key: Option<String>,
    /// Expected bytes of an answer, if known.
    exact: Option<Vec<u8>>,
    left: Cell<usize>,
    tally: RefCell<Tally>,
}

/// One checked answer.
struct Answer {
    chunks: usize,
    bytes: usize,
    first: Duration,
}

/// Warms up, then measures; the report is one JSON value.
pub(crate) async fn run(args: &RunArgs) -> anyhow::Result<Value> {
    let deadline = Duration::from_secs(args.timeout_s);
    let work = async {
        drive(args, args.warmup, args.connections.min(16), Duration::ZERO).await?;
        let cpu = args.pid.and_then(cpu_seconds);
        let memory = args.pid.and_then(memory_bytes);
        let started = Instant::now();
        let mut waves = Vec::new();
        let measured = async {
            let mut tally = Tally::default();
            for _ in 0..args.waves.max(1) {
                let ramp = Duration::from_millis(args.ramp_ms);
                tally.add(drive(args, args.requests, args.connections, ramp).await?);
                if args.waves > 1 {
                    // Memory is freed lazily: only at rest does a gateway show the memory it keeps.
                    sleep(REST).await;
                    waves.extend(args.pid.and_then(memory_bytes));
                }
            }
            anyhow::Ok(tally)
        };
        let (tally, peak) = watched(args.pid, measured).await;
        let wall = started.elapsed();
        let seen = args.pid.map(|pid| -> Option<Watched> {
            let cpu_seconds = cpu_seconds(pid)? - cpu?;
            Some(Watched { cpu_seconds, memory_before: memory?, memory_peak: peak.max(memory_bytes(pid)?) })
        });
        let seen = seen.map(|seen| seen.context("the watched process is gone")).transpose()?;
        Ok(line(args, tally?, wall, seen, &waves))
    };
    timeout(deadline, work).await.with_context(|| format!("not done within {deadline:?}"))?
}

/// Awaits `work` while sampling the memory of `pid`; returns its outcome and the largest sample.
async fn watched<T>(pid: Option<u32>, work: impl Future<Output = T>) -> (T, u64) {
    let mut peak = 0;
    let mut ticks = interval(Duration::from_millis(250));
    tokio::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return (done, peak),
            _ = ticks.tick() => peak = peak.max(pid.and_then(memory_bytes).unwrap_or(0)),
        }
    }
}

/// Sends `requests` over `connections`.
async fn drive(args: &RunArgs, requests: usize, connections: usize, ramp: Duration) -> anyhow::Result<Tally> {
    let host = args.url.strip_prefix("http://").context("--url begins with http://")?.trim_end_matches('/').to_owned();
    let body = body(args);
    let run = Rc::new(Run {
        host,
        number_at: args.distinct.then(|| body.find(NUMBER)).flatten(),
        body: body.into(),
        stream: args.stream,
        key: args.key.clone(),
        exact: args.exact.then(|| mock::body(args.stream, args.tokens)),
        left: Cell::new(requests),
        tally: RefCell::new(Tally::default()),
    });
    let local = LocalSet::new();
    let mut tasks = JoinSet::new();
    for index in 0..connections.min(requests) {
        let (run, wait) = (Rc::clone(&run), ramp.mul_f64(index as f64 / connections as f64));
        tasks.spawn_local_on(
            async move {
                sleep(wait).await;
                one_connection(&run).await;
            },
            &local,
        );
    }
    local.run_until(async { while tasks.join_next().await.is_some() {} }).await;
    drop(local);
    drop(tasks);
    let run = Rc::into_inner(run).context("a connection outlived its run")?;
    Ok(run.tally.into_inner())
}

fn body(args: &RunArgs) -> String {
    let begins = if args.distinct { NUMBER } else { "" };
    let prompt: String =
        begins.chars().chain("blue otter 42 ".chars().cycle()).take(args.prompt_bytes.max(begins.len())).collect();
    let mut body = json!({
        "model": args.model,
        "messages": [{ "role": "user", "content": prompt }],
        "max_tokens": args.tokens,
        "ignore_eos": true,
        "temperature": 0,
        "stream": args.stream,
    });
    if let Some(gap) = args.gap_ms {
        body["metadata"] = json!({ "gap_ms": gap.to_string() });
    }
    body.to_string()
}

impl Run {
    /// Body of the next request. Numbers are unique in the whole life of the process, so that a warm-up shares no
    /// prompt with the measurement.
    fn next_body(&self) -> Bytes {
        static REQUESTS: AtomicU64 = AtomicU64::new(0);
        let Some(at) = self.number_at else { return self.body.clone() };
        let mut body = self.body.to_vec();
        let number = format!("{:010}", REQUESTS.fetch_add(1, Ordering::Relaxed));
        body[at..at + NUMBER.len()].copy_from_slice(&number.as_bytes()[..NUMBER.len()]);
        body.into()
    }
}

async fn one_connection(run: &Run) {
    let mut sender = None;
    while run.left.get() > 0 {
        run.left.set(run.left.get() - 1);
        let started = Instant::now();
        let answered = ask(run, &mut sender, started).await;
        let mut tally = run.tally.borrow_mut();
        match answered {
            Ok(answer) => {
                tally.complete += 1;
                tally.chunks += answer.chunks;
                tally.bytes += answer.bytes;
                tally.first.push(answer.first);
                tally.latency.push(started.elapsed());
            }
            Err(error) => {
                sender = None;
                *tally.errors.entry(format!("{error:#}")).or_default() += 1;
            }
        }
    }
}

/// Sends one request, on the connection kept from the last one if there is one, and checks its answer.
async fn ask(run: &Run, sender: &mut Option<SendRequest<Full<Bytes>>>, started: Instant) -> anyhow::Result<Answer> {
    let mut kept = match sender.take() {
        Some(kept) if kept.is_ready() => kept,
        _ => connect(&run.host).await?,
    };
    let mut request = Request::post("/v1/chat/completions").header("host", &run.host);
    if let Some(key) = &run.key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    let request = request.header("content-type", "application/json").body(Full::new(run.next_body()))?;
    let mut response = kept.send_request(request).await.context("send")?;
    if response.status() != 200 {
        bail!("status {}", response.status().as_u16());
    }
    let (mut checker, mut whole, mut all, mut first) = (Checker::default(), Vec::new(), Vec::new(), None);
    while let Some(frame) = response.frame().await {
        let frame = frame.context("the answer broke off")?;
        let Some(data) = frame.data_ref() else { continue };
        whole.extend_from_slice(data);
        if run.exact.is_some() {
            all.extend_from_slice(data);
        }
        if run.stream {
            checker.take(&mut whole)?;
        }
        if first.is_none() && (checker.chunks > 0 || !run.stream) {
            first = Some(started.elapsed());
        }
        checker.bytes += data.len();
    }
    if !run.stream {
        let answer: Value = serde_json::from_slice(&whole).context("the answer is not JSON")?;
        checker.finished = answer["choices"][0]["finish_reason"].is_string();
        checker.done = true;
    }
    if !checker.finished || !checker.done {
        bail!("the answer is not complete");
    }
    if run.exact.as_ref().is_some_and(|exact| *exact != all) {
        bail!("the answer's bytes are not the upstream's");
    }
    kept.ready().await.context("keep-alive")?;
    *sender = Some(kept);
    Ok(Answer { chunks: checker.chunks, bytes: checker.bytes, first: first.unwrap_or_else(|| started.elapsed()) })
}

pub(crate) async fn connect(host: &str) -> anyhow::Result<SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(host).await.context("connect")?;
    stream.set_nodelay(true)?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await.context("handshake")?;
    // The task ends with its sender.
    tokio::spawn(async move {
        let _closed = connection.await;
    });
    Ok(sender)
}

/// Checker of the events of one stream.
#[derive(Debug, Default)]
struct Checker {
    chunks: usize,
    bytes: usize,
    finished: bool,
    done: bool,
}

impl Checker {
    /// Takes the whole events off the front of `buffer`.
    fn take(&mut self, buffer: &mut Vec<u8>) -> anyhow::Result<()> {
        let mut at = 0;
        while let Some(length) = buffer[at..].windows(2).position(|pair| pair == b"\n\n") {
            let event = &buffer[at..at + length];
            at += length + 2;
            if let Some(data) = event.strip_prefix(b"data: ") {
                self.event(data)?;
            }
        }
        buffer.drain(..at);
        Ok(())
    }

    fn event(&mut self, data: &[u8]) -> anyhow::Result<()> {
        if self.done {
            bail!("an event after [DONE]");
        }
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: Value = serde_json::from_slice(data).context("an event is not JSON")?;
        if let Some(message) = event["error"]["message"].as_str() {
            bail!("error event: {message}");
        }
        let choice = &event["choices"][0];
        self.finished |= choice["finish_reason"].is_string();
        self.chunks += usize::from(choice["delta"]["content"].as_str().is_some_and(|text| !text.is_empty()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_run_against_the_mock_counts_what_was_asked_for() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let mock = tokio::spawn(crate::mock::accept(listener, Duration::ZERO));
        for (stream, chunks) in [(true, 40 * 7), (false, 0)] {
            let args = RunArgs {
                key: None,
                url: url.clone(),
                model: "m".into(),
                name: "test".into(),
                pid: Some(std::process::id()),
                connections: 4,
                requests: 40,
                warmup: 4,
                tokens: 7,
                stream,
                prompt_bytes: 100,
                distinct: stream,
                gap_ms: Some(1),
                exact: true,
                waves: 1,
                ramp_ms: 5,
                timeout_s: 60,
            };
            let report = run(&args).await.unwrap();
            assert_eq!((&report["complete"], &report["chunks"]), (&json!(40), &json!(chunks)), "{report}");
            assert_eq!(report["errors"], json!({}));
            assert!(report["cpu_us_per_request"].as_f64().unwrap() > 0.0);
        }
        mock.abort();
    }

    #[test]
    fn incomplete_and_wrong_streams_are_seen() {
        let feed = |text: &str| -> anyhow::Result<Checker> {
            let (mut checker, mut buffer) = (Checker::default(), text.as_bytes().to_vec());
            checker.take(&mut buffer)?;
            Ok(checker)
        };
        let complete =
            feed("data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n: beat\n\ndata: [DONE]\n\n")
                .unwrap();
        assert!(complete.finished && complete.done);
        assert!(!feed("data: {\"choices\":[]}\n\n").unwrap().finished);
        assert!(feed("data: [DONE]\n\ndata: {}\n\n").is_err());
        assert!(feed("data: {\"error\":{\"message\":\"x\"}}\n\n").is_err());
        assert!(feed("data: {\n\n").is_err());
    }
}
