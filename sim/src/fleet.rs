//! The fleet simulator: the real router and the real block pools in front of modelled engines, replaying a trace.
//!
//! ```text
//! trace ─▶ Ask ─▶ Placement (penstock_router::Fleet, or a peer's rule) ─▶ Engine (penstock_kv::BlockPool, modelled times)
//!                     ▲                                                    │
//!                     └──────────── Step frames, one step late ◀───────────┘
//! ```
//! Real parts: the router with its index, queue, fit and cost; the pools with their hashes, eviction and events; the
//! frames' contents. Modelled parts: the duration of a step ([`engine::Speed`], times noise), and the wire. One seed
//! gives one report.

pub mod ablation;
pub mod ask;
pub mod audit;
pub mod command;
pub mod engine;
pub mod eviction;
pub mod meter;
pub mod peer;
pub mod placement;
pub mod recorded;
pub mod report;
pub mod run;
pub mod search;
pub mod trace;

pub use engine::{Sizes, Speed};
pub use placement::Policy;
pub use report::{Report, Slo};
pub use run::{Setup, run};
pub use trace::Trace;
