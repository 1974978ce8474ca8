//! Chat completions at a provider: the request's body, and the answer's chunks or whole JSON decoded into events.

use bytes::BytesMut;

use super::calls::{CallDelta, Calls};
use super::{ChatCodec, MaxTokensName, Server, fault, logprobs, messages, usage};
use crate::answer_body::{Answer, truncated};
use crate::answer_json::{self as value, Object, list};
use crate::called::callable;
use crate::identifiers;
use crate::provider_fields::refuse_chat;
use crate::schema_rules::{may_be_strict, strict_at_openai};
use penstock_types::codec::{FaultClass, ProviderFault};
use penstock_types::error::ApiError;
use penstock_types::event::{ChatEvent, FinishReason, StopCause, TokenLogprob, Usage};
use penstock_types::json::{Fault, Kind, Reader};
use penstock_types::request::{
    ChatRequest, PromptTail, ReasoningEffort, ResponseFormat, SamplingParams, TokenNames, Tool, ToolChoice, Verbosity,
};
use penstock_types::write;

/// Body of a chat completion request. Fields of the API are sent where they differ from the default, vLLM's extensions
/// where they were asked for; usage is always asked for.
pub(super) fn encode(codec: &ChatCodec, chat: &ChatRequest, model: &str) -> Result<Vec<u8>, ApiError> {
    refuse_chat(codec.server.api(), chat)?;
    let mut out = BytesMut::with_capacity(1024);
    let mut object = Object::open(&mut out);
    object.string("model", model);
    messages::put_all(codec, object.key("messages"), &chat.messages);
    put_tools(&mut object, chat, codec.server);
    put_format(&mut object, &chat.response_format, codec.server);
    if chat.n != 1 {
        object.integer("n", chat.n);
    }
    let name = match codec.max_tokens {
        MaxTokensName::MaxTokens => "max_tokens",
        MaxTokensName::MaxCompletionTokens => "max_completion_tokens",
    };
    object.optional_integer(name, chat.sampling.max_tokens);
    put_sampling(&mut object, &chat.sampling);
    if let Some(best) = chat.logprobs {
        object.boolean("logprobs", true);
        if best > 0 {
            object.integer("top_logprobs", best);
        }
    }
    object.optional("reasoning_effort", effort(chat));
    let user = chat.user.as_deref().map(|user| identifiers::user(codec.server.api(), user));
    object.optional("user", user.as_deref());
    if codec.server == Server::OpenAi {
        object.optional("prompt_cache_key", chat.cache_key.as_deref().map(identifiers::cache_key).as_deref());
        object.optional("verbosity", chat.verbosity.map(Verbosity::word));
    }
    put_extensions(&mut object, chat);
    put_stream(&mut object, chat.stream.is_some());
    object.close();
    Ok(out.into())
}

/// Writes the tools and the choice among them. Most compatible servers do not know `allowed_tools`: they are sent the
/// allowed ones alone.
fn put_tools(object: &mut Object<'_>, chat: &ChatRequest, server: Server) {
    if chat.tools.is_empty() {
        return;
    }
    let narrowed = server == Server::Compatible;
    let shown: Vec<&Tool> = if narrowed { callable(chat) } else { chat.tools.iter().collect() };
    list(object.key("tools"), &shown, |out, tool| {
        if server != Server::OpenAi || !tool.strict {
            return out.extend_from_slice(tool.json.as_bytes());
        }
        let given = tool.parameters.as_deref();
        let held = strict_at_openai(given.unwrap_or("{}"));
        if held.is_some() && held.as_deref() == given {
            return out.extend_from_slice(tool.json.as_bytes());
        }
        let Tool { name, description, parameters, .. } = (*tool).clone();
        let (strict, parameters) = (held.is_some(), held.or(parameters));
        out.extend_from_slice(Tool::function(name, description, parameters, strict).json.as_bytes());
    });
    match &chat.tool_choice {
        ToolChoice::Auto => {}
        ToolChoice::None => object.string("tool_choice", "none"),
        ToolChoice::Required => object.string("tool_choice", "required"),
        ToolChoice::Named(name) => {
            let mut choice = Object::open(object.key("tool_choice"));
            choice.string("type", "function");
            let mut function = Object::open(choice.key("function"));
            function.string("name", name);
            function.close();
            choice.close();
        }
        ToolChoice::Allowed { required: false, .. } if narrowed => {}
        ToolChoice::Allowed { required: true, .. } if narrowed => object.string("tool_choice", "required"),
        ToolChoice::Allowed { names, required } => {
            let mut choice = Object::open(object.key("tool_choice"));
            choice.string("type", "allowed_tools");
            let mut allowed = Object::open(choice.key("allowed_tools"));
            allowed.string("mode", if *required { "required" } else { "auto" });
            list(allowed.key("tools"), names, |out, name| {
                let mut tool = Object::open(out);
                tool.string("type", "function");
                let mut function = Object::open(tool.key("function"));
                function.string("name", name);
                function.close();
                tool.close();
            });
            allowed.close();
            choice.close();
        }
    }
    if !chat.parallel_tool_calls {
        object.boolean("parallel_tool_calls", false);
    }
}

