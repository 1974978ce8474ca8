//! Loads from a tier in memory into the device of the demo model, most of whose pages a request holds whose reader has stopped.

use super::super::level::{Level, Medium};
use super::*;
use crate::model::load;
use crate::options::ModelOptions;
use penstock_kv::TierPool;
use penstock_kv::tier::Link;
use penstock_proto::frames::{Cancel, ChoiceStart, Sampling, Tier};

/// Number of pages that the first request leaves.
const ROOM: usize = 6;

/// A request whose prompt is `blocks` blocks of its own and a token.
fn request(request: u64, blocks: usize) -> Generate {
    let sampling = Sampling {
        top_p: 1.0,
        repetition_penalty: 1.0,
        max_tokens: 8,
        logprobs: -1,
        prompt_logprobs: -1,
        ..Sampling::default()
    };
    Generate {
        request,
        prompt: (0..=(blocks * BLOCK_TOKENS) as u32).map(|n| 300 + (n * (7 + request as u32)) % 1000).collect(),
        choices: vec![ChoiceStart::default()],
        sampling: Some(sampling),
        window: 1,
        ..Generate::default()
    }
}

/// An engine in which a request holds all pages but `room`, and its numerics.
fn crowded(room: usize) -> (Engine, String) {
    let model = ModelOptions { threads: 1, kv_bytes_max: 3 << 20, ..ModelOptions::default() };
    let (mut engine, info) = load(&model, &mut |_| ()).expect("the demo model");
    let pages = engine.state().blocks_total as usize;
    engine.submit(request(1, pages - room - 1));
    while engine.has_work() {
        engine.step(&|| Duration::ZERO);
    }
    assert_eq!(engine.state().blocks_free as usize, room);
    (engine, info.numerics_id)
}

/// A tier in memory.
fn memory(engine: &Engine) -> Levels {
    let level = Level::new(TierPool::new(Tier::Host, 64), Medium::Memory(vec![Vec::new(); 64]));
    Levels::new(vec![level], engine.block_bytes())
}

#[test]
fn a_load_keeps_what_it_brought_and_takes_no_block_of_a_request_that_waits() {
    let (mut engine, numerics) = crowded(ROOM);
    let waiting = [2, 3].map(|number| request(number, ROOM + 4));
    let mut levels = memory(&engine);
    let chains = waiting.each_ref().map(|generate| engine.chain(generate));
    for chain in &chains {
        assert_eq!(chain.len(), ROOM + 4);
        for (block, hash) in chain.iter().enumerate() {
            let parent = block.checked_sub(1).map(|parent| chain[parent]);
            levels.put(0, Link { parent, hash: *hash }, vec![0; engine.block_bytes()]);
        }
    }
    let levels = Mutex::new(levels);
    let (mut intake, now) = (Intake::new(engine.block_bytes(), &numerics), Instant::now());
    for generate in waiting {
        assert!(intake.admit(generate, &mut engine, &mut lock(&levels), now).is_none(), "its blocks are in memory");
        let ready = intake.advance(&mut engine, &levels, now);
        assert_eq!(ready.len(), 1, "its wait is over");
        ready.into_iter().for_each(|released| engine.submit(released.generate));
    }
    let leading = |engine: &Engine, chain: &[BlockHash]| chain.iter().take_while(|hash| engine.holds(**hash)).count();
    assert_eq!(chains.each_ref().map(|chain| leading(&engine, chain)), [ROOM, 0]);

    engine.cancel(&Cancel { request: 1, choices: Vec::new() });
    let mut cached = Vec::new();
    while cached.is_empty() {
        let outputs = engine.step(&|| Duration::ZERO).outputs;
        cached.extend(outputs.iter().filter(|output| output.request == 2).filter_map(|output| output.cached_tokens));
    }
    assert_eq!(cached, [(ROOM * BLOCK_TOKENS) as u32]);
    engine.cancel(&Cancel { request: 3, choices: Vec::new() });
    intake.advance(&mut engine, &levels, now);
    assert!(intake.spared.is_empty(), "nobody waits");
}

#[test]
fn a_full_device_ends_the_load_of_a_request_that_still_waits_for_an_answer_of_the_remote_tier() {
    let (mut engine, numerics) = crowded(0);
    let (levels, now) = (Mutex::new(memory(&engine)), Instant::now());
    let mut intake = Intake::new(engine.block_bytes(), &numerics);
    let generate = request(2, 4);
    let chain = engine.chain(&generate);
    intake.arrived.insert(chain[0], vec![0; engine.block_bytes()]);
    intake.held.push_back(Held {
        id: WorkId(2),
        errand: Errand::Request(Box::new(Released { generate, windows: Vec::new() })),
        chain,
        here: 0,
        end: 2,
        finding: true,
        touched: false,
        patience: WAIT_MAX,
        deadline: now + WAIT_MAX,
    });
    assert!(intake.advance(&mut engine, &levels, now).is_empty(), "more may be found");
    assert_eq!((intake.held[0].here, intake.held[0].end, intake.arrived.len()), (0, 0, 0));
}
