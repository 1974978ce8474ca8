//! Constraints on the text of an answer: `response_format`, vLLM's `structured_outputs` and its older `guided_…`,
//! SGLang's `regex`, `ebnf` and `json_schema`, llama.cpp's `grammar` and `json_schema`.
//!
//! A request has at most one constraint. The same constraint may stand in two fields, as clients of several servers
//! send it; two different ones are refused by the names of both fields. Expressions and grammars are bounded here and
//! compiled by whoever serves the request.

use super::common::ignore;
use super::format::{self, named_schema, schema_text};
use penstock_types::Bounds;
use penstock_types::error::ApiErrorKind;
use penstock_types::fields::{self, bounded, too_many};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, mismatch};
use penstock_types::request::{GrammarSyntax, ResponseFormat};

/// Constraint of a request while its body is read.
#[derive(Default)]
pub(super) struct Constraint {
    /// Field that gave the constraint, and the constraint; `None` leaves the text free.
    given: Option<(String, ResponseFormat)>,
}

impl Constraint {
    /// Reads a field of the body; `false`, with nothing read, if `key` gives no constraint.
    pub(super) fn field(
        &mut self,
        reader: &mut Reader<'_>,
        key: &str,
        ignored: &mut Vec<String>,
        bounds: &Bounds,
    ) -> Result<bool, Fault> {
        let format = match key {
            "response_format" => format::response_format(reader, bounds)?,
            "structured_outputs" => return self.structured_outputs(reader, ignored, bounds).map(|()| true),
            "guided_json" | "json_schema" => schema(reader, bounds)?,
            "guided_json_object" => json_object(reader)?,
            "guided_regex" | "regex" => ResponseFormat::Regex(text(reader, bounds)?),
            "guided_choice" => choices(reader, bounds)?,
            "guided_grammar" => grammar(reader, None, bounds)?,
            "ebnf" => grammar(reader, Some(GrammarSyntax::Gbnf), bounds)?,
            // llama.cpp's clients send an empty grammar where they want none.
            "grammar" => match reader.raw()?.text {
                "\"\"" => ResponseFormat::Text,
                given => grammar(&mut Reader::new(given.as_bytes())?, Some(GrammarSyntax::Gbnf), bounds)?,
            },
            "structural_tag" => tag(reader, bounds)?,
            // The gateway chooses how it decodes; the answers are the same.
            "guided_decoding_backend" => fields::string(reader, BACKEND_CHARS_MAX).map(|_| ResponseFormat::Text)?,
            "guided_whitespace_pattern" => whitespace_pattern(reader, bounds)?,
            _ => return Ok(false),
        };
        self.set(key, format).map(|()| true)
    }

    /// Stores the constraint that `field` gives, and refuses a second one that differs.
    pub(super) fn set(&mut self, field: &str, format: ResponseFormat) -> Result<(), Fault> {
        if format == ResponseFormat::Text {
            return Ok(());
        }
        match &self.given {
            None => self.given = Some((field.to_owned(), format)),
            Some((_, known)) if is_same(known, &format) => {}
            Some((earlier, _)) => {
                let why = format!("contradicts {earlier}: an answer has one constraint");
                return Err(Fault::invalid(why));
            }
        }
        Ok(())
    }

    /// The constraint as it was given, [`ResponseFormat::Text`] without one.
    pub(super) fn format(&self) -> ResponseFormat {
        self.given.as_ref().map_or(ResponseFormat::Text, |(_, format)| format.clone())
    }

    /// Reads vLLM's object of constraints, in which exactly one must be set, and of options.
    fn structured_outputs(
        &mut self,
        reader: &mut Reader<'_>,
        ignored: &mut Vec<String>,
        bounds: &Bounds,
    ) -> Result<(), Fault> {
        let (mut names, mut found) = (Names::new(bounds.inner_fields_max), false);
        reader.object(|reader, key| {
            names.add(&key)?;
            if reader.null()? {
                return Ok(());
            }
            let format = match &*key {
                "json" => schema(reader, bounds),
                "json_object" => json_object(reader),
                "regex" => text(reader, bounds).map(ResponseFormat::Regex),
                "choice" => choices(reader, bounds),
                "grammar" => grammar(reader, None, bounds),
                "structural_tag" => tag(reader, bounds),
                "whitespace_pattern" => whitespace_pattern(reader, bounds),
                // JSON is generated compact, so either value of the first one is obeyed.
                "disable_any_whitespace" | "disable_fallback" => reader.boolean().map(|_| ResponseFormat::Text),
                "disable_additional_properties" => additional_properties(reader),
                _ => {
                    ignore(ignored, &format!("structured_outputs.{key}"), bounds);
                    reader.skip().map(|()| ResponseFormat::Text)
                }
            };
            let format = format.within(&key)?;
            found |= format != ResponseFormat::Text;
            self.set(&format!("structured_outputs.{key}"), format).within(&key)
        })?;
        match found {
            true => Ok(()),
            false => {
                Err(Fault::invalid("one of json, json_object, regex, choice, grammar, structural_tag is required"))
            }
        }
    }
}

/// Longest name of a decoding backend in characters.
const BACKEND_CHARS_MAX: usize = 64;

/// Whether two constraints admit the same texts. The name and the purpose of a schema do not count.
fn is_same(one: &ResponseFormat, other: &ResponseFormat) -> bool {
    use ResponseFormat::{Grammar, JsonSchema};
    match (one, other) {
        (JsonSchema { schema: one, .. }, JsonSchema { schema: other, .. }) => one == other,
        (Grammar { text: one, .. }, Grammar { text: other, .. }) => one == other,
        (one, other) => one == other,
    }
}

