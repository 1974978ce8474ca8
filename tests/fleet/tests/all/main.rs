//! Integration tests of the crate in one binary, because each binary would be linked separately. One module per
//! subject.
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
