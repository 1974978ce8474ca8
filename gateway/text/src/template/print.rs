//! Texts of values as Python's `str` and `repr` write them.

use std::{fmt::Write, sync::Arc};

use super::{
    RenderError,
    budget::{Budget, Run, TEXT_BYTES_MAX},
    value::{Callable, Seq, Value, View},
};

/// Python's `str(value)`.
pub(super) fn text(budget: &Budget, value: &Value) -> Run<Arc<str>> {
    if let Value::Str(text) | Value::Markup(text) = value {
        return Ok(text.clone());
    }
    let mut out = String::new();
    write_text(budget, value, &mut out)?;
    budget.bytes(out.len())?;
    Ok(out.into())
}

/// Appends Python's `str(value)`.
pub(super) fn write_text(budget: &Budget, value: &Value, out: &mut String) -> Run<()> {
    match value {
        Value::Str(text) | Value::Markup(text) => push(out, text),
        Value::Undefined(_) => Ok(()),
        _ => write_repr(budget, value, out),
    }
}

fn push(out: &mut String, text: &str) -> Run<()> {
    if out.len() + text.len() > TEXT_BYTES_MAX {
        return Err(RenderError::TooMuch);
    }
    out.push_str(text);
    Ok(())
}

/// Appends Python's `repr(value)`.
pub(super) fn write_repr(budget: &Budget, value: &Value, out: &mut String) -> Run<()> {
    budget.step(1)?;
    match value {
        Value::Undefined(_) => push(out, "Undefined"),
        Value::None => push(out, "None"),
        Value::Bool(value) => push(out, if *value { "True" } else { "False" }),
        Value::Int(value) => push(out, &value.to_string()),
        Value::Float(value) => push(out, &float(*value)),
        Value::Markup(text) => {
            budget.scan(4 * text.len())?;
            push(out, &format!("Markup({})", quoted(text, false)))
        }
        Value::Str(text) => {
            budget.scan(4 * text.len())?;
            push(out, &quoted(text, false))
        }
        Value::List(seq) => write_items(budget, seq, out, ["[", "]"]),
        Value::Tuple(seq) => write_items(budget, seq, out, ["(", if seq.items.len() == 1 { ",)" } else { ")" }]),
        Value::Dict(dict) => {
            push(out, "{")?;
            for (index, (key, value)) in dict.entries.iter().enumerate() {
                push(out, if index > 0 { ", " } else { "" })?;
                write_repr(budget, key, out)?;
                push(out, ": ")?;
                write_repr(budget, value, out)?;
            }
            push(out, "}")
        }
        Value::Range(range) if range.step == 1 => push(out, &format!("range({}, {})", range.start, range.stop)),
        Value::Range(range) => push(out, &format!("range({}, {}, {})", range.start, range.stop, range.step)),
        Value::View(view, _) => {
            push(
                out,
                match view {
                    View::Keys => "dict_keys(",
                    View::Values => "dict_values(",
                    View::Items => "dict_items(",
                },
            )?;
            write_items(budget, &*value.items(budget)?, out, ["[", "]"])?;
            push(out, ")")
        }
        Value::Iter(_) => push(out, "<generator object>"),
        Value::Namespace(_) => push(out, "<Namespace>"),
        Value::Loop(state) => {
            push(out, &format!("<LoopContext {}/{}>", state.index.get() + 1, state.items.items.len()))
        }
        Value::Callable(callable) => match &**callable {
            Callable::Macro(node, _) => push(out, &format!("<Macro {}>", quoted(&node.name, false))),
            _ => push(out, "<function>"),
        },
    }
}

fn write_items(budget: &Budget, seq: &Seq, out: &mut String, marks: [&str; 2]) -> Run<()> {
    push(out, marks[0])?;
    for (index, item) in seq.items.iter().enumerate() {
        push(out, if index > 0 { ", " } else { "" })?;
        write_repr(budget, item, out)?;
    }
    push(out, marks[1])
}

/// A text in quotes, as Python's `repr` writes it, or its `ascii`.
pub(super) fn quoted(text: &str, ascii: bool) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if is_marker(c) || c == ' ' || c.is_ascii_graphic() || (!ascii && is_printable(c)) => out.push(c),
            c if (c as u32) < 0x100 => write!(out, "\\x{:02x}", c as u32).expect("writing to a string"),
            c if (c as u32) < 0x10000 => write!(out, "\\u{:04x}", c as u32).expect("writing to a string"),
            c => write!(out, "\\U{:08x}", c as u32).expect("writing to a string"),
        }
    }
    out.push(quote);
    out
}

/// Markers of `control.rs`, which must stay recognizable: noncharacters are not escaped.
pub(super) fn is_marker(c: char) -> bool {
    ('\u{FDD0}'..='\u{FDEF}').contains(&c)
}

/// Python's `str.isprintable` of a character: neither a separator other than the blank, nor control, format,
/// unassigned or private. The standard library's debug text escapes the same ones.
pub(super) fn is_printable(c: char) -> bool {
    let mut pair = [0; 5];
    pair[0] = b'a';
    let length = 1 + c.encode_utf8(&mut pair[1..]).len();
    let text = std::str::from_utf8(&pair[..length]).unwrap_or_default();
    matches!(c, '\'' | '"' | '\\') || text.escape_debug().eq(text.chars())
}

/// Python's `str.isspace` of a character.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Python's `repr(float)`: shortest digits that read back; exponents below -4 and from 16 on.
pub(super) fn float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() {
            "nan"
        } else if value > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .into();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the format of {:e}");
    let exponent: i32 = exponent.parse().expect("the format of {:e}");
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}
