//! Table of the metrics whose values are kept elsewhere and read at each scrape.

use penstock_proto::frames::Tier;

/// Metric that is read at the moment of a scrape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gauge {
    /// Requests in flight: accepted by the gateway and not ended.
    InFlight,
    /// Client connections that are open, idle ones included.
    Connections,
    /// People who are signed in at the web console.
    ConsoleSessions,
    /// Bytes of the memory budget that request bodies hold.
    BodyBytes,
    /// Bytes of the memory budget that answers hold, whole or in part.
    AnswerBytes,
    /// Lines of the access log that were lost.
    AccessLinesLost,
    /// Spans of traces that the collector accepted.
    SpansSent,
    /// Spans dropped because the collector could not be reached, or not fast enough.
    SpansLost,
    /// Requests that wait in the gateway for a worker.
    QueueWaiting,
    /// Sequences that wait in the workers for their prefill.
    SequencesWaiting,
    /// Sequences in prefill or decode in the model's workers.
    SequencesRunning,
    /// KV blocks of the model's workers in all, free and in use.
    BlocksTotal,
    /// KV blocks that are free or evictable.
    BlocksFree,
    /// KV blocks held only by the prefix cache.
    BlocksCached,
    /// Prompt tokens looked up in the prefix cache.
    PrefixTokens,
    /// Prompt tokens found in the prefix cache.
    PrefixTokensHit,
    /// Output tokens that the engines have generated.
    OutputTokens,
    /// Sequences preempted because KV blocks ran out.
    Preemptions,
    /// Workers of a pool that are ready and take requests.
    WorkersReady,
    /// Ready workers that have an adapter.
    AdapterWorkers,
    /// Worker processes started since the gateway began.
    WorkerStarts,
    /// Ready workers that ended without being drained.
    WorkerDeaths,
    /// Starts of workers whose weights lie in memory that workers share, by who packed them.
    WorkerLoads(&'static str),
    /// Bytes of packed weights in that memory.
    SharedWeightsBytes,
    /// Copies of packed weights looked for in the cache of files, by outcome.
    WeightsCacheReads,
    /// Bytes of the cache of packed weights.
    WeightsCacheBytes,
    /// Memory of a worker's GPU that is in use, by all processes.
    GpuMemoryUsed,
    /// Memory of a worker's GPU.
    GpuMemory,
    /// Share of time in which a kernel ran on a worker's GPU.
    GpuUtilization,
    /// Share of time in which the memory of a worker's GPU was read or written.
    GpuMemoryUtilization,
    /// Power that a worker's GPU draws.
    GpuPower,
    /// Limit of that power.
    GpuPowerLimit,
    /// Clock of a worker's GPU: of its multiprocessors or of its memory.
    GpuClock(&'static str),
    /// Temperature of a worker's GPU.
    GpuTemperature,
    /// Reason for low clocks of a worker's GPU: 1 if it is in force.
    GpuThrottled(&'static str),
    /// Errors of a GPU's memory that could not be corrected.
    GpuEccErrors,
    /// Workers in the prefill role, which compute prompts for others.
    WorkersPrefill,
    /// Requests whose prompt another worker was asked to compute (disaggregated prefill).
    PrefilledApart,
    /// Blocks loaded from tiers for requests that waited, by outcome.
    KvPrefetched(&'static str),
    /// Transfers of KV between workers, by outcome.
    KvTransfers(&'static str),
    /// KV blocks that transfers brought and that could be used.
    KvTransferBlocks,
    /// Bytes of KV that workers received from other workers.
    KvTransferBytes,
    /// Seconds from the first to the last page of a KV transfer, summed over transfers.
    KvTransferSeconds,
    /// Seconds of transfers whose blocks were computed for the transfer.
    KvTransferPrefillSeconds,
    /// Seconds of transfers in which the sending worker still computed.
    KvTransferHiddenSeconds,
    /// Transferred bytes that came through memory mapped by both workers.
    KvTransferMemoryBytes,
    /// Transferred bytes that came on connections beside the first of a transfer.
    KvTransferStreamBytes,
    /// Transfers after which another prefill worker was asked for the rest.
    KvTransfersNext,
    /// Current troubles that workers report, by kind.
    WorkerTroubles(&'static str),
    /// First tokens sampled by the worker that computed the prompt for another.
    KvFirstTokens,
    /// Reasonings of models that were closed because their token budget was spent.
    ReasoningsClosed,
    /// Draft tokens that engines computed.
    DraftTokens,
    /// Draft tokens that saved a step.
    AcceptedDraftTokens,
    /// Open sequences whose output follows a grammar.
    GuidedSequences,
    /// Output tokens that a grammar left no choice about and that took no forward pass of their own.
    JumpedTokens,
    /// Token masks computed by the engines.
    GrammarMasks,
    /// Seconds spent on token masks.
    GrammarMaskSeconds,
    /// Longest token mask of a present life of a worker, in seconds.
    GrammarMaskSecondsMax,
    /// Grammars compiled by the workers, refused ones included.
    GrammarsCompiled,
    /// Seconds that workers spent on compiling grammars.
    GrammarCompileSeconds,
    /// Choices ended because the mask of a token would have been too much work.
    GuidedTooComplex,
    /// Changes of a worker's role that followed the load.
    RoleFlips,
    /// Wanted number of workers, where the number follows the load.
    WorkersWanted,
    /// Load of the serving workers as a share of capacity.
    WorkersLoad,
    /// Workers started or stopped because of the load, by action.
    ReplicaChanges(&'static str),
    /// Failed starts and stops of workers that the load called for.
    ReplicaFailures,
    /// Requests that were continued on another worker after theirs was lost.
    Resumes,
    /// Number of decisions that the router has made.
    RouterDecisions,
    /// Seconds of decisions of the router, summed.
    RouterDecisionSeconds,
    /// First tokens after a binding of a request to a worker.
    RouterFirstTokens,
    /// Seconds from the binding to the first token, summed.
    RouterFirstTokenSeconds,
    /// Predicted seconds from the binding to the first token, summed.
    RouterFirstTokenPredicted,
    /// Absolute errors of the router's TTFT predictions in seconds, summed over requests.
    RouterFirstTokenError,
    /// Requests that were resumed on another worker and not bit-exact.
    ResumesInexact,
    /// Requests moved to another worker while running, by reason.
    Moves(&'static str),
    /// Failed moves: requests that stayed at their worker, by reason.
    MovesFailed(&'static str),
    /// KV blocks fetched for requests that moved to another worker.
    MovedBlocks,
    /// Breaker of a target: 0 closed, 1 probing, 2 last choice, 3 open.
    TargetState,
    /// Requests in flight at one target of a model.
    TargetInFlight,
    /// Prompt blocks that targets are believed to have cached, by the requests sent to them.
    KvBlocksApproximate,
    /// KV blocks that a provider publishes as cached.
    KvBlocksEvents,
    /// Whether the connection for a provider's KV cache events is up: 1 or 0.
    KvConnected,
    /// Batches of a provider's KV cache events that were applied.
    KvBatches,
    /// Gaps in the sequence of KV event batches.
    KvGaps,
    /// KV events that could not be read, or blocks that could not be placed.
    KvSkipped,
    /// Transactions that the store has committed.
    StoreCommits,
    /// Changes that the store's transactions have written.
    StoreWrites,
    /// Seconds of the store's transactions, summed.
    StoreCommitSeconds,
    /// Operations of the store that failed.
    StoreErrors,
    /// Responses that clients received and the store could not keep.
    ResponsesUnsaved,
    /// Bytes of all stored responses together, as last counted.
    ResponseBytes,
    /// Responses being answered in the background.
    ResponsesRunning,
    /// Batches that run in this process.
    BatchesRunning,
    /// Lines of batches that are being answered.
    BatchLinesRunning,
    /// Counters of limits that are held in memory.
    LimitCounters,
    /// Requests in flight that hold reservations of limits.
    LimitHolds,
    /// Version number of the config in force.
    ConfigVersion,
    /// Unix time at which the current config was applied.
    ConfigSince,
    /// Whether the last reload of the config was accepted: 1 or 0.
    ConfigLastReloadOk,
    /// Unix time of the last reload, accepted or refused.
    ConfigLastReload,
    /// Config keys whose new value waits for a restart.
    ConfigPending,
    /// Reloads of the config, by outcome.
    ConfigReloads,
    /// Values of metrics that plugins count themselves, by plugin and name.
    PluginValue,
    /// Issued keys in the directory that are not revoked.
    IssuedKeys,
    /// Age of the directory of issued keys in seconds.
    DirectoryAge,
    /// Age of an issuer's key set in seconds.
    KeySetAge,
    /// Verified JSON Web Tokens in the cache.
    TokensCached,
    /// Entries that wait for a write to the ledger.
    LedgerWaiting,
    /// Entries lost because the ledger could not take them in time.
    LedgerLost,
    /// Ledger entries that a dead process left open, settled with the reserved amount.
    LedgerAssumed,
    /// Whether a store answers: 1 or 0, by store.
    StoreUp,
    /// Times that shared counters were restored from the ledger.
    CountersRestored,
    /// Requests that stopped waiting for slow shared counters.
    CountersSlow,
    /// KV blocks in a tier below the devices.
    TierBlocks(Tier),
    /// Capacity of a tier in KV blocks.
    TierBlocksTotal(Tier),
    /// KV blocks loaded from a tier.
    TierLoads(Tier),
    /// Seconds of loads from a tier, summed over blocks.
    TierLoadSeconds(Tier),
    /// KV blocks stored in a tier.
    TierStores(Tier),
    /// KV blocks that a tier did not take.
    TierDrops(Tier),
    /// KV blocks discarded because their content did not match their hash.
    TierCorrupt(Tier),
    /// Requests that waited for a tier in vain and were computed.
    TierLate(Tier),
}

impl Gauge {
    /// Second label of the gauge, with its value.
    pub(super) fn detail(self) -> Option<(&'static str, &'static str)> {
        match self {
            Gauge::TierBlocks(tier)
            | Gauge::TierBlocksTotal(tier)
            | Gauge::TierLoads(tier)
            | Gauge::TierLoadSeconds(tier)
            | Gauge::TierStores(tier)
            | Gauge::TierDrops(tier)
            | Gauge::TierCorrupt(tier)
            | Gauge::TierLate(tier) => Some(("tier", tier.name())),
            Gauge::Moves(reason) | Gauge::MovesFailed(reason) => Some(("reason", reason)),
            Gauge::WorkerTroubles(kind) => Some(("kind", kind)),
            Gauge::WorkerLoads(how) => Some(("how", how)),
            Gauge::GpuClock(clock) => Some(("clock", clock)),
            Gauge::GpuThrottled(reason) => Some(("reason", reason)),
            Gauge::ReplicaChanges(action) => Some(("action", action)),
            Gauge::KvTransfers(outcome) | Gauge::KvPrefetched(outcome) => Some(("outcome", outcome)),
            _ => None,
        }
    }

    /// Name of the gauge's first label.
    pub(super) fn label(self) -> &'static str {
        match self {
            Gauge::TargetState | Gauge::TargetInFlight => "target",
            Gauge::KvBlocksEvents | Gauge::KvConnected | Gauge::KvBatches | Gauge::KvGaps | Gauge::KvSkipped => {
                "provider"
            }
            Gauge::ConfigReloads | Gauge::WeightsCacheReads => "outcome",
            Gauge::KeySetAge => "issuer",
            Gauge::PluginValue => "name",
            Gauge::StoreUp => "store",
            Gauge::GpuMemoryUsed
            | Gauge::GpuMemory
            | Gauge::GpuUtilization
            | Gauge::GpuMemoryUtilization
            | Gauge::GpuPower
            | Gauge::GpuPowerLimit
            | Gauge::GpuClock(_)
            | Gauge::GpuTemperature
            | Gauge::GpuThrottled(_)
            | Gauge::GpuEccErrors => "worker",
            _ => "model",
        }
    }

    /// Metric's name, its Prometheus type and its HELP text.
    pub(super) fn about(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Gauge::InFlight => ("penstock_requests_in_flight", "gauge", "Requests in flight in the gateway."),
            Gauge::Connections => ("penstock_connections", "gauge", "Open client connections."),
            Gauge::ConsoleSessions => {
                ("penstock_console_sessions", "gauge", "Sessions of people who are signed in at the web console.")
            }
            Gauge::BodyBytes => ("penstock_body_bytes", "gauge", "Bytes of memory held by request bodies."),
            Gauge::AnswerBytes => {
                ("penstock_answer_bytes", "gauge", "Bytes of memory held by answers, whole or in part.")
            }
            Gauge::AccessLinesLost => (
                "penstock_access_log_lines_lost_total",
                "counter",
                "Lines lost because the access log, or the file of a capture plugin, could not be written.",
            ),
            Gauge::SpansSent => ("penstock_spans_sent_total", "counter", "Spans that the collector took."),
            Gauge::SpansLost => (
                "penstock_spans_lost_total",
                "counter",
                "Spans dropped because the collector could not be reached, or not fast enough.",
            ),
            Gauge::QueueWaiting => {
                ("penstock_queue_waiting", "gauge", "Requests that wait in the gateway for a worker.")
            }
            Gauge::SequencesWaiting => {
                ("penstock_sequences_waiting", "gauge", "Sequences that wait in workers for their prefill.")
            }
            Gauge::SequencesRunning => ("penstock_sequences_running", "gauge", "Sequences in prefill or decode."),
            Gauge::BlocksTotal => ("penstock_kv_blocks", "gauge", "KV blocks of the workers in all, free and in use."),
            Gauge::BlocksFree => ("penstock_kv_blocks_free", "gauge", "KV blocks that are free or can be evicted."),
            Gauge::BlocksCached => ("penstock_kv_blocks_cached", "gauge", "KV blocks held only by the prefix cache."),
            Gauge::PrefixTokens => {
                ("penstock_prefix_tokens_total", "counter", "Prompt tokens looked up in the prefix cache.")
            }
            Gauge::PrefixTokensHit => {
                ("penstock_prefix_tokens_hit_total", "counter", "Prompt tokens read from the prefix cache.")
            }
            Gauge::OutputTokens => ("penstock_output_tokens_total", "counter", "Tokens generated by the engines."),
            Gauge::TierBlocks(_) => ("penstock_kv_tier_blocks", "gauge", "KV blocks in a tier below the devices."),
            Gauge::TierBlocksTotal(_) => ("penstock_kv_tier_blocks_max", "gauge", "Capacity of a KV tier, in blocks."),
            Gauge::TierLoads(_) => ("penstock_kv_tier_loads_total", "counter", "KV blocks loaded from a KV tier."),
            Gauge::TierLoadSeconds(_) => (
                "penstock_kv_tier_load_seconds_total",
                "counter",
                "Seconds that loading KV blocks from a KV tier took, summed over blocks.",
            ),
            Gauge::TierStores(_) => ("penstock_kv_tier_stores_total", "counter", "KV blocks stored in a KV tier."),
            Gauge::TierDrops(_) => (
                "penstock_kv_tier_drops_total",
                "counter",
                "KV blocks not stored because a KV tier was busy, full or broken.",
            ),
            Gauge::TierCorrupt(_) => (
                "penstock_kv_tier_corrupt_total",
                "counter",
                "KV blocks discarded because of a wrong checksum or another block's name.",
            ),
            Gauge::TierLate(_) => (
                "penstock_kv_tier_late_total",
                "counter",
                "Requests whose KV blocks a KV tier did not load in time, and whose prefill was computed instead.",
            ),
            Gauge::Preemptions => {
                ("penstock_preemptions_total", "counter", "Sequences preempted because KV blocks ran out.")
            }
            Gauge::WorkersReady => ("penstock_workers_ready", "gauge", "Workers that take requests."),
            Gauge::AdapterWorkers => {
                ("penstock_adapter_workers", "gauge", "Ready workers that have loaded an adapter.")
            }
            Gauge::WorkerStarts => ("penstock_worker_starts_total", "counter", "Worker processes started."),
            Gauge::WorkerDeaths => {
                ("penstock_worker_deaths_total", "counter", "Ready workers that ended without being drained.")
            }
            Gauge::WorkerLoads(_) => (
                "penstock_worker_shared_loads_total",
                "counter",
                "Starts of workers whose weights lie in memory that workers share: packed by the worker, or found packed.",
            ),
            Gauge::SharedWeightsBytes => (
                "penstock_shared_weights_bytes",
                "gauge",
                "Bytes of packed weights in memory that the workers of a pool share.",
            ),
            Gauge::WeightsCacheReads => (
                "penstock_weights_cache_reads_total",
                "counter",
                "Searches for packed weights in the files of the state folder, by outcome: hit, miss, or bad (a damaged file).",
            ),
            Gauge::WeightsCacheBytes => {
                ("penstock_weights_cache_bytes", "gauge", "Bytes of the files of packed weights in the state folder.")
            }
            Gauge::GpuMemoryUsed => (
                "penstock_worker_gpu_memory_used_bytes",
                "gauge",
                "Memory in use on the GPU of a worker, by all processes, in bytes.",
            ),
            Gauge::GpuMemory => {
                ("penstock_worker_gpu_memory_bytes", "gauge", "Memory of the GPU of a worker, in bytes.")
            }
            Gauge::GpuUtilization => (
                "penstock_worker_gpu_utilization_ratio",
                "gauge",
                "Share of the last second or less in which a kernel ran on the GPU of a worker.",
            ),
            Gauge::GpuMemoryUtilization => (
                "penstock_worker_gpu_memory_utilization_ratio",
                "gauge",
                "Share of the last second or less in which the memory of a worker's GPU was read or written.",
            ),
            Gauge::GpuPower => ("penstock_worker_gpu_power_watts", "gauge", "Power that the GPU of a worker draws."),
            Gauge::GpuPowerLimit => {
                ("penstock_worker_gpu_power_limit_watts", "gauge", "Power that the GPU of a worker may draw.")
            }
            Gauge::GpuClock(_) => (
                "penstock_worker_gpu_clock_hertz",
                "gauge",
                "Clock of the GPU of a worker: that of multiprocessors, or of memory.",
            ),
            Gauge::GpuTemperature => {
                ("penstock_worker_gpu_temperature_celsius", "gauge", "Temperature of the GPU of a worker.")
            }
            Gauge::GpuThrottled(_) => (
                "penstock_worker_gpu_throttled",
                "gauge",
                "Reason for low clocks of the GPU of a worker: 1 while in force, otherwise 0.",
            ),
            Gauge::GpuEccErrors => (
                "penstock_worker_gpu_ecc_errors_total",
                "counter",
                "Errors of the memory of a worker's GPU that could not be corrected, since the driver was loaded.",
            ),
            Gauge::WorkersPrefill => ("penstock_workers_prefill", "gauge", "Workers that prefill for the others."),
            Gauge::PrefilledApart => (
                "penstock_prefilled_apart_total",
                "counter",
                "Requests whose prefill another worker was asked to compute.",
            ),
            Gauge::KvPrefetched(_) => (
                "penstock_kv_prefetched_blocks_total",
                "counter",
                "KV blocks loaded from a tier for a request that still waited: used by a request within a minute, or unused.",
            ),
            Gauge::KvTransfers(_) => {
                ("penstock_kv_transfers_total", "counter", "Transfers of KV from one worker to another, by outcome.")
            }
            Gauge::KvTransferBlocks => {
                ("penstock_kv_transfer_blocks_total", "counter", "KV blocks received from another worker and used.")
            }
            Gauge::KvTransferBytes => {
                ("penstock_kv_transfer_bytes_total", "counter", "Bytes of KV received from another worker.")
            }
            Gauge::KvTransferSeconds => (
                "penstock_kv_transfer_seconds_total",
                "counter",
                "Seconds from the first to the last page of a KV transfer, summed over transfers.",
            ),
            Gauge::KvTransferPrefillSeconds => (
                "penstock_kv_transfer_prefill_seconds_total",
                "counter",
                "Seconds of KV transfers with prefill at the sending worker, from the first to the last page.",
            ),
            Gauge::KvTransferHiddenSeconds => (
                "penstock_kv_transfer_hidden_seconds_total",
                "counter",
                "Seconds of KV transfers that overlapped with prefill at the sending worker.",
            ),
            Gauge::KvTransferMemoryBytes => (
                "penstock_kv_transfer_memory_bytes_total",
                "counter",
                "Bytes of KV received through memory that both workers map.",
            ),
            Gauge::KvTransferStreamBytes => (
                "penstock_kv_transfer_stream_bytes_total",
                "counter",
                "Bytes of KV received on the second and further connections of a transfer.",
            ),
            Gauge::WorkerTroubles(_) => (
                "penstock_worker_troubles",
                "gauge",
                "Current troubles that workers report: peers from which KV transfers fail, KV tiers that are off.",
            ),
            Gauge::KvTransfersNext => (
                "penstock_kv_transfers_next_total",
                "counter",
                "KV transfers that broke off and went on at another prefill worker.",
            ),
            Gauge::KvFirstTokens => (
                "penstock_kv_first_tokens_total",
                "counter",
                "First tokens sampled by the prefill worker and sent on to the decode worker.",
            ),
            Gauge::ReasoningsClosed => (
                "penstock_reasonings_closed_total",
                "counter",
                "Reasonings of models that were closed because their token budget was spent.",
            ),
            Gauge::DraftTokens => (
                "penstock_draft_tokens_total",
                "counter",
                "Draft tokens that prompt lookup proposed and the engines computed.",
            ),
            Gauge::AcceptedDraftTokens => (
                "penstock_accepted_draft_tokens_total",
                "counter",
                "Draft tokens that equalled the output, so that a step was saved.",
            ),
            Gauge::GuidedSequences => {
                ("penstock_guided_sequences", "gauge", "Open sequences whose output follows a grammar.")
            }
            Gauge::JumpedTokens => (
                "penstock_jumped_tokens_total",
                "counter",
                "Output tokens that a grammar left no choice about and that took no forward pass of their own.",
            ),
            Gauge::GrammarMasks => ("penstock_grammar_masks_total", "counter", "Token masks computed by the engines."),
            Gauge::GrammarMaskSeconds => {
                ("penstock_grammar_mask_seconds_total", "counter", "Seconds spent on token masks.")
            }
            Gauge::GrammarMaskSecondsMax => (
                "penstock_grammar_mask_seconds_max",
                "gauge",
                "Longest token mask of a present life of a worker, in seconds.",
            ),
            Gauge::GrammarsCompiled => (
                "penstock_grammars_compiled_total",
                "counter",
                "Grammars compiled by the workers, refused ones included.",
            ),
            Gauge::GrammarCompileSeconds => (
                "penstock_grammar_compile_seconds_total",
                "counter",
                "Seconds that workers spent on compiling grammars.",
            ),
            Gauge::GuidedTooComplex => (
                "penstock_guided_too_complex_total",
                "counter",
                "Choices ended because the mask of a token would have been too much work.",
            ),
            Gauge::RoleFlips => {
                ("penstock_role_flips_total", "counter", "Changes of a worker's role that followed the load.")
            }
            Gauge::WorkersWanted => (
                "penstock_workers_wanted",
                "gauge",
                "Number of workers that the load calls for, where the number of workers follows the load.",
            ),
            Gauge::WorkersLoad => (
                "penstock_workers_load_ratio",
                "gauge",
                "Load of the ready workers as a share of their capacity (1 is full).",
            ),
            Gauge::ReplicaChanges(_) => (
                "penstock_replica_changes_total",
                "counter",
                "Workers started or stopped because of the load, by action.",
            ),
            Gauge::ReplicaFailures => (
                "penstock_replica_failures_total",
                "counter",
                "Failed starts and stops of workers because of the load.",
            ),
            Gauge::Resumes => ("penstock_resumes_total", "counter", "Requests continued after a lost worker."),
            Gauge::TargetState => (
                "penstock_target_state",
                "gauge",
                "Health of a target: 0 good, 1 being probed, 2 asked last, 3 circuit breaker open.",
            ),
            Gauge::TargetInFlight => ("penstock_target_in_flight", "gauge", "Requests in flight at a target."),
            Gauge::RouterDecisions => ("penstock_router_decisions_total", "counter", "Decisions of the router."),
            Gauge::RouterDecisionSeconds => {
                ("penstock_router_decision_seconds_total", "counter", "Seconds that decisions of the router took.")
            }
            Gauge::RouterFirstTokens => (
                "penstock_router_first_tokens_total",
                "counter",
                "First tokens of requests that the router assigned to a worker.",
            ),
            Gauge::RouterFirstTokenSeconds => (
                "penstock_router_ttft_seconds_total",
                "counter",
                "Seconds from the assignment to a worker to the first token, summed over requests.",
            ),
            Gauge::RouterFirstTokenPredicted => (
                "penstock_router_ttft_predicted_seconds_total",
                "counter",
                "Predicted seconds from the assignment to a worker to the first token, summed over requests.",
            ),
            Gauge::RouterFirstTokenError => (
                "penstock_router_ttft_error_seconds_total",
                "counter",
                "Absolute error of the predicted seconds to the first token, summed over requests.",
            ),
            Gauge::KvBlocksApproximate => (
                "penstock_kv_index_approximate_blocks",
                "gauge",
                "Prompt blocks in the approximate cache index of a cache_aware model, as learned from requests sent to targets.",
            ),
            Gauge::KvBlocksEvents => (
                "penstock_kv_index_blocks",
                "gauge",
                "Blocks of 32 tokens in the prefix cache of a provider, as the provider publishes.",
            ),
            Gauge::KvConnected => {
                ("penstock_kv_events_connected", "gauge", "1 while the connection to a provider's KV events is up.")
            }
            Gauge::KvBatches => {
                ("penstock_kv_event_batches_total", "counter", "Batches of KV events that were applied.")
            }
            Gauge::KvGaps => ("penstock_kv_event_gaps_total", "counter", "Gaps in the sequence of KV event batches."),
            Gauge::KvSkipped => (
                "penstock_kv_events_skipped_total",
                "counter",
                "KV events that could not be decoded, and blocks whose prefix is not in the index.",
            ),
            Gauge::ResumesInexact => (
                "penstock_resumes_inexact_total",
                "counter",
                "Resumed requests that went on with other numerics, so that output may differ.",
            ),
            Gauge::Moves(_) => {
                ("penstock_moves_total", "counter", "Requests moved to another worker while running, by reason.")
            }
            Gauge::MovesFailed(_) => (
                "penstock_moves_failed_total",
                "counter",
                "Requests that were to be moved and stayed at their worker, by reason.",
            ),
            Gauge::MovedBlocks => {
                ("penstock_moved_blocks_total", "counter", "KV blocks fetched for requests that move.")
            }
            Gauge::StoreCommits => {
                ("penstock_store_commits_total", "counter", "Transactions of the store made durable.")
            }
            Gauge::StoreWrites => {
                ("penstock_store_writes_total", "counter", "Changes written by transactions of the store.")
            }
            Gauge::StoreCommitSeconds => {
                ("penstock_store_commit_seconds_total", "counter", "Seconds that transactions of the store took.")
            }
            Gauge::StoreErrors => ("penstock_store_errors_total", "counter", "Operations of the store that failed."),
            Gauge::ResponseBytes => (
                "penstock_response_bytes",
                "gauge",
                "Bytes of all stored responses, chat completions and conversations, at the last count by the gateway that runs background responses.",
            ),
            Gauge::ResponsesRunning => {
                ("penstock_background_responses", "gauge", "Responses being answered in the background.")
            }
            Gauge::ResponsesUnsaved => (
                "penstock_responses_unsaved_total",
                "counter",
                "Answers that were sent and not kept as asked: responses, chat completions, items of conversations.",
            ),
            Gauge::BatchesRunning => ("penstock_batches_running", "gauge", "Batches that the gateway runs."),
            Gauge::LimitCounters => ("penstock_limit_counters", "gauge", "Counters of limits in memory."),
            Gauge::LedgerWaiting => {
                ("penstock_ledger_waiting", "gauge", "Ledger entries that wait to be written to the store.")
            }
            Gauge::LedgerLost => {
                ("penstock_ledger_lost_total", "counter", "Ledger entries lost because too many waited for the store.")
            }
            Gauge::LedgerAssumed => (
                "penstock_ledger_assumed_total",
                "counter",
                "Ledger entries that a dead process left open, settled with the amount reserved.",
            ),
            Gauge::StoreUp => (
                "penstock_store_up",
                "gauge",
                "1 when the last operation of the store, or of the shared counters, succeeded.",
            ),
            Gauge::CountersRestored => (
                "penstock_limit_counters_restored_total",
                "counter",
                "Times that shared counters had lost their counts and were restored from the ledger.",
            ),
            Gauge::CountersSlow => (
                "penstock_limit_counters_slow_total",
                "counter",
                "Requests that stopped waiting for shared counters that were slow.",
            ),
            Gauge::LimitHolds => ("penstock_limit_holds", "gauge", "Requests that hold a reservation of a limit."),
            Gauge::IssuedKeys => ("penstock_auth_issued_keys", "gauge", "Issued keys that are not revoked."),
            Gauge::DirectoryAge => (
                "penstock_auth_directory_age_seconds",
                "gauge",
                "Seconds since the issued keys in memory were last known to match the store.",
            ),
            Gauge::KeySetAge => (
                "penstock_auth_key_set_age_seconds",
                "gauge",
                "Seconds since the signing keys of an issuer were fetched.",
            ),
            Gauge::TokensCached => ("penstock_auth_tokens_cached", "gauge", "Verified access tokens in the cache."),
            Gauge::BatchLinesRunning => ("penstock_batch_lines_running", "gauge", "Batch lines in flight."),
            Gauge::ConfigVersion => ("penstock_config_version", "gauge", "Version of the config in force."),
            Gauge::ConfigSince => (
                "penstock_config_in_force_since_seconds",
                "gauge",
                "Unix time at which the config in force was applied.",
            ),
            Gauge::ConfigLastReloadOk => (
                "penstock_config_last_reload_ok",
                "gauge",
                "1 when the config file was good at the last reading, 0 when refused or unreadable.",
            ),
            Gauge::ConfigLastReload => (
                "penstock_config_last_reload_seconds",
                "gauge",
                "Unix time of the last reload of the config; 0 before the first.",
            ),
            Gauge::ConfigPending => (
                "penstock_config_keys_pending",
                "gauge",
                "Keys of the config whose new value waits for an upgrade or a restart.",
            ),
            Gauge::ConfigReloads => ("penstock_config_reloads_total", "counter", "Reloads of the config, by outcome."),
            Gauge::PluginValue => {
                ("penstock_plugin_value", "gauge", "Values of metrics that plugins define, by plugin and name.")
            }
        }
    }
}
