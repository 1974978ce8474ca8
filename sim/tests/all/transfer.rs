//! KV transfers between two engines under a seed: pages that come late, in part, or not at all change no token and
//! leak no page.

use penstock_engine::{Drawing, Engine, EngineConfig, Geometry, PageSink, Prefill};
use penstock_proto::WorkId;
use penstock_proto::frames::{Cancel, ChoiceStart, Generate, Sampling};
use penstock_proto::transfer::First;
use penstock_sim::client::Client;
use penstock_sim::{FakeForward, PAGE_BYTES, Random};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const CONTEXT: usize = 400;

/// Calls and pages that a sink received, and its remaining room.
#[derive(Default)]
struct Wire {
    room: usize,
    pages: VecDeque<(usize, usize, Vec<u8>)>,
    computed: usize,
    first: Option<First>,
    ended: Option<bool>,
}

#[derive(Clone, Default)]
struct End(Arc<Mutex<Wire>>);

impl End {
    fn wire(&self) -> std::sync::MutexGuard<'_, Wire> {
        self.0.lock().expect("nobody panics with it")
    }
}

impl PageSink for End {
    fn has_room(&mut self) -> bool {
        let wire = self.wire();
        wire.pages.len() < wire.room
    }

    fn page(&mut self, block: usize, layer: usize, fill: &mut dyn FnMut(&mut [u8])) {
        let mut bytes = vec![0; PAGE_BYTES];
        fill(&mut bytes);
        let mut wire = self.wire();
        assert!(wire.pages.len() < wire.room && wire.ended.is_none());
        wire.pages.push_back((block, layer, bytes));
    }

    fn computed(&mut self, blocks: usize) {
        self.wire().computed = blocks;
    }

    fn first(&mut self, first: First) {
        let mut wire = self.wire();
        assert!(wire.ended.is_none() && wire.first.replace(first).is_none(), "it comes once");
    }

    fn end(&mut self, complete: bool) {
        assert!(self.wire().ended.replace(complete).is_none(), "it ends once");
    }
}

/// A request whose blocks are being transferred.
struct Transfer {
    generate: Generate,
    /// Number of the transfer at the sender.
    sender: WorkId,
    end: End,
    /// Steps until the receiver gives up; `None` means never.
    patience: Option<usize>,
}

struct World {
    random: Random,
    geometry: Geometry,
    p: Engine,
    d: Engine,
    clients: BTreeMap<u64, Client>,
    transfers: BTreeMap<u64, Transfer>,
    stems: Vec<Vec<u32>>,
    next: u64,
    /// Blocks that were read at the receiver without being computed there.
    moved: usize,
    broken: usize,
    /// First tokens that the sender drew.
    drawn: usize,
}

