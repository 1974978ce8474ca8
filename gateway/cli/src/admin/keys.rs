//! Keys that the gateway has issued, through the admin API: their command line, and one request for each command.

use anyhow::bail;
use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::{Map, Value, json};

use super::client::{Client, encoded};
use super::columns::KEYS;
use super::commands::{Show, all, present};
use crate::keys::{Wish, duration, moment};

#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Keys {
    #[command(subcommand)]
    command: Option<KeysCommand>,
    #[command(flatten)]
    filter: KeysFilter,
}

#[derive(Args, Clone, Debug)]
struct KeysFilter {
    /// Only keys of this team
    #[arg(long)]
    team: Option<String>,
    /// Only keys of this user
    #[arg(long)]
    user: Option<String>,
    /// Include revoked keys
    #[arg(long)]
    all: bool,
}

#[derive(Subcommand, Clone, Debug)]
enum KeysCommand {
    /// List issued keys
    List(KeysFilter),
    /// Show a key, without its text
    Show {
        /// Id of the key
        id: String,
    },
    /// Issue a key and show its text, only once
    Create(Box<Wish>),
    /// Change a key; what is not named stays as it is
    Set(Box<SetKey>),
    /// Rotate a key: show a new text, only once
    Rotate {
        /// Id of the key
        id: String,
        /// Time for which the old text stays valid beside the new one, as 30m, 12h, 7d
        #[arg(long, default_value = "1h", value_name = "TIME")]
        grace: String,
    },
    /// Revoke a key, and all keys made from it
    Revoke {
        /// Id of the key
        id: String,
    },
}

/// Changes of a key. A list is set whole, and an empty one ('') is none.
#[derive(Args, Clone, Debug)]
struct SetKey {
    /// Id of the key
    id: String,
    /// Display name of the key
    #[arg(long)]
    name: Option<String>,
    /// Team of the key; '': none
    #[arg(long)]
    team: Option<String>,
    /// Person or service that uses the key; '': none
    #[arg(long)]
    user: Option<String>,
    /// Models that the key may use; a trailing * matches any ending; '': all
    #[arg(long, value_delimiter = ',', value_name = "MODEL")]
    models: Option<Vec<String>>,
    /// Routes that the key may use, as /v1/chat/completions; '': all
    #[arg(long, value_delimiter = ',', value_name = "ROUTE")]
    routes: Option<Vec<String>>,
    /// APIs that the key may use: openai, anthropic, gemini, ollama; '': all
    #[arg(long, value_delimiter = ',', value_name = "DIALECT")]
    dialects: Option<Vec<String>>,
    /// Addresses and networks that may use the key, as 10.0.0.0/8; '': all
    #[arg(long, value_delimiter = ',', value_name = "NETWORK")]
    addresses: Option<Vec<String>>,
    /// Ids of `[[limits]]` that the key counts against; '': none
    #[arg(long, value_delimiter = ',', value_name = "LIMIT")]
    limits: Option<Vec<String>>,
    /// For the books; '': none
    #[arg(long, value_delimiter = ',', value_name = "TAG")]
    tags: Option<Vec<String>>,
    /// Expiry: a date, date and time, or a time from now as 12h, 90d; never: none
    #[arg(long, value_name = "WHEN")]
    expires: Option<String>,
}

/// Lists keys, shows one, or issues, changes, rotates or revokes one.
pub(super) async fn keys(client: &Client, asked: &Keys, show: Show) -> anyhow::Result<()> {
    let one = |id: &str| format!("/admin/v1/keys/{}", encoded(id));
    let listed = KeysCommand::List(asked.filter.clone());
    match asked.command.as_ref().unwrap_or(&listed) {
        KeysCommand::List(KeysFilter { team, user, all: revoked }) => {
            let revoked = (!revoked).then(|| "false".to_owned());
            let filter = [("team", team.clone()), ("user", user.clone()), ("revoked", revoked)];
            show.rows(&all(client, "/admin/v1/keys", &filter).await?, KEYS, "no keys");
        }
        KeysCommand::Show { id } => show.one(&client.get(&one(id)).await?),
        KeysCommand::Create(new) => {
            let expires = new.expires.as_deref().map(moment).transpose()?;
            let body = json!({
                "name": new.name, "team": new.team, "user": new.user, "parent": new.parent, "allowed": new.allowed.json(),
                "expires": expires, "limits": new.under.limits, "tags": new.under.tags,
            });
            issued(show, &client.change(Method::POST, "/admin/v1/keys", Some(&present(body)), None).await?);
        }
        KeysCommand::Set(set) => {
            let key = client.get(&one(&set.id)).await?;
            show.one(&client.change(Method::PATCH, &one(&set.id), Some(&change_of(set, &key)?), None).await?);
        }
        KeysCommand::Rotate { id, grace } => {
            let body = json!({ "grace_seconds": duration(grace)?.as_secs() });
            issued(show, &client.change(Method::POST, &format!("{}/rotate", one(id)), Some(&body), None).await?);
        }
        KeysCommand::Revoke { id } => {
            let key = client.change(Method::POST, &format!("{}/revoke", one(id)), None, None).await?;
            if show.json { show.one(&key) } else { println!("{id} is revoked") }
        }
    }
    Ok(())
}

