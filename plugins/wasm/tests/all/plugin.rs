//! Plugins as the gateway uses them: settings, hooks, waiting, breaking, being replaced.

use crate::support;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use penstock_plugins::testing::{FakeHost, http_answer, now, request};
use penstock_plugins::{
    After, AnswerHead, AskAs, BoxFuture, EndFacts, Endpoint, Flow, Hooks, Host, HostError, HttpAnswer, HttpAsk, Kind,
    ModelAnswer, Needs, Outcome, Plugin, RequestContext, Sees, SettingFault, Settings, Surroundings, Verdict,
};
use penstock_types::{ChatEvent, ChatRequest, Surface, Usage};
use penstock_wasm::host::{Machine, WasmKind};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use support::{compile_sdk, host_with, module};

const SDK: &[u8] = include_bytes!("../sdk/plugin.wasm");

/// Files that a config may name.
struct Files(HashMap<&'static str, Vec<u8>>);

impl Surroundings for Files {
    fn env(&self, _: &str) -> Option<String> {
        None
    }

    fn check_url(&self, url: &str) -> Result<(), String> {
        if url.starts_with("http://") { Ok(()) } else { Err("must begin with http://".into()) }
    }

    fn file(&self, path: &str, _: usize) -> Result<Bytes, String> {
        self.0.get(path).map(|bytes| Bytes::copy_from_slice(bytes)).ok_or_else(|| "no such file".into())
    }
}

fn build_of(kind: &WasmKind, module: &[u8], settings: Value) -> Result<Arc<dyn Plugin>, Vec<SettingFault>> {
    let files = Files(HashMap::from([("p.wasm", module.to_vec())]));
    let mut settings = settings;
    settings["file"] = json!("p.wasm");
    Settings::read(Some(&settings), &files, |settings| kind.build(settings))
}

#[track_caller]
fn built(module: &[u8], settings: Value) -> Arc<dyn Plugin> {
    build_of(&WasmKind::new(), module, settings).unwrap_or_else(|faults| panic!("{faults:?}"))
}

fn sdk() -> Arc<dyn Plugin> {
    built(SDK, json!({ "config": "sdk", "upstreams": { "auth": "http://127.0.0.1:1" } }))
}

fn chat(content: &str, host: Arc<dyn Host>) -> RequestContext {
    request(Surface::Chat, &json!({ "model": "m", "messages": [{ "role": "user", "content": content }] }), host)
}

fn with_header(mut context: RequestContext, name: &'static str, value: &'static str) -> RequestContext {
    context.headers.insert(name, HeaderValue::from_static(value));
    context
}

fn facts() -> EndFacts {
    let usage = Usage { prompt_tokens: 3, completion_tokens: 7, ..Usage::default() };
    EndFacts { outcome: Outcome::Complete, model: "m".into(), target: None, usage, duration: Duration::from_millis(5) }
}

fn raw(text: &str) -> ChatEvent {
    ChatEvent::Raw(Bytes::copy_from_slice(text.as_bytes()))
}

fn text_of(events: &[ChatEvent]) -> String {
    let texts = events.iter().map(|event| match event {
        ChatEvent::Raw(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        other => panic!("{other:?}"),
    });
    texts.collect()
}

#[test]
fn the_plugin_in_the_tests_is_made_of_its_source() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sdk");
    let noted = std::fs::read_to_string(format!("{folder}/SHA256SUMS")).unwrap();
    for line in noted.lines() {
        let (sum, name) = line.split_once("  ").unwrap();
        let found: String = Sha256::digest(std::fs::read(format!("{folder}/{name}")).unwrap())
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(found, sum, "{name} has changed: `make wasm-plugin` builds the plugin and notes what of");
    }
    assert_eq!(noted.lines().count(), 3);
}

#[test]
fn a_plugin_of_a_public_kit_sees_a_request_through() {
    let plugin = sdk();
    assert_eq!(plugin.needs(), Needs::Body);
    assert_eq!(plugin.tick_period(), Some(Duration::from_millis(20)));
    for turn in 1..=3 {
        let mut hooks = plugin.begin();
        let mut context = chat("a secret, and no other", Arc::new(FakeHost::default()));
        assert!(matches!(now(hooks.on_request(&mut context)), Ok(Verdict::Pass)));
        assert_eq!(context.headers["x-plugin"], "sdk");
        let body = String::from_utf8(context.body().unwrap().to_vec()).unwrap();
        assert!(body.contains("a ******, and no other"), "{body}");
        assert_eq!(hooks.sees(), Sees::Bytes);
        let mut head = AnswerHead::default();
        hooks.on_head(&mut head).unwrap();
        assert_eq!(head.headers, [("x-plugin-answers".parse().unwrap(), turn.to_string().parse().unwrap())]);
        let mut events = vec![raw("data: hello"), raw(" you\n\n")];
        assert!(matches!(hooks.on_event(&mut events, false), Ok(Flow::Go)));
        assert_eq!(text_of(&events), "data: HELLO you\n\n");
        let mut events = vec![raw("data: [DONE]\n\n")];
        assert!(matches!(hooks.on_event(&mut events, true), Ok(Flow::Go)));
        assert_eq!(text_of(&events), "data: [DONE]\n\n");
        hooks.on_end(&facts());
    }
}

#[test]
fn a_plugin_of_a_public_kit_denies() {
    let mut context = with_header(chat("hi", Arc::new(FakeHost::default())), "x-deny", "1");
    let mut hooks = sdk().begin();
    let Ok(Verdict::Reject(rejection)) = now(hooks.on_request(&mut context)) else { panic!("it denies") };
    assert_eq!(rejection.status, Some(403));
    assert_eq!(rejection.body.unwrap(), r#"{"error":{"message":"denied by the plugin"}}"#);
    assert_eq!(rejection.headers, [("x-denied".parse().unwrap(), HeaderValue::from_static("yes"))]);
}

fn checked(status: StatusCode) -> (Verdict, RequestContext) {
    let host = host_with(move |url, ask| {
        assert_eq!((url, ask.path.as_str(), ask.method.as_str()), ("http://127.0.0.1:1", "/check", "GET"));
        assert!(ask.headers.iter().any(|(name, value)| name == "x-check" && value == "me"));
        http_answer(status, "")
    });
    let mut context = with_header(chat("hi", host), "x-check", "me");
    let verdict = now(sdk().begin().on_request(&mut context)).unwrap();
    (verdict, context)
}

#[test]
fn a_request_waits_for_a_call_of_the_plugin() {
    let (verdict, context) = checked(StatusCode::OK);
    assert!(matches!(verdict, Verdict::Pass));
    assert_eq!(context.headers["x-checked"], "yes");
    let (verdict, _) = checked(StatusCode::FORBIDDEN);
    assert!(matches!(verdict, Verdict::Reject(rejection) if rejection.status == Some(401)));
}

#[test]
fn a_call_that_fails_is_answered_all_the_same() {
    let mut context = with_header(chat("hi", Arc::new(FakeHost::default())), "x-check", "me");
    let verdict = now(sdk().begin().on_request(&mut context));
    assert!(matches!(verdict, Ok(Verdict::Reject(rejection)) if rejection.status == Some(401)));
}

#[test]
fn timer_metrics_and_log_of_a_public_kit() {
    let program = compile_sdk(SDK).unwrap();
    let host = support::host();
    let mut machine = Machine::start(&program, Some(host)).unwrap();
    for _ in 0..4 {
        machine.tick().unwrap();
    }
    let context = machine.create(support::stream()).unwrap();
    machine.stream(context).unwrap().facts.end = Some(facts());
    machine.finish(context).unwrap();
    let ticks = program.metrics().into_iter().find(|metric| metric.name == "ticks").unwrap();
    assert_eq!(ticks.value, 4);
    assert_eq!(machine.contexts(), 0);
}

#[test]
fn metrics_of_a_plugin_are_the_gateways() {
    let data = r#"(data (i32.const 1024) "hits") (data (i32.const 1028) "took")"#;
    let text = format!(
        "{data} (func (export \"proxy_on_request_headers\") (param i32 i32 i32) (result i32)
            (drop (call $proxy_define_metric (i32.const 0) (i32.const 1024) (i32.const 4) (i32.const 16)))
            (drop (call $proxy_increment_metric (i32.load (i32.const 16)) (i64.const 2)))
            (drop (call $proxy_define_metric (i32.const 2) (i32.const 1028) (i32.const 4) (i32.const 16)))
            (drop (call $proxy_record_metric (i32.load (i32.const 16)) (i64.const 5)))
            (i32.const 0))"
    );
    let plugin = built(&module(&text), json!({}));
    begun(&plugin);
    begun(&plugin);
    let values = [("hits", 4.0), ("took_sum", 10.0), ("took_count", 2.0)].map(|(name, value)| (name.to_owned(), value));
    assert_eq!(plugin.values(), values);
}

#[test]
fn a_plugin_may_refuse_its_settings() {
    let faults = build_of(&WasmKind::new(), SDK, json!({ "config": "wrong" })).err().unwrap();
    assert_eq!(faults[0].path, "file");
    assert!(faults[0].message.contains("proxy_on_configure returned false"), "{faults:?}");
}

#[test]
fn a_kit_that_has_no_settings_reads_none() {
    // AssemblyScript's kit passes the size of the settings in place of the address of the size.
    let text = r#"(func (export "proxy_on_configure") (param $root i32) (param $size i32) (result i32)
        (i32.store (i32.const 0) (i32.const 77))
        (drop (call $proxy_get_buffer_bytes
            (i32.const 7) (i32.const 0) (local.get $size) (i32.const 16) (local.get $size)))
        (i32.and
            (i32.ne (i32.load (i32.const 16)) (i32.const 0))
            (i32.eq (i32.load (i32.const 0)) (i32.const 77))))"#;
    built(&module(text), json!({}));
}

