//! Maker of a signature of reasoning: the only provider that takes the signature back.
//!
//! A conversation can move from one provider to another, by fallback or by weight, and its history holds the signatures
//! of both. Each provider refuses a request with a signature of another one. Inside the gateway a signature names its
//! maker: Google's by a prefix, OpenAI's by one or by the beginning of a Fernet token. Anthropic's has neither.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use memchr::memmem;
use penstock_types::codec::Surface;
use penstock_types::request::OWN_SIGNATURE;

/// Prefix of Google's signature of reasoning inside the gateway.
pub(crate) const GOOGLE: &str = "gemini:";
/// Prefix of a signature that a provider of OpenAI's Responses API made, where it does not begin as OpenAI's own.
const OPENAI: &str = "openai:";
/// Prefix of Anthropic's signature where it stands as `encrypted_content` of a client.
const ANTHROPIC: &str = "anthropic:";
/// Beginning of `encrypted_content` as OpenAI itself makes it: a Fernet token, whose version is 0x80 and whose time has
/// leading zeros.
const FERNET: &str = "gAAAA";
/// Prefix of a redacted block's data, where an event has one string only.
pub(crate) const REDACTED: &str = "redacted_thinking:";
/// Prefix of the signature of the tool call that follows.
pub(crate) const CALL: &str = "call_signature:";
/// Prefix of a signature that is not Google's, before base64 encoding, in an answer to a client of Gemini's API.
pub(crate) const WRAPPED: &[u8] = b"penstock:";

/// Provider that made a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Maker {
    Anthropic,
    Gateway,
    Google,
    OpenAi,
}

impl Maker {
    /// Maker of one signature of reasoning.
    pub(crate) fn of(signature: &str) -> Self {
        let beginnings =
            [(GOOGLE, Self::Google), (OPENAI, Self::OpenAi), (FERNET, Self::OpenAi), (OWN_SIGNATURE, Self::Gateway)];
        let found = beginnings.iter().find(|(beginning, _)| signature.starts_with(beginning));
        found.map_or(Self::Anthropic, |(_, maker)| *maker)
    }
}

/// Signature of an `encrypted_content` that a provider of the Responses API made, in the form kept inside the gateway.
pub(crate) fn kept_openais(encrypted: String) -> String {
    if encrypted.starts_with(FERNET) { encrypted } else { format!("{OPENAI}{encrypted}") }
}

/// Value of `encrypted_content` for the provider that made `signature`.
pub(crate) fn openais(signature: &str) -> &str {
    signature.strip_prefix(OPENAI).unwrap_or(signature)
}

/// Value of `encrypted_content` for a client of the Responses API: OpenAI's as OpenAI gave it, so that the client's
/// bytes can go back there unchanged; any other names its maker.
pub(crate) fn to_responses_client(signature: &str) -> Cow<'_, str> {
    match Maker::of(signature) {
        Maker::OpenAi => Cow::Borrowed(openais(signature)),
        Maker::Anthropic if !signature.starts_with(REDACTED) => Cow::Owned(format!("{ANTHROPIC}{signature}")),
        _ => Cow::Borrowed(signature),
    }
}

/// Signature of an `encrypted_content` that a client of the Responses API sent back.
pub(crate) fn from_responses_client(encrypted: String) -> String {
    if let Some(signature) = encrypted.strip_prefix(ANTHROPIC) {
        return signature.to_owned();
    }
    match Maker::of(&encrypted) {
        Maker::Anthropic if !encrypted.starts_with(REDACTED) => kept_openais(encrypted),
        _ => encrypted,
    }
}

/// Returns true if a body in a client's dialect holds a signature that the provider of that dialect did not make, so
/// that the provider would refuse the body as it is. Cost: linear in `body`.
pub fn holds_foreign_signature(surface: Surface, body: &[u8]) -> bool {
    let wrapped = STANDARD.encode(WRAPPED);
    let wrapped = [wrapped.as_str()];
    let (names, foreign): (&[&str], &[&str]) = match surface {
        Surface::Messages | Surface::CountTokens => (&["signature"], &[OWN_SIGNATURE, CALL, GOOGLE, OPENAI, FERNET]),
        Surface::Responses => (&["encrypted_content"], &[OWN_SIGNATURE, GOOGLE, ANTHROPIC, REDACTED]),
        Surface::Generate => (&["thoughtSignature", "thought_signature"], &wrapped),
        _ => return false,
    };
    names.iter().any(|name| {
        let name = format!("\"{name}\"");
        memmem::find_iter(body, name.as_bytes()).any(|at| {
            let value = text_after(&body[at + name.len()..]);
            value.is_some_and(|value| foreign.iter().any(|beginning| value.starts_with(beginning.as_bytes())))
        })
    })
}

