//! HTTP/1 responses as bytes: head, framing and payload in, the parts of one write out. No I/O.
//!
//! The head is not sent by itself: it goes out with the first piece of the body, so that a complete answer is one
//! write, and so is the start of a stream. Only this module writes framing: fields of an upstream about length, coding
//! and connection are dropped here (RFC 9110, section 7.6.1), so a response cannot be understood in two ways.

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderName, HeaderValue, Method, StatusCode, header};
use pingora_core::protocols::http::date::get_cached_date;

use penstock_base::error::Failure;

/// Largest piece that is copied behind its framing: one `write` of a copy is cheaper than one `writev` of three parts.
const COPY_BYTES_MAX: usize = 4 * 1024;
/// Initial capacity for the status line and our own fields.
const HEAD_BYTES: usize = 384;

/// Header field: name and value.
pub type Field = (HeaderName, HeaderValue);

/// Delimitation of a response body, by which the client finds its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// No body: HEAD, 204, 304.
    Empty,
    /// `Content-Length`; the value is the number of bytes still to come.
    Length(u64),
    /// `Transfer-Encoding: chunked`: a body of unknown length over HTTP/1.1.
    Chunked,
    /// Close of the connection, for streams to HTTP/1.0.
    Close,
}

/// Facts about the request and body that decide about a response's framing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame<'a> {
    /// Method of the request; a response to `HEAD` has no body.
    pub(super) method: &'a Method,
    /// True if the request is HTTP/1.0.
    pub(super) http10: bool,
    /// True if the connection stays open after the response.
    pub(super) keep_alive: bool,
    /// Length of the body in bytes, if known.
    pub(super) length: Option<u64>,
}

impl Frame<'_> {
    fn framing(&self, status: StatusCode) -> Framing {
        let empty = self.method == Method::HEAD || matches!(status.as_u16(), 204 | 304);
        match self.length {
            _ if empty => Framing::Empty,
            Some(length) => Framing::Length(length),
            None if self.http10 => Framing::Close,
            None => Framing::Chunked,
        }
    }
}

/// Error of a body with more or fewer bytes than the head promised.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WrongLength;

/// Pieces of one write to the client, in the order in which they go out.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// Head and framing, and the payload if it is small.
    pub(super) front: BytesMut,
    /// Payload as it is, without a copy; empty if it is in `front`.
    pub(super) payload: Bytes,
    /// Framing bytes behind the payload: the end of the chunk, or of the body.
    pub(super) tail: &'static [u8],
}

/// HTTP/1.x response whose head is rendered and whose body is still being sent.
#[derive(Debug)]
pub(super) struct Response {
    head: BytesMut,
    framing: Framing,
}

impl Response {
    /// Renders the head, to be sent with the first piece. `own` are our fields; `fields` may be an upstream's.
    pub(super) fn new(status: u16, frame: &Frame<'_>, own: &[(&str, &[u8])], fields: &[Field]) -> Self {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let framing = frame.framing(status);
        let mut head = BytesMut::with_capacity(HEAD_BYTES);
        status_line(&mut head, status);
        for (name, value) in fields.iter().filter(|(name, _)| !is_ours(name)) {
            field(&mut head, name.as_str(), value.as_bytes());
        }
        for (name, value) in own {
            field(&mut head, name, value);
        }
        field(&mut head, "date", get_cached_date().as_bytes());
        match (framing, frame.length) {
            (Framing::Chunked, _) => field(&mut head, "transfer-encoding", b"chunked"),
            (_, Some(length)) if status != StatusCode::NO_CONTENT => {
                field(&mut head, "content-length", decimal(length, &mut [0; 20]));
            }
            _ => {}
        }
        let closes = !frame.keep_alive || framing == Framing::Close;
        if closes {
            field(&mut head, "connection", b"close");
        } else if frame.http10 {
            field(&mut head, "connection", b"keep-alive");
        }
        head.put_slice(b"\r\n");
        Self { head, framing }
    }

    /// Returns true if the connection can carry another response after this one.
    pub(super) fn is_delimited(&self) -> bool {
        self.framing != Framing::Close
    }

    /// Takes the head, if it has not gone out yet.
    pub(super) fn take_head(&mut self) -> BytesMut {
        std::mem::take(&mut self.head)
    }

    /// Frames a piece of the body; `last` ends the body.
    ///
    /// # Errors
    /// The body is longer than promised, or ends early.
    pub(super) fn piece(&mut self, payload: Bytes, last: bool) -> Result<Parts, WrongLength> {
        let mut front = self.take_head();
        let tail: &[u8] = match &mut self.framing {
            Framing::Empty => return Ok(Parts { front, payload: Bytes::new(), tail: b"" }),
            Framing::Close => b"",
            Framing::Length(left) => {
                *left = left.checked_sub(payload.len() as u64).ok_or(WrongLength)?;
                if last && *left > 0 {
                    return Err(WrongLength);
                }
                b""
            }
            Framing::Chunked => {
                if !payload.is_empty() {
                    chunk_size(&mut front, payload.len());
                }
                match (payload.is_empty(), last) {
                    (false, false) => b"\r\n",
                    (false, true) => b"\r\n0\r\n\r\n",
                    (true, true) => b"0\r\n\r\n",
                    (true, false) => b"",
                }
            }
        };
        if payload.len() > COPY_BYTES_MAX {
            return Ok(Parts { front, payload, tail });
        }
        front.reserve(payload.len() + tail.len());
        front.put_slice(&payload);
        front.put_slice(tail);
        Ok(Parts { front, payload: Bytes::new(), tail: b"" })
    }
}

