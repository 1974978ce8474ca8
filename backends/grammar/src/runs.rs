//! Masks where many characters are alike to the grammar: near the end of a string, and inside of words.
//!
//! The library knows sets of tokens that fit where ten or more plain characters may follow. Elsewhere it walks the vocabulary, of whose 150 thousand tokens
//! most are words: a walk that meets them takes one to two milliseconds. There the grammar often treats all characters of a class alike, which is tried out
//! character by character; so the tokens of that class are known by their number of characters, and the walk goes over the other tokens only.

use std::ops::RangeInclusive;
use std::sync::Arc;

use llguidance::derivre::StateID;
use llguidance::earley::{BiasComputer, ParserRecognizer, SlicedBiasComputer};
use llguidance::toktrie::{Recognizer, SimpleVob, TokTrie};

/// Plain characters of the library's smallest set of tokens, those of one to ten.
const PLAIN_MAX: usize = 10;

/// Most characters of a token that counts as a word. Longer ones are few.
const WORD_MAX: usize = 16;

/// Characters that end or structure JSON: where one of them differs from a letter, the text is not inside of a string. Tried first, since this is the usual case.
const STRUCTURE: &[u8] = b" ,}]:0-{[tfn";

/// First byte of `é`: where it may come, so may every plain character, or the characters are of no class that is known here.
const NOT_ASCII: u8 = 0xc3;

/// Letters of ASCII, capital ones first: where only small ones may come, the first differs.
const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Small letters of ASCII.
const SMALL_LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyz";

/// First bytes of characters that are not ASCII.
const FIRST_BYTES: RangeInclusive<u8> = 0xc2..=0xf4;

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

/// Tokens of at most [`WORD_MAX`] letters of ASCII, with a blank in front or without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word {
    /// True if a letter is a capital one.
    has_capitals: bool,
    /// True if a blank stands in front; it counts as a character.
    has_blank: bool,
}

impl Word {
    const ALL: [Self; 4] = [
        Self { has_capitals: false, has_blank: false },
        Self { has_capitals: false, has_blank: true },
        Self { has_capitals: true, has_blank: false },
        Self { has_capitals: true, has_blank: true },
    ];

    /// Kind of a token that is a word.
    fn of(bytes: &[u8]) -> Option<Self> {
        let letters = bytes.strip_prefix(b" ").unwrap_or(bytes);
        let is_word = !letters.is_empty() && bytes.len() <= WORD_MAX && letters.iter().all(u8::is_ascii_alphabetic);
        let has_capitals = letters.iter().any(u8::is_ascii_uppercase);
        is_word.then_some(Self { has_capitals, has_blank: letters.len() < bytes.len() })
    }
}

/// True if a foreign word has a blank in front; `None` if the token is no foreign word: small letters, then a character that is not ASCII. Walks into such tokens
/// mostly end in a refusal.
fn foreign_word(bytes: &[u8]) -> Option<bool> {
    let text = bytes.strip_prefix(b" ").unwrap_or(bytes);
    let letters = text.iter().take_while(|byte| byte.is_ascii_lowercase()).count();
    let has_blank = text.len() < bytes.len();
    let is_foreign = letters > 0 && text.get(letters).is_some_and(|byte| FIRST_BYTES.contains(byte));
    (is_foreign && letters + usize::from(has_blank) < WORD_MAX).then_some(has_blank)
}

/// Tokens of one class.
struct Class {
    /// Tokens of one character, of at most two, and so on.
    up_to: Vec<SimpleVob>,
    trie: TokTrie,
}

impl Class {
    /// Collects the tokens of `all` for which `count` returns a number of characters.
    fn new(all: &TokTrie, longest: usize, count: impl Fn(&[u8]) -> Option<usize>) -> Self {
        let mut up_to = vec![all.alloc_token_set(); longest];
        let mut members = all.alloc_token_set();
        for token in 0..all.vocab_size() as u32 {
            if let Some(count) = count(all.token(token)) {
                members.allow_token(token);
                if let Some(set) = up_to.get_mut(count - 1) {
                    set.allow_token(token);
                }
            }
        }
        for longer in 1..longest {
            let (shorter, rest) = up_to.split_at_mut(longer);
            rest[0].or(&shorter[longer - 1]);
        }
        Self { up_to, trie: all.filter(&members) }
    }

