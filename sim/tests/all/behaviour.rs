//! Promises that a gateway relies on, one per test, on the fake device.

use penstock_engine::{Engine, EngineConfig, Geometry, Imported, Offload};
use penstock_proto::frames::{Cancel, ChoiceStart, FinishReason, Generate, Output, Sampling, Step, Window};
use penstock_proto::{BlockHash, BlockHasher, ErrorKind};
use penstock_sim::fake::POISON;
use penstock_sim::{FakeForward, Meter};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const GEOMETRY: fn() -> Geometry = || Geometry {
    vocab_size: 50,
    context_tokens: 1024,
    pages: 64,
    rows_max: 256,
    sampled_max: 64,
    numerics: "fake".to_owned(),
    layers: 0,
    page_bytes: 0,
    state_width: 0,
    dense_layers: 0,
    headless: false,
    encoder: None,
};

fn engine_of(geometry: Geometry, config: &EngineConfig) -> (Engine, Meter) {
    let fake = FakeForward::new(geometry, 0);
    let meter = fake.meter();
    (Engine::new(Box::new(fake), config), meter)
}

fn engine() -> (Engine, Meter) {
    engine_of(GEOMETRY(), &EngineConfig::default())
}

fn greedy(max_tokens: u32) -> Sampling {
    Sampling {
        top_p: 1.0,
        repetition_penalty: 1.0,
        seed: 1,
        max_tokens,
        logprobs: -1,
        prompt_logprobs: -1,
        ..Default::default()
    }
}

fn generate(request: u64, prompt: Vec<u32>, max_tokens: u32) -> Generate {
    let choices = vec![ChoiceStart { index: 0, emitted: Vec::new() }];
    Generate { request, prompt, choices, sampling: Some(greedy(max_tokens)), ..Default::default() }
}

/// A prompt of `tokens` tokens that differs for each `kind`.
fn prompt(kind: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| 1 + (kind * 7 + i * (kind + 1)) % 49).collect()
}

fn step(engine: &mut Engine) -> Step {
    engine.step(&|| Duration::ZERO)
}

/// Tokens by request and choice.
type Said = BTreeMap<(u64, u32), Vec<u32>>;

/// Runs steps until nothing is left to do; returns the tokens, and all outputs.
fn run(engine: &mut Engine) -> (Said, Vec<Output>) {
    let (mut tokens, mut outputs) = (Said::new(), Vec::new());
    while engine.has_work() {
        for output in step(engine).outputs {
            let said = output.tokens.iter().map(|token| token.id);
            tokens.entry((output.request, output.choice)).or_default().extend(said);
            outputs.push(output);
        }
    }
    (tokens, outputs)
}

#[track_caller]
fn failure(outputs: &[Output], request: u64) -> ErrorKind {
    let finish = outputs.iter().filter(|o| o.request == request).find_map(|o| o.finish.as_ref()).expect("it ends");
    assert_eq!(finish.reason, FinishReason::Failed as i32);
    assert!(!finish.message.is_empty());
    ErrorKind::from_wire(finish.error_kind)
}

#[test]
fn a_resumed_request_goes_on_where_it_stopped() {
    let sampled = |mut g: Generate| {
        let sampling = g.sampling.as_mut().expect("set");
        (sampling.temperature, sampling.frequency_penalty, sampling.seed) = (1.0, 0.3, 99);
        g
    };
    let whole = |g: Generate| {
        let mut engine = engine().0;
        engine.submit(g);
        run(&mut engine).0[&(1, 0)].clone()
    };
    for make in [|g| g, sampled] {
        let undisturbed = whole(make(generate(1, prompt(1, 45), 40)));
        assert_eq!(undisturbed.len(), 40);
        for cut in 0..40 {
            let mut resumed = make(generate(1, prompt(1, 45), 40));
            resumed.attempt = 1;
            resumed.choices[0].emitted = undisturbed[..cut].to_vec();
            assert_eq!(whole(resumed), undisturbed[cut..], "cut at {cut}");
        }
    }
}

