//! Open loop: the requests of a trace are sent when they are due, regardless of earlier ones, to a router over
//! modelled workers (`modelled-worker` of tests/fleet), and every stream is checked token by token.
//!
//! One line of a trace: `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [one id per 512
//! tokens]}`; equal ids mean equal prefixes up to there. A prompt has one letter per `--tokens-each` tokens, and a
//! modelled model has one token per letter and answers with known letters: a lost, repeated or wrong token shows.
//! Times are reported as the modelled machine's.

use std::cell::RefCell;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bytes::Bytes;
use clap::Args;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{sleep_until, timeout};

use crate::client::connect;
use crate::report::round;

/// Tokens of a block of the trace.
const BLOCK: usize = 512;

/// Longest time of an answer.
const PATIENCE: Duration = Duration::from_secs(240);

/// What to replay, where, and what counts as good.
#[derive(Args, Clone, Debug)]
pub(crate) struct ReplayArgs {
    /// Endpoint, without /v1
    #[arg(long)]
    url: String,
    /// Model to name in requests
    #[arg(long, default_value = "modelled")]
    model: String,
    /// JSON lines
    #[arg(long)]
    trace: PathBuf,
    /// Name of this run in the report
    #[arg(long, default_value = "replay")]
    name: String,
    /// Requests before these are left out
    #[arg(long, default_value_t = 0)]
    skip: usize,
    /// Requests in all
    #[arg(long, default_value_t = 1500)]
    limit: usize,
    /// How much faster than the modelled machines the workers run
    #[arg(long, default_value_t = 5.0)]
    speed: f64,
    /// How much faster than recorded the requests come
    #[arg(long, default_value_t = 1.0)]
    rate: f64,
    /// Tokens that one letter stands for
    #[arg(long, default_value_t = 8)]
    tokens_each: usize,
    /// Time to the first token that is good, in modelled seconds: this much
    #[arg(long, default_value_t = 1.0)]
    ttft: f64,
    /// ... and this much per thousand tokens of prompt
    #[arg(long, default_value_t = 0.15)]
    ttft_per_thousand: f64,
    /// Mean time per later token that is good, in modelled seconds
    #[arg(long, default_value_t = 0.1)]
    tpot: f64,
}

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: usize,
    output_length: usize,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

/// Observations of one request.
#[derive(Default)]
struct Seen {
    /// Cached letters of the prompt, and all of its letters, as the answer reports them.
    cached: (u64, u64),
    ttft: f64,
    tpot: f64,
    good: bool,
}

#[derive(Default)]
struct Sums {
    seen: Vec<Seen>,
    refused: usize,
    /// Number of streams that ended early.
    cut: usize,
    /// Number of streams with a lost, repeated or wrong token.
    wrong: usize,
    reasons: std::collections::BTreeMap<String, usize>,
    /// Largest delay of a request behind its due time.
    lag: Duration,
}

/// Failure of a stream.
enum Fault {
    Refused(String),
    Cut(String),
    Wrong(String),
}

/// Replays the trace; the report is one JSON value.
pub(crate) async fn run(args: ReplayArgs) -> anyhow::Result<Value> {
    let lines = read(&args)?;
    let span = lines.last().context("the trace has no requests")?.timestamp / 1e3;
    let sums = Rc::new(RefCell::new(Sums::default()));
    let count = lines.len();
    let args = Rc::new(args);
    let local = LocalSet::new();
    let (sender, work) = (Rc::clone(&args), Rc::clone(&sums));
    let began = Instant::now();
    local.run_until(send_all(lines, sender, work, began)).await;
    let wall = began.elapsed();
    drop(local);
    let sums = Rc::into_inner(sums).context("a request outlived its run")?.into_inner();
    Ok(report(&args, &sums, count, span, wall))
}

async fn send_all(lines: Vec<Line>, args: Rc<ReplayArgs>, sums: Rc<RefCell<Sums>>, began: Instant) {
    let mut tasks = JoinSet::new();
    for (number, line) in lines.into_iter().enumerate() {
        let due = began + Duration::from_secs_f64(line.timestamp / 1e3 / args.rate / args.speed);
        sleep_until(due.into()).await;
        let (args, sums) = (Rc::clone(&args), Rc::clone(&sums));
        tasks.spawn_local(async move {
            let late = due.elapsed();
            let answered = timeout(PATIENCE, one(&args, &line, number as u64)).await;
            let answered = answered.unwrap_or_else(|_| Err(Fault::Cut("no end within the time".into())));
            let mut sums = sums.borrow_mut();
            sums.lag = sums.lag.max(late);
            let why = match answered {
                Ok(seen) => return sums.seen.push(seen),
                Err(Fault::Refused(why)) => (sums.refused += 1, why).1,
                Err(Fault::Cut(why)) => (sums.cut += 1, why).1,
                Err(Fault::Wrong(why)) => (sums.wrong += 1, why).1,
            };
            *sums.reasons.entry(why).or_default() += 1;
        });
    }
    while tasks.join_next().await.is_some() {}
}

