//! Exporter of spans to an OpenTelemetry collector: OTLP over HTTP, from a thread of its own.
//!
//! Requests put their spans into a bounded queue; spans that find it full, or cannot be sent, are counted and dropped.
//! A slow or absent collector delays nobody.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use bytes::Bytes;
use http::{Method, Request, Response};
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{Array, InstrumentationScope, KeyValue, StringValue, Value as OtelValue};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanExporter as _, SpanLinks};
use tokio::sync::mpsc;

use super::trace::{Kind, Span, Value};
use crate::OtlpConfig;
use penstock_http::client::{Client, Deadlines, Outgoing, Sent};

/// Path for traces, behind the configured base URL.
const PATH: &str = "/v1/traces";
/// Most requests whose spans wait for the exporter; when full, further spans are dropped and counted.
const WAITING_MAX: usize = 4096;
/// Spans after which an export is sent without waiting further.
const BATCH_MAX: usize = 512;
/// Longest time that spans gather for one export.
const GATHER: Duration = Duration::from_secs(1);
/// Time limit of one export of spans to the collector.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes of a collector's answer that are read.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// Counts of sent and lost spans that the exporter thread keeps, for `/metrics`.
#[derive(Debug, Default)]
pub struct Counts {
    /// Number of spans that the collector accepted.
    pub sent: AtomicU64,
    /// Spans dropped because the queue was full or the export failed.
    pub lost: AtomicU64,
}

