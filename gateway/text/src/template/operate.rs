//! Operators as Python has them.

use std::cmp::Ordering;

use super::{
    budget::{Budget, Run, fault},
    compare::{Number, contains, equal, order, undefined_words},
    filters, format,
    machine::Machine,
    syntax::ast::{Comparison, Operator},
    value::{Range, Value},
};

const OVERFLOW: &str = "integers beyond 127 bits are not supported";

/// `+` with a text of markup, which escapes the other one.
fn add_markup(budget: &Budget, left: &Value, right: &Value) -> Run<Option<Value>> {
    if !matches!((left, right), (Value::Markup(_), _) | (_, Value::Markup(_))) {
        return Ok(None);
    }
    let (Some(a), Some(b)) = (left.as_str(), right.as_str()) else { return Ok(None) };
    // An escaped character takes at most five bytes.
    budget.room(a.len().saturating_add(b.len()).saturating_mul(5))?;
    let part = |value: &Value, text: &str| {
        if matches!(value, Value::Markup(_)) { text.to_owned() } else { filters::escaped(text) }
    };
    let text = part(left, a) + &part(right, b);
    budget.bytes(text.len())?;
    Ok(Some(Value::Markup(text.into())))
}

pub(super) fn compare(budget: &Budget, comparison: Comparison, left: &Value, right: &Value) -> Run<bool> {
    let ordered = |sign, accepts: fn(Ordering) -> bool| Ok(order(budget, left, right, sign)?.is_some_and(accepts));
    match comparison {
        Comparison::Equal => equal(budget, left, right),
        Comparison::NotEqual => equal(budget, left, right).map(|equal| !equal),
        Comparison::Less => ordered("<", Ordering::is_lt),
        Comparison::LessEqual => ordered("<=", Ordering::is_le),
        Comparison::Greater => ordered(">", Ordering::is_gt),
        Comparison::GreaterEqual => ordered(">=", Ordering::is_ge),
        Comparison::In => contains(budget, right, left),
        Comparison::NotIn => contains(budget, right, left).map(|found| !found),
    }
}

/// `-value`, or `+value` if `negate` is false.
pub(super) fn negative(value: &Value, negate: bool) -> Run<Value> {
    match Number::of(value) {
        Some(Number::Int(value)) if negate => {
            value.checked_neg().map_or_else(|| fault(OVERFLOW), |value| Ok(Value::Int(value)))
        }
        Some(Number::Int(value)) => Ok(Value::Int(value)),
        Some(Number::Float(value)) => Ok(Value::Float(if negate { -value } else { value })),
        None => match value {
            Value::Undefined(words) => fault(undefined_words(words.as_deref())),
            _ => fault(format!("bad operand type for unary -: '{}'", value.kind())),
        },
    }
}