#[test]
fn blocks_that_were_computed_elsewhere_are_read_like_own_ones() {
    let (mut here, (mut there, computed)) = (engine().0, engine());
    let request = || generate(1, prompt(1, 100), 20);
    here.submit(request());
    let want = run(&mut here).0;
    let hashes = BlockHasher::for_request(b"", "fake").chain(&prompt(1, 100));
    let mut parent = None;
    for hash in hashes {
        let mut bytes = Vec::new();
        assert!(here.export(hash, &mut bytes) && bytes.len() == here.block_bytes());
        assert_eq!(there.import(parent, hash, &bytes[1..]), Imported::Refused);
        assert_eq!(there.import(parent, hash, &bytes), Imported::Stored);
        assert_eq!(there.import(parent, hash, &bytes), Imported::Known);
        parent = Some(hash);
    }
    let told = step(&mut there).kv;
    assert_eq!(told.iter().map(|event| event.stored.len()).sum::<usize>(), 3, "the router is told of them");
    there.submit(request());
    let (said, outputs) = run(&mut there);
    assert_eq!((said, outputs[0].cached_tokens), (want, Some(96)));
    assert_eq!(computed.rows(), 100 - 96 + 19);
    assert!(!there.export(BlockHash(7), &mut Vec::new()));
}

/// Block as (parent, hash, bytes).
type Block = (Option<BlockHash>, BlockHash, Vec<u8>);

/// Offload target that keeps the given blocks, at most a number at once.
#[derive(Clone, Default)]
struct Shelf(Arc<Mutex<Vec<Block>>>, usize);

impl Offload for Shelf {
    fn wants(&mut self, _: Option<BlockHash>, hash: BlockHash) -> bool {
        self.0.lock().expect("one thread").iter().all(|(_, known, _)| *known != hash)
    }

    fn room(&mut self) -> usize {
        self.1
    }

    fn missed(&mut self, _: usize) {}

    fn take(&mut self, parent: Option<BlockHash>, hash: BlockHash, bytes: Vec<u8>) {
        self.0.lock().expect("one thread").push((parent, hash, bytes));
    }
}

#[test]
fn evicted_blocks_are_handed_over_before_their_pages_are_written() {
    let small = Geometry { pages: 6, ..GEOMETRY() };
    let (mut engine, _) = engine_of(small, &EngineConfig::default());
    let shelf = Shelf(Arc::default(), usize::MAX);
    engine.set_offload(Box::new(shelf.clone()));
    let said: Vec<Said> = (0..4)
        .map(|n| {
            engine.submit(generate(1, prompt(n, 100), 20));
            run(&mut engine).0
        })
        .collect();
    let blocks = shelf.0.lock().expect("one thread").clone();
    let readable: usize = engine.snapshot().iter().map(|event| event.stored.len()).sum();
    assert_eq!(blocks.len() + readable, 4 * 3, "each block of each is here or there");
    let (mut there, computed) = self::engine();
    for (parent, hash, bytes) in blocks {
        assert_eq!(there.import(parent, hash, &bytes), Imported::Stored);
    }
    there.submit(generate(1, prompt(0, 100), 20));
    let (again, outputs) = run(&mut there);
    assert_eq!((&again, outputs[0].cached_tokens), (&said[0], Some(96)));
    assert_eq!(computed.rows(), 100 - 96 + 19);
}

#[test]
fn of_a_chain_that_leaves_the_first_blocks_are_kept() {
    let (mut engine, _) = engine_of(Geometry { pages: 6, ..GEOMETRY() }, &EngineConfig::default());
    let shelf = Shelf(Arc::default(), 2);
    engine.set_offload(Box::new(shelf.clone()));
    engine.submit(generate(1, prompt(0, 160), 2));
    run(&mut engine);
    // Six pages at once: five blocks of the other request are evicted.
    engine.submit(generate(1, prompt(1, 180), 2));
    run(&mut engine);
    let hashes = BlockHasher::for_request(b"", "fake").chain(&prompt(0, 160));
    let kept: Vec<BlockHash> = shelf.0.lock().expect("one thread").iter().map(|(_, hash, _)| *hash).take(2).collect();
    assert_eq!(kept, [hashes[1], hashes[0]]);
}

