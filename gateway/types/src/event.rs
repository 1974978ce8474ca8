//! Events of an answer, independent of dialects, in the order the upstream sends them.

use bytes::Bytes;

/// One event of an answer. Choices interleave; within a choice the order is: content, then one `Finish`. `Usage` comes
/// last.
#[derive(Clone, Debug, PartialEq)]
pub enum ChatEvent {
    /// Next piece of a choice's visible text.
    Text {
        /// Index of the choice, from 0.
        choice: u32,
        /// Piece of text, cut between whole characters.
        text: String,
        /// Log-probabilities of the tokens that made this text, when asked for.
        logprobs: Vec<TokenLogprob>,
        /// Ids of the tokens that made this text, when asked for.
        tokens: Vec<u32>,
    },
    /// Next piece of the model's reasoning, kept apart from the answer.
    Reasoning {
        /// Index of the choice, from 0.
        choice: u32,
        /// Piece of text, cut between whole characters.
        text: String,
    },
    /// Opaque signature that the provider wants back with the reasoning of this choice; sent after the reasoning's
    /// text.
    ReasoningSignature {
        /// Index of the choice, from 0.
        choice: u32,
        /// Signature, unchanged from the provider.
        signature: String,
    },
    /// Refusal of the model, in words kept apart from the answer.
    Refusal {
        /// Index of the choice, from 0.
        choice: u32,
        /// Piece of text, cut between whole characters.
        text: String,
    },
    /// Start of a tool call, sent once per call.
    ToolCallStart {
        /// Index of the choice, from 0.
        choice: u32,
        /// Index of the call in the choice, contiguous from 0.
        call: u32,
        /// Id of the call, given by the gateway.
        id: String,
        /// Name of the function that is called.
        name: String,
        /// Opaque signature that the provider wants back with the call.
        signature: Option<String>,
    },
    /// Next piece of the call's arguments.
    ToolCallArguments {
        /// Index of the choice, from 0.
        choice: u32,
        /// Index of the call in the choice, as in its start.
        call: u32,
        /// Piece of the arguments' JSON text; all pieces together are one object.
        json: String,
    },
    /// End of a choice; nothing of this choice follows.
    Finish {
        /// Index of the choice, from 0.
        choice: u32,
        /// Reason why the choice ended.
        reason: FinishReason,
        /// The stop string or token that was met.
        stop: Option<StopCause>,
    },
    /// Log-probabilities of a prompt, when asked for, before its first text. `choice` is `prompt · n`.
    Prompt {
        /// Index of the prompt's first choice.
        choice: u32,
        /// Text of the prompt, for `echo`.
        text: String,
        /// One per prompt token; the first has no log-probability.
        logprobs: Vec<TokenLogprob>,
        /// Token ids of the prompt, when asked for.
        tokens: Vec<u32>,
    },
    /// Embedding vector of one input text.
    Vector {
        /// Index of the input in the request, from 0.
        index: u32,
        /// Components of the vector, as many as its dimensions.
        values: Vec<f32>,
    },
    /// Relevance of one document, best first.
    Score {
        /// Index of the document in the request, from 0.
        index: u32,
        /// Relevance of the document to the query; higher is more relevant.
        score: f64,
    },
    /// Token counts of the whole request.
    Usage(Usage),
    /// A piece of an answer in the client's own dialect, from an upstream that speaks it: forwarded unchanged. An
    /// answer consists of `Raw` events only, or has none.
    Raw(Bytes),
}

/// Stop string or stop token that ended a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// The stop string of the request that ended the choice.
    Text(String),
    /// A stop token of the client's.
    Token(u32),
}

/// Reason why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token, stop token or stop string was met.
    Stop,
    /// Limit of `max_tokens` or of the context.
    Length,
    /// The model called tools and waits for their results.
    ToolCalls,
    /// The provider's content filter withheld the rest.
    ContentFilter,
}

impl FinishReason {
    /// Name in the access log, in traces and for HTTP hooks.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
            FinishReason::ContentFilter => "content_filter",
        }
    }
}

/// Service tier at a provider, as far as it changes the price.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServiceTier {
    /// List price; also where the provider chooses (`auto`), until its answer names the tier it chose.
    #[default]
    Standard,
    /// Later and cheaper than standard.
    Flex,
    /// Sooner and dearer than standard; also every name that is not known.
    Priority,
}

impl ServiceTier {
    /// Service tier by the name in the providers' APIs.
    pub fn named(name: &str) -> Self {
        match name {
            "" | "auto" | "default" | "standard" | "standard_only" => Self::Standard,
            "flex" | "batch" => Self::Flex,
            _ => Self::Priority,
        }
    }
}

/// Token counts of a request and its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens, counted once whatever `n` is.
    pub prompt_tokens: u64,
    /// Part of `prompt_tokens` that was read from the prefix cache.
    pub cached_tokens: u64,
    /// Part of `prompt_tokens` that was written to a cache which the provider bills.
    pub cache_write_tokens: u64,
    /// Generated tokens over all choices, through the token that completed a stop string.
    pub completion_tokens: u64,
    /// Part of `completion_tokens` that was spent on reasoning.
    pub reasoning_tokens: u64,
}

impl Usage {
    /// Tokens of prompt and answer together. Providers may report any counts.
    pub fn total(&self) -> u64 {
        self.prompt_tokens.saturating_add(self.completion_tokens)
    }
}

/// A token with its raw log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Id of the token in the model's vocabulary.
    pub token: u32,
    /// Bytes of the token; a character may be split over tokens.
    pub bytes: Vec<u8>,
    /// Natural logarithm of the probability; `None` for the first prompt token.
    pub logprob: Option<f32>,
    /// Most probable tokens, descending: id, bytes, log-probability.
    pub top: Vec<(u32, Vec<u8>, f32)>,
    /// Place of the token's bytes in the answer.
    pub place: TokenPlace,
}

/// Place of a token's bytes in the answer. Every generated token has a log-probability, also one without text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenPlace {
    /// The token's bytes are part of the answer's text.
    #[default]
    Text,
    /// Outside the text: in reasoning, in a call, or cut off from a stop string on.
    Apart,
    /// A control token that is left out of the answer. Its bytes are its name.
    Control,
}
