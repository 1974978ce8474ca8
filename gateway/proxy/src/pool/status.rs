//! What a pool shows of itself: for `/ready`, `/metrics`, `/v1/models` and the progress bar. A snapshot, replaced as a whole.

use super::MoveCause;
use super::steps::DecodeSteps;
use super::sums::Sums;
use super::troubles::Trouble;
use penstock_proto::frames::EngineState;
use std::sync::Arc;
use std::time::Duration;

/// Where a worker is in its life, as the gateway sees it.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerPhase {
    /// No process or no connection yet.
    Starting,
    /// Connected, loading its weights.
    Loading {
        /// What is being done, for a person.
        stage: String,
        /// Bytes done.
        bytes_done: u64,
        /// Bytes in all; 0 when not known yet.
        bytes_total: u64,
    },
    /// Serves.
    Ready,
    /// Serves what it has, takes nothing new.
    Draining,
    /// Silent for too long, not given up yet; takes nothing new.
    Suspected,
    /// Gone; the next try comes after this long.
    Down {
        /// Until the next try.
        retry_in: Duration,
        /// Why, for a person.
        why: String,
    },
    /// Not there, because the load needs no more.
    Stopped,
}

/// One worker.
#[derive(Clone, Debug)]
pub struct WorkerStatus {
    /// `pool-0`, `pool-1`, … or the configured address.
    pub name: String,
    /// Where it is in its life.
    pub phase: WorkerPhase,
    /// Process id as it said it; 0 before it said anything.
    pub pid: u32,
    /// Its epoch; 0 before it was ready.
    pub epoch: u64,
    /// Device and path for a person.
    pub device: String,
    /// What its results are exact within.
    pub numerics_id: Arc<str>,
    /// Its last report; empty while it is not there.
    pub state: EngineState,
    /// Steps with decodes, of its present life.
    pub decode_steps: DecodeSteps,
    /// What it counted, in former lives too.
    pub sums: Sums,
    /// Requests bound to it.
    pub bound: usize,
    /// How often it was found dead.
    pub deaths: u64,
    /// How its process ended, until it serves again; for local workers.
    pub ended: Option<String>,
    /// How long it took to load the model last, with what its start took beside; `None` until it is known.
    pub load: Option<Duration>,
    /// What it says goes wrong and costs time, though no request.
    pub troubles: Vec<Trouble>,
    /// For local workers: how often its process was started by this gateway.
    pub starts: u64,
    /// For local workers: the running process was started by an earlier gateway.
    pub adopted: bool,
}

/// The model that the pool serves, known once a worker was ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Name of the checkpoint.
    pub model: String,
    /// BLAKE3 of tokenizer.json.
    pub tokenizer_hash: Vec<u8>,
    /// BLAKE3 over weights' names and shapes and config.json.
    pub model_hash: Vec<u8>,
    /// Rows of the embedding.
    pub vocab_size: u32,
    /// Longest sequence served, in tokens; the least of the workers'.
    pub context_tokens: u32,
}

/// Counts since the gateway began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests taken.
    pub submitted: u64,
    /// Requests whose last choice finished.
    pub finished: u64,
    /// Requests cancelled by their ticket's end.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Continuations after a lost worker.
    pub resumed: u64,
    /// Of these, in other numerics.
    pub resumed_inexact: u64,
    /// Requests that were moved while they ran, by [`MoveCause`].
    pub moves: [u64; MoveCause::ALL.len()],
    /// Requests that were to be moved and stayed where they were.
    pub moves_failed: [u64; MoveCause::ALL.len()],
    /// KV blocks that were fetched for them.
    pub moved_blocks: u64,
    /// Tokens that came from an attempt that was no longer current, or twice, and were dropped.
    pub tokens_dropped: u64,
    /// Changes of a worker's role that followed the load.
    pub role_flips: u64,
    /// Tokens handed out.
    pub tokens: u64,
    /// Requests whose prompt another worker computed for the one that they run at, or was asked to.
    pub prefilled_apart: u64,
    /// Prompt tokens that the router believed cached when it bound.
    pub cached_tokens_predicted: u64,
    /// Prompt tokens that workers then said were cached.
    pub cached_tokens_told: u64,
    /// Times that the router was asked what to do next.
    pub decisions: u64,
    /// Nanoseconds that it took.
    pub decision_ns: u64,
    /// First tokens after a binding.
    pub first_tokens: u64,
    /// Microseconds from the binding to them.
    pub ttft_us: u64,
    /// The same as predicted at the binding.
    pub ttft_predicted_us: u64,
    /// Sum of the differences, without sign.
    pub ttft_error_us: u64,
}

impl Counts {
    /// A first token came that long after its binding.
    pub(super) fn first_token(&mut self, took: Duration, predicted: Duration) {
        self.first_tokens += 1;
        self.ttft_us += took.as_micros() as u64;
        self.ttft_predicted_us = self.ttft_predicted_us.saturating_add(predicted.as_micros() as u64);
        self.ttft_error_us = self.ttft_error_us.saturating_add(took.abs_diff(predicted).as_micros() as u64);
    }
}

/// A pool at one moment.
#[derive(Clone, Debug, Default)]
pub struct PoolStatus {
    /// Its workers.
    pub workers: Vec<WorkerStatus>,
    /// The model, once known.
    pub model: Option<ModelInfo>,
    /// Requests open: waiting or bound.
    pub open: usize,
    /// Requests that wait in the gateway.
    pub waiting: usize,
    /// Predicted time to the first token of a short new request.
    pub ttft_predicted: Duration,
    /// KV blocks known to the router's index.
    pub blocks_indexed: usize,
    /// Counts since the gateway began.
    pub counts: Counts,
    /// A new request waits so long for any worker to be ready.
    pub ready_wait: Duration,
    /// What the planner of roles did last, or would have done.
    pub role_advice: Option<String>,
    /// What the planner of replicas knows and does, where there is one.
    pub replicas: Option<ReplicaStatus>,
}

/// How many workers there are and should be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplicaStatus {
    /// What should be done is told, and not done.
    pub dry_run: bool,
    /// An operator told it to do nothing.
    pub paused: bool,
    /// Workers at least.
    pub min: usize,
    /// Workers at most.
    pub max: usize,
    /// Workers that there should be.
    pub wanted: usize,
    /// Workers that there are, or that start.
    pub running: usize,
    /// Load of those that serve; 1 is all that they can do.
    pub load: f64,
    /// Share of first tokens that came later than promised, if enough came to tell.
    pub late: Option<f64>,
    /// Why so many are wanted.
    pub why: String,
    /// What was done last, or would have been.
    pub last: Option<String>,
    /// Workers that were started because of the load.
    pub starts: u64,
    /// Workers that were stopped because of it.
    pub stops: u64,
    /// Starts and stops that failed.
    pub failures: u64,
    /// Why the last one did.
    pub last_failure: Option<String>,
}

impl PoolStatus {
    /// What all workers counted.
    pub fn sums(&self) -> Sums {
        self.workers.iter().fold(Sums::default(), |mut sums, worker| {
            sums += worker.sums;
            sums
        })
    }

    /// Whether at least one worker takes requests.
    pub fn is_ready(&self) -> bool {
        self.workers.iter().any(|worker| worker.phase == WorkerPhase::Ready)
    }

    /// How a worker ended that does not serve again yet.
    pub(super) fn last_end(&self) -> Option<String> {
        self.workers.iter().find_map(|worker| worker.ended.clone())
    }

    /// When all workers are down for longer than `patience`: the shortest of these times.
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
