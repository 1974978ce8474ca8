//! Steps of a client's request, as the proxy tells of them: a message in, the replies out.
//!
//! ```text
//! request head ─▶ (body is awaited)          mode BUFFERED: replied to at once, without changes
//! request body ─▶ … last part ─▶ choose ─▶   head with the endpoint, then the body as it was or renamed
//! answer head  ─▶ which endpoint, which status
//! answer body  ─▶ first part: the endpoint answers; last part: usage, the request is in flight no more
//! ```
//!
//! A request that cannot be served is answered in the client's dialect (`ImmediateResponse`). Nothing here waits for the
//! network; only the choice may, for a tokenizer's thread. However a request ends, its conversation is dropped: there
//! its record for the access log is written, once.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use penstock_auth::route::{self, Route};
use penstock_base::error::Failure;
use penstock_http::exchange::{new_request_id, request_id};
use penstock_http::{Body, BodyLease, BudgetExhausted};
use penstock_proto::ErrorKind;
use penstock_types::{Dialect, ProviderFault};

use crate::answer::{Answer, Read};
use crate::chooser::{Asked, Chooser, Chosen, Outcome, Refusal};
use crate::messages::{
    BodyMutation, BodySendMode, CommonReply, CommonResponse, HeaderMutation, HttpBody, HttpHeaders, HttpStatus,
    ImmediateResponse, Metadata, Mutation, ProcessingRequest, ProcessingResponse, Reply, Step, StreamedBodyResponse,
    Struct, TrailersReply,
};
use crate::seldom::Seldom;
use crate::trail::Trail;

/// Header field, and key of the metadata, with the chosen endpoints.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// Namespace of the metadata with the chosen endpoints, and with the one that has answered.
pub const NAMESPACE: &str = "envoy.lb";
/// Key of the metadata with the endpoint that has answered.
pub const SERVED: &str = "x-gateway-destination-endpoint-served";
/// Namespace of the metadata with the endpoints that may be chosen.
pub const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
/// Key of the metadata with the endpoints that may be chosen.
pub const SUBSET: &str = "x-gateway-destination-endpoint-subset";

/// Largest part of a body in one message: Envoy's filter buffers are 64 KiB.
const PART_BYTES: usize = 62 * 1024;
/// Most endpoints of a subset that are read.
const SUBSET_MAX: usize = 1024;

/// Replies to one message.
#[derive(Default)]
pub struct Replies {
    /// Messages for the proxy, in order.
    pub messages: Vec<ProcessingResponse>,
    /// True if nothing is to be said any more.
    pub is_over: bool,
    /// Lease on the memory of the body in the messages.
    pub hold: Option<Box<dyn Send + Sync>>,
}

/// State of a client's request between two messages of the proxy.
pub struct Conversation<C: Chooser> {
    chooser: Arc<C>,
    modes: (BodySendMode, BodySendMode),
    /// Head of the request until the choice.
    head: Option<Head>,
    /// Dialect in which the client is told of a refusal.
    dialect: Dialect,
    /// Record for the access log; `None`: no request has come.
    trail: Option<Trail>,
    /// Parts of the body that have come; its room is charged, too.
    body: Vec<u8>,
    /// Body that came as a whole, in one message.
    whole: Option<Bytes>,
    lease: Option<BodyLease>,
    /// Lease on the memory of a message that is not about the request's body, until it has been replied to.
    message_lease: Option<BodyLease>,
    awaits_body: bool,
    chosen: Option<Chosen>,
    answer: Answer,
}

struct Head {
    method: Method,
    target: String,
    headers: HeaderMap,
    among: Option<Vec<SocketAddr>>,
    request_id: String,
    client: Option<IpAddr>,
}

impl<C: Chooser> Conversation<C> {
    /// New request, of which the proxy has said nothing yet.
    pub fn new(chooser: Arc<C>) -> Self {
        Self {
            chooser,
            modes: (BodySendMode::FullDuplexStreamed, BodySendMode::FullDuplexStreamed),
            head: None,
            dialect: Dialect::OpenAi,
            trail: None,
            body: Vec::new(),
            whole: None,
            lease: None,
            message_lease: None,
            awaits_body: false,
            chosen: None,
            answer: Answer::Unread,
        }
    }

