//! Grammars of calls: each compiles, and what it lets a model write is read back as calls that keep to the rule.

use std::sync::Arc;

use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie},
};
use penstock_text::{CallDemand, CallRule, CallableTool, ContentForm, ReasoningPart, TextModel};
use serde_json::{Value, json};

use crate::{
    calls::{Answer, bytes, decode},
    families::{END, FAMILIES},
};

/// Longest walk in tokens; a longer one ends where it is.
const STEPS_MAX: usize = 4_000;

/// Texts that end what a walk is in: a walk that never tried them would not end.
const ENDS: [&str; 8] = [
    "</parameter>",
    "</arg_value>",
    "</｜DSML｜parameter>",
    "</think>",
    "<escape>",
    "<tool_call>",
    "<|\"|>",
    "<function_call",
];

/// Numbers that depend on the seed alone (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % bound as u64) as usize
    }
}

fn factory(model: &TextModel) -> ParserFactory {
    let word = |id: u32| {
        let bytes = model.token_bytes(id);
        if model.is_special(id) { [&[0xff], bytes.as_slice()].concat() } else { bytes }
    };
    let words: Vec<Vec<u8>> = (0..model.vocab_size()).map(word).collect();
    let info = TokRxInfo::new(model.vocab_size(), model.token_id(END).expect("in every vocabulary"));
    ParserFactory::new_simple(&(Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words))) as _))
        .expect("a factory")
}

/// One answer that the grammar allows; `None` if the walk did not come to an end.
fn walk(model: &TextModel, mut matcher: Matcher, grammar: &str, random: &mut Random) -> Option<Vec<u32>> {
    let end = model.token_id(END).expect("in every vocabulary");
    let (mut ids, mut text) = (Vec::new(), Vec::<u8>::new());
    while ids.len() < STEPS_MAX {
        let mask = matcher.compute_mask_or_eos().unwrap_or_else(|error| panic!("{error}\n{grammar}"));
        let allowed: Vec<u32> = (0..model.vocab_size()).filter(|&id| mask.is_allowed(id)).collect();
        assert!(
            !allowed.is_empty(),
            "a state without a way out behind {:?}\n{grammar}",
            String::from_utf8_lossy(&text)
        );
        if allowed.contains(&end) && (allowed.len() == 1 || random.below(4) == 0) {
            return Some(ids);
        }
        // Exponents of any length are JSON, but serde_json reads no number beyond an f64.
        let exponent = |id: u32| {
            text.last().is_some_and(u8::is_ascii_digit)
                && [b"e", b"E"].contains(&model.token_bytes(id).as_slice().first_chunk().unwrap_or(b" "))
        };
        let mut allowed: Vec<u32> = allowed.into_iter().filter(|&id| id != end).collect();
        if allowed.iter().any(|&id| !exponent(id)) {
            allowed.retain(|&id| !exponent(id));
        }
        let of_bytes = |bytes: &[u8]| allowed.iter().copied().find(|&id| model.token_bytes(id) == bytes);
        let mut next = allowed[random.below(allowed.len())];
        // The mark of which most is written goes on.
        let begun = |mark: &str| (0..mark.len()).rev().find(|&n| text.ends_with(&mark.as_bytes()[..n])).unwrap_or(0);
        let longest = ENDS.iter().map(|mark| begun(mark)).max().unwrap_or(0);
        let marks: Vec<&str> = ENDS.into_iter().filter(|mark| begun(mark) == longest).collect();
        let mark = marks[random.below(marks.len())];
        if let Some(id) = of_bytes(&mark.as_bytes()[longest..=longest])
            && random.below(10) < if longest > 0 { 9 } else { 1 }
        {
            next = id;
        }
        let special = allowed.iter().copied().find(|&id| model.is_special(id));
        let closing = [b"\"", b"}", b"]"].into_iter().find_map(|byte| of_bytes(byte));
        match random.below(12) {
            0 | 1 => next = special.unwrap_or(next),
            2 => next = closing.unwrap_or(next),
            _ => {}
        }
        matcher.consume_token(next).expect("allowed");
        ids.push(next);
        text.extend(model.token_bytes(next));
    }
    None
}

