//! Verdicts and flows that hooks return.

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use penstock_types::{ChatEvent, FinishReason};

use crate::host::{BoxFuture, HostError, Limited};

/// Verdict of a plugin on a request, before any model is asked.
#[derive(Debug)]
pub enum Verdict {
    /// The request goes on, with the edits that the plugin has made.
    Pass,
    /// The plugin answers the request; no model is asked.
    Answer(Answer),
    /// The request is refused with this error.
    Reject(Rejection),
}

/// Answer that a plugin gives in place of a model.
#[derive(Debug)]
pub struct Answer {
    /// Events of the whole answer: content, a `Finish` per choice, `Usage`. Or one [`ChatEvent::Raw`] with a whole
    /// answer in the client's dialect.
    pub events: Vec<ChatEvent>,
    /// Header fields that go out with the answer.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

/// Refusal of a request, with the error that the client gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Kind, which decides status and type in the client's dialect.
    pub kind: RejectionKind,
    /// HTTP status in place of the one of the kind; `None`: that of the kind.
    pub status: Option<u16>,
    /// Message that the client reads.
    pub message: String,
    /// Body in place of an error in the client's dialect, sent as it is.
    pub body: Option<Bytes>,
    /// Header fields that go out with the refusal.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Detail for the log only; nothing of prompts or completions.
    pub log: Option<String>,
}

impl Rejection {
    /// Refusal of `kind` with a message for the client.
    pub fn new(kind: RejectionKind, message: impl Into<String>) -> Self {
        Self { kind, status: None, message: message.into(), body: None, headers: Vec::new(), log: None }
    }

    /// Sets the detail for the log.
    pub fn log(mut self, log: impl Into<String>) -> Self {
        self.log = Some(log.into());
        self
    }

    /// Sets another status than the kind's.
    pub fn status(mut self, status: u16) -> Self {
        self.status = Some(status);
        self
    }
}

/// Kinds of refusal, each with an HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectionKind {
    /// The request breaks a rule of content: 400, `content_policy_violation`.
    Content,
    /// The request breaks a rule of the API: 400.
    Invalid,
    /// The caller may not do this: 403.
    Forbidden,
    /// The caller sends too much: 429.
    RateLimited,
    /// The request cannot be served now: 503.
    Unavailable,
    /// The plugin or its service failed: 500.
    Internal,
}

/// Course of an answer after a plugin's hook has seen a part of it.
pub enum Flow {
    /// The events that are left go on.
    Go,
    /// The events that are left go on; then nothing does until the future is ready. The upstream is not polled
    /// meanwhile.
    Wait(BoxFuture<Result<After, PluginError>>),
    /// The events that are left are the end: choices that have not finished do so for this reason, and the upstream is
    /// told to stop.
    Stop(FinishReason),
    /// The answer breaks behind the events that are left: with an error if nothing of it is out yet, with an error
    /// event otherwise.
    Reject(Rejection),
}

impl std::fmt::Debug for Flow {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Flow::Go => out.write_str("Go"),
            Flow::Wait(_) => out.write_str("Wait"),
            Flow::Stop(reason) => write!(out, "Stop({reason:?})"),
            Flow::Reject(rejection) => write!(out, "Reject({rejection:?})"),
        }
    }
}

/// Course of an answer after a wait that a plugin asked for ([`Flow::Wait`]).
#[derive(Debug)]
pub enum After {
    /// The answer goes on, first with the events given here.
    Go(Vec<ChatEvent>),
    /// The answer ends with these events ([`Flow::Stop`]).
    Stop(Vec<ChatEvent>, FinishReason),
    /// The answer breaks with this error.
    Reject(Rejection),
}

/// Failure of a plugin. The config's `on_fail` decides about the request. The text is for the log, and must hold
/// nothing of prompts, completions or secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct PluginError {
    /// Text for the log.
    pub text: String,
    /// Limit that refused what the plugin asked of a model, and so refuses the request; `None`: no limit did.
    pub limited: Option<Box<Limited>>,
}

impl PluginError {
    /// Failure with that text for the log.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), limited: None }
    }
}

impl From<HostError> for PluginError {
    fn from(error: HostError) -> Self {
        let text = error.to_string();
        let limited = if let HostError::Limited(limited) = error { Some(limited) } else { None };
        Self { text, limited }
    }
}
