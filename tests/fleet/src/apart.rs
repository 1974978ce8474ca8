//! The fault matrix of prefill and decode apart: what happens × to which of the two workers × where in the life of a request × what kind of
//! request. Real workers with the demo model and real transfers between them.
//!
//! ```text
//!               ┌─ relay ─ prefill worker ─┐
//! pool (gateway)│                        relay (KV)     a third worker, held until the fault, takes over from a decode worker
//!               └─ relay ─ decode worker ──┘
//! ```
//! Where is exact: the device of one of them waits at a gate (`fleet-worker --gate`), or the network between them stops after so many bytes;
//! the fault is made meanwhile. Answers must be those of one worker that does everything, and nothing may be left behind.

use crate::matrix::descriptors;
use crate::relay::Relay;
use crate::{Answer, Dir, Worker, job, wait_for};
use penstock_proto::BLOCK_TOKENS;
use penstock_proto::frames::EngineState;
use penstock_proxy::pool::{FleetRuntime, Job, Pool, PoolConfig, PoolEvent, Steer, Ticket, WorkerPhase};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Tokens of every prompt: several steps of the prefill worker, and some tokens after the last full block.
const PROMPT: usize = 620;

/// The same of the one that is ahead in a queue.
const AHEAD: usize = 200;

/// Rows of prefill after which the prefill worker waits, in the middle of the prompt.
const HALF: usize = 256;

/// Tokens of every answer.
const OUTPUT: usize = 32;

/// Bytes of KV after which the network stops: some blocks have come, most have not.
const PART: u64 = 400_000;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `kill -9`.
    Kill,
    /// `SIGSTOP`.
    Stop,
    /// The network of the worker, to the gateway and to the other, carries nothing and tells nobody.
    Cut,
    /// Nothing: the client leaves.
    Leave,
}

/// To whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// Who computes the prompt.
    Prefill,
    /// Who answers.
    Decode,
}

/// Where the request is when it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// At the prefill worker, behind another.
    Queued,
    /// The prefill worker has computed a part.
    Computing,
    /// The decode worker has got a part of what was computed.
    Transferring,
    /// The first token was said, the second is being computed.
    First,
    /// In the middle of its answer.
    Middle,
    /// Its last token is being computed.
    Last,
}

/// What kind of request it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Temperature 0, with log-probabilities.
    Greedy,
    /// Drawn, with a seed and penalties.
    Sampled,
    /// Two choices.
    Two,
    /// Only some tokens are allowed, and end tokens are held back, as for a tool call.
    Tools,
}

/// Faults that answers survive.
pub const FAULTS: [Fault; 3] = [Fault::Kill, Fault::Stop, Fault::Cut];
/// Both.
pub const VICTIMS: [Victim; 2] = [Victim::Prefill, Victim::Decode];
/// All.
pub const POINTS: [Point; 6] =
    [Point::Queued, Point::Computing, Point::Transferring, Point::First, Point::Middle, Point::Last];
/// All.
pub const KINDS: [Kind; 4] = [Kind::Greedy, Kind::Sampled, Kind::Two, Kind::Tools];

/// One cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// What happens.
    pub fault: Fault,
    /// To whom.
    pub victim: Victim,
    /// Where.
    pub point: Point,
    /// To what.
    pub kind: Kind,
}

/// Every cell.
pub fn all() -> Vec<Cell> {
    let mut cells = Vec::new();
    for fault in FAULTS {
        for victim in VICTIMS {
            for point in POINTS {
                cells.extend(KINDS.map(|kind| Cell { fault, victim, point, kind }));
            }
        }
    }
    cells
}

/// Cells in which every two of (fault, victim, point, kind) meet.
pub fn pairwise() -> Vec<Cell> {
    let all = all();
    let values = |cell: &Cell| [cell.fault as usize, cell.victim as usize, cell.point as usize, cell.kind as usize];
    crate::pairs::pairwise(&all.iter().map(values).collect::<Vec<_>>()).into_iter().map(|at| all[at]).collect()
}

