//! Conversations in another form, for chat templates that refuse the turns of an API.
//!
//! Templates take the conversations that their model was trained with and refuse others. Clients send back a model's answer in the form of their API:
//! several calls in one message, text beside reasoning and calls, results without the name of the function. A refused conversation is tried again in
//! the forms of [`Change`], which say the same; a conversation that the template takes is never changed.

use penstock_types::{Message, Role};

/// Change of a conversation, for templates that refuse it or fail on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A tool's result without a name gets that of its call: FunctionGemma, Functionary.
    NameResults,
    /// A text beside reasoning and calls stands behind the reasoning: gpt-oss has one of the two.
    JoinReasoning,
    /// Each call has a message of its own, with its result behind it: Llama 3.
    PartCalls,
    /// System messages at the beginning are one; a later one is the user's: Qwen3.5.
    OneSystem,
}

impl Change {
    /// All changes, in the order in which they are tried.
    pub(crate) const ALL: [Self; 4] = [Self::NameResults, Self::JoinReasoning, Self::PartCalls, Self::OneSystem];

    fn applies(self, messages: &[Message]) -> bool {
        match self {
            Self::NameResults => messages.iter().any(is_nameless),
            Self::JoinReasoning => messages.iter().any(is_told_twice),
            Self::PartCalls => messages.iter().any(|message| message.tool_calls.len() > 1),
            Self::OneSystem => messages.iter().skip(1).any(|message| message.role == Role::System),
        }
    }

    fn apply(self, messages: &mut Vec<Message>) {
        match self {
            Self::NameResults => name_results(messages),
            Self::JoinReasoning => {
                messages.iter_mut().filter(|message| is_told_twice(message)).for_each(join_reasoning)
            }
            Self::PartCalls => *messages = part_calls(std::mem::take(messages)),
            Self::OneSystem => *messages = one_system(std::mem::take(messages)),
        }
    }
}

/// Conversation with these changes; `None` if none of them applies. Cost: a copy of the messages.
pub(crate) fn changed(messages: &[Message], changes: &[Change]) -> Option<Vec<Message>> {
    let mut changes = changes.iter().filter(|change| change.applies(messages)).peekable();
    changes.peek()?;
    let mut messages = messages.to_vec();
    changes.for_each(|change| change.apply(&mut messages));
    Some(messages)
}

fn is_nameless(message: &Message) -> bool {
    message.role == Role::Tool && message.name.is_none()
}

fn is_told_twice(message: &Message) -> bool {
    let is_there = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    !message.tool_calls.is_empty() && is_there(&message.content) && is_there(&message.reasoning)
}

fn name_results(messages: &mut [Message]) {
    let mut names = std::collections::HashMap::new();
    for message in messages {
        names.extend(message.tool_calls.iter().map(|call| (call.id.clone(), call.name.clone())));
        if is_nameless(message) {
            message.name = message.tool_call_id.as_ref().and_then(|id| names.get(id).cloned());
        }
    }
}

fn join_reasoning(message: &mut Message) {
    if let (Some(reasoning), Some(text)) = (&mut message.reasoning, message.content.take()) {
        reasoning.push_str("\n\n");
        reasoning.push_str(&text);
    }
}

fn part_calls(messages: Vec<Message>) -> Vec<Message> {
    let mut parted = Vec::with_capacity(messages.len());
    let mut rest = messages.into_iter().peekable();
    while let Some(mut message) = rest.next() {
        let calls = std::mem::take(&mut message.tool_calls);
        if calls.len() < 2 {
            parted.push(Message { tool_calls: calls, ..message });
            continue;
        }
        let mut results: Vec<Option<Message>> = Vec::new();
        while let Some(result) = rest.next_if(|next| next.role == Role::Tool) {
            results.push(Some(result));
        }
        let mut told = Some(message);
        for call in calls {
            let mine = |result: &&mut Option<Message>| {
                result.as_ref().is_some_and(|result| result.tool_call_id.as_deref() == Some(&call.id))
            };
            let result = results.iter_mut().find(mine).and_then(Option::take);
            let turn = told.take().unwrap_or(Message { role: Role::Assistant, ..Message::default() });
            parted.push(Message { tool_calls: vec![call], ..turn });
            parted.extend(result);
        }
        parted.extend(results.into_iter().flatten());
    }
    parted
}

