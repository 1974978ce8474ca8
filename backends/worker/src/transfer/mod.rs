//! KV transfers between workers, on connections of their own beside the sessions.
//!
//! ```text
//! gateway: Pull, or Generate{pull_from | prefill_at}
//!    │
//!    ▼                        one connection per transfer (penstock_proto::transfer)
//! engine thread ── ask.rs ─────────────────────────────────────────→ serve.rs ── engine thread
//!    ▲  pages, a few at a time  ←─ Page, Page, … Computed … End ─────    │ pages, as far as there is room
//!    └─ engine_thread/transfers.rs: between two steps, within a budget    └─ while a step computes them, or between two
//! ```
//! One idea: a prefill elsewhere is a pull of blocks that the other side computes first. The asker holds pages, takes
//! what comes, and runs the request on the received blocks when the connection ends in any way: missing blocks are
//! computed. So there is one path for "moved", "moved in part" and "the other died". The first token is drawn where
//! the prompt was computed, comes ahead of the last pages and is emitted at once: to the request it is a token that an
//! earlier attempt has emitted, so later events cannot change it.
//!
//! # Ways for the bytes
//! A transport connects [`penstock_engine::PageSink`] at one end with `Command::Page` at the other: it takes the page
//! of a layer when the engine says that it is complete, brings it to the same place of the other's table, and reports
//! it in any order, once. Here the transport is shared memory (`memory.rs`), a socket, or several (`lanes.rs`); the
//! checks of pages, `Computed` and the end of the connection are the same for all. The fit of GPUDirect or NIXL at
//! this interface is described in `docs/reference/transfers.md`.

mod ask;
mod lanes;
mod link;
mod memory;
mod serve;

pub(crate) use ask::{Errand, run};
pub(crate) use lanes::STREAMS_MAX;
pub(crate) use serve::accept;

use crate::config::WorkerConfig;
use crate::inbox::{Command, Report, StepAge};
use crate::strangers::Strangers;
use penstock_grammar::Grammars;
use penstock_link::Tls;
use penstock_proto::frames::TransferState;
use penstock_proto::handshake::PoolKey;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};

/// Most pages of all transfers that came in and were not taken by the engine; above that sockets are not read.
const PAGES_IN_MAX: usize = 64;

/// Most outgoing transfers at once; further askers are refused.
const SERVED_MAX: usize = 64;

/// Most connections at once that have not proved the pool key.
const STRANGERS_MAX: usize = 64;

/// Most incoming transfers at once; requests above that compute.
pub(crate) const ASKED_MAX: usize = 64;

/// Longest time of a prefill elsewhere, including its wait there.
pub(crate) const PREFILL_DEADLINE: Duration = Duration::from_secs(120);

/// Longest fetch for a request; blocks missing then are computed.
pub(crate) const FETCH_DEADLINE: Duration = Duration::from_secs(30);

/// Facts about the model for transfers; set once it is loaded.
pub(crate) struct About {
    pub(crate) numerics_id: String,
    pub(crate) block_bytes: usize,
    /// Bytes of one page of one layer.
    pub(crate) page_bytes: usize,
    /// Grammars under which first tokens are drawn, if the model has a vocabulary for them.
    pub(crate) grammars: Option<Arc<Grammars>>,
}

/// State shared by all transfers of a worker.
pub(crate) struct Peers {
    key: Option<PoolKey>,
    tls: Option<Tls>,
    /// Weak: the engine's thread, which has this value too, ends when no other sender is left.
    commands: mpsc::WeakSender<Command>,
    age: OnceLock<StepAge>,
    about: OnceLock<About>,
    /// Number of connections of an incoming transfer from another machine.
    streams: usize,
    /// True if pages may go through memory where that can be shared.
    shares_memory: bool,
    meeting: Arc<lanes::Meeting>,
    room: Arc<Semaphore>,
    served: Arc<Semaphore>,
    strangers: Arc<Strangers>,
    meters: Meters,
    /// Address at which other workers reach this one; empty if there is none.
    pub(crate) address: String,
}

