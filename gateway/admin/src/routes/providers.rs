//! Providers, and the state of their keys and targets.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use penstock_provider::Provider as Running;
use penstock_proxy::serving::Serving;
use serde::Serialize;
use utoipa::ToSchema;

use super::models::Target;
use crate::error::ApiError;
use crate::extract::{Id, ListQuery, Page, Params};
use crate::state::Admin;

/// Provider.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Provider {
    id: String,
    /// Protocol of the provider.
    protocol: &'static str,
    /// Base URL of the provider.
    url: String,
    /// Number of keys of the provider.
    keys: usize,
    /// Number of keys that are paused because the provider refused or limited them.
    keys_resting: usize,
    in_flight: usize,
    in_flight_max: usize,
    /// Models that the config names.
    models: Vec<String>,
    /// Models that the provider reported.
    discovered: Vec<String>,
    /// Requests since the gateway began, by outcome.
    outcomes: BTreeMap<&'static str, u64>,
    /// Models of the provider that are targets of [[models]].
    targets: Vec<Target>,
}

fn provider(serving: &Serving, running: &Arc<Running>) -> Provider {
    let (state, id) = (running.state(), running.id().to_owned());
    let is_its = |target: &str| target.strip_prefix(&id).is_some_and(|rest| rest.starts_with('/'));
    let targets = serving.models().targets().into_iter().filter(|target| is_its(&target.id));
    Provider {
        targets: targets.map(Target::from).collect(),
        protocol: state.protocol.name(),
        url: state.url,
        keys: state.keys,
        keys_resting: state.keys_resting,
        in_flight: state.in_flight,
        in_flight_max: state.in_flight_max,
        models: state.models,
        discovered: state.found,
        outcomes: running.counts().each().collect(),
        id,
    }
}

/// All providers.
pub(crate) fn all(admin: &Admin) -> Vec<Provider> {
    let serving = admin.gateway.serving();
    serving.providers().iter().map(|running| provider(&serving, running)).collect()
}

/// Providers, by id.
#[utoipa::path(get, path = "/admin/v1/providers", tag = "providers", operation_id = "list_providers", params(ListQuery),
    responses((status = 200, description = "Providers.", body = Page<Provider>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(
    State(admin): State<Admin>,
    Params(query): Params<ListQuery>,
) -> Result<Json<Page<Provider>>, ApiError> {
    Page::cut(all(&admin), &query, |provider| &provider.id)
}

/// One provider.
#[utoipa::path(get, path = "/admin/v1/providers/{id}", tag = "providers", operation_id = "get_provider",
    params(("id" = String, Path, max_length = 256, description = "Id of the provider.")),
    responses((status = 200, description = "The provider.", body = Provider)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(State(admin): State<Admin>, Id(id): Id) -> Result<Json<Provider>, ApiError> {
    let serving = admin.gateway.serving();
    let found = serving.providers().iter().find(|running| running.id() == id);
    found
        .map(|running| Json(provider(&serving, running)))
        .ok_or_else(|| ApiError::not_found("There is no provider of that id."))
}
