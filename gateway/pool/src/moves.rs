//! Live migration: a request goes on at another worker while the old one still decodes.
//!
//! ```text
//! old worker   ─ decode ─ decode ─ decode ─ decode ─ decode ─┐ cancel
//!                  │ sealed blocks        │ new ones          │
//! new worker       └──── pull ────────────└─ pull ─           └ generate (with all that was emitted) ─ decode ─ decode
//! ```
//! Of several choices, which have the blocks of their prompt in common, one is pulled first: the new worker has those blocks
//! when the others are pulled. Blocks are pulled until at most [`SETTLED`] of them are missing. Then the request leaves the old worker at a step
//! boundary and goes on at the new one, which computes the rest: at most one block and the open one. The result is
//! exact, because a token's logits do not depend on the batch they are computed in. Until the change the old worker
//! decodes undisturbed, so a failed migration leaves the request where it is.
//!
//! Requests are moved off workers that are being left (held, restarting, draining, or with a new role that does not
//! decode), and off a worker whose steps have become much longer than another worker's would be: `targets.rs` chooses.
//! Pure: frames are sent, and requests handed over, by the actor.

mod targets;

pub(super) use targets::Targets;

use penstock_proto::frames::{Pull, Pulled};
use penstock_proto::{BlockHash, PullId, RequestId, SessionId};
use penstock_router::WorkerId;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Blocks that may be missing when a request changes over: one block was sealed while the last pull ran.
const SETTLED: usize = 1;

/// Blocks that may be missing at the change when pulls bring nothing more: few enough to be computed in one step.
const BEARABLE: usize = 4;

/// Most pulls of one migration. A request that seals blocks faster than pulls bring them stays.
const ROUNDS_MAX: u32 = 8;

/// Reason of a migration that ends with the loss or the release of one of its workers.
pub(super) const GONE: &str = "a worker of the move has gone or is draining";

/// Time limits of one pull of blocks and of one whole migration.
const PULL_DEADLINE: Duration = Duration::from_secs(10);
const MOVE_DEADLINE: Duration = Duration::from_secs(30);

/// Concurrent migrations per pool: each is a stream of bytes between two workers that serve other requests.
pub(super) const MOVES_MAX: usize = 4;

/// Pause after a move or a failed move before the request is moved again.
pub(super) const REST: Duration = Duration::from_secs(5);

/// Pause after a pull that brought nothing from a worker that is being left: the blocks may still be on their way there.
const REST_LEAVING: Duration = Duration::from_millis(250);

/// Time for which a worker must be too slow before a request leaves it (hysteresis).
const UNEVEN_FOR: Duration = Duration::from_secs(2);

/// Cause of moving a running request to another worker; a label of the counters of moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// An operator named the request and the new worker ([`Pool::migrate`](crate::Pool::migrate)).
    Asked,
    /// The request's worker is being emptied, for example because it drains or an operator holds it.
    Leaving,
    /// The request's worker is slower for it than another one would be.
    Balance,
}

impl Cause {
    /// All causes, in the order of the arrays in [`Counts`](crate::Counts).
    pub const ALL: [Self; 3] = [Self::Asked, Self::Leaving, Self::Balance];

    /// Name of the cause as the metrics' label has it: `asked`, `leaving` or `balance`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Asked => "asked",
            Self::Leaving => "leaving",
            Self::Balance => "balance",
        }
    }
}

/// Reason that a request does not move. The request goes on where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// The request is not in its decode phase: it waits, is in prefill, moves already, or has ended.
    #[error("the request is not in its decode phase")]
    NotDecoding,
    /// No worker has that name, the worker takes nothing new, or the request is there already.
    #[error("the request cannot go to that worker")]
    NoWorker,
    /// The two workers differ in numerics or block size, or one of them has no transfer address.
    #[error("the two workers cannot hand blocks over to each other")]
    Unlike,
    /// The migration began and was abandoned for this reason; the request goes on where it is.
    #[error("{0}")]
    Failed(&'static str),
    /// The pool's actor has ended, so nobody can carry out the move.
    #[error("the pool does not answer")]
    Closed,
}

