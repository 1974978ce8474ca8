//! Conversations with a double of the gateway, and messages against bytes that were written by hand from the numbers
//! of the `.proto` files.

mod log;
mod service;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use penstock_base::asker::Asker;
use penstock_base::error::Failure;
use penstock_http::{BodyBudget, BodyLease, HttpLimits};
use penstock_proto::ErrorKind;
use penstock_telemetry::{Attempt, Record};
use penstock_types::Surface;
use penstock_upstream::Facts;
use prost::Message;

use crate::chooser::{Asked, Chooser, Chosen, Outcome, Picked, Refusal};
use crate::conversation::{Conversation, DESTINATION, NAMESPACE, Replies, SERVED, SUBSET, SUBSET_NAMESPACE};
use crate::messages::{
    BodySendMode, HeaderMap, HeaderValue, HttpBody, HttpHeaders, HttpTrailers, ListValue, Metadata, Mutation,
    ProcessingRequest, ProcessingResponse, ProtocolConfiguration, Reply, Step, Struct, Value, ValueKind,
};

const FIRST: &str = "10.0.0.7:8000";
const SECOND: &str = "10.0.0.8:8000";

/// Calls of a double of the gateway, in order.
type Told = Arc<Mutex<Vec<String>>>;

struct Double {
    told: Told,
    body_bytes_max: usize,
    refuses: Option<ErrorKind>,
    /// A choice that never comes, or panics.
    hangs: bool,
    panics: bool,
    /// Records of requests that have ended, as the access log has them.
    lines: Mutex<Vec<serde_json::Value>>,
    /// Time that each record takes.
    record_takes: Duration,
    renames: bool,
    bodies: BodyBudget,
}

struct Handle(Told);

impl Handle {
    fn tell(&self, what: impl Into<String>) {
        self.0.lock().expect("not poisoned").push(what.into());
    }
}

impl Picked for Handle {
    fn entry(&self) -> &str {
        "m"
    }

    fn reason(&self) -> &'static str {
        "cached"
    }

    fn endpoints(&self) -> Vec<SocketAddr> {
        vec![FIRST.parse().expect("an address"), SECOND.parse().expect("an address")]
    }

    fn served(&mut self, address: SocketAddr, _: Instant) {
        self.tell(format!("served {address}"));
    }

    fn answered(&mut self, _: Instant) {
        self.tell("answered");
    }

    fn refused(&mut self, status: u16, retry_after: Option<Duration>, _: Instant) {
        self.tell(format!("refused {status} {retry_after:?}"));
    }

    fn ended(&mut self, cached_tokens: Option<u64>) {
        self.tell(format!("ended {cached_tokens:?}"));
    }

    fn target(&self) -> Arc<str> {
        "a/m".into()
    }

    fn cost(&self, facts: Facts) -> Option<f64> {
        Some(facts.completion_tokens as f64)
    }

    fn attempts(&mut self, _: Instant) -> Vec<Attempt> {
        let has = |what: &str| self.0.lock().expect("not poisoned").iter().any(|told| told.starts_with(what));
        let outcome = if has("refused") { "error" } else { "abandoned" };
        vec![Attempt { target: "a/m".into(), outcome, status: 0, ms: 1.0, sent: true }]
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.tell("dropped");
    }
}

#[async_trait]
impl Chooser for Double {
    fn limits(&self) -> Arc<HttpLimits> {
        Arc::new(HttpLimits { body_bytes_max: self.body_bytes_max, ..HttpLimits::default() })
    }

    fn lease(&self, client: Option<std::net::IpAddr>) -> BodyLease {
        self.bodies.lease_of(Asker::new("", client))
    }

    fn answer_lease(&self) -> BodyLease {
        self.bodies.lease()
    }

    fn is_ready(&self) -> bool {
        true
    }

    async fn choose(&self, asked: Asked) -> Result<Chosen, Refusal> {
        let body = asked.body.map(|body| String::from_utf8_lossy(&body.bytes).into_owned());
        let (method, target, among) = (asked.method, asked.target, asked.among);
        self.told.lock().expect("not poisoned").push(format!("{method} {target} {body:?} {among:?}"));
        assert!(!self.panics, "as asked");
        if self.hangs {
            std::future::pending::<()>().await;
        }
        if let Some(kind) = self.refuses {
            let failure = Failure::new(kind, "no").retry_after(Duration::from_secs(2)).log("why");
            let model = (kind != ErrorKind::ModelNotFound).then(|| "m".into());
            return Err(Refusal { failure, model, stream: Some(false) });
        }
        let body = self.renames.then(|| vec![Bytes::from_static(b"{\"model\":"), Bytes::from_static(b"\"other\"}")]);
        let pick = Box::new(Handle(self.told.clone()));
        Ok(Chosen { pick, surface: Some(Surface::Chat), stream: Some(true), body, hold: None })
    }

