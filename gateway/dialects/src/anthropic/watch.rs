//! Usage and content of Anthropic answers that the gateway forwards unchanged.

use std::sync::LazyLock;

use memchr::memmem::Finder;

use super::fault;
use crate::seen::{Keep, Seen, count, garbled};
use penstock_types::codec::ProviderFault;
use penstock_types::event::{FinishReason, ServiceTier, Usage};
use penstock_types::json::{Fault, Kind, Reader};

static DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"content_block_delta\""));

/// Inspects one event of a stream.
pub(crate) fn event(data: &[u8], seen: &mut Seen) -> Result<Keep, ProviderFault> {
    // The type stands at the front of an event.
    if seen.content && DELTA.find(&data[..data.len().min(64)]).is_some() {
        seen.pieces += 1;
        return Ok(Keep::Yes);
    }
    let read = Top::read(data).map_err(|_| garbled())?;
    match read.kind.as_str() {
        "error" => return Err(fault::read(0, data)),
        "content_block_delta" => {
            seen.content = true;
            seen.pieces += 1;
        }
        // A tool call is named when its block begins; a text block begins empty.
        "content_block_start" => seen.content |= read.names_tool,
        "message_stop" => seen.complete = true,
        _ => {}
    }
    read.into(seen);
    seen.content |= seen.finish.is_some() || seen.complete;
    Ok(Keep::Yes)
}

/// Inspects a whole answer that is forwarded unchanged, and gathers its facts in `seen`.
pub(crate) fn whole(body: &[u8], seen: &mut Seen) -> Result<(), ProviderFault> {
    let read = Top::read(body).map_err(|_| garbled())?;
    if read.kind == "error" {
        return Err(fault::read(0, body));
    }
    read.into(seen);
    Ok(())
}

/// Reads `input_tokens` from the answer to a count request.
pub fn input_tokens(body: &[u8]) -> Option<u64> {
    let read = || -> Result<Option<u64>, Fault> {
        let mut reader = Reader::new(body)?;
        let mut tokens = None;
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("input_tokens", Kind::Number) => count(reader, tokens.insert(0)),
            _ => reader.skip(),
        })?;
        Ok(tokens)
    };
    read().ok().flatten()
}

/// Top level of an answer, or of an event that nests parts of an answer.
#[derive(Default)]
struct Top {
    kind: String,
    names_tool: bool,
    finish: Option<FinishReason>,
    counts: Counts,
}

/// Token counts as reported; a later event repeats or corrects some of them.
#[derive(Default)]
struct Counts {
    input: Option<u64>,
    output: Option<u64>,
    read: Option<u64>,
    written: Option<u64>,
    /// Counts of the compactions so far; the counts above leave them out, and they are billed.
    compacted: Option<Usage>,
    tier: Option<ServiceTier>,
}

impl Top {
    fn read(data: &[u8]) -> Result<Self, Fault> {
        let mut reader = Reader::new(data)?;
        let mut out = Self::default();
        out.level(&mut reader, true)?;
        reader.end()?;
        Ok(out)
    }

    fn level(&mut self, reader: &mut Reader<'_>, top: bool) -> Result<(), Fault> {
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("type", Kind::String) if top => {
                self.kind = reader.string()?.chars().take(64).collect();
                Ok(())
            }
            ("message" | "delta", Kind::Object) if top => self.level(reader, false),
            ("content_block", Kind::Object) if top => reader.object(|reader, key| {
                if key == "type" && reader.kind()? == Kind::String {
                    self.names_tool |= !matches!(reader.string()?.as_ref(), "text" | "thinking");
                    return Ok(());
                }
                reader.skip()
            }),
            ("stop_reason", Kind::String) => {
                self.finish = Some(finish(&reader.string()?));
                Ok(())
            }
            ("usage", Kind::Object) => self.counts.read(reader),
            _ => reader.skip(),
        })
    }

    fn into(self, seen: &mut Seen) {
        seen.tier = self.counts.tier.or(seen.tier);
        seen.finish = self.finish.or(seen.finish);
        self.counts.into(seen);
    }
}