    /// Returns true while the request's body has not come to its end.
    pub fn awaits_body(&self) -> bool {
        self.awaits_body
    }

    /// Bytes of the buffer of the parts received so far, its room included.
    #[cfg(test)]
    pub(crate) fn buffer_bytes(&self) -> usize {
        self.body.capacity()
    }

    /// Charges the request's body to the memory for bodies: the buffer of the parts received so far, and that of a message
    /// which is not complete yet, `held` bytes. A message without a part of the body is charged to the memory for answers
    /// until the picker has replied to it.
    ///
    /// # Errors
    /// The refusal of a body that is too large, or finds no memory.
    pub fn cover(&mut self, held: usize) -> Result<(), Replies> {
        if !self.awaits_body {
            return self.charge(0, held).map_err(|_| {
                let message = "The gateway has no memory left for messages of this size. Try again shortly.";
                let failure = Failure::new(ErrorKind::Overloaded, message).retry_after(Duration::from_secs(1));
                self.refuse(&failure, "memory", Duration::ZERO)
            });
        }
        let max = self.chooser.limits().body_bytes_max;
        if self.body.len() + held > max.saturating_add(crate::MESSAGE_BYTES_MAX) {
            return Err(self.too_large(max));
        }
        self.charge(self.body.capacity(), held).map_err(|why| self.full(why))
    }

    /// Refuses a body for which there is no memory.
    fn full(&mut self, why: BudgetExhausted) -> Replies {
        let reason = match why {
            BudgetExhausted::All => "memory",
            BudgetExhausted::Share => "share",
        };
        self.refuse(&why.failure(), reason, Duration::ZERO)
    }

    /// Charges `held` bytes of a message as [`Conversation::cover`] does, if there is memory for them.
    pub fn may_cover(&mut self, held: usize) -> bool {
        self.charge(self.body.capacity(), held).is_ok()
    }

    /// Charges the buffer of a body and that of a message.
    fn charge(&mut self, body: usize, message: usize) -> Result<(), BudgetExhausted> {
        if !self.awaits_body {
            let lease = self.message_lease.get_or_insert_with(|| self.chooser.answer_lease());
            return lease.cover(message);
        }
        let mut lease = self.lease.take().unwrap_or_else(|| self.empty_lease());
        let covered = lease.cover(body + message);
        self.lease = Some(lease);
        covered
    }

    /// Adds a part to the body, whose buffer is charged whole: its size doubles, or grows by an eighth where the memory for
    /// that is not there.
    ///
    /// # Errors
    /// As [`Conversation::cover`].
    fn add(&mut self, part: &[u8]) -> Result<(), Replies> {
        let (len, more, max) = (self.body.len(), part.len(), self.chooser.limits().body_bytes_max);
        if len + more > self.body.capacity() {
            let left = max.saturating_sub(len).max(more);
            let (double, eighth) = (len.clamp(more, left), (len / 8).clamp(more, left));
            // The part is here as well until it is copied.
            let room = if self.charge(len + double, more).is_ok() { double } else { eighth };
            self.charge(len + room, more).map_err(|why| self.full(why))?;
            self.body.reserve_exact(room);
        }
        self.body.extend_from_slice(part);
        Ok(())
    }

    /// Refuses a body whose parts come too slowly.
    pub fn too_slow(&mut self) -> Replies {
        let failure = Failure::new(ErrorKind::ClientTimeout, "The request body was sent too slowly.");
        self.refuse(&failure, "slow_body", Duration::ZERO)
    }

    /// Refuses a body of which one message alone is larger than allowed.
    pub fn too_long(&mut self) -> Replies {
        self.too_large(self.chooser.limits().body_bytes_max)
    }

