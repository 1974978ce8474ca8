//! The plugins that are built in: one file each.
//!
//! Each file says at its top what the plugin does to a request and to its answer, and what it refuses to do; `docs/reference/plugins.md` has
//! every setting. What several of them need is in `fields` (header fields that plugins must leave alone).
#![forbid(unsafe_code)]

mod fields;
mod headers;

use penstock_plugins::Kind;

/// All of them.
pub const KINDS: &[&dyn Kind] = &[&headers::Headers];
