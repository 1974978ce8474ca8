//! Messages of the session, derived with prost (no protoc, no .proto file: this file is the schema).
//!
//! Tags are never reused. A field added later must have a default that means "as before".

use crate::handshake::{Challenge, Proof};
use prost::{Message, Oneof};

/// Gateway to worker.
#[derive(Clone, PartialEq, Message)]
pub struct Down {
    /// What the gateway says.
    #[prost(oneof = "DownBody", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9")]
    pub body: Option<DownBody>,
}

/// Bodies of [`Down`].
#[derive(Clone, PartialEq, Oneof)]
#[expect(clippy::large_enum_variant, reason = "one lives at a time, on its way to the socket; a box would cost more")]
pub enum DownBody {
    /// First frame of a session.
    #[prost(message, tag = "1")]
    Hello(Hello),
    /// Start, or continue, a request.
    #[prost(message, tag = "2")]
    Generate(Generate),
    /// Free what the request holds; unknown requests are ignored.
    #[prost(message, tag = "3")]
    Cancel(Cancel),
    /// Allow more tokens of a choice (back-pressure).
    #[prost(message, tag = "4")]
    Window(Window),
    /// Finish what runs, take nothing new.
    #[prost(message, tag = "5")]
    Drain(Drain),
    /// Proof of the gateway's key, answering the worker's challenge.
    #[prost(message, tag = "6")]
    Proof(Proof),
    /// Change what kind of work it does.
    #[prost(message, tag = "7")]
    SetRole(SetRole),
    /// Fetch blocks from another worker into the prefix cache.
    #[prost(message, tag = "8")]
    Pull(Pull),
    /// Load blocks that a request will need.
    #[prost(message, tag = "9")]
    Prefetch(Prefetch),
}

/// Worker to gateway.
#[derive(Clone, PartialEq, Message)]
pub struct Up {
    /// Counts frames of this session from 0; a gap means lost state: the gateway reconnects and starts from a snapshot.
    #[prost(uint64, tag = "1")]
    pub sequence: u64,
    /// What the worker says.
    #[prost(oneof = "UpBody", tags = "2, 3, 4, 5, 6, 7, 8")]
    pub body: Option<UpBody>,
}

/// Bodies of [`Up`].
#[derive(Clone, PartialEq, Oneof)]
pub enum UpBody {
    /// Answer to [`Hello`] on a connection that needs a proof.
    #[prost(message, tag = "2")]
    Challenge(Challenge),
    /// The weights are still loading.
    #[prost(message, tag = "3")]
    Loading(Loading),
    /// The worker serves from here on.
    #[prost(message, tag = "4")]
    Ready(Ready),
    /// One engine step, or a heartbeat without tokens.
    #[prost(message, tag = "5")]
    Step(Step),
    /// The worker cannot serve and says why; the session ends.
    #[prost(message, tag = "6")]
    Refused(Refused),
    /// Answer to [`Pull`].
    #[prost(message, tag = "7")]
    Pulled(Pulled),
    /// Something that an operator should know of.
    #[prost(message, tag = "8")]
    Notice(Notice),
}

/// Opens a session.
#[derive(Clone, PartialEq, Message)]
pub struct Hello {
    /// [`crate::PROTOCOL_VERSION`] of the sender.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Random id of the gateway process; requests are fenced by it.
    #[prost(uint64, tag = "2")]
    pub gateway: u64,
    /// Random bytes that the worker's proof must cover; empty on Unix sockets.
    #[prost(bytes = "vec", tag = "3")]
    pub nonce: Vec<u8>,
}

/// Progress of loading.
#[derive(Clone, PartialEq, Message)]
pub struct Loading {
    /// What is being done, for a person: "packing weights".
    #[prost(string, tag = "1")]
    pub stage: String,
    /// Bytes done.
    #[prost(uint64, tag = "2")]
    pub bytes_done: u64,
    /// Bytes in all; 0 when not known yet.
    #[prost(uint64, tag = "3")]
    pub bytes_total: u64,
}

