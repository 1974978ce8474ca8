//! `response_format`: the form that an answer must have.

use super::{constraint, structural_tag};
use penstock_types::Bounds;
use penstock_types::error::ApiErrorKind;
use penstock_types::fields::{self, too_many};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, mismatch, short};
use penstock_types::json_text::compacted;
use penstock_types::request::{GrammarSyntax, ResponseFormat};

/// Fields of `response_format` while it is read; the meaning of most depends on `type`.
#[derive(Default)]
struct Draft {
    kind: Option<String>,
    json_schema: Option<ResponseFormat>,
    /// Schema beside the type, as llama.cpp's, Together's and Fireworks' clients send it.
    schema: Option<String>,
    grammar: Option<String>,
    syntax: Option<Syntax>,
    pattern: Option<String>,
}

/// Notation of `grammar`, by `syntax`.
#[derive(Clone, Copy)]
enum Syntax {
    Grammar(GrammarSyntax),
    Regex,
}

const SYNTAXES: &[(&str, Syntax)] = &[
    ("lark", Syntax::Grammar(GrammarSyntax::Lark)),
    ("gbnf", Syntax::Grammar(GrammarSyntax::Gbnf)),
    ("ebnf", Syntax::Grammar(GrammarSyntax::Gbnf)),
    ("regex", Syntax::Regex),
];

/// Reads the `response_format` object of a request.
pub(super) fn response_format(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ResponseFormat, Fault> {
    if reader.kind()? != Kind::Object {
        return Err(mismatch("an object", reader.kind()?));
    }
    let raw = reader.raw()?.text;
    let mut draft = Draft::default();
    let mut names = Names::new(bounds.inner_fields_max);
    Reader::new(raw.as_bytes())?.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        draft.field(reader, &key, bounds).within(&key)
    })?;
    let missing = || Fault::invalid("required, but missing");
    let Draft { kind, json_schema, schema, grammar, syntax, pattern } = draft;
    match kind.as_deref() {
        Some("text") => Ok(ResponseFormat::Text),
        Some("json_object") => Ok(match schema.filter(|schema| schema != "{}") {
            None => ResponseFormat::JsonObject,
            Some(schema) => named_schema(schema),
        }),
        Some("json_schema") => json_schema.ok_or_else(missing).within("json_schema"),
        Some("regex") => pattern.map(ResponseFormat::Regex).ok_or_else(missing).within("pattern"),
        Some("grammar") => {
            let text = grammar.ok_or_else(missing).within("grammar")?;
            Ok(match syntax {
                Some(Syntax::Regex) => ResponseFormat::Regex(text),
                Some(Syntax::Grammar(syntax)) => ResponseFormat::Grammar { text, syntax: Some(syntax) },
                None => ResponseFormat::Grammar { text, syntax: None },
            })
        }
        Some("structural_tag") => structural_tag::read(&mut Reader::new(raw.as_bytes())?, bounds),
        Some("python") => Err(Fault::of(ApiErrorKind::UnsupportedValue, "\"python\" is not built")).within("type"),
        Some(other) => Err(Fault::invalid(format!("unknown format \"{}\"", short(other)))).within("type"),
        None => Err(missing()).within("type"),
    }
}

impl Draft {
    fn field(&mut self, reader: &mut Reader<'_>, key: &str, bounds: &Bounds) -> Result<(), Fault> {
        match key {
            "type" => self.kind = Some(fields::string(reader, 64)?),
            "json_schema" => self.json_schema = Some(json_schema(reader, bounds)?),
            "schema" => self.schema = Some(schema_text(reader, bounds)?),
            // `definition` is the name in OpenAI's custom tools.
            "grammar" | "definition" => self.grammar = Some(constraint::text(reader, bounds)?),
            "syntax" => self.syntax = Some(fields::word(reader, SYNTAXES)?),
            "pattern" | "regex" => self.pattern = Some(constraint::text(reader, bounds)?),
            _ => reader.skip()?,
        }
        Ok(())
    }
}

/// Name of a schema whose client gave none.
const SCHEMA_NAME: &str = "response";

/// Format of a schema that came without a name; the answer must match it.
pub(super) fn named_schema(schema: String) -> ResponseFormat {
    ResponseFormat::JsonSchema { name: SCHEMA_NAME.to_owned(), description: None, schema, strict: true }
}

/// Reads `{name, description?, schema, strict?}`; also the `format` of the Responses API.
pub(super) fn json_schema(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<ResponseFormat, Fault> {
    let (mut name, mut description, mut schema, mut strict) = (None, None, None, false);
    let mut names = Names::new(bounds.inner_fields_max);
    reader.object(|reader, key| {
        names.add(&key)?;
        if reader.null()? {
            return Ok(());
        }
        match &*key {
            "name" => name = Some(fields::name(reader, bounds.name_chars_max).within("name")?),
            "description" => description = Some(fields::text(reader).within("description")?),
            "schema" => schema = Some(schema_text(reader, bounds).within("schema")?),
            "strict" => strict = reader.boolean().within("strict")?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let name = name.ok_or_else(|| Fault::invalid("required, but missing")).within("name")?;
    let schema = schema.ok_or_else(|| Fault::invalid("required, but missing")).within("schema")?;
    Ok(ResponseFormat::JsonSchema { name, description, schema, strict })
}

/// Reads a JSON schema, with the bounds of a tool's schema.
pub(crate) fn schema_text(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    reader.expect(Kind::Object)?;
    let raw = reader.raw()?;
    if raw.depth > bounds.tool_depth_max {
        return Err(too_many("levels of nesting", bounds.tool_depth_max));
    }
    let text = compacted(raw.text);
    if text.len() > bounds.tool_bytes_max {
        return Err(too_many("bytes", bounds.tool_bytes_max));
    }
    Ok(text)
}