pub(super) fn put_format(object: &mut Object<'_>, format: &ResponseFormat, server: Server) {
    match format {
        ResponseFormat::Text => {}
        ResponseFormat::JsonObject => object.raw("response_format", r#"{"type":"json_object"}"#),
        ResponseFormat::JsonSchema { name, description, schema, strict } => {
            let mut format = Object::open(object.key("response_format"));
            format.string("type", "json_schema");
            let mut inner = Object::open(format.key("json_schema"));
            inner.string("name", name);
            inner.optional("description", description.as_deref());
            // Other servers hold an answer to every keyword that they know.
            let held = match server {
                Server::OpenAi if *strict => strict_at_openai(schema),
                _ => (*strict && may_be_strict(schema, false)).then(|| schema.clone()),
            };
            inner.raw("schema", held.as_ref().unwrap_or(schema));
            inner.flag("strict", held.is_some());
            inner.close();
            format.close();
        }
        ResponseFormat::Regex(expression) => put_constraint(object, |outputs| outputs.string("regex", expression)),
        ResponseFormat::Choice(choices) => put_constraint(object, |outputs| outputs.strings("choice", choices)),
        ResponseFormat::Grammar { text, .. } => put_constraint(object, |outputs| outputs.string("grammar", text)),
        // The text is an object without its type; vLLM and SGLang read it here.
        ResponseFormat::StructuralTag(tag) => {
            let format = object.key("response_format");
            format.extend_from_slice(br#"{"type":"structural_tag","#);
            format.extend_from_slice(&tag.as_bytes()[1..]);
        }
    }
}

/// Writes a constraint that vLLM's own field carries (`structured_outputs`).
fn put_constraint(object: &mut Object<'_>, put: impl FnOnce(&mut Object<'_>)) {
    let mut outputs = Object::open(object.key("structured_outputs"));
    put(&mut outputs);
    outputs.close();
}

/// Writes the sampling fields, except for the bound of the answer, whose field name depends on the provider.
pub(super) fn put_sampling(object: &mut Object<'_>, sampling: &SamplingParams) {
    object.optional_number("temperature", sampling.temperature);
    object.optional_number("top_p", sampling.top_p);
    for (name, value) in
        [("presence_penalty", sampling.presence_penalty), ("frequency_penalty", sampling.frequency_penalty)]
    {
        object.optional_number(name, Some(value).filter(|value| *value != 0.0));
    }
    if !sampling.logit_bias.is_empty() {
        let mut biases = Object::open(object.key("logit_bias"));
        for (token, bias) in &sampling.logit_bias {
            biases.number(&token.to_string(), *bias);
        }
        biases.close();
    }
    // Signed: a seed above 2^63 was given as a negative one, or means the same as one.
    object.optional_integer("seed", sampling.seed.map(|seed| seed as i64));
    if !sampling.stop.is_empty() {
        object.strings("stop", &sampling.stop);
    }
    object.optional_integer("top_k", sampling.top_k);
    object.optional_number("min_p", sampling.min_p);
    object.optional_number("repetition_penalty", sampling.repetition_penalty);
    object.optional_integer("min_tokens", Some(sampling.min_tokens).filter(|tokens| *tokens > 0));
    object.flag("ignore_eos", sampling.ignore_eos);
    let lists = [
        ("stop_token_ids", &sampling.stop_token_ids),
        ("allowed_token_ids", &sampling.allowed_token_ids),
        ("logprob_token_ids", &sampling.logprob_token_ids),
    ];
    for (name, ids) in lists {
        if !ids.is_empty() {
            write::integers(object.key(name), ids);
        }
    }
    object.flag("include_stop_str_in_output", sampling.include_stop);
    if !sampling.bad_words.is_empty() {
        object.strings("bad_words", &sampling.bad_words);
    }
}

/// Writes the part of the prompt to keep (`truncate_prompt_tokens`).
pub(super) fn put_tail(object: &mut Object<'_>, tail: Option<PromptTail>) {
    match tail {
        None => {}
        Some(PromptTail::Fitting) => object.raw("truncate_prompt_tokens", "-1"),
        Some(PromptTail::Tokens(tokens)) => object.integer("truncate_prompt_tokens", tokens),
    }
}

fn put_extensions(object: &mut Object<'_>, chat: &ChatRequest) {
    object.optional_integer("prompt_logprobs", chat.prompt_logprobs);
    if let Some(kwargs) = &chat.template_kwargs {
        object.raw("chat_template_kwargs", kwargs);
    }
    if !chat.add_generation_prompt {
        object.boolean("add_generation_prompt", false);
    }
    object.flag("continue_final_message", chat.continue_final_message);
    if chat.keep_special_tokens {
        object.boolean("skip_special_tokens", false);
    }
    object.flag("return_token_ids", chat.return_token_ids);
    object.flag("return_tokens_as_token_ids", chat.token_names == TokenNames::Ids);
    put_tail(object, chat.prompt_tail);
    object.flag("echo", chat.echo);
    object.optional("cache_salt", chat.cache_salt.as_deref());
    object.optional_integer("priority", Some(chat.priority).filter(|priority| *priority != 0));
}

/// Writes `stream`, and asks for usage with it.
pub(super) fn put_stream(object: &mut Object<'_>, stream: bool) {
    if stream {
        object.boolean("stream", true);
        object.raw("stream_options", r#"{"include_usage":true}"#);
    }
}

/// Value of `reasoning_effort`, from the effort or, without one, from the allowed tokens.
pub(crate) fn effort(chat: &ChatRequest) -> Option<&'static str> {
    match (chat.reasoning_effort, chat.reasoning_tokens_max) {
        (Some(ReasoningEffort::None), _) | (None, Some(0)) => Some("none"),
        (Some(ReasoningEffort::Minimal), _) => Some("minimal"),
        (Some(ReasoningEffort::Low), _) | (None, Some(1..=1_024)) => Some("low"),
        (Some(ReasoningEffort::Medium), _) | (None, Some(1_025..=8_192)) => Some("medium"),
        (Some(ReasoningEffort::High), _) | (None, Some(_)) => Some("high"),
        (Some(ReasoningEffort::Max), _) => Some("xhigh"),
        (None, None) => None,
    }
}

/// Meaning of a provider's finish word.
pub(super) enum Ended {
    /// The choice ended with an answer.
    Finish(FinishReason),
    /// The choice has no answer; the attempt failed.
    Fault(FaultClass),
}

/// Meaning of `finish_reason`; `None` if the word says that the choice goes on.
pub(super) fn ended(word: &str) -> Option<Ended> {
    use FinishReason::{ContentFilter, Length, Stop, ToolCalls};
    let reason = match word.to_ascii_lowercase().as_str() {
        "" | "null" | "none" => return None,
        "length" | "max_tokens" | "max_length" | "model_length" | "model_context_window_exceeded" => Length,
        "tool_calls" | "tool_call" | "function_call" | "tool_use" => ToolCalls,
        "content_filter" | "content_filtered" | "sensitive" | "safety" | "recitation" | "refusal" => ContentFilter,
        "insufficient_system_resource" => return Some(Ended::Fault(FaultClass::Overloaded)),
        "error" | "network_error" => return Some(Ended::Fault(FaultClass::Server)),
        "abort" | "aborted" | "cancelled" | "canceled" => return Some(Ended::Fault(FaultClass::Truncated)),
        _ => Stop,
    };
    Some(Ended::Finish(reason))
}

/// Decoder of chunks, or of one whole answer, which counts as a single chunk with everything.
pub(super) struct ChatReader {
    id: String,
    choices: Vec<Choice>,
    usage: Option<Usage>,
    prompt_logprobs: bool,
    prompt: Prompt,
}

#[derive(Default)]
struct Choice {
    /// True if the choice was in any chunk.
    spoken: bool,
    calls: Calls,
    finish: Option<(FinishReason, Option<StopCause>)>,
}

#[derive(Default)]
struct Prompt {
    tokens: Vec<u32>,
    places: Vec<logprobs::Position>,
}

/// One element of a chunk's `choices` list.
#[derive(Default)]
struct Said {
    index: Option<u64>,
    delta: Delta,
    logprobs: Vec<TokenLogprob>,
    tokens: Vec<u32>,
    finish: Option<String>,
    stop: Option<StopCause>,
    usage: Option<Usage>,
}

#[derive(Default)]
struct Delta {
    text: String,
    reasoning: Option<String>,
    refusal: Option<String>,
    calls: Vec<CallDelta>,
}

/// Fields of a chunk besides its choices.
#[derive(Default)]
struct Chunk {
    id: Option<String>,
    usage: Option<Usage>,
    choices: Vec<Said>,
    prompt_tokens: Vec<u32>,
    prompt_logprobs: Vec<logprobs::Position>,
}

impl ChatReader {
    /// Creates the decoder for the answer to `chat`.
    pub(super) fn new(chat: &ChatRequest) -> Self {
        let choices = (0..chat.n).map(|_| Choice::default()).collect();
        let prompt_logprobs = chat.prompt_logprobs.is_some() || chat.return_token_ids;
        Self { id: String::new(), choices, usage: None, prompt_logprobs, prompt: Prompt::default() }
    }

    fn chunk(&mut self, chunk: Chunk, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if let Some(id) = chunk.id {
            self.id = id;
        }
        self.usage = chunk.usage.or(self.usage);
        if self.prompt_logprobs && !(chunk.prompt_tokens.is_empty() && chunk.prompt_logprobs.is_empty()) {
            self.prompt = Prompt { tokens: chunk.prompt_tokens, places: chunk.prompt_logprobs };
        }
        for (at, said) in chunk.choices.into_iter().enumerate() {
            if !(self.prompt.tokens.is_empty() && self.prompt.places.is_empty()) {
                let Prompt { tokens, places } = std::mem::take(&mut self.prompt);
                let logprobs = logprobs::prompt_tokens(places, &tokens);
                out.push(ChatEvent::Prompt { choice: 0, text: String::new(), logprobs, tokens });
            }
            self.said(said.index.unwrap_or(at as u64), said, out)?;
        }
        Ok(())
    }

    fn said(&mut self, index: u64, said: Said, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        self.usage = said.usage.or(self.usage);
        let Some(choice) = usize::try_from(index).ok().and_then(|index| self.choices.get_mut(index)) else {
            return Ok(()); // not one that was asked for
        };
        choice.spoken = true;
        let index = index as u32;
        let Delta { text, reasoning, refusal, calls } = said.delta;
        if let Some(text) = reasoning.filter(|text| !text.is_empty()) {
            out.push(ChatEvent::Reasoning { choice: index, text });
        }
        if !(text.is_empty() && said.logprobs.is_empty() && said.tokens.is_empty()) {
            let logprobs = with_ids(said.logprobs, &said.tokens);
            out.push(ChatEvent::Text { choice: index, text, logprobs, tokens: said.tokens });
        }
        if let Some(text) = refusal.filter(|text| !text.is_empty()) {
            out.push(ChatEvent::Refusal { choice: index, text });
        }
        for call in calls {
            choice.calls.take(call, &self.id, index, out)?;
        }
        let Some(word) = said.finish else { return Ok(()) };
        match ended(&word) {
            None => {}
            Some(Ended::Finish(reason)) => choice.finish = Some((reason, said.stop)),
            Some(Ended::Fault(class)) => {
                let message = "The provider gave the answer up before it was complete.";
                return Err(ProviderFault::new(class, message).code(word));
            }
        }
        Ok(())
    }

    /// Ends every choice, at the end of the answer and not with its own chunk: some providers send more after it.
    fn finish(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        for (index, choice) in (0..).zip(&self.choices) {
            choice.calls.finish(index, out)?;
            let (reason, stop) = choice.finish.clone().unwrap_or((FinishReason::Stop, None));
            let reason = match reason {
                FinishReason::Stop if !choice.calls.is_empty() => FinishReason::ToolCalls,
                reason => reason,
            };
            let stop = stop.filter(|_| reason == FinishReason::Stop);
            out.push(ChatEvent::Finish { choice: index, reason, stop });
        }
        out.extend(self.usage.map(ChatEvent::Usage));
        Ok(())
    }
}

impl Answer for ChatReader {
    fn take(&mut self, name: &[u8], json: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        fault::check(name, json)?;
        let chunk = read(json)?;
        self.chunk(chunk, out)
    }

    fn done(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if self.choices.iter().all(|choice| choice.spoken) { self.finish(out) } else { Err(truncated()) }
    }

    fn cut(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if self.choices.iter().all(|choice| choice.finish.is_some()) { self.finish(out) } else { Err(truncated()) }
    }

    fn usage(&self) -> Option<Usage> {
        self.usage
    }
}

/// Fills in the ids of tokens that have none, where the numbers match.
pub(super) fn with_ids(mut logprobs: Vec<TokenLogprob>, ids: &[u32]) -> Vec<TokenLogprob> {
    if logprobs.len() == ids.len() {
        logprobs.iter_mut().zip(ids).for_each(|(token, id)| token.token = *id);
    }
    logprobs
}

fn read(json: &[u8]) -> Result<Chunk, Fault> {
    let mut chunk = Chunk::default();
    let mut reader = Reader::new(json)?;
    value::fields(&mut reader, |reader, key| {
        match key {
            "id" => chunk.id = value::string(reader)?.map(Into::into),
            "choices" => value::items(reader, |reader, _| {
                chunk.choices.push(said(reader)?);
                Ok(())
            })?,
            "usage" => chunk.usage = Some(usage::read(reader)?),
            // Groq's field for usage.
            "x_groq" => chunk.usage = usage::groq(reader)?.or(chunk.usage),
            "prompt_token_ids" => chunk.prompt_tokens = value::token_ids(reader)?,
            "prompt_logprobs" => chunk.prompt_logprobs = logprobs::prompt(reader)?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    reader.end()?;
    Ok(chunk)
}

fn said(reader: &mut Reader<'_>) -> Result<Said, Fault> {
    let mut said = Said::default();
    value::fields(reader, |reader, key| {
        match key {
            "index" => said.index = value::count(reader)?,
            "delta" | "message" => delta(reader, &mut said.delta)?,
            "logprobs" => said.logprobs = logprobs::chat(reader)?,
            "token_ids" => said.tokens = value::token_ids(reader)?,
            "finish_reason" => said.finish = value::string(reader)?.map(Into::into),
            "stop_reason" => said.stop = stop(reader)?,
            // Moonshot's field for usage.
            "usage" => said.usage = Some(usage::read(reader)?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(said)
}

/// Reads vLLM's `stop_reason`: the string or token that was met.
pub(super) fn stop(reader: &mut Reader<'_>) -> Result<Option<StopCause>, Fault> {
    match reader.kind()? {
        Kind::String => Ok(value::string(reader)?.map(|text| StopCause::Text(text.into()))),
        _ => Ok(value::count(reader)?.and_then(|id| u32::try_from(id).ok()).map(StopCause::Token)),
    }
}

fn delta(reader: &mut Reader<'_>, delta: &mut Delta) -> Result<(), Fault> {
    value::fields(reader, |reader, key| {
        match key {
            "content" => content(reader, delta)?,
            // Two names of the same text.
            "reasoning" | "reasoning_content" => {
                let text = value::string(reader)?.map(|text| text.into_owned());
                delta.reasoning = text.filter(|text| !text.is_empty()).or(delta.reasoning.take());
            }
            "refusal" => delta.refusal = value::string(reader)?.map(Into::into),
            "tool_calls" => value::items(reader, |reader, _| {
                delta.calls.push(CallDelta::read(reader)?);
                Ok(())
            })?,
            "function_call" => {
                let mut call = CallDelta::default();
                call.function(reader)?;
                delta.calls.push(call);
            }
            _ => reader.skip()?,
        }
        Ok(())
    })
}

/// Reads a content value: a string, or parts of type `text` and `thinking` (Mistral's).
fn content(reader: &mut Reader<'_>, delta: &mut Delta) -> Result<(), Fault> {
    match reader.kind()? {
        Kind::String => delta.text.push_str(&reader.string()?),
        Kind::Array => reader.array(|reader, _| {
            value::fields(reader, |reader, key| {
                match key {
                    "text" => delta.text.extend(value::string(reader)?),
                    "thinking" => {
                        let reasoning = delta.reasoning.get_or_insert_default();
                        thinking(reader, reasoning)?;
                    }
                    _ => reader.skip()?,
                }
                Ok(())
            })
        })?,
        _ => reader.skip()?,
    }
    Ok(())
}

fn thinking(reader: &mut Reader<'_>, out: &mut String) -> Result<(), Fault> {
    if reader.kind()? == Kind::String {
        out.push_str(&reader.string()?);
        return Ok(());
    }
    value::items(reader, |reader, _| {
        value::fields(reader, |reader, key| {
            match key {
                "text" => out.extend(value::string(reader)?),
                _ => reader.skip()?,
            }
            Ok(())
        })
    })
}
