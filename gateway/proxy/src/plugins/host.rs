//! Services of this process for plugins, in the name of one request.

use std::future::poll_fn;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use penstock_plugins::{
    AskAs, BoxFuture, Endpoint, Host, HostError, HttpAnswer, HttpAsk, Limited, ModelAnswer, RejectionKind,
};
use penstock_proto::ErrorKind;
use penstock_types::{Bounds, ChatEvent, ChatRequest, EmbedRequest, Prompt, Request, Surface, error_shape, peek};
use tokio::time::{Instant, timeout};

use super::convert::codec_of;
use super::hub::Hub;
use penstock_auth::Principal;
use penstock_base::clock;
use penstock_base::error::Failure;
use penstock_http::Body;
use penstock_http::client::{Body as AnswerBody, Deadlines, Outgoing, Sent};
use penstock_http::exchange::new_request_id;
use penstock_relay::models::Entry;
use penstock_telemetry::{Metric, Metrics};
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
/// Message for a client whose request needs what a limit of that key refuses.
const OWN_LIMIT: &str =
    "A limit on what this gateway itself asks of models leaves no room for this request. Try again later.";

/// Host that a plugin sees during one request: asks models and uses the hub for its caller.
pub(super) struct RequestHost {
    hub: Arc<Hub>,
    caller: Arc<Principal>,
    /// Address of the caller's client; `None`: it is not known.
    client: Option<IpAddr>,
    /// Reports of failures in the background; `None`: there is no background.
    reports: Option<Reports>,
}

/// Log and counter of the failures of one plugin that no hook returns.
#[derive(Clone)]
pub(super) struct Reports {
    hub: Arc<Hub>,
    /// Id of the plugin's entry.
    plugin: Arc<str>,
    metrics: Arc<Metrics>,
}

impl Reports {
    pub(super) fn new(hub: &Arc<Hub>, plugin: &Arc<str>, metrics: &Arc<Metrics>) -> Self {
        Self { hub: hub.clone(), plugin: plugin.clone(), metrics: metrics.clone() }
    }

    /// Counts a failure, and writes it to the log, where lines about one plugin are few.
    pub(super) fn failed(&self, reason: &'static str, detail: &str) {
        let (id, hook) = (&*self.plugin, "background");
        self.metrics.count(Metric::PluginFailures, &[("plugin", id), ("hook", hook), ("reason", reason)]);
        if let Some(left_out) = self.hub.may_say(&self.plugin) {
            tracing::warn!(plugin = id, hook, reason, detail, left_out, "background work of a plugin failed");
        }
    }
}

impl RequestHost {
    pub(super) fn new(hub: Arc<Hub>, caller: Arc<Principal>) -> Self {
        Self { hub, caller, client: None, reports: None }
    }

    /// The host for the request of a client at that address.
    pub(super) fn for_client(self, client: Option<IpAddr>) -> Self {
        Self { client, ..self }
    }

    /// The host for one plugin, whose failures in the background are reported.
    pub(super) fn reporting(self, reports: Reports) -> Self {
        Self { reports: Some(reports), ..self }
    }

    /// Principal and address in whose name a model is asked.
    fn asker(&self, ask_as: AskAs) -> (Arc<Principal>, Option<IpAddr>) {
        match ask_as {
            AskAs::Caller => (self.caller.clone(), self.client),
            AskAs::Plugin => {
                let mut principal = Principal::default();
                principal.key = Some(PLUGINS.into());
                (Arc::new(principal), None)
            }
        }
    }

    /// Asks a model and returns the events of its answer, whichever target answers.
    async fn ask(&self, surface: Surface, request: Request, ask_as: AskAs) -> Result<Vec<ChatEvent>, HostError> {
        let models = self.hub.models()?;
        let model = request.model().to_owned();
        let said = |failure: Failure| told_to(ask_as, failed(&model, &failure));
        let encoded = codec_of(surface).encode(&request, &model).map_err(|error| said(error.into()))?;
        let body = Body { bytes: encoded.body.into(), lease: models.lease() };
        let call =
            Call::new(Ask::new(surface), body, new_request_id(), HeaderMap::new(), penstock_dialects::decode).await;
        let mut call = call.map_err(said)?;
        // Read whatever the provider speaks, and shown to no plugin: so none can ask itself.
        (call.own, call.asked_by_plugin) = (true, true);
        let (principal, client) = self.asker(ask_as);
        call.client = client;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        models.events(&principal, call, deadline.into_std()).await.map_err(said)
    }
}

/// Error for the plugin, and for the log, made of a failure.
fn failed(who: &str, failure: &Failure) -> HostError {
    if failure.kind == ErrorKind::DeadlineExceeded {
        return HostError::Timeout(who.to_owned());
    }
    if let Some(refusal) = &failure.refusal {
        let is_uncounted = failure.kind == ErrorKind::Unavailable;
        return HostError::Limited(Box::new(Limited {
            rule: refusal.rule.clone(),
            message: failure.message.to_string(),
            kind: if is_uncounted { RejectionKind::Unavailable } else { RejectionKind::RateLimited },
            shape: failure.shape(),
            retry: refusal.retry,
            retry_after: failure.retry_after,
            fields: refusal.fields.clone(),
        }));
    }
    let detail = failure.log.as_deref().unwrap_or_default();
    HostError::Failed(format!("{who}: {:?} {detail}", failure.kind))
}

