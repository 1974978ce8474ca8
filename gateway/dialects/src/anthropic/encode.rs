//! A conversation as the body of a Messages request to Anthropic.

use bytes::{BufMut, BytesMut};

use super::content::Turns;
use super::provider::Codec;
use crate::called::{callable, forces_call};
use crate::identifiers;
use crate::packed_thinking::signed_by;
use crate::provider_fields::{Api, refuse_chat};
use crate::reasoning_maker::Maker;
use crate::schema_rules::{held, parameters};
use penstock_types::error::ApiError;
use penstock_types::request::{
    ChatRequest, Message, ReasoningEffort, ResponseFormat, Role, SamplingParams, ToolChoice,
};
use penstock_types::write;

/// Smallest thinking budget that the API takes, in tokens.
const BUDGET_MIN: u32 = 1_024;

/// Body of a Messages request for `chat`, with the provider's name `model`.
pub(super) fn body(codec: &Codec, chat: &ChatRequest, model: &str) -> Result<Vec<u8>, ApiError> {
    refuse_chat(Api::Anthropic, chat)?;
    let turns = Turns::write(chat)?;
    let thinking = Thinking::of(codec, chat, model);
    let mut out = BytesMut::with_capacity(512 + turns.messages.len() + turns.system.len() + tools_bytes(chat));
    out.put_slice(b"{\"model\":");
    write::string(&mut out, model);
    out.put_slice(b",\"max_tokens\":");
    write::integer(&mut out, u64::from(thinking.max_tokens));
    if !turns.system.is_empty() {
        out.put_slice(b",\"system\":[");
        out.put_slice(&turns.system);
        out.put_u8(b']');
    }
    out.put_slice(b",\"messages\":[");
    out.put_slice(&turns.messages);
    out.put_u8(b']');
    put_tools(&mut out, chat);
    put_tool_choice(&mut out, chat);
    thinking.put(&mut out);
    put_output_config(&mut out, chat, &thinking);
    put_sampling(&mut out, &chat.sampling, !thinking.is_on() && Codec::takes_sampling(model));
    if let Some(user) = &chat.user {
        out.put_slice(b",\"metadata\":{\"user_id\":");
        write::string(&mut out, &identifiers::user(Api::Anthropic, user));
        out.put_u8(b'}');
    }
    if chat.stream.is_some() {
        out.put_slice(b",\"stream\":true");
    }
    out.put_u8(b'}');
    Ok(out.into())
}

fn tools_bytes(chat: &ChatRequest) -> usize {
    chat.tools.iter().map(|tool| tool.json.len()).sum()
}

fn put_tools(out: &mut BytesMut, chat: &ChatRequest) {
    for (index, tool) in callable(chat).into_iter().enumerate() {
        out.put_slice(if index == 0 { b",\"tools\":[{\"name\":" } else { b",{\"name\":" });
        write::string(out, &tool.name);
        if let Some(description) = &tool.description {
            out.put_slice(b",\"description\":");
            write::string(out, description);
        }
        out.put_slice(b",\"input_schema\":");
        let (schema, strict) = parameters(tool.parameters.as_deref(), tool.strict);
        out.put_slice(schema.as_bytes());
        if strict {
            out.put_slice(b",\"strict\":true");
        }
        out.put_u8(b'}');
    }
    if !chat.tools.is_empty() {
        out.put_u8(b']');
    }
}

/// Writes `tool_choice`. `auto` is the API's default and is left out, unless parallel calls are switched off.
fn put_tool_choice(out: &mut BytesMut, chat: &ChatRequest) {
    if chat.tools.is_empty() {
        return;
    }
    let word = match &chat.tool_choice {
        ToolChoice::Auto | ToolChoice::Allowed { required: false, .. } if chat.parallel_tool_calls => return,
        ToolChoice::Auto | ToolChoice::Allowed { required: false, .. } => "auto",
        ToolChoice::None => "none",
        ToolChoice::Required | ToolChoice::Allowed { required: true, .. } => "any",
        ToolChoice::Named(_) => "tool",
    };
    out.put_slice(b",\"tool_choice\":{\"type\":");
    write::string(out, word);
    if let ToolChoice::Named(name) = &chat.tool_choice {
        out.put_slice(b",\"name\":");
        write::string(out, name);
    }
    if !chat.parallel_tool_calls && chat.tool_choice != ToolChoice::None {
        out.put_slice(b",\"disable_parallel_tool_use\":true");
    }
    out.put_u8(b'}');
}

/// Thinking setting of the request, and the `max_tokens` limit that contains it.
struct Thinking {
    kind: Kind,
    max_tokens: u32,
    /// Effort for `output_config`, for models that take no budget.
    effort: Option<&'static str>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unsaid,
    Disabled,
    Enabled(u32),
    Adaptive,
}

