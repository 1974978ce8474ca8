//! Permissions and their bounds: scopes, limits, reservations.
//!
//! Arithmetic and state machines; time is an argument, nothing blocks or does I/O. A caller that reserves before a
//! request is dispatched and settles after its end needs no trust in the code between.
//!
//! - [`Limit`]: the configured rule; [`Measure`]: a bound on a unit in a span.
//! - [`Book`]: all counters, and the one decision over everything that a request would use.
//! - [`Calendar`]: days and months by a wall clock that is not trusted; [`Learned`]: estimate of a request's use.
#![forbid(unsafe_code)]

mod book;
mod counter;
mod estimate;
mod limit;
pub mod prices;
mod scope;
mod time;

pub use self::time::{Calendar, Now, began, civil};
pub use book::{Book, BookState, Claim, Denied, Hold, Standing};
pub use estimate::Learned;
pub use limit::{By, For, Limit, Measure, NAMES, NANO, OnStoreFailure, Reserve, Span, Surge, Unit, Unmetered, usd};
pub use scope::Scope;
