//! State of the gateway as a whole.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, header};
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::keys::Caller;
use crate::state::Admin;

/// Liveness of the process.
#[derive(Serialize, ToSchema)]
pub(crate) struct Health {
    /// Always "ok".
    status: &'static str,
}

/// Liveness: answers while the process runs, and needs no key.
#[utoipa::path(get, path = "/admin/v1/health", tag = "state", operation_id = "health",
    responses((status = 200, description = "The process answers.", body = Health)), security(()))]
pub(crate) async fn health() -> Json<Health> {
    Json(Health { status: "ok" })
}

/// Readiness of the gateway.
#[derive(Serialize, ToSchema)]
pub(crate) struct Ready {
    ready: bool,
    /// Models that are not ready, with the reason.
    unready: Vec<String>,
}

/// Readiness: whether every model can be served now.
#[utoipa::path(get, path = "/admin/v1/ready", tag = "state", operation_id = "ready",
    responses((status = 200, description = "Readiness, with reasons.", body = Ready)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn ready(State(admin): State<Admin>) -> Json<Ready> {
    let unready = admin.gateway.serving().unready();
    Json(Ready { ready: unready.is_empty(), unready })
}

/// State of the gateway as a whole.
#[derive(Serialize, ToSchema)]
pub(crate) struct Status {
    /// Version of the program.
    version: &'static str,
    pid: u32,
    /// Start of the process in Unix milliseconds.
    started_ms: u64,
    uptime_seconds: u64,
    /// Address of the data port.
    listen: String,
    /// True if the data port speaks TLS.
    tls: bool,
    /// True if requests need an API key. Without keys, every client that can connect may use everything.
    keys_required: bool,
    requests_in_flight: usize,
    models: usize,
    providers: usize,
    workers: usize,
    workers_ready: usize,
    /// Models that are not ready, with the reason.
    unready: Vec<String>,
    config_version: u64,
    /// Config keys whose value waits for an upgrade or a restart.
    config_pending: Vec<String>,
    limits: usize,
    /// Limits that have no effect, or less than their config suggests.
    limits_ineffective: Vec<String>,
    store: Store,
}

/// Counts of the store.
#[derive(Serialize, ToSchema)]
pub(crate) struct Store {
    commits: u64,
    writes: u64,
    commit_seconds: f64,
    /// Operations that failed.
    errors: u64,
}

/// Version, uptime, listeners, models and pools, and models that are not ready.
#[utoipa::path(get, path = "/admin/v1/status", tag = "state", operation_id = "status",
    responses((status = 200, description = "The gateway as a whole.", body = Status)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn status(State(admin): State<Admin>) -> Result<Json<Status>, ApiError> {
    let (config_version, config_pending) =
        super::config::beside(&admin, |live| (live.current().0, live.pending())).await?;
    let (limits, stats) = (admin.gateway.limits(), admin.store.stats());
    let serving = admin.gateway.serving();
    let config = &serving.config;
    let workers: Vec<_> = super::workers::all(&admin);
    Ok(Json(Status {
        version: env!("CARGO_PKG_VERSION"),
        pid: std::process::id(),
        started_ms: admin.began_ms,
        uptime_seconds: admin.began.elapsed().as_secs(),
        listen: config.listen.to_string(),
        tls: config.tls.is_some(),
        keys_required: !admin.gateway.guard.is_open(&serving.identity),
        requests_in_flight: admin.gateway.live.list().len(),
        models: serving.models().listed().len(),
        providers: serving.providers().len(),
        workers: workers.len(),
        workers_ready: workers.iter().filter(|worker| worker.is_ready()).count(),
        unready: serving.unready(),
        config_version,
        config_pending,
        limits: limits.len(),
        limits_ineffective: limits
            .iter()
            .filter(|state| state.why_not.is_some())
            .map(|state| state.limit.id.to_string())
            .collect(),
        store: Store {
            commits: stats.commits,
            writes: stats.writes,
            commit_seconds: stats.commit_seconds,
            errors: stats.errors,
        },
    }))
}

/// Admin key of a request.
#[derive(Serialize, ToSchema)]
pub(crate) struct Whoami {
    /// Id of the admin key.
    key: String,
    #[schema(value_type = super::RoleName)]
    role: &'static str,
}

/// Admin key of the request, and its role.
#[utoipa::path(get, path = "/admin/v1/whoami", tag = "state", operation_id = "whoami",
    responses((status = 200, description = "The key.", body = Whoami)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn whoami(caller: Caller) -> Json<Whoami> {
    Json(Whoami { key: caller.key, role: caller.role.name() })
}

/// Metrics of the data port, as Prometheus text.
#[utoipa::path(get, path = "/admin/v1/metrics", tag = "state", operation_id = "metrics",
    responses((status = 200, description = "Prometheus text.", body = String, content_type = "text/plain")),
    security(("admin_key" = ["viewer"])))]
pub(crate) async fn metrics(State(admin): State<Admin>) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], admin.gateway.render_metrics()).into_response()
}

/// OpenAPI document of this API.
#[utoipa::path(get, path = "/admin/v1/openapi.json", tag = "state", operation_id = "openapi",
    responses((status = 200, description = "OpenAPI 3.1.", body = serde_json::Value)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn document(State(admin): State<Admin>) -> Result<Response, ApiError> {
    let kind = HeaderValue::from_static("application/json");
    Ok(([(header::CONTENT_TYPE, kind)], admin.document.clone()).into_response())
}
