//! Blocks that a worker prefetches for a request before it comes.

use penstock_fleet_tests::dial::{Session, Told};
use penstock_fleet_tests::{Answer, Dir, PATIENCE, Worker, job, kill, pool, read, read_into, wait_for};
use penstock_pool::FleetRuntime;
use penstock_proto::frames::{
    Cancel, ChoiceStart, DownBody, EngineState, Generate, Prefetch, PrefetchState, Step, Window,
};
use penstock_proto::{BLOCK_TOKENS, BlockHasher};
use rustix::process::Signal;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

const BINARY: &str = env!("CARGO_BIN_EXE_fleet-worker");

/// Blocks of the device; a quarter of them may be prefetched.
const PAGES: &str = "64";

/// Full blocks of a prompt, which has one more token that is always computed.
const BLOCKS: usize = 10;

fn prompt(n: u32) -> Vec<u32> {
    (0..(BLOCKS * BLOCK_TOKENS) as u32 + 1).map(|at| 1 + (at * 7 + n * 31) % 250).collect()
}

fn generate(request: u64, n: u32) -> Generate {
    Generate {
        request,
        prompt: prompt(n),
        choices: vec![ChoiceStart { index: 0, emitted: Vec::new() }],
        sampling: Some(job([1], 1, 8).sampling),
        salt: b"t".to_vec(),
        ..Generate::default()
    }
}

fn prefetch(request: u64, n: u32, wait_seconds: f64) -> Prefetch {
    let chain = BlockHasher::for_request(b"t", "fake").chain(&prompt(n));
    Prefetch { request, hashes: chain.iter().map(|hash| hash.to_bytes().to_vec()).collect(), wait_seconds }
}

/// A Redis server that ends with the test.
struct Remote(Child);

