//! The whole engine on the demo model, on a mixture of experts and on a model with adapters: a request's tokens and log-probabilities are the same bits as when it runs
//! alone, regardless of other requests beside or before it. Checked on every path of this machine, greedy and sampled.

use crate::common;

use common::weights::Golden;
use common::{MakeDevice, devices, load, repository};
use penstock_engine::adapter::Adapter;
use penstock_engine::checkpoint::Checkpoint;
use penstock_engine::models::Model;
use penstock_engine::{AfterLayer, Engine, EngineConfig, Forward, Geometry, Pages};
use penstock_kernels::{AdapterSlot, KernelError, StepBatch};
use penstock_proto::frames::{ChoiceStart, Generate, Sampling, Token, TokenLogprobs};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Output tokens of each request.
const TOKENS: u32 = 25;
/// KV pages of the loaded model.
const PAGES: usize = 96;

#[derive(Deserialize)]
struct Goldens {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
}

fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string(repository("models/penstock-demo/goldens.json")).expect("goldens");
    serde_json::from_str::<Goldens>(&text).expect("goldens parse").cases
}

/// One loaded model lent to many engines, one after another; each is told its number of pages.
struct Lent {
    model: Arc<Mutex<Model>>,
    pages: usize,
    logits: Vec<f32>,
}

impl Forward for Lent {
    fn geometry(&self) -> Geometry {
        Geometry { pages: self.pages, ..self.model.lock().expect("one engine at a time").geometry() }
    }

    fn forward(&mut self, batch: &StepBatch<'_>, after_layer: AfterLayer<'_>) -> Result<&[f32], KernelError> {
        self.logits.clear();
        self.logits.extend_from_slice(self.model.lock().expect("one engine at a time").forward(batch, after_layer)?);
        Ok(&self.logits)
    }

    fn adapt_layer(&mut self, _: usize, _: AdapterSlot, _: &Adapter) -> Result<(), KernelError> {
        // The model has it already, under the same slot.
        Ok(())
    }

    fn pages(&self) -> &dyn Pages {
        self
    }

    fn write_page(&mut self, layer: usize, page: u32, bytes: &[u8]) {
        self.model.lock().expect("one engine at a time").write_page(layer, page, bytes);
    }
}

impl Pages for Lent {
    fn read_page(&self, layer: usize, page: u32, out: &mut [u8]) {
        self.model.lock().expect("one engine at a time").read_page(layer, page, out);
    }
}

/// Output of one choice: tokens with log-probabilities, and those of the prompt.
#[derive(Clone, Debug, Default)]
struct Said {
    tokens: Vec<Token>,
    prompt_logprobs: Vec<TokenLogprobs>,
    cached: u32,
}

/// A model on one path, and the requests with their answers when run alone.
struct Bench {
    path: String,
    model: Arc<Mutex<Model>>,
    adapters: Vec<Adapter>,
    requests: Vec<Generate>,
    alone: Vec<Said>,
}

impl Bench {
    /// The demo model.
    fn demo(path: String, make: &MakeDevice, requests: Vec<Generate>) -> Self {
        let checkpoint = Checkpoint::open(&repository("models/penstock-demo")).expect("the demo model opens");
        Self::new(path, make, &checkpoint, Vec::new(), requests)
    }

    /// A small mixture of experts, whose prompts are those of the demo model in its vocabulary.
    fn mixture(path: String, make: &MakeDevice, mut requests: Vec<Generate>) -> Self {
        let checkpoint = Golden::named("qwen3moe-shares").checkpoint();
        let vocab = checkpoint.config().vocab_size as u32;
        requests.iter_mut().flat_map(|request| &mut request.prompt).for_each(|token| *token %= vocab);
        Self::new(path + ", mixture", make, &checkpoint, Vec::new(), requests)
    }

    /// A small model with eight adapters, of ranks 1 to 8: the first request has none, those after it have one each, and so on.
    fn adapted(path: String, make: &MakeDevice, mut requests: Vec<Generate>) -> Self {
        let golden = Golden::named("qwen3-tied");
        let checkpoint = golden.checkpoint();
        let adapters: Vec<Adapter> = (1..=8).map(|number| golden.adapter(100 + number, number as usize)).collect();
        let vocab = checkpoint.config().vocab_size as u32;
        for (number, request) in requests.iter_mut().enumerate() {
            request.prompt.iter_mut().for_each(|token| *token %= vocab);
            if let Some(adapter) = (number % 9).checked_sub(1).map(|number| &adapters[number]) {
                request.adapter = adapter.id().to_bytes().to_vec();
                request.salt.clone_from(&request.adapter);
            }
        }
        Self::new(path + ", adapters", make, &checkpoint, adapters, requests)
    }