    /// Adds the tokens of at most `room` characters.
    fn add_up_to(&self, room: usize, allowed: &mut SimpleVob) {
        if let Some(set) = room.min(self.up_to.len()).checked_sub(1).and_then(|longest| self.up_to.get(longest)) {
            allowed.or(set);
        }
    }
}

/// Class of characters that the grammar treats alike at the start of the next token, and the number of them that may follow.
enum Alike {
    /// All plain characters; fewer than [`PLAIN_MAX`].
    Plain(usize),
    /// Letters of words.
    Letters(Letters),
}

/// Letters that are alike.
struct Letters {
    /// Most characters that a word of each kind of [`Word::ALL`] may have; [`WORD_MAX`]: as many or more; `None`: the grammar does not treat its letters alike.
    rooms: [Option<usize>; Word::ALL.len()],
    /// True if only ASCII may follow the letters of a word: without a blank in front, then with one.
    only_ascii: [bool; 2],
}

/// Mask computation of the library, with faster ones where the grammar treats characters alike. All give the same masks.
pub(crate) struct Runs {
    library: Arc<SlicedBiasComputer>,
    /// Tokens of one plain character, of at most two, and so on.
    plain: Vec<SimpleVob>,
    /// Tokens that are not of plain characters alone.
    not_plain: TokTrie,
    /// Words, in the order of [`Word::ALL`].
    words: [Class; Word::ALL.len()],
    /// Foreign words without a blank in front, and with it.
    foreign: [TokTrie; 2],
    /// Tokens that are neither words nor foreign words.
    not_words: TokTrie,
}

impl Runs {
    /// Sorts the tokens of `library`'s trie.
    pub(crate) fn new(library: Arc<SlicedBiasComputer>) -> Self {
        let all = library.trie();
        let those = |is_member: &dyn Fn(&[u8]) -> bool| {
            let mut members = all.alloc_token_set();
            let tokens = 0..all.vocab_size() as u32;
            tokens.filter(|token| is_member(all.token(*token))).for_each(|token| members.allow_token(token));
            all.filter(&members)
        };
        let word = |word: Word| {
            Class::new(all, WORD_MAX, |bytes| Word::of(bytes).filter(|of| *of == word).map(|_| bytes.len()))
        };
        Self {
            plain: Class::new(all, PLAIN_MAX - 1, plain_characters).up_to,
            not_plain: those(&|bytes| plain_characters(bytes).is_none()),
            words: Word::ALL.map(word),
            foreign: [false, true].map(|has_blank| those(&|bytes| foreign_word(bytes) == Some(has_blank))),
            not_words: those(&|bytes| Word::of(bytes).is_none() && foreign_word(bytes).is_none()),
            library,
        }
    }

    fn in_word(&self, recognizer: &mut ParserRecognizer<'_>, letters: &Letters, start: &[u8]) -> SimpleVob {
        let mut allowed = self.trie().alloc_token_set();
        for (room, class) in letters.rooms.iter().zip(&self.words) {
            match room {
                Some(room) => class.add_up_to(*room, &mut allowed),
                None => class.trie.add_bias(recognizer, &mut allowed, start),
            }
        }
        let foreign = self.foreign.iter().zip(letters.only_ascii).filter(|(_, only_ascii)| !only_ascii);
        for trie in foreign.map(|(trie, _)| trie).chain([&self.not_words]) {
            trie.add_bias(recognizer, &mut allowed, start);
        }
        allowed
    }
}

/// Number of characters of a token that has only plain ones; `None` for every other token.
fn plain_characters(bytes: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(bytes).ok()?;
    (!text.is_empty() && text.chars().all(is_plain)).then(|| text.chars().count())
}

