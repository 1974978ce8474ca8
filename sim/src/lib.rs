//! Seeded simulations: the engine without a model, and the fleet without engines ([`fleet`]).
//!
//! [`FakeForward`] stands for the device: it keeps what was written to each slot of each page and computes logits from a hash
//! of the *whole prefix as read through the block table*. A wrong page, a lost write, a stale block or a wrong position changes
//! every token that follows. [`world`] drives an engine with arrivals, cancellations, slow readers, faults and crashes of one
//! seed, and compares each answer with the same request run alone.
//!
//! `PENSTOCK_SIM_SEED=17 cargo test -p penstock-sim` replays one seed, `PENSTOCK_SIM_SEEDS=100000` runs more.
#![forbid(unsafe_code)]

pub mod client;
pub mod fake;
pub mod fleet;
pub mod random;
pub mod world;

pub use fake::{FakeForward, Meter, PAGE_BYTES};
pub use random::Random;
