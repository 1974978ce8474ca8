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
use sha2::{Digest, Sha256};

use crate::state::State;

/// Timeout of the store for one event.
const NOTE_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest target, in bytes: a path may hold anything.
const TARGET_BYTES_MAX: usize = 256;
/// Sizes above which the values of a detail that is too long are shortened, in bytes of JSON, and how many elements of a
/// list are kept then; each is tried after the one before.
const SHORTER: [(usize, usize); 4] = [(4096, 32), (1024, 8), (256, 2), (64, 0)];
/// Longest element of a shortened list, in bytes of JSON, and longest begin of a shortened text.
const PIECE_BYTES_MAX: usize = 300;

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
    let detail = kept(detail).to_string();
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

/// Detail within the bound of the store. Of one that is longer, fields of `before` and `after` that are the same are left out, and
/// long lists and texts become their size, digest and first elements: of two lists, those that the other has not.
fn kept(mut detail: Value) -> Value {
    let is_long = |detail: &Value| detail.to_string().len() > AUDIT_DETAIL_BYTES_MAX;
    if !is_long(&detail) {
        return detail;
    }
    let whole = digest(&detail);
    let [mut before, mut after] = ["before", "after"].map(|side| detail[side].take());
    if let (Value::Object(old), Value::Object(new)) = (&mut before, &mut after) {
        let mut same: Vec<String> =
            old.iter().filter(|(key, value)| new.get(*key) == Some(value)).map(|(key, _)| key.clone()).collect();
        same.sort();
        for key in &same {
            old.remove(key);
            new.remove(key);
        }
        if !same.is_empty() {
            detail["same"] = same.into();
        }
    }
    let put = |mut detail: Value, before: Value, after: Value| {
        for (side, value) in [("before", before), ("after", after)] {
            if let (Some(fields), true) = (detail.as_object_mut(), value.is_null()) {
                fields.remove(side);
            } else {
                detail[side] = value;
            }
        }
        detail
    };
    for (bytes_max, elements) in SHORTER {
        let tried = put(
            shorter(&detail, None, bytes_max, elements),
            shorter(&before, Some(&after), bytes_max, elements),
            shorter(&after, Some(&before), bytes_max, elements),
        );
        if !is_long(&tried) {
            return tried;
        }
    }
    json!({ "status": detail["status"], "person": shorter(&detail["person"], None, PIECE_BYTES_MAX, 0), "detail": "too long to be kept", "sha256": whole })
}

/// Value whose lists and texts above a size are shortened. `other`: the value at its place on the other side of a change.
fn shorter(value: &Value, other: Option<&Value>, bytes_max: usize, elements: usize) -> Value {
    match value {
        Value::Object(fields) => fields
            .iter()
            .map(|(key, value)| {
                (key.clone(), shorter(value, other.and_then(|other| other.get(key)), bytes_max, elements))
            })
            .collect::<serde_json::Map<_, _>>()
            .into(),
        value if value.to_string().len() <= bytes_max => value.clone(),
        Value::Array(items) => {
            let others: std::collections::HashSet<String> =
                other.and_then(Value::as_array).into_iter().flatten().map(Value::to_string).collect();
            let own = items.iter().map(Value::to_string).filter(|item| !others.contains(item));
            let mut first: Vec<Value> = own.take(elements).map(|item| begin(&item).into()).collect();
            // Without quotes around each text.
            first.iter_mut().for_each(|item| {
                if let Some(Value::String(text)) = item.as_str().and_then(|text| serde_json::from_str(text).ok()) {
                    *item = text.into();
                }
            });
            let name = if other.is_some_and(Value::is_array) { "only_here" } else { "first" };
            json!({ "count": items.len(), "sha256": digest(value), name: first })
        }
        Value::String(text) => json!({ "bytes": text.len(), "sha256": digest(value), "begin": begin(text) }),
        value => value.clone(),
    }
}

fn begin(text: &str) -> &str {
    &text[..text.floor_char_boundary(PIECE_BYTES_MAX)]
}

/// SHA-256 of a value's JSON.
fn digest(value: &Value) -> String {
    Sha256::digest(value.to_string()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_detail_keeps_what_has_changed() {
        let names = |from: usize| (from..from + 256).map(|at| format!("{at:0>250}").into()).collect::<Vec<Value>>();
        let side = |limit: &str, models: Vec<Value>| json!({ "id": "t", "limits": [limit], "allowed": { "models": models }, "note": "n" });
        let short = json!({ "before": side("a", Vec::new()), "after": side("b", Vec::new()), "status": 200 });
        assert_eq!(kept(short.clone()), short);
        // The list is there to fill the detail; what has changed is another field.
        let detail =
            kept(json!({ "before": side("a", names(0)), "after": side("b", names(0)), "status": 200, "person": "p" }));
        assert_eq!((&detail["before"], &detail["after"]), (&json!({ "limits": ["a"] }), &json!({ "limits": ["b"] })));
        assert_eq!(
            (&detail["status"], &detail["person"], &detail["same"]),
            (&200.into(), &"p".into(), &json!(["allowed", "id", "note"]))
        );
        // A list that has changed: its size, and what is new in it.
        let detail = kept(json!({ "before": side("a", names(0)), "after": side("b", names(2)), "status": 200 }));
        let [old, new] = ["before", "after"].map(|side| detail[side]["allowed"]["models"].clone());
        assert_eq!((&old["count"], &new["count"]), (&256.into(), &256.into()));
        assert_ne!(old["sha256"], new["sha256"]);
        assert_eq!(
            (&old["only_here"], &new["only_here"]),
            (&json!([names(0)[0], names(1)[0]]), &json!([names(256)[0], names(257)[0]]))
        );
        assert_eq!((&detail["before"]["limits"], &detail["after"]["limits"]), (&json!(["a"]), &json!(["b"])));
    }

    #[test]
    fn every_detail_is_within_the_bound() {
        let many = |count: usize, text: &str| {
            (0..count).map(|at| (format!("k{at}"), Value::from(text))).collect::<serde_json::Map<_, _>>()
        };
        for detail in [
            json!({ "changes": (0..9000).map(|at| format!("providers[{at}].key")).collect::<Vec<_>>(), "version": 3 }),
            json!({ "after": "\u{1}".repeat(100_000) }),
            json!({ "after": many(200, &"x".repeat(600)) }),
            json!({ "before": many(9000, "x"), "after": many(9000, "y"), "person": "p" }),
            json!({ "before": [["x".repeat(70_000)]], "after": null }),
        ] {
            let mut detail = detail;
            detail["status"] = 200.into();
            let short = kept(detail.clone());
            assert!(
                short.to_string().len() <= AUDIT_DETAIL_BYTES_MAX && short["status"] == 200,
                "{}",
                short.to_string().len()
            );
            assert!(short.to_string().contains("sha256"), "{short}");
        }
        let changes =
            json!({ "changes": (0..9000).map(|at| format!("providers[{at}].key")).collect::<Vec<_>>(), "version": 3 });
        let short = kept(changes);
        assert_eq!(
            (&short["version"], &short["changes"]["count"], &short["changes"]["first"][1]),
            (&3.into(), &9000.into(), &"providers[1].key".into())
        );
    }
}