fn read(args: &ReplayArgs) -> anyhow::Result<Vec<Line>> {
    let file = std::fs::File::open(&args.trace).with_context(|| args.trace.display().to_string())?;
    let mut lines = Vec::new();
    for text in BufReader::new(file).lines().skip(args.skip).take(args.limit) {
        lines.push(serde_json::from_str::<Line>(&text?).context("a line of the trace")?);
    }
    lines.sort_by(|a, b| a.timestamp.total_cmp(&b.timestamp));
    let first = lines.first().map_or(0.0, |line| line.timestamp);
    lines.iter_mut().for_each(|line| line.timestamp -= first);
    lines.retain(|line| line.input_length >= args.tokens_each && line.output_length > 0);
    Ok(lines)
}

/// Prompt of a request: equal blocks are equal letters, and the part behind the last full block is unique.
fn prompt(line: &Line, number: u64, tokens_each: usize) -> String {
    let mut letters = String::with_capacity(line.input_length / tokens_each + 1);
    let full = line.hash_ids.len().min(line.input_length / BLOCK);
    for id in &line.hash_ids[..full] {
        write(&mut letters, id + 1, BLOCK / tokens_each);
    }
    let rest = (line.input_length - full * BLOCK) / tokens_each;
    write(&mut letters, u64::MAX - number, rest);
    letters
}

fn write(letters: &mut String, seed: u64, count: usize) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for _ in 0..count {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        letters.push(char::from(b'a' + (state >> 32) as u8 % 26));
    }
}

/// Letter of a modelled model after `position`.
fn expected(position: usize) -> u8 {
    b'a' + (7 * position % 26) as u8
}

async fn one(args: &ReplayArgs, line: &Line, number: u64) -> Result<Seen, Fault> {
    let prompt = prompt(line, number, args.tokens_each);
    let letters = prompt.len();
    let body = json!({
        "model": args.model, "prompt": prompt, "max_tokens": line.output_length, "temperature": 0, "ignore_eos": true,
        "stream": true, "stream_options": { "include_usage": true },
    });
    let sent = Instant::now();
    let mut stream = Stream { next: letters, ..Stream::default() };
    let result = ask(args, body.to_string(), &mut stream).await;
    result.map_err(|error| match (stream.wrong, stream.first) {
        (true, _) => Fault::Wrong(format!("{error:#}")),
        (_, Some(_)) => Fault::Cut(format!("{error:#}")),
        (_, None) => Fault::Refused(format!("{error:#}")),
    })?;
    let (Some(first), Some(last)) = (stream.first, stream.last) else { return Err(Fault::Cut("no token came".into())) };
    if stream.next != letters + line.output_length {
        return Err(Fault::Wrong(format!("{} tokens of {}", stream.next - letters, line.output_length)));
    }
    let ttft = (first - sent).as_secs_f64() * args.speed;
    let tpot = (last - first).as_secs_f64() * args.speed / (line.output_length - 1).max(1) as f64;
    let limit = args.ttft + args.ttft_per_thousand * line.input_length as f64 / 1e3;
    Ok(Seen { cached: stream.cached, ttft, tpot, good: ttft <= limit && tpot <= args.tpot })
}

async fn ask(args: &ReplayArgs, body: String, stream: &mut Stream) -> anyhow::Result<()> {
    let host = args.url.strip_prefix("http://").context("--url begins with http://")?.trim_end_matches('/');
    let mut sender = connect(host).await?;
    let request = Request::post("/v1/completions").header("host", host).header("content-type", "application/json");
    let mut response = sender.send_request(request.body(Full::new(Bytes::from(body)))?).await.context("send")?;
    if response.status() != 200 {
        bail!("status {}", response.status().as_u16());
    }
    let mut buffer = Vec::new();
    while let Some(frame) = response.frame().await {
        let frame = frame.context("the answer broke off")?;
        if let Some(data) = frame.data_ref() {
            buffer.extend_from_slice(data);
            stream.take(&mut buffer)?;
        }
    }
    if !stream.done {
        bail!("the answer ended without [DONE]");
    }
    Ok(())
}

