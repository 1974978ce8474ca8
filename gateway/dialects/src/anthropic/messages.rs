//! `POST /v1/messages` and `/v1/messages/count_tokens`: body to [`ChatRequest`].

use super::{blocks, tools};
use crate::openai::{read_body, schema_text};
use penstock_types::Bounds;
use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::fields;
use penstock_types::json::{Fault, Kind, Names, Reader, Within, short};
use penstock_types::request::{
    ChatRequest, Message, ReasoningEffort, ResponseFormat, Role, SamplingParams, StreamOptions, Tool,
};

/// Decodes the body of a Messages request.
///
/// Errors: the [`ApiError`] of the first fault in reading order; rules between fields are checked last. Cost: linear
/// in `body`.
pub fn decode_messages(body: &[u8], bounds: &Bounds) -> Result<ChatRequest, ApiError> {
    decode(body, bounds, true)
}

/// Decodes the body of a token-counting request: a Messages request in which `max_tokens` may be missing.
pub fn decode_count_tokens(body: &[u8], bounds: &Bounds) -> Result<ChatRequest, ApiError> {
    decode(body, bounds, false)
}

fn decode(body: &[u8], bounds: &Bounds, needs_max: bool) -> Result<ChatRequest, ApiError> {
    let mut draft = Draft::new(bounds);
    read_body(body, bounds, |reader, key| draft.field(reader, key))
        .and_then(|()| draft.finish(needs_max))
        .map_err(Fault::into_error)
}

/// Longest `metadata.user_id` in characters: agents put an account and a session into it.
const USER_CHARS_MAX: usize = 1_024;

/// Effort words for a budget given in tokens, for upstreams that take words only.
const EFFORT_OF_TOKENS: [(u32, ReasoningEffort); 2] = [(2_048, ReasoningEffort::Low), (8_192, ReasoningEffort::Medium)];

/// Words of `output_config.effort` and the reasoning effort that each asks for.
const EFFORTS: &[(&str, ReasoningEffort)] = &[
    ("low", ReasoningEffort::Low),
    ("medium", ReasoningEffort::Medium),
    ("high", ReasoningEffort::High),
    ("xhigh", ReasoningEffort::Max),
    ("max", ReasoningEffort::Max),
];

/// Setting of the request's `thinking` object: how much the model may reason.
#[derive(Clone, Copy)]
enum Thinking {
    Disabled,
    /// The model chooses its own amount of reasoning.
    Adaptive,
    /// The model may reason for at most this many tokens.
    Tokens(u32),
}

struct Draft<'b> {
    bounds: &'b Bounds,
    model: Option<String>,
    system: Option<String>,
    messages: Option<Vec<Message>>,
    tools: Vec<Tool>,
    tool_choice: Option<tools::Choice>,
    response_format: ResponseFormat,
    sampling: SamplingParams,
    stream: bool,
    thinking: Option<Thinking>,
    effort: Option<ReasoningEffort>,
    user: Option<String>,
    ignored: Vec<String>,
}

impl<'b> Draft<'b> {
    fn new(bounds: &'b Bounds) -> Self {
        Self {
            bounds,
            model: None,
            system: None,
            messages: None,
            tools: Vec::new(),
            tool_choice: None,
            response_format: ResponseFormat::Text,
            sampling: SamplingParams::default(),
            stream: false,
            thinking: None,
            effort: None,
            user: None,
            ignored: Vec::new(),
        }
    }

