//! Live migration: a request goes on at another worker while the old one still decodes.
//!
//! ```text
//! old worker   ─ decode ─ decode ─ decode ─ decode ─ decode ─┐ cancel
//!                  │ sealed blocks        │ new ones          │
//! new worker       └──── pull ────────────└─ pull ─           └ generate (with all that was emitted) ─ decode ─ decode
//! ```
//! Blocks are pulled until at most [`SETTLED`] of them are missing. Then the request leaves the old worker at a step
//! boundary and goes on at the new one, which computes the rest: at most one block and the open one. The result is
//! exact, because a token's logits do not depend on the batch they are computed in. Until the change the old worker
//! decodes undisturbed, so a failed migration leaves the request where it is.
//!
//! Requests are moved off workers that are being left (held, restarting, draining, or with a new role that does not
//! decode), and off a worker whose steps have become much longer than another worker's would be.

use super::super::member::{Member, Session};
use super::Actor;
use penstock_proto::BlockHasher;
use penstock_proto::codec::FRAME_BYTES_MAX;
use penstock_proto::frames::{DownBody, Pull, Pulled, Role};
use penstock_router::WorkerId;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tracing::{debug, info};

/// Blocks that may be missing when a request changes over: one block was sealed while the last pull ran.
const SETTLED: usize = 1;

/// Blocks that may be missing at the change when pulls bring nothing more: few enough to be computed in one step.
const BEARABLE: usize = 4;

/// Most pulls of one migration. A request that seals blocks faster than pulls bring them stays.
const ROUNDS_MAX: u32 = 8;

/// Reason of a migration that ends with the loss or the release of one of its workers.
const GONE: &str = "a worker of the move has gone or is draining";

/// Time limits of one pull of blocks and of one whole migration.
const PULL_DEADLINE: Duration = Duration::from_secs(10);
const MOVE_DEADLINE: Duration = Duration::from_secs(30);

/// Concurrent migrations per pool: each is a stream of bytes between two workers that serve other requests.
const MOVES_MAX: usize = 4;

/// Pause after a move or a failed move before the request is moved again.
const REST: Duration = Duration::from_secs(5);

/// Pause after a pull that brought nothing from a worker that is being left: the blocks may still be on their way there.
const REST_LEAVING: Duration = Duration::from_millis(250);

/// Hysteresis of balance: steps must be this factor longer than elsewhere, for this long, before a request moves.
const UNEVEN: f64 = 1.3;
const UNEVEN_FOR: Duration = Duration::from_secs(2);

/// Output tokens that a request must have left to be worth a move, and the most that are assumed to come.
const LEFT_MIN: u32 = 64;
const LEFT_MAX: u32 = 512;

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

/// One migration in progress: its two workers, their sessions, and the KV blocks pulled so far for each choice.
struct Move {
    from: WorkerId,
    to: WorkerId,
    /// Sessions of the old and the new worker: a new session has none of the blocks.
    sessions: [Option<u64>; 2],
    cause: Cause,
    began: Instant,
    round: u32,
    chains: Vec<Chain>,
    done: Done,
}

/// Progress of pulling one choice's chain of KV blocks to the new worker.
struct Chain {
    choice: u32,
    /// Number of the choice's leading KV blocks that the new worker has.
    have: usize,
    /// Number of blocks in `have` when the running pull was asked for.
    had: usize,
    /// Number of the running pull, and the length of the chain up to which it asks.
    pull: Option<(u64, usize)>,
}

impl Chain {
    /// Records the end of a pull and returns how many blocks are new. The worker's count is clamped to what was asked
    /// for. `None`: the pull belongs to another chain.
    fn came(&mut self, pull: u64, blocks: u32) -> Option<usize> {
        let (_, asked) = self.pull.take_if(|(id, _)| *id == pull)?;
        let have = (blocks as usize).min(asked).max(self.have);
        Some(have - std::mem::replace(&mut self.have, have))
    }
}

/// All running migrations of a pool by request, with the pulls that they wait for.
#[derive(Default)]
pub(super) struct Moves {
    running: HashMap<u64, Move>,
    /// Request that each running pull belongs to, by the number of the pull.
    pulls: HashMap<u64, u64>,
    next_pull: u64,
    /// The slowest worker and the instant since which it is too slow.
    uneven: Option<(WorkerId, Instant)>,
    /// A migration has ended or a worker is being left: the next migration need not wait for a tick.
    pub(super) is_due: bool,
}

impl Actor {
    /// Returns true if a migration that began with these sessions can go on: both sessions still exist, and the new worker still takes requests.
    fn is_on(&self, from: WorkerId, to: WorkerId, sessions: [Option<u64>; 2]) -> bool {
        self.sessions(from, to) == sessions && self.members[to].takes_requests()
    }

