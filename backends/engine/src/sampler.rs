//! Sampling of a token from logits.
//!
//! Order: logit_bias → allowed tokens, grammar, bad words, min_tokens → repetition, frequency, presence penalty → temperature → top_k → top_p →
//! min_p, as in vLLM and Hugging Face transformers. Temperature 0 takes the best token, the lowest id among equals. Ties at
//! the edge of top_k and top_p also fall to the lowest ids, so the set is always the same. Log-probabilities are raw: of the
//! logits as the model gave them.
//!
//! The token is a pure function of (logits, parameters, history, [`Draw`]). Cost: a few passes over the row
//! (`logits.rs`), one with exponentials unless greedy; filters look at the best few (`filter.rs`); one copy of
//! the row when biases, masks or penalties are on.

use crate::filter::Filter;
use crate::guide::Allowed;
use crate::logits::{self, Candidate};
use crate::params::Params;
use crate::random::Draw;
use penstock_kernels::Pick;
use penstock_kernels::sampling::draw_from_all;
use penstock_proto::frames::TokenLogprobs;
use std::collections::{HashMap, HashSet};

/// Temperatures below this are greedy (as in vLLM).
const TEMPERATURE_MIN: f32 = 1e-5;

/// Reason why no token can be drawn from a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadLogits {
    /// The model's logits have a NaN or +∞, or nothing above −∞.
    #[error("the model's logits are not finite")]
    NotFinite,
    /// No token is left after the request's biases, masks and penalties.
    #[error(
        "no token is left: logit_bias, penalties, bad words and allowed tokens exclude all of them (with the grammar, if there is one), or overflow"
    )]
    NothingLeft,
}

/// Earlier tokens of a choice, as far as sampling depends on them.
#[derive(Clone, Copy, Debug)]
pub struct History<'a> {
    /// Distinct tokens of the prompt; only read when the repetition penalty is on.
    pub prompt: &'a HashSet<u32>,
    /// Occurrences of each token in the output; only read when a penalty is on.
    pub counts: &'a HashMap<u32, u32>,
    /// Number of output tokens so far, over all attempts.
    pub output_tokens: usize,
    /// Output tokens; only read when words are forbidden.
    pub output: &'a [u32],
    /// Tokens that the grammar allows next; `None` allows all.
    pub allowed: Option<Allowed<'a>>,
}

/// Sampler of next tokens from rows of logits, with buffers reused across calls.
#[derive(Debug, Default)]
pub struct Sampler {
    edited: Vec<f32>,
    candidates: Vec<Candidate>,
    filter: Filter,
    chunks: Vec<f64>,
}

impl Sampler {
    /// Draws the next token.
    ///
    /// # Errors
    /// [`BadLogits`] when the row is not usable; other rows are unaffected.
    pub fn sample(&mut self, row: &[f32], params: &Params, history: History<'_>, draw: Draw) -> Result<u32, BadLogits> {
        let raw_max = logits::max(row).ok_or(BadLogits::NotFinite)?;
        let (values, max) = if needs_edit(params, history) {
            self.edit(row, params, history);
            (self.edited.as_slice(), logits::max(&self.edited).ok_or(BadLogits::NothingLeft)?)
        } else {
            (row, raw_max)
        };
        if params.temperature < TEMPERATURE_MIN {
            return Ok(logits::position(values, max));
        }
        let scale = 1.0 / params.temperature;
        if !filtered(params) {
            return Ok(draw_from_all(values, max, scale, draw.uniform(), &mut self.chunks));
        }
        let (candidates, weights) = self.filter.select(values, max, scale, params);
        Ok(draw_from(candidates, weights, draw.uniform()))
    }

    /// Way to the next token that gives what [`Self::sample`] would: a device may find the token unless the row is edited or filtered
    /// before. `draw`: random numbers of the token, if there is one token alone to draw. A row behind this one, for a draft, has the
    /// same way with its own `draw`, as long as there is no grammar.
    pub(crate) fn pick(params: &Params, history: History<'_>, draw: Option<Draw>) -> Pick {
        match draw {
            _ if needs_edit(params, history) => Pick::Host,
            // Of one candidate, there is nothing to draw.
            _ if params.temperature < TEMPERATURE_MIN || params.top_k == 1 => Pick::Best,
            Some(draw) if !filtered(params) => Pick::Draw { scale: 1.0 / params.temperature, uniform: draw.uniform() },
            _ => Pick::Host,
        }
    }

