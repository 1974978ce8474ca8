//! Settings of traces: the section `[telemetry]` of the config.

use std::path::PathBuf;

use http::HeaderName;
use penstock_base::Secret;
use penstock_http::client::Target;

/// Settings of traces, from the section `[telemetry]` of the config.
#[derive(Clone, Debug, PartialEq)]
pub struct TelemetryConfig {
    /// Collector of the traces; `None`: no traces.
    pub otlp: Option<OtlpConfig>,
    /// Share of requests that are traced, from 0 to 1, where the client does not decide.
    pub sample_ratio: f64,
    /// True if a client's `traceparent` is continued, and its flag decides about tracing.
    pub follow_clients: bool,
}

/// OpenTelemetry collector that spans are exported to (OTLP over HTTP).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpConfig {
    /// Base URL of the collector, split for connecting.
    pub target: Target,
    /// Header fields sent with every export.
    pub headers: Vec<(HeaderName, Secret)>,
    /// PEM file of certificates to trust instead of the system's; `None`: the system's.
    pub ca_file: Option<PathBuf>,
    /// Resource attribute `service.name` of every exported span.
    pub service_name: String,
}
