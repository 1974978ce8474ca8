//! What the operator sees: metrics and one log line per request. Never prompts, completions or keys.

pub mod access_log;
pub mod metrics;

pub use access_log::{AccessLog, Record};
pub use metrics::{Gauge, Labels, Metric, Metrics};
