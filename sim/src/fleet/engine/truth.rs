//! True state of engines, for rules with perfect knowledge; no real router has it.

use super::{Engine, Speed, Waiting};
use penstock_proto::BLOCK_TOKENS;

impl Engine {
    /// True seconds of prefill that wait in the engine, which the router only estimates.
    pub fn pending_seconds(&self) -> f64 {
        let running = self.running.iter().filter(|sequence| !sequence.decodes());
        let started: f64 = running
            .map(|sequence| self.speed.prefill_seconds(sequence.ask.input - sequence.computed, sequence.computed))
            .sum();
        let waiting = self.waiting.iter().map(|Waiting { ask, .. }| {
            let (device, host) = self.cached_blocks(&ask.hashes);
            let hit = ask.given.unwrap_or(((device + host) * BLOCK_TOKENS).min(ask.input - 1));
            self.speed.prefill_seconds(ask.input - hit, hit)
        });
        started + waiting.sum::<f64>()
    }

    /// True seconds of a step that only decodes.
    pub fn decode_seconds(&self) -> f64 {
        let tokens: usize = self.running.iter().map(|sequence| sequence.ask.input + sequence.produced).sum();
        self.speed.base + self.speed.sequence * self.running.len() as f64 + self.speed.context * tokens as f64
    }

    /// Number of sequences that decode, and of those that wait.
    pub fn loads(&self) -> (usize, usize) {
        (self.running.iter().filter(|sequence| sequence.decodes()).count(), self.waiting.len())
    }

    /// Share of the pages that are held or asked for, with `more` blocks added.
    pub fn fill(&self, more: usize) -> f64 {
        let held = self.pool.total() - self.pool.available();
        let asked: usize = self.waiting.iter().map(|waiting| (waiting.ask.input + 256) / BLOCK_TOKENS).sum();
        (held + asked + more) as f64 / self.pool.total() as f64
    }

    /// True speed of the engine, which the router only estimates.
    pub fn speed(&self) -> &Speed {
        &self.speed
    }
}
