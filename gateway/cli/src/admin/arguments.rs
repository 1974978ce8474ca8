//! Command line behind `penstock admin`; that of keys is in `keys.rs`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::keys::Keys;
use crate::keys::{Allowed, Under};

/// What `penstock admin` does.
#[derive(Subcommand, Clone, Debug)]
pub(crate) enum AdminCommand {
    /// Show the version, uptime, models and pools, and what is not ready
    Status,
    /// Ask whether the gateway serves; needs no key. Exits with status 1 if it does not serve
    Health,
    /// Show the admin key in use and its role
    Whoami,
    /// Print the key of this machine's gateway, for signing in at the console; where the config has `[[admin_keys]]` there is none
    Key,
    /// Models: names that requests can use
    Models(One),
    /// Routes: the model names of the config, with the targets that answer them
    Routes(One),
    /// Providers: upstream services and their health
    Providers(One),
    /// Plugins, in the order of the config, and dry runs of requests through them
    Plugins(Plugins),
    /// Limits; with an id, the counters of that limit
    Limits(One),
    /// Requests in flight
    Requests(Requests),
    /// Workers: engine processes of the pools
    Workers(Workers),
    /// Pools: current and wanted number of workers
    Pools(Pools),
    /// Adapters (LoRA) of a pool's model: loaded and unloaded while its workers run
    Adapters(Adapters),
    /// Last routing decisions of a pool: which request went to which worker, and why
    Decisions {
        /// The pool
        pool: String,
        /// Number of decisions to show
        #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256), value_name = "COUNT")]
        limit: u16,
    },
    /// Which worker of a pool would get a prompt now, and why
    Explain(Explain),
    /// Batches of all keys: state and counts, without their lines
    Batches(Batches),
    /// Stored files of all keys: names and sizes, without their content
    Files(Files),
    /// Issued API keys
    Keys(Keys),
    /// Teams
    Teams(Owners),
    /// Users
    Users(Owners),
    /// Usage and cost, by group
    Usage(Usage),
    /// Config in force and its history
    #[command(subcommand)]
    Config(Config),
    /// Show or set the log level, until the process ends
    LogLevel {
        /// error, warn, info, debug, trace, or directives in tracing's syntax
        level: Option<String>,
    },
    /// Audit log: who changed what, and who was refused
    Audit(Audit),
    /// Metrics, as Prometheus text
    Metrics,
    /// OpenAPI document of the admin API
    Openapi,
}

/// A noun of the config that can be listed, shown and changed one by one: bare and `list` are the same, a name and `show NAME` too.
#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct One {
    #[command(subcommand)]
    pub(super) command: Option<OneCommand>,
    /// Name of the entry to show
    name: Option<String>,
}

impl One {
    /// Name of the item to show; `None`: all are listed.
    pub(super) fn name(&self) -> Option<&str> {
        match &self.command {
            Some(OneCommand::Show { name, .. }) => Some(name),
            Some(_) => None,
            None => self.name.as_deref(),
        }
    }
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum OneCommand {
    /// List all entries
    List,
    /// Show one entry
    Show {
        /// Name of the entry
        name: String,
        /// Show the keys that the config has, without secrets, instead of the state
        #[arg(long)]
        keys: bool,
    },
    /// Change keys of an entry of the config, or add it; the file's comments stay
    Set(Box<SetEntry>),
    /// Delete an entry of the config; one that another entry names stays
    Delete {
        /// Name of the entry
        name: String,
        #[command(flatten)]
        how: How,
    },
}

#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Plugins {
    #[command(subcommand)]
    command: Option<PluginsCommand>,
    /// Name of the entry to show
    name: Option<String>,
}

impl Plugins {
    /// Dry run that is asked for, or else the operation on the entries of the config.
    pub(super) fn split(&self) -> Result<&DryRun, One> {
        let command = match &self.command {
            Some(PluginsCommand::DryRun(trial)) => return Ok(trial),
            Some(PluginsCommand::Entries(command)) => Some(command.clone()),
            None => None,
        };
        Err(One { command, name: self.name.clone() })
    }
}

