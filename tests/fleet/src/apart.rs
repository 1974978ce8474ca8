//! Fault matrix of separate prefill and decode workers: fault × worker × point in the life of a request × kind of
//! request × transport of its pages × worker that computes the missing rest. Real workers with the demo model and real
//! transfers between them.
//!
//! ```text
//!               ┌─ relay ─ prefill worker ─┐
//! pool (gateway)│                        relay (KV)     a third worker takes over: held until the fault, from a decode worker;
//!               └─ relay ─ decode worker ──┘            with relays of its own, from a prefill worker
//! ```
//! The point is exact: the device of one of them waits at a gate (`fleet-worker --gate`), or the network between them
//! stops after a number of bytes; the fault is made meanwhile. Answers must equal those of one worker that does
//! everything, and nothing may be left behind.

mod scene;

use crate::{Answer, Dir, Worker, demo_grammars, job};
use penstock_pool::{FleetRuntime, Guided, Job, PoolEvent, Steer, Ticket};
use penstock_proto::frames::{Guide, GuideKind, ReasoningBudget};
use scene::Scene;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens of every prompt: several steps of the prefill worker, and some tokens after the last full block.
const PROMPT: usize = 620;

/// Tokens of the prompt that is ahead in a queue.
const AHEAD: usize = 200;

/// Rows of prefill after which the prefill worker waits, in the middle of the prompt.
const HALF: usize = 256;

/// Tokens of every answer.
const OUTPUT: usize = 32;

/// Tokens of an answer that has time to move.
const LONG: usize = 400;

/// Faults and orderly ends of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `kill -9`.
    Kill,
    /// `SIGSTOP`.
    Stop,
    /// The network of the worker, to the gateway and to the other worker, silently carries nothing.
    Cut,
    /// No fault at a worker: the client leaves.
    Leave,
    /// An operator drains the worker: it gets no requests, and lives.
    Hold,
    /// `SIGTERM`: the worker ends when its work is done.
    End,
}

/// Worker that meets the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// Worker that computes the prompt.
    Prefill,
    /// Worker that answers.
    Decode,
}

/// Point in the life of the request at which the fault happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// At the prefill worker, behind another request.
    Queued,
    /// At the prefill worker, which has computed a part.
    Computing,
    /// In transfer: the decode worker has a part of the computed pages.
    Transferring,
    /// After the first token, while the second is computed.
    First,
    /// In the middle of the answer.
    Middle,
    /// While the last token is computed.
    Last,
}

impl Point {
    /// Returns true if pages are still to come at this point.
    pub fn is_early(self) -> bool {
        EARLY.contains(&self)
    }
}

/// Kind of the request.
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
    /// A grammar from the first token on, which another worker may draw.
    Guided,
    /// A budget that closes the reasoning with the first token, and a grammar behind it.
    Budget,
}

/// Transport of the pages between the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Bytes on a socket: a relay between the two loses descriptors.
    Socket,
    /// Memory that both map.
    Memory,
}

/// Worker that computes the rest of a prompt whose prefill worker is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// The decode worker, for lack of another.
    Itself,
    /// A further prefill worker.
    Another,
}

/// Faults that answers survive.
pub const FAULTS: [Fault; 3] = [Fault::Kill, Fault::Stop, Fault::Cut];
/// Orderly ends, by which no request is lost: it continues where it is, or moves.
pub const ORDERLY: [Fault; 2] = [Fault::Hold, Fault::End];
/// The two workers.
pub const VICTIMS: [Victim; 2] = [Victim::Prefill, Victim::Decode];
/// All points.
pub const POINTS: [Point; 6] =
    [Point::Queued, Point::Computing, Point::Transferring, Point::First, Point::Middle, Point::Last];
/// Points before the first token, where pages are still to come.
pub const EARLY: [Point; 3] = [Point::Queued, Point::Computing, Point::Transferring];
/// All kinds.
pub const KINDS: [Kind; 6] = [Kind::Greedy, Kind::Sampled, Kind::Two, Kind::Tools, Kind::Guided, Kind::Budget];

