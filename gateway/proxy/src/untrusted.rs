//! Parsers of what strangers and operators write, each as one function over any bytes that holds the parser to its promises. The fuzz
//! targets (`fuzz/`) and the property tests below run the same functions; a promise that is broken is a panic.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::auth::{check_address, check_credential, check_key_set, check_token};
use crate::config::{self, Overrides};

/// A header as it comes, `name: value` lines; what no header may have is left out, as the readers of heads do.
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

/// The credential of a request, and the address that proxies say it came from.
///
/// # Panics
/// One is taken where there are two, or an empty or endless one; a proxy that nobody trusts is believed.
pub fn credentials(target: &str, lines: &[u8]) {
    let header = header(lines);
    check_credential(target, &header);
    check_address(&header);
}

/// A token, and a set of keys.
///
/// # Panics
/// A token that nobody signed is believed, or a set has more keys than are looked at.
pub fn tokens(bytes: &[u8]) {
    check_token(bytes);
    check_key_set(bytes);
}

/// A config file.
///
/// # Panics
/// It is refused without a fault, or a fault names a line that the file has not.
pub fn config(text: &str) {
    let Err(faults) = config::load(Some(("f.toml", text)), &Overrides::default(), &|_| None) else { return };
    assert!(!faults.0.is_empty(), "refused, and nobody knows why");
    for fault in &faults.0 {
        let line = fault.place.strip_prefix("f.toml:").and_then(|line| line.parse::<usize>().ok());
        assert!(line.is_none_or(|line| line >= 1 && line <= text.lines().count() + 1), "{fault}");
        assert!(!fault.message.is_empty());
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
