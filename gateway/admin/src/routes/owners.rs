//! Teams and users, the owners of keys.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, header};
use penstock_auth::check_scope;
use penstock_base::clock;
use penstock_store::{Order, OwnerChange, OwnerKind, OwnerRecord, Page as StorePage};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::{IntoParams, ToSchema};

use super::keys::{Allowed, known_limits};
use crate::audit::Did;
use crate::error::ApiError;
use crate::extract::{Body, Id, ListQuery, Page, Params, bounded_limit, double};
use crate::state::Admin;
use crate::version::{self, Versioned};

/// Longest id, name or tag, in bytes.
const TEXT_BYTES_MAX: usize = 256;
/// Most entries of a list.
const ENTRIES_MAX: usize = 256;

/// Team or user.
#[derive(Serialize, ToSchema)]
pub(crate) struct Owner {
    id: String,
    name: String,
    /// Team of a user.
    team: Option<String>,
    /// Upper bound of the permissions of its keys.
    allowed: Allowed,
    /// Ids of the limits that its keys count against.
    limits: Vec<String>,
    tags: Vec<String>,
    /// Whether its requests are refused.
    blocked: bool,
    /// Creation time in Unix seconds.
    created: u64,
    /// Version number, which rises with every change.
    version: u64,
}

impl From<OwnerRecord> for Owner {
    fn from(owner: OwnerRecord) -> Self {
        Self {
            allowed: Allowed::of(&owner.scope),
            id: owner.id,
            name: owner.name,
            team: owner.team,
            limits: owner.limits,
            tags: owner.tags,
            blocked: owner.blocked,
            created: owner.created,
            version: owner.version,
        }
    }
}

impl Versioned for Owner {
    fn version(&self) -> u64 {
        self.version
    }
}

/// Team or user to create.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewOwner {
    /// Id, unique among teams or among users.
    #[schema(min_length = 1, max_length = 256)]
    id: String,
    /// Display name. Default: the id.
    #[serde(default)]
    #[schema(max_length = 256)]
    name: String,
    /// Team of a user.
    #[schema(max_length = 256)]
    team: Option<String>,
    #[serde(default)]
    allowed: Allowed,
    /// Ids of limits of the config.
    #[serde(default)]
    #[schema(max_items = 256)]
    limits: Vec<String>,
    #[serde(default)]
    #[schema(max_items = 256)]
    tags: Vec<String>,
    #[serde(default)]
    blocked: bool,
}

/// Changes of a team or user; fields that are left out stay as they are.
#[derive(Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct OwnerPatch {
    #[schema(max_length = 256)]
    name: Option<String>,
    /// Team of a user; null: none.
    #[serde(deserialize_with = "double")]
    #[schema(value_type = Option<String>, max_length = 256)]
    team: Option<Option<String>>,
    allowed: Option<Allowed>,
    #[schema(max_items = 256)]
    limits: Option<Vec<String>>,
    #[schema(max_items = 256)]
    tags: Option<Vec<String>>,
    blocked: Option<bool>,
    /// Expected version: if the entry has another one by now, nothing happens. Same as the header If-Match.
    #[schema(minimum = 0, maximum = 9_007_199_254_740_991_i64)]
    expected_version: Option<u64>,
}

/// Filter of users.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct UserFilter {
    /// Largest number of users in the answer. Default: 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
    /// Cursor: `next` of the page before.
    #[param(max_length = 512)]
    after: Option<String>,
    /// Only users of this team.
    #[param(max_length = 256)]
    team: Option<String>,
}

fn text(field: &str, text: &str) -> Result<(), ApiError> {
    if text.len() > TEXT_BYTES_MAX || text.contains(char::is_control) {
        let message = format!("{field}: at most {TEXT_BYTES_MAX} bytes, without control characters");
        return Err(ApiError::invalid(field, message));
    }
    Ok(())
}

