//! Texts inside of JSON that clients send: tools, schemas, arguments of templates.
//!
//! Not every string there is a text. Names of properties, and the values of keywords such as `type` and `required`, are
//! names: something else refers to them, so changing one breaks the whole. Names are shown and never changed. Words of
//! the format, which nobody wrote (keywords, and types such as `string`), are not shown.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

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
/// Keywords for the form of a string, which the values of an `enum` or a `const` may no longer have once they are changed.
const FORMS: [&str; 4] = ["format", "pattern", "minLength", "maxLength"];
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
    let mut reader = Reader::new(json.as_bytes()).ok()?;
    let mut walk = Walk { visit, out: BytesMut::with_capacity(json.len()), changes: 0, cuts: Vec::new() };
    walk.value(&mut reader, (place, false)).ok()?;
    reader.end().ok()?;
    walk.made()
}

/// Walk through JSON that writes it anew, with other texts in it.
struct Walk<'w, 'v> {
    visit: &'w mut Visit<'v>,
    out: BytesMut,
    /// Number of texts that have changed.
    changes: usize,
    /// Ranges of `out` that are left out at the end, in one pass.
    cuts: Vec<Range<usize>>,
}

/// The `const` of a schema: its JSON, and whether it has changed.
type Const = Option<(Vec<u8>, bool)>;

impl Walk<'_, '_> {
    /// Writes a value; returns the `const` of one that is a schema.
    fn value(&mut self, reader: &mut Reader<'_>, (place, is_name): (Place, bool)) -> Result<Const, Fault> {
        match reader.kind()? {
            Kind::String => {
                let text = reader.string()?;
                let changed = (self.visit)(is_name, &text);
                self.changes += usize::from(changed.is_some());
                write::string(&mut self.out, &changed.map_or(text, Cow::Owned));
            }
            Kind::Object => return self.object(reader, place),
            Kind::Array => self.array(reader, |walk, reader| {
                walk.value(reader, (place, is_name))?;
                Ok(true)
            })?,
            Kind::Null | Kind::Bool | Kind::Number => self.out.put_slice(reader.raw()?.text.as_bytes()),
        }
        Ok(None)
    }

    fn object(&mut self, reader: &mut Reader<'_>, place: Place) -> Result<Const, Fault> {
        let (mut open, mut count) = (b'{', 0);
        let (mut forms, mut has_changed, mut fixed) = (Vec::new(), false, None);
        reader.object(|reader, key| {
            self.out.put_u8(std::mem::replace(&mut open, b','));
            if !place.knows(&key) {
                (self.visit)(true, &key);
            }
            let start = self.out.len();
            write::string(&mut self.out, &key);
            self.out.put_u8(b':');
            let (kind, changes, at) = (reader.kind()?, self.changes, self.out.len());
            match &*key {
                "enum" if place == Place::Schema && kind == Kind::Array => self.choices(reader)?,
                "oneOf" | "anyOf" if place == Place::Schema && kind == Kind::Array => self.alternatives(reader)?,
                _ => drop(self.value(reader, place.under(&key))?),
            }
            if place == Place::Schema {
                let is_changed = self.changes > changes;
                if key == "const" {
                    fixed = Some((self.out[at..].to_vec(), is_changed));
                }
                has_changed |= is_changed && ["enum", "const"].contains(&&*key);
                if FORMS.contains(&&*key) && !matches!(kind, Kind::Object | Kind::Array) {
                    forms.push((count, start..self.out.len()));
                }
            }
            count += 1;
            Ok(())
        })?;
        self.out.put_slice(if open == b'{' { b"{}" } else { b"}" });
        if has_changed {
            // Each with a comma: the one in front, or behind the first members of the object.
            let cuts = forms.into_iter().enumerate().map(|(at, (place, Range { start, end }))| match at == place {
                true => start..end + 1,
                false => start - 1..end,
            });
            self.cuts.extend(cuts);
        }
        Ok(fixed)
    }

