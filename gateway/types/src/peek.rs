//! Fields that the gateway needs from a body which it forwards unchanged: one borrowed pass over the top level, no
//! tree.

mod amounts;
mod names;
mod splice;

use std::ops::Range;

use amounts::Amounts;
pub use amounts::BoundLimits;
pub use names::{folds, other_models};
pub use splice::{Splice, renamed, spliced};

use crate::Bounds;
use crate::codec::Surface;
use crate::error::ApiError;
use crate::event::ServiceTier;
use crate::fields;
use crate::json::{Fault, Kind, Names, Reader, Within};

/// Longest `user` that is kept, in bytes; a longer one is forwarded all the same.
const USER_BYTES_MAX: usize = 1024;

/// Fields that make up a prompt, in prompt order.
const PROMPT: [&[&str]; 3] = [
    &["tools"],
    &["system", "instructions", "systemInstruction", "system_instruction"],
    &["messages", "prompt", "input", "contents"],
];

/// Top level of a request body, as far as routing and limits need it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peek {
    /// Value of the body's `model`; `None` if absent.
    pub model: Option<String>,
    /// Byte range of the value of `model`, quotes included: replaced when an upstream knows the model by another name.
    pub model_at: Option<Range<usize>>,
    /// Value of the body's `stream`; if absent, what the API means then.
    pub stream: bool,
    /// True if the body asks for the answer to be stored (`store`); false if absent.
    pub stores: bool,
    /// Bound of the output tokens, under any name that the API has for it. Null and negative numbers are no bound.
    pub max_tokens: Option<u32>,
    /// Number of answers asked for at once (`n`, `best_of`, Gemini's `candidateCount`); 0 where the body does not say.
    pub choices: u32,
    /// Number of prompts in a completion request.
    pub prompts: u32,
    /// Field by which the body asks for an answer that is made later and has to be fetched: `background` of a response,
    /// xAI's `deferred` of a chat; null and false ask for none.
    pub later: Option<&'static str>,
    /// Field that names fallback models for the upstream, where the body has one; a null value names none.
    pub other_models: Option<&'static str>,
    /// Service tier from `service_tier` (and Anthropic's `speed`), as far as a provider bills it differently.
    pub service_tier: ServiceTier,
    /// Value of `user`, when it is text.
    pub user: Option<String>,
    /// Byte range of the value of `stream_options`, and whether it asks for usage.
    pub stream_options: Option<(Range<usize>, bool)>,
    /// Byte range of the value of `include_usage` in `stream_options`.
    pub include_usage_at: Option<Range<usize>>,
    /// Byte ranges of the fields that make the prompt, in prompt order: tools, system, messages.
    pub prompt_at: Vec<Range<usize>>,
    /// Offset just behind the opening brace, where a field can be inserted.
    pub start: usize,
    /// True if the body's object is empty.
    pub is_empty: bool,
    /// Notation of the amounts in the body.
    amounts: Amounts,
}

/// Reads the top level. Every value is checked to be JSON. A duplicate name is refused, because two readers could
/// differ about which one counts, and so is a name that some readers take for another one that is read here. `surface`
/// is the operation; `None` stands for an operation that is forwarded without being understood, of which no amounts
/// are read.
///
/// # Errors
/// The body is not a JSON object, or could be read in two ways.
pub fn peek(body: &[u8], surface: Option<Surface>, bounds: &Bounds) -> Result<Peek, ApiError> {
    read(body, surface, bounds).map_err(Fault::into_error)
}

fn read(body: &[u8], surface: Option<Surface>, bounds: &Bounds) -> Result<Peek, Fault> {
    let mut reader = Reader::new(body)?;
    let kind = reader.kind()?;
    if kind != Kind::Object {
        return Err(Fault::invalid(format!("The body must be a JSON object, got {}.", kind.name())));
    }
    let mut seen = Names::new(bounds.fields_max);
    // Ollama streams where the body does not say.
    let stream = matches!(surface, Some(Surface::OllamaChat | Surface::OllamaGenerate));
    let mut out = Peek { start: reader.position() + 1, is_empty: true, stream, ..Peek::default() };
    let mut parts: Vec<(usize, Range<usize>)> = Vec::new();
    reader.object(|reader, key| {
        seen.add(&key)?;
        names::check_top(&key)?;
        out.is_empty = false;
        let kind = reader.kind()?;
        let from = reader.position();
        field(&mut out, reader, &key, surface, bounds).within(&key)?;
        if let Some(place) = PROMPT.iter().position(|names| names.contains(&&*key))
            && kind != Kind::Null
        {
            parts.push((place, from..reader.position()));
        }
        Ok(())
    })?;
    reader.end()?;
    parts.sort_by_key(|(place, _)| *place);
    out.prompt_at = parts.into_iter().map(|(_, at)| at).collect();
    Ok(out)
}