/// What the worker is, said once it can serve.
#[derive(Clone, PartialEq, Message)]
pub struct Ready {
    /// [`crate::PROTOCOL_VERSION`] of the sender.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// One life of a worker: random, new at every start. A change means that everything it held is gone.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// Name under which the checkpoint is known (folder name, or "penstock-demo").
    #[prost(string, tag = "3")]
    pub model: String,
    /// BLAKE3 of tokenizer.json; must equal the gateway's.
    #[prost(bytes = "vec", tag = "4")]
    pub tokenizer_hash: Vec<u8>,
    /// What exactness is promised within: backend, path, weight format, layout, kernel version.
    #[prost(string, tag = "5")]
    pub numerics_id: String,
    /// Rows of the embedding.
    #[prost(uint32, tag = "6")]
    pub vocab_size: u32,
    /// Longest sequence served, in tokens.
    #[prost(uint32, tag = "7")]
    pub context_tokens: u32,
    /// [`crate::BLOCK_TOKENS`] of the worker.
    #[prost(uint32, tag = "8")]
    pub block_tokens: u32,
    /// KV blocks on the device.
    #[prost(uint32, tag = "9")]
    pub blocks_total: u32,
    /// Sequences that can run at once.
    #[prost(uint32, tag = "10")]
    pub sequences_max: u32,
    /// Device and path for a person: "cpu avx512bf16, 2 threads".
    #[prost(string, tag = "11")]
    pub device: String,
    /// Process id, for supervision of local workers.
    #[prost(uint32, tag = "12")]
    pub pid: u32,
    /// Blocks that the prefix cache holds now, so that a new session's view starts true.
    #[prost(message, repeated, tag = "13")]
    pub kv: Vec<KvEvent>,
    /// State at this moment.
    #[prost(message, optional, tag = "14")]
    pub state: Option<EngineState>,
    /// BLAKE3 over the names, shapes and bytes sizes of the weights and over config.json.
    #[prost(bytes = "vec", tag = "15")]
    pub model_hash: Vec<u8>,
    /// Where other workers of the pool reach it for KV; empty: nowhere, its blocks cannot be moved.
    #[prost(string, tag = "16")]
    pub transfer: String,
    /// Bytes of one block in wire order; both ends of a transfer need the same.
    #[prost(uint64, tag = "17")]
    pub block_bytes: u64,
    /// Seconds from the start of the process until it could serve; 0: not said.
    #[prost(double, tag = "18")]
    pub load_seconds: f64,
}

/// What kind of work a worker does. A weight in the router's choice, not a kind of process: any worker can do all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Role {
    /// Prefill and decode.
    Mixed = 0,
    /// Prefill for others.
    Prefill = 1,
    /// Decode; short prefills too.
    Decode = 2,
}

/// Takes effect for what is bound from then on; what runs goes on.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct SetRole {
    /// The role.
    #[prost(enumeration = "Role", tag = "1")]
    pub role: i32,
}

/// Fetch blocks from another worker into the prefix cache, the ones that are missing here.
#[derive(Clone, PartialEq, Message)]
pub struct Pull {
    /// Chosen by the gateway; comes back in [`Pulled`].
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// The other's [`Ready::transfer`].
    #[prost(string, tag = "2")]
    pub from: String,
    /// A chain of block hashes from the first block on, 16 bytes each.
    #[prost(bytes = "vec", repeated, tag = "3")]
    pub hashes: Vec<Vec<u8>>,
    /// Seconds after which it is given up.
    #[prost(double, tag = "4")]
    pub deadline_seconds: f64,
}

/// A request that waits in the gateway will probably come here: what lower tiers have of its prompt may be loaded before it does. A hint:
/// there is no answer, a [`Generate`] or [`Cancel`] of the same number ends it, and so does time.
#[derive(Clone, PartialEq, Message)]
pub struct Prefetch {
    /// The request.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Names of the blocks of its prompt from the first on, 16 bytes each.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub hashes: Vec<Vec<u8>>,
    /// Seconds that it is predicted to wait still.
    #[prost(double, tag = "3")]
    pub wait_seconds: f64,
}

