//! The `logprobs` of `/v1/completions`: four parallel lists `{tokens, token_logprobs, top_logprobs, text_offset}`.
//!
//! Offsets count characters of the returned text from 0. Tokens are strings there, so a token that is not valid text
//! by itself is written in the API's traditional form `bytes:\xe2\x82`, which also keeps the names of one position's
//! `top_logprobs` apart.

use std::fmt::Write as _;

use bytes::{BufMut, BytesMut};

use penstock_types::event::{TokenLogprob, TokenPlace};
use penstock_types::request::TokenNames;
use penstock_types::write;

/// The four lists of a completion's `logprobs` as JSON text, while they grow.
#[derive(Clone, Default)]
pub(super) struct LegacyLogprobs {
    tokens: BytesMut,
    values: BytesMut,
    tops: BytesMut,
    offsets: BytesMut,
    characters: u64,
}

impl LegacyLogprobs {
    /// Creates lists whose first offset lies behind `characters` of text.
    pub(super) fn after(characters: u64) -> Self {
        Self { characters, ..Self::default() }
    }

    /// Offset of the next token, in characters.
    pub(super) fn characters(&self) -> u64 {
        self.characters
    }

    /// Bytes held by the lists.
    pub(super) fn bytes(&self) -> usize {
        self.tokens.len() + self.values.len() + self.tops.len() + self.offsets.len()
    }

    /// Empties the lists and sets the next offset to `characters`.
    pub(super) fn restart(&mut self, characters: u64) {
        for list in [&mut self.tokens, &mut self.values, &mut self.tops, &mut self.offsets] {
            list.clear();
        }
        self.characters = characters;
    }

    /// Adds the log-probabilities of `tokens`.
    pub(super) fn extend(&mut self, tokens: &[TokenLogprob], names: TokenNames) {
        for token in tokens {
            self.push(token, names);
        }
    }

    fn push(&mut self, token: &TokenLogprob, names: TokenNames) {
        if !self.tokens.is_empty() {
            for list in [&mut self.tokens, &mut self.values, &mut self.tops, &mut self.offsets] {
                list.put_u8(b',');
            }
        }
        put_token(&mut self.tokens, token.token, &token.bytes, names);
        match token.logprob {
            Some(value) => {
                write::logprob(&mut self.values, value);
                put_top(&mut self.tops, token, value, names);
            }
            None => {
                self.values.put_slice(b"null");
                self.tops.put_slice(b"null");
            }
        }
        if token.place != TokenPlace::Text {
            return write::integer(&mut self.offsets, self.characters);
        }
        // A token that begins inside a character gets the offset of that character.
        let inside = token.bytes.first().is_some_and(|&byte| is_continuation(byte));
        write::integer(&mut self.offsets, self.characters.saturating_sub(u64::from(inside)));
        self.characters += token.bytes.iter().filter(|&&byte| !is_continuation(byte)).count() as u64;
    }

    /// Writes the object; the elements of `first` come before those of this one.
    pub(super) fn put(&self, first: Option<&LegacyLogprobs>, out: &mut BytesMut) {
        let names: [&[u8]; 4] =
            [b"{\"tokens\":[", b"],\"token_logprobs\":[", b"],\"top_logprobs\":[", b"],\"text_offset\":["];
        for (index, name) in names.into_iter().enumerate() {
            out.put_slice(name);
            let before = first.map_or(&b""[..], |first| first.list(index));
            out.put_slice(before);
            if !before.is_empty() && !self.list(index).is_empty() {
                out.put_u8(b',');
            }
            out.put_slice(self.list(index));
        }
        out.put_slice(b"]}");
    }

    fn list(&self, index: usize) -> &[u8] {
        match index {
            0 => &self.tokens,
            1 => &self.values,
            2 => &self.tops,
            _ => &self.offsets,
        }
    }
}

fn is_continuation(byte: u8) -> bool {
    byte & 0xC0 == 0x80
}

fn put_token(out: &mut BytesMut, id: u32, bytes: &[u8], names: TokenNames) {
    if names == TokenNames::Ids {
        return write::token_id(out, id);
    }
    match std::str::from_utf8(bytes) {
        Ok(text) => write::string(out, text),
        Err(_) => {
            out.put_slice(b"\"bytes:");
            for byte in bytes {
                // Cannot fail: BytesMut grows. The backslash is escaped for JSON.
                _ = write!(out, "\\\\x{byte:02x}");
            }
            out.put_u8(b'"');
        }
    }
}

/// Writes one position's `top_logprobs`: the best tokens and the chosen one. Tokens with the same bytes share one name: the
/// first (best) stays.
fn put_top(out: &mut BytesMut, token: &TokenLogprob, value: f32, names: TokenNames) {
    let same = |one: (u32, &[u8]), other: (u32, &[u8])| match names {
        TokenNames::Text => one.1 == other.1,
        TokenNames::Ids => one.0 == other.0,
    };
    out.put_u8(b'{');
    for (index, (id, bytes, value)) in token.top.iter().enumerate() {
        if token.top[..index].iter().any(|earlier| same((earlier.0, &earlier.1), (*id, bytes))) {
            continue;
        }
        if index > 0 {
            out.put_u8(b',');
        }
        put_token(out, *id, bytes, names);
        out.put_u8(b':');
        write::logprob(out, *value);
    }
    if !token.top.iter().any(|top| same((top.0, &top.1), (token.token, &token.bytes))) {
        if !token.top.is_empty() {
            out.put_u8(b',');
        }
        put_token(out, token.token, &token.bytes, names);
        out.put_u8(b':');
        write::logprob(out, value);
    }
    out.put_u8(b'}');
}
