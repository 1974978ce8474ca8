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
        let (mut candidates, mut tools) = (0, 0);
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("promptTokenCount", Kind::Number) => count(reader, &mut usage.prompt_tokens),
            ("candidatesTokenCount", Kind::Number) => count(reader, &mut candidates),
            // Tokens brought in by Google's own tools are billed as input.
            ("toolUsePromptTokenCount", Kind::Number) => count(reader, &mut tools),
            ("thoughtsTokenCount", Kind::Number) => count(reader, &mut usage.reasoning_tokens),
            ("cachedContentTokenCount", Kind::Number) => count(reader, &mut usage.cached_tokens),
            _ => reader.skip(),
        })?;
        usage.prompt_tokens = u64::saturating_add(usage.prompt_tokens, tools);
        usage.completion_tokens = u64::saturating_add(candidates, usage.reasoning_tokens);
        self.usage = Some(usage);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_googles_tools_bring_in_counts_as_prompt() {
        let counts = br#"{"candidates":[{"finishReason":"STOP"}],"usageMetadata":{"promptTokenCount":5,
            "toolUsePromptTokenCount":1000,"candidatesTokenCount":2,"thoughtsTokenCount":3,"totalTokenCount":1010}}"#;
        let mut seen = Seen::default();
        whole(counts, &mut seen).expect("an answer");
        let usage = seen.usage.expect("counts");
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (1005, 5));
        let mut seen = Seen::default();
        event(counts, &mut seen).expect("an event");
        assert_eq!(seen.usage.map(|usage| usage.prompt_tokens), Some(1005));
    }
}
