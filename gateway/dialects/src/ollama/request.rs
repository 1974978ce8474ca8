//! Bodies of `/api/chat` and `/api/generate` decoded.

use super::messages::{images, messages};
use super::options::options;
use crate::openai::{offered_tools, read_body, schema_text};
use penstock_types::Bounds;
use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::fields;
use penstock_types::json::{Fault, Kind, Reader, Within, mismatch, short};
use penstock_types::request::{
    ChatRequest, CompleteRequest, Message, Part, Prompt, ReasoningEffort, Request, ResponseFormat, Role,
    SamplingParams, StreamOptions, TokenNames, Tool, ToolChoice,
};

/// Decodes a body of `/api/chat`.
pub(super) fn decode_chat(body: &[u8], bounds: &Bounds) -> Result<Request, ApiError> {
    let mut draft = Draft::default();
    let read = read_body(body, bounds, |reader, key| draft.chat_field(reader, key, bounds));
    read.and_then(|()| draft.chat()).map_err(Fault::into_error)
}

/// Decodes a body of `/api/generate`: a conversation of one turn, or with `raw` a plain continuation.
pub(super) fn decode_generate(body: &[u8], bounds: &Bounds) -> Result<Request, ApiError> {
    let mut draft = Draft::default();
    let read = read_body(body, bounds, |reader, key| draft.generate_field(reader, key, bounds));
    read.and_then(|()| draft.generate()).map_err(Fault::into_error)
}

#[derive(Default)]
struct Draft {
    model: Option<String>,
    messages: Option<Vec<Message>>,
    prompt: Option<String>,
    system: Option<String>,
    images: Vec<Part>,
    raw: bool,
    tools: Vec<Tool>,
    format: ResponseFormat,
    sampling: SamplingParams,
    effort: Option<ReasoningEffort>,
    /// True for a whole answer; a stream is the default.
    whole: bool,
    logprobs: bool,
    top_logprobs: Option<u32>,
    ignored: Vec<String>,
}

fn missing() -> Fault {
    Fault::invalid("required, but missing")
}

