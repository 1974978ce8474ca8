//! Fields that neither API supports: accepted if they change nothing, refused if they would.
//!
//! A field that promises an effect (a grammar, a limit, another modality) is never dropped silently: the request is
//! refused with the reason, unless the value is neutral. A field in no table is unknown: ignored, and named in the
//! request's `ignored`.

use super::common::Common;
use super::messages;
use penstock_types::Bounds;
use penstock_types::error::ApiErrorKind;
use penstock_types::fields;
use penstock_types::json::{Fault, Names, Reader, Within};

/// Reads an unsupported field: checks and drops it, refuses it, or records it as unknown.
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

/// Treatment of a field that the gateway knows and does not support.
#[derive(Clone, Copy)]
enum Fate {
    /// Checked by its reader, then dropped: a client cannot see any difference.
    Unused(Unused),
    /// Refused unless its value is neutral, because the gateway cannot honour it.
    Refused { unless: Neutral, why: &'static str },
}

#[derive(Clone, Copy)]
enum Unused {
    Boolean,
    Text(usize),
    Anything,
    Metadata,
    Tier,
    Prediction,
}

/// A value that has no effect (`null` never has one).
#[derive(Clone, Copy)]
enum Neutral {
    Never,
    False,
    True,
    Zero,
    One,
    /// A number that is zero or less.
    NotPositive,
    Empty,
    /// The word `left`, for a side.
    Left,
}

const GUIDED: &str = "not known here; use structured_outputs";
const SEARCH: &str = "beam search is not built";
const SAMPLER: &str = "this sampler is not built; use temperature, top_k, top_p and min_p";

/// Treatment of known but unsupported fields of both APIs, by name; any other field is unknown.
#[rustfmt::skip]
const FATES: &[(&str, Fate)] = &[
    ("safety_identifier", Fate::Unused(Unused::Text(512))),
    ("prompt_cache_retention", Fate::Unused(Unused::Text(64))),
    ("request_id", Fate::Unused(Unused::Text(256))),
    ("prompt_cache_options", Fate::Unused(Unused::Anything)),
    ("prediction", Fate::Unused(Unused::Prediction)),
    ("metadata", Fate::Unused(Unused::Metadata)),
    ("service_tier", Fate::Unused(Unused::Tier)),
    ("store", Fate::Unused(Unused::Boolean)),
    ("cache_prompt", Fate::Unused(Unused::Boolean)),
    ("spaces_between_special_tokens", Fate::Unused(Unused::Boolean)),

    ("stop_regex", Fate::Refused { unless: Neutral::Empty, why: "regular expressions as stops are not built" }),
    ("no_stop_trim", Fate::Refused { unless: Neutral::False, why: "use include_stop_str_in_output" }),

    ("typical_p", Fate::Refused { unless: Neutral::One, why: SAMPLER }),
    ("tfs_z", Fate::Refused { unless: Neutral::One, why: SAMPLER }),
    ("top_a", Fate::Refused { unless: Neutral::NotPositive, why: SAMPLER }),
    ("top_n_sigma", Fate::Refused { unless: Neutral::NotPositive, why: SAMPLER }),
    ("xtc_probability", Fate::Refused { unless: Neutral::NotPositive, why: SAMPLER }),
    ("dry_multiplier", Fate::Refused { unless: Neutral::NotPositive, why: SAMPLER }),
    ("dynatemp_range", Fate::Refused { unless: Neutral::NotPositive, why: SAMPLER }),
    ("mirostat", Fate::Refused { unless: Neutral::NotPositive, why: SAMPLER }),
    ("epsilon_cutoff", Fate::Refused { unless: Neutral::NotPositive, why: SAMPLER }),
    ("eta_cutoff", Fate::Refused { unless: Neutral::NotPositive, why: SAMPLER }),

    ("use_beam_search", Fate::Refused { unless: Neutral::False, why: SEARCH }),
    ("length_penalty", Fate::Refused { unless: Neutral::One, why: SEARCH }),
    ("early_stopping", Fate::Refused { unless: Neutral::False, why: SEARCH }),
    ("logits_processors", Fate::Refused { unless: Neutral::Empty, why: "requests cannot bring code" }),
    ("custom_logit_processor", Fate::Refused { unless: Neutral::Never, why: "requests cannot bring code" }),
    ("truncation_side", Fate::Refused { unless: Neutral::Left, why: "truncate_prompt_tokens keeps the end of a prompt" }),
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

    ("audio", Fate::Refused { unless: Neutral::Never, why: "only text is built" }),
    ("web_search_options", Fate::Refused { unless: Neutral::Never, why: "web search is not built" }),
    ("moderation", Fate::Refused { unless: Neutral::Never, why: "moderation is not built" }),
    ("documents", Fate::Refused { unless: Neutral::Empty, why: "not built; put documents into a message" }),
    ("include_reasoning", Fate::Refused { unless: Neutral::True, why: "reasoning is always returned apart" }),
    ("separate_reasoning", Fate::Refused { unless: Neutral::True, why: "reasoning is always returned apart" }),
    ("stream_reasoning", Fate::Refused { unless: Neutral::True, why: "reasoning is always streamed" }),
];

fn unused(reader: &mut Reader<'_>, shape: Unused, bounds: &Bounds) -> Result<(), Fault> {
    const TIERS: [&str; 6] = ["auto", "default", "flex", "scale", "priority", "fast"];
    match shape {
        Unused::Boolean => reader.boolean().map(|_| ()),
        Unused::Text(chars_max) => fields::string(reader, chars_max).map(|_| ()),
        Unused::Anything => reader.skip(),
        Unused::Metadata => fields::metadata(reader, bounds.metadata_max),
        Unused::Tier => fields::word(reader, &TIERS.map(|word| (word, ()))),
        Unused::Prediction => prediction(reader, bounds),
    }
}

/// Checks a predicted answer: `{"type":"content","content":…}` with a text or parts of text. It changes the speed of an
/// answer where it changes anything, so a pool may do without.
fn prediction(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<(), Fault> {
    let (mut names, mut kind, mut content) = (Names::new(bounds.inner_fields_max), None, false);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "type" => kind = Some(fields::word(reader, &[("content", ())]).within("type")?),
            "content" => content = messages::content(reader, bounds).within("content").map(|_| true)?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    kind.ok_or_else(|| Fault::invalid("required, but missing")).within("type")?;
    content.then_some(()).ok_or_else(|| Fault::invalid("required, but missing")).within("content")
}

fn refused(reader: &mut Reader<'_>, unless: Neutral, why: &str) -> Result<(), Fault> {
    let raw = reader.raw()?.text;
    let neutral = match unless {
        Neutral::Never => false,
        Neutral::False => raw == "false",
        Neutral::True => raw == "true",
        Neutral::Left => raw == "\"left\"",
        Neutral::Zero => raw.parse() == Ok(0.0),
        Neutral::One => raw.parse() == Ok(1.0),
        Neutral::NotPositive => raw.parse::<f64>().is_ok_and(|number| number <= 0.0),
        Neutral::Empty => {
            raw.chars().filter(|character| !character.is_whitespace()).take(3).count() == 2
                && matches!(raw.as_bytes()[0], b'"' | b'[' | b'{')
        }
    };
    if neutral { Ok(()) } else { Err(Fault::of(ApiErrorKind::Unsupported, why)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_in_the_reference_once_and_under_its_group() {
        let reference = include_str!("../../../../docs/reference/openai.md");
        let section = |name: &str| {
            let from = reference.find(name).unwrap_or_else(|| panic!("{name} is a heading"));
            let section = &reference[from + name.len()..];
            let end = [section.find("\n## "), section.find("\n### ")].into_iter().flatten().min();
            &section[..end.unwrap_or(section.len())]
        };
        let (accepted, refused) = (section("\n### Accepted\n"), section("\n### Refused\n"));
        for (field, fate) in FATES {
            let group = if matches!(fate, Fate::Unused(_)) { accepted } else { refused };
            assert!(group.contains(&format!("`{field}`")), "{field}");
            assert_eq!(FATES.iter().filter(|(name, _)| name == field).count(), 1, "{field}");
        }
    }
}
