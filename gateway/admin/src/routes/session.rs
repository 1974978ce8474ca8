//! Session of a person at the console: sign in with an admin key, see who one is, sign out.

use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use penstock_auth::jwt::Grant;
use penstock_console::{ABSOLUTE, Holder, IDLE, Signed, clear, set};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::audit::Did;
use crate::error::{ApiError, ErrorBody};
use crate::extract::Body;
use crate::gate::{Peer, Unnoted, cookie_of, known};
use crate::keys::Caller;
use crate::looks::revoke;
use crate::renewals::Kept;
use crate::state::Admin;

/// Admin key to sign in with.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SignIn {
    /// Text of an admin key.
    #[schema(max_length = 512)]
    key: String,
}

/// Session that was opened.
#[derive(Serialize, ToSchema)]
pub(crate) struct SignedIn {
    /// Token of the session, for the header x-penstock-session of every call. The other half is the cookie.
    token: String,
    #[serde(flatten)]
    session: Session,
}

/// Session of the caller.
#[derive(Serialize, ToSchema)]
pub(crate) struct Session {
    /// Id of the admin key; oidc:SUBJECT for a person of the identity provider.
    key: String,
    /// Name of the person; null with an admin key.
    person: Option<String>,
    #[schema(value_type = super::RoleName)]
    role: &'static str,
    /// Seconds until the session ends in any case.
    seconds_left: u64,
    /// Seconds without a call after which the session ends.
    idle_seconds: u64,
}

impl Session {
    fn new(caller: &Caller, seconds_left: u64) -> Self {
        let person = caller.person.clone();
        Self { key: caller.key.clone(), person, role: caller.role.name(), seconds_left, idle_seconds: IDLE.as_secs() }
    }
}

/// Signs in at the console with an admin key. The answer sets a cookie and tells the token; calls need both.
#[utoipa::path(post, path = "/admin/v1/session", tag = "session", operation_id = "create_session", request_body = SignIn,
    responses((status = 201, description = "The session is open.", body = SignedIn),
        (status = 401, description = "This is no admin key.", body = ErrorBody),
        (status = 404, description = "The console is off.", body = ErrorBody),
        (status = 429, description = "Too many wrong keys from this address.", body = ErrorBody)), security(()))]
pub(crate) async fn create(
    State(admin): State<Admin>,
    Extension(Peer(peer)): Extension<Peer>,
    headers: HeaderMap,
    Body(wish): Body<SignIn>,
) -> Response {
    let serving = admin.gateway.serving();
    let config = &serving.config.admin;
    if !config.console {
        return (Extension(Unnoted), no_console()).into_response();
    }
    let found = match known(&admin, &config.keys, wish.key.trim().as_bytes(), peer) {
        Ok(found) => found,
        Err(refused) if refused.is_noted => return refused.error.into_response(),
        Err(refused) => return (Extension(Unnoted), *refused.error).into_response(),
    };
    opened(&admin, Holder::Key(found.digest), ABSOLUTE, found.caller, &headers, None)
        .unwrap_or_else(IntoResponse::into_response)
}

/// Answer that opens a session of at most `life` for its holder, with new secrets in any case. `kept`: what the provider gave with the
/// sign-in.
pub(crate) fn opened(
    admin: &Admin,
    holder: Holder,
    life: Duration,
    caller: Caller,
    headers: &HeaderMap,
    kept: Option<Kept>,
) -> Result<Response, ApiError> {
    let opened = admin.sessions.open(holder, life, random()?, Instant::now());
    let opened = opened.ok_or_else(|| {
        ApiError::forbidden("You have signed out at the identity provider since this sign-in began: sign in again.")
    })?;
    if let Some(kept) = kept {
        let refresh = admin.gateway.serving().config.admin.oidc.as_ref().and_then(|oidc| oidc.refresh);
        admin.renewals.keep(opened.place, kept, refresh, Instant::now());
    }
    let cookie = set(&cookie_of(headers), &opened.id, is_secure(headers));
    let session = Session::new(&caller, life.min(ABSOLUTE).as_secs());
    let did = Extension(Did { target: Some(caller.key.clone()), detail: who(caller.person.as_deref()) });
    let body = Json(SignedIn { token: opened.token, session });
    let mut response = (StatusCode::CREATED, did, Extension(caller), body).into_response();
    cookie.into_iter().for_each(|cookie| _ = response.headers_mut().append(header::SET_COOKIE, cookie));
    Ok(response)
}

