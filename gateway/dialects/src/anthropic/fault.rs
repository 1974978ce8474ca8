//! What Anthropic says instead of an answer: `{"type":"error","error":{"type","message"}}`.

use crate::codec::{FaultClass, ProviderFault};
use crate::json::{Fault, Kind, Reader};

/// Characters of a provider's message that are kept.
const MESSAGE_CHARS_MAX: usize = 2_000;
/// Characters of a provider's error type that are kept.
const KIND_CHARS_MAX: usize = 64;

/// Reads the body of an answer whose status is not 2xx. What is no error of the API is told by its status.
pub(super) fn read(status: u16, body: &[u8]) -> ProviderFault {
    let mut said = Said::default();
    let read = Reader::new(body).and_then(|mut reader| {
        reader.object(|reader, key| match (key.as_ref(), reader.kind()?) {
            ("error", Kind::Object) => said.read(reader),
            _ => reader.skip(),
        })
    });
    if read.is_err() || (said.kind.is_empty() && said.message.is_empty()) {
        return ProviderFault::new(
            ProviderFault::class_of(status),
            format!("The upstream answered with status {status}."),
        );
    }
    said.fault(status)
}

/// The inside of `error`.
#[derive(Default)]
pub(super) struct Said {
    kind: String,
    message: String,
}

impl Said {
    pub(super) fn read(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        reader.object(|reader, key| {
            match (key.as_ref(), reader.kind()?) {
                ("type", Kind::String) => self.kind = reader.string()?.chars().take(KIND_CHARS_MAX).collect(),
                ("message", Kind::String) => self.message = reader.string()?.chars().take(MESSAGE_CHARS_MAX).collect(),
                _ => reader.skip()?,
            }
            Ok(())
        })
    }

    /// The fault; `status` is 0 in a stream.
    pub(super) fn fault(self, status: u16) -> ProviderFault {
        let class = class_of(&self.kind, &self.message, status);
        let message = if self.message.is_empty() { self.kind.clone() } else { self.message };
        match self.kind.is_empty() {
            true => ProviderFault::new(class, message),
            false => ProviderFault::new(class, message).code(self.kind),
        }
    }
}

/// The class that an error's type says; `status` is 0 in a stream.
pub(super) fn class_of(kind: &str, message: &str, status: u16) -> FaultClass {
    match kind {
        "invalid_request_error" if is_too_long(message) => FaultClass::ContextLength,
        // Some gateways say all they know in the status.
        "invalid_request_error" if status == 413 => FaultClass::TooLarge,
        "invalid_request_error" => FaultClass::Invalid,
        "authentication_error" => FaultClass::Unauthorized,
        "billing_error" => FaultClass::Quota,
        "permission_error" => FaultClass::Forbidden,
        "not_found_error" => FaultClass::NotFound,
        "request_too_large" => FaultClass::TooLarge,
        "rate_limit_error" => FaultClass::RateLimited,
        "timeout_error" => FaultClass::Timeout,
        "overloaded_error" => FaultClass::Overloaded,
        _ if status == 0 => FaultClass::Server,
        _ => ProviderFault::class_of(status),
    }
}

/// The API has one type for every fault of a request; only its words say that the prompt does not fit.
fn is_too_long(message: &str) -> bool {
    let text = message.to_ascii_lowercase();
    ["prompt is too long", "exceed context limit", "context window", "context length"]
        .iter()
        .any(|words| text.contains(words))
}
