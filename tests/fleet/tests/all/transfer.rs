//! KV between workers: fetched by hash, or computed elsewhere. A wrong page would change every token after it.

use penstock_fleet_tests::dial::{self, Session, Told};
use penstock_fleet_tests::relay::Relay;
use penstock_fleet_tests::{Dir, Worker, job, wait_for};
use penstock_proto::frames::{Cancel, ChoiceStart, DownBody, FinishReason, Generate, Pull, Step, Token};
use penstock_proto::transfer::{
    Answer, AnswerBody, Ask, AskBody, Computed, End, Fetch, First, FirstToken, Greeting, Page, Taken, Welcome,
};
use penstock_proto::{BlockHash, BlockHasher, codec};
use penstock_sim::PAGE_BYTES;
use rustix::process::Signal;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;

const BINARY: &str = env!("CARGO_BIN_EXE_fleet-worker");

fn prompt(tokens: u32, salt: u32) -> Vec<u32> {
    (0..tokens).map(|at| 1 + (at * 7 + salt) % 250).collect()
}

fn generate(request: u64, prompt: &[u32], tokens: u32) -> Generate {
    dial::generate(request, job(prompt, 1, tokens))
}

fn chain(prompt: &[u32]) -> Vec<BlockHash> {
    BlockHasher::for_request(b"t", "fake").chain(prompt)
}

fn pull(from: &str, prompt: &[u32]) -> Pull {
    let hashes = chain(prompt).into_iter().map(|hash| hash.to_bytes().to_vec()).collect();
    Pull { id: 5, from: from.to_owned(), hashes, deadline_seconds: 20.0 }
}

fn worker(dir: &Dir, name: &str, args: &[&str]) -> Worker {
    Worker::start(BINARY, dir, name, args)
}

/// Answer of a fresh worker.
async fn alone(dir: &Dir, prompt: &[u32], tokens: u32) -> Told {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let worker = worker(dir, &format!("alone{}", NEXT.fetch_add(1, Ordering::Relaxed)), &[]);
    Session::with(&worker).await.run(generate(1, prompt, tokens)).await
}

#[tokio::test]
async fn blocks_are_fetched_and_read() {
    let dir = Dir::new();
    let [a, b] = ["a", "b"].map(|name| worker(&dir, name, &[]));
    let (mut a, mut b) = (Session::with(&a).await, Session::with(&b).await);
    let prompt = prompt(330, 0);
    let first = a.run(generate(1, &prompt, 20)).await;
    assert_eq!((first.tokens.len(), first.cached), (20, 0));
    let from = a.ready.transfer.clone();
    let pulled = b.pull(pull(&from, &prompt)).await;
    assert_eq!((pulled.id, pulled.blocks, pulled.bytes, pulled.why.as_str()), (5, 10, 10 * PAGE_BYTES as u64, ""));
    let second = b.run(generate(1, &prompt, 20)).await;
    assert_eq!((second.tokens, second.cached), (first.tokens, 320));
    // Present blocks are not fetched again; a chain that goes on is fetched from the first difference.
    let again = b.pull(pull(&from, &prompt)).await;
    assert_eq!((again.blocks, again.bytes), (10, 0));
    for session in [&mut a, &mut b] {
        session.idle().await;
    }
    let state = b.step().await.state.expect("always there").transfers.expect("told");
    assert_eq!((state.completed, state.failed, state.bytes_in), (1, 0, pulled.bytes));
    assert_eq!(state.memory_bytes, pulled.bytes, "both map the memory");
    assert_eq!((state.moved_bytes, state.prefill_seconds), (9 * PAGE_BYTES as u64, 0.0));
}

