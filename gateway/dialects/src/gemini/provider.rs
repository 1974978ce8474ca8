//! Gemini as a provider, from Google's own endpoint or from Vertex AI: the codec that writes its requests and reads
//! its answers. The rules are in `docs/reference/gemini.md`.

mod answer;
pub(crate) mod contents;
mod encode;
mod vectors;

use crate::answer_body::Body;
use crate::openai::provider::fault;
use penstock_types::codec::{AnswerDecoder, FaultClass, ProviderCall, ProviderCodec, ProviderFault};
use penstock_types::error::ApiError;
use penstock_types::request::Request;

/// Form in which a request asks for reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThinkingStyle {
    /// Chosen by the model's name: a budget for Gemini 1 and 2, a level for all others.
    #[default]
    ByModel,
    /// A budget in tokens (`thinkingBudget`).
    Budget,
    /// A word for the level of thinking (`thinkingLevel`).
    Level,
}

/// Codec of `generateContent`, `streamGenerateContent` and `batchEmbedContents`.
///
/// Paths begin with `/models/`, so the base URL ends in `/v1beta`, or for Vertex AI in `/publishers/google`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Codec {
    /// Form in which reasoning is asked for.
    pub thinking: ThinkingStyle,
    /// True for Vertex AI, which refuses the ids of calls and of their results: it finds a call by the function's name.
    pub without_ids: bool,
}

impl Codec {
    /// Settings for Vertex AI.
    pub fn vertex() -> Self {
        Self { without_ids: true, ..Self::default() }
    }

    /// Form of the reasoning field that `model` understands; never [`ThinkingStyle::ByModel`].
    fn style(self, model: &str) -> ThinkingStyle {
        let old = || ["gemini-1", "gemini-2"].iter().any(|family| model.contains(family));
        match self.thinking {
            ThinkingStyle::ByModel if old() => ThinkingStyle::Budget,
            ThinkingStyle::ByModel => ThinkingStyle::Level,
            style => style,
        }
    }
}

/// Path of a method of a model behind the API's base URL: `/models/NAME:generateContent`.
pub fn path(model: &str, method: &str) -> String {
    format!("/{}:{method}", escaped(&resource(model)))
}

impl ProviderCodec for Codec {
    fn encode(&self, request: &Request, model: &str) -> Result<ProviderCall, ApiError> {
        let refused = |what: &str| {
            let why = format!("model: Gemini's models make no {what}; ask another model");
            Err(ApiError::unsupported_value("model", why))
        };
        let (method, body) = match request {
            Request::Chat(chat) => {
                let stream = chat.stream.is_some();
                let method = if stream { "streamGenerateContent?alt=sse" } else { "generateContent" };
                (method, encode::body(chat, self.style(model), self.without_ids)?)
            }
            Request::Embed(embed) => ("batchEmbedContents", vectors::body(embed, &resource(model))?),
            Request::Complete(_) => return refused("plain continuations"),
            Request::Rerank(_) => return refused("scores"),
        };
        Ok(ProviderCall { path: path(model, method), body })
    }

    fn decoder(&self, request: &Request) -> Box<dyn AnswerDecoder> {
        match request {
            Request::Embed(embed) => Box::new(Body::new(vectors::Reader::new(embed.inputs.len()))),
            Request::Chat(chat) => Box::new(Body::new(answer::Reader::new(chat.n))),
            Request::Complete(_) | Request::Rerank(_) => Box::new(Body::new(answer::Reader::new(1))),
        }
    }

    fn fault(&self, status: u16, body: &[u8]) -> ProviderFault {
        reclassed(fault::fault_body(status, body), body)
    }
}

/// Corrects the class of a fault by Google's own status word, where the HTTP status means something else at other
/// providers.
fn reclassed(mut fault: ProviderFault, body: &[u8]) -> ProviderFault {
    const WORDS: [(&str, FaultClass); 5] = [
        ("API_KEY_INVALID", FaultClass::Unauthorized),
        ("API key not valid", FaultClass::Unauthorized),
        ("API key expired", FaultClass::Unauthorized),
        ("payload size exceeds the limit", FaultClass::TooLarge),
        // The key's project or region may not use the API at all.
        ("FAILED_PRECONDITION", FaultClass::Forbidden),
    ];
    if fault.class == FaultClass::Invalid {
        let said = |words: &str| body.windows(words.len()).any(|piece| piece == words.as_bytes());
        let known = WORDS.iter().find(|(words, _)| said(words));
        fault.class = known.map_or(fault.class, |(_, class)| *class);
    }
    fault
}

/// Resource name of a model: with its collection (`models/`) in front.
fn resource(model: &str) -> String {
    let named = ["models/", "tunedModels/", "endpoints/"].iter().any(|collection| model.starts_with(collection));
    if named { model.to_owned() } else { format!("models/{model}") }
}

/// Percent-encodes the bytes of a path that need it.
fn escaped(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/@".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}
