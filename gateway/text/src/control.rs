//! Protection against control tokens in clients' text.
//!
//! The chat template gives a prompt its structure with control tokens (`<|im_end|>`). The same characters in a message
//! must stay text, or a message could end its turn and speak in another role. So, before rendering, every such name in
//! a client's string gets a *marker* after each of its characters: one character that occurs nowhere else in the
//! request. The rendered prompt then shows which names the template wrote and which came from the client;
//! `TextModel::encode_marked` drops the marker after the tokenizer has looked for control tokens. Without such names
//! there is no marker, and the prompt is tokenized as it is.
//!
//! Two kinds of tokens count: those that the tokenizer calls special, and of its other added tokens those that the
//! template writes as markup (`<tool_call>`). Hugging Face transformers chooses the same with
//! `sanitize_control_tokens=True`; there, too, the tokens come out as text. An assistant's own earlier messages keep
//! the marks of reasoning and tool calls, because templates look for them.
//!
//! The alternative of encoding the pieces between control tokens one by one was rejected: it changes SentencePiece's
//! prefix blanks and the word splits at each border, so prompts would differ from Hugging Face's.

use std::borrow::Cow;
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Tokenizer;

use crate::{error::TextError, vocab::TokenBytes};

/// Marks that an assistant's message may carry even where the tokenizer calls them special.
const OWN_MARKS: [&str; 12] = [
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<seed:think>",
    "</seed:think>",
    "<tool_call>",
    "</tool_call>",
    "<function_call>",
    "</function_call>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
];

/// Search for the names of control tokens in texts that clients write.
pub(crate) struct ControlTokens {
    /// Automaton that finds the names of all control tokens in one pass over a text.
    all: AhoCorasick,
    /// Control tokens that an assistant's message must not contain either.
    special: AhoCorasick,
}

impl ControlTokens {
    pub(crate) fn new(tokenizer: &Tokenizer, template: &str) -> Result<Self, TextError> {
        let added = tokenizer.get_added_tokens_decoder();
        let names = || added.values().filter(|token| !token.content.trim().is_empty());
        let markup = |name: &str| !name.chars().all(char::is_alphanumeric) && template.contains(name);
        let all = names().filter(|token| token.special || markup(&token.content)).map(|token| token.content.as_str());
        let special = names()
            .filter(|token| token.special && !OWN_MARKS.contains(&token.content.as_str()))
            .map(|token| token.content.as_str());
        Ok(Self { all: automaton(all)?, special: automaton(special)? })
    }

    /// A character that does not occur in the request. U+FDD0..U+FDEF are noncharacters, which ordinary text does not
    /// contain.
    pub(crate) fn marker(occurs: impl Fn(char) -> bool) -> char {
        ('\u{FDD0}'..='\u{FDEF}')
            .chain('\u{F0000}'..='\u{FFFFD}')
            .find(|&marker| !occurs(marker))
            // Fallback for a request that contains all of the noncharacters: only an adversarial client sends one.
            .unwrap_or('\u{10FFFD}')
    }

    /// Breaks up all control tokens in a client's text with `marker`.
    pub(crate) fn mark<'a>(&self, text: &'a str, marker: char) -> Cow<'a, str> {
        mark(&self.all, text, marker)
    }

    /// Breaks up control tokens in an earlier message of the assistant's, except the marks of reasoning and tool
    /// calls.
    pub(crate) fn mark_own<'a>(&self, text: &'a str, marker: char) -> Cow<'a, str> {
        mark(&self.special, text, marker)
    }
}

/// Control tokens of a vocabulary by name, with a search that finds all of them in one pass over a text.
pub struct SpecialNames {
    names: Vec<(String, u32)>,
    search: AhoCorasick,
}

impl SpecialNames {
    /// Reads the vocabulary once. Tokens whose bytes are empty or no text have no name.
    pub(crate) fn new(vocabulary: &TokenBytes) -> Result<Self, TextError> {
        let named = |id| Some((std::str::from_utf8(vocabulary.token(id)).ok()?.to_owned(), id));
        let ids = (0..vocabulary.count()).filter(|id| vocabulary.is_special(*id));
        let names: Vec<_> = ids.filter_map(named).filter(|(name, _)| !name.is_empty()).collect();
        let search = automaton(names.iter().map(|(name, _)| name.as_str()))?;
        Ok(Self { names, search })
    }

    /// Name of the control token `id`; `None`: `id` is no control token with a name.
    pub fn name(&self, id: u32) -> Option<&str> {
        // Ids ascend, as they were read.
        let at = self.names.binary_search_by_key(&id, |(_, id)| *id).ok()?;
        Some(&self.names[at].0)
    }

    /// Names in `text` with their tokens, in order and without overlaps: each is the first behind the one before, and the
    /// longest of those that begin there. Cost: one pass over the text.
    pub fn find(&self, text: &str) -> Vec<(Range<usize>, u32)> {
        self.search.find_iter(text).map(|found| (found.range(), self.names[found.pattern().as_usize()].1)).collect()
    }
}

fn automaton<'a>(names: impl Iterator<Item = &'a str>) -> Result<AhoCorasick, TextError> {
    AhoCorasick::builder()
        .match_kind(MatchKind::LeftmostLongest)
        .build(names)
        .map_err(|error| TextError::malformed("tokenizer.json", error))
}

fn mark<'a>(names: &AhoCorasick, text: &'a str, marker: char) -> Cow<'a, str> {
    let mut out = String::new();
    let mut done = 0;
    for found in names.find_iter(text) {
        out.push_str(&text[done..found.start()]);
        for c in text[found.range()].chars() {
            // The marker also follows the last character: a name may begin inside another.
            out.push(c);
            out.push(marker);
        }
        done = found.end();
    }
    if done == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[done..]);
    Cow::Owned(out)
}
