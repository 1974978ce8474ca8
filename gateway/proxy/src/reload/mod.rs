//! Config changes at run time: another config comes into force, whole or not at all.
//!
//! A text is checked, its pools and providers are made, and only when nothing of it can fail any more is it swapped in;
//! open requests keep the config that they began with. A key that a running process cannot change (listeners, threads,
//! the place of the store) keeps its value and is reported as pending until an upgrade or a restart. Every source of
//! changes (the file, SIGHUP, an admin) goes through [`Live`], one change after another.
//!
//! - `fixed.rs`: keys that cannot change, and when a key applies
//! - `diff.rs`: differences of two configs, for people to read; never a secret
//! - `hidden.rs`: a text as it may be shown, and back
//! - `source.rs`: the operator's file and the command line
//! - `members.rs`: addresses of the names that stand for several servers
//! - `history.rs`: the configs that were in force
//! - `follow.rs`: the thread that listens to SIGHUP, watches the file, and keeps chores (health checks) in step

mod diff;
mod fixed;
mod follow;
mod hidden;
mod history;
mod members;
mod source;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use diff::{Change, Kind, is_secret_name, plain};
pub use fixed::{When, when};
pub use follow::{Follower, follow};
pub use hidden::{MARK, shown};
pub use history::{Entry, History};
pub use source::{CONFIG_BYTES_MAX, Source};

use crate::fleet::{Fleet, FleetError, Plan};
use crate::gateway::Gateway;
use crate::reload_marks::Outcome;
use penstock_base::clock::unix_seconds;
use penstock_config::{Faults, Snapshot};
use penstock_provider::ProviderError;

/// Actor of a change, and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct By {
    /// Actor: `file`, `signal`, `start`, or the id of an admin key.
    pub who: String,
    /// Reason for the change, in the actor's words; may be empty.
    pub note: String,
}

impl By {
    /// Actor `who` of a change, without a reason.
    pub fn new(who: impl Into<String>) -> Self {
        Self { who: who.into(), note: String::new() }
    }
}

/// Result of a change that was applied: the new version and what waits for later.
#[derive(Clone, Debug, PartialEq)]
pub struct Applied {
    /// Version number of the config now in force.
    pub version: u64,
    /// Differences of the texts from the version before, key by key.
    pub changes: Vec<Change>,
    /// Keys whose new value waits for an upgrade or a restart.
    pub pending: Vec<String>,
    /// Pools whose new workers are being made ready; the old ones answer until then.
    pub replacing: Vec<String>,
    /// True if a restart comes up with this version.
    pub persisted: bool,
}

/// Reason why a config was not applied; the one in force stays.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The text is no valid config; every fault is listed.
    #[error("{0}")]
    Faults(#[from] Faults),
    /// A pool of the config cannot be run on this machine.
    #[error("{0}")]
    Pool(#[from] FleetError),
    /// A provider of the config cannot be used.
    #[error("{0}")]
    Provider(#[from] ProviderError),
    /// Conflict with another change, which came first: the version in force is not the expected one.
    #[error(
        "version {expected} was expected to be in force, it is {current}: look at what has changed, then apply again"
    )]
    Conflict {
        /// Version that the caller expected to be in force.
        expected: u64,
        /// Version that is in force.
        current: u64,
    },
    /// The version is not in the history.
    #[error("version {0} is not in the history")]
    Unknown(u64),
    /// A mark for a hidden value stands for no value in force.
    #[error(
        "{0}: the mask of a hidden value matches no value in force: write the value itself, or its file or environment variable"
    )]
    Hidden(String),
    /// The config file cannot be read; the text names the file and the reason.
    #[error("{0}")]
    Read(String),
    /// The file is empty, and the config in force is not.
    #[error(
        "{0}: the config file is empty, so nothing changes; a file with one comment line (# defaults) asks for every default"
    )]
    Empty(String),
    /// The config file cannot be written; the text names the file and the reason.
    #[error("{0}")]
    Write(String),
    /// An upgrade goes on: the next process has been given the config, and would not hear of a change.
    #[error(
        "an upgrade goes on, and the next process would not hear of the change: nothing has changed; change the config when the upgrade has ended"
    )]
    Upgrading,
    /// The config would be written over a text of the file that has never been in force; the text names the file.
    #[error(
        "{0}: the config file holds a text that is not in force, and writing this config would lose it: reload the file first \
         (or mend it, where it was refused), then change the config again"
    )]
    Unread(String),
}

