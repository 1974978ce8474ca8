//! `penstock keys`: issued API keys. The command works on the config's store directly, whether a gateway runs or not;
//! gateways see a change within a second.

use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use penstock_auth::{Desk, Issued, NewKey, Standing};
use penstock_base::clock;
use penstock_config::Snapshot;
use penstock_proxy::stored;
use penstock_store::{KeyFilter, KeyId, KeyRecord, Listing, Order, Page};
use serde_json::{Value, json};

use crate::serve::ConfigArgs;

const EXAMPLES: &str = "\
Examples:
  penstock keys create --name search --team search --models 'chat-*' --expires 90d
  penstock keys list
  penstock keys rotate key_… --grace 1d
  penstock keys revoke key_…

A key is shown once, when it is created or rotated. Keys of the config file are not listed here.";

/// Keys read from the store at once.
const PAGE: u32 = 100;
/// Most keys that are listed.
const LISTED_MAX: usize = 100_000;

/// `penstock keys`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct KeysArgs {
    #[command(subcommand)]
    command: Option<KeysCommand>,
    #[command(flatten)]
    list: ListArgs,
}

#[derive(Subcommand, Clone, Debug)]
enum KeysCommand {
    /// Issue a key and show its text, only once
    Create(Box<CreateArgs>),
    /// List issued keys
    List(ListArgs),
    /// Show a key, without its text
    Show(OneArgs),
    /// Rotate a key: show a new text, only once
    Rotate(RotateArgs),
    /// Revoke a key, and all keys made from it
    Revoke(OneArgs),
}

/// Where the keys are.
#[derive(Args, Clone, Debug)]
struct Place {
    /// Config file of the gateway
    #[arg(long, short, value_name = "FILE", env = "PENSTOCK_CONFIG")]
    config: Option<std::path::PathBuf>,
    /// State folder of the gateway [default: ~/.local/state/penstock]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<std::path::PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Clone, Debug)]
struct CreateArgs {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    wish: Wish,
}

/// A key that is wished for, here and in `penstock admin keys create`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Wish {
    /// Display name of the key
    #[arg(long, default_value = "")]
    pub(crate) name: String,
    /// Team of the key: one of `[[teams]]`, or one made by the admin API
    #[arg(long)]
    pub(crate) team: Option<String>,
    /// Person or service that uses the key
    #[arg(long)]
    pub(crate) user: Option<String>,
    /// Parent key: the new key may do no more than its parent, and is revoked with it
    #[arg(long, value_name = "KEY_ID")]
    pub(crate) parent: Option<String>,
    #[command(flatten)]
    pub(crate) allowed: Allowed,
    /// Expiry: a date, date and time, or a time from now as 12h, 90d
    #[arg(long, value_name = "WHEN")]
    pub(crate) expires: Option<String>,
    #[command(flatten)]
    pub(crate) under: Under,
}

/// What it counts against.
#[derive(Args, Clone, Debug)]
pub(crate) struct Under {
    /// Ids of `[[limits]]` that the key counts against
    #[arg(long, value_delimiter = ',', value_name = "LIMIT")]
    pub(crate) limits: Vec<String>,
    /// For the books
    #[arg(long, value_delimiter = ',', value_name = "TAG")]
    pub(crate) tags: Vec<String>,
}

/// What it may do; nothing said: everything.
#[derive(Args, Clone, Debug)]
pub(crate) struct Allowed {
    /// Models that the key may use; a trailing * matches any ending
    #[arg(long, value_delimiter = ',', value_name = "MODEL")]
    pub(crate) models: Vec<String>,
    /// Routes that the key may use, as /v1/chat/completions
    #[arg(long, value_delimiter = ',', value_name = "ROUTE")]
    pub(crate) routes: Vec<String>,
    /// APIs that the key may use: openai, anthropic, gemini, ollama
    #[arg(long, value_delimiter = ',', value_name = "DIALECT")]
    pub(crate) dialects: Vec<String>,
    /// Addresses and networks that may use the key, as 10.0.0.0/8
    #[arg(long, value_delimiter = ',', value_name = "NETWORK")]
    pub(crate) addresses: Vec<String>,
}

impl Allowed {
    /// JSON in the form that the admin API takes.
    pub(crate) fn json(&self) -> Value {
        json!({ "models": self.models, "routes": self.routes, "dialects": self.dialects, "addresses": self.addresses })
    }
}

