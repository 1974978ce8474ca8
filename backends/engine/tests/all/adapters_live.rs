//! Adapters that come and go while an engine runs: nobody else's bits change, whatever the order of loads, failures, removals and requests.

use crate::common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::load;
use common::weights::Golden;
use penstock_engine::adapter::Adapter;
use penstock_engine::models::Model;
use penstock_engine::{AdapterLoad, AfterLayer, Engine, EngineConfig, Forward, Geometry, Pages};
use penstock_kernels::cpu::{CpuDevice, CpuOptions};
use penstock_kernels::{ADAPTERS_MAX, AdapterSlot, Device, KernelError, Limits, StepBatch};
use penstock_proto::frames::{Cancel, ChoiceStart, Generate, Sampling};
use penstock_proto::{AdapterId, ErrorKind};
use proptest::prelude::*;

const TOKENS: u32 = 12;
const MANY: usize = usize::MAX;

fn cpu(limits: Limits) -> Box<dyn Device> {
    Box::new(CpuDevice::new(CpuOptions { threads: 1, ..Default::default() }, limits).expect("a device"))
}

/// A model whose loads of adapters run out of memory after a number of layers.
struct Frail {
    model: Model,
    layers_left: Arc<AtomicUsize>,
}

impl Forward for Frail {
    fn geometry(&self) -> Geometry {
        self.model.geometry()
    }

    fn forward(&mut self, batch: &StepBatch<'_>, after_layer: AfterLayer<'_>) -> Result<&[f32], KernelError> {
        self.model.forward(batch, after_layer)
    }

    fn adapt_layer(&mut self, layer: usize, slot: AdapterSlot, adapter: &Adapter) -> Result<(), KernelError> {
        let left = self.layers_left.load(Ordering::Relaxed);
        if left == 0 {
            return Err(KernelError::Memory { what: "an adapter", bytes: 1 });
        }
        self.layers_left.store(if left == MANY { MANY } else { left - 1 }, Ordering::Relaxed);
        self.model.adapt_layer(layer, slot, adapter)
    }

    fn drop_adapter(&mut self, slot: AdapterSlot) {
        self.model.drop_adapter(slot);
    }

    fn pages(&self) -> &dyn Pages {
        self.model.pages()
    }

    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]) {
        self.model.write_page(layer, page, bytes);
    }
}

/// Tokens and the bits of their log-probabilities.
type Said = Vec<(u32, u32)>;

/// An engine with everything that its requests have said so far.
struct Live {
    engine: Engine,
    layers_left: Arc<AtomicUsize>,
    said: BTreeMap<u64, Said>,
    failures: BTreeMap<u64, i32>,
    ended: BTreeSet<u64>,
    prompt: Vec<u32>,
}

impl Live {
    fn new(golden: &Golden) -> Self {
        let layers_left = Arc::new(AtomicUsize::new(MANY));
        let model = load(&golden.checkpoint(), &cpu, 32, 64);
        let frail = Frail { model, layers_left: Arc::clone(&layers_left) };
        let engine = Engine::new(Box::new(frail), &EngineConfig::default());
        let vocab = golden.checkpoint().config().vocab_size as u32;
        let prompt = (0..20).map(|at| (at * 7 + 3) % vocab).collect();
        Self { engine, layers_left, said: BTreeMap::new(), failures: BTreeMap::new(), ended: BTreeSet::new(), prompt }
    }

    fn ask(&mut self, request: u64, adapter: Option<AdapterId>) {
        let name = adapter.map(|id| id.to_bytes().to_vec()).unwrap_or_default();
        let sampling = Sampling {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: TOKENS,
            prompt_logprobs: -1,
            ..Default::default()
        };
        self.engine.submit(Generate {
            request,
            prompt: self.prompt.clone(),
            choices: vec![ChoiceStart::default()],
            sampling: Some(sampling),
            salt: name.clone(),
            adapter: name,
            ..Default::default()
        });
    }

    fn step(&mut self) {
        if !self.engine.has_work() {
            return;
        }
        for output in self.engine.step(&|| Duration::ZERO).outputs {
            let bits = |logprobs: &penstock_proto::frames::TokenLogprobs| logprobs.logprob.to_bits();
            let tokens = output.tokens.iter().map(|token| (token.id, token.logprobs.as_ref().map_or(0, bits)));
            self.said.entry(output.request).or_default().extend(tokens);
            if let Some(finish) = output.finish {
                self.ended.insert(output.request);
                if finish.error_kind != 0 {
                    self.failures.insert(output.request, finish.error_kind);
                }
            }
        }
    }

    fn finish(&mut self) {
        while self.engine.has_work() {
            self.step();
        }
    }

    /// Answer to a request in an engine that has had the adapter from the start.
    fn alone(golden: &Golden, adapter: Option<&Adapter>) -> Said {
        let mut live = Self::new(golden);
        adapter.into_iter().for_each(|adapter| live.engine.add_adapter(adapter).expect("it loads"));
        live.ask(1, adapter.map(Adapter::id));
        live.finish();
        live.said.remove(&1).expect("an answer")
    }
}

