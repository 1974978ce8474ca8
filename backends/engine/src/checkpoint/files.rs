//! Sources of a checkpoint's files: a folder, or bytes embedded in the program. Names never lead out of the folder.

use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use penstock_kernels::host::{FileStamp, MappedFile};

use crate::model_config::error::{CheckpointError, Shown};

/// Bytes of one weight file, mapped or in memory.
#[derive(Debug)]
pub(crate) enum Bytes {
    Mapped(MappedFile),
    Memory(Cow<'static, [u8]>),
}

impl Bytes {
    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Bytes::Mapped(file) => file.bytes(),
            Bytes::Memory(bytes) => bytes,
        }
    }

    /// Stamp of the file when it was mapped; `None`: the bytes lie in memory.
    pub(crate) fn stamp(&self) -> Option<FileStamp> {
        match self {
            Bytes::Mapped(file) => Some(file.stamp()),
            Bytes::Memory(_) => None,
        }
    }

    /// Gives the pages of `range` back to the system; they are read again if touched.
    pub(crate) fn forget(&self, range: std::ops::Range<usize>) {
        if let Bytes::Mapped(file) = self {
            file.forget(range);
        }
    }
}

/// Source of a checkpoint's files, by plain name.
#[derive(Debug)]
pub(crate) enum Folder {
    /// Folder on disk, by canonical path.
    Disk(PathBuf),
    Memory(Vec<(String, Cow<'static, [u8]>)>),
}

impl Folder {
    pub(crate) fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let shown = dir.display().to_string();
        let real = dir.canonicalize().map_err(|e| CheckpointError::file(&shown, format!("cannot be opened: {e}")))?;
        if !real.is_dir() {
            let help = "give the folder that holds config.json, model.safetensors and tokenizer.json, or a .gguf file";
            return Err(CheckpointError::file(shown, "is not a folder").help(help));
        }
        Ok(Folder::Disk(real))
    }

    /// Name of the file for messages.
    pub(crate) fn shown(&self, name: &str) -> String {
        match self {
            Folder::Disk(dir) => format!("{}/{}", dir.display(), Shown(name)),
            Folder::Memory(_) => Shown(name).to_string(),
        }
    }

    /// Reads the whole file; `None` if it does not exist. Refuses more than `limit` bytes.
    pub(crate) fn read(&self, name: &str, limit: usize) -> Result<Option<Cow<'_, [u8]>>, CheckpointError> {
        let too_big = |size: usize| {
            CheckpointError::file(self.shown(name), format!("{size} bytes; such a file has at most {limit}"))
        };
        match self {
            Folder::Memory(files) => match files.iter().find(|(n, _)| n == name) {
                Some((_, bytes)) if bytes.len() > limit => Err(too_big(bytes.len())),
                Some((_, bytes)) => Ok(Some(Cow::Borrowed(bytes))),
                None => Ok(None),
            },
            Folder::Disk(_) => {
                let Some(path) = self.resolve(name)? else { return Ok(None) };
                let mut bytes = Vec::new();
                let read = File::open(path).and_then(|file| file.take(limit as u64 + 1).read_to_end(&mut bytes));
                read.map_err(|e| CheckpointError::file(self.shown(name), format!("cannot be read: {e}")))?;
                if bytes.len() > limit { Err(too_big(bytes.len())) } else { Ok(Some(Cow::Owned(bytes))) }
            }
        }
    }

    /// Bytes of the file, mapped if it is on disk.
    pub(crate) fn map(&self, name: &str) -> Result<Option<Bytes>, CheckpointError> {
        match self {
            Folder::Memory(files) => {
                Ok(files.iter().find(|(n, _)| n == name).map(|(_, bytes)| Bytes::Memory(bytes.clone())))
            }
            Folder::Disk(_) => {
                let Some(path) = self.resolve(name)? else { return Ok(None) };
                let refused = |e: String| CheckpointError::file(self.shown(name), e);
                let size = path.metadata().map_err(|e| refused(format!("cannot be read: {e}")))?.len();
                if size == 0 {
                    return Err(refused("is empty".into()).help("fetch the file again"));
                }
                let file = MappedFile::open(&path).map_err(|e| refused(format!("cannot be mapped: {}", chain(&e))))?;
                Ok(Some(Bytes::Mapped(file)))
            }
        }
    }

    /// Returns true if a file of this name exists; the file is not opened.
    pub(crate) fn has(&self, name: &str) -> bool {
        match self {
            Folder::Memory(files) => files.iter().any(|(n, _)| n == name),
            Folder::Disk(dir) => dir.join(name).exists(),
        }
    }

    /// Real path of `name`; `None` if there is no such file. Refuses names that are neither plain nor those of a file in an inner folder, links that lead out of
    /// the folder (except into the shared blobs of a hub cache), and anything that is not a regular file.
    fn resolve(&self, name: &str) -> Result<Option<PathBuf>, CheckpointError> {
        let Folder::Disk(dir) = self else { return Ok(None) };
        if name.split('/').count() > 2 || !name.split('/').all(is_plain) {
            return Err(CheckpointError::file(self.shown(name), "is not a plain file name"));
        }
        let path = dir.join(name);
        if path.symlink_metadata().is_err() {
            return Ok(None);
        }
        let refused = |reason: String| CheckpointError::file(self.shown(name), reason);
        let real = path.canonicalize().map_err(|e| refused(format!("cannot be opened: {e}")))?;
        let inside = real.starts_with(dir) || hub_blobs(dir).is_some_and(|blobs| real.starts_with(blobs));
        if !inside {
            return Err(refused(format!("is a link to {}, outside of the folder", real.display()))
                .help("copy the file into the folder"));
        }
        if !real.is_file() {
            return Err(refused("is not a regular file".into()));
        }
        Ok(Some(real))
    }
}

/// Maps a file by its path.
pub(crate) fn map(path: &Path) -> Result<Bytes, CheckpointError> {
    let refused = |e: &dyn std::error::Error| CheckpointError::file(path.display().to_string(), chain(e));
    MappedFile::open(path).map(Bytes::Mapped).map_err(|error| refused(&error))
}

/// Returns true if a name is one normal path component, such as `model-00001-of-00002.safetensors`.
pub(crate) fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let single = matches!(parts.next(), Some(Component::Normal(part)) if part == name);
    single && parts.next().is_none() && !name.contains(['\\', '\0'])
}

/// Blobs folder of a hub cache, which keeps `models--x/snapshots/<revision>/<file>` as links to
/// `models--x/blobs/<hash>`.
fn hub_blobs(dir: &Path) -> Option<PathBuf> {
    let snapshots = dir.parent()?;
    (snapshots.file_name()? == "snapshots").then(|| snapshots.with_file_name("blobs"))
}

fn chain(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_files_of_the_folder() {
        for good in ["model.safetensors", "model-00001-of-00002.safetensors", "..a", "a b"] {
            assert!(is_plain(good), "{good}");
        }
        for bad in ["", ".", "..", "../x", "/etc/passwd", "a/b", "a/", "./a", "a\\b", "a\0b"] {
            assert!(!is_plain(bad), "{bad:?}");
        }
    }

    #[test]
    fn blobs_belong_to_a_hub_snapshot_only() {
        assert_eq!(hub_blobs(Path::new("/c/models--x/snapshots/1")), Some(PathBuf::from("/c/models--x/blobs")));
        assert_eq!(hub_blobs(Path::new("/c/models--x/1")), None);
        assert_eq!(hub_blobs(Path::new("/")), None);
    }
}
