//! Anthropic as a provider: the codec that writes its requests and reads its answers. The rules are in
//! `docs/reference/anthropic.md`.

use super::decode::Decoder;
use super::encode;
use super::fault;
use penstock_types::codec::{AnswerDecoder, ProviderCall, ProviderCodec, ProviderFault};
use penstock_types::error::ApiError;
use penstock_types::request::Request;

/// Form in which a request asks for reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThinkingStyle {
    /// Chosen by the model's name: early Claude models, and any other model behind this API, take a budget; later
    /// Claude models do not.
    #[default]
    ByModel,
    /// A budget in tokens (`"type":"enabled"`).
    Budget,
    /// The model decides, guided by an effort word (`"type":"adaptive"`).
    Adaptive,
}

/// Claude models that take a thinking budget. The list is closed: later models refuse a budget.
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

/// Claude models that take no budget and still accept temperature, `top_p` and `top_k`; later models refuse these.
const WITH_SAMPLING: [&str; 2] = ["opus-4-6", "sonnet-4-6"];

fn is_any(model: &str, names: &[&str]) -> bool {
    names.iter().any(|name| model.contains(name))
}

/// Codec of the Messages API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Codec {
    /// `max_tokens` for a request that names none; the API demands the field.
    pub max_tokens: u32,
    /// Form in which reasoning is asked for.
    pub thinking: ThinkingStyle,
}

/// Default of [`Codec::max_tokens`]: every model of the API allows that much.
pub const MAX_TOKENS_DEFAULT: u32 = 4_096;

impl Codec {
    /// Returns true if reasoning is asked of `model` with a budget.
    pub(super) fn gives_budget(&self, model: &str) -> bool {
        match self.thinking {
            ThinkingStyle::Budget => true,
            ThinkingStyle::Adaptive => false,
            ThinkingStyle::ByModel => !model.contains("claude") || is_any(model, &WITH_BUDGET),
        }
    }

    /// Returns true if `model` takes temperature, `top_p` and `top_k`.
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
