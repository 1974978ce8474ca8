//! Config in force: reading, checking, changing, rolling back.
//!
//! Only owners may send a text: it can name files, and errors about these files go to the sender.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, header};
use penstock_proxy::reload::{self, Applied as Done, ApplyError, By, Change as Difference, Kind, Live};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::audit::Did;
use crate::error::{ApiError, Code};
use crate::extract::{Body, Id, Page};
use crate::keys::Caller;
use crate::state::Admin;
use crate::version;

/// Longest note, in bytes.
pub(super) const NOTE_BYTES_MAX: usize = 1000;

/// The config in force.
#[derive(Serialize, ToSchema)]
pub(crate) struct Config {
    /// Version number, which rises with every change.
    version: u64,
    /// Config as TOML. Possible secrets read "[hidden]"; a text that is applied may hold that mark, for the value that is in force.
    text: String,
    /// Path of the config file; null: none, defaults and command line only.
    path: Option<String>,
    /// Keys whose new value waits for an upgrade or a restart.
    pending: Vec<String>,
    /// Whether a restart loads this config.
    persisted: bool,
    /// Whether configs that are applied here are written to the file.
    writes: bool,
}

/// A config text.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Text {
    /// Whole config as TOML; missing keys get their defaults.
    #[schema(max_length = 4_194_304)]
    text: String,
}

/// Config text to apply.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewConfig {
    /// Whole config as TOML; missing keys get their defaults.
    #[schema(max_length = 4_194_304)]
    text: String,
    /// Note for the history.
    #[serde(default)]
    #[schema(max_length = 1000)]
    note: String,
    /// Expected version: if another one is in force, nothing happens. Same as the header If-Match.
    #[schema(minimum = 0, maximum = 9_007_199_254_740_991_i64)]
    expected_version: Option<u64>,
}

/// Reload of the config file.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Reload {
    /// Note for the history.
    #[serde(default)]
    #[schema(max_length = 1000)]
    note: String,
}

/// Rollback to an earlier version.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rollback {
    /// Version number in the history.
    #[schema(minimum = 0, maximum = 9_007_199_254_740_991_i64)]
    version: u64,
    /// Note for the history.
    #[serde(default)]
    #[schema(max_length = 1000)]
    note: String,
}

/// Result of a check.
#[derive(Serialize, ToSchema)]
pub(crate) struct Verdict {
    valid: bool,
    /// All faults of the text.
    faults: Vec<String>,
    /// Changes against the config in force.
    changes: Vec<Change>,
}

/// Difference between two configs, at one key.
#[derive(Serialize, ToSchema)]
pub(crate) struct Change {
    /// Path of the key, as providers[acme].base_url; + or - in front: added or removed.
    path: String,
    kind: ChangeKind,
    /// Value before; null: none, or a possible secret.
    before: Option<String>,
    /// Value after; null: none, or a possible secret.
    after: Option<String>,
    /// Moment at which the change applies.
    when: &'static str,
}

/// Kind of a change.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ChangeKind {
    Added,
    Removed,
    Changed,
}

impl From<Difference> for Change {
    fn from(change: Difference) -> Self {
        let kind = match change.kind {
            Kind::Added => ChangeKind::Added,
            Kind::Removed => ChangeKind::Removed,
            Kind::Changed => ChangeKind::Changed,
        };
        Self { path: change.path(), kind, before: change.before, after: change.after, when: change.when.name() }
    }
}

/// Result of applying a config.
#[derive(Serialize, ToSchema)]
pub(crate) struct Applied {
    version: u64,
    /// Changes against the config before.
    changes: Vec<Change>,
    /// Keys whose new value waits for an upgrade or a restart.
    pending: Vec<String>,
    /// Pools whose new workers are loading; the old workers answer until then.
    replacing: Vec<String>,
    /// Whether a restart loads this config.
    persisted: bool,
}

/// Config that was applied or refused.
#[derive(Serialize, ToSchema)]
pub(crate) struct Past {
    version: u64,
    /// Time in Unix seconds.
    at: u64,
    /// Actor: id of an admin key, file, signal, start.
    actor: String,
    note: String,
    /// Outcome: applied or refused.
    outcome: String,
    bytes: u64,
}

/// An earlier config.
#[derive(Serialize, ToSchema)]
pub(crate) struct PastText {
    version: u64,
    /// Config as TOML, with possible secrets as "[hidden]".
    text: String,
}