/// Source of a config text that is to be applied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// The config file, read at start, on a signal or a change.
    File,
    /// A request of the admin API.
    Admin,
    /// No new text: the text in force is applied once more.
    Nowhere,
}

/// Returns true if a file has lost its text: a writer can be between two steps, or a mount has gone wrong. An empty file never
/// means every default at once.
fn is_emptied(text: &str, in_force: &str) -> bool {
    text.trim().is_empty() && !in_force.trim().is_empty()
}

/// Function that sets the filter of the process's log; its error says what is wrong with the text.
pub type LogLevel = Box<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// Config in force and its changes; see the module header.
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
    /// Config text in force, from the file or the admin API.
    text: String,
    /// Text of the file when it was last read or written here. The text in force may be another one, which the admin
    /// API has applied.
    file: String,
    /// True where the file's text was refused and nothing has been put in force since: a key file that it names may
    /// come later.
    file_refused: bool,
    /// True where the file's text was refused and has not been replaced since: a config that is written would lose it.
    file_unused: bool,
    /// Config with which the process began: fixed keys are compared with it.
    began: Arc<Snapshot>,
    pending: Vec<String>,
    persisted: bool,
    /// True while an upgrade hands the config over; see [`Live::withhold_changes`].
    is_withheld: bool,
}

/// Time in which an upgrade goes on: changes by admins and signals are refused until this is dropped.
pub(crate) struct Withheld<'a>(&'a Live);

impl Drop for Withheld<'_> {
    fn drop(&mut self) {
        self.0.state().is_withheld = false;
    }
}

impl State {
    /// Refusal of a change that expects another version to be in force.
    fn conflict(&self, expected: Option<u64>) -> Option<ApplyError> {
        let expected = expected.filter(|expected| *expected != self.version)?;
        Some(ApplyError::Conflict { expected, current: self.version })
    }
}

/// Config that a process begins with: from the file, or from the process before it.
pub struct Begin {
    /// Config text in force at the begin.
    pub text: String,
    /// Config of the text as it was checked, before fixed keys were reset.
    pub config: Snapshot,
    /// Text of the file, where it is not the one in force: the process before this one has handed over a config that an
    /// admin had applied.
    pub file: Option<String>,
}

