//! Messages of the session between gateway and worker, derived with prost (no protoc, no .proto file: this file and those of
//! the messages that it re-exports are the schema).
//!
//! ```text
//! frames.rs        both directions, and the life of a session: hello, loading, ready, drain, refused
//! request.rs       one request: prompt, sampling, window, cancellation
//! step.rs          one step: output of each choice
//! engine_state.rs  load, capacity and counters of the engine
//! kv.rs            changes of the prefix cache, and moves of blocks
//! ```
//!
//! Tags are never reused. A field added later must have a default that means "as before"; one that an earlier worker must
//! not pass over belongs to a [`crate::Capability`].

use crate::handshake::{Challenge, Proof};
use prost::{Message, Oneof};

pub use crate::adapter::{AdapterOrder, AdapterReport, LoadedAdapter, OrderedAdapter, PendingAdapter};
pub use crate::engine_state::{EngineState, PrefetchState, TierState, TransferState};
pub use crate::gpu::{GpuState, Throttle};
pub use crate::guide::{Guide, GuideKind, GuideState, ReasoningBudget};
pub use crate::kv::{KvEvent, Prefetch, Pull, Pulled, Tier};
pub use crate::notice::{Notice, NoticeKind};
pub use crate::request::{BadWord, Cancel, ChoiceStart, Generate, LogitBias, Pooling, Sampling, Window};
pub use crate::role::{Role, SetRole};
pub use crate::step::{Batch, Finish, FinishReason, Output, Step, Token, TokenLogprobs};

/// Frame from gateway to worker, length-delimited by [`crate::codec`].
#[derive(Clone, PartialEq, Message)]
pub struct Down {
    /// The frame's one message; `None` in a frame without a body of a known tag.
    #[prost(oneof = "DownBody", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10")]
    pub body: Option<DownBody>,
}

/// Bodies of [`Down`]: everything that a gateway may ask of a worker.
#[derive(Clone, PartialEq, Oneof)]
#[expect(clippy::large_enum_variant, reason = "one lives at a time, on its way to the socket; a box would cost more")]
pub enum DownBody {
    /// First frame of a session: version, the gateway's id, and the nonce of the handshake.
    #[prost(message, tag = "1")]
    Hello(Hello),
    /// Start a request, or continue it after its worker was lost.
    #[prost(message, tag = "2")]
    Generate(Generate),
    /// Free the resources of a request; unknown requests are ignored.
    #[prost(message, tag = "3")]
    Cancel(Cancel),
    /// Allow more tokens of a choice (backpressure).
    #[prost(message, tag = "4")]
    Window(Window),
    /// Finish running requests, accept no new ones.
    #[prost(message, tag = "5")]
    Drain(Drain),
    /// Proof of the gateway's key, answering the worker's challenge.
    #[prost(message, tag = "6")]
    Proof(Proof),
    /// Change the role that the worker reports to routers: mixed, prefill or decode.
    #[prost(message, tag = "7")]
    SetRole(SetRole),
    /// Fetch blocks from another worker into the prefix cache.
    #[prost(message, tag = "8")]
    Pull(Pull),
    /// Hint to load the blocks of a request that will probably come, from lower tiers to the device.
    #[prost(message, tag = "9")]
    Prefetch(Prefetch),
    /// Hold exactly these adapters from now on; only for workers with [`Ready::adapter_orders`].
    #[prost(message, tag = "10")]
    Adapters(AdapterOrder),
}

/// Frame from worker to gateway, numbered within its session.
#[derive(Clone, PartialEq, Message)]
pub struct Up {
    /// Number of the frame in this session, from 0; a gap means lost state: the gateway reconnects and starts from a
    /// snapshot.
    #[prost(uint64, tag = "1")]
    pub sequence: u64,
    /// The frame's one message; `None` in a frame without a body of a known tag.
    #[prost(oneof = "UpBody", tags = "2, 3, 4, 5, 6, 7, 8, 9, 10")]
    pub body: Option<UpBody>,
}

