//! Formatting of texts: `'%s' % value` and `'{}'.format(value)`.

use std::sync::Arc;

use super::{
    arguments::Arguments,
    budget::{Run, fault},
    compare::{Number, undefined_words},
    machine::Machine,
    print,
    value::Value,
};

/// Widths and precisions above this are refused.
const WIDTH_MAX: usize = 1 << 20;
/// Most digits behind the point of a float. Rust's formatting panics beyond 65,535; a float has 1,074 digits at most that are
/// not zeros.
const DIGITS_MAX: usize = 1 << 15;

/// How a value is shown.
#[derive(Default)]
struct Spec {
    fill: Option<char>,
    /// `<`, `>`, `^` or `=`.
    align: Option<char>,
    /// `+` or a blank in front of numbers that are not negative.
    sign: Option<char>,
    alternate: bool,
    /// Zeros between sign and digits, unless an alignment is given.
    zero: bool,
    width: usize,
    comma: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

/// Python's `text % value`.
pub(super) fn percent(machine: &mut Machine<'_>, text: &str, value: &Value) -> Run<Value> {
    let budget = &machine.budget;
    budget.scan(text.len())?;
    let items = match value {
        Value::Tuple(seq) => seq.items.clone(),
        other => vec![other.clone()],
    };
    let (mut items, mut taken) = (items.into_iter(), false);
    let mut out = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut named = None;
        if chars.next_if_eq(&'(').is_some() {
            let key: String = chars.by_ref().take_while(|&c| c != ')').collect();
            let Value::Dict(dict) = value else { return fault("format requires a mapping") };
            let Some(value) = dict.get_str(&key) else { return fault(format!("KeyError: {key:?}")) };
            named = Some(value.clone());
        }
        let mut next = || {
            taken = true;
            items.next().map_or_else(|| fault("not enough arguments for format string"), Ok)
        };
        let mut spec = Spec { align: Some('>'), ..Spec::default() };
        let (mut left, mut zero) = (false, false);
        while let Some(flag) = chars.next_if(|c| matches!(c, '-' | '+' | ' ' | '0' | '#')) {
            match flag {
                '-' => left = true,
                '0' => zero = true,
                '#' => spec.alternate = true,
                '+' => spec.sign = Some('+'),
                _ => spec.sign = spec.sign.or(Some(' ')),
            }
        }
        let mut number = |chars: &mut std::iter::Peekable<std::str::Chars<'_>>| -> Run<Option<i128>> {
            if chars.next_if_eq(&'*').is_some() {
                let Value::Int(value) = next()? else { return fault("* wants int") };
                return Ok(Some(value));
            }
            let mut value = None;
            while let Some(digit) = chars.next_if(char::is_ascii_digit).and_then(|c| c.to_digit(10)) {
                value = Some(i128::min(value.unwrap_or(0) * 10 + i128::from(digit), WIDTH_MAX as i128 + 1));
            }
            Ok(value)
        };
        if let Some(width) = number(&mut chars)? {
            left |= width < 0;
            spec.width = bounded(width.unsigned_abs())?;
        }
        if chars.next_if_eq(&'.').is_some() {
            spec.precision = Some(bounded(number(&mut chars)?.unwrap_or(0).max(0).unsigned_abs())?);
        }
        while chars.next_if(|c| matches!(c, 'h' | 'l' | 'L')).is_some() {}
        let Some(kind) = chars.next() else { return fault("incomplete format") };
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match named {
            Some(value) => value,
            None => next()?,
        };
        if left {
            spec.align = Some('<');
        } else if zero && !matches!(kind, 's' | 'r' | 'a' | 'c') {
            (spec.fill, spec.align) = (Some('0'), Some('='));
        }
        let shown = percent_value(machine, kind, &value, &mut spec)?;
        machine.budget.room(out.len() + shown.len())?;
        machine.budget.bytes(shown.len())?;
        out.push_str(&shown);
    }
    let subscribes = matches!(value, Value::Dict(_) | Value::List(_) | Value::Range(_) | Value::Undefined(_));
    if items.next().is_some() && (taken || !subscribes) {
        return fault("not all arguments converted during string formatting");
    }
    machine.budget.text(out)
}

