//! Requests to models by people at the console, in the name of their admin key.
//!
//! The request goes the way of every other (`penstock_proxy::console_answer`): it is bounded, limited, counted and logged. Its stream
//! ends with the session, with the role, and with the page that reads it.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, HttpBody};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Frame;
use penstock_auth::Principal;
use penstock_config::Role;
use penstock_console::{Signed, Stream};
use penstock_proxy::Failure;
use penstock_proxy::console_answer::{Asked, PIECES, Piece, error_event, serve};
use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use utoipa::ToSchema;

use super::live::{ENDED, holder, place};
use crate::audit::Did;
use crate::error::{ApiError, Code, ErrorBody};
use crate::extract::Unread;
use crate::gate::Peer;
use crate::keys::Caller;
use crate::server::{Held, Link};
use crate::state::Admin;

/// Least role that may ask models, which costs money.
const NEEDED: Role = Role::Operator;
/// Interval of looks at the session of a stream.
const LOOK: Duration = Duration::from_secs(1);
/// Longest time for a reader to take the last event.
const STALL: Duration = Duration::from_secs(1);

/// Chat completion of OpenAI's API, which may have any of its other fields.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Completion {
    /// Name of a model.
    model: String,
    #[expect(dead_code, reason = "for the document; the data path reads it")]
    #[schema(value_type = Vec<Object>)]
    messages: IgnoredAny,
    /// Only true is possible.
    #[expect(dead_code, reason = "for the document; the data path reads it")]
    #[schema(value_type = bool)]
    stream: IgnoredAny,
}

/// Asks a model as the key console:ID, for people who are signed in at the console. The answer is a stream of OpenAI's chat completion chunks.
#[utoipa::path(post, path = "/admin/v1/playground", tag = "models", operation_id = "ask_playground",
    request_body = Completion,
    responses((status = 200, description = "Chunks of the answer, as server-sent events.", body = String, content_type = "text/event-stream"),
        (status = 409, description = "The request came with an admin key, not with a session.", body = ErrorBody),
        (status = 429, description = "A limit refuses the request, or the session has as many event streams as it may.", body = ErrorBody)),
    security(("admin_key" = ["operator"])))]
pub(crate) async fn ask(
    State(admin): State<Admin>,
    caller: Caller,
    session: Option<Extension<Signed>>,
    Extension(link): Extension<Link>,
    Extension(Peer(peer)): Extension<Peer>,
    Unread(body): Unread,
) -> Result<Response, ApiError> {
    let Some(Extension(session)) = session else {
        let message = "Only people who are signed in at the console ask models here; programs need an API key.";
        return Err(ApiError::conflict(message));
    };
    let serving = admin.gateway.serving();
    if !serving.config.admin.playground {
        return Err(ApiError::not_found("The playground is off (admin.playground)."));
    }
    let stream = place(&admin, &session)?;
    let model = serde_json::from_slice(&body).map(|completion: Completion| completion.model).unwrap_or_default();
    let config = &serving.config.admin;
    let limits = match &caller.person {
        Some(_) => config.oidc.as_ref().map(|oidc| oidc.limits.clone()),
        None => config.keys.iter().find(|key| key.id == caller.key).map(|key| key.limits.clone()),
    };
    let limits = limits.unwrap_or_default();
    let asked = Asked::new(Principal::console(&caller.key, limits), body, peer);
    let request_id = asked.request_id().to_owned();
    let (out, mut pieces) = mpsc::channel(PIECES);
    tokio::spawn(answer(admin, asked, stream, link.hold(), out));
    // Until the commit time, a failure has its own status.
    let first = match timeout(serving.config.commit, pieces.recv()).await {
        Ok(Some(Err(failure))) => return Err(refused(&failure)),
        Ok(first) => first,
        Err(_) => None,
    };
    let did = Extension(Did { target: Some(model), ..Did::default() });
    let id = HeaderValue::from_str(&request_id).unwrap_or(HeaderValue::from_static(""));
    let fields = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (HeaderName::from_static("x-request-id"), id),
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    Ok((fields, did, Body::new(UnsyncBoxBody::new(Pieces { first, rest: pieces, request_id }))).into_response())
}

/// Answers the request, for as long as its session may ask.
async fn answer(admin: Admin, asked: Asked, stream: Stream, mut held: Held, out: mpsc::Sender<Piece>) {
    let may = || {
        let is_on = admin.gateway.serving().config.admin.playground;
        is_on && holder(&admin, &stream).is_some_and(|caller| caller.role >= NEEDED)
    };
    let over = async {
        loop {
            tokio::select! {
                () = held.stopped() => return,
                () = sleep(LOOK) => if !may() { return },
            }
        }
    };
    serve(&admin.gateway, asked, &out, over).await;
    if !may() {
        // Err: nobody reads it.
        let _ = timeout(STALL, out.send(Ok(Bytes::from_static(ENDED)))).await;
    }
}

/// Failure before the answer, in the shape of this API. A 401 would say that the session is over.
pub(super) fn refused(failure: &Failure) -> ApiError {
    let status = StatusCode::from_u16(failure.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let (status, code) = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => (StatusCode::FORBIDDEN, Code::Forbidden),
        StatusCode::NOT_FOUND => (status, Code::NotFound),
        StatusCode::CONFLICT => (status, Code::Conflict),
        StatusCode::PAYLOAD_TOO_LARGE => (status, Code::TooLarge),
        StatusCode::TOO_MANY_REQUESTS => (status, Code::TooManyRequests),
        StatusCode::INTERNAL_SERVER_ERROR => (status, Code::Internal),
        status if status.is_client_error() => (status, Code::Invalid),
        status => (status, Code::Unavailable),
    };
    let error = ApiError::new(status, code, failure.message.clone());
    ApiError { param: failure.param.as_deref().map(str::to_owned), retry_after: failure.retry_after_seconds(), ..error }
}

/// Body of an answer whose pieces come one by one.
struct Pieces {
    first: Option<Piece>,
    rest: mpsc::Receiver<Piece>,
    request_id: String,
}

impl HttpBody for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let polled = match self.first.take() {
            Some(first) => Poll::Ready(Some(first)),
            None => self.rest.poll_recv(context),
        };
        polled.map(|piece| {
            let bytes = piece?.unwrap_or_else(|failure| error_event(&failure, &self.request_id));
            Some(Ok(Frame::data(bytes)))
        })
    }
}
