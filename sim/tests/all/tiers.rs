//! A modelled engine with a small device: blocks from its disk are useful only behind blocks that are still on the
//! device.

use penstock_proto::{BLOCK_TOKENS, BlockHash};
use penstock_sim::fleet::ask::Ask;
use penstock_sim::fleet::engine::{Engine, Sizes, Speed};

const BLOCKS: usize = 10;

/// A prompt of ten blocks and a token; those of even and odd numbers are the same.
fn ask(request: usize) -> Ask {
    ask_of(request, request % 2)
}

fn ask_of(request: usize, chain: usize) -> Ask {
    Ask {
        request,
        attempt: 0,
        input: BLOCKS * BLOCK_TOKENS + 1,
        output: 8,
        hashes: (0..BLOCKS).map(|block| BlockHash((chain * 100 + block + 1) as u128)).collect(),
        session: 0,
        tenant: 0,
        resumed: false,
        given: None,
        recorded: None,
        turn: request as i64,
        source: None,
        lent: None,
        brought: 0,
    }
}

/// Serves a request; returns the tokens that were cached, and the part of them from the disk.
fn serve(engine: &mut Engine, now: &mut f64, request: usize) -> (usize, usize) {
    engine.take(ask(request), *now);
    let mut cached = None;
    loop {
        read_all(engine, now);
        let Some(seconds) = engine.plan() else { break };
        *now += seconds;
        cached = cached.or(engine.finish(seconds).iter().find_map(|one| Some((one.cached?, one.brought))));
    }
    cached.expect("it has answered")
}

/// Reads all that waiting requests want.
fn read_all(engine: &mut Engine, now: &mut f64) {
    while let Some(seconds) = engine.read(*now) {
        *now += seconds;
        engine.arrived(seconds, *now);
    }
}

/// Beside a request that holds most of the device there is room for six blocks: those that are loaded first stay, and a
/// second load takes none of them.
#[test]
fn a_load_that_does_not_fit_keeps_its_first_blocks() {
    let sizes = Sizes { kv_tokens: 17 * BLOCK_TOKENS, disk_tokens: 100 * BLOCK_TOKENS, ..Sizes::default() };
    let (mut engine, mut now) = (Engine::new(Speed::default(), sizes, None), 0.0);
    for request in [0, 1] {
        serve(&mut engine, &mut now, request);
    }
    // The third takes eleven pages and the blocks of both others leave the device, but for six.
    engine.take(ask_of(2, 2), now);
    let mut seconds = engine.plan().expect("it starts");
    let mut cached = Vec::new();
    for request in [4, 5] {
        engine.take(ask(request), now);
        read_all(&mut engine, &mut now);
    }
    loop {
        cached.extend(engine.finish(seconds).iter().filter_map(|one| Some((one.request, one.cached?))));
        match engine.plan() {
            Some(next) => seconds = next,
            None => break,
        }
    }
    assert_eq!(cached, [(2, 0), (4, 6 * BLOCK_TOKENS), (5, 0)]);
}

/// On a device of little more than one prompt, the first blocks of a prompt are still there, and the next to be
/// evicted, when the others are loaded; as at a worker.
#[test]
fn what_is_brought_does_not_push_out_what_is_before_it() {
    let sizes = Sizes { kv_tokens: 14 * BLOCK_TOKENS, disk_tokens: 100 * BLOCK_TOKENS, ..Sizes::default() };
    let (mut engine, mut now) = (Engine::new(Speed::default(), sizes, None), 0.0);
    assert_eq!([0, 1].map(|request| serve(&mut engine, &mut now, request)), [(0, 0); 2]);
    let (cached, brought) = serve(&mut engine, &mut now, 2);
    assert_eq!(cached, BLOCKS * BLOCK_TOKENS, "all but the last token");
    assert!((BLOCK_TOKENS..cached).contains(&brought), "{brought} tokens came from the disk");
}
