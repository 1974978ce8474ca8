//! Ids of calls in a body of `generateContent` that is passed on: Vertex AI refuses them, Google's own API makes them.

use std::ops::Range;

use bytes::Bytes;
use memchr::memmem;

use penstock_types::json::{Fault, Kind, Reader};

/// Body without the ids of calls and of their results, as parts of the same memory; as it is where it has none, or is not JSON. `pieces`: the
/// body, in pieces between two values each. Cost: a search in each piece; a body in which a field is named `id` is read, and copied for that where
/// it has several pieces.
pub fn without_call_ids(pieces: Vec<Bytes>) -> Vec<Bytes> {
    if !pieces.iter().any(|piece| memmem::find(piece, b"\"id\"").is_some()) {
        return pieces;
    }
    let body = match pieces.as_slice() {
        [one] => one.clone(),
        several => several.concat().into(),
    };
    let mut cuts = Vec::new();
    let is_read = Reader::new(&body).and_then(|mut reader| walk(&mut reader, &WAY, &body, &mut cuts)).is_ok();
    if is_read { kept(&pieces, &cuts) } else { pieces }
}

/// The pieces without these ranges of all of them together, which are in order.
fn kept(pieces: &[Bytes], cuts: &[Range<usize>]) -> Vec<Bytes> {
    let (mut out, mut begin, mut cuts) = (Vec::with_capacity(pieces.len() + cuts.len()), 0, cuts.iter().peekable());
    for piece in pieces {
        let (end, mut at) = (begin + piece.len(), begin);
        while let Some(cut) = cuts.peek().filter(|cut| cut.start < end) {
            if at < cut.start {
                out.push(piece.slice(at - begin..cut.start - begin));
            }
            at = cut.end.min(end);
            if cut.end > end {
                break;
            }
            cuts.next();
        }
        if at < end {
            out.push(piece.slice(at - begin..));
        }
        begin = end;
    }
    out
}

/// Fields on the way from a body to its calls and results, in both spellings.
const WAY: [&[&str]; 3] =
    [&["contents"], &["parts"], &["functionCall", "function_call", "functionResponse", "function_response"]];

/// Goes `way` on, through lists and single objects, and adds the ranges of the ids at its end to `cuts`.
fn walk(reader: &mut Reader<'_>, way: &[&[&str]], body: &[u8], cuts: &mut Vec<Range<usize>>) -> Result<(), Fault> {
    match (reader.kind()?, way) {
        (Kind::Array, _) => reader.array(|reader, _| walk(reader, way, body, cuts)),
        (Kind::Object, [names, behind @ ..]) => reader.object(|reader, key| match names.contains(&key.as_ref()) {
            true => walk(reader, behind, body, cuts),
            false => reader.skip(),
        }),
        (Kind::Object, []) => ids(reader, body, cuts),
        _ => reader.skip(),
    }
}

/// Adds the ranges of the fields `id` of an object, each with the comma between it and another field.
fn ids(reader: &mut Reader<'_>, body: &[u8], cuts: &mut Vec<Range<usize>>) -> Result<(), Fault> {
    let open = reader.position() + 1;
    // Ends of the last field, and of the ids in front of the first field that stays.
    let (mut last, mut first_ids) = (None, None);
    reader.object(|reader, key| {
        reader.skip()?;
        let end = reader.position();
        match (key == "id", last) {
            (true, None) => first_ids = Some(end),
            (true, Some(before)) => cuts.push(before..end),
            (false, _) => {
                if let Some(ids_end) = first_ids.take() {
                    let comma = body[ids_end..].iter().position(|byte| *byte == b',');
                    cuts.push(open..ids_end + comma.map_or(0, |comma| comma + 1));
                }
            }
        }
        if first_ids.is_none() {
            last = Some(end);
        }
        Ok(())
    })?;
    cuts.extend(first_ids.map(|end| open..end));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(body: &str, expected: Option<&str>) {
        let out = |pieces: Vec<Bytes>| String::from_utf8(without_call_ids(pieces).concat()).expect("text");
        let (whole, expected) = (Bytes::from(body.to_owned()), expected.unwrap_or(body));
        assert_eq!(out(vec![whole.clone()]), expected);
        for cut in 0..body.len() {
            // Pieces end between two values, where a comma or a bracket stands.
            if body.as_bytes()[cut] == b',' {
                assert_eq!(out(vec![whole.slice(..cut), whole.slice(cut..)]), expected, "{body}");
            }
        }
    }

    #[test]
    fn the_rest_is_the_same_memory() {
        let body = Bytes::from(r#"{"contents":[{"parts":[{"functionCall":{"id":"a","name":"f"}}]}]}"#);
        let range = body.as_ptr_range();
        let pieces = without_call_ids(vec![body.slice(..12), body.slice(12..)]);
        assert_eq!(pieces.len(), 3);
        assert!(pieces.iter().all(|piece| range.contains(&piece.as_ptr())));
    }

    #[test]
    fn ids_of_calls_and_results_are_left_out() {
        let body = |parts: &str| format!(r#"{{"id":"kept","contents":[{{"role":"model","id":1,"parts":[{parts}]}}]}}"#);
        for (part, expected) in [
            (
                r#"{"functionCall":{"id":"a","name":"f","args":{"id":"kept"}}}"#,
                r#"{"functionCall":{"name":"f","args":{"id":"kept"}}}"#,
            ),
            (
                r#"{"function_call":{"name":"f", "id" : "a" ,"args":{}}}"#,
                r#"{"function_call":{"name":"f" ,"args":{}}}"#,
            ),
            (
                r#"{"functionResponse":{"name":"f","response":{},"id":"a"}}"#,
                r#"{"functionResponse":{"name":"f","response":{}}}"#,
            ),
            (
                r#"{"function_response":{ "id":"a,}" , "id":"b" , "name":"f","id":"c","id":"d"}}"#,
                r#"{"function_response":{ "name":"f"}}"#,
            ),
            (
                r#"{"functionCall":{"id":"a"}},{"functionCall":{ "id":"b"} }"#,
                r#"{"functionCall":{}},{"functionCall":{} }"#,
            ),
        ] {
            check(&body(part), Some(&body(expected)));
        }
        // Single objects in the place of lists.
        check(
            r#"{"contents":{"parts":{"functionCall":{"id":"a","name":"f"}}}}"#,
            Some(r#"{"contents":{"parts":{"functionCall":{"name":"f"}}}}"#),
        );
        check(&body(r#"{"text":"\"id\""},{"functionCall":{"name":"f","args":{"id":1}}}"#), None);
        check(r#"{"contents":[{"parts":[{"functionCall":{"id":"a"}}"#, None);
        check(r#"{"contents":[]}"#, None);
    }
}
