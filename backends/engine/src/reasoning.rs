//! Budget of an output's reasoning: where the output reasons, how many tokens that took, and what closes it.
//!
//! The state of a budget is a function of the request and the output tokens so far, as with a grammar. A choice that
//! is resumed, moved or preempted replays its output and is where it was, also inside of the closing tokens. Marks are
//! found in the bytes of the output, since a model may spell them with other tokens than the tokenizer does.
//!
//! ```text
//! Before ──opening──▶ Inside ──ending──▶ Over (or Before, where reasoning may open again)
//!                       │ budget spent       ▲
//!                       ▼                    │
//!                    Closing ──last closing token, or ending
//! ```

use penstock_grammar::Vocabulary;
use penstock_proto::frames::ReasoningBudget;
use std::sync::Arc;

/// Most closing tokens of a [`ReasoningBudget`].
pub(crate) const CLOSING_MAX: usize = 64;
/// Longest mark of a [`ReasoningBudget`], in bytes.
pub(crate) const MARK_BYTES_MAX: usize = 256;
/// Most bytes of blanks in front of the opening mark.
const BLANKS_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// In front of reasoning that may still open.
    Before,
    /// In the reasoning, with tokens left.
    Inside,
    /// In the reasoning, whose budget is spent: the closing token of this index comes next.
    Closing(usize),
    /// Behind the reasoning, or in an output without any.
    Over,
}

/// Budget of a request, and the bytes of the model's tokens.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub(crate) budget: Arc<ReasoningBudget>,
    pub(crate) vocabulary: Arc<Vocabulary>,
}

/// Place of one choice in its reasoning.
#[derive(Clone, Debug)]
pub(crate) struct Reasoning {
    rule: Rule,
    at: At,
    /// Last bytes of the output: as many as the mark that is looked for could have.
    tail: Vec<u8>,
    spent: u32,
    /// Number of times that the budget closed the reasoning.
    closed: u32,
}

impl Reasoning {
    /// Place before the first token.
    pub(crate) fn new(rule: Rule) -> Self {
        let mut place = Self { rule, at: At::Before, tail: Vec::new(), spent: 0, closed: 0 };
        if place.budget().is_open {
            place.open();
        } else if place.budget().opening.is_empty() {
            place.at = At::Over;
        }
        place
    }

    /// Goes on after the last token of `output`.
    pub(crate) fn follow(&mut self, output: &[u32]) {
        let Some(&token) = output.last() else { return };
        if self.at == At::Over {
            return;
        }
        self.tail.extend_from_slice(self.rule.vocabulary.bytes(token));
        let at = self.at;
        match at {
            At::Over => {}
            At::Before => self.before(),
            At::Inside if self.passes_ending() => self.leave(),
            At::Inside => {
                self.spent = self.spent.saturating_add(1);
                if self.spent >= self.budget().tokens {
                    self.at = At::Closing(self.begun(output));
                }
            }
            At::Closing(next) if self.closing().get(next) == Some(&token) => {
                self.at = At::Closing(next + 1);
                if next + 1 == self.closing().len() {
                    self.tail.clear();
                    self.leave();
                    self.closed += 1;
                }
            }
            At::Closing(_) if self.passes_ending() => self.leave(),
            // A grammar did not let the closing token stand here: it waits for the next place.
            At::Closing(_) => {}
        }
    }

    /// Token that must follow because the budget is spent.
    pub(crate) fn next(&self) -> Option<u32> {
        match self.at {
            At::Closing(next) => self.closing().get(next).copied(),
            _ => None,
        }
    }

    /// Number of times that the budget has closed the reasoning.
    pub(crate) fn closed(&self) -> u32 {
        self.closed
    }

    fn budget(&self) -> &ReasoningBudget {
        &self.rule.budget
    }

    fn before(&mut self) {
        let opening = Arc::clone(&self.rule.budget);
        let opening = opening.opening.as_bytes();
        if self.budget().opens_anywhere {
            if self.passes(opening) {
                self.open();
            }
            return;
        }
        let blanks = self.tail.len() - self.tail.trim_ascii_start().len();
        let text = &self.tail[blanks..];
        if text.starts_with(opening) {
            self.tail.drain(..blanks + opening.len());
            self.open();
        } else if blanks > BLANKS_MAX || !opening.starts_with(text) {
            self.at = At::Over;
        }
    }