/// Reads a JSON schema: an object, or its JSON text in a string.
fn schema(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ResponseFormat, Fault> {
    let text = match reader.kind()? {
        Kind::Object => schema_text(reader, bounds)?,
        Kind::String => inside(&reader.string()?, |reader| schema_text(reader, bounds))?,
        kind => return Err(mismatch("an object or its JSON in a string", kind)),
    };
    Ok(named_schema(text))
}

/// Reads JSON that a string holds; a syntax error is one of the string, not of the body.
fn inside<T>(text: &str, read: impl FnOnce(&mut Reader<'_>) -> Result<T, Fault>) -> Result<T, Fault> {
    let read = || {
        let mut reader = Reader::new(text.as_bytes())?;
        let value = read(&mut reader)?;
        reader.end()?;
        Ok(value)
    };
    read().map_err(|fault| match fault {
        Fault::Syntax { at, what } => Fault::invalid(format!("the string is not valid JSON: {what} at byte {at}")),
        refused => refused,
    })
}

fn json_object(reader: &mut Reader<'_>) -> Result<ResponseFormat, Fault> {
    Ok(if reader.boolean()? { ResponseFormat::JsonObject } else { ResponseFormat::Text })
}

/// Reads an expression or a grammar: a string of bounded size, not empty.
pub(super) fn text(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    let text = reader.string()?;
    if text.is_empty() {
        return Err(Fault::invalid("must not be empty"));
    }
    if text.len() > bounds.constraint_bytes_max {
        return Err(too_many("bytes", bounds.constraint_bytes_max));
    }
    Ok(text.into_owned())
}

pub(super) fn grammar(
    reader: &mut Reader<'_>,
    syntax: Option<GrammarSyntax>,
    bounds: &Bounds,
) -> Result<ResponseFormat, Fault> {
    Ok(ResponseFormat::Grammar { text: text(reader, bounds)?, syntax })
}

/// Reads the texts to choose from; a text given twice counts once.
fn choices(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ResponseFormat, Fault> {
    let (mut all, mut seen, mut bytes) = (Vec::new(), std::collections::HashSet::new(), 0);
    reader.array(|reader, index| {
        bounded(index, bounds.constraint_choices_max, "strings")?;
        let choice = reader.string().at(index)?;
        if choice.is_empty() {
            return Err(Fault::invalid("must not be an empty string")).at(index);
        }
        bytes += choice.len();
        if bytes > bounds.constraint_bytes_max {
            return Err(too_many("bytes", bounds.constraint_bytes_max));
        }
        let choice = choice.into_owned();
        if seen.insert(choice.clone()) {
            all.push(choice);
        }
        Ok(())
    })?;
    if all.is_empty() {
        return Err(Fault::invalid("must not be empty"));
    }
    Ok(ResponseFormat::Choice(all))
}

/// Reads a structural tag: an object, or its JSON text in a string.
fn tag(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ResponseFormat, Fault> {
    match reader.kind()? {
        Kind::Object => super::structural_tag::read(reader, bounds),
        Kind::String => inside(&reader.string()?, |reader| super::structural_tag::read(reader, bounds)),
        kind => Err(mismatch("an object or its JSON in a string", kind)),
    }
}

/// Reads the pattern of the whitespace between tokens of JSON, and refuses one that demands some.
fn whitespace_pattern(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ResponseFormat, Fault> {
    if admits_none(&fields::string(reader, bounds.name_chars_max)?) {
        return Ok(ResponseFormat::Text);
    }
    let why = "JSON is generated without whitespace; only a pattern that admits none is accepted, such as [ ]?";
    Err(Fault::of(ApiErrorKind::UnsupportedValue, why))
}

/// Returns true if the pattern is empty or a single optional atom (`[ \n]?`, `\s*`), and so matches the empty text.
/// False may be wrong for longer patterns.
fn admits_none(pattern: &str) -> bool {
    let Some(atom) = pattern.strip_suffix(['?', '*']) else { return pattern.is_empty() };
    let atom = atom.strip_suffix(['?', '*']).unwrap_or(atom); // lazy or possessive
    let mut characters = atom.chars();
    match (characters.next(), characters.next_back(), characters.as_str()) {
        (Some('['), Some(']'), inner) => !inner.contains([']', '[']) && !inner.ends_with('\\'),
        (Some('\\'), Some(_), "") => true,
        (Some(single), None, _) => !"\\[](){}|?*+^$".contains(single),
        _ => false,
    }
}

fn additional_properties(reader: &mut Reader<'_>) -> Result<ResponseFormat, Fault> {
    match reader.boolean()? {
        false => Ok(ResponseFormat::Text),
        true => {
            let why = "put \"additionalProperties\": false into the schema";
            Err(Fault::of(ApiErrorKind::UnsupportedValue, why))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whitespace_patterns_that_admit_none() {
        for pattern in ["", " ?", "[ ]?", "[ \\n\\t]*", "\\s*", "\\s*?", "[\\n\\t ]*", ".*"] {
            assert!(admits_none(pattern), "{pattern}");
        }
        for pattern in
            [" ", "?", "*", "\\?", "[ ]", "[ ]+", "a b?", "[ ] [ ]?", "(a)?", "[\\]?", "\\", "[?", "??", "\\n\\n?"]
        {
            assert!(!admits_none(pattern), "{pattern}");
        }
    }
}
