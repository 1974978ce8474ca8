//! Fault matrix: fault of a worker × point in the life of a request × kind of request. One cell is one request whose
//! worker meets its fault at exactly that token; its answer must equal that of an undisturbed run, and nothing may be
//! left behind.
//!
//! The point is exact because the fake device waits at a gate (`fleet-worker --gate`): the fault is made while it
//! waits.

use crate::relay::Relay;
use crate::{Answer, Dir, Worker, fake_grammars, job, wait_for};
use penstock_pool::{FleetRuntime, Guided, Job, Pool, PoolConfig, PoolEvent, Steer, Ticket, WorkerPhase};
use penstock_proto::frames::{Guide, GuideKind, LogitBias, ReasoningBudget};
use rustix::process::Signal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens of every prompt, also of the one ahead in a queue.
const PROMPT: usize = 100;
const AHEAD: usize = 50;

/// Tokens of every answer.
const OUTPUT: usize = 64;

/// Length of a sequence in the middle of its answer.
pub const MIDDLE: usize = PROMPT + OUTPUT / 2;

/// Tokens after which a reader has enough of a choice ([`Kind::Stopped`]).
const ENOUGH: usize = 20;

/// Fault of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `kill -9`.
    Kill,
    /// `SIGSTOP`: the worker is silent but alive; it wakes when all is over.
    Stop,
    /// The network silently carries nothing; when all is over, the held bytes arrive.
    Cut,
    /// The connection is closed in the middle of a frame; the worker lives.
    Break,
}

/// Point in the life of the request at which the fault happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// At the worker, behind another request.
    Queued,
    /// In prefill.
    Computing,
    /// After the first token.
    First,
    /// In the middle of the answer.
    Middle,
    /// While the last token is computed.
    Last,
}

/// Kind of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Temperature 0.
    Greedy,
    /// Drawn, with a seed and penalties.
    Sampled,
    /// Two choices.
    Two,
    /// Two choices, one of which the reader stops (a stop string matched).
    Stopped,
    /// Only some tokens are allowed, and an end token is held back.
    Allowed,
    /// A grammar with forced runs and free tokens between them, as for a tool call.
    Guided,
    /// A budget of reasoning tokens that is spent in the middle of the answer, and a grammar behind the reasoning.
    Budget,
    /// With log-probabilities of prompt and output.
    Logprobs,
}

/// All faults.
pub const FAULTS: [Fault; 4] = [Fault::Kill, Fault::Stop, Fault::Cut, Fault::Break];
/// All points.
pub const POINTS: [Point; 5] = [Point::Queued, Point::Computing, Point::First, Point::Middle, Point::Last];
/// All kinds.
pub const KINDS: [Kind; 8] =
    [Kind::Greedy, Kind::Sampled, Kind::Two, Kind::Stopped, Kind::Allowed, Kind::Guided, Kind::Budget, Kind::Logprobs];

/// One cell of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Fault of the worker.
    pub fault: Fault,
    /// Point of the request.
    pub point: Point,
    /// Kind of the request.
    pub kind: Kind,
}

/// Every cell.
pub fn all() -> Vec<Cell> {
    let cell = |fault, point| move |kind| Cell { fault, point, kind };
    let row = |fault| POINTS.into_iter().flat_map(move |point| KINDS.into_iter().map(cell(fault, point)));
    FAULTS.into_iter().flat_map(row).collect()
}

/// Cells in which every pair of (fault, point, kind) occurs; always the same ones.
pub fn pairwise() -> Vec<Cell> {
    let all = all();
    let values: Vec<_> =
        all.iter().map(|cell| [cell.fault as usize, cell.point as usize, cell.kind as usize]).collect();
    crate::pairs::pairwise(&values).into_iter().map(|at| all[at]).collect()
}

/// Request of a kind.
pub fn request(kind: Kind) -> Job {
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| 1 + i * 7 % 250).collect();
    let choices = if matches!(kind, Kind::Two | Kind::Stopped) { 2 } else { 1 };
    let mut job = job(prompt, choices, OUTPUT as u32);
    match kind {
        Kind::Greedy => job.sampling.temperature = 0.0,
        Kind::Sampled => job.sampling.frequency_penalty = 0.5,
        Kind::Two | Kind::Stopped => {}
        Kind::Guided => job.grammar = Some(Arc::new(guided())),
        Kind::Budget => {
            job.sampling.reasoning = Some(budget());
            // Each closing token takes a step, so that the fault in the middle finds some of them emitted.
            job.sampling.logprobs = 0;
            // It begins after the token that no model draws by itself.
            let mut behind = guided();
            behind.guide.begins_after = vec![u32::from(b'^')];
            job.grammar = Some(Arc::new(behind));
            job.sampling.logit_bias.push(LogitBias { token: u32::from(b'^'), bias: -100.0 });
        }
        Kind::Allowed => {
            job.sampling.allowed_tokens = (1..250).step_by(3).collect();
            job.sampling.stop_tokens = vec![4, 7];
            job.sampling.min_tokens = OUTPUT as u32;
        }
        Kind::Logprobs => (job.sampling.logprobs, job.sampling.prompt_logprobs) = (4, 2),
    }
    job
}