/// What became of a [`Pull`].
#[derive(Clone, PartialEq, Message)]
pub struct Pulled {
    /// Its id.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// Leading blocks of the chain that can be read here now.
    #[prost(uint32, tag = "2")]
    pub blocks: u32,
    /// Bytes that were moved.
    #[prost(uint64, tag = "3")]
    pub bytes: u64,
    /// How long it took.
    #[prost(double, tag = "4")]
    pub seconds: f64,
    /// Why it stopped early; empty: it did not.
    #[prost(string, tag = "5")]
    pub why: String,
}

/// A trouble of a worker that costs time and no request: it began, goes on, or is over. Said when it begins and ends, and now and then between.
#[derive(Clone, PartialEq, Message)]
pub struct Notice {
    /// What is troubled.
    #[prost(enumeration = "NoticeKind", tag = "1")]
    pub kind: i32,
    /// Which of them: the address of a peer, the name of a tier.
    #[prost(string, tag = "2")]
    pub subject: String,
    /// The reason; empty: the trouble is over.
    #[prost(string, tag = "3")]
    pub why: String,
    /// How often it happened since it was said last.
    #[prost(uint64, tag = "4")]
    pub count: u64,
}

/// What a [`Notice`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum NoticeKind {
    /// Transfers of KV from a peer fail; what is missing is computed.
    Transfer = 0,
    /// A tier is off.
    Tier = 1,
}

impl NoticeKind {
    /// As it is written: `transfer`, `tier`.
    pub fn name(self) -> &'static str {
        match self {
            NoticeKind::Transfer => "transfer",
            NoticeKind::Tier => "tier",
        }
    }
}

/// Why a worker ends the session.
#[derive(Clone, PartialEq, Message)]
pub struct Refused {
    /// An [`crate::ErrorKind`] as its number.
    #[prost(int32, tag = "1")]
    pub kind: i32,
    /// For the log.
    #[prost(string, tag = "2")]
    pub message: String,
}

/// Start a request, or continue it after its worker was lost. Carries the whole truth about it.
#[derive(Clone, PartialEq, Message)]
pub struct Generate {
    /// Chosen by the gateway, unique within (gateway, session).
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Counts the lives of this request: +1 at every resume. Tokens of an older one are dropped by the gateway.
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
    /// Prompt token ids.
    #[prost(uint32, repeated, tag = "3")]
    pub prompt: Vec<u32>,
    /// One entry per choice that is still open; at least one.
    #[prost(message, repeated, tag = "4")]
    pub choices: Vec<ChoiceStart>,
    /// How tokens are drawn.
    #[prost(message, optional, tag = "5")]
    pub sampling: Option<Sampling>,
    /// Salt of the block hash: tenant, model, adapter, cache_salt. The worker adds its numerics id.
    #[prost(bytes = "vec", tag = "6")]
    pub salt: Vec<u8>,
    /// Lower runs first; 0 is normal.
    #[prost(int32, tag = "7")]
    pub priority: i32,
    /// Tokens a choice may emit before the gateway has to send [`Window`]; 0 means no limit.
    #[prost(uint32, tag = "8")]
    pub window: u32,
    /// [`Ready::transfer`] of the worker that does the prefill, for prefill/decode separation; empty: here.
    #[prost(string, tag = "9")]
    pub prefill_at: String,
    /// [`Ready::transfer`] of a worker that holds more of the prefix: what is missing here is fetched from it before the prefill begins,
    /// and computed if that fails. Empty: nowhere.
    #[prost(string, tag = "10")]
    pub pull_from: String,
    /// Among those of one priority, lower goes first, and among equals who came first: what its tenant had been served, in microseconds
    /// of engine time by weight, when the request was bound. Who asks for more than its share is behind those who do not. Counted since the
    /// gateway began: a worker compares the differences of each gateway's turns, not turns of several.
    #[prost(sint64, tag = "11")]
    pub turn: i64,
    /// Others that do the prefill when `prefill_at` is lost on the way: asked in turn, each for what is still missing.
    #[prost(string, repeated, tag = "12")]
    pub prefill_next: Vec<String>,
    /// They are asked while more tokens than this are missing; the rest is computed here.
    #[prost(uint32, tag = "13")]
    pub prefill_next_tokens: u32,
    /// Requests that wait at the gateway beside this one. A worker divides what it would start among gateways by it.
    #[prost(uint32, tag = "14")]
    pub waiting: u32,
}

