//! Contents of JSON strings: their ends and escapes; shared by reading and writing.

use crate::json::Fault;

/// Number of leading bytes that a JSON string can hold unescaped: no quote, backslash or control character.
pub fn plain_run(bytes: &[u8]) -> usize {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = 0x8080_8080_8080_8080;
    let mut run = 0;
    let (words, _) = bytes.as_chunks::<8>();
    for word in words {
        let word = u64::from_le_bytes(*word);
        // Exact for the lowest byte found: a borrow only disturbs the bytes above it.
        let control = word.wrapping_sub(ONES * 0x20) & !word;
        let quote = word ^ (ONES * u64::from(b'"'));
        let slash = word ^ (ONES * u64::from(b'\\'));
        let special = (control | (quote.wrapping_sub(ONES) & !quote) | (slash.wrapping_sub(ONES) & !slash)) & HIGH;
        if special != 0 {
            return run + special.trailing_zeros() as usize / 8;
        }
        run += 8;
    }
    let rest = &bytes[run..];
    run + rest.iter().position(|&byte| byte < 0x20 || byte == b'"' || byte == b'\\').unwrap_or(rest.len())
}

/// Text of a checked value without the space between its tokens.
pub fn compacted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(quote) = rest.find('"') {
        out.extend(rest[..quote].chars().filter(|character| !character.is_ascii_whitespace()));
        let bytes = rest.as_bytes();
        let mut end = quote + 1;
        loop {
            end += plain_run(&bytes[end..]);
            if bytes[end] == b'"' {
                break;
            }
            end += 2;
        }
        out.push_str(&rest[quote..=end]);
        rest = &rest[end + 1..];
    }
    out.extend(rest.chars().filter(|character| !character.is_ascii_whitespace()));
    out
}

/// Text of `inner` with its escapes resolved; `start` is its byte offset in the body.
pub fn unescaped(inner: &str, start: usize) -> Result<String, Fault> {
    let mut text = String::with_capacity(inner.len());
    let mut rest = inner;
    while let Some(run) = rest.find('\\') {
        text.push_str(&rest[..run]);
        let at = start + (inner.len() - rest.len()) + run;
        let (character, used) = escape(&rest[run..], at)?;
        text.push(character);
        rest = &rest[run + used..];
    }
    text.push_str(rest);
    Ok(text)
}

/// Character of the escape at the front of `text`, and the bytes that the escape takes.
fn escape(text: &str, at: usize) -> Result<(char, usize), Fault> {
    let character = match text.as_bytes().get(1) {
        Some(b'"') => '"',
        Some(b'\\') => '\\',
        Some(b'/') => '/',
        Some(b'b') => '\u{8}',
        Some(b'f') => '\u{c}',
        Some(b'n') => '\n',
        Some(b'r') => '\r',
        Some(b't') => '\t',
        Some(b'u') => return unicode_escape(text, at),
        _ => return Err(Fault::Syntax { at, what: "an unknown escape in a string" }),
    };
    Ok((character, 2))
}

fn unicode_escape(text: &str, at: usize) -> Result<(char, usize), Fault> {
    const LONE: &str = "a lone surrogate in a string";
    let bad = Fault::Syntax { at, what: "a bad \\u escape in a string" };
    let Some(first) = hex4(text.as_bytes(), 2) else { return Err(bad) };
    if !(0xD800..=0xDFFF).contains(&first) {
        return char::from_u32(first).map(|character| (character, 6)).ok_or(bad);
    }
    let second = if text.as_bytes().get(6..8) == Some(b"\\u") { hex4(text.as_bytes(), 8) } else { None };
    match second {
        Some(second) if first < 0xDC00 && (0xDC00..=0xDFFF).contains(&second) => {
            let scalar = 0x1_0000 + ((first - 0xD800) << 10) + (second - 0xDC00);
            char::from_u32(scalar).map(|character| (character, 12)).ok_or(bad)
        }
        _ => Err(Fault::Syntax { at, what: LONE }),
    }
}

fn hex4(bytes: &[u8], from: usize) -> Option<u32> {
    let digits = bytes.get(from..from + 4)?;
    digits.iter().try_fold(0, |value, &digit| Some(value << 4 | char::from(digit).to_digit(16)?))
}
