//! Every hostile text in a process of its own: refused or compiled within a second of CPU and 64 MB, and then followed
//! without a long mask.

use crate::common::random;
use crate::hostile_corpus::{NoSpecials, corpus, tags};
use crate::measure::{demo, measure, spent};
use penstock_grammar::structural_tag::to_rules;
use penstock_grammar::{Grammar, Kind, Source, gbnf, lark};
use serde_json::{Value, json};
use std::process::Command;

/// Names the text for the process that measures it.
const VARIABLE: &str = "PENSTOCK_HOSTILE_TEXT";

/// CPU seconds of one text. The library is built with little optimization here; a release takes a third.
const SECONDS_MAX: f64 = 1.0;
const BYTES_MAX: u64 = 64 << 20;
/// CPU seconds of one mask, in the same build.
const MASK_SECONDS_MAX: f64 = 0.1;

#[test]
fn every_text_costs_little() {
    let program = std::env::current_exe().expect("this test");
    for (name, _) in corpus() {
        let run = Command::new(&program)
            .args(["hostile::one_text_alone", "--exact", "--nocapture"])
            .env(VARIABLE, name)
            .output()
            .expect("started");
        let text = String::from_utf8_lossy(&run.stdout);
        assert!(
            run.status.success() && text.contains("cost of"),
            "{name}: {text}{}",
            String::from_utf8_lossy(&run.stderr)
        );
    }
}

/// Measures the text that the environment names; does nothing in an ordinary run.
#[test]
fn one_text_alone() {
    let Ok(wanted) = std::env::var(VARIABLE) else { return };
    let corpus = corpus();
    let (name, source) = corpus.iter().find(|(name, _)| *name == wanted).expect("a name of the corpus");
    let cost = measure(source);
    println!("cost of {name}: {cost}");
    assert!(
        cost.seconds < SECONDS_MAX && cost.bytes < BYTES_MAX && cost.mask_seconds < MASK_SECONDS_MAX,
        "{name}: {cost}"
    );
}

#[test]
fn refusals_repeat_no_long_names() {
    let long = "n".repeat(60_000);
    let schema = |inner: Value| Source::json_schema(json!({"properties": {&long: inner}}).to_string());
    let refused = [
        schema(json!({"$ref": 1})),
        schema(json!({"$ref": format!("#{}", &long[..4000])})),
        schema(json!({"$ref": &long[..4000]})),
        schema(json!({"$ref": long})),
        schema(json!({"minimum": 1e300, "type": "integer"})),
        schema(json!({"const": 9_007_199_254_740_993_u64})),
        schema(json!({"multipleOf": long})),
        schema(json!({"type": long})),
        schema(json!({"pattern": &long[..8193]})),
        Source::json_schema(
            json!({"type": "object", &long: {"$ref": 1}, "$ref": format!("#/{}", &long[..4000])}).to_string(),
        ),
        Source::lark(format!("start: {long}")),
        Source::lark(format!("start: <{long}>")),
        Source::regex(format!("{}(", &long[..16_000])),
        Source { kind: Kind::Choice, text: format!("[{long}]") },
    ];
    let vocabulary = demo();
    for source in refused {
        let error = Grammar::compile(&source, &vocabulary).expect_err(&source.text[..60]).to_string();
        assert!(error.len() < 1024, "{} bytes: {error:.200}", error.len());
    }
    for text in [
        format!("root ::= {long}"),
        format!("{long} ::= \"a\"\n{long} ::= \"b\""),
        format!("root ::= \"a\"{{{long}}}"),
        format!("root ::= a.{}\na.{} ::= \"a\"", &long[..30_000], &long[..30_000]),
    ] {
        let error = gbnf::to_lark(&text).expect_err(&text[..60]).to_string();
        assert!(error.len() < 1024, "{} bytes: {error:.200}", error.len());
    }
    let noted = schema(json!({"format": long, "uniqueItems": true})).check().expect("noted");
    assert!(noted.len() == 2 && noted.iter().all(|noted| noted.to_string().len() < 1024));
    for format in [
        json!({"type": long}),
        json!({"type": "any_text", &long: 1}),
        json!({"type": "grammar", "grammar": format!("root ::= {long}")}),
        json!({"type": "json_schema", "json_schema": {"properties": {&long: {"$ref": 1}}}}),
        json!({"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": long, "content": {"type": "any_text"}, "end": ">"}]}),
    ] {
        let error = to_rules(&json!({ "format": format }).to_string(), &NoSpecials).expect_err("refused");
        assert!(error.at.len() + error.what.len() < 1024, "{:.200}", error.what);
    }
}

/// Longest text of a structural tag that the gateway takes from a client.
const TAG_BYTES_MAX: usize = 128 << 10;
/// Longest text of a grammar.
const RULES_BYTES_MAX: usize = 256 << 10;

