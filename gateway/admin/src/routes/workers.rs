//! Workers of our own pools.

use std::time::Duration;

use axum::extract::State;
use axum::{Extension, Json};
use penstock_pool::{AdapterState, Steer, SteerError, WorkerPhase, WorkerStatus};
use penstock_proto::frames::{GpuState, Role};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::audit::Did;
use crate::error::ApiError;
use crate::extract::{Body, Id, ListQuery, Page, Params};
use crate::state::Admin;

/// Decode steps of a worker, by its own clock.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
struct DecodeSteps {
    count: u64,
    /// Median step time (p50), in seconds.
    p50_seconds: f64,
    /// 99th percentile of step times (p99), in seconds.
    p99_seconds: f64,
    max_seconds: f64,
}

impl From<penstock_pool::DecodeSteps> for DecodeSteps {
    fn from(steps: penstock_pool::DecodeSteps) -> Self {
        let penstock_pool::DecodeSteps { count, p50, p99, max } = steps;
        Self { count, p50_seconds: p50, p99_seconds: p99, max_seconds: max }
    }
}

/// Figures of the GPU that computes; `null` for each that the GPU or its driver does not tell. Other processes on the GPU count too.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct WorkerGpu {
    /// Memory in use, in bytes.
    memory_used_bytes: Option<u64>,
    /// Memory in all, in bytes.
    memory_total_bytes: Option<u64>,
    /// Share of time in which a kernel ran, 0 to 1.
    utilization: Option<f64>,
    /// Share of time in which memory was read or written, 0 to 1.
    memory_utilization: Option<f64>,
    /// Power drawn, in watts.
    power_watts: Option<f64>,
    /// Limit of the power, in watts.
    power_limit_watts: Option<f64>,
    /// Clock of the multiprocessors, in hertz.
    sm_clock_hertz: Option<u64>,
    /// Clock of the memory, in hertz.
    memory_clock_hertz: Option<u64>,
    /// Temperature of the chip, in degrees Celsius.
    temperature_celsius: Option<i32>,
    /// Reasons why clocks are lower than they could be: power, thermal, hardware_thermal, power_brake, hardware, setting, sync.
    throttled: Option<Vec<String>>,
    /// Errors of memory that could not be corrected, since the driver was loaded.
    ecc_errors: Option<u64>,
}

impl From<&GpuState> for WorkerGpu {
    fn from(gpu: &GpuState) -> Self {
        Self {
            memory_used_bytes: gpu.memory_used_bytes,
            memory_total_bytes: gpu.memory_total_bytes,
            utilization: gpu.utilization,
            memory_utilization: gpu.memory_utilization,
            power_watts: gpu.power_watts,
            power_limit_watts: gpu.power_limit_watts,
            sm_clock_hertz: gpu.sm_clock_hertz,
            memory_clock_hertz: gpu.memory_clock_hertz,
            temperature_celsius: gpu.temperature_celsius,
            throttled: gpu.throttled().map(|all| all.into_iter().map(|reason| reason.name().to_owned()).collect()),
            ecc_errors: gpu.ecc_errors,
        }
    }
}

/// Worker: one engine process.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Worker {
    /// Name: `pool-0`, `pool-1`, … or the address.
    name: String,
    /// Id of the pool.
    pool: String,
    phase: Phase,
    /// Detail of the phase: what is being loaded, or why the worker is down.
    detail: Option<String>,
    /// Process id; 0 until the worker has told it.
    pid: u32,
    /// Device and instructions.
    device: String,
    /// Numerics id: workers with the same id give bit-identical results.
    numerics_id: String,
    /// Names of the adapters that the worker has loaded beside the model.
    adapters: Vec<String>,
    /// Adapters that the worker was told to load and has not loaded.
    adapters_pending: Vec<PendingAdapter>,
    role: WorkerRole,
    /// Requests bound to the worker.
    requests: usize,
    /// Seconds of prefill queued at the worker.
    queue_seconds: f64,
    /// Duration of the last step, in seconds.
    step_seconds: f64,
    /// Seconds of the last load of the model, from the start of the process; `null` before the worker was ready.
    load_seconds: Option<f64>,
    /// Decode steps since the worker's process began.
    decode_steps: DecodeSteps,
    sequences_running: u32,
    sequences_waiting: u32,
    blocks_total: u32,
    blocks_free: u32,
    /// Prompt tokens looked up in the prefix cache since the worker's process began.
    prompt_tokens: u64,
    /// Part of these tokens that was found.
    cached_tokens: u64,
    /// Tokens generated since the worker's process began.
    output_tokens: u64,
    /// Bytes of KV received from other workers.
    transfer_bytes_in: u64,
    /// Bytes of KV sent to other workers.
    transfer_bytes_out: u64,
    /// Bytes of packed weights in memory that the pool's workers share; 0: the worker's weights are its own.
    shared_weights_bytes: u64,
    /// Figures of the GPU that computes; `null` for other devices, and without NVIDIA's management library.
    gpu: Option<WorkerGpu>,
    /// Current troubles, which cost time but no request: failing KV transfers, KV tiers that are off.
    troubles: Vec<String>,
    /// Times that the worker ended while ready, without being drained.
    deaths: u64,
    /// Times that this gateway started the process.
    starts: u64,
    /// Whether an earlier gateway started the process.
    adopted: bool,
}

