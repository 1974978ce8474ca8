//! Bodies of `generateContent` and `streamGenerateContent` decoded into [`ChatRequest`].

use super::fields::{object, unbuilt, word};
use super::schema::{self, Given};
use super::{contents, tools};
use penstock_types::Bounds;
use penstock_types::error::{ApiError, ApiErrorKind};
use penstock_types::fields::{self, bounded};
use penstock_types::json::{Fault, Kind, Reader, Within, short};
use penstock_types::request::{ChatRequest, Message, ReasoningEffort, ResponseFormat, StreamOptions, Tool};

/// A decoded body: the request, and settings that only the answer's form needs.
pub(super) struct Generate {
    pub(super) chat: ChatRequest,
    /// True if the client wants to see reasoning (`includeThoughts`).
    pub(super) include_thoughts: bool,
}

/// Decodes a body; `stream` and `model` stand in the URL.
pub(super) fn decode(model: &str, stream: bool, body: &[u8], bounds: &Bounds) -> Result<Generate, ApiError> {
    let mut draft = Draft::default();
    read(body, bounds, &mut draft).and_then(|()| draft.finish(model, stream, bounds)).map_err(Fault::into_error)
}

/// Decodes a body of `countTokens`: `contents` alone, or a whole `generateContentRequest`.
pub(super) fn decode_count(model: &str, body: &[u8], bounds: &Bounds) -> Result<Generate, ApiError> {
    let mut draft = Draft { counts: true, ..Draft::default() };
    read(body, bounds, &mut draft).and_then(|()| draft.finish(model, false, bounds)).map_err(Fault::into_error)
}

fn read(body: &[u8], bounds: &Bounds, draft: &mut Draft) -> Result<(), Fault> {
    let mut reader = Reader::new(body)?;
    let kind = reader.kind()?;
    if kind != Kind::Object {
        return Err(Fault::invalid(format!("The body must be a JSON object, got {}.", kind.name())));
    }
    object(&mut reader, bounds.fields_max, |reader, key| draft.field(reader, key, bounds))?;
    reader.end()
}

#[derive(Default)]
struct Draft {
    /// Set for a body of `countTokens`, which may hold the request as a field.
    counts: bool,
    contents: Option<Vec<Message>>,
    system: Option<Message>,
    tools: Vec<Tool>,
    calling: tools::Calling,
    config: Config,
    ignored: Vec<String>,
}

impl Draft {
    fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
        match key {
            "contents" => {
                if self.contents.replace(contents::contents(reader, bounds)?).is_some() {
                    return Err(Fault::invalid("given twice"));
                }
            }
            "systemInstruction" => self.system = contents::system(reader, bounds)?,
            "tools" => self.tools = tools::tools(reader, bounds)?,
            "toolConfig" => self.calling = tools::tool_config(reader, bounds)?,
            "generationConfig" => object(reader, bounds.inner_fields_max, |reader, key| {
                self.config.field(reader, key, &mut self.ignored, bounds)
            })?,
            "generateContentRequest" if self.counts => {
                self.counts = false;
                object(reader, bounds.fields_max, |reader, key| self.field(reader, key, bounds))?;
                self.counts = true;
            }
            "cachedContent" => return Err(unbuilt("cached contents are not built: send the contents themselves")),
            // The model in the URL counts; the other fields concern Google's own service and change nothing here.
            "model" | "safetySettings" | "labels" | "serviceTier" | "store" => reader.skip()?,
            _ => {
                reader.skip()?;
                ignore(&mut self.ignored, key, bounds);
            }
        }
        Ok(())
    }

    fn finish(self, model: &str, stream: bool, bounds: &Bounds) -> Result<Generate, Fault> {
        let mut messages = self.contents.ok_or_else(|| Fault::invalid("required, but missing")).within("contents")?;
        if let Some(system) = self.system {
            messages.insert(0, system);
        }
        let mut chat = ChatRequest::new(model.to_owned(), messages);
        let validated = self.calling.is_validated();
        let choice = self.calling.resolve(&self.tools);
        chat.tool_choice = choice.within("functionCallingConfig").within("toolConfig")?;
        chat.tools = self.tools;
        if validated {
            let strict = |tool: Tool| Tool::function(tool.name, tool.description, tool.parameters, true);
            chat.tools = chat.tools.into_iter().map(strict).collect();
        }
        chat.ignored = self.ignored;
        chat.stream = stream.then_some(StreamOptions { include_usage: true, continuous_usage_stats: false });
        let include_thoughts = self.config.thinking.include;
        self.config.finish(&mut chat, bounds).within("generationConfig")?;
        Ok(Generate { chat, include_thoughts })
    }
}

