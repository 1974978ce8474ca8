//! Amounts, models and counts in any notation: the forwarded body asks for exactly the amount that a limit has
//! counted, or the body is refused.

use std::fmt;

use bytes::Bytes;
use penstock_types::peek::{BoundLimits, Peek, Splice, spliced};
use penstock_types::{ApiError, Bounds, Surface, peek};
use proptest::prelude::*;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// JSON tree that keeps the details readers differ about: duplicate names, and integers in unusual notation.
#[derive(Clone, Debug, PartialEq)]
enum Node {
    Null,
    Count(u64),
    Negative,
    Other(String),
    Object(Vec<(String, Node)>),
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Nodes)
    }
}

struct Nodes;

impl<'de> Visitor<'de> for Nodes {
    type Value = Node;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Other(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Count(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(if value < 0 { Node::Negative } else { Node::Count(value as u64) })
    }

    fn visit_f64<E>(self, value: f64) -> Result<Node, E> {
        Ok(if value < 0.0 { Node::Negative } else { Node::Other(format!("{value:?}")) })
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Other(format!("{value:?}")))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut all = Vec::new();
        while let Some(node) = access.next_element::<Node>()? {
            all.push(node);
        }
        Ok(Node::Other(format!("{all:?}")))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut all = Vec::new();
        while let Some(field) = access.next_entry()? {
            all.push(field);
        }
        Ok(Node::Object(all))
    }
}

fn fields(body: &[u8]) -> Vec<(String, Node)> {
    // This reader's largest number is 1e308.
    let body = String::from_utf8_lossy(body).replace("1e400", "1e300");
    match serde_json::from_str(&body).expect("JSON") {
        Node::Object(fields) => fields,
        other => panic!("no object: {other:?}"),
    }
}

/// A name as a case-folding reader sees it; deliberately not the program's own folding.
fn folded(name: &str) -> String {
    let upper = name.chars().flat_map(char::to_uppercase);
    upper.flat_map(char::to_lowercase).take_while(|character| *character != '\0').collect()
}

/// Values of all fields that readers take for `name`; each must be `name` itself.
fn read<'a>(fields: &'a [(String, Node)], name: &str) -> Vec<&'a Node> {
    let alike = fields.iter().filter(|(have, _)| folded(have) == folded(name));
    alike
        .inspect(|(have, _)| assert_eq!(have, name, "a name that some take for another has passed"))
        .map(|(_, node)| node)
        .collect()
}

/// The one value under any of these names that is not null.
fn said<'a>(fields: &'a [(String, Node)], names: &[&str]) -> Option<&'a Node> {
    let mut all: Vec<&Node> = Vec::new();
    for name in names {
        let read = read(fields, name);
        assert!(read.len() <= 1, "{name} stands twice");
        all.extend(read.into_iter().filter(|node| **node != Node::Null));
    }
    assert!(all.len() <= 1, "{names:?}: more than one of them says something");
    all.pop()
}

const CHAT: [&str; 2] = ["max_tokens", "max_completion_tokens"];
const FOREIGN: [&str; 8] = [
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "max_length",
    "max_tokens_to_sample",
    "n_predict",
    "num_predict",
];

/// Names of the output bound that servers of an API read, the usual one first.
fn own(surface: Surface) -> &'static [&'static str] {
    match surface {
        Surface::Chat => &CHAT,
        Surface::Responses => &["max_output_tokens"],
        Surface::Generate => &["maxOutputTokens", "max_output_tokens"],
        _ => &["max_tokens"],
    }
}

/// The forwarded body under limits that count on it, and the parsed amounts.
fn sent(body: &str, surface: Surface, limits: BoundLimits) -> Result<(Bytes, Peek), ApiError> {
    let bytes = Bytes::from(body.to_owned());
    let seen = peek(&bytes, Some(surface), &Bounds::default())?;
    seen.check_amounts()?;
    let max_tokens = seen.new_bound(limits, true).map(|bound| (bound, own(surface)[0]));
    let change = Splice { max_tokens, plain_counts: true, ..Splice::default() };
    Ok((spliced(&bytes, &seen, change).concat().into(), seen))
}

