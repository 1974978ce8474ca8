//! A request in the engine's form: parsed and checked once, after which every value is in range.
//!
//! Bounds come before work: every list and number is checked against [`Limits`] here, so that no content of a request can
//! make a later step panic, allocate without bound or wait for ever.

use crate::forward::EncoderGeometry;
use crate::guide::{BEGINS_AFTER_MAX, Rule};
use crate::limits::{Limits, Refusal, check, tokens_exist};
use crate::params::Params;
use crate::reasoning::{self, CLOSING_MAX, MARK_BYTES_MAX};
use penstock_kernels::{AdapterSlot, Pool, PoolRule};
use penstock_proto::frames::{ChoiceStart, Generate, Guide, Pooling, Sampling};
use penstock_proto::{AdapterId, BLOCK_TOKENS, BlockHash, BlockHasher, ErrorKind, WorkId};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// Longest salt of a request's block hashes, in bytes; a longer one is refused.
const SALT_BYTES_MAX: usize = 4096;

/// Draw of the next token for choices whose tokens are the same so far.
#[derive(Clone, Debug, Default)]
pub struct Drawing {
    /// Sampling parameters of the draw.
    pub sampling: Sampling,
    /// Choices to draw for, which differ in their random numbers.
    pub choices: Vec<u32>,
    /// Tokens at the end of the prompt that are output of earlier attempts.
    pub emitted: usize,
    /// Grammar of the output; `None` leaves it free.
    pub grammar: Option<Guide>,
}

/// Part of a request that an engine computes for another: full blocks of its prompt, and the token after it.
#[derive(Clone, Debug, Default)]
pub struct Prefill {
    /// Number of the work, from the same range as requests and different from any open one.
    pub id: WorkId,
    /// Prompt from its first token on. Without [`Self::draw`], tokens after the blocks are not looked at.
    pub prompt: Vec<u32>,
    /// Salt of the request's block hashes: equal prompts share blocks only within one salt.
    pub salt: Vec<u8>,
    /// Adapter that the model runs with; see [`penstock_proto::frames::Generate::adapter`].
    pub adapter: Vec<u8>,
    /// Priority within the engine; a lower number runs first, 0 is normal.
    pub priority: i32,
    /// Fair-share turn within one priority; see [`penstock_proto::frames::Generate::turn`].
    pub turn: i64,
    /// First wanted block; the asker has those before it.
    pub first: usize,
    /// Number of wanted blocks, from `first` on.
    pub blocks: usize,
    /// Draw of the token after the prompt; `None` if the asker draws it.
    pub draw: Option<Drawing>,
}

/// Rule of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pooled {
    pub(crate) rule: Pooling,
    /// Index of the first token of the second text; 0: there is no second text.
    pub(crate) second_text: usize,
    /// Index of the first token that is pooled; no rule of the last token looks at it.
    pub(crate) from: usize,
}

impl Pooled {
    /// Row that is sampled of a text's rows.
    pub(crate) fn row(&self, rows: &Range<usize>) -> usize {
        match self.rule {
            Pooling::First => rows.start + self.from,
            Pooling::Head => rows.start,
            Pooling::None | Pooling::Last => rows.end - 1,
            Pooling::Mean | Pooling::RootMean | Pooling::WeightedMean | Pooling::Max => rows.end - 1,
        }
    }

    /// Pooling of the text's rows, for the vector or for the input of a head.
    pub(crate) fn pool(&self, encoder: Option<EncoderGeometry>) -> Pool {
        let of_span = |rule| Pool::Span { rule, skipped: self.from };
        match self.rule {
            Pooling::Mean => of_span(PoolRule::Mean),
            Pooling::RootMean => of_span(PoolRule::RootMean),
            Pooling::WeightedMean => of_span(PoolRule::WeightedMean),
            Pooling::Max => of_span(PoolRule::Max),
            Pooling::Head if encoder.is_some_and(|encoder| encoder.head_of_mean) => Pool::MEAN,
            Pooling::Head | Pooling::None | Pooling::First | Pooling::Last => Pool::Row,
        }
    }

    /// Types of the first `count` tokens.
    pub(crate) fn types(&self, count: usize) -> impl Iterator<Item = u32> + use<> {
        let begin = self.second_text;
        (0..count).map(move |token| u32::from(begin > 0 && token >= begin))
    }
}

