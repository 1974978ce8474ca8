//! Instructions per request of the gateway's metrics beside those of the `metrics` facade with the Prometheus recorder.
//!
//!     metrics-facade ours|facade-names|facade-handles REQUESTS [MODELS]
//!
//! Each request counts what a streamed chat completion of a provider counts, with the same names, labels and buckets. `facade-names`
//! looks each series up by its name and labels, as `ours` does; `facade-handles` keeps the handles of a series in a map by what the
//! request chose, as a program would that registers them once. The last line shows the size of the rendered text, so that nothing is
//! optimized away.

use std::collections::HashMap;
use std::sync::RwLock;

use metrics::{Counter, Histogram, Key, KeyName, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};
use penstock_telemetry::{Metric, Metrics};

/// Facts of a finished request, as its record has them.
struct Request<'a> {
    model: &'a str,
    target: &'a str,
    status: u16,
    seconds: f64,
    first: f64,
    each: f64,
    prompt: u64,
    completion: u64,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (way, requests, models) = (arguments.next(), arguments.next(), arguments.next());
    let requests: usize = requests.and_then(|text| text.parse().ok()).expect("a number of requests");
    let models: usize = models.and_then(|text| text.parse().ok()).unwrap_or(1);
    let names: Vec<String> = (0..models).map(|number| format!("meta-llama-3.1-8b-instruct-{number}")).collect();
    let each = (0..requests).map(|number| Request {
        model: &names[number % models],
        target: "provider-eu-west",
        status: 200,
        seconds: 0.5 + number as f64 * 1e-6,
        first: 0.05 + number as f64 * 1e-7,
        each: 0.01,
        prompt: 900 + number as u64 % 64,
        completion: 120 + number as u64 % 32,
    });
    let text = match way.as_deref() {
        Some("ours") => ours(each),
        Some("facade-names") => by_names(each),
        Some("facade-handles") => by_handles(each),
        _ => panic!("ours, facade-names or facade-handles"),
    };
    println!("{}", text.len());
}

fn ours<'a>(requests: impl Iterator<Item = Request<'a>>) -> String {
    let metrics = Metrics::default();
    for request in requests {
        let labels = [("gen_ai_operation_name", "chat"), ("gen_ai_request_model", request.model)];
        metrics.count(Metric::Attempts, &[("model", request.model), ("target", request.target), ("outcome", "ok")]);
        let status = request.status.to_string();
        metrics.count(Metric::Requests, &[("route", "/v1/chat/completions"), ("status", &status)]);
        metrics.observe(Metric::RequestDuration, &labels, request.seconds);
        metrics.observe(Metric::TimeToFirstToken, &labels, request.first);
        metrics.observe(Metric::TimePerOutputToken, &labels, request.each);
        for (kind, count) in [("input", request.prompt), ("output", request.completion)] {
            let labels = [labels[0], labels[1], ("gen_ai_token_type", kind)];
            metrics.observe(Metric::TokenUsage, &labels, count as f64);
        }
    }
    metrics.render(&[])
}

const META: Metadata<'static> = Metadata::new("gateway", Level::INFO, None);

fn recorder() -> PrometheusRecorder {
    let bounds: [&[f64]; 4] = [
        &[0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92],
        &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0],
        &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5],
        &[1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0],
    ];
    let names = ["gen_ai_server_request_duration_seconds", FIRST, EACH, "gen_ai_client_token_usage"];
    let mut builder = PrometheusBuilder::new();
    for (name, bounds) in names.into_iter().zip(bounds) {
        builder = builder.set_buckets_for_metric(Matcher::Full(name.into()), bounds).expect("bounds");
    }
    builder.build_recorder()
}

const FIRST: &str = "gen_ai_server_time_to_first_token_seconds";
const EACH: &str = "gen_ai_server_time_per_output_token_seconds";

