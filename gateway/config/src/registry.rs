//! Plugins that a config can name.

use penstock_plugins::Kind;

/// Plugin of that name.
///
/// # Errors
/// There is no plugin of that name, or this build lacks it.
pub(crate) fn find(name: &str) -> Result<&'static dyn Kind, String> {
    let kinds = penstock_builtin::KINDS.iter().chain(&penstock_wasm::KINDS);
    if let Some(kind) = kinds.into_iter().find(|kind| kind.name() == name) {
        return Ok(*kind);
    }
    Err(format!("{name:?} is no plugin: {}", names()))
}

/// Names of all plugins, separated by commas, for error messages.
pub(crate) fn names() -> String {
    let names: Vec<_> = penstock_builtin::KINDS.iter().chain(&penstock_wasm::KINDS).map(|kind| kind.name()).collect();
    names.join(", ")
}
