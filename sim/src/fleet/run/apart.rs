//! KV transfers between engines: prompts computed elsewhere, blocks held elsewhere, and the planners' view of both.
//!
//! Every engine has one link in and one out; a transfer occupies both. KV of a prompt that is computed elsewhere
//! leaves layer by layer while its step runs, so only the last layer's transfer is visible, unless the link is full.

use super::super::ask::{Lent, Source};
use super::super::engine::{Moved, TOKEN_BYTES, Want};
use super::{Event, Setup, World};
use penstock_proto::BLOCK_TOKENS;
use penstock_proto::frames::{Batch, Role};
use penstock_router::WorkerId;
use penstock_router::load::{Seen, Watch};
use penstock_router::roles::{Planner, RoleLimits};
use std::collections::HashMap;
use std::time::Duration;

/// Layers of the model: the KV of the last one leaves after its step.
const LAYERS: f64 = 80.0;

/// Seconds between two runs of the planner.
const LOOK: f64 = 1.0;

/// KV transfers between engines, and their roles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Apart {
    /// Bytes of one token's KV, over all layers.
    pub token_bytes: f64,
    /// Bytes per second of each engine's link in, and out; 0 switches transfers off.
    pub link: f64,
    /// Number of engines, the first ones, that prefill for the others at the start.
    pub prefill: usize,
    /// True if the role planner changes roles with the load.
    pub follow: bool,
    /// Rules of the role planner; times are those of the objectives.
    pub limits: RoleLimits,
}

impl Default for Apart {
    fn default() -> Self {
        Self { token_bytes: TOKEN_BYTES, link: 0.0, prefill: 0, follow: false, limits: RoleLimits::default() }
    }
}

impl Apart {
    /// Bytes of a block; 0 where blocks cannot be handed over.
    pub fn block_bytes(&self) -> u64 {
        if self.link > 0.0 { (self.token_bytes * BLOCK_TOKENS as f64) as u64 } else { 0 }
    }

    /// Role of an engine at the start of a run.
    pub fn role(&self, engine: usize) -> Role {
        match self.prefill {
            0 => Role::Mixed,
            prefill if engine < prefill => Role::Prefill,
            _ => self.limits.decode_role,
        }
    }
}

/// KV transfers in progress between engines, and the planner of roles.
pub(super) struct Roads {
    /// Times when each engine's link in and link out are free.
    free: Vec<(f64, f64)>,
    /// Time when the first KV of a request moved, by (engine, request).
    began: HashMap<(usize, usize), f64>,
    watch: Watch,
    planner: Planner,
    /// Number of role changes so far.
    pub(super) flips: u64,
}

impl Roads {
    pub(super) fn new(setup: &Setup) -> Self {
        let limits = RoleLimits { ttft: setup.slo.ttft, tpot: setup.slo.tpot, ..setup.apart.limits };
        let watch = Watch::new(setup.engines);
        let free = vec![(0.0, 0.0); setup.engines];
        Self { free, began: HashMap::new(), watch, planner: Planner::new(limits), flips: 0 }
    }
}