/// Refusal of a config; `param`: the part of the request that it came by.
pub(super) fn refusal(error: ApplyError, param: &str) -> ApiError {
    let message = error.to_string();
    let invalid =
        |details| ApiError { details, ..ApiError::invalid(param, "The config cannot be used; nothing has changed.") };
    match error {
        ApplyError::Faults(faults) => invalid(faults.0.iter().map(ToString::to_string).collect()),
        ApplyError::Pool(_) | ApplyError::Provider(_) | ApplyError::Hidden(_) => invalid(vec![message]),
        ApplyError::Conflict { .. } => ApiError::new(StatusCode::PRECONDITION_FAILED, Code::VersionMismatch, message),
        ApplyError::Unknown(_) => ApiError::not_found(message),
        ApplyError::Read(_)
        | ApplyError::Empty(_)
        | ApplyError::Write(_)
        | ApplyError::Unread(_)
        | ApplyError::Upgrading => ApiError::conflict(message),
    }
}

/// Runs work that may read files and start pools on another thread than the one that answers.
pub(super) async fn beside<T: Send + 'static>(
    admin: &Admin,
    work: impl FnOnce(&Live) -> T + Send + 'static,
) -> Result<T, ApiError> {
    let live: Arc<Live> = admin.live.clone();
    tokio::task::spawn_blocking(move || work(&live)).await.map_err(|error| ApiError::internal(&error))
}

/// Actor of a change, with a note of a bounded length.
pub(super) fn note(caller: &Caller, note: String) -> Result<By, ApiError> {
    if note.len() > NOTE_BYTES_MAX {
        return Err(ApiError::invalid("note", format!("note: at most {NOTE_BYTES_MAX} bytes")));
    }
    Ok(By { who: caller.key.clone(), note })
}

impl From<Done> for Applied {
    fn from(done: Done) -> Self {
        let Done { version, changes, pending, replacing, persisted } = done;
        Self { version, changes: changes.into_iter().map(Change::from).collect(), pending, replacing, persisted }
    }
}

/// Paths of the keys that differ.
pub(super) fn paths(done: &Done) -> Vec<String> {
    done.changes.iter().map(Difference::path).collect()
}

fn applied(done: Result<Done, ApplyError>) -> Result<Response, ApiError> {
    let done = done.map_err(|error| refusal(error, "text"))?;
    let (version, paths) = (done.version, paths(&done));
    let did = Did { target: Some(version.to_string()), detail: serde_json::json!({ "changes": paths }) };
    let body = Applied::from(done);
    Ok(([(header::ETAG, version::tag(version))], axum::Extension(did), Json(body)).into_response())
}

/// The config in force, without secrets.
#[utoipa::path(get, path = "/admin/v1/config", tag = "config", operation_id = "get_config",
    responses((status = 200, description = "The config.", body = Config, headers(("etag" = String, description = "The version, for If-Match.")))),
    security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(State(admin): State<Admin>) -> Result<Response, ApiError> {
    let may_write = admin.gateway.serving().config.config_writes;
    let config = beside(&admin, move |live| {
        let (version, text) = live.current();
        let path = live.source().path().map(|path| path.display().to_string());
        let (writes, persisted) = (may_write && path.is_some(), live.is_persisted());
        Config { version, text: reload::shown(&text), path, pending: live.pending(), persisted, writes }
    });
    let config = config.await?;
    Ok(([(header::ETAG, version::tag(config.version))], Json(config)).into_response())
}

/// Checks a text as if it were applied, and lists faults and changes. Nothing changes.
#[utoipa::path(post, path = "/admin/v1/config/validate", tag = "config", operation_id = "validate_config", request_body = Text,
    responses((status = 200, description = "Result of the check.", body = Verdict)), security(("admin_key" = ["owner"])))]
pub(crate) async fn validate(State(admin): State<Admin>, Body(new): Body<Text>) -> Result<Json<Verdict>, ApiError> {
    let found = beside(&admin, move |live| live.validate(&new.text)).await?;
    let (faults, changes) = match found {
        Ok(changes) => (Vec::new(), changes.into_iter().map(Change::from).collect()),
        Err(ApplyError::Faults(faults)) => (faults.0.iter().map(ToString::to_string).collect(), Vec::new()),
        Err(other) => (vec![other.to_string()], Vec::new()),
    };
    Ok(Json(Verdict { valid: faults.is_empty(), faults, changes }))
}