#[tokio::test]
async fn where_no_memory_can_be_shared_bytes_go_through_the_socket() {
    let dir = Dir::new();
    let [a, b] = ["a", "b"].map(|name| worker(&dir, name, &[]));
    let (mut a, mut b) = (Session::with(&a).await, Session::with(&b).await);
    let prompt = prompt(1700, 0);
    let whole = a.run(generate(1, &prompt, 20)).await;
    // The relay carries bytes, and loses the descriptor beside them.
    let path = a.ready.transfer.strip_prefix("unix://").expect("a socket file").to_owned();
    let _relay = Relay::before(Path::new(&path));
    let pulled = b.pull(pull(&a.ready.transfer, &prompt)).await;
    assert_eq!((pulled.blocks, pulled.why.as_str()), (53, ""));
    let moved = b.run(generate(1, &prompt, 20)).await;
    assert_eq!((moved.tokens, moved.cached), (whole.tokens, 1696));
    let state = b.step().await.state.expect("always there").transfers.expect("told");
    assert_eq!((state.bytes_in, state.memory_bytes), (pulled.bytes, 0));
}

/// An asker under the test's control, which may lie about memory.
struct Asker {
    stream: tokio::net::UnixStream,
    read: bytes::BytesMut,
}

impl Asker {
    async fn greet(transfer: &str, block_bytes: usize) -> Self {
        let path = transfer.strip_prefix("unix://").expect("a socket file");
        let stream = tokio::net::UnixStream::connect(path).await.expect("it listens");
        let mut asker = Self { stream, read: bytes::BytesMut::new() };
        let greeting = Greeting {
            version: 1,
            numerics_id: "fake".into(),
            block_bytes: block_bytes as u64,
            maps_memory: true,
            ..Greeting::default()
        };
        asker.say(AskBody::Greeting(greeting)).await;
        let Some(AnswerBody::Welcome(welcome)) = asker.next().await else { panic!("no welcome") };
        assert!(welcome.slots > 1);
        asker
    }

    async fn say(&mut self, body: AskBody) {
        let mut bytes = bytes::BytesMut::new();
        codec::encode(&Ask { body: Some(body), through_memory: true }, &mut bytes).expect("small");
        // Err: the connection is closed, which the next read shows.
        let _ = self.stream.write_all(&bytes).await;
    }

    /// Reads the next frame; `None` if the connection is closed.
    async fn next(&mut self) -> Option<AnswerBody> {
        loop {
            if let Some(answer) = codec::decode::<Answer>(&mut self.read).expect("our own") {
                return answer.body;
            }
            let read = tokio::time::timeout(penstock_fleet_tests::PATIENCE, self.stream.read_buf(&mut self.read));
            if !read.await.expect("in time").is_ok_and(|read| read > 0) {
                return None;
            }
        }
    }

    async fn fetch(transfer: &str, prompt: &[u32]) -> Self {
        let mut asker = Self::greet(transfer, PAGE_BYTES).await;
        let hashes = chain(prompt).into_iter().map(|hash| hash.to_bytes().to_vec()).collect();
        asker.say(AskBody::Fetch(Fetch { hashes })).await;
        asker
    }

    /// Reads all pages and returns their slots, until the connection ends.
    async fn read_all(mut self) -> Vec<u32> {
        let mut slots = Vec::new();
        while let Some(answer) = self.next().await {
            if let AnswerBody::Page(page) = answer {
                slots.extend(page.slot);
            }
        }
        slots
    }
}

#[tokio::test]
async fn who_takes_no_pages_keeps_no_place() {
    let dir = Dir::new();
    let [a, b] = ["a", "b"].map(|name| worker(&dir, name, &[]));
    let (mut a, mut b) = (Session::with(&a).await, Session::with(&b).await);
    let prompt = prompt(1700, 0);
    a.run(generate(1, &prompt, 1)).await;
    let from = a.ready.transfer.clone();
    // As many askers as there are places: each reads all frames, and returns no slot.
    let mut askers = tokio::task::JoinSet::new();
    for _ in 0..64 {
        let asker = Asker::fetch(&from, &prompt).await;
        askers.spawn(asker.read_all());
    }
    let refused = b.pull(pull(&from, &prompt)).await;
    assert!(refused.blocks == 0 && refused.why.contains("too many"), "{refused:?}");
    while let Some(slots) = askers.join_next().await {
        let mut slots = slots.expect("it reads");
        slots.sort_unstable();
        assert!(
            slots.len() < 53 && slots.windows(2).all(|pair| pair[0] < pair[1]),
            "none was written twice: {slots:?}"
        );
    }
    let pulled = b.pull(pull(&from, &prompt)).await;
    assert_eq!((pulled.blocks, pulled.why.as_str()), (53, ""));
    a.idle().await;
}

