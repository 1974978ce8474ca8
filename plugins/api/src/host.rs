//! Services that a plugin can ask of the process around it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use penstock_types::error_shape::ErrorShape;
use penstock_types::{ChatEvent, ChatRequest, Usage};

use crate::verdict::RejectionKind;

/// Boxed future that can be stored and sent between threads.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send + 'static>>;

/// Identity under which a model is asked, which decides scopes, limits and bill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AskAs {
    /// Key of the client's request: its scopes and limits apply, and the use is billed to it.
    #[default]
    Caller,
    /// The plugin itself: every model of this gateway, no caller's limits.
    Plugin,
}

/// URL that the config names. Only [`crate::Settings::endpoint`] makes one, so nothing in a request can.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    url: Arc<str>,
}

impl Endpoint {
    pub(crate) fn new(url: &str) -> Self {
        Self { url: url.into() }
    }

    /// URL as it is written in the config.
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// Request to an endpoint of the config, with bounds of time and size.
#[derive(Clone, Debug)]
pub struct HttpAsk {
    /// Method of the HTTP request.
    pub method: Method,
    /// Path and query behind the endpoint's; empty: the endpoint's own.
    pub path: String,
    /// Header fields of the request besides Host and Content-Length, which the host sets.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Body that the HTTP request carries.
    pub body: Bytes,
    /// Time within which the answer must be complete.
    pub timeout: Duration,
    /// Largest answer that is read, in bytes.
    pub bytes_max: usize,
}

/// Answer of an endpoint, whatever its status. Redirects are never followed: they come back as they are.
#[derive(Clone, Debug)]
pub struct HttpAnswer {
    /// HTTP status of the answer, whatever it is.
    pub status: u16,
    /// Header fields of the answer.
    pub headers: HeaderMap,
    /// Body of the answer, complete.
    pub body: Bytes,
}

/// Answer of a model that a plugin asked, complete.
#[derive(Clone, Debug, Default)]
pub struct ModelAnswer {
    /// Events of the answer of all choices, in order.
    pub events: Vec<ChatEvent>,
    /// Token counts as the upstream reported them.
    pub usage: Usage,
}

impl ModelAnswer {
    /// Visible text of the answer's first choice, in one piece.
    pub fn text(&self) -> String {
        let texts = self.events.iter().filter_map(|event| match event {
            ChatEvent::Text { choice: 0, text, .. } => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }
}

/// Refusal, by a limit of the gateway, of what a plugin asks of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limited {
    /// Id of the limit and name of its measure.
    pub rule: String,
    /// Message that the client reads.
    pub message: String,
    /// Kind of the refusal: too much, or a limit that cannot be counted at the moment.
    pub kind: RejectionKind,
    /// Status, type and code of the error.
    pub shape: ErrorShape,
    /// True if a retry soon can help.
    pub retry: bool,
    /// Delay after which a retry can help.
    pub retry_after: Option<Duration>,
    /// Header fields with the standing of the limit.
    pub fields: Vec<(HeaderName, HeaderValue)>,
}

/// Failure of a service of the host. The text is for the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// A limit of the gateway refuses what was asked of a model. A plugin that hands the error on has its request refused by
    /// that limit, whatever `on_fail` says: the plugin has not failed.
    #[error("refused by the limit {}", .0.rule)]
    Limited(Box<Limited>),
    /// The service gave no answer within its time limit.
    #[error("{0}: no answer in time")]
    Timeout(String),
    /// The service's answer is larger than was allowed.
    #[error("{0}: the answer is larger than allowed")]
    TooLarge(String),
    /// The service gave no answer, or answered with an error.
    #[error("{0}")]
    Failed(String),
    /// The host lacks the service, or the config does not provide it.
    #[error("{0}")]
    Unavailable(String),
}

/// Process around the plugins. Every wait has a bound. Requests to models pass limits and ledger but no plugins, so a
/// plugin's own request never comes back to a plugin.
#[async_trait]
pub trait Host: Send + Sync {
    /// Asks a chat model of this gateway.
    async fn chat(&self, request: ChatRequest, ask_as: AskAs) -> Result<ModelAnswer, HostError>;

    /// Asks an embedding model of this gateway for one vector per text.
    async fn embed(&self, model: &str, texts: Vec<String>, ask_as: AskAs) -> Result<Vec<Vec<f32>>, HostError>;

    /// Passes a body on to the provider of `model`, at an operation that no dialect here reads, such as
    /// `/v1/moderations`.
    async fn operation(&self, path: &str, model: &str, body: Bytes, ask_as: AskAs) -> Result<HttpAnswer, HostError>;

    /// Sends a request to an endpoint of the config.
    async fn http(&self, endpoint: &Endpoint, ask: HttpAsk) -> Result<HttpAnswer, HostError>;

    /// Value in the cache that all gateways with the same store share.
    async fn cache_get(&self, key: &str) -> Result<Option<Bytes>, HostError>;

    /// Writes a value into that cache, for the time `keep`.
    async fn cache_put(&self, key: &str, value: Bytes, keep: Duration) -> Result<(), HostError>;

    /// Appends a line to a file that the config names. Never waits for the file: one that is written too slowly, or cannot be
    /// opened, loses lines, which are counted.
    fn append(&self, path: &str, line: Vec<u8>);

    /// Future that is ready after `time`.
    fn sleep(&self, time: Duration) -> BoxFuture<()>;

    /// Runs background work, if there is room for it; the work has a deadline. False where there is no room. Work that finds no
    /// room, panics or does not end in time is reported by the host, as [`Host::failed`] reports an error.
    fn spawn(&self, work: BoxFuture<()>) -> bool;

    /// Reports an error of the plugin's background work, which no hook returns: a warning in the log, and a count in
    /// `penstock_plugin_failures_total`. A host without log and metrics does nothing. `why` is for the log.
    fn failed(&self, _why: &str) {}

    /// Time since 1970 by the wall clock.
    fn since_epoch(&self) -> Duration;

    /// Next 64 random bits, for example to draw a share of the requests.
    fn random(&self) -> u64;
}
