//! Messages of the session between gateway and worker, derived with prost (no protoc, no .proto file: this file is the
//! schema).
//!
//! Tags are never reused. A field added later must have a default that means "as before"; one that an earlier worker must
//! not pass over belongs to a [`crate::Capability`].

use crate::handshake::{Challenge, Proof};
use prost::{Message, Oneof};

pub use crate::adapter::{AdapterOrder, AdapterReport, LoadedAdapter, OrderedAdapter, PendingAdapter};
pub use crate::gpu::{GpuState, Throttle};
pub use crate::guide::{Guide, GuideKind, GuideState, ReasoningBudget};
pub use crate::notice::{Notice, NoticeKind};

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

/// Progress of loading the model's weights, sent until [`Ready`].
#[derive(Clone, PartialEq, Message)]
pub struct Loading {
    /// Current stage, for a person: "packing weights".
    #[prost(string, tag = "1")]
    pub stage: String,
    /// Bytes of the checkpoint's weights loaded so far.
    #[prost(uint64, tag = "2")]
    pub bytes_done: u64,
    /// Bytes of all weights to load; 0 while unknown.
    #[prost(uint64, tag = "3")]
    pub bytes_total: u64,
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

/// Kind of work that a worker prefers. The role is a weight in the router's choice: any worker can do all work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Role {
    /// Prefill and decode alike: the default of a worker that names no role.
    Mixed = 0,
    /// Mainly prefill, whose KV blocks other workers fetch.
    Prefill = 1,
    /// Mainly decode, with KV from prefill workers, and prefills too short to be worth a transfer.
    Decode = 2,
}

/// Change of the worker's role. Affects requests bound from then on; running requests continue.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct SetRole {
    /// New [`Role`] of the worker, as its number.
    #[prost(enumeration = "Role", tag = "1")]
    pub role: i32,
}

/// Fetch of blocks from another worker into the prefix cache; blocks that are here already are skipped.
#[derive(Clone, PartialEq, Message)]
pub struct Pull {
    /// Id chosen by the gateway; repeated in [`Pulled`].
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// [`Ready::transfer`] of the worker that holds the blocks.
    #[prost(string, tag = "2")]
    pub from: String,
    /// A chain of block hashes from the first block on, 16 bytes each.
    #[prost(bytes = "vec", repeated, tag = "3")]
    pub hashes: Vec<Vec<u8>>,
    /// Deadline of the fetch, in seconds from now.
    #[prost(double, tag = "4")]
    pub deadline_seconds: f64,
}

/// Hint that a request waiting in the gateway will probably come to this worker, which may load the prompt's blocks
/// from lower tiers in advance. There is no answer; a [`Generate`] or [`Cancel`] with the same number ends the hint,
/// and so does time.
#[derive(Clone, PartialEq, Message)]
pub struct Prefetch {
    /// Number of the waiting request, the same as in its later [`Generate::request`].
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Hashes of the prompt's blocks from the first on, 16 bytes each.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub hashes: Vec<Vec<u8>>,
    /// Predicted remaining wait of the request, in seconds.
    #[prost(double, tag = "3")]
    pub wait_seconds: f64,
}

