//! JSON schemas from outside: bounded, freed of what a client must not set, and audited for keywords that the parser
//! does not enforce.

use crate::apart::{LOOKS_MAX, are_apart};
use crate::error::{GrammarError, shown, too_large};
use crate::expression::Classes;
use crate::kind::Kind;
use crate::narrow;
use crate::pointer::{POINTER_BYTES_MAX, Plain, has_escapes, resolve, resolve_mut};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};

/// Deepest nesting of a schema's text.
const LEVELS_MAX: usize = 64;
/// Most `pattern`s and `patternProperties` of a schema: each is compiled on trial.
const PATTERNS_MAX: usize = 64;
/// Most `patternProperties` of one object: each pair is checked for overlap.
const PATTERN_PROPERTIES_MAX: usize = 8;
/// Most bytes of all patterns together.
const PATTERN_BYTES_MAX: usize = 8 << 10;
/// Most schemas after alternatives have been multiplied out, as `allOf` of several `anyOf` needs it.
const EXPANDED_MAX: u64 = 20_000;
/// Most optional properties of one object: each may be the next one at the object's start.
const OPTIONAL_MAX: usize = 400;
/// Largest common multiple of all `multipleOf`, in units of their last decimal place: the parser counts in 32 bits, and
/// has a state per remainder.
const MULTIPLE_MAX: f64 = 1e6;
/// Largest bound of a length or count.
const COUNT_MAX: u64 = 10_000_000;

/// Most schemas that references reach outside of the keywords that hold schemas.
const ELSEWHERE_MAX: usize = 64;

/// Most values in copies of schemas whose names have slashes, in all schemas of a grammar: they may lie within each other.
const COPIED_MAX: u64 = 100_000;

/// Most `pattern`s and `patternProperties` of all schemas of a grammar, and most bytes of them.
const ALL_PATTERNS_MAX: usize = 16 * PATTERNS_MAX;
const ALL_PATTERN_BYTES_MAX: usize = 16 * PATTERN_BYTES_MAX;
/// Most classes by name (`\w`, `\p{Greek}`) in all expressions of a grammar: the library takes some 7 KB for each. A regular
/// expression that is the whole grammar has room for as many.
pub(crate) const CLASSES_MAX: usize = 8 << 10;
/// Most different expressions with large classes: the library makes thirty states of each, 140 KB, before it counts them.
pub(crate) const CLASSED_MAX: usize = 256;
/// Most schemas of a grammar after alternatives have been multiplied out.
const ALL_EXPANDED_MAX: u64 = 5 * EXPANDED_MAX;

/// Most bytes of a place that is named beside a keyword: many may stand under one long name.
const PLACE_BYTES_MAX: usize = 256;

/// Key under which the library takes its own options.
const OPTIONS: &str = "x-guidance";

/// Keywords of JSON Schema that the parser ignores or approximates, so that an output may break them.
const UNENFORCED: [&str; 19] = [
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "uniqueItems",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "$dynamicAnchor",
    "$recursiveAnchor",
    "contentSchema",
];

/// Formats of strings that the parser enforces.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Keywords whose value is one schema.
pub(crate) const ONE: [&str; 12] = [
    "additionalProperties",
    "items",
    "additionalItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contentSchema",
];
/// Keywords whose value is a list of schemas.
pub(crate) const LIST: [&str; 5] = ["prefixItems", "items", "anyOf", "oneOf", "allOf"];
/// Keywords whose value holds schemas by name.
pub(crate) const NAMED: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Keywords that name or describe, and constrain nothing.
pub const ANNOTATIONS: [&str; 13] = [
    "$schema",
    "$id",
    "id",
    "$anchor",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "readOnly",
    "writeOnly",
];
/// Keywords that count something.
pub(crate) const COUNTS: [&str; 6] =
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];

/// A keyword of a schema that is not enforced: an output may break it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unenforced {
    /// Keyword, with its value where only the value is not supported: `uniqueItems`, `format: idn-email`.
    pub keyword: String,
    /// Place of the schema that has the keyword, as a JSON pointer; empty for the outermost schema. The middle of a long
    /// one is left out (`…`).
    pub pointer: String,
}

