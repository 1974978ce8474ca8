//! The internal request, event and error: what the gateway speaks between any client's dialect and any upstream's.
//!
//! Inside the gateway there is one [`Request`] and one [`ChatEvent`]; limits, plugins, logs and upstreams know nothing
//! else. The crate `penstock-dialects` translates each public API to and from them through the traits in [`codec`].
//! Beside them lies what every codec needs: a strict JSON [`json`] reader with checked [`fields`], JSON writers
//! ([`mod@write`]), server-sent events ([`sse`]), the error bodies of each dialect, and [`mod@peek`], which finds a
//! body's model and amounts without decoding it.
//!
//! Deliberately absent: sockets, tokens (text only), any `serde_json::Value` of a message list.
#![forbid(unsafe_code)]

pub mod ask;
mod bounds;
pub mod codec;
pub mod error;
pub mod error_body;
pub mod error_shape;
pub mod event;
pub mod fields;
pub mod json;
pub mod json_text;
pub mod peek;
pub mod request;
pub mod room;
pub mod sse;
mod token_ids;
pub mod tokenize;
pub mod write;

pub use ask::Ask;
pub use bounds::Bounds;
pub use codec::{
    AnswerDecoder, AnswerForm, AnswerMeta, Decoded, Dialect, FaultClass, ProviderCall, ProviderCodec, ProviderFault,
    StreamEncoder, Surface, WholeCollector,
};
pub use error::{ApiError, ApiErrorKind};
pub use error_shape::ErrorShape;
pub use event::{ChatEvent, FinishReason, ServiceTier, StopCause, TokenLogprob, TokenPlace, Usage};
pub use peek::{Peek, peek};
pub use request::{
    ChatRequest, CompleteRequest, EmbedRequest, GrammarSyntax, ImageSource, Message, Part, Prompt, PromptTail,
    ReasoningEffort, Request, RerankRequest, ResponseFormat, Role, SamplingParams, StreamOptions, TokenNames, Tool,
    ToolCall, ToolChoice,
};
pub use token_ids::check_token_ids;
pub use tokenize::{DetokenizeRequest, TokenizeInput, TokenizeRequest};
