//! The pieces of an answer as JSON text: parts, calls, log-probabilities, counts.

use bytes::{BufMut, BytesMut};

use super::signature::{Signed, to_client};
use crate::answer_json::are_arguments;
use penstock_types::event::{FinishReason, TokenLogprob, Usage};
use penstock_types::json::short;
use penstock_types::json_text::compacted;
use penstock_types::write;

/// Model and id of an answer, repeated in each chunk.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) id: String,
    pub(super) model: String,
}

impl Identity {
    /// Writes the end of a chunk with the model's name and the answer's id: `,"modelVersion":…,"responseId":…}`.
    pub(super) fn put(&self, out: &mut BytesMut) {
        out.put_slice(b",\"modelVersion\":");
        write::string(out, &self.model);
        out.put_slice(b",\"responseId\":");
        write::string(out, &self.id);
        out.put_u8(b'}');
    }
}

/// Writes a text part, `{"text":…}`, with `"thought":true` for reasoning.
pub(super) fn text(out: &mut BytesMut, text: &str, thought: bool) {
    out.put_slice(b"{\"text\":");
    write::string(out, text);
    if thought {
        out.put_slice(b",\"thought\":true");
    }
    out.put_u8(b'}');
}

/// Writes a part that holds a signature of reasoning alone. The part is a thought: chats of Google's SDK for JavaScript forget a turn
/// with an empty text that is none.
pub(super) fn lone_signature(out: &mut BytesMut, given: &str) {
    out.put_slice(b"{\"text\":\"\",\"thought\":true");
    thought_signature(out, given, Signed::Reasoning);
    out.put_u8(b'}');
}

/// Writes the signature of a part, `,"thoughtSignature":…`.
pub(super) fn thought_signature(out: &mut BytesMut, given: &str, signed: Signed) {
    out.put_slice(b",\"thoughtSignature\":");
    write::string(out, &to_client(given, signed));
}

/// Google's word for a finish reason.
pub(super) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop | FinishReason::ToolCalls => "STOP",
        FinishReason::Length => "MAX_TOKENS",
        FinishReason::ContentFilter => "SAFETY",
    }
}

/// Writes the reason of a candidate's end, `,"finishReason":…`.
pub(super) fn finish(out: &mut BytesMut, reason: FinishReason, malformed: Option<&str>) {
    out.put_slice(b",\"finishReason\":");
    match malformed {
        None => write::string(out, finish_reason(reason)),
        Some(message) => {
            out.put_slice(b"\"MALFORMED_FUNCTION_CALL\",\"finishMessage\":");
            write::string(out, message);
        }
    }
}

/// Writes the token counts, `,"usageMetadata":{…}`.
pub(super) fn usage(out: &mut BytesMut, usage: &Usage) {
    let mut count = |name: &str, value: u64| {
        out.put_slice(name.as_bytes());
        write::integer(out, value);
    };
    count(",\"usageMetadata\":{\"promptTokenCount\":", usage.prompt_tokens);
    count(",\"candidatesTokenCount\":", usage.completion_tokens.saturating_sub(usage.reasoning_tokens));
    count(",\"totalTokenCount\":", usage.total());
    if usage.reasoning_tokens > 0 {
        count(",\"thoughtsTokenCount\":", usage.reasoning_tokens);
    }
    if usage.cached_tokens > 0 {
        count(",\"cachedContentTokenCount\":", usage.cached_tokens);
    }
    out.put_u8(b'}');
}

/// Bound of the arguments held for all calls of one answer, in bytes; larger arguments are dropped as malformed.
const ARGUMENTS_BYTES_MAX: usize = 8 << 20;

/// Calls of one choice. Gemini sends calls whole, so their pieces are held until complete.
#[derive(Default)]
pub(super) struct Calls {
    held: Vec<Call>,
    sent: usize,
    /// Bytes of all calls so far.
    bytes: usize,
    /// Bytes that are in memory now.
    held_bytes: usize,
    malformed: Option<String>,
}

struct Call {
    id: String,
    name: String,
    signature: Option<String>,
    arguments: String,
}

impl Calls {
    /// Begins a call, whose arguments are collected until it is complete.
    pub(super) fn start(&mut self, id: &str, name: &str, signature: Option<&str>) {
        self.bytes += id.len() + name.len();
        self.held_bytes += id.len() + name.len() + signature.map_or(0, str::len);
        let signature = signature.map(str::to_owned);
        self.held.push(Call { id: id.to_owned(), name: name.to_owned(), signature, arguments: String::new() });
    }

