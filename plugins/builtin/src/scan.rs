//! Search for words and patterns in a text that comes in pieces, with a result that does not depend on the pieces.
//!
//! A possible start of a match is decided when `window` bytes behind it are known, or the text is complete; then only
//! those bytes are looked at. So a match of up to `window` bytes is found however the text is cut, a longer one never,
//! and the last `window` bytes of a text that still comes are held back.

use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use penstock_plugins::Settings;
use regex::{Regex, RegexBuilder};

use crate::lanes::Rewriter;

/// Largest compiled pattern, and largest cache of one, in bytes.
const PATTERN_BYTES_MAX: usize = 4 << 20;
/// Most words of one rule; a rule with more is a fault of the settings.
const WORDS_MAX: usize = 100_000;

/// Finder of the matches of one rule: a list of words, or a pattern.
#[derive(Clone, Debug)]
pub(crate) enum Finder {
    /// List of words; `true`: they match only as whole words.
    Words(Box<AhoCorasick>, bool),
    /// Pattern, and the function that gives the length of a match that counts; `None`: the match does not count.
    Pattern(Regex, fn(&str) -> Option<usize>),
}

impl Finder {
    /// Finder of any of the words, in upper or lower case.
    pub(crate) fn words(words: &[String], whole: bool) -> Result<Self, String> {
        if words.len() > WORDS_MAX {
            return Err(format!("more than {WORDS_MAX} words"));
        }
        // The automaton folds ASCII only; of other letters it knows the spellings that people use.
        let spelled = |word: &String| [word.clone(), word.to_lowercase(), word.to_uppercase()];
        let mut all: Vec<_> = words.iter().flat_map(spelled).collect();
        all.sort_unstable();
        all.dedup();
        let built =
            AhoCorasick::builder().ascii_case_insensitive(true).match_kind(MatchKind::LeftmostLongest).build(all);
        Ok(Finder::Words(Box::new(built.map_err(|error| error.to_string())?), whole))
    }

    /// Finder of that regular expression (crate `regex`: linear in time, no look-around).
    pub(crate) fn pattern(text: &str) -> Result<Self, String> {
        let built = RegexBuilder::new(text).size_limit(PATTERN_BYTES_MAX).dfa_size_limit(PATTERN_BYTES_MAX).build();
        let pattern = built.map_err(|error| format!("is no pattern: {}", last_line(&error.to_string())))?;
        if pattern.is_match("") {
            return Err("matches nothing at all, so it would match everywhere".into());
        }
        Ok(Finder::Pattern(pattern, |found| Some(found.len())))
    }

    /// First match at or behind `from`, whatever its length and whatever [`Finder::counts`] makes of it.
    fn find(&self, text: &str, from: usize) -> Option<(usize, usize)> {
        match self {
            Finder::Pattern(pattern, _) => pattern.find_at(text, from).map(|found| (found.start(), found.end())),
            Finder::Words(words, _) => {
                let found = words.find(aho_corasick::Input::new(text).range(from..))?;
                Some((found.start(), found.end()))
            }
        }
    }

    /// First place from `from` on where a match of at most `window` bytes can begin. No more than about twice the window is
    /// searched behind `from` and behind each place that is ruled out, so a pattern whose matches are longer does not read
    /// the rest of the text again for each of its characters.
    fn start(&self, text: &str, mut from: usize, window: usize) -> Option<usize> {
        loop {
            let end = from.saturating_add(window.saturating_mul(2)).saturating_add(8).min(text.len());
            let shown = &text[..text.floor_char_boundary(end)];
            let found = self.find(shown, from).map(|(start, _)| start);
            if shown.len() == text.len() {
                return found;
            }
            // Of a later start not all is shown that may matter to it.
            let sure = shown.len() - (window + 1);
            match found {
                Some(start) if start <= sure => return Some(start),
                _ => from = next_char(text, text.floor_char_boundary(sure)),
            }
        }
    }