    fn new(
        path: String,
        make: &MakeDevice,
        checkpoint: &Checkpoint,
        adapters: Vec<Adapter>,
        requests: Vec<Generate>,
    ) -> Self {
        let mut model = load(checkpoint, &**make, PAGES, 512);
        for (slot, adapter) in (0..).zip(&adapters) {
            model.add_adapter(AdapterSlot(slot), adapter).expect("every device here has adapters");
        }
        let mut bench = Self { path, model: Arc::new(Mutex::new(model)), adapters, requests, alone: Vec::new() };
        let config = EngineConfig { prefix_cache: false, ..EngineConfig::default() };
        for request in bench.requests.clone() {
            let mut engine = bench.engine(PAGES, &config);
            bench.alone.push(run(&mut engine, vec![request]).pop().expect("one answer"));
        }
        bench
    }

    fn engine(&self, pages: usize, config: &EngineConfig) -> Engine {
        let lent = Lent { model: Arc::clone(&self.model), pages, logits: Vec::new() };
        let mut engine = Engine::new(Box::new(lent), config);
        self.adapters.iter().for_each(|adapter| engine.add_adapter(adapter).expect("it is lent too"));
        engine
    }

    #[track_caller]
    fn check(&self, said: &[Said], what: &str) {
        assert_eq!(said.len(), self.alone.len());
        for (number, (said, alone)) in said.iter().zip(&self.alone).enumerate() {
            let place = format!("{}, {what}, request {number}", self.path);
            let ids = |said: &Said| said.tokens.iter().map(|token| token.id).collect::<Vec<_>>();
            assert_eq!(ids(said), ids(alone), "{place}: tokens");
            let logprobs = |said: &Said| said.tokens.iter().map(|t| bits(t.logprobs.as_ref())).collect::<Vec<_>>();
            assert_eq!(logprobs(said), logprobs(alone), "{place}: log-probabilities");
        }
    }
}

type Bits = Option<(u32, Vec<u32>, Vec<u32>, u32)>;

fn bits(logprobs: Option<&TokenLogprobs>) -> Bits {
    let bits = |list: &[f32]| list.iter().map(|value| value.to_bits()).collect();
    logprobs.map(|l| (l.logprob.to_bits(), l.top_tokens.clone(), bits(&l.top_logprobs), l.rank))
}

/// Golden that request `number` asks for; the longer ones come first.
fn case_of(number: usize) -> usize {
    (number / 2 + 3) % 8
}

/// Requests for the tests: even ones greedy, odd ones sampled, some with penalties.
fn requests(count: usize) -> Vec<Generate> {
    let cases = cases();
    let request = |number: usize| {
        let sampled = number % 2 == 1;
        let sampling = Sampling {
            temperature: if sampled { 0.9 } else { 0.0 },
            top_p: if sampled { 0.95 } else { 1.0 },
            repetition_penalty: if number % 4 == 3 { 1.1 } else { 1.0 },
            frequency_penalty: if number % 4 == 1 { 0.2 } else { 0.0 },
            seed: 1000 + number as u64,
            max_tokens: TOKENS,
            logprobs: 3,
            prompt_logprobs: -1,
            ..Default::default()
        };
        Generate {
            request: number as u64,
            prompt: cases[case_of(number)].prompt_ids.clone(),
            choices: vec![ChoiceStart { index: 0, emitted: Vec::new() }],
            sampling: Some(sampling),
            ..Default::default()
        }
    };
    (0..count).map(request).collect()
}

