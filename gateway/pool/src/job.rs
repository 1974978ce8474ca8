//! Jobs that go into a pool and events that come out: the types between the request path and the fleet.

use penstock_http::client::Sent;
use penstock_proto::frames::{Guide, Output, Pooling, Sampling};
use penstock_proto::{AdapterId, ErrorKind};
use penstock_router::Needs;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most choices (parallel answers to the prompt) of one request; a job with more is refused as [`PoolError::Invalid`].
pub const CHOICES_MAX: u32 = 128;

/// Most prompt tokens of one request: fits into a frame of the worker protocol with room to spare.
pub const PROMPT_TOKENS_MAX: usize = 1 << 20;

/// One request, tokenized. The caller has checked it against the model (context, vocabulary, bounds of sampling); the engine
/// checks again.
#[derive(Clone, Debug)]
pub struct Job {
    /// Prompt token ids, at least one.
    pub prompt: Arc<[u32]>,
    /// Choices, 1 to [`CHOICES_MAX`]. Choice `i` draws with the randoms of (seed, i).
    pub choices: u32,
    /// Sampling parameters; the seed is set (drawn by the caller when the client gave none).
    pub sampling: Sampling,
    /// Salt of the block hash: tenant, model, adapter, `cache_salt`.
    pub salt: Arc<[u8]>,
    /// Priority among waiting requests: lower numbers run first, 0 is normal.
    pub priority: i32,
    /// Instant at which an unfinished request fails with [`ErrorKind::DeadlineExceeded`]; `None`: never.
    pub deadline: Option<Instant>,
    /// Tenant of the request: waiting requests of several tenants share the workers fairly.
    pub tenant: Arc<str>,
    /// Weight of the tenant in the fair sharing of workers; 0 counts as 1.
    pub weight: u32,
    /// Hash of the conversation, for a policy that keeps conversations at one worker; `None`: a conversation of its own.
    pub session: Option<u64>,
    /// True if the client named the conversation or a cache key: where nothing else decides, one worker gets all of it.
    pub keyed: bool,
    /// Grammar of every choice's output; `None` leaves it free.
    pub grammar: Option<Arc<Guided>>,
    /// Adapter that the model runs with; `None`: the model alone. `salt` contains it too.
    pub adapter: Option<AdapterId>,
    /// Rule of the vector that is wanted instead of tokens; with one, the job has a single choice.
    pub pooling: Pooling,
    /// Index of the first token of the second text; 0: there is no second text. With one, `pooling` is that of a classification head.
    pub second_text: u32,
    /// Dense layers that the vector goes through behind the pooling.
    pub dense_layers: u32,
    /// Index of the first token that is pooled.
    pub pooled_from: u32,
    /// True if the binding should report the router's reasons.
    pub explain: bool,
    /// Flag that the pool sets when it gives the job to a worker: from then on the prompt is computed.
    pub sent: Sent,
}

/// Grammar of a job, and the workers that may follow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guided {
    /// Id of the grammars that a worker must announce: only workers of an equal one mask alike.
    pub id: Arc<str>,
    /// Grammar as the workers take it.
    pub guide: Guide,
}

impl Job {
    /// Abilities that a worker must have for the job.
    pub(super) fn needs(&self) -> Needs {
        let needs = needs(&self.sampling, self.grammar.as_deref());
        let of_vector = self.pooling.needs().and(Pooling::chain_needs(self.dense_layers, self.pooled_from));
        Needs { capabilities: needs.capabilities.and(of_vector), adapter: self.adapter, ..needs }
    }

    pub(super) fn check(&self) -> Result<(), PoolError> {
        let what = match (self.prompt.len(), self.choices) {
            (0, _) => "the prompt has no tokens",
            (tokens, _) if tokens > PROMPT_TOKENS_MAX => "the prompt has too many tokens for any worker",
            (_, 0) => "no choices are asked for",
            (_, choices) if choices > CHOICES_MAX => "too many choices are asked for",
            _ => return Ok(()),
        };
        Err(PoolError::Invalid { what })
    }
}

/// Abilities that a worker must have to sample by `sampling` under a grammar.
pub fn needs(sampling: &Sampling, grammar: Option<&Guided>) -> Needs {
    Needs {
        grammar: grammar.map(|grammar| Arc::clone(&grammar.id)),
        capabilities: sampling.needs(),
        ..Needs::default()
    }
}

