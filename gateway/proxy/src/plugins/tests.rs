//! Tests of both sides, with scripted plugins.

use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::HeaderMap;
use penstock_plugins::{
    After, Answer, AnswerHead, EndFacts, Flow, Hooks, Needs, Plugin, PluginError, Rejection, RejectionKind,
    RequestContext, Sees, Verdict,
};
use penstock_types::{ChatEvent, FinishReason, Surface, TokenLogprob, TokenPlace, Usage};
use proptest::prelude::*;

use super::chain::Chain;
use super::{Asked, Hub, Shell};
use penstock_base::error::Failure;
use penstock_config::{OnFail, Overrides, PluginConfig, load};
use penstock_http::{Body, BodyBudget, HttpLimits};
use penstock_types::ask::Ask;
use penstock_upstream::answer_memory::{AnswerBudget, AnswerMemory};
use penstock_upstream::call::Call;
use penstock_upstream::{Course, Events, Facts};

/// Scripted plugin and its notes.
#[derive(Clone)]
struct Script {
    sees: Sees,
    request: fn(&mut RequestContext) -> Result<Verdict, PluginError>,
    head: fn(&mut AnswerHead) -> Result<Option<Rejection>, PluginError>,
    event: fn(&mut Vec<ChatEvent>, bool) -> Result<Flow, PluginError>,
    never: bool,
    log: Arc<Mutex<Vec<String>>>,
    name: &'static str,
}

impl Script {
    fn new(name: &'static str, sees: Sees, log: &Arc<Mutex<Vec<String>>>) -> Self {
        let (log, never) = (log.clone(), false);
        Self { sees, request: |_| Ok(Verdict::Pass), head: |_| Ok(None), event: |_, _| Ok(Flow::Go), never, log, name }
    }

    fn note(&self, what: &str) {
        self.log.lock().expect("a test").push(format!("{} {what}", self.name));
    }
}

impl Plugin for Script {
    fn needs(&self) -> Needs {
        Needs::Request
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(self.clone())
    }
}

#[async_trait]
impl Hooks for Script {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        self.note("request");
        if self.never {
            std::future::pending::<()>().await;
        }
        (self.request)(request)
    }

    fn sees(&self) -> Sees {
        self.sees
    }

    fn on_head(&mut self, head: &mut AnswerHead) -> Result<Option<Rejection>, PluginError> {
        (self.head)(head)
    }

    fn on_event(&mut self, events: &mut Vec<ChatEvent>, end: bool) -> Result<Flow, PluginError> {
        self.note(&format!("event {}{}", said(events), if end { " end" } else { "" }));
        (self.event)(events, end)
    }

    fn on_end(&mut self, facts: &EndFacts) {
        self.note(&format!("end {}", facts.outcome.name()));
    }
}

fn entry(script: &Script, on_fail: OnFail) -> PluginConfig {
    entry_of(script.name, Arc::new(script.clone()), on_fail)
}

pub(super) fn entry_of(id: &str, plugin: Arc<dyn Plugin>, on_fail: OnFail) -> PluginConfig {
    PluginConfig {
        id: id.into(),
        name: "script".into(),
        routes: Vec::new(),
        models: Vec::new(),
        keys: Vec::new(),
        teams: Vec::new(),
        on_fail,
        timeout: Duration::from_millis(50),
        settings: None,
        plugin,
    }
}

pub(super) fn chain(entries: Vec<PluginConfig>) -> Chain {
    let mut config = load(None, &Overrides::default(), &|_| None).expect("the default");
    config.plugins = entries;
    Chain::new(&config, &Arc::default(), &Arc::new(Hub::default()), None)
}

