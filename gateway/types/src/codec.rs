//! The seams between a dialect and the gateway: a client's side and a provider's side, both free of sockets.
//!
//! Client's side: a body becomes a [`Decoded`] request, whose [`AnswerForm`] makes the encoder of a stream or the
//! collector of a whole answer. Provider's side: a [`ProviderCodec`] writes the request in the provider's form and
//! makes the [`AnswerDecoder`] that turns the provider's bytes, cut anywhere, into events.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use crate::error::ApiError;
use crate::error_shape::ErrorShape;
use crate::event::{ChatEvent, Usage};
use crate::json::Fault;
use crate::request::Request;

/// Families of public APIs. The APIs of one family share the shape of errors and the way a key is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// OpenAI and everything compatible with it.
    OpenAi,
    /// Anthropic's Messages API.
    Anthropic,
    /// Google's Gemini API.
    Gemini,
    /// Ollama's API.
    Ollama,
}

/// An operation of a public API that is answered by a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Surface {
    /// Chat completion, OpenAI `/v1/chat/completions`.
    Chat,
    /// Plain text completion, OpenAI `/v1/completions`.
    Completions,
    /// Stateful conversation, OpenAI `/v1/responses`.
    Responses,
    /// Vectors of texts, OpenAI `/v1/embeddings`.
    Embeddings,
    /// `/v1/rerank`, as Jina and Cohere shape it.
    Rerank,
    /// `/v1/score`, as vLLM shapes it.
    Score,
    /// Conversation, Anthropic `/v1/messages`.
    Messages,
    /// Number of prompt tokens without an answer, Anthropic `/v1/messages/count_tokens`.
    CountTokens,
    /// Conversation, Gemini `generateContent` and `streamGenerateContent`.
    Generate,
    /// Vectors of texts, Gemini `embedContent` and `batchEmbedContents`.
    Embed,
    /// Conversation, Ollama `/api/chat`.
    OllamaChat,
    /// Conversation of one turn or plain continuation, Ollama `/api/generate`.
    OllamaGenerate,
    /// Vectors of texts, Ollama `/api/embed` and `/api/embeddings`.
    OllamaEmbed,
}

impl Surface {
    /// Name of the operation, by OpenTelemetry's GenAI conventions where these define one.
    pub fn operation(self) -> &'static str {
        match self {
            Surface::Chat | Surface::Responses | Surface::Messages | Surface::OllamaChat => "chat",
            Surface::Completions | Surface::OllamaGenerate => "text_completion",
            Surface::Generate => "generate_content",
            Surface::Embeddings | Surface::Embed | Surface::OllamaEmbed => "embeddings",
            Surface::Rerank => "rerank",
            Surface::Score => "score",
            Surface::CountTokens => "count_tokens",
        }
    }

    /// Family of public APIs to which the operation belongs; it decides the shape of errors.
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
            Surface::OllamaChat | Surface::OllamaGenerate | Surface::OllamaEmbed => Dialect::Ollama,
        }
    }
}

/// Framing of a Gemini answer, as the URL asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// One whole answer, `generateContent`.
    Whole,
    /// Server-sent events, `streamGenerateContent?alt=sse`.
    Events,
    /// `streamGenerateContent`: one JSON array, element by element.
    Array,
}

/// A decoded request and the form that its answer has in the client's dialect.
pub struct Decoded {
    /// The request, independent of dialects.
    pub request: Request,
    /// Form of the answer in the client's dialect, which makes its encoder or collector.
    pub form: Box<dyn AnswerForm>,
}

/// Values that an answer needs besides the request and its events.
#[derive(Clone, Debug)]
pub struct AnswerMeta {
    /// Answer id without prefix: each dialect puts its own in front (`chatcmpl-`, `resp_`, `msg_`).
    pub id: String,
    /// Creation time in Unix seconds.
    pub created: u64,
    /// Time since the request was read, for APIs whose answers say how long they took.
    pub elapsed: Elapsed,
}

impl AnswerMeta {
    /// Values of an answer that does not say how long it took.
    pub fn new(id: String, created: u64) -> Self {
        Self { id, created, elapsed: Elapsed::default() }
    }
}

/// Clock of one request, handed in: codecs read none themselves. The default one stands still.
#[derive(Clone, Default)]
pub struct Elapsed(Option<Arc<dyn Fn() -> Duration + Send + Sync>>);

impl Elapsed {
    /// Clock that `read` reads.
    pub fn new(read: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(read)))
    }

    /// Time since the request was read.
    pub fn get(&self) -> Duration {
        self.0.as_ref().map_or(Duration::ZERO, |read| read())
    }
}

impl std::fmt::Debug for Elapsed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.get().fmt(f)
    }
}

/// Factory of the encoder or collector that writes the answer to one request.
pub trait AnswerForm: Send + Sync {
    /// Number of choices that must finish before the answer is complete; 0 where the request has none.
    fn choices(&self) -> usize;
    /// Makes the encoder for a streamed answer.
    fn stream(&self, meta: &AnswerMeta) -> Box<dyn StreamEncoder>;
    /// Makes the collector for a whole answer.
    fn whole(&self, meta: &AnswerMeta) -> Box<dyn WholeCollector>;
}

