//! Differences of two config texts, table by table, for people and logs. Possible secrets are not shown.

use std::collections::BTreeMap;

use toml::{Table, Value};

use super::fixed::{When, when};

/// Kind of a difference between two config texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The entry or key is only in the text after.
    Added,
    /// The entry or key is only in the text before.
    Removed,
    /// The key is in both texts, with different values.
    Changed,
}

/// One difference between two config texts: a key, or a whole entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Name of the config table, such as `server` or `providers`.
    pub table: String,
    /// Id or name of the entry, in tables with several entries.
    pub id: Option<String>,
    /// Key; `None`: the whole entry came or went.
    pub key: Option<String>,
    /// Kind of the difference: added, removed or changed.
    pub kind: Kind,
    /// Value before as text; `None`: none, or a possible secret.
    pub before: Option<String>,
    /// Value now as text; `None`: none, or a possible secret.
    pub after: Option<String>,
    /// Moment at which the changed key takes effect.
    pub when: When,
}

impl Change {
    /// Path `providers[acme].base_url`, with + or - in front of an entry that came or went.
    pub fn path(&self) -> String {
        let sign = match self.kind {
            Kind::Added => "+",
            Kind::Removed => "-",
            Kind::Changed => "",
        };
        let id = self.id.as_ref().map_or_else(String::new, |id| format!("[{id}]"));
        let key = self.key.as_ref().map_or_else(String::new, |key| format!(".{key}"));
        format!("{sign}{}{id}{key}", self.table)
    }
}

/// Longest value that is shown, in bytes.
const SHOWN_MAX: usize = 200;
/// Words in names of keys whose values are never shown, as they may be secrets.
const HIDDEN: &[&str] = &["digest", "headers", "key", "secret", "pepper", "token", "password", "url"];

/// Differences from `before` to `after`. A text that is no TOML counts as empty.
pub(super) fn between(before: &str, after: &str) -> Vec<Change> {
    let parse = |text: &str| text.parse::<Table>().unwrap_or_default();
    let mut out = Vec::new();
    tables("", &parse(before), &parse(after), &mut out);
    out
}

fn tables(prefix: &str, before: &Table, after: &Table, out: &mut Vec<Change>) {
    let mut names: Vec<_> = before.keys().chain(after.keys()).collect();
    names.sort();
    names.dedup();
    for name in names {
        let table = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let empty = Value::Table(Table::new());
        match (before.get(name).unwrap_or(&empty), after.get(name).unwrap_or(&empty)) {
            (old, new) if old.is_array() || new.is_array() => {
                let none = Vec::new();
                let (old, new) = (old.as_array().unwrap_or(&none), new.as_array().unwrap_or(&none));
                entries(&table, old, new, out);
            }
            (Value::Table(old), Value::Table(new)) => keys(&table, None, old, new, out),
            _ => {}
        }
    }
}

/// Differences of the entries of `[[table]]`, matched by their id or name, or by their place.
fn entries(table: &str, before: &[Value], after: &[Value], out: &mut Vec<Change>) {
    let named = |values: &[Value]| -> BTreeMap<String, Table> {
        let id = |at: usize, table: &Table| {
            let given = ["id", "name"].iter().find_map(|key| table.get(*key)?.as_str());
            given.map_or_else(|| format!("#{at}"), str::to_owned)
        };
        values
            .iter()
            .filter_map(Value::as_table)
            .enumerate()
            .map(|(at, table)| (id(at, table), table.clone()))
            .collect()
    };
    let (before, after) = (named(before), named(after));
    let whole = |id: &str, kind| Change {
        table: table.to_owned(),
        id: Some(id.to_owned()),
        key: None,
        kind,
        before: None,
        after: None,
        when: when(table, ""),
    };
    for (id, old) in &before {
        match after.get(id) {
            Some(new) => keys(table, Some(id), old, new, out),
            None => out.push(whole(id, Kind::Removed)),
        }
    }
    out.extend(after.keys().filter(|id| !before.contains_key(*id)).map(|id| whole(id, Kind::Added)));
}

fn keys(table: &str, id: Option<&str>, before: &Table, after: &Table, out: &mut Vec<Change>) {
    let mut names: Vec<_> = before.keys().chain(after.keys()).collect();
    names.sort();
    names.dedup();
    for name in names {
        let (old, new) = (before.get(name), after.get(name));
        if old == new {
            continue;
        }
        if id.is_none() && [old, new].into_iter().flatten().all(Value::is_table) {
            let table_of = |value: Option<&Value>| value.and_then(Value::as_table).cloned().unwrap_or_default();
            keys(&format!("{table}.{name}"), None, &table_of(old), &table_of(new), out);
            continue;
        }
        out.push(Change {
            table: table.to_owned(),
            id: id.map(str::to_owned),
            key: Some(name.clone()),
            kind: match (old, new) {
                (None, _) => Kind::Added,
                (_, None) => Kind::Removed,
                _ => Kind::Changed,
            },
            before: old.and_then(|value| shown(name, value)),
            after: new.and_then(|value| shown(name, value)),
            when: when(table, name),
        });
    }
}

