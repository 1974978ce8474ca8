//! Adapters of a pool: listed, added and removed while its workers run.

use std::time::{Duration, Instant};

use anyhow::bail;
use hyper::Method;
use serde_json::{Value, json};

use super::arguments::{Adapters, AdaptersCommand, How};
use super::client::{Client, encoded, query};
use super::columns::ADAPTERS;
use super::commands::{Show, all, applied};

/// Interval of looks at an adapter that is being loaded.
const LOOK: Duration = Duration::from_millis(200);

/// Lists the adapters of a pool, or changes one.
pub(super) async fn adapters(client: &Client, asked: &Adapters, show: Show) -> anyhow::Result<()> {
    let of = |pool: &str| format!("/admin/v1/pools/{}/adapters", encoded(pool));
    match &asked.command {
        None | Some(AdaptersCommand::List { .. }) => {
            let mut pools = match &asked.command {
                Some(AdaptersCommand::List { pool: Some(pool) }) => vec![pool.clone()],
                _ => {
                    let pools = all(client, "/admin/v1/pools", &[]).await?;
                    pools.iter().filter_map(|pool| pool["id"].as_str().map(str::to_owned)).collect()
                }
            };
            // One that is being replaced is listed twice.
            pools.dedup();
            let mut rows = Vec::new();
            for pool in pools {
                rows.extend(all(client, &of(&pool), &[]).await?);
            }
            show.rows(&rows, ADAPTERS, "no adapters");
            Ok(())
        }
        Some(AdaptersCommand::Add { pool, name, path, replace, wait, how }) => {
            let absolute = std::path::absolute(path)?.display().to_string();
            let place = format!("{}/{}", of(pool), encoded(name));
            let (method, url, body) = match replace {
                true => (Method::PUT, place.clone(), json!({ "path": absolute })),
                false => (Method::POST, of(pool), json!({ "name": name, "path": absolute })),
            };
            let done = changed(client, (method, url), Some(&body), how).await?;
            let adapter = loaded(client, &place, Duration::from_secs(*wait)).await?;
            match show.json {
                true => show.one(&json!({ "adapter": adapter, "config": done["config"] })),
                false => show.rows(std::slice::from_ref(&adapter), ADAPTERS, ""),
            }
            let failures = adapter["failures"].as_array().into_iter().flatten();
            let lines: Vec<String> =
                failures.map(|failure| format!("{}: {}", failure["worker"], failure["reason"])).collect();
            if !lines.is_empty() {
                bail!("the config names the adapter, and workers cannot load it:\n{}", lines.join("\n"));
            }
            Ok(())
        }
        Some(AdaptersCommand::Remove { pool, name, how }) => {
            let place = format!("{}/{}", of(pool), encoded(name));
            let done = changed(client, (Method::DELETE, place), None, how).await?;
            match show.json {
                true => show.one(&done),
                false => applied(show, &done["config"]),
            }
            Ok(())
        }
    }
}

async fn changed(
    client: &Client,
    (method, path): (Method, String),
    body: Option<&Value>,
    How { note, expect }: &How,
) -> anyhow::Result<Value> {
    let path = path + &query(&[("note", Some(note.clone()).filter(|note| !note.is_empty()))]);
    client.change_at(method, &path, body, expect.as_deref()).await
}

/// The adapter once its workers have it or cannot load it, or as it is after `patience`.
async fn loaded(client: &Client, place: &str, patience: Duration) -> anyhow::Result<Value> {
    let until = Instant::now() + patience;
    loop {
        let adapter = client.get(place).await?;
        if adapter["state"] != "loading" || Instant::now() >= until {
            return Ok(adapter);
        }
        tokio::time::sleep(LOOK).await;
    }
}
