//! Equality and order as Python has them.

use std::cmp::Ordering;

use super::{
    budget::{Budget, Run, fault},
    value::{Dict, Seq, Value},
};

/// A number; Python counts the truth values among them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    pub(super) fn of(value: &Value) -> Option<Self> {
        Some(match value {
            Value::Bool(value) => Number::Int(i128::from(*value)),
            Value::Int(value) => Number::Int(*value),
            Value::Float(value) => Number::Float(*value),
            _ => return None,
        })
    }

    pub(super) fn float(self) -> f64 {
        match self {
            Number::Int(value) => value as f64,
            Number::Float(value) => value,
        }
    }

    fn order(self, other: Self) -> Option<Ordering> {
        match (self, other) {
            (Number::Int(a), Number::Int(b)) => Some(a.cmp(&b)),
            (Number::Int(a), Number::Float(b)) => order_mixed(a, b),
            (Number::Float(a), Number::Int(b)) => order_mixed(b, a).map(Ordering::reverse),
            (Number::Float(a), Number::Float(b)) => a.partial_cmp(&b),
        }
    }
}

/// Exact order of an integer and a float.
fn order_mixed(a: i128, b: f64) -> Option<Ordering> {
    if b.is_nan() {
        return None;
    }
    if b.abs() >= 1e38 {
        return Some(if b > 0.0 { Ordering::Less } else { Ordering::Greater });
    }
    let whole = b.trunc();
    Some(a.cmp(&(whole as i128)).then(if b > whole {
        Ordering::Less
    } else if b < whole {
        Ordering::Greater
    } else {
        Ordering::Equal
    }))
}

/// Python's `a == b`.
pub(super) fn equal(budget: &Budget, a: &Value, b: &Value) -> Run<bool> {
    budget.step(1)?;
    if let (Some(a), Some(b)) = (Number::of(a), Number::of(b)) {
        return Ok(a.order(b) == Some(Ordering::Equal));
    }
    Ok(match (a, b) {
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
        (Value::Str(a) | Value::Markup(a), Value::Str(b) | Value::Markup(b)) => {
            budget.scan(a.len().min(b.len()))?;
            a == b
        }
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => equal_seqs(budget, a, b)?,
        (Value::Dict(a), Value::Dict(b)) => equal_dicts(budget, a, b)?,
        (Value::Range(a), Value::Range(b)) => {
            let (count, same) = (a.count(), a.count() == b.count());
            same && (count == 0 || a.start == b.start && (count == 1 || a.step == b.step))
        }
        (Value::Namespace(a), Value::Namespace(b)) => a == b,
        (Value::Callable(a), Value::Callable(b)) => std::rc::Rc::ptr_eq(a, b),
        _ => false,
    })
}