/// Runs all requests at once; returns answers in the order of their numbers.
fn run(engine: &mut Engine, requests: Vec<Generate>) -> Vec<Said> {
    let mut said: BTreeMap<u64, Said> = requests.iter().map(|g| (g.request, Said::default())).collect();
    requests.into_iter().for_each(|request| engine.submit(request));
    while engine.has_work() {
        for output in engine.step(&|| Duration::ZERO).outputs {
            let answer = said.get_mut(&output.request).expect("a request that was sent");
            let finish = output.finish.as_ref();
            assert!(finish.is_none_or(|finish| finish.error_kind == 0), "{finish:?}");
            answer.tokens.extend(output.tokens);
            answer.cached += output.cached_tokens.unwrap_or(0);
            answer.prompt_logprobs.extend(output.prompt_logprobs);
        }
    }
    said.into_values().collect()
}

/// Runs `check` on each path and model with sixteen requests and their answers alone.
fn each(check: impl Fn(&Bench)) {
    for (path, make) in devices() {
        // The oracle computes a token in milliseconds, so it gets the first few requests only.
        let count = if path == "reference" { 6 } else { 16 };
        check(&Bench::demo(path.clone(), &make, requests(count)));
        check(&Bench::mixture(path.clone(), &make, requests(count)));
        check(&Bench::adapted(path, &make, requests(count)));
    }
}

#[test]
fn beside_fifteen_others() {
    each(|bench| {
        let said = run(&mut bench.engine(PAGES, &EngineConfig::default()), bench.requests.clone());
        bench.check(&said, "in one batch");
    });
}

#[test]
fn in_chunks_of_any_size() {
    each(|bench| {
        for chunk_tokens in [1, 7, 64] {
            let config = EngineConfig { chunk_tokens, batch_tokens: 150, ..EngineConfig::default() };
            let said = run(&mut bench.engine(PAGES, &config), bench.requests.clone());
            bench.check(&said, &format!("in chunks of {chunk_tokens}"));
        }
    });
}

#[test]
fn after_a_prefix_hit() {
    each(|bench| {
        let mut engine = bench.engine(PAGES, &EngineConfig::default());
        run(&mut engine, bench.requests.clone());
        let again = run(&mut engine, bench.requests.clone());
        bench.check(&again, "with a cached prefix");
        let long = bench.requests.iter().zip(&again).filter(|(request, _)| request.prompt.len() > 32);
        assert!(long.clone().count() > 0);
        long.for_each(|(request, said)| assert_eq!(said.cached as usize, (request.prompt.len() - 1) / 32 * 32));
    });
}

/// The shortest prompt, with an earlier turn, arrives when the longest has begun: it goes first, and both outputs stay
/// the same.
#[test]
fn a_turn_before_it_overtakes_a_prompt_that_has_begun() {
    each(|bench| {
        let length = |n: &usize| bench.requests[*n].prompt.len();
        let numbers = || 0..bench.requests.len();
        let long = numbers().max_by_key(length).expect("some");
        let short = numbers().min_by_key(length).expect("some");
        let config =
            EngineConfig { batch_tokens: 16, chunk_tokens: 16, prefill_seconds_max: 0.0, ..EngineConfig::default() };
        assert!(length(&long) > length(&short) + 32, "the long one takes more steps");
        let mut engine = bench.engine(PAGES, &config);
        let mut said: Vec<(u64, u32)> = Vec::new();
        let mut step = |engine: &mut Engine| {
            let outputs = engine.step(&|| Duration::ZERO).outputs;
            said.extend(outputs.into_iter().flat_map(|o| o.tokens.into_iter().map(move |token| (o.request, token.id))));
        };
        engine.submit(Generate { turn: 5, ..bench.requests[long].clone() });
        step(&mut engine);
        engine.submit(Generate { turn: -5, ..bench.requests[short].clone() });
        while engine.has_work() {
            step(&mut engine);
        }
        let of = |number: usize| said.iter().filter(move |(id, _)| *id == bench.requests[number].request);
        assert_eq!(said[0].0, bench.requests[short].request, "{}: who is first", bench.path);
        for number in [long, short] {
            let alone = bench.alone[number].tokens.iter().map(|token| token.id);
            assert!(of(number).map(|(_, id)| *id).eq(alone), "{}: request {number}", bench.path);
        }
    });
}

