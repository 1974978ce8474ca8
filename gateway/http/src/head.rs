//! Strict parser of HTTP/1 request heads: bytes in, [`Head`] or one fault out.
//!
//! A server in front of others must never read a request differently from the next reader, so this grammar accepts what
//! RFC 9110 and 9112 allow and what real clients send, and nothing that two parsers could disagree on: no bare CR or
//! LF, no folded lines, no space before a colon, one Content-Length or one `Transfer-Encoding: chunked` and never both,
//! exactly one well-formed Host. An accepted head is re-serialised when it is forwarded, never copied.
//!
//! Pure: no sockets, no clock. [`Scanner`] looks at each byte once, however slowly the head arrives.

use std::str;

/// First bytes of an HTTP/2 connection with prior knowledge (RFC 9113, section 3.4).
pub const H2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Longest request target; longer ones are answered with 414. Our longest route has under 300 bytes.
const TARGET_BYTES_MAX: usize = 8 * 1024;
/// Most header lines of a head; official SDKs send about 25.
const HEADERS_MAX: usize = 100;
/// Longest method token; the registered ones have at most 17 bytes.
const METHOD_BYTES_MAX: usize = 32;

/// Fault of a request head that is refused: the status, and the reason for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadFault {
    /// Status: 400, 408, 413, 414, 417, 431, 501 or 505.
    pub status: u16,
    /// Message for the client: names the rule, and echoes nothing of the request.
    pub message: &'static str,
}

const fn fault(status: u16, message: &'static str) -> HeadFault {
    HeadFault { status, message }
}

const fn bad(message: &'static str) -> HeadFault {
    fault(400, message)
}

/// Delimitation of the request body: the rule by which its end is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// No body: neither length nor chunks, or a length of 0.
    None,
    /// `Content-Length`: the body has this many bytes, above 0.
    Length(u64),
    /// `Transfer-Encoding: chunked`: the last chunk ends the body.
    Chunked,
}

/// Request head that has passed all checks against smuggling and ambiguity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Method token exactly as the client sent it.
    pub method: http::Method,
    /// Path and query, without scheme and authority.
    pub target: String,
    /// True if the version is 1.0 (answers are then close-delimited).
    pub http10: bool,
    /// Delimitation of the body that follows the head.
    pub framing: Framing,
    /// True if the client allows another request on the connection.
    pub keep_alive: bool,
    /// True if the client waits for `100 Continue` before it sends the body.
    pub expect_continue: bool,
    /// True if the request is a WebSocket handshake. The handler may accept it ([`super::Exchange::upgrade`]) or answer
    /// as if it were a plain GET.
    pub upgrade: bool,
    /// All header fields of the request; names in lower case.
    pub headers: http::HeaderMap,
}

/// Result of scanning the bytes received so far for the end of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scan {
    /// The bytes are valid so far, and the head is not complete.
    Partial,
    /// Complete: length of the head in bytes, empty line included.
    Complete(usize),
}

/// Scanner for the end of the head; looks at each byte once.
#[derive(Debug, Default)]
pub struct Scanner {
    seen: usize,
}

impl Scanner {
    /// Scans the bytes that were added to `buf` since the last call. Errors, as soon as they are seen: a bare CR or LF,
    /// a NUL, a head above `bytes_max`.
    pub fn scan(&mut self, buf: &[u8], bytes_max: usize) -> Result<Scan, HeadFault> {
        while self.seen < buf.len() {
            let at = self.seen;
            match buf[at] {
                b'\n' if at == 0 || buf[at - 1] != b'\r' => return Err(bad("line feed without carriage return")),
                b'\n' if at >= 3 && &buf[at - 3..at] == b"\r\n\r" => {
                    let head = at + 1;
                    return if head > bytes_max { Err(TOO_LARGE) } else { Ok(Scan::Complete(head)) };
                }
                0 => return Err(bad("NUL byte in the request head")),
                byte if byte != b'\n' && at > 0 && buf[at - 1] == b'\r' => {
                    return Err(bad("carriage return without line feed"));
                }
                _ => {}
            }
            self.seen += 1;
        }
        if buf.len() > bytes_max { Err(TOO_LARGE) } else { Ok(Scan::Partial) }
    }
}

const TOO_LARGE: HeadFault = fault(431, "the request head is larger than this server allows");

