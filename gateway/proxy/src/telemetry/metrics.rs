//! Counters, gauges and histograms, rendered as Prometheus text. Every name exists once, in [`Metric`] or [`Gauge`].
//!
//! Labels are bounded: models that are served, routes, status codes. One short lock per request and metric, none where a [`Tally`] is
//! kept; nothing per token.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use penstock_proto::frames::Tier;

/// Label sets per metric before new ones are folded into `other`.
const SERIES_MAX: usize = 512;

/// What is counted or timed here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Whole request, seconds.
    RequestDuration,
    /// Request to first token, seconds.
    TimeToFirstToken,
    /// Per output token after the first, seconds.
    TimePerOutputToken,
    /// Tokens per request by type.
    TokenUsage,
    /// Requests by route and status.
    Requests,
    /// Connections refused for a malformed head, by status.
    MalformedHeads,
    /// Clients that left before their answer ended.
    ClientsGone,
    /// Panics caught in a handler.
    Panics,
    /// Attempts at the targets of a model, by outcome.
    Attempts,
    /// Attempts at a fallback, by reason.
    Fallbacks,
    /// Second attempts that were raced, by who won.
    Hedges,
    /// Retries and hedges that the budget did not allow.
    RetriesDenied,
    /// Copies of requests, by outcome.
    Mirrored,
    /// Requests to a provider, by outcome.
    UpstreamRequests,
    /// Prompt tokens of requests that went where most of them was cached, by how that was known.
    RoutedTokens,
    /// Of these, believed to be cached.
    RoutedTokensPredicted,
    /// Of these, cached by the server's own word.
    RoutedTokensCached,
    /// Lines of batches, by outcome.
    BatchLines,
    /// Requests that were not let in, by reason.
    AuthFailures,
    /// Calls of plugins, by hook and outcome.
    PluginCalls,
    /// Of these, failures, by reason.
    PluginFailures,
    /// Seconds in a plugin, by hook.
    PluginSeconds,
    /// Decisions of a limit.
    LimitDecisions,
    /// What was reserved, by unit.
    LimitReserved,
    /// What was used, by unit.
    LimitSettled,
    /// What was used beyond its reservation, by unit.
    LimitExceeded,
    /// Fetches of issuers' keys, by outcome.
    KeySetFetches,
    /// Longest time without a token while a request changed its worker, by why.
    WorkerGap,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Counter,
    Histogram(&'static [f64]),
}

/// Bounds that OpenTelemetry's GenAI conventions advise for durations.
const SECONDS: &[f64] = &[0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92];
/// ... for time to first token.
const FIRST: &[f64] = &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
/// ... for time per output token.
const EACH: &[f64] = &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
/// A hook takes microseconds, unless it asks somebody.
const HOOK: &[f64] = &[1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0];
/// ... for token counts.
const TOKENS: &[f64] = &[1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0];

impl Metric {
    const ALL: [Metric; 28] = [
        Metric::RequestDuration,
        Metric::TimeToFirstToken,
        Metric::TimePerOutputToken,
        Metric::TokenUsage,
        Metric::Requests,
        Metric::MalformedHeads,
        Metric::ClientsGone,
        Metric::Panics,
        Metric::Attempts,
        Metric::Fallbacks,
        Metric::Hedges,
        Metric::RetriesDenied,
        Metric::Mirrored,
        Metric::UpstreamRequests,
        Metric::RoutedTokens,
        Metric::RoutedTokensPredicted,
        Metric::RoutedTokensCached,
        Metric::BatchLines,
        Metric::AuthFailures,
        Metric::PluginCalls,
        Metric::PluginFailures,
        Metric::PluginSeconds,
        Metric::LimitDecisions,
        Metric::LimitReserved,
        Metric::LimitSettled,
        Metric::LimitExceeded,
        Metric::KeySetFetches,
        Metric::WorkerGap,
    ];