/// Checker of one answer.
#[derive(Default)]
struct Stream {
    /// Position of the next letter.
    next: usize,
    first: Option<Instant>,
    last: Option<Instant>,
    cached: (u64, u64),
    wrong: bool,
    done: bool,
}

impl Stream {
    fn take(&mut self, buffer: &mut Vec<u8>) -> anyhow::Result<()> {
        let mut at = 0;
        while let Some(length) = buffer[at..].windows(2).position(|pair| pair == b"\n\n") {
            let event = &buffer[at..at + length];
            at += length + 2;
            match event.strip_prefix(b"data: ") {
                Some(b"[DONE]") => self.done = true,
                Some(data) => self.event(data)?,
                None => {}
            }
        }
        buffer.drain(..at);
        Ok(())
    }

    fn event(&mut self, data: &[u8]) -> anyhow::Result<()> {
        let event: Value = serde_json::from_slice(data).context("an event is not JSON")?;
        if let Some(message) = event["error"]["message"].as_str() {
            bail!("error event: {message}");
        }
        let text = event["choices"][0]["text"].as_str().unwrap_or_default();
        for letter in text.bytes() {
            // A model that has read `n` tokens emits the letter of position n - 1.
            if letter != expected(self.next - 1) {
                self.wrong = true;
                bail!("a token that was not due");
            }
            self.next += 1;
        }
        if !text.is_empty() {
            let now = Instant::now();
            self.first.get_or_insert(now);
            self.last = Some(now);
        }
        if let Some(prompt) = event["usage"]["prompt_tokens"].as_u64() {
            self.cached = (event["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0), prompt);
        }
        Ok(())
    }
}

fn report(args: &ReplayArgs, sums: &Sums, count: usize, span: f64, wall: Duration) -> Value {
    let good = sums.seen.iter().filter(|seen| seen.good).count();
    let (cached, prompts) = sums.seen.iter().fold((0, 0), |sum, seen| (sum.0 + seen.cached.0, sum.1 + seen.cached.1));
    let quantiles = |of: fn(&Seen) -> f64, scale: f64| {
        let mut values: Vec<f64> = sums.seen.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values.get((values.len() as f64 * share) as usize).map(|value| round(value * scale));
        json!({ "p50": at(0.5), "p99": at(0.99) })
    };
    json!({
        "name": args.name,
        "rate": args.rate,
        "requests": count,
        "hit_percent": round(100.0 * cached as f64 / (prompts as f64).max(1.0)),
        "in_slo_percent": round(100.0 * good as f64 / count.max(1) as f64),
        "goodput_per_s": round(good as f64 / (span / args.rate).max(1e-9)),
        "ttft_s": quantiles(|seen| seen.ttft, 1.0),
        "tpot_ms": quantiles(|seen| seen.tpot, 1e3),
        "refused": sums.refused,
        "cut": sums.cut,
        "wrong": sums.wrong,
        "reasons": sums.reasons,
        "lag_ms": round(sums.lag.as_secs_f64() * 1e3),
        "wall_s": round(wall.as_secs_f64()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(input_length: usize, hash_ids: Vec<u64>) -> Line {
        Line { timestamp: 0.0, input_length, output_length: 3, hash_ids }
    }

    #[test]
    fn equal_blocks_are_equal_letters() {
        let (a, b) = (prompt(&line(1100, vec![1, 2]), 0, 8), prompt(&line(1600, vec![1, 2, 3]), 1, 8));
        assert_eq!((a.len(), b.len()), (128 + 9, 192 + 8));
        assert!(a[..128] == b[..128] && a[128..] != b[128..137]);
        assert_eq!(prompt(&line(500, vec![1]), 0, 8).len(), 62, "a block that is not full is nobody's");
    }

    #[test]
    fn a_stream_with_a_wrong_token_is_seen() {
        let feed = |text: &str| {
            let mut stream = Stream { next: 5, ..Stream::default() };
            let event = format!("data: {}\n\n", json!({ "choices": [{ "text": text }] }));
            let result = stream.take(&mut event.into_bytes());
            (result.is_ok(), stream.wrong, stream.next)
        };
        let right: String = [4, 5, 6].map(|position| char::from(expected(position))).iter().collect();
        assert_eq!(feed(&right), (true, false, 8));
        assert_eq!(feed(&right[1..]), (false, true, 5));
    }
}
