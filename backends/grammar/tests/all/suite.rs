//! The JSON Schema Test Suite: what becomes of each schema, and of each instance in every spelling that its value has.
//!
//! - enforced: no instance that the suite calls invalid is accepted;
//! - named: keywords of the schema are not enforced, and `strict` refuses it by their names;
//! - refused: the schema does not compile, and the message names what stopped it;
//! - wrong: an invalid instance is accepted, and nothing was named.
//!
//! A valid instance of an enforced schema that is accepted in no spelling is counted as narrower: a form may be stricter than its schema.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;

use flate2::read::GzDecoder;
use penstock_grammar::{Grammar, Source, TokenText, Vocabulary};
use serde_json::{Map, Value};

const DRAFTS: [(&str, &[u8]); 4] = [
    ("2020-12", include_bytes!("../suite/draft2020-12.jsonl.gz")),
    ("2019-09", include_bytes!("../suite/draft2019-09.jsonl.gz")),
    ("7", include_bytes!("../suite/draft7.jsonl.gz")),
    ("4", include_bytes!("../suite/draft4.jsonl.gz")),
];

/// Drafts whose keywords the page lists.
const LISTED: [&str; 2] = ["2020-12", "7"];

/// Keywords whose invalid instances are accepted, with the count of their schemas in a draft. The list may only become shorter.
///
/// Draft 7 lets a validator decode texts, which no other draft does; here as in those, these keywords describe a text.
const WRONG: [(&str, &str, usize); 1] = [("7", "optional/content", 3)];

/// Words by which messages of refusals name the keyword at fault.
const NAMES: [&str; 11] = [
    "`$ref`",
    "Reference segment",
    "`multipleOf`",
    "patternProperty regexes",
    "regex parse error",
    "`false`",
    "schema is false",
    "`maximum`",
    "`minimum`",
    "`exclusiveMaximum`",
    "`exclusiveMinimum`",
];

/// Orders of members that are tried for an instance, of 120 for five members.
const ORDERS_MAX: usize = 120;

#[derive(Default)]
struct Counts {
    enforced: usize,
    named: usize,
    refused: usize,
    wrong: usize,
    valid: usize,
    narrower: usize,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.enforced += other.enforced;
        self.named += other.named;
        self.refused += other.refused;
        self.wrong += other.wrong;
        self.valid += other.valid;
        self.narrower += other.narrower;
    }

    fn cells(&self) -> String {
        let Self { enforced, named, refused, wrong, valid, narrower } = self;
        format!("{enforced} | {named} | {refused} | {wrong} | {narrower} of {valid}")
    }
}

/// Group of tests in the suite: keyword, description, schema, instances.
type Group = (String, String, Value, Vec<(Value, bool)>);

fn groups(compressed: &[u8]) -> Vec<Group> {
    let mut text = String::new();
    GzDecoder::new(compressed).read_to_string(&mut text).expect("a compressed text");
    text.lines().map(|line| serde_json::from_str(line).expect("a group of the suite")).collect()
}

/// A vocabulary of single bytes, so that any text can be followed.
fn bytes() -> Arc<Vocabulary> {
    let all: Vec<[u8; 1]> = (0..=255_u8).map(|byte| [byte]).collect();
    let end = TokenText { bytes: b"</s>", is_special: true };
    let tokens = all.iter().map(|byte| TokenText { bytes: byte, is_special: false }).chain([end]);
    Vocabulary::new(tokens, &[256], 257).expect("a vocabulary of bytes")
}

