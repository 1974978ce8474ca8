//! Lark text from outside: the schemas in it follow the same rules as a schema alone, and its size is bounded.
//!
//! The library's parser recurses over groups, uses of templates, conditions, and rules that name each other, and holds
//! some hundred bytes for each token. So levels and tokens are bounded before it sees a text: what it recurses over is
//! either nested in the text, or has tokens of its own.

use crate::error::{GrammarError, too_large};
use crate::expression::Classes;
use crate::kind::Kind;
use crate::schema::{self, Spent, Unenforced};
use crate::source::TEXT_BYTES_MAX;
use serde_json::{Deserializer, Value};
use std::collections::HashSet;

/// Directive before a schema inside of Lark text.
const JSON: &str = "%json";
/// Directive before the library's options.
const OPTIONS: &str = "%llguidance";
/// Directive before a description of an expression.
const REGEX: &str = "%regex";
/// Option that would let a regex match bytes which are no text, and so the marks of special tokens.
const RAW_BYTES: &str = "allow_invalid_utf8";

/// Deepest nesting of brackets; the library takes 28 levels of groups.
const LEVELS_MAX: usize = 64;
/// Most tokens of a text, without blanks, comments and JSON: a chain of rules of so many takes half of the stack of the
/// thread that compiles.
const TOKENS_MAX: usize = 32 << 10;
/// Longest expression, and longest description of one, in bytes: the library takes some 400 bytes for each of them.
const EXPRESSION_BYTES_MAX: usize = 128 << 10;
/// Most schemas inside of one text: the library takes about 4 KiB for the smallest.
const SCHEMAS_MAX: usize = 4096;

/// Replaces every `%json {…}` by its prepared schema; also returns the keywords that are not enforced.
pub(crate) fn prepare(text: &str) -> Result<(String, Vec<Unenforced>), GrammarError> {
    let (mut out, mut unenforced, mut copied) = (String::with_capacity(text.len()), Vec::new(), 0);
    let (mut tokens, mut size, mut spent, mut schemas) = (Tokens::of(text), Size::default(), Spent::default(), 0);
    while let Some((at, token)) = tokens.next() {
        size.add(token)?;
        if token.starts_with('/') && !token.starts_with("//") {
            spent.expression(Kind::Lark, token, Classes::of_unicode(token))?;
        }
        let directives = [JSON, OPTIONS, REGEX];
        let Some(directive) = directives.into_iter().find(|directive| text[at..].starts_with(directive)) else {
            continue;
        };
        tokens.at = at + directive.len();
        let mut values = Deserializer::from_str(&text[tokens.at..]).into_iter::<Value>();
        // Whatever else stands here, the library decides about it.
        let Some(Ok(value)) = values.next() else { continue };
        let (begin, end) = (tokens.at, tokens.at + values.byte_offset());
        tokens.at = end;
        if directive == REGEX {
            too_large(Kind::Lark, "bytes in one expression", end - begin, EXPRESSION_BYTES_MAX)?;
        }
        if directive == OPTIONS && value.get(RAW_BYTES).is_some() {
            let feature = format!("`{RAW_BYTES}`");
            return Err(GrammarError::Unsupported { kind: Kind::Lark, feature, why: "output is text" });
        }
        if directive == JSON {
            schemas += 1;
            too_large(Kind::Lark, "schemas", schemas, SCHEMAS_MAX)?;
            let (schema, more) = schema::prepare_value(Kind::Lark, value, &mut spent)?;
            out.push_str(&text[copied..begin]);
            out.push(' ');
            out.push_str(&schema.to_string());
            out.push(' ');
            unenforced.extend(more);
            copied = end;
        }
    }
    out.push_str(&text[copied..]);
    Ok((out, unenforced))
}

/// Bounded counts of a text's tokens and open brackets: the library keeps the ones and recurses over the others.
#[derive(Default)]
struct Size {
    tokens: usize,
    /// Brackets that are open. A wrong one closes nothing: the library refuses such a text there.
    open: Vec<char>,
}

impl Size {
    fn add(&mut self, token: &str) -> Result<(), GrammarError> {
        let Some(first) = token.chars().next().filter(|c| !c.is_whitespace() || *c == '\n') else { return Ok(()) };
        if first == '#' || token.starts_with("//") {
            return Ok(());
        }
        if first == '/' {
            too_large(Kind::Lark, "bytes in one expression", token.len(), EXPRESSION_BYTES_MAX)?;
        }
        self.tokens += if is_word(first) { names(token) } else { 1 };
        too_large(Kind::Lark, "tokens", self.tokens, TOKENS_MAX)?;
        match first {
            '(' => self.open.push(')'),
            '[' => self.open.push(']'),
            '{' => self.open.push('}'),
            close => drop(self.open.pop_if(|wanted| *wanted == close)),
        }
        too_large(Kind::Lark, "levels", self.open.len(), LEVELS_MAX)
    }
}