fn texts(field: &str, all: &[String]) -> Result<(), ApiError> {
    if all.len() > ENTRIES_MAX || all.iter().any(String::is_empty) {
        return Err(ApiError::invalid(field, format!("{field}: at most {ENTRIES_MAX}, none of them empty")));
    }
    all.iter().try_for_each(|entry| text(field, entry))
}

/// Checks the fields of an owner.
async fn check(admin: &Admin, owner: &OwnerRecord) -> Result<(), ApiError> {
    if owner.id.is_empty() {
        return Err(ApiError::invalid("id", "id: is empty"));
    }
    text("id", &owner.id)?;
    text("name", &owner.name)?;
    check_scope(&owner.scope)?;
    texts("limits", &owner.limits)?;
    texts("tags", &owner.tags)?;
    known_limits(admin, &owner.limits)?;
    let Some(team) = &owner.team else { return Ok(()) };
    if owner.kind == OwnerKind::Team {
        return Err(ApiError::invalid("team", "team: only users have one"));
    }
    text("team", team)?;
    let in_file = admin.gateway.serving().config.auth.teams.iter().any(|have| have.id == *team);
    if !in_file && admin.store.owner(OwnerKind::Team, team).await?.is_none() {
        return Err(ApiError::invalid("team", format!("team: there is no team {team:?}")));
    }
    Ok(())
}

fn missing(kind: OwnerKind) -> ApiError {
    ApiError::not_found(format!("There is no {} of that id; those of the config are changed there.", kind.name()))
}

async fn list(
    admin: &Admin,
    kind: OwnerKind,
    team: Option<&str>,
    page: StorePage,
) -> Result<Json<Page<Owner>>, ApiError> {
    Ok(Json(Page::of(admin.store.owners(kind, team, &page).await?, Owner::from, |owner| &owner.id)))
}

async fn create(admin: &Admin, kind: OwnerKind, new: NewOwner) -> Result<Response, ApiError> {
    let NewOwner { id, name, team, allowed, limits, tags, blocked } = new;
    let owner = OwnerRecord {
        kind,
        name: if name.is_empty() { id.clone() } else { name },
        id,
        team,
        scope: allowed.scope(None)?,
        limits,
        budgets: Vec::new(),
        tags,
        blocked,
        created: clock::unix_seconds(),
        removed: None,
        version: 0,
    };
    check(admin, &owner).await?;
    let taken = || ApiError::conflict(format!("There is a {} of that id already.", kind.name()));
    let in_file = |id: &str| admin.gateway.serving().config.auth.teams.iter().any(|team| team.id == id);
    if kind == OwnerKind::Team && in_file(&owner.id) {
        return Err(taken());
    }
    let owner = Owner::from(admin.store.create_owner(owner).await?.ok_or_else(taken)?);
    let did = Did { target: Some(owner.id.clone()), detail: json!({ "after": owner }) };
    Ok((StatusCode::CREATED, [(header::ETAG, version::tag(owner.version))], axum::Extension(did), Json(owner))
        .into_response())
}

async fn show(admin: &Admin, kind: OwnerKind, id: &str) -> Result<Response, ApiError> {
    let owner = admin.store.owner(kind, id).await?.ok_or_else(|| missing(kind))?;
    Ok(version::tagged(Owner::from(owner)))
}

async fn update(
    admin: &Admin,
    kind: OwnerKind,
    id: &str,
    headers: &HeaderMap,
    patch: OwnerPatch,
) -> Result<Response, ApiError> {
    let expected = version::expected(headers, patch.expected_version)?;
    let OwnerPatch { name, team, allowed, limits, tags, blocked, .. } = patch;
    let scope = allowed.map(|allowed| allowed.scope(None)).transpose()?;
    let change = OwnerChange { name, team, scope, limits, budgets: None, tags, blocked };
    // Changes run one after another, so that the version that is checked here is the one that is changed.
    let _turn = admin.turn.lock().await;
    let before = admin.store.owner(kind, id).await?.ok_or_else(|| missing(kind))?;
    version::check(expected, before.version)?;
    let mut after = before.clone();
    change.clone().apply(&mut after);
    check(admin, &after).await?;
    let owner = Owner::from(admin.store.update_owner(kind, id, change).await?.ok_or_else(|| missing(kind))?);
    let did = Did { target: None, detail: json!({ "before": Owner::from(before), "after": owner }) };
    Ok((axum::Extension(did), version::tagged(owner)).into_response())
}

