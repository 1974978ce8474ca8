//! JSON schemas rewritten for providers that take a part of JSON Schema only.
//!
//! A keyword that the provider refuses moves into `description`, where the model reads it, as Anthropic's and OpenAI's
//! own SDKs do: `{"type":"integer","minimum":1}` becomes `{"type":"integer","description":"{minimum: 1}"}`. What moves
//! is a request and no longer enforced. What cannot be said at all (an object that is open, or has members by patterns
//! of their names, a schema that contains itself) is left as it is and reported ([`Rewritten::fits`]).
//!
//! Sources, read 2026-11: platform.claude.com, "Structured outputs", JSON Schema limitations, and `transform_schema` of
//! anthropic-sdk-python; platform.openai.com, "Structured model outputs", supported schemas.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use bytes::{BufMut, BytesMut};

use crate::answer_json::{Object, list};
use penstock_types::json::{Fault, Kind, Reader};
use penstock_types::write;

/// Provider whose part of JSON Schema a schema is rewritten for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subset {
    /// Anthropic and Bedrock. Every object is closed.
    Anthropic,
    /// OpenAI and Azure.
    OpenAi,
}

/// Schema as a provider takes it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rewritten {
    /// Text of the schema.
    pub(crate) text: String,
    /// False if a part of the schema cannot be said to the provider.
    pub(crate) fits: bool,
}

/// Rewrites a schema. Text that cannot be read is returned as it is. Cost: linear in `schema`, times its depth, which
/// the reader bounds.
pub(crate) fn rewritten(schema: &str, subset: Subset) -> Rewritten {
    let mut walk = Walk { subset, fits: true, within: ROOT, definitions: HashMap::new(), references: Vec::new() };
    let mut out = BytesMut::with_capacity(schema.len() + 64);
    match Reader::new(schema.as_bytes()).and_then(|mut reader| walk.put(&mut reader, &mut out, true)) {
        Ok(_) => {
            let fits = walk.fits && !walk.is_recursive();
            Rewritten { text: String::from_utf8_lossy(&out).into_owned(), fits } // only text was written
        }
        Err(_) => Rewritten { text: schema.to_owned(), fits: false },
    }
}

/// Keywords that OpenAI refuses in a strict schema ("'minLength' is not permitted"), and that bound a value only.
const OPENAI_MOVES: [&str; 9] = [
    "maxContains",
    "maxLength",
    "maxProperties",
    "minContains",
    "minLength",
    "minProperties",
    "propertyNames",
    "unevaluatedItems",
    "uniqueItems",
];
/// Formats of strings that OpenAI knows.
const OPENAI_FORMATS: [&str; 9] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uuid"];
/// Formats of strings that Anthropic knows.
const ANTHROPIC_FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];
/// Largest count of a quantifier in a pattern that is sent to Anthropic, which refuses "large ranges".
const REPEATS_MAX: u32 = 100;

/// Fate of a keyword that holds no schemas.
enum Fate {
    Stays,
    /// The keyword moves into the description.
    Moves,
    /// The keyword says nothing about a value.
    Goes,
}

impl Subset {
    fn fate(self, key: &str, kind: Kind, text: &str) -> Fate {
        match self {
            Self::Anthropic => anthropic_fate(key, kind, text),
            Self::OpenAi if OPENAI_MOVES.contains(&key) => Fate::Moves,
            Self::OpenAi if key == "format" && !is_one_of(text, &OPENAI_FORMATS) => Fate::Moves,
            Self::OpenAi => Fate::Stays,
        }
    }
}

fn anthropic_fate(key: &str, kind: Kind, text: &str) -> Fate {
    let stays = match key {
        "type" | "title" | "description" | "default" | "required" | "additionalProperties" | "$ref" => true,
        "$schema" | "$id" | "$anchor" | "$comment" => return Fate::Goes,
        "enum" => kind == Kind::Array && is_enum_of_primitives(text),
        "const" => !matches!(kind, Kind::Object | Kind::Array),
        "format" => is_one_of(text, &ANTHROPIC_FORMATS),
        "pattern" => string_of(text).is_some_and(|pattern| is_simple(&pattern)),
        "minItems" => matches!(text, "0" | "1"),
        _ => false,
    };
    if stays { Fate::Stays } else { Fate::Moves }
}