/// What a kind asks for.
pub fn request(kind: Kind) -> Job {
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| 1 + i * 37 % 4000).collect();
    let mut job = job(prompt, if kind == Kind::Two { 2 } else { 1 }, OUTPUT as u32);
    match kind {
        Kind::Greedy => (job.sampling.temperature, job.sampling.logprobs) = (0.0, 3),
        Kind::Sampled => (job.sampling.frequency_penalty, job.sampling.repetition_penalty) = (0.5, 1.1),
        Kind::Two => {}
        Kind::Tools => {
            job.sampling.allowed_tokens = (1..4000).step_by(3).collect();
            job.sampling.stop_tokens = vec![4, 7];
            job.sampling.min_tokens = OUTPUT as u32;
        }
    }
    job
}

/// An answer, and when its tokens came.
#[derive(Default)]
struct Seen {
    answer: Answer,
    came: Vec<Instant>,
}

async fn read(ticket: &mut Ticket, seen: &mut Seen) {
    while let Some(event) = tokio::time::timeout(crate::PATIENCE, ticket.next()).await.expect("an event in time") {
        if matches!(&event, PoolEvent::Output(output) if !output.tokens.is_empty()) {
            seen.came.push(Instant::now());
        }
        seen.answer.add(event);
    }
}

/// What became of a cell.
pub struct Outcome {
    /// The answer; of one whose client left, what it had got.
    pub answer: Answer,
    /// From the fault to the next token; when the client left, until both workers had freed everything.
    pub gap: Duration,
}

/// Two workers apart, and one more.
struct Scene {
    dir: Dir,
    pool: Pool,
    prefill: Worker,
    decode: Worker,
    spare: Option<Worker>,
    /// To the prefill worker, to the decode worker.
    sessions: [Relay; 2],
    /// Between the two.
    kv: Relay,
}

impl Scene {
    async fn new(binary: &str, runtime: &FleetRuntime, cell: Cell) -> Self {
        let dir = Dir::new();
        let gate = |context: usize| ["--gate".to_owned(), format!("{context}:{}", dir.path().display())];
        let (mut at_prefill, mut at_decode) = (Vec::new(), Vec::new());
        match cell.point {
            Point::Queued => at_prefill.extend(gate(AHEAD)),
            Point::Computing => at_prefill.extend(gate(HALF)),
            Point::Transferring => {}
            Point::First => at_decode.extend(gate(PROMPT + 1)),
            Point::Middle => at_decode.extend(gate(PROMPT + OUTPUT / 2)),
            Point::Last => at_decode.extend(gate(PROMPT + OUTPUT - 1)),
        }
        let start = |name: &str, role: &str, gate: &[String]| {
            let mut args = vec!["--demo", "--role", role];
            args.extend(gate.iter().map(String::as_str));
            Worker::start(binary, &dir, name, &args)
        };
        let prefill = start("p", "prefill", &at_prefill);
        let decode = start("d", "decode", &at_decode);
        let needs_spare = cell.victim == Victim::Decode && cell.fault != Fault::Leave;
        let spare = needs_spare.then(|| start("s", "decode", &[]));
        let transfers = kv_socket(&prefill);
        assert!(wait_for(|| transfers.exists().then_some(())).await.is_some(), "it listens for transfers");
        let kv = Relay::before(&transfers);
        if cell.point == Point::Transferring {
            kv.hold_after(PART);
        }
        let sessions = [("p", &prefill), ("d", &decode)].map(|(name, worker)| Relay::start(&dir, name, &worker.socket));
        let mut config = PoolConfig::new("apart");
        (config.weights.apart_tokens_decode, config.balance) = (BLOCK_TOKENS, false);
        let sockets = sessions.iter().map(Relay::socket).chain(spare.as_ref().map(|worker| worker.socket.as_path()));
        config.connect = sockets.map(address).collect();
        let pool = Pool::start(runtime, config).expect("the pool starts");
        let scene = Self { dir, pool, prefill, decode, spare, sessions, kv };
        scene.ready(scene.workers().count()).await;
        scene
    }

    fn workers(&self) -> impl Iterator<Item = &Worker> {
        [&self.prefill, &self.decode].into_iter().chain(&self.spare)
    }

    fn victim(&self, victim: Victim) -> &Worker {
        match victim {
            Victim::Prefill => &self.prefill,
            Victim::Decode => &self.decode,
        }
    }

