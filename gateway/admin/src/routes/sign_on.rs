//! Sign-in at the console with an identity provider: the browser is sent there, and comes back with a code.
//!
//! ```text
//! page ─▶ POST /sign-on ─▶ cookie, URL of the provider ─▶ provider ─▶ /console/?code&state ─▶ page ─▶ POST /sign-on/answer ─▶ session
//! ```
//!
//! The way back from the provider is a navigation from another site, on which browsers send no `SameSite=Strict` cookie. It leads to the
//! page, which is a file and needs none; the page then hands the answer over itself. So both cookies are strict, both steps come from the
//! console's own origin, and the session's token is told to the page alone. Nothing in an answer of the provider says where the browser
//! goes next.
//!
//! A failed sign-in counts as a wrong key of its address; the audit log gets one a minute of those, and each of a person without a role.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use penstock_auth::IssuerConfig;
use penstock_auth::jwt::{Binding, CODE_BYTES_MAX, SignOnFault, SignedOn};
use penstock_base::clock;
use penstock_base::net::network_of;
use penstock_config::{AdminConfig, OIDC, OidcConfig};
use penstock_console::{HOME, Holder, LOGIN_LIFE, Login, Person, login_cookie_name, read, set_login};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::session::{SignedIn, is_secure, no_console, opened, random, who};
use crate::audit::Did;
use crate::error::{ApiError, Code, ErrorBody};
use crate::extract::Body;
use crate::gate::{Peer, Unnoted};
use crate::looks::revoke;
use crate::renewals::Kept;
use crate::sign_on::{away, caller};
use crate::state::Admin;

/// Longest state or issuer of an answer, in bytes.
const TEXT_BYTES_MAX: usize = 1024;

/// Identity provider of the console.
#[derive(Serialize, ToSchema)]
pub(crate) struct ProviderState {
    /// Name of the provider (admin.oidc.name, or its host); null: people sign in with admin keys alone.
    provider: Option<String>,
}

/// Beginning of a sign-in.
#[derive(Serialize, ToSchema)]
pub(crate) struct Begun {
    /// URL of the provider, which the browser opens.
    url: String,
    /// Value that the provider's answer repeats: the page takes an answer with another state for somebody else's.
    state: String,
}

/// Answer of the provider, as the browser has brought it.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Answer {
    /// Code that the provider redeems.
    #[schema(max_length = 4096)]
    code: Option<String>,
    /// Value that the sign-in was begun with.
    #[schema(max_length = 1024)]
    state: String,
    /// Issuer that the answer names (RFC 9207).
    #[schema(max_length = 1024)]
    iss: Option<String>,
    /// Error that the provider answers instead of a code, as access_denied.
    #[schema(max_length = 1024)]
    error: Option<String>,
    /// Text of the provider about its error.
    #[schema(max_length = 1024)]
    error_description: Option<String>,
}

/// Identity provider that people can sign in with.
#[utoipa::path(get, path = "/admin/v1/sign-on", tag = "session", operation_id = "get_sign_on",
    responses((status = 200, description = "The provider.", body = ProviderState)), security(()))]
pub(crate) async fn provider(State(admin): State<Admin>) -> Json<ProviderState> {
    let serving = admin.gateway.serving();
    let oidc = serving.config.admin.oidc.as_ref().filter(|_| serving.config.admin.console);
    Json(ProviderState { provider: oidc.map(|oidc| oidc.name.clone()) })
}

/// Begins a sign-in with the identity provider. The answer sets a cookie that binds the sign-in to the browser for ten minutes.
#[utoipa::path(post, path = "/admin/v1/sign-on", tag = "session", operation_id = "begin_sign_on",
    responses((status = 201, description = "The browser goes to the provider.", body = Begun),
        (status = 403, description = "Another page than the console's asks.", body = ErrorBody),
        (status = 404, description = "There is no identity provider, or the console is off.", body = ErrorBody),
        (status = 409, description = "The provider cannot send people back to this address.", body = ErrorBody),
        (status = 429, description = "Too many sign-ins are under way.", body = ErrorBody),
        (status = 503, description = "The provider cannot be used now.", body = ErrorBody)), security(()))]
