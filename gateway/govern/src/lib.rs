//! Who may do what, and how much: scopes, limits, reservations.
//!
//! Arithmetic and state machines; time is an argument, nothing here waits or does I/O. Whoever reserves before a request is dispatched
//! and settles after it ended needs no trust in what lies between.
//!
//! - [`Limit`]: what a rule says; [`Measure`]: so much of a unit in a span.
//! - [`Book`]: all counters, and the one decision over everything that a request would use up.
//! - [`Calendar`]: days and months by a clock that is not trusted; [`Learned`]: how much a request will use.
#![forbid(unsafe_code)]

mod book;
mod counter;
mod estimate;
mod limit;
mod scope;
mod time;

pub use book::{Book, BookState, Claim, Denied, Hold, Standing};
pub use estimate::Learned;
pub use limit::{By, For, Limit, Measure, NAMES, NANO, OnStoreFailure, Reserve, Span, Surge, Unit, Unmetered, usd};
pub use scope::Scope;
pub use time::{Calendar, Now, began, civil};
