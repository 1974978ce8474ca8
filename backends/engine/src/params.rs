//! Sampling parameters of a request, checked once, after which every value is in range.

use crate::limits::{Limits, Refusal, check, tokens_exist};
use penstock_proto::frames::{BadWord, LogitBias, Sampling};

/// Most entries of `logit_bias` in a request; more are refused.
const LOGIT_BIAS_MAX: usize = 4096;
/// Most stop tokens in a request; more are refused.
const STOP_TOKENS_MAX: usize = 1024;
/// Most bad words, and most tokens of one.
pub(crate) const BAD_WORDS_MAX: usize = 1024;
const BAD_WORD_TOKENS_MAX: usize = 8192;
/// Most tokens whose log-probabilities are asked for by id.
pub(crate) const LOGPROB_TOKENS_MAX: usize = 128;

/// Sampling parameters in range. See [`Sampling`] for their meaning.
#[derive(Clone, Debug)]
pub struct Params {
    /// Divisor of the logits before the draw; 0 is greedy.
    pub temperature: f32,
    /// Number of most probable tokens to draw from; 0 keeps all.
    pub top_k: u32,
    /// Nucleus probability (top-p): mass of the most probable tokens that are kept; 1 keeps all.
    pub top_p: f32,
    /// Least probability of a kept token relative to the best one's (min-p); 0 keeps all.
    pub min_p: f32,
    /// Presence penalty, subtracted once from tokens that occur in the output; 0 is off.
    pub presence_penalty: f32,
    /// Frequency penalty, subtracted per occurrence of a token in the output; 0 is off.
    pub frequency_penalty: f32,
    /// Repetition penalty, which divides positive and multiplies negative logits of earlier tokens; 1 is off.
    pub repetition_penalty: f32,
    /// Values added to single logits, as (token, bias).
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the counter-based random numbers of all choices.
    pub seed: u64,
    /// Most output tokens of a choice, over all attempts.
    pub max_tokens: usize,
    /// Least output tokens: stop tokens are masked before.
    pub min_tokens: usize,
    /// Token ids that end a choice and count as output.
    pub stop_tokens: Vec<u32>,
    /// Number of best tokens reported beside the emitted one; `None` is off.
    pub logprobs: Option<usize>,
    /// Number of best tokens reported for each prompt token; `None` is off.
    pub prompt_logprobs: Option<usize>,
    /// Tokens that may be drawn; empty allows all.
    pub allowed_tokens: Vec<u32>,
    /// Forbidden token sequences, none of them empty.
    pub bad_words: Vec<Vec<u32>>,
    /// Tokens whose log-probabilities are reported for each generated token instead of the best; empty reports the
    /// best.
    pub logprob_tokens: Vec<u32>,
}