/// Outcomes of all groups of a draft, by keyword; faults are added to the list.
fn look(draft: &str, groups: &[Group], faults: &mut Vec<String>) -> BTreeMap<String, Counts> {
    let vocabulary = bytes();
    let mut all: BTreeMap<String, Counts> = BTreeMap::new();
    for (keyword, description, schema, instances) in groups {
        let counts = all.entry(keyword.clone()).or_default();
        let source = Source::json_schema(schema.to_string());
        let refusal = match source.check() {
            Ok(unenforced) if !unenforced.is_empty() => {
                counts.named += 1;
                continue;
            }
            Err(error) => error,
            Ok(_) => match Grammar::compile(&source, &vocabulary) {
                Err(error) => error,
                Ok(grammar) => {
                    let is_known = WRONG.iter().any(|(of, name, _)| (*of, *name) == (draft, keyword));
                    // Draft 4 has numbers that are told apart by their spelling.
                    let wrong = follow(&grammar, instances, draft != "4", counts);
                    let told = |data| format!("{draft} {keyword}, {description}: {schema} takes {data}");
                    faults.extend(wrong.into_iter().filter(|_| !is_known).map(told));
                    continue;
                }
            },
        };
        counts.refused += 1;
        let message = refusal.to_string();
        if !NAMES.iter().any(|name| message.contains(name)) {
            faults.push(format!("{draft} {keyword}, {description}: {schema} is refused without a name: {message}"));
        }
    }
    all
}

/// Counts what becomes of the instances of a schema that compiles; returns the invalid texts that are accepted.
///
/// `is_one_number`: `1.0` and `1` are one value.
fn follow(grammar: &Grammar, instances: &[(Value, bool)], is_one_number: bool, counts: &mut Counts) -> Vec<String> {
    let mut wrong = Vec::new();
    for (data, is_valid) in instances {
        let accepted = spellings(data, is_one_number).into_iter().find(|text| accepts(grammar, text));
        counts.valid += usize::from(*is_valid);
        counts.narrower += usize::from(*is_valid && accepted.is_none());
        wrong.extend(accepted.filter(|_| !is_valid));
    }
    *(if wrong.is_empty() { &mut counts.enforced } else { &mut counts.wrong }) += 1;
    wrong
}

fn accepts(grammar: &Grammar, text: &str) -> bool {
    let mut matcher = grammar.matcher();
    for byte in text.bytes() {
        let is_allowed = matcher.mask().is_ok_and(|mask| mask.bits[usize::from(byte) / 32] >> (byte % 32) & 1 == 1);
        if !is_allowed || matcher.consume(u32::from(byte)).is_err() {
            return false;
        }
    }
    matcher.is_accepting().unwrap_or(false)
}

/// Ways to write a whole number: as an integer, with a point, with an exponent.
const NUMBERS: [fn(i64) -> String; 3] =
    [|whole| whole.to_string(), |whole| format!("{whole}.0"), |whole| format!("{whole}e0")];

/// Compact texts of a value: orders of members, ways to write whole numbers, letters as they are and escaped.
fn spellings(value: &Value, is_one_number: bool) -> Vec<String> {
    let numbers = NUMBERS.iter().copied().filter(|_| is_one_number).map(Some).chain([None]);
    let ways: Vec<_> = numbers.flat_map(|number| [(number, false), (number, true)]).collect();
    let mut texts = Vec::new();
    for value in orders(value) {
        for (number, is_escaped) in &ways {
            let mut text = String::new();
            write(&value, *number, *is_escaped, &mut text);
            texts.push(text);
        }
    }
    texts.sort_unstable();
    texts.dedup();
    texts
}

fn write(value: &Value, number: Option<fn(i64) -> String>, is_escaped: bool, text: &mut String) {
    let string = |name: &str| match is_escaped {
        false => Value::from(name).to_string(),
        true => format!("\"{}\"", name.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect::<String>()),
    };
    match value {
        Value::Array(items) => {
            text.push('[');
            for (at, item) in items.iter().enumerate() {
                text.push_str(if at > 0 { "," } else { "" });
                write(item, number, is_escaped, text);
            }
            text.push(']');
        }
        Value::Object(members) => {
            text.push('{');
            for (at, (name, member)) in members.iter().enumerate() {
                text.push_str(if at > 0 { "," } else { "" });
                text.push_str(&string(name));
                text.push(':');
                write(member, number, is_escaped, text);
            }
            text.push('}');
        }
        Value::String(of) => text.push_str(&string(of)),
        Value::Number(of) => {
            let whole = of.as_f64().filter(|of| of.fract() == 0.0 && of.abs() < 1e18);
            let written = number.zip(whole).map(|(number, whole)| number(whole as i64));
            text.push_str(&written.unwrap_or_else(|| value.to_string()));
        }
        Value::Bool(_) | Value::Null => text.push_str(&value.to_string()),
    }
}

