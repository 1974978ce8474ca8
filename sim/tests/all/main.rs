//! Integration tests of the crate, in one binary: a binary for each file would be linked apart. One module per subject.
#![forbid(unsafe_code)]

mod behaviour;
mod engine;
mod fleet;
mod hostile;
mod replicas;
mod sampling;
mod tiers;
mod transfer;
