//! Pepper: the server-side secret under which issued keys are digested.
//!
//! The store keeps the HMAC-SHA-256 of each issued key under the pepper. With the store alone, nobody can use the keys
//! or test guesses; without the pepper, nobody can choose a digest. The pepper is kept apart from the store: in a file
//! that only the gateway's user may read, or in an environment variable. Losing the pepper loses every issued key.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::key::Digest;

/// Shortest pepper in bytes, without the white space around it; a shorter one is refused.
const PEPPER_BYTES_MIN: usize = 32;
/// Most bytes that are read of a pepper file, so that a wrong path cannot fill the memory.
const PEPPER_BYTES_MAX: usize = 4096;

/// Source of the pepper, the secret under which issued keys are digested (HMAC-SHA-256).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PepperSource {
    /// File `pepper` in the state folder, created when first needed.
    #[default]
    State,
    /// Path of the file that the config names (`auth.pepper_file`).
    File(PathBuf),
    /// Value of the environment variable that the config names (`auth.pepper_env`).
    Given(penstock_base::Secret),
}

/// Source of a config's pepper, with the state folder that may hold it.
#[derive(Clone, Debug)]
pub struct PepperPlace {
    /// Source that the config names.
    pub source: PepperSource,
    /// State folder, or the reason why there is none.
    pub state_dir: Result<PathBuf, String>,
}

impl Default for PepperPlace {
    fn default() -> Self {
        Self { source: PepperSource::State, state_dir: Err("no config names a state folder".into()) }
    }
}

/// Pepper as a keyed HMAC-SHA-256, ready to digest issued keys; its `Debug` output hides the secret.
#[derive(Clone)]
pub struct Pepper(Hmac<Sha256>);

impl std::fmt::Debug for Pepper {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("[pepper]")
    }
}

impl PepperSource {
    /// Checks that the pepper exists and can be used; the state folder's is created on demand, so it always passes.
    ///
    /// # Errors
    /// The file cannot be read, or the secret is too short.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Self::State => Ok(()),
            Self::File(path) => read(path).and_then(|bytes| Pepper::new(&bytes)).map(drop),
            Self::Given(secret) => Pepper::new(secret.expose().as_bytes()).map(drop),
        }
    }
}

impl Pepper {
    /// Creates a pepper from a secret, without the white space around it.
    ///
    /// # Errors
    /// The secret is too short.
    pub fn new(secret: &[u8]) -> Result<Self, String> {
        let secret = secret.trim_ascii();
        if secret.len() < PEPPER_BYTES_MIN {
            return Err(format!("the pepper has fewer than {PEPPER_BYTES_MIN} bytes"));
        }
        Hmac::new_from_slice(secret).map(Self).map_err(|error| error.to_string())
    }

    /// Loads the pepper of a config; `make`: a missing file in the state folder is created.
    ///
    /// # Errors
    /// Text for the operator: the file cannot be read or created, or is too short.
    pub fn of(place: &PepperPlace, make: bool) -> Result<Self, String> {
        let path = match &place.source {
            PepperSource::Given(secret) => return Self::new(secret.expose().as_bytes()),
            PepperSource::File(path) => return read(path).and_then(|bytes| Self::new(&bytes)),
            PepperSource::State => place.state_dir.as_ref().map_err(Clone::clone)?.join("pepper"),
        };
        if make && !path.exists() {
            write(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        read(&path).and_then(|bytes| Self::new(&bytes)).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Digest of a key, as the store keeps it: HMAC-SHA-256 under the pepper.
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

/// Creates the pepper file. If two processes do so at once, one wins and both read its file, which appears whole.
fn write(path: &Path) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(folder)?;
    let mut random = [0; 32];
    getrandom::fill(&mut random).map_err(|error| std::io::Error::other(error.to_string()))?;
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).chain(["\n".into()]).collect();
    // Complete and on disk before it gets its name, so that no process reads half a pepper.
    let draft = folder.join(format!(".pepper.{}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    // Unlike a rename, a hard link does not replace an existing file.
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
