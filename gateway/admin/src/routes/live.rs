//! Everything that runs: once, or as a stream of server-sent events for a signed-in person who looks.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::{Body, HttpBody};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use penstock_console::{STREAMS_MAX, Signed, Stream};
use tokio::sync::mpsc;

use crate::error::{ApiError, Code, ErrorBody};
use crate::keys::Caller;
use crate::server::{Held, Link};
use crate::sign_on::worth;
use crate::state::Admin;

mod state;
pub(crate) use state::Live;

/// Interval of the events.
const EACH: Duration = Duration::from_secs(1);
/// Longest time for a client to take an event.
const STALL: Duration = Duration::from_secs(20);
/// Last event of a stream whose session has ended.
pub(super) const ENDED: &[u8] = b"event: end\ndata: {}\n\n";

/// Everything that runs. A session that accepts text/event-stream gets an event each second until it ends.
#[utoipa::path(get, path = "/admin/v1/live", tag = "state", operation_id = "live",
    responses((status = 200, description = "The state.", body = Live),
        (status = 429, description = "The session has as many event streams as it may.", body = ErrorBody)),
    security(("admin_key" = ["viewer"])))]
pub(crate) async fn live(
    State(admin): State<Admin>,
    session: Option<Extension<Signed>>,
    Extension(link): Extension<Link>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let takes_events = headers.get_all(header::ACCEPT).iter().any(|value| value == "text/event-stream");
    let Some(Extension(session)) = session.filter(|_| takes_events) else {
        let kind = HeaderValue::from_static("application/json");
        return Ok(([(header::CONTENT_TYPE, kind)], json(&admin)).into_response());
    };
    let stream = place(&admin, &session)?;
    let (out, events) = mpsc::channel(1);
    tokio::spawn(feed(admin, stream, link.hold(), out));
    let kind = HeaderValue::from_static("text/event-stream");
    let body = Body::new(UnsyncBoxBody::new(Events(events)));
    Ok(([(header::CONTENT_TYPE, kind)], body).into_response())
}

/// Place for one more event stream of a session.
pub(super) fn place(admin: &Admin, session: &Signed) -> Result<Stream, ApiError> {
    admin.sessions.stream(session.place).ok_or_else(|| {
        let message =
            format!("The session has {STREAMS_MAX} event streams already: close another page of the console.");
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, Code::TooManyRequests, message)
    })
}

/// State as JSON in one line, a little old where others look too.
fn json(admin: &Admin) -> Bytes {
    // Plain structs of numbers and texts: nothing that JSON cannot hold.
    admin.pulse.json(|| serde_json::to_vec(&Live::now(admin)).unwrap_or_default().into())
}

/// Sends the state each second until the session, the client or the process ends.
async fn feed(admin: Admin, stream: Stream, mut held: Held, out: mpsc::Sender<Bytes>) {
    loop {
        let stands = holder(&admin, &stream).is_some();
        let event = match stands {
            true => [b"data: ", &json(&admin)[..], b"\n\n"].concat().into(),
            false => Bytes::from_static(ENDED),
        };
        // Err: the client does not read, or is gone.
        let Ok(Ok(())) = tokio::time::timeout(STALL, out.send(event)).await else { return };
        if !stands {
            return;
        }
        tokio::select! {
            () = held.stopped() => return,
            () = out.closed() => return,
            () = tokio::time::sleep(EACH) => {}
        }
    }
}

/// Admin key of a stream's session, with its role now; `None`: the session or the key is gone, or the console off.
pub(super) fn holder(admin: &Admin, stream: &Stream) -> Option<Caller> {
    let serving = admin.gateway.serving();
    let config = &serving.config.admin;
    let holder = admin.sessions.holder(stream.place, Instant::now()).filter(|_| config.console)?;
    worth(admin, config, &holder)
}

/// Body of an answer that is a stream of events.
struct Events(mpsc::Receiver<Bytes>);

impl HttpBody for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|event| event.map(|event| Ok(hyper::body::Frame::data(event))))
    }
}