#[tokio::test]
async fn slots_that_nobody_has_are_not_given_back() {
    let dir = Dir::new();
    let a = worker(&dir, "a", &[]);
    let mut a = Session::with(&a).await;
    let prompt = prompt(1700, 0);
    a.run(generate(1, &prompt, 1)).await;
    for slots in [vec![u32::MAX], vec![0, 0]] {
        let mut asker = Asker::fetch(&a.ready.transfer, &prompt).await;
        while !matches!(asker.next().await, Some(AnswerBody::Page(_))) {}
        asker.say(AskBody::Taken(Taken { slots })).await;
        assert!(asker.read_all().await.len() < 53, "it is shown the door");
    }
    a.idle().await;
}

#[tokio::test]
async fn who_loses_its_prefill_worker_asks_the_next_for_the_rest() {
    let dir = Dir::new();
    let prompt = prompt(3000, 1);
    let whole = alone(&dir, &prompt, 25).await.tokens;
    for (name, signal, few) in [("k", Signal::KILL, 512), ("s", Signal::STOP, 512), ("f", Signal::KILL, 100_000)] {
        let [p, q] = ["p", "q"].map(|role| worker(&dir, &format!("{role}{name}"), &["--step-ms", "250"]));
        let d = worker(&dir, &format!("d{name}"), &[]);
        let (mut first, mut next, mut d) = (Session::with(&p).await, Session::with(&q).await, Session::with(&d).await);
        let asked = Generate {
            prefill_at: first.ready.transfer.clone(),
            prefill_next: vec![next.ready.transfer.clone()],
            prefill_next_tokens: few,
            ..generate(1, &prompt, 25)
        };
        d.say(DownBody::Generate(asked)).await;
        first.until(|step| bytes_out(step) > 20 * PAGE_BYTES as u64).await;
        p.signal(signal);
        let mut told = Told::default();
        d.read(1, &mut told, usize::MAX).await;
        assert_eq!(told.tokens, whole, "{name}");
        d.idle().await;
        p.signal(Signal::CONT);
        let came = d.step().await.state.expect("always there").transfers.expect("told");
        let has_sent = |step: &Step| bytes_out(step) > 0 && step.state.as_ref().is_some_and(|state| state.running == 0);
        if few == 512 {
            let sent = bytes_out(&next.until(has_sent).await);
            assert!(sent < 93 * PAGE_BYTES as u64, "{name}: only what was missing: {sent}");
            assert_eq!((came.completed, came.failed), (1, 1), "{name}");
        } else {
            assert_eq!((came.completed, came.failed), (0, 1), "{name}: it is not worth it");
        }
    }
}

fn bytes_out(step: &Step) -> u64 {
    step.state.as_ref().and_then(|state| state.transfers).map_or(0, |transfers| transfers.bytes_out)
}

