//! Differences of two config texts, table by table, for people and logs. Possible secrets are not shown.

use std::collections::BTreeMap;

use toml::{Table, Value};

use penstock_config::keys;

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

/// More such words in names that are none of the config's own.
const SECRET: &[&str] = &["bearer", "dsn", "passcode", "pwd"];
/// Parts of such words, which may be run together with others.
const WITHIN: &[&str] = &["credential", "passphrase", "passwd", "password", "secret"];
/// Words that end as those of secrets do, and are none.
const ANIMALS: &[&str] = &["donkey", "hockey", "jockey", "monkey", "turkey"];
/// Words that make a number of tokens of `token`, where the value is a number.
const COUNTS: &[&str] = &["count", "limit", "min", "num", "per"];

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

/// Returns true if a key names a place where a secret is, or a largest number.
fn is_place(key: &str) -> bool {
    key.ends_with("_env") || key.ends_with("_file") || key.ends_with("base_url") || key.starts_with("max_")
}

/// Returns true if the value of a key is hidden. Names of variables and files are shown, values in their place are not.
fn is_hidden(key: &str) -> bool {
    !is_place(key) && HIDDEN.iter().any(|part| key.split('_').any(|word| word == *part))
}

/// Returns true if a name that is none of the config's own looks like a secret's, in any spelling: `APIKey`, `db-password`,
/// `clientsecret`, `Credentials`, and header fields with credentials. Numbers of tokens are none (`tokens_per_minute`); a value
/// under such a name that is no number (`is_number`) may be a token for each of something.
pub fn is_secret_name(name: &str, is_number: bool) -> bool {
    let name = plain(name);
    let words = || name.split('_');
    let is_secret = |word: &str| {
        HIDDEN.contains(&word)
            || SECRET.contains(&word)
            || WITHIN.iter().any(|part| word.contains(part))
            || (word.ends_with("key") || word.ends_with("token")) && !ANIMALS.contains(&word)
    };
    let is_count = is_number
        && words().any(|word| COUNTS.contains(&word))
        && words().all(|word| word == "token" || !is_secret(word));
    is_credential(&name) || !is_count && !is_place(&name) && words().any(is_secret)
}

/// Returns true if the value of a key in the config's text is hidden. A name that the config does not know may be any
/// spelling of one, in a text that was refused for it. `is_number`: the value is a number.
pub(super) fn is_hidden_key(key: &str, is_number: bool) -> bool {
    is_hidden(key) || is_secret_name(key, is_number) && !keys::KEYS.iter().any(|known| known.name == key)
}

/// Returns true if the value of a plugin's setting, or of a name below it, is hidden. Plugins choose their names freely, so any
/// form of a name counts, and so do the URLs of `upstreams`. `is_number`: the value is a number.
pub(super) fn is_hidden_setting(name: &str, is_number: bool) -> bool {
    is_secret_name(name, is_number) || plain(name) == "upstream"
}

/// Returns true if a header field of that name, in the form of [`plain`], holds credentials.
fn is_credential(name: &str) -> bool {
    ["authorization", "proxy_authorization", "cookie", "set_cookie"].contains(&name)
}

/// Name in the form of the config's keys: small letters, `_` between words, words in the singular and without a number behind
/// them (`apiKey`, `API-Keys`, `APIKey2`: `api_key`).
pub fn plain(name: &str) -> String {
    let mut words = String::with_capacity(name.len());
    let (mut was_small, mut was_large) = (false, false);
    let mut rest = name.chars();
    while let Some(c) = rest.next() {
        // The last capital of a row begins a word, unless a plural ends there (`APIKey`, `URLs`).
        let mut next = rest.clone();
        let is_begin = next
            .next()
            .is_some_and(|one| one.is_lowercase() && (one != 's' || next.next().is_some_and(char::is_lowercase)));
        if c.is_uppercase() && (was_small || was_large && is_begin) {
            words.push('_');
        }
        (was_small, was_large) = (c.is_lowercase() || c.is_ascii_digit(), c.is_uppercase());
        words.extend(c.to_lowercase().map(|c| if c.is_alphanumeric() { c } else { '_' }));
    }
    let singular = |word: &str| match word.trim_end_matches(|c: char| c.is_ascii_digit()) {
        "headers" => "headers".to_owned(),
        word if word.ends_with("ss") => word.to_owned(),
        word => word.trim_end_matches('s').to_owned(),
    };
    words.split('_').map(singular).collect::<Vec<_>>().join("_")
}

fn shown(key: &str, value: &Value) -> Option<String> {
    if is_hidden_key(key, is_number(value)) || matches!(value, Value::Table(_)) || has_hidden(value) {
        return None;
    }
    Some(value.to_string().chars().take(SHOWN_MAX).collect())
}