/// One choice of a request, and what it has emitted already.
#[derive(Clone, PartialEq, Message)]
pub struct ChoiceStart {
    /// Index of the choice, from 0.
    #[prost(uint32, tag = "1")]
    pub index: u32,
    /// Tokens emitted in earlier attempts; they count as output (penalties, max_tokens, positions of the randoms).
    #[prost(uint32, repeated, tag = "2")]
    pub emitted: Vec<u32>,
}

/// Sampling parameters; bounds are checked at the edge and again by the engine.
#[derive(Clone, PartialEq, Message)]
pub struct Sampling {
    /// 0 is greedy.
    #[prost(float, tag = "1")]
    pub temperature: f32,
    /// 0 keeps all.
    #[prost(uint32, tag = "2")]
    pub top_k: u32,
    /// 1 keeps all.
    #[prost(float, tag = "3")]
    pub top_p: f32,
    /// 0 keeps all.
    #[prost(float, tag = "4")]
    pub min_p: f32,
    /// Subtracted once from every token that occurs in the output.
    #[prost(float, tag = "5")]
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the output.
    #[prost(float, tag = "6")]
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    #[prost(float, tag = "7")]
    pub repetition_penalty: f32,
    /// Added to single logits before anything else.
    #[prost(message, repeated, tag = "8")]
    pub logit_bias: Vec<LogitBias>,
    /// Key of the counter-based randoms, always set (drawn by the gateway when the client gives none).
    #[prost(uint64, tag = "9")]
    pub seed: u64,
    /// Output tokens at most, over all attempts.
    #[prost(uint32, tag = "10")]
    pub max_tokens: u32,
    /// End tokens are masked before this many output tokens.
    #[prost(uint32, tag = "11")]
    pub min_tokens: u32,
    /// Tokens that end the choice and count as output: the model's end tokens (unless ignored) and the client's.
    #[prost(uint32, repeated, tag = "12")]
    pub stop_tokens: Vec<u32>,
    /// Return the log-probability of each emitted token and of this many best; -1 is off, 0 only the emitted one.
    #[prost(int32, tag = "13")]
    pub logprobs: i32,
    /// The same for every prompt token (bypasses cache reads); -1 is off.
    #[prost(int32, tag = "14")]
    pub prompt_logprobs: i32,
    /// If not empty, only these tokens can be drawn.
    #[prost(uint32, repeated, tag = "15")]
    pub allowed_tokens: Vec<u32>,
    /// Sequences of tokens that the output must not hold: the last token of one cannot be drawn behind the others.
    #[prost(message, repeated, tag = "16")]
    pub bad_words: Vec<BadWord>,
    /// If not empty, and `logprobs` is not −1: beside each generated token come the log-probabilities of these, not of the best.
    #[prost(uint32, repeated, tag = "17")]
    pub logprob_tokens: Vec<u32>,
}

/// A sequence of tokens that is forbidden, not empty.
#[derive(Clone, PartialEq, Message)]
pub struct BadWord {
    /// Token ids.
    #[prost(uint32, repeated, tag = "1")]
    pub tokens: Vec<u32>,
}

/// One entry of logit_bias.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct LogitBias {
    /// Token id.
    #[prost(uint32, tag = "1")]
    pub token: u32,
    /// Added to its logit.
    #[prost(float, tag = "2")]
    pub bias: f32,
}

/// Stop a request.
#[derive(Clone, PartialEq, Message)]
pub struct Cancel {
    /// The request.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Single choices; empty: all.
    #[prost(uint32, repeated, tag = "2")]
    pub choices: Vec<u32>,
}

/// More tokens are welcome.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Window {
    /// The request.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// The choice.
    #[prost(uint32, tag = "2")]
    pub choice: u32,
    /// Tokens added to what the choice may emit.
    #[prost(uint32, tag = "3")]
    pub tokens: u32,
}

/// Take nothing new; exit when empty if asked. Ignored while another gateway is connected.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Drain {
    /// Exit once the last sequence ended.
    #[prost(bool, tag = "1")]
    pub exit: bool,
}

