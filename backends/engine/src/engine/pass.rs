//! Pass of the model over a step's plan: rows gathered from the sequences, masks made beside it, tokens and vectors drawn from its sampled rows.

use crate::draw::{Sampled, Trouble, Wants, draw, pick, pool, verify};
use crate::forward::{AfterLayer, Forward, Pages};
use crate::guide::Guided;
use crate::limits::Limits;
use crate::logits;
use crate::sampler::{BadLogits, Sampler};
use crate::scheduler::{Order, Plan, Scheduler};
use crate::stats::Stats;
use crate::transfer::Transfers;
use penstock_kernels::{KernelError, Pick, Pool, SampledRows, Span, StepBatch};
use std::time::Duration;

/// Token that [`Pass::probe`] computes; any token will do, since only the finiteness of the logits matters.
const PROBE: u32 = 1;

/// Buffers of a pass, kept from step to step, and the sampler.
#[derive(Default)]
pub(super) struct Pass {
    /// True if a thread makes the masks while the model runs, instead of before the model runs.
    masks_beside: bool,
    sampler: Sampler,
    inputs: Inputs,
    /// Final states of the sampled rows of a step that pools.
    states: Vec<f32>,
}

/// Parts of an engine that a pass works on.
pub(super) struct PassParts<'e> {
    pub(super) forward: &'e mut dyn Forward,
    pub(super) scheduler: &'e mut Scheduler,
    pub(super) transfers: &'e mut Transfers,
    pub(super) stats: &'e mut Stats,
    pub(super) limits: &'e Limits,
}

/// Rows of a pass as the model takes them.
#[derive(Default)]
struct Inputs {
    tokens: Vec<u32>,
    types: Vec<u32>,
    sampled: Vec<usize>,
    pools: Vec<Pool>,
    /// Way to the token of each sampled row.
    picks: Vec<Pick>,
}

/// Sampled row that is drawn from, whatever drafts stand behind it.
struct DrawnRow {
    order: Order,
    /// Position in the sequence.
    at: usize,
    /// Index among the sampled rows of the step.
    row: usize,
}

/// Place of a sequence whose next token needs a mask, and the time that the mask took.
type Masked = (Order, Guided, Option<Duration>);

impl Pass {
    pub(super) fn new(masks_beside: bool) -> Self {
        Self { masks_beside, ..Self::default() }
    }

    /// Runs the model and samples. The rows of rejected drafts leave the plan.
    ///
    /// # Errors
    /// The device has failed; nothing is drawn.
    pub(super) fn run(&mut self, plan: &mut Plan, parts: PassParts<'_>) -> Result<Vec<Sampled>, KernelError> {
        let PassParts { forward, scheduler, transfers, stats, limits } = parts;
        let mut masked = take_unmasked(plan, scheduler);
        let (spans, asked) = self.inputs.gather(plan, scheduler, limits);
        stats.drafted_tokens += plan.runs.iter().map(|run| run.drafts as u64).sum::<u64>();
        let completing = transfers.completing(plan, scheduler);
        let mut give = |layer: usize, pages: &dyn Pages| transfers.after_layer(layer, &completing, pages);
        let after_layer: AfterLayer<'_> = if completing.is_empty() { None } else { Some(&mut give) };
        let Inputs { tokens, types, sampled, pools, picks } = &self.inputs;
        let batch = StepBatch { tokens, spans: &spans, sampled, types, pools };
        let pooled = |asked: &DrawnRow| scheduler.sequences[&asked.order].request.pooled.is_some();
        // Without a head there are no logits, not even of a step that is a part of a prompt and samples nothing.
        let has_states = limits.headless || asked.iter().any(pooled);
        let wants = Wants { states: has_states, logits: !asked.iter().all(pooled) };
        self.states.clear();
        let states = &mut self.states;
        let rows = if self.masks_beside && !masked.is_empty() {
            std::thread::scope(|scope| {
                let masks = scope.spawn(|| mask(&mut masked));
                let rows = wants.pass(forward, &batch, after_layer, picks, states);
                masks.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                rows
            })
        } else {
            mask(&mut masked);
            wants.pass(forward, &batch, after_layer, picks, states)
        };
        for (order, guided, elapsed) in masked {
            scheduler.sequence(order).guided = Some(guided);
            elapsed.into_iter().for_each(|elapsed| stats.guides.masked(elapsed));
        }
        let rows = rows?;
        let mut drawn = self.draw(&rows, &asked, scheduler, limits);
        // Nothing is appended in a step that may be void.
        if drawn.iter().any(not_finite) {
            plan.drop_drafts();
        }
        self.verify(&rows, &asked, plan, &mut drawn, scheduler, stats);
        Ok(drawn)
    }

