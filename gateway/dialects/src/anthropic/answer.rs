//! Anthropic operations as [`Decoded`] requests: the decoded body, and the form in which its answer is written.

use bytes::{BufMut, BytesMut};

use super::messages::{decode_count_tokens, decode_messages};
use super::stream::MessageEncoder;
use super::whole::MessageCollector;
use penstock_types::Bounds;
use penstock_types::codec::{AnswerForm, AnswerMeta, Decoded, StreamEncoder, WholeCollector};
use penstock_types::error::ApiError;
use penstock_types::event::{FinishReason, StopCause, Usage};
use penstock_types::request::{ChatRequest, Request};
use penstock_types::write;

/// Decodes the body of a request to `/v1/messages`, with the form of its answer.
pub fn messages(body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    decode_messages(body, bounds).map(decoded)
}

/// Decodes the body of a request to `/v1/messages/count_tokens`.
pub fn count_tokens(body: &[u8], bounds: &Bounds) -> Result<Decoded, ApiError> {
    decode_count_tokens(body, bounds).map(decoded)
}

fn decoded(chat: ChatRequest) -> Decoded {
    let form = Box::new(MessageForm { model: chat.model.clone() });
    Decoded { request: Request::Chat(Box::new(chat)), form }
}

struct MessageForm {
    model: String,
}

impl AnswerForm for MessageForm {
    fn choices(&self) -> usize {
        1
    }

    fn stream(&self, meta: &AnswerMeta) -> Box<dyn StreamEncoder> {
        Box::new(MessageEncoder::new(&meta.id, &self.model))
    }

    fn whole(&self, meta: &AnswerMeta) -> Box<dyn WholeCollector> {
        Box::new(MessageCollector::new(&meta.id, &self.model))
    }
}

/// Opens the JSON of a message, up to and including the bracket of its `content` list.
pub(super) fn put_message(out: &mut BytesMut, id: &str, model: &str) {
    out.put_slice(b"{\"id\":\"msg_");
    write::escaped(out, id);
    out.put_slice(b"\",\"type\":\"message\",\"role\":\"assistant\",\"model\":");
    write::string(out, model);
    out.put_slice(b",\"content\":[");
}

/// Writes `"stop_reason":…,"stop_sequence":…`. An answer with tool calls that stopped normally reports `tool_use`,
/// whatever word the upstream had; `max_tokens` and `refusal` stay.
pub(super) fn put_stop(out: &mut BytesMut, reason: FinishReason, stop: Option<&StopCause>, said: Said) {
    let sequence = match stop {
        Some(StopCause::Text(text)) => Some(text.as_str()),
        _ => None,
    };
    let word = match reason {
        FinishReason::Stop if said.calls => "tool_use",
        FinishReason::Stop if said.refusal => "refusal",
        FinishReason::Stop if sequence.is_some() => "stop_sequence",
        FinishReason::Stop => "end_turn",
        FinishReason::Length => "max_tokens",
        FinishReason::ToolCalls => "tool_use",
        FinishReason::ContentFilter => "refusal",
    };
    out.put_slice(b"\"stop_reason\":");
    write::string(out, word);
    out.put_slice(b",\"stop_sequence\":");
    write::optional_string(out, sequence.filter(|_| word == "stop_sequence"));
}

/// Content of an answer so far, as far as its stop reason depends on it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Said {
    pub(super) calls: bool,
    pub(super) refusal: bool,
}

/// Writes `usage`. Tokens read from and written to a cache are counted apart from the other input in this API.
pub(super) fn put_usage(out: &mut BytesMut, usage: &Usage) {
    let plain = usage.prompt_tokens.saturating_sub(usage.cached_tokens).saturating_sub(usage.cache_write_tokens);
    for (name, count) in [
        ("{\"input_tokens\":", plain),
        (",\"cache_creation_input_tokens\":", usage.cache_write_tokens),
        (",\"cache_read_input_tokens\":", usage.cached_tokens),
        (",\"output_tokens\":", usage.completion_tokens),
    ] {
        out.put_slice(name.as_bytes());
        write::integer(out, count);
    }
    if usage.reasoning_tokens > 0 {
        out.put_slice(b",\"output_tokens_details\":{\"thinking_tokens\":");
        write::integer(out, usage.reasoning_tokens);
        out.put_u8(b'}');
    }
    out.put_u8(b'}');
}
