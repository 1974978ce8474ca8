//! Contexts that hooks are shown: the request, the answer's head, the end.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use penstock_types::{Decoded, Dialect, Request, Surface, Usage};

use crate::host::Host;
use crate::verdict::PluginError;

/// Facts of a request that are known at its begin and do not change.
#[derive(Clone, Debug)]
pub struct RequestInfo {
    /// Id of the request, as in the access log and the answer's header.
    pub request_id: String,
    /// Route of the request, from a bounded set of names: `/v1/chat/completions`.
    pub route: &'static str,
    /// Operation that the client asks for, in the dialect of its URL.
    pub surface: Surface,
    /// True where the client wants a streamed answer.
    pub stream: bool,
    /// Model that the client asked for, by the name that it used.
    pub model: String,
    /// Id of the API key of the request; `None`: the request has none.
    pub key: Option<String>,
    /// Id of the team that the key belongs to; `None`: no team.
    pub team: Option<String>,
    /// Id of the person or service behind the key; `None`: no user.
    pub user: Option<String>,
    /// Tenant, which separates this caller's data from that of others.
    pub tenant: String,
    /// Address of the client; `None`: a Unix socket, or nobody is connected.
    pub client: Option<IpAddr>,
    /// True where no client waits for the answer: a batch, or a response in the background.
    pub background: bool,
    /// True where the request goes on from turns that only its provider keeps: the decoded request lacks them.
    pub partial: bool,
    /// True where the request is tried and goes nowhere: the plugin must leave its own state as it is.
    pub dry_run: bool,
}

impl RequestInfo {
    /// Dialect of the API that the client speaks.
    pub fn dialect(&self) -> Dialect {
        self.surface.dialect()
    }
}

/// A request before anything is decided about it.
///
/// Body and decoded request are two views of one thing: after an edit of one, the host makes the other anew before the
/// next plugin looks at it.
#[derive(Clone)]
pub struct RequestContext {
    /// Facts of the request that no plugin can change.
    pub info: Arc<RequestInfo>,
    /// Model that will be asked. A plugin that sets another name redirects the request; the client is answered under
    /// the name that it used.
    pub model: String,
    /// Header fields of the request, without credentials. An upstream of the same dialect gets a few of them, with the
    /// values set here.
    pub headers: HeaderMap,
    /// Further header fields for providers of every dialect; the last of a name counts.
    pub send: Vec<(HeaderName, HeaderValue)>,
    /// Names and values for the access log and the ledger.
    pub tags: Vec<(String, String)>,
    /// Services of the process around the plugins.
    pub host: Arc<dyn Host>,
    /// Body; `None`: the request was edited, and has not been encoded since.
    body: Option<Bytes>,
    body_changed: bool,
    /// Decoded body; `None`: the body has not been read.
    decoded: Option<Arc<Decoded>>,
    /// Request that is asked instead of the decoded body.
    request: Option<Request>,
}

impl RequestContext {
    /// Context of a request whose body has not been read.
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

    /// Bytes of the body, in the client's dialect.
    ///
    /// # Errors
    /// The plugin did not say that it needs the body.
    pub fn body(&self) -> Result<&Bytes, PluginError> {
        self.body.as_ref().ok_or_else(|| PluginError::new("the body was not asked for"))
    }

    /// Replaces the body; upstreams are asked for the new one.
    pub fn set_body(&mut self, body: Bytes) {
        (self.body, self.body_changed, self.decoded, self.request) = (Some(body), true, None, None);
    }

    /// Decoded request, with the edits so far.
    ///
    /// # Errors
    /// The plugin did not say that it needs the request.
    pub fn request(&self) -> Result<&Request, PluginError> {
        let original = self.decoded.as_ref().map(|decoded| &decoded.request);
        self.request.as_ref().or(original).ok_or_else(|| PluginError::new("the decoded request was not asked for"))
    }

