//! Sections of a TOML text: from a header, with the comments directly above it, to the next.

use toml_parser::Source;
use toml_parser::lexer::TokenKind;

/// Stretch of a text below one header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Section {
    /// Begin of the comments directly above the header, or of the header.
    pub(super) begin: usize,
    /// Begin of the header's line.
    pub(super) header: usize,
    /// Begin of the next section, or the end of the text.
    pub(super) end: usize,
    /// Names in the header, as `["models", "price"]`.
    pub(super) path: Vec<String>,
}

impl Section {
    /// End of the header and its keys, with the comments that follow without a blank line. What stands behind belongs to nobody.
    pub(super) fn body_end(&self, text: &str) -> usize {
        let tokens = Source::new(&text[self.header..self.end]).lex();
        let (mut end, mut last_kept, mut is_line_empty, mut is_open) = (self.end, self.header, true, true);
        for token in tokens {
            let at = self.header + token.span().end();
            match token.kind() {
                TokenKind::Newline if is_line_empty && is_open => (end, is_open) = (last_kept, false),
                TokenKind::Newline => {
                    is_line_empty = true;
                    if is_open {
                        last_kept = at;
                    }
                }
                TokenKind::Whitespace | TokenKind::Eof => {}
                TokenKind::Comment => is_line_empty = false,
                _ => (is_line_empty, is_open, end) = (false, true, self.end),
            }
        }
        end
    }
}

/// Sections of a text that is TOML; keys above the first header are in none.
pub(super) fn sections(text: &str) -> Vec<Section> {
    let mut out: Vec<Section> = Vec::new();
    // Begin of the line, of the comments directly above it, and whether nothing but space is on it yet.
    let (mut line, mut comments, mut is_fresh, mut depth) = (0, None, true, 0_usize);
    let mut is_comment = false;
    for token in Source::new(text).lex() {
        let (begin, end) = (token.span().start(), token.span().end());
        match token.kind() {
            TokenKind::Newline => {
                if is_fresh || !is_comment || depth > 0 {
                    comments = None;
                }
                (line, is_fresh, is_comment) = (end, true, false);
                continue;
            }
            TokenKind::Whitespace | TokenKind::Eof => continue,
            TokenKind::Comment if is_fresh => {
                is_comment = true;
                comments = comments.or(Some(line));
            }
            TokenKind::LeftSquareBracket if is_fresh && depth == 0 => {
                let whole = text[begin..].lines().next().unwrap_or_default();
                if let Some(path) = header(whole) {
                    let begin = comments.unwrap_or(line);
                    if let Some(last) = out.last_mut() {
                        last.end = begin;
                    }
                    out.push(Section { begin, header: line, end: text.len(), path });
                }
                depth += 1;
            }
            TokenKind::LeftSquareBracket | TokenKind::LeftCurlyBracket => depth += 1,
            TokenKind::RightSquareBracket | TokenKind::RightCurlyBracket => depth = depth.saturating_sub(1),
            _ => {}
        }
        is_fresh = false;
    }
    out
}

/// Names in a header's line.
fn header(line: &str) -> Option<Vec<String>> {
    let table: toml::Table = line.parse().ok()?;
    let (mut path, mut next) = (Vec::new(), Some(toml::Value::Table(table)));
    while let Some(value) = next.take() {
        let inner = match value {
            toml::Value::Table(table) => table.into_iter().next(),
            toml::Value::Array(values) => match values.into_iter().next() {
                Some(toml::Value::Table(table)) => table.into_iter().next(),
                _ => None,
            },
            _ => None,
        };
        if let Some((name, value)) = inner {
            path.push(name);
            next = Some(value);
        }
    }
    Some(path)
}