/// Writes a tag as rules within the bounds of one grammar.
fn write(name: &str, tag: &str) {
    assert!(tag.len() <= TAG_BYTES_MAX, "{name}: {} bytes", tag.len());
    let (written, seconds, bytes) = spent(|| to_rules(tag, &NoSpecials));
    println!("{name}: {seconds:.3} s, {bytes} bytes, {:?}", written.as_ref().map(|rules| rules.rules.len()));
    assert!(seconds < SECONDS_MAX && bytes < BYTES_MAX, "{name}: {seconds} s, {bytes} bytes");
    match written {
        Ok(rules) => assert!(rules.rules.len() <= RULES_BYTES_MAX + 64, "{name}"),
        Err(error) => assert!(error.what.len() + error.at.len() < 4096, "{name}: {error}"),
    }
}

#[test]
fn every_tag_is_written_or_refused_at_little_cost() {
    for (name, tag) in tags() {
        write(name, &tag.to_string());
    }
}

#[test]
fn every_text_is_rewritten_at_little_cost() {
    let dotted = "b.a.".repeat(16_000);
    for (name, text) in [
        ("names and dots", format!("root ::= {}\"x\"", "a.".repeat(32_000))),
        ("names and dots of a name", format!("root ::= {dotted}\na.b.a ::= \"x\"")),
        ("a long name with dots", format!("root ::= {}\na{} ::= \"x\"", ".b".repeat(16_000), ".b".repeat(15_000))),
        ("rules by the thousand", (0..5000).map(|n| format!("r{n}::=\"\"\n")).collect()),
    ] {
        let (written, seconds, bytes) = spent(|| gbnf::to_rules(&text, "g").map(|(_, rules)| rules.len()));
        println!("{name}: {seconds:.3} s, {bytes} bytes, {written:?}");
        assert!(seconds < SECONDS_MAX && bytes < BYTES_MAX, "{name}: {seconds} s, {bytes} bytes");
    }
    let sources = corpus().into_iter().filter(|(_, source)| source.kind == Kind::Lark);
    let suffixes = format!("start: {}\na_{}: \"\"", "r1 ".repeat(40_000), "c".repeat(120_000));
    let texts = sources.map(|(name, source)| (name, source.text)).chain([("a name that ends in a suffix", suffixes)]);
    for (name, text) in texts {
        let (written, seconds, bytes) = spent(|| lark::to_rules(&text).map(|(_, rules)| rules.len()));
        println!("{name}: {seconds:.3} s, {bytes} bytes, {written:?}");
        assert!(seconds < SECONDS_MAX && bytes < BYTES_MAX, "{name}: {seconds} s, {bytes} bytes");
    }
}

/// Formats by chance: few kinds, long lists, marks that are repeated on every level.
struct Chance {
    seed: u64,
    at: usize,
    /// Bytes that the tag may still have.
    left: usize,
}

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.at += 1;
        random(self.seed, self.at) % bound
    }

    fn text(&mut self) -> String {
        let most = 1 << self.below(15);
        let length = (1 + self.below(most)).min(self.left / 8 + 1);
        self.left = self.left.saturating_sub(length * 6);
        let unit = ["a", "<", "\u{7f}", "\u{1}", "<f=", "é"][self.below(6)];
        format!("{}{unit}", unit.repeat(length / unit.len()))
    }

    fn texts(&mut self) -> Vec<String> {
        let count = 1 << self.below(11);
        (0..count).map_while(|n| (self.left > 64).then(|| format!("{}{n}", self.text()))).collect()
    }

    fn many(&mut self, depth: usize, make: fn(&mut Self, usize) -> Value) -> Vec<Value> {
        let count = 1 << self.below(11);
        (0..count).map_while(|_| (self.left > 256).then(|| make(self, depth + 1))).collect()
    }

    fn tag(&mut self, depth: usize) -> Value {
        self.left = self.left.saturating_sub(64);
        let ends = if self.below(3) == 0 { json!(self.texts()) } else { json!(self.text()) };
        json!({"type": "tag", "begin": self.text(), "content": self.format(depth + 1), "end": ends})
    }

    fn format(&mut self, depth: usize) -> Value {
        self.left = self.left.saturating_sub(64);
        match self.below(if depth > 12 || self.left < 512 { 3 } else { 8 }) {
            0 => json!({"type": "any_text"}),
            1 => json!({"type": "any_text", "excludes": self.texts()}),
            2 => json!({"type": "const_string", "value": self.text()}),
            3 => json!({"type": "or", "elements": self.many(depth, Self::format)}),
            4 => json!({"type": "sequence", "elements": self.many(depth, Self::tag)}),
            5 => {
                let tags = self.many(depth, Self::tag);
                let begins: Vec<_> = tags.iter().map(|tag| tag["begin"].clone()).collect();
                let triggers = if self.below(2) == 0 { json!(begins) } else { json!(self.texts()) };
                json!({"type": "triggered_tags", "tags": tags, "triggers": triggers, "excludes": self.texts()})
            }
            6 => json!({"type": "star", "content": self.format(depth + 1)}),
            _ => self.tag(depth),
        }
    }
}

#[test]
fn whatever_the_tag_its_cost_is_bounded() {
    let mut count = 0;
    for seed in 0..400 {
        let tag = json!({"format": Chance { seed, at: 0, left: TAG_BYTES_MAX }.tag(0)}).to_string();
        if tag.len() <= TAG_BYTES_MAX {
            count += 1;
            write(&format!("seed {seed}"), &tag);
        }
    }
    assert!(count > 200, "{count} tags");
}
