//! `POST /v1/chat/completions`: body decoded into [`ChatRequest`].

use super::common::Common;
use super::functions::{self, CallShape};
use super::{messages, tools, unbuilt};
use penstock_types::Bounds;
use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::fields::{self, too_many};
use penstock_types::json::{Fault, Kind, Names, Reader, Within};
use penstock_types::json_text::compacted;
use penstock_types::request::{ChatRequest, Message, ReasoningEffort, Role, Tool, Verbosity};

/// Decodes the body of a chat completion request.
///
/// Errors: the [`ApiError`] of the first fault in reading order; rules between fields are checked last. Cost: linear
/// in `body`.
pub fn decode_chat(body: &[u8], bounds: &Bounds) -> Result<ChatRequest, ApiError> {
    decode_shaped(body, bounds).map(|(chat, _)| chat)
}

/// Decodes a body as [`decode_chat`] does; also returns the shape that calls have in the answer.
pub(super) fn decode_shaped(body: &[u8], bounds: &Bounds) -> Result<(ChatRequest, CallShape), ApiError> {
    let mut draft = Draft::new();
    read_body(body, bounds, |reader, key| draft.field(reader, key, bounds))
        .and_then(|()| draft.finish())
        .map_err(Fault::into_error)
}

/// Reads the body's object and calls `field` for each name; duplicates are refused and null values skipped.
pub(crate) fn read_body(
    body: &[u8],
    bounds: &Bounds,
    mut field: impl FnMut(&mut Reader<'_>, &str) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut reader = Reader::new(body)?;
    let kind = reader.kind()?;
    if kind != Kind::Object {
        return Err(Fault::invalid(format!("The body must be a JSON object, got {}.", kind.name())));
    }
    let mut names = Names::new(bounds.fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        field(reader, &key).within(&key)
    })?;
    reader.end()
}

struct Draft {
    common: Common,
    messages: Option<Vec<Message>>,
    tools: Vec<Tool>,
    tool_choice: Option<tools::Choice>,
    functions: functions::Functions,
    parallel_tool_calls: bool,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    logprobs: bool,
    top_logprobs: Option<u32>,
    reasoning_effort: Option<ReasoningEffort>,
    reasoning_tokens_max: Option<u32>,
    verbosity: Option<Verbosity>,
    template_kwargs: Option<String>,
    add_generation_prompt: Option<bool>,
    continue_final_message: bool,
    echo: bool,
}

/// Words of `reasoning_effort` and the effort that each asks for.
pub(super) const EFFORTS: &[(&str, ReasoningEffort)] = &[
    ("none", ReasoningEffort::None),
    ("minimal", ReasoningEffort::Minimal),
    ("low", ReasoningEffort::Low),
    ("medium", ReasoningEffort::Medium),
    ("high", ReasoningEffort::High),
    ("xhigh", ReasoningEffort::Max),
    ("max", ReasoningEffort::Max),
];

impl Draft {
    fn new() -> Self {
        Self {
            common: Common::new(),
            messages: None,
            tools: Vec::new(),
            tool_choice: None,
            functions: functions::Functions::default(),
            parallel_tool_calls: true,
            max_tokens: None,
            max_completion_tokens: None,
            logprobs: false,
            top_logprobs: None,
            reasoning_effort: None,
            reasoning_tokens_max: None,
            verbosity: None,
            template_kwargs: None,
            add_generation_prompt: None,
            continue_final_message: false,
            echo: false,
        }
    }

    fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
        match key {
            "messages" => self.messages = Some(messages::messages(reader, bounds)?),
            "tools" => self.tools = tools::offered_tools(reader, bounds)?,
            "tool_choice" => self.tool_choice = Some(tools::tool_choice(reader, bounds)?),
            "functions" => self.functions.functions(reader, bounds)?,
            "function_call" => self.functions.function_call(reader, bounds)?,
            "parallel_tool_calls" => self.parallel_tool_calls = reader.boolean()?,
            "max_tokens" => self.max_tokens = Some(fields::count(reader, 1..=u32::MAX)?),
            "max_completion_tokens" => self.max_completion_tokens = Some(fields::count(reader, 1..=u32::MAX)?),
            "logprobs" => self.logprobs = reader.boolean()?,
            "top_logprobs" => self.top_logprobs = Some(fields::count(reader, 0..=bounds.logprobs_max)?),
            "reasoning_effort" => self.reasoning_effort = Some(fields::word(reader, EFFORTS)?),
            "verbosity" => self.verbosity = Some(fields::word(reader, &Verbosity::WORDS)?),
            "thinking_token_budget" => self.reasoning_tokens_max = thinking_token_budget(reader)?,
            "chat_template_kwargs" => self.template_kwargs = Some(template_kwargs(reader, bounds)?),
            "add_generation_prompt" => self.add_generation_prompt = Some(reader.boolean()?),
            "continue_final_message" => self.continue_final_message = reader.boolean()?,
            "modalities" => modalities(reader)?,
            "echo" => self.echo = reader.boolean()?,
            "add_special_tokens" => {
                if reader.boolean()? {
                    return Err(Fault::of(ApiErrorKind::Unsupported, "not built for chat completions"));
                }
            }
            _ if self.common.field(reader, key, bounds)? => {}
            _ => unbuilt::other(&mut self.common, reader, key, bounds)?,
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(ChatRequest, CallShape), Fault> {
        let model = self.common.take_model()?;
        let messages =
            self.messages.take().ok_or_else(|| Fault::invalid("required, but missing")).within("messages")?;
        self.common.sampling.max_tokens = self.max_completion_tokens.or(self.max_tokens);
        self.common.check()?;
        self.check_logprobs()?;
        let add_generation_prompt =
            generation_prompt(self.add_generation_prompt, self.continue_final_message, &messages)?;
        let shape = self.functions.shape();
        let tool_choice = match shape {
            CallShape::Tools => tools::resolve(self.tool_choice.take(), &self.tools).within("tool_choice")?,
            CallShape::Function => {
                let has_choice = self.tool_choice.is_some();
                self.parallel_tool_calls = false; // the old shape holds one call
                self.functions.resolve(&mut self.tools, has_choice)?
            }
        };
        let stream = self.common.stream();
        let common = self.common;
        let chat = ChatRequest {
            model,
            messages,
            tools: self.tools,
            tool_choice,
            parallel_tool_calls: self.parallel_tool_calls,
            shows_one_call: shape == CallShape::Function,
            response_format: common.constraint.format(),
            sampling: common.sampling,
            n: common.n.unwrap_or(1),
            stream,
            logprobs: self.logprobs.then_some(self.top_logprobs.unwrap_or(0)),
            prompt_logprobs: common.prompt_logprobs,
            reasoning_effort: effort(self.reasoning_effort, self.reasoning_tokens_max),
            reasoning_tokens_max: self.reasoning_tokens_max,
            verbosity: self.verbosity,
            user: common.user,
            cache_key: common.cache_key,
            template_kwargs: self.template_kwargs,
            add_generation_prompt,
            continue_final_message: self.continue_final_message,
            echo: self.echo,
            prompt_tail: common.prompt_tail,
            truncates: false,
            keep_special_tokens: common.keep_special_tokens,
            return_token_ids: common.return_token_ids,
            token_names: common.token_names,
            cache_salt: common.cache_salt,
            priority: common.priority,
            ignored: common.ignored,
        };
        Ok((chat, shape))
    }

    fn check_logprobs(&self) -> Result<(), Fault> {
        self.common.check_logprob_ids(self.logprobs, "only allowed with \"logprobs\": true")?;
        match self.top_logprobs {
            Some(1..) if !self.logprobs => {
                Err(Fault::invalid("only allowed with \"logprobs\": true")).within("top_logprobs")
            }
            _ => Ok(()),
        }
    }
}

/// Whether the prompt ends with an opened turn of the assistant, from `add_generation_prompt` and
/// `continue_final_message`.
pub(super) fn generation_prompt(add: Option<bool>, continues: bool, messages: &[Message]) -> Result<bool, Fault> {
    if !continues {
        return Ok(add.unwrap_or(true));
    }
    if add == Some(true) {
        return Err(Fault::invalid("not allowed with add_generation_prompt")).within("continue_final_message");
    }
    if messages.last().is_none_or(|last| last.role != Role::Assistant) {
        return Err(Fault::invalid("the last message must be the assistant's")).within("continue_final_message");
    }
    Ok(false)
}

/// Reads vLLM's budget of reasoning tokens; -1 sets no bound.
pub(super) fn thinking_token_budget(reader: &mut Reader<'_>) -> Result<Option<u32>, Fault> {
    Ok(u32::try_from(fields::integer(reader, -1..=i128::from(u32::MAX))?).ok())
}

/// Reasoning effort beside a budget: no tokens at all are no reasoning, unless the client names an effort.
pub(super) fn effort(given: Option<ReasoningEffort>, tokens_max: Option<u32>) -> Option<ReasoningEffort> {
    given.or_else(|| (tokens_max == Some(0)).then_some(ReasoningEffort::None))
}

/// Checks `modalities`: only text is supported.
fn modalities(reader: &mut Reader<'_>) -> Result<(), Fault> {
    const MODALITIES_MAX: usize = 8;
    reader.array(|reader, index| {
        fields::bounded(index, MODALITIES_MAX, "modalities")?;
        if fields::word(reader, &[("text", true), ("audio", false)]).at(index)? {
            return Ok(());
        }
        Err(Fault::of(ApiErrorKind::UnsupportedValue, "only text is built")).at(index)
    })
}

/// Names that the gateway itself passes to a template: an argument must not replace them.
const RESERVED: [&str; 8] = [
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "bos_token",
    "eos_token",
];

/// Reads `chat_template_kwargs`: a bounded object, kept as text.
pub(super) fn template_kwargs(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    reader.expect(Kind::Object)?;
    let raw = reader.raw()?;
    if raw.depth > bounds.template_kwargs_depth_max {
        return Err(too_many("levels of nesting", bounds.template_kwargs_depth_max));
    }
    let json = compacted(raw.text);
    if json.len() > bounds.template_kwargs_bytes_max {
        return Err(too_many("bytes", bounds.template_kwargs_bytes_max));
    }
    let mut names = Names::new(bounds.template_kwargs_max);
    Reader::new(json.as_bytes())?.object(|reader, key| {
        names.add(&key)?;
        if RESERVED.contains(&&*key) {
            return Err(Fault::invalid("the gateway sets this one")).within(&key);
        }
        reader.skip()
    })?;
    Ok(json)
}
