//! Budget of a request's reasoning, in the tokens that a model opens and closes it with.

use penstock_proto::frames::ReasoningBudget;
use penstock_text::{GoesOn, TextModel};
use penstock_types::{ChatRequest, ReasoningEffort};

/// Budget that the workers enforce; `None` where the request gives none, or the model marks no reasoning.
///
/// `is_open`: the prompt ends inside the reasoning. `is_guided`: the answer follows a grammar, which says itself what
/// stands behind the reasoning. A request without reasoning has a budget of 0, for templates that cannot switch it off.
pub(crate) fn budget(chat: &ChatRequest, is_open: bool, model: &TextModel, is_guided: bool) -> Option<ReasoningBudget> {
    let is_off = chat.reasoning_effort == Some(ReasoningEffort::None);
    let most = if is_off { 0 } else { chat.reasoning_tokens_max? };
    let markers = model.reasoning_markers()?;
    let ending = model.reasoning_close_tokens();
    let (first, again) = match (is_guided, chat.tools.is_empty()) {
        (true, _) => (GoesOn::AtTheMark, GoesOn::AtTheMark),
        (false, false) => (GoesOn::WithAnyPart, GoesOn::WithTheAnswer),
        (false, true) => (GoesOn::WithTheAnswer, GoesOn::WithTheAnswer),
    };
    let (mut closing, mut counted) = (model.reasoning_forced_close_tokens(first), 0);
    // Closing tokens in front of the one that completes the mark are tokens of the reasoning.
    let completes = |closing: &[u32]| closing.windows(ending.len().max(1)).position(|run| run == ending);
    if let Some(at) = completes(&closing) {
        counted = at + ending.len() - 1;
        if counted > most as usize && at > 0 {
            closing.drain(..at);
            counted = ending.len() - 1;
        }
    }
    let budget = ReasoningBudget {
        tokens: most.saturating_sub(counted as u32),
        is_open,
        opening: markers.open.clone(),
        opens_anywhere: markers.open_anywhere(),
        ending: markers.close.clone(),
        closing,
        closing_again: if again == first { Vec::new() } else { model.reasoning_forced_close_tokens(again) },
    };
    (!budget.ending.is_empty() && !budget.closing.is_empty()).then_some(budget)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use penstock_text::ReasoningMarkers;
    use penstock_types::{Message, Tool};

    use super::*;

    fn model(reasoning: &str) -> TextModel {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/penstock-demo");
        let model = TextModel::from_dir(&dir).expect("the demo model's tokenizer");
        model.with_reasoning_markers(ReasoningMarkers::from_name(reasoning))
    }

    fn chat(tokens: Option<u32>, effort: Option<ReasoningEffort>) -> ChatRequest {
        let mut chat = ChatRequest::new("m".into(), vec![Message::default()]);
        (chat.reasoning_tokens_max, chat.reasoning_effort) = (tokens, effort);
        chat
    }

    fn closing(model: &TextModel, budget: &ReasoningBudget) -> (u32, String, String) {
        (budget.tokens, model.decode(&budget.closing, true), model.decode(&budget.closing_again, true))
    }

    #[test]
    fn a_budget_counts_what_the_answers_usage_counts() {
        let model = model("think");
        let of = |tokens, guided| {
            let made = budget(&chat(Some(tokens), None), true, &model, guided).expect("a budget");
            let (tokens, closing, again) = closing(&model, &made);
            assert_eq!((made.opening.as_str(), made.is_open, again.as_str()), ("<think>", true, ""));
            (tokens, closing)
        };
        // The line break in front of the mark is a token of the reasoning.
        assert_eq!(of(5, false), (4, "\n</think>\n\n".into()));
        assert_eq!(of(1, false), (0, "\n</think>\n\n".into()));
        assert_eq!(of(0, false), (0, "</think>\n\n".into()));
        assert_eq!(of(5, true), (4, "\n</think>".into()));
        assert_eq!(of(0, true), (0, "</think>".into()));
    }

    #[test]
    fn no_reasoning_is_a_budget_of_nothing() {
        let model = model("think");
        let none = budget(&chat(None, Some(ReasoningEffort::None)), true, &model, false).expect("a budget");
        assert_eq!(none.tokens, 0);
        assert_eq!(budget(&chat(None, Some(ReasoningEffort::High)), true, &model, false), None);
        assert_eq!(budget(&chat(None, None), true, &model, false), None);
        assert_eq!(budget(&chat(Some(5), None), true, &model.with_reasoning_markers(None), false), None);
    }

    #[test]
    fn channels_leave_the_model_a_call_where_it_has_tools() {
        let model = model("harmony");
        let mut chat = chat(Some(100), None);
        let answer = "<|end|><|start|>assistant<|channel|>final<|message|>";
        let made = budget(&chat, false, &model, false).expect("a budget");
        assert!(made.opens_anywhere && !made.is_open);
        let (_, first, again) = closing(&model, &made);
        assert_eq!((first.as_str(), again.as_str()), (answer, ""));
        chat.tools = vec![Tool::function("f".into(), None, None, false)];
        let (_, first, again) = closing(&model, &budget(&chat, false, &model, false).expect("a budget"));
        assert_eq!((first.as_str(), again.as_str()), ("<|end|><|start|>assistant", answer));
    }
}
