//! Usage and content of Gemini answers that the gateway forwards unchanged.

use crate::openai::provider::fault::fault_text;
use crate::seen::{Keep, Seen, count, garbled};
use penstock_types::codec::ProviderFault;
use penstock_types::event::{FinishReason, Usage};
use penstock_types::json::{Fault, Kind, Reader};

/// Inspects one event of a stream. Each event carries counts, so each is parsed.
pub(crate) fn event(data: &[u8], seen: &mut Seen) -> Result<Keep, ProviderFault> {
    let read = Top::read(data).map_err(|_| garbled())?;
    if read.error {
        return Err(fault_text(data));
    }
    seen.content |= read.content || read.finish.is_some();
    seen.pieces += u64::from(read.content);
    seen.finish = read.finish.or(seen.finish);
    seen.usage = read.usage.or(seen.usage);
    Ok(Keep::Yes)
}

/// Inspects a whole answer that is forwarded unchanged, and gathers its facts in `seen`.
pub(crate) fn whole(body: &[u8], seen: &mut Seen) -> Result<(), ProviderFault> {
    let read = Top::read(body).map_err(|_| garbled())?;
    if read.error {
        return Err(fault_text(body));
    }
    (seen.finish, seen.usage) = (read.finish, read.usage);
    Ok(())
}

#[derive(Default)]
struct Top {
    content: bool,
    finish: Option<FinishReason>,
    usage: Option<Usage>,
    error: bool,
}

impl Top {
    fn read(data: &[u8]) -> Result<Self, Fault> {
        let mut reader = Reader::new(data)?;
        let mut out = Self::default();
        if reader.kind()? == Kind::Array {
            // A stream without `alt=sse`, or an error in one, is a list.
            reader.array(|reader, _| out.level(reader))?;
        } else {
            out.level(&mut reader)?;
        }
        reader.end()?;
        Ok(out)
    }

    fn level(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("candidates", Kind::Array) => reader.array(|reader, _| self.candidate(reader)),
            ("promptFeedback", Kind::Object) => reader.object(|reader, key| {
                if key == "blockReason" && reader.kind()? == Kind::String {
                    self.finish = Some(FinishReason::ContentFilter);
                }
                reader.skip()
            }),
            ("usageMetadata", Kind::Object) => self.counts(reader),
            ("error", Kind::Object) => {
                self.error = true;
                reader.skip()
            }
            _ => reader.skip(),
        })
    }

    fn candidate(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("finishReason", Kind::String) => {
                self.finish = Some(match reader.string()?.as_ref() {
                    "MAX_TOKENS" => FinishReason::Length,
                    "STOP" | "FINISH_REASON_UNSPECIFIED" | "OTHER" => FinishReason::Stop,
                    _ => FinishReason::ContentFilter,
                });
                Ok(())
            }
            ("content", Kind::Object) => reader.object(|reader, key| {
                if key != "parts" || reader.kind()? != Kind::Array {
                    return reader.skip();
                }
                reader.array(|reader, _| {
                    self.content = true;
                    reader.skip()
                })
            }),
            _ => reader.skip(),
        })
    }

    fn counts(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        let mut usage = Usage::default();
        let mut candidates = 0;
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("promptTokenCount", Kind::Number) => count(reader, &mut usage.prompt_tokens),
            ("candidatesTokenCount", Kind::Number) => count(reader, &mut candidates),
            ("thoughtsTokenCount", Kind::Number) => count(reader, &mut usage.reasoning_tokens),
            ("cachedContentTokenCount", Kind::Number) => count(reader, &mut usage.cached_tokens),
            _ => reader.skip(),
        })?;
        usage.completion_tokens = u64::saturating_add(candidates, usage.reasoning_tokens);
        self.usage = Some(usage);
        Ok(())
    }
}