    fn count(&self, outcome: Outcome<'_>) {
        let told = format!("count {} {} {}", outcome.model, outcome.outcome, outcome.reason);
        self.told.lock().expect("not poisoned").push(told);
    }

    fn ended(&self, record: &Record<'_>) {
        std::thread::sleep(self.record_takes);
        self.lines.lock().expect("not poisoned").push(serde_json::to_value(record).expect("JSON"));
    }

    fn panicked(&self) {
        self.told.lock().expect("not poisoned").push("panicked".into());
    }
}

fn double() -> Double {
    let (told, bodies) = (Told::default(), BodyBudget::new(1 << 20, 1 << 10));
    let (lines, record_takes) = (Mutex::default(), Duration::ZERO);
    let (refuses, hangs, panics, renames) = (None, false, false, false);
    Double { told, body_bytes_max: 1 << 18, refuses, hangs, panics, lines, record_takes, renames, bodies }
}

fn head(fields: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let field = |(name, value): &(&str, &str)| HeaderValue {
        key: Bytes::copy_from_slice(name.as_bytes()),
        value: Bytes::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    };
    HttpHeaders { headers: Some(HeaderMap { headers: fields.iter().map(field).collect() }), end_of_stream }
}

fn post() -> Step {
    Step::RequestHeaders(head(
        &[(":method", "POST"), (":path", "/v1/chat/completions"), ("content-type", "application/json")],
        false,
    ))
}

fn part(text: &str, end_of_stream: bool) -> HttpBody {
    HttpBody { body: Bytes::copy_from_slice(text.as_bytes()), end_of_stream }
}

fn step(request: Step) -> ProcessingRequest {
    ProcessingRequest { request: Some(request), ..ProcessingRequest::default() }
}

fn with_modes(request: Step, request_mode: BodySendMode, response_mode: BodySendMode) -> ProcessingRequest {
    let protocol_config = Some(ProtocolConfiguration {
        request_body_mode: request_mode as i32,
        response_body_mode: response_mode as i32,
        send_body_without_waiting_for_header_response: false,
    });
    ProcessingRequest { protocol_config, ..step(request) }
}

fn told(double: &Double) -> Vec<String> {
    std::mem::take(&mut *double.told.lock().expect("not poisoned"))
}

/// Replies in short: what each changes.
fn short(replies: &Replies) -> Vec<String> {
    let one = |message: &ProcessingResponse| {
        let (name, common) = match message.response.as_ref().expect("a reply") {
            Reply::RequestHeaders(reply) => ("request head", reply.response.as_ref()),
            Reply::ResponseHeaders(reply) => ("answer head", reply.response.as_ref()),
            Reply::RequestBody(reply) => ("request body", reply.response.as_ref()),
            Reply::ResponseBody(reply) => ("answer body", reply.response.as_ref()),
            Reply::RequestTrailers(_) => ("request trailers", None),
            Reply::ResponseTrailers(_) => ("answer trailers", None),
            Reply::Immediate(answer) => {
                let body = String::from_utf8_lossy(&answer.body).into_owned();
                return format!("{} {body}", answer.status.expect("a status").code);
            }
        };
        let mut out = name.to_owned();
        let Some(common) = common else { return out };
        for field in common.header_mutation.iter().flat_map(|mutation| &mutation.set_headers) {
            let header = field.header.as_ref().expect("a field");
            assert_eq!(field.append_action, 2, "the client's own value is replaced");
            out += &format!(" {}={}", String::from_utf8_lossy(&header.key), String::from_utf8_lossy(&header.raw_value));
        }
        match common.body_mutation.as_ref().and_then(|mutation| mutation.mutation.as_ref()) {
            Some(Mutation::Body(body)) => out += &format!(" whole {}", String::from_utf8_lossy(body)),
            Some(Mutation::Streamed(part)) => {
                out += &format!(" part {} {}", String::from_utf8_lossy(&part.body), part.end_of_stream);
            }
            None => {}
        }
        let namespace = message.dynamic_metadata.as_ref().and_then(|all| all.fields.get(NAMESPACE));
        if let Some(ValueKind::Object(all)) = namespace.and_then(|value| value.kind.as_ref())
            && let Some(ValueKind::Text(text)) = all.fields.get(DESTINATION).and_then(|value| value.kind.as_ref())
        {
            out += &format!(" metadata {text}");
        }
        out
    };
    replies.messages.iter().map(one).collect()
}