/// Grammar of periods of eight tokens, the first six of them forced. The last token of an answer is drawn.
fn guided() -> Guided {
    let guide =
        Guide { kind: GuideKind::Regex.into(), text: "(xyzabc[0-9][0-9])+".to_owned(), begins_after: Vec::new() };
    Guided { id: fake_grammars().vocabulary().id().into(), guide }
}

/// Budget of an answer that begins inside its reasoning, spent three tokens before the middle of the answer.
fn budget() -> ReasoningBudget {
    ReasoningBudget {
        tokens: OUTPUT as u32 / 2 - 3,
        is_open: true,
        ending: "^".into(),
        closing: b"-----^".map(u32::from).to_vec(),
        ..ReasoningBudget::default()
    }
}

/// Reads an answer in the manner of its kind.
///
/// # Panics
/// If the answer has no end within [`crate::PATIENCE`].
pub async fn read_as(kind: Kind, ticket: &mut Ticket, resumed: &mut Option<Instant>) -> Answer {
    let mut answer = Answer::default();
    let mut stopped = kind != Kind::Stopped;
    loop {
        let event = tokio::time::timeout(crate::PATIENCE, ticket.next()).await.expect("an event in time");
        let Some(event) = event else { break };
        if matches!(event, PoolEvent::Output(_)) && !answer.resumed.is_empty() {
            resumed.get_or_insert_with(Instant::now);
        }
        answer.add(event);
        if !stopped && answer.tokens.get(1).is_some_and(|tokens| tokens.len() >= ENOUGH) {
            ticket.cancel_choice(1);
            stopped = true;
        }
    }
    if kind == Kind::Stopped {
        // Tokens after the stop belong to no answer.
        answer.tokens[1].truncate(ENOUGH);
    }
    answer
}

/// Outcome of a cell.
pub struct Outcome {
    /// The answer.
    pub answer: Answer,
    /// Time from the fault to the first token after it; `None` when the request did not need to move.
    pub gap: Option<Duration>,
}

/// A pool of two workers, one of which will meet its fault.
struct Scene {
    dir: Dir,
    pool: Pool,
    victim: Worker,
    other: Worker,
    relay: Relay,
}

impl Scene {
    async fn new(binary: &str, runtime: &FleetRuntime, gate: usize) -> Self {
        let dir = Dir::new();
        let gates = format!("{gate}:{}", dir.path().display());
        let victim = Worker::start(binary, &dir, "a", &["--step-ms", "2", "--gate", &gates]);
        let other = Worker::start(binary, &dir, "b", &["--step-ms", "2"]);
        let relay = Relay::start(&dir, "a", &victim.socket);
        let mut config = PoolConfig::new("matrix");
        let address = |path: &std::path::Path| format!("unix://{}", path.display()).parse().expect("an address");
        config.connect = vec![address(relay.socket()), address(&other.socket)];
        let pool = Pool::start(runtime, config).expect("the pool starts");
        let scene = Self { dir, pool, victim, other, relay };
        scene.ready(2).await;
        scene
    }

