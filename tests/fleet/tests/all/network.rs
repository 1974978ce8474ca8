//! Networks that fail. A pulled cable: two network namespaces and a link between them, which goes down; with
//! `PENSTOCK_FAULTS=full` (`make test-faults`) where namespaces are permitted. A network that is slow and loses
//! packets: everywhere.

use penstock_fleet_tests::relay::Relay;
use penstock_fleet_tests::{Answer, Dir, PATIENCE, Worker, job, pool, read, read_into, wait_for};
use penstock_pool::{FleetRuntime, Job, Pool, PoolConfig, Steer, WorkerPhase};
use penstock_proto::frames::EngineState;
use penstock_proto::handshake::PoolKey;
use std::process::Command;
use std::time::{Duration, Instant};

const BINARY: &str = env!("CARGO_BIN_EXE_fleet-worker");

/// Environment variable with the far namespace, for the process inside the near one.
const FAR: &str = "PENSTOCK_FAR_NAMESPACE";

/// Addresses of the link's two ends; the namespaces belong to the test, so the addresses are free.
const NEAR_ADDRESS: &str = "10.213.77.1";
const FAR_ADDRESS: &str = "10.213.77.2";

/// Pool key; both ends prove it.
const KEY: &[u8] = b"a key for the time of one test, no longer";

/// Promised longest gap for a worker that hangs or is cut off.
const GAP_MAX: Duration = Duration::from_secs(5);

/// Two namespaces and a link between them, removed with the value.
struct Network {
    near: String,
    far: String,
}

fn ip(args: &[&str]) -> Result<(), String> {
    let done = Command::new("ip").args(args).output().map_err(|error| format!("ip: {error}"))?;
    let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
    if done.status.success() { Ok(()) } else { Err(format!("ip {}: {said}", args.join(" "))) }
}

impl Network {
    fn new() -> Result<Self, String> {
        let [near, far] = ["near", "far"].map(|end| format!("penstock-{}-{end}", std::process::id()));
        ip(&["netns", "add", &near])?;
        let network = Self { near, far };
        ip(&["netns", "add", &network.far])?;
        let Self { near, far } = &network;
        ip(&["-n", near, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", far])?;
        for (end, address) in [(near, NEAR_ADDRESS), (far, FAR_ADDRESS)] {
            ip(&["-n", end, "addr", "add", &format!("{address}/30"), "dev", "cable"])?;
            ip(&["-n", end, "link", "set", "lo", "up"])?;
            ip(&["-n", end, "link", "set", "cable", "up"])?;
        }
        Ok(network)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for end in [&self.near, &self.far] {
            // Absent: nothing to remove.
            let _ = ip(&["netns", "del", end]);
        }
    }
}

/// Sets the far end down or up: the near one loses its carrier, as if the cable were pulled.
fn cable(far: &str, state: &str) {
    ip(&["-n", far, "link", "set", "cable", state]).expect("the link obeys");
}

#[test]
fn a_pulled_cable_costs_seconds_and_no_token() {
    if let Ok(far) = std::env::var(FAR) {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
        return runtime.block_on(pulled(&far));
    }
    if std::env::var("PENSTOCK_FAULTS").is_ok_and(|what| what == "full") {
        let network = match Network::new() {
            Ok(network) => network,
            Err(why) => return eprintln!("skipped: network namespaces are not permitted here ({why})"),
        };
        // This test again, inside: the pool is in the near namespace.
        let this = std::env::current_exe().expect("a running test");
        let name = "a_pulled_cable_costs_seconds_and_no_token";
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &network.near]).arg(this).args(["--exact", name, "--nocapture"]);
        assert!(inside.env(FAR, &network.far).status().expect("it starts").success(), "see above");
    } else {
        eprintln!("skipped: `make test-faults` makes the namespaces that it needs");
    }
}

/// A near worker and a far one.
struct Scene {
    _dir: Dir,
    _workers: [Worker; 2],
    pool: Pool,
    names: [String; 2],
}

impl Scene {
    /// Starts the scene; `args` are the arguments of the workers `[near, far]`.
    async fn new(runtime: &FleetRuntime, namespace: &str, args: [&[&str]; 2]) -> Self {
        let dir = Dir::new();
        let key = dir.file("key");
        std::fs::write(&key, KEY).expect("a key");
        let key_file = key.display().to_string();
        let start = |name: &str, command: Command, address: &str, args: &[&str]| {
            let mut all = vec!["--beyond-loopback", "--key-file", key_file.as_str()];
            all.extend(args);
            Worker::start_tcp(command, &dir, name, &format!("tcp://{address}:7001"), &all)
        };
        let mut behind = Command::new("ip");
        behind.args(["netns", "exec", namespace, BINARY]);
        let near = start("near", Command::new(BINARY), NEAR_ADDRESS, args[0]);
        let far = start("far", behind, FAR_ADDRESS, args[1]);
        let mut config = PoolConfig::new("network");
        config.key = Some(PoolKey::new(KEY).expect("long enough"));
        config.connect =
            [NEAR_ADDRESS, FAR_ADDRESS].map(|host| format!("tcp://{host}:7001").parse().expect("an address")).to_vec();
        (config.weights.apart_tokens_decode, config.balance) = (512, false);
        let pool = Pool::start(runtime, config).expect("the pool starts");
        let workers = [near, far];
        let names = || {
            let status = pool.status();
            let is_ready = status.workers.iter().all(|worker| worker.phase == WorkerPhase::Ready);
            is_ready.then(|| [0, 1].map(|at| status.workers[at].name.clone()))
        };
        let names = wait_for(names).await.unwrap_or_else(|| panic!("{:?}", pool.status()));
        Self { _dir: dir, _workers: workers, pool, names }
    }