#[tokio::test]
async fn a_pool_names_another_prefill_worker() {
    let dir = Dir::new();
    let runtime = penstock_pool::FleetRuntime::start().expect("the fleet runtime starts");
    let start = |name: &str, role: &str| worker(&dir, name, &["--step-ms", "250", "--role", role]);
    let workers = [start("p", "prefill"), start("q", "prefill"), start("d", "decode")];
    let pool = penstock_fleet_tests::pool(&runtime, &workers.each_ref(), |_| {});
    let ready = || (pool.status().workers.iter().filter(|worker| worker.pid > 0).count() == 3).then_some(());
    assert!(wait_for(ready).await.is_some());
    let prompt = prompt(3000, 5);
    let mut ticket = pool.submit(job(prompt.clone(), 1, 6)).expect("taken");
    let sent = |worker: &penstock_pool::WorkerStatus| {
        worker.state.transfers.map_or(0, |transfers| transfers.bytes_out) / PAGE_BYTES as u64
    };
    let busy = || pool.status().workers.iter().position(|worker| sent(worker) > 20);
    let busy = wait_for(busy).await.expect("one of them computes");
    workers[busy].signal(Signal::KILL);
    let answer = penstock_fleet_tests::read(&mut ticket).await;
    assert_eq!((&answer.tokens[0], &answer.failed), (&alone(&dir, &prompt, 6).await.tokens, &None));
    let other = || (1..93).contains(&sent(&pool.status().workers[1 - busy])).then_some(());
    assert!(busy < 2 && wait_for(other).await.is_some(), "{:?}", pool.status().workers);
}

#[tokio::test]
async fn what_the_other_lacks_is_said() {
    let dir = Dir::new();
    let [a, b] = ["a", "b"].map(|name| worker(&dir, name, &[]));
    let (mut a, mut b) = (Session::with(&a).await, Session::with(&b).await);
    let prompt = prompt(330, 0);
    a.run(generate(1, &prompt[..100], 1)).await;
    let pulled = b.pull(pull(&a.ready.transfer, &prompt)).await;
    assert!(pulled.blocks == 3 && pulled.why.contains('3'), "{pulled:?}");
    let nobody = b.pull(pull(&format!("unix://{}", dir.file("nobody.sock").display()), &prompt)).await;
    assert!(nobody.blocks == 3 && !nobody.why.is_empty(), "{nobody:?}");
    b.idle().await;
}

#[tokio::test]
async fn a_request_waits_for_its_pull_and_goes_on() {
    let dir = Dir::new();
    let [a, b] = ["a", "b"].map(|name| worker(&dir, name, &[]));
    let (mut a, mut b) = (Session::with(&a).await, Session::with(&b).await);
    let prompt = prompt(500, 3);
    let whole = a.run(generate(1, &prompt, 90)).await;
    let from = a.ready.transfer.clone();
    let moved = b.run(Generate { pull_from: from.clone(), ..generate(1, &prompt, 90) }).await;
    assert_eq!((moved.tokens.as_slice(), moved.cached), (whole.tokens.as_slice(), 480));
    // In the middle of an answer: the emitted tokens count, and their blocks too.
    let c = worker(&dir, "c", &[]);
    let mut c = Session::with(&c).await;
    let mut rest = Generate { pull_from: from, attempt: 1, ..generate(2, &prompt, 90) };
    rest.choices[0].emitted = whole.tokens[..70].to_vec();
    c.say(DownBody::Generate(rest)).await;
    let mut told = Told { tokens: whole.tokens[..70].to_vec(), ..Told::default() };
    c.read(2, &mut told, usize::MAX).await;
    assert_eq!(told.tokens, whole.tokens);
    let state = c.step().await.state.expect("always there");
    assert_eq!(state.transfers.expect("told").bytes_in, 17 * PAGE_BYTES as u64);
    // A holder that does not answer: the blocks are computed.
    let nobody = format!("unix://{}", dir.file("nobody.sock").display());
    let other = worker(&dir, "d", &[]);
    let computed = Session::with(&other).await.run(Generate { pull_from: nobody, ..generate(1, &prompt, 90) }).await;
    assert_eq!((computed.tokens, computed.cached), (whole.tokens, 0));
}