/// Returns true if a body of OpenAI's APIs holds the signature of a call (Gemini's, in `extra_content`), a field that OpenAI itself
/// refuses. Cost: linear in `body`.
pub fn holds_call_signature(surface: Surface, body: &[u8]) -> bool {
    const NAME: &[u8] = b"\"thought_signature\"";
    matches!(surface, Surface::Chat | Surface::Responses)
        && memmem::find_iter(body, NAME).any(|at| text_after(&body[at + NAME.len()..]).is_some())
}

/// Text behind a name in JSON: what follows the colon and the quote.
fn text_after(json: &[u8]) -> Option<&[u8]> {
    json.trim_ascii_start().strip_prefix(b":")?.trim_ascii_start().strip_prefix(b"\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_signature_names_its_maker() {
        for (signature, maker) in [
            ("EqQBCkYIBxgC", Maker::Anthropic),
            ("redacted_thinking:x", Maker::Anthropic),
            ("gemini:QUJD", Maker::Google),
            ("gAAAAABo", Maker::OpenAi),
            ("openai:x", Maker::OpenAi),
            ("penstock1.x", Maker::Gateway),
        ] {
            assert_eq!(Maker::of(signature), maker, "{signature}");
            assert_eq!(from_responses_client(to_responses_client(signature).into_owned()), signature);
        }
        for given in ["gAAAAABo", "xai"] {
            let kept = kept_openais(given.to_owned());
            assert_eq!((Maker::of(&kept), openais(&kept)), (Maker::OpenAi, given));
            assert_eq!(to_responses_client(&kept), given, "the client has what the provider gave");
        }
    }

    #[test]
    fn only_a_providers_own_signatures_pass() {
        for (surface, name, own, foreign) in [
            (
                Surface::Messages,
                "signature",
                "EqQB",
                ["gAAAAABo", "openai:x", "gemini:QUJD", "call_signature:x", "penstock1.x"],
            ),
            (
                Surface::CountTokens,
                "signature",
                "",
                ["gAAAAABo", "openai:x", "gemini:QUJD", "call_signature:x", "penstock1.x"],
            ),
            (
                Surface::Responses,
                "encrypted_content",
                "gAAAAABo",
                ["anthropic:E", "gemini:QUJD", "redacted_thinking:x", "penstock1.x", "gemini:"],
            ),
        ] {
            let body = |value: &str| format!("{{\"{name}\" : \"{value}\",\"text\":\"gAAAA gemini:\"}}");
            assert!(!holds_foreign_signature(surface, body(own).as_bytes()), "{surface:?}");
            for value in foreign {
                assert!(holds_foreign_signature(surface, body(value).as_bytes()), "{surface:?}: {value}");
            }
        }
        let wrapped = STANDARD.encode(b"penstock:EqQB");
        assert!(holds_foreign_signature(
            Surface::Generate,
            format!("{{\"thoughtSignature\":\"{wrapped}\"}}").as_bytes()
        ));
        assert!(!holds_foreign_signature(Surface::Generate, br#"{"thoughtSignature":"QUJD"}"#));
        assert!(!holds_foreign_signature(Surface::Chat, br#"{"signature":"gemini:QUJD"}"#));
    }

    #[test]
    fn a_calls_signature_is_told_from_its_name_elsewhere() {
        let call = br#"{"tool_calls":[{"extra_content" : {"google":{"thought_signature" : "c2ln"}}}]}"#;
        for surface in [Surface::Chat, Surface::Responses] {
            assert!(holds_call_signature(surface, call), "{surface:?}");
            for other in [
                &br#"{"content":"\"thought_signature\": \"c2ln\""}"#[..],
                br#"{"properties":{"thought_signature":{"type":"string"}},"required":["thought_signature"]}"#,
                br#"{"thought_signature":null}"#,
            ] {
                assert!(!holds_call_signature(surface, other), "{}", String::from_utf8_lossy(other));
            }
        }
        assert!(!holds_call_signature(Surface::Embeddings, call));
    }
}
