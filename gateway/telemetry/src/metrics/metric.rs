//! Table of the metrics that are counted or timed where the event happens.

/// Metric that is counted or timed by its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Duration of a request in seconds, from its head to the end of the answer.
    RequestDuration,
    /// Time to first token (TTFT) in seconds.
    TimeToFirstToken,
    /// Time per output token after the first (TPOT) in seconds.
    TimePerOutputToken,
    /// Tokens of a request, by type: input or output.
    TokenUsage,
    /// Requests that have ended, by route and HTTP status.
    Requests,
    /// Connections refused for a malformed head, by status.
    MalformedHeads,
    /// Requests that a web page may not send, by `reason`.
    PagesRefused,
    /// Connections that were closed unserved, by `reason`.
    ConnectionsRefused,
    /// Clients that left before their answer ended.
    ClientsGone,
    /// Panics caught in a request handler.
    Panics,
    /// Attempts at the targets of a model, by outcome.
    Attempts,
    /// Attempts at fallback targets of a model, by the reason for the fallback.
    Fallbacks,
    /// Hedges, by the winner of the race.
    Hedges,
    /// Retries and hedges that the budget did not allow.
    RetriesDenied,
    /// Copies of requests sent to a mirror target, by outcome.
    Mirrored,
    /// Requests to a provider, by outcome.
    UpstreamRequests,
    /// Requests delayed or refused by the pacing of a provider's key, by outcome.
    PacedRequests,
    /// Prompt tokens of requests routed by cache, by the source of the cache's content.
    RoutedTokens,
    /// Prompt tokens of requests routed by cache that were predicted to be cached.
    RoutedTokensPredicted,
    /// Prompt tokens of requests routed by cache that the server reported as cached.
    RoutedTokensCached,
    /// Lines of batches by outcome; `retried` counts attempts that are followed by another.
    BatchLines,
    /// Requests refused by authentication, by reason.
    AuthFailures,
    /// Calls of plugins, by hook and outcome.
    PluginCalls,
    /// Failures of plugins, by hook and reason.
    PluginFailures,
    /// Seconds of a request in a hook of a plugin.
    PluginSeconds,
    /// Dry runs of plugins, by outcome: done, refused, failed, left.
    DryRuns,
    /// Looks at the groups of people who are signed in at the console, by outcome: kept, changed, ended, failed.
    ConsoleRenewals,
    /// Decisions of a limit on requests, by limit: allowed or denied.
    LimitDecisions,
    /// Amount that limits reserved for requests that have ended, by unit: tokens, usd.
    LimitReserved,
    /// Amount that requests under a limit have used, by unit: tokens, usd.
    LimitSettled,
    /// Amount used beyond the reservation, by unit.
    LimitExceeded,
    /// Fetches of issuers' keys, by outcome.
    KeySetFetches,
    /// Longest time without a token while a request changed its worker, by cause.
    WorkerGap,
    /// Messages to webhooks, by outcome: sent, failed, dropped.
    WebhookMessages,
    /// Requests to the endpoint picker, by outcome and reason.
    Picks,
    /// Requests to the endpoint picker that have ended, by model and end.
    PickEnds,
    /// Seconds from the last byte of a request to the picker's reply, by outcome.
    PickSeconds,
}

/// Storage of a metric's values: a counter, or a histogram with its bounds.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Counter,
    /// Histogram with these upper bounds of its buckets, ascending.
    Histogram(&'static [f64]),
}

/// Buckets in seconds for durations, as OpenTelemetry's GenAI conventions advise.
const SECONDS: &[f64] = &[0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92];
/// Buckets in seconds for TTFT, from the same conventions.
const FIRST: &[f64] = &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
/// Buckets in seconds for TPOT, from the same conventions.
const EACH: &[f64] = &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
/// Buckets in seconds for plugin hooks: microseconds, or longer for a hook that calls a service.
const HOOK: &[f64] = &[1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0];
/// Buckets in seconds for picks: microseconds, or longer where a prompt is tokenized.
const PICK: &[f64] = &[1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];
/// Buckets for token counts, from OpenTelemetry's GenAI conventions.
const TOKENS: &[f64] = &[1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0];