impl std::fmt::Display for Unenforced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = if self.pointer.is_empty() { "/" } else { &self.pointer };
        write!(f, "`{}` at {place}", self.keyword)
    }
}

/// Schema of any JSON object.
pub(crate) fn any_object() -> Value {
    with_options(Map::from_iter([("type".to_owned(), json!("object"))]), false)
}

/// Parses a schema and brings it into the library's form; also returns the keywords that are not enforced.
pub(crate) fn prepare(kind: Kind, text: &str) -> Result<(Value, Vec<Unenforced>), GrammarError> {
    let schema = serde_json::from_str(text).map_err(|error| GrammarError::malformed(kind, error))?;
    prepare_value(kind, schema, &mut Spent::default())
}

/// Totals over the schemas of one grammar, which may have thousands.
#[derive(Default)]
pub(crate) struct Spent {
    patterns: usize,
    pattern_bytes: usize,
    expanded: u64,
    copied: u64,
    classes: usize,
    /// Expressions with large classes.
    classed: HashSet<String>,
}

impl Spent {
    /// Counts the classes of one more expression.
    pub(crate) fn expression(&mut self, kind: Kind, text: &str, classes: Classes) -> Result<(), GrammarError> {
        self.classes += classes.count;
        too_large(kind, "classes in expressions", self.classes, CLASSES_MAX)?;
        if classes.are_large && !self.classed.contains(text) {
            self.classed.insert(text.to_owned());
        }
        too_large(kind, "different expressions with classes of Unicode", self.classed.len(), CLASSED_MAX)
    }
}

/// Prepares one of the schemas of a grammar; `spent`: what those before it took.
pub(crate) fn prepare_value(
    kind: Kind,
    mut schema: Value,
    spent: &mut Spent,
) -> Result<(Value, Vec<Unenforced>), GrammarError> {
    narrow::counts(&mut schema);
    let mut audit = Audit {
        kind,
        root: &schema,
        unenforced: Vec::new(),
        patterns: Vec::new(),
        multiple: 1,
        weights: HashMap::new(),
        seen: HashSet::new(),
        looks: LOOKS_MAX,
        targets: Vec::new(),
        counted: Vec::new(),
        has_optional: false,
        merges: false,
        is_open: false,
        escapes: false,
    };
    audit.look(&schema, &mut String::new(), 0)?;
    let elsewhere = audit.look_elsewhere()?;
    let pattern_bytes = audit.patterns.iter().map(|pattern| pattern.len()).sum();
    too_large(kind, "patterns", audit.patterns.len(), PATTERNS_MAX)?;
    too_large(kind, "bytes of patterns", pattern_bytes, PATTERN_BYTES_MAX)?;
    spent.patterns += audit.patterns.len();
    spent.pattern_bytes += pattern_bytes;
    too_large(kind, "patterns", spent.patterns, ALL_PATTERNS_MAX)?;
    too_large(kind, "bytes of patterns", spent.pattern_bytes, ALL_PATTERN_BYTES_MAX)?;
    let mut patterns = audit.patterns.iter();
    patterns.try_for_each(|pattern| spent.expression(kind, pattern, Classes::of_ascii(pattern)))?;
    let size = audit.weigh(&schema, 0).size;
    spent.expanded = spent.expanded.saturating_add(size);
    for (size, limit) in [(size, EXPANDED_MAX), (spent.expanded, ALL_EXPANDED_MAX)] {
        if size > limit {
            return Err(GrammarError::TooLarge { kind, what: "expanded alternatives", size, limit });
        }
    }
    audit.counts_of_merged();
    let (unenforced, is_open, escapes) = (audit.unenforced, audit.is_open, audit.escapes);
    narrow::values(&mut schema);
    for pointer in &elsewhere {
        resolve_mut(&mut schema, pointer).into_iter().for_each(narrow::values);
    }
    let schema = if escapes { plain_references(kind, &schema, &elsewhere, spent)? } else { schema };
    let schema = match schema {
        Value::Object(map) => with_options(map, is_open),
        // A boolean cannot carry the options.
        Value::Bool(true) => with_options(Map::new(), is_open),
        Value::Bool(false) => return Err(GrammarError::malformed(kind, "the schema `false` has no value")),
        _ => return Err(GrammarError::malformed(kind, "a schema is an object or a boolean")),
    };
    Ok((schema, unenforced))
}

