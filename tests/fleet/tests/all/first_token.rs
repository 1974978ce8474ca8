//! First token drawn by the prefill worker: it must equal the token of a single worker in every detail, be emitted
//! before the last pages have come, and be neither lost nor repeated by later events.

use penstock_fleet_tests::dial::{self, Session, Told};
use penstock_fleet_tests::{Dir, Worker, job, patient, wait_for};
use penstock_proto::codec;
use penstock_proto::frames::{
    Cancel, ChoiceStart, DownBody, Finish, FinishReason, Generate, LogitBias, Sampling, Token,
};
use penstock_proto::transfer::{Answer, AnswerBody, Ask, First, FirstToken, Welcome};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::path::Path;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;

const BINARY: &str = env!("CARGO_BIN_EXE_fleet-worker");

/// Tokens of every prompt; not a multiple of a block.
const PROMPT: u32 = 700;

fn generate(request: u64, salt: u32, choices: u32, change: impl FnOnce(&mut Sampling)) -> Generate {
    let prompt: Vec<u32> = (0..PROMPT).map(|at| 1 + (at * 7 + salt * 13) % 250).collect();
    let mut job = job(prompt, choices, 12);
    change(&mut job.sampling);
    dial::generate(request, job)
}

/// Tokens and finish of every choice.
type Answers = BTreeMap<u32, (Vec<Token>, Option<Finish>)>;

/// Runs a request and reads all of its choices.
async fn run(session: &mut Session, generate: Generate) -> Answers {
    let (request, count) = (generate.request, generate.choices.len());
    let starts: BTreeMap<u32, usize> =
        generate.choices.iter().map(|start| (start.index, start.emitted.len())).collect();
    session.say(DownBody::Generate(generate)).await;
    let mut answers = Answers::new();
    while answers.values().filter(|(_, finish)| finish.is_some()).count() < count {
        for output in session.step().await.outputs.into_iter().filter(|output| output.request == request) {
            let (tokens, finish) = answers.entry(output.choice).or_default();
            let at = starts[&output.choice] + tokens.len();
            assert!(finish.is_none() && output.at as usize == at, "exactly once, in order: {output:?}");
            tokens.extend(output.tokens);
            *finish = output.finish;
        }
    }
    answers
}

#[tokio::test]
async fn it_is_the_one_that_a_single_worker_draws() {
    let dir = Dir::new();
    let [p, d, alone] = ["p", "d", "alone"].map(|name| Worker::start(BINARY, &dir, name, &[]));
    let (mut p, mut d, mut alone) = (Session::with(&p).await, Session::with(&d).await, Session::with(&alone).await);
    let prefill_at = p.ready.transfer.clone();
    let sampled = run(&mut alone, generate(100, 0, 3, |_| {})).await;
    let firsts: Vec<u32> = sampled.values().map(|(tokens, _)| tokens[0].id).collect();
    let biased = LogitBias { token: 77, bias: 40.0 };
    let cases: Vec<(&str, Generate)> = vec![
        ("greedy", generate(1, 1, 1, |s| s.temperature = 0.0)),
        ("sampled", generate(2, 2, 1, |s| (s.top_p, s.seed) = (0.9, 5))),
        ("penalties", generate(3, 3, 1, |s| (s.repetition_penalty, s.frequency_penalty) = (1.3, 0.7))),
        ("bias", generate(4, 4, 1, |s| s.logit_bias.push(biased))),
        ("allowed", generate(5, 5, 2, |s| s.allowed_tokens = (1..250).step_by(3).collect())),
        ("choices", generate(6, 6, 3, |_| {})),
        ("logprobs", generate(7, 7, 2, |s| s.logprobs = 4)),
        ("logprobs of the token alone", generate(8, 8, 1, |s| s.logprobs = 0)),
        ("one token", generate(9, 9, 1, |s| s.max_tokens = 1)),
        ("one token of each", generate(10, 10, 3, |s| s.max_tokens = 1)),
        ("stops at the first", generate(11, 0, 1, |s| s.stop_tokens = vec![firsts[0]])),
        ("one of three stops at the first", generate(12, 0, 3, |s| s.stop_tokens = vec![firsts[1]])),
        ("may not stop at the first", generate(13, 0, 1, |s| (s.stop_tokens, s.min_tokens) = (vec![firsts[0]], 3))),
    ];
    let mut drawn = 0;
    for (what, mut one) in cases {
        // A salt of its own: no worker has the blocks.
        one.salt = what.as_bytes().to_vec();
        let whole = run(&mut alone, one.clone()).await;
        drawn += one.choices.len() as u64;
        let moved = run(&mut d, Generate { prefill_at: prefill_at.clone(), ..one }).await;
        assert_eq!(moved, whole, "{what}");
        p.idle().await;
        d.idle().await;
        let state = d.step().await.state.expect("always there");
        assert_eq!(state.transfers.expect("told").first_tokens, drawn, "{what}: all first tokens came from there");
    }
    let states = [p.step().await.state.expect("state"), d.step().await.state.expect("state")];
    assert_eq!(states[0].output_tokens, 0, "who says a token counts it");
    let (said, asked) = (states[1].output_tokens, alone.step().await.state.expect("state").output_tokens);
    assert_eq!(said, asked - sampled.values().map(|(tokens, _)| tokens.len() as u64).sum::<u64>());
}