    async fn steer(&self, at: usize, steer: Steer) {
        self.pool.steer(&self.names[at], steer).await.expect("steered");
    }

    /// Waits after the cable is back: both workers are there, and hold nothing.
    async fn settle(&self) {
        let is_clean = || {
            let status = self.pool.status();
            let is_idle =
                |state: &EngineState| state.running + state.waiting == 0 && state.blocks_free == state.blocks_total;
            let clean = |worker: &penstock_pool::WorkerStatus| {
                worker.phase == WorkerPhase::Ready && worker.bound == 0 && is_idle(&worker.state)
            };
            (status.open == 0 && status.workers.iter().all(clean)).then_some(())
        };
        assert!(wait_for(is_clean).await.is_some(), "left behind: {:?}", self.pool.status());
    }
}

fn long(prompt: u32, choices: u32, tokens: u32) -> Job {
    job((0..prompt).map(|at| 1 + at * 7 % 250).collect::<Vec<_>>(), choices, tokens)
}

async fn pulled(far: &str) {
    let runtime = FleetRuntime::start().expect("the fleet runtime starts");
    decoding_behind_the_cable(&runtime, far).await;
    prefill_behind_the_cable(&runtime, far).await;
}

async fn decoding_behind_the_cable(runtime: &FleetRuntime, far: &str) {
    let scene = Scene::new(runtime, far, [&["--step-ms", "5"], &["--step-ms", "5"]]).await;
    let asked = long(100, 2, 200);
    scene.steer(1, Steer::Hold).await;
    let whole = read(&mut scene.pool.submit(asked.clone()).expect("taken")).await;
    scene.steer(1, Steer::Release).await;
    scene.steer(0, Steer::Hold).await;
    let mut ticket = scene.pool.submit(asked).expect("taken");
    let mut answer = Answer::default();
    read_into(&mut ticket, &mut answer, 40).await;
    scene.steer(0, Steer::Release).await;
    cable(far, "down");
    let pulled = Instant::now();
    let noticed = || (scene.pool.status().workers[1].phase != WorkerPhase::Ready).then(|| pulled.elapsed());
    let going_on = async {
        while answer.resumed.is_empty() {
            let more = answer.tokens[0].len() + 1;
            read_into(&mut ticket, &mut answer, more).await;
        }
        pulled.elapsed()
    };
    let (noticed, gap) = tokio::join!(wait_for(noticed), going_on);
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    assert_eq!((&answer.tokens, &answer.resumed, &answer.failed), (&whole.tokens, &vec![true], &None));
    let noticed = noticed.expect("it is noticed");
    eprintln!("cable pulled while it decodes: noticed after {noticed:.2?}, next token after {gap:.2?}, no token wrong");
    assert!(gap < GAP_MAX, "{gap:?}");
    cable(far, "up");
    scene.settle().await;
}

async fn prefill_behind_the_cable(runtime: &FleetRuntime, far: &str) {
    let near = ["--step-ms", "5", "--role", "decode"];
    let scene = Scene::new(runtime, far, [&near, &["--step-ms", "80", "--role", "prefill"]]).await;
    let asked = long(3000, 1, 40);
    let mut ticket = scene.pool.submit(asked.clone()).expect("taken");
    let computes = || (scene.pool.status().workers[1].state.running > 0).then_some(());
    assert!(wait_for(computes).await.is_some(), "it is computed there: {:?}", scene.pool.status());
    cable(far, "down");
    let pulled = Instant::now();
    let mut answer = Answer::default();
    read_into(&mut ticket, &mut answer, 1).await;
    let gap = pulled.elapsed();
    read_into(&mut ticket, &mut answer, usize::MAX).await;
    cable(far, "up");
    scene.settle().await;
    scene.steer(1, Steer::Hold).await;
    let whole = read(&mut scene.pool.submit(asked).expect("taken")).await;
    assert_eq!((&answer.tokens, &answer.resumed, &answer.failed), (&whole.tokens, &vec![], &None));
    eprintln!("cable pulled while a prompt is computed behind it: first token after {gap:.2?}, no token wrong");
    assert!(gap < GAP_MAX, "{gap:?}");
}

#[tokio::test]
async fn a_slow_network_that_loses_packets_changes_nothing() {
    let (dir, runtime) = (Dir::new(), FleetRuntime::start().expect("the fleet runtime starts"));
    let [a, b, alone] = ["a", "b", "alone"].map(|name| Worker::start(BINARY, &dir, name, &["--step-ms", "3"]));
    let asked = long(150, 2, 150);
    let single = pool(&runtime, &[&alone], |_| {});
    let whole = read(&mut single.submit(asked.clone()).expect("taken")).await;
    let relays = [("a", &a), ("b", &b)].map(|(name, worker)| Relay::start(&dir, name, &worker.socket));
    let mut config = PoolConfig::new("slow");
    config.connect =
        relays.iter().map(|relay| format!("unix://{}", relay.socket().display()).parse().expect("short")).collect();
    let pool = Pool::start(&runtime, config).expect("the pool starts");
    assert!(pool.ready(PATIENCE).await);
    for change in [(|relay: &Relay| relay.delay(Duration::from_millis(40))) as fn(&Relay), |relay| {
        relay.lose(20, Duration::from_millis(250))
    }] {
        relays.iter().for_each(change);
        let mut tickets: Vec<_> = (0..6).map(|_| pool.submit(asked.clone()).expect("taken")).collect();
        for ticket in &mut tickets {
            let answer = read(ticket).await;
            assert_eq!((&answer.tokens, &answer.failed), (&whole.tokens, &None));
            assert!(answer.resumed.is_empty(), "nobody is suspected for being slow");
        }
    }
}
