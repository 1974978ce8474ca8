//! Changes while it runs: another config comes into force, whole or not at all.
//!
//! A text is checked, its pools and providers are made, and only when nothing of it can fail any more is it swapped in; requests that have
//! begun keep what they began with. What a running process cannot change (listeners, threads, the place of the store) keeps its value,
//! and is said to wait for an upgrade or a restart. Whoever asks for a change (the file, SIGHUP, an admin) comes through [`Live`], one
//! after another.
//!
//! - `fixed.rs`: what cannot change, and where a key applies when
//! - `diff.rs`: what would be different, for people to read; never a secret
//! - `hidden.rs`: a text as it may be shown, and back
//! - `source.rs`: the operator's file and the command line
//! - `history.rs`: the configs that were in force
//! - `follow.rs`: the thread that listens to SIGHUP, watches the file, and keeps chores (health checks) in step

mod diff;
mod fixed;
mod follow;
mod hidden;
mod history;
mod marks;
mod source;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use diff::{Change, Kind};
pub use fixed::{When, when};
pub use follow::{Follower, follow};
pub use hidden::{MARK, shown};
pub use history::{Entry, History};
pub use marks::{Marks, Outcome};
pub use source::{CONFIG_BYTES_MAX, Source};

use crate::clock::unix_seconds;
use crate::config::{Faults, Snapshot};
use crate::fleet::{Fleet, FleetError, Plan};
use crate::gateway::Gateway;
use crate::provider::ProviderError;

/// Who wants a change, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct By {
    /// `file`, `signal`, `start`, or the id of an admin key.
    pub who: String,
    /// In their words.
    pub note: String,
}

impl By {
    /// Somebody, without a word.
    pub fn new(who: impl Into<String>) -> Self {
        Self { who: who.into(), note: String::new() }
    }
}

/// What became of a change.
#[derive(Clone, Debug, PartialEq)]
pub struct Applied {
    /// The version in force now.
    pub version: u64,
    /// What is different.
    pub changes: Vec<Change>,
    /// Keys whose new value waits for an upgrade or a restart.
    pub pending: Vec<String>,
    /// Pools whose new workers are being made ready; the old ones answer until then.
    pub replacing: Vec<String>,
    /// Whether a restart comes up with it.
    pub persisted: bool,
}

/// Why nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The text is no valid config.
    #[error("{0}")]
    Faults(#[from] Faults),
    /// A pool of it cannot work here.
    #[error("{0}")]
    Pool(#[from] FleetError),
    /// A provider of it cannot be used.
    #[error("{0}")]
    Provider(#[from] ProviderError),
    /// Somebody else was faster.
    #[error(
        "version {expected} was expected to be in force, it is {current}: look at what has changed, then apply again"
    )]
    Conflict {
        /// What the caller had seen.
        expected: u64,
        /// What it is.
        current: u64,
    },
    /// The version is not kept.
    #[error("version {0} is not in the history")]
    Unknown(u64),
    /// What is hidden in the text stands for nothing.
    #[error("{0}: the mark for a hidden value stands for none in force: write the value itself, or where it is")]
    Hidden(String),
    /// The file cannot be read.
    #[error("{0}")]
    Read(String),
    /// The file cannot be written.
    #[error("{0}")]
    Write(String),
}

/// Sets the level of the log.
pub type LogLevel = Box<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// See the module header.
pub struct Live {
    gateway: Arc<Gateway>,
    fleet: Arc<Fleet>,
    source: Source,
    log_level: LogLevel,
    history: History,
    state: Mutex<State>,
}

struct State {
    version: u64,
    /// The text in force.
    text: String,
    /// As the process began: what is fixed is measured by it.
    began: Arc<Snapshot>,
    pending: Vec<String>,
    persisted: bool,
}

