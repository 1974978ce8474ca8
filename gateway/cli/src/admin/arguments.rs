//! Command line behind `penstock admin`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::keys::{Allowed, Under, Wish};

/// What `penstock admin` does.
#[derive(Subcommand, Clone, Debug)]
pub(crate) enum AdminCommand {
    /// Version, age, what is served, what is not ready
    Status,
    /// Which admin key is used, and its role
    Whoami,
    /// Names that requests can ask for
    Models(One),
    /// Other people's services, and how they do
    Providers(One),
    /// Plugins, in order
    Plugins(Only),
    /// Limits, and with a name how its counters stand
    Limits(One),
    /// Requests in flight
    Requests(Requests),
    /// Our own engines
    Workers(Workers),
    /// Pools, and how many workers they have and should have
    Pools(Pools),
    /// Which worker of a pool got which of the last requests, and why
    Decisions {
        /// The pool
        pool: String,
        /// Show so many
        #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256), value_name = "COUNT")]
        limit: u16,
    },
    /// Which worker of a pool would get a prompt now, and why
    Explain {
        /// The pool
        pool: String,
        /// The prompt; - reads it from the standard input
        prompt: String,
        /// Id of the key whose prefix cache counts [default: that of requests without a key]
        #[arg(long, value_name = "ID")]
        key: Option<String>,
    },
    /// Issued API keys
    Keys(Keys),
    /// Teams
    Teams(Owners),
    /// Users
    Users(Owners),
    /// What was used and what it cost
    Usage(Usage),
    /// The config in force
    #[command(subcommand)]
    Config(Config),
    /// Show or set what is logged, until the process ends
    LogLevel {
        /// error, warn, info, debug, trace, or directives in tracing's syntax
        level: Option<String>,
    },
    /// Who changed what, and who was refused
    Audit(Audit),
    /// The metrics, as Prometheus text
    Metrics,
    /// The API's OpenAPI document
    Openapi,
}

/// A noun that can be listed and shown one by one: bare and `list` are the same, a name and `show NAME` too.
#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct One {
    #[command(subcommand)]
    command: Option<OneCommand>,
    /// Show this one
    name: Option<String>,
}

impl One {
    /// Name of the item to show; `None`: all are listed.
    pub(super) fn name(&self) -> Option<&str> {
        match &self.command {
            Some(OneCommand::List) => None,
            Some(OneCommand::Show { name }) => Some(name),
            None => self.name.as_deref(),
        }
    }
}

#[derive(Subcommand, Clone, Debug)]
enum OneCommand {
    /// List them
    List,
    /// Show one
    Show {
        /// Its name
        name: String,
    },
}