fn equal_seqs(budget: &Budget, a: &Seq, b: &Seq) -> Run<bool> {
    if a.items.len() != b.items.len() {
        return Ok(false);
    }
    for (a, b) in a.items.iter().zip(&b.items) {
        if !equal(budget, a, b)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn equal_dicts(budget: &Budget, a: &Dict, b: &Dict) -> Run<bool> {
    if a.entries.len() != b.entries.len() {
        return Ok(false);
    }
    for (key, value) in &a.entries {
        match b.get(budget, key)? {
            Some(other) if equal(budget, value, other)? => {}
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// Python's order of two values; `None` for those that neither precede nor equal each other (NaN).
pub(super) fn order(budget: &Budget, a: &Value, b: &Value, sign: &str) -> Run<Option<Ordering>> {
    budget.step(1)?;
    if let (Some(a), Some(b)) = (Number::of(a), Number::of(b)) {
        return Ok(a.order(b));
    }
    match (a, b) {
        (Value::Str(a) | Value::Markup(a), Value::Str(b) | Value::Markup(b)) => {
            budget.scan(a.len().min(b.len()))?;
            Ok(Some(a.cmp(b)))
        }
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
            for (a, b) in a.items.iter().zip(&b.items) {
                if !equal(budget, a, b)? {
                    return order(budget, a, b, sign);
                }
            }
            Ok(Some(a.items.len().cmp(&b.items.len())))
        }
        (Value::Undefined(words), _) | (_, Value::Undefined(words)) => fault(undefined_words(words.as_deref())),
        _ => fault(format!("'{sign}' not supported between instances of '{}' and '{}'", a.kind(), b.kind())),
    }
}

/// Sorts as Python's `sorted` does, by keys; equal keys keep their order. The first two keys that have no order end it.
pub(super) fn sort_by_key(budget: &Budget, items: Vec<(Value, Value)>, reverse: bool) -> Run<Vec<Value>> {
    Ok(merge_sorted(budget, items, reverse)?.into_iter().map(|(_, item)| item).collect())
}

/// A merge sort: the standard library's sorts may panic where keys have no total order, as those of a template need not.
fn merge_sorted(budget: &Budget, mut items: Vec<(Value, Value)>, reverse: bool) -> Run<Vec<(Value, Value)>> {
    if items.len() < 2 {
        return Ok(items);
    }
    let right = items.split_off(items.len() / 2);
    let left = merge_sorted(budget, items, reverse)?;
    let right = merge_sorted(budget, right, reverse)?;
    let mut merged = Vec::with_capacity(left.len() + right.len());
    let (mut left, mut right) = (left.into_iter().peekable(), right.into_iter().peekable());
    while let (Some((a, _)), Some((b, _))) = (left.peek(), right.peek()) {
        let (low, high) = if reverse { (a, b) } else { (b, a) };
        let is_right_first = order(budget, low, high, "<")? == Some(Ordering::Less);
        merged.extend(if is_right_first { right.next() } else { left.next() });
    }
    merged.extend(left.chain(right));
    Ok(merged)
}

/// Python's `item in container`.
pub(super) fn contains(budget: &Budget, container: &Value, item: &Value) -> Run<bool> {
    match container {
        Value::Str(text) | Value::Markup(text) => match item {
            Value::Str(part) | Value::Markup(part) => {
                budget.scan(text.len())?;
                Ok(text.contains(&**part))
            }
            _ => fault(format!("'in <string>' requires string as left operand, not {}", item.kind())),
        },
        Value::Dict(dict) => {
            if !super::value::hashable(item) {
                return fault(format!("unhashable type: '{}'", item.kind()));
            }
            Ok(dict.get(budget, item)?.is_some())
        }
        _ if container.is_iterable() => {
            for other in &container.items(budget)?.items {
                if equal(budget, other, item)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        _ => fault(format!("argument of type '{}' is not iterable", container.kind())),
    }
}

/// Words of the fault that the use of an absent value raises.
pub(super) fn undefined_words(words: Option<&str>) -> String {
    words.unwrap_or("the value is undefined").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(keys: Vec<Value>, reverse: bool) -> Run<Vec<Value>> {
        let items = keys.into_iter().zip(0..).map(|(key, place)| (key, Value::Int(place)));
        sort_by_key(&Budget::new(), items.collect(), reverse)
    }

    fn places(keys: &[i128], reverse: bool) -> Vec<i128> {
        let sorted = sorted(keys.iter().map(|key| Value::Int(*key)).collect(), reverse).expect("an order");
        let place = |value: Value| if let Value::Int(place) = value { place } else { panic!("{value:?}") };
        sorted.into_iter().map(place).collect()
    }

    #[test]
    fn equal_keys_keep_their_order() {
        assert_eq!(places(&[3, 1, 2, 1, 3], false), [1, 3, 2, 0, 4]);
        assert_eq!(places(&[3, 1, 2, 1, 3], true), [0, 4, 2, 1, 3]);
        assert_eq!(places(&[], false), [0; 0]);
        let many: Vec<i128> = (0..1000).map(|n| n * 7919 % 10).collect();
        let mut want: Vec<i128> = (0..1000).collect();
        want.sort_by_key(|place| many[*place as usize]);
        assert_eq!(places(&many, false), want);
    }

    #[test]
    fn keys_without_an_order_are_a_fault_or_stay() {
        // Mixed and NaN keys in every arrangement of a few: the standard library's sort panics on some of them.
        for seed in 0..200_i128 {
            let key = |n: i128| match (n * (seed + 17) + n * n) % 5 {
                0 => Value::Float(f64::NAN),
                1 => Value::Float(n as f64),
                rest => Value::Int(n * rest % 11),
            };
            assert_eq!(sorted((0..100).map(key).collect(), seed % 2 == 0).expect("numbers").len(), 100);
            let mixed = |n: i128| if n % 50 == seed % 50 { Value::Str("a".into()) } else { key(n) };
            assert!(sorted((0..100).map(mixed).collect(), seed % 2 == 0).is_err());
        }
    }
}