/// Bodies of [`Up`]: everything that a worker reports to a gateway.
#[derive(Clone, PartialEq, Oneof)]
#[expect(clippy::large_enum_variant, reason = "the largest comes once per session; a box of a step would cost more")]
pub enum UpBody {
    /// Answer to [`Hello`] on a connection that needs a proof.
    #[prost(message, tag = "2")]
    Challenge(Challenge),
    /// Progress while the weights are still loading; the worker serves nothing so far.
    #[prost(message, tag = "3")]
    Loading(Loading),
    /// Description of the worker, once per session; the worker serves from here on.
    #[prost(message, tag = "4")]
    Ready(Ready),
    /// One engine step, or a heartbeat without tokens.
    #[prost(message, tag = "5")]
    Step(Step),
    /// The worker cannot serve, with the reason; the session ends.
    #[prost(message, tag = "6")]
    Refused(Refused),
    /// Result of the [`Pull`] with the same id, complete or not.
    #[prost(message, tag = "7")]
    Pulled(Pulled),
    /// A trouble of the worker that costs time but fails no request, for the operator.
    #[prost(message, tag = "8")]
    Notice(Notice),
    /// Adapters of the worker, after each change of them.
    #[prost(message, tag = "9")]
    Adapters(AdapterReport),
    /// Figures of the worker's GPU, every few seconds; earlier gateways pass over them.
    #[prost(message, tag = "10")]
    Gpu(GpuState),
}

/// First frame of a session, from gateway to worker.
#[derive(Clone, PartialEq, Message)]
pub struct Hello {
    /// [`crate::PROTOCOL_VERSION`] of the gateway.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Random id of the gateway process; requests are fenced by it.
    #[prost(uint64, tag = "2")]
    pub gateway: u64,
    /// Random bytes that the worker's proof must cover; empty on Unix sockets.
    #[prost(bytes = "vec", tag = "3")]
    pub nonce: Vec<u8>,
}

/// Progress of loading the model's weights, sent until [`Ready`]; see also [`Loading::joining`].
#[derive(Clone, PartialEq, Message)]
pub struct Loading {
    /// Current stage, for a person: "packing weights". One of them has a meaning: that of [`Loading::joining`].
    #[prost(string, tag = "1")]
    pub stage: String,
    /// Bytes of the checkpoint's weights loaded so far.
    #[prost(uint64, tag = "2")]
    pub bytes_done: u64,
    /// Bytes of all weights to load; 0 while unknown.
    #[prost(uint64, tag = "3")]
    pub bytes_total: u64,
}

/// Stage of [`Loading::joining`].
const JOINING: &str = "joining";

impl Loading {
    /// Sign of life of a worker that has its model, until its engine takes in the new session: between two steps, so at once unless a step
    /// takes long. A gateway that hears nothing else for longer than a step may take knows that the step does not end.
    pub fn joining() -> Self {
        Self { stage: JOINING.into(), ..Self::default() }
    }

    /// Returns true if the frame says that only the engine's answer is missing.
    pub fn is_joining(&self) -> bool {
        self.stage == JOINING
    }
}