impl BiasComputer for Runs {
    fn compute_bias(&self, recognizer: &mut ParserRecognizer<'_>, start: &[u8]) -> SimpleVob {
        match alike(recognizer, start) {
            Some(Alike::Plain(room)) => {
                let mut allowed = self.trie().alloc_token_set();
                if let Some(plain) = room.checked_sub(1).and_then(|longest| self.plain.get(longest)) {
                    allowed.or(plain);
                }
                self.not_plain.add_bias(recognizer, &mut allowed, &[]);
                allowed
            }
            Some(Alike::Letters(letters)) => self.in_word(recognizer, &letters, start),
            None => self.library.compute_bias(recognizer, start),
        }
    }

    fn trie(&self) -> &TokTrie {
        self.library.trie()
    }
}

/// Characters that are alike here, behind `start` of the next token, if that shortens the walk.
fn alike(recognizer: &mut ParserRecognizer<'_>, start: &[u8]) -> Option<Alike> {
    let room = if start.is_empty() { Probe::new(recognizer).room() } else { None };
    match (room, start) {
        (Some(room), _) => Some(Alike::Plain(room)),
        (None, [] | [b' ']) => Probe::new(recognizer).letters(start).map(Alike::Letters),
        _ => None,
    }
}

/// Effect of a byte on the parser, with the state of the lexer behind the byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The grammar does not allow the byte.
    Refused,
    /// The byte goes on with a lexeme.
    Within(StateID),
    /// The byte ends a lexeme, its own or the one before it.
    Ended(StateID),
}

/// Probe of the bytes that a parser accepts, by the states of its lexer. States are compared only while no lexeme ends: the end of a lexeme also advances the parser.
struct Probe<'a, 'p> {
    recognizer: &'a mut ParserRecognizer<'p>,
    rows: (usize, usize),
    /// States in the middle of a character whose continuations have all been tried, with the bytes that those were.
    tried: Vec<(StateID, &'static [RangeInclusive<u8>])>,
}

impl<'a, 'p> Probe<'a, 'p> {
    fn new(recognizer: &'a mut ParserRecognizer<'p>) -> Self {
        recognizer.trie_started("alike");
        let rows = rows(recognizer);
        Self { recognizer, rows, tried: Vec::new() }
    }