fn one_system(messages: Vec<Message>) -> Vec<Message> {
    let mut changed: Vec<Message> = Vec::with_capacity(messages.len());
    let mut begins = true;
    for mut message in messages {
        begins &= message.role == Role::System;
        match changed.first_mut().filter(|_| begins) {
            Some(first) => {
                let text = first.content.get_or_insert_default();
                let more = message.content.unwrap_or_default();
                if !text.is_empty() && !more.is_empty() {
                    text.push_str("\n\n");
                }
                text.push_str(&more);
            }
            None => {
                if !begins && message.role == Role::System {
                    message.role = Role::User;
                }
                changed.push(message);
            }
        }
    }
    changed
}

#[cfg(test)]
mod tests {
    use penstock_types::ToolCall;

    use super::*;

    fn text(role: Role, content: &str) -> Message {
        Message { role, content: Some(content.into()), ..Message::default() }
    }

    fn calls(content: Option<&str>, ids: &[&str]) -> Message {
        let call =
            |id: &&str| ToolCall { id: (*id).into(), name: format!("f{id}"), arguments: "{}".into(), signature: None };
        let tool_calls = ids.iter().map(call).collect();
        Message { role: Role::Assistant, content: content.map(Into::into), tool_calls, ..Message::default() }
    }

    fn result(id: &str) -> Message {
        Message { tool_call_id: Some(id.into()), ..text(Role::Tool, &format!("result {id}")) }
    }

    #[track_caller]
    fn check(change: Change, messages: &[Message], expected: Option<&[Message]>) {
        assert_eq!(changed(messages, &[change]).as_deref(), expected);
    }

    #[test]
    fn what_needs_no_change_has_none() {
        let messages =
            [text(Role::System, "s"), text(Role::User, "u"), calls(None, &["1"]), text(Role::Assistant, "a")];
        assert_eq!(changed(&messages, &Change::ALL), None);
        assert_eq!(changed(&[], &Change::ALL), None);
    }

    #[test]
    fn results_are_named_by_their_calls() {
        let named = |id: &str| Message { name: Some(format!("f{id}")), ..result(id) };
        let own = Message { name: Some("own".into()), ..result("1") };
        let messages = [calls(None, &["1", "2"]), result("2"), result("1"), own.clone(), result("3")];
        let expected = [calls(None, &["1", "2"]), named("2"), named("1"), own, result("3")];
        check(Change::NameResults, &messages, Some(&expected));
    }

    #[test]
    fn a_text_beside_reasoning_and_calls_joins_the_reasoning() {
        let thinking = |message: Message, reasoning: &str| Message { reasoning: Some(reasoning.into()), ..message };
        let plain = thinking(text(Role::Assistant, "a"), "r");
        let messages = [thinking(calls(Some("t"), &["1"]), "r"), plain.clone(), calls(Some("t"), &["2"])];
        let expected = [thinking(calls(None, &["1"]), "r\n\nt"), plain, calls(Some("t"), &["2"])];
        check(Change::JoinReasoning, &messages, Some(&expected));
    }

    #[test]
    fn calls_part_with_their_results() {
        let messages =
            [calls(Some("t"), &["1", "2", "3"]), result("3"), result("1"), result("x"), text(Role::User, "u")];
        let expected = [
            calls(Some("t"), &["1"]),
            result("1"),
            calls(None, &["2"]),
            calls(None, &["3"]),
            result("3"),
            result("x"),
            text(Role::User, "u"),
        ];
        check(Change::PartCalls, &messages, Some(&expected));
        let twice = [calls(None, &["1", "1"]), result("1"), result("1")];
        let expected = [calls(None, &["1"]), result("1"), calls(None, &["1"]), result("1")];
        check(Change::PartCalls, &twice, Some(&expected));
    }

    #[test]
    fn system_messages_are_one_at_the_beginning() {
        let system = |content: &str| text(Role::System, content);
        let messages = [system("a"), system(""), system("b"), text(Role::User, "u"), system("c")];
        let expected = [system("a\n\nb"), text(Role::User, "u"), text(Role::User, "c")];
        check(Change::OneSystem, &messages, Some(&expected));
        check(
            Change::OneSystem,
            &[text(Role::User, "u"), system("c")],
            Some(&[text(Role::User, "u"), text(Role::User, "c")]),
        );
    }
}
