//! Traces: arrival times of requests, their lengths, and the prefixes that they share.
//!
//! One JSON object a line, in the form in which Mooncake publishes its traces:
//! `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": […], "session": n}`. `hash_ids` has one id per full
//! block of [`SHARED_TOKENS`] prompt tokens; equal ids mean equal whole prefixes. `session` may be left out, and `tenant`
//! (a number) may be added. A gateway's record of decisions is a trace with more; see [`super::recorded`].

use super::recorded::Like;
use crate::random::{Random, mix};
use penstock_proto::{BLOCK_TOKENS, BlockHash, BlockHasher};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::io::BufRead;
use std::sync::Arc;

/// Number of prompt tokens that one id of a trace covers.
pub const SHARED_TOKENS: usize = 512;

/// Number of pool blocks in one block of the trace.
const BLOCKS: usize = SHARED_TOKENS / BLOCK_TOKENS;

/// Longest line of a trace file that is read, in bytes.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// Longest prompt or answer of a request, in tokens.
const TOKENS_MAX: usize = 1 << 20;

/// Latest and earliest time of a request, in milliseconds: some centuries, so that nanoseconds are numbers at any sensible rate.
const TIMESTAMP_MAX: f64 = 1e13;

/// Most requests of a trace; a longer one is refused.
const REQUESTS_MAX: usize = 1_000_000;

/// Salt of the block hashes in a simulated fleet.
pub const NUMERICS_ID: &str = "simulated";

/// One request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Seconds from the start of the trace, at rate 1.
    pub arrival: f64,
    /// Prompt tokens, at least 1.
    pub input: usize,
    /// Answer tokens, at least 1.
    pub output: usize,
    /// Ids of the prefixes that end at each full [`SHARED_TOKENS`] tokens.
    pub ids: Vec<u64>,
    /// Session of the request: requests of one conversation share it.
    pub session: u64,
    /// Tenant of the request, for the fair share.
    pub tenant: u32,
    /// Chosen engine, in a record of decisions.
    pub engine: Option<usize>,
    /// Seconds to its first token, in a record of decisions.
    pub ttft: Option<f64>,
}

/// Reason why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A line of the file cannot be read.
    #[error("line {line}: cannot be read")]
    Read {
        /// Number of the line, from 1.
        line: usize,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A line is not JSON, or not a request.
    #[error("line {line}: {source}")]
    Parse {
        /// Number of the line, from 1.
        line: usize,
        /// Error of the JSON parser.
        source: serde_json::Error,
    },
    /// A line or a trace beyond the bounds.
    #[error("line {line}: longer or later than any request or trace that is simulated")]
    TooLong {
        /// Number of the line, from 1.
        line: usize,
    },
    /// The trace has no requests.
    #[error("the trace has no requests")]
    Empty,
}

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: usize,
    output_length: usize,
    #[serde(default)]
    hash_ids: Vec<u64>,
    session: Option<u64>,
    tenant: Option<u32>,
    #[serde(alias = "worker")]
    engine: Option<usize>,
    #[serde(default)]
    waited_ms: f64,
    ttft_ms: Option<f64>,
    #[serde(flatten)]
    like: Option<Like>,
}

/// Requests in order of arrival, and the block hashes of their prompts.
pub struct Trace {
    /// The requests in order of arrival.
    pub requests: Vec<Request>,
    /// Properties of the engines, if the trace is a record.
    pub engines: BTreeMap<usize, Like>,
    names: Names,
}

