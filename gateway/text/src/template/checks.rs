//! Jinja's tests: `value is NAME`.

use super::{
    arguments::{Arguments, integer},
    budget::{Run, fault},
    compare::{self, Number},
    filters,
    machine::Machine,
    methods, operate, print,
    syntax::ast::Comparison,
    value::Value,
};

/// Names of all tests.
pub(super) const NAMES: [&str; 38] = [
    "odd",
    "even",
    "divisibleby",
    "defined",
    "undefined",
    "filter",
    "test",
    "none",
    "boolean",
    "false",
    "true",
    "integer",
    "float",
    "lower",
    "upper",
    "string",
    "mapping",
    "number",
    "sequence",
    "iterable",
    "callable",
    "sameas",
    "escaped",
    "in",
    "eq",
    "equalto",
    "ne",
    "gt",
    "greaterthan",
    "ge",
    "lt",
    "lessthan",
    "le",
    "==",
    "!=",
    ">",
    "<",
    ">=",
];

impl Machine<'_> {
    /// True if `value is name(args)`.
    pub(super) fn check(&mut self, name: &str, value: &Value, args: Arguments) -> Run<bool> {
        let comparison = match name {
            "eq" | "equalto" | "==" => Some(Comparison::Equal),
            "ne" | "!=" => Some(Comparison::NotEqual),
            "gt" | "greaterthan" | ">" => Some(Comparison::Greater),
            "ge" | ">=" => Some(Comparison::GreaterEqual),
            "lt" | "lessthan" | "<" => Some(Comparison::Less),
            "le" | "<=" => Some(Comparison::LessEqual),
            "in" => Some(Comparison::In),
            _ => None,
        };
        if let Some(comparison) = comparison {
            let [other] = args.bind(name, ["/seq"], 1)?;
            return operate::compare(&self.budget, comparison, value, &other.unwrap_or(Value::None));
        }
        if matches!(name, "divisibleby" | "sameas") {
            let [other] = args.bind(name, [if name == "sameas" { "other" } else { "num" }], 1)?;
            let other = other.unwrap_or(Value::None);
            return if name == "sameas" { self.same(value, &other) } else { divides(value, &other) };
        }
        args.none(name)?;
        self.plain_check(name, value)
    }

    fn plain_check(&self, name: &str, value: &Value) -> Run<bool> {
        Ok(match name {
            "odd" | "even" => {
                let rest = match Number::of(value) {
                    Some(Number::Float(number)) => number.rem_euclid(2.0),
                    _ => integer(name, value)?.rem_euclid(2) as f64,
                };
                rest == if name == "odd" { 1.0 } else { 0.0 }
            }
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "filter" | "test" if !super::value::hashable(value) => {
                return fault(format!("unhashable type: '{}'", value.kind()));
            }
            "filter" => value.as_str().is_some_and(|name| filters::NAMES.contains(&name)),
            "test" => value.as_str().is_some_and(|name| NAMES.contains(&name)),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "false" => matches!(value, Value::Bool(false)),
            "true" => matches!(value, Value::Bool(true)),
            "integer" => matches!(value, Value::Int(_)),
            "float" => matches!(value, Value::Float(_)),
            "lower" => methods::has_case(&print::text(&self.budget, value)?, false),
            "upper" => methods::has_case(&print::text(&self.budget, value)?, true),
            "string" => value.as_str().is_some(),
            "mapping" => matches!(value, Value::Dict(_)),
            "number" => Number::of(value).is_some(),
            "sequence" => matches!(
                value,
                Value::Undefined(_)
                    | Value::Markup(_)
                    | Value::Str(_)
                    | Value::List(_)
                    | Value::Tuple(_)
                    | Value::Dict(_)
                    | Value::Range(_)
            ),
            "iterable" => value.is_iterable(),
            "callable" => matches!(value, Value::Callable(_) | Value::Undefined(_) | Value::Loop(_)),
            "escaped" => matches!(value, Value::Markup(_)),
            _ => return fault(format!("No test named '{name}'")),
        })
    }

    /// Python's `a is b`, as far as values that compare equal are one object there: constants and small integers.
    fn same(&self, a: &Value, b: &Value) -> Run<bool> {
        Ok(a.kind() == b.kind() && compare::equal(&self.budget, a, b)?)
    }
}

fn divides(value: &Value, by: &Value) -> Run<bool> {
    let by = integer("divisibleby", by)?;
    match Number::of(value) {
        Some(_) if by == 0 => fault("division by zero"),
        Some(Number::Int(value)) => Ok(value.checked_rem(by).unwrap_or(0) == 0),
        Some(Number::Float(value)) => Ok(value % by as f64 == 0.0),
        None => integer("divisibleby", value).map(|_| false),
    }
}