    /// Name, kind and help.
    fn about(self) -> (&'static str, Kind, &'static str) {
        match self {
            Metric::RequestDuration => {
                ("gen_ai_server_request_duration_seconds", Kind::Histogram(SECONDS), "Duration of a request.")
            }
            Metric::TimeToFirstToken => (
                "gen_ai_server_time_to_first_token_seconds",
                Kind::Histogram(FIRST),
                "From the request's head to its first token.",
            ),
            Metric::TimePerOutputToken => (
                "gen_ai_server_time_per_output_token_seconds",
                Kind::Histogram(EACH),
                "Per output token after the first.",
            ),
            Metric::WorkerGap => (
                "penstock_worker_gap_seconds",
                Kind::Histogram(FIRST),
                "Longest time without a token while a request changed its worker.",
            ),
            Metric::TokenUsage => {
                ("gen_ai_client_token_usage", Kind::Histogram(TOKENS), "Tokens of a request, by type.")
            }
            Metric::Requests => ("penstock_requests_total", Kind::Counter, "Requests by route and status."),
            Metric::MalformedHeads => {
                ("penstock_malformed_heads_total", Kind::Counter, "Connections closed for an invalid request head.")
            }
            Metric::ClientsGone => {
                ("penstock_clients_gone_total", Kind::Counter, "Clients that left before their answer ended.")
            }
            Metric::Attempts => {
                ("penstock_attempts_total", Kind::Counter, "Attempts at the targets of a model, by outcome.")
            }
            Metric::Fallbacks => ("penstock_fallbacks_total", Kind::Counter, "Attempts at a fallback, by reason."),
            Metric::Hedges => {
                ("penstock_hedges_total", Kind::Counter, "Second attempts that were raced: won by the second, or lost.")
            }
            Metric::RetriesDenied => {
                ("penstock_retries_denied_total", Kind::Counter, "Retries and hedges beyond the budget of the model.")
            }
            Metric::Mirrored => ("penstock_mirrored_total", Kind::Counter, "Copies of requests, by outcome."),
            Metric::UpstreamRequests => {
                ("penstock_upstream_requests_total", Kind::Counter, "Requests to a provider, by outcome.")
            }
            Metric::Panics => ("penstock_panics_total", Kind::Counter, "Panics caught in a request handler."),
            Metric::LimitDecisions => {
                ("penstock_limit_decisions_total", Kind::Counter, "Requests that a limit allowed or denied.")
            }
            Metric::LimitReserved => {
                ("penstock_limit_reserved_total", Kind::Counter, "Reserved for requests that have ended: tokens, usd.")
            }
            Metric::LimitSettled => {
                ("penstock_limit_settled_total", Kind::Counter, "Used by requests that limits count: tokens, usd.")
            }
            Metric::LimitExceeded => (
                "penstock_limit_exceeded_total",
                Kind::Counter,
                "Used by requests beyond what was reserved for them: tokens, usd.",
            ),
            Metric::RoutedTokens => (
                "penstock_routed_prompt_tokens_total",
                Kind::Counter,
                "Prompt tokens of requests routed by cache, by what is known of the target: events, approximate.",
            ),
            Metric::RoutedTokensPredicted => (
                "penstock_routed_cached_tokens_predicted_total",
                Kind::Counter,
                "Of these, tokens that were believed to be cached where they went.",
            ),
            Metric::RoutedTokensCached => (
                "penstock_routed_cached_tokens_total",
                Kind::Counter,
                "Of these, tokens that the server says it had cached.",
            ),
            Metric::BatchLines => ("penstock_batch_lines_total", Kind::Counter, "Lines of batches, by outcome."),
            Metric::AuthFailures => {
                ("penstock_auth_failures_total", Kind::Counter, "Requests that were not let in, by reason.")
            }
            Metric::PluginCalls => {
                ("penstock_plugin_calls_total", Kind::Counter, "Requests that a plugin was shown, by hook and outcome.")
            }
            Metric::PluginFailures => {
                ("penstock_plugin_failures_total", Kind::Counter, "Failures of a plugin, by hook and reason.")
            }
            Metric::PluginSeconds => {
                ("penstock_plugin_seconds", Kind::Histogram(HOOK), "Time that one request spent in a hook of a plugin.")
            }
            Metric::KeySetFetches => {
                ("penstock_auth_key_set_fetches_total", Kind::Counter, "Fetches of the keys of issuers, by outcome.")
            }
        }
    }
}

