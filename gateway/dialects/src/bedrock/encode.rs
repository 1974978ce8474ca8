//! A conversation as the body of `converse` and `converse-stream`.

use bytes::{BufMut, BytesMut};

use super::Family;
use super::messages::Turns;
use crate::answer_json::{Object, list};
use crate::anthropic::encode::{budget_of, lacks_signature};
use crate::called::{callable, forces_call};
use crate::provider_fields::{Api, refuse_chat};
use crate::schema_rules::{held, parameters};
use penstock_types::error::ApiError;
use penstock_types::request::{ChatRequest, ReasoningEffort, ResponseFormat, Tool, ToolChoice};

/// Smallest reasoning budget that Claude takes, in tokens.
const BUDGET_MIN: u32 = 1_024;
/// Output tokens added to the budget where the request names no limit: the limit must be above the budget.
const ANSWER_TOKENS: u32 = 4_096;

/// Body of a Converse request for `chat`, in the variant of the model's `family`.
pub(super) fn body(chat: &ChatRequest, family: Family) -> Result<Vec<u8>, ApiError> {
    let turns = Turns::write(chat, family)?;
    check(chat, family, &turns)?;
    let budget = if family == Family::Claude { budget(chat) } else { None };
    let mut out = BytesMut::with_capacity(512 + turns.system.len() + turns.messages.len());
    let mut object = Object::open(&mut out);
    for (name, blocks) in [("system", &turns.system), ("messages", &turns.messages)] {
        if !blocks.is_empty() {
            let value = object.key(name);
            value.put_u8(b'[');
            value.put_slice(blocks);
            value.put_u8(b']');
        }
    }
    put_inference(&mut object, chat, budget);
    put_tools(&mut object, chat, &turns);
    put_format(&mut object, &chat.response_format);
    put_additional(&mut object, chat, family, budget);
    object.close();
    Ok(out.into())
}

/// Refuses fields that the API cannot express and whose loss would change the answer's meaning or leave out a part
/// that was asked for.
fn check(chat: &ChatRequest, family: Family, turns: &Turns) -> Result<(), ApiError> {
    refuse_chat(Api::Bedrock, chat)?;
    let top_k = chat.sampling.top_k.is_some_and(|top| top > 0);
    if top_k && matches!(family, Family::GptOss | Family::Other) {
        return Err(ApiError::unsupported("top_k", "top_k: Bedrock's API has no top_k for this model"));
    }
    if chat.tool_choice == ToolChoice::None && !chat.tools.is_empty() && !turns.called.is_empty() {
        let why = "tool_choice: Bedrock's API cannot forbid calls in a conversation that has some";
        return Err(ApiError::unsupported_value("tool_choice", why));
    }
    Ok(())
}

fn put_inference(object: &mut Object<'_>, chat: &ChatRequest, budget: Option<u32>) {
    let sampling = &chat.sampling;
    let mut written = BytesMut::new();
    let mut config = Object::open(&mut written);
    let max_tokens = sampling.max_tokens.or(budget.map(|budget| budget.saturating_add(ANSWER_TOKENS)));
    // The API counts in signed integers of 32 bits.
    config.optional_integer("maxTokens", max_tokens.map(|tokens| tokens.min(i32::MAX as u32)));
    if budget.is_none() {
        // Newer models refuse a request with both.
        match (sampling.temperature, sampling.top_p) {
            (Some(temperature), _) => config.number("temperature", temperature.min(1.0)),
            (None, top_p) => config.optional_number("topP", top_p),
        }
    }
    if !sampling.stop.is_empty() {
        config.strings("stopSequences", &sampling.stop);
    }
    config.close();
    if written.len() > 2 {
        object.key("inferenceConfig").put_slice(&written);
    }
}