#[tokio::test]
async fn a_request_that_goes_on_gets_its_next_token_from_there() {
    let dir = Dir::new();
    let [p, d, alone] = ["p", "d", "alone"].map(|name| Worker::start(BINARY, &dir, name, &[]));
    let (p, mut d, mut alone) = (Session::with(&p).await, Session::with(&d).await, Session::with(&alone).await);
    let prefill_at = p.ready.transfer.clone();
    let one = generate(1, 1, 1, |s| (s.max_tokens, s.repetition_penalty) = (90, 1.2));
    let whole = run(&mut alone, one.clone()).await;
    let ids: Vec<u32> = whole[&0].0.iter().map(|token| token.id).collect();
    for (request, emitted) in [(2, 3), (3, 50), (4, 89)] {
        let start = ChoiceStart { index: 0, emitted: ids[..emitted].to_vec() };
        let salt = vec![request as u8];
        let rest =
            Generate { request, attempt: 1, choices: vec![start], prefill_at: prefill_at.clone(), salt, ..one.clone() };
        assert_eq!(run(&mut d, rest).await[&0].0, whole[&0].0[emitted..], "after {emitted}");
    }
    assert_eq!(d.step().await.state.expect("state").transfers.expect("told").first_tokens, 3);
    // Choices with different earlier tokens: each draws its own.
    let two = Generate { choices: (0..2).map(|index| ChoiceStart { index, emitted: vec![] }).collect(), ..one.clone() };
    let whole = run(&mut alone, Generate { request: 5, ..two.clone() }).await;
    let ids = |choice, count: usize| whole[&choice].0[..count].iter().map(|token| token.id).collect();
    let choices = vec![ChoiceStart { index: 0, emitted: ids(0, 9) }, ChoiceStart { index: 1, emitted: ids(1, 4) }];
    let rest = Generate { request: 5, choices, prefill_at, salt: b"two".to_vec(), ..two };
    let moved = run(&mut d, rest).await;
    assert_eq!((&moved[&0].0[..], &moved[&1].0[..]), (&whole[&0].0[9..], &whole[&1].0[4..]));
    assert_eq!(d.step().await.state.expect("state").transfers.expect("told").first_tokens, 3);
}

#[tokio::test]
async fn a_reader_of_one_token_at_a_time_loses_none() {
    let dir = Dir::new();
    let [p, d, alone] = ["p", "d", "alone"].map(|name| Worker::start(BINARY, &dir, name, &[]));
    let (p, mut d, mut alone) = (Session::with(&p).await, Session::with(&d).await, Session::with(&alone).await);
    for window in [1, 2] {
        let one = Generate { window, ..generate(u64::from(window), window, 1, |_| {}) };
        let whole = run(&mut alone, Generate { window: 0, ..one.clone() }).await;
        d.say(DownBody::Generate(Generate { prefill_at: p.ready.transfer.clone(), ..one.clone() })).await;
        let mut told = Told::default();
        for tokens in window as usize..12 {
            d.read(one.request, &mut told, tokens).await;
            assert_eq!(told.tokens.len(), tokens, "the window is kept");
            let more = penstock_proto::frames::Window { request: one.request, choice: 0, tokens: 1 };
            d.say(DownBody::Window(more)).await;
        }
        d.read(one.request, &mut told, usize::MAX).await;
        assert_eq!(told.tokens, whole[&0].0.iter().map(|token| token.id).collect::<Vec<_>>());
    }
}

