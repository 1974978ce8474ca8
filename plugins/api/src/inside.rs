//! Texts inside of JSON that clients send: tools, schemas, arguments of templates.
//!
//! Not every string there is a text. Names of properties, and the values of keywords such as `type` and `required`, are
//! names: something else refers to them, so changing one breaks the whole. Such strings are shown and never changed. What
//! nobody wrote, the keywords themselves and the types, is not shown.

use std::borrow::Cow;
use std::collections::HashSet;

use bytes::{BufMut, BytesMut};
use penstock_types::json::{Fault, Kind, Reader};
use penstock_types::write;

/// Kind of JSON value, which decides what its strings are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A tool in OpenAI's shape: `type` and `name` are names, `parameters` is a schema.
    Tool,
    /// A JSON schema.
    Schema,
    /// An object of schemas by name, such as `properties`.
    Schemas,
    /// A structural tag: its own strings are syntax, its schemas are schemas.
    Tag,
    /// Data: every string is a text.
    Data,
}

/// Keywords of JSON Schema whose values are objects of schemas, or of lists of names, by name.
const BY_NAME: [&str; 7] = [
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependentRequired",
    "dependencies",
];
/// Keywords whose values are data that instances of the schema hold.
const DATA: [&str; 5] = ["default", "example", "examples", "const", "enum"];
/// Keywords whose strings are names or syntax.
const NAMES: [&str; 14] = [
    "type",
    "required",
    "format",
    "pattern",
    "propertyOrdering",
    "contentEncoding",
    "contentMediaType",
    "$ref",
    "$id",
    "$schema",
    "$anchor",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
];

/// Further keywords, whose values are neither.
const KEYWORDS: [&str; 33] = [
    "title",
    "description",
    "items",
    "prefixItems",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "minContains",
    "maxContains",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "else",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "uniqueItems",
    "minProperties",
    "maxProperties",
    "nullable",
    "$comment",
];
/// Values of `type` in a schema, and in a tool.
const TYPES: [&str; 8] = ["object", "array", "string", "number", "integer", "boolean", "null", "function"];

impl Place {
    /// Returns true if `key` is a word of the format, which nobody chose.
    fn knows(self, key: &str) -> bool {
        match self {
            Place::Tool => ["type", "function", "name", "description", "parameters", "strict"].contains(&key),
            Place::Tag => {
                ["type", "format", "structures", "triggers", "begin", "schema", "json_schema", "end"].contains(&key)
            }
            Place::Schema => [&BY_NAME[..], &DATA, &NAMES, &KEYWORDS].iter().any(|list| list.contains(&key)),
            Place::Schemas | Place::Data => false,
        }
    }

    /// Place of the value under `key`, and whether strings right there are names.
    fn under(self, key: &str) -> (Place, bool) {
        match self {
            Place::Data => (Place::Data, false),
            Place::Schemas => (Place::Schema, true),
            Place::Tool => match key {
                "type" | "name" => (Place::Data, true),
                "function" => (Place::Tool, false),
                "parameters" => (Place::Schema, false),
                _ => (Place::Data, false),
            },
            Place::Tag => match key {
                "schema" | "json_schema" => (Place::Schema, false),
                _ => (Place::Tag, true),
            },
            Place::Schema if BY_NAME.contains(&key) => (Place::Schemas, true),
            Place::Schema if DATA.contains(&key) => (Place::Data, false),
            Place::Schema => (Place::Schema, NAMES.contains(&key)),
        }
    }
}

/// Visitor of a string: true for a name; returns the text that takes the place of a text.
type Visit<'v> = dyn FnMut(bool, &str) -> Option<String> + 'v;

/// Calls `see` with every string in `json`, keys too; true for names. Text that is no JSON is one text.
pub(crate) fn each(json: &str, place: Place, see: &mut dyn FnMut(bool, &str)) {
    let visited = walked(json, place, &mut |is_name, text| {
        if !(is_name && TYPES.contains(&text)) {
            see(is_name, text);
        }
        None
    });
    if visited.is_none() {
        see(false, json);
    }
}

/// Calls `edit` with every text in `json` that is no name; returns the new JSON if one of them has changed.
pub(crate) fn change(json: &str, place: Place, edit: &mut dyn FnMut(&mut String)) -> Option<String> {
    let mut changed = false;
    let made = walked(json, place, &mut |is_name, text| {
        if is_name {
            return None;
        }
        let mut edited = text.to_owned();
        edit(&mut edited);
        let differs = edited != text;
        changed |= differs;
        differs.then_some(edited)
    });
    made.filter(|_| changed)
}

/// The JSON with the strings that `visit` returns; `None`: it is no JSON.
fn walked(json: &str, place: Place, visit: &mut Visit<'_>) -> Option<String> {
    let mut out = BytesMut::with_capacity(json.len());
    let mut reader = Reader::new(json.as_bytes()).ok()?;
    value(&mut reader, (place, false), visit, &mut out).ok()?;
    reader.end().ok()?;
    String::from_utf8(out.into()).ok()
}