fn tools() -> Arc<[CallableTool]> {
    let tool =
        |name: &str, strict: bool, parameters: Value| CallableTool::new(name, Some(&parameters.to_string()), strict);
    Arc::from([
        tool(
            "get_weather",
            true,
            json!({
                "type": "object", "required": ["city", "days"], "additionalProperties": false,
                "properties": {
                    "city": {"type": "string", "maxLength": 12}, "unit": {"type": "string", "enum": ["celsius", "fahren heit"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14}, "exact": {"type": "boolean"},
                },
            }),
        ),
        tool(
            "search",
            false,
            json!({
                "properties": {
                    "query": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
                    "filter": {"type": "object", "properties": {"price": {"type": "number"}}, "required": ["price"], "additionalProperties": false},
                    "code": {"type": "string", "pattern": "^[a-z]{2}[0-9]+$"}, "kind": {"$ref": "#/$defs/kind"},
                },
                "$defs": {"kind": {"enum": ["a", "b"]}},
            }),
        ),
        CallableTool::new("now", None, false),
        CallableTool::new(
            "no-args",
            Some(r#"{"type": "object", "properties": {}, "additionalProperties": false}"#),
            true,
        ),
    ])
}

/// Checks a value against the keywords of JSON Schema that the tests' tools use.
fn check_value(value: &Value, schema: &Value, root: &Value, at: &str) {
    let schema = match schema["$ref"].as_str() {
        Some(target) => root.pointer(&target[1..]).expect("in the schema"),
        None => schema,
    };
    if let Some(kind) = schema["type"].as_str() {
        let fits = match kind {
            "string" => value.is_string(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            other => panic!("no check of {other}"),
        };
        assert!(fits, "{at}: {value} is no {kind}");
    }
    if let Some(values) = schema["enum"].as_array() {
        assert!(values.contains(value), "{at}: {value} is none of {values:?}");
    }
    let chars = value.as_str().map_or(0, |text| text.chars().count() as u64);
    assert!(schema["maxLength"].as_u64().is_none_or(|most| chars <= most), "{at}: {value} is too long");
    if schema.get("pattern").is_some() {
        let text = value.as_str().unwrap();
        let (letters, digits) = text.split_at(2);
        assert!(letters.bytes().all(|byte| byte.is_ascii_lowercase()), "{at}: {text}");
        assert!(!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()), "{at}: {text}");
    }
    let number = value.as_f64().unwrap_or(0.0);
    assert!(schema["minimum"].as_f64().is_none_or(|least| number >= least), "{at}: {value}");
    assert!(schema["maximum"].as_f64().is_none_or(|most| number <= most), "{at}: {value}");
    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
        assert!(schema["maxItems"].as_u64().is_none_or(|most| (index as u64) < most), "{at}: {value}");
        if schema.get("items").is_some() {
            check_value(item, &schema["items"], root, at);
        }
    }
    let Some(members) = value.as_object() else { return };
    for name in schema["required"].as_array().into_iter().flatten() {
        assert!(members.contains_key(name.as_str().unwrap()), "{at}: {name} is missing in {value}");
    }
    for (name, member) in members {
        match schema["properties"].get(name) {
            Some(schema) => check_value(member, schema, root, name),
            None => assert_ne!(schema["additionalProperties"], false, "{at}: {name} is unknown"),
        }
    }
}

fn check_calls(answer: &Answer, tools: &[CallableTool], allowed: &[&str], context: &str) {
    assert!(!answer.cut, "{context}");
    for call in &answer.calls {
        assert!(allowed.contains(&call.name.as_str()), "{} is not allowed\n{context}", call.name);
        let tool = tools.iter().find(|tool| tool.name == call.name).expect("allowed");
        let arguments: Value =
            serde_json::from_str(&call.arguments).unwrap_or_else(|error| panic!("{error}\n{context}"));
        assert!(arguments.is_object(), "{context}");
        let schema = tool.parameters.clone().unwrap_or_else(|| json!({}));
        check_value(&arguments, &schema, &schema, &format!("{context}\n{}", call.arguments));
    }
}

/// Checks walks through the grammar of each family under a rule; `expected` judges each answer.
fn check_rule(rule: &CallRule, allowed: &[&str], expected: impl Fn(&Answer) -> bool) {
    let (tools, walks) = (tools(), 6);
    for family in &FAMILIES {
        let (model, name) = (family.model(), family.format.name());
        let grammar = model.answer_grammar(&tools, rule).unwrap_or_else(|| panic!("{name} has a grammar"));
        let matcher = Matcher::new(factory(&model).create_parser(TopLevelGrammar::from_lark(grammar.clone())));
        assert_eq!(matcher.get_error(), None, "{name}: {grammar}");
        let mut ended = 0;
        for seed in 0..walks {
            let Some(ids) = walk(&model, matcher.deep_clone(), &grammar, &mut Random(seed)) else { continue };
            ended += 1;
            let context = format!("{name}, seed {seed}: {}\n{grammar}", model.decode(&ids, true));
            let answer = decode(&model, &tools, &ids);
            check_calls(&answer, &tools, allowed, &context);
            assert!(expected(&answer), "{answer:?}\n{context}");
        }
        assert!(ended * 2 > walks, "{name}: {ended} of {walks} walks came to an end\n{grammar}");
    }
}

const ALL: [&str; 4] = ["get_weather", "search", "now", "no-args"];

#[test]
fn a_demanded_call_is_one_call_or_more() {
    let rule = CallRule { demand: CallDemand::Required, ..CallRule::default() };
    check_rule(&rule, &ALL, |answer| !answer.calls.is_empty() && answer.content.trim().is_empty());
}

#[test]
fn one_call_is_exactly_one() {
    let rule = CallRule { demand: CallDemand::Required, parallel: false, ..CallRule::default() };
    check_rule(&rule, &ALL, |answer| answer.calls.len() == 1 && answer.content.trim().is_empty());
}

#[test]
fn a_named_choice_gives_that_name_only() {
    let rule = CallRule { demand: CallDemand::Named("get_weather".into()), ..CallRule::default() };
    check_rule(&rule, &["get_weather"], |answer| answer.calls.len() == 1);
}

#[test]
fn only_allowed_tools_are_called() {
    let allowed = Some(vec!["now".to_owned(), "get_weather".to_owned()]);
    let rule = CallRule { demand: CallDemand::Required, allowed, ..CallRule::default() };
    check_rule(&rule, &["now", "get_weather"], |answer| !answer.calls.is_empty());
}

#[test]
fn text_goes_on_until_a_call_begins() {
    check_rule(&CallRule::default(), &ALL, |_| true);
    let rule = CallRule { parallel: false, ..CallRule::default() };
    check_rule(&rule, &ALL, |answer| answer.calls.len() <= 1);
}

/// An answer in the request's form is text beside tools, also where it looks like a call.
#[test]
fn an_answer_of_the_form_is_text_beside_tools() {
    let schema = json!({
        "type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"],
        "additionalProperties": false,
    });
    let rule = CallRule { content: ContentForm::Json { schema, strict: true }, ..CallRule::default() };
    let (tools, mut seen) = (tools(), Vec::new());
    for family in &FAMILIES {
        let (model, name) = (family.model(), family.format.name());
        let Some(grammar) = model.answer_grammar(&tools, &rule) else { continue };
        let matcher = Matcher::new(factory(&model).create_parser(TopLevelGrammar::from_lark(grammar)));
        // The last is named as a tool is.
        for text in [r#"{"name":"Bob","age":3}"#, r#"{"name":"search","age":3}"#] {
            let (mut matcher, ids) = (matcher.deep_clone(), bytes(text));
            if ids.iter().all(|&id| matcher.consume_token(id).is_ok()) && matcher.is_accepting().is_ok_and(|is| is) {
                assert_eq!(
                    decode(&model, &tools, &ids),
                    Answer { content: text.into(), ..Answer::default() },
                    "{name}"
                );
                seen.push(name);
            }
        }
    }
    assert!(seen.contains(&"llama3_json") && seen.len() > 30, "{seen:?}");
}

