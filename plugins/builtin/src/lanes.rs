//! Rewriting of an answer's texts while it comes: the one place that knows which events carry text, and in which order
//! it must go out.
//!
//! An answer is several texts at once: per choice its words, its reasoning, its refusal, the arguments of each call.
//! Each is a lane with a [`Rewriter`] of its own, which may hold text back. Held text goes out before the choice emits
//! another kind of event, before it finishes, and at the end of the answer, so the order is kept. Log-probabilities and
//! token ids describe the original text: they go out with a text that is unchanged, and not before all of it does; with
//! a changed text they are left out.

use penstock_plugins::logprob_bytes;
use penstock_types::{ChatEvent, TokenLogprob};

/// Kind of a text that a choice emits; each has a rewriter of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Words of the answer itself.
    Text,
    /// Reasoning in front of the answer.
    Reasoning,
    /// Refusal that the model wrote in place of an answer.
    Refusal,
    /// Arguments of the call of that index: JSON text.
    Arguments(u32),
}

/// Rewriter of one text, piece by piece. The result must not depend on how the text is cut.
pub(crate) trait Rewriter {
    /// Takes a piece; appends to `out` the text that can go out by now. With false nothing more of the answer may
    /// follow.
    fn push(&mut self, piece: &str, out: &mut String) -> bool;
    /// Ends the text: appends the rest. With false nothing more of the answer may follow.
    fn end(&mut self, out: &mut String) -> bool;
    /// Text that is held back, unchanged.
    fn held(&mut self) -> String;
    /// Bytes of text that are held back; 0: none.
    fn held_bytes(&self) -> usize;
}

struct Open<R> {
    choice: u32,
    lane: Lane,
    rewriter: R,
    /// Log-probabilities of the text that has not gone out completely.
    logprobs: Vec<TokenLogprob>,
    tokens: Vec<u32>,
    /// Memory of `logprobs`, in bytes.
    logprob_bytes: usize,
    /// Input since then; the text is unchanged if it equals `given`.
    taken: String,
    given: String,
}

/// All texts of one answer, with the rewriters of those that have begun.
pub(crate) struct Lanes<R> {
    open: Vec<Open<R>>,
}

impl<R> Default for Lanes<R> {
    fn default() -> Self {
        Self { open: Vec::new() }
    }
}

impl<R: Rewriter> Lanes<R> {
    /// Takes events through the rewriters that `make` makes. With false the answer ends behind the events that are
    /// left.
    pub(crate) fn rewrite(&mut self, events: &mut Vec<ChatEvent>, end: bool, make: &dyn Fn(Lane) -> R) -> bool {
        let mut out = Vec::with_capacity(events.len());
        let mut goes_on = true;
        for event in events.drain(..) {
            goes_on = self.event(event, &mut out, make);
            if !goes_on {
                break;
            }
        }
        if goes_on && end {
            goes_on = self.flush(|_, _| true, &mut out);
        }
        *events = out;
        goes_on
    }

    fn event(&mut self, event: ChatEvent, out: &mut Vec<ChatEvent>, make: &dyn Fn(Lane) -> R) -> bool {
        match event {
            ChatEvent::Text { choice, text, logprobs, tokens } => {
                self.piece(choice, Lane::Text, &text, (logprobs, tokens), out, make)
            }
            ChatEvent::Reasoning { choice, text } => {
                self.piece(choice, Lane::Reasoning, &text, Default::default(), out, make)
            }
            ChatEvent::Refusal { choice, text } => {
                self.piece(choice, Lane::Refusal, &text, Default::default(), out, make)
            }
            ChatEvent::ToolCallArguments { choice, call, json } => {
                self.piece(choice, Lane::Arguments(call), &json, Default::default(), out, make)
            }
            ChatEvent::ToolCallStart { choice, .. }
            | ChatEvent::Finish { choice, .. }
            | ChatEvent::ReasoningSignature { choice, .. } => {
                let goes_on = self.flush(|of, _| of == choice, out);
                out.extend(goes_on.then_some(event));
                goes_on
            }
            ChatEvent::Prompt { choice, text, logprobs, tokens } => {
                let mut rewriter = make(Lane::Text);
                let mut said = String::new();
                let goes_on = rewriter.push(&text, &mut said) && rewriter.end(&mut said);
                let (logprobs, tokens) = if said == text { (logprobs, tokens) } else { Default::default() };
                out.push(ChatEvent::Prompt { choice, text: said, logprobs, tokens });
                goes_on
            }
            other => {
                out.push(other);
                true
            }
        }
    }

