//! Settings of one provider: `[[providers]]` of the config.

use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use penstock_base::Secret;
use penstock_http::client::Target;
use penstock_kv_feed::KvEventsConfig;

use crate::Protocol;

/// Provider as the config describes it, checked and split into typed fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderConfig {
    /// Name of the provider in routes, logs and metrics.
    pub id: String,
    /// Protocol in which the provider's API is spoken.
    pub protocol: Protocol,
    /// Base URL of the provider's API, split for connecting.
    pub target: Target,
    /// API keys; empty: requests are sent without one.
    pub keys: Vec<Secret>,
    /// File that the keys came from; it is read again every few seconds.
    pub key_file: Option<PathBuf>,
    /// Models that clients ask for by the provider's own names.
    pub models: Vec<String>,
    /// True if the host name of `target` stands for several servers: each of its addresses is a provider of its own.
    pub resolve: bool,
    /// True if the provider's list of models is fetched at start and periodically.
    pub discover: bool,
    /// Header fields of the config that are sent with every request to the provider.
    pub headers: Vec<(HeaderName, Secret)>,
    /// Certificates to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// Time limit to a connection, TLS included.
    pub connect_timeout: Duration,
    /// Time limit to the first content of a stream.
    pub first_token_timeout: Duration,
    /// Longest silence between two pieces of an answer.
    pub idle_timeout: Duration,
    /// Time limit to the head of an answer that is not streamed.
    pub answer_timeout: Duration,
    /// Value of the query parameter `api-version`, which Azure requires.
    pub api_version: Option<String>,
    /// Cloud region that serves the models, for Bedrock and Vertex.
    pub region: Option<String>,
    /// Google Cloud project that is billed, for Vertex.
    pub project: Option<String>,
    /// Path that health probes ask for; `None`: no probes.
    pub health_path: Option<String>,
    /// Time between two health probes, and the time limit of each.
    pub health_interval: Duration,
    /// Most requests to the provider that may be in flight at once.
    pub in_flight_max: usize,
    /// Rate at which each key is used, as the provider allows.
    pub pacing: PacingConfig,
    /// True if token counts are asked for in streams whose client did not ask.
    pub stream_usage: bool,
    /// Source of the provider's KV cache events.
    pub kv_events: Option<KvEventsConfig>,
}

#[cfg(test)]
impl ProviderConfig {
    /// Provider of OpenAI's protocol at an address, without keys, paces and probes.
    pub(crate) fn at(target: Target) -> Self {
        let seconds = Duration::from_secs;
        Self {
            id: "acme".into(),
            protocol: Protocol::OpenAi,
            target,
            keys: Vec::new(),
            key_file: None,
            models: Vec::new(),
            resolve: false,
            discover: false,
            headers: Vec::new(),
            ca_file: None,
            connect_timeout: seconds(5),
            first_token_timeout: seconds(60),
            idle_timeout: seconds(60),
            answer_timeout: seconds(60),
            api_version: None,
            region: None,
            project: None,
            health_path: None,
            health_interval: seconds(10),
            in_flight_max: 8,
            pacing: PacingConfig { requests_per_minute: 0, tokens_per_minute: 0, gateways: 1, wait: seconds(5) },
            stream_usage: true,
            kv_events: None,
        }
    }
}

/// Pacing: rate at which a provider allows each key to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacingConfig {
    /// Requests per minute; 0: unknown, not paced.
    pub requests_per_minute: u32,
    /// Tokens per minute; 0: unknown, not paced.
    pub tokens_per_minute: u64,
    /// Longest wait of a request for its turn; one predicted to wait longer is refused.
    pub wait: Duration,
    /// Gateways that share the keys; each paces at its part of the rate.
    pub gateways: u32,
}

impl PacingConfig {
    /// Returns true if a rate of requests or of tokens is set, so that keys are paced.
    pub fn is_set(&self) -> bool {
        self.requests_per_minute > 0 || self.tokens_per_minute > 0
    }
}

/// Keys in a file, one per line; blank and unsendable lines are skipped.
pub fn keys_in(text: &str) -> Vec<Secret> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.filter(|line| HeaderValue::from_str(line).is_ok()).map(Secret::new).collect()
}