impl Trace {
    /// Reads a trace: at most `limit` of the requests after the first `skip`. Lines with an empty prompt or answer are
    /// left out.
    ///
    /// # Errors
    /// [`TraceError`] with the line.
    pub fn read(mut lines: impl BufRead, skip: usize, limit: usize) -> Result<Self, TraceError> {
        let (mut requests, mut engines) = (Vec::new(), BTreeMap::new());
        let (mut text, mut line) = (Vec::new(), 0);
        loop {
            (line, text) = (line + 1, {
                text.clear();
                text
            });
            let mut bounded = std::io::Read::take(&mut lines, LINE_BYTES_MAX);
            let bytes = bounded.read_until(b'\n', &mut text).map_err(|source| TraceError::Read { line, source })?;
            if bytes == 0 {
                break;
            }
            if text.trim_ascii().is_empty() {
                continue;
            }
            if bytes as u64 == LINE_BYTES_MAX || requests.len() == REQUESTS_MAX {
                return Err(TraceError::TooLong { line });
            }
            let parsed: Line = serde_json::from_slice(&text).map_err(|source| TraceError::Parse { line, source })?;
            if parsed.input_length.max(parsed.output_length) > TOKENS_MAX || parsed.timestamp.abs() > TIMESTAMP_MAX {
                return Err(TraceError::TooLong { line });
            }
            engines.extend(parsed.engine.zip(parsed.like.filter(Like::is_sane)));
            if parsed.input_length > 0 && parsed.output_length > 0 {
                requests.push(request(parsed));
            }
        }
        requests.sort_by(|a: &Request, b| a.arrival.total_cmp(&b.arrival));
        let trace = Self::new(requests.into_iter().skip(skip).take(limit).collect())?;
        Ok(Self { engines, ..trace })
    }

    /// A trace of these requests, in order of arrival.
    ///
    /// # Errors
    /// [`TraceError::Empty`].
    pub fn new(mut requests: Vec<Request>) -> Result<Self, TraceError> {
        let start = requests.first().ok_or(TraceError::Empty)?.arrival;
        requests.iter_mut().for_each(|request| request.arrival -= start);
        if requests.iter().all(|request| request.session == 0) {
            find_sessions(&mut requests);
        }
        let names = Names::of(&requests);
        Ok(Self { requests, engines: BTreeMap::new(), names })
    }

    /// Seconds from the first arrival to the last.
    pub fn seconds(&self) -> f64 {
        self.requests.last().map_or(0.0, |request| request.arrival)
    }

    /// Hashes of the full blocks of a request's prompt.
    pub fn hashes(&self, at: usize) -> Arc<[BlockHash]> {
        let request = &self.requests[at];
        let mut hashes = Vec::with_capacity(request.input / BLOCK_TOKENS);
        request.ids.iter().for_each(|id| hashes.extend_from_slice(&self.names.blocks[id]));
        let tail: Vec<u32> = tokens_of(own_id(at), request.input - request.ids.len() * SHARED_TOKENS);
        let mut parent = hashes.last().copied();
        for block in tail.chunks_exact(BLOCK_TOKENS) {
            let hash = self.names.hasher.block(parent, block);
            hashes.push(hash);
            parent = Some(hash);
        }
        hashes.into()
    }

    /// Tokens of a request's prompt: the same wherever the ids are the same.
    pub fn tokens(&self, at: usize) -> Vec<u32> {
        let request = &self.requests[at];
        let mut tokens: Vec<u32> = request.ids.iter().flat_map(|id| tokens_of(*id, SHARED_TOKENS)).collect();
        tokens.extend(tokens_of(own_id(at), request.input - tokens.len()));
        tokens
    }

    /// Share of the prompt tokens that one cache of unlimited size would hit, in order of arrival.
    pub fn ideal_hit_rate(&self) -> f64 {
        let mut seen = std::collections::HashSet::new();
        let (mut hits, mut tokens) = (0, 0);
        for request in &self.requests {
            let known = request.ids.iter().take_while(|id| seen.contains(*id)).count() * SHARED_TOKENS;
            hits += known.min(request.input - 1);
            tokens += request.input;
            seen.extend(request.ids.iter().copied());
        }
        hits as f64 / tokens.max(1) as f64
    }
}

fn request(line: Line) -> Request {
    let mut ids = line.hash_ids;
    ids.truncate(line.input_length / SHARED_TOKENS);
    let session = line.session.unwrap_or(0);
    let tenant = line.tenant.unwrap_or(0);
    Request {
        arrival: line.timestamp / 1000.0,
        input: line.input_length,
        output: line.output_length,
        ids,
        session,
        tenant,
        engine: line.engine,
        ttft: line.ttft_ms.map(|ttft| (line.waited_ms + ttft) / 1000.0).filter(|ttft| ttft.is_finite() && *ttft > 0.0),
    }
}