/// Parts that the choices of one request share.
pub(crate) struct Request {
    pub(crate) id: WorkId,
    pub(crate) attempt: u32,
    pub(crate) prompt: Vec<u32>,
    /// Distinct prompt tokens; empty unless the repetition penalty is on.
    pub(crate) prompt_set: HashSet<u32>,
    /// Hashes of the full blocks of the prompt.
    pub(crate) prompt_hashes: Vec<BlockHash>,
    pub(crate) hasher: BlockHasher,
    /// Adapter that the rows of the request's sequences are computed with.
    pub(crate) adapter: Option<AdapterSlot>,
    pub(crate) params: Params,
    /// Most tokens of a sequence, prompt and output, by max_tokens and context.
    pub(crate) tokens_max: usize,
    /// True if the request is computed for another worker and has no output of its own.
    pub(crate) is_silent: bool,
    /// Rule of the vector that is the output, in the place of tokens.
    pub(crate) pooled: Option<Pooled>,
    /// Choices whose next token is drawn for that worker.
    pub(crate) draws: Vec<u32>,
    /// Grammar of the output.
    pub(crate) rule: Option<Rule>,
    /// Budget of the output's reasoning.
    pub(crate) reasoning: Option<reasoning::Rule>,
}

impl Request {
    /// Parses `generate`; returns its choices unchanged, checked to be in range.
    pub(crate) fn parse(generate: Generate, limits: &Limits) -> Result<(Self, Vec<ChoiceStart>), Refusal> {
        if let Some(pooled) = pooling(&generate, limits)? {
            return Self::pooled(generate, pooled, limits);
        }
        let params = Params::parse(generate.sampling.as_ref(), limits)?;
        prompt(&generate, &params, limits)?;
        choices(&generate, &params, limits)?;
        check(generate.salt.len() <= SALT_BYTES_MAX, || format!("salt has {} bytes", generate.salt.len()))?;
        let hasher = BlockHasher::for_request(&generate.salt, &limits.numerics);
        let adapter = adapter(&generate.adapter, &generate.salt, limits)?;
        let rule = rule(generate.grammar, &params, limits)?;
        let reasoning = reasoning(generate.sampling.as_ref(), limits)?;
        let prompt = generate.prompt;
        let request = Self {
            id: WorkId(generate.request),
            attempt: generate.attempt,
            prompt_set: prompt_set(&prompt, &params),
            prompt_hashes: hasher.chain(&prompt),
            hasher,
            adapter,
            tokens_max: prompt.len().saturating_add(params.max_tokens).min(limits.context_tokens),
            params,
            prompt,
            is_silent: false,
            pooled: None,
            draws: Vec::new(),
            rule,
            reasoning,
        };
        Ok((request, generate.choices))
    }

    /// Request for a vector of the prompt: no parameter of sampling means anything to it.
    fn pooled(generate: Generate, pooled: Pooled, limits: &Limits) -> Result<(Self, Vec<ChoiceStart>), Refusal> {
        let params = Params::silent();
        prompt(&generate, &params, limits)?;
        choices(&generate, &params, limits)?;
        check(generate.choices.len() == 1, || format!("a vector for {} choices", generate.choices.len()))?;
        check(generate.salt.len() <= SALT_BYTES_MAX, || format!("salt has {} bytes", generate.salt.len()))?;
        let hasher = BlockHasher::for_request(&generate.salt, &limits.numerics);
        let adapter = adapter(&generate.adapter, &generate.salt, limits)?;
        let request = Self {
            id: WorkId(generate.request),
            attempt: generate.attempt,
            prompt_set: HashSet::new(),
            prompt_hashes: hasher.chain(&generate.prompt),
            hasher,
            adapter,
            // No token follows, so no number of tokens ends it: its vector does.
            tokens_max: usize::MAX,
            params,
            prompt: generate.prompt,
            is_silent: false,
            pooled: Some(pooled),
            draws: Vec::new(),
            rule: None,
            reasoning: None,
        };
        Ok((request, generate.choices))
    }

