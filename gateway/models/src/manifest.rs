//! `manifest.json` of a stored model: what was fetched, from where, and how it is checked.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::facts::Facts;
use crate::sum::Sum;

/// Name of the file beside a model's folder.
pub(crate) const FILE: &str = "manifest.json";
/// Largest manifest that is read, in bytes.
pub(crate) const BYTES_MAX: u64 = 4 << 20;
/// Version of the layout.
pub(crate) const VERSION: u32 = 1;

/// Record of a stored model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the layout.
    pub version: u32,
    /// Organisation of the repository.
    pub org: String,
    /// Repository of the model.
    pub repo: String,
    /// `safetensors`, or the quantization of a GGUF model.
    pub variant: String,
    /// Commit that was fetched.
    pub commit: String,
    /// Revision that was asked for last.
    pub revision: String,
    /// Revisions that were asked for and were this commit then, with the time of the last such pull in Unix seconds. Empty in manifests of models that were
    /// pulled once: `revision` and `pulled_at` say it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub revisions: BTreeMap<String, u64>,
    /// Address of the hub that sent the files.
    pub hub: String,
    /// Time of the last pull in Unix seconds.
    pub pulled_at: u64,
    /// Facts from the headers.
    pub facts: Facts,
    /// Files, as they lie in the folder.
    pub files: Vec<FileRecord>,
}

/// Record of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Name in the model's folder.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Checksum of the content.
    pub sum: Sum,
}

/// Most revisions that a manifest keeps; those that were asked for longest ago go.
const REVISIONS_MAX: usize = 64;

impl Manifest {
    /// Time of the last pull that asked for the revision; `None`: none did.
    pub(crate) fn asked_at(&self, revision: &str) -> Option<u64> {
        match self.revisions.get(revision) {
            Some(at) => Some(*at),
            None => (self.revision == revision).then_some(self.pulled_at),
        }
    }

    /// Notes one more pull of the commit.
    pub(crate) fn ask(&mut self, revision: &str, at: u64) {
        self.revisions.entry(self.revision.clone()).or_insert(self.pulled_at);
        self.revisions.insert(revision.to_owned(), at);
        (self.revision, self.pulled_at) = (revision.to_owned(), at);
        while self.revisions.len() > REVISIONS_MAX {
            let oldest = self.revisions.iter().min_by_key(|(_, at)| **at).map(|(name, _)| name.clone());
            oldest.map(|name| self.revisions.remove(&name));
        }
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).fold(0, u64::saturating_add)
    }
}
