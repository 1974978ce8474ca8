//! Plugin `http_hook`: asks a service of the operator's own about requests and answers.
//!
//! The service gets JSON by POST and answers JSON: `{"action": "pass" | "edit" | "answer" | "reject", …}`; 204 and an
//! empty body mean pass. With a secret every message is signed: `x-penstock-signature: t=SECONDS,v1=HEX`, HMAC-SHA256
//! of `SECONDS.BODY`. An answer is either held back until the service has seen it as a whole, or only shown to the
//! service when it has ended (`observe`), which delays no client.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use hmac::{Hmac, Mac};
use http::{HeaderName, HeaderValue, Method, header};
use penstock_plugins::{
    After, Answer, EndFacts, Endpoint, Flow, Hooks, Host, HttpAsk, Kind, Needs, Plugin, PluginError, Rejection,
    RejectionKind, RequestContext, RequestInfo, Sees, Settings, Verdict,
};
use penstock_types::{ChatEvent, Dialect, FinishReason, Usage};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sha2::Sha256;

use crate::held::HeldBack;

/// Plugin kind `http_hook`: builds plugins that ask a service about requests and answers.
pub(crate) struct HttpHook;

/// Largest reply of the service, in bytes.
const REPLY_BYTES_MAX: usize = 8 << 20;
/// Most text of an answer that is shown to the service, in bytes.
const SHOWN_BYTES_MAX: usize = 16 << 20;
/// Memory of a call beside its texts, in bytes.
const CALL_BYTES: usize = 128;
const SIGNATURE: HeaderName = HeaderName::from_static("x-penstock-signature");

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answers {
    No,
    Hold,
    Observe,
}

struct Config {
    endpoint: Endpoint,
    secret: Option<String>,
    timeout: Duration,
    fields: Vec<(HeaderName, HeaderValue)>,
    /// Header fields of the client that the service gets.
    shown: Vec<HeaderName>,
    requests: bool,
    answers: Answers,
    body: bool,
}

impl Kind for HttpHook {
    fn name(&self) -> &'static str {
        "http_hook"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let requests = settings.flag("requests", true);
        let answers =
            settings.word("answers", &[("no", Answers::No), ("hold", Answers::Hold), ("observe", Answers::Observe)]);
        if !requests && answers == Answers::No {
            settings.fault("answers", "neither requests nor answers are shown");
        }
        let config = Config {
            secret: settings.secret_env("secret_env"),
            timeout: settings.millis("timeout_ms", 1..=600_000, 2000),
            fields: settings.headers("headers"),
            shown: settings.header_names("show_headers"),
            requests,
            answers,
            body: settings.flag("body", true),
            endpoint: settings.needed_endpoint("url")?,
        };
        Some(Arc::new(Hooked(Arc::new(config))))
    }
}

/// Reply of the service: an action and its values; unknown fields are an error.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Reply {
    action: Option<Action>,
    /// HTTP status of a refusal, in place of the default.
    status: Option<u16>,
    message: Option<String>,
    /// JSON body that takes the place of the request's.
    body: Option<Map<String, Value>>,
    model: Option<String>,
    /// Text of an answer, or the text in place of the model's.
    text: Option<String>,
    tags: Map<String, Value>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Action {
    #[default]
    Pass,
    Edit,
    Answer,
    Reject,
}

impl Config {
    /// Reply of the service to a message.
    async fn asked(&self, host: &Arc<dyn Host>, what: &Value) -> Result<Reply, PluginError> {
        let body = self.sent(host, what).await?;
        match body.trim_ascii() {
            b"" => Ok(Reply::default()),
            reply => {
                serde_json::from_slice(reply).map_err(|_| PluginError::new("the service's answer is not understood"))
            }
        }
    }

