//! Anthropic's error answers: `{"type":"error","error":{"type","message"}}`, classified for the gateway.

use crate::account_faults::class_of_anthropics;
use penstock_types::codec::{FaultClass, ProviderFault};
use penstock_types::json::{Fault, Kind, Reader};

/// Longest kept part of a provider's message, in characters.
const MESSAGE_CHARS_MAX: usize = 2_000;
/// Longest kept part of a provider's error type, in characters.
const KIND_CHARS_MAX: usize = 64;

/// Reads the body of an answer whose status is not 2xx. A body that is not an error of this API is classified by its
/// status alone.
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

/// Fields of the `error` object in a provider's error body.
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

    /// The provider fault for this error; `status` is 0 within a stream.
    pub(super) fn fault(self, status: u16) -> ProviderFault {
        let class = class_of(&self.kind, &self.message, status);
        let message = if self.message.is_empty() { self.kind.clone() } else { self.message };
        match self.kind.is_empty() {
            true => ProviderFault::new(class, message),
            false => ProviderFault::new(class, message).code(self.kind),
        }
    }
}

/// Fault class of an error's type and message; `status` is 0 within a stream.
pub(super) fn class_of(kind: &str, message: &str, status: u16) -> FaultClass {
    match kind {
        "invalid_request_error" => class_of_refusal(message, status),
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

/// Fault class of an `invalid_request_error`: the API has one type for every fault of a request and for accounts that are used
/// up, so only the wording tells.
fn class_of_refusal(message: &str, status: u16) -> FaultClass {
    match class_of_anthropics(message) {
        Some(class) => class,
        None if is_too_long(message) => FaultClass::ContextLength,
        // Some gateways put the precise cause in the status only.
        None if status == 413 => FaultClass::TooLarge,
        None => FaultClass::Invalid,
    }
}

/// Returns true if the message says that the prompt is too long.
fn is_too_long(message: &str) -> bool {
    let text = message.to_ascii_lowercase();
    ["prompt is too long", "exceed context limit", "context window", "context length"]
        .iter()
        .any(|words| text.contains(words))
}
