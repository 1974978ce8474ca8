//! Ids of users and keys of caches in the form that a provider takes.
//!
//! Providers limit the length of user ids and cache keys, and refuse a request that exceeds the limit. An id has no
//! meaning to a provider beyond being the same for the same user, so an id that the provider would refuse is replaced
//! by its SHA-256, which keeps users apart as a cut text would not.

use std::borrow::Cow;

use sha2::{Digest as _, Sha256};

use crate::provider_fields::Api;

/// Longest `prompt_cache_key` at OpenAI, in characters.
const CACHE_KEY_CHARS_MAX: usize = 64;
/// Least characters (digits, blanks, `(`, `)`, `+`, `-`) of a text that Anthropic takes for a telephone number.
const PHONE_CHARS_MIN: usize = 7;

/// The client's id of its user as `api` takes it: the id itself, or its SHA-256 in 64 hexadecimal digits.
pub(crate) fn user(api: Api, id: &str) -> Cow<'_, str> {
    match api {
        // "Invalid 'user': string too long. Expected a string with maximum length 64". OpenAI may stand behind another
        // host name; of compatible servers OpenRouter takes 128.
        Api::OpenAi | Api::Responses | Api::Compatible => bounded(id, 64),
        // The API reference of `metadata.user_id`; addresses and telephone numbers are refused, too.
        Api::Anthropic if names_a_person(id) => Cow::Owned(digest(id)),
        Api::Anthropic => bounded(id, 256),
        // Their APIs have no place for a user.
        Api::Gemini | Api::Bedrock => Cow::Borrowed(id),
    }
}

/// Key of a cache (`prompt_cache_key`) as OpenAI takes it: the key itself, or its SHA-256 in 64 hexadecimal digits.
pub(crate) fn cache_key(key: &str) -> Cow<'_, str> {
    bounded(key, CACHE_KEY_CHARS_MAX)
}

fn bounded(id: &str, chars_max: usize) -> Cow<'_, str> {
    match id.chars().nth(chars_max) {
        None => Cow::Borrowed(id),
        Some(_) => Cow::Owned(digest(id)),
    }
}

fn digest(id: &str) -> String {
    Sha256::digest(id.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns true if the id looks like an e-mail address or a telephone number.
fn names_a_person(id: &str) -> bool {
    let dials = |character: char| character.is_ascii_digit() || " ()+-".contains(character);
    id.contains('@') || (id.len() >= PHONE_CHARS_MIN && id.chars().all(dials))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_provider_would_refuse_is_replaced() {
        for (api, most) in [(Api::OpenAi, 64), (Api::Responses, 64), (Api::Compatible, 64), (Api::Anthropic, 256)] {
            // Characters count, not bytes.
            let fits = "\u{e4}".repeat(most);
            assert_eq!(user(api, &fits), fits, "{api:?}");
            let long = user(api, &format!("{fits}x")).into_owned();
            assert_eq!(long.len(), 64, "{api:?}");
            assert_ne!(long, user(api, &format!("{fits}y")), "{api:?}: users stay apart");
        }
        let sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest("abc"), sha);
        assert_eq!(cache_key("abc"), "abc");
        assert_eq!(cache_key(&"k".repeat(65)).len(), 64);
    }

    #[test]
    fn anthropic_is_told_no_address_and_no_number() {
        for given in ["ann@example.com", "+1 (555) 010-0199", "15550100199"] {
            assert_eq!(user(Api::Anthropic, given), digest(given));
            assert_eq!(user(Api::OpenAi, given), given);
        }
        for given in ["u", "123456", "user_0123456789", "2b1f0c6e-93a4-4d53-a3f0-0a2c0a7b9e11"] {
            assert_eq!(user(Api::Anthropic, given), given);
        }
    }
}