    /// Writes an array of those elements for which `element` returns true.
    fn array(
        &mut self,
        reader: &mut Reader<'_>,
        mut element: impl FnMut(&mut Self, &mut Reader<'_>) -> Result<bool, Fault>,
    ) -> Result<(), Fault> {
        let mut open = b'[';
        reader.array(|reader, _| {
            let before = self.out.len();
            self.out.put_u8(open);
            match element(self, reader)? {
                true => open = b',',
                false => {
                    self.out.truncate(before);
                    while self.cuts.last().is_some_and(|cut| cut.start >= before) {
                        self.cuts.pop();
                    }
                }
            }
            Ok(())
        })?;
        self.out.put_slice(if open == b'[' { b"[]" } else { b"]" });
        Ok(())
    }

    /// Writes the values of an `enum`, of which no two may be the same: those that have become so are left out.
    fn choices(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        let mut seen = HashSet::new();
        self.array(reader, |walk, reader| {
            let start = walk.out.len();
            walk.value(reader, (Place::Data, false))?;
            Ok(seen.insert(walk.out[start..].to_vec()))
        })
    }

    /// Writes the schemas of a `oneOf` or `anyOf`. Those whose `const` has become the same as an earlier one's are left out: a
    /// value of that kind would be of more than one.
    fn alternatives(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        let mut seen: HashMap<Vec<u8>, bool> = HashMap::new();
        self.array(reader, |walk, reader| {
            let Some((fixed, is_changed)) = walk.value(reader, (Place::Schema, false))? else { return Ok(true) };
            let is_same = seen.get(&fixed).is_some_and(|earlier| *earlier || is_changed);
            *seen.entry(fixed).or_default() |= is_changed;
            Ok(!is_same)
        })
    }

    /// The JSON without what is left out of it.
    fn made(mut self) -> Option<String> {
        if self.cuts.is_empty() {
            return String::from_utf8(self.out.into()).ok();
        }
        self.cuts.sort_unstable_by_key(|cut| cut.start);
        let (mut kept, mut from) = (Vec::with_capacity(self.out.len()), 0);
        for cut in self.cuts {
            kept.extend_from_slice(&self.out[from..cut.start]);
            from = cut.end;
        }
        kept.extend_from_slice(&self.out[from..]);
        String::from_utf8(kept).ok()
    }
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
    fn a_schema_whose_values_change_can_still_be_met() {
        check(
            Place::Schema,
            r#"{"format":"email","maxLength":6,"type":"string","minLength":6,"enum":["a@b.de"],"pattern":"@"}"#,
            "email @",
            r#"{"type":"string","enum":["A@B.DE"]}"#,
        );
        check(Place::Schema, r#"{"pattern":"^a","const":"a"}"#, "^a", r#"{"const":"A"}"#);
        // What does not change keeps its form, inside of what does too.
        check(
            Place::Schema,
            r#"{"anyOf":[{"format":"f","enum":["A",1]},{"const":"b","not":{"minLength":2,"const":3},"maxLength":1}],"title":"t","pattern":"p"}"#,
            "f p",
            r#"{"anyOf":[{"format":"f","enum":["A",1]},{"const":"B","not":{"minLength":2,"const":3}}],"title":"T","pattern":"p"}"#,
        );
    }

    #[test]
    fn constants_that_become_the_same_are_there_once() {
        let constants = |first: &str, rest: &str| format!(r#"{{"oneOf":[{{"const":"{first}","title":"1"}}{rest}]}}"#);
        for (first, second) in [("a", "A"), ("A", "a"), ("a", "a")] {
            let other =
                format!(r#",{{"pattern":"p","const":"{second}","title":"2"}},{{"const":"B"}},{{"type":"null"}}"#);
            let rest = r#",{"const":"B"},{"type":"null"}"#;
            check(Place::Schema, &constants(first, &other), "p", &constants("A", rest));
        }
        // The client's own are the client's.
        let own = r#"{"oneOf":[{"const":"A"},{"const":"A"}],"title":""#;
        check(Place::Schema, &format!("{own}t\"}}"), "", &format!("{own}T\"}}"));
    }

    #[test]
    fn what_is_no_json_is_one_text() {
        let mut seen = Vec::new();
        each("{\"a\":", Place::Data, &mut |is_name, text| seen.push((is_name, text.to_owned())));
        assert_eq!(seen.last(), Some(&(false, "{\"a\":".to_owned())));
    }
}
