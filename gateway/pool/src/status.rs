//! Snapshot of a pool for `/ready`, `/metrics`, `/v1/models` and the progress bar; replaced as a whole.

use super::MoveCause;
use super::adapters::AdapterSource;
use super::steps::DecodeSteps;
use super::sums::Sums;
use super::troubles::Trouble;
use penstock_proto::frames::{EngineState, GpuState, PendingAdapter};
use penstock_proto::{AdapterId, Capabilities, Epoch};
use penstock_router::Needs;
use std::sync::Arc;
use std::time::Duration;

/// Phase of a worker's life, as the gateway sees it.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerPhase {
    /// The gateway has no connection to the worker yet, or the worker has no process yet.
    Starting,
    /// Connected; the worker loads its weights and takes no requests yet.
    Loading {
        /// Name of the loading stage, for a person.
        stage: String,
        /// Bytes of the weights loaded so far.
        bytes_done: u64,
        /// Bytes of the weights in all; 0 while unknown.
        bytes_total: u64,
    },
    /// The worker runs requests and takes new ones.
    Ready,
    /// The worker finishes its requests and takes nothing new.
    Draining,
    /// Silent for too long or hung in a step, not given up yet; takes nothing new.
    Suspected,
    /// The process is gone and will be started again.
    Down {
        /// Time until the supervisor starts the process again.
        retry_in: Duration,
        /// Cause of the end, for a person.
        why: String,
    },
    /// Stopped, because the load needs no more workers.
    Stopped,
}

/// Status of one worker in the snapshot of its pool.
#[derive(Clone, Debug)]
pub struct WorkerStatus {
    /// Name of the worker: `pool-0`, `pool-1`, … or the configured address.
    pub name: String,
    /// Phase of the worker's life, from starting to stopped.
    pub phase: WorkerPhase,
    /// Process id as the worker reports it; 0 before its first report.
    pub pid: u32,
    /// Epoch of the worker's present life, by which lives are told apart; 0 before it was ready.
    pub epoch: Epoch,
    /// Device and instruction path, for a person.
    pub device: String,
    /// Numerics of the worker: results are bit-exact between workers of equal numerics.
    pub numerics_id: Arc<str>,
    /// Id of the worker's grammars; empty before it was ready, and where it follows none.
    pub grammar: String,
    /// Capabilities of the worker; none before it was ready.
    pub capabilities: Capabilities,
    /// Adapters that the worker has loaded; none before it was ready.
    pub adapters: Vec<LoadedAdapter>,
    /// Adapters that the worker was told to hold and has not loaded.
    pub adapters_pending: Vec<AdapterState>,
    /// True if the worker loads and unloads adapters while it runs.
    pub adapter_orders: bool,
    /// Last report of the worker's engine; empty without a session.
    pub state: EngineState,
    /// Durations of the steps with decodes, in the present life.
    pub decode_steps: DecodeSteps,
    /// Counters of the worker's engine, summed over all its lives.
    pub sums: Sums,
    /// Number of requests bound to the worker now.
    pub bound: usize,
    /// Number of times the worker was found dead while it should serve.
    pub deaths: u64,
    /// Description of a local worker's last end; cleared once it serves again.
    pub ended: Option<String>,
    /// Duration of the last start, with the load of the model; `None` until known.
    pub load: Option<Duration>,
    /// Lives whose weights lie in memory that workers share: those that packed them there, and those that found them.
    pub shared_loads: [u64; 2],
    /// Bytes of packed weights in that memory; 0: the worker's weights are its own, or it was never ready.
    pub shared_weights_bytes: u64,
    /// Last figures of the worker's GPU; `None` without a session, without a GPU, and where its library is not there.
    pub gpu: Option<Box<GpuState>>,
    /// Troubles that the worker reports: they cost time but no request.
    pub troubles: Vec<Trouble>,
    /// Starts of a local worker's process by this gateway.
    pub starts: u64,
    /// True if a local worker's process was started by an earlier gateway.
    pub adopted: bool,
}

impl WorkerStatus {
    /// Returns true if the worker computes on a GPU, by what it last said of itself; `None`: it has said nothing yet.
    pub fn is_on_gpu(&self) -> Option<bool> {
        match (&self.phase, self.device.as_str()) {
            (WorkerPhase::Stopped, _) => Some(false),
            (_, "") => None,
            (_, device) => Some(device.starts_with("cuda ")),
        }
    }

