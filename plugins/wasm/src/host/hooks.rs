//! One request: the gateway's hooks on one side, the ABI's callbacks on the other.
//!
//! ```text
//! on_request   proxy_on_context_create, proxy_on_request_headers, proxy_on_request_body (whole, at once)
//! on_head      proxy_on_response_headers
//! on_event     proxy_on_response_body, piece by piece, in the client's dialect
//! on_end       proxy_on_done, proxy_on_log, proxy_on_delete
//! ```
//!
//! A plugin waits for answers to its own calls, which are made here while nothing is locked. A plugin that pauses a
//! request without a call wants to see the body first, or waits for its timer.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use penstock_plugins::{
    After, Answer, AnswerHead, EndFacts, Flow, Hooks, Host, Outcome, PluginError, Rejection, RejectionKind,
    RequestContext, Sees, Verdict,
};
use penstock_types::{ChatEvent, Usage};

use super::fields::Fields;
use super::machine::Machine;
use super::outgoing::Outgoing;
use super::plugin::{Core, plain_fields, request_fields, request_headers, sent};
use super::pool::Member;
use super::properties::Facts;
use super::state::{LocalResponse, Map, Stream};
use crate::WasmError;

/// Polling interval of a request that waits for something other than its calls.
const LOOK_PERIOD: Duration = Duration::from_millis(10);

impl From<WasmError> for PluginError {
    fn from(error: WasmError) -> Self {
        PluginError::new(error.to_string())
    }
}

/// Part of a plugin in one request.
pub(super) struct WasmHooks {
    core: Arc<Core>,
    seat: Option<Seat>,
    head_shown: bool,
    /// Bytes of the answer that the plugin holds back.
    held: Bytes,
    /// True after a wait was returned, whose future emits the held bytes: the next call drops them from `held`.
    waited: bool,
}

impl WasmHooks {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self { core, seat: None, head_shown: false, held: Bytes::new(), waited: false }
    }
}

/// Place of a request in a machine. Dropping it ends the context.
struct Seat {
    member: Arc<Member>,
    context: u32,
    outgoing: Outgoing,
    host: Arc<dyn Host>,
    pause: Duration,
    left: bool,
}

/// Direction: request or answer.
#[derive(Clone, Copy)]
enum Way {
    Request,
    Response,
}

/// State of a request after a callback.
enum Standing {
    Goes,
    /// The request waits; `hope` is true where anything but its own calls could wake it.
    Waits {
        hope: bool,
    },
    Answered(LocalResponse),
    Closed,
}

impl Seat {
    fn take(core: &Core, stream: Stream, host: &Arc<dyn Host>) -> Result<Self, WasmError> {
        let member = core.pool.join(host)?;
        let made = member.with(host, |machine| Ok((machine.create(stream)?, machine.take_calls())));
        let (context, calls) = made.inspect_err(|_| member.leave())?;
        let mut outgoing = Outgoing::new(member.clone(), core.upstreams.clone(), host.clone());
        outgoing.begin(calls);
        let pause = core.pool.program().identity().limits.pause;
        Ok(Self { member, context, outgoing, host: host.clone(), pause, left: false })
    }

    /// Runs a callback and returns the state of the request after it.
    fn act(
        &mut self,
        way: Way,
        act: impl FnOnce(&mut Machine, u32) -> Result<(), WasmError>,
    ) -> Result<Standing, WasmError> {
        let context = self.context;
        let (standing, calls) = self.member.with(&self.host, |machine| {
            act(machine, context)?;
            let standing = standing(machine, context, way)?;
            Ok((standing, machine.take_calls()))
        })?;
        self.outgoing.begin(calls);
        Ok(standing)
    }

    /// Reads the state that is kept of the request.
    fn look<T>(&self, look: impl FnOnce(&mut Stream) -> T) -> Result<T, WasmError> {
        let context = self.context;
        self.member.with(&self.host, |machine| machine.stream(context).map(look).ok_or(WasmError::Gone))
    }

    /// Takes the state that [`resumed`] needs; the calls go with it.
    fn pause(&mut self, way: Way) -> Pause {
        let (member, host) = (self.member.clone(), self.host.clone());
        Pause { member, context: self.context, outgoing: self.outgoing.take(), host, way, limit: self.pause }
    }

