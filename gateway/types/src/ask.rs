//! The operation that a URL asks for.

use crate::codec::Surface;

/// An operation, with the facts that only its URL says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Operation of the API that the URL names, such as chat or embeddings.
    pub surface: Surface,
    /// Model that the URL's path names (Gemini); `None`: the body names it.
    pub model: Option<String>,
    /// True if the URL's path asks for a stream (Gemini).
    pub stream: bool,
    /// Form of the operation, where several URLs share a surface.
    pub variant: Variant,
}

/// Forms of an operation that only its URL tells apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Variant {
    /// Usual form: one request, answered whole or as server-sent events.
    #[default]
    Usual,
    /// A stream as one JSON array instead of server-sent events (Gemini without `alt=sse`).
    Array,
    /// Several inputs in one body (Gemini's `batchEmbedContents`, Ollama's `/api/embed`).
    Batch,
    /// Counting of input tokens, without an answer.
    Count,
}

impl Ask {
    /// The operation `surface` as a count of its input tokens, for APIs that count by a URL of its own.
    pub fn count(surface: Surface) -> Self {
        Self { variant: Variant::Count, ..Self::new(surface) }
    }

    /// An operation whose URL says nothing more: no model, no stream, usual variant.
    pub fn new(surface: Surface) -> Self {
        Self { surface, model: None, stream: false, variant: Variant::Usual }
    }

    /// URL pattern of the operation: a bounded name for logs, metrics and scopes.
    pub fn label(&self) -> &'static str {
        match self.surface {
            Surface::Chat => "/v1/chat/completions",
            Surface::Completions => "/v1/completions",
            Surface::Responses if self.variant == Variant::Count => "/v1/responses/input_tokens",
            Surface::Responses => "/v1/responses",
            Surface::Embeddings => "/v1/embeddings",
            Surface::Rerank => "/v1/rerank",
            Surface::Score => "/v1/score",
            Surface::Messages => "/v1/messages",
            Surface::CountTokens => "/v1/messages/count_tokens",
            Surface::Generate if self.variant == Variant::Count => "/v1beta/models/{model}:countTokens",
            Surface::Generate => "/v1beta/models/{model}:generateContent",
            Surface::Embed => "/v1beta/models/{model}:embedContent",
            Surface::OllamaChat => "/api/chat",
            Surface::OllamaGenerate => "/api/generate",
            Surface::OllamaEmbed if self.variant == Variant::Batch => "/api/embed",
            Surface::OllamaEmbed => "/api/embeddings",
        }
    }
}
