//! Path of a request: one function, one line per stage, in order.

use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;

use crate::admit;
use crate::answer::Answer;
use crate::forward;
use crate::gateway::Gateway;
use crate::handler::{End, read_body, watched};
use crate::live_requests::About;
use crate::pump;
use crate::request_headers;
use crate::request_log::{Carried, Trail};
use crate::routes;
use crate::stored;
use crate::web;
use penstock_auth::Principal;
use penstock_auth::route::{self, Route};
use penstock_base::error::Failure;
use penstock_base::panics::caught;
use penstock_config::Snapshot;
use penstock_http::cancel;
use penstock_http::connection::{Handler, fault_failure};
use penstock_http::head::HeadFault;
use penstock_http::places::{Bounds, Refused};
use penstock_http::{Exchange, HttpLimits};
use penstock_telemetry::Metric;
use penstock_upstream::Origin;
use penstock_upstream::call::Call;

#[async_trait]
impl Handler for Gateway {
    fn limits(&self) -> Arc<HttpLimits> {
        self.serving().config.http.clone()
    }

    async fn serve(&self, exchange: &mut Exchange) {
        serve(self, exchange).await;
    }

    async fn refuse(&self, exchange: &mut Exchange, fault: HeadFault) {
        self.refused_head(fault);
        // A client that does not wait for its refusal has lost nothing.
        let _ = exchange.refuse(&fault_failure(fault)).await;
    }

    fn refused_head(&self, fault: HeadFault) {
        self.metrics.count(Metric::MalformedHeads, &[("status", &fault.status.to_string())]);
    }

    fn is_leaving(&self) -> bool {
        Gateway::is_leaving(self)
    }

    fn connections(&self, change: i64) {
        self.metrics.connections(change);
    }

    /// Bounds of connections per peer: none for loopback and trusted proxies, which stand for many clients, and for
    /// Unix sockets, which have no addresses.
    fn bounds(&self, peer: Option<IpAddr>) -> Bounds {
        let serving = self.serving();
        let (http, proxies) = (&serving.config.http, &serving.config.auth.trusted_proxies);
        let peer = peer.map(|peer| peer.to_canonical());
        let is_client = |peer: &IpAddr| !peer.is_loopback() && !proxies.iter().any(|net| net.contains(peer));
        let (address_max, address_rate) = match peer.filter(is_client) {
            Some(_) => (http.address_connections_max, http.address_connections_per_second),
            None => (0, 0),
        };
        Bounds { connections_max: serving.connections_max, address_max, address_rate }
    }

    fn refused_connection(&self, why: Refused) {
        self.metrics.count(Metric::ConnectionsRefused, &[("reason", why.name())]);
    }
}

/// Serves one request. However it ends, the exchange is ended and the trail is written afterwards.
pub async fn serve(gateway: &Gateway, exchange: &mut Exchange) {
    let _served = Served::new(gateway);
    let mut trail = Trail::new(exchange.started);
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
    trail.end(gateway, &Carried::by(exchange));
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
    web::check(&route, &exchange.head, page, || is_open || !penstock_auth::has_credential(&exchange.head))
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
    let body = Box::pin(read_body(&gateway.bodies, exchange, &headers)).await?;
    let mut call = Call::new(ask, body, exchange.request_id.clone(), headers, penstock_dialects::decode).await?;
    call.client = exchange.client();
    call.signer = gateway.signer(call.ask.surface, &principal).await;
    let recalled = Box::pin(stored::recall(gateway, exchange, &principal, call)).await?;
    let Some((call, keeping)) = recalled else { return Ok(()) };
    let admitted = watched(exchange, Box::pin(admit::admit(gateway, &serving, &principal, call))).await??;
    let (call, entry) = (admitted.call.clone(), &admitted.entry);
    trail.model = Some(entry.name.to_string());
    (trail.price, trail.tier) = (entry.price, entry.billing.tier(call.peek.service_tier));
    trail.stream = Some(call.stream);
    trail.choices = u64::from(call.peek.choices.max(1)) * u64::from(call.peek.prompts.max(1));
    trail.tags.clone_from(&call.tags);
    trail.live.iter().for_each(|live| live.asks(&entry.name, call.stream));
    trail.operation = Some(call.ask.surface.operation());
    let says_cost = config.cost_header || penstock_relay::cost::is_asked(&call.headers);
    let (price, stream) = (entry.price, call.stream);
    let memory = gateway.answer_memory(principal.tenant(), &config.http);
    let origin = request_headers::read(
        Origin { memory: memory.clone(), ..origin(&principal, config, exchange, trail) },
        &call.headers,
        exchange.started.into_std(),
    )?;
    let mut answer = Answer::new(call, memory.hold());
    answer.keep(keeping);
    let mut events = watched(exchange, admitted.open(origin)).await??;
    if says_cost {
        events = Box::new(penstock_relay::cost::Priced::new(events, price, trail.tier, stream));
    }
    let ended = pump::run(exchange, events.as_mut(), &mut answer, trail, config.commit, config.heartbeat).await;
    trail.facts = Some(events.facts_at_end());
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

/// Registers the request among those in flight, from where it can be cancelled.
fn listed(gateway: &Gateway, exchange: &mut Exchange, trail: &mut Trail, principal: &Principal) {
    let (request_id, client) = (exchange.request_id.clone(), exchange.client().map(|address| address.to_string()));
    let about = About { request_id, route: trail.route, client, background: false };
    let (entry, cancelled) = gateway.live.begin(about, principal);
    exchange.cancelled_by(cancelled);
    trail.live = Some(entry);
}

/// Count of a request in the gauge of those in flight; taken back on drop.
pub(crate) struct Served<'a>(&'a Gateway);

impl<'a> Served<'a> {
    pub(crate) fn new(gateway: &'a Gateway) -> Self {
        gateway.metrics.in_flight(1);
        Self(gateway)
    }
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        self.0.metrics.in_flight(-1);
    }
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