fn string_of(text: &str) -> Option<Cow<'_, str>> {
    Reader::new(text.as_bytes()).and_then(|mut reader| reader.string()).ok()
}

fn is_one_of(text: &str, names: &[&str]) -> bool {
    string_of(text).is_some_and(|name| names.contains(&&*name))
}

fn is_enum_of_primitives(text: &str) -> bool {
    let (mut count, mut plain) = (0, true);
    let read = Reader::new(text.as_bytes()).and_then(|mut reader| {
        reader.array(|reader, _| {
            count += 1;
            plain &= !matches!(reader.kind()?, Kind::Object | Kind::Array);
            reader.skip()
        })
    });
    read.is_ok() && plain && count > 0
}

/// Returns true for a regular expression of what Anthropic documents: anchors, classes, groups, simple quantifiers.
fn is_simple(pattern: &str) -> bool {
    let mut rest = pattern.chars().peekable();
    while let Some(one) = rest.next() {
        let fits = match one {
            '\\' => rest.next().is_some_and(|what| matches!(what, 'd' | 'w' | 's') || what.is_ascii_punctuation()),
            // Assertions, names and flags begin so.
            '(' => rest.peek() != Some(&'?'),
            '{' => {
                let counts: String = rest.by_ref().take_while(|one| *one != '}').collect();
                counts.split(',').all(|count| {
                    let count = count.trim();
                    count.is_empty() || count.parse().is_ok_and(|count: u32| count <= REPEATS_MAX)
                })
            }
            _ => true,
        };
        if !fits {
            return false;
        }
    }
    true
}

/// Number of a definition, in the order in which they begin.
type Definition = usize;

/// The schema itself.
const ROOT: Definition = 0;

/// State of one rewriting. Definitions are numbered: the pointers of all definitions and of what holds each reference
/// would be as long as the schema, times the number of both.
struct Walk {
    subset: Subset,
    fits: bool,
    /// Definition that is read.
    within: Definition,
    /// Definitions by the one around them, and the two parts of a pointer that lead from there: the keyword and the name,
    /// with its escapes.
    definitions: HashMap<(Definition, String), Definition>,
    /// Targets of references, each with the definition that holds it.
    references: Vec<(Definition, String)>,
}

/// Keywords of one schema, collected before they are written: what stands beside one decides what becomes of it.
#[derive(Default)]
struct Parts<'a> {
    /// Keywords that stay, with the text of their values.
    stays: Vec<(Cow<'a, str>, BytesMut)>,
    /// Keywords that move into the description.
    moves: Vec<(Cow<'a, str>, &'a str)>,
    /// True if `type` is or names `object`, or properties are named.
    is_object: bool,
    /// The only member of `allOf`, if that is a reference.
    sole_reference: Option<BytesMut>,
}

impl Parts<'_> {
    fn has(&self, key: &str) -> bool {
        self.stays.iter().any(|(name, _)| name == key)
    }
}

impl Walk {
    /// Copies a schema; `closes` is false where the object's properties are named by other schemas, too. True: the schema
    /// is a reference.
    fn put(&mut self, reader: &mut Reader<'_>, out: &mut BytesMut, closes: bool) -> Result<bool, Fault> {
        if reader.kind()? != Kind::Object {
            out.put_slice(reader.raw()?.text.as_bytes());
            return Ok(false);
        }
        let mut parts = Parts::default();
        reader.object(|reader, key| self.keyword(reader, key, &mut parts))?;
        if self.subset == Subset::Anthropic {
            self.settle(&mut parts, closes);
        }
        let is_reference = parts.has("$ref");
        write_parts(parts, out);
        Ok(is_reference)
    }

