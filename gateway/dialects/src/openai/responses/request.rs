//! `POST /v1/responses`: body decoded into [`ResponsesRequest`], which together with earlier items becomes a chat
//! request.

use bytes::{BufMut, Bytes, BytesMut};

use super::echo::Echo;
use super::form::ResponseForm;
use super::input;
use super::needs::{StoreNeeds, conversation};
use crate::openai::chat::{EFFORTS, effort, read_body, thinking_token_budget};
use crate::openai::common::Common;
use crate::openai::format::{json_schema, response_format};
use crate::openai::provider::Object;
use crate::openai::tools::{self, Allowed, Choice};
use crate::openai::unbuilt;
use penstock_types::Bounds;
use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::fields::{self, bounded};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, mismatch, short};
use penstock_types::json_text::compacted;
use penstock_types::request::{
    ChatRequest, Message, ReasoningEffort, Request, ResponseFormat, Role, Tool, ToolChoice, Verbosity,
};
use penstock_types::write;

/// A request to `/v1/responses`, read without the turns before it.
pub struct ResponsesRequest {
    /// Name of the model, as the client gave it.
    pub model: String,
    /// True if the answer is to be streamed.
    pub stream: bool,
    /// True if the client wants the response to be stored (default true).
    pub store: bool,
    /// True if the answer is to be generated in the background, while the client is away.
    pub background: bool,
    /// Id of the response that this one continues.
    pub previous_response_id: Option<String>,
    /// Id of the conversation whose items come first, and which takes the items of this response.
    pub conversation: Option<String>,
    common: Common,
    /// The request's `input` as JSON text, to be read behind the turns before it.
    input: String,
    instructions: Option<String>,
    tools: Vec<Tool>,
    tool_choice: Option<Choice>,
    parallel_tool_calls: bool,
    max_output_tokens: Option<u32>,
    logprobs: bool,
    top_logprobs: Option<u32>,
    effort: Option<(ReasoningEffort, String)>,
    reasoning_tokens_max: Option<u32>,
    echo: Echo,
    bounds: Bounds,
}

impl ResponsesRequest {
    /// Reads a body. The items of `input` are checked when it is resolved.
    ///
    /// # Errors
    /// The first fault in reading order; rules between fields are checked last.
    pub fn decode(body: &[u8], bounds: &Bounds) -> Result<Self, ApiError> {
        let mut draft = Draft::new(bounds);
        read_body(body, bounds, |reader, key| draft.field(reader, key))
            .and_then(|()| draft.finish())
            .map_err(Fault::into_error)
    }

    /// Reads a body of `/v1/responses/input_tokens`: the same fields, without the need for an `input`, which earlier
    /// turns can stand for, and without an answer that could be stored or streamed.
    ///
    /// # Errors
    /// As [`ResponsesRequest::decode`].
    pub fn decode_count(body: &[u8], bounds: &Bounds) -> Result<Self, ApiError> {
        let mut draft = Draft { needs_input: false, ..Draft::new(bounds) };
        let read = read_body(body, bounds, |reader, key| draft.field(reader, key)).and_then(|()| draft.finish());
        let read = read.map_err(Fault::into_error)?;
        Ok(Self { stream: false, store: false, background: false, ..read })
    }

