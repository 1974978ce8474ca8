//! Limits, whether they act, and the state of their counters.

use axum::Json;
use axum::extract::State;
use penstock_govern::{Limit as Rule, Unit};
use penstock_governed::{CounterState, LimitState};
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::extract::{Id, ListQuery, Page, Params};
use crate::state::Admin;

/// Limit of the config.
#[derive(Serialize, ToSchema)]
pub(crate) struct Limit {
    id: String,
    /// Scope of the limit: keys and teams that name it (named), everyone, or anonymous requests.
    applies: String,
    /// Dimension of the counters: key, team, user, model, provider, address, all.
    by: String,
    /// Models whose requests count; empty: all.
    models: Vec<String>,
    /// Measures of the limit, with their maxima.
    measures: Vec<Measure>,
    effective: bool,
    /// Reason why the limit has no effect, or less than its config suggests.
    why_not: Option<String>,
    /// Behaviour while the shared store does not answer: open or closed.
    on_store_failure: String,
}

/// Measure of a limit.
#[derive(Serialize, ToSchema)]
pub(crate) struct Measure {
    /// Name of the measure, as tokens_per_minute, in_flight, usd_per_month.
    measure: &'static str,
    /// Maximum; money in dollars.
    max: f64,
}

/// Counter of one measure and subject.
#[derive(Serialize, ToSchema)]
pub(crate) struct Counter {
    /// Position of the counter in the list.
    id: String,
    /// Subject: id of a key, team, user, model or provider, an address; * for all subjects beyond those counted one by one.
    subject: String,
    measure: &'static str,
    /// Maximum; money in dollars.
    max: f64,
    /// Amount used, reservations included.
    used: f64,
    /// Part of `used` that open requests have reserved.
    reserved: f64,
    remaining: f64,
    /// Milliseconds until the counter is empty if nothing more is used.
    reset_ms: u64,
}

/// Word of the config for a value.
fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

impl From<LimitState> for Limit {
    fn from(LimitState { limit, why_not }: LimitState) -> Self {
        let Rule { id, measures, by, applies, models, on_store_failure, .. } = &*limit;
        let measure = |measure: &penstock_govern::Measure| Measure {
            measure: measure.name(),
            max: if measure.unit == Unit::NanoUsd { measure.max as f64 / 1e9 } else { measure.max as f64 },
        };
        Self {
            id: id.to_string(),
            applies: word(applies),
            by: by.name().to_owned(),
            models: models.clone(),
            measures: measures.iter().map(measure).collect(),
            effective: why_not.is_none(),
            why_not,
            on_store_failure: word(on_store_failure),
        }
    }
}

impl From<CounterState> for Counter {
    fn from(state: CounterState) -> Self {
        let CounterState { subject, measure, max, used, reserved, reset_ms } = state;
        let remaining = (max - used).max(0.0);
        Self { id: format!("{subject} {measure}"), subject, measure, max, used, reserved, remaining, reset_ms }
    }
}

/// Limits, by id.
#[utoipa::path(get, path = "/admin/v1/limits", tag = "limits", operation_id = "list_limits", params(ListQuery),
    responses((status = 200, description = "Limits.", body = Page<Limit>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(
    State(admin): State<Admin>,
    Params(query): Params<ListQuery>,
) -> Result<Json<Page<Limit>>, ApiError> {
    Page::cut(admin.gateway.limits().into_iter().map(Limit::from).collect(), &query, |limit: &Limit| &limit.id)
}

fn found(admin: &Admin, id: &str) -> Result<LimitState, ApiError> {
    let found = admin.gateway.limits().into_iter().find(|state| *state.limit.id == *id);
    found.ok_or_else(|| ApiError::not_found("There is no limit of that id."))
}

/// One limit.
#[utoipa::path(get, path = "/admin/v1/limits/{id}", tag = "limits", operation_id = "get_limit",
    params(("id" = String, Path, max_length = 256, description = "Id of the limit.")),
    responses((status = 200, description = "The limit.", body = Limit)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(State(admin): State<Admin>, Id(id): Id) -> Result<Json<Limit>, ApiError> {
    found(&admin, &id).map(|state| Json(state.into()))
}

/// Counters of a limit that are in use at this gateway, each with the use by all gateways where they share it.
#[utoipa::path(get, path = "/admin/v1/limits/{id}/counters", tag = "limits", operation_id = "list_counters",
    params(("id" = String, Path, max_length = 256, description = "Id of the limit."), ListQuery),
    responses((status = 200, description = "Counters.", body = Page<Counter>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn counters(
    State(admin): State<Admin>,
    Id(id): Id,
    Params(query): Params<ListQuery>,
) -> Result<Json<Page<Counter>>, ApiError> {
    let limit = found(&admin, &id)?.limit;
    let counters = admin.gateway.governor.counters_together(&limit).await;
    Page::cut(counters.into_iter().map(Counter::from).collect(), &query, |counter: &Counter| &counter.id)
}
