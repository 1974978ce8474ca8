//! Answers of `converse` (JSON) and `converse-stream` (event stream) decoded into events; the first byte tells the two
//! apart.

use super::fault;
use super::frame::{Frame, FrameFault, FrameReader};
use crate::answer_body::{WHOLE_BYTES_MAX, truncated};
use crate::answer_json as value;
use crate::reasoning_maker::REDACTED;
use penstock_types::codec::{AnswerDecoder, FaultClass, ProviderFault};
use penstock_types::event::{ChatEvent, FinishReason, Usage};
use penstock_types::json::{Fault, Reader, short};
use penstock_types::json_text::compacted;
use penstock_types::room::append;

/// Most calls of one answer; an answer with more is refused as garbled.
const CALLS_MAX: usize = 1_024;

impl From<FrameFault> for ProviderFault {
    fn from(fault: FrameFault) -> Self {
        ProviderFault::new(FaultClass::Garbled, format!("The provider's answer cannot be read: {fault}."))
    }
}

#[derive(Default)]
enum Form {
    #[default]
    Unknown,
    Frames(FrameReader),
    Whole(Vec<u8>),
}

/// Decoder of one Bedrock answer, a stream of frames or a whole body.
#[derive(Default)]
pub(super) struct Decoder {
    form: Form,
    state: State,
}

/// Longest signature over all its pieces, in bytes.
const SIGNATURE_BYTES_MAX: usize = 1 << 20;

#[derive(Default)]
struct State {
    calls: Vec<Call>,
    /// Signature of the reasoning block that is open.
    signature: String,
    finished: bool,
    /// Set once the answer is complete and nothing may follow.
    complete: bool,
}

/// A tool call, whose block may still be open.
struct Call {
    block: u64,
    said: bool,
    open: bool,
}

impl AnswerDecoder for Decoder {
    fn push(&mut self, bytes: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if let (Form::Unknown, Some(first)) = (&self.form, bytes.first()) {
            // A frame begins with its length, whose first byte is 0 or 1.
            self.form = if *first < 2 { Form::Frames(FrameReader::default()) } else { Form::Whole(Vec::new()) };
        }
        let Self { form, state } = self;
        match form {
            Form::Unknown => Ok(()),
            Form::Frames(reader) => {
                reader.push(bytes, |frame| if state.complete { Ok(()) } else { state.frame(&frame, out) })
            }
            Form::Whole(held) if held.len() + bytes.len() > WHOLE_BYTES_MAX => {
                let message = format!("The provider's answer is larger than {WHOLE_BYTES_MAX} bytes.");
                Err(ProviderFault::new(FaultClass::AnswerTooLarge, message))
            }
            Form::Whole(held) => {
                append(held, bytes);
                Ok(())
            }
        }
    }

    fn end(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if self.state.complete {
            return Ok(());
        }
        match std::mem::take(&mut self.form) {
            Form::Unknown => Err(truncated()),
            Form::Whole(held) if held.trim_ascii_end().last() != Some(&b'}') => Err(truncated()),
            Form::Whole(held) => self.state.whole(&held, out),
            Form::Frames(reader) if reader.is_inside() || !self.state.finished => Err(truncated()),
            // The counts are missing, but the answer itself is complete.
            Form::Frames(_) => {
                self.state.complete = true;
                Ok(())
            }
        }
    }

    fn held(&self) -> usize {
        match &self.form {
            Form::Unknown => 0,
            Form::Frames(reader) => reader.held(),
            Form::Whole(held) => held.len(),
        }
    }

    fn is_complete(&self) -> bool {
        self.state.complete
    }
}

