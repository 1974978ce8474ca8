//! Keys of the admin API: those of the config, or one that was made for this machine.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{HeaderMap, header};
use penstock_config::{AdminKey, Role};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// File in the state folder that holds the key made at the first start.
pub const KEY_FILE: &str = "admin.key";
/// Id of that key in logs and audit.
pub const LOCAL_KEY: &str = "local";
/// Longest key that is compared, in bytes.
const KEY_BYTES_MAX: usize = 512;

/// Caller of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Id of the key.
    pub(crate) key: String,
    /// Role of the key.
    pub(crate) role: Role,
    /// Name to show of a person of an identity provider; `None`: the caller has an admin key.
    pub(crate) person: Option<String>,
}

/// Key that matched a credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Id and role of the key.
    pub(crate) caller: Caller,
    /// True where the key has been used before, or cannot be guessed: guesses from the same address do not keep it out.
    pub(crate) is_proven: bool,
    /// SHA-256 of the key.
    pub(crate) digest: [u8; 32],
}

/// Most keys that are remembered as used: far more than a config has.
const PROVEN_MAX: usize = 1024;

/// Key of this machine, which counts while the config has none, and the keys that have been used.
pub(crate) struct AdminKeys {
    state_dir: PathBuf,
    local: OnceLock<AdminKey>,
    proven: Mutex<HashSet<[u8; 32]>>,
}

impl AdminKeys {
    /// Opens the keys. Without configured keys, the key of the state folder is read, or made.
    pub(crate) fn open(configured: &[AdminKey], state_dir: &Path) -> io::Result<Self> {
        let keys = Self { state_dir: state_dir.to_owned(), local: OnceLock::new(), proven: Mutex::default() };
        if configured.is_empty() {
            keys.local()?;
        }
        Ok(keys)
    }

    fn local(&self) -> io::Result<&AdminKey> {
        if let Some(key) = self.local.get() {
            return Ok(key);
        }
        let digest = Sha256::digest(local_key(&self.state_dir)?).into();
        Ok(self.local.get_or_init(|| AdminKey { id: LOCAL_KEY.into(), digest, role: Role::Owner, limits: Vec::new() }))
    }

    /// Key whose credential a request carries: one of `configured` or, without any, the machine's. Every key is
    /// compared, each in constant time.
    pub(crate) fn find(&self, configured: &[AdminKey], given: &[u8]) -> Option<Found> {
        if given.len() > KEY_BYTES_MAX {
            return None;
        }
        let digest: [u8; 32] = Sha256::digest(given).into();
        let caller = self.holder(configured, &digest)?;
        let is_local = configured.is_empty();
        let is_proven = is_local || self.proven.lock().unwrap_or_else(PoisonError::into_inner).contains(&digest);
        Some(Found { caller, is_proven, digest })
    }

    /// Id and role, as they are now, of the key with that SHA-256; `None`: there is no such key any more.
    pub(crate) fn holder(&self, configured: &[AdminKey], digest: &[u8; 32]) -> Option<Caller> {
        // A reload may have taken the last configured key away, and the machine's may not be readable: then there is none.
        let local = configured.is_empty().then(|| self.local().ok()).flatten();
        let mut found = None;
        for key in configured.iter().chain(local) {
            if bool::from(key.digest.ct_eq(digest)) {
                found = Some(key);
            }
        }
        found.map(|key| Caller { key: key.id.clone(), role: key.role, person: None })
    }

    /// Notes that a key was used.
    pub(crate) fn proven(&self, found: &Found) {
        let mut proven = self.proven.lock().unwrap_or_else(PoisonError::into_inner);
        if proven.len() >= PROVEN_MAX {
            // Most of the remembered keys belong to configs that are gone.
            proven.clear();
        }
        proven.insert(found.digest);
    }
}

/// Credential of `Authorization: Bearer KEY`, which must be sent once.
pub(crate) fn credential(headers: &HeaderMap) -> Option<&[u8]> {
    let mut all = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(value), None) = (all.next(), all.next()) else { return None };
    let (scheme, key) = value.as_bytes().split_at_checked(7)?;
    let key = key.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !key.is_empty()).then_some(key)
}

