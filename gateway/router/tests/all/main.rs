//! Integration tests of the crate, in one binary: a binary for each file would be linked apart. One module per subject.
#![forbid(unsafe_code)]

mod flat;
mod fleet;
mod index;
mod load;
mod recorded;
mod sim;