    /// End of the part of a match that counts; `None`: the match does not count.
    fn counts(&self, text: &str, start: usize, end: usize) -> Option<usize> {
        match self {
            Finder::Pattern(_, check) => check(&text[start..end]).map(|length| start + length),
            Finder::Words(_, whole) => (!whole || is_word(text, start, end)).then_some(end),
        }
    }
}

fn last_line(text: &str) -> &str {
    text.lines().last().unwrap_or_default().trim_start_matches("error: ")
}

fn next_char(text: &str, at: usize) -> usize {
    text[at..].chars().next().map_or(text.len(), |char| at + char.len_utf8())
}

/// Returns true if no letter or digit stands on either side.
fn is_word(text: &str, start: usize, end: usize) -> bool {
    let inner = |char: char| char.is_alphanumeric() || char == '_';
    !text[..start].chars().next_back().is_some_and(inner) && !text[end..].chars().next().is_some_and(inner)
}

/// Action of a rule on a match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// The match is replaced by the rule's mask.
    Mask,
    /// The answer ends in front of the match.
    Block,
    /// The match changes nothing and is noted for the log.
    Note,
}

/// One rule: what it finds, and its action on a match.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub(crate) name: String,
    pub(crate) finder: Finder,
    pub(crate) action: Action,
    /// Text in place of a masked match.
    pub(crate) mask: String,
}

/// Finder of a rule, from `words = [...]` or `pattern = "..."`.
pub(crate) fn finder(settings: &Settings<'_>) -> Option<Finder> {
    let (words, pattern) = (settings.texts("words"), settings.text("pattern"));
    let whole = settings.flag("whole_words", true);
    let made = match (words.is_empty(), pattern) {
        (false, None) => Finder::words(&words, whole).map_err(|why| settings.fault("words", why)),
        (true, Some(pattern)) => Finder::pattern(&pattern).map_err(|why| settings.fault("pattern", why)),
        _ => {
            settings.fault("", "needs either words or pattern");
            Err(())
        }
    };
    made.ok()
}

/// Rules of one text, and their window.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) rules: Vec<Rule>,
    /// Longest match that is found, in bytes.
    pub(crate) window: usize,
}

/// Match of a rule, as a range of bytes in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Index of the rule that matches.
    pub(crate) rule: usize,
}

/// Text with what `put` writes in place of each of the matches, which are in order. One pass: replacing in place would move the
/// rest of the text once for each match.
pub(crate) fn replaced(text: &str, matches: &[Found], mut put: impl FnMut(&Found, &mut String)) -> String {
    let (mut out, mut from) = (String::with_capacity(text.len()), 0);
    for found in matches {
        out.push_str(&text[from..found.start]);
        put(found, &mut out);
        from = found.end;
    }
    out.push_str(&text[from..]);
    out
}

/// Result of a step over a text that still comes.
enum Next {
    Match(Found),
    /// No match begins before that place; from there on it is undecided.
    Open(usize),
}

impl Rules {
    /// All matches in a complete text, in order, without overlaps; of those that begin at one place, the first rule's.
    pub(crate) fn all(&self, text: &str) -> Vec<Found> {
        let (mut out, mut from, mut starts) = (Vec::new(), 0, Starts::default());
        while let Next::Match(found) = self.next(text, from, true, &mut starts) {
            out.push(found);
            from = found.end;
        }
        out
    }

    fn next(&self, text: &str, mut from: usize, complete: bool, starts: &mut Starts) -> Next {
        let decided =
            if complete { text.len() } else { text.floor_char_boundary(text.len().saturating_sub(self.window + 1)) };
        loop {
            let Some(start) = starts.next(self, text, from).filter(|start| *start < decided) else {
                return Next::Open(decided.max(from));
            };
            // Only what every cut of the text would show is looked at.
            let shown = text.floor_char_boundary(start + self.window + 1);
            let whole = complete && shown == text.len();
            if let Some(found) = self.at(&text[..shown], start, whole, starts) {
                return Next::Match(found);
            }
            from = next_char(text, start);
        }
    }