fn ignore(ignored: &mut Vec<String>, name: &str, bounds: &Bounds) {
    if ignored.len() < bounds.ignored_max {
        ignored.push(short(name));
    }
}

#[derive(Default)]
struct Config {
    sampling: penstock_types::request::SamplingParams,
    n: Option<u32>,
    mime_type: Option<MimeType>,
    schema: Given,
    wants_logprobs: bool,
    logprobs: Option<u32>,
    thinking: Thinking,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum MimeType {
    Text,
    Json,
    /// One of the texts that the schema lists (`text/x.enum`).
    Choice,
}

#[derive(Clone, Copy, Default)]
struct Thinking {
    include: bool,
    /// Budget in tokens; below 0 the model decides.
    budget: Option<i128>,
    /// Level; `None` inside means that the model decides.
    level: Option<Option<ReasoningEffort>>,
}

impl Config {
    fn field(
        &mut self,
        reader: &mut Reader<'_>,
        key: &str,
        ignored: &mut Vec<String>,
        bounds: &Bounds,
    ) -> Result<(), Fault> {
        let sampling = &mut self.sampling;
        match key {
            "temperature" => sampling.temperature = Some(fields::number(reader, 0.0..=2.0, false)?),
            "topP" => sampling.top_p = Some(fields::number(reader, 0.0..=1.0, true)?),
            "topK" => sampling.top_k = Some(fields::count(reader, 0..=u32::MAX)?),
            "candidateCount" => self.n = Some(fields::count(reader, 1..=bounds.n_max)?),
            "maxOutputTokens" => sampling.max_tokens = Some(fields::count(reader, 1..=u32::MAX)?),
            "stopSequences" => sampling.stop = fields::strings(reader, bounds.stop_max, bounds.stop_chars_max)?,
            "seed" => {
                let seed = fields::integer(reader, i128::from(i64::MIN)..=i128::from(u64::MAX))?;
                sampling.seed = Some(seed as u64); // a negative seed is its two's complement
            }
            "presencePenalty" => sampling.presence_penalty = fields::number(reader, -2.0..=2.0, false)?,
            "frequencyPenalty" => sampling.frequency_penalty = fields::number(reader, -2.0..=2.0, false)?,
            "responseMimeType" => self.mime_type = Some(mime_type(reader)?),
            "responseSchema" => self.schema.set(schema::schema(reader, bounds)?)?,
            "responseJsonSchema" | "_responseJsonSchema" => self.schema.set(schema::json_schema(reader, bounds)?)?,
            "responseLogprobs" => self.wants_logprobs = reader.boolean()?,
            "logprobs" => self.logprobs = Some(fields::count(reader, 0..=bounds.logprobs_max)?),
            "thinkingConfig" => self.thinking = thinking(reader, bounds)?,
            "responseModalities" => modalities(reader)?,
            "speechConfig" | "imageConfig" | "audioTranscriptionConfig" | "translationConfig" => {
                return Err(unbuilt("only text is built"));
            }
            "responseFormat" => return Err(unbuilt("not built; use responseMimeType and responseSchema")),
            _ => {
                reader.skip()?;
                ignore(ignored, &format!("generationConfig.{key}"), bounds);
            }
        }
        Ok(())
    }