/// The value with its members in other orders, up to [`ORDERS_MAX`].
fn orders(value: &Value) -> Vec<Value> {
    match value {
        Value::Array(items) => sequences(items.iter().map(orders)).into_iter().map(Value::from).collect(),
        Value::Object(members) => {
            let names: Vec<&String> = members.keys().collect();
            let values = sequences(members.values().map(orders));
            let of = |(order, values): (Vec<usize>, &Vec<Value>)| {
                let member = |at: usize| (names[at].clone(), values[at].clone());
                Value::Object(order.into_iter().map(member).collect::<Map<_, _>>())
            };
            let pairs = values
                .iter()
                .flat_map(|values| permutations(names.len()).into_iter().map(move |order| (order, values)));
            pairs.take(ORDERS_MAX).map(of).collect()
        }
        _ => vec![value.clone()],
    }
}

/// Lists that take one of each part's alternatives.
fn sequences(parts: impl Iterator<Item = Vec<Value>>) -> Vec<Vec<Value>> {
    parts.fold(vec![Vec::new()], |all, part| {
        let with = |begun: &Vec<Value>, next: Value| begun.iter().cloned().chain([next]).collect();
        all.iter().flat_map(|begun| part.iter().map(move |next| with(begun, next.clone()))).take(ORDERS_MAX).collect()
    })
}

fn permutations(count: usize) -> Vec<Vec<usize>> {
    (0..count).fold(vec![Vec::new()], |all, next| {
        let put = |order: &Vec<usize>, at: usize| [&order[..at], &[next], &order[at..]].concat();
        all.iter().flat_map(|order| (0..=order.len()).rev().map(move |at| put(order, at))).take(ORDERS_MAX).collect()
    })
}

/// Writes the tables into the page anew when `PENSTOCK_BLESS` is set.
#[test]
fn no_schema_of_the_suite_takes_what_is_invalid() {
    let mut faults = Vec::new();
    let looked = DRAFTS.map(|(draft, text)| (draft, look(draft, &groups(text), &mut faults)));
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
    for (draft, keyword, count) in WRONG {
        let (_, counts) = looked.iter().find(|(name, _)| *name == draft).expect("a draft");
        assert_eq!(counts[keyword].wrong, count, "{draft} {keyword}: what is enforced leaves the list");
    }
    let head = "enforced | named under `strict` | refused | wrong | valid instances not taken";
    let mut page = format!("| draft | {head} |\n|---|{}\n", "--:|".repeat(5));
    for (draft, counts) in &looked {
        let mut sum = Counts::default();
        counts.values().for_each(|one| sum.add(one));
        page += &format!("| {draft} | {} |\n", sum.cells());
    }
    for (draft, counts) in looked.iter().filter(|(draft, _)| LISTED.contains(draft)) {
        page += &format!("\nDraft {draft}, by file of the suite:\n\n| keyword | {head} |\n|---|{}\n", "--:|".repeat(5));
        counts.iter().for_each(|(keyword, counts)| page += &format!("| `{keyword}` | {} |\n", counts.cells()));
    }
    check("structured-output.md", &page);
}

#[track_caller]
fn check(name: &str, tables: &str) {
    let path = format!("{}/../../docs/reference/{name}", env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(&path).expect("the page");
    let (front, rest) = page.split_once("<!-- suite -->\n").expect("where the tables begin");
    let (_, back) = rest.split_once("<!-- end -->").expect("where they end");
    let expected = format!("{front}<!-- suite -->\n{tables}<!-- end -->{back}");
    if std::env::var_os("PENSTOCK_BLESS").is_some() {
        std::fs::write(&path, &expected).expect("written");
    } else {
        assert!(
            page == expected,
            "docs/reference/{name} is not what the suite says; run the test with PENSTOCK_BLESS=1"
        );
    }
}
