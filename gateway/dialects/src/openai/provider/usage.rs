//! Token counts under the field names of various providers, for answers that are translated and answers that are forwarded.

use crate::answer_json as value;
use penstock_types::event::Usage;
use penstock_types::json::{Fault, Reader};

fn add(field: &mut u64, value: Option<u64>) {
    *field = value.unwrap_or(*field);
}

/// Most tokens that a total has more than prompt and completion and that are taken for reasoning: a model thinks no longer in one
/// answer.
const UNTOLD_REASONING_MAX: u64 = 1 << 18;

/// Reads `usage` of chat completions, completions, embeddings, rerank and responses.
pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Usage, Fault> {
    let (mut usage, mut total) = (Usage::default(), None);
    // Which of the two are there, and whether there is more that the total may include.
    let (mut prompted, mut completed, mut says_more) = (false, false, false);
    value::fields(reader, |reader, key| {
        match key {
            "prompt_tokens" => {
                let count = value::count(reader)?;
                prompted |= count.is_some();
                add(&mut usage.prompt_tokens, count);
            }
            "completion_tokens" => {
                let count = value::count(reader)?;
                completed |= count.is_some();
                add(&mut usage.completion_tokens, count);
            }
            "input_tokens" => add(&mut usage.prompt_tokens, value::count(reader)?),
            "output_tokens" => add(&mut usage.completion_tokens, value::count(reader)?),
            "total_tokens" => total = value::count(reader)?,
            // DeepSeek's and Moonshot's names.
            "prompt_cache_hit_tokens" | "cached_tokens" => add(&mut usage.cached_tokens, value::count(reader)?),
            "reasoning_tokens" => {
                says_more = true;
                add(&mut usage.reasoning_tokens, value::count(reader)?);
            }
            "prompt_tokens_details" | "input_tokens_details" => value::fields(reader, |reader, key| {
                match key {
                    "cached_tokens" => add(&mut usage.cached_tokens, value::count(reader)?),
                    "cache_write_tokens" => add(&mut usage.cache_write_tokens, value::count(reader)?),
                    _ => reader.skip()?,
                }
                Ok(())
            })?,
            "completion_tokens_details" | "output_tokens_details" => {
                says_more = true;
                value::fields(reader, |reader, key| {
                    match key {
                        "reasoning_tokens" => add(&mut usage.reasoning_tokens, value::count(reader)?),
                        _ => reader.skip()?,
                    }
                    Ok(())
                })?;
            }
            // Vertex AI's mark of the kind of traffic.
            "extra_properties" => reader.skip()?,
            // A provider that counts anything else (audio, citations, searches) may have it in the total.
            _ => {
                says_more = true;
                reader.skip()?;
            }
        }
        Ok(())
    })?;
    let counted = usage.total();
    match total {
        // Some providers count nothing else for rerank and embeddings.
        Some(total) if counted == 0 => usage.prompt_tokens = total,
        // Gemini's at Google's endpoint for OpenAI's clients: the thoughts are in the total alone, and no field names them.
        Some(total) if prompted && completed && !says_more => {
            // Cached tokens may be counted beside the prompt, and are in the total then.
            let beside = usage.cached_tokens.saturating_add(usage.cache_write_tokens);
            let untold = total.saturating_sub(counted).saturating_sub(beside);
            if untold <= UNTOLD_REASONING_MAX {
                usage.reasoning_tokens = untold;
                usage.completion_tokens += untold;
            }
        }
        // xAI's completion tokens are without the reasoning, which only the total includes.
        Some(total) => usage.completion_tokens += usage.reasoning_tokens.min(total.saturating_sub(counted)),
        None => {}
    }
    Ok(usage)
}

/// Reads Cohere's `meta`: `{"tokens":{"input_tokens":…}}`.
pub(crate) fn meta(reader: &mut Reader<'_>) -> Result<Option<Usage>, Fault> {
    within(reader, "tokens")
}

/// Reads Groq's `x_groq`: `{"usage":{…}}`.
pub(crate) fn groq(reader: &mut Reader<'_>) -> Result<Option<Usage>, Fault> {
    within(reader, "usage")
}

