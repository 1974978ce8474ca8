//! Token counts under the field names of various providers, for answers that are translated and answers that are forwarded.

use crate::answer_json as value;
use penstock_types::event::Usage;
use penstock_types::json::{Fault, Reader};

fn add(field: &mut u64, value: Option<u64>) {
    *field = value.unwrap_or(*field);
}

/// Reads `usage` of chat completions, completions, embeddings, rerank and responses.
pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Usage, Fault> {
    let (mut usage, mut total) = (Usage::default(), None);
    value::fields(reader, |reader, key| {
        match key {
            "prompt_tokens" | "input_tokens" => add(&mut usage.prompt_tokens, value::count(reader)?),
            "completion_tokens" | "output_tokens" => add(&mut usage.completion_tokens, value::count(reader)?),
            "total_tokens" => total = value::count(reader)?,
            // DeepSeek's and Moonshot's names.
            "prompt_cache_hit_tokens" | "cached_tokens" => add(&mut usage.cached_tokens, value::count(reader)?),
            "reasoning_tokens" => add(&mut usage.reasoning_tokens, value::count(reader)?),
            "prompt_tokens_details" | "input_tokens_details" => value::fields(reader, |reader, key| {
                match key {
                    "cached_tokens" => add(&mut usage.cached_tokens, value::count(reader)?),
                    "cache_write_tokens" => add(&mut usage.cache_write_tokens, value::count(reader)?),
                    _ => reader.skip()?,
                }
                Ok(())
            })?,
            "completion_tokens_details" | "output_tokens_details" => value::fields(reader, |reader, key| {
                match key {
                    "reasoning_tokens" => add(&mut usage.reasoning_tokens, value::count(reader)?),
                    _ => reader.skip()?,
                }
                Ok(())
            })?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let counted = usage.total();
    match total {
        // Some providers count nothing else for rerank and embeddings.
        Some(total) if counted == 0 => usage.prompt_tokens = total,
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
    fn a_total_alone_is_the_prompt() {
        check(r#"{"total_tokens":7}"#, 7, 0, 0, 0);
        check(r#"{"prompt_tokens":7,"total_tokens":9}"#, 7, 0, 0, 0);
        check(r#"{"prompt_tokens":null,"cached_tokens":3,"total_tokens":7}"#, 7, 0, 3, 0);
    }
}