/// Adapter that a worker has not loaded.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct PendingAdapter {
    /// Name of the adapter.
    name: String,
    /// Reason why the worker cannot load it; null: it is being loaded.
    reason: Option<String>,
}

impl From<&AdapterState> for PendingAdapter {
    fn from(state: &AdapterState) -> Self {
        Self { name: state.name.clone(), reason: state.failed.clone() }
    }
}

/// Names of the adapters that new requests can have at a worker, each once.
fn names(status: &WorkerStatus) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for adapter in status.adapters.iter().filter(|adapter| !adapter.superseded) {
        if !names.contains(&adapter.name) {
            names.push(adapter.name.clone());
        }
    }
    names
}

/// Phase of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    /// No process or no connection yet.
    Starting,
    /// Loading weights.
    Loading,
    /// Serving requests.
    Ready,
    /// Draining: open requests finish, no new ones are sent.
    Draining,
    /// Silent for too long; no new requests are sent.
    Suspected,
    /// Lost; the gateway tries to connect or restart.
    Down,
    /// Stopped, because the load needs fewer workers.
    Stopped,
}

/// Role of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WorkerRole {
    /// Prefill and decode.
    Mixed,
    /// Prefill for other workers.
    Prefill,
    /// Decode; short prefills too.
    Decode,
}

impl From<Role> for WorkerRole {
    fn from(role: Role) -> Self {
        match role {
            Role::Mixed => Self::Mixed,
            Role::Prefill => Self::Prefill,
            Role::Decode => Self::Decode,
        }
    }
}

impl From<WorkerRole> for Role {
    fn from(role: WorkerRole) -> Self {
        match role {
            WorkerRole::Mixed => Self::Mixed,
            WorkerRole::Prefill => Self::Prefill,
            WorkerRole::Decode => Self::Decode,
        }
    }
}

impl Worker {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.phase == Phase::Ready
    }

    fn new(pool: &str, status: &WorkerStatus) -> Self {
        let (phase, detail) = match &status.phase {
            WorkerPhase::Starting => (Phase::Starting, None),
            WorkerPhase::Loading { stage, bytes_done, bytes_total } => {
                (Phase::Loading, Some(format!("{stage}: {bytes_done} of {bytes_total} bytes")))
            }
            WorkerPhase::Ready => (Phase::Ready, None),
            WorkerPhase::Draining => (Phase::Draining, None),
            WorkerPhase::Suspected => (Phase::Suspected, None),
            WorkerPhase::Down { why, .. } => (Phase::Down, Some(why.clone())),
            WorkerPhase::Stopped => (Phase::Stopped, None),
        };
        let state = &status.state;
        let transfers = state.transfers.unwrap_or_default();
        let finite = |value: f64| if value.is_finite() { value } else { 0.0 };
        Self {
            name: status.name.clone(),
            pool: pool.to_owned(),
            phase,
            detail,
            pid: status.pid,
            device: status.device.clone(),
            numerics_id: status.numerics_id.to_string(),
            adapters: names(status),
            adapters_pending: status.adapters_pending.iter().map(PendingAdapter::from).collect(),
            role: state.role().into(),
            requests: status.bound,
            queue_seconds: finite(state.queue_seconds),
            step_seconds: finite(state.step_seconds),
            load_seconds: status.load.map(|load| load.as_secs_f64()),
            decode_steps: status.decode_steps.into(),
            sequences_running: state.running,
            sequences_waiting: state.waiting,
            blocks_total: state.blocks_total,
            blocks_free: state.blocks_free,
            prompt_tokens: state.prompt_tokens,
            cached_tokens: state.cached_tokens,
            output_tokens: state.output_tokens,
            transfer_bytes_in: transfers.bytes_in,
            transfer_bytes_out: transfers.bytes_out,
            shared_weights_bytes: status.shared_weights_bytes,
            gpu: status.gpu.as_deref().map(WorkerGpu::from),
            troubles: status.troubles.iter().map(|trouble| trouble.text.clone()).collect(),
            deaths: status.deaths,
            starts: status.starts,
            adopted: status.adopted,
        }
    }
}

/// All workers of all pools.
pub(crate) fn all(admin: &Admin) -> Vec<Worker> {
    let mut workers = Vec::new();
    for (id, pool) in admin.fleet.pools() {
        workers.extend(pool.status().workers.iter().map(|status| Worker::new(&id, status)));
    }
    workers
}

/// Workers, by name.
#[utoipa::path(get, path = "/admin/v1/workers", tag = "workers", operation_id = "list_workers", params(ListQuery),
    responses((status = 200, description = "Workers.", body = Page<Worker>)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn list(
    State(admin): State<Admin>,
    Params(query): Params<ListQuery>,
) -> Result<Json<Page<Worker>>, ApiError> {
    Page::cut(all(&admin), &query, |worker| &worker.name)
}

/// One worker.
#[utoipa::path(get, path = "/admin/v1/workers/{name}", tag = "workers", operation_id = "get_worker",
    params(("name" = String, Path, max_length = 512, description = "Name of the worker; a slash in it is sent as %2F.")),
    responses((status = 200, description = "The worker.", body = Worker)), security(("admin_key" = ["viewer"])))]
