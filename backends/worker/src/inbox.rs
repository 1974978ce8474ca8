//! Inbox of the engine's thread: the commands that sessions, transfers and tiers send, what they carry, and the age of the step
//! in progress that the senders read.

use crate::shelf::Opened;
use crate::tiers::Outcome;
use bytes::Bytes;
use penstock_engine::{PageSink, Prefill};
use penstock_proto::frames::{
    AdapterOrder, Cancel, Generate, GpuState, OrderedAdapter, Prefetch, Pull, Role, UpBody, Window,
};
use penstock_proto::transfer::First;
use penstock_proto::{BlockHash, Epoch, GatewayId, SessionId, WorkId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

/// Commands to the engine's thread.
pub(crate) enum Command {
    /// A session begins: it gets [`Ready`], then every step.
    Attach { session: SessionId, gateway: GatewayId, epoch: Epoch, frames: mpsc::Sender<UpBody> },
    /// A session is over: its requests are cancelled.
    Detach { session: SessionId },
    /// Start a request of the session, or continue it after another worker was lost.
    Generate { session: SessionId, generate: Box<Generate> },
    /// Stop a request or single choices of it, and free their blocks.
    Cancel { session: SessionId, cancel: Cancel },
    /// Let a choice emit more tokens: its reader has taken some.
    Window { session: SessionId, window: Window },
    /// Change the role that is reported to the router.
    SetRole { role: Role },
    /// Fetch blocks from another worker into the prefix cache, for the session's gateway.
    Pull { session: SessionId, pull: Pull },
    /// Load blocks that a request will need.
    Prefetch { session: SessionId, prefetch: Prefetch },
    /// Hold exactly these adapters, as the session's gateway orders.
    Adapters { session: SessionId, order: AdapterOrder },
    /// The folder of an ordered adapter was read and checked.
    Opened { wanted: OrderedAdapter, opened: Opened },
    /// Import a page that an incoming transfer has received.
    Page(PageIn),
    /// First tokens that the other end of an incoming transfer has drawn.
    First { id: WorkId, first: First },
    /// End an incoming transfer, with the report of its task.
    Received { id: WorkId, report: Report },
    /// Send blocks of the prefix cache to another worker, page by page through `sink`.
    Send { hashes: Vec<BlockHash>, sink: Box<dyn PageSink>, taken: Taken },
    /// Compute blocks for another worker, for a request of the gateway `gateway`.
    Prefill { prefill: Box<Prefill>, gateway: GatewayId, sink: Box<dyn PageSink>, taken: Taken },
    /// End the outgoing transfer that the engine knows under this number.
    Stop { id: WorkId },
    /// A sink that was full has room again.
    Nudge,
    /// Refuse new requests; end the thread when nothing is open.
    Drain { exit: bool },
    /// The grammar of the request with this number in the engine was compiled, or refused.
    Compiled { id: WorkId },
    /// A tier read or wrote a block.
    Tier(Outcome),
    /// Tell gateways the figures of the GPU.
    Gpu(Box<GpuState>),
    /// Periodic timer tick, where there are tiers or several gateways: advances requests that wait for tiers, reports changes without a step, and
    /// divides the credits of an idle engine anew.
    Tick,
}

/// Reply with the number of an outgoing transfer, or the reason of a refusal.
pub(crate) type Taken = oneshot::Sender<Result<WorkId, String>>;

/// A received page on its way to the engine's thread.
pub(crate) struct PageIn {
    pub(crate) id: WorkId,
    pub(crate) block: usize,
    pub(crate) layer: usize,
    pub(crate) bytes: Bytes,
    /// Room permit, returned when the engine has taken the page.
    pub(crate) _room: OwnedSemaphorePermit,
}

/// Result of an incoming transfer, from its task to the engine's thread.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    /// True if the holder computed the blocks for the purpose.
    pub(crate) is_prefill: bool,
    /// Number of leading blocks that the holder vouched for.
    pub(crate) vouched: usize,
    pub(crate) bytes: u64,
    /// Part of the bytes that came through memory which both map.
    pub(crate) memory_bytes: u64,
    /// Part of the bytes that came on further connections.
    pub(crate) stream_bytes: u64,
    /// Time from the first page to the last.
    pub(crate) taken: Duration,
    /// Part of that time in which the holder still computed.
    pub(crate) hidden: Duration,
    /// Bytes that came after everything was computed, without the first page of those, and their duration: the speed
    /// of the link.
    pub(crate) moved_bytes: u64,
    pub(crate) moved: Duration,
    /// Reason of an early stop; empty if the transfer was complete.
    pub(crate) why: String,
    /// True if the other end or the link is at fault, so that another worker may do better.
    pub(crate) is_lost: bool,
    /// Verdict about the other end and the link.
    pub(crate) health: Health,
}

/// Verdict of a transfer about its peer and the link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Health {
    /// No verdict so far, or none because this worker is ending.
    #[default]
    Unknown,
    /// Peer and link work: the transfer ended in order, even if the peer no longer had all blocks.
    Good,
    /// Peer or link does not work: the transfer failed or was too slow.
    Bad,
}

/// Age of the step in progress, readable while it runs.
#[derive(Clone)]
pub(crate) struct StepAge {
    origin: Instant,
    /// Start of the step in microseconds after `origin`, plus one; 0 between steps.
    began: Arc<AtomicU64>,
}

impl StepAge {
    pub(crate) fn new() -> Self {
        Self { origin: Instant::now(), began: Arc::new(AtomicU64::new(0)) }
    }

    pub(crate) fn begin(&self) {
        self.began.store(self.origin.elapsed().as_micros() as u64 + 1, Ordering::Relaxed);
    }

    pub(crate) fn end(&self) {
        self.began.store(0, Ordering::Relaxed);
    }

    /// Number of the step in progress; 0 between steps.
    pub(crate) fn step(&self) -> u64 {
        self.began.load(Ordering::Relaxed)
    }

    /// Seconds since the step began; 0 between steps.
    pub(crate) fn seconds(&self) -> f64 {
        match self.step() {
            0 => 0.0,
            began => self.origin.elapsed().saturating_sub(Duration::from_micros(began - 1)).as_secs_f64(),
        }
    }
}
