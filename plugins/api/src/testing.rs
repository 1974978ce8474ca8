//! Doubles for tests of plugins: a host with scripted answers, and requests without a gateway.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use penstock_types::error_shape::RATE_LIMIT_REQUESTS;
use penstock_types::{Ask, ChatEvent, ChatRequest, Decoded, Surface};
use serde_json::Value;

use crate::context::{RequestContext, RequestInfo};
use crate::host::{AskAs, BoxFuture, Endpoint, Host, HostError, HttpAnswer, HttpAsk, Limited, ModelAnswer};
use crate::plugin::{Kind, Plugin};
use crate::settings::{SettingFault, Settings, Surroundings};
use crate::verdict::RejectionKind;

/// Surroundings without an environment: the variable `SECRET` is `hunter2`, URLs must begin with `http://`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nowhere;

impl Surroundings for Nowhere {
    fn env(&self, name: &str) -> Option<String> {
        (name == "SECRET").then(|| "hunter2".to_owned())
    }

    fn check_url(&self, url: &str) -> Result<(), String> {
        if url.starts_with("http://") { Ok(()) } else { Err("must begin with http://".into()) }
    }
}

/// Builds a plugin from settings.
///
/// # Errors
/// All faults of the settings.
pub fn build(kind: &dyn Kind, settings: &Value) -> Result<Arc<dyn Plugin>, Vec<SettingFault>> {
    Settings::read(Some(settings), &Nowhere, |settings| kind.build(settings))
}

type Chat = dyn Fn(&ChatRequest) -> Result<String, HostError> + Send + Sync;
type Http = dyn Fn(&str, &HttpAsk) -> Result<HttpAnswer, HostError> + Send + Sync;

/// Host for tests of plugins: its answers are set by the test, and its calls are recorded.
#[derive(Default)]
pub struct FakeHost {
    /// Function that answers for chat models; `None`: the service is unavailable.
    pub chat: Option<Box<Chat>>,
    /// Answers of endpoints; `operation` uses them too, with the path as the URL.
    pub http: Option<Box<Http>>,
    /// Vectors by text; the dimensions are the test's choice.
    pub vectors: HashMap<String, Vec<f32>>,
    /// Contents of the shared cache, by key.
    pub cache: Mutex<HashMap<String, Bytes>>,
    /// Lines that plugins appended, each with the path of its file.
    pub appended: Mutex<Vec<(String, Vec<u8>)>>,
    /// Time since 1970 that the host tells.
    pub now: Mutex<Duration>,
    /// Waits that were asked for; they are over at once.
    pub slept: Mutex<Vec<Duration>>,
    /// Random bits that the host gives next; zeros when they are used up.
    pub randoms: Mutex<Vec<u64>>,
    /// True where a limit refuses every question to an embedding model.
    pub limited: bool,
    /// Background work, for the test to run.
    pub spawned: Mutex<Vec<BoxFuture<()>>>,
    /// Errors of background work that plugins reported.
    pub failures: Mutex<Vec<String>>,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[async_trait]
impl Host for FakeHost {
    async fn chat(&self, request: ChatRequest, _: AskAs) -> Result<ModelAnswer, HostError> {
        let chat = self.chat.as_ref().ok_or_else(|| HostError::Unavailable("no chat model here".into()))?;
        let text = chat(&request)?;
        let text = ChatEvent::Text { choice: 0, text, logprobs: Vec::new(), tokens: Vec::new() };
        Ok(ModelAnswer { events: vec![text], ..ModelAnswer::default() })
    }

    async fn embed(&self, _: &str, texts: Vec<String>, _: AskAs) -> Result<Vec<Vec<f32>>, HostError> {
        if self.limited {
            return Err(HostError::Limited(Box::new(Limited {
                rule: "l: requests_per_minute".into(),
                message: "The limit is reached.".into(),
                kind: RejectionKind::RateLimited,
                shape: RATE_LIMIT_REQUESTS,
                retry: true,
                retry_after: None,
                fields: Vec::new(),
            })));
        }
        let vector = |text: &String| self.vectors.get(text).cloned();
        let all: Option<Vec<_>> = texts.iter().map(vector).collect();
        all.ok_or_else(|| HostError::Unavailable("no vector for that".into()))
    }

    async fn operation(&self, path: &str, _: &str, body: Bytes, _: AskAs) -> Result<HttpAnswer, HostError> {
        let http = self.http.as_ref().ok_or_else(|| HostError::Unavailable("no operations here".into()))?;
        let ask = HttpAsk {
            method: http::Method::POST,
            path: String::new(),
            headers: Vec::new(),
            body,
            timeout: Duration::from_secs(1),
            bytes_max: 1 << 20,
        };
        http(path, &ask)
    }

    async fn http(&self, endpoint: &Endpoint, ask: HttpAsk) -> Result<HttpAnswer, HostError> {
        let http = self.http.as_ref().ok_or_else(|| HostError::Unavailable("no endpoints here".into()))?;
        http(endpoint.url(), &ask)
    }

    async fn cache_get(&self, key: &str) -> Result<Option<Bytes>, HostError> {
        Ok(locked(&self.cache).get(key).cloned())
    }

    async fn cache_put(&self, key: &str, value: Bytes, _: Duration) -> Result<(), HostError> {
        locked(&self.cache).insert(key.to_owned(), value);
        Ok(())
    }

    fn append(&self, path: &str, line: Vec<u8>) {
        locked(&self.appended).push((path.to_owned(), line));
    }

    fn sleep(&self, time: Duration) -> BoxFuture<()> {
        locked(&self.slept).push(time);
        Box::pin(async {})
    }

    fn spawn(&self, work: BoxFuture<()>) -> bool {
        locked(&self.spawned).push(work);
        true
    }

    fn failed(&self, why: &str) {
        locked(&self.failures).push(why.to_owned());
    }

    fn since_epoch(&self) -> Duration {
        *locked(&self.now)
    }

    fn random(&self) -> u64 {
        let mut randoms = locked(&self.randoms);
        if randoms.is_empty() { 0 } else { randoms.remove(0) }
    }
}

/// Answer of an endpoint with this status and body.
pub fn http_answer(status: StatusCode, body: impl Into<Bytes>) -> HttpAnswer {
    HttpAnswer { status: status.as_u16(), headers: HeaderMap::new(), body: body.into() }
}

/// Request with that body, decoded, of a caller without a key.
///
/// # Panics
/// The body is no request of the surface: the test is wrong.
pub fn request(surface: Surface, body: &Value, host: Arc<dyn Host>) -> RequestContext {
    let bytes = Bytes::from(body.to_string());
    let decoded = decoded(surface, &bytes);
    let info = RequestInfo {
        request_id: "req_test".into(),
        route: "/test",
        surface,
        stream: decoded.request.stream(),
        model: decoded.request.model().to_owned(),
        key: None,
        team: None,
        user: None,
        tenant: String::new(),
        client: None,
        background: false,
        partial: false,
        dry_run: false,
    };
    let mut context = RequestContext::new(Arc::new(info), HeaderMap::new(), Vec::new(), bytes, host);
    context.put_decoded(Arc::new(decoded));
    context
}

fn decoded(surface: Surface, body: &[u8]) -> Decoded {
    let ask = Ask { model: Some("m".into()), ..Ask::new(surface) };
    penstock_dialects::decode(&ask, body).expect("a body of that surface")
}

/// Runs a future that must be ready at the first poll.
///
/// # Panics
/// The future is pending.
pub fn now<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(out) => out,
        std::task::Poll::Pending => panic!("a future that waits in a test without a runtime"),
    }
}
