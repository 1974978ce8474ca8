//! Mapping from kinds of failure to status codes and bodies: the one place where that is decided.
//!
//! A [`Failure`] is returned by any stage of the request path. The client's part (`message`, `param`, `code`) and the
//! log's (`log`) are separate fields; no decision looks into a message.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use penstock_proto::{ErrorKind, Retry};
use penstock_types::error::ApiErrorKind;
use penstock_types::error_shape::{self, ErrorShape};
use penstock_types::{ApiError, Dialect, FaultClass, ProviderFault, error_body};

/// Longest Retry-After sent: the official SDKs stop retrying above 120 s.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(120);

/// Methods that a URL takes, for the `Allow` header of a 405.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Methods {
    /// Read only: `GET`, and with it `HEAD`.
    Get,
    /// Written only: the URL takes `POST`.
    Post,
    /// Read and written: the URL takes `GET`, `HEAD` and `POST`.
    GetPost,
    /// Read and removed: the URL takes `GET`, `HEAD` and `DELETE`.
    GetDelete,
    /// Read, written and removed: the URL takes `GET`, `HEAD`, `POST` and `DELETE`.
    GetPostDelete,
}

impl Methods {
    /// Value of the `Allow` header: method names separated by commas.
    pub fn header(self) -> &'static str {
        match self {
            Methods::Get => "GET, HEAD",
            Methods::Post => "POST",
            Methods::GetPost => "GET, HEAD, POST",
            Methods::GetDelete => "GET, HEAD, DELETE",
            Methods::GetPostDelete => "GET, HEAD, POST, DELETE",
        }
    }
}

/// Error of a request at any stage of its path: the client's part and the log's part, kept apart.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Kind of the failure: decides status, type, code and whether a retry helps.
    pub kind: ErrorKind,
    /// Text of the error for the client, in the body of the answer.
    pub message: Box<str>,
    /// Path of the request parameter at fault, as `messages[2].role`; `None`: no single one.
    pub param: Option<Box<str>>,
    /// Delay after which a retry can help, for `Retry-After`; `None`: no header.
    pub retry_after: Option<Duration>,
    /// Detail for the log only; never prompts or keys.
    pub log: Option<Box<str>>,
    /// Status, type and code, where they are not those of the kind.
    pub shape: Option<Box<ErrorShape>>,
    /// Methods that the URL takes, for the `Allow` header of a 405 (RFC 9110, section 10.2.1).
    pub allow: Option<Methods>,
    /// Answer of the upstream, if the failure is the upstream's own.
    pub upstream: Option<Box<UpstreamAnswer>>,
    /// Limit that refused the request; `None`: no limit did.
    pub refusal: Option<Box<LimitRefusal>>,
    /// True where an upstream's answer found no memory in this gateway ([`Failure::unheld`]).
    pub unheld: bool,
}

/// Refusal of a request by one of the config's limits, as the client and the log see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitRefusal {
    /// Id of the limit and name of its measure.
    pub rule: String,
    /// True if a retry soon can help, so that the SDKs try again by themselves.
    pub retry: bool,
    /// Header fields of the response with the limit's standing.
    pub fields: Vec<(HeaderName, HeaderValue)>,
}

/// Error answer of an upstream, or the fault that took its place.
#[derive(Clone, Debug)]
pub struct UpstreamAnswer {
    /// Class of the upstream's fault, which decides about fallback and the breaker.
    pub class: FaultClass,
    /// Status of the answer; 0 where there was none.
    pub status: u16,
    /// Body of the answer, if it is in the client's dialect: passed on as it is.
    pub body: Option<Bytes>,
    /// Header fields of the answer that the client gets.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// True where the failure comes from a plugin of this gateway.
    pub plugin: bool,
    /// True where the request was sent; a failure before that says nothing of the upstream's health.
    pub sent: bool,
}

impl UpstreamAnswer {
    /// A failure of `class` without an answer: no status, no body.
    pub fn new(class: FaultClass) -> Self {
        Self { class, status: 0, body: None, headers: Vec::new(), plugin: false, sent: true }
    }
}

impl Failure {
    /// A failure of `kind` with a message for the client.
    pub fn new(kind: ErrorKind, message: impl Into<Box<str>>) -> Self {
        let message = message.into();
        Self {
            kind,
            message,
            param: None,
            retry_after: None,
            log: None,
            shape: None,
            allow: None,
            upstream: None,
            refusal: None,
            unheld: false,
        }
    }

    /// Sets the detail that only the log gets.
    pub fn log(mut self, log: impl Into<Box<str>>) -> Self {
        self.log = Some(log.into());
        self
    }

