//! Adapters of a pool, one by one: their state at the workers, and changes of `pools.adapters` in the config.
//!
//! A change is one of the pool's entry in the config's text, and goes the way of all of these (`edits.rs`). Its pool's workers load or unload
//! the adapter while they run; the answer comes before that is done, and says how far it is.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::{FromRequestParts, Path, State};
use axum::response::Response;
use http::HeaderMap;
use http::request::Parts;
use penstock_config::entries::{self, Change as Edit, EntryError};
use penstock_pool::{AdapterPlace, AdapterSource, Pool};
use penstock_proxy::reload::{self, By};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::config::{Applied, beside, note};
use super::edits::{self, Edited, Entry, Noted, Refused, Wish, answered, bounded, check, path_error, tag, tagged};
use crate::error::ApiError;
use crate::extract::{Body, Page, Params};
use crate::keys::Caller;
use crate::state::Admin;

const TABLE: &str = "pools";

/// Adapter of a pool's model.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Adapter {
    /// Id of the pool.
    pool: String,
    /// Model name by which requests select the adapter.
    name: String,
    /// PEFT folder, as the config has it.
    path: String,
    state: AdapterState,
    /// Number of ready workers that have loaded the adapter.
    workers_ready: usize,
    /// Number of ready workers of the pool.
    workers: usize,
    /// Workers that could not load the adapter, each with its reason.
    failures: Vec<Failure>,
    /// ETag for If-Match; null: the adapter is not in the config, but was given on the command line.
    etag: Option<String>,
}

/// State of an adapter at the workers of its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AdapterState {
    /// Every ready worker has the adapter.
    Ready,
    /// Workers are reading or loading the adapter, or will.
    Loading,
    /// A worker could not load the adapter; other workers may have it.
    Failed,
    /// A worker that was started elsewhere lacks the adapter.
    Absent,
}

/// Worker that could not load an adapter.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Failure {
    /// Name of the worker.
    worker: String,
    /// Reason, with the file and field or tensor, or with the memory that is missing.
    reason: String,
}

/// Adapter to be added.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewAdapter {
    /// Model name by which requests select the adapter; no other pool or adapter may have the name.
    #[schema(min_length = 1, max_length = 1024)]
    name: String,
    /// PEFT folder on the machine of the gateway.
    #[schema(min_length = 1, max_length = 4096)]
    path: String,
}

/// Folder of an adapter.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Folder {
    /// PEFT folder on the machine of the gateway.
    #[schema(min_length = 1, max_length = 4096)]
    path: String,
}

/// Result of a change of an adapter.
#[derive(Serialize, ToSchema)]
pub(crate) struct ChangedAdapter {
    /// Adapter after the change; null: it is removed.
    adapter: Option<Adapter>,
    /// Config that is in force with the change.
    config: Applied,
}

/// Pool and, behind it, adapter of a path.
pub(crate) struct Place {
    pool: String,
    name: String,
}

/// Pool of a path.
pub(crate) struct Of(String);

impl<S: Send + Sync> FromRequestParts<S> for Of {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(id) = Path::<String>::from_request_parts(parts, state).await.map_err(|error| path_error(&error))?;
        bounded(id, "id").map(Self)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Place {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path((pool, name)) =
            Path::<(String, String)>::from_request_parts(parts, state).await.map_err(|error| path_error(&error))?;
        Ok(Self { pool: bounded(pool, "id")?, name: bounded(name, "name")? })
    }
}

/// Pool of an id as the config in force has it: the changed one, where it is being replaced.
fn pool(admin: &Admin, id: &str) -> Result<Pool, ApiError> {
    let found = admin.fleet.pools().into_iter().rev().find(|(other, _)| other == id);
    found.map(|(_, pool)| pool).ok_or_else(|| ApiError::not_found("There is no pool of that id."))
}

/// Adapters of a pool's entry in the config, as entries of their own, by name.
fn written(admin: &Admin, text: &str, pool: &str) -> Result<BTreeMap<String, Entry>, EntryError> {
    let found = entries::list(text, TABLE)?.into_iter().find(|entry| entry.id == pool);
    let all = found.and_then(|entry| Some(entry.value.get("adapters")?.as_object()?.clone())).unwrap_or_default();
    let own = |(name, path): (String, Value)| {
        let value = json!({ "pool": pool, "name": name, "path": path });
        (name.clone(), Entry { id: name, etag: tag(admin, "adapters", &value), value })
    };
    Ok(all.into_iter().map(own).collect())
}

/// Adapter of a pool's entry in the config, as an entry of its own.
fn entry(admin: &Admin, text: &str, pool: &str, name: &str) -> Result<Option<Entry>, EntryError> {
    Ok(written(admin, text, pool)?.remove(name))
}