pub(super) async fn call(stream: bool) -> Call {
    let text = format!(r#"{{"model":"m","stream":{stream},"messages":[{{"role":"user","content":"hi"}}]}}"#);
    let lease = BodyBudget::new(1 << 20, 1 << 20).lease();
    let body = Body { bytes: text.into(), lease };
    Call::new(Ask::new(Surface::Chat), body, "req_1".into(), HeaderMap::new(), penstock_dialects::decode)
        .await
        .expect("a call")
}

/// Events as text: texts as they are, finishes as `.`, bytes in quotes.
fn said(events: &[ChatEvent]) -> String {
    let mut out = String::new();
    for event in events {
        match event {
            ChatEvent::Text { text, .. } => out.push_str(text),
            ChatEvent::Finish { .. } => out.push('.'),
            ChatEvent::Raw(bytes) => out.push_str(&format!("<{}>", String::from_utf8_lossy(bytes).trim())),
            ChatEvent::Usage(_) => out.push('#'),
            _ => out.push('?'),
        }
    }
    out
}

fn text(text: &str) -> ChatEvent {
    ChatEvent::Text { choice: 0, text: text.into(), logprobs: Vec::new(), tokens: Vec::new() }
}

fn finish() -> ChatEvent {
    ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop: None }
}

/// Batches, one per poll; then the end, or a failure.
struct Batches(Vec<Vec<ChatEvent>>, bool);

impl Events for Batches {
    fn poll_events(&mut self, _: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        if self.0.is_empty() && self.1 {
            return Poll::Ready(Err(Failure::internal("broken")));
        }
        out.extend(if self.0.is_empty() { Vec::new() } else { self.0.remove(0) });
        Poll::Ready(Ok(!self.0.is_empty() || self.1))
    }

    fn facts(&self) -> Facts {
        Facts { prompt_tokens: 3, completion_tokens: 2, ..Facts::default() }
    }
}

async fn drained(events: &mut dyn Events) -> (String, Result<(), Failure>) {
    let (mut out, mut batch) = (String::new(), Vec::new());
    loop {
        let more = poll_fn(|context| events.poll_events(context, &mut batch)).await;
        out.push_str(&said(&batch));
        batch.clear();
        match more {
            Ok(true) => {}
            Ok(false) => return (out, Ok(())),
            Err(failure) => return (out, Err(failure)),
        }
    }
}

async fn answered(entries: Vec<PluginConfig>, stream: bool, batches: Batches) -> (String, Result<(), Failure>) {
    let (mut call, hold) = (call(stream).await, AnswerMemory::default().hold());
    let Asked { shell, answer } = match chain(entries).ask(&Arc::default(), &mut call).await {
        Ok(asked) => asked,
        Err(failure) => return (String::new(), Err(failure)),
    };
    let mut events: Box<dyn Events> = match (shell, answer) {
        (shell, Some(answer)) => Shell::around_answer(shell, &call, answer, hold).expect("wraps"),
        (Some(shell), None) => shell.around(&call, Box::new(batches), hold).expect("wraps"),
        (None, None) => Box::new(batches),
    };
    drained(events.as_mut()).await
}

fn hello() -> Batches {
    Batches(vec![vec![text("a")], vec![text("b"), finish()]], false)
}

#[tokio::test]
async fn plugins_are_shells() {
    let log = Arc::default();
    let mut inner = Script::new("inner", Sees::Events, &log);
    inner.event = |events, _| {
        events.iter_mut().for_each(|event| {
            if let ChatEvent::Text { text, .. } = event {
                text.push('1');
            }
        });
        Ok(Flow::Go)
    };
    let entries = vec![entry(&Script::new("outer", Sees::Events, &log), OnFail::Closed), entry(&inner, OnFail::Closed)];
    let (out, ended) = answered(entries, true, hello()).await;
    assert!(ended.is_ok());
    assert_eq!(out, "a1b1.");
    let expected = [
        "outer request",
        "inner request",
        "inner event a",
        "outer event a1",
        "inner event b. end",
        "outer event b1. end",
        "inner end complete",
        "outer end complete",
    ];
    assert_eq!(*log.lock().expect("a test"), expected);
}

