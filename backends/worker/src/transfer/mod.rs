//! KV from worker to worker, on connections of their own beside the sessions.
//!
//! ```text
//! gateway: Pull, or Generate{pull_from | prefill_at}
//!    │
//!    ▼                        one connection per transfer (penstock_proto::transfer)
//! engine thread ── ask.rs ─────────────────────────────────────────→ serve.rs ── engine thread
//!    ▲  pages, a few at a time  ←─ Page, Page, … Computed … End ─────    │ pages, as far as there is room
//!    └─ desk.rs: between two steps, within a budget of time              └─ while a step computes them, or between two
//! ```
//! One idea: a prefill elsewhere is a pull of blocks that the other side computes first. The asker holds pages, takes what comes, and runs
//! the request on what it has when the connection ends, whatever way it ends: what is missing is computed. So there is one path for
//! "moved", "moved in part" and "the other died". The first token is drawn where the prompt was computed, comes ahead of the last pages and
//! is said at once: to the request it is one that an earlier attempt has emitted, so what happens afterwards changes nothing about it.
//!
//! # Ways for the bytes
//! What a transport has to do is [`penstock_engine::PageSink`] at one end and `Command::Page` at the other: take the page of a layer when
//! the engine says that it is complete, bring it to the same place of the other's table, and say so in any order, once. Here that is memory of both
//! (`memory.rs`), a socket, or several (`lanes.rs`); checks of what was asked for, `Computed` and the end of the connection are the same
//! for all. How GPUDirect or NIXL fit at this seam is in `docs/reference/transfers.md`.

mod ask;
mod desk;
mod lanes;
mod link;
mod memory;
mod serve;

pub(crate) use desk::{Arrival, Incoming, Taken};
pub(crate) use lanes::STREAMS_MAX;
pub(crate) use serve::accept;

use crate::config::WorkerConfig;
use crate::engine_thread::{Command, StepAge};
use crate::strangers::Strangers;
use bytes::Bytes;
use penstock_link::Tls;
use penstock_proto::frames::TransferState;
use penstock_proto::handshake::PoolKey;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// Pages that came in and were not taken by the engine yet, of all transfers; above that sockets are not read.
const PAGES_IN_MAX: usize = 64;

/// Transfers out at once.
const SERVED_MAX: usize = 64;

/// Connections at once that have not proved the pool key yet.
const STRANGERS_MAX: usize = 64;

/// Transfers in at once; requests above that compute.
const ASKED_MAX: usize = 64;

/// A prefill elsewhere may wait there and take this long in all.
const PREFILL_DEADLINE: Duration = Duration::from_secs(120);

/// A fetch for a request takes no longer; what is missing then is computed.
const FETCH_DEADLINE: Duration = Duration::from_secs(30);

/// What a transfer needs to know of the model; set once it is loaded.
pub(crate) struct About {
    pub(crate) numerics_id: String,
    pub(crate) block_bytes: usize,
    /// Of one layer.
    pub(crate) page_bytes: usize,
}

/// What all transfers of a worker share.
pub(crate) struct Peers {
    key: Option<PoolKey>,
    tls: Option<Tls>,
    /// Weak: the engine's thread, which has this value too, ends when nobody else can tell it anything.
    commands: mpsc::WeakSender<Command>,
    age: OnceLock<StepAge>,
    about: OnceLock<About>,
    /// Connections of a transfer in from another machine.
    streams: usize,
    /// Whether pages may go through memory where that can be shared.
    shares_memory: bool,
    meeting: Arc<lanes::Meeting>,
    room: Arc<Semaphore>,
    served: Arc<Semaphore>,
    strangers: Arc<Strangers>,
    meters: Meters,
    /// Where others reach it; empty: nowhere.
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

    /// The model is loaded: transfers can begin.
    pub(crate) fn open(&self, about: About) {
        // Set already: it is loaded once.
        let _ = self.about.set(about);
    }

    /// How old the engine's step is can be read from here.
    pub(crate) fn watch(&self, age: StepAge) {
        let _ = self.age.set(age);
    }

    /// Waits until all transfers out have written what they had, or `deadline` passes.
    pub(crate) async fn flush(&self, deadline: Duration) {
        let _ = tokio::time::timeout(deadline, self.served.acquire_many(SERVED_MAX as u32)).await;
    }

    /// A command for the engine's thread.
    async fn tell(&self, command: Command) -> Result<(), link::Fault> {
        let commands = self.commands.upgrade().ok_or(link::Fault::Ending)?;
        commands.send(command).await.map_err(|_| link::Fault::Ending)
    }

    /// So many blocks that came can be used.
    fn count_blocks(&self, blocks: usize) {
        self.meters.blocks_in.fetch_add(blocks as u64, Ordering::Relaxed);
    }

    /// Another worker is asked for what one has not brought.
    fn count_next(&self) {
        self.meters.asked_next.fetch_add(1, Ordering::Relaxed);
    }

    /// So many first tokens came from the other end of a transfer.
    pub(crate) fn drawn_elsewhere(&self, tokens: usize) {
        self.meters.first_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    /// Sums so far.
    pub(crate) fn state(&self) -> TransferState {
        self.meters.state()
    }
}

/// Sums since the epoch began.
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
    /// A transfer in is over; `ended`: which of the three ways.
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

/// A page that came in.
pub(crate) struct PageIn {
    id: u64,
    block: usize,
    layer: usize,
    bytes: Bytes,
    /// Given back when the engine has taken it.
    _room: OwnedSemaphorePermit,
}

/// How a transfer in ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    /// The holder computed what it sent.
    is_prefill: bool,
    /// Leading blocks that the holder vouched for.
    vouched: usize,
    bytes: u64,
    /// Of these, through memory that both map.
    memory_bytes: u64,
    /// Of these, on connections beside the first.
    stream_bytes: u64,
    /// From the first page to the last.
    taken: Duration,
    /// Of that, while the holder still computed.
    hidden: Duration,
    /// Bytes that came when it had computed all, beside the page that came first then, and how long they took: the speed of the way.
    moved_bytes: u64,
    moved: Duration,
    /// Why it stopped early; empty: it did not.
    why: String,
    /// It stopped because of the other end, or the way to it: another may do better.
    is_lost: bool,
    /// How that speaks of the other end, and of the way to it.
    health: Health,
}

/// What a transfer tells of the way to its peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Health {
    /// Nothing: it was ended here, or the peer did not have all of the blocks any more.
    #[default]
    Unknown,
    /// It works.
    Good,
    /// It does not.
    Bad,
}