/// Result of a [`Pull`]: blocks readable now, bytes moved, and time taken.
#[derive(Clone, PartialEq, Message)]
pub struct Pulled {
    /// [`Pull::id`] of the fetch that this answers.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// Number of leading blocks of the chain that can be read here now.
    #[prost(uint32, tag = "2")]
    pub blocks: u32,
    /// Bytes of KV that were moved for this pull.
    #[prost(uint64, tag = "3")]
    pub bytes: u64,
    /// Duration of the pull in seconds, as the worker measured it.
    #[prost(double, tag = "4")]
    pub seconds: f64,
    /// Reason of an early stop; empty if the pull was complete.
    #[prost(string, tag = "5")]
    pub why: String,
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

/// Start of a request, or its continuation after its worker was lost, with everything that is known about it.
#[derive(Clone, PartialEq, Message)]
pub struct Generate {
    /// Number chosen by the gateway, unique within (gateway, session).
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Number of this life of the request: +1 at every resume. The gateway drops tokens of an older attempt.
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
    /// Token ids of the whole prompt, after template and tokenizer.
    #[prost(uint32, repeated, tag = "3")]
    pub prompt: Vec<u32>,
    /// One entry per choice that is still open; at least one.
    #[prost(message, repeated, tag = "4")]
    pub choices: Vec<ChoiceStart>,
    /// Sampling parameters, common to all choices; each choice draws its own random numbers.
    #[prost(message, optional, tag = "5")]
    pub sampling: Option<Sampling>,
    /// Salt of the block hash: tenant, model, adapter, cache_salt. The worker adds its numerics id.
    #[prost(bytes = "vec", tag = "6")]
    pub salt: Vec<u8>,
    /// Priority; lower runs first, 0 is normal.
    #[prost(int32, tag = "7")]
    pub priority: i32,
    /// Tokens that a choice may emit before the gateway has to send [`Window`]; 0 means no limit.
    #[prost(uint32, tag = "8")]
    pub window: u32,
    /// [`Ready::transfer`] of the worker that does the prefill, for prefill/decode separation; empty: this worker.
    #[prost(string, tag = "9")]
    pub prefill_at: String,
    /// [`Ready::transfer`] of a worker that holds more of the prefix: blocks missing here are fetched from it before
    /// the prefill begins, and computed if that fails. Empty means no fetch.
    #[prost(string, tag = "10")]
    pub pull_from: String,
    /// Fair-share turn: engine time that the request's tenant had received when the request was bound, in microseconds
    /// divided by its weight. Within one priority the lower turn goes first, and among equal turns the earlier
    /// arrival, so a tenant that asks for more than its share is behind the others. Counted since the gateway began: a
    /// worker compares turns of one gateway with each other, never turns of different gateways.
    #[prost(sint64, tag = "11")]
    pub turn: i64,
    /// Further prefill workers if `prefill_at` is lost during the transfer: asked in this order, each for the blocks
    /// still missing.
    #[prost(string, repeated, tag = "12")]
    pub prefill_next: Vec<String>,
    /// Number of missing tokens above which the workers in `prefill_next` are asked; fewer are computed here.
    #[prost(uint32, tag = "13")]
    pub prefill_next_tokens: u32,
    /// Number of other requests that wait at the gateway. A worker divides its free starts among gateways by it.
    #[prost(uint32, tag = "14")]
    pub waiting: u32,
    /// Grammar that every choice's output follows; `None` leaves the output free.
    #[prost(message, optional, tag = "15")]
    pub grammar: Option<Guide>,
    /// [`Pooling`] of a request that wants a vector of its prompt instead of tokens. Only for workers that announce
    /// [`crate::Capability::Vectors`].
    #[prost(enumeration = "Pooling", tag = "20")]
    pub pooling: i32,
    /// [`crate::AdapterId`] of the adapter that the model runs with, 16 bytes; empty for the model alone. Only for workers
    /// that announce this id in [`Ready::adapters`]; `salt` contains it too.
    #[prost(bytes = "vec", tag = "21")]
    pub adapter: Vec<u8>,
    /// Index of the first prompt token of the second of two texts (token type 1), for workers with [`crate::Capability::Encoders`]; 0: one text.
    #[prost(uint32, tag = "22")]
    pub second_text: u32,
    /// Number of dense layers that the vector goes through behind the pooling, for workers with [`crate::Capability::Chains`]; a worker whose checkpoint
    /// has another number refuses the request.
    #[prost(uint32, tag = "23")]
    pub dense_layers: u32,
    /// Index of the first prompt token that is pooled, for workers with [`crate::Capability::Chains`].
    #[prost(uint32, tag = "24")]
    pub pooled_from: u32,
}

/// Rule by which the final states of a prompt's tokens become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Pooling {
    /// No vector: the request generates tokens.
    None = 0,
    /// Vector of the last token: its state behind the model's last norm. Neither scaled nor cut; the gateway does that.
    Last = 1,
    /// Vector of the first token, of an encoder or a decoder of whole texts, as all that follow but the head.
    First = 2,
    /// Mean of the states of all tokens.
    Mean = 3,
    /// Values of an encoder's classification head, before any function that makes scores of them.
    Head = 4,
    /// Sum of the states of all tokens over the root of their number.
    RootMean = 5,
    /// Mean of the states in which each token weighs as much as its place, counted from 1.
    WeightedMean = 6,
    /// Largest value of each component.
    Max = 7,
}

