//! Pools of our own engines, as wholes.

use axum::extract::State;
use axum::{Extension, Json};
use penstock_pool::{Counts, PoolStatus, ReplicaError, ReplicaOrder, ReplicaStatus, TransferSums, WorkerPhase};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::audit::Did;
use crate::error::ApiError;
use crate::extract::{Body, Id, ListQuery, Page, Params};
use crate::state::Admin;

/// Pool of workers.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Pool {
    /// Model name in requests.
    id: String,
    workers: usize,
    workers_ready: usize,
    /// Open requests, waiting and running.
    open: usize,
    /// Part of them that waits in the gateway.
    waiting: usize,
    /// Predicted TTFT of a short new request, in seconds; absent while no worker is ready.
    ttft_predicted_seconds: Option<f64>,
    /// KV blocks in the router's index.
    blocks_indexed: usize,
    /// Last change by the planner of roles, or the change that a dry run would have made.
    role_advice: Option<String>,
    /// Wanted number of workers and its reason; absent where the number is fixed.
    replicas: Option<Replicas>,
    counts: PoolCounts,
    transfers: PoolTransfers,
}

/// Number of a pool's workers, which follows the load.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Replicas {
    /// Whether changes are only reported, not made (dry run).
    dry_run: bool,
    /// Whether changes are paused until an operator resumes them.
    paused: bool,
    /// Smallest number of workers.
    min: usize,
    /// Largest number of workers.
    max: usize,
    /// Wanted number of workers.
    wanted: usize,
    /// Number of workers that run or start.
    running: usize,
    /// Reason for the wanted number.
    reason: String,
    /// Load of the ready workers as a share of capacity; 1 is full.
    load: f64,
    /// Share of recent first tokens that came later than the objective; absent when few came.
    late: Option<f64>,
    /// Last change, or the change that a dry run would have made.
    last_change: Option<String>,
    starts: u64,
    stops: u64,
    /// Starts and stops that failed.
    failures: u64,
    last_failure: Option<String>,
}

impl From<ReplicaStatus> for Replicas {
    fn from(status: ReplicaStatus) -> Self {
        Self {
            dry_run: status.dry_run,
            paused: status.paused,
            min: status.min,
            max: status.max,
            wanted: status.wanted,
            running: status.running,
            reason: status.why,
            load: if status.load.is_finite() { status.load } else { 0.0 },
            late: status.late,
            last_change: status.last,
            starts: status.starts,
            stops: status.stops,
            failures: status.failures,
            last_failure: status.last_failure,
        }
    }
}

/// Counts since the gateway began.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct PoolCounts {
    submitted: u64,
    finished: u64,
    /// Requests cancelled by their clients.
    cancelled: u64,
    failed: u64,
    /// Requests resumed after a lost worker.
    resumed: u64,
    /// Part of `resumed` that was not bit-exact.
    resumed_inexact: u64,
    /// Tokens that workers sent twice or too late; no client saw them.
    tokens_dropped: u64,
    tokens: u64,
    /// Prompt tokens that the router predicted as cached.
    cached_tokens_predicted: u64,
    /// Prompt tokens that were cached.
    cached_tokens: u64,
    /// Role changes that followed the load.
    role_flips: u64,
    /// Requests whose prefill another worker was asked to compute.
    prefilled_apart: u64,
    /// Requests that migrated to another worker while they ran.
    moves: u64,
    /// Requests whose migration failed, and which stayed at their worker.
    moves_failed: u64,
}

/// KV transfers between workers since the gateway began, including those that adopted workers report from before.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct PoolTransfers {
    /// Transfers that brought all requested blocks.
    completed: u64,
    /// Transfers that broke off or were refused; missing blocks were computed.
    failed: u64,
    /// Transfers cancelled because no request waited any more, or because their pages were needed.
    cancelled: u64,
    /// KV blocks received and used.
    blocks: u64,
    bytes: u64,
    /// Seconds from the first to the last page, summed over transfers.
    seconds: f64,
    /// Part of these seconds of transfers with prefill at the sending worker.
    prefill_seconds: f64,
    /// Part of these seconds that overlapped with prefill at the sending worker.
    hidden_seconds: f64,
    /// Part of the bytes that came through memory that both workers map.
    memory_bytes: u64,
    /// Part of the bytes that came on the second and further connections of a transfer.
    stream_bytes: u64,
    /// Part of the failed transfers that went on at another prefill worker.
    asked_next: u64,
    /// First tokens sampled by the prefill worker.
    first_tokens: u64,
}

