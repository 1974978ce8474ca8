//! Whatever answers: one trait for our own pools, later providers, and the doubles in tests.

use std::net::IpAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use penstock_dialects::openai::{DetokenizeRequest, TokenizeRequest};
use penstock_dialects::{ChatEvent, FinishReason, ServiceTier};
use penstock_proto::ErrorKind;
use serde::Serialize;

use crate::answer_memory::AnswerMemory;
use crate::call::Call;
pub use crate::client::Sent;
use crate::error::Failure;
use crate::foreign::Feed;
use crate::forward::Forward;
use crate::governed::Account;
use crate::prices::Price;
use crate::provider::Forwarded;
use crate::telemetry::Trace;

/// A model as `/v1/models` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Name in requests.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// Longest sequence served, in tokens; 0 until known.
    pub context_tokens: u32,
}

/// What an upstream needs to know besides the request.
#[derive(Clone, Debug, Default)]
pub struct Origin {
    /// Separates prefix caches.
    pub tenant: String,
    /// The tenant's share of our workers against others'; 0 counts as 1.
    pub weight: u32,
    /// What the client says that its conversation is called, beside what the body says.
    pub session: Option<Box<str>>,
    /// When the answer must have ended.
    pub deadline: Option<Instant>,
    /// The trace that the answer is a part of.
    pub trace: Option<Arc<Trace>>,
    /// It asks who was chosen and why.
    pub explain: bool,
    /// Told when the request has gone out.
    pub sent: Sent,
    /// Where memory is taken for what is held of the answer.
    pub memory: AnswerMemory,
}

impl Origin {
    /// Whose the request is, for whatever is shared out among keys; one without a key is its address's.
    pub(crate) fn asker(&self, call: &Call) -> Asker {
        Asker::new(&self.tenant, call.client)
    }
}

/// Whose a request is, as a hash: upstreams are shared by keys that do not trust each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Asker(u64);

impl Asker {
    /// The key's tenant; without one the address, of IPv6 the /64.
    pub(crate) fn new(tenant: &str, address: Option<IpAddr>) -> Self {
        let hash = |kind: u8, bytes: &[u8]| Self(crate::relay::hash(&[&[kind], bytes].concat()));
        match address {
            _ if !tenant.is_empty() => hash(0, tenant.as_bytes()),
            Some(IpAddr::V4(address)) => hash(1, &address.octets()),
            Some(IpAddr::V6(address)) => hash(2, &address.octets()[..8]),
            None => Self::default(),
        }
    }
}

/// Answers requests for one model. No method has a default: an upstream that stands for another (a pool's slot, a relay) would forget to
/// ask it, and nothing would say so.
#[async_trait]
pub trait Upstream: Send + Sync + 'static {
    /// The model.
    fn card(&self) -> Card;

    /// Why it cannot take requests now; `None`: it can.
    fn unready(&self) -> Option<String>;

    /// Checks the call and starts it. Dropping the events stops it, wherever it is. The events may hold the call until the first of
    /// them is taken, not longer.
    async fn open(&self, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure>;

    /// Input tokens of a call, counted without answering it; `None`: it cannot tell.
    async fn count(&self, call: Arc<Call>) -> Result<Option<u64>, Failure>;

    /// Tokens that a call needs, where they can be counted before it is answered; `None`: they can only be guessed. What was made on the
    /// way (a prompt's tokens) is kept in the call.
    async fn measure(&self, call: &Call) -> Result<Option<Measured>, Failure>;

    /// Passes on an operation that no dialect here reads, if a provider is behind it.
    async fn forward(&self, forward: Arc<Forward>) -> Result<Forwarded, Failure>;

    /// Answers `/tokenize`; the body of the reply.
    async fn tokenize(&self, request: TokenizeRequest) -> Result<Vec<u8>, Failure>;

    /// Answers `/detokenize`; the body of the reply.
    async fn detokenize(&self, request: DetokenizeRequest) -> Result<Vec<u8>, Failure>;

    /// What its prefix cache holds, where a server that is not ours says so.
    fn feed(&self) -> Option<Arc<Feed>>;

    /// Gauges of the engine behind it, for `/metrics`.
    fn gauges(&self, out: &mut dyn FnMut(crate::telemetry::Gauge, f64));
}

