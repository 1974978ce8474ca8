//! Conversion of Gemini's `Schema` to JSON Schema.
//!
//! Gemini's `Schema` is a subset of OpenAPI 3.0 with its types in capitals: `type` becomes lower case, `nullable`
//! becomes another type, `format: "enum"` and `propertyOrdering` are dropped (JSON Schema has no counterpart),
//! `example` becomes `examples`, and limits written as strings (Google's 64-bit integers) become numbers. Fields that
//! Google does not know, such as `$schema`, stay as they are.

use bytes::{BufMut, BytesMut};

use super::fields::camel;
use penstock_types::Bounds;
use penstock_types::fields::{bounded, too_many};
use penstock_types::json::{Fault, Kind, Names, Reader, Within, short};
use penstock_types::json_text::compacted;
use penstock_types::write;

/// Reads a schema that is JSON Schema already.
pub(super) fn json_schema(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
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

/// Reads a `Schema` and converts it to JSON Schema.
pub(super) fn schema(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<String, Fault> {
    let text = json_schema(reader, bounds)?;
    let mut out = BytesMut::with_capacity(text.len() + 16);
    converted(&mut Reader::new(text.as_bytes())?, &mut out, bounds)?;
    // Only text was written.
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// Texts that a JSON schema's `enum` lists, for an answer that is one of them without quotes. The schema must be one
/// of strings; a text given twice counts once.
pub(super) fn choices(schema: &str, bounds: &Bounds) -> Result<Vec<String>, Fault> {
    let (mut all, mut seen) = (Vec::new(), std::collections::HashSet::new());
    Reader::new(schema.as_bytes())?.object(|reader, key| {
        if key != "enum" {
            return reader.skip();
        }
        let read = reader.array(|reader, index| {
            bounded(index, bounds.constraint_choices_max, "strings")?;
            let choice = reader.string().at(index)?.into_owned();
            if choice.is_empty() {
                return Err(Fault::invalid("must not be an empty string")).at(index);
            }
            if seen.insert(choice.clone()) {
                all.push(choice);
            }
            Ok(())
        });
        read.within("enum")
    })?;
    if all.is_empty() { Err(Fault::invalid("required, but missing or empty")).within("enum") } else { Ok(all) }
}

/// Fields of one schema whose conversion depends on another field.
#[derive(Default)]
struct Draft {
    kind: Option<String>,
    nullable: bool,
    any_of: Option<BytesMut>,
    choices: Option<BytesMut>,
}

fn converted(reader: &mut Reader<'_>, out: &mut BytesMut, bounds: &Bounds) -> Result<(), Fault> {
    let mut draft = Draft::default();
    let mut fields = Fields { out, first: true };
    fields.out.put_u8(b'{');
    let mut names = Names::new(bounds.fields_max);
    reader.object(|reader, key| {
        // Fields of JSON Schema that Google does not know keep their spelling.
        let name = camel(key.clone());
        names.add(&name)?;
        if name != "default" && name != "example" && name != "enum" && reader.null()? {
            return Ok(());
        }
        field(reader, &key, &name, &mut draft, &mut fields, bounds).within(&name)
    })?;
    draft.finish(&mut fields);
    fields.out.put_u8(b'}');
    Ok(())
}

/// Fields of the object being written.
struct Fields<'a> {
    out: &'a mut BytesMut,
    first: bool,
}

impl Fields<'_> {
    fn name(&mut self, name: &str) {
        if !std::mem::take(&mut self.first) {
            self.out.put_u8(b',');
        }
        write::string(self.out, name);
        self.out.put_u8(b':');
    }
}

fn field(
    reader: &mut Reader<'_>,
    key: &str,
    name: &str,
    draft: &mut Draft,
    fields: &mut Fields<'_>,
    bounds: &Bounds,
) -> Result<(), Fault> {
    match name {
        // JSON Schema's lists of types stay.
        "type" if reader.kind()? == Kind::String => draft.kind = Some(reader.string()?.to_ascii_lowercase()),
        "nullable" => draft.nullable = reader.boolean()?,
        "format" if reader.kind()? == Kind::String => {
            let format = reader.string()?;
            if format != "enum" {
                fields.name(name);
                write::string(fields.out, &format);
            }
        }
        "propertyOrdering" => reader.skip()?,
        "example" => {
            fields.name("examples");
            fields.out.put_u8(b'[');
            fields.out.put_slice(reader.raw()?.text.as_bytes());
            fields.out.put_u8(b']');
        }
        "items" | "additionalProperties" if reader.kind()? == Kind::Object => {
            fields.name(name);
            converted(reader, fields.out, bounds)?;
        }
        "properties" | "defs" | "$defs" | "definitions" => {
            fields.name(if name == "defs" { "$defs" } else { name });
            named(reader, fields.out, bounds)?;
        }
        "ref" => {
            fields.name("$ref");
            write::string(fields.out, &reader.string()?);
        }
        "anyOf" => draft.any_of = Some(alternatives(reader, bounds)?),
        "oneOf" | "allOf" => {
            fields.name(name);
            let all = alternatives(reader, bounds)?;
            fields.out.put_u8(b'[');
            fields.out.put_slice(&all);
            fields.out.put_u8(b']');
        }
        "enum" => draft.choices = Some(inside(reader)?),
        "maxItems" | "minItems" | "maxLength" | "minLength" | "maxProperties" | "minProperties" => {
            fields.name(name);
            limit(reader, fields.out)?;
        }
        _ => {
            fields.name(known(key, name));
            fields.out.put_slice(reader.raw()?.text.as_bytes());
        }
    }
    Ok(())
}

/// Spelling of a key in the output: Google's own names in camel case, all others as they were written.
fn known<'a>(key: &'a str, name: &'a str) -> &'a str {
    const KNOWN: [&str; 4] = ["additionalProperties", "uniqueItems", "exclusiveMinimum", "exclusiveMaximum"];
    if KNOWN.contains(&name) { name } else { key }
}

impl Draft {
    fn finish(self, fields: &mut Fields<'_>) {
        let Draft { kind, nullable, any_of, choices } = self;
        if let Some(kind) = kind.filter(|kind| kind != "type_unspecified") {
            fields.name("type");
            match nullable && kind != "null" {
                true => {
                    fields.out.put_u8(b'[');
                    write::string(fields.out, &kind);
                    fields.out.put_slice(b",\"null\"]");
                }
                false => write::string(fields.out, &kind),
            }
        }
        let mut list = |name: &str, items: Option<BytesMut>, null: &[u8]| {
            let Some(items) = items else { return };
            fields.name(name);
            fields.out.put_u8(b'[');
            fields.out.put_slice(&items);
            if nullable {
                fields.out.put_slice(if items.is_empty() { b"" } else { b"," });
                fields.out.put_slice(null);
            }
            fields.out.put_u8(b']');
        };
        list("enum", choices, b"null");
        list("anyOf", any_of, br#"{"type":"null"}"#);
    }
}

/// Converts a map from names to schemas.
fn named(reader: &mut Reader<'_>, out: &mut BytesMut, bounds: &Bounds) -> Result<(), Fault> {
    let mut fields = Fields { out, first: true };
    fields.out.put_u8(b'{');
    // A set, because a schema may have many properties.
    let mut seen = std::collections::HashSet::new();
    reader.object(|reader, key| {
        if !seen.insert(key.to_string()) {
            return Err(Fault::invalid("this field is given twice")).within(&key);
        }
        fields.name(&key);
        converted(reader, fields.out, bounds).within(&key)
    })?;
    fields.out.put_u8(b'}');
    Ok(())
}

/// Converts a list of schemas and returns it without brackets.
fn alternatives(reader: &mut Reader<'_>, bounds: &Bounds) -> Result<BytesMut, Fault> {
    let mut out = BytesMut::new();
    reader.array(|reader, index| {
        bounded(index, bounds.fields_max, "schemas")?;
        if index > 0 {
            out.put_u8(b',');
        }
        converted(reader, &mut out, bounds).at(index)
    })?;
    Ok(out)
}

/// Copies a list and returns it without brackets.
fn inside(reader: &mut Reader<'_>) -> Result<BytesMut, Fault> {
    reader.expect(Kind::Array)?;
    let text = reader.raw()?.text;
    Ok(BytesMut::from(text[1..text.len() - 1].trim_ascii()))
}

/// Converts a limit: a number, or its digits in a string.
fn limit(reader: &mut Reader<'_>, out: &mut BytesMut) -> Result<(), Fault> {
    if reader.kind()? != Kind::String {
        out.put_slice(reader.number()?.as_bytes());
        return Ok(());
    }
    let digits = reader.string()?;
    let value = digits.parse::<u64>();
    let value = value.map_err(|_| Fault::invalid(format!("expected an integer, got \"{}\"", short(&digits))))?;
    write::integer(out, value);
    Ok(())
}

/// A schema in either form, under either name; two of them at once are refused as a contradiction.
#[derive(Default)]
pub(super) struct Given {
    text: Option<String>,
}

impl Given {
    /// Stores the schema given in one form.
    pub(super) fn set(&mut self, text: String) -> Result<(), Fault> {
        match self.text.replace(text) {
            None => Ok(()),
            Some(_) => Err(Fault::invalid("the schema is given in two forms")),
        }
    }

    /// The schema, if there is one.
    pub(super) fn take(self) -> Option<String> {
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(given: &str, expected: &str) {
        let made = schema(&mut Reader::new(given.as_bytes()).expect("text"), &Bounds::default());
        let made = made.unwrap_or_else(|fault| panic!("{}: {given}", fault.into_error()));
        assert_eq!(made, expected, "{given}");
        serde_json::from_str::<serde_json::Value>(&made).expect("JSON");
    }

    #[test]
    fn googles_schema_becomes_json_schema() {
        check(r#"{}"#, r#"{}"#);
        check(r#"{"type":"STRING"}"#, r#"{"type":"string"}"#);
        check(r#"{"type":"TYPE_UNSPECIFIED"}"#, r#"{}"#);
        check(r#"{"nullable":true,"type":"STRING"}"#, r#"{"type":["string","null"]}"#);
        check(r#"{"type":"STRING","nullable":false,"description":null}"#, r#"{"type":"string"}"#);
        check(
            r#"{"type":"STRING","format":"enum","enum":[ "a", "b" ],"nullable":true}"#,
            r#"{"type":["string","null"],"enum":["a","b",null]}"#,
        );
        check(
            r#"{"any_of":[{"type":"INTEGER","format":"int32"},{"type":"NULL"}],"nullable":true}"#,
            r#"{"anyOf":[{"format":"int32","type":"integer"},{"type":"null"},{"type":"null"}]}"#,
        );
        check(
            r#"{"type":"OBJECT","property_ordering":["b","a"],"required":["a"],"properties":{"a_b":{"type":"ARRAY",
            "items":{"type":"NUMBER"},"min_items":"1","maxItems":3},"type":{"type":"BOOLEAN","example":true,"default":null}}}"#,
            concat!(
                r#"{"required":["a"],"properties":{"a_b":{"items":{"type":"number"},"minItems":1,"maxItems":3,"type":"array"},"#,
                r#""type":{"examples":[true],"default":null,"type":"boolean"}},"type":"object"}"#
            ),
        );
        check(
            r##"{"type":["string","null"],"$schema":"x","additional_properties":false,"ref":"#/$defs/a","defs":{"a":{"type":"STRING"}},"x_y":1}"##,
            r##"{"type":["string","null"],"$schema":"x","additionalProperties":false,"$ref":"#/$defs/a","$defs":{"a":{"type":"string"}},"x_y":1}"##,
        );
    }

    #[test]
    fn what_is_no_schema_is_refused() {
        for given in [
            r#"{"type":"STRING","type":"STRING"}"#,
            r#"{"min_items":1,"minItems":1}"#,
            r#"{"minItems":"x"}"#,
            "[]",
            r#"{"properties":[]}"#,
            r#"{"properties":{"a":7}}"#,
            r#"{"anyOf":{}}"#,
            r#"{"enum":1}"#,
            r#"{"nullable":1}"#,
        ] {
            assert!(schema(&mut Reader::new(given.as_bytes()).expect("text"), &Bounds::default()).is_err(), "{given}");
        }
    }
}