/// Checks the property for a body; returns the forwarded body.
#[track_caller]
fn check(body: &str, surface: Surface, limits: BoundLimits) -> Option<String> {
    let (up, seen) = sent(body, surface, limits).ok()?;
    let said_by = |limits: BoundLimits, up: &[u8]| {
        let top = fields(up);
        for name in ["model", "stream", "stream_options", "user"] {
            assert!(read(&top, name).len() <= 1, "{name} stands twice");
        }
        let in_config = surface == Surface::Generate;
        let config = in_config.then(|| said(&top, &["generationConfig", "generation_config"])).flatten();
        let inner: &[(String, Node)] = match config {
            None if in_config => &[],
            None => &top,
            Some(Node::Object(inner)) => inner,
            Some(other) => panic!("a configuration that is none has passed: {other:?}"),
        };
        match (said(inner, own(surface)), seen.bound_under(limits)) {
            (Some(Node::Count(there)), Some(counted)) => assert_eq!(*there, u64::from(counted)),
            // Without a limit on the output, no bound is added.
            (None | Some(Node::Negative), None) => {}
            (there, counted) => panic!("{there:?} goes up, {counted:?} was counted"),
        }
        let elsewhere = FOREIGN.iter().filter(|name| in_config || !own(surface).contains(name));
        assert!(elsewhere.flat_map(|name| read(&top, name)).all(|node| *node == Node::Null), "a bound of another API");
        let counts: &[&str] = if in_config { &["candidateCount"] } else { &["n", "best_of"] };
        let snake = if in_config { read(inner, "candidate_count") } else { Vec::new() };
        let all = counts.iter().flat_map(|name| read(inner, name)).chain(snake);
        let most = all.filter(|node| **node != Node::Null).map(|node| match node {
            Node::Count(count) => *count,
            other => panic!("{other:?} goes up as a count"),
        });
        assert_eq!(most.max().unwrap_or(0), u64::from(seen.choices));
    };
    said_by(limits, &up);
    let again = peek(&up, Some(surface), &Bounds::default()).expect("still a body");
    assert_eq!((again.check_amounts(), again.max_tokens), (Ok(()), seen.bound_under(limits)));
    // Fields other than bounds and counts stay as they are.
    let kept = |fields: Vec<(String, Node)>| {
        let rest = fields.into_iter().filter(|(name, _)| !FOREIGN.contains(&name.as_str()) && !name.starts_with('g'));
        rest.filter(|(name, _)| name != "n" && name != "best_of").collect::<Vec<_>>()
    };
    assert_eq!(kept(fields(body.as_bytes())), kept(fields(&up)));
    Some(String::from_utf8_lossy(&up).into_owned())
}

const NO_LIMITS: BoundLimits = BoundLimits { default: None, max: None };
const MOST: BoundLimits = BoundLimits { default: None, max: Some(32) };

/// Checks a chat's fields against the forwarded body; `None` expects a refusal.
#[track_caller]
fn check_chat(given: &str, expected: Option<&str>) {
    let up = check(&format!("{{{given}}}"), Surface::Chat, MOST);
    assert_eq!(up, expected.map(|fields| format!("{{{fields}}}")), "{given}");
}

#[test]
fn what_is_no_bound_is_replaced_where_it_stands() {
    for none in ["null", "-1", "-1.0", "-2147483648", "100000", "4294967295", "1e6"] {
        check_chat(&format!("\"max_tokens\":{none},\"x\":1"), Some("\"max_tokens\":32,\"x\":1"));
    }
    check_chat("\"max_completion_tokens\":-1", Some("\"max_completion_tokens\":32"));
    check_chat("\"max_tokens\":16", Some("\"max_tokens\":16"));
    check_chat("\"max_tokens\":16.0,\"n\":2e0", Some("\"max_tokens\":16,\"n\":2"));
    check_chat("\"n\":null", Some("\"max_tokens\":32,\"n\":null"));
    // Null under one name leaves the other name in force.
    let both = "\"max_tokens\":null,\"max_completion_tokens\":7";
    check_chat(both, Some(both));
    check_chat("\"max_completion_tokens\":null", Some("\"max_tokens\":32,\"max_completion_tokens\":null"));
    check_chat("", Some("\"max_tokens\":32"));
}

