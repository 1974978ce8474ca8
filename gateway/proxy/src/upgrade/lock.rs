//! One gateway per state folder.
//!
//! The state folder has one owner: the address of the admin API, the socket of upgrades and the local workers belong to
//! it. So a gateway locks `gateway.lock` there (flock) and keeps the descriptor. The kernel frees the lock with the
//! last descriptor of that open file, so a killed gateway leaves nothing behind. In an upgrade the descriptor goes over
//! with the listening sockets: both processes hold the same lock, and the old one closes its own when the new one
//! serves. The file's text, a process id, is for the message alone.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::Taken;

/// Name of the descriptor in the offer of an upgrade.
pub(super) const NAME: &str = "state lock";
/// Name of the lock file in the state folder.
const FILE: &str = "gateway.lock";
/// Longest wait for the lock: a gateway that was killed a moment ago holds it until the kernel has freed its memory.
const FREED_MAX: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(20);

/// Reason why the state folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// The lock is held by another gateway.
    #[error(
        "another gateway runs with the state folder {}{}: give this one a folder of its own (--state-dir DIR, or server.state_dir), \
         stop the other one, or replace it with `penstock upgrade`",
        .folder.display(), .pid.map_or_else(String::new, |pid| format!(" (process {pid})"))
    )]
    Held {
        /// Path of the state folder that is in use.
        folder: PathBuf,
        /// Process id of the other gateway, if the file names it.
        pid: Option<u32>,
    },
    /// The folder cannot be made, or written.
    #[error("state folder: {}: {error}", .path.display())]
    Io {
        /// Path of the folder, or of the file in it.
        path: PathBuf,
        /// Error of the system on that path.
        error: io::Error,
    },
}

/// Exclusive lock of the state folder: one gateway at a time, handed on in an upgrade.
pub struct StateLock(Mutex<Option<File>>);

impl StateLock {
    /// Locks the folder, which is made if it is missing; with `taken`, goes on with the lock of the process before this
    /// one.
    ///
    /// # Errors
    /// [`LockError`] if another gateway holds the lock, or the folder cannot be used.
    pub fn take(folder: &Path, taken: Option<&mut Taken>) -> Result<Arc<Self>, LockError> {
        // A gateway from before there were locks hands none over; one that was told another folder meanwhile hands over that of its own.
        let handed = taken.and_then(Taken::lock).map(File::from).filter(|lock| is_of(lock, folder));
        let is_new = handed.is_none();
        let file = handed.map_or_else(|| lock(folder, FREED_MAX), Ok)?;
        let lock = Self(Mutex::new(Some(file)));
        if is_new {
            lock.sign();
        }
        Ok(Arc::new(lock))
    }

    /// Writes this process's id into the file: messages name it from now on.
    pub fn sign(&self) {
        if let Some(file) = &mut *self.file()
            && let Err(error) = sign(file)
        {
            tracing::warn!(%error, "the process id could not be written to the lock of the state folder");
        }
    }

    /// Second descriptor of the same lock, for the next process.
    pub(super) fn copy(&self) -> io::Result<Option<OwnedFd>> {
        self.file().as_ref().map(|file| file.try_clone().map(OwnedFd::from)).transpose()
    }

    /// Closes this process's descriptor; the lock stays with the process that has a copy.
    pub(super) fn leave(&self) {
        drop(self.file().take());
    }

    fn file(&self) -> std::sync::MutexGuard<'_, Option<File>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lock(folder: &Path, patience: Duration) -> Result<File, LockError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error| LockError::Io { path, error }
    };
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed(folder))?;
    let path = folder.join(FILE);
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let mut file = options.open(&path).map_err(failed(&path))?;
    let until = Instant::now() + patience;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(LOOK),
            Err(Errno::WOULDBLOCK) => {
                return Err(LockError::Held { folder: folder.to_owned(), pid: signed(&mut file) });
            }
            Err(error @ (Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP)) => {
                tracing::warn!(%error, folder = %folder.display(), "the file system of the state folder has no locks: a second \
                    gateway with this folder is not noticed");
                return Ok(file);
            }
            Err(error) => return Err(failed(&path)(error.into())),
        }
    }
}

fn is_of(lock: &File, folder: &Path) -> bool {
    let place = |file: Metadata| (file.dev(), file.ino());
    let (held, there) = (lock.metadata().map(place), fs::metadata(folder.join(FILE)).map(place));
    matches!((held, there), (Ok(held), Ok(there)) if held == there)
}

fn sign(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    writeln!(file, "{}", std::process::id())
}

fn signed(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("penstock-state-{name}-{}", std::process::id()));
        // Left behind by a process of the same number.
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    fn probe(folder: &Path) -> Result<(), LockError> {
        lock(folder, Duration::ZERO).map(drop)
    }

    #[test]
    fn a_folder_has_one_gateway_and_the_message_names_both() {
        let folder = folder("one");
        let first = StateLock::take(&folder, None).expect("nobody has it");
        let second = lock(&folder, Duration::ZERO).expect_err("it is taken").to_string();
        let pid = std::process::id().to_string();
        for words in [folder.to_str().expect("plain"), &pid, "--state-dir", "penstock upgrade"] {
            assert!(second.contains(words), "{words}: {second}");
        }
        assert!(matches!(probe(&folder), Err(LockError::Held { .. })));
        drop(first);
        probe(&folder).expect("free again");
    }

    #[test]
    fn an_upgrade_leaves_no_moment_without_the_lock() {
        let folder = folder("upgrade");
        let old = StateLock::take(&folder, None).expect("nobody has it");
        let copy = old.copy().expect("copied").expect("held");
        drop(old.copy().expect("copied"));
        assert!(probe(&folder).is_err(), "a new process that ended before it served takes nothing along");
        old.leave();
        assert!(probe(&folder).is_err(), "the new process has it");
        assert!(old.copy().expect("nothing to copy").is_none());
        let other = self::folder("elsewhere");
        drop(lock(&other, Duration::ZERO).expect("free"));
        assert!(is_of(&File::from(copy.try_clone().expect("cloned")), &folder));
        assert!(!is_of(&File::from(copy.try_clone().expect("cloned")), &other));
        drop(copy);
        // The old process is still there, with its last streams: it does not keep the folder.
        probe(&folder).expect("free again");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named_with_the_reason() {
        let file = folder("file");
        fs::write(&file, "").expect("written");
        let said = probe(&file.join("below")).expect_err("a file is in the way").to_string();
        assert!(said.contains("below") && said.contains("directory"), "{said}");
    }
}
