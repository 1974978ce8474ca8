//! `manifest.json` of a stored model: what was fetched, from where, and how it is checked.

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
    /// Revision that was asked for.
    pub revision: String,
    /// Address of the hub that sent the files.
    pub hub: String,
    /// Time of the pull in Unix seconds.
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

impl Manifest {
    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).fold(0, u64::saturating_add)
    }
}