    /// Sets the delay before a retry, at most 120 s.
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after.min(RETRY_AFTER_MAX));
        self
    }

    /// Sets the path of the request parameter at fault.
    pub fn param(mut self, param: impl Into<Box<str>>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// Sets the HTTP status; type and code stay those of the kind.
    pub fn with_status(mut self, status: u16) -> Self {
        self.shape = Some(Box::new(ErrorShape { status, ..shape(self.kind) }));
        self
    }

    /// Sets the methods that the URL takes.
    pub fn allow(mut self, methods: Methods) -> Self {
        self.allow = Some(methods);
        self
    }

    /// Marks the failure as one of an answer that an upstream has made, at least in part, and for which this gateway has no
    /// memory: a retry is not advised.
    pub fn unheld(mut self) -> Self {
        if !std::mem::replace(&mut self.unheld, true) {
            self.message = format!("{} The answer was already made: a retry may be billed again.", self.message).into();
        }
        self.retry_after = None;
        self
    }

    /// Returns true if an upstream has made the answer and only this gateway could not hold it: for lack of memory, or because
    /// of its size. The upstream may bill it, and would bill it again.
    pub fn is_unheld(&self) -> bool {
        self.unheld || self.upstream.as_ref().is_some_and(|upstream| upstream.class == FaultClass::AnswerTooLarge)
    }

    /// A bug of the gateway; the client learns no more than that.
    pub fn internal(log: impl Into<Box<str>>) -> Self {
        Self::new(ErrorKind::Internal, "The server had an internal error.").log(log)
    }

    /// A request or an answer that breaks a rule of content.
    pub fn content(message: impl Into<Box<str>>) -> Self {
        let (kind, shape) = provider_shape(FaultClass::ContentPolicy);
        Self { shape: Some(Box::new(shape)), ..Self::new(kind, message) }
    }

    /// A provider's fault, or a defect of its answer, as the client is told of it.
    pub fn provider(fault: ProviderFault) -> Self {
        let (kind, shape) = provider_shape(fault.class);
        let upstream = Some(Box::new(UpstreamAnswer::new(fault.class)));
        let log = fault.code.map(|code| format!("{:?} ({code})", fault.class));
        let log = Some(log.unwrap_or_else(|| format!("{:?}", fault.class)).into());
        Self { shape: Some(Box::new(shape)), upstream, log, ..Self::new(kind, fault.message) }
    }

    /// Status, type and code of the error body, by the kind unless set apart.
    pub fn shape(&self) -> ErrorShape {
        self.shape.as_deref().copied().unwrap_or_else(|| shape(self.kind))
    }

    /// HTTP status of the response: 4xx or 5xx.
    pub fn status(&self) -> u16 {
        self.shape().status
    }

    /// Value of `Retry-After` in whole seconds, 1 to 120.
    pub fn retry_after_seconds(&self) -> Option<u64> {
        self.retry_after.map(|after| after.as_millis().div_ceil(1000).clamp(1, 120) as u64)
    }

    /// Value of `x-should-retry`, which the official SDKs prefer to their own rule: false too where the answer was made, since
    /// each repetition may be billed.
    pub fn should_retry(&self) -> bool {
        self.refusal.as_ref().map_or(self.kind.retry() != Retry::No && !self.is_unheld(), |refusal| refusal.retry)
    }

    /// Side that caused the failure, `upstream` or `gateway`: value of `x-penstock-error-source`.
    pub fn source(&self) -> &'static str {
        if self.upstream.as_ref().is_some_and(|upstream| !upstream.plugin) { "upstream" } else { "gateway" }
    }

    /// Error body in the client's dialect.
    pub fn body(&self, dialect: Dialect, request_id: &str) -> Bytes {
        if let Some(body) = self.upstream.as_ref().and_then(|upstream| upstream.body.clone()) {
            return body;
        }
        error_body::error_body(dialect, self.shape(), self.param.as_deref(), &self.message, request_id).into()
    }
}

