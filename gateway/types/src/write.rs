//! JSON written straight into the output buffer: no tree, no allocation except the buffer's own growth.

use std::fmt::Write as _;

use bytes::{BufMut, BytesMut};

use crate::event::{TokenLogprob, TokenPlace, Usage};
use crate::json_text::plain_run;
use crate::request::TokenNames;

/// Writes a string in quotes.
pub fn string(out: &mut BytesMut, text: &str) {
    out.put_u8(b'"');
    escaped(out, text);
    out.put_u8(b'"');
}

/// Writes a string in quotes, or null.
pub fn optional_string(out: &mut BytesMut, text: Option<&str>) {
    match text {
        Some(text) => string(out, text),
        None => out.put_slice(b"null"),
    }
}

/// Writes the inside of a string: escapes exactly the characters that JSON demands (quote, backslash, control
/// characters). Escaped pieces can be joined.
pub fn escaped(out: &mut BytesMut, text: &str) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let mut rest = text.as_bytes();
    loop {
        let run = plain_run(rest);
        out.put_slice(&rest[..run]);
        let Some(&byte) = rest.get(run) else { return };
        match byte {
            b'"' => out.put_slice(b"\\\""),
            b'\\' => out.put_slice(b"\\\\"),
            b'\n' => out.put_slice(b"\\n"),
            b'\r' => out.put_slice(b"\\r"),
            b'\t' => out.put_slice(b"\\t"),
            byte => {
                out.put_slice(b"\\u00");
                out.put_slice(&[HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
            }
        }
        rest = &rest[run + 1..];
    }
}

/// Writes bytes as text in quotes, with invalid UTF-8 replaced.
pub fn lossy(out: &mut BytesMut, bytes: &[u8]) {
    out.put_u8(b'"');
    for chunk in bytes.utf8_chunks() {
        escaped(out, chunk.valid());
        if !chunk.invalid().is_empty() {
            escaped(out, "\u{FFFD}");
        }
    }
    out.put_u8(b'"');
}

/// Writes an integer in decimal digits.
pub fn integer(out: &mut BytesMut, value: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    let mut rest = value;
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.put_slice(&digits[at..]);
}

/// Writes a list of integers.
pub fn integers(out: &mut BytesMut, values: &[u32]) {
    out.put_u8(b'[');
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            out.put_u8(b',');
        }
        integer(out, u64::from(*value));
    }
    out.put_u8(b']');
}

/// Writes a list of integers, or null where it was not asked for.
pub fn asked_integers(out: &mut BytesMut, asked: bool, values: &[u32]) {
    if asked { integers(out, values) } else { out.put_slice(b"null") }
}

/// Writes a log-probability as the shortest text that reads back as the same `f32`. JSON has no infinity, so values
/// below -9999 (an impossible token) become -9999.0, as with other servers.
pub fn logprob(out: &mut BytesMut, value: f32) {
    let value = if value.is_nan() { -9999.0 } else { value.clamp(-9999.0, 9999.0) };
    // Cannot fail: BytesMut grows.
    _ = write!(out, "{value:?}");
}

/// Writes OpenAI's `usage` object with the token counts.
pub fn usage(out: &mut BytesMut, usage: &Usage) {
    out.put_slice(b"{\"prompt_tokens\":");
    integer(out, usage.prompt_tokens);
    out.put_slice(b",\"completion_tokens\":");
    integer(out, usage.completion_tokens);
    out.put_slice(b",\"total_tokens\":");
    integer(out, usage.total());
    out.put_slice(b",\"prompt_tokens_details\":{\"cached_tokens\":");
    integer(out, usage.cached_tokens);
    out.put_slice(b"},\"completion_tokens_details\":{\"reasoning_tokens\":");
    integer(out, usage.reasoning_tokens);
    out.put_slice(b"}}");
}

/// Writes one entry of a chat answer's `logprobs.content`.
pub fn chat_logprob(out: &mut BytesMut, token: &TokenLogprob, names: TokenNames) {
    // The bytes of all entries together equal the answer's: a control token has a name there, but no bytes.
    let said = if token.place == TokenPlace::Control { &[][..] } else { &token.bytes };
    entry(
        out,
        |out| token_name(out, token.token, &token.bytes, names),
        said,
        token.logprob.unwrap_or(f32::NEG_INFINITY),
    );
    out.put_slice(b",\"top_logprobs\":[");
    for (index, (id, bytes, value)) in token.top.iter().enumerate() {
        if index > 0 {
            out.put_u8(b',');
        }
        entry(out, |out| token_name(out, *id, bytes, names), bytes, *value);
        out.put_u8(b'}');
    }
    out.put_slice(b"]}");
}

/// Begins an entry of log-probabilities: `{"token":…,"logprob":…,"bytes":[…]`, left open for further fields.
fn entry(out: &mut BytesMut, name: impl FnOnce(&mut BytesMut), bytes: &[u8], value: f32) {
    out.put_slice(b"{\"token\":");
    name(out);
    out.put_slice(b",\"logprob\":");
    logprob(out, value);
    out.put_slice(b",\"bytes\":[");
    for (index, byte) in bytes.iter().enumerate() {
        if index > 0 {
            out.put_u8(b',');
        }
        integer(out, u64::from(*byte));
    }
    out.put_u8(b']');
}

fn token_name(out: &mut BytesMut, id: u32, bytes: &[u8], names: TokenNames) {
    match names {
        TokenNames::Text => lossy(out, bytes),
        TokenNames::Ids => token_id(out, id),
    }
}

/// Writes a token as `"token_id:7"`.
pub fn token_id(out: &mut BytesMut, id: u32) {
    out.put_slice(b"\"token_id:");
    integer(out, u64::from(id));
    out.put_u8(b'"');
}

/// Writes vLLM's `prompt_logprobs`: null for the first token, then objects from token id to its log-probability, rank
/// and text.
pub fn prompt_logprobs(out: &mut BytesMut, tokens: &[TokenLogprob]) {
    out.put_u8(b'[');
    for (index, token) in tokens.iter().enumerate() {
        if index > 0 {
            out.put_u8(b',');
        }
        match token.logprob {
            None => out.put_slice(b"null"),
            Some(value) => prompt_position(out, token, value),
        }
    }
    out.put_u8(b']');
}

fn prompt_position(out: &mut BytesMut, token: &TokenLogprob, value: f32) {
    let in_top = token.top.iter().any(|(id, ..)| *id == token.token);
    out.put_u8(b'{');
    let mut first = true;
    // The prompt's own token is always listed; its rank is known only when it is among the best.
    if !in_top {
        ranked(out, &mut first, token.token, &token.bytes, value, None);
    }
    for (rank, (id, bytes, value)) in token.top.iter().enumerate() {
        ranked(out, &mut first, *id, bytes, *value, Some(rank as u64 + 1));
    }
    out.put_u8(b'}');
}

fn ranked(out: &mut BytesMut, first: &mut bool, id: u32, bytes: &[u8], value: f32, rank: Option<u64>) {
    if !std::mem::take(first) {
        out.put_u8(b',');
    }
    out.put_u8(b'"');
    integer(out, u64::from(id));
    out.put_slice(b"\":{\"logprob\":");
    logprob(out, value);
    out.put_slice(b",\"rank\":");
    match rank {
        Some(rank) => integer(out, rank),
        None => out.put_slice(b"null"),
    }
    out.put_slice(b",\"decoded_token\":");
    lossy(out, bytes);
    out.put_u8(b'}');
}
