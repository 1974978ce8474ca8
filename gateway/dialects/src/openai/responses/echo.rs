//! The Response resource: the request's settings repeated around the answer's items. Every key is present, null where
//! it has no value.

use bytes::{BufMut, Bytes, BytesMut};

use crate::openai::provider::Object;
use penstock_types::codec::AnswerMeta;
use penstock_types::event::Usage;
use penstock_types::request::Verbosity;
use penstock_types::write;

/// State of a response, the `status` of its resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseStatus {
    /// The response waits in the background.
    Queued,
    /// The answer is being generated.
    InProgress,
    /// The answer is complete and ended by itself.
    Completed,
    /// The answer ended at `max_output_tokens` or at the end of the context.
    OutOfTokens,
    /// The answer ended where the provider withheld the rest.
    Filtered,
    /// The answer ended with a failure.
    Failed,
    /// The client cancelled the response.
    Cancelled,
}

impl ResponseStatus {
    fn word(self) -> &'static str {
        match self {
            ResponseStatus::Queued => "queued",
            ResponseStatus::InProgress => "in_progress",
            ResponseStatus::Completed => "completed",
            ResponseStatus::OutOfTokens | ResponseStatus::Filtered => "incomplete",
            ResponseStatus::Failed => "failed",
            ResponseStatus::Cancelled => "cancelled",
        }
    }

    fn incomplete(self) -> &'static str {
        match self {
            ResponseStatus::OutOfTokens => r#"{"reason":"max_output_tokens"}"#,
            ResponseStatus::Filtered => r#"{"reason":"content_filter"}"#,
            _ => "null",
        }
    }
}

/// Failure of a response, the `error` of its resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseFailure {
    /// Code of the failure: `server_error`, `rate_limit_exceeded` or `invalid_prompt`.
    pub code: &'static str,
    /// Message that the client reads in the resource.
    pub message: String,
}

/// Settings of a request, as its answer repeats them. Fields marked so hold JSON text.
#[derive(Clone, Debug)]
pub(super) struct Echo {
    pub(super) model: String,
    /// Instructions of the request, JSON text.
    pub(super) instructions: Option<String>,
    pub(super) previous_response_id: Option<String>,
    pub(super) conversation: Option<String>,
    pub(super) max_output_tokens: Option<u32>,
    pub(super) max_tool_calls: Option<u32>,
    pub(super) parallel_tool_calls: bool,
    /// Reasoning effort of the request, JSON text.
    pub(super) effort: Option<String>,
    pub(super) summary: Option<&'static str>,
    pub(super) temperature: Option<f32>,
    pub(super) top_p: Option<f32>,
    pub(super) presence_penalty: f32,
    pub(super) frequency_penalty: f32,
    pub(super) top_logprobs: u32,
    pub(super) truncates: bool,
    /// Form required of the answer's text (`text.format`), JSON text; `None` where the API's field has no word for it.
    pub(super) format: Option<String>,
    /// The form in vLLM's own field, where that has the word; JSON text.
    pub(super) structured_outputs: Option<String>,
    pub(super) verbosity: Option<Verbosity>,
    /// List of the request's tools, JSON text.
    pub(super) tools: String,
    /// Choice of whether and which tools are called, JSON text.
    pub(super) tool_choice: String,
    /// The client's metadata, JSON text.
    pub(super) metadata: String,
    pub(super) safety_identifier: Option<String>,
    pub(super) prompt_cache_key: Option<String>,
    pub(super) user: Option<String>,
    pub(super) store: bool,
    pub(super) background: bool,
}

impl Default for Echo {
    fn default() -> Self {
        Self {
            model: String::new(),
            instructions: None,
            previous_response_id: None,
            conversation: None,
            max_output_tokens: None,
            max_tool_calls: None,
            parallel_tool_calls: true,
            effort: None,
            summary: None,
            temperature: None,
            top_p: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            top_logprobs: 0,
            truncates: false,
            format: None,
            structured_outputs: None,
            verbosity: None,
            tools: "[]".to_owned(),
            tool_choice: "\"auto\"".to_owned(),
            metadata: "{}".to_owned(),
            safety_identifier: None,
            prompt_cache_key: None,
            user: None,
            store: false,
            background: false,
        }
    }
}

/// Parts of a response that change while it is answered.
pub(super) struct State<'a> {
    pub(super) status: ResponseStatus,
    /// Items of the answer, joined by commas.
    pub(super) output: &'a [u8],
    pub(super) usage: Option<&'a Usage>,
    pub(super) failure: Option<&'a ResponseFailure>,
}