    fn too_large(&mut self, max: usize) -> Replies {
        let message = format!("The request body is larger than {max} bytes.");
        self.refuse(&Failure::new(ErrorKind::TooLarge, message), "too_large", Duration::ZERO)
    }

    /// Notes that the proxy has ended the stream.
    pub fn left(&mut self) {
        self.trail.iter_mut().for_each(|trail| trail.has_left = true);
    }

    /// Notes that the stream ends because the proxy has broken the protocol; `detail` says how.
    pub fn broken(&mut self, kind: ErrorKind, detail: &'static str) {
        if self.trail.as_ref().is_some_and(Trail::is_decided) {
            return;
        }
        if self.trail.as_ref().is_none_or(|trail| trail.reason.is_none()) {
            self.chooser.count(Outcome { model: "", outcome: "refused", reason: "protocol", took: Duration::ZERO });
        }
        if let Some(trail) = &mut self.trail {
            trail.reason.get_or_insert("protocol");
            trail.failed(&Failure::new(kind, "").log(detail));
        }
    }

    /// Takes in a message. Dropping the future leaves the request without a choice.
    pub async fn take(&mut self, message: ProcessingRequest) -> Replies {
        let mut replies = self.step(message).await;
        if let Some(lease) = self.message_lease.take() {
            replies.hold.get_or_insert_with(|| Box::new(lease));
        }
        replies
    }

    async fn step(&mut self, message: ProcessingRequest) -> Replies {
        if message.observability_mode {
            return Replies::default();
        }
        if let Some(modes) = message.protocol_config.filter(|_| self.trail.is_none()) {
            self.modes = (modes.request_body_mode(), modes.response_body_mode());
        }
        let metadata = message.metadata_context.as_ref();
        match message.request {
            Some(Step::RequestHeaders(head)) => self.request_head(&head, metadata).await,
            Some(Step::RequestBody(part)) => self.request_body(part).await,
            Some(Step::RequestTrailers(_)) => self.request_trailers().await,
            Some(Step::ResponseHeaders(head)) => self.answer_head(&head, metadata),
            Some(Step::ResponseBody(part)) => self.answer_body(&part),
            Some(Step::ResponseTrailers(_)) => {
                self.answer_ended();
                one(Reply::ResponseTrailers(TrailersReply {}))
            }
            None => Replies::default(),
        }
    }

    async fn request_head(&mut self, head: &HttpHeaders, metadata: Option<&Metadata>) -> Replies {
        if self.trail.is_some() {
            self.broken(ErrorKind::Malformed, "a second request on one stream");
            return Replies { is_over: true, ..Replies::default() };
        }
        let asked = Head::read(head, metadata);
        let route = Route::parse(&asked.method, &asked.target).map_or("-", |route| route.label());
        self.dialect = route::dialect(&asked.target, &asked.headers);
        self.trail = Some(Trail::new(asked.request_id.clone(), route, asked.client));
        self.head = Some(asked);
        let mode = self.modes.0;
        match mode {
            _ if head.end_of_stream => self.choose(None, false).await,
            BodySendMode::None => self.choose(None, false).await,
            BodySendMode::Buffered => {
                self.awaits_body = true;
                one(Reply::RequestHeaders(CommonReply::default()))
            }
            BodySendMode::FullDuplexStreamed => {
                self.awaits_body = true;
                Replies::default()
            }
            BodySendMode::Streamed | BodySendMode::BufferedPartial | BodySendMode::Grpc => {
                self.bad_mode("request_body_mode of the proxy is neither FULL_DUPLEX_STREAMED nor BUFFERED")
            }
        }
    }

    /// Refuses a request of a proxy whose processing modes do not allow the choice of an endpoint.
    fn bad_mode(&mut self, what: &'static str) -> Replies {
        static SELDOM: Seldom = Seldom::new();
        if let Some(left_out) = SELDOM.due() {
            let mode = self.modes.0;
            tracing::warn!(
                ?mode,
                left_out,
                what,
                "the endpoint picker refuses the requests of a proxy: the processing modes of its ext_proc filter must be changed"
            );
        }
        self.refuse(&Failure::internal(what), "mode", Duration::ZERO)
    }