impl State {
    fn frame(&mut self, frame: &Frame<'_>, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        match frame.header(":message-type") {
            Some("exception") => {
                return Err(fault::of_exception(frame.header(":exception-type").unwrap_or_default(), frame.payload));
            }
            Some("error") => {
                let message = frame.header(":error-message").unwrap_or("Bedrock ended the answer with an error.");
                let fault = ProviderFault::new(FaultClass::Server, short(message));
                return Err(fault.code(short(frame.header(":error-code").unwrap_or("error"))));
            }
            _ => {}
        }
        let mut reader = Reader::new(frame.payload)?;
        match frame.header(":event-type").unwrap_or_default() {
            "contentBlockStart" => self.start(&mut reader, out)?,
            "contentBlockDelta" => self.delta(&mut reader, out)?,
            "contentBlockStop" => self.stop(&mut reader, out)?,
            "messageStop" => {
                let mut reason = None;
                value::fields(&mut reader, |reader, key| match key {
                    "stopReason" => {
                        reason = value::string(reader)?.map(String::from);
                        Ok(())
                    }
                    _ => reader.skip(),
                })?;
                self.finish(&reason.unwrap_or_default(), out)?;
            }
            "metadata" => {
                let mut usage = Usage::default();
                value::fields(&mut reader, |reader, key| match key {
                    "usage" => {
                        usage = read_usage(reader)?;
                        Ok(())
                    }
                    _ => reader.skip(),
                })?;
                out.push(ChatEvent::Usage(usage));
                self.complete = self.finished;
            }
            // messageStart, and event types that are unknown.
            _ => {}
        }
        Ok(())
    }

    fn start(&mut self, reader: &mut Reader<'_>, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let (mut block, mut call) = (0, None);
        value::fields(reader, |reader, key| match key {
            "contentBlockIndex" => {
                block = value::count(reader)?.unwrap_or_default();
                Ok(())
            }
            "start" => value::fields(reader, |reader, key| match key {
                "toolUse" => {
                    call = Some(ToolUse::read(reader)?);
                    Ok(())
                }
                _ => reader.skip(),
            }),
            _ => reader.skip(),
        })?;
        match call {
            Some(call) => self.call(block, call, out),
            None => Ok(()),
        }
    }

    fn call(&mut self, block: u64, call: ToolUse, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if self.calls.len() == CALLS_MAX {
            return Err(ProviderFault::new(FaultClass::Garbled, "The provider's answer has too many calls."));
        }
        let number = self.calls.len() as u32;
        self.calls.push(Call { block, said: false, open: true });
        let ToolUse { id, name, .. } = call;
        out.push(ChatEvent::ToolCallStart { choice: 0, call: number, id, name, signature: None });
        Ok(())
    }

    fn delta(&mut self, reader: &mut Reader<'_>, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let (mut block, mut delta) = (0, Delta::default());
        value::fields(reader, |reader, key| match key {
            "contentBlockIndex" => {
                block = value::count(reader)?.unwrap_or_default();
                Ok(())
            }
            "delta" => delta.read(reader),
            _ => reader.skip(),
        })?;
        if let Some(json) = delta.input.filter(|json| !json.is_empty())
            && let Some(at) = self.calls.iter().rposition(|call| call.block == block && call.open)
        {
            self.calls[at].said = true;
            out.push(ChatEvent::ToolCallArguments { choice: 0, call: at as u32, json });
        }
        if let Some(piece) = delta.reasoning.signature.take() {
            self.signature.push_str(&piece);
            if self.signature.len() > SIGNATURE_BYTES_MAX {
                return Err(ProviderFault::new(FaultClass::Garbled, "The provider's answer has an endless signature."));
            }
        }
        put_reasoning(delta.reasoning, out);
        if let Some(text) = delta.text.filter(|text| !text.is_empty()) {
            out.push(ChatEvent::Text { choice: 0, text, logprobs: Vec::new(), tokens: Vec::new() });
        }
        Ok(())
    }

    /// Handles the end of a block: a signature becomes an event, a call without arguments gets the empty object.
    fn stop(&mut self, reader: &mut Reader<'_>, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let mut block = 0;
        value::fields(reader, |reader, key| match key {
            "contentBlockIndex" => {
                block = value::count(reader)?.unwrap_or_default();
                Ok(())
            }
            _ => reader.skip(),
        })?;
        if !self.signature.is_empty() {
            let signature = std::mem::take(&mut self.signature);
            out.push(ChatEvent::ReasoningSignature { choice: 0, signature });
        }
        for (at, call) in self.calls.iter_mut().enumerate().filter(|(_, call)| call.block == block && call.open) {
            call.open = false;
            if !call.said {
                out.push(ChatEvent::ToolCallArguments { choice: 0, call: at as u32, json: "{}".to_owned() });
            }
        }
        Ok(())
    }

    fn finish(&mut self, word: &str, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if std::mem::replace(&mut self.finished, true) {
            return Ok(());
        }
        let reason = match word {
            "tool_use" => FinishReason::ToolCalls,
            "max_tokens" | "model_context_window_exceeded" => FinishReason::Length,
            "content_filtered" | "guardrail_intervened" => FinishReason::ContentFilter,
            "malformed_model_output" | "malformed_tool_use" => {
                let message = format!("The provider ended the answer with {word}.");
                return Err(ProviderFault::new(FaultClass::Server, message).code(word));
            }
            // end_turn, stop_sequence, and reasons that are unknown.
            _ if self.calls.is_empty() => FinishReason::Stop,
            _ => FinishReason::ToolCalls,
        };
        out.push(ChatEvent::Finish { choice: 0, reason, stop: None });
        Ok(())
    }

    fn whole(&mut self, json: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let (mut blocks, mut reason, mut usage) = (Vec::new(), None, None);
        let mut reader = Reader::new(json)?;
        value::fields(&mut reader, |reader, key| match key {
            "output" => value::fields(reader, |reader, key| match key {
                "message" => value::fields(reader, |reader, key| match key {
                    "content" => value::items(reader, |reader, _| {
                        blocks.push(Block::read(reader)?);
                        Ok(())
                    }),
                    _ => reader.skip(),
                }),
                _ => reader.skip(),
            }),
            "stopReason" => {
                reason = value::string(reader)?.map(String::from);
                Ok(())
            }
            "usage" => {
                usage = Some(read_usage(reader)?);
                Ok(())
            }
            _ => reader.skip(),
        })?;
        reader.end()?;
        let Some(reason) = reason else {
            return Err(ProviderFault::new(FaultClass::Garbled, "The provider's answer is not what its API promises."));
        };
        for block in blocks {
            put_reasoning(block.reasoning, out);
            if let Some(text) = block.text.filter(|text| !text.is_empty()) {
                out.push(ChatEvent::Text { choice: 0, text, logprobs: Vec::new(), tokens: Vec::new() });
            }
            if let Some(mut call) = block.call {
                let json = std::mem::take(&mut call.input);
                let number = self.calls.len() as u32;
                self.call(u64::from(number), call, out)?;
                out.push(ChatEvent::ToolCallArguments { choice: 0, call: number, json });
            }
        }
        self.finish(&reason, out)?;
        out.extend(usage.map(ChatEvent::Usage));
        self.complete = true;
        Ok(())
    }
}

