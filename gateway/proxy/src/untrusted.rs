//! Parsers of input from strangers and operators, each as one function over any bytes that checks the parser's
//! promises. The fuzz targets (`tests/fuzz`) and the property tests below run the same functions; a broken promise is a
//! panic.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::batch_text;
use penstock_auth::check::{check_address, check_credential, check_key_set, check_token};
use penstock_config::Overrides;
use penstock_http::chunked::{ChunkFault, Decoder};
use penstock_http::client::head::HeadReader;
use penstock_http::head::{self, Scan, Scanner};
use penstock_http::multipart;

/// Largest head that the checks below allow, in bytes; most parts of a form.
const HEAD_BYTES_MAX: usize = 16 * 1024;
const PARTS_MAX: usize = 32;

/// Header made of `name: value` lines; fields that no header may have are left out, as the readers of heads do.
fn header(lines: &[u8]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for line in lines.split(|byte| *byte == b'\n').take(64) {
        let Some(at) = line.iter().position(|byte| *byte == b':') else { continue };
        let name = HeaderName::from_bytes(&line[..at]);
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(line[at + 1..].trim_ascii())) {
            map.append(name, value);
        }
    }
    map
}

/// Checks the credential of a request, and the address that proxies report for its client.
///
/// # Panics
/// A credential is taken where there are two, or an empty or endless one; a proxy that nobody trusts is believed.
pub fn credentials(target: &str, lines: &[u8]) {
    let header = header(lines);
    check_credential(target, &header);
    check_address(&header);
}

/// Checks a token, and a set of keys.
///
/// # Panics
/// A token that nobody signed is believed, or a set has more keys than are looked at.
pub fn tokens(bytes: &[u8]) {
    check_token(bytes);
    check_key_set(bytes);
}

/// Checks the reader of config files.
///
/// # Panics
/// A config is refused without a fault, or a fault names a line that the file has not.
pub fn config(text: &str) {
    let Err(faults) = penstock_config::load(Some(("f.toml", text)), &Overrides::default(), &|_| None) else { return };
    assert!(!faults.0.is_empty(), "refused, and nobody knows why");
    for fault in &faults.0 {
        let line = fault.place.strip_prefix("f.toml:").and_then(|line| line.parse::<usize>().ok());
        assert!(line.is_none_or(|line| line >= 1 && line <= text.lines().count() + 1), "{fault}");
        assert!(!fault.message.is_empty());
    }
}

/// Checks the scanner of HTTP/1 request heads on bytes that come at once or one by one.
///
/// # Panics
/// The two ways disagree, or an accepted head names no origin form.
pub fn request_head(bytes: &[u8]) {
    let whole = Scanner::default().scan(bytes, HEAD_BYTES_MAX);
    let mut scanner = Scanner::default();
    let piecewise = (1..=bytes.len())
        .map(|end| scanner.scan(&bytes[..end], HEAD_BYTES_MAX))
        .find(|scan| !matches!(scan, Ok(Scan::Partial)));
    match (&whole, piecewise) {
        (Ok(Scan::Complete(end)), Some(Ok(Scan::Complete(other)))) => assert_eq!(*end, other),
        (Ok(Scan::Partial), None) | (Err(_), Some(Err(_))) => {}
        (whole, piecewise) => panic!("at once {whole:?}, byte by byte {piecewise:?}"),
    }
    let Ok(Scan::Complete(end)) = whole else { return };
    if let Ok(head) = head::parse(&bytes[..end]) {
        assert!(head.target.starts_with('/') || head.target == "*", "{}", head.target);
        let lengths = head.headers.get_all(http::header::CONTENT_LENGTH).iter().count();
        let chunked = head.headers.contains_key(http::header::TRANSFER_ENCODING);
        assert!(!chunked || lengths == 0, "a length beside chunks");
    }
}

/// Checks the decoder of chunked bodies, at once and byte by byte.
///
/// # Panics
/// The two ways disagree, or a payload is longer than its input.
pub fn chunked_body(bytes: &[u8]) {
    let (mut decoder, mut payload) = (Decoder::default(), Vec::new());
    let whole = decoder.feed(bytes, &mut payload).map(|read| (read, decoder.is_done()));
    let (mut slow, mut pieces, mut read) = (Decoder::default(), Vec::new(), 0);
    let piecewise = bytes.chunks(1).try_for_each(|piece| {
        read += if slow.is_done() { 0 } else { slow.feed(piece, &mut pieces)? };
        Ok::<_, ChunkFault>(())
    });
    assert!(payload.len() <= bytes.len());
    match (whole, piecewise) {
        (Ok((end, done)), Ok(())) => assert_eq!((end, done, &payload), (read, slow.is_done(), &pieces)),
        (Err(_), Err(_)) => {}
        (whole, piecewise) => panic!("at once {whole:?}, byte by byte {piecewise:?}"),
    }
}

