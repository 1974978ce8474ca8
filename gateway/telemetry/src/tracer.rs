//! Tracer of a gateway: sampling of requests, and the export of their spans.

use std::sync::Arc;
#[cfg(feature = "otel")]
use std::sync::atomic::Ordering;
use std::time::Instant;

use http::HeaderMap;

use super::trace::{Attributes, Trace, random};
use crate::TelemetryConfig;
use penstock_base::clock;

/// Traces of a gateway; without a collector every call does nothing.
#[derive(Debug, Default)]
pub struct Tracer {
    ratio: f64,
    follow: bool,
    #[cfg(feature = "otel")]
    otlp: Option<super::otlp::Otlp>,
}

impl Tracer {
    /// Creates the tracer of a config. A failed start of the exporter is logged and leaves the tracer off.
    pub fn new(config: &TelemetryConfig) -> Self {
        Self {
            ratio: config.sample_ratio,
            follow: config.follow_clients,
            #[cfg(feature = "otel")]
            otlp: config.otlp.as_ref().and_then(|otlp| {
                let started = super::otlp::Otlp::start(otlp);
                started
                    .inspect_err(
                        |error| tracing::error!(%error, "traces are off: the exporter's thread could not start"),
                    )
                    .ok()
            }),
        }
    }

    /// Begins the trace of a request with the header fields `client`; `None` without a collector.
    pub fn begin(&self, client: &HeaderMap, began: Instant) -> Option<Arc<Trace>> {
        if !self.is_on() {
            return None;
        }
        let none = HeaderMap::new();
        let client = if self.follow { client } else { &none };
        let draw = (u64::from_le_bytes(random()) >> 11) as f64 / (1_u64 << 53) as f64;
        // The request's begin is on the monotonic clock: derive its wall clock time.
        let since = clock::since_epoch().saturating_sub(began.elapsed());
        Some(Arc::new(Trace::begin(client, self.ratio, draw, (random(), random()), (began, since))))
    }

    /// Ends a request's trace and exports its spans.
    pub fn end(&self, trace: &Trace, name: String, attributes: Attributes, error: Option<String>) {
        let spans = trace.end(name, attributes, error);
        #[cfg(feature = "otel")]
        if let (Some(otlp), Some(spans)) = (&self.otlp, spans) {
            otlp.send(spans);
        }
        #[cfg(not(feature = "otel"))]
        drop(spans);
    }

    #[cfg(feature = "otel")]
    fn is_on(&self) -> bool {
        self.otlp.is_some()
    }

    #[cfg(not(feature = "otel"))]
    fn is_on(&self) -> bool {
        false
    }

    /// Number of spans that the collector accepted, and of those dropped.
    pub fn counts(&self) -> (u64, u64) {
        #[cfg(feature = "otel")]
        if let Some(otlp) = &self.otlp {
            let counts = otlp.counts();
            return (counts.sent.load(Ordering::Relaxed), counts.lost.load(Ordering::Relaxed));
        }
        (0, 0)
    }
}
