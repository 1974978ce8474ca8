//! Answers to people at the console: the stages of a request from its body on, without a connection to the data port.
//!
//! Body limits, plugins, limits, the ledger, the list of live requests, metrics, the trace and the access log are those of every request;
//! only the transport differs. The answer is a stream of OpenAI's chat completions, handed over piece by piece through a channel that is
//! bounded: a reader that stops reading slows its own sequence, and after `server.write_stall_ms` it has left.

use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method};
use penstock_proto::ErrorKind;
use penstock_types::{Dialect, Surface};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use crate::admit::admit;
use crate::answer::Answer;
use crate::gateway::Gateway;
use crate::handler::End;
use crate::live_requests::About;
use crate::phases::Served;
use crate::request_log::{Carried, Trail};
use penstock_auth::Principal;
use penstock_auth::route::Route;
use penstock_base::asker::Asker;
use penstock_base::error::Failure;
use penstock_base::panics::caught;
use penstock_http::Body;
use penstock_http::budget::BudgetExhausted;
use penstock_http::cancel;
use penstock_http::exchange::new_request_id;
use penstock_relay::cost::Priced;
use penstock_telemetry::Metric;
use penstock_types::ask::Ask;
use penstock_upstream::call::Call;
use penstock_upstream::{Events, Origin};

/// Pieces of an answer that wait for its reader.
pub const PIECES: usize = 4;
/// Protocol of these requests in the access log.
const PROTOCOL: &str = "console";

/// Request of a person at the console.
pub struct Asked {
    /// Id of the request in the log, the ledger and the answer.
    request_id: String,
    /// Principal that the request is made as.
    principal: Arc<Principal>,
    /// Body as a chat completion's, with `stream: true`.
    body: Bytes,
    /// Address of the person's browser; `None`: a Unix socket.
    client: Option<IpAddr>,
}

impl Asked {
    /// Request with the body of a chat completion, as this principal.
    pub fn new(principal: Principal, body: Bytes, client: Option<IpAddr>) -> Self {
        Self { request_id: new_request_id(), principal: Arc::new(principal), body, client }
    }

    /// Id of the request.
    pub fn request_id(&self) -> &str {
        &self.request_id
    }
}

/// Bytes of an answer, or the failure that ends it.
pub type Piece = Result<Bytes, Failure>;

/// Last event of a stream that failed, as OpenAI's clients read it.
pub fn error_event(failure: &Failure, request_id: &str) -> Bytes {
    [b"data: ", &failure.body(Dialect::OpenAi, request_id)[..], b"\n\n"].concat().into()
}

/// Answers a request into `out`, until the answer has ended, its reader has left, an operator cancels it, or `over` is ready.
pub async fn serve(gateway: &Gateway, asked: Asked, out: &mpsc::Sender<Piece>, over: impl Future<Output = ()>) {
    let _served = Served::new(gateway);
    let started = Instant::now();
    let mut trail = Trail::new(started);
    trail.route = Route::Ask(Ask::new(Surface::Chat)).label();
    trail.key.clone_from(&asked.principal.key);
    trail.trace = gateway.tracer.begin(&HeaderMap::new(), started.into_std());
    let (request_id, client) = (asked.request_id.clone(), asked.client);
    let said = client.map(|address| address.to_string());
    let about = About { request_id: request_id.clone(), route: trail.route, client: said, background: false };
    let (entry, cancelled) = gateway.live.begin(about, &asked.principal);
    trail.live = Some(entry);
    let stop = async {
        tokio::select! {
            by = cancelled => End::Failed(cancel::failure(by)),
            () = over => End::Gone,
            () = out.closed() => End::Gone,
        }
    };
    let (mut begun, stall) = (false, gateway.serving().config.http.write_stall);
    let way = Out { out, stall, begun: &mut begun };
    let outcome = caught(stages(gateway, asked, &mut trail, way, started, pin!(stop))).await;
    let outcome = outcome.unwrap_or_else(|panic| {
        gateway.metrics.count(Metric::Panics, &[]);
        tracing::error!(request_id, panic, "a request of the console panicked");
        Err(End::Failed(Failure::internal(panic)))
    });
    let mut status = if begun { 200 } else { 0 };
    match outcome {
        Ok(()) => {}
        Err(End::Gone) => trail.gone(),
        Err(End::Failed(failure)) => {
            trail.failed(&failure);
            status = if begun { 200 } else { failure.status() };
            if !matches!(timeout(stall, out.send(Err(failure))).await, Ok(Ok(()))) {
                trail.gone();
            }
        }
    }
    trail.end(gateway, &Carried { request_id: &request_id, client, protocol: PROTOCOL, method: &Method::POST, status });
}