fn adapters(golden: &Golden) -> Vec<Adapter> {
    (0..3).map(|seed| golden.adapter(100 + seed, 1 + seed as usize)).collect()
}

#[test]
fn an_adapter_is_loaded_and_removed_while_others_decode() {
    let golden = Golden::named("qwen3-tied");
    let adapters = adapters(&golden);
    let base = Live::alone(&golden, None);
    let want: Vec<Said> = adapters.iter().map(|adapter| Live::alone(&golden, Some(adapter))).collect();
    assert!(want.iter().all(|said| *said != base && said.len() == TOKENS as usize));
    let mut live = Live::new(&golden);
    live.engine.add_adapter(&adapters[0]).expect("it loads");
    live.ask(1, None);
    live.ask(2, Some(adapters[0].id()));
    live.step();
    let mut load = live.engine.begin_adapter(adapters[1].id()).expect("a slot");
    while !live.engine.load_layer(&mut load, &adapters[1]).expect("it loads") {
        assert_eq!(live.engine.adapters(), [adapters[0].id()], "not before it is whole");
        live.step();
    }
    live.ask(3, Some(adapters[1].id()));
    live.step();
    // The first one leaves: its sequence goes on, a new one is refused, its slot is held.
    live.engine.remove_adapter(adapters[0].id());
    assert_eq!(live.engine.free_adapters(), 0);
    assert!(live.engine.holds_adapter(adapters[0].id()));
    live.ask(4, Some(adapters[0].id()));
    while !live.ended.contains(&2) {
        live.step();
    }
    assert_eq!(live.failures, BTreeMap::from([(4, ErrorKind::Unavailable as i32)]));
    assert_eq!(live.engine.free_adapters(), 1);
    assert!(!live.engine.holds_adapter(adapters[0].id()));
    // Other content takes the slot.
    live.engine.add_adapter(&adapters[2]).expect("it loads");
    assert_eq!(live.engine.adapters(), [adapters[2].id(), adapters[1].id()]);
    live.ask(5, Some(adapters[2].id()));
    live.finish();
    let said: Vec<&Said> = [1, 2, 3, 5].iter().map(|request| &live.said[request]).collect();
    assert_eq!(said, [&base, &want[0], &want[1], &want[2]]);
}

#[test]
fn a_load_that_fails_at_any_layer_leaves_the_engine_as_it_was() {
    let golden = Golden::named("qwen3-tied");
    let adapters = adapters(&golden);
    let (base, want) = (Live::alone(&golden, None), Live::alone(&golden, Some(&adapters[0])));
    let layers = golden.checkpoint().config().num_hidden_layers;
    let mut live = Live::new(&golden);
    live.engine.add_adapter(&adapters[0]).expect("it loads");
    for fails_at in 0..layers {
        let requests = 10 * fails_at as u64..;
        let (plain, adapted) = (requests.start, requests.start + 1);
        live.ask(plain, None);
        live.ask(adapted, Some(adapters[0].id()));
        live.step();
        live.layers_left.store(fails_at, Ordering::Relaxed);
        let failed = live.engine.add_adapter(&adapters[1]);
        assert!(matches!(failed, Err(KernelError::Memory { .. })), "{failed:?}");
        live.layers_left.store(MANY, Ordering::Relaxed);
        assert!(!live.engine.holds_adapter(adapters[1].id()));
        live.finish();
        assert_eq!((&live.said[&plain], &live.said[&adapted]), (&base, &want), "at layer {fails_at}");
    }
    live.engine.add_adapter(&adapters[1]).expect("it loads now");
    live.ask(1000, Some(adapters[1].id()));
    live.finish();
    assert_eq!(live.said[&1000], Live::alone(&golden, Some(&adapters[1])), "in a slot with nothing of the failures");
}

#[test]
fn a_full_engine_has_room_when_a_removed_adapter_has_no_sequence_left() {
    let golden = Golden::tiny(1);
    let adapters: Vec<Adapter> = (0..=ADAPTERS_MAX as u64).map(|seed| golden.adapter(seed, 1)).collect();
    let mut live = Live::new(&golden);
    adapters[..ADAPTERS_MAX].iter().for_each(|adapter| live.engine.add_adapter(adapter).expect("it loads"));
    let last = &adapters[ADAPTERS_MAX];
    live.ask(1, Some(adapters[9].id()));
    live.step();
    live.engine.remove_adapter(adapters[9].id());
    assert_eq!(live.engine.free_adapters(), 0);
    let full = live.engine.add_adapter(last).expect_err("the sequence runs").to_string();
    assert!(full.contains("all 64 adapter slots are in use"), "{full}");
    live.finish();
    assert_eq!(live.engine.free_adapters(), 1);
    live.engine.add_adapter(last).expect("there is room");
    assert_eq!(live.engine.adapters()[9], last.id());
}