fn bounded(number: u128) -> Run<usize> {
    let number = usize::try_from(number).unwrap_or(usize::MAX);
    if number > WIDTH_MAX { fault("width or precision too big") } else { Ok(number) }
}

fn percent_value(machine: &Machine<'_>, kind: char, value: &Value, spec: &mut Spec) -> Run<String> {
    let text = match kind {
        's' => print::text(&machine.budget, value)?,
        'r' | 'a' => repr(machine, value, kind == 'a')?,
        'c' => match value {
            Value::Str(text) if text.chars().count() == 1 => text.clone(),
            Value::Bool(on) => String::from(if *on { '\u{1}' } else { '\0' }).into(),
            Value::Int(code) => match u32::try_from(*code).ok().and_then(char::from_u32) {
                Some(c) => c.encode_utf8(&mut [0; 4]).into(),
                None => return fault("%c arg not in range(0x110000)"),
            },
            _ => return fault("%c requires int or char"),
        },
        'd' | 'i' | 'u' => return percent_integer(value, spec, 'd'),
        'x' | 'X' | 'o' => return percent_integer(value, spec, kind),
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            let Some(number) = Number::of(value) else {
                return fault(format!("must be real number, not {}", value.kind()));
            };
            spec.kind = Some(kind);
            spec.precision = spec.precision.or(Some(6));
            return number_text(Number::Float(number.float()), spec);
        }
        _ => return fault(format!("unsupported format character '{kind}'")),
    };
    let cut: String = if kind == 'c' { text.to_string() } else { limited(&text, spec.precision) };
    Ok(padded("", &cut, spec, '>'))
}

fn percent_integer(value: &Value, spec: &mut Spec, kind: char) -> Run<String> {
    let number = match Number::of(value) {
        Some(Number::Float(number)) if kind == 'd' && number.is_finite() => number.trunc() as i128,
        Some(Number::Int(number)) => number,
        _ => {
            if let Value::Undefined(words) = value {
                return fault(undefined_words(words.as_deref()));
            }
            return fault(format!("%{kind} format: a number is required, not {}", value.kind()));
        }
    };
    let digits = match kind {
        'x' => format!("{:x}", number.unsigned_abs()),
        'X' => format!("{:X}", number.unsigned_abs()),
        'o' => format!("{:o}", number.unsigned_abs()),
        _ => number.unsigned_abs().to_string(),
    };
    let digits = format!("{}{digits}", "0".repeat(spec.precision.unwrap_or(0).saturating_sub(digits.len())));
    let mark = if spec.alternate && kind != 'd' { format!("0{kind}") } else { String::new() };
    Ok(padded(&format!("{}{mark}", sign(number < 0, spec)), &digits, spec, '>'))
}

fn repr(machine: &Machine<'_>, value: &Value, ascii: bool) -> Run<Arc<str>> {
    if let (Value::Str(text), true) = (value, ascii) {
        machine.budget.scan(4 * text.len())?;
        return Ok(print::quoted(text, true).into());
    }
    let mut out = String::new();
    print::write_repr(&machine.budget, value, &mut out)?;
    Ok(out.into())
}

/// Python's `text.format(...)`.
pub(super) fn braces(machine: &mut Machine<'_>, text: &str, args: &Arguments) -> Run<Value> {
    let out = fields(machine, text, args, &mut Numbering::default(), 2)?;
    machine.budget.text(out)
}

/// Numbers of fields without a name: counted, or written in every one.
#[derive(Default)]
struct Numbering {
    next: usize,
    written: bool,
}

