//! Look at an answer that passes by: its usage, for the comparison of predicted with cached tokens.

use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use penstock_dialects::watch::{self, Watch};
use penstock_http::BodyLease;
use penstock_types::{Dialect, Surface};

/// Largest part of an answer that is held, in bytes. A longer one passes without a look at its usage, as does one that finds no memory.
const HELD_BYTES_MAX: usize = 1 << 20;

/// Reader of an answer's usage; an answer that it cannot read passes all the same.
pub(crate) enum Answer {
    /// Answer that is not read: of another operation, compressed, too large, or no answer at all.
    Unread,
    /// Events of a stream.
    Stream(Box<Watch>, BodyLease),
    /// Body that is read when it has ended.
    Whole(Surface, Vec<u8>, BodyLease),
}

impl Answer {
    /// Reader of an answer with this head; `surface`: the operation, where it is known. `lease`: on the memory for answers, empty.
    pub(crate) fn new(surface: Option<Surface>, headers: &HeaderMap, lease: BodyLease) -> Self {
        let Some(surface) = surface.filter(|surface| surface.dialect() != Dialect::Ollama) else { return Self::Unread };
        let is_plain = |coding: &http::HeaderValue| coding.as_bytes().eq_ignore_ascii_case(b"identity");
        if !headers.get(CONTENT_ENCODING).is_none_or(is_plain) {
            return Self::Unread;
        }
        let kind = headers.get(CONTENT_TYPE).map_or(&b""[..], |kind| kind.as_bytes());
        match kind.get(..17).is_some_and(|kind| kind.eq_ignore_ascii_case(b"text/event-stream")) {
            true => Self::Stream(Box::new(Watch::new(surface, false)), lease),
            false => Self::Whole(surface, Vec::new(), lease),
        }
    }

    /// Takes in the next bytes.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        let goes_on = match self {
            Self::Unread => true,
            Self::Stream(watch, lease) => {
                watch.buffer().extend_from_slice(bytes);
                watch.take().is_ok() && watch.held() <= HELD_BYTES_MAX && lease.cover(watch.held()).is_ok()
            }
            Self::Whole(_, held, lease) => {
                let all = held.len() + bytes.len();
                let fits = all <= HELD_BYTES_MAX && lease.cover(all).is_ok();
                if fits {
                    held.extend_from_slice(bytes);
                }
                fits
            }
        };
        if !goes_on {
            *self = Self::Unread;
        }
    }

    /// Cached prompt tokens that the whole answer reports; `None`: it says nothing of its usage.
    pub(crate) fn cached_tokens(&mut self) -> Option<u64> {
        let usage = match std::mem::replace(self, Self::Unread) {
            Self::Unread => None,
            Self::Stream(mut watch, _lease) => {
                watch.end().ok()?;
                watch.seen().usage
            }
            Self::Whole(surface, held, _lease) => watch::whole(surface, &held).ok()?.usage,
        };
        usage.map(|usage| usage.cached_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(bytes: usize) -> BodyLease {
        penstock_http::BodyBudget::new(bytes, bytes).lease()
    }

    fn cached(kind: &'static str, coding: Option<&'static str>, body: &str, piece: usize) -> Option<u64> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, http::HeaderValue::from_static(kind));
        coding.map(|coding| headers.insert(CONTENT_ENCODING, http::HeaderValue::from_static(coding)));
        let mut answer = Answer::new(Some(Surface::Chat), &headers, lease(4 << 20));
        body.as_bytes().chunks(piece).for_each(|bytes| answer.add(bytes));
        answer.cached_tokens()
    }

    const WHOLE: &str = r#"{"id":"1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":40,"completion_tokens":2,"total_tokens":42,"prompt_tokens_details":{"cached_tokens":32}}}"#;

    #[test]
    fn usage_is_read_from_whole_answers_and_streams() {
        let stream = "data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"finish_reason\":\"stop\"}]}\n\n\
            data: {\"id\":\"1\",\"choices\":[],\"usage\":{\"prompt_tokens\":40,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":32}}}\n\n\
            data: [DONE]\n\n";
        for piece in [1, 7, 4096] {
            assert_eq!(cached("application/json", None, WHOLE, piece), Some(32));
            assert_eq!(cached("text/event-stream; charset=utf-8", Some("identity"), stream, piece), Some(32));
        }
    }

    #[test]
    fn what_cannot_be_read_says_nothing() {
        assert_eq!(cached("application/json", Some("gzip"), WHOLE, 100), None);
        assert_eq!(cached("application/json", None, "no JSON", 100), None);
        assert_eq!(cached("text/event-stream", None, "data: {\"choices\":[]}\n\n", 100), None, "cut");
        let long = format!("{}{WHOLE}", " ".repeat(HELD_BYTES_MAX));
        assert_eq!(cached("application/json", None, &long, 4096), None);
        assert_eq!(Answer::new(None, &HeaderMap::new(), lease(4 << 20)).cached_tokens(), None);
    }

    #[test]
    fn an_answer_that_finds_no_memory_is_not_read() {
        let budget = penstock_http::BodyBudget::new(256 << 10, 256 << 10);
        let mut full = budget.lease();
        full.cover(256 << 10).expect("all of it");
        let cached = |lease: BodyLease| {
            let mut answer = Answer::new(Some(Surface::Chat), &HeaderMap::new(), lease);
            let body = format!("{}{WHOLE}", " ".repeat(128 << 10));
            body.as_bytes().chunks(4096).for_each(|bytes| answer.add(bytes));
            answer.cached_tokens()
        };
        assert_eq!(cached(budget.lease()), None);
        drop(full);
        assert_eq!(cached(budget.lease()), Some(32));
        assert_eq!(budget.bytes_held(), 0, "given back with the answer");
    }
}
