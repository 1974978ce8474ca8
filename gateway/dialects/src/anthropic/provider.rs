//! Anthropic as a provider: the codec that asks it and reads what it says. The rules are in `docs/reference/anthropic.md`.

use super::decode::Decoder;
use super::encode;
use super::fault;
use crate::codec::{AnswerDecoder, ProviderCall, ProviderCodec, ProviderFault};
use crate::error::ApiError;
use crate::request::Request;

/// How reasoning is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThinkingStyle {
    /// A budget in tokens (`"type":"enabled"`).
    #[default]
    Budget,
    /// The model decides, an effort in words guides it (`"type":"adaptive"`): models that take no budget.
    Adaptive,
}

/// Asks the Messages API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Codec {
    /// `max_tokens` of a request that names none; the API demands one.
    pub max_tokens: u32,
    /// How reasoning is asked for.
    pub thinking: ThinkingStyle,
}

/// What a request without a limit may answer with: every model of the API allows that much.
pub const MAX_TOKENS_DEFAULT: u32 = 4_096;

impl Default for Codec {
    fn default() -> Self {
        Self { max_tokens: MAX_TOKENS_DEFAULT, thinking: ThinkingStyle::default() }
    }
}

impl ProviderCodec for Codec {
    fn encode(&self, request: &Request, model: &str) -> Result<ProviderCall, ApiError> {
        let refused = |what: &str| {
            Err(ApiError::unsupported_value(
                "model",
                format!("model: Anthropic's models make no {what}; ask another model"),
            ))
        };
        match request {
            Request::Chat(chat) => {
                let body = encode::body(self, chat, model)?;
                Ok(ProviderCall { path: "/messages".to_owned(), body })
            }
            Request::Complete(_) => refused("plain continuations of a text"),
            Request::Embed(_) => refused("vectors"),
            Request::Rerank(_) => refused("scores"),
        }
    }

    fn decoder(&self, request: &Request) -> Box<dyn AnswerDecoder> {
        Box::new(Decoder::new(request.stream()))
    }

    fn fault(&self, status: u16, body: &[u8]) -> ProviderFault {
        fault::read(status, body)
    }
}