/// One engine step: everything that happened, in one order.
#[derive(Clone, PartialEq, Message)]
pub struct Step {
    /// Steps since the epoch began.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// What single choices got.
    #[prost(message, repeated, tag = "2")]
    pub outputs: Vec<Output>,
    /// The engine after the step.
    #[prost(message, optional, tag = "3")]
    pub state: Option<EngineState>,
    /// Changes of the prefix cache.
    #[prost(message, repeated, tag = "4")]
    pub kv: Vec<KvEvent>,
    /// [`Generate`] frames of this session that the engine had taken when `state` was made; the credits in `state` count them.
    #[prost(uint64, tag = "5")]
    pub accepted: u64,
    /// What was computed and how long that took; `None` in a heartbeat.
    #[prost(message, optional, tag = "6")]
    pub batch: Option<Batch>,
}

/// The batch of one step and the time it took: what the gateway fits a worker's speeds from.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Batch {
    /// Rows of prefill.
    #[prost(uint32, tag = "1")]
    pub prefill_tokens: u32,
    /// Sum over the rows of prefill of the tokens that each attends to.
    #[prost(double, tag = "2")]
    pub prefill_context: f64,
    /// Rows of decode.
    #[prost(uint32, tag = "3")]
    pub decodes: u32,
    /// Sum over the rows of decode of the tokens that each attends to.
    #[prost(uint64, tag = "4")]
    pub decode_context: u64,
    /// Seconds of the step.
    #[prost(double, tag = "5")]
    pub seconds: f64,
}

/// What one choice got in one step.
#[derive(Clone, PartialEq, Message)]
pub struct Output {
    /// The request.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Its attempt.
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
    /// The choice.
    #[prost(uint32, tag = "3")]
    pub choice: u32,
    /// New tokens; the first is output number `at`.
    #[prost(message, repeated, tag = "4")]
    pub tokens: Vec<Token>,
    /// Index of the first token of `tokens` in the output: emitted once, whatever is sent twice.
    #[prost(uint32, tag = "5")]
    pub at: u32,
    /// Set with the last tokens of the choice.
    #[prost(message, optional, tag = "6")]
    pub finish: Option<Finish>,
    /// Set with the first output of the choice: prompt tokens read from the prefix cache.
    #[prost(uint32, optional, tag = "7")]
    pub cached_tokens: Option<u32>,
    /// Log-probabilities of prompt tokens, in order, when asked for; sent with the first choice's first output.
    #[prost(message, repeated, tag = "8")]
    pub prompt_logprobs: Vec<TokenLogprobs>,
}

/// One emitted token.
#[derive(Clone, PartialEq, Message)]
pub struct Token {
    /// Token id.
    #[prost(uint32, tag = "1")]
    pub id: u32,
    /// When asked for.
    #[prost(message, optional, tag = "2")]
    pub logprobs: Option<TokenLogprobs>,
}

/// Raw log-probabilities (before temperature and penalties) at one position.
#[derive(Clone, PartialEq, Message)]
pub struct TokenLogprobs {
    /// Of the token itself. The first prompt token has none: NaN.
    #[prost(float, tag = "1")]
    pub logprob: f32,
    /// Best tokens, descending.
    #[prost(uint32, repeated, tag = "2")]
    pub top_tokens: Vec<u32>,
    /// Their log-probabilities.
    #[prost(float, repeated, tag = "3")]
    pub top_logprobs: Vec<f32>,
    /// Rank of the token itself, from 1.
    #[prost(uint32, tag = "4")]
    pub rank: u32,
}

/// Why a choice ended.
#[derive(Clone, PartialEq, Message)]
pub struct Finish {
    /// The reason.
    #[prost(enumeration = "FinishReason", tag = "1")]
    pub reason: i32,
    /// The stop token, for [`FinishReason::Stop`].
    #[prost(uint32, optional, tag = "2")]
    pub stop_token: Option<u32>,
    /// An [`crate::ErrorKind`] number, for [`FinishReason::Failed`].
    #[prost(int32, tag = "3")]
    pub error_kind: i32,
    /// For client and log, for [`FinishReason::Failed`].
    #[prost(string, tag = "4")]
    pub message: String,
}

/// Reasons of [`Finish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum FinishReason {
    /// A stop token.
    Stop = 0,
    /// max_tokens, or the end of the context.
    Length = 1,
    /// Cancelled by the gateway.
    Cancelled = 2,
    /// Refused or failed; see the kind.
    Failed = 3,
}

