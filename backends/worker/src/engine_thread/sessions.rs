//! Sessions of the engine's thread: what each gateway is told, from the first frame to its last step.
//!
//! A gateway that does not read its frames loses its session: the thread waits for nobody.

use super::{Desk, SessionView};
use crate::config::ReadyInfo;
use crate::credits::{WAITING_TTL, divided};
use crate::grammars::Compiler;
use crate::tiers::Tiers;
use penstock_kernels::host::CopyUse;
use penstock_proto::frames::{Cancel, EngineState, GpuState, Notice, NoticeKind, Output, Ready, Step, UpBody};
use penstock_proto::parts::{split_ready, split_step};
use penstock_proto::{
    BLOCK_TOKENS, Capabilities, Capability, Epoch, ErrorKind, GatewayId, PROTOCOL_VERSION, SessionId, WorkId,
};
use std::collections::HashMap;
use std::time::Instant;
use tokio::sync::mpsc;
use tracing::warn;

impl Desk {
    /// Begins a session: describes the worker, then tells what the frame has no room for and what lasts.
    pub(super) fn attach(
        &mut self,
        (session, gateway): (SessionId, GatewayId),
        epoch: Epoch,
        frames: mpsc::Sender<UpBody>,
    ) {
        if self.sessions.is_empty() {
            // The snapshot has these changes, and there is no other reader.
            self.tiers.iter().for_each(|tiers| drop(tiers.take_events()));
        }
        let state = self.state();
        let adapters = self.adapters();
        let ReadyInfo { model, tokenizer_hash, model_hash, numerics_id, vocab_size, device, .. } = &self.info;
        let mut kv = self.engine.snapshot();
        kv.extend(self.tiers.iter().flat_map(Tiers::snapshot));
        // Budgets of reasoning are closed by the tokens of texts, as grammars are followed.
        let depends = [
            (Capability::ReasoningBudgets, self.engine.grammars().is_some()),
            (Capability::Vectors, self.engine.makes_vectors()),
            (Capability::Encoders, self.engine.encodes()),
            (Capability::Chains, self.engine.makes_vectors()),
        ];
        let lacks = depends.into_iter().filter(|(_, is_there)| !is_there).map(|(capability, _)| capability);
        let capabilities = Capabilities::all().without(lacks.collect());
        let ready = Ready {
            version: PROTOCOL_VERSION,
            epoch: epoch.0,
            model: model.clone(),
            tokenizer_hash: tokenizer_hash.clone(),
            numerics_id: numerics_id.clone(),
            vocab_size: *vocab_size,
            context_tokens: self.engine.context_tokens() as u32,
            block_tokens: BLOCK_TOKENS as u32,
            blocks_total: state.blocks_total,
            sequences_max: self.engine.sequences_max() as u32,
            device: device.clone(),
            pid: std::process::id(),
            kv,
            state: Some(state),
            model_hash: model_hash.clone(),
            block_bytes: self.engine.block_bytes() as u64,
            load_seconds: self.load.as_secs_f64(),
            grammar: self.engine.grammars().map(|known| known.vocabulary().id().to_owned()).unwrap_or_default(),
            reasoning_budgets: capabilities.has(Capability::ReasoningBudgets.into()),
            capabilities: capabilities.numbers(),
            adapters: adapters.loaded,
            adapter_orders: self.shelf.is_some(),
            adapters_pending: adapters.pending,
            shared_weights_bytes: self.info.weights.map_or(0, CopyUse::bytes),
            found_weights: matches!(self.info.weights, Some(CopyUse::Shared { .. })),
            transfer: if self.engine.block_bytes() > 0 { self.peers.address.clone() } else { String::new() },
        };
        let (ready, rest) = split_ready(ready, self.steps);
        if frames.try_send(UpBody::Ready(ready)).is_ok() {
            self.sessions.insert(session, SessionView { gateway, frames, accepted: 0, waiting: None });
            rest.into_iter().for_each(|step| self.answer(session, UpBody::Step(step)));
            self.troubles.current().into_iter().for_each(|notice| self.answer(session, UpBody::Notice(notice)));
            self.gpu.clone().into_iter().for_each(|state| self.answer(session, UpBody::Gpu(state)));
        }
    }

    /// Ends a session and everything that ran for it.
    pub(super) fn detach(&mut self, session: SessionId) {
        self.sessions.remove(&session);
        // Its credits are for the others.
        self.is_untold = true;
        self.tiers.iter_mut().for_each(|tiers| tiers.end_session(session));
        let theirs: Vec<WorkId> =
            self.entries.iter().filter(|(_, entry)| entry.session == session).map(|(id, _)| *id).collect();
        for id in theirs {
            self.cancel(Cancel { request: id.0, choices: Vec::new() });
        }
        self.engine_ids.retain(|(owner, _), _| *owner != session);
    }

