//! Excerpts of a schema document: a schema that stands inside of it as a document of its own, for formats of calls that
//! write parameters one by one.
//!
//! References are pointers from the root of their document. In an excerpt each schema that references reach stands once
//! under `$defs`, and the references point there.

use crate::narrow;
use crate::pointer::referenced;
use crate::schema::{ANNOTATIONS, count};
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Keys of definitions, which an excerpt has of its own.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// Values in copies after which no further schema is copied: such an excerpt is longer than any grammar may be.
const VALUES_MAX: u64 = 200_000;

/// Most schemas that [`merged`] puts together.
const MERGED_MAX: usize = 64;

/// Schema `part` of the document `whole` as a document of its own that takes what `part` takes there. What is no object
/// becomes the schema of any value.
///
/// Cost: a copy of `part` and of each schema that its references reach.
pub fn excerpt(part: &Value, whole: &Value) -> Value {
    let mut targets = Targets { whole, numbers: HashMap::new(), found: Vec::new() };
    let mut written = targets.written(part);
    let (mut copies, mut values) = (Map::new(), 0_u64);
    while let Some(target) = targets.found.get(copies.len()).copied().filter(|_| values <= VALUES_MAX) {
        copies.insert(copies.len().to_string(), targets.written(target));
        values = values.saturating_add(count(target));
    }
    if !written.is_object() {
        written = Value::Object(Map::new());
    }
    if let (Value::Object(map), false) = (&mut written, copies.is_empty()) {
        map.insert("$defs".into(), Value::Object(copies));
    }
    written
}

/// Targets of references so far.
struct Targets<'a> {
    whole: &'a Value,
    /// Numbers of the targets by their addresses.
    numbers: HashMap<*const Value, usize>,
    found: Vec<&'a Value>,
}

impl<'a> Targets<'a> {
    /// A copy of a schema whose references point into the excerpt. Those that reach nothing stay as they are.
    fn written(&mut self, schema: &'a Value) -> Value {
        let mut copy = match schema {
            Value::Object(map) => {
                let kept = map.iter().filter(|(key, _)| !DEFINITIONS.contains(&key.as_str()));
                Value::Object(kept.map(|(key, value)| (key.clone(), value.clone())).collect())
            }
            other => other.clone(),
        };
        narrow::each(&mut copy, &mut |map| {
            let Some(Value::String(reference)) = map.get_mut("$ref") else { return };
            let Some(target) = referenced(self.whole, reference) else { return };
            let next = self.found.len();
            let number = *self.numbers.entry(std::ptr::from_ref(target)).or_insert(next);
            if number == next {
                self.found.push(target);
            }
            *reference = format!("#/$defs/{number}");
        });
        copy
    }
}

/// Keywords that constrain a value of the schema `part` of the document `whole`: its own, and those of the schemas that
/// its `$ref` and `allOf` name. `None` if two of them have one keyword with different values, or if there are too many.
pub fn merged<'a>(part: &'a Value, whole: &'a Value) -> Option<HashMap<&'a str, &'a Value>> {
    let mut all = HashMap::new();
    gather(part, whole, &mut { MERGED_MAX }, &mut all).then_some(all)
}

fn gather<'a>(part: &'a Value, whole: &'a Value, left: &mut usize, all: &mut HashMap<&'a str, &'a Value>) -> bool {
    let map = match part {
        Value::Object(map) if *left > 0 => map,
        other => return *other == Value::Bool(true),
    };
    *left -= 1;
    map.iter().all(|(key, value)| match key.as_str() {
        key if ANNOTATIONS.contains(&key) => true,
        "$ref" => {
            let target = value.as_str().and_then(|target| referenced(whole, target));
            target.is_some_and(|target| gather(target, whole, left, all))
        }
        "allOf" => value.as_array().is_some_and(|list| list.iter().all(|part| gather(part, whole, left, all))),
        key => *all.entry(key).or_insert(value) == value,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn references_of_an_excerpt_are_those_of_the_whole() {
        let whole = json!({
            "type": "object",
            "properties": {
                "value": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#"}, "default": {"$ref": "#"}},
                "first": {"$ref": "#/properties/value", "maxLength": 3},
                "$ref": {"$ref": "#/$defs/a%3Cb"},
                "lost": {"$ref": "#/$defs/none"},
            },
            "$defs": {"a<b": {"enum": [1]}, "unused": {"enum": [2]}},
        });
        let of = |name: &str| excerpt(&whole["properties"][name], &whole);
        let children = of("children");
        assert_eq!(children["items"], json!({"$ref": "#/$defs/0"}));
        assert_eq!(children["default"], json!({"$ref": "#"}), "a value is no schema");
        let node = &children["$defs"]["0"];
        assert_eq!(node["properties"]["children"]["items"], json!({"$ref": "#/$defs/0"}));
        assert_eq!(node["$defs"], Value::Null);
        assert_eq!(of("first"), json!({"$ref": "#/$defs/0", "maxLength": 3, "$defs": {"0": {"type": "string"}}}));
        assert_eq!(of("$ref"), json!({"$ref": "#/$defs/0", "$defs": {"0": {"enum": [1]}}}));
        assert_eq!(of("lost"), json!({"$ref": "#/$defs/none"}));
        assert_eq!(excerpt(&json!(true), &whole), json!({}));
    }

    #[test]
    fn keywords_that_meet_are_merged() {
        let whole = json!({"$defs": {
            "e": {"enum": ["a", "b"], "title": "E"}, "s": {"type": "string", "maxLength": 5},
            "loop": {"allOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]},
        }});
        let of = |part: Value| {
            let merged = merged(&part, &whole)?;
            Some(merged.into_iter().map(|(key, value)| (key.to_owned(), value.clone())).collect::<Map<_, _>>().into())
        };
        let wanted: Option<Value> = Some(json!({"enum": ["a", "b"]}));
        assert_eq!(of(json!({"allOf": [{"$ref": "#/$defs/e"}], "title": "T", "default": "a"})), wanted);
        assert_eq!(
            of(json!({"$ref": "#/$defs/s", "minLength": 1, "type": "string"})),
            Some(json!({"type": "string", "maxLength": 5, "minLength": 1}))
        );
        assert_eq!(of(json!({"$ref": "#/$defs/s", "maxLength": 4})), None);
        assert_eq!(of(json!({"$ref": "#/$defs/loop"})), None);
        assert_eq!(of(json!({"$ref": "#/$defs/none"})), None);
    }
}