impl Draft {
    fn chat_field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
        match key {
            "messages" => self.messages = Some(messages(reader, bounds)?),
            "tools" => self.tools = offered_tools(reader, bounds)?,
            _ => self.field(reader, key, bounds)?,
        }
        Ok(())
    }

    fn generate_field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
        match key {
            "prompt" => self.prompt = Some(fields::text(reader)?),
            "system" => self.system = Some(fields::text(reader)?).filter(|text| !text.is_empty()),
            "images" => self.images = images(reader, bounds)?,
            "raw" => self.raw = reader.boolean()?,
            "suffix" | "template" => {
                if !reader.string()?.is_empty() {
                    return Err(Fault::of(ApiErrorKind::Unsupported, "not built"));
                }
            }
            "context" => {
                return Err(Fault::of(ApiErrorKind::Unsupported, "not built: send the turns to /api/chat"));
            }
            _ => self.field(reader, key, bounds)?,
        }
        Ok(())
    }

    fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
        match key {
            "model" => self.model = Some(fields::name(reader, bounds.model_chars_max)?),
            "options" => options(reader, &mut self.sampling, &mut self.ignored, bounds)?,
            "format" => self.format = format(reader, bounds)?,
            "stream" => self.whole = !reader.boolean()?,
            "think" => self.effort = Some(think(reader)?),
            "logprobs" => self.logprobs = reader.boolean()?,
            "top_logprobs" => self.top_logprobs = Some(fields::count(reader, 0..=bounds.logprobs_max)?),
            // Models stay loaded here; a prompt that does not fit is refused.
            "keep_alive" | "truncate" | "shift" => reader.skip()?,
            _ => {
                reader.skip()?;
                if self.ignored.len() < bounds.ignored_max {
                    self.ignored.push(short(key));
                }
            }
        }
        Ok(())
    }

    fn chat(mut self) -> Result<Request, Fault> {
        let messages = self.messages.take().ok_or_else(missing).within("messages")?;
        if messages.is_empty() {
            return Err(Fault::invalid("must hold at least one message: models are loaded without being asked"))
                .within("messages");
        }
        self.conversation(messages)
    }

    fn generate(mut self) -> Result<Request, Fault> {
        let prompt = self.prompt.take().filter(|prompt| !prompt.is_empty());
        let why = "required, but missing or empty: models are loaded without being asked";
        let prompt = prompt.ok_or_else(|| Fault::invalid(why)).within("prompt")?;
        if self.raw {
            return self.continuation(prompt);
        }
        let mut user = Message { role: Role::User, ..Message::default() };
        if !self.images.is_empty() {
            user.parts = std::iter::once(Part::Text(prompt.clone())).chain(std::mem::take(&mut self.images)).collect();
        }
        user.content = Some(prompt);
        let system = self.system.take();
        let system = system.map(|text| Message { role: Role::System, content: Some(text), ..Message::default() });
        self.conversation(system.into_iter().chain([user]).collect())
    }

    fn conversation(self, messages: Vec<Message>) -> Result<Request, Fault> {
        let logprobs = self.logprobs()?;
        let mut chat = ChatRequest::new(self.model.ok_or_else(missing).within("model")?, messages);
        chat.tool_choice = if self.tools.is_empty() { ToolChoice::None } else { ToolChoice::Auto };
        chat.tools = self.tools;
        chat.response_format = self.format;
        chat.sampling = self.sampling;
        chat.reasoning_effort = self.effort;
        chat.logprobs = logprobs;
        chat.stream = stream(self.whole);
        chat.ignored = self.ignored;
        Ok(Request::Chat(Box::new(chat)))
    }

    fn continuation(self, prompt: String) -> Result<Request, Fault> {
        let unbuilt = |name: &str| Err(Fault::of(ApiErrorKind::Unsupported, "not allowed with \"raw\"")).within(name);
        if self.system.is_some() {
            return unbuilt("system");
        }
        if !self.images.is_empty() {
            return unbuilt("images");
        }
        if self.effort.is_some_and(|effort| effort != ReasoningEffort::None) {
            return unbuilt("think");
        }
        Ok(Request::Complete(Box::new(CompleteRequest {
            logprobs: self.logprobs()?,
            model: self.model.ok_or_else(missing).within("model")?,
            prompts: vec![Prompt::Text(prompt)],
            sampling: self.sampling,
            n: 1,
            best_of: 1,
            response_format: self.format,
            echo: false,
            suffix: None,
            stream: stream(self.whole),
            prompt_logprobs: None,
            keep_special_tokens: false,
            return_token_ids: false,
            token_names: TokenNames::Text,
            prompt_tail: None,
            cache_salt: None,
            user: None,
            cache_key: None,
            priority: 0,
            ignored: self.ignored,
        })))
    }

    fn logprobs(&self) -> Result<Option<u32>, Fault> {
        if self.top_logprobs.is_some_and(|count| count > 0) && !self.logprobs {
            return Err(Fault::invalid("only allowed with \"logprobs\": true")).within("top_logprobs");
        }
        Ok(self.logprobs.then_some(self.top_logprobs.unwrap_or(0)))
    }
}

fn stream(whole: bool) -> Option<StreamOptions> {
    (!whole).then_some(StreamOptions { include_usage: true, continuous_usage_stats: false })
}

/// Reads `format`: the word `json`, or a JSON schema.
fn format(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ResponseFormat, Fault> {
    match reader.kind()? {
        Kind::String => match &*reader.string()? {
            "" => Ok(ResponseFormat::Text),
            "json" => Ok(ResponseFormat::JsonObject),
            other => {
                let why = format!("must be \"json\" or a JSON schema, got \"{}\"", short(other));
                Err(Fault::invalid(why))
            }
        },
        Kind::Object => {
            let schema = schema_text(reader, bounds)?;
            Ok(ResponseFormat::JsonSchema { name: "response".to_owned(), description: None, schema, strict: true })
        }
        kind => Err(mismatch("\"json\" or an object", kind)),
    }
}

/// Reads `think`: whether, or how much.
fn think(reader: &mut Reader<'_>) -> Result<ReasoningEffort, Fault> {
    const LEVELS: [(&str, ReasoningEffort); 4] = [
        ("low", ReasoningEffort::Low),
        ("medium", ReasoningEffort::Medium),
        ("high", ReasoningEffort::High),
        ("max", ReasoningEffort::Max),
    ];
    match reader.kind()? {
        Kind::Bool => Ok(if reader.boolean()? { ReasoningEffort::Medium } else { ReasoningEffort::None }),
        Kind::String => fields::word(reader, &LEVELS),
        kind => Err(mismatch("a boolean or a string", kind)),
    }
}
