//! Path of a request: one function, one line per stage, in order.

use std::panic::AssertUnwindSafe;
use std::task::Poll;

use bytes::Bytes;
use http::HeaderMap;
use penstock_proto::ErrorKind;
use penstock_types::{ApiError, Bounds};

use crate::admit;
use crate::answer::Answer;
use crate::auth::{self, Principal};
use crate::config::Snapshot;
use crate::forward;
use crate::gateway::Gateway;
use crate::live_requests::About;
use crate::pump;
use crate::relay;
use crate::request_headers;
use crate::request_log::Trail;
use crate::route::{self, Route};
use crate::routes;
use crate::stored;
use crate::web::{self, Content};
use penstock_base::error::Failure;
use penstock_http::cancel;
use penstock_http::exchange::BodyFault;
use penstock_http::{Body, BodyLease, Exchange, Gone};
use penstock_telemetry::Metric;
use penstock_upstream::Origin;
use penstock_upstream::call::Call;

/// Reason why a request ended before its answer did.
#[derive(Debug)]
pub enum End {
    /// The client left; there is nobody to answer.
    Gone,
    /// A failure that the client is told: as an answer, or as a broken stream once the answer has begun.
    Failed(Failure),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        End::Failed(failure)
    }
}

impl From<Gone> for End {
    fn from(_: Gone) -> Self {
        End::Gone
    }
}

impl From<BodyFault> for End {
    fn from(fault: BodyFault) -> Self {
        match fault {
            BodyFault::Gone => End::Gone,
            BodyFault::Refuse(failure) => End::Failed(failure),
        }
    }
}

/// Stages of a request. Futures that end before the answer begins are boxed, so that a long stream does not keep their
/// memory.
async fn stages(gateway: &Gateway, exchange: &mut Exchange, trail: &mut Trail) -> Result<(), End> {
    let serving = gateway.serving();
    let config = &serving.config;
    exchange.dialect = route::dialect(&exchange.head.target, &exchange.head.headers);
    let is_open = gateway.guard.is_open(&serving.identity);
    if visitor(gateway, config, exchange, trail, is_open).await? {
        return Ok(());
    }
    let route = Route::parse(&exchange.head.method, &exchange.head.target)?;
    trail.route = route.label();
    let page = web::page(&exchange.head.headers, &config.hosts, &config.cors);
    let principal = gateway.guard.admit(&serving.identity, &route, exchange).await?;
    web::check(&route, &exchange.head, page, || is_open || !auth::has_credential(&exchange.head))
        .inspect_err(|_| gateway.metrics.count(Metric::PagesRefused, &[("reason", "origin")]))?;
    trail.key.clone_from(&principal.key);
    serving.idempotency.separate(principal.tenant(), &mut exchange.head.headers);
    listed(gateway, exchange, trail, &principal);
    match route {
        Route::Forward(path) => {
            return Box::pin(forward::serve(gateway, &serving, exchange, trail, path, &principal)).await;
        }
        Route::Realtime => return Box::pin(forward::realtime(gateway, &serving, exchange, trail, &principal)).await,
        _ => {}
    }
    let Some(ask) = Box::pin(routes::serve(gateway, &serving, exchange, route, &principal)).await? else {
        return Ok(());
    };
    let headers = std::mem::take(&mut exchange.head.headers);
    let body = Box::pin(read_body(gateway, exchange, &headers)).await?;
    let mut call = Call::new(ask, body, exchange.request_id.clone(), headers, penstock_dialects::decode).await?;
    call.client = exchange.client();
    let recalled = Box::pin(stored::recall(gateway, exchange, &principal, call)).await?;
    let Some((call, keeping)) = recalled else { return Ok(()) };
    let admitted = watched(exchange, Box::pin(admit::admit(gateway, &serving, &principal, call))).await??;
    let (call, entry) = (admitted.call.clone(), &admitted.entry);
    trail.model = Some(entry.name.to_string());
    trail.price = entry.price;
    trail.stream = Some(call.stream);
    trail.tags.clone_from(&call.tags);
    trail.live.iter().for_each(|live| live.asks(&entry.name, call.stream));
    trail.operation = Some(call.ask.surface.operation());
    let says_cost = config.cost_header || relay::cost::is_asked(&call.headers);
    let (price, stream) = (entry.price, call.stream);
    let memory = gateway.answer_memory(&config.http);
    let origin = request_headers::read(
        Origin { memory: memory.clone(), ..origin(&principal, config, exchange, trail) },
        &call.headers,
        exchange.started.into_std(),
    )?;
    let mut answer = Answer::new(call, memory.hold());
    answer.keep(keeping);
    let mut events = watched(exchange, admitted.open(origin)).await??;
    if says_cost {
        events = Box::new(relay::cost::Priced::new(events, price, stream));
    }
    let ended = pump::run(exchange, events.as_mut(), &mut answer, trail, config.commit, config.heartbeat).await;
    trail.facts = Some(events.facts());
    trail.course = events.course();
    ended
}

