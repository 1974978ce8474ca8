//! Interface of everything that answers requests: one trait for our own pools, providers, and the doubles in tests.
//!
//! [`Upstream`] answers a [`Call`] with [`Events`]; [`Forward`] and [`Forwarded`] are for operations that are passed on unread. A reader who
//! knows this crate knows what a pool, a provider and a relay of several look like from above.
//!
//! Deliberately absent: any one upstream; routes, keys, limits.
#![forbid(unsafe_code)]

pub mod answer_memory;
pub mod breaker;
pub mod call;
pub mod debounce;
pub mod forward;
pub mod lane;
pub mod reasoning_signer;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use penstock_proto::ErrorKind;
use penstock_telemetry::Attempt;
use penstock_types::{ChatEvent, DetokenizeRequest, FinishReason, ServiceTier, TokenizeRequest, Usage};

use penstock_kv_feed::Feed;

pub use answer_memory::{ANSWER_BYTES_MAX, AnswerMemory};
pub use call::Call;
pub use forward::{Forward, Forwarded};
pub use penstock_base::asker::Asker;
use penstock_base::error::Failure;
use penstock_govern::prices::Price;
pub use penstock_http::client::Sent;
use penstock_telemetry::Trace;

/// Time that a request has waited in this gateway for the pace of its upstream; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Waited(Arc<Waits>);

#[derive(Debug, Default)]
struct Waits {
    /// Sum of the waits that have ended, in nanoseconds.
    ended: AtomicU64,
    is_waiting: AtomicBool,
}

impl Waited {
    /// Notes that a wait begins.
    pub fn begin(&self) {
        self.0.is_waiting.store(true, Ordering::Relaxed);
    }

    /// Adds a wait that has ended.
    pub fn add(&self, wait: Duration) {
        self.0.is_waiting.store(false, Ordering::Relaxed);
        self.0.ended.fetch_add(wait.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Returns true between the beginning and the end of a wait.
    pub fn is_waiting(&self) -> bool {
        self.0.is_waiting.load(Ordering::Relaxed)
    }

    /// Sum of the waits that have ended.
    pub fn get(&self) -> Duration {
        Duration::from_nanos(self.0.ended.load(Ordering::Relaxed))
    }
}

/// Facts about a model that `/v1/models` shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Name by which requests ask for the model.
    pub id: String,
    /// Time of the model's creation, in Unix seconds.
    pub created: u64,
    /// Context length, in tokens; 0 until known.
    pub context_tokens: u32,
    /// Task of a model of ours: `generate`, `embed` or `rerank`; `None`: not known here.
    pub task: Option<&'static str>,
    /// Name of the model that this one is an adapter of; `None`: it is none.
    pub parent: Option<String>,
}

/// Facts about a request that are not in the request itself.
#[derive(Clone, Debug, Default)]
pub struct Origin {
    /// Tenant id of the client, which separates prefix caches; empty for nobody.
    pub tenant: String,
    /// Tenant's share of our workers against other tenants'; 0 counts as 1.
    pub weight: u32,
    /// Conversation's name in the client's header, which wins over the body's.
    pub session: Option<Box<str>>,
    /// Instant by which the whole answer must have ended; `None`: no limit.
    pub deadline: Option<Instant>,
    /// Instant by which the first token must have come, without the wait for the upstream's pace; `None`: the model sets no
    /// limit.
    pub first_by: Option<Instant>,
    /// Trace that the answer's spans belong to; `None`: no trace is kept for the request.
    pub trace: Option<Arc<Trace>>,
    /// True where the client asks which worker was chosen and why.
    pub explain: bool,
    /// True for an attempt that the retry budget pays: it takes only what first attempts leave of the upstream's pace.
    pub is_extra: bool,
    /// Flag that is set when the request has gone out.
    pub sent: Sent,
    /// Time that the request has waited for the upstream's pace: the clock of the first token does not run then.
    pub waited: Waited,
    /// Budget that answer bytes held in memory are charged to.
    pub memory: AnswerMemory,
}

impl Origin {
    /// Identity for whatever is shared out among keys; a request without a key counts as its address.
    pub fn asker(&self, call: &Call) -> Asker {
        Asker::new(&self.tenant, call.client)
    }
}

/// An answerer of requests for one model: a pool, a provider's model, or a relay over several. No method has a default:
/// an upstream that wraps another (a pool's slot, a relay) could otherwise forget to forward a call without an error.
#[async_trait]
pub trait Upstream: Send + Sync + 'static {
    /// Facts about the model that `/v1/models` shows.
    fn card(&self) -> Card;

    /// Reason why requests cannot be taken now; `None`: they can.
    fn unready(&self) -> Option<String>;

