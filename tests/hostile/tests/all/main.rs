//! The gateway against malformed, slow, greedy and vanished clients. One module per kind.
#![forbid(unsafe_code)]

mod access;
mod answers;
mod fallback;
mod http1;
mod http2;
mod late;
mod limits;
mod memory;
mod pacing;
mod pages;
mod places;
mod providers;
mod slow;
mod tokens;
mod upgrade;