/// Writes references without escapes, as the library takes them. `elsewhere`: places of schemas outside of the keywords
/// that hold schemas.
fn plain_references(
    kind: Kind,
    schema: &Value,
    elsewhere: &[String],
    spent: &mut Spent,
) -> Result<Value, GrammarError> {
    let (mut plain, mut written) = (Plain::new(schema), schema.clone());
    narrow::each(&mut written, &mut |map| plain.write(schema, map));
    for pointer in elsewhere {
        resolve_mut(&mut written, pointer)
            .into_iter()
            .for_each(|found| narrow::each(found, &mut |map| plain.write(schema, map)));
    }
    let size = plain.originals(&written).map(|(_, schema)| count(schema)).fold(spent.copied, u64::saturating_add);
    spent.copied = size;
    if size > COPIED_MAX {
        let what = "values under names with slashes that references reach";
        return Err(GrammarError::TooLarge { kind, what, size, limit: COPIED_MAX });
    }
    plain.copy(&mut written);
    Ok(written)
}

/// Sets the library's options: no blanks, or one behind each comma and colon where the schema's own options say so;
/// keywords that are not enforced are reported by [`Audit`] instead of refused.
///
/// `is_open`: an object has properties and may have others. The library tells these apart by their spelling alone, so no text has `\u` then:
/// `"\u0061"` would be a property `a` that need not follow the schema of `a`.
fn with_options(mut schema: Map<String, Value>, is_open: bool) -> Value {
    let is_spaced = schema.get(OPTIONS).is_some_and(|options| options["item_separator"] == ", ");
    let (item, key) = if is_spaced { (", ", ": ") } else { (",", ":") };
    let options = json!({
        "item_separator": item,
        "key_separator": key,
        "whitespace_flexible": false,
        "lenient": true,
        "coerce_one_of": true,
        "json_allowed_escapes": if is_open { "nrbtf\\\"" } else { "nrbtf\\\"u" },
    });
    schema.insert(OPTIONS.to_owned(), options);
    Value::Object(schema)
}

/// Size of a schema once its alternatives are multiplied out.
#[derive(Clone, Copy)]
struct Weight {
    /// Alternatives at the top.
    options: u64,
    /// Schemas in all alternatives together.
    size: u64,
}

struct Audit<'a> {
    kind: Kind,
    root: &'a Value,
    unenforced: Vec<Unenforced>,
    patterns: Vec<&'a str>,
    /// Least common multiple of the `multipleOf` so far, in units of 10⁻⁹.
    multiple: u128,
    /// Weights of references; `None` while one is being computed.
    weights: HashMap<&'a str, Option<Weight>>,
    /// Addresses of the schemas that were looked at.
    seen: HashSet<*const Value>,
    /// Values that may still be looked at to tell the options of a `oneOf` apart.
    looks: usize,
    /// Targets of references that were not looked up yet.
    targets: Vec<&'a str>,
    /// Places of schemas that count properties, and are not reported for it.
    counted: Vec<String>,
    /// True if some object has properties that are not required.
    has_optional: bool,
    /// True if some schemas must hold together.
    merges: bool,
    /// True if some object has properties by name and may have others.
    is_open: bool,
    /// True if some reference has escapes.
    escapes: bool,
}

impl<'a> Audit<'a> {
    /// Looks at a schema and all schemas in it.
    fn look(&mut self, schema: &'a Value, pointer: &mut String, level: usize) -> Result<(), GrammarError> {
        too_large(self.kind, "levels", level, LEVELS_MAX)?;
        let Value::Object(map) = schema else { return Ok(()) };
        // A reference may have led to it before its turn.
        if !self.seen.insert(std::ptr::from_ref(schema)) {
            return Ok(());
        }
        self.references(map, pointer)?;
        self.keywords(map, pointer)?;
        for (key, value) in map {
            let key = key.as_str();
            match value {
                Value::Object(named) if NAMED.contains(&key) => {
                    for (name, schema) in named {
                        self.inside(pointer, &[key, name], schema, level)?;
                    }
                }
                Value::Array(list) if LIST.contains(&key) => {
                    for (index, schema) in list.iter().enumerate() {
                        self.inside(pointer, &[key, &index.to_string()], schema, level)?;
                    }
                }
                Value::Object(_) if ONE.contains(&key) => self.inside(pointer, &[key], value, level)?,
                _ => depth(self.kind, value, level)?,
            }
        }
        Ok(())
    }