/// One choice of a request, with the tokens it has emitted already.
#[derive(Clone, PartialEq, Message)]
pub struct ChoiceStart {
    /// Index of the choice, from 0.
    #[prost(uint32, tag = "1")]
    pub index: u32,
    /// Tokens emitted in earlier attempts; they count as output (penalties, max_tokens, positions of random numbers).
    #[prost(uint32, repeated, tag = "2")]
    pub emitted: Vec<u32>,
}

/// Sampling parameters; bounds are checked at the edge and again by the engine.
#[derive(Clone, PartialEq, Message)]
pub struct Sampling {
    /// Divisor of the logits before the draw; 0 is greedy and takes the best token.
    #[prost(float, tag = "1")]
    pub temperature: f32,
    /// Number of most probable tokens to draw from (top-k); 0 keeps all.
    #[prost(uint32, tag = "2")]
    pub top_k: u32,
    /// Nucleus probability: mass of the most probable tokens that are kept; 1 keeps all.
    #[prost(float, tag = "3")]
    pub top_p: f32,
    /// Least probability of a kept token, relative to that of the best; 0 keeps all.
    #[prost(float, tag = "4")]
    pub min_p: f32,
    /// Subtracted once from every token that occurs in the output.
    #[prost(float, tag = "5")]
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each of its occurrences in the output.
    #[prost(float, tag = "6")]
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    #[prost(float, tag = "7")]
    pub repetition_penalty: f32,
    /// Values added to the logits of single tokens before anything else.
    #[prost(message, repeated, tag = "8")]
    pub logit_bias: Vec<LogitBias>,
    /// Seed of the counter-based random numbers, always set (drawn by the gateway when the client gives none).
    #[prost(uint64, tag = "9")]
    pub seed: u64,
    /// Most output tokens of a choice, over all attempts.
    #[prost(uint32, tag = "10")]
    pub max_tokens: u32,
    /// Least output tokens: end tokens are masked before.
    #[prost(uint32, tag = "11")]
    pub min_tokens: u32,
    /// Tokens that end the choice and count as output: the model's end tokens (unless ignored) and the client's.
    #[prost(uint32, repeated, tag = "12")]
    pub stop_tokens: Vec<u32>,
    /// Number of best tokens whose log-probabilities are returned beside that of each emitted token; 0 returns the
    /// emitted one's only, -1 none.
    #[prost(int32, tag = "13")]
    pub logprobs: i32,
    /// Number of best tokens, as in `logprobs`, for every prompt token (bypasses cache reads); -1 is off.
    #[prost(int32, tag = "14")]
    pub prompt_logprobs: i32,
    /// Tokens that may be drawn; empty allows all.
    #[prost(uint32, repeated, tag = "15")]
    pub allowed_tokens: Vec<u32>,
    /// Forbidden token sequences: the last token of a sequence cannot be drawn after the others. Only for workers with
    /// [`crate::Capability::BadWords`].
    #[prost(message, repeated, tag = "16")]
    pub bad_words: Vec<BadWord>,
    /// Tokens whose log-probabilities come beside each generated token, instead of the best; used if not empty and
    /// `logprobs` is not −1. Only for workers with [`crate::Capability::LogprobTokens`].
    #[prost(uint32, repeated, tag = "17")]
    pub logprob_tokens: Vec<u32>,
    /// Most tokens of reasoning in the output of each choice; `None`: as many as `max_tokens`. Only for workers with
    /// [`crate::Capability::ReasoningBudgets`].
    #[prost(message, optional, tag = "18")]
    pub reasoning: Option<ReasoningBudget>,
}

/// A forbidden sequence of tokens, not empty.
#[derive(Clone, PartialEq, Message)]
pub struct BadWord {
    /// Token ids of the forbidden sequence, in the order of the text.
    #[prost(uint32, repeated, tag = "1")]
    pub tokens: Vec<u32>,
}

