//! Dry runs of plugins on a pasted request.

use std::future::pending;
use std::io::Write;
use std::net::Ipv4Addr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use penstock_config::{OnFail, PluginConfig, Role};
use penstock_plugins::{Hooks, Needs, Plugin, PluginError, RequestContext, Verdict};
use serde_json::{Value, json};

use super::{Api, connect};
use crate::dry_runs::{RUNS_MAX, WAITING_MAX};

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

/// Numbers of runs of [`Holding`], and whether they may end.
#[derive(Default)]
struct Runs {
    begun: usize,
    dropped: usize,
    may_end: bool,
}

/// Plugin whose runs hold their thread until they may end, or, if it gives way, wait for ever.
#[derive(Clone, Default)]
struct Holding {
    gives_way: bool,
    shared: Arc<(Mutex<Runs>, Condvar)>,
}

impl Holding {
    fn change(&self, change: impl FnOnce(&mut Runs)) {
        change(&mut self.runs());
        self.shared.1.notify_all();
    }

    fn runs(&self) -> MutexGuard<'_, Runs> {
        self.shared.0.lock().expect("not poisoned")
    }

    /// Waits on this thread until `is_so`; false: it never was.
    fn wait(&self, is_so: impl Fn(&Runs) -> bool) -> bool {
        let waited = self.shared.1.wait_timeout_while(self.runs(), Duration::from_secs(30), |runs| !is_so(runs));
        !waited.expect("not poisoned").1.timed_out()
    }

    /// API whose only plugin is this one.
    fn api(&self) -> Api {
        Api::of(&|config| {
            config.plugins.push(PluginConfig {
                id: "holding".into(),
                name: "holding".into(),
                routes: Vec::new(),
                models: Vec::new(),
                keys: Vec::new(),
                teams: Vec::new(),
                on_fail: OnFail::Closed,
                timeout: Duration::from_secs(600),
                settings: None,
                plugin: Arc::new(self.clone()),
            });
        })
    }
}

impl Plugin for Holding {
    fn needs(&self) -> Needs {
        Needs::Facts
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(HoldingRun(self.clone()))
    }

    fn can_dry_run(&self) -> bool {
        true
    }
}

struct HoldingRun(Holding);

#[async_trait]
impl Hooks for HoldingRun {
    async fn on_request(&mut self, _: &mut RequestContext) -> Result<Verdict, PluginError> {
        self.0.change(|runs| runs.begun += 1);
        if self.0.gives_way {
            pending::<()>().await;
        }
        self.0.wait(|runs| runs.may_end);
        Ok(Verdict::Pass)
    }
}

impl Drop for HoldingRun {
    fn drop(&mut self) {
        self.0.change(|runs| runs.dropped += 1);
    }
}

fn try_holding(api: &Api) -> (u16, String) {
    let trial = json!({ "path": "/v1/chat/completions", "body": chat("x") }).to_string();
    let fields = ["authorization: Bearer operator", "content-type: application/json"];
    let (status, head, _) = api.ask("POST", PATH, &fields, &trial);
    (status, head)
}

#[test]
fn the_api_answers_while_plugins_compute_and_the_number_of_runs_is_bounded() {
    let plugin = Holding::default();
    let api = plugin.api();
    let (told, answers) = mpsc::channel();
    thread::scope(|scope| {
        let begin = |count: usize| {
            for _ in 0..count {
                let (told, api) = (told.clone(), &api);
                scope.spawn(move || told.send(try_holding(api)));
            }
        };
        begin(RUNS_MAX);
        let run = plugin.wait(|runs| runs.begun == RUNS_MAX);
        let health = api.ask("GET", "/admin/v1/health", &[], "").0;
        // One more than may wait: it alone is answered.
        begin(WAITING_MAX + 1);
        let refused = answers.recv_timeout(Duration::from_secs(20));
        let begun = plugin.runs().begun;
        plugin.change(|runs| runs.may_end = true);
        assert!(run, "both run at once");
        assert_eq!((health, begun), (200, RUNS_MAX));
        let (status, head) = refused.expect("somebody is refused");
        assert!(status == 429 && head.contains("retry-after: 1\n"), "{status} {head}");
        for _ in 0..RUNS_MAX + WAITING_MAX {
            let answer = answers.recv_timeout(Duration::from_secs(60));
            assert_eq!(answer.expect("an answer").0, 200);
        }
    });
}

#[test]
fn a_dry_run_whose_client_leaves_is_given_up_and_noted() {
    let plugin = Holding { gives_way: true, ..Holding::default() };
    let api = plugin.api();
    let trial = json!({ "path": "/v1/chat/completions", "body": chat("x") }).to_string();
    for round in 1..=RUNS_MAX + 1 {
        let mut stream = connect(Ipv4Addr::LOCALHOST, api.address);
        let head = format!(
            "POST {PATH} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer operator\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{trial}",
            trial.len()
        );
        stream.write_all(head.as_bytes()).expect("sent");
        assert!(plugin.wait(|runs| runs.begun == round), "it runs");
        drop(stream);
        assert!(plugin.wait(|runs| runs.dropped == round), "it is given up");
    }
    let until = Instant::now() + Duration::from_secs(30);
    let noted = || api.call("owner", "GET", "/admin/v1/audit", "").1["data"].clone();
    while noted().as_array().map(Vec::len) != Some(RUNS_MAX + 1) {
        assert!(Instant::now() < until, "every run is in the audit log: {}", noted());
        thread::sleep(Duration::from_millis(20));
    }
    let events = noted();
    let told = ["actor", "action", "outcome"].map(|name| events[0][name].as_str().unwrap_or_default());
    assert_eq!(told, ["operator", "plugins.try", "failed"], "{events}");
}