/// Events of a request, as its [`Ticket`](super::Ticket) returns them.
#[derive(Clone, Debug, PartialEq)]
pub enum PoolEvent {
    /// Tokens of one choice, in order, each once; `at` is the index of the first of them. `finish` ends the choice.
    Output(Output),
    /// The request was given to a worker. Handed out together with the worker's first output;
    /// [`Ticket::is_bound`](super::Ticket::is_bound) tells of the binding before.
    Bound {
        /// Name of the worker that the request was bound to.
        worker: Arc<str>,
        /// Time that the request had waited in the router's queue before the binding.
        waited: Duration,
        /// Reasons of the router's choice as one line of text; `None`: the job did not ask for them.
        route: Option<Arc<str>>,
    },
    /// The worker was lost and the request goes on elsewhere. An inexact continuation runs in other numerics, so its
    /// tokens may differ from those of an undisturbed run.
    Resumed {
        /// True if both workers compute with equal numerics, so that the text continues as it would have without the
        /// loss.
        exact: bool,
    },
    /// The request was migrated: it goes on at another worker while the first one lives. Always exact.
    Moved {
        /// Name of the worker that the request goes on at.
        worker: Arc<str>,
    },
    /// The next output is the first one after the request changed its worker.
    Gap {
        /// Cause of the change: the loss of a worker, or a migration.
        why: Gap,
        /// Time from the last token before the change to the first one after it.
        time: Duration,
    },
    /// The request cannot go on. Always the last event.
    Failed {
        /// Kind of the error, as the API reports it to the client.
        kind: ErrorKind,
        /// Message for client and log; without addresses and tokens.
        message: String,
        /// Time after which the client may retry; `None`: the gateway suggests none.
        retry_after: Option<Duration>,
    },
}

/// Cause of a change of worker in the middle of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gap {
    /// The worker was lost, or passed the request on.
    Lost,
    /// The request was migrated to another worker while its first worker lived.
    Moved,
}

/// Reason that the pool did not take a request.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PoolError {
    /// No worker of the pool is ready, and none is expected within the allowed wait.
    #[error("no worker of the pool is ready{}", .why.as_ref().map(|why| format!(": the last one ended, {why}")).unwrap_or_default())]
    Unavailable {
        /// Description of the end of a worker's process; `None`: none has ended.
        why: Option<String>,
        /// Time after which the client may retry, for `Retry-After`.
        retry_after: Duration,
    },
    /// As many requests are open, waiting or running, as the configuration allows.
    #[error("{open} requests are open, limit {limit}")]
    Overloaded {
        /// Number of open requests at the refusal.
        open: usize,
        /// Most open requests, from [`PoolConfig::requests_max`](crate::PoolConfig::requests_max).
        limit: usize,
        /// Time after which the client may retry, for `Retry-After`.
        retry_after: Duration,
    },
    /// The pool is shutting down and takes no new requests; open ones may finish.
    #[error("the pool is shutting down")]
    Draining,
    /// The job breaks a bound: an empty or too long prompt, no or too many choices.
    #[error("{what}")]
    Invalid {
        /// Description of the bound that the job breaks.
        what: &'static str,
    },
}

impl PoolError {
    /// Kind of the error, as the API reports it to the client.
    pub fn kind(&self) -> ErrorKind {
        match self {
            PoolError::Unavailable { .. } => ErrorKind::Unavailable,
            PoolError::Overloaded { .. } => ErrorKind::Overloaded,
            PoolError::Draining => ErrorKind::Draining,
            PoolError::Invalid { .. } => ErrorKind::InvalidRequest,
        }
    }

    /// Time after which a retry makes sense.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            PoolError::Unavailable { retry_after, .. } | PoolError::Overloaded { retry_after, .. } => {
                Some(*retry_after)
            }
            PoolError::Draining => Some(Duration::from_secs(1)),
            PoolError::Invalid { .. } => None,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A job of three tokens, with up to 100 tokens of output per choice.
    pub(crate) fn job(choices: u32) -> Job {
        Job {
            prompt: vec![1, 2, 3].into(),
            choices,
            sampling: Sampling { max_tokens: 100, prompt_logprobs: 0, ..Default::default() },
            salt: Arc::from(&b""[..]),
            priority: 0,
            deadline: None,
            tenant: Arc::default(),
            weight: 1,
            session: None,
            keyed: false,
            grammar: None,
            adapter: None,
            pooling: Pooling::None,
            second_text: 0,
            dense_layers: 0,
            pooled_from: 0,
            explain: false,
            sent: Sent::default(),
        }
    }
}