/// What is read at the moment of a scrape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gauge {
    /// Requests being served.
    InFlight,
    /// Open client connections.
    Connections,
    /// Bytes held by request bodies.
    BodyBytes,
    /// Lines of the access log that were lost.
    AccessLinesLost,
    /// Spans that the collector took.
    SpansSent,
    /// Spans that were dropped.
    SpansLost,
    /// Requests waiting in the gateway.
    QueueWaiting,
    /// Sequences waiting in workers.
    SequencesWaiting,
    /// Sequences in prefill or decode.
    SequencesRunning,
    /// KV blocks in all.
    BlocksTotal,
    /// KV blocks free or evictable.
    BlocksFree,
    /// KV blocks held only by the prefix cache.
    BlocksCached,
    /// Prompt tokens looked up in the prefix cache.
    PrefixTokens,
    /// Of these, found.
    PrefixTokensHit,
    /// Output tokens of the engines.
    OutputTokens,
    /// Preemptions.
    Preemptions,
    /// Workers that take requests.
    WorkersReady,
    /// Worker processes started.
    WorkerStarts,
    /// Workers found dead.
    WorkerDeaths,
    /// Workers that prefill for others.
    WorkersPrefill,
    /// Roles that followed the load.
    RoleFlips,
    /// Requests continued after a lost worker.
    Resumes,
    /// Times that the router was asked what to do next.
    RouterDecisions,
    /// Seconds that it took.
    RouterDecisionSeconds,
    /// First tokens after a binding.
    RouterFirstTokens,
    /// Seconds from the binding to them.
    RouterFirstTokenSeconds,
    /// The same as predicted.
    RouterFirstTokenPredicted,
    /// Sum of the differences.
    RouterFirstTokenError,
    /// Of these, not bit-exact.
    ResumesInexact,
    /// Requests moved to another worker while they ran.
    Moves,
    /// Requests that were to be moved and stayed.
    MovesFailed,
    /// Blocks fetched for them.
    MovedBlocks,
    /// Breaker of a target: 0 closed, 1 probing, 2 last choice, 3 open.
    TargetState,
    /// Requests at a target.
    TargetInFlight,
    /// Blocks that targets are believed to hold, for lack of a better source.
    KvBlocksApproximate,
    /// Blocks that a provider says it holds.
    KvBlocksEvents,
    /// Whether its events come.
    KvConnected,
    /// Batches of its events.
    KvBatches,
    /// Times that some were missing.
    KvGaps,
    /// What could not be read or placed.
    KvSkipped,
    /// Transactions of the store.
    StoreCommits,
    /// Changes in them.
    StoreWrites,
    /// Seconds that they took.
    StoreCommitSeconds,
    /// Operations of the store that failed.
    StoreErrors,
    /// Responses that their clients have and the store has not.
    ResponsesUnsaved,
    /// Batches that have a task.
    BatchesRunning,
    /// Their lines that are being answered.
    BatchLinesRunning,
    /// Counters of limits.
    LimitCounters,
    /// Requests that hold reservations.
    LimitHolds,
    /// Version of the config in force.
    ConfigVersion,
    /// Since when it is.
    ConfigSince,
    /// Whether the last reload was accepted.
    ConfigLastReloadOk,
    /// When it was.
    ConfigLastReload,
    /// Keys whose new value waits for a restart.
    ConfigPending,
    /// Reloads, by outcome.
    ConfigReloads,
    /// Numbers that plugins count themselves.
    PluginValue,
    /// Issued keys that are not revoked.
    IssuedKeys,
    /// Seconds since issued keys were as the store has them.
    DirectoryAge,
    /// Seconds since an issuer's keys were fetched.
    KeySetAge,
    /// Tokens found good that are remembered.
    TokensCached,
    /// Entries that wait for the ledger.
    LedgerWaiting,
    /// Entries that were lost.
    LedgerLost,
    /// Entries of others that were settled as they were reserved.
    LedgerAssumed,
    /// Whether a store answers.
    StoreUp,
    /// KV blocks in a tier below the devices.
    TierBlocks(Tier),
    /// Room in it.
    TierBlocksTotal(Tier),
    /// KV blocks loaded from it.
    TierLoads(Tier),
    /// Seconds that this took.
    TierLoadSeconds(Tier),
    /// KV blocks stored in it.
    TierStores(Tier),
    /// KV blocks that it did not take.
    TierDrops(Tier),
    /// KV blocks that were not what their name says.
    TierCorrupt(Tier),
}

