//! GBNF, the notation of llama.cpp, rewritten in Lark, with what xgrammar's EBNF (that of SGLang and vLLM) has beyond it:
//! rules that go on in the next line, dots in names, and `\d`, `\w` and `\s` in character classes.
//!
//! Rules become rules: literals stay literals, character classes become regular expressions of one character. Names are
//! numbered, since the two notations allow different ones. What a rule means is not looked at: the parser of Lark
//! refuses what is too much.

use crate::error::shown;
use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

/// Longest text, in bytes.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// Longest name with dots, in bytes: at each name behind a dot a longer one may begin.
const DOTTED_BYTES_MAX: usize = 256;
/// Deepest nesting of groups.
const DEPTH_MAX: usize = 64;
/// Largest bound of a repetition.
const REPEAT_MAX: u32 = 100_000;

/// Fault of a text in GBNF, with its line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct GbnfError {
    /// Number of the line, from 1.
    pub line: usize,
    /// Description of the fault.
    pub what: String,
}

/// Rewrites a grammar in GBNF, whose first symbol is `root`, as one in Lark.
///
/// # Errors
/// [`GbnfError`] for the first fault of the text.
pub fn to_lark(text: &str) -> Result<String, GbnfError> {
    to_rules(text, "g").map(|(start, rules)| format!("start: {start}\n{rules}"))
}

/// Rewrites a grammar in GBNF as rules of Lark whose names begin with `prefix`; also returns the name of the first one.
/// Cost: linear in the text.
///
/// # Errors
/// [`GbnfError`] for the first fault of the text.
pub fn to_rules(text: &str, prefix: &str) -> Result<(String, String), GbnfError> {
    let mut reader = Reader { rest: text, line: 1, names: HashMap::new(), dotted: HashSet::new(), prefix };
    if text.len() > TEXT_BYTES_MAX {
        return Err(reader.fault(format!("the text has {} bytes, limit {TEXT_BYTES_MAX}", text.len())));
    }
    let is_part = |c: char| is_name(c) || c == '.';
    let heads = text.match_indices("::=").map(|(at, _)| text[..at].trim_end_matches([' ', '\t']));
    let names = heads.map(|head| &head[head.trim_end_matches(is_part).len()..]);
    reader.dotted = names.filter(|name| name.contains('.')).collect();
    if let Some(name) = reader.dotted.iter().find(|name| name.len() > DOTTED_BYTES_MAX) {
        let what = format!("a name with dots has {} bytes, limit {DOTTED_BYTES_MAX}: {}", name.len(), shown(name));
        return Err(reader.fault(what));
    }
    let (mut rules, mut defined) = (String::new(), HashSet::new());
    loop {
        reader.blanks(true);
        if reader.rest.is_empty() {
            break;
        }
        let name = reader.name()?;
        reader.blanks(false);
        reader.expect("::=")?;
        if !defined.insert(name) {
            return Err(reader.fault(format!("the rule is defined twice: {}", shown(reader.written(name)))));
        }
        reader.blanks_in_rule();
        let body = reader.alternatives(0)?;
        // Writing to a string does not fail.
        let _ = writeln!(rules, "{prefix}{name}: {body}");
        reader.end_of_rule()?;
    }
    let Some(root) = reader.names.get("root").copied().filter(|root| defined.contains(root)) else {
        return Err(reader.fault("there is no rule `root`".into()));
    };
    if let Some(missing) = (0..reader.names.len()).find(|name| !defined.contains(name)) {
        return Err(reader.fault(format!("the rule `{}` is not defined", shown(reader.written(missing)))));
    }
    Ok((format!("{prefix}{root}"), rules))
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
    /// Numbers of the rules' names.
    names: HashMap<&'a str, usize>,
    /// Names with dots that are defined somewhere; a dot behind any other name is one that stands for any character.
    dotted: HashSet<&'a str>,
    /// Beginning of the names of Lark's rules.
    prefix: &'a str,
}

impl<'a> Reader<'a> {
    fn fault(&self, what: String) -> GbnfError {
        GbnfError { line: self.line, what }
    }

    fn written(&self, name: usize) -> &'a str {
        self.names.iter().find(|(_, number)| **number == name).map_or("", |(text, _)| text)
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn take(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.rest = &self.rest[c.len_utf8()..];
        self.line += usize::from(c == '\n');
        Some(c)
    }

