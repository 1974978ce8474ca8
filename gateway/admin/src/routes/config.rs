//! Config in force: reading, checking, changing, rolling back.
//!
//! Only owners may send a text: it can name files, and errors about these files go to the sender.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, header};
use penstock_proxy::live::{self, Applied as Done, ApplyError, By, Change as Difference, Kind, Live};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::audit::Did;
use crate::error::{ApiError, Code};
use crate::extract::{Body, Id, Page};
use crate::keys::Caller;
use crate::state::Admin;
use crate::version;

/// Longest note, in bytes.
const NOTE_BYTES_MAX: usize = 1000;

/// The config in force.
#[derive(Serialize, ToSchema)]
pub(crate) struct Config {
    /// Rises with every change.
    version: u64,
    /// TOML. What may be a secret reads "[hidden]"; a text that is applied may hold that mark, for the value that is in force.
    text: String,
    /// The file that it came from; null: none, the defaults and the command line.
    path: Option<String>,
    /// Keys whose value waits for an upgrade or a restart.
    pending: Vec<String>,
    /// Whether a restart comes up with it.
    persisted: bool,
}

/// A config text.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Text {
    /// TOML, whole: what it does not say is the default.
    #[schema(max_length = 4_194_304)]
    text: String,
}

/// A config text that is to be in force.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewConfig {
    /// TOML, whole: what it does not say is the default.
    #[schema(max_length = 4_194_304)]
    text: String,
    /// Why, for the history.
    #[serde(default)]
    #[schema(max_length = 1000)]
    note: String,
    /// The version that was looked at: if another is in force, nothing happens. As the header If-Match.
    #[schema(minimum = 0, maximum = 9_007_199_254_740_991_i64)]
    expected_version: Option<u64>,
}

/// A reload.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Reload {
    /// Why, for the history.
    #[serde(default)]
    #[schema(max_length = 1000)]
    note: String,
}

/// A version that is to be in force again.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rollback {
    /// Of the history.
    #[schema(minimum = 0, maximum = 9_007_199_254_740_991_i64)]
    version: u64,
    /// Why, for the history.
    #[serde(default)]
    #[schema(max_length = 1000)]
    note: String,
}

/// Whether a text could be in force.
#[derive(Serialize, ToSchema)]
pub(crate) struct Verdict {
    valid: bool,
    /// Everything that is wrong with it.
    faults: Vec<String>,
    /// What would be different.
    changes: Vec<Change>,
}

/// One difference between two configs.
#[derive(Serialize, ToSchema)]
pub(crate) struct Change {
    /// As providers[acme].base_url; + or - in front: it came or went.
    path: String,
    kind: ChangeKind,
    /// The value before; null: there was none, or it may be a secret.
    before: Option<String>,
    /// The value after; null: there is none, or it may be a secret.
    after: Option<String>,
    /// When it applies.
    when: &'static str,
}

/// What became of a key or an entry.
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

/// What is in force now.
#[derive(Serialize, ToSchema)]
pub(crate) struct Applied {
    version: u64,
    /// What is different.
    changes: Vec<Change>,
    /// Keys whose new value waits for an upgrade or a restart.
    pending: Vec<String>,
    /// Pools whose new workers are being made ready; the old ones answer until then.
    replacing: Vec<String>,
    /// Whether a restart comes up with it.
    persisted: bool,
}

/// A config that was applied or refused.
#[derive(Serialize, ToSchema)]
pub(crate) struct Past {
    version: u64,
    /// Unix seconds.
    at: u64,
    /// Who: id of an admin key, file, signal, start.
    actor: String,
    note: String,
    /// applied or refused.
    outcome: String,
    bytes: u64,
}

/// An earlier config.
#[derive(Serialize, ToSchema)]
pub(crate) struct PastText {
    version: u64,
    /// TOML, with what may be a secret as "[hidden]".
    text: String,
}

