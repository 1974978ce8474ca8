//! Sign-out of people at their identity provider, which tells the gateway itself: the sessions that were opened before it end.
//!
//! The call comes without a session or a key; what vouches for it is the provider's signature. Wrong tokens count as wrong keys of their
//! address, and one that was right is taken whatever else came from there: behind a proxy, all callers have one address. Sessions belong to
//! one process, so of several gateways each has to be told.

use std::time::Instant;

use axum::extract::State;
use axum::extract::rejection::FormRejection;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Form, Json};
use penstock_auth::jwt::{LOGOUT_BYTES_MAX, SignOnFault};
use penstock_base::clock;
use penstock_config::OIDC;
use penstock_console::SignOut;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::sign_on::{configured, too_many};
use crate::audit::Did;
use crate::error::{ApiError, ErrorBody};
use crate::gate::{Peer, Unnoted};
use crate::sign_on::away;
use crate::state::Admin;

/// Most tokens that are checked at once.
pub(crate) const CHECKS_MAX: usize = 4;

/// Message of the provider that somebody has signed out there.
#[derive(Deserialize, ToSchema)]
pub(crate) struct Told {
    /// Logout token.
    #[schema(max_length = 16384)]
    logout_token: String,
}

/// Sessions that a sign-out has ended.
#[derive(Serialize, ToSchema)]
pub(crate) struct Ended {
    /// Number of the sessions.
    sessions: usize,
}

/// Takes a logout token of the identity provider, which calls it itself, and ends the sessions of whoever has signed out there.
#[utoipa::path(post, path = "/admin/v1/sign-on/logout", tag = "session", operation_id = "end_sign_on",
    request_body(content = Told, content_type = "application/x-www-form-urlencoded"),
    responses((status = 200, description = "The sessions have ended, if there were any.", body = Ended),
        (status = 400, description = "There is no logout token, or it is not one of the provider for this gateway.", body = ErrorBody),
        (status = 404, description = "There is no identity provider, or the console is off.", body = ErrorBody),
        (status = 429, description = "Too many wrong tokens came from this address.", body = ErrorBody),
        (status = 503, description = "The provider cannot be used now.", body = ErrorBody)), security(()))]
pub(crate) async fn sign_off(
    State(admin): State<Admin>,
    Extension(Peer(peer)): Extension<Peer>,
    told: Result<Form<Told>, FormRejection>,
) -> Response {
    // What is no token takes no place, and holds no memory while it waits for one.
    let may_be_one = told.as_ref().is_ok_and(|Form(told)| told.logout_token.len() <= LOGOUT_BYTES_MAX);
    let _check = if may_be_one { Some(admin.sign_offs.acquire().await) } else { None };
    match ended(&admin, told).await {
        Ok((ended, did)) if ended.sessions > 0 => (Extension(did), Json(ended)).into_response(),
        Ok((ended, _)) => (Extension(Unnoted), Json(ended)).into_response(),
        Err(Failed::Token(message)) => {
            let now = Instant::now();
            let is_slowed = !admin.throttle.admits(peer, now);
            let is_noted = admin.throttle.wrong(peer, now) && !is_slowed;
            let error = match is_slowed {
                true => too_many("Too many wrong keys or tokens came from this address."),
                false => ApiError::invalid("logout_token", message),
            };
            if is_noted { error.into_response() } else { (Extension(Unnoted), error).into_response() }
        }
        Err(Failed::Other(error)) => (Extension(Unnoted), error).into_response(),
    }
}

/// Reason why a call ends no session.
enum Failed {
    /// Call without a token of the provider, with the message for whoever sent it.
    Token(String),
    /// Failure that says nothing about the sender.
    Other(ApiError),
}

impl From<ApiError> for Failed {
    fn from(error: ApiError) -> Self {
        Self::Other(error)
    }
}

async fn ended(admin: &Admin, told: Result<Form<Told>, FormRejection>) -> Result<(Ended, Did), Failed> {
    let serving = admin.gateway.serving();
    let oidc = configured(&serving.config.admin)?;
    let Form(told) =
        told.map_err(|fault| Failed::Token(format!("There is none in the form: {}.", fault.body_text())))?;
    let endpoints = admin.directions.of(&oidc.provider).await?;
    let now = clock::unix_seconds();
    let read = oidc.provider.signed_out(&endpoints, &admin.provider_keys, &told.logout_token, now).await;
    let out = read.map_err(|fault| match fault {
        SignOnFault::Token(why) => Failed::Token(format!("The logout token is not accepted: {why}.")),
        SignOnFault::Away(_) | SignOnFault::Refused(_) => Failed::Other(away()),
    })?;
    let (provider, subject, session) = (oidc.provider.registration(), out.subject.as_deref(), out.session.as_deref());
    let sign_out = SignOut { provider: &provider, subject, session, at: out.at };
    let sessions = admin.sessions.sign_out(sign_out, Instant::now());
    let target = subject.map(|subject| format!("{OIDC}{subject}"));
    Ok((Ended { sessions }, Did { target, detail: json!({ "sessions": sessions, "session": session }) }))
}
