//! The internal event: what an upstream says, in the order it says it.

use bytes::Bytes;

/// One step of an answer. Choices interleave; within a choice the order is: content, then one `Finish`. `Usage` comes last.
#[derive(Clone, Debug, PartialEq)]
pub enum ChatEvent {
    /// Visible text.
    Text {
        /// Choice index.
        choice: u32,
        /// Whole characters only.
        text: String,
        /// Of the tokens that made this text, when asked for.
        logprobs: Vec<TokenLogprob>,
        /// Token ids, when asked for.
        tokens: Vec<u32>,
    },
    /// Reasoning, kept apart from the answer.
    Reasoning {
        /// Choice index.
        choice: u32,
        /// Whole characters only.
        text: String,
    },
    /// What the provider wants back with the reasoning of this choice, opaque; after its text.
    ReasoningSignature {
        /// Choice index.
        choice: u32,
        /// As the provider said it.
        signature: String,
    },
    /// The model declines, in words kept apart from the answer.
    Refusal {
        /// Choice index.
        choice: u32,
        /// Whole characters only.
        text: String,
    },
    /// A call begins: sent once per call.
    ToolCallStart {
        /// Choice index.
        choice: u32,
        /// Index of the call in the choice, contiguous from 0.
        call: u32,
        /// Id given by the gateway.
        id: String,
        /// Function name.
        name: String,
        /// What the provider wants back with the call, opaque.
        signature: Option<String>,
    },
    /// More of the call's arguments.
    ToolCallArguments {
        /// Choice index.
        choice: u32,
        /// Index of the call.
        call: u32,
        /// A piece of the JSON text.
        json: String,
    },
    /// The choice is complete.
    Finish {
        /// Choice index.
        choice: u32,
        /// Why.
        reason: FinishReason,
        /// The stop string or token that was met.
        stop: Option<StopCause>,
    },
    /// Log-probabilities of a prompt, when asked for, before its first text. Choice counts as `prompt · n`.
    Prompt {
        /// First choice of the prompt.
        choice: u32,
        /// The prompt's text (echo).
        text: String,
        /// One per prompt token; the first has no log-probability.
        logprobs: Vec<TokenLogprob>,
        /// Prompt token ids, when asked for.
        tokens: Vec<u32>,
    },
    /// Vector of one input.
    Vector {
        /// Index of the input.
        index: u32,
        /// Its values.
        values: Vec<f32>,
    },
    /// Relevance of one document, best first.
    Score {
        /// Index of the document.
        index: u32,
        /// Higher is more relevant.
        score: f64,
    },
    /// Token counts of the whole request.
    Usage(Usage),
    /// A piece of an answer in the client's own dialect, from an upstream that speaks it: sent as it is. An answer consists of nothing
    /// but these, or has none.
    Raw(Bytes),
}

/// What ended a choice by stopping it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// A stop string of the client's.
    Text(String),
    /// A stop token of the client's.
    Token(u32),
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// End token or stop string.
    Stop,
    /// max_tokens or context.
    Length,
    /// The model called tools.
    ToolCalls,
    /// The provider withheld the rest.
    ContentFilter,
}

/// How a provider treats a request, as far as it is another price.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServiceTier {
    /// As its list says; also where the provider chooses (`auto`), until its answer says what it chose.
    #[default]
    Standard,
    /// Later, and cheaper.
    Flex,
    /// Sooner, and dearer; also every name that is not known.
    Priority,
}

impl ServiceTier {
    /// By the name that the APIs give it.
    pub fn named(name: &str) -> Self {
        match name {
            "" | "auto" | "default" | "standard" | "standard_only" => Self::Standard,
            "flex" | "batch" => Self::Flex,
            _ => Self::Priority,
        }
    }
}

/// Token counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Counted once whatever `n` is.
    pub prompt_tokens: u64,
    /// Of these, read from the prefix cache.
    pub cached_tokens: u64,
    /// Of these, written to a cache that the provider bills.
    pub cache_write_tokens: u64,
    /// Over all choices, through the token that completed a stop string.
    pub completion_tokens: u64,
    /// Of these, reasoning.
    pub reasoning_tokens: u64,
}

/// A token with its raw log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub token: u32,
    /// Its bytes; a character may be split over tokens.
    pub bytes: Vec<u8>,
    /// Natural logarithm; `None` for the first prompt token.
    pub logprob: Option<f32>,
    /// Best tokens, descending: id, bytes, log-probability.
    pub top: Vec<(u32, Vec<u8>, f32)>,
    /// Where its bytes are in the answer.
    pub place: TokenPlace,
}

/// Where the bytes of a token are in the answer. Every token that was generated has its log-probability, also one without text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenPlace {
    /// In the text.
    #[default]
    Text,
    /// Not in the text: reasoning, a call, or the text from a stop string on.
    Apart,
    /// Nowhere: a control token that is left out. Its bytes are its name.
    Control,
}
