//! The seams between a dialect and the gateway: a client's side and a provider's side, both free of sockets.
//!
//! Client's side: a body becomes a [`Decoded`] request, whose [`AnswerForm`] makes the encoder of a stream or the collector of a
//! whole answer. Provider's side: a [`ProviderCodec`] writes the request that a provider understands and makes the
//! [`AnswerDecoder`] that turns what it says, in pieces cut anywhere, into events.

use bytes::{BufMut, Bytes, BytesMut};

use crate::error::ApiError;
use crate::event::{ChatEvent, Usage};
use crate::openai::ErrorShape;
use crate::request::Request;

/// Families of public APIs: they share the shape of errors and the way of sending a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// OpenAI and everything compatible with it.
    OpenAi,
    /// Anthropic.
    Anthropic,
    /// Gemini.
    Gemini,
}

/// An operation of a public API that is answered by a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Surface {
    /// OpenAI `/v1/chat/completions`.
    Chat,
    /// OpenAI `/v1/completions`.
    Completions,
    /// OpenAI `/v1/responses`.
    Responses,
    /// OpenAI `/v1/embeddings`.
    Embeddings,
    /// `/v1/rerank`, as Jina and Cohere shape it.
    Rerank,
    /// `/v1/score`, as vLLM shapes it.
    Score,
    /// Anthropic `/v1/messages`.
    Messages,
    /// Anthropic `/v1/messages/count_tokens`.
    CountTokens,
    /// Gemini `generateContent` and `streamGenerateContent`.
    Generate,
    /// Gemini `embedContent` and `batchEmbedContents`.
    Embed,
}

impl Surface {
    /// The operation, by OpenTelemetry's GenAI conventions where they name it.
    pub fn operation(self) -> &'static str {
        match self {
            Surface::Chat | Surface::Responses | Surface::Messages => "chat",
            Surface::Completions => "text_completion",
            Surface::Generate => "generate_content",
            Surface::Embeddings | Surface::Embed => "embeddings",
            Surface::Rerank => "rerank",
            Surface::Score => "score",
            Surface::CountTokens => "count_tokens",
        }
    }

    /// The family it belongs to.
    pub fn dialect(self) -> Dialect {
        match self {
            Surface::Chat
            | Surface::Completions
            | Surface::Responses
            | Surface::Embeddings
            | Surface::Rerank
            | Surface::Score => Dialect::OpenAi,
            Surface::Messages | Surface::CountTokens => Dialect::Anthropic,
            Surface::Generate | Surface::Embed => Dialect::Gemini,
        }
    }
}

/// A request and the form that its answer has in the client's dialect.
pub struct Decoded {
    /// What is asked for.
    pub request: Request,
    /// How it is answered.
    pub form: Box<dyn AnswerForm>,
}

/// What an answer needs besides the request and its events.
#[derive(Clone, Debug)]
pub struct AnswerMeta {
    /// Id without prefix: each dialect puts its own in front (`chatcmpl-`, `resp_`, `msg_`).
    pub id: String,
    /// Unix seconds.
    pub created: u64,
}

/// Makes what writes the answer to one request.
pub trait AnswerForm: Send + Sync {
    /// Choices that must finish before the answer is complete; 0 where the request has none.
    fn choices(&self) -> usize;
    /// For a streamed answer.
    fn stream(&self, meta: &AnswerMeta) -> Box<dyn StreamEncoder>;
    /// For a whole one.
    fn whole(&self, meta: &AnswerMeta) -> Box<dyn WholeCollector>;
}

/// Events to a stream of the client's dialect.
pub trait StreamEncoder: Send {
    /// Appends what says `event`.
    fn event(&mut self, event: &ChatEvent, out: &mut BytesMut);
    /// The counts so far, before the events they belong to (for usage in every chunk).
    fn set_usage(&mut self, _usage: Usage) {}
    /// Appends the end of a complete answer.
    fn done(&mut self, out: &mut BytesMut);
    /// Appends an error as the last event; nothing follows.
    fn fail(&mut self, shape: ErrorShape, message: &str, out: &mut BytesMut);
}

/// Events to one whole answer of the client's dialect.
pub trait WholeCollector: Send {
    /// Takes an event.
    fn event(&mut self, event: &ChatEvent);
    /// Mean log-probability of a choice, for `best_of`.
    fn score(&mut self, _choice: u32, _mean: f32) {}
    /// Bytes held.
    fn bytes(&self) -> usize;
    /// The body; `None` if a choice is missing.
    fn finish(self: Box<Self>) -> Option<Bytes>;
}