    /// Makes the request for a prompt that runs elsewhere, of which this engine computes the full blocks `first..first
    /// + blocks`; also returns the start of its sequence.
    pub(crate) fn silent(prefill: Prefill, limits: &Limits) -> Result<(Self, ChoiceStart), Refusal> {
        let Prefill { id, mut prompt, salt, adapter: name, first, blocks, draw, .. } = prefill;
        check(salt.len() <= SALT_BYTES_MAX, || format!("salt has {} bytes", salt.len()))?;
        tokens_exist("prompt", &prompt, limits)?;
        let tokens = first.saturating_add(blocks).saturating_mul(BLOCK_TOKENS);
        check(blocks > 0 && tokens <= prompt.len(), || format!("{} tokens have no {tokens}", prompt.len()))?;
        let (mut params, mut start, mut draws) = (Params::silent(), ChoiceStart::default(), Vec::new());
        let (mut guide, mut budget) = (None, None);
        match draw {
            None => prompt.truncate(tokens),
            Some(draw) => {
                params = drawn_for_another(&draw, prompt.len(), limits)?;
                start.emitted = prompt.split_off(prompt.len() - draw.emitted);
                draws = draw.choices;
                budget = reasoning(Some(&draw.sampling), limits)?;
                guide = rule(draw.grammar, &params, limits)?;
            }
        }
        let (len, room) = (prompt.len() + start.emitted.len(), limits.context_tokens - usize::from(!draws.is_empty()));
        if len > room {
            let message = format!("the prompt has {len} tokens, the context is {}", limits.context_tokens);
            return Err(Refusal { kind: ErrorKind::ContextLength, message });
        }
        let hasher = BlockHasher::for_request(&salt, &limits.numerics);
        let adapter = adapter(&name, &salt, limits)?;
        let request = Self {
            id,
            attempt: 0,
            prompt_set: prompt_set(&prompt, &params),
            prompt_hashes: hasher.chain(&prompt),
            hasher,
            adapter,
            tokens_max: prompt.len().saturating_add(params.max_tokens).min(limits.context_tokens),
            params,
            prompt,
            is_silent: true,
            pooled: None,
            draws,
            rule: guide,
            reasoning: budget,
        };
        Ok((request, start))
    }

    /// Returns true if drafts of the output may be computed: there is output, and it is drawn for this engine's own request.
    pub(crate) fn takes_drafts(&self) -> bool {
        !self.is_silent && self.pooled.is_none()
    }

    /// Number of full blocks of the prompt.
    pub(crate) fn prompt_blocks(&self) -> usize {
        self.prompt.len() / BLOCK_TOKENS
    }
}

/// Rule of the vector that a request wants of its prompt; `None` if it wants tokens.
fn pooling(generate: &Generate, limits: &Limits) -> Result<Option<Pooled>, Refusal> {
    let unsupported = |message: &str| Err(Refusal { kind: ErrorKind::Unsupported, message: message.to_owned() });
    let rule = match (Pooling::try_from(generate.pooling), limits.encoder) {
        (Ok(Pooling::None), Some(_)) => {
            return unsupported("the model makes vectors or scores of whole texts, not text");
        }
        (Ok(Pooling::None), None) if limits.headless => {
            return unsupported("the checkpoint has no head (lm_head.weight): it makes vectors, not text");
        }
        (Ok(Pooling::None), None) => return Ok(None),
        (Ok(Pooling::Head), Some(EncoderGeometry { has_head: true, .. })) => Pooling::Head,
        (
            Ok(
                rule @ (Pooling::Last
                | Pooling::First
                | Pooling::Mean
                | Pooling::RootMean
                | Pooling::WeightedMean
                | Pooling::Max),
            ),
            Some(EncoderGeometry { has_head: false, .. }),
        ) => rule,
        (Ok(Pooling::Last), None) if limits.state_width > 0 => Pooling::Last,
        (Ok(Pooling::Last), None) => return unsupported("this worker makes no vectors"),
        (Ok(_), _) => return unsupported("the model does not support the requested pooling"),
        (Err(_), _) => return unsupported("this worker does not know the requested pooling"),
    };
    let (second_text, types) = (generate.second_text as usize, limits.encoder.map_or(1, |encoder| encoder.token_types));
    check(second_text == 0 || types > 1, || {
        "the model has one token type and cannot tell a second text apart".to_owned()
    })?;
    let tokens = generate.prompt.len();
    check(second_text == 0 || second_text < tokens, || {
        format!("the second text begins at {second_text}, and the prompt has {tokens} tokens")
    })?;
    let from = generate.pooled_from as usize;
    check(from == 0 || from < tokens, || format!("pooled from token {from}, and the prompt has {tokens} tokens"))?;
    let (asked, there) = (generate.dense_layers as usize, limits.dense_layers);
    if asked != there {
        let message = format!("{asked} dense layers are asked for behind the pooling, and the checkpoint has {there}");
        return Err(Refusal { kind: ErrorKind::Unsupported, message });
    }
    Ok(Some(Pooled { rule, second_text, from }))
}

