//! Answers of this API read: lines of JSON or one object, and vectors.

use bytes::{Buf, BytesMut};

use crate::answer_body::truncated;
use crate::answer_json::{self as value};
use penstock_types::codec::{AnswerDecoder, FaultClass, ProviderFault};
use penstock_types::event::{ChatEvent, FinishReason, Usage};
use penstock_types::json::{Fault, Kind, Reader};
use penstock_types::json_text::compacted;

/// Decoder of an answer with text. A line is an object; the last one says `done`.
#[derive(Default)]
pub(super) struct Lines {
    held: BytesMut,
    calls: u32,
    complete: bool,
}

impl Lines {
    fn line(&mut self, json: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        if json.trim_ascii().is_empty() {
            return Ok(());
        }
        let mut line = Line::default();
        let mut reader = Reader::new(json).map_err(ProviderFault::from)?;
        value::fields(&mut reader, |reader, key| line.field(reader, key))?;
        reader.end()?;
        if let Some(message) = line.error {
            return Err(ProviderFault::new(FaultClass::Server, message));
        }
        out.extend((!line.thinking.is_empty()).then_some(ChatEvent::Reasoning { choice: 0, text: line.thinking }));
        let (logprobs, tokens) = (Vec::new(), Vec::new());
        out.extend((!line.text.is_empty()).then_some(ChatEvent::Text { choice: 0, text: line.text, logprobs, tokens }));
        for (id, name, json) in line.calls {
            let (choice, call) = (0, self.calls);
            self.calls += 1;
            let id = id.unwrap_or_else(|| format!("call_{call}"));
            out.push(ChatEvent::ToolCallStart { choice, call, id, name, signature: None });
            out.push(ChatEvent::ToolCallArguments { choice, call, json });
        }
        if line.done {
            let reason = match line.reason.as_deref() {
                Some("length") => FinishReason::Length,
                Some("content_filter") => FinishReason::ContentFilter,
                _ if self.calls > 0 => FinishReason::ToolCalls,
                _ => FinishReason::Stop,
            };
            out.push(ChatEvent::Finish { choice: 0, reason, stop: None });
            out.push(ChatEvent::Usage(line.usage));
            self.complete = true;
        }
        Ok(())
    }
}

impl AnswerDecoder for Lines {
    fn push(&mut self, bytes: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let mut looked = self.held.len();
        self.held.extend_from_slice(bytes);
        while let Some(end) = memchr::memchr(b'\n', &self.held[looked..]) {
            let line = self.held.split_to(looked + end);
            self.held.advance(1);
            looked = 0;
            self.line(&line, out)?;
        }
        Ok(())
    }

    fn end(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let rest = self.held.split();
        self.line(&rest, out)?;
        if self.complete { Ok(()) } else { Err(truncated()) }
    }

    fn is_complete(&self) -> bool {
        self.complete
    }

    fn held(&self) -> usize {
        self.held.len()
    }
}

type Called = (Option<String>, String, String);

/// Fields of one line of an answer.
#[derive(Default)]
struct Line {
    text: String,
    thinking: String,
    calls: Vec<Called>,
    done: bool,
    reason: Option<String>,
    error: Option<String>,
    usage: Usage,
}

impl Line {
    fn field(&mut self, reader: &mut Reader<'_>, key: &str) -> Result<(), Fault> {
        let text = |reader: &mut Reader<'_>| Ok::<_, Fault>(value::string(reader)?.map(|text| text.into_owned()));
        match key {
            "message" => value::fields(reader, |reader, key| self.field(reader, key))?,
            "content" | "response" => self.text = text(reader)?.unwrap_or_default(),
            "thinking" => self.thinking = text(reader)?.unwrap_or_default(),
            "tool_calls" => value::items(reader, |reader, _| {
                self.calls.extend(call(reader)?);
                Ok(())
            })?,
            "done" if reader.kind()? == Kind::Bool => self.done = reader.boolean()?,
            "done_reason" => self.reason = text(reader)?,
            "error" => self.error = text(reader)?,
            "prompt_eval_count" => self.usage.prompt_tokens = value::count(reader)?.unwrap_or(0),
            "eval_count" => self.usage.completion_tokens = value::count(reader)?.unwrap_or(0),
            _ => reader.skip()?,
        }
        Ok(())
    }
}

/// Id, name and arguments of a call; `None`: it has no name.
fn call(reader: &mut Reader<'_>) -> Result<Option<Called>, Fault> {
    let (mut id, mut name, mut arguments) = (None, None, "{}".to_owned());
    value::fields(reader, |reader, key| {
        match key {
            "id" => id = value::string(reader)?.map(|text| text.into_owned()),
            "function" => value::fields(reader, |reader, key| {
                match key {
                    "name" => name = value::string(reader)?.map(|text| text.into_owned()),
                    "arguments" => arguments = compacted(reader.raw()?.text),
                    _ => reader.skip()?,
                }
                Ok(())
            })?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(name.map(|name| (id, name, arguments)))
}

/// Decoder of an answer with vectors.
pub(super) struct VectorBody {
    inputs: usize,
    held: BytesMut,
    complete: bool,
}

impl VectorBody {
    pub(super) fn new(inputs: usize) -> Self {
        Self { inputs, held: BytesMut::new(), complete: false }
    }
}

impl AnswerDecoder for VectorBody {
    fn push(&mut self, bytes: &[u8], _: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        self.held.extend_from_slice(bytes);
        Ok(())
    }

    fn end(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault> {
        let body = self.held.split();
        let (mut vectors, mut usage) = (Vec::new(), Usage::default());
        let mut reader = Reader::new(&body).map_err(ProviderFault::from)?;
        value::fields(&mut reader, |reader, key| {
            match key {
                "embeddings" => value::items(reader, |reader, _| {
                    vectors.push(numbers(reader)?);
                    Ok(())
                })?,
                "embedding" => vectors.push(numbers(reader)?),
                "prompt_eval_count" => usage.prompt_tokens = value::count(reader)?.unwrap_or(0),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        reader.end()?;
        if vectors.len() != self.inputs || vectors.iter().any(Vec::is_empty) {
            return Err(ProviderFault::new(FaultClass::Garbled, "The answer does not have a vector for each input."));
        }
        out.extend((0..).zip(vectors).map(|(index, values)| ChatEvent::Vector { index, values }));
        out.push(ChatEvent::Usage(usage));
        self.complete = true;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.complete
    }

    fn held(&self) -> usize {
        self.held.len()
    }
}

fn numbers(reader: &mut Reader<'_>) -> Result<Vec<f32>, Fault> {
    let mut all = Vec::new();
    value::items(reader, |reader, _| {
        all.extend(value::number(reader)?.map(|number| number as f32));
        Ok(())
    })?;
    Ok(all)
}