/// A provider's API: how it is asked, and how what it says is read. One per (provider protocol); stateless.
pub trait ProviderCodec: Send + Sync {
    /// The request for the provider's `model`. What the provider cannot express is an [`ApiError`], unless a rule of its reference
    /// page leaves it out.
    fn encode(&self, request: &Request, model: &str) -> Result<ProviderCall, ApiError>;
    /// Reads the answer to `request`.
    fn decoder(&self, request: &Request) -> Box<dyn AnswerDecoder>;
    /// Reads the body of an answer whose status is not 2xx.
    fn fault(&self, status: u16, body: &[u8]) -> ProviderFault;
}

/// What is sent to a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderCall {
    /// Path and query behind the provider's base URL: `/chat/completions`.
    pub path: String,
    /// JSON.
    pub body: Vec<u8>,
}

/// Reads one answer with status 2xx, streamed or whole as the request asked.
pub trait AnswerDecoder: Send {
    /// Takes the next bytes of the body, cut anywhere, and appends the events that they complete.
    fn push(&mut self, bytes: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault>;
    /// The body has ended: appends what is left. An answer that is not complete is a fault ([`FaultClass::Truncated`]).
    fn end(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault>;
    /// Whether the answer is complete, though its body has not ended (`[DONE]`, `message_stop`).
    fn is_complete(&self) -> bool;
    /// Bytes held of what has not ended: an event, a frame, the whole body.
    fn held(&self) -> usize;
}

/// What a provider said instead of an answer, or what its answer lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderFault {
    /// Decides what the gateway does.
    pub class: FaultClass,
    /// The provider's words, shortened; for the client.
    pub message: String,
    /// The provider's own code or type, for the log.
    pub code: Option<String>,
}

impl ProviderFault {
    /// A fault without a code of the provider's.
    pub fn new(class: FaultClass, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), code: None }
    }

    /// Adds the provider's code or type.
    pub fn code(mut self, code: impl Into<String>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// The class that a status alone says.
    pub fn class_of(status: u16) -> FaultClass {
        match status {
            401 => FaultClass::Unauthorized,
            402 => FaultClass::Quota,
            403 => FaultClass::Forbidden,
            404 => FaultClass::NotFound,
            408 | 504 => FaultClass::Timeout,
            413 => FaultClass::TooLarge,
            429 => FaultClass::RateLimited,
            503 | 529 => FaultClass::Overloaded,
            400..=499 => FaultClass::Invalid,
            _ => FaultClass::Server,
        }
    }
}

impl From<crate::sse::TooLarge> for ProviderFault {
    fn from(fault: crate::sse::TooLarge) -> Self {
        Self::new(FaultClass::Garbled, format!("The provider's answer cannot be read: {fault}."))
    }
}

/// Kinds of what goes wrong at a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultClass {
    /// The request breaks a rule of the provider.
    Invalid,
    /// It does not fit the model's context.
    ContextLength,
    /// It, or its answer, breaks a content policy.
    ContentPolicy,
    /// The body is too large.
    TooLarge,
    /// The gateway's key for the provider is not accepted.
    Unauthorized,
    /// The gateway's key may not do this.
    Forbidden,
    /// The provider has no such model or URL.
    NotFound,
    /// Too many requests or tokens per time.
    RateLimited,
    /// Credit is spent.
    Quota,
    /// The provider is busy.
    Overloaded,
    /// The provider failed.
    Server,
    /// The provider took too long.
    Timeout,
    /// The answer ended before it was complete.
    Truncated,
    /// The answer is not what the provider's API promises.
    Garbled,
}

/// The body of an error in that dialect.
pub fn error_body(
    dialect: Dialect,
    shape: ErrorShape,
    param: Option<&str>,
    message: &str,
    request_id: &str,
) -> Vec<u8> {
    match dialect {
        Dialect::OpenAi => crate::openai::error_body(shape, param, message),
        Dialect::Anthropic => crate::anthropic::error_body(shape, message, request_id),
        Dialect::Gemini => crate::gemini::error_body(shape, message),
    }
}

/// An error as the last event of a stream in that dialect, where no encoder has begun one.
pub fn error_event(dialect: Dialect, shape: ErrorShape, message: &str, out: &mut BytesMut) {
    match dialect {
        Dialect::OpenAi => crate::openai::error_event(shape, None, message, out),
        Dialect::Anthropic => {
            out.put_slice(b"event: error\ndata: ");
            crate::anthropic::errors::put_error(out, shape, message, None);
            out.put_slice(b"\n\n");
        }
        Dialect::Gemini => {
            out.put_slice(b"data: ");
            crate::gemini::errors::put_error(out, shape, message);
            out.put_slice(b"\n\n");
        }
    }
}