impl Peers {
    pub(crate) fn new(config: &WorkerConfig, commands: &mpsc::Sender<Command>, address: String) -> Self {
        Self {
            key: config.key.clone(),
            tls: config.tls.clone(),
            commands: commands.downgrade(),
            age: OnceLock::new(),
            about: OnceLock::new(),
            streams: config.transfer_streams.clamp(1, STREAMS_MAX),
            shares_memory: config.shares_memory,
            meeting: Arc::default(),
            room: Arc::new(Semaphore::new(PAGES_IN_MAX)),
            served: Arc::new(Semaphore::new(SERVED_MAX)),
            strangers: Strangers::new(STRANGERS_MAX),
            meters: Meters::default(),
            address,
        }
    }

    /// Allows transfers, once the model is loaded.
    pub(crate) fn open(&self, about: About) {
        // Err: set already; the model is loaded once.
        let _ = self.about.set(about);
    }

    /// Gives access to the age of the engine's step.
    pub(crate) fn watch(&self, age: StepAge) {
        let _ = self.age.set(age);
    }

    /// Waits until all outgoing transfers have written their pending frames, or `deadline` passes.
    pub(crate) async fn flush(&self, deadline: Duration) {
        let _ = tokio::time::timeout(deadline, self.served.acquire_many(SERVED_MAX as u32)).await;
    }

    /// Sends a command to the engine's thread.
    async fn tell(&self, command: Command) -> Result<(), link::Fault> {
        let commands = self.commands.upgrade().ok_or(link::Fault::Ending)?;
        commands.send(command).await.map_err(|_| link::Fault::Ending)
    }

    /// Counts received blocks that can be used.
    pub(crate) fn count_blocks(&self, blocks: usize) {
        self.meters.blocks_in.fetch_add(blocks as u64, Ordering::Relaxed);
    }

    /// Counts a further worker asked for blocks that the first has not brought.
    pub(crate) fn count_next(&self) {
        self.meters.asked_next.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts first tokens that came from the other end of a transfer.
    pub(crate) fn drawn_elsewhere(&self, tokens: usize) {
        self.meters.first_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    /// Counters of all transfers since the epoch began.
    pub(crate) fn state(&self) -> TransferState {
        self.meters.state()
    }
}

/// Counters of transfers since the epoch began, raised by the transfers' tasks.
#[derive(Default)]
struct Meters {
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    micros: AtomicU64,
    hidden_micros: AtomicU64,
    completed: AtomicU64,
    failed: AtomicU64,
    cancelled: AtomicU64,
    blocks_in: AtomicU64,
    first_tokens: AtomicU64,
    prefill_micros: AtomicU64,
    moved_bytes: AtomicU64,
    moved_micros: AtomicU64,
    memory_bytes: AtomicU64,
    stream_bytes: AtomicU64,
    asked_next: AtomicU64,
}

impl Meters {
    /// Counts an ended incoming transfer; `ended`: the counter of the way it ended.
    fn received(&self, report: &Report, ended: &AtomicU64) {
        let add = |sum: &AtomicU64, more: u64| _ = sum.fetch_add(more, Ordering::Relaxed);
        let taken = report.taken.as_micros() as u64;
        add(&self.bytes_in, report.bytes);
        add(&self.micros, taken);
        add(&self.prefill_micros, if report.is_prefill { taken } else { 0 });
        add(&self.hidden_micros, report.hidden.as_micros() as u64);
        add(&self.moved_bytes, report.moved_bytes);
        add(&self.moved_micros, report.moved.as_micros() as u64);
        add(&self.memory_bytes, report.memory_bytes);
        add(&self.stream_bytes, report.stream_bytes);
        add(ended, 1);
    }

    fn state(&self) -> TransferState {
        let sum = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TransferState {
            bytes_in: sum(&self.bytes_in),
            bytes_out: sum(&self.bytes_out),
            seconds: sum(&self.micros) as f64 / 1e6,
            hidden_seconds: sum(&self.hidden_micros) as f64 / 1e6,
            completed: sum(&self.completed),
            failed: sum(&self.failed),
            cancelled: sum(&self.cancelled),
            blocks_in: sum(&self.blocks_in),
            first_tokens: sum(&self.first_tokens),
            prefill_seconds: sum(&self.prefill_micros) as f64 / 1e6,
            moved_bytes: sum(&self.moved_bytes),
            moved_seconds: sum(&self.moved_micros) as f64 / 1e6,
            memory_bytes: sum(&self.memory_bytes),
            stream_bytes: sum(&self.stream_bytes),
            asked_next: sum(&self.asked_next),
        }
    }
}