    /// Items that came with the request: a JSON list, where a text counts as a message of the user.
    pub fn input_items(&self) -> Bytes {
        if self.input.starts_with('[') {
            return Bytes::copy_from_slice(self.input.as_bytes());
        }
        let mut out = BytesMut::with_capacity(96 + self.input.len());
        out.put_slice(br#"[{"type":"message","role":"user","content":[{"type":"input_text","text":"#);
        out.put_slice(self.input.as_bytes());
        out.put_slice(b"}]}]");
        out.freeze()
    }

    /// Parts of the request that need a store.
    pub fn needs(&self) -> StoreNeeds {
        StoreNeeds {
            previous_response_id: self.previous_response_id.clone(),
            conversation: self.conversation.clone(),
            background: self.background,
        }
    }

    /// Form of the answer alone, for a resource that says what became of the request.
    pub fn form(&self) -> ResponseForm {
        let echo = Echo { store: self.store, background: self.background, ..self.echo.clone() };
        ResponseForm::new(echo, self.logprobs || self.top_logprobs.is_some_and(|best| best > 0))
    }

    /// Makes the chat request that a model answers. `earlier` are lists of items of the turns before it, oldest first
    /// (JSON text, input and output of each turn); `stored` tells whether the response will be stored, and is repeated
    /// in the answer.
    ///
    /// # Errors
    /// The items are not a conversation, or use unsupported features.
    pub fn resolve(self, earlier: &[&[u8]], stored: bool) -> Result<(ChatRequest, ResponseForm), ApiError> {
        self.resolved(earlier, stored).map_err(Fault::into_error)
    }

    fn resolved(mut self, earlier: &[&[u8]], stored: bool) -> Result<(ChatRequest, ResponseForm), Fault> {
        let mut turns = input::Turns::new(&self.bounds);
        if let Some(instructions) = &self.instructions {
            turns.instructions(instructions).within("instructions")?;
        }
        for list in earlier {
            turns.earlier(list)?;
        }
        turns.input(&self.input).within("input")?;
        let messages = turns.finish().within("input")?;
        let choice = self.tool_choice.take().filter(|_| !self.tools.is_empty() || self.forces());
        if let Some(Choice::Function(name)) = &choice
            && !(self.tools.is_empty() || self.tools.iter().any(|tool| tool.name == *name))
        {
            let why = format!("no tool is named \"{}\"", short(name));
            return Err(Fault::invalid(why)).within("name").within("tool_choice");
        }
        let tool_choice = tools::resolve(choice, &self.tools).within("tool_choice")?;
        self.echo.store = stored;
        self.echo.background = self.background;
        let chat = self.chat(messages, tool_choice);
        let form = ResponseForm::new(self.echo, chat.logprobs.is_some());
        Ok((chat, form))
    }

    /// Returns true if a call is demanded, so that there must be a tool. `auto` without tools is the usual default of clients.
    fn forces(&self) -> bool {
        self.echo.tool_choice != "\"auto\""
    }

    fn chat(&mut self, messages: Vec<Message>, tool_choice: ToolChoice) -> ChatRequest {
        let common = std::mem::replace(&mut self.common, Common::new());
        let mut chat = ChatRequest::new(self.model.clone(), messages);
        chat.tools = std::mem::take(&mut self.tools);
        chat.tool_choice = tool_choice;
        chat.parallel_tool_calls = self.parallel_tool_calls;
        chat.response_format = common.constraint.format();
        chat.sampling = common.sampling;
        chat.sampling.max_tokens = self.max_output_tokens;
        chat.stream = self.stream.then(Default::default);
        let logprobs = self.logprobs || self.top_logprobs.is_some_and(|best| best > 0);
        chat.logprobs = logprobs.then_some(self.top_logprobs.unwrap_or(0));
        let given = self.effort.as_ref().map(|(effort, _)| *effort);
        chat.reasoning_effort = effort(given, self.reasoning_tokens_max);
        chat.reasoning_tokens_max = self.reasoning_tokens_max;
        chat.verbosity = self.echo.verbosity;
        chat.user = common.user;
        chat.cache_key.clone_from(&self.echo.prompt_cache_key);
        chat.cache_salt = common.cache_salt;
        chat.priority = common.priority;
        chat.keep_special_tokens = common.keep_special_tokens;
        chat.truncates = self.echo.truncates;
        chat.prompt_tail = common.prompt_tail;
        chat.ignored = common.ignored;
        chat
    }

    /// Resolves the request as [`Self::resolve`] does, for a gateway without a store: features that need one are
    /// refused.
    pub(super) fn alone(self) -> Result<(Request, ResponseForm), ApiError> {
        if self.previous_response_id.is_some() {
            let message = "previous_response_id: responses are not stored here; send the earlier items in input";
            return Err(ApiError::unsupported("previous_response_id", message));
        }
        if self.conversation.is_some() {
            let message = "conversation: conversations are not stored here; send the earlier items in input";
            return Err(ApiError::unsupported("conversation", message));
        }
        if self.background {
            return Err(ApiError::unsupported_value("background", "background: responses are not stored here"));
        }
        let (chat, form) = self.resolve(&[], false)?;
        Ok((Request::Chat(Box::new(chat)), form))
    }
}

struct Draft<'a> {
    bounds: &'a Bounds,
    common: Common,
    input: Option<String>,
    instructions: Option<String>,
    tools: Vec<Tool>,
    tool_choice: Option<Choice>,
    parallel_tool_calls: bool,
    max_output_tokens: Option<u32>,
    logprobs: bool,
    top_logprobs: Option<u32>,
    effort: Option<(ReasoningEffort, String)>,
    reasoning_tokens_max: Option<u32>,
    store: bool,
    background: bool,
    previous_response_id: Option<String>,
    conversation: Option<String>,
    echo: Echo,
    /// True if `input` is required.
    needs_input: bool,
}