/// Behind a first key `name`, a call of a format without a mark has the separators of the answer's form: a blank that only calls
/// have would make a call of the answer.
#[test]
fn a_call_without_a_mark_parts_from_an_answer_at_the_name_alone() {
    let llama = FAMILIES.iter().find(|family| family.format.name() == "llama3_json").expect("a family");
    let (model, tools) = (llama.model(), tools());
    for (options, taken, refused) in [
        (json!({}), [r#"{"name":"Bob","age":3}"#, r#"{"name":"search","parameters":{"#], r#"{"name": "#),
        (
            json!({ "item_separator": ", ", "key_separator": ": " }),
            [r#"{"name": "Bob", "age": 3}"#, r#"{"name": "search", "parameters": {"#],
            r#"{"name":"#,
        ),
    ] {
        let schema = json!({
            "type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"], "additionalProperties": false, "x-guidance": options,
        });
        let rule = CallRule { content: ContentForm::Json { schema, strict: true }, ..CallRule::default() };
        let grammar = model.answer_grammar(&tools, &rule).expect("a grammar");
        let matcher = Matcher::new(factory(&model).create_parser(TopLevelGrammar::from_lark(grammar)));
        let takes = |text: &str| {
            let mut matcher = matcher.deep_clone();
            bytes(text).iter().all(|&id| matcher.consume_token(id).is_ok())
        };
        assert_eq!([takes(taken[0]), takes(taken[1])], [true, true], "{taken:?}");
        assert!(!takes(&format!("{refused}\"")), "{refused}");
    }
}

/// Arguments in JSON have the blanks that a family's templates write; gpt-oss writes none.
#[test]
fn arguments_in_json_are_spaced_as_templates_space_them() {
    let json = ["hermes", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "kimi_k2", "granite", "gpt_oss"];
    let rule = CallRule { demand: CallDemand::Named("search".into()), ..CallRule::default() };
    let (tools, mut seen) = (tools(), 0);
    for family in FAMILIES.iter().filter(|family| json.contains(&family.format.name())) {
        let (model, name) = (family.model(), family.format.name());
        let grammar = model.answer_grammar(&tools, &rule).expect("a grammar");
        let matcher = Matcher::new(factory(&model).create_parser(TopLevelGrammar::from_lark(grammar.clone())));
        for seed in 0..6 {
            let Some(ids) = walk(&model, matcher.deep_clone(), &grammar, &mut Random(seed)) else { continue };
            for call in decode(&model, &tools, &ids).calls {
                let (mut is_text, mut escaped) = (false, false);
                for pair in call.arguments.as_bytes().windows(2) {
                    match pair[0] {
                        _ if escaped => escaped = false,
                        b'\\' if is_text => escaped = true,
                        b'"' => is_text = !is_text,
                        b',' | b':' if !is_text => {
                            assert_eq!(pair[1] == b' ', name != "gpt_oss", "{name}: {}", call.arguments);
                            seen += 1;
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    assert!(seen > 50, "{seen}");
}

/// Tells of a text whether a call's grammar takes it whole.
fn takes(family: &str, tool: &CallableTool, text: &str) -> bool {
    let family = FAMILIES.iter().find(|one| one.format.name() == family).expect("a family");
    let rule = CallRule { demand: CallDemand::Named(tool.name.clone()), ..CallRule::default() };
    let model = family.model();
    let grammar = model.answer_grammar(std::slice::from_ref(tool), &rule).expect("a grammar");
    let mut matcher = Matcher::new(factory(&model).create_parser(TopLevelGrammar::from_lark(grammar.clone())));
    assert_eq!(matcher.get_error(), None, "{}: {grammar}", family.format.name());
    let ids = model.encode(text, false).expect("short");
    ids.iter().all(|&id| matcher.consume_token(id).is_ok()) && matcher.is_accepting().is_ok_and(|is| is)
}

/// Checks values of the only parameter of a strict tool in Qwen3-Coder's format.
#[track_caller]
fn check_parameter(parameters: &Value, good: &[&str], bad: &[&str]) {
    let tool = CallableTool::new("f", Some(&parameters.to_string()), true);
    let call = |value: &str| {
        format!("<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>")
    };
    good.iter().for_each(|value| assert!(takes("qwen3_coder", &tool, &call(value)), "{value} under {parameters}"));
    bad.iter().for_each(|value| assert!(!takes("qwen3_coder", &tool, &call(value)), "{value} under {parameters}"));
}

/// A reference to the whole schema is one to the arguments, in formats that write them one by one, too.
#[test]
fn strict_tools_may_be_recursive() {
    let node = json!({
        "type": "object", "required": ["value", "children"], "additionalProperties": false,
        "properties": {"value": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    });
    let tool = CallableTool::new("add", Some(&node.to_string()), true);
    for (family, call, good) in [
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=value>\nx\n</parameter>\n<parameter=children>\n[]\n</parameter>\n</function>\n</tool_call>",
            r#"[{"value": "y", "children": [{"value": "z", "children": []}]}]"#,
        ),
        (
            "glm",
            "<tool_call>add\n<arg_key>value</arg_key>\n<arg_value>x</arg_value>\n<arg_key>children</arg_key>\n<arg_value>[]</arg_value>\n</tool_call>",
            r#"[{"value": "y", "children": [{"value": "z", "children": []}]}]"#,
        ),
        (
            "pythonic",
            r#"[add(value="x", children=[])]"#,
            r#"[{"value": "y", "children": [{"value": "z", "children": []}]}]"#,
        ),
        (
            "gemma4",
            r#"<|tool_call>call:add{value:<|"|>x<|"|>,children:[]}<tool_call|>"#,
            r#"[{value:<|"|>y<|"|>,children:[{value:<|"|>z<|"|>,children:[]}]}]"#,
        ),
    ] {
        for (children, is_good) in [("[]", true), (good, true), ("[[]]", false), ("[{}]", false)] {
            let (front, back) = call.rsplit_once("[]").expect("the children");
            assert_eq!(takes(family, &tool, &format!("{front}{children}{back}")), is_good, "{family}: {children}");
        }
    }
}

#[test]
fn references_of_parameters_keep_what_stands_beside_them() {
    let whole = |parameter: Value| {
        json!({
            "type": "object", "properties": {"a": parameter}, "required": ["a"], "additionalProperties": false,
            "$defs": {
                "n": {"type": "integer", "minimum": 1}, "e": {"enum": ["x", "y"], "title": "E"}, "s": {"type": "string", "maxLength": 3},
                "List<n>": {"type": "array", "items": {"$ref": "#/$defs/n"}},
            },
        })
    };
    check_parameter(&whole(json!({"$ref": "#/$defs/n", "maximum": 5})), &["1", "5"], &["0", "6"]);
    check_parameter(&whole(json!({"$ref": "#/$defs/List%3Cn%3E", "maxItems": 1})), &["[]", "[7]"], &["[0]", "[7, 8]"]);
    check_parameter(
        &whole(json!({"type": "array", "items": {"$ref": "#/properties/a/x"}, "x": {"const": 7}})),
        &["[7]"],
        &["[8]"],
    );
    check_parameter(&whole(json!({"$ref": "#/$defs/s", "minLength": 2})), &["ab", "abc"], &["a", "abcd"]);
    check_parameter(&whole(json!({"allOf": [{"$ref": "#/$defs/e"}], "default": "x"})), &["x", "y"], &["z", "\"x\""]);
    check_parameter(&whole(json!({"enum": ["ab", "c"], "minLength": 2})), &["ab"], &["c", "x"]);
    // What closes the value is not its text, however much more that may have.
    check_parameter(&whole(json!({"type": "string", "maxLength": 40})), &["", "ab", "a\nb\n"], &[&"a".repeat(41)]);
}

#[test]
fn patterns_of_parameters_have_the_digits_and_blanks_of_ecma() {
    let string =
        |pattern: &str| json!({"properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]});
    check_parameter(&string(r"^\d+$"), &["12"], &["\u{663}", "a", ""]);
    check_parameter(&string(r"^\w+$"), &["a_1"], &["\u{e9}"]);
    check_parameter(&string(r"^[^\s]+$"), &["a\u{e9}"], &["\u{feff}", "\u{85}", " "]);
    check_parameter(&string(r"^a\/b/c$"), &["a/b/c"], &["a/bc"]);
}

/// A schema that refers to itself twice, in a format whose grammar follows nested schemas: each has one rule.
#[test]
fn grammars_of_wide_recursion_are_short() {
    let children: serde_json::Map<String, Value> =
        (0..8).map(|n| (format!("c{n}"), json!({"$ref": "#/$defs/node"}))).collect();
    let schema = json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": children}}});
    let many: serde_json::Map<String, Value> =
        (0..20_000).map(|n| (format!("p{n}"), json!({"$ref": "#/$defs/big"}))).collect();
    let big = json!({"type": "integer", "enum": (0..2_000).collect::<Vec<_>>()});
    let copied = json!({"properties": many, "$defs": {"big": big}});
    for family in &FAMILIES {
        let grammar = |schema: &Value| {
            let tool = CallableTool::new("f", Some(&schema.to_string()), false);
            family.model().answer_grammar(&[tool], &CallRule::default()).expect("a grammar").len()
        };
        assert!(grammar(&schema) < 20_000, "{}", family.format.name());
        // Nothing is written beyond what any grammar may have.
        assert!(grammar(&copied) < 4 << 20, "{}", family.format.name());
    }
}

/// Reasoning in the grammar itself: the answer behind it is held all the same.
#[test]
fn reasoning_may_stand_in_front() {
    let rule = CallRule { demand: CallDemand::Required, reasoning: ReasoningPart::Allowed, ..CallRule::default() };
    check_rule(&rule, &ALL, |answer| !answer.calls.is_empty());
}

#[test]
fn what_cannot_be_held_has_no_grammar() {
    let model = FAMILIES[0].model();
    assert_eq!(model.answer_grammar(&[], &CallRule::default()), None);
    let none = CallRule { allowed: Some(vec!["other".into()]), ..CallRule::default() };
    assert_eq!(model.answer_grammar(&tools(), &none), None);
    // A strict tool whose parameters no list can follow, in a format that writes them one by one.
    let of = |strict: bool| {
        let schema = r#"{"type": "object", "properties": {"a": {"type": "string"}}, "anyOf": [{"required": ["a"]}]}"#;
        [CallableTool::new("f", Some(schema), strict)]
    };
    for family in &FAMILIES {
        let grammar = |strict: bool| family.model().answer_grammar(&of(strict), &CallRule::default()).is_some();
        let lists = [
            "qwen3_coder",
            "seed_oss",
            "glm",
            "minimax_m2",
            "deepseek_v32",
            "pythonic",
            "olmo3",
            "tool_code",
            "functiongemma",
            "gemma4",
        ];
        assert!(grammar(false), "{}", family.format.name());
        assert_eq!(grammar(true), !lists.contains(&family.format.name()), "{}", family.format.name());
    }
}