const PICKED: &str = "x-gateway-destination-endpoint=10.0.0.7:8000,10.0.0.8:8000";
const METADATA: &str = "metadata 10.0.0.7:8000,10.0.0.8:8000";

#[tokio::test]
async fn a_request_in_full_duplex_is_held_until_its_endpoint_is_known() {
    let double = Arc::new(double());
    let mut talk = Conversation::new(double.clone());
    assert!(talk.take(step(post())).await.messages.is_empty());
    assert!(talk.awaits_body());
    assert!(talk.take(step(Step::RequestBody(part("{\"a\"", false)))).await.messages.is_empty());
    let replies = talk.take(step(Step::RequestBody(part(":1}", true)))).await;
    assert_eq!(
        short(&replies),
        [format!("request head {PICKED} {METADATA}"), "request body part {\"a\":1} true".to_owned()]
    );
    assert_eq!(told(&double), ["POST /v1/chat/completions Some(\"{\\\"a\\\":1}\") None", "count m picked cached"]);
    assert!(double.bodies.bytes_held() == 0 && !talk.awaits_body());
    let ok = head(&[(":status", "200"), ("content-type", "application/json")], false);
    let served = Value { kind: Some(ValueKind::Text(SECOND.into())) };
    let served = Struct { fields: [(SERVED.to_owned(), served)].into() };
    let metadata = Metadata { filter_metadata: [(NAMESPACE.to_owned(), served)].into() };
    let message = ProcessingRequest { metadata_context: Some(metadata), ..step(Step::ResponseHeaders(ok)) };
    assert_eq!(short(&talk.take(message).await), ["answer head"]);
    assert_eq!(told(&double), [format!("served {SECOND}")]);
    let replies = talk.take(step(Step::ResponseBody(part("x", false)))).await;
    assert_eq!((short(&replies), told(&double)), (vec!["answer body part x false".into()], vec!["answered".into()]));
    let replies = talk.take(step(Step::ResponseBody(part("y", true)))).await;
    assert_eq!(short(&replies), ["answer body part y true"]);
    assert_eq!(told(&double), ["answered", "answered", "ended None", "dropped"], "in flight no more");
}

#[tokio::test]
async fn a_buffered_request_is_replied_to_step_by_step() {
    let double = Arc::new(Double { renames: true, ..double() });
    let mut talk = Conversation::new(double.clone());
    let begin = with_modes(post(), BodySendMode::Buffered, BodySendMode::Streamed);
    assert_eq!(short(&talk.take(begin).await), ["request head"]);
    let replies = talk.take(step(Step::RequestBody(part("{}", false)))).await;
    assert_eq!(
        short(&replies),
        [format!("request body {PICKED} content-length=17 whole {{\"model\":\"other\"}} {METADATA}")]
    );
    let replies = talk.take(step(Step::RequestTrailers(HttpTrailers {}))).await;
    assert_eq!(short(&replies), ["request trailers"]);
    told(&double);
    let busy = head(&[(":status", "503"), ("retry-after", "7")], false);
    assert_eq!(short(&talk.take(step(Step::ResponseHeaders(busy))).await), ["answer head"]);
    let replies = talk.take(step(Step::ResponseBody(part("busy", true)))).await;
    assert_eq!(short(&replies), ["answer body"]);
    assert_eq!(told(&double), ["refused 503 Some(7s)", "dropped"]);
}

