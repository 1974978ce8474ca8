//! What goes into a pool and what comes out: the vocabulary between the request path and the fleet.

use penstock_proto::ErrorKind;
use penstock_proto::frames::{Output, Sampling};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Choices of one request at most.
pub const CHOICES_MAX: u32 = 128;

/// Prompt tokens of one request at most: what fits into a frame of the contract with room.
pub const PROMPT_TOKENS_MAX: usize = 1 << 20;

/// One request, tokenized. The caller has checked it against the model (context, vocabulary, bounds of sampling); the engine
/// checks again.
#[derive(Clone, Debug)]
pub struct Job {
    /// Prompt token ids, at least one.
    pub prompt: Arc<[u32]>,
    /// Choices, 1 to [`CHOICES_MAX`]. Choice `i` draws with the randoms of (seed, i).
    pub choices: u32,
    /// How tokens are drawn; the seed is set (drawn by the caller when the client gave none).
    pub sampling: Sampling,
    /// Salt of the block hash: tenant, model, adapter, cache_salt.
    pub salt: Arc<[u8]>,
    /// Lower runs first; 0 is normal.
    pub priority: i32,
    /// When the request fails with [`ErrorKind::DeadlineExceeded`] if it has not ended; `None`: never.
    pub deadline: Option<Instant>,
    /// Whose it is: waiting requests of several tenants share the workers fairly.
    pub tenant: Arc<str>,
    /// The tenant's share against others'; 0 counts as 1.
    pub weight: u32,
    /// What its conversation is told from others by, for a policy that keeps conversations together; `None`: it is one of its own.
    pub session: Option<u64>,
    /// Say with the binding why it is what it is.
    pub explain: bool,
}

impl Job {
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

/// What a request's [`Ticket`](super::Ticket) gives out.
#[derive(Clone, Debug, PartialEq)]
pub enum PoolEvent {
    /// Tokens of one choice, in order, each once; `at` is the index of the first of them. `finish` ends the choice.
    Output(Output),
    /// The request was given to a worker. Comes with what the worker says first.
    Bound {
        /// Its name.
        worker: Arc<str>,
        /// How long the request had waited.
        waited: Duration,
        /// Why there, where the job asked.
        route: Option<Arc<str>>,
    },
    /// The worker was lost and the request goes on elsewhere. Not exact: in other numerics, so tokens from here on may differ
    /// from an undisturbed run's.
    Resumed {
        /// Whether the continuation is bit-exact.
        exact: bool,
    },
    /// The request goes on at another worker while the first one lives: a migration. Always exact.
    Moved {
        /// The other worker's name.
        worker: Arc<str>,
    },
    /// The next output is the first one after the request changed its worker.
    Gap {
        /// Why it did.
        why: Gap,
        /// From the last token before to the first one after.
        time: Duration,
    },
    /// The request cannot go on. The last event.
    Failed {
        /// What happened.
        kind: ErrorKind,
        /// For client and log; no addresses, no tokens.
        message: String,
        /// When it is worth trying again.
        retry_after: Option<Duration>,
    },
}

/// Why a request changed its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gap {
    /// The worker was lost, or passed the request on.
    Lost,
    /// It was moved.
    Moved,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PoolError {
    /// No worker can serve now.
    #[error("no worker of the pool is ready{}", .why.as_ref().map(|why| format!(": the last one ended, {why}")).unwrap_or_default())]
    Unavailable {
        /// How a worker ended, if one did.
        why: Option<String>,
        /// When it is worth trying again.
        retry_after: Duration,
    },
    /// Too many requests are open.
    #[error("{open} requests are open, limit {limit}")]
    Overloaded {
        /// Open requests.
        open: usize,
        /// The limit.
        limit: usize,
        /// When it is worth trying again.
        retry_after: Duration,
    },
    /// The gateway is shutting down.
    #[error("the pool is shutting down")]
    Draining,
    /// The job is not one: no prompt, no or too many choices.
    #[error("{what}")]
    Invalid {
        /// What is wrong.
        what: &'static str,
    },
}

impl PoolError {
    /// The kind at the edge.
    pub fn kind(&self) -> ErrorKind {
        match self {
            PoolError::Unavailable { .. } => ErrorKind::Unavailable,
            PoolError::Overloaded { .. } => ErrorKind::Overloaded,
            PoolError::Draining => ErrorKind::Draining,
            PoolError::Invalid { .. } => ErrorKind::InvalidRequest,
        }
    }

    /// When it is worth trying again.
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
