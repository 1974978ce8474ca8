//! Rewrites of a schema where the grammar library reads JSON Schema more widely than validators do, or not at all. A rewritten schema only loses
//! values: each value that fits it fits the client's schema too, also for validators that disagree about dates and blanks.

use crate::expression::{Part, Parts};
use crate::schema::{COUNTS, LIST, NAMED, ONE};
use llguidance::regex_to_lark;
use serde_json::{Map, Value, json};

/// Date of the format `date` that every validator takes: no leap days, no year 0.
const DATE: &str = "[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|\
    (?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))";
/// Time of the format `time` that every validator takes: no leap seconds.
const TIME: &str =
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";

/// Blanks of ECMA-262, whose expressions JSON Schema has, without the byte order mark.
const BLANKS: &str = r"\t-\r\x20\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}";
/// Blanks of ECMA-262 that expressions of other languages do not count as such.
const ECMA_ALONE: &str = r"\x{feff}";
/// Blanks of Rust's or Python's expressions that ECMA-262 does not count as such.
const OTHERS_ALONE: &str = r"\x1c-\x1f\x{85}";

/// Largest bound of a number that the library can write with its digits: it counts in 64 bits.
const BOUND_MAX: f64 = 9.2e18;

/// Bounds of numbers, and the side of zero to which nothing lies beyond them.
const BOUNDS: [([&str; 2], f64); 2] = [(["maximum", "exclusiveMaximum"], 1.0), (["minimum", "exclusiveMinimum"], -1.0)];

/// Writes counts such as `2.0`, which are integers to JSON Schema, as integers.
pub(crate) fn counts(schema: &mut Value) {
    each(schema, &mut |map| {
        for (_, value) in map.iter_mut().filter(|(key, _)| COUNTS.contains(&key.as_str())) {
            let whole = value.as_f64().filter(|count| value.is_f64() && *count >= 0.0 && count.fract() == 0.0);
            if let Some(count) = whole {
                // A float above the range becomes the largest integer, which is above every limit.
                *value = (count as u64).into();
            }
        }
    });
}

/// Narrows formats, blanks in patterns and bounds of numbers.
pub(crate) fn values(schema: &mut Value) {
    each(schema, &mut |map| {
        patterns(map);
        formats(map);
        bounds(map);
    });
}

/// Calls `work` with each schema in a schema, itself included.
pub(crate) fn each(schema: &mut Value, work: &mut impl FnMut(&mut Map<String, Value>)) {
    let Value::Object(map) = schema else { return };
    work(map);
    for (key, value) in map {
        let key = key.as_str();
        match value {
            Value::Object(named) if NAMED.contains(&key) => named.values_mut().for_each(|schema| each(schema, work)),
            Value::Array(list) if LIST.contains(&key) => list.iter_mut().for_each(|schema| each(schema, work)),
            Value::Object(_) if ONE.contains(&key) => each(value, work),
            _ => {}
        }
    }
}

/// Replaces formats whose values the library draws too widely by patterns: validators refuse leap seconds and the
/// 29th of February of most years.
fn formats(map: &mut Map<String, Value>) {
    let pattern = match map.get("format").and_then(Value::as_str) {
        Some("date") => format!("^{DATE}$"),
        Some("time") => format!("^{TIME}$"),
        Some("date-time") => format!("^{DATE}T{TIME}$"),
        _ => return,
    };
    map.remove("format");
    if !map.contains_key("pattern") {
        map.insert("pattern".into(), pattern.into());
    } else if let Some(Value::Array(all)) = map.get_mut("allOf") {
        all.push(json!({ "pattern": pattern }));
    } else {
        map.insert("allOf".into(), json!([{ "pattern": pattern }]));
    }
}

/// Writes out what is a blank. A text has those that every language's expressions take; names of properties have ECMA's exactly, since the
/// schema of a name that is taken wrongly is another one.
fn patterns(map: &mut Map<String, Value>) {
    if let Some(Value::String(pattern)) = map.get_mut("pattern") {
        *pattern = text_blanks(pattern);
    }
    if let Some(Value::Object(named)) = map.get_mut("patternProperties") {
        let ecma = format!("{BLANKS}{ECMA_ALONE}");
        let all = std::mem::take(named);
        named.extend(all.into_iter().map(|(pattern, schema)| (with_blanks(&pattern, &ecma, &ecma), schema)));
    }
}

/// Replaces `\s` by the one class and `\S` by all but the other; where a class around them is negated, the two change
/// places, so that the class has no blank of either.
fn with_blanks(pattern: &str, blanks: &str, not_blanks: &str) -> String {
    let mut written = String::with_capacity(pattern.len());
    // Negation of each class around the place, with those around it, and whether the class subtracts from here on.
    let mut classes: Vec<(bool, bool)> = Vec::new();
    let mut before = None;
    for part in Parts::of(pattern) {
        let negated = classes.last().is_some_and(|(negated, subtracts)| negated ^ subtracts);
        let (few, many) = if negated { (not_blanks, blanks) } else { (blanks, not_blanks) };
        match part {
            Part::Escape("\\s") => written.extend(["[", few, "]"]),
            Part::Escape("\\S") => written.extend(["[^", many, "]"]),
            Part::Escape(text) | Part::Named(text) => written.push_str(text),
            Part::Open(text) => {
                classes.push((negated ^ text.starts_with("[^"), false));
                written.push_str(text);
            }
            Part::Close => {
                classes.pop();
                written.push(']');
            }
            Part::Plain(c) => {
                if let (Some(class), true) = (classes.last_mut(), before == Some(part)) {
                    class.1 = if c == '&' { false } else { class.1 | (c == '-') };
                }
                written.push(c);
            }
        }
        before = Some(part);
    }
    written
}

