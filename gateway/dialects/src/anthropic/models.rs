//! Bodies of `GET /v1/models` and of the token count in Anthropic's shape.

use bytes::{BufMut, BytesMut};

use crate::openai::ModelCard;
use penstock_types::request::{ChatRequest, Message, Part};
use penstock_types::write;
use time::OffsetDateTime;

/// Body of the list of models, as one page.
pub fn models_list(cards: &[ModelCard]) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(96 + 160 * cards.len());
    out.put_slice(b"{\"data\":[");
    for (index, card) in cards.iter().enumerate() {
        if index > 0 {
            out.put_u8(b',');
        }
        put_model(&mut out, card);
    }
    out.put_slice(b"],\"has_more\":false,\"first_id\":");
    write::optional_string(&mut out, cards.first().map(|card| card.id.as_str()));
    out.put_slice(b",\"last_id\":");
    write::optional_string(&mut out, cards.last().map(|card| card.id.as_str()));
    out.put_u8(b'}');
    out.into()
}

/// JSON body of one model in Anthropic's form, as `GET /v1/models/{model}` returns it.
pub fn model(card: &ModelCard) -> Vec<u8> {
    let mut out = BytesMut::with_capacity(160);
    put_model(&mut out, card);
    out.into()
}

fn put_model(out: &mut BytesMut, card: &ModelCard) {
    out.put_slice(b"{\"type\":\"model\",\"id\":");
    write::string(out, &card.id);
    out.put_slice(b",\"display_name\":");
    write::string(out, &card.id);
    out.put_slice(b",\"created_at\":");
    write::string(out, &rfc3339(card.created));
    if let Some(tokens) = card.context_tokens {
        out.put_slice(b",\"max_input_tokens\":");
        write::integer(out, tokens);
    }
    out.put_u8(b'}');
}

/// Timestamp as `2025-06-15T15:06:40Z`; a time after the year 9999 as the epoch.
pub fn rfc3339(unix_seconds: u64) -> String {
    let at = i64::try_from(unix_seconds).ok().and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    let at = at.unwrap_or(OffsetDateTime::UNIX_EPOCH);
    let (year, month, day) = at.to_calendar_date();
    let (hour, minute, second) = at.to_hms();
    format!("{year:04}-{:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z", u8::from(month))
}

/// JSON body of the answer to `/v1/messages/count_tokens`.
pub fn count_body(tokens: u64) -> Vec<u8> {
    format!("{{\"input_tokens\":{tokens}}}").into_bytes()
}

/// Estimated input tokens of a conversation, for upstreams that cannot count: one token per four bytes of text, plus a
/// few for each turn and image.
pub fn estimate(chat: &ChatRequest) -> u64 {
    const BYTES_PER_TOKEN: u64 = 4;
    const TOKENS_PER_TURN: u64 = 4;
    const TOKENS_PER_IMAGE: u64 = 1_600; // the largest that Anthropic's guide to vision states without scaling down
    let of = |text: &Option<String>| text.as_ref().map_or(0, String::len) as u64;
    let message = |message: &Message| {
        let calls = message.tool_calls.iter().map(|call| (call.name.len() + call.arguments.len()) as u64 + 16);
        let texts = of(&message.content) + of(&message.reasoning) + calls.sum::<u64>();
        let images = message.parts.iter().filter(|part| matches!(part, Part::Image { .. })).count() as u64;
        texts.div_ceil(BYTES_PER_TOKEN) + TOKENS_PER_TURN + images * TOKENS_PER_IMAGE
    };
    let tools = chat.tools.iter().map(|tool| (tool.json.len() as u64).div_ceil(BYTES_PER_TOKEN));
    chat.messages.iter().map(message).sum::<u64>() + tools.sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_people_read_them() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_750_000_000, "2025-06-15T15:06:40Z"),
            (4_102_444_800, "2100-01-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds), text);
        }
    }
}
