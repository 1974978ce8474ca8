//! Memory of events, for what holds them.

use std::mem::size_of;

use penstock_types::{ChatEvent, TokenLogprob};

/// Memory of an allocation of `bytes`, with the allocator's own: a header, and steps of 16 bytes.
fn heap(bytes: usize) -> usize {
    if bytes == 0 { 0 } else { (bytes + 8).next_multiple_of(16).max(32) }
}

/// Memory of log-probabilities, in bytes.
pub fn logprob_bytes(all: &[TokenLogprob]) -> usize {
    let one = |logprob: &TokenLogprob| {
        let top = heap(size_of::<(u32, Vec<u8>, f32)>() * logprob.top.capacity());
        let bytes: usize = logprob.top.iter().map(|(_, bytes, _)| heap(bytes.capacity())).sum();
        size_of::<TokenLogprob>() + heap(logprob.bytes.capacity()) + top + bytes
    };
    all.iter().map(one).sum()
}

/// Memory of an event that is held, in bytes: an estimate from its sizes.
pub fn event_bytes(event: &ChatEvent) -> usize {
    let held = match event {
        ChatEvent::Text { text, logprobs, tokens, .. } | ChatEvent::Prompt { text, logprobs, tokens, .. } => {
            heap(text.capacity()) + logprob_bytes(logprobs) + heap(size_of::<u32>() * tokens.capacity())
        }
        ChatEvent::Reasoning { text, .. } | ChatEvent::Refusal { text, .. } => heap(text.capacity()),
        ChatEvent::ReasoningSignature { signature, .. } => heap(signature.capacity()),
        ChatEvent::ToolCallStart { id, name, signature, .. } => {
            heap(id.capacity()) + heap(name.capacity()) + signature.as_ref().map_or(0, |text| heap(text.capacity()))
        }
        ChatEvent::ToolCallArguments { json, .. } => heap(json.capacity()),
        ChatEvent::Vector { values, .. } => heap(size_of::<f32>() * values.capacity()),
        ChatEvent::Raw(bytes) => heap(bytes.len()),
        ChatEvent::Finish { .. } | ChatEvent::Score { .. } | ChatEvent::Usage(_) => 0,
    };
    size_of::<ChatEvent>() + held
}
