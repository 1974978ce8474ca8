//! Anthropic's answers, streamed or whole, decoded into events.
//!
//! Unknown events and block types are skipped, as the API asks of its clients. A stream is complete at `message_stop`;
//! a stream that ends before is truncated, whatever content it brought.

use super::fault::Said;
use crate::reasoning_maker::{CALL, REDACTED};
use penstock_types::codec::{AnswerDecoder, FaultClass, ProviderFault};
use penstock_types::event::{ChatEvent, FinishReason, StopCause, Usage};
use penstock_types::json::{Fault, Kind, Reader};
use penstock_types::room::append;
use penstock_types::sse::{SseReader, TooLarge};

/// Longest whole answer, in bytes.
const BODY_BYTES_MAX: usize = 64 << 20;
/// Longest signature over all its pieces, in bytes.
const SIGNATURE_BYTES_MAX: usize = 4 << 20;
/// Most blocks that may be open at once. The API has one open at a time.
const OPEN_MAX: usize = 1_024;

/// Decoder of one Anthropic answer, streamed or whole.
pub(super) struct Decoder {
    /// Event reader of a streamed answer; `None` for a whole one, whose body is collected.
    sse: Option<SseReader>,
    body: Vec<u8>,
    answer: Answer,
}

impl Decoder {
    pub(super) fn new(stream: bool) -> Self {
        Self { sse: stream.then(SseReader::default), body: Vec::new(), answer: Answer::default() }
    }
}

impl AnswerDecoder for Decoder {
    fn push(&mut self, bytes: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if let Some(sse) = &mut self.sse {
            let answer = &mut self.answer;
            return sse.push(bytes, |_, data| answer.frame(data, out)).map_err(|Stop(fault)| fault);
        }
        if self.body.len() + bytes.len() > BODY_BYTES_MAX {
            return Err(ProviderFault::new(FaultClass::AnswerTooLarge, "The upstream's answer is too large."));
        }
        append(&mut self.body, bytes);
        Ok(())
    }

    fn end(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if self.answer.complete {
            return Ok(());
        }
        if self.sse.is_some() || self.body.is_empty() {
            return Err(truncated());
        }
        let body = std::mem::take(&mut self.body);
        self.answer.whole(&body, out).map_err(|Stop(fault)| fault)
    }

    fn is_complete(&self) -> bool {
        self.answer.complete
    }

    fn held(&self) -> usize {
        self.body.len() + self.sse.as_ref().map_or(0, SseReader::held)
    }

    fn usage(&self) -> Option<Usage> {
        let counts = &self.answer.counts;
        (counts.input.is_some() || counts.output.is_some()).then(|| counts.usage())
    }
}

fn truncated() -> ProviderFault {
    ProviderFault::new(FaultClass::Truncated, "The upstream's answer ended before it was complete.")
}

fn garbled(what: &str) -> Stop {
    Stop(ProviderFault::new(
        FaultClass::Garbled,
        format!("The upstream's answer is not what its API promises: {what}."),
    ))
}

/// Provider's fault that ends the reading of an answer.
struct Stop(ProviderFault);

impl From<TooLarge> for Stop {
    fn from(error: TooLarge) -> Self {
        Stop(error.into())
    }
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        garbled(&fault.into_error().message)
    }
}

/// State of an answer that is being read.
#[derive(Default)]
struct Answer {
    open: Vec<(u64, Open)>,
    calls: u32,
    /// Signature of the tool call that comes next.
    call_signature: Option<String>,
    counts: Counts,
    finish: Option<FinishReason>,
    stop_sequence: Option<String>,
    complete: bool,
}

enum Open {
    Text,
    Thinking {
        signature: String,
    },
    /// `begun` is set once arguments came; without arguments the block's own `input` counts.
    Tool {
        call: u32,
        begun: bool,
        input: String,
    },
    Other,
}