pub(crate) async fn begin(
    State(admin): State<Admin>,
    Extension(Peer(peer)): Extension<Peer>,
    headers: HeaderMap,
) -> Response {
    let begun = async {
        let serving = admin.gateway.serving();
        let oidc = configured(&serving.config.admin)?;
        let redirect_url = redirect_url(oidc, &headers)?;
        let endpoints = admin.directions.of(&oidc.provider).await?;
        let (network, now) = (network_of(peer), Instant::now());
        let login = admin.logins.begin(oidc.provider.registration(), redirect_url, random()?, network, now);
        let full = || too_many("Too many sign-ins are under way: try again in a few minutes.");
        let login = login.ok_or_else(full)?;
        let url = oidc.provider.authorization_url(&endpoints, binding(&login));
        Ok(with_cookie(
            (StatusCode::CREATED, Json(Begun { url, state: login.state.clone() })).into_response(),
            &headers,
            &login.cookie,
        ))
    };
    // Nobody has done anything yet: the audit log gets the end of the sign-in.
    (Extension(Unnoted), begun.await.unwrap_or_else(|error: ApiError| error.into_response())).into_response()
}

/// Finishes a sign-in with the provider's answer: opens a session, as signing in with an admin key does.
#[utoipa::path(post, path = "/admin/v1/sign-on/answer", tag = "session", operation_id = "finish_sign_on", request_body = Answer,
    responses((status = 201, description = "The session is open.", body = SignedIn),
        (status = 403, description = "The answer belongs to no sign-in of this browser, the provider refuses it, or the person has no role here.", body = ErrorBody),
        (status = 404, description = "There is no identity provider, or the console is off.", body = ErrorBody),
        (status = 429, description = "Too many wrong answers from this address.", body = ErrorBody),
        (status = 503, description = "The provider cannot be used now.", body = ErrorBody)), security(()))]
pub(crate) async fn finish(
    State(admin): State<Admin>,
    Extension(Peer(peer)): Extension<Peer>,
    headers: HeaderMap,
    Body(answer): Body<Answer>,
) -> Response {
    if !admin.throttle.admits(peer, Instant::now()) {
        let error = too_many("Too many wrong keys or sign-ins came from this address.");
        return (Extension(Unnoted), error).into_response();
    }
    // A refused answer leaves the cookie: it may belong to a sign-in that goes on.
    match finished(&admin, &headers, answer).await {
        Ok(response) => with_cookie(response, &headers, ""),
        Err(Failed::Roleless(person)) => with_cookie(roleless(&person), &headers, ""),
        Err(Failed::Refused(message)) => {
            let is_noted = admin.throttle.wrong(peer, Instant::now());
            let error = ApiError::forbidden(message);
            if is_noted { error.into_response() } else { (Extension(Unnoted), error).into_response() }
        }
        Err(Failed::Other(error)) => (Extension(Unnoted), error).into_response(),
    }
}

/// End of a sign-in that opened no session.
enum Failed {
    /// Whoever sends the answer is nobody, for the reason that the message says.
    Refused(String),
    /// A person whom the provider has named, and who has no role here.
    Roleless(Person),
    /// A failure that says nothing about the sender.
    Other(ApiError),
}

impl From<ApiError> for Failed {
    fn from(error: ApiError) -> Self {
        Self::Other(error)
    }
}

