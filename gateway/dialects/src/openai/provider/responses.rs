//! OpenAI's Responses API as a provider: a chat request becomes items, and the API's items and events become chat
//! events.
//!
//! The API sends each item twice, in pieces and whole. Content that came in pieces is not taken again, and content
//! that did not is taken from the whole item, so servers that stream less than OpenAI work too. Nothing is kept at the
//! provider (`store: false`).

use std::collections::BTreeMap;

use bytes::{BufMut, BytesMut};

use super::calls::signature;
use super::chat::effort;
use super::messages::{put_signature, put_source};
use super::{ChatCodec, Server, fault, logprobs, usage};
use crate::answer_body::{Answer, Body, truncated};
use crate::answer_json::{self as value, Object, list};
use crate::identifiers;
use crate::packed_thinking::{Thought, signed_by};
use crate::provider_fields::{Api, refuse_chat};
use crate::reasoning_maker::{Maker, kept_openais, openais};
use crate::schema_rules::strict_at_openai;
use penstock_types::codec::{AnswerDecoder, FaultClass, ProviderCall, ProviderCodec, ProviderFault};
use penstock_types::error::ApiError;
use penstock_types::event::{ChatEvent, FinishReason, TokenLogprob, Usage};
use penstock_types::json::{Fault, Kind, Reader};
use penstock_types::json_text::compacted;
use penstock_types::request::{ChatRequest, Message, Part, Request, ResponseFormat, Role, Tool, ToolChoice, Verbosity};
use penstock_types::write;

/// Codec of providers asked through `/responses`; embeddings go through `/embeddings`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponsesCodec {
    /// Kind of server: OpenAI refuses the signature of a call.
    pub server: Server,
}

impl ResponsesCodec {
    /// Settings for OpenAI itself (and Azure), which refuses unknown fields.
    pub fn strict() -> Self {
        Self { server: Server::OpenAi }
    }
}

impl ProviderCodec for ResponsesCodec {
    fn encode(&self, request: &Request, model: &str) -> Result<ProviderCall, ApiError> {
        match request {
            Request::Chat(chat) => {
                refuse_chat(Api::Responses, chat)?;
                Ok(ProviderCall { path: "/responses".to_owned(), body: encode(chat, model, self.server) })
            }
            Request::Embed(_) => ChatCodec::strict().encode(request, model),
            Request::Complete(_) | Request::Rerank(_) => {
                let message = "model: this provider is only asked for chat and for vectors";
                Err(ApiError::unsupported_value("model", message))
            }
        }
    }

    fn decoder(&self, request: &Request) -> Box<dyn AnswerDecoder> {
        match request {
            Request::Chat(_) | Request::Complete(_) => Box::new(Body::new(ResponseReader::default())),
            Request::Embed(_) | Request::Rerank(_) => ChatCodec::strict().decoder(request),
        }
    }

    fn fault(&self, status: u16, body: &[u8]) -> ProviderFault {
        fault::fault_body(status, body)
    }
}

fn encode(chat: &ChatRequest, model: &str, server: Server) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(1024);
    let mut object = Object::open(&mut out);
    object.string("model", model);
    put_input(object.key("input"), &chat.messages, server);
    object.boolean("store", false);
    put_tools(&mut object, chat);
    put_text(&mut object, chat);
    object.optional_integer("max_output_tokens", chat.sampling.max_tokens);
    object.optional_number("temperature", chat.sampling.temperature);
    object.optional_number("top_p", chat.sampling.top_p);
    let effort = effort(chat);
    if let Some(effort) = effort {
        let mut reasoning = Object::open(object.key("reasoning"));
        reasoning.string("effort", effort);
        reasoning.close();
    }
    let mut include = Vec::new();
    // Models that do not reason refuse to be asked for it.
    let reasons = effort.is_some_and(|effort| effort != "none");
    if reasons || chat.messages.iter().any(|message| !signed_by(Maker::OpenAi, message).is_empty()) {
        include.push("reasoning.encrypted_content".to_owned());
    }
    if let Some(best) = chat.logprobs {
        include.push("message.output_text.logprobs".to_owned());
        object.integer("top_logprobs", best);
    }
    if !include.is_empty() {
        object.strings("include", &include);
    }
    let user = chat.user.as_deref().map(|user| identifiers::user(Api::Responses, user));
    object.optional("user", user.as_deref());
    object.optional("prompt_cache_key", chat.cache_key.as_deref().map(identifiers::cache_key).as_deref());
    if chat.truncates {
        object.string("truncation", "auto");
    }
    object.flag("stream", chat.stream.is_some());
    object.close();
    out.into()
}