impl Remote {
    async fn start(dir: &Dir) -> (Self, String) {
        let socket = dir.file("redis.sock");
        let mut command = Command::new("redis-server");
        command.args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"]).arg(&socket);
        let child = command.current_dir(dir.file("")).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let this = Self(child.expect("`make unit` installs redis-server"));
        assert!(wait_for(|| UnixStream::connect(&socket).ok()).await.is_some(), "it listens");
        (this, format!("redis+unix://{}", socket.display()))
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn worker(dir: &Dir, more: &[&str]) -> Worker {
    let disk = dir.file("kv").display().to_string();
    Worker::start(BINARY, dir, "a", &[&["--pages", PAGES, "--kv-disk", &disk], more].concat())
}

fn state(step: &Step) -> &EngineState {
    step.state.as_ref().expect("always there")
}

fn loaded(step: &Step) -> u64 {
    state(step).tiers.iter().map(|tier| tier.loaded).sum()
}

/// Fills a worker's device with prompts 0 to 9 one after another, so that the first are on its disk.
async fn filled(session: &mut Session) -> Vec<Told> {
    let mut told = Vec::new();
    for n in 0..10 {
        told.push(session.run(generate(u64::from(n) + 1, n)).await);
    }
    let gone = |step: &Step| state(step).tiers.iter().map(|tier| tier.stored).sum::<u64>() >= 3 * BLOCKS as u64;
    session.until(gone).await;
    told
}

#[tokio::test]
async fn what_was_asked_for_is_there_when_the_request_comes() {
    let dir = Dir::new();
    let worker = worker(&dir, &[]);
    let mut session = Session::with(&worker).await;
    let told = filled(&mut session).await;
    session.say(DownBody::Prefetch(prefetch(77, 0, 9.0))).await;
    session.until(|step| loaded(step) == BLOCKS as u64).await;
    let again = session.run(generate(77, 0)).await;
    assert_eq!((again.tokens, again.cached), (told[0].tokens.clone(), (BLOCKS * BLOCK_TOKENS) as u32));
    let used = PrefetchState { used: BLOCKS as u64, unused: 0 };
    let step = session.until(|step| state(step).prefetches == Some(used)).await;
    assert_eq!(loaded(&step), BLOCKS as u64, "nothing was loaded twice");
}

/// On a device of little more than one prompt, the first blocks of a prompt are still there, and the next to be
/// evicted, when the others are loaded.
#[tokio::test]
async fn what_is_brought_does_not_push_out_what_is_before_it() {
    let dir = Dir::new();
    let disk = dir.file("kv").display().to_string();
    let worker = Worker::start(BINARY, &dir, "a", &["--pages", "14", "--kv-disk", &disk]);
    let mut session = Session::with(&worker).await;
    let first = session.run(generate(1, 0)).await;
    session.run(generate(2, 1)).await;
    session.until(|step| state(step).tiers.iter().map(|tier| tier.stored).sum::<u64>() >= 6).await;
    let again = session.run(generate(3, 0)).await;
    assert_eq!((again.tokens, again.cached), (first.tokens, (BLOCKS * BLOCK_TOKENS) as u32));
}

#[tokio::test]
async fn what_is_asked_ahead_is_bounded_and_what_makes_no_sense_is_nothing() {
    let dir = Dir::new();
    let worker = worker(&dir, &[]);
    let mut session = Session::with(&worker).await;
    let told = filled(&mut session).await;
    for wrong in [vec![vec![1; 15]], vec![vec![7; 16]; 1000], Vec::new()] {
        for wait_seconds in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
            session.say(DownBody::Prefetch(Prefetch { request: 5, hashes: wrong.clone(), wait_seconds })).await;
        }
    }
    // More than a quarter of the device: blocks beyond stay where they are.
    for n in 0..3 {
        session.say(DownBody::Prefetch(prefetch(100 + u64::from(n), n, 1e300))).await;
    }
    session.until(|step| loaded(step) == 16).await;
    session.say(DownBody::Cancel(Cancel { request: 100, choices: Vec::new() })).await;
    for n in 0..3 {
        let again = session.run(generate(200 + u64::from(n), n)).await;
        assert_eq!(again.tokens, told[n as usize].tokens);
    }
    let step = session.until(|step| state(step).running == 0).await;
    assert_eq!(state(&step).blocks_free, state(&step).blocks_total, "no page is held");
}

/// The contents of the remote tier are unknown until it is queried; several hints query at once, and each finds more
/// than fits together.
#[tokio::test]
async fn what_is_found_ahead_has_the_same_bound() {
    let dir = Dir::new();
    let (_remote, url) = Remote::start(&dir).await;
    let start = |name: &str| Worker::start(BINARY, &dir, name, &["--pages", PAGES, "--kv-remote", &url]);
    let writer = start("w");
    let told = filled(&mut Session::with(&writer).await).await;
    let reader = start("r");
    let mut session = Session::with(&reader).await;
    for n in 0..3 {
        session.say(DownBody::Prefetch(prefetch(100 + u64::from(n), n, 9.0))).await;
    }
    session.until(|step| loaded(step) >= 16).await;
    // All other loads in flight have arrived when this has run.
    for n in 20..22 {
        session.run(generate(u64::from(n), n)).await;
    }
    let step = session.until(|step| state(step).running == 0).await;
    assert_eq!(loaded(&step), 16, "a quarter of the device");
    // The first hint to be answered has the room.
    let mut cached = 0;
    for n in 0..3 {
        let again = session.run(generate(200 + u64::from(n), n)).await;
        assert_eq!(again.tokens, told[n as usize].tokens);
        cached += again.cached;
    }
    assert!(cached as usize >= BLOCKS * BLOCK_TOKENS, "{cached} tokens were there");
}

/// A hanging store delays the request that asks it for as long as computing takes, and no later request.
#[tokio::test]
async fn a_store_that_hangs_delays_one_request_and_no_other() {
    let dir = Dir::new();
    let (remote, url) = Remote::start(&dir).await;
    let worker = Worker::start(BINARY, &dir, "a", &["--pages", PAGES, "--kv-remote", &url]);
    let mut session = Session::with(&worker).await;
    // This run makes the time to compute known, and opens the connection.
    let first = session.run(generate(1, 0)).await;
    kill(remote.0.id(), Signal::STOP);
    for n in 1..8 {
        assert_eq!(session.run(generate(10 + u64::from(n), n)).await.tokens.len(), first.tokens.len());
    }
    let step = session.until(|step| state(step).running + state(step).waiting == 0).await;
    kill(remote.0.id(), Signal::CONT);
    let late: Vec<_> = state(&step).tiers.iter().map(|tier| tier.late).collect();
    assert_eq!(late, [1], "requests that waited in vain");
    // The store is used again when it answers.
    session.until(|step| state(step).tiers.iter().map(|tier| tier.stored).sum::<u64>() > 0).await;
}

/// A request of several choices has one window in its first frame, and further ones by choice.
#[tokio::test]
async fn a_window_that_comes_while_a_request_waits_for_its_blocks_is_of_its_choice_alone() {
    let dir = Dir::new();
    let (remote, url) = Remote::start(&dir).await;
    let worker = Worker::start(BINARY, &dir, "a", &["--pages", PAGES, "--kv-remote", &url]);
    let mut session = Session::with(&worker).await;
    session.run(generate(1, 0)).await;
    // The store does not answer, so the request waits as long as computing would take.
    kill(remote.0.id(), Signal::STOP);
    let choices = (0..2).map(|index| ChoiceStart { index, emitted: Vec::new() }).collect();
    session.say(DownBody::Generate(Generate { choices, window: 1, ..generate(2, 5) })).await;
    for (choice, tokens) in [(1, 2), (1, 3), (7, 9)] {
        session.say(DownBody::Window(Window { request: 2, choice, tokens })).await;
    }
    let mut tokens = [0, 0];
    let mut late = 0_u64;
    let mut add = |step: Step| {
        let outputs = step.outputs.iter().filter(|output| output.request == 2);
        outputs.for_each(|output| tokens[output.choice as usize] += output.tokens.len());
        late = state(&step).tiers.iter().map(|tier| tier.late).sum();
        (tokens, step.outputs.iter().any(|output| output.request == 3 && output.finish.is_some()))
    };
    while add(session.step().await).0[1] < 6 {}
    kill(remote.0.id(), Signal::CONT);
    // Many steps later the first choice has no more either.
    session.say(DownBody::Generate(generate(3, 0))).await;
    while !add(session.step().await).1 {}
    assert_eq!((tokens, late), ([1, 6], 1), "tokens of both choices; requests that waited");
}

#[tokio::test]
async fn a_request_that_waits_in_the_gateway_finds_its_blocks_loaded() {
    let runtime = FleetRuntime::start().expect("the fleet runtime starts");
    for prefetch in [false, true] {
        let dir = Dir::new();
        let worker = worker(&dir, &["--sequences", "1", "--step-ms", "5"]);
        let pool = pool(&runtime, &[&worker], |config| config.prefetch = prefetch);
        assert!(pool.ready(PATIENCE).await);
        let ask = |n: u32, tokens: u32| pool.submit(job(prompt(n), 1, tokens)).expect("taken");
        let first = read(&mut ask(0, 8)).await;
        for n in 1..10 {
            read(&mut ask(n, 8)).await;
        }
        // The only place is taken for a while.
        let (mut long, mut begun) = (ask(10, 200), Answer::default());
        read_into(&mut long, &mut begun, 1).await;
        let mut again = ask(0, 8);
        let (_, again) = tokio::join!(read_into(&mut long, &mut begun, usize::MAX), read(&mut again));
        assert_eq!(again.tokens, first.tokens);
        let used = || pool.status().sums().prefetched[0];
        let wanted = if prefetch { BLOCKS as u64 } else { 0 };
        assert!(
            wait_for(|| (used() == wanted).then_some(())).await.is_some(),
            "{} blocks were there before it",
            used()
        );
    }
}