/// Rendered head of `101 Switching Protocols`, ready to be written.
pub(super) fn switching(own: &[(&str, &[u8])], fields: &[Field]) -> BytesMut {
    let mut head = BytesMut::with_capacity(HEAD_BYTES);
    status_line(&mut head, StatusCode::SWITCHING_PROTOCOLS);
    field(&mut head, "connection", b"upgrade");
    field(&mut head, "upgrade", b"websocket");
    for (name, value) in fields.iter().filter(|(name, _)| !is_ours(name)) {
        field(&mut head, name.as_str(), value.as_bytes());
    }
    for (name, value) in own {
        field(&mut head, name, value);
    }
    head.put_slice(b"\r\n");
    head
}

/// Header fields of a failure: retry advice, allowed methods, error source, and fields of the upstream or the limit.
pub(super) fn failure_fields(failure: &Failure) -> Vec<Field> {
    let mut fields = Vec::with_capacity(5);
    fields.push((header::CONTENT_TYPE, HeaderValue::from_static("application/json")));
    let retry = if failure.should_retry() { "true" } else { "false" };
    fields.push((HeaderName::from_static("x-should-retry"), HeaderValue::from_static(retry)));
    if let Some(seconds) = failure.retry_after_seconds() {
        fields.push((header::RETRY_AFTER, seconds.into()));
    }
    if let Some(methods) = failure.allow {
        fields.push((header::ALLOW, HeaderValue::from_static(methods.header())));
    }
    fields.push((HeaderName::from_static("x-penstock-error-source"), HeaderValue::from_static(failure.source())));
    fields.extend(failure.upstream.iter().flat_map(|upstream| upstream.headers.iter().cloned()));
    fields.extend(failure.refusal.iter().flat_map(|refusal| refusal.fields.iter().cloned()));
    fields
}

/// Returns true if only this module may write the field.
pub(super) fn is_ours(name: &HeaderName) -> bool {
    *name == header::CONNECTION
        || *name == header::CONTENT_LENGTH
        || *name == header::TRANSFER_ENCODING
        || *name == header::UPGRADE
        || *name == header::TRAILER
        || *name == header::DATE
        || name.as_str() == "keep-alive"
}

fn status_line(head: &mut BytesMut, status: StatusCode) {
    head.put_slice(b"HTTP/1.1 ");
    head.put_slice(status.as_str().as_bytes());
    head.put_u8(b' ');
    head.put_slice(status.canonical_reason().unwrap_or_default().as_bytes());
    head.put_slice(b"\r\n");
}

fn field(head: &mut BytesMut, name: &str, value: &[u8]) {
    head.reserve(name.len() + value.len() + 4);
    head.put_slice(name.as_bytes());
    head.put_slice(b": ");
    head.put_slice(value);
    head.put_slice(b"\r\n");
}

/// Decimal digits of a number, written to the end of `digits`.
pub(super) fn decimal(mut value: u64, digits: &mut [u8; 20]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            return &digits[at..];
        }
    }
}

