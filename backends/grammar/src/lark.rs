//! Lark text from outside: the schemas in it follow the same rules as a schema alone.

use crate::error::GrammarError;
use crate::schema::{self, Unenforced};
use crate::source::Kind;
use serde_json::{Deserializer, Value};

/// Directive before a schema inside of Lark text.
const JSON: &str = "%json";
/// Option that would let a regex match bytes which are no text, and so the marks of special tokens.
const RAW_BYTES: &str = "allow_invalid_utf8";

/// Replaces every `%json {…}` by its prepared schema; also returns the keywords that are not enforced.
pub(crate) fn prepare(text: &str) -> Result<(String, Vec<Unenforced>), GrammarError> {
    if text.contains(RAW_BYTES) {
        let feature = format!("`{RAW_BYTES}`");
        return Err(GrammarError::Unsupported { kind: Kind::Lark, feature, why: "output is text" });
    }
    let (mut out, mut unenforced, mut rest) = (String::with_capacity(text.len()), Vec::new(), text);
    while let Some((before, after)) = rest.split_once(JSON) {
        out.push_str(before);
        out.push_str(JSON);
        rest = after;
        let mut values = Deserializer::from_str(after).into_iter::<Value>();
        // Whatever else stands here, the library decides about it.
        let Some(Ok(schema)) = values.next() else { continue };
        let (schema, more) = schema::prepare_value(Kind::Lark, schema)?;
        out.push(' ');
        out.push_str(&schema.to_string());
        out.push(' ');
        unenforced.extend(more);
        rest = &after[values.byte_offset()..];
    }
    out.push_str(rest);
    Ok((out, unenforced))
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
        let text = "%llguidance {\"allow_invalid_utf8\": true}\nstart: /(?s:.*)/";
        assert!(matches!(prepare(text), Err(GrammarError::Unsupported { .. })));
        let remote = "start: %json {\"$ref\": \"https://example.com/a.json\"}";
        assert!(matches!(prepare(remote), Err(GrammarError::Unsupported { .. })));
    }
}
