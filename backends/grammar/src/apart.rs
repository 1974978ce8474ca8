//! Schemas of a `oneOf` that no value satisfies two of, as far as types and constants tell.

use crate::pointer::referenced;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Most pairs of values that one `oneOf` may take to be looked at.
const PAIRS_MAX: usize = 1 << 20;
/// Longest chain of references.
const CHAIN_MAX: usize = 8;

/// Bits of the types of JSON; integers are numbers.
const TYPES: [(&str, u8); 7] =
    [("null", 1), ("boolean", 2), ("number", 4), ("integer", 4), ("string", 8), ("array", 16), ("object", 32)];
const OBJECT: u8 = 32;
const ANY: u8 = 63;

/// Returns true if no value satisfies two of these schemas of the document `root`.
pub(crate) fn are_apart(options: &[Value], root: &Value) -> bool {
    let marks: Vec<Mark<'_>> = options.iter().map(|option| Mark::of(option, root, CHAIN_MAX)).collect();
    let mut left = PAIRS_MAX;
    marks.iter().enumerate().all(|(at, a)| marks[at + 1..].iter().all(|b| a.is_apart(b, &mut left)))
}

/// What tells a schema from others.
struct Mark<'a> {
    /// Bits of the types that a value may have.
    types: u8,
    /// Values that it may be.
    values: Option<Values<'a>>,
    /// Values of properties that an object has.
    properties: HashMap<&'a str, Values<'a>>,
}

/// A list of values: of a `const`, or of an `enum`.
#[derive(Clone, Copy)]
struct Values<'a>(&'a [Value]);

impl<'a> Values<'a> {
    fn of(map: &'a Map<String, Value>) -> Option<Self> {
        let constant = map.get("const").map(std::slice::from_ref);
        constant.or(map.get("enum").and_then(Value::as_array).map(Vec::as_slice)).map(Self)
    }

    fn is_apart(self, other: Self, left: &mut usize) -> bool {
        let pairs = self.0.len().saturating_mul(other.0.len());
        *left = left.saturating_sub(pairs);
        *left > 0 && self.0.iter().all(|a| other.0.iter().all(|b| !same(a, b)))
    }
}

impl<'a> Mark<'a> {
    fn of(schema: &'a Value, root: &'a Value, chain: usize) -> Self {
        let none = Self { types: ANY, values: None, properties: HashMap::new() };
        let Some(map) = schema.as_object().filter(|_| chain > 0) else { return none };
        let target = map.get("$ref").and_then(Value::as_str).and_then(|target| referenced(root, target));
        let mut mark = target.map_or(none, |target| Self::of(target, root, chain - 1));
        let named = |name: &Value| TYPES.iter().find(|(known, _)| name == known).map_or(ANY, |(_, bit)| *bit);
        mark.types &= match map.get("type") {
            Some(Value::Array(names)) => names.iter().map(named).fold(0, |all, bit| all | bit),
            Some(name) => named(name),
            None => ANY,
        };
        if let Some(values) = Values::of(map) {
            mark.types &= values.0.iter().map(type_of).fold(0, |all, bit| all | bit);
            mark.values = Some(values);
        }
        let required = map.get("required").and_then(Value::as_array);
        for name in required.into_iter().flatten().filter_map(Value::as_str) {
            let property = map.get("properties").and_then(|properties| properties.get(name)?.as_object());
            if let Some(values) = property.and_then(Values::of) {
                mark.properties.insert(name, values);
            }
        }
        mark
    }

    fn is_apart(&self, other: &Self, left: &mut usize) -> bool {
        *left = left.saturating_sub(1 + self.properties.len());
        if *left == 0 {
            return false;
        }
        let meet = self.types & other.types;
        if meet == 0 {
            return true;
        }
        if let (Some(a), Some(b)) = (self.values, other.values)
            && a.is_apart(b, left)
        {
            return true;
        }
        // Properties bind nothing but objects.
        let differs =
            |(name, a): (&&str, &Values<'_>)| other.properties.get(name).is_some_and(|b| a.is_apart(*b, left));
        meet == OBJECT && self.properties.iter().any(differs)
    }
}

fn type_of(value: &Value) -> u8 {
    let name = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    TYPES.iter().find(|(known, _)| *known == name).map_or(ANY, |(_, bit)| *bit)
}

/// Equality as JSON Schema has it: numbers by their value. Numbers that floats cannot tell apart count as equal.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| same(a, b)))
        }
        (a, b) => a == b,
    }
}
