//! The fields that chat completions and completions share, and what becomes of the ones that are not built.

use super::Bounds;
use super::fields;
use super::json::{Fault, Kind, Names, Reader, Within, mismatch, short};
use crate::error::ApiErrorKind;
use crate::request::{SamplingParams, StreamOptions};

/// Shared fields while a body is read.
pub(super) struct Common {
    pub(super) model: Option<String>,
    pub(super) sampling: SamplingParams,
    pub(super) n: Option<u32>,
    pub(super) stream: bool,
    pub(super) stream_options: Option<StreamOptions>,
    pub(super) prompt_logprobs: Option<u32>,
    pub(super) keep_special_tokens: bool,
    pub(super) return_token_ids: bool,
    pub(super) cache_salt: Option<String>,
    pub(super) priority: i32,
    pub(super) ignored: Vec<String>,
}

impl Common {
    pub(super) fn new() -> Self {
        Self {
            model: None,
            sampling: neutral(),
            n: None,
            stream: false,
            stream_options: None,
            prompt_logprobs: None,
            keep_special_tokens: false,
            return_token_ids: false,
            cache_salt: None,
            priority: 0,
            ignored: Vec::new(),
        }
    }

    /// Reads the value of a shared field; `false` (and nothing read) if `key` is none.
    pub(super) fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<bool, Fault> {
        match key {
            "model" => self.model = Some(fields::name(reader, bounds.model_chars_max)?),
            "n" => self.n = Some(fields::count(reader, 1..=bounds.n_max)?),
            "stream" => self.stream = reader.boolean()?,
            "stream_options" => self.stream_options = Some(stream_options(reader, &mut self.ignored, bounds)?),
            "prompt_logprobs" => self.prompt_logprobs = Some(fields::count(reader, 0..=bounds.logprobs_max)?),
            "skip_special_tokens" => self.keep_special_tokens = !reader.boolean()?,
            "return_token_ids" => self.return_token_ids = reader.boolean()?,
            "cache_salt" => self.cache_salt = Some(fields::name(reader, bounds.name_chars_max)?),
            "priority" => {
                self.priority = fields::integer(reader, i128::from(i32::MIN)..=i128::from(i32::MAX))? as i32;
            }
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

    /// Remembers a field that changes nothing, for the warning.
    pub(super) fn ignore(&mut self, name: &str, bounds: &Bounds) {
        ignore(&mut self.ignored, name, bounds);
    }

    /// Rules between shared fields, once the body is read.
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

    /// The model's name, or the fault that it is missing.
    pub(super) fn take_model(&mut self) -> Result<String, Fault> {
        self.model.take().ok_or_else(|| Fault::invalid("required, but missing")).within("model")
    }

    /// Streaming wishes, or `None` for a whole answer.
    pub(super) fn stream(&self) -> Option<StreamOptions> {
        self.stream.then(|| self.stream_options.unwrap_or_default())
    }
}

/// What a request without any sampling field asks for.
pub(super) fn neutral() -> SamplingParams {
    SamplingParams {
        temperature: None,
        top_p: None,
        top_k: None,
        min_p: None,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repetition_penalty: None,
        logit_bias: Vec::new(),
        seed: None,
        max_tokens: None,
        min_tokens: 0,
        ignore_eos: false,
        stop: Vec::new(),
        stop_token_ids: Vec::new(),
        include_stop: false,
        allowed_token_ids: Vec::new(),
    }
}

fn ignore(ignored: &mut Vec<String>, name: &str, bounds: &Bounds) {
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

/// What becomes of a field that no code honours.
#[derive(Clone, Copy)]
enum Fate {
    /// Checked by its reader, then forgotten: it changes nothing that a client can see.
    Unused(Unused),
    /// Cannot be held, so it is refused unless its value asks for nothing.
    Refused { unless: Neutral, why: &'static str },
}

#[derive(Clone, Copy)]
enum Unused {
    Boolean,
    Text(usize),
    Anything,
    Metadata,
    Tier,
    Verbosity,
}

/// A value that asks for nothing (`null` always does).
#[derive(Clone, Copy)]
enum Neutral {
    Never,
    False,
    True,
    Zero,
    One,
    Empty,
}

const GUIDED: &str = "guided decoding is not built yet";
const SEARCH: &str = "beam search is not built";

/// Fields of both APIs, by name; anything else is unknown.
#[rustfmt::skip]
const FATES: &[(&str, Fate)] = &[
    ("user", Fate::Unused(Unused::Text(512))),
    ("safety_identifier", Fate::Unused(Unused::Text(512))),
    ("prompt_cache_key", Fate::Unused(Unused::Text(1_024))),
    ("prompt_cache_retention", Fate::Unused(Unused::Text(64))),
    ("request_id", Fate::Unused(Unused::Text(256))),
    ("prompt_cache_options", Fate::Unused(Unused::Anything)),
    ("prediction", Fate::Unused(Unused::Anything)),
    ("metadata", Fate::Unused(Unused::Metadata)),
    ("service_tier", Fate::Unused(Unused::Tier)),
    ("verbosity", Fate::Unused(Unused::Verbosity)),
    ("store", Fate::Unused(Unused::Boolean)),
    ("cache_prompt", Fate::Unused(Unused::Boolean)),
    ("spaces_between_special_tokens", Fate::Unused(Unused::Boolean)),

    ("structured_outputs", Fate::Refused { unless: Neutral::Empty, why: GUIDED }),
    ("regex", Fate::Refused { unless: Neutral::Never, why: GUIDED }),
    ("ebnf", Fate::Refused { unless: Neutral::Never, why: GUIDED }),
    ("grammar", Fate::Refused { unless: Neutral::Empty, why: GUIDED }),
    ("json_schema", Fate::Refused { unless: Neutral::Empty, why: GUIDED }),
    ("structural_tag", Fate::Refused { unless: Neutral::Never, why: GUIDED }),
    ("stop_regex", Fate::Refused { unless: Neutral::Empty, why: "regular expressions as stops are not built" }),
    ("no_stop_trim", Fate::Refused { unless: Neutral::False, why: "use include_stop_str_in_output" }),

    ("bad_words", Fate::Refused { unless: Neutral::Empty, why: "not built; use logit_bias" }),
    ("use_beam_search", Fate::Refused { unless: Neutral::False, why: SEARCH }),
    ("length_penalty", Fate::Refused { unless: Neutral::One, why: SEARCH }),
    ("early_stopping", Fate::Refused { unless: Neutral::False, why: SEARCH }),
    ("logits_processors", Fate::Refused { unless: Neutral::Empty, why: "requests cannot bring code" }),
    ("custom_logit_processor", Fate::Refused { unless: Neutral::Never, why: "requests cannot bring code" }),
    ("truncate_prompt_tokens", Fate::Refused { unless: Neutral::Never, why: "prompts are never truncated" }),
    ("return_tokens_as_token_ids", Fate::Refused { unless: Neutral::False, why: "not built; use return_token_ids" }),
    ("thinking_token_budget", Fate::Refused { unless: Neutral::Never, why: "budgets for reasoning are not built" }),
    ("return_hidden_states", Fate::Refused { unless: Neutral::False, why: "hidden states are not returned" }),
    ("n_probs", Fate::Refused { unless: Neutral::Zero, why: "use logprobs" }),
    ("n_predict", Fate::Refused { unless: Neutral::Never, why: "use max_tokens" }),
    ("prompt_embeds", Fate::Refused { unless: Neutral::Empty, why: "prompts are text or token ids" }),
    ("input_ids", Fate::Refused { unless: Neutral::Empty, why: "use /v1/completions for token ids" }),
    ("kv_transfer_params", Fate::Refused { unless: Neutral::Never, why: "a request does not steer KV transfer" }),
    ("vllm_xargs", Fate::Refused { unless: Neutral::Empty, why: "not known here" }),
    ("lora_path", Fate::Refused { unless: Neutral::Empty, why: "adapters are chosen by model name" }),
    ("session_params", Fate::Refused { unless: Neutral::Empty, why: "sessions are not built" }),
    ("mm_processor_kwargs", Fate::Refused { unless: Neutral::Empty, why: "only text is built" }),
    ("chat_template", Fate::Refused { unless: Neutral::Never, why: "templates come with the model, never with a request" }),

    ("response_format", Fate::Refused { unless: Neutral::Never, why: GUIDED }), // `text` is read before
    ("audio", Fate::Refused { unless: Neutral::Never, why: "only text is built" }),
    ("web_search_options", Fate::Refused { unless: Neutral::Never, why: "web search is not built" }),
    ("moderation", Fate::Refused { unless: Neutral::Never, why: "moderation is not built" }),
    ("functions", Fate::Refused { unless: Neutral::Never, why: "deprecated and not built; use tools" }),
    ("function_call", Fate::Refused { unless: Neutral::Never, why: "deprecated and not built; use tool_choice" }),
    ("documents", Fate::Refused { unless: Neutral::Empty, why: "not built; put documents into a message" }),
    ("include_reasoning", Fate::Refused { unless: Neutral::True, why: "reasoning is always returned apart" }),
    ("separate_reasoning", Fate::Refused { unless: Neutral::True, why: "reasoning is always returned apart" }),
    ("stream_reasoning", Fate::Refused { unless: Neutral::True, why: "reasoning is always streamed" }),
];

/// Reads a field that neither API honours: unused, refused, or unknown and remembered.
pub(super) fn other(common: &mut Common, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
    match FATES.iter().find(|(name, _)| *name == key) {
        Some((_, Fate::Unused(shape))) => unused(reader, *shape, bounds),
        Some((_, Fate::Refused { unless, why })) => refused(reader, *unless, why),
        None if key.starts_with("guided_") => refused(reader, Neutral::Never, GUIDED),
        None => {
            common.ignore(key, bounds);
            reader.skip()
        }
    }
}

fn unused(reader: &mut Reader<'_>, shape: Unused, bounds: &Bounds) -> Result<(), Fault> {
    const TIERS: [&str; 6] = ["auto", "default", "flex", "scale", "priority", "fast"];
    const VERBOSITIES: [&str; 3] = ["low", "medium", "high"];
    match shape {
        Unused::Boolean => reader.boolean().map(|_| ()),
        Unused::Text(chars_max) => fields::string(reader, chars_max).map(|_| ()),
        Unused::Anything => reader.skip(),
        Unused::Metadata => fields::metadata(reader, bounds.metadata_max),
        Unused::Tier => fields::word(reader, &TIERS.map(|word| (word, ()))),
        Unused::Verbosity => fields::word(reader, &VERBOSITIES.map(|word| (word, ()))),
    }
}

fn refused(reader: &mut Reader<'_>, unless: Neutral, why: &str) -> Result<(), Fault> {
    let raw = reader.raw()?.text;
    let neutral = match unless {
        Neutral::Never => false,
        Neutral::False => raw == "false",
        Neutral::True => raw == "true",
        Neutral::Zero => raw.parse() == Ok(0.0),
        Neutral::One => raw.parse() == Ok(1.0),
        Neutral::Empty => {
            raw.chars().filter(|character| !character.is_whitespace()).take(3).count() == 2
                && matches!(raw.as_bytes()[0], b'"' | b'[' | b'{')
        }
    };
    if neutral { Ok(()) } else { Err(Fault::of(ApiErrorKind::Unsupported, why)) }
}

/// `response_format`: only plain text can be promised without guided decoding.
pub(super) fn response_format(reader: &mut Reader<'_>) -> Result<(), Fault> {
    if reader.kind()? != Kind::Object {
        return Err(mismatch("an object", reader.kind()?));
    }
    let mut kind = None;
    reader.object(|reader, key| {
        if key == "type" {
            kind = Some(fields::string(reader, 64).within("type")?);
            return Ok(());
        }
        reader.skip()
    })?;
    match kind.as_deref() {
        Some("text") => Ok(()),
        Some(known @ ("json_object" | "json_schema" | "grammar" | "python" | "structural_tag")) => Err(Fault::of(
            ApiErrorKind::UnsupportedValue,
            format!("\"{known}\" needs guided decoding, which is not built yet"),
        ))
        .within("type"),
        Some(other) => Err(Fault::invalid(format!("unknown format \"{}\"", short(other)))).within("type"),
        None => Err(Fault::invalid("required, but missing")).within("type"),
    }
}
