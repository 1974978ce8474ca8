//! Messages of the protocols that the service speaks, as far as it reads and writes them.
//!
//! - Envoy's external processing, `envoy/service/ext_proc/v3/external_processor.proto` and what that imports
//! - gRPC health checks, `grpc/health/v1/health.proto`
//!
//! Field numbers are those of the files; fields that are not here are passed over.

use std::collections::HashMap;

use bytes::Bytes;
use prost::encoding::{DecodeContext, decode_key, skip_field};
use prost::{Enumeration, Message, Oneof};

/// Message from the proxy: one step of a request or of its answer.
#[derive(Clone, PartialEq, Message)]
pub struct ProcessingRequest {
    /// Step that the message is about.
    #[prost(oneof = "Step", tags = "2, 3, 4, 5, 6, 7")]
    pub request: Option<Step>,
    /// Metadata of the request in the proxy, by namespace.
    #[prost(message, optional, tag = "8")]
    pub metadata_context: Option<Metadata>,
    /// True if the proxy does not wait for replies and ignores them.
    #[prost(bool, tag = "10")]
    pub observability_mode: bool,
    /// Modes of the filter; only in the first message of a stream.
    #[prost(message, optional, tag = "11")]
    pub protocol_config: Option<ProtocolConfiguration>,
}

/// Step of a request or of its answer.
#[derive(Clone, PartialEq, Oneof)]
pub enum Step {
    /// Head of the request.
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    /// Head of the answer.
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    /// Part of the request's body, or all of it.
    #[prost(message, tag = "4")]
    RequestBody(HttpBody),
    /// Part of the answer's body, or all of it.
    #[prost(message, tag = "5")]
    ResponseBody(HttpBody),
    /// Trailers of the request.
    #[prost(message, tag = "6")]
    RequestTrailers(HttpTrailers),
    /// Trailers of the answer.
    #[prost(message, tag = "7")]
    ResponseTrailers(HttpTrailers),
}

/// Modes in which the proxy sends bodies.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct ProtocolConfiguration {
    /// Mode of the request's body.
    #[prost(enumeration = "BodySendMode", tag = "1")]
    pub request_body_mode: i32,
    /// Mode of the answer's body.
    #[prost(enumeration = "BodySendMode", tag = "2")]
    pub response_body_mode: i32,
    /// True if bodies come before the head has been replied to.
    #[prost(bool, tag = "3")]
    pub send_body_without_waiting_for_header_response: bool,
}

/// Way in which a body is sent to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum BodySendMode {
    /// No part of the body.
    None = 0,
    /// Parts, each replied to before the next.
    Streamed = 1,
    /// Whole body in one message.
    Buffered = 2,
    /// Whole body up to a size, and no more of it.
    BufferedPartial = 3,
    /// Parts, replied to as the service likes: what the service sends back is the body.
    FullDuplexStreamed = 4,
    /// Messages of a gRPC stream, one by one.
    Grpc = 5,
}

/// Head of a request or an answer.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HttpHeaders {
    /// Header fields, pseudo-headers among them.
    #[prost(message, optional, tag = "1")]
    pub headers: Option<HeaderMap>,
    /// True if there is no body.
    #[prost(bool, tag = "3")]
    pub end_of_stream: bool,
}

/// Part of a body.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HttpBody {
    /// Bytes of the part.
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    /// True if the body ends with the part, and no trailers follow.
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

/// Trailers of a request or an answer, which are not read.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct HttpTrailers {}

/// Header fields in their order.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HeaderMap {
    /// Fields, pseudo-headers among them.
    #[prost(message, repeated, tag = "1")]
    pub headers: Vec<HeaderValue>,
}

/// Header field; its value is in one of two places.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HeaderValue {
    /// Name in lower case.
    #[prost(bytes = "bytes", tag = "1")]
    pub key: Bytes,
    /// Value as text; older proxies write it.
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
    /// Value as bytes.
    #[prost(bytes = "bytes", tag = "3")]
    pub raw_value: Bytes,
}

/// Metadata of a request, by namespace.
#[derive(Clone, PartialEq, Message)]
pub struct Metadata {
    /// Untyped values by the name of their namespace.
    #[prost(map = "string, message", tag = "1")]
    pub filter_metadata: HashMap<String, Struct>,
}

/// Object of `google/protobuf/struct.proto`.
#[derive(Clone, PartialEq, Message)]
pub struct Struct {
    /// Values by name.
    #[prost(map = "string, message", tag = "1")]
    pub fields: HashMap<String, Value>,
}

