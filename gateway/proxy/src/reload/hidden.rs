//! Config text as it may be shown: a mark stands in place of each possible secret, and is replaced by the secret when
//! the text comes back. The rest stays as it was typed, comments included.

use std::ops::Range;

use toml::de::{DeTable, DeValue};

use super::diff::is_hidden;

/// Mark in place of a value that is not shown.
pub const MARK: &str = "\"[hidden]\"";

/// Value that is not shown: its path in the config and its byte range.
struct Place {
    path: String,
    at: Range<usize>,
}

/// Text with marks in place of secrets. A text that is no TOML is not shown at all, since its secrets cannot be found.
pub fn shown(text: &str) -> String {
    let Some(places) = places(text) else { return String::new() };
    replaced(text, places.iter().map(|place| (place.at.clone(), MARK)))
}

/// Text with the values of `known` in place of its marks.
///
/// # Errors
/// The path of a mark that has no value in `known`.
pub(super) fn restored(text: &str, known: &str) -> Result<String, String> {
    // A text that is no TOML is refused later, with its faults.
    let (Some(marked), Some(places)) = (places(text), places(known)) else { return Ok(text.to_owned()) };
    let mut values = Vec::new();
    for place in marked.into_iter().filter(|place| text.get(place.at.clone()) == Some(MARK)) {
        let found = places.iter().find(|known| known.path == place.path).and_then(|found| known.get(found.at.clone()));
        let value = found.ok_or_else(|| place.path.clone())?;
        values.push((place.at, value));
    }
    Ok(replaced(text, values.into_iter()))
}

/// Text with other values at these ranges, which do not overlap.
fn replaced<'a>(text: &str, values: impl Iterator<Item = (Range<usize>, &'a str)>) -> String {
    let mut values: Vec<_> = values.collect();
    values.sort_by_key(|(at, _)| at.start);
    let (mut out, mut done) = (String::with_capacity(text.len()), 0);
    for (at, value) in values {
        out += text.get(done..at.start).unwrap_or_default();
        out += value;
        done = at.end;
    }
    out + text.get(done..).unwrap_or_default()
}

fn places(text: &str) -> Option<Vec<Place>> {
    let root = DeTable::parse(text).ok()?;
    let mut out = Vec::new();
    table("", root.get_ref(), false, &mut out);
    Some(out)
}

/// Collects the values of a table; in a hidden table every value is hidden.
fn table(path: &str, values: &DeTable<'_>, hidden: bool, out: &mut Vec<Place>) {
    for (key, value) in values {
        let name = key.get_ref().as_ref();
        let path = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        let hidden = hidden || is_hidden(name);
        match value.get_ref() {
            // The top of the document has tables by these names that are no secrets.
            DeValue::Table(inner) => table(&path, inner, hidden && path.contains('.'), out),
            DeValue::Array(items) if items.iter().any(|item| item.get_ref().is_table()) => {
                for (at, item) in items.iter().enumerate() {
                    let Some(inner) = item.get_ref().as_table() else { continue };
                    let id = ["id", "name"].iter().find_map(|key| inner.get(*key)?.get_ref().as_str());
                    let id = id.map_or_else(|| format!("#{at}"), str::to_owned);
                    table(&format!("{path}[{id}]"), inner, false, out);
                }
            }
            _ if hidden => out.push(Place { path, at: value.span() }),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Ours.\n[server]\nlisten = \"1\" # here\n[[providers]]\nid = \"a\"\nheaders = { x = \"s1\", y = 's2' }\nkey_env = \"NAME\"\n\
        [[providers]]\nid = \"b\"\n[providers.headers]\nz = \"s3\"\n[[keys]]\nid = \"k\"\ndigest = \"s4\"\nmodels = [\"m\"]\n[store]\nurl = \"s5\"\n";

    #[test]
    fn secrets_are_marked_and_nothing_else() {
        let text = shown(TEXT);
        assert!((1..=5).all(|number| !text.contains(&format!("s{number}"))), "{text}");
        for kept in [
            "# Ours.",
            "listen = \"1\" # here",
            "key_env = \"NAME\"",
            "models = [\"m\"]",
            "y = \"[hidden]\"",
            "z = \"[hidden]\"",
        ] {
            assert!(text.contains(kept), "{kept} in {text}");
        }
        assert_eq!(shown("no toml"), "");
    }

    #[test]
    fn what_was_shown_comes_back_as_it_was() {
        let edited = shown(TEXT).replace("listen = \"1\"", "listen = \"2\"");
        assert_eq!(restored(&edited, TEXT), Ok(TEXT.replace("listen = \"1\"", "listen = \"2\"")));
        let renamed = shown(TEXT).replace("id = \"k\"", "id = \"new\"");
        assert_eq!(restored(&renamed, TEXT), Err("keys[new].digest".into()));
        assert_eq!(restored("no toml", TEXT), Ok("no toml".into()));
    }
}
