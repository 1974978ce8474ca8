//! Thought signatures: opaque data that a provider wants back, carried through clients that treat it as base64.
//!
//! Google's SDKs decode `thoughtSignature` from base64 and send it back in the URL alphabet. Google's own signatures
//! survive that. Signatures of other providers are wrapped: base64 of [`WRAPPED`] and the signature. Inside the gateway a
//! Google signature of reasoning carries the prefix [`GOOGLE`], because a conversation can move to a provider that
//! refuses signatures of others; signatures of calls carry no prefix, because only Google signs calls.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::fields;
use crate::reasoning_maker::{GOOGLE, WRAPPED};
use penstock_types::json::Fault;

/// Content that the signature covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signed {
    Reasoning,
    Call,
}

/// Signature in Google's own form; `None` if it is not Google's.
pub(super) fn googles(signature: &str, signed: Signed) -> Option<&str> {
    let own = match signed {
        Signed::Reasoning => signature.strip_prefix(GOOGLE)?,
        Signed::Call => signature,
    };
    let bytes = STANDARD.decode(own).ok()?;
    (!bytes.is_empty() && !bytes.starts_with(WRAPPED)).then_some(own)
}

/// Google's signature in the form kept inside the gateway.
pub(super) fn kept(given: &str, signed: Signed) -> String {
    match signed {
        Signed::Reasoning => format!("{GOOGLE}{given}"),
        Signed::Call => given.to_owned(),
    }
}

/// Signature in the form sent to a client.
pub(super) fn to_client(signature: &str, signed: Signed) -> Cow<'_, str> {
    match googles(signature, signed) {
        Some(own) => Cow::Borrowed(own),
        None => Cow::Owned(STANDARD.encode([WRAPPED, signature.as_bytes()].concat())),
    }
}

/// Restores a signature from the form sent to a client.
pub(super) fn from_client(given: Cow<'_, str>, signed: Signed) -> Result<String, Fault> {
    let standard = fields::base64(given)?;
    let bytes = STANDARD.decode(&standard).ok();
    let wrapped = bytes.as_deref().and_then(|bytes| bytes.strip_prefix(WRAPPED));
    let wrapped = wrapped.and_then(|bytes| String::from_utf8(bytes.to_vec()).ok());
    Ok(wrapped.unwrap_or_else(|| kept(&standard, signed)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_comes_back_as_the_provider_sent_it() {
        let nested = STANDARD.encode(b"penstock:x");
        let own = kept("AbC+/w==", Signed::Reasoning);
        for signature in
            ["", "AbC+/w==", "gAAA-_x", "not base64 \u{e4}", "QUJD", "A===", &nested, &own, "gemini:", "gemini:*"]
        {
            for signed in [Signed::Reasoning, Signed::Call] {
                let sent = to_client(signature, signed);
                // Google's Python SDK re-encodes the signature in the URL alphabet.
                let bytes = STANDARD.decode(&*sent).expect("base64");
                let returned = base64::engine::general_purpose::URL_SAFE.encode(bytes);
                assert_eq!(from_client(Cow::Owned(returned), signed).expect("base64"), signature);
            }
        }
        assert_eq!(to_client(&own, Signed::Reasoning), "AbC+/w==");
    }

    #[test]
    fn only_googles_signatures_reach_google() {
        assert_eq!(googles("gemini:QUJD", Signed::Reasoning), Some("QUJD"));
        assert_eq!(googles("QUJD", Signed::Reasoning), None);
        assert_eq!(googles("QUJD", Signed::Call), Some("QUJD"));
        assert_eq!(googles("*", Signed::Call), None);
    }
}
