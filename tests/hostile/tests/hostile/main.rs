//! The gateway against clients that are malformed, slow, greedy or gone. One module per kind.

mod answers;
mod http1;
mod http2;
mod pages;
mod places;
mod slow;
mod upgrade;
