//! AWS Bedrock as a provider: its Converse API, whose streams are AWS event streams. The rules are in `docs/reference/bedrock.md`.
//!
//! The sender signs requests (Signature Version 4); nothing in this module knows a key.

mod answer;
mod encode;
mod fault;
mod frame;
mod messages;

use penstock_types::codec::{AnswerDecoder, ProviderCall, ProviderCodec, ProviderFault};
use penstock_types::error::ApiError;
use penstock_types::request::Request;

pub use frame::{Frame, FrameFault, FrameReader, MESSAGE_BYTES_MAX};

/// Codec of `converse` and `converse-stream`. The base URL is that of `bedrock-runtime` in a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Codec;

/// Family of a model, by its id: fields beyond the Converse API differ per family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Claude,
    Nova,
    GptOss,
    Other,
}

impl Family {
    fn of(model: &str) -> Self {
        let families = [("anthropic.", Self::Claude), ("amazon.nova", Self::Nova), ("openai.gpt-oss", Self::GptOss)];
        families.iter().find(|(word, _)| model.contains(word)).map_or(Self::Other, |(_, family)| *family)
    }
}

impl ProviderCodec for Codec {
    fn encode(&self, request: &Request, model: &str) -> Result<ProviderCall, ApiError> {
        let Request::Chat(chat) = request else {
            let why = "model: Bedrock's Converse API answers conversations only; ask another model";
            return Err(ApiError::unsupported_value("model", why));
        };
        let method = if chat.stream.is_some() { "converse-stream" } else { "converse" };
        let body = encode::body(chat, Family::of(model))?;
        Ok(ProviderCall { path: format!("/model/{}/{method}", escaped(model)), body })
    }

    fn decoder(&self, _: &Request) -> Box<dyn AnswerDecoder> {
        Box::new(answer::Decoder::default())
    }

    fn fault(&self, status: u16, body: &[u8]) -> ProviderFault {
        fault::of_body(status, body)
    }
}

/// Percent-encodes one segment of a path: a model's id may be an ARN, with colons and slashes.
fn escaped(segment: &str) -> String {
    let mut out = String::with_capacity(segment.len());
    for byte in segment.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}