fn refusal(error: ApplyError) -> ApiError {
    let message = error.to_string();
    let invalid =
        |details| ApiError { details, ..ApiError::invalid("text", "The config cannot be used; nothing has changed.") };
    match error {
        ApplyError::Faults(faults) => invalid(faults.0.iter().map(ToString::to_string).collect()),
        ApplyError::Pool(_) | ApplyError::Provider(_) | ApplyError::Hidden(_) => invalid(vec![message]),
        ApplyError::Conflict { .. } => ApiError::new(StatusCode::PRECONDITION_FAILED, Code::VersionMismatch, message),
        ApplyError::Unknown(_) => ApiError::not_found(message),
        ApplyError::Read(_) | ApplyError::Empty(_) | ApplyError::Write(_) => ApiError::conflict(message),
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

fn note(caller: &Caller, note: String) -> Result<By, ApiError> {
    if note.len() > NOTE_BYTES_MAX {
        return Err(ApiError::invalid("note", format!("note: at most {NOTE_BYTES_MAX} bytes")));
    }
    Ok(By { who: caller.key.clone(), note })
}

fn applied(done: Result<Done, ApplyError>) -> Result<Response, ApiError> {
    let Done { version, changes, pending, replacing, persisted } = done.map_err(refusal)?;
    let paths: Vec<_> = changes.iter().map(Difference::path).collect();
    let did = Did { target: Some(version.to_string()), detail: serde_json::json!({ "changes": paths }) };
    let changes = changes.into_iter().map(Change::from).collect();
    let body = Applied { version, changes, pending, replacing, persisted };
    Ok(([(header::ETAG, version::tag(version))], axum::Extension(did), Json(body)).into_response())
}

/// The config in force, without secrets.
#[utoipa::path(get, path = "/admin/v1/config", tag = "config", operation_id = "get_config",
    responses((status = 200, description = "The config.", body = Config, headers(("etag" = String, description = "The version, for If-Match.")))),
    security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(State(admin): State<Admin>) -> Result<Response, ApiError> {
    let config = beside(&admin, |live| {
        let (version, text) = live.current();
        let path = live.source().path().map(|path| path.display().to_string());
        Config { version, text: live::shown(&text), path, pending: live.pending(), persisted: live.is_persisted() }
    });
    let config = config.await?;
    Ok(([(header::ETAG, version::tag(config.version))], Json(config)).into_response())
}

/// Checks a text as if it were applied, and says what would be different. Nothing changes.
#[utoipa::path(post, path = "/admin/v1/config/validate", tag = "config", operation_id = "validate_config", request_body = Text,
    responses((status = 200, description = "Whether it could be in force.", body = Verdict)), security(("admin_key" = ["owner"])))]
pub(crate) async fn validate(State(admin): State<Admin>, Body(new): Body<Text>) -> Result<Json<Verdict>, ApiError> {
    let found = beside(&admin, move |live| live.validate(&new.text)).await?;
    let (faults, changes) = match found {
        Ok(changes) => (Vec::new(), changes.into_iter().map(Change::from).collect()),
        Err(ApplyError::Faults(faults)) => (faults.0.iter().map(ToString::to_string).collect(), Vec::new()),
        Err(other) => (vec![other.to_string()], Vec::new()),
    };
    Ok(Json(Verdict { valid: faults.is_empty(), faults, changes }))
}

/// Puts a text in force, whole or not at all. Streams that run go on.
#[utoipa::path(put, path = "/admin/v1/config", tag = "config", operation_id = "apply_config", request_body = NewConfig,
    params(("if-match" = Option<String>, Header, description = "The ETag of the config that was looked at.", pattern = "^(\"[0-9]{1,15}\"|\\*)$")),
    responses((status = 200, description = "It is in force.", body = Applied, headers(("etag" = String, description = "The version in force."))),
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

/// Reads the config file again, and everything that it names.
#[utoipa::path(post, path = "/admin/v1/config/reload", tag = "config", operation_id = "reload_config", request_body = Reload,
    responses((status = 200, description = "It is in force.", body = Applied),
        (status = 409, description = "The file cannot be read; nothing has changed.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["operator"])))]
pub(crate) async fn reload(
    State(admin): State<Admin>,
    caller: Caller,
    Body(asked): Body<Reload>,
) -> Result<Response, ApiError> {
    let by = note(&caller, asked.note)?;
    applied(beside(&admin, move |live| live.reload(&by)).await?)
}

/// Puts an earlier version in force, as a new one.
#[utoipa::path(post, path = "/admin/v1/config/rollback", tag = "config", operation_id = "rollback_config", request_body = Rollback,
    responses((status = 200, description = "It is in force.", body = Applied)), security(("admin_key" = ["owner"])))]
pub(crate) async fn rollback(
    State(admin): State<Admin>,
    caller: Caller,
    Body(asked): Body<Rollback>,
) -> Result<Response, ApiError> {
    let by = note(&caller, asked.note)?;
    applied(beside(&admin, move |live| live.rollback(asked.version, &by)).await?)
}

/// Configs that were applied or refused, newest first; as many as are kept.
#[utoipa::path(get, path = "/admin/v1/config/history", tag = "config", operation_id = "list_configs",
    responses((status = 200, description = "Configs.", body = Page<Past>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn history(State(admin): State<Admin>) -> Result<Json<Page<Past>>, ApiError> {
    let entries = beside(&admin, Live::history).await?;
    let past = |entry: live::Entry| Past {
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
    params(("version" = String, Path, max_length = 20, description = "Of the history.")),
    responses((status = 200, description = "Its text.", body = PastText)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn past(State(admin): State<Admin>, Id(version): Id) -> Result<Json<PastText>, ApiError> {
    let unknown = || ApiError::not_found("That version is not in the history.");
    let version: u64 = version.parse().map_err(|_| unknown())?;
    let text = beside(&admin, move |live| live.text_of(version)).await?.ok_or_else(unknown)?;
    Ok(Json(PastText { version, text: live::shown(&text) }))
}