impl Live {
    /// `began`: the config that the process began with, as it was typed, from `text`.
    pub fn new(
        gateway: Arc<Gateway>,
        fleet: Arc<Fleet>,
        source: Source,
        (text, began): (String, Snapshot),
        log_level: LogLevel,
    ) -> Arc<Self> {
        let history = History::new(gateway.clone());
        let version = history.begin(&text);
        gateway.marks.begin(version, unix_seconds());
        let state = State { version, text, began: Arc::new(began), pending: Vec::new(), persisted: true };
        Arc::new(Self { gateway, fleet, source, log_level, history, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The version in force and its text.
    pub fn current(&self) -> (u64, String) {
        let state = self.state();
        (state.version, state.text.clone())
    }

    /// Keys whose value in the text waits for an upgrade or a restart.
    pub fn pending(&self) -> Vec<String> {
        self.state().pending.clone()
    }

    /// Whether a restart comes up with what is in force.
    pub fn is_persisted(&self) -> bool {
        self.state().persisted
    }

    /// Sets the log level until the next change of the config.
    ///
    /// # Errors
    /// It is no level.
    pub fn set_log_level(&self, level: &str) -> Result<(), String> {
        (self.log_level)(level)
    }

    /// Where the config comes from.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// What was in force, newest first.
    pub fn history(&self) -> Vec<Entry> {
        self.history.list()
    }

    /// The text of a version.
    pub fn text_of(&self, version: u64) -> Option<String> {
        self.history.text(version)
    }

    /// Whether a text could come into force, pools and all; nothing changes.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn validate(&self, text: &str) -> Result<Vec<Change>, ApplyError> {
        let known = self.current().1;
        let text = &hidden::restored(text, &known).map_err(ApplyError::Hidden)?;
        self.prepare(text)?;
        Ok(diff::between(&known, text))
    }

    fn prepare(&self, text: &str) -> Result<(Snapshot, Plan), ApplyError> {
        let config = self.source.load(text)?;
        let plan = self.fleet.plan(&config)?;
        Ok((config, plan))
    }

    /// Reads the file again, and everything that it names. Without a file there is nothing to be read, and what is named is.
    ///
    /// # Errors
    /// [`ApplyError`]: nothing has changed.
    pub fn reload(&self, by: &By) -> Result<Applied, ApplyError> {
        self.take(self.source.read(), by)
    }

    fn take(&self, read: Result<String, String>, by: &By) -> Result<Applied, ApplyError> {
        self.gateway.refresh_certificate();
        let read = read.map_err(ApplyError::Read);
        let done = read.and_then(|text| self.put(&text, by, None, true));
        self.note(&done);
        done
    }

    /// The same, if the file's text is another than the one in force.
    pub(crate) fn reload_changed(&self, by: &By) {
        match self.source.read() {
            Ok(text) if text == self.state().text => {}
            Ok(text) if text.trim().is_empty() => {
                tracing::warn!("config file is empty; the config in force stays (SIGHUP takes it as it is)");
            }
            // An editor or a mount is between two steps; what runs goes on.
            Err(reason) => tracing::warn!(reason, "config file not readable; the config in force stays"),
            // What was looked at: a moment later the file may be empty, on its way to its next state.
            Ok(text) => drop(self.take(Ok(text), by)),
        }
    }

    /// Puts a text in force. It is written to the file if the config allows that (`server.config_writes`); else a restart comes up
    /// with the file as it is.
    ///
    /// # Errors
    /// [`ApplyError`]: nothing has changed.
    pub fn apply(&self, text: &str, by: &By, expected: Option<u64>) -> Result<Applied, ApplyError> {
        let done = self.put(text, by, expected, false);
        self.note(&done);
        done
    }

    /// Puts an earlier version in force.
    ///
    /// # Errors
    /// [`ApplyError`]: nothing has changed.
    pub fn rollback(&self, version: u64, by: &By) -> Result<Applied, ApplyError> {
        let text = self.history.text(version).ok_or(ApplyError::Unknown(version))?;
        let note = if by.note.is_empty() { format!("back to version {version}") } else { by.note.clone() };
        self.apply(&text, &By { who: by.who.clone(), note }, None)
    }

    fn put(&self, text: &str, by: &By, expected: Option<u64>, from_file: bool) -> Result<Applied, ApplyError> {
        let mut state = self.state();
        if let Some(expected) = expected.filter(|expected| *expected != state.version) {
            return Err(ApplyError::Conflict { expected, current: state.version });
        }
        let text = &hidden::restored(text, &state.text).map_err(ApplyError::Hidden)?;
        let refused = |error: ApplyError| {
            self.history.keep(text, by, "refused");
            error
        };
        let (mut config, plan) = self.prepare(text).map_err(refused)?;
        let pending = fixed::hold(&state.began, &self.gateway.serving().config, &mut config);
        let providers = self.gateway.providers_of(&config).map_err(|error| refused(error.into()))?;
        let written = !from_file && config.config_writes && self.source.path().is_some();
        if written {
            self.source.write(text).map_err(ApplyError::Write)?;
        }
        if let Err(error) = self.fleet.carry_out(plan) {
            if written {
                // The old text is what a restart should find.
                self.source.write(&state.text).map_err(ApplyError::Write)?;
            }
            return Err(refused(error.into()));
        }
        if let Err(reason) = (self.log_level)(&config.log_level) {
            tracing::warn!(reason, "log level unchanged");
        }
        self.gateway.swap(config, self.fleet.upstreams(), providers);
        let changes = diff::between(&state.text, text);
        if !changes.is_empty() || *text != state.text {
            state.version = self.history.keep(text, by, "applied");
            text.clone_into(&mut state.text);
        }
        (state.pending, state.persisted) = (pending, from_file || written);
        Ok(Applied {
            version: state.version,
            changes,
            pending: state.pending.clone(),
            replacing: self.fleet.replacing(),
            persisted: state.persisted,
        })
    }

    fn note(&self, done: &Result<Applied, ApplyError>) {
        match done {
            Ok(applied) => {
                let changes: Vec<_> = applied.changes.iter().map(Change::path).collect();
                let (changes, pending) = (changes.join(" "), applied.pending.join(" "));
                tracing::info!(version = applied.version, changes, replacing = ?applied.replacing, "config in force");
                if !pending.is_empty() {
                    tracing::warn!(keys = pending, "these keep their value until an upgrade or a restart");
                }
                let outcome = if applied.changes.is_empty() { Outcome::Unchanged } else { Outcome::Applied };
                self.gateway.marks.done(outcome, applied.version, applied.pending.len(), unix_seconds());
            }
            Err(error) => {
                for line in error.to_string().lines() {
                    tracing::error!(fault = line, "config refused; the one in force stays");
                }
                self.gateway.marks.refused(unix_seconds());
            }
        }
    }
}
