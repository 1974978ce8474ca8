//! Recorder of an answer that goes by, to be repeated later: complete answers only, up to a size.

use penstock_types::request::OWN_SIGNATURE;
use penstock_types::{ChatEvent, FinishReason, TokenLogprob, Usage};
use serde::{Deserialize, Serialize};

/// Recorder of one answer that may be repeated later; an answer beyond `bytes_max` is dropped.
#[derive(Debug)]
pub(crate) struct Recorder {
    events: Vec<ChatEvent>,
    bytes: usize,
    bytes_max: usize,
    /// True where other callers are given the answer.
    has_others: bool,
    /// True where the answer is too large, or cannot be repeated.
    spoiled: bool,
}

impl Recorder {
    /// Recorder of an answer of at most `bytes_max`. `has_others`: callers of other tenants are given it too.
    pub(crate) fn new(bytes_max: usize, has_others: bool) -> Self {
        Self { events: Vec::new(), bytes: 0, bytes_max, has_others, spoiled: false }
    }

    /// Records events; pieces of one text are joined.
    pub(crate) fn events(&mut self, events: &[ChatEvent]) {
        if self.spoiled {
            return;
        }
        for event in events {
            self.bytes += size(event);
            self.spoiled = self.bytes > self.bytes_max
                || !can_be_given_again(event)
                || (self.has_others && is_of_one_caller(event));
            if self.spoiled {
                self.events = Vec::new();
                return;
            }
            if !self.events.last_mut().is_some_and(|last| join(last, event)) {
                self.events.push(event.clone());
            }
        }
    }

    /// Size of the record so far, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        if self.spoiled { 0 } else { self.bytes }
    }

    /// Ends the record: all events and their size; `None` where the answer is spoiled.
    pub(crate) fn end(&mut self) -> Option<(Vec<ChatEvent>, usize)> {
        let spoiled = std::mem::replace(&mut self.spoiled, true);
        (!spoiled && !self.events.is_empty()).then(|| (std::mem::take(&mut self.events), self.bytes))
    }
}

fn can_be_given_again(event: &ChatEvent) -> bool {
    // A filtered answer may be allowed later; raw bytes are no events.
    !matches!(event, ChatEvent::Raw(_) | ChatEvent::Finish { reason: FinishReason::ContentFilter, .. })
}

/// Returns true if the event is of use to one caller only: reasoning that the gateway signed for its tenant, which it
/// refuses from another tenant.
fn is_of_one_caller(event: &ChatEvent) -> bool {
    matches!(event, ChatEvent::ReasoningSignature { signature, .. } if signature.starts_with(OWN_SIGNATURE))
}

/// Appends a piece to the text in front of it, if both belong to the same text.
fn join(last: &mut ChatEvent, next: &ChatEvent) -> bool {
    match (last, next) {
        (
            ChatEvent::Text { choice, text, logprobs, tokens },
            ChatEvent::Text { choice: other, text: more, logprobs: probs, tokens: ids },
        ) if choice == other => {
            text.push_str(more);
            logprobs.extend_from_slice(probs);
            tokens.extend_from_slice(ids);
            true
        }
        (ChatEvent::Reasoning { choice, text }, ChatEvent::Reasoning { choice: other, text: more })
        | (ChatEvent::Refusal { choice, text }, ChatEvent::Refusal { choice: other, text: more })
            if choice == other =>
        {
            text.push_str(more);
            true
        }
        (
            ChatEvent::ToolCallArguments { choice, call, json },
            ChatEvent::ToolCallArguments { choice: other, call: same, json: more },
        ) if choice == other && call == same => {
            json.push_str(more);
            true
        }
        _ => false,
    }
}

/// Estimated size of an event in memory, in bytes.
fn size(event: &ChatEvent) -> usize {
    let probs =
        |all: &[TokenLogprob]| all.iter().map(|prob| 64 + prob.bytes.len() + 48 * prob.top.len()).sum::<usize>();
    64 + match event {
        ChatEvent::Text { text, logprobs, tokens, .. } | ChatEvent::Prompt { text, logprobs, tokens, .. } => {
            text.len() + probs(logprobs) + 4 * tokens.len()
        }
        ChatEvent::Reasoning { text, .. } | ChatEvent::Refusal { text, .. } => text.len(),
        ChatEvent::ReasoningSignature { signature, .. } => signature.len(),
        ChatEvent::ToolCallStart { id, name, signature, .. } => {
            id.len() + name.len() + signature.as_ref().map_or(0, String::len)
        }
        ChatEvent::ToolCallArguments { json, .. } => json.len(),
        ChatEvent::Vector { values, .. } => 4 * values.len(),
        ChatEvent::Raw(bytes) => bytes.len(),
        ChatEvent::Finish { .. } | ChatEvent::Score { .. } | ChatEvent::Usage(_) => 0,
    }
}

/// Event as it is written for other gateways. An event with token ids or log-probabilities is not written: these belong
/// to one tokenizer.
#[derive(Debug, Serialize, Deserialize)]
enum Wire {
    Text(u32, String),
    Reasoning(u32, String),
    Signature(u32, String),
    Refusal(u32, String),
    Call(u32, u32, String, String, Option<String>),
    Arguments(u32, u32, String),
    Finish(u32, u8),
    Vector(u32, Vec<f32>),
    Score(u32, f64),
    Usage([u64; 5]),
}

const REASONS: [FinishReason; 3] = [FinishReason::Stop, FinishReason::Length, FinishReason::ToolCalls];

/// Encodes an answer; `None`: it has an event that is not written.
pub(crate) fn written(events: &[ChatEvent]) -> Option<Vec<u8>> {
    let wire: Option<Vec<_>> = events.iter().map(to_wire).collect();
    serde_json::to_vec(&wire?).ok()
}

