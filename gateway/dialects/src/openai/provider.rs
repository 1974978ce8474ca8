//! The provider's side of the OpenAI API: chat completions, completions, embeddings and rerank, as compatible servers
//! speak them.
//!
//! Servers differ in extensions and in mistakes; the rules for lenient and strict reading are in
//! `docs/reference/openai.md`. One idea: a chunk and a whole answer have one shape (`delta` and `message` hold the
//! same fields), so one reader reads both. The first byte of a body decides its form, not the form that was asked for.

mod calls;
mod chat;
mod completion;
pub(crate) mod fault;
mod logprobs;
mod messages;
mod responses;
pub(crate) mod usage;
mod vectors;

use super::chat_answer::ReasoningNames;
use penstock_types::codec::{AnswerDecoder, ProviderCall, ProviderCodec, ProviderFault};
use penstock_types::error::ApiError;
use penstock_types::request::Request;

use crate::answer_body::Body;
pub(super) use crate::answer_json::{Object, list};
use crate::provider_fields::Api;
pub(super) use calls::Balance;
use fault::fault_body;
pub(super) use messages::put_signature;
pub use responses::ResponsesCodec;

/// Field name under which the bound of an answer is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MaxTokensName {
    /// `max_tokens`, which every compatible server knows.
    #[default]
    MaxTokens,
    /// `max_completion_tokens`, which OpenAI demands of reasoning models.
    MaxCompletionTokens,
}

/// Kind of server, which decides about fields that only some servers know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Server {
    /// A compatible server. vLLM's `structured_outputs` are written; of tools that are only allowed in part, the
    /// others are left out.
    #[default]
    Compatible,
    /// OpenAI itself (or Azure): `allowed_tools` and `prompt_cache_key` are written, and constraints that only vLLM has
    /// are refused.
    OpenAi,
}

impl Server {
    /// Column of the server in the list of fields.
    fn api(self) -> Api {
        match self {
            Server::Compatible => Api::Compatible,
            Server::OpenAi => Api::OpenAi,
        }
    }
}

/// Codec of OpenAI-compatible providers: `/chat/completions`, `/completions`, `/embeddings`, `/rerank`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatCodec {
    /// Field name of the bound of an answer.
    pub max_tokens: MaxTokensName,
    /// Field names under which earlier reasoning is sent back; `None` leaves the reasoning out.
    pub reasoning: Option<ReasoningNames>,
    /// Kind of server.
    pub server: Server,
}

impl Default for ChatCodec {
    fn default() -> Self {
        Self {
            max_tokens: MaxTokensName::MaxTokens,
            reasoning: Some(ReasoningNames::ReasoningContent),
            server: Server::Compatible,
        }
    }
}

impl ChatCodec {
    /// Settings for OpenAI itself (and Azure), which refuses unknown fields.
    pub fn strict() -> Self {
        Self { max_tokens: MaxTokensName::MaxCompletionTokens, reasoning: None, server: Server::OpenAi }
    }
}

impl ProviderCodec for ChatCodec {
    fn encode(&self, request: &Request, model: &str) -> Result<ProviderCall, ApiError> {
        let (path, body) = match request {
            Request::Chat(chat) => ("/chat/completions", chat::encode(self, chat, model)?),
            Request::Complete(complete) => ("/completions", completion::encode(self, complete, model)?),
            Request::Embed(embed) => ("/embeddings", vectors::encode_embed(self.server, embed, model)?),
            Request::Rerank(rerank) => ("/rerank", vectors::encode_rerank(rerank, model)),
        };
        Ok(ProviderCall { path: path.to_owned(), body })
    }

    fn decoder(&self, request: &Request) -> Box<dyn AnswerDecoder> {
        match request {
            Request::Chat(chat) => Box::new(Body::new(chat::ChatReader::new(chat))),
            Request::Complete(complete) => Box::new(Body::new(completion::CompletionReader::new(complete))),
            Request::Embed(embed) => Box::new(Body::new(vectors::VectorReader::new(embed.inputs.len()))),
            Request::Rerank(rerank) => Box::new(Body::new(vectors::ScoreReader::new(rerank.documents.len()))),
        }
    }

    fn fault(&self, status: u16, body: &[u8]) -> ProviderFault {
        fault_body(status, body)
    }
}
