//! Audit of changes and refusals: one event each in the store's audit log, and a line in the log.
//!
//! An event is written when its change has been made or refused. A change stands even where the store cannot take the
//! event: an operator must be able to cancel a request while the disk is full. The log then has the whole event.

use std::net::IpAddr;
use std::time::Duration;

use axum::Extension;
use http::{Method, StatusCode};
use penstock_base::clock;
use penstock_store::{AUDIT_DETAIL_BYTES_MAX, AuditEvent, AuditId};
use serde::Serialize;
use serde_json::{Value, json};

use crate::state::State;

/// Timeout of the store for one event.
const NOTE_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest target, in bytes: a path may hold anything.
const TARGET_BYTES_MAX: usize = 256;

/// Detail of a route's change that the path does not tell, as an extension of its answer. Never a secret.
#[derive(Clone, Debug, Default)]
pub(crate) struct Did {
    /// Id of the object that was made.
    pub(crate) target: Option<String>,
    /// Values before and after the change.
    pub(crate) detail: Value,
}

impl Did {
    /// Detail of a value that was set, as it was asked for.
    pub(crate) fn set(what: impl Serialize) -> Extension<Self> {
        Extension(Self { target: None, detail: json!({ "after": what }) })
    }
}

/// Request as the audit log sees it.
pub(crate) struct Act {
    /// Id of the operation.
    pub(crate) operation: Option<String>,
    pub(crate) method: Method,
    pub(crate) peer: Option<IpAddr>,
    /// Variable part of the path.
    pub(crate) target: String,
}

impl Act {
    /// Whether the request's method changes something.
    pub(crate) fn changes(&self) -> bool {
        !matches!(self.method, Method::GET | Method::HEAD)
    }

    /// Name of the action as `noun.verb`: `cancel_request` is `request.cancel`.
    fn action(&self) -> String {
        match self.operation.as_deref().map(|id| id.split_once('_').unwrap_or((id, "api"))) {
            Some((verb, noun)) => format!("{noun}.{verb}"),
            None => "api.request".into(),
        }
    }
}

/// Writes an act and its outcome into the audit log.
pub(crate) async fn note(admin: &State, act: &Act, actor: &str, status: StatusCode, did: Did) {
    let outcome = match status.as_u16() {
        200..=399 => "done",
        401 | 403 | 429 => "denied",
        _ => "failed",
    };
    let mut detail = did.detail;
    if detail.is_null() {
        detail = Value::Object(serde_json::Map::new());
    }
    detail["status"] = status.as_u16().into();
    let mut detail = detail.to_string();
    if detail.len() > AUDIT_DETAIL_BYTES_MAX {
        detail = format!("{{\"status\":{},\"detail\":\"too long to be kept\"}}", status.as_u16());
    }
    let target: String = did.target.unwrap_or_else(|| act.target.clone());
    let event = AuditEvent {
        id: AuditId::random(),
        at: clock::unix_seconds(),
        actor: actor.to_owned(),
        address: act.peer.map(|peer| peer.to_string()).unwrap_or_default(),
        action: act.action(),
        target: target[..target.floor_char_boundary(TARGET_BYTES_MAX)].replace('\0', "\u{fffd}"),
        outcome: outcome.to_owned(),
        detail,
    };
    let AuditEvent { actor, address, action, target, outcome, detail, .. } = &event;
    tracing::info!(actor, address, action, target, outcome, detail, "admin action");
    let kept = tokio::time::timeout(NOTE_TIMEOUT, admin.store.note(event)).await;
    let why = match kept {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the store is too slow".to_owned(),
    };
    tracing::error!(why, "the audit log in the store did not take the admin action logged above");
}
