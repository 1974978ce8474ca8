//! Checks that every request passes before its route sees it, in one order:
//!
//! ```text
//! Host, Origin ─▶ credential (slowed down when guessed) ─▶ role of the route ─▶ whole body, bounded ─▶ route, under a deadline
//! ```
//!
//! The credential is an admin key (`Authorization: Bearer`), or the session of somebody who has signed in at the console, with a key or at
//! the identity provider: a cookie, a token in a header, and for changes a browser that vouches for the page.
//!
//! Changes and refusals are written to the audit log on the way out. A change whose caller is known goes on when the client leaves: otherwise
//! whoever closes the connection in time would be in no audit log, or leave a change half made. One that takes longer than an answer may goes on,
//! too, and the audit log gets the outcome that it has in the end.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{MatchedPath, Query, Request, State as Shared};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, HeaderValue, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use penstock_config::{AdminConfig, AdminKey};
use penstock_console::{Fault, Signed, cookie_name, read};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::audit::{self, Act, Did};
use crate::error::{ApiError, Code};
use crate::keys::{Caller, Found, credential};
use crate::origin::{self, Stranger};
use crate::roles::{Access, Operation};
use crate::sign_on;
use crate::state::{Admin, State};

/// Largest body: the largest config, as JSON.
pub(crate) const BODY_BYTES_MAX: usize = 6 << 20;
/// Longest time until a body is complete.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes of a refused request's body that are taken in, and longest time for that.
const REFUSED_BYTES_MAX: usize = 64 << 10;
const REFUSED_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest time for one answer: a config may name a large tokenizer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Header field with the token of a session.
pub(crate) const TOKEN: &str = "x-penstock-session";

/// Mark of an answer that the audit log does not get: a guess among many.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unnoted;

/// Presence of the client of a change, for routes that end early when it leaves.
#[derive(Clone, Debug)]
pub(crate) struct Presence(watch::Receiver<()>);

impl Presence {
    /// Waits until the client has left.
    pub(crate) async fn left(mut self) {
        // Err: the connection's side is gone; nothing is ever sent.
        while self.0.changed().await.is_ok() {}
    }
}

/// Most changes at once, those that go on without their client included.
pub(crate) const CHANGES_MAX: u32 = 256;

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
        Ok(admitted) => {
            if let Some(error) = operation.and_then(|operation| beyond(operation, &parts)) {
                return without_body(&parts, body, error.into_response()).await;
            }
            answered(admin, act, admitted, parts, body, next).await
        }
        Err(refused) => {
            if refused.is_noted {
                noted(admin, act, refused.actor, refused.error.status, Did::default()).await;
            }
            without_body(&parts, body, refused.error.into_response()).await
        }
    };
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(HeaderName::from_static("x-frame-options"), HeaderValue::from_static("DENY"));
    response
}

/// Answer of the route to a request that is admitted. A change of a known caller is made and noted whether or not the client waits for it;
/// the route finds [`Presence`] among the request's extensions.
async fn answered(
    admin: Admin,
    act: Act,
    Admitted { caller, session }: Admitted,
    mut parts: Parts,
    body: Body,
    next: Next,
) -> Response {
    let bytes = match whole(body).await {
        Ok(bytes) => bytes,
        Err(error) if act.changes() && caller.is_some() => {
            let actor = caller.map(|caller| caller.key).unwrap_or_default();
            noted(admin, act, actor, error.status, Did::default()).await;
            return closing(error.into_response());
        }
        Err(error) => return closing(error.into_response()),
    };
    session.into_iter().for_each(|session| _ = parts.extensions.insert(session));
    if caller.is_none() || !act.changes() {
        let request = Request::from_parts(parts, Body::from(bytes));
        return route(admin, act, caller, request, next, Some(ANSWER_TIMEOUT)).await;
    }
    let Ok(place) = admin.changes.clone().try_acquire_owned() else {
        return ApiError::unavailable("Too many changes are in progress.").into_response();
    };
    let (present, presence) = watch::channel(());
    parts.extensions.insert(Presence(presence));
    let request = Request::from_parts(parts, Body::from(bytes));
    let change = async move {
        let _place = place;
        route(admin, act, caller, request, next, None).await
    };
    let response = in_time(ANSWER_TIMEOUT, change).await;
    drop(present);
    response
}

/// Answer to a change, which goes on where it takes longer than `limit`.
async fn in_time(limit: Duration, change: impl Future<Output = Response> + Send + 'static) -> Response {
    match timeout(limit, tokio::spawn(change)).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => ApiError::internal(&error).into_response(),
        Err(_) => {
            let message = "There was no answer in time. If it is a change, it goes on and may still come into force: the audit log gets its outcome.";
            // To send it again would be another change.
            ApiError { retry_after: None, ..ApiError::unavailable(message) }.into_response()
        }
    }
}

