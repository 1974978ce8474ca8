//! Calls of earlier turns: the text that a checkpoint's own template writes for an assistant's calls is read by the
//! family's parser as the same calls. Models are shown their calls in that text, and write what they are shown.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_text::{CallableTool, TextModel};
use penstock_types::{ChatRequest, Role, Tool};
use serde_json::{Value, json};

use crate::calls::{Answer, bytes, decode};
use crate::common::{dir, message_from_json, request};
use crate::families::FAMILIES;
use crate::styles::{self, PHI_4_MINI, STYLES};

/// Chat template with calls, and what its text cannot hold.
pub(crate) struct Row {
    /// File of the template without its ending; the demo's own stands in its tokenizer_config.json.
    pub(crate) template: &'static str,
    /// Text behind a turn with calls.
    end: &'static str,
    /// Text behind a turn without calls.
    text_end: &'static str,
    /// Place of a text beside calls.
    text: Text,
    /// Most calls of a turn that the template writes.
    calls_max: usize,
    /// False if the template writes strings as they are, without quotes: a string that has the closing mark of a value
    /// ends there, and one of a parameter without a type is what it looks like.
    quotes: bool,
    /// True if keys inside of values have no quotes, and so are words.
    bare_keys: bool,
}

/// Place of the text of a turn that has calls, too.
enum Text {
    Kept,
    /// The template leaves it out.
    Dropped,
    /// The template writes it as reasoning.
    Reasoning,
    /// The template writes it behind the calls, as a turn of its own.
    Behind,
}

const DEMO: &str = "penstock-demo";

const fn row(template: &'static str, end: &'static str) -> Row {
    Row { template, end, text_end: end, text: Text::Kept, calls_max: usize::MAX, quotes: true, bare_keys: false }
}