    /// First rule with a match at exactly that place, unless the match ends where the text was only cut.
    fn at(&self, text: &str, start: usize, whole: bool, starts: &Starts) -> Option<Found> {
        let rules = self.rules.iter().enumerate().filter(|(rule, _)| starts.0[*rule] == Some(start));
        rules.into_iter().find_map(|(rule, have)| {
            let (begins, end) = have.finder.find(text, start)?;
            let inside = whole || end < text.len();
            let fits = begins == start && end > start && end - start <= self.window && inside;
            let end = fits.then(|| have.finder.counts(text, start, end)).flatten()?;
            Some(Found { start, end, rule })
        })
    }
}

/// Next possible match of each rule in one text: each rule searches the text once, however often the others match.
#[derive(Default)]
struct Starts(Vec<Option<usize>>);

impl Starts {
    fn next(&mut self, rules: &Rules, text: &str, from: usize) -> Option<usize> {
        let find = |rule: &Rule| rule.finder.start(text, from, rules.window);
        if self.0.is_empty() {
            self.0 = rules.rules.iter().map(find).collect();
        }
        for (start, rule) in self.0.iter_mut().zip(&rules.rules) {
            if start.is_some_and(|start| start < from) {
                *start = find(rule);
            }
        }
        self.0.iter().flatten().min().copied()
    }
}

/// Rewriter that applies rules to one text of an answer and notes the rules that matched.
pub(crate) struct Scanner {
    rules: Arc<Rules>,
    /// End of the text that has gone out, then the text that is held back.
    text: String,
    /// Offset of the text that is held back.
    at: usize,
    /// Indices of the rules that have matched so far.
    pub(crate) hits: Arc<std::sync::Mutex<Vec<usize>>>,
}

/// Bytes of the sent text that are kept, for patterns that look behind (`\b`, `^`): at least one character.
const BEHIND: usize = 8;

impl Scanner {
    pub(crate) fn new(rules: Arc<Rules>, hits: Arc<std::sync::Mutex<Vec<usize>>>) -> Self {
        Self { rules, text: String::new(), at: 0, hits }
    }

    fn step(&mut self, complete: bool, out: &mut String) -> bool {
        let mut starts = Starts::default();
        loop {
            match self.rules.next(&self.text, self.at, complete, &mut starts) {
                Next::Open(until) => {
                    out.push_str(&self.text[self.at..until]);
                    self.at = until;
                    let behind = self.text.floor_char_boundary(self.at.saturating_sub(BEHIND));
                    // In larger steps, so that a stream does not move its text with every piece.
                    if behind > 4096 || complete {
                        self.text.drain(..behind);
                        self.at -= behind;
                    }
                    return true;
                }
                Next::Match(found) => {
                    let rule = &self.rules.rules[found.rule];
                    self.hits.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(found.rule);
                    out.push_str(&self.text[self.at..found.start]);
                    match rule.action {
                        Action::Block => {
                            self.at = self.text.len();
                            return false;
                        }
                        Action::Mask => out.push_str(&rule.mask),
                        Action::Note => out.push_str(&self.text[found.start..found.end]),
                    }
                    self.at = found.end;
                }
            }
        }
    }
}

impl Rewriter for Scanner {
    fn push(&mut self, piece: &str, out: &mut String) -> bool {
        self.text.push_str(piece);
        self.step(false, out)
    }

    fn end(&mut self, out: &mut String) -> bool {
        self.step(true, out)
    }

    fn held(&mut self) -> String {
        self.text.split_off(std::mem::replace(&mut self.at, 0))
    }