/// Detail of an audit event about a person of the identity provider, who is otherwise known by an id of the provider's.
pub(crate) fn who(person: Option<&str>) -> Value {
    person.map_or(Value::Null, |person| json!({ "person": person }))
}

/// Random secrets of 256 bits.
pub(crate) fn random<const COUNT: usize>() -> Result<[[u8; 32]; COUNT], ApiError> {
    let mut random = [[0; 32]; COUNT];
    for bytes in &mut random {
        getrandom::fill(bytes).map_err(|error| ApiError::internal(&error))?;
    }
    Ok(random)
}

/// Returns true if the page came over TLS, as its origin says.
pub(crate) fn is_secure(headers: &HeaderMap) -> bool {
    headers.get(header::ORIGIN).is_some_and(|origin| origin.as_bytes().starts_with(b"https://"))
}

pub(crate) fn no_console() -> ApiError {
    ApiError::not_found("The console is off (admin.console).")
}

fn no_session() -> ApiError {
    ApiError::not_found("The request came with an admin key, not with a session.")
}

/// Session of the request. The call counts as a use.
#[utoipa::path(get, path = "/admin/v1/session", tag = "session", operation_id = "get_session",
    responses((status = 200, description = "The session.", body = Session)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(caller: Caller, session: Option<Extension<Signed>>) -> Result<Json<Session>, ApiError> {
    let Extension(session) = session.ok_or_else(no_session)?;
    Ok(Json(Session::new(&caller, session.left.as_secs())))
}

/// Way out at the identity provider.
#[derive(Serialize, ToSchema)]
pub(crate) struct SignedOut {
    /// URL of the provider that the browser opens to sign out there, too.
    url: String,
}

/// Signs out: the session and its event streams end. With admin.oidc.sign_out_there, the answer leads on to the provider.
#[utoipa::path(delete, path = "/admin/v1/session", tag = "session", operation_id = "delete_session",
    responses((status = 204, description = "The session has ended."),
        (status = 200, description = "The session has ended, and the browser goes on to the provider.", body = SignedOut)),
    security(("admin_key" = ["viewer"])))]
pub(crate) async fn delete(
    State(admin): State<Admin>,
    headers: HeaderMap,
    session: Option<Extension<Signed>>,
) -> Result<Response, ApiError> {
    let Extension(session) = session.ok_or_else(no_session)?;
    let kept = admin.renewals.forget(session.place);
    admin.sessions.close(session.place);
    let cookie = clear(&cookie_of(&headers), false).unwrap_or(HeaderValue::from_static(""));
    let url = match (&session.holder, kept) {
        (Holder::Person(person), Some((grant, home))) => way_out(&admin, &person.provider, grant, &home).await,
        _ => None,
    };
    let cookie = [(header::SET_COOKIE, cookie)];
    Ok(match url {
        Some(url) => (cookie, Json(SignedOut { url })).into_response(),
        None => (StatusCode::NO_CONTENT, cookie).into_response(),
    })
}

/// URL at which the person of a session that has ended signs out at the provider, where the config wants that. The tokens are revoked in
/// any case.
async fn way_out(admin: &Admin, signed_in_at: &[String; 2], grant: Option<Grant>, home: &str) -> Option<String> {
    let serving = admin.gateway.serving();
    let oidc = serving.config.admin.oidc.as_ref()?;
    if *signed_in_at != oidc.provider.registration() {
        return None;
    }
    let mut url = None;
    if oidc.sign_out {
        let endpoints = admin.directions.of(&oidc.provider).await.ok();
        url = endpoints.and_then(|endpoints| oidc.provider.sign_out_url(&endpoints, grant.as_ref(), home));
    }
    grant.into_iter().for_each(|grant| revoke(admin, grant));
    url
}