/// Error of which the request's client may read all: a limit of the plugins' own key counts what is asked for every client, so its numbers and
/// what is left of it are not told.
fn told_to(ask_as: AskAs, error: HostError) -> HostError {
    match error {
        HostError::Limited(limited) if ask_as == AskAs::Plugin => {
            let mut limited = *limited;
            limited.fields.retain(|(name, _)| name.as_str().starts_with("retry-after"));
            if limited.kind == RejectionKind::RateLimited {
                (limited.message, limited.shape) = (OWN_LIMIT.to_owned(), error_shape::RATE_LIMIT_REQUESTS);
            }
            HostError::Limited(Box::new(limited))
        }
        error => error,
    }
}

/// Answer of a model's provider to an operation at URL `path`; an error is for the plugin, and as a failure for the ledger.
async fn forwarded(
    entry: &Entry,
    path: &str,
    body: Bytes,
    asker: Asker,
) -> Result<HttpAnswer, Box<(HostError, Failure)>> {
    let model = &*entry.name;
    let said = |failure: Failure| Box::new((failed(model, &failure), failure));
    let seen = peek(&body, None, &Bounds::default()).map_err(|error| said(error.into()))?;
    let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
    let path = path.strip_prefix("/v1").unwrap_or(path).to_owned();
    let model_at = seen.model_at.map(|at| (at, true));
    let forward = Forward { path, headers, body: Some(body), model_at, trace: None, asker, deadline: None };
    let mut answered = entry.upstream.forward(Arc::new(forward)).await.map_err(said)?;
    let bytes = read(model, &mut answered.response.body, OPERATION_BYTES_MAX).await.map_err(|error| {
        let failure = Failure::new(ErrorKind::ProviderFailed, "The provider's answer could not be read.");
        Box::new((error.clone(), failure.log(error.to_string())))
    })?;
    answered.passage.complete();
    let headers = std::mem::take(&mut answered.response.headers);
    Ok(HttpAnswer { status: answered.response.status, headers, body: bytes })
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
        let models = self.hub.models()?;
        let (principal, client) = self.asker(ask_as);
        let admitted = models.admit_operation(path, model, &principal, client).await;
        let (entry, held) = admitted.map_err(|failure| told_to(ask_as, failed(model, &failure)))?;
        let asked =
            timeout(ANSWER_TIMEOUT, forwarded(&entry, path, body, Asker::new(principal.tenant(), client))).await;
        let asked = asked.unwrap_or_else(|_| {
            let message = "The operation was not answered in time.";
            Err(Box::new((HostError::Timeout(model.to_owned()), Failure::new(ErrorKind::DeadlineExceeded, message))))
        });
        penstock_governed::close(held, asked.as_ref().err().map(|told| &told.1));
        asked.map_err(|told| told.0)
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
        let reports = self.reports.clone();
        let failed = move |reason, detail: &str| reports.iter().for_each(|reports| reports.failed(reason, detail));
        let is_begun = self.hub.spawn(work, failed);
        if let Some(reports) = self.reports.as_ref().filter(|_| !is_begun) {
            reports.failed("dropped", "too many pieces of plugins' background work are running");
        }
        is_begun
    }

    fn failed(&self, why: &str) {
        self.reports.iter().for_each(|reports| reports.failed("error", why));
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

#[cfg(test)]
mod tests {
    use penstock_config::{Members, Overrides, load};
    use penstock_store::{Entry as Noted, EntryFilter, Order, Page, Sqlite, SqliteOptions, Store};
    use penstock_telemetry::AccessLog;
    use penstock_types::{Message, Role};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::Gateway;

    /// Config of a provider at an address, whose model judges; each key may ask twice a day.
    const CONFIG: &str = r#"
[[providers]]
id = "p"
base_url = "http://ADDRESS/v1"
models = ["judge"]
[[limits]]
id = "twice"
for = "everyone"
by = "key"
requests_per_day = 2
"#;

    /// Provider that answers each request with a verdict, and cuts the one about `x`.
    async fn provider(listener: TcpListener) {
        loop {
            let (mut io, _) = listener.accept().await.expect("a connection");
            tokio::spawn(async move {
                let mut asked = Vec::new();
                while !asked.ends_with(b"}") && io.read_buf(&mut asked).await.is_ok_and(|count| count > 0) {}
                let answer: &[u8] = match asked.ends_with(br#""input":"x"}"#) {
                    true => b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\n{",
                    false => b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}",
                };
                io.write_all(answer).await.expect("written");
                io.shutdown().await.expect("closed");
            });
        }
    }

    /// Ended entries of the ledger, once there are as many as that.
    async fn entries(store: &dyn Store, count: usize) -> Vec<Noted> {
        let filter = EntryFilter { until: u64::MAX >> 1, ..EntryFilter::default() };
        let page = Page { after: None, limit: 10, order: Order::Ascending };
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let found = store.entries(&filter, &page).await.expect("read").items;
            if found.len() >= count {
                return found;
            }
            assert!(Instant::now() < until, "{found:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Clients without a key are told apart by their addresses, in what is asked for them too: an operation or a chat.
    #[tokio::test]
    async fn what_is_asked_for_callers_without_a_key_counts_by_their_address() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let text = CONFIG.replace("ADDRESS", &listener.local_addr().expect("bound").to_string());
        let text = text.replace("by = \"key\"", "by = \"address\"").replace("_per_day = 2", "_per_day = 1");
        tokio::spawn(provider(listener));
        let config = load(Some(("test.toml", &text)), &Overrides::default(), &|_| None).expect("valid");
        let providers = penstock_provider::all(&Members::default().providers(&config.providers)).expect("valid");
        let log = AccessLog::open("off").expect("nothing is opened");
        let gateway = Gateway::new(config, log, Vec::new(), providers).shared();
        let host = |last| {
            RequestHost::new(gateway.hub.clone(), Arc::default()).for_client(Some(IpAddr::from([192, 0, 2, last])))
        };
        for last in [1, 2] {
            let message = Message { role: Role::User, content: Some("hi".into()), ..Message::default() };
            let body = r#"{"model":"judge","input":"fine"}"#;
            let first = host(last).operation("/v1/moderations", "judge", body.into(), AskAs::Caller).await;
            assert_eq!(first.expect("an address of its own").status, 200);
            let chat = ChatRequest::new("judge".to_owned(), vec![message]);
            let again = host(last).chat(chat, AskAs::Caller).await;
            assert!(
                matches!(&again, Err(HostError::Limited(limited)) if limited.message.contains("address")),
                "{again:?}"
            );
        }
    }

    #[tokio::test]
    async fn an_operation_passes_limits_and_ledger() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let text = CONFIG.replace("ADDRESS", &listener.local_addr().expect("bound").to_string());
        tokio::spawn(provider(listener));
        let config = load(Some(("test.toml", &text)), &Overrides::default(), &|_| None).expect("valid");
        let store: Arc<dyn Store> =
            Arc::new(Sqlite::open(&SqliteOptions { path: ":memory:".into(), bytes_max: 0 }).expect("opens"));
        let providers = penstock_provider::all(&Members::default().providers(&config.providers)).expect("valid");
        let log = AccessLog::open("off").expect("nothing is opened");
        let gateway = Gateway::new(config, log, Vec::new(), providers).with_store(store.clone());
        let gateway = tokio::task::spawn_blocking(|| gateway.with_ledger()).await.expect("no panic");
        let gateway = gateway.expect("a thread").shared();
        let mut caller = Principal::default();
        caller.key = Some("a".into());
        let host = RequestHost::new(gateway.hub.clone(), Arc::new(caller));
        let ask = |input: &str, ask_as| {
            let body = format!(r#"{{"model":"judge","input":"{input}"}}"#);
            host.operation("/v1/moderations", "judge", body.into(), ask_as)
        };
        assert_eq!(ask("fine", AskAs::Caller).await.expect("answered").status, 200);
        assert_eq!(ask("fine", AskAs::Plugin).await.expect("answered").status, 200);
        let cut = ask("x", AskAs::Caller).await;
        assert!(matches!(&cut, Err(HostError::Failed(why)) if why.starts_with("judge: ")), "{cut:?}");
        let refused = ask("fine", AskAs::Caller).await;
        let Err(HostError::Limited(limited)) = &refused else { panic!("{refused:?}") };
        assert_eq!((limited.rule.as_str(), limited.shape.status), ("twice: requests_per_day", 429));
        assert!(limited.fields.iter().any(|(name, _)| name == "retry-after-ms"), "{limited:?}");
        assert_eq!(ask("fine", AskAs::Plugin).await.expect("its own key").status, 200);
        // A limit of that key counts what is asked for everybody: no client reads its numbers.
        let refused = ask("fine", AskAs::Plugin).await;
        let Err(HostError::Limited(limited)) = &refused else { panic!("{refused:?}") };
        assert_eq!(
            (limited.rule.as_str(), limited.shape),
            ("twice: requests_per_day", error_shape::RATE_LIMIT_REQUESTS)
        );
        assert_eq!(limited.message, OWN_LIMIT);
        assert!(limited.fields.iter().all(|(name, _)| name.as_str().starts_with("retry-after")), "{limited:?}");

        let mut noted: Vec<_> = entries(store.as_ref(), 4).await;
        noted.sort_by(|one, other| {
            (&one.opened.subject.key, one.status).cmp(&(&other.opened.subject.key, other.status))
        });
        let told: Vec<_> = noted
            .iter()
            .map(|entry| (entry.opened.subject.key.as_str(), entry.opened.subject.route.as_str(), entry.status))
            .collect();
        let route = "/v1/moderations";
        assert_eq!(told, [("a", route, 200), ("a", route, 502), (PLUGINS, route, 200), (PLUGINS, route, 200)]);
        assert!(noted.iter().all(|entry| &*entry.opened.subject.model == "judge" && entry.micro_usd == 0));
    }
}
