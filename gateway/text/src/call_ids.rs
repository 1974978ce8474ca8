//! Ids of tool calls in the form that a chat template demands.
//!
//! Clients send back ids that this gateway made, that another model made, or that they made themselves, in the form of their API (`call_…`,
//! `toolu_…`). Most templates leave ids out. Mistral's refuse an id that is not nine letters and digits; Kimi K2's write a call as its id
//! alone, which holds the name of the function. So an id of another form is written anew, alike for a call and its results; an id of the
//! right form stays as it is.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use penstock_types::{Message, ToolCall};

use crate::tools::ToolFormat;

/// Length of an id in Mistral's templates.
const SHORT: usize = 9;

/// Form of the ids of calls in a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallIds {
    /// Ids as clients send them.
    AsSent,
    /// Nine ASCII letters and digits: Mistral.
    Short,
    /// `functions.NAME:NUMBER`, where the number counts the calls of the conversation: Kimi K2.
    Named,
}

/// Ids of one message as a template gets them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MessageIds<'m> {
    /// Ids of the message's calls.
    pub(crate) calls: Vec<Cow<'m, str>>,
    /// Id of the call that a tool's message answers.
    pub(crate) result: Option<Cow<'m, str>>,
}

impl CallIds {
    /// Form of ids in templates that show calls in `format`.
    pub(crate) fn of(format: Option<ToolFormat>) -> Self {
        match format {
            Some(ToolFormat::Mistral) => Self::Short,
            Some(ToolFormat::KimiK2) => Self::Named,
            _ => Self::AsSent,
        }
    }

    /// Ids of each message, in the form of the template. A result gets the id of the last call in front of it that had the same id.
    pub(crate) fn of_messages<'m>(self, messages: &'m [Message]) -> Vec<MessageIds<'m>> {
        if self == Self::AsSent {
            let as_sent = |message: &'m Message| MessageIds {
                calls: message.tool_calls.iter().map(|call| Cow::Borrowed(call.id.as_str())).collect(),
                result: message.tool_call_id.as_deref().map(Cow::Borrowed),
            };
            return messages.iter().map(as_sent).collect();
        }
        let all = messages.iter().flat_map(|message| &message.tool_calls);
        let kept: HashSet<&str> = all.filter(|call| self.takes(call)).map(|call| call.id.as_str()).collect();
        let mut written: HashMap<&str, Cow<'m, str>> = HashMap::new();
        // Numbers only ascend, so the search for a free one takes a step for each call of the conversation.
        let mut number = 0;
        let ids = messages.iter().map(|message| {
            let mut calls = Vec::with_capacity(message.tool_calls.len());
            for call in &message.tool_calls {
                let id = match self {
                    _ if self.takes(call) => Cow::Borrowed(call.id.as_str()),
                    Self::Named => loop {
                        let id = format!("functions.{}:{number}", call.name);
                        if !kept.contains(id.as_str()) {
                            break id.into();
                        }
                        number += 1;
                    },
                    Self::Short | Self::AsSent => short(&call.id).into(),
                };
                number += 1;
                written.insert(&call.id, id.clone());
                calls.push(id);
            }
            let result = message.tool_call_id.as_deref().map(|id| match written.get(id) {
                Some(written) => written.clone(),
                None if self == Self::Short && !is_short(id) => short(id).into(),
                None => id.into(),
            });
            MessageIds { calls, result }
        });
        ids.collect()
    }

    /// Returns true if the id of the call has the template's form.
    fn takes(self, call: &ToolCall) -> bool {
        match self {
            Self::AsSent => true,
            Self::Short => is_short(&call.id),
            Self::Named => is_named(&call.id, &call.name),
        }
    }
}

fn is_short(id: &str) -> bool {
    id.len() == SHORT && id.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

fn is_named(id: &str, name: &str) -> bool {
    let id = id.strip_prefix("functions.").unwrap_or(id);
    let number = id.strip_prefix(name).and_then(|rest| rest.strip_prefix(':'));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Nine letters and digits of the id's hash: 53 bits, so that two ids of one conversation do not meet.
fn short(id: &str) -> String {
    const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let hash = blake3::hash(id.as_bytes());
    let mut rest = u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("a hash has 32 bytes"));
    let digits = (0..SHORT).map(|_| {
        let digit = DIGITS[(rest % 62) as usize];
        rest /= 62;
        char::from(digit)
    });
    digits.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str, name: &str) -> ToolCall {
        ToolCall { id: id.into(), name: name.into(), arguments: "{}".into(), signature: None }
    }

    fn calls(calls: &[(&str, &str)]) -> Message {
        Message { tool_calls: calls.iter().map(|(id, name)| call(id, name)).collect(), ..Message::default() }
    }

    fn result(id: &str) -> Message {
        Message { tool_call_id: Some(id.into()), ..Message::default() }
    }

    /// Ids in the order of the conversation, of calls and results alike.
    fn written(form: CallIds, messages: &[Message]) -> Vec<String> {
        let ids = form.of_messages(messages);
        assert_eq!(ids.len(), messages.len());
        ids.into_iter().flat_map(|ids| ids.calls.into_iter().chain(ids.result)).map(Cow::into_owned).collect()
    }

    #[test]
    fn ids_of_the_right_form_stay() {
        let messages = [calls(&[("abcdefGH9", "f")]), result("abcdefGH9")];
        assert_eq!(written(CallIds::Short, &messages), ["abcdefGH9"; 2]);
        let messages = [calls(&[("functions.f:3", "f"), ("g:0", "g")]), result("g:0"), result("functions.f:3")];
        assert_eq!(written(CallIds::Named, &messages), ["functions.f:3", "g:0", "g:0", "functions.f:3"]);
        let messages = [calls(&[("call_1", "f")]), result("call_1")];
        assert_eq!(written(CallIds::AsSent, &messages), ["call_1"; 2]);
    }

    #[test]
    fn other_ids_become_short_and_stay_apart() {
        let sent = ["call_0123456789abcdef01234567", "call_0_1", "toolu_0", "", "123456789\u{e9}", "12345678-"];
        let messages: Vec<_> = sent.iter().flat_map(|id| [calls(&[(id, "f")]), result(id)]).collect();
        let ids = written(CallIds::Short, &messages);
        assert!(ids.iter().all(|id| is_short(id)), "{ids:?}");
        assert!(ids.chunks(2).all(|pair| pair[0] == pair[1]), "{ids:?}");
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), sent.len());
        assert_eq!(written(CallIds::Short, &[result("call_0_1")]), [short("call_0_1")], "a result without its call");
    }

    #[test]
    fn other_ids_get_the_name_and_a_number_that_is_free() {
        let messages = [
            calls(&[("toolu_1", "f"), ("functions.f:2", "f")]),
            result("functions.f:2"),
            result("toolu_1"),
            calls(&[("toolu_1", "g"), ("functions.f:0", "g"), ("functions.f:x", "f")]),
            result("toolu_1"),
        ];
        let ids = ["f:0", "f:2", "f:2", "f:0", "g:2", "g:3", "f:4", "g:2"];
        assert_eq!(written(CallIds::Named, &messages), ids.map(|id| format!("functions.{id}")));
    }
}
