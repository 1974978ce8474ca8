//! Integration tests of the crate, in one binary: a binary for each file would be linked apart. One module per subject.
#![cfg(feature = "host")]
#![forbid(unsafe_code)]

mod cost;
mod failures;
mod functions;
mod hostile;
mod plugin;
mod support;