    fn leave(&mut self, facts: Option<&EndFacts>) -> Result<(), WasmError> {
        if std::mem::replace(&mut self.left, true) {
            return Ok(());
        }
        self.outgoing.detach();
        let context = self.context;
        let now = self.host.since_epoch();
        let done = self.member.with(&self.host, |machine| {
            if let Some(stream) = machine.stream(context) {
                stream.facts.end = Some(facts.cloned().unwrap_or_else(|| gone(&stream.facts, now)));
                stream.committed = true;
            }
            machine.finish(context)?;
            Ok(machine.take_calls())
        });
        self.member.leave();
        self.outgoing.begin(done?);
        self.outgoing.detach();
        Ok(())
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // The request is gone, so an error here has no receiver.
        let _ = self.leave(None);
    }
}

fn standing(machine: &mut Machine, context: u32, way: Way) -> Result<Standing, WasmError> {
    let hope = machine.may_wake();
    let stream = machine.stream(context).ok_or(WasmError::Gone)?;
    if let Some(local) = stream.local.take() {
        stream.committed = true;
        return Ok(Standing::Answered(local));
    }
    let waits = match way {
        Way::Request => stream.request_paused,
        Way::Response => stream.response_paused,
    };
    Ok(match (stream.closed, waits) {
        (true, _) => Standing::Closed,
        (false, true) => Standing::Waits { hope },
        (false, false) => Standing::Goes,
    })
}

/// Request that waits.
struct Pause {
    member: Arc<Member>,
    context: u32,
    outgoing: Outgoing,
    host: Arc<dyn Host>,
    way: Way,
    limit: Duration,
}

/// Makes the plugin's calls and tells it of the answers until the request goes on. Cancel-safe: when the future is
/// dropped, its calls are answered as failed.
async fn resumed(mut pause: Pause) -> Result<Standing, WasmError> {
    let begun = pause.host.since_epoch();
    loop {
        let (context, way) = (pause.context, pause.way);
        let now = pause.member.with(&pause.host, |machine| standing(machine, context, way))?;
        let Standing::Waits { hope } = now else {
            pause.outgoing.detach();
            return Ok(now);
        };
        if pause.host.since_epoch().saturating_sub(begun) > pause.limit {
            return Err(WasmError::Paused);
        }
        if let Some((call, answer)) = pause.outgoing.next().await {
            pause.outgoing.tell(call, answer)?;
        } else if hope {
            pause.host.sleep(LOOK_PERIOD).await;
        } else {
            return Err(WasmError::Stuck);
        }
    }
}

