//! See the crate description; contents follow.
#![forbid(unsafe_code)]