    fn field(&mut self, reader: &mut Reader<'_>, key: &str) -> Result<(), Fault> {
        let bounds = self.bounds;
        let sampling = &mut self.sampling;
        match key {
            "model" => self.model = Some(fields::name(reader, bounds.model_chars_max)?),
            "messages" => self.messages = Some(blocks::messages(reader, bounds)?),
            "system" => self.system = Some(blocks::system(reader, bounds)?),
            "max_tokens" => sampling.max_tokens = Some(fields::count(reader, 1..=u32::MAX)?),
            "temperature" => sampling.temperature = Some(fields::number(reader, 0.0..=2.0, false)?),
            "top_p" => sampling.top_p = Some(fields::number(reader, 0.0..=1.0, true)?),
            // -1 and 0 both mean "all".
            "top_k" => sampling.top_k = Some(fields::integer(reader, -1..=i128::from(u32::MAX))?.max(0) as u32),
            "stop_sequences" => sampling.stop = fields::strings(reader, bounds.stop_max, bounds.stop_chars_max)?,
            "stream" => self.stream = reader.boolean()?,
            "tools" => self.tools = tools::tools(reader, bounds)?,
            "tool_choice" => self.tool_choice = Some(tools::tool_choice(reader, bounds)?),
            "thinking" => self.thinking = Some(thinking(reader, bounds)?),
            "output_config" => self.output_config(reader)?,
            // Former name of the field, from before it moved into `output_config`.
            "output_format" => {
                let format = output_format(reader, bounds)?;
                self.format(format, "output_config.format")?;
            }
            "metadata" => self.metadata(reader)?,
            "service_tier" => fields::word(reader, &[("auto", ()), ("standard_only", ())])?,
            // Cache marks for a provider; our own prefix cache needs none.
            "cache_control" => reader.skip()?,
            "mcp_servers" | "container" => unbuilt(reader)?,
            _ => {
                reader.skip()?;
                self.ignore(key);
            }
        }
        Ok(())
    }

    fn finish(mut self, needs_max: bool) -> Result<ChatRequest, Fault> {
        let missing = || Fault::invalid("required, but missing");
        let model = self.model.take().ok_or_else(missing).within("model")?;
        let mut messages = self.messages.take().ok_or_else(missing).within("messages")?;
        if needs_max && self.sampling.max_tokens.is_none() {
            return Err(missing()).within("max_tokens");
        }
        if let (Some(Thinking::Tokens(budget)), Some(max)) = (self.thinking, self.sampling.max_tokens)
            && budget >= max
        {
            let why = format!("must be less than max_tokens ({max})");
            return Err(Fault::invalid(why)).within("budget_tokens").within("thinking");
        }
        let continues = continues(&messages)?;
        if let Some(system) = self.system.take() {
            messages.insert(0, Message { role: Role::System, content: Some(system), ..Message::default() });
        }
        let (tool_choice, parallel) = tools::resolve(self.tool_choice.take(), &self.tools).within("tool_choice")?;
        let (reasoning_effort, reasoning_tokens_max) = self.reasoning();
        Ok(ChatRequest {
            tool_choice,
            tools: self.tools,
            parallel_tool_calls: parallel,
            response_format: self.response_format,
            sampling: self.sampling,
            stream: self.stream.then_some(StreamOptions { include_usage: true, continuous_usage_stats: false }),
            reasoning_effort,
            reasoning_tokens_max,
            user: self.user,
            add_generation_prompt: !continues,
            continue_final_message: continues,
            ignored: self.ignored,
            ..ChatRequest::new(model, messages)
        })
    }

    /// Effort and token budget of the reasoning. An effort word may stand beside a budget; `disabled` wins over both.
    fn reasoning(&self) -> (Option<ReasoningEffort>, Option<u32>) {
        match self.thinking {
            Some(Thinking::Disabled) => (Some(ReasoningEffort::None), Some(0)),
            Some(Thinking::Tokens(budget)) => (self.effort.or(Some(effort_of(budget))), Some(budget)),
            Some(Thinking::Adaptive) | None => (self.effort, None),
        }
    }

    fn output_config(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        let mut names = Names::new(self.bounds.inner_fields_max);
        reader.object(|reader, key| {
            names.add(&key)?;
            if reader.null()? {
                return Ok(());
            }
            match &*key {
                "effort" => self.effort = Some(fields::word(reader, EFFORTS).within("effort")?),
                "format" => {
                    let format = output_format(reader, self.bounds).within("format")?;
                    self.format(format, "output_format").within("format")?;
                }
                _ => {
                    reader.skip()?;
                    self.ignore(&format!("output_config.{key}"));
                }
            }
            Ok(())
        })
    }