impl Gauge {
    /// The tier it speaks of, for a second label.
    fn tier(self) -> Option<Tier> {
        match self {
            Gauge::TierBlocks(tier)
            | Gauge::TierBlocksTotal(tier)
            | Gauge::TierLoads(tier)
            | Gauge::TierLoadSeconds(tier)
            | Gauge::TierStores(tier)
            | Gauge::TierDrops(tier)
            | Gauge::TierCorrupt(tier) => Some(tier),
            _ => None,
        }
    }

    /// What its values are told apart by.
    fn label(self) -> &'static str {
        match self {
            Gauge::TargetState | Gauge::TargetInFlight => "target",
            Gauge::KvBlocksEvents | Gauge::KvConnected | Gauge::KvBatches | Gauge::KvGaps | Gauge::KvSkipped => {
                "provider"
            }
            Gauge::ConfigReloads => "outcome",
            Gauge::KeySetAge => "issuer",
            Gauge::PluginValue => "name",
            Gauge::StoreUp => "store",
            _ => "model",
        }
    }

    /// Name, Prometheus type and help.
    fn about(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Gauge::InFlight => ("penstock_requests_in_flight", "gauge", "Requests being served."),
            Gauge::Connections => ("penstock_connections", "gauge", "Open client connections."),
            Gauge::BodyBytes => ("penstock_body_bytes", "gauge", "Memory held by request bodies."),
            Gauge::AccessLinesLost => (
                "penstock_access_log_lines_lost_total",
                "counter",
                "Lines lost because the access log could not be written.",
            ),
            Gauge::SpansSent => ("penstock_spans_sent_total", "counter", "Spans that the collector took."),
            Gauge::SpansLost => (
                "penstock_spans_lost_total",
                "counter",
                "Spans dropped because the collector could not be reached, or not fast enough.",
            ),
            Gauge::QueueWaiting => ("penstock_queue_waiting", "gauge", "Requests waiting in the gateway."),
            Gauge::SequencesWaiting => ("penstock_sequences_waiting", "gauge", "Sequences waiting in workers."),
            Gauge::SequencesRunning => ("penstock_sequences_running", "gauge", "Sequences in prefill or decode."),
            Gauge::BlocksTotal => ("penstock_kv_blocks", "gauge", "KV blocks in all."),
            Gauge::BlocksFree => ("penstock_kv_blocks_free", "gauge", "KV blocks free or evictable."),
            Gauge::BlocksCached => ("penstock_kv_blocks_cached", "gauge", "KV blocks held only by the prefix cache."),
            Gauge::PrefixTokens => {
                ("penstock_prefix_tokens_total", "counter", "Prompt tokens looked up in the prefix cache.")
            }
            Gauge::PrefixTokensHit => {
                ("penstock_prefix_tokens_hit_total", "counter", "Prompt tokens read from the prefix cache.")
            }
            Gauge::OutputTokens => ("penstock_output_tokens_total", "counter", "Tokens generated by the engines."),
            Gauge::TierBlocks(_) => ("penstock_kv_tier_blocks", "gauge", "KV blocks in a tier below the devices."),
            Gauge::TierBlocksTotal(_) => {
                ("penstock_kv_tier_blocks_max", "gauge", "KV blocks that the tier has room for.")
            }
            Gauge::TierLoads(_) => ("penstock_kv_tier_loads_total", "counter", "KV blocks loaded from the tier."),
            Gauge::TierLoadSeconds(_) => {
                ("penstock_kv_tier_load_seconds_total", "counter", "Seconds that loading took, summed over blocks.")
            }
            Gauge::TierStores(_) => ("penstock_kv_tier_stores_total", "counter", "KV blocks stored in the tier."),
            Gauge::TierDrops(_) => (
                "penstock_kv_tier_drops_total",
                "counter",
                "KV blocks not stored because the tier was busy, full or broken.",
            ),
            Gauge::TierCorrupt(_) => (
                "penstock_kv_tier_corrupt_total",
                "counter",
                "KV blocks that were not what their name says; none of them was used.",
            ),
            Gauge::Preemptions => ("penstock_preemptions_total", "counter", "Sequences preempted."),
            Gauge::WorkersReady => ("penstock_workers_ready", "gauge", "Workers that take requests."),
            Gauge::WorkerStarts => ("penstock_worker_starts_total", "counter", "Worker processes started."),
            Gauge::WorkerDeaths => ("penstock_worker_deaths_total", "counter", "Workers found dead."),
            Gauge::WorkersPrefill => ("penstock_workers_prefill", "gauge", "Workers that prefill for the others."),
            Gauge::RoleFlips => {
                ("penstock_role_flips_total", "counter", "Changes of a worker's role that followed the load.")
            }
            Gauge::Resumes => ("penstock_resumes_total", "counter", "Requests continued after a lost worker."),
            Gauge::TargetState => (
                "penstock_target_state",
                "gauge",
                "Health of a target: 0 good, 1 being probed, 2 asked last, 3 left alone.",
            ),
            Gauge::TargetInFlight => ("penstock_target_in_flight", "gauge", "Requests at a target."),
            Gauge::RouterDecisions => {
                ("penstock_router_decisions_total", "counter", "Times that the router was asked what to do next.")
            }
            Gauge::RouterDecisionSeconds => {
                ("penstock_router_decision_seconds_total", "counter", "Seconds that these took.")
            }
            Gauge::RouterFirstTokens => {
                ("penstock_router_first_tokens_total", "counter", "First tokens after a binding to a worker.")
            }
            Gauge::RouterFirstTokenSeconds => {
                ("penstock_router_ttft_seconds_total", "counter", "Seconds from the binding to these.")
            }
            Gauge::RouterFirstTokenPredicted => {
                ("penstock_router_ttft_predicted_seconds_total", "counter", "The same, as predicted at the binding.")
            }
            Gauge::RouterFirstTokenError => {
                ("penstock_router_ttft_error_seconds_total", "counter", "Sum of the differences, without sign.")
            }
            Gauge::KvBlocksApproximate => (
                "penstock_kv_index_approximate_blocks",
                "gauge",
                "Prompt blocks that targets of a cache_aware model are believed to hold, from what they were sent.",
            ),
            Gauge::KvBlocksEvents => (
                "penstock_kv_index_blocks",
                "gauge",
                "Blocks of 32 tokens that a provider says its prefix cache holds.",
            ),
            Gauge::KvConnected => ("penstock_kv_events_connected", "gauge", "1 while a provider's KV events come."),
            Gauge::KvBatches => {
                ("penstock_kv_event_batches_total", "counter", "Batches of KV events that were applied.")
            }
            Gauge::KvGaps => {
                ("penstock_kv_event_gaps_total", "counter", "Times that batches of KV events were missing.")
            }
            Gauge::KvSkipped => (
                "penstock_kv_events_skipped_total",
                "counter",
                "KV events that could not be read, or blocks that could not be placed.",
            ),
            Gauge::ResumesInexact => {
                ("penstock_resumes_inexact_total", "counter", "Continuations that were not bit-exact.")
            }
            Gauge::Moves => ("penstock_moves_total", "counter", "Requests moved to another worker while they ran."),
            Gauge::MovesFailed => {
                ("penstock_moves_failed_total", "counter", "Requests that were to be moved and stayed where they were.")
            }
            Gauge::MovedBlocks => {
                ("penstock_moved_blocks_total", "counter", "KV blocks fetched for requests that move.")
            }
            Gauge::StoreCommits => ("penstock_store_commits_total", "counter", "Transactions made durable."),
            Gauge::StoreWrites => ("penstock_store_writes_total", "counter", "Changes in these transactions."),
            Gauge::StoreCommitSeconds => {
                ("penstock_store_commit_seconds_total", "counter", "Seconds that these transactions took.")
            }
            Gauge::StoreErrors => ("penstock_store_errors_total", "counter", "Operations of the store that failed."),
            Gauge::ResponsesUnsaved => {
                ("penstock_responses_unsaved_total", "counter", "Responses that were answered and could not be kept.")
            }
            Gauge::BatchesRunning => ("penstock_batches_running", "gauge", "Batches being run here."),
            Gauge::LimitCounters => ("penstock_limit_counters", "gauge", "Counters that limits keep."),
            Gauge::LedgerWaiting => ("penstock_ledger_waiting", "gauge", "Entries that wait for the ledger."),
            Gauge::LedgerLost => ("penstock_ledger_lost_total", "counter", "Entries that the ledger could not take."),
            Gauge::LedgerAssumed => (
                "penstock_ledger_assumed_total",
                "counter",
                "Entries that a dead process left open, settled as they were reserved.",
            ),
            Gauge::StoreUp => (
                "penstock_store_up",
                "gauge",
                "1 when the last operation of the store, or of the shared counters, succeeded.",
            ),
            Gauge::LimitHolds => ("penstock_limit_holds", "gauge", "Requests that hold reservations."),
            Gauge::IssuedKeys => ("penstock_auth_issued_keys", "gauge", "Issued keys that are not revoked."),
            Gauge::DirectoryAge => (
                "penstock_auth_directory_age_seconds",
                "gauge",
                "Since the issued keys held in memory were as the store has them.",
            ),
            Gauge::KeySetAge => {
                ("penstock_auth_key_set_age_seconds", "gauge", "Since the keys of an issuer were fetched.")
            }
            Gauge::TokensCached => ("penstock_auth_tokens_cached", "gauge", "Tokens found good that are remembered."),
            Gauge::BatchLinesRunning => ("penstock_batch_lines_running", "gauge", "Lines of batches being answered."),
            Gauge::ConfigVersion => ("penstock_config_version", "gauge", "Version of the config in force."),
            Gauge::ConfigSince => {
                ("penstock_config_in_force_since_seconds", "gauge", "Unix time since which it is in force.")
            }
            Gauge::ConfigLastReloadOk => (
                "penstock_config_last_reload_ok",
                "gauge",
                "1 when the last reload was accepted, 0 when it was refused.",
            ),
            Gauge::ConfigLastReload => {
                ("penstock_config_last_reload_seconds", "gauge", "Unix time of the last reload; 0 before the first.")
            }
            Gauge::ConfigPending => (
                "penstock_config_keys_pending",
                "gauge",
                "Keys whose value in the file waits for an upgrade or a restart.",
            ),
            Gauge::ConfigReloads => ("penstock_config_reloads_total", "counter", "Reloads of the config, by outcome."),
            Gauge::PluginValue => {
                ("penstock_plugin_value", "gauge", "Numbers that plugins count themselves, by plugin and name.")
            }
        }
    }
}