    /// Number of plain characters that may follow, if that is the same for all of them and below [`PLAIN_MAX`].
    fn room(&mut self) -> Option<usize> {
        let mut states = Vec::with_capacity(PLAIN_MAX);
        while let Some(state) = self.push(b'a')? {
            states.push(state);
            if states.len() == PLAIN_MAX {
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

    /// Letters that are alike, where not every plain character may come. `start`: nothing, or the blank that has been pushed.
    fn letters(&mut self, start: &[u8]) -> Option<Letters> {
        if self.push(NOT_ASCII)?.is_some() {
            return None;
        }
        let none = ([None; 2], false);
        let (word, ascii) = if start.is_empty() { self.letters_behind(0) } else { none };
        let blank = !start.is_empty() || self.recognizer.try_push_byte(b' ');
        self.rows = rows(self.recognizer);
        let (blank_word, blank_ascii) = if blank { self.letters_behind(1) } else { none };
        let rooms = [word[0], blank_word[0], word[1], blank_word[1]];
        let only_ascii = [ascii, blank_ascii];
        rooms.iter().any(Option::is_some).then_some(Letters { rooms, only_ascii })
    }

    /// Most characters of a word of small letters and of a word of all letters, `before` of which have been pushed already; and true if only ASCII may follow small
    /// letters.
    fn letters_behind(&mut self, before: usize) -> ([Option<usize>; 2], bool) {
        let mut steps = Vec::with_capacity(WORD_MAX);
        while before + steps.len() < WORD_MAX && !matches!(steps.last(), Some(Step::Ended(_))) {
            match self.step(b'a') {
                Step::Refused => break,
                step => steps.push(step),
            }
        }
        self.recognizer.pop_bytes(steps.len());
        let room = before + steps.len();
        let all = self.are_alike(&steps, room, LETTERS);
        let small = all || self.are_alike(&steps, room, SMALL_LETTERS);
        let only_ascii = small && self.only_ascii_follows(&steps);
        ([small, all].map(|are_alike| are_alike.then_some(room)), only_ascii)
    }

    /// Returns true if the grammar accepts only ASCII behind every one of `steps`, the effects of the small letters.
    fn only_ascii_follows(&mut self, steps: &[Step]) -> bool {
        let first_bytes: Vec<u8> = FIRST_BYTES.collect();
        let (mut pushed, mut only_ascii) = (0, true);
        for step in steps {
            if !only_ascii {
                break;
            }
            if let Step::Ended(_) = step {
                only_ascii = SMALL_LETTERS.iter().all(|byte| self.ends_with(*byte, &first_bytes));
            } else {
                pushed += usize::from(self.step(b'a') != Step::Refused);
                only_ascii = self.refuses(&first_bytes);
            }
        }
        self.recognizer.pop_bytes(pushed);
        only_ascii
    }

    /// Returns true if every text of `letters` has the effects `steps`, and none of `letters` may follow that would make a word of more than `room` characters.
    fn are_alike(&mut self, steps: &[Step], room: usize, letters: &[u8]) -> bool {
        let mut pushed = 0;
        let mut are_alike = !steps.is_empty();
        for step in steps {
            are_alike = are_alike && letters.iter().all(|byte| self.behind(*byte) == *step);
            // Behind the end of a lexeme the parser is elsewhere for each letter, even if the lexer is not.
            if let (true, Step::Ended(_)) = (are_alike, step) {
                are_alike = room == WORD_MAX || letters.iter().all(|byte| self.ends_with(*byte, letters));
            } else if are_alike {
                pushed += usize::from(self.step(b'a') != Step::Refused);
            }
        }
        if let (true, Some(Step::Within(_))) = (are_alike, steps.last()) {
            are_alike = room == WORD_MAX || self.refuses(letters);
        }
        self.recognizer.pop_bytes(pushed);
        are_alike
    }

    /// Returns true if none of `bytes` may come behind `byte`.
    fn ends_with(&mut self, byte: u8, bytes: &[u8]) -> bool {
        let step = self.step(byte);
        let ends = self.refuses(bytes);
        self.recognizer.pop_bytes(usize::from(step != Step::Refused));
        ends
    }

    fn refuses(&mut self, bytes: &[u8]) -> bool {
        bytes.iter().all(|byte| self.behind(*byte) == Step::Refused)
    }

    /// Effect of one more byte, which is popped again.
    fn behind(&mut self, byte: u8) -> Step {
        let step = self.step(byte);
        self.recognizer.pop_bytes(usize::from(step != Step::Refused));
        step
    }

    /// Effect of one more byte, which stays pushed if the grammar accepts it.
    fn step(&mut self, byte: u8) -> Step {
        let may_come = self.recognizer.try_push_byte(byte);
        let before = self.rows;
        self.rows = rows(self.recognizer);
        match may_come {
            true if self.rows == before => Step::Within(self.recognizer.lexer_state()),
            true => Step::Ended(self.recognizer.lexer_state()),
            false => Step::Refused,
        }
    }

    /// Pushes one byte. Returns the lexer's state behind it: `Some(None)` if the grammar refuses the byte, `None` if the byte ends a lexeme.
    fn push(&mut self, byte: u8) -> Option<Option<StateID>> {
        match self.step(byte) {
            Step::Refused => Some(None),
            Step::Within(state) => Some(Some(state)),
            Step::Ended(_) => None,
        }
    }

    /// Returns `Some` if every plain character leads to the state `next`, or, where `next` is `None`, if the grammar refuses every plain character.
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

impl Drop for Probe<'_, '_> {
    fn drop(&mut self) {
        self.recognizer.trie_finished();
    }
}

/// Rows that the parser has made or found again: one more for each lexeme that ended.
fn rows(recognizer: &mut ParserRecognizer<'_>) -> (usize, usize) {
    let stats = recognizer.stats_mut();
    (stats.rows, stats.cached_rows)
}