    /// Stores the form of the answer. The field `other` may have given it before, but not a different one.
    fn format(&mut self, format: ResponseFormat, other: &str) -> Result<(), Fault> {
        if self.response_format != ResponseFormat::Text && self.response_format != format {
            return Err(Fault::invalid(format!("contradicts {other}: an answer has one form")));
        }
        self.response_format = format;
        Ok(())
    }

    fn metadata(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        let mut names = Names::new(self.bounds.inner_fields_max);
        reader.object(|reader, key| {
            names.add(&key)?;
            if reader.null()? {
                return Ok(());
            }
            if key == "user_id" {
                self.user = Some(fields::string(reader, USER_CHARS_MAX).within("user_id")?);
                return Ok(());
            }
            reader.skip()?;
            self.ignore(&format!("metadata.{key}"));
            Ok(())
        })
    }

    /// Records the name of a field that has no effect, for the warning.
    fn ignore(&mut self, name: &str) {
        if self.ignored.len() < self.bounds.ignored_max {
            self.ignored.push(short(name));
        }
    }
}

fn effort_of(tokens: u32) -> ReasoningEffort {
    let found = EFFORT_OF_TOKENS.iter().find(|(most, _)| tokens <= *most);
    found.map_or(ReasoningEffort::High, |(_, effort)| *effort)
}

/// Whether the answer continues the last message. An assistant message with tool calls is refused there: it waits for
/// their results.
fn continues(messages: &[Message]) -> Result<bool, Fault> {
    match messages.last() {
        Some(last) if last.role == Role::Assistant => {
            if last.tool_calls.is_empty() {
                return Ok(true);
            }
            Err(Fault::invalid("the last message calls tools; their tool_result blocks must follow")).within("messages")
        }
        _ => Ok(false),
    }
}

fn thinking(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Thinking, Fault> {
    const BUDGET_MIN: u32 = 1_024; // the API reference
    let (mut kind, mut budget) = (None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "type" => kind = Some(fields::string(reader, 64).within("type")?),
            "budget_tokens" if !reader.null()? => {
                budget = Some(fields::count(reader, BUDGET_MIN..=u32::MAX).within("budget_tokens")?);
            }
            // `display` and other keys: reasoning is shown as the upstream shows it.
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    match kind.as_deref() {
        Some("disabled") => Ok(Thinking::Disabled),
        Some("adaptive" | "between_tools") => Ok(Thinking::Adaptive),
        Some("enabled") => match budget {
            Some(budget) => Ok(Thinking::Tokens(budget)),
            None => Err(Fault::invalid("required, but missing")).within("budget_tokens"),
        },
        Some(other) => {
            let why = format!("must be one of enabled, disabled, adaptive; got \"{}\"", short(other));
            Err(Fault::invalid(why)).within("type")
        }
        None => Err(Fault::invalid("required, but missing")).within("type"),
    }
}

/// Reads an output format: `{"type":"json_schema","schema":{…}}`. The schema has no name in this API.
fn output_format(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ResponseFormat, Fault> {
    let (mut kind, mut schema) = (None, None);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "type" => kind = Some(fields::string(reader, 64).within("type")?),
            "schema" => schema = Some(schema_text(reader, bounds).within("schema")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    match kind.as_deref() {
        Some("json_schema") => {
            let schema = schema.ok_or_else(|| Fault::invalid("required, but missing")).within("schema")?;
            Ok(ResponseFormat::JsonSchema { name: "answer".to_owned(), description: None, schema, strict: true })
        }
        Some(other) => Err(Fault::invalid(format!("must be json_schema, got \"{}\"", short(other)))).within("type"),
        None => Err(Fault::invalid("required, but missing")).within("type"),
    }
}

/// Refuses features that run at the provider itself; an empty or absent value passes.
fn unbuilt(reader: &mut Reader<'_>) -> Result<(), Fault> {
    let empty = reader.kind()? == Kind::Array && {
        let raw = reader.raw()?;
        raw.text[1..raw.text.len() - 1].trim().is_empty()
    };
    match empty {
        true => Ok(()),
        false => Err(Fault::of(ApiErrorKind::Unsupported, "only built at Anthropic's own service")),
    }
}