async fn finished(admin: &Admin, headers: &HeaderMap, answer: Answer) -> Result<Response, Failed> {
    let serving = admin.gateway.serving();
    let oidc = configured(&serving.config.admin)?;
    own_origin(headers)?;
    bounded(&answer)?;
    let cookie = read(headers, &login_cookie(headers)).unwrap_or_default();
    let login = admin.logins.take(&answer.state, cookie, Instant::now());
    let login = login.filter(|login| login.provider == oidc.provider.registration());
    let unknown =
        "This answer belongs to no sign-in of this browser, was used before, or came too late: sign in again.";
    let login = login.ok_or_else(|| Failed::Refused(unknown.into()))?;
    let endpoints = admin.directions.of(&oidc.provider).await?;
    if !oidc.provider.is_answer_of(&endpoints, answer.iss.as_deref()) {
        return Err(Failed::Refused("The answer is not the configured identity provider's.".into()));
    }
    let code = match (&answer.error, &answer.code) {
        (Some(error), _) => return Err(Failed::Refused(declined(error, answer.error_description.as_deref()))),
        (None, None) => return Err(Failed::Refused("The identity provider's answer has no code.".into())),
        (None, Some(code)) => code,
    };
    let redeemed = oidc.provider.redeem(&endpoints, code, binding(&login), clock::unix_seconds()).await;
    let failed = |fault: SignOnFault| {
        tracing::warn!(issuer = oidc.provider.issuer, %fault, "a sign-in at the console has failed");
        match fault {
            SignOnFault::Away(_) => Failed::Other(away()),
            SignOnFault::Refused(code) => {
                Failed::Refused(format!("The identity provider refused the sign-in ({code})."))
            }
            SignOnFault::Token(why) => {
                Failed::Refused(format!("The identity provider's ID token is not accepted: {why}."))
            }
        }
    };
    let SignedOn { person, grant, unread } = redeemed.map_err(failed)?;
    let penstock_auth::jwt::Person { subject, name, groups, session, issued } = person;
    let person = Person { provider: login.provider, subject, name, groups, session, issued, began: login.began };
    // The config in force now, which may have changed while the provider was asked.
    let serving = admin.gateway.serving();
    let oidc = configured(&serving.config.admin)?;
    let Some(caller) = caller(oidc, &person) else {
        revoke(admin, grant);
        // Groups that could not be read may well have had a role.
        return Err(unread.map_or(Failed::Roleless(person), failed));
    };
    let kept = Some(Kept { grant, home: login.redirect_url });
    Ok(opened(admin, Holder::Person(Arc::new(person)), oidc.session, caller, headers, kept)?)
}

/// Answer for a person who has no role; the audit log gets who it was.
fn roleless(person: &Person) -> Response {
    let why = match person.groups.is_empty() {
        true => "the identity provider has named none (admin.oidc.groups_claim)",
        false => "ask for one (admin.oidc.roles)",
    };
    let error = ApiError::forbidden(format!(
        "You are signed in at the identity provider as {:?}, but none of your groups has a role here: {why}.",
        person.name
    ));
    let did = Did { target: Some(format!("{OIDC}{}", person.subject)), detail: who(Some(&person.name)) };
    (Extension(did), error).into_response()
}

/// Message of an error that the provider has answered; its text is shown as it is, on one line.
fn declined(error: &str, description: Option<&str>) -> String {
    let line = |text: &str| text.replace(|letter: char| letter.is_control(), " ");
    let more = description.map(|text| format!(": {}", line(text))).unwrap_or_default();
    format!("The identity provider did not sign you in ({}{more}).", line(error))
}

fn bounded(answer: &Answer) -> Result<(), ApiError> {
    let code = answer.code.as_ref().map_or(0, String::len);
    let texts = [Some(&answer.state), answer.iss.as_ref(), answer.error.as_ref(), answer.error_description.as_ref()];
    if code > CODE_BYTES_MAX || texts.into_iter().flatten().any(|text| text.len() > TEXT_BYTES_MAX) {
        return Err(ApiError::invalid("body", "The answer is longer than any provider's."));
    }
    Ok(())
}

fn binding(login: &Login) -> Binding<'_> {
    Binding { state: &login.state, nonce: &login.nonce, verifier: &login.verifier, redirect_url: &login.redirect_url }
}

pub(super) fn configured(config: &AdminConfig) -> Result<&OidcConfig, ApiError> {
    if !config.console {
        return Err(no_console());
    }
    config.oidc.as_ref().ok_or_else(|| ApiError::not_found("There is no identity provider (admin.oidc)."))
}

