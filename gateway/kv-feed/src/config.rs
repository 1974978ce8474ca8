//! Settings of one feed: `kv_events` of a provider.

use std::path::PathBuf;

use crate::Endpoint;

/// Publisher of a server's KV cache events (vLLM, SGLang).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// Endpoint of the PUB socket on which the server publishes its batches of events.
    pub endpoint: Endpoint,
    /// Endpoint of the socket that repeats missed batches; `None`: missed batches are lost.
    pub replay: Option<Endpoint>,
    /// Folder of the model's tokenizer and chat template.
    pub tokenizer: PathBuf,
}