    fn piece(
        &mut self,
        choice: u32,
        lane: Lane,
        text: &str,
        (logprobs, tokens): (Vec<TokenLogprob>, Vec<u32>),
        out: &mut Vec<ChatEvent>,
        make: &dyn Fn(Lane) -> R,
    ) -> bool {
        if !self.flush(|of, other| of == choice && other != lane, out) {
            return false;
        }
        let at = self.open.iter().position(|open| open.choice == choice && open.lane == lane);
        let at = at.unwrap_or_else(|| {
            let (taken, given) = (String::new(), String::new());
            let rewriter = make(lane);
            let (logprobs, tokens, logprob_bytes) = (Vec::new(), Vec::new(), 0);
            self.open.push(Open { choice, lane, rewriter, logprobs, tokens, logprob_bytes, taken, given });
            self.open.len() - 1
        });
        let open = &mut self.open[at];
        open.logprob_bytes += logprob_bytes(&logprobs);
        open.logprobs.extend(logprobs);
        open.tokens.extend(tokens);
        let mut said = String::new();
        let goes_on = open.rewriter.push(text, &mut said);
        open.say(text, said, out);
        goes_on
    }

    /// Ends the texts that `which` selects.
    fn flush(&mut self, which: impl Fn(u32, Lane) -> bool, out: &mut Vec<ChatEvent>) -> bool {
        let mut at = 0;
        while at < self.open.len() {
            if !which(self.open[at].choice, self.open[at].lane) {
                at += 1;
                continue;
            }
            let mut open = self.open.remove(at);
            let mut said = String::new();
            let goes_on = open.rewriter.end(&mut said);
            open.say("", said, out);
            if !goes_on {
                return false;
            }
        }
        true
    }

    /// Memory of what is held back, in bytes.
    pub(crate) fn held_bytes(&self) -> usize {
        let of = |open: &Open<R>| {
            let texts = open.rewriter.held_bytes() + open.taken.len() + open.given.len();
            texts + open.logprob_bytes + size_of_val(&*open.tokens)
        };
        self.open.iter().map(of).sum()
    }

    /// Appends all text that is held back, unchanged.
    pub(crate) fn release(&mut self, out: &mut Vec<ChatEvent>) {
        for mut open in self.open.drain(..) {
            let text = open.rewriter.held();
            (open.logprobs, open.tokens) = (Vec::new(), Vec::new());
            open.say("", text, out);
        }
    }
}