/// Most names that the library reads in one word. Names of rules are small letters and those of terminals capital ones,
/// so that a word is cut between them; other words may be numbers with signs.
fn names(word: &str) -> usize {
    let name = word.strip_prefix('_').unwrap_or(word);
    if !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return word.len();
    }
    let letters: Vec<bool> =
        name.chars().filter(char::is_ascii_alphabetic).map(|letter| letter.is_ascii_uppercase()).collect();
    1 + letters.windows(2).filter(|pair| pair[0] != pair[1]).count()
}

/// Tokens of a text with their places. A token is what the library's lexer takes for one, as far as other tokens could
/// be read in it: strings, expressions, comments, special tokens, words. Of an open one only the first character is a
/// token; the library refuses the text. Cost: linear in the text.
struct Tokens<'a> {
    text: &'a str,
    /// Beginning of the next token.
    at: usize,
    /// Quotes of strings and expressions that end nowhere any more. What ends one has an even number of backslashes in
    /// front of it, wherever it began: once one is open, all later ones are.
    open: [bool; 2],
}

impl<'a> Tokens<'a> {
    fn of(text: &'a str) -> Self {
        Self { text, at: 0, open: [false; 2] }
    }

    /// Length of the string or expression in front of `text`; `None`: it is open.
    fn quoted(&mut self, text: &str, quote: char) -> Option<usize> {
        let open = &mut self.open[usize::from(quote == '/')];
        if *open {
            return None;
        }
        let mut escaped = false;
        let is_end = |c: char| {
            let ends = c == quote && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        };
        let end = text[1..].find(is_end).map(|at| at + 2);
        *open = end.is_none();
        end
    }
}

