//! Rendered prompts against Hugging Face transformers, byte for byte: goldens/make_goldens.py wrote them.

use crate::common;

use std::path::Path;

use common::{dir, message, message_from_json, request};
use penstock_text::{TextError, TextFiles, TextModel};
use penstock_types::{ChatRequest, Role, Tool, error::ApiErrorKind};
use serde_json::{Value, json};

/// Time at which `strftime_now` was called for the goldens, in Unix seconds.
const NOW_UNIX_S: i64 = 1_700_000_000;

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A document as the client wrote it: the reader of this test rounds the large integer of the cases to a float.
fn raw(document: &str) -> String {
    document.replace("1.2345678901234568e+29", "123456789012345678901234567890")
}

fn chat(case: &Value) -> ChatRequest {
    let mut chat = request(case["messages"].as_array().unwrap().iter().map(message_from_json).collect());
    let tools = case["tools"].as_array().into_iter().flatten();
    chat.tools = tools
        .map(|tool| Tool { json: raw(&tool.to_string()), ..Tool::function(String::new(), None, None, false) })
        .collect();
    for call in chat.messages.iter_mut().flat_map(|message| &mut message.tool_calls) {
        call.arguments = raw(&call.arguments);
    }
    chat.add_generation_prompt = case["add_generation_prompt"].as_bool().unwrap_or(true);
    chat.continue_final_message = case["continue_final_message"].as_bool().unwrap_or(false);
    chat.template_kwargs = case.get("kwargs").map(Value::to_string);
    chat
}

/// The demo's tokenizer with the golden's template.
fn load(golden: &Value, templates: &Path) -> Result<TextModel, TextError> {
    let Some(name) = golden["template"].as_str() else { return TextModel::from_dir(&dir()) };
    let files = TextFiles {
        tokenizer_json: std::fs::read(dir().join("tokenizer.json")).unwrap().into(),
        tokenizer_config_json: Some(golden["special"].to_string().into_bytes().into()),
        chat_template_jinja: Some(std::fs::read(templates.join(name)).unwrap().into()),
        ..TextFiles::default()
    };
    TextModel::load(&files)
}

/// Compares one file of goldens; returns the number of equal prompts, and descriptions of the others.
fn compare(golden: &Value, cases: &Value, templates: &Path) -> (usize, Vec<String>) {
    let model = match load(golden, templates) {
        Ok(model) => model,
        // A template that is refused at load must fail in Python, too, whatever the conversation.
        Err(_) if golden["cases"].as_object().unwrap().values().all(|case| case["text"].is_null()) => {
            return (0, Vec::new());
        }
        Err(error) => return (0, vec![format!("{}: {error}", golden["template"])]),
    };
    let mut faults = Vec::new();
    let mut equal = 0;
    for (name, expected) in golden["cases"].as_object().unwrap() {
        let made = model.chat_prompt(&chat(&cases[name]), NOW_UNIX_S);
        let fault = match (&made, expected["text"].as_str()) {
            (Ok(made), Some(text)) if made.text != text => Some(json!({"made": made.text, "golden": text})),
            (Ok(made), Some(_)) => {
                equal += 1;
                let ids = expected.get("ids").map(|ids| *ids == json!(made.tokens));
                (ids == Some(false)).then(|| json!({"made": made.tokens, "golden": expected["ids"]}))
            }
            (Err(error), Some(_)) => Some(json!({"made": error.message})),
            // A conversation that the template itself refuses must be refused; where Python fails otherwise, either
            // may happen.
            (Ok(made), None) if expected["error"].as_str().unwrap().starts_with("TemplateError") => {
                Some(json!({"made": made.text, "golden": expected["error"]}))
            }
            _ => None,
        };
        faults.extend(fault.map(|fault| format!("{} {name}: {fault}", golden["template"])));
    }
    (equal, faults)
}

fn compare_all(goldens: &Path, templates: &Path) -> (usize, Vec<String>) {
    let cases = read_json(&goldens.join("cases.json"));
    let mut all = (0, Vec::new());
    let mut paths: Vec<_> = std::fs::read_dir(goldens).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in
        paths.iter().filter(|path| path.extension().is_some_and(|kind| kind == "json") && !path.ends_with("cases.json"))
    {
        let (equal, faults) = compare(&read_json(path), &cases, templates);
        all.0 += equal;
        all.1.extend(faults);
    }
    all
}

#[test]
fn prompts_equal_transformers() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let (equal, faults) = compare_all(&goldens, &goldens.join("templates"));
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(equal >= 200, "only {equal} prompts compared");
    // Larger set of templates, kept outside the project; see make_goldens.py.
    if let Some(dir) = std::env::var_os("PENSTOCK_TEMPLATE_GOLDENS") {
        let (equal, faults) = compare_all(Path::new(&dir), Path::new(&dir));
        println!("{equal} prompts equal, {} not", faults.len());
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }
}

/// Templates that expect another form than transformers': clients send null content and arguments as text.
#[test]
fn templates_that_join_texts_are_given_texts() {
    let case = json!({"messages": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}]},
    ]});
    let render = |template: &str| {
        let files = TextFiles {
            tokenizer_json: std::fs::read(dir().join("tokenizer.json")).unwrap().into(),
            chat_template_jinja: Some(template.as_bytes().into()),
            ..TextFiles::default()
        };
        TextModel::load(&files).unwrap().chat_prompt(&chat(&case), NOW_UNIX_S).map(|made| made.text)
    };
    let each = |body: &str| format!("{{% for message in messages %}}{body}{{% endfor %}}");
    assert_eq!(render(&each("{{ 'x' + message.content }};")).unwrap(), "xgo;x;");
    assert_eq!(render(&each("{{ message.content }};")).unwrap(), "go;;");
    assert_eq!(render(&each("{% if message.content is none %}-{% endif %}")).unwrap(), "-");
    let arguments = "{% for c in message.tool_calls %}{{ 'a: ' + c.function.arguments }}{% endfor %}";
    assert_eq!(render(&each(arguments)).unwrap(), "a: {\"a\":1}");
    assert_eq!(render("{{ messages[1].tool_calls[0].function.arguments | tojson }}").unwrap(), "{\"a\": 1}");
    assert!(render("{{ messages + 1 }}").unwrap_err().message.contains("fails on this conversation"));
}

/// The bounds of a rendering leave room for conversations longer than any model's context.
#[test]
fn long_conversations_fit_into_the_bounds() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    let cases = read_json(&goldens.join("cases.json"));
    let turn = chat(&cases["long"]);
    let mut long = chat(&cases["system_tools"]);
    for _ in 0..250 {
        long.messages.extend(turn.messages[1..].iter().cloned());
    }
    long.messages.push(message(Role::User, &"A long text. ".repeat(200_000)));
    for name in ["Qwen-Qwen3-0.6B", "GLM-4.6", "deepseek-ai-DeepSeek-V3.1", "Qwen3-Coder", "penstock-demo"] {
        let golden = read_json(&goldens.join(format!("{name}.json")));
        // The demo's context is short: what was rendered is refused as too long, before it is tokenized.
        let mut short = golden.clone();
        short["special"]["model_max_length"] = 1024.into();
        let refused = load(&short, &goldens.join("templates")).unwrap().chat_prompt(&long, NOW_UNIX_S).unwrap_err();
        assert_eq!(refused.kind, ApiErrorKind::ContextLength, "{name}: {}", refused.message);
    }
}
