//! State of everything that runs, as the console shows it.

use penstock_base::clock;
use penstock_telemetry::Metric;
use serde::Serialize;
use utoipa::ToSchema;

use super::super::{models, pools, providers, requests, workers};
use crate::state::Admin;

/// Most requests in flight that are listed.
const REQUESTS_MAX: usize = 100;

/// State of everything that runs, at one moment.
#[derive(Serialize, ToSchema)]
pub(crate) struct Live {
    /// Time of the state in Unix milliseconds.
    at_ms: u64,
    uptime_seconds: u64,
    /// Version of the program.
    version: &'static str,
    /// Address of the data port.
    listen: String,
    /// True if the data port speaks TLS.
    tls: bool,
    /// True if requests need an API key.
    keys_required: bool,
    config_version: u64,
    /// Models that are not ready, with the reason.
    unready: Vec<String>,
    /// Open client connections.
    connections: i64,
    requests_in_flight: usize,
    /// Requests in flight, oldest first, at most 100.
    requests: Vec<requests::Request>,
    /// Requests that have been answered or refused since the process began.
    requests_ended: u64,
    /// Output tokens since the process began, those of requests in flight included.
    output_tokens: u64,
    /// Prompt tokens of answered requests since the process began.
    input_tokens: u64,
    /// Time to the first token of all requests since the process began.
    ttft: Histogram,
    pools: Vec<pools::Pool>,
    workers: Vec<workers::Worker>,
    providers: Vec<providers::Provider>,
    models: Vec<models::Model>,
}

/// Histogram of durations.
#[derive(Serialize, ToSchema)]
pub(crate) struct Histogram {
    /// Upper bounds of the buckets in seconds, in ascending order.
    bounds: Vec<f64>,
    /// Number of values per bucket; values above the last bound are in count alone.
    buckets: Vec<u64>,
    count: u64,
    sum: f64,
}

impl Live {
    /// State at this moment.
    pub(crate) fn now(admin: &Admin) -> Self {
        let (serving, metrics) = (admin.gateway.serving(), &admin.gateway.metrics);
        let in_flight = admin.gateway.live.list();
        let tokens = |kind| metrics.read(Metric::TokenUsage, &[("gen_ai_token_type", kind)]).sum as u64;
        let going_on: u64 = in_flight.iter().map(|live| live.tokens().1).sum();
        let ttft = metrics.read(Metric::TimeToFirstToken, &[]);
        let mut workers = workers::all(admin);
        workers.sort_by(|left, right| left.name().cmp(right.name()));
        Self {
            at_ms: clock::since_epoch().as_millis() as u64,
            uptime_seconds: admin.began.elapsed().as_secs(),
            version: env!("CARGO_PKG_VERSION"),
            listen: serving.config.listen.to_string(),
            tls: serving.config.tls.is_some(),
            keys_required: !admin.gateway.guard.is_open(&serving.identity),
            config_version: admin.gateway.marks.version(),
            unready: serving.unready(),
            connections: metrics.connections_now(),
            requests_in_flight: in_flight.len(),
            requests: in_flight.iter().take(REQUESTS_MAX).map(|live| requests::Request::from(&**live)).collect(),
            requests_ended: metrics.read(Metric::Requests, &[]).sum as u64,
            output_tokens: tokens("output") + going_on,
            input_tokens: tokens("input"),
            ttft: Histogram { bounds: ttft.bounds.to_vec(), buckets: ttft.buckets, count: ttft.count, sum: ttft.sum },
            pools: pools::all(admin),
            workers,
            providers: providers::all(admin),
            models: models::all(&serving),
        }
    }
}
