//! Answers of the OpenAI API, read in passing.

use std::sync::LazyLock;

use memchr::memmem::Finder;

use crate::codec::{FaultClass, ProviderFault, Surface};
use crate::event::{FinishReason, Usage};
use crate::json::{Fault, Kind, Reader};
use crate::watch::{Keep, Seen, garbled, has};

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"error\""));
static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\""));

/// Reads one event of a stream.
pub(crate) fn event(surface: Surface, data: &[u8], seen: &mut Seen) -> Result<Keep, ProviderFault> {
    if surface == Surface::Responses {
        return super::watch_responses::event(data, seen);
    }
    if data == b"[DONE]" {
        seen.complete = true;
        return Ok(Keep::Yes);
    }
    if seen.content && !has(data, &FINISH) && !has(data, &USAGE) && !has(data, &ERROR) {
        seen.pieces += 1;
        return Ok(Keep::Yes);
    }
    let read = Top::read(data).map_err(|_| garbled())?;
    read.fault()?;
    seen.content |= read.content || read.finish.is_some();
    seen.pieces += u64::from(read.content);
    seen.finish = read.finish.or(seen.finish);
    seen.usage = read.usage.or(seen.usage);
    Ok(if read.usage.is_some() && read.choices == Some(0) { Keep::OnlyUsage } else { Keep::Yes })
}

/// Reads a whole answer.
pub(crate) fn whole(_surface: Surface, body: &[u8], seen: &mut Seen) -> Result<(), ProviderFault> {
    let read = Top::read(body).map_err(|_| garbled())?;
    read.fault()?;
    (seen.finish, seen.usage) = (read.finish.or(read.status), read.usage);
    Ok(())
}

/// The top level of an answer or of a chunk.
#[derive(Default)]
struct Top {
    /// Of `choices`, if they are there.
    choices: Option<usize>,
    content: bool,
    finish: Option<FinishReason>,
    usage: Option<Usage>,
    error: Option<ErrorFields>,
    /// `status` of a response.
    status: Option<FinishReason>,
}

impl Top {
    fn read(data: &[u8]) -> Result<Self, Fault> {
        let mut reader = Reader::new(data)?;
        let mut out = Self::default();
        if reader.kind()? == Kind::Array {
            // Scores of some rerankers are a bare list.
            reader.skip()?;
            reader.end()?;
            return Ok(out);
        }
        reader.object(|reader, key| {
            if reader.null()? {
                return Ok(());
            }
            match (key.as_ref(), reader.kind()?) {
                ("choices", Kind::Array) => out.choices(reader),
                ("usage", Kind::Object) => usage(reader).map(|usage| out.usage = Some(usage)),
                ("error", Kind::Object | Kind::String) => error(reader).map(|error| out.error = Some(error)),
                ("status", Kind::String) => {
                    out.status = match reader.string()?.as_ref() {
                        "completed" => Some(FinishReason::Stop),
                        "incomplete" => Some(FinishReason::Length),
                        _ => None,
                    };
                    Ok(())
                }
                _ => reader.skip(),
            }
        })?;
        reader.end()?;
        Ok(out)
    }

    fn choices(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        self.choices = Some(0);
        reader.array(|reader, index| {
            self.choices = Some(index + 1);
            if reader.kind()? != Kind::Object {
                return reader.skip();
            }
            reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
                ("delta", Kind::Object) => reader.object(|reader, key| {
                    self.content |= says_something(reader)? && key != "role";
                    Ok(())
                }),
                ("text", _) => {
                    self.content |= says_something(reader)?;
                    Ok(())
                }
                ("finish_reason", Kind::String) => {
                    self.finish = Some(finish(&reader.string()?));
                    Ok(())
                }
                _ => reader.skip(),
            })
        })
    }

    fn fault(&self) -> Result<(), ProviderFault> {
        self.error.as_ref().map_or(Ok(()), |error| Err(error.fault(0)))
    }
}

/// Skips a value; whether it is more than null, empty text or an empty list.
fn says_something(reader: &mut Reader<'_>) -> Result<bool, Fault> {
    Ok(match reader.kind()? {
        Kind::String => !reader.string()?.is_empty(),
        Kind::Null => {
            reader.skip()?;
            false
        }
        Kind::Array => {
            let mut any = false;
            reader.array(|reader, _| {
                any = true;
                reader.skip()
            })?;
            any
        }
        _ => {
            reader.skip()?;
            true
        }
    })
}

fn finish(word: &str) -> FinishReason {
    match word {
        "length" => FinishReason::Length,
        "tool_calls" | "function_call" => FinishReason::ToolCalls,
        "content_filter" => FinishReason::ContentFilter,
        _ => FinishReason::Stop,
    }
}

