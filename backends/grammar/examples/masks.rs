//! Cost of masks over a large vocabulary: `masks FILE [MIB]`, where each line of FILE is a token's bytes in hexadecimal, in the
//! order of their ids, and MIB is memory that is written between two masks, as a model does that empties the caches. Compiles 32 grammars of common shape, follows each with plausible text, and prints the time to
//! the first mask, mean and tail of the masks after it, the longest ones with what they follow, and the share of forced tokens.

use penstock_grammar::{Grammar, Matcher, Source, TokenText, Vocabulary};
use serde_json::{Value, json};
use std::time::Instant;

/// Walks of each grammar, and most tokens of each.
const WALKS: u64 = 6;
const TOKENS_MAX: usize = 300;

fn main() {
    let path = std::env::args().nth(1).expect("a file of tokens in hexadecimal");
    let text = std::fs::read_to_string(path).expect("a readable file");
    let tokens: Vec<Vec<u8>> = text.lines().map(bytes).collect();
    let began = Instant::now();
    let words = tokens.iter().map(|bytes| TokenText { bytes, is_special: false });
    let vocabulary = Vocabulary::new(words, &[], tokens.len()).expect("a vocabulary");
    println!("{} tokens taken in {:.0} ms", tokens.len(), began.elapsed().as_secs_f64() * 1e3);
    vocabulary.index().expect("an index");
    println!("{} tokens indexed in {:.0} ms", tokens.len(), began.elapsed().as_secs_f64() * 1e3);
    let mib: usize = std::env::args().nth(2).map_or(0, |count| count.parse().expect("a number of MiB"));
    let mut memory = vec![1_u64; mib << 17];
    let (mut firsts, mut masks, mut forced, mut all) = (Vec::new(), Vec::new(), 0, 0);
    for (number, source) in sources().iter().enumerate() {
        let began = Instant::now();
        let grammar = Grammar::compile(source, &vocabulary).expect("a good source");
        grammar.matcher().mask().expect("within limits");
        firsts.push(began.elapsed().as_secs_f64() * 1e3);
        for walk in 0..WALKS {
            let seed = number as u64 * 1000 + walk;
            let (jumped, said) = follow(&mut grammar.matcher(), &tokens, seed, &mut memory, &mut masks);
            forced += jumped;
            all += said;
        }
    }
    print("compile and first mask, ms", &mut firsts);
    print("mask, ms", &mut masks.iter().map(|mask| mask.ms).collect::<Vec<_>>());
    masks.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    for Timed { ms, allowed, after } in &masks[..masks.len().min(10)] {
        println!("  {ms:.2} ms, {allowed} tokens allowed after {after:?}");
    }
    println!("forced tokens: {forced} of {all} ({:.0} %)", 100.0 * forced as f64 / all as f64);
}

/// Time of a mask, the number of tokens that it allows, and the end of the text that it follows.
struct Timed {
    ms: f64,
    allowed: u32,
    after: String,
}

