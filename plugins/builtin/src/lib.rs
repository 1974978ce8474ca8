//! The plugins that are built in.
#![forbid(unsafe_code)]
