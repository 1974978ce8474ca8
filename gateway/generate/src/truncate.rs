//! Truncation of a conversation that allows it: where the prompt does not fit the context, the oldest turns are left
//! out.
//!
//! A turn is a message of the user with all that follows it up to the next one, so that no result is parted from its call. System
//! messages stay, and so does the last turn: a conversation that does not fit with these alone is refused as any other.

use penstock_text::{ChatPrompt, TextModel};
use penstock_types::{ApiError, ChatRequest, Message, PromptTail, Role};

use penstock_base::clock::unix_seconds;

/// Share of the context, one part in so many, that a truncated prompt leaves to an answer without a smaller bound of
/// its own.
const ANSWER_SHARE: u32 = 4;

/// Prompt of `chat`, truncated if the request allows that and `context_tokens` needs it. Tokenizes once for a
/// conversation that fits, and about once per halving of the number of turns for one that does not.
///
/// # Errors
/// The errors of the whole conversation's prompt. The caller checks that the prompt fits.
pub(super) fn chat_prompt(chat: &ChatRequest, model: &TextModel, context_tokens: u32) -> Result<ChatPrompt, ApiError> {
    let now = unix_seconds() as i64;
    let whole = model.chat_prompt(chat, now);
    let fits = |prompt: &Result<ChatPrompt, ApiError>, answer: u32| {
        let room = context_tokens.saturating_sub(answer) as usize;
        prompt.as_ref().is_ok_and(|prompt| prompt.tokens.len() <= room)
    };
    if !chat.truncates || fits(&whole, 1) {
        return whole;
    }
    let answer = answer_tokens(chat.sampling.max_tokens, context_tokens);
    let mut shorter = chat.clone();
    let mut found = None;
    least(&turns(&chat.messages), |from| {
        shorter.messages = kept(&chat.messages, from);
        let prompt = model.chat_prompt(&shorter, now);
        let fitting = fits(&prompt, answer);
        if fitting {
            found = prompt.ok();
        }
        fitting
    });
    found.map_or(whole, Ok)
}

/// The last tokens of a prompt, as many as the client wants to keep.
pub(super) fn tail(
    mut tokens: Vec<u32>,
    tail: Option<PromptTail>,
    max_tokens: Option<u32>,
    context_tokens: u32,
) -> Vec<u32> {
    let most = match tail {
        Some(PromptTail::Tokens(most)) => most,
        Some(PromptTail::Fitting) if tokens.len() >= context_tokens as usize => {
            context_tokens.saturating_sub(answer_tokens(max_tokens, context_tokens))
        }
        None | Some(PromptTail::Fitting) => return tokens,
    };
    tokens.split_off(tokens.len().saturating_sub(most as usize))
}

/// Tokens of the context that are left to the answer to a shortened prompt.
fn answer_tokens(max_tokens: Option<u32>, context_tokens: u32) -> u32 {
    max_tokens.unwrap_or(u32::MAX).min(context_tokens / ANSWER_SHARE).max(1)
}

/// Indices at which the turns behind the first begin.
fn turns(messages: &[Message]) -> Vec<usize> {
    let first = messages.iter().position(|message| message.role != Role::System).unwrap_or(messages.len());
    let begins = messages.iter().enumerate().skip(first + 1).filter(|(_, message)| message.role == Role::User);
    begins.map(|(at, _)| at).collect()
}

/// Messages from `from` on, behind the system messages before it.
fn kept(messages: &[Message], from: usize) -> Vec<Message> {
    let (dropped, rest) = messages.split_at(from);
    dropped.iter().filter(|message| message.role == Role::System).chain(rest).cloned().collect()
}