async fn remove(admin: &Admin, kind: OwnerKind, id: &str, headers: &HeaderMap) -> Result<StatusCode, ApiError> {
    let expected = version::expected(headers, None)?;
    let _turn = admin.turn.lock().await;
    if expected.is_some() {
        let there = admin.store.owner(kind, id).await?.ok_or_else(|| missing(kind))?;
        version::check(expected, there.version)?;
    }
    let removed = admin.store.remove_owner(kind, id, clock::unix_seconds()).await?;
    if removed { Ok(StatusCode::NO_CONTENT) } else { Err(missing(kind)) }
}

/// Teams made by the admin API, by id; teams of the config are in the config.
#[utoipa::path(get, path = "/admin/v1/teams", tag = "teams", operation_id = "list_teams", params(ListQuery),
    responses((status = 200, description = "Teams.", body = Page<Owner>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list_teams(
    State(admin): State<Admin>,
    Params(query): Params<ListQuery>,
) -> Result<Json<Page<Owner>>, ApiError> {
    let page = StorePage { limit: query.limit()? as u32, after: query.after, order: Order::Ascending };
    list(&admin, OwnerKind::Team, None, page).await
}

/// Creates a team.
#[utoipa::path(post, path = "/admin/v1/teams", tag = "teams", operation_id = "create_team", request_body = NewOwner,
    responses((status = 201, description = "The team.", body = Owner),
        (status = 409, description = "The id is in use.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn create_team(State(admin): State<Admin>, Body(new): Body<NewOwner>) -> Result<Response, ApiError> {
    create(&admin, OwnerKind::Team, new).await
}

/// One team.
#[utoipa::path(get, path = "/admin/v1/teams/{id}", tag = "teams", operation_id = "get_team",
    params(("id" = String, Path, max_length = 256, description = "Id of the team; a slash in it is sent as %2F.")),
    responses((status = 200, description = "The team.", body = Owner, headers(("etag" = String, description = "Version, for If-Match.")))),
    security(("admin_key" = ["viewer"])))]
pub(crate) async fn get_team(State(admin): State<Admin>, Id(id): Id) -> Result<Response, ApiError> {
    show(&admin, OwnerKind::Team, &id).await
}

/// Changes a team: its permissions, limits, and whether it is blocked.
#[utoipa::path(patch, path = "/admin/v1/teams/{id}", tag = "teams", operation_id = "update_team", request_body = OwnerPatch,
    params(("id" = String, Path, max_length = 256, description = "Id of the team; a slash in it is sent as %2F."),
        ("if-match" = Option<String>, Header, description = "ETag of the expected version of the team.", pattern = "^(\"[0-9]{1,15}\"|\\*)$")),
    responses((status = 200, description = "The team.", body = Owner, headers(("etag" = String, description = "New version."))),
        (status = 412, description = "The version has changed; nothing was done.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn update_team(
    State(admin): State<Admin>,
    Id(id): Id,
    headers: HeaderMap,
    Body(patch): Body<OwnerPatch>,
) -> Result<Response, ApiError> {
    update(&admin, OwnerKind::Team, &id, &headers, patch).await
}

/// Deletes a team. Its keys are refused from then on.
#[utoipa::path(delete, path = "/admin/v1/teams/{id}", tag = "teams", operation_id = "delete_team",
    params(("id" = String, Path, max_length = 256, description = "Id of the team; a slash in it is sent as %2F."),
        ("if-match" = Option<String>, Header, description = "ETag of the expected version of the team.", pattern = "^(\"[0-9]{1,15}\"|\\*)$")),
    responses((status = 204, description = "Deleted."),
        (status = 412, description = "The version has changed; nothing was done.", body = crate::error::ErrorBody)), security(("admin_key" = ["owner"])))]