/// Reads usage. The API counts input tokens read from a cache or written to one apart from the others.
fn read_usage(reader: &mut Reader<'_>) -> Result<Usage, Fault> {
    let (mut input, mut output, mut read, mut written) = (0, 0, 0, 0);
    value::fields(reader, |reader, key| {
        let field: &mut u64 = match key {
            "inputTokens" => &mut input,
            "outputTokens" => &mut output,
            "cacheReadInputTokens" => &mut read,
            "cacheWriteInputTokens" => &mut written,
            _ => return reader.skip(),
        };
        *field = value::count(reader)?.unwrap_or_default();
        Ok(())
    })?;
    Ok(Usage {
        prompt_tokens: input.saturating_add(read).saturating_add(written),
        cached_tokens: read,
        cache_write_tokens: written,
        completion_tokens: output,
        reasoning_tokens: 0,
    })
}

struct ToolUse {
    id: String,
    name: String,
    input: String,
}

impl ToolUse {
    fn read(reader: &mut Reader<'_>) -> Result<Self, Fault> {
        let mut out = Self { id: String::new(), name: String::new(), input: "{}".to_owned() };
        value::fields(reader, |reader, key| {
            match key {
                "toolUseId" => out.id = value::string(reader)?.unwrap_or_default().into_owned(),
                "name" => out.name = value::string(reader)?.unwrap_or_default().into_owned(),
                "input" => out.input = compacted(reader.raw()?.text),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(out)
    }
}

/// Reasoning content, in a delta or in a block.
#[derive(Default)]
struct Reasoning {
    text: Option<String>,
    signature: Option<String>,
    redacted: Option<String>,
}

impl Reasoning {
    fn read(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        value::fields(reader, |reader, key| {
            let field = match key {
                "reasoningText" => return self.read(reader),
                "text" => &mut self.text,
                "signature" => &mut self.signature,
                "redactedContent" => &mut self.redacted,
                _ => return reader.skip(),
            };
            *field = value::string(reader)?.map(String::from).filter(|text| !text.is_empty());
            Ok(())
        })
    }
}

fn put_reasoning(reasoning: Reasoning, out: &mut Vec<ChatEvent>) {
    let Reasoning { text, signature, redacted } = reasoning;
    out.extend(text.map(|text| ChatEvent::Reasoning { choice: 0, text }));
    let redacted = redacted.map(|data| format!("{REDACTED}{data}"));
    out.extend(signature.or(redacted).map(|signature| ChatEvent::ReasoningSignature { choice: 0, signature }));
}

#[derive(Default)]
struct Delta {
    text: Option<String>,
    input: Option<String>,
    reasoning: Reasoning,
}

impl Delta {
    fn read(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        value::fields(reader, |reader, key| {
            match key {
                "text" => self.text = value::string(reader)?.map(String::from),
                "toolUse" => value::fields(reader, |reader, key| {
                    match key {
                        "input" => self.input = value::string(reader)?.map(String::from),
                        _ => reader.skip()?,
                    }
                    Ok(())
                })?,
                "reasoningContent" => self.reasoning.read(reader)?,
                _ => reader.skip()?,
            }
            Ok(())
        })
    }
}

#[derive(Default)]
struct Block {
    text: Option<String>,
    call: Option<ToolUse>,
    reasoning: Reasoning,
}

impl Block {
    fn read(reader: &mut Reader<'_>) -> Result<Self, Fault> {
        let mut out = Self::default();
        value::fields(reader, |reader, key| {
            match key {
                "text" => out.text = value::string(reader)?.map(String::from),
                "toolUse" => out.call = Some(ToolUse::read(reader)?),
                "reasoningContent" => out.reasoning.read(reader)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(out)
    }
}