#[test]
fn a_slow_reader_stalls_only_itself() {
    let config = EngineConfig { sequences_max: 1, ..EngineConfig::default() };
    let (mut engine, _) = engine_of(GEOMETRY(), &config);
    let slow = Generate { window: 3, ..generate(1, prompt(1, 40), 20) };
    engine.submit(slow);
    let (tokens, _) = run(&mut engine);
    assert_eq!(tokens[&(1, 0)].len(), 3, "it stops at its window");
    assert!(!engine.has_work() && !engine.is_empty());
    // The only slot is held by a sequence that waits for its reader: another takes it.
    engine.submit(generate(2, prompt(2, 40), 20));
    assert_eq!(run(&mut engine).0[&(2, 0)].len(), 20);
    engine.window(&Window { request: 1, choice: 0, tokens: 100 });
    let late = &run(&mut engine).0[&(1, 0)];
    let (mut alone, _) = engine_of(GEOMETRY(), &config);
    alone.submit(generate(1, prompt(1, 40), 20));
    assert_eq!(run(&mut alone).0[&(1, 0)][3..], late[..]);
}

#[test]
fn who_waits_for_its_reader_gives_up_its_pages_first() {
    let tight = Geometry { pages: 6, ..GEOMETRY() };
    let (mut engine, _) = engine_of(tight, &EngineConfig::default());
    engine.submit(Generate { window: 1, ..generate(1, prompt(1, 70), 20) });
    engine.submit(generate(2, prompt(2, 50), 100));
    let (tokens, _) = run(&mut engine);
    assert_eq!((tokens[&(1, 0)].len(), tokens[&(2, 0)].len()), (1, 100));
    assert_eq!(engine.state().preemptions, 1, "the second never gives way");
}

#[test]
fn equal_blocks_after_different_prompts_are_not_shared() {
    let (mut engine, meter) = engine();
    let forced = |mut g: Generate, emitted: usize| {
        g.choices[0].emitted = vec![5; emitted];
        g.sampling.as_mut().expect("set").allowed_tokens = vec![5];
        g
    };
    engine.submit(forced(generate(1, prompt(1, 32), 70), 0));
    run(&mut engine);
    engine.submit(forced(generate(2, prompt(2, 32), 1), 0));
    run(&mut engine);
    let before = meter.rows();
    engine.submit(forced(generate(3, prompt(2, 32), 70), 65));
    engine.step(&|| Duration::ZERO);
    assert_eq!(meter.rows() - before, 65, "only the prompt is found, not the answer to another one");
}

#[test]
fn lower_priority_numbers_run_first() {
    let config = EngineConfig { sequences_max: 1, ..EngineConfig::default() };
    let (mut engine, _) = engine_of(GEOMETRY(), &config);
    for (request, priority) in [(1, 5), (2, 0), (3, -5), (4, 0)] {
        engine.submit(Generate { priority, ..generate(request, prompt(request as u32, 10), 5) });
    }
    let ends = |outputs: Vec<Output>| -> Vec<u64> {
        outputs.iter().filter(|output| output.finish.is_some()).map(|output| output.request).collect()
    };
    assert_eq!(ends(run(&mut engine).1), [3, 2, 4, 1]);
    // A request that arrives while a less urgent one runs takes its place.
    engine.submit(Generate { priority: 1, ..generate(5, prompt(5, 10), 50) });
    step(&mut engine);
    engine.submit(generate(6, prompt(6, 10), 5));
    assert_eq!(ends(run(&mut engine).1), [6, 5]);
}

#[test]
fn later_choices_read_the_prompt_of_the_first() {
    let (mut engine, meter) = engine();
    let mut request = generate(1, prompt(1, 32 * 4 + 5), 1);
    request.choices = (0..8).map(|index| ChoiceStart { index, emitted: Vec::new() }).collect();
    engine.submit(request);
    let (tokens, outputs) = run(&mut engine);
    assert_eq!(tokens.len(), 8);
    assert_eq!(meter.rows(), 133 + 7 * 5, "the others compute only the part of the block that is not full");
    let cached: Vec<_> = outputs.iter().map(|output| output.cached_tokens).collect();
    assert_eq!(cached[0], Some(0));
    assert!(cached[1..].iter().all(|cached| *cached == Some(128)));
}