#[async_trait]
impl Hooks for WasmHooks {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        let body = if self.core.wants_request_body() { request.body()?.clone() } else { Bytes::new() };
        let stream = stream_of(request, body.len());
        let mut seat = Seat::take(&self.core, stream, &request.host)?;
        let shown = !body.is_empty();
        let mut standing =
            seat.act(Way::Request, |machine, context| machine.request_headers(context, !shown).map(drop))?;
        // A plugin that pauses without a call of its own waits for the body.
        if matches!(standing, Standing::Waits { .. }) && !(shown && seat.outgoing.is_empty()) {
            standing = resumed(seat.pause(Way::Request)).await?;
        }
        if shown && matches!(standing, Standing::Goes | Standing::Waits { .. }) {
            standing =
                seat.act(Way::Request, |machine, context| machine.request_body(context, body, true).map(drop))?;
            if matches!(standing, Standing::Waits { .. }) {
                standing = resumed(seat.pause(Way::Request)).await?;
            }
        }
        // Calls that the request does not wait for go on in the background.
        seat.outgoing.detach();
        let verdict = match standing {
            Standing::Answered(local) => answered(&self.core, local),
            Standing::Closed => Verdict::Reject(closed(&self.core)),
            Standing::Goes | Standing::Waits { .. } => {
                seat.edit(request)?;
                Verdict::Pass
            }
        };
        self.seat = Some(seat);
        Ok(verdict)
    }

    fn sees(&self) -> Sees {
        if self.seat.is_some() { self.core.sees() } else { Sees::Nothing }
    }

    fn on_head(&mut self, head: &mut AnswerHead) -> Result<Option<Rejection>, PluginError> {
        match self.show_head(&head.headers, true)? {
            AfterHead::Refused(rejection) => return Ok(Some(rejection)),
            AfterHead::Changed(fields) => head.headers = plain_fields(&fields).collect(),
            AfterHead::Unchanged => {}
        }
        Ok(None)
    }

    fn on_event(&mut self, events: &mut Vec<ChatEvent>, end: bool) -> Result<Flow, PluginError> {
        if !self.head_shown {
            // The head went out before; it can be read and no longer changed.
            if let AfterHead::Refused(rejection) = self.show_head(&[], false)? {
                return Ok(Flow::Reject(rejection));
            }
        }
        if std::mem::take(&mut self.waited) {
            self.held = Bytes::new();
        }
        let bytes = raw_bytes(events);
        let Some(seat) = &mut self.seat else { return Ok(Flow::Go) };
        if bytes.is_empty() && !end {
            return Ok(Flow::Go);
        }
        let size_max = self.core.pool.program().identity().limits.body_bytes_max;
        if self.held.len() + bytes.len() > size_max {
            return Err(PluginError::new(format!("the plugin holds back more than {size_max} bytes (body_bytes_max)")));
        }
        let standing =
            seat.act(Way::Response, |machine, context| machine.response_body(context, bytes, end).map(drop))?;
        match standing {
            Standing::Answered(local) => Ok(Flow::Reject(refusal(&self.core, local))),
            Standing::Closed => Ok(Flow::Reject(closed(&self.core))),
            Standing::Goes => {
                let (bytes, changed) = seat.take_piece()?;
                if changed || !self.held.is_empty() {
                    self.held = Bytes::new();
                    events.retain(|event| !matches!(event, ChatEvent::Raw(_)));
                    events.extend((!bytes.is_empty()).then_some(ChatEvent::Raw(bytes)));
                }
                seat.outgoing.detach();
                Ok(Flow::Go)
            }
            Standing::Waits { hope } if seat.outgoing.is_empty() && !hope && end => Err(WasmError::Stuck.into()),
            Standing::Waits { .. } => {
                let calls = !seat.outgoing.is_empty();
                self.held = seat.look(|stream| piece(stream).0)?;
                events.retain(|event| !matches!(event, ChatEvent::Raw(_)));
                // Without a call more of the answer may be what it waits for, as long as there is more.
                if !calls && !end {
                    return Ok(Flow::Go);
                }
                self.waited = true;
                let (pause, core) = (seat.pause(Way::Response), self.core.clone());
                Ok(Flow::Wait(Box::pin(resumed_piece(pause, core))))
            }
        }
    }

    fn release(&mut self, out: &mut Vec<ChatEvent>) {
        let held = std::mem::take(&mut self.held);
        out.extend((!held.is_empty()).then_some(ChatEvent::Raw(held)));
    }

    fn held_bytes(&self) -> usize {
        self.held.len()
    }

    fn on_end(&mut self, facts: &EndFacts) {
        let Some(mut seat) = self.seat.take() else { return };
        if let Err(error) = seat.leave(Some(facts))
            && error != WasmError::Gone
        {
            tracing::warn!(plugin = self.core.name(), %error, "plugin trapped at the end of a request");
        }
    }
}

/// Waits until a piece of an answer goes on, and returns the events that go on then.
async fn resumed_piece(pause: Pause, core: Arc<Core>) -> Result<After, PluginError> {
    let (member, context, host) = (pause.member.clone(), pause.context, pause.host.clone());
    match resumed(pause).await? {
        Standing::Answered(local) => Ok(After::Reject(refusal(&core, local))),
        Standing::Closed => Ok(After::Reject(closed(&core))),
        Standing::Goes | Standing::Waits { .. } => {
            let (bytes, _) =
                member.with(&host, |machine| machine.stream(context).map(take_piece).ok_or(WasmError::Gone))?;
            Ok(After::Go((!bytes.is_empty()).then_some(ChatEvent::Raw(bytes)).into_iter().collect()))
        }
    }
}

/// Result of showing an answer's head to a plugin.
enum AfterHead {
    Unchanged,
    Changed(Fields),
    /// The plugin refuses the answer.
    Refused(Rejection),
}

impl WasmHooks {
    /// Shows the answer's head to the plugin. A plugin that is shown nothing more cannot have the answer wait there: no
    /// later hook would see whether it goes on.
    fn show_head(
        &mut self,
        headers: &[(http::HeaderName, http::HeaderValue)],
        open: bool,
    ) -> Result<AfterHead, PluginError> {
        self.head_shown = true;
        let sees_body = self.core.sees() == Sees::Bytes;
        let Some(seat) = &mut self.seat else { return Ok(AfterHead::Unchanged) };
        let mut fields = Fields::default();
        fields.push(":status", "200");
        for (name, value) in headers {
            fields.push(name.as_str(), value.as_bytes().to_vec());
        }
        let standing =
            seat.act(Way::Response, |machine, context| machine.response_headers(context, fields, open).map(drop))?;
        // With the first piece of the body it is seen whether the answer still waits; else calls go on in the background.
        if !(sees_body && matches!(standing, Standing::Waits { .. })) {
            seat.outgoing.detach();
        }
        match standing {
            Standing::Answered(local) => return Ok(AfterHead::Refused(refusal(&self.core, local))),
            Standing::Closed => return Ok(AfterHead::Refused(closed(&self.core))),
            Standing::Waits { .. } if !sees_body => return Err(WasmError::PausedHead.into()),
            Standing::Goes | Standing::Waits { .. } => {}
        }
        let changed = seat.look(|stream| {
            let map = stream.response_headers.as_mut()?;
            map.open = false;
            map.changed.then(|| map.fields.clone())
        })?;
        Ok(changed.map_or(AfterHead::Unchanged, AfterHead::Changed))
    }
}