/// One entry of `logit_bias`: a token and the value added to its logit.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct LogitBias {
    /// Id of the token whose logit is changed.
    #[prost(uint32, tag = "1")]
    pub token: u32,
    /// Value added to the token's logit.
    #[prost(float, tag = "2")]
    pub bias: f32,
}

/// Cancellation of a request or of single choices.
#[derive(Clone, PartialEq, Message)]
pub struct Cancel {
    /// [`Generate::request`] of the request to cancel.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Indices of the choices to cancel; empty means all.
    #[prost(uint32, repeated, tag = "2")]
    pub choices: Vec<u32>,
}

/// Extension of a choice's window (flow control): the reader has taken tokens, so the worker may emit more.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Window {
    /// [`Generate::request`] of the request.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Index of the choice whose window grows, from 0.
    #[prost(uint32, tag = "2")]
    pub choice: u32,
    /// Number of further tokens that the choice may emit.
    #[prost(uint32, tag = "3")]
    pub tokens: u32,
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

/// Report of one engine step: everything that happened, in one order.
#[derive(Clone, PartialEq, Message)]
pub struct Step {
    /// Number of steps since the epoch began.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// Outputs of single choices in this step: new tokens, log-probabilities, ends.
    #[prost(message, repeated, tag = "2")]
    pub outputs: Vec<Output>,
    /// Load and capacity of the engine after the step.
    #[prost(message, optional, tag = "3")]
    pub state: Option<EngineState>,
    /// Changes of the prefix cache since the last frame, in the order in which they happened.
    #[prost(message, repeated, tag = "4")]
    pub kv: Vec<KvEvent>,
    /// Number of [`Generate`] frames of this session that the engine had accepted when `state` was made; the credits
    /// in `state` account for them.
    #[prost(uint64, tag = "5")]
    pub accepted: u64,
    /// Work and duration of the step; `None` in a heartbeat.
    #[prost(message, optional, tag = "6")]
    pub batch: Option<Batch>,
}

/// Batch of one step and its duration, from which the gateway estimates a worker's speeds.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Batch {
    /// Rows of prefill in the step: prompt tokens computed.
    #[prost(uint32, tag = "1")]
    pub prefill_tokens: u32,
    /// Attended tokens summed over the rows of prefill.
    #[prost(double, tag = "2")]
    pub prefill_context: f64,
    /// Rows of decode in the step: one per decoding sequence, and those of its draft tokens.
    #[prost(uint32, tag = "3")]
    pub decodes: u32,
    /// Attended tokens summed over the rows of decode.
    #[prost(uint64, tag = "4")]
    pub decode_context: u64,
    /// Duration of the step in seconds.
    #[prost(double, tag = "5")]
    pub seconds: f64,
}

/// Output of one choice in one step.
#[derive(Clone, PartialEq, Message)]
pub struct Output {
    /// [`Generate::request`] of the request that the output belongs to.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// [`Generate::attempt`] of the request; the gateway drops output of an older attempt.
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
    /// Index of the choice within its request, from 0.
    #[prost(uint32, tag = "3")]
    pub choice: u32,
    /// New tokens; the first has index `at` in the output.
    #[prost(message, repeated, tag = "4")]
    pub tokens: Vec<Token>,
    /// Index of the first of `tokens` in the output, so that a token sent twice is emitted once.
    #[prost(uint32, tag = "5")]
    pub at: u32,
    /// End of the choice, set in the output that carries its last tokens.
    #[prost(message, optional, tag = "6")]
    pub finish: Option<Finish>,
    /// Prompt tokens read from the prefix cache instead of computed; set with the first output of the choice.
    #[prost(uint32, optional, tag = "7")]
    pub cached_tokens: Option<u32>,
    /// Log-probabilities of prompt tokens, in order, when asked for; sent with the first choice's first output.
    #[prost(message, repeated, tag = "8")]
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Vector that [`Generate::pooling`] asked for, sent with the end of the choice.
    #[prost(float, repeated, tag = "20")]
    pub vector: Vec<f32>,
}