impl Metric {
    pub(super) const ALL: [Metric; 37] = [
        Metric::RequestDuration,
        Metric::TimeToFirstToken,
        Metric::TimePerOutputToken,
        Metric::TokenUsage,
        Metric::Requests,
        Metric::MalformedHeads,
        Metric::PagesRefused,
        Metric::ConnectionsRefused,
        Metric::ClientsGone,
        Metric::Panics,
        Metric::Attempts,
        Metric::Fallbacks,
        Metric::Hedges,
        Metric::RetriesDenied,
        Metric::Mirrored,
        Metric::UpstreamRequests,
        Metric::PacedRequests,
        Metric::RoutedTokens,
        Metric::RoutedTokensPredicted,
        Metric::RoutedTokensCached,
        Metric::BatchLines,
        Metric::AuthFailures,
        Metric::PluginCalls,
        Metric::PluginFailures,
        Metric::PluginSeconds,
        Metric::DryRuns,
        Metric::ConsoleRenewals,
        Metric::LimitDecisions,
        Metric::LimitReserved,
        Metric::LimitSettled,
        Metric::LimitExceeded,
        Metric::KeySetFetches,
        Metric::WorkerGap,
        Metric::WebhookMessages,
        Metric::Picks,
        Metric::PickEnds,
        Metric::PickSeconds,
    ];