    fn sessions(&self, from: WorkerId, to: WorkerId) -> [Option<u64>; 2] {
        [from, to].map(|at| self.members[at].link.as_ref().map(|link| link.session))
    }

    /// Begins to move a request to the worker of that name.
    pub(super) fn order_move(&mut self, request: u64, name: &str, done: oneshot::Sender<Result<(), MoveError>>) {
        match self.members.named(name) {
            Some(to) => self.begin_move(request, to, Cause::Asked, Some(done)),
            None => _ = done.send(Err(MoveError::NoWorker)),
        }
    }

    fn begin_move(&mut self, request: u64, to: WorkerId, cause: Cause, done: Done) {
        let from = match self.movable(request, to) {
            Ok(from) => from,
            Err(why) => return tell(done, Err(why)),
        };
        let sessions = self.sessions(from, to);
        let began = Instant::now();
        let one = Move { from, to, sessions, cause, began, round: 0, chains: Vec::new(), done };
        self.moves.running.insert(request, one);
        self.advance_move(request);
    }

    /// The worker that a request would leave, if the request can move to `to`.
    fn movable(&self, request: u64, to: WorkerId) -> Result<WorkerId, MoveError> {
        let live = self.requests.get(request).ok_or(MoveError::NotDecoding)?;
        let from = live.worker().ok_or(MoveError::NotDecoding)?;
        if !live.truth.decodes() || self.moves.running.contains_key(&request) {
            return Err(MoveError::NotDecoding);
        }
        let [old, new] = [from, to].map(|at| &self.members[at]);
        let (Some(old_ready), Some(new_ready)) = (&old.ready, &new.ready) else { return Err(MoveError::NoWorker) };
        if from == to || !new.takes_requests() || old.link.is_none() {
            return Err(MoveError::NoWorker);
        }
        let same =
            live.truth.numerics_id.as_ref() == Some(&new.numerics_id) && old_ready.block_bytes == new_ready.block_bytes;
        let job = &live.truth.job;
        let follows = job.grammar.as_ref().is_none_or(|grammar| *grammar.id == *new_ready.grammar);
        let counts = new_ready.reasoning_budgets || job.sampling.reasoning.is_none();
        if !same || !follows || !counts || old_ready.transfer.is_empty() || new_ready.transfer.is_empty() {
            return Err(MoveError::Unlike);
        }
        Ok(from)
    }

    /// Next action of a migration: nothing while one of its pulls runs, else the change or another pull.
    fn advance_move(&mut self, request: u64) {
        let Some(one) = self.moves.running.get_mut(&request) else { return };
        if one.chains.iter().any(|chain| chain.pull.is_some()) {
            return;
        }
        let Some(live) = self.requests.get(request) else { return };
        let Some(numerics_id) = &live.truth.numerics_id else { return };
        let hasher = BlockHasher::for_request(&live.truth.job.salt, numerics_id);
        let sealed: Vec<_> =
            live.truth.computed().into_iter().map(|(choice, tokens)| (choice, hasher.chain(&tokens))).collect();
        one.chains.retain(|chain| sealed.iter().any(|(choice, _)| *choice == chain.choice));
        for (choice, _) in &sealed {
            if one.chains.iter().all(|chain| chain.choice != *choice) {
                one.chains.push(Chain { choice: *choice, have: 0, had: 0, pull: None });
            }
        }
        let have = |choice| one.chains.iter().find(|chain| chain.choice == choice).map_or(0, |chain| chain.have);
        let missing = sealed.iter().map(|(choice, chain)| chain.len().saturating_sub(have(*choice))).max().unwrap_or(0);
        let brings = one.round == 0 || one.chains.iter().any(|chain| chain.have > chain.had);
        if missing <= SETTLED || missing <= BEARABLE && !brings {
            return self.change(request);
        }
        if !brings || one.round >= ROUNDS_MAX {
            let rest = if one.cause == Cause::Leaving && !brings { REST_LEAVING } else { REST };
            let why = if brings {
                "the request grows faster than its KV blocks are moved"
            } else {
                "the KV blocks of the request cannot be fetched"
            };
            return self.abandon(request, why, rest);
        }
        one.round += 1;
        let mut frames = Vec::new();
        let from = self.members[one.from].transfer_address().to_owned();
        for (choice, hashes) in sealed {
            let Some(chain) = one.chains.iter_mut().find(|chain| chain.choice == choice) else { continue };
            chain.had = chain.have;
            if hashes.len() > chain.have {
                self.moves.next_pull += 1;
                let id = self.moves.next_pull;
                chain.pull = Some((id, hashes.len()));
                self.moves.pulls.insert(id, request);
                let hashes = hashes.iter().map(|hash| hash.to_bytes().to_vec()).collect();
                let deadline_seconds = PULL_DEADLINE.as_secs_f64();
                frames.push(Pull { id, from: from.clone(), hashes, deadline_seconds });
            }
        }
        let to = one.to;
        frames.into_iter().for_each(|frame| self.members.send(to, DownBody::Pull(frame)));
    }