/// A noun that can only be listed.
#[derive(Args, Clone, Debug)]
pub(crate) struct Only {
    #[command(subcommand)]
    pub(super) command: Option<OnlyCommand>,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum OnlyCommand {
    /// List them
    List,
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
    /// Of that API key
    #[arg(long)]
    pub(super) key: Option<String>,
    /// Of that team
    #[arg(long)]
    pub(super) team: Option<String>,
    /// For that model
    #[arg(long)]
    pub(super) model: Option<String>,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum RequestsCommand {
    /// List them
    List(RequestsFilter),
    /// End requests; their clients are told
    Cancel {
        /// Ids of `penstock admin requests`
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
    /// List them
    List,
    /// Bound or pause the number of workers, where it follows the load
    Replicas {
        /// The pool
        pool: String,
        /// Workers at least
        #[arg(long, value_name = "COUNT")]
        min: Option<usize>,
        /// Workers at most
        #[arg(long, value_name = "COUNT")]
        max: Option<usize>,
        /// Change nothing from now on
        #[arg(long, conflicts_with = "resume")]
        pause: bool,
        /// Go on
        #[arg(long)]
        resume: bool,
    },
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum WorkersCommand {
    /// List them
    List,
    /// Show one
    Show {
        /// Its name
        name: String,
    },
    /// Let it finish what it has and give it nothing new
    Drain {
        /// Its name
        name: String,
    },
    /// Use it again
    Resume {
        /// Its name
        name: String,
    },
    /// Change what kind of work it does
    Role {
        /// Its name
        name: String,
        /// mixed, prefill (for others), decode
        #[arg(value_parser = ["mixed", "prefill", "decode"])]
        role: String,
    },
    /// Let it finish, end it, start it again
    Restart {
        /// Its name
        name: String,
        /// Seconds to finish; then it is killed, and what it had goes on elsewhere
        #[arg(long, default_value_t = 60, value_name = "SECONDS")]
        patience: u64,
    },
}

#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Keys {
    #[command(subcommand)]
    pub(super) command: Option<KeysCommand>,
    #[command(flatten)]
    pub(super) filter: KeysFilter,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct KeysFilter {
    /// Of that team
    #[arg(long)]
    pub(super) team: Option<String>,
    /// Of that user
    #[arg(long)]
    pub(super) user: Option<String>,
    /// Revoked ones too
    #[arg(long)]
    pub(super) all: bool,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum KeysCommand {
    /// List them
    List(KeysFilter),
    /// Show everything about one but its text
    Show {
        /// Its id
        id: String,
    },
    /// Issue one and show it, this once
    Create(Box<Wish>),
    /// Give one a new text and show it, this once
    Rotate {
        /// Its id
        id: String,
        /// For how long the old text is good beside the new one, as 30m, 12h, 7d
        #[arg(long, default_value = "1h", value_name = "TIME")]
        grace: String,
    },
    /// Take it back, and the keys that were made from it
    Revoke {
        /// Its id
        id: String,
    },
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Owners {
    #[command(subcommand)]
    pub(super) command: Option<OwnersCommand>,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum OwnersCommand {
    /// List them
    List,
    /// Show one
    Show {
        /// Its id
        id: String,
    },
    /// Make one
    Create(Box<NewOwner>),
    /// Serve nothing of it
    Block {
        /// Its id
        id: String,
    },
    /// Serve it again
    Unblock {
        /// Its id
        id: String,
    },
    /// Remove it
    Delete {
        /// Its id
        id: String,
    },
}

#[derive(Args, Clone, Debug)]
pub(crate) struct NewOwner {
    /// Its id
    pub(super) id: String,
    /// What people call it
    #[arg(long, default_value = "")]
    pub(super) name: String,
    /// The team of a user
    #[arg(long)]
    pub(super) team: Option<String>,
    #[command(flatten)]
    pub(super) allowed: Allowed,
    #[command(flatten)]
    pub(super) under: Under,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Usage {
    /// By what: key, team, user, model, provider, route, day, hour, tag; up to four
    #[arg(long, default_value = "model")]
    pub(super) group: String,
    /// A date, date and time, or a time ago as 12h, 30d
    #[arg(long, default_value = "30d", value_name = "WHEN")]
    pub(super) from: String,
    /// The same; default: now
    #[arg(long, value_name = "WHEN")]
    pub(super) until: Option<String>,
    /// Of that key
    #[arg(long)]
    pub(super) key: Option<String>,
    /// Of that team
    #[arg(long)]
    pub(super) team: Option<String>,
    /// Of that user
    #[arg(long)]
    pub(super) user: Option<String>,
    /// For that model
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Answered by that pool or provider
    #[arg(long)]
    pub(super) provider: Option<String>,
    /// With that tag
    #[arg(long)]
    pub(super) tag: Option<String>,
    /// Print CSV
    #[arg(long, conflicts_with = "requests")]
    pub(super) csv: bool,
    /// The requests themselves, newest first
    #[arg(long)]
    pub(super) requests: bool,
}

#[derive(Subcommand, Clone, Debug)]
pub(crate) enum Config {
    /// Show it, without secrets
    Show {
        /// An earlier version
        version: Option<u64>,
    },
    /// Say everything that is wrong with a file
    Validate {
        /// The file; - for standard input
        file: PathBuf,
    },
    /// Say what a file would change
    Diff {
        /// The file; - for standard input
        file: PathBuf,
    },
    /// Put a file in force, whole or not at all
    Apply {
        /// The file; - for standard input
        file: PathBuf,
        /// Why, for the history
        #[arg(long, default_value = "")]
        note: String,
        /// Only if this version is in force
        #[arg(long, value_name = "VERSION")]
        expect: Option<u64>,
    },
    /// Read the gateway's own file again
    Reload {
        /// Why, for the history
        #[arg(long, default_value = "")]
        note: String,
    },
    /// Put an earlier version in force
    Rollback {
        /// Of the history
        version: u64,
        /// Why, for the history
        #[arg(long, default_value = "")]
        note: String,
    },
    /// What was in force, and what was refused
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
    /// List them
    List(AuditFilter),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct AuditFilter {
    /// By that admin key
    #[arg(long)]
    pub(super) actor: Option<String>,
    /// That action; a trailing * matches any ending, as key.*
    #[arg(long)]
    pub(super) action: Option<String>,
    /// On that id
    #[arg(long)]
    pub(super) target: Option<String>,
    /// done, denied or failed
    #[arg(long)]
    pub(super) outcome: Option<String>,
    /// A date, date and time, or a time ago as 12h, 30d
    #[arg(long, value_name = "WHEN")]
    pub(super) from: Option<String>,
    /// At most this many, newest first
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
    const NO_LISTS: [&str; 9] =
        ["status", "whoami", "decisions", "explain", "usage", "config", "log-level", "metrics", "openapi"];

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
            "models big",
            "requests --team t",
            "requests list --team t",
            "keys list --all",
            "keys --all",
            "audit --limit 3",
            "audit list --limit 3",
            "config list",
            "workers show w-0",
            "teams show t",
        ] {
            let words = std::iter::once("admin").chain(line.split(' '));
            assert!(Line::try_parse_from(words).is_ok(), "{line}");
        }
    }
}