#[derive(Subcommand, Clone, Debug)]
enum PluginsCommand {
    #[command(flatten)]
    Entries(OneCommand),
    /// Run the plugins in force on a request and show what each does; nothing is sent, stored or counted
    DryRun(DryRun),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct DryRun {
    /// File with the body of the request as a JSON object; - for standard input
    pub(super) file: PathBuf,
    /// Path of the request on the data port, which names its API
    #[arg(long, value_name = "PATH", default_value = "/v1/chat/completions")]
    pub(super) path: String,
    /// Model to ask in place of the body's
    #[arg(long, value_name = "NAME")]
    pub(super) model: Option<String>,
    /// Id of the API key that the request comes with, or console:ID for a person at the console [default: no key]
    #[arg(long, value_name = "ID")]
    pub(super) key: Option<String>,
    /// Header field of the request, as 'x-team: blue'; credentials are dropped
    #[arg(long = "header", value_name = "NAME: VALUE")]
    pub(super) headers: Vec<String>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct SetEntry {
    /// Name of the entry
    pub(super) name: String,
    /// Keys and values, as in_flight=8, models='["a", "b"]' or price.input=2; a value is JSON, or else text
    #[arg(value_name = "KEY=VALUE", required_unless_present_any = ["unset", "file"])]
    pub(super) pairs: Vec<String>,
    /// Key to remove
    #[arg(long, value_name = "KEY")]
    pub(super) unset: Vec<String>,
    /// File with all keys of the entry as a JSON object; - reads standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pairs", "unset"])]
    pub(super) file: Option<PathBuf>,
    #[command(flatten)]
    pub(super) how: How,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct How {
    /// Note for the history
    #[arg(long, default_value = "")]
    pub(super) note: String,
    /// ETag that the entry must still have, as show --keys --json tells it
    #[arg(long, value_name = "ETAG")]
    pub(super) expect: Option<String>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Explain {
    /// Id of the pool
    pub(super) pool: String,
    /// Text of the prompt; - reads standard input
    pub(super) prompt: String,
    /// Id of the API key whose prefix cache counts [default: that of requests without a key]
    #[arg(long, value_name = "ID")]
    pub(super) key: Option<String>,
    /// Name of the adapter that the prompt is for [default: the model alone]
    #[arg(long, value_name = "NAME")]
    pub(super) adapter: Option<String>,
    /// Write the explanation as one page for a browser, which loads nothing else and has no word of the prompt
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Requests {
    #[command(subcommand)]
    pub(super) command: Option<RequestsCommand>,
    #[command(flatten)]
    pub(super) filter: RequestsFilter,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct RequestsFilter {
    /// Only requests of this API key
    #[arg(long)]
    pub(super) key: Option<String>,
    /// Only requests of this team
    #[arg(long)]
    pub(super) team: Option<String>,
    /// Only requests for this model
    #[arg(long)]
    pub(super) model: Option<String>,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum RequestsCommand {
    /// List requests in flight
    List(RequestsFilter),
    /// Cancel requests; their clients get an error
    Cancel {
        /// Ids, as penstock admin requests lists them
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Workers {
    #[command(subcommand)]
    pub(super) command: Option<WorkersCommand>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Pools {
    #[command(subcommand)]
    pub(super) command: Option<PoolsCommand>,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum PoolsCommand {
    /// List pools
    List,
    /// Bound or pause the number of workers, where it follows the load
    Replicas {
        /// The pool
        pool: String,
        /// Smallest number of workers
        #[arg(long, value_name = "COUNT")]
        min: Option<usize>,
        /// Largest number of workers
        #[arg(long, value_name = "COUNT")]
        max: Option<usize>,
        /// Stop changing the number of workers
        #[arg(long, conflicts_with = "resume")]
        pause: bool,
        /// Resume changing the number of workers
        #[arg(long)]
        resume: bool,
    },
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Adapters {
    #[command(subcommand)]
    pub(super) command: Option<AdaptersCommand>,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum AdaptersCommand {
    /// List adapters, with their state at the workers of their pools
    List {
        /// The pool [default: all]
        pool: Option<String>,
    },
    /// Add an adapter to a pool of the config, and wait until its workers have it; the file's comments stay
    Add {
        /// The pool
        pool: String,
        /// Model name by which requests select the adapter
        name: String,
        /// PEFT folder on the machine of the gateway
        path: PathBuf,
        /// Replace the folder if the pool has an adapter of that name already
        #[arg(long)]
        replace: bool,
        /// Longest wait until the workers have loaded the adapter; 0 does not wait
        #[arg(long, default_value_t = 60, value_name = "SECONDS")]
        wait: u64,
        #[command(flatten)]
        how: How,
    },
    /// Remove an adapter from a pool of the config; open requests run to their end with it
    Remove {
        /// The pool
        pool: String,
        /// Name of the adapter
        name: String,
        #[command(flatten)]
        how: How,
    },
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum WorkersCommand {
    /// List workers
    List,
    /// Show one worker
    Show {
        /// Name of the worker
        name: String,
    },
    /// Drain a worker: open requests finish, no new ones are sent
    Drain {
        /// Name of the worker
        name: String,
    },
    /// End a drain: send requests to the worker again
    Resume {
        /// Name of the worker
        name: String,
    },
    /// Change the role of a worker
    Role {
        /// Name of the worker
        name: String,
        /// mixed, prefill (for other workers) or decode
        #[arg(value_parser = ["mixed", "prefill", "decode"])]
        role: String,
    },
    /// Drain a worker, end its process and start a new one
    Restart {
        /// Name of the worker
        name: String,
        /// Seconds to drain; after that the worker is killed and its requests go on elsewhere
        #[arg(long, default_value_t = 60, value_name = "SECONDS")]
        patience: u64,
    },
}

#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Batches {
    #[command(subcommand)]
    pub(super) command: Option<BatchesCommand>,
    #[command(flatten)]
    pub(super) filter: BatchesFilter,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct BatchesFilter {
    /// Only batches of this key or token user
    #[arg(long, value_name = "ID")]
    pub(super) key: Option<String>,
    /// Only batches that have not ended
    #[arg(long)]
    pub(super) open: bool,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum BatchesCommand {
    /// List batches, newest first
    List(BatchesFilter),
    /// Show one batch
    Show {
        /// Id of the batch
        id: String,
    },
    /// Cancel batches: requests in progress are stopped, results so far are kept
    Cancel {
        /// Ids, as penstock admin batches lists them
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Files {
    #[command(subcommand)]
    pub(super) command: Option<FilesCommand>,
    #[command(flatten)]
    pub(super) filter: FilesFilter,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct FilesFilter {
    /// Only files of this key or token user
    #[arg(long, value_name = "ID")]
    pub(super) key: Option<String>,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum FilesCommand {
    /// List files, newest first
    List(FilesFilter),
    /// Show one file, without its content
    Show {
        /// Id of the file
        id: String,
    },
    /// Delete files for good; one that an open batch reads stays
    Delete {
        /// Ids, as penstock admin files lists them
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Owners {
    #[command(subcommand)]
    pub(super) command: Option<OwnersCommand>,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum OwnersCommand {
    /// List all entries
    List,
    /// Show one entry
    Show {
        /// Id of the entry
        id: String,
    },
    /// Create an entry
    Create(Box<NewOwner>),
    /// Block an entry: refuse its requests
    Block {
        /// Id of the entry
        id: String,
    },
    /// Unblock an entry: serve its requests again
    Unblock {
        /// Id of the entry
        id: String,
    },
    /// Delete an entry
    Delete {
        /// Id of the entry
        id: String,
    },
}

#[derive(Args, Clone, Debug)]
pub(crate) struct NewOwner {
    /// Id of the new entry
    pub(super) id: String,
    /// Display name
    #[arg(long, default_value = "")]
    pub(super) name: String,
    /// Team of a user
    #[arg(long)]
    pub(super) team: Option<String>,
    #[command(flatten)]
    pub(super) allowed: Allowed,
    #[command(flatten)]
    pub(super) under: Under,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Usage {
    /// Group by key, team, user, model, provider, route, day, hour or tag; up to four
    #[arg(long, default_value = "model")]
    pub(super) group: String,
    /// Begin of the range: a date, date and time, or a time ago as 12h, 30d
    #[arg(long, default_value = "30d", value_name = "WHEN")]
    pub(super) from: String,
    /// End of the range, in the same formats [default: now]
    #[arg(long, value_name = "WHEN")]
    pub(super) until: Option<String>,
    /// Only this API key
    #[arg(long)]
    pub(super) key: Option<String>,
    /// Only this team
    #[arg(long)]
    pub(super) team: Option<String>,
    /// Only this user
    #[arg(long)]
    pub(super) user: Option<String>,
    /// Only this model
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Only answers of this pool or provider
    #[arg(long)]
    pub(super) provider: Option<String>,
    /// Only requests with this tag
    #[arg(long)]
    pub(super) tag: Option<String>,
    /// Print CSV
    #[arg(long, conflicts_with = "requests")]
    pub(super) csv: bool,
    /// List single requests instead of sums, newest first
    #[arg(long)]
    pub(super) requests: bool,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum Config {
    /// Show the config, without secrets
    Show {
        /// Number of an earlier version
        version: Option<u64>,
    },
    /// Check a file and list all faults
    Validate {
        /// Config file; - for standard input
        file: PathBuf,
    },
    /// Show the changes that a file would make
    Diff {
        /// Config file; - for standard input
        file: PathBuf,
    },
    /// Apply a file, whole or not at all
    Apply {
        /// Config file; - for standard input
        file: PathBuf,
        /// Note for the history
        #[arg(long, default_value = "")]
        note: String,
        /// Apply only if this version is in force
        #[arg(long, value_name = "VERSION")]
        expect: Option<u64>,
    },
    /// Reload the gateway's config file
    Reload {
        /// Note for the history
        #[arg(long, default_value = "")]
        note: String,
        /// Id of the process to send SIGHUP if the admin API does not answer or does not accept this command's key; for systemd units
        #[arg(long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
        or_hangup: Option<i32>,
    },
    /// Apply an earlier version again
    Rollback {
        /// Number of the version in the history
        version: u64,
        /// Note for the history
        #[arg(long, default_value = "")]
        note: String,
    },
    /// List the versions that were applied or refused
    #[command(visible_alias = "list")]
    History,
}

#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Audit {
    #[command(subcommand)]
    command: Option<AuditCommand>,
    #[command(flatten)]
    filter: AuditFilter,
}

impl Audit {
    /// Filter of the entries.
    pub(super) fn filter(&self) -> &AuditFilter {
        match &self.command {
            Some(AuditCommand::List(filter)) => filter,
            None => &self.filter,
        }
    }
}

#[derive(Subcommand, Clone, Debug)]
enum AuditCommand {
    /// List audit events
    List(AuditFilter),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct AuditFilter {
    /// Only events of this admin key
    #[arg(long)]
    pub(super) actor: Option<String>,
    /// Only this action; a trailing * matches any ending, as key.*
    #[arg(long)]
    pub(super) action: Option<String>,
    /// Only events on this id
    #[arg(long)]
    pub(super) target: Option<String>,
    /// Only this outcome: done, denied or failed
    #[arg(long)]
    pub(super) outcome: Option<String>,
    /// Begin of the range: a date, date and time, or a time ago as 12h, 30d
    #[arg(long, value_name = "WHEN")]
    pub(super) from: Option<String>,
    /// Largest number of events, newest first
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) limit: u32,
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[derive(Parser, Debug)]
    struct Line {
        #[command(subcommand)]
        command: AdminCommand,
    }

    /// Commands that are one answer or one report, not a list of things.
    const NO_LISTS: [&str; 11] = [
        "status",
        "health",
        "whoami",
        "key",
        "decisions",
        "explain",
        "usage",
        "config",
        "log-level",
        "metrics",
        "openapi",
    ];

    #[test]
    fn every_noun_is_listed_by_its_name_and_by_list() {
        for command in Line::command().get_subcommands().filter(|command| !NO_LISTS.contains(&command.get_name())) {
            let name = command.get_name();
            for line in [vec!["admin", name], vec!["admin", name, "list"]] {
                let read = Line::try_parse_from(&line);
                assert!(read.is_ok(), "{line:?}: {:?}", read.err());
            }
        }
        for line in [
            "models show list",
            "models show m --keys",
            "routes m",
            "plugins show p",
            "plugins p",
            "plugins dry-run -",
            "plugins dry-run body.json --path /v1/messages --model m --key k --header x-a:b --header x-c:d",
            "batches --open --key k",
            "batches list --open",
            "batches show batch_1",
            "batches cancel batch_1 batch_2",
            "files --key k",
            "files show file_1",
            "files delete file_1 file_2",
            "limits set l in_flight=1 --unset tokens_per_minute --note n",
            "providers set p --file -",
            "routes delete m --expect \"0\"",
            "models big",
            "requests --team t",
            "requests list --team t",
            "keys list --all",
            "keys --all",
            "keys set key_1 --limits a,b --models m --expires never",
            "key",
            "audit --limit 3",
            "audit list --limit 3",
            "config list",
            "workers show w-0",
            "adapters list chat",
            "adapters add chat sql /models/sql-lora --replace --wait 0 --note n",
            "adapters remove chat sql --expect \"0\"",
            "teams show t",
            "explain chat - --key k --adapter a --html page.html",
        ] {
            let words = std::iter::once("admin").chain(line.split(' '));
            assert!(Line::try_parse_from(words).is_ok(), "{line}");
        }
    }
}