fn chunk_size(out: &mut BytesMut, size: usize) {
    let digits = (usize::BITS - size.leading_zeros()).div_ceil(4).max(1);
    for digit in (0..digits).rev() {
        out.put_u8(b"0123456789abcdef"[(size >> (digit * 4)) & 15]);
    }
    out.put_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::super::chunked::Decoder;
    use super::*;

    const GET: Frame<'static> = Frame { method: &Method::GET, http10: false, keep_alive: true, length: None };

    /// Bytes that go out, and the number of writes.
    fn wire(frame: &Frame<'_>, status: u16, fields: &[Field], pieces: &[(&'static [u8], bool)]) -> (String, usize) {
        let mut response = Response::new(status, frame, &[("x-request-id", b"r")], fields);
        let (mut out, mut writes) = (Vec::new(), 0);
        for (piece, last) in pieces {
            let parts = response.piece(Bytes::from_static(piece), *last).expect("the promised length");
            out.extend_from_slice(&parts.front);
            out.extend_from_slice(&parts.payload);
            out.extend_from_slice(parts.tail);
            writes += usize::from(!parts.front.is_empty());
        }
        let text = String::from_utf8(out).expect("text");
        let date = text.lines().find(|line| line.starts_with("date: ")).expect("a date").to_owned();
        (text.replace(&format!("{date}\r\n"), ""), writes)
    }

    #[track_caller]
    fn check(frame: &Frame<'_>, status: u16, pieces: &[(&'static [u8], bool)], expected: &str) {
        assert_eq!(wire(frame, status, &[], pieces).0, expected);
    }

    #[test]
    fn a_whole_answer_is_one_write() {
        let whole = Frame { length: Some(2), ..GET };
        let text = "HTTP/1.1 200 OK\r\nx-request-id: r\r\ncontent-length: 2\r\n\r\nhi";
        assert_eq!(wire(&whole, 200, &[], &[(b"hi", true)]), (text.into(), 1));
    }

    #[test]
    fn a_stream_sends_its_head_with_the_first_piece() {
        let text = "HTTP/1.1 200 OK\r\nx-request-id: r\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n";
        let pieces: &[(&[u8], bool)] = &[(b"a", false), (b"0123456789abcdef", false), (b"", true)];
        assert_eq!(wire(&GET, 200, &[], pieces), (text.into(), 3));
        let text = "HTTP/1.1 200 OK\r\nx-request-id: r\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n";
        assert_eq!(wire(&GET, 200, &[], &[(b"", false), (b"a", true)]), (text.into(), 2));
    }

    #[test]
    fn versions_methods_and_statuses_have_their_own_framing() {
        let closing = Frame { keep_alive: false, length: Some(0), ..GET };
        check(
            &closing,
            599,
            &[(b"", true)],
            "HTTP/1.1 599 \r\nx-request-id: r\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
        );
        let old = Frame { http10: true, ..GET };
        check(
            &old,
            200,
            &[(b"a", false), (b"b", true)],
            "HTTP/1.1 200 OK\r\nx-request-id: r\r\nconnection: close\r\n\r\nab",
        );
        let old = Frame { http10: true, length: Some(1), ..GET };
        check(
            &old,
            200,
            &[(b"a", true)],
            "HTTP/1.1 200 OK\r\nx-request-id: r\r\ncontent-length: 1\r\nconnection: keep-alive\r\n\r\na",
        );
        let head = Frame { method: &Method::HEAD, length: Some(5), ..GET };
        check(&head, 200, &[(b"hello", true)], "HTTP/1.1 200 OK\r\nx-request-id: r\r\ncontent-length: 5\r\n\r\n");
        let none = Frame { length: Some(0), ..GET };
        check(&none, 204, &[(b"", true)], "HTTP/1.1 204 No Content\r\nx-request-id: r\r\n\r\n");
    }

    #[test]
    fn framing_of_an_upstream_is_dropped() {
        let names = ["connection", "content-length", "transfer-encoding", "keep-alive", "upgrade", "trailer", "date"];
        let mut fields: Vec<Field> =
            names.iter().map(|name| (HeaderName::from_static(name), HeaderValue::from_static("x"))).collect();
        fields.push((HeaderName::from_static("x-kept"), HeaderValue::from_static("y")));
        let (text, _) = wire(&GET, 200, &fields, &[(b"", true)]);
        let text_expected =
            "HTTP/1.1 200 OK\r\nx-kept: y\r\nx-request-id: r\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n";
        assert_eq!(text, text_expected);
    }

    #[test]
    fn a_promised_length_is_kept() {
        let promised = Frame { length: Some(3), ..GET };
        let piece = |payload: &'static [u8], last| {
            Response::new(200, &promised, &[], &[]).piece(Bytes::from_static(payload), last).map(|_| ())
        };
        assert_eq!((piece(b"abcd", false), piece(b"ab", true)), (Err(WrongLength), Err(WrongLength)));
        assert_eq!((piece(b"ab", false), piece(b"abc", true)), (Ok(()), Ok(())));
    }

    #[test]
    fn numbers_are_written_in_full() {
        for value in [0, 9, 10, 12_345, u64::MAX] {
            assert_eq!(decimal(value, &mut [0; 20]), value.to_string().as_bytes());
        }
        for size in [1, 15, 16, 255, 256, 65_536, 1 << 40] {
            let mut out = BytesMut::new();
            chunk_size(&mut out, size);
            assert_eq!(out, format!("{size:x}\r\n"));
        }
    }

    proptest::proptest! {
        #[test]
        fn our_own_decoder_reads_what_is_written(
            pieces in proptest::collection::vec(proptest::collection::vec(0u8.., 0..6000), 0..12)
        ) {
            let (mut response, mut out) = (Response::new(200, &GET, &[], &[]), Vec::new());
            let ends = pieces.len();
            for at in 0..=ends {
                let payload = pieces.get(at).cloned().unwrap_or_default();
                let parts = response.piece(payload.into(), at == ends).expect("chunked");
                for part in [&parts.front[..], &parts.payload[..], parts.tail] {
                    out.extend_from_slice(part);
                }
            }
            let body = out.windows(4).position(|four| four == b"\r\n\r\n").expect("a head") + 4;
            let (mut decoder, mut read) = (Decoder::default(), Vec::new());
            let used = decoder.feed(&out[body..], &mut read).expect("valid");
            proptest::prop_assert_eq!((read, used, decoder.is_done()), (pieces.concat(), out.len() - body, true));
        }
    }
}
