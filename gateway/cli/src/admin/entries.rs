//! Entries of the config: shown, set and deleted one by one.

use anyhow::{Context, bail};
use hyper::Method;
use serde_json::{Map, Value, json};

use super::arguments::{How, One, OneCommand, SetEntry};
use super::client::{Client, encoded, query};
use super::commands::{Show, applied, read};

fn place(table: &str, name: &str) -> String {
    format!("/admin/v1/config/{table}/{}", encoded(name))
}

/// Does what is asked of an entry of the config; false: something else is asked.
pub(super) async fn entry(client: &Client, show: Show, table: &str, asked: &One) -> anyhow::Result<bool> {
    let (method, path, body, how) = match &asked.command {
        Some(OneCommand::Show { name, keys: true }) => {
            shown_entry(client, show, table, name).await?;
            return Ok(true);
        }
        Some(OneCommand::Set(set)) => {
            let (method, body) = wish(client, table, set).await?;
            (method, place(table, &set.name), Some(body), &set.how)
        }
        Some(OneCommand::Delete { name, how }) => (Method::DELETE, place(table, name), None, how),
        Some(OneCommand::List | OneCommand::Show { .. }) | None => return Ok(false),
    };
    let How { note, expect } = how;
    let path = path + &query(&[("note", Some(note.clone()).filter(|note| !note.is_empty()))]);
    let done = client.change_at(method, &path, body.as_ref(), expect.as_deref()).await?;
    if show.json {
        show.one(&done)
    } else {
        applied(show, &done["config"])
    }
    Ok(true)
}

/// Shows an entry as the config has it.
pub(super) async fn shown_entry(client: &Client, show: Show, table: &str, name: &str) -> anyhow::Result<()> {
    let entry = client.get(&place(table, name)).await?;
    show.one(if show.json { &entry } else { &entry["value"] });
    Ok(())
}

/// Method and body that set an entry: a patch of one that is there, all keys of one that is not.
async fn wish(client: &Client, table: &str, set: &SetEntry) -> anyhow::Result<(Method, Value)> {
    if let Some(file) = &set.file {
        let body: Map<String, Value> =
            serde_json::from_str(&read(file)?).with_context(|| format!("{} is no JSON object", file.display()))?;
        return Ok((Method::PUT, body.into()));
    }
    let mut body = json!({});
    for pair in &set.pairs {
        let (key, value) = pair.split_once('=').with_context(|| format!("{pair}: write KEY=VALUE"))?;
        put(&mut body, key, serde_json::from_str(value).unwrap_or_else(|_| Value::from(value)))?;
    }
    let entries = client.get(&format!("/admin/v1/config/{table}")).await?;
    let is_there = entries["data"].as_array().into_iter().flatten().any(|entry| entry["id"] == *set.name);
    if !is_there && set.pairs.is_empty() {
        bail!("there is no entry {:?} in {table}: --unset alone changes one that is there", set.name);
    }
    if is_there {
        for key in &set.unset {
            put(&mut body, key, Value::Null)?;
        }
    }
    Ok((if is_there { Method::PATCH } else { Method::PUT }, body))
}

/// Puts a value at a key; dots lead into tables.
fn put(body: &mut Value, key: &str, value: Value) -> anyhow::Result<()> {
    let mut place = body;
    for part in key.split('.') {
        if part.is_empty() {
            bail!("{key:?} is no key");
        }
        if !place.is_object() {
            bail!("{key}: a key above it has a value of its own here");
        }
        place = &mut place[part];
        if place.is_null() {
            *place = json!({});
        }
    }
    *place = value;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_lead_into_tables() {
        let mut body = json!({});
        for (key, value) in [("a", json!(1)), ("price.input", json!(2)), ("price.output", Value::Null)] {
            put(&mut body, key, value).expect("a key");
        }
        assert_eq!(body, json!({ "a": 1, "price": { "input": 2, "output": null } }));
        assert!(put(&mut body, "a.b", json!(1)).is_err() && put(&mut body, "a..b", json!(1)).is_err());
    }
}
