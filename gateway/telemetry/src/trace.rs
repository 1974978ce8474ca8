//! Trace of one request: spans from the client through every attempt at a provider or a worker.
//!
//! A request that is not sampled forwards its trace context and records nothing; without a collector in the config
//! there is no context at all. Spans stay with their request until it ends and are exported together, so that requests
//! share nothing meanwhile. The header format is W3C Trace Context, level 1.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue};

/// Most child spans of one request; further ones are dropped.
const SPANS_MAX: usize = 64;
/// Longest `tracestate` in bytes that is forwarded: the least that the standard requires.
const STATE_BYTES_MAX: usize = 512;

const PARENT: HeaderName = HeaderName::from_static("traceparent");
const STATE: HeaderName = HeaderName::from_static("tracestate");

/// Id of a span: 8 bytes, not all zero.
pub type SpanId = [u8; 8];

/// Position in a trace: the trace, the span, and the sampling decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// Trace id of 16 bytes, common to all spans of a request.
    pub trace: [u8; 16],
    /// Id of the span that this context stands for.
    pub span: SpanId,
    /// True if the trace is sampled: recorded and exported.
    pub sampled: bool,
}

impl TraceContext {
    /// Parses `traceparent`; an invalid value counts as absent.
    pub fn parse(header: &[u8]) -> Option<Self> {
        let (version, rest) = (header.get(..2)?, header.get(2..)?);
        let well_formed = rest.len() >= 53 && rest[0] == b'-' && rest[33] == b'-' && rest[50] == b'-';
        // Versions above 00 may append fields; version ff is invalid.
        if !well_formed || version == b"ff" || (version == b"00" && rest.len() != 53) {
            return None;
        }
        let _version: [u8; 1] = unhex(version)?;
        if rest.len() > 53 && rest[53] != b'-' {
            return None;
        }
        let (trace, span): ([u8; 16], SpanId) = (unhex(&rest[1..33])?, unhex(&rest[34..50])?);
        let [flags] = unhex::<1>(&rest[51..53])?;
        (trace != [0; 16] && span != [0; 8]).then_some(Self { trace, span, sampled: flags & 1 == 1 })
    }

    /// Renders the context as a `traceparent` header of version 00.
    pub fn header(&self) -> String {
        let mut out = String::with_capacity(55);
        out.push_str("00-");
        hex(&self.trace, &mut out);
        out.push('-');
        hex(&self.span, &mut out);
        out.push_str(if self.sampled { "-01" } else { "-00" });
        out
    }
}

/// Role of a span in OpenTelemetry's terms (`SpanKind`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Handling of a client's request, the root of a request's spans.
    Server,
    /// Request to another service: a provider or a worker.
    Client,
    /// Work inside the gateway, without a call to another service.
    Internal,
}