/// One emitted token of a choice, with log-probabilities when the request asks for them.
#[derive(Clone, PartialEq, Message)]
pub struct Token {
    /// Id of the token in the model's vocabulary.
    #[prost(uint32, tag = "1")]
    pub id: u32,
    /// Log-probabilities at the token's position; `None` unless [`Sampling::logprobs`] asks for them.
    #[prost(message, optional, tag = "2")]
    pub logprobs: Option<TokenLogprobs>,
}

/// Raw log-probabilities (before temperature and penalties) at one position.
#[derive(Clone, PartialEq, Message)]
pub struct TokenLogprobs {
    /// Log-probability of the token itself; NaN for the first prompt token, which has none.
    #[prost(float, tag = "1")]
    pub logprob: f32,
    /// Ids of the tokens reported beside this one: the best in descending order, or those of
    /// [`Sampling::logprob_tokens`].
    #[prost(uint32, repeated, tag = "2")]
    pub top_tokens: Vec<u32>,
    /// Log-probabilities of `top_tokens`, entry by entry.
    #[prost(float, repeated, tag = "3")]
    pub top_logprobs: Vec<f32>,
    /// Rank of the token itself, from 1.
    #[prost(uint32, tag = "4")]
    pub rank: u32,
}

/// End of a choice: reason, and for a failure its kind and message.
#[derive(Clone, PartialEq, Message)]
pub struct Finish {
    /// [`FinishReason`] of the choice, as its number.
    #[prost(enumeration = "FinishReason", tag = "1")]
    pub reason: i32,
    /// The stop token, for [`FinishReason::Stop`].
    #[prost(uint32, optional, tag = "2")]
    pub stop_token: Option<u32>,
    /// An [`crate::ErrorKind`] number, for [`FinishReason::Failed`].
    #[prost(int32, tag = "3")]
    pub error_kind: i32,
    /// Message for client and log, for [`FinishReason::Failed`].
    #[prost(string, tag = "4")]
    pub message: String,
}

/// Reasons why a choice ended, as in [`Finish::reason`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum FinishReason {
    /// A stop token was drawn: an end token of the model or one of the client's.
    Stop = 0,
    /// The limit `max_tokens`, or the end of the model's context.
    Length = 1,
    /// Cancelled by the gateway with a [`Cancel`] frame.
    Cancelled = 2,
    /// Refused or failed by the worker; see `error_kind` and `message`.
    Failed = 3,
}