    fn passes_ending(&mut self) -> bool {
        let budget = Arc::clone(&self.rule.budget);
        self.passes(budget.ending.as_bytes())
    }

    /// Returns true if `mark` is complete; what stands behind it stays in the tail.
    fn passes(&mut self, mark: &[u8]) -> bool {
        let found = self.tail.windows(mark.len().max(1)).position(|bytes| bytes == mark);
        let kept = match found {
            Some(at) => at + mark.len(),
            None => self.tail.len().saturating_sub(mark.len().saturating_sub(1)),
        };
        self.tail.drain(..kept);
        found.is_some()
    }

    fn open(&mut self) {
        self.at = if self.spent >= self.budget().tokens { At::Closing(0) } else { At::Inside };
    }

    fn leave(&mut self) {
        self.at = if self.budget().opens_anywhere { At::Before } else { At::Over };
    }

    fn closing(&self) -> &[u32] {
        let ReasoningBudget { closing, closing_again, .. } = self.budget();
        if self.closed == 0 || closing_again.is_empty() { closing } else { closing_again }
    }

    /// Number of closing tokens that the model has written already, at the end of its reasoning.
    fn begun(&self, output: &[u32]) -> usize {
        let closing = self.closing();
        let most = closing.len().saturating_sub(1).min(self.spent as usize);
        (1..=most).rev().find(|count| output.ends_with(&closing[..*count])).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_grammar::TokenText;
    use std::sync::LazyLock;

    /// Tokens are the characters of ASCII and some longer texts behind them.
    static TOKENS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
        let longer = ["<think>", "</think>", "\n\n", "</", ">\n", "think", "k>", "<|end|>", "<|open|>"];
        (0..128_u8).map(|byte| vec![byte]).chain(longer.map(|text| text.as_bytes().to_vec())).collect()
    });
    static VOCABULARY: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| {
        let tokens = TOKENS.iter().map(|bytes| TokenText { bytes, is_special: bytes.starts_with(b"<|") });
        Vocabulary::new(tokens, &[], TOKENS.len()).expect("a vocabulary")
    });

    /// Tokens of a text, the longest first, `·` between two that would be one.
    fn tokens(text: &str) -> Vec<u32> {
        let mut out = Vec::new();
        for mut rest in text.split('·').map(str::as_bytes) {
            while !rest.is_empty() {
                let fits = |id: &usize| rest.starts_with(&TOKENS[*id]);
                let id = (0..TOKENS.len()).filter(fits).max_by_key(|id| TOKENS[*id].len()).expect("ASCII");
                rest = &rest[TOKENS[id].len()..];
                out.push(id as u32);
            }
        }
        out
    }

    fn text(output: &[u32]) -> String {
        output.iter().map(|id| String::from_utf8_lossy(&TOKENS[*id as usize])).collect()
    }

    fn budget(tokens_max: u32) -> ReasoningBudget {
        ReasoningBudget {
            tokens: tokens_max,
            opening: "<think>".into(),
            ending: "</think>".into(),
            closing: tokens("\n·</think>·\n\n"),
            ..ReasoningBudget::default()
        }
    }

    fn place(budget: &ReasoningBudget) -> Reasoning {
        Reasoning::new(Rule { budget: Arc::new(budget.clone()), vocabulary: Arc::clone(&VOCABULARY) })
    }

    /// Output of a model that would say `says`, token by token, under a budget.
    fn said(budget: &ReasoningBudget, says: &str) -> String {
        let (mut here, says) = (place(budget), tokens(says));
        let (mut output, mut says) = (Vec::new(), says.iter());
        loop {
            // Whoever goes on after the same tokens is at the same place.
            let mut again = place(budget);
            (1..=output.len()).for_each(|count| again.follow(&output[..count]));
            assert_eq!((again.next(), again.at), (here.next(), here.at), "{}", text(&output));
            let Some(token) = here.next().or_else(|| says.next().copied()) else { return text(&output) };
            output.push(token);
            here.follow(&output);
        }
    }

    #[test]
    fn reasoning_is_closed_when_its_budget_is_spent() {
        assert_eq!(said(&budget(2), "<think>abc"), "<think>ab\n</think>\n\nc");
        assert_eq!(said(&budget(0), "<think>a"), "<think>\n</think>\n\na");
        assert_eq!(said(&budget(2), " \n<think>abc"), " \n<think>ab\n</think>\n\nc");
        let open = ReasoningBudget { is_open: true, ..budget(1) };
        assert_eq!(said(&open, "ab"), "a\n</think>\n\nb");
        assert_eq!(said(&ReasoningBudget { tokens: 0, ..open }, "b"), "\n</think>\n\nb");
    }

    #[test]
    fn reasoning_that_ends_itself_is_left_alone() {
        for says in ["<think>a</think>bcdef", "<think>a</·thin·k·>\nbcdef", "<think>a·</·t·h·i·n·k>bcdef", "<thi·nk>"]
        {
            assert_eq!(said(&budget(9), says), says.replace('·', ""));
        }
        assert_eq!(said(&budget(9), "<think>ab"), "<think>ab");
    }

    #[test]
    fn marks_are_found_however_they_are_spelled() {
        for says in ["<·t·h·i·n·k·>·a·b·c", "<·think·>\n·a·b·c", "<·thin·k>·a·b·c"] {
            let closed = said(&budget(2), says);
            assert!(closed.ends_with("ab\n</think>\n\nc"), "{closed}");
        }
    }

    #[test]
    fn marks_behind_the_beginning_are_text() {
        for says in ["a<think>bc", " a<think>bc", "<think>a</think><think>bcd", "<thin", "<th</think>"] {
            assert_eq!(said(&budget(2), says), says);
        }
        let blanks = format!("{}<think>ab", " ".repeat(BLANKS_MAX + 1));
        assert_eq!(said(&budget(0), &blanks), blanks);
    }

    #[test]
    fn what_the_model_has_begun_is_not_said_twice() {
        assert_eq!(said(&budget(2), "<think>a\nb"), "<think>a\n</think>\n\nb");
        let spelled = ReasoningBudget { closing: tokens("</·think·>"), ..budget(2) };
        assert_eq!(said(&spelled, "<think>a</·x"), "<think>a</think>x");
        // The model completes the mark with the token that spends the budget.
        assert_eq!(said(&ReasoningBudget { tokens: 4, ..spelled }, "<think>a</·think·>·x"), "<think>a</think>x");
    }

    #[test]
    fn one_budget_holds_for_all_parts_that_reason() {
        let channels = ReasoningBudget {
            opening: "<|open|>".into(),
            opens_anywhere: true,
            ending: "<|end|>".into(),
            closing: tokens("<|end|>"),
            closing_again: tokens("<|end|>!"),
            ..budget(3)
        };
        assert_eq!(
            said(&channels, "<|open|>a<|end|>x<|open|>bc·d<|open|>e<|open|>"),
            "<|open|>a<|end|>x<|open|>bc<|end|>d<|open|><|end|>!e<|open|><|end|>!"
        );
    }

    #[test]
    fn a_closing_token_that_cannot_stand_there_waits() {
        let mut place = place(&ReasoningBudget { is_open: true, ..budget(1) });
        let [newline, mark, newlines] = tokens("\n·</think>·\n\n")[..] else { panic!("three tokens") };
        let [a, b] = tokens("ab")[..] else { panic!("two tokens") };
        let mut output = Vec::new();
        for (token, next) in [
            (a, Some(newline)),
            (b, Some(newline)),
            (newline, Some(mark)),
            (b, Some(mark)),
            (mark, Some(newlines)),
            (newlines, None),
        ] {
            output.push(token);
            place.follow(&output);
            assert_eq!(place.next(), next, "after {}", text(&output));
        }
        assert_eq!(place.closed(), 1);
    }
}