/// Answers browsers: sets the CORS fields of every answer, and answers a preflight here (true). Where no credential is
/// needed, `Host` must name this gateway. Unix sockets are exempt: their clients are no browsers and send any `Host`.
async fn visitor(
    gateway: &Gateway,
    config: &Snapshot,
    exchange: &mut Exchange,
    trail: &mut Trail,
    is_open: bool,
) -> Result<bool, End> {
    let refused = |reason| gateway.metrics.count(Metric::PagesRefused, &[("reason", reason)]);
    if is_open && exchange.peer().is_some() && !web::is_addressed(&exchange.head.headers, &config.hosts) {
        refused("host");
        return Err(web::misdirected().into());
    }
    exchange.says_also(web::fields(&exchange.head.headers, &config.cors));
    let Some(preflight) = web::preflight(&exchange.head, &config.cors) else { return Ok(false) };
    let preflight = preflight.inspect_err(|_| refused("preflight"))?;
    trail.route = preflight.label;
    exchange.respond(204, &preflight.fields, Bytes::new()).await?;
    Ok(true)
}

/// Serves one request. However it ends, the exchange is ended and the trail is written afterwards.
pub async fn serve(gateway: &Gateway, exchange: &mut Exchange) {
    gateway.metrics.in_flight(1);
    let _ended = Ended(gateway);
    let mut trail = Trail::new(exchange);
    trail.trace = gateway.tracer.begin(&exchange.head.headers, exchange.started.into_std());
    let outcome = caught(stages(gateway, exchange, &mut trail)).await.unwrap_or_else(|panic| {
        gateway.metrics.count(Metric::Panics, &[]);
        tracing::error!(request_id = %exchange.request_id, panic, "a request handler panicked");
        Err(End::Failed(Failure::internal(panic)))
    });
    let outcome = match (outcome, exchange.ended_by()) {
        (Err(End::Gone), Some(by)) => Err(End::Failed(cancel::failure(by))),
        (other, _) => other,
    };
    match outcome {
        Ok(()) => {}
        Err(End::Gone) => trail.gone(),
        Err(End::Failed(failure)) => {
            trail.failed(&failure);
            if Box::pin(exchange.refuse(&failure)).await.is_err() {
                trail.gone();
            }
        }
    }
    trail.end(gateway, exchange);
}

/// Registers the request among those in flight, from where it can be cancelled.
fn listed(gateway: &Gateway, exchange: &mut Exchange, trail: &mut Trail, principal: &Principal) {
    let (request_id, client) = (exchange.request_id.clone(), exchange.client().map(|address| address.to_string()));
    let about = About { request_id, route: trail.route, client, background: false };
    let (entry, cancelled) = gateway.live.begin(about, principal);
    exchange.cancelled_by(cancelled);
    trail.live = Some(entry);
}

struct Ended<'a>(&'a Gateway);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.metrics.in_flight(-1);
    }
}

/// Runs a future; a panic in it becomes an error with the panic's message.
pub(crate) async fn caught<F: Future>(future: F) -> Result<F::Output, String> {
    let mut future = Box::pin(future);
    std::future::poll_fn(move |context| {
        match std::panic::catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(payload) => {
                let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
                let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
                Poll::Ready(Err(text.unwrap_or_else(|| "panic without a message".into())))
            }
        }
    })
    .await
}

/// Checks that the body's content type is read as JSON, and reads the body.
pub(crate) async fn read_body(gateway: &Gateway, exchange: &mut Exchange, headers: &HeaderMap) -> Result<Body, End> {
    if !Content::of(headers).is_json() {
        let message = "The body must be JSON: send \"Content-Type: application/json\".";
        return Err(Failure::new(ErrorKind::UnsupportedMedia, message).into());
    }
    if headers
        .get(http::header::CONTENT_ENCODING)
        .is_some_and(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity"))
    {
        return Err(Failure::new(ErrorKind::UnsupportedMedia, "Compressed request bodies are not accepted.").into());
    }
    Ok(exchange.read_body(&gateway.bodies).await?)
}

/// Size of a body above which it is decoded off the I/O threads: about a millisecond of one core.
const INLINE_BODY_BYTES_MAX: usize = 256 * 1024;

/// Result of `decode` on a body, with the body's lease on the memory budget, since the result is about as large. The
/// bytes are dropped.
pub(crate) async fn decoded<T: Send + 'static>(
    body: Body,
    decode: impl FnOnce(&[u8], &Bounds) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, BodyLease), Failure> {
    let small = body.bytes.len() <= INLINE_BODY_BYTES_MAX;
    let now = move || Ok((decode(&body.bytes, &Bounds::default())?, body.lease));
    if small {
        return now();
    }
    let task = tokio::task::spawn_blocking(now);
    task.await.map_err(|error| Failure::internal(format!("decoding: {error}")))?
}

fn origin(principal: &Principal, config: &Snapshot, exchange: &Exchange, trail: &Trail) -> Origin {
    Origin {
        tenant: principal.tenant().to_owned(),
        weight: principal.weight,
        deadline: config.request_timeout.map(|limit| (exchange.started + limit).into_std()),
        trace: trail.trace.clone(),
        ..Origin::default()
    }
}

/// Awaits `work` unless the client leaves first.
pub(crate) async fn watched<T>(exchange: &mut Exchange, work: impl Future<Output = T>) -> Result<T, Gone> {
    tokio::select! {
        biased;
        done = work => Ok(done),
        gone = exchange.gone() => Err(gone),
    }
}
