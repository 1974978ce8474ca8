//! Runs plugins that are WebAssembly, by the proxy-wasm ABI.
#![forbid(unsafe_code)]