#[test]
fn a_module_can_be_pinned() {
    let sum: String = Sha256::digest(SDK).iter().map(|byte| format!("{byte:02X}")).collect();
    built(SDK, json!({ "sha256": sum }));
    let faults = build_of(&WasmKind::new(), SDK, json!({ "sha256": "00" })).err().unwrap();
    assert_eq!(faults[0].path, "sha256");
    assert!(faults[0].message.contains(&sum.to_lowercase()), "{faults:?}");
}

#[test]
fn settings_are_checked() {
    let settings = json!({ "fuel": 1, "instances": 0, "answer": "all", "upstreams": { "a": "ftp://x" }, "more": 1 });
    let faults = build_of(&WasmKind::new(), SDK, settings).err().unwrap();
    let mut paths: Vec<_> = faults.iter().map(|fault| fault.path.as_str()).collect();
    paths.sort_unstable();
    assert_eq!(paths, ["answer", "fuel", "instances", "more", "upstreams.a"]);
    let files = Files(HashMap::new());
    let missing = Settings::read(Some(&json!({ "file": "x" })), &files, |settings| WasmKind::new().build(settings));
    assert_eq!(missing.err().unwrap()[0].message, "x: no such file");
}

#[test]
fn what_is_shown_follows_exports_and_settings() {
    let check = |code: &str, settings: Value, needs: Needs, sees: Sees| {
        let plugin = built(&module(code), settings);
        let mut hooks = plugin.begin();
        assert_eq!(hooks.sees(), Sees::Nothing);
        now(hooks.on_request(&mut chat("hi", Arc::new(FakeHost::default())))).unwrap();
        assert_eq!((plugin.needs(), hooks.sees()), (needs, sees));
    };
    let body = "(func (export \"proxy_on_request_body\") (param i32 i32 i32) (result i32) (i32.const 0))
        (func (export \"proxy_on_response_headers\") (param i32 i32 i32) (result i32) (i32.const 0))
        (func (export \"proxy_on_response_body\") (param i32 i32 i32) (result i32) (i32.const 0))";
    check("", json!({}), Needs::Facts, Sees::End);
    check(body, json!({}), Needs::Body, Sees::Bytes);
    check(body, json!({ "request_body": false, "answer": "headers" }), Needs::Facts, Sees::Head);
    check(body, json!({ "answer": "none" }), Needs::Body, Sees::End);
}

/// Host whose clock is moved only by waiting.
struct Clockwork {
    now: Mutex<Duration>,
    inner: FakeHost,
}

#[async_trait]
impl Host for Clockwork {
    async fn chat(&self, request: ChatRequest, ask_as: AskAs) -> Result<ModelAnswer, HostError> {
        self.inner.chat(request, ask_as).await
    }

    async fn embed(&self, model: &str, texts: Vec<String>, ask_as: AskAs) -> Result<Vec<Vec<f32>>, HostError> {
        self.inner.embed(model, texts, ask_as).await
    }

    async fn operation(&self, path: &str, model: &str, body: Bytes, ask_as: AskAs) -> Result<HttpAnswer, HostError> {
        self.inner.operation(path, model, body, ask_as).await
    }

    async fn http(&self, endpoint: &Endpoint, ask: HttpAsk) -> Result<HttpAnswer, HostError> {
        self.inner.http(endpoint, ask).await
    }

    async fn cache_get(&self, key: &str) -> Result<Option<Bytes>, HostError> {
        self.inner.cache_get(key).await
    }

    async fn cache_put(&self, key: &str, value: Bytes, keep: Duration) -> Result<(), HostError> {
        self.inner.cache_put(key, value, keep).await
    }

    fn append(&self, path: &str, _: Vec<u8>) {
        panic!("no plugin here writes to {path}");
    }

    fn sleep(&self, time: Duration) -> BoxFuture<()> {
        *self.now.lock().unwrap() += time;
        Box::pin(async {})
    }

    fn spawn(&self, work: BoxFuture<()>) -> bool {
        self.inner.spawn(work)
    }

    fn since_epoch(&self) -> Duration {
        *self.now.lock().unwrap()
    }

    fn random(&self) -> u64 {
        7
    }
}

fn clockwork() -> Arc<Clockwork> {
    Arc::new(Clockwork { now: Mutex::new(Duration::from_secs(1_000)), inner: FakeHost::default() })
}

const PAUSE: &str = "(func (export \"proxy_on_request_headers\") (param i32 i32 i32) (result i32) (i32.const 1))";

#[track_caller]
fn failed(code: &str, settings: Value) -> String {
    let plugin = built(&module(code), settings);
    let failed = now(plugin.begin().on_request(&mut chat("hi", clockwork())));
    failed.expect_err("it fails").0
}

#[test]
fn a_pause_that_nothing_ends_is_an_error() {
    assert!(failed(PAUSE, json!({})).contains("nothing is under way"));
    let tick = format!(
        "{PAUSE} (func (export \"proxy_on_configure\") (param i32 i32) (result i32)
            (drop (call $proxy_set_tick_period_milliseconds (i32.const 10))) (i32.const 1))"
    );
    assert!(failed(&tick, json!({ "pause_ms_max": 500 })).contains("pause_ms_max"));
}

#[test]
fn who_pauses_at_the_headers_may_decide_at_the_body() {
    let text = format!(
        "{PAUSE} (func (export \"proxy_on_request_body\") (param i32 i32 i32) (result i32)
            (drop (call $proxy_add_header_map_value (i32.const 0) (i32.const 1024) (i32.const 1) (i32.const 1024) (i32.const 1)))
            (i32.const 0)) (data (i32.const 1024) \"x\")"
    );
    let mut context = chat("hi", Arc::new(FakeHost::default()));
    assert!(matches!(now(built(&module(&text), json!({})).begin().on_request(&mut context)), Ok(Verdict::Pass)));
    assert_eq!(context.headers["x"], "x");
}

#[test]
fn an_answer_of_the_plugins_own_is_one() {
    let text = "(data (i32.const 1024) \"{}\")
        (func (export \"proxy_on_request_headers\") (param i32 i32 i32) (result i32)
            (drop (call $proxy_send_local_response (i32.const 200) (i32.const 0) (i32.const 0) (i32.const 1024) (i32.const 2) (i32.const 0) (i32.const 0) (i32.const 0)))
            (i32.const 1))";
    let verdict =
        now(built(&module(text), json!({})).begin().on_request(&mut chat("hi", Arc::new(FakeHost::default()))));
    let Ok(Verdict::Answer(answer)) = verdict else { panic!("{verdict:?}") };
    assert_eq!(text_of(&answer.events), "{}");
}

/// Callback that holds pieces until there are six bytes; `x` in a piece breaks it.
const HOLD: &str = "(func (export \"proxy_on_response_body\") (param i32 $size i32) (param $end i32) (result i32)
    (if (i32.eq (i32.load8_u (i32.const 2000)) (i32.const 1)) (then unreachable))
    (i32.and (i32.lt_u (local.get $size) (i32.const 6)) (i32.eqz (local.get $end))))";

fn hold() -> Vec<u8> {
    module(&HOLD.replace("(param i32 $size i32)", "(param i32) (param $size i32)"))
}

fn begun(plugin: &Arc<dyn Plugin>) -> Box<dyn Hooks> {
    let mut hooks = plugin.begin();
    now(hooks.on_request(&mut chat("hi", Arc::new(FakeHost::default())))).unwrap();
    hooks
}

#[test]
fn an_answer_may_be_held_back() {
    let mut hooks = begun(&built(&hold(), json!({})));
    let mut events = vec![raw("abc")];
    assert!(matches!(hooks.on_event(&mut events, false), Ok(Flow::Go)));
    assert!(events.is_empty());
    let mut released = Vec::new();
    let mut events = vec![raw("def")];
    assert!(matches!(hooks.on_event(&mut events, false), Ok(Flow::Go)));
    assert_eq!(text_of(&events), "abcdef");
    hooks.release(&mut released);
    assert!(released.is_empty());
    let mut events = vec![raw("gh")];
    hooks.on_event(&mut events, false).unwrap();
    hooks.release(&mut released);
    assert_eq!((events.len(), text_of(&released).as_str()), (0, "gh"));
}

#[test]
fn what_is_held_back_has_a_bound() {
    let mut hooks = begun(&built(&hold(), json!({ "body_bytes_max": 4 })));
    hooks.on_event(&mut vec![raw("abc")], false).unwrap();
    let error = hooks.on_event(&mut vec![raw("de")], false).unwrap_err();
    assert!(error.0.contains("body_bytes_max"), "{error}");
    let mut released = Vec::new();
    hooks.release(&mut released);
    assert_eq!(text_of(&released), "abc");
}

/// Plugin that waits with each piece for a call; `answered` is the code for its answer.
fn waits_for_a_call(answered: &str) -> Vec<u8> {
    let text = r#"(data (i32.const 1024) "auth") (data (i32.const 1028) "!")
        (data (i32.const 1040) "\03\00\00\00\07\00\00\00\03\00\00\00\05\00\00\00\01\00\00\00\0a\00\00\00\01\00\00\00:method\00GET\00:path\00/\00:authority\00a\00")
        (func (export "proxy_on_response_body") (param i32 i32 i32) (result i32)
            (drop (call $proxy_http_call (i32.const 1024) (i32.const 4) (i32.const 1040) (i32.const 61) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 9) (i32.const 16)))
            (i32.const 1))
        (func (export "proxy_on_http_call_response") (param i32 i32 i32 i32 i32) ANSWERED)"#;
    module(&text.replace("ANSWERED", answered))
}

fn waiting(answered: &str) -> (Box<dyn Hooks>, Flow) {
    let plugin = built(&waits_for_a_call(answered), json!({ "upstreams": { "auth": "http://127.0.0.1:1" } }));
    let mut hooks = plugin.begin();
    let host = host_with(|_, _| http_answer(StatusCode::OK, "fine"));
    now(hooks.on_request(&mut chat("hi", host))).unwrap();
    let mut events = vec![raw("wait")];
    let flow = hooks.on_event(&mut events, false).unwrap();
    assert!(events.is_empty());
    (hooks, flow)
}

/// Callback at an answer's headers that runs `code`; with `body` the module is shown the body, too.
fn at_headers(code: &str, body: bool) -> Arc<dyn Plugin> {
    let text = format!(
        "(data (i32.const 1024) \"no\") (func (export \"proxy_on_response_headers\") (param i32 i32 i32) (result i32) {code})"
    );
    let more = "(func (export \"proxy_on_response_body\") (param i32 i32 i32) (result i32) (i32.const 0))";
    built(&module(&(text + if body { more } else { "" })), json!({}))
}

#[test]
fn an_answer_may_be_refused_at_its_headers() {
    let refuses = "(drop (call $proxy_send_local_response (i32.const 451)
        (i32.const 0) (i32.const 0) (i32.const 1024) (i32.const 2) (i32.const 0) (i32.const 0) (i32.const 0)))";
    for (code, status, body) in
        [(refuses, 451, Some("no")), ("(drop (call $proxy_close_stream (i32.const 1)))", 0, None)]
    {
        for (action, sees_body) in [(0, false), (1, false), (0, true), (1, true)] {
            let mut hooks = begun(&at_headers(&format!("{code} (i32.const {action})"), sees_body));
            assert_eq!(hooks.sees(), if sees_body { Sees::Bytes } else { Sees::Head });
            let refused = hooks.on_head(&mut AnswerHead::default()).unwrap().expect("a refusal");
            assert_eq!(refused.status.unwrap_or(0), status);
            assert_eq!(refused.body.as_deref(), body.map(str::as_bytes));
        }
        // The head went out before: the answer breaks at its first piece.
        let mut hooks = begun(&at_headers(&format!("{code} (i32.const 0)"), true));
        assert!(matches!(hooks.on_event(&mut vec![raw("a")], false), Ok(Flow::Reject(_))));
    }
}

