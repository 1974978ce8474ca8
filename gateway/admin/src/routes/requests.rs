//! Requests in flight.

use axum::Json;
use axum::extract::State;
use penstock_proxy::live_requests::Live;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::error::ApiError;
use crate::extract::{Id, Page, Params, bounded_limit};
use crate::state::Admin;

/// Request in flight.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Request {
    /// Id of the request in this API.
    id: String,
    /// Request id in headers and logs. Clients may choose it, so it need not be unique.
    request_id: String,
    route: String,
    /// Id of the API key.
    key: Option<String>,
    team: Option<String>,
    user: Option<String>,
    /// Address of the client.
    client: Option<String>,
    model: Option<String>,
    stream: Option<bool>,
    /// Target that answers, where the model has several targets.
    target: Option<String>,
    /// Whether no client is connected for it: a batch line, or a response in the background.
    background: bool,
    /// Whether the answer has begun.
    answering: bool,
    /// Arrival in Unix milliseconds.
    started_ms: u64,
    age_ms: u64,
    /// Prompt tokens; 0 until known.
    prompt_tokens: u64,
    /// Completion tokens so far.
    completion_tokens: u64,
}

impl From<&Live> for Request {
    fn from(live: &Live) -> Self {
        let (prompt_tokens, completion_tokens) = live.tokens();
        Self {
            id: live.id.to_string(),
            request_id: live.about.request_id.clone(),
            route: live.about.route.to_owned(),
            key: live.key.clone(),
            team: live.team.clone(),
            user: live.user.clone(),
            client: live.about.client.clone(),
            model: live.model().map(str::to_owned),
            stream: live.stream(),
            target: live.target().map(str::to_owned),
            background: live.about.background,
            answering: live.is_answering(),
            started_ms: live.started_ms,
            age_ms: live.age().as_millis() as u64,
            prompt_tokens,
            completion_tokens,
        }
    }
}

/// Filter of requests.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    /// Largest number of requests in the answer. Default: 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// Cursor: `next` of the page before.
    #[param(pattern = "^[0-9]{1,18}$")]
    after: Option<String>,
    /// Only requests of this API key.
    #[param(max_length = 256)]
    key: Option<String>,
    /// Only requests of this team.
    #[param(max_length = 256)]
    team: Option<String>,
    /// Only requests for this model.
    #[param(max_length = 256)]
    model: Option<String>,
    /// Only requests with this id in headers and logs.
    #[param(max_length = 256)]
    request_id: Option<String>,
}

impl Filter {
    fn takes(&self, live: &Live) -> bool {
        let is =
            |wanted: &Option<String>, have: Option<&str>| wanted.as_deref().is_none_or(|wanted| have == Some(wanted));
        is(&self.key, live.key.as_deref())
            && is(&self.team, live.team.as_deref())
            && is(&self.model, live.model())
            && is(&self.request_id, Some(&live.about.request_id))
    }
}

/// Number of an id, which is decimal.
fn number(text: &str) -> Option<u64> {
    (text.len() <= 18 && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok()).flatten()
}

/// Requests in flight, oldest first.
#[utoipa::path(get, path = "/admin/v1/requests", tag = "requests", operation_id = "list_requests", params(Filter),
    responses((status = 200, description = "Requests.", body = Page<Request>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(
    State(admin): State<Admin>,
    Params(filter): Params<Filter>,
) -> Result<Json<Page<Request>>, ApiError> {
    let limit = bounded_limit(filter.limit)?;
    let after = match &filter.after {
        Some(text) => number(text).ok_or_else(|| ApiError::invalid("after", "after: not the next of a page"))?,
        None => 0,
    };
    let live = admin.gateway.live.list();
    let mut wanted = live.iter().filter(|live| live.id > after && filter.takes(live));
    let data: Vec<Request> = wanted.by_ref().take(limit).map(|live| Request::from(&**live)).collect();
    let more = wanted.next().is_some();
    let next = data.last().filter(|_| more).map(|last| last.id.clone());
    Ok(Json(Page { data, next }))
}

fn gone() -> ApiError {
    ApiError::not_found("No request of that id is in flight.")
}

/// One request in flight.
#[utoipa::path(get, path = "/admin/v1/requests/{id}", tag = "requests", operation_id = "get_request",
    params(("id" = String, Path, max_length = 18, description = "Id of the request in this API.")),
    responses((status = 200, description = "The request.", body = Request)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(State(admin): State<Admin>, Id(id): Id) -> Result<Json<Request>, ApiError> {
    let live = number(&id).and_then(|id| admin.gateway.live.find(id)).ok_or_else(gone)?;
    Ok(Json(Request::from(&*live)))
}

/// Cancelled request.
#[derive(Serialize, ToSchema)]
pub(crate) struct Cancelled {
    /// State of the request before it was cancelled.
    cancelled: Request,
}

/// Cancels a request: its compute is freed at once, and the client gets an error.
#[utoipa::path(post, path = "/admin/v1/requests/{id}/cancel", tag = "requests", operation_id = "cancel_request",
    params(("id" = String, Path, max_length = 18, description = "Id of the request in this API.")),
    responses((status = 200, description = "The request is being cancelled.", body = Cancelled)), security(("admin_key" = ["operator"])))]
pub(crate) async fn cancel(State(admin): State<Admin>, Id(id): Id) -> Result<Json<Cancelled>, ApiError> {
    let live = number(&id).and_then(|id| admin.gateway.live.find(id)).ok_or_else(gone)?;
    let cancelled = Request::from(&*live);
    if admin.gateway.live.cancel(live.id) { Ok(Json(Cancelled { cancelled })) } else { Err(gone()) }
}
