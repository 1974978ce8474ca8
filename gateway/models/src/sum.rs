//! Checksums of files, as hubs publish them: SHA-256 of large files (git-lfs), git's SHA-1 of a blob for small ones.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

/// Bytes of one read while a file is summed.
const READ_BYTES: usize = 1 << 20;

/// Checksum of a file, with its kind.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sum {
    /// SHA-256 of the content.
    Sha256([u8; 32]),
    /// SHA-1 of a git blob: of `blob SIZE\0` and the content.
    GitSha1([u8; 20]),
}

impl Sum {
    /// Checksum of this kind of the file at `path`. `told` hears of the bytes as they are read. Cost: reads the file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn again(self, path: &Path, told: &dyn Fn(u64)) -> io::Result<Sum> {
        let mut file = File::open(path)?;
        let size = file.metadata()?.len();
        let mut buffer = vec![0; READ_BYTES];
        let mut each = |take: &mut dyn FnMut(&[u8])| -> io::Result<()> {
            loop {
                let count = file.read(&mut buffer)?;
                if count == 0 {
                    return Ok(());
                }
                take(&buffer[..count]);
                told(count as u64);
            }
        };
        match self {
            Sum::Sha256(_) => {
                let mut hasher = Sha256::new();
                each(&mut |bytes| hasher.update(bytes))?;
                Ok(Sum::Sha256(hasher.finalize().into()))
            }
            Sum::GitSha1(_) => {
                let mut hasher = sha1_smol::Sha1::new();
                hasher.update(format!("blob {size}\0").as_bytes());
                each(&mut |bytes| hasher.update(bytes))?;
                Ok(Sum::GitSha1(hasher.digest().bytes()))
            }
        }
    }

    /// Parses the hexadecimal text of a SHA-256.
    pub(crate) fn sha256(text: &str) -> Option<Self> {
        hex(text).map(Sum::Sha256)
    }

    /// Parses the hexadecimal text of a git blob's SHA-1.
    pub(crate) fn git_sha1(text: &str) -> Option<Self> {
        hex(text).map(Sum::GitSha1)
    }
}

/// Bytes of a hexadecimal text of exactly that length.
fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let text = text.as_bytes();
    if text.len() != 2 * N {
        return None;
    }
    let digit = |byte: u8| (byte as char).to_digit(16).map(|value| value as u8);
    let mut out = [0; N];
    for (place, pair) in out.iter_mut().zip(text.chunks(2)) {
        *place = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(out)
}

impl fmt::Display for Sum {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, bytes) = match self {
            Sum::Sha256(bytes) => ("sha256", bytes.as_slice()),
            Sum::GitSha1(bytes) => ("git-sha1", bytes.as_slice()),
        };
        write!(out, "{kind}:")?;
        bytes.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl fmt::Debug for Sum {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

impl FromStr for Sum {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sum = match text.split_once(':') {
            Some(("sha256", hex)) => Self::sha256(hex),
            Some(("git-sha1", hex)) => Self::git_sha1(hex),
            _ => None,
        };
        sum.ok_or_else(|| format!("{text:?} is no checksum: sha256:HEX or git-sha1:HEX"))
    }
}

impl Serialize for Sum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Sum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_summed_as_git_and_git_lfs_do() {
        let path = std::env::temp_dir().join(format!("penstock-sum-{}", std::process::id()));
        std::fs::write(&path, "hello\n").expect("written");
        let again = |kind: Sum| kind.again(&path, &|_| {}).expect("read").to_string();
        // `git hash-object` and `sha256sum` of the same bytes.
        let git = again(Sum::GitSha1([0; 20]));
        let lfs = again(Sum::Sha256([0; 32]));
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(git, "git-sha1:ce013625030ba8dba906f756967f9e9ca394464a");
        assert_eq!(lfs, "sha256:5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03");
        assert_eq!(git.parse::<Sum>().expect("parsed").to_string(), git);
    }

    #[test]
    fn texts_that_are_no_checksums_are_refused() {
        for text in ["", "sha256:", "sha256:00", "md5:00", "git-sha1:zz013625030ba8dba906f756967f9e9ca394464a"] {
            assert!(text.parse::<Sum>().is_err(), "{text}");
        }
    }
}