/// Load and capacity, pushed with every step.
#[derive(Clone, PartialEq, Message)]
pub struct EngineState {
    /// Sequences waiting for their first step.
    #[prost(uint32, tag = "1")]
    pub waiting: u32,
    /// Sequences in prefill or decode.
    #[prost(uint32, tag = "2")]
    pub running: u32,
    /// Prompt tokens not computed yet, waiting and running.
    #[prost(uint64, tag = "3")]
    pub prefill_tokens_pending: u64,
    /// The same in seconds at the measured speed.
    #[prost(double, tag = "4")]
    pub queue_seconds: f64,
    /// Duration of the last step with work.
    #[prost(double, tag = "5")]
    pub step_seconds: f64,
    /// Blocks in all.
    #[prost(uint32, tag = "6")]
    pub blocks_total: u32,
    /// Blocks free or evictable now.
    #[prost(uint32, tag = "7")]
    pub blocks_free: u32,
    /// Blocks held only by the prefix cache.
    #[prost(uint32, tag = "8")]
    pub blocks_cached: u32,
    /// Sequences the worker would start at its next step.
    #[prost(uint32, tag = "9")]
    pub credits: u32,
    /// Prompt tokens looked up since the epoch began.
    #[prost(uint64, tag = "10")]
    pub prompt_tokens: u64,
    /// Of these, read from the prefix cache.
    #[prost(uint64, tag = "11")]
    pub cached_tokens: u64,
    /// Output tokens since the epoch began.
    #[prost(uint64, tag = "12")]
    pub output_tokens: u64,
    /// Preemptions since the epoch began.
    #[prost(uint64, tag = "13")]
    pub preemptions: u64,
    /// Draining: takes nothing new.
    #[prost(bool, tag = "14")]
    pub draining: bool,
    /// Prefill speed as measured, tokens per second; 0 until known.
    #[prost(double, tag = "15")]
    pub prefill_tokens_per_second: f64,
    /// Age of the step in progress when the frame was written, in seconds; 0 between steps. Tells a hung engine from an idle one.
    #[prost(double, tag = "16")]
    pub step_age_seconds: f64,
    /// Of `running`, those that wait for their reader: they take no slot from others.
    #[prost(uint32, tag = "17")]
    pub stalled: u32,
    /// Sum over `prefill_tokens_pending` of the tokens that each will attend to.
    #[prost(double, tag = "18")]
    pub prefill_context_pending: f64,
    /// Tokens of the running sequences, stalled ones left out: what a step attends to once all of them decode.
    #[prost(uint64, tag = "19")]
    pub context_tokens: u64,
    /// What kind of work it does.
    #[prost(enumeration = "Role", tag = "20")]
    pub role: i32,
    /// Tiers below the device, fastest first.
    #[prost(message, repeated, tag = "21")]
    pub tiers: Vec<TierState>,
    /// KV that came from and went to other workers.
    #[prost(message, optional, tag = "22")]
    pub transfers: Option<TransferState>,
    /// Rows of prefill that the step after the next has left; 0 where it is not said.
    #[prost(uint32, tag = "23")]
    pub prefill_rows_free: u32,
    /// Blocks that the waiting sequences will take, beside those that are cached: they are spoken for, though still free.
    #[prost(uint32, tag = "24")]
    pub blocks_wanted: u32,
    /// Blocks that were loaded for requests before those came.
    #[prost(message, optional, tag = "25")]
    pub prefetches: Option<PrefetchState>,
}

/// Blocks that a [`Prefetch`] brought, sums since the epoch began.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct PrefetchState {
    /// Of these, found there by a request.
    #[prost(uint64, tag = "1")]
    pub used: u64,
    /// Of these, not asked for by any request for a while.
    #[prost(uint64, tag = "2")]
    pub unused: u64,
}

