//! Estimate of the output tokens of an answer whose upstream reports no usage: a stream that ends early, a server without usage.

use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::Finder;
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

/// Suffixes of the JSON names under which the APIs send text: `content`, `reasoning_content`, `reasoning`, `refusal`, `text`, `delta`,
/// `thinking`, `arguments`, `partial_json`.
const ENDS: [&[u8]; 8] =
    [b"content", b"text", b"delta", b"thinking", b"arguments", b"partial_json", b"reasoning", b"refusal"];
/// Suffixes of JSON names that hold no output though they end in one of [`ENDS`]: encrypted reasoning, quotes from the prompt.
const NO_OUTPUT: [&[u8]; 2] = [b"encrypted_content", b"cited_text"];
/// Suffixes of the JSON names under which servers send the same reasoning twice in one event.
const REASONING: [&[u8]; 2] = [b"reasoning", b"reasoning_content"];

static RESPONSES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"response."));

/// Reports the length in bytes of each text in a forwarded piece, which may hold several events. No JSON parser: at
/// each quote it checks whether the quote ends one of the names and a string follows.
fn texts(piece: &Bytes, mut say: impl FnMut(usize)) {
    // JSON has no line ends inside: each line is at most one event's data.
    let mut from = 0;
    for end in memchr::memchr_iter(b'\n', piece).chain([piece.len()]) {
        let line = &piece[from..end];
        from = (end + 1).min(piece.len());
        if !repeats(line) {
            texts_of(line, &mut say);
        }
    }
}

/// Returns true if a line is an event of the Responses API that repeats text of events before it: every type but `….delta`.
fn repeats(line: &[u8]) -> bool {
    let is_type = |at: &usize| {
        let before = line[..*at].trim_ascii_end().strip_suffix(b":").map(<[u8]>::trim_ascii_end);
        before.is_some_and(|before| before.ends_with(b"\"type\""))
    };
    let Some(at) = RESPONSES.find_iter(line).find(is_type) else { return false };
    let kind = &line[at + 1..];
    !kind[..string_bytes(kind)].ends_with(b".delta")
}

fn texts_of(line: &[u8], say: &mut impl FnMut(usize)) {
    let (mut from, mut last, mut was_reasoning) = (0, &[][..], false);
    while let Some(at) = memchr::memchr(b'"', &line[from..]) {
        let name = &line[..from + at];
        from += at + 1;
        // The last letter excludes most names.
        let may_be = matches!(name.last(), Some(b't' | b'a' | b'g' | b's' | b'n' | b'l'));
        let ends = |ends: &[&[u8]]| ends.iter().any(|end| name.ends_with(end));
        if !may_be || !ends(&ENDS) {
            continue;
        }
        let rest = line[from..].trim_ascii_start();
        let Some(value) = rest.strip_prefix(b":").map(<[u8]>::trim_ascii_start) else { continue };
        let Some(text) = value.strip_prefix(b"\"") else { continue };
        let length = string_bytes(text);
        from = (line.len() - text.len() + length + 1).min(line.len());
        let (text, is_reasoning) = (&text[..length], ends(&REASONING));
        // OpenRouter repeats `reasoning` as a `text` of `reasoning_details`, vLLM as `reasoning_content`.
        let is_copy = (was_reasoning || is_reasoning) && text == last;
        if !is_copy && !ends(&NO_OUTPUT) {
            say(length);
        }
        if length > 0 {
            (last, was_reasoning) = (text, is_reasoning);
        }
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
        check(r#"data: {"choices":[{"delta":{"reasoning":"hello"}}]}"#, 5);
        check(r#"data: {"choices":[{"delta":{"content":null,"refusal":"sorry"}}]}"#, 5);
        check("data: [DONE]", 0);
        check(r#"{"content":"\\"#, 2);
    }

    #[test]
    fn text_that_an_event_says_again_counts_once() {
        check(r#"data: {"choices":[{"delta":{"reasoning":"hello","reasoning_content":"hello"}}]}"#, 5);
        let details = r#""reasoning_details":[{"type":"reasoning.text","text":"hello"}]"#;
        check(&format!(r#"data: {{"choices":[{{"delta":{{"content":"","reasoning":"hello",{details}}}}}]}}"#), 5);
        check(&format!(r#"data: {{"choices":[{{"delta":{{{details},"reasoning":"hello","content":"hi"}}}}]}}"#), 7);
        // Equal texts of two events, and of two choices, are two texts.
        check(&"data: {\"choices\":[{\"delta\":{\"reasoning\":\"a\"}}]}\n\n".repeat(3), 3);
        check(r#"data: {"choices":[{"delta":{"content":"a"}},{"delta":{"content":"a"}}]}"#, 2);
    }

    #[test]
    fn responses_streams_repeat_their_text_at_the_end() {
        let data = |kind: &str, rest: &str| format!("event: {kind}\ndata: {{\"type\": \"{kind}\",{rest}}}\n\n");
        check(&data("response.output_text.delta", r#""delta":"abcd""#), 4);
        check(&data("response.output_text.done", r#""text":"abcd""#), 0);
        check(&data("response.content_part.done", r#""part":{"type":"output_text","text":"abcd"}"#), 0);
        check(&data("response.output_item.done", r#""item":{"content":[{"type":"output_text","text":"abcd"}]}"#), 0);
        check(&data("response.function_call_arguments.delta", r#""delta":"{}""#), 2);
        check(&data("response.function_call_arguments.done", r#""arguments":"{}""#), 0);
        // Some servers sort the names.
        check(r#"data: {"delta":"abcd","logprobs":[],"type":"response.output_text.delta"}"#, 4);
        check(r#"data: {"text":"abcd","type":"response.output_text.done"}"#, 0);
        let whole = r#"{"object":"response","output":[{"type":"reasoning","encrypted_content":"QUJD"},"#;
        check(&format!(r#"{whole}{{"type":"message","content":[{{"type":"output_text","text":"abcd"}}]}}]}}"#), 4);
        // Text about such an event is text.
        check(r#"data: {"choices":[{"delta":{"content":"\"type\":\"response.done\""}}]}"#, 26);
    }

    #[test]
    fn encrypted_and_quoted_text_is_no_output() {
        check(r#"data: {"item":{"type":"reasoning","encrypted_content":"QUJD"}}"#, 0);
        check(r#"data: {"delta":{"type":"citations_delta","citation":{"cited_text":"of the prompt"}}}"#, 0);
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
