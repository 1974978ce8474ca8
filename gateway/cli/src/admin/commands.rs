//! Commands of `penstock admin`, one request each.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, bail};
use hyper::Method;
use penstock_base::clock;
use serde_json::{Map, Value, json};

use super::adapters::adapters;
use super::arguments::*;
use super::client::{Client, encoded, query};
use super::columns::*;
use super::dry_run::dry_run;
use super::entries::{entry, shown_entry};
use super::explain::explain;
use super::keys::keys;
use super::stored::{batches, files};
use super::table::{fields, table};
use crate::keys::time_or_date;

/// Largest config that is read, in bytes.
pub(super) const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// Format of answers.
#[derive(Clone, Copy)]
pub(super) struct Show {
    pub(super) json: bool,
}

impl Show {
    pub(super) fn one(self, value: &Value) {
        match self.json {
            true => println!("{value:#}"),
            false => print!("{}", fields(value)),
        }
    }

    pub(super) fn rows(self, rows: &[Value], columns: &[(&str, &str)], none: &str) {
        match (self.json, rows) {
            (true, _) => println!("{:#}", Value::from(rows)),
            (false, []) => println!("{none}"),
            (false, _) => print!("{}", table(rows, columns)),
        }
    }
}

/// Runs a command.
pub(super) async fn run(client: &Client, command: &AdminCommand, json: bool) -> anyhow::Result<()> {
    let show = Show { json };
    match command {
        AdminCommand::Status => show.one(&client.get("/admin/v1/status").await?),
        AdminCommand::Health => show.one(&client.get("/admin/v1/health").await?),
        AdminCommand::Whoami => show.one(&client.get("/admin/v1/whoami").await?),
        // No gateway is asked: the key has been printed.
        AdminCommand::Key => {}
        AdminCommand::Models(asked) => one(client, show, "models", asked, (MODELS, "no models")).await?,
        AdminCommand::Routes(asked) => match (entry(client, show, "models", asked).await?, asked.name()) {
            (true, _) => {}
            (false, None) => {
                show.rows(&all(client, "/admin/v1/config/models", &[]).await?, ROUTES, "no routes");
            }
            (false, Some(name)) => shown_entry(client, show, "models", name).await?,
        },
        AdminCommand::Providers(asked) => one(client, show, "providers", asked, (PROVIDERS, "no providers")).await?,
        AdminCommand::Plugins(asked) => match asked.split() {
            Ok(trial) => dry_run(client, trial, show).await?,
            Err(asked) => match (entry(client, show, "plugins", &asked).await?, asked.name()) {
                (true, _) => {}
                (false, None) => show.rows(&all(client, "/admin/v1/plugins", &[]).await?, PLUGINS, "no plugins"),
                (false, Some(name)) => shown_entry(client, show, "plugins", name).await?,
            },
        },
        AdminCommand::Limits(asked) if entry(client, show, "limits", asked).await? => {}
        AdminCommand::Limits(asked) => match asked.name() {
            None => show.rows(&all(client, "/admin/v1/limits", &[]).await?, LIMITS, "no limits"),
            Some(id) => {
                let path = format!("/admin/v1/limits/{}/counters", encoded(id));
                show.rows(&all(client, &path, &[]).await?, COUNTERS, "no counter of this limit is in use");
            }
        },
        AdminCommand::Requests(asked) => requests(client, asked, show).await?,
        AdminCommand::Workers(asked) => workers(client, asked, show).await?,
        AdminCommand::Pools(asked) => pools(client, asked, show).await?,
        AdminCommand::Adapters(asked) => adapters(client, asked, show).await?,
        AdminCommand::Decisions { pool, limit } => {
            let path = format!("/admin/v1/pools/{}/decisions?limit={limit}", encoded(pool));
            let page = client.get(&path).await?;
            show.rows(page["data"].as_array().map_or(&[], Vec::as_slice), DECISIONS, "nothing was decided yet");
        }
        AdminCommand::Explain(asked) => explain(client, asked, show).await?,
        AdminCommand::Batches(asked) => batches(client, asked, show).await?,
        AdminCommand::Files(asked) => files(client, asked, show).await?,
        AdminCommand::Keys(asked) => keys(client, asked, show).await?,
        AdminCommand::Teams(asked) => owners(client, "teams", asked, show).await?,
        AdminCommand::Users(asked) => owners(client, "users", asked, show).await?,
        AdminCommand::Usage(asked) => usage(client, asked, show).await?,
        AdminCommand::Config(asked) => config(client, asked, show).await?,
        AdminCommand::LogLevel { level: None } => show.one(&client.get("/admin/v1/log-level").await?),
        AdminCommand::LogLevel { level: Some(level) } => {
            let body = json!({ "level": level });
            show.one(&client.change(Method::PUT, "/admin/v1/log-level", Some(&body), None).await?);
        }
        AdminCommand::Audit(asked) => audit(client, asked, show).await?,
        AdminCommand::Metrics => text(client, "/admin/v1/metrics").await?,
        AdminCommand::Openapi => text(client, "/admin/v1/openapi.json").await?,
    }
    Ok(())
}