/// Handle of the exporter thread. Dropping it sends the queued spans and joins the thread.
#[derive(Debug)]
pub struct Otlp {
    queue: Option<mpsc::Sender<Vec<Span>>>,
    counts: Arc<Counts>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Otlp {
    /// Starts the exporter thread (`otlp`).
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(config: &OtlpConfig) -> std::io::Result<Self> {
        let (queue, waiting) = mpsc::channel(WAITING_MAX);
        let counts = Arc::<Counts>::default();
        let (shared, config) = (counts.clone(), config.clone());
        let thread = std::thread::Builder::new().name("otlp".into()).spawn(move || {
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
            if let Err(error) = runtime.block_on(run(&config, waiting, &shared)) {
                tracing::error!(error, "traces are off: the exporter could not start");
            }
        })?;
        Ok(Self { queue: Some(queue), counts, thread: Some(thread) })
    }

    /// Queues the spans of a request; counts them as lost if the queue is full.
    pub fn send(&self, spans: Vec<Span>) {
        let count = spans.len() as u64;
        if self.queue.as_ref().is_some_and(|queue| queue.try_send(spans).is_err()) {
            self.counts.lost.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Counters of sent and lost spans.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }
}

impl Drop for Otlp {
    fn drop(&mut self) {
        self.queue = None;
        // A panic of the thread was already printed; only spans are lost.
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

async fn run(config: &OtlpConfig, mut waiting: mpsc::Receiver<Vec<Span>>, counts: &Counts) -> Result<(), String> {
    let client = Client::new(config.target.clone(), config.ca_file.as_deref())?;
    let headers: HashMap<_, _> =
        config.headers.iter().map(|(name, value)| (name.to_string(), value.expose().to_owned())).collect();
    let built = SpanExporter::builder()
        .with_http()
        .with_http_client(Sender(client))
        // Only the path of this URL is used: the client has its own target.
        .with_endpoint(format!("http://collector{PATH}"))
        .with_protocol(Protocol::HttpBinary)
        .with_headers(headers)
        .with_timeout(EXPORT_TIMEOUT)
        .build();
    let mut exporter = built.map_err(|error| error.to_string())?;
    let resource = Resource::builder_empty().with_attributes([
        KeyValue::new("service.name", config.service_name.clone()),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
    ]);
    exporter.set_resource(&resource.build());
    let mut failing = false;
    let mut batch = Vec::new();
    while gather(&mut waiting, &mut batch).await {
        let count = batch.len() as u64;
        let spans = batch.drain(..).map(data).collect();
        let sent = tokio::time::timeout(EXPORT_TIMEOUT, exporter.export(spans)).await;
        let failure = match sent {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("no answer in time".to_owned()),
        };
        let (counter, fails) = if failure.is_some() { (&counts.lost, true) } else { (&counts.sent, false) };
        counter.fetch_add(count, Ordering::Relaxed);
        match failure {
            // Log the first failure only, not every batch while a collector is down.
            Some(error) if !failing => tracing::warn!(error, "the collector took no traces"),
            None if failing => tracing::info!("the collector takes traces again"),
            _ => {}
        }
        failing = fails;
    }
    Ok(())
}

/// Collects spans for one export; `false`: the queue is closed and empty.
async fn gather(waiting: &mut mpsc::Receiver<Vec<Span>>, batch: &mut Vec<Span>) -> bool {
    let Some(first) = waiting.recv().await else { return false };
    batch.extend(first);
    let until = tokio::time::Instant::now() + GATHER;
    while batch.len() < BATCH_MAX {
        match tokio::time::timeout_at(until, waiting.recv()).await {
            Ok(Some(more)) => batch.extend(more),
            Ok(None) | Err(_) => break,
        }
    }
    true
}

fn data(span: Span) -> SpanData {
    let context = SpanContext::new(
        TraceId::from_bytes(span.context.trace),
        SpanId::from_bytes(span.context.span),
        TraceFlags::SAMPLED,
        false,
        TraceState::default(),
    );
    SpanData {
        span_context: context,
        parent_span_id: span.parent.map_or(SpanId::INVALID, SpanId::from_bytes),
        parent_span_is_remote: span.remote_parent && span.parent.is_some(),
        span_kind: match span.kind {
            Kind::Server => SpanKind::Server,
            Kind::Client => SpanKind::Client,
            Kind::Internal => SpanKind::Internal,
        },
        name: span.name.into(),
        start_time: UNIX_EPOCH + span.start,
        end_time: UNIX_EPOCH + span.end,
        attributes: span.attributes.into_iter().map(|(name, value)| KeyValue::new(name, otel(value))).collect(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: span.error.map_or(Status::Unset, Status::error),
        instrumentation_scope: InstrumentationScope::builder("penstock").build(),
    }
}

fn otel(value: Value) -> OtelValue {
    match value {
        Value::Text(text) => OtelValue::String(text.into()),
        Value::Int(number) => OtelValue::I64(number),
        Value::Float(number) => OtelValue::F64(number),
        Value::Bool(flag) => OtelValue::Bool(flag),
        Value::Texts(texts) => OtelValue::Array(Array::String(texts.into_iter().map(StringValue::from).collect())),
    }
}

/// Adapter that sends the exporter's requests with our own client: no second HTTP library, and the same rules for
/// certificates and redirects.
struct Sender(Client);

impl std::fmt::Debug for Sender {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Sender")
    }
}

#[async_trait]
impl HttpClient for Sender {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let taken = ["host", "content-length", "accept-encoding"];
        let headers = head.headers.iter().filter(|(name, _)| !taken.contains(&name.as_str()));
        let headers = headers.map(|(name, value)| (name.clone(), value.clone())).collect();
        let outgoing =
            Outgoing { method: Method::POST, path: PATH.to_owned(), headers, body: vec![body], sent: Sent::default() };
        let whole = Some(tokio::time::Instant::now() + EXPORT_TIMEOUT);
        let deadlines = Deadlines { connect: EXPORT_TIMEOUT, head: EXPORT_TIMEOUT, silence: EXPORT_TIMEOUT, whole };
        let mut answer = self.0.send(&outgoing, &deadlines).await.map_err(|error| error.to_string())?;
        let mut bytes = Vec::new();
        while poll_fn(|context| answer.body.poll_chunk(context, &mut bytes)).await.map_err(|error| error.to_string())? {
            if bytes.len() > ANSWER_BYTES_MAX {
                return Err("the answer is too long".into());
            }
        }
        let mut response = Response::builder().status(answer.status);
        for (name, value) in &answer.headers {
            response = response.header(name, value);
        }
        Ok(response.body(bytes.into())?)
    }
}
