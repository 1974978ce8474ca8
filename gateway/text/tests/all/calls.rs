//! Tool calls and reasoning of each family: texts as such models write them, in every tokenization.

use std::{collections::BTreeMap, sync::Arc};

use penstock_proto::frames::Token;
use penstock_text::{AnswerPart, CallableTool, ChoiceDecoder, ChoiceOptions, End, GoesOn, TextModel, ToolFormat};
use penstock_types::{ChatEvent, FinishReason};
use proptest::prelude::*;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Map, Value, json};

use crate::families::{FAMILIES, Family};

/// What clients get of one answer.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Answer {
    pub(crate) content: String,
    pub(crate) reasoning: String,
    pub(crate) calls: Vec<Call>,
    /// True if the last call is not complete.
    pub(crate) cut: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Call {
    pub(crate) name: String,
    pub(crate) arguments: String,
    /// Id that the model wrote; empty if the gateway made one.
    pub(crate) id: String,
}

pub(crate) fn decode(model: &Arc<TextModel>, tools: &Arc<[CallableTool]>, ids: &[u32]) -> Answer {
    let options =
        ChoiceOptions { parse_tools: true, parse_reasoning: true, tools: tools.clone(), ..ChoiceOptions::default() };
    let mut decoder = ChoiceDecoder::new(model.clone(), options);
    let mut events: Vec<ChatEvent> =
        ids.iter().flat_map(|&id| decoder.push(&Token { id, logprobs: None }).events).collect();
    events.extend(decoder.finish(End::Stop { token: None }));
    assert!(decoder.reasoning_tokens() <= decoder.completion_tokens());
    let mut answer = Answer::default();
    for event in events {
        match event {
            ChatEvent::Text { text, .. } => answer.content.push_str(&text),
            ChatEvent::Reasoning { text, .. } => answer.reasoning.push_str(&text),
            ChatEvent::ToolCallStart { call, id, name, .. } => {
                assert_eq!(call as usize, answer.calls.len(), "indices are contiguous");
                let id = if id.starts_with("call_") { String::new() } else { id };
                answer.calls.push(Call { name, id, ..Call::default() });
            }
            ChatEvent::ToolCallArguments { call, json, .. } => answer.calls[call as usize].arguments.push_str(&json),
            ChatEvent::Finish { reason, .. } => {
                let complete = |call: &Call| is_object(&call.arguments);
                answer.cut = answer.calls.last().is_some_and(|call| !complete(call));
                let calls = answer.calls.iter().filter(|call| complete(call)).count();
                assert_eq!(reason == FinishReason::ToolCalls, calls > 0, "{answer:?}");
            }
            other => panic!("unexpected {other:?}"),
        }
    }
    answer
}

/// Returns true for the text of a JSON object. Control characters inside strings pass, as models write line breaks.
fn is_object(json: &str) -> bool {
    let json = json.replace(|c: char| c.is_control(), " ");
    serde_json::from_str::<BTreeMap<String, IgnoredAny>>(&json).is_ok()
}

/// One token for each byte: marks, too, come in pieces.
pub(crate) fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Tokens with the text cut at these places, each part tokenized by itself.
fn cut(model: &TextModel, text: &str, places: &[prop::sample::Index]) -> Vec<u32> {
    let inside = places.iter().map(|place| place.index(text.len() + 1)).filter(|&at| text.is_char_boundary(at));
    let mut bounds: Vec<usize> = inside.chain([0, text.len()]).collect();
    bounds.sort_unstable();
    let parts = bounds.windows(2).map(|pair| &text[pair[0]..pair[1]]);
    parts.flat_map(|part| model.encode(part, false).expect("short")).collect()
}

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    #[serde(flatten)]
    answer: Answer,
}

pub(crate) fn tools() -> Arc<[CallableTool]> {
    let tool = |name: &str, parameters: Value| CallableTool::new(name, Some(&parameters.to_string()), false);
    Arc::from([
        tool(
            "get_weather",
            json!({"type": "object", "properties": {
                "city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}, "days": {"type": "integer"},
                "exact": {"type": "boolean"},
            }, "required": ["city"]}),
        ),
        tool(
            "search",
            json!({"type": "object", "properties": {
                "query": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}, "filter": {"type": "object"},
                "limit": {"type": ["integer", "null"]}, "score": {"type": "number"},
            }}),
        ),
        CallableTool::new("now", None, false),
    ])
}