    async fn ready(&self, count: usize) {
        let is_ready = || {
            let status = self.pool.status();
            let ready = status.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready).count();
            (ready >= count).then_some(())
        };
        assert!(wait_for(is_ready).await.is_some(), "{:?}", self.pool.status());
    }

    /// The third worker takes nothing, or everything.
    async fn steer_spare(&self, steer: Steer) {
        if self.spare.is_some() {
            let name = self.pool.status().workers[2].name.clone();
            self.pool.steer(&name, steer).await.expect("steered");
        }
    }

    async fn wait_for_gate(&self, worker: &Worker) {
        let reached = self.dir.file(&format!("reached-{}", worker.pid()));
        assert!(wait_for(|| reached.exists().then_some(())).await.is_some(), "the gate is reached");
    }

    /// Waits until the request is where it shall be.
    async fn wait_for_point(&self, point: Point) {
        match point {
            Point::Queued => {
                assert!(wait_for(|| (self.kv.opened() == 2).then_some(())).await.is_some(), "it has asked");
            }
            Point::Computing => self.wait_for_gate(&self.prefill).await,
            Point::Transferring => {
                assert!(wait_for(|| self.kv.is_holding().then_some(())).await.is_some(), "a part has come");
            }
            Point::First | Point::Middle | Point::Last => self.wait_for_gate(&self.decode).await,
        }
    }

    fn open_gate(&self) {
        std::fs::write(self.dir.file("open"), b"").expect("the gate opens");
    }

    fn strike(&self, cell: Cell) {
        let carries_on = match cell.fault {
            Fault::Kill => {
                self.victim(cell.victim).signal(Signal::KILL);
                true
            }
            Fault::Stop => {
                self.victim(cell.victim).signal(Signal::STOP);
                true
            }
            Fault::Cut => {
                self.sessions[cell.victim as usize].hold();
                // That of the decode worker to it alone: whoever comes after it is not cut off.
                match cell.victim {
                    Victim::Prefill => self.kv.hold(),
                    Victim::Decode => {
                        self.kv.hold_after(u64::MAX);
                        self.kv.hold_open();
                    }
                }
                false
            }
            Fault::Leave => true,
        };
        if carries_on {
            self.kv.mend();
        }
        self.open_gate();
    }

    /// Whether nothing is left anywhere of what was asked.
    fn is_clean(&self, alive: usize) -> bool {
        let status = self.pool.status();
        let ready = status.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready);
        let is_idle =
            |state: &EngineState| state.running + state.waiting == 0 && state.blocks_free == state.blocks_total;
        let bound: usize = status.workers.iter().map(|worker| worker.bound).sum();
        status.open + status.waiting + bound == 0
            && ready.clone().count() == alive
            && ready.clone().all(|worker| is_idle(&worker.state))
    }

    /// What can be mended is mended; then nothing may be left: no block, no descriptor, no request.
    async fn settle(&self, cell: Cell, fds: &[usize]) {
        let victim = self.victim(cell.victim);
        if cell.fault == Fault::Stop {
            victim.signal(Signal::CONT);
        }
        self.sessions.iter().chain([&self.kv]).for_each(Relay::mend);
        let dead = usize::from(cell.fault == Fault::Kill);
        let alive = self.workers().count() - dead;
        self.ready(alive).await;
        let clean = wait_for(|| self.is_clean(alive).then_some(())).await;
        assert!(clean.is_some(), "left behind: {:?}", self.pool.status());
        let fewer = || {
            let mut workers = self.workers().zip(fds);
            let is_dead = |worker: &Worker| dead == 1 && worker.pid() == victim.pid();
            workers.all(|(worker, fds)| is_dead(worker) || descriptors(worker.pid()) <= *fds).then_some(())
        };
        let now = || self.workers().map(|worker| descriptors(worker.pid())).collect::<Vec<_>>();
        assert!(wait_for(fewer).await.is_some(), "descriptors: {fds:?}, now {:?}", now());
    }

    fn descriptors(&self) -> Vec<usize> {
        self.workers().map(|worker| descriptors(worker.pid())).collect()
    }

    /// The client has left: both workers stop what they do for it, at once and not when it is done.
    async fn leave(&self, cell: Cell, fds: &[usize]) -> Duration {
        let began = Instant::now();
        if cell.point == Point::Transferring {
            self.kv.mend();
        }
        // The engine of one waits at its gate, and cannot be told; the rest of it is, and closes the connection of the transfer.
        let ahead = usize::from(cell.point == Point::Queued);
        let told = || (descriptors(self.prefill.pid()) <= fds[0] + ahead).then_some(());
        assert!(wait_for(told).await.is_some(), "the prefill worker is told");
        self.strike(cell);
        assert!(wait_for(|| self.is_clean(2).then_some(())).await.is_some(), "left behind: {:?}", self.pool.status());
        let gone = began.elapsed();
        let states = [0, 1].map(|at| self.pool.status().workers[at].state.clone());
        // What the prefill worker has computed, and the decode worker said.
        let computed = match cell.point {
            Point::Queued => AHEAD,
            Point::Computing => HALF,
            _ => PROMPT,
        };
        assert!(states[0].blocks_cached as usize <= computed / BLOCK_TOKENS, "{cell:?}: it went on: {:?}", states[0]);
        if matches!(cell.point, Point::Computing | Point::Transferring | Point::First | Point::Middle) {
            let whole = (OUTPUT * request(cell.kind).choices as usize) as u64;
            assert!(states[1].output_tokens < whole, "{cell:?}: it went on: {:?}", states[1]);
        }
        gone
    }
}