    /// Takes in a worker's report on the end of a pull.
    pub(super) fn pulled(&mut self, worker: WorkerId, session: u64, pulled: &Pulled) {
        let Some(request) = self.moves.pulls.get(&pulled.id).copied() else { return };
        let Some(one) = self.moves.running.get_mut(&request) else { return };
        if one.to != worker || one.sessions[1] != Some(session) {
            return;
        }
        self.moves.pulls.remove(&pulled.id);
        let came = one.chains.iter_mut().find_map(|chain| chain.came(pulled.id, pulled.blocks));
        let Some(new) = came else { return };
        self.counts.moved_blocks += new as u64;
        if !pulled.why.is_empty() {
            debug!(request, blocks = pulled.blocks, why = pulled.why, "KV transfer for a move ended early");
        }
        self.advance_move(request);
    }

    /// Moves the request from the old worker to the new one; without a free place there the next tick tries again.
    fn change(&mut self, request: u64) {
        let Some(one) = self.moves.running.get(&request) else { return };
        let (from, to, cause, sessions) = (one.from, one.to, one.cause, one.sessions);
        let cached = one.chains.iter().map(|chain| chain.have).min().unwrap_or(0) * penstock_proto::BLOCK_TOKENS;
        if !self.is_on(from, to, sessions) {
            return self.abandon(request, GONE, Duration::ZERO);
        }
        let Some(live) = self.requests.get(request) else { return };
        let view = live.view(self.began);
        if live.truth.frame_bytes() > FRAME_BYTES_MAX {
            return self.abandon(request, "prompt and output are too long for a frame", REST);
        }
        if !self.router.assign(request, view, to, cached as u32, self.began.elapsed()) {
            // No place there now: the next tick tries again, until the migration's deadline.
            return;
        }
        let Some(live) = self.requests.get_mut(request) else { return };
        let name = self.members.name(to);
        let (generate, windows) = live.move_to(to, Arc::clone(&name), Instant::now() + REST);
        self.members[from].bound.remove(&request);
        self.members[to].bound.insert(request);
        self.members.send(to, DownBody::Generate(generate));
        windows.into_iter().for_each(|window| self.members.send(to, DownBody::Window(window)));
        self.send_cancel(from, request);
        self.counts.moves[cause as usize] += 1;
        if let Some(one) = self.drop_move(request) {
            let from = &self.members[from].name;
            let took_ms = one.began.elapsed().as_millis() as u64;
            info!(request, %from, to = %name, ?cause, rounds = one.round, took_ms, "request moved to another worker");
            tell(one.done, Ok(()));
        }
    }

    fn drop_move(&mut self, request: u64) -> Option<Move> {
        self.moves.pulls.retain(|_, of| *of != request);
        let gone = self.moves.running.remove(&request);
        self.moves.is_due |= gone.is_some();
        gone
    }

    /// Ends a migration without a move and leaves the request alone for `rest`.
    fn abandon(&mut self, request: u64, why: &'static str, rest: Duration) {
        let Some(one) = self.drop_move(request) else { return };
        self.counts.moves_failed[one.cause as usize] += 1;
        if let Some(live) = self.requests.get_mut(request) {
            live.rest_until(Instant::now() + rest);
        }
        info!(request, to = %self.members[one.to].name, cause = ?one.cause, why, "request stays at its worker: the move failed");
        tell(one.done, Err(MoveError::Failed(why)));
    }

    /// Ends the migration of a request that has finished or has lost its worker.
    pub(super) fn end_move(&mut self, request: u64) {
        if let Some(one) = self.drop_move(request) {
            tell(one.done, Err(MoveError::NotDecoding));
        }
    }

    // ---- moves that nobody asked for ----

    /// Ends or advances the migrations that run and begins those that are due.
    pub(super) fn move_tick(&mut self, now: Instant) {
        let fate = |one: &Move| match now.saturating_duration_since(one.began) > MOVE_DEADLINE {
            true => Some(("the move took too long", REST)),
            // No pause: the request may go to another worker at once.
            false if !self.is_on(one.from, one.to, one.sessions) => Some((GONE, Duration::ZERO)),
            false => None,
        };
        let running: Vec<_> = self.moves.running.iter().map(|(request, one)| (*request, fate(one))).collect();
        for (request, fate) in running {
            match fate {
                Some((why, rest)) => self.abandon(request, why, rest),
                None => self.advance_move(request),
            }
        }
        if !self.leave(now) && self.config.balance {
            let found = self.too_slow(now);
            found.into_iter().for_each(|(request, to)| self.begin_move(request, to, Cause::Balance, None));
        }
    }