    fn finish(self, chat: &mut ChatRequest, bounds: &Bounds) -> Result<(), Fault> {
        chat.response_format = match (self.mime_type, self.schema.take()) {
            (Some(MimeType::Json), None) => ResponseFormat::JsonObject,
            (Some(MimeType::Json), Some(schema)) => {
                ResponseFormat::JsonSchema { name: "response".to_owned(), description: None, schema, strict: true }
            }
            (Some(MimeType::Choice), Some(schema)) => {
                ResponseFormat::Choice(schema::choices(&schema, bounds).within("responseSchema")?)
            }
            (Some(MimeType::Choice), None) => {
                return Err(Fault::invalid("required with responseMimeType \"text/x.enum\", but missing"))
                    .within("responseSchema");
            }
            (_, Some(_)) => {
                return Err(Fault::invalid(
                    "only allowed with responseMimeType \"application/json\" or \"text/x.enum\"",
                ))
                .within("responseSchema");
            }
            (_, None) => ResponseFormat::Text,
        };
        if self.logprobs.is_some() && !self.wants_logprobs {
            return Err(Fault::invalid("only allowed with \"responseLogprobs\": true")).within("logprobs");
        }
        chat.logprobs = self.wants_logprobs.then_some(self.logprobs.unwrap_or(0));
        chat.sampling = self.sampling;
        chat.n = self.n.unwrap_or(1);
        self.thinking.finish(chat).within("thinkingConfig")
    }
}

fn mime_type(reader: &mut Reader<'_>) -> Result<MimeType, Fault> {
    match &*reader.string()? {
        "" | "text/plain" => Ok(MimeType::Text),
        "application/json" => Ok(MimeType::Json),
        "text/x.enum" => Ok(MimeType::Choice),
        other => {
            let why = format!("text/plain, application/json and text/x.enum are built, \"{}\" is not", short(other));
            Err(Fault::of(ApiErrorKind::UnsupportedValue, why))
        }
    }
}

/// Words of `thinkingLevel` and the reasoning effort that each asks for.
const LEVELS: &[(&str, Option<ReasoningEffort>)] = &[
    ("MINIMAL", Some(ReasoningEffort::Minimal)),
    ("LOW", Some(ReasoningEffort::Low)),
    ("MEDIUM", Some(ReasoningEffort::Medium)),
    ("HIGH", Some(ReasoningEffort::High)),
    ("XHIGH", Some(ReasoningEffort::Max)),
    ("THINKING_LEVEL_UNSPECIFIED", None),
];

fn thinking(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<Thinking, Fault> {
    let mut out = Thinking::default();
    object(reader, bounds.inner_fields_max, |reader, key| {
        match key {
            "includeThoughts" => out.include = reader.boolean()?,
            "thinkingBudget" => out.budget = Some(fields::integer(reader, -1..=i128::from(u32::MAX))?),
            "thinkingLevel" => out.level = Some(word(reader, LEVELS)?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(out)
}

impl Thinking {
    fn finish(self, chat: &mut ChatRequest) -> Result<(), Fault> {
        if self.budget.is_some() && self.level.is_some() {
            return Err(Fault::invalid("only one of thinkingBudget and thinkingLevel is allowed"))
                .within("thinkingBudget");
        }
        chat.reasoning_effort = self.level.flatten();
        match self.budget {
            None | Some(-1) => {}
            Some(0) => {
                chat.reasoning_tokens_max = Some(0);
                chat.reasoning_effort = Some(ReasoningEffort::None);
            }
            Some(tokens) => chat.reasoning_tokens_max = Some(tokens as u32),
        }
        Ok(())
    }
}

/// Checks `responseModalities`: only text is supported.
fn modalities(reader: &mut Reader<'_>) -> Result<(), Fault> {
    const MODALITIES: &[(&str, bool)] =
        &[("TEXT", true), ("MODALITY_UNSPECIFIED", true), ("IMAGE", false), ("AUDIO", false), ("VIDEO", false)];
    reader.array(|reader, index| {
        bounded(index, MODALITIES.len(), "modalities")?;
        if word(reader, MODALITIES).at(index)? {
            return Ok(());
        }
        Err(Fault::of(ApiErrorKind::UnsupportedValue, "only TEXT is built")).at(index)
    })
}