fn kv_socket(worker: &Worker) -> PathBuf {
    PathBuf::from(format!("{}.kv", worker.socket.display()))
}

fn address(path: &Path) -> penstock_proto::Address {
    format!("unix://{}", path.display()).parse().expect("an address")
}

/// Runs one cell.
///
/// # Panics
/// If anything of it is left behind, or it does not come to its point.
pub async fn run(binary: &str, runtime: &FleetRuntime, cell: Cell) -> Outcome {
    let scene = Scene::new(binary, runtime, cell).await;
    let fds = scene.descriptors();
    scene.steer_spare(Steer::Hold).await;
    let mut ahead = None;
    if cell.point == Point::Queued {
        let prompt: Vec<u32> = (0..AHEAD as u32).map(|at| 2 + at).collect();
        ahead = Some(scene.pool.submit(job(prompt, 1, 4)).expect("taken"));
        scene.wait_for_gate(&scene.prefill).await;
    }
    let mut ticket = scene.pool.submit(request(cell.kind)).expect("taken");
    let mut seen = Seen::default();
    let gap = if cell.fault == Fault::Leave {
        tokio::select! {
            () = read(&mut ticket, &mut seen) => panic!("it ends before its point"),
            () = scene.wait_for_point(cell.point) => {}
        }
        drop(ticket);
        scene.leave(cell, &fds).await
    } else {
        let striking = async {
            scene.wait_for_point(cell.point).await;
            scene.steer_spare(Steer::Release).await;
            scene.strike(cell);
            Instant::now()
        };
        let ((), struck) = tokio::join!(read(&mut ticket, &mut seen), striking);
        drop(ticket);
        let next = seen.came.iter().find(|came| **came > struck).copied();
        next.map_or(Duration::ZERO, |next| next - struck)
    };
    if let Some(mut ahead) = ahead {
        assert_eq!(crate::read(&mut ahead).await.failed, None, "the one before it");
    }
    scene.settle(cell, &fds).await;
    Outcome { answer: seen.answer, gap }
}

/// The answer of one worker that does everything, and that nobody disturbs.
///
/// # Panics
/// If there is none.
pub async fn undisturbed(binary: &str, runtime: &FleetRuntime, kind: Kind) -> Answer {
    let dir = Dir::new();
    let worker = Worker::start(binary, &dir, "u", &["--demo"]);
    let pool = crate::pool(runtime, &[&worker], |_| {});
    assert!(pool.ready(crate::PATIENCE).await);
    let answer = crate::read(&mut pool.submit(request(kind)).expect("taken")).await;
    assert_eq!((&answer.failed, answer.tokens[0].len()), (&None, OUTPUT));
    answer
}
