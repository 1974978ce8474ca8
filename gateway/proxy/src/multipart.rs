//! `multipart/form-data` (RFC 7578) of a body that is there whole: parts as ranges of it, nothing copied.

use std::ops::Range;

use bytes::Bytes;
use memchr::memmem;

/// Header of one part.
const HEAD_BYTES_MAX: usize = 8 * 1024;
/// RFC 2046, section 5.1.1.
const BOUNDARY_BYTES_MAX: usize = 70;

/// One part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Its field.
    pub(crate) name: String,
    /// Its file's name.
    pub(crate) file_name: Option<String>,
    /// Where its content stands in the body.
    pub(crate) at: Range<usize>,
}

/// The boundary that a `Content-Type` names; `None`: it is no form.
pub(crate) fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let boundary = parameter(parameters, "boundary")?;
    let plain = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
    let valid = !boundary.is_empty() && boundary.len() <= BOUNDARY_BYTES_MAX && boundary.bytes().all(plain);
    valid.then_some(boundary)
}

/// A parameter of a header field, in quotes or not. Within quotes `\"` is a quote and `%22` too, as browsers write it.
fn parameter(parameters: &str, name: &str) -> Option<String> {
    let mut rest = parameters;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ';']);
        let (have, tail) = rest.split_once('=')?;
        let (value, after) = match tail.strip_prefix('"') {
            Some(quoted) => quoted_value(quoted)?,
            None => {
                let end = tail.find(';').unwrap_or(tail.len());
                (tail[..end].trim().to_owned(), &tail[end..])
            }
        };
        if have.trim().eq_ignore_ascii_case(name) {
            return Some(value);
        }
        rest = after;
    }
}

fn quoted_value(text: &str) -> Option<(String, &str)> {
    let (mut value, mut escaped) = (String::new(), false);
    for (at, character) in text.char_indices() {
        match character {
            // Only a quote is escaped: some clients send Windows paths as they are.
            '\\' if !escaped && text[at + 1..].starts_with(['"', '\\']) => escaped = true,
            '"' if !escaped => return Some((value.replace("%22", "\""), &text[at + 1..])),
            _ => {
                escaped = false;
                value.push(character);
            }
        }
    }
    None
}

/// The parts of a form, at most `parts_max`.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn parts(body: &Bytes, boundary: &str, parts_max: usize) -> Result<Vec<Part>, &'static str> {
    let delimiter = format!("\r\n--{boundary}");
    let first = &delimiter.as_bytes()[2..];
    // The first delimiter may stand at the very beginning; text in front of it is ignored, as the RFC says.
    let mut at = match body.starts_with(first) {
        true => first.len(),
        false => find(body, delimiter.as_bytes(), 0).ok_or("the boundary does not occur")? + delimiter.len(),
    };
    let mut out = Vec::new();
    loop {
        if body[at..].starts_with(b"--") {
            return Ok(out);
        }
        // Padding behind a boundary is allowed.
        let padding = body[at..].iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
        at += padding;
        if !body[at..].starts_with(b"\r\n") {
            return Err("a boundary is not followed by a line end");
        }
        if out.len() == parts_max {
            return Err("it has too many parts");
        }
        // The empty line may follow at once: a part without a header.
        let head_end = find(body, b"\r\n\r\n", at).ok_or("a part has no end of its header")?;
        if head_end - at > HEAD_BYTES_MAX {
            return Err("the header of a part is too long");
        }
        let head = std::str::from_utf8(&body[at..head_end]).map_err(|_| "the header of a part is not UTF-8")?;
        let (name, file_name) = disposition(head)?;
        let begin = head_end + 4;
        // An empty content ends where it begins: its line end belongs to the header's.
        let end = find(body, delimiter.as_bytes(), begin - 2).ok_or("the last part has no end")?;
        out.push(Part { name, file_name, at: begin.min(end)..end });
        at = end + delimiter.len();
    }
}