/// All items of a list, fetched page by page, up to as many as the client takes; a list that is cut says so on standard error.
pub(crate) async fn all(client: &Client, path: &str, filter: &[(&str, Option<String>)]) -> anyhow::Result<Vec<Value>> {
    let (mut rows, mut after) = (Vec::new(), None);
    loop {
        let mut pairs = filter.to_vec();
        pairs.push(("after", after));
        let mut page = client.get(&format!("{path}{}", query(&pairs))).await?;
        if let Value::Array(items) = page["data"].take() {
            rows.extend(items);
        }
        after = page["next"].as_str().map(str::to_owned);
        let most = client.rows_max();
        if rows.len() > most || (after.is_some() && rows.len() == most) {
            eprintln!("the list is longer: these are the first {most} rows (--rows COUNT shows more)");
            rows.truncate(most);
            after = None;
        }
        if after.is_none() {
            return Ok(rows);
        }
    }
}

/// Lists things that have targets (models, providers), or shows one of them.
async fn one(
    client: &Client,
    show: Show,
    kind: &str,
    asked: &One,
    (columns, none): (&[(&str, &str)], &str),
) -> anyhow::Result<()> {
    if entry(client, show, kind, asked).await? {
        return Ok(());
    }
    match asked.name() {
        None => show.rows(&all(client, &format!("/admin/v1/{kind}"), &[]).await?, columns, none),
        Some(name) => with_targets(show, &client.get(&format!("/admin/v1/{kind}/{}", encoded(name))).await?),
    }
    Ok(())
}

async fn text(client: &Client, path: &str) -> anyhow::Result<()> {
    let answer = client.text(path).await?;
    print!("{}", String::from_utf8_lossy(&answer.body));
    Ok(())
}

fn with_targets(show: Show, value: &Value) {
    if show.json {
        return show.one(value);
    }
    let mut value = value.clone();
    let targets = value.as_object_mut().and_then(|fields| fields.remove("targets"));
    show.one(&value);
    if let Some(Value::Array(targets)) = targets.filter(|targets| targets.as_array().is_some_and(|all| !all.is_empty()))
    {
        println!();
        show.rows(&targets, TARGETS, "");
    }
}

async fn requests(client: &Client, asked: &Requests, show: Show) -> anyhow::Result<()> {
    let (ids, filter) = match &asked.command {
        Some(RequestsCommand::Cancel { ids }) => (ids.as_slice(), None),
        Some(RequestsCommand::List(filter)) => (&[][..], Some(filter)),
        None => (&[][..], Some(&asked.filter)),
    };
    if let Some(RequestsFilter { key, team, model }) = filter {
        let filter = [("key", key.clone()), ("team", team.clone()), ("model", model.clone())];
        show.rows(&all(client, "/admin/v1/requests", &filter).await?, REQUESTS, "no requests are in flight");
    }
    for id in ids {
        let path = format!("/admin/v1/requests/{}/cancel", encoded(id));
        let done = client.change(Method::POST, &path, None, None).await.with_context(|| id.clone())?;
        if show.json {
            show.one(&done);
        } else {
            println!("{id} is cancelled");
        }
    }
    Ok(())
}

async fn workers(client: &Client, asked: &Workers, show: Show) -> anyhow::Result<()> {
    let (name, action, body) = match &asked.command {
        None | Some(WorkersCommand::List) => {
            show.rows(&all(client, "/admin/v1/workers", &[]).await?, WORKERS, "no workers");
            return Ok(());
        }
        Some(WorkersCommand::Show { name }) => {
            show.one(&client.get(&format!("/admin/v1/workers/{}", encoded(name))).await?);
            return Ok(());
        }
        Some(WorkersCommand::Drain { name }) => (name, "drain", None),
        Some(WorkersCommand::Resume { name }) => (name, "resume", None),
        Some(WorkersCommand::Role { name, role }) => (name, "role", Some(json!({ "role": role }))),
        Some(WorkersCommand::Restart { name, patience }) => {
            (name, "restart", Some(json!({ "patience_seconds": patience })))
        }
    };
    let path = format!("/admin/v1/workers/{}/{action}", encoded(name));
    let worker = client.change(Method::POST, &path, body.as_ref(), None).await?;
    show.rows(&[worker], WORKERS, "");
    Ok(())
}

