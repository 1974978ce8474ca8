//! Which requests are traced, and where their spans go.

use std::sync::Arc;
#[cfg(feature = "otel")]
use std::sync::atomic::Ordering;
use std::time::Instant;

use http::HeaderMap;

use super::trace::{Attributes, Trace, random};
use crate::clock;
use crate::config::TelemetryConfig;

/// Traces of a gateway. Without a collector it does nothing.
#[derive(Debug, Default)]
pub struct Tracer {
    ratio: f64,
    follow: bool,
    #[cfg(feature = "otel")]
    otlp: Option<super::otlp::Otlp>,
}

impl Tracer {
    /// As the config says. A collector that cannot be sent to is said in the log: nothing else depends on it.
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

    /// The trace of a request that came with those fields, if there is to be one.
    pub fn begin(&self, client: &HeaderMap, began: Instant) -> Option<Arc<Trace>> {
        if !self.is_on() {
            return None;
        }
        let none = HeaderMap::new();
        let client = if self.follow { client } else { &none };
        let draw = (u64::from_le_bytes(random()) >> 11) as f64 / (1_u64 << 53) as f64;
        // The request began on the clock that does not jump.
        let since = clock::since_epoch().saturating_sub(began.elapsed());
        Some(Arc::new(Trace::begin(client, self.ratio, draw, (random(), random()), (began, since))))
    }

    /// Sends a trace whose request has ended.
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

    /// Spans that the collector took, and that were dropped.
    pub fn counts(&self) -> (u64, u64) {
        #[cfg(feature = "otel")]
        if let Some(otlp) = &self.otlp {
            let counts = otlp.counts();
            return (counts.sent.load(Ordering::Relaxed), counts.lost.load(Ordering::Relaxed));
        }
        (0, 0)
    }
}