/// Binary search over ascending values for the least one that fits; the last value for which `fits` was true is that
/// one.
fn least(values: &[usize], mut fits: impl FnMut(usize) -> bool) {
    let (mut low, mut high) = (0, values.len());
    while low < high {
        let middle = low.midpoint(high);
        if fits(values[middle]) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use penstock_types::ApiErrorKind;

    use super::*;

    fn model() -> TextModel {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo");
        TextModel::from_dir(&dir).expect("the demo model's tokenizer")
    }

    fn message(role: Role, content: String) -> Message {
        Message { role, content: Some(content), ..Message::default() }
    }

    /// Instructions, and so many turns of a question and an answer that are told apart by number, the last of them open.
    fn conversation(turns: usize) -> ChatRequest {
        let mut messages = vec![message(Role::System, "Be brief.".into())];
        for turn in 0..turns {
            messages.push(message(Role::User, format!("Question {turn}?")));
            messages.push(message(Role::Assistant, format!("Answer {turn}.")));
        }
        messages.pop();
        ChatRequest { truncates: true, ..ChatRequest::new("m".into(), messages) }
    }

    fn tokens(prompt: &Result<ChatPrompt, ApiError>) -> usize {
        prompt.as_ref().map_or(0, |prompt| prompt.tokens.len())
    }

    #[test]
    fn a_conversation_that_fits_is_whole() {
        let (model, chat) = (model(), conversation(6));
        let whole = model.chat_prompt(&chat, 0).expect("a prompt");
        let context = whole.tokens.len() as u32 + 1;
        assert_eq!(chat_prompt(&chat, &model, context).expect("a prompt").text, whole.text, "to the last token");
        let fixed = ChatRequest { truncates: false, ..chat };
        assert_eq!(chat_prompt(&fixed, &model, 40).expect("a prompt").text, whole.text, "unless it may be truncated");
    }

    #[test]
    fn the_oldest_turns_go_first_and_no_more_than_must() {
        let (model, chat) = (model(), conversation(40));
        let whole = tokens(&model.chat_prompt(&chat, 0));
        for context in [200, 300, whole as u32] {
            let prompt = chat_prompt(&chat, &model, context).expect("a prompt");
            let room = context - context / ANSWER_SHARE;
            assert!(prompt.tokens.len() as u32 <= room, "{} of {context}", prompt.tokens.len());
            let dropped = (0..40).position(|turn| prompt.text.contains(&format!("Question {turn}?"))).expect("one");
            assert!(dropped > 0 && prompt.text.contains("Be brief."), "the instructions stay");
            assert!(!prompt.text.contains(&format!("Answer {}.", dropped - 1)), "an answer goes with its question");
            assert!((dropped..40).all(|turn| prompt.text.contains(&format!("Question {turn}?"))));
            let longer = ChatRequest { messages: kept(&chat.messages, 2 * dropped - 1), ..chat.clone() };
            assert!(tokens(&model.chat_prompt(&longer, 0)) as u32 > room, "one turn more would not fit");
        }
    }

    #[test]
    fn a_small_bound_of_the_answer_leaves_more_to_the_prompt() {
        let (model, mut chat) = (model(), conversation(40));
        let free = tokens(&chat_prompt(&chat, &model, 300));
        chat.sampling.max_tokens = Some(1);
        let bound = tokens(&chat_prompt(&chat, &model, 300));
        assert!(free <= 225 && bound > free && bound <= 299, "{free}, {bound}");
    }

    #[test]
    fn what_cannot_be_truncated_is_as_it_was() {
        let (model, chat) = (model(), conversation(3));
        let whole = tokens(&model.chat_prompt(&chat, 0));
        assert_eq!(tokens(&chat_prompt(&chat, &model, 4)), whole, "its last turn does not fit");
        let mut long = conversation(2);
        long.messages[3].content = Some("word ".repeat(100_000));
        assert_eq!(chat_prompt(&long, &model, 8192).expect_err("too long").kind, ApiErrorKind::ContextLength);
        long.messages[3].content = Some("And now?".into());
        long.messages[2].content = Some("word ".repeat(100_000));
        let prompt = chat_prompt(&long, &model, 8192).expect("without its long answer");
        assert!(prompt.text.contains("And now?") && prompt.tokens.len() < 100);
    }

    #[test]
    fn a_prompt_keeps_its_end() {
        let prompt: Vec<u32> = (0..10).collect();
        let kept = |asked, max, context| tail(prompt.clone(), asked, max, context);
        assert_eq!(kept(Some(PromptTail::Tokens(3)), None, 100), [7, 8, 9]);
        assert_eq!(kept(Some(PromptTail::Tokens(30)), None, 8), prompt, "whether it fits is not asked here");
        assert_eq!(kept(Some(PromptTail::Fitting), None, 11), prompt);
        assert_eq!(kept(Some(PromptTail::Fitting), None, 8), prompt[4..], "a quarter is left");
        assert_eq!(kept(Some(PromptTail::Fitting), Some(1), 8), prompt[3..], "or what is asked for");
        assert_eq!(kept(None, None, 8), prompt);
    }

    #[test]
    fn results_stay_with_their_calls() {
        let roles = [Role::System, Role::User, Role::Assistant, Role::Tool, Role::Assistant, Role::User, Role::System];
        let messages: Vec<Message> = roles.into_iter().map(|role| message(role, String::new())).collect();
        assert_eq!(turns(&messages), [5]);
        assert_eq!(
            kept(&messages, 5).iter().map(|m| m.role).collect::<Vec<_>>(),
            [Role::System, Role::User, Role::System]
        );
        assert_eq!(turns(&messages[2..]), [3], "an answer in front of all questions is a turn too");
        assert_eq!(turns(&[]), [0; 0]);
    }
}