async fn pools(client: &Client, asked: &Pools, show: Show) -> anyhow::Result<()> {
    let Some(PoolsCommand::Replicas { pool, min, max, pause, resume }) = &asked.command else {
        show.rows(&all(client, "/admin/v1/pools", &[]).await?, POOLS, "no pools");
        return Ok(());
    };
    let mut body = json!({ "min": min, "max": max });
    if *pause || *resume {
        body["paused"] = json!(pause);
    }
    let path = format!("/admin/v1/pools/{}/replicas", encoded(pool));
    show.rows(&[client.change(Method::POST, &path, Some(&body), None).await?], POOLS, "");
    Ok(())
}

/// Fields of a body that have a value.
pub(super) fn present(body: Value) -> Value {
    let Value::Object(fields) = body else { return body };
    fields.into_iter().filter(|(_, value)| !value.is_null()).collect::<Map<_, _>>().into()
}

async fn owners(client: &Client, kind: &str, asked: &Owners, show: Show) -> anyhow::Result<()> {
    let path = format!("/admin/v1/{kind}");
    let one = |id: &str| format!("{path}/{}", encoded(id));
    let asked = asked.command.as_ref().unwrap_or(&OwnersCommand::List);
    match asked {
        OwnersCommand::List => {
            show.rows(&all(client, &path, &[]).await?, OWNERS, "none; those of the config are in the config")
        }
        OwnersCommand::Show { id } => show.one(&client.get(&one(id)).await?),
        OwnersCommand::Create(new) => {
            let body = json!({
                "id": new.id, "name": new.name, "team": new.team, "allowed": new.allowed.json(), "limits": new.under.limits, "tags": new.under.tags,
            });
            show.one(&client.change(Method::POST, &path, Some(&present(body)), None).await?);
        }
        OwnersCommand::Block { id } | OwnersCommand::Unblock { id } => {
            let body = json!({ "blocked": matches!(asked, OwnersCommand::Block { .. }) });
            show.one(&client.change(Method::PATCH, &one(id), Some(&body), None).await?);
        }
        OwnersCommand::Delete { id } => {
            client.change(Method::DELETE, &one(id), None, None).await?;
            println!("{id} is removed");
        }
    }
    Ok(())
}

/// Unix seconds of a date, a date and time, or a time ago.
fn past(text: &str) -> anyhow::Result<u64> {
    if let Some(moment) = clock::parse(text) {
        return Ok(moment);
    }
    let ago = time_or_date(text)?;
    Ok(clock::unix_seconds().saturating_sub(ago.as_secs()))
}

async fn usage(client: &Client, asked: &Usage, show: Show) -> anyhow::Result<()> {
    let mut filter = vec![
        ("from", Some(past(&asked.from)?.to_string())),
        ("until", asked.until.as_deref().map(past).transpose()?.map(|until| until.to_string())),
        ("key", asked.key.clone()),
        ("team", asked.team.clone()),
        ("user", asked.user.clone()),
        ("model", asked.model.clone()),
        ("provider", asked.provider.clone()),
        ("tag", asked.tag.clone()),
    ];
    if asked.requests {
        show.rows(&all(client, "/admin/v1/usage/requests", &filter).await?, ENTRIES, "no requests");
        return Ok(());
    }
    filter.push(("group", Some(asked.group.clone())));
    if asked.csv {
        return csv(client, filter).await;
    }
    let rows = all(client, "/admin/v1/usage", &filter).await?;
    let groups: Vec<_> = asked.group.split(',').filter(|group| !group.is_empty()).collect();
    let paths: Vec<_> = groups
        .iter()
        .map(|group| format!("groups.{group}{}", if matches!(*group, "day" | "hour") { "*" } else { "" }))
        .collect();
    let mut columns: Vec<(&str, &str)> = groups.iter().copied().zip(paths.iter().map(String::as_str)).collect();
    columns.extend_from_slice(SUMS);
    show.rows(&rows, &columns, "nothing was used in that time");
    Ok(())
}