    /// Returns true if the worker is a process of this machine that this gateway has started or adopted.
    pub fn is_local(&self) -> bool {
        self.adopted || self.starts > 0
    }
}

/// Adapter that a worker has loaded, as it announced it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedAdapter {
    /// Name under which the worker loaded it.
    pub name: String,
    /// Id of its content.
    pub id: AdapterId,
    /// True if the config no longer has the adapter, or has other content under its name. New requests use it only while no worker has the other content.
    pub superseded: bool,
}

/// Adapter that a worker is to hold and has not loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterState {
    /// Name of the adapter to load.
    pub name: String,
    /// Reason why the adapter cannot be loaded; `None` while it is read or loaded.
    pub failed: Option<String>,
}

impl From<&PendingAdapter> for AdapterState {
    fn from(pending: &PendingAdapter) -> Self {
        let failed = Some(pending.why.clone()).filter(|why| !why.is_empty());
        Self { name: pending.name.clone(), failed }
    }
}

/// The model that the pool serves, known once a worker was ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Name of the checkpoint, as the workers announce it.
    pub model: String,
    /// BLAKE3 hash of the bytes of tokenizer.json.
    pub tokenizer_hash: Vec<u8>,
    /// BLAKE3 over weights' names and shapes and config.json.
    pub model_hash: Vec<u8>,
    /// Rows of the embedding matrix: an upper bound of token ids.
    pub vocab_size: u32,
    /// Context length in tokens: the least of the workers' values.
    pub context_tokens: u32,
}

/// Counters of a pool's requests, tokens and decisions since the gateway process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that the actor took from the mailbox.
    pub submitted: u64,
    /// Requests whose choices have all finished.
    pub finished: u64,
    /// Requests cancelled because their ticket was dropped, for example when the client left.
    pub cancelled: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Times that a request went on at another worker after the loss of its worker.
    pub resumed: u64,
    /// Times that a request went on after a loss at a worker of other numerics.
    pub resumed_inexact: u64,
    /// Requests migrated while they ran, by [`MoveCause`].
    pub moves: [u64; MoveCause::ALL.len()],
    /// Migrations that were abandoned; the requests stayed where they were. By [`MoveCause`].
    pub moves_failed: [u64; MoveCause::ALL.len()],
    /// KV blocks that new workers fetched for migrations.
    pub moved_blocks: u64,
    /// Tokens dropped because they came from an older attempt, or twice.
    pub tokens_dropped: u64,
    /// Role changes that the planner made because of the load.
    pub role_flips: u64,
    /// Output tokens handed to tickets, each counted once.
    pub tokens: u64,
    /// Requests whose prompt another worker computed, or was asked to compute, for the one they run at.
    pub prefilled_apart: u64,
    /// Prompt tokens that the router predicted to be cached when it bound the request.
    pub cached_tokens_predicted: u64,
    /// Prompt tokens that workers found cached, as they reported with the first output.
    pub cached_tokens_told: u64,
    /// Calls of the router for its next choice, empty answers included.
    pub decisions: u64,
    /// Time spent in the calls counted by `decisions`, in nanoseconds.
    pub decision_ns: u64,
    /// First outputs after a binding: the number of times in the three sums below.
    pub first_tokens: u64,
    /// Sum of the times from binding to first output, over `first_tokens`, in microseconds.
    pub ttft_us: u64,
    /// Sum of these times as predicted at the binding, in microseconds.
    pub ttft_predicted_us: u64,
    /// Sum of the absolute prediction errors, in microseconds.
    pub ttft_error_us: u64,
}

impl Counts {
    /// Counts a first output that came `took` after its binding.
    pub(super) fn first_token(&mut self, took: Duration, predicted: Duration) {
        self.first_tokens += 1;
        self.ttft_us += took.as_micros() as u64;
        self.ttft_predicted_us = self.ttft_predicted_us.saturating_add(predicted.as_micros() as u64);
        self.ttft_error_us = self.ttft_error_us.saturating_add(took.abs_diff(predicted).as_micros() as u64);
    }
}