impl Answer {
    /// Decodes the data of one event of a stream into events of the answer.
    fn frame(&mut self, data: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), Stop> {
        if self.complete {
            return Ok(());
        }
        let frame = Frame::read(data)?;
        match frame.kind.as_deref().unwrap_or_default() {
            "message_start" => self.counts.update(&frame.counts),
            "content_block_start" => self.start(frame.index, frame.block, out)?,
            "content_block_delta" => self.delta(frame.index, frame.delta, out)?,
            "content_block_stop" => self.stop(frame.index, out),
            "message_delta" => {
                self.counts.update(&frame.counts);
                self.finish = frame.delta.stop_reason.as_deref().map(finish_of).or(self.finish);
                self.stop_sequence = frame.delta.stop_sequence.or(self.stop_sequence.take());
            }
            "message_stop" => self.finished(out),
            "error" => return Err(Stop(frame.error.fault(0))),
            _ => {}
        }
        Ok(())
    }

    /// Decodes a whole message, the body of an answer that was not streamed, into events.
    fn whole(&mut self, body: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), Stop> {
        let (frame, blocks) = match Frame::whole(body) {
            Ok(read) => read,
            Err(Fault::Syntax { at, .. }) if at >= body.len() => return Err(Stop(truncated())),
            Err(fault) => return Err(fault.into()),
        };
        match frame.kind.as_deref() {
            Some("message") => {}
            Some("error") => return Err(Stop(frame.error.fault(0))),
            _ => return Err(garbled("no message")),
        }
        for (index, block) in blocks.into_iter().enumerate() {
            self.start(index as u64, block, out)?;
            self.stop(index as u64, out);
        }
        self.counts.update(&frame.counts);
        let reason = frame.delta.stop_reason.ok_or_else(truncated).map_err(Stop)?;
        self.finish = Some(finish_of(&reason));
        self.stop_sequence = frame.delta.stop_sequence;
        self.finished(out);
        Ok(())
    }

    fn start(&mut self, index: u64, block: Block, out: &mut Vec<ChatEvent>) -> Result<(), Stop> {
        let open = match block.kind.as_deref() {
            Some("text") => {
                text(block.text, out);
                Open::Text
            }
            Some("thinking") => {
                reasoning(block.text, out);
                Open::Thinking { signature: block.signature.unwrap_or_default() }
            }
            Some("redacted_thinking") => {
                let signature = format!("{REDACTED}{}", block.data.unwrap_or_default());
                out.push(ChatEvent::ReasoningSignature { choice: 0, signature });
                Open::Other
            }
            Some("tool_use") => {
                let call = self.calls;
                self.calls += 1;
                out.push(ChatEvent::ToolCallStart {
                    choice: 0,
                    call,
                    id: block.id.unwrap_or_else(|| format!("toolu_{call}")),
                    name: block.name.ok_or_else(|| garbled("a call without a name"))?,
                    signature: self.call_signature.take(),
                });
                Open::Tool { call, begun: false, input: block.input.unwrap_or_else(|| "{}".to_owned()) }
            }
            _ => Open::Other,
        };
        self.open.retain(|(other, _)| *other != index);
        if self.open.len() == OPEN_MAX {
            return Err(garbled("too many open blocks"));
        }
        self.open.push((index, open));
        Ok(())
    }