/// One tier of one worker.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct TierState {
    /// Which.
    #[prost(enumeration = "Tier", tag = "1")]
    pub tier: i32,
    /// Blocks it may hold.
    #[prost(uint64, tag = "2")]
    pub blocks_total: u64,
    /// Blocks it holds.
    #[prost(uint64, tag = "3")]
    pub blocks_used: u64,
    /// Seconds to bring one block to the device, as measured; 0 until known.
    #[prost(double, tag = "4")]
    pub load_seconds_per_block: f64,
    /// Blocks loaded since the epoch began.
    #[prost(uint64, tag = "5")]
    pub loaded: u64,
    /// Blocks stored since the epoch began.
    #[prost(uint64, tag = "6")]
    pub stored: u64,
    /// Blocks that were not what their name says, since the epoch began. None of them was used.
    #[prost(uint64, tag = "7")]
    pub corrupt: u64,
    /// Blocks that should have been stored and were not: the store was busy, full or broken. Since the epoch began.
    #[prost(uint64, tag = "8")]
    pub dropped: u64,
    /// Seconds spent loading, summed over blocks, since the epoch began.
    #[prost(double, tag = "9")]
    pub load_seconds: f64,
    /// Requests that waited for blocks which it did not bring in time, and were computed, since the epoch began.
    #[prost(uint64, tag = "10")]
    pub late: u64,
}

/// KV moved between workers, sums since the epoch began.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct TransferState {
    /// Bytes received.
    #[prost(uint64, tag = "1")]
    pub bytes_in: u64,
    /// Bytes sent.
    #[prost(uint64, tag = "2")]
    pub bytes_out: u64,
    /// Seconds from the first to the last byte of what was received, summed over transfers.
    #[prost(double, tag = "3")]
    pub seconds: f64,
    /// Of these, seconds in which the sender still computed.
    #[prost(double, tag = "4")]
    pub hidden_seconds: f64,
    /// Transfers that ended as they should.
    #[prost(uint64, tag = "5")]
    pub completed: u64,
    /// Transfers that did not; what was missing was computed.
    #[prost(uint64, tag = "6")]
    pub failed: u64,
    /// Transfers that the receiver ended: nobody waited for them any more, or their pages were needed.
    #[prost(uint64, tag = "7")]
    pub cancelled: u64,
    /// Blocks received that could be used.
    #[prost(uint64, tag = "8")]
    pub blocks_in: u64,
    /// First tokens that other workers drew for requests here.
    #[prost(uint64, tag = "9")]
    pub first_tokens: u64,
    /// Of `seconds`, those of blocks that the sender computed for the purpose; only these can be hidden.
    #[prost(double, tag = "10")]
    pub prefill_seconds: f64,
    /// Of `bytes_in`, those that came when the sender had nothing left to compute: for these alone it is known how long moving them took.
    #[prost(uint64, tag = "11")]
    pub moved_bytes: u64,
    /// How long these took.
    #[prost(double, tag = "12")]
    pub moved_seconds: f64,
    /// Of `bytes_in`, those that came through memory that both workers map.
    #[prost(uint64, tag = "13")]
    pub memory_bytes: u64,
    /// Of `bytes_in`, those that came on the connections of a transfer beside its first.
    #[prost(uint64, tag = "14")]
    pub stream_bytes: u64,
    /// Of `failed`, those after which another prefill worker was asked for what was missing.
    #[prost(uint64, tag = "15")]
    pub asked_next: u64,
}

/// A change of the prefix cache.
#[derive(Clone, PartialEq, Message)]
pub struct KvEvent {
    /// Blocks that can be read from now on, 16 bytes each, a chain in order.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub stored: Vec<Vec<u8>>,
    /// Blocks that are gone.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub removed: Vec<Vec<u8>>,
    /// Everything in this tier is gone (before `stored` is applied).
    #[prost(bool, tag = "3")]
    pub cleared: bool,
    /// Where the blocks are. A block may be in several tiers at once; each says so for itself.
    #[prost(enumeration = "Tier", tag = "4")]
    pub tier: i32,
    /// The block before the first of `stored`, 16 bytes; empty when there is none or it is not known. Only helps the router to
    /// keep one chain together.
    #[prost(bytes = "vec", tag = "5")]
    pub parent: Vec<u8>,
}

/// Places that hold blocks, nearest first.
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
    /// As it is written: `device`, `host`, `disk`, `remote`.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Disk => "disk",
            Tier::Remote => "remote",
        }
    }
}