#[test]
fn a_burst_with_one_system_prompt_computes_it_once() {
    let (mut engine, meter) = engine();
    for request in 0..16 {
        let own = prompt(request as u32 + 2, 10);
        engine.submit(generate(request, [prompt(1, 128), own].concat(), 3));
    }
    let (tokens, _) = run(&mut engine);
    assert!(tokens.values().all(|tokens| tokens.len() == 3));
    assert_eq!(meter.rows(), 128 + 16 * (10 + 2));
}

#[test]
fn a_hit_is_never_the_whole_prompt() {
    let (mut engine, meter) = engine();
    for request in 1..=2 {
        engine.submit(generate(request, prompt(1, 96), 1));
        let (_, outputs) = run(&mut engine);
        let last = outputs.last().expect("it ends");
        assert_eq!(last.cached_tokens, Some(if request == 1 { 0 } else { 64 }));
    }
    assert_eq!(meter.rows(), 96 + 32);
    let state = engine.state();
    assert_eq!((state.prompt_tokens, state.cached_tokens, state.output_tokens), (192, 64, 2));
}

#[test]
fn salts_do_not_share() {
    let (mut engine, meter) = engine();
    for (request, salt) in [(1, b"tenant-a"), (2, b"tenant-b")] {
        engine.submit(Generate { salt: salt.to_vec(), ..generate(request, prompt(1, 100), 1) });
        run(&mut engine);
    }
    assert_eq!(meter.rows(), 200);
}

#[test]
fn the_hash_that_routes_is_the_hash_that_stores() {
    let (mut engine, _) = engine();
    engine.submit(Generate { salt: b"tenant".to_vec(), ..generate(1, prompt(1, 70), 1) });
    let events = step(&mut engine).kv;
    let routed: Vec<Vec<u8>> = BlockHasher::for_request(b"tenant", "fake")
        .chain(&prompt(1, 70))
        .into_iter()
        .map(|hash| hash.to_bytes().to_vec())
        .collect();
    assert_eq!((events.len(), &events[0].stored), (1, &routed));
    assert_eq!(engine.snapshot().last().expect("one chain").stored, routed);
}

#[test]
fn prompt_logprobs_bypass_the_cache() {
    let (mut engine, meter) = engine();
    engine.submit(generate(1, prompt(1, 64), 1));
    run(&mut engine);
    let mut request = generate(2, prompt(1, 64), 1);
    request.sampling.as_mut().expect("set").prompt_logprobs = 2;
    engine.submit(request);
    let (_, outputs) = run(&mut engine);
    assert_eq!(meter.rows(), 128);
    let logprobs = &outputs[0].prompt_logprobs;
    assert!(logprobs.len() == 64 && logprobs[0].logprob.is_nan());
    assert!(logprobs[1..].iter().all(|l| l.logprob < 0.0 && l.top_tokens.len() == 2 && l.rank >= 1));
}

#[test]
fn prompt_logprobs_leave_samples_to_others() {
    let config = EngineConfig { sequences_max: 8, ..EngineConfig::default() };
    let (mut engine, _) = engine_of(Geometry { sampled_max: 16, ..GEOMETRY() }, &config);
    let mut long = generate(1, prompt(1, 500), 3);
    long.sampling.as_mut().expect("set").prompt_logprobs = 2;
    engine.submit(long);
    step(&mut engine);
    engine.submit(generate(2, prompt(2, 40), 3));
    let outputs: Vec<Output> = (0..5).flat_map(|_| step(&mut engine).outputs).collect();
    let ended = outputs.iter().any(|output| output.request == 2 && output.finish.is_some());
    assert!(ended, "a new request is answered while another collects: {outputs:?}");
    assert_eq!(run(&mut engine).1[0].prompt_logprobs.len(), 500);
}