fn field(
    out: &mut Peek,
    reader: &mut Reader<'_>,
    key: &str,
    surface: Option<Surface>,
    bounds: &Bounds,
) -> Result<(), Fault> {
    if let Some(surface) = surface
        && amounts::field(out, reader, key, surface)?
    {
        return Ok(());
    }
    let from = reader.position();
    if reader.null()? {
        match key {
            "stream_options" => out.stream_options = Some((from..reader.position(), false)),
            // A model that is not text gives no name, but its place is recorded.
            "model" => out.model_at = Some(from..reader.position()),
            _ => {}
        }
        return Ok(());
    }
    match key {
        "model" => {
            out.model = Some(fields::name(reader, bounds.model_chars_max)?);
            out.model_at = Some(from..reader.position());
        }
        "service_tier" | "serviceTier" | "speed" if reader.kind()? == Kind::String => {
            let tier = ServiceTier::named(&reader.string()?);
            if tier != ServiceTier::Standard {
                out.service_tier = tier;
            }
        }
        "stream" => out.stream = reader.boolean()?,
        "store" if reader.kind()? == Kind::Bool => out.stores = reader.boolean()?,
        "background" if surface == Some(Surface::Responses) => out.later = is_wanted(reader)?.then_some("background"),
        "deferred" if surface == Some(Surface::Chat) => out.later = is_wanted(reader)?.then_some("deferred"),
        "stream_options" => {
            let usage = stream_options(out, reader)?;
            out.stream_options = Some((from..reader.position(), usage));
        }
        "user" if reader.kind()? == Kind::String => {
            out.user = Some(fields::text(reader)?).filter(|user| user.len() <= USER_BYTES_MAX);
        }
        other => {
            out.other_models = out.other_models.or(other_models(other));
            reader.skip()?;
        }
    }
    Ok(())
}

/// Reads a switch that is on with any value but false: some servers take 1 or "true" for true.
fn is_wanted(reader: &mut Reader<'_>) -> Result<bool, Fault> {
    if reader.kind()? == Kind::Bool {
        return reader.boolean();
    }
    reader.skip()?;
    Ok(true)
}

