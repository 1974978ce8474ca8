//! Refusals that concern the account of the key and not the request, though their status and type are those of a faulty request.

use penstock_types::codec::FaultClass;

/// Beginnings of Anthropic's messages, in lower case; all come with status 400 and the type `invalid_request_error`.
const ANTHROPIC: [(&str, FaultClass); 3] = [
    ("your credit balance is too low", FaultClass::Quota),
    // The spend limit of the organization or of the workspace.
    ("you have reached your specified", FaultClass::Quota),
    ("this organization has been disabled", FaultClass::Forbidden),
];

/// Class of a message by which Anthropic says that an account is used up or closed; `None`: the message says neither.
///
/// Only the beginning of the message counts: what follows may quote the request, and no request may pause a key.
pub(crate) fn class_of_anthropics(message: &str) -> Option<FaultClass> {
    let begins_with = |words: &str| message.get(..words.len()).is_some_and(|head| head.eq_ignore_ascii_case(words));
    ANTHROPIC.iter().find(|(words, _)| begins_with(words)).map(|(_, class)| *class)
}