impl<'a> Draft<'a> {
    fn new(bounds: &'a Bounds) -> Self {
        Self {
            bounds,
            common: Common::new(),
            input: None,
            instructions: None,
            tools: Vec::new(),
            tool_choice: None,
            parallel_tool_calls: true,
            max_output_tokens: None,
            logprobs: false,
            top_logprobs: None,
            effort: None,
            reasoning_tokens_max: None,
            store: true,
            background: false,
            previous_response_id: None,
            conversation: None,
            echo: Echo::default(),
            needs_input: true,
        }
    }

    fn field(&mut self, reader: &mut Reader<'_>, key: &str) -> Result<(), Fault> {
        let bounds = self.bounds;
        match key {
            "input" => self.input = Some(text_or_list(reader)?),
            "instructions" => self.instructions = Some(text_or_list(reader)?),
            "tools" => self.tools = self::tools(reader, bounds)?,
            "tool_choice" => {
                let (choice, echo) = tool_choice(reader, bounds)?;
                (self.tool_choice, self.echo.tool_choice) = (Some(choice), echo);
            }
            "parallel_tool_calls" => self.parallel_tool_calls = reader.boolean()?,
            "text" => self.text(reader)?,
            "reasoning" => self.reasoning(reader)?,
            "max_output_tokens" => self.max_output_tokens = Some(fields::count(reader, 1..=u32::MAX)?),
            "max_tool_calls" => self.echo.max_tool_calls = Some(fields::count(reader, 1..=u32::MAX)?),
            "top_logprobs" => self.top_logprobs = Some(fields::count(reader, 0..=bounds.logprobs_max)?),
            "include" => self.include(reader)?,
            "truncation" => self.echo.truncates = fields::word(reader, &[("disabled", false), ("auto", true)])?,
            "store" => self.store = reader.boolean()?,
            "background" => self.background = reader.boolean()?,
            "previous_response_id" => {
                self.previous_response_id = Some(fields::name(reader, bounds.name_chars_max)?);
            }
            "metadata" => {
                let raw = reader.raw()?.text;
                fields::metadata(&mut Reader::new(raw.as_bytes())?, bounds.metadata_max)?;
                self.echo.metadata = compacted(raw);
            }
            "return_tokens_as_token_ids" => {
                if reader.boolean()? {
                    return Err(Fault::of(ApiErrorKind::Unsupported, "not built for responses"));
                }
            }
            "logprob_token_ids" => {
                if !fields::token_ids(reader, bounds.logprob_tokens_max)?.is_empty() {
                    return Err(Fault::of(ApiErrorKind::Unsupported, "not built for responses"));
                }
            }
            "n" if fields::count(reader, 1..=1)? == 1 => {}
            "safety_identifier" => self.echo.safety_identifier = Some(fields::string(reader, 512)?),
            "prompt_cache_key" => self.echo.prompt_cache_key = Some(fields::string(reader, 1_024)?),
            "conversation" => self.conversation = Some(conversation(reader, bounds)?),
            "prompt" => {
                return Err(Fault::of(ApiErrorKind::Unsupported, "not built; send what it names in input"));
            }
            "response_format" => return Err(Fault::of(ApiErrorKind::Unsupported, "use text.format")),
            "thinking_token_budget" => self.reasoning_tokens_max = thinking_token_budget(reader)?,
            "context_management" => return Err(Fault::of(ApiErrorKind::Unsupported, "nothing is compacted here")),
            "max_tokens" | "max_completion_tokens" => {
                return Err(Fault::of(ApiErrorKind::Unsupported, "use max_output_tokens"));
            }
            _ if self.common.field(reader, key, bounds)? => {}
            _ => unbuilt::other(&mut self.common, reader, key, bounds)?,
        }
        Ok(())
    }

    /// Reads the `text` object, `{format, verbosity}`.
    fn text(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        let bounds = self.bounds;
        let mut names = Names::new(bounds.inner_fields_max);
        reader.object(|reader, key| {
            names.add(&key)?;
            if reader.null()? {
                return Ok(());
            }
            match &*key {
                "format" => {
                    let format = format(reader, bounds).within("format")?;
                    self.common.constraint.set("text.format", format).within("format")?;
                }
                "verbosity" => {
                    self.echo.verbosity = Some(fields::word(reader, &Verbosity::WORDS).within("verbosity")?);
                }
                _ => reader.skip()?,
            }
            Ok(())
        })
    }

