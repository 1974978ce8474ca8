//! Host of WebAssembly plugins: wasmtime (Cranelift alone), the ABI, and the glue between them and the gateway.
//!
//! ```text
//! kind      settings of an entry → module read, pinned, compiled, started once on trial → Plugin
//! plugin    one entry of the config; its timer
//! hooks     the gateway's hooks ⇄ callbacks; waits, calls out
//! pool      a few machines, so that callbacks run side by side; worn out and broken ones are replaced
//! machine   one store: the contexts of many requests, one callback at a time
//! calls     what a plugin may ask of the host
//! ```
//!
//! A plugin is bounded by fuel, not by a clock: instructions, copied bytes and calls to the host all cost fuel, so the
//! same request ends at the same instruction on every machine.

mod abi;
mod calls;
mod fields;
mod hooks;
mod kind;
mod machine;
mod memory;
mod outgoing;
mod plugin;
mod pool;
mod program;
mod properties;
mod shared;
mod state;

pub use abi::{AbiVersion, Action, LogLevel};
pub use fields::Fields;
pub use kind::{KIND, WasmKind};
pub use machine::Machine;
pub use plugin::WasmPlugin;
pub use pool::{Member, Pool};
pub use program::{Program, Runtime};
pub use properties::Facts;
pub use shared::{Metric, MetricKind};
pub use state::{Buffer, Call, CallAnswer, Identity, LocalResponse, Map, ROOT, Stream};