/// Parses a complete head, which includes the empty line.
pub fn parse(head: &[u8]) -> Result<Head, HeadFault> {
    let body = head.strip_suffix(b"\r\n\r\n").ok_or(bad("the request head is not complete"))?;
    let mut lines = split_lines(body);
    let (method, target, http10) = request_line(lines.next().unwrap_or_default())?;
    let mut headers = http::HeaderMap::with_capacity(16);
    for line in lines {
        if headers.len() == HEADERS_MAX {
            return Err(fault(431, "too many header fields"));
        }
        let (name, value) = field(line)?;
        headers.append(name, value);
    }
    if matches!(method, http::Method::CONNECT | http::Method::TRACE) {
        return Err(fault(501, "CONNECT and TRACE are not served"));
    }
    let host = host(&headers, http10)?;
    let named = if host.is_none() { authority(target) } else { None };
    let target = origin_form(target, &method, host)?;
    if let Some(named) = named.and_then(|named| http::HeaderValue::from_str(named).ok()) {
        headers.insert(http::header::HOST, named);
    }
    let framing = framing(&headers, http10)?;
    let upgrade = upgrade(&headers, &method, http10, framing)?;
    let expect_continue = expect(&headers, http10)?;
    let keep_alive = keep_alive(&headers, http10);
    Ok(Head { method, target, http10, framing, keep_alive, expect_continue, upgrade, headers })
}

/// Lines between CRLFs; [`Scanner`] has refused bare CR and LF already, so splitting at LF is exact.
fn split_lines(body: &[u8]) -> impl Iterator<Item = &[u8]> {
    body.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line))
}

fn request_line(line: &[u8]) -> Result<(http::Method, &str, bool), HeadFault> {
    const SHAPE: HeadFault = bad("the request line must be METHOD SP target SP HTTP/1.1");
    let mut parts = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(SHAPE);
    };
    if method.is_empty() || method.len() > METHOD_BYTES_MAX || !method.iter().all(|byte| is_token(*byte)) {
        return Err(SHAPE);
    }
    let method = http::Method::from_bytes(method).map_err(|_| SHAPE)?;
    let http10 = match version {
        b"HTTP/1.1" => false,
        b"HTTP/1.0" => true,
        [b'H', b'T', b'T', b'P', b'/', major, b'.', minor] if major.is_ascii_digit() && minor.is_ascii_digit() => {
            return Err(fault(505, "only HTTP/1.0, HTTP/1.1 and HTTP/2 are served"));
        }
        _ => return Err(SHAPE),
    };
    if target.len() > TARGET_BYTES_MAX {
        return Err(fault(414, "the request target is too long"));
    }
    Ok((method, checked_target(target)?, http10))
}

/// Target with characters of RFC 3986 only; percent signs must be followed by two hex digits.
fn checked_target(target: &[u8]) -> Result<&str, HeadFault> {
    const TARGET: HeadFault = bad("the request target has characters that a URI cannot have");
    let mut at = 0;
    while at < target.len() {
        match target[at] {
            b'%' if target.len() >= at + 3 && target[at + 1..at + 3].iter().all(u8::is_ascii_hexdigit) => at += 3,
            byte if is_uri(byte) => at += 1,
            _ => return Err(TARGET),
        }
    }
    str::from_utf8(target).map_err(|_| TARGET)
}

fn is_uri(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~:/?[]@!$&'()*+,;=".contains(&byte)
}

/// Returns true if a byte is a `tchar` of RFC 9110.
pub(crate) fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Target in origin form; an absolute form must agree with Host.
fn origin_form(target: &str, method: &http::Method, host: Option<&str>) -> Result<String, HeadFault> {
    if target.starts_with('/') {
        return Ok(target.to_owned());
    }
    if target == "*" && method == http::Method::OPTIONS {
        return Ok(target.to_owned());
    }
    let scheme_end = target.find("://").ok_or(bad("the request target must begin with a slash"))?;
    let (scheme, rest) = (&target[..scheme_end], &target[scheme_end + 3..]);
    if !scheme.eq_ignore_ascii_case("http") && !scheme.eq_ignore_ascii_case("https") {
        return Err(bad("the request target has an unknown scheme"));
    }
    let path_at = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(path_at);
    checked_host(authority.as_bytes())?;
    if host.is_some_and(|host| !host.eq_ignore_ascii_case(authority)) {
        return Err(bad("the request target and Host disagree"));
    }
    Ok(if path.starts_with('/') { path.to_owned() } else { format!("/{path}") })
}