    /// Reads the `reasoning` object, `{effort, summary}`.
    fn reasoning(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        let mut names = Names::new(self.bounds.inner_fields_max);
        reader.object(|reader, key| {
            names.add(&key)?;
            if reader.null()? {
                return Ok(());
            }
            match &*key {
                "effort" => {
                    let word = reader.raw()?.text;
                    let effort = fields::word(&mut Reader::new(word.as_bytes())?, EFFORTS).within("effort")?;
                    self.effort = Some((effort, word.to_owned()));
                }
                "summary" | "generate_summary" => {
                    let words = [("auto", "auto"), ("concise", "concise"), ("detailed", "detailed")];
                    self.echo.summary = Some(fields::word(reader, &words).within(&key)?);
                }
                _ => reader.skip()?,
            }
            Ok(())
        })
    }

    fn include(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        const INCLUDES_MAX: usize = 32;
        reader.array(|reader, index| {
            bounded(index, INCLUDES_MAX, "names")?;
            // Other values concern built-in tools only; reasoning content is sent where the provider gives it.
            self.logprobs |= reader.string().at(index)? == "message.output_text.logprobs";
            Ok(())
        })
    }

    fn finish(mut self) -> Result<ResponsesRequest, Fault> {
        let model = self.common.take_model()?;
        let input = self.input.take().or_else(|| (!self.needs_input).then(|| "[]".to_owned()));
        let input = input.ok_or_else(|| Fault::invalid("required, but missing")).within("input")?;
        if self.conversation.is_some() && self.previous_response_id.is_some() {
            let why = "not allowed with previous_response_id: send one of the two";
            return Err(Fault::invalid(why)).within("conversation");
        }
        let sampling = &self.common.sampling;
        let mut echo = self.echo;
        echo.model.clone_from(&model);
        echo.instructions.clone_from(&self.instructions);
        echo.previous_response_id.clone_from(&self.previous_response_id);
        echo.conversation.clone_from(&self.conversation);
        echo.max_output_tokens = self.max_output_tokens;
        echo.parallel_tool_calls = self.parallel_tool_calls;
        echo.effort = self.effort.as_ref().map(|(_, word)| word.clone());
        echo.temperature = sampling.temperature;
        echo.top_p = sampling.top_p;
        echo.presence_penalty = sampling.presence_penalty;
        echo.frequency_penalty = sampling.frequency_penalty;
        echo.top_logprobs = self.top_logprobs.unwrap_or(0);
        echo.user.clone_from(&self.common.user);
        let form = self.common.constraint.format();
        (echo.format, echo.structured_outputs) = (format_text(&form), outputs_text(&form));
        echo.tools = tools_text(&self.tools);
        let stream = self.common.stream;
        Ok(ResponsesRequest {
            model,
            stream,
            store: self.store,
            background: self.background,
            previous_response_id: self.previous_response_id,
            conversation: self.conversation,
            common: self.common,
            input,
            instructions: self.instructions,
            tools: self.tools,
            tool_choice: self.tool_choice,
            parallel_tool_calls: self.parallel_tool_calls,
            max_output_tokens: self.max_output_tokens,
            logprobs: self.logprobs,
            top_logprobs: self.top_logprobs,
            effort: self.effort,
            reasoning_tokens_max: self.reasoning_tokens_max,
            echo,
            bounds: self.bounds.clone(),
        })
    }
}

/// JSON text of a string or a list.
fn text_or_list(reader: &mut Reader<'_>) -> Result<String, Fault> {
    match reader.kind()? {
        Kind::String | Kind::Array => Ok(reader.raw()?.text.to_owned()),
        kind => Err(mismatch("a string or an array of items", kind)),
    }
}

