//! Filter of the log, changed while the gateway runs.

use axum::extract::State;
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::audit::Did;
use crate::error::ApiError;
use crate::extract::Body;
use crate::state::Admin;

/// Longest filter, in bytes.
const FILTER_BYTES_MAX: usize = 1000;

/// Log filter.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogLevel {
    /// Filter: error, warn, info, debug, trace, or directives in tracing's syntax.
    #[schema(min_length = 1, max_length = 1000, example = "info")]
    level: String,
}

/// Log filter in force.
#[utoipa::path(get, path = "/admin/v1/log-level", tag = "log", operation_id = "get_log_level",
    responses((status = 200, description = "The log filter.", body = LogLevel)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn get_level(State(admin): State<Admin>) -> Json<LogLevel> {
    Json(LogLevel { level: admin.log.get() })
}

/// Sets the log filter until log.level of the config changes or the process ends.
#[utoipa::path(put, path = "/admin/v1/log-level", tag = "log", operation_id = "set_log_level", request_body = LogLevel,
    responses((status = 200, description = "The log filter is set.", body = LogLevel)), security(("admin_key" = ["operator"])))]
pub(crate) async fn set_level(
    State(admin): State<Admin>,
    Body(new): Body<LogLevel>,
) -> Result<(Extension<Did>, Json<LogLevel>), ApiError> {
    if new.level.is_empty() || new.level.len() > FILTER_BYTES_MAX {
        return Err(ApiError::invalid("level", format!("level: must have from 1 to {FILTER_BYTES_MAX} bytes")));
    }
    admin.log.set(&new.level).map_err(|why| ApiError::invalid("level", format!("level: {why}")))?;
    let now = LogLevel { level: admin.log.get() };
    Ok((Did::set(&now), Json(now)))
}