impl Params {
    /// Checks the parameters of a request, which must have some.
    pub(crate) fn parse(sampling: Option<&Sampling>, limits: &Limits) -> Result<Self, Refusal> {
        let Some(s) = sampling else { return Err(check(false, || "sampling is missing".to_owned()).unwrap_err()) };
        ranges(s)?;
        let count = |field: &str, value: i32| match usize::try_from(value) {
            Err(_) => check(value == -1, || format!("{field} is {value}")).map(|()| None),
            Ok(k) => check(k <= limits.logprobs_max, || format!("{field} is {k}, limit {}", limits.logprobs_max))
                .map(|()| Some(k.min(limits.vocab_size))),
        };
        let lengths = [
            ("logit_bias", s.logit_bias.len(), LOGIT_BIAS_MAX),
            ("stop_tokens", s.stop_tokens.len(), STOP_TOKENS_MAX),
            ("allowed_tokens", s.allowed_tokens.len(), limits.vocab_size),
            ("bad_words", s.bad_words.len(), BAD_WORDS_MAX),
            ("logprob_tokens", s.logprob_tokens.len(), LOGPROB_TOKENS_MAX),
        ];
        for (field, len, max) in lengths {
            check(len <= max, || format!("{field} has {len} entries, limit {max}"))?;
        }
        tokens_exist("stop_tokens", &s.stop_tokens, limits)?;
        tokens_exist("allowed_tokens", &s.allowed_tokens, limits)?;
        tokens_exist("logprob_tokens", &s.logprob_tokens, limits)?;
        for BadWord { tokens } in &s.bad_words {
            check((1..=BAD_WORD_TOKENS_MAX).contains(&tokens.len()), || {
                format!("bad_words: {} tokens, limit 1 to {BAD_WORD_TOKENS_MAX}", tokens.len())
            })?;
            tokens_exist("bad_words", tokens, limits)?;
        }
        let biased: Vec<u32> = s.logit_bias.iter().map(|entry| entry.token).collect();
        tokens_exist("logit_bias", &biased, limits)?;
        let only_stops =
            !s.allowed_tokens.is_empty() && s.allowed_tokens.iter().all(|token| s.stop_tokens.contains(token));
        check(s.min_tokens == 0 || !only_stops, || "min_tokens masks every allowed token".to_owned())?;
        Ok(Self {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            presence_penalty: s.presence_penalty,
            frequency_penalty: s.frequency_penalty,
            repetition_penalty: s.repetition_penalty,
            logit_bias: s.logit_bias.iter().map(|LogitBias { token, bias }| (*token, *bias)).collect(),
            seed: s.seed,
            max_tokens: s.max_tokens as usize,
            min_tokens: s.min_tokens as usize,
            stop_tokens: s.stop_tokens.clone(),
            logprobs: count("logprobs", s.logprobs)?,
            prompt_logprobs: count("prompt_logprobs", s.prompt_logprobs)?,
            allowed_tokens: s.allowed_tokens.clone(),
            bad_words: s.bad_words.iter().map(|word| word.tokens.clone()).collect(),
            logprob_tokens: s.logprob_tokens.clone(),
        })
    }

    /// Parameters of a prompt that is only computed.
    pub(crate) fn silent() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: 0,
            max_tokens: 0,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            allowed_tokens: Vec::new(),
            bad_words: Vec::new(),
            logprob_tokens: Vec::new(),
        }
    }

    /// Returns true if the request itself does not exclude the token after `output`.
    pub(crate) fn permits(&self, token: u32, output: &[u32]) -> bool {
        let is_bad = |word: &Vec<u32>| matches!(word.split_last(), Some((last, before)) if *last == token && output.ends_with(before));
        let is_early = output.len() < self.min_tokens && self.stop_tokens.contains(&token);
        let is_listed = self.allowed_tokens.is_empty() || self.allowed_tokens.contains(&token);
        is_listed && !is_early && !self.bad_words.iter().any(is_bad)
    }

    /// Returns true if a penalty that depends on earlier tokens is on.
    pub fn penalized(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }
}

/// Checks the ranges: wider than the public APIs allow, narrow enough that no logit overflows.
fn ranges(s: &Sampling) -> Result<(), Refusal> {
    let ranges = [
        ("temperature", s.temperature, 0.0, 100.0),
        ("top_p", s.top_p, 0.0, 1.0),
        ("min_p", s.min_p, 0.0, 1.0),
        ("presence_penalty", s.presence_penalty, -100.0, 100.0),
        ("frequency_penalty", s.frequency_penalty, -100.0, 100.0),
        ("repetition_penalty", s.repetition_penalty, 0.01, 100.0),
    ];
    for (field, value, low, high) in ranges {
        check((low..=high).contains(&value), || format!("{field} is {value}, range {low} to {high}"))?;
    }
    for LogitBias { token, bias } in &s.logit_bias {
        check((-10_000.0..=10_000.0).contains(bias), || format!("logit_bias of token {token} is {bias}"))?;
    }
    Ok(())
}
