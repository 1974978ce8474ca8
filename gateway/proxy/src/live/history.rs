//! The configs that were in force: the last few in memory, all that the store keeps behind them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::By;
use crate::clock::unix_seconds;
use crate::gateway::Gateway;

/// Configs in memory.
const KEPT_MAX: usize = 16;
/// Bytes of their texts.
const BYTES_MAX: usize = 8 << 20;

/// A config that was applied or refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Rises.
    pub version: u64,
    /// Unix seconds.
    pub at: u64,
    /// Who.
    pub who: String,
    /// Why.
    pub note: String,
    /// `applied` or `refused`.
    pub outcome: String,
    /// Of the text.
    pub bytes: u64,
}

/// See the module header.
pub struct History {
    _gateway: Arc<Gateway>,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    last: u64,
    entries: VecDeque<(Entry, String)>,
}

impl History {
    pub(super) fn new(gateway: Arc<Gateway>) -> Self {
        Self { _gateway: gateway, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a text and gives it a number.
    pub(super) fn keep(&self, text: &str, by: &By, outcome: &str) -> u64 {
        let mut kept = self.kept();
        kept.last += 1;
        let entry = Entry {
            version: kept.last,
            at: unix_seconds(),
            who: by.who.clone(),
            note: by.note.clone(),
            outcome: outcome.to_owned(),
            bytes: text.len() as u64,
        };
        kept.entries.push_front((entry, text.to_owned()));
        let too_large = |kept: &Kept| kept.entries.iter().map(|(_, text)| text.len()).sum::<usize>() > BYTES_MAX;
        while kept.entries.len() > KEPT_MAX || kept.entries.len() > 1 && too_large(&kept) {
            kept.entries.pop_back();
        }
        kept.last
    }

    pub(super) fn list(&self) -> Vec<Entry> {
        self.kept().entries.iter().map(|(entry, _)| entry.clone()).collect()
    }

    pub(super) fn text(&self, version: u64) -> Option<String> {
        self.kept().entries.iter().find(|(entry, _)| entry.version == version).map(|(_, text)| text.clone())
    }
}