fn within(reader: &mut Reader<'_>, name: &str) -> Result<Option<Usage>, Fault> {
    let mut found = None;
    value::fields(reader, |reader, key| {
        if key != name {
            return reader.skip();
        }
        found = Some(read(reader)?);
        Ok(())
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str, prompt: u64, completion: u64, cached: u64, reasoning: u64) {
        let usage = read(&mut Reader::new(json.as_bytes()).expect("JSON")).expect("usage");
        let expected = Usage {
            prompt_tokens: prompt,
            completion_tokens: completion,
            cached_tokens: cached,
            reasoning_tokens: reasoning,
            ..Usage::default()
        };
        assert_eq!(usage, expected, "{json}");
    }

    #[test]
    fn reasoning_that_only_the_total_includes_is_output() {
        let details = |name: &str, tokens: u64| format!(r#""{name}_tokens_details":{{"reasoning_tokens":{tokens}}}"#);
        let said = |prompt: u64, completion: u64, total: u64, reasoning: u64| {
            let counts = format!(r#""prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{total}"#);
            format!("{{{counts},{}}}", details("completion", reasoning))
        };
        check(&said(12, 1, 399, 386), 12, 387, 0, 386);
        check(&said(21, 0, 81, 60), 21, 60, 0, 60);
        // OpenAI's completion tokens include the reasoning.
        check(&said(12, 387, 399, 386), 12, 387, 0, 386);
        // No more than the reasoning is added, and no more than the total leaves.
        check(&said(10, 5, 100, 20), 10, 25, 0, 20);
        check(&said(10, 5, 18, 20), 10, 8, 0, 20);
        check(&said(10, 5, 0, 20), 10, 5, 0, 20);
        let details = details("output", 94);
        check(&format!(r#"{{"input_tokens":32,"output_tokens":9,"total_tokens":135,{details}}}"#), 32, 103, 0, 94);
    }

    #[test]
    fn thoughts_that_no_field_names_are_output() {
        let said = |prompt: u64, completion: u64, total: u64, more: &str| {
            format!(r#"{{"completion_tokens":{completion},"prompt_tokens":{prompt},"total_tokens":{total}{more}}}"#)
        };
        // Gemini at Google's endpoint: an answer, and one whose limit went to the thoughts.
        check(&said(9, 3, 105, ""), 9, 96, 0, 93);
        check(&said(9, 0, 105, ""), 9, 96, 0, 96);
        check(&said(9, 3, 105, r#","completion_tokens_details":null,"prompt_tokens_details":{}"#), 9, 96, 0, 93);
        check(&said(9, 3, 105, r#","extra_properties":{"google":{"traffic_type":"ON_DEMAND"}}"#), 9, 96, 0, 93);
        for total in [12, 11, 0] {
            check(&said(9, 3, total, ""), 9, 3, 0, 0);
        }
        // Who tells the reasoning has told all of it.
        check(&said(9, 3, 105, r#","reasoning_tokens":0"#), 9, 3, 0, 0);
        check(&said(9, 3, 105, r#","completion_tokens_details":{"audio_tokens":0}"#), 9, 3, 0, 0);
        // What else a total can include: cached tokens beside the prompt, audio, searches, nothing that can be.
        check(&said(9, 3, 112, r#","prompt_tokens_details":{"cached_tokens":100}"#), 9, 3, 100, 0);
        check(&said(9, 3, 119, r#","prompt_tokens_details":{"cached_tokens":100}"#), 9, 10, 100, 7);
        check(&said(4, 635, 3264, r#","prompt_audio_seconds":203"#), 4, 635, 0, 0);
        check(&said(9, 3, 105, r#","num_search_queries":1"#), 9, 3, 0, 0);
        check(&said(9, 3, u64::MAX, ""), 9, 3, 0, 0);
        check(r#"{"completion_tokens":3,"total_tokens":105}"#, 0, 3, 0, 0);
        check(r#"{"input_tokens":9,"output_tokens":3,"total_tokens":105}"#, 9, 3, 0, 0);
    }

    #[test]
    fn a_total_alone_is_the_prompt() {
        check(r#"{"total_tokens":7}"#, 7, 0, 0, 0);
        check(r#"{"prompt_tokens":7,"total_tokens":9}"#, 7, 0, 0, 0);
        check(r#"{"prompt_tokens":null,"cached_tokens":3,"total_tokens":7}"#, 7, 0, 3, 0);
    }
}