/// Checks the reader of an upstream's answer head, at once and byte by byte.
///
/// # Panics
/// The two ways disagree.
pub fn answer_head(bytes: &[u8]) {
    let whole = HeadReader::default().read(&mut bytes.to_vec()).map(|head| head.map(|(head, _)| head.status));
    let (mut reader, mut held) = (HeadReader::default(), Vec::new());
    let mut piecewise = Ok(None);
    for byte in bytes {
        held.push(*byte);
        piecewise = reader.read(&mut held).map(|head| head.map(|(head, _)| head.status));
        if !matches!(piecewise, Ok(None)) {
            break;
        }
    }
    match (whole, piecewise) {
        (Ok(whole), Ok(piecewise)) => assert_eq!(whole, piecewise),
        (Err(_), Err(_)) => {}
        (whole, piecewise) => panic!("at once {whole:?}, byte by byte {piecewise:?}"),
    }
}

/// Checks the reader of forms: the first line of the input is the `Content-Type`, the rest the body.
///
/// # Panics
/// A part lies outside of the body, or two overlap.
pub fn form(bytes: &[u8]) {
    let at = memchr::memchr(b'\n', bytes).unwrap_or(bytes.len());
    let Some(boundary) = std::str::from_utf8(&bytes[..at]).ok().and_then(multipart::boundary) else { return };
    let body = Bytes::copy_from_slice(bytes.get(at + 1..).unwrap_or_default());
    let Ok(parts) = multipart::parts(&body, &boundary, PARTS_MAX) else { return };
    assert!(parts.len() <= PARTS_MAX);
    let mut end = 0;
    for part in parts {
        assert!(end <= part.at.start && part.at.start <= part.at.end && part.at.end <= body.len(), "{part:?}");
        end = part.at.end;
    }
}

/// Checks the reader of one line of a batch's input file.
///
/// # Panics
/// A line is accepted whose body is no JSON object, or refused without a message.
pub fn batch_line(bytes: &[u8]) {
    match batch_text::request(&Bytes::copy_from_slice(bytes), "/v1/chat/completions") {
        Ok(line) => {
            serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&line.body).expect("an object");
        }
        Err(fault) => assert!(!fault.message.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Lines that look like those of a config.
    fn lines() -> impl Strategy<Value = String> {
        let name = prop_oneof![
            Just("server"),
            Just("auth"),
            Just("keys"),
            Just("limits"),
            Just("models"),
            Just("pools"),
            Just("providers"),
            Just("plugins"),
            Just("plugins.settings"),
            Just("jwt"),
            Just("telemetry"),
            Just("nonsense"),
            Just("server.tls"),
        ];
        let key = prop_oneof![
            Just("id"),
            Just("listen"),
            Just("to"),
            Just("name"),
            Just("limits"),
            Just("models"),
            Just("expires"),
            Just("requests_per_minute"),
            Just("usd_per_day"),
            Just("base_url"),
            Just("issuer"),
            Just("audience"),
            Just("settings"),
            Just("addresses"),
            Just("weight"),
            Just("price"),
            Just("workers"),
            Just("digest"),
        ];
        let value = prop_oneof![
            Just("1".to_owned()),
            Just("-1".to_owned()),
            Just("1e999".to_owned()),
            Just("true".to_owned()),
            Just("[]".to_owned()),
            Just("{}".to_owned()),
            Just("2027-01-31T18:00:00Z".to_owned()),
            Just("9223372036854775807".to_owned()),
            Just("[{ provider = \"a\", weight = 0 }]".to_owned()),
            "\"[ -~]{0,12}\"",
            "\\PC{0,8}",
        ];
        prop_oneof![
            name.clone().prop_map(|name| format!("[{name}]")),
            name.prop_map(|name| format!("[[{name}]]")),
            (key, value).prop_map(|(key, value)| format!("{key} = {value}")),
            "\\PC{0,20}",
        ]
    }

    proptest! {
        #[test]
        fn any_config_is_read_or_refused_with_reasons(text in proptest::collection::vec(lines(), 0..24)) {
            config(&text.join("\n"));
        }

        #[test]
        fn any_header_has_one_credential_or_none(
            target in "(/v1/models|/v1beta/models/m:generateContent)(\\?(key|k|%6bey)=[a-z%&=+]{0,12}){0,2}",
            lines in proptest::collection::vec(
                "(authorization|x-api-key|x-goog-api-key|x-forwarded-for|Authorization): ?(Bearer |bearer|Basic |)[ -~,.:0-9\\[\\]]{0,24}",
                0..4,
            ),
        ) {
            credentials(&target, lines.join("\n").as_bytes());
        }

        #[test]
        fn any_bytes_are_no_token(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            text in "[A-Za-z0-9_-]{0,40}\\.[A-Za-z0-9_-]{0,80}\\.[A-Za-z0-9_-]{0,90}",
            set in "\\{\"keys\":\\[(\\{\"kty\":\"(RSA|EC|oct|OKP)\",\"(n|e|x|y|k|crv|alg|use)\":\"[A-Za-z0-9_-]{0,20}\"\\},?){0,3}\\]\\}",
        ) {
            for input in [bytes.as_slice(), text.as_bytes(), set.as_bytes()] {
                tokens(input);
            }
        }
    }
}
