//! The engine: requests in, one [`Step`] out. [`Engine::step`] is schedule → forward → sample → publish.

pub(crate) mod adapters;

use crate::config::EngineConfig;
use crate::draw::{Drawn, Sampled, Trouble, Wants, draw, pick, pool, unfit, verify};
use crate::first;
use crate::forward::{AfterLayer, Forward, Geometry, Pages};
use crate::guide::Guided;
use crate::logits;
use crate::output::{extend, failed, first_output, output};
use crate::request::{Limits, Prefill, Refusal, Request};
use crate::sampler::{BadLogits, Sampler};
use crate::scheduler::{Order, Plan, Scheduler, Sizes};
use crate::sequence::Sequence;
use crate::slots::Slots;
use crate::stats::{Stats, attended};
use crate::transfer::{Missing, PageSink, Transfers};
use penstock_grammar::{Grammars, MatchError};
use penstock_kernels::{KernelError, Pick, Pool, Span, StepBatch};
use penstock_kv::Evicted;
use penstock_proto::frames::{
    Batch, Cancel, EngineState, Finish, FinishReason, Generate, KvEvent, Output, Role, Step, Window,
};
use penstock_proto::transfer::First;
use penstock_proto::{BLOCK_TOKENS, BlockHash, BlockHasher, Capabilities, ErrorKind, WorkId};
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

/// Receiver of blocks that leave the device, called while their bytes are still there.
pub trait Offload: Send {
    /// Returns true if the block is wanted; asked before the bytes are read.
    fn wants(&mut self, parent: Option<BlockHash>, hash: BlockHash) -> bool;

    /// Number of blocks that can be taken now.
    fn room(&mut self) -> usize;

    /// Reports the number of wanted blocks that found no room.
    fn missed(&mut self, blocks: usize);

    /// Takes the bytes of a block, in wire order.
    fn take(&mut self, parent: Option<BlockHash>, hash: BlockHash, bytes: Vec<u8>);
}

/// Token that [`Engine::probe`] computes; any token will do, since only the finiteness of the logits matters.
const PROBE: u32 = 1;

/// One model on one device, and all sequences that run on it.
pub struct Engine {
    offload: Option<Box<dyn Offload>>,
    forward: Box<dyn Forward>,
    /// Bytes of one page of one layer in wire order.
    page_bytes: usize,
    block_bytes: usize,
    limits: Limits,
    waiting_max: usize,
    masks_beside: bool,
    scheduler: Scheduler,
    sampler: Sampler,
    stats: Stats,
    /// Outputs of sequences that ended between steps: refusals, cancellations.
    outbox: Vec<Output>,
    steps: u64,
    faults: u64,
    last_fault: String,
    is_broken: bool,
    draining: bool,
    role: Role,
    transfers: Transfers,
    tokens: Vec<u32>,
    types: Vec<u32>,
    sampled: Vec<usize>,
    pools: Vec<Pool>,
    /// Way to the token of each sampled row.
    picks: Vec<Pick>,
    /// Final states of the sampled rows of a step that pools.
    states: Vec<f32>,
}

/// Result of importing a block's KV, from a tier or another worker, into the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Imported {
    /// The block is stored in a page and can be read now.
    Stored,
    /// The block was in the prefix cache already; the bytes are not needed.
    Known,
    /// Every page is in use by a sequence or a hold.
    NoRoom,
    /// The bytes have the wrong length, or this engine keeps no blocks.
    Refused,
}

