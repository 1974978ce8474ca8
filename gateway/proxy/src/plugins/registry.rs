//! The plugins that a config can name.

use penstock_plugins::Kind;

/// The plugin of that name.
///
/// # Errors
/// There is none, or not in this build.
pub(crate) fn find(name: &str) -> Result<&'static dyn Kind, String> {
    let kinds = penstock_builtin::KINDS.iter().chain(wasm());
    if let Some(kind) = kinds.into_iter().find(|kind| kind.name() == name) {
        return Ok(*kind);
    }
    if name == "wasm" {
        return Err("this build has no plugins in WebAssembly; it needs the feature `wasm`".into());
    }
    Err(format!("{name:?} is no plugin: {}", names()))
}

/// All names.
pub(crate) fn names() -> String {
    let names: Vec<_> = penstock_builtin::KINDS.iter().map(|kind| kind.name()).chain(["wasm"]).collect();
    names.join(", ")
}

fn wasm() -> &'static [&'static dyn Kind] {
    &[]
}
