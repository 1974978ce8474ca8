//! Mark behind which the grammar of an output begins, such as the one that closes the reasoning.
//!
//! The mark is found in the bytes of the output, as readers of the text find it: a model may spell it with other tokens than the
//! tokenizer does. Tokens are free in front of it but for two kinds, so that nothing escapes the grammar: those that would end the output, and
//! those that would complete the mark and go on with text. Line breaks may stand behind the mark in the token that completes it, since
//! readers drop them.

use penstock_grammar::Vocabulary;
use std::sync::{Arc, OnceLock};

/// Mark of a request, and the tokens that are free in front of it.
pub(crate) struct Mark {
    vocabulary: Arc<Vocabulary>,
    /// Tokens of the mark, as the tokenizer spells it.
    tokens: Vec<u32>,
    /// Text of the mark; empty if a token of it has none. Then the tokens alone count.
    bytes: Vec<u8>,
    /// Stop tokens that no text contains.
    ends: Vec<u32>,
    /// Free tokens by the number of bytes of the mark that the output ends with, one bit each; found when first asked for.
    free: Box<[OnceLock<Vec<u32>>]>,
}

impl std::fmt::Debug for Mark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mark").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

impl Mark {
    /// Mark of these tokens, at least one. `ends`: stop tokens that no text contains; one that is a token of the mark stays free.
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, tokens: Vec<u32>, ends: &[u32]) -> Self {
        let texts: Vec<&[u8]> = tokens.iter().map(|token| vocabulary.bytes(*token)).collect();
        let bytes = if texts.iter().any(|text| text.is_empty()) { Vec::new() } else { texts.concat() };
        let ends = ends.iter().copied().filter(|token| !tokens.contains(token)).collect();
        let free = (0..bytes.len().max(1)).map(|_| OnceLock::new()).collect();
        Self { vocabulary, tokens, bytes, ends, free }
    }

    /// Goes on after the last token of `output`, and returns true if that completes the mark. `held`: number of bytes of the mark that the
    /// output ends with, 0 before the first token.
    pub(crate) fn follow(&self, held: &mut usize, output: &[u32]) -> bool {
        if self.bytes.is_empty() {
            return output.ends_with(&self.tokens);
        }
        let Some(&token) = output.last() else { return false };
        let text = [&self.bytes[..*held], self.shown(token)].concat();
        let breaks = text.iter().rev().take_while(|byte| **byte == b'\n').count();
        if (0..=breaks).any(|count| text[..text.len() - count].ends_with(&self.bytes)) {
            return true;
        }
        let begun = (1..self.bytes.len()).rev().find(|count| text.ends_with(&self.bytes[..*count]));
        *held = begun.unwrap_or(0);
        false
    }

    /// Tokens that may come next in front of the mark, one bit each, lowest bit first. Cost: a look at each token, once for each `held`.
    pub(crate) fn free(&self, held: usize) -> &[u32] {
        self.free[held].get_or_init(|| {
            let rows = self.vocabulary.rows();
            let mut bits = vec![u32::MAX; rows.div_ceil(32)];
            let mut bar = |token: u32| bits[token as usize / 32] &= !(1 << (token % 32));
            self.ends.iter().copied().filter(|token| (*token as usize) < rows).for_each(&mut bar);
            if !self.bytes.is_empty() {
                // The rests of the mark that would complete it.
                let begun = (1..=held).filter(|count| self.bytes[..held].ends_with(&self.bytes[..*count]));
                let rests: Vec<&[u8]> = begun.map(|count| &self.bytes[count..]).collect();
                (0..rows as u32).filter(|token| self.passes(*token, &rests)).for_each(&mut bar);
            }
            bits
        })
    }

    /// Returns true if a token is free in front of the mark.
    pub(crate) fn is_free(&self, held: usize, token: u32) -> bool {
        self.free(held).get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Returns true if a token completes the mark, or one of its rests, and goes on with text.
    fn passes(&self, token: u32, rests: &[&[u8]]) -> bool {
        let (bytes, mark) = (self.shown(token), self.bytes.as_slice());
        let is_text = |behind: &[u8]| behind.iter().any(|byte| *byte != b'\n');
        let has_mark = |(at, part): (usize, &[u8])| part == mark && is_text(&bytes[at + mark.len()..]);
        rests.iter().any(|rest| bytes.strip_prefix(*rest).is_some_and(is_text))
            || bytes.len() > mark.len() && bytes.windows(mark.len()).enumerate().any(has_mark)
    }

    /// Bytes of a token in the text that readers see: those of a control token only where its name is a part of the mark.
    fn shown(&self, token: u32) -> &[u8] {
        let bytes = self.vocabulary.bytes(token);
        let is_part = || self.bytes.windows(bytes.len().max(1)).any(|part| part == bytes);
        if self.vocabulary.is_special(token) && !is_part() { &[] } else { bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_grammar::TokenText;

    const WORDS: [&str; 15] = [
        "</think>",
        "</",
        "think",
        ">",
        ">\n\n",
        ">{",
        ">\nx",
        "<",
        "k>",
        "x</think>y",
        "x",
        "\n",
        "<|end|>",
        "<|other|>",
        "x</think>\n",
    ];

    fn mark(tokens: &[u32]) -> Mark {
        let tokens_of =
            WORDS.iter().map(|text| TokenText { bytes: text.as_bytes(), is_special: text.starts_with("<|") });
        let vocabulary = Vocabulary::new(tokens_of, &[], WORDS.len() + 1).expect("a vocabulary");
        Mark::new(vocabulary, tokens.to_vec(), &[id("<|end|>")])
    }

    fn id(word: &str) -> u32 {
        WORDS.iter().position(|other| *other == word).expect("a word") as u32
    }

    /// Place behind the words: `None` if the mark is complete.
    fn held(mark: &Mark, words: &[&str]) -> Option<usize> {
        let (mut held, mut output) = (0, Vec::new());
        for (at, word) in words.iter().enumerate() {
            output.push(id(word));
            if mark.follow(&mut held, &output) {
                assert_eq!(at + 1, words.len(), "complete before the end of {words:?}");
                return None;
            }
        }
        Some(held)
    }

    #[track_caller]
    fn barred(mark: &Mark, held: usize, want: &[&str]) {
        let barred: Vec<&str> = WORDS.into_iter().filter(|word| !mark.is_free(held, id(word))).collect();
        assert_eq!(barred, want, "{held} bytes of the mark");
        assert!(mark.is_free(held, WORDS.len() as u32), "a row without a text");
        assert!(!mark.is_free(held, 1000), "no row");
    }

    #[test]
    fn the_mark_is_found_however_it_is_spelled() {
        let mark = mark(&[id("</think>")]);
        let complete: [&[&str]; 7] = [
            &["</think>"],
            &["x", "</", "think", ">"],
            &["<", "</", "think", ">\n\n"],
            &["</", "think", "</", "think", ">"],
            &["</", "think", "<|other|>", ">"],
            &["x</think>\n"],
            &["</", "x", "</think>"],
        ];
        complete.iter().for_each(|words| assert_eq!(held(&mark, words), None, "{words:?}"));
        let begun: [(&[&str], usize); 6] = [
            (&["x"], 0),
            (&["</"], 2),
            (&["</", "think"], 7),
            (&["</", "think", "<"], 1),
            (&["</", "think", "\n"], 0),
            (&["</", "<|other|>"], 2),
        ];
        begun.iter().for_each(|(words, want)| assert_eq!(held(&mark, words), Some(*want), "{words:?}"));
    }

    #[test]
    fn no_token_ends_the_output_in_front_of_the_mark_or_goes_on_behind_it() {
        let mark = mark(&[id("</think>")]);
        barred(&mark, 0, &["x</think>y", "<|end|>"]);
        barred(&mark, 1, &["x</think>y", "<|end|>"]);
        barred(&mark, 7, &[">{", ">\nx", "x</think>y", "<|end|>"]);
    }

    #[test]
    fn a_mark_that_is_an_end_token_or_has_no_text_is_followed_by_its_tokens() {
        let end = mark(&[id("<|end|>")]);
        barred(&end, 0, &[]);
        assert_eq!(held(&end, &["x", "<|end|>"]), None);
        let blank = WORDS.len() as u32;
        let run = mark(&[id("x"), blank]);
        barred(&run, 0, &["<|end|>"]);
        let mut held = 0;
        assert!(!run.follow(&mut held, &[id("x")]) && run.follow(&mut held, &[id("x"), blank]));
        assert!(!run.follow(&mut held, &[id("x"), blank, id("x")]));
    }

    #[test]
    fn a_mark_that_repeats_itself_is_found_at_once() {
        let mark = mark(&[id("<"), id("<"), id("x")]);
        assert_eq!(held(&mark, &["<", "<", "<", "x"]), None);
        assert_eq!(held(&mark, &["<", "<", "<"]), Some(2));
        barred(&mark, 2, &["x</think>y", "<|end|>", "x</think>\n"]);
    }
}