    fn held_bytes(&self) -> usize {
        self.text.len() - self.at
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rules(list: &[(&str, Action)], window: usize) -> Arc<Rules> {
        let rule = |(pattern, action): &(&str, Action)| Rule {
            name: (*pattern).into(),
            finder: Finder::pattern(pattern).expect("a pattern"),
            action: *action,
            mask: "*".into(),
        };
        Arc::new(Rules { rules: list.iter().map(rule).collect(), window })
    }

    fn scanned(rules: &Arc<Rules>, pieces: &[&str]) -> (String, bool, Vec<usize>) {
        let hits = Arc::default();
        let mut scanner = Scanner::new(rules.clone(), Arc::clone(&hits));
        let mut out = String::new();
        let goes_on = pieces.iter().all(|piece| scanner.push(piece, &mut out)) && scanner.end(&mut out);
        let hits = hits.lock().expect("a test").clone();
        (out, goes_on, hits)
    }

    #[test]
    fn a_match_is_masked_wherever_the_cut() {
        let rules = rules(&[(r"\bsecret\b", Action::Mask)], 16);
        for cut in 0.."a secret, secretly".len() {
            let (left, right) = "a secret, secretly".split_at(cut);
            assert_eq!(scanned(&rules, &[left, right]), ("a *, secretly".into(), true, vec![0]), "{cut}");
        }
    }

    #[test]
    fn text_goes_out_as_soon_as_it_cannot_matter() {
        let rules = rules(&[("bomb", Action::Block)], 4);
        let mut scanner = Scanner::new(rules, Arc::default());
        let mut out = String::new();
        assert!(scanner.push("0123456789", &mut out));
        assert_eq!(out, "01234", "all but the window and the character behind it");
        assert!(scanner.push("bo", &mut out) && !scanner.push("mbastic", &mut out));
        assert_eq!(out, "0123456789");
    }

    #[test]
    fn words_are_found_in_any_case_and_whole() {
        let words = ["Größe".to_owned(), "foo bar".to_owned()];
        let finder = Finder::words(&words, true).expect("words");
        let rule = Rule { name: "w".into(), finder, action: Action::Mask, mask: "_".into() };
        let rules = Arc::new(Rules { rules: vec![rule], window: 16 });
        assert_eq!(scanned(&rules, &["die GRÖSSE, größen FOO bar"]).0, "die _, größen _");
        assert_eq!(scanned(&rules, &["die größe, Größe"]).0, "die _, _");
    }

    #[test]
    fn a_pattern_that_is_too_long_to_match_does_not_read_the_text_again_and_again() {
        // Each of the characters begins a match that ends with the text: read to its end, they would be 10^12 bytes.
        let rules = rules(&[("a[^b]*b", Action::Mask)], 8);
        let text = "a".repeat(1_000_000) + "b";
        assert_eq!(scanned(&rules, &[&text]).0, "a".repeat(1_000_001 - 8) + "*");
    }

    #[test]
    fn patterns_that_match_nothing_are_refused() {
        assert!(Finder::pattern("a*").is_err() && Finder::pattern("(").is_err());
    }

    proptest! {
        /// The pieces make no difference, neither to the text nor to the matches.
        #[test]
        fn any_cut_gives_the_same_text(
            text in "[ab é1\n]{0,40}",
            cuts in prop::collection::vec(0usize..200, 0..12),
            window in 1usize..12,
            which in 0usize..6,
        ) {
            let patterns = ["ab+|a", r"\bb+\b", "a.*b", "(?m)^a|é$", "é1|1", r"[ab]{3}"];
            let list = [(patterns[which], Action::Mask), ("b1", Action::Note), ("11a", Action::Block)];
            let rules = rules(&list, window);
            let whole = scanned(&rules, &[&text]);
            let mut places: Vec<_> = cuts.into_iter().map(|cut| text.floor_char_boundary(cut)).collect();
            places.sort_unstable();
            let (mut pieces, mut from) = (Vec::new(), 0);
            for place in places {
                pieces.push(&text[from..place]);
                from = place;
            }
            pieces.push(&text[from..]);
            prop_assert_eq!(scanned(&rules, &pieces), whole);
            let each: Vec<String> = text.chars().map(String::from).collect();
            let each: Vec<&str> = each.iter().map(String::as_str).collect();
            prop_assert_eq!(scanned(&rules, &each), scanned(&rules, &[&text]));
        }
    }
}
