//! The plugins that a config can name.

use penstock_plugins::Kind;

/// The plugin of that name.
///
/// # Errors
/// There is none, or not in this build.
pub(crate) fn find(name: &str) -> Result<&'static dyn Kind, String> {
    let kinds = penstock_builtin::KINDS.iter().chain(&penstock_wasm::KINDS);
    if let Some(kind) = kinds.into_iter().find(|kind| kind.name() == name) {
        return Ok(*kind);
    }
    Err(format!("{name:?} is no plugin: {}", names()))
}

/// All names.
pub(crate) fn names() -> String {
    let names: Vec<_> = penstock_builtin::KINDS.iter().chain(&penstock_wasm::KINDS).map(|kind| kind.name()).collect();
    names.join(", ")
}
