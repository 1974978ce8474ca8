//! JSON schemas by the rules of providers that hold an answer, or a call's arguments, to them.
//!
//! OpenAI takes a strict schema only if each of its objects forbids other properties and requires all of its own.
//! Anthropic and Bedrock take no schema with an object that leaves other properties open. Both refuse keywords. Clients
//! of other APIs keep none of these rules. So keywords that are refused move into descriptions (`schema_subset`), open
//! objects are closed for Anthropic and Bedrock, and what cannot be said is sent without `strict`.

use std::borrow::Cow;

use crate::schema_subset::{Rewritten, Subset, rewritten};
use penstock_types::json::{Fault, Kind, Reader};

/// Schema that an answer of Anthropic or Bedrock is held to.
pub(crate) fn held(schema: &str) -> String {
    rewritten(schema, Subset::Anthropic).text
}

/// Parameters of a function for Anthropic and Bedrock, and whether the function is strict there: an object without
/// properties where none are `given`. A schema that cannot be held to is sent as it is, without `strict`.
pub(crate) fn parameters(given: Option<&str>, strict: bool) -> (Cow<'_, str>, bool) {
    let schema = given.filter(|schema| *schema != "{}").unwrap_or(r#"{"type":"object","properties":{}}"#);
    if strict {
        let Rewritten { text, fits } = rewritten(schema, Subset::Anthropic);
        if fits {
            return (Cow::Owned(text), true);
        }
    }
    (Cow::Borrowed(schema), false)
}

/// Schema that OpenAI takes with `strict`; `None`: it takes this one only without. Cost: linear in `schema`, times its
/// depth.
pub(crate) fn strict_at_openai(schema: &str) -> Option<String> {
    let text = rewritten(schema, Subset::OpenAi).text;
    may_be_strict(&text, true).then_some(text)
}

/// Returns true if a provider takes the schema with `strict`. A keyword that OpenAI refuses makes it false. `at_openai`:
/// the provider is OpenAI or Azure, which have rules of their own for the whole schema and for references. Cost: linear
/// in `schema`.
pub(crate) fn may_be_strict(schema: &str, at_openai: bool) -> bool {
    let read = Reader::new(schema.as_bytes()).and_then(|mut reader| is_strict(&mut reader, at_openai, true));
    read.unwrap_or(false)
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

/// `is_root`: the whole schema, which has to be an object and no choice of several at OpenAI.
fn is_strict(reader: &mut Reader<'_>, at_openai: bool, is_root: bool) -> Result<bool, Fault> {
    if reader.kind()? != Kind::Object {
        return reader.skip().map(|()| false);
    }
    let (mut strict, mut is_object, mut is_closed) = (true, false, false);
    let (mut named, mut required) = (Vec::new(), std::collections::HashSet::new());
    let (mut keywords, mut is_reference, mut is_choice) = (0, false, false);
    reader.object(|reader, key| {
        let kind = reader.kind()?;
        keywords += 1;
        is_reference |= key == "$ref";
        is_choice |= key == "anyOf";
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
                strict &= is_strict(reader, at_openai, false)?;
                Ok(())
            })?,
            ("$defs" | "definitions", Kind::Object) => reader.object(|reader, _| {
                strict &= is_strict(reader, at_openai, false)?;
                Ok(())
            })?,
            ("anyOf", Kind::Array) => reader.array(|reader, _| {
                strict &= is_strict(reader, at_openai, false)?;
                Ok(())
            })?,
            ("items", _) => strict &= is_strict(reader, at_openai, false)?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let is_object = is_object || !named.is_empty();
    // "$ref cannot have keywords {'description'}"
    strict &= !at_openai || !is_reference || keywords == 1;
    strict &= !at_openai || !is_root || (is_object && !is_choice);
    Ok(strict && (!is_object || (is_closed && named.iter().all(|name| required.contains(name)))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strict_schemas_are_closed_and_require_all() {
        let strict = r#"{"type":"object","properties":{"a":{"type":["string","null"]},"b":{"anyOf":[{"type":"null"},
            {"type":"object","properties":{},"additionalProperties":false}]}},"required":["b","a"],"additionalProperties":false,"$defs":{}}"#;
        assert!(may_be_strict(strict, true));
        for (from, to) in [
            (r#"["b","a"]"#, r#"["b"]"#),
            (r#""required":["b","a"],"additionalProperties":false"#, r#""required":["b","a"]"#),
            (r#""properties":{},"additionalProperties":false"#, r#""properties":{},"additionalProperties":true"#),
            (r#""$defs":{}"#, r#""$defs":{"c":{"type":"object"}}"#),
            (r#""type":["string","null"]"#, r#""default":null"#),
            (r#""$defs":{}"#, r#""oneOf":[]"#),
            (r#""$defs":{}"#, r#""anyOf":[]"#),
            (r#""$defs":{}"#, r##""$defs":{"c":{"$ref":"#","description":"d"}}"##),
        ] {
            assert_eq!(strict.matches(from).count(), 1, "{from}");
            assert!(!may_be_strict(&strict.replace(from, to), true), "{to}");
        }
        // Rules of OpenAI's own, which compatible servers do not have.
        for given in [
            r#"{"type":"array","items":{"type":"string"}}"#,
            r#"{"anyOf":[{"type":"string"},{"type":"null"}]}"#,
            r##"{"type":"object","properties":{"a":{"$ref":"#/$defs/A","description":"d"}},"required":["a"],"additionalProperties":false,"$defs":{"A":{"type":"null"}}}"##,
        ] {
            assert_eq!([true, false].map(|at_openai| may_be_strict(given, at_openai)), [false, true], "{given}");
        }
        for given in
            ["", "true", r#"{"type":"string"}"#, r#"{"type":"object"}"#, r#"{"items":{"properties":{"a":{}}}}"#]
        {
            assert!(!may_be_strict(given, true), "{given}");
        }
    }

    #[test]
    fn a_function_is_strict_where_its_schema_can_be_held_to() {
        let bounded = r#"{"type":"object","properties":{"a":{"type":"integer","minimum":1}},"required":["a"]}"#;
        let (schema, strict) = parameters(Some(bounded), true);
        assert!(
            strict && schema.contains(r#""description":"{minimum: 1}""#) && !schema.contains(r#""minimum""#),
            "{schema}"
        );
        assert_eq!(parameters(Some(bounded), false), (Cow::Borrowed(bounded), false), "nobody is held to it");
        let open = r#"{"type":"object","properties":{"a":{"type":"object"}}}"#;
        assert_eq!(parameters(Some(open), true), (Cow::Borrowed(open), false));
        let (schema, strict) = parameters(None, true);
        assert_eq!((&*schema, strict), (r#"{"type":"object","properties":{},"additionalProperties":false}"#, true));
    }

    #[test]
    fn openai_is_told_bounds_that_it_refuses() {
        let schema = |more: &str| {
            format!(
                r#"{{"type":"object","properties":{{"a":{{"type":"string"{more}}}}},"required":["a"],"additionalProperties":false}}"#
            )
        };
        let told = strict_at_openai(&schema(r#","maxLength":9"#)).expect("strict");
        assert_eq!(told, schema(r#","description":"{maxLength: 9}""#));
        assert_eq!(strict_at_openai(&schema(r#","pattern":"a+""#)), Some(schema(r#","pattern":"a+""#)));
        assert_eq!(strict_at_openai(&schema(r#","not":{}"#)), None);
    }
}