#[test]
fn what_servers_read_differently_is_refused() {
    for value in ["\"16\"", "0", "16.5", "-1.5", "true", "[]", "[16]", "{}", "4294967296", "1e400", "-1e400"] {
        check_chat(&format!("\"max_tokens\":{value}"), None);
        check_chat(&format!("\"n\":{value}"), None);
    }
    check_chat("\"n\":-1", None);
    check_chat("\"max_tokens\":8,\"max_completion_tokens\":8", None);
    check_chat("\"max_tokens\":-1,\"max_completion_tokens\":8", None);
    check_chat("\"max_tokens\":8,\"n_predict\":-1", None);
    check_chat("\"max_output_tokens\":8", None);
    check_chat("\"MAX_TOKENS\":8", None);
    check_chat("\"max_to\u{212a}ens\":8,\"max_tokens\":8", None);
    check_chat("\"model\":\"small\",\"Model\":\"big\"", None);
    check_chat("\"\\u017ftream\":true", None);
}

#[track_caller]
fn check_gemini(given: &str, expected: Option<&str>) {
    let up = check(&format!("{{\"contents\":[]{given}}}"), Surface::Generate, MOST);
    assert_eq!(up, expected.map(str::to_owned), "{given}");
}

#[test]
fn a_configuration_has_two_spellings_and_is_given_in_one() {
    let whole = |fields: &str| format!("{{\"contents\":[],{fields}}}");
    let bounded = "{\"generationConfig\":{\"maxOutputTokens\":32},\"contents\":[]}";
    check_gemini("", Some(bounded));
    for (config, name) in [
        ("generationConfig", "maxOutputTokens"),
        ("generation_config", "max_output_tokens"),
        ("generation_config", "maxOutputTokens"),
    ] {
        let empty = whole(&format!("\"{config}\":{{\"maxOutputTokens\":32}}"));
        for none in ["null", "{}", "{ }"] {
            let up = check(&whole(&format!("\"{config}\":{none}")), Surface::Generate, MOST);
            assert_eq!(up.map(|up| up.replace(' ', "")), Some(empty.clone()), "{config}: {none}");
        }
        for none in ["null", "-1", "99"] {
            let given = format!(",\"{config}\":{{\"topK\":1,\"{name}\":{none}}}");
            check_gemini(&given, Some(&whole(&format!("\"{config}\":{{\"topK\":1,\"{name}\":32}}"))));
        }
        check_gemini(
            &format!(",\"{config}\":{{\"topK\":1}}"),
            Some(&whole(&format!("\"{config}\":{{\"maxOutputTokens\":32,\"topK\":1}}"))),
        );
    }
    for both in [
        ",\"generationConfig\":{},\"generation_config\":{}",
        ",\"generationConfig\":null,\"generation_config\":null",
        ",\"generationConfig\":{\"maxOutputTokens\":1,\"max_output_tokens\":1}",
        ",\"generationConfig\":{\"maxOutputTokens\":null,\"max_output_tokens\":null}",
        ",\"generationConfig\":{\"maxOutputTokens\":1,\"maxOutputTokens\":1}",
        ",\"generationConfig\":{\"maxOutputTokens\":1,\"MaxOutputTokens\":1}",
        ",\"generationConfig\":{\"maxOutput_tokens\":1}",
        ",\"generationConfig\":{\"candidateCount\":1,\"candidate_count\":8}",
        ",\"generationconfig\":{}",
        ",\"generationConfig\":[]",
        ",\"generationConfig\":{\"maxOutputTokens\":\"16\"}",
        ",\"max_tokens\":16",
    ] {
        check_gemini(both, None);
    }
}

/// A body that no limit counts on is forwarded unchanged.
#[test]
fn nothing_changes_where_no_limit_counts() {
    for body in [
        r#"{"max_tokens":null,"n":"8"}"#,
        r#"{"max_tokens":"16"}"#,
        r#"{"max_tokens":-1,"max_completion_tokens":16.0}"#,
        r#"{"n_predict":-1,"max_tokens":1e400}"#,
    ] {
        let bytes = Bytes::from(body);
        let seen = peek(&bytes, Some(Surface::Chat), &Bounds::default()).expect("a body");
        assert_eq!(seen.new_bound(NO_LIMITS, false), None);
        assert_eq!(spliced(&bytes, &seen, Splice::default()).concat(), body.as_bytes());
    }
}

