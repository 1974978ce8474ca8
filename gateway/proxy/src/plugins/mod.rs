//! Plugins around requests: their choice, their order, and the effect of their verdicts.
//!
//! A `Chain` is made with everything else that requests are served with, and swapped with it; a request keeps the
//! plugins that it began with. `Chain::ask` runs `on_request` in the order of the file and leaves a `Shell`: the
//! plugins that want something of the answer. `Shell::around` puts them around the events of the upstream, in reverse
//! order. A request that matches no plugin has no shell and gets the upstream's own events; so does a request whose
//! plugins want nothing of the answer.
//!
//! ```text
//! call ─▶ a.on_request ─▶ b.on_request ─▶ upstream
//!                                            │ events, or bytes of the client's dialect
//! answer ◀─ a.on_event ◀── b.on_event ◀──────┘ (read or said again where a plugin needs the other form)
//! ```
//!
//! A plugin that fails (an error, a panic, no end in time) is left out for the rest of the request or ends it, as the config says.

mod ask;
mod chain;
mod convert;
pub(crate) mod dry_run;
mod flow;
mod host;
mod hub;
mod shell;
#[cfg(test)]
mod tests;
pub(crate) mod ticks;

pub(crate) use ask::Asked;
pub(crate) use chain::Chain;
pub use hub::Hub;
pub(crate) use hub::Models;
pub(crate) use shell::Shell;
