//! A conversation as the body of `generateContent`.

use bytes::BytesMut;

use super::ThinkingStyle;
use super::contents::Turns;
use crate::answer_json::{Object, list};
use crate::provider_fields::{Api, refuse_chat};
use penstock_types::error::ApiError;
use penstock_types::request::{ChatRequest, ReasoningEffort, ResponseFormat, SamplingParams, Tool, ToolChoice};
use penstock_types::write;

/// Most stop sequences that the API takes.
const STOP_MAX: usize = 5;

/// Body of a `generateContent` request for `chat`, with reasoning in the form `style`; `without_ids`: calls have no ids.
pub(super) fn body(chat: &ChatRequest, style: ThinkingStyle, without_ids: bool) -> Result<Vec<u8>, ApiError> {
    check(chat)?;
    let turns = Turns::write(chat, style, without_ids)?;
    let mut out = BytesMut::with_capacity(512 + turns.bytes());
    let mut object = Object::open(&mut out);
    turns.put(&mut object);
    put_tools(&mut object, chat);
    let mut config = BytesMut::new();
    let mut inner = Object::open(&mut config);
    put_sampling(&mut inner, &chat.sampling);
    if chat.n > 1 {
        inner.integer("candidateCount", chat.n);
    }
    if let Some(best) = chat.logprobs {
        inner.boolean("responseLogprobs", true);
        inner.optional_integer("logprobs", Some(best).filter(|best| *best > 0));
    }
    put_format(&mut inner, &chat.response_format);
    put_thinking(&mut inner, chat, style);
    inner.close();
    if config.len() > 2 {
        object.key("generationConfig").extend_from_slice(&config);
    }
    object.close();
    Ok(out.into())
}

/// Refuses fields that the API cannot express and whose loss would change the answer's meaning or leave out a part
/// that was asked for.
fn check(chat: &ChatRequest) -> Result<(), ApiError> {
    refuse_chat(Api::Gemini, chat)?;
    if chat.sampling.stop.len() > STOP_MAX {
        let why = format!("stop: Gemini's API takes {STOP_MAX} strings at most");
        return Err(ApiError::unsupported_value("stop", why));
    }
    Ok(())
}

fn put_tools(object: &mut Object<'_>, chat: &ChatRequest) {
    if chat.tools.is_empty() {
        return;
    }
    let tools = object.key("tools");
    tools.extend_from_slice(b"[{\"functionDeclarations\":");
    list(tools, &chat.tools, put_tool);
    tools.extend_from_slice(b"}]");
    let (mode, only): (_, &[String]) = match &chat.tool_choice {
        ToolChoice::Auto => return,
        ToolChoice::None => ("NONE", &[]),
        ToolChoice::Required => ("ANY", &[]),
        ToolChoice::Named(name) => ("ANY", std::slice::from_ref(name)),
        ToolChoice::Allowed { names, required: true } => ("ANY", names),
        // The API takes names with ANY and VALIDATED only; VALIDATED leaves it to the model whether to call.
        ToolChoice::Allowed { names, required: false } => ("VALIDATED", names),
    };
    let mut config = Object::open(object.key("toolConfig"));
    let mut calling = Object::open(config.key("functionCallingConfig"));
    calling.string("mode", mode);
    if !only.is_empty() {
        calling.strings("allowedFunctionNames", only);
    }
    calling.close();
    config.close();
}

fn put_tool(out: &mut BytesMut, tool: &Tool) {
    let mut object = Object::open(out);
    object.string("name", &tool.name);
    // The API demands a description.
    object.string("description", tool.description.as_deref().unwrap_or(&tool.name));
    if let Some(parameters) = tool.parameters.as_deref().filter(|schema| *schema != "{}") {
        object.raw("parametersJsonSchema", parameters);
    }
    object.close();
}