    /// Raw log-probability and rank of `token`, with the log-probabilities of the tokens `named`, in their order, or
    /// of the best `k` where none is named.
    ///
    /// # Errors
    /// [`BadLogits`] as for [`Self::sample`].
    pub fn logprobs(&mut self, row: &[f32], token: u32, k: usize, named: &[u32]) -> Result<TokenLogprobs, BadLogits> {
        let max = logits::max(row).ok_or(BadLogits::NotFinite)?;
        let log_sum = logits::sum_exp(row, max, 1.0).ln();
        let logprob = |value: f32| ((f64::from(value) - f64::from(max)) - log_sum) as f32;
        let own = row[token as usize];
        let (before, after) = row.split_at(token as usize);
        let rank = 1
            + before.iter().filter(|value| **value >= own).count()
            + after.iter().filter(|value| **value > own).count();
        if named.is_empty() {
            logits::top(row, k, &mut self.candidates);
        } else {
            // A token excluded by the model has no finite log-probability and is left out, as among the best.
            let values = named.iter().map(|token| (row[*token as usize], *token));
            self.candidates.clear();
            self.candidates.extend(values.filter(|(value, _)| *value > f32::NEG_INFINITY));
        }
        Ok(TokenLogprobs {
            logprob: logprob(own),
            top_tokens: self.candidates.iter().map(|(_, token)| *token).collect(),
            top_logprobs: self.candidates.iter().map(|(value, _)| logprob(*value)).collect(),
            rank: rank as u32,
        })
    }

    /// Copies the row with biases, masks and penalties applied.
    fn edit(&mut self, row: &[f32], params: &Params, history: History<'_>) {
        let values = &mut self.edited;
        values.clear();
        values.extend_from_slice(row);
        for (token, bias) in &params.logit_bias {
            values[*token as usize] += bias;
        }
        if !params.allowed_tokens.is_empty() {
            self.candidates.clear();
            self.candidates.extend(params.allowed_tokens.iter().map(|token| (values[*token as usize], *token)));
            values.fill(f32::NEG_INFINITY);
            self.candidates.iter().for_each(|(value, token)| values[*token as usize] = *value);
        }
        if let Some(allowed) = history.allowed {
            self.candidates.clear();
            self.candidates.extend(allowed.ends.iter().map(|token| (values[*token as usize], *token)));
            keep(values, allowed.bits);
            self.candidates.iter().for_each(|(value, token)| values[*token as usize] = *value);
        }
        for word in &params.bad_words {
            if let Some((last, before)) = word.split_last()
                && history.output.ends_with(before)
            {
                values[*last as usize] = f32::NEG_INFINITY;
            }
        }
        if history.output_tokens < params.min_tokens {
            params.stop_tokens.iter().for_each(|token| values[*token as usize] = f32::NEG_INFINITY);
        }
        if params.repetition_penalty != 1.0 {
            let output = history.counts.keys().filter(|token| !history.prompt.contains(token));
            for token in history.prompt.iter().chain(output) {
                let value = &mut values[*token as usize];
                *value =
                    if *value > 0.0 { *value / params.repetition_penalty } else { *value * params.repetition_penalty };
            }
        }
        if params.frequency_penalty != 0.0 || params.presence_penalty != 0.0 {
            for (token, count) in history.counts {
                values[*token as usize] -= params.frequency_penalty * *count as f32 + params.presence_penalty;
            }
        }
    }
}

fn filtered(params: &Params) -> bool {
    params.top_k > 0 || params.top_p < 1.0 || params.min_p > 0.0
}

fn needs_edit(params: &Params, history: History<'_>) -> bool {
    !params.logit_bias.is_empty()
        || !params.allowed_tokens.is_empty()
        || !params.bad_words.is_empty()
        || (history.output_tokens < params.min_tokens && !params.stop_tokens.is_empty())
        || params.penalized()
        || history.allowed.is_some()
}

/// Excludes the tokens whose bit is not set; those beyond the last word are excluded too.
fn keep(values: &mut [f32], bits: &[u32]) {
    for (number, values) in values.chunks_mut(32).enumerate() {
        match bits.get(number).copied().unwrap_or(0) {
            0 => values.fill(f32::NEG_INFINITY),
            u32::MAX => {}
            word => {
                for (bit, value) in values.iter_mut().enumerate() {
                    *value = if word >> bit & 1 == 1 { *value } else { f32::NEG_INFINITY };
                }
            }
        }
    }
}

/// Draws from the cumulative weights, in order of `candidates`.
fn draw_from(candidates: &[Candidate], weights: &[f32], uniform: f64) -> u32 {
    let total: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
    let mut left = uniform * total;
    let mut last = 0;
    for (n, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
        last = n;
        left -= f64::from(*weight);
        if left < 0.0 {
            break;
        }
    }
    candidates[last].1
}