/// Applies a config text, whole or not at all. Running streams go on.
#[utoipa::path(put, path = "/admin/v1/config", tag = "config", operation_id = "apply_config", request_body = NewConfig,
    params(("if-match" = Option<String>, Header, description = "ETag of the expected version of the config.", pattern = "^(\"[0-9]{1,15}\"|\\*)$")),
    responses((status = 200, description = "The config is in force.", body = Applied, headers(("etag" = String, description = "The version in force."))),
        (status = 409, description = "The config would be written over a text of the file that is not in force, or an upgrade goes on; nothing has changed.", body = crate::error::ErrorBody),
        (status = 412, description = "Another version is in force by now; nothing has changed.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn apply(
    State(admin): State<Admin>,
    caller: Caller,
    headers: HeaderMap,
    Body(new): Body<NewConfig>,
) -> Result<Response, ApiError> {
    let by = note(&caller, new.note)?;
    let expected = version::expected(&headers, new.expected_version)?;
    applied(beside(&admin, move |live| live.apply(&new.text, &by, expected)).await?)
}

/// Reloads the config file and all files that it names.
#[utoipa::path(post, path = "/admin/v1/config/reload", tag = "config", operation_id = "reload_config", request_body = Reload,
    params(
        ("if-match" = Option<String>, Header, description = "ETag of the expected version of the config.", pattern = "^(\"[0-9]{1,15}\"|\\*)$")),
    responses((status = 200, description = "The config is in force.", body = Applied),
        (status = 409, description = "The file cannot be read, or an upgrade goes on; nothing has changed.", body = crate::error::ErrorBody),
        (status = 412, description = "Another version is in force by now; nothing has changed.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["operator"])))]
pub(crate) async fn reload(
    State(admin): State<Admin>,
    caller: Caller,
    headers: HeaderMap,
    Body(asked): Body<Reload>,
) -> Result<Response, ApiError> {
    let by = note(&caller, asked.note)?;
    let expected = version::expected(&headers, None)?;
    applied(beside(&admin, move |live| live.reload_expected(&by, expected)).await?)
}

/// Applies an earlier version again, as a new version.
#[utoipa::path(post, path = "/admin/v1/config/rollback", tag = "config", operation_id = "rollback_config", request_body = Rollback,
    params(
        ("if-match" = Option<String>, Header, description = "ETag of the expected version of the config.", pattern = "^(\"[0-9]{1,15}\"|\\*)$")),
    responses((status = 200, description = "The config is in force.", body = Applied),
        (status = 409, description = "The config would be written over a text of the file that is not in force, or an upgrade goes on; nothing has changed.", body = crate::error::ErrorBody),
        (status = 412, description = "Another version is in force by now; nothing has changed.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn rollback(
    State(admin): State<Admin>,
    caller: Caller,
    headers: HeaderMap,
    Body(asked): Body<Rollback>,
) -> Result<Response, ApiError> {
    let by = note(&caller, asked.note)?;
    let expected = version::expected(&headers, None)?;
    applied(beside(&admin, move |live| live.rollback(asked.version, &by, expected)).await?)
}

/// Configs that were applied or refused, newest first; as many as are kept.
#[utoipa::path(get, path = "/admin/v1/config/history", tag = "config", operation_id = "list_configs",
    responses((status = 200, description = "Configs.", body = Page<Past>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn history(State(admin): State<Admin>) -> Result<Json<Page<Past>>, ApiError> {
    let entries = beside(&admin, Live::history).await?;
    let past = |entry: reload::Entry| Past {
        version: entry.version,
        at: entry.at,
        actor: entry.who,
        note: entry.note,
        outcome: entry.outcome,
        bytes: entry.bytes,
    };
    Ok(Json(Page { data: entries.into_iter().map(past).collect(), next: None }))
}

/// The text of a version, without secrets.
#[utoipa::path(get, path = "/admin/v1/config/history/{version}", tag = "config", operation_id = "get_past_config",
    params(("version" = String, Path, max_length = 20, description = "Version number in the history.")),
    responses((status = 200, description = "Text of the version.", body = PastText)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn past(State(admin): State<Admin>, Id(version): Id) -> Result<Json<PastText>, ApiError> {
    let unknown = || ApiError::not_found("That version is not in the history.");
    let version: u64 = version.parse().map_err(|_| unknown())?;
    let text = beside(&admin, move |live| live.text_of(version)).await?.ok_or_else(unknown)?;
    Ok(Json(PastText { version, text: reload::shown(&text) }))
}
