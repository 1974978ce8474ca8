//! Routes of the API. Each operation names the role that it needs in its `security`; an operation that names none keeps
//! the API from starting.

pub(crate) mod adapters;
pub(crate) mod audit;
pub(crate) mod batches;
pub(crate) mod config;
pub(crate) mod decisions;
mod edits;
pub(crate) mod entries;
pub(crate) mod files;
pub(crate) mod health;
pub(crate) mod keys;
pub(crate) mod limits;
pub(crate) mod live;
pub(crate) mod log_level;
pub(crate) mod models;
pub(crate) mod owners;
pub(crate) mod playground;
pub(crate) mod plugins;
pub(crate) mod pools;
pub(crate) mod providers;
pub(crate) mod requests;
pub(crate) mod session;
pub(crate) mod sign_off;
pub(crate) mod sign_on;
pub(crate) mod usage;
pub(crate) mod workers;

use http::StatusCode;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::document::Head;
use crate::error::{ApiError, Code};
use crate::state::Admin;

/// Every route, with the document.
pub(crate) fn all() -> OpenApiRouter<Admin> {
    OpenApiRouter::with_openapi(Head::openapi())
        .routes(routes!(adapters::list, adapters::create))
        .routes(routes!(adapters::get, adapters::replace, adapters::delete))
        .routes(routes!(audit::list))
        .routes(routes!(batches::list))
        .routes(routes!(batches::get))
        .routes(routes!(batches::cancel))
        .routes(routes!(config::get, config::apply))
        .routes(routes!(config::validate))
        .routes(routes!(config::reload))
        .routes(routes!(config::rollback))
        .routes(routes!(config::history))
        .routes(routes!(config::past))
        .routes(routes!(decisions::list))
        .routes(routes!(decisions::explain))
        .routes(routes!(entries::list, entries::create))
        .routes(routes!(entries::get, entries::replace, entries::update, entries::delete))
        .routes(routes!(files::list))
        .routes(routes!(files::get, files::delete))
        .routes(routes!(health::health))
        .routes(routes!(health::ready))
        .routes(routes!(health::status))
        .routes(routes!(health::whoami))
        .routes(routes!(health::metrics))
        .routes(routes!(health::document))
        .routes(routes!(keys::list, keys::create))
        .routes(routes!(keys::get, keys::update))
        .routes(routes!(keys::rotate))
        .routes(routes!(keys::revoke))
        .routes(routes!(limits::list))
        .routes(routes!(limits::get))
        .routes(routes!(limits::counters))
        .routes(routes!(live::live))
        .routes(routes!(log_level::get_level, log_level::set_level))
        .routes(routes!(models::list))
        .routes(routes!(models::get))
        .routes(routes!(owners::list_teams, owners::create_team))
        .routes(routes!(owners::get_team, owners::update_team, owners::delete_team))
        .routes(routes!(owners::list_users, owners::create_user))
        .routes(routes!(owners::get_user, owners::update_user, owners::delete_user))
        .routes(routes!(playground::ask))
        .routes(routes!(plugins::list))
        .routes(routes!(plugins::dry_run))
        .routes(routes!(pools::list))
        .routes(routes!(pools::replicas))
        .routes(routes!(providers::list))
        .routes(routes!(providers::get))
        .routes(routes!(requests::list))
        .routes(routes!(requests::get))
        .routes(routes!(requests::cancel))
        .routes(routes!(session::get, session::create, session::delete))
        .routes(routes!(sign_on::provider, sign_on::begin))
        .routes(routes!(sign_on::finish))
        .routes(routes!(sign_off::sign_off))
        .routes(routes!(usage::list))
        .routes(routes!(usage::csv))
        .routes(routes!(usage::entries))
        .routes(routes!(workers::list))
        .routes(routes!(workers::get))
        .routes(routes!(workers::drain))
        .routes(routes!(workers::resume))
        .routes(routes!(workers::restart))
        .routes(routes!(workers::role))
}

pub(crate) async fn no_such_path() -> ApiError {
    ApiError::not_found("There is no such URL here; /admin/v1/openapi.json lists those that are.")
}

pub(crate) async fn no_such_method() -> ApiError {
    let message = "This URL does not take this method; the Allow header lists those that it takes.";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, Code::MethodNotAllowed, message)
}

/// A role of an admin key, in the document.
#[derive(utoipa::ToSchema)]
#[schema(as = Role, rename_all = "lowercase")]
#[expect(dead_code, reason = "its schema is used, the roles themselves are the config's")]
pub(crate) enum RoleName {
    /// Reads all state but the audit log.
    Viewer,
    /// Controls and stops what runs, and revokes rights.
    Operator,
    /// May do everything.
    Owner,
}