/// Authority of a target in absolute form: the host of an HTTP/1.0 request without Host.
fn authority(target: &str) -> Option<&str> {
    let (_, rest) = target.split_once("://").filter(|_| !target.starts_with('/'))?;
    rest.split(['/', '?']).next()
}

/// Parses `field-name ":" OWS field-value OWS`, without folding.
fn field(line: &[u8]) -> Result<(http::HeaderName, http::HeaderValue), HeadFault> {
    if line.first().is_some_and(|byte| matches!(byte, b' ' | b'\t')) {
        return Err(bad("folded header lines are not accepted"));
    }
    let colon = line.iter().position(|byte| *byte == b':').ok_or(bad("a header line has no colon"))?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    if name.is_empty() || !name.iter().all(|byte| is_token(*byte)) {
        return Err(bad("a header name has characters that it cannot have"));
    }
    let value = value.trim_ascii();
    if value.iter().any(|byte| (*byte < 0x20 && *byte != b'\t') || *byte == 0x7f) {
        return Err(bad("a header value has control characters"));
    }
    let name = http::HeaderName::from_bytes(name).map_err(|_| bad("a header name is not valid"))?;
    let value = http::HeaderValue::from_bytes(value).map_err(|_| bad("a header value is not valid"))?;
    Ok((name, value))
}

/// Host of a request: exactly one in 1.1, at most one in 1.0, well-formed.
fn host(headers: &http::HeaderMap, http10: bool) -> Result<Option<&str>, HeadFault> {
    let mut all = headers.get_all(http::header::HOST).iter();
    match (all.next(), all.next()) {
        (Some(host), None) => checked_host(host.as_bytes()).map(Some),
        (None, _) if http10 => Ok(None),
        (None, _) => Err(bad("the Host header is missing")),
        (Some(_), Some(_)) => Err(bad("more than one Host header")),
    }
}

/// Validates `uri-host [":" port]`: not empty, without user information.
pub(crate) fn checked_host(host: &[u8]) -> Result<&str, HeadFault> {
    const HOST: HeadFault = bad("the Host header is not a host and an optional port");
    let (name, port) = match host {
        [b'[', ..] => {
            let end = host.iter().position(|byte| *byte == b']').ok_or(HOST)?;
            let inside = &host[1..end];
            if inside.is_empty() || !inside.iter().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(byte)) {
                return Err(HOST);
            }
            (&host[..=end], &host[end + 1..])
        }
        _ => {
            let end = host.iter().position(|byte| *byte == b':').unwrap_or(host.len());
            if !host[..end].iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(byte)) {
                return Err(HOST);
            }
            (&host[..end], &host[end..])
        }
    };
    let port_fine = match port {
        [] => true,
        [b':', digits @ ..] => (1..=5).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit),
        _ => false,
    };
    if name.is_empty() || name.len() > 255 || !port_fine {
        return Err(HOST);
    }
    str::from_utf8(host).map_err(|_| HOST)
}

fn framing(headers: &http::HeaderMap, http10: bool) -> Result<Framing, HeadFault> {
    let mut codings = headers.get_all(http::header::TRANSFER_ENCODING).iter();
    let mut lengths = headers.get_all(http::header::CONTENT_LENGTH).iter();
    match (codings.next(), lengths.next()) {
        (None, None) => Ok(Framing::None),
        (Some(_), Some(_)) => Err(bad("Content-Length and Transfer-Encoding together")),
        (Some(_), None) if http10 => Err(bad("Transfer-Encoding in HTTP/1.0")),
        (Some(_), None) if codings.next().is_some() => Err(bad("more than one Transfer-Encoding header")),
        (Some(coding), None) => chunked(coding.as_bytes()),
        (None, Some(_)) if lengths.next().is_some() => Err(bad("more than one Content-Length header")),
        (None, Some(length)) => content_length(length.as_bytes()),
    }
}

fn chunked(coding: &[u8]) -> Result<Framing, HeadFault> {
    if coding.eq_ignore_ascii_case(b"chunked") {
        return Ok(Framing::Chunked);
    }
    if coding.is_empty() || !coding.iter().all(|byte| is_token(*byte)) {
        return Err(bad("Transfer-Encoding must be exactly: chunked"));
    }
    Err(fault(501, "the only transfer coding served is chunked"))
}

