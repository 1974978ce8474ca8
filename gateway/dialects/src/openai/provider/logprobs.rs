//! Log-probabilities: of chat, of completions (the old shape), of prompts (vLLM's).
//!
//! Only vLLM gives token ids, and only when asked; elsewhere the id is 0, and the bytes identify the token.

use crate::answer_json as value;
use penstock_types::event::{TokenLogprob, TokenPlace};
use penstock_types::json::{Fault, Kind, Reader};

/// Reads `logprobs` of a chat choice: `{"content":[{token, logprob, bytes, top_logprobs}]}`.
pub(super) fn chat(reader: &mut Reader<'_>) -> Result<Vec<TokenLogprob>, Fault> {
    let mut all = Vec::new();
    value::fields(reader, |reader, key| {
        match key {
            "content" => all = entries(reader)?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(all)
}

/// Reads a list of entries: `content` of a chat choice, or `logprobs` of a response.
pub(super) fn entries(reader: &mut Reader<'_>) -> Result<Vec<TokenLogprob>, Fault> {
    let mut all = Vec::new();
    value::items(reader, |reader, _| {
        let mut top = Vec::new();
        let (token, bytes, logprob) = entry(reader, Some(&mut top))?;
        all.push(TokenLogprob { token, bytes, logprob, top, place: TokenPlace::Text });
        Ok(())
    })?;
    Ok(all)
}

type Top = Vec<(u32, Vec<u8>, f32)>;

fn entry(reader: &mut Reader<'_>, mut top: Option<&mut Top>) -> Result<(u32, Vec<u8>, Option<f32>), Fault> {
    let (mut token, mut bytes, mut logprob) = (None, None, None);
    value::fields(reader, |reader, key| {
        match key {
            "token" => token = value::string(reader)?.map(|text| text.into_owned()),
            "bytes" => bytes = some_bytes(reader)?,
            "logprob" => logprob = value::number(reader)?.map(|value| value as f32),
            "top_logprobs" => match top.as_deref_mut() {
                Some(top) => value::items(reader, |reader, _| {
                    let (id, bytes, logprob) = entry(reader, None)?;
                    top.extend(logprob.map(|logprob| (id, bytes, logprob)));
                    Ok(())
                })?,
                None => reader.skip()?,
            },
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let token = token.unwrap_or_default();
    // vLLM's token names, where the request asked for ids.
    let id = token.strip_prefix("token_id:").and_then(|id| id.parse().ok()).unwrap_or_default();
    Ok((id, bytes.unwrap_or_else(|| token.into_bytes()), logprob))
}

fn some_bytes(reader: &mut Reader<'_>) -> Result<Option<Vec<u8>>, Fault> {
    if reader.kind()? != Kind::Array {
        return reader.skip().map(|()| None);
    }
    let ids = value::token_ids(reader)?;
    Ok(Some(ids.into_iter().filter_map(|byte| u8::try_from(byte).ok()).collect()))
}

/// Reads `logprobs` of a completion choice: `{tokens, token_logprobs, top_logprobs}`, lists of one length.
pub(super) fn legacy(reader: &mut Reader<'_>) -> Result<Vec<TokenLogprob>, Fault> {
    let (mut tokens, mut logprobs, mut tops) = (Vec::new(), Vec::new(), Vec::new());
    value::fields(reader, |reader, key| match key {
        "tokens" => value::items(reader, |reader, _| {
            tokens.push(value::string(reader)?.map_or_else(Vec::new, |text| token_bytes(&text)));
            Ok(())
        }),
        "token_logprobs" => value::items(reader, |reader, _| {
            logprobs.push(value::number(reader)?.map(|value| value as f32));
            Ok(())
        }),
        "top_logprobs" => value::items(reader, |reader, _| {
            let mut top = Vec::new();
            value::fields(reader, |reader, token| {
                let logprob = value::number(reader)?;
                top.extend(logprob.map(|logprob| (0, token_bytes(token), logprob as f32)));
                Ok(())
            })?;
            top.sort_by(|one, other| other.2.total_cmp(&one.2));
            tops.push(top);
            Ok(())
        }),
        _ => reader.skip(),
    })?;
    let mut tops = tops.into_iter();
    let mut logprobs = logprobs.into_iter();
    let one = |bytes| TokenLogprob {
        token: 0,
        bytes,
        logprob: logprobs.next().flatten(),
        top: tops.next().unwrap_or_default(),
        place: TokenPlace::Text,
    };
    Ok(tokens.into_iter().map(one).collect())
}

/// Bytes of a token in the old shape: text, or `bytes:\xe2\x82` where the token is not valid text.
fn token_bytes(text: &str) -> Vec<u8> {
    let Some(escaped) = text.strip_prefix("bytes:") else { return text.as_bytes().to_vec() };
    let mut bytes = Vec::new();
    let mut rest = escaped;
    while !rest.is_empty() {
        let hex = rest.strip_prefix("\\x").and_then(|rest| rest.get(..2));
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &rest[4..];
            }
            // Not this notation: the token is a text that begins with `bytes:`.
            None => return text.as_bytes().to_vec(),
        }
    }
    bytes
}

/// Reads `prompt_logprobs`: null, or an object from token id to `{logprob, rank, decoded_token}`, the prompt's own
/// token first.
pub(super) fn prompt(reader: &mut Reader<'_>) -> Result<Vec<Position>, Fault> {
    let mut all = Vec::new();
    value::items(reader, |reader, _| {
        let mut position = Position::new();
        value::fields(reader, |reader, id| {
            let (mut logprob, mut bytes) = (None, Vec::new());
            value::fields(reader, |reader, key| {
                match key {
                    "logprob" => logprob = value::number(reader)?.map(|value| value as f32),
                    "decoded_token" => {
                        bytes = value::string(reader)?.map_or_else(Vec::new, |text| text.into_owned().into())
                    }
                    _ => reader.skip()?,
                }
                Ok(())
            })?;
            position.extend(id.parse().ok().zip(logprob).map(|(id, logprob)| (id, bytes, logprob)));
            Ok(())
        })?;
        all.push(position);
        Ok(())
    })?;
    Ok(all)
}

/// Tokens listed at one position of a prompt: id, bytes, log-probability.
pub(super) type Position = Top;

/// Log-probabilities of a prompt; `own` are the ids of its tokens, where they are known.
pub(super) fn prompt_tokens(places: Vec<Position>, own: &[u32]) -> Vec<TokenLogprob> {
    let one = |(at, mut top): (usize, Position)| {
        let own = own.get(at).copied();
        let found = top.iter().find(|(id, ..)| own.is_none_or(|own| own == *id)).cloned();
        top.sort_by(|one, other| other.2.total_cmp(&one.2));
        match found {
            Some((token, bytes, logprob)) => {
                TokenLogprob { token, bytes, logprob: Some(logprob), top, place: TokenPlace::Text }
            }
            None => TokenLogprob {
                token: own.unwrap_or_default(),
                bytes: Vec::new(),
                logprob: None,
                top,
                place: TokenPlace::Text,
            },
        }
    };
    places.into_iter().enumerate().map(one).collect()
}