    /// Returns true if an answer would begin without a model being loaded first.
    fn is_loaded(&self) -> bool {
        self.unready().is_none()
    }

    /// Checks the call and starts it. Dropping the events cancels the call wherever it is. The events may hold the call
    /// until the first of them is taken, not longer.
    async fn open(&self, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure>;

    /// Input tokens of a call, counted without an answer; `None`: the upstream cannot count.
    async fn count(&self, call: Arc<Call>) -> Result<Option<u64>, Failure>;

    /// Counts the tokens that a call needs, where that is possible before it is answered. The work that counting takes (a tokenized
    /// prompt) is in the result, so that it is done once.
    async fn measure(self: Arc<Self>, call: &Call) -> Result<Prepared, Failure>;

    /// Passes on an operation that no dialect here reads; fails where no provider is behind the model.
    async fn forward(&self, forward: Arc<Forward>) -> Result<Forwarded, Failure>;

    /// JSON body of the reply to `/tokenize`; a failure where the upstream has no tokenizer here.
    async fn tokenize(&self, request: TokenizeRequest) -> Result<Vec<u8>, Failure>;

    /// JSON body of the reply to `/detokenize`; a failure where the upstream has no tokenizer here.
    async fn detokenize(&self, request: DetokenizeRequest) -> Result<Vec<u8>, Failure>;

    /// Feed of prefix cache events, where a server that is not ours publishes one.
    fn feed(&self) -> Option<Arc<Feed>>;

    /// Gauges of the engine behind the upstream, for `/metrics`.
    fn gauges(&self, out: &mut dyn FnMut(penstock_telemetry::Gauge, f64));

    /// Gauges of single workers behind the upstream, each with the worker's name; most upstreams have none.
    fn worker_gauges(&self, _: &mut dyn FnMut(penstock_telemetry::Gauge, &str, f64)) {}
}

/// Refusal of an operation that only a provider could do.
pub fn not_forwarded() -> Failure {
    let message = "This model is not served by a provider that could do this.";
    Failure::new(ErrorKind::Unsupported, message).param("model")
}

/// Result of [`Upstream::measure`]: the counts, and the start that reuses the work done for them.
#[derive(Default)]
pub struct Prepared {
    /// Token counts; `None`: they can only be estimated.
    pub measured: Option<Measured>,
    /// Start of the call over what was computed for the counts; `None`: nothing was, and [`Upstream::open`] does as well.
    pub opener: Option<Box<dyn Open>>,
}

/// Start of a call over the work that counting its tokens has done already.
#[async_trait]
pub trait Open: Send + Sync {
    /// As [`Upstream::open`] of the upstream that has measured the call.
    async fn open(self: Box<Self>, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure>;
}

/// Token counts that a call will need, known before it is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// Tokens of all prompts of the call together.
    pub prompt_tokens: u64,
    /// Upper bound of the output tokens over all answers of the call.
    pub completion_tokens_max: u64,
}

impl Measured {
    /// The larger of both values, count by count.
    pub fn max(self, other: Self) -> Self {
        Self {
            prompt_tokens: self.prompt_tokens.max(other.prompt_tokens),
            completion_tokens_max: self.completion_tokens_max.max(other.completion_tokens_max),
        }
    }
}

/// Active health probe of one provider, sent whether or not requests come.
#[async_trait]
pub trait Probe: Send + Sync + 'static {
    /// Time between two probes; a probe without an answer within it counts as failed.
    fn interval(&self) -> Duration;

    /// Sends one probe. False for a target that is down, or that did not answer within the interval.
    async fn is_good(&self) -> bool;
}

/// Stream of events of one answer, polled by the writer to the client; dropping it cancels the call.
pub trait Events: Send {
    /// Appends the events that are there to `out`. `Ready(Ok(true))`: more can follow; `Ready(Ok(false))`: these were
    /// the last; an error ends the answer where it is. Not polling slows the upstream down (backpressure).
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>>;

    /// Token counts and worker changes known so far, for the log and the limits.
    fn facts(&self) -> Facts;

    /// Facts of an answer that is dropped now: with output that has arrived and that nobody has polled, since it was
    /// computed. A wrapper of other events has to pass this on.
    fn facts_at_end(&self) -> Facts {
        self.facts()
    }

    /// Mean log-probability of a finished choice, where `best_of` asked for it.
    fn score(&self, _choice: u32) -> Option<f32> {
        None
    }

    /// Attempts and target of the answer, for the log.
    fn course(&self) -> Course {
        Course::default()
    }

    /// Bytes behind the end of a complete stream: an SSE comment.
    fn epilogue(&self) -> Option<Bytes> {
        None
    }

