//! Host of plugins that are WebAssembly, by the proxy-wasm ABI (0.2.0 and 0.2.1): plugins built for Envoy, Istio or
//! Higress with one of their kits run here, as far as a gateway of models has what they ask for
//! (`docs/reference/wasm.md`).
//!
//! A plugin is foreign code. It has a bounded memory, a bounded number of instructions for each callback, no files, no
//! network, no environment; it can call the upstreams that its settings name, through the gateway. A plugin that breaks
//! is dropped with all that it holds; `on_fail` decides about its requests, as for every plugin.
//!
//! Without the feature `host` there is only a kind that refuses every use with a message.
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

/// Name of the kind in a config.
pub const NAME: &str = "wasm";

/// Kind of plugins that are WebAssembly. It holds the state that outlives a change of settings: the compiler, and the
/// plugins' shared state.
#[cfg(feature = "host")]
pub static KINDS: [&dyn Kind; 1] = [&host::KIND];

/// Kind of plugins that are WebAssembly, in a build without a host: every use is a fault of the config.
#[cfg(not(feature = "host"))]
pub static KINDS: [&dyn Kind; 1] = [&absent::AbsentKind];