/// Id of the part of a prompt that no other request shares.
fn own_id(at: usize) -> u64 {
    1 << 62 | at as u64
}

fn tokens_of(id: u64, count: usize) -> Vec<u32> {
    let mut random = Random::new(id ^ 0x5bd1_e995);
    (0..count).map(|_| (random.bits() % 100_000) as u32).collect()
}

/// Assigns sessions: a request belongs to the session that owns its deepest known block, if that covers half of it.
fn find_sessions(requests: &mut [Request]) {
    let mut owners: HashMap<u64, u64> = HashMap::new();
    for (number, request) in (1..).zip(requests) {
        let depth = request.ids.iter().take_while(|id| owners.contains_key(*id)).count();
        let goes_on = depth > 1 && depth * 2 >= request.ids.len();
        let session = if goes_on { owners[&request.ids[depth - 1]] } else { number };
        request.session = session;
        request.ids.iter().for_each(|id| _ = owners.entry(*id).or_insert(session));
    }
}

/// Hash of every block that more than one request may have, computed once.
struct Names {
    hasher: BlockHasher,
    blocks: HashMap<u64, [BlockHash; BLOCKS]>,
}

impl Names {
    fn of(requests: &[Request]) -> Self {
        let hasher = BlockHasher::for_request(b"", NUMERICS_ID);
        let mut blocks: HashMap<u64, [BlockHash; BLOCKS]> = HashMap::new();
        for request in requests {
            let mut parent = None;
            for id in &request.ids {
                let named = blocks.entry(*id).or_insert_with(|| {
                    let tokens = tokens_of(*id, SHARED_TOKENS);
                    let mut last = parent;
                    let mut tokens = tokens.chunks_exact(BLOCK_TOKENS);
                    std::array::from_fn(|_| {
                        let hash = hasher.block(last, tokens.next().expect("whole blocks"));
                        last = Some(hash);
                        hash
                    })
                });
                parent = named.last().copied();
            }
        }
        Self { hasher, blocks }
    }
}

/// Shape of the traffic that [`synthetic`] makes.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of requests to make.
    pub requests: usize,
    /// Mean rate of arrivals, in requests per second.
    pub per_second: f64,
    /// Number of conversations that go on at once.
    pub sessions: usize,
    /// Tokens of the prompt head that all requests share.
    pub shared: usize,
    /// Tokens that a turn adds, on average.
    pub turn: usize,
    /// Mean tokens of an answer.
    pub output: usize,
    /// Turns after which a conversation is replaced by a new one.
    pub turns: usize,
    /// Tenant that all requests of this traffic belong to.
    pub tenant: u32,
    /// Seed of the ids and arrival times.
    pub seed: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            requests: 200,
            per_second: 4.0,
            sessions: 16,
            shared: 2048,
            turn: 1500,
            output: 200,
            turns: 12,
            tenant: 0,
            seed: 1,
        }
    }
}

/// Conversations that come back with longer prompts, behind one shared head: a trace without a file.
pub fn synthetic(shape: &Shape) -> Vec<Request> {
    let mut random = Random::new(shape.seed);
    let uniform = |random: &mut Random| (random.bits() >> 11) as f64 / (1_u64 << 53) as f64;
    let space = mix(shape.seed ^ u64::from(shape.tenant)) >> 3 << 24;
    let head: Vec<u64> = (0..(shape.shared / SHARED_TOKENS) as u64).map(|at| space + at).collect();
    let mut next_id = space + head.len() as u64;
    let mut next_session = u64::from(shape.tenant) << 32;
    let mut open: Vec<(u64, Vec<u64>, usize, usize)> = Vec::new();
    let mut arrival = 0.0;
    let mut requests = Vec::with_capacity(shape.requests);
    for _ in 0..shape.requests {
        arrival += -(1.0 - uniform(&mut random)).ln() / shape.per_second;
        if open.len() < shape.sessions {
            next_session += 1;
            open.push((next_session, head.clone(), shape.shared, 0));
        }
        let at = random.between(0, open.len() - 1);
        let (session, ids, input, turns) = &mut open[at];
        *input += random.between(shape.turn / 2, shape.turn * 3 / 2).max(1);
        while (ids.len() + 1) * SHARED_TOKENS <= *input {
            ids.push(next_id);
            next_id += 1;
        }
        let output = random.between(shape.output / 2, shape.output * 3 / 2).max(1);
        let (session, ids, input) = (*session, ids.clone(), *input);
        *turns += 1;
        if *turns >= shape.turns {
            open.swap_remove(at);
        }
        requests.push(Request { arrival, input, output, ids, session, tenant: shape.tenant, engine: None, ttft: None });
    }
    requests
}

