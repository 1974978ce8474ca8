//! Settings of one feed: `kv_events` of a provider.

use std::path::PathBuf;

use crate::Endpoint;

/// Publisher of a server's KV cache events (vLLM, SGLang).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// PUB socket of the server.
    pub endpoint: Endpoint,
    /// Replay socket of the server.
    pub replay: Option<Endpoint>,
    /// Folder of the model's tokenizer and chat template.
    pub tokenizer: PathBuf,
}