    /// Looks at the targets of references outside of the keywords that hold schemas; returns where they are.
    fn look_elsewhere(&mut self) -> Result<Vec<String>, GrammarError> {
        let mut elsewhere = Vec::new();
        while let Some(target) = self.targets.pop() {
            let is_new = |schema: &&Value| schema.is_object() && !self.seen.contains(&std::ptr::from_ref(*schema));
            let Some(schema) = resolve(self.root, target).map(|(schema, _)| schema).filter(is_new) else { continue };
            too_large(self.kind, "references outside of definitions", elsewhere.len() + 1, ELSEWHERE_MAX)?;
            let mut pointer = target.trim_start_matches('#').to_owned();
            let level = pointer.matches('/').count();
            self.look(schema, &mut pointer, level)?;
            elsewhere.push(target.to_owned());
        }
        Ok(elsewhere)
    }

    fn inside(
        &mut self,
        pointer: &mut String,
        path: &[&str],
        schema: &'a Value,
        level: usize,
    ) -> Result<(), GrammarError> {
        let length = pointer.len();
        for part in path {
            pointer.push('/');
            pointer.push_str(&part.replace('~', "~0").replace('/', "~1"));
        }
        let looked = self.look(schema, pointer, level + path.len());
        pointer.truncate(length);
        looked
    }

    /// Refuses references out of the document, which are never fetched.
    fn references(&mut self, map: &'a Map<String, Value>, pointer: &str) -> Result<(), GrammarError> {
        let Some(reference) = map.get("$ref") else { return Ok(()) };
        let Some(target) = reference.as_str() else {
            return Err(GrammarError::malformed(self.kind, format!("`$ref` at {}/ is no string", place(pointer))));
        };
        too_large(self.kind, "bytes in one `$ref`", target.len(), POINTER_BYTES_MAX)?;
        let feature = || format!("`$ref` to {:?} at {}/", shown(target), place(pointer));
        if !target.starts_with('#') {
            let why = "references to other documents are not fetched";
            return Err(GrammarError::Unsupported { kind: self.kind, feature: feature(), why });
        }
        if target != "#" && !target.starts_with("#/") {
            let why = "only JSON pointers are followed";
            return Err(GrammarError::Unsupported { kind: self.kind, feature: feature(), why });
        }
        self.escapes |= has_escapes(target);
        self.targets.push(target);
        Ok(())
    }

    fn keywords(&mut self, map: &'a Map<String, Value>, pointer: &str) -> Result<(), GrammarError> {
        for (key, value) in map {
            let key = key.as_str();
            // The other keywords hold a schema, and `false` is one that nothing satisfies.
            let is_off = key == "uniqueItems" && *value == Value::Bool(false);
            if UNENFORCED.contains(&key) && !is_off {
                self.note(key.to_owned(), pointer);
            }
            match (key, value) {
                ("format", Value::String(format)) if !FORMATS.contains(&format.as_str()) => {
                    self.note(format!("format: {}", shown(format)), pointer);
                }
                ("pattern", Value::String(pattern)) => self.patterns.push(pattern),
                ("patternProperties", Value::Object(named)) => {
                    too_large(self.kind, "patternProperties in one object", named.len(), PATTERN_PROPERTIES_MAX)?;
                    self.patterns.extend(named.keys().map(String::as_str));
                }
                ("oneOf", Value::Array(options))
                    if options.len() > 1 && !are_apart(options, self.root, &mut self.looks) =>
                {
                    self.note("oneOf".to_owned(), pointer);
                }
                (_, Value::Number(count)) if COUNTS.contains(&key) => {
                    let size = count.as_u64().unwrap_or(0);
                    if size > COUNT_MAX {
                        return Err(GrammarError::TooLarge {
                            kind: self.kind,
                            what: "items or characters in one bound",
                            size,
                            limit: COUNT_MAX,
                        });
                    }
                }
                _ => {}
            }
        }
        if let Some(multiple) = map.get("multipleOf") {
            self.multiple(multiple)?;
        }
        if let Some(key) = narrow::out_of_reach(map) {
            let (feature, why) = (
                format!("`{key}` of {} at {}/", shown(&map[key].to_string()), place(pointer)),
                "numbers are counted in 64 bits",
            );
            return Err(GrammarError::Unsupported { kind: self.kind, feature, why });
        }
        if let Some((key, value)) = narrow::inexact_value(map) {
            let (feature, why) = (
                format!("`{key}` with {} at {}/", shown(&value.to_string()), place(pointer)),
                "whole numbers have at most 53 bits",
            );
            return Err(GrammarError::Unsupported { kind: self.kind, feature, why });
        }
        too_large(self.kind, "optional properties in one object", optional(map), OPTIONAL_MAX)?;
        self.properties(map, pointer);
        Ok(())
    }