fn golden(family: &Family) -> Golden {
    let path = format!("{}/tests/goldens/calls/{}.json", env!("CARGO_MANIFEST_DIR"), family.format.name());
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn answers_of_each_family() {
    for family in &FAMILIES {
        let model = family.model();
        let golden = golden(family);
        assert!(golden.cases.len() >= 3, "{}", family.format.name());
        for case in golden.cases {
            for ids in [model.encode(&case.text, false).expect("short"), bytes(&case.text)] {
                assert_eq!(decode(&model, &tools(), &ids), case.answer, "{}: {}", family.format.name(), case.text);
            }
        }
    }
}

/// Reasoning is counted by the token, and its closing mark is known to those who enforce a budget.
#[test]
fn reasoning_is_counted_and_can_be_closed() {
    let family = |name: &str| FAMILIES.iter().find(|family| family.format.name() == name).expect("a family").model();
    for (name, before, thought, close, after) in [
        ("hermes", "<think>", "ab c", "</think>", "x"),
        (
            "harmony",
            "<|channel|>analysis<|message|>",
            "ab c",
            "<|end|>",
            "<|start|>assistant<|channel|>final<|message|>x",
        ),
        ("gemma4", "<|channel>thought\n", "ab c", "<channel|>", "x"),
    ] {
        let model = family(name);
        assert_eq!(model.reasoning_close_tokens(), [model.token_id(close).expect("one token")], "{name}");
        let forced = model.decode(&model.reasoning_forced_close_tokens(GoesOn::WithTheAnswer), true);
        let options = ChoiceOptions { parse_reasoning: true, ..ChoiceOptions::default() };
        for end in [format!("{close}{after}"), format!("{forced}x")] {
            let text = format!("{before}{thought}{end}");
            let mut decoder = ChoiceDecoder::new(model.clone(), options.clone());
            let mut answer = (String::new(), String::new());
            for id in model.encode(&text, false).expect("short") {
                for event in decoder.push(&Token { id, logprobs: None }).events {
                    match event {
                        ChatEvent::Text { text, .. } => answer.0.push_str(&text),
                        ChatEvent::Reasoning { text, .. } => answer.1.push_str(&text),
                        other => panic!("unexpected {other:?}"),
                    }
                }
                assert!(!decoder.in_reasoning() || answer.0.is_empty(), "{name}");
            }
            assert_eq!((answer.0.as_str(), answer.1.as_str()), ("x", thought), "{name}: {text}");
            // The line break of a forced end is a token of the reasoning, too.
            let tokens = thought.len() as u64 + u64::from(end.starts_with('\n'));
            assert_eq!(decoder.reasoning_tokens(), tokens, "{name}: {text}");
        }
    }
}

/// An answer of these calls, as a model of the family writes it.
fn written(format: &str, calls: &[(String, Map<String, Value>)]) -> String {
    let json = |value: &Map<String, Value>| Value::Object(value.clone()).to_string();
    let object = |key: &'static str| {
        move |(name, arguments): &(String, Map<String, Value>)| {
            format!("{{\"name\": \"{name}\", \"{key}\": {}}}", Value::Object(arguments.clone()))
        }
    };
    let objects = |separator: &str| calls.iter().map(object("arguments")).collect::<Vec<_>>().join(separator);
    let each = |one: &dyn Fn(&str, &Map<String, Value>) -> String, separator: &str| {
        calls.iter().map(|(name, arguments)| one(name, arguments)).collect::<Vec<_>>().join(separator)
    };
    let raw = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let elements = |arguments: &Map<String, Value>, one: &dyn Fn(&str, &Value) -> String| {
        arguments.iter().map(|(key, value)| one(key, value)).collect::<String>()
    };
    let coder = |open: &str, close: &str, line: &str| {
        each(
            &|name, arguments| {
                let all = elements(arguments, &|key, value| {
                    format!("<parameter={key}>{line}{}{line}</parameter>\n", raw(value))
                });
                format!("{open}\n<function={name}>\n{all}</function>\n{close}")
            },
            "\n",
        )
    };
    let python = |separator: &str| {
        each(
            &|name, arguments| {
                let all: Vec<String> =
                    arguments.iter().map(|(key, value)| format!("{key}={}", python_literal(value))).collect();
                format!("{name}({})", all.join(", "))
            },
            separator,
        )
    };
    let gemma = |open: &str, close: &str, quote: &str| {
        each(
            &|name, arguments| {
                format!("{open}call:{name}{}{close}", gemma_literal(&Value::Object(arguments.clone()), quote))
            },
            "",
        )
    };
    match format {
        "hermes" => {
            calls.iter().map(object("arguments")).map(|call| format!("<tool_call>\n{call}\n</tool_call>\n")).collect()
        }
        "qwen3_coder" => coder("<tool_call>", "</tool_call>", "\n"),
        "seed_oss" => coder("<seed:tool_call>", "</seed:tool_call>", ""),
        "llama3_json" => calls.iter().map(object("parameters")).collect::<Vec<_>>().join("; "),
        "pythonic" => format!("[{}]", python(", ")),
        "olmo3" => format!("<function_calls>{}</function_calls>", python("\n")),
        "tool_code" => format!("```tool_code\n{}\n```", python("\n")),
        "mistral" => format!("[TOOL_CALLS][{}]", objects(", ")),
        "deepseek_v3" => format!(
            "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
            each(
                &|name, arguments| format!(
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{}\n```<｜tool▁call▁end｜>",
                    json(arguments)
                ),
                "\n"
            )
        ),
        "deepseek_v31" => format!(
            "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
            each(
                &|name, arguments| format!(
                    "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
                    json(arguments)
                ),
                ""
            )
        ),
        "deepseek_v32" => format!(
            "<｜DSML｜function_calls>\n{}</｜DSML｜function_calls>",
            each(
                &|name, arguments| {
                    let all = elements(arguments, &|key, value| {
                        format!(
                            "<｜DSML｜parameter name=\"{key}\" string=\"{}\">{}</｜DSML｜parameter>\n",
                            value.is_string(),
                            raw(value)
                        )
                    });
                    format!("<｜DSML｜invoke name=\"{name}\">\n{all}</｜DSML｜invoke>\n")
                },
                ""
            )
        ),
        "glm" => each(
            &|name, arguments| {
                let all = elements(arguments, &|key, value| {
                    format!("<arg_key>{key}</arg_key>\n<arg_value>{}</arg_value>\n", raw(value))
                });
                format!("<tool_call>{name}\n{all}</tool_call>")
            },
            "\n",
        ),
        "kimi_k2" => {
            let all = calls.iter().enumerate().map(|(index, (name, arguments))| {
                format!(
                    "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{}<|tool_call_end|>",
                    json(arguments)
                )
            });
            format!("<|tool_calls_section_begin|>{}<|tool_calls_section_end|>", all.collect::<String>())
        }
        "harmony" => each(
            &|name, arguments| {
                format!(
                    "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{}<|call|>",
                    json(arguments)
                )
            },
            "<|start|>assistant",
        ),
        "granite" => format!("<|tool_call|>[{}]", objects(", ")),
        "granite_20b" => {
            calls.iter().map(object("arguments")).map(|call| format!("<function_call> {call}\n")).collect()
        }
        "minimax" => format!("<tool_calls>\n{}\n</tool_calls>", objects("\n")),
        "phi4_mini_json" => format!("functools[{}]", objects(", ")),
        "phi4_mini_marked" => format!("<|tool_call|>[{}]<|/tool_call|>", objects(", ")),
        "minimax_m2" => format!(
            "<minimax:tool_call>\n{}</minimax:tool_call>",
            each(
                &|name, arguments| {
                    let all = elements(arguments, &|key, value| {
                        format!("<parameter name=\"{key}\">{}</parameter>\n", raw(value))
                    });
                    format!("<invoke name=\"{name}\">\n{all}</invoke>\n")
                },
                ""
            )
        ),
        "functiongemma" => gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        "gemma4" => gemma("<|tool_call>", "<tool_call|>", "<|\"|>"),
        other => panic!("no writer of {other}"),
    }
}

fn python_literal(value: &Value) -> String {
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::String(text) => {
            let escaped: String = text
                .chars()
                .map(|c| match c {
                    '\'' | '\\' => format!("\\{c}"),
                    '\n' => "\\n".into(),
                    '\u{1}'..='\u{1f}' => format!("\\x{:02x}", u32::from(c)),
                    _ => c.into(),
                })
                .collect();
            format!("'{escaped}'")
        }
        Value::Array(items) => format!("[{}]", items.iter().map(python_literal).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let member = |(key, value): (&String, &Value)| format!("'{key}': {}", python_literal(value));
            format!("{{{}}}", map.iter().map(member).collect::<Vec<_>>().join(", "))
        }
        Value::Number(number) => number.to_string(),
    }
}

fn gemma_literal(value: &Value, quote: &str) -> String {
    match value {
        Value::String(text) => format!("{quote}{text}{quote}"),
        Value::Array(items) => {
            format!("[{}]", items.iter().map(|item| gemma_literal(item, quote)).collect::<Vec<_>>().join(","))
        }
        Value::Object(map) => {
            let member = |(key, value): (&String, &Value)| format!("{key}:{}", gemma_literal(value, quote));
            format!("{{{}}}", map.iter().map(member).collect::<Vec<_>>().join(","))
        }
        other => other.to_string(),
    }
}

/// Texts of arguments: anything but the sign that all marks begin with.
fn text() -> impl Strategy<Value = String> {
    "[ -;=-~é漢\n\t👋\u{1}]{0,12}"
}

fn call() -> impl Strategy<Value = (String, Map<String, Value>)> {
    let weather = (text(), any::<i32>(), any::<bool>(), any::<[bool; 3]>()).prop_map(|(city, days, exact, given)| {
        let all = [("city", json!(city)), ("days", json!(days)), ("exact", json!(exact))];
        ("get_weather".to_owned(), members(all, given))
    });
    let nested = (text(), prop::collection::vec(text(), 0..3), -1e9f64..1e9, any::<Option<u8>>(), any::<[bool; 5]>());
    let search = nested.prop_map(|(query, tags, score, limit, given)| {
        let filter = json!({"k_1": tags, "n": {"deep": [score, null, true]}});
        let all = [
            ("query", json!(query)),
            ("tags", json!(tags)),
            ("filter", filter),
            ("score", json!(score)),
            ("limit", json!(limit)),
        ];
        ("search".to_owned(), members(all, given))
    });
    prop_oneof![weather, search, Just(("now".to_owned(), Map::new()))]
}

fn members<const N: usize>(all: [(&str, Value); N], given: [bool; N]) -> Map<String, Value> {
    all.into_iter().zip(given).filter(|(_, given)| *given).map(|((key, value), _)| (key.to_owned(), value)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    /// Calls that a model writes come back as they were, in every tokenization.
    #[test]
    fn what_is_written_is_read(
        calls in prop::collection::vec(call(), 1..4),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        for family in &FAMILIES {
            let model = family.model();
            let text = written(family.format.name(), &calls);
            let whole = decode(&model, &tools(), &model.encode(&text, false).unwrap());
            let read: Vec<(String, Map<String, Value>)> = whole
                .calls
                .iter()
                .map(|call| (call.name.clone(), serde_json::from_str(&call.arguments).unwrap()))
                .collect();
            prop_assert_eq!(&read, &calls, "{}: {}", family.format.name(), text);
            prop_assert_eq!((whole.content.as_str(), whole.reasoning.as_str()), ("", ""), "{}", text);
            prop_assert_eq!(&decode(&model, &tools(), &bytes(&text)), &whole);
            prop_assert_eq!(&decode(&model, &tools(), &cut(&model, &text, &places)), &whole);
        }
    }

    /// Broken answers, too, are the same in every tokenization.
    #[test]
    fn cuts_do_not_matter(
        calls in prop::collection::vec(call(), 1..3),
        damage in prop::collection::vec((any::<prop::sample::Index>(), "[<{}\"\\]\\[(),=:>|a-c\n ]{0,2}"), 0..4),
        end in any::<prop::sample::Index>(),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        for family in &FAMILIES {
            let model = family.model();
            let mut text: Vec<char> = written(family.format.name(), &calls).chars().collect();
            for (place, new) in &damage {
                let at = place.index(text.len());
                text.splice(at..at + 1, new.chars());
            }
            text.truncate(end.index(text.len() + 1) + text.len() / 2);
            let text: String = text.into_iter().collect();
            let whole = decode(&model, &tools(), &bytes(&text));
            prop_assert_eq!(&decode(&model, &tools(), &model.encode(&text, false).unwrap()), &whole);
            prop_assert_eq!(&decode(&model, &tools(), &cut(&model, &text, &places)), &whole);
        }
    }

    /// Text stands where it says and comes once; what is no text belongs to a call, or is a blank beside one.
    #[test]
    fn every_byte_is_accounted_for(
        calls in prop::collection::vec(call(), 1..4),
        damage in prop::collection::vec((any::<prop::sample::Index>(), "[<{}\"\\]\\[(),=:>|a-c\n ]{0,2}"), 0..6),
        again in any::<prop::sample::Index>(),
    ) {
        for format in ToolFormat::all().filter(|format| *format != ToolFormat::Harmony) {
            let mut text: Vec<char> = written(format.name(), &calls).chars().collect();
            for (place, new) in &damage {
                let at = place.index(text.len());
                text.splice(at..at + 1, new.chars());
            }
            let second: Vec<char> = text[again.index(text.len())..].to_vec();
            let text: String = text.into_iter().chain(second).collect();
            let (mut done, mut called, mut any) = (0, false, false);
            for part in format.parse(&tools(), &text) {
                match part {
                    AnswerPart::Text { at, text: part } => {
                        prop_assert_eq!(text.get(at..at + part.len()), Some(part.as_str()));
                        prop_assert!(at >= done, "twice: {}", text);
                        prop_assert!(called || text[done..at].trim().is_empty(), "{:?} vanished: {}", &text[done..at], text);
                        (done, called) = (at + part.len(), false);
                    }
                    AnswerPart::Call { arguments, complete, .. } => {
                        (called, any) = (true, true);
                        prop_assert!(!complete || is_object(&arguments), "{}", arguments);
                    }
                    AnswerPart::Reasoning(_) => prop_assert!(false, "no format but Harmony has it"),
                }
            }
            prop_assert!(called || text[done..].is_empty() || any && text[done..].trim().is_empty(), "vanished: {}", text);
        }
    }
}