#[derive(Args, Clone, Debug)]
struct ListArgs {
    #[command(flatten)]
    place: Place,
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

#[derive(Args, Clone, Debug)]
struct OneArgs {
    #[command(flatten)]
    place: Place,
    /// Id of the key
    #[arg(value_name = "KEY_ID")]
    id: String,
}

#[derive(Args, Clone, Debug)]
struct RotateArgs {
    #[command(flatten)]
    one: OneArgs,
    /// Time for which the old text stays valid beside the new one, as 30m, 12h, 7d
    #[arg(long, default_value = "1h", value_name = "TIME")]
    grace: String,
}

/// Runs the command of `penstock keys`.
pub(crate) fn run(args: &KeysArgs) -> anyhow::Result<()> {
    let listed = KeysCommand::List(args.list.clone());
    let command = args.command.as_ref().unwrap_or(&listed);
    let place = match command {
        KeysCommand::Create(args) => &args.place,
        KeysCommand::List(args) => &args.place,
        KeysCommand::Show(args) | KeysCommand::Revoke(args) => &args.place,
        KeysCommand::Rotate(args) => &args.one.place,
    };
    // A store has threads of its own, and is not opened on one of a runtime.
    let desk = desk(place)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            KeysCommand::Create(args) => create(&desk, args).await,
            KeysCommand::List(args) => list(&desk, args).await,
            KeysCommand::Show(args) => {
                let key = desk.show(&id(&args.id)?).await?;
                show(place, &judged(&desk, key).await?)
            }
            KeysCommand::Rotate(args) => {
                let grace = duration(&args.grace)?;
                issued(place, &desk.rotate(&id(&args.one.id)?, grace, clock::unix_seconds()).await?)
            }
            KeysCommand::Revoke(args) => {
                let key = desk.revoke(&id(&args.id)?, clock::unix_seconds()).await?;
                if place.json {
                    return show(place, &judged(&desk, key).await?);
                }
                println!("{} is revoked", key.id);
                Ok(())
            }
        }
    })
}

async fn create(desk: &Desk, args: &CreateArgs) -> anyhow::Result<()> {
    let mut wish = NewKey {
        name: args.wish.name.clone(),
        team: args.wish.team.clone(),
        user: args.wish.user.clone(),
        parent: args.wish.parent.as_deref().map(id).transpose()?,
        limits: args.wish.under.limits.clone(),
        tags: args.wish.under.tags.clone(),
        ..NewKey::default()
    };
    wish.scope.models.clone_from(&args.wish.allowed.models);
    wish.scope.routes.clone_from(&args.wish.allowed.routes);
    wish.scope.dialects.clone_from(&args.wish.allowed.dialects);
    wish.scope.addresses =
        args.wish.allowed.addresses.iter().map(|text| network(text)).collect::<anyhow::Result<_>>()?;
    wish.scope.expires = args.wish.expires.as_deref().map(moment).transpose()?;
    issued(&args.place, &desk.create(wish, clock::unix_seconds()).await?)
}

fn network(text: &str) -> anyhow::Result<ipnet::IpNet> {
    let address = || text.parse().ok().map(|address: std::net::IpAddr| address.into());
    text.parse().ok().or_else(address).with_context(|| format!("{text:?} is neither an address nor a network"))
}

async fn list(desk: &Desk, args: &ListArgs) -> anyhow::Result<()> {
    let revoked = if args.all { None } else { Some(false) };
    let filter = KeyFilter { team: args.team.clone(), user: args.user.clone(), parent: None, revoked };
    let mut keys: Vec<KeyRecord> = Vec::new();
    loop {
        let after = keys.last().map(|key| key.id.to_string());
        let page = Page { after, limit: PAGE, order: Order::Ascending };
        let Listing { items, more } = desk.list(&filter, &page).await?;
        keys.extend(items);
        if !more || keys.len() >= LISTED_MAX {
            break;
        }
    }
    let standings = desk.standings(&keys, clock::unix_seconds()).await?;
    let keys: Vec<(KeyRecord, Standing)> = keys.into_iter().zip(standings).collect();
    if args.place.json {
        println!("{}", Value::from(keys.iter().map(document).collect::<Vec<_>>()));
        return Ok(());
    }
    if keys.is_empty() {
        println!("no keys; penstock keys create makes one");
        return Ok(());
    }
    println!("{:<29} {:<20} {:<14} {:<11} {:<21} state", "id", "name", "team", "ends with", "expires");
    for (key, standing) in keys {
        let expires = key.expires.map_or_else(|| "-".into(), clock::format);
        let (team, hint) = (key.team.as_deref().unwrap_or("-"), format!("…{}", key.hint));
        println!(
            "{:<29} {:<20} {:<14} {:<11} {:<21} {}",
            key.id.as_str(),
            key.name,
            team,
            hint,
            expires,
            standing.name()
        );
    }
    Ok(())
}