/// Load and capacity of one engine, pushed with every step; the router chooses workers by it.
#[derive(Clone, PartialEq, Message)]
pub struct EngineState {
    /// Sequences waiting for their first step.
    #[prost(uint32, tag = "1")]
    pub waiting: u32,
    /// Sequences in prefill or decode.
    #[prost(uint32, tag = "2")]
    pub running: u32,
    /// Prompt tokens not computed so far, of waiting and running sequences.
    #[prost(uint64, tag = "3")]
    pub prefill_tokens_pending: u64,
    /// Time to compute the pending prompt tokens at the measured speed, in seconds.
    #[prost(double, tag = "4")]
    pub queue_seconds: f64,
    /// Duration of the last step with work, in seconds.
    #[prost(double, tag = "5")]
    pub step_seconds: f64,
    /// KV blocks of the device in total: pages of the pool.
    #[prost(uint32, tag = "6")]
    pub blocks_total: u32,
    /// KV blocks of the device that are free or evictable now.
    #[prost(uint32, tag = "7")]
    pub blocks_free: u32,
    /// KV blocks of the device held only by the prefix cache, by no sequence.
    #[prost(uint32, tag = "8")]
    pub blocks_cached: u32,
    /// Number of sequences that the worker would start at its next step.
    #[prost(uint32, tag = "9")]
    pub credits: u32,
    /// Prompt tokens looked up since the epoch began.
    #[prost(uint64, tag = "10")]
    pub prompt_tokens: u64,
    /// Part of `prompt_tokens` that was read from the prefix cache.
    #[prost(uint64, tag = "11")]
    pub cached_tokens: u64,
    /// Output tokens of all sequences since the epoch began.
    #[prost(uint64, tag = "12")]
    pub output_tokens: u64,
    /// Preemptions of running sequences for lack of blocks, since the epoch began.
    #[prost(uint64, tag = "13")]
    pub preemptions: u64,
    /// True if the worker is draining and accepts nothing new.
    #[prost(bool, tag = "14")]
    pub draining: bool,
    /// Measured prefill speed in tokens per second; 0 until known.
    #[prost(double, tag = "15")]
    pub prefill_tokens_per_second: f64,
    /// Age of the step in progress when the frame was written, in seconds; 0 between steps. Distinguishes a hung
    /// engine from an idle one.
    #[prost(double, tag = "16")]
    pub step_age_seconds: f64,
    /// Part of `running` that waits for its reader; these sequences take no slot from others.
    #[prost(uint32, tag = "17")]
    pub stalled: u32,
    /// Attended tokens summed over the tokens in `prefill_tokens_pending`.
    #[prost(double, tag = "18")]
    pub prefill_context_pending: f64,
    /// Context tokens of the running sequences without stalled ones: the attended tokens of a step once all of them
    /// decode.
    #[prost(uint64, tag = "19")]
    pub context_tokens: u64,
    /// Current [`Role`] of the worker, as its number.
    #[prost(enumeration = "Role", tag = "20")]
    pub role: i32,
    /// State of each KV tier below the device (host, disk, remote), fastest first.
    #[prost(message, repeated, tag = "21")]
    pub tiers: Vec<TierState>,
    /// Counters of KV moved from and to other workers.
    #[prost(message, optional, tag = "22")]
    pub transfers: Option<TransferState>,
    /// Free rows of prefill in the step after the next; 0 if unknown.
    #[prost(uint32, tag = "23")]
    pub prefill_rows_free: u32,
    /// Blocks that the waiting sequences will take beyond cached ones: reserved, though still free.
    #[prost(uint32, tag = "24")]
    pub blocks_wanted: u32,
    /// Counters of blocks loaded ahead of requests, on [`Prefetch`] hints.
    #[prost(message, optional, tag = "25")]
    pub prefetches: Option<PrefetchState>,
    /// Counters of outputs that follow a [`Guide`]; `None` if the worker cannot follow one.
    #[prost(message, optional, tag = "26")]
    pub guides: Option<GuideState>,
    /// Reasonings that were closed because their [`ReasoningBudget`] was spent, since the epoch began.
    #[prost(uint64, tag = "27")]
    pub reasonings_closed: u64,
    /// Draft tokens that were computed beside the last token of their sequence, since the epoch began.
    #[prost(uint64, tag = "28")]
    pub drafted_tokens: u64,
    /// Part of `drafted_tokens` that saved a step: they equalled the output, and the token after each came with them.
    #[prost(uint64, tag = "29")]
    pub accepted_tokens: u64,
}

/// Blocks that a [`Prefetch`] loaded, sums since the epoch began.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct PrefetchState {
    /// Prefetched blocks that a request found.
    #[prost(uint64, tag = "1")]
    pub used: u64,
    /// Prefetched blocks that no request asked for within a while.
    #[prost(uint64, tag = "2")]
    pub unused: u64,
}

/// State and counters of one KV tier of one worker.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct TierState {
    /// [`Tier`] that the state describes, as its number.
    #[prost(enumeration = "Tier", tag = "1")]
    pub tier: i32,
    /// Capacity of the tier in KV blocks.
    #[prost(uint64, tag = "2")]
    pub blocks_total: u64,
    /// KV blocks that the tier holds now.
    #[prost(uint64, tag = "3")]
    pub blocks_used: u64,
    /// Measured seconds to bring one block to the device; 0 until known.
    #[prost(double, tag = "4")]
    pub load_seconds_per_block: f64,
    /// Blocks loaded from the tier since the epoch began.
    #[prost(uint64, tag = "5")]
    pub loaded: u64,
    /// Blocks stored in the tier since the epoch began.
    #[prost(uint64, tag = "6")]
    pub stored: u64,
    /// Blocks whose bytes did not match their name, since the epoch began. None of them was used.
    #[prost(uint64, tag = "7")]
    pub corrupt: u64,
    /// Blocks that were not stored because the store was busy, full or broken, since the epoch began.
    #[prost(uint64, tag = "8")]
    pub dropped: u64,
    /// Seconds spent loading, summed over blocks, since the epoch began.
    #[prost(double, tag = "9")]
    pub load_seconds: f64,
    /// Requests that waited for blocks which the tier did not bring in time, and computed them, since the epoch began.
    #[prost(uint64, tag = "10")]
    pub late: u64,
}

