//! KV between machines: TCP, certificates at both ends, and several connections for one transfer. Four connections
//! change no token, and one that breaks in the middle costs time only.

use penstock_fleet_tests::apart::{KINDS, Kind, request, undisturbed};
use penstock_fleet_tests::dial::{Session, Told, generate};
use penstock_fleet_tests::matrix::descriptors;
use penstock_fleet_tests::relay::Relay;
use penstock_fleet_tests::{Dir, Worker, certify_for, free_port, job, read, wait_for};
use penstock_link::Tls;
use penstock_pool::{FleetRuntime, Pool, PoolConfig, Trouble, WorkerPhase};
use penstock_proto::frames::{DownBody, EngineState, Generate, Pull, Step, TransferState};
use penstock_proto::handshake::PoolKey;
use penstock_proto::{BLOCK_TOKENS, BlockHasher};
use std::net::SocketAddr;
use std::process::Command;

const BINARY: &str = env!("CARGO_BIN_EXE_fleet-worker");

/// Pool key; both ends prove it.
const KEY: &[u8] = b"a key for the time of one test, no longer";

/// Bytes of KV after which a connection breaks, and before which it breaks: some blocks have come, and many have not.
const PART: std::ops::Range<u64> = 400_000..1_200_000;
/// Bytes on a further connection that has carried a page (16 KiB) beside its greetings, and so belongs to the transfer.
const JOINED: u64 = 24_000;

/// Common settings of workers that are far from each other.
struct Members {
    dir: Dir,
    args: Vec<String>,
}

impl Members {
    fn new() -> Self {
        Self::known_as("127.0.0.1")
    }

    /// Makes members with a certificate for `name`.
    fn known_as(name: &str) -> Self {
        let dir = Dir::new();
        std::fs::write(dir.file("key"), KEY).expect("a key");
        certify_for(dir.path(), name);
        let (key, tls) = (dir.file("key").display().to_string(), dir.path().display().to_string());
        let args = ["--demo", "--key-file", &key, "--tls", &tls, "--transfer-streams", "4"].map(str::to_owned).to_vec();
        Self { dir, args }
    }

    /// Starts a worker on TCP; returns it with the addresses of its sessions and transfers.
    fn start(&self, name: &str, role: &str) -> (Worker, SocketAddr, SocketAddr) {
        let [sessions, transfers] = [free_port(), free_port()];
        let transfer_port = transfers.to_string();
        let mut args = vec!["--role", role, "--transfer-port", &transfer_port];
        args.extend(self.args.iter().map(String::as_str));
        let [sessions, transfers] = [sessions, transfers].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let command = Command::new(BINARY);
        let worker = Worker::start_tcp(command, &self.dir, name, &format!("tcp://{sessions}"), &args);
        (worker, sessions, transfers)
    }

    fn pool(&self, runtime: &FleetRuntime, workers: &[SocketAddr]) -> Pool {
        let addresses: Vec<String> = workers.iter().map(|worker| format!("tcp://{worker}")).collect();
        self.pool_at(runtime, &addresses)
    }

    fn pool_at(&self, runtime: &FleetRuntime, addresses: &[String]) -> Pool {
        let mut config = PoolConfig::new("far");
        config.connect = addresses.iter().map(|address| address.parse().expect("an address")).collect();
        config.key = Some(PoolKey::new(KEY).expect("long enough"));
        config.tls = Some(Tls::read(&penstock_fleet_tests::member_files(self.dir.path())).expect("certificates"));
        (config.weights.apart_tokens_decode, config.balance) = (BLOCK_TOKENS, false);
        Pool::start(runtime, config).expect("the pool starts")
    }
}

async fn all_ready(pool: &Pool) {
    let ready = || pool.status().workers.iter().all(|worker| worker.phase == WorkerPhase::Ready).then_some(());
    assert!(wait_for(ready).await.is_some(), "{:?}", pool.status());
}

