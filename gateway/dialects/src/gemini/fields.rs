//! Object readers with Google's leniency: two spellings of each name, a single value where a list is expected.

use std::borrow::Cow;

use penstock_types::error::ApiErrorKind;
use penstock_types::fields::bounded;
use penstock_types::json::{Fault, Kind, Names, Reader, Within, mismatch};

/// Camel-case spelling of a name: `system_instruction` becomes `systemInstruction`.
pub(super) fn camel(name: Cow<'_, str>) -> Cow<'_, str> {
    let Some(first) = name.bytes().skip(1).position(|byte| byte == b'_') else { return name };
    let mut out = String::with_capacity(name.len());
    // Leading underscores are kept as they are.
    out.push_str(&name[..=first]);
    let mut raise = false;
    for character in name[first + 1..].chars() {
        match character {
            '_' => raise = true,
            other if std::mem::take(&mut raise) => out.extend(other.to_uppercase()),
            other => out.push(other),
        }
    }
    Cow::Owned(out)
}

/// Reads an object and calls `field` with each name in camel case; duplicates are refused and null values skipped.
pub(super) fn object<'a>(
    reader: &mut Reader<'a>,
    fields_max: usize,
    mut field: impl FnMut(&mut Reader<'a>, &str) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut names = Names::new(fields_max);
    reader.object(|reader, key| {
        let name = camel(key);
        names.add(&name)?;
        if reader.null()? {
            return Ok(());
        }
        field(reader, &name).within(&name)
    })
}

/// Reads a list; a single object counts as a list of one, as in Google's own examples of `parts`.
pub(super) fn list<'a>(
    reader: &mut Reader<'a>,
    max: usize,
    what: &str,
    mut item: impl FnMut(&mut Reader<'a>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    match reader.kind()? {
        Kind::Object => item(reader),
        Kind::Array => reader.array(|reader, index| {
            bounded(index, max, what)?;
            item(reader).at(index)
        }),
        kind => Err(mismatch("an array", kind)),
    }
}

/// Unwraps a mandatory field; the fault names it.
pub(super) fn required<T>(value: Option<T>, name: &str) -> Result<T, Fault> {
    value.ok_or_else(|| Fault::invalid("required, but missing")).within(name)
}

/// Fault of a known field that is not supported.
pub(super) fn unbuilt(why: &str) -> Fault {
    Fault::of(ApiErrorKind::Unsupported, why)
}

/// Reads one of Google's enumerated words, in any case.
pub(super) fn word<T: Copy>(reader: &mut Reader<'_>, words: &[(&str, T)]) -> Result<T, Fault> {
    let given = reader.string()?;
    match words.iter().find(|(word, _)| word.eq_ignore_ascii_case(&given)) {
        Some((_, value)) => Ok(*value),
        None => {
            let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            let given = penstock_types::json::short(&given);
            Err(Fault::invalid(format!("must be one of {}; got \"{given}\"", known.join(", "))))
        }
    }
}

/// Checks base64 and rewrites it into the standard alphabet; Google's SDKs also send the URL alphabet.
pub(super) fn base64(text: Cow<'_, str>) -> Result<String, Fault> {
    let mut text = text.into_owned();
    if text.bytes().any(|byte| matches!(byte, b'-' | b'_')) {
        text = text.replace('-', "+").replace('_', "/");
    }
    let data = text.trim_end_matches('=');
    let good = data.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/'));
    if !good || data.len() % 4 == 1 || text.len() - data.len() > 2 {
        return Err(Fault::invalid("must be base64"));
    }
    text.truncate(data.len());
    while !text.len().is_multiple_of(4) {
        text.push('=');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_are_one_name() {
        for (given, name) in [
            ("systemInstruction", "systemInstruction"),
            ("system_instruction", "systemInstruction"),
            ("a_b_c", "aBC"),
            ("_response_json_schema", "_responseJsonSchema"),
            ("_x", "_x"),
            ("x_", "x"),
            ("", ""),
            ("_", "_"),
            ("\u{e4}_\u{e4}", "\u{e4}\u{c4}"),
        ] {
            assert_eq!(camel(Cow::Borrowed(given)), name);
        }
    }

    #[test]
    fn base64_is_brought_to_one_alphabet() {
        for (given, standard) in
            [("_-8", Some("/+8=")), ("AAAA", Some("AAAA")), ("", Some("")), ("A", None), ("A*==", None)]
        {
            assert_eq!(base64(Cow::Borrowed(given)).ok().as_deref(), standard, "{given}");
        }
    }
}
