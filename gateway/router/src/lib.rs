//! Request router of a pool: the workers as the gateway sees them, an index of their prefix caches, one cost in seconds, and the queue.
//!
//! Requests wait here, not at the workers (late binding): a worker grants credits one step ahead, and a request is
//! bound to the cheapest worker that has one. So a waiting request can still go elsewhere, and order, priority and
//! cancellation have one owner.
//!
//! - [`index`]: exact index of the workers' prefix caches, as reported by them, with the blocks promised to each
//! - [`approximate`]: estimated index, for backends that publish no events
//! - [`foreign`]: index fed by the events of vLLM and SGLang
//! - [`cost`]: cost of a placement in seconds
//! - [`fit`]: speed of each worker, learned from its steps
//! - `view.rs`: a request as the router sees it; `waiting.rs`: one that waits, with what was found for it
//! - `queue.rs`: order of the waiting requests, fair among tenants
//! - `place.rs`, [`policy`]: choice of a worker for one request; [`explain`]: its reasons
//! - [`roles`]: workers that prefill for others, following the load
//! - [`fleet`]: all of it together: [`Fleet::enqueue`], [`Fleet::next`], and the workers' reports
//!
//! Pure: time is an argument, nothing is awaited, random choices are drawn from a seed. Deliberately absent: sockets,
//! text, clocks, and any knowledge of a token's meaning.
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
mod view;
mod waiting;
mod worker;

pub use cost::Weights;
pub use explain::{Candidate, Explanation};
pub use fit::Fit;
pub use fleet::{Ahead, Choice, Fleet, Limits, Refusal, Reject};
pub use index::{Hits, KvIndex};
pub use policy::Policy;
pub use random::Random;
pub use record::Record;
pub use slo::Slo;
pub use view::{FIRST, Needs, View};
pub use worker::Member;

/// Index of a worker in its pool; a small number, reused after a worker has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u8);

/// Most workers of one pool: the width of the bitset in [`index`].
pub const WORKERS_MAX: usize = 128;
