//! One seeded run: an engine, its clients, and random events.

use crate::client::Client;
use crate::fake::{FakeForward, Meter, POISON};
use crate::random::Random;
use penstock_engine::{Engine, EngineConfig, Geometry};
use penstock_proto::ErrorKind;
use penstock_proto::frames::{Cancel, ChoiceStart, Generate, KvEvent, LogitBias, Sampling, Step, Window};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Tokens of the fake's vocabulary.
const VOCAB: usize = 61;

/// Counters of a run; sums over seeds show that a simulation reaches the cases that it is meant to reach.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Requests sent to the engine.
    pub requests: u64,
    /// Steps of the engine.
    pub steps: u64,
    /// Output tokens that clients received.
    pub tokens: u64,
    /// Preemptions of running sequences, for lack of pages.
    pub preemptions: u64,
    /// Prompt tokens read from the prefix cache.
    pub cached: u64,
    /// Requests continued after a fault or crash, or moved.
    pub resumes: u64,
    /// Choices refused because the queue was full.
    pub overloaded: u64,
    /// Choices refused or failed for another reason.
    pub failed: u64,
    /// Requests cancelled, wholly or in single choices.
    pub cancels: u64,
    /// Draft tokens that the engine computed.
    pub drafted: u64,
    /// Draft tokens that saved a step.
    pub accepted: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.steps += other.steps;
        self.tokens += other.tokens;
        self.preemptions += other.preemptions;
        self.cached += other.cached;
        self.resumes += other.resumes;
        self.overloaded += other.overloaded;
        self.failed += other.failed;
        self.cancels += other.cancels;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
    }
}

struct World {
    random: Random,
    geometry: Geometry,
    config: EngineConfig,
    fail_every: u64,
    engine: Engine,
    meter: Meter,
    clients: BTreeMap<u64, Client>,
    /// Stems that prompts share, so that the prefix cache gets hits.
    stems: Vec<Vec<u32>>,
    index: BTreeSet<Vec<u8>>,
    tally: Tally,
    now_ms: u64,
    submitted_tokens: u64,
}

