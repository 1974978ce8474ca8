//! Config text as it may be shown: a mark stands in place of each possible secret, and is replaced by the secret when
//! the text comes back, in whichever spelling of TOML. The rest stays as it was typed, comments included.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::diff::{is_hidden_key, is_hidden_setting};

/// Mark in place of a value that is not shown.
pub const MARK: &str = "\"[hidden]\"";

/// Text of the mark in TOML.
const MARKED: &str = "[hidden]";

/// Value that is not shown: its path in the config and its byte range.
struct Place {
    path: String,
    at: Range<usize>,
    mark: Mark,
}

/// Share of a hidden value that is a mark.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    None,
    Whole,
    /// A mark stands within a list that is shown as one mark.
    Within,
}

impl Mark {
    fn of(value: &DeValue<'_>) -> Self {
        match value {
            DeValue::String(text) if text.as_ref() == MARKED => Self::Whole,
            DeValue::Array(items) if items.iter().any(|item| Self::of(item.get_ref()) != Self::None) => Self::Within,
            _ => Self::None,
        }
    }
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
    for place in marked.into_iter().filter(|place| place.mark != Mark::None) {
        let found = places.iter().find(|known| known.path == place.path && place.mark == Mark::Whole);
        let found = found.and_then(|found| known.get(found.at.clone()));
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
    let is_setting = path.starts_with("plugins[") && path.contains("].settings");
    for (key, value) in values {
        let name = key.get_ref().as_ref();
        let path = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        let is_number = matches!(value.get_ref(), DeValue::Integer(_) | DeValue::Float(_));
        let by_name = if is_setting { is_hidden_setting(name, is_number) } else { is_hidden_key(name, is_number) };
        // The top of the document has tables by these names that are no secrets.
        let is_top = !path.contains('.') && has_table(value.get_ref());
        collect(path, value, (hidden || by_name) && !is_top, out);
    }
}

/// Collects a value, or those in it.
fn collect(path: String, value: &Spanned<DeValue<'_>>, hidden: bool, out: &mut Vec<Place>) {
    match value.get_ref() {
        DeValue::Table(inner) => table(&path, inner, hidden, out),
        // Each by itself: tables of one list may lie apart in the text.
        DeValue::Array(items) if has_table(value.get_ref()) => {
            // Hidden names tell no entries apart.
            let id = |item: &Spanned<DeValue<'_>>| {
                let inner = item.get_ref().as_table().filter(|_| !hidden)?;
                ["id", "name"].iter().find_map(|key| Some(inner.get(*key)?.get_ref().as_str()?.to_owned()))
            };
            let ids: Vec<_> = items.iter().map(id).collect();
            for (at, item) in items.iter().enumerate() {
                let of = |list: &[Option<String>]| list.iter().filter(|id| **id == ids[at]).count();
                let (nth, all) = (of(&ids[..=at]), of(&ids));
                // Of several by one name, or without one, each goes by its place, as long as none has come or gone.
                let place = match &ids[at] {
                    Some(id) if all == 1 => id.clone(),
                    id => format!("{}#{nth} of {all}", id.as_deref().unwrap_or_default()),
                };
                collect(format!("{path}[{place}]"), item, hidden, out);
            }
        }
        inner if hidden => out.push(Place { path, at: value.span(), mark: Mark::of(inner) }),
        _ => {}
    }
}

/// Returns true if the value is a table, or a list with one somewhere in it.
fn has_table(value: &DeValue<'_>) -> bool {
    match value {
        DeValue::Table(_) => true,
        DeValue::Array(items) => items.iter().any(|item| has_table(item.get_ref())),
        _ => false,
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

    /// Settings of a plugin with these secrets, `s1` to `s8`.
    const SETTINGS: &str = "[[plugins]]\nid = \"w\"\nname = \"wasm\"\nkeys = [\"alice\"]\n[plugins.settings]\npath = \"a.wasm\"\n\
        upstreams = { auth = \"http://u:s1@h\" }\nconfig = { apiKeys = [\"s2\"], tokens = [\"s3\"], max_tokens = 7, deep = [[{ secret = \"s4\" }]] }\n\
        secrets = [\"s5\", { name = \"a\", value = \"s6\" }]\n[[plugins.settings.credentials.passwords]]\nvalue = \"s7\"\n\
        [[plugins]]\nname = \"headers\"\n[plugins.settings.request.set]\nauthorization = \"s8\"\nx-team = \"blue\"\n";

    #[test]
    fn settings_of_plugins_hide_what_may_be_a_secret_by_any_name() {
        let text = shown(SETTINGS);
        assert!((1..=8).all(|number| !text.contains(&format!("s{number}"))), "{text}");
        for kept in ["keys = [\"alice\"]", "path = \"a.wasm\"", "max_tokens = 7", "x-team = \"blue\""] {
            assert!(text.contains(kept), "{kept} in {text}");
        }
        assert_eq!(restored(&text, SETTINGS), Ok(SETTINGS.to_owned()));
    }

    #[test]
    fn entries_of_one_name_are_told_apart() {
        let text = "[[providers]]\nid = \"a\"\nmore = [{ name = \"x\", key = \"1\" }, { name = \"x\", key = \"2\" }]\n";
        assert_eq!(restored(&shown(text), text), Ok(text.to_owned()));
    }

    #[test]
    fn a_mark_is_one_in_every_spelling() {
        for mark in [
            "\"[hidden]\"",
            "'[hidden]'",
            "\"\"\"[hidden]\"\"\"",
            "'''\n[hidden]'''",
            "\"\\u005bhidden\\u005D\"",
            "\"\"\"[hid\\\n  den]\"\"\"",
        ] {
            let edited = shown(TEXT).replace(MARK, mark);
            assert_eq!(restored(&edited, TEXT), Ok(TEXT.to_owned()), "{mark}");
            let list = format!("[[providers]]\nid = \"a\"\nheaders = {{ x = [\"new\", {mark}] }}\n");
            assert_eq!(restored(&list, TEXT), Err("providers[a].headers.x".into()), "{mark}");
        }
    }

    #[test]
    fn a_mark_never_takes_the_secret_of_another_entry() {
        let entries = |names: &str| -> String {
            names
                .chars()
                .map(|name| {
                    format!(
                        "[[providers]]\n{}key = \"s-{name}\"\n",
                        match name {
                            '-' => String::new(),
                            name => format!("id = \"{}\"\n", name.to_ascii_lowercase()),
                        }
                    )
                })
                .collect()
        };
        let check = |before: &str, after: &str, expected: bool| {
            let (known, new) = (entries(before), entries(after));
            let back = restored(&shown(&new), &known);
            assert_eq!(back.is_ok(), expected, "{before} {after} {back:?}");
            assert!(!expected || back.as_ref() == Ok(&new), "{before} {after} {back:?}");
        };
        check("abc", "cab", true);
        check("abc", "c", true);
        check("ab", "az", false);
        // Two of one name, and some without one: by their places, until one comes or goes.
        check("aAb", "baA", true);
        check("aAb", "Ab", false);
        check("a--", "--a", true);
        check("a--", "a-", false);
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
