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
//! network; only the choice may, for a tokenizer's thread.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use penstock_auth::route;
use penstock_base::error::Failure;
use penstock_http::exchange::new_request_id;
use penstock_http::{Body, BodyLease};
use penstock_proto::ErrorKind;

use crate::answer::Answer;
use crate::chooser::{Asked, Chooser, Chosen, Outcome};
use crate::messages::{
    BodyMutation, BodySendMode, CommonReply, CommonResponse, HeaderMutation, HttpBody, HttpHeaders, HttpStatus,
    ImmediateResponse, Metadata, Mutation, ProcessingRequest, ProcessingResponse, Reply, Step, StreamedBodyResponse,
    Struct, TrailersReply,
};

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
pub struct Conversation<C> {
    chooser: Arc<C>,
    modes: (BodySendMode, BodySendMode),
    request: Option<Head>,
    body: BytesMut,
    /// Body that came as a whole, in one message.
    whole: Option<Bytes>,
    lease: Option<BodyLease>,
    awaits_body: bool,
    chosen: Option<Chosen>,
    status: u16,
    answer: Answer,
}

struct Head {
    method: Method,
    target: String,
    headers: HeaderMap,
    among: Option<Vec<SocketAddr>>,
    request_id: String,
}

impl<C: Chooser> Conversation<C> {
    /// New request, of which the proxy has said nothing yet.
    pub fn new(chooser: Arc<C>) -> Self {
        Self {
            chooser,
            modes: (BodySendMode::FullDuplexStreamed, BodySendMode::FullDuplexStreamed),
            request: None,
            body: BytesMut::new(),
            whole: None,
            lease: None,
            awaits_body: false,
            chosen: None,
            status: 0,
            answer: Answer::Unread,
        }
    }

    /// Returns true while the request's body has not come to its end.
    pub fn awaits_body(&self) -> bool {
        self.awaits_body
    }

    /// Charges the body to the memory for bodies, with `held` further bytes of it that are not in a message yet.
    ///
    /// # Errors
    /// The refusal of a body that is too large, or finds no memory.
    pub fn cover(&mut self, held: usize) -> Result<(), Replies> {
        let bytes = self.body.len() + held;
        let max = self.chooser.limits().body_bytes_max;
        if bytes > max.saturating_add(crate::MESSAGE_BYTES_MAX) {
            return Err(self.too_large(max));
        }
        let lease = self.lease.get_or_insert_with(|| self.chooser.lease());
        lease.cover(bytes).map_err(|_| {
            let message = "Too many request bodies are being read. Try again shortly.";
            let failure = Failure::new(ErrorKind::Overloaded, message).retry_after(Duration::from_secs(1));
            self.refuse(&failure, "memory", Duration::ZERO)
        })
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

    /// Takes in a message. Dropping the future leaves the request without a choice.
    pub async fn take(&mut self, message: ProcessingRequest) -> Replies {
        if message.observability_mode {
            return Replies::default();
        }
        if let Some(modes) = message.protocol_config {
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
        if self.request.is_some() {
            return Replies { is_over: true, ..Replies::default() };
        }
        self.request = Some(Head::read(head, metadata));
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
                let failure =
                    Failure::internal("request_body_mode of the proxy is neither FULL_DUPLEX_STREAMED nor BUFFERED");
                tracing::warn!(
                    ?mode,
                    "the proxy sends request bodies in a mode in which no endpoint can be picked: use FULL_DUPLEX_STREAMED or BUFFERED"
                );
                self.refuse(&failure, "mode", Duration::ZERO)
            }
        }
    }

