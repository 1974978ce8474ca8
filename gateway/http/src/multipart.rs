//! `multipart/form-data` (RFC 7578) of a body that is there whole: parts as ranges of the body, without a copy.
//!
//! A form may be passed on, so a form that another reader divides or names in another way is refused: a delimiter
//! behind a line feed alone or in front of the first part (which readers in Go and Python take), a name given twice or
//! in the form of RFC 2231 (`name*=`, which Go prefers), folded or broken header lines.

use std::ops::Range;

use bytes::Bytes;
use memchr::memmem;

/// Largest header of one part, in bytes.
const HEAD_BYTES_MAX: usize = 8 * 1024;
/// Longest boundary (RFC 2046, section 5.1.1).
const BOUNDARY_BYTES_MAX: usize = 70;

/// One part of a multipart form: a field or a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name of the form field that the part belongs to.
    pub name: String,
    /// Name of the file, if the part has one.
    pub file_name: Option<String>,
    /// Byte range of the content in the body.
    pub at: Range<usize>,
}

/// Boundary that a `Content-Type` names; `None`: the type is no form.
pub fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let boundary = parameter(parameters, "boundary")?;
    let plain = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
    let valid = !boundary.is_empty() && boundary.len() <= BOUNDARY_BYTES_MAX && boundary.bytes().all(plain);
    valid.then_some(boundary)
}

/// Value of the parameter `name`; `None`: there is none, there are two, or they cannot be read.
fn parameter(parameters: &str, name: &str) -> Option<String> {
    let mut found = all_parameters(parameters)?.into_iter().filter(|(have, _)| is_named(have, name));
    let (_, value) = found.next()?;
    found.next().is_none().then_some(value)
}

/// Parameters of a header field, quoted or not; `None`: they can be read in more than one way. In quotes, both `\"` and
/// `%22` are a quote, as browsers write them.
fn all_parameters(parameters: &str) -> Option<Vec<(&str, String)>> {
    let (mut rest, mut out) = (parameters, Vec::new());
    loop {
        rest = rest.trim_start_matches([' ', '\t', ';']);
        if rest.is_empty() {
            return Some(out);
        }
        let (have, tail) = rest.split_once('=')?;
        let have = have.trim();
        if !is_token(have) {
            return None;
        }
        let (value, after) = match tail.strip_prefix('"') {
            Some(quoted) => quoted_value(quoted)?,
            None => {
                let end = tail.find(';').unwrap_or(tail.len());
                (tail[..end].trim().to_owned(), &tail[end..])
            }
        };
        out.push((have, value));
        rest = after;
    }
}

/// Returns true if `text` is a token (RFC 9110, section 5.6.2).
fn is_token(text: &str) -> bool {
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(token)
}

/// Returns true if a parameter's name is `plain`, as it is, encoded (`name*`) or in pieces (`name*0`), as RFC 2231 has it.
fn is_named(have: &str, plain: &str) -> bool {
    have.split('*').next().unwrap_or_default().eq_ignore_ascii_case(plain)
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

/// Parts of a form, at most `parts_max`.
///
/// # Errors
/// The first fault of the form, for people.
pub fn parts(body: &Bytes, boundary: &str, parts_max: usize) -> Result<Vec<Part>, &'static str> {
    let delimiter = format!("\r\n--{boundary}");
    let first = &delimiter.as_bytes()[2..];
    // The first delimiter may stand at the very beginning; text in front of it is ignored, as the RFC says.
    let mut at = match body.starts_with(first) {
        true => first.len(),
        false => delimited(body, &delimiter, 0)?.ok_or("the boundary does not occur")? + delimiter.len(),
    };
    let mut out = Vec::new();
    loop {
        if let Some(epilogue) = body[at..].strip_prefix(b"--") {
            let padding = epilogue.iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
            return match epilogue.get(padding) {
                _ if memmem::find(epilogue, first).is_some() => Err("a boundary follows the last one"),
                None | Some(b'\r' | b'\n') => Ok(out),
                Some(_) => Err("the last boundary is not followed by a line end"),
            };
        }
        // Padding behind a boundary is allowed.
        let padding = body[at..].iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
        at += padding;
        if !body[at..].starts_with(b"\r\n") {
            return Err("a boundary is not followed by a line end");
        }
        if out.len() == parts_max {
            return Err("the form has too many parts");
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
        let end = delimited(body, &delimiter, begin - 2)?.ok_or("the last part has no end")?;
        out.push(Part { name, file_name, at: begin.min(end)..end });
        at = end + delimiter.len();
    }
}

/// Offset of the next delimiter. A line that looks like a delimiter only to readers with other line ends is refused.
fn delimited(body: &[u8], delimiter: &str, from: usize) -> Result<Option<usize>, &'static str> {
    let dashes = &delimiter.as_bytes()[2..];
    let mut at = from;
    while let Some(found) = find(body, dashes, at) {
        match &body[from..found] {
            [.., b'\r', b'\n'] => return Ok(Some(found - 2)),
            [] | [.., b'\r' | b'\n'] => return Err("a boundary stands behind half a line end"),
            _ => at = found + 1,
        }
    }
    Ok(None)
}