/// Status, type and code of a kind, as OpenAI's clients know them.
fn shape(kind: ErrorKind) -> ErrorShape {
    use ErrorKind::*;
    match kind {
        InvalidRequest | Malformed => error_shape::INVALID,
        Unsupported => error_shape::UNSUPPORTED_PARAMETER,
        ContextLength => error_shape::CONTEXT_LENGTH,
        Unauthorized => error_shape::INVALID_API_KEY,
        Forbidden => error_shape::FORBIDDEN,
        ModelNotFound => error_shape::MODEL_NOT_FOUND,
        NotFound => error_shape::NOT_FOUND,
        MethodNotAllowed => error_shape::METHOD_NOT_ALLOWED,
        ClientTimeout => error_shape::REQUEST_TIMEOUT,
        TooLarge => error_shape::BODY_TOO_LARGE,
        UnsupportedMedia => error_shape::UNSUPPORTED_MEDIA_TYPE,
        RateLimited => error_shape::RATE_LIMIT_REQUESTS,
        Internal => error_shape::INTERNAL,
        WorkerFailed => ErrorShape { code: Some("worker_failed"), ..error_shape::UPSTREAM },
        ModelFailed => ErrorShape { code: Some("model_failed"), ..error_shape::INTERNAL },
        ProviderFailed => error_shape::UPSTREAM,
        Overloaded => error_shape::OVERLOADED,
        Unavailable => ErrorShape { code: Some("no_worker_ready"), ..error_shape::UNAVAILABLE },
        Draining => error_shape::DRAINING,
        DeadlineExceeded => error_shape::TIMEOUT,
        Cancelled => error_shape::CANCELLED,
    }
}

/// Kind and shape of a provider's fault as the client sees it. A provider that refuses the gateway's key is no 401: the
/// client's own key is not at fault.
fn provider_shape(class: FaultClass) -> (ErrorKind, ErrorShape) {
    use ErrorKind::*;
    let failed = |code: &'static str| (ProviderFailed, ErrorShape { code: Some(code), ..error_shape::UPSTREAM });
    match class {
        FaultClass::Invalid => (InvalidRequest, error_shape::INVALID),
        FaultClass::ContextLength => (ContextLength, error_shape::CONTEXT_LENGTH),
        FaultClass::ContentPolicy => {
            (InvalidRequest, ErrorShape { code: Some("content_policy_violation"), ..error_shape::INVALID })
        }
        FaultClass::TooLarge => (TooLarge, error_shape::BODY_TOO_LARGE),
        FaultClass::Unauthorized | FaultClass::Forbidden => failed("upstream_auth"),
        FaultClass::NotFound => (ModelNotFound, error_shape::MODEL_NOT_FOUND),
        FaultClass::RateLimited => (RateLimited, error_shape::RATE_LIMIT_REQUESTS),
        FaultClass::Quota => (RateLimited, error_shape::QUOTA),
        FaultClass::Overloaded => (Overloaded, error_shape::OVERLOADED),
        FaultClass::Server => failed("upstream_error"),
        FaultClass::Timeout => {
            (DeadlineExceeded, ErrorShape { code: Some("upstream_timeout"), ..error_shape::TIMEOUT })
        }
        FaultClass::Truncated => failed("upstream_truncated"),
        FaultClass::Garbled | FaultClass::AnswerTooLarge => failed("upstream_garbled"),
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        let kind = match error.kind {
            ApiErrorKind::Invalid | ApiErrorKind::TooLarge => ErrorKind::InvalidRequest,
            ApiErrorKind::ContextLength => ErrorKind::ContextLength,
            ApiErrorKind::Unsupported | ApiErrorKind::UnsupportedValue => ErrorKind::Unsupported,
        };
        let shape = Some(Box::new(error_shape::error_shape(error.kind)));
        Self { param: error.param.map(Into::into), shape, ..Self::new(kind, error.message) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_has_the_four_keys_of_openai() {
        let failure = Failure::new(ErrorKind::ModelNotFound, "no \"x\"").param("model");
        assert_eq!(failure.status(), 404);
        assert_eq!(
            String::from_utf8_lossy(&failure.body(Dialect::OpenAi, "req_1")),
            r#"{"error":{"message":"no \"x\"","type":"invalid_request_error","param":"model","code":"model_not_found"}}"#
        );
    }

    #[test]
    fn retry_hints_stay_within_what_sdks_obey() {
        let failure = Failure::new(ErrorKind::Overloaded, "full").retry_after(Duration::from_secs(900));
        assert_eq!((failure.retry_after_seconds(), failure.should_retry()), (Some(120), true));
        let failure = Failure::new(ErrorKind::Overloaded, "full").retry_after(Duration::from_millis(20));
        assert_eq!(failure.retry_after_seconds(), Some(1));
        assert!(!Failure::internal("bug").should_retry());
    }

    #[test]
    fn internal_faults_tell_the_client_nothing() {
        let body = Failure::internal("index 7 of secret").body(Dialect::OpenAi, "req_1");
        assert!(!String::from_utf8_lossy(&body).contains("secret"));
    }
}