/// Channel to the caller that waits for the end of a migration.
pub(super) type Done = Option<oneshot::Sender<Result<(), MoveError>>>;

/// One migration: its two workers, their sessions, and the KV blocks pulled so far for each choice.
pub(super) struct Move {
    pub(super) from: WorkerId,
    pub(super) to: WorkerId,
    /// Sessions of the old and the new worker: a new session has none of the blocks.
    pub(super) sessions: [Option<SessionId>; 2],
    pub(super) cause: Cause,
    pub(super) began: Instant,
    /// Number of rounds of pulls so far.
    pub(super) round: u32,
    chains: Vec<Chain>,
    done: Done,
}

impl Move {
    /// A migration that has pulled nothing yet.
    pub(super) fn new(
        (from, to): (WorkerId, WorkerId),
        sessions: [Option<SessionId>; 2],
        cause: Cause,
        done: Done,
        now: Instant,
    ) -> Self {
        Self { from, to, sessions, cause, began: now, round: 0, chains: Vec::new(), done }
    }

    /// Notes the blocks of each choice that came with those of another one.
    fn share(&mut self, sealed: &[(u32, Vec<BlockHash>)]) {
        let sealed_of = |choice| sealed.iter().find(|(of, _)| *of == choice).map_or(&[][..], |(_, hashes)| hashes);
        let Some(most) = self.chains.iter().max_by_key(|chain| chain.have) else { return };
        let there = sealed_of(most.choice);
        let there = &there[..most.have.min(there.len())];
        for chain in &mut self.chains {
            let common = sealed_of(chain.choice).iter().zip(there).take_while(|(own, there)| own == there).count();
            if common > chain.have {
                let gained = chain.have - chain.had;
                (chain.have, chain.had) = (common, common - gained);
            }
        }
    }

    /// Number of leading KV blocks that the new worker has of every choice.
    pub(super) fn blocks(&self) -> usize {
        self.chains.iter().map(|chain| chain.have).min().unwrap_or(0)
    }
}

/// Progress of pulling one choice's chain of KV blocks to the new worker.
struct Chain {
    choice: u32,
    /// Number of the choice's leading KV blocks that the new worker has.
    have: usize,
    /// Number of blocks in `have` when the running pull was asked for.
    had: usize,
    /// Number of the running pull, and the length of the chain up to which it asks.
    pull: Option<(PullId, usize)>,
}

impl Chain {
    /// Records the end of a pull and returns how many blocks are new. The worker's count is clamped to what was asked
    /// for. `None`: the pull belongs to another chain.
    fn came(&mut self, pull: PullId, blocks: u32) -> Option<usize> {
        let (_, asked) = self.pull.take_if(|(id, _)| *id == pull)?;
        let have = (blocks as usize).min(asked).max(self.have);
        Some(have - std::mem::replace(&mut self.have, have))
    }
}

/// All running migrations of a pool by request, with the pulls that they wait for.
#[derive(Default)]
pub(super) struct Moves {
    running: HashMap<RequestId, Move>,
    /// Request that each running pull belongs to, by the number of the pull.
    pulls: HashMap<PullId, RequestId>,
    next_pull: u64,
    /// The slowest worker and the instant since which it is too slow.
    uneven: Option<(WorkerId, Instant)>,
    /// A migration has ended or a worker is being left: the next migration need not wait for a tick.
    pub(super) is_due: bool,
    pub(super) counts: MoveCounts,
}

/// Counters of the migrations that have ended, by [`Cause`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MoveCounts {
    pub(super) moved: [u64; Cause::ALL.len()],
    pub(super) failed: [u64; Cause::ALL.len()],
    /// KV blocks that new workers have fetched.
    pub(super) blocks: u64,
}

/// Next action of a migration.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// A pull runs, or there is no such migration.
    Wait,
    /// The new worker has nearly all blocks: the request changes over.
    Change,
    /// The new worker is to pull more blocks. The frames lack the address to pull `from`.
    Pull { from: WorkerId, to: WorkerId, frames: Vec<Pull> },
    /// The migration is given up, and the request left alone for `rest`.
    Abandon { why: &'static str, rest: Duration },
}