/// Snapshot of a pool for the admin API, metrics and admission; renewed by the actor every 200 ms.
#[derive(Clone, Debug, Default)]
pub struct PoolStatus {
    /// The workers, in the order of their indexes.
    pub workers: Vec<WorkerStatus>,
    /// Model that the pool serves; `None` until a worker was ready.
    pub model: Option<ModelInfo>,
    /// Number of open requests, waiting or bound to a worker.
    pub open: usize,
    /// Number of requests in the router's queue, bound to no worker yet.
    pub waiting: usize,
    /// Predicted TTFT of a short new request.
    pub ttft_predicted: Duration,
    /// Number of KV blocks that the router's index knows to be at some worker.
    pub blocks_indexed: usize,
    /// Counters of requests, tokens and decisions since the gateway process began.
    pub counts: Counts,
    /// Longest wait of a new request for any worker to be ready, as things are now.
    pub ready_wait: Duration,
    /// Last change by the planner of roles or, in a dry run, the change it would have made.
    pub role_advice: Option<String>,
    /// True if the workers are started by the first request and stopped when nobody asks.
    pub on_demand: bool,
    /// Status of the planner of replicas; `None`: the number of workers is fixed.
    pub replicas: Option<ReplicaStatus>,
    /// Adapters of the config that this snapshot was made under.
    pub adapters: Arc<Vec<AdapterSource>>,
}

/// State of an adapter at the workers of its pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdapterPlace {
    /// Number of ready workers that have the content of the config.
    pub ready: usize,
    /// Number of ready workers.
    pub workers: usize,
    /// Workers that could not load the adapter, each with the reason.
    pub failures: Vec<(String, String)>,
    /// True if this gateway orders the workers to load the adapter; false: the workers were started elsewhere, with adapters of their own.
    pub is_told: bool,
}

/// Status of the planner that lets the number of workers follow the load.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplicaStatus {
    /// True if the planner's advice is only shown and not carried out (dry run).
    pub dry_run: bool,
    /// True if an operator has paused the planner.
    pub paused: bool,
    /// Lower bound of the number of workers, in force now.
    pub min: usize,
    /// Upper bound of the number of workers, in force now.
    pub max: usize,
    /// Number of workers that the planner holds to be right for the load.
    pub wanted: usize,
    /// Number of workers that run or are being started.
    pub running: usize,
    /// Load of the workers that serve, as the planner computes it; 1 is their capacity.
    pub load: f64,
    /// Share of first tokens later than promised; `None` with too few to tell.
    pub late: Option<f64>,
    /// Reason of the wanted number, in words.
    pub why: String,
    /// Last change or, in a dry run, the change that would have been made.
    pub last: Option<String>,
    /// Number of workers started because of the load.
    pub starts: u64,
    /// Number of workers stopped because of the load.
    pub stops: u64,
    /// Number of starts and stops that failed.
    pub failures: u64,
    /// Cause of the last failed start or stop, in words.
    pub last_failure: Option<String>,
}

impl PoolStatus {
    /// Counters of the workers' own reports, summed over all workers of the pool.
    pub fn sums(&self) -> Sums {
        self.workers.iter().fold(Sums::default(), |mut sums, worker| {
            sums += worker.sums;
            sums
        })
    }

    /// Returns true if at least one worker serves and takes requests.
    pub fn is_ready(&self) -> bool {
        self.workers.iter().any(|worker| worker.phase == WorkerPhase::Ready)
    }

    /// Returns true if a request that comes now is served, if need be after its worker has been started on demand.
    pub fn takes_requests(&self) -> bool {
        self.is_ready() || self.on_demand && self.workers.iter().all(|worker| worker.ended.is_none())
    }

    /// Returns true if one worker has every ability that is needed. The workers that are ready are asked; while none is, those that
    /// were ready before are, since a worker comes back with the abilities of its last life, and its requests wait for it.
    pub(super) fn any_able(&self, needs: &Needs) -> bool {
        self.asked().any(|worker| {
            let adapters = worker.adapters.iter().map(|adapter| adapter.id);
            needs.are_met_by(&worker.grammar, worker.capabilities, adapters)
        })
    }

    /// Content of the adapter `name` for new requests: the one that most workers announce, and among equally many that of the
    /// worker that comes first; content that is superseded only while no worker has other. `None`: no worker announces one. The same
    /// workers are asked as by [`Self::any_able`].
    pub(super) fn adapter(&self, name: &str) -> Option<AdapterId> {
        let all = || self.asked().flat_map(|worker| &worker.adapters).filter(|adapter| adapter.name == name);
        let only_superseded = all().all(|adapter| adapter.superseded);
        let mut known: Vec<(AdapterId, usize)> = Vec::new();
        for adapter in all().filter(|adapter| adapter.superseded == only_superseded) {
            match known.iter_mut().find(|(id, _)| *id == adapter.id) {
                Some((_, workers)) => *workers += 1,
                None => known.push((adapter.id, 1)),
            }
        }
        known.into_iter().rev().max_by_key(|(_, workers)| *workers).map(|(id, _)| id)
    }

