//! Measuring of an engine's throughput with synthetic prompts: the whole engine (scheduler, forward, sampler), greedy, nothing read from the prefix cache.

use crate::adapter::Adapter;
use crate::config::EngineConfig;
use crate::engine::{Clock, Engine};
use crate::forward::Forward;
use penstock_kernels::KernelError;
use penstock_proto::AdapterId;
use penstock_proto::frames::{ChoiceStart, FinishReason, Generate, Sampling, Step};
use std::time::Duration;

/// Prefill runs of one length whose median is the result.
const RUNS: usize = 3;
/// Decode steps whose median is the result.
const STEPS: usize = 32;
/// Least number of decode steps.
const STEPS_MIN: usize = 3;
/// Time after which no further run or step is measured.
const ENOUGH: Duration = Duration::from_secs(10);

/// An engine that is measured, and the clock of the measurement.
pub struct Measure<'a> {
    engine: Engine,
    clock: &'a dyn Clock,
    batch_tokens: usize,
    vocab_size: usize,
    requests: u64,
    /// Adapters that requests have in turn.
    adapters: Vec<AdapterId>,
}

impl<'a> Measure<'a> {
    /// Creates an engine over `forward` for steps of at most `batch_tokens` tokens and `sequences_max` sequences.
    pub fn new(forward: Box<dyn Forward>, batch_tokens: usize, sequences_max: usize, clock: &'a dyn Clock) -> Self {
        let vocab_size = forward.geometry().vocab_size;
        let config = EngineConfig {
            sequences_max,
            batch_tokens,
            chunk_tokens: batch_tokens,
            waiting_max: sequences_max.max(EngineConfig::default().waiting_max),
            prefix_cache: false,
            // Prefill is not throttled: the measured steps contain decode only.
            prefill_seconds_max: 0.0,
            ..EngineConfig::default()
        };
        Self {
            engine: Engine::new(forward, &config),
            clock,
            batch_tokens,
            vocab_size,
            requests: 0,
            adapters: Vec::new(),
        }
    }

    /// Loads adapters, so that [`Measure::take_turns`] can be told to use them.
    ///
    /// # Errors
    /// As [`Engine::add_adapter`].
    pub fn add_adapters(&mut self, adapters: &[Adapter]) -> Result<(), KernelError> {
        adapters.iter().try_for_each(|adapter| self.engine.add_adapter(adapter))
    }

    /// Gives later requests the first `count` loaded adapters in turn; 0 gives them none.
    pub fn take_turns(&mut self, count: usize) {
        self.adapters = self.engine.adapters().iter().take(count).copied().collect();
    }

    /// KV pages that [`Measure::prefill`] of `prompts` and [`Measure::decode`] of `batches` at `context` tokens need, in steps of at most
    /// `batch_tokens` tokens.
    pub fn pages(prompts: &[usize], batches: &[usize], context: usize, batch_tokens: usize) -> usize {
        let pages = |tokens: usize| tokens.div_ceil(penstock_kernels::PAGE_TOKENS) + 1;
        let longest = prompts.iter().map(|&tokens| pages(tokens)).max().unwrap_or(0);
        let whole = |sequences| context + output(sequences, context, batch_tokens);
        let widest = batches.iter().map(|&sequences| sequences * pages(whole(sequences))).max();
        longest.max(widest.unwrap_or(0)).max(1)
    }

    /// Prefill of one prompt of `tokens` tokens: median time in seconds.
    ///
    /// # Errors
    /// The message of the engine if it cannot serve such a prompt.
    pub fn prefill(&mut self, tokens: usize) -> Result<f64, String> {
        let (started, mut seconds) = (self.clock.now(), Vec::new());
        while seconds.is_empty() || seconds.len() < RUNS && self.clock.now().saturating_sub(started) < ENOUGH {
            self.submit(tokens, 1);
            seconds.push(self.finish()?);
        }
        Ok(median(seconds))
    }

    /// Decode of `sequences` sequences in one batch, each behind `context` tokens: median time of a step in seconds.
    ///
    /// # Errors
    /// The message of the engine if it cannot run so many sequences of this length together.
    pub fn decode(&mut self, sequences: usize, context: usize) -> Result<f64, String> {
        let output = output(sequences, context, self.batch_tokens) as u32;
        (0..sequences).for_each(|_| self.submit(context, output));
        let (mut measured, mut seconds) = (Duration::ZERO, Vec::new());
        while seconds.len() < STEPS && (seconds.len() < STEPS_MIN || measured < ENOUGH) {
            if self.engine.is_empty() {
                return Err(format!("{sequences} sequences of {context} tokens do not fit into one step"));
            }
            let (step, time) = self.step()?;
            // Earlier steps still contain prefill.
            if step.outputs.len() == sequences && step.outputs.iter().all(|output| output.at > 0) {
                seconds.push(time);
                measured += Duration::from_secs_f64(time);
            }
        }
        self.abandon();
        Ok(median(seconds))
    }

    /// Opens a request of `prompt` synthetic tokens; nothing stops it before `output` tokens.
    fn submit(&mut self, prompt: usize, output: u32) {
        self.requests += 1;
        let half = (self.vocab_size as u64 / 2).max(1);
        let turn = self.requests as usize % self.adapters.len().max(1);
        let adapter = self.adapters.get(turn).map(|id| id.to_bytes().to_vec()).unwrap_or_default();
        let mix = |at: usize| (at as u64 * 2_654_435_761 + self.requests * 97_531) % half;
        self.engine.submit(Generate {
            request: self.requests,
            prompt: (0..prompt).map(|at| mix(at) as u32).collect(),
            choices: vec![ChoiceStart { index: 0, emitted: Vec::new() }],
            sampling: Some(Sampling {
                top_p: 1.0,
                repetition_penalty: 1.0,
                max_tokens: output,
                logprobs: -1,
                prompt_logprobs: -1,
                ..Sampling::default()
            }),
            salt: adapter.clone(),
            adapter,
            ..Generate::default()
        });
    }

    /// Runs one step; returns its result and the seconds it took.
    fn step(&mut self) -> Result<(Step, f64), String> {
        let begun = self.clock.now();
        let step = self.engine.step(self.clock);
        let seconds = self.clock.now().saturating_sub(begun).as_secs_f64();
        let failed = |finish: &&penstock_proto::frames::Finish| finish.reason == FinishReason::Failed as i32;
        match step.outputs.iter().filter_map(|output| output.finish.as_ref()).find(failed) {
            Some(finish) => Err(finish.message.clone()),
            None => Ok((step, seconds)),
        }
    }

    /// Steps until no sequence is left; returns the seconds.
    fn finish(&mut self) -> Result<f64, String> {
        let mut seconds = 0.0;
        while !self.engine.is_empty() {
            seconds += self.step()?.1;
        }
        Ok(seconds)
    }

    /// Cancels all requests.
    fn abandon(&mut self) {
        for request in 1..=self.requests {
            self.engine.cancel(&penstock_proto::frames::Cancel { request, ..Default::default() });
        }
        while self.engine.has_work() {
            self.engine.step(self.clock);
        }
    }
}

/// Tokens that each of `sequences` may write. Early ones decode while late ones are still in prefill, so there are more than the measured steps:
/// at most one for each step of prefill, to which decoding sequences leave the remainder of `batch_tokens`.
fn output(sequences: usize, context: usize, batch_tokens: usize) -> usize {
    let chunk = batch_tokens.saturating_sub(sequences).max(256);
    STEPS + 64 + sequences * context.max(1) / chunk
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
