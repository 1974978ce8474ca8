//! Issued API keys: made, changed, rotated, revoked.
//!
//! The text of a key is in one answer, once: that of the request that made it.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode, header};
use penstock_auth::{Desk, DeskError, Issued, NewKey as Wish, Standing};
use penstock_base::clock;
use penstock_govern::Scope;
use penstock_store::{KeyChange, KeyFilter, KeyId, KeyRecord, Listing};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::{IntoParams, ToSchema};

use crate::audit::Did;
use crate::error::{ApiError, Code};
use crate::extract::{Body, Id, Page, Paging, Params, double};
use crate::state::Admin;
use crate::version::{self, Versioned};

/// Default time for which an old text stays valid beside the new one, in seconds.
const GRACE_SECONDS: u64 = 3600;

/// Permissions of a key, team or user. An empty list allows everything of its kind.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Allowed {
    /// Models: names, or prefixes that end in *.
    #[schema(max_items = 256)]
    models: Vec<String>,
    /// Routes by their labels, as /v1/chat/completions, or prefixes that end in *.
    #[schema(max_items = 256)]
    routes: Vec<String>,
    /// Dialects: openai, anthropic, gemini, ollama.
    #[schema(max_items = 256)]
    dialects: Vec<String>,
    /// Addresses and networks of clients, as 10.0.0.0/8.
    #[schema(max_items = 256)]
    addresses: Vec<String>,
}

impl Allowed {
    pub(crate) fn of(scope: &Scope) -> Self {
        Self {
            models: scope.models.clone(),
            routes: scope.routes.clone(),
            dialects: scope.dialects.clone(),
            addresses: scope.addresses.iter().map(ToString::to_string).collect(),
        }
    }

    pub(crate) fn scope(self, expires: Option<u64>) -> Result<Scope, ApiError> {
        let mut addresses = Vec::new();
        for text in &self.addresses {
            let single = || text.parse::<std::net::IpAddr>().ok().map(Into::into);
            let network = text.parse().ok().or_else(single);
            let wrong =
                || ApiError::invalid("addresses", format!("addresses: {text:?} is neither an address nor a network"));
            addresses.push(network.ok_or_else(wrong)?);
        }
        Ok(Scope { models: self.models, routes: self.routes, dialects: self.dialects, addresses, expires })
    }
}

/// Issued key, without its text.
#[derive(Serialize, ToSchema)]
pub(crate) struct Key {
    id: String,
    name: String,
    state: KeyState,
    /// Last characters of the text.
    ends_with: String,
    team: Option<String>,
    user: Option<String>,
    /// Id of the parent key.
    parent: Option<String>,
    allowed: Allowed,
    /// Ids of the limits that the key counts against.
    limits: Vec<String>,
    tags: Vec<String>,
    /// Creation time in Unix seconds; all times here are.
    created: u64,
    expires: Option<u64>,
    rotated: Option<u64>,
    /// Time until which the text before the last rotation stays valid.
    previous_until: Option<u64>,
    revoked: Option<u64>,
    /// Version number, which rises with every change.
    version: u64,
}

/// State of a key: whether its requests are let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum KeyState {
    Good,
    Expired,
    Revoked,
    /// Parent key revoked or gone.
    ParentRevoked,
    /// Parent key expired.
    ParentExpired,
    /// User or team blocked, or team gone.
    Blocked,
}

impl From<Standing> for KeyState {
    fn from(standing: Standing) -> Self {
        match standing {
            Standing::Good => Self::Good,
            Standing::Expired => Self::Expired,
            Standing::Revoked => Self::Revoked,
            Standing::ParentRevoked => Self::ParentRevoked,
            Standing::ParentExpired => Self::ParentExpired,
            Standing::Blocked => Self::Blocked,
        }
    }
}

impl Key {
    fn of(key: KeyRecord, standing: Standing) -> Self {
        Self {
            id: key.id.to_string(),
            name: key.name,
            state: standing.into(),
            ends_with: key.hint,
            team: key.team,
            user: key.user,
            parent: key.parent.map(|parent| parent.to_string()),
            allowed: Allowed::of(&key.scope),
            limits: key.limits,
            tags: key.tags,
            created: key.created,
            expires: key.expires,
            rotated: key.rotated,
            previous_until: key.previous.map(|previous| previous.until),
            revoked: key.revoked,
            version: key.version,
        }
    }
}

