//! Observability: metrics, traces, and one access log line per request. Never prompts, completions or keys.

pub mod access_log;
pub mod metrics;
#[cfg(feature = "otel")]
pub mod otlp;
pub mod trace;
mod tracer;

pub use access_log::{AccessLog, Record};
pub use metrics::{Gauge, Labels, Metric, Metrics, Tally};
pub use trace::{OpenSpan, Trace};
pub use tracer::Tracer;