    fn accept(&mut self, wanted: &str) -> bool {
        let found = self.rest.starts_with(wanted);
        if found {
            self.rest = &self.rest[wanted.len()..];
        }
        found
    }

    fn expect(&mut self, wanted: &str) -> Result<(), GbnfError> {
        if self.accept(wanted) { Ok(()) } else { Err(self.fault(format!("expected `{wanted}`"))) }
    }

    /// Skips blanks and comments, and line breaks where `lines` allows them.
    fn blanks(&mut self, lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => {}
                '\n' | '\r' if lines => {}
                '#' => {
                    while self.peek().is_some_and(|c| c != '\n' && c != '\r') {
                        self.take();
                    }
                    continue;
                }
                _ => return,
            }
            self.take();
        }
    }

    /// Skips blanks up to the next part of a rule, which may stand in one of the next lines. Line breaks in front of the
    /// next rule, or of something that no rule has, stay.
    fn blanks_in_rule(&mut self) {
        self.blanks(false);
        let end = (self.rest, self.line);
        self.blanks(true);
        let goes_on = match self.peek() {
            Some('"' | '[' | '(' | '.' | '|') => true,
            Some(c) if is_name(c) => {
                let behind = self.rest[self.name_bytes()..].trim_start_matches([' ', '\t']);
                !behind.starts_with("::=")
            }
            _ => false,
        };
        if !goes_on {
            (self.rest, self.line) = end;
        }
    }

    /// Length of the name that begins here; 0 if none does.
    fn name_bytes(&self) -> usize {
        let within = &self.rest[..self.rest.floor_char_boundary(DOTTED_BYTES_MAX + 1)];
        let dotted = within.find(|c| !is_name(c) && c != '.').unwrap_or(within.len());
        match self.dotted.contains(&within[..dotted]) {
            true => dotted,
            false => self.rest.find(|c| !is_name(c)).unwrap_or(self.rest.len()),
        }
    }

    fn name(&mut self) -> Result<usize, GbnfError> {
        let end = self.name_bytes();
        if end == 0 {
            return Err(self.fault("expected the name of a rule".into()));
        }
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        let next = self.names.len();
        Ok(*self.names.entry(name).or_insert(next))
    }

    fn end_of_rule(&mut self) -> Result<(), GbnfError> {
        match self.peek() {
            None | Some('\n' | '\r') => Ok(()),
            Some(c) => Err(self.fault(format!("unexpected {c:?}"))),
        }
    }

    fn alternatives(&mut self, depth: usize) -> Result<String, GbnfError> {
        if depth > DEPTH_MAX {
            return Err(self.fault("groups are nested too deep".into()));
        }
        let mut out = self.sequence(depth)?;
        while self.accept("|") {
            if depth > 0 {
                self.blanks(true);
            } else {
                self.blanks_in_rule();
            }
            out.push_str(" | ");
            out.push_str(&self.sequence(depth)?);
        }
        Ok(out)
    }

    fn sequence(&mut self, depth: usize) -> Result<String, GbnfError> {
        let mut items: Vec<String> = Vec::new();
        while let Some(c) = self.peek() {
            let item = match c {
                '"' => self.literal()?,
                '[' => self.class()?,
                '.' => {
                    self.take();
                    "/(?s:.)/".to_owned()
                }
                '(' => {
                    self.take();
                    self.blanks(true);
                    let inner = self.alternatives(depth + 1)?;
                    self.expect(")")?;
                    format!("({inner})")
                }
                c if is_name(c) => {
                    let name = self.name()?;
                    format!("{}{name}", self.prefix)
                }
                '<' | '!' => return Err(self.fault("tokens in angle brackets are not supported".into())),
                _ => break,
            };
            let repeat = self.repeat()?;
            items.push(item + &repeat);
            if depth > 0 {
                self.blanks(true);
            } else {
                self.blanks_in_rule();
            }
        }
        if items.is_empty() {
            items.push("\"\"".into());
        }
        Ok(items.join(" "))
    }

    /// Repetition behind an item; empty where there is none.
    fn repeat(&mut self) -> Result<String, GbnfError> {
        let Some(c) = self.peek() else { return Ok(String::new()) };
        match c {
            '*' | '+' | '?' => {
                self.take();
                Ok(c.to_string())
            }
            '{' => {
                let end = self.rest.find('}').ok_or_else(|| self.fault("`{` without `}`".into()))?;
                let bounds = self.rest[1..end].replace(' ', "");
                self.rest = &self.rest[end + 1..];
                let (low, high) = bounds.split_once(',').unwrap_or((&bounds, &bounds));
                let number = |text: &str| text.parse::<u32>().ok().filter(|number| *number <= REPEAT_MAX);
                let fault = || self.fault(format!("`{{{}}}` is no repetition up to {REPEAT_MAX}", shown(&bounds)));
                let low = if low.is_empty() { 0 } else { number(low).ok_or_else(fault)? };
                if high.is_empty() {
                    return Ok(format!("{{{low},}}"));
                }
                let high = number(high).filter(|high| *high >= low).ok_or_else(fault)?;
                Ok(format!("{{{low},{high}}}"))
            }
            _ => Ok(String::new()),
        }
    }

    fn literal(&mut self) -> Result<String, GbnfError> {
        self.take();
        let mut text = String::new();
        loop {
            match self.take() {
                None | Some('\n') => return Err(self.fault("a literal has no end".into())),
                Some('"') => break,
                Some('\\') => text.push(self.escape()?),
                Some(c) => text.push(c),
            }
        }
        // Lark's strings have JSON's escapes, and refuse the delete character as it is.
        Ok(crate::expression::quoted(&text))
    }

    fn class(&mut self) -> Result<String, GbnfError> {
        self.take();
        let mut out = String::from("/[");
        if self.accept("^") {
            out.push('^');
        }
        let mut is_empty = true;
        loop {
            let c = match self.take() {
                None | Some('\n') => return Err(self.fault("a character class has no end".into())),
                Some(']') if !is_empty => break,
                Some('-') if !is_empty && self.peek() != Some(']') => {
                    out.push('-');
                    continue;
                }
                Some('\\') => match self.peek().and_then(class_of) {
                    Some(class) => {
                        self.take();
                        out.push_str(class);
                        // Behind a class a dash is one.
                        if self.peek() == Some('-') {
                            self.take();
                            out.push_str("\\u{2d}");
                        }
                        is_empty = false;
                        continue;
                    }
                    None => self.escape()?,
                },
                Some(c) => c,
            };
            is_empty = false;
            let _ = write!(out, "\\u{{{:x}}}", u32::from(c));
        }
        out.push_str("]/");
        Ok(out)
    }

    /// Character behind a backslash.
    fn escape(&mut self) -> Result<char, GbnfError> {
        let c = self.take().ok_or_else(|| self.fault("a backslash ends the text".into()))?;
        let digits = match c {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            c if c.is_ascii_alphanumeric() => return Err(self.fault(format!("unknown escape `\\{c}`"))),
            c => return Ok(c),
        };
        let code = self.rest.get(..digits).and_then(|text| u32::from_str_radix(text, 16).ok()).and_then(char::from_u32);
        let code =
            code.ok_or_else(|| self.fault(format!("`\\{c}` needs {digits} hexadecimal digits of a character")))?;
        self.rest = &self.rest[digits..];
        Ok(code)
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// Characters of a class that a backslash and a letter stand for, those of ASCII.
fn class_of(letter: char) -> Option<&'static str> {
    Some(match letter {
        'd' => "0-9",
        'D' => "[^0-9]",
        'w' => "0-9A-Za-z_",
        'W' => "[^0-9A-Za-z_]",
        's' => r"\u{9}-\u{d}\u{20}",
        'S' => r"[^\u{9}-\u{d}\u{20}]",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_become_rules() {
        let text =
            "# a list\nroot ::= \"[\" item (\",\" item)* \"]\" | \"none\"\nitem ::= [a-z]+ | [^\"\\n]{2,3} # one\n";
        let lark = to_lark(text).expect("valid");
        let want = [
            "start: g0",
            r#"g0: "[" g1 ("," g1)* "]" | "none""#,
            r"g1: /[\u{61}-\u{7a}]/+ | /[^\u{22}\u{a}]/{2,3}",
            "",
        ];
        assert_eq!(lark, want.join("\n"));
    }

    #[test]
    fn lines_go_on_inside_groups_and_behind_bars() {
        let lark = to_lark("root ::= (\n  \"a\"\n  \"b\" ) |\n \"c\"\r\n\r\nother-rule ::= root?").expect("valid");
        assert_eq!(lark, "start: g0\ng0: (\"a\" \"b\") | \"c\"\ng1: g0?\n");
    }

    #[test]
    fn rules_go_on_in_the_next_line() {
        for (text, want) in [
            ("root ::= \"a\"\n  | \"b\"", "g0: \"a\" | \"b\"\n"),
            ("root ::= \"a\" # one\n\n# two\n  | \"b\"\n\"c\"\n", "g0: \"a\" | \"b\" \"c\"\n"),
            ("root ::= x\n y\nx ::= \"x\"\ny\t::= \"y\"", "g0: g1 g2\ng1: \"x\"\ng2: \"y\"\n"),
            ("root ::=\nx::= \"x\"", "g0: \"\"\ng1: \"x\"\n"),
        ] {
            assert_eq!(to_lark(text).as_deref(), Ok(format!("start: g0\n{want}").as_str()), "{text}");
        }
    }

    #[test]
    fn names_may_have_dots_and_classes_letters() {
        let lark = to_lark("root ::= a.b a.c\na.b ::= [\\d\\w-]\na ::= [^\\s\\D]\nc ::= \"c\"").expect("valid");
        let want = [
            "start: g0",
            "g0: g1 g2 /(?s:.)/ g3",
            r"g1: /[0-90-9A-Za-z_\u{2d}]/",
            r"g2: /[^\u{9}-\u{d}\u{20}[^0-9]]/",
            "g3: \"c\"",
            "",
        ];
        assert_eq!(lark, want.join("\n"));
    }

    #[test]
    fn names_with_dots_are_bounded() {
        let name = |bytes: usize| format!("a.{}", "b".repeat(bytes - 2));
        let defined = |bytes: usize| to_lark(&format!("root ::= {0} {0}\n{0} ::= \"x\"", name(bytes)));
        assert_eq!(defined(DOTTED_BYTES_MAX - 1).expect("valid").lines().nth(1), Some("g0: g1 g1"));
        assert_eq!(defined(DOTTED_BYTES_MAX).expect("valid").lines().nth(1), Some("g0: g1 g1"));
        let error = defined(DOTTED_BYTES_MAX + 1).expect_err("too long");
        assert!(error.what.contains("257 bytes, limit 256"), "{error}");
    }

    #[test]
    fn escapes_are_characters() {
        let lark = to_lark(r#"root ::= "\x41\u00e9\n\"\\" [\]\-\\x-z]"#).expect("valid");
        assert_eq!(lark, "start: g0\ng0: \"Aé\\n\\\"\\\\\" /[\\u{5d}\\u{2d}\\u{5c}\\u{78}-\\u{7a}]/\n");
    }

    #[test]
    fn faults_name_their_line() {
        for (text, line, what) in [
            ("", 1, "no rule `root`"),
            ("a ::= \"x\"", 1, "no rule `root`"),
            ("root ::= a", 1, "`a` is not defined"),
            ("root ::= \"x\"\nroot ::= \"y\"", 2, "defined twice"),
            ("root ::= \"x", 1, "no end"),
            ("root ::= [x", 1, "no end"),
            ("root ::= (\"x\"", 1, "expected `)`"),
            ("\nroot := \"x\"", 2, "expected `::=`"),
            ("root ::= \"x\"{3,2}", 1, "no repetition"),
            ("root ::= \"x\"{1000000}", 1, "no repetition"),
            ("root ::= <think>", 1, "angle brackets"),
            ("root ::= \"\\q\"", 1, "unknown escape"),
            ("root ::= \"\\u12\"", 1, "hexadecimal"),
            ("root ::= *", 1, "unexpected"),
        ] {
            let error = to_lark(text).expect_err(text);
            assert!(error.what.contains(what) && error.line == line, "{text:?}: {error}");
        }
        assert!(to_lark(&format!("root ::= {}\"x\"{}", "(".repeat(100), ")".repeat(100))).is_err());
    }
}