#[test]
fn long_prompt_logprobs_share_no_frame() {
    let config = EngineConfig { prompt_logprobs_max: 100, ..EngineConfig::default() };
    let (mut engine, _) = engine_of(GEOMETRY(), &config);
    for request in 1..=3 {
        let mut request = generate(request, prompt(request as u32, 15), 4);
        request.sampling.as_mut().expect("set").prompt_logprobs = 3;
        engine.submit(request);
    }
    let (mut said, mut frames) = (Said::new(), 0);
    while engine.has_work() {
        let outputs = step(&mut engine).outputs;
        let entries = outputs.iter().flat_map(|o| &o.prompt_logprobs).map(|l| 1 + l.top_tokens.len()).sum::<usize>();
        assert!(entries <= 100);
        frames += usize::from(entries > 0);
        for output in outputs {
            let tokens = said.entry((output.request, output.choice)).or_default();
            assert_eq!(output.at as usize, tokens.len(), "in order");
            tokens.extend(output.tokens.iter().map(|token| token.id));
        }
    }
    assert!(frames == 3 && said.values().all(|tokens| tokens.len() == 4));
}

#[test]
fn cancel_frees_within_the_step() {
    let (mut engine, _) = engine();
    for request in 1..=4 {
        engine.submit(generate(request, prompt(request as u32, 200), 50));
    }
    step(&mut engine);
    let mut two = generate(9, prompt(9, 10), 50);
    two.choices.push(ChoiceStart { index: 1, emitted: Vec::new() });
    engine.submit(two);
    step(&mut engine);
    for request in 1..=4 {
        engine.cancel(&Cancel { request, choices: Vec::new() });
    }
    engine.cancel(&Cancel { request: 9, choices: vec![1] });
    engine.cancel(&Cancel { request: 77, choices: Vec::new() });
    let outputs = step(&mut engine).outputs;
    let cancelled = |o: &&Output| o.finish.as_ref().is_some_and(|f| f.reason == FinishReason::Cancelled as i32);
    assert_eq!(outputs.iter().filter(cancelled).count(), 5);
    engine.cancel(&Cancel { request: 9, choices: Vec::new() });
    let state = engine.state();
    assert_eq!((state.running, state.waiting, state.blocks_free), (0, 0, state.blocks_total));
}

#[test]
fn a_full_queue_refuses_and_a_draining_worker_too() {
    let config = EngineConfig { sequences_max: 1, waiting_max: 2, choices_max: 2, ..EngineConfig::default() };
    let (mut engine, _) = engine_of(GEOMETRY(), &config);
    (1..=3).for_each(|request| engine.submit(generate(request, prompt(1, 5), 30)));
    assert_eq!(failure(&step(&mut engine).outputs, 3), ErrorKind::Overloaded);
    engine.drain();
    engine.submit(generate(4, prompt(1, 5), 30));
    let (tokens, outputs) = run(&mut engine);
    assert_eq!(failure(&outputs, 4), ErrorKind::Draining);
    assert_eq!((tokens[&(1, 0)].len() + 1, tokens[&(2, 0)].len()), (30, 30), "what was taken is finished");
    assert!(engine.is_empty() && engine.state().draining && engine.state().credits == 0);
}

#[test]
fn one_bad_row_fails_one_sequence() {
    let (mut engine, _) = engine();
    engine.submit(generate(1, prompt(1, 5), 10));
    engine.submit(generate(2, vec![3, POISON, 4], 10));
    let (tokens, outputs) = run(&mut engine);
    assert_eq!((tokens[&(1, 0)].len(), failure(&outputs, 2)), (10, ErrorKind::ModelFailed));
    assert!(!engine.is_broken() && engine.faults() == 0, "another text has an answer");
    assert_eq!(engine.state().blocks_free, engine.state().blocks_total, "the probe keeps nothing");
}