/// Path of the machine's key.
#[must_use]
pub fn key_path(state_dir: &Path) -> PathBuf {
    state_dir.join(KEY_FILE)
}

/// Reads the key of the state folder, or makes it. A file that others may read is refused.
fn local_key(state_dir: &Path) -> io::Result<String> {
    DirBuilder::new().recursive(true).mode(0o700).create(state_dir)?;
    let path = key_path(state_dir);
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
        Ok(mut file) => {
            let mut random = [0; 32];
            getrandom::fill(&mut random).map_err(io::Error::other)?;
            let key = format!("psa_{}", URL_SAFE_NO_PAD.encode(random));
            file.write_all(format!("{key}\n").as_bytes())?;
            file.sync_all()?;
            Ok(key)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if fs::metadata(&path)?.permissions().mode() & 0o077 != 0 {
                let why = format!("{}: others than its owner may read it; chmod 600, or delete it", path.display());
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
            }
            let key = fs::read_to_string(&path)?.trim().to_owned();
            // A process that starts at the same time may have made the file and not filled it yet: this one then fails
            // once.
            let short =
                || io::Error::new(io::ErrorKind::InvalidData, format!("{}: no key in it; delete it", path.display()));
            (key.len() >= 20).then_some(key).ok_or_else(short)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_of_a_machine_is_made_once_and_private() {
        let dir = std::env::temp_dir().join(format!("penstock-admin-keys-{}", std::process::id()));
        let keys = AdminKeys::open(&[], &dir).expect("a key is made");
        let path = key_path(&dir);
        assert_eq!(fs::metadata(&path).expect("it is there").permissions().mode() & 0o777, 0o600);
        let key = fs::read_to_string(&path).expect("text").trim().to_owned();
        let owner = Caller { key: LOCAL_KEY.into(), role: Role::Owner, person: None };
        let found = |keys: &AdminKeys| keys.find(&[], key.as_bytes()).map(|found| (found.caller, found.is_proven));
        assert_eq!(found(&keys), Some((owner.clone(), true)));
        assert_eq!(found(&AdminKeys::open(&[], &dir).expect("it is read")), Some((owner, true)));
        assert_eq!(keys.find(&[], b"psa_wrong"), None);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("it is ours");
        assert!(AdminKeys::open(&[], &dir).is_err(), "others may read it");
        fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn configured_keys_stand_alone() {
        let key =
            AdminKey { id: "ops".into(), digest: Sha256::digest("k").into(), role: Role::Viewer, limits: Vec::new() };
        let configured = [key];
        let keys = AdminKeys::open(&configured, Path::new("/nonexistent")).expect("nothing is made");
        let found = keys.find(&configured, b"k").expect("it is known");
        assert_eq!((found.caller.role, found.is_proven), (Role::Viewer, false));
        keys.proven(&found);
        assert!(keys.find(&configured, b"k").is_some_and(|found| found.is_proven), "used before");
        assert_eq!((keys.find(&configured, b""), keys.find(&configured, &[b'k'; 600])), (None, None));
        assert_eq!(keys.find(&[], b"k"), None, "the last one is gone, and the machine's cannot be made");
    }

    #[test]
    fn a_credential_is_one_bearer_token() {
        let of = |values: &[&'static str]| {
            let mut map = HeaderMap::new();
            values
                .iter()
                .for_each(|value| _ = map.append(header::AUTHORIZATION, http::HeaderValue::from_static(value)));
            credential(&map).map(<[u8]>::to_vec)
        };
        assert_eq!(of(&["Bearer a"]), Some(b"a".to_vec()));
        assert_eq!(of(&["bearer  a "]), Some(b"a".to_vec()));
        for wrong in [&[][..], &["Bearer "], &["Basic a"], &["a"], &["Bearer a", "Bearer a"]] {
            assert_eq!(of(wrong), None, "{wrong:?}");
        }
    }
}