fn fields(
    machine: &mut Machine<'_>,
    text: &str,
    args: &Arguments,
    counter: &mut Numbering,
    depth: usize,
) -> Run<String> {
    machine.budget.scan(text.len())?;
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let mark = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(mark) {
            out.push_str(mark);
            rest = after;
            continue;
        }
        if mark == "}" {
            return fault("Single '}' encountered in format string");
        }
        let Some(end) = field_end(rest) else { return fault("expected '}' before end of string") };
        let field = &rest[..end];
        rest = &rest[end + 1..];
        if depth == 0 {
            return fault("Max string recursion exceeded");
        }
        let (name, spec) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = name.split_once('!').map_or((name, None), |(name, kind)| (name, Some(kind)));
        let mut value = field_value(machine, name, args, counter)?;
        match conversion {
            None => {}
            Some("s") => value = Value::Str(print::text(&machine.budget, &value)?),
            Some(kind @ ("r" | "a")) => value = Value::Str(repr(machine, &value, kind == "a")?),
            Some(other) => return fault(format!("Unknown conversion specifier {other:?}")),
        }
        let spec = fields(machine, spec, args, counter, depth - 1)?;
        let shown = formatted(machine, &value, &spec)?;
        machine.budget.room(out.len() + shown.len())?;
        machine.budget.bytes(shown.len())?;
        out.push_str(&shown);
    }
    out.push_str(rest);
    Ok(out)
}

/// Position of the brace that ends a field.
fn field_end(text: &str) -> Option<usize> {
    let mut depth = 0;
    text.char_indices().find_map(|(at, c)| {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => return Some(at),
            '}' => depth -= 1,
            _ => {}
        }
        None
    })
}

fn field_value(machine: &mut Machine<'_>, name: &str, args: &Arguments, counter: &mut Numbering) -> Run<Value> {
    let first = name.find(['.', '[']).unwrap_or(name.len());
    let (first, mut rest) = name.split_at(first);
    let position = if first.is_empty() {
        counter.next += 1;
        Some(counter.next - 1)
    } else {
        let number = first.parse::<usize>().ok();
        counter.written |= number.is_some();
        number
    };
    if counter.written && counter.next > 0 {
        return fault("cannot mix automatic field numbering and manual field specification");
    }
    let found = match position {
        Some(position) => args.positional.get(position),
        None => args.named.iter().find(|(key, _)| &**key == first).map(|(_, value)| value),
    };
    let Some(mut value) = found.cloned() else {
        return fault(format!("format: there is no argument {}", if first.is_empty() { "left" } else { first }));
    };
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('[') {
            let Some((key, after)) = after.split_once(']') else { return fault("Missing ']' in format string") };
            let key = key.parse().map_or_else(|_| Value::Str(key.into()), Value::Int);
            value = machine.item(&value, &key)?;
            rest = after;
        } else {
            let Some(after) = rest.strip_prefix('.') else {
                return fault("Only '.' or '[' may follow ']' in format field specifier");
            };
            let end = after.find(['.', '[']).unwrap_or(after.len());
            value = machine.attribute(&value, &after[..end].into())?;
            rest = &after[end..];
        }
    }
    Ok(value)
}

/// Python's `format(value, spec)`.
fn formatted(machine: &Machine<'_>, value: &Value, spec: &str) -> Run<String> {
    if spec.is_empty() {
        return Ok(print::text(&machine.budget, value)?.to_string());
    }
    let mut spec = read_spec(spec)?;
    match value {
        Value::Str(text) if matches!(spec.kind, None | Some('s')) => {
            if spec.sign.is_some() || spec.alternate || spec.comma.is_some() || spec.align == Some('=') {
                return fault("sign, '#', ',' and '=' are not allowed in a format of a text");
            }
            let text = limited(text, spec.precision);
            Ok(padded("", &text, &spec, '<'))
        }
        _ => match Number::of(value) {
            Some(number) => {
                if spec.zero && spec.align.is_none() {
                    spec.align = Some('=');
                }
                if matches!(spec.kind, Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%')) {
                    spec.precision = spec.precision.or(Some(6));
                    return number_text(Number::Float(number.float()), &spec);
                }
                number_text(number, &spec)
            }
            None => fault(format!("unsupported format string passed to {}.__format__", value.kind())),
        },
    }
}

