//! Percent-encoding of texts that go into a path, a query or a form.

use std::fmt::Write as _;

/// Text with every byte percent-encoded but the unreserved characters of RFC 3986 (`A-Z a-z 0-9 - . _ ~`) and those in `kept`.
#[must_use]
pub fn percent_encoded(text: &str, kept: &[u8]) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || kept.contains(&byte) {
            out.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unreserved_and_kept_characters_stay() {
        assert_eq!(percent_encoded("aZ09-._~", b""), "aZ09-._~");
        assert_eq!(percent_encoded("a b/ü%+&=?#", b""), "a%20b%2F%C3%BC%25%2B%26%3D%3F%23");
        assert_eq!(percent_encoded("a/b:c", b"/"), "a/b%3Ac");
        let all: String = (0..=127u8).map(char::from).collect();
        let plain = percent_encoded(&all, b"").bytes().filter(|byte| !byte.is_ascii_alphanumeric()).collect::<Vec<_>>();
        assert!(plain.iter().all(|byte| b"-._~%".contains(byte)));
    }
}