#[tokio::test]
async fn who_wants_nothing_of_an_answer_costs_it_nothing() {
    let log = Arc::default();
    let entries = || vec![entry(&Script::new("a", Sees::Nothing, &log), OnFail::Closed)];
    let asked = chain(entries()).ask(&Arc::default(), &mut call(true).await).await.expect("passes");
    assert!(asked.shell.is_none(), "the upstream's own events are used");
    let mut call = call(true).await;
    let asked = chain(Vec::new()).ask(&Arc::default(), &mut call).await.expect("passes");
    assert!(asked.shell.is_none() && call.decoded_before().is_none());
}

#[test]
fn a_plugin_that_stays_keeps_what_it_has_gathered() {
    let log = Arc::default();
    let (kept, changed) = (Script::new("kept", Sees::Nothing, &log), Script::new("changed", Sees::Nothing, &log));
    let mut config = load(None, &Overrides::default(), &|_| None).expect("the default");
    config.plugins = vec![entry(&kept, OnFail::Closed), entry(&changed, OnFail::Closed)];
    let (metrics, hub) = (Arc::default(), Arc::new(Hub::default()));
    let before = Chain::new(&config, &metrics, &hub, None);
    config.plugins = vec![entry(&kept, OnFail::Open), entry(&changed, OnFail::Closed)];
    config.plugins[1].settings = Some(serde_json::json!({ "x": 1 }));
    let after = Chain::new(&config, &metrics, &hub, Some(&before));
    assert!(Arc::ptr_eq(&before.links[0].entry.plugin, &after.links[0].entry.plugin));
    assert_eq!(after.links[0].entry.on_fail, OnFail::Open, "but the rules around it are the new ones");
    assert!(!Arc::ptr_eq(&before.links[1].entry.plugin, &after.links[1].entry.plugin));
    let gone = Arc::downgrade(&before.links[1].entry.plugin);
    drop(before);
    assert_eq!(gone.strong_count(), 0, "nothing holds the old one");
}

#[tokio::test]
async fn bytes_are_read_for_who_sees_events_and_only_then() {
    let chunks = [
        r#"data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"hel"}}]}"#,
        r#"data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"lo"},"finish_reason":"stop"}]}"#,
        "data: [DONE]",
    ];
    let raw = || Batches(chunks.iter().map(|line| vec![ChatEvent::Raw(format!("{line}\n\n").into())]).collect(), false);
    let log = Arc::default();
    let (out, ended) = answered(vec![entry(&Script::new("a", Sees::Events, &log), OnFail::Closed)], true, raw()).await;
    assert!(ended.is_ok(), "{ended:?}");
    assert_eq!(out, "hello.#", "and the counts, which the client was not to see");
    let (out, _) = answered(vec![entry(&Script::new("a", Sees::Head, &log), OnFail::Closed)], true, raw()).await;
    assert!(out.starts_with("<data:") && out.ends_with("[DONE]>"), "{out}");
}