/// Origin of the request, if it is the console's own: pages of `admin.origins` have no part in sign-ins.
fn own_origin(headers: &HeaderMap) -> Result<String, ApiError> {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let (host, origin) = (text(header::HOST).unwrap_or_default(), text(header::ORIGIN));
    let own = origin.filter(|origin| origin.split_once("://").is_some_and(|(_, name)| name.eq_ignore_ascii_case(host)));
    let own = own.ok_or_else(|| ApiError::forbidden("Only the console's own page signs people in (Origin)."))?;
    Ok(own.to_ascii_lowercase())
}

/// URL of the console, as the page that asks has it in its origin.
fn redirect_url(oidc: &OidcConfig, headers: &HeaderMap) -> Result<String, ApiError> {
    let url = format!("{}{HOME}", own_origin(headers)?);
    match &oidc.redirect_url {
        Some(fixed) if *fixed != url => Err(ApiError::conflict(format!(
            "Open the console at {fixed}: the identity provider sends people back there."
        ))),
        _ if IssuerConfig::place(&url).is_err() => Err(ApiError::conflict(
            "Sign-in with the identity provider needs https, or a browser on the gateway's machine.",
        )),
        _ => Ok(url),
    }
}

fn login_cookie(headers: &HeaderMap) -> String {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    login_cookie_name(host)
}

/// Response that also sets the sign-in's cookie, or removes it where the secret is empty.
fn with_cookie(mut response: Response, headers: &HeaderMap, secret: &str) -> Response {
    let seconds = if secret.is_empty() { 0 } else { LOGIN_LIFE.as_secs() };
    let cookie: Option<HeaderValue> = set_login(&login_cookie(headers), secret, seconds, is_secure(headers));
    cookie.into_iter().for_each(|cookie| _ = response.headers_mut().append(header::SET_COOKIE, cookie));
    response
}

pub(super) fn too_many(message: &str) -> ApiError {
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, Code::TooManyRequests, message);
    ApiError { retry_after: Some(1), ..error }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(host: &'static str, origin: Option<&'static str>) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_static(host));
        origin.into_iter().for_each(|origin| _ = headers.insert(header::ORIGIN, HeaderValue::from_static(origin)));
        own_origin(&headers).ok()
    }

    #[test]
    fn only_the_own_page_signs_people_in() {
        let found = origin("GW.example:8081", Some("https://gw.example:8081"));
        assert_eq!(found.as_deref(), Some("https://gw.example:8081"));
        for other in ["https://gw.example", "https://gw.example:80", "null", "https://evil.example", "gw.example:8081"]
        {
            assert_eq!(origin("gw.example:8081", Some(other)), None, "{other}");
        }
        assert_eq!(origin("gw.example", None), None);
    }

    #[test]
    fn errors_of_the_provider_are_one_line_of_text() {
        let said = declined("access_denied", Some("<b>no</b>\r\nX: y"));
        assert_eq!(said, "The identity provider did not sign you in (access_denied: <b>no</b>  X: y).");
        assert_eq!(declined("x", None), "The identity provider did not sign you in (x).");
    }

    #[test]
    fn an_answer_is_bounded() {
        let answer = |length: usize| Answer {
            code: Some("c".repeat(length)),
            state: "s".into(),
            iss: None,
            error: None,
            error_description: None,
        };
        assert!(bounded(&answer(CODE_BYTES_MAX)).is_ok() && bounded(&answer(CODE_BYTES_MAX + 1)).is_err());
        let long = Some("x".repeat(TEXT_BYTES_MAX + 1));
        for answer in [
            Answer { state: "x".repeat(TEXT_BYTES_MAX + 1), ..answer(1) },
            Answer { iss: long.clone(), ..answer(1) },
            Answer { error: long.clone(), ..answer(1) },
            Answer { error_description: long, ..answer(1) },
        ] {
            assert!(bounded(&answer).is_err());
        }
    }
}
