//! What the gateway must know of a body that it passes on untouched: one borrowed pass over the top level, nothing built.

use std::ops::Range;

use crate::Bounds;
use crate::error::ApiError;
use crate::fields;
use crate::json::{Fault, Kind, Names, Reader, Within};

/// The top level of a request body, as far as routing needs it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peek {
    /// `model`.
    pub model: Option<String>,
    /// Where its value stands in the body, quotes included: to be replaced when an upstream knows the model by another name.
    pub model_at: Option<Range<usize>>,
    /// `stream`.
    pub stream: bool,
    /// Output tokens asked for at most, under whichever of its names.
    pub max_tokens: Option<u32>,
    /// `stream_options`: where its value stands, and whether it asks for usage.
    pub stream_options: Option<(Range<usize>, bool)>,
    /// Just behind the opening brace: where a field can be put in.
    pub start: usize,
    /// Whether the object is empty.
    pub is_empty: bool,
}

/// Reads the top level. Every value is checked to be JSON; a name that stands twice is refused, because two readers could differ
/// about which one counts.
pub fn peek(body: &[u8], bounds: &Bounds) -> Result<Peek, ApiError> {
    read(body, bounds).map_err(Fault::into_error)
}

fn read(body: &[u8], bounds: &Bounds) -> Result<Peek, Fault> {
    let mut reader = Reader::new(body)?;
    let kind = reader.kind()?;
    if kind != Kind::Object {
        return Err(Fault::invalid(format!("The body must be a JSON object, got {}.", kind.name())));
    }
    let mut names = Names::new(bounds.fields_max);
    let mut out = Peek { start: reader.position() + 1, is_empty: true, ..Peek::default() };
    reader.object(|reader, key| {
        names.add(&key)?;
        out.is_empty = false;
        if reader.null()? {
            return Ok(());
        }
        field(&mut out, reader, &key, bounds).within(&key)
    })?;
    reader.end()?;
    Ok(out)
}

fn field(out: &mut Peek, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
    match key {
        "model" => {
            reader.kind()?;
            let from = reader.position();
            out.model = Some(fields::name(reader, bounds.model_chars_max)?);
            out.model_at = Some(from..reader.position());
        }
        "stream" => out.stream = reader.boolean()?,
        "max_completion_tokens" | "max_tokens" | "max_output_tokens" if reader.kind()? == Kind::Number => {
            let given = reader.number()?.parse::<f64>().map_or(u32::MAX, |value| value as u32);
            out.max_tokens = Some(out.max_tokens.map_or(given, |other| other.max(given)));
        }
        "stream_options" if reader.kind()? == Kind::Object => {
            let from = reader.position();
            let mut usage = false;
            reader.object(|reader, key| {
                if key == "include_usage" && reader.kind()? == Kind::Bool {
                    usage = reader.boolean()?;
                    return Ok(());
                }
                reader.skip()
            })?;
            out.stream_options = Some((from..reader.position(), usage));
        }
        _ => reader.skip()?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_sees_what_routing_needs_and_where() {
        let body = br#" { "messages":[{"model":"no"}], "model" : "a\u0062" ,"stream":true,"max_tokens":7,"stream_options":{"include_usage":true}}"#;
        let seen = peek(body, &Bounds::default()).expect("an object");
        assert_eq!((seen.model.as_deref(), seen.stream, seen.max_tokens), (Some("ab"), true, Some(7)));
        assert_eq!(&body[seen.model_at.expect("there")], br#""a\u0062""#);
        let (at, usage) = seen.stream_options.expect("there");
        assert_eq!((&body[at], usage), (&br#"{"include_usage":true}"#[..], true));
        assert_eq!(seen.start, 2);
    }

    #[test]
    fn what_could_be_read_two_ways_is_refused() {
        for body in [
            &br#"{"model":"a","model":"b"}"#[..],
            b"[]",
            b"{} x",
            b"{\"a\":}",
            b"\xff",
            br#"{"stream":1}"#,
            br#"{"model":7}"#,
        ] {
            assert!(peek(body, &Bounds::default()).is_err(), "{}", String::from_utf8_lossy(body));
        }
        assert_eq!(peek(b"{}", &Bounds::default()).map(|seen| seen.is_empty), Ok(true));
        assert_eq!(peek(br#"{"model":null}"#, &Bounds::default()).map(|seen| seen.model), Ok(None));
    }
}