/// Prints all pages as CSV, with one line of names.
async fn csv(client: &Client, mut filter: Vec<(&str, Option<String>)>) -> anyhow::Result<()> {
    filter.extend([("limit", Some("1000".to_owned())), ("after", None)]);
    let mut skip = 0;
    loop {
        let answer = client.text(&format!("/admin/v1/usage.csv{}", query(&filter))).await?;
        let text = String::from_utf8_lossy(&answer.body);
        text.split_inclusive('\n').skip(skip).for_each(|line| print!("{line}"));
        let Some(next) = answer.next else { return Ok(()) };
        skip = 1;
        filter.pop();
        filter.push(("after", Some(next)));
    }
}

/// Text of a file, or of the standard input.
pub(super) fn read(file: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let input: Box<dyn Read> = match file.to_str() {
        Some("-") => Box::new(std::io::stdin()),
        _ => Box::new(std::fs::File::open(file).with_context(|| file.display().to_string())?),
    };
    input.take(CONFIG_BYTES_MAX + 1).read_to_string(&mut text).with_context(|| file.display().to_string())?;
    if text.len() as u64 > CONFIG_BYTES_MAX {
        bail!("{}: longer than {CONFIG_BYTES_MAX} bytes", file.display());
    }
    Ok(text)
}

async fn config(client: &Client, asked: &Config, show: Show) -> anyhow::Result<()> {
    match asked {
        Config::Show { version } => {
            let path = version
                .map_or_else(|| "/admin/v1/config".into(), |version| format!("/admin/v1/config/history/{version}"));
            let config = client.get(&path).await?;
            match show.json {
                true => show.one(&config),
                false => print!("{}", config["text"].as_str().unwrap_or_default()),
            }
        }
        Config::Validate { file } | Config::Diff { file } => {
            let body = json!({ "text": read(file)? });
            let verdict = client.change(Method::POST, "/admin/v1/config/validate", Some(&body), None).await?;
            judged(show, &verdict, matches!(asked, Config::Diff { .. }))?;
        }
        Config::Apply { file, note, expect } => {
            let body = json!({ "text": read(file)?, "note": note });
            applied(show, &client.change(Method::PUT, "/admin/v1/config", Some(&body), *expect).await?);
        }
        Config::Reload { note, .. } => {
            let body = json!({ "note": note });
            applied(show, &client.change(Method::POST, "/admin/v1/config/reload", Some(&body), None).await?);
        }
        Config::Rollback { version, note } => {
            let body = json!({ "version": version, "note": note });
            applied(show, &client.change(Method::POST, "/admin/v1/config/rollback", Some(&body), None).await?);
        }
        Config::History => show.rows(&all(client, "/admin/v1/config/history", &[]).await?, HISTORY, "no history"),
    }
    Ok(())
}

fn judged(show: Show, verdict: &Value, changes: bool) -> anyhow::Result<()> {
    if show.json {
        show.one(verdict);
    }
    if verdict["valid"] != true {
        let faults: Vec<_> = verdict["faults"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        bail!("the config cannot be used:\n{}", faults.join("\n"));
    }
    match (show.json, changes) {
        (true, _) => {}
        (false, true) => {
            show.rows(verdict["changes"].as_array().map_or(&[], Vec::as_slice), CHANGES, "nothing would change")
        }
        (false, false) => println!("nothing is wrong"),
    }
    Ok(())
}

/// Prints a config that was applied.
pub(super) fn applied(show: Show, done: &Value) {
    if show.json {
        return show.one(done);
    }
    show.rows(done["changes"].as_array().map_or(&[], Vec::as_slice), CHANGES, "nothing has changed");
    println!("version {} is in force", done["version"]);
    let list = |field: &str| -> Vec<String> {
        done[field].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let (pending, replacing) = (list("pending"), list("replacing"));
    if !pending.is_empty() {
        println!("these wait for an upgrade or a restart: {}", pending.join(", "));
    }
    if !replacing.is_empty() {
        println!("new workers of these pools are being made ready: {}", replacing.join(", "));
    }
    if done["persisted"] != true {
        println!("a restart comes up with the config file as it is: change it too (or set server.config_writes)");
    }
}

async fn audit(client: &Client, asked: &Audit, show: Show) -> anyhow::Result<()> {
    let asked = asked.filter();
    let filter = [
        ("actor", asked.actor.clone()),
        ("action", asked.action.clone()),
        ("target", asked.target.clone()),
        ("outcome", asked.outcome.clone()),
        ("from", asked.from.as_deref().map(past).transpose()?.map(|from| from.to_string())),
        ("limit", Some(asked.limit.to_string())),
    ];
    let page = client.get(&format!("/admin/v1/audit{}", query(&filter))).await?;
    show.rows(page["data"].as_array().map_or(&[], Vec::as_slice), EVENTS, "nothing");
    Ok(())
}
