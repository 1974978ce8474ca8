//! Models on a device.
//!
//! The families (`families/`) differ in values only, so they share one decoder and one encoder: each a straight line of
//! [`Device`](penstock_kernels::Device) calls.

mod chain;
mod decoder;
mod encoder;
mod load;
mod loader;
mod rope;

pub use crate::families::names;
pub use load::{KvBudget, LoadError, Model, ModelLimits, Progress};