    async fn request_body(&mut self, part: HttpBody) -> Replies {
        if !self.awaits_body {
            // Behind the end, or of a request that has been replied to.
            return Replies::default();
        }
        let max = self.chooser.limits().body_bytes_max;
        if self.body.len() + part.body.len() > max {
            return self.too_large(max);
        }
        if let Err(refusal) = self.cover(part.body.len()) {
            return refusal;
        }
        // A buffered body comes in one message, without its end where trailers follow.
        let is_last = part.end_of_stream || self.modes.0 == BodySendMode::Buffered;
        if self.body.is_empty() && is_last {
            self.whole = Some(part.body);
        } else {
            self.body.extend_from_slice(&part.body);
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
        let bytes = self.whole.take().unwrap_or_else(|| std::mem::take(&mut self.body).freeze());
        let lease = self.lease.take().unwrap_or_else(|| self.chooser.lease());
        Body { bytes, lease }
    }

    /// Chooses the endpoint and replies to the head, and to the body that was held back. `trailers`: the request ends
    /// with trailers.
    async fn choose(&mut self, body: Option<Body>, trailers: bool) -> Replies {
        let began = Instant::now();
        let awaited = std::mem::replace(&mut self.awaits_body, false);
        let Some(head) = &mut self.request else { return Replies { is_over: true, ..Replies::default() } };
        let bytes = body.as_ref().map(|body| body.bytes.clone()).unwrap_or_default();
        let asked = Asked {
            method: head.method.clone(),
            target: head.target.clone(),
            headers: std::mem::take(&mut head.headers),
            body,
            among: head.among.take(),
            request_id: head.request_id.clone(),
        };
        // A refusal is written in the dialect of the head.
        let headers = asked.headers.clone();
        let chosen = self.chooser.choose(asked).await;
        if let Some(head) = &mut self.request {
            head.headers = headers;
        }
        let mut chosen = match chosen {
            Ok(chosen) => chosen,
            Err(failure) => {
                let reason = reason(&failure);
                return self.refuse(&failure, reason, began.elapsed());
            }
        };
        let (renamed, hold) = (chosen.body.take(), chosen.hold.take());
        let endpoints: Vec<String> = chosen.pick.endpoints().iter().map(ToString::to_string).collect();
        let endpoints = endpoints.join(",");
        let took = began.elapsed();
        let (model, reason) = (chosen.pick.entry(), chosen.pick.reason());
        self.chooser.count(Outcome { model, outcome: "picked", reason, took });
        tracing::debug!(model, endpoints, reason, took_us = took.as_micros() as u64, "endpoint picked");
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
        (self.body, self.whole, self.lease, self.chosen) = (BytesMut::new(), None, None, None);
        let outcome = Outcome { model: "", outcome: "refused", reason, took };
        self.chooser.count(outcome);
        tracing::debug!(reason, status = failure.status(), log = failure.log.as_deref(), "no endpoint was picked");
        let message = immediate(failure, self.request.as_ref());
        Replies { messages: vec![said(Reply::Immediate(message))], is_over: true, hold: None }
    }

    fn answer_head(&mut self, head: &HttpHeaders, metadata: Option<&Metadata>) -> Replies {
        let now = Instant::now();
        let text = |name: &[u8]| std::str::from_utf8(head.headers.as_ref()?.get(name)?).ok();
        self.status = text(b":status").and_then(|status| status.parse().ok()).unwrap_or(0);
        if let Some(chosen) = &mut self.chosen {
            let served = metadata.and_then(|metadata| metadata.texts(NAMESPACE, SERVED));
            if let Some(address) = served.and_then(|all| all.first()?.parse().ok()) {
                chosen.pick.served(address, now);
            }
            match self.status {
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
            if self.status / 100 == 2 && (head.end_of_stream || self.modes.1 == BodySendMode::None) {
                chosen.pick.answered(now);
            }
        }
        if head.end_of_stream {
            self.answer_ended();
        }
        one(Reply::ResponseHeaders(CommonReply::default()))
    }

    fn answer_body(&mut self, part: &HttpBody) -> Replies {
        if let Some(chosen) = self.chosen.as_mut().filter(|_| self.status / 100 == 2 && !part.body.is_empty()) {
            chosen.pick.answered(Instant::now());
            self.answer.add(&part.body);
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
        if let Some(mut chosen) = self.chosen.take()
            && self.status / 100 == 2
        {
            chosen.pick.answered(Instant::now());
            chosen.pick.ended(self.answer.cached_tokens());
        }
        self.answer = Answer::Unread;
    }
}

impl Head {
    fn read(head: &HttpHeaders, metadata: Option<&Metadata>) -> Self {
        let text = |name: &[u8]| std::str::from_utf8(head.headers.as_ref()?.get(name)?).ok();
        let sane = |id: &&str| {
            (1..=128).contains(&id.len())
                && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        };
        let subset = metadata.and_then(|metadata| metadata.texts(SUBSET_NAMESPACE, SUBSET));
        Self {
            method: text(b":method").and_then(|method| method.parse().ok()).unwrap_or_default(),
            target: text(b":path").unwrap_or("/").to_owned(),
            headers: fields(head),
            among: subset.map(|all| all.iter().take(SUBSET_MAX).filter_map(|text| text.parse().ok()).collect()),
            request_id: text(b"x-request-id").filter(sane).map_or_else(new_request_id, str::to_owned),
        }
    }
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
fn immediate(failure: &Failure, head: Option<&Head>) -> ImmediateResponse {
    let none = HeaderMap::new();
    let (target, headers) = head.map_or(("/", &none), |head| (head.target.as_str(), &head.headers));
    let (dialect, id) = (route::dialect(target, headers), head.map_or("", |head| head.request_id.as_str()));
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
