//! Pace that several gateways keep together: the seam to the counters that they share.
//!
//! The counters belong to the limits (`proxy::governed`), which sit above providers; this file says what a pacer needs of
//! them. A provider that was not given any, or whose counters do not answer, paces at its part of the rate (`pace_gateways`).

use std::sync::Arc;

use async_trait::async_trait;
use sha2::{Digest, Sha256};

use crate::PacingConfig;
use crate::pace::Request;

/// Counters of what all gateways together have sent with each key in the last minute.
#[async_trait]
pub trait SharedPace: Send + Sync {
    /// Returns true if the counters answered last time, so that asking is worth a wait.
    fn is_up(&self) -> bool;

    /// Counts one request, of `asked.tokens` tokens for now, if the last minute of the key has room for it.
    async fn take(&self, asked: &SharedAsk<'_>) -> SharedAnswer;
}

/// Request that is to be counted by all gateways together.
#[derive(Clone, Copy, Debug)]
pub struct SharedAsk<'a> {
    /// Name of the key, the same at every gateway; a hash, not the key.
    pub key: &'a str,
    /// Requests of the key in a minute, of which an extra attempt leaves a part to first attempts; 0: not paced.
    pub requests_per_minute: u64,
    /// Tokens of the key in a minute, of which an extra attempt leaves a part to first attempts; 0: not paced.
    pub tokens_per_minute: u64,
    /// Estimated tokens of this request, at most `tokens_per_minute`.
    pub tokens: u64,
}

/// Answer of the shared counters to one request.
pub enum SharedAnswer {
    /// The request is counted, and may be sent.
    Counted(Box<dyn SharedHold>),
    /// The last minute has no room for it.
    Full,
    /// The counters do not answer: the gateway paces by itself. The request is counted when they do.
    Away(Box<dyn SharedHold>),
}

/// Count of one request, corrected when its tokens are known.
pub trait SharedHold: Send + Sync {
    /// Sets the tokens that were used; `None`: unknown, the estimate stays. `is_sent`: false takes the request back too.
    fn settle(self: Box<Self>, is_sent: bool, tokens: Option<u64>);
}

impl<'a> SharedAsk<'a> {
    pub(crate) fn new(key: &'a str, config: &PacingConfig, request: Request) -> Self {
        let tokens = request.tokens.min(config.tokens_per_minute);
        Self {
            key,
            requests_per_minute: request.most_of(config.requests_per_minute.into(), 1),
            tokens_per_minute: request.most_of(config.tokens_per_minute, tokens),
            tokens,
        }
    }
}

/// Name under which gateways count a provider's key together: a hash, since the counters' server may be read by others.
pub(crate) fn key_name(target: &str, secret: &str) -> String {
    let hash = Sha256::new().chain_update(target).chain_update([0]).chain_update(secret).finalize();
    hash[..12].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Handle through which a provider gets the shared counters, when there are any.
pub(crate) type Handle = std::sync::OnceLock<Arc<dyn SharedPace>>;
