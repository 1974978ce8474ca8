//! Filters of numbers.

use crate::template::{
    arguments::{Arguments, integer},
    budget::{Run, fault},
    compare::{self, Number},
    machine::Machine,
    operate, print,
    syntax::ast::Operator,
    value::Value,
};

impl Machine<'_> {
    pub(super) fn numeric(&mut self, name: &str, value: &Value, args: Arguments) -> Run<Value> {
        match name {
            "abs" => {
                args.none(name)?;
                let negative = matches!(Number::of(value), Some(Number::Int(..0)))
                    || matches!(value, Value::Float(number) if number.is_sign_negative());
                operate::negative(value, negative)
            }
            "round" => round(value, args),
            "int" => {
                let [default, base] = args.bind(name, ["default", "base"], 0)?;
                let base = base.map_or(Ok(10), |base| integer(name, &base))?;
                to_int(value, default.unwrap_or(Value::Int(0)), base)
            }
            "float" => {
                let [default] = args.bind(name, ["default"], 0)?;
                if let Value::Undefined(words) = value {
                    return fault(compare::undefined_words(words.as_deref()));
                }
                Ok(read_float(value).map_or(default.unwrap_or(Value::Float(0.0)), Value::Float))
            }
            "sum" => {
                let [attribute, start] = args.bind(name, ["attribute", "start"], 0)?;
                let mut total = start.unwrap_or(Value::Int(0));
                if matches!(total, Value::Str(_)) {
                    return fault("sum() can't sum strings [use ''.join(seq) instead]");
                }
                for item in &value.items(&self.budget)?.items {
                    let item = self.path(item, attribute.as_ref(), None)?;
                    total = operate::arithmetic(self, Operator::Add, &total, &item)?;
                }
                Ok(total)
            }
            _ => {
                let [binary] = args.bind(name, ["binary"], 0)?;
                let Some(bytes) = read_float(value) else { return fault("filesizeformat: not a number") };
                self.budget.text(file_size(bytes, binary.is_some_and(|binary| binary.truth())))
            }
        }
    }
}

fn round(value: &Value, args: Arguments) -> Run<Value> {
    let [precision, method] = args.bind("round", ["precision", "method"], 0)?;
    let precision = precision.map_or(Ok(0), |precision| integer("round", &precision))?;
    let Some(number) = Number::of(value) else {
        return fault(format!("type {} doesn't define __round__ method", value.kind()));
    };
    let Ok(digits @ -300..=300) = i32::try_from(precision) else { return fault("round: precision out of range") };
    let scale = 10_f64.powi(digits.abs());
    match method.as_ref().map(Value::as_str) {
        None | Some(Some("common")) => {}
        Some(Some(method @ ("ceil" | "floor"))) => {
            let scaled = if digits >= 0 { number.float() * scale } else { number.float() / scale };
            let whole = if method == "ceil" { scaled.ceil() } else { scaled.floor() };
            // Python's `ceil` and `floor` give an integer, which has no negative zero.
            let whole = if whole == 0.0 { 0.0 } else { whole };
            return Ok(Value::Float(if digits >= 0 { whole / scale } else { whole * scale }));
        }
        _ => return fault("method must be common, ceil or floor"),
    }
    match number {
        Number::Int(number) if digits >= 0 => Ok(Value::Int(number)),
        Number::Int(number) => {
            // To the nearest multiple, of two equally near ones the even one.
            let Some(step) = 10_i128.checked_pow(digits.unsigned_abs()) else { return Ok(Value::Int(0)) };
            let (down, rest) = (number.div_euclid(step), number.rem_euclid(step));
            let up = rest * 2 > step || (rest * 2 == step && down % 2 != 0);
            Ok(Value::Int((down + i128::from(up)) * step))
        }
        Number::Float(number) if !number.is_finite() => Ok(Value::Float(number)),
        Number::Float(number) if digits >= 0 => {
            let decimals = digits.unsigned_abs() as usize;
            Ok(Value::Float(format!("{number:.decimals$}").parse().unwrap_or(number)))
        }
        Number::Float(number) => Ok(Value::Float((number / scale).round_ties_even() * scale)),
    }
}

/// Jinja's `int`: a text in `base`, else as a float without its fraction, else the default.
fn to_int(value: &Value, default: Value, base: i128) -> Run<Value> {
    match value {
        Value::Undefined(words) => return fault(compare::undefined_words(words.as_deref())),
        Value::Float(number) if number.is_infinite() => return fault("cannot convert float infinity to integer"),
        _ => {}
    }
    if let Some(Number::Int(number)) = Number::of(value) {
        return Ok(Value::Int(number));
    }
    if let Value::Str(text) = value
        && let Some(number) = read_int(text, base)
    {
        return Ok(Value::Int(number));
    }
    match read_float(value) {
        Some(number) if number.is_finite() && number.abs() < 1e38 => Ok(Value::Int(number.trunc() as i128)),
        _ => Ok(default),
    }
}

/// Python's `int(text, base)`.
fn read_int(text: &str, base: i128) -> Option<i128> {
    let text = text.trim_matches(print::is_space);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let mut base = u32::try_from(base).ok().filter(|base| matches!(base, 0 | 2..=36))?;
    let lower = digits.to_ascii_lowercase();
    let mut digits = lower.as_str();
    for (mark, marked) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(rest) = digits.strip_prefix(mark)
            && (base == 0 || base == marked)
        {
            (digits, base) = (rest.strip_prefix('_').unwrap_or(rest), marked);
            break;
        }
    }
    if digits.starts_with(['_', '-', '+']) || digits.ends_with('_') || digits.contains("__") {
        return None;
    }
    let base = if base == 0 { 10 } else { base };
    let number = i128::from_str_radix(&digits.replace('_', ""), base).ok()?;
    Some(if negative { -number } else { number })
}

/// Python's `float(value)`.
fn read_float(value: &Value) -> Option<f64> {
    if let Some(number) = Number::of(value) {
        return Some(number.float());
    }
    let text = value.as_str()?.trim_matches(print::is_space);
    if text.starts_with('_') || text.ends_with('_') || text.contains("__") {
        return None;
    }
    text.replace('_', "").parse().ok()
}

fn file_size(bytes: f64, binary: bool) -> String {
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    if bytes == 1.0 {
        return "1 Byte".into();
    }
    if bytes < base {
        return format!("{} Bytes", bytes.trunc() as i128);
    }
    let (mut unit, mut prefix) = (base, 'k');
    for (power, next) in (1..).zip(['k', 'M', 'G', 'T', 'P', 'E', 'Z', 'Y']) {
        (unit, prefix) = (base.powi(power), next);
        if bytes < unit * base {
            break;
        }
    }
    let prefix = if binary { format!("{}iB", prefix.to_ascii_uppercase()) } else { format!("{prefix}B") };
    format!("{:.1} {prefix}", bytes / unit)
}