impl Versioned for Key {
    fn version(&self) -> u64 {
        self.version
    }
}

/// Issued key with its text, only once.
#[derive(Serialize, ToSchema)]
pub(crate) struct IssuedKey {
    /// Text of the key. No other answer shows it.
    secret: String,
    key: Key,
}

/// Key to issue.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewKey {
    /// Display name. Default: the id.
    #[serde(default)]
    #[schema(max_length = 256)]
    name: String,
    #[schema(max_length = 256)]
    team: Option<String>,
    #[schema(max_length = 256)]
    user: Option<String>,
    /// Parent key: the new key may do no more than its parent, and is revoked with it.
    #[schema(max_length = 256)]
    parent: Option<String>,
    #[serde(default)]
    allowed: Allowed,
    /// Expiry in Unix seconds.
    #[schema(minimum = 0, maximum = 9_999_999_999_i64)]
    expires: Option<u64>,
    /// Ids of limits of the config.
    #[serde(default)]
    #[schema(max_items = 256)]
    limits: Vec<String>,
    #[serde(default)]
    #[schema(max_items = 256)]
    tags: Vec<String>,
}

/// Changes of a key; fields that are left out stay as they are.
#[derive(Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct KeyPatch {
    #[schema(max_length = 256)]
    name: Option<String>,
    /// Team of the key; null: none.
    #[serde(deserialize_with = "double")]
    #[schema(value_type = Option<String>, max_length = 256)]
    team: Option<Option<String>>,
    /// User of the key; null: none.
    #[serde(deserialize_with = "double")]
    #[schema(value_type = Option<String>, max_length = 256)]
    user: Option<Option<String>>,
    allowed: Option<Allowed>,
    /// Expiry in Unix seconds; null: never.
    #[serde(deserialize_with = "double")]
    #[schema(value_type = Option<u64>, minimum = 0, maximum = 9_999_999_999_i64)]
    expires: Option<Option<u64>>,
    #[schema(max_items = 256)]
    limits: Option<Vec<String>>,
    #[schema(max_items = 256)]
    tags: Option<Vec<String>>,
    /// Expected version: if the key has another one by now, nothing happens. Same as the header If-Match.
    #[schema(minimum = 0, maximum = 9_007_199_254_740_991_i64)]
    expected_version: Option<u64>,
}

/// Rotation of a key.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rotate {
    /// Seconds for which the old text stays valid beside the new one. Default: an hour. 0: not at all.
    #[schema(minimum = 0, maximum = 7_776_000)]
    grace_seconds: Option<u64>,
}

/// Filter of issued keys.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    #[serde(flatten)]
    #[param(ignore)]
    paging: Paging,
    /// Only keys of this team.
    #[param(max_length = 256)]
    team: Option<String>,
    /// Only keys of this user.
    #[param(max_length = 256)]
    user: Option<String>,
    /// Only revoked keys, or only valid ones. Default: all.
    revoked: Option<bool>,
}

impl From<DeskError> for ApiError {
    fn from(error: DeskError) -> Self {
        let message = error.to_string();
        match error {
            DeskError::Invalid { field, .. } => Self::invalid(field, message),
            DeskError::NotFound(_) => Self::not_found(message),
            DeskError::Revoked(_) | DeskError::Taken(_) => Self::conflict(message),
            DeskError::Pepper(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, Code::Unavailable, message),
            DeskError::Store(error) => error.into(),
        }
    }
}

fn desk(admin: &Admin) -> Desk {
    Desk::new(admin.store.clone(), &admin.gateway.serving().config.auth_settings())
}

/// Key in the form of the API, with its standing.
async fn judged(admin: &Admin, key: KeyRecord) -> Result<Key, ApiError> {
    let standings = desk(admin).standings(std::slice::from_ref(&key), clock::unix_seconds()).await?;
    Ok(Key::of(key, standings.first().copied().unwrap_or(Standing::Good)))
}