    /// Begins the next migrations after an event that ended one, so that a worker that is left empties as fast as its blocks are copied.
    pub(super) fn moves_go_on(&mut self) {
        if std::mem::take(&mut self.moves.is_due) {
            self.leave(Instant::now());
        }
    }

    /// Begins to move requests off workers that are being left, up to [`MOVES_MAX`]. True if any request there could move.
    fn leave(&mut self, now: Instant) -> bool {
        let mut found = false;
        for from in self.members.ids() {
            if !self.is_left(from) {
                continue;
            }
            for request in self.rested(from, now) {
                let Some((to, _)) = self.best_place(request, from) else { continue };
                found = true;
                if self.moves.running.len() >= MOVES_MAX {
                    return true;
                }
                self.begin_move(request, to, Cause::Leaving, None);
            }
        }
        found
    }

    /// Returns true if the requests that decode at a worker should go elsewhere.
    fn is_left(&self, worker: WorkerId) -> bool {
        let member = &self.members[worker];
        let decodes = |other: &Member| other.takes_requests() && other.state.role() != Role::Prefill;
        let decodes_elsewhere = || self.members.any_other(worker, decodes);
        member.link.is_some()
            && member.session == Session::Ready
            && !member.bound.is_empty()
            && (!member.takes_requests() || member.state.role() == Role::Prefill && decodes_elsewhere())
    }

    /// Requests at a worker that decode and were not moved a moment ago, in descending order of the tokens they have left.
    fn rested(&self, worker: WorkerId, now: Instant) -> impl Iterator<Item = u64> + use<> {
        let bound = self.members[worker].bound.iter();
        let mut rested: Vec<(u32, u64)> = bound
            .filter_map(|request| {
                let live = self.requests.get(*request)?;
                let is_due = live.may_move(now) && !self.moves.running.contains_key(request);
                is_due.then(|| (live.truth.left(), *request))
            })
            .collect();
        rested.sort_unstable_by_key(|(left, request)| (std::cmp::Reverse(*left), *request));
        rested.into_iter().map(|(_, request)| request)
    }

    /// The worker whose decode steps would be shortest with a request added, and the length of these steps in seconds.
    fn best_place(&self, request: u64, from: WorkerId) -> Option<(WorkerId, f64)> {
        let live = self.requests.get(request)?;
        let (sequences, tokens) = (live.truth.open(), live.truth.tokens().len());
        let others = self.members.ids().filter(|at| *at != from);
        others
            .filter(|to| self.members[*to].state.role() != Role::Prefill)
            .filter(|to| self.movable(request, *to).is_ok())
            .filter_map(|to| Some((to, self.router.step_with(to, sequences, tokens)?)))
            .min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The request that gains most by leaving the slowest worker, once that worker has been too slow for [`UNEVEN_FOR`].
    fn too_slow(&mut self, now: Instant) -> Option<(u64, WorkerId)> {
        let workers = self.members.ids();
        let serving = workers.filter(|at| self.members[*at].takes_requests());
        let steps = serving.filter_map(|at| Some((at, self.router.step_with(at, 0, 0)?)));
        let (from, step) = steps.max_by(|a, b| a.1.total_cmp(&b.1))?;
        let busy = self.members[from].bound.len();
        let found = self.rested(from, now).find_map(|request| {
            let (to, there) = self.best_place(request, from)?;
            let left = self.requests.get(request)?.truth.left();
            let gain = (step - there) * f64::from(left.min(LEFT_MAX));
            // The gain has to pay for the pull and for the step that computes the missing blocks.
            let is_worth = left >= LEFT_MIN && step > UNEVEN * there && gain > 8.0 * step;
            let is_crowded = busy >= self.members[to].bound.len() + 2;
            (is_worth && is_crowded).then_some((request, to))
        });
        let since = self.moves.uneven.filter(|(at, _)| *at == from).map_or(now, |(_, since)| since);
        self.moves.uneven = found.map(|_| (from, since));
        // One migration at a time: each changes the step times that the next one would be chosen by.
        let is_due = self.moves.running.is_empty() && now.saturating_duration_since(since) >= UNEVEN_FOR;
        found.filter(|_| is_due)
    }
}

fn tell(done: Done, result: Result<(), MoveError>) {
    // Err: nobody waits any more.
    let _ = done.map(|done| done.send(result));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_came_than_was_asked_for() {
        let mut chain = Chain { choice: 0, have: 3, had: 3, pull: Some((7, 5)) };
        assert_eq!((chain.came(6, 5), chain.came(7, u32::MAX), chain.have), (None, Some(2), 5));
        assert_eq!(chain.came(7, 9), None, "said twice");
        chain.pull = Some((8, 9));
        assert_eq!((chain.came(8, 1), chain.have), (Some(0), 5), "what came is not taken back");
    }
}