#[test]
fn an_answer_waits_at_its_headers_only_for_who_is_shown_its_body() {
    let error = begun(&at_headers("(i32.const 1)", false)).on_head(&mut AnswerHead::default()).unwrap_err();
    assert!(error.0.contains("paused an answer at its headers"), "{error}");
    let mut hooks = begun(&at_headers("(i32.const 1)", true));
    assert_eq!(hooks.on_head(&mut AnswerHead::default()), Ok(None));
    let mut events = vec![raw("a")];
    assert!(matches!(hooks.on_event(&mut events, true), Ok(Flow::Go)));
    assert_eq!(text_of(&events), "a");
}

#[test]
fn calls_at_the_headers_begin_there() {
    let data = r#"(data (i32.const 1030) "auth")
        (data (i32.const 1040) "\03\00\00\00\07\00\00\00\03\00\00\00\05\00\00\00\01\00\00\00\0a\00\00\00\01\00\00\00:method\00GET\00:path\00/\00:authority\00a\00")"#;
    let call = "(drop (call $proxy_http_call (i32.const 1030) (i32.const 4) (i32.const 1040) (i32.const 61)
        (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 9) (i32.const 16)))";
    for end in ["(i32.const 0)", "(drop (call $proxy_close_stream (i32.const 1))) (i32.const 0)", "(i32.const 1)"] {
        let text = format!(
            "{data} (func (export \"proxy_on_response_headers\") (param i32 i32 i32) (result i32) {call} {end})"
        );
        let plugin = built(&module(&text), json!({ "upstreams": { "auth": "http://127.0.0.1:1" } }));
        let host = Arc::new(FakeHost::default());
        let mut hooks = plugin.begin();
        now(hooks.on_request(&mut chat("hi", host.clone()))).unwrap();
        // The third one fails: nobody would resume the answer.
        assert_eq!(hooks.on_head(&mut AnswerHead::default()).is_err(), end == "(i32.const 1)");
        assert_eq!(host.spawned.lock().unwrap().len(), 1, "{end}");
    }
}

