//! JSON schemas by the rules of providers that hold an answer, or a call's arguments, to them.
//!
//! OpenAI takes a strict schema only if each of its objects forbids other properties and requires all of its own.
//! Anthropic and Bedrock take no schema with an object that leaves other properties open. Clients of other APIs keep
//! neither rule. So a schema that breaks OpenAI's rule is sent without `strict`, and open objects are closed for
//! Anthropic and Bedrock.

use std::borrow::Cow;

use bytes::{BufMut, BytesMut};

use crate::answer_json::Object;
use penstock_types::json::{Fault, Kind, Reader};

/// The schema with `"additionalProperties":false` in every object that names its properties and does not say whether it
/// may have others. An object that is made of several schemas (`allOf`, `anyOf`, `$ref`…) is left as it is: the keyword
/// would forbid what the others allow. Text that cannot be read is returned unchanged. Cost: linear in `schema`.
pub(crate) fn closed(schema: &str) -> String {
    let mut out = BytesMut::with_capacity(schema.len() + 64);
    match Reader::new(schema.as_bytes()).and_then(|mut reader| put_closed(&mut reader, &mut out, true)) {
        Ok(()) => String::from_utf8_lossy(&out).into_owned(), // only text was written
        Err(_) => schema.to_owned(),
    }
}

/// Parameters of a function for Anthropic and Bedrock: an object without properties where none are `given`, closed if the
/// function is `strict`.
pub(crate) fn parameters(given: Option<&str>, strict: bool) -> Cow<'_, str> {
    let schema = given.filter(|schema| *schema != "{}").unwrap_or(r#"{"type":"object","properties":{}}"#);
    if strict { Cow::Owned(closed(schema)) } else { Cow::Borrowed(schema) }
}

/// Returns true if OpenAI takes the schema with `strict`. A keyword that is not allowed there makes it false. Cost:
/// linear in `schema`.
pub(crate) fn may_be_strict(schema: &str) -> bool {
    Reader::new(schema.as_bytes()).and_then(|mut reader| is_strict(&mut reader)).unwrap_or(false)
}

/// Value of a keyword.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Value {
    /// A schema, or true or false.
    Schema,
    /// A list of schemas.
    List,
    /// A list of schemas each of which sees a part of the object's properties only.
    Parts,
    /// A map of names to schemas.
    Map,
    /// Anything else.
    Plain,
}

impl Value {
    fn of(keyword: &str, kind: Kind) -> Self {
        let value = match keyword {
            "items" if kind == Kind::Array => Self::List,
            "items" | "additionalProperties" | "contains" | "not" => Self::Schema,
            "anyOf" | "oneOf" | "prefixItems" => Self::List,
            "allOf" => Self::Parts,
            "properties" | "$defs" | "definitions" | "patternProperties" => Self::Map,
            _ => Self::Plain,
        };
        // A value of another kind is no schema: it is copied.
        let fits = match value {
            Self::Schema | Self::Map => kind == Kind::Object,
            Self::List | Self::Parts => kind == Kind::Array,
            Self::Plain => true,
        };
        if fits { value } else { Self::Plain }
    }
}

/// Copies a schema; `closes` is false where the object's properties are named by other schemas, too.
fn put_closed(reader: &mut Reader<'_>, out: &mut BytesMut, closes: bool) -> Result<(), Fault> {
    if reader.kind()? != Kind::Object {
        out.put_slice(reader.raw()?.text.as_bytes());
        return Ok(());
    }
    let (mut object, mut names, mut composed) = (Object::open(out), false, false);
    reader.object(|reader, key| {
        names |= key == "properties";
        composed |= matches!(
            &*key,
            "additionalProperties" | "allOf" | "anyOf" | "oneOf" | "if" | "then" | "else" | "$ref" | "dependentSchemas"
        );
        let (out, value) = (object.key(&key), Value::of(&key, reader.kind()?));
        match value {
            Value::Schema => put_closed(reader, out, true),
            Value::List | Value::Parts => {
                out.put_u8(b'[');
                reader.array(|reader, index| {
                    if index > 0 {
                        out.put_u8(b',');
                    }
                    put_closed(reader, out, value == Value::List)
                })?;
                out.put_u8(b']');
                Ok(())
            }
            Value::Map => {
                let mut map = Object::open(out);
                reader.object(|reader, key| put_closed(reader, map.key(&key), true))?;
                map.close();
                Ok(())
            }
            Value::Plain => {
                out.put_slice(reader.raw()?.text.as_bytes());
                Ok(())
            }
        }
    })?;
    if closes && names && !composed {
        object.boolean("additionalProperties", false);
    }
    object.close();
    Ok(())
}

/// Keywords that OpenAI refuses in a strict schema.
const NOT_STRICT: [&str; 13] = [
    "allOf",
    "contains",
    "default",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "not",
    "oneOf",
    "patternProperties",
    "prefixItems",
    "then",
    "unevaluatedProperties",
];

