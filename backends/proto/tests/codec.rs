//! Codec tests with all that a socket can do to bytes: cut anywhere, joined, garbage, oversized.

use bytes::{BufMut, BytesMut};
use penstock_proto::codec::{CodecError, FRAME_BYTES_MAX, decode, decode_within, encode};
use penstock_proto::frames::*;
use proptest::prelude::*;

fn generate() -> impl Strategy<Value = Down> {
    (any::<u64>(), any::<u32>(), prop::collection::vec(any::<u32>(), 0..60), prop::collection::vec(any::<u32>(), 0..20))
        .prop_map(|(request, attempt, prompt, emitted)| Down {
            body: Some(DownBody::Generate(Generate {
                request,
                attempt,
                prompt,
                choices: vec![ChoiceStart { index: 0, emitted }],
                sampling: Some(Sampling {
                    temperature: 0.5,
                    logit_bias: vec![LogitBias { token: 3, bias: -1.0 }],
                    ..Default::default()
                }),
                salt: vec![1, 2, 3],
                priority: -4,
                window: 64,
                prefill_at: String::new(),
                pull_from: String::new(),
                turn: -7,
                prefill_next: vec!["unix:///a".into()],
                prefill_next_tokens: 512,
                waiting: 9,
                pooling: Pooling::Last as i32,
                grammar: Some(Guide { kind: GuideKind::Regex as i32, text: "a+".into(), begins_after: vec![7, 8] }),
                adapter: vec![9; 16],
                second_text: 7,
                dense_layers: 2,
                pooled_from: 3,
            })),
        })
}

fn step() -> impl Strategy<Value = Up> {
    (
        any::<u64>(),
        any::<u64>(),
        prop::collection::vec((any::<u64>(), any::<u32>(), prop::collection::vec(any::<u32>(), 0..4)), 0..8),
    )
        .prop_map(|(sequence, number, outputs)| Up {
            sequence,
            body: Some(UpBody::Step(Step {
                number,
                outputs: outputs
                    .into_iter()
                    .map(|(request, at, tokens)| Output {
                        request,
                        at,
                        tokens: tokens.into_iter().map(|id| Token { id, logprobs: None }).collect(),
                        finish: Some(Finish {
                            reason: FinishReason::Stop as i32,
                            stop_token: Some(7),
                            ..Default::default()
                        }),
                        cached_tokens: Some(32),
                        vector: vec![0.5, -0.0],
                        ..Default::default()
                    })
                    .collect(),
                state: Some(EngineState { running: 3, queue_seconds: 0.25, ..Default::default() }),
                kv: vec![KvEvent {
                    stored: vec![vec![9; 16]],
                    removed: vec![],
                    cleared: false,
                    tier: 2,
                    parent: vec![7; 16],
                }],
                accepted: 5,
                batch: Some(Batch { prefill_tokens: 9, prefill_context: 0.5, ..Default::default() }),
            })),
        })
}

/// Feeds `bytes` in pieces that end at `cuts` and returns the decoded messages.
fn feed<M: prost::Message + Default>(bytes: &[u8], cuts: impl Iterator<Item = usize>) -> Vec<M> {
    let (mut input, mut out, mut from) = (BytesMut::new(), Vec::new(), 0);
    for cut in cuts.chain([bytes.len()]) {
        input.put_slice(&bytes[from..cut]);
        from = cut;
        while let Some(message) = decode(&mut input).expect("our own frames decode") {
            out.push(message);
        }
    }
    assert!(input.is_empty(), "nothing is left over");
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn frames_survive_a_cut_at_every_byte(a in generate(), b in generate()) {
        let mut bytes = BytesMut::new();
        encode(&a, &mut bytes).unwrap();
        encode(&b, &mut bytes).unwrap();
        for cut in 0..=bytes.len() {
            prop_assert_eq!(feed::<Down>(&bytes, [cut].into_iter()), vec![a.clone(), b.clone()]);
        }
        prop_assert_eq!(feed::<Down>(&bytes, 0..bytes.len()), vec![a, b]);
    }

    #[test]
    fn steps_come_back_equal(frames in prop::collection::vec(step(), 1..5)) {
        let mut bytes = BytesMut::new();
        frames.iter().for_each(|frame| encode(frame, &mut bytes).unwrap());
        prop_assert_eq!(feed::<Up>(&bytes, std::iter::empty()), frames);
    }

    #[test]
    fn garbage_ends_in_an_error_or_waits_but_never_panics(garbage in prop::collection::vec(any::<u8>(), 0..2000)) {
        let mut input = BytesMut::from(&garbage[..]);
        // Each round consumes at least the four bytes of a length, so this ends.
        while let Ok(Some(_)) = decode::<Down>(&mut input) {}
        let mut input = BytesMut::from(&garbage[..]);
        while let Ok(Some(_)) = decode::<Up>(&mut input) {}
    }

    #[test]
    fn a_flipped_byte_never_panics(frame in step(), at in any::<prop::sample::Index>(), flip in 1..=255_u8) {
        let mut bytes = BytesMut::new();
        encode(&frame, &mut bytes).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        while let Ok(Some(_)) = decode::<Up>(&mut bytes) {}
    }
}

#[test]
fn an_oversized_length_is_refused_before_anything_is_buffered() {
    let mut input = BytesMut::new();
    input.put_u32_le(FRAME_BYTES_MAX as u32 + 1);
    let capacity = input.capacity();
    assert!(matches!(decode::<Down>(&mut input), Err(CodecError::TooLarge { bytes }) if bytes == FRAME_BYTES_MAX + 1));
    assert_eq!(input.capacity(), capacity);
}

