//! Parser of an answer's head (RFC 9112, sections 4 to 6). Ambiguous framing is refused, since two readers would
//! disagree on where the next answer on the connection begins.

use http::{HeaderMap, HeaderName, HeaderValue, header};

use super::error::ClientError;

/// Largest head of an upstream's answer, in bytes; a larger one is an error.
pub(crate) const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Most header fields of an upstream's answer; more are an error.
const FIELDS_MAX: usize = 128;
/// Most interim answers (1xx) before the final one.
const INTERIM_MAX: usize = 8;

/// Delimitation of an answer's body: the rule by which its end is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyEnd {
    /// `Content-Length`: the body has this many bytes.
    Length(u64),
    /// `Transfer-Encoding: chunked`: the last chunk ends the body.
    Chunked,
    /// Close of the connection ends the body; the connection is not reused.
    Close,
}

/// Parsed head of an upstream's final answer, interim answers (1xx) left out.
#[derive(Debug)]
pub struct AnswerHead {
    /// Status: 101, or 200 to 599; a redirect only where the reader hands them over.
    pub status: u16,
    /// All header fields of the answer; names in lower case.
    pub headers: HeaderMap,
    /// Delimitation of the body that follows the head.
    pub end: BodyEnd,
    /// True if the connection can carry another request after the body.
    pub keep_alive: bool,
}

/// Incremental reader of the head; skips interim answers. Cost is linear in the bytes, in whatever pieces they arrive.
#[derive(Debug, Default)]
pub struct HeadReader {
    /// Position up to which the bytes were searched.
    scanned: usize,
    interim: usize,
    /// Hand redirects to the caller instead of refusing them.
    redirects: bool,
}

impl HeadReader {
    /// Creates a reader; `redirects`: they are handed to the caller, not refused.
    pub(super) fn new(redirects: bool) -> Self {
        Self { redirects, ..Self::default() }
    }

    /// Examines all bytes received so far. `Some`: the head, and the offset of the body. Interim answers are removed
    /// from `bytes`.
    ///
    /// # Errors
    /// The head is too large or invalid.
    pub fn read(&mut self, bytes: &mut Vec<u8>) -> Result<Option<(AnswerHead, usize)>, ClientError> {
        loop {
            let Some(end) = self.end(bytes) else {
                if bytes.len() > HEAD_BYTES_MAX {
                    return Err(ClientError::garbled("the head of the answer is larger than 64 KiB"));
                }
                return Ok(None);
            };
            if end > HEAD_BYTES_MAX {
                return Err(ClientError::garbled("the head of the answer is larger than 64 KiB"));
            }
            let Some(head) = parse(&bytes[..end], self.redirects)? else {
                self.interim += 1;
                if self.interim > INTERIM_MAX {
                    return Err(ClientError::garbled("too many interim answers (1xx)"));
                }
                bytes.drain(..end);
                self.scanned = 0;
                continue;
            };
            return Ok(Some((head, end)));
        }
    }

    /// Offset behind the empty line, if it has arrived.
    fn end(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = self.scanned.saturating_sub(3);
        while let Some(line) = memchr::memchr(b'\n', &bytes[at..]).map(|found| at + found + 1) {
            match &bytes[line..] {
                [b'\n', ..] => return Some(line + 1),
                [b'\r', b'\n', ..] => return Some(line + 2),
                _ => at = line,
            }
        }
        self.scanned = bytes.len();
        None
    }
}

/// Parses one complete head; `None`: an interim answer (1xx), which is skipped.
fn parse(bytes: &[u8], redirects: bool) -> Result<Option<AnswerHead>, ClientError> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut response = httparse::Response::new(&mut fields);
    match response.parse(bytes) {
        Ok(httparse::Status::Complete(length)) if length == bytes.len() => {}
        Ok(_) => return Err(ClientError::garbled("the answer does not begin with a status line")),
        Err(httparse::Error::TooManyHeaders) => return Err(ClientError::garbled("more than 128 header fields")),
        Err(error) => return Err(ClientError::garbled(format!("the head of the answer is not valid HTTP: {error}"))),
    }
    let (status, http10) = (response.code.unwrap_or(0), response.version == Some(0));
    match status {
        101 | 200..=299 | 400..=599 => {}
        100..=199 => return Ok(None),
        301..=303 | 307 | 308 if redirects => {}
        300..=399 => return Err(ClientError::garbled(format!("status {status}: redirects are not followed"))),
        _ => return Err(ClientError::garbled(format!("status {status} is none"))),
    }
    let mut headers = HeaderMap::with_capacity(response.headers.len());
    for field in response.headers.iter() {
        let name = HeaderName::from_bytes(field.name.as_bytes());
        let value = HeaderValue::from_bytes(field.value);
        let (Ok(name), Ok(value)) = (name, value) else {
            return Err(ClientError::garbled("a header field of the answer is not valid"));
        };
        headers.append(name, value);
    }
    let end = if matches!(status, 101 | 204) { BodyEnd::Length(0) } else { body_end(&headers, http10)? };
    let coded =
        headers.get(header::CONTENT_ENCODING).filter(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity"));
    if let Some(coding) = coded {
        let coding = String::from_utf8_lossy(coding.as_bytes()).chars().take(32).collect::<String>();
        return Err(ClientError::garbled(format!(
            "the answer is compressed ({coding:?}), though identity was asked for"
        )));
    }
    let keep_alive = end != BodyEnd::Close && status != 101 && keeps_alive(&headers, http10);
    Ok(Some(AnswerHead { status, headers, end, keep_alive }))
}

