//! Reports and silences of workers: ready, step, lost, suspected, given up.

use super::super::member::{Doubt, Seat, Session};
use super::super::members::Serving;
use super::super::processes::Change;
use super::super::session::{Link, Loss};
use super::super::steering::Steering;
use super::super::supervisor::{Order, Update};
use super::Actor;
use penstock_proto::frames::{EngineState, Notice, NoticeKind, Ready, Step};
use penstock_proto::{RequestId, SessionId};
use penstock_router::{Member as RouterMember, WorkerId};
use std::time::Instant;
use tracing::{info, warn};

impl Actor {
    pub(super) fn ready(&mut self, worker: WorkerId, mut ready: Box<Ready>, link: Link, now: Instant) {
        // Also where the worker does not suit the pool.
        self.members[worker].answers();
        let Ready { adapters, adapters_pending, .. } = &mut *ready;
        penstock_proto::adapter::bound(adapters, adapters_pending);
        // What a worker of the old model began must not go on at one of another; it waits for one of its own, for as long as it may.
        let is_alone = self.members.others_are_gone(worker, now) && !self.requests.any_told();
        match self.model.join(&ready, is_alone) {
            Ok(false) => {}
            Ok(true) => warn!(
                worker = %self.members[worker].name,
                "pool serves another model: its workers' files were replaced. A reload of the config reads the chat template and the defaults \
                 beside them"
            ),
            Err(why) => {
                let member = &mut self.members[worker];
                if member.unsuited != Some(why) {
                    warn!(worker = %member.name, why, "worker rejected: its model does not match the pool");
                }
                member.unsuited = Some(why);
                link.close.notify_one();
                return;
            }
        }
        let state = ready.state.clone().unwrap_or_default();
        let told = RouterMember {
            numerics_id: ready.numerics_id.as_str().into(),
            grammar: ready.grammar.as_str().into(),
            capabilities: ready.has(),
            adapters: ready.loaded().map(|(_, id)| id).collect(),
            blocks_total: ready.blocks_total,
            sequences_max: ready.sequences_max,
            state,
            device: ready.device.as_str().into(),
            block_bytes: if ready.transfer.is_empty() { 0 } else { ready.block_bytes },
        };
        self.placement.router.join(worker, told, &ready.kv);
        info!(worker = %self.members[worker].name, pid = ready.pid, device = %ready.device, "worker ready");
        if ready.shared_weights_bytes > 0
            && let Some(shared) = self.config.local.as_ref().and_then(|local| local.weights.as_ref())
        {
            shared.copies.write_sealed();
        }
        self.members[worker].begin(ready, link, now);
        self.members[worker].is_there();
        self.steer_ready(worker);
        self.tell_role(worker);
        self.tell_adapters(worker, now);
        self.note_nobody(now);
        self.publish(now);
    }

    pub(super) fn step(&mut self, worker: WorkerId, step: Step, now: Instant) {
        let member = &mut self.members[worker];
        member.heard = now;
        member.say(step.state.as_ref());
        self.placement.router.update(worker, step.state.as_ref(), &step.kv, step.accepted);
        if let Some(batch) = &step.batch {
            self.placement.router.observe(worker, batch);
            self.watch.observe(worker, batch);
        }
        let ahead = self.placement.router.prefill_ahead(worker);
        let member = &mut self.members[worker];
        if let Some(batch) = &step.batch {
            member.steps += 1;
            if batch.decodes > 0 {
                member.decode_steps.add(batch.seconds);
            }
        }
        if member.session == Session::Suspected && member.doubt_now(&self.config, ahead, now) == Doubt::None {
            member.session = Session::Ready;
            info!(worker = %member.name, "worker answers again");
            let is_free = member.steering == Steering::Free;
            self.placement.router.suspend(worker, !is_free);
        }
        let mut is_full = false;
        for output in step.outputs {
            match self.output(worker, output) {
                Ok(full) => is_full |= full,
                Err(why) => {
                    self.give_up(worker, why);
                    return;
                }
            }
        }
        if is_full {
            // What it reported beside the refusal is no promise: it gets nothing more until it reports again.
            let state = EngineState { credits: 0, ..self.members[worker].state.clone() };
            self.placement.router.update(worker, Some(&state), &[], step.accepted);
        }
    }

