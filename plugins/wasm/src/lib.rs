//! Runs plugins that are WebAssembly, by the proxy-wasm ABI (0.2.0 and 0.2.1): what was built for Envoy, Istio or Higress with one of
//! their kits runs here, as far as a gateway of models has what it asks for (`docs/reference/wasm.md`).
//!
//! A plugin is foreign code. It has a bounded memory, a bounded number of instructions for each callback, no files, no network, no
//! environment; it can call the upstreams that its settings name, through the gateway. A plugin that breaks is thrown away with all that
//! it holds; what becomes of its requests is said by `on_fail`, as for every plugin.
//!
//! Without the feature `host` there is only the kind that says so when it is asked for.
#![forbid(unsafe_code)]

#[cfg(not(feature = "host"))]
mod absent;
mod error;
#[cfg(feature = "host")]
pub mod host;
mod limits;

pub use error::WasmError;
pub use limits::Limits;
use penstock_plugins::Kind;

/// Name under which the kind stands in a config.
pub const NAME: &str = "wasm";

/// The kind of plugins that are WebAssembly. It holds what outlives a change of settings: the compiler, and what plugins share.
#[cfg(feature = "host")]
pub static KINDS: [&dyn Kind; 1] = [&host::KIND];

/// The kind of plugins that are WebAssembly, in a build that has none: every use is a fault of the config.
#[cfg(not(feature = "host"))]
pub static KINDS: [&dyn Kind; 1] = [&absent::AbsentKind];
