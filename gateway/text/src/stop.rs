//! Stop strings: the search for the end of a choice's text.
//!
//! The string that is complete first ends the text, whatever the token borders are; of several that end at the same
//! character the longest wins. Text that may be the beginning of a stop string is held back.

use crate::literal::Prefix;

/// Search for all stop strings of one choice in its text.
#[derive(Clone, Debug)]
pub(crate) struct StopMatcher {
    patterns: Vec<(Prefix, String)>,
    held: String,
}

impl StopMatcher {
    /// Creates the search; empty strings never match.
    pub(crate) fn new(stops: &[String]) -> Self {
        let patterns = stops.iter().filter(|stop| !stop.is_empty());
        Self { patterns: patterns.map(|stop| (Prefix::new(stop), stop.clone())).collect(), held: String::new() }
    }

    /// Takes `text` and appends to `out` the part that cannot belong to a stop string. Returns the stop string if one
    /// is complete: then all text before it has come out, and the string too if `include`.
    pub(crate) fn push(&mut self, text: &str, include: bool, out: &mut String) -> Option<String> {
        if self.patterns.is_empty() {
            out.push_str(text);
            return None;
        }
        for c in text.chars() {
            self.held.push(c);
            let complete = self.patterns.iter_mut().filter_map(|(prefix, stop)| prefix.push(c).then_some(&*stop));
            // `reduce` visits every pattern: each of them must take the character.
            let longest = complete.reduce(|best, stop| if stop.len() > best.len() { stop } else { best });
            if let Some(stop) = longest {
                let keep = if include { self.held.len() } else { self.held.len() - stop.len() };
                out.push_str(&self.held[..keep]);
                self.held.clear();
                return Some(stop.clone());
            }
            let maybe = self.patterns.iter().map(|(prefix, _)| prefix.held_bytes()).max().unwrap_or(0);
            out.extend(self.held.drain(..self.held.len() - maybe));
        }
        None
    }

    /// Ends the text: the held text is plain text after all.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&std::mem::take(&mut self.held));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (String, Option<String>) {
        let stops: Vec<String> = stops.iter().map(|&stop| stop.into()).collect();
        let (mut matcher, mut out) = (StopMatcher::new(&stops), String::new());
        for piece in pieces {
            if let Some(stop) = matcher.push(piece, include, &mut out) {
                return (out, Some(stop));
            }
        }
        matcher.finish(&mut out);
        (out, None)
    }

    #[track_caller]
    fn check(stops: &[&str], text: &str, shown: &str, stop: Option<&str>) {
        for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            let (out, found) = run(stops, false, &[&text[..cut], &text[cut..]]);
            assert_eq!((out.as_str(), found.as_deref()), (shown, stop), "cut at {cut}");
        }
    }

    #[test]
    fn text_ends_before_the_first_complete_stop() {
        check(&["END"], "one ENEND two", "one EN", Some("END"));
        check(&["END"], "one EN", "one EN", None);
        check(&["ab", "xabc"], "--xabc", "--x", Some("ab"));
        check(&["b", "ab"], "xaab", "xa", Some("ab"));
        check(&["\n\n"], "a\nb\n\nc", "a\nb", Some("\n\n"));
        check(&["é😀"], "aé é😀", "aé ", Some("é😀"));
        check(&["aaab"], "aaaaab", "aa", Some("aaab"));
        check(&[""], "abc", "abc", None);
    }

    #[test]
    fn the_stop_stays_when_asked_for() {
        assert_eq!(run(&["END"], true, &["a E", "ND b"]), ("a END".into(), Some("END".into())));
    }

    #[test]
    fn nothing_is_held_back_longer_than_needed() {
        let (mut matcher, mut out) = (StopMatcher::new(&["END".into()]), String::new());
        matcher.push("one EN", false, &mut out);
        assert_eq!(out, "one ");
        matcher.push("T", false, &mut out);
        assert_eq!(out, "one ENT");
    }

    proptest! {
        #[test]
        fn same_as_searching_the_whole_text(text in "[abé]{0,24}", stops in prop::collection::vec("[abé]{1,4}", 1..4), cuts in prop::collection::vec(0usize..24, 0..6)) {
            let first = (0..=text.len()).filter(|&end| text.is_char_boundary(end)).find_map(|end| {
                stops.iter().filter(|stop| text[..end].ends_with(stop.as_str())).max_by_key(|stop| stop.len()).map(|stop| (end - stop.len(), stop.clone()))
            });
            let expected = match first {
                Some((at, stop)) => (text[..at].to_owned(), Some(stop)),
                None => (text.clone(), None),
            };
            let mut bounds: Vec<usize> = cuts.into_iter().filter(|&cut| cut <= text.len() && text.is_char_boundary(cut)).chain([0, text.len()]).collect();
            bounds.sort_unstable();
            let pieces: Vec<&str> = bounds.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&stops, false, &pieces), expected);
        }
    }
}