/// Value of `google/protobuf/struct.proto`.
#[derive(Clone, PartialEq, Message)]
pub struct Value {
    /// Kind of the value, with its content.
    #[prost(oneof = "ValueKind", tags = "3, 5, 6")]
    pub kind: Option<ValueKind>,
}

/// Kinds of values that are read.
#[derive(Clone, PartialEq, Oneof)]
pub enum ValueKind {
    /// Text.
    #[prost(string, tag = "3")]
    Text(String),
    /// Object.
    #[prost(message, tag = "5")]
    Object(Struct),
    /// List.
    #[prost(message, tag = "6")]
    List(ListValue),
}

/// List of `google/protobuf/struct.proto`.
#[derive(Clone, PartialEq, Message)]
pub struct ListValue {
    /// Values in their order.
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
}

/// Message to the proxy: what to do with the step that it has sent.
#[derive(Clone, PartialEq, Message)]
pub struct ProcessingResponse {
    /// Reply to the step.
    #[prost(oneof = "Reply", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub response: Option<Reply>,
    /// Metadata that the proxy's next filters see, by namespace.
    #[prost(message, optional, tag = "8")]
    pub dynamic_metadata: Option<Struct>,
}

/// Reply to one step.
#[derive(Clone, PartialEq, Oneof)]
pub enum Reply {
    /// Reply to the request's head.
    #[prost(message, tag = "1")]
    RequestHeaders(CommonReply),
    /// Reply to the answer's head.
    #[prost(message, tag = "2")]
    ResponseHeaders(CommonReply),
    /// Reply to a part of the request's body.
    #[prost(message, tag = "3")]
    RequestBody(CommonReply),
    /// Reply to a part of the answer's body.
    #[prost(message, tag = "4")]
    ResponseBody(CommonReply),
    /// Reply to the request's trailers.
    #[prost(message, tag = "5")]
    RequestTrailers(TrailersReply),
    /// Reply to the answer's trailers.
    #[prost(message, tag = "6")]
    ResponseTrailers(TrailersReply),
    /// Answer to the client in place of the endpoint's.
    #[prost(message, tag = "7")]
    Immediate(ImmediateResponse),
}

/// `HeadersResponse` and `BodyResponse`, which have one shape.
#[derive(Clone, PartialEq, Message)]
pub struct CommonReply {
    /// Changes of the step; `None`: it goes on as it is.
    #[prost(message, optional, tag = "1")]
    pub response: Option<CommonResponse>,
}

/// Changes of a head or a part of a body.
#[derive(Clone, PartialEq, Message)]
pub struct CommonResponse {
    /// Changes of header fields.
    #[prost(message, optional, tag = "2")]
    pub header_mutation: Option<HeaderMutation>,
    /// Bytes in place of the part.
    #[prost(message, optional, tag = "3")]
    pub body_mutation: Option<BodyMutation>,
    /// True if the route is to be chosen again, by the changed fields.
    #[prost(bool, tag = "5")]
    pub clear_route_cache: bool,
}

/// Reply to trailers, which stay as they are.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct TrailersReply {}

/// Changes of header fields.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HeaderMutation {
    /// Fields to set.
    #[prost(message, repeated, tag = "1")]
    pub set_headers: Vec<HeaderValueOption>,
}

/// Header field to set.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HeaderValueOption {
    /// Name and value.
    #[prost(message, optional, tag = "1")]
    pub header: Option<HeaderValue>,
    /// Meaning for a field that is there already; [`OVERWRITE`].
    #[prost(int32, tag = "3")]
    pub append_action: i32,
}

/// `OVERWRITE_IF_EXISTS_OR_ADD`: a value of the client's own is replaced.
pub const OVERWRITE: i32 = 2;

/// Bytes in place of a part of a body.
#[derive(Clone, PartialEq, Message)]
pub struct BodyMutation {
    /// Bytes, in the way that the mode asks for.
    #[prost(oneof = "Mutation", tags = "1, 3")]
    pub mutation: Option<Mutation>,
}

/// Ways to replace a part of a body.
#[derive(Clone, PartialEq, Oneof)]
pub enum Mutation {
    /// Whole body, in the mode `BUFFERED`.
    #[prost(bytes = "bytes", tag = "1")]
    Body(Bytes),
    /// Next part, in the mode `FULL_DUPLEX_STREAMED`.
    #[prost(message, tag = "3")]
    Streamed(StreamedBodyResponse),
}

/// Next part of a body in the mode `FULL_DUPLEX_STREAMED`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct StreamedBodyResponse {
    /// Bytes of the part.
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    /// True if the body ends with the part.
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