fn read_spec(text: &str) -> Run<Spec> {
    let mut spec = Spec::default();
    let mut chars = text.chars().peekable();
    let mut ahead = text.chars();
    let (first, second) = (ahead.next(), ahead.next());
    let aligns = |c: Option<char>| c.filter(|c| matches!(c, '<' | '>' | '^' | '='));
    if let Some(align) = aligns(second) {
        (spec.fill, spec.align) = (first, Some(align));
        chars.nth(1);
    } else if let Some(align) = aligns(first) {
        spec.align = Some(align);
        chars.next();
    }
    spec.sign = chars.next_if(|c| matches!(c, '+' | '-' | ' ')).filter(|c| *c != '-');
    spec.alternate = chars.next_if_eq(&'#').is_some();
    spec.zero = chars.next_if_eq(&'0').is_some();
    if spec.zero && spec.fill.is_none() {
        spec.fill = Some('0');
    }
    let number = |chars: &mut std::iter::Peekable<std::str::Chars<'_>>| -> Run<Option<usize>> {
        let mut value = None;
        while let Some(digit) = chars.next_if(char::is_ascii_digit).and_then(|c| c.to_digit(10)) {
            value = Some(bounded(value.unwrap_or(0) as u128 * 10 + u128::from(digit))?);
        }
        Ok(value)
    };
    spec.width = number(&mut chars)?.unwrap_or(0);
    spec.comma = chars.next_if(|c| matches!(c, ',' | '_'));
    if chars.next_if_eq(&'.').is_some() {
        spec.precision = number(&mut chars)?;
        if spec.precision.is_none() {
            return fault("Format specifier missing precision");
        }
    }
    spec.kind = chars.next();
    if chars.next().is_some() { fault(format!("Invalid format specifier {text:?}")) } else { Ok(spec) }
}

fn number_text(number: Number, spec: &Spec) -> Run<String> {
    if matches!(number, Number::Int(_)) && spec.precision.is_some() {
        return fault("Precision not allowed in integer format specifier");
    }
    let (negative, mark, digits) = match (number, spec.kind) {
        (Number::Int(value), None | Some('d' | 'n')) => (value < 0, "", value.unsigned_abs().to_string()),
        (Number::Int(value), Some('x')) => (value < 0, "0x", format!("{:x}", value.unsigned_abs())),
        (Number::Int(value), Some('X')) => (value < 0, "0X", format!("{:X}", value.unsigned_abs())),
        (Number::Int(value), Some('o')) => (value < 0, "0o", format!("{:o}", value.unsigned_abs())),
        (Number::Int(value), Some('b')) => (value < 0, "0b", format!("{:b}", value.unsigned_abs())),
        (Number::Float(value), kind) => {
            let text = float_text(value.abs(), kind, spec)?;
            (value.is_sign_negative() && !value.is_nan(), "", text)
        }
        (_, kind) => return fault(format!("Unknown format code {kind:?} for object of type 'int'")),
    };
    let digits = match spec.comma {
        Some(comma) => grouped(&digits, comma, if mark.is_empty() { 3 } else { 4 }),
        None => digits,
    };
    let mark = if spec.alternate { mark } else { "" };
    Ok(padded(&format!("{}{mark}", sign(negative, spec)), &digits, spec, '>'))
}

fn sign(negative: bool, spec: &Spec) -> String {
    if negative { "-".into() } else { spec.sign.map(String::from).unwrap_or_default() }
}

