//! Golden files: a test compares, and with `UPDATE_GOLDEN=1` writes.

use std::path::Path;

/// Compares `got` with `tests/golden/<name>`.
#[track_caller]
pub(crate) fn check_golden(name: &str, got: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, got).expect("golden file is writable");
        return;
    }
    let expected =
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}; UPDATE_GOLDEN=1 writes it"));
    assert_eq!(got, expected, "{name} differs; UPDATE_GOLDEN=1 writes it, then read the diff");
}
