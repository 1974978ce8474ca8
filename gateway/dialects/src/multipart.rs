//! One field of a `multipart/form-data` body (RFC 7578), found without reading the files beside it.

use std::ops::Range;

use memchr::memmem;

/// Parts that are looked at.
const PARTS_MAX: usize = 64;
/// Largest head of a part.
const HEAD_BYTES_MAX: usize = 4096;
/// Longest boundary (RFC 2046, section 5.1.1).
const BOUNDARY_BYTES_MAX: usize = 70;

/// The boundary that a `Content-Type` names; `None`: it is no form.
pub fn boundary(content_type: &str) -> Option<&str> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let named = parameters.split(';').filter_map(|parameter| parameter.split_once('='));
    let (_, value) = named.into_iter().find(|(name, _)| name.trim().eq_ignore_ascii_case("boundary"))?;
    let value = value.trim().trim_matches('"');
    (1..=BOUNDARY_BYTES_MAX).contains(&value.len()).then_some(value)
}

/// Where the value of the field `name` stands; `None`: it is not there, is there twice, or the body is no such form.
pub fn field(body: &[u8], boundary: &str, name: &str) -> Option<Range<usize>> {
    let marker = format!("--{boundary}");
    let finder = memmem::Finder::new(marker.as_bytes());
    let mut found = None;
    let mut at = finder.find(body)? + marker.len();
    for _ in 0..PARTS_MAX {
        if body[at..].starts_with(b"--") {
            return found;
        }
        let head_at = at + body[at..].starts_with(b"\r\n").then_some(2)?;
        let window = &body[head_at..body.len().min(head_at + HEAD_BYTES_MAX)];
        let head = &window[..memmem::find(window, b"\r\n\r\n")?];
        let value_at = head_at + head.len() + 4;
        let next = value_at + finder.find(&body[value_at..])?;
        // The line end in front of a boundary belongs to it.
        let end = body[value_at..next].strip_suffix(b"\r\n").map(|value| value_at + value.len())?;
        if names(head, name) && found.replace(value_at..end).is_some() {
            return None;
        }
        at = next + marker.len();
    }
    None
}

/// Whether the head of a part gives it that name, and no file name.
fn names(head: &[u8], name: &str) -> bool {
    let Ok(head) = std::str::from_utf8(head) else { return false };
    let disposition = head.split("\r\n").filter_map(|line| line.split_once(':'));
    let mut values = disposition.filter(|(field, _)| field.trim().eq_ignore_ascii_case("content-disposition"));
    let Some((_, value)) = values.next() else { return false };
    let parameters: Vec<_> = value.split(';').filter_map(|parameter| parameter.split_once('=')).collect();
    let key_is = |key: &str, wanted: &str| key.trim().eq_ignore_ascii_case(wanted);
    let is = |(key, value): &(&str, &str)| key_is(key, "name") && value.trim().trim_matches('"') == name;
    let file = |(key, _): &(&str, &str)| key_is(key, "filename") || key_is(key, "filename*");
    parameters.iter().any(is) && !parameters.iter().any(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORM: &str = "--xx\r\nContent-Disposition: form-data; name=\"file\"; filename=\"model\"\r\nContent-Type: audio/wav\r\n\r\n\
        RIFF--x\r\n--x\r\n--xx\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n--xx--\r\n";

    #[test]
    fn the_field_is_found_beside_files() {
        let at = field(FORM.as_bytes(), "xx", "model").expect("there");
        assert_eq!(&FORM[at], "whisper-1");
        assert_eq!((field(FORM.as_bytes(), "xx", "file"), field(FORM.as_bytes(), "yy", "model")), (None, None));
    }

    #[test]
    fn what_could_be_read_two_ways_is_not_found() {
        let part = "--xx\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\na\r\n";
        assert!(field(format!("{part}--xx--").as_bytes(), "xx", "model").is_some());
        assert_eq!(field(format!("{part}{part}--xx--").as_bytes(), "xx", "model"), None);
        let shouted = part.replace("name=", "NAME=").replace("form-data", "Form-Data");
        assert_eq!(field(format!("{part}{shouted}--xx--").as_bytes(), "xx", "model"), None);
        for end in 0..FORM.len() - 4 {
            assert_eq!(field(&FORM.as_bytes()[..end], "xx", "model"), None, "cut at {end}");
        }
    }

    #[test]
    fn boundaries_are_read() {
        assert_eq!(boundary("multipart/form-data; boundary=xx"), Some("xx"));
        assert_eq!(boundary("Multipart/Form-Data; charset=utf-8; Boundary=\"x y\""), Some("x y"));
        for none in
            ["application/json", "multipart/form-data", "multipart/mixed; boundary=x", "multipart/form-data; boundary="]
        {
            assert_eq!(boundary(none), None, "{none}");
        }
    }

    proptest::proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(proptest::sample::select(&b"--xx\r\n:;=\"nameodl Ctfr"[..]), 0..200)) {
            let _ = field(&bytes, "xx", "model");
        }
    }
}