    /// Notes counts of properties that the parser cannot hold, and what it must know of other schemas for that.
    fn properties(&mut self, map: &Map<String, Value>, pointer: &str) {
        let length = |key: &str| match map.get(key) {
            Some(Value::Object(named)) => named.len(),
            Some(Value::Array(list)) => list.len(),
            _ => 0,
        };
        let has_names = length("properties") + length("patternProperties") + length("required") > 0;
        self.is_open |= has_names && map.get("additionalProperties") != Some(&Value::Bool(false));
        self.has_optional |= optional(map) > 0;
        let constrains = map.keys().filter(|key| !ANNOTATIONS.contains(&key.as_str())).count();
        let combines = ["$ref", "allOf", "anyOf", "oneOf"].iter().any(|key| map.contains_key(*key));
        self.merges |= combines && (constrains > 1 || length("allOf") > 1);

        if !["minProperties", "maxProperties"].iter().any(|key| map.contains_key(*key)) {
            return;
        }
        // A name may come twice among the properties that are not listed: one of them is one property, two may be one.
        let sure = length("required") as u64 + 1;
        let is_short = map.get("minProperties").and_then(Value::as_u64).is_some_and(|least| least > sure);
        if is_short || optional(map) > 0 {
            self.note("minProperties, maxProperties".to_owned(), pointer);
        } else {
            self.counted.push(place(pointer));
        }
    }

    /// Notes counts of properties that may be merged with schemas whose properties are not required.
    fn counts_of_merged(&mut self) {
        if self.merges && self.has_optional {
            let counted = std::mem::take(&mut self.counted);
            counted.iter().for_each(|pointer| self.note("minProperties, maxProperties".to_owned(), pointer));
        }
    }

    fn note(&mut self, keyword: String, pointer: &str) {
        self.unenforced.push(Unenforced { keyword, pointer: place(pointer) });
    }

    fn multiple(&mut self, multiple: &Value) -> Result<(), GrammarError> {
        const UNIT: f64 = 1e9;
        let Some(value) = multiple.as_f64().filter(|value| *value > 0.0) else {
            return Err(GrammarError::malformed(
                self.kind,
                format!("`multipleOf` is {}", shown(&multiple.to_string())),
            ));
        };
        let scaled = ((value * UNIT).round().min(1e30) as u128).max(1);
        self.multiple = self.multiple / gcd(self.multiple, scaled) * scaled.min(u128::MAX / self.multiple);
        // Trailing zeros are decimal places that no value uses.
        let mut digits = self.multiple;
        while digits.is_multiple_of(10) {
            digits /= 10;
        }
        if digits as f64 > MULTIPLE_MAX {
            let (size, limit) = (u64::try_from(digits).unwrap_or(u64::MAX), MULTIPLE_MAX as u64);
            return Err(GrammarError::TooLarge { kind: self.kind, what: "as the common `multipleOf`", size, limit });
        }
        Ok(())
    }

