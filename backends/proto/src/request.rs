//! Requests in frames: what a gateway asks of a worker for one of them, from its prompt and sampling to its end.

use crate::guide::{Guide, ReasoningBudget};
use prost::Message;

/// Start of a request, or its continuation after its worker was lost, with everything that is known about it.
#[derive(Clone, PartialEq, Message)]
pub struct Generate {
    /// Number chosen by the gateway, unique within (gateway, session).
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Number of this life of the request: +1 at every resume. The gateway drops tokens of an older attempt.
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
    /// Token ids of the whole prompt, after template and tokenizer.
    #[prost(uint32, repeated, tag = "3")]
    pub prompt: Vec<u32>,
    /// Choices that are still open; at least one.
    #[prost(message, repeated, tag = "4")]
    pub choices: Vec<ChoiceStart>,
    /// Sampling parameters, common to all choices; each choice draws its own random numbers.
    #[prost(message, optional, tag = "5")]
    pub sampling: Option<Sampling>,
    /// Salt of the block hash: tenant, model, adapter, cache_salt. The worker adds its numerics id.
    #[prost(bytes = "vec", tag = "6")]
    pub salt: Vec<u8>,
    /// Priority; lower runs first, 0 is normal.
    #[prost(int32, tag = "7")]
    pub priority: i32,
    /// Tokens that a choice may emit before the gateway has to send [`Window`]; 0 means no limit.
    #[prost(uint32, tag = "8")]
    pub window: u32,
    /// [`crate::frames::Ready::transfer`] of the worker that does the prefill, for prefill/decode separation; empty: this worker.
    #[prost(string, tag = "9")]
    pub prefill_at: String,
    /// [`crate::frames::Ready::transfer`] of a worker that holds more of the prefix: blocks missing here are fetched from it before
    /// the prefill begins, and computed if that fails. Empty means no fetch.
    #[prost(string, tag = "10")]
    pub pull_from: String,
    /// Fair-share turn: engine time that the request's tenant had received when the request was bound, in microseconds
    /// divided by its weight. Within one priority the lower turn goes first, and among equal turns the earlier
    /// arrival, so a tenant that asks for more than its share is behind the others. Counted since the gateway began: a
    /// worker compares turns of one gateway with each other, never turns of different gateways.
    #[prost(sint64, tag = "11")]
    pub turn: i64,
    /// Further prefill workers if `prefill_at` is lost during the transfer: asked in this order, each for the blocks
    /// still missing.
    #[prost(string, repeated, tag = "12")]
    pub prefill_next: Vec<String>,
    /// Number of missing tokens above which the workers in `prefill_next` are asked; fewer are computed here.
    #[prost(uint32, tag = "13")]
    pub prefill_next_tokens: u32,
    /// Number of other requests that wait at the gateway. A worker divides its free starts among gateways by it.
    #[prost(uint32, tag = "14")]
    pub waiting: u32,
    /// Grammar that every choice's output follows; `None` leaves the output free.
    #[prost(message, optional, tag = "15")]
    pub grammar: Option<Guide>,
    /// [`Pooling`] of a request that wants a vector of its prompt instead of tokens. Only for workers that announce
    /// [`crate::Capability::Vectors`].
    #[prost(enumeration = "Pooling", tag = "20")]
    pub pooling: i32,
    /// [`crate::AdapterId`] of the adapter that the model runs with, 16 bytes; empty for the model alone. Only for workers
    /// that announce this id in [`crate::frames::Ready::adapters`]; `salt` contains it too.
    #[prost(bytes = "vec", tag = "21")]
    pub adapter: Vec<u8>,
    /// Index of the first prompt token of the second of two texts (token type 1), for workers with [`crate::Capability::Encoders`]; 0: one text.
    #[prost(uint32, tag = "22")]
    pub second_text: u32,
    /// Number of dense layers that the vector goes through behind the pooling, for workers with [`crate::Capability::Chains`]; a worker whose checkpoint
    /// has another number refuses the request.
    #[prost(uint32, tag = "23")]
    pub dense_layers: u32,
    /// Index of the first prompt token that is pooled, for workers with [`crate::Capability::Chains`].
    #[prost(uint32, tag = "24")]
    pub pooled_from: u32,
}

/// Rule by which the final states of a prompt's tokens become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Pooling {
    /// No vector: the request generates tokens.
    None = 0,
    /// Vector of the last token: its state behind the model's last norm. Neither scaled nor cut; the gateway does that.
    Last = 1,
    /// Vector of the first token, of an encoder or a decoder of whole texts, as all that follow but the head.
    First = 2,
    /// Mean of the states of all tokens.
    Mean = 3,
    /// Values of an encoder's classification head, before any function that makes scores of them.
    Head = 4,
    /// Sum of the states of all tokens over the root of their number.
    RootMean = 5,
    /// Mean of the states in which each token weighs as much as its place, counted from 1.
    WeightedMean = 6,
    /// Largest value of each component.
    Max = 7,
}

