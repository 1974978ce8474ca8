//! Audit log: changes, refusals and their actors.

use axum::Json;
use axum::extract::State;
use penstock_store::{AuditEvent, AuditFilter};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::error::ApiError;
use crate::extract::{Page, Paging, Params};
use crate::state::Admin;

/// Filter of audit events.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    #[serde(flatten)]
    #[param(ignore)]
    paging: Paging,
    /// Begin of the range in Unix seconds, included.
    #[param(minimum = 0, maximum = 9_999_999_999_i64)]
    from: Option<u64>,
    /// End of the range in Unix seconds, not included.
    #[param(minimum = 0, maximum = 9_999_999_999_i64)]
    until: Option<u64>,
    /// Id of an admin key.
    #[param(max_length = 256)]
    actor: Option<String>,
    /// Action; a trailing * matches any ending, as in key.*
    #[param(max_length = 256)]
    action: Option<String>,
    /// Id that the action was on.
    #[param(max_length = 256)]
    target: Option<String>,
    /// Outcome: done, denied or failed.
    #[param(max_length = 32)]
    outcome: Option<String>,
}

/// Audit event: an action on the admin API, done or attempted.
#[derive(Serialize, ToSchema)]
pub(crate) struct Event {
    id: String,
    /// Time in Unix seconds.
    at: u64,
    /// Id of the admin key; empty: the key was not known.
    actor: String,
    /// Address of the client; empty: a Unix socket.
    address: String,
    /// Action, as key.create.
    action: String,
    /// Id that the action was on.
    target: String,
    /// Outcome: done, denied or failed.
    outcome: String,
    /// State before and after, without secrets.
    #[schema(value_type = Object)]
    detail: Value,
}

impl From<AuditEvent> for Event {
    fn from(event: AuditEvent) -> Self {
        let AuditEvent { id, at, actor, address, action, target, outcome, detail } = event;
        let detail = serde_json::from_str(&detail).ok().filter(Value::is_object);
        let detail = detail.unwrap_or_else(|| Value::Object(serde_json::Map::new()));
        Self { id: id.to_string(), at, actor, address, action, target, outcome, detail }
    }
}

/// The audit log.
#[utoipa::path(get, path = "/admin/v1/audit", tag = "audit", operation_id = "list_audit", params(Paging, Filter),
    responses((status = 200, description = "Events.", body = Page<Event>)), security(("admin_key" = ["owner"])))]
pub(crate) async fn list(
    State(admin): State<Admin>,
    Params(query): Params<Filter>,
) -> Result<Json<Page<Event>>, ApiError> {
    let page = query.paging.page()?;
    let Filter { from, until, actor, action, target, outcome, .. } = query;
    let filter = AuditFilter { from, until, actor, action, target, outcome };
    Ok(Json(Page::of(admin.store.audit(&filter, &page).await?, Event::from, |event| &event.id)))
}