/// Patch of a key as it was read, for that version of the key alone.
fn change_of(set: &SetKey, key: &Value) -> anyhow::Result<Value> {
    let list = |given: &Option<Vec<String>>| -> Option<Value> {
        given.as_ref().map(|all| all.iter().filter(|one| !one.is_empty()).cloned().collect::<Vec<_>>().into())
    };
    let or_none = |given: &Option<String>| -> Option<Value> {
        given.as_ref().map(|text| if text.is_empty() { Value::Null } else { text.clone().into() })
    };
    let mut body = Map::new();
    let mut allowed = key["allowed"].clone();
    let scopes =
        [("models", &set.models), ("routes", &set.routes), ("dialects", &set.dialects), ("addresses", &set.addresses)];
    for (name, given) in scopes {
        if let Some(given) = list(given) {
            allowed[name] = given;
            body.insert("allowed".into(), allowed.clone());
        }
    }
    let expires = match set.expires.as_deref() {
        Some("never") => Some(Value::Null),
        given => given.map(moment).transpose()?.map(Value::from),
    };
    let fields = [
        ("name", set.name.clone().map(Value::from)),
        ("team", or_none(&set.team)),
        ("user", or_none(&set.user)),
        ("limits", list(&set.limits)),
        ("tags", list(&set.tags)),
        ("expires", expires),
    ];
    body.extend(fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
    if body.is_empty() {
        bail!("nothing would change: name what is to change, as --limits, --models or --expires");
    }
    body.insert("expected_version".into(), key["version"].clone());
    Ok(body.into())
}

/// Prints a new key: the one moment at which its text is seen.
fn issued(show: Show, made: &Value) {
    if show.json {
        return show.one(made);
    }
    println!("{}", made["secret"].as_str().unwrap_or_default());
    let name = |field: &str| made["key"][field].as_str().unwrap_or_default().to_owned();
    eprintln!("This is the key {} ({}); it is not shown again.", name("id"), name("name"));
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser, Debug)]
    struct Line {
        #[command(flatten)]
        set: SetKey,
    }

    /// Patch that these words make of a key.
    fn change(words: &[&str]) -> anyhow::Result<Value> {
        let key = json!({ "version": 7, "allowed": { "models": ["a"], "routes": ["/v1/x"], "dialects": [], "addresses": [] } });
        change_of(&Line::try_parse_from([&["set", "key_1"][..], words].concat()).expect("a command").set, &key)
    }

    #[test]
    fn a_change_of_a_key_has_what_is_named() {
        let check = |words: &[&str], expected: Value| {
            let mut expected = expected;
            expected["expected_version"] = 7.into();
            assert_eq!(change(words).expect("a change"), expected, "{words:?}");
        };
        check(&["--limits", "x,y"], json!({ "limits": ["x", "y"] }));
        check(&["--limits", "", "--team", ""], json!({ "limits": [], "team": null }));
        check(&["--expires", "never"], json!({ "expires": null }));
        check(&["--expires", "1970-01-02"], json!({ "expires": 86_400 }));
        let allowed = json!({ "models": ["b", "c-*"], "routes": ["/v1/x"], "dialects": [], "addresses": [] });
        check(&["--models", "b,c-*"], json!({ "allowed": allowed }));
        let none = json!({ "models": [], "routes": [], "dialects": [], "addresses": [] });
        check(&["--models", "", "--routes", ""], json!({ "allowed": none }));
        assert!(change(&[]).is_err() && change(&["--expires", "soon"]).is_err());
    }
}
