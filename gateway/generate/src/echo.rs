//! Tokens of a prompt beside its text, in completions that repeat the prompt.
//!
//! The text is the client's own, and its tokens may say more: a first token that the tokenizer adds (`<s>`), and the blank that
//! SentencePiece puts in front of a text. Offsets into the answer's text count neither.

use penstock_types::{TokenLogprob, TokenPlace};

/// Places the tokens of a prompt in its text. A control token that is no part of the text is [`TokenPlace::Control`]; a blank that the text does not have
/// is taken off its token.
///
/// Tokens are compared from the last to the first, since what is added mostly stands in front. Where a tokenizer changes the text in other
/// ways (small letters), the rest of the tokens stay as they are, but for the first of them.
pub(super) fn place(tokens: &mut [TokenLogprob], text: &str, is_special: impl Fn(u32) -> bool) {
    let mut left = text.as_bytes();
    let mut count = tokens.len();
    while count > 0 {
        let token = &mut tokens[count - 1];
        if let Some(before) = left.strip_suffix(token.bytes.as_slice()) {
            left = before;
        } else if is_special(token.token) {
            token.place = TokenPlace::Control;
        } else if let Some(before) = without_blank(token).and_then(|rest| left.strip_suffix(rest)) {
            left = before;
            take_blank(token);
        } else {
            break;
        }
        count -= 1;
    }
    for token in &mut tokens[..count] {
        if !left.starts_with(&token.bytes) && is_special(token.token) {
            token.place = TokenPlace::Control;
            continue;
        }
        if !left.starts_with(b" ") && without_blank(token).is_some() {
            take_blank(token);
        }
        break;
    }
}

/// Bytes of a token behind the blank that it begins with.
fn without_blank(token: &TokenLogprob) -> Option<&[u8]> {
    token.bytes.strip_prefix(b" ")
}

/// Takes the blank in front off a token, also where it is named among the best.
fn take_blank(token: &mut TokenLogprob) {
    let own = token.top.iter_mut().filter(|(id, ..)| *id == token.token).map(|(_, bytes, _)| bytes);
    for bytes in own.chain([&mut token.bytes]) {
        if bytes.starts_with(b" ") {
            bytes.remove(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Places tokens, those in angle brackets special. Wanted: the text and offset of each, no offset for control tokens.
    #[track_caller]
    fn check(text: &str, tokens: &[&str], want: &[(&str, Option<usize>)]) {
        let is_special = |id: u32| tokens[id as usize].starts_with('<') && tokens[id as usize].ends_with('>');
        let entry = |(token, said): (u32, &&str)| TokenLogprob {
            token,
            bytes: said.as_bytes().to_vec(),
            logprob: Some(-1.0),
            top: vec![(token, said.as_bytes().to_vec(), -1.0), (99, b" other".to_vec(), -2.0)],
            place: TokenPlace::Text,
        };
        let mut placed: Vec<TokenLogprob> = (0..).zip(tokens).map(entry).collect();
        place(&mut placed, text, is_special);
        let mut at = 0;
        let got: Vec<(&str, Option<usize>)> = placed
            .iter()
            .map(|token| {
                let said = std::str::from_utf8(&token.bytes).expect("whole characters");
                let offset = (token.place == TokenPlace::Text).then_some(at);
                at += offset.map_or(0, |_| said.len());
                (said, offset)
            })
            .collect();
        assert_eq!(got, want, "{text:?}");
        for token in &placed {
            assert_eq!(token.top[0].1, token.bytes, "its name among the best is its own");
            assert_eq!(token.top[1].1, b" other");
        }
    }

    #[test]
    fn what_the_tokenizer_adds_has_no_place() {
        check("Hello", &["<s>", "Hello"], &[("<s>", None), ("Hello", Some(0))]);
        check("Hello you", &["<s>", " Hello", " you"], &[("<s>", None), ("Hello", Some(0)), (" you", Some(5))]);
        check("Hello", &[" Hello"], &[("Hello", Some(0))]);
        check("", &["<s>"], &[("<s>", None)]);
        check("a", &["<s>", "a", "</s>"], &[("<s>", None), ("a", Some(0)), ("</s>", None)]);
        // The client's own control tokens, and blanks behind them.
        check("<s>a", &["<s>", "<s>", " a"], &[("<s>", None), ("<s>", Some(0)), ("a", Some(3))]);
        check("<s> a", &["<s>", " a"], &[("<s>", Some(0)), (" a", Some(3))]);
        check(" a", &["<s>", " ", " a"], &[("<s>", None), ("", Some(0)), (" a", Some(0))]);
    }

    #[test]
    fn a_text_that_the_tokenizer_changes_keeps_its_tokens() {
        let want = [("<s>", None), ("hello", Some(0)), (" you", Some(5))];
        check("HELLO you", &["<s>", " hello", " you"], &want);
        check("HELLO YOU", &["<s>", " hello", " you"], &want);
        check(" HELLO", &["<s>", " hello"], &[("<s>", None), (" hello", Some(0))]);
        check("HELLO", &["hello"], &[("hello", Some(0))]);
    }
}
