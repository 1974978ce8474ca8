//! Lark text from outside: the schemas in it follow the same rules as a schema alone.

use crate::error::GrammarError;
use crate::kind::Kind;
use crate::schema::{self, Unenforced};
use serde_json::{Deserializer, Value};

/// Directive before a schema inside of Lark text.
const JSON: &str = "%json";
/// Directive before the library's options.
const OPTIONS: &str = "%llguidance";
/// Option that would let a regex match bytes which are no text, and so the marks of special tokens.
const RAW_BYTES: &str = "allow_invalid_utf8";

/// Replaces every `%json {…}` by its prepared schema; also returns the keywords that are not enforced.
pub(crate) fn prepare(text: &str) -> Result<(String, Vec<Unenforced>), GrammarError> {
    let (mut out, mut unenforced, mut rest) = (String::with_capacity(text.len()), Vec::new(), text);
    while let Some((at, directive)) = next(rest) {
        let (before, after) = rest.split_at(at + directive.len());
        out.push_str(before);
        rest = after;
        let mut values = Deserializer::from_str(after).into_iter::<Value>();
        // Whatever else stands here, the library decides about it.
        let Some(Ok(value)) = values.next() else { continue };
        if directive == OPTIONS {
            if value.get(RAW_BYTES).is_some() {
                let feature = format!("`{RAW_BYTES}`");
                return Err(GrammarError::Unsupported { kind: Kind::Lark, feature, why: "output is text" });
            }
            continue;
        }
        let (schema, more) = schema::prepare_value(Kind::Lark, value)?;
        out.push(' ');
        out.push_str(&schema.to_string());
        out.push(' ');
        unenforced.extend(more);
        rest = &after[values.byte_offset()..];
    }
    out.push_str(rest);
    Ok((out, unenforced))
}

/// Place and name of the next directive that is followed by JSON, outside of strings, expressions and comments.
fn next(text: &str) -> Option<(usize, &'static str)> {
    let found = |at: &usize| [JSON, OPTIONS].into_iter().find(|directive| text[*at..].starts_with(directive));
    places(text).find_map(|at| Some((at, found(&at)?)))
}

/// Beginnings of the tokens of a text. A token is what the library's lexer takes for one, as far as other tokens could
/// be read in it: strings, expressions, comments, special tokens, words. Of an open one only the first character is a
/// token; the library refuses the text.
fn places(text: &str) -> impl Iterator<Item = usize> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let place = at;
        at += token_bytes(&text[at..])?;
        Some(place)
    })
}

/// Length of the first token; `None` at the end of the text.
fn token_bytes(text: &str) -> Option<usize> {
    let first = text.chars().next()?;
    let until = |end: char| {
        let mut escaped = false;
        let is_end = |c: char| {
            let ends = c == end && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        };
        text[1..].find(is_end).map(|at| at + 2)
    };
    let length = match first {
        '#' => text.find('\n'),
        '/' if text[1..].starts_with('/') => text.find('\n'),
        '"' | '/' => until(first),
        '<' => {
            let end = text[1..].find(|c: char| c == '<' || c == '>' || c.is_whitespace());
            end.filter(|end| *end > 0 && text[1 + end..].starts_with('>')).map(|end| end + 2)
        }
        c if is_word(c) => text.find(|c| !is_word(c)),
        c => return Some(c.len_utf8()),
    };
    Some(match length {
        Some(length) => length,
        None if is_word(first) || first == '#' || text.starts_with("//") => text.len(),
        None => 1,
    })
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '-'
}

/// Directives whose effect is not that of one rule.
const GLOBAL: [&str; 5] = ["%ignore", "%llguidance", "%declare", "%override", "%lark"];

