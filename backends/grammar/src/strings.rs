//! Masks inside of strings that are nearly as long as they may be.
//!
//! The library knows sets of tokens that fit where ten or more plain characters may follow. Where fewer may, it walks the whole vocabulary: nearly two
//! milliseconds for 150 thousand tokens. There all plain characters are alike to the grammar, which is tried out character by character; so the tokens of plain
//! characters are known by their number of characters, and the walk goes over the other tokens only, which are few.

use std::ops::RangeInclusive;
use std::sync::Arc;

use llguidance::derivre::StateID;
use llguidance::earley::{BiasComputer, ParserRecognizer, SlicedBiasComputer};
use llguidance::toktrie::{Recognizer, SimpleVob, TokTrie};

/// Plain characters of the library's smallest set of tokens, those of one to ten.
const LENGTH_MAX: usize = 10;

/// Characters that end or structure JSON: where one of them differs from a letter, the text is not inside of a string. Tried first, since this is the usual case.
const STRUCTURE: &[u8] = b" ,}]:0-{[tfn";

/// Bytes of the characters that are not ASCII: first byte, then those that continue it (table 3-7 of the Unicode Standard).
const SEQUENCES: [(RangeInclusive<u8>, &[RangeInclusive<u8>]); 8] = [
    (0xc2..=0xdf, &[0x80..=0xbf]),
    (0xe0..=0xe0, &[0xa0..=0xbf, 0x80..=0xbf]),
    (0xe1..=0xec, &[0x80..=0xbf, 0x80..=0xbf]),
    (0xed..=0xed, &[0x80..=0x9f, 0x80..=0xbf]),
    (0xee..=0xef, &[0x80..=0xbf, 0x80..=0xbf]),
    (0xf0..=0xf0, &[0x90..=0xbf, 0x80..=0xbf, 0x80..=0xbf]),
    (0xf1..=0xf3, &[0x80..=0xbf, 0x80..=0xbf, 0x80..=0xbf]),
    (0xf4..=0xf4, &[0x80..=0x8f, 0x80..=0xbf, 0x80..=0xbf]),
];

/// Returns true for characters that stand for themselves in a JSON string.
fn is_plain(character: char) -> bool {
    !matches!(character, '\0'..='\x1f' | '"' | '\\' | '\x7f')
}

/// The library's computation of masks, and a shorter one where fewer than [`LENGTH_MAX`] plain characters may follow. Both give the same masks.
pub(crate) struct ShortStrings {
    library: Arc<SlicedBiasComputer>,
    /// Tokens of one plain character, of at most two, and so on.
    plain: Vec<SimpleVob>,
    /// Tokens that are not of plain characters alone.
    others: TokTrie,
}

impl ShortStrings {
    /// Sorts the tokens of `library`'s trie.
    pub(crate) fn new(library: Arc<SlicedBiasComputer>) -> Self {
        let trie = library.trie();
        let mut plain = vec![trie.alloc_token_set(); LENGTH_MAX - 1];
        let mut others = trie.alloc_token_set();
        for token in 0..trie.vocab_size() as u32 {
            match plain_characters(trie.token(token)) {
                Some(count) => plain.iter_mut().skip(count - 1).for_each(|set| set.allow_token(token)),
                None => others.allow_token(token),
            }
        }
        let others = trie.filter(&others);
        Self { library, plain, others }
    }
}

/// Number of characters of a token that has only plain ones; `None` for every other token.
fn plain_characters(bytes: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(bytes).ok()?;
    (!text.is_empty() && text.chars().all(is_plain)).then(|| text.chars().count())
}

impl BiasComputer for ShortStrings {
    fn compute_bias(&self, recognizer: &mut ParserRecognizer<'_>, start: &[u8]) -> SimpleVob {
        let room = if start.is_empty() { room(recognizer) } else { None };
        let Some(room) = room else { return self.library.compute_bias(recognizer, start) };
        let mut allowed = self.trie().alloc_token_set();
        if let Some(plain) = room.checked_sub(1).and_then(|longest| self.plain.get(longest)) {
            allowed.or(plain);
        }
        self.others.add_bias(recognizer, &mut allowed, &[]);
        allowed
    }

    fn trie(&self) -> &TokTrie {
        self.library.trie()
    }
}

/// Number of plain characters that may follow, if that is the same for all of them and below [`LENGTH_MAX`].
fn room(recognizer: &mut ParserRecognizer<'_>) -> Option<usize> {
    recognizer.trie_started("room");
    let room = Probe::new(recognizer).room();
    recognizer.trie_finished();
    room
}

/// Trial of bytes in a parser by the states of its lexer. It gives up at a byte that ends a lexeme, which moves the parser on too.
struct Probe<'a, 'p> {
    recognizer: &'a mut ParserRecognizer<'p>,
    rows: (usize, usize),
    /// States in the middle of a character whose continuations have all been tried, with the bytes that those were.
    tried: Vec<(StateID, &'static [RangeInclusive<u8>])>,
}

impl<'a, 'p> Probe<'a, 'p> {
    fn new(recognizer: &'a mut ParserRecognizer<'p>) -> Self {
        let rows = rows(recognizer);
        Self { recognizer, rows, tried: Vec::new() }
    }

    fn room(&mut self) -> Option<usize> {
        let mut states = Vec::with_capacity(LENGTH_MAX);
        while let Some(state) = self.push(b'a')? {
            states.push(state);
            if states.len() == LENGTH_MAX {
                return None;
            }
        }
        self.recognizer.pop_bytes(states.len());
        for state in &states {
            self.all_lead_to(Some(*state))?;
            self.push(b'a')?;
        }
        self.all_lead_to(None)?;
        Some(states.len())
    }

    /// State behind one more byte; `Some(None)` if it may not come.
    fn push(&mut self, byte: u8) -> Option<Option<StateID>> {
        let may_come = self.recognizer.try_push_byte(byte);
        if rows(self.recognizer) != self.rows {
            return None;
        }
        Some(may_come.then(|| self.recognizer.lexer_state()))
    }

    /// Returns `Some` if every plain character leads to `next`; where `next` is `None`, if no plain character may come.
    fn all_lead_to(&mut self, next: Option<StateID>) -> Option<()> {
        self.tried.clear();
        for byte in STRUCTURE.iter().copied().chain((b' '..0x7f).filter(|byte| is_plain(*byte as char))) {
            self.leads_to(byte, &[], next)?;
        }
        for (first, rest) in SEQUENCES {
            for byte in first {
                // Where no character may come, none may begin.
                self.leads_to(byte, if next.is_some() { rest } else { &[] }, next)?;
            }
        }
        Some(())
    }

    /// Returns `Some` if `byte`, followed by any bytes of the ranges in `rest`, leads to `next`.
    fn leads_to(&mut self, byte: u8, rest: &'static [RangeInclusive<u8>], next: Option<StateID>) -> Option<()> {
        let found = self.push(byte)?;
        match (found, rest) {
            (_, []) if found == next => {}
            (Some(state), [continuing, further @ ..]) => {
                if !self.tried.contains(&(state, rest)) {
                    for byte in continuing.clone() {
                        self.leads_to(byte, further, next)?;
                    }
                    self.tried.push((state, rest));
                }
            }
            _ => return None,
        }
        self.recognizer.pop_bytes(usize::from(found.is_some()));
        Some(())
    }
}

/// Rows that the parser has made or found again: one more for each lexeme that ended.
fn rows(recognizer: &mut ParserRecognizer<'_>) -> (usize, usize) {
    let stats = recognizer.stats_mut();
    (stats.rows, stats.cached_rows)
}
