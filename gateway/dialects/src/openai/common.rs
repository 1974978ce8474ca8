//! Fields that chat completions and completions share.

use super::constraint::Constraint;
use penstock_types::Bounds;
use penstock_types::fields;
use penstock_types::json::{Fault, Names, Reader, Within, short};
use penstock_types::request::{PromptTail, SamplingParams, StreamOptions, TokenNames};

/// Shared fields while a body is read.
pub(super) struct Common {
    pub(super) model: Option<String>,
    pub(super) sampling: SamplingParams,
    pub(super) constraint: Constraint,
    pub(super) n: Option<u32>,
    pub(super) stream: bool,
    pub(super) stream_options: Option<StreamOptions>,
    pub(super) prompt_logprobs: Option<u32>,
    pub(super) keep_special_tokens: bool,
    pub(super) return_token_ids: bool,
    pub(super) token_names: TokenNames,
    pub(super) prompt_tail: Option<PromptTail>,
    pub(super) cache_salt: Option<String>,
    pub(super) user: Option<String>,
    pub(super) cache_key: Option<String>,
    pub(super) priority: i32,
    pub(super) ignored: Vec<String>,
}

impl Common {
    pub(super) fn new() -> Self {
        Self {
            model: None,
            sampling: SamplingParams::default(),
            constraint: Constraint::default(),
            n: None,
            stream: false,
            stream_options: None,
            prompt_logprobs: None,
            keep_special_tokens: false,
            return_token_ids: false,
            token_names: TokenNames::Text,
            prompt_tail: None,
            cache_salt: None,
            user: None,
            cache_key: None,
            priority: 0,
            ignored: Vec::new(),
        }
    }

    /// Reads the value of a shared field; `false`, with nothing read, if `key` is not one.
    pub(super) fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<bool, Fault> {
        match key {
            "model" => self.model = Some(fields::name(reader, bounds.model_chars_max)?),
            "n" => self.n = Some(fields::count(reader, 1..=bounds.n_max)?),
            "stream" => self.stream = reader.boolean()?,
            "stream_options" => self.stream_options = Some(stream_options(reader, &mut self.ignored, bounds)?),
            "prompt_logprobs" => self.prompt_logprobs = Some(fields::count(reader, 0..=bounds.logprobs_max)?),
            "skip_special_tokens" => self.keep_special_tokens = !reader.boolean()?,
            "return_token_ids" => self.return_token_ids = reader.boolean()?,
            "return_tokens_as_token_ids" => {
                self.token_names = if reader.boolean()? { TokenNames::Ids } else { TokenNames::Text };
            }
            "truncate_prompt_tokens" => self.prompt_tail = Some(prompt_tail(reader)?),
            "cache_salt" => self.cache_salt = Some(fields::name(reader, bounds.name_chars_max)?),
            "user" => self.user = Some(fields::string(reader, 512)?),
            "prompt_cache_key" => self.cache_key = Some(fields::string(reader, 1_024)?),
            "priority" => {
                self.priority = fields::integer(reader, i128::from(i32::MIN)..=i128::from(i32::MAX))? as i32;
            }
            _ if self.constraint.field(reader, key, &mut self.ignored, bounds)? => {}
            _ => return self.sampling_field(reader, key, bounds),
        }
        Ok(true)
    }

