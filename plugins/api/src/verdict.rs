//! What hooks may say.

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use penstock_dialects::{ChatEvent, FinishReason};

use crate::host::BoxFuture;

/// What becomes of a request.
#[derive(Debug)]
pub enum Verdict {
    /// It goes on, with whatever was edited.
    Pass,
    /// This is its answer; nobody else is asked.
    Answer(Answer),
    /// It is refused.
    Reject(Rejection),
}

/// An answer that a plugin gives.
#[derive(Debug)]
pub struct Answer {
    /// Complete: content, a `Finish` per choice, `Usage`. Or one [`ChatEvent::Raw`] with a whole answer in the client's dialect.
    pub events: Vec<ChatEvent>,
    /// Header fields that go out with it.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Decides status and type in the client's dialect.
    pub kind: RejectionKind,
    /// Another status than the kind's.
    pub status: Option<u16>,
    /// For the client.
    pub message: String,
    /// Instead of an error in the client's dialect: this body as it is.
    pub body: Option<Bytes>,
    /// Header fields that go out with it.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// For the log only; nothing of prompts or completions.
    pub log: Option<String>,
}

impl Rejection {
    /// A refusal of that kind.
    pub fn new(kind: RejectionKind, message: impl Into<String>) -> Self {
        Self { kind, status: None, message: message.into(), body: None, headers: Vec::new(), log: None }
    }

    /// Says why to the log.
    pub fn log(mut self, log: impl Into<String>) -> Self {
        self.log = Some(log.into());
        self
    }

    /// With another status.
    pub fn status(mut self, status: u16) -> Self {
        self.status = Some(status);
        self
    }
}

/// Kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectionKind {
    /// What is asked breaks a rule of content: 400, `content_policy_violation`.
    Content,
    /// The request is wrong: 400.
    Invalid,
    /// The caller may not do this: 403.
    Forbidden,
    /// Too much: 429.
    RateLimited,
    /// It cannot be done now: 503.
    Unavailable,
    /// A failure: 500.
    Internal,
}

/// What becomes of an answer.
pub enum Flow {
    /// What is left in the events goes on.
    Go,
    /// What is left in the events goes on; then nothing does until the future is done. Nobody takes more of the upstream meanwhile.
    Wait(BoxFuture<Result<After, PluginError>>),
    /// What is left in the events is the end: choices that have not finished do so for this reason, and the upstream is told to stop.
    Stop(FinishReason),
    /// The answer breaks behind what is left in the events: an error if nothing of it is out yet, an error event otherwise.
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

/// How an answer goes on after it was waited for.
#[derive(Debug)]
pub enum After {
    /// With these events.
    Go(Vec<ChatEvent>),
    /// With these events as its last ([`Flow::Stop`]).
    Stop(Vec<ChatEvent>, FinishReason),
    /// Not at all.
    Reject(Rejection),
}

/// A plugin that could not do its work. What becomes of the request then is said in the config (`on_fail`). The text is for the log, and
/// must hold nothing of prompts, completions or secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PluginError(pub String);

impl PluginError {
    /// With that text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl From<crate::host::HostError> for PluginError {
    fn from(error: crate::host::HostError) -> Self {
        Self(error.to_string())
    }
}