/// Runs one seed to quiescence.
///
/// # Panics
/// If any invariant breaks.
pub fn run(seed: u64) -> Tally {
    let mut world = World::new(seed);
    let busy = world.random.between(10, 150);
    for _ in 0..busy {
        world.event();
        world.step();
    }
    world.finish();
    world.tally
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let r = &mut random;
        let geometry = Geometry {
            vocab_size: VOCAB,
            context_tokens: r.between(16, 400),
            pages: {
                let most = r.pick(&[8, 40]);
                r.between(1, most)
            },
            rows_max: r.between(1, 128),
            sampled_max: r.between(1, 12),
            numerics: "fake".to_owned(),
            ..Geometry::default()
        };
        let config = EngineConfig {
            sequences_max: r.between(1, 10),
            batch_tokens: r.between(1, 96),
            chunk_tokens: r.between(1, 96),
            waiting_max: {
                let most = r.pick(&[8, 80]);
                r.between(1, most)
            },
            choices_max: 4,
            prefill_seconds_max: r.pick(&[0.0, 0.004]),
            prefix_cache: !r.one_in(5),
            prompt_lookup: (seed % 4) as usize * 3,
            ..EngineConfig::default()
        };
        let fail_every = if r.one_in(3) { r.between(5, 40) as u64 } else { 0 };
        let stems = (0..3).map(|_| (0..200).map(|_| r.between(1, VOCAB - 1) as u32).collect()).collect();
        let (engine, meter) = boot(&geometry, &config, fail_every);
        Self {
            random,
            geometry,
            config,
            fail_every,
            engine,
            meter,
            clients: BTreeMap::new(),
            stems,
            index: BTreeSet::new(),
            tally: Tally::default(),
            now_ms: 0,
            submitted_tokens: 0,
        }
    }

    /// Performs a random event between two steps.
    fn event(&mut self) {
        match self.random.between(0, 19) {
            0..=2 => self.arrive(),
            6 => self.cancel(),
            7..=11 => self.read(4),
            12 => self.resume_one(),
            13 if self.random.one_in(6) => self.crash(),
            _ => {}
        }
    }

    fn arrive(&mut self) {
        let request = self.tally.requests;
        self.tally.requests += 1;
        let generate = self.generate(request);
        let sampling = generate.sampling.as_ref().expect("always set");
        let tokens = generate.prompt.len() as u64 + u64::from(sampling.max_tokens);
        self.submitted_tokens += tokens * generate.choices.len() as u64;
        self.clients.insert(request, Client::new(generate.clone()));
        self.engine.submit(generate);
    }

    fn generate(&mut self, request: u64) -> Generate {
        let r = &mut self.random;
        let stem = &self.stems[r.between(0, self.stems.len() - 1)];
        // Most prompts leave room for an answer; a few are too long.
        let room = if r.one_in(20) { stem.len() } else { self.engine.context_tokens() * 2 / 3 };
        let mut prompt = stem[..r.between(0, room.min(stem.len()))].to_vec();
        let tail = r.between(usize::from(prompt.is_empty()), 20.min(room));
        prompt.extend((0..tail).map(|_| r.between(1, VOCAB - 1) as u32));
        let sampling = sampling(r);
        // A request with no output never reads the poison: whether it fails depends on the choice alone.
        if sampling.max_tokens > 0 && r.one_in(25) {
            let at = r.between(0, prompt.len() - 1);
            prompt[at] = POISON;
        }
        let choices = if r.one_in(3) { r.between(2, 4) } else { 1 };
        let window = if r.one_in(3) { r.between(1, 6) as u32 } else { 0 };
        Generate {
            request,
            attempt: 0,
            prompt,
            choices: (0..choices as u32).map(|index| ChoiceStart { index, emitted: Vec::new() }).collect(),
            sampling: Some(sampling),
            salt: vec![r.between(0, 1) as u8],
            priority: if r.one_in(4) { r.between(0, 2) as i32 - 1 } else { 0 },
            window,
            turn: r.between(0, 3) as i64 - 1,
            ..Generate::default()
        }
    }

    fn open_request(&mut self) -> Option<u64> {
        let open: Vec<u64> = self.clients.iter().filter(|(_, c)| !c.open().is_empty()).map(|(id, _)| *id).collect();
        (!open.is_empty()).then(|| self.random.pick(&open))
    }

    /// Cancels a request, or one of its choices.
    fn cancel(&mut self) {
        let Some(request) = self.open_request() else { return };
        let open = self.clients[&request].open();
        let choices = if self.random.one_in(2) { Vec::new() } else { vec![self.random.pick(&open)] };
        self.engine.cancel(&Cancel { request, choices });
        self.tally.cancels += 1;
    }

    /// Lets slow readers take some tokens, which extends their windows.
    fn read(&mut self, chance: usize) {
        for (request, client) in &mut self.clients {
            for (choice, answer) in &mut client.answers {
                let Some(window) = answer.window.as_mut().filter(|_| answer.finish.is_none()) else { continue };
                if self.random.one_in(chance) {
                    let tokens = self.random.between(1, 8) as u32;
                    *window += tokens;
                    self.engine.window(&Window { request: *request, choice: *choice, tokens });
                }
            }
        }
    }

    /// Moves one open request: resumes it, here at the same worker, as a new attempt.
    fn resume_one(&mut self) {
        let Some(request) = self.open_request() else { return };
        let generate = self.clients.get_mut(&request).expect("open").resume().expect("open");
        self.tally.resumes += 1;
        self.engine.submit(generate);
    }

    /// Kills the worker; a fresh one, possibly of another size, gets all open requests.
    fn crash(&mut self) {
        self.keep_counts();
        self.config.chunk_tokens = self.random.between(1, 96);
        self.config.batch_tokens = self.random.between(1, 96);
        // An output goes on from an engine that drafts at one that does not, and the other way round.
        self.config.prompt_lookup = if self.config.prompt_lookup > 0 { 0 } else { 6 };
        (self.engine, self.meter) = boot(&self.geometry, &self.config, self.fail_every);
        self.index.clear();
        for client in self.clients.values_mut() {
            if let Some(generate) = client.resume() {
                self.tally.resumes += 1;
                self.engine.submit(generate);
            }
        }
    }

    fn step(&mut self) {
        let (had_work, rows_before) = (self.engine.has_work(), self.meter.rows());
        let began = self.now_ms;
        let step = self.engine.step(&|| Duration::from_millis(began));
        self.now_ms += 1 + (self.meter.rows() - rows_before) / 16;
        self.tally.steps += 1;
        let progress = self.meter.rows() > rows_before || !step.outputs.is_empty();
        assert!(progress || !had_work, "a step with work did nothing");
        self.check_state(&step);
        self.follow(&step.kv);
        let mut failed = BTreeSet::new();
        for output in &step.outputs {
            let client = self.clients.get_mut(&output.request).expect("a request that was sent");
            self.tally.tokens += output.tokens.len() as u64;
            if client.take(output) {
                failed.insert(output.request);
            }
        }
        for request in failed {
            if let Some(generate) = self.clients.get_mut(&request).expect("known").resume() {
                self.tally.resumes += 1;
                self.engine.submit(generate);
            }
        }
    }

    fn check_state(&self, step: &Step) {
        let state = step.state.as_ref().expect("every step carries the state");
        assert_eq!(state.blocks_total as usize, self.geometry.pages);
        assert!(state.blocks_cached <= state.blocks_free && state.blocks_free <= state.blocks_total);
        assert!(state.running as usize <= self.config.sequences_max, "more sequences than slots");
        let bound = self.config.waiting_max.max(self.config.choices_max) + self.config.sequences_max;
        assert!(state.waiting as usize <= bound, "the queue is bounded");
        assert!(state.credits as usize <= self.config.sequences_max);
    }

    /// Applies the events to a router's index and compares it with the engine's own.
    fn follow(&mut self, events: &[KvEvent]) {
        apply(&mut self.index, events);
        let mut own = BTreeSet::new();
        apply(&mut own, &self.engine.snapshot());
        assert_eq!(self.index, own, "the router's index is the engine's");
    }

    /// Ends the run without new arrivals: every request ends, all pages are freed, every answer is right.
    fn finish(&mut self) {
        // Each step advances the first sequence; a budget of one row and a recompute per token bound it.
        let bound = 1000 + 20 * self.submitted_tokens;
        let mut steps = 0;
        while !self.engine.is_empty() {
            self.read(2);
            self.step();
            steps += 1;
            assert!(steps < bound, "no end after {steps} steps: {:?}", self.engine.state());
        }
        let state = self.engine.state();
        assert_eq!(state.blocks_free, state.blocks_total, "everything allocated is freed");
        assert_eq!((state.waiting, state.running, state.prefill_tokens_pending), (0, 0, 0));
        self.keep_counts();
        let context = self.engine.context_tokens();
        for client in self.clients.values() {
            client.check(&self.geometry, context);
            for finish in client.answers.values().filter_map(|answer| answer.finish.as_ref()) {
                let overloaded = finish.error_kind == ErrorKind::Overloaded as i32;
                self.tally.overloaded += u64::from(overloaded);
                self.tally.failed += u64::from(finish.error_kind != 0 && !overloaded);
            }
        }
    }

    fn keep_counts(&mut self) {
        let state = self.engine.state();
        self.tally.preemptions += state.preemptions;
        self.tally.cached += state.cached_tokens;
        self.tally.drafted += state.drafted_tokens;
        self.tally.accepted += state.accepted_tokens;
    }
}

