//! Which worker: the fleet as the gateway sees it, what each worker's cache holds, one cost in seconds, and the queue.
//!
//! Work waits here, not in the workers (late binding): a worker grants credits one step ahead, and a request is bound to the
//! cheapest worker that has one. So it can still move while it waits, and order, priority and cancellation have one owner.
//!
//! - [`index`]: which worker holds which prefix (told by the workers), and which blocks are promised to which worker
//! - [`approximate`]: the same guessed, for backends that say nothing
//! - [`foreign`]: the same from what vLLM and SGLang publish
//! - [`cost`]: the price of a placement in seconds
//! - [`fit`]: how fast each worker is, learned from its steps
//! - `queue.rs`: who is next, fairly among tenants
//! - `place.rs`, [`policy`]: where one request would go; [`explain`]: and why
//! - [`roles`]: which workers prefill for others, following the load
//! - [`fleet`]: all of it together: [`Fleet::enqueue`], [`Fleet::next`], and what the workers say
//!
//! Pure: time comes in as an argument, nothing is awaited, what is left to chance is drawn from a seed. Deliberately absent: sockets, text,
//! clocks, and any knowledge of what a token means.
#![forbid(unsafe_code)]

pub mod approximate;
pub mod cost;
pub mod explain;
pub mod fit;
pub mod fleet;
pub mod foreign;
pub mod index;
mod lines;
pub mod load;
pub mod pair;
mod place;
pub mod policy;
mod queue;
mod random;
pub mod record;
pub mod replicas;
pub mod roles;
mod slo;
mod worker;

pub use cost::Weights;
pub use explain::{Candidate, Explanation};
pub use fit::Fit;
pub use fleet::{Ahead, Choice, Fleet, Limits, Refusal, Reject};
pub use index::{Hits, KvIndex};
pub use policy::Policy;
pub use queue::{FIRST, View};
pub use random::Random;
pub use record::Record;
pub use slo::Slo;
pub use worker::Member;

/// A worker of one pool; small numbers, reused after a worker left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u8);

/// Workers of one pool at most: the width of the bitset in [`index`].
pub const WORKERS_MAX: usize = 128;