    /// Header fields that go out with the head of the answer; known once the first event is there.
    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        &[]
    }
}

/// Reserved and used amounts of a request, for the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Tokens that limits reserved before the request was sent.
    pub reserved_tokens: u64,
    /// Money that limits reserved before the request was sent, in nano-dollars.
    pub reserved_nano_usd: u64,
    /// Prompt and output tokens that limits counted at the end.
    pub tokens: u64,
    /// Counted money, in nano-dollars, of every attempt that may bill.
    pub nano_usd: u64,
    /// True if the counts are estimates because the upstream reported no usage.
    pub estimated: bool,
}

/// Origin of an answer: its target, the attempts before it, its price.
#[derive(Clone, Debug, Default)]
pub struct Course {
    /// Target that answered, where the model has several.
    pub target: Option<Arc<str>>,
    /// Targets that were asked, in order of their outcome.
    pub attempts: Vec<Attempt>,
    /// Targets of hedges that were not waited for: they may bill.
    pub hedged: Vec<Arc<str>>,
    /// Prices of the target that answered; `None`: it has none.
    pub price: Option<Price>,
    /// Worker that answered, where the target is a pool of ours.
    pub worker: Option<Arc<str>>,
    /// Finish reason of the choices, where the answer was passed on raw and only the relay has seen it.
    pub finish: Option<FinishReason>,
    /// Reserved and used amounts, where a limit counts them.
    pub account: Option<Account>,
}

impl Course {
    /// Marks a failure of this gateway to hold or to write an answer of this course. An answer that a provider made may be billed,
    /// so a retry is not advised ([`Failure::unheld`]). For an answer of a pool of ours the failure stays as it is.
    pub fn not_held(&self, failure: Failure) -> Failure {
        let is_providers = self.target.is_some() && self.worker.is_none();
        if is_providers { failure.unheld() } else { failure }
    }
}

/// Token counts of an answer and its changes of worker, for the log and the limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Prompt tokens of the request, cached ones included.
    pub prompt_tokens: u64,
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: u64,
    /// Prompt tokens written to a cache that a provider bills.
    pub cache_write_tokens: u64,
    /// Output tokens so far, those of reasoning included.
    pub completion_tokens: u64,
    /// Output tokens that were reasoning, a part of `completion_tokens`.
    pub reasoning_tokens: u64,
    /// Service tier of the answer, as the provider says.
    pub tier: Option<ServiceTier>,
    /// Number of times that the answer was continued after a worker was lost.
    pub resumes: u32,
    /// True if a continuation was not bit-exact.
    pub inexact: bool,
    /// Number of times that the running request moved to another worker.
    pub moves: u32,
    /// Longest time without a token while the request changed its worker, in microseconds.
    pub gap_us: u64,
}

/// Largest token count that is believed of a provider, far above any answer's: sums of larger ones would overflow, and
/// prices of larger ones would be more than shared counters hold (2^53 nano-dollars).
const TOKENS_MAX: u64 = u32::MAX as u64;

impl Facts {
    /// Facts of an answer that a provider has given, by the token counts and the service tier that it reports. Counts
    /// are at most 2^32 − 1.
    pub fn reported(usage: Usage, tier: Option<ServiceTier>) -> Self {
        let Usage { prompt_tokens, cached_tokens, cache_write_tokens, completion_tokens, reasoning_tokens } = usage;
        Self {
            prompt_tokens: prompt_tokens.min(TOKENS_MAX),
            cached_tokens: cached_tokens.min(TOKENS_MAX),
            cache_write_tokens: cache_write_tokens.min(TOKENS_MAX),
            completion_tokens: completion_tokens.min(TOKENS_MAX),
            reasoning_tokens: reasoning_tokens.min(TOKENS_MAX),
            tier,
            ..Self::default()
        }
    }

    /// Returns true if the upstream has reported token counts.
    pub fn is_known(&self) -> bool {
        self.total() > 0
    }

    /// Tokens of prompt and answer together.
    pub fn total(&self) -> u64 {
        self.prompt_tokens.saturating_add(self.completion_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_that_a_provider_makes_up_do_not_overflow() {
        let all = u64::MAX;
        let usage = Usage {
            prompt_tokens: all,
            cached_tokens: all,
            cache_write_tokens: all,
            completion_tokens: all,
            reasoning_tokens: all,
        };
        let facts = Facts::reported(usage, None);
        assert!(facts.is_known() && facts.total() == 2 * TOKENS_MAX);
        let usage = Usage { prompt_tokens: 7, ..Usage::default() };
        assert_eq!(Facts::reported(usage, None), Facts { prompt_tokens: 7, ..Facts::default() });
    }
}