/// Encoder of events as a stream of the client's dialect.
pub trait StreamEncoder: Send {
    /// Appends the bytes of `event` to `out`.
    fn event(&mut self, event: &ChatEvent, out: &mut BytesMut);
    /// Sets the counts so far, before the events they belong to (for usage in every chunk).
    fn set_usage(&mut self, _usage: Usage) {}
    /// Bytes held of what the API sends whole, such as calls, for the caller's memory bound.
    fn held(&self) -> usize {
        0
    }
    /// Appends the end of a complete answer.
    fn done(&mut self, out: &mut BytesMut);
    /// Appends an error as the last event; nothing follows.
    fn fail(&mut self, shape: ErrorShape, message: &str, out: &mut BytesMut);
}

/// Collector of events into one whole answer of the client's dialect.
pub trait WholeCollector: Send {
    /// Adds an event to the answer.
    fn event(&mut self, event: &ChatEvent);
    /// Sets the mean log-probability of a choice, for `best_of`.
    fn score(&mut self, _choice: u32, _mean: f32) {}
    /// Bytes held, for the caller's memory bound.
    fn bytes(&self) -> usize;
    /// Body of the answer; `None` if a choice has not finished.
    fn finish(self: Box<Self>) -> Option<Bytes>;
}

/// Codec of a provider's API: writes requests, reads answers and errors. One per provider protocol; stateless.
pub trait ProviderCodec: Send + Sync {
    /// Writes the request for the provider's `model`. A field that the provider cannot express is an [`ApiError`],
    /// unless a rule of its reference page leaves it out.
    fn encode(&self, request: &Request, model: &str) -> Result<ProviderCall, ApiError>;
    /// Makes the decoder for the answer to `request`.
    fn decoder(&self, request: &Request) -> Box<dyn AnswerDecoder>;
    /// Reads the body of an answer whose status is not 2xx.
    fn fault(&self, status: u16, body: &[u8]) -> ProviderFault;
}

/// Request to a provider, ready to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderCall {
    /// Path and query behind the provider's base URL: `/chat/completions`.
    pub path: String,
    /// Request body as JSON text.
    pub body: Vec<u8>,
}

/// Decoder of one answer with status 2xx, streamed or whole as the request asked.
pub trait AnswerDecoder: Send {
    /// Takes the next bytes of the body, cut anywhere, and appends the events that they complete to `out`.
    fn push(&mut self, bytes: &[u8], out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault>;
    /// Handles the end of the body and appends the remaining events. An incomplete answer is a fault
    /// ([`FaultClass::Truncated`]).
    fn end(&mut self, out: &mut Vec<ChatEvent>) -> Result<(), ProviderFault>;
    /// Returns true if the answer is complete, though its body has not ended (`[DONE]`, `message_stop`).
    fn is_complete(&self) -> bool;
    /// Bytes buffered of an incomplete unit: an event, a frame, the whole body.
    fn held(&self) -> usize;
    /// Token counts that the answer has reported so far, of an API that reports some before the end of the answer.
    fn usage(&self) -> Option<Usage> {
        None
    }
}

/// Error of a provider: its error answer, or the defect of its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderFault {
    /// Class of the fault, by which the gateway decides about retry, fallback and status.
    pub class: FaultClass,
    /// The provider's message, shortened; shown to the client.
    pub message: String,
    /// The provider's own code or type, for the log.
    pub code: Option<String>,
}

impl ProviderFault {
    /// Makes a fault without a provider's code.
    pub fn new(class: FaultClass, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), code: None }
    }

    /// Adds the provider's own code or type of the error, for the log.
    pub fn code(mut self, code: impl Into<String>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// Fault class of an HTTP status alone.
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

impl From<Fault> for ProviderFault {
    fn from(fault: Fault) -> Self {
        let message = match fault {
            Fault::Syntax { at, what } => format!("The provider's answer is not valid JSON: {what} at byte {at}."),
            Fault::Refused(error) => format!("The provider's answer is not what its API promises: {}.", error.message),
        };
        ProviderFault::new(FaultClass::Garbled, message)
    }
}

impl From<crate::sse::TooLarge> for ProviderFault {
    fn from(fault: crate::sse::TooLarge) -> Self {
        Self::new(FaultClass::AnswerTooLarge, format!("The provider's answer cannot be read: {fault}."))
    }
}

/// Classes of provider errors, by which the gateway decides about retry, fallback and status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultClass {
    /// The request breaks a rule of the provider.
    Invalid,
    /// The request does not fit the model's context.
    ContextLength,
    /// The request or its answer breaks a content policy.
    ContentPolicy,
    /// The request's body is too large for the provider.
    TooLarge,
    /// The gateway's key for the provider is not accepted.
    Unauthorized,
    /// The gateway's key lacks the permission for the model or operation.
    Forbidden,
    /// The provider has no such model or URL.
    NotFound,
    /// Too many requests or tokens per unit of time.
    RateLimited,
    /// The account's credit or quota at the provider is spent.
    Quota,
    /// The provider is busy, as status 503 or 529 says.
    Overloaded,
    /// The provider failed inside, as most statuses of 5xx say.
    Server,
    /// The provider took too long to answer (408, 504).
    Timeout,
    /// The answer ended before it was complete.
    Truncated,
    /// The answer breaks the format of the provider's API.
    Garbled,
    /// The answer, or an event of it, is larger than the gateway holds: it was made, and may be billed.
    AnswerTooLarge,
}