    async fn ready(&self, count: usize) {
        let is_ready = || {
            let status = self.pool.status();
            let ready = status.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready).count();
            (ready >= count).then_some(())
        };
        assert!(wait_for(is_ready).await.is_some(), "{:?}", self.pool.status());
    }

    fn other_name(&self) -> String {
        self.pool.status().workers[1].name.clone()
    }

    fn reached(&self) -> PathBuf {
        self.dir.file(&format!("reached-{}", self.victim.pid()))
    }

    async fn wait_for_gate(&self) {
        let reached = self.reached();
        assert!(wait_for(|| reached.exists().then_some(())).await.is_some(), "the gate is reached");
    }

    fn open_gate(&self) {
        std::fs::write(self.dir.file("open"), b"").expect("the gate opens");
    }

    /// Makes the fault while the device waits at the gate; then opens the gate for surviving workers.
    fn strike(&self, fault: Fault) {
        match fault {
            Fault::Kill => self.victim.signal(Signal::KILL),
            Fault::Stop => self.victim.signal(Signal::STOP),
            Fault::Cut => self.relay.hold(),
            Fault::Break => self.relay.cut_next(),
        }
        self.open_gate();
    }

    /// Mends the fault as far as possible; then nothing of the request may be left anywhere.
    async fn settle(&self, fault: Fault, fds: [usize; 2]) {
        match fault {
            Fault::Kill | Fault::Break => {}
            Fault::Stop => self.victim.signal(Signal::CONT),
            Fault::Cut => self.relay.mend(),
        }
        let alive = if fault == Fault::Kill { 1 } else { 2 };
        self.ready(alive).await;
        let is_clean = || {
            let status = self.pool.status();
            let of_pool =
                status.open + status.waiting + status.workers.iter().map(|worker| worker.bound).sum::<usize>();
            let ready = status.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready);
            let is_idle = |state: &penstock_proto::frames::EngineState| {
                state.running + state.waiting == 0 && state.blocks_free == state.blocks_total
            };
            (of_pool == 0 && ready.clone().count() == alive && ready.clone().all(|worker| is_idle(&worker.state)))
                .then_some(())
        };
        assert!(wait_for(is_clean).await.is_some(), "left behind: {:?}", self.pool.status());
        let now = || [&self.victim, &self.other].map(|worker| descriptors(worker.pid()));
        let fewer = |now: [usize; 2]| (fault == Fault::Kill || now[0] <= fds[0]) && now[1] <= fds[1];
        assert!(wait_for(|| fewer(now()).then_some(())).await.is_some(), "descriptors: {fds:?}, now {:?}", now());
    }
}

/// Open descriptors of a process.
pub fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// Runs one cell.
///
/// # Panics
/// If anything of the fault is left behind.
pub async fn run(binary: &str, runtime: &FleetRuntime, cell: Cell) -> Outcome {
    let gate = match cell.point {
        Point::Queued => AHEAD,
        Point::Computing => PROMPT,
        Point::First => PROMPT + 1,
        Point::Middle => MIDDLE,
        Point::Last => PROMPT + OUTPUT - 1,
    };
    let scene = Scene::new(binary, runtime, gate).await;
    let fds = [&scene.victim, &scene.other].map(|worker| descriptors(worker.pid()));
    // Held, so that the request goes to the other worker.
    let other = scene.other_name();
    scene.pool.steer(&other, Steer::Hold).await.expect("held");
    let mut ahead = None;
    if cell.point == Point::Queued {
        ahead = Some(scene.pool.submit(job(vec![9; AHEAD], 1, 8)).expect("taken"));
        scene.wait_for_gate().await;
    }
    let mut ticket = scene.pool.submit(request(cell.kind)).expect("taken");
    let bound = 1 + usize::from(ahead.is_some());
    assert!(wait_for(|| (scene.pool.status().workers[0].bound == bound).then_some(())).await.is_some(), "bound");
    let mut resumed = None;
    let reading = read_as(cell.kind, &mut ticket, &mut resumed);
    let striking = async {
        scene.wait_for_gate().await;
        scene.pool.steer(&other, Steer::Release).await.expect("released");
        scene.strike(cell.fault);
        Instant::now()
    };
    let (answer, struck) = tokio::join!(reading, striking);
    drop(ticket);
    if let Some(mut ahead) = ahead {
        assert_eq!(crate::read(&mut ahead).await.failed, None, "and the one before it");
    }
    scene.settle(cell.fault, fds).await;
    let gap = resumed.map(|at| at.saturating_duration_since(struck));
    Outcome { answer, gap }
}

/// Answer of an undisturbed run.
///
/// # Panics
/// If there is none.
pub async fn undisturbed(binary: &str, runtime: &FleetRuntime, kind: Kind) -> Answer {
    let dir = Dir::new();
    let worker = Worker::start(binary, &dir, "u", &[]);
    let pool = crate::pool(runtime, &[&worker], |_| {});
    assert!(pool.ready(crate::PATIENCE).await);
    let answer = read_as(kind, &mut pool.submit(request(kind)).expect("taken"), &mut None).await;
    assert_eq!((&answer.failed, answer.tokens[0].len()), (&None, OUTPUT));
    if kind == Kind::Budget {
        let text: Vec<u8> = answer.tokens[0].iter().map(|token| *token as u8).collect();
        assert_eq!(&text[OUTPUT / 2 - 3..][..9], b"-----^xyz", "the reasoning was closed");
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_runs_few_cells() {
        let (all, chosen) = (all(), pairwise());
        assert_eq!(all.len(), FAULTS.len() * POINTS.len() * KINDS.len());
        assert!(chosen.len() <= 40, "{}", chosen.len());
    }
}
