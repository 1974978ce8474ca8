//! Completions at a provider: the request's body, and the answer's chunks or whole JSON decoded into events.

use bytes::BytesMut;

use super::chat::{Ended, ended, put_format, put_sampling, put_stream, put_tail, stop, with_ids};
use super::{ChatCodec, fault, logprobs, usage};
use crate::answer_body::{Answer, truncated};
use crate::answer_json::{self as value, Object, list};
use crate::identifiers;
use crate::provider_fields::{COMPLETE, COMPLETE_APIS, refuse};
use penstock_types::codec::ProviderFault;
use penstock_types::error::ApiError;
use penstock_types::event::{ChatEvent, FinishReason, StopCause, TokenLogprob, Usage};
use penstock_types::json::{Fault, Reader};
use penstock_types::request::{CompleteRequest, Prompt, TokenNames};
use penstock_types::write;

/// Body of a completion request. The gateway applies `best_of` and `suffix` itself: it asks for `best_of` choices and
/// picks the best, and puts the suffix behind each choice.
pub(super) fn encode(codec: &ChatCodec, request: &CompleteRequest, model: &str) -> Result<Vec<u8>, ApiError> {
    refuse(COMPLETE, COMPLETE_APIS, codec.server.api(), request)?;
    let mut out = BytesMut::with_capacity(1024);
    let mut object = Object::open(&mut out);
    object.string("model", model);
    put_prompts(object.key("prompt"), &request.prompts, "prompt")?;
    object.optional_integer("max_tokens", request.sampling.max_tokens);
    let candidates = request.best_of.max(request.n);
    if candidates != 1 {
        object.integer("n", candidates);
    }
    put_sampling(&mut object, &request.sampling);
    put_format(&mut object, &request.response_format, codec.server);
    object.flag("echo", request.echo);
    // Candidates are ranked by log-probability.
    let ranked = (request.best_of > request.n).then_some(0);
    object.optional_integer("logprobs", request.logprobs.or(ranked));
    object.optional_integer("prompt_logprobs", request.prompt_logprobs);
    if request.keep_special_tokens {
        object.boolean("skip_special_tokens", false);
    }
    object.flag("return_token_ids", request.return_token_ids);
    object.flag("return_tokens_as_token_ids", request.token_names == TokenNames::Ids);
    put_tail(&mut object, request.prompt_tail);
    let user = request.user.as_deref().map(|user| identifiers::user(codec.server.api(), user));
    object.optional("user", user.as_deref());
    object.optional("cache_salt", request.cache_salt.as_deref());
    object.optional_integer("priority", Some(request.priority).filter(|priority| *priority != 0));
    put_stream(&mut object, request.stream.is_some());
    object.close();
    Ok(out.into())
}

/// Writes the prompts: one as it is, several as a list of texts or of lists of token ids.
pub(super) fn put_prompts(out: &mut BytesMut, prompts: &[Prompt], param: &str) -> Result<(), ApiError> {
    let tokens = prompts.iter().filter(|prompt| matches!(prompt, Prompt::Tokens(_))).count();
    if tokens != 0 && tokens != prompts.len() {
        let message = format!("{param}: texts and token ids cannot be mixed for this provider");
        return Err(ApiError::unsupported_value(param, message));
    }
    let put = |out: &mut BytesMut, prompt: &Prompt| match prompt {
        Prompt::Text(text) => write::string(out, text),
        Prompt::Tokens(ids) => write::integers(out, ids),
    };
    match prompts {
        [one] => put(out, one),
        all => list(out, all, put),
    }
    Ok(())
}

/// Decoder of chunks, or of one whole answer.
pub(super) struct CompletionReader {
    choices: Vec<Choice>,
    usage: Option<Usage>,
}

#[derive(Clone, Default)]
struct Choice {
    /// True if the choice was in any chunk.
    spoken: bool,
    finish: Option<(FinishReason, Option<StopCause>)>,
}

#[derive(Default)]
struct Said {
    index: Option<u64>,
    text: String,
    logprobs: Vec<TokenLogprob>,
    tokens: Vec<u32>,
    finish: Option<String>,
    stop: Option<StopCause>,
}

impl CompletionReader {
    /// Creates the decoder for the answer to `request`.
    pub(super) fn new(request: &CompleteRequest) -> Self {
        let choices = request.prompts.len() * request.best_of.max(request.n) as usize;
        Self { choices: vec![Choice::default(); choices], usage: None }
    }

    fn said(&mut self, index: u64, said: Said, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let Some(known) = usize::try_from(index).ok().and_then(|index| self.choices.get_mut(index)) else {
            return Ok(());
        };
        known.spoken = true;
        let choice = index as u32;
        if !(said.text.is_empty() && said.logprobs.is_empty() && said.tokens.is_empty()) {
            let logprobs = with_ids(said.logprobs, &said.tokens);
            out.push(ChatEvent::Text { choice, text: said.text, logprobs, tokens: said.tokens });
        }
        let Some(word) = said.finish else { return Ok(()) };
        match ended(&word) {
            None => Ok(()),
            Some(Ended::Finish(reason)) => {
                known.finish = Some((reason, said.stop));
                Ok(())
            }
            Some(Ended::Fault(class)) => {
                let message = "The provider gave the answer up before it was complete.";
                Err(ProviderFault::new(class, message).code(word))
            }
        }
    }

    fn finish(&mut self, out: &mut Vec<ChatEvent>) {
        for (choice, known) in (0..).zip(&mut self.choices) {
            let (reason, stop) = known.finish.take().unwrap_or((FinishReason::Stop, None));
            out.push(ChatEvent::Finish { choice, reason, stop });
        }
        out.extend(self.usage.map(ChatEvent::Usage));
    }
}

impl Answer for CompletionReader {
    fn take(&mut self, name: &[u8], json: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        fault::check(name, json)?;
        let (choices, usage) = read(json)?;
        self.usage = usage.or(self.usage);
        for (at, said) in choices.into_iter().enumerate() {
            self.said(said.index.unwrap_or(at as u64), said, out)?;
        }
        Ok(())
    }

    fn done(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if !self.choices.iter().all(|choice| choice.spoken) {
            return Err(truncated());
        }
        self.finish(out);
        Ok(())
    }

    fn cut(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if self.choices.iter().any(|choice| choice.finish.is_none()) {
            return Err(truncated());
        }
        self.finish(out);
        Ok(())
    }

    fn usage(&self) -> Option<Usage> {
        self.usage
    }
}

fn read(json: &[u8]) -> Result<(Vec<Said>, Option<Usage>), Fault> {
    let (mut choices, mut counts) = (Vec::new(), None);
    let mut reader = Reader::new(json)?;
    value::fields(&mut reader, |reader, key| {
        match key {
            "choices" => value::items(reader, |reader, _| {
                choices.push(said(reader)?);
                Ok(())
            })?,
            "usage" => counts = Some(usage::read(reader)?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    reader.end()?;
    Ok((choices, counts))
}

fn said(reader: &mut Reader<'_>) -> Result<Said, Fault> {
    let mut said = Said::default();
    value::fields(reader, |reader, key| {
        match key {
            "index" => said.index = value::count(reader)?,
            "text" => said.text = value::string(reader)?.map(Into::into).unwrap_or_default(),
            "logprobs" => said.logprobs = logprobs::legacy(reader)?,
            "token_ids" => said.tokens = value::token_ids(reader)?,
            "finish_reason" => said.finish = value::string(reader)?.map(Into::into),
            "stop_reason" => said.stop = stop(reader)?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(said)
}