/// A holder that draws the first token, sends it, and then is silent until the connection is closed.
async fn slow_holder(path: &Path, first: u32, cached_tokens: u32) -> String {
    let listener = UnixListener::bind(path).expect("a socket");
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("the worker asks");
        let (mut bytes, mut asked) = (bytes::BytesMut::new(), bytes::BytesMut::new());
        while codec::decode::<Ask>(&mut asked).expect("asks").is_none() {
            stream.read_buf(&mut asked).await.expect("it greets");
        }
        let tokens = vec![FirstToken { choice: 0, token: Some(Token { id: first, logprobs: None }) }];
        let first = AnswerBody::First(First { tokens, cached_tokens, ..First::default() });
        for answer in [AnswerBody::Welcome(Welcome { version: 1, slots: 0 }), first] {
            codec::encode(&Answer { body: Some(answer) }, &mut bytes).expect("small");
        }
        stream.write_all(&bytes).await.expect("it reads");
        while stream.read_buf(&mut asked).await.is_ok_and(|read| read > 0) {}
    });
    format!("unix://{}", path.display())
}

#[tokio::test]
async fn it_is_said_before_the_blocks_are_there_and_the_rest_follows() {
    let dir = Dir::new();
    let [d, alone] = ["d", "alone"].map(|name| Worker::start(BINARY, &dir, name, &[]));
    let (mut d, mut alone) = (Session::with(&d).await, Session::with(&alone).await);
    let one = generate(1, 1, 1, |_| {});
    let whole = alone.run(one.clone()).await;
    let prefill_at = slow_holder(&dir.file("slow.sock"), whole.tokens[0], 64).await;
    d.say(DownBody::Generate(Generate { prefill_at, ..one.clone() })).await;
    let said = d.until(|step| !step.outputs.is_empty()).await;
    let (output, state) = (&said.outputs[0], said.state.as_ref().expect("always there"));
    assert_eq!((output.at, output.tokens[0].id, output.cached_tokens), (0, whole.tokens[0], Some(64)));
    assert_eq!((state.running, state.waiting), (0, 1), "it waits for its blocks");
    // The holder is silent: the missing blocks are computed.
    let mut told = Told { tokens: vec![whole.tokens[0]], ..Told::default() };
    d.read(1, &mut told, usize::MAX).await;
    assert_eq!(told.tokens, whole.tokens);
    d.idle().await;
    // Stopped while it waits: the emitted token counts.
    let prefill_at = slow_holder(&dir.file("slower.sock"), whole.tokens[0], 0).await;
    d.say(DownBody::Generate(Generate { request: 2, salt: b"u".to_vec(), prefill_at, ..one })).await;
    d.until(|step| !step.outputs.is_empty()).await;
    d.say(DownBody::Cancel(Cancel { request: 2, choices: Vec::new() })).await;
    let end = d.until(|step| step.outputs.iter().any(|output| output.finish.is_some())).await;
    let finish = end.outputs[0].finish.as_ref().expect("it was looked for");
    assert_eq!((finish.reason, end.outputs[0].at), (FinishReason::Cancelled as i32, 1));
    d.idle().await;
}

#[tokio::test]
async fn in_a_pool_it_comes_from_the_prefill_worker_also_when_that_dies_with_it() {
    let dir = Dir::new();
    let runtime = penstock_pool::FleetRuntime::start().expect("the fleet runtime starts");
    let p = Worker::start(BINARY, &dir, "p", &["--step-ms", "5", "--role", "prefill"]);
    let d = Worker::start(BINARY, &dir, "d", &["--step-ms", "5", "--role", "decode"]);
    let alone = Worker::start(BINARY, &dir, "alone", &[]);
    let pool = penstock_fleet_tests::pool(&runtime, &[&p, &d], patient);
    let ready = || (pool.status().workers.iter().filter(|worker| worker.pid > 0).count() == 2).then_some(());
    assert!(wait_for(ready).await.is_some());
    let prompt: Vec<u32> = (0..3000).map(|at| 1 + at * 11 % 250).collect();
    let asked = job(prompt, 2, 40);
    let single = penstock_fleet_tests::pool(&runtime, &[&alone], patient);
    let whole = penstock_fleet_tests::read(&mut single.submit(asked.clone()).expect("taken")).await;
    let mut ticket = pool.submit(asked).expect("taken");
    let mut answer = penstock_fleet_tests::Answer::default();
    penstock_fleet_tests::read_into(&mut ticket, &mut answer, 1).await;
    p.signal(Signal::KILL);
    penstock_fleet_tests::read_into(&mut ticket, &mut answer, usize::MAX).await;
    assert_eq!((&answer.tokens, &answer.failed, &answer.resumed), (&whole.tokens, &None, &vec![]));
    let firsts = || {
        let transfers = pool.status().workers[1].state.transfers?;
        (transfers.first_tokens == 2).then_some(())
    };
    assert!(wait_for(firsts).await.is_some(), "{:?}", pool.status().workers[1].state);
}
