//! Marker in the state folder: this gateway has known an issued key.
//!
//! With `auth.anonymous = "auto"` everybody on loopback is served until a key was issued, and the store alone cannot say
//! whether one was: a database that was deleted, restored from an empty backup, or is empty after a failover has none. The
//! file `keys.issued` outlives the store's data, so that a gateway which starts with an empty store stays closed. The file's
//! existence is all that counts, whatever is in it, and nobody but the operator removes it. It is written when the desk has
//! issued a key, before the caller gets the key, and when `follow` finds a key in the store.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Result, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::identity::Anonymous;

/// Name of the marker in the state folder.
const FILE: &str = "keys.issued";
/// Text of the marker, for an operator who finds it.
const TEXT: &[u8] = b"This gateway has known an issued API key: while this file is here, it serves nobody without a credential on account of an \
empty store.\nTo begin without keys: stop the gateway, remove this file, and start the gateway with an empty store.\n";

/// Path of the marker in a state folder.
pub(super) fn path(state_dir: &Path) -> PathBuf {
    state_dir.join(FILE)
}

/// Returns true if a state folder has the marker.
///
/// # Errors
/// The system does not say whether it is there.
fn look(state_dir: &Path) -> Result<bool> {
    match fs::symlink_metadata(path(state_dir)) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns true if a state folder has the marker, or may have it because it cannot be looked for.
pub(super) fn counts(state_dir: &Path) -> bool {
    look(state_dir).unwrap_or(true)
}

/// Makes the marker unless it is there; on success it is on disk. The first failure of the process is logged.
pub(super) fn make(state_dir: &Path) -> bool {
    static HAS_FAILED: AtomicBool = AtomicBool::new(false);
    let made = write(state_dir);
    if let Err(error) = &made
        && !HAS_FAILED.swap(true, Ordering::Relaxed)
    {
        let help = "make the state folder writable, or say auth.anonymous = \"deny\"";
        tracing::error!(
            path = %path(state_dir).display(),
            %error,
            help,
            "the state folder cannot be marked as one where a key was issued: if the store loses its keys, the next start serves everybody on loopback"
        );
    }
    made.is_ok()
}

fn write(state_dir: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(state_dir)?;
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path(state_dir)) {
        Ok(mut file) => {
            // On a full disk the file has no text, and counts all the same.
            let _ = file.write_all(TEXT);
            file.sync_all()?;
            File::open(state_dir)?.sync_all()
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// State of the marker in a running gateway: whether it is there, and which log lines were written about it. Only `follow` changes it.
#[derive(Debug, Default)]
pub(super) struct Marker {
    /// True if the file is there, or may be there because it cannot be looked for.
    counts: AtomicBool,
    /// True once the file was found or made: it is not looked for, and not made, again.
    is_there: AtomicBool,
    /// True while the log says that the file cannot be looked for.
    is_hidden: AtomicBool,
    /// True while the log says that the store has no key although the file is there.
    is_told: AtomicBool,
}

impl Marker {
    /// Returns true if an empty store does not open the gateway.
    pub(super) fn counts(&self) -> bool {
        self.counts.load(Ordering::Acquire)
    }

    /// Looks for the file, unless it was found before. A command beside the gateway, or another process in an upgrade, may have made it.
    pub(super) fn look(&self, state_dir: &Path) {
        if self.is_there.load(Ordering::Relaxed) {
            return;
        }
        let found = look(state_dir);
        self.counts.store(!matches!(found, Ok(false)), Ordering::Release);
        self.is_there.store(matches!(found, Ok(true)), Ordering::Relaxed);
        let was_hidden = self.is_hidden.swap(found.is_err(), Ordering::Relaxed);
        if let Err(error) = found
            && !was_hidden
        {
            let help = "let the gateway's user read the state folder";
            tracing::warn!(
                path = %path(state_dir).display(),
                %error,
                help,
                "the marker of issued keys cannot be looked for: nobody is served without a credential, unless auth.anonymous is \"allow\""
            );
        }
    }

    /// Makes the file, unless it is known to be there: the store has a key, or has lost one.
    pub(super) fn keep(&self, state_dir: &Path) {
        if !self.is_there.load(Ordering::Relaxed) && make(state_dir) {
            self.is_there.store(true, Ordering::Relaxed);
            self.counts.store(true, Ordering::Release);
        }
    }

    /// Logs, once, that the store has no key although the file is there; `has_keys`: the store has one (again). `anonymous`: what follows
    /// by the config.
    pub(super) fn compare(&self, state_dir: &Path, has_keys: bool, anonymous: Anonymous) {
        let is_odd = !has_keys && self.is_there.load(Ordering::Relaxed);
        if self.is_told.swap(is_odd, Ordering::Relaxed) || !is_odd {
            return;
        }
        let file = path(state_dir);
        if anonymous == Anonymous::Allow {
            let help = format!(
                "check the store (store.path, store.url); if it is meant to be empty, remove {} and restart",
                file.display()
            );
            tracing::warn!(
                help,
                "the store has no issued key although this gateway has known one: requests with such a key are served as those without any \
                 (auth.anonymous is \"allow\")"
            );
        } else {
            let help = format!(
                "check the store (store.path, store.url); to begin without keys, stop the gateway, remove {} and start it, or say \
                 auth.anonymous = \"allow\"",
                file.display()
            );
            tracing::warn!(
                help,
                "the store has no issued key although this gateway has known one: such keys are refused, and nobody is served without a credential"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use penstock_base::testing::logged;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("penstock-marker-{name}-{}", std::process::id()));
        // Left behind by a process of the same number.
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn it_is_made_once_for_its_owner_only() {
        let folder = folder("made");
        assert!(!counts(&folder));
        assert!(make(&folder) && counts(&folder));
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(&path(&folder)), mode(&folder)), (0o600, 0o700));
        fs::write(path(&folder), "whatever").expect("written");
        assert!(make(&folder) && counts(&folder));
        assert_eq!(fs::read(path(&folder)).expect("read"), b"whatever", "one that is there is left alone");
        fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn a_marker_that_cannot_be_looked_for_counts_until_it_can_be() {
        let (folder, marker) = (folder("hidden"), Marker::default());
        fs::write(&folder, "a file in the way").expect("written");
        let lines = logged(|| (0..3).for_each(|_| marker.look(&folder)));
        assert!(marker.counts() && counts(&folder));
        assert_eq!(lines.matches("the marker of issued keys cannot be looked for").count(), 1, "{lines}");
        fs::remove_file(&folder).expect("removed");
        marker.look(&folder);
        assert!(!marker.counts(), "it was not there");
    }

    #[test]
    fn a_marker_that_cannot_be_made_is_told_once_and_tried_again() {
        let (folder, marker) = (folder("unmade"), Marker::default());
        fs::write(&folder, "a file in the way").expect("written");
        let lines = logged(|| (0..3).for_each(|_| marker.keep(&folder)));
        assert_eq!(lines.matches("ERROR").count(), 1, "{lines}");
        assert!(lines.contains("serves everybody on loopback") && lines.contains(FILE), "{lines}");
        assert!(!marker.counts());
        fs::remove_file(&folder).expect("removed");
        marker.keep(&folder);
        assert!(marker.counts() && counts(&folder));
        fs::remove_dir_all(&folder).expect("removed");
    }
}