impl Moves {
    /// Number of migrations that run.
    pub(super) fn len(&self) -> usize {
        self.running.len()
    }

    /// Returns true if a request is being moved.
    pub(super) fn is_moving(&self, request: RequestId) -> bool {
        self.running.contains_key(&request)
    }

    /// The running migration of a request.
    pub(super) fn get(&self, request: RequestId) -> Option<&Move> {
        self.running.get(&request)
    }

    /// Begins a migration; [`Moves::advance`] has its first action.
    pub(super) fn begin(&mut self, request: RequestId, one: Move) {
        self.running.insert(request, one);
    }

    /// Returns true if a migration waits for none of its pulls.
    pub(super) fn may_advance(&self, request: RequestId) -> bool {
        self.running.get(&request).is_some_and(|one| one.chains.iter().all(|chain| chain.pull.is_none()))
    }

    /// Next action of a migration whose request has `sealed` these blocks, per open choice.
    pub(super) fn advance(&mut self, request: RequestId, sealed: &[(u32, Vec<BlockHash>)]) -> Next {
        if !self.may_advance(request) {
            return Next::Wait;
        }
        let Some(one) = self.running.get_mut(&request) else { return Next::Wait };
        one.chains.retain(|chain| sealed.iter().any(|(choice, _)| *choice == chain.choice));
        for (choice, _) in sealed {
            if one.chains.iter().all(|chain| chain.choice != *choice) {
                one.chains.push(Chain { choice: *choice, have: 0, had: 0, pull: None });
            }
        }
        one.share(sealed);
        let have = |choice| one.chains.iter().find(|chain| chain.choice == choice).map_or(0, |chain| chain.have);
        let missing = sealed.iter().map(|(choice, chain)| chain.len().saturating_sub(have(*choice))).max().unwrap_or(0);
        let brings = one.round == 0 || one.chains.iter().any(|chain| chain.have > chain.had);
        if missing <= SETTLED || missing <= BEARABLE && !brings {
            return Next::Change;
        }
        if !brings || one.round >= ROUNDS_MAX {
            let rest = if one.cause == Cause::Leaving && !brings { REST_LEAVING } else { REST };
            let why = if brings {
                "the request grows faster than its KV blocks are moved"
            } else {
                "the KV blocks of the request cannot be fetched"
            };
            return Next::Abandon { why, rest };
        }
        // Of choices with a common prompt one goes first: pulled at once, each would bring the prompt again.
        let is_common = |chain: &[BlockHash]| chain.first() == sealed.first().and_then(|(_, first)| first.first());
        let goes_first = one.round == 0 && sealed.iter().all(|(_, chain)| is_common(chain));
        one.round += 1;
        let mut frames = Vec::new();
        for (choice, hashes) in sealed {
            let Some(chain) = one.chains.iter_mut().find(|chain| chain.choice == *choice) else { continue };
            chain.had = chain.have;
            if hashes.len() > chain.have && (frames.is_empty() || !goes_first) {
                self.next_pull += 1;
                let id = PullId(self.next_pull);
                chain.pull = Some((id, hashes.len()));
                self.pulls.insert(id, request);
                let hashes = hashes.iter().map(|hash| hash.to_bytes().to_vec()).collect();
                let deadline_seconds = PULL_DEADLINE.as_secs_f64();
                frames.push(Pull { id: id.0, from: String::new(), hashes, deadline_seconds });
            }
        }
        Next::Pull { from: one.from, to: one.to, frames }
    }

    /// Takes in a worker's report on the end of a pull. Returns the request that it belongs to; `None`: it belongs to
    /// no running migration.
    pub(super) fn pulled(&mut self, worker: WorkerId, session: SessionId, pulled: &Pulled) -> Option<RequestId> {
        let pull = PullId(pulled.id);
        let request = *self.pulls.get(&pull)?;
        let one = self.running.get_mut(&request)?;
        if one.to != worker || one.sessions[1] != Some(session) {
            return None;
        }
        self.pulls.remove(&pull);
        let new = one.chains.iter_mut().find_map(|chain| chain.came(pull, pulled.blocks))?;
        self.counts.blocks += new as u64;
        Some(request)
    }

