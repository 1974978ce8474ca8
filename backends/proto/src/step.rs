//! Steps of an engine in frames: the output of each choice, and the work that the step was.

use crate::engine_state::EngineState;
use crate::kv::KvEvent;
use prost::Message;

/// Report of one engine step: everything that happened, in one order.
#[derive(Clone, PartialEq, Message)]
pub struct Step {
    /// Number of steps since the epoch began.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// Outputs of single choices in this step: new tokens, log-probabilities, ends.
    #[prost(message, repeated, tag = "2")]
    pub outputs: Vec<Output>,
    /// Load and capacity of the engine after the step.
    #[prost(message, optional, tag = "3")]
    pub state: Option<EngineState>,
    /// Changes of the prefix cache since the last frame, in the order in which they happened.
    #[prost(message, repeated, tag = "4")]
    pub kv: Vec<KvEvent>,
    /// Number of [`crate::frames::Generate`] frames of this session that the engine had accepted when `state` was made; the credits
    /// in `state` account for them.
    #[prost(uint64, tag = "5")]
    pub accepted: u64,
    /// Work and duration of the step; `None` in a heartbeat.
    #[prost(message, optional, tag = "6")]
    pub batch: Option<Batch>,
}

/// Batch of one step and its duration, from which the gateway estimates a worker's speeds.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Batch {
    /// Rows of prefill in the step: prompt tokens computed.
    #[prost(uint32, tag = "1")]
    pub prefill_tokens: u32,
    /// Attended tokens summed over the rows of prefill.
    #[prost(double, tag = "2")]
    pub prefill_context: f64,
    /// Rows of decode in the step: one per decoding sequence, and those of its draft tokens.
    #[prost(uint32, tag = "3")]
    pub decodes: u32,
    /// Attended tokens summed over the rows of decode.
    #[prost(uint64, tag = "4")]
    pub decode_context: u64,
    /// Duration of the step in seconds.
    #[prost(double, tag = "5")]
    pub seconds: f64,
}

/// Output of one choice in one step.
#[derive(Clone, PartialEq, Message)]
pub struct Output {
    /// [`crate::frames::Generate::request`] of the request that the output belongs to.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// [`crate::frames::Generate::attempt`] of the request; the gateway drops output of an older attempt.
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
    /// Index of the choice within its request, from 0.
    #[prost(uint32, tag = "3")]
    pub choice: u32,
    /// New tokens; the first has index `at` in the output.
    #[prost(message, repeated, tag = "4")]
    pub tokens: Vec<Token>,
    /// Index of the first of `tokens` in the output, so that a token sent twice is emitted once.
    #[prost(uint32, tag = "5")]
    pub at: u32,
    /// End of the choice, set in the output that carries its last tokens.
    #[prost(message, optional, tag = "6")]
    pub finish: Option<Finish>,
    /// Prompt tokens read from the prefix cache instead of computed; set with the first output of the choice.
    #[prost(uint32, optional, tag = "7")]
    pub cached_tokens: Option<u32>,
    /// Log-probabilities of prompt tokens, in order, when asked for; sent with the first choice's first output.
    #[prost(message, repeated, tag = "8")]
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Vector that [`crate::frames::Generate::pooling`] asked for, sent with the end of the choice.
    #[prost(float, repeated, tag = "20")]
    pub vector: Vec<f32>,
}

/// Token that a choice has emitted, with log-probabilities when the request asks for them.
#[derive(Clone, PartialEq, Message)]
pub struct Token {
    /// Id of the token in the model's vocabulary.
    #[prost(uint32, tag = "1")]
    pub id: u32,
    /// Log-probabilities at the token's position; `None` unless [`crate::frames::Sampling::logprobs`] asks for them.
    #[prost(message, optional, tag = "2")]
    pub logprobs: Option<TokenLogprobs>,
}

/// Raw log-probabilities (before temperature and penalties) at one position.
#[derive(Clone, PartialEq, Message)]
pub struct TokenLogprobs {
    /// Log-probability of the token itself; NaN for the first prompt token, which has none.
    #[prost(float, tag = "1")]
    pub logprob: f32,
    /// Ids of the tokens reported beside this one: the best in descending order, or those of
    /// [`crate::frames::Sampling::logprob_tokens`].
    #[prost(uint32, repeated, tag = "2")]
    pub top_tokens: Vec<u32>,
    /// Log-probabilities of `top_tokens`, entry by entry.
    #[prost(float, repeated, tag = "3")]
    pub top_logprobs: Vec<f32>,
    /// Rank of the token itself, from 1.
    #[prost(uint32, tag = "4")]
    pub rank: u32,
}

/// End of a choice: reason, and for a failure its kind and message.
#[derive(Clone, PartialEq, Message)]
pub struct Finish {
    /// [`FinishReason`] of the choice, as its number.
    #[prost(enumeration = "FinishReason", tag = "1")]
    pub reason: i32,
    /// The stop token, for [`FinishReason::Stop`].
    #[prost(uint32, optional, tag = "2")]
    pub stop_token: Option<u32>,
    /// An [`crate::ErrorKind`] number, for [`FinishReason::Failed`].
    #[prost(int32, tag = "3")]
    pub error_kind: i32,
    /// Message for client and log, for [`FinishReason::Failed`].
    #[prost(string, tag = "4")]
    pub message: String,
}

/// Reasons why a choice ended, as in [`Finish::reason`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum FinishReason {
    /// A stop token was drawn: an end token of the model or one of the client's.
    Stop = 0,
    /// The limit `max_tokens`, or the end of the model's context.
    Length = 1,
    /// Cancelled by the gateway with a [`crate::frames::Cancel`] frame.
    Cancelled = 2,
    /// Refused or failed by the worker; see `error_kind` and `message`.
    Failed = 3,
}