/// Slot of the adapter with the name `name`, if one is asked for. Its bytes must be in the salt: a prompt's blocks under another adapter, or
/// under none, have other KV.
fn adapter(name: &[u8], salt: &[u8], limits: &Limits) -> Result<Option<AdapterSlot>, Refusal> {
    if name.is_empty() {
        return Ok(None);
    }
    let id = AdapterId::from_bytes(name);
    check(id.is_some(), || format!("adapter has {} bytes, needs 16", name.len()))?;
    check(salt.windows(name.len()).any(|part| part == name), || "the salt does not name the adapter".to_owned())?;
    match id.and_then(|id| limits.adapters.of(id)) {
        Some(slot) => Ok(Some(slot)),
        None => {
            let message = format!("adapter {:?} is not loaded on this worker", id.unwrap_or(AdapterId(0)));
            Err(Refusal { kind: ErrorKind::Unavailable, message })
        }
    }
}

/// Rule of a guide, if there is one.
fn rule(guide: Option<Guide>, params: &Params, limits: &Limits) -> Result<Option<Rule>, Refusal> {
    let Some(guide) = guide else { return Ok(None) };
    let opening = guide.begins_after.len();
    check(opening <= BEGINS_AFTER_MAX, || {
        format!("grammar: begins_after has {opening} tokens, limit {BEGINS_AFTER_MAX}")
    })?;
    tokens_exist("grammar: begins_after", &guide.begins_after, limits)?;
    Rule::new(guide, limits.grammars.as_deref(), &params.stop_tokens).map(Some)
}

/// Budget of the reasoning, if there is one.
fn reasoning(sampling: Option<&Sampling>, limits: &Limits) -> Result<Option<reasoning::Rule>, Refusal> {
    let Some(budget) = sampling.and_then(|sampling| sampling.reasoning.clone()) else { return Ok(None) };
    for mark in [&budget.opening, &budget.ending] {
        check(mark.len() <= MARK_BYTES_MAX, || format!("reasoning: a mark of {} bytes", mark.len()))?;
    }
    for run in [&budget.closing, &budget.closing_again] {
        check(run.len() <= CLOSING_MAX, || format!("reasoning: {} closing tokens, limit {CLOSING_MAX}", run.len()))?;
        tokens_exist("reasoning", run, limits)?;
    }
    check(!budget.ending.is_empty() && !budget.closing.is_empty(), || "reasoning: nothing closes it".to_owned())?;
    let Some(grammars) = &limits.grammars else {
        let message = "reasoning: this worker's model has no tokenizer file".to_owned();
        return Err(Refusal { kind: ErrorKind::Unsupported, message });
    };
    Ok(Some(reasoning::Rule { budget: Arc::new(budget), vocabulary: Arc::clone(grammars.vocabulary()) }))
}

fn prompt_set(prompt: &[u32], params: &Params) -> HashSet<u32> {
    if params.repetition_penalty == 1.0 { HashSet::new() } else { prompt.iter().copied().collect() }
}

/// Sampling parameters for a token after `tokens` tokens, drawn for another worker.
fn drawn_for_another(draw: &Drawing, tokens: usize, limits: &Limits) -> Result<Params, Refusal> {
    let params = Params::parse(Some(&draw.sampling), limits)?;
    let choices = draw.choices.len();
    check((1..=limits.choices_max).contains(&choices), || {
        format!("{choices} choices, limit 1 to {}", limits.choices_max)
    })?;
    // A prompt must have a token besides the emitted ones, and another token must be allowed.
    check(draw.emitted < tokens && draw.emitted < params.max_tokens, || {
        format!("after {} of {tokens} tokens nothing is drawn", draw.emitted)
    })?;
    Ok(Params { prompt_logprobs: None, ..params })
}

fn prompt(generate: &Generate, params: &Params, limits: &Limits) -> Result<(), Refusal> {
    let tokens = generate.prompt.len();
    check(tokens > 0, || "the prompt is empty".to_owned())?;
    tokens_exist("prompt", &generate.prompt, limits)?;
    let room = limits.context_tokens.saturating_sub(usize::from(params.max_tokens > 0));
    if tokens > room {
        let message = format!("the prompt has {tokens} tokens, the context is {}", limits.context_tokens);
        return Err(Refusal { kind: ErrorKind::ContextLength, message });
    }
    let entries = params.prompt_logprobs.map_or(0, |k| tokens.saturating_mul(k + 1));
    check(entries <= limits.prompt_logprobs_max, || {
        format!("prompt_logprobs of this prompt has {entries} entries, limit {}", limits.prompt_logprobs_max)
    })
}