    async fn request_body(&mut self, part: HttpBody) -> Replies {
        if !self.awaits_body {
            if self.trail.is_none() {
                self.trail = Some(Trail::new(new_request_id(), "-", None));
                return self.bad_mode("the proxy sends a body without a head: request_header_mode must be SEND");
            }
            // Behind the end, or of a request that has been replied to.
            return Replies::default();
        }
        let max = self.chooser.limits().body_bytes_max;
        if self.body.len() + part.body.len() > max {
            return self.too_large(max);
        }
        // A buffered body comes in one message, without its end where trailers follow.
        let is_last = part.end_of_stream || self.modes.0 == BodySendMode::Buffered;
        let is_whole = self.body.is_empty() && is_last;
        if let Err(refusal) = if is_whole { self.cover(part.body.len()) } else { self.add(&part.body) } {
            return refusal;
        }
        if is_whole {
            self.whole = Some(part.body);
        }
        if !is_last {
            return Replies::default();
        }
        let body = self.taken();
        self.choose(Some(body), false).await
    }

    async fn request_trailers(&mut self) -> Replies {
        if !self.awaits_body {
            return one(Reply::RequestTrailers(TrailersReply {}));
        }
        let body = self.taken();
        self.choose(Some(body), true).await
    }

    /// Takes the whole body out, with its lease.
    fn taken(&mut self) -> Body {
        let mut lease = self.lease.take().unwrap_or_else(|| self.empty_lease());
        let bytes = self.whole.take().unwrap_or_else(|| {
            let mut body = std::mem::take(&mut self.body);
            // Memory beyond the bytes is given back, unless it is little.
            if body.capacity() / 8 > body.len() / 7 {
                body.shrink_to_fit();
            }
            lease.shrink(body.capacity());
            body.into()
        });
        Body { bytes, lease }
    }

    fn empty_lease(&self) -> BodyLease {
        self.chooser.lease(self.head.as_ref().and_then(|head| head.client))
    }

    /// Chooses the endpoint and replies to the head, and to the body that was held back. `trailers`: the request ends
    /// with trailers.
    async fn choose(&mut self, body: Option<Body>, trailers: bool) -> Replies {
        let began = Instant::now();
        let awaited = std::mem::replace(&mut self.awaits_body, false);
        let Some(head) = self.head.take() else { return Replies { is_over: true, ..Replies::default() } };
        let bytes = body.as_ref().map(|body| body.bytes.clone()).unwrap_or_default();
        let Head { method, target, headers, among, request_id, client } = head;
        let mut chosen =
            match self.chooser.choose(Asked { method, target, headers, body, among, request_id, client }).await {
                Ok(chosen) => chosen,
                Err(Refusal { failure, model, stream }) => {
                    let reason = reason(&failure);
                    if let Some(trail) = &mut self.trail {
                        (trail.model, trail.stream) = (model, stream);
                    }
                    return self.refuse(&failure, reason, began.elapsed());
                }
            };
        let (renamed, hold) = (chosen.body.take(), chosen.hold.take());
        let addresses = chosen.pick.endpoints();
        let endpoints = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let took = began.elapsed();
        let (model, reason) = (chosen.pick.entry(), chosen.pick.reason());
        self.chooser.count(Outcome { model, outcome: "picked", reason, took });
        tracing::debug!(model, endpoints, reason, took_us = took.as_micros() as u64, "endpoint picked");
        if let Some(trail) = &mut self.trail {
            (trail.model, trail.stream) = (Some(model.into()), chosen.stream);
            (trail.reason, trail.endpoints) = (Some(reason), addresses);
        }
        self.chosen = Some(chosen);
        let full_duplex = self.modes.0 == BodySendMode::FullDuplexStreamed;
        let mut messages = Vec::with_capacity(2);
        match (awaited, full_duplex) {
            (true, false) => {
                let body = renamed.map(|parts| Mutation::Body(parts.concat().into()));
                messages.push(destination(&endpoints, body, Reply::RequestBody));
            }
            (true, true) => {
                messages.push(destination(&endpoints, None, Reply::RequestHeaders));
                messages
                    .extend(parts(renamed.unwrap_or_else(|| vec![bytes]), !trailers).map(Reply::RequestBody).map(said));
            }
            (false, _) => messages.push(destination(&endpoints, None, Reply::RequestHeaders)),
        }
        if trailers {
            messages.push(said(Reply::RequestTrailers(TrailersReply {})));
        }
        Replies { messages, is_over: false, hold }
    }