fn is_number(value: &Value) -> bool {
    matches!(value, Value::Integer(_) | Value::Float(_))
}

/// Returns true if a table in the value has a hidden name.
fn has_hidden(value: &Value) -> bool {
    match value {
        Value::Table(table) => {
            table.iter().any(|(name, value)| is_hidden_key(name, is_number(value)) || has_hidden(value))
        }
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

    /// Spellings of a name of these words.
    fn spellings(words: &[&str]) -> Vec<String> {
        let large = |word: &str| word[..1].to_ascii_uppercase() + &word[1..];
        let (first, rest) = (words[0], &words[1..]);
        let joined =
            |with: &str, of: &dyn Fn(&str) -> String| words.iter().map(|word| of(word)).collect::<Vec<_>>().join(with);
        let camel: String = rest.iter().map(|word| large(word)).collect();
        let mut all = vec![first.to_owned() + &camel, large(first) + &camel, first.to_ascii_uppercase() + &camel];
        for with in ["_", "-", " ", ".", ""] {
            all.extend([joined(with, &str::to_owned), joined(with, &large), joined(with, &str::to_ascii_uppercase)]);
        }
        let numbered: Vec<_> = all.iter().map(|name| format!("{name}2")).collect();
        let plural: Vec<_> = all.iter().map(|name| format!("{name}s")).collect();
        [all, numbered, plural].concat()
    }

    #[test]
    fn secrets_are_known_by_their_names_in_any_spelling() {
        let secrets: &[&[&str]] = &[
            &["api", "key"],
            &["db", "password"],
            &["jwt", "secret"],
            &["access", "token"],
            &["aws", "secret", "access", "key"],
            &["client", "secret"],
            &["my", "api", "token"],
            &["auth", "credential"],
            &["credential"],
            &["passwd"],
            &["bearer"],
            &["passphrase"],
            &["ssh", "passphrase"],
            &["private", "key"],
            &["key"],
        ];
        for name in secrets.iter().flat_map(|words| spellings(words)) {
            assert!(is_secret_name(&name, false) && is_secret_name(&name, true), "{name}");
            let text = format!("[[plugins]]\nname = \"a\"\n[plugins.settings]\n\"{name}\" = \"geheim\"\n");
            assert!(!crate::reload::shown(&text).contains("geheim"), "{text}");
            // A text that was refused for the name of a key is in the history.
            let text = format!("[[providers]]\nid = \"a\"\n\"{name}\" = \"geheim\"\n");
            assert!(!crate::reload::shown(&text).contains("geheim") || is_known(&name), "{text}");
        }
        let numbers: &[&[&str]] = &[
            &["max", "tokens"],
            &["tokens", "per", "minute"],
            &["token", "count"],
            &["min", "tokens"],
            &["token", "limit"],
            &["tokens", "per", "team"],
        ];
        for words in numbers {
            let [snake, camel] = ["_", ""].map(|with| {
                let large = |(at, word): (usize, &&str)| {
                    if with.is_empty() && at > 0 {
                        word[..1].to_ascii_uppercase() + &word[1..]
                    } else {
                        (*word).to_owned()
                    }
                };
                words.iter().enumerate().map(large).collect::<Vec<_>>().join(with)
            });
            for name in [&snake, &camel] {
                assert!(!is_secret_name(name, true), "{name}");
                assert!(words[0] == "max" || is_secret_name(name, false), "{name}");
                let setting = |value: &str| {
                    let text = format!("[[plugins]]\nname = \"a\"\n[plugins.settings]\n{name} = {value}\n");
                    crate::reload::shown(&text)
                };
                assert!(setting("4711").contains("4711") && setting("4711.5").contains("4711.5"), "{name}");
                for value in ["\"geheim\"", "{ a = \"geheim\" }", "[\"geheim\"]", "[{ a = \"geheim\" }]"] {
                    assert!(words[0] == "max" || !setting(value).contains("geheim"), "{name} = {value}");
                }
            }
        }
        for name in [
            "tokenizer",
            "monkey",
            "keyboard",
            "keyword",
            "path",
            "address",
            "compass",
            "model",
            "api_key_env",
            "apiKeyFile",
            "author",
        ] {
            assert!(!is_secret_name(name, false), "{name}");
        }
    }

    fn is_known(name: &str) -> bool {
        keys::KEYS.iter().any(|key| key.name == name)
    }

    /// Keys that the config knows are hidden by whole words: no other spelling of them is a key.
    #[test]
    fn keys_of_the_config_are_hidden_by_their_words_alone() {
        assert!(keys::KEYS.iter().all(|key| is_hidden_key(key.name, false) == is_hidden(key.name)));
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
