//! Settings of LiteLLM that are not translated, with their counterparts here.

/// Explanation for a key that is not translated. `key` is its name without the table that it is in.
pub(super) fn told(key: &str) -> &'static str {
    match key {
        "cache" | "cache_params" => "is not translated: the plugin `cache` keeps answers (docs/reference/plugins.md)",
        "database_url" | "store_model_in_db" | "database_connection_pool_limit" => {
            "is not translated: [store] says where keys and usage are kept (SQLite without it, url for PostgreSQL)"
        }
        "redis_host" | "redis_port" | "redis_password" | "redis_url" => {
            "is not translated: [counters] url is the Redis that several gateways count in"
        }
        "success_callback" | "failure_callback" | "callbacks" | "service_callback" => {
            "is not translated: [telemetry] sends traces, log.access writes a line per request"
        }
        "set_verbose" | "json_logs" | "log_raw_request_response" => "is not translated: see [log]",
        "max_budget" | "budget_duration" | "max_parallel_requests" | "global_max_parallel_requests" => {
            "is not translated: see [[limits]]"
        }
        "extra_headers" => "is not translated: see headers of [[providers]]",
        "aws_access_key_id" | "aws_secret_access_key" | "aws_session_token" => {
            "is not translated: docs/reference/bedrock.md says how requests are signed"
        }
        "vertex_credentials" => "is not translated: key_file of [[providers]] names a file with an access token",
        _ => "is not translated",
    }
}