    /// Number of ready workers that have the content of an adapter that new requests get.
    pub fn adapter_workers(&self, name: &str) -> usize {
        let Some(id) = self.adapter(name) else { return 0 };
        let has =
            |worker: &&WorkerStatus| worker.adapters.iter().any(|adapter| adapter.id == id && adapter.name == name);
        self.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready).filter(has).count()
    }

    /// State of an adapter of the config at the workers. `is_told`: the workers are this gateway's own.
    pub(super) fn adapter_place(&self, name: &str, is_told: bool) -> AdapterPlace {
        let ready = || self.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready);
        let has =
            |worker: &&WorkerStatus| worker.adapters.iter().any(|adapter| adapter.name == name && !adapter.superseded);
        let failure = |worker: &WorkerStatus| {
            let pending = worker.adapters_pending.iter().find(|pending| pending.name == name)?;
            Some((worker.name.clone(), pending.failed.clone()?))
        };
        let failures = ready().filter_map(failure).collect();
        AdapterPlace { ready: ready().filter(has).count(), workers: ready().count(), failures, is_told }
    }

    /// Workers whose abilities count: those that are ready, or all while none is.
    fn asked(&self) -> impl Iterator<Item = &WorkerStatus> {
        let no_worker_is_ready = !self.is_ready();
        self.workers.iter().filter(move |worker| no_worker_is_ready || worker.phase == WorkerPhase::Ready)
    }

    /// Description of a worker's end, of the first worker that does not serve again yet.
    pub(super) fn last_end(&self) -> Option<String> {
        self.workers.iter().find_map(|worker| worker.ended.clone())
    }

    /// When every worker is down for longer than `patience`: the shortest time until one is started.
    pub(super) fn hopeless_for(&self, patience: Duration) -> Option<Duration> {
        let down = |worker: &WorkerStatus| match worker.phase {
            WorkerPhase::Down { retry_in, .. } if retry_in > patience => Some(retry_in),
            _ => None,
        };
        let workers = self.workers.iter().filter(|worker| worker.phase != WorkerPhase::Stopped);
        let times: Option<Vec<Duration>> = workers.map(down).collect();
        times.and_then(|times| times.into_iter().min())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_proto::Capability;

    fn worker(phase: WorkerPhase, is_able: bool) -> WorkerStatus {
        WorkerStatus {
            name: "pool-0".into(),
            phase,
            pid: 0,
            epoch: Epoch::default(),
            device: String::new(),
            numerics_id: "".into(),
            grammar: String::new(),
            adapters: Vec::new(),
            adapters_pending: Vec::new(),
            adapter_orders: false,
            capabilities: if is_able { Capability::BadWords.into() } else { Capabilities::NONE },
            state: EngineState::default(),
            decode_steps: DecodeSteps::default(),
            sums: Sums::default(),
            bound: 0,
            deaths: 0,
            ended: None,
            load: None,
            shared_loads: [0; 2],
            shared_weights_bytes: 0,
            gpu: None,
            troubles: Vec::new(),
            starts: 0,
            adopted: false,
        }
    }

    #[test]
    fn a_worker_is_on_a_gpu_as_it_says() {
        let on_gpu = |phase, device: &str| WorkerStatus { device: device.into(), ..worker(phase, false) }.is_on_gpu();
        assert_eq!(on_gpu(WorkerPhase::Starting, ""), None);
        assert_eq!(on_gpu(WorkerPhase::Ready, "cuda NVIDIA H100 80GB HBM3"), Some(true));
        assert_eq!(on_gpu(WorkerPhase::Draining, "cuda NVIDIA H100 80GB HBM3"), Some(true));
        assert_eq!(on_gpu(WorkerPhase::Ready, "cpu avx512"), Some(false));
        assert_eq!(on_gpu(WorkerPhase::Stopped, "cuda NVIDIA H100 80GB HBM3"), Some(false), "it has no process");
    }

    #[test]
    fn a_pool_on_demand_takes_requests_while_nothing_runs() {
        let status = |on_demand, worker| PoolStatus { on_demand, workers: vec![worker], ..PoolStatus::default() };
        let stopped = || worker(WorkerPhase::Stopped, false);
        assert!(status(true, stopped()).takes_requests() && !status(true, stopped()).is_ready());
        assert!(status(true, worker(WorkerPhase::Starting, false)).takes_requests());
        assert!(status(false, worker(WorkerPhase::Ready, false)).takes_requests());
        assert!(!status(false, stopped()).takes_requests());
        // One that ends while it loads may do so again.
        assert!(!status(true, WorkerStatus { ended: Some("out of memory".into()), ..stopped() }).takes_requests());
    }

    #[test]
    fn the_abilities_of_a_worker_that_starts_again_are_those_of_its_last_life() {
        let down = || WorkerPhase::Down { retry_in: Duration::from_secs(1), why: String::new() };
        for (workers, able) in [
            (vec![], false),
            (vec![worker(WorkerPhase::Ready, true)], true),
            (vec![worker(WorkerPhase::Ready, false)], false),
            (vec![worker(down(), true)], true),
            (vec![worker(WorkerPhase::Starting, true), worker(down(), false)], true),
            (vec![worker(WorkerPhase::Suspected, true)], true),
            (vec![worker(WorkerPhase::Starting, false)], false),
            // In the middle of an upgrade the worker that serves decides.
            (vec![worker(WorkerPhase::Ready, false), worker(down(), true)], false),
        ] {
            let status = PoolStatus { workers, ..PoolStatus::default() };
            let needs = |grammar, capabilities| Needs { grammar, capabilities, ..Needs::default() };
            let bad_words = Capabilities::from(Capability::BadWords);
            assert_eq!(status.any_able(&needs(None, bad_words)), able, "{:?}", status.workers);
            assert!(
                !status.any_able(&needs(None, Capabilities::all()))
                    && !status.any_able(&needs(Some("g".into()), bad_words))
            );
        }
    }

    #[test]
    fn abilities_of_two_workers_are_not_those_of_one() {
        let guided = WorkerStatus { grammar: "g".into(), ..worker(WorkerPhase::Ready, false) };
        let status = PoolStatus { workers: vec![guided, worker(WorkerPhase::Ready, true)], ..PoolStatus::default() };
        let (grammar, capabilities) = (Some("g".into()), Capabilities::from(Capability::BadWords));
        assert!(
            status.any_able(&Needs { grammar, ..Needs::default() })
                && status.any_able(&Needs { capabilities, ..Needs::default() })
        );
        assert!(!status.any_able(&Needs { grammar: Some("g".into()), capabilities, adapter: None }));
    }

    #[test]
    fn new_requests_take_the_content_of_an_adapter_that_most_workers_have() {
        let with = |phase, id: u128| {
            let adapters = vec![
                // Content from 10 on is superseded.
                LoadedAdapter { name: "sql".into(), id: AdapterId(id), superseded: id >= 10 },
                LoadedAdapter { name: "other".into(), id: AdapterId(9), superseded: false },
            ];
            WorkerStatus { adapters, ..worker(phase, true) }
        };
        let down = || WorkerPhase::Down { retry_in: Duration::from_secs(1), why: String::new() };
        let ready = |id| with(WorkerPhase::Ready, id);
        for (workers, expected) in [
            (vec![], None),
            (vec![worker(WorkerPhase::Ready, true)], None),
            (vec![ready(1), ready(2), ready(2)], Some(2)),
            (vec![ready(2), ready(1)], Some(2)),
            (vec![ready(1), ready(2)], Some(1)),
            // Workers that are not ready count only while none is.
            (vec![with(down(), 1), with(down(), 1), ready(2)], Some(2)),
            (vec![with(down(), 3)], Some(3)),
            (vec![with(down(), 3), worker(WorkerPhase::Ready, true)], None),
            // Superseded content counts while there is no other.
            (vec![ready(10), ready(10), ready(2)], Some(2)),
            (vec![ready(10), with(down(), 2)], Some(10)),
        ] {
            let status = PoolStatus { workers, ..PoolStatus::default() };
            let found = status.adapter("sql");
            assert_eq!(found, expected.map(AdapterId), "{:?}", status.workers);
            let needs = Needs { adapter: found, ..Needs::default() };
            assert!(found.is_none() || status.any_able(&needs));
            let has =
                |worker: &&WorkerStatus| worker.adapters.first().map(|adapter| adapter.id) == found && found.is_some();
            let ready = status.workers.iter().filter(|worker| worker.phase == WorkerPhase::Ready).filter(has).count();
            assert_eq!(status.adapter_workers("sql"), ready);
            assert!(!status.any_able(&Needs { adapter: Some(AdapterId(4)), ..Needs::default() }));
        }
    }
}