#[tokio::test]
async fn a_prefill_elsewhere_changes_no_token() {
    let dir = Dir::new();
    let [p, d] = ["p", "d"].map(|name| worker(&dir, name, &["--step-ms", "5"]));
    let (mut p, mut d) = (Session::with(&p).await, Session::with(&d).await);
    let prefill_at = p.ready.transfer.clone();
    // Across chunks, to the last token of a block and beside it, with and without hits at either end.
    for (number, tokens, salt, cached) in
        [(1, 1700, 1, 0), (2, 64, 2, 0), (3, 65, 3, 0), (4, 1700, 1, 1696), (5, 31, 4, 0), (6, 33, 5, 0)]
    {
        let prompt = prompt(tokens, salt);
        let whole = alone(&dir, &prompt, 40).await;
        let told = d.run(Generate { prefill_at: prefill_at.clone(), ..generate(number, &prompt, 40) }).await;
        assert_eq!((told.tokens, told.cached), (whole.tokens, cached), "{tokens} tokens");
    }
    // Choices share the received blocks.
    let prompt = prompt(700, 9);
    let three = (0..3).map(|index| ChoiceStart { index, emitted: Vec::new() }).collect();
    let told = d.run(Generate { prefill_at, choices: three, ..generate(9, &prompt, 30) }).await;
    assert_eq!(told.tokens, alone(&dir, &prompt, 30).await.tokens);
    d.idle().await;
    p.idle().await;
    let (p, d) = (p.step().await.state.expect("state"), d.step().await.state.expect("state"));
    let (out, came) = (p.transfers.expect("told"), d.transfers.expect("told"));
    // The last report may be older than the last page.
    assert!(out.bytes_out > 0 && out.bytes_out <= came.bytes_in);
    // Four prompts were computed there, and the one with three choices.
    assert_eq!((came.failed, p.output_tokens, came.first_tokens), (0, 0, 7));
    assert!(came.hidden_seconds > 0.0 && came.hidden_seconds <= came.prefill_seconds, "{came:?}");
    assert_eq!(came.prefill_seconds, came.seconds, "nothing was fetched");
}

#[tokio::test]
async fn the_death_of_the_prefill_worker_costs_time_only() {
    let dir = Dir::new();
    for (name, signal) in [("k", Signal::KILL), ("s", Signal::STOP)] {
        let p = worker(&dir, &format!("p{name}"), &["--step-ms", "60"]);
        let d = worker(&dir, &format!("d{name}"), &[]);
        let mut d = Session::with(&d).await;
        let prefill_at = Session::with(&p).await.ready.transfer.clone();
        let prompt = prompt(3000, 1);
        d.say(DownBody::Generate(Generate { prefill_at, ..generate(1, &prompt, 25) })).await;
        // A part has come.
        d.until(|step| {
            let state = step.state.as_ref().expect("always there");
            state.transfers.is_some() && state.waiting == 1
        })
        .await;
        p.signal(signal);
        let mut told = Told::default();
        d.read(1, &mut told, usize::MAX).await;
        assert_eq!(told.tokens, alone(&dir, &prompt, 25).await.tokens);
        d.idle().await;
        p.signal(Signal::CONT);
    }
}

#[tokio::test]
async fn who_is_not_needed_any_more_stops() {
    let dir = Dir::new();
    let p = worker(&dir, "p", &["--step-ms", "50"]);
    let d = worker(&dir, "d", &[]);
    let (mut p, mut session) = (Session::with(&p).await, Session::with(&d).await);
    let runs = |step: &Step| step.state.as_ref().is_some_and(|state| state.running > 0);
    let slow = |number| Generate { prefill_at: p.ready.transfer.clone(), ..generate(number, &prompt(3500, 1), 25) };
    let (first, second) = (slow(1), slow(2));
    // Case: cancelled.
    session.say(DownBody::Generate(first)).await;
    p.until(runs).await;
    session.say(DownBody::Cancel(Cancel { request: 1, choices: Vec::new() })).await;
    let mut told = Told::default();
    session.read(1, &mut told, usize::MAX).await;
    assert_eq!((told.tokens.len(), told.reason), (0, FinishReason::Cancelled as i32));
    p.idle().await;
    session.idle().await;
    // Case: dead.
    session.say(DownBody::Generate(second)).await;
    p.until(runs).await;
    d.signal(Signal::KILL);
    p.idle().await;
}