const GO_ON: &str = "(drop (call $proxy_set_effective_context (i32.const 2)))
    (drop (call $proxy_set_buffer_bytes (i32.const 1) (i32.const -1) (i32.const 0) (i32.const 1028) (i32.const 1)))
    (drop (call $proxy_continue_stream (i32.const 1)))";

#[test]
fn an_answer_may_wait_for_a_call() {
    let (mut hooks, Flow::Wait(work)) = waiting(GO_ON) else { panic!("it waits") };
    let Ok(After::Go(events)) = now(work) else { panic!("it goes on") };
    assert_eq!(text_of(&events), "wait!");
    let mut events = vec![raw("more")];
    let Ok(Flow::Wait(work)) = hooks.on_event(&mut events, true) else { panic!("it waits") };
    let Ok(After::Go(events)) = now(work) else { panic!("it goes on") };
    assert_eq!(text_of(&events), "more!", "what went on is not said again");
}

#[test]
fn what_was_waited_for_in_vain_is_let_go() {
    let (mut hooks, Flow::Wait(work)) = waiting("unreachable") else { panic!("it waits") };
    assert!(now(work).is_err());
    let mut released = Vec::new();
    hooks.release(&mut released);
    assert_eq!(text_of(&released), "wait");
}

/// Callback that breaks when the request has the header `x`.
const BREAKS: &str = "(data (i32.const 1024) \"x\")
    (func (export \"proxy_on_request_headers\") (param i32 i32 i32) (result i32)
        (if (i32.eqz (call $proxy_get_header_map_value (i32.const 0) (i32.const 1024) (i32.const 1) (i32.const 16) (i32.const 20)))
            (then unreachable))
        (i32.const 0))
    (func (export \"proxy_on_response_body\") (param i32 i32 i32) (result i32) (i32.const 0))";

#[test]
fn a_broken_machine_goes_and_another_comes() {
    let kind = WasmKind::new();
    let plugin = build_of(&kind, &module(BREAKS), json!({ "instances": 1 })).unwrap();
    let mut bystander = begun(&plugin);
    assert_eq!(kind.runtime().unwrap().machines(), 1);
    let mut context = with_header(chat("hi", Arc::new(FakeHost::default())), "x", "1");
    let error = now(plugin.begin().on_request(&mut context)).unwrap_err();
    assert!(error.0.contains("unreachable"), "{error}");
    assert_eq!(kind.runtime().unwrap().machines(), 0, "its memory is free at once");
    // The request in the broken machine gets an error, and loses no text.
    let mut events = vec![raw("abc")];
    assert!(bystander.on_event(&mut events, false).unwrap_err().0.contains("has broken"));
    assert_eq!(text_of(&events), "abc");
    begun(&plugin);
    assert_eq!(kind.runtime().unwrap().machines(), 1);
}

#[test]
fn a_plugin_that_breaks_again_and_again_is_left_alone_for_a_while() {
    let plugin = built(&module(BREAKS), json!({}));
    let host = clockwork();
    let attempt = || {
        let mut context = with_header(chat("hi", host.clone()), "x", "1");
        now(plugin.begin().on_request(&mut context)).unwrap_err().0
    };
    let errors: Vec<_> = (0..110).map(|_| attempt()).collect();
    assert_eq!(errors.iter().filter(|error| error.contains("unreachable")).count(), 100);
    assert!(errors[109].contains("broke so often"), "{}", errors[109]);
    *host.now.lock().unwrap() += Duration::from_secs(11);
    assert!(attempt().contains("unreachable"));
}

#[test]
fn requests_spread_over_instances_up_to_their_bound() {
    let kind = WasmKind::new();
    let plugin = build_of(&kind, &module(""), json!({ "instances": 2, "streams_max": 3 })).unwrap();
    let mut seated: Vec<_> = (0..6).map(|_| begun(&plugin)).collect();
    assert_eq!(kind.runtime().unwrap().machines(), 2);
    let error = now(plugin.begin().on_request(&mut chat("hi", Arc::new(FakeHost::default())))).unwrap_err();
    assert!(error.0.contains("streams_max"), "{error}");
    seated.pop();
    begun(&plugin);
}

#[test]
fn a_request_that_is_dropped_leaves_its_place() {
    let plugin = built(&module(""), json!({ "instances": 1, "streams_max": 1 }));
    for _ in 0..5 {
        drop(begun(&plugin));
    }
    let mut hooks = begun(&plugin);
    hooks.on_end(&facts());
    begun(&plugin);
}

#[test]
fn shared_data_survives_a_swap_and_not_the_last_plugin() {
    let kind = WasmKind::new();
    let build = || build_of(&kind, SDK, json!({})).unwrap();
    let answers = |plugin: &Arc<dyn Plugin>| {
        let mut hooks = begun(plugin);
        let mut head = AnswerHead::default();
        hooks.on_head(&mut head).unwrap();
        head.headers.into_iter().map(|(_, value)| value).collect::<Vec<_>>()
    };
    let old = build();
    assert_eq!(answers(&old), ["1"]);
    let new = build();
    drop(old);
    assert_eq!(answers(&new), ["2"]);
    drop(new);
    assert_eq!(answers(&build()), ["1"]);
}

#[test]
fn a_config_that_is_only_checked_leaves_the_live_state_alone() {
    let counts = |result: &str| {
        let text = r#"(data (i32.const 1024) "starts")
            (func (export "proxy_on_configure") (param i32 i32) (result i32)
                (drop (call $proxy_define_metric (i32.const 0) (i32.const 1024) (i32.const 6) (i32.const 16)))
                (drop (call $proxy_increment_metric (i32.load (i32.const 16)) (i64.const 1)))
                (drop (call $proxy_set_shared_data (i32.const 1024) (i32.const 6) (i32.const 1024) (i32.const 6) (i32.const 0)))
                (drop (call $proxy_register_shared_queue (i32.const 1024) (i32.const 6) (i32.const 16)))
                (drop (call $proxy_enqueue_shared_queue (i32.load (i32.const 16)) (i32.const 1024) (i32.const 6)))
                RESULT)"#;
        module(&text.replace("RESULT", result))
    };
    // The queue and the data of the `vm_id`, as another plugin finds them.
    let looks = module(
        r#"(data (i32.const 1024) "starts") (data (i32.const 1040) "queues") (data (i32.const 1048) "data")
        (func $count (param $name i32) (param $size i32) (param $found i32)
            (drop (call $proxy_define_metric (i32.const 1) (local.get $name) (local.get $size) (i32.const 16)))
            (drop (call $proxy_record_metric (i32.load (i32.const 16)) (i64.extend_i32_u (i32.eqz (local.get $found))))))
        (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
            (call $count (i32.const 1040) (i32.const 6)
                (call $proxy_resolve_shared_queue (i32.const 0) (i32.const 0) (i32.const 1024) (i32.const 6) (i32.const 20)))
            (call $count (i32.const 1048) (i32.const 4)
                (call $proxy_get_shared_data (i32.const 1024) (i32.const 6) (i32.const 20) (i32.const 24) (i32.const 28)))
            (i32.const 0))"#,
    );
    let kind = WasmKind::new();
    let build = |module: &[u8]| build_of(&kind, module, json!({}));
    let state = |plugin: &Arc<dyn Plugin>| {
        begun(plugin);
        let values = plugin.values();
        let of = |name: &str| values.iter().find(|(have, _)| have == name).map(|(_, value)| *value);
        [of("starts"), of("queues"), of("data")]
    };
    let looks = build(&looks).unwrap();
    let live = build(&counts("(i32.const 1)")).unwrap();
    assert_eq!(state(&looks), [None, Some(0.0), Some(0.0)], "nothing has run but the trial");
    begun(&live);
    assert_eq!(state(&looks), [Some(1.0), Some(1.0), Some(1.0)]);
    build(&counts("(i32.const 1)")).unwrap();
    assert!(build(&counts("(i32.const 0)")).is_err());
    assert!(build(&counts("unreachable")).is_err());
    assert_eq!(state(&looks), [Some(1.0), Some(1.0), Some(1.0)]);
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn fifty_swaps_free_what_they_replace() {
    let kind = WasmKind::new();
    let runtime = kind.runtime().unwrap();
    let mut resident = Vec::new();
    for swap in 0..50 {
        let plugin = build_of(&kind, SDK, json!({ "config": swap.to_string() })).unwrap();
        let mut hooks = begun(&plugin);
        drop(plugin);
        // The entry is gone; a stream that began with it goes on in its machine.
        assert_eq!(runtime.machines(), 1, "swap {swap}");
        let mut events = vec![raw("hello")];
        hooks.on_event(&mut events, true).unwrap();
        assert_eq!(text_of(&events), "HELLO");
        hooks.on_end(&facts());
        drop(hooks);
        assert_eq!(runtime.machines(), 0, "swap {swap}");
        resident.push(resident_kib());
    }
    let (early, late) = (resident[9], resident[49]);
    println!("resident after 10 swaps {early} KiB, after 50 {late} KiB");
    // One compiled module has some hundred KiB: 40 modules that stayed would be far above.
    assert!(late < early + 4096, "{resident:?}");
}

#[test]
fn a_module_is_told_from_another() {
    let (one, other) = (sdk(), built(&module(""), json!({})));
    assert_ne!(one.revision(), other.revision());
    assert_eq!(one.revision(), sdk().revision());
}

#[test]
fn headers_of_the_connection_stay_the_gateways() {
    let text = r#"(data (i32.const 1024) "content-length9x-new")
        (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
            (drop (call $proxy_replace_header_map_value (i32.const 0) (i32.const 1024) (i32.const 14) (i32.const 1038) (i32.const 1)))
            (drop (call $proxy_add_header_map_value (i32.const 0) (i32.const 1039) (i32.const 5) (i32.const 1038) (i32.const 1)))
            (i32.const 0))"#;
    let mut context = with_header(chat("hi", Arc::new(FakeHost::default())), "content-length", "5");
    context.headers.insert("x-old", HeaderValue::from_static("1"));
    now(built(&module(text), json!({})).begin().on_request(&mut context)).unwrap();
    let expected: HeaderMap = [("content-length", "5"), ("x-old", "1"), ("x-new", "9")]
        .into_iter()
        .map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), HeaderValue::from_static(value)))
        .collect();
    assert_eq!(context.headers, expected);
    // Providers are sent what the plugin has added, and nothing else of the client's.
    assert_eq!(context.send, [("x-new".parse().unwrap(), HeaderValue::from_static("9"))]);
}