    /// Logs and keeps a worker's notice of a trouble that costs time but no request, or of its end.
    pub(super) fn noticed(&mut self, worker: WorkerId, session: SessionId, notice: Notice) {
        let member = &mut self.members[worker];
        if member.link.as_ref().is_none_or(|link| link.session != session) {
            return;
        }
        let kind = notice.kind();
        let Notice { subject, why, count, .. } = &notice;
        match (kind, why.is_empty()) {
            (NoticeKind::Transfer, false) => {
                warn!(worker = %member.name, peer = subject, why, count, "transfers of KV fail: the missing blocks are computed at the worker");
            }
            (NoticeKind::Transfer, true) => info!(worker = %member.name, peer = subject, "transfers of KV work again"),
            (NoticeKind::Tier, false) => warn!(worker = %member.name, tier = subject, why, "a KV tier is off"),
            (NoticeKind::Tier, true) => info!(worker = %member.name, tier = subject, "a KV tier is used again"),
        }
        member.troubles.note(kind, notice);
        self.publish(Instant::now());
    }

    /// Takes in a supervisor's report on the process of a worker.
    pub(super) fn process(&mut self, worker: WorkerId, update: Update, now: Instant) {
        let Some(change) = self.members[worker].update(update, now) else { return };
        match change {
            Change::Started => self.shares.started(now),
            Change::Stopped => self.seat_off(worker),
            Change::Adopted | Change::Down => {}
        }
        self.publish(now);
    }

    pub(super) fn lost(&mut self, worker: WorkerId, session: SessionId, loss: Loss, why: &str) {
        let now = Instant::now();
        let member = &mut self.members[worker];
        if member.link.as_ref().is_some_and(|link| link.session != session) {
            return;
        }
        let was_ready = member.link.take().is_some();
        let orderly = member.state.draining;
        let died = (was_ready && loss == Loss::Ended && !orderly).then(|| member.epoch());
        let is_news = !matches!(&member.session, Session::Absent { why: said } if *said == *why);
        // Local workers' ends are logged by their supervisor.
        if is_news && member.seat == Seat::On && !was_ready && member.process.is_none() {
            warn!(worker = %member.name, why, "worker not reached");
        }
        member.end(why);
        let bound: Vec<RequestId> = member.bound.drain().collect();
        if was_ready {
            member.deaths += u64::from(died.is_some());
            warn!(worker = %member.name, interrupted = bound.len(), why, ?loss, "worker lost");
        }
        self.placement.router.leave(worker);
        bound.into_iter().for_each(|request| self.interrupt(request, died));
        self.note_nobody(now);
        if is_news || was_ready {
            self.publish(now);
        }
    }

    /// Suspects, gives up and kills workers that are silent for too long, or whose step does not end.
    pub(super) fn doubts(&mut self, now: Instant) {
        for worker in self.members.ids() {
            let ahead = self.placement.router.prefill_ahead(worker);
            let verdict = self.members.judge(worker, &self.config, ahead, now);
            let member = &mut self.members[worker];
            if verdict.suspect {
                let silence_ms = now.saturating_duration_since(member.heard).as_millis() as u64;
                warn!(worker = %member.name, silence_ms, "worker is silent: no new requests go there");
                member.session = Session::Suspected;
                self.placement.router.suspend(worker, true);
            }
            if verdict.give_up {
                self.give_up(worker, "no sign of life for too long, or a step that does not end");
            }
            if verdict.kill {
                let member = &mut self.members[worker];
                member.heard = now;
                member.answers();
                self.processes.order(worker, Order::Kill);
            }
        }
    }

    fn give_up(&mut self, worker: WorkerId, why: &str) {
        let member = &mut self.members[worker];
        warn!(worker = %member.name, why, "worker given up: its connection is closed");
        if let Some(link) = &member.link {
            link.close.notify_one();
            let session = link.session;
            self.lost(worker, session, Loss::GivenUp, why);
        }
    }

    pub(super) fn note_nobody(&mut self, now: Instant) {
        let pool = &self.config.id;
        match self.members.look(now) {
            Some(Serving::Begins { after }) => {
                info!(%pool, after_ms = after.as_millis() as u64, "pool serves: a worker is ready");
            }
            Some(Serving::Ends) if self.config.on_demand.is_none() => {
                warn!(%pool, waiting = self.placement.router.waiting(), "pool has no ready worker");
            }
            _ => {}
        }
    }
}
