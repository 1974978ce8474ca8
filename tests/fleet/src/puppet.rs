//! A worker of the protocol without a model, in one task: its next token is a hash of everything before it, so that a
//! token that was lost, repeated or drawn at the wrong place shows in all that follow. The test decides about its
//! answers to pulls.

use crate::Dir;
use bytes::BytesMut;
use penstock_proto::frames::{
    Batch, ChoiceStart, Down, DownBody, EngineState, Finish, FinishReason, Generate, KvEvent, Output, Pull, Pulled,
    Ready, Step, Token, Up, UpBody,
};
use penstock_proto::{BLOCK_TOKENS, BlockHasher, Capabilities, ErrorKind, PROTOCOL_VERSION, codec};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;

/// Numerics of all puppets.
pub const NUMERICS: &str = "puppet";

/// Blocks of each puppet.
const BLOCKS: u32 = 4096;

/// Size of the vocabulary.
const VOCABULARY: u32 = 250;

/// Behaviour of a puppet.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// Base time of a step.
    pub step: Duration,
    /// Additional time of a step per sequence.
    pub each: Duration,
    /// Most sequences at once.
    pub sequences: u32,
    /// Percentage of pulls that fail.
    pub pulls_fail: u64,
    /// Most steps until a pull is answered.
    pub pull_steps: u64,
    /// Number of puppets, the first ones, that are of a version without capabilities.
    pub earlier: usize,
}

/// Counters and blocks of a puppet.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Blocks by their hash.
    blocks: HashSet<Vec<u8>>,
    /// Rows that it computed, prefix hits left out.
    pub rows: u64,
    /// Most rows computed at once for a request that had begun elsewhere.
    pub rows_resumed: u64,
    /// Number of pulls answered.
    pub pulls: u64,
    /// Number of pulls received.
    pub asked: u64,
    /// True if pulls are left unanswered.
    pub holds_pulls: bool,
    /// True if no other puppet gets blocks from it, as if they were still on their way to it.
    pub gives_nothing: bool,
    /// True if the puppet emits tokens that are outside the vocabulary.
    pub babbles: bool,
    /// True if the puppet refuses requests as if it had no room, though it reports credits.
    pub is_full: bool,
    /// Number of steps since the puppet is full.
    pub full_steps: u64,
    /// Number of requests refused since the puppet is full.
    pub refused: u64,
}

type Shared = Arc<Mutex<Ledger>>;

fn lock(shared: &Shared) -> MutexGuard<'_, Ledger> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running puppet; ends with the value.
pub struct Puppet {
    socket: PathBuf,
    ledger: Shared,
    task: JoinHandle<()>,
}

impl Puppet {
    /// Starts `count` puppets that can pull from each other, in `dir`.
    ///
    /// # Panics
    /// If they cannot listen.
    pub fn start(dir: &Dir, count: usize, habits: Habits) -> Vec<Self> {
        let ledgers: Arc<[Shared]> = (0..count).map(|_| Shared::default()).collect();
        let puppet = |at: usize| {
            let socket = dir.file(&format!("p{at}.sock"));
            let listener = UnixListener::bind(&socket).expect("the puppet listens");
            let task = tokio::spawn(serve(listener, at, Arc::clone(&ledgers), habits));
            Self { socket, ledger: Arc::clone(&ledgers[at]), task }
        };
        (0..count).map(puppet).collect()
    }