/// Writes the offered tools. Where no tool is offered and the conversation has calls, the API still demands a list:
/// the functions that those calls name are written.
fn put_tools(object: &mut Object<'_>, chat: &ChatRequest, turns: &Turns) {
    let hidden = chat.tools.is_empty() || chat.tool_choice == ToolChoice::None;
    if hidden && turns.called.is_empty() {
        return;
    }
    let mut config = Object::open(object.key("toolConfig"));
    if hidden {
        list(config.key("tools"), &turns.called, |out, name| put_tool(out, name, None, None, false));
    } else {
        list(config.key("tools"), &callable(chat), |out, tool: &&Tool| {
            put_tool(out, &tool.name, tool.description.as_deref(), tool.parameters.as_deref(), tool.strict);
        });
        match &chat.tool_choice {
            ToolChoice::None | ToolChoice::Auto | ToolChoice::Allowed { required: false, .. } => {}
            ToolChoice::Required | ToolChoice::Allowed { required: true, .. } => {
                config.raw("toolChoice", r#"{"any":{}}"#)
            }
            ToolChoice::Named(name) => {
                let mut choice = Object::open(config.key("toolChoice"));
                let mut tool = Object::open(choice.key("tool"));
                tool.string("name", name);
                tool.close();
                choice.close();
            }
        }
    }
    config.close();
}

fn put_tool(out: &mut BytesMut, name: &str, description: Option<&str>, schema: Option<&str>, strict: bool) {
    let mut tool = Object::open(out);
    let mut spec = Object::open(tool.key("toolSpec"));
    spec.string("name", name);
    spec.optional("description", description.filter(|text| !text.is_empty()));
    let mut input = Object::open(spec.key("inputSchema"));
    let (schema, strict) = parameters(schema, strict);
    input.raw("json", &schema);
    input.close();
    spec.flag("strict", strict);
    spec.close();
    tool.close();
}

/// Writes the output format; the API takes the schema as text.
fn put_format(object: &mut Object<'_>, format: &ResponseFormat) {
    let ResponseFormat::JsonSchema { name, description, schema, .. } = format else { return };
    let mut output = Object::open(object.key("outputConfig"));
    let mut text = Object::open(output.key("textFormat"));
    text.string("type", "json_schema");
    let mut structure = Object::open(text.key("structure"));
    let mut inner = Object::open(structure.key("jsonSchema"));
    inner.string("schema", &held(schema));
    inner.string("name", name);
    inner.optional("description", description.as_deref());
    inner.close();
    structure.close();
    text.close();
    output.close();
}

/// Writes the model family's own fields, which the Converse API itself does not know.
fn put_additional(object: &mut Object<'_>, chat: &ChatRequest, family: Family, budget: Option<u32>) {
    let mut written = BytesMut::new();
    let mut fields = Object::open(&mut written);
    let top_k = chat.sampling.top_k.filter(|top| *top > 0);
    match family {
        Family::Claude => {
            if let Some(budget) = budget {
                let mut thinking = Object::open(fields.key("thinking"));
                thinking.string("type", "enabled");
                thinking.integer("budget_tokens", budget);
                thinking.close();
            } else {
                fields.optional_integer("top_k", top_k);
            }
        }
        Family::Nova => {
            if let Some(top_k) = top_k {
                let mut config = Object::open(fields.key("inferenceConfig"));
                config.integer("topK", top_k);
                config.close();
            }
        }
        Family::GptOss => fields.optional("reasoning_effort", chat.reasoning_effort.map(word_of)),
        Family::Other => {}
    }
    fields.close();
    if written.len() > 2 {
        object.key("additionalModelRequestFields").put_slice(&written);
    }
}

/// Claude's reasoning budget in tokens, where reasoning is asked for and the API would take it.
fn budget(chat: &ChatRequest) -> Option<u32> {
    let effort = chat.reasoning_effort.filter(|effort| *effort != ReasoningEffort::None).map(budget_of);
    let wanted = chat.reasoning_tokens_max.or(effort).filter(|tokens| *tokens > 0)?.max(BUDGET_MIN);
    if chat.reasoning_effort == Some(ReasoningEffort::None) {
        return None;
    }
    if forces_call(chat) || lacks_signature(&chat.messages) {
        return None;
    }
    let room = chat.sampling.max_tokens.map_or(u32::MAX, |limit| limit.saturating_sub(1));
    Some(wanted.min(room)).filter(|budget| *budget >= BUDGET_MIN)
}

fn word_of(effort: ReasoningEffort) -> &'static str {
    match effort {
        ReasoningEffort::None | ReasoningEffort::Minimal | ReasoningEffort::Low => "low",
        ReasoningEffort::Medium => "medium",
        ReasoningEffort::High | ReasoningEffort::Max => "high",
    }
}