#[tokio::test]
async fn four_streams_over_tls_change_no_token() {
    let (members, runtime) = (Members::new(), FleetRuntime::start().expect("the fleet runtime starts"));
    let [(p, at_p, _), (d, at_d, _)] =
        [("p", "prefill"), ("d", "decode")].map(|(name, role)| members.start(name, role));
    let pool = members.pool(&runtime, &[at_p, at_d]);
    all_ready(&pool).await;
    let before = [&p, &d].map(|worker| descriptors(worker.pid()));
    for kind in KINDS {
        let mut job = request(kind);
        // A salt of its own: no worker has the blocks.
        job.salt = vec![kind as u8].into();
        let answer = read(&mut pool.submit(job).expect("taken")).await;
        assert_eq!(answer, undisturbed(BINARY, &runtime, request(kind)).await, "{kind:?}");
    }
    let came = || {
        let transfers = pool.status().workers[1].state.transfers?;
        (transfers.completed == KINDS.len() as u64).then_some(transfers)
    };
    let came = wait_for(came).await.unwrap_or_else(|| panic!("{:?}", pool.status()));
    assert_eq!(
        (came.failed, came.memory_bytes, pool.status().counts.prefilled_apart),
        (0, 0, KINDS.len() as u64),
        "{came:?}"
    );
    assert!(came.stream_bytes > 0 && came.stream_bytes <= came.bytes_in, "{came:?}");
    let sums = pool.status().workers[1].sums.transfers;
    assert_eq!((sums.stream_bytes, sums.bytes), (came.stream_bytes, came.bytes_in), "and metrics say so");
    let closed = || {
        let now = [&p, &d].map(|worker| descriptors(worker.pid()));
        (now[0] <= before[0] && now[1] <= before[1]).then_some(())
    };
    assert!(wait_for(closed).await.is_some(), "connections are left");
}

#[tokio::test]
async fn peers_are_dialled_by_the_name_that_their_certificate_is_for() {
    let (members, runtime) = (Members::known_as("localhost"), FleetRuntime::start().expect("the fleet runtime starts"));
    let [(_p, at_p, _), (_d, at_d, _)] =
        [("p", "prefill"), ("d", "decode")].map(|(name, role)| members.start(name, role));
    let addresses = [at_p, at_d].map(|at| format!("tcp://localhost:{}", at.port()));
    let pool = members.pool_at(&runtime, &addresses);
    all_ready(&pool).await;
    let answer = read(&mut pool.submit(request(Kind::Sampled)).expect("taken")).await;
    assert_eq!(answer.failed, None);
    let came = || {
        let transfers = pool.status().workers[1].state.transfers?;
        (transfers.completed + transfers.failed > 0).then_some(transfers)
    };
    let came = wait_for(came).await.unwrap_or_else(|| panic!("{:?}", pool.status()));
    assert_eq!((came.completed, came.failed), (1, 0), "{came:?}");
}

#[tokio::test]
async fn short_transfers_are_over_before_their_further_streams_have_joined() {
    const COUNT: u64 = 20;
    let (members, runtime) = (Members::new(), FleetRuntime::start().expect("the fleet runtime starts"));
    let (_p, sessions, at_p) = members.start("p", "prefill");
    let pool = members.pool(&runtime, &[sessions]);
    all_ready(&pool).await;
    // One block each, and a token behind it.
    let prompt = |n: u64| (0..=BLOCK_TOKENS as u32).map(|at| 1 + (n as u32 * 100 + at * 37) % 4000).collect::<Vec<_>>();
    for n in 0..COUNT {
        assert_eq!(read(&mut pool.submit(job(prompt(n), 1, 1)).expect("taken")).await.failed, None);
    }
    let mut args = vec!["--role", "decode"];
    args.extend(members.args.iter().map(String::as_str));
    let d = Worker::start(BINARY, &members.dir, "d", &args);
    let mut session = Session::with(&d).await;
    let hasher = BlockHasher::for_request(b"t", &session.ready.numerics_id);
    for n in 0..COUNT {
        let hashes = hasher.chain(&prompt(n)).into_iter().map(|hash| hash.to_bytes().to_vec()).collect();
        let pull = Pull { id: n, from: format!("tcp://{at_p}"), hashes, deadline_seconds: 20.0 };
        let pulled = session.pull(pull).await;
        assert_eq!((pulled.blocks, pulled.why.as_str()), (1, ""), "{n}");
    }
    let ended = |step: &Step| {
        let transfers = step.state.as_ref().and_then(|state| state.transfers);
        transfers.map_or(0, |transfers| transfers.completed + transfers.failed) == COUNT
    };
    let transfers = session.until(ended).await.state.and_then(|state| state.transfers).expect("told");
    assert_eq!((transfers.completed, transfers.failed, transfers.blocks_in), (COUNT, 0, COUNT));
}

/// Lets connection `number` of a transfer break in the middle. Where other work delays that connection until most has come over the others,
/// another transfer follows.
async fn breaks(runtime: &FleetRuntime, number: u64, another: bool) -> (Told, TransferState) {
    for _ in 0..20 {
        if let Some(broken) = breaks_in_the_middle(runtime, number, another).await {
            return broken;
        }
    }
    panic!("connection {number} carried nothing in the middle of twenty transfers");
}