    /// Socket of the puppet.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Counters and blocks of the puppet.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        lock(&self.ledger)
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Tokens that a puppet gives for choice `choice` of a prompt, `count` of them.
pub fn expected(prompt: &[u32], seed: u64, choice: u32, count: usize) -> Vec<u32> {
    let mut hash = prompt.iter().fold(begin(seed, choice), |hash, token| absorb(hash, *token));
    (0..count)
        .map(|_| {
            let token = draw(hash);
            hash = absorb(hash, token);
            token
        })
        .collect()
}

fn begin(seed: u64, choice: u32) -> u64 {
    absorb(seed, choice)
}

fn absorb(hash: u64, token: u32) -> u64 {
    (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ 0x1234_5678
}

fn draw(hash: u64) -> u32 {
    (hash >> 40) as u32 % VOCABULARY
}

struct Sequence {
    attempt: u32,
    choice: u32,
    tokens: Vec<u32>,
    /// Number of output tokens in `tokens`.
    emitted: usize,
    output_max: usize,
    allowed: usize,
    hash: u64,
    hasher: BlockHasher,
    /// True if the prefill has not been computed.
    is_new: bool,
    cached: u32,
}

struct Stage {
    at: usize,
    ledgers: Arc<[Shared]>,
    habits: Habits,
    running: BTreeMap<(u64, u32), Sequence>,
    /// Pulls, and the steps until each is answered.
    pulls: VecDeque<(u64, Pull)>,
    accepted: u64,
    steps: u64,
    random: u64,
    stored: Vec<Vec<u8>>,
    /// Refusals that the next step carries.
    refusals: Vec<Output>,
}

static LIVES: AtomicU64 = AtomicU64::new(1);

async fn serve(listener: UnixListener, at: usize, ledgers: Arc<[Shared]>, habits: Habits) {
    while let Ok((stream, _)) = listener.accept().await {
        let stage = Stage {
            at,
            ledgers: Arc::clone(&ledgers),
            habits,
            running: BTreeMap::new(),
            pulls: VecDeque::new(),
            accepted: 0,
            steps: 0,
            random: at as u64 + 1,
            stored: Vec::new(),
            refusals: Vec::new(),
        };
        stage.play(stream).await;
    }
}

impl Stage {
    async fn play(mut self, mut stream: UnixStream) {
        let mut input = BytesMut::new();
        let mut output = BytesMut::new();
        let mut sequence = 0;
        let clock = tokio::time::sleep(self.habits.step);
        tokio::pin!(clock);
        let mut queue = |body: UpBody, output: &mut BytesMut| {
            codec::encode(&Up { sequence, body: Some(body) }, output).expect("a small frame");
            sequence += 1;
        };
        let ready = Ready {
            version: PROTOCOL_VERSION,
            epoch: LIVES.fetch_add(1, Ordering::Relaxed),
            model: "puppet".into(),
            numerics_id: NUMERICS.into(),
            vocab_size: VOCABULARY,
            context_tokens: 1 << 16,
            block_tokens: BLOCK_TOKENS as u32,
            blocks_total: BLOCKS,
            sequences_max: self.habits.sequences,
            state: Some(self.state()),
            transfer: format!("puppet-{}", self.at),
            block_bytes: 32,
            capabilities: if self.at < self.habits.earlier { Vec::new() } else { Capabilities::all().numbers() },
            ..Default::default()
        };
        queue(UpBody::Ready(ready), &mut output);
        let mut is_greeted = false;
        loop {
            tokio::select! {
                read = stream.read_buf(&mut input) => {
                    if !matches!(read, Ok(1..)) {
                        return;
                    }
                    while let Some(Down { body }) = codec::decode::<Down>(&mut input).expect("gateways speak the contract") {
                        is_greeted = true;
                        body.into_iter().for_each(|body| self.obey(body));
                    }
                }
                () = &mut clock => {
                    clock.as_mut().reset(tokio::time::Instant::now() + self.step_time());
                    let (step, pulled) = self.step();
                    pulled.into_iter().for_each(|pulled| queue(UpBody::Pulled(pulled), &mut output));
                    queue(UpBody::Step(step), &mut output);
                }
            }
            if is_greeted {
                if stream.write_all(&output).await.is_err() {
                    return;
                }
                output.clear();
            }
        }
    }

    fn chance(&mut self, of: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % of.max(1)
    }

    fn step_time(&self) -> Duration {
        self.habits.step + self.habits.each * self.running.len() as u32
    }

    fn state(&self) -> EngineState {
        let running = self.running.len() as u32;
        EngineState {
            running,
            blocks_total: BLOCKS,
            blocks_free: BLOCKS - running,
            credits: self.habits.sequences.saturating_sub(running),
            step_seconds: self.step_time().as_secs_f64(),
            context_tokens: self.running.values().map(|sequence| sequence.tokens.len() as u64).sum(),
            ..Default::default()
        }
    }

    fn obey(&mut self, body: DownBody) {
        match body {
            DownBody::Generate(generate) => self.generate(generate),
            DownBody::Cancel(cancel) => self.running.retain(|(request, choice), _| {
                *request != cancel.request || !cancel.choices.is_empty() && !cancel.choices.contains(choice)
            }),
            DownBody::Window(window) => {
                let sequence = self.running.get_mut(&(window.request, window.choice));
                sequence.into_iter().for_each(|sequence| sequence.allowed += window.tokens as usize);
            }
            DownBody::Pull(pull) => {
                lock(&self.ledgers[self.at]).asked += 1;
                let steps = self.chance(self.habits.pull_steps);
                self.pulls.push_back((self.steps + steps, pull));
            }
            _ => {}
        }
    }

    fn generate(&mut self, generate: Generate) {
        self.accepted += 1;
        self.running.retain(|(request, _), _| *request != generate.request);
        let mut ledger = lock(&self.ledgers[self.at]);
        if ledger.is_full {
            ledger.refused += 1;
            let (reason, error_kind) = (FinishReason::Failed as i32, ErrorKind::Overloaded as i32);
            let finish = Some(Finish { reason, error_kind, ..Default::default() });
            let Generate { request, attempt, choices, .. } = generate;
            let refusal = |ChoiceStart { index, .. }| Output {
                request,
                attempt,
                choice: index,
                finish: finish.clone(),
                ..Default::default()
            };
            return self.refusals.extend(choices.into_iter().map(refusal));
        }
        drop(ledger);
        let sampling = generate.sampling.unwrap_or_default();
        for ChoiceStart { index, emitted } in generate.choices {
            let tokens = [&generate.prompt[..], &emitted].concat();
            let hash = tokens.iter().fold(begin(sampling.seed, index), |hash, token| absorb(hash, *token));
            let sequence = Sequence {
                attempt: generate.attempt,
                choice: index,
                emitted: emitted.len(),
                output_max: sampling.max_tokens as usize,
                allowed: emitted.len() + generate.window as usize,
                hash,
                hasher: BlockHasher::for_request(&generate.salt, NUMERICS),
                is_new: true,
                cached: 0,
                tokens,
            };
            self.running.insert((generate.request, index), sequence);
        }
    }

    /// Runs a step: one token of every sequence that may emit one, and the answers to due pulls.
    fn step(&mut self) -> (Step, Vec<Pulled>) {
        self.steps += 1;
        let mut outputs = std::mem::take(&mut self.refusals);
        let mut ledger = lock(&self.ledgers[self.at]);
        ledger.full_steps += u64::from(ledger.is_full);
        drop(ledger);
        let mut ended = Vec::new();
        let mut prefill_tokens = 0;
        for ((request, choice), sequence) in &mut self.running {
            let ledger = &mut *lock(&self.ledgers[self.at]);
            prefill_tokens += sequence.begin(ledger, &mut self.stored);
            if sequence.emitted >= sequence.allowed {
                continue;
            }
            let output = sequence.next(*request, ledger, &mut self.stored);
            if output.finish.is_some() {
                ended.push((*request, *choice));
            }
            outputs.push(output);
        }
        ended.iter().for_each(|key| drop(self.running.remove(key)));
        let mut pulled = Vec::new();
        let holds = lock(&self.ledgers[self.at]).holds_pulls;
        while !holds && self.pulls.front().is_some_and(|(at, _)| *at <= self.steps) {
            let (_, pull) = self.pulls.pop_front().expect("it is there");
            pulled.push(self.pull(&pull));
        }
        let batch = Batch {
            prefill_tokens: prefill_tokens as u32,
            decodes: outputs.len() as u32,
            decode_context: self.running.values().map(|sequence| sequence.tokens.len() as u64).sum(),
            seconds: self.step_time().as_secs_f64(),
            ..Default::default()
        };
        let stored = std::mem::take(&mut self.stored);
        let kv = if stored.is_empty() { Vec::new() } else { vec![KvEvent { stored, ..Default::default() }] };
        let (number, accepted) = (self.steps, self.accepted);
        (Step { number, outputs, state: Some(self.state()), kv, accepted, batch: Some(batch) }, pulled)
    }

    fn pull(&mut self, pull: &Pull) -> Pulled {
        let from: usize = pull.from.trim_start_matches("puppet-").parse().expect("a puppet's address");
        lock(&self.ledgers[self.at]).pulls += 1;
        let fails = self.chance(100) < self.habits.pulls_fail;
        let there: Vec<bool> = {
            let other = lock(&self.ledgers[from]);
            let gives = !fails && !other.gives_nothing;
            pull.hashes.iter().map(|hash| gives && other.blocks.contains(hash)).collect()
        };
        let mut own = lock(&self.ledgers[self.at]);
        let has = |(hash, there): &(&Vec<u8>, &bool)| **there || own.blocks.contains(*hash);
        let blocks = pull.hashes.iter().zip(&there).take_while(has).count();
        let news: Vec<_> = pull.hashes[..blocks].iter().filter(|hash| !own.blocks.contains(*hash)).cloned().collect();
        own.blocks.extend(news.iter().cloned());
        self.stored.extend(news);
        let why = if fails { "as the test wants it".into() } else { String::new() };
        Pulled { id: pull.id, blocks: blocks as u32, why, ..Default::default() }
    }
}

impl Sequence {
    /// Computes the missing blocks of the prefill, all at once; returns the rows.
    fn begin(&mut self, ledger: &mut Ledger, stored: &mut Vec<Vec<u8>>) -> u64 {
        if !std::mem::take(&mut self.is_new) {
            return 0;
        }
        let hashes: Vec<_> = self.hasher.chain(&self.tokens).iter().map(|hash| hash.to_bytes().to_vec()).collect();
        let hit = hashes.iter().take_while(|hash| ledger.blocks.contains(*hash)).count() * BLOCK_TOKENS;
        let hit = hit.min(self.tokens.len() - 1);
        self.cached = hit as u32;
        let rows = (self.tokens.len() - hit) as u64;
        ledger.rows += rows;
        if self.emitted > 0 {
            ledger.rows_resumed = ledger.rows_resumed.max(rows);
        }
        // The keys of the last token are computed with the next step.
        let sealed = (self.tokens.len() - 1) / BLOCK_TOKENS;
        for hash in &hashes[..sealed] {
            if ledger.blocks.insert(hash.clone()) {
                stored.push(hash.clone());
            }
        }
        rows
    }

    fn next(&mut self, request: u64, ledger: &mut Ledger, stored: &mut Vec<Vec<u8>>) -> Output {
        // The last token is computed now, which may seal its block.
        if self.tokens.len().is_multiple_of(BLOCK_TOKENS)
            && let Some(last) = self.hasher.chain(&self.tokens).last()
        {
            let hash = last.to_bytes().to_vec();
            if ledger.blocks.insert(hash.clone()) {
                stored.push(hash);
            }
        }
        let id = draw(self.hash);
        self.hash = absorb(self.hash, id);
        self.tokens.push(id);
        let at = self.emitted as u32;
        self.emitted += 1;
        let is_last = self.emitted >= self.output_max;
        let id = if ledger.babbles { id + VOCABULARY } else { id };
        Output {
            request,
            attempt: self.attempt,
            choice: self.choice,
            tokens: vec![Token { id, logprobs: None }],
            at,
            finish: is_last.then(|| Finish { reason: FinishReason::Length as i32, ..Default::default() }),
            cached_tokens: Some(self.cached),
            prompt_logprobs: Vec::new(),
            vector: Vec::new(),
        }
    }
}