    /// Tokens, or vectors, of the rows that are drawn from.
    fn draw(
        &mut self,
        rows: &SampledRows<'_>,
        asked: &[DrawnRow],
        scheduler: &Scheduler,
        limits: &Limits,
    ) -> Vec<Sampled> {
        let Self { sampler, states, .. } = self;
        let drawn = asked.iter().map(|&DrawnRow { order, at, row }| {
            let sequence = &scheduler.sequences[&order];
            let drawn = if sequence.request.pooled.is_some() {
                pool(&states[row * limits.state_width..][..limits.state_width], order)
            } else {
                draw(sampler, rows.row(row), order, sequence, at)
            };
            (order, drawn)
        });
        drawn.collect()
    }

    /// Accepts drafts behind the drawn tokens as far as they are what would have been drawn.
    fn verify(
        &mut self,
        rows: &SampledRows<'_>,
        asked: &[DrawnRow],
        plan: &mut Plan,
        drawn: &mut [Sampled],
        scheduler: &mut Scheduler,
        stats: &mut Stats,
    ) {
        for run in plan.runs.iter_mut().filter(|run| run.drafts > 0) {
            let at = drawn.iter().position(|(order, _)| *order == run.order).expect("drafts are behind a drawn row");
            let Ok(drawn) = &mut drawn[at].1 else { continue };
            let first = asked[at].row + 1;
            let rows = (first..first + run.drafts).map(|row| rows.row(row));
            let verified = verify(&mut self.sampler, rows, scheduler.sequence(run.order), drawn, &mut stats.guides);
            let sequence = scheduler.sequence(run.order);
            sequence.learn(verified.kept, verified.rejected, plan.draft_price);
            stats.accepted_tokens += verified.kept as u64;
            run.rows -= run.drafts - verified.kept;
        }
    }

    /// Returns true if the model's logits are finite after a text of one token, which involves no request and no cached block.
    /// Without a free page nothing is computed, and the answer is true.
    ///
    /// # Errors
    /// The device has failed.
    pub(super) fn probe(
        &mut self,
        forward: &mut dyn Forward,
        scheduler: &mut Scheduler,
        limits: &Limits,
    ) -> Result<bool, KernelError> {
        let Some(page) = scheduler.pool.allocate() else { return Ok(true) };
        let token = PROBE.min(limits.vocab_size.saturating_sub(1) as u32);
        let spans = [Span { rows: 0..1, context: 1, block_table: &[page.0], adapter: None }];
        let batch = StepBatch { tokens: &[token], spans: &spans, sampled: &[0], ..Default::default() };
        let finite = if limits.headless {
            self.states.clear();
            let ran = forward.states(&batch, None, &mut self.states, false).map(drop);
            ran.map(|()| self.states.iter().all(|value| value.is_finite()))
        } else {
            forward.forward(&batch, None).map(|row| logits::max(row).is_some())
        };
        scheduler.pool.release(page);
        finite
    }
}

impl Inputs {
    /// Replaces the rows by those of a plan. Returns the span of each run, and the rows that are drawn from.
    fn gather<'s>(&mut self, plan: &Plan, scheduler: &'s Scheduler, limits: &Limits) -> (Vec<Span<'s>>, Vec<DrawnRow>) {
        let Self { tokens, types, sampled, pools, picks } = self;
        tokens.clear();
        types.clear();
        sampled.clear();
        pools.clear();
        picks.clear();
        let mut spans = Vec::with_capacity(plan.runs.len());
        let mut asked = Vec::new();
        for run in &plan.runs {
            let sequence = &scheduler.sequences[&run.order];
            let (begin, context) = (tokens.len(), sequence.computed + run.rows);
            sequence.append_inputs(run.rows - run.drafts, tokens);
            tokens.extend_from_slice(&sequence.drafts[..run.drafts]);
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
            asked.extend((0..own).map(|n| DrawnRow {
                order: run.order,
                at: context - run.samples + n,
                row: first + n,
            }));
        }
        (spans, asked)
    }
}

/// Returns true if a row's logits are of no use to any request.
pub(super) fn not_finite((_, drawn): &Sampled) -> bool {
    matches!(drawn, Err(Trouble::Logits(BadLogits::NotFinite)))
}

/// Takes the places of those sequences out whose next token needs a mask. The tokens before it are known already, so
/// the mask does not wait for the logits.
fn take_unmasked(plan: &Plan, scheduler: &mut Scheduler) -> Vec<Masked> {
    let mut masked = Vec::new();
    for run in plan.runs.iter().filter(|run| run.samples > 0) {
        let sequence = scheduler.sequence(run.order);
        let draws =
            sequence.wanted() == run.rows - run.drafts && (sequence.request.is_silent || sequence.finish().is_none());
        let needs = draws && sequence.is_masked();
        masked.extend(sequence.guided.take_if(|_| needs).map(|guided| (run.order, guided, None)));
    }
    masked
}

/// Computes masks, and notes how long each took.
fn mask(masked: &mut [Masked]) {
    masked.iter_mut().for_each(|(_, guided, elapsed)| *elapsed = guided.mask());
}
