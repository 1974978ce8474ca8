//! JSON as tables and lists for people.

use serde_json::Value;

use crate::out::harmless;

/// Widest cell, in characters.
const CELL_CHARS_MAX: usize = 60;

/// Table of rows with these columns: head, and the path of the value. `*` at the end of a path marks a time in Unix
/// seconds.
pub(crate) fn table(rows: &[Value], columns: &[(&str, &str)]) -> String {
    let mut lines = vec![columns.iter().map(|(head, _)| (*head).to_owned()).collect::<Vec<_>>()];
    lines.extend(rows.iter().map(|row| columns.iter().map(|(_, path)| cell(row, path)).collect()));
    let width = |at: usize| lines.iter().map(|line| line[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..columns.len()).map(width).collect();
    let mut out = String::new();
    for line in &lines {
        let cells: Vec<_> = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        out += cells.join("  ").trim_end();
        out.push('\n');
    }
    out
}

/// Value of a column, shortened to a cell.
fn cell(row: &Value, path: &str) -> String {
    let text = value(row, path);
    if text.chars().count() <= CELL_CHARS_MAX {
        return text;
    }
    text.chars().take(CELL_CHARS_MAX - 1).chain(['…']).collect()
}

/// Whole value at a path of a row, as text for people. `*` at the end of a path marks a time in Unix seconds.
pub(crate) fn value(row: &Value, path: &str) -> String {
    let (path, is_time) = path.strip_suffix('*').map_or((path, false), |path| (path, true));
    let value = path.split('.').fold(row, |value, name| &value[name]);
    match value.as_u64() {
        Some(seconds) if is_time => penstock_base::clock::format(seconds),
        _ => shown(value),
    }
}

/// Value as text; characters that could move the terminal's cursor are replaced.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Null => "-".to_owned(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(all) if all.is_empty() => "-".to_owned(),
        Value::Array(all) => all.iter().map(shown).collect::<Vec<_>>().join(", "),
        Value::Object(all) => {
            all.iter().map(|(name, value)| format!("{name} {}", shown(value))).collect::<Vec<_>>().join(" ")
        }
        Value::Number(number) => number.to_string(),
    };
    harmless(&text)
}

/// Fields of one object, a line each.
pub(super) fn fields(value: &Value) -> String {
    let mut out = String::new();
    for (name, value) in value.as_object().into_iter().flatten() {
        out += &format!("{name:<22} {}\n", shown(value));
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [
            json!({"id": "a", "at": 0, "in": {"x": true}}),
            json!({"id": "longer", "at": null, "in": {"x": [1, "b"]}}),
        ];
        let text = table(&rows, &[("id", "id"), ("at", "at*"), ("x", "in.x")]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "id      at                    x");
        assert_eq!(lines[1], "a       1970-01-01T00:00:00Z  yes");
        assert_eq!(lines[2], "longer  -                     1, b");
    }

    #[test]
    fn nothing_moves_the_cursor() {
        assert_eq!(shown(&json!("a\u{1b}[2Jb\n")), "a\u{fffd}[2Jb\u{fffd}");
        assert!(cell(&json!({"x": "y".repeat(500)}), "x").chars().count() <= CELL_CHARS_MAX);
    }
}
