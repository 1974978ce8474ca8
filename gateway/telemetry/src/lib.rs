//! Observability: metrics, traces, and one access log line per request. Never prompts, completions or keys.
#![forbid(unsafe_code)]

pub mod access_log;
mod attempt;
mod config;
pub mod metrics;
#[cfg(feature = "otel")]
pub mod otlp;
pub mod trace;
mod tracer;

pub use access_log::{AccessLog, Record};
pub use attempt::Attempt;
pub use config::{OtlpConfig, TelemetryConfig};
pub use metrics::{Gauge, Labels, Metric, Metrics, Reading, Tally};
pub use trace::{OpenSpan, Trace};
pub use tracer::Tracer;