fn is_strict(reader: &mut Reader<'_>) -> Result<bool, Fault> {
    if reader.kind()? != Kind::Object {
        return reader.skip().map(|()| false);
    }
    let (mut strict, mut is_object, mut is_closed) = (true, false, false);
    let (mut named, mut required) = (Vec::new(), std::collections::HashSet::new());
    reader.object(|reader, key| {
        let kind = reader.kind()?;
        strict &= !NOT_STRICT.contains(&&*key);
        match (&*key, kind) {
            ("type", Kind::String) => is_object |= reader.string()? == "object",
            ("type", Kind::Array) => reader.array(|reader, _| match reader.kind()? {
                Kind::String => {
                    is_object |= reader.string()? == "object";
                    Ok(())
                }
                _ => reader.skip(),
            })?,
            ("additionalProperties", Kind::Bool) => is_closed = !reader.boolean()?,
            ("required", Kind::Array) => reader.array(|reader, _| match reader.kind()? {
                Kind::String => {
                    required.insert(reader.string()?.into_owned());
                    Ok(())
                }
                _ => reader.skip(),
            })?,
            ("properties", Kind::Object) => reader.object(|reader, name| {
                named.push(name.into_owned());
                strict &= is_strict(reader)?;
                Ok(())
            })?,
            ("$defs" | "definitions", Kind::Object) => reader.object(|reader, _| {
                strict &= is_strict(reader)?;
                Ok(())
            })?,
            ("anyOf", Kind::Array) => reader.array(|reader, _| {
                strict &= is_strict(reader)?;
                Ok(())
            })?,
            ("items", _) => strict &= is_strict(reader)?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let is_object = is_object || !named.is_empty();
    Ok(strict && (!is_object || (is_closed && named.iter().all(|name| required.contains(name)))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(given: &str, expected: &str) {
        let made = closed(given);
        assert_eq!(made, expected, "{given}");
        serde_json::from_str::<serde_json::Value>(&made).expect("JSON");
        assert_eq!(closed(&made), made, "closed once");
    }

    #[test]
    fn objects_that_name_their_properties_are_closed() {
        check("true", "true");
        check(r#"{"type":"string"}"#, r#"{"type":"string"}"#);
        check(
            r#"{"type":"object","properties":{}}"#,
            r#"{"type":"object","properties":{},"additionalProperties":false}"#,
        );
        check(
            r#"{"properties":{"properties":{"type":"array","items":{"properties":{"a":{}}}}},"$defs":{"x":{"properties":{"b":true}}}}"#,
            concat!(
                r#"{"properties":{"properties":{"type":"array","items":{"properties":{"a":{}},"additionalProperties":false}}},"#,
                r#""$defs":{"x":{"properties":{"b":true},"additionalProperties":false}},"additionalProperties":false}"#
            ),
        );
        check(
            r#"{"anyOf":[{"properties":{"a":{}}},{"type":"null"}]}"#,
            r#"{"anyOf":[{"properties":{"a":{}},"additionalProperties":false},{"type":"null"}]}"#,
        );
        check(
            r#"{"additionalProperties":{"properties":{"a":{}}},"properties":{}}"#,
            r#"{"additionalProperties":{"properties":{"a":{}},"additionalProperties":false},"properties":{}}"#,
        );
    }

    #[test]
    fn what_says_itself_what_it_allows_stays() {
        for given in [
            r#"{"type":"object"}"#,
            r#"{"properties":{"a":{}},"additionalProperties":true}"#,
            r##"{"properties":{"a":{}},"$ref":"#/$defs/b"}"##,
            r#"{"allOf":[{"properties":{"a":{}}},{"properties":{"b":{}}}]}"#,
            // Not schemas, though they look like them.
            r#"{"enum":[{"properties":{"a":1}}],"const":{"properties":{}},"examples":[{"properties":{}}],"items":7,"anyOf":{}}"#,
        ] {
            check(given, given);
        }
        assert_eq!(closed("{"), "{");
    }

    #[test]
    fn strict_schemas_are_closed_and_require_all() {
        let strict = r#"{"type":"object","properties":{"a":{"type":["string","null"]},"b":{"anyOf":[{"type":"null"},
            {"type":"object","properties":{},"additionalProperties":false}]}},"required":["b","a"],"additionalProperties":false,"$defs":{}}"#;
        assert!(may_be_strict(strict));
        for (from, to) in [
            (r#"["b","a"]"#, r#"["b"]"#),
            (r#""required":["b","a"],"additionalProperties":false"#, r#""required":["b","a"]"#),
            (r#""properties":{},"additionalProperties":false"#, r#""properties":{},"additionalProperties":true"#),
            (r#""$defs":{}"#, r#""$defs":{"c":{"type":"object"}}"#),
            (r#""type":["string","null"]"#, r#""default":null"#),
            (r#""$defs":{}"#, r#""oneOf":[]"#),
        ] {
            assert_eq!(strict.matches(from).count(), 1, "{from}");
            assert!(!may_be_strict(&strict.replace(from, to)), "{to}");
        }
        for given in ["", "true", r#"{"type":"object"}"#, r#"{"items":{"properties":{"a":{}}}}"#] {
            assert!(!may_be_strict(given), "{given}");
        }
    }
}
