//! Dry run of a request through the plugins of the config in force, for people who wrote them. Nothing is sent, counted or logged.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Method};
use penstock_proto::ErrorKind;
use penstock_store::Store;
use penstock_types::Surface;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::gateway::Gateway;
pub use crate::plugins::dry_run::{End, Outcome, Report, Step, View};
use penstock_auth::Principal;
use penstock_auth::route::Route;
use penstock_base::error::Failure;
use penstock_http::Body;
use penstock_http::exchange::new_request_id;
use penstock_upstream::call::Call;

/// Begin of the ids of people at the console, whose requests no API key makes.
const CONSOLE: &str = "console:";

/// Request to try.
pub struct Tried {
    /// Path and query, as the data port is asked.
    pub target: String,
    /// Header fields of the request; credentials in them are dropped.
    pub headers: HeaderMap,
    /// Body of the request.
    pub body: Bytes,
    /// Id of the key that the request comes with; `None`: no key.
    pub key: Option<String>,
}

/// Part of a body of `/v1/responses` that names stored turns.
#[derive(Deserialize)]
struct Turns {
    previous_response_id: Option<IgnoredAny>,
    conversation: Option<IgnoredAny>,
}

/// Runs the plugins on a request.
///
/// # Errors
/// The request would be refused before any plugin sees it, or its path or key is none that plugins meet.
pub async fn run(gateway: &Gateway, store: &dyn Store, tried: Tried) -> Result<Report, Failure> {
    let Route::Ask(ask) = Route::parse(&Method::POST, &tried.target)? else {
        let message = "No plugins run for requests to this path.";
        return Err(Failure::new(ErrorKind::InvalidRequest, message).param("path"));
    };
    let serving = gateway.serving();
    let principal = match tried.key.as_deref() {
        None => Arc::default(),
        Some(key) => match key.strip_prefix(CONSOLE) {
            Some(id) => Arc::new(Principal::console(id, Vec::new())),
            None => {
                let known = gateway.guard.recall(&serving.identity, store, key, ask.surface).await;
                known.map_err(|failure| failure.param("key"))?
            }
        },
    };
    if ask.surface == Surface::Responses
        && let Ok(turns) = serde_json::from_slice::<Turns>(&tried.body)
        && (turns.previous_response_id.is_some() || turns.conversation.is_some())
    {
        let message =
            "A dry run does not load stored turns (previous_response_id, conversation): write them into input.";
        return Err(Failure::new(ErrorKind::InvalidRequest, message).param("body"));
    }
    let body = Body { bytes: tried.body, lease: gateway.bodies.lease() };
    let call = Call::new(ask, body, new_request_id(), tried.headers, penstock_dialects::decode).await?;
    Ok(serving.plugins.dry_run(&principal, call).await)
}
