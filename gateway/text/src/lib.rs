//! Conversion between text and tokens: chat template, tokenizer, detokenizer, stop strings, reasoning, tool calls.
//!
//! Text lives in the gateway and tokens in the workers; this crate is the border. [`TextModel`] holds everything that
//! a checkpoint says about text, loaded once and shared. A request goes through [`TextModel::chat_prompt`] or
//! [`TextModel::encode`]; each choice of its answer goes through a [`ChoiceDecoder`].
//!
//! Model files are treated as hostile: sizes are bounded, errors name file and reason, templates run with fuel.
//! Clients' text is hostile too: it cannot put a control token into a chat prompt.
//!
//! Deliberately absent: sockets, clocks and randomness (both are arguments), templates from requests, weights.
#![forbid(unsafe_code)]

mod added_tokens;
mod bos_eos;
mod bounds;
mod call_ids;
mod chat;
mod control;
mod decoder;
mod detokenize;
mod error;
mod literal;
mod model;
mod piece;
mod reasoning;
mod stop;
mod task;
mod template;
mod tokenizer;
mod tools;
mod turns;
mod vocab;

pub use chat::ChatPrompt;
pub use control::SpecialNames;
pub use decoder::{ChoiceDecoder, ChoiceOptions, Decoded, End};
pub use detokenize::Detokenizer;
pub use error::TextError;
pub use model::{DefaultSampling, TextFiles, TextModel};
pub use reasoning::{GoesOn, ReasoningMarkers};
pub use task::{
    AnswerRules, Encoder, HeadRules, HeadScore, Question, RankRules, Task, TaskFiles, VectorPooling, VectorRules,
};
pub use tools::{AnswerPart, CallDemand, CallRule, CallableTool, ContentForm, ReasoningPart, ToolFormat};
