//! Integration tests of the crate, in one binary: a binary for each file would be linked apart. One module per subject.
#![forbid(unsafe_code)]

mod apart;
mod far;
mod faults;
mod first_token;
mod local;
mod matrix;
mod migration;
mod network;
mod prefetch;
mod protocol;
mod storm;
mod streams;
mod transfer;