    /// Answers the client in place of an endpoint.
    fn refuse(&mut self, failure: &Failure, reason: &'static str, took: Duration) -> Replies {
        self.awaits_body = false;
        (self.body, self.whole, self.lease, self.head) = (Vec::new(), None, None, None);
        self.release(Instant::now());
        let had_reply = self.trail.as_ref().is_some_and(|trail| trail.reason.is_some());
        if let Some(trail) = &mut self.trail {
            (trail.status, trail.reason) = (failure.status(), trail.reason.or(Some(reason)));
            trail.failed(failure);
        }
        let trail = self.trail.as_ref();
        let model = trail.and_then(|trail| trail.model.as_deref()).unwrap_or_default();
        let request_id = trail.map_or("", |trail| trail.request_id.as_str());
        if !had_reply {
            self.chooser.count(Outcome { model, outcome: "refused", reason, took });
        }
        tracing::debug!(model, reason, status = failure.status(), log = failure.log.as_deref(), "request refused");
        let message = immediate(failure, self.dialect, request_id);
        Replies { messages: vec![said(Reply::Immediate(message))], is_over: true, hold: None }
    }

    fn answer_head(&mut self, head: &HttpHeaders, metadata: Option<&Metadata>) -> Replies {
        let now = Instant::now();
        let text = |name: &[u8]| std::str::from_utf8(head.headers.as_ref()?.get(name)?).ok();
        let status = text(b":status").and_then(|status| status.parse().ok()).unwrap_or(0);
        if let Some(trail) = &mut self.trail {
            (trail.status, trail.is_answering) = (status, true);
            if status >= 400 {
                trail.failed(&Failure::provider(ProviderFault::new(ProviderFault::class_of(status), "")));
            }
        }
        if let Some(chosen) = &mut self.chosen {
            let served = metadata.and_then(|metadata| metadata.texts(NAMESPACE, SERVED));
            if let Some(address) = served.and_then(|all| all.first()?.parse().ok()) {
                chosen.pick.served(address, now);
            }
            match status {
                200..=299 => {
                    self.answer = Answer::new(chosen.surface, &fields(head), self.chooser.answer_lease());
                }
                0..=199 => {}
                status => {
                    let wait = text(b"retry-after").and_then(|seconds| seconds.trim().parse().ok());
                    chosen.pick.refused(status, wait.map(Duration::from_secs), now);
                }
            }
            // Without the body, the head is all of the answer that is seen.
            if status / 100 == 2 && (head.end_of_stream || self.modes.1 == BodySendMode::None) {
                chosen.pick.answered(now);
            }
        }
        if head.end_of_stream {
            self.answer_ended();
        }
        one(Reply::ResponseHeaders(CommonReply::default()))
    }

    fn answer_body(&mut self, part: &HttpBody) -> Replies {
        self.trail.iter_mut().for_each(|trail| trail.is_answering = true);
        let is_good = self.is_good();
        if let Some(chosen) = self.chosen.as_mut().filter(|_| is_good && !part.body.is_empty()) {
            let now = Instant::now();
            chosen.pick.answered(now);
            if self.answer.add(&part.body) {
                self.trail.iter_mut().for_each(|trail| trail.tokens(now));
            }
        }
        if part.end_of_stream {
            self.answer_ended();
        }
        match self.modes.1 {
            BodySendMode::FullDuplexStreamed => {
                let messages =
                    parts(vec![part.body.clone()], part.end_of_stream).map(Reply::ResponseBody).map(said).collect();
                Replies { messages, ..Replies::default() }
            }
            _ => one(Reply::ResponseBody(CommonReply::default())),
        }
    }