    /// Adds a piece of a call's arguments.
    pub(super) fn arguments(&mut self, call: u32, json: &str) {
        self.bytes += json.len();
        if self.bytes > ARGUMENTS_BYTES_MAX {
            return;
        }
        // A call that has been sent was complete, so late pieces of it are ignored.
        if let Some(call) = self.held.get_mut(call as usize).filter(|_| call as usize >= self.sent) {
            call.arguments.push_str(json);
            self.held_bytes += json.len();
        }
    }

    /// Bytes in memory now: of calls that are not complete, and of the names of all.
    pub(super) fn held(&self) -> usize {
        self.held_bytes
    }

    /// Bytes of all calls so far.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns true if no call is held: every call has been sent.
    pub(super) fn is_empty(&self) -> bool {
        self.sent == self.held.len()
    }

    /// Hands out the next call as a part if it is complete, or if `end` says that nothing more comes. A call whose
    /// arguments are not an object becomes no part, but the reason why the answer ended.
    pub(super) fn next(&mut self, end: bool) -> Option<BytesMut> {
        loop {
            let call = self.held.get_mut(self.sent)?;
            let whole = self.bytes <= ARGUMENTS_BYTES_MAX && are_arguments(&call.arguments);
            // Arguments that have not begun may still come.
            let begun = !call.arguments.trim_ascii().is_empty();
            if !(end || (whole && begun)) {
                return None;
            }
            self.sent += 1;
            self.held_bytes -= call.arguments.len();
            if whole {
                let mut out = BytesMut::with_capacity(96 + call.arguments.len());
                put_call(&mut out, call);
                call.arguments = String::new();
                return Some(out);
            }
            call.arguments = String::new();
            let why = format!("The model called {} with arguments that are no JSON object.", short(&call.name));
            self.malformed.get_or_insert(why);
        }
    }

    /// Description of the malformed call, if there was one.
    pub(super) fn malformed(&self) -> Option<&str> {
        self.malformed.as_deref()
    }
}

fn put_call(out: &mut BytesMut, call: &Call) {
    out.put_slice(b"{\"functionCall\":{\"id\":");
    write::string(out, &call.id);
    out.put_slice(b",\"name\":");
    write::string(out, &call.name);
    out.put_slice(b",\"args\":");
    // Without the blanks between the tokens: a line end among them would end the event's data.
    match call.arguments.trim_ascii() {
        "" => out.put_slice(b"{}"),
        arguments => out.put_slice(compacted(arguments).as_bytes()),
    }
    out.put_u8(b'}');
    if let Some(signature) = &call.signature {
        thought_signature(out, signature, Signed::Call);
    }
    out.put_u8(b'}');
}

/// Log-probabilities of one choice as JSON text, with their sum for the mean.
#[derive(Default)]
pub(super) struct Logprobs {
    chosen: BytesMut,
    top: BytesMut,
    sum: f64,
    count: usize,
}

impl Logprobs {
    /// Adds the log-probabilities of `tokens`.
    pub(super) fn add(&mut self, tokens: &[TokenLogprob]) {
        for token in tokens {
            if self.count > 0 {
                self.chosen.put_u8(b',');
                self.top.put_u8(b',');
            }
            let value = token.logprob.unwrap_or(f32::NEG_INFINITY);
            self.count += 1;
            self.sum += f64::from(value.max(-9999.0));
            candidate(&mut self.chosen, token.token, &token.bytes, value);
            self.top.put_slice(b"{\"candidates\":[");
            for (index, (id, bytes, value)) in token.top.iter().enumerate() {
                if index > 0 {
                    self.top.put_u8(b',');
                }
                candidate(&mut self.top, *id, bytes, *value);
            }
            self.top.put_slice(b"]}");
        }
    }

    /// Bytes of JSON text held, for the collector's memory bound.
    pub(super) fn bytes(&self) -> usize {
        self.chosen.len() + self.top.len()
    }

    /// Writes `,"avgLogprobs":…,"logprobsResult":{…}`, or nothing where no token was added.
    pub(super) fn put(&self, out: &mut BytesMut, average: bool) {
        if self.count == 0 {
            return;
        }
        if average {
            out.put_slice(b",\"avgLogprobs\":");
            write::logprob(out, (self.sum / self.count as f64) as f32);
        }
        out.put_slice(b",\"logprobsResult\":{\"topCandidates\":[");
        out.put_slice(&self.top);
        out.put_slice(b"],\"chosenCandidates\":[");
        out.put_slice(&self.chosen);
        out.put_slice(b"]}");
    }
}

fn candidate(out: &mut BytesMut, token: u32, bytes: &[u8], value: f32) {
    out.put_slice(b"{\"token\":");
    write::lossy(out, bytes);
    out.put_slice(b",\"tokenId\":");
    write::integer(out, u64::from(token));
    out.put_slice(b",\"logProbability\":");
    write::logprob(out, value);
    out.put_u8(b'}');
}
