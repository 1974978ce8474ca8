//! Estimates of a request's use before it is sent: a low percentile of bytes per token and a high one of output, learned per model.
//!
//! A reservation must seldom be too small. A token of text never stands for less than a byte, so the estimate begins at
//! one token per byte and loosens as answers come in. A percentile is tracked by steps: a small one up for a value
//! above it, a large one down for a value below, in the ratio that balances at the wanted share. Old values fade, so
//! the estimate follows a change in the model's use.

use serde::{Deserialize, Serialize};

/// Share of requests that may need more than the estimate.
const MISSED: f64 = 0.02;
/// First and last step size, as a fraction of the value.
const STEP: (f64, f64) = (0.5, 0.05);
/// Bounds of bytes per token: an image by URL needs thousands of tokens for a few bytes, a long run of spaces the reverse.
const BYTES_PER_TOKEN: (f64, f64) = (0.02, 12.0);
/// Output tokens assumed for a request without a bound, before any answer.
const OUTPUT_TOKENS: f64 = 1024.0;
/// Bounds of the output estimate, in tokens.
const OUTPUT: (f64, f64) = (1.0, 1_000_000.0);

/// Online estimate of one percentile of positive numbers, in constant memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Quantile {
    value: f64,
    /// Share of values below the percentile.
    share: f64,
    step: f64,
}

impl Quantile {
    fn new(value: f64, share: f64) -> Self {
        Self { value, share, step: STEP.0 }
    }

    fn see(&mut self, seen: f64, bounds: (f64, f64)) {
        let part = if seen > self.value { self.share } else { self.share - 1.0 };
        self.value = (self.value * (1.0 + self.step * part)).clamp(bounds.0, bounds.1);
        self.step = (self.step * 0.995).max(STEP.1);
    }
}

/// Statistics learned of one model's requests: bytes per prompt token, and output tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Learned {
    bytes_per_token: Quantile,
    output: Quantile,
    /// Mean bytes per token, for prompts without a count from the upstream.
    mean: f64,
}

impl Default for Learned {
    fn default() -> Self {
        Self {
            bytes_per_token: Quantile::new(1.0, MISSED),
            output: Quantile::new(OUTPUT_TOKENS, 1.0 - MISSED),
            mean: 4.0,
        }
    }
}

impl Learned {
    /// Prompt tokens that a body of this size seldom exceeds.
    pub fn prompt_tokens(&self, body_bytes: u64) -> u64 {
        (body_bytes as f64 / self.bytes_per_token.value).ceil() as u64
    }

    /// Mean prompt tokens of a body of this size.
    pub fn prompt_tokens_mean(&self, body_bytes: u64) -> u64 {
        (body_bytes as f64 / self.mean).ceil() as u64
    }

    /// Output tokens that a request without a bound seldom exceeds.
    pub fn output_tokens(&self) -> u64 {
        self.output.value.ceil() as u64
    }

    /// Learns from an answer with usage reported by the upstream.
    pub fn see(&mut self, body_bytes: u64, prompt_tokens: u64, output_tokens: u64) {
        if prompt_tokens > 0 {
            let seen = (body_bytes as f64 / prompt_tokens as f64).clamp(BYTES_PER_TOKEN.0, BYTES_PER_TOKEN.1);
            self.bytes_per_token.see(seen, BYTES_PER_TOKEN);
            self.mean += (seen - self.mean) / 50.0;
        }
        if output_tokens > 0 {
            self.output.see(output_tokens as f64, OUTPUT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Low-discrepancy numbers from 0 to 1 (Weyl sequence).
    fn draws(count: u32) -> impl Iterator<Item = f64> {
        (1..=count).map(|number| (f64::from(number) * 0.618_033_988_749_895).fract())
    }

    #[test]
    fn it_begins_with_a_token_per_byte_and_loosens() {
        let mut learned = Learned::default();
        assert_eq!(learned.prompt_tokens(1000), 1000);
        let mut missed = 0;
        for (at, draw) in draws(4000).enumerate() {
            let tokens = 1000.0 / (3.0 + 2.0 * draw);
            missed += u32::from(at >= 1000 && (learned.prompt_tokens(1000) as f64) < tokens);
            learned.see(1000, tokens as u64, 1);
        }
        assert!(missed < 150, "{missed} of 3000 needed more than was guessed");
        let guess = learned.prompt_tokens(1000);
        assert!((280..=400).contains(&guess), "{guess}: what the dearest need");
    }

    #[test]
    fn what_needs_many_tokens_for_few_bytes_tightens_it_quickly() {
        let mut learned = Learned::default();
        draws(2000).for_each(|draw| learned.see(1000, 250 + (draw * 10.0) as u64, 1));
        (0..200).for_each(|_| learned.see(1000, 2000, 1));
        assert!(learned.prompt_tokens(1000) >= 1800, "{}", learned.prompt_tokens(1000));
    }

    #[test]
    fn output_is_guessed_high() {
        let mut learned = Learned::default();
        draws(4000).for_each(|draw| learned.see(1000, 250, (draw * 200.0) as u64 + 1));
        assert!((180..=260).contains(&learned.output_tokens()), "{}", learned.output_tokens());
    }
}