    /// Body of the service's answer to a message; any status but a success is an error.
    async fn sent(&self, host: &Arc<dyn Host>, what: &Value) -> Result<Bytes, PluginError> {
        let body = Bytes::from(what.to_string());
        let mut headers = self.fields.clone();
        headers.push((header::CONTENT_TYPE, HeaderValue::from_static("application/json")));
        if let Some(secret) = &self.secret {
            let signature = signed(secret, host.since_epoch().as_secs(), &body);
            headers.extend(HeaderValue::from_str(&signature).ok().map(|value| (SIGNATURE, value)));
        }
        let ask = HttpAsk {
            method: Method::POST,
            path: String::new(),
            headers,
            body,
            timeout: self.timeout,
            bytes_max: REPLY_BYTES_MAX,
        };
        let answer = host.http(&self.endpoint, ask).await?;
        match answer.status {
            200..=299 => Ok(answer.body),
            status => Err(PluginError::new(format!("the service answered {status}"))),
        }
    }
}

/// Signature of a message sent at the time `seconds`.
fn signed(secret: &str, seconds: u64, body: &[u8]) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).expect("a key of any length will do");
    mac.update(format!("{seconds}.").as_bytes());
    mac.update(body);
    let hex: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("t={seconds},v1={hex}")
}

impl Reply {
    fn refusal(&self) -> Rejection {
        let message = self.message.clone().unwrap_or_else(|| "This request was refused.".into());
        let status = self.status.filter(|status| (400..=599).contains(status));
        Rejection { status, ..Rejection::new(RejectionKind::Forbidden, message) }.log("refused by the service")
    }
}

fn facts(hook: &str, info: &RequestInfo) -> Value {
    let dialect = match info.dialect() {
        Dialect::OpenAi => "openai",
        Dialect::Anthropic => "anthropic",
        Dialect::Gemini => "gemini",
        Dialect::Ollama => "ollama",
    };
    json!({
        "hook": hook, "request_id": info.request_id, "route": info.route, "dialect": dialect, "model": info.model, "stream": info.stream,
        "key": info.key, "team": info.team, "user": info.user, "client": info.client, "background": info.background,
    })
}

struct Hooked(Arc<Config>);

impl Plugin for Hooked {
    fn needs(&self) -> Needs {
        if self.0.requests && self.0.body { Needs::Body } else { Needs::Facts }
    }

    fn can_dry_run(&self) -> bool {
        true
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(Asking { config: self.0.clone(), info: None, held: HeldBack::default(), seen: Seen::default() })
    }
}

struct Asking {
    config: Arc<Config>,
    info: Option<(Arc<RequestInfo>, Arc<dyn Host>)>,
    held: HeldBack,
    seen: Seen,
}

/// Content of an answer for the service.
#[derive(Default)]
struct Seen {
    text: String,
    calls: Vec<(String, String)>,
    finish: Option<FinishReason>,
    usage: Usage,
    /// Bytes of text, names and arguments.
    bytes: usize,
}

impl Seen {
    fn event(&mut self, event: &ChatEvent) {
        self.bytes += match event {
            ChatEvent::Text { choice: 0, text, .. } => text.len(),
            ChatEvent::ToolCallStart { choice: 0, name, .. } => CALL_BYTES + name.len(),
            ChatEvent::ToolCallArguments { choice: 0, json, .. } => json.len(),
            _ => 0,
        };
        match event {
            ChatEvent::Text { choice: 0, text, .. } => self.text.push_str(text),
            ChatEvent::ToolCallStart { choice: 0, name, .. } => self.calls.push((name.clone(), String::new())),
            ChatEvent::ToolCallArguments { choice: 0, json, .. } => {
                self.calls.last_mut().into_iter().for_each(|(_, arguments)| arguments.push_str(json));
            }
            ChatEvent::Finish { choice: 0, reason, .. } => self.finish = Some(*reason),
            ChatEvent::Usage(usage) => self.usage = *usage,
            _ => {}
        }
    }

    fn said(&self, info: &RequestInfo) -> Value {
        let mut what = facts("answer", info);
        let calls: Vec<_> = self.calls.iter().map(|(name, text)| json!({ "name": name, "arguments": text })).collect();
        let finish = self.finish.map(FinishReason::name);
        (what["text"], what["tool_calls"]) = (self.text.as_str().into(), calls.into());
        (what["finish"], what["prompt_tokens"]) = (finish.into(), self.usage.prompt_tokens.into());
        what["completion_tokens"] = self.usage.completion_tokens.into();
        what
    }
}