fn put_input(out: &mut BytesMut, messages: &[Message], server: Server) {
    out.put_u8(b'[');
    let mut first = true;
    for message in messages {
        put_items(message, server, &mut |put| {
            if !std::mem::take(&mut first) {
                out.put_u8(b',');
            }
            let mut object = Object::open(out);
            put(&mut object);
            object.close();
        });
    }
    out.put_u8(b']');
}

type PutItem<'a> = &'a mut dyn FnMut(&mut dyn FnMut(&mut Object<'_>));

/// Writes the items of one message: reasoning that the provider wants back, text, calls; or the result of a call. The signature
/// of a call (Gemini's) goes to compatible servers alone: OpenAI refuses the field.
fn put_items(message: &Message, server: Server, item: PutItem<'_>) {
    if message.role == Role::Tool {
        return item(&mut |object| {
            object.string("type", "function_call_output");
            object.string("call_id", message.tool_call_id.as_deref().unwrap_or_default());
            put_content(object.key("output"), message);
        });
    }
    for thought in signed_by(Maker::OpenAi, message) {
        let Thought::Plain { text, signature: Some(signature) } = &thought else { continue };
        item(&mut |object| {
            object.string("type", "reasoning");
            let summary = if text.is_empty() { &[][..] } else { std::slice::from_ref(text) };
            list(object.key("summary"), summary, |out, text| {
                let mut part = Object::open(out);
                part.string("type", "summary_text");
                part.string("text", text);
                part.close();
            });
            object.string("encrypted_content", openais(signature));
        });
    }
    if message.content.is_some() || !message.parts.is_empty() {
        item(&mut |object| {
            let role = match message.role {
                Role::System => "system",
                Role::Assistant => "assistant",
                Role::User | Role::Tool => "user",
            };
            object.string("type", "message");
            object.string("role", role);
            put_content(object.key("content"), message);
        });
    }
    for call in &message.tool_calls {
        item(&mut |object| {
            object.string("type", "function_call");
            object.string("call_id", &call.id);
            object.string("name", &call.name);
            object.string("arguments", &call.arguments);
            if let Some(signature) = call.signature.as_ref().filter(|_| server == Server::Compatible) {
                put_signature(object, signature);
            }
        });
    }
}

fn put_content(out: &mut BytesMut, message: &Message) {
    if message.parts.is_empty() {
        return write::string(out, message.content.as_deref().unwrap_or_default());
    }
    list(out, &message.parts, |out, part| {
        let mut object = Object::open(out);
        match part {
            Part::Text(text) => {
                object.string("type", "input_text");
                object.string("text", text);
            }
            Part::Image { source, detail } => {
                object.string("type", "input_image");
                put_source(object.key("image_url"), source);
                object.string("detail", detail.as_deref().unwrap_or("auto"));
            }
        }
        object.close();
    });
}

fn put_tools(object: &mut Object<'_>, chat: &ChatRequest) {
    if chat.tools.is_empty() {
        return;
    }
    list(object.key("tools"), &chat.tools, |out, tool: &Tool| {
        let mut object = Object::open(out);
        object.string("type", "function");
        object.string("name", &tool.name);
        object.optional("description", tool.description.as_deref());
        let parameters = tool.parameters.as_deref().unwrap_or(r#"{"type":"object","properties":{}}"#);
        let held = if tool.strict { strict_at_openai(parameters) } else { None };
        object.raw("parameters", held.as_deref().unwrap_or(parameters));
        object.boolean("strict", held.is_some());
        object.close();
    });
    match &chat.tool_choice {
        ToolChoice::Auto => {}
        ToolChoice::None => object.string("tool_choice", "none"),
        ToolChoice::Required => object.string("tool_choice", "required"),
        ToolChoice::Named(name) => {
            let mut choice = Object::open(object.key("tool_choice"));
            choice.string("type", "function");
            choice.string("name", name);
            choice.close();
        }
        ToolChoice::Allowed { names, required } => {
            let mut choice = Object::open(object.key("tool_choice"));
            choice.string("type", "allowed_tools");
            choice.string("mode", if *required { "required" } else { "auto" });
            list(choice.key("tools"), names, |out, name| {
                let mut tool = Object::open(out);
                tool.string("type", "function");
                tool.string("name", name);
                tool.close();
            });
            choice.close();
        }
    }
    if !chat.parallel_tool_calls {
        object.boolean("parallel_tool_calls", false);
    }
}

/// Writes `text`: the form and the length of the answer, where the request asks for either.
fn put_text(object: &mut Object<'_>, chat: &ChatRequest) {
    let has_form = matches!(chat.response_format, ResponseFormat::JsonObject | ResponseFormat::JsonSchema { .. });
    if !has_form && chat.verbosity.is_none() {
        return;
    }
    let mut text = Object::open(object.key("text"));
    put_format(&mut text, &chat.response_format);
    text.optional("verbosity", chat.verbosity.map(Verbosity::word));
    text.close();
}

fn put_format(text: &mut Object<'_>, format: &ResponseFormat) {
    match format {
        ResponseFormat::Text => {}
        ResponseFormat::JsonObject => text.raw("format", r#"{"type":"json_object"}"#),
        ResponseFormat::JsonSchema { name, description, schema, strict } => {
            let mut format = Object::open(text.key("format"));
            format.string("type", "json_schema");
            format.string("name", name);
            format.optional("description", description.as_deref());
            let held = if *strict { strict_at_openai(schema) } else { None };
            format.raw("schema", held.as_ref().unwrap_or(schema));
            format.boolean("strict", held.is_some());
            format.close();
        }
        // Refused before.
        ResponseFormat::Regex(_)
        | ResponseFormat::Choice(_)
        | ResponseFormat::Grammar { .. }
        | ResponseFormat::StructuralTag(_) => {}
    }
}

/// Most items of one answer.
const ITEMS_MAX: usize = 4_096;

/// Decoder of events, or of one whole response.
#[derive(Default)]
struct ResponseReader {
    /// Content taken so far of each item, by the item's index.
    items: BTreeMap<u64, Seen>,
    calls: u32,
    usage: Option<Usage>,
    finish: Option<FinishReason>,
}

#[derive(Default)]
struct Seen {
    /// True if text, refusal, reasoning or arguments came in pieces.
    told: bool,
    /// Index of the item among the calls.
    call: Option<u32>,
    signed: bool,
}

/// Fields of all event types that are read.
#[derive(Default)]
struct Event {
    kind: Option<String>,
    at: u64,
    part: u64,
    delta: Option<String>,
    arguments: Option<String>,
    logprobs: Vec<TokenLogprob>,
    item: Option<Item>,
    response: Option<Whole>,
}

#[derive(Default)]
struct Item {
    kind: String,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    parts: Vec<ItemPart>,
    summary: Vec<ItemPart>,
    encrypted: Option<String>,
    signature: Option<String>,
}

#[derive(Default)]
struct ItemPart {
    text: String,
    refusal: String,
    logprobs: Vec<TokenLogprob>,
}

/// A response as a whole.
#[derive(Default)]
struct Whole {
    status: Option<String>,
    reason: Option<String>,
    output: Vec<Item>,
    usage: Option<Usage>,
    /// Error object as JSON text.
    error: Option<String>,
}

impl Answer for ResponseReader {
    fn take(&mut self, name: &[u8], json: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        fault::check(name, json)?;
        let event = event(json)?;
        match event.kind.as_deref() {
            None => self.whole(whole(&mut Reader::new(json).map_err(ProviderFault::from)?)?, out),
            Some("error") => Err(fault::fault_text(json)),
            Some("response.completed" | "response.incomplete" | "response.failed" | "response.cancelled") => {
                self.whole(event.response.unwrap_or_default(), out)
            }
            Some(_) => self.event(event, out),
        }
    }

    fn done(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let reason = self.finish.ok_or_else(truncated)?;
        out.push(ChatEvent::Finish { choice: 0, reason, stop: None });
        out.extend(self.usage.map(ChatEvent::Usage));
        Ok(())
    }

    fn cut(&mut self, _: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        Err(truncated())
    }

    fn ended(&self) -> bool {
        self.finish.is_some()
    }

    fn usage(&self) -> Option<Usage> {
        self.usage
    }
}

impl ResponseReader {
    fn event(&mut self, event: Event, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let Event { kind, at, part, delta, arguments, logprobs, item, .. } = event;
        let seen = self.seen(at)?;
        match (kind.as_deref().unwrap_or_default(), delta) {
            ("response.output_text.delta", Some(text)) => {
                seen.told = true;
                if !(text.is_empty() && logprobs.is_empty()) {
                    out.push(ChatEvent::Text { choice: 0, text, logprobs, tokens: Vec::new() });
                }
            }
            ("response.refusal.delta", Some(text)) => {
                seen.told = true;
                out.push(ChatEvent::Refusal { choice: 0, text });
            }
            ("response.reasoning_text.delta" | "response.reasoning_summary_text.delta", Some(text)) => {
                seen.told = true;
                out.push(ChatEvent::Reasoning { choice: 0, text });
            }
            ("response.reasoning_summary_part.added", _) if part > 0 => {
                out.push(ChatEvent::Reasoning { choice: 0, text: "\n\n".to_owned() });
            }
            ("response.function_call_arguments.delta", Some(json)) => {
                if let Some(call) = seen.call {
                    seen.told = true;
                    out.push(ChatEvent::ToolCallArguments { choice: 0, call, json });
                }
            }
            ("response.function_call_arguments.done", _) => self.all_arguments(at, arguments, out)?,
            ("response.output_item.added", _) => self.begin(at, item.unwrap_or_default(), out)?,
            ("response.output_item.done", _) => self.item(at, item.unwrap_or_default(), out)?,
            _ => {}
        }
        Ok(())
    }

    fn seen(&mut self, at: u64) -> Result<&mut Seen, ProviderFault> {
        if self.items.len() >= ITEMS_MAX && !self.items.contains_key(&at) {
            let message = format!("The provider's answer has more than {ITEMS_MAX} items.");
            return Err(ProviderFault::new(FaultClass::Garbled, message));
        }
        Ok(self.items.entry(at).or_default())
    }

    /// Begins a call; other items begin with their first content.
    fn begin(&mut self, at: u64, item: Item, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let calls = self.calls;
        let seen = self.seen(at)?;
        if item.kind != "function_call" || seen.call.is_some() {
            return Ok(());
        }
        let (Some(id), Some(name)) = (item.call_id, item.name) else {
            let message = "The provider's answer has a call without an id or a name.";
            return Err(ProviderFault::new(FaultClass::Garbled, message));
        };
        seen.call = Some(calls);
        self.calls += 1;
        out.push(ChatEvent::ToolCallStart { choice: 0, call: calls, id, name, signature: item.signature });
        Ok(())
    }

    fn all_arguments(
        &mut self,
        at: u64,
        arguments: Option<String>,
        out: &mut Vec<ChatEvent>,
    ) -> Result<(), ProviderFault> {
        let seen = self.seen(at)?;
        if let (Some(call), Some(json)) = (seen.call, arguments.filter(|json| !json.is_empty()))
            && !std::mem::replace(&mut seen.told, true)
        {
            out.push(ChatEvent::ToolCallArguments { choice: 0, call, json });
        }
        Ok(())
    }

    /// Takes a complete item: appends the content that did not come in pieces.
    fn item(&mut self, at: u64, mut item: Item, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        match item.kind.as_str() {
            "function_call" => {
                let arguments = item.arguments.take().filter(|json| !json.is_empty());
                self.begin(at, item, out)?;
                self.all_arguments(at, Some(arguments.unwrap_or_else(|| "{}".to_owned())), out)
            }
            "message" => {
                if std::mem::replace(&mut self.seen(at)?.told, true) {
                    return Ok(());
                }
                for ItemPart { text, refusal, logprobs } in item.parts {
                    if !(text.is_empty() && logprobs.is_empty()) {
                        out.push(ChatEvent::Text { choice: 0, text, logprobs, tokens: Vec::new() });
                    }
                    if !refusal.is_empty() {
                        out.push(ChatEvent::Refusal { choice: 0, text: refusal });
                    }
                }
                Ok(())
            }
            "reasoning" => {
                let seen = self.seen(at)?;
                let texts = if item.parts.is_empty() { item.summary } else { item.parts };
                let text = texts.into_iter().map(|part| part.text).collect::<Vec<_>>().join("\n\n");
                if !std::mem::replace(&mut seen.told, true) && !text.is_empty() {
                    out.push(ChatEvent::Reasoning { choice: 0, text });
                }
                if let Some(signature) = item.encrypted
                    && !std::mem::replace(&mut seen.signed, true)
                {
                    out.push(ChatEvent::ReasoningSignature { choice: 0, signature: kept_openais(signature) });
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn whole(&mut self, whole: Whole, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let status = whole.status.as_deref().unwrap_or_default();
        // Of a failed response too: what it has used is billed.
        self.usage = whole.usage.or(self.usage);
        let finish = match (status, whole.reason.as_deref()) {
            ("completed", _) => FinishReason::Stop,
            ("incomplete", Some("content_filter")) => FinishReason::ContentFilter,
            ("incomplete", _) => FinishReason::Length,
            ("failed", _) => return Err(failed(whole.error.as_deref())),
            ("", _) => return Err(truncated()),
            (other, _) => {
                let message = "The provider gave the answer up before it was complete.";
                return Err(ProviderFault::new(FaultClass::Truncated, message).code(other));
            }
        };
        for (at, item) in (0..).zip(whole.output) {
            self.item(at, item, out)?;
        }
        self.finish = Some(match finish {
            FinishReason::Stop if self.calls > 0 => FinishReason::ToolCalls,
            finish => finish,
        });
        Ok(())
    }
}

/// Fault of `response.error`; a generic one where the field is empty.
fn failed(error: Option<&str>) -> ProviderFault {
    match error {
        Some(json) => fault::fault_text(json.as_bytes()),
        None => ProviderFault::new(FaultClass::Server, "The provider failed."),
    }
}

fn event(json: &[u8]) -> Result<Event, Fault> {
    let mut event = Event::default();
    let mut reader = Reader::new(json)?;
    value::fields(&mut reader, |reader, key| {
        match key {
            "type" => event.kind = value::string(reader)?.map(Into::into),
            "output_index" => event.at = value::count(reader)?.unwrap_or(0),
            "summary_index" => event.part = value::count(reader)?.unwrap_or(0),
            "delta" => event.delta = value::string(reader)?.map(Into::into),
            "arguments" => event.arguments = value::string(reader)?.map(Into::into),
            "logprobs" => event.logprobs = logprobs::entries(reader)?,
            "item" => event.item = Some(item(reader)?),
            "response" => event.response = Some(whole(reader)?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    reader.end()?;
    Ok(event)
}

fn whole(reader: &mut Reader<'_>) -> Result<Whole, Fault> {
    let mut whole = Whole::default();
    value::fields(reader, |reader, key| {
        match key {
            "status" => whole.status = value::string(reader)?.map(Into::into),
            "output" => value::items(reader, |reader, _| {
                whole.output.push(item(reader)?);
                Ok(())
            })?,
            "usage" => whole.usage = Some(usage::read(reader)?),
            "error" => whole.error = Some(compacted(reader.raw()?.text)),
            "incomplete_details" => value::fields(reader, |reader, key| {
                match key {
                    "reason" => whole.reason = value::string(reader)?.map(Into::into),
                    _ => reader.skip()?,
                }
                Ok(())
            })?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(whole)
}

fn item(reader: &mut Reader<'_>) -> Result<Item, Fault> {
    let mut item = Item::default();
    value::fields(reader, |reader, key| {
        match key {
            "type" => item.kind = value::string(reader)?.map(Into::into).unwrap_or_default(),
            "call_id" => item.call_id = value::string(reader)?.map(Into::into),
            "name" => item.name = value::string(reader)?.map(Into::into),
            "arguments" => item.arguments = value::string_or_json(reader)?,
            "content" => item.parts = parts(reader)?,
            "summary" => item.summary = parts(reader)?,
            "encrypted_content" => item.encrypted = value::string(reader)?.map(Into::into),
            "extra_content" => item.signature = signature(reader)?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(item)
}

fn parts(reader: &mut Reader<'_>) -> Result<Vec<ItemPart>, Fault> {
    let mut all = Vec::new();
    value::items(reader, |reader, _| {
        let mut part = ItemPart::default();
        if reader.kind()? == Kind::String {
            part.text = reader.string()?.into_owned();
        } else {
            value::fields(reader, |reader, key| {
                match key {
                    "text" => part.text = value::string(reader)?.map(Into::into).unwrap_or_default(),
                    "refusal" => part.refusal = value::string(reader)?.map(Into::into).unwrap_or_default(),
                    "logprobs" => part.logprobs = logprobs::entries(reader)?,
                    _ => reader.skip()?,
                }
                Ok(())
            })?;
        }
        all.push(part);
        Ok(())
    })?;
    Ok(all)
}