#[tokio::test]
async fn a_pool_with_roles_computes_long_prompts_apart() {
    let dir = Dir::new();
    let runtime = penstock_pool::FleetRuntime::start().expect("the fleet runtime starts");
    let p = worker(&dir, "p", &["--step-ms", "5", "--role", "prefill"]);
    let d = worker(&dir, "d", &["--step-ms", "5", "--role", "decode"]);
    let pool = penstock_fleet_tests::pool(&runtime, &[&p, &d], |_| {});
    let ready = || (pool.status().workers.iter().filter(|worker| worker.pid > 0).count() == 2).then_some(());
    assert!(wait_for(ready).await.is_some());
    for (tokens, salt, apart) in [(3000, 1, 1), (40, 2, 1), (2000, 3, 2)] {
        let prompt = prompt(tokens, salt);
        let answer = penstock_fleet_tests::read(&mut pool.submit(job(prompt.clone(), 2, 40)).expect("taken")).await;
        let whole = alone(&dir, &prompt, 40).await;
        assert_eq!((&answer.tokens[0], &answer.failed), (&whole.tokens, &None), "{tokens} tokens");
        let told = || (pool.status().counts.prefilled_apart == apart).then_some(());
        assert!(wait_for(told).await.is_some(), "{tokens} tokens: {:?}", pool.status().counts);
    }
    let moved = || {
        let status = pool.status();
        let [p, d] = [0, 1].map(|at| status.workers[at].state.clone());
        let bytes = d.transfers.filter(|transfers| transfers.completed == 2)?.bytes_in;
        (p.output_tokens == 0 && bytes == 155 * PAGE_BYTES as u64).then_some(())
    };
    assert!(wait_for(moved).await.is_some(), "{:?}", pool.status().workers);
    // Without its prefill worker it computes everything.
    p.signal(Signal::KILL);
    let prompt = prompt(2500, 77);
    let answer = penstock_fleet_tests::read(&mut pool.submit(job(prompt.clone(), 1, 40)).expect("taken")).await;
    assert_eq!(answer.tokens[0], alone(&dir, &prompt, 40).await.tokens);
}

/// A holder that sends the given answers, whatever is asked.
async fn liar(path: &Path, answers: Vec<AnswerBody>) -> String {
    let listener = UnixListener::bind(path).expect("a socket");
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("the worker asks");
        let mut bytes = bytes::BytesMut::new();
        let mut asked = bytes::BytesMut::new();
        let welcome = AnswerBody::Welcome(Welcome { version: 1, slots: 0 });
        codec::encode(&Answer { body: Some(welcome) }, &mut bytes).expect("small");
        while codec::decode::<Ask>(&mut asked).expect("asks").is_none() {
            stream.read_buf(&mut asked).await.expect("it greets");
        }
        for answer in answers {
            codec::encode(&Answer { body: Some(answer) }, &mut bytes).expect("small");
        }
        stream.write_all(&bytes).await.expect("it reads");
        // Until it has read enough.
        while stream.read_buf(&mut asked).await.is_ok_and(|read| read > 0) {}
    });
    format!("unix://{}", path.display())
}