/// Operations that generate no text have no amounts.
#[test]
fn other_operations_have_no_bound() {
    for surface in [Surface::Embeddings, Surface::Rerank, Surface::CountTokens, Surface::Embed] {
        let seen = peek(br#"{"max_tokens":"x","n":"8"}"#, Some(surface), &Bounds::default()).expect("a body");
        assert_eq!((seen.check_amounts(), seen.max_tokens), (Ok(()), None));
    }
}

/// Readings of a body by Python, Go and JavaScript, from `readers/readers.json`; null and absent are the same to a
/// server.
fn readings(row: &Value) -> Vec<String> {
    let of = |reader: &str| match row[reader].as_object().expect("a reading") {
        said if said.contains_key("error") => "error".to_owned(),
        said => ["model", "bound", "count", "stream"].map(|field| said[field].as_str().expect("text")).join(" "),
    };
    ["python", "go", "javascript"].map(|reader| of(reader).replace("null", "absent").replace("-0", "0")).to_vec()
}

#[test]
fn where_readers_differ_a_body_is_refused_or_rewritten() {
    let table: Value = serde_json::from_str(include_str!("../readers/readers.json")).expect("JSON");
    let rows = table["rows"].as_array().expect("rows");
    let limits = BoundLimits { default: None, max: Some(u32::MAX) };
    let (mut differ, mut passed) = (0, 0);
    for row in rows {
        let body = row["body"].as_str().expect("text");
        let surface = if row["surface"] == "chat" { Surface::Chat } else { Surface::Generate };
        let mut readings = readings(row);
        readings.dedup();
        let up = check(body, surface, limits);
        passed += usize::from(up.as_deref() == Some(body));
        differ += usize::from(readings.len() > 1);
        assert!(
            readings.len() == 1 || up.as_deref() != Some(body),
            "{body} is read as {readings:?} and passes as it is"
        );
    }
    assert!(
        differ > 80 && passed > 5,
        "{differ} of {} rows are read differently, {passed} pass as they are",
        rows.len()
    );
}

/// A name as a client may write it: itself, in another case, with characters that fold onto its letters, escaped, with
/// a suffix.
fn spelt(name: &'static str) -> impl Strategy<Value = String> {
    (0..12_u8, any::<prop::sample::Index>()).prop_map(move |(how, at)| {
        let at = at.index(name.len());
        let (before, letter, after) = (&name[..at], &name[at..=at], &name[at + 1..]);
        match how {
            0 => name.to_uppercase(),
            1 => format!("{before}{}{after}", letter.to_uppercase()),
            2 => name.replace('k', "\u{212a}").replacen('s', "\\u017f", 1),
            3 => format!("{before}\\u{:04x}{after}", u32::from(letter.as_bytes()[0])),
            4 => format!("{name}\\u0000{letter}"),
            5 => name.replace('_', ""),
            _ => name.to_owned(),
        }
    })
}

/// Values that may stand in the place of an amount.
const ODD: &[&str] = &[
    "null",
    "-1",
    "-0",
    "0",
    "-1.5",
    "16.0",
    "16.5",
    "1e2",
    "1E-2",
    "1e400",
    "-1e400",
    "\"16\"",
    "\"\"",
    "true",
    "false",
    "[]",
    "[1]",
    "{}",
    "{\"x\":1}",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "99999999999999999999999",
];

fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => (1..100_u32).prop_map(|value| value.to_string()),
        1 => (any::<i32>(), -3..12_i32).prop_map(|(value, power)| format!("{value}e{power}")),
        1 => any::<f64>().prop_filter("JSON has no others", |value| value.is_finite()).prop_map(|value| format!("{value:?}")),
        3 => prop::sample::select(ODD).prop_map(str::to_owned),
    ]
}

fn field(names: &'static [&'static str]) -> impl Strategy<Value = String> {
    let name = prop::sample::select(names).prop_flat_map(spelt);
    (name, value()).prop_map(|(name, value)| format!("\"{name}\":{value}"))
}

fn object(names: &'static [&'static str], at_most: usize) -> impl Strategy<Value = String> {
    prop::collection::vec(field(names), 0..=at_most).prop_map(|fields| format!("{{{}}}", fields.join(",")))
}

const TOP: &[&str] = &[
    "max_tokens",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_output_tokens",
    "n_predict",
    "n",
    "n",
    "best_of",
    "temperature",
];
const CONFIG: &[&str] = &["maxOutputTokens", "max_output_tokens", "candidateCount", "candidate_count", "topK"];

