//! Bedrock's errors, as a status with a body or as an exception in a stream.

use penstock_types::codec::{FaultClass, ProviderFault};
use penstock_types::json::{Kind, Reader, short};

/// Longest part of an error body that is read, in bytes.
const BODY_BYTES_MAX: usize = 64 << 10;

/// Fault of an answer whose status is not 2xx. The exception's name stands in a header that is not read here, so
/// status and message decide.
pub(super) fn of_body(status: u16, body: &[u8]) -> ProviderFault {
    let (name, message) = read(&body[..body.len().min(BODY_BYTES_MAX)]);
    // 424: the model behind Bedrock failed.
    let class = name.as_deref().and_then(class_of);
    let class =
        class.unwrap_or_else(|| if status == 424 { FaultClass::Server } else { ProviderFault::class_of(status) });
    fault(class, name, message.unwrap_or_else(|| format!("Bedrock answered with status {status}.")))
}

/// Fault of an exception in a stream.
pub(super) fn of_exception(name: &str, payload: &[u8]) -> ProviderFault {
    let (_, message) = read(&payload[..payload.len().min(BODY_BYTES_MAX)]);
    let class = class_of(name).unwrap_or(FaultClass::Server);
    fault(
        class,
        Some(short(name)),
        message.unwrap_or_else(|| format!("Bedrock ended the answer with {}.", short(name))),
    )
}

fn fault(class: FaultClass, code: Option<String>, message: String) -> ProviderFault {
    let said = message.to_ascii_lowercase();
    let speaks_of = |words: &[&str]| words.iter().any(|word| said.contains(word));
    let class = match class {
        FaultClass::Invalid if speaks_of(CONTEXT) => FaultClass::ContextLength,
        FaultClass::Invalid if speaks_of(&["model identifier is invalid", "not supported in this region"]) => {
            FaultClass::NotFound
        }
        FaultClass::Invalid if speaks_of(&["blocked by", "content filtering policy"]) => FaultClass::ContentPolicy,
        FaultClass::Forbidden if speaks_of(&["security token", "signature", "expired"]) => FaultClass::Unauthorized,
        class => class,
    };
    ProviderFault { class, message, code }
}

/// Wordings with which models behind Bedrock say that a prompt does not fit.
const CONTEXT: &[&str] = &[
    "input is too long",
    "prompt is too long",
    "exceed context limit",
    "too many total text bytes",
    "maximum context length",
    "too many input tokens",
    "input tokens exceeds",
    "context window",
];

fn class_of(exception: &str) -> Option<FaultClass> {
    // Old services write `com.amazon.coral#ThrottlingException:http://…`.
    let name = exception.rsplit('#').next().unwrap_or_default().split(':').next().unwrap_or_default();
    Some(match name.to_ascii_lowercase().trim_end_matches("exception") {
        "validation" | "conflict" => FaultClass::Invalid,
        "accessdenied" => FaultClass::Forbidden,
        "unrecognizedclient" | "invalidsignature" | "expiredtoken" | "incompletesignature" => FaultClass::Unauthorized,
        "resourcenotfound" => FaultClass::NotFound,
        "throttling" => FaultClass::RateLimited,
        "servicequotaexceeded" => FaultClass::Quota,
        "serviceunavailable" | "modelnotready" => FaultClass::Overloaded,
        "modeltimeout" => FaultClass::Timeout,
        "modelerror" | "modelstreamerror" | "internalserver" => FaultClass::Server,
        _ => return None,
    })
}

/// Reads the exception's name and message.
fn read(body: &[u8]) -> (Option<String>, Option<String>) {
    let (mut name, mut message) = (None, None);
    let Ok(mut reader) = Reader::new(body) else { return (None, None) };
    if reader.kind().is_ok_and(|kind| kind == Kind::Object) {
        // An unreadable body adds nothing; the status decides.
        _ = reader.object(|reader, key| {
            match (&*key, reader.kind()?) {
                ("message" | "Message", Kind::String) => message = Some(words(&reader.string()?)),
                ("__type" | "code", Kind::String) => name = Some(short(&reader.string()?)),
                _ => reader.skip()?,
            }
            Ok(())
        });
    }
    (name, message.filter(|message: &String| !message.is_empty()))
}

fn words(text: &str) -> String {
    const CHARS_MAX: usize = 512;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