impl<R: Rewriter> Open<R> {
    fn say(&mut self, taken: &str, said: String, out: &mut Vec<ChatEvent>) {
        let tracked = !self.logprobs.is_empty() || !self.tokens.is_empty();
        let (mut logprobs, mut tokens) = (Vec::new(), Vec::new());
        if tracked {
            self.taken.push_str(taken);
            self.given.push_str(&said);
            if self.rewriter.held_bytes() == 0 {
                (logprobs, tokens) = (std::mem::take(&mut self.logprobs), std::mem::take(&mut self.tokens));
                self.logprob_bytes = 0;
                if std::mem::take(&mut self.taken) != std::mem::take(&mut self.given) {
                    logprobs.clear();
                    tokens.clear();
                }
            }
        }
        if said.is_empty() && logprobs.is_empty() && tokens.is_empty() {
            return;
        }
        let choice = self.choice;
        out.push(match self.lane {
            Lane::Text => ChatEvent::Text { choice, text: said, logprobs, tokens },
            Lane::Reasoning => ChatEvent::Reasoning { choice, text: said },
            Lane::Refusal => ChatEvent::Refusal { choice, text: said },
            Lane::Arguments(call) => ChatEvent::ToolCallArguments { choice, call, json: said },
        });
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::FinishReason;

    use super::*;

    /// Rewriter that holds the last character back and writes `y` for `x`; `!` ends the answer.
    #[derive(Default)]
    struct Slow(String);

    impl Rewriter for Slow {
        fn push(&mut self, piece: &str, out: &mut String) -> bool {
            self.0.push_str(piece);
            let last = self.0.char_indices().next_back().map_or(0, |(at, _)| at);
            let said: String = self.0.drain(..last).collect();
            out.push_str(&said.replace('x', "y"));
            !said.contains('!')
        }

        fn end(&mut self, out: &mut String) -> bool {
            out.push_str(&std::mem::take(&mut self.0).replace('x', "y"));
            true
        }

        fn held(&mut self) -> String {
            std::mem::take(&mut self.0)
        }

        fn held_bytes(&self) -> usize {
            self.0.len()
        }
    }

    fn text(choice: u32, text: &str, tokens: &[u32]) -> ChatEvent {
        ChatEvent::Text { choice, text: text.into(), logprobs: Vec::new(), tokens: tokens.to_vec() }
    }

    fn finish(choice: u32) -> ChatEvent {
        ChatEvent::Finish { choice, reason: FinishReason::Stop, stop: None }
    }

    fn call() -> ChatEvent {
        ChatEvent::ToolCallStart { choice: 0, call: 0, id: "c".into(), name: "f".into(), signature: None }
    }

    #[track_caller]
    fn check(batches: Vec<Vec<ChatEvent>>, expected: &[ChatEvent]) {
        let (mut lanes, mut out) = (Lanes::default(), Vec::new());
        let last = batches.len() - 1;
        for (at, mut batch) in batches.into_iter().enumerate() {
            let goes_on = lanes.rewrite(&mut batch, at == last, &|_| Slow::default());
            out.append(&mut batch);
            if !goes_on {
                break;
            }
        }
        assert_eq!(out, expected);
    }

    #[test]
    fn nothing_changes_places() {
        let arguments = |json: &str| ChatEvent::ToolCallArguments { choice: 0, call: 0, json: json.into() };
        let reasoning = |text: &str| ChatEvent::Reasoning { choice: 0, text: text.into() };
        check(
            vec![vec![reasoning("ab"), text(0, "cd", &[]), call()], vec![arguments("{}"), finish(0)]],
            &[
                reasoning("a"),
                reasoning("b"),
                text(0, "c", &[]),
                text(0, "d", &[]),
                call(),
                arguments("{"),
                arguments("}"),
                finish(0),
            ],
        );
    }

    #[test]
    fn choices_do_not_meet() {
        check(
            vec![vec![text(0, "ab", &[]), text(1, "xd", &[])], vec![text(0, "c", &[]), finish(0)], vec![finish(1)]],
            &[
                text(0, "a", &[]),
                text(1, "y", &[]),
                text(0, "b", &[]),
                text(0, "c", &[]),
                finish(0),
                text(1, "d", &[]),
                finish(1),
            ],
        );
    }

    #[test]
    fn token_ids_go_with_a_text_that_nobody_changed() {
        check(
            vec![vec![text(0, "ab", &[1]), text(0, "c", &[2]), finish(0)]],
            &[text(0, "a", &[]), text(0, "b", &[]), text(0, "c", &[1, 2]), finish(0)],
        );
        check(
            vec![vec![text(0, "ax", &[1]), text(0, "c", &[2]), finish(0)]],
            &[text(0, "a", &[]), text(0, "y", &[]), text(0, "c", &[]), finish(0)],
        );
    }

    #[test]
    fn an_end_is_the_end_and_what_is_held_can_be_let_go() {
        check(
            vec![vec![text(0, "a!", &[]), text(0, "b", &[]), text(0, "c", &[]), finish(0)]],
            &[text(0, "a", &[]), text(0, "!", &[])],
        );
        let mut lanes = Lanes::default();
        let mut batch = vec![text(0, "ax", &[7]), text(1, "b", &[])];
        assert!(lanes.rewrite(&mut batch, false, &|_| Slow::default()));
        let mut out = Vec::new();
        lanes.release(&mut out);
        assert_eq!(out, [text(0, "x", &[]), text(1, "b", &[])]);
    }
}