    /// Ends a migration: its request has changed over.
    pub(super) fn succeed(&mut self, request: RequestId) -> Option<Move> {
        let mut one = self.remove(request)?;
        self.counts.moved[one.cause as usize] += 1;
        tell(one.done.take(), Ok(()));
        Some(one)
    }

    /// Ends a migration without a move, for this reason.
    pub(super) fn fail(&mut self, request: RequestId, why: &'static str) -> Option<Move> {
        let mut one = self.remove(request)?;
        self.counts.failed[one.cause as usize] += 1;
        tell(one.done.take(), Err(MoveError::Failed(why)));
        Some(one)
    }

    /// Ends the migration of a request that has finished or has lost its worker; it counts as neither moved nor failed.
    pub(super) fn end(&mut self, request: RequestId) {
        if let Some(one) = self.remove(request) {
            tell(one.done, Err(MoveError::NotDecoding));
        }
    }

    fn remove(&mut self, request: RequestId) -> Option<Move> {
        self.pulls.retain(|_, of| *of != request);
        let gone = self.running.remove(&request);
        self.is_due |= gone.is_some();
        gone
    }

    /// The running migrations, each with the reason and the rest for which it is to be given up now, if it is. `is_on`:
    /// both sessions of the migration still exist, and its new worker still takes requests.
    pub(super) fn fates(
        &self,
        is_on: impl Fn(&Move) -> bool,
        now: Instant,
    ) -> Vec<(RequestId, Option<(&'static str, Duration)>)> {
        let fate = |one: &Move| match now.saturating_duration_since(one.began) > MOVE_DEADLINE {
            true => Some(("the move took too long", REST)),
            // No pause: the request may go to another worker at once.
            false if !is_on(one) => Some((GONE, Duration::ZERO)),
            false => None,
        };
        self.running.iter().map(|(request, one)| (*request, fate(one))).collect()
    }

    /// Notes the worker that a request should leave because it is too slow; `None`: none is. Returns true once that
    /// worker has been too slow for [`UNEVEN_FOR`].
    pub(super) fn is_uneven(&mut self, slow: Option<WorkerId>, now: Instant) -> bool {
        let since = self.uneven.filter(|(at, _)| Some(*at) == slow).map_or(now, |(_, since)| since);
        self.uneven = slow.map(|slow| (slow, since));
        // One migration at a time: each changes the step times that the next one would be chosen by.
        slow.is_some() && self.running.is_empty() && now.saturating_duration_since(since) >= UNEVEN_FOR
    }
}

/// Answers the caller that waits for the end of a migration, if there is one.
pub(super) fn tell(done: Done, result: Result<(), MoveError>) {
    // Err: nobody waits any more.
    let _ = done.map(|done| done.send(result));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_came_than_was_asked_for() {
        let mut chain = Chain { choice: 0, have: 3, had: 3, pull: Some((PullId(7), 5)) };
        assert_eq!((chain.came(PullId(6), 5), chain.came(PullId(7), u32::MAX), chain.have), (None, Some(2), 5));
        assert_eq!(chain.came(PullId(7), 9), None, "said twice");
        chain.pull = Some((PullId(8), 9));
        assert_eq!((chain.came(PullId(8), 1), chain.have), (Some(0), 5), "what came is not taken back");
    }

    const SECOND: Duration = Duration::from_secs(1);
    const REQUEST: RequestId = RequestId(7);

    /// Chain of `blocks` sealed blocks of choice 0.
    fn sealed(blocks: usize) -> Vec<(u32, Vec<BlockHash>)> {
        let tokens: Vec<u32> = (0..(blocks * penstock_proto::BLOCK_TOKENS) as u32).collect();
        vec![(0, penstock_proto::BlockHasher::for_request(b"", "n").chain(&tokens))]
    }

    fn moves(cause: Cause, now: Instant) -> (Moves, oneshot::Receiver<Result<(), MoveError>>) {
        let (done, answer) = oneshot::channel();
        let mut moves = Moves::default();
        moves.begin(
            REQUEST,
            Move::new((WorkerId(0), WorkerId(1)), [Some(SessionId(1)), Some(SessionId(4))], cause, Some(done), now),
        );
        (moves, answer)
    }

    #[track_caller]
    fn pull(moves: &mut Moves, blocks: usize) -> u64 {
        let Next::Pull { from: WorkerId(0), to: WorkerId(1), frames } = moves.advance(REQUEST, &sealed(blocks)) else {
            panic!("no pull")
        };
        assert_eq!((frames.len(), frames[0].hashes.len()), (1, blocks));
        frames[0].id
    }

    fn pulled(moves: &mut Moves, id: u64, blocks: u32) -> Option<RequestId> {
        moves.pulled(WorkerId(1), SessionId(4), &Pulled { id, blocks, ..Pulled::default() })
    }

    #[test]
    fn a_request_changes_over_when_one_block_is_missing() {
        let (mut moves, mut answer) = moves(Cause::Asked, Instant::now());
        let id = pull(&mut moves, 10);
        assert_eq!(moves.advance(REQUEST, &sealed(11)), Next::Wait, "the pull runs");
        assert_eq!(pulled(&mut moves, id, 10), Some(REQUEST));
        assert_eq!(moves.advance(REQUEST, &sealed(11)), Next::Change);
        assert_eq!(moves.get(REQUEST).map(Move::blocks), Some(10));
        assert!(moves.succeed(REQUEST).is_some() && moves.is_due && moves.len() == 0);
        let counts = MoveCounts { moved: [1, 0, 0], failed: [0; 3], blocks: 10 };
        assert_eq!((moves.counts, answer.try_recv()), (counts, Ok(Ok(()))));
    }

    #[test]
    fn choices_with_one_prompt_bring_it_once() {
        let now = Instant::now();
        let hasher = penstock_proto::BlockHasher::for_request(b"", "n");
        let blocks = |blocks: usize| blocks * penstock_proto::BLOCK_TOKENS;
        let chain = |choice: u32, output: usize| {
            let tokens = (0..blocks(20) as u32).chain((0..blocks(output) as u32).map(|token| 5000 * choice + token));
            (choice, hasher.chain(&tokens.collect::<Vec<_>>()))
        };
        let asked = |moves: &mut Moves, sealed: &[(u32, Vec<BlockHash>)]| -> Vec<(u64, usize)> {
            let Next::Pull { frames, .. } = moves.advance(REQUEST, sealed) else { panic!("no pull") };
            frames.iter().map(|frame| (frame.id, frame.hashes.len())).collect()
        };
        let (mut moves, _answer) = moves(Cause::Leaving, now);
        let sealed = [chain(1, 3), chain(2, 4), chain(3, 0)];
        assert_eq!(asked(&mut moves, &sealed), [(1, 23)]);
        assert_eq!(pulled(&mut moves, 1, 23), Some(REQUEST));
        let sealed = [chain(1, 3), chain(2, 4), chain(3, 1)];
        assert_eq!(asked(&mut moves, &sealed), [(2, 24), (3, 21)], "the new worker asks for what it lacks of them");
        pulled(&mut moves, 2, 24);
        assert_eq!(moves.advance(REQUEST, &sealed), Next::Wait, "the other one runs");
        pulled(&mut moves, 3, 21);
        assert_eq!(moves.advance(REQUEST, &sealed), Next::Change);
        assert_eq!(moves.counts.blocks, 23 + 4 + 1, "what came once is counted once");

        // Nothing more is pulled where at most a block of each is missing.
        let mut moves = self::moves(Cause::Leaving, now).0;
        let sealed = [chain(1, 1), chain(2, 1), chain(3, 0)];
        assert_eq!(asked(&mut moves, &sealed), [(1, 21)]);
        pulled(&mut moves, 1, 21);
        assert_eq!(moves.advance(REQUEST, &sealed), Next::Change);
        assert_eq!(moves.get(REQUEST).map(Move::blocks), Some(20));

        // Prompts of less than a block have none in common.
        let apart = [3, 7].map(|choice| (choice, hasher.chain(&vec![choice; blocks(8)])));
        let mut moves = self::moves(Cause::Leaving, now).0;
        assert_eq!(asked(&mut moves, &apart), [(1, 8), (2, 8)]);
    }

    #[test]
    fn pulls_of_other_sessions_and_moves_are_nobodys() {
        let (mut moves, _answer) = moves(Cause::Asked, Instant::now());
        let id = pull(&mut moves, 10);
        let report = Pulled { id, blocks: 10, ..Pulled::default() };
        assert_eq!(moves.pulled(WorkerId(0), SessionId(4), &report), None);
        assert_eq!(moves.pulled(WorkerId(1), SessionId(5), &report), None);
        assert_eq!(pulled(&mut moves, id + 1, 10), None);
        moves.end(REQUEST);
        assert_eq!(pulled(&mut moves, id, 10), None, "the move has ended");
        assert_eq!(moves.counts, MoveCounts::default());
    }

    #[test]
    fn blocks_that_do_not_come_are_computed_if_few_and_end_the_move_if_many() {
        let check = |cause, blocks, expected| {
            let (mut moves, _answer) = moves(cause, Instant::now());
            let id = pull(&mut moves, blocks);
            pulled(&mut moves, id, 0);
            assert_eq!(moves.advance(REQUEST, &sealed(blocks)), expected, "{blocks}");
        };
        let why = "the KV blocks of the request cannot be fetched";
        check(Cause::Asked, BEARABLE, Next::Change);
        check(Cause::Asked, BEARABLE + 1, Next::Abandon { why, rest: REST });
        check(Cause::Leaving, BEARABLE + 1, Next::Abandon { why, rest: REST_LEAVING });
    }

    #[test]
    fn a_request_that_grows_too_fast_stays() {
        let (mut moves, mut answer) = moves(Cause::Leaving, Instant::now());
        for round in 1..=ROUNDS_MAX as usize {
            let id = pull(&mut moves, 10 * round);
            assert_eq!(pulled(&mut moves, id, 10 * round as u32), Some(REQUEST));
        }
        let next = moves.advance(REQUEST, &sealed(10 * (ROUNDS_MAX as usize + 1)));
        let why = "the request grows faster than its KV blocks are moved";
        assert_eq!(next, Next::Abandon { why, rest: REST });
        assert!(moves.fail(REQUEST, why).is_some());
        assert_eq!((moves.counts.failed, answer.try_recv()), ([0, 1, 0], Ok(Err(MoveError::Failed(why)))));
    }

    #[test]
    fn a_move_ends_with_its_time_or_its_workers() {
        let now = Instant::now();
        let (moves, _answer) = moves(Cause::Balance, now);
        let fate = |is_on, after| moves.fates(|_| is_on, now + after)[0].1;
        assert_eq!(fate(true, MOVE_DEADLINE), None);
        assert_eq!(fate(false, MOVE_DEADLINE), Some((GONE, Duration::ZERO)));
        assert_eq!(fate(true, MOVE_DEADLINE + SECOND), Some(("the move took too long", REST)));
    }

    #[test]
    fn a_worker_must_be_slow_for_long() {
        let now = Instant::now();
        let mut moves = Moves::default();
        let (a, b) = (Some(WorkerId(0)), Some(WorkerId(1)));
        assert!(!moves.is_uneven(a, now));
        assert!(moves.is_uneven(a, now + UNEVEN_FOR));
        assert!(!moves.is_uneven(b, now + UNEVEN_FOR), "another worker");
        assert!(!moves.is_uneven(None, now + 2 * UNEVEN_FOR) && !moves.is_uneven(b, now + 2 * UNEVEN_FOR));
        let one = Move::new((WorkerId(0), WorkerId(1)), [None; 2], Cause::Balance, None, now);
        moves.begin(REQUEST, one);
        assert!(!moves.is_uneven(b, now + 4 * UNEVEN_FOR), "a move runs");
    }
}