/// Runs the route, under a deadline if it has one, and writes a change into the audit log with the outcome that it has.
async fn route(
    admin: Admin,
    act: Act,
    caller: Option<Caller>,
    mut request: Request,
    next: Next,
    limit: Option<Duration>,
) -> Response {
    let actor = caller.as_ref().map(|caller| caller.key.clone());
    let person = caller.as_ref().and_then(|caller| caller.person.clone());
    caller.into_iter().for_each(|caller| _ = request.extensions_mut().insert(caller));
    let mut response = match limit {
        Some(limit) => {
            let late = |_| ApiError::unavailable("There was no answer in time.").into_response();
            timeout(limit, next.run(request)).await.unwrap_or_else(late)
        }
        // A change that panics has an outcome as well.
        None => {
            let run = tokio::spawn(async move { next.run(request).await });
            run.await.unwrap_or_else(|error| ApiError::internal(&error).into_response())
        }
    };
    let is_noted = response.extensions_mut().remove::<Unnoted>().is_none();
    // Who has just signed in was nobody before.
    let actor = actor.or_else(|| response.extensions().get::<Caller>().map(|caller| caller.key.clone()));
    if act.changes() && is_noted {
        let mut did = response.extensions_mut().remove::<Did>().unwrap_or_default();
        if let Some(person) = person {
            did.detail = with_person(did.detail, person);
        }
        noted(admin, act, actor.unwrap_or_default(), response.status(), did).await;
    }
    response
}

/// Writes an act into the audit log, also if the client leaves meanwhile.
async fn noted(admin: Admin, act: Act, actor: String, status: StatusCode, did: Did) {
    // Err: the process ends.
    let _ = tokio::spawn(async move { audit::note(&admin, &act, &actor, status, did).await }).await;
}

/// Detail of an audit event with the name of the person, who is otherwise known by an id of the provider's.
fn with_person(mut detail: serde_json::Value, person: String) -> serde_json::Value {
    if detail.is_null() {
        detail = serde_json::Value::Object(serde_json::Map::new());
    }
    detail["person"] = person.into();
    detail
}

fn operation<'a>(admin: &'a State, parts: &Parts) -> Option<&'a Operation> {
    admin.routes.find(parts.extensions.get::<MatchedPath>()?.as_str(), &parts.method)
}

/// Error of a parameter that is beyond the bounds of its operation.
fn beyond(operation: &Operation, parts: &Parts) -> Option<ApiError> {
    let Query(query) = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri).ok()?;
    operation.beyond(&query).map(|(name, why)| ApiError::invalid(name, why))
}

/// Variable parts of the path, as they were sent.
fn target(parts: &Parts) -> String {
    let Some(template) = parts.extensions.get::<MatchedPath>() else { return String::new() };
    let both = template.as_str().split('/').zip(parts.uri.path().split('/'));
    let variable: Vec<_> = both.filter(|(template, _)| template.starts_with('{')).map(|(_, part)| part).collect();
    variable.join("/")
}

/// Refusal, and whether the audit log gets it.
pub(crate) struct Refused {
    pub(crate) error: Box<ApiError>,
    actor: String,
    pub(crate) is_noted: bool,
}

/// Caller of a request; nobody on an open route.
#[derive(Default)]
struct Admitted {
    caller: Option<Caller>,
    /// Session of the request, where it is not the key itself that was sent.
    session: Option<Signed>,
}

impl From<ApiError> for Refused {
    fn from(error: ApiError) -> Self {
        Self { error: Box::new(error), actor: String::new(), is_noted: false }
    }
}

/// Caller of the request, if its role allows the operation.
fn admitted(admin: &State, parts: &Parts, operation: Option<&Operation>, act: &Act) -> Result<Admitted, Refused> {
    let serving = admin.gateway.serving();
    let config = &serving.config.admin;
    origin::check(parts, config).map_err(stranger_error)?;
    let access = operation.map(|operation| operation.access);
    if access == Some(Access::Open) {
        return Ok(Admitted::default());
    }
    let (caller, session) = authenticated(admin, config, parts, act)?;
    match access {
        Some(Access::Role(role)) if caller.role < role => {
            let message = format!("The key {:?} is {}; this needs {role}.", caller.key, an(caller.role.name()));
            Err(Refused { error: Box::new(ApiError::forbidden(message)), actor: caller.key, is_noted: true })
        }
        // A route that is not in the document ends in the router's 404 or 405.
        _ => Ok(Admitted { caller: Some(caller), session }),
    }
}

fn an(role: &str) -> String {
    let article = if role.starts_with('o') { "an" } else { "a" };
    format!("{article} {role}'s")
}