/// Description of the worker, sent once it can serve.
#[derive(Clone, PartialEq, Message)]
pub struct Ready {
    /// [`crate::PROTOCOL_VERSION`] of the worker.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Random number of this life of the worker, new at every start: a change means that all of its state is lost.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// Name of the checkpoint (folder name, or "penstock-demo").
    #[prost(string, tag = "3")]
    pub model: String,
    /// BLAKE3 of tokenizer.json; must equal the gateway's.
    #[prost(bytes = "vec", tag = "4")]
    pub tokenizer_hash: Vec<u8>,
    /// Numerics id (backend, path, weight format, layout, kernel version): exactness is promised between equal ids.
    #[prost(string, tag = "5")]
    pub numerics_id: String,
    /// Rows of the embedding, which is the number of token ids that the model knows.
    #[prost(uint32, tag = "6")]
    pub vocab_size: u32,
    /// Longest sequence served, in tokens.
    #[prost(uint32, tag = "7")]
    pub context_tokens: u32,
    /// [`crate::BLOCK_TOKENS`] of the worker: tokens of one KV block.
    #[prost(uint32, tag = "8")]
    pub block_tokens: u32,
    /// KV blocks that the device holds in total.
    #[prost(uint32, tag = "9")]
    pub blocks_total: u32,
    /// Most sequences that the worker runs at once.
    #[prost(uint32, tag = "10")]
    pub sequences_max: u32,
    /// Device and path, for a person: "cpu avx512bf16, 2 threads".
    #[prost(string, tag = "11")]
    pub device: String,
    /// Process id, for supervision of local workers.
    #[prost(uint32, tag = "12")]
    pub pid: u32,
    /// Blocks in the prefix cache at this moment: the snapshot from which the gateway's radix index of this worker
    /// starts. Blocks that do not fit the frame follow in [`Step`]s; see [`crate::parts`].
    #[prost(message, repeated, tag = "13")]
    pub kv: Vec<KvEvent>,
    /// Load and capacity of the engine at this moment.
    #[prost(message, optional, tag = "14")]
    pub state: Option<EngineState>,
    /// BLAKE3 over config.json and the name, type, shape and samples of the bytes of each weight. Two fine-tunes of one
    /// model differ.
    #[prost(bytes = "vec", tag = "15")]
    pub model_hash: Vec<u8>,
    /// Address where other workers of the pool fetch KV; empty if the blocks of this worker cannot be moved.
    #[prost(string, tag = "16")]
    pub transfer: String,
    /// Bytes of one block in wire order; both ends of a transfer need the same.
    #[prost(uint64, tag = "17")]
    pub block_bytes: u64,
    /// Seconds from the start of the process until it could serve; 0 if unknown.
    #[prost(double, tag = "18")]
    pub load_seconds: f64,
    /// Id of the worker's grammars: their version, and a hash of the vocabulary. Equal ids mask and force the same
    /// tokens. Empty if the worker cannot follow a [`Guide`]; it then refuses requests that have one.
    #[prost(string, tag = "19")]
    pub grammar: String,
    /// True if the worker follows a [`ReasoningBudget`]; earlier workers ignore one silently. Gateways read this
    /// that know no `capabilities`.
    #[prost(bool, tag = "20")]
    pub reasoning_budgets: bool,
    /// Each [`crate::Capability`] of the worker, as its number. Earlier workers announce none.
    #[prost(int32, repeated, tag = "21")]
    pub capabilities: Vec<i32>,
    /// Adapters that are loaded beside the model. Requests with another one are refused; earlier workers announce none.
    #[prost(message, repeated, tag = "22")]
    pub adapters: Vec<LoadedAdapter>,
    /// True if the worker takes an [`AdapterOrder`] from this gateway; earlier workers ignore one silently.
    #[prost(bool, tag = "23")]
    pub adapter_orders: bool,
    /// Adapters of the last order that are not loaded, with the reason.
    #[prost(message, repeated, tag = "24")]
    pub adapters_pending: Vec<PendingAdapter>,
    /// Bytes of packed weights in memory that workers of one machine share; 0: the worker's weights are its own.
    #[prost(uint64, tag = "25")]
    pub shared_weights_bytes: u64,
    /// True if another worker had packed them.
    #[prost(bool, tag = "26")]
    pub found_weights: bool,
}

/// Refusal with which a worker ends the session.
#[derive(Clone, PartialEq, Message)]
pub struct Refused {
    /// [`crate::ErrorKind`] of the refusal, as its number.
    #[prost(int32, tag = "1")]
    pub kind: i32,
    /// Reason in words, for the gateway's log; not shown to clients.
    #[prost(string, tag = "2")]
    pub message: String,
}

/// Drain of the worker: no new requests; exit when empty if asked. Ignored while another gateway is connected.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Drain {
    /// True to exit once the last sequence has ended.
    #[prost(bool, tag = "1")]
    pub exit: bool,
    /// With `exit`: seconds after which the worker exits although sequences are open; 0: its own deadline.
    #[prost(uint32, tag = "2")]
    pub patience_seconds: u32,
}
