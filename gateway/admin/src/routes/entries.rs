//! Entries of the config's tables (providers, models, limits, plugins, …) as objects: read, made, changed and removed one by one.
//!
//! A change is one of the config's text, made on the text in force: comments, order and spelling of the rest stay, and the whole text then goes the
//! way of every applied config, with its checks, history, audit and `server.config_writes`. An entry's `ETag` is a keyed hash of its values, secrets
//! included, so a change of another entry does not make it stale and nobody can guess a secret by it.

use axum::Json;
use axum::extract::{FromRequestParts, Path, State};
use axum::response::Response;
use http::HeaderMap;
use http::request::Parts;
use penstock_config::entries::{self, Change as Edit, EntryError};
use penstock_config::keys;
use penstock_proxy::reload::{self, By};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::config::{Applied, beside, note};
use super::edits::{self, Edited, Entry, Noted, Refused, Wish, answered, bounded, check, path_error, tag};
use crate::error::ApiError;
use crate::extract::{Body, Page, Params};
use crate::keys::Caller;
use crate::state::Admin;

/// Result of a change of an entry.
#[derive(Serialize, ToSchema)]
pub(crate) struct Changed {
    /// Entry after the change; null: it is removed.
    entry: Option<Entry>,
    /// Config that is in force with the change.
    config: Applied,
}

/// Keys and values of an entry, as docs/reference/config.md lists them for the table.
#[derive(Deserialize, ToSchema)]
#[schema(value_type = Object)]
pub(crate) struct Fields(Map<String, Value>);

/// Table of the config that is written `[[table]]`.
pub(crate) struct Table(&'static str);

/// Table and id of an entry, decoded.
pub(crate) struct Place {
    table: &'static str,
    id: String,
}

fn table_of(name: &str) -> Result<&'static str, ApiError> {
    let many = || keys::TABLES.iter().filter(|table| table.many).map(|table| table.name);
    let unknown = || {
        let names: Vec<_> = many().collect();
        ApiError::not_found(format!(
            "The config has no table of entries of that name; these are: {}.",
            names.join(", ")
        ))
    };
    many().find(|table| *table == name).ok_or_else(unknown)
}

impl<S: Send + Sync> FromRequestParts<S> for Table {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(name) = Path::<String>::from_request_parts(parts, state).await.map_err(|error| path_error(&error))?;
        table_of(&name).map(Self)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Place {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path((table, id)) =
            Path::<(String, String)>::from_request_parts(parts, state).await.map_err(|error| path_error(&error))?;
        let id = bounded(id, "id")?;
        Ok(Self { table: table_of(&table)?, id })
    }
}

/// Entries of a table, each with its tag.
fn tagged(admin: &Admin, table: &str, text: &str) -> Result<Vec<Entry>, EntryError> {
    let (own, shown) = (entries::list(text, table)?, entries::list(&reload::shown(text), table)?);
    let both = own.into_iter().zip(shown);
    Ok(both
        .map(|(own, shown)| Entry { etag: tag(admin, table, &own.value), id: shown.id, value: shown.value })
        .collect())
}

/// Place of a change, with its conditions and its actor.
struct At {
    operation: &'static str,
    table: &'static str,
    id: String,
    headers: HeaderMap,
    by: By,
}

/// Kind of a change, with what it brings.
enum What {
    Create(Map<String, Value>),
    Put(Map<String, Value>),
    Merge(Map<String, Value>),
    Delete,
}

