//! What hooks are shown.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use penstock_dialects::{Decoded, Dialect, Request, Surface, Usage};

use crate::host::Host;
use crate::verdict::PluginError;

/// Facts of a request that do not change.
#[derive(Clone, Debug)]
pub struct RequestInfo {
    /// Its id.
    pub request_id: String,
    /// Bounded name of the URL: `/v1/chat/completions`.
    pub route: &'static str,
    /// What is asked.
    pub surface: Surface,
    /// A streamed answer is wanted.
    pub stream: bool,
    /// Model that the client asked for.
    pub model: String,
    /// Id of the API key; `None` where there are none.
    pub key: Option<String>,
    /// Team of the key.
    pub team: Option<String>,
    /// Person or service behind it.
    pub user: Option<String>,
    /// What separates this caller's data from the others'.
    pub tenant: String,
    /// Where it came from; `None`: a Unix socket, or nobody who is connected.
    pub client: Option<IpAddr>,
    /// Nobody waits for the answer: a batch, or a response in the background.
    pub background: bool,
}

impl RequestInfo {
    /// API that the client speaks.
    pub fn dialect(&self) -> Dialect {
        self.surface.dialect()
    }
}

/// A request before anything is decided about it.
///
/// Body and decoded request are two views of one thing: an edit of one makes the other anew before the next plugin looks at it.
pub struct RequestContext {
    /// What does not change.
    pub info: Arc<RequestInfo>,
    /// Model that will be asked. Another one is asked in its place; the client is answered under the name that it used.
    pub model: String,
    /// Header fields of the request without credentials. The few that an upstream of the same dialect gets are sent as they stand here.
    pub headers: HeaderMap,
    /// Header fields that providers are sent besides, whatever they speak; the last of a name counts.
    pub send: Vec<(HeaderName, HeaderValue)>,
    /// Names and values that go into the access log and the ledger.
    pub tags: Vec<(String, String)>,
    /// The process around.
    pub host: Arc<dyn Host>,
    /// `None`: the request was edited, and nobody has said it as bytes since.
    body: Option<Bytes>,
    body_changed: bool,
    /// What the body means; `None`: nobody has read it.
    decoded: Option<Arc<Decoded>>,
    /// What is asked instead of what the body means.
    request: Option<Request>,
}

impl RequestContext {
    /// Of a body that has not been read.
    pub fn new(
        info: Arc<RequestInfo>,
        headers: HeaderMap,
        tags: Vec<(String, String)>,
        body: Bytes,
        host: Arc<dyn Host>,
    ) -> Self {
        let model = info.model.clone();
        Self {
            info,
            model,
            headers,
            send: Vec::new(),
            tags,
            host,
            body: Some(body),
            body_changed: false,
            decoded: None,
            request: None,
        }
    }

    /// The bytes of the body, in the client's dialect.
    ///
    /// # Errors
    /// The plugin did not say that it needs them.
    pub fn body(&self) -> Result<&Bytes, PluginError> {
        self.body.as_ref().ok_or_else(|| PluginError::new("the body was not asked for"))
    }

    /// Replaces the body.
    pub fn set_body(&mut self, body: Bytes) {
        (self.body, self.body_changed, self.decoded, self.request) = (Some(body), true, None, None);
    }

    /// What the body means.
    ///
    /// # Errors
    /// The plugin did not say that it needs it.
    pub fn request(&self) -> Result<&Request, PluginError> {
        let original = self.decoded.as_ref().map(|decoded| &decoded.request);
        self.request.as_ref().or(original).ok_or_else(|| PluginError::new("the decoded request was not asked for"))
    }

    /// What the body means, to be changed: upstreams are then asked what stands here instead of what the client sent. How many choices
    /// there are and whether the answer is streamed cannot be changed.
    ///
    /// # Errors
    /// The plugin did not say that it needs it.
    pub fn edit(&mut self) -> Result<&mut Request, PluginError> {
        if self.request.is_none() {
            self.request = Some(self.request()?.clone());
        }
        self.body = None;
        self.request.as_mut().ok_or_else(|| PluginError::new("the decoded request was not asked for"))
    }

    // What follows is the host's side.

    /// Whether the bytes are there.
    pub fn has_body(&self) -> bool {
        self.body.is_some()
    }

    /// Whether the decoded request is there.
    pub fn has_request(&self) -> bool {
        self.request().is_ok()
    }

    /// What the client's body, or the one that took its place, means.
    pub fn decoded(&self) -> Option<&Arc<Decoded>> {
        self.decoded.as_ref()
    }

    /// The same, as the host read it.
    pub fn put_decoded(&mut self, decoded: Arc<Decoded>) {
        self.decoded = Some(decoded);
    }

    /// The body that says what the edited request says.
    pub fn put_body(&mut self, body: Bytes) {
        self.body = Some(body);
    }

    /// What the plugins made of it.
    pub fn into_parts(self) -> Parts {
        let Self { model, headers, send, tags, body, body_changed, decoded, request, .. } = self;
        Parts { model, headers, send, tags, body: body.filter(|_| body_changed && request.is_none()), decoded, request }
    }
}

/// What plugins made of a request.
pub struct Parts {
    /// Model that is asked.
    pub model: String,
    /// Header fields.
    pub headers: HeaderMap,
    /// Header fields for providers.
    pub send: Vec<(HeaderName, HeaderValue)>,
    /// Tags.
    pub tags: Vec<(String, String)>,
    /// The body, if it is another than the client's.
    pub body: Option<Bytes>,
    /// What the body means, where that was read.
    pub decoded: Option<Arc<Decoded>>,
    /// What is asked instead of what the body means.
    pub request: Option<Request>,
}

/// Header fields of an answer.
#[derive(Clone, Debug, Default)]
pub struct AnswerHead {
    /// What upstreams and plugins said so far. Framing, content type and the request's id are the gateway's own and are not here.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

impl AnswerHead {
    /// Sets a field, in place of all of its name.
    pub fn set(&mut self, name: HeaderName, value: HeaderValue) {
        self.remove(&name);
        self.headers.push((name, value));
    }

    /// Removes all fields of that name.
    pub fn remove(&mut self, name: &HeaderName) {
        self.headers.retain(|(have, _)| have != name);
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With a complete answer.
    Complete,
    /// With an answer that a plugin gave.
    Answered,
    /// A plugin refused it.
    Rejected,
    /// With an error, before its answer or in it.
    Failed,
    /// The client left.
    Gone,
}

impl Outcome {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Complete => "complete",
            Outcome::Answered => "answered",
            Outcome::Rejected => "rejected",
            Outcome::Failed => "failed",
            Outcome::Gone => "gone",
        }
    }
}

/// What is known at the end of a request.
#[derive(Clone, Debug)]
pub struct EndFacts {
    /// How it ended.
    pub outcome: Outcome,
    /// Model that was asked.
    pub model: String,
    /// Who answered, where the model has several targets.
    pub target: Option<Arc<str>>,
    /// Counts as the upstream said them.
    pub usage: Usage,
    /// From the first plugin's `on_request` to now.
    pub duration: Duration,
}