fn boot(geometry: &Geometry, config: &EngineConfig, fail_every: u64) -> (Engine, Meter) {
    let fake = FakeForward::new(geometry.clone(), fail_every);
    let meter = fake.meter();
    (Engine::new(Box::new(fake), config), meter)
}

fn apply(index: &mut BTreeSet<Vec<u8>>, events: &[KvEvent]) {
    for event in events {
        if event.cleared {
            index.clear();
        }
        for hash in &event.stored {
            assert!(index.insert(hash.clone()), "stored twice");
        }
        for hash in &event.removed {
            assert!(index.remove(hash), "removed what was not stored");
        }
    }
}

fn sampling(r: &mut Random) -> Sampling {
    let token = |r: &mut Random| r.between(1, VOCAB - 1) as u32;
    let some = |r: &mut Random, max: usize| -> Vec<u32> { (0..r.between(0, max)).map(|_| token(r)).collect() };
    Sampling {
        temperature: if r.one_in(2) { 0.0 } else { r.pick(&[0.3, 0.7, 1.0, 1.6]) },
        top_k: if r.one_in(3) { r.between(1, 20) as u32 } else { 0 },
        top_p: if r.one_in(3) { r.pick(&[0.1, 0.5, 0.9]) } else { 1.0 },
        min_p: if r.one_in(5) { 0.05 } else { 0.0 },
        presence_penalty: if r.one_in(4) { 0.5 } else { 0.0 },
        frequency_penalty: if r.one_in(4) { 0.25 } else { 0.0 },
        repetition_penalty: if r.one_in(4) { 1.3 } else { 1.0 },
        logit_bias: if r.one_in(4) { vec![LogitBias { token: token(r), bias: 3.0 }] } else { Vec::new() },
        seed: r.bits(),
        max_tokens: r.between(0, 70) as u32,
        min_tokens: if r.one_in(3) { r.between(0, 9) as u32 } else { 0 },
        stop_tokens: if r.one_in(2) { some(r, 2) } else { Vec::new() },
        logprobs: if r.one_in(3) { r.between(0, 4) as i32 } else { -1 },
        prompt_logprobs: if r.one_in(8) { r.between(0, 3) as i32 } else { -1 },
        // One allowed token: different prompts go on with equal blocks.
        allowed_tokens: (20..20 + r.pick(&[0, 0, 0, 0, 0, 0, 0, 1, 1, 20])).collect(),
        bad_words: Vec::new(),
        logprob_tokens: Vec::new(),
        reasoning: None,
    }
}