/// Answer to the client in place of the endpoint's.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ImmediateResponse {
    /// Status of the answer.
    #[prost(message, optional, tag = "1")]
    pub status: Option<HttpStatus>,
    /// Header fields of the answer.
    #[prost(message, optional, tag = "2")]
    pub headers: Option<HeaderMutation>,
    /// Body of the answer.
    #[prost(bytes = "bytes", tag = "3")]
    pub body: Bytes,
    /// Reason for the proxy's log, without spaces.
    #[prost(string, tag = "5")]
    pub details: String,
}

/// Status of an HTTP answer.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct HttpStatus {
    /// Status code, of the enumeration in `envoy/type/v3/http_status.proto`: the codes are its numbers.
    #[prost(int32, tag = "1")]
    pub code: i32,
}

/// Question of a health check.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HealthCheckRequest {
    /// Service that is asked about; empty: all of it.
    #[prost(string, tag = "1")]
    pub service: String,
}

/// Answer of a health check.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct HealthCheckResponse {
    /// Status of the service.
    #[prost(enumeration = "ServingStatus", tag = "1")]
    pub status: i32,
}

/// Status of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum ServingStatus {
    /// Status that was not told.
    Unknown = 0,
    /// Requests are taken.
    Serving = 1,
    /// Requests are not taken now.
    NotServing = 2,
    /// There is no such service; for `Watch` alone.
    ServiceUnknown = 3,
}

impl ProcessingRequest {
    /// Fields with a part of a body: `request_body`, `response_body`.
    const BODIES: [u32; 2] = [4, 5];

    /// Bytes of an encoded message without the parts of bodies. All other fields become many small values when they are
    /// decoded, and take up to fifty times their length. Of a message that cannot be read, the bytes up to the fault are
    /// counted.
    pub fn bytes_besides_bodies(mut message: &[u8]) -> usize {
        let mut besides = 0;
        while !message.is_empty() {
            let before = message.len();
            let Ok((tag, kind)) = decode_key(&mut message) else { break };
            let is_body = Self::BODIES.contains(&tag);
            if skip_field(kind, tag, &mut message, DecodeContext::default()).is_err() {
                break;
            }
            if !is_body {
                besides += before - message.len();
            }
        }
        besides
    }
}

impl HeaderMap {
    /// Value of the first field called `name`.
    pub fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.headers.iter().find(|field| field.key.eq_ignore_ascii_case(name)).map(HeaderValue::bytes)
    }
}

impl HeaderValue {
    /// Value, wherever it is.
    pub fn bytes(&self) -> &[u8] {
        if self.raw_value.is_empty() { &self.value } else { &self.raw_value }
    }
}

impl HeaderMutation {
    /// Sets these fields, in place of what the client has sent under their names.
    pub fn set(fields: impl IntoIterator<Item = (&'static str, Bytes)>) -> Self {
        let field = |(name, value): (&'static str, Bytes)| HeaderValueOption {
            header: Some(HeaderValue { key: name.into(), value: Bytes::new(), raw_value: value }),
            append_action: OVERWRITE,
        };
        Self { set_headers: fields.into_iter().map(field).collect() }
    }
}

impl Value {
    fn text(&self) -> Option<&str> {
        match &self.kind {
            Some(ValueKind::Text(text)) => Some(text),
            _ => None,
        }
    }
}

impl Struct {
    /// Object with one text in a namespace: `{ namespace: { name: text } }`.
    pub fn text(namespace: &str, name: &str, text: String) -> Self {
        let text = Value { kind: Some(ValueKind::Text(text)) };
        let inner = Self { fields: HashMap::from([(name.to_owned(), text)]) };
        let inner = Value { kind: Some(ValueKind::Object(inner)) };
        Self { fields: HashMap::from([(namespace.to_owned(), inner)]) }
    }
}

impl Metadata {
    /// Texts of `{ namespace: { name: TEXT or [TEXT, …] } }`; a text may hold several, separated by commas. `None`: no such
    /// value is there.
    pub fn texts(&self, namespace: &str, name: &str) -> Option<Vec<&str>> {
        let value = self.filter_metadata.get(namespace)?.fields.get(name)?;
        let texts: Vec<&str> = match value.kind.as_ref() {
            Some(ValueKind::List(list)) => list.values.iter().filter_map(Value::text).collect(),
            _ => value.text().into_iter().collect(),
        };
        Some(
            texts.into_iter().flat_map(|text| text.split(',')).map(str::trim).filter(|text| !text.is_empty()).collect(),
        )
    }
}
