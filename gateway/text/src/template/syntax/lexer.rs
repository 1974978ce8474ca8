//! Tokens of a template, with `trim_blocks` and `lstrip_blocks` as transformers sets them.

use super::SyntaxError;
use crate::template::print::is_space;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Data(String),
    BlockBegin,
    BlockEnd,
    PrintBegin,
    PrintEnd,
    Name(String),
    Str(String),
    Int(i128),
    Float(f64),
    /// An operator, bracket or separator.
    Sign(&'static str),
    End,
}

/// Operators, longer ones first.
const SIGNS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";",
];

/// Splits a template into tokens with their lines.
pub(super) fn tokens(source: &str) -> Result<Vec<(Token, usize)>, SyntaxError> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer { source, at: 0, line: 1, line_starts: true, tokens: Vec::new() };
    while lexer.at < source.len() {
        lexer.root()?;
    }
    let line = lexer.line;
    lexer.tokens.push((Token::End, line));
    Ok(lexer.tokens)
}

struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: usize,
    /// True if the last match ended with a line break, or nothing was matched yet.
    line_starts: bool,
    tokens: Vec<(Token, usize)>,
}

impl<'a> Lexer<'a> {
    fn fail<T>(&self, words: impl Into<String>) -> Result<T, SyntaxError> {
        Err(SyntaxError { line: self.line, words: words.into() })
    }

    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    /// Moves on by `bytes`, and counts lines.
    fn advance(&mut self, bytes: usize) {
        let passed = &self.rest()[..bytes];
        self.line += passed.matches('\n').count();
        self.at += bytes;
        self.line_starts = passed.ends_with('\n');
    }

    fn push(&mut self, token: Token) {
        self.tokens.push((token, self.line));
    }

    /// Text up to the next tag, and that tag.
    fn root(&mut self) -> Result<(), SyntaxError> {
        let rest = self.rest();
        let opens = |(at, _): &(usize, &str)| matches!(rest.as_bytes().get(at + 1), Some(b'%' | b'{' | b'#'));
        let Some((open, _)) = rest.match_indices('{').find(opens) else {
            self.push(Token::Data(rest.to_owned()));
            self.advance(rest.len());
            return Ok(());
        };
        let kind = rest.as_bytes()[open + 1];
        let sign = rest.as_bytes().get(open + 2).copied().filter(|sign| matches!(sign, b'-' | b'+'));
        self.data(&rest[..open], sign, kind == b'{');
        self.advance(open + 2 + usize::from(sign.is_some()));
        match kind {
            b'#' => self.comment(),
            b'{' => {
                self.push(Token::PrintBegin);
                self.tag(b'}')
            }
            _ => match raw_begin(self.rest()) {
                Some(length) => {
                    self.advance(length);
                    self.raw()
                }
                None => {
                    self.push(Token::BlockBegin);
                    self.tag(b'%')
                }
            },
        }
    }

    /// Text before a tag, without the white space that the tag takes away.
    fn data(&mut self, text: &str, sign: Option<u8>, print: bool) {
        let kept = match sign {
            Some(b'-') => text.trim_end_matches(is_space),
            None if !print => {
                let line = text.rfind('\n').map_or(0, |at| at + 1);
                let blank = text[line..].chars().all(is_space);
                if blank && (line > 0 || self.line_starts) { &text[..line] } else { text }
            }
            _ => text,
        };
        if !kept.is_empty() {
            self.push(Token::Data(kept.to_owned()));
        }
    }

    fn comment(&mut self) -> Result<(), SyntaxError> {
        let rest = self.rest();
        if rest.is_empty() {
            return Ok(());
        }
        let Some(close) = rest.find("#}") else { return self.fail("Missing end of comment tag") };
        // The sign may be the last character before the mark.
        let sign = rest[..close].bytes().last();
        let end = close + 2;
        let length = end + trimmed(&rest[end..], sign);
        self.advance(length);
        Ok(())
    }