pub(super) fn arithmetic(machine: &mut Machine<'_>, operator: Operator, left: &Value, right: &Value) -> Run<Value> {
    if matches!((left, right), (Value::Markup(_), _) | (_, Value::Markup(_))) {
        if operator == Operator::Add
            && let Some(text) = add_markup(&machine.budget, left, right)?
        {
            return Ok(text);
        }
        return arithmetic(machine, operator, &left.clone().plain(), &right.clone().plain());
    }
    if let (Operator::Remainder, Value::Str(text)) = (operator, left) {
        return format::percent(machine, text, right);
    }
    if let (Some(a), Some(b)) = (Number::of(left), Number::of(right)) {
        return match (a, b) {
            (Number::Int(a), Number::Int(b)) => integers(operator, a, b),
            _ => floats(operator, a.float(), b.float()).map(Value::Float),
        };
    }
    let budget = &machine.budget;
    match (operator, left, right) {
        (_, Value::Undefined(words), _) | (_, _, Value::Undefined(words)) => fault(undefined_words(words.as_deref())),
        (Operator::Add, Value::Str(a), Value::Str(b)) => {
            budget.room(a.len() + b.len())?;
            let mut text = String::with_capacity(a.len() + b.len());
            text.push_str(a);
            text.push_str(b);
            budget.text(text)
        }
        (Operator::Add, Value::List(a), Value::List(b)) => {
            budget.bytes(size_of::<Value>() * (a.items.len() + b.items.len()))?;
            budget.list(a.items.iter().chain(&b.items).cloned().collect())
        }
        (Operator::Add, Value::Tuple(a), Value::Tuple(b)) => {
            budget.bytes(size_of::<Value>() * (a.items.len() + b.items.len()))?;
            budget.tuple(a.items.iter().chain(&b.items).cloned().collect())
        }
        (Operator::Multiply, sequence, count @ (Value::Int(_) | Value::Bool(_)))
        | (Operator::Multiply, count @ (Value::Int(_) | Value::Bool(_)), sequence) => {
            let count = if let Some(Number::Int(count)) = Number::of(count) { count.max(0) } else { 0 };
            repeated(budget, sequence, usize::try_from(count).unwrap_or(usize::MAX))
        }
        _ => {
            let sign = match operator {
                Operator::Add => "+",
                Operator::Subtract => "-",
                Operator::Multiply => "*",
                Operator::Divide => "/",
                Operator::FloorDivide => "//",
                Operator::Remainder => "%",
                Operator::Power => "**",
            };
            fault(format!("unsupported operand type(s) for {sign}: '{}' and '{}'", left.kind(), right.kind()))
        }
    }
}

fn repeated(budget: &Budget, sequence: &Value, count: usize) -> Run<Value> {
    match sequence {
        Value::Str(text) => {
            budget.room(text.len().saturating_mul(count))?;
            budget.text(text.repeat(count))
        }
        Value::List(seq) | Value::Tuple(seq) => {
            let items = seq.items.len().saturating_mul(count);
            budget.room(items.saturating_mul(size_of::<Value>()))?;
            let items = seq.items.iter().cycle().take(items).cloned().collect();
            if matches!(sequence, Value::List(_)) { budget.list(items) } else { budget.tuple(items) }
        }
        _ => fault(format!("unsupported operand type(s) for *: '{}' and 'int'", sequence.kind())),
    }
}

fn integers(operator: Operator, a: i128, b: i128) -> Run<Value> {
    if b == 0 && matches!(operator, Operator::Divide | Operator::FloorDivide | Operator::Remainder) {
        return fault("division by zero");
    }
    let result = match operator {
        Operator::Add => a.checked_add(b),
        Operator::Subtract => a.checked_sub(b),
        Operator::Multiply => a.checked_mul(b),
        // Exact where the quotient is whole; each conversion of a large integer rounds.
        Operator::Divide if a != 0 && a.checked_rem(b) == Some(0) => return Ok(Value::Float((a / b) as f64)),
        Operator::Divide => return Ok(Value::Float(a as f64 / b as f64)),
        Operator::FloorDivide => a.checked_div_euclid(b).map(|quotient| {
            // Python rounds down, Rust's Euclidean division keeps the remainder positive.
            if b < 0 && a.rem_euclid(b) != 0 { quotient - 1 } else { quotient }
        }),
        Operator::Remainder => a.checked_rem_euclid(b).map(|rest| if b < 0 && rest != 0 { rest + b } else { rest }),
        Operator::Power if b < 0 => return floats(operator, a as f64, b as f64).map(Value::Float),
        Operator::Power => match u32::try_from(b) {
            Ok(exponent) => a.checked_pow(exponent),
            Err(_) => None,
        },
    };
    result.map_or_else(|| fault(OVERFLOW), |value| Ok(Value::Int(value)))
}