impl Live {
    /// Live config of a process, from its begin on.
    pub fn new(
        gateway: Arc<Gateway>,
        fleet: Arc<Fleet>,
        source: Source,
        begin: Begin,
        log_level: LogLevel,
    ) -> Arc<Self> {
        let Begin { text, config, file } = begin;
        let history = History::new(gateway.clone());
        let persisted = file.is_none();
        let version = history.begin(&text, persisted);
        gateway.marks.begin(version, unix_seconds());
        // The process before may have refused it.
        let file_unused = file.as_ref().is_some_and(|file| source.load(file).is_err());
        gateway.marks.file(!file_unused);
        let file = file.unwrap_or_else(|| text.clone());
        let (began, pending, is_withheld) = (Arc::new(config), Vec::new(), false);
        let state =
            State { version, text, file, file_refused: false, file_unused, began, pending, persisted, is_withheld };
        Arc::new(Self { gateway, fleet, source, log_level, history, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of the version in force, and its config text.
    pub fn current(&self) -> (u64, String) {
        let state = self.state();
        (state.version, state.text.clone())
    }

    /// Keys whose value in the text waits for an upgrade or a restart.
    pub fn pending(&self) -> Vec<String> {
        self.state().pending.clone()
    }

    /// Returns true if a restart comes up with the config in force.
    pub fn is_persisted(&self) -> bool {
        self.state().persisted
    }

    /// Source of the config: the file and the command line.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Configs that were in force or refused, newest first.
    pub fn history(&self) -> Vec<Entry> {
        self.history.list()
    }

    /// Config text of `version`; `None`: it is not in the history.
    pub fn text_of(&self, version: u64) -> Option<String> {
        self.history.text(version)
    }

    /// Checks that a text could come into force, pools and all; changes nothing. Returns the differences.
    ///
    /// # Errors
    /// Every fault of the text.
    pub fn validate(&self, text: &str) -> Result<Vec<Change>, ApplyError> {
        let known = self.current().1;
        let text = &hidden::restored(text, &known).map_err(ApplyError::Hidden)?;
        self.prepare(text)?;
        Ok(diff::between(&known, text))
    }

    /// Puts other addresses of providers in force, if a config with these providers still is.
    fn follow_members(&self, members: penstock_config::Members) {
        // No config comes into force between the look at the providers and the swap.
        let _state = self.state();
        if let Err(error) = self.gateway.follow_members(members) {
            tracing::error!(%error, "the new addresses of a provider cannot be used: the ones in force stay");
        }
    }

    fn prepare(&self, text: &str) -> Result<(Snapshot, Plan), ApplyError> {
        let config = self.source.load(text)?;
        let plan = self.fleet.plan(&config)?;
        Ok((config, plan))
    }

    /// Refuses changes by admins and signals while an upgrade goes on: the next process has the config that is given here, and reads the file for
    /// itself. `None`: the file has it; else the config in force, and the text of the file as it was last read or written.
    pub(crate) fn withhold_changes(&self) -> (Withheld<'_>, Option<(String, String)>) {
        let mut state = self.state();
        state.is_withheld = true;
        let beside = (!state.persisted).then(|| (state.text.clone(), state.file.clone()));
        (Withheld(self), beside)
    }

    /// Pools of the process.
    pub(crate) fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// Reason why an admin's change cannot be made now, whatever it is.
    fn hindrance(&self, state: &State, expected: Option<u64>) -> Option<ApplyError> {
        let is_late = state.is_withheld || self.gateway.is_leaving();
        if is_late { Some(ApplyError::Upgrading) } else { state.conflict(expected) }
    }

    /// Reads the file again, with every file that it names. Without a config file, the files that the config in force
    /// names are read again.
    ///
    /// # Errors
    /// [`ApplyError`]: nothing has changed.
    pub fn reload(&self, by: &By) -> Result<Applied, ApplyError> {
        self.reload_expected(by, None)
    }

    /// Reloads as [`Live::reload`] does, if `expected` is the version in force or `None`.
    ///
    /// # Errors
    /// [`ApplyError`]: nothing has changed.
    pub fn reload_expected(&self, by: &By, expected: Option<u64>) -> Result<Applied, ApplyError> {
        self.gateway.refresh_certificate();
        let (read, mut state) = self.look();
        // A process that another one has taken over from reads the file all the same, for the connections that are still open.
        let hindrance = if state.is_withheld { Some(ApplyError::Upgrading) } else { state.conflict(expected) };
        let done = match hindrance {
            Some(hindrance) => Err(hindrance),
            None => {
                let done = read.map_err(ApplyError::Read).and_then(|text| self.take(&mut state, &text, by));
                self.gateway.marks.file(done.is_ok());
                done
            }
        };
        drop(state);
        self.note(&done);
        done
    }

    /// Reloads if the file's text is another than the one last read from it. A config that an admin has applied since
    /// stays in force until then.
    pub(crate) fn reload_changed(&self, by: &By) {
        let (read, mut state) = self.look();
        match read {
            Ok(text) if text == state.file && !state.file_refused => self.gateway.marks.file(!state.file_unused),
            // An editor or a mount may be between two steps; what runs goes on.
            Ok(text) if is_emptied(&text, &state.text) => {
                self.gateway.marks.file(false);
                tracing::warn!("config file is empty: the config in force stays");
            }
            Err(reason) => {
                self.gateway.marks.file(false);
                tracing::warn!(reason, "config file cannot be read: the config in force stays");
            }
            // The text that was looked at: a moment later the file may be empty, on its way to its next state.
            Ok(text) => {
                self.gateway.refresh_certificate();
                let is_again = state.file_refused && text == state.file;
                let done = self.take(&mut state, &text, by);
                self.gateway.marks.file(done.is_ok());
                drop(state);
                // The process that serves says it again.
                if done.is_ok() || !is_again || !self.gateway.is_leaving() {
                    self.note(&done);
                }
            }
        }
    }

    /// Text of the file, and the state to compare it with: no config came into force (and so was written to the file)
    /// between the two. The file is read without the lock, because it may be a pipe.
    fn look(&self) -> (Result<String, String>, MutexGuard<'_, State>) {
        loop {
            let version = self.state().version;
            let read = self.source.read();
            let state = self.state();
            if state.version == version {
                return (read, state);
            }
        }
    }

    /// Puts a text that was read from the file in force.
    fn take(&self, state: &mut State, text: &str, by: &By) -> Result<Applied, ApplyError> {
        let Some(path) = self.source.path() else {
            let text = state.text.clone();
            return self.put(state, &text, by, Origin::Nowhere);
        };
        if is_emptied(text, &state.text) {
            return Err(ApplyError::Empty(path.display().to_string()));
        }
        let mut by = by.clone();
        if !state.persisted && by.note.is_empty() && text != state.text {
            by.note = format!("the file, in place of version {}, which was not in it", state.version);
        }
        let done = self.put(state, text, &by, Origin::File);
        text.clone_into(&mut state.file);
        (state.file_refused, state.file_unused) = (done.is_err(), done.is_err());
        done
    }

    /// Puts a text in force, if `expected` is the version in force or `None`. The text is written to the file if the
    /// config allows that (`server.config_writes`) and the file holds no text that has not been in force; else a restart
    /// comes up with the file as it is.
    ///
    /// # Errors
    /// [`ApplyError`]: nothing has changed.
    pub fn apply(&self, text: &str, by: &By, expected: Option<u64>) -> Result<Applied, ApplyError> {
        let mut state = self.state();
        let done = match self.hindrance(&state, expected) {
            Some(hindrance) => Err(hindrance),
            None => self.put(&mut state, text, by, Origin::Admin),
        };
        drop(state);
        self.note(&done);
        done
    }

    /// Puts the text that `edit` makes of the text in force in force; no other change comes between the two. The file is
    /// written as by [`Live::apply`].
    ///
    /// # Errors
    /// The error of `edit`, or [`ApplyError`]: nothing has changed.
    pub fn edit<E: From<ApplyError>>(
        &self,
        by: &By,
        edit: impl FnOnce(&str) -> Result<String, E>,
    ) -> Result<Applied, E> {
        let mut state = self.state();
        let done = match self.hindrance(&state, None) {
            Some(hindrance) => Err(hindrance),
            None => {
                let text = edit(&state.text)?;
                self.put(&mut state, &text, by, Origin::Admin)
            }
        };
        drop(state);
        self.note(&done);
        Ok(done?)
    }

    /// Puts an earlier version in force, if `expected` is the version in force or `None`.
    ///
    /// # Errors
    /// [`ApplyError`]: nothing has changed.
    pub fn rollback(&self, version: u64, by: &By, expected: Option<u64>) -> Result<Applied, ApplyError> {
        let text = self.history.text(version).ok_or(ApplyError::Unknown(version))?;
        let note = if by.note.is_empty() { format!("back to version {version}") } else { by.note.clone() };
        self.apply(&text, &By { who: by.who.clone(), note }, expected)
    }

    fn put(&self, state: &mut State, text: &str, by: &By, from: Origin) -> Result<Applied, ApplyError> {
        let done = self.swap_in(state, text, by, from);
        // With a refused text, too, the store gets what it has missed, and may number it otherwise.
        state.version = self.history.in_force().unwrap_or(state.version);
        done
    }

    fn swap_in(&self, state: &mut State, text: &str, by: &By, from: Origin) -> Result<Applied, ApplyError> {
        let text = &hidden::restored(text, &state.text).map_err(ApplyError::Hidden)?;
        let refused = |error: ApplyError| {
            self.keep(text, by, "refused");
            error
        };
        let (mut config, plan) = self.prepare(text).map_err(refused)?;
        let pending = fixed::hold(&state.began, &self.gateway.serving().config, &mut config);
        let providers = self.gateway.providers_of(&config).map_err(|error| refused(error.into()))?;
        let writes = from == Origin::Admin && config.config_writes && self.source.path().is_some();
        let before = if writes { Some(self.replaceable(state, text)?) } else { None };
        if writes {
            self.source.write(text).map_err(ApplyError::Write)?;
        }
        if let Err(error) = self.fleet.carry_out(plan) {
            // The text that a restart should find, unless somebody has saved another one meanwhile.
            if let Some(before) = before.filter(|_| self.source.read().is_ok_and(|there| there == *text)) {
                self.source.write(&before).map_err(ApplyError::Write)?;
            }
            return Err(refused(error.into()));
        }
        // A filter that an admin has set stays as long as the config says the same.
        if config.log_level != self.gateway.serving().config.log_level
            && let Err(reason) = (self.log_level)(&config.log_level)
        {
            tracing::warn!(reason, "log level could not be changed");
        }
        self.gateway.swap(config, self.fleet.upstreams(), providers);
        let changes = diff::between(&state.text, text);
        if !changes.is_empty() || *text != state.text {
            state.version = self.keep(text, by, "applied").unwrap_or(state.version);
            text.clone_into(&mut state.text);
        }
        state.pending = pending;
        match from {
            Origin::File => state.persisted = true,
            Origin::Admin => {
                (state.persisted, state.file_refused) =
                    (writes || self.source.path().is_some() && *text == state.file, false);
                if writes {
                    text.clone_into(&mut state.file);
                }
                if state.persisted || self.source.path().is_none() {
                    state.file_unused = false;
                    self.gateway.marks.file(true);
                }
            }
            Origin::Nowhere => {}
        }
        Ok(Applied {
            version: state.version,
            changes,
            pending: state.pending.clone(),
            replacing: self.fleet.replacing(),
            persisted: state.persisted,
        })
    }

    /// Keeps a text in the history, and gives its version. A process that another one has taken over from keeps nothing: the other one reads the same
    /// file.
    fn keep(&self, text: &str, by: &By, outcome: &str) -> Option<u64> {
        (!self.gateway.is_leaving()).then(|| self.history.keep(text, by, outcome))
    }

    /// Text of the file that `text` may be written over: the one in force, the one last read and in force then, or `text` itself.
    fn replaceable(&self, state: &State, text: &str) -> Result<String, ApplyError> {
        let there = self.source.read().map_err(ApplyError::Read)?;
        let is_known = there == state.text || there == state.file && !state.file_unused;
        if is_known || there == text {
            return Ok(there);
        }
        Err(ApplyError::Unread(self.source.path().map(|path| path.display().to_string()).unwrap_or_default()))
    }

    fn note(&self, done: &Result<Applied, ApplyError>) {
        let is_leaving = self.gateway.is_leaving();
        match done {
            Ok(applied) => {
                let changes: Vec<_> = applied.changes.iter().map(Change::path).collect();
                let (changes, pending) = (changes.join(" "), applied.pending.join(" "));
                if is_leaving {
                    tracing::info!(changes, "config in force for the connections that this process still has");
                    return;
                }
                tracing::info!(version = applied.version, changes, replacing = ?applied.replacing, "config in force");
                if !pending.is_empty() {
                    tracing::warn!(
                        keys = pending,
                        "changed config keys keep their old value until an upgrade or a restart"
                    );
                }
                let outcome = if applied.changes.is_empty() { Outcome::Unchanged } else { Outcome::Applied };
                self.gateway.marks.done(outcome, applied.version, applied.pending.len(), unix_seconds());
            }
            Err(error @ (ApplyError::Conflict { .. } | ApplyError::Upgrading)) => {
                tracing::warn!(%error, "config not changed");
            }
            Err(error) if is_leaving => {
                tracing::debug!(%error, "config refused by a process that ends: another one serves, and says what it makes of it");
            }
            Err(error) => {
                for line in error.to_string().lines() {
                    tracing::error!(fault = line, "config refused: the config in force stays");
                }
                self.gateway.marks.refused(unix_seconds());
            }
        }
    }
}
