//! Requests and answers of this API from its other side: how a plugin's edits of a request are written again, and how the bytes of
//! an answer are read where a plugin made them.

use bytes::{BufMut, BytesMut};

use super::answer_lines::{Lines, VectorBody};
use crate::answer_json::{Object, list};
use crate::openai::provider::fault::fault_body;
use penstock_types::codec::{AnswerDecoder, ProviderCall, ProviderCodec, ProviderFault};
use penstock_types::error::ApiError;
use penstock_types::request::{
    ChatRequest, CompleteRequest, EmbedRequest, ImageSource, Message, Part, Prompt, ReasoningEffort, Request,
    ResponseFormat, Role, SamplingParams, ToolChoice,
};

/// Codec of `/api/chat`, of `/api/generate` with `raw`, and of `/api/embed`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Codec;

impl ProviderCodec for Codec {
    fn encode(&self, request: &Request, model: &str) -> Result<ProviderCall, ApiError> {
        let (path, body) = match request {
            Request::Chat(chat) => ("/api/chat", encode_chat(chat, model)?),
            Request::Complete(complete) => ("/api/generate", encode_complete(complete, model)?),
            Request::Embed(embed) => ("/api/embed", encode_embed(embed, model)?),
            Request::Rerank(_) => return Err(refused("model", "this API makes no scores")),
        };
        Ok(ProviderCall { path: path.to_owned(), body })
    }

    fn decoder(&self, request: &Request) -> Box<dyn AnswerDecoder> {
        match request {
            Request::Embed(embed) => Box::new(VectorBody::new(embed.inputs.len())),
            Request::Chat(_) | Request::Complete(_) | Request::Rerank(_) => Box::new(Lines::default()),
        }
    }

    fn fault(&self, status: u16, body: &[u8]) -> ProviderFault {
        fault_body(status, body)
    }
}

fn refused(field: &str, why: &str) -> ApiError {
    ApiError::unsupported(field, format!("{field}: {why}"))
}

fn encode_chat(chat: &ChatRequest, model: &str) -> Result<Vec<u8>, ApiError> {
    if chat.n != 1 {
        return Err(refused("n", "this API has one choice"));
    }
    if !matches!(chat.tool_choice, ToolChoice::Auto | ToolChoice::None) {
        return Err(refused("tool_choice", "this API demands no call"));
    }
    let mut out = BytesMut::with_capacity(1024);
    let mut object = Object::open(&mut out);
    object.string("model", model);
    list(object.key("messages"), &chat.messages, put_message);
    if chat.tool_choice != ToolChoice::None && !chat.tools.is_empty() {
        list(object.key("tools"), &chat.tools, |out, tool| out.put_slice(tool.json.as_bytes()));
    }
    match chat.reasoning_effort {
        None => {}
        Some(ReasoningEffort::None) => object.boolean("think", false),
        Some(ReasoningEffort::Minimal | ReasoningEffort::Low) => object.string("think", "low"),
        Some(ReasoningEffort::Medium) => object.boolean("think", true),
        Some(ReasoningEffort::High) => object.string("think", "high"),
        Some(ReasoningEffort::Max) => object.string("think", "max"),
    }
    put_common(&mut object, &chat.response_format, &chat.sampling, chat.stream.is_some(), chat.logprobs)?;
    object.close();
    Ok(out.into())
}

fn encode_complete(complete: &CompleteRequest, model: &str) -> Result<Vec<u8>, ApiError> {
    let [Prompt::Text(prompt)] = &complete.prompts[..] else {
        return Err(refused("prompt", "this API has one text"));
    };
    if complete.n != 1 || complete.best_of != 1 || complete.echo || complete.suffix.is_some() {
        return Err(refused("prompt", "this API has no further choices, no echo and no suffix"));
    }
    let mut out = BytesMut::with_capacity(256 + prompt.len());
    let mut object = Object::open(&mut out);
    object.string("model", model);
    object.string("prompt", prompt);
    object.boolean("raw", true);
    let (format, stream) = (&complete.response_format, complete.stream.is_some());
    put_common(&mut object, format, &complete.sampling, stream, complete.logprobs)?;
    object.close();
    Ok(out.into())
}