fn value(
    reader: &mut Reader<'_>,
    (place, is_name): (Place, bool),
    visit: &mut Visit<'_>,
    out: &mut BytesMut,
) -> Result<(), Fault> {
    match reader.kind()? {
        Kind::String => {
            let text = reader.string()?;
            let text = visit(is_name, &text).map_or(text, Cow::Owned);
            write::string(out, &text);
        }
        Kind::Object => {
            let mut open = b'{';
            reader.object(|reader, key| {
                out.put_u8(std::mem::replace(&mut open, b','));
                if !place.knows(&key) {
                    visit(true, &key);
                }
                write::string(out, &key);
                out.put_u8(b':');
                let unique = place == Place::Schema && key == "enum" && reader.kind()? == Kind::Array;
                if unique { choices(reader, visit, out) } else { value(reader, place.under(&key), visit, out) }
            })?;
            out.put_slice(if open == b'{' { b"{}" } else { b"}" });
        }
        Kind::Array => {
            let mut open = b'[';
            reader.array(|reader, _| {
                out.put_u8(std::mem::replace(&mut open, b','));
                value(reader, (place, is_name), visit, out)
            })?;
            out.put_slice(if open == b'[' { b"[]" } else { b"]" });
        }
        Kind::Null | Kind::Bool | Kind::Number => out.put_slice(reader.raw()?.text.as_bytes()),
    }
    Ok(())
}

/// Reads the values of an `enum`, of which no two may be the same: those that have become so are left out.
fn choices(reader: &mut Reader<'_>, visit: &mut Visit<'_>, out: &mut BytesMut) -> Result<(), Fault> {
    let (mut open, mut seen) = (b'[', HashSet::new());
    reader.array(|reader, _| {
        let mut one = BytesMut::new();
        value(reader, (Place::Data, false), visit, &mut one)?;
        let one = one.freeze();
        if seen.insert(one.clone()) {
            out.put_u8(std::mem::replace(&mut open, b','));
            out.put_slice(&one);
        }
        Ok(())
    })?;
    out.put_slice(if open == b'[' { b"[]" } else { b"]" });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(place: Place, json: &str, names: &str, changed: &str) {
        let mut seen = Vec::new();
        each(json, place, &mut |is_name, text| seen.extend(is_name.then(|| text.to_owned())));
        assert_eq!(seen.join(" "), names);
        let upper = change(json, place, &mut |text| *text = text.to_uppercase());
        assert_eq!(upper.as_deref(), Some(changed));
        assert_eq!(change(json, place, &mut |_| ()), None, "nothing changed");
    }

    #[test]
    fn texts_of_a_schema_change_and_names_do_not() {
        check(
            Place::Schema,
            r#"{"type":["object","null"],"required":["a"],"properties":{"type":{"description":"x\u0041","pattern":"p"}},"x":[1e999,true]}"#,
            "a type p x",
            r#"{"type":["object","null"],"required":["a"],"properties":{"type":{"description":"XA","pattern":"p"}},"x":[1e999,true]}"#,
        );
        check(
            Place::Schema,
            r#"{"default":{"type":"d"},"enum":["a","A",1,{"b":"c"}],"dependentRequired":{"k":["n"]},"$defs":{"enum":{"enum":[]}},"not":{}}"#,
            "type b k n enum",
            r#"{"default":{"type":"D"},"enum":["A",1,{"b":"C"}],"dependentRequired":{"k":["n"]},"$defs":{"enum":{"enum":[]}},"not":{}}"#,
        );
    }

    #[test]
    fn a_tool_keeps_its_name_and_every_field() {
        check(
            Place::Tool,
            r#"{"type":"function","function":{"name":"f","description":"d","parameters":{"title":"t","type":"object"}},"own":{"name":"n"}}"#,
            "f own name",
            r#"{"type":"function","function":{"name":"f","description":"D","parameters":{"title":"T","type":"object"}},"own":{"name":"N"}}"#,
        );
        check(
            Place::Tag,
            r#"{"triggers":["<f"],"structures":[{"begin":"<f>","schema":{"title":"t"},"end":"</f>"}]}"#,
            "<f <f> </f>",
            r#"{"triggers":["<f"],"structures":[{"begin":"<f>","schema":{"title":"T"},"end":"</f>"}]}"#,
        );
    }

    #[test]
    fn what_is_no_json_is_one_text() {
        let mut seen = Vec::new();
        each("{\"a\":", Place::Data, &mut |is_name, text| seen.push((is_name, text.to_owned())));
        assert_eq!(seen.last(), Some(&(false, "{\"a\":".to_owned())));
    }
}
