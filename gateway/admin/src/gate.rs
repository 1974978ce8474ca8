//! Checks that every request passes before its route sees it, in one order:
//!
//! ```text
//! Host, Origin ─▶ credential (slowed down when guessed) ─▶ role of the route ─▶ whole body, bounded ─▶ route, under a deadline
//! ```
//!
//! Changes and refusals are written to the audit log on the way out.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{MatchedPath, Query, Request, State as Shared};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use http::{HeaderName, HeaderValue, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use penstock_proxy::config::AdminKey;
use tokio::time::timeout;

use crate::audit::{self, Act, Did};
use crate::error::{ApiError, Code};
use crate::keys::{Caller, credential};
use crate::origin::{self, Stranger};
use crate::roles::{Access, Operation};
use crate::state::{Admin, State};

/// Largest body: the largest config, as JSON.
pub(crate) const BODY_BYTES_MAX: usize = 6 << 20;
/// Longest time until a body is complete.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time for one answer: a config may name a large tokenizer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Address of the peer; `None`: a Unix socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) Option<IpAddr>);

/// Runs the checks, then the route; see the module header.
pub(crate) async fn gate(Shared(admin): Shared<Admin>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let operation = operation(&admin, &parts);
    let act = Act {
        operation: operation.map(|operation| operation.id.clone()),
        method: parts.method.clone(),
        peer: parts.extensions.get::<Peer>().and_then(|peer| peer.0),
        target: target(&parts),
    };
    let mut response = match admitted(&admin, &parts, operation, &act) {
        Ok(caller) => {
            if let Some(error) = operation.and_then(|operation| beyond(operation, &parts)) {
                return error.into_response();
            }
            let actor = caller.as_ref().map(|caller| caller.key.clone()).unwrap_or_default();
            let mut response = served(parts, body, caller, next).await;
            if act.changes() {
                let did = response.extensions_mut().remove::<Did>().unwrap_or_default();
                audit::note(&admin, &act, &actor, response.status(), did).await;
            }
            response
        }
        Err(refused) => {
            if refused.is_noted {
                audit::note(&admin, &act, &refused.actor, refused.error.status, Did::default()).await;
            }
            refused.error.into_response()
        }
    };
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(HeaderName::from_static("x-frame-options"), HeaderValue::from_static("DENY"));
    response
}

fn operation<'a>(admin: &'a State, parts: &Parts) -> Option<&'a Operation> {
    admin.routes.find(parts.extensions.get::<MatchedPath>()?.as_str(), &parts.method)
}

/// Error of a parameter that is beyond the bounds of its operation.
fn beyond(operation: &Operation, parts: &Parts) -> Option<ApiError> {
    let Query(query) = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri).ok()?;
    operation.beyond(&query).map(|(name, why)| ApiError::invalid(name, why))
}

/// Variable part of the path, as it was sent.
fn target(parts: &Parts) -> String {
    let Some(template) = parts.extensions.get::<MatchedPath>() else { return String::new() };
    let mut both = template.as_str().split('/').zip(parts.uri.path().split('/'));
    both.find(|(template, _)| template.starts_with('{')).map(|(_, part)| part.to_owned()).unwrap_or_default()
}

/// Refusal, and whether the audit log gets it.
struct Refused {
    error: Box<ApiError>,
    actor: String,
    is_noted: bool,
}

impl From<ApiError> for Refused {
    fn from(error: ApiError) -> Self {
        Self { error: Box::new(error), actor: String::new(), is_noted: false }
    }
}

/// Caller of the request, if its role allows the operation; `None` on an open route.
fn admitted(admin: &State, parts: &Parts, operation: Option<&Operation>, act: &Act) -> Result<Option<Caller>, Refused> {
    let serving = admin.gateway.serving();
    let config = &serving.config.admin;
    origin::check(parts, config).map_err(stranger_error)?;
    let access = operation.map(|operation| operation.access);
    if access == Some(Access::Open) {
        return Ok(None);
    }
    let caller = authenticated(admin, &config.keys, parts, act.peer)?;
    match access {
        Some(Access::Role(role)) if caller.role < role => {
            let message = format!("The key {:?} is {}; this needs {role}.", caller.key, an(caller.role.name()));
            Err(Refused { error: Box::new(ApiError::forbidden(message)), actor: caller.key, is_noted: true })
        }
        // A route that is not in the document ends in the router's 404 or 405.
        _ => Ok(Some(caller)),
    }
}

fn an(role: &str) -> String {
    let article = if role.starts_with('o') { "an" } else { "a" };
    format!("{article} {role}'s")
}

fn stranger_error(stranger: Stranger) -> ApiError {
    ApiError::forbidden(match stranger {
        Stranger::Host => "The Host header names a host that is not served here; admin.hosts lists those that are.",
        Stranger::Origin => "Pages of this origin may not use the admin API; admin.origins lists those that may.",
    })
}

fn authenticated(admin: &State, keys: &[AdminKey], parts: &Parts, peer: Option<IpAddr>) -> Result<Caller, Refused> {
    let message = "An admin key is needed: send it as \"Authorization: Bearer KEY\".";
    let given = credential(&parts.headers).ok_or_else(|| ApiError::unauthorized(message))?;
    let now = Instant::now();
    let found = admin.keys.find(keys, given);
    if let Some(found) = found.as_ref().filter(|found| found.is_proven) {
        return Ok(found.caller.clone());
    }
    if !admin.throttle.admits(peer, now) {
        let message = "Too many wrong keys came from this address.";
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, Code::TooManyRequests, message);
        return Err(ApiError { retry_after: Some(1), ..error }.into());
    }
    let found = found.ok_or_else(|| Refused {
        is_noted: admin.throttle.wrong(peer, now),
        ..ApiError::unauthorized("This is no key of the admin API.").into()
    })?;
    admin.keys.proven(&found);
    Ok(found.caller)
}

/// Reads the body and runs the route, each with a deadline.
async fn served(mut parts: Parts, body: Body, caller: Option<Caller>, next: Next) -> Response {
    let collected = timeout(BODY_TIMEOUT, Limited::new(body, BODY_BYTES_MAX).collect()).await;
    let bytes = match collected {
        Ok(Ok(collected)) => collected.to_bytes(),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let message = format!("The body is larger than {BODY_BYTES_MAX} bytes.");
            return ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, Code::TooLarge, message).into_response();
        }
        Ok(Err(_)) => return ApiError::invalid("body", "The body could not be read.").into_response(),
        Err(_) => {
            let message = format!("The body was not complete within {} s.", BODY_TIMEOUT.as_secs());
            return ApiError::new(StatusCode::REQUEST_TIMEOUT, Code::Timeout, message).into_response();
        }
    };
    caller.into_iter().for_each(|caller| _ = parts.extensions.insert(caller));
    let answer = next.run(Request::from_parts(parts, Body::from(bytes)));
    timeout(ANSWER_TIMEOUT, answer)
        .await
        .unwrap_or_else(|_| ApiError::unavailable("There was no answer in time.").into_response())
}
