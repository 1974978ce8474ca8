//! Services of this process for plugins, in the name of one request.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use penstock_plugins::{AskAs, BoxFuture, Endpoint, Host, HostError, HttpAnswer, HttpAsk, ModelAnswer};
use penstock_proto::ErrorKind;
use penstock_types::{Bounds, ChatEvent, ChatRequest, EmbedRequest, Prompt, Request, Surface, peek};
use tokio::time::{Instant, timeout};

use super::convert::codec_of;
use super::hub::Hub;
use penstock_auth::Principal;
use penstock_base::clock;
use penstock_base::error::Failure;
use penstock_http::Body;
use penstock_http::client::{Body as AnswerBody, Deadlines, Outgoing, Sent};
use penstock_http::exchange::new_request_id;
use penstock_types::ask::Ask;
use penstock_upstream::Asker;
use penstock_upstream::Forward;
use penstock_upstream::call::Call;

/// Longest wait for a model's answer; the plugin's own limit usually comes first.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// Largest answer to an operation that a plugin calls, in bytes.
const OPERATION_BYTES_MAX: usize = 1 << 20;
/// Timeout of the shared cache: a slower cache is no help.
const CACHE_TIMEOUT: Duration = Duration::from_secs(2);
/// Key under which a plugin asks in its own name.
const PLUGINS: &str = "plugins";

/// Host that a plugin sees during one request: asks models and uses the hub for its caller.
pub(super) struct RequestHost {
    hub: Arc<Hub>,
    caller: Arc<Principal>,
}

impl RequestHost {
    pub(super) fn new(hub: Arc<Hub>, caller: Arc<Principal>) -> Self {
        Self { hub, caller }
    }

    fn principal(&self, ask_as: AskAs) -> Arc<Principal> {
        match ask_as {
            AskAs::Caller => self.caller.clone(),
            AskAs::Plugin => {
                let mut principal = Principal::default();
                principal.key = Some(PLUGINS.into());
                Arc::new(principal)
            }
        }
    }

    /// Asks a model and returns the events of its answer, whichever target answers.
    async fn ask(&self, surface: Surface, request: Request, ask_as: AskAs) -> Result<Vec<ChatEvent>, HostError> {
        let models = self.hub.models()?;
        let model = request.model().to_owned();
        let said = |failure: Failure| failed(&model, &failure);
        let encoded = codec_of(surface).encode(&request, &model).map_err(|error| said(error.into()))?;
        let body = Body { bytes: encoded.body.into(), lease: models.lease() };
        let call =
            Call::new(Ask::new(surface), body, new_request_id(), HeaderMap::new(), penstock_dialects::decode).await;
        let mut call = call.map_err(said)?;
        // Read whatever the provider speaks, and shown to no plugin: so none can ask itself.
        (call.own, call.asked_by_plugin) = (true, true);
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        models.events(&self.principal(ask_as), call, deadline.into_std()).await.map_err(said)
    }
}

/// Error for the plugin, and for the log, made of a failure.
fn failed(who: &str, failure: &Failure) -> HostError {
    if failure.kind == ErrorKind::DeadlineExceeded {
        return HostError::Timeout(who.to_owned());
    }
    let detail = failure.log.as_deref().unwrap_or_default();
    HostError::Failed(format!("{who}: {:?} {detail}", failure.kind))
}

/// Reads the body of an answer for a plugin; more than `bytes_max` bytes are an error.
async fn read(who: &str, body: &mut AnswerBody, bytes_max: usize) -> Result<Bytes, HostError> {
    let mut bytes = Vec::new();
    loop {
        match poll_fn(|context| body.poll_chunk(context, &mut bytes)).await {
            Ok(_) if bytes.len() > bytes_max => return Err(HostError::TooLarge(who.to_owned())),
            Ok(true) => {}
            Ok(false) => return Ok(bytes.into()),
            Err(error) => return Err(HostError::Failed(format!("{who}: {error}"))),
        }
    }
}

#[async_trait]
impl Host for RequestHost {
    async fn chat(&self, mut request: ChatRequest, ask_as: AskAs) -> Result<ModelAnswer, HostError> {
        request.stream = None;
        let events = self.ask(Surface::Chat, Request::Chat(Box::new(request)), ask_as).await?;
        let usage = events.iter().rev().find_map(|event| match event {
            ChatEvent::Usage(usage) => Some(*usage),
            _ => None,
        });
        Ok(ModelAnswer { events, usage: usage.unwrap_or_default() })
    }