    /// Weighs a schema as the library expands it: alternatives that must hold together are multiplied out.
    fn weigh(&mut self, schema: &'a Value, level: usize) -> Weight {
        let one = Weight { options: 1, size: 1 };
        let Value::Object(map) = schema else { return one };
        if level > 4 * LEVELS_MAX {
            return one;
        }
        let mut factors = vec![one];
        let constrains = map.keys().filter(|key| !ANNOTATIONS.contains(&key.as_str())).count();
        for (key, value) in map {
            match (key.as_str(), value) {
                ("enum", Value::Array(values)) => {
                    let options = values.len() as u64;
                    factors.push(Weight { options, size: values.iter().map(count).sum::<u64>() });
                }
                ("const", value) => factors.push(Weight { options: 1, size: count(value) }),
                ("anyOf" | "oneOf", Value::Array(list)) => {
                    let sum = list.iter().map(|schema| self.weigh(schema, level + 1)).fold(
                        Weight { options: 0, size: 0 },
                        |sum, more| Weight {
                            options: sum.options.saturating_add(more.options),
                            size: sum.size.saturating_add(more.size),
                        },
                    );
                    factors.push(sum);
                }
                ("allOf", Value::Array(list)) => {
                    factors.extend(list.iter().map(|schema| self.weigh_target(schema, level + 1)).collect::<Vec<_>>());
                }
                ("$ref", Value::String(_)) if constrains > 1 => factors.push(self.weigh_target(schema, level + 1)),
                (key, Value::Object(named)) if NAMED.contains(&key) => {
                    let size =
                        named.values().map(|schema| self.weigh(schema, level + 1).size).fold(0, u64::saturating_add);
                    factors.push(Weight { options: 1, size });
                }
                (key, Value::Array(list)) if LIST.contains(&key) => {
                    let size =
                        list.iter().map(|schema| self.weigh(schema, level + 1).size).fold(0, u64::saturating_add);
                    factors.push(Weight { options: 1, size });
                }
                (key, Value::Object(_)) if ONE.contains(&key) => {
                    factors.push(Weight { options: 1, size: self.weigh(value, level + 1).size });
                }
                _ => {}
            }
        }
        let options = factors.iter().fold(1_u64, |product, factor| product.saturating_mul(factor.options.max(1)));
        let share = |factor: &Weight| (options / factor.options.max(1)).saturating_mul(factor.size);
        Weight { options, size: factors.iter().map(share).fold(0, u64::saturating_add) }
    }

    /// Weighs a schema that is merged with others: the target of a reference is merged too.
    fn weigh_target(&mut self, schema: &'a Value, level: usize) -> Weight {
        let target = schema.get("$ref").and_then(Value::as_str);
        let Some((target, (resolved, _))) = target.and_then(|target| Some((target, resolve(self.root, target)?)))
        else {
            return self.weigh(schema, level);
        };
        match self.weights.get(target) {
            Some(Some(known)) => *known,
            // A circle: its weight is that of the schema around it.
            Some(None) => Weight { options: 1, size: 1 },
            None => {
                self.weights.insert(target, None);
                let weight = self.weigh(resolved, level);
                self.weights.insert(target, Some(weight));
                weight
            }
        }
    }
}

/// A place as it is named to a client.
fn place(pointer: &str) -> String {
    if pointer.len() <= PLACE_BYTES_MAX {
        return pointer.to_owned();
    }
    let (head, tail) = (PLACE_BYTES_MAX / 2, pointer.len() - PLACE_BYTES_MAX / 2);
    format!("{}…{}", &pointer[..pointer.floor_char_boundary(head)], &pointer[pointer.ceil_char_boundary(tail)..])
}

/// Number of values in a value, itself included.
pub(crate) fn count(value: &Value) -> u64 {
    1 + match value {
        Value::Array(list) => list.iter().map(count).sum(),
        Value::Object(map) => map.values().map(count).sum(),
        _ => 0,
    }
}

/// Refuses values that are nested too deep.
fn depth(kind: Kind, value: &Value, level: usize) -> Result<(), GrammarError> {
    too_large(kind, "levels", level, LEVELS_MAX)?;
    match value {
        Value::Array(list) => list.iter().try_for_each(|value| depth(kind, value, level + 1)),
        Value::Object(map) => map.values().try_for_each(|value| depth(kind, value, level + 1)),
        _ => Ok(()),
    }
}

/// Number of properties of an object schema that are not required.
fn optional(map: &Map<String, Value>) -> usize {
    let required: HashSet<&str> =
        map.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let properties = map.get("properties").and_then(Value::as_object);
    properties.map_or(0, |properties| properties.keys().filter(|name| !required.contains(name.as_str())).count())
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
#[path = "schema_tests.rs"]
mod tests;
