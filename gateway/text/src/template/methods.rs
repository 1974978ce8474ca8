//! Methods of texts, dictionaries, lists and other values, as far as transformers' sandbox allows them: methods that
//! change a value are undefined.

use std::{collections::HashSet, sync::Arc};

use super::{
    arguments::{Arguments, integer, string},
    budget::{Budget, Run, fault},
    compare, format,
    machine::Machine,
    print::{self, is_space},
    strings,
    value::{Dict, Value, View},
};

/// Returns true if Python's type of `value` has the method `name` and the sandbox allows it.
pub(super) fn exists(value: &Value, name: &str) -> bool {
    match value {
        Value::Str(_) => strings::NAMES.contains(&name),
        Value::Dict(_) => matches!(name, "get" | "items" | "keys" | "values" | "copy"),
        Value::List(_) => matches!(name, "count" | "index" | "copy"),
        Value::Tuple(_) | Value::Range(_) => matches!(name, "count" | "index"),
        Value::Float(_) => matches!(name, "is_integer"),
        Value::Int(_) | Value::Bool(_) => matches!(name, "bit_length"),
        Value::Loop(_) => matches!(name, "cycle" | "changed"),
        Value::Callable(callable) => {
            matches!(
                (&**callable, name),
                (super::value::Callable::Function(super::value::Function::Dict), "fromkeys")
                    | (super::value::Callable::Cycler(..), "next" | "reset")
            )
        }
        _ => false,
    }
}

/// Calls the method `name`, which [`exists`].
pub(super) fn call(machine: &mut Machine<'_>, value: &Value, name: &str, args: Arguments) -> Run<Value> {
    match value {
        Value::Str(text) if name == "format" => format::braces(machine, text, &args),
        Value::Str(text) if name == "format_map" => {
            let Value::Dict(dict) = args.one(name)? else { return fault("format_map() argument must be a mapping") };
            let named = dict.entries.iter().filter_map(|(key, value)| match key {
                Value::Str(key) => Some((key.clone(), value.clone())),
                _ => None,
            });
            format::braces(machine, text, &Arguments { positional: Vec::new(), named: named.collect() })
        }
        Value::Str(text) => strings::call(&machine.budget, text, name, args),
        Value::Dict(dict) => dictionary(&machine.budget, dict, name, args),
        Value::List(seq) | Value::Tuple(seq) if name == "copy" => {
            args.none(name)?;
            Ok(Value::List(seq.clone()))
        }
        Value::List(_) | Value::Tuple(_) | Value::Range(_) => search(&machine.budget, value, name, args),
        Value::Float(number) => {
            args.none(name)?;
            Ok(Value::Bool(number.is_finite() && number.fract() == 0.0))
        }
        Value::Int(_) | Value::Bool(_) => {
            args.none(name)?;
            let number = integer(name, value)?.unsigned_abs();
            Ok(Value::Int(i128::from(u128::BITS - number.leading_zeros())))
        }
        Value::Loop(state) if name == "cycle" => {
            if args.positional.is_empty() {
                return fault("no items for cycling given");
            }
            Ok(args.positional[state.index.get() % args.positional.len()].clone())
        }
        Value::Loop(state) => {
            let now = machine.budget.tuple(args.positional)?;
            let now = print::text(&machine.budget, &now)?;
            let before = state.changed.replace(Some(now.clone()));
            Ok(Value::Bool(before != Some(now)))
        }
        Value::Callable(callable) => match &**callable {
            super::value::Callable::Cycler(items, at) => {
                args.none(name)?;
                if name == "reset" {
                    at.set(0);
                    return Ok(Value::None);
                }
                Ok(items.items[at.replace((at.get() + 1) % items.items.len())].clone())
            }
            _ => {
                let [keys, value] = args.bind(name, ["/keys", "/value"], 1)?;
                let keys = keys.unwrap_or(Value::None).items(&machine.budget)?;
                let value = value.unwrap_or(Value::None);
                let entries = keys.items.iter().map(|key| (key.clone(), value.clone()));
                Ok(Value::Dict(Dict::new(&machine.budget, entries)?.into()))
            }
        },
        _ => fault(format!("'{} object' has no attribute '{name}'", value.kind())),
    }
}

fn dictionary(budget: &Budget, dict: &std::rc::Rc<Dict>, name: &str, args: Arguments) -> Run<Value> {
    if name == "get" {
        let [key, default] = args.bind(name, ["/key", "/default"], 1)?;
        let key = key.unwrap_or(Value::None);
        if !super::value::hashable(&key) {
            return fault(format!("unhashable type: '{}'", key.kind()));
        }
        return Ok(dict.get(budget, &key)?.cloned().or(default).unwrap_or(Value::None));
    }
    args.none(name)?;
    Ok(match name {
        "items" => Value::View(View::Items, dict.clone()),
        "keys" => Value::View(View::Keys, dict.clone()),
        "values" => Value::View(View::Values, dict.clone()),
        _ => Value::Dict(dict.clone()),
    })
}

fn search(budget: &Budget, value: &Value, name: &str, args: Arguments) -> Run<Value> {
    let [wanted, start, stop] = args.bind(name, ["/value", "/start", "/stop"], 1)?;
    let wanted = wanted.unwrap_or(Value::None);
    let items = value.items(budget)?;
    let mut count = 0;
    let bound = |bound: Option<Value>| bound.map(|bound| integer(name, &bound)).transpose();
    let (start, stop) = (bound(start)?, bound(stop)?);
    let length = items.items.len() as i128;
    let absolute = |bound: i128| if bound < 0 { (bound + length).max(0) } else { bound };
    let (start, stop) = (absolute(start.unwrap_or(0)), absolute(stop.unwrap_or(length)));
    for (place, item) in items.items.iter().enumerate() {
        if compare::equal(budget, item, &wanted)? && (start..stop).contains(&(place as i128)) {
            if name == "index" {
                return Ok(Value::Int(place as i128));
            }
            count += 1;
        }
    }
    if name == "index" { fault("the value is not in the list") } else { Ok(Value::Int(count)) }
}

/// Python's `isupper` or `islower`: some letter has a case, and none has the other one.
pub(super) fn has_case(text: &str, upper: bool) -> bool {
    let wrong = |c: char| if upper { c.is_lowercase() } else { c.is_uppercase() };
    let right = |c: char| if upper { c.is_uppercase() } else { c.is_lowercase() };
    text.chars().any(right) && !text.chars().any(wrong)
}

/// A text without the characters of `chars`, or without white space, at its ends.
pub(super) fn stripped(text: &str, chars: Option<&Arc<str>>, left: bool, right: bool) -> String {
    let set: Option<HashSet<char>> = chars.map(|chars| chars.chars().collect());
    let strips = |c: char| set.as_ref().map_or_else(|| is_space(c), |set| set.contains(&c));
    let text = if left { text.trim_start_matches(strips) } else { text };
    let text = if right { text.trim_end_matches(strips) } else { text };
    text.to_owned()
}

/// An optional text argument; `None` counts as absent.
pub(super) fn optional(function: &str, value: Option<&Value>) -> Run<Option<Arc<str>>> {
    match value {
        None | Some(Value::None) => Ok(None),
        Some(value) => string(function, value).cloned().map(Some),
    }
}