#[test]
fn with_too_few_pages() {
    each(|bench| {
        let longest = bench.requests.iter().map(|request| request.prompt.len()).max().expect("some");
        let pages = (longest + TOKENS as usize).div_ceil(32);
        // Each request is more urgent than those before it and comes while they run: it takes their pages.
        let mut engine = bench.engine(pages, &EngineConfig { chunk_tokens: 20, ..EngineConfig::default() });
        let mut said = vec![Said::default(); bench.requests.len()];
        let mut arrivals = bench.requests.iter().cloned().enumerate();
        loop {
            if let Some((number, request)) = arrivals.next() {
                engine.submit(Generate { priority: -(number as i32), ..request });
            } else if !engine.has_work() {
                break;
            }
            for _ in 0..7 {
                let outputs = engine.step(&|| Duration::ZERO).outputs;
                outputs.into_iter().for_each(|o| said[o.request as usize].tokens.extend(o.tokens));
            }
        }
        let preemptions = engine.state().preemptions;
        assert!(preemptions >= bench.requests.len() as u64 / 2, "{}: only {preemptions} preemptions", bench.path);
        bench.check(&said, "after preemptions");
    });
}

#[test]
fn continued_at_every_fifth_token() {
    each(|bench| {
        for cut in (5..TOKENS as usize).step_by(5) {
            let mut requests = bench.requests.clone();
            for (request, alone) in requests.iter_mut().zip(&bench.alone) {
                request.attempt = 1;
                request.choices[0].emitted = alone.tokens[..cut].iter().map(|token| token.id).collect();
            }
            let rest = run(&mut bench.engine(PAGES, &EngineConfig::default()), requests);
            let whole: Vec<Said> = rest
                .into_iter()
                .zip(&bench.alone)
                .map(|(rest, alone)| {
                    let tokens = alone.tokens[..cut].iter().cloned().chain(rest.tokens).collect();
                    Said { tokens, ..Said::default() }
                })
                .collect();
            bench.check(&whole, &format!("continued after {cut}"));
        }
    });
}

#[test]
fn without_an_adapter_as_where_none_is_loaded() {
    for (path, make) in devices() {
        let adapted = Bench::adapted(path, &make, requests(12));
        let mut bare = adapted.requests.clone();
        bare.iter_mut().for_each(|request| (request.adapter, request.salt) = Default::default());
        let plain = Bench::new("plain".into(), &make, &Golden::named("qwen3-tied").checkpoint(), Vec::new(), bare);
        let said = run(&mut adapted.engine(PAGES, &EngineConfig::default()), adapted.requests.clone());
        for (number, request) in adapted.requests.iter().enumerate() {
            let logprobs = |said: &Said| said.tokens.iter().map(|t| bits(t.logprobs.as_ref())).collect::<Vec<_>>();
            let is_alike = logprobs(&said[number]) == logprobs(&plain.alone[number]);
            assert_eq!(is_alike, request.adapter.is_empty(), "{}, request {number}", adapted.path);
        }
    }
}

#[test]
fn prompt_logprobs_do_not_depend_on_the_cut() {
    each(|bench| {
        let ask = |config: &EngineConfig| -> Vec<Vec<Bits>> {
            let mut requests: Vec<Generate> = bench.requests.iter().step_by(2).cloned().collect();
            requests.iter_mut().for_each(|g| g.sampling.as_mut().expect("set").prompt_logprobs = 2);
            let said = run(&mut bench.engine(PAGES, config), requests);
            said.iter().map(|said| said.prompt_logprobs.iter().map(|l| bits(Some(l))).collect()).collect()
        };
        let whole = ask(&EngineConfig::default());
        assert!(whole.iter().zip(bench.requests.iter().step_by(2)).all(|(l, request)| l.len() == request.prompt.len()));
        assert_eq!(ask(&EngineConfig { chunk_tokens: 7, ..EngineConfig::default() }), whole, "{}", bench.path);
    });
}

#[test]
fn f32_says_what_transformers_says() {
    let (path, make) = devices().into_iter().find(|(path, _)| path == "reference").expect("the oracle");
    let mut requests = requests(16);
    requests.retain(|request| request.request % 2 == 0);
    let (bench, cases) = (Bench::demo(path, &make, requests), cases());
    for (said, request) in bench.alone.iter().zip(&bench.requests) {
        let ids: Vec<u32> = said.tokens.iter().map(|token| token.id).collect();
        assert_eq!(ids, cases[case_of(request.request as usize)].output_ids[..TOKENS as usize]);
    }
}
