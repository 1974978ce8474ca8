//! Estimate of the output tokens of an answer whose upstream reports no usage: a stream that ends early, a server without usage.

use bytes::Bytes;
use penstock_types::ChatEvent;

/// Assumed bytes of text per token, over the languages in use; a low value, so that tokens are overcounted rather than undercounted.
const BYTES_PER_TOKEN: u64 = 3;

/// Text that an answer has emitted so far, from which output tokens are estimated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Emitted {
    events: u64,
    text_bytes: u64,
}

impl Emitted {
    /// Counts the text of one event; events without text change nothing.
    pub(super) fn add(&mut self, event: &ChatEvent) {
        let text = match event {
            ChatEvent::Text { text, .. } | ChatEvent::Reasoning { text, .. } | ChatEvent::Refusal { text, .. } => text,
            ChatEvent::ToolCallStart { name, .. } => name,
            ChatEvent::ToolCallArguments { json, .. } => json,
            ChatEvent::Raw(piece) => return texts(piece, |bytes| self.add_text(bytes)),
            _ => return,
        };
        self.add_text(text.len());
    }

    fn add_text(&mut self, bytes: usize) {
        self.events += u64::from(bytes > 0);
        self.text_bytes += bytes as u64;
    }

    /// Estimated output tokens: at least one per piece of text, since no server sends less.
    pub(super) fn tokens(&self) -> u64 {
        self.events.max(self.text_bytes.div_ceil(BYTES_PER_TOKEN))
    }
}

/// Suffixes of the JSON names under which the APIs send text: `content`, `reasoning_content`, `text`, `delta`,
/// `thinking`, `arguments`, `partial_json`.
const ENDS: [&[u8]; 6] = [b"content", b"text", b"delta", b"thinking", b"arguments", b"partial_json"];

/// Reports the length in bytes of each text in a forwarded piece, which may hold several events. No JSON parser: at
/// each quote it checks whether the quote ends one of the names and a string follows.
fn texts(piece: &Bytes, mut say: impl FnMut(usize)) {
    let mut from = 0;
    while let Some(at) = memchr::memchr(b'"', &piece[from..]) {
        let name = &piece[..from + at];
        from += at + 1;
        // The last letter excludes most names.
        let may_be = matches!(name.last(), Some(b't' | b'a' | b'g' | b's' | b'n'));
        if !may_be || !ENDS.iter().any(|end| name.ends_with(end)) {
            continue;
        }
        let rest = piece[from..].trim_ascii_start();
        let Some(value) = rest.strip_prefix(b":").map(<[u8]>::trim_ascii_start) else { continue };
        let Some(text) = value.strip_prefix(b"\"") else { continue };
        let length = string_bytes(text);
        say(length);
        from = (piece.len() - text.len() + length + 1).min(piece.len());
    }
}

/// Length in bytes up to the quote that ends a JSON string.
fn string_bytes(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(found) = memchr::memchr2(b'"', b'\\', &text[at..]) {
        at += found;
        if text[at] == b'"' {
            return at;
        }
        at = (at + 2).min(text.len());
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(piece: &str, bytes: u64) {
        let mut emitted = Emitted::default();
        emitted.add(&ChatEvent::Raw(Bytes::from(piece.to_owned())));
        assert_eq!(emitted.text_bytes, bytes, "{piece}");
    }

    #[test]
    fn each_event_of_a_piece_is_a_token_at_least() {
        let event = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        let mut emitted = Emitted::default();
        emitted.add(&ChatEvent::Raw(Bytes::from(event.repeat(7))));
        assert_eq!(emitted.tokens(), 7);
    }

    #[test]
    fn texts_of_every_api_are_seen() {
        check(r#"data: {"choices":[{"delta":{"content":"hello"}}]}"#, 5);
        check(r#"data: {"choices":[{"delta":{"reasoning_content" : "hi\"x"}}]}"#, 5);
        check(r#"data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"abc"}}"#, 3);
        check(r#"data: {"type":"response.output_text.delta","delta":"abcd"}"#, 4);
        check(r#"data: {"candidates":[{"content":{"parts":[{"text":"ab"},{"text":"c"}]}}]}"#, 3);
        check(r#"data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{\"a\":1}"}}]}}]}"#, 9);
        check(r#"data: {"choices":[{"delta":{"content":"cut of"#, 6);
        check("data: [DONE]", 0);
        check(r#"{"content":"\\"#, 2);
    }

    #[test]
    fn pieces_are_tokens_at_least() {
        let mut emitted = Emitted::default();
        (0..5).for_each(|_| {
            emitted.add(&ChatEvent::Text { choice: 0, text: "a".into(), logprobs: vec![], tokens: vec![] })
        });
        assert_eq!(emitted.tokens(), 5);
        emitted.add(&ChatEvent::Reasoning { choice: 0, text: "a".repeat(300) });
        assert_eq!(emitted.tokens(), 102);
    }
}