/// Lets connection `number` of the transfer break when a part has come; `None` if it carried nothing then. With `another`, there is another
/// prefill worker.
async fn breaks_in_the_middle(runtime: &FleetRuntime, number: u64, another: bool) -> Option<(Told, TransferState)> {
    let members = Members::new();
    let (p, p_sessions, at_p) = members.start("p", "prefill");
    let (relay, at_relay) = Relay::far(at_p).await;
    let other = another.then(|| members.start("q", "prefill"));
    let sessions: Vec<_> = other.iter().map(|(_, sessions, _)| *sessions).chain([p_sessions]).collect();
    let prefills = members.pool(runtime, &sessions);
    all_ready(&prefills).await;
    let mut args = vec!["--role", "decode"];
    args.extend(members.args.iter().map(String::as_str));
    let d = Worker::start(BINARY, &members.dir, "d", &args);
    let mut session = Session::with(&d).await;
    let before = descriptors(p.pid());
    relay.cut_there(number, PART.start, JOINED);
    let asked = Generate {
        prefill_at: format!("tcp://{at_relay}"),
        prefill_next: other.iter().map(|(_, _, at)| format!("tcp://{at}")).collect(),
        prefill_next_tokens: BLOCK_TOKENS as u32,
        ..generate(1, request(Kind::Sampled))
    };
    session.say(DownBody::Generate(asked)).await;
    let mut told = Told::default();
    session.read(1, &mut told, usize::MAX).await;
    let came = relay.cut().filter(|(_, came)| *came < PART.end);
    assert_eq!(came?.0, number);
    session.idle().await;
    let is_idle = |state: &EngineState| state.running + state.waiting == 0 && state.blocks_free == state.blocks_total;
    let closed = || {
        let are_idle = prefills.status().workers.iter().all(|worker| is_idle(&worker.state));
        (are_idle && descriptors(p.pid()) <= before).then_some(())
    };
    assert!(wait_for(closed).await.is_some(), "the prefill workers keep something: {:?}", prefills.status());
    Some((told, session.step().await.state.expect("always there").transfers.expect("told")))
}

#[tokio::test]
async fn transfers_that_fail_are_told_until_they_work_again() {
    let (dir, runtime) = (Dir::new(), FleetRuntime::start().expect("the fleet runtime starts"));
    let [p, d] = ["prefill", "decode"].map(|role| Worker::start(BINARY, &dir, &role[..1], &["--demo", "--role", role]));
    let mut config = PoolConfig::new("near");
    config.connect =
        [&p, &d].map(|worker| format!("unix://{}", worker.socket.display()).parse().expect("an address")).into();
    (config.weights.apart_tokens_decode, config.balance) = (BLOCK_TOKENS, false);
    let pool = Pool::start(&runtime, config).expect("the pool starts");
    all_ready(&pool).await;
    // The prefill worker's transfers are unreachable now.
    let [there, away] = ["p.sock.kv", "away"].map(|name| dir.file(name));
    std::fs::rename(&there, &away).expect("its socket for transfers");
    let ask = async |salt: u8| {
        let mut job = request(Kind::Sampled);
        job.salt = vec![salt].into();
        let answer = read(&mut pool.submit(job).expect("taken")).await;
        assert_eq!(answer.failed, None, "what is missing is computed");
    };
    // On a busy machine the pool may find that an answer is not worth a transfer: others follow until one is.
    let ask_until = async |salts: std::ops::Range<u8>, done: &dyn Fn(&[Trouble]) -> bool| {
        for salt in salts {
            ask(salt).await;
            for _ in 0..100 {
                let troubles = pool.status().workers[1].troubles.clone();
                if done(&troubles) {
                    return troubles;
                }
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        }
        panic!("{:?}", pool.status());
    };
    let text = ask_until(1..100, &|troubles| !troubles.is_empty()).await[0].text.clone();
    assert!(text.contains("p.sock.kv does not come: No such file"), "{text}");
    let log = std::fs::read_to_string(dir.file("d.log")).expect("its log");
    assert!(log.contains("a transfer of KV from another worker failed"), "{log}");
    std::fs::rename(&away, &there).expect("its socket for transfers");
    ask_until(100..200, &<[Trouble]>::is_empty).await;
}

#[tokio::test]
async fn a_stream_that_breaks_costs_time_only() {
    let runtime = FleetRuntime::start().expect("the fleet runtime starts");
    let whole = undisturbed(BINARY, &runtime, request(Kind::Sampled)).await;
    // The first connection, which carries all control frames, and one that carries pages alone.
    for number in [0, 2] {
        let (told, came) = breaks(&runtime, number, false).await;
        assert_eq!((&told.tokens, came.completed, came.failed), (&whole.tokens[0], 0, 1), "{number}: it computes");
        let (told, came) = breaks(&runtime, number, true).await;
        assert_eq!((&told.tokens, came.completed, came.failed), (&whole.tokens[0], 1, 1), "{number}: another does");
        assert!(came.asked_next == 1 && came.stream_bytes > 0, "{number}: {came:?}");
    }
}