/// Choice of a request, with the tokens that it has emitted already.
#[derive(Clone, PartialEq, Message)]
pub struct ChoiceStart {
    /// Index of the choice, from 0.
    #[prost(uint32, tag = "1")]
    pub index: u32,
    /// Tokens emitted in earlier attempts; they count as output (penalties, max_tokens, positions of random numbers).
    #[prost(uint32, repeated, tag = "2")]
    pub emitted: Vec<u32>,
}

/// Sampling parameters; bounds are checked at the edge and again by the engine.
#[derive(Clone, PartialEq, Message)]
pub struct Sampling {
    /// Divisor of the logits before the draw; 0 is greedy and takes the best token.
    #[prost(float, tag = "1")]
    pub temperature: f32,
    /// Number of most probable tokens to draw from (top-k); 0 keeps all.
    #[prost(uint32, tag = "2")]
    pub top_k: u32,
    /// Nucleus probability: mass of the most probable tokens that are kept; 1 keeps all.
    #[prost(float, tag = "3")]
    pub top_p: f32,
    /// Least probability of a kept token, relative to that of the best; 0 keeps all.
    #[prost(float, tag = "4")]
    pub min_p: f32,
    /// Subtracted once from every token that occurs in the output.
    #[prost(float, tag = "5")]
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each of its occurrences in the output.
    #[prost(float, tag = "6")]
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    #[prost(float, tag = "7")]
    pub repetition_penalty: f32,
    /// Values added to the logits of single tokens before anything else.
    #[prost(message, repeated, tag = "8")]
    pub logit_bias: Vec<LogitBias>,
    /// Seed of the counter-based random numbers, always set (drawn by the gateway when the client gives none).
    #[prost(uint64, tag = "9")]
    pub seed: u64,
    /// Most output tokens of a choice, over all attempts.
    #[prost(uint32, tag = "10")]
    pub max_tokens: u32,
    /// Least output tokens: end tokens are masked before.
    #[prost(uint32, tag = "11")]
    pub min_tokens: u32,
    /// Tokens that end the choice and count as output: the model's end tokens (unless ignored) and the client's.
    #[prost(uint32, repeated, tag = "12")]
    pub stop_tokens: Vec<u32>,
    /// Number of best tokens whose log-probabilities are returned beside that of each emitted token; 0 returns the
    /// emitted one's only, -1 none.
    #[prost(int32, tag = "13")]
    pub logprobs: i32,
    /// Number of best tokens, as in `logprobs`, for every prompt token (bypasses cache reads); -1 is off.
    #[prost(int32, tag = "14")]
    pub prompt_logprobs: i32,
    /// Tokens that may be drawn; empty allows all.
    #[prost(uint32, repeated, tag = "15")]
    pub allowed_tokens: Vec<u32>,
    /// Forbidden token sequences: the last token of a sequence cannot be drawn after the others. Only for workers with
    /// [`crate::Capability::BadWords`].
    #[prost(message, repeated, tag = "16")]
    pub bad_words: Vec<BadWord>,
    /// Tokens whose log-probabilities come beside each generated token, instead of the best; used if not empty and
    /// `logprobs` is not −1. Only for workers with [`crate::Capability::LogprobTokens`].
    #[prost(uint32, repeated, tag = "17")]
    pub logprob_tokens: Vec<u32>,
    /// Most tokens of reasoning in the output of each choice; `None`: as many as `max_tokens`. Only for workers with
    /// [`crate::Capability::ReasoningBudgets`].
    #[prost(message, optional, tag = "18")]
    pub reasoning: Option<ReasoningBudget>,
}

/// A forbidden sequence of tokens, not empty.
#[derive(Clone, PartialEq, Message)]
pub struct BadWord {
    /// Token ids of the forbidden sequence, in the order of the text.
    #[prost(uint32, repeated, tag = "1")]
    pub tokens: Vec<u32>,
}

/// Entry of `logit_bias`: a token and the value added to its logit.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct LogitBias {
    /// Id of the token whose logit is changed.
    #[prost(uint32, tag = "1")]
    pub token: u32,
    /// Value added to the token's logit.
    #[prost(float, tag = "2")]
    pub bias: f32,
}

/// Cancellation of a request or of single choices.
#[derive(Clone, PartialEq, Message)]
pub struct Cancel {
    /// [`Generate::request`] of the request to cancel.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Indices of the choices to cancel; empty means all.
    #[prost(uint32, repeated, tag = "2")]
    pub choices: Vec<u32>,
}

/// Extension of a choice's window (flow control): the reader has taken tokens, so the worker may emit more.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Window {
    /// [`Generate::request`] of the request.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Index of the choice whose window grows, from 0.
    #[prost(uint32, tag = "2")]
    pub choice: u32,
    /// Number of further tokens that the choice may emit.
    #[prost(uint32, tag = "3")]
    pub tokens: u32,
}
