//! Separation of reasoning from an answer: `<think> … </think>` at its beginning.
//!
//! Characters go in one at a time, so the result does not depend on the cuts of the text. Reasoning can only begin an
//! answer (or has begun in the prompt); a mark later in the text is plain text. Line breaks that only set the marks
//! apart are dropped, since templates put them back. Everything else comes out, as reasoning or as answer.

use tokenizers::Tokenizer;

use crate::{literal::Literal, piece::Pieces};

/// Pair of marks that a model writes around its reasoning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReasoningMarkers {
    /// Mark that opens the reasoning, such as `<think>`.
    pub open: String,
    /// Mark that closes the reasoning, such as `</think>`.
    pub close: String,
}

/// Marks in use: Qwen, DeepSeek and most others; Magistral; Seed-OSS; Command A.
const KNOWN: [(&str, &str); 4] = [
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
];

impl ReasoningMarkers {
    /// Marks of a model: a known pair that is among its added tokens, or whose closing mark its template writes.
    pub(crate) fn detect(tokenizer: &Tokenizer, template: &str) -> Option<Self> {
        let added = tokenizer.get_added_vocabulary().get_vocab();
        let known = |&&(open, close): &&(&str, &str)| {
            (added.contains_key(open) && added.contains_key(close)) || template.contains(close)
        };
        let &(open, close) = KNOWN.iter().find(known)?;
        Some(Self { open: open.into(), close: close.into() })
    }

    /// Returns true if a prompt leaves the model inside its reasoning.
    pub(crate) fn opened_by(&self, prompt: &str, continued: bool) -> bool {
        if prompt.trim_end().ends_with(&self.open) {
            return true;
        }
        continued && prompt.rfind(&self.open) > prompt.rfind(&self.close)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Only blanks so far; the opening mark may still come.
    Start,
    /// In the reasoning, behind the opening mark.
    Reasoning,
    /// After the closing mark, where line breaks are dropped.
    Between,
    /// In the answer's text, behind the reasoning or without any.
    Answer,
}

/// State of separating reasoning from the text of one answer.
#[derive(Debug)]
pub(crate) struct ReasoningSplitter {
    at: At,
    open: Literal,
    close: Literal,
    /// Blanks in front of the opening mark, or line breaks that may stand in front of the closing one.
    held: String,
    /// True if any text of the reasoning has come out.
    begun: bool,
}

impl ReasoningSplitter {
    pub(crate) fn new(markers: &ReasoningMarkers, opened: bool) -> Self {
        Self {
            at: if opened { At::Reasoning } else { At::Start },
            open: Literal::new(&markers.open),
            close: Literal::new(&markers.close),
            held: String::new(),
            begun: false,
        }
    }

    pub(crate) fn is_reasoning(&self) -> bool {
        self.at == At::Reasoning
    }

    /// Takes the character at `offset`; answer characters go to `answer` with their offsets.
    pub(crate) fn push(
        &mut self,
        offset: usize,
        c: char,
        out: &mut Pieces,
        answer: &mut impl FnMut(usize, char, &mut Pieces),
    ) {
        match self.at {
            At::Start => self.start(offset, c, out, answer),
            At::Reasoning => {
                if self.close.push(c) {
                    self.held.clear();
                    self.at = At::Between;
                } else {
                    let free = self.close.take_released();
                    free.chars().for_each(|c| self.reasoning(c, out));
                }
            }
            At::Between if c == '\n' => {}
            At::Between | At::Answer => {
                self.at = At::Answer;
                answer(offset, c, out);
            }
        }
    }

    fn start(&mut self, offset: usize, c: char, out: &mut Pieces, answer: &mut impl FnMut(usize, char, &mut Pieces)) {
        if self.open.is_idle() && c.is_whitespace() {
            self.held.push(c);
        } else if self.open.push(c) {
            self.held.clear();
            self.at = At::Reasoning;
        } else if self.open.is_idle() || !self.open.released_is_empty() {
            // The opening mark is absent: all held text is the answer's beginning.
            let text = std::mem::take(&mut self.held) + &self.open.take_all();
            self.at = At::Answer;
            forward(&text, offset + c.len_utf8() - text.len(), out, answer);
        }
    }

    fn reasoning(&mut self, c: char, out: &mut Pieces) {
        if c == '\n' {
            if self.begun {
                self.held.push(c);
            }
            return;
        }
        self.begun = true;
        out.reasoning(&std::mem::take(&mut self.held));
        out.reasoning(c.encode_utf8(&mut [0; 4]));
    }

    /// Ends the text at `offset` and releases the held text.
    pub(crate) fn finish(
        &mut self,
        offset: usize,
        out: &mut Pieces,
        answer: &mut impl FnMut(usize, char, &mut Pieces),
    ) {
        match self.at {
            At::Start => {
                let text = std::mem::take(&mut self.held) + &self.open.take_all();
                forward(&text, offset - text.len(), out, answer);
            }
            At::Reasoning => {
                let text = self.close.take_all();
                text.chars().for_each(|c| self.reasoning(c, out));
                if self.begun {
                    out.reasoning(&std::mem::take(&mut self.held));
                }
            }
            At::Between | At::Answer => {}
        }
    }
}

fn forward(text: &str, at: usize, out: &mut Pieces, answer: &mut impl FnMut(usize, char, &mut Pieces)) {
    for (index, c) in text.char_indices() {
        answer(at + index, c, out);
    }
}