/// Reads `stream_options`; returns whether usage is asked for.
fn stream_options(out: &mut Peek, reader: &mut Reader<'_>) -> Result<bool, Fault> {
    let mut usage = false;
    reader.object(|reader, key| {
        names::check(&key, &names::STREAM_OPTIONS, false)?;
        let kind = reader.kind()?;
        let from = reader.position();
        if key != "include_usage" {
            return reader.skip();
        }
        if out.include_usage_at.is_some() {
            return Err(Fault::invalid("this field is given twice")).within(&key);
        }
        if kind == Kind::Bool {
            usage = reader.boolean()?;
        } else {
            reader.skip()?;
        }
        out.include_usage_at = Some(from..reader.position());
        Ok(())
    })?;
    Ok(usage)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    const CHAT: Option<Surface> = Some(Surface::Chat);

    #[track_caller]
    fn check_splice(body: &str, model: Option<&str>, usage: bool, expected: &str) {
        let bytes = Bytes::from(body.to_owned());
        let seen = peek(&bytes, CHAT, &Bounds::default()).expect("an object");
        let change = Splice { model, include_usage: usage, ..Splice::default() };
        let out = spliced(&bytes, &seen, change).concat();
        assert_eq!(String::from_utf8_lossy(&out), expected);
        let again = peek(&out, CHAT, &Bounds::default()).expect("still an object");
        assert!(!usage || again.stream_options.is_some_and(|(_, usage)| usage), "{expected}");
    }

    #[test]
    fn only_what_must_change_is_changed() {
        check_splice(r#"{ "model": "a","x":1}"#, None, false, r#"{ "model": "a","x":1}"#);
        check_splice(r#"{ "model": "a","x":1}"#, Some("b\""), false, r#"{ "model": "b\"","x":1}"#);
        check_splice(r#"{"model":"a"}"#, Some("b"), true, r#"{"stream_options":{"include_usage":true},"model":"b"}"#);
        check_splice(
            r#"{"stream_options":null,"model":"a"}"#,
            Some("b"),
            true,
            r#"{"stream_options":{"include_usage":true},"model":"b"}"#,
        );
        check_splice(
            r#"{"stream_options":{ },"model":"a"}"#,
            None,
            true,
            r#"{"stream_options":{"include_usage":true},"model":"a"}"#,
        );
        check_splice(r#"{"stream_options":{"x":1}}"#, None, true, r#"{"stream_options":{"include_usage":true,"x":1}}"#);
        check_splice(
            r#"{"stream_options":{"include_usage": false}}"#,
            None,
            true,
            r#"{"stream_options":{"include_usage": true}}"#,
        );
        check_splice(
            r#"{"stream_options":{"include_usage": null,"x":2}}"#,
            None,
            true,
            r#"{"stream_options":{"include_usage": true,"x":2}}"#,
        );
        check_splice("{}", None, true, r#"{"stream_options":{"include_usage":true}}"#);
    }

    #[test]
    fn it_sees_what_routing_needs_and_where() {
        let body = br#" { "messages":[{"model":"no"}], "model" : "a\u0062" ,"stream":true,"max_tokens":7,"stream_options":{"include_usage":true}}"#;
        let seen = peek(body, CHAT, &Bounds::default()).expect("an object");
        assert_eq!((seen.model.as_deref(), seen.stream, seen.max_tokens), (Some("ab"), true, Some(7)));
        assert_eq!(&body[seen.model_at.expect("there")], br#""a\u0062""#);
        let (at, usage) = seen.stream_options.expect("there");
        assert_eq!((&body[at], usage), (&br#"{"include_usage":true}"#[..], true));
        assert_eq!(seen.start, 2);
    }

    #[test]
    fn fields_that_name_further_models_are_seen() {
        for (body, expected) in [
            (r#"{"model":"a","models":["b"]}"#, Some("models")),
            (r#"{"fallbacks":[{"model":"b"}],"model":"a"}"#, Some("fallbacks")),
            (r#"{"model":"a","models":null}"#, None),
            (r#"{"model":"a","metadata":{"models":["b"]}}"#, None),
        ] {
            let seen = peek(body.as_bytes(), CHAT, &Bounds::default()).expect("an object");
            assert_eq!(seen.other_models, expected, "{body}");
        }
    }

    #[test]
    fn answers_that_are_wanted_later_are_seen() {
        for (surface, body, expected) in [
            (Surface::Responses, r#"{"background":true}"#, Some("background")),
            (Surface::Responses, r#"{"b\u0061ckground":true}"#, Some("background")),
            (Surface::Responses, r#"{"background":"true"}"#, Some("background")),
            (Surface::Responses, r#"{"background":false}"#, None),
            (Surface::Responses, r#"{"background":null}"#, None),
            (Surface::Responses, r#"{"deferred":true}"#, None),
            (Surface::Responses, r#"{"metadata":{"background":true}}"#, None),
            (Surface::Chat, r#"{"deferred":true}"#, Some("deferred")),
            (Surface::Chat, r#"{"deferred":false}"#, None),
            (Surface::Chat, r#"{"background":true}"#, None),
        ] {
            let seen = peek(body.as_bytes(), Some(surface), &Bounds::default()).expect("an object");
            assert_eq!(seen.later, expected, "{body}");
        }
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
            br#"{"stream_options":{"include_usage":true,"include_usage":false}}"#,
            br#"{"stream_options":{"Include_Usage":false}}"#,
            br#"{"stream_options":[]}"#,
            br#"{"stream_options":"x"}"#,
            br#"{"Stream":true}"#,
            br#"{"USER":"x"}"#,
        ] {
            assert!(peek(body, CHAT, &Bounds::default()).is_err(), "{}", String::from_utf8_lossy(body));
        }
        assert_eq!(peek(b"{}", CHAT, &Bounds::default()).map(|seen| seen.is_empty), Ok(true));
        assert_eq!(peek(br#"{"model":null}"#, CHAT, &Bounds::default()).map(|seen| seen.model), Ok(None));
    }
}