/// Value of a span attribute, of the types that OTLP knows.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Text value, owned or static.
    Text(Cow<'static, str>),
    /// Whole number; a larger `u64` is cut to `i64::MAX`.
    Int(i64),
    /// Floating-point value, such as a duration or a share.
    Float(f64),
    /// Boolean value, `true` or `false`.
    Bool(bool),
    /// List of static texts, such as finish reasons.
    Texts(Vec<&'static str>),
}

impl From<&'static str> for Value {
    fn from(text: &'static str) -> Self {
        Value::Text(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Value::Text(text.into())
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Value::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Value::Float(number)
    }
}

/// Attributes of a span: names with their values, in the order in which they were set.
pub type Attributes = Vec<(&'static str, Value)>;

/// Finished span, ready for export. Times are since the Unix epoch.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Name of the operation that the span covers, as trace viewers list it.
    pub name: String,
    /// Trace and id of the span.
    pub context: TraceContext,
    /// Parent span; of the request's own span, the client's.
    pub parent: Option<SpanId>,
    /// True if the parent belongs to another program.
    pub remote_parent: bool,
    /// Role of the span: server, client or internal.
    pub kind: Kind,
    /// Start of the span, as the time since the Unix epoch.
    pub start: Duration,
    /// End of the span, as the time since the Unix epoch.
    pub end: Duration,
    /// Attributes that the span carries to the collector.
    pub attributes: Attributes,
    /// Reason why the span's work failed; `None`: it did not.
    pub error: Option<String>,
}

/// Trace of one request while it runs, with the child spans that have finished.
#[derive(Debug)]
pub struct Trace {
    context: TraceContext,
    parent: Option<SpanId>,
    state: Option<HeaderValue>,
    /// Begin on the monotonic and on the wall clock: durations are measured on the monotonic one, which does not jump.
    began: (Instant, Duration),
    spans: Mutex<Vec<Span>>,
}

impl Trace {
    /// Continues the client's trace, or begins a new one. The client's flag decides about sampling; without a valid
    /// `traceparent`, the trace is sampled if `draw` (from 0 to 1) is below `ratio`. `ids` are the new trace and span
    /// id.
    pub fn begin(
        client: &HeaderMap,
        ratio: f64,
        draw: f64,
        ids: ([u8; 16], SpanId),
        began: (Instant, Duration),
    ) -> Self {
        let mut fields = client.get_all(PARENT).iter();
        let given = match (fields.next(), fields.next()) {
            (Some(field), None) => TraceContext::parse(field.as_bytes()),
            _ => None,
        };
        let state = given.and_then(|_| client.get(STATE)).filter(|state| state.len() <= STATE_BYTES_MAX).cloned();
        let (trace, sampled) = given.map_or((ids.0, draw < ratio), |given| (given.trace, given.sampled));
        Self {
            context: TraceContext { trace, span: ids.1, sampled },
            parent: given.map(|given| given.span),
            state,
            began,
            spans: Mutex::default(),
        }
    }

    /// Context of the request's own span.
    pub fn context(&self) -> TraceContext {
        self.context
    }

    /// Returns true if spans of this request are recorded and exported.
    pub fn is_sampled(&self) -> bool {
        self.context.sampled
    }

    fn at(&self, moment: Instant) -> Duration {
        self.began.1 + moment.saturating_duration_since(self.began.0)
    }

    /// Begins a child span of the request's span.
    pub fn child(self: &Arc<Self>, name: String, kind: Kind) -> OpenSpan {
        let context = TraceContext { span: random(), ..self.context };
        OpenSpan {
            trace: self.clone(),
            context,
            name,
            kind,
            start: Instant::now(),
            attributes: Vec::new(),
            error: None,
        }
    }

    /// Ends the trace and returns its spans, the request's own first. `None`: the trace is not sampled.
    pub fn end(&self, name: String, attributes: Attributes, error: Option<String>) -> Option<Vec<Span>> {
        if !self.is_sampled() {
            return None;
        }
        let root = Span {
            name,
            context: self.context,
            parent: self.parent,
            remote_parent: true,
            kind: Kind::Server,
            start: self.began.1,
            end: self.at(Instant::now()),
            attributes,
            error,
        };
        let below = std::mem::take(&mut *self.spans.lock().unwrap_or_else(PoisonError::into_inner));
        Some(std::iter::once(root).chain(below).collect())
    }
}

/// Child span that has not ended; dropping it ends it.
#[derive(Debug)]
pub struct OpenSpan {
    trace: Arc<Trace>,
    context: TraceContext,
    name: String,
    kind: Kind,
    start: Instant,
    attributes: Attributes,
    error: Option<String>,
}

impl OpenSpan {
    /// Header fields that continue the trace at the called service.
    pub fn fields(&self) -> impl Iterator<Item = (HeaderName, HeaderValue)> + '_ {
        let parent = HeaderValue::from_str(&self.context.header()).ok();
        let state = self.trace.state.clone().map(|state| (STATE, state));
        parent.map(|parent| (PARENT, parent)).into_iter().chain(state)
    }

    /// Adds an attribute to the span; without effect if the trace is not sampled.
    pub fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        if self.context.sampled {
            self.attributes.push((name, value.into()));
        }
    }

    /// Marks the span as failed, with `why` as its error text.
    pub fn fail(&mut self, why: impl Into<String>) {
        self.error = Some(why.into());
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        if !self.context.sampled {
            return;
        }
        let mut spans = self.trace.spans.lock().unwrap_or_else(PoisonError::into_inner);
        if spans.len() >= SPANS_MAX {
            return;
        }
        spans.push(Span {
            name: std::mem::take(&mut self.name),
            context: self.context,
            parent: Some(self.trace.context.span),
            remote_parent: false,
            kind: self.kind,
            start: self.trace.at(self.start),
            end: self.trace.at(Instant::now()),
            attributes: std::mem::take(&mut self.attributes),
            error: self.error.take(),
        });
    }
}