impl Thinking {
    fn of(codec: &Codec, chat: &ChatRequest, model: &str) -> Self {
        let limit = chat.sampling.max_tokens;
        let plain = |kind| Self { kind, max_tokens: limit.unwrap_or(codec.max_tokens), effort: None };
        let off = chat.reasoning_effort == Some(ReasoningEffort::None) || chat.reasoning_tokens_max == Some(0);
        if off {
            return plain(Kind::Disabled);
        }
        if chat.reasoning_effort.is_none() && chat.reasoning_tokens_max.is_none() {
            return plain(Kind::Unsaid);
        }
        // The API refuses thinking in both cases; the forced call that the client named explicitly takes precedence.
        if forces_call(chat) || lacks_signature(&chat.messages) {
            return plain(Kind::Unsaid);
        }
        if !codec.gives_budget(model) {
            return Self { effort: chat.reasoning_effort.map(effort_word), ..plain(Kind::Adaptive) };
        }
        let wanted = chat.reasoning_tokens_max.or(chat.reasoning_effort.map(budget_of));
        let wanted = wanted.unwrap_or(BUDGET_MIN).max(BUDGET_MIN);
        let max_tokens = limit.unwrap_or(wanted.saturating_add(codec.max_tokens));
        // The budget is a part of `max_tokens`; where even the smallest budget does not fit, thinking stays off.
        match wanted.min(max_tokens.saturating_sub(1)) {
            budget @ BUDGET_MIN.. => Self { kind: Kind::Enabled(budget), max_tokens, effort: None },
            _ => plain(Kind::Unsaid),
        }
    }

    fn is_on(&self) -> bool {
        matches!(self.kind, Kind::Enabled(_) | Kind::Adaptive)
    }

    fn put(&self, out: &mut BytesMut) {
        match self.kind {
            Kind::Unsaid => {}
            Kind::Disabled => out.put_slice(b",\"thinking\":{\"type\":\"disabled\"}"),
            Kind::Adaptive => out.put_slice(b",\"thinking\":{\"type\":\"adaptive\"}"),
            Kind::Enabled(budget) => {
                out.put_slice(b",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":");
                write::integer(out, u64::from(budget));
                out.put_u8(b'}');
            }
        }
    }
}

/// Thinking budget in tokens for an effort word: the table of the reference page.
pub(crate) fn budget_of(effort: ReasoningEffort) -> u32 {
    match effort {
        ReasoningEffort::None => 0,
        ReasoningEffort::Minimal => 1_024,
        ReasoningEffort::Low => 2_048,
        ReasoningEffort::Medium => 8_192,
        ReasoningEffort::High => 16_384,
        ReasoningEffort::Max => 32_768,
    }
}

fn effort_word(effort: ReasoningEffort) -> &'static str {
    match effort {
        ReasoningEffort::None | ReasoningEffort::Minimal | ReasoningEffort::Low => "low",
        ReasoningEffort::Medium => "medium",
        ReasoningEffort::High => "high",
        ReasoningEffort::Max => "max",
    }
}

/// Returns true if the current turn has called tools without reasoning that Anthropic signed: clients of other APIs cannot
/// send the signature back.
pub(crate) fn lacks_signature(messages: &[Message]) -> bool {
    let turn = messages.iter().rev().take_while(|message| message.role != Role::User);
    turn.filter(|message| message.role == Role::Assistant)
        .last()
        .is_some_and(|first| !first.tool_calls.is_empty() && signed_by(Maker::Anthropic, first).is_empty())
}

fn put_output_config(out: &mut BytesMut, chat: &ChatRequest, thinking: &Thinking) {
    let schema = match &chat.response_format {
        ResponseFormat::JsonSchema { schema, .. } => Some(schema),
        _ => None,
    };
    if schema.is_none() && thinking.effort.is_none() {
        return;
    }
    out.put_slice(b",\"output_config\":{");
    if let Some(effort) = thinking.effort {
        out.put_slice(b"\"effort\":");
        write::string(out, effort);
    }
    if let Some(schema) = schema {
        out.put_slice(if thinking.effort.is_some() { b",\"format\":" } else { b"\"format\":" });
        out.put_slice(b"{\"type\":\"json_schema\",\"schema\":");
        out.put_slice(held(schema).as_bytes());
        out.put_u8(b'}');
    }
    out.put_u8(b'}');
}

/// Writes the sampling fields: temperature (at most 1) or `top_p`, not both, and neither where the model fixes its own
/// sampling. Blank stop strings are left out, because the API refuses them. Penalties, `min_p` and `seed` do not exist
/// there.
fn put_sampling(out: &mut BytesMut, sampling: &SamplingParams, draws: bool) {
    if draws {
        match (sampling.temperature, sampling.top_p) {
            (Some(temperature), _) => put_number(out, "temperature", temperature.min(1.0)),
            (None, Some(top_p)) => put_number(out, "top_p", top_p),
            (None, None) => {}
        }
        if let Some(top_k @ 1..) = sampling.top_k {
            out.put_slice(b",\"top_k\":");
            write::integer(out, u64::from(top_k));
        }
    }
    let mut stops = sampling.stop.iter().filter(|stop| !stop.trim().is_empty());
    if let Some(first) = stops.next() {
        out.put_slice(b",\"stop_sequences\":[");
        write::string(out, first);
        for stop in stops {
            out.put_u8(b',');
            write::string(out, stop);
        }
        out.put_u8(b']');
    }
}

fn put_number(out: &mut BytesMut, name: &str, value: f32) {
    out.put_u8(b',');
    write::string(out, name);
    out.put_u8(b':');
    // The shortest digits that denote this `f32`: 0.7 stays 0.7.
    out.put_slice(value.to_string().as_bytes());
}