/// Traffic that shifts: long prompts with short answers for `seconds`, then short prompts with long answers for as long.
pub fn shifting(seconds: f64, seed: u64) -> Vec<Request> {
    let alone = Shape { sessions: 1, shared: 0, turns: 1, ..Shape::default() };
    let read = Shape { per_second: 9.0, turn: 8000, output: 150, seed, ..alone };
    let write = Shape { per_second: 24.0, turn: 400, output: 1200, seed: seed + 1000, ..alone };
    let mut requests = Vec::new();
    for (phase, shape) in [read, write].into_iter().enumerate() {
        let count = (shape.per_second * seconds) as usize;
        let mut more = synthetic(&Shape { requests: count, ..shape });
        more.iter_mut().for_each(|request| request.arrival += phase as f64 * seconds);
        requests.extend(more);
    }
    requests.sort_by(|a: &Request, b| a.arrival.total_cmp(&b.arrival));
    requests
}

/// Traffic that comes and goes: from next to nothing to its most and back in `seconds`, as in a day.
pub fn tide(seconds: f64, seed: u64) -> Vec<Request> {
    const MOST: f64 = 24.0;
    let shape =
        Shape { per_second: MOST, sessions: 1, shared: 0, turns: 1, turn: 2000, output: 300, seed, ..Shape::default() };
    let mut requests = synthetic(&Shape { requests: (MOST * seconds) as usize, ..shape });
    let mut random = Random::new(seed ^ 0x71de);
    requests.retain(|request| {
        let share = 0.52 - 0.48 * (std::f64::consts::TAU * request.arrival / seconds).cos();
        ((random.bits() >> 11) as f64 / (1_u64 << 53) as f64) < share
    });
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_tokens() {
        let trace = Trace::new(synthetic(&Shape { requests: 20, ..Shape::default() })).expect("has requests");
        let hasher = BlockHasher::for_request(b"", NUMERICS_ID);
        for at in [0, 7, 19] {
            assert_eq!(trace.tokens(at).len(), trace.requests[at].input);
            assert_eq!(*trace.hashes(at), hasher.chain(&trace.tokens(at))[..]);
        }
    }

    #[test]
    fn a_line_is_read_and_a_bad_one_named() {
        let text = b"{\"timestamp\": 5000, \"input_length\": 1100, \"output_length\": 2, \"hash_ids\": [7, 8, 9]}\n\n\
                     {\"timestamp\": 4000, \"input_length\": 3, \"output_length\": 2}\n";
        let trace = Trace::read(&text[..], 0, 10).expect("two requests");
        assert_eq!((trace.requests[0].input, trace.requests[1].arrival), (3, 1.0));
        assert_eq!(trace.requests[1].ids, [7, 8], "only full blocks have a name");
        let bad = Trace::read(&b"\n{\"timestamp\": true}"[..], 0, 10).err().expect("not a request");
        assert!(bad.to_string().starts_with("line 2: "), "{bad}");
        assert!(matches!(Trace::read(&b""[..], 0, 10), Err(TraceError::Empty)));
        let late = Trace::read(&b"{\"timestamp\": 1e300, \"input_length\": 3, \"output_length\": 2}"[..], 0, 10).err();
        assert!(matches!(late, Some(TraceError::TooLong { line: 1 })));
    }
}