/// Refusal of an operation that only a provider could do.
pub(crate) fn not_forwarded() -> Failure {
    let message = "This model is not served by a provider that could do this.";
    Failure::new(ErrorKind::Unsupported, message).param("model")
}

/// Tokens of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// Of its prompts.
    pub prompt_tokens: u64,
    /// Of its answers, at most.
    pub completion_tokens_max: u64,
}

impl Measured {
    /// The larger of each part.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            prompt_tokens: self.prompt_tokens.max(other.prompt_tokens),
            completion_tokens_max: self.completion_tokens_max.max(other.completion_tokens_max),
        }
    }
}

/// The events of one answer.
pub trait Events: Send {
    /// Appends what is there to `out`. `Ready(Ok(true))`: more can follow; `Ready(Ok(false))`: that was all; an error ends the answer
    /// where it is. Not taking events is what slows the upstream down.
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>>;

    /// Facts for the log, as known so far.
    fn facts(&self) -> Facts;

    /// Mean log-probability of a choice that has finished, where it was asked for by `best_of`.
    fn score(&self, _choice: u32) -> Option<f32> {
        None
    }

    /// How the answer came about, for the log.
    fn course(&self) -> Course {
        Course::default()
    }

    /// What stands behind the end of a complete stream: an SSE comment.
    fn epilogue(&self) -> Option<Bytes> {
        None
    }

    /// Header fields that go out with the head of the answer; known once the first event is there.
    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        &[]
    }
}

/// How an answer came about.
#[derive(Clone, Debug, Default)]
pub struct Course {
    /// Who answered, where the model has several targets.
    pub target: Option<Arc<str>>,
    /// Everybody who was asked, in order of their outcome.
    pub attempts: Vec<Attempt>,
    /// Who was asked too and not waited for: they may bill.
    pub hedged: Vec<Arc<str>>,
    /// Prices of who answered.
    pub price: Option<Price>,
    /// The worker that answered, where it was one of ours.
    pub worker: Option<Arc<str>>,
    /// Why the choices ended, where only whoever passed the answer on has seen it.
    pub finish: Option<FinishReason>,
    /// What it was to use and what it used, where a limit counts it.
    pub account: Option<Account>,
}

/// One attempt to get an answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Attempt {
    /// Who was asked: a pool, or `provider/model`.
    #[serde(serialize_with = "text")]
    pub target: Arc<str>,
    /// `answered`, or why not.
    pub outcome: &'static str,
    /// Status of the failure; 0 where there was none.
    #[serde(skip_serializing_if = "is_zero")]
    pub status: u16,
    /// Milliseconds to the outcome.
    pub ms: f64,
    /// Whether the request had gone out.
    #[serde(skip)]
    pub sent: bool,
}

fn text<S: serde::Serializer>(text: &str, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(text)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(value: &u16) -> bool {
    *value == 0
}

/// What the log says about an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Of these, from the prefix cache.
    pub cached_tokens: u64,
    /// Of these, written to a cache that a provider bills.
    pub cache_write_tokens: u64,
    /// Output tokens so far.
    pub completion_tokens: u64,
    /// Of these, reasoning.
    pub reasoning_tokens: u64,
    /// The service tier that the provider says it was answered in.
    pub tier: Option<ServiceTier>,
    /// How often the request was continued after a lost worker.
    pub resumes: u32,
    /// Whether every continuation was bit-exact.
    pub inexact: bool,
    /// How often the request was moved to another worker.
    pub moves: u32,
    /// Longest time without a token while it changed its worker, in microseconds.
    pub gap_us: u64,
}

impl Facts {
    /// Whether the upstream has said what the answer used.
    pub(crate) fn is_known(&self) -> bool {
        self.prompt_tokens + self.completion_tokens > 0
    }
}