fn bytes(line: &str) -> Vec<u8> {
    let digit = |c: u8| (c as char).to_digit(16).expect("a hexadecimal digit") as u8;
    line.as_bytes().chunks_exact(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

fn print(name: &str, values: &mut [f64]) {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values[((values.len() - 1) as f64 * share) as usize];
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    println!(
        "{name}: mean {mean:.3}, median {:.3}, p99 {:.3}, max {:.3} of {}",
        at(0.5),
        at(0.99),
        at(1.0),
        values.len()
    );
}

/// Follows a grammar; returns the number of forced tokens and of all.
fn follow(
    matcher: &mut Matcher,
    tokens: &[Vec<u8>],
    seed: u64,
    memory: &mut [u64],
    masks: &mut Vec<Timed>,
) -> (usize, usize) {
    let (mut jumped, mut text) = (0, Vec::new());
    while matcher.consumed() < TOKENS_MAX && !matcher.is_complete() {
        if let Some(token) = matcher.forced().expect("within limits") {
            matcher.consume(token).expect("forced");
            text.extend_from_slice(&tokens[token as usize]);
            jumped += 1;
            continue;
        }
        let chance = mix(seed ^ matcher.consumed() as u64) as usize;
        memory.iter_mut().for_each(|word| *word = word.wrapping_mul(3));
        let mask = matcher.mask().expect("within limits");
        let allowed = mask.bits.iter().map(|word| word.count_ones()).sum();
        let after = String::from_utf8_lossy(&text[text.len().saturating_sub(40)..]).into_owned();
        masks.push(Timed { ms: mask.elapsed.as_secs_f64() * 1e3, allowed, after });
        let allows = |token: usize| mask.bits[token / 32] >> (token % 32) & 1 == 1;
        // Words of letters inside of strings, and an end now and then: a random token of all is mostly no text.
        let is_end = |token: &usize| matches!(tokens[*token].first(), Some(b'"' | b'}' | b']' | b','));
        let is_word = |token: &usize| tokens[*token].iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b' ');
        let from = chance % tokens.len();
        let order = || (from..tokens.len()).chain(0..from).filter(|token| allows(*token));
        let end = order().find(is_end).filter(|_| chance.is_multiple_of(5));
        let Some(token) = end.or_else(|| order().find(is_word)).or_else(|| order().next()) else { break };
        matcher.consume(token as u32).expect("allowed");
        text.extend_from_slice(&tokens[token]);
    }
    (jumped, matcher.consumed())
}

fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 7
}

/// Schemas of tools and answers, with names of their own, and a few texts of other kinds.
fn sources() -> Vec<Source> {
    let closed = |properties: Value| {
        let required: Vec<String> = properties.as_object().expect("an object").keys().cloned().collect();
        json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
    };
    let mut schemas = Vec::new();
    for topic in ["weather", "invoice", "calendar", "search", "flight", "contact"] {
        let name = |field: &str| format!("{topic}_{field}");
        schemas.push(closed(json!({
            name("location"): {"type": "string"},
            name("unit"): {"enum": ["celsius", "fahrenheit", "kelvin"]},
            name("days"): {"type": "integer", "minimum": 1, "maximum": 30},
        })));
        let item = closed(json!({name("title"): {"type": "string"}, name("amount"): {"type": "number"}}));
        schemas.push(closed(json!({
            name("items"): {"type": "array", "items": item, "minItems": 1, "maxItems": 8},
            name("created"): {"type": "string", "format": "date-time"},
            name("is_final"): {"type": "boolean"},
        })));
        schemas.push(json!({
            "type": "object",
            "properties": {
                name("email"): {"type": "string", "format": "email"},
                name("tags"): {"type": "array", "items": {"type": "string", "maxLength": 20}},
                name("note"): {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": [name("email")],
        }));
        let step = closed(json!({"explanation": {"type": "string"}, "output": {"type": "string"}}));
        schemas.push(json!({
            "$defs": {"step": step},
            "type": "object",
            "properties": {"steps": {"type": "array", "items": {"$ref": "#/$defs/step"}}, name("answer"): {"type": "string"}},
            "required": ["steps", name("answer")],
            "additionalProperties": false,
        }));
    }
    let mut all: Vec<Source> = schemas.iter().map(|schema| Source::json_schema(schema.to_string())).collect();
    all.push(Source::json_object());
    all.push(Source::json_schema(
        json!({"type": "array", "items": {"type": "string", "pattern": "^[A-Z]{3}-\\d{4}$"}}).to_string(),
    ));
    all.push(Source::regex(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}"));
    all.push(Source::regex(r"(yes|no), because [a-z ,]{10,200}\."));
    all.push(Source::choice(["positive", "negative", "neutral", "mixed", "unclear"]));
    all.push(Source::lark(
        "start: \"SELECT \" W (\", \" W)* \" FROM \" W (\" WHERE \" W \" = \" W)?\nW: /[a-z_]{1,20}/",
    ));
    all.push(Source::lark("start: expr\nexpr: term ((\"+\" | \"-\") term)*\nterm: /[0-9]{1,6}/ | \"(\" expr \")\""));
    all.push(Source::json_schema(json!({"type": "object", "additionalProperties": {"type": "string"}}).to_string()));
    all
}
