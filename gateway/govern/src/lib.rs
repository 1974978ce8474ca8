//! Who may do what, and how much: scopes, limits, reservations.
//!
//! Arithmetic and state machines; time is an argument, nothing here waits or does I/O. Whoever reserves before a request is dispatched
//! and settles after it ended needs no trust in what lies between.
#![forbid(unsafe_code)]

mod scope;

pub use scope::Scope;
