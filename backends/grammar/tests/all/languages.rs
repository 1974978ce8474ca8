//! What each kind of source lets through.

use crate::common::{TABLE, VOCABULARY, allowed, bytes, grammar, schema, schemas, sources, walk};
use penstock_grammar::structural_tag::{SpecialTokens, to_rules};
use penstock_grammar::{Grammar, GrammarError, Source, gbnf, lark};
use serde_json::{Value, json};
use std::ops::Range;

/// Returns true if `text` is accepted whole; its bytes are matched with one token each.
fn accepts(source: &Source, text: &str) -> bool {
    let mut matcher = grammar(source).matcher();
    let single = |byte: u8| (0..TABLE.count()).find(|id| TABLE.token(*id) == [byte] && !TABLE.is_special(*id));
    text.bytes().all(|byte| matcher.consume(single(byte).expect("every byte is a token")).is_ok())
        && matcher.is_accepting().expect("within limits")
}

#[track_caller]
fn check(source: &Source, good: &[&str], bad: &[&str]) {
    for text in good {
        assert!(accepts(source, text), "{text:?} is refused by {}", source.text);
    }
    for text in bad {
        assert!(!accepts(source, text), "{text:?} is accepted by {}", source.text);
    }
}

#[test]
fn json_is_written_without_blanks() {
    let object =
        schema(&json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}));
    check(
        &object,
        &["{}", r#"{"a":[]}"#, r#"{"a":[1,2]}"#],
        &["{ }", r#"{"a": []}"#, r#"{"a":[1, 2]}"#, " {}", "{} ", "{\n}", ""],
    );
    check(&Source::json_object(), &["{}", r#"{"a b":{"c":[true,null,"x y"]}}"#], &["[]", "{ }", r#"{"a": 1}"#, "1"]);
    check(&schema(&json!(true)), &["1", r#"[1,{"a":"b"}]"#], &["[1, 2]", ""]);
}

#[test]
fn schemas_are_enforced() {
    check(
        &schema(&json!({"type": "integer", "minimum": 3, "maximum": 12})),
        &["3", "12"],
        &["2", "13", "3.5", "03", "\"3\""],
    );
    check(&schema(&json!({"type": "string", "pattern": "^a+$"})), &["\"a\"", "\"aaa\""], &["\"\"", "\"b\"", "a"]);
    check(&schema(&json!({"enum": ["x", 1, null]})), &["\"x\"", "1", "null"], &["\"y\"", "2", "nul"]);
    let closed = json!({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["b"], "additionalProperties": false});
    check(
        &schema(&closed),
        &[r#"{"b":null}"#, r#"{"a":null,"b":null}"#],
        &["{}", r#"{"a":null}"#, r#"{"b":null,"c":null}"#],
    );
    check(&schema(&json!({"type": "integer", "multipleOf": 7})), &["0", "14", "-21"], &["1", "15"]);
}

#[test]
fn regexes_and_choices_match_whole() {
    check(&Source::regex("a|bc"), &["a", "bc"], &["", "b", "abc", "ac"]);
    check(&Source::regex(r"^/api/\d+/$"), &["/api/7/"], &["/api//", "x/api/7/"]);
    check(&Source::regex(""), &[""], &["a"]);
    check(&Source::regex("ä{2}"), &["ää"], &["ä", "aa"]);
    check(&Source::choice(["a", "ab", "", "\"/\n", r"\x41"]), &["a", "ab", "", "\"/\n", r"\x41"], &["b", "abc", "A"]);
    check(&Source::choice(["a\u{7f}"]), &["a\u{7f}"], &["a"]);
    check(&Source::lark("start: \"[\" (WORD (\",\" WORD)*)? \"]\"\nWORD: /[a-z]+/"), &["[]", "[a,bc]"], &["[a,]", "a"]);
}

struct NoSpecials;

impl SpecialTokens for NoSpecials {
    fn name(&self, _: u32) -> Option<&str> {
        None
    }

    fn find(&self, _: &str) -> Vec<(Range<usize>, u32)> {
        Vec::new()
    }
}

#[test]
fn slashes_and_line_breaks_of_a_regex_mean_the_same_in_a_structural_tag() {
    for (pattern, good, bad) in [
        (r"a\\/b", [r"a\/b"; 2], ["a/b", r"a\\/b"]),
        (r"[\\/]+", ["/", r"\/\"], ["", "a"]),
        (r"a\/b/", ["a/b/"; 2], ["a/b", r"a\/b/"]),
        ("a\\\nb", ["a\nb"; 2], [r"a\nb", "anb"]),
        ("a\\\\\nb", ["a\\\nb"; 2], ["a\nb", r"a\nb"]),
    ] {
        let tag = json!({"format": {"type": "regex", "pattern": pattern}});
        let rules = to_rules(&tag.to_string(), &NoSpecials).expect("a tag");
        for source in [Source::lark(format!("start: {}\n{}", rules.start, rules.rules)), Source::regex(pattern)] {
            check(&source, &good, &bad);
        }
    }
}

#[test]
fn references_are_pointers_with_escapes() {
    for (name, reference) in [
        ("a/b", "#/$defs/a~1b"),
        ("a~b", "#/$defs/a~0b"),
        ("List<string>", "#/$defs/List%3Cstring%3E"),
        ("List<string>", "#/$defs/List<string>"),
        ("p/q~r%", "#/$defs/p~1q~0r%25"),
        ("a%20b", "#/$defs/a%20b"),
    ] {
        let number = json!({"type": "integer", "minimum": 1, "maximum": 7});
        let list = json!({"type": "array", "items": {"$ref": reference}, "$defs": {name: number}});
        check(&schema(&list), &["[]", "[7,1]"], &["[8]", "[\"a\"]", "[7,null]"]);
    }
    let node = json!({"type": "array", "items": {"$ref": "#/$defs/tree~1node"}, "maxItems": 2});
    let tree = json!({"$ref": "#/$defs/tree~1node", "$defs": {"tree/node": node}});
    check(&schema(&tree), &["[]", "[[],[[]]]"], &["[1]", "[[],[],[]]"]);
    // Through such a name, and to a schema that no keyword holds.
    let parts = json!({
        "type": "array",
        "prefixItems": [{"$ref": "#/parts/a~1b/properties/c"}, {"$ref": "#/parts/a~1b"}],
        "items": false,
        "minItems": 2,
        "parts": {"a/b": {"type": "object", "properties": {"c": {"const": 1}}, "additionalProperties": false}},
    });
    check(&schema(&parts), &[r#"[1,{"c":1}]"#, "[1,{}]"], &[r#"[2,{}]"#, r#"[1,{"c":2}]"#, r#"[1,{"d":1}]"#]);
    // What looks like a reference in a value is a value.
    let value = json!({"enum": [{"$ref": "#/$defs/a~1b"}], "items": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": true}});
    check(&schema(&value), &[r##"{"$ref":"#/$defs/a~1b"}"##], &["{}"]);
}

#[test]
fn schemas_inside_of_lark_are_compact() {
    let source = Source::lark("start: \"<\" %json {\"type\": \"array\", \"items\": {\"type\": \"integer\"}} \">\"");
    check(&source, &["<[1,2]>", "<[]>"], &["<[1, 2]>", "< []>"]);
}

#[test]
fn special_tokens_never_match_as_text() {
    for source in [Source::regex("(?s:.*)"), Source::json_object(), schema(&json!({"type": "string"}))] {
        let mut matcher = grammar(&source).matcher();
        while matcher.consumed() < 8 && !matcher.is_complete() {
            let allowed = allowed(&matcher.mask().expect("within limits"));
            assert!(allowed.iter().all(|token| !VOCABULARY.is_special(*token)), "{}", source.text);
            matcher.consume(*allowed.last().expect("some")).expect("allowed");
        }
        for special in (0..TABLE.count()).filter(|id| TABLE.is_special(*id)) {
            assert!(matcher.consume(special).is_err(), "{special}");
        }
    }
    // The same text, spelled with ordinary tokens, is text.
    let special = (0..TABLE.count()).find(|id| TABLE.is_special(*id)).expect("the demo has special tokens");
    let name = String::from_utf8(TABLE.token(special).to_vec()).expect("UTF-8");
    assert!(accepts(&Source::choice([name.clone()]), &name));
    let mut named = grammar(&Source::lark(format!("start: <[{special}]> \"a\""))).matcher();
    assert_eq!(allowed(&named.mask().expect("within limits")), [special], "a grammar may name one");
    assert_eq!(named.forced(), Ok(Some(special)));
    named.consume(special).expect("allowed");
}

#[test]
fn every_walk_ends_in_a_valid_text() {
    for source in sources() {
        let mut ended = 0;
        for seed in 0..30 {
            let (tokens, end) = walk(&mut grammar(&source).matcher(), seed, 400);
            let text = bytes(&tokens);
            if end {
                ended += 1;
                let text = String::from_utf8(text).expect("whole characters");
                assert!(accepts(&source, &text), "{text}");
            }
        }
        assert!(ended >= 10, "{ended} of 30 walks end: {}", source.text);
    }
    for value in schemas() {
        for seed in 0..30 {
            let (tokens, end) = walk(&mut grammar(&schema(&value)).matcher(), seed, 400);
            if end {
                let text = String::from_utf8(bytes(&tokens)).expect("whole characters");
                let valid = serde_json::from_str::<serde::de::IgnoredAny>(&text);
                valid.unwrap_or_else(|error| panic!("{error}: {text}"));
                for name in value.get("required").and_then(Value::as_array).into_iter().flatten() {
                    assert!(text.contains(&format!("{name}:")), "{text}");
                }
            }
        }
    }
}

#[test]
fn bad_sources_are_refused_with_a_reason() {
    let refused = |source: Source| Grammar::compile(&source, &VOCABULARY).expect_err("refused");
    for (source, word) in [
        (schema(&json!({"type": "string", "pattern": "(a"})), "regex"),
        (schema(&json!({"type": "strange"})), "strange"),
        (schema(&json!({"type": "integer", "minimum": 5, "maximum": 4})), "minimum"),
        (schema(&json!({"$ref": "#/$defs/missing"})), "missing"),
        (schema(&json!({"type": "object", "properties": 1})), "properties"),
        (Source::json_schema("{"), "EOF"),
        (Source::regex("(a"), "regex"),
        (Source::regex("a(?=b)"), "look"),
        (Source::lark("a: \"b\""), "start"),
        (Source::lark("start: \"a"), "start"),
        (Source::lark(""), "start"),
        (Source { kind: penstock_grammar::Kind::Choice, text: "{}".into() }, "invalid type"),
    ] {
        let error = refused(source);
        assert!(matches!(error, GrammarError::Malformed { .. }), "{error:?}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

/// Text of a walk that takes digits as long as it may, and the longest token of them.
fn greedy_digits(source: &Source) -> String {
    let mut matcher = grammar(source).matcher();
    let mut tokens = Vec::new();
    while tokens.len() < 200 {
        let forced = matcher.forced().expect("within limits");
        let mask = matcher.mask().expect("within limits");
        let allowed = allowed(&mask);
        let digits = allowed.iter().copied().filter(|token| TABLE.token(*token).iter().all(u8::is_ascii_digit));
        let longest = digits.max_by_key(|token| TABLE.token(*token).len());
        let others = [".", "e", "-", "]", "}", ",", "[", "\"", "a"];
        let other = || {
            others.iter().find_map(|text| allowed.iter().copied().find(|token| TABLE.token(*token) == text.as_bytes()))
        };
        if mask.may_end && longest.is_none() {
            break;
        }
        let token = forced.or(longest).or_else(other).expect("something may follow");
        assert!(allowed.contains(&token), "what is forced is allowed");
        matcher.consume(token).expect("it is allowed");
        tokens.push(token);
    }
    String::from_utf8(bytes(&tokens)).expect("text")
}

#[test]
fn numbers_end_where_programs_would_end_them() {
    let parts = |text: &str| -> Vec<usize> {
        text.split(|c: char| !c.is_ascii_digit()).map(str::len).filter(|digits| *digits > 0).collect()
    };
    for (wanted, most) in [
        (json!({"type": "integer"}), vec![20]),
        (json!({"type": "integer", "minimum": 5}), vec![20]),
        (json!({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}), vec![20, 20]),
        // What the schema itself demands is as long as it says.
        (json!({"const": 1_234_567_890_123_456_768_i64}), vec![19]),
    ] {
        let text = greedy_digits(&schema(&wanted));
        assert_eq!(parts(&text), most, "{wanted}: {text}");
    }
    let digits = "7".repeat(20);
    let number = schema(&json!({"type": "number"}));
    let fraction = format!("{digits}.{}", "7".repeat(17));
    for (text, more) in [(digits.as_str(), false), (&fraction, false), ("1e777", false), ("1e77", true), ("0.7", true)]
    {
        let mut matcher = grammar(&number).matcher();
        for byte in text.bytes() {
            let token = (0..TABLE.count()).find(|id| TABLE.token(*id) == [byte]).expect("a token for each byte");
            matcher.consume(token).expect("a number");
        }
        let mask = matcher.mask().expect("within limits");
        assert!(mask.may_end);
        let any = allowed(&mask).iter().any(|token| TABLE.token(*token)[0].is_ascii_digit());
        assert_eq!(any, more, "{text}");
    }
    // Strings are no numbers, and a pattern may demand any digits.
    let pattern = schema(&json!({"type": "string", "pattern": "^[0-9]{40}$"}));
    assert_eq!(greedy_digits(&pattern).len(), 42);
}

#[test]
fn negated_classes_have_the_blanks_of_no_language() {
    let string = |pattern: &str| schema(&json!({"type": "string", "pattern": pattern}));
    let bad = ["\"\u{feff}\"", "\"\u{85}\"", "\"\u{a0}\"", "\" \"", "\"\\t\"", "\"\\u001c\""];
    check(&string(r"^[^\s]+$"), &["\"a\"", "\"\u{e9}@\""], &bad);
    check(&string(r"^[^\s@]+@[^\s@]+$"), &["\"a@b\""], &["\"a\u{feff}@b\"", "\"a@b@c\""]);
    check(&string(r"^[^\S]$"), &["\" \"", "\"\u{a0}\""], &["\"a\"", "\"\u{feff}\"", "\"\u{85}\""]);
}

#[test]
fn bounds_beyond_the_floats_lose_no_digit() {
    let bounded = schema(&json!({"type": "integer", "minimum": 9_007_199_254_740_993_u64}));
    check(&bounded, &["9007199254740994", "9007199254740995"], &["9007199254740992", "9007199254740993"]);
}

#[test]
fn anchors_go_where_they_say_nothing() {
    check(&Source::regex("^[[:alpha:]|]+$"), &["a|b"], &["1", ""]);
    check(&Source::regex("^[]|]$"), &["]", "|"], &["a", "]]"]);
    check(&Source::regex("(?i)^yes$"), &["yes", "YES"], &["yes!", ""]);
}

#[test]
fn texts_of_lark_may_look_like_directives() {
    check(&Source::lark(r#"start: "%json {}" | /%json \{\d+\}/"#), &["%json {}", "%json {12}"], &["{}", "%json {a}"]);
    let (start, rules) = lark::to_rules("start: r1+\nr1: \"a\" | T1\nT1: /[0-9]/").expect("rules");
    let around = Source::lark(format!("start: \"<\" {start} r1\nr1: \">\"\n{rules}"));
    check(&around, &["<a>", "<a1>"], &["<>", "a", "<a"]);
}

#[test]
fn gbnf_has_what_xgrammar_reads() {
    let lark = |text: &str| Source::lark(gbnf::to_lark(text).expect("valid"));
    check(&lark("root ::= \"a\"\n  | \"b\"\n"), &["a", "b"], &["ab", ""]);
    check(&lark("root ::= [\\d\\w]+ [^\\s\\d]"), &["a1_x", "aé"], &["a1", "é", "a "]);
    check(&lark("root ::= a.b\na.b ::= \"x\""), &["x"], &["y"]);
}
