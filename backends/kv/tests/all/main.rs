//! Integration tests of the crate, in one binary: a binary for each file would be linked apart. One module per subject.
#![forbid(unsafe_code)]

mod hit_rate;
mod model;
mod tiers;