#[tokio::test]
async fn events_are_said_as_bytes_for_who_sees_bytes() {
    let log = Arc::default();
    let script = Script::new("a", Sees::Bytes, &log);
    let (out, ended) = answered(vec![entry(&script, OnFail::Closed)], true, hello()).await;
    assert!(ended.is_ok() && out.contains(r#""content":"a""#) && out.ends_with("[DONE]>"), "{out}");
    let (out, ended) = answered(vec![entry(&script, OnFail::Closed)], false, hello()).await;
    assert!(ended.is_ok() && out.contains(r#""content":"ab""#) && out.matches('<').count() == 1, "{out}");
    // Behind it somebody wants events again.
    let outer = Script::new("outer", Sees::Events, &log);
    let entries = vec![entry(&outer, OnFail::Closed), entry(&script, OnFail::Closed)];
    let (out, ended) = answered(entries, true, hello()).await;
    assert!(ended.is_ok(), "{ended:?}");
    assert_eq!(out, "ab.#");
    // An upstream that ends too soon is not passed off as complete.
    let cut = Batches(vec![vec![text("a")]], false);
    assert!(answered(vec![entry(&script, OnFail::Closed)], true, cut).await.1.is_err());
}

#[tokio::test]
async fn a_plugin_may_answer_and_those_before_it_see_that() {
    let log = Arc::default();
    let mut cache = Script::new("cache", Sees::Events, &log);
    cache.request = |_| Ok(Verdict::Answer(Answer { events: vec![text("kept"), finish()], headers: Vec::new() }));
    let entries = vec![
        entry(&Script::new("before", Sees::Events, &log), OnFail::Closed),
        entry(&cache, OnFail::Closed),
        entry(&Script::new("behind", Sees::Events, &log), OnFail::Closed),
    ];
    let (out, ended) = answered(entries, false, hello()).await;
    assert!(ended.is_ok());
    assert_eq!(out, "kept.");
    let expected =
        ["before request", "cache request", "before event kept. end", "cache end answered", "before end answered"];
    assert_eq!(*log.lock().expect("a test"), expected);
}

#[tokio::test]
async fn a_refusal_is_the_clients_to_read() {
    let log = Arc::default();
    let mut guard = Script::new("guard", Sees::Events, &log);
    guard.request = |_| Ok(Verdict::Reject(Rejection::new(RejectionKind::Content, "Not here.").status(451)));
    let (_, ended) = answered(vec![entry(&guard, OnFail::Open)], true, hello()).await;
    let failure = ended.expect_err("refused");
    assert_eq!((failure.status(), &*failure.message, failure.source()), (451, "Not here.", "gateway"));
    assert_eq!(*log.lock().expect("a test"), ["guard request", "guard end rejected"]);
    let mut late = Script::new("late", Sees::Events, &log);
    late.event = |events, _| {
        Ok(if said(events).contains('b') {
            events.truncate(1);
            Flow::Reject(Rejection::new(RejectionKind::Content, "No."))
        } else {
            Flow::Go
        })
    };
    let (out, ended) = answered(vec![entry(&late, OnFail::Open)], true, hello()).await;
    assert_eq!((out.as_str(), ended.expect_err("breaks").status()), ("ab", 400), "behind what it left");
}

/// Answer of a hostile upstream: choices that do not end, each token with long text and all log-probabilities.
struct Endless {
    choices: u32,
    tokens: Arc<AtomicUsize>,
    course: Course,
}

/// Bytes of the text of each token of [`Endless`].
const TOKEN_BYTES: usize = 1000;

impl Events for Endless {
    fn poll_events(&mut self, _: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        let top = vec![(7, b"abc".to_vec(), -1.0); 20];
        let logprob =
            TokenLogprob { token: 7, bytes: b"abc".to_vec(), logprob: Some(-1.0), top, place: TokenPlace::Text };
        let said = |choice| {
            let (text, logprobs) = ("a".repeat(TOKEN_BYTES), vec![logprob.clone()]);
            ChatEvent::Text { choice, text, logprobs, tokens: Vec::new() }
        };
        out.extend((0..self.choices).map(said));
        Poll::Ready(Ok(self.tokens.fetch_add(self.choices as usize, Ordering::Relaxed) < 20_000))
    }

    fn facts(&self) -> Facts {
        Facts::default()
    }

    fn course(&self) -> Course {
        self.course.clone()
    }
}

/// Checks that what these plugins hold of an endless answer of this course stays within the memory for answers; returns the
/// failure.
async fn check_held(entries: Vec<PluginConfig>, stream: bool, choices: u32, course: Course) -> Failure {
    const MAX: usize = 2 << 20;
    let id = entries[0].id.to_string();
    let budget = AnswerBudget::new(MAX);
    let memory = AnswerMemory::new(&budget, "key", &HttpLimits::default());
    let mut call = call(stream).await;
    let asked = chain(entries).ask(&Arc::default(), &mut call).await.expect("passes");
    let tokens = Arc::default();
    let upstream = Box::new(Endless { choices, tokens: Arc::clone(&tokens), course });
    let mut events = asked.shell.expect("wanted").around(&call, upstream, memory.hold()).expect("wraps");
    let (mut batch, mut most) = (Vec::new(), 0);
    let failure = loop {
        match poll_fn(|context| events.poll_events(context, &mut batch)).await {
            Ok(true) => batch.clear(),
            Ok(false) => panic!("{id} held all of it"),
            Err(failure) => break failure,
        }
        most = most.max(budget.bytes_held());
    };
    assert_eq!(failure.status(), 503, "{id}: {failure:?}");
    let held = tokens.load(Ordering::Relaxed) * TOKEN_BYTES;
    assert!(held < MAX + 64 * TOKEN_BYTES && most <= MAX, "{id}: {held} bytes held, {most} charged");
    drop(events);
    assert_eq!(budget.bytes_held(), 0, "{id}");
    failure
}

#[tokio::test]
async fn what_is_held_back_is_charged_to_the_memory_for_answers() {
    for settings in [
        "name = \"guard\"\nsettings = { rules = [{ pattern = \"b+c\", on = \"answer\" }] }",
        "name = \"moderation\"\nsettings = { model = \"judge\", on = \"answer\" }",
        "name = \"http_hook\"\nsettings = { url = \"http://127.0.0.1:1/\", requests = false, answers = \"hold\" }",
    ] {
        let text = format!("[[plugins]]\n{settings}\n");
        let config = load(Some(("test.toml", &text)), &Overrides::default(), &|_| None).expect("valid");
        check_held(config.plugins, true, 16, Course::default()).await;
    }
    // A whole answer is collected for who sees its bytes.
    let bytes = || vec![entry(&Script::new("bytes", Sees::Bytes, &Arc::default()), OnFail::Closed)];
    // A provider bills the answer again, a pool of ours does not.
    let target = Some("one/m".into());
    let providers = Course { target: target.clone(), ..Course::default() };
    let pools = Course { target, worker: Some("w".into()), ..Course::default() };
    for (course, again) in [(providers, false), (pools, true)] {
        let failure = check_held(bytes(), false, 1, course).await;
        let told = (failure.is_unheld(), failure.should_retry(), failure.retry_after.is_some());
        assert_eq!(told, (!again, again, again), "{failure:?}");
    }
}

#[tokio::test]
async fn an_answer_may_be_refused_at_its_head() {
    let refuses = |_: &mut AnswerHead| Ok(Some(Rejection::new(RejectionKind::Content, "No.").status(451)));
    for sees in [Sees::Head, Sees::Events, Sees::Bytes] {
        let log = Arc::default();
        let mut script = Script::new("a", sees, &log);
        script.head = refuses;
        let outer = Script::new("outer", Sees::Events, &log);
        for entries in
            [vec![entry(&script, OnFail::Open)], vec![entry(&outer, OnFail::Open), entry(&script, OnFail::Open)]]
        {
            let (out, ended) = answered(entries, true, hello()).await;
            assert_eq!((out.as_str(), ended.expect_err("refused").status()), ("", 451), "{sees:?}");
            assert!(log.lock().expect("a test").iter().any(|line| line == "a end rejected"));
            assert!(!log.lock().expect("a test").iter().any(|line| line.contains("event")), "nobody is shown more");
        }
    }
    // A failure there is not a refusal.
    let log = Arc::default();
    let mut script = Script::new("a", Sees::Head, &log);
    script.head = |_| Err(PluginError::new("broken"));
    assert_eq!(answered(vec![entry(&script, OnFail::Open)], true, hello()).await.0, "ab.");
    let (out, ended) = answered(vec![entry(&script, OnFail::Closed)], true, hello()).await;
    assert_eq!((out.as_str(), ended.expect_err("closed").status()), ("", 500));
}

#[tokio::test]
async fn an_answer_may_wait_and_stop() {
    let log = Arc::default();
    let mut asks = Script::new("asks", Sees::Events, &log);
    asks.event = |events, _| {
        let held = std::mem::take(events);
        Ok(Flow::Wait(Box::pin(async move {
            tokio::task::yield_now().await;
            Ok(After::Go(held.into_iter().chain([text("!")]).collect()))
        })))
    };
    let (out, ended) = answered(vec![entry(&asks, OnFail::Closed)], true, hello()).await;
    assert!(ended.is_ok());
    assert_eq!(out, "a!b.!");
    let mut stops = Script::new("stops", Sees::Events, &log);
    stops.event = |_, _| Ok(Flow::Stop(FinishReason::ContentFilter));
    let (out, ended) = answered(vec![entry(&stops, OnFail::Closed)], true, hello()).await;
    assert!(ended.is_ok());
    assert_eq!(out, "a.#");
    let mut never = Script::new("never", Sees::Events, &log);
    never.event = |_, _| Ok(Flow::Wait(Box::pin(std::future::pending())));
    // Outer plugins have not looked at the text that it let pass meanwhile.
    let outer = Script::new("outer", Sees::Events, &log);
    let (out, ended) =
        answered(vec![entry(&outer, OnFail::Closed), entry(&never, OnFail::Closed)], true, hello()).await;
    assert_eq!((out.as_str(), ended.is_err()), ("", true));
}

/// Checks a plugin that fails in every way, at every hook.
async fn check_failure(fail: fn(&mut Script)) {
    let log = Arc::default();
    let mut script = Script::new("bad", Sees::Events, &log);
    fail(&mut script);
    let (out, ended) = answered(vec![entry(&script, OnFail::Open)], true, hello()).await;
    assert!(ended.is_ok(), "{ended:?}");
    assert_eq!(out, "ab.", "it goes on without the plugin, and nothing is lost");
    let (out, ended) = answered(vec![entry(&script, OnFail::Closed)], true, hello()).await;
    assert_eq!(out, "", "what it has not looked at is not said");
    let failure = ended.expect_err("closed");
    assert_eq!((failure.status(), failure.source()), (500, "gateway"));
    assert!(failure.message.contains("\"bad\"") && !failure.message.contains("secret"), "{}", failure.message);
}

#[tokio::test]
async fn failures_are_the_plugins_own() {
    check_failure(|script| script.request = |_| Err(PluginError::new("secret"))).await;
    check_failure(|script| script.request = |_| panic!("secret")).await;
    check_failure(|script| script.never = true).await;
    check_failure(|script| script.event = |_, _| Err(PluginError::new("secret"))).await;
    check_failure(|script| {
        script.event = |events, _| {
            events.clear();
            panic!("secret")
        }
    })
    .await;
}

#[tokio::test]
async fn everybody_learns_of_the_end() {
    let log: Arc<Mutex<Vec<String>>> = Arc::default();
    let last = |log: &Arc<Mutex<Vec<String>>>| log.lock().expect("a test").last().cloned().unwrap_or_default();
    let entries = || vec![entry(&Script::new("a", Sees::End, &log), OnFail::Closed)];
    let (_, ended) = answered(entries(), true, Batches(vec![vec![text("a")]], true)).await;
    assert!(ended.is_err());
    assert_eq!(last(&log), "a end failed");
    let mut call = call(true).await;
    let asked = chain(entries()).ask(&Arc::default(), &mut call).await.expect("passes");
    let events =
        asked.shell.expect("wanted").around(&call, Box::new(hello()), AnswerMemory::default().hold()).expect("wraps");
    drop(events);
    assert_eq!(last(&log), "a end gone");
    let asked = chain(entries()).ask(&Arc::default(), &mut call).await.expect("passes");
    drop(asked);
    assert_eq!(last(&log), "a end gone");
    assert_eq!(log.lock().expect("a test").len(), 6, "once each");
}

#[tokio::test]
async fn an_edited_request_is_what_is_asked() {
    let log = Arc::default();
    let mut edits = Script::new("edits", Sees::Nothing, &log);
    edits.request = |context| {
        penstock_plugins::text::change(context.edit()?, &mut |_, _, text| text.push_str(" there"));
        context.tags.push(("team".into(), "a".into()));
        Ok(Verdict::Pass)
    };
    let mut routes = Script::new("routes", Sees::Nothing, &log);
    routes.request = |context| {
        let mut seen = String::new();
        penstock_plugins::text::each(context.request()?, &mut |_, text| seen.push_str(text));
        context.model = format!("for {seen}");
        Ok(Verdict::Pass)
    };
    let entries = vec![entry(&edits, OnFail::Closed), entry(&routes, OnFail::Closed)];
    let mut call = call(true).await;
    chain(entries).ask(&Arc::default(), &mut call).await.expect("passes");
    assert_eq!(call.model, "for hi there");
    assert_eq!(call.asked_for.as_deref(), Some("m"));
    assert!(call.own);
    assert_eq!(call.tags, [("team".to_owned(), "a".to_owned())]);
    let decoded = call.decoded().await.expect("read");
    let mut seen = String::new();
    penstock_plugins::text::each(&decoded.request, &mut |_, text| seen.push_str(text));
    assert_eq!(seen, "hi there");
}

#[tokio::test]
async fn another_body_is_passed_on_and_read() {
    let log = Arc::default();
    let mut sets = Script::new("sets", Sees::Events, &log);
    sets.request = |context| {
        context
            .set_body(Bytes::from_static(br#"{"model":"n","stream":true,"messages":[{"role":"user","content":"x"}]}"#));
        Ok(Verdict::Pass)
    };
    let mut call_made = call(true).await;
    chain(vec![entry(&sets, OnFail::Closed)]).ask(&Arc::default(), &mut call_made).await.expect("passes");
    assert!(!call_made.own);
    assert_eq!((call_made.model.as_str(), call_made.asked_for.as_deref()), ("n", Some("m")));
    let mut unstreams = sets.clone();
    unstreams.request = |context| {
        context.set_body(Bytes::from_static(br#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#));
        Ok(Verdict::Pass)
    };
    let asked = chain(vec![entry(&unstreams, OnFail::Closed)]).ask(&Arc::default(), &mut call(true).await).await;
    assert!(asked.is_err());
}

proptest! {
    /// A plugin that passes everything on changes nothing, by events or by bytes and back, however an answer is cut
    /// into batches.
    #[test]
    fn any_cut_gives_the_same_text(texts in prop::collection::vec("[a-zé\"\\\\ ]{0,6}", 1..8), cuts in any::<u64>()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let mut batches = vec![Vec::new()];
        for (at, piece) in texts.iter().enumerate() {
            if cuts >> (at % 64) & 1 == 1 {
                batches.push(Vec::new());
            }
            batches.last_mut().expect("never empty").push(text(piece));
        }
        batches.last_mut().expect("never empty").extend([finish(), ChatEvent::Usage(Usage::default())]);
        let log = Arc::default();
        let entries = vec![
            entry(&Script::new("outer", Sees::Events, &log), OnFail::Open),
            entry(&Script::new("bytes", Sees::Bytes, &log), OnFail::Open),
            entry(&Script::new("inner", Sees::Events, &log), OnFail::Open),
        ];
        let (out, ended) = runtime.block_on(answered(entries, true, Batches(batches, false)));
        prop_assert!(ended.is_ok(), "{ended:?}");
        prop_assert_eq!(out.replace(['#', '.'], ""), texts.concat());
    }
}