    fn delta(&mut self, index: u64, delta: Delta, out: &mut Vec<ChatEvent>) -> Result<(), Stop> {
        let Some((_, open)) = self.open.iter_mut().find(|(other, _)| *other == index) else { return Ok(()) };
        match (delta.kind.as_deref(), open) {
            (Some("text_delta"), Open::Text) => text(delta.text, out),
            (Some("thinking_delta"), Open::Thinking { .. }) => reasoning(delta.text, out),
            (Some("signature_delta"), Open::Thinking { signature }) => {
                signature.push_str(&delta.signature.unwrap_or_default());
                if signature.len() > SIGNATURE_BYTES_MAX {
                    return Err(garbled("an endless signature"));
                }
            }
            (Some("input_json_delta"), Open::Tool { call, begun, .. }) => {
                if let Some(json) = delta.json.filter(|json| !json.is_empty()) {
                    *begun = true;
                    out.push(ChatEvent::ToolCallArguments { choice: 0, call: *call, json });
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn stop(&mut self, index: u64, out: &mut Vec<ChatEvent>) {
        let Some(at) = self.open.iter().position(|(other, _)| *other == index) else { return };
        match self.open.swap_remove(at).1 {
            Open::Thinking { signature } => match signature.strip_prefix(CALL) {
                Some(signature) => self.call_signature = Some(signature.to_owned()),
                None if signature.is_empty() => {}
                None => out.push(ChatEvent::ReasoningSignature { choice: 0, signature }),
            },
            Open::Tool { call, begun: false, input } => {
                out.push(ChatEvent::ToolCallArguments { choice: 0, call, json: input });
            }
            Open::Text | Open::Tool { .. } | Open::Other => {}
        }
    }

    fn finished(&mut self, out: &mut Vec<ChatEvent>) {
        while let Some(index) = self.open.iter().map(|(index, _)| *index).min() {
            self.stop(index, out);
        }
        self.complete = true;
        let reason = self.finish.unwrap_or(FinishReason::Stop);
        let stop = self.stop_sequence.take().filter(|_| reason == FinishReason::Stop).map(StopCause::Text);
        out.push(ChatEvent::Finish { choice: 0, reason, stop });
        out.push(ChatEvent::Usage(self.counts.usage()));
    }
}

fn text(said: Option<String>, out: &mut Vec<ChatEvent>) {
    if let Some(text) = said.filter(|text| !text.is_empty()) {
        out.push(ChatEvent::Text { choice: 0, text, logprobs: Vec::new(), tokens: Vec::new() });
    }
}

fn reasoning(said: Option<String>, out: &mut Vec<ChatEvent>) {
    if let Some(text) = said.filter(|text| !text.is_empty()) {
        out.push(ChatEvent::Reasoning { choice: 0, text });
    }
}

/// Finish reason of a `stop_reason`. `pause_turn` counts as an ordinary stop: clients of other APIs cannot go on with
/// a paused turn.
fn finish_of(word: &str) -> FinishReason {
    match word {
        "max_tokens" | "model_context_window_exceeded" => FinishReason::Length,
        "tool_use" => FinishReason::ToolCalls,
        "refusal" => FinishReason::ContentFilter,
        _ => FinishReason::Stop,
    }
}

/// One event of a stream, with the fields of all event types. Also the top level of a whole message, which shares most
/// of them.
#[derive(Default)]
struct Frame {
    kind: Option<String>,
    index: u64,
    block: Block,
    delta: Delta,
    counts: Counts,
    error: Said,
}

impl Frame {
    fn read(data: &[u8]) -> Result<Self, Fault> {
        let mut reader = Reader::new(data)?;
        let mut frame = Self::default();
        reader.object(|reader, key| frame.field(reader, &key))?;
        reader.end()?;
        Ok(frame)
    }

    /// Reads a whole message: its top level and its blocks.
    fn whole(body: &[u8]) -> Result<(Self, Vec<Block>), Fault> {
        let mut reader = Reader::new(body)?;
        let (mut frame, mut blocks) = (Self::default(), Vec::new());
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("content", Kind::Array) => reader.array(|reader, _| {
                blocks.push(Block::read(reader)?);
                Ok(())
            }),
            ("stop_reason", Kind::String) => set(&mut frame.delta.stop_reason, reader),
            ("stop_sequence", Kind::String) => set(&mut frame.delta.stop_sequence, reader),
            _ => frame.field(reader, &key),
        })?;
        reader.end()?;
        Ok((frame, blocks))
    }

    fn field(&mut self, reader: &mut Reader<'_>, key: &str) -> Result<(), Fault> {
        match (key, reader.kind()?) {
            ("type", Kind::String) => set(&mut self.kind, reader),
            ("index", Kind::Number) => number(&mut self.index, reader),
            ("content_block", Kind::Object) => {
                self.block = Block::read(reader)?;
                Ok(())
            }
            ("delta", Kind::Object) => self.delta.read(reader),
            ("usage", Kind::Object) => self.counts.read(reader),
            ("error", Kind::Object) => self.error.read(reader),
            ("message", Kind::Object) => reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
                ("usage", Kind::Object) => self.counts.read(reader),
                _ => reader.skip(),
            }),
            _ => reader.skip(),
        }
    }
}

