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
    /// As the model's name says: the early Claude models, and whatever else speaks this API, take a budget; the others do not.
    #[default]
    ByModel,
    /// A budget in tokens (`"type":"enabled"`).
    Budget,
    /// The model decides, an effort in words guides it (`"type":"adaptive"`).
    Adaptive,
}

/// Claude models that take a budget of thinking. A closed list: later ones refuse it.
const WITH_BUDGET: [&str; 11] = [
    "claude-2",
    "claude-3",
    "claude-instant",
    "opus-4-0",
    "opus-4-1",
    "opus-4-2",
    "opus-4-5",
    "sonnet-4-0",
    "sonnet-4-2",
    "sonnet-4-5",
    "haiku-4-5",
];

/// Claude models that take no budget and still draw with temperature, `top_p` and `top_k`; later ones refuse these.
const WITH_SAMPLING: [&str; 2] = ["opus-4-6", "sonnet-4-6"];

fn is_any(model: &str, names: &[&str]) -> bool {
    names.iter().any(|name| model.contains(name))
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

impl Codec {
    /// Whether that model is asked to think with a budget.
    pub(super) fn gives_budget(&self, model: &str) -> bool {
        match self.thinking {
            ThinkingStyle::Budget => true,
            ThinkingStyle::Adaptive => false,
            ThinkingStyle::ByModel => !model.contains("claude") || is_any(model, &WITH_BUDGET),
        }
    }

    /// Whether that model takes temperature, `top_p` and `top_k`.
    pub(super) fn takes_sampling(model: &str) -> bool {
        !model.contains("claude") || is_any(model, &WITH_BUDGET) || is_any(model, &WITH_SAMPLING)
    }
}

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