fn key_id(text: &str) -> Result<KeyId, ApiError> {
    KeyId::parse(text).ok_or_else(|| ApiError::not_found("There is no issued key of that id."))
}

/// Checks that the config knows all these limits: an unknown one would not limit anything.
pub(crate) fn known_limits(admin: &Admin, limits: &[String]) -> Result<(), ApiError> {
    Ok(desk(admin).check_limits(limits)?)
}

async fn issued(admin: &Admin, status: StatusCode, Issued { secret, record }: Issued) -> Response {
    // A store that is away by now does not keep the text from whoever asked for it.
    let key = judged(admin, record.clone()).await.unwrap_or_else(|_| Key::of(record, Standing::Good));
    let did = Did {
        target: Some(key.id.clone()),
        detail: json!({ "name": key.name, "team": key.team, "limits": key.limits }),
    };
    let tag = version::tag(key.version);
    let body = IssuedKey { secret: secret.expose().to_owned(), key };
    (status, [(header::ETAG, tag)], axum::Extension(did), Json(body)).into_response()
}

/// Issued keys.
#[utoipa::path(get, path = "/admin/v1/keys", tag = "keys", operation_id = "list_keys", params(Paging, Filter),
    responses((status = 200, description = "Keys, without their texts.", body = Page<Key>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(
    State(admin): State<Admin>,
    Params(query): Params<Filter>,
) -> Result<Json<Page<Key>>, ApiError> {
    let page = query.paging.page()?;
    let filter = KeyFilter { team: query.team, user: query.user, parent: None, revoked: query.revoked };
    let desk = desk(&admin);
    let Listing { items, more } = desk.list(&filter, &page).await?;
    let standings = desk.standings(&items, clock::unix_seconds()).await?;
    let keys = Listing { items: items.into_iter().zip(standings).collect(), more };
    Ok(Json(Page::of(keys, |(key, standing)| Key::of(key, standing), |key| &key.id)))
}

/// Issues a key. Its text is in this answer and nowhere else.
#[utoipa::path(post, path = "/admin/v1/keys", tag = "keys", operation_id = "create_key", request_body = NewKey,
    responses((status = 201, description = "The key and its text.", body = IssuedKey),
        (status = 409, description = "The parent key is revoked.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn create(State(admin): State<Admin>, Body(new): Body<NewKey>) -> Result<Response, ApiError> {
    known_limits(&admin, &new.limits)?;
    let parent = match &new.parent {
        Some(id) => {
            Some(KeyId::parse(id).ok_or_else(|| ApiError::invalid("parent", "parent: no id of an issued key"))?)
        }
        None => None,
    };
    let wish = Wish {
        name: new.name,
        team: new.team,
        user: new.user,
        parent,
        scope: new.allowed.scope(new.expires)?,
        limits: new.limits,
        tags: new.tags,
    };
    let made = desk(&admin).create(wish, clock::unix_seconds()).await.map_err(|error| match error {
        DeskError::NotFound(_) => ApiError::invalid("parent", error.to_string()),
        other => other.into(),
    })?;
    Ok(issued(&admin, StatusCode::CREATED, made).await)
}

/// One issued key.
#[utoipa::path(get, path = "/admin/v1/keys/{id}", tag = "keys", operation_id = "get_key",
    params(("id" = String, Path, max_length = 256, description = "Id of the key.")),
    responses((status = 200, description = "The key, without its text.", body = Key, headers(("etag" = String, description = "Version, for If-Match.")))),
    security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(State(admin): State<Admin>, Id(id): Id) -> Result<Response, ApiError> {
    let key = desk(&admin).show(&key_id(&id)?).await?;
    Ok(version::tagged(judged(&admin, key).await?))
}

/// Changes a key. New permissions apply from its next request on.
#[utoipa::path(patch, path = "/admin/v1/keys/{id}", tag = "keys", operation_id = "update_key", request_body = KeyPatch,
    params(("id" = String, Path, max_length = 256, description = "Id of the key."),
        ("if-match" = Option<String>, Header, description = "ETag of the expected version of the key.", pattern = "^(\"[0-9]{1,15}\"|\\*)$")),
    responses((status = 200, description = "The key.", body = Key, headers(("etag" = String, description = "New version."))),
        (status = 409, description = "The parent key is revoked.", body = crate::error::ErrorBody),
        (status = 412, description = "The version has changed; nothing was done.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn update(
    State(admin): State<Admin>,
    Id(id): Id,
    headers: HeaderMap,
    Body(patch): Body<KeyPatch>,
) -> Result<Response, ApiError> {
    let (id, desk) = (key_id(&id)?, desk(&admin));
    known_limits(&admin, patch.limits.as_deref().unwrap_or_default())?;
    let expected = version::expected(&headers, patch.expected_version)?;
    // Changes run one after another, so that the version that is checked here is the one that is changed.
    let _turn = admin.turn.lock().await;
    let before = judged(&admin, desk.show(&id).await?).await?;
    version::check(expected, before.version)?;
    let end = patch.expires.unwrap_or(before.expires);
    let scope = patch.allowed.map(|allowed| allowed.scope(end)).transpose()?;
    let KeyPatch { name, team, user, expires, limits, tags, .. } = patch;
    let change = KeyChange { name, team, user, scope, limits, tags, expires };
    let key = judged(&admin, desk.change(&id, change, clock::unix_seconds()).await?).await?;
    let did = Did { target: None, detail: json!({ "before": before, "after": key }) };
    Ok((axum::Extension(did), version::tagged(key)).into_response())
}

/// Turn of a change of a key whose version is the one that `If-Match` names, if it names one.
async fn expected<'a>(
    admin: &'a Admin,
    desk: &Desk,
    id: &KeyId,
    headers: &HeaderMap,
) -> Result<tokio::sync::MutexGuard<'a, ()>, ApiError> {
    let expected = version::expected(headers, None)?;
    let turn = admin.turn.lock().await;
    if expected.is_some() {
        version::check(expected, desk.show(id).await?.version)?;
    }
    Ok(turn)
}

/// Rotates a key. Its new text is in this answer and nowhere else; the old text stays valid for a while.
#[utoipa::path(post, path = "/admin/v1/keys/{id}/rotate", tag = "keys", operation_id = "rotate_key", request_body = Rotate,
    params(("id" = String, Path, max_length = 256, description = "Id of the key."),
        ("if-match" = Option<String>, Header, description = "ETag of the expected version of the key.", pattern = "^(\"[0-9]{1,15}\"|\\*)$")),
    responses((status = 200, description = "The key and its new text.", body = IssuedKey),
        (status = 409, description = "The key is revoked.", body = crate::error::ErrorBody),
        (status = 412, description = "The version has changed; nothing was done.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn rotate(
    State(admin): State<Admin>,
    Id(id): Id,
    headers: HeaderMap,
    Body(how): Body<Rotate>,
) -> Result<Response, ApiError> {
    let grace = Duration::from_secs(how.grace_seconds.unwrap_or(GRACE_SECONDS));
    let (id, desk) = (key_id(&id)?, desk(&admin));
    let _turn = expected(&admin, &desk, &id, &headers).await?;
    let made = desk.rotate(&id, grace, clock::unix_seconds()).await?;
    Ok(issued(&admin, StatusCode::OK, made).await)
}

/// Revokes a key and all keys made from it: within a second, at every gateway.
#[utoipa::path(post, path = "/admin/v1/keys/{id}/revoke", tag = "keys", operation_id = "revoke_key",
    params(("id" = String, Path, max_length = 256, description = "Id of the key."),
        ("if-match" = Option<String>, Header, description = "ETag of the expected version of the key.", pattern = "^(\"[0-9]{1,15}\"|\\*)$")),
    responses((status = 200, description = "The key.", body = Key),
        (status = 412, description = "The version has changed; nothing was done.", body = crate::error::ErrorBody)), security(("admin_key" = ["operator"])))]
pub(crate) async fn revoke(State(admin): State<Admin>, Id(id): Id, headers: HeaderMap) -> Result<Response, ApiError> {
    let (id, desk) = (key_id(&id)?, desk(&admin));
    let _turn = expected(&admin, &desk, &id, &headers).await?;
    let key = desk.revoke(&id, clock::unix_seconds()).await?;
    Ok(version::tagged(judged(&admin, key).await?))
}