fn disposition(head: &str) -> Result<(String, Option<String>), &'static str> {
    for line in head.split("\r\n") {
        let Some((field, value)) = line.split_once(':') else { continue };
        if field.eq_ignore_ascii_case("content-transfer-encoding") && !value.trim().eq_ignore_ascii_case("binary") {
            let plain = ["7bit", "8bit"].iter().any(|coding| value.trim().eq_ignore_ascii_case(coding));
            if !plain {
                return Err("a part has a transfer encoding");
            }
        }
    }
    let lines = head.split("\r\n").filter_map(|line| line.split_once(':'));
    let mut found = lines.filter(|(field, _)| field.eq_ignore_ascii_case("content-disposition"));
    let (Some((_, value)), None) = (found.next(), found.next()) else { return Err("a part has no one disposition") };
    let (kind, parameters) = value.split_once(';').unwrap_or((value, ""));
    if !kind.trim().eq_ignore_ascii_case("form-data") {
        return Err("a part is no form-data");
    }
    let name = parameter(parameters, "name").ok_or("a part has no name")?;
    Ok((name, parameter(parameters, "filename")))
}

fn find(body: &[u8], needle: &[u8], from: usize) -> Option<usize> {
    memmem::find(body.get(from..)?, needle).map(|at| from + at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Field, file name, content.
    type Read<'a> = (&'a str, Option<&'a str>, &'a str);

    const PARTS_MAX: usize = 16;

    #[track_caller]
    fn check(body: &str, expected: Result<Vec<Read<'_>>, &str>) {
        let found = parts(&Bytes::copy_from_slice(body.as_bytes()), "B", PARTS_MAX);
        let found = found.as_ref().map_err(|error| *error).map(|parts| {
            let text = |part: &'_ Part| body[part.at.clone()].to_owned();
            parts.iter().map(|part| (part.name.clone(), part.file_name.clone(), text(part))).collect::<Vec<_>>()
        });
        let owned = |(name, file, text): Read<'_>| (name.to_owned(), file.map(str::to_owned), text.to_owned());
        assert_eq!(found, expected.map(|parts| parts.into_iter().map(owned).collect()), "{body:?}");
    }

    #[test]
    fn forms_are_read() {
        check(
            "--B\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--B\r\n\
             content-disposition: form-data; name=file; filename=\"a \\\"b\\\".jsonl\"\r\nContent-Type: text/plain\r\n\r\n{}\r\n\r\n--B--\r\n",
            Ok(vec![("purpose", None, "batch"), ("file", Some("a \"b\".jsonl"), "{}\r\n")]),
        );
        check(
            "preamble\r\n--B \r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n\r\n--B--",
            Ok(vec![("a", None, "")]),
        );
        check("--B--", Ok(vec![]));
    }

    #[test]
    fn what_is_no_form_is_refused() {
        check("", Err("the boundary does not occur"));
        check("--Bx", Err("a boundary is not followed by a line end"));
        check("--B\r\nx", Err("a part has no end of its header"));
        check("--B\r\nX: y\r\n\r\n\r\n--B--", Err("a part has no one disposition"));
        check("--B\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nx", Err("the last part has no end"));
        let many = "--B\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nx\r\n".repeat(17) + "--B--";
        check(&many, Err("it has too many parts"));
    }

    #[test]
    fn boundaries_are_read() {
        assert_eq!(boundary("multipart/form-data; boundary=abc").as_deref(), Some("abc"));
        assert_eq!(boundary("Multipart/Form-Data; charset=utf-8; boundary=\"a b\"").as_deref(), Some("a b"));
        for wrong in
            ["multipart/mixed; boundary=a", "multipart/form-data", "multipart/form-data; boundary=", "application/json"]
        {
            assert_eq!(boundary(wrong), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(body in prop::collection::vec(prop::sample::select(b"-B\r\n:x".to_vec()), 0..200)) {
            let _ = parts(&Bytes::from(body), "B", PARTS_MAX);
        }

        #[test]
        fn any_content_comes_back(content in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut body = b"--5f2b1c\r\nContent-Disposition: form-data; name=\"f\"\r\n\r\n".to_vec();
            body.extend_from_slice(&content);
            body.extend_from_slice(b"\r\n--5f2b1c--\r\n");
            let body = Bytes::from(body);
            let read = parts(&body, "5f2b1c", PARTS_MAX).expect("a form");
            prop_assert_eq!(&body[read[0].at.clone()], content.as_slice());
        }
    }
}