fn content_length(value: &[u8]) -> Result<Framing, HeadFault> {
    const LENGTH: HeadFault = bad("Content-Length must be a decimal number");
    if value.is_empty() || value.len() > 19 || !value.iter().all(u8::is_ascii_digit) {
        return Err(LENGTH);
    }
    let length = str::from_utf8(value).ok().and_then(|digits| digits.parse().ok()).ok_or(LENGTH)?;
    Ok(if length == 0 { Framing::None } else { Framing::Length(length) })
}

/// Whether the request is a WebSocket handshake (RFC 6455, 4.1): GET, 1.1, no body, `Connection: upgrade`. `Upgrade:
/// h2c` alone is ignored, as RFC 9110 (7.8) allows and the defaults of some HTTP clients need; any other upgrade is
/// refused.
fn upgrade(
    headers: &http::HeaderMap,
    method: &http::Method,
    http10: bool,
    framing: Framing,
) -> Result<bool, HeadFault> {
    const UPGRADE: HeadFault = fault(501, "the only protocol upgrade served is that of a GET to a WebSocket");
    let mut all = headers.get_all(http::header::UPGRADE).iter();
    let protocol = match (all.next(), all.next()) {
        (None, _) => return Ok(false),
        (Some(protocol), None) => protocol.as_bytes(),
        (Some(_), Some(_)) => return Err(UPGRADE),
    };
    if protocol.eq_ignore_ascii_case(b"h2c") {
        return Ok(false);
    }
    let plain = method == http::Method::GET && !http10 && framing == Framing::None;
    let websocket = protocol.eq_ignore_ascii_case(b"websocket") && connection_has(headers, "upgrade");
    if plain && websocket { Ok(true) } else { Err(UPGRADE) }
}

fn expect(headers: &http::HeaderMap, http10: bool) -> Result<bool, HeadFault> {
    let mut all = headers.get_all(http::header::EXPECT).iter();
    match (all.next(), all.next()) {
        (None, _) => Ok(false),
        (Some(value), None) if value.as_bytes().eq_ignore_ascii_case(b"100-continue") => Ok(!http10),
        _ => Err(fault(417, "the only expectation served is 100-continue")),
    }
}

fn keep_alive(headers: &http::HeaderMap, http10: bool) -> bool {
    !connection_has(headers, "close") && (!http10 || connection_has(headers, "keep-alive"))
}