    fn raw(&mut self) -> Result<(), SyntaxError> {
        let rest = self.rest();
        for (open, _) in rest.match_indices("{%") {
            let inside = &rest[open + 2..];
            let sign = inside.bytes().next().filter(|sign| matches!(sign, b'-' | b'+'));
            let inside = &inside[usize::from(sign.is_some())..];
            let Some(after) = inside.trim_start_matches(is_space).strip_prefix("endraw") else { continue };
            let after = after.trim_start_matches(is_space);
            let (last, after) = match after.as_bytes().first() {
                Some(&sign @ (b'-' | b'+')) => (Some(sign), &after[1..]),
                _ => (None, after),
            };
            let Some(after) = after.strip_prefix("%}") else { continue };
            let length = rest.len() - after.len() + trimmed(after, last);
            self.data(&rest[..open], sign, false);
            self.advance(length);
            return Ok(());
        }
        self.fail("Missing end of raw directive")
    }

    /// Tokens inside a tag, up to its end.
    fn tag(&mut self, end: u8) -> Result<(), SyntaxError> {
        let mut open: Vec<&'static str> = Vec::new();
        loop {
            let rest = self.rest();
            if open.is_empty()
                && let Some(length) = tag_end(rest, end)
            {
                self.push(if end == b'%' { Token::BlockEnd } else { Token::PrintEnd });
                self.advance(length);
                return Ok(());
            }
            let Some(first) = rest.chars().next() else { return self.fail("unexpected end of template") };
            if is_space(first) {
                self.advance(rest.len() - rest.trim_start_matches(is_space).len());
            } else if first.is_ascii_digit() {
                self.number()?;
            } else if first.is_alphanumeric() || first == '_' {
                let name: &str = rest.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or_default();
                self.push(Token::Name(name.to_owned()));
                self.advance(name.len());
            } else if matches!(first, '\'' | '"') {
                self.string(first)?;
            } else {
                let Some(sign) = SIGNS.into_iter().find(|sign| rest.starts_with(sign)) else {
                    return self.fail(format!("unexpected char {first:?}"));
                };
                match sign {
                    "(" => open.push(")"),
                    "[" => open.push("]"),
                    "{" => open.push("}"),
                    ")" | "]" | "}" if open.pop() != Some(sign) => return self.fail(format!("unexpected '{sign}'")),
                    _ => {}
                }
                self.push(Token::Sign(sign));
                self.advance(sign.len());
            }
        }
    }