/// A pattern of JSON Schema as a regular expression of the library's, that of a text alone: blanks as in `values`,
/// digits and letters of words those of ASCII, as in ECMA-262.
pub fn text_pattern(pattern: &str) -> String {
    regex_to_lark(&text_blanks(pattern), "dw")
}

fn text_blanks(pattern: &str) -> String {
    with_blanks(pattern, BLANKS, &format!("{BLANKS}{ECMA_ALONE}{OTHERS_ALONE}"))
}

/// Draws bounds in that are beyond what the library counts to, or that no float is equal to. Bounds that leave nothing it
/// can count to are refused by [`out_of_reach`].
fn bounds(map: &mut Map<String, Value>) {
    for (keys, sign) in BOUNDS {
        for key in keys {
            if let Some(bound) = map.get_mut(key).filter(|bound| bound.as_f64().is_some_and(|at| at * sign > BOUND_MAX))
            {
                *bound = (BOUND_MAX * sign).into();
            } else if let Some(bound) = map.get_mut(key).filter(|bound| inexact(bound)) {
                *bound = inward(bound, sign);
            }
        }
    }
}

/// Whole number of a value.
fn whole(value: &Value) -> Option<i128> {
    value.as_i64().map(i128::from).or(value.as_u64().map(i128::from))
}

/// Returns true for a whole number that no float is equal to. The library reads numbers as floats.
fn inexact(value: &Value) -> bool {
    whole(value).is_some_and(|whole| (whole as f64) as i128 != whole)
}

/// Next float on the inner side of a bound that no float is equal to.
fn inward(bound: &Value, sign: f64) -> Value {
    let (Some(whole), Some(near)) = (whole(bound), bound.as_f64()) else { return bound.clone() };
    let is_outside = if sign > 0.0 { near as i128 > whole } else { (near as i128) < whole };
    match (is_outside, sign > 0.0) {
        (false, _) => near,
        (true, true) => near.next_down(),
        (true, false) => near.next_up(),
    }
    .into()
}

/// Keyword of a value with a whole number that no float is equal to, and that number: the library would write another.
pub(crate) fn inexact_value(map: &Map<String, Value>) -> Option<(&'static str, &Value)> {
    fn find(value: &Value) -> Option<&Value> {
        match value {
            Value::Array(list) => list.iter().find_map(find),
            Value::Object(map) => map.values().find_map(find),
            value => Some(value).filter(|value| inexact(value)),
        }
    }
    ["const", "enum"].into_iter().find_map(|key| Some((key, find(map.get(key)?)?)))
}

/// Keyword of a bound that no number within the library's reach satisfies.
pub(crate) fn out_of_reach(map: &Map<String, Value>) -> Option<&'static str> {
    let is_out = |key: &str, sign: f64| map.get(key).and_then(Value::as_f64).is_some_and(|at| at * sign < -BOUND_MAX);
    BOUNDS
        .iter()
        .flat_map(|(keys, sign)| keys.iter().map(|key| (*key, *sign)))
        .find_map(|(key, sign)| is_out(key, sign).then_some(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_are_those_of_every_language() {
        let kept = [r"\\s", "s", r"\d\w", "", r"a\"];
        kept.iter().for_each(|pattern| assert_eq!(with_blanks(pattern, "+", "-"), *pattern));
        for (pattern, written) in [
            (r"^\s[a\s]\S\\\S$", r"^[+][a[+]][^-]\\[^-]$"),
            (r"[^\s]", "[^[-]]"),
            (r"[^\S]", "[^[^+]]"),
            (r"[^a[^\s]\s]\s", "[^a[^[+]][-]][+]"),
            (r"[^]\s]", "[^][-]]"),
            (r"[^[:alpha:]\s]", "[^[:alpha:][-]]"),
            (r"[\w--\s]\s", r"[\w--[-]][+]"),
            (r"[\w--a&&\s]", r"[\w--a&&[+]]"),
            (r"\[^\s]", r"\[^[+]]"),
        ] {
            assert_eq!(with_blanks(pattern, "+", "-"), written, "{pattern}");
        }
    }

    #[test]
    fn whole_counts_are_integers() {
        let mut schema =
            json!({"maxItems": 2.0, "items": {"minLength": 1.0, "maxLength": 2.5, "const": {"minLength": 1.0}}});
        counts(&mut schema);
        assert_eq!(
            schema,
            json!({"maxItems": 2, "items": {"minLength": 1, "maxLength": 2.5, "const": {"minLength": 1.0}}})
        );
    }

    #[test]
    fn bounds_are_drawn_in_and_never_out() {
        let mut schema = json!({"maximum": 1e30, "minimum": -1e30, "exclusiveMaximum": 5, "exclusiveMinimum": true});
        values(&mut schema);
        let want =
            json!({"maximum": BOUND_MAX, "minimum": -BOUND_MAX, "exclusiveMaximum": 5, "exclusiveMinimum": true});
        assert_eq!(schema, want);
        let most = 9_007_199_254_740_993_i64;
        let mut schema =
            json!({"minimum": most, "maximum": most, "exclusiveMinimum": -most, "exclusiveMaximum": -most});
        values(&mut schema);
        let (above, below) = (9_007_199_254_740_994.0, 9_007_199_254_740_992.0);
        let want = json!({"minimum": above, "maximum": below, "exclusiveMinimum": -below, "exclusiveMaximum": -above});
        assert_eq!(schema, want);
        let out = |schema: Value| out_of_reach(schema.as_object().expect("an object"));
        assert_eq!(out(json!({"maximum": 1})), None);
        assert_eq!(out(json!({"type": "integer", "exclusiveMinimum": 1e30})), Some("exclusiveMinimum"));
        assert_eq!(out(json!({"maximum": i64::MIN})), Some("maximum"));
    }
}