/// Reads `usage` under the names of chat completions and of responses.
pub(crate) fn usage(reader: &mut Reader<'_>) -> Result<Usage, Fault> {
    let mut out = Usage::default();
    reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
        ("prompt_tokens" | "input_tokens", Kind::Number) => count(reader, &mut out.prompt_tokens),
        ("completion_tokens" | "output_tokens", Kind::Number) => count(reader, &mut out.completion_tokens),
        ("prompt_cache_hit_tokens", Kind::Number) => count(reader, &mut out.cached_tokens),
        (
            "prompt_tokens_details" | "input_tokens_details" | "completion_tokens_details" | "output_tokens_details",
            Kind::Object,
        ) => reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("cached_tokens", Kind::Number) => count(reader, &mut out.cached_tokens),
            ("cache_write_tokens", Kind::Number) => count(reader, &mut out.cache_write_tokens),
            ("reasoning_tokens", Kind::Number) => count(reader, &mut out.reasoning_tokens),
            _ => reader.skip(),
        }),
        _ => reader.skip(),
    })?;
    Ok(out)
}

/// A count, however it is written; what is none counts as 0.
pub(crate) fn count(reader: &mut Reader<'_>, out: &mut u64) -> Result<(), Fault> {
    let text = reader.number()?;
    *out = text.parse().ok().or_else(|| text.parse::<f64>().ok().map(|value| value as u64)).unwrap_or(0);
    Ok(())
}

/// What an error object says.
#[derive(Clone, Debug, Default)]
pub(crate) struct ErrorFields {
    message: String,
    kind: Option<String>,
    code: Option<String>,
}

/// Reads an error: an object, or just text.
pub(crate) fn error(reader: &mut Reader<'_>) -> Result<ErrorFields, Fault> {
    let mut out = ErrorFields::default();
    if reader.kind()? == Kind::String {
        out.message = shortened(&reader.string()?);
        return Ok(out);
    }
    reader.object(|reader, key| out.field(reader, &key))?;
    Ok(out)
}

impl ErrorFields {
    pub(crate) fn field(&mut self, reader: &mut Reader<'_>, key: &str) -> Result<(), Fault> {
        match (key, reader.kind()?) {
            ("message" | "detail", Kind::String) => self.message = shortened(&reader.string()?),
            ("type", Kind::String) => self.kind = Some(reader.string()?.chars().take(64).collect()),
            ("code", Kind::String) => self.code = Some(reader.string()?.chars().take(64).collect()),
            ("code", Kind::Number) => self.code = Some(reader.number()?.chars().take(8).collect()),
            _ => reader.skip()?,
        }
        Ok(())
    }

    /// As a fault; `status` 0 where it came in the stream of a 200.
    pub(crate) fn fault(&self, status: u16) -> ProviderFault {
        let message =
            if self.message.is_empty() { "The upstream said nothing about it.".into() } else { self.message.clone() };
        let fault = ProviderFault::new(self.class(status), message);
        match self.code.clone().or_else(|| self.kind.clone()) {
            Some(code) => fault.code(code),
            None => fault,
        }
    }

    fn class(&self, status: u16) -> FaultClass {
        let said = |word: &str| {
            self.code.as_deref().is_some_and(|code| code.contains(word))
                || self.kind.as_deref().is_some_and(|kind| kind.contains(word))
        };
        let text = self.message.to_ascii_lowercase();
        if said("context_length") || said("exceed_context_size") || text.contains("context length") {
            return FaultClass::ContextLength;
        }
        if said("content_filter") || said("content_policy") || said("ResponsibleAIPolicyViolation") {
            return FaultClass::ContentPolicy;
        }
        if said("insufficient_quota") {
            return FaultClass::Quota;
        }
        let number = self.code.as_deref().and_then(|code| code.parse().ok()).filter(|code| (400..600).contains(code));
        match (status, number) {
            (0, Some(number)) => ProviderFault::class_of(number),
            (0, None) if said("rate_limit") => FaultClass::RateLimited,
            (0, None) if said("overloaded") => FaultClass::Overloaded,
            (0, None) if said("invalid_request") => FaultClass::Invalid,
            (0, None) => FaultClass::Server,
            (status, _) => ProviderFault::class_of(status),
        }
    }
}

/// Reads the body of an answer whose status is not 2xx, in any of the shapes that servers of this API use.
pub fn fault(status: u16, body: &[u8]) -> ProviderFault {
    let read = || -> Result<ErrorFields, Fault> {
        let mut reader = Reader::new(body)?;
        let mut out = ErrorFields::default();
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("error", Kind::Object | Kind::String) => error(reader).map(|inner| out = inner),
            _ => out.field(reader, &key),
        })?;
        Ok(out)
    };
    match read() {
        Ok(fields) => fields.fault(status),
        Err(_) => {
            ProviderFault::new(ProviderFault::class_of(status), format!("The upstream answered with status {status}."))
        }
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(2000).collect()
}