/// Grammar in Lark as rules that can stand among others, and the name of the first one. The names `start` and `BLANKS`,
/// and those of `r` or `T` with a number, become others. `None` if the text has no rule `start`, or directives whose
/// effect is not that of one rule.
pub fn to_rules(text: &str) -> Option<(String, String)> {
    // A suffix that no name ends in.
    let (small, mut suffix) = (text.to_ascii_lowercase(), "_c".to_owned());
    while small.contains(&suffix) {
        suffix.push('c');
    }
    let (mut out, mut has_start, mut copied) = (String::with_capacity(text.len() + 64), false, 0);
    // JSON behind a directive is no Lark.
    let mut json_end = 0;
    for at in places(text) {
        let rest = &text[at..];
        if at < json_end {
            continue;
        }
        if GLOBAL.iter().any(|directive| rest.starts_with(directive)) {
            return None;
        }
        if let Some(after) = rest.strip_prefix(JSON).or_else(|| rest.strip_prefix("%regex")) {
            let mut values = Deserializer::from_str(after).into_iter::<Value>();
            values.next()?.ok()?;
            json_end = text.len() - after.len() + values.byte_offset();
        }
        let word = &rest[..token_bytes(rest)?];
        let numbered = word.strip_prefix(['r', 'T']).is_some_and(|number| number.bytes().all(|c| c.is_ascii_digit()));
        if word == "start" || word == "BLANKS" || (numbered && word.len() > 1) {
            has_start |= word == "start";
            let is_small = word.starts_with(|c: char| c.is_ascii_lowercase());
            out.push_str(&text[copied..at + word.len()]);
            out.push_str(&if is_small { suffix.clone() } else { suffix.to_ascii_uppercase() });
            copied = at + word.len();
        }
    }
    out.push_str(&text[copied..]);
    out.push('\n');
    has_start.then(|| (format!("start{suffix}"), out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_inside_are_prepared() {
        let (text, unenforced) =
            prepare("start: \"a\" x\nx: %json {\"type\":\"array\",\"uniqueItems\":true} | \"b\"").expect("good");
        assert!(text.starts_with("start: \"a\" x\nx: %json {") && text.ends_with(" | \"b\""), "{text}");
        assert!(text.contains("\"whitespace_flexible\":false"), "{text}");
        assert_eq!(unenforced.len(), 1);
    }

    #[test]
    fn raw_bytes_are_refused() {
        for name in ["allow_invalid_utf8", "allow_invalid_utf\\u0038"] {
            let text = format!("%llguidance {{\"{name}\": true}}\nstart: /(?s:.*)/");
            assert!(matches!(prepare(&text), Err(GrammarError::Unsupported { .. })), "{text}");
        }
        assert!(prepare("%llguidance {\"no_forcing\": true}\nstart: \"a\"").is_ok());
        let remote = "start: %json {\"$ref\": \"https://example.com/a.json\"}";
        assert!(matches!(prepare(remote), Err(GrammarError::Unsupported { .. })));
    }

    #[test]
    fn directives_in_texts_and_comments_are_no_directives() {
        for text in [
            r#"start: "%json {}" | "\\" "x\" %json {}""#,
            "start: /%json {}\\/%json {}/ \"a\"",
            "start: \"a\" // %json {} \"\n",
            "start: \"a\" # %json {}",
            "start: <%json{}> | <a\"> \"%json {}\"",
        ] {
            assert_eq!(prepare(text).map(|(text, _)| text).as_deref(), Ok(text));
        }
        // What stands outside of them is prepared, whatever tokens hold quotes.
        for text in [
            "start: <\"> %json {\"not\": {}} <\">",
            "start: /\"/ %json {\"not\": {}} /\"/",
            "# \"\nstart: %json {\"not\": {}} # \"",
            "// \"\nstart: %json {\"not\": {}} // \"",
            "start: \"\\\\\" %json {\"not\": {}} \"\"",
            "start: / %json {\"not\": {}}",
            "start: < \"<\" %json {\"not\": {}} \">\"",
        ] {
            let (_, unenforced) = prepare(text).expect("taken");
            assert_eq!(unenforced.len(), 1, "{text}");
        }
    }

    #[test]
    fn a_grammar_can_stand_among_other_rules() {
        let text = "?start: \"start\" r1 /start/ restart | T2 %json {\"const\": \"start\"} # start\nr1: BLANKS r\nr: \"\"\nT2: /r1/\nBLANKS: / /";
        let want = "?start_c: \"start\" r1_c /start/ restart | T2_C %json {\"const\": \"start\"} # start\nr1_c: BLANKS_C r\nr: \"\"\nT2_C: /r1/\nBLANKS_C: / /\n";
        assert_eq!(to_rules(text), Some(("start_c".into(), want.into())));
        let taken = to_rules("start: start_c\nstart_c: \"a\"").expect("rules");
        assert_eq!(taken, ("start_cc".into(), "start_cc: start_c\nstart_c: \"a\"\n".into()));
        for text in [
            "root: \"a\"",
            "start: \"a\"\n%ignore / /",
            "%llguidance {}\nstart: \"a\"",
            "start: %lark { start: \"a\" }",
        ] {
            assert_eq!(to_rules(text), None, "{text}");
        }
    }
}
