//! Schemas of a `oneOf` that no value satisfies two of, as far as types and constants tell.

use crate::pointer::referenced;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Most values that all `oneOf` of one schema may take to be looked at, each in each comparison.
pub(crate) const LOOKS_MAX: usize = 1 << 20;
/// Bytes of a text that cost as much as a value.
const BYTES: usize = 64;
/// Longest chain of references.
const CHAIN_MAX: usize = 8;

/// Bits of the types of JSON; integers are numbers.
const TYPES: [(&str, u8); 7] =
    [("null", 1), ("boolean", 2), ("number", 4), ("integer", 4), ("string", 8), ("array", 16), ("object", 32)];
const OBJECT: u8 = 32;
const ANY: u8 = 63;

/// Returns true if no value satisfies two of these schemas of the document `root`. `left`: values that may still be looked at
/// ([`LOOKS_MAX`] at first); once none is left, schemas count as not apart.
pub(crate) fn are_apart(options: &[Value], root: &Value, left: &mut usize) -> bool {
    let mut marks: Vec<Mark<'_>> = Vec::new();
    for option in options {
        marks.push(Mark::of(option, root, CHAIN_MAX, left));
        if *left == 0 {
            return false;
        }
    }
    marks.iter().enumerate().all(|(at, a)| marks[at + 1..].iter().all(|b| a.is_apart(b, left)))
}

/// Takes `count` of what is left; false once nothing is.
fn take(left: &mut usize, count: usize) -> bool {
    *left = left.saturating_sub(count);
    *left > 0
}

/// What tells a schema from others.
struct Mark<'a> {
    /// Bits of the types that a value may have.
    types: u8,
    /// Values that it may be.
    values: Option<Values<'a>>,
    /// Values of properties that an object has.
    properties: HashMap<&'a str, Values<'a>>,
    /// Cost of a look at the names of all properties in another schema.
    names: usize,
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
        self.0.iter().all(|a| other.0.iter().all(|b| !same(a, b, left)))
    }
}

impl<'a> Mark<'a> {
    fn of(schema: &'a Value, root: &'a Value, chain: usize, left: &mut usize) -> Self {
        let none = Self { types: ANY, values: None, properties: HashMap::new(), names: 0 };
        let Some(map) = schema.as_object().filter(|_| chain > 0) else { return none };
        let reference = map.get("$ref").and_then(Value::as_str);
        let required = map.get("required").and_then(Value::as_array);
        let values = Values::of(map);
        let names: usize =
            required.into_iter().flatten().filter_map(Value::as_str).map(|name| name.len() / BYTES).sum();
        let count = required.map_or(0, Vec::len) + names + values.map_or(0, |values| values.0.len());
        if !take(left, 1 + count + reference.map_or(0, str::len) / BYTES) {
            return none;
        }
        let target = reference.and_then(|target| referenced(root, target));
        let mut mark = target.map_or(none, |target| Self::of(target, root, chain - 1, left));
        let named = |name: &Value| TYPES.iter().find(|(known, _)| name == known).map_or(ANY, |(_, bit)| *bit);
        mark.types &= match map.get("type") {
            Some(Value::Array(names)) => names.iter().map(named).fold(0, |all, bit| all | bit),
            Some(name) => named(name),
            None => ANY,
        };
        if let Some(values) = values {
            mark.types &= values.0.iter().map(type_of).fold(0, |all, bit| all | bit);
            mark.values = Some(values);
        }
        for name in required.into_iter().flatten().filter_map(Value::as_str) {
            let property = map.get("properties").and_then(|properties| properties.get(name)?.as_object());
            if let Some(values) = property.and_then(Values::of) {
                mark.properties.insert(name, values);
                mark.names += 1 + name.len() / BYTES;
            }
        }
        mark
    }

    fn is_apart(&self, other: &Self, left: &mut usize) -> bool {
        if !take(left, 1 + self.names) {
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

/// Equality as JSON Schema has it: numbers by their value. Numbers that floats cannot tell apart count as equal, and so do all values once
/// nothing is left.
fn same(a: &Value, b: &Value, left: &mut usize) -> bool {
    if !take(left, 1 + a.as_str().map_or(0, str::len) / BYTES) {
        return true;
    }
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b, left)),
        (Value::Object(a), Value::Object(b)) => {
            let mut member = |(name, a): (&String, &Value)| {
                // Each look at a name reads all of it.
                !take(left, name.len() / BYTES) || b.get(name).is_some_and(|b| same(a, b, left))
            };
            a.len() == b.len() && a.iter().all(&mut member)
        }
        (a, b) => a == b,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Looks that it takes to compare two schemas with members or properties of that name.
    fn looks(options: &[Value; 2]) -> usize {
        let mut left = LOOKS_MAX;
        assert!(are_apart(options, &Value::Null, &mut left));
        LOOKS_MAX - left
    }

    #[test]
    fn names_cost_as_much_as_other_texts() {
        let long = "n".repeat(100 * BYTES);
        // The members with long names are equal; what tells the two apart comes behind them.
        let member = |name: &str, last: u8| json!({"const": {name: 1, "z": last}});
        let of_members = |name| looks(&[member(name, 1), member(name, 2)]);
        assert!(of_members(&long) >= of_members("n") + 100, "a name of a member");

        let property = |name: &str, value: u8| json!({"type": "object", "required": [name], "properties": {name: {"const": value}}});
        let of_properties = |name| looks(&[property(name, 1), property(name, 2)]);
        assert!(of_properties(&long) >= of_properties("n") + 300, "both lists of required names, and the look");
    }
}