fn encode_embed(embed: &EmbedRequest, model: &str) -> Result<Vec<u8>, ApiError> {
    let text = |prompt: &Prompt| match prompt {
        Prompt::Text(text) => Ok(text.clone()),
        Prompt::Tokens(_) => Err(refused("input", "this API takes no token ids")),
    };
    let inputs = embed.inputs.iter().map(text).collect::<Result<Vec<_>, _>>()?;
    let mut out = BytesMut::with_capacity(256);
    let mut object = Object::open(&mut out);
    object.string("model", model);
    object.strings("input", &inputs);
    object.optional_integer("dimensions", embed.dimensions);
    object.close();
    Ok(out.into())
}

fn put_common(
    object: &mut Object<'_>,
    format: &ResponseFormat,
    sampling: &SamplingParams,
    stream: bool,
    logprobs: Option<u32>,
) -> Result<(), ApiError> {
    match format {
        ResponseFormat::Text => {}
        ResponseFormat::JsonObject => object.string("format", "json"),
        ResponseFormat::JsonSchema { schema, .. } => object.raw("format", schema),
        _ => return Err(refused("format", "only JSON and JSON schemas")),
    }
    object.boolean("stream", stream);
    if let Some(top) = logprobs {
        object.boolean("logprobs", true);
        object.integer("top_logprobs", top);
    }
    let mut options = BytesMut::new();
    put_options(&mut options, sampling);
    object.key("options").put_slice(&options);
    Ok(())
}

fn put_options(out: &mut BytesMut, sampling: &SamplingParams) {
    let mut object = Object::open(out);
    object.optional_number("temperature", sampling.temperature);
    object.optional_number("top_p", sampling.top_p);
    object.optional_number("min_p", sampling.min_p);
    object.optional_integer("top_k", sampling.top_k);
    object.optional_number("presence_penalty", Some(sampling.presence_penalty).filter(|value| *value != 0.0));
    object.optional_number("frequency_penalty", Some(sampling.frequency_penalty).filter(|value| *value != 0.0));
    object.optional_number("repeat_penalty", sampling.repetition_penalty);
    object.optional_integer("seed", sampling.seed);
    object.optional_integer("num_predict", sampling.max_tokens);
    if !sampling.stop.is_empty() {
        object.strings("stop", &sampling.stop);
    }
    object.close();
}

fn put_message(out: &mut BytesMut, message: &Message) {
    let mut object = Object::open(out);
    let role = match message.role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    };
    object.string("role", role);
    object.string("content", message.content.as_deref().unwrap_or_default());
    object.optional("thinking", message.reasoning.as_deref());
    let images: Vec<String> = message.parts.iter().filter_map(image).collect();
    if !images.is_empty() {
        object.strings("images", &images);
    }
    if !message.tool_calls.is_empty() {
        list(object.key("tool_calls"), &message.tool_calls, |out, call| {
            let mut entry = Object::open(out);
            entry.string("id", &call.id);
            let mut function = Object::open(entry.key("function"));
            function.string("name", &call.name);
            function.raw("arguments", &call.arguments);
            function.close();
            entry.close();
        });
    }
    object.optional("tool_call_id", message.tool_call_id.as_deref());
    object.optional("tool_name", message.name.as_deref().filter(|_| message.role == Role::Tool));
    object.close();
}

fn image(part: &Part) -> Option<String> {
    match part {
        Part::Image { source: ImageSource::Data { base64, .. }, .. } => Some(base64.clone()),
        // A body of this API never held one.
        Part::Image { source: ImageSource::Url(_), .. } | Part::Text(_) => None,
    }
}
