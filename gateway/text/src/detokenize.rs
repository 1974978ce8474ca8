//! Incremental conversion of tokens into text.
//!
//! Bytes are appended and whole characters come out; at most three bytes wait. Bytes that can never become a character
//! are replaced as `String::from_utf8_lossy` does, so the joined pieces are the lossy decoding of all bytes, however
//! they were cut.

use crate::model::TextModel;

/// Splits the bytes of tokens into whole UTF-8 characters; an incomplete one waits in `pending`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Utf8Stream {
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Appends to `out` every character that `bytes` completes.
    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut String) {
        if self.pending.is_empty() {
            let rest = take_characters(bytes, out);
            self.pending.extend_from_slice(rest);
        } else {
            self.pending.extend_from_slice(bytes);
            let all = std::mem::take(&mut self.pending);
            let rest = take_characters(&all, out);
            self.pending.extend_from_slice(rest);
        }
    }

    /// Ends the stream: a character cut short becomes U+FFFD.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }
}

/// Moves characters from the front of `bytes` to `out`; returns the incomplete one at the end (at most 3 bytes).
fn take_characters<'a>(mut bytes: &'a [u8], out: &mut String) -> &'a [u8] {
    loop {
        match std::str::from_utf8(bytes) {
            Ok(text) => {
                out.push_str(text);
                return &[];
            }
            Err(error) => {
                let (valid, rest) = bytes.split_at(error.valid_up_to());
                out.push_str(std::str::from_utf8(valid).expect("checked above"));
                let Some(bad) = error.error_len() else { return rest };
                out.push(char::REPLACEMENT_CHARACTER);
                bytes = &rest[bad..];
            }
        }
    }
}

/// Incremental decoding of one token sequence.
///
/// The joined pieces of [`Detokenizer::push`] and [`Detokenizer::finish`] equal [`TextModel::decode`] of the same ids,
/// at every length. Cost per token: its bytes.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    stream: Utf8Stream,
    keep_special: bool,
    /// True if blanks of a SentencePiece prefix may still have to be dropped.
    at_start: bool,
}

impl Detokenizer {
    /// Creates a detokenizer. With `at_start` the ids begin a text of their own; without, they continue a prompt, from
    /// whose end the first blank separates them.
    pub fn new(keep_special: bool, at_start: bool) -> Self {
        Self { stream: Utf8Stream::default(), keep_special, at_start }
    }

    /// Appends the characters that the bytes of token `id` complete.
    pub fn push(&mut self, model: &TextModel, id: u32, out: &mut String) {
        let vocabulary = model.vocabulary();
        if vocabulary.is_special(id) && !self.keep_special {
            return;
        }
        let bytes = if self.at_start { vocabulary.first_token(id) } else { vocabulary.token(id) };
        self.at_start &= vocabulary.token(id).is_empty();
        self.stream.push(bytes, out);
    }

    /// Appends U+FFFD if a character was left incomplete.
    pub fn finish(&mut self, out: &mut String) {
        self.stream.finish(out);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn in_pieces(bytes: &[u8], cuts: &[usize]) -> String {
        let (mut stream, mut out, mut from) = (Utf8Stream::default(), String::new(), 0);
        for &cut in cuts {
            stream.push(&bytes[from..cut], &mut out);
            from = cut;
        }
        stream.push(&bytes[from..], &mut out);
        stream.finish(&mut out);
        out
    }

    #[test]
    fn no_character_is_halved_wherever_bytes_are_cut() {
        let text = "aé€😀👩‍👩‍👧‍👦漢字\u{0301}\u{FFFD}z";
        for cut in 0..=text.len() {
            let mut out = String::new();
            Utf8Stream::default().push(&text.as_bytes()[..cut], &mut out);
            assert!(text.starts_with(&out), "cut at {cut}: {out:?}");
            assert_eq!(in_pieces(text.as_bytes(), &[cut]), text);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces_are_the_lossy_text(bytes in prop::collection::vec(any::<u8>(), 0..60), mut cuts in prop::collection::vec(0usize..60, 0..8)) {
            cuts.iter_mut().for_each(|cut| *cut = (*cut).min(bytes.len()));
            cuts.sort_unstable();
            prop_assert_eq!(in_pieces(&bytes, &cuts), String::from_utf8_lossy(&bytes));
        }
    }
}