impl Seat {
    /// Puts the plugin's edits into the request.
    fn edit(&self, request: &mut RequestContext) -> Result<(), WasmError> {
        let (headers, body) = self.look(|stream| {
            stream.request_headers.open = false;
            let headers = stream.request_headers.changed.then(|| stream.request_headers.fields.clone());
            let body = stream.request_body.take().filter(|body| body.changed).map(|body| body.bytes);
            (headers, body)
        })?;
        if let Some(headers) = headers {
            let headers = request_headers(&headers, &request.headers);
            sent(&request.headers, &headers, &mut request.send);
            request.headers = headers;
        }
        if let Some(body) = body {
            request.set_body(body);
        }
        Ok(())
    }

    fn take_piece(&self) -> Result<(Bytes, bool), WasmError> {
        self.look(take_piece)
    }
}

fn piece(stream: &mut Stream) -> (Bytes, bool) {
    let body = stream.response_body.as_ref();
    body.map_or((Bytes::new(), false), |body| (body.bytes.clone(), body.changed))
}

fn take_piece(stream: &mut Stream) -> (Bytes, bool) {
    let piece = piece(stream);
    stream.response_body = None;
    piece
}

fn stream_of(request: &RequestContext, body_bytes: usize) -> Stream {
    let facts = Facts {
        info: Some(request.info.clone()),
        model: request.model.clone(),
        begun: request.host.since_epoch(),
        request_bytes: body_bytes as u64,
        ..Facts::default()
    };
    let request_headers = Map { fields: request_fields(request), open: true, changed: false };
    Stream { facts, request_headers, ..Stream::default() }
}

/// Facts of a request whose client left before there was an answer.
fn gone(facts: &Facts, now: Duration) -> EndFacts {
    let duration = now.saturating_sub(facts.begun);
    EndFacts { outcome: Outcome::Gone, model: facts.model.clone(), target: None, usage: Usage::default(), duration }
}

/// Bytes of a batch, without a copy where it is one piece.
fn raw_bytes(events: &[ChatEvent]) -> Bytes {
    let mut pieces = events.iter().filter_map(|event| match event {
        ChatEvent::Raw(bytes) => Some(bytes),
        _ => None,
    });
    let Some(first) = pieces.next() else { return Bytes::new() };
    let mut rest = pieces.peekable();
    if rest.peek().is_none() {
        return first.clone();
    }
    let mut all = first.to_vec();
    rest.for_each(|piece| all.extend_from_slice(piece));
    all.into()
}

/// Verdict made of a plugin's local response: a success is an answer, any other status a refusal.
fn answered(core: &Core, local: LocalResponse) -> Verdict {
    if (200..300).contains(&local.status) {
        let headers = plain_fields(&local.headers).collect();
        return Verdict::Answer(Answer { events: vec![ChatEvent::Raw(local.body)], headers });
    }
    Verdict::Reject(refusal(core, local))
}

fn refusal(core: &Core, local: LocalResponse) -> Rejection {
    let kind = match local.status {
        401 | 403 => RejectionKind::Forbidden,
        429 => RejectionKind::RateLimited,
        503 => RejectionKind::Unavailable,
        400..=499 => RejectionKind::Invalid,
        _ => RejectionKind::Internal,
    };
    tracing::debug!(plugin = core.name(), status = local.status, details = local.details, "plugin sent its own answer");
    let mut rejection = Rejection::new(kind, format!("The plugin {:?} refused this request.", core.name()));
    rejection = rejection.status(local.status);
    rejection.body = (!local.body.is_empty()).then_some(local.body);
    rejection.headers = plain_fields(&local.headers).collect();
    rejection
}

fn closed(core: &Core) -> Rejection {
    let message = format!("The plugin {:?} closed this request.", core.name());
    Rejection::new(RejectionKind::Forbidden, message)
}