#[test]
fn a_model_without_any_finite_answer_is_broken_and_its_requests_go_on_elsewhere() {
    let mut engine = Engine::new(Box::new(FakeForward::breaking(GEOMETRY(), 3)), &EngineConfig::default());
    assert!(engine.probe().expect("computes"));
    (1..=2).for_each(|request| engine.submit(generate(request, prompt(request as u32, 5), 10)));
    let (tokens, outputs) = run(&mut engine);
    assert_eq!((tokens[&(1, 0)].len(), tokens[&(2, 0)].len()), (2, 2));
    assert_eq!([1, 2].map(|request| failure(&outputs, request)), [ErrorKind::WorkerFailed; 2]);
    assert!(engine.is_broken());
}

#[test]
fn a_request_that_excludes_every_token_is_its_own_fault() {
    let (mut engine, meter) = engine();
    let mut request = generate(1, prompt(1, 5), 10);
    let sampling = request.sampling.as_mut().expect("it has one");
    // The fake's token 0 is at −∞ already.
    sampling.allowed_tokens = vec![POISON];
    engine.submit(request);
    assert_eq!(failure(&run(&mut engine).1, 1), ErrorKind::InvalidRequest);
    assert_eq!((meter.steps(), engine.is_broken()), (1, false), "nothing is probed for it");
}

#[test]
fn a_device_fault_ends_what_ran_as_movable() {
    let fake = FakeForward::new(GEOMETRY(), 2);
    let mut engine = Engine::new(Box::new(fake), &EngineConfig::default());
    engine.submit(generate(1, prompt(1, 5), 10));
    let (tokens, outputs) = run(&mut engine);
    assert_eq!((tokens[&(1, 0)].len(), failure(&outputs, 1), engine.faults()), (1, ErrorKind::WorkerFailed, 1));
    assert_eq!(engine.state().blocks_free, engine.state().blocks_total);
}

#[test]
fn credits_say_what_would_start() {
    let config = EngineConfig { sequences_max: 4, batch_tokens: 64, ..EngineConfig::default() };
    let (mut engine, _) = engine_of(GEOMETRY(), &config);
    assert_eq!(engine.state().credits, 4);
    engine.submit(generate(1, prompt(1, 20), 30));
    assert_eq!(engine.state().credits, 3);
    engine.submit(generate(2, prompt(2, 300), 30));
    assert_eq!(step(&mut engine).state.expect("set").credits, 0, "a long prompt takes the next steps whole");
    while engine.state().prefill_tokens_pending > 0 {
        step(&mut engine);
    }
    assert_eq!(engine.state().credits, 2);
    (3..=6).for_each(|request| engine.submit(generate(request, prompt(3, 20), 30)));
    assert_eq!(engine.state().credits, 0);
}

#[test]
fn credits_leave_pages_to_who_runs() {
    let tight = Geometry { pages: 4, ..GEOMETRY() };
    let (mut engine, _) = engine_of(tight, &EngineConfig::default());
    engine.submit(generate(1, prompt(1, 20), 30));
    assert_eq!(step(&mut engine).state.expect("set").credits, 2, "three pages, one of them for the running sequence");
}

#[test]
fn credits_count_the_pages_of_those_that_wait_for_their_readers() {
    let tight = Geometry { pages: 6, ..GEOMETRY() };
    let (mut engine, _) = engine_of(tight, &EngineConfig::default());
    (1..=3)
        .for_each(|request| engine.submit(Generate { window: 1, ..generate(request, prompt(request as u32, 50), 20) }));
    assert_eq!(run(&mut engine).0.len(), 3);
    let state = engine.state();
    assert_eq!((state.stalled, state.blocks_free, state.credits), (3, 0, 6), "all pages are theirs, and to be had");
    engine.submit(generate(4, prompt(4, 150), 5));
    assert_eq!(run(&mut engine).0[&(4, 0)].len(), 5, "all three give way");
    for request in 1..=3 {
        engine.window(&Window { request, choice: 0, tokens: 100 });
    }
    assert!(run(&mut engine).0.values().all(|tokens| tokens.len() == 19), "and go on when they are read");
}