    fn keyword<'a>(&mut self, reader: &mut Reader<'a>, key: Cow<'a, str>, parts: &mut Parts<'a>) -> Result<(), Fault> {
        let (kind, mut text) = (reader.kind()?, BytesMut::new());
        match (&*key, kind) {
            ("properties" | "$defs" | "definitions", Kind::Object) => {
                let is_definition = key != "properties";
                parts.is_object |= !is_definition;
                let mut map = Object::open(&mut text);
                reader.object(|reader, name| {
                    if !is_definition {
                        return self.put(reader, map.key(&name), true).map(drop);
                    }
                    let parts = format!("{key}/{}", name.replace('~', "~0").replace('/', "~1"));
                    let next = self.definitions.len() + 1;
                    let number = *self.definitions.entry((self.within, parts)).or_insert(next);
                    let outer = std::mem::replace(&mut self.within, number);
                    let put = self.put(reader, map.key(&name), true);
                    self.within = outer;
                    put.map(drop)
                })?;
                map.close();
            }
            ("items", Kind::Object) => drop(self.put(reader, &mut text, true)?),
            ("additionalProperties", Kind::Object) => {
                self.fits = false;
                self.put(reader, &mut text, true)?;
            }
            // A closed object without these members could only be empty.
            ("patternProperties", Kind::Object) if self.subset == Subset::Anthropic => {
                self.fits = false;
                text.put_slice(reader.raw()?.text.as_bytes());
            }
            ("anyOf" | "oneOf" | "allOf", Kind::Array) => {
                let (closes, mut members, mut references) = (key != "allOf", Vec::new(), 0);
                reader.array(|reader, _| {
                    let mut member = BytesMut::new();
                    references += usize::from(self.put(reader, &mut member, closes)?);
                    members.push(member);
                    Ok(())
                })?;
                if key == "allOf" && references > 0 {
                    match members.as_slice() {
                        [one] => parts.sole_reference = Some(one.clone()),
                        _ => self.fits = false,
                    }
                }
                list(&mut text, &members, |out, member| out.put_slice(member));
            }
            _ => {
                let raw = reader.raw()?.text;
                match self.subset.fate(&key, kind, raw) {
                    Fate::Goes => return Ok(()),
                    Fate::Moves => {
                        parts.moves.push((key, raw));
                        return Ok(());
                    }
                    Fate::Stays => {}
                }
                match &*key {
                    "type" => parts.is_object |= raw.contains("\"object\""),
                    "additionalProperties" => self.fits &= raw == "false",
                    "$ref" => self.references.extend(string_of(raw).map(|to| (self.within, to.into_owned()))),
                    _ => {}
                }
                text.put_slice(raw.as_bytes());
            }
        }
        parts.stays.push((key, text));
        Ok(())
    }

    /// Makes the keywords of one schema what Anthropic takes.
    fn settle(&mut self, parts: &mut Parts<'_>, closes: bool) {
        let is_definitions = |key: &str| matches!(key, "$defs" | "definitions");
        // Generators wrap a reference to put a description beside it.
        if let Some(reference) = parts.sole_reference.take() {
            let is_plain =
                |key: &str| is_definitions(key) || matches!(key, "allOf" | "title" | "description" | "default");
            if parts.stays.iter().all(|(key, _)| is_plain(key)) {
                parts.stays.retain(|(key, _)| is_definitions(key));
                let target = Reader::new(&reference).and_then(|mut reader| {
                    let mut target = "null";
                    reader.object(|reader, key| {
                        let text = reader.raw()?.text;
                        if key == "$ref" {
                            target = text;
                        }
                        Ok(())
                    })?;
                    Ok(BytesMut::from(target))
                });
                parts.stays.extend(target.ok().map(|target| (Cow::Borrowed("$ref"), target)));
            } else {
                self.fits = false;
            }
        }
        if parts.has("$ref") {
            // A reference stands alone, as in the SDK: its own description is that of its target.
            let structure =
                ["properties", "items", "anyOf", "oneOf", "allOf", "enum", "const", "required", "additionalProperties"];
            let is_structure = |key: &str| structure.contains(&key);
            if parts.stays.iter().any(|(key, _)| is_structure(key)) {
                self.fits = false;
            } else {
                parts.stays.retain(|(key, _)| key == "$ref" || is_definitions(key));
                parts.moves.clear();
                return;
            }
        }
        match parts.has("anyOf") {
            true => self.fits &= !parts.has("oneOf"),
            false => parts.stays.iter_mut().for_each(|(key, _)| {
                if key == "oneOf" {
                    *key = Cow::Borrowed("anyOf");
                }
            }),
        }
        let says = ["additionalProperties", "allOf", "anyOf", "oneOf", "$ref"];
        let composed = says.iter().any(|key| parts.has(key))
            || parts.moves.iter().any(|(key, _)| matches!(&**key, "if" | "then" | "else" | "dependentSchemas"));
        if closes && parts.has("properties") && !composed {
            parts.stays.push((Cow::Borrowed("additionalProperties"), BytesMut::from("false")));
        }
        self.fits &= !parts.is_object || parts.has("additionalProperties");
    }

    /// Definition that a reference leads to; `None`: it leads to none. Cost: linear in `target`.
    fn definition(&self, target: &str) -> Option<Definition> {
        let pointer = target.strip_prefix('#').filter(|pointer| pointer.is_empty() || pointer.starts_with('/'))?;
        let mut parts = pointer.split('/').skip(1);
        let mut at = ROOT;
        while let Some(keyword) = parts.next() {
            at = *self.definitions.get(&(at, format!("{keyword}/{}", parts.next()?)))?;
        }
        Some(at)
    }

    /// Returns true if a definition contains itself, or a reference leads to no definition.
    fn is_recursive(&self) -> bool {
        let mut edges: HashMap<Definition, Vec<Definition>> = HashMap::new();
        for (from, to) in &self.references {
            let Some(to) = self.definition(to) else { return true };
            edges.entry(*from).or_default().push(to);
        }
        // Depth first: a definition that is met again while it is being followed contains itself.
        let mut done: HashSet<Definition> = HashSet::new();
        for start in edges.keys() {
            let (mut path, mut open) = (vec![(*start, 0)], HashSet::from([*start]));
            while let Some((at, next)) = path.pop() {
                let to = edges.get(&at).and_then(|to| to.get(next)).copied();
                let Some(to) = to.filter(|_| !done.contains(&at)) else {
                    open.remove(&at);
                    done.insert(at);
                    continue;
                };
                path.push((at, next + 1));
                if open.contains(&to) {
                    return true;
                }
                if !done.contains(&to) {
                    open.insert(to);
                    path.push((to, 0));
                }
            }
        }
        false
    }
}