impl World<'_> {
    /// Moves KV; returns the time of its arrival.
    fn carry(&mut self, from: usize, to: usize, tokens: usize, earliest: f64) -> f64 {
        let seconds = tokens as f64 * self.setup.apart.token_bytes / self.setup.apart.link.max(1.0);
        let roads = &mut self.roads.free;
        let end = earliest.max(roads[to].0).max(roads[from].1) + seconds;
        (roads[to].0, roads[from].1) = (end, end);
        end
    }

    /// Handles a started request that needs KV from another engine.
    pub(super) fn want(&mut self, engine: usize, want: Want) {
        let Want { ask, source, have } = want;
        let from = source.engine();
        if !self.seats[from].alive || from == engine {
            return self.come(engine, (ask.request, ask.attempt), 0, self.seconds());
        }
        if let Source::Prefill(_) = source {
            self.engines[from].lend(ask, Lent { engine, have });
            return self.step(from);
        }
        let (blocks, _) = self.engines[from].cached_blocks(&ask.hashes);
        let there = (blocks * BLOCK_TOKENS).max(have);
        let now = self.seconds();
        let end = self.carry(from, engine, there - have, now + 2.0 * self.setup.wire);
        self.received(engine, there - have, end - now);
        self.come(engine, (ask.request, ask.attempt), there, end);
    }

    /// Sends the KV that an engine's last step, of `seconds`, computed for others.
    pub(super) fn moved(&mut self, engine: usize, seconds: f64) {
        let now = self.seconds();
        for Moved { to, request, attempt, tokens, done } in self.engines[engine].take_moved() {
            let began = *self.roads.began.entry((to, request)).or_insert(now - seconds);
            let way = tokens as f64 * self.setup.apart.token_bytes / self.setup.apart.link.max(1.0);
            let end = self.carry(engine, to, tokens, now - seconds).max(now + way / LAYERS);
            self.received(to, tokens, if done { end - began } else { 0.0 });
            if done {
                self.roads.began.remove(&(to, request));
                self.come(to, (request, attempt), usize::MAX / 2, end);
            }
        }
    }

    /// Counts a transfer as a worker does: from the first byte to the last, including time in which the sender
    /// computed.
    fn received(&mut self, engine: usize, tokens: usize, seconds: f64) {
        let bytes = tokens as f64 * self.setup.apart.token_bytes;
        let transfers = &mut self.engines[engine].transfers;
        transfers.bytes_in += bytes as u64;
        transfers.seconds += seconds;
        transfers.moved_bytes += bytes as u64;
        transfers.moved_seconds += bytes / self.setup.apart.link.max(1.0);
        transfers.completed += u64::from(seconds > 0.0);
    }

    fn come(&mut self, engine: usize, (request, attempt): (usize, u32), tokens: usize, at: f64) {
        let (life, wait) = (self.seats[engine].life, (at - self.seconds()).max(0.0));
        self.after(wait, Event::Come { engine, life, request, attempt, tokens });
    }

    /// Handles the death of an engine: transfers from it and work for it end.
    pub(super) fn forsake(&mut self, engine: usize) {
        self.roads.began.retain(|(to, _), _| *to != engine);
        for other in (0..self.engines.len()).filter(|other| *other != engine) {
            self.engines[other].lost(engine);
            self.step(other);
        }
    }

    /// Reports a step of an engine to the role planner's measurements.
    pub(super) fn watch(&mut self, engine: usize, batch: &Batch) {
        self.roads.watch.observe(WorkerId(engine as u8), batch);
    }

    /// Runs the planners; a role, or the number of engines, may change.
    pub(super) fn look(&mut self) {
        if self.events.is_empty() {
            return;
        }
        let states: Vec<_> = self.engines.iter().map(|engine| engine.state()).collect();
        let seen = |at: usize| Seen {
            worker: WorkerId(at as u8),
            state: &states[at],
            ready: self.seats[at].alive && !self.seats[at].leaving,
            sequences_max: self.setup.sizes.sequences_max as u32,
            base_seconds: self.placement.base_seconds(at),
        };
        let seen: Vec<Seen<'_>> = (0..states.len()).map(seen).collect();
        let now = Duration::from_nanos(self.now);
        let (loads, traffic) = (self.roads.watch.look(&seen, now), self.placement.traffic());
        self.look_replicas(&loads, traffic, now);
        if self.setup.apart.follow
            && let Some(flip) = self.roads.planner.look(&loads, &traffic, now)
        {
            let engine = usize::from(flip.worker.0);
            self.roads.flips += 1;
            self.engines[engine].role = flip.to;
            self.say(engine, Vec::new(), None);
        }
        self.after(LOOK, Event::Look);
    }
}