    fn number(&mut self) -> Result<(), SyntaxError> {
        let rest = self.rest();
        let after_dot =
            matches!(self.tokens.last(), Some((Token::Sign("."), _))) && self.source[..self.at].ends_with('.');
        let digits = |from: usize| rest[from..].bytes().take_while(|b| b.is_ascii_digit() || *b == b'_').count() + from;
        let radix = match rest.as_bytes().get(..2).map(<[u8]>::to_ascii_lowercase).as_deref() {
            Some(b"0x") => Some(16),
            Some(b"0o") => Some(8),
            Some(b"0b") => Some(2),
            _ => None,
        };
        let (length, value) = if let Some(radix) = radix {
            let length = 2 + rest[2..].bytes().take_while(|b| b.is_ascii_alphanumeric() || *b == b'_').count();
            (length, i128::from_str_radix(&rest[2..length].replace('_', ""), radix).ok().map(Token::Int))
        } else {
            let whole = digits(0);
            let mut length = whole;
            let bytes = rest.as_bytes();
            let digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
            if !after_dot && bytes.get(length) == Some(&b'.') && digit(length + 1) {
                length = digits(length + 1);
            }
            if !after_dot && matches!(bytes.get(length), Some(b'e' | b'E')) {
                let signed = length + 1 + usize::from(matches!(bytes.get(length + 1), Some(b'+' | b'-')));
                if digit(signed) {
                    length = digits(signed);
                }
            }
            let text = rest[..length].replace('_', "");
            let value =
                if length > whole { text.parse().ok().map(Token::Float) } else { text.parse().ok().map(Token::Int) };
            (length, value)
        };
        let Some(value) = value else { return self.fail(format!("unreadable number {:?}", &rest[..length])) };
        self.push(value);
        self.advance(length);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<(), SyntaxError> {
        let inside = &self.rest()[1..];
        let mut escaped = false;
        let end = inside.char_indices().find(|&(_, c)| {
            let ends = c == quote && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let Some((end, _)) = end else { return self.fail("a string without its end") };
        match unescape(&inside[..end]) {
            Ok(text) => self.push(Token::Str(text)),
            Err(words) => return self.fail(words),
        }
        self.advance(end + 2);
        Ok(())
    }
}

/// Length of the end of a tag, with the white space that it takes away.
fn tag_end(rest: &str, end: u8) -> Option<usize> {
    let bytes = rest.as_bytes();
    let sign = bytes.first().copied().filter(|&sign| sign == b'-' || (sign == b'+' && end == b'%'));
    let mark = usize::from(sign.is_some());
    if bytes.get(mark) != Some(&end) || bytes.get(mark + 1) != Some(&b'}') {
        return None;
    }
    let length = mark + 2;
    let plain_print = end == b'}' && sign.is_none();
    Some(length + if plain_print { 0 } else { trimmed(&rest[length..], sign) })
}

/// White space after a tag that the tag takes away: all for `-`, none for `+`, else one line break.
fn trimmed(after: &str, sign: Option<u8>) -> usize {
    match sign {
        Some(b'-') => after.len() - after.trim_start_matches(is_space).len(),
        Some(b'+') => 0,
        _ => usize::from(after.starts_with('\n')),
    }
}

/// Length of the rest of `{% raw %}` behind its opening mark and sign.
fn raw_begin(rest: &str) -> Option<usize> {
    let after = rest.trim_start_matches(is_space).strip_prefix("raw")?.trim_start_matches(is_space);
    let (sign, after) = match after.strip_prefix('-') {
        Some(after) => (true, after),
        None => (false, after),
    };
    let after = after.strip_prefix("%}")?;
    let after = if sign { after.trim_start_matches(is_space) } else { after };
    Some(rest.len() - after.len())
}

/// Text of a string literal, with Python's escapes.
fn unescape(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        let Some(escape) = chars.next() else { return Err("\\ at end of string".into()) };
        let code = match escape {
            '\n' => continue,
            'n' => '\n'.into(),
            't' => '\t'.into(),
            'r' => '\r'.into(),
            'a' => 7,
            'b' => 8,
            'f' => 12,
            'v' => 11,
            '\\' | '\'' | '"' => escape.into(),
            'x' => hex(&mut chars, 2)?,
            'u' => hex(&mut chars, 4)?,
            'U' => hex(&mut chars, 8)?,
            'N' => return Err("\\N{name} is not supported".into()),
            '0'..='7' => {
                let mut code = u32::from(escape) - u32::from('0');
                for _ in 0..2 {
                    let Some(digit) = chars.clone().next().and_then(|c| c.to_digit(8)) else { break };
                    code = code * 8 + digit;
                    chars.next();
                }
                code
            }
            other => {
                out.extend(['\\', other]);
                continue;
            }
        };
        out.push(char::from_u32(code).ok_or_else(|| format!("\\u{code:04x} is no character"))?);
    }
    Ok(out)
}

fn hex(chars: &mut std::str::Chars<'_>, digits: usize) -> Result<u32, String> {
    let mut code: u32 = 0;
    for _ in 0..digits {
        let digit = chars.next().and_then(|c| c.to_digit(16)).ok_or("truncated \\x or \\u escape")?;
        code = code.wrapping_mul(16).wrapping_add(digit);
    }
    Ok(code)
}
