//! Rewrites of a schema where the grammar library reads JSON Schema more widely than validators do, or not at all. A rewritten schema only loses
//! values: each value that fits it fits the client's schema too, also for validators that disagree about dates and blanks.

use crate::schema::{COUNTS, LIST, NAMED, ONE};
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
        *pattern = with_blanks(pattern, BLANKS, &format!("{BLANKS}{ECMA_ALONE}{OTHERS_ALONE}"));
    }
    if let Some(Value::Object(named)) = map.get_mut("patternProperties") {
        let ecma = format!("{BLANKS}{ECMA_ALONE}");
        let all = std::mem::take(named);
        named.extend(all.into_iter().map(|(pattern, schema)| (with_blanks(&pattern, &ecma, &ecma), schema)));
    }
}

/// Replaces `\s` by the one class and `\S` by all but the other.
fn with_blanks(pattern: &str, blanks: &str, not_blanks: &str) -> String {
    let mut written = String::with_capacity(pattern.len());
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        match (c, chars.clone().next()) {
            ('\\', Some('s')) => written.extend(["[", blanks, "]"]),
            ('\\', Some('S')) => written.extend(["[^", not_blanks, "]"]),
            ('\\', Some(escaped)) => written.extend(['\\', escaped]),
            _ => {
                written.push(c);
                continue;
            }
        }
        chars.next();
    }
    written
}

/// Draws bounds in that are beyond what the library counts to. Bounds that leave nothing it can count to are refused by
/// [`out_of_reach`].
fn bounds(map: &mut Map<String, Value>) {
    for (keys, sign) in BOUNDS {
        for key in keys {
            if let Some(bound) = map.get_mut(key).filter(|bound| bound.as_f64().is_some_and(|at| at * sign > BOUND_MAX))
            {
                *bound = (BOUND_MAX * sign).into();
            }
        }
    }
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
        assert_eq!(with_blanks(r"^\s[a\s]\S\\\S$", "+", "-"), r"^[+][a[+]][^-]\\[^-]$");
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
        let out = |schema: Value| out_of_reach(schema.as_object().expect("an object"));
        assert_eq!(out(schema), None);
        assert_eq!(out(json!({"type": "integer", "exclusiveMinimum": 1e30})), Some("exclusiveMinimum"));
        assert_eq!(out(json!({"maximum": i64::MIN})), Some("maximum"));
    }
}