fn connection_has(headers: &http::HeaderMap, token: &str) -> bool {
    headers.get_all(http::header::CONNECTION).iter().any(|value| {
        value
            .as_bytes()
            .split(|byte| *byte == b',')
            .any(|item| item.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Result<Framing, u16>) {
        let bytes = text.as_bytes();
        let mut scanner = Scanner::default();
        let result = match scanner.scan(bytes, 32 * 1024) {
            Ok(Scan::Complete(length)) => parse(&bytes[..length]),
            Ok(Scan::Partial) => Err(fault(0, "partial")),
            Err(fault) => Err(fault),
        };
        let result = result.map(|head| head.framing).map_err(|fault| fault.status);
        assert_eq!(result, expected, "{text:?}");
    }

    #[test]
    fn accepts_what_clients_send() {
        check("GET /health HTTP/1.1\r\nHost: localhost:8080\r\nAccept: */*\r\n\r\n", Ok(Framing::None));
        check("GET /health HTTP/1.0\r\n\r\n", Ok(Framing::None));
        check("GET http://a.b/x?y=%20 HTTP/1.1\r\nhost: a.b\r\n\r\n", Ok(Framing::None));
        check("POST / HTTP/1.1\r\nHost: [::1]:80\r\ncontent-length:7\r\n\r\n", Ok(Framing::Length(7)));
        check("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n", Ok(Framing::Chunked));
        check(
            "GET / HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n",
            Ok(Framing::None),
        );
        check("GET / HTTP/1.1\r\nHost: a\r\nx: \u{e9}\t1\r\n\r\n", Ok(Framing::None));
        check("GET / HTTP/1.1\r\nHost: a\r\nempty:\r\n\r\n", Ok(Framing::None));
    }

    #[test]
    fn refuses_ambiguous_framing() {
        for lines in [
            "Content-Length: 1\r\nTransfer-Encoding: chunked",
            "Content-Length: 1\r\nContent-Length: 1",
            "Content-Length: 1\r\nContent-Length: 2",
            "Content-Length: 1, 1",
            "Content-Length: +1",
            "Content-Length: -1",
            "Content-Length: 1 1",
            "Content-Length: 0x1",
            "Content-Length: 99999999999999999999",
            "Content-Length:",
            "Transfer-Encoding: chunked, chunked",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: \"chunked\"",
            "Transfer-Encoding: chunked;q=1",
            "Transfer-Encoding:",
            "Transfer-Encoding : chunked",
            " Transfer-Encoding: chunked",
        ] {
            check(&format!("POST / HTTP/1.1\r\nHost: a\r\n{lines}\r\n\r\n"), Err(400));
        }
        check("POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", Err(400));
        check("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", Err(501));
        check("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", Err(501));
    }

    #[test]
    fn refuses_bad_hosts_and_targets() {
        for host in ["", "a b", "a/b", "a,b", "u@a", "a:b", "a:", "a:123456", "[::1", "[]", "a?b", "a\\b", "[::1]x"] {
            check(&format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n"), Err(400));
        }
        check("GET / HTTP/1.1\r\n\r\n", Err(400));
        check("GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", Err(400));
        for target in [
            "x",
            "//a b",
            "/a b",
            "/\u{1}",
            "/%zz",
            "/%2",
            "/\"",
            "/<",
            "/#f",
            "ftp://a/",
            "http://b/",
            "http://u@a/",
            "*",
            "",
        ] {
            check(&format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"), Err(400));
        }
        check(&format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(9000)), Err(414));
    }

    #[test]
    fn refuses_bad_grammar() {
        check("GET / HTTP/1.1\nHost: a\n\n", Err(400));
        check("GET / HTTP/1.1\r\nHost: a\rb: c\r\n\r\n", Err(400));
        check("GET / HTTP/1.1\r\nHost: a\r\nx: \0\r\n\r\n", Err(400));
        check("GET / HTTP/1.1\r\nHost: a\r\nx: \u{7f}\r\n\r\n", Err(400));
        check("GET / HTTP/1.1\r\nHost: a\r\nx\r\n\r\n", Err(400));
        check("GET / HTTP/1.1\r\nHost: a\r\nx: 1\r\n y\r\n\r\n", Err(400));
        check("GET / HTTP/1.1\r\nHost: a\r\n: 1\r\n\r\n", Err(400));
        check("GET / HTTP/1.1\r\nHost: a\r\nx(: 1\r\n\r\n", Err(400));
        check("GET  / HTTP/1.1\r\nHost: a\r\n\r\n", Err(400));
        check("GET / HTTP/1.1 \r\nHost: a\r\n\r\n", Err(400));
        check("GET /\r\n\r\n", Err(400));
        check("GET / HTTP/2.0\r\nHost: a\r\n\r\n", Err(505));
        check("GET / http/1.1\r\nHost: a\r\n\r\n", Err(400));
        check("TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", Err(501));
        check("CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", Err(501));
        check("GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n\r\n", Err(501));
        check("GET / HTTP/1.1\r\nHost: a\r\nExpect: 200-ok\r\n\r\n", Err(417));
        check(&format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "x: 1\r\n".repeat(101)), Err(431));
        check(&format!("GET / HTTP/1.1\r\nHost: a\r\nx: {}\r\n\r\n", "a".repeat(33_000)), Err(431));
    }

    #[test]
    fn scanning_byte_by_byte_says_the_same() {
        let text = b"POST /v1 HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi";
        let mut scanner = Scanner::default();
        let ends: Vec<_> = (1..=text.len()).map(|end| scanner.scan(&text[..end], 1000)).collect();
        let first = ends.iter().position(|scan| matches!(scan, Ok(Scan::Complete(_)))).expect("complete");
        assert_eq!((first + 1, ends[first]), (text.len() - 2, Ok(Scan::Complete(text.len() - 2))));
    }

    proptest::proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..400)) {
            let mut head = bytes;
            head.extend_from_slice(b"\r\n\r\n");
            let _ = parse(&head);
            let _ = Scanner::default().scan(&head, 300);
        }
    }
}
