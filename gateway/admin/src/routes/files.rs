//! Files of all keys: names and sizes, never their content.

use axum::extract::State;
use axum::{Extension, Json};
use penstock_store::{Deleted, FileId, InventoryFilter, Order, OwnedFile, Tenant};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::{IntoParams, ToSchema};

use crate::audit::Did;
use crate::error::{ApiError, ErrorBody};
use crate::extract::{Id, Page, Paging, Params, storable};
use crate::state::Admin;

/// File of a key.
#[derive(Serialize, ToSchema)]
pub(crate) struct StoredFile {
    id: String,
    /// Key or token user that owns the file; empty where no keys are configured.
    key: String,
    /// Purpose: batch, batch_output, user_data, and others of the API.
    purpose: String,
    /// File name that the client gave.
    name: String,
    bytes: u64,
    created_at: u64,
    /// Time at which the file will be deleted. None: the file does not expire.
    expires_at: Option<u64>,
    /// True if a batch that has not ended reads the file, which cannot be deleted then.
    in_use: bool,
}

impl From<OwnedFile> for StoredFile {
    fn from(owned: OwnedFile) -> Self {
        let OwnedFile { tenant, file, is_in_use } = owned;
        Self {
            id: file.id.to_string(),
            key: tenant.as_str().to_owned(),
            purpose: file.purpose,
            name: file.name,
            bytes: file.bytes,
            created_at: file.created,
            expires_at: file.expires,
            in_use: is_in_use,
        }
    }
}

/// Files to list.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    #[serde(flatten)]
    #[param(ignore)]
    paging: Paging,
    /// Only files of this key or token user.
    #[param(max_length = 512)]
    key: Option<String>,
}

/// Files of all keys, by the time at which they were made, without those that belong to batches of messages.
#[utoipa::path(get, path = "/admin/v1/files", tag = "batches", operation_id = "list_files", params(Filter, Paging),
    responses((status = 200, description = "Files.", body = Page<StoredFile>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(
    State(admin): State<Admin>,
    Params(query): Params<Filter>,
) -> Result<Json<Page<StoredFile>>, ApiError> {
    let filter = InventoryFilter {
        tenant: query.key.as_deref().map(|key| Tenant::new(&storable(key))),
        ..InventoryFilter::default()
    };
    let listing = admin.store.all_files(&filter, &query.paging.page()?).await?;
    Ok(Json(Page::of(listing, StoredFile::from, |file| &file.id)))
}

fn gone() -> ApiError {
    ApiError::not_found("There is no file of that id.")
}

async fn find(admin: &Admin, id: &str) -> Result<OwnedFile, ApiError> {
    let id = FileId::parse(id).ok_or_else(gone)?;
    let filter = InventoryFilter { id: Some(id.as_str().to_owned()), ..InventoryFilter::default() };
    let page = penstock_store::Page { after: None, limit: 1, order: Order::Descending };
    admin.store.all_files(&filter, &page).await?.items.pop().ok_or_else(gone)
}

/// File by its id: owner, name and size, never its content.
#[utoipa::path(get, path = "/admin/v1/files/{id}", tag = "batches", operation_id = "get_file",
    params(("id" = String, Path, max_length = 128, description = "Id of the file.")),
    responses((status = 200, description = "The file.", body = StoredFile)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(State(admin): State<Admin>, Id(id): Id) -> Result<Json<StoredFile>, ApiError> {
    Ok(Json(find(&admin, &id).await?.into()))
}

/// File that was deleted.
#[derive(Serialize, ToSchema)]
pub(crate) struct DeletedFile {
    deleted: StoredFile,
}

/// Deletes a file of a key, for good. A file that a batch still reads stays.
#[utoipa::path(delete, path = "/admin/v1/files/{id}", tag = "batches", operation_id = "delete_file",
    params(("id" = String, Path, max_length = 128, description = "Id of the file.")),
    responses((status = 200, description = "The file is deleted.", body = DeletedFile),
        (status = 409, description = "A batch that has not ended reads the file.", body = ErrorBody)),
    security(("admin_key" = ["owner"])))]
pub(crate) async fn delete(
    State(admin): State<Admin>,
    Id(id): Id,
) -> Result<(Extension<Did>, Json<DeletedFile>), ApiError> {
    let owned = find(&admin, &id).await?;
    match admin.store.delete_file(&owned.tenant, &owned.file.id).await? {
        Deleted::Yes => {
            let OwnedFile { tenant, file, .. } = &owned;
            let before = json!({ "key": tenant.as_str(), "purpose": file.purpose, "bytes": file.bytes });
            let did = Extension(Did { target: None, detail: json!({ "before": before }) });
            Ok((did, Json(DeletedFile { deleted: owned.into() })))
        }
        Deleted::InUse => {
            Err(ApiError::conflict("A batch that has not ended reads this file: cancel it, or wait for its end."))
        }
        Deleted::Absent => Err(gone()),
    }
}