#[test]
fn an_oversized_message_leaves_the_buffer_alone() {
    let huge =
        Up { sequence: 0, body: Some(UpBody::Refused(Refused { kind: 1, message: "x".repeat(FRAME_BYTES_MAX) })) };
    let mut out = BytesMut::from(&b"before"[..]);
    assert!(matches!(encode(&huge, &mut out), Err(CodecError::TooLarge { .. })));
    assert_eq!(&out[..], b"before");
}

#[test]
fn a_request_of_an_earlier_version_has_no_grammar() {
    #[derive(Clone, PartialEq, prost::Message)]
    struct EarlierGenerate {
        #[prost(uint64, tag = "1")]
        request: u64,
        #[prost(uint32, repeated, tag = "3")]
        prompt: Vec<u32>,
    }
    let mut bytes = BytesMut::new();
    encode(&EarlierGenerate { request: 3, prompt: vec![1] }, &mut bytes).unwrap();
    let generate: Generate = decode(&mut bytes).unwrap().unwrap();
    assert_eq!((generate.request, generate.grammar), (3, None));
    assert_eq!(Guide::default().kind(), GuideKind::Unknown);
}

#[test]
fn a_worker_of_an_earlier_version_has_no_adapters() {
    #[derive(Clone, PartialEq, prost::Message)]
    struct EarlierReady {
        #[prost(uint32, tag = "1")]
        version: u32,
    }
    let mut bytes = BytesMut::new();
    encode(&EarlierReady { version: 1 }, &mut bytes).unwrap();
    let ready: Ready = decode(&mut bytes).unwrap().unwrap();
    assert_eq!((ready.version, ready.adapters), (1, Vec::new()));
    let adapters = vec![LoadedAdapter { name: "sql".into(), id: vec![9; 16], key: String::new() }];
    encode(&Ready { adapters: adapters.clone(), ..Ready::default() }, &mut bytes).unwrap();
    let ready: Ready = decode(&mut bytes).unwrap().unwrap();
    assert_eq!(ready.adapters, adapters);
}

#[test]
fn fields_of_a_later_version_are_skipped() {
    #[derive(Clone, PartialEq, prost::Message)]
    struct LaterHello {
        #[prost(uint32, tag = "1")]
        version: u32,
        #[prost(uint64, tag = "2")]
        gateway: u64,
        #[prost(string, tag = "900")]
        new: String,
    }
    let mut bytes = BytesMut::new();
    encode(&LaterHello { version: 1, gateway: 7, new: "from tomorrow".into() }, &mut bytes).unwrap();
    let hello: Hello = decode(&mut bytes).unwrap().unwrap();
    assert_eq!((hello.version, hello.gateway), (1, 7));
}

#[test]
fn a_peer_may_be_held_to_smaller_frames() {
    let mut input = BytesMut::new();
    input.extend_from_slice(&1025_u32.to_le_bytes());
    let refused = decode_within::<Down>(&mut input, 1024);
    assert!(matches!(refused, Err(CodecError::TooLarge { bytes: 1025 })));
}

#[test]
fn orders_of_adapters_survive_the_wire_and_earlier_peers_pass_over_them() {
    #[derive(Clone, PartialEq, prost::Message)]
    struct EarlierDown {
        #[prost(oneof = "EarlierBody", tags = "6, 9")]
        body: Option<EarlierBody>,
    }
    #[derive(Clone, PartialEq, prost::Oneof)]
    enum EarlierBody {
        #[prost(message, tag = "6")]
        Refused(Refused),
        #[prost(message, tag = "9")]
        Prefetch(Prefetch),
    }
    #[derive(Clone, PartialEq, prost::Message)]
    struct EarlierUp {
        #[prost(uint64, tag = "1")]
        sequence: u64,
        #[prost(oneof = "EarlierBody", tags = "6")]
        body: Option<EarlierBody>,
    }
    let adapter = OrderedAdapter { name: "sql".into(), path: "/models/sql".into(), key: "0f".into() };
    let down = Down { body: Some(DownBody::Adapters(AdapterOrder { adapters: vec![adapter] })) };
    let loaded = vec![LoadedAdapter { name: "sql".into(), id: vec![9; 16], key: "0f".into() }];
    let pending = vec![PendingAdapter { name: "poem".into(), key: "1e".into(), why: "is a pickle".into() }];
    let report = AdapterReport { loaded: loaded.clone(), pending: pending.clone() };
    let up = Up { sequence: 7, body: Some(UpBody::Adapters(report)) };
    let mut bytes = BytesMut::new();
    encode(&down, &mut bytes).unwrap();
    encode(&up, &mut bytes).unwrap();
    assert_eq!(
        (decode::<Down>(&mut bytes).unwrap(), decode::<Up>(&mut bytes).unwrap()),
        (Some(down.clone()), Some(up.clone()))
    );
    encode(&down, &mut bytes).unwrap();
    encode(&up, &mut bytes).unwrap();
    assert_eq!(decode::<EarlierDown>(&mut bytes).unwrap(), Some(EarlierDown { body: None }));
    let passed_over = EarlierUp { sequence: 7, body: None };
    assert_eq!(decode::<EarlierUp>(&mut bytes).unwrap(), Some(passed_over), "the number counts, the body does not");
    let ready = Ready { adapter_orders: true, adapters: loaded, adapters_pending: pending, ..Ready::default() };
    encode(&ready, &mut bytes).unwrap();
    assert_eq!(decode::<Ready>(&mut bytes).unwrap(), Some(ready));
    assert!(!Ready::default().adapter_orders, "an earlier worker takes none");
}