    /// Metric's name, its storage (counter, or histogram with bounds) and its HELP text.
    pub(super) fn about(self) -> (&'static str, Kind, &'static str) {
        match self {
            Metric::RequestDuration => (
                "gen_ai_server_request_duration_seconds",
                Kind::Histogram(SECONDS),
                "Request duration in seconds, from the head of the request to the end of the answer.",
            ),
            Metric::TimeToFirstToken => (
                "gen_ai_server_time_to_first_token_seconds",
                Kind::Histogram(FIRST),
                "Time to first token (TTFT) in seconds, from the head of the request.",
            ),
            Metric::TimePerOutputToken => (
                "gen_ai_server_time_per_output_token_seconds",
                Kind::Histogram(EACH),
                "Time per output token after the first (TPOT), in seconds.",
            ),
            Metric::WorkerGap => (
                "penstock_worker_gap_seconds",
                Kind::Histogram(FIRST),
                "Longest gap between tokens, in seconds, of a request that changed workers (lost or moved).",
            ),
            Metric::TokenUsage => {
                ("gen_ai_client_token_usage", Kind::Histogram(TOKENS), "Tokens of a request, by type.")
            }
            Metric::Requests => ("penstock_requests_total", Kind::Counter, "Requests by route and status."),
            Metric::MalformedHeads => {
                ("penstock_malformed_heads_total", Kind::Counter, "Connections closed for an invalid request head.")
            }
            Metric::PagesRefused => (
                "penstock_pages_refused_total",
                Kind::Counter,
                "Requests that a web page may not send here, by reason: host, origin, preflight.",
            ),
            Metric::ConnectionsRefused => (
                "penstock_connections_refused_total",
                Kind::Counter,
                "Connections closed unserved, by reason: full, address, rate, gave_way, handshake.",
            ),
            Metric::ClientsGone => {
                ("penstock_clients_gone_total", Kind::Counter, "Clients that left before their answer ended.")
            }
            Metric::Attempts => {
                ("penstock_attempts_total", Kind::Counter, "Attempts at the targets of a model, by outcome.")
            }
            Metric::Fallbacks => {
                ("penstock_fallbacks_total", Kind::Counter, "Attempts at fallback targets of a model, by reason.")
            }
            Metric::Hedges => (
                "penstock_hedges_total",
                Kind::Counter,
                "Hedges of slow first attempts, by outcome: won by the second attempt, or lost.",
            ),
            Metric::RetriesDenied => (
                "penstock_retries_denied_total",
                Kind::Counter,
                "Retries and hedges denied because the retry budget of the model was used up.",
            ),
            Metric::Mirrored => {
                ("penstock_mirrored_total", Kind::Counter, "Copies of requests sent to a mirror target, by outcome.")
            }
            Metric::PacedRequests => (
                "penstock_provider_paced_total",
                Kind::Counter,
                "Requests delayed by the pacing of a provider's rate limit, or refused because the delay was too long, by outcome.",
            ),
            Metric::UpstreamRequests => {
                ("penstock_upstream_requests_total", Kind::Counter, "Requests to a provider, by outcome.")
            }
            Metric::Picks => (
                "penstock_picks_total",
                Kind::Counter,
                "Requests to the endpoint picker, by outcome (picked, refused) and reason.",
            ),
            Metric::PickEnds => (
                "penstock_pick_ends_total",
                Kind::Counter,
                "Requests to the endpoint picker that have ended, by model and end (complete, failed, client_gone, cut, unseen).",
            ),
            Metric::PickSeconds => (
                "penstock_pick_seconds",
                Kind::Histogram(PICK),
                "Time of the endpoint picker in seconds, from the last byte of a request to the reply.",
            ),
            Metric::Panics => ("penstock_panics_total", Kind::Counter, "Panics caught in a request handler."),
            Metric::LimitDecisions => {
                ("penstock_limit_decisions_total", Kind::Counter, "Requests that a limit allowed or denied.")
            }
            Metric::LimitReserved => (
                "penstock_limit_reserved_total",
                Kind::Counter,
                "Amount reserved for requests that have ended, by unit: tokens, usd.",
            ),
            Metric::LimitSettled => (
                "penstock_limit_settled_total",
                Kind::Counter,
                "Amount used by requests under a limit, by unit: tokens, usd.",
            ),
            Metric::LimitExceeded => (
                "penstock_limit_exceeded_total",
                Kind::Counter,
                "Amount used by requests beyond their reservation, by unit: tokens, usd.",
            ),
            Metric::RoutedTokens => (
                "penstock_routed_prompt_tokens_total",
                Kind::Counter,
                "Prompt tokens of requests routed by prefix cache, by source of the cache index: events, approximate.",
            ),
            Metric::RoutedTokensPredicted => (
                "penstock_routed_cached_tokens_predicted_total",
                Kind::Counter,
                "Prompt tokens of requests routed by prefix cache that the router predicted as cached at the chosen target.",
            ),
            Metric::RoutedTokensCached => (
                "penstock_routed_cached_tokens_total",
                Kind::Counter,
                "Prompt tokens of requests routed by prefix cache that the server reported as cached.",
            ),
            Metric::WebhookMessages => (
                "penstock_webhook_messages_total",
                Kind::Counter,
                "Messages to webhooks, by outcome: sent, failed (given up), dropped (queue full).",
            ),
            Metric::BatchLines => ("penstock_batch_lines_total", Kind::Counter, "Lines of batches, by outcome."),
            Metric::AuthFailures => {
                ("penstock_auth_failures_total", Kind::Counter, "Requests refused by authentication, by reason.")
            }
            Metric::PluginCalls => {
                ("penstock_plugin_calls_total", Kind::Counter, "Requests passed to a plugin, by hook and outcome.")
            }
            Metric::PluginFailures => {
                ("penstock_plugin_failures_total", Kind::Counter, "Failures of a plugin, by hook and reason.")
            }
            Metric::DryRuns => (
                "penstock_dry_runs_total",
                Kind::Counter,
                "Dry runs of plugins that operators asked for, by outcome (done, refused, failed, left).",
            ),
            Metric::ConsoleRenewals => (
                "penstock_console_renewals_total",
                Kind::Counter,
                "Looks at the groups of people who are signed in at the web console, by outcome (kept, changed, ended, failed).",
            ),
            Metric::PluginSeconds => (
                "penstock_plugin_seconds",
                Kind::Histogram(HOOK),
                "Seconds that one request spent in a hook of a plugin.",
            ),
            Metric::KeySetFetches => (
                "penstock_auth_key_set_fetches_total",
                Kind::Counter,
                "Fetches of the signing keys of token issuers, by outcome.",
            ),
        }
    }
}