/// KV moved between workers, sums since the epoch began.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct TransferState {
    /// Bytes of KV received from other workers.
    #[prost(uint64, tag = "1")]
    pub bytes_in: u64,
    /// Bytes of KV sent to other workers.
    #[prost(uint64, tag = "2")]
    pub bytes_out: u64,
    /// Seconds from the first to the last received byte, summed over transfers.
    #[prost(double, tag = "3")]
    pub seconds: f64,
    /// Part of `seconds` in which the sender was still computing.
    #[prost(double, tag = "4")]
    pub hidden_seconds: f64,
    /// Incoming transfers that ended normally, with all blocks asked for.
    #[prost(uint64, tag = "5")]
    pub completed: u64,
    /// Transfers that failed; the missing blocks were computed.
    #[prost(uint64, tag = "6")]
    pub failed: u64,
    /// Transfers that the receiver ended: no request waited for them any more, or their pages were needed.
    #[prost(uint64, tag = "7")]
    pub cancelled: u64,
    /// Received blocks that could be used.
    #[prost(uint64, tag = "8")]
    pub blocks_in: u64,
    /// First tokens that other workers drew for requests of this worker.
    #[prost(uint64, tag = "9")]
    pub first_tokens: u64,
    /// Part of `seconds` for blocks that the sender computed on request; only this part can be hidden.
    #[prost(double, tag = "10")]
    pub prefill_seconds: f64,
    /// Part of `bytes_in` that came when the sender had nothing left to compute, so that its duration measures the
    /// link alone.
    #[prost(uint64, tag = "11")]
    pub moved_bytes: u64,
    /// Duration of `moved_bytes` in seconds.
    #[prost(double, tag = "12")]
    pub moved_seconds: f64,
    /// Part of `bytes_in` that came through memory which both workers map.
    #[prost(uint64, tag = "13")]
    pub memory_bytes: u64,
    /// Part of `bytes_in` that came on further connections of a transfer beside its first.
    #[prost(uint64, tag = "14")]
    pub stream_bytes: u64,
    /// Part of `failed` after which another prefill worker was asked for the missing blocks.
    #[prost(uint64, tag = "15")]
    pub asked_next: u64,
}

/// A change of the prefix cache in one tier, from which the router keeps its radix index of the worker.
#[derive(Clone, PartialEq, Message)]
pub struct KvEvent {
    /// Blocks that can be read from now on, 16 bytes each, a chain in order.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub stored: Vec<Vec<u8>>,
    /// Blocks that are no longer in this tier, 16 bytes each.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub removed: Vec<Vec<u8>>,
    /// True if all blocks of this tier are gone (applied before `stored`).
    #[prost(bool, tag = "3")]
    pub cleared: bool,
    /// Tier of the blocks, a [`Tier`]. A block may be in several tiers at once; each reports for itself.
    #[prost(enumeration = "Tier", tag = "4")]
    pub tier: i32,
    /// Hash of the block before the first of `stored`, 16 bytes; empty when there is none or it is unknown. Only helps
    /// the router to keep one chain together.
    #[prost(bytes = "vec", tag = "5")]
    pub parent: Vec<u8>,
}

/// Tiers that hold blocks, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Tier {
    /// Memory of the device that computes; the default.
    Device = 0,
    /// Memory of the host, for a device with its own.
    Host = 1,
    /// Files on a local disk.
    Disk = 2,
    /// A store that other workers may read too.
    Remote = 3,
}

impl Tier {
    /// Name of the tier: `device`, `host`, `disk`, `remote`.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Disk => "disk",
            Tier::Remote => "remote",
        }
    }
}