    /// Decoded request, to be edited: upstreams are then asked for it instead of what the client sent. The number of
    /// choices and whether the answer is streamed cannot be changed.
    ///
    /// # Errors
    /// The plugin did not say that it needs the request.
    pub fn edit(&mut self) -> Result<&mut Request, PluginError> {
        if self.request.is_none() {
            self.request = Some(self.request()?.clone());
        }
        self.body = None;
        self.request.as_mut().ok_or_else(|| PluginError::new("the decoded request was not asked for"))
    }

    // The methods from here on are the host's side.

    /// Returns true if the bytes of the body have been read.
    pub fn has_body(&self) -> bool {
        self.body.is_some()
    }

    /// Returns true if the decoded request can be read.
    pub fn has_request(&self) -> bool {
        self.request().is_ok()
    }

    /// Decoded form of the client's body, or of the body that took its place.
    pub fn decoded(&self) -> Option<&Arc<Decoded>> {
        self.decoded.as_ref()
    }

    /// Sets the decoded form of the body, as the host read it.
    pub fn put_decoded(&mut self, decoded: Arc<Decoded>) {
        self.decoded = Some(decoded);
    }

    /// Sets the body that the edited request was encoded to.
    pub fn put_body(&mut self, body: Bytes) {
        self.body = Some(body);
    }

    /// Takes the request apart, with the plugins' edits, for the host.
    pub fn into_parts(self) -> Parts {
        let Self { model, headers, send, tags, body, body_changed, decoded, request, .. } = self;
        Parts { model, headers, send, tags, body: body.filter(|_| body_changed && request.is_none()), decoded, request }
    }
}

/// Parts of a request after the plugins' edits, as the host sends it on.
pub struct Parts {
    /// Name of the model that is asked, after the plugins' changes.
    pub model: String,
    /// Header fields of the client's request, with the plugins' edits.
    pub headers: HeaderMap,
    /// Header fields that plugins add to the request to the provider.
    pub send: Vec<(HeaderName, HeaderValue)>,
    /// Tags that plugins gave the request, for access log and ledger: name and value.
    pub tags: Vec<(String, String)>,
    /// Body that upstreams get in place of the client's; `None`: unchanged.
    pub body: Option<Bytes>,
    /// Decoded form of the body; `None`: the body was not decoded.
    pub decoded: Option<Arc<Decoded>>,
    /// Request that is asked instead of the decoded body.
    pub request: Option<Request>,
}

/// Header fields of an answer, before its first byte is sent.
#[derive(Clone, Debug, Default)]
pub struct AnswerHead {
    /// Fields that upstreams and plugins set so far. Framing, content type and the request's id are the gateway's own
    /// and are not here.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

impl AnswerHead {
    /// Sets a field, in place of all fields of that name.
    pub fn set(&mut self, name: HeaderName, value: HeaderValue) {
        self.remove(&name);
        self.headers.push((name, value));
    }

    /// Removes all fields of that name.
    pub fn remove(&mut self, name: &HeaderName) {
        self.headers.retain(|(have, _)| have != name);
    }
}

/// Outcome of a request, as plugins and logs see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request ended with a complete answer.
    Complete,
    /// The request ended with an answer that a plugin gave.
    Answered,
    /// A plugin refused the request.
    Rejected,
    /// The request ended with an error, before its answer or in it.
    Failed,
    /// The client left before the answer was complete.
    Gone,
}

impl Outcome {
    /// Name of the outcome in logs and messages.
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

/// Facts at the end of a request, for a plugin's last hook.
#[derive(Clone, Debug)]
pub struct EndFacts {
    /// Outcome of the request that has ended.
    pub outcome: Outcome,
    /// Name of the model that was asked, after the plugins' changes.
    pub model: String,
    /// Target that answered, where the model has several.
    pub target: Option<Arc<str>>,
    /// Token counts as the upstream reported them.
    pub usage: Usage,
    /// Time from the first plugin's `on_request` to now.
    pub duration: Duration,
}