impl<'a> Iterator for Tokens<'a> {
    type Item = (usize, &'a str);

    fn next(&mut self) -> Option<Self::Item> {
        let (at, rest) = (self.at, self.text.get(self.at..)?);
        let first = rest.chars().next()?;
        let length = match first {
            '#' => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest[1..].starts_with('/') => rest.find('\n').unwrap_or(rest.len()),
            '"' | '/' => self.quoted(rest, first).unwrap_or(1),
            '<' => {
                let end = rest[1..].find(|c: char| c == '<' || c == '>' || c.is_whitespace());
                end.filter(|end| *end > 0 && rest[1 + end..].starts_with('>')).map_or(1, |end| end + 2)
            }
            c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        self.at += length;
        Some((at, &rest[..length]))
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '-'
}

/// Directives whose effect is not that of one rule.
const GLOBAL: [&str; 5] = ["%ignore", "%llguidance", "%declare", "%override", "%lark"];

/// Grammar in Lark as rules that can stand among others, and the name of the first one. The names `start` and `BLANKS`,
/// and those of `r` or `T` with a number, become others. `None` if the text has no rule `start`, or directives whose
/// effect is not that of one rule, or if it is longer than a grammar may be. Cost: linear in the text.
pub fn to_rules(text: &str) -> Option<(String, String)> {
    if text.len() > TEXT_BYTES_MAX {
        return None;
    }
    let suffix = unused_suffix(text);
    let (mut out, mut has_start, mut copied) = (String::with_capacity(text.len() + 64), false, 0);
    let mut tokens = Tokens::of(text);
    while let Some((at, word)) = tokens.next() {
        let rest = &text[at..];
        if GLOBAL.iter().any(|directive| rest.starts_with(directive)) {
            return None;
        }
        if let Some(after) = rest.strip_prefix(JSON).or_else(|| rest.strip_prefix(REGEX)) {
            // JSON behind a directive is no Lark.
            let mut values = Deserializer::from_str(after).into_iter::<Value>();
            values.next()?.ok()?;
            tokens.at = text.len() - after.len() + values.byte_offset();
            continue;
        }
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

/// A suffix that no name of the text ends in: short, since it is written behind each name that becomes another.
fn unused_suffix(text: &str) -> String {
    const SUFFIX: &str = "_c";
    let small = text.to_ascii_lowercase();
    let ends = small.match_indices(SUFFIX).map(|(at, _)| {
        let behind = &small[at + SUFFIX.len()..];
        &behind[..behind.find(|c: char| !c.is_ascii_digit()).unwrap_or(behind.len())]
    });
    let taken: HashSet<&str> = ends.collect();
    let mut numbers = (0_usize..).map(|number| if number == 0 { String::new() } else { number.to_string() });
    let free = numbers.find(|number| !taken.contains(number.as_str())).expect("a text has fewer names than there are");
    format!("{SUFFIX}{free}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{CLASSED_MAX, CLASSES_MAX};

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
        let taken = to_rules("start: start_c\nstart_c: start_C2\nstart_C2: \"a\"").expect("rules");
        assert_eq!(taken, ("start_c1".into(), "start_c1: start_c\nstart_c: start_C2\nstart_C2: \"a\"\n".into()));
        for text in [
            "root: \"a\"",
            "start: \"a\"\n%ignore / /",
            "%llguidance {}\nstart: \"a\"",
            "start: %lark { start: \"a\" }",
        ] {
            assert_eq!(to_rules(text), None, "{text}");
        }
    }
    #[test]
    fn a_suffix_is_short_whatever_the_names() {
        let long = format!("start: r1 {}\nr1: \"\"\na_{}: \"\"\n", "r1 ".repeat(30_000), "c".repeat(100_000));
        let (start, rules) = to_rules(&long).expect("rules");
        assert_eq!(start, "start_c1");
        assert!(rules.len() < 2 * long.len(), "{} bytes of {}", rules.len(), long.len());
        let names: String = (0..20_000).map(|number| format!(" a_c{number}")).collect();
        assert_eq!(to_rules(&format!("start: a_c{names}")).expect("rules").0, "start_c20000");
        assert_eq!(to_rules(&format!("start: \"{}\"", "a".repeat(TEXT_BYTES_MAX))), None);
    }

    #[test]
    fn levels_and_tokens_are_bounded() {
        #[track_caller]
        fn check(text: &str, too_large: Option<&str>) {
            let what = match prepare(text) {
                Err(GrammarError::TooLarge { what, .. }) => Some(what),
                _ => None,
            };
            assert_eq!(what, too_large, "{:.40}", text);
        }
        let levels = |open: &str, count: usize| format!("start: {}", open.repeat(count));
        for open in ["(", "[", "a{", "a::_ %if not(", "(a) [b] {c} (", "( \")\" /)/ <)> # )\n"] {
            check(&levels(open, LEVELS_MAX), None);
            check(&levels(open, LEVELS_MAX + 1), Some("levels"));
        }
        check(&levels("a{)", LEVELS_MAX + 1), Some("levels"));
        check(&levels("\"((\" /((/ <((> (a)", 1000), None);
        for (token, count) in
            [("a ", 1), ("aA", 2), ("name_of-1 ", 1), ("_a ", 1), ("1-", 2), ("\"a b\" ", 1), ("\n", 1), ("<a>", 1)]
        {
            let most = (TOKENS_MAX - 3) / count;
            check(&format!("start: {}", token.repeat(most)), None);
            check(&format!("start: {}", token.repeat(most + 2)), Some("tokens"));
        }
        check(&format!("start: \"a\" {}{}", " ".repeat(100_000), "# a\n//b\n".repeat(1000)), None);
        check(&format!("start: %json {{\"default\": [{}1]}}", "1,".repeat(50_000)), None);
        check(&format!("start: %regex {{\"substring_chunks\": [{}\"\"]}}", "\"a\",".repeat(30_000)), None);
        check(&"%json {} ".repeat(SCHEMAS_MAX + 1), Some("schemas"));
        let long = "a".repeat(EXPRESSION_BYTES_MAX);
        check(&format!("start: \"{long}\" /{}/", &long[2..]), None);
        for text in [format!("start: /{long}/"), format!("start: %regex {{\"substring_chars\": \"{long}\"}}")] {
            check(&text, Some("bytes in one expression"));
        }
        for class in [r"\w", r"\P{L}", r"[^\d]"] {
            let text = format!("start: {}/\\\\w.[a-z]/", format!("/{}/ ", class.repeat(CLASSES_MAX / 4)).repeat(4));
            check(&text, None);
            check(&format!("{text} /{class}/"), Some("classes in expressions"));
            let distinct = |count: usize| (0..count).map(|n| format!("/{class}{n}/ /{class}{n}/ /\\d\\s{n}/ "));
            check(&format!("start: {}", distinct(CLASSED_MAX).collect::<String>()), None);
            let many = format!("start: {}", distinct(CLASSED_MAX + 1).collect::<String>());
            check(&many, Some("different expressions with classes of Unicode"));
        }
        // Patterns count together with the expressions, and in schemas `\w` has 63 characters.
        let pattern =
            |n: usize| format!("%json {{\"pattern\": \"\\\\p{{L}}{n}\"}} %json {{\"pattern\": \"\\\\w{n}\"}} ");
        let patterns: String = (1..CLASSED_MAX).map(pattern).collect();
        check(&format!("start: {patterns} /\\w/"), None);
        check(&format!("start: {patterns} /\\w/ /a\\w/"), Some("different expressions with classes of Unicode"));
        // Each schema alone is within its bounds.
        let choices = serde_json::json!({ "anyOf": [{"const": 1}, {"const": 2}] });
        let costly = format!("%json {} ", serde_json::json!({ "allOf": vec![choices; 8] }));
        check(&costly, None);
        check(&costly.repeat(200), Some("expanded alternatives"));
        check(
            &format!("%json {{\"prefixItems\": [{}{{}}]}} ", "{\"pattern\": \"a\"},".repeat(60)).repeat(18),
            Some("patterns"),
        );
    }
}