impl Counts {
    /// Place of the count with this name.
    fn place(&mut self, name: &str) -> Option<&mut Option<u64>> {
        match name {
            "input_tokens" => Some(&mut self.input),
            "output_tokens" => Some(&mut self.output),
            "cache_read_input_tokens" => Some(&mut self.read),
            "cache_creation_input_tokens" => Some(&mut self.written),
            _ => None,
        }
    }

    fn read(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            (name, Kind::Number) => match self.place(name) {
                Some(place) => count(reader, place.insert(0)),
                None => reader.skip(),
            },
            ("service_tier" | "speed", Kind::String) => {
                let name = reader.string()?;
                // A request can be told two tiers: the dearer one counts.
                if self.tier.is_none() || ServiceTier::named(&name) != ServiceTier::Standard {
                    self.tier = Some(ServiceTier::named(&name));
                }
                Ok(())
            }
            ("iterations", Kind::Array) => {
                self.compacted = Some(compactions(reader)?);
                Ok(())
            }
            _ => reader.skip(),
        })
    }

    /// Stores the counts in `seen`: those of the answer, and beside them the compactions.
    fn into(self, seen: &mut Seen) {
        if self.input.is_none() && self.output.is_none() && self.compacted.is_none() {
            return;
        }
        let known = less(seen.usage.unwrap_or_default(), seen.compacted);
        seen.compacted = self.compacted.unwrap_or(seen.compacted);
        seen.usage = Some(sum(self.usage(known), seen.compacted));
    }

    /// Counts as ours, those that are not reported as in `known`. The API counts cached tokens beside the input; here they are
    /// part of it.
    fn usage(&self, known: Usage) -> Usage {
        let fresh = known.prompt_tokens.saturating_sub(known.cached_tokens).saturating_sub(known.cache_write_tokens);
        let (fresh, read) = (self.input.unwrap_or(fresh), self.read.unwrap_or(known.cached_tokens));
        let written = self.written.unwrap_or(known.cache_write_tokens);
        Usage {
            prompt_tokens: fresh.saturating_add(read).saturating_add(written),
            cached_tokens: read,
            cache_write_tokens: written,
            completion_tokens: self.output.unwrap_or(known.completion_tokens),
            ..known
        }
    }
}

/// Reads `usage.iterations` and returns the sum of its compactions. Iterations of the model itself are in the answer's own counts.
/// Those of an advisor are not, but another model makes them, at another price: they are not counted.
fn compactions(reader: &mut Reader<'_>) -> Result<Usage, Fault> {
    let mut all = Usage::default();
    reader.array(|reader, _| {
        if reader.kind()? != Kind::Object {
            return reader.skip();
        }
        let (mut counts, mut is_compaction) = (Counts::default(), false);
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("type", Kind::String) => {
                is_compaction = reader.string()? == "compaction";
                Ok(())
            }
            (name, Kind::Number) => match counts.place(name) {
                Some(place) => count(reader, place.insert(0)),
                None => reader.skip(),
            },
            _ => reader.skip(),
        })?;
        if is_compaction {
            all = sum(all, counts.usage(Usage::default()));
        }
        Ok(())
    })?;
    Ok(all)
}

fn sum(one: Usage, other: Usage) -> Usage {
    each(one, other, u64::saturating_add)
}

fn less(one: Usage, other: Usage) -> Usage {
    each(one, other, u64::saturating_sub)
}

fn each(one: Usage, other: Usage, of: fn(u64, u64) -> u64) -> Usage {
    Usage {
        prompt_tokens: of(one.prompt_tokens, other.prompt_tokens),
        cached_tokens: of(one.cached_tokens, other.cached_tokens),
        cache_write_tokens: of(one.cache_write_tokens, other.cache_write_tokens),
        completion_tokens: of(one.completion_tokens, other.completion_tokens),
        reasoning_tokens: of(one.reasoning_tokens, other.reasoning_tokens),
    }
}

fn finish(word: &str) -> FinishReason {
    match word {
        "max_tokens" | "model_context_window_exceeded" => FinishReason::Length,
        "tool_use" => FinishReason::ToolCalls,
        "refusal" => FinishReason::ContentFilter,
        _ => FinishReason::Stop,
    }
}