pub(crate) fn stranger_error(stranger: Stranger) -> ApiError {
    ApiError::forbidden(match stranger {
        Stranger::Host => "The Host header names a host that is not served here; admin.hosts lists those that are.",
        Stranger::Origin => "Pages of this origin may not use the admin API; admin.origins lists those that may.",
    })
}

fn authenticated(
    admin: &State,
    config: &AdminConfig,
    parts: &Parts,
    act: &Act,
) -> Result<(Caller, Option<Signed>), Refused> {
    if let Some(given) = credential(&parts.headers) {
        return Ok((known(admin, &config.keys, given, act.peer)?.caller, None));
    }
    let id = match parts.headers.contains_key(header::AUTHORIZATION) || !config.console {
        true => None,
        false => read(&parts.headers, &cookie_of(&parts.headers)),
    };
    let message = "An admin key is needed: send it as \"Authorization: Bearer KEY\".";
    let id = id.ok_or_else(|| ApiError::unauthorized(message))?;
    if act.changes() && !origin::is_sent_by_console(parts) {
        let message =
            "A session changes something only from a page of this origin; without a browser, send the key itself.";
        return Err(ApiError::forbidden(message).into());
    }
    let now = Instant::now();
    let token = parts.headers.get(TOKEN).map(HeaderValue::as_bytes);
    let signed = admin.sessions.find(id, token, now).map_err(|fault| match fault {
        Fault::Unknown => ApiError::unauthorized("The session has ended: sign in again."),
        Fault::Token => ApiError::forbidden("The token of the session is missing or wrong."),
    })?;
    let Some(caller) = sign_on::worth(admin, config, &signed.holder) else {
        admin.sessions.close(signed.place);
        return Err(ApiError::unauthorized("The admin key or the role of the session is gone: sign in anew.").into());
    };
    Ok((caller, Some(signed)))
}

/// Name of the session's cookie for the host that a request names.
pub(crate) fn cookie_of(headers: &http::HeaderMap) -> String {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    cookie_name(host)
}

/// Admin key whose text was given, unless it comes from an address that guesses.
pub(crate) fn known(admin: &State, keys: &[AdminKey], given: &[u8], peer: Option<IpAddr>) -> Result<Found, Refused> {
    let now = Instant::now();
    let found = admin.keys.find(keys, given);
    if let Some(found) = found.as_ref().filter(|found| found.is_proven) {
        return Ok(found.clone());
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
    Ok(found)
}

/// Response to a request whose body nobody reads. Without this, the connection would end behind the response and nothing would say so: a client
/// that sends its next request on it would get no answer. So a body that is soon complete is taken in, and with any other the response
/// says that the connection ends.
async fn without_body(parts: &Parts, body: Body, response: Response) -> Response {
    // Reading it would ask the client to send it.
    let is_awaiting = parts.headers.contains_key(header::EXPECT);
    let rest = async { !is_awaiting && Limited::new(body, REFUSED_BYTES_MAX).collect().await.is_ok() };
    if timeout(REFUSED_TIMEOUT, rest).await.unwrap_or(false) { response } else { closing(response) }
}

/// Response that says that the connection ends with it.
fn closing(mut response: Response) -> Response {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Whole body of a request, within its bounds of bytes and time.
async fn whole(body: Body) -> Result<Bytes, ApiError> {
    let collected = timeout(BODY_TIMEOUT, Limited::new(body, BODY_BYTES_MAX).collect()).await;
    match collected {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let message = format!("The body is larger than {BODY_BYTES_MAX} bytes.");
            Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, Code::TooLarge, message))
        }
        Ok(Err(_)) => Err(ApiError::invalid("body", "The body could not be read.")),
        Err(_) => {
            let message = format!("The body was not complete within {} s.", BODY_TIMEOUT.as_secs());
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, Code::Timeout, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_change_that_takes_long_has_its_outcome_in_the_end() {
        let (release, released) = tokio::sync::oneshot::channel::<()>();
        let (tell, told) = tokio::sync::oneshot::channel();
        let change = async move {
            released.await.expect("released");
            tell.send("done").expect("awaited");
            StatusCode::OK.into_response()
        };
        let response = in_time(Duration::from_millis(10), change).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(!response.headers().contains_key(header::RETRY_AFTER), "it is not asked for twice");
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        let message = "If it is a change, it goes on and may still come into force";
        assert!(String::from_utf8_lossy(&body).contains(message), "{body:?}");
        release.send(()).expect("the change goes on");
        assert_eq!(timeout(Duration::from_secs(20), told).await.expect("soon"), Ok("done"));
        assert_eq!(in_time(Duration::from_secs(20), async { StatusCode::OK.into_response() }).await.status(), 200);
    }
}