/// One cell of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Fault.
    pub fault: Fault,
    /// Worker that meets it.
    pub victim: Victim,
    /// Point of the request.
    pub point: Point,
    /// Kind of the request.
    pub kind: Kind,
    /// Transport of the pages.
    pub way: Way,
    /// Worker that computes the rest.
    pub rest: Rest,
}

/// Every cell. Transports are varied while pages are still to come, and further prefill workers where one is lost
/// before.
pub fn all() -> Vec<Cell> {
    let mut cells = Vec::new();
    for fault in FAULTS {
        for victim in VICTIMS {
            for point in POINTS {
                for (way, rest) in ways(victim, point) {
                    cells.extend(KINDS.map(|kind| Cell { fault, victim, point, kind, way: *way, rest: *rest }));
                }
            }
        }
    }
    cells
}

fn ways(victim: Victim, point: Point) -> &'static [(Way, Rest)] {
    let all = &[
        (Way::Socket, Rest::Itself),
        (Way::Memory, Rest::Itself),
        (Way::Socket, Rest::Another),
        (Way::Memory, Rest::Another),
    ];
    match (point.is_early(), victim) {
        (false, _) => &all[..1],
        (true, Victim::Decode) => &all[..2],
        (true, Victim::Prefill) => all,
    }
}

/// Every cell of the orderly ends, while pages are to come, and with a decode worker in the middle of an answer.
pub fn orderly() -> Vec<Cell> {
    let mut cells = Vec::new();
    for fault in ORDERLY {
        for victim in VICTIMS {
            let later = (victim == Victim::Decode).then_some(Point::Middle);
            for point in EARLY.into_iter().chain(later) {
                let way = if point.is_early() { Way::Memory } else { Way::Socket };
                cells.extend(KINDS.map(|kind| Cell { fault, victim, point, kind, way, rest: Rest::Itself }));
            }
        }
    }
    cells
}

/// Cells among `all` in which every possible pair of (fault, victim, point, kind, way, rest) occurs.
pub fn pairwise(all: &[Cell]) -> Vec<Cell> {
    let values = |cell: &Cell| {
        let Cell { fault, victim, point, kind, way, rest } = *cell;
        [fault as usize, victim as usize, point as usize, kind as usize, way as usize, rest as usize]
    };
    crate::pairs::pairwise(&all.iter().map(values).collect::<Vec<_>>()).into_iter().map(|at| all[at]).collect()
}

/// Request of a kind.
pub fn request(kind: Kind) -> Job {
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| 1 + i * 37 % 4000).collect();
    let mut job = job(prompt, if kind == Kind::Two { 2 } else { 1 }, OUTPUT as u32);
    match kind {
        Kind::Greedy => (job.sampling.temperature, job.sampling.logprobs) = (0.0, 3),
        Kind::Sampled => (job.sampling.frequency_penalty, job.sampling.repetition_penalty) = (0.5, 1.1),
        Kind::Two => {}
        Kind::Guided => job.grammar = Some(guided(Vec::new())),
        Kind::Budget => {
            let closing = vec![END_OF_REASONING];
            job.grammar = Some(guided(closing.clone()));
            let ending = "</think>".to_owned();
            job.sampling.reasoning = Some(ReasoningBudget { is_open: true, ending, closing, ..Default::default() });
        }
        Kind::Tools => {
            job.sampling.allowed_tokens = (1..4000).step_by(3).collect();
            job.sampling.stop_tokens = vec![4, 7];
            job.sampling.min_tokens = OUTPUT as u32;
        }
    }
    job
}

/// The demo model's `</think>`.
pub const END_OF_REASONING: u32 = 4095;

/// Grammar of an answer without end: forced words, and behind them digits that are drawn to the last.
fn guided(begins_after: Vec<u32>) -> Arc<Guided> {
    let text = "the answer is [0-9 ]+".to_owned();
    let guide = Guide { kind: GuideKind::Regex.into(), text, begins_after };
    Arc::new(Guided { id: demo_grammars().vocabulary().id().into(), guide })
}

