//! Names that requests can ask for, and their targets.

use axum::Json;
use axum::extract::State;
use penstock_proxy::serving::Serving;
use penstock_relay::models::{Entry, TargetState};
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::extract::{Id, ListQuery, Page, Params};
use crate::state::Admin;

/// Model name in requests.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Model {
    name: String,
    /// Aliases of the model.
    aliases: Vec<String>,
    ready: bool,
    /// Reason why the model cannot be served now.
    unready: Option<String>,
    /// Context length in tokens; 0: not known.
    context_tokens: u32,
    /// Whether a provider reported the model and the config does not name it.
    discovered: bool,
    /// Targets of the model. Empty: a pool or a provider's model under its own name.
    targets: Vec<Target>,
}

/// Target of a model.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Target {
    /// Id of a pool, or provider/model.
    id: String,
    /// Weight among the targets of `to`; 0: a fallback.
    weight: u32,
    breaker: Breaker,
    in_flight: usize,
    /// Reason that the target itself gives for taking no requests.
    unready: Option<String>,
}

/// State of a circuit breaker.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Breaker {
    /// Closed: requests go to the target.
    Closed,
    /// Half open: one request goes to the target as a probe.
    Probing,
    /// Last choice: other targets are preferred.
    OpenSoftly,
    /// Open: no requests go to the target.
    OpenHard,
}

impl From<TargetState> for Target {
    fn from(state: TargetState) -> Self {
        let TargetState { id, weight, level, in_flight, unready } = state;
        let breaker = match level {
            0 => Breaker::Closed,
            1 => Breaker::Probing,
            2 => Breaker::OpenSoftly,
            _ => Breaker::OpenHard,
        };
        Self { id: id.to_string(), weight, breaker, in_flight, unready }
    }
}

fn model(serving: &Serving, entry: &Entry) -> Model {
    let name = entry.name.to_string();
    let unready = entry.upstream.unready();
    let configured = serving.config.models.iter().find(|model| model.name == name);
    Model {
        aliases: configured.map(|model| model.aliases.clone()).unwrap_or_default(),
        ready: unready.is_none(),
        unready,
        context_tokens: entry.upstream.card().context_tokens,
        discovered: false,
        targets: serving.models().targets_of(&name).unwrap_or_default().into_iter().map(Target::from).collect(),
        name,
    }
}

/// All models.
pub(crate) fn all(serving: &Serving) -> Vec<Model> {
    let mut models: Vec<_> = serving.models().listed().iter().map(|entry| model(serving, entry)).collect();
    for card in serving.providers().iter().flat_map(|provider| provider.found_cards()) {
        if models.iter().all(|model| model.name != card.id) {
            models.push(Model {
                name: card.id,
                aliases: Vec::new(),
                ready: true,
                unready: None,
                context_tokens: card.context_tokens,
                discovered: true,
                targets: Vec::new(),
            });
        }
    }
    models
}

/// Model names that requests can use, by name.
#[utoipa::path(get, path = "/admin/v1/models", tag = "models", operation_id = "list_models", params(ListQuery),
    responses((status = 200, description = "Models.", body = Page<Model>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(
    State(admin): State<Admin>,
    Params(query): Params<ListQuery>,
) -> Result<Json<Page<Model>>, ApiError> {
    Page::cut(all(&admin.gateway.serving()), &query, |model| &model.name)
}

/// One model, by its name or an alias.
#[utoipa::path(get, path = "/admin/v1/models/{name}", tag = "models", operation_id = "get_model",
    params(("name" = String, Path, max_length = 256, description = "Name of the model; a slash in it is sent as %2F.")),
    responses((status = 200, description = "The model.", body = Model)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(State(admin): State<Admin>, Id(name): Id) -> Result<Json<Model>, ApiError> {
    let serving = admin.gateway.serving();
    let named = |model: &Model| model.name == name || model.aliases.contains(&name);
    let found = all(&serving).into_iter().find(named);
    found.map(Json).ok_or_else(|| ApiError::not_found("There is no model of that name."))
}