/// Writes the keywords of a schema, with the description that names those which moved there.
fn write_parts(parts: Parts<'_>, out: &mut BytesMut) {
    let Parts { mut stays, moves, .. } = parts;
    if !moves.is_empty() {
        let named: Vec<String> = moves.iter().map(|(key, text)| format!("{key}: {text}")).collect();
        let mut said = format!("{{{}}}", named.join(", "));
        let place = stays.iter().position(|(key, _)| key == "description");
        if let Some(before) = place.and_then(|at| std::str::from_utf8(&stays[at].1).ok()).and_then(string_of) {
            said = format!("{before}\n\n{said}");
        }
        let mut text = BytesMut::new();
        write::string(&mut text, &said);
        match place {
            Some(at) => stays[at].1 = text,
            None => stays.push((Cow::Borrowed("description"), text)),
        }
    }
    let mut object = Object::open(out);
    for (key, text) in &stays {
        object.key(key).put_slice(text);
    }
    object.close();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(given: &str, expected: &str, fits: bool) {
        let made = rewritten(given, Subset::Anthropic);
        assert_eq!((made.text.as_str(), made.fits), (expected, fits), "{given}");
        if fits {
            serde_json::from_str::<serde_json::Value>(&made.text).expect("JSON");
            assert_eq!(rewritten(&made.text, Subset::Anthropic), made, "rewritten once");
        }
    }

    #[test]
    fn objects_that_name_their_properties_are_closed() {
        check("true", "true", true);
        check(r#"{"type":"string"}"#, r#"{"type":"string"}"#, true);
        check(
            r#"{"type":"object","properties":{}}"#,
            r#"{"type":"object","properties":{},"additionalProperties":false}"#,
            true,
        );
        check(
            r#"{"properties":{"properties":{"type":"array","items":{"properties":{"a":{}}}}},"$defs":{"x":{"properties":{"b":true}}}}"#,
            concat!(
                r#"{"properties":{"properties":{"type":"array","items":{"properties":{"a":{}},"additionalProperties":false}}},"#,
                r#""$defs":{"x":{"properties":{"b":true},"additionalProperties":false}},"additionalProperties":false}"#
            ),
            true,
        );
        check(
            r#"{"anyOf":[{"properties":{"a":{}}},{"type":"null"}]}"#,
            r#"{"anyOf":[{"properties":{"a":{}},"additionalProperties":false},{"type":"null"}]}"#,
            true,
        );
    }

    /// The words of the SDK: what is refused is said in the description, behind what the client says there.
    #[test]
    fn what_is_refused_moves_into_the_description() {
        for (given, expected) in [
            (
                r#"{"type":"integer","minimum":1,"maximum":10,"description":"A number"}"#,
                r#"{"type":"integer","description":"A number\n\n{minimum: 1, maximum: 10}"}"#,
            ),
            (
                r#"{"type":"number","exclusiveMinimum":0,"exclusiveMaximum":1,"multipleOf":0.5}"#,
                r#"{"type":"number","description":"{exclusiveMinimum: 0, exclusiveMaximum: 1, multipleOf: 0.5}"}"#,
            ),
            (
                r#"{"type":"string","minLength":2,"maxLength":5,"format":"iri","title":"A \"t\""}"#,
                r#"{"type":"string","title":"A \"t\"","description":"{minLength: 2, maxLength: 5, format: \"iri\"}"}"#,
            ),
            (
                r#"{"type":"array","items":{"type":"string","maxLength":3},"minItems":2,"maxItems":4,"uniqueItems":true}"#,
                concat!(
                    r#"{"type":"array","items":{"type":"string","description":"{maxLength: 3}"},"#,
                    r#""description":"{minItems: 2, maxItems: 4, uniqueItems: true}"}"#
                ),
            ),
            (
                r#"{"$schema":"https://json-schema.org/draft/2020-12/schema","properties":{"description":{"type":"string","pattern":"(?=a)b"}},"minProperties":1}"#,
                concat!(
                    r#"{"properties":{"description":{"type":"string","description":"{pattern: \"(?=a)b\"}"}},"#,
                    r#""additionalProperties":false,"description":"{minProperties: 1}"}"#
                ),
            ),
            (
                r#"{"oneOf":[{"type":"string","examples":["a"]},{"enum":[{"a":1}],"type":"array"}]}"#,
                r#"{"anyOf":[{"type":"string","description":"{examples: [\"a\"]}"},{"type":"array","description":"{enum: [{\"a\":1}]}"}]}"#,
            ),
            (
                r##"{"properties":{"a":{"allOf":[{"$ref":"#/$defs/A"}],"description":"d"},"b":{"$ref":"#/$defs/A","description":"e","minimum":1}},"$defs":{"A":{"type":"integer","maximum":3}}}"##,
                concat!(
                    r##"{"properties":{"a":{"$ref":"#/$defs/A"},"b":{"$ref":"#/$defs/A"}},"##,
                    r#""$defs":{"A":{"type":"integer","description":"{maximum: 3}"}},"additionalProperties":false}"#
                ),
            ),
            (
                r##"{"allOf":[{"$ref":"#/$defs/A","$defs":{}}],"$defs":{"A":{"type":"null"}}}"##,
                r##"{"$defs":{"A":{"type":"null"}},"$ref":"#/$defs/A"}"##,
            ),
        ] {
            check(given, expected, true);
        }
    }

    #[test]
    fn what_is_taken_stays() {
        for given in [
            r#"{"type":"array","minItems":1,"items":{"type":"string","format":"date-time","default":"x"}}"#,
            r#"{"type":["string","null"],"pattern":"^[A-Z]{2,3}\\-\\d+(a|b)?$"}"#,
            r#"{"enum":["a",1,true,null],"const":1.5}"#,
            r##"{"$ref":"#/$defs/a","$defs":{"a":{"type":"null"}}}"##,
        ] {
            check(given, given, true);
        }
        assert_eq!(rewritten("{", Subset::Anthropic), Rewritten { text: "{".into(), fits: false });
        for (pattern, simple) in [
            ("a{1,100}", true),
            ("a{101}", false),
            (r"\bword", false),
            (r"(a)\1", false),
            ("(?:a)", false),
            (r"\p{L}", false),
            (r"[\]\/.]", true),
        ] {
            assert_eq!(is_simple(pattern), simple, "{pattern}");
        }
    }

    #[test]
    fn what_cannot_be_said_is_told() {
        for given in [
            r#"{"type":"object"}"#,
            r#"{"type":["object","null"]}"#,
            r#"{"properties":{"a":{}},"additionalProperties":true}"#,
            r#"{"properties":{"a":{"type":"object","additionalProperties":{"type":"string"}}},"additionalProperties":false}"#,
            r##"{"properties":{"a":{}},"$ref":"#/$defs/b","$defs":{"b":{}}}"##,
            r#"{"allOf":[{"properties":{"a":{}}},{"properties":{"b":{}}}]}"#,
            r##"{"$defs":{"a":{"properties":{"b":{"$ref":"#/$defs/a"}},"additionalProperties":false}},"$ref":"#/$defs/a"}"##,
            r##"{"properties":{"a":{"$ref":"#"}},"additionalProperties":false}"##,
            r#"{"$ref":"https://example.com/a.json"}"#,
            r##"{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/c"},"c":{"$ref":"#/$defs/a"}}}"##,
            r#"{"type":"object","patternProperties":{"^k":{"type":"number"}},"additionalProperties":false}"#,
            r##"{"$ref":"#/$defs/b","required":["x"],"$defs":{"b":{"properties":{"x":{}},"additionalProperties":false}}}"##,
        ] {
            check(given, given, false);
        }
        let diamond = r##"{"$defs":{"a":{"anyOf":[{"$ref":"#/$defs/b"},{"$ref":"#/$defs/c"}]},"b":{"$ref":"#/$defs/d"},"c":{"$ref":"#/$defs/d"},"d":{"type":"null"}},"$ref":"#/$defs/a"}"##;
        check(diamond, diamond, true);
        let depth = |n: usize| format!("{}{}", r#"{"items":"#.repeat(n), "{}".to_owned() + &"}".repeat(n));
        check(&depth(60), &depth(60), true);
        assert!(!rewritten(&depth(70), Subset::Anthropic).fits, "deeper than the reader goes");
    }

    #[test]
    fn references_lead_to_definitions_wherever_they_are() {
        let nested = |target: &str| {
            let inner = r##""$defs":{"b/c~":{"type":"null"}},"type":"string""##;
            let given = format!(
                r##"{{"$defs":{{"a":{{{inner}}}}},"definitions":{{"a":{{"type":"null"}}}},"$ref":"{target}"}}"##
            );
            rewritten(&given, Subset::Anthropic).fits
        };
        for target in ["#/$defs/a", "#/definitions/a", "#/$defs/a/$defs/b~1c~0"] {
            assert!(nested(target), "{target}");
        }
        for target in
            ["#/$defs/b", "#/$defs", "#/$defs/", "#/$defs/a/", "#/$defs/a/$defs/b/c~", "#x/$defs/a", "", "/$defs/a"]
        {
            assert!(!nested(target), "{target}");
        }
    }

    /// A schema of 2 MB with a name as long as all of its references together: copies of the name for each would be 50 GB.
    #[test]
    fn a_long_name_costs_its_length_once() {
        let name = "n".repeat(1 << 20);
        let references = vec![r##"{"$ref":"#/$defs/x"}"##; 50_000].join(",");
        let given = format!(
            r##"{{"$defs":{{"x":{{"type":"null"}},"{name}":{{"anyOf":[{references}],"$defs":{{"y":{{"type":"null"}}}}}}}},"$ref":"#/$defs/{name}"}}"##
        );
        let made = rewritten(&given, Subset::OpenAi);
        assert!(made.fits && made.text.len() == given.len());
        let definitions: Vec<String> = (0..50_000).map(|n| format!(r#""{n}":{{}}"#)).collect();
        let given = format!(
            r##"{{"$defs":{{"{name}":{{"type":"null","$defs":{{{}}}}}}},"$ref":"#/$defs/{name}/$defs/49999"}}"##,
            definitions.join(",")
        );
        assert!(rewritten(&given, Subset::OpenAi).fits);
    }

    #[test]
    fn openai_keeps_more() {
        let given = r#"{"type":"object","properties":{"a":{"type":"string","minLength":1,"pattern":"a","format":"uri"},"b":{"type":"integer","minimum":1}},"additionalProperties":false}"#;
        let made = rewritten(given, Subset::OpenAi);
        let expected = r#"{"type":"object","properties":{"a":{"type":"string","pattern":"a","description":"{minLength: 1, format: \"uri\"}"},"b":{"type":"integer","minimum":1}},"additionalProperties":false}"#;
        assert_eq!(made.text, expected);
    }
}