/// Random bytes, never all zero; used for trace and span ids.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Without randomness ids repeat: that spoils traces and nothing else.
    if getrandom::fill(&mut bytes).is_err() || bytes == [0; N] {
        bytes[N - 1] = 1;
    }
    bytes
}

fn hex(bytes: &[u8], out: &mut String) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for byte in bytes {
        out.push(DIGITS[usize::from(byte >> 4)] as char);
        out.push(DIGITS[usize::from(byte & 15)] as char);
    }
}

/// Decodes lower-case hex; the standard allows no other.
fn unhex<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut out = [0; N];
    if text.len() != 2 * N {
        return None;
    }
    for (byte, pair) in out.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIVEN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn begun(fields: &[(HeaderName, &'static str)], ratio: f64) -> Arc<Trace> {
        let mut client = HeaderMap::new();
        for (name, value) in fields {
            client.append(name, HeaderValue::from_static(value));
        }
        let began = (Instant::now(), Duration::from_secs(1000));
        Arc::new(Trace::begin(&client, ratio, 0.5, ([7; 16], [9; 8]), began))
    }

    #[test]
    fn a_client_that_traces_is_followed() {
        let trace = begun(&[(PARENT, GIVEN), (STATE, "a=b")], 0.0);
        assert!(trace.is_sampled(), "the client says so");
        let child = trace.child("call".into(), Kind::Client);
        let fields: Vec<_> = child.fields().collect();
        let said = TraceContext::parse(fields[0].1.as_bytes()).expect("valid");
        assert_eq!((said.trace, said.sampled), (trace.context().trace, true));
        assert_eq!((said.span, fields[1].1.as_bytes()), (child.context.span, &b"a=b"[..]));
        drop(child);
        let spans = trace.end("root".into(), Vec::new(), None).expect("sampled");
        assert_eq!(spans[0].parent.map(|id| id[0]), Some(0xb7));
        assert_eq!(spans[1].parent, Some(spans[0].context.span));
        assert!(spans[0].start >= Duration::from_secs(1000) && spans[1].end <= spans[0].end);
    }

    #[test]
    fn without_a_client_that_traces_the_ratio_decides() {
        assert!(begun(&[], 1.0).is_sampled() && !begun(&[], 0.25).is_sampled());
        let quiet = begun(&[(PARENT, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")], 1.0);
        assert!(!quiet.is_sampled(), "the client says so");
        drop(quiet.child("call".into(), Kind::Client));
        assert!(quiet.end("root".into(), Vec::new(), None).is_none() && quiet.spans.lock().expect("free").is_empty());
        let twice = begun(&[(PARENT, GIVEN), (PARENT, GIVEN)], 1.0);
        assert_eq!(twice.context().trace, [7; 16], "two are none");
    }

    #[test]
    fn only_valid_parents_count() {
        assert_eq!(TraceContext::parse(GIVEN.as_bytes()).expect("valid").header(), GIVEN);
        for bad in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01.more",
            "00-0af7651916cd43dd8448eb211c80319cb-7ad6b7169203331-01",
        ] {
            assert_eq!(TraceContext::parse(bad.as_bytes()), None, "{bad}");
        }
        assert!(TraceContext::parse(b"cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more").is_some());
    }

    proptest! {
        #[test]
        fn any_header_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = TraceContext::parse(&bytes);
        }

        #[test]
        fn what_is_said_is_read(trace in any::<[u8; 16]>(), span in any::<SpanId>(), sampled in any::<bool>()) {
            prop_assume!(trace != [0; 16] && span != [0; 8]);
            let context = TraceContext { trace, span, sampled };
            prop_assert_eq!(TraceContext::parse(context.header().as_bytes()), Some(context));
        }
    }
}
