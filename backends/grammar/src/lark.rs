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

/// Place and name of the next directive that is followed by JSON.
fn next(text: &str) -> Option<(usize, &'static str)> {
    [JSON, OPTIONS].into_iter().filter_map(|directive| Some((text.find(directive)?, directive))).min()
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
}