#[tokio::test]
async fn a_lying_holder_is_not_believed() {
    let dir = Dir::new();
    let d = worker(&dir, "d", &[]);
    let mut d = Session::with(&d).await;
    let prompt = prompt(200, 8);
    let whole = alone(&dir, &prompt, 20).await;
    let page = |block, layer, fill| Page::new(block, layer, vec![fill; PAGE_BYTES].into());
    let mut damaged = page(0, 0, 1);
    damaged.bytes = vec![2; PAGE_BYTES].into();
    let end = |blocks| AnswerBody::End(End { blocks, complete: true });
    let first = |choice, id| {
        let tokens = vec![FirstToken { choice, token: Some(Token { id, logprobs: None }) }];
        AnswerBody::First(First { tokens, cached_tokens: u32::MAX, ..First::default() })
    };
    let lies: Vec<Vec<AnswerBody>> = vec![
        // Damaged, misplaced, of another size, duplicate, never vouched for, vouched for and never sent.
        vec![AnswerBody::Page(damaged), end(6)],
        vec![AnswerBody::Page(page(6, 0, 1)), end(6)],
        vec![AnswerBody::Page(page(0, 1, 1)), end(6)],
        vec![AnswerBody::Page(Page::new(0, 0, vec![1; 5].into())), end(6)],
        // In a slot of memory that was never sent.
        vec![AnswerBody::Page(Page::in_slot(0, 0, 0, &[1; PAGE_BYTES])), end(6)],
        vec![AnswerBody::Page(page(0, 0, 1)), end(0)],
        vec![AnswerBody::Computed(Computed { blocks: 6 }), end(6)],
        vec![AnswerBody::Computed(Computed { blocks: u32::MAX }), end(u32::MAX)],
        vec![AnswerBody::Welcome(Welcome { version: 1, slots: 0 })],
        // A token of another choice, an invalid one, none, and another one after the right one.
        vec![first(1, whole.tokens[0]), end(0)],
        vec![first(0, 256), end(0)],
        vec![AnswerBody::First(First::default()), end(0)],
        vec![first(0, whole.tokens[0]), first(0, 9), end(0)],
        vec![],
    ];
    for (number, answers) in (1..).zip(lies) {
        let prefill_at = liar(&dir.file(&format!("liar{number}.sock")), answers).await;
        let told = d.run(Generate { prefill_at, ..generate(number, &prompt, 20) }).await;
        assert_eq!(told.tokens, whole.tokens, "lie {number}");
        d.idle().await;
        // The next request finds nothing in the cache.
        let prompts = self::prompt(4000, number as u32);
        for _ in 0..9 {
            d.run(generate(100 + number, &prompts, 1)).await;
        }
    }
}

#[tokio::test]
async fn other_numerics_send_nothing() {
    let dir = Dir::new();
    let a = worker(&dir, "a", &["--numerics", "other"]);
    let b = worker(&dir, "b", &[]);
    let (a, mut b) = (Session::with(&a).await, Session::with(&b).await);
    let pulled = b.pull(pull(&a.ready.transfer, &prompt(100, 0))).await;
    assert!(pulled.blocks == 0 && pulled.why.contains("numerics"), "{pulled:?}");
}

#[tokio::test]
async fn a_transfer_socket_is_private_and_shrugs_at_garbage() {
    use std::os::unix::fs::PermissionsExt;
    let dir = Dir::new();
    let a = worker(&dir, "a", &[]);
    let mut session = Session::with(&a).await;
    let path = session.ready.transfer.strip_prefix("unix://").expect("a socket file").to_owned();
    assert_eq!(std::fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    for garbage in [b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0xff; 64], vec![4, 0, 0, 0, 9, 9, 9, 9]] {
        let mut stream = tokio::net::UnixStream::connect(&path).await.expect("it listens");
        stream.write_all(&garbage).await.expect("written");
        let mut rest = Vec::new();
        assert!(tokio::time::timeout(penstock_fleet_tests::PATIENCE, stream.read_to_end(&mut rest)).await.is_ok());
    }
    assert_eq!(session.run(generate(1, &[1, 2, 3], 5)).await.tokens.len(), 5);
    a.signal(Signal::TERM);
    let gone = || (!Path::new(&path).exists()).then_some(());
    assert!(wait_for(gone).await.is_some(), "it is removed at the end");
}
