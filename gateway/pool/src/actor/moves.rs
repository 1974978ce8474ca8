//! Effects of migrations: pulls are sent, requests change over. How a migration goes on is in `moves.rs`.

use super::super::moves::{Cause, Done, GONE, MOVES_MAX, Move, MoveError, Next, REST, Targets, tell};
use super::Actor;
use penstock_proto::codec::FRAME_BYTES_MAX;
use penstock_proto::frames::{DownBody, Pull, Pulled};
use penstock_proto::{BlockHasher, RequestId, SessionId};
use penstock_router::WorkerId;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tracing::{debug, info};

impl Actor {
    fn targets(&self) -> Targets<'_> {
        Targets { members: &self.members, requests: &self.requests, moves: &self.moves, router: &self.placement.router }
    }

    /// Begins to move a request to the worker of that name.
    pub(super) fn order_move(&mut self, request: RequestId, name: &str, done: oneshot::Sender<Result<(), MoveError>>) {
        match self.members.named(name) {
            Some(to) => self.begin_move(request, to, Cause::Asked, Some(done)),
            None => _ = done.send(Err(MoveError::NoWorker)),
        }
    }

    fn begin_move(&mut self, request: RequestId, to: WorkerId, cause: Cause, done: Done) {
        let targets = self.targets();
        let from = match targets.movable(request, to) {
            Ok(from) => from,
            Err(why) => return tell(done, Err(why)),
        };
        let one = Move::new((from, to), targets.sessions(from, to), cause, done, Instant::now());
        self.moves.begin(request, one);
        self.advance_move(request);
    }

    /// Carries out the next action of a migration.
    fn advance_move(&mut self, request: RequestId) {
        if !self.moves.may_advance(request) {
            return;
        }
        let Some(live) = self.requests.get(request) else { return };
        let Some(numerics_id) = &live.truth.numerics_id else { return };
        let hasher = BlockHasher::for_request(&live.truth.job.salt, numerics_id);
        let computed = live.truth.computed().into_iter();
        let sealed: Vec<_> = computed.map(|(choice, tokens)| (choice, hasher.chain(&tokens))).collect();
        match self.moves.advance(request, &sealed) {
            Next::Wait => {}
            Next::Change => self.change(request),
            Next::Abandon { why, rest } => self.abandon(request, why, rest),
            Next::Pull { from, to, frames } => {
                let from = self.members[from].transfer_address();
                let frames = frames.into_iter().map(|frame| Pull { from: from.to_owned(), ..frame });
                frames.for_each(|frame| self.members.send(to, DownBody::Pull(frame)));
            }
        }
    }

    /// Takes in a worker's report on the end of a pull.
    pub(super) fn pulled(&mut self, worker: WorkerId, session: SessionId, pulled: &Pulled) {
        let Some(request) = self.moves.pulled(worker, session, pulled) else { return };
        if !pulled.why.is_empty() {
            debug!(%request, blocks = pulled.blocks, why = pulled.why, "KV transfer for a move ended early");
        }
        self.advance_move(request);
    }

    /// Moves the request from the old worker to the new one; without a free place there the next tick tries again.
    fn change(&mut self, request: RequestId) {
        let Some(one) = self.moves.get(request) else { return };
        let (from, to, cause, sessions) = (one.from, one.to, one.cause, one.sessions);
        let cached = one.blocks() * penstock_proto::BLOCK_TOKENS;
        if !self.targets().is_on(from, to, sessions) {
            return self.abandon(request, GONE, Duration::ZERO);
        }
        let Some(live) = self.requests.get(request) else { return };
        let view = live.view(self.placement.began);
        if live.truth.frame_bytes() > FRAME_BYTES_MAX {
            return self.abandon(request, "prompt and output are too long for a frame", REST);
        }
        if !self.placement.router.assign(request, view, to, cached as u32, self.placement.clock(Instant::now())) {
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
        if let Some(one) = self.moves.succeed(request) {
            let from = &self.members[from].name;
            let took_ms = one.began.elapsed().as_millis() as u64;
            info!(%request, %from, to = %name, ?cause, rounds = one.round, took_ms, "request moved to another worker");
        }
    }

    /// Ends a migration without a move and leaves the request alone for `rest`.
    fn abandon(&mut self, request: RequestId, why: &'static str, rest: Duration) {
        let Some(one) = self.moves.fail(request, why) else { return };
        if let Some(live) = self.requests.get_mut(request) {
            live.rest_until(Instant::now() + rest);
        }
        info!(%request, to = %self.members[one.to].name, cause = ?one.cause, why, "request stays at its worker: the move failed");
    }

    // ---- moves that nobody asked for ----

    /// Ends or advances the migrations that run and begins those that are due.
    pub(super) fn move_tick(&mut self, now: Instant) {
        let targets = self.targets();
        let fates = self.moves.fates(|one| targets.is_on(one.from, one.to, one.sessions), now);
        for (request, fate) in fates {
            match fate {
                Some((why, rest)) => self.abandon(request, why, rest),
                None => self.advance_move(request),
            }
        }
        if !self.leave(now) && self.config.balance {
            self.balance(now);
        }
    }

    /// Begins to move the request that gains most by leaving the slowest worker, once that worker has been too slow for long enough.
    fn balance(&mut self, now: Instant) {
        let Some((from, step)) = self.targets().slowest() else { return };
        let found = self.targets().gains(from, step, now);
        if self.moves.is_uneven(found.map(|_| from), now) {
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
            if !self.targets().is_left(from) {
                continue;
            }
            for request in self.targets().rested(from, now) {
                let Some((to, _)) = self.targets().best_place(request, from) else { continue };
                found = true;
                if self.moves.len() >= MOVES_MAX {
                    return true;
                }
                self.begin_move(request, to, Cause::Leaving, None);
            }
        }
        found
    }
}