fn key(name: &'static str, labels: &[(&'static str, &str)]) -> Key {
    let labels: Vec<Label> = labels.iter().map(|(name, value)| Label::new(*name, (*value).to_owned())).collect();
    Key::from_parts(KeyName::from_const_str(name), labels)
}

fn by_names<'a>(requests: impl Iterator<Item = Request<'a>>) -> String {
    let recorder = recorder();
    let counter = |name, labels: &[(&'static str, &str)]| recorder.register_counter(&key(name, labels), &META);
    let histogram = |name, labels: &[(&'static str, &str)]| recorder.register_histogram(&key(name, labels), &META);
    for (number, request) in requests.enumerate() {
        let labels = [("gen_ai_operation_name", "chat"), ("gen_ai_request_model", request.model)];
        let attempt = [("model", request.model), ("target", request.target), ("outcome", "ok")];
        counter("penstock_attempts_total", &attempt).increment(1);
        let status = request.status.to_string();
        counter("penstock_requests_total", &[("route", "/v1/chat/completions"), ("status", &status)]).increment(1);
        histogram("gen_ai_server_request_duration_seconds", &labels).record(request.seconds);
        histogram(FIRST, &labels).record(request.first);
        histogram(EACH, &labels).record(request.each);
        for (kind, count) in [("input", request.prompt), ("output", request.completion)] {
            let labels = [labels[0], labels[1], ("gen_ai_token_type", kind)];
            histogram("gen_ai_client_token_usage", &labels).record(count as f64);
        }
        upkeep(&recorder, number);
    }
    recorder.handle().render()
}

/// Handles of one model, target and status, registered once.
struct Handles {
    attempt: Counter,
    request: Counter,
    duration: Histogram,
    first: Histogram,
    each: Histogram,
    input: Histogram,
    output: Histogram,
}

fn by_handles<'a>(requests: impl Iterator<Item = Request<'a>>) -> String {
    let recorder = recorder();
    let known: RwLock<HashMap<String, Handles>> = RwLock::default();
    let register = |request: &Request<'_>| {
        let labels = [("gen_ai_operation_name", "chat"), ("gen_ai_request_model", request.model)];
        let attempt = [("model", request.model), ("target", request.target), ("outcome", "ok")];
        let histogram = |name, labels: &[(&'static str, &str)]| recorder.register_histogram(&key(name, labels), &META);
        let usage = |kind| histogram("gen_ai_client_token_usage", &[labels[0], labels[1], ("gen_ai_token_type", kind)]);
        let status = request.status.to_string();
        let route = [("route", "/v1/chat/completions"), ("status", &status)];
        Handles {
            attempt: recorder.register_counter(&key("penstock_attempts_total", &attempt), &META),
            request: recorder.register_counter(&key("penstock_requests_total", &route), &META),
            duration: histogram("gen_ai_server_request_duration_seconds", &labels),
            first: histogram(FIRST, &labels),
            each: histogram(EACH, &labels),
            input: usage("input"),
            output: usage("output"),
        }
    };
    for (number, request) in requests.enumerate() {
        // One lookup by the model stands for what a snapshot of the config could hold; it is the least that a request pays.
        let count = |handles: &Handles| {
            handles.attempt.increment(1);
            handles.request.increment(1);
            handles.duration.record(request.seconds);
            handles.first.record(request.first);
            handles.each.record(request.each);
            handles.input.record(request.prompt as f64);
            handles.output.record(request.completion as f64);
        };
        let found = known.read().expect("no panic").get(request.model).map(count);
        if found.is_none() {
            let handles = register(&request);
            count(&handles);
            known.write().expect("no panic").insert(request.model.to_owned(), handles);
        }
        upkeep(&recorder, number);
    }
    recorder.handle().render()
}

/// Empties the histograms' blocks of samples, as the exporter's documentation asks of its user (every 5 seconds; here, every 10,000
/// requests).
fn upkeep(recorder: &PrometheusRecorder, number: usize) {
    if number % 10_000 == 9_999 {
        recorder.handle().run_upkeep();
    }
}