impl From<TransferSums> for PoolTransfers {
    fn from(sums: TransferSums) -> Self {
        Self {
            completed: sums.completed,
            failed: sums.failed,
            cancelled: sums.cancelled,
            blocks: sums.blocks,
            bytes: sums.bytes,
            seconds: sums.seconds,
            prefill_seconds: sums.prefill_seconds,
            hidden_seconds: sums.hidden_seconds,
            memory_bytes: sums.memory_bytes,
            stream_bytes: sums.stream_bytes,
            asked_next: sums.asked_next,
            first_tokens: sums.first_tokens,
        }
    }
}

impl From<Counts> for PoolCounts {
    fn from(counts: Counts) -> Self {
        Self {
            submitted: counts.submitted,
            finished: counts.finished,
            cancelled: counts.cancelled,
            failed: counts.failed,
            resumed: counts.resumed,
            resumed_inexact: counts.resumed_inexact,
            tokens_dropped: counts.tokens_dropped,
            tokens: counts.tokens,
            cached_tokens_predicted: counts.cached_tokens_predicted,
            cached_tokens: counts.cached_tokens_told,
            role_flips: counts.role_flips,
            prefilled_apart: counts.prefilled_apart,
            moves: counts.moves.iter().sum(),
            moves_failed: counts.moves_failed.iter().sum(),
        }
    }
}

/// All pools.
pub(crate) fn all(admin: &Admin) -> Vec<Pool> {
    admin.fleet.pools().into_iter().map(|(id, pool)| Pool::new(id, &pool.status())).collect()
}

impl Pool {
    fn new(id: String, status: &PoolStatus) -> Self {
        let ready = status.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready).count();
        Self {
            id,
            workers: status.workers.len(),
            workers_ready: ready,
            open: status.open,
            waiting: status.waiting,
            ttft_predicted_seconds: (ready > 0).then_some(status.ttft_predicted.as_secs_f64()),
            blocks_indexed: status.blocks_indexed,
            role_advice: status.role_advice.clone(),
            replicas: status.replicas.clone().map(Replicas::from),
            counts: status.counts.into(),
            transfers: status.sums().transfers.into(),
        }
    }
}

/// Pools, by id. A pool that is being replaced is listed twice.
#[utoipa::path(get, path = "/admin/v1/pools", tag = "workers", operation_id = "list_pools", params(ListQuery),
    responses((status = 200, description = "Pools.", body = Page<Pool>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(
    State(admin): State<Admin>,
    Params(query): Params<ListQuery>,
) -> Result<Json<Page<Pool>>, ApiError> {
    Page::cut(all(&admin), &query, |pool| &pool.id)
}

/// Bounds of the number of workers; fields that are left out stay as they are.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetReplicas {
    /// Smallest number of workers.
    #[schema(minimum = 1, maximum = 128)]
    min: Option<usize>,
    /// Largest number of workers.
    #[schema(minimum = 1, maximum = 128)]
    max: Option<usize>,
    /// Whether changes are paused.
    paused: Option<bool>,
}

/// Bounds or pauses the number of workers, until the config changes or the process ends.
#[utoipa::path(post, path = "/admin/v1/pools/{id}/replicas", tag = "workers", operation_id = "set_replicas", request_body = SetReplicas,
    params(("id" = String, Path, max_length = 512, description = "Model name in requests; a slash in it is sent as %2F.")),
    responses((status = 200, description = "The pool.", body = Pool),
        (status = 409, description = "The number of workers of this pool is fixed.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["operator"])))]
pub(crate) async fn replicas(
    State(admin): State<Admin>,
    Id(id): Id,
    Body(wish): Body<SetReplicas>,
) -> Result<(Extension<Did>, Json<Pool>), ApiError> {
    let order = ReplicaOrder { min: wish.min, max: wish.max, paused: wish.paused };
    let pools: Vec<_> = admin.fleet.pools().into_iter().filter(|(other, _)| *other == id).collect();
    // A pool that is being replaced is listed twice: the last entry is the new one, which stays.
    let Some((id, pool)) = pools.last() else { return Err(ApiError::not_found("There is no pool of that id.")) };
    match pool.replicas(order).await {
        Ok(()) => Ok((Did::set(wish), Json(Pool::new(id.clone(), &pool.status())))),
        Err(error @ ReplicaError::Fixed) => Err(ApiError::conflict(error.to_string())),
        Err(error @ ReplicaError::Bounds(_)) => Err(ApiError::invalid("max", format!("max: {error}"))),
        Err(error @ ReplicaError::Closed) => Err(ApiError::unavailable(error.to_string())),
    }
}
