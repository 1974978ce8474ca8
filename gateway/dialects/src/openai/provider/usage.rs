//! Token counts under the field names of various providers.

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
    if let (0, 0, Some(total)) = (usage.prompt_tokens, usage.completion_tokens, total) {
        // Some providers count nothing else for rerank and embeddings.
        usage.prompt_tokens = total;
    }
    Ok(usage)
}