/// Makes a change of an entry and puts the config in force.
async fn change(admin: &Admin, at: At, what: What) -> Result<Response, ApiError> {
    let At { operation, table, id, headers, by } = at;
    let is_delete = matches!(what, What::Delete);
    let wish = Wish { by, about: format!("{operation} {table} {id}"), is_delete };
    let (seen, name) = (admin.clone(), id.clone());
    let edit = move |text: &str| -> Result<Edited, Refused> {
        let before = tagged(&seen, table, text)?;
        let at = before.iter().position(|entry| entry.id == name);
        check(&headers, at.and_then(|at| before.get(at)))?;
        let is_new = at.is_none();
        let edit = match &what {
            What::Create(value) => Edit::Create(value),
            What::Put(value) if is_new => Edit::Create(value),
            What::Put(value) => Edit::Replace(value),
            What::Merge(value) => Edit::Merge(value),
            What::Delete => Edit::Delete,
        };
        let text = entries::changed(text, &reload::shown(text), table, &name, edit)?;
        let mut entries = tagged(&seen, table, &text)?;
        let entry = match (is_delete, at) {
            (true, _) => None,
            (false, Some(at)) => (at < entries.len()).then(|| entries.swap_remove(at)),
            (false, None) => entries.pop(),
        };
        Ok(Edited { text, entry, is_new })
    };
    let made = edits::change(admin, wish, edit).await?;
    let (status, did) =
        (made.status(), made.did(format!("{table}/{}", made.entry.as_ref().map_or(&id, |entry| &entry.id))));
    let etag = made.entry.as_ref().map(|entry| entry.etag.clone());
    Ok(answered(status, did, etag.as_deref(), Changed { entry: made.entry, config: made.done.into() }))
}

