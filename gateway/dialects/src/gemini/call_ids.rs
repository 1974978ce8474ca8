//! Ids of calls in a body of `generateContent` that is passed on: Vertex AI refuses them, Google's own API makes them.

use std::ops::Range;

use memchr::memmem;

use penstock_types::json::{Fault, Kind, Reader};

/// Body without the ids of calls and of their results; `None` where it has none, or is not JSON. `pieces`: the body, in pieces between
/// two values each. Cost: a search in each piece; a body in which a field is named `id` is copied and read.
pub fn without_call_ids<B: AsRef<[u8]>>(pieces: &[B]) -> Option<Vec<u8>> {
    if !pieces.iter().any(|piece| memmem::find(piece.as_ref(), b"\"id\"").is_some()) {
        return None;
    }
    let mut body = Vec::with_capacity(pieces.iter().map(|piece| piece.as_ref().len()).sum());
    pieces.iter().for_each(|piece| body.extend_from_slice(piece.as_ref()));
    let mut cuts = Vec::new();
    walk(&mut Reader::new(&body).ok()?, &WAY, &body, &mut cuts).ok()?;
    if cuts.is_empty() {
        return None;
    }
    let (mut out, mut at) = (Vec::with_capacity(body.len()), 0);
    for cut in cuts {
        out.extend_from_slice(&body[at..cut.start]);
        at = cut.end;
    }
    out.extend_from_slice(&body[at..]);
    Some(out)
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
        let out = without_call_ids(&[body.as_bytes()]).map(|out| String::from_utf8(out).expect("text"));
        assert_eq!(out.as_deref(), expected, "{body}");
        for cut in 0..body.len() {
            // Pieces end between two values, where a comma or a bracket stands.
            if body.as_bytes()[cut] == b',' {
                let pieces = [&body.as_bytes()[..cut], &body.as_bytes()[cut..]];
                assert_eq!(without_call_ids(&pieces), expected.map(|text| text.as_bytes().to_vec()), "{body}");
            }
        }
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
