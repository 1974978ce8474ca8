//! `POST /v1/completions`: body decoded into [`CompleteRequest`].

use super::chat::read_body;
use super::common::Common;
use super::unbuilt;
use penstock_types::Bounds;
use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::fields::{self, bounded, too_many};
use penstock_types::json::{Fault, Kind, Reader, Within, mismatch};
use penstock_types::request::{CompleteRequest, Prompt};

/// Tokens generated where a request names no limit: the API's old default, which clients rely on.
const MAX_TOKENS_DEFAULT: u32 = 16;

/// Decodes the body of a completion request.
///
/// Errors: the [`ApiError`] of the first fault in reading order; rules between fields are checked last. Cost: linear
/// in `body`.
pub fn decode_completion(body: &[u8], bounds: &Bounds) -> Result<CompleteRequest, ApiError> {
    let mut draft = Draft::new();
    read_body(body, bounds, |reader, key| draft.field(reader, key, bounds))
        .and_then(|()| draft.finish(bounds))
        .map_err(Fault::into_error)
}

struct Draft {
    common: Common,
    prompts: Option<Vec<Prompt>>,
    best_of: Option<u32>,
    echo: bool,
    suffix: Option<String>,
    max_tokens: Option<u32>,
    logprobs: Option<u32>,
}

impl Draft {
    fn new() -> Self {
        Self {
            common: Common::new(),
            prompts: None,
            best_of: None,
            echo: false,
            suffix: None,
            max_tokens: None,
            logprobs: None,
        }
    }

    fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
        match key {
            "prompt" => self.prompts = Some(prompts(reader, bounds, bounds.prompts_max)?),
            "best_of" => self.best_of = Some(fields::count(reader, 1..=bounds.n_max)?),
            "echo" => self.echo = reader.boolean()?,
            "suffix" => self.suffix = Some(fields::string(reader, bounds.suffix_chars_max)?),
            "max_tokens" => self.max_tokens = Some(fields::count(reader, 0..=u32::MAX)?),
            "logprobs" => self.logprobs = Some(fields::count(reader, 0..=bounds.logprobs_max)?),
            "thinking_token_budget" => {
                return Err(Fault::of(ApiErrorKind::Unsupported, "a plain continuation has no reasoning apart"));
            }
            "add_special_tokens" => {
                if !reader.boolean()? {
                    let why = "a prompt of token ids is used as it is; text always gets the tokenizer's special tokens";
                    return Err(Fault::of(ApiErrorKind::UnsupportedValue, why));
                }
            }
            _ if self.common.field(reader, key, bounds)? => {}
            _ => unbuilt::other(&mut self.common, reader, key, bounds)?,
        }
        Ok(())
    }

    fn finish(mut self, bounds: &Bounds) -> Result<CompleteRequest, Fault> {
        let model = self.common.take_model()?;
        let prompts = self.prompts.take().ok_or_else(|| Fault::invalid("required, but missing")).within("prompt")?;
        let max_tokens = self.max_tokens.unwrap_or(MAX_TOKENS_DEFAULT);
        if max_tokens == 0 && !self.echo && self.common.prompt_logprobs.is_none() {
            return Err(Fault::invalid("0 is only allowed with echo or prompt_logprobs")).within("max_tokens");
        }
        self.common.sampling.max_tokens = Some(max_tokens);
        self.common.check()?;
        self.common.check_logprob_ids(self.logprobs.is_some(), "only allowed with \"logprobs\"")?;
        let stream = self.common.stream();
        let n = self.common.n.unwrap_or(1);
        let best_of = self.best_of.unwrap_or(n);
        if best_of < n {
            return Err(Fault::invalid(format!("must be at least n ({n})"))).within("best_of");
        }
        if best_of > n && stream.is_some() {
            return Err(Fault::invalid("more than n is not available with \"stream\": true")).within("best_of");
        }
        if prompts.len() as u64 * u64::from(best_of) > bounds.choices_max {
            let what = format!("choices (prompts times {})", if self.best_of.is_some() { "best_of" } else { "n" });
            return Err(too_many(&what, bounds.choices_max as usize)).within("prompt");
        }
        let common = self.common;
        Ok(CompleteRequest {
            model,
            prompts,
            sampling: common.sampling,
            n,
            best_of,
            response_format: common.constraint.format(),
            echo: self.echo,
            suffix: self.suffix.filter(|suffix| !suffix.is_empty()),
            stream,
            logprobs: self.logprobs,
            prompt_logprobs: common.prompt_logprobs,
            keep_special_tokens: common.keep_special_tokens,
            return_token_ids: common.return_token_ids,
            token_names: common.token_names,
            prompt_tail: common.prompt_tail,
            cache_salt: common.cache_salt,
            user: common.user,
            cache_key: common.cache_key,
            priority: common.priority,
            ignored: common.ignored,
        })
    }
}

/// Reads at most `max` prompts: a string, strings, token ids, or lists of token ids.
pub(super) fn prompts(reader: &mut Reader<'_>, bounds: &Bounds, max: usize) -> Result<Vec<Prompt>, Fault> {
    match reader.kind()? {
        Kind::String => Ok(vec![text_prompt(reader)?]),
        Kind::Array => list_of_prompts(reader, bounds, max),
        kind => Err(mismatch("a string or an array", kind)),
    }
}

/// Reads a list of prompts. Its first element decides between the three kinds of list.
fn list_of_prompts(reader: &mut Reader<'_>, bounds: &Bounds, max: usize) -> Result<Vec<Prompt>, Fault> {
    let (mut all, mut ids, mut first) = (Vec::new(), Vec::new(), None);
    reader.array(|reader, index| {
        let kind = reader.kind()?;
        if *first.get_or_insert(kind) != kind {
            return Err(Fault::invalid("elements must be all strings, all token ids or all lists of token ids"))
                .at(index);
        }
        match kind {
            Kind::Number => {
                bounded(index, bounds.prompt_tokens_max, "token ids")?;
                ids.push(fields::count(reader, 0..=u32::MAX).at(index)?);
            }
            Kind::String => {
                bounded(index, max, "prompts")?;
                all.push(text_prompt(reader).at(index)?);
            }
            Kind::Array => {
                bounded(index, max, "prompts")?;
                all.push(token_prompt(reader, bounds).at(index)?);
            }
            kind => return Err(mismatch("a string, a token id or an array of token ids", kind)).at(index),
        }
        Ok(())
    })?;
    if !ids.is_empty() {
        all.push(Prompt::Tokens(ids));
    }
    if all.is_empty() { Err(Fault::invalid("must not be empty")) } else { Ok(all) }
}

fn text_prompt(reader: &mut Reader<'_>) -> Result<Prompt, Fault> {
    let text = fields::text(reader)?;
    if text.is_empty() { Err(Fault::invalid("must not be empty")) } else { Ok(Prompt::Text(text)) }
}

fn token_prompt(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Prompt, Fault> {
    let ids = fields::token_ids(reader, bounds.prompt_tokens_max)?;
    if ids.is_empty() { Err(Fault::invalid("must not be empty")) } else { Ok(Prompt::Tokens(ids)) }
}
