//! The pepper: a secret of the server's, without which what the store keeps of a key is worth nothing.
//!
//! What is kept of an issued key is HMAC-SHA-256 of it under the pepper. Whoever has the store can neither use the keys nor try
//! guesses, and whoever has neither cannot choose a digest. The pepper lies apart from the store: in a file that only the gateway's
//! user may read, or in a variable. Losing it is losing every issued key.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::key::Digest;
use crate::config::Snapshot;

/// Shortest secret that is taken for one.
const PEPPER_BYTES_MIN: usize = 32;
/// No more of a file is read.
const PEPPER_BYTES_MAX: usize = 4096;

/// Where the pepper comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PepperSource {
    /// The file `pepper` in the state folder, made when it is first needed.
    #[default]
    State,
    /// A file.
    File(PathBuf),
    /// The environment: the value itself.
    Given(crate::config::Secret),
}

/// The pepper, ready to digest keys.
#[derive(Clone)]
pub struct Pepper(Hmac<Sha256>);

impl std::fmt::Debug for Pepper {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("[pepper]")
    }
}

impl PepperSource {
    /// Whether it is there and can be used; one in the state folder is made when it is needed.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self {
            Self::State => Ok(()),
            Self::File(path) => read(path).and_then(|bytes| Pepper::new(&bytes)).map(drop),
            Self::Given(secret) => Pepper::new(secret.expose().as_bytes()).map(drop),
        }
    }
}

impl Pepper {
    /// Of that secret.
    ///
    /// # Errors
    /// It is too short.
    pub fn new(secret: &[u8]) -> Result<Self, String> {
        let secret = secret.trim_ascii();
        if secret.len() < PEPPER_BYTES_MIN {
            return Err(format!("the pepper has fewer than {PEPPER_BYTES_MIN} bytes"));
        }
        Hmac::new_from_slice(secret).map(Self).map_err(|error| error.to_string())
    }

    /// The pepper of a config; `make`: where it lies in the state folder and is not there yet, it is made.
    ///
    /// # Errors
    /// What to tell the operator.
    pub fn of(config: &Snapshot, make: bool) -> Result<Self, String> {
        let path = match &config.auth.pepper {
            PepperSource::Given(secret) => return Self::new(secret.expose().as_bytes()),
            PepperSource::File(path) => return read(path).and_then(|bytes| Self::new(&bytes)),
            PepperSource::State => crate::fleet::state_dir(config)?.join("pepper"),
        };
        if make && !path.exists() {
            write(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        read(&path).and_then(|bytes| Self::new(&bytes)).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// What is kept of a key.
    pub fn digest(&self, secret: &[u8]) -> Digest {
        let mut mac = self.0.clone();
        mac.update(secret);
        Digest(mac.finalize().into_bytes().into())
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let said = |error: std::io::Error| error.to_string();
    let file = File::open(path).map_err(said)?;
    let mode = file.metadata().map_err(said)?.permissions().mode();
    if mode & 0o077 != 0 {
        tracing::warn!(path = %path.display(), mode = format!("{:o}", mode & 0o777), "the pepper file is readable by other users");
    }
    let mut bytes = Vec::new();
    file.take(PEPPER_BYTES_MAX as u64).read_to_end(&mut bytes).map_err(said)?;
    Ok(bytes)
}

/// Makes one. Of two processes that do it at once, one wins, and both read what it wrote: the file appears whole.
fn write(path: &Path) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(folder)?;
    let mut random = [0; 32];
    getrandom::fill(&mut random).map_err(|error| std::io::Error::other(error.to_string()))?;
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).chain(["\n".into()]).collect();
    let draft = folder.join(format!(".pepper.{}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    // Unlike a rename, a link does not replace what is there.
    let linked = std::fs::hard_link(&draft, path);
    std::fs::remove_file(&draft)?;
    match linked {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => File::open(folder)?.sync_all(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_made_once_for_its_owner_only() {
        let folder = std::env::temp_dir().join(format!("penstock-pepper-{}", std::process::id()));
        let path = folder.join("pepper");
        write(&path).expect("made");
        let first = read(&path).expect("read");
        assert_eq!(std::fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        write(&path).expect("there is one");
        assert_eq!(read(&path).expect("read"), first);
        assert_eq!(std::fs::read_dir(&folder).expect("a folder").count(), 1, "no draft is left");
        std::fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn digests_depend_on_it() {
        let (one, two) = (Pepper::new(&[1; 32]).expect("long"), Pepper::new(&[2; 32]).expect("long"));
        assert_eq!(one.digest(b"k"), one.digest(b"k"));
        assert_ne!(one.digest(b"k"), two.digest(b"k"));
        assert_ne!(one.digest(b"k"), Digest::of(b"k"));
        assert!(Pepper::new(b"short").is_err());
    }
}