#[tokio::test]
async fn large_bodies_go_back_in_parts_that_envoy_takes() {
    let double = Arc::new(double());
    let mut talk = Conversation::new(double.clone());
    talk.take(step(post())).await;
    let body = "x".repeat(200_000);
    talk.take(step(Step::RequestBody(part(&body[..150_000], false)))).await;
    talk.take(step(Step::RequestBody(part(&body[150_000..], false)))).await;
    let replies = talk.take(step(Step::RequestTrailers(HttpTrailers {}))).await;
    let mut back = String::new();
    for message in &replies.messages {
        assert!(message.encoded_len() < 64 * 1024);
        if let Some(Reply::RequestBody(reply)) = &message.response
            && let Some(Mutation::Streamed(part)) =
                reply.response.as_ref().and_then(|reply| reply.body_mutation.as_ref()?.mutation.clone())
        {
            back += std::str::from_utf8(&part.body).expect("text");
            assert!(!part.end_of_stream, "trailers end it");
        }
    }
    assert_eq!(back, body);
    assert!(matches!(replies.messages.last().and_then(|last| last.response.as_ref()), Some(Reply::RequestTrailers(_))));
}

#[tokio::test]
async fn refusals_are_in_the_clients_dialect() {
    for (kind, status, reason) in [
        (ErrorKind::Unavailable, 503, "no_endpoint"),
        (ErrorKind::RateLimited, 429, "full"),
        (ErrorKind::ModelNotFound, 404, "unknown_model"),
    ] {
        let double = Arc::new(Double { refuses: Some(kind), ..double() });
        let mut talk = Conversation::new(double.clone());
        talk.take(step(post())).await;
        let replies = talk.take(step(Step::RequestBody(part("{}", true)))).await;
        assert!(replies.is_over);
        let said = short(&replies);
        assert!(said[0].starts_with(&format!("{status} {{\"error\":{{\"message\":\"no\"")), "{said:?}");
        let model = if kind == ErrorKind::ModelNotFound { "" } else { "m" };
        assert_eq!(told(&double)[1], format!("count {model} refused {reason}"));
        let Some(Reply::Immediate(answer)) = &replies.messages[0].response else { panic!("an answer") };
        let fields = &answer.headers.as_ref().expect("fields").set_headers;
        let field = |name: &str| {
            let found = fields.iter().filter_map(|field| field.header.as_ref()).find(|field| field.key == name);
            found.map(|field| String::from_utf8_lossy(&field.raw_value).into_owned())
        };
        assert_eq!(field("content-type").as_deref(), Some("application/json"));
        assert_eq!(field("retry-after").as_deref(), Some("2"));
        assert!(field("x-request-id").is_some_and(|id| id.starts_with("req_")));
    }
    let double = Arc::new(Double { refuses: Some(ErrorKind::Unavailable), ..double() });
    let mut talk = Conversation::new(double.clone());
    let messages = head(&[(":method", "POST"), (":path", "/v1/messages"), ("anthropic-version", "2023-06-01")], false);
    talk.take(step(Step::RequestHeaders(messages))).await;
    let said = short(&talk.take(step(Step::RequestBody(part("{}", true)))).await);
    assert!(said[0].starts_with("503 {\"type\":\"error\""), "{said:?}");
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_and_its_memory_given_back() {
    let double = Arc::new(Double { body_bytes_max: 1000, ..double() });
    for mode in [BodySendMode::FullDuplexStreamed, BodySendMode::Buffered] {
        let mut talk = Conversation::new(double.clone());
        talk.take(with_modes(post(), mode, BodySendMode::None)).await;
        let first = if mode == BodySendMode::Buffered { "x".repeat(1001) } else { "x".repeat(1000) };
        let mut replies = talk.take(step(Step::RequestBody(part(&first, false)))).await;
        if mode == BodySendMode::FullDuplexStreamed {
            assert!(replies.messages.is_empty() && double.bodies.bytes_held() > 0);
            replies = talk.take(step(Step::RequestBody(part("x", true)))).await;
        }
        assert!(short(&replies)[0].starts_with("413 ") && replies.is_over);
        assert_eq!(
            (told(&double).last().map(String::as_str), talk.awaits_body()),
            (Some("count  refused too_large"), false)
        );
        assert_eq!(double.bodies.bytes_held(), 0);
    }
    let mut talk = Conversation::new(double.clone());
    talk.take(step(post())).await;
    assert!(talk.cover(1000 + crate::MESSAGE_BYTES_MAX).is_ok());
    let refused = talk.cover(1001 + crate::MESSAGE_BYTES_MAX).expect_err("too large");
    assert!(short(&refused)[0].starts_with("413 "));
}

/// The buffer of a body that comes in parts grows ahead of them: all of it is charged. Where others hold much, it grows in
/// smaller steps, and where there is nothing left, the client is told so and nothing stays held.
#[tokio::test]
async fn a_body_in_parts_is_charged_with_the_room_of_its_buffer() {
    const KIB: usize = 1024;
    for (others, passes) in [(0, true), (150 * KIB, true), (600 * KIB, false)] {
        let bodies = BodyBudget::new(1024 * KIB, 700 * KIB);
        let double = Arc::new(Double { body_bytes_max: 700 * KIB, bodies, ..double() });
        let mut lease = double.bodies.lease();
        lease.cover(others).expect("free");
        let mut talk = Conversation::new(double.clone());
        talk.take(step(post())).await;
        let (mut received, mut last) = (0, Replies::default());
        while received < 600 * KIB && !last.is_over {
            last = talk.take(step(Step::RequestBody(part(&"x".repeat(50 * KIB), false)))).await;
            received += 50 * KIB;
            if !last.is_over {
                let (held, buffer) = (double.bodies.bytes_held() - lease.bytes(), talk.buffer_bytes());
                assert!((received..=2 * received).contains(&buffer), "{received} bytes in {buffer}");
                assert!(held >= buffer, "{held} charged for {buffer}");
            }
        }
        assert_eq!(last.is_over, !passes, "{received} bytes beside {others}");
        if !passes {
            let said = short(&last);
            assert!(said[0].starts_with("503 ") && said[0].contains("overloaded"), "{said:?}");
            assert_eq!(told(&double).last().map(String::as_str), Some("count  refused memory"));
            assert_eq!(double.bodies.bytes_held(), lease.bytes());
            continue;
        }
        let replies = talk.take(step(Step::RequestBody(part("y", true)))).await;
        assert!(short(&replies)[0].contains(PICKED));
        let told = told(&double);
        assert!(told[0].contains(&format!("{}y", "x".repeat(50 * KIB))), "the whole body");
    }
}

#[tokio::test]
async fn the_proxy_may_offer_a_subset() {
    let list = |texts: &[&str]| {
        let text = |text: &&str| Value { kind: Some(ValueKind::Text((*text).to_owned())) };
        ValueKind::List(ListValue { values: texts.iter().map(text).collect() })
    };
    for (value, expected) in [
        (Some(list(&[FIRST, "no address", SECOND])), "Some([10.0.0.7:8000, 10.0.0.8:8000])"),
        (Some(ValueKind::Text(format!("{FIRST}, {SECOND}"))), "Some([10.0.0.7:8000, 10.0.0.8:8000])"),
        (Some(list(&[])), "Some([])"),
        (None, "Some([])"),
    ] {
        let double = Arc::new(double());
        let mut talk = Conversation::new(double.clone());
        let subset = Struct { fields: [(SUBSET.to_owned(), Value { kind: value })].into() };
        let metadata = Metadata { filter_metadata: [(SUBSET_NAMESPACE.to_owned(), subset)].into() };
        let get = head(&[(":method", "GET"), (":path", "/v1/models")], true);
        let message = ProcessingRequest { metadata_context: Some(metadata), ..step(Step::RequestHeaders(get)) };
        assert_eq!(short(&talk.take(message).await), [format!("request head {PICKED} {METADATA}")]);
        assert_eq!(told(&double)[0], format!("GET /v1/models None {expected}"));
    }
}

#[tokio::test]
async fn a_client_that_leaves_and_odd_orders_end_well() {
    let double = Arc::new(double());
    let mut talk = Conversation::new(double.clone());
    talk.take(step(post())).await;
    talk.take(step(Step::RequestBody(part("{}", true)))).await;
    told(&double);
    drop(talk);
    assert_eq!(told(&double), ["dropped"]);
    let mut talk = Conversation::new(double.clone());
    for message in [
        Step::ResponseHeaders(head(&[], true)),
        Step::ResponseBody(part("x", true)),
        Step::ResponseTrailers(HttpTrailers {}),
        Step::RequestTrailers(HttpTrailers {}),
    ] {
        talk.take(step(message)).await;
    }
    talk.take(ProcessingRequest::default()).await;
    assert!(told(&double).is_empty(), "nothing was picked");
    talk.take(step(post())).await;
    assert!(talk.take(step(post())).await.is_over, "a second head");
    let mut talk = Conversation::new(double.clone());
    let headless = talk.take(step(Step::RequestBody(part("{}", true)))).await;
    assert!(
        short(&headless)[0].starts_with("500 ") && headless.is_over,
        "a proxy that holds it back would wait for ever"
    );
    let mut talk = Conversation::new(double.clone());
    let observed = ProcessingRequest { observability_mode: true, ..step(post()) };
    assert!(talk.take(observed).await.messages.is_empty() && !talk.awaits_body());
    let mut talk = Conversation::new(double.clone());
    let streamed = with_modes(post(), BodySendMode::Streamed, BodySendMode::None);
    assert!(short(&talk.take(streamed).await)[0].starts_with("500 "));
}

#[test]
fn messages_have_the_numbers_of_the_proto_files() {
    // request_headers = 2 { headers = 1 { headers = 1 { key = 1, raw_value = 3 } }, end_of_stream = 3 },
    // metadata_context = 8 { filter_metadata = 1 { key = 1, value = 2 { fields = 1 { key = 1, value = 2 {
    // list_value = 6 { values = 1 { string_value = 3 } } } } } } }, attributes = 9, protocol_config = 11
    let bytes: Vec<u8> = [
        &b"\x12\x13\x0a\x0f\x0a\x0d\x0a\x05:path\x1a\x04/abc\x18\x01"[..],
        &b"\x42\x14\x0a\x12\x0a\x02ns\x12\x0c\x0a\x0a\x0a\x01k\x12\x05\x32\x03\x0a\x01\x1a"[..],
    ]
    .concat();
    // The last value is cut: the bytes after it would be its text.
    assert!(ProcessingRequest::decode(&bytes[..]).is_err());
    let bytes: Vec<u8> = [
        &b"\x12\x13\x0a\x0f\x0a\x0d\x0a\x05:path\x1a\x04/abc\x18\x01"[..],
        &b"\x42\x17\x0a\x15\x0a\x02ns\x12\x0f\x0a\x0d\x0a\x01k\x12\x08\x32\x06\x0a\x04\x1a\x02ip"[..],
        &b"\x4a\x03\x0a\x01a\x5a\x04\x08\x04\x10\x02"[..],
    ]
    .concat();
    let message = ProcessingRequest::decode(&bytes[..]).expect("a message");
    let Some(Step::RequestHeaders(head)) = &message.request else { panic!("a head: {message:?}") };
    assert_eq!(head.headers.as_ref().and_then(|all| all.get(b":path")), Some(&b"/abc"[..]));
    assert!(head.end_of_stream);
    assert_eq!(message.metadata_context.expect("metadata").texts("ns", "k"), Some(vec!["ip"]));
    let modes = message.protocol_config.expect("modes");
    assert_eq!(modes.request_body_mode(), BodySendMode::FullDuplexStreamed);
    assert_eq!(modes.response_body_mode(), BodySendMode::Buffered);
    // immediate_response = 7 { status = 1 { code = 1 }, body = 3, details = 5 }
    let answer = crate::messages::ImmediateResponse {
        status: Some(crate::messages::HttpStatus { code: 503 }),
        headers: None,
        body: Bytes::from_static(b"no"),
        details: "d".into(),
    };
    let reply = ProcessingResponse { response: Some(Reply::Immediate(answer)), dynamic_metadata: None };
    assert_eq!(reply.encode_to_vec(), b"\x3a\x0c\x0a\x03\x08\xf7\x03\x1a\x02no\x2a\x01d");
}

#[test]
fn heads_and_metadata_are_counted_apart_from_bodies() {
    let of = |request: Step| step(request).encode_to_vec();
    let head = of(post());
    assert_eq!(ProcessingRequest::bytes_besides_bodies(&head), head.len());
    let body = of(Step::RequestBody(part(&"x".repeat(1 << 20), true)));
    let answer = of(Step::ResponseBody(part("y", false)));
    let both = [body.as_slice(), &head, &answer].concat();
    assert_eq!(ProcessingRequest::bytes_besides_bodies(&body), 0);
    assert_eq!(ProcessingRequest::bytes_besides_bodies(&both), head.len());
    // A field that is cut, and bytes that are no field: decoding fails there, too.
    for bytes in [&both[..body.len() + 5], b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b""] {
        assert_eq!(ProcessingRequest::bytes_besides_bodies(bytes), 0);
        assert!(bytes.is_empty() || ProcessingRequest::decode(bytes).is_err());
    }
}