impl Echo {
    /// Appends the Response resource as JSON to `out`.
    pub(super) fn put(&self, meta: &AnswerMeta, state: &State<'_>, out: &mut BytesMut) {
        let mut object = Object::open(out);
        object.string("id", &format!("resp_{}", meta.id));
        object.string("object", "response");
        object.integer("created_at", meta.created);
        // Only a store knows the completion time; the key must be present all the same.
        object.raw("completed_at", "null");
        object.string("status", state.status.word());
        object.boolean("background", self.background);
        match state.failure {
            None => object.raw("error", "null"),
            Some(failure) => {
                let mut error = Object::open(object.key("error"));
                error.string("code", failure.code);
                error.string("message", &failure.message);
                error.close();
            }
        }
        object.raw("incomplete_details", state.status.incomplete());
        object.raw("instructions", self.instructions.as_deref().unwrap_or("null"));
        nullable_integer(&mut object, "max_output_tokens", self.max_output_tokens);
        nullable_integer(&mut object, "max_tool_calls", self.max_tool_calls);
        object.string("model", &self.model);
        let output = object.key("output");
        output.put_u8(b'[');
        output.put_slice(state.output);
        output.put_u8(b']');
        self.put_settings(&mut object);
        match state.usage {
            None => object.raw("usage", "null"),
            Some(usage) => put_usage(object.key("usage"), usage),
        }
        nullable(&mut object, "user", self.user.as_deref());
        object.raw("metadata", &self.metadata);
        object.close();
    }

    fn put_settings(&self, object: &mut Object<'_>) {
        object.boolean("parallel_tool_calls", self.parallel_tool_calls);
        nullable(object, "previous_response_id", self.previous_response_id.as_deref());
        if let Some(conversation) = &self.conversation {
            let mut object = Object::open(object.key("conversation"));
            object.string("id", conversation);
            object.close();
        }
        nullable(object, "prompt_cache_key", self.prompt_cache_key.as_deref());
        object.raw("prompt_cache_retention", "null");
        let mut reasoning = Object::open(object.key("reasoning"));
        reasoning.raw("effort", self.effort.as_deref().unwrap_or("null"));
        nullable(&mut reasoning, "summary", self.summary);
        reasoning.close();
        nullable(object, "safety_identifier", self.safety_identifier.as_deref());
        object.string("service_tier", "default");
        object.boolean("store", self.store);
        // Clients read these three as numbers, never null: 1 is the API's own default.
        object.number("temperature", self.temperature.unwrap_or(1.0));
        object.number("top_p", self.top_p.unwrap_or(1.0));
        object.integer("top_logprobs", self.top_logprobs);
        object.number("presence_penalty", self.presence_penalty);
        object.number("frequency_penalty", self.frequency_penalty);
        let mut text = Object::open(object.key("text"));
        self.format.iter().for_each(|format| text.raw("format", format));
        text.string("verbosity", self.verbosity.unwrap_or(Verbosity::Medium).word());
        text.close();
        self.structured_outputs.iter().for_each(|outputs| object.raw("structured_outputs", outputs));
        object.raw("tool_choice", &self.tool_choice);
        object.raw("tools", &self.tools);
        object.string("truncation", if self.truncates { "auto" } else { "disabled" });
    }

    /// The Response resource as JSON text of its own.
    pub(super) fn resource(&self, meta: &AnswerMeta, state: &State<'_>) -> Bytes {
        let mut out = BytesMut::with_capacity(1_536 + self.tools.len() + state.output.len());
        self.put(meta, state, &mut out);
        out.freeze()
    }
}

fn nullable(object: &mut Object<'_>, name: &str, value: Option<&str>) {
    write::optional_string(object.key(name), value);
}

fn nullable_integer(object: &mut Object<'_>, name: &str, value: Option<u32>) {
    match value {
        Some(value) => object.integer(name, value),
        None => object.raw(name, "null"),
    }
}

/// Writes `usage` under the names of this API.
fn put_usage(out: &mut BytesMut, usage: &Usage) {
    let mut object = Object::open(out);
    object.integer("input_tokens", usage.prompt_tokens);
    let mut details = Object::open(object.key("input_tokens_details"));
    details.integer("cached_tokens", usage.cached_tokens);
    details.integer("cache_write_tokens", usage.cache_write_tokens);
    details.close();
    object.integer("output_tokens", usage.completion_tokens);
    let mut details = Object::open(object.key("output_tokens_details"));
    details.integer("reasoning_tokens", usage.reasoning_tokens);
    details.close();
    object.integer("total_tokens", usage.total());
    object.close();
}
