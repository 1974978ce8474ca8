//! Batches of all keys: their state and counts, never a line of theirs.

use axum::extract::State;
use axum::{Extension, Json};
use penstock_base::clock;
use penstock_store::{BatchId, Cancelled as Outcome, InventoryFilter, OwnedBatch, Tenant};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::{IntoParams, ToSchema};

use crate::audit::Did;
use crate::error::{ApiError, ErrorBody};
use crate::extract::{Id, Page, Paging, Params, number, storable};
use crate::state::Admin;

/// Batch of a key.
#[derive(Serialize, ToSchema)]
pub(crate) struct Batch {
    id: String,
    /// Key or token user that made the batch; empty where no keys are configured.
    key: String,
    /// State of the batch: validating, failed, in_progress, finalizing, completed, expired, cancelling, cancelled.
    status: String,
    /// URL of the requests; /v1/messages: a batch of messages.
    endpoint: String,
    /// Id of the input file; of a batch of messages a file that clients do not see.
    input_file: String,
    /// Size of the input file in bytes. None: the file is deleted.
    input_bytes: Option<u64>,
    /// Size of all results so far in bytes.
    output_bytes: u64,
    /// Number of requests; 0 until validation has counted them.
    requests: u64,
    requests_completed: u64,
    requests_failed: u64,
    created_at: u64,
    /// Deadline of the batch: requests that have not run by then expire.
    expires_at: u64,
    /// Time at which the requests began to run.
    in_progress_at: Option<u64>,
    ended_at: Option<u64>,
    /// True if the batch can be cancelled.
    cancellable: bool,
}

impl From<OwnedBatch> for Batch {
    fn from(owned: OwnedBatch) -> Self {
        use penstock_store::BatchStatus::{InProgress, Validating};
        let OwnedBatch { tenant, batch, input_bytes, output_bytes } = owned;
        Self {
            id: batch.id.to_string(),
            key: tenant.as_str().to_owned(),
            status: batch.status.name().to_owned(),
            endpoint: batch.endpoint,
            input_file: batch.input.to_string(),
            input_bytes,
            output_bytes,
            requests: batch.counts.total,
            requests_completed: batch.counts.completed,
            requests_failed: batch.counts.failed,
            created_at: batch.times.created,
            expires_at: batch.times.expires,
            in_progress_at: batch.times.in_progress,
            ended_at: batch.times.ended,
            cancellable: matches!(batch.status, Validating | InProgress),
        }
    }
}

/// Batches to list.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    #[serde(flatten)]
    #[param(ignore)]
    paging: Paging,
    /// Only batches of this key or token user.
    #[param(max_length = 512)]
    key: Option<String>,
    /// Only batches that have not ended.
    #[serde(default, deserialize_with = "number")]
    open: Option<bool>,
}

/// Batches of all keys, by the time at which they were made.
#[utoipa::path(get, path = "/admin/v1/batches", tag = "batches", operation_id = "list_batches", params(Filter, Paging),
    responses((status = 200, description = "Batches.", body = Page<Batch>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(
    State(admin): State<Admin>,
    Params(query): Params<Filter>,
) -> Result<Json<Page<Batch>>, ApiError> {
    let filter = InventoryFilter {
        tenant: query.key.as_deref().map(|key| Tenant::new(&storable(key))),
        id: None,
        is_open: query.open.unwrap_or(false),
    };
    let listing = admin.store.all_batches(&filter, &query.paging.page()?).await?;
    Ok(Json(Page::of(listing, Batch::from, |batch| &batch.id)))
}

fn gone() -> ApiError {
    ApiError::not_found("There is no batch of that id.")
}

async fn find(admin: &Admin, id: &str) -> Result<OwnedBatch, ApiError> {
    let id = BatchId::parse(id).ok_or_else(gone)?;
    let filter = InventoryFilter { id: Some(id.as_str().to_owned()), ..InventoryFilter::default() };
    let page = penstock_store::Page { after: None, limit: 1, order: penstock_store::Order::Descending };
    admin.store.all_batches(&filter, &page).await?.items.pop().ok_or_else(gone)
}

/// Batch by its id, with its state and counts.
#[utoipa::path(get, path = "/admin/v1/batches/{id}", tag = "batches", operation_id = "get_batch",
    params(("id" = String, Path, max_length = 128, description = "Id of the batch.")),
    responses((status = 200, description = "The batch.", body = Batch)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(State(admin): State<Admin>, Id(id): Id) -> Result<Json<Batch>, ApiError> {
    Ok(Json(find(&admin, &id).await?.into()))
}

/// Cancels a batch: requests in progress are stopped, and its results so far are kept for its key.
#[utoipa::path(post, path = "/admin/v1/batches/{id}/cancel", tag = "batches", operation_id = "cancel_batch",
    params(("id" = String, Path, max_length = 128, description = "Id of the batch.")),
    responses((status = 200, description = "The batch, which is being cancelled or was cancelled already.", body = Batch),
        (status = 409, description = "The batch has ended, or its results are being written.", body = ErrorBody)),
    security(("admin_key" = ["operator"])))]
pub(crate) async fn cancel(State(admin): State<Admin>, Id(id): Id) -> Result<(Extension<Did>, Json<Batch>), ApiError> {
    let owned = find(&admin, &id).await?;
    let before = owned.batch.status.name();
    match admin.store.cancel_batch(&owned.tenant, &owned.batch.id, clock::unix_seconds()).await? {
        Outcome::Yes(batch) => {
            admin.gateway.wake_batches();
            let detail = json!({ "key": owned.tenant.as_str(), "before": before, "after": batch.status.name() });
            let did = Extension(Did { target: None, detail });
            Ok((did, Json(OwnedBatch { batch, ..owned }.into())))
        }
        Outcome::TooLate(batch) => {
            let message = format!("The batch cannot be cancelled any more: it is {}.", batch.status.name());
            Err(ApiError::conflict(message))
        }
        Outcome::Absent => Err(gone()),
    }
}
