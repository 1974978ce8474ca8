//! What a plugin asks of the process around it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use penstock_dialects::{ChatEvent, ChatRequest, Usage};

/// A future that can be kept.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send + 'static>>;

/// In whose name a model is asked: whose scopes, limits and bill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AskAs {
    /// Whoever sent the request.
    #[default]
    Caller,
    /// The plugin: every model of this gateway, no caller's limits.
    Plugin,
}

/// A URL that the config names. Only [`crate::Settings::endpoint`] makes one, so nothing in a request can.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    url: Arc<str>,
}

impl Endpoint {
    pub(crate) fn new(url: &str) -> Self {
        Self { url: url.into() }
    }

    /// As it is written in the config.
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// A request to an endpoint.
#[derive(Clone, Debug)]
pub struct HttpAsk {
    /// Method.
    pub method: Method,
    /// Path and query behind the endpoint's; empty: the endpoint's own.
    pub path: String,
    /// Fields besides Host and Content-Length.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Body.
    pub body: Bytes,
    /// When the answer must be complete.
    pub timeout: Duration,
    /// Largest answer that is read.
    pub bytes_max: usize,
}

/// What an endpoint answered, whatever its status. Redirects are never followed: they come back as they are.
#[derive(Clone, Debug)]
pub struct HttpAnswer {
    /// Status.
    pub status: u16,
    /// Fields.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

/// What a model answered.
#[derive(Clone, Debug, Default)]
pub struct ModelAnswer {
    /// All events.
    pub events: Vec<ChatEvent>,
    /// Counts.
    pub usage: Usage,
}

impl ModelAnswer {
    /// Visible text of the first choice.
    pub fn text(&self) -> String {
        let texts = self.events.iter().filter_map(|event| match event {
            ChatEvent::Text { choice: 0, text, .. } => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }
}

/// What the host could not do. The text is for the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// It took too long.
    #[error("{0}: no answer in time")]
    Timeout(String),
    /// The answer is larger than was allowed.
    #[error("{0}: the answer is larger than allowed")]
    TooLarge(String),
    /// Nobody answered, or an error did.
    #[error("{0}")]
    Failed(String),
    /// This host has no such thing.
    #[error("{0}")]
    Unavailable(String),
}

/// The process around the plugins. Every wait ends by itself; what is asked of models passes limits and ledger, and no plugins: what
/// plugins ask can never come back to them.
#[async_trait]
pub trait Host: Send + Sync {
    /// Asks a chat model of this gateway.
    async fn chat(&self, request: ChatRequest, ask_as: AskAs) -> Result<ModelAnswer, HostError>;

    /// Asks an embedding model of this gateway for one vector per text.
    async fn embed(&self, model: &str, texts: Vec<String>, ask_as: AskAs) -> Result<Vec<Vec<f32>>, HostError>;

    /// Passes a body on to whoever serves `model` at an operation that no dialect here reads, as `/v1/moderations`.
    async fn operation(&self, path: &str, model: &str, body: Bytes, ask_as: AskAs) -> Result<HttpAnswer, HostError>;

    /// Asks an endpoint of the config.
    async fn http(&self, endpoint: &Endpoint, ask: HttpAsk) -> Result<HttpAnswer, HostError>;

    /// Reads the cache that all gateways with the same store share.
    async fn cache_get(&self, key: &str) -> Result<Option<Bytes>, HostError>;

    /// Writes it.
    async fn cache_put(&self, key: &str, value: Bytes, keep: Duration) -> Result<(), HostError>;

    /// Appends a line to a file that the config names. Waits for nothing: a file that cannot be written as fast loses lines, which are
    /// counted.
    fn append(&self, path: &str, line: Vec<u8>);

    /// Waits.
    fn sleep(&self, time: Duration) -> BoxFuture<()>;

    /// Runs work that nobody waits for, if there is room for it; it has a deadline.
    fn spawn(&self, work: BoxFuture<()>) -> bool;

    /// Time since 1970.
    fn since_epoch(&self) -> Duration;

    /// Random bits.
    fn random(&self) -> u64;
}