fn gemini() -> impl Strategy<Value = String> {
    let config =
        prop::sample::select(&["generationConfig", "generationConfig", "generation_config"][..]).prop_flat_map(spelt);
    let config = (config, prop_oneof![6 => object(CONFIG, 3), 1 => value()]);
    let config = config.prop_map(|(name, value)| format!("\"{name}\":{value}"));
    let fields = prop_oneof![8 => config, 1 => field(TOP)];
    prop::collection::vec(fields, 0..3).prop_map(|fields| format!("{{{}}}", fields.join(",")))
}

/// Names beside the amounts that decide what a request is and costs.
const NAMED: &[&str] = &[
    "model",
    "model",
    "model",
    "stream",
    "stream",
    "store",
    "stream_options",
    "user",
    "service_tier",
    "speed",
    "models",
];
const SURFACES: [Surface; 7] = [
    Surface::Chat,
    Surface::Completions,
    Surface::Responses,
    Surface::Messages,
    Surface::Generate,
    Surface::Embeddings,
    Surface::OllamaChat,
];

/// Bodies of such names in any spelling, with values that fit them and values that do not.
fn named() -> impl Strategy<Value = String> {
    let fits = prop::sample::select(
        &[
            "\"big\"",
            "\"b\\u0069g\"",
            "true",
            "false",
            "null",
            "{\"include_usage\":true}",
            "{\"Include_Usage\":true}",
            "\"flex\"",
        ][..],
    );
    let value = prop_oneof![4 => fits.prop_map(str::to_owned), 1 => value()];
    let name = prop::sample::select(NAMED).prop_flat_map(spelt);
    let field = (name, value).prop_map(|(name, value)| format!("\"{name}\":{value}"));
    prop::collection::vec(field, 0..4).prop_map(|fields| format!("{{{}}}", fields.join(",")))
}

/// Checks that a body, forwarded under the name of the model that was allowed, names that model alone to every reader, and
/// asks for streaming and storing as was understood; or that it is refused.
#[track_caller]
fn check_model(body: &str, surface: Surface) {
    let bytes = Bytes::from(body.to_owned());
    let Ok(seen) = peek(&bytes, Some(surface), &Bounds::default()) else { return };
    let top = fields(&spliced(&bytes, &seen, Splice { model: Some("allowed"), ..Splice::default() }).concat());
    let one = |name: &str| {
        let read = read(&top, name);
        assert!(read.len() <= 1, "{name} stands twice");
        read.first().copied()
    };
    let allowed = Node::Other("\"allowed\"".to_owned());
    assert_eq!(one("model"), seen.model_at.as_ref().map(|_| &allowed), "{body}");
    assert!(seen.model.is_none() || seen.model_at.is_some());
    let is_on = |name: &str, default: bool| match one(name) {
        None | Some(Node::Null) => default,
        Some(node) => *node == Node::Other("true".to_owned()),
    };
    assert_eq!(seen.stream, is_on("stream", surface == Surface::OllamaChat), "{body}");
    assert_eq!(seen.stores, is_on("store", false), "{body}");
    let usage = match one("stream_options") {
        Some(Node::Object(inner)) => read(inner, "include_usage") == [&Node::Other("true".to_owned())],
        _ => false,
    };
    assert_eq!(seen.stream_options.as_ref().is_some_and(|(_, usage)| *usage), usage, "{body}");
    let others = ["models", "fallbacks"].iter().filter_map(|name| one(name)).any(|node| *node != Node::Null);
    assert_eq!(seen.other_models.is_some(), others, "{body}");
}

fn limits() -> impl Strategy<Value = BoundLimits> {
    (prop::option::of(1..20_u32), prop::option::of(20..50_u32)).prop_map(|(default, max)| BoundLimits { default, max })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_goes_up_is_what_was_counted(body in object(TOP, 3), limits in limits()) {
        for surface in [Surface::Chat, Surface::Completions, Surface::Responses, Surface::Messages] {
            check(&body, surface, limits);
        }
    }

    #[test]
    fn what_goes_up_to_gemini_is_what_was_counted(body in gemini(), limits in limits()) {
        check(&body, Surface::Generate, limits);
    }
    #[test]
    fn the_model_that_goes_up_is_the_one_that_was_asked_for(body in named(), surface in prop::sample::select(&SURFACES[..])) {
        check_model(&body, surface);
    }
}
