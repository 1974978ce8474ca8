//! Answer of a hub about one revision of a repository (`/api/models/ORG/REPO/revision/REV?blobs=true`): its commit, and its files
//! with sizes and checksums. Follows the Hub API of Hugging Face.

use serde::Deserialize;

use crate::sum::Sum;

/// Most files of a repository.
const FILES_MAX: usize = 50_000;
/// Longest path of a file in bytes.
const PATH_BYTES_MAX: usize = 1024;
/// Largest file: 1 PiB, so that sums of sizes cannot overflow.
const FILE_BYTES_MAX: u64 = 1 << 50;

/// Files of one commit of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// Commit that the revision stands for: 40 hexadecimal digits.
    pub commit: String,
    /// Files, in the order of the answer; every path is relative, without `.` or `..`.
    pub files: Vec<RemoteFile>,
}

/// File of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Path in the repository.
    pub path: String,
    /// Size in bytes; `None`: the hub does not tell.
    pub size: Option<u64>,
    /// Checksum; `None`: the hub does not tell.
    pub sum: Option<Sum>,
}

/// Fault of a hub's answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListingError {
    /// Not JSON of the expected shape.
    #[error("it is not the description of a repository: {0}")]
    Shape(String),
    /// No commit, or one that is not 40 hexadecimal digits.
    #[error("it names no commit")]
    Commit,
    /// Too many files.
    #[error("it lists {0} files, and {FILES_MAX} are the most that are read")]
    Files(usize),
    /// Path that leads out of the folder, or that no file system takes.
    #[error("it lists a file that is named {0:?}, which is no path inside a repository")]
    Path(String),
    /// Size beyond every file.
    #[error("it lists {0:?} with an impossible size")]
    Size(String),
}

#[derive(Deserialize)]
struct Answer {
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Listing {
    /// Parses the body of an answer.
    ///
    /// # Errors
    /// The answer has another shape, no commit, or a file whose path or size is impossible.
    pub fn parse(bytes: &[u8]) -> Result<Self, ListingError> {
        let answer: Answer = serde_json::from_slice(bytes).map_err(|error| ListingError::Shape(error.to_string()))?;
        let is_commit = |sha: &String| sha.len() == 40 && sha.bytes().all(|byte| b"0123456789abcdef".contains(&byte));
        let commit = answer.sha.filter(is_commit).ok_or(ListingError::Commit)?;
        if answer.siblings.len() > FILES_MAX {
            return Err(ListingError::Files(answer.siblings.len()));
        }
        let files = answer.siblings.into_iter().map(file).collect::<Result<_, _>>()?;
        Ok(Self { commit, files })
    }

    /// Returns false if the revision is a whole commit and this is another one.
    pub(crate) fn is_of(&self, revision: &str) -> bool {
        let is_commit = revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit());
        !is_commit || revision.eq_ignore_ascii_case(&self.commit)
    }
}

fn file(sibling: Sibling) -> Result<RemoteFile, ListingError> {
    let Sibling { rfilename: path, size, blob_id, lfs } = sibling;
    if !is_inside(&path) {
        return Err(ListingError::Path(path.chars().take(200).collect()));
    }
    let (size, sum) = match lfs {
        Some(lfs) => (lfs.size.or(size), lfs.sha256.as_deref().and_then(Sum::sha256)),
        None => (size, blob_id.as_deref().and_then(Sum::git_sha1)),
    };
    if size.is_some_and(|size| size > FILE_BYTES_MAX) {
        return Err(ListingError::Size(path));
    }
    Ok(RemoteFile { path, size, sum })
}

/// Returns true for a relative path of plain components that every file system takes.
fn is_inside(path: &str) -> bool {
    let plain = |part: &str| !matches!(part, "" | "." | "..") && part.len() <= 255;
    path.len() <= PATH_BYTES_MAX
        && !path.contains(['\\', ':'])
        && !path.chars().any(char::is_control)
        && path.split('/').all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn an_answer_is_read() {
        let sum = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        let blob = "ce013625030ba8dba906f756967f9e9ca394464a";
        let text = format!(
            r#"{{"id": "a/b", "sha": "{COMMIT}", "gated": "auto", "siblings": [
                {{"rfilename": "config.json", "size": 6, "blobId": "{blob}"}},
                {{"rfilename": "x/model.safetensors", "size": 6, "blobId": "{COMMIT}", "lfs": {{"sha256": "{sum}", "size": 6, "pointerSize": 134}}}},
                {{"rfilename": "README.md"}}]}}"#
        );
        let listing = Listing::parse(text.as_bytes()).expect("read");
        assert_eq!(listing.commit, COMMIT);
        let sums: Vec<_> = listing.files.iter().map(|file| (file.path.as_str(), file.size, file.sum)).collect();
        let [git, lfs] = [Sum::git_sha1(blob), Sum::sha256(sum)];
        assert_eq!(
            sums,
            [("config.json", Some(6), git), ("x/model.safetensors", Some(6), lfs), ("README.md", None, None)]
        );
    }

    #[track_caller]
    fn refuses(text: &str, part: &str) {
        let error = Listing::parse(text.as_bytes()).expect_err(text).to_string();
        assert!(error.contains(part), "{error}");
    }

    #[test]
    fn a_whole_commit_stands_for_itself() {
        let listing = Listing { commit: COMMIT.to_owned(), files: Vec::new() };
        let is_of = |revision: &str| listing.is_of(revision);
        assert!(is_of("main") && is_of(COMMIT) && is_of(&COMMIT.to_uppercase()));
        assert!(is_of(&"z".repeat(40)), "a branch may have 40 letters");
        assert!(!is_of(&"0".repeat(40)));
    }

    #[test]
    fn impossible_answers_are_refused() {
        refuses("<html>", "not the description");
        refuses("{}", "no commit");
        refuses(r#"{"sha": "main"}"#, "no commit");
        refuses(r#"{"sha": "0123456789ABCDEF0123456789abcdef01234567"}"#, "no commit");
        let with = |path: &str| format!(r#"{{"sha": "{COMMIT}", "siblings": [{{"rfilename": {path:?}, "size": 1}}]}}"#);
        for path in ["../x", "/etc/passwd", "a/../b", "a//b", "a/", ".", "", "a\\b", "C:x", "a\nb"] {
            let text = serde_json::json!({"sha": COMMIT, "siblings": [{"rfilename": path}]}).to_string();
            refuses(&text, "no path inside");
        }
        refuses(&with(&"x".repeat(300)), "no path inside");
        refuses(
            &format!(r#"{{"sha": "{COMMIT}", "siblings": [{{"rfilename": "a", "size": {}}}]}}"#, u64::MAX),
            "impossible size",
        );
    }
}
