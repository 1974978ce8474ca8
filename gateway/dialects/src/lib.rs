//! Conversion between the public APIs and one internal request and event type.
//!
//! Inside the gateway there is one [`Request`] and one [`ChatEvent`]; limits, plugins, logs and upstreams know nothing
//! else. Each public API is a module here: [`openai`], [`anthropic`], [`gemini`]; [`bedrock`] is a provider only. A
//! dialect decodes a body into a `Request` (every bound checked, every fault an [`ApiError`] that names its parameter)
//! and encodes events into its own stream or whole answer.
//!
//! Deliberately absent: sockets, tokens (text only), any `serde_json::Value` of a message list.
#![forbid(unsafe_code)]

pub mod anthropic;
pub mod bedrock;
mod bounds;
pub mod codec;
pub mod error;
pub mod event;
mod fields;
pub mod gemini;
mod json;
mod json_text;
pub mod listing;
pub mod openai;
pub mod peek;
pub mod request;
pub mod room;
pub mod sse;
pub mod watch;
mod write;

pub use bounds::Bounds;
pub use codec::{
    AnswerDecoder, AnswerForm, AnswerMeta, Decoded, Dialect, FaultClass, ProviderCall, ProviderCodec, ProviderFault,
    StreamEncoder, Surface, WholeCollector,
};
pub use error::{ApiError, ApiErrorKind};
pub use event::{ChatEvent, FinishReason, ServiceTier, StopCause, TokenLogprob, TokenPlace, Usage};
pub use openai::ErrorShape;
pub use peek::{Peek, peek};
pub use request::{
    ChatRequest, CompleteRequest, EmbedRequest, ImageSource, Message, Part, Prompt, PromptTail, ReasoningEffort,
    Request, RerankRequest, ResponseFormat, Role, SamplingParams, StreamOptions, TokenNames, Tool, ToolCall,
    ToolChoice,
};