impl Engine {
    /// Creates an engine over a loaded model. Sizes of `config` above the model's own are lowered.
    pub fn new(forward: Box<dyn Forward>, config: &EngineConfig) -> Self {
        let geometry = forward.geometry();
        let block_bytes = geometry.block_bytes();
        let Geometry { vocab_size, context_tokens, pages, rows_max, sampled_max, numerics, layers, page_bytes, .. } =
            geometry;
        let (state_width, headless, encoder) = (geometry.state_width, geometry.headless, geometry.encoder);
        let dense_layers = geometry.dense_layers;
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
            numerics,
            grammars: None,
            state_width,
            dense_layers,
            headless,
            encoder,
            adapters: Slots::default(),
        };
        Self {
            offload: None,
            forward,
            page_bytes,
            block_bytes,
            limits,
            waiting_max: config.waiting_max.max(config.choices_max),
            masks_beside: config.masks_beside,
            scheduler: Scheduler::new(pages, sizes),
            sampler: Sampler::default(),
            stats: Stats::new(config.prefill_seconds_max),
            outbox: Vec::new(),
            steps: 0,
            faults: 0,
            last_fault: String::new(),
            is_broken: false,
            draining: false,
            role: Role::Mixed,
            transfers: Transfers::new(layers, page_bytes),
            tokens: Vec::new(),
            types: Vec::new(),
            sampled: Vec::new(),
            pools: Vec::new(),
            picks: Vec::new(),
            states: Vec::new(),
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

    /// Takes a request, or refuses it: then the next step carries a `Failed` finish for each of its choices.
    ///
    /// A request that is already open is continued if `attempt` is higher (its pages are freed) and ignored otherwise.
    pub fn submit(&mut self, generate: Generate) {
        self.take(generate, self.draining);
    }

    /// Takes a request that was accepted before the engine began to drain, and has waited for its blocks since.
    pub fn go_on(&mut self, generate: Generate) {
        self.take(generate, false);
    }

    fn take(&mut self, generate: Generate, refuses: bool) {
        let (id, attempt) = (WorkId(generate.request), generate.attempt);
        match self.scheduler.attempt(id) {
            Some(open) if open >= attempt => return,
            Some(_) => {
                let kept = self.scheduler.take_hold(id);
                let members = self.scheduler.members(id).to_vec();
                members.into_iter().for_each(|order| drop(self.scheduler.remove(order)));
                kept.into_iter().for_each(|pages| self.scheduler.hold(id, pages));
            }
            None => {}
        }
        let (rank, window) = ((generate.priority, generate.turn), generate.window);
        let choices: Vec<u32> =
            generate.choices.iter().map(|choice| choice.index).take(self.limits.choices_max).collect();
        match self.admit(generate, refuses) {
            Ok((request, starts)) => {
                let request = Arc::new(request);
                for (n, start) in starts.into_iter().enumerate() {
                    let sequence = Sequence::new(Arc::clone(&request), start, window, n == 0);
                    match sequence.guided.as_ref().and_then(Guided::failure) {
                        None => self.open(rank, sequence),
                        Some(error) => {
                            let finish = Some(failed(unfit(error), format!("emitted: {error}")));
                            self.outbox.push(Output { finish, ..output(&sequence) });
                        }
                    }
                }
            }
            Err(refusal) => {
                let choices = if choices.is_empty() { vec![0] } else { choices };
                let finish = failed(refusal.kind, refusal.message);
                let refuse = |choice| Output {
                    request: id.0,
                    attempt,
                    choice,
                    finish: Some(finish.clone()),
                    ..Default::default()
                };
                self.outbox.extend(choices.into_iter().map(refuse));
            }
        }
        if self.scheduler.members(id).is_empty() {
            self.scheduler.let_go(id);
        }
    }

    fn admit(
        &self,
        generate: Generate,
        refuses: bool,
    ) -> Result<(Request, Vec<penstock_proto::frames::ChoiceStart>), Refusal> {
        if refuses {
            return Err(Refusal { kind: ErrorKind::Draining, message: "the worker is draining".to_owned() });
        }
        let waiting = self.scheduler.waiting() + generate.choices.len();
        let (request, starts) = Request::parse(generate, &self.limits)?;
        if waiting > self.waiting_max {
            let message = format!("{} sequences wait, limit {}", self.scheduler.waiting(), self.waiting_max);
            return Err(Refusal { kind: ErrorKind::Overloaded, message });
        }
        Ok((request, starts))
    }

    fn open(&mut self, rank: (i32, i64), mut sequence: Sequence) {
        match sequence.finish() {
            // Ended already, with no further output and no prompt to report on.
            Some(finish) if sequence.collecting().is_none() => {
                let mut output = output(&sequence);
                first_output(&mut sequence, &mut output);
                output.finish = Some(finish);
                self.outbox.push(output);
            }
            _ => _ = self.scheduler.insert(rank, sequence),
        }
    }

    /// Frees the resources of a request's choices (all when none are named); the next step carries their `Cancelled`
    /// finish.
    pub fn cancel(&mut self, cancel: &Cancel) {
        for order in self.scheduler.members(WorkId(cancel.request)).to_vec() {
            let choice = self.scheduler.sequences[&order].choice;
            if cancel.choices.is_empty() || cancel.choices.contains(&choice) {
                let finish = Finish { reason: FinishReason::Cancelled as i32, ..Default::default() };
                self.end(order, finish);
            }
        }
    }

    /// Extends the window of a choice.
    pub fn window(&mut self, window: &Window) {
        for order in self.scheduler.members(WorkId(window.request)).to_vec() {
            let sequence = self.scheduler.sequence(order);
            if sequence.choice == window.choice {
                sequence.window = sequence.window.map(|left| left.saturating_add(u64::from(window.tokens)));
            }
        }
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

    /// All blocks of the prefix cache, for a gateway that starts anew.
    pub fn snapshot(&self) -> Vec<KvEvent> {
        self.scheduler.pool.snapshot()
    }

    /// Number of steps in which the device failed. Their sequences ended as `WorkerFailed`; a worker that sees this
    /// grow should exit.
    pub fn faults(&self) -> u64 {
        self.faults
    }

    /// Reason of the last failed step; empty: there was none.
    pub fn last_fault(&self) -> &str {
        &self.last_fault
    }

    /// Whether the model's logits are finite after a text of one token, which involves no request and no cached block.
    /// Without a free page nothing is computed, and the answer is true.
    pub fn probe(&mut self) -> Result<bool, KernelError> {
        let Some(page) = self.scheduler.pool.allocate() else { return Ok(true) };
        let token = PROBE.min(self.limits.vocab_size.saturating_sub(1) as u32);
        let spans = [Span { rows: 0..1, context: 1, block_table: &[page.0], adapter: None }];
        let batch = StepBatch { tokens: &[token], spans: &spans, sampled: &[0], ..Default::default() };
        let finite = if self.limits.headless {
            self.states.clear();
            let ran = self.forward.states(&batch, None, &mut self.states, false).map(drop);
            ran.map(|()| self.states.iter().all(|value| value.is_finite()))
        } else {
            self.forward.forward(&batch, None).map(|row| logits::max(row).is_some())
        };
        self.scheduler.pool.release(page);
        finite
    }

    /// Returns true if a step's logits were not finite and those of [`Self::probe`] neither: weights or memory are damaged,
    /// whatever the request. The process should end.
    pub fn is_broken(&self) -> bool {
        self.is_broken
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

    /// Bytes of one block in wire order; see [`Geometry::block_bytes`]. 0 if blocks cannot be moved.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Sends evicted blocks through `offload` from now on. Without effect where blocks cannot be moved.
    pub fn set_offload(&mut self, offload: Box<dyn Offload>) {
        if self.block_bytes > 0 && self.scheduler.sizes.prefix_cache {
            self.offload = Some(offload);
        }
    }

    /// Evicts the next idle block through `offload`; false if none is idle.
    pub fn offload_one(&mut self) -> bool {
        self.note_evicted();
        let evicted = self.scheduler.pool.shrink();
        self.offload_evicted();
        evicted
    }

    /// Returns true if a block can be read on the device now.
    pub fn holds(&self, hash: BlockHash) -> bool {
        self.scheduler.pool.find(hash).is_some()
    }

    /// Seconds to compute one block of prefill at the measured speed; 0 until measured.
    pub fn block_seconds(&self) -> f64 {
        let rate = self.stats.prefill_tokens_per_second();
        if rate > 0.0 { BLOCK_TOKENS as f64 / rate } else { 0.0 }
    }

    /// Bytes of one page of one layer in wire order; see [`Geometry::page_bytes`].
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Appends the bytes of a block to `out`, `[layer][page]` in wire order; false if the block cannot be read now.
    pub fn export(&self, hash: BlockHash, out: &mut Vec<u8>) -> bool {
        let Some(page) = self.scheduler.pool.find(hash).filter(|_| self.block_bytes > 0) else { return false };
        self.copy_out(page.0, out);
        true
    }

    fn copy_out(&self, page: u32, out: &mut Vec<u8>) {
        let begin = out.len();
        out.resize(begin + self.block_bytes, 0);
        let layers = out[begin..].chunks_exact_mut(self.page_bytes);
        layers.enumerate().for_each(|(layer, bytes)| self.forward.pages().read_page(layer, page, bytes));
    }

    /// Begins to record evictions, until [`Self::offload_evicted`]. Blocks evicted outside of the two calls are not
    /// handed on: their pages may be written at any time.
    fn note_evicted(&mut self) {
        if self.offload.is_some() {
            self.scheduler.pool.keep_evicted();
        }
    }

    /// Hands on the blocks evicted since [`Self::note_evicted`]; must run before any page is written.
    fn offload_evicted(&mut self) {
        let Some(mut offload) = self.offload.take() else { return };
        let mut wanted = self.scheduler.pool.take_evicted();
        wanted.retain(|block| offload.wants(block.parent, block.hash));
        // Chains are evicted last block first; the first blocks are useful without the others, not the other way
        // round.
        let missed = wanted.len().saturating_sub(offload.room());
        offload.missed(missed);
        for Evicted { parent, hash, page } in wanted.into_iter().skip(missed) {
            let mut bytes = Vec::new();
            self.copy_out(page.0, &mut bytes);
            offload.take(parent, hash, bytes);
        }
        self.offload = Some(offload);
    }

    /// Imports a block that was computed elsewhere in the same numerics; it becomes idle in the prefix cache.
    /// `parent`: the hash of the block before it. The caller has checked that the bytes match the hash.
    pub fn import(&mut self, parent: Option<BlockHash>, hash: BlockHash, bytes: &[u8]) -> Imported {
        if bytes.len() != self.block_bytes || bytes.is_empty() || !self.scheduler.sizes.prefix_cache {
            return Imported::Refused;
        }
        if self.scheduler.pool.find(hash).is_some() {
            return Imported::Known;
        }
        self.note_evicted();
        let page = self.scheduler.pool.allocate();
        self.offload_evicted();
        let Some(page) = page else { return Imported::NoRoom };
        let layers = bytes.chunks_exact(self.page_bytes);
        layers.enumerate().for_each(|(layer, bytes)| self.forward.write_page(layer, page.0, bytes));
        let pool = &mut self.scheduler.pool;
        let page = pool.seal(page, parent, hash);
        pool.release(page);
        Imported::Stored
    }

    /// Marks the first blocks of a chain as used soon, so that imports evict others first.
    pub fn touch(&mut self, chain: &[BlockHash]) {
        self.scheduler.pool.touch(chain.iter().copied());
    }

    /// Hashes of the blocks that a request needs before its first step, and that a transfer can bring.
    pub fn chain(&self, generate: &Generate) -> Vec<BlockHash> {
        let hasher = BlockHasher::for_request(&generate.salt, &self.limits.numerics);
        let emitted = match generate.choices.as_slice() {
            [only] => only.emitted.as_slice(),
            _ => &[],
        };
        let tokens = [&generate.prompt[..], emitted].concat();
        let logprobs = generate.sampling.as_ref().is_some_and(|sampling| sampling.prompt_logprobs >= 0);
        // The last token is always computed here, and all tokens are when each row is wanted.
        let readable = if logprobs { 0 } else { tokens.len().saturating_sub(1).min(self.limits.context_tokens) };
        hasher.chain(&tokens[..readable])
    }

    /// Begins to receive the missing blocks of a chain, under a number like those of requests: holds the blocks that
    /// are here, and pages for the rest as far as spare ones exist.
    pub fn receive(&mut self, id: WorkId, chain: Vec<BlockHash>) -> Missing {
        self.note_evicted();
        let missing = self.transfers.receive(id, chain, &mut self.scheduler);
        self.offload_evicted();
        missing
    }

    /// Takes one received page of one layer. `block` counts from the first missing one. False if the page was not
    /// expected, came before, or was reclaimed; the transfer is useless then.
    pub fn accept(&mut self, id: WorkId, block: usize, layer: usize, bytes: &[u8]) -> bool {
        self.transfers.accept(id, (block, layer), bytes, &self.scheduler, &mut *self.forward)
    }

    /// Ends [`Self::receive`]: of the received blocks, the complete ones among the first `vouched` can be read from
    /// now on. With `keep` the chain is held for the request of the same number, which is submitted next. Returns the
    /// number of leading blocks of the chain that can be read.
    pub fn settle(&mut self, id: WorkId, vouched: usize, keep: bool) -> usize {
        self.transfers.settle(id, vouched, keep, &mut self.scheduler)
    }

    /// Sends the leading blocks of `hashes`, part of a chain, that can be read here; returns their number.
    pub fn send(&mut self, id: WorkId, hashes: &[BlockHash], sink: Box<dyn PageSink>) -> usize {
        self.transfers.send(id, hashes, sink, &mut self.scheduler)
    }

    /// Computes blocks of a prompt for another engine and sends each layer as soon as it is complete; then draws the
    /// token after it, if asked for and if there was anything to compute.
    ///
    /// # Errors
    /// The reason of the refusal, for the other engine's log; `sink` has been told.
    pub fn prefill(&mut self, prefill: Prefill, mut sink: Box<dyn PageSink>) -> Result<(), String> {
        let (id, rank) = (prefill.id, (prefill.priority, prefill.turn));
        let blocks = prefill.first..prefill.first.saturating_add(prefill.blocks);
        let silent = if self.draining {
            Err("the worker is draining".to_owned())
        } else if self.scheduler.waiting() >= self.waiting_max || self.block_bytes == 0 {
            Err("the worker takes no more, or cannot send".to_owned())
        } else {
            Request::silent(prefill, &self.limits).map_err(|refusal| refusal.message)
        };
        let (request, start) = silent.inspect_err(|_| sink.end(false))?;
        let mut sequence = Sequence::new(Arc::new(request), start, 0, false);
        if let Some(error) = sequence.guided.as_ref().and_then(Guided::failure) {
            sink.end(false);
            return Err(format!("emitted: {error}"));
        }
        let wanted: Vec<BlockHash> = blocks.clone().map(|block| sequence.hash(block)).collect();
        if self.scheduler.pool.lookup(wanted.iter().copied()).pages.len() == wanted.len() {
            // All blocks are here, so the asker does not wait for a computation: it computes the few remaining rows
            // and its token itself.
            self.transfers.send(id, &wanted, sink, &mut self.scheduler);
            return Ok(());
        }
        let order = self.scheduler.insert(rank, sequence);
        self.transfers.follow(id, order, blocks, sink);
        Ok(())
    }

    /// Takes the first tokens of a request, drawn by another engine, before the request is submitted; returns the
    /// outputs for them. `generate` goes on after them, without the choices that ended. `cached_tokens`: prompt tokens
    /// that were here. `None`, with nothing changed, if the tokens do not fit the request.
    pub fn say_first(&mut self, generate: &mut Generate, first: First, cached_tokens: u32) -> Option<Vec<Output>> {
        let outputs = first::say(generate, first, cached_tokens, &self.limits)?;
        self.stats.output_tokens += outputs.len() as u64;
        Some(outputs)
    }

    /// Stops the outgoing transfer `id` of [`Self::send`] or [`Self::prefill`] before its end.
    pub fn stop(&mut self, id: WorkId) {
        self.transfers.stop(id, &mut self.scheduler);
    }

    /// Returns true if [`Self::send`] or [`Self::prefill`] of this number goes on.
    pub fn is_sending(&self, id: WorkId) -> bool {
        self.transfers.is_sending(id)
    }

    /// Returns true if [`Self::give`] would send a page or end a lost transfer now.
    pub fn can_give(&mut self) -> bool {
        self.transfers.can_give(&self.scheduler)
    }

    /// Gives one page to a sink that has room; false if there is nothing to give now.
    pub fn give(&mut self) -> bool {
        self.transfers.give(&mut self.scheduler, &*self.forward)
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
        self.note_evicted();
        let price = |sequences| self.stats.row_cost.price(sequences);
        let mut plan = self.scheduler.schedule(self.stats.prefill_rows_max(), price);
        self.offload_evicted();
        let rows: usize = plan.runs.iter().map(|run| run.rows).sum();
        let mut batch = self.batch(&plan);
        if rows > 0 {
            match self.run(&mut plan) {
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
            outputs: self.take_outputs(),
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

    /// Takes the outputs for this step's frame: all of them, unless the lists of prompt log-probabilities are too long
    /// at once; the rest follows with the next step.
    fn take_outputs(&mut self) -> Vec<Output> {
        let entries = |output: &Output| output.prompt_logprobs.iter().map(|l| 1 + l.top_tokens.len()).sum::<usize>();
        let mut left = self.limits.prompt_logprobs_max;
        let fitting = self.outbox.iter().take_while(|output| {
            let entries = entries(output);
            let fits = entries <= left;
            left -= entries.min(left);
            fits
        });
        let rest = self.outbox.split_off(fitting.count());
        std::mem::replace(&mut self.outbox, rest)
    }

    /// Runs the forward pass and samples. The rows of rejected drafts leave the plan.
    fn run(&mut self, plan: &mut Plan) -> Result<Vec<Sampled>, KernelError> {
        let mut masked = self.take_unmasked(plan);
        let Self {
            forward, scheduler, sampler, tokens, types, sampled, pools, picks, states, limits, transfers, ..
        } = self;
        tokens.clear();
        types.clear();
        sampled.clear();
        pools.clear();
        picks.clear();
        states.clear();
        let mut spans = Vec::with_capacity(plan.runs.len());
        let mut asked: Vec<Asked> = Vec::new();
        for run in &plan.runs {
            let sequence = &scheduler.sequences[&run.order];
            let (begin, context) = (tokens.len(), sequence.computed + run.rows);
            sequence.append_inputs(run.rows - run.drafts, tokens);
            tokens.extend_from_slice(&sequence.drafts[..run.drafts]);
            self.stats.drafted_tokens += run.drafts as u64;
            let (block_table, adapter) = (&sequence.table, sequence.request.adapter);
            spans.push(Span { rows: begin..tokens.len(), context, block_table, adapter });
            let first = sampled.len();
            match sequence.request.pooled.filter(|_| limits.encoder.is_some()) {
                Some(pooled) => {
                    types.extend(pooled.types(run.rows));
                    sampled.push(pooled.row(&(begin..tokens.len())));
                    pools.push(pooled.pool(limits.encoder));
                }
                None => sampled.extend(tokens.len() - run.samples..tokens.len()),
            }
            picks.extend((context - run.samples..context).map(|at| pick(sequence, at)));
            let own = run.samples - run.drafts;
            asked.extend((0..own).map(|n| Asked { order: run.order, at: context - run.samples + n, row: first + n }));
        }
        let completing = transfers.completing(plan, scheduler);
        let mut give = |layer: usize, pages: &dyn Pages| transfers.after_layer(layer, &completing, pages);
        let after_layer: AfterLayer<'_> = if completing.is_empty() { None } else { Some(&mut give) };
        let batch = StepBatch { tokens, spans: &spans, sampled, types, pools };
        let pools = |asked: &Asked| scheduler.sequences[&asked.order].request.pooled.is_some();
        // Without a head there are no logits, not even of a step that is a part of a prompt and samples nothing.
        let has_states = limits.headless || asked.iter().any(pools);
        let wants = Wants { states: has_states, logits: !asked.iter().all(pools) };
        let rows = if self.masks_beside && !masked.is_empty() {
            std::thread::scope(|scope| {
                let masks = scope.spawn(|| mask(&mut masked));
                let rows = wants.pass(&mut **forward, &batch, after_layer, picks, states);
                masks.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                rows
            })
        } else {
            mask(&mut masked);
            wants.pass(&mut **forward, &batch, after_layer, picks, states)
        };
        for (order, guided, elapsed) in masked {
            scheduler.sequence(order).guided = Some(guided);
            elapsed.into_iter().for_each(|elapsed| self.stats.guides.masked(elapsed));
        }
        let rows = rows?;
        let drawn = asked.iter().map(|&Asked { order, at, row }| {
            let sequence = &scheduler.sequences[&order];
            let drawn = if sequence.request.pooled.is_some() {
                pool(&states[row * limits.state_width..][..limits.state_width], order)
            } else {
                draw(sampler, rows.row(row), order, sequence, at)
            };
            (order, drawn)
        });
        let mut drawn: Vec<Sampled> = drawn.collect();
        // Nothing is appended in a step that may be void.
        if drawn.iter().any(not_finite) {
            plan.drop_drafts();
        }
        for run in plan.runs.iter_mut().filter(|run| run.drafts > 0) {
            let at = drawn.iter().position(|(order, _)| *order == run.order).expect("drafts are behind a drawn row");
            let Ok(drawn) = &mut drawn[at].1 else { continue };
            let first = asked[at].row + 1;
            let rows = (first..first + run.drafts).map(|row| rows.row(row));
            let verified = verify(sampler, rows, scheduler.sequence(run.order), drawn, &mut self.stats.guides);
            let sequence = scheduler.sequence(run.order);
            sequence.learn(verified.kept, verified.rejected, plan.draft_price);
            self.stats.accepted_tokens += verified.kept as u64;
            run.rows -= run.drafts - verified.kept;
        }
        Ok(drawn)
    }

    /// Takes the places of those sequences out whose next token needs a mask. The tokens before it are known already, so
    /// the mask does not wait for the logits.
    fn take_unmasked(&mut self, plan: &Plan) -> Vec<(Order, Guided, Option<Duration>)> {
        let mut masked = Vec::new();
        for run in plan.runs.iter().filter(|run| run.samples > 0) {
            let sequence = self.scheduler.sequence(run.order);
            let draws = sequence.wanted() == run.rows - run.drafts
                && (sequence.request.is_silent || sequence.finish().is_none());
            let needs = draws && sequence.is_masked();
            masked.extend(sequence.guided.take_if(|_| needs).map(|guided| (run.order, guided, None)));
        }
        masked
    }

    /// Returns true if non-finite rows are the model's fault, not that of their request. A device that fails in the probe does
    /// not count against the model: device failures are transient and have their own count.
    fn breaks(&mut self, drawn: &[Sampled]) -> bool {
        self.is_broken |= drawn.iter().any(not_finite) && !self.probe().unwrap_or(true);
        self.is_broken
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
            let mut sequence = self.scheduler.remove(drawn.order);
            let mut output = Output { vector: drawn.vector, finish: Some(stop), ..output(&sequence) };
            first_output(&mut sequence, &mut output);
            return self.outbox.push(output);
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
            self.end(drawn.order, finish);
        }
    }

    /// Ends a sequence without a token.
    fn end(&mut self, order: Order, finish: Finish) {
        let mut sequence = self.scheduler.remove(order);
        let mut output = output(&sequence);
        first_output(&mut sequence, &mut output);
        output.finish = Some(finish);
        self.outbox.push(output);
    }

    /// Handles a failure of device or model: running sequences are lost here and can continue elsewhere; waiting ones
    /// are unaffected.
    fn fail(&mut self, plan: &Plan, error: &dyn std::error::Error) {
        self.faults += 1;
        self.last_fault = error.to_string();
        plan.runs.iter().for_each(|run| self.lose(run.order, ErrorKind::WorkerFailed, error));
    }

    /// Ends a sequence that cannot go on here.
    fn lose(&mut self, order: Order, kind: ErrorKind, error: &dyn std::error::Error) {
        match self.scheduler.sequences.get(&order) {
            // The transfer notices the missing sequence itself.
            Some(sequence) if sequence.request.is_silent => drop(self.scheduler.remove(order)),
            Some(_) => self.end(order, failed(kind, error.to_string())),
            // An earlier row of the same sequence has ended it.
            None => {}
        }
    }
}

/// Sampled row that is drawn from, whatever drafts stand behind it.
struct Asked {
    order: Order,
    /// Position in the sequence.
    at: usize,
    /// Index among the sampled rows of the step.
    row: usize,
}

/// Returns true if a row's logits are of no use to any request.
fn not_finite((_, drawn): &Sampled) -> bool {
    matches!(drawn, Err(Trouble::Logits(BadLogits::NotFinite)))
}

/// Computes masks, and notes how long each took.
fn mask(masked: &mut [(Order, Guided, Option<Duration>)]) {
    masked.iter_mut().for_each(|(_, guided, elapsed)| *elapsed = guided.mask());
}