    async fn embed(&self, model: &str, texts: Vec<String>, ask_as: AskAs) -> Result<Vec<Vec<f32>>, HostError> {
        let count = texts.len();
        let inputs = texts.into_iter().map(Prompt::Text).collect();
        let (model, user) = (model.to_owned(), None);
        let (dimensions, task, truncate, ignored) = (None, None, false, Vec::new());
        let request = EmbedRequest { model: model.clone(), inputs, dimensions, task, truncate, user, ignored };
        let events = self.ask(Surface::Embeddings, Request::Embed(Box::new(request)), ask_as).await?;
        let mut vectors = vec![Vec::new(); count];
        for event in events {
            if let ChatEvent::Vector { index, values } = event
                && let Some(vector) = vectors.get_mut(index as usize)
            {
                *vector = values;
            }
        }
        if vectors.iter().any(Vec::is_empty) {
            return Err(HostError::Failed(format!("{model}: a vector is missing")));
        }
        Ok(vectors)
    }

    async fn operation(&self, path: &str, model: &str, body: Bytes, ask_as: AskAs) -> Result<HttpAnswer, HostError> {
        let said = |failure: Failure| failed(model, &failure);
        let models = self.hub.models()?;
        let principal = self.principal(ask_as);
        let entry = models.entry(model, &principal).map_err(said)?;
        let asker = Asker::new(principal.tenant(), None);
        let seen = peek(&body, None, &Bounds::default()).map_err(|error| said(error.into()))?;
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        let path = path.strip_prefix("/v1").unwrap_or(path).to_owned();
        let model_at = seen.model_at.map(|at| (at, true));
        let forward = Forward { path, headers, body: Some(body), model_at, trace: None, asker, deadline: None };
        let asked = async {
            let mut answered = entry.upstream.forward(Arc::new(forward)).await.map_err(said)?;
            let bytes = read(model, &mut answered.response.body, OPERATION_BYTES_MAX).await?;
            answered.passage.complete();
            let headers = std::mem::take(&mut answered.response.headers);
            Ok(HttpAnswer { status: answered.response.status, headers, body: bytes })
        };
        timeout(ANSWER_TIMEOUT, asked).await.map_err(|_| HostError::Timeout(model.to_owned()))?
    }

    async fn http(&self, endpoint: &Endpoint, ask: HttpAsk) -> Result<HttpAnswer, HostError> {
        let client = self.hub.client(endpoint)?;
        let who = endpoint.url();
        let HttpAsk { method, mut path, headers, body, timeout: limit, bytes_max } = ask;
        if client.target().base.is_empty() && path.is_empty() {
            path.push('/');
        }
        let whole = Some(Instant::now() + limit);
        let deadlines = Deadlines { connect: limit, head: limit, silence: limit, whole };
        let request = Outgoing { method, path, headers, body: vec![body], sent: Sent::default() };
        let asked = async {
            let sent = client.send(&request, &deadlines).await;
            let mut answer = sent.map_err(|error| HostError::Failed(format!("{who}: {error}")))?;
            let body = read(who, &mut answer.body, bytes_max).await?;
            Ok(HttpAnswer { status: answer.status, headers: answer.headers, body })
        };
        timeout(limit, asked).await.map_err(|_| HostError::Timeout(who.to_owned()))?
    }

    async fn cache_get(&self, key: &str) -> Result<Option<Bytes>, HostError> {
        let cache = self.hub.cache()?;
        let got = timeout(CACHE_TIMEOUT, cache.get(key)).await.map_err(|_| HostError::Timeout("the cache".into()))?;
        got.map_err(|error| HostError::Failed(format!("the cache: {error}")))
    }

    async fn cache_put(&self, key: &str, value: Bytes, keep: Duration) -> Result<(), HostError> {
        let put = self.hub.cache()?.put(key, value, keep.as_secs().max(1));
        let put = timeout(CACHE_TIMEOUT, put).await.map_err(|_| HostError::Timeout("the cache".into()))?;
        put.map_err(|error| HostError::Failed(format!("the cache: {error}")))
    }

    fn append(&self, path: &str, line: Vec<u8>) {
        self.hub.append(path, &line);
    }

    fn sleep(&self, time: Duration) -> BoxFuture<()> {
        Box::pin(tokio::time::sleep(time))
    }

    fn spawn(&self, work: BoxFuture<()>) -> bool {
        self.hub.spawn(work)
    }

    fn since_epoch(&self) -> Duration {
        clock::since_epoch()
    }

    fn random(&self) -> u64 {
        let mut bytes = [0; 8];
        // The system's randoms do not fail once it runs; zeros would only make a fault injection regular.
        let _ = getrandom::fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }
}