/// Returns true if the value of a key is hidden. Names of variables and files are shown, values in their place are not.
pub fn is_hidden(key: &str) -> bool {
    let names = key.ends_with("_env") || key.ends_with("_file") || key.ends_with("base_url") || key.starts_with("max_");
    !names && HIDDEN.iter().any(|part| key.split('_').any(|word| word == *part))
}

/// Returns true if the value of a plugin's setting, or of a name below it, is hidden. Plugins choose their names freely, so any
/// form of a name counts (`apiKeys`, `API-Key`), and so do header fields with credentials and the URLs of `upstreams`.
pub(super) fn is_hidden_setting(name: &str) -> bool {
    let name = plain(name);
    is_credential(&name) || is_hidden(&name) || name == "upstream"
}

/// Returns true if a header field of that name, in the form of [`plain`], holds credentials.
pub fn is_credential(name: &str) -> bool {
    ["authorization", "proxy_authorization", "cookie", "set_cookie"].contains(&name)
}

/// Name in the form of the config's keys: small letters, `_` between words, words in the singular (`apiKey`, `API-Keys`: `api_key`).
pub fn plain(name: &str) -> String {
    let mut words = String::with_capacity(name.len());
    let mut was_small = false;
    for c in name.chars() {
        if c.is_uppercase() && was_small {
            words.push('_');
        }
        was_small = c.is_lowercase() || c.is_ascii_digit();
        words.extend(c.to_lowercase().map(|c| if c == '-' || c == ' ' { '_' } else { c }));
    }
    let singular = |word: &str| if word == "headers" { word.to_owned() } else { word.trim_end_matches('s').to_owned() };
    words.split('_').map(singular).collect::<Vec<_>>().join("_")
}

fn shown(key: &str, value: &Value) -> Option<String> {
    if is_hidden(key) || matches!(value, Value::Table(_)) || has_hidden(value) {
        return None;
    }
    Some(value.to_string().chars().take(SHOWN_MAX).collect())
}

/// Returns true if a table in the value has a hidden name.
fn has_hidden(value: &Value) -> bool {
    match value {
        Value::Table(table) => table.iter().any(|(name, value)| is_hidden(name) || has_hidden(value)),
        Value::Array(items) => items.iter().any(has_hidden),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(before: &str, after: &str) -> Vec<String> {
        between(before, after).iter().map(Change::path).collect()
    }

    #[test]
    fn differences_are_named() {
        let before = "[server]\nlisten = \"1\"\n[server.tls]\nkey = \"a\"\n[[keys]]\nid = \"a\"\ndigest = \"00\"\n[[keys]]\nid = \"b\"\n";
        let after = "[server]\nlisten = \"2\"\nexplain = true\n[server.tls]\nkey = \"b\"\n[[keys]]\nid = \"c\"\n[[keys]]\nid = \"a\"\ndigest = \"11\"\n";
        assert_eq!(
            paths(before, after),
            ["keys[a].digest", "-keys[b]", "+keys[c]", "+server.explain", "server.listen", "server.tls.key"]
        );
        assert_eq!(paths(before, before), Vec::<String>::new());
        assert_eq!(paths(before, "# nothing"), ["-keys[a]", "-keys[b]", "-server.listen", "-server.tls.key"]);
        let listen = between(before, after).into_iter().find(|change| change.key.as_deref() == Some("listen"));
        assert_eq!(listen.map(|change| change.when), Some(When::Restart));
    }

    #[test]
    fn secrets_are_not_shown() {
        let text = |secret: &str| {
            format!(
                "[[providers]]\nid = \"a\"\nheaders = {{ x = \"{secret}\" }}\nkey_env = \"NAME_{}\"\n[[keys]]\nid = \"k\"\ndigest = \"{secret}\"\n\
                 [auth]\npepper = \"{secret}\"\nadmin_token = \"{secret}\"\n[redis]\nurl = \"redis://:{secret}@h\"\n",
                secret.len()
            )
        };
        let changes = between(&text("geheim"), &text("secret!"));
        assert!(changes.len() >= 5, "{changes:?}");
        assert!(
            !format!("{changes:?}").contains("geheim") && !format!("{changes:?}").contains("secret!"),
            "{changes:?}"
        );
        assert!(format!("{changes:?}").contains("NAME_6"));
    }
}