    /// Takes in the end of the answer: the request is in flight no more.
    fn answer_ended(&mut self) {
        let (now, is_good, read) = (Instant::now(), self.is_good(), self.answer.end());
        if let Some(chosen) = self.chosen.as_mut().filter(|_| is_good) {
            chosen.pick.answered(now);
            chosen.pick.ended(read.facts.filter(|_| read.is_complete).map(|facts| facts.cached_tokens));
        }
        if let Some(trail) = &mut self.trail {
            (trail.is_answering, trail.ended) = (true, trail.ended.or(Some(now)));
        }
        self.note(read);
        self.release(now);
    }

    /// Returns true if the answer has a status of 2xx.
    fn is_good(&self) -> bool {
        self.trail.as_ref().is_some_and(|trail| trail.status / 100 == 2)
    }

    /// Notes for the log what was read of the answer.
    fn note(&mut self, read: Read) {
        let Some(trail) = self.trail.as_mut().filter(|_| self.chosen.is_some()) else { return };
        read.failure.iter().for_each(|failure| trail.failed(failure));
        trail.cost_usd = read.facts.zip(self.chosen.as_ref()).and_then(|(facts, chosen)| chosen.pick.cost(facts));
        trail.read = read;
    }

    /// Lets go of the choice: the request is in flight no more.
    fn release(&mut self, now: Instant) {
        let Some(mut chosen) = self.chosen.take() else { return };
        if let Some(trail) = &mut self.trail {
            (trail.target, trail.attempts) = (Some(chosen.pick.target()), chosen.pick.attempts(now));
        }
    }
}

impl<C: Chooser> Drop for Conversation<C> {
    fn drop(&mut self) {
        let read = self.answer.cut();
        self.note(read);
        self.release(Instant::now());
        let Some(mut trail) = self.trail.take() else { return };
        if std::thread::panicking() {
            trail.failed(&Failure::internal("a panic"));
        }
        self.chooser.ended(&trail.record(self.modes.1 != BodySendMode::None));
    }
}

impl Head {
    fn read(head: &HttpHeaders, metadata: Option<&Metadata>) -> Self {
        let text = |name: &[u8]| std::str::from_utf8(head.headers.as_ref()?.get(name)?).ok();
        let subset = metadata.and_then(|metadata| metadata.texts(SUBSET_NAMESPACE, SUBSET));
        let headers = fields(head);
        Self {
            client: client(&headers),
            method: text(b":method").and_then(|method| method.parse().ok()).unwrap_or_default(),
            target: text(b":path").unwrap_or("/").to_owned(),
            headers,
            among: subset.map(|all| all.iter().take(SUBSET_MAX).filter_map(|text| text.parse().ok()).collect()),
            request_id: request_id(text(b"x-request-id")),
        }
    }
}

/// Address of the client: the last of `x-forwarded-for`, which the proxy itself has added.
fn client(headers: &HeaderMap) -> Option<IpAddr> {
    let last = headers.get_all("x-forwarded-for").iter().next_back()?.to_str().ok()?;
    last.rsplit(',').next()?.trim().parse().ok()
}

/// Header fields of a head, without pseudo-headers and what is no field.
fn fields(head: &HttpHeaders) -> HeaderMap {
    let all = head.headers.iter().flat_map(|headers| &headers.headers);
    let field = |field: &crate::messages::HeaderValue| {
        let name = HeaderName::from_bytes(&field.key).ok()?;
        Some((name, HeaderValue::from_bytes(field.bytes()).ok()?))
    };
    let mut out = HeaderMap::new();
    for (name, value) in all.filter_map(field) {
        // Err: more fields than a map holds; the first are enough.
        let _ = out.try_append(name, value);
    }
    out
}

fn said(reply: Reply) -> ProcessingResponse {
    ProcessingResponse { response: Some(reply), dynamic_metadata: None }
}