fn boot(random: &mut Random, geometry: &Geometry) -> Engine {
    let config = EngineConfig {
        sequences_max: random.between(1, 6),
        batch_tokens: random.between(4, 96),
        chunk_tokens: random.between(4, 96),
        ..EngineConfig::default()
    };
    Engine::new(Box::new(FakeForward::new(geometry.clone(), if random.one_in(4) { 23 } else { 0 })), &config)
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let r = &mut random;
        let geometry = Geometry {
            vocab_size: 61,
            context_tokens: CONTEXT,
            pages: r.between(14, 40),
            rows_max: 96,
            sampled_max: 8,
            numerics: "fake".to_owned(),
            ..Geometry::default()
        };
        let stems = (0..3).map(|_| (0..200).map(|_| r.between(1, 60) as u32).collect()).collect();
        let (p, d) = (boot(r, &geometry), boot(r, &geometry));
        let (clients, transfers) = (BTreeMap::new(), BTreeMap::new());
        Self { random, geometry, p, d, clients, transfers, stems, next: 0, moved: 0, broken: 0, drawn: 0 }
    }

    fn arrive(&mut self) {
        let r = &mut self.random;
        let stem = &self.stems[r.between(0, 2)];
        let mut prompt = stem[..r.between(0, 200)].to_vec();
        prompt.extend((0..r.between(1, 60)).map(|_| r.between(1, 60) as u32));
        let sampling = Sampling {
            temperature: r.pick(&[0.0, 1.0]),
            top_p: 1.0,
            repetition_penalty: r.pick(&[1.0, 1.2]),
            seed: r.bits(),
            max_tokens: r.between(1, 40) as u32,
            presence_penalty: r.pick(&[0.0, 0.5]),
            stop_tokens: vec![7, 8, 9],
            logprobs: r.pick(&[-1, 2]),
            prompt_logprobs: if r.one_in(8) { 0 } else { -1 },
            ..Sampling::default()
        };
        self.next += 1;
        let choices = if r.one_in(4) { 3 } else { 1 };
        let generate = Generate {
            request: self.next,
            choices: (0..choices).map(|index| ChoiceStart { index, emitted: Vec::new() }).collect(),
            prompt,
            sampling: Some(sampling),
            salt: b"s".to_vec(),
            ..Generate::default()
        };
        self.clients.insert(self.next, Client::new(generate.clone()));
        self.ask(generate);
    }

    fn ask(&mut self, generate: Generate) {
        let id = generate.request;
        let chain = self.d.chain(&generate);
        let missing = self.d.receive(WorkId(id), chain.clone());
        if missing.wanted == 0 {
            self.d.settle(WorkId(id), 0, true);
            return self.d.submit(generate);
        }
        self.next += 1;
        let (sender, end) = (WorkId(self.next), End::default());
        let wanted = missing.have..missing.have + missing.wanted;
        if self.random.one_in(3) {
            self.p.send(sender, &chain[wanted], Box::new(end.clone()));
        } else {
            let draws = self.random.one_in(2);
            let drawing = || Drawing {
                sampling: generate.sampling.clone().expect("set"),
                choices: generate.choices.iter().map(|choice| choice.index).collect(),
                emitted: 0,
                grammar: None,
            };
            let prefill = Prefill {
                id: sender,
                prompt: generate.prompt[..if draws { generate.prompt.len() } else { wanted.end * 32 }].to_vec(),
                salt: generate.salt.clone(),
                adapter: Vec::new(),
                priority: 0,
                turn: 0,
                first: wanted.start,
                blocks: wanted.len(),
                draw: draws.then(drawing),
            };
            let taken = self.p.prefill(prefill, Box::new(end.clone()));
            assert!(taken.is_ok(), "{taken:?}");
        }
        let patience = self.random.one_in(4).then(|| self.random.between(0, 30));
        self.transfers.insert(id, Transfer { generate, sender, end, patience });
    }

    /// Delivers some pages and ends some transfers.
    fn carry(&mut self) {
        let ids: Vec<u64> = self.transfers.keys().copied().collect();
        for id in ids {
            let transfer = self.transfers.get_mut(&id).expect("listed");
            let mut wire = transfer.end.wire();
            wire.room = self.random.between(0, 4);
            let mut lost = false;
            for _ in 0..self.random.between(0, 3) {
                let Some((block, layer, bytes)) = wire.pages.pop_front() else { break };
                let taken = self.d.accept(WorkId(id), block, layer, &bytes);
                // A second delivery of a page is refused.
                assert!(!(taken && self.d.accept(WorkId(id), block, layer, &bytes)));
                lost |= !taken;
            }
            let over = wire.ended.is_some() && wire.pages.is_empty();
            let given_up = transfer.patience.as_mut().is_some_and(|left| {
                *left = left.saturating_sub(1);
                *left == 0
            });
            let vouched = wire.computed;
            // The token may come late, with the end, or never.
            let first = if over || self.random.one_in(2) { wire.first.take() } else { None };
            drop(wire);
            if let Some(first) = first {
                let outputs = self.d.say_first(&mut transfer.generate, first, 0).expect("what was asked for");
                self.drawn += outputs.len();
                let client = self.clients.get_mut(&id).expect("asked");
                outputs.iter().for_each(|output| assert!(!client.take(output)));
            }
            let answered = transfer.generate.choices.is_empty();
            if over || given_up || lost || answered {
                let transfer = self.transfers.remove(&id).expect("listed");
                self.p.stop(transfer.sender);
                let readable = self.d.settle(WorkId(id), vouched, !answered);
                self.moved += usize::from(over) * readable;
                self.broken += usize::from(!over);
                if !answered {
                    self.d.submit(transfer.generate);
                }
            }
        }
    }

    fn step(&mut self) {
        for _ in 0..self.random.between(0, 3) {
            self.p.give();
        }
        if self.p.has_work() {
            let step = self.p.step(&|| Duration::ZERO);
            assert!(step.outputs.is_empty(), "who prefills says nothing");
        }
        self.carry();
        if self.d.has_work() {
            let mut again = Vec::new();
            for output in &self.d.step(&|| Duration::ZERO).outputs {
                let client = self.clients.get_mut(&output.request).expect("asked");
                if client.take(output) {
                    again.push(output.request);
                }
            }
            again.dedup();
            for request in again {
                if let Some(generate) = self.clients.get_mut(&request).expect("asked").resume() {
                    self.d.submit(generate);
                }
            }
        }
    }

    fn run(mut self) -> [usize; 3] {
        for _ in 0..self.random.between(20, 120) {
            if self.random.one_in(3) {
                self.arrive();
            }
            if self.random.one_in(25) {
                let running = self
                    .clients
                    .iter()
                    .filter(|(id, client)| !self.transfers.contains_key(id) && !client.open().is_empty());
                let running: Vec<u64> = running.map(|(id, _)| *id).collect();
                if !running.is_empty() {
                    self.d.cancel(&Cancel { request: self.random.pick(&running), choices: Vec::new() });
                }
            }
            if self.random.one_in(60) {
                // The sender dies: its transfers end where they are.
                self.p = boot(&mut self.random, &self.geometry);
                self.transfers.values().for_each(|transfer| _ = transfer.end.wire().ended.get_or_insert(false));
            }
            self.step();
        }
        for steps in 0.. {
            if self.transfers.is_empty() && self.d.is_empty() && self.p.is_empty() && !self.p.can_give() {
                break;
            }
            assert!(
                steps < 50_000,
                "no end: {} transfers, {:?} {:?}",
                self.transfers.len(),
                self.p.state(),
                self.d.state()
            );
            self.step();
        }
        for engine in [&self.p, &self.d] {
            let state = engine.state();
            assert_eq!(
                (state.blocks_free, state.running, state.waiting),
                (state.blocks_total, 0, 0),
                "nothing is held"
            );
        }
        self.clients.values().for_each(|client| client.check(&self.geometry, CONTEXT));
        [self.moved, self.broken, self.drawn]
    }
}

#[test]
fn blocks_from_elsewhere_change_no_token() {
    let mut sums = [0; 3];
    for seed in 0..400 {
        let run = std::panic::catch_unwind(|| World::new(seed).run());
        let Ok(run) = run else { panic!("seed {seed}") };
        sums.iter_mut().zip(run).for_each(|(sum, one)| *sum += one);
    }
    assert!(sums[0] > 1000 && sums[1] > 100 && sums[2] > 200, "it happens: {sums:?}");
}