/// Puts other words in place of the first choice's.
fn edited(events: Vec<ChatEvent>, words: String) -> Vec<ChatEvent> {
    let mut words = Some(words);
    let mut out = Vec::with_capacity(events.len());
    for event in events {
        match event {
            ChatEvent::Text { choice: 0, .. } => {}
            ChatEvent::Finish { choice: 0, .. } => {
                let words = words.take().filter(|words| !words.is_empty());
                out.extend(words.map(|text| ChatEvent::Text {
                    choice: 0,
                    text,
                    logprobs: Vec::new(),
                    tokens: Vec::new(),
                }));
                out.push(event);
            }
            other => out.push(other),
        }
    }
    out
}

impl Asking {
    async fn request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        let mut what = facts("request", &request.info);
        what["model"] = request.model.as_str().into();
        let shown = self.config.shown.iter().filter_map(|name| {
            let value = request.headers.get(name)?.to_str().ok()?;
            Some((name.as_str().to_owned(), Value::from(value)))
        });
        what["headers"] = Value::Object(shown.collect());
        if self.config.body {
            let read = serde_json::from_slice(request.body()?);
            what["body"] = read.map_err(|_| PluginError::new("the body is no JSON"))?;
        }
        let reply = self.config.asked(&request.host, &what).await?;
        for (name, value) in &reply.tags {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            request.tags.push((name.clone(), value.chars().take(128).collect()));
        }
        match reply.action.unwrap_or_default() {
            Action::Pass => {}
            Action::Edit => {
                if let Some(body) = reply.body {
                    request.set_body(Value::Object(body).to_string().into());
                }
                request.model = reply.model.unwrap_or_else(|| request.model.clone());
            }
            Action::Answer => {
                let text = reply.text.unwrap_or_default();
                let text = ChatEvent::Text { choice: 0, text, logprobs: Vec::new(), tokens: Vec::new() };
                let finish = ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop: None };
                let events = vec![text, finish, ChatEvent::Usage(Usage::default())];
                return Ok(Verdict::Answer(Answer { events, headers: Vec::new() }));
            }
            Action::Reject => return Ok(Verdict::Reject(reply.refusal())),
        }
        Ok(Verdict::Pass)
    }
}