pub(crate) async fn get(State(admin): State<Admin>, Id(name): Id) -> Result<Json<Worker>, ApiError> {
    found(&admin, &name).map(Json)
}

fn found(admin: &Admin, name: &str) -> Result<Worker, ApiError> {
    let found = all(admin).into_iter().find(|worker| worker.name == name);
    found.ok_or_else(|| ApiError::not_found("There is no worker of that name."))
}

/// Restart of a worker.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Restart {
    /// Seconds to drain; after that the worker is killed and its requests go on elsewhere or at its next process. Default: 60.
    #[schema(minimum = 0, maximum = 3600)]
    patience_seconds: Option<u64>,
}

async fn steered(admin: &Admin, name: &str, steer: Steer) -> Result<Json<Worker>, ApiError> {
    let pool = found(admin, name)?.pool;
    let pools = admin.fleet.pools().into_iter().filter(|(id, _)| *id == pool);
    // A pool that is being replaced is there twice, and so may be its workers.
    for (_, pool) in pools {
        match pool.steer(name, steer).await {
            Ok(()) => return found(admin, name).map(Json),
            Err(SteerError::NotFound) => {}
            Err(error @ (SteerError::Elsewhere | SteerError::Restarting | SteerError::Stopped)) => {
                return Err(ApiError::conflict(error.to_string()));
            }
            Err(error @ SteerError::Closed) => return Err(ApiError::unavailable(error.to_string())),
        }
    }
    Err(ApiError::not_found("There is no worker of that name."))
}

/// Drains a worker: open requests finish, no new ones are sent.
#[utoipa::path(post, path = "/admin/v1/workers/{name}/drain", tag = "workers", operation_id = "drain_worker",
    params(("name" = String, Path, max_length = 512, description = "Name of the worker; a slash in it is sent as %2F.")),
    responses((status = 200, description = "The worker.", body = Worker),
        (status = 409, description = "The worker is being restarted.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["operator"])))]
pub(crate) async fn drain(State(admin): State<Admin>, Id(name): Id) -> Result<Json<Worker>, ApiError> {
    steered(&admin, &name, Steer::Hold).await
}

/// Ends a drain: requests go to the worker again.
#[utoipa::path(post, path = "/admin/v1/workers/{name}/resume", tag = "workers", operation_id = "resume_worker",
    params(("name" = String, Path, max_length = 512, description = "Name of the worker; a slash in it is sent as %2F.")),
    responses((status = 200, description = "The worker.", body = Worker),
        (status = 409, description = "The worker is being restarted.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["operator"])))]
pub(crate) async fn resume(State(admin): State<Admin>, Id(name): Id) -> Result<Json<Worker>, ApiError> {
    steered(&admin, &name, Steer::Release).await
}

/// New role of a worker.
#[derive(Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetRole {
    role: WorkerRole,
}

/// Changes the role of a worker. Where roles follow the load, the load may change it again.
#[utoipa::path(post, path = "/admin/v1/workers/{name}/role", tag = "workers", operation_id = "set_worker_role", request_body = SetRole,
    params(("name" = String, Path, max_length = 512, description = "Name of the worker; a slash in it is sent as %2F.")),
    responses((status = 200, description = "The worker; its state shows the new role once the worker has taken it.", body = Worker)),
    security(("admin_key" = ["operator"])))]
pub(crate) async fn role(
    State(admin): State<Admin>,
    Id(name): Id,
    Body(wish): Body<SetRole>,
) -> Result<(Extension<Did>, Json<Worker>), ApiError> {
    let worker = steered(&admin, &name, Steer::Role(wish.role.into())).await?;
    Ok((Did::set(wish), worker))
}

/// Drains a local worker, ends its process and starts a new one.
#[utoipa::path(post, path = "/admin/v1/workers/{name}/restart", tag = "workers", operation_id = "restart_worker", request_body = Restart,
    params(("name" = String, Path, max_length = 512, description = "Name of the worker; a slash in it is sent as %2F.")),
    responses((status = 200, description = "The worker.", body = Worker),
        (status = 409, description = "The worker is being restarted, or was started elsewhere.", body = crate::error::ErrorBody)),
    security(("admin_key" = ["operator"])))]
pub(crate) async fn restart(
    State(admin): State<Admin>,
    Id(name): Id,
    Body(how): Body<Restart>,
) -> Result<Json<Worker>, ApiError> {
    let seconds = how.patience_seconds.unwrap_or(60);
    if seconds > 3600 {
        return Err(ApiError::invalid("patience_seconds", "patience_seconds: must be from 0 to 3600"));
    }
    steered(&admin, &name, Steer::Restart { patience: Duration::from_secs(seconds) }).await
}