/// Reads `{type, name, schema…}`: flat, unlike that of chat completions.
fn format(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ResponseFormat, Fault> {
    reader.expect(Kind::Object)?;
    let raw = reader.raw()?.text;
    let mut is_schema = false;
    Reader::new(raw.as_bytes())?.object(|reader, key| {
        if key == "type" && reader.kind()? == Kind::String {
            is_schema = reader.string()? == "json_schema";
            return Ok(());
        }
        reader.skip()
    })?;
    let mut reader = Reader::new(raw.as_bytes())?;
    if is_schema { json_schema(&mut reader, bounds) } else { response_format(&mut reader, bounds) }
}

/// The form as `text.format`; `None` if that has no word for it.
fn format_text(format: &ResponseFormat) -> Option<String> {
    let mut out = BytesMut::new();
    match format {
        ResponseFormat::Text => out.put_slice(br#"{"type":"text"}"#),
        ResponseFormat::JsonObject => out.put_slice(br#"{"type":"json_object"}"#),
        ResponseFormat::JsonSchema { name, description, schema, strict } => {
            out.put_slice(br#"{"type":"json_schema","name":"#);
            write::string(&mut out, name);
            out.put_slice(b",\"description\":");
            write::optional_string(&mut out, description.as_deref());
            out.put_slice(b",\"schema\":");
            out.put_slice(schema.as_bytes());
            out.put_slice(if *strict { b",\"strict\":true}" } else { b",\"strict\":false}" });
        }
        ResponseFormat::Regex(_)
        | ResponseFormat::Choice(_)
        | ResponseFormat::Grammar { .. }
        | ResponseFormat::StructuralTag(_) => return None,
    }
    Some(String::from_utf8_lossy(&out).into_owned())
}

/// The form as vLLM's `structured_outputs`, where `text.format` has no word for it.
fn outputs_text(format: &ResponseFormat) -> Option<String> {
    let mut out = BytesMut::new();
    let mut object = Object::open(&mut out);
    match format {
        ResponseFormat::Regex(expression) => object.string("regex", expression),
        ResponseFormat::Choice(choices) => object.strings("choice", choices),
        ResponseFormat::Grammar { text, .. } => object.string("grammar", text),
        ResponseFormat::StructuralTag(tag) => object.raw("structural_tag", tag),
        ResponseFormat::Text | ResponseFormat::JsonObject | ResponseFormat::JsonSchema { .. } => return None,
    }
    object.close();
    Some(String::from_utf8_lossy(&out).into_owned())
}

/// Reads the `tools` list, whose functions have their fields directly in the tool.
fn tools(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Vec<Tool>, Fault> {
    let mut all: Vec<Tool> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    reader.array(|reader, index| {
        bounded(index, bounds.tools_max, "tools")?;
        let tool = tools::flat(reader, bounds).at(index)?;
        if !seen.insert(tool.name.clone()) {
            return Err(Fault::invalid(format!("function \"{}\" is given twice", short(&tool.name)))).at(index);
        }
        all.push(tool);
        Ok(())
    })?;
    Ok(all)
}

fn tools_text(tools: &[Tool]) -> String {
    let mut out = BytesMut::new();
    out.put_u8(b'[');
    for (index, tool) in tools.iter().enumerate() {
        if index > 0 {
            out.put_u8(b',');
        }
        out.put_slice(br#"{"type":"function","name":"#);
        write::string(&mut out, &tool.name);
        out.put_slice(b",\"description\":");
        write::optional_string(&mut out, tool.description.as_deref());
        out.put_slice(b",\"parameters\":");
        out.put_slice(tool.parameters.as_deref().unwrap_or("null").as_bytes());
        out.put_slice(if tool.strict { b",\"strict\":true}" } else { b",\"strict\":false}" });
    }
    out.put_u8(b']');
    String::from_utf8_lossy(&out).into_owned()
}

/// Reads `tool_choice`; also returns the JSON with which the answer repeats it.
fn tool_choice(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<(Choice, String), Fault> {
    if reader.kind()? != Kind::Object {
        let raw = reader.raw()?.text;
        return Ok((tools::tool_choice(&mut Reader::new(raw.as_bytes())?, bounds)?, raw.to_owned()));
    }
    let (mut kind, mut name, mut only) = (None, None, Allowed::default());
    let raw = reader.raw()?.text;
    let mut names = Names::new(bounds.inner_fields_max);
    Reader::new(raw.as_bytes())?.object(|reader, key| {
        names.add(&key)?;
        match &*key {
            "type" => kind = Some(fields::name(reader, bounds.name_chars_max).within("type")?),
            "name" => name = Some(fields::name(reader, bounds.name_chars_max).within("name")?),
            _ if only.field(reader, &key, bounds)? => {}
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let kind = kind.ok_or_else(|| Fault::invalid("required, but missing")).within("type")?;
    if kind == "allowed_tools" {
        return Ok((only.finish()?, compacted(raw)));
    }
    if kind != "function" {
        return Ok((Choice::Unbuilt(kind), "\"auto\"".to_owned()));
    }
    let name = name.ok_or_else(|| Fault::invalid("required, but missing")).within("name")?;
    let mut out = BytesMut::new();
    out.put_slice(br#"{"type":"function","name":"#);
    write::string(&mut out, &name);
    out.put_u8(b'}');
    Ok((Choice::Function(name), String::from_utf8_lossy(&out).into_owned()))
}

/// Makes the system message that carries the request's instructions.
pub(super) fn instruction(text: String) -> Message {
    Message { role: Role::System, content: Some(text), ..Message::default() }
}