fn put_sampling(object: &mut Object<'_>, sampling: &SamplingParams) {
    object.optional_number("temperature", sampling.temperature);
    object.optional_number("topP", sampling.top_p);
    // 0 means all tokens, which the API expresses by leaving the field out.
    object.optional_integer("topK", sampling.top_k.filter(|top| *top > 0));
    object.optional_integer("maxOutputTokens", sampling.max_tokens);
    if !sampling.stop.is_empty() {
        object.strings("stopSequences", &sampling.stop);
    }
    for (name, value) in
        [("presencePenalty", sampling.presence_penalty), ("frequencyPenalty", sampling.frequency_penalty)]
    {
        object.optional_number(name, Some(value).filter(|value| *value != 0.0));
    }
    object.optional_integer("seed", sampling.seed.map(folded));
}

/// Folds a seed into 32 bits, which is the API's size; a seed that fits is unchanged.
fn folded(seed: u64) -> i32 {
    i32::try_from(seed as i64).unwrap_or((seed ^ (seed >> 32)) as i32)
}

fn put_format(object: &mut Object<'_>, format: &ResponseFormat) {
    match format {
        ResponseFormat::Text => {}
        ResponseFormat::JsonObject => object.string("responseMimeType", "application/json"),
        ResponseFormat::JsonSchema { schema, .. } => {
            object.string("responseMimeType", "application/json");
            object.raw("responseJsonSchema", schema);
        }
        ResponseFormat::Choice(choices) => {
            object.string("responseMimeType", "text/x.enum");
            let mut schema = Object::open(object.key("responseSchema"));
            schema.string("type", "STRING");
            schema.strings("enum", choices);
            schema.close();
        }
        // Refused before.
        ResponseFormat::Regex(_) | ResponseFormat::Grammar { .. } | ResponseFormat::StructuralTag(_) => {}
    }
}

/// Writes the thinking configuration by the table of the reference page. Thoughts are shown whenever reasoning is
/// asked for.
fn put_thinking(object: &mut Object<'_>, chat: &ChatRequest, style: ThinkingStyle) {
    let (effort, tokens) = (chat.reasoning_effort, chat.reasoning_tokens_max);
    if effort.is_none() && tokens.is_none() {
        return;
    }
    let off = effort == Some(ReasoningEffort::None) || tokens == Some(0);
    let mut thinking = Object::open(object.key("thinkingConfig"));
    if style == ThinkingStyle::Budget {
        match (tokens, effort) {
            _ if off => thinking.integer("thinkingBudget", 0),
            (Some(tokens), _) => thinking.integer("thinkingBudget", tokens),
            (None, Some(effort)) => thinking.integer("thinkingBudget", budget_of(effort)),
            (None, None) => {}
        }
    } else {
        let word = match (effort, tokens) {
            _ if off => "MINIMAL",
            (Some(effort), _) => level_of(effort),
            (None, tokens) => level_of_tokens(tokens.unwrap_or_default()),
        };
        thinking.string("thinkingLevel", word);
    }
    thinking.flag("includeThoughts", !off);
    thinking.close();
}

/// Thinking budget in tokens for an effort word; -1 lets the model decide.
fn budget_of(effort: ReasoningEffort) -> i32 {
    match effort {
        ReasoningEffort::None => 0,
        ReasoningEffort::Minimal => 512,
        ReasoningEffort::Low => 1_024,
        ReasoningEffort::Medium => 8_192,
        ReasoningEffort::High | ReasoningEffort::Max => 24_576,
    }
}

fn level_of(effort: ReasoningEffort) -> &'static str {
    match effort {
        ReasoningEffort::None | ReasoningEffort::Minimal => "MINIMAL",
        ReasoningEffort::Low => "LOW",
        ReasoningEffort::Medium => "MEDIUM",
        ReasoningEffort::High | ReasoningEffort::Max => "HIGH",
    }
}

fn level_of_tokens(tokens: u32) -> &'static str {
    match tokens {
        ..=512 => "MINIMAL",
        513..=4_096 => "LOW",
        4_097..=16_384 => "MEDIUM",
        _ => "HIGH",
    }
}

/// Writes a part of text, `{"text":…}`.
pub(super) fn put_text(out: &mut BytesMut, text: &str) {
    out.extend_from_slice(b"{\"text\":");
    write::string(out, text);
    out.extend_from_slice(b"}");
}
