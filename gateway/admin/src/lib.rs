//! The admin API, on its own listener.
#![forbid(unsafe_code)]
