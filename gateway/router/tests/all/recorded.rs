//! Recorded events of a real vLLM server (`bench/vllm-events.sh`) with the cache hits it reported: our index must predict the same hits.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use penstock_proto::BlockHasher;
use penstock_proto::frames::Tier;
use penstock_router::foreign::{Events, ForeignError, ForeignEvent, Order, Rehasher, Turn};
use penstock_router::{KvIndex, WorkerId};
use serde_json::Value;

const SERVER: WorkerId = WorkerId(0);

struct Server {
    index: KvIndex,
    rehasher: Rehasher,
    order: Order,
    removed: usize,
}

impl Server {
    fn new() -> Self {
        let mut index = KvIndex::default();
        index.join(SERVER, 1 << 16);
        let rehasher = Rehasher::new(BlockHasher::new(b"recorded"));
        Self { index, rehasher, order: Order::default(), removed: 0 }
    }

    fn hear(&mut self, message: &Value) {
        let sequence = message[1].as_u64().expect("a number");
        let payload = STANDARD.decode(message[2].as_str().expect("text")).expect("base64");
        assert_eq!(self.order.look(sequence), Turn::Next);
        self.order.took(sequence);
        for event in Events::new(&payload).expect("a batch") {
            let event = event.expect("an event").expect("of use");
            self.removed += usize::from(matches!(event, ForeignEvent::Removed { .. }));
            self.rehasher.apply(&event, &mut self.index, SERVER);
        }
    }
}

/// Prompt tokens that the server reads from its cache: whole blocks of its own size, and never the whole prompt.
fn predicted(server: &Server, prompt: &[u32], block_tokens: usize) -> usize {
    let chain = BlockHasher::new(b"recorded").chain(prompt);
    let held = server.index.hits_by_tier(&chain, [SERVER]).within(SERVER, Tier::Device) as usize * 32;
    held.min(prompt.len() - 1) / block_tokens * block_tokens
}

#[track_caller]
fn check(recording: &str, removed: bool) {
    let recording: Value = serde_json::from_str(recording).expect("JSON");
    let block_tokens = recording["block_size"].as_u64().expect("a number") as usize;
    let (mut server, mut cached) = (Server::new(), 0);
    for (number, step) in recording["steps"].as_array().expect("steps").iter().enumerate() {
        let ids = step["prompt"].as_array().expect("tokens").iter();
        let prompt: Vec<u32> = ids.map(|id| id.as_u64().expect("an id") as u32).collect();
        let told = step["cached_tokens"].as_u64().expect("a number") as usize;
        assert_eq!(predicted(&server, &prompt, block_tokens), told, "request {number}");
        cached += told;
        step["messages"].as_array().expect("messages").iter().for_each(|message| server.hear(message));
    }
    assert!(cached > 1000 && server.rehasher.followed().orphans == 0);
    assert_eq!(server.removed > 0, removed, "the cache was too small for all, or not");
    server.rehasher.apply(&ForeignEvent::Cleared, &mut server.index, SERVER);
    assert_eq!((server.index.sizes(), server.index.shape()), ((0, 0), (0, 0)));
}

#[test]
fn vllm_with_blocks_of_32_reports_the_hits_that_we_predict() {
    check(include_str!("../recorded/vllm_block32.json"), true);
}

#[test]
fn vllm_with_blocks_of_64_reports_the_hits_that_we_predict() {
    check(include_str!("../recorded/vllm_block64.json"), true);
}

#[test]
fn every_cut_and_every_flipped_byte_of_a_payload_is_an_answer() {
    let recording: Value = serde_json::from_str(include_str!("../recorded/vllm_block64.json")).expect("JSON");
    let messages = recording["steps"].as_array().expect("steps").iter().flat_map(|step| step["messages"].as_array());
    for message in messages.flatten().take(6) {
        let payload = STANDARD.decode(message[2].as_str().expect("text")).expect("base64");
        for cut in 0..payload.len() {
            let read: Result<Vec<_>, ForeignError> = Events::new(&payload[..cut]).and_then(Iterator::collect);
            assert!(read.is_err(), "cut at {cut}");
            let mut flipped = payload.clone();
            flipped[cut] ^= 0x55;
            let mut server = Server::new();
            let read = Events::new(&flipped).into_iter().flatten().flatten().flatten();
            read.for_each(|event| server.rehasher.apply(&event, &mut server.index, SERVER));
        }
    }
}
