//! The demo vocabulary, sources of common shape, and walks that choose tokens by a seed.

use crate::measure;
use penstock_grammar::{CacheSizes, Grammar, Grammars, Mask, Matcher, Source, Vocabulary};
use penstock_vocabulary::TokenBytes;
use serde_json::{Value, json};
use std::sync::{Arc, LazyLock};

pub(crate) static TABLE: LazyLock<TokenBytes> = LazyLock::new(|| {
    TokenBytes::from_json(include_bytes!("../../../../models/penstock-demo/tokenizer.json"))
        .expect("the demo tokenizer")
});

pub(crate) static VOCABULARY: LazyLock<Arc<Vocabulary>> = LazyLock::new(measure::demo);

static GRAMMARS: LazyLock<Grammars> = LazyLock::new(|| Grammars::new(Arc::clone(&VOCABULARY), CacheSizes::default()));

/// Grammar of a source, compiled once per process.
#[track_caller]
pub(crate) fn grammar(source: &Source) -> Grammar {
    GRAMMARS.get(source).unwrap_or_else(|error| panic!("{}: {error}", source.text))
}

pub(crate) fn schema(schema: &Value) -> Source {
    Source::json_schema(schema.to_string())
}

/// Bytes of tokens.
pub(crate) fn bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| TABLE.token(*token).to_vec()).collect()
}

pub(crate) fn allowed(mask: &Mask<'_>) -> Vec<u32> {
    (0..mask.bits.len() as u32 * 32).filter(|token| mask.bits[*token as usize / 32] >> (token % 32) & 1 == 1).collect()
}

/// A random number for a position of a walk.
pub(crate) fn random(seed: u64, position: usize) -> usize {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (position as u64).wrapping_mul(0xd1b5_4a32_d192_ed03);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x ^ (x >> 27)) as usize
}

/// Next token of a walk: the forced one, else one of the mask by the seed; `None` where the text ends.
pub(crate) fn step(matcher: &mut Matcher, seed: u64) -> Option<u32> {
    if let Some(forced) = matcher.forced().expect("within limits") {
        return Some(forced);
    }
    let position = matcher.consumed();
    let mask = matcher.mask().expect("within limits");
    let (may_end, allowed) = (mask.may_end, allowed(&mask));
    let chance = random(seed, position);
    if allowed.is_empty() || (may_end && chance.is_multiple_of(3)) {
        assert!(may_end, "a text that cannot end can go on");
        return None;
    }
    // Short tokens end strings and numbers earlier.
    let closing = allowed.iter().find(|token| matches!(TABLE.token(**token), [b'"' | b'}' | b']' | b',']));
    Some(closing.copied().filter(|_| chance % 5 < 2).unwrap_or(allowed[(chance / 5) % allowed.len()]))
}

/// Walks from where the matcher is to the end of the text, or `max` tokens far; returns the tokens and whether it ended.
pub(crate) fn walk(matcher: &mut Matcher, seed: u64, max: usize) -> (Vec<u32>, bool) {
    let mut tokens = Vec::new();
    while tokens.len() < max {
        let Some(token) = step(matcher, seed) else { return (tokens, true) };
        matcher
            .consume(token)
            .unwrap_or_else(|error| panic!("{error} after {:?}", String::from_utf8_lossy(&bytes(&tokens))));
        tokens.push(token);
        if matcher.is_complete() {
            return (tokens, true);
        }
    }
    (tokens, false)
}

/// Schemas as clients send them.
pub(crate) fn schemas() -> Vec<Value> {
    vec![
        json!({"type": "object"}),
        json!({"type": "boolean"}),
        json!({"type": ["integer", "null"]}),
        json!({"enum": ["red", "green", "blue", 3, null]}),
        json!({"const": {"a": [1, 2, {"b": "c"}]}}),
        json!({"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 250}, "minItems": 1, "maxItems": 4}),
        json!({"type": "string", "maxLength": 12}),
        json!({"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"}),
        json!({"type": "string", "format": "date"}),
        json!({"type": "string", "format": "uuid"}),
        json!({"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}]}),
        json!({
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "email": {"type": "string", "format": "email", "maxLength": 30},
            },
            "required": ["name", "age"],
            "additionalProperties": false,
        }),
        json!({
            "type": "object",
            "properties": {
                "temperature_celsius": {"type": "number"},
                "conditions": {"enum": ["sunny", "cloudy", "rain"]},
                "location_information": {
                    "type": "object",
                    "properties": {"latitude": {"type": "number"}, "longitude": {"type": "number"}},
                    "required": ["latitude", "longitude"],
                    "additionalProperties": false,
                },
            },
            "required": ["temperature_celsius", "conditions", "location_information"],
            "additionalProperties": false,
        }),
        json!({
            "$defs": {"step": {
                "type": "object",
                "properties": {"explanation": {"type": "string", "maxLength": 15}, "output": {"type": "string", "maxLength": 9}},
                "required": ["explanation", "output"],
                "additionalProperties": false,
            }},
            "type": "object",
            "properties": {
                "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "maxItems": 3},
                "final_answer": {"type": "string", "maxLength": 9},
            },
            "required": ["steps", "final_answer"],
            "additionalProperties": false,
        }),
        json!({
            "$defs": {"node": {
                "type": "object",
                "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["value", "next"],
                "additionalProperties": false,
            }},
            "$ref": "#/$defs/node",
        }),
    ]
}

/// The schemas, and texts of the other kinds.
pub(crate) fn sources() -> Vec<Source> {
    let mut all: Vec<Source> = schemas().iter().map(schema).collect();
    all.push(Source::json_object());
    all.push(Source::regex(r"(yes|no), because [a-z ]{3,20}\."));
    all.push(Source::regex(r"^\d{4}-\d{2}-\d{2}$"));
    all.push(Source::choice(["positive", "negative", "neutral", "not applicable", "ünïcode \"quoted\"\n"]));
    all.push(Source::lark("start: \"SELECT \" COLUMN (\", \" COLUMN)* \" FROM \" COLUMN\nCOLUMN: /[a-z]{1,8}/"));
    all.push(Source::lark("start: \"<call>\" %json {\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\", \"maxLength\": 8}}, \"required\": [\"city\"], \"additionalProperties\": false} \"</call>\""));
    all
}