/// Entries of a table of the config, in its order, without secrets.
#[utoipa::path(get, path = "/admin/v1/config/{table}", tag = "config", operation_id = "list_entries",
    params(("table" = String, Path, max_length = 64, description = "Table of the config: providers, models, limits, plugins, or another that is written [[table]].")),
    responses((status = 200, description = "Entries.", body = Page<Entry>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(State(admin): State<Admin>, Table(table): Table) -> Result<Json<Page<Entry>>, ApiError> {
    let seen = admin.clone();
    let found = beside(&admin, move |live| tagged(&seen, table, &live.current().1)).await?;
    Ok(Json(Page { data: found?, next: None }))
}

/// One entry of the config, without secrets.
#[utoipa::path(get, path = "/admin/v1/config/{table}/{id}", tag = "config", operation_id = "get_entry",
    params(("table" = String, Path, max_length = 64, description = "Table of the config."),
        ("id" = String, Path, max_length = 1024, description = "Id of the entry; a slash in it is sent as %2F.")),
    responses((status = 200, description = "The entry.", body = Entry, headers(("etag" = String, description = "Tag of the entry, for If-Match.")))),
    security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(State(admin): State<Admin>, place: Place) -> Result<Response, ApiError> {
    let Place { table, id } = place;
    let seen = admin.clone();
    let found = beside(&admin, move |live| tagged(&seen, table, &live.current().1)).await??;
    let found = found.into_iter().find(|entry| entry.id == id);
    let entry = found.ok_or_else(|| EntryError::Unknown { table: table.to_owned(), id })?;
    let etag = entry.etag.clone();
    Ok(edits::tagged(Some(&etag), Json(entry)))
}

/// Adds an entry behind the others of its table, and puts the config in force.
#[utoipa::path(post, path = "/admin/v1/config/{table}", tag = "config", operation_id = "create_entry", request_body = Fields,
    params(("table" = String, Path, max_length = 64, description = "Table of the config."), Noted),
    responses((status = 201, description = "The entry is in force.", body = Changed, headers(("etag" = String, description = "Tag of the entry."))),
        (status = 409, description = "An entry of that id is there.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn create(
    State(admin): State<Admin>,
    Table(table): Table,
    caller: Caller,
    Params(noted): Params<Noted>,
    Body(Fields(value)): Body<Fields>,
) -> Result<Response, ApiError> {
    let by = note(&caller, noted.note)?;
    let id = ["id", "name"].iter().find_map(|key| value.get(*key)?.as_str()).ok_or(EntryError::Unnamed)?.to_owned();
    change(&admin, At { operation: "create", table, id, headers: HeaderMap::new(), by }, What::Create(value)).await
}

/// Sets all keys of an entry, or adds it, and puts the config in force.
#[utoipa::path(put, path = "/admin/v1/config/{table}/{id}", tag = "config", operation_id = "replace_entry", request_body = Fields,
    params(("table" = String, Path, max_length = 64, description = "Table of the config."),
        ("id" = String, Path, max_length = 1024, description = "Id of the entry; a slash in it is sent as %2F."), Noted,
        ("if-match" = Option<String>, Header, description = "ETag of the expected entry."),
        ("if-none-match" = Option<String>, Header, description = "*: only if there is no such entry.")),
    responses((status = 200, description = "The entry is in force.", body = Changed, headers(("etag" = String, description = "New tag of the entry."))),
        (status = 201, description = "The entry is new and in force.", body = Changed, headers(("etag" = String, description = "Tag of the entry."))),
        (status = 409, description = "Several entries have the id.", body = crate::error::ErrorBody),
        (status = 412, description = "The entry is another by now; nothing was done.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn replace(
    State(admin): State<Admin>,
    place: Place,
    caller: Caller,
    headers: HeaderMap,
    Params(noted): Params<Noted>,
    Body(Fields(value)): Body<Fields>,
) -> Result<Response, ApiError> {
    let Place { table, id } = place;
    let by = note(&caller, noted.note)?;
    let value = named(table, &id, value)?;
    change(&admin, At { operation: "replace", table, id, headers, by }, What::Put(value)).await
}

/// Fields of an entry with its id, which the path says as well.
fn named(table: &str, id: &str, fields: Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    let given = ["id", "name"].iter().find_map(|key| fields.get(*key)?.as_str());
    if given == Some(id) {
        return Ok(fields);
    }
    let key = if keys::KEYS.iter().any(|key| key.table == table && key.name == "id") { "id" } else { "name" };
    if fields.contains_key(key) {
        return Err(ApiError::invalid(key, format!("{key}: the path names another entry; PATCH renames one")));
    }
    Ok(std::iter::once((key.to_owned(), Value::from(id))).chain(fields).collect())
}

/// Changes keys of an entry by a JSON merge patch, and puts the config in force.
#[utoipa::path(patch, path = "/admin/v1/config/{table}/{id}", tag = "config", operation_id = "update_entry", request_body = Fields,
    params(("table" = String, Path, max_length = 64, description = "Table of the config."),
        ("id" = String, Path, max_length = 1024, description = "Id of the entry; a slash in it is sent as %2F."), Noted,
        ("if-match" = Option<String>, Header, description = "ETag of the expected entry.")),
    responses((status = 200, description = "The entry is in force.", body = Changed, headers(("etag" = String, description = "New tag of the entry."))),
        (status = 409, description = "Several entries have the id.", body = crate::error::ErrorBody),
        (status = 412, description = "The entry is another by now; nothing was done.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn update(
    State(admin): State<Admin>,
    place: Place,
    caller: Caller,
    headers: HeaderMap,
    Params(noted): Params<Noted>,
    Body(Fields(patch)): Body<Fields>,
) -> Result<Response, ApiError> {
    let Place { table, id } = place;
    let by = note(&caller, noted.note)?;
    missing(&admin, table, &id).await?;
    change(&admin, At { operation: "update", table, id, headers, by }, What::Merge(patch)).await
}

/// Removes an entry with the comments directly above it, and puts the config in force. An entry that another one names stays.
#[utoipa::path(delete, path = "/admin/v1/config/{table}/{id}", tag = "config", operation_id = "delete_entry",
    params(("table" = String, Path, max_length = 64, description = "Table of the config."),
        ("id" = String, Path, max_length = 1024, description = "Id of the entry; a slash in it is sent as %2F."), Noted,
        ("if-match" = Option<String>, Header, description = "ETag of the expected entry.")),
    responses((status = 200, description = "The entry is gone.", body = Changed),
        (status = 409, description = "The config cannot be used without the entry; details say why.", body = crate::error::ErrorBody),
        (status = 412, description = "The entry is another by now; nothing was done.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn delete(
    State(admin): State<Admin>,
    place: Place,
    caller: Caller,
    headers: HeaderMap,
    Params(noted): Params<Noted>,
) -> Result<Response, ApiError> {
    let Place { table, id } = place;
    let by = note(&caller, noted.note)?;
    missing(&admin, table, &id).await?;
    change(&admin, At { operation: "delete", table, id, headers, by }, What::Delete).await
}

/// Refusal of an id that no entry has: 404 rather than the 412 of `If-Match`.
async fn missing(admin: &Admin, table: &'static str, id: &str) -> Result<(), ApiError> {
    let text = beside(admin, |live| live.current().1).await?;
    let there = entries::list(&text, table)?.iter().any(|entry| entry.id == id);
    if there { Ok(()) } else { Err(EntryError::Unknown { table: table.to_owned(), id: id.to_owned() }.into()) }
}