fn choices(generate: &Generate, params: &Params, limits: &Limits) -> Result<(), Refusal> {
    let choices = &generate.choices;
    check((1..=limits.choices_max).contains(&choices.len()), || {
        format!("{} choices, limit 1 to {}", choices.len(), limits.choices_max)
    })?;
    let mut seen = HashSet::new();
    for choice in choices {
        check(seen.insert(choice.index), || format!("choice {} occurs twice", choice.index))?;
        tokens_exist("emitted", &choice.emitted, limits)?;
        let (emitted, room) = (choice.emitted.len(), limits.context_tokens - generate.prompt.len());
        check(emitted <= params.max_tokens.min(room), || {
            format!("choice {} has emitted {emitted} tokens, more than it may", choice.index)
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{BAD_WORDS_MAX, LOGPROB_TOKENS_MAX};
    use penstock_proto::frames::{BadWord, LogitBias, ReasoningBudget};

    fn good() -> Generate {
        let sampling = Sampling {
            top_p: 1.0,
            repetition_penalty: 1.0,
            max_tokens: 10,
            logprobs: -1,
            prompt_logprobs: -1,
            ..Default::default()
        };
        let choices = vec![ChoiceStart::default()];
        Generate { prompt: vec![1; 20], choices, sampling: Some(sampling), ..Default::default() }
    }

    /// Checks the kind of refusal of a changed request, and that its message contains `word`.
    #[track_caller]
    fn check(kind: ErrorKind, word: &str, change: impl Fn(&mut Generate, &mut Sampling)) {
        let mut generate = good();
        let mut sampling = generate.sampling.take().expect("set");
        change(&mut generate, &mut sampling);
        generate.sampling = Some(sampling);
        let refusal = Request::parse(generate, &Limits::small()).err().expect("it is refused");
        assert_eq!(refusal.kind, kind, "{}", refusal.message);
        assert!(refusal.message.contains(word), "{}", refusal.message);
    }

    #[test]
    fn a_good_request_is_taken() {
        let (request, starts) = Request::parse(good(), &Limits::small()).expect("it is good");
        assert_eq!((request.tokens_max, starts.len(), request.prompt_blocks()), (30, 1, 0));
        let mut long = good();
        long.sampling.as_mut().expect("set").max_tokens = u32::MAX;
        let (request, _) = Request::parse(long, &Limits::small()).expect("it ends with the context");
        assert_eq!(request.tokens_max, 64);
    }

    #[test]
    fn an_adapter_is_found_by_its_name_and_must_be_in_the_salt() {
        let of = |id: u128, salted: u128| {
            let salt = [b"tenant", &AdapterId(salted).to_bytes()[..]].concat();
            let generate = Generate { adapter: AdapterId(id).to_bytes().to_vec(), salt, ..good() };
            let prefill = Prefill {
                prompt: vec![1; 33],
                blocks: 1,
                adapter: generate.adapter.clone(),
                salt: generate.salt.clone(),
                ..Prefill::default()
            };
            let silent = Request::silent(prefill, &Limits::small()).map(|(request, _)| request.adapter);
            let pooled = Generate { pooling: Pooling::Last as i32, ..generate.clone() };
            let pooled = Request::parse(pooled, &Limits { state_width: 1, ..Limits::small() });
            let parsed = Request::parse(generate, &Limits::small()).map(|(request, _)| request.adapter);
            assert_eq!(parsed, pooled.map(|(request, _)| request.adapter));
            assert_eq!(parsed, silent);
            parsed
        };
        assert_eq!(of(8, 8), Ok(Some(AdapterSlot(1))));
        assert_eq!(Request::parse(good(), &Limits::small()).map(|(request, _)| request.adapter), Ok(None));
        let refusal = of(9, 9).expect_err("it is not loaded");
        assert_eq!(refusal.kind, ErrorKind::Unavailable);
        assert_eq!(refusal.message, "adapter 00000000000000000000000000000009 is not loaded on this worker");
        check(ErrorKind::InvalidRequest, "adapter has 15 bytes", |g, _| g.adapter = vec![1; 15]);
        assert_eq!(of(8, 7).expect_err("another salt").message, "the salt does not name the adapter");
    }

    #[test]
    fn every_bound_has_its_refusal() {
        use ErrorKind::{ContextLength, InvalidRequest};
        check(InvalidRequest, "empty", |g, _| g.prompt.clear());
        check(InvalidRequest, "prompt", |g, _| g.prompt[3] = 100);
        check(ContextLength, "64", |g, _| g.prompt = vec![1; 64]);
        check(InvalidRequest, "choices", |g, _| g.choices.clear());
        check(InvalidRequest, "choices", |g, _| {
            g.choices = (0..5).map(|index| ChoiceStart { index, emitted: vec![] }).collect()
        });
        check(InvalidRequest, "twice", |g, _| g.choices.push(ChoiceStart::default()));
        check(InvalidRequest, "emitted", |g, _| g.choices[0].emitted = vec![1; 11]);
        check(InvalidRequest, "emitted", |g, _| g.choices[0].emitted = vec![100]);
        check(InvalidRequest, "salt", |g, _| g.salt = vec![0; 5000]);
        for (field, values) in [
            ("temperature", [f32::NAN, -0.1, f32::INFINITY]),
            ("top_p", [f32::NAN, -0.1, 1.1]),
            ("min_p", [f32::NAN, -0.1, 1.1]),
            ("presence_penalty", [f32::NAN, f32::INFINITY, -1e3]),
            ("frequency_penalty", [f32::NAN, f32::INFINITY, -1e3]),
            ("repetition_penalty", [f32::NAN, 0.0, -1.0]),
        ] {
            for value in values {
                check(InvalidRequest, field, |_, s| match field {
                    "temperature" => s.temperature = value,
                    "top_p" => s.top_p = value,
                    "min_p" => s.min_p = value,
                    "presence_penalty" => s.presence_penalty = value,
                    "frequency_penalty" => s.frequency_penalty = value,
                    _ => s.repetition_penalty = value,
                });
            }
        }
        let bias = |token, bias| vec![LogitBias { token, bias }];
        check(InvalidRequest, "logit_bias", |_, s| s.logit_bias = bias(100, 1.0));
        check(InvalidRequest, "logit_bias", |_, s| s.logit_bias = bias(1, f32::NAN));
        check(InvalidRequest, "logit_bias", |_, s| s.logit_bias = vec![LogitBias::default(); 5000]);
        check(InvalidRequest, "stop_tokens", |_, s| s.stop_tokens = vec![100]);
        check(InvalidRequest, "allowed_tokens", |_, s| s.allowed_tokens = vec![u32::MAX]);
        check(InvalidRequest, "logprob_tokens", |_, s| s.logprob_tokens = vec![u32::MAX]);
        check(InvalidRequest, "logprob_tokens", |_, s| s.logprob_tokens = vec![1; LOGPROB_TOKENS_MAX + 1]);
        check(InvalidRequest, "bad_words", |_, s| s.bad_words = vec![BadWord::default()]);
        check(InvalidRequest, "bad_words", |_, s| s.bad_words = vec![BadWord { tokens: vec![1, u32::MAX] }]);
        check(InvalidRequest, "bad_words", |_, s| s.bad_words = vec![BadWord { tokens: vec![1] }; BAD_WORDS_MAX + 1]);
        check(InvalidRequest, "min_tokens", |_, s| {
            (s.min_tokens, s.stop_tokens, s.allowed_tokens) = (1, vec![3, 4], vec![4]);
        });
        let budget = |change: fn(&mut ReasoningBudget)| {
            let mut budget = ReasoningBudget { ending: "x".into(), closing: vec![1], ..Default::default() };
            change(&mut budget);
            Some(budget)
        };
        check(InvalidRequest, "reasoning", |_, s| s.reasoning = budget(|b| b.closing = vec![]));
        check(InvalidRequest, "reasoning", |_, s| s.reasoning = budget(|b| b.ending = String::new()));
        check(InvalidRequest, "reasoning", |_, s| s.reasoning = budget(|b| b.closing = vec![100]));
        check(InvalidRequest, "reasoning", |_, s| s.reasoning = budget(|b| b.closing = vec![1; CLOSING_MAX + 1]));
        check(InvalidRequest, "reasoning", |_, s| s.reasoning = budget(|b| b.opening = "x".repeat(257)));
        check(ErrorKind::Unsupported, "tokenizer", |_, s| s.reasoning = budget(|_| ()));
        check(InvalidRequest, "logprobs", |_, s| s.logprobs = 6);
        check(InvalidRequest, "logprobs", |_, s| s.logprobs = -2);
        check(InvalidRequest, "prompt_logprobs", |_, s| s.prompt_logprobs = 2);
    }
}