fn disposition(head: &str) -> Result<(String, Option<String>), &'static str> {
    for line in head.split("\r\n").filter(|line| !line.is_empty()) {
        let Some((field, value)) = line.split_once(':') else { return Err("a header line of a part has no name") };
        if !is_token(field) {
            return Err("a header line of a part has no name");
        }
        if value.contains(|character: char| character.is_control() && character != '\t') {
            return Err("a header line of a part holds control characters");
        }
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
    let all = all_parameters(parameters).ok_or("the disposition of a part cannot be read")?;
    let (mut name, mut file_name) = (None, None);
    for (have, value) in all {
        let place = match have {
            _ if is_named(have, "filename") => &mut file_name,
            // RFC 7578 (4.2) forbids the encoded form; who reads it takes it for the name all the same.
            _ if is_named(have, "name") && have.contains('*') => return Err("the name of a part is encoded"),
            _ if is_named(have, "name") => &mut name,
            _ => continue,
        };
        if place.replace(value).is_some() && !have.eq_ignore_ascii_case("filename*") {
            return Err("a part has two names");
        }
    }
    Ok((name.ok_or("a part has no name")?, file_name))
}

fn find(body: &[u8], needle: &[u8], from: usize) -> Option<usize> {
    memmem::find(body.get(from..)?, needle).map(|at| from + at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Field, file name and content of a part.
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
        check(&many, Err("the form has too many parts"));
    }

    #[test]
    fn what_other_readers_divide_or_name_otherwise_is_refused() {
        let part = |head: &str| format!("--B\r\nContent-Disposition: form-data; {head}\r\n\r\nx\r\n--B--");
        check(&part("name=x; NAME=model"), Err("a part has two names"));
        check(&part("name=x; name*=utf-8''model"), Err("the name of a part is encoded"));
        check(&part("name*0=mo; name*1=del"), Err("the name of a part is encoded"));
        for unread in ["name=x; y; name=model", "name=x; name=\"model", "name=\"x\"y; name=model"] {
            check(&part(unread), Err("the disposition of a part cannot be read"));
        }
        check(&part("name=x; filename*=utf-8''y"), Ok(vec![("x", Some("utf-8''y"), "x")]));
        check(&part("name=x; filename=z; filename*=utf-8''y"), Ok(vec![("x", Some("utf-8''y"), "x")]));
        check(&part("name=x\r\n ; name=model"), Err("a header line of a part has no name"));
        check(&part("name=x\r\nContent-Disposition : form-data"), Err("a header line of a part has no name"));
        check(
            &part("name=x\r\nX: y\nContent-Disposition: form-data; name=model"),
            Err("a header line of a part holds control characters"),
        );
        let good = "Content-Disposition: form-data; name=x\r\n\r\n";
        for odd in ["\n", "\r"] {
            check(&format!("x{odd}--B\r\n{good}x\r\n--B--"), Err("a boundary stands behind half a line end"));
            check(&format!("--B\r\n{good}x{odd}--B\r\n--B--"), Err("a boundary stands behind half a line end"));
        }
        check(&format!("--B\r\n{good}x--B\r\n--B--"), Ok(vec![("x", None, "x--B")]));
        check(&format!("--B\r\n{good}x\r\n--B--\r\n--B\r\n{good}y\r\n--B--"), Err("a boundary follows the last one"));
        check(&format!("--B\r\n{good}x\r\n--B--y"), Err("the last boundary is not followed by a line end"));
        check(&format!("--B\r\n{good}x\r\n--B-- \r\nan epilogue"), Ok(vec![("x", None, "x")]));
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
