//! Usage and content of OpenAI answers that the gateway forwards unchanged.

use std::sync::LazyLock;

use memchr::memmem::Finder;

use super::provider::fault::fault_text;
use super::provider::usage;
use crate::seen::{Keep, Seen, garbled, has};
use penstock_types::codec::{ProviderFault, Surface};
use penstock_types::event::{FinishReason, ServiceTier, Usage};
use penstock_types::json::{Fault, Kind, Reader};

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"error\""));
static FINISH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\""));

/// Inspects one event of a stream.
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
    if read.error {
        return Err(fault_text(data));
    }
    seen.content |= read.content || read.finish.is_some();
    seen.pieces += u64::from(read.content);
    seen.finish = read.finish.or(seen.finish);
    seen.usage = read.usage.or(seen.usage);
    seen.tier = read.tier.or(seen.tier);
    Ok(if read.usage.is_some() && read.choices == Some(0) { Keep::OnlyUsage } else { Keep::Yes })
}

/// Inspects a whole answer that is forwarded unchanged, and gathers its facts in `seen`.
pub(crate) fn whole(surface: Surface, body: &[u8], seen: &mut Seen) -> Result<(), ProviderFault> {
    let read = Top::read(body).map_err(|_| garbled())?;
    if read.error {
        return Err(fault_text(body));
    }
    seen.complete = !(surface == Surface::Responses && read.is_open);
    (seen.finish, seen.usage, seen.tier) = (read.finish.or(read.status), read.usage, read.tier);
    Ok(())
}

/// Top level of an answer or of a chunk.
#[derive(Default)]
struct Top {
    /// Number of elements of `choices`, if the field is present.
    choices: Option<usize>,
    content: bool,
    finish: Option<FinishReason>,
    /// Token counts, from `usage` or from where Groq, Moonshot and Cohere put them.
    usage: Option<Usage>,
    tier: Option<ServiceTier>,
    error: bool,
    /// Finish reason from `status` of a response.
    status: Option<FinishReason>,
    /// True if `status` says that a response has not ended.
    is_open: bool,
}

impl Top {
    fn read(data: &[u8]) -> Result<Self, Fault> {
        let mut reader = Reader::new(data)?;
        let (mut out, mut elsewhere) = (Self::default(), None);
        if reader.kind()? == Kind::Array {
            // Some rerankers answer a bare list of scores.
            reader.skip()?;
            reader.end()?;
            return Ok(out);
        }
        reader.object(|reader, key| {
            if reader.null()? {
                return Ok(());
            }
            match (key.as_ref(), reader.kind()?) {
                ("choices", Kind::Array) => out.choices(reader, &mut elsewhere),
                ("usage", Kind::Object) => usage::read(reader).map(|usage| out.usage = Some(usage)),
                ("x_groq", Kind::Object) => usage::groq(reader).map(|usage| elsewhere = usage.or(elsewhere)),
                ("meta", Kind::Object) => usage::meta(reader).map(|usage| elsewhere = usage.or(elsewhere)),
                ("service_tier", Kind::String) => tier(reader).map(|tier| out.tier = tier),
                ("error", Kind::Object | Kind::String) => {
                    out.error = true;
                    reader.skip()
                }
                ("status", Kind::String) => {
                    let status = reader.string()?;
                    out.is_open = matches!(&*status, "queued" | "in_progress");
                    out.status = match &*status {
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
        out.usage = out.usage.or(elsewhere);
        Ok(out)
    }

    /// Reads the choices; `usage` gets the counts that a choice carries.
    fn choices(&mut self, reader: &mut Reader<'_>, usage: &mut Option<Usage>) -> Result<(), Fault> {
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
                // Moonshot's field for usage.
                ("usage", Kind::Object) => usage::read(reader).map(|counts| *usage = Some(counts)),
                _ => reader.skip(),
            })
        })
    }
}

/// Skips a value; returns whether it is more than null, empty text or an empty list.
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

/// Reads `service_tier`; `None` for `auto`, which names no tier.
pub(crate) fn tier(reader: &mut Reader<'_>) -> Result<Option<ServiceTier>, Fault> {
    let name = reader.string()?;
    Ok((name != "auto").then(|| ServiceTier::named(&name)))
}