fn one(reply: Reply) -> Replies {
    Replies { messages: vec![said(reply)], ..Replies::default() }
}

/// Reply that names the endpoints, in the header field and in the metadata.
fn destination(endpoints: &str, body: Option<Mutation>, step: fn(CommonReply) -> Reply) -> ProcessingResponse {
    let mut fields = vec![(DESTINATION, Bytes::copy_from_slice(endpoints.as_bytes()))];
    if let Some(Mutation::Body(bytes)) = &body {
        // Envoy refuses a body whose length is not the field's.
        fields.push(("content-length", bytes.len().to_string().into()));
    }
    let response = CommonResponse {
        header_mutation: Some(HeaderMutation::set(fields)),
        body_mutation: body.map(|mutation| BodyMutation { mutation: Some(mutation) }),
        clear_route_cache: true,
    };
    ProcessingResponse {
        response: Some(step(CommonReply { response: Some(response) })),
        dynamic_metadata: Some(Struct::text(NAMESPACE, DESTINATION, endpoints.to_owned())),
    }
}

/// Parts of a body for the mode `FULL_DUPLEX_STREAMED`: at least one, the last with the end if `ends`.
fn parts(bytes: Vec<Bytes>, ends: bool) -> impl Iterator<Item = CommonReply> {
    let mut all: Vec<Bytes> = Vec::with_capacity(bytes.len());
    for mut rest in bytes {
        while rest.len() > PART_BYTES {
            all.push(rest.split_to(PART_BYTES));
        }
        if !rest.is_empty() {
            all.push(rest);
        }
    }
    if all.is_empty() {
        all.push(Bytes::new());
    }
    let last = all.len() - 1;
    all.into_iter().enumerate().map(move |(at, body)| {
        let streamed = StreamedBodyResponse { body, end_of_stream: ends && at == last };
        let body_mutation = Some(BodyMutation { mutation: Some(Mutation::Streamed(streamed)) });
        CommonReply { response: Some(CommonResponse { body_mutation, ..CommonResponse::default() }) }
    })
}

/// Reason of a refusal for the metrics.
fn reason(failure: &Failure) -> &'static str {
    match failure.kind {
        ErrorKind::ModelNotFound => "unknown_model",
        ErrorKind::RateLimited => "full",
        ErrorKind::Unavailable => "no_endpoint",
        ErrorKind::Overloaded => "memory",
        ErrorKind::Internal => "internal",
        _ => "invalid",
    }
}

/// Answer of the service to the client, in the client's dialect.
fn immediate(failure: &Failure, dialect: Dialect, id: &str) -> ImmediateResponse {
    let mut fields: Vec<(&'static str, Bytes)> = vec![
        ("content-type", Bytes::from_static(b"application/json")),
        ("x-request-id", Bytes::copy_from_slice(id.as_bytes())),
        ("x-penstock-error-source", Bytes::from_static(failure.source().as_bytes())),
        ("x-should-retry", Bytes::from_static(if failure.should_retry() { &b"true"[..] } else { b"false" })),
    ];
    fields.extend(failure.retry_after_seconds().map(|seconds| ("retry-after", Bytes::from(seconds.to_string()))));
    ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(failure.status()) }),
        headers: Some(HeaderMutation::set(fields)),
        body: failure.body(dialect, id),
        details: format!("penstock_{}", failure.shape().code.unwrap_or("refused")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_is_whom_the_proxy_has_seen() {
        let at = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            values.iter().for_each(|value| {
                headers.append("x-forwarded-for", HeaderValue::from_static(value));
            });
            client(&headers).map(|address| address.to_string())
        };
        assert_eq!(at(&["1.2.3.4"]).as_deref(), Some("1.2.3.4"));
        assert_eq!(at(&["6.6.6.6, 1.2.3.4", "7.7.7.7,  2001:db8::1"]).as_deref(), Some("2001:db8::1"));
        assert_eq!((at(&[]), at(&["somebody"])), (None, None));
    }
}