async fn judged(desk: &Desk, key: KeyRecord) -> anyhow::Result<(KeyRecord, Standing)> {
    let standing = desk.standings(std::slice::from_ref(&key), clock::unix_seconds()).await?.remove(0);
    Ok((key, standing))
}

/// Desk of keys, made of the config's store and rules.
fn desk(place: &Place) -> anyhow::Result<Desk> {
    let args = ConfigArgs { config: place.config.clone(), state_dir: place.state_dir.clone(), ..ConfigArgs::default() };
    let config: Snapshot = args.load_beside(&["store", "auth"])?;
    let store = stored::open(&config).context("the store")?;
    Ok(Desk::beside(store, &config.auth_settings()))
}

fn id(text: &str) -> anyhow::Result<KeyId> {
    KeyId::parse(text).with_context(|| format!("{text:?} is not the id of an issued key: those begin with key_"))
}

/// Prints a new key: the one moment at which its text is seen.
fn issued(place: &Place, issued: &Issued) -> anyhow::Result<()> {
    if place.json {
        let mut document = document(&(issued.record.clone(), Standing::Good));
        document["key"] = issued.secret.expose().into();
        println!("{document}");
        return Ok(());
    }
    println!("{}", issued.secret.expose());
    eprintln!("This is the key {} ({}); it is not shown again.", issued.record.id, issued.record.name);
    if let Some(previous) = &issued.record.previous {
        eprintln!("The old one is good until {}.", clock::format(previous.until));
    }
    Ok(())
}

fn show(place: &Place, key: &(KeyRecord, Standing)) -> anyhow::Result<()> {
    let document = document(key);
    if place.json {
        println!("{document}");
        return Ok(());
    }
    for (name, value) in document.as_object().into_iter().flatten() {
        let text = match value {
            Value::Null => continue,
            Value::Array(all) if all.is_empty() => continue,
            Value::Array(all) => all.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", "),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        println!("{name:<12} {text}");
    }
    Ok(())
}

fn document((key, standing): &(KeyRecord, Standing)) -> Value {
    let scope = &key.scope;
    let time = |seconds: Option<u64>| seconds.map(clock::format);
    json!({
        "id": key.id.as_str(), "name": key.name, "state": standing.name(), "ends_with": key.hint, "team": key.team, "user": key.user,
        "parent": key.parent.as_ref().map(KeyId::as_str), "models": scope.models, "routes": scope.routes, "dialects": scope.dialects,
        "addresses": scope.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(), "limits": key.limits, "tags": key.tags,
        "created": time(Some(key.created)), "expires": time(key.expires), "rotated": time(key.rotated), "revoked": time(key.revoked),
    })
}

/// Unix seconds of a date, a date and time, or a time from now.
pub(crate) fn moment(text: &str) -> anyhow::Result<u64> {
    match clock::parse(text) {
        Some(moment) => Ok(moment),
        None => Ok(clock::unix_seconds().saturating_add(time_or_date(text)?.as_secs())),
    }
}

/// Duration where a date could stand too: the error names both forms.
pub(crate) fn time_or_date(text: &str) -> anyhow::Result<Duration> {
    let wrong = "is neither a time as 30s, 15m, 12h or 90d nor a date as 2027-01-31 or 2027-01-31T18:00:00Z";
    duration(text).map_err(|_| anyhow::anyhow!("{text:?} {wrong}"))
}

/// Duration of `30s`, `15m`, `12h` or `90d`.
pub(crate) fn duration(text: &str) -> anyhow::Result<Duration> {
    let unit = match text.chars().last() {
        Some('s') => 1,
        Some('m') => 60,
        Some('h') => 3600,
        Some('d') => 86_400,
        _ => bail!("{text:?} is not a time as 30s, 15m, 12h or 90d"),
    };
    let count: u64 = text[..text.len() - 1].parse().with_context(|| format!("{text:?} is not a time as 12h"))?;
    Ok(Duration::from_secs(count.saturating_mul(unit).min(100 * 365 * 86_400)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        for (text, seconds) in [("30s", Some(30)), ("12h", Some(43_200)), ("90d", Some(7_776_000)), ("0s", Some(0))] {
            assert_eq!(duration(text).ok().map(|time| time.as_secs()), seconds, "{text}");
        }
        for text in ["", "h", "12", "-1h", "1y", "1.5h", "ä"] {
            assert!(duration(text).is_err(), "{text}");
        }
        assert_eq!(moment("1970-01-02").ok(), Some(86_400));
        assert!(moment("10d").is_ok_and(|moment| moment >= clock::unix_seconds() + 863_999) && moment("soon").is_err());
    }
}
