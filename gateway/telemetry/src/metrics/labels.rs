//! Labels of the metrics in the table of [`Metric`]: a series with another label is a mistake that debug builds find.

use super::Metric;

impl Metric {
    /// Names of the labels that series of the metric can have.
    pub(super) fn labels(self) -> &'static [&'static str] {
        match self {
            Metric::RequestDuration => &["gen_ai_operation_name", "gen_ai_request_model", "error_type"],
            Metric::TimeToFirstToken | Metric::TimePerOutputToken => &["gen_ai_operation_name", "gen_ai_request_model"],
            Metric::TokenUsage => &["gen_ai_operation_name", "gen_ai_request_model", "gen_ai_token_type"],
            Metric::WorkerGap => &["gen_ai_request_model", "why"],
            Metric::Requests => &["route", "status"],
            Metric::MalformedHeads => &["status"],
            Metric::PagesRefused | Metric::ConnectionsRefused | Metric::AuthFailures => &["reason"],
            Metric::ClientsGone => &["route"],
            Metric::Panics => &[],
            Metric::Attempts | Metric::Mirrored => &["model", "target", "outcome"],
            Metric::Fallbacks => &["model", "reason"],
            Metric::Hedges => &["model", "outcome"],
            Metric::RetriesDenied => &["model"],
            Metric::UpstreamRequests | Metric::PacedRequests => &["provider", "outcome"],
            Metric::RoutedTokens | Metric::RoutedTokensPredicted | Metric::RoutedTokensCached => {
                &["model", "target", "layer"]
            }
            Metric::Picks => &["model", "outcome", "reason"],
            Metric::PickEnds => &["model", "end"],
            Metric::BatchLines | Metric::DryRuns | Metric::ConsoleRenewals | Metric::PickSeconds => &["outcome"],
            Metric::WebhookMessages => &["webhook", "outcome"],
            Metric::PluginCalls => &["plugin", "hook", "outcome"],
            Metric::PluginFailures => &["plugin", "hook", "reason"],
            Metric::PluginSeconds => &["plugin", "hook"],
            Metric::LimitDecisions => &["limit", "decision"],
            Metric::LimitReserved | Metric::LimitSettled | Metric::LimitExceeded => &["unit"],
            Metric::KeySetFetches => &["issuer", "outcome"],
        }
    }
}
