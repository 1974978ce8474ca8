//! Inputs of the house-rule tests: the tracked files and the dependency graph.
//!
//! The rules themselves are in `tests/house/`, one module per subject. A rule that a compiler lint can check is a lint
//! in the workspace's `Cargo.toml` instead.
#![forbid(unsafe_code)]

pub mod docs;
pub mod graph;
pub mod licence;
pub mod modules;
pub mod source;

use std::path::{Path, PathBuf};
use std::process::Command;

/// The repository's root folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the crate lies in tests/tidy")
}

/// Text of a file of the repository.
///
/// # Panics
/// If the file cannot be read.
pub fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Paths that git tracks or would track, relative to the root, as text files or not.
///
/// # Panics
/// If git cannot be run.
pub fn tracked() -> Vec<String> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git runs");
    assert!(output.status.success(), "git ls-files failed: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("paths are UTF-8");
    text.lines().filter(|path| root().join(path).is_file()).map(str::to_owned).collect()
}

/// Fails with all `faults` at once, each on its line.
///
/// # Panics
/// If there are any.
#[track_caller]
pub fn none(rule: &str, faults: &[String]) {
    assert!(faults.is_empty(), "{rule}:\n  {}", faults.join("\n  "));
}