/// Digits of a float that is not negative.
fn float_text(value: f64, kind: Option<char>, spec: &Spec) -> Run<String> {
    if !value.is_finite() {
        let text = print::float(value);
        return Ok(if kind.is_some_and(|kind| kind.is_ascii_uppercase()) { text.to_uppercase() } else { text });
    }
    let precision = spec.precision;
    if precision.is_some_and(|digits| digits > DIGITS_MAX) {
        return fault("precision too big");
    }
    Ok(match kind {
        None if precision.is_none() => print::float(value),
        Some('f' | 'F') => format!("{value:.*}", precision.unwrap_or(6)),
        Some('%') => format!("{:.*}%", precision.unwrap_or(6), value * 100.0),
        Some('e') => exponent(&format!("{value:.*e}", precision.unwrap_or(6))),
        Some('E') => exponent(&format!("{value:.*e}", precision.unwrap_or(6))).to_uppercase(),
        None | Some('g' | 'G' | 'n') => {
            let text = general(value, precision.unwrap_or(6).max(1), spec.alternate, kind.is_none());
            if kind == Some('G') { text.to_uppercase() } else { text }
        }
        Some(other) => return fault(format!("Unknown format code '{other}' for object of type 'float'")),
    })
}

/// C's `%g`.
fn general(value: f64, precision: usize, keep_zeros: bool, keep_point: bool) -> String {
    let scientific = format!("{value:.*e}", precision - 1);
    let (digits, power) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let power: i32 = power.parse().unwrap_or(0);
    let trimmed = |text: &str| {
        if keep_zeros || !text.contains('.') {
            text.to_owned()
        } else {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
    };
    let limit = precision as i64 - i64::from(keep_point);
    if power < -4 || i64::from(power) >= limit {
        return exponent(&format!("{}e{power}", trimmed(digits)));
    }
    let decimals = usize::try_from(precision as i64 - 1 - i64::from(power)).unwrap_or(0);
    let plain = trimmed(&format!("{value:.decimals$}"));
    if keep_point && !plain.contains('.') { plain + ".0" } else { plain }
}

/// Rust's exponent (`1.5e-7`) as C writes it (`1.5e-07`).
fn exponent(text: &str) -> String {
    let (digits, power) = text.split_once('e').unwrap_or((text, "0"));
    let (sign, power) = power.strip_prefix('-').map_or(('+', power), |power| ('-', power));
    format!("{digits}e{sign}{power:0>2}")
}

fn grouped(digits: &str, comma: char, size: usize) -> String {
    let whole = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
    let mut out = String::new();
    for (place, c) in digits[..whole].chars().enumerate() {
        if place > 0 && (whole - place) % size == 0 {
            out.push(comma);
        }
        out.push(c);
    }
    out + &digits[whole..]
}

fn limited(text: &str, precision: Option<usize>) -> String {
    match precision {
        Some(most) => text.chars().take(most).collect(),
        None => text.to_owned(),
    }
}

/// `text` behind `sign`, filled up to the width.
fn padded(sign: &str, text: &str, spec: &Spec, default: char) -> String {
    let missing = spec.width.saturating_sub(sign.chars().count() + text.chars().count());
    let fill = |count: usize| std::iter::repeat_n(spec.fill.unwrap_or(' '), count).collect::<String>();
    match spec.align.unwrap_or(default) {
        '<' => format!("{sign}{text}{}", fill(missing)),
        '=' => format!("{sign}{}{text}", fill(missing)),
        '^' => format!("{}{sign}{text}{}", fill(missing / 2), fill(missing - missing / 2)),
        _ => format!("{}{sign}{text}", fill(missing)),
    }
}

/// Jinja's `format` filter.
pub(super) fn filter(machine: &mut Machine<'_>, value: &Value, args: Arguments) -> Run<Value> {
    let text = print::text(&machine.budget, value)?;
    if !args.named.is_empty() {
        if !args.positional.is_empty() {
            return fault("can't handle positional and keyword arguments at the same time");
        }
        let entries = args.named.into_iter().map(|(key, value)| (Value::Str(key), value));
        let dict = super::value::Dict::new(&machine.budget, entries)?;
        return percent(machine, &text, &Value::Dict(dict.into()));
    }
    let values = machine.budget.tuple(args.positional)?;
    percent(machine, &text, &values)
}
