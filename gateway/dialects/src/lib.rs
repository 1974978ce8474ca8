//! Public API shapes to and from one internal request and event type.
//!
//! Inside, there is one [`Request`] and one [`ChatEvent`]; limits, plugins, logs and upstreams know nothing else. Each public API
//! is a module here: [`openai`] now. A dialect decodes a body into a `Request` (every bound checked, every fault an
//! [`ApiError`] that names its parameter) and encodes events into its own stream or whole answer.
//!
//! Deliberately absent: sockets, tokens (text only), any `serde_json::Value` of a message list.
#![forbid(unsafe_code)]

pub mod error;
pub mod event;
pub mod openai;
pub mod request;

pub use error::{ApiError, ApiErrorKind};
pub use event::{ChatEvent, FinishReason, StopCause, TokenLogprob, Usage};
pub use request::{
    ChatRequest, CompleteRequest, Message, Prompt, ReasoningEffort, Request, Role, SamplingParams, StreamOptions, Tool,
    ToolCall, ToolChoice,
};