/// Stages of the request, in the order of [`crate::phases`].
async fn stages(
    gateway: &Gateway,
    asked: Asked,
    trail: &mut Trail,
    mut out: Out<'_>,
    started: Instant,
    mut stop: Pin<&mut impl Future<Output = End>>,
) -> Result<(), End> {
    let serving = gateway.serving();
    let (config, principal) = (&serving.config, &asked.principal);
    let asker = Asker::new(principal.tenant(), None);
    let body = held(gateway, asker, asked.body, config.http.body_bytes_max)?;
    let ask = Ask::new(Surface::Chat);
    let mut call = Call::new(ask, body, asked.request_id, HeaderMap::new(), penstock_dialects::decode).await?;
    // The page writes one dialect for every model, so the body is translated for each provider: some refuse `max_tokens`, others end their lines
    // and write their events in ways that a page cannot be asked to know.
    call.own = true;
    if !call.stream {
        let failure = Failure::new(ErrorKind::InvalidRequest, "stream: only true is possible at the console.");
        return Err(failure.param("stream").into());
    }
    call.client = asked.client;
    let admitted = unless(stop.as_mut(), Box::pin(admit(gateway, &serving, principal, call))).await??;
    let (call, entry) = (admitted.call.clone(), &admitted.entry);
    trail.model = Some(entry.name.to_string());
    (trail.price, trail.tier) = (entry.price, entry.billing.tier(call.peek.service_tier));
    trail.stream = Some(true);
    trail.tags.clone_from(&call.tags);
    trail.live.iter().for_each(|live| live.asks(&entry.name, true));
    trail.operation = Some(call.ask.surface.operation());
    let (memory, price) = (gateway.answer_memory(principal.tenant(), &config.http), entry.price);
    let origin = Origin {
        tenant: principal.tenant().to_owned(),
        weight: principal.weight,
        deadline: config.request_timeout.map(|limit| (started + limit).into_std()),
        trace: trail.trace.clone(),
        memory: memory.clone(),
        ..Origin::default()
    };
    let mut answer = Answer::new(call, memory.hold());
    let events = unless(stop.as_mut(), Box::pin(admitted.open(origin))).await??;
    let mut events = Priced::new(events, price, trail.tier, true);
    let ended = pump(&mut events, &mut answer, trail, &mut out, config.heartbeat, stop).await;
    trail.facts = Some(events.facts_at_end());
    trail.course = events.course();
    ended
}

/// Body with its lease of the memory for request bodies.
fn held(gateway: &Gateway, asker: Asker, bytes: Bytes, bytes_max: usize) -> Result<Body, Failure> {
    if bytes.len() > bytes_max {
        let message = format!("The body is larger than {bytes_max} bytes.");
        return Err(Failure::new(ErrorKind::TooLarge, message));
    }
    let mut lease = gateway.bodies.lease_of(asker);
    lease.cover(bytes.len()).map_err(BudgetExhausted::failure)?;
    Ok(Body { bytes, lease })
}

/// Awaits `work` unless the request ends before.
async fn unless<T>(stop: Pin<&mut impl Future<Output = End>>, work: impl Future<Output = T>) -> Result<T, End> {
    tokio::select! {
        biased;
        why = stop => Err(why),
        done = work => Ok(done),
    }
}

/// Way to the reader.
struct Out<'a> {
    out: &'a mpsc::Sender<Piece>,
    /// Longest time for the reader to take a piece.
    stall: Duration,
    /// True once the reader has had a piece.
    begun: &'a mut bool,
}

impl Out<'_> {
    async fn send(&mut self, bytes: Bytes) -> Result<(), End> {
        match timeout(self.stall, self.out.send(Ok(bytes))).await {
            Ok(Ok(())) => {
                *self.begun = true;
                Ok(())
            }
            Ok(Err(_)) | Err(_) => Err(End::Gone),
        }
    }
}

/// Sends the answer as it comes. What came before a failure is sent before it.
async fn pump(
    events: &mut dyn Events,
    answer: &mut Answer,
    trail: &mut Trail,
    out: &mut Out<'_>,
    heartbeat: Duration,
    mut stop: Pin<&mut impl Future<Output = End>>,
) -> Result<(), End> {
    let mut batch = Vec::new();
    loop {
        let more = tokio::select! {
            biased;
            why = stop.as_mut() => return Err(why),
            more = poll_fn(|context| events.poll_events(context, &mut batch)) => more,
            () = sleep(heartbeat) => {
                unless(stop.as_mut(), out.send(answer.sign_of_life())).await??;
                continue;
            }
        };
        trail.events(&batch);
        if let Some(live) = &trail.live {
            live.progress(events.facts());
            if live.answers() {
                live.answered_by(events.course().target);
            }
        }
        let bytes = answer.events(&mut batch, events.facts(), *more.as_ref().unwrap_or(&true));
        let bytes = bytes.map_err(|failure| events.course().not_held(failure))?;
        if let Some(bytes) = bytes {
            unless(stop.as_mut(), out.send(bytes)).await??;
        }
        if !more? {
            break;
        }
    }
    if !answer.is_raw() && trail.finished() < answer.choices() {
        return Err(Failure::internal("the upstream ended before all choices had finished").into());
    }
    let last = [answer.done(), events.epilogue().unwrap_or_default()].concat();
    unless(stop, out.send(last.into())).await?
}