/// Label names with values; values come from bounded sets.
pub type Labels<'a> = &'a [(&'static str, &'a str)];

/// One set of labels of a metric. Each number is exact by itself; a reader may see one a moment before another.
#[derive(Debug, Default)]
struct Series {
    /// Bits of a double.
    sum: AtomicU64,
    count: AtomicU64,
    buckets: Box<[AtomicU64]>,
}

impl Series {
    fn new(bounds: &[f64]) -> Self {
        Self { buckets: bounds.iter().map(|_| AtomicU64::new(0)).collect(), ..Self::default() }
    }

    fn add(&self, bounds: &[f64], value: f64) {
        let add = |sum| Some((f64::from_bits(sum) + value).to_bits());
        let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        if bounds.is_empty() {
            return;
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        if let Some(at) = bounds.iter().position(|bound| value <= *bound) {
            self.buckets[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn sum(&self) -> f64 {
        f64::from_bits(self.sum.load(Ordering::Relaxed))
    }
}

/// One counter or histogram, found once and kept: adding to it looks nothing up and takes no lock.
#[derive(Clone, Debug)]
pub struct Tally {
    series: Arc<Series>,
    bounds: &'static [f64],
}

impl Tally {
    /// Adds one to a counter.
    pub fn count(&self) {
        self.observe(1.0);
    }

    /// Records one value.
    pub fn observe(&self, value: f64) {
        self.series.add(self.bounds, value);
    }
}

thread_local! {
    /// Where a label set is rendered to be looked up: a known one costs no allocation.
    static KEY: RefCell<String> = const { RefCell::new(String::new()) };
}

/// All metrics of the process.
#[derive(Debug, Default)]
pub struct Metrics {
    series: [Mutex<BTreeMap<String, Arc<Series>>>; Metric::ALL.len()],
    in_flight: AtomicI64,
    connections: AtomicI64,
}

impl Metrics {
    /// Adds one to a counter.
    pub fn count(&self, metric: Metric, labels: Labels<'_>) {
        self.observe(metric, labels, 1.0);
    }

    /// Sets a counter that is kept elsewhere.
    pub fn set(&self, metric: Metric, labels: Labels<'_>, value: u64) {
        self.with(metric, labels, |series| series.sum.store((value as f64).to_bits(), Ordering::Relaxed));
    }

    /// Records one value.
    pub fn observe(&self, metric: Metric, labels: Labels<'_>, value: f64) {
        self.with(metric, labels, |series| series.add(bounds_of(metric), value));
    }

    /// For whoever counts the same again and again.
    pub fn tally(&self, metric: Metric, labels: Labels<'_>) -> Tally {
        Tally { series: self.with(metric, labels, Arc::clone), bounds: bounds_of(metric) }
    }

    fn with<T>(&self, metric: Metric, labels: Labels<'_>, then: impl FnOnce(&Arc<Series>) -> T) -> T {
        KEY.with_borrow_mut(|key| {
            key.clear();
            render_labels(key, labels);
            let mut family = self.series[metric as usize].lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(series) = family.get(key.as_str()) {
                return then(series);
            }
            if family.len() >= SERIES_MAX {
                key.clear();
                render_labels(key, &[("series", "other")]);
            }
            then(family.entry(key.clone()).or_insert_with(|| Arc::new(Series::new(bounds_of(metric)))))
        })
    }

    /// A request begins (+1) or ends (-1).
    pub fn in_flight(&self, change: i64) {
        self.in_flight.fetch_add(change, Ordering::AcqRel);
    }

    /// Requests being served.
    pub fn in_flight_now(&self) -> i64 {
        self.in_flight.load(Ordering::Acquire)
    }

    /// Connections that are open.
    pub fn connections_now(&self) -> i64 {
        self.connections.load(Ordering::Acquire)
    }

    /// A connection opens (+1) or closes (-1).
    pub fn connections(&self, change: i64) {
        self.connections.fetch_add(change, Ordering::AcqRel);
    }

    /// Prometheus text; `gauges` brings (gauge, model, value) of the upstreams.
    pub fn render(&self, gauges: &[(Gauge, String, f64)]) -> String {
        let mut out = String::with_capacity(16 * 1024);
        for metric in Metric::ALL {
            let family = self.series[metric as usize].lock().unwrap_or_else(PoisonError::into_inner).clone();
            render_family(&mut out, metric, &family);
        }
        let own = [
            (Gauge::InFlight, String::new(), self.in_flight_now() as f64),
            (Gauge::Connections, String::new(), self.connections.load(Ordering::Acquire) as f64),
        ];
        let mut all: Vec<_> = own.iter().chain(gauges).collect();
        all.sort_by_key(|(gauge, ..)| *gauge);
        let mut last = None;
        for (gauge, model, value) in all {
            let (name, kind, help) = gauge.about();
            if last.replace(name) != Some(name) {
                let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
            }
            let mut labels = String::new();
            match gauge.tier() {
                Some(tier) => render_labels(&mut labels, &[(gauge.label(), model), ("tier", tier.name())]),
                None if !model.is_empty() => render_labels(&mut labels, &[(gauge.label(), model)]),
                None => {}
            }
            let _ = writeln!(out, "{name}{} {value}", braces(&labels));
        }
        out
    }
}

fn bounds_of(metric: Metric) -> &'static [f64] {
    match metric.about().1 {
        Kind::Histogram(bounds) => bounds,
        Kind::Counter => &[],
    }
}

fn render_family(out: &mut String, metric: Metric, family: &BTreeMap<String, Arc<Series>>) {
    let (name, kind, help) = metric.about();
    let kind_name = if kind == Kind::Counter { "counter" } else { "histogram" };
    let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind_name}\n");
    for (labels, series) in family {
        let Kind::Histogram(bounds) = kind else {
            let _ = writeln!(out, "{name}{} {}", braces(labels), series.sum());
            continue;
        };
        let comma = if labels.is_empty() { "" } else { "," };
        let (mut below, total) = (0, series.count.load(Ordering::Relaxed));
        for (bound, count) in bounds.iter().zip(&series.buckets) {
            below += count.load(Ordering::Relaxed);
            let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {below}");
        }
        let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {total}");
        let _ = writeln!(out, "{name}_sum{} {}", braces(labels), series.sum());
        let _ = writeln!(out, "{name}_count{} {total}", braces(labels));
    }
}

fn braces(labels: &str) -> String {
    if labels.is_empty() { String::new() } else { format!("{{{labels}}}") }
}

fn render_labels(out: &mut String, labels: Labels<'_>) {
    for (name, value) in labels {
        if !out.is_empty() {
            out.push(',');
        }
        out.push_str(name);
        out.push_str("=\"");
        let is_plain = !value.bytes().any(|byte| matches!(byte, b'\\' | b'"' | b'\n'));
        if is_plain {
            out.push_str(value);
        }
        for character in value.chars().filter(|_| !is_plain) {
            match character {
                '\\' => out.push_str("\\\\"),
                '"' => out.push_str("\\\""),
                '\n' => out.push_str("\\n"),
                other => out.push(other),
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renders_what_prometheus_reads() {
        let metrics = Metrics::default();
        metrics.observe(Metric::TimeToFirstToken, &[("gen_ai_request_model", "a\"b")], 0.03);
        metrics.observe(Metric::TimeToFirstToken, &[("gen_ai_request_model", "a\"b")], 99.0);
        metrics.count(Metric::Requests, &[("route", "/x"), ("status", "200")]);
        let text = metrics.render(&[(Gauge::BlocksTotal, "m".into(), 7.0)]);
        for line in [
            "# TYPE gen_ai_server_time_to_first_token_seconds histogram",
            "gen_ai_server_time_to_first_token_seconds_bucket{gen_ai_request_model=\"a\\\"b\",le=\"0.02\"} 0",
            "gen_ai_server_time_to_first_token_seconds_bucket{gen_ai_request_model=\"a\\\"b\",le=\"0.04\"} 1",
            "gen_ai_server_time_to_first_token_seconds_bucket{gen_ai_request_model=\"a\\\"b\",le=\"+Inf\"} 2",
            "gen_ai_server_time_to_first_token_seconds_count{gen_ai_request_model=\"a\\\"b\"} 2",
            "penstock_requests_total{route=\"/x\",status=\"200\"} 1",
            "penstock_kv_blocks{model=\"m\"} 7",
            "penstock_requests_in_flight 0",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn label_sets_are_bounded() {
        let metrics = Metrics::default();
        for number in 0..SERIES_MAX + 50 {
            metrics.count(Metric::Requests, &[("route", &number.to_string())]);
        }
        let text = metrics.render(&[]);
        assert_eq!(text.matches("penstock_requests_total{").count(), SERIES_MAX + 1);
        assert!(text.contains("penstock_requests_total{series=\"other\"} 50"));
    }

    /// Names that a text has, without what a histogram appends.
    fn names_in(text: &str) -> impl Iterator<Item = &str> {
        let words = text.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
        let ours = words.filter(|word| {
            ["penstock_", "gen_ai_server_", "gen_ai_client_"].iter().any(|start| word.starts_with(start))
        });
        ours.map(|word| {
            let ends = ["_bucket", "_sum", "_count"];
            ends.iter().find_map(|end| word.strip_suffix(end)).unwrap_or(word)
        })
    }

    #[test]
    fn the_dashboard_asks_for_metrics_that_exist() {
        let (own, board) = (include_str!("metrics.rs"), include_str!("../../../../configs/grafana/penstock.json"));
        let own = own.split("#[cfg(test)]").next().expect("a source");
        let asked: std::collections::BTreeSet<_> = names_in(board).collect();
        assert!(asked.len() > 20, "{asked:?}");
        for name in asked {
            assert!(own.contains(&format!("\"{name}\"")), "{name} is on the dashboard and nowhere else");
        }
        serde_json::from_str::<serde_json::Value>(board).expect("JSON");
    }
}
