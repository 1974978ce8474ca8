//! The engine: requests in, one [`Step`] out. [`Engine::step`] is schedule → forward → sample → publish.

pub(crate) mod adapters;
mod blocks;
mod intake;
mod outbox;
mod pass;

pub use blocks::{Imported, Offload};

use crate::config::EngineConfig;
use crate::draw::{Drawn, Sampled, Trouble};
use crate::forward::{Forward, Geometry};
use crate::limits::Limits;
use crate::output::{extend, failed, first_output, output};
use crate::sampler::BadLogits;
use crate::scheduler::{Order, Plan, Scheduler, Sizes};
use crate::slots::Slots;
use crate::stats::{Stats, attended};
use crate::transfer::Transfers;
use blocks::BlockMover;
use outbox::Outbox;
use pass::{Pass, PassParts, not_finite};
use penstock_grammar::{Grammars, MatchError};
use penstock_kernels::KernelError;
use penstock_proto::frames::{Batch, EngineState, Finish, FinishReason, Role, Step};
use penstock_proto::transfer::First;
use penstock_proto::{BLOCK_TOKENS, Capabilities, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

/// Clock for the duration of a step, from any fixed origin. The engine reads it before and after the work and nowhere
/// else.
pub trait Clock {
    /// Time since the origin; never goes back.
    fn now(&self) -> Duration;
}

impl<F: Fn() -> Duration> Clock for F {
    fn now(&self) -> Duration {
        self()
    }
}

/// One model on one device, and all sequences that run on it.
pub struct Engine {
    forward: Box<dyn Forward>,
    limits: Limits,
    waiting_max: usize,
    scheduler: Scheduler,
    blocks: BlockMover,
    transfers: Transfers,
    pass: Pass,
    outbox: Outbox,
    stats: Stats,
    health: Health,
    steps: u64,
    draining: bool,
    role: Role,
}

/// Failures of device and model.
#[derive(Default)]
struct Health {
    faults: u64,
    last_fault: String,
    is_broken: bool,
}

impl Engine {
    /// Creates an engine over a loaded model. Sizes of `config` above the model's own are lowered.
    pub fn new(forward: Box<dyn Forward>, config: &EngineConfig) -> Self {
        let geometry = forward.geometry();
        let Geometry { vocab_size, context_tokens, pages, rows_max, sampled_max, layers, page_bytes, .. } = geometry;
        let (state_width, headless, encoder) = (geometry.state_width, geometry.headless, geometry.encoder);
        let batch_tokens = config.batch_tokens.clamp(1, rows_max.max(1));
        let sizes = Sizes {
            // A slot for each row of decode: a running prefill then always finds a row left.
            sequences_max: config.sequences_max.clamp(1, sampled_max.clamp(1, batch_tokens)),
            batch_tokens,
            chunk_tokens: if encoder.is_some() { batch_tokens } else { config.chunk_tokens.max(1) },
            samples_max: sampled_max.max(1),
            // Keys of a token that sees later ones are of no use to another text.
            prefix_cache: config.prefix_cache && encoder.is_none(),
            prompt_lookup: config.prompt_lookup,
            whole: encoder.is_some(),
        };
        let step_tokens = if encoder.is_some() { batch_tokens } else { usize::MAX };
        let limits = Limits {
            vocab_size,
            context_tokens: context_tokens.min(pages * BLOCK_TOKENS).min(step_tokens),
            choices_max: config.choices_max,
            logprobs_max: config.logprobs_max,
            prompt_logprobs_max: config.prompt_logprobs_max,
            numerics: geometry.numerics.clone(),
            grammars: None,
            state_width,
            dense_layers: geometry.dense_layers,
            headless,
            encoder,
            adapters: Slots::default(),
        };
        Self {
            blocks: BlockMover::new(&geometry, sizes.prefix_cache),
            waiting_max: config.waiting_max.max(config.choices_max),
            scheduler: Scheduler::new(pages, sizes),
            transfers: Transfers::new(layers, page_bytes),
            pass: Pass::new(config.masks_beside),
            outbox: Outbox::default(),
            stats: Stats::new(config.prefill_seconds_max),
            health: Health::default(),
            steps: 0,
            draining: false,
            role: Role::Mixed,
            forward,
            limits,
        }
    }

    /// Lets requests have grammars. They are compiled when a request is taken; a caller that wants the step's thread
    /// free compiles them into `grammars` before.
    ///
    /// # Panics
    /// If the vocabulary has another size than the model's logits.
    pub fn set_grammars(&mut self, grammars: Arc<Grammars>) {
        assert_eq!(grammars.vocabulary().rows(), self.limits.vocab_size, "the vocabulary is that of the model");
        self.limits.grammars = Some(grammars);
    }

    /// Grammars over the model's vocabulary, if requests may have some.
    pub fn grammars(&self) -> Option<&Arc<Grammars>> {
        self.limits.grammars.as_ref()
    }

    /// Starts the drain: new requests are refused, open ones continue.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Sets the role that the router has given this worker. The role is only reported: the engine does all work in any
    /// role.
    pub fn set_role(&mut self, role: Role) {
        self.role = role;
    }

    /// Returns true if a step would compute or report anything. Stalled sequences are not work until their window opens.
    pub fn has_work(&self) -> bool {
        !self.outbox.is_empty() || self.scheduler.sequences.values().any(|sequence| !sequence.stalled())
    }

    /// Returns true if nothing is open, and no transfer waits for pages: a draining worker may exit.
    pub fn is_empty(&self) -> bool {
        self.outbox.is_empty() && self.scheduler.sequences.is_empty() && self.transfers.has_given_all()
    }

    /// Current load and capacity of the engine, as sent to the router with every step.
    pub fn state(&self) -> EngineState {
        let guided = || self.scheduler.sequences.values().filter(|sequence| sequence.request.rule.is_some()).count();
        let guides = self.limits.grammars.as_ref().map(|grammars| self.stats.guides.state(guided(), grammars));
        EngineState { role: self.role as i32, guides, ..self.stats.state(&self.scheduler, self.draining) }
    }

    /// Number of steps in which the device failed. Their sequences ended as `WorkerFailed`; a worker that sees this
    /// grow should exit.
    pub fn faults(&self) -> u64 {
        self.health.faults
    }

    /// Reason of the last failed step; empty: there was none.
    pub fn last_fault(&self) -> &str {
        &self.health.last_fault
    }

    /// Whether the model's logits are finite after a text of one token, which involves no request and no cached block.
    /// Without a free page nothing is computed, and the answer is true.
    pub fn probe(&mut self) -> Result<bool, KernelError> {
        self.pass.probe(&mut *self.forward, &mut self.scheduler, &self.limits)
    }

    /// Returns true if a step's logits were not finite and those of [`Self::probe`] neither: weights or memory are damaged,
    /// whatever the request. The process should end.
    pub fn is_broken(&self) -> bool {
        self.health.is_broken
    }

    /// Returns true if requests for vectors of prompts can be answered.
    pub fn makes_vectors(&self) -> bool {
        self.limits.state_width > 0 && self.limits.encoder.is_none_or(|encoder| !encoder.has_head)
    }

    /// Returns true if the model is an encoder, or a decoder of whole texts: it makes vectors or scores, and no text.
    pub fn encodes(&self) -> bool {
        self.limits.encoder.is_some()
    }

    /// Most sequences that run at once.
    pub fn sequences_max(&self) -> usize {
        self.scheduler.sizes.sequences_max
    }

    /// Most choices of a request; of a larger one, this many are refused by number.
    pub fn choices_max(&self) -> usize {
        self.limits.choices_max
    }

    /// Most tokens of a sequence: the model's context, or the pool if that is smaller.
    pub fn context_tokens(&self) -> usize {
        self.limits.context_tokens
    }

    /// Reports the changes since the last step, without computing one.
    pub fn report(&mut self) -> Step {
        Step {
            number: self.steps,
            state: Some(self.state()),
            kv: self.scheduler.pool.take_events(),
            ..Default::default()
        }
    }

    /// Computes one step and reports everything that happened since the last.
    pub fn step(&mut self, clock: &dyn Clock) -> Step {
        let began = clock.now();
        let stats = &self.stats;
        let price = |sequences| stats.row_cost.price(sequences);
        let mut plan = self.blocks.evicting(&mut self.scheduler, self.forward.pages(), |scheduler| {
            scheduler.schedule(stats.prefill_rows_max(), price)
        });
        let rows: usize = plan.runs.iter().map(|run| run.rows).sum();
        let mut batch = self.batch(&plan);
        if rows > 0 {
            let Self { forward, scheduler, transfers, stats, limits, .. } = self;
            let parts = PassParts { forward: &mut **forward, scheduler, transfers, stats, limits };
            match self.pass.run(&mut plan, parts) {
                Ok(drawn) if self.breaks(&drawn) => self.fail(&plan, &BadLogits::NotFinite),
                Ok(drawn) => self.publish(&plan, drawn),
                Err(error) => self.fail(&plan, &error),
            }
            self.transfers.after_step(&mut self.scheduler);
            batch.seconds = clock.now().saturating_sub(began).as_secs_f64();
            self.stats.measured(rows, batch.prefill_tokens as usize, batch.seconds);
        }
        self.steps += 1;
        Step {
            number: self.steps,
            outputs: self.outbox.take(self.limits.prompt_logprobs_max),
            state: Some(self.state()),
            kv: self.scheduler.pool.take_events(),
            batch: (rows > 0).then_some(batch),
            ..Default::default()
        }
    }

    /// Work of a plan for the step's report to the gateway, without the duration.
    fn batch(&self, plan: &Plan) -> Batch {
        let mut batch = Batch::default();
        for run in &plan.runs {
            let context = self.scheduler.sequences[&run.order].computed + run.rows;
            if run.rows - run.drafts > 1 {
                batch.prefill_tokens += run.rows as u32;
                batch.prefill_context += attended(run.rows, context);
            } else {
                batch.decodes += run.rows as u32;
                batch.decode_context += attended(run.rows, context) as u64;
            }
        }
        batch
    }

    /// Returns true if non-finite rows are the model's fault, not that of their request. A device that fails in the probe does
    /// not count against the model: device failures are transient and have their own count.
    fn breaks(&mut self, drawn: &[Sampled]) -> bool {
        self.health.is_broken |= drawn.iter().any(not_finite) && !self.probe().unwrap_or(true);
        self.health.is_broken
    }

    /// Advances the sequences of a step and writes their new tokens and ends to the outbox.
    fn publish(&mut self, plan: &Plan, drawn: Vec<Sampled>) {
        // Blocks behind a useless row are not offered to other sequences.
        let useless: Vec<Order> = drawn.iter().filter(|(_, drawn)| drawn.is_err()).map(|(order, _)| *order).collect();
        let useful = plan.runs.iter().filter(|run| !useless.contains(&run.order));
        useful.for_each(|run| self.scheduler.advance(*run));
        for (order, drawn) in drawn {
            match drawn {
                Ok(drawn) => self.say(drawn),
                Err(error) => {
                    self.stats.guides.too_complex +=
                        u64::from(matches!(error, Trouble::Grammar(MatchError::TooComplex { .. })));
                    self.lose(order, error.kind(), &error);
                }
            }
        }
    }

    fn say(&mut self, drawn: Drawn) {
        let Some(sequence) = self.scheduler.sequences.get_mut(&drawn.order) else { return };
        if sequence.request.is_silent {
            let cached_tokens = sequence.cached_tokens.unwrap_or(0);
            let grammar = sequence.request.rule.as_ref().map(|rule| rule.id().to_owned()).unwrap_or_default();
            let capabilities = Capabilities::all().numbers();
            let first = First { tokens: drawn.firsts, cached_tokens, grammar, reasoning_budget: true, capabilities };
            return self.transfers.first(drawn.order, first);
        }
        if !drawn.vector.is_empty() {
            let stop = Finish { reason: FinishReason::Stop as i32, ..Default::default() };
            return self.outbox.end_with_vector(&mut self.scheduler.remove(drawn.order), drawn.vector, stop);
        }
        if let (Some(logprobs), Some(known)) = (drawn.prompt, sequence.prompt_logprobs.as_mut()) {
            known.push(logprobs);
        }
        if drawn.token.is_some() || !drawn.accepted.is_empty() {
            let mut output = output(sequence);
            output.at -= drawn.accepted.len() as u32;
            output.tokens = drawn.accepted;
            extend(sequence, drawn.token, &mut output.tokens);
            self.stats.reasonings_closed += u64::from(sequence.reasonings_closed() - drawn.closed);
            first_output(sequence, &mut output);
            output.finish = sequence.finish();
            self.stats.output_tokens += output.tokens.len() as u64;
            self.stats.guides.jumped_tokens += sequence.jumped as u64;
            let ended = output.finish.is_some();
            self.outbox.push(output);
            if ended {
                self.scheduler.remove(drawn.order);
            }
        } else if drawn.last {
            // Without a reason of its own, the grammar is satisfied and lets no allowed token follow.
            let stop = Finish { reason: FinishReason::Stop as i32, ..Default::default() };
            let finish = sequence.finish().unwrap_or(stop);
            self.outbox.end(&mut self.scheduler.remove(drawn.order), finish);
        }
    }

    /// Handles a failure of device or model: running sequences are lost here and can continue elsewhere; waiting ones
    /// are unaffected.
    fn fail(&mut self, plan: &Plan, error: &dyn std::error::Error) {
        self.health.faults += 1;
        self.health.last_fault = error.to_string();
        plan.runs.iter().for_each(|run| self.lose(run.order, ErrorKind::WorkerFailed, error));
    }

    /// Ends a sequence that cannot go on here.
    fn lose(&mut self, order: Order, kind: ErrorKind, error: &dyn std::error::Error) {
        match self.scheduler.sequences.get(&order) {
            // The transfer notices the missing sequence itself.
            Some(sequence) if sequence.request.is_silent => drop(self.scheduler.remove(order)),
            Some(_) => self.outbox.end(&mut self.scheduler.remove(order), failed(kind, error.to_string())),
            // An earlier row of the same sequence has ended it.
            None => {}
        }
    }
}