fn floats(operator: Operator, a: f64, b: f64) -> Run<f64> {
    if b == 0.0 && matches!(operator, Operator::Divide | Operator::FloorDivide | Operator::Remainder) {
        return fault("float division by zero");
    }
    Ok(match operator {
        Operator::Add => a + b,
        Operator::Subtract => a - b,
        Operator::Multiply => a * b,
        Operator::Divide => a / b,
        Operator::FloorDivide => {
            let quotient = ((a - remainder(a, b)) / b).round();
            if quotient == 0.0 { 0.0_f64.copysign(a / b) } else { quotient }
        }
        Operator::Remainder => remainder(a, b),
        Operator::Power if a == 0.0 && b < 0.0 => {
            return fault("0.0 cannot be raised to a negative power");
        }
        Operator::Power if a < 0.0 && b.fract() != 0.0 => return fault("complex numbers are not supported"),
        Operator::Power => {
            let power = a.powf(b);
            if power.is_infinite() && a.is_finite() && b.is_finite() {
                return fault("Result too large");
            }
            power
        }
    })
}

/// Python's `a % b` of floats: it has the sign of `b`.
fn remainder(a: f64, b: f64) -> f64 {
    let rest = a % b;
    if rest == 0.0 {
        return 0.0_f64.copysign(b);
    }
    if (rest < 0.0) == (b < 0.0) { rest } else { rest + b }
}

/// Resolves a Python index into a sequence of `length` elements: a negative index counts from the end. `None`: the
/// index is out of range.
pub(super) fn place(length: usize, index: i128) -> Option<usize> {
    let length = length as i128;
    let index = if index < 0 { index + length } else { index };
    (0..length).contains(&index).then_some(index as usize)
}

/// Python's `value[start:stop:step]`.
pub(super) fn slice(budget: &Budget, value: &Value, bounds: [Option<i128>; 3]) -> Run<Value> {
    match value {
        Value::Undefined(words) => fault(undefined_words(words.as_deref())),
        Value::Str(text) | Value::Markup(text) => {
            budget.scan(text.len())?;
            let length = text.chars().count();
            let (start, step, count) = positions(length, bounds)?;
            if step == 1 {
                return budget.text(text.chars().skip(start).take(count).collect::<String>());
            }
            budget.bytes(text.len() * 4)?;
            let chars: Vec<char> = text.chars().collect();
            budget.text(strided(start, step, count).map(|place| chars[place]).collect::<String>())
        }
        Value::List(seq) | Value::Tuple(seq) => {
            let (start, step, count) = positions(seq.items.len(), bounds)?;
            let items = strided(start, step, count).map(|place| seq.items[place].clone()).collect();
            if matches!(value, Value::List(_)) { budget.list(items) } else { budget.tuple(items) }
        }
        Value::Range(range) => {
            let (start, step, count) = positions(range.count(), bounds)?;
            let (start, step) = (range.at(0) + range.step * start as i128, range.step * step);
            Ok(Value::Range(Range { start, stop: start + step * count as i128, step }))
        }
        _ => fault(format!("'{}' object is not subscriptable", value.kind())),
    }
}

fn strided(start: usize, step: i128, count: usize) -> impl Iterator<Item = usize> {
    (0..count as i128).map(move |index| (start as i128 + index * step) as usize)
}

/// First position, step and number of positions of a slice of a sequence.
fn positions(length: usize, [start, stop, step]: [Option<i128>; 3]) -> Run<(usize, i128, usize)> {
    let length = length as i128;
    let step = step.unwrap_or(1).clamp(-(1 << 64), 1 << 64);
    if step == 0 {
        return fault("slice step cannot be zero");
    }
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let bound = |bound: Option<i128>, default: i128| match bound {
        None => default,
        Some(bound) if bound < 0 => bound.saturating_add(length).max(low),
        Some(bound) => bound.min(high),
    };
    let (start, stop) =
        if step > 0 { (bound(start, low), bound(stop, high)) } else { (bound(start, high), bound(stop, low)) };
    let span = if step > 0 { stop - start } else { start - stop };
    if span <= 0 {
        return Ok((0, 1, 0));
    }
    Ok((start as usize, step, ((span - 1) / step.abs() + 1) as usize))
}
