//! Look at an answer that passes by: its usage, for the comparison of predicted with cached tokens, and what the access
//! log says of it.

use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use penstock_base::error::Failure;
use penstock_dialects::watch::{self, Seen, Watch};
use penstock_http::BodyLease;
use penstock_types::{Dialect, FaultClass, FinishReason, ProviderFault, Surface};
use penstock_upstream::Facts;

/// Largest part of an answer that is held, in bytes. A longer one passes without a look at its usage, as does one that finds no memory.
const HELD_BYTES_MAX: usize = 1 << 20;

/// Facts that an answer has told by its end, or by the moment it was cut.
#[derive(Debug, Default)]
pub(crate) struct Read {
    /// Token counts that the answer reports; `None`: none.
    pub(crate) facts: Option<Facts>,
    /// Finish reason; of several choices, the last that finished.
    pub(crate) finish: Option<FinishReason>,
    /// True if the answer has said that it is complete.
    pub(crate) is_complete: bool,
    /// Fault of an answer whose status is good: an error that the answer contains, or an end that came too early.
    pub(crate) failure: Option<Failure>,
}

impl Read {
    fn of(seen: &Seen) -> Self {
        let facts = seen.usage.map(|usage| Facts::reported(usage, seen.tier));
        Self { facts, finish: seen.finish, is_complete: seen.complete, failure: None }
    }

    /// Adds a fault of the answer. A garbled answer is no failure: the answer may be right and this reader wrong.
    fn with(mut self, fault: ProviderFault) -> Self {
        self.is_complete = false;
        self.failure = (fault.class != FaultClass::Garbled).then(|| Failure::provider(fault));
        self
    }
}

/// Reader of an answer's usage; an answer that it cannot read passes all the same.
pub(crate) enum Answer {
    /// Answer that is not read: of another operation, compressed, too large, or no answer at all.
    Unread,
    /// Events of a stream.
    Stream(Box<Watch>, BodyLease),
    /// Body that is read when it has ended.
    Whole(Surface, Vec<u8>, BodyLease),
    /// Events of a stream up to one that is an error, or no event of the API.
    Broken(Box<Read>),
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