    /// Translates the numbers back and sends each session its frame.
    pub(super) fn publish(&mut self, step: Step) {
        self.steps = step.number;
        let mut theirs: HashMap<SessionId, Vec<Output>> = HashMap::new();
        for mut output in step.outputs {
            let id = WorkId(output.request);
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            output.request = entry.request.0;
            let (session, request) = (entry.session, entry.request);
            if let Some(finish) = &output.finish {
                if ErrorKind::from_wire(finish.error_kind) == ErrorKind::ModelFailed {
                    warn!(
                        session = session.0,
                        request = request.0,
                        reason = finish.message,
                        "request ends with an error: no token can be sampled for it"
                    );
                }
                entry.open = entry.open.saturating_sub(1);
                if entry.open == 0 {
                    self.entries.remove(&id);
                    self.turns.end(id);
                    if self.engine_ids.get(&(session, request)) == Some(&id) {
                        self.engine_ids.remove(&(session, request));
                    }
                }
            }
            theirs.entry(session).or_default().push(output);
        }
        let mut rest = Step { outputs: Vec::new(), ..step };
        if let Some(tiers) = &self.tiers {
            rest.kv.extend(tiers.take_events());
        }
        rest.state = rest.state.map(|state| self.completed(state));
        self.send(&rest, &mut theirs);
    }

    /// Reports all changes since the last step to all sessions.
    pub(super) fn report(&mut self) {
        let mut report = self.engine.report();
        report.kv.extend(self.tiers.iter().flat_map(Tiers::take_events));
        report.state = Some(self.state());
        self.tell(&report);
    }

    /// Reports pending changes: an idle engine makes no step that would carry them.
    pub(super) fn tell_state(&mut self) {
        self.report();
    }

    /// Reports changes in tiers while the engine is idle.
    pub(super) fn tell_tiers(&mut self) {
        let kv = self.tiers.as_ref().map(Tiers::take_events).unwrap_or_default();
        if !kv.is_empty() {
            self.tell(&Step { number: self.steps, state: Some(self.state()), kv, ..Default::default() });
        }
    }

    /// Reports tiers that were switched off or on.
    pub(super) fn tell_changes(&mut self) {
        for change in self.tiers.as_ref().map(Tiers::take_changes).unwrap_or_default() {
            let (kind, name) = (NoticeKind::Tier, change.tier.name());
            let notice = match change.off {
                Some(why) => self.troubles.happened(kind, name, &why, Instant::now()),
                None => self.troubles.works(kind, name),
            };
            self.notify(notice);
        }
    }

    /// Sends the figures of the GPU to all gateways, and keeps them for those to come.
    pub(super) fn tell_gpu(&mut self, state: GpuState) {
        self.announce(&UpBody::Gpu(state.clone()));
        self.gpu = Some(state);
    }

    /// Sends a notice to all gateways, if there is one.
    pub(super) fn notify(&mut self, notice: Option<Notice>) {
        notice.into_iter().for_each(|notice| self.announce(&UpBody::Notice(notice)));
    }

    /// Sends a frame to all gateways.
    fn announce(&mut self, body: &UpBody) {
        let sessions: Vec<SessionId> = self.sessions.keys().copied().collect();
        sessions.into_iter().for_each(|session| self.answer(session, body.clone()));
    }

    /// Sends a frame to one session.
    pub(super) fn answer(&mut self, session: SessionId, body: UpBody) {
        let full = self.sessions.get(&session).is_some_and(|view| view.frames.try_send(body).is_err());
        if full {
            warn!(session = session.0, "a gateway does not read its frames: the session is dropped");
            self.detach(session);
        }
    }

    fn tell(&mut self, step: &Step) {
        self.send(step, &mut HashMap::new());
    }

    fn send(&mut self, rest: &Step, theirs: &mut HashMap<SessionId, Vec<Output>>) {
        let mut slow = Vec::new();
        self.rounds += 1;
        let waiting = |view: &SessionView| {
            view.waiting.filter(|(_, said)| said.elapsed() < WAITING_TTL).map_or(0, |(requests, _)| requests)
        };
        let waiting: Vec<u32> = self.sessions.values().map(waiting).collect();
        let granted = rest.state.as_ref().map(|state| divided(state, &waiting, self.rounds));
        if let (Some(whole), Some(granted)) = (&rest.state, &granted) {
            self.is_denied = whole.credits > 0 && granted.iter().any(|state| state.credits == 0);
        }
        let mut states = granted.into_iter().flatten();
        for (session, view) in &self.sessions {
            let outputs = theirs.remove(session).unwrap_or_default();
            let step = Step { outputs, accepted: view.accepted, state: states.next(), ..rest.clone() };
            if split_step(step).into_iter().any(|part| view.frames.try_send(UpBody::Step(part)).is_err()) {
                slow.push(*session);
            }
        }
        for session in slow {
            warn!(session = session.0, "a gateway does not read its frames: the session is dropped");
            self.detach(session);
        }
    }

    /// State of the engine, completed by the tiers.
    pub(super) fn state(&self) -> EngineState {
        self.completed(self.engine.state())
    }

    /// State of the engine with what waits before it: for blocks, for grammars, for transfers.
    pub(super) fn completed(&self, mut state: EngineState) -> EngineState {
        if let Some(tiers) = &self.tiers {
            tiers.complete(&mut state);
        }
        let coming = self.compiler.as_ref().map_or(0, Compiler::waiting_choices);
        state.waiting += coming;
        state.credits = state.credits.saturating_sub(coming);
        self.with_transfers(state)
    }
}