    fn sampling_field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<bool, Fault> {
        let sampling = &mut self.sampling;
        match key {
            "temperature" => sampling.temperature = Some(fields::number(reader, 0.0..=2.0, false)?),
            "top_p" => sampling.top_p = Some(fields::number(reader, 0.0..=1.0, true)?),
            // -1 and 0 both mean "all".
            "top_k" => sampling.top_k = Some(fields::integer(reader, -1..=i128::from(u32::MAX))?.max(0) as u32),
            "min_p" => sampling.min_p = Some(fields::number(reader, 0.0..=1.0, false)?),
            "presence_penalty" => sampling.presence_penalty = fields::number(reader, -2.0..=2.0, false)?,
            "frequency_penalty" => sampling.frequency_penalty = fields::number(reader, -2.0..=2.0, false)?,
            "repetition_penalty" => sampling.repetition_penalty = Some(fields::number(reader, 0.0..=10.0, true)?),
            "logit_bias" => sampling.logit_bias = fields::logit_bias(reader, bounds.logit_bias_max)?,
            "seed" => {
                let seed = fields::integer(reader, i128::from(i64::MIN)..=i128::from(u64::MAX))?;
                sampling.seed = Some(seed as u64); // a negative seed is its two's complement
            }
            "min_tokens" => sampling.min_tokens = fields::count(reader, 0..=u32::MAX)?,
            "ignore_eos" => sampling.ignore_eos = reader.boolean()?,
            "stop" => sampling.stop = fields::strings(reader, bounds.stop_max, bounds.stop_chars_max)?,
            "stop_token_ids" => sampling.stop_token_ids = fields::token_ids(reader, bounds.stop_tokens_max)?,
            "include_stop_str_in_output" => sampling.include_stop = reader.boolean()?,
            "bad_words" => {
                sampling.bad_words = fields::strings(reader, bounds.stop_tokens_max, bounds.stop_chars_max)?;
                if let Some(at) = sampling.bad_words.iter().position(|word| word.trim().is_empty()) {
                    return Err(Fault::invalid("must not be blank")).at(at);
                }
            }
            "logprob_token_ids" => {
                sampling.logprob_token_ids = fields::token_ids(reader, bounds.logprob_tokens_max)?;
            }
            "allowed_token_ids" => {
                sampling.allowed_token_ids = fields::token_ids(reader, bounds.allowed_tokens_max)?;
                if sampling.allowed_token_ids.is_empty() {
                    return Err(Fault::invalid("must not be empty"));
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Records the name of a field that has no effect, for the warning.
    pub(super) fn ignore(&mut self, name: &str, bounds: &Bounds) {
        ignore(&mut self.ignored, name, bounds);
    }

    /// Refuses `logprob_token_ids` where no log-probabilities are asked for.
    pub(super) fn check_logprob_ids(&self, is_asked: bool, rule: &'static str) -> Result<(), Fault> {
        match self.sampling.logprob_token_ids.is_empty() || is_asked {
            true => Ok(()),
            false => Err(Fault::invalid(rule)).within("logprob_token_ids"),
        }
    }

    /// Checks the rules between shared fields, once the body is read.
    pub(super) fn check(&self) -> Result<(), Fault> {
        if self.stream_options.is_some() && !self.stream {
            return Err(Fault::invalid("only allowed with \"stream\": true")).within("stream_options");
        }
        if self.prompt_logprobs.is_some() && self.stream {
            return Err(Fault::invalid("not available with \"stream\": true")).within("prompt_logprobs");
        }
        match self.sampling.max_tokens {
            Some(max) if self.sampling.min_tokens > max => {
                Err(Fault::invalid(format!("must be at most max_tokens ({max})"))).within("min_tokens")
            }
            _ => Ok(()),
        }
    }

    /// Takes the model's name, or fails if it is missing.
    pub(super) fn take_model(&mut self) -> Result<String, Fault> {
        self.model.take().ok_or_else(|| Fault::invalid("required, but missing")).within("model")
    }

    /// Options of the stream; `None` for a whole answer.
    pub(super) fn stream(&self) -> Option<StreamOptions> {
        self.stream.then(|| self.stream_options.unwrap_or_default())
    }
}

fn prompt_tail(reader: &mut Reader<'_>) -> Result<PromptTail, Fault> {
    match fields::integer(reader, -1..=i128::from(u32::MAX))? {
        -1 => Ok(PromptTail::Fitting),
        0 => Err(Fault::invalid("must be -1 (as many as fit) or 1 and more")),
        tokens => Ok(PromptTail::Tokens(tokens as u32)),
    }
}

/// Records the name of a field that has no effect, for the warning.
pub(super) fn ignore(ignored: &mut Vec<String>, name: &str, bounds: &Bounds) {
    if ignored.len() < bounds.ignored_max {
        ignored.push(short(name));
    }
}

fn stream_options(reader: &mut Reader<'_>, ignored: &mut Vec<String>, bounds: &Bounds) -> Result<StreamOptions, Fault> {
    let mut options = StreamOptions::default();
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        match &*key {
            "include_usage" => options.include_usage = reader.boolean().within(&key)?,
            "continuous_usage_stats" => options.continuous_usage_stats = reader.boolean().within(&key)?,
            // Random padding against traffic analysis: accepted, not added.
            "include_obfuscation" => _ = reader.boolean().within(&key)?,
            _ => {
                reader.skip()?;
                ignore(ignored, &format!("stream_options.{key}"), bounds);
            }
        }
        Ok(())
    })?;
    Ok(options)
}
