//! History of configs that were in force or were refused. The store keeps them, so that they outlive the process and
//! all gateways on it see them; the last few are in memory too, for when the store does not answer.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_store::{ConfigRecord, NewConfig, Store, StoreError};
use sha2::{Digest, Sha256};

use super::By;
use crate::gateway::Gateway;
use penstock_base::clock::unix_seconds;

/// Most configs that the store keeps; older ones are deleted.
const STORED_MAX: u32 = 100;
/// Most configs kept in memory, for when the store does not answer.
const KEPT_MAX: usize = 16;
/// Most bytes of config texts kept in memory.
const BYTES_MAX: usize = 8 << 20;
/// Most times that one config is stored, until it has a number above those that were given.
const AGAIN_MAX: usize = 64;
/// Actors whose config text was that of the file.
const FROM_FILE: [&str; 3] = ["start", "file", "signal"];
/// Timeout of the store: a slow store does not keep a config from coming into force.
const PATIENCE: Duration = Duration::from_secs(5);

/// One config of the history, applied or refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Version number, which rises with every config.
    pub version: u64,
    /// Time at which the config was applied or refused, in Unix seconds.
    pub at: u64,
    /// Actor: `file`, `signal`, `start`, or the id of an admin key.
    pub who: String,
    /// Reason for the change, in the actor's words; may be empty.
    pub note: String,
    /// Outcome of the change: `applied` or `refused`.
    pub outcome: String,
    /// Size of the config text in bytes.
    pub bytes: u64,
}

impl From<ConfigRecord> for Entry {
    fn from(record: ConfigRecord) -> Self {
        Self {
            version: record.number,
            at: record.at,
            who: record.actor,
            note: record.note,
            outcome: record.outcome,
            bytes: record.bytes,
        }
    }
}

/// History of the configs, in the store and the last few in memory.
pub struct History {
    gateway: Arc<Gateway>,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// Highest number that was given.
    last: u64,
    entries: VecDeque<(Entry, String)>,
    /// Configs that the store did not take, oldest first, with the numbers that they have here.
    unstored: VecDeque<(u64, NewConfig)>,
}

