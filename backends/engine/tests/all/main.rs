//! Integration tests of the crate, in one binary: a binary for each file would be linked apart. One module per subject.
#![forbid(unsafe_code)]

mod common;
mod damaged;
mod demo;
mod goldens;
mod invariance;
mod load;
mod parse_anything;
mod serving;