pub(crate) async fn delete_team(
    State(admin): State<Admin>,
    Id(id): Id,
    headers: HeaderMap,
) -> Result<StatusCode, ApiError> {
    remove(&admin, OwnerKind::Team, &id, &headers).await
}

/// Users, by id.
#[utoipa::path(get, path = "/admin/v1/users", tag = "users", operation_id = "list_users", params(UserFilter),
    responses((status = 200, description = "Users.", body = Page<Owner>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list_users(
    State(admin): State<Admin>,
    Params(query): Params<UserFilter>,
) -> Result<Json<Page<Owner>>, ApiError> {
    let page = StorePage { limit: bounded_limit(query.limit)? as u32, after: query.after, order: Order::Ascending };
    list(&admin, OwnerKind::User, query.team.as_deref(), page).await
}

/// Creates a user.
#[utoipa::path(post, path = "/admin/v1/users", tag = "users", operation_id = "create_user", request_body = NewOwner,
    responses((status = 201, description = "The user.", body = Owner),
        (status = 409, description = "The id is in use.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn create_user(State(admin): State<Admin>, Body(new): Body<NewOwner>) -> Result<Response, ApiError> {
    create(&admin, OwnerKind::User, new).await
}

/// One user.
#[utoipa::path(get, path = "/admin/v1/users/{id}", tag = "users", operation_id = "get_user",
    params(("id" = String, Path, max_length = 256, description = "Id of the user; a slash in it is sent as %2F.")),
    responses((status = 200, description = "The user.", body = Owner, headers(("etag" = String, description = "Version, for If-Match.")))),
    security(("admin_key" = ["viewer"])))]
pub(crate) async fn get_user(State(admin): State<Admin>, Id(id): Id) -> Result<Response, ApiError> {
    show(&admin, OwnerKind::User, &id).await
}

/// Changes a user: its team, permissions, limits, and whether it is blocked.
#[utoipa::path(patch, path = "/admin/v1/users/{id}", tag = "users", operation_id = "update_user", request_body = OwnerPatch,
    params(("id" = String, Path, max_length = 256, description = "Id of the user; a slash in it is sent as %2F."),
        ("if-match" = Option<String>, Header, description = "ETag of the expected version of the user.", pattern = "^(\"[0-9]{1,15}\"|\\*)$")),
    responses((status = 200, description = "The user.", body = Owner, headers(("etag" = String, description = "New version."))),
        (status = 412, description = "The version has changed; nothing was done.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn update_user(
    State(admin): State<Admin>,
    Id(id): Id,
    headers: HeaderMap,
    Body(patch): Body<OwnerPatch>,
) -> Result<Response, ApiError> {
    update(&admin, OwnerKind::User, &id, &headers, patch).await
}

/// Deletes a user.
#[utoipa::path(delete, path = "/admin/v1/users/{id}", tag = "users", operation_id = "delete_user",
    params(("id" = String, Path, max_length = 256, description = "Id of the user; a slash in it is sent as %2F."),
        ("if-match" = Option<String>, Header, description = "ETag of the expected version of the user.", pattern = "^(\"[0-9]{1,15}\"|\\*)$")),
    responses((status = 204, description = "Deleted."),
        (status = 412, description = "The version has changed; nothing was done.", body = crate::error::ErrorBody)), security(("admin_key" = ["owner"])))]
pub(crate) async fn delete_user(
    State(admin): State<Admin>,
    Id(id): Id,
    headers: HeaderMap,
) -> Result<StatusCode, ApiError> {
    remove(&admin, OwnerKind::User, &id, &headers).await
}
