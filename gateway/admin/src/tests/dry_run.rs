//! Dry runs of plugins on a pasted request.

use penstock_config::Role;
use serde_json::{Value, json};

use super::Api;

const PATH: &str = "/admin/v1/plugins/dry-run";
const PLUGINS: &str = r#"
[[keys]]
id = "alice"
digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
models = ["chat"]
routes = ["/v1/chat/completions"]
[[plugins]]
name = "headers"
settings = { request = { set = { x-team = "red", x-secret = "sk-plugin-7f3a" } } }
[[plugins]]
name = "pii"
[[plugins]]
name = "body"
keys = ["alice"]
settings = { set = { temperature = 0.5 }, remove = ["seed"] }
[[plugins]]
name = "http_hook"
settings = { url = "http://127.0.0.1:9/secret-path" }
[[plugins]]
name = "guard"
settings = { rules = [{ name = "r", words = ["unsayable"], action = "block" }] }
[[plugins]]
name = "tags"
settings = { set = { env = "prod" } }
"#;

fn api() -> Api {
    let api = Api::start();
    let text = super::config() + PLUGINS;
    let (status, body) = api.call("owner", "PUT", "/admin/v1/config", &json!({ "text": text }).to_string());
    assert_eq!(status, 200, "{body}");
    api
}

fn chat(text: &str) -> Value {
    json!({ "model": "chat", "seed": 7, "messages": [{ "role": "user", "content": text }] })
}

fn tried(api: &Api, trial: &Value) -> Value {
    let (status, body) = api.call("operator", "POST", PATH, &trial.to_string());
    assert_eq!(status, 200, "{body}");
    body
}

fn outcomes(result: &Value) -> Vec<String> {
    let steps = result["steps"].as_array().expect("a list").iter();
    steps
        .map(|step| format!("{} {}", step["plugin"].as_str().expect("text"), step["outcome"].as_str().expect("text")))
        .collect()
}

#[test]
fn a_request_is_tried_and_each_step_tells_its_edits() {
    let api = api();
    let body = chat("write to ann@example.com");
    let headers = json!({ "X-Team": "blue", "authorization": "Bearer sk-of-a-person" });
    let trial = json!({ "path": "/v1/chat/completions", "headers": headers, "body": body, "key": "alice" });
    let result = tried(&api, &trial);
    let expected =
        ["headers changed", "pii changed", "body changed", "http_hook not_run", "guard passed", "tags changed"];
    assert_eq!(outcomes(&result), expected, "{result}");
    assert_eq!(
        (&result["end"], &result["key"], &result["route"]),
        (&"passed".into(), &"alice".into(), &"/v1/chat/completions".into())
    );
    let change = |step: usize, name: &str| {
        let all = result["steps"][step]["changes"].as_array().expect("a list");
        let found = all.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{name}: {all:?}"));
        (found["before"].clone(), found["after"].clone())
    };
    assert_eq!(change(0, "x-team"), ("blue".into(), "red".into()), "the part that a provider of the same API gets");
    assert_eq!(change(0, "x-secret"), (Value::Null, "[hidden]".into()));
    let content = (json!("\"write to ann@example.com\""), json!("\"write to [EMAIL_1]\""));
    assert_eq!(change(1, "/messages/0/content"), content);
    assert_eq!(change(2, "/temperature"), (Value::Null, "0.5".into()));
    assert_eq!(change(2, "/seed"), ("7".into(), Value::Null));
    assert_eq!(result["steps"][3]["why"], "the plugin would call its service, and a dry run calls nothing");
    let last: Value = serde_json::from_str(result["request"]["body"].as_str().expect("a body")).expect("JSON");
    assert_eq!((&last["messages"][0]["content"], &last["seed"]), (&"write to [EMAIL_1]".into(), &Value::Null));
    let text = result.to_string();
    for secret in ["sk-plugin-7f3a", "sk-of-a-person", "secret-path"] {
        assert!(!text.contains(secret), "{secret}: {text}");
    }
    // Somebody without a key meets other plugins.
    let nobody = tried(&api, &json!({ "path": "/v1/chat/completions", "body": chat("hi") }));
    assert_eq!((outcomes(&nobody)[2].as_str(), &nobody["key"]), ("body skipped", &Value::Null));
}

#[test]
fn a_refusal_is_told_in_the_clients_words_and_leaves_no_trace() {
    let api = api();
    let anthropic = json!({
        "model": "chat", "max_tokens": 5, "messages": [{ "role": "user", "content": "the unsayable" }]
    });
    let result = tried(&api, &json!({ "path": "/v1/messages", "body": anthropic }));
    assert_eq!(outcomes(&result)[4..], ["guard refused", "tags not_reached"]);
    assert_eq!((&result["end"], &result["refusal"]["status"]), (&"refused".into(), &400.into()));
    let said = result["refusal"]["body"].as_str().expect("text");
    assert!(said.starts_with("{\"type\":\"error\""), "{said}");
    assert!(api.gateway.live.list().is_empty());
    let metrics = api.gateway.metrics.render(&[]);
    assert!(!metrics.lines().any(|line| line.starts_with("penstock_plugin_calls_total{") && !line.ends_with(" 0")));
    let events = api.call("owner", "GET", "/admin/v1/audit?action=plugins.try", "").1;
    assert_eq!(events["data"][0]["outcome"], "done");
    assert!(!events.to_string().contains("unsayable"), "no prompt is noted: {events}");
}

#[test]
fn what_cannot_be_tried_is_refused() {
    let api = api();
    let check = |trial: Value, status: u16, param: &str| {
        let (got, body) = api.call("operator", "POST", PATH, &trial.to_string());
        let found = body["error"]["param"].as_str().unwrap_or_default();
        assert_eq!((got, found), (status, param), "{trial:.200}: {body}");
    };
    let chat_path = "/v1/chat/completions";
    check(json!({ "path": "/v1/moderations", "body": {} }), 400, "path");
    check(json!({ "path": "/v1/nothing", "body": {} }), 404, "");
    check(json!({ "path": "/".repeat(3000), "body": {} }), 400, "path");
    check(json!({ "path": chat_path, "body": {} }), 400, "model");
    check(json!({ "path": chat_path, "body": [] }), 400, "");
    check(json!({ "path": chat_path, "body": chat("x"), "key": "nobody" }), 403, "key");
    check(json!({ "path": chat_path, "body": chat("x"), "key": "k".repeat(600) }), 400, "key");
    check(json!({ "path": "/v1/embeddings", "body": { "model": "chat", "input": "x" }, "key": "alice" }), 403, "key");
    check(json!({ "path": chat_path, "body": chat("x"), "headers": { "a b": "c" } }), 400, "headers");
    check(json!({ "path": chat_path, "body": chat("x"), "headers": { "a": "c\nd: e" } }), 400, "headers");
    check(json!({ "path": chat_path, "body": chat("x"), "headers": { "a": "c".repeat(20_000) } }), 400, "headers");
    check(json!({ "path": chat_path, "body": chat(&"x".repeat(300_000)) }), 413, "");
    check(json!({ "path": chat_path, "body": chat("x"), "more": 1 }), 400, "body");
    let stored = json!({ "model": "chat", "input": "x", "previous_response_id": "resp_1" });
    check(json!({ "path": "/v1/responses", "body": stored }), 400, "body");
    for role in Role::ALL {
        let trial = json!({ "path": chat_path, "body": chat("x"), "key": "console:operator" });
        let status = api.call(role.name(), "POST", PATH, &trial.to_string()).0;
        assert_eq!(status, if role < Role::Operator { 403 } else { 200 }, "{role}");
    }
}