impl History {
    pub(super) fn new(gateway: Arc<Gateway>) -> Self {
        Self { gateway, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the store; `None` where there is no store, or where it does not answer in time.
    fn ask<T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        question: impl FnOnce(Arc<dyn Store>) -> F,
    ) -> Option<T> {
        let store = self.gateway.keeper()?.store.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        let answered = runtime.block_on(async { tokio::time::timeout(PATIENCE, question(store)).await });
        match answered {
            Ok(Ok(answer)) => Some(answer),
            Ok(Err(error)) => {
                tracing::warn!(%error, "the config history is kept in memory only: the store failed");
                None
            }
            Err(_) => {
                tracing::warn!("the config history is kept in memory only: the store does not answer");
                None
            }
        }
    }

    /// Version that a process begins with: the newest of the history, if its text is the same. Otherwise the text
    /// becomes a version of its own, and both the log and the history say that it is not the newest one. `is_file`: the
    /// text is the file's.
    pub(super) fn begin(&self, text: &str, is_file: bool) -> u64 {
        let sha256 = digest(text);
        let newest = self.ask(|store| async move { store.configs(None, STORED_MAX).await });
        let newest = newest.map_or_else(Vec::new, |listing| listing.items);
        let last = newest.first().map_or(0, |record| record.number);
        let applied = newest.into_iter().find(|record| record.outcome == "applied");
        self.kept().last = last;
        let before = match applied {
            Some(same) if same.sha256 == sha256 => {
                let version = same.number;
                self.kept().push(same.into(), text);
                tracing::info!(version, "config in force");
                return version;
            }
            before => before,
        };
        let mut by = By::new("start");
        if let Some(before) = before.as_ref().filter(|_| is_file) {
            by.note = format!("the file, in place of version {} by {}", before.number, before.actor);
        }
        let version = self.keep(text, &by, "applied");
        match before.filter(|before| is_file && !FROM_FILE.contains(&before.actor.as_str())) {
            Some(before) => tracing::warn!(
                version,
                replaced_version = before.number,
                replaced_by = before.actor,
                "config in force is the config file's: the newest version of the history differs and is no longer in force \
                 (penstock admin config rollback puts it in force again)"
            ),
            None => tracing::info!(version, "config in force"),
        }
        version
    }

    /// Stores a text and gives it a number. A text that is refused twice in a row is stored once.
    pub(super) fn keep(&self, text: &str, by: &By, outcome: &str) -> u64 {
        let again =
            |(entry, kept): &(Entry, String)| entry.outcome == "refused" && outcome == "refused" && kept == text;
        if let Some((entry, _)) = self.kept().entries.front().filter(|front| again(front)) {
            return entry.version;
        }
        let new = NewConfig {
            text: text.to_owned(),
            sha256: digest(text),
            at: unix_seconds(),
            actor: by.who.clone(),
            note: by.note.clone(),
            outcome: outcome.to_owned(),
        };
        let version = self.numbered(&new, |config| {
            self.ask(|store| async move { store.save_config(config, STORED_MAX).await }).map(|record| record.number)
        });
        if self.gateway.keeper().is_none() {
            self.kept().unstored.clear();
        }
        version
    }

    /// Stores a config behind those that the store did not take before, and gives it a number above all that were given.
    pub(super) fn numbered(&self, new: &NewConfig, mut save: impl FnMut(NewConfig) -> Option<u64>) -> u64 {
        let mut unstored = std::mem::take(&mut self.kept().unstored);
        while let Some((told, config)) = unstored.front() {
            match taken(&mut save, config, *told) {
                Taken::Away => break,
                Taken::At(number) => self.kept().renumber(*told, number),
                Taken::Below => {}
            }
            unstored.pop_front();
        }
        let least = self.kept().last + 1;
        let taken = if unstored.is_empty() { taken(&mut save, new, least) } else { Taken::Away };
        let mut kept = self.kept();
        let version = if let Taken::At(number) = taken { number } else { least };
        kept.last = version;
        let NewConfig { text, at, actor, note, outcome, .. } = new.clone();
        let bytes = text.len() as u64;
        kept.push(Entry { version, at, who: actor, note, outcome, bytes }, &text);
        if matches!(taken, Taken::Away) {
            unstored.push_back((version, new.clone()));
        }
        let size = |all: &VecDeque<(u64, NewConfig)>| all.iter().map(|(_, config)| config.text.len()).sum::<usize>();
        while unstored.len() > KEPT_MAX || unstored.len() > 1 && size(&unstored) > BYTES_MAX {
            unstored.pop_front();
        }
        kept.unstored = unstored;
        version
    }

    /// Number of the config that was applied last, as it is now in the history; `None`: configs that were refused since have taken its place.
    pub(super) fn in_force(&self) -> Option<u64> {
        self.kept().entries.iter().find(|(entry, _)| entry.outcome == "applied").map(|(entry, _)| entry.version)
    }

    pub(super) fn list(&self) -> Vec<Entry> {
        let stored = self.ask(|store| async move { store.configs(None, STORED_MAX).await });
        match stored {
            Some(listing) => listing.items.into_iter().map(Entry::from).collect(),
            None => self.kept().entries.iter().map(|(entry, _)| entry.clone()).collect(),
        }
    }

    pub(super) fn text(&self, version: u64) -> Option<String> {
        let kept = self.kept().entries.iter().find(|(entry, _)| entry.version == version).map(|(_, text)| text.clone());
        kept.or_else(|| Some(self.ask(|store| async move { store.config(version).await })??.1))
    }
}

/// Answer of the store to a config that is to be stored under a number.
enum Taken {
    /// There is no store, or it does not answer.
    Away,
    /// The store has it under this number.
    At(u64),
    /// The store has it, under lower numbers only.
    Below,
}

/// Stores a config under the number `least` or a higher one: a store that was emptied or set back counts from a lower number, and no
/// number is to stand for two configs.
fn taken(save: &mut impl FnMut(NewConfig) -> Option<u64>, config: &NewConfig, least: u64) -> Taken {
    for _ in 0..AGAIN_MAX {
        match save(config.clone()) {
            None => return Taken::Away,
            Some(number) if number >= least => return Taken::At(number),
            Some(_) => {}
        }
    }
    Taken::Below
}

impl Kept {
    /// Notes that the store has a config under another number than the one that was told while it was away.
    fn renumber(&mut self, told: u64, number: u64) {
        self.last = self.last.max(number);
        if told == number {
            return;
        }
        tracing::warn!(
            told,
            number,
            "a config that came into force while the store was away is stored under another version than the one told"
        );
        // The newest by this number: older ones have been given it in place of another.
        if let Some((entry, _)) = self.entries.iter_mut().find(|(entry, _)| entry.version == told) {
            entry.version = number;
        }
    }

    fn push(&mut self, entry: Entry, text: &str) {
        self.entries.push_front((entry, text.to_owned()));
        let size = |entries: &VecDeque<(Entry, String)>| entries.iter().map(|(_, text)| text.len()).sum::<usize>();
        while self.entries.len() > KEPT_MAX || self.entries.len() > 1 && size(&self.entries) > BYTES_MAX {
            self.entries.pop_back();
        }
    }
}

fn digest(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}