/// A content block, with the fields of every supported block type.
#[derive(Default)]
struct Block {
    kind: Option<String>,
    text: Option<String>,
    signature: Option<String>,
    data: Option<String>,
    id: Option<String>,
    name: Option<String>,
    /// Arguments of the call, as JSON text.
    input: Option<String>,
}

impl Block {
    fn read(reader: &mut Reader<'_>) -> Result<Self, Fault> {
        let mut block = Self::default();
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("type", Kind::String) => set(&mut block.kind, reader),
            ("text" | "thinking", Kind::String) => set(&mut block.text, reader),
            ("signature", Kind::String) => set(&mut block.signature, reader),
            ("data", Kind::String) => set(&mut block.data, reader),
            ("id", Kind::String) => set(&mut block.id, reader),
            ("name", Kind::String) => set(&mut block.name, reader),
            ("input", Kind::Object) => {
                block.input = Some(reader.raw()?.text.to_owned());
                Ok(())
            }
            _ => reader.skip(),
        })?;
        Ok(block)
    }
}

/// Change of an open block that a delta event brings.
#[derive(Default)]
struct Delta {
    kind: Option<String>,
    text: Option<String>,
    json: Option<String>,
    signature: Option<String>,
    stop_reason: Option<String>,
    stop_sequence: Option<String>,
}

impl Delta {
    fn read(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("type", Kind::String) => set(&mut self.kind, reader),
            ("text" | "thinking", Kind::String) => set(&mut self.text, reader),
            ("partial_json", Kind::String) => set(&mut self.json, reader),
            ("signature", Kind::String) => set(&mut self.signature, reader),
            ("stop_reason", Kind::String) => set(&mut self.stop_reason, reader),
            ("stop_sequence", Kind::String) => set(&mut self.stop_sequence, reader),
            _ => reader.skip(),
        })
    }
}

fn set(place: &mut Option<String>, reader: &mut Reader<'_>) -> Result<(), Fault> {
    *place = Some(reader.string()?.into_owned());
    Ok(())
}

/// Reads a count: 0 where the value is not a number, saturated where it is too large.
fn number(place: &mut u64, reader: &mut Reader<'_>) -> Result<(), Fault> {
    *place = reader.number()?.parse::<f64>().map_or(0, |value| value as u64);
    Ok(())
}

/// Token counts as reported: first in part, later again, each time cumulative.
#[derive(Default)]
struct Counts {
    input: Option<u64>,
    written: Option<u64>,
    read: Option<u64>,
    output: Option<u64>,
    thinking: Option<u64>,
}

impl Counts {
    fn read(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("input_tokens", Kind::Number) => number(self.input.insert(0), reader),
            ("cache_creation_input_tokens", Kind::Number) => number(self.written.insert(0), reader),
            ("cache_read_input_tokens", Kind::Number) => number(self.read.insert(0), reader),
            ("output_tokens", Kind::Number) => number(self.output.insert(0), reader),
            ("output_tokens_details", Kind::Object) => {
                reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
                    ("thinking_tokens", Kind::Number) => number(self.thinking.insert(0), reader),
                    _ => reader.skip(),
                })
            }
            _ => reader.skip(),
        })
    }

    fn update(&mut self, later: &Self) {
        for (mine, new) in [
            (&mut self.input, later.input),
            (&mut self.written, later.written),
            (&mut self.read, later.read),
            (&mut self.output, later.output),
            (&mut self.thinking, later.thinking),
        ] {
            *mine = new.or(*mine);
        }
    }

    /// Usage in our counts. The API counts cached tokens beside the other input; here they are part of the prompt.
    fn usage(&self) -> Usage {
        let (read, written) = (self.read.unwrap_or(0), self.written.unwrap_or(0));
        Usage {
            prompt_tokens: self.input.unwrap_or(0).saturating_add(read).saturating_add(written),
            cached_tokens: read,
            cache_write_tokens: written,
            completion_tokens: self.output.unwrap_or(0),
            reasoning_tokens: self.thinking.unwrap_or(0),
        }
    }
}