/// State of an adapter at the workers.
fn shown((id, pool): (&str, &Pool), name: &str, path: String, etag: Option<String>) -> Adapter {
    let AdapterPlace { ready, workers, failures, is_told } = pool.adapter_place(name);
    let failures: Vec<Failure> = failures.into_iter().map(|(worker, reason)| Failure { worker, reason }).collect();
    let state = match () {
        () if ready == workers && workers > 0 => AdapterState::Ready,
        () if !failures.is_empty() => AdapterState::Failed,
        () if is_told || workers == 0 => AdapterState::Loading,
        () => AdapterState::Absent,
    };
    let (id, name) = (id.to_owned(), name.to_owned());
    Adapter { pool: id, name, path, state, workers_ready: ready, workers, failures, etag }
}

/// Adapters of a pool's model, by name, with their state at the workers.
#[utoipa::path(get, path = "/admin/v1/pools/{id}/adapters", tag = "pools", operation_id = "list_adapters",
    params(("id" = String, Path, max_length = 1024, description = "Id of the pool.")),
    responses((status = 200, description = "Adapters.", body = Page<Adapter>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(State(admin): State<Admin>, Of(id): Of) -> Result<Json<Page<Adapter>>, ApiError> {
    let pool = pool(&admin, &id)?;
    let (seen, of) = (admin.clone(), id.clone());
    let mut entries = beside(&admin, move |live| written(&seen, &live.current().1, &of)).await??;
    let all = pool.adapters();
    let one = |source: &AdapterSource| found((&id, &pool), &source.name, entries.remove(&source.name), &source.path);
    let mut data: Vec<Adapter> = all.iter().map(one).collect();
    data.sort_by(|left, right| left.name.cmp(&right.name));
    Ok(Json(Page { data, next: None }))
}

/// Adapter with the path that the config has, or that of the command line.
fn found(pool: (&str, &Pool), name: &str, entry: Option<Entry>, path: &std::path::Path) -> Adapter {
    let written = entry.as_ref().and_then(|entry| entry.value["path"].as_str().map(str::to_owned));
    let path = written.unwrap_or_else(|| path.display().to_string());
    shown(pool, name, path, entry.map(|entry| entry.etag))
}

/// Adapter of a pool's model by its name, with its state at the pool's workers.
#[utoipa::path(get, path = "/admin/v1/pools/{id}/adapters/{name}", tag = "pools", operation_id = "get_adapter",
    params(("id" = String, Path, max_length = 1024, description = "Id of the pool."),
        ("name" = String, Path, max_length = 1024, description = "Name of the adapter; a slash in it is sent as %2F.")),
    responses((status = 200, description = "The adapter.", body = Adapter, headers(("etag" = String, description = "Tag of the adapter, for If-Match.")))),
    security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(State(admin): State<Admin>, place: Place) -> Result<Response, ApiError> {
    let Place { pool: id, name } = place;
    let pool = pool(&admin, &id)?;
    let text = beside(&admin, move |live| live.current().1).await?;
    let all = pool.adapters();
    let source = all.iter().find(|source| source.name == name).ok_or_else(|| absent(&id, &name))?;
    let adapter = found((&id, &pool), &name, entry(&admin, &text, &id, &name)?, &source.path);
    let etag = adapter.etag.clone();
    Ok(tagged(etag.as_deref(), Json(adapter)))
}

fn absent(pool: &str, name: &str) -> ApiError {
    ApiError::not_found(format!("Pool {pool:?} has no adapter {name:?} in the config."))
}

/// Kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Create,
    Replace,
    Delete,
}

/// Makes a change of one adapter and puts the config in force. `path`: `None` removes it.
async fn change(
    admin: &Admin,
    (pool_id, name): (String, String),
    (kind, path): (Kind, Option<String>),
    headers: HeaderMap,
    by: By,
) -> Result<Response, ApiError> {
    let about = format!("{} adapter {name} of {pool_id}", format!("{kind:?}").to_lowercase());
    let wish = Wish { by, about, is_delete: kind == Kind::Delete };
    let (seen, id, own) = (admin.clone(), pool_id.clone(), name.clone());
    let is_in_force = pool(admin, &pool_id).is_ok_and(|pool| pool.adapters().iter().any(|source| source.name == name));
    let edit = move |text: &str| -> Result<Edited, Refused> {
        let before = entry(&seen, text, &id, &own)?;
        check(&headers, before.as_ref())?;
        let is_new = before.is_none();
        match (kind, is_new) {
            (Kind::Create, false) => {
                return Err(ApiError::conflict(format!("Pool {id:?} has an adapter {own:?} already.")).into());
            }
            (Kind::Delete, true) => return Err(absent(&id, &own).into()),
            (_, true) if is_in_force => {
                let message = format!("Adapter {own:?} of pool {id:?} is given on the command line: change it there.");
                return Err(ApiError::conflict(message).into());
            }
            _ => {}
        }
        let patch: Map<String, Value> = [("adapters".to_owned(), json!({ own.clone(): path }))].into_iter().collect();
        let text = entries::changed(text, &reload::shown(text), TABLE, &id, Edit::Merge(&patch))?;
        let entry = entry(&seen, &text, &id, &own)?;
        Ok(Edited { text, entry, is_new })
    };
    let made = edits::change(admin, wish, edit).await?;
    let (status, did) = (made.status(), made.did(format!("{TABLE}/{pool_id}/adapters/{name}")));
    let pool = pool(admin, &pool_id).ok();
    let adapter = made
        .entry
        .zip(pool)
        .map(|(entry, pool)| found((&pool_id, &pool), &name, Some(entry), std::path::Path::new("")));
    let etag = adapter.as_ref().and_then(|adapter| adapter.etag.clone());
    Ok(answered(status, did, etag.as_deref(), ChangedAdapter { adapter, config: made.done.into() }))
}

/// Adds an adapter to a pool of the config, and puts the config in force; the pool's workers load the adapter without a restart.
#[utoipa::path(post, path = "/admin/v1/pools/{id}/adapters", tag = "pools", operation_id = "create_adapter", request_body = NewAdapter,
    params(("id" = String, Path, max_length = 1024, description = "Id of the pool."), Noted),
    responses((status = 201, description = "The adapter is in force; workers load it.", body = ChangedAdapter, headers(("etag" = String, description = "Tag of the adapter."))),
        (status = 409, description = "The pool has an adapter of that name, in the config or by the command line.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn create(
    State(admin): State<Admin>,
    Of(id): Of,
    caller: Caller,
    Params(noted): Params<Noted>,
    Body(NewAdapter { name, path }): Body<NewAdapter>,
) -> Result<Response, ApiError> {
    let by = note(&caller, noted.note)?;
    let name = bounded(name, "name")?;
    change(&admin, (id, name), (Kind::Create, Some(path)), HeaderMap::new(), by).await
}

/// Sets the folder of an adapter, or adds the adapter, and puts the config in force. New requests use the new content once a worker has loaded it.
#[utoipa::path(put, path = "/admin/v1/pools/{id}/adapters/{name}", tag = "pools", operation_id = "replace_adapter", request_body = Folder,
    params(("id" = String, Path, max_length = 1024, description = "Id of the pool."),
        ("name" = String, Path, max_length = 1024, description = "Name of the adapter; a slash in it is sent as %2F."), Noted,
        ("if-match" = Option<String>, Header, description = "ETag of the expected adapter."),
        ("if-none-match" = Option<String>, Header, description = "*: add the adapter only if the pool has none of that name.")),
    responses((status = 200, description = "The folder is in force.", body = ChangedAdapter, headers(("etag" = String, description = "New tag of the adapter."))),
        (status = 201, description = "The adapter is new and in force.", body = ChangedAdapter, headers(("etag" = String, description = "Tag of the adapter."))),
        (status = 412, description = "The adapter is not the one that If-Match or If-None-Match expects; nothing was done.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn replace(
    State(admin): State<Admin>,
    place: Place,
    caller: Caller,
    headers: HeaderMap,
    Params(noted): Params<Noted>,
    Body(Folder { path }): Body<Folder>,
) -> Result<Response, ApiError> {
    let by = note(&caller, noted.note)?;
    change(&admin, (place.pool, place.name), (Kind::Replace, Some(path)), headers, by).await
}

/// Removes an adapter from a pool of the config. New requests for the adapter are refused at once; open ones run to their end with it.
#[utoipa::path(delete, path = "/admin/v1/pools/{id}/adapters/{name}", tag = "pools", operation_id = "delete_adapter",
    params(("id" = String, Path, max_length = 1024, description = "Id of the pool."),
        ("name" = String, Path, max_length = 1024, description = "Name of the adapter; a slash in it is sent as %2F."), Noted,
        ("if-match" = Option<String>, Header, description = "ETag of the expected adapter.")),
    responses((status = 200, description = "The adapter is gone.", body = ChangedAdapter),
        (status = 409, description = "The config cannot be used without the adapter; details say why.", body = crate::error::ErrorBody),
        (status = 412, description = "The adapter is not the one that If-Match or If-None-Match expects; nothing was done.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn delete(
    State(admin): State<Admin>,
    place: Place,
    caller: Caller,
    headers: HeaderMap,
    Params(noted): Params<Noted>,
) -> Result<Response, ApiError> {
    let by = note(&caller, noted.note)?;
    let Place { pool, name } = place;
    let text = beside(&admin, move |live| live.current().1).await?;
    // 404 rather than the 412 of `If-Match`.
    entry(&admin, &text, &pool, &name)?.ok_or_else(|| absent(&pool, &name))?;
    change(&admin, (pool, name), (Kind::Delete, None), headers, by).await
}