fn to_wire(event: &ChatEvent) -> Option<Wire> {
    Some(match event {
        ChatEvent::Text { choice, text, logprobs, tokens } if logprobs.is_empty() && tokens.is_empty() => {
            Wire::Text(*choice, text.clone())
        }
        ChatEvent::Reasoning { choice, text } => Wire::Reasoning(*choice, text.clone()),
        ChatEvent::ReasoningSignature { choice, signature } => Wire::Signature(*choice, signature.clone()),
        ChatEvent::Refusal { choice, text } => Wire::Refusal(*choice, text.clone()),
        ChatEvent::ToolCallStart { choice, call, id, name, signature } => {
            Wire::Call(*choice, *call, id.clone(), name.clone(), signature.clone())
        }
        ChatEvent::ToolCallArguments { choice, call, json } => Wire::Arguments(*choice, *call, json.clone()),
        ChatEvent::Finish { choice, reason, stop: None } => {
            Wire::Finish(*choice, REASONS.iter().position(|known| known == reason)? as u8)
        }
        ChatEvent::Vector { index, values } => Wire::Vector(*index, values.clone()),
        ChatEvent::Score { index, score } => Wire::Score(*index, *score),
        ChatEvent::Usage(usage) => Wire::Usage([
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.cache_write_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
        ]),
        ChatEvent::Text { .. } | ChatEvent::Finish { .. } | ChatEvent::Prompt { .. } | ChatEvent::Raw(_) => {
            return None;
        }
    })
}

/// Decodes an answer; `None`: the bytes were not written by [`written`].
pub(crate) fn read(bytes: &[u8]) -> Option<Vec<ChatEvent>> {
    let wire: Vec<Wire> = serde_json::from_slice(bytes).ok()?;
    wire.into_iter().map(from_wire).collect()
}

fn from_wire(wire: Wire) -> Option<ChatEvent> {
    Some(match wire {
        Wire::Text(choice, text) => ChatEvent::Text { choice, text, logprobs: Vec::new(), tokens: Vec::new() },
        Wire::Reasoning(choice, text) => ChatEvent::Reasoning { choice, text },
        Wire::Signature(choice, signature) => ChatEvent::ReasoningSignature { choice, signature },
        Wire::Refusal(choice, text) => ChatEvent::Refusal { choice, text },
        Wire::Call(choice, call, id, name, signature) => ChatEvent::ToolCallStart { choice, call, id, name, signature },
        Wire::Arguments(choice, call, json) => ChatEvent::ToolCallArguments { choice, call, json },
        Wire::Finish(choice, reason) => {
            ChatEvent::Finish { choice, reason: *REASONS.get(usize::from(reason))?, stop: None }
        }
        Wire::Vector(index, values) => ChatEvent::Vector { index, values },
        Wire::Score(index, score) => ChatEvent::Score { index, score },
        Wire::Usage([prompt_tokens, cached_tokens, cache_write_tokens, completion_tokens, reasoning_tokens]) => {
            ChatEvent::Usage(Usage {
                prompt_tokens,
                cached_tokens,
                cache_write_tokens,
                completion_tokens,
                reasoning_tokens,
            })
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::text;

    fn finish(reason: FinishReason) -> ChatEvent {
        ChatEvent::Finish { choice: 0, reason, stop: None }
    }

    #[test]
    fn pieces_are_joined_and_read_as_they_were_written() {
        let call = ChatEvent::ToolCallStart { choice: 0, call: 0, id: "c".into(), name: "f".into(), signature: None };
        let arguments = |json: &str| ChatEvent::ToolCallArguments { choice: 0, call: 0, json: json.into() };
        let usage = ChatEvent::Usage(Usage { prompt_tokens: 3, completion_tokens: 4, ..Usage::default() });
        let mut recorder = Recorder::new(10_000, false);
        recorder.events(&[text("hel"), text("lo"), call.clone()]);
        recorder.events(&[arguments("{"), arguments("}"), finish(FinishReason::ToolCalls), usage.clone()]);
        let (events, _) = recorder.end().expect("complete");
        let expected = [text("hello"), call, arguments("{}"), finish(FinishReason::ToolCalls), usage];
        assert_eq!(events, expected);
        assert_eq!(read(&written(&events).expect("written")), Some(events));
        assert_eq!(recorder.end(), None);
    }

    #[test]
    fn what_was_signed_for_one_caller_is_kept_for_it_alone() {
        let check = |signature: String, has_others: bool, expected: bool| {
            let signed = ChatEvent::ReasoningSignature { choice: 0, signature };
            let mut recorder = Recorder::new(10_000, has_others);
            recorder.events(&[signed, text("a"), finish(FinishReason::Stop)]);
            assert_eq!(recorder.end().is_some(), expected, "{has_others}");
        };
        let own = || format!("{OWN_SIGNATURE}00");
        check(own(), false, true);
        check(own(), true, false);
        check("of a provider".into(), true, true);
    }

    #[test]
    fn what_cannot_be_given_again_is_not_kept() {
        let check = |events: &[ChatEvent]| {
            let mut recorder = Recorder::new(300, false);
            recorder.events(events);
            assert_eq!(recorder.end(), None, "{events:?}");
        };
        check(&[]);
        check(&[text("a"), finish(FinishReason::ContentFilter)]);
        check(&[text(&"a".repeat(300))]);
        check(&[ChatEvent::Raw("x".into())]);
        assert_eq!(read(b"[{\"Finish\":[0,9]}]"), None);
        assert_eq!(read(b"nonsense"), None);
    }
}