    /// Takes in the next bytes; returns true if there is content in them: tokens of a stream, or the first part of a whole
    /// answer.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> bool {
        let (next, is_content) = match self {
            Self::Unread | Self::Broken(_) => return false,
            Self::Stream(watch, lease) => {
                let before = watch.seen().pieces;
                watch.buffer().extend_from_slice(bytes);
                let taken = watch.take().map(drop);
                let next = match taken {
                    Err(fault) => Some(Self::Broken(Box::new(Read::of(watch.seen()).with(fault)))),
                    Ok(()) if watch.held() > HELD_BYTES_MAX || lease.cover(watch.held()).is_err() => Some(Self::Unread),
                    Ok(()) => None,
                };
                (next, watch.seen().pieces > before)
            }
            Self::Whole(_, held, lease) => {
                let (all, is_first) = (held.len() + bytes.len(), held.is_empty() && !bytes.is_empty());
                let fits = all <= HELD_BYTES_MAX && lease.cover(all).is_ok();
                if fits {
                    held.extend_from_slice(bytes);
                }
                ((!fits).then_some(Self::Unread), is_first)
            }
        };
        if let Some(next) = next {
            *self = next;
        }
        is_content
    }

    /// Facts of an answer whose body has ended.
    pub(crate) fn end(&mut self) -> Read {
        match std::mem::replace(self, Self::Unread) {
            Self::Unread => Read::default(),
            Self::Broken(read) => *read,
            Self::Stream(mut watch, _lease) => match watch.end().map(drop) {
                // Some streams have no event for their end.
                Ok(()) => Read { is_complete: true, ..Read::of(watch.seen()) },
                Err(fault) => Read::of(watch.seen()).with(fault),
            },
            Self::Whole(surface, held, _lease) => match watch::whole(surface, &held) {
                Ok(seen) => Read::of(&seen),
                Err(fault) => Read::default().with(fault),
            },
        }
    }

    /// Facts of an answer of which no more will come.
    pub(crate) fn cut(&mut self) -> Read {
        match std::mem::replace(self, Self::Unread) {
            Self::Stream(watch, _lease) => Read::of(watch.seen()),
            Self::Broken(read) => *read,
            Self::Unread | Self::Whole(..) => Read::default(),
        }
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
        body.as_bytes().chunks(piece).for_each(|bytes| _ = answer.add(bytes));
        cached_tokens(&mut answer)
    }

    fn cached_tokens(answer: &mut Answer) -> Option<u64> {
        let read = answer.end();
        read.facts.filter(|_| read.is_complete).map(|facts| facts.cached_tokens)
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
        assert_eq!(cached_tokens(&mut Answer::new(None, &HeaderMap::new(), lease(4 << 20))), None);
    }

    /// Facts read from these events: number of adds with content, then the whole, then cut in front of the last event.
    fn streamed(events: &[&str]) -> (usize, Read, Read) {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, http::HeaderValue::from_static("text/event-stream"));
        let fed = |events: &[&str]| {
            let mut answer = Answer::new(Some(Surface::Chat), &headers, lease(4 << 20));
            let add = |event: &&&str| answer.add(format!("data: {event}\n\n").as_bytes());
            (events.iter().filter(add).count(), answer)
        };
        let (content, mut whole) = fed(events);
        (content, whole.end(), fed(&events[..events.len() - 1]).1.cut())
    }

    const PIECE: &str = r#"{"id":"1","choices":[{"index":0,"delta":{"content":"x"}}]}"#;
    const LAST: &str = r#"{"id":"1","choices":[{"index":0,"delta":{},"finish_reason":"length"}],"usage":{"prompt_tokens":40,"completion_tokens":2}}"#;

    #[test]
    fn the_log_is_told_what_a_stream_said() {
        let (content, whole, cut) = streamed(&[PIECE, PIECE, LAST, "[DONE]"]);
        assert!(content >= 2, "{content}");
        for (read, is_complete) in [(whole, true), (cut, false)] {
            assert_eq!((read.is_complete, read.finish), (is_complete, Some(FinishReason::Length)));
            assert_eq!(read.facts.map(|facts| (facts.prompt_tokens, facts.completion_tokens)), Some((40, 2)));
            assert!(read.failure.is_none());
        }
        let (_, short, cut) = streamed(&[PIECE, PIECE]);
        assert_eq!(short.failure.expect("too short").log.as_deref(), Some("Truncated"));
        assert!(!short.is_complete && cut.failure.is_none(), "who broke it off is not known");
    }

    #[test]
    fn an_error_under_a_good_status_is_one_and_what_is_not_understood_is_none() {
        let error = r#"{"error":{"message":"out of memory","type":"server_error","code":500}}"#;
        let (content, read, _) = streamed(&[PIECE, error]);
        assert!(content == 1 && !read.is_complete);
        let failure = read.failure.expect("an error");
        assert_eq!((failure.kind, failure.log.is_some()), (penstock_proto::ErrorKind::ProviderFailed, true));
        let (_, read, _) = streamed(&["no JSON", PIECE]);
        assert!(read.failure.is_none() && !read.is_complete);
    }

    #[test]
    fn an_answer_that_finds_no_memory_is_not_read() {
        let budget = penstock_http::BodyBudget::new(256 << 10, 256 << 10);
        let mut full = budget.lease();
        full.cover(256 << 10).expect("all of it");
        let cached = |lease: BodyLease| {
            let mut answer = Answer::new(Some(Surface::Chat), &HeaderMap::new(), lease);
            let body = format!("{}{WHOLE}", " ".repeat(128 << 10));
            body.as_bytes().chunks(4096).for_each(|bytes| _ = answer.add(bytes));
            cached_tokens(&mut answer)
        };
        assert_eq!(cached(budget.lease()), None);
        drop(full);
        assert_eq!(cached(budget.lease()), Some(32));
        assert_eq!(budget.bytes_held(), 0, "given back with the answer");
    }
}