pub(crate) const ROWS: [Row; 26] = [
    Row { quotes: false, ..row("ByteDance-Seed-OSS", "<seed:eos>") },
    Row { quotes: false, ..row("GLM-4.6", "") },
    Row { text: Text::Dropped, ..row("Mistral-Small-3.2-24B-Instruct-2506", "<eos>") },
    row("Qwen-Qwen2.5-7B-Instruct", "<|im_end|>\n"),
    row("Qwen-Qwen3-0.6B", "<|im_end|>\n"),
    Row { quotes: false, ..row("Qwen3-Coder", "<|im_end|>\n") },
    Row { text: Text::Behind, ..row("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "<｜end▁of▁sentence｜>") },
    row("deepseek-ai-DeepSeek-V3.1", "<｜end▁of▁sentence｜>"),
    row("ibm-granite-granite-4.0", "<|end_of_text|>\n"),
    Row { text: Text::Dropped, ..row("mistralai-Mistral-Nemo-Instruct-2407", "<eos>") },
    Row { text_end: "<|return|>", text: Text::Reasoning, calls_max: 1, ..row("openai-gpt-oss-120b", "<|call|>") },
    row(DEMO, "<|im_end|>\n"),
    Row { text: Text::Dropped, ..row("style-llama-3-json", "<eos>") },
    row("style-llama-4-pythonic", "<eos>"),
    row("style-kimi-k2", "<eos>"),
    row("style-minimax-m1", "<eos>"),
    Row { quotes: false, ..row("style-minimax-m2", "<eos>") },
    row("style-deepseek-v3.2", "<eos>"),
    row("style-granite-3", "<eos>"),
    row("style-granite-20b", "<eos>"),
    Row { bare_keys: true, ..row("style-gemma-4", "<eos>") },
    Row { bare_keys: true, ..row("style-function-gemma", "<eos>") },
    row("style-tool-code", "<eos>"),
    row("style-olmo-3", "<eos>"),
    row("style-phi-4-mini", "<eos>"),
    row(PHI_4_MINI, "<|end|><eos>"),
];

/// Templates that write calls in a form of no family: ours in the style of others, as Python prints them.
pub(crate) const OF_NO_FAMILY: [&str; 1] = ["style-zephyr-vicuna"];

fn templates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/templates")
}

pub(crate) fn source(template: &str) -> String {
    if template == DEMO {
        let config = std::fs::read(dir().join("tokenizer_config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        return config["chat_template"].as_str().unwrap().to_owned();
    }
    styles::source(template)
        .unwrap_or_else(|| std::fs::read_to_string(templates().join(format!("{template}.jinja"))).unwrap())
}

/// Model with the template and the marks of its family as tokens.
pub(crate) fn model(template: &str) -> Arc<TextModel> {
    let source = source(template);
    let format = FAMILIES[0].with_template(&source).tool_format();
    let of_format = FAMILIES.iter().filter(|family| Some(family.format) == format);
    let family = of_format.max_by_key(|family| family.marks_in(&source));
    family.unwrap_or_else(|| panic!("{template}: of no family")).with_template(&source)
}

fn parameters() -> Value {
    json!({"type": "object", "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "ratio": {"type": "number"}, "flag": {"type": "boolean"},
        "nothing": {"type": "null"}, "maybe": {"type": ["string", "null"]}, "list": {"type": "array"}, "object": {"type": "object"},
        "any": {},
    }})
}

/// Arguments of one call.
fn arguments() -> Vec<Value> {
    let text = |text: &str| json!({"text": text});
    vec![
        json!({}),
        text(""),
        text("Z\u{fc}rich \u{6f22}\u{5b57} \u{1f44b} e\u{301}"),
        text("say \"hi\" and 'bye' \\ / `x` \\n \\u0041"),
        text("one\ntwo\r\n\tthree\n"),
        text("\nfirst"),
        text(" padded "),
        text("\u{1}\u{7f}"),
        text("5"),
        text("true"),
        text("null"),
        text("{\"a\": 1}"),
        text("<b>&amp;</b> a < b"),
        text("</tool_call> <tool_call> ``` [TOOL_CALLS] <|call|> <|message|> <eos>"),
        json!({"count": 0}),
        json!({"count": -7}),
        json!({"count": i64::MAX}),
        json!({"ratio": 1.5}),
        json!({"ratio": -2.5e-9}),
        json!({"ratio": 1e30}),
        json!({"flag": true}),
        json!({"flag": false}),
        json!({"nothing": null}),
        json!({"maybe": null}),
        json!({"maybe": "x"}),
        json!({"list": []}),
        json!({"list": [[], {}, "a, b", -1.5, null, true]}),
        json!({"object": {}}),
        json!({"object": {"a": {"b": [1, null, false, "x\"y'z"]}, "k_v": "\u{e9}\n"}}),
        json!({"any": "x"}),
        json!({"any": 5}),
        json!({"any": {"a": [true]}}),
        json!({"text": "a", "count": 1, "flag": true, "maybe": null, "object": {"text": "b"}, "list": [1]}),
    ]
}

/// Arguments that only templates with quotes can hold.
fn quoted_arguments() -> Vec<Value> {
    vec![
        json!({"text": "</parameter> </arg_value> <\u{ff5c}tool\u{2581}call\u{2581}end\u{ff5c}> <|end|>"}),
        json!({"any": "5"}),
        json!({"any": "null"}),
        json!({"any": "[1]"}),
    ]
}

pub(crate) fn call(number: usize, name: &str, arguments: &Value) -> Value {
    json!({"id": format!("abcdefgh{number}"), "type": "function", "function": {"name": name, "arguments": arguments}})
}

pub(crate) fn chat(turn: Option<Value>) -> ChatRequest {
    let asked = json!({"role": "user", "content": "What is it?"});
    let mut chat = request([Some(asked), turn].iter().flatten().map(message_from_json).collect());
    chat.add_generation_prompt = chat.messages.last().is_some_and(|message| message.role == Role::User);
    chat.tools = ["record", "now"]
        .map(|name| {
            let function = json!({"name": name, "description": "It does.", "parameters": parameters()});
            let json = json!({"type": "function", "function": function}).to_string();
            Tool { json, ..Tool::function(String::new(), None, None, false) }
        })
        .into();
    chat
}

/// Tokens of the assistant's turn as the template writes it: behind what the template opens an answer with, and in
/// front of its end.
pub(crate) fn turn(model: &TextModel, row: &Row, message: Value) -> Result<Vec<u32>, String> {
    let end = if message["tool_calls"].is_null() { row.text_end } else { row.end };
    let prompt = |chat| model.chat_prompt(&chat, 0).map_err(|error| error.message);
    let (open, all) = (prompt(chat(None))?, prompt(chat(Some(message)))?);
    let from = open.tokens.iter().zip(&all.tokens).take_while(|(one, other)| one == other).count();
    let text = all.text.strip_suffix(end).ok_or_else(|| format!("another end: {:?}", all.text))?;
    let to = (from..=all.tokens.len()).rev().find(|&to| model.decode(&all.tokens[..to], true) == text);
    Ok(all.tokens[from..to.ok_or("the end is no token's")?].to_vec())
}

fn read(answer: &Answer) -> Vec<(String, Value)> {
    let value = |json: &str| serde_json::from_str(json).unwrap_or_else(|_| Value::String(format!("no JSON: {json}")));
    answer.calls.iter().map(|call| (call.name.clone(), value(&call.arguments))).collect()
}

/// Differences between the turn and what is read of it, whole and byte by byte.
fn faults(model: &Arc<TextModel>, row: &Row, content: Option<&str>, calls: &[(&str, &Value)]) -> Vec<String> {
    let tools: Arc<[CallableTool]> =
        ["record", "now"].map(|name| CallableTool::new(name, Some(&parameters().to_string()), false)).into();
    let mut message = json!({"role": "assistant", "content": content});
    if !calls.is_empty() {
        let calls: Vec<_> = calls.iter().enumerate().map(|(at, (name, arguments))| call(at, name, arguments)).collect();
        message["tool_calls"] = calls.into();
    }
    let ids = match turn(model, row, message) {
        Ok(ids) => ids,
        Err(error) => return vec![error],
    };
    let text = model.decode(&ids, true);
    let owned = |(name, arguments): &(&str, &Value)| ((*name).to_owned(), (*arguments).clone());
    let expected: Vec<_> = calls.iter().take(row.calls_max).map(owned).collect();
    let content = content.unwrap_or_default();
    let is_told = |answer: &Answer| {
        let (said, thought) = (answer.content.trim(), answer.reasoning.trim());
        match row.text {
            _ if calls.is_empty() => (said, thought) == (content, ""),
            Text::Kept => (said, thought) == (content, ""),
            Text::Dropped => (said, thought) == ("", ""),
            Text::Reasoning => (said, thought) == ("", content),
            Text::Behind => said.ends_with(content) && thought.is_empty(),
        }
    };
    let mut faults = Vec::new();
    for ids in [ids, bytes(&text)] {
        let answer = decode(model, &tools, &ids);
        if read(&answer) != expected || !is_told(&answer) || answer.cut {
            faults.push(format!("{text:?}\n   given {content:?} {expected:?}\n   read {answer:?}"));
        }
    }
    faults
}

#[test]
fn calls_that_a_template_writes_are_read_as_they_were() {
    let mut all = Vec::new();
    for row in &ROWS {
        let model = model(row.template);
        let mut quoted = if row.quotes { quoted_arguments() } else { Vec::new() };
        quoted.extend((!row.bare_keys).then(|| json!({"object": {"": {"": ""}, "k v": "\u{e9}"}})));
        let mut here = Vec::new();
        for arguments in arguments().into_iter().chain(quoted) {
            here.extend(faults(&model, row, None, &[("record", &arguments)]));
        }
        let (some, none) = (json!({"text": "a", "count": 1}), json!({}));
        here.extend(faults(&model, row, None, &[("record", &some), ("now", &none)]));
        here.extend(faults(&model, row, None, &[("now", &none), ("record", &some)]));
        here.extend(faults(&model, row, Some("Let me see."), &[("record", &some)]));
        here.extend(faults(&model, row, Some("Let me see."), &[("record", &some), ("now", &none)]));
        here.extend(faults(&model, row, Some("It is {\"a\": 1}."), &[]));
        all.extend(here.into_iter().map(|fault| format!("{}: {fault}", row.template)));
    }
    assert!(all.is_empty(), "{} faults:\n{}", all.len(), all.join("\n"));
}

#[test]
fn every_template_that_writes_calls_is_in_the_table() {
    let files = std::fs::read_dir(templates()).unwrap().map(|entry| entry.unwrap().path());
    let with_calls = files
        .filter(|path| path.extension().is_some_and(|kind| kind == "jinja"))
        .filter(|path| std::fs::read_to_string(path).unwrap().contains("tool_calls"))
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned());
    let is_file =
        |template: &&str| ![DEMO, PHI_4_MINI].contains(template) && STYLES.iter().all(|(name, _)| name != template);
    let listed = ROWS.iter().map(|row| row.template).filter(is_file).chain(OF_NO_FAMILY);
    assert_eq!(with_calls.collect::<BTreeSet<_>>(), listed.map(str::to_owned).collect());
}

#[test]
fn every_family_has_a_template_in_the_table() {
    let formats: Vec<_> = ROWS.iter().filter_map(|row| model(row.template).tool_format()).collect();
    let missing: Vec<_> =
        FAMILIES.iter().map(|family| family.format).filter(|format| !formats.contains(format)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
