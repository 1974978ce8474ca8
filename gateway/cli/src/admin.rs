//! `penstock admin`: commands of the admin API, from a terminal.
//!
//! The address and the key are read from the state folder of the gateway on this machine; for a gateway elsewhere they
//! are given as options.

mod adapters;
mod arguments;
mod client;
mod columns;
mod commands;
mod dry_run;
mod entries;
mod explain;
mod keys;
mod stored;
mod table;

use std::path::{Path, PathBuf};

use crate::serve::ConfigArgs;
use anyhow::{Context, bail};
use clap::Args;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

pub(crate) use arguments::AdminCommand;
use arguments::Config;
pub(crate) use client::Client;
use client::Search;
pub(crate) use commands::all;
pub(crate) use table::{table, value};

const EXAMPLES: &str = "\
Examples:
  penstock admin status
  penstock admin requests
  penstock admin requests cancel 1042
  penstock admin batches --open
  penstock admin plugins dry-run body.json --key search
  penstock admin keys create --name search --models 'chat-*' --limits standard
  penstock admin keys set key_… --limits standard,nightly --expires 90d
  penstock admin usage --group key,model --from 7d
  penstock admin config diff new.toml && penstock admin config apply new.toml --note 'another provider'
  penstock admin limits set standard requests_per_minute=600 --note 'the new plan'
  penstock admin workers restart chat-0

On the gateway's machine nothing has to be given. From elsewhere:
  ssh -L 8081:127.0.0.1:8081 gateway.example
  PENSTOCK_ADMIN_KEY=… penstock admin --url http://127.0.0.1:8081 status";

/// `penstock admin`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct AdminArgs {
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    command: AdminCommand,
}

/// `penstock explain`: `penstock admin explain` for those in a hurry.
#[derive(Args, Clone, Debug)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    asked: arguments::Explain,
}

/// Runs `penstock explain`.
pub(crate) fn explain(args: ExplainArgs) -> anyhow::Result<()> {
    let ExplainArgs { place, asked } = args;
    run(&AdminArgs { place, command: AdminCommand::Explain(asked) })
}

/// Where the API is, and how answers are shown.
#[derive(Args, Clone, Debug)]
pub(crate) struct Place {
    /// URL of the admin API: http://ADDRESS:PORT or unix:///PATH [default: the gateway of the state folder]
    #[arg(long, global = true, env = "PENSTOCK_ADMIN_URL")]
    url: Option<String>,
    /// Environment variable with an admin key [default: this machine's key]
    #[arg(long, global = true, value_name = "NAME", default_value = "PENSTOCK_ADMIN_KEY")]
    key_env: String,
    /// Config file of the gateway, to find its state folder
    #[arg(long, short, global = true, value_name = "FILE", env = "PENSTOCK_CONFIG")]
    config: Option<PathBuf>,
    /// State folder of the gateway [default: ~/.local/state/penstock]
    #[arg(long, global = true, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Most rows of a list; a list that is longer says so on standard error
    #[arg(long, global = true, value_name = "COUNT", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    rows: u32,
    /// Print JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// Runs the command of `penstock admin`.
pub(crate) fn run(args: &AdminArgs) -> anyhow::Result<()> {
    if let AdminCommand::Key = args.command {
        return own_key(&args.place);
    }
    // A fault of the config is told before anything is asked or signalled.
    let state_dir = state_dir(&args.place)?;
    let client = find(&args.place, &state_dir, !matches!(args.command, AdminCommand::Health));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")?;
    runtime.block_on(async {
        if let AdminCommand::Config(Config::Reload { or_hangup: Some(process), .. }) = &args.command
            && let Err(why) = lets_in(client.as_ref()).await
        {
            return hang_up(*process, &why);
        }
        commands::run(&client?, &args.command, args.place.json).await
    })
}

/// Prints the key that was made for this machine. Where the config has keys, the gateway takes no other.
fn own_key(place: &Place) -> anyhow::Result<()> {
    if let Some(url) = &place.url {
        bail!("the key of this machine is not for {url}: leave --url (PENSTOCK_ADMIN_URL) out");
    }
    let args = ConfigArgs { config: place.config.clone(), state_dir: place.state_dir.clone(), ..ConfigArgs::default() };
    let config = args.load_beside(&[]).context("the config cannot be read")?;
    if !config.admin.keys.is_empty() {
        bail!("the config has [[admin_keys]], and the gateway takes those alone: sign in with one of them");
    }
    let state_dir = penstock_config::state_dir(&config).map_err(anyhow::Error::msg)?;
    let key = client::machine_key(&state_dir)?;
    if place.json {
        println!("{:#}", json!({ "key": key }))
    } else {
        println!("{key}")
    }
    Ok(())
}

/// Asks whether the admin API is there and takes the key. The error is the reason for people.
async fn lets_in(client: Result<&Client, &anyhow::Error>) -> Result<(), String> {
    let client = client.map_err(|error| format!("{error:#}"))?;
    client.get("/admin/v1/whoami").await.map(drop).map_err(|error| format!("{error:#}"))
}

/// Sends a gateway SIGHUP, so that it reads its config again. The result is in the gateway's log only; this command does not wait for it.
fn hang_up(process: i32, why: &str) -> anyhow::Result<()> {
    let pid = Pid::from_raw(process).with_context(|| format!("{process} is no process"))?;
    kill_process(pid, Signal::HUP).with_context(|| format!("process {process} cannot be told by SIGHUP"))?;
    println!(
        "the admin API does not accept this command ({why}); process {process} was sent SIGHUP and reads its config again: see its log for the result"
    );
    Ok(())
}

/// Client of the API at that place.
pub(crate) fn connect(place: &Place) -> anyhow::Result<Client> {
    find(place, &state_dir(place)?, true)
}

fn find(place: &Place, state_dir: &Path, needs_key: bool) -> anyhow::Result<Client> {
    let rows_max = place.rows as usize;
    Client::find(&Search { url: place.url.as_deref(), key_env: &place.key_env, needs_key, state_dir, rows_max })
}

/// State folder that the gateway uses, found without reading the config's secrets.
fn state_dir(place: &Place) -> anyhow::Result<PathBuf> {
    let config = place.config.clone().filter(|_| place.state_dir.is_none());
    let args = ConfigArgs { config, state_dir: place.state_dir.clone(), ..ConfigArgs::default() };
    let config = args.load_beside(&[]).context("the config cannot be read (--state-dir says the same)")?;
    penstock_config::state_dir(&config).map_err(anyhow::Error::msg)
}
