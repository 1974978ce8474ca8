//! Integration tests of the crate in one binary, because each binary would be linked separately. One module per
//! subject.
#![forbid(unsafe_code)]

mod behaviour;
mod engine;
mod fleet;
mod hostile;
mod replicas;
mod sampling;
mod tiers;
mod transfer;