#[test]
fn credits_do_not_count_pages_that_others_read_too() {
    let tight = Geometry { pages: 5, ..GEOMETRY() };
    let (mut engine, _) = engine_of(tight, &EngineConfig::default());
    engine.submit(Generate { window: 1, ..generate(1, prompt(1, 70), 20) });
    engine.submit(generate(2, prompt(1, 70), 20));
    step(&mut engine);
    let state = step(&mut engine).state.expect("set");
    assert_eq!((state.stalled, state.running, state.blocks_free), (1, 2, 1), "two of the pages are shared");
    assert_eq!(state.credits, 1, "a free page, and one that is given up, but for one of the sequence that runs");
}

#[test]
fn the_queue_is_told_in_seconds() {
    let config = EngineConfig { batch_tokens: 100, ..EngineConfig::default() };
    let (mut engine, meter) = engine_of(GEOMETRY(), &config);
    // A device of 2,000 rows per second.
    let clock = move || Duration::from_micros(500 * meter.rows());
    engine.submit(generate(1, prompt(1, 100), 5));
    let state = engine.step(&clock).state.expect("set");
    assert!((state.prefill_tokens_per_second - 2000.0).abs() < 1e-6 && (state.step_seconds - 0.05).abs() < 1e-9);
    engine.submit(generate(2, prompt(2, 900), 5));
    assert!((engine.state().queue_seconds - 0.45).abs() < 1e-9);
}

#[test]
fn a_long_prompt_does_not_hold_up_who_speaks() {
    let (mut engine, meter) = engine();
    // A device of 1,000 rows per second, and a quarter of a second allowed.
    let counted = meter.clone();
    let clock = move || Duration::from_millis(counted.rows());
    engine.submit(generate(1, prompt(1, 200), 100));
    engine.step(&clock);
    let mut longest = 0;
    engine.submit(generate(2, prompt(2, 900), 5));
    while engine.has_work() {
        let before = meter.rows();
        let state = engine.step(&clock).state.expect("set");
        assert!(state.prefill_tokens_pending < 500 || state.credits == 0, "what comes now would not start soon");
        longest = longest.max(meter.rows() - before);
    }
    assert_eq!(longest, 251, "a quarter of a second of prefill and one row of decode");
}

#[test]
fn a_newer_attempt_replaces_an_older_one() {
    let (mut engine, _) = engine();
    engine.submit(generate(1, prompt(1, 40), 20));
    (0..3).for_each(|_| drop(step(&mut engine)));
    engine.submit(generate(1, prompt(1, 40), 20));
    engine.submit(Generate { attempt: 1, ..generate(1, prompt(1, 40), 20) });
    let outputs = run(&mut engine).1;
    assert!(outputs.iter().all(|output| output.attempt == 1));
    assert_eq!(outputs.len(), 20);
}

#[test]
fn preempted_sequences_finish_with_the_same_tokens() {
    let tight = Geometry { pages: 8, ..GEOMETRY() };
    let (mut engine, _) = engine_of(tight, &EngineConfig::default());
    (1..=4).for_each(|request| engine.submit(generate(request, prompt(request as u32, 40), 80)));
    let (tokens, _) = run(&mut engine);
    assert!(engine.state().preemptions > 0);
    for request in 1..=4 {
        let (mut alone, _) = self::engine();
        alone.submit(generate(request, prompt(request as u32, 40), 80));
        assert_eq!(run(&mut alone).0[&(request, 0)], tokens[&(request, 0)]);
    }
}

#[test]
fn choices_of_one_seed_differ_and_a_seed_repeats() {
    let draw = |seed: u64| {
        let (mut engine, _) = engine();
        let mut request = generate(1, prompt(1, 40), 30);
        let sampling = request.sampling.as_mut().expect("set");
        (sampling.temperature, sampling.seed) = (1.0, seed);
        request.choices.push(ChoiceStart { index: 1, emitted: Vec::new() });
        engine.submit(request);
        run(&mut engine).0
    };
    let one = draw(7);
    assert_ne!(one[&(1, 0)], one[&(1, 1)]);
    assert_eq!(one, draw(7));
    assert_ne!(one, draw(8));
}