#[async_trait]
impl Hooks for Asking {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        self.info = Some((request.info.clone(), request.host.clone()));
        if !self.config.requests {
            return Ok(Verdict::Pass);
        }
        self.request(request).await
    }

    fn sees(&self) -> Sees {
        if self.config.answers == Answers::No { Sees::Nothing } else { Sees::Events }
    }

    fn on_event(&mut self, events: &mut Vec<ChatEvent>, end: bool) -> Result<Flow, PluginError> {
        events.iter().for_each(|event| self.seen.event(event));
        if self.seen.bytes > SHOWN_BYTES_MAX {
            return Err(PluginError::new("the answer is too long to be shown"));
        }
        if self.config.answers == Answers::Observe {
            return Ok(Flow::Go);
        }
        self.held.add(events)?;
        let Some((info, host)) = self.info.clone().filter(|_| end) else { return Ok(Flow::Go) };
        // Taken when the service has answered: one that fails leaves the events here.
        let (held, what, config) = (self.held.clone(), self.seen.said(&info), self.config.clone());
        Ok(Flow::Wait(Box::pin(async move {
            let reply = config.asked(&host, &what).await?;
            Ok(match reply.action.unwrap_or_default() {
                Action::Pass => After::Go(held.take()),
                Action::Edit | Action::Answer => After::Go(match reply.text {
                    Some(text) => edited(held.take(), text),
                    None => held.take(),
                }),
                Action::Reject => After::Reject(reply.refusal()),
            })
        })))
    }

    fn release(&mut self, out: &mut Vec<ChatEvent>) {
        out.append(&mut self.held.take());
    }

    fn held_bytes(&self) -> usize {
        self.held.bytes() + self.seen.bytes
    }

    fn on_end(&mut self, facts: &EndFacts) {
        let Some((info, host)) = self.info.take() else { return };
        if self.config.answers != Answers::Observe {
            return;
        }
        let mut what = self.seen.said(&info);
        (what["outcome"], what["seconds"]) = (facts.outcome.name().into(), facts.duration.as_secs_f64().into());
        let (config, asks) = (self.config.clone(), host.clone());
        // Shown, not asked: what the service answers changes nothing, as long as it has the message. The host reports work that it
        // has no room for.
        host.spawn(Box::pin(async move {
            if let Err(error) = config.sent(&asks, &what).await {
                asks.failed(&error.to_string());
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use penstock_plugins::testing::{FakeHost, build, http_answer, now, request};
    use penstock_plugins::{HostError, Outcome};
    use penstock_types::Surface;

    use super::*;
    use crate::testing::text;

    /// Service whose reply is chosen by the prompt or the answer.
    fn host() -> Arc<FakeHost> {
        let http = |url: &str, ask: &HttpAsk| {
            assert_eq!(url, "http://hook/x");
            let signature = ask.headers.iter().find(|(name, _)| *name == SIGNATURE).expect("signed").1.clone();
            assert_eq!(signature, signed("hunter2", 7, &ask.body).as_str());
            let what: Value = serde_json::from_slice(&ask.body).expect("JSON");
            let asked = what["body"]["messages"][0]["content"].as_str().or(what["text"].as_str()).unwrap_or_default();
            match asked.split_once(' ').unwrap_or((asked, "")) {
                ("fail", _) => Ok(http_answer(StatusCode::BAD_GATEWAY, "")),
                ("late", _) => Err(HostError::Timeout("hook".into())),
                ("say", reply) => Ok(http_answer(StatusCode::OK, reply.to_owned())),
                _ => Ok(http_answer(StatusCode::NO_CONTENT, "")),
            }
        };
        let host = FakeHost { http: Some(Box::new(http)), ..FakeHost::default() };
        *host.now.lock().expect("a test") = Duration::from_secs(7);
        Arc::new(host)
    }

    fn asked(answers: &str, said: &str) -> (Result<Verdict, PluginError>, RequestContext, Box<dyn Hooks>) {
        let settings = json!({ "url": "http://hook/x", "secret_env": "SECRET", "answers": answers });
        let plugin = build(&HttpHook, &settings).expect("valid");
        let body = json!({ "model": "m", "messages": [{ "role": "user", "content": said }] });
        let mut context = request(Surface::Chat, &body, host());
        let mut hooks = plugin.begin();
        let verdict = now(hooks.on_request(&mut context));
        (verdict, context, hooks)
    }

    #[test]
    fn the_service_decides() {
        assert!(matches!(asked("no", "hello").0, Ok(Verdict::Pass)));
        let (verdict, ..) = asked("no", r#"say {"action":"reject","status":451,"message":"No."}"#);
        assert!(
            matches!(verdict, Ok(Verdict::Reject(refused)) if refused.status == Some(451) && refused.message == "No.")
        );
        let (verdict, context, _) =
            asked("no", r#"say {"action":"edit","model":"n","body":{"model":"n"},"tags":{"a":1}}"#);
        assert!(matches!(verdict, Ok(Verdict::Pass)));
        assert_eq!((context.model.as_str(), context.body().expect("there").as_ref()), ("n", &br#"{"model":"n"}"#[..]));
        assert_eq!(context.tags, [("a".to_owned(), "1".to_owned())]);
        let (verdict, ..) = asked("no", r#"say {"action":"answer","text":"Hi."}"#);
        assert!(matches!(verdict, Ok(Verdict::Answer(answer)) if answer.events[0] == text("Hi.")));
        for broken in ["fail", "late", "say nonsense", r#"say {"action":"explode"}"#, r#"say {"acton":"pass"}"#] {
            assert!(asked("no", broken).0.is_err(), "{broken}");
        }
    }

    fn answered(said: &str) -> (Result<After, PluginError>, Box<dyn Hooks>) {
        let (_, _, mut hooks) = asked("hold", "hello");
        let finish = ChatEvent::Finish { choice: 0, reason: FinishReason::Stop, stop: None };
        let mut events = vec![text(said)];
        assert!(matches!(hooks.on_event(&mut events, false), Ok(Flow::Go)) && events.is_empty());
        let Ok(Flow::Wait(work)) = hooks.on_event(&mut vec![finish], true) else { panic!("it waits") };
        (now(work), hooks)
    }

    #[test]
    fn an_answer_is_held_and_may_be_changed() {
        let (after, mut hooks) = answered("fine");
        assert!(matches!(after, Ok(After::Go(events)) if events[0] == text("fine")));
        let mut twice = Vec::new();
        hooks.release(&mut twice);
        assert!(twice.is_empty() && hooks.held_bytes() == "fine".len(), "nothing is copied");
        let (after, _) = answered(r#"say {"action":"edit","text":"other"}"#);
        assert!(matches!(after, Ok(After::Go(events)) if events[0] == text("other") && events.len() == 2));
        assert!(matches!(answered(r#"say {"action":"reject"}"#).0, Ok(After::Reject(_))));
        let (after, mut hooks) = answered("fail");
        assert!(after.is_err());
        let mut out = Vec::new();
        hooks.release(&mut out);
        assert_eq!(out.len(), 2);
    }

    /// Failures that an observer of this answer reports.
    fn observed(said: &str) -> Vec<String> {
        let host = host();
        let settings =
            json!({ "url": "http://hook/x", "secret_env": "SECRET", "answers": "observe", "requests": false });
        let body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hello" }] });
        let mut context = request(Surface::Chat, &body, host.clone());
        let mut hooks = build(&HttpHook, &settings).expect("valid").begin();
        assert!(matches!(now(hooks.on_request(&mut context)), Ok(Verdict::Pass)));
        let mut events = vec![text(said)];
        assert!(matches!(hooks.on_event(&mut events, true), Ok(Flow::Go)) && events.len() == 1);
        let facts = EndFacts {
            outcome: Outcome::Complete,
            model: "m".into(),
            target: None,
            usage: Usage::default(),
            duration: Duration::from_secs(1),
        };
        hooks.on_end(&facts);
        assert!(host.failures.lock().expect("a test").is_empty(), "an observer delays nobody");
        let work: Vec<_> = host.spawned.lock().expect("a test").drain(..).collect();
        assert_eq!(work.len(), 1, "one message");
        work.into_iter().for_each(now);
        host.failures.lock().expect("a test").drain(..).collect()
    }

    #[test]
    fn an_observer_that_does_not_get_the_answer_has_failed() {
        for shown in ["fine", "say nonsense", r#"say {"action":"reject"}"#] {
            assert_eq!(observed(shown), Vec::<String>::new(), "{shown}: nobody asks what it thinks");
        }
        assert_eq!(observed("fail"), ["the service answered 502"]);
        assert_eq!(observed("late"), ["hook: no answer in time"]);
    }

    #[test]
    fn settings_without_a_use_are_faults() {
        let settings = json!({ "url": "ftp://x", "requests": false });
        let faults = build(&HttpHook, &settings).err().expect("faults");
        assert_eq!(faults.iter().map(|fault| fault.path.as_str()).collect::<Vec<_>>(), ["answers", "url"]);
    }

    #[test]
    fn signatures_are_what_the_guide_says() {
        // python3 -c 'import hmac;print(hmac.new(b"k", b"1.{}", "sha256").hexdigest())'
        let expected = "t=1,v1=3dd49b2593d0f9a349e9e71c4bde3e2b862c2be4003fe9b4ba81332029310158";
        assert_eq!(signed("k", 1, b"{}"), expected);
    }
}