fn body_end(headers: &HeaderMap, http10: bool) -> Result<BodyEnd, ClientError> {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    match (codings.next(), lengths.next()) {
        (None, None) => Ok(BodyEnd::Close),
        (Some(_), Some(_)) => Err(ClientError::garbled("Content-Length and Transfer-Encoding together")),
        (Some(_), None) if http10 => Err(ClientError::garbled("Transfer-Encoding in HTTP/1.0")),
        (Some(coding), None) if codings.next().is_none() && coding.as_bytes().eq_ignore_ascii_case(b"chunked") => {
            Ok(BodyEnd::Chunked)
        }
        (Some(_), None) => Err(ClientError::garbled("Transfer-Encoding is not exactly: chunked")),
        (None, Some(_)) if lengths.next().is_some() => Err(ClientError::garbled("more than one Content-Length")),
        (None, Some(length)) => {
            let digits =
                length.to_str().ok().filter(|text| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()));
            let length = digits.and_then(|text| text.parse().ok());
            length.map(BodyEnd::Length).ok_or_else(|| ClientError::garbled("Content-Length is not a number"))
        }
    }
}

fn keeps_alive(headers: &HeaderMap, http10: bool) -> bool {
    let has = |token: &str| {
        headers.get_all(header::CONNECTION).iter().any(|value| {
            value
                .as_bytes()
                .split(|byte| *byte == b',')
                .any(|item| item.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
        })
    };
    !has("close") && (!http10 || has("keep-alive"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8], piece: usize) -> Result<Option<(u16, BodyEnd, bool, usize)>, String> {
        let (mut reader, mut bytes) = (HeadReader::default(), Vec::new());
        for part in text.chunks(piece) {
            bytes.extend_from_slice(part);
            if let Some((head, at)) = reader.read(&mut bytes).map_err(|error| error.to_string())? {
                return Ok(Some((head.status, head.end, head.keep_alive, bytes.len() - at)));
            }
        }
        Ok(None)
    }

    #[track_caller]
    fn check(text: &str, expected: Result<(u16, BodyEnd, bool), &str>) {
        for piece in [1, 2, 3, 7, text.len()] {
            match (read(text.as_bytes(), piece), expected) {
                (Ok(Some((status, end, keep, _))), Ok(expected)) => {
                    assert_eq!((status, end, keep), expected, "{text:?}")
                }
                (Err(message), Err(part)) => assert!(message.contains(part), "{message} for {text:?}"),
                (got, _) => panic!("{got:?} for {text:?}"),
            }
        }
    }

    #[test]
    fn heads_are_read_however_they_are_cut() {
        check("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", Ok((200, BodyEnd::Length(5), true)));
        check(
            "HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\nconnection: close\r\n\r\n",
            Ok((200, BodyEnd::Chunked, false)),
        );
        check("HTTP/1.1 200\r\n\r\n", Ok((200, BodyEnd::Close, false)));
        check("HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\n", Ok((200, BodyEnd::Length(1), false)));
        check(
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nlink: x\r\n\r\nHTTP/1.1 204 No\r\n\r\n",
            Ok((204, BodyEnd::Length(0), true)),
        );
        check("HTTP/1.1 429 Slow\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n", Ok((429, BodyEnd::Length(0), true)));
    }

    #[test]
    fn what_is_ambiguous_is_refused() {
        for (lines, part) in [
            ("content-length: 5\r\ncontent-length: 5", "more than one"),
            ("content-length: 5\r\ncontent-length: 6", "more than one"),
            ("content-length: 5\r\ntransfer-encoding: chunked", "together"),
            ("content-length: -5", "not a number"),
            ("content-length: +5", "not a number"),
            ("content-length: 5, 5", "not a number"),
            ("content-length: 99999999999999999999", "not a number"),
            ("transfer-encoding: gzip, chunked", "not exactly"),
            ("transfer-encoding: chunked\r\ntransfer-encoding: chunked", "not exactly"),
            ("content-encoding: gzip", "compressed"),
            ("x y: 1", "not valid"),
            ("x : 1", "not valid"),
            ("x: 1\r\n folded: 2", "not valid"),
            ("x: \0", "not valid"),
        ] {
            check(&format!("HTTP/1.1 200 OK\r\n{lines}\r\n\r\n"), Err(part));
        }
        check("HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", Err("HTTP/1.0"));
        check("HTTP/1.1 302 Found\r\nlocation: http://elsewhere/\r\n\r\n", Err("redirects"));
        check("HTTP/1.1 777 Odd\r\n\r\n", Err("is none"));
        check("HTTP/1.1 99 Odd\r\n\r\n", Err("not valid"));
        check("<html>\r\n\r\n", Err("not valid"));
        check("\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", Err("status line"));
        check(&format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: 1\r\n".repeat(129)), Err("128"));
        check(&"HTTP/1.1 100 Continue\r\n\r\n".repeat(9), Err("interim"));
    }

    #[test]
    fn an_endless_head_is_refused() {
        let text = format!("HTTP/1.1 200 OK\r\nx: {}", "a".repeat(70_000));
        assert!(read(text.as_bytes(), 4096).is_err());
    }

    proptest::proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300), piece in 1usize..40) {
            let mut text = b"HTTP/1.1 200 OK\r\n".to_vec();
            text.extend(bytes);
            let _ = read(&text, piece);
        }
    }
}
