//! The fault matrix of prefill and decode apart: what happens × to which of the two workers × where in the life of a request × what kind of
//! request × how pages go from one to the other × who computes what is missing then. Real workers with the demo model and real transfers
//! between them.
//!
//! ```text
//!               ┌─ relay ─ prefill worker ─┐
//! pool (gateway)│                        relay (KV)     a third worker takes over: held until the fault, from a decode worker;
//!               └─ relay ─ decode worker ──┘            with relays of its own, from a prefill worker
//! ```
//! Where is exact: the device of one of them waits at a gate (`fleet-worker --gate`), or the network between them stops after so many bytes;
//! the fault is made meanwhile. Answers must be those of one worker that does everything, and nothing may be left behind.

mod scene;

use crate::{Answer, Dir, Worker, job};
use penstock_pool::{FleetRuntime, Job, PoolEvent, Steer, Ticket};
use scene::Scene;
use std::time::{Duration, Instant};

/// Tokens of every prompt: several steps of the prefill worker, and some tokens after the last full block.
const PROMPT: usize = 620;

/// The same of the one that is ahead in a queue.
const AHEAD: usize = 200;

/// Rows of prefill after which the prefill worker waits, in the middle of the prompt.
const HALF: usize = 256;

/// Tokens of every answer.
const OUTPUT: usize = 32;

/// Tokens of one that has the time to move.
const LONG: usize = 400;

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
    /// An operator drains it: it shall be left, and lives.
    Hold,
    /// `SIGTERM`: it ends when it has nothing left to do.
    End,
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

impl Point {
    /// Whether pages are still to come then.
    pub fn is_early(self) -> bool {
        EARLY.contains(&self)
    }
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

/// How pages go from one worker to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// As bytes: something between the two loses descriptors.
    Socket,
    /// Through memory that both map.
    Memory,
}

/// Who computes the rest of a prompt whose prefill worker is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// The decode worker: there is no other.
    Itself,
    /// Another prefill worker.
    Another,
}

/// Faults that answers survive.
pub const FAULTS: [Fault; 3] = [Fault::Kill, Fault::Stop, Fault::Cut];
/// Nobody is lost by these: what is under way goes on where it is, or moves.
pub const ORDERLY: [Fault; 2] = [Fault::Hold, Fault::End];
/// Both.
pub const VICTIMS: [Victim; 2] = [Victim::Prefill, Victim::Decode];
/// All.
pub const POINTS: [Point; 6] =
    [Point::Queued, Point::Computing, Point::Transferring, Point::First, Point::Middle, Point::Last];
/// Those before the first token: pages are still to come.
pub const EARLY: [Point; 3] = [Point::Queued, Point::Computing, Point::Transferring];
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
    /// On which way of its pages.
    pub way: Way,
    /// With whom to go on.
    pub rest: Rest,
}

/// Every cell. Where pages go counts while they are still to come, and another prefill worker when one is lost before.
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

/// Every cell of what is orderly, while pages are to come, and with a decode worker in the middle of an answer.
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

/// Of these, cells in which every two of (fault, victim, point, kind, way, rest) meet that can.
pub fn pairwise(all: &[Cell]) -> Vec<Cell> {
    let values = |cell: &Cell| {
        let Cell { fault, victim, point, kind, way, rest } = *cell;
        [fault as usize, victim as usize, point as usize, kind as usize, way as usize, rest as usize]
    };
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

impl Cell {
    /// What is asked for.
    fn request(self) -> Job {
        let job = request(self.kind);
        if ORDERLY.contains(&self.fault) { longer(job) } else { job }
    }
}

/// The same with an answer that has the time to move.
pub fn longer(mut job: Job) -> Job {
    let sampling = &mut job.sampling;
    sampling.min_tokens = if sampling.min_tokens > 0 { LONG as u32 } else { 0 };
    sampling.max_tokens = LONG as u32;
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

/// Runs one cell.
///
/// # Panics
/// If anything of it is left behind, or it does not come to its point.
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

/// The answer of one worker that does everything, and that nobody disturbs.
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
        assert_eq!(all.len(), 3 * 4 * (2 * 3 + 3 * 2 + 3 * 4));
        assert!(chosen.len() <= 32, "{}", chosen.len());
        assert_eq!(orderly().len(), 2 * 4 * (3 + 4));
        assert!(pairwise(&orderly()).len() <= 20);
        for (kind, point) in KINDS.into_iter().flat_map(|kind| EARLY.map(|point| (kind, point))) {
            let is_there = |what: fn(&Cell) -> bool| {
                chosen.iter().any(|cell| cell.kind == kind && what(cell))
                    && chosen.iter().any(|cell| cell.point == point && what(cell))
            };
            assert!(is_there(|cell| cell.way == Way::Memory) && is_there(|cell| cell.rest == Rest::Another));
        }
    }
}