#[derive(Clone, Copy, Debug)]
enum Move {
    Begin(usize),
    Layer,
    Abandon,
    Fail,
    Remove(usize),
    Ask(Option<usize>),
    Cancel(u64),
    Step,
    Free,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        2 => (0..3usize).prop_map(Move::Begin),
        6 => Just(Move::Layer),
        1 => Just(Move::Abandon),
        1 => Just(Move::Fail),
        2 => (0..3usize).prop_map(Move::Remove),
        4 => proptest::option::weighted(0.8, 0..3usize).prop_map(Move::Ask),
        1 => (0..40u64).prop_map(Move::Cancel),
        8 => Just(Move::Step),
        2 => Just(Move::Free),
    ];
    proptest::collection::vec(one, 1..80)
}

/// Model of an engine's adapters for the property test: sets in place of slots.
#[derive(Default)]
struct Expected {
    open: BTreeSet<usize>,
    leaving: BTreeSet<usize>,
    loading: Option<(usize, AdapterLoad)>,
    /// Adapter of each request that is open, by its number.
    running: BTreeMap<u64, Option<usize>>,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_loads_and_requests_gives_the_bits_of_an_engine_that_had_them_all(moves in moves()) {
        let golden = Golden::named("qwen3-tied");
        let adapters = adapters(&golden);
        let want = |adapter: Option<usize>| Live::alone(&golden, adapter.map(|at| &adapters[at]));
        let want: BTreeMap<Option<usize>, Said> =
            [None, Some(0), Some(1), Some(2)].into_iter().map(|adapter| (adapter, want(adapter))).collect();
        let mut live = Live::new(&golden);
        let mut expected = Expected::default();
        let mut asked: BTreeMap<u64, (Option<usize>, bool)> = BTreeMap::new();
        let mut cancelled = BTreeSet::new();
        for one in moves {
            match one {
                Move::Begin(at) if expected.loading.is_none() => {
                    let load = live.engine.begin_adapter(adapters[at].id()).expect("three never fill it");
                    if expected.leaving.remove(&at) || expected.open.contains(&at) {
                        expected.open.insert(at);
                    } else {
                        expected.loading = Some((at, load));
                    }
                }
                Move::Layer => {
                    if let Some((at, mut load)) = expected.loading.take() {
                        match live.engine.load_layer(&mut load, &adapters[at]).expect("it loads") {
                            true => _ = expected.open.insert(at),
                            false => expected.loading = Some((at, load)),
                        }
                    }
                }
                Move::Abandon => {
                    if let Some((_, mut load)) = expected.loading.take() {
                        live.engine.abandon(&mut load);
                    }
                }
                Move::Fail => {
                    if let Some((at, mut load)) = expected.loading.take() {
                        live.layers_left.store(0, Ordering::Relaxed);
                        prop_assert!(live.engine.load_layer(&mut load, &adapters[at]).is_err());
                        live.layers_left.store(MANY, Ordering::Relaxed);
                    }
                }
                Move::Remove(at) => {
                    live.engine.remove_adapter(adapters[at].id());
                    if expected.open.remove(&at) {
                        expected.leaving.insert(at);
                    }
                }
                Move::Ask(adapter) => {
                    let request = asked.len() as u64;
                    let is_taken = adapter.is_none_or(|at| expected.open.contains(&at));
                    live.ask(request, adapter.map(|at| adapters[at].id()));
                    asked.insert(request, (adapter, is_taken));
                    if is_taken {
                        expected.running.insert(request, adapter);
                    }
                }
                Move::Cancel(request) => {
                    live.engine.cancel(&Cancel { request, choices: Vec::new() });
                    if expected.running.remove(&request).is_some() {
                        cancelled.insert(request);
                    }
                }
                Move::Step => {
                    live.step();
                    expected.running.retain(|request, _| !live.ended.contains(request));
                }
                Move::Free => {
                    let used: BTreeSet<usize> = expected.running.values().copied().flatten().collect();
                    let before = expected.leaving.len();
                    expected.leaving.retain(|at| used.contains(at));
                    prop_assert_eq!(live.engine.free_adapters(), before - expected.leaving.len());
                }
                Move::Begin(_) => {}
            }
            let held = |at: usize| {
                let is_loading = expected.loading.as_ref().is_some_and(|(loading, _)| *loading == at);
                is_loading || expected.open.contains(&at) || expected.leaving.contains(&at)
            };
            for (at, adapter) in adapters.iter().enumerate() {
                prop_assert_eq!(live.engine.holds_adapter(adapter.id()), held(at));
                prop_assert_eq!(live.engine.adapters().contains(&adapter.id()), expected.open.contains(&at));
            }
        }
        live.finish();
        for (request, (adapter, is_taken)) in asked {
            let said = live.said.remove(&request).unwrap_or_default();
            if !is_taken {
                prop_assert_eq!(live.failures.get(&request), Some(&(ErrorKind::Unavailable as i32)));
            } else if cancelled.contains(&request) {
                prop_assert!(want[&adapter].starts_with(&said));
            } else {
                prop_assert_eq!(&said, &want[&adapter]);
            }
        }
    }
}