impl Cell {
    /// Request of the cell.
    fn request(self) -> Job {
        let job = request(self.kind);
        if ORDERLY.contains(&self.fault) { longer(job) } else { job }
    }
}

/// Request with an answer long enough to move.
pub fn longer(mut job: Job) -> Job {
    let sampling = &mut job.sampling;
    sampling.min_tokens = if sampling.min_tokens > 0 { LONG as u32 } else { 0 };
    sampling.max_tokens = LONG as u32;
    job
}

/// An answer, with the arrival times of its tokens.
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

/// Outcome of a cell.
pub struct Outcome {
    /// Answer; for a client that left, the part that it had received.
    pub answer: Answer,
    /// Time from the fault to the next token; for a client that left, until both workers had freed everything.
    pub gap: Duration,
}

/// Runs one cell.
///
/// # Panics
/// If anything of the cell is left behind, or the request does not come to its point.
pub async fn run(binary: &str, runtime: &FleetRuntime, cell: Cell) -> Outcome {
    let scene = Scene::new(binary, runtime, cell).await;
    let fds = scene.descriptors();
    scene.steer_spare(Steer::Hold).await;
    let ahead = if cell.point == Point::Queued { scene.occupy().await } else { Vec::new() };
    let mut ticket = scene.pool.submit(cell.request()).expect("taken");
    let mut seen = Seen::default();
    let (at, gap) = if cell.fault == Fault::Leave {
        let at = tokio::select! {
            () = read(&mut ticket, &mut seen) => panic!("it ends before its point"),
            at = scene.wait_for_point(cell.point) => at,
        };
        drop(ticket);
        (at, scene.leave(cell, &fds).await)
    } else {
        let striking = async {
            let at = scene.wait_for_point(cell.point).await;
            scene.steer_spare(Steer::Release).await;
            scene.strike(cell, at).await;
            (at, Instant::now())
        };
        let ((), (at, struck)) = tokio::join!(read(&mut ticket, &mut seen), striking);
        drop(ticket);
        let next = seen.came.iter().find(|came| **came > struck).copied();
        (at, next.map_or(Duration::ZERO, |next| next - struck))
    };
    for mut ahead in ahead {
        assert_eq!(crate::read(&mut ahead).await.failed, None, "the one before it");
    }
    scene.settle(cell, at, &fds).await;
    if FAULTS.contains(&cell.fault) {
        scene.check_ways(cell, at);
    } else if ORDERLY.contains(&cell.fault) {
        scene.check_order(cell);
    }
    Outcome { answer: seen.answer, gap }
}

/// Answer of one worker that does everything without a fault.
///
/// # Panics
/// If there is none.
pub async fn undisturbed(binary: &str, runtime: &FleetRuntime, job: Job) -> Answer {
    let tokens = job.sampling.max_tokens as usize;
    let dir = Dir::new();
    let worker = Worker::start(binary, &dir, "u", &["--demo"]);
    let pool = crate::pool(runtime, &[&worker], |_| {});
    assert!(pool.ready(crate::PATIENCE).await);
    let answer = crate::read(&mut pool.submit(job).expect("taken")).await;
    assert_eq!((&answer.failed, answer.tokens[0].len()), (&None, tokens));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_runs_few_cells() {
        let all = all();
        let chosen = pairwise(&all);
        assert_eq!(all.len(), 3 * KINDS.len() * (2 * 3 + 3 * 2 + 3 * 4));
        assert!(chosen.len() <= 44, "{}", chosen.len());
        assert_eq!(orderly().len(), 2 * KINDS.len() * (3 + 4));
        assert!(pairwise(&orderly()).len() <= 28);
        for (kind, point) in KINDS.into_iter().flat_map(|kind| EARLY.map(|point| (kind, point))) {
            let is_there = |what: fn(&Cell) -> bool| {
                chosen.iter().any(|cell| cell.kind == kind && what(cell))
                    && chosen.iter().any(|cell| cell.point == point && what(cell))
            };
            assert!(is_there(|cell| cell.way == Way::Memory) && is_there(|cell| cell.rest == Rest::Another));
        }
    }
}
