//! Table of all config keys with default and description. The example file and the reference page are rendered from it.

use std::fmt::Write;

/// Description of one config key: its table, name, default and meaning.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Name of the table, as `server`; `pools` for an array of tables.
    pub table: &'static str,
    /// Name of the key within its table.
    pub name: &'static str,
    /// Default as TOML; `Err`: an example, for a key without a default.
    pub default: Result<&'static str, &'static str>,
    /// Description of the key in one or two sentences, for the example file and the reference page.
    pub doc: &'static str,
}

/// Description of one config table.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// Name of the table; dots lead to nested tables.
    pub name: &'static str,
    /// Array of tables: written `[[name]]`, any number of times.
    pub many: bool,
    /// Description of the table in one sentence, for the reference page.
    pub doc: &'static str,
}

const fn key(table: &'static str, name: &'static str, default: &'static str, doc: &'static str) -> Key {
    Key { table, name, default: Ok(default), doc }
}

const fn optional(table: &'static str, name: &'static str, example: &'static str, doc: &'static str) -> Key {
    Key { table, name, default: Err(example), doc }
}

const fn table(name: &'static str, many: bool, doc: &'static str) -> Table {
    Table { name, many, doc }
}

/// All tables, in the order of the file.
#[rustfmt::skip]
pub const TABLES: &[Table] = &[
    table("server", false, "Listeners of the gateway, and limits on connections, requests and answers."),
    table("server.tls", false, "TLS of the TCP listener; off without a certificate."),
    table("cors", false, "Cross-origin access (CORS) for web pages of other origins. Off without this table. docs/reference/http.md"),
    table("admin", false, "The admin API, on a listener of its own. docs/reference/admin.md"),
    table("admin.oidc", false, "Sign-in at the web console with an identity provider (OpenID Connect); off without an issuer. docs/guide/console.md"),
    table("admin_keys", true, "A key of the admin API. Without any, one is made at the first start and kept in server.state_dir, for this machine alone."),
    table("endpoint_picker", false, "Endpoint picker of the Gateway API inference extension: a gRPC service (ext_proc) that Envoy asks for the endpoint of each request. Off without listen. docs/guide/endpoint-picker.md"),
    table("stream", false, "Timing of streamed answers."),
    table("log", false, "Logs: the process log and the access log. Prompts, completions and keys are never logged."),
    table("telemetry", false, "OpenTelemetry traces. Prompts, completions and keys are never in a trace."),
    table("webhooks", true, "A place that is told of state changes: budgets, providers that are down, restart loops, expiring keys. docs/guide/webhooks.md"),
    table("store", false, "Database for issued keys, the ledger, files, batches and stored responses: SQLite, or PostgreSQL, which several gateways can share. docs/reference/stores.md"),
    table("counters", false, "Shared counters for the limits of several gateways. Without a URL each gateway counts alone."),
    table("hub", false, "Hub that penstock pull fetches models from, and the folder that holds them. docs/guide/models.md"),
    table("batches", false, "Limits and concurrency of batches."),
    table("auth", false, "Authentication. Keys are in [[keys]], or issued (penstock keys)."),
    table("keys", true, "An API key. A request needs the permission of the key's own lists and of its team's lists; an empty list allows everything."),
    table("teams", true, "People and services that share a scope and limits."),
    table("limits", true, "A limit on usage: all measures of a limit hold at once. An amount is reserved before a request is sent on, and settled with the real usage."),
    table("jwt", true, "An identity provider (OpenID Connect) whose access tokens are credentials."),
    table("models", true, "A model name in requests, and the targets that answer it. Pools and models of providers need no entry: they are served under their own names."),
    table("plugins", true, "A plugin that handles requests and answers: requests in the order of the file, answers in reverse order."),
    table("prices", false, "Price table for the models of providers."),
    table("pools", true, "A model and the workers that serve it. Without any, and without providers, the embedded demo model is served."),
    table("providers", true, "An upstream service that answers requests."),
];

/// All keys, in the order of the file.
#[rustfmt::skip]
pub const KEYS: &[Key] = &[
    key("server", "listen", "\"127.0.0.1:8080\"", "Address and port for HTTP/1.1 and HTTP/2 (on one port; without TLS, HTTP/2 with prior knowledge)."),
    optional("server", "unix", "\"/run/penstock/http.sock\"", "Also listen on this Unix socket."),
    key("server", "hosts", "[]", "Host header names that are accepted where no credential is needed, besides addresses and localhost; *.example stands for every name below example."),
    optional("server", "state_dir", "\"/var/lib/penstock\"", "Folder for sockets, leases and logs of local workers. Default: penstock in $XDG_STATE_HOME or ~/.local/state."),
    key("server", "weights_cache_bytes_max", "0", "Largest size of the files of packed weights in server.state_dir, which spare a cold start the packing; the least recently used make room. 0: none are read or written. docs/guide/models.md"),
    key("server", "threads", "0", "Threads for connections. 0: one per core, at most 4."),
    key("server", "connections_max", "16384", "Largest number of client connections, as far as the limit of file descriptors goes (the log and penstock check say). When it is reached, the connection that has been idle longest is closed; where all are busy, new connections are answered 503."),
    key("server", "address_connections_max", "2048", "Largest number of connections of one address (IPv6: one /64); further ones are closed. Not for loopback and auth.trusted_proxies. 0: no limit."),
    key("server", "address_connections_per_second", "200", "New connections per second of one address, averaged over ten seconds; further ones are closed. Not for loopback and auth.trusted_proxies. 0: no limit."),
    key("server", "head_bytes_max", "32768", "Largest request head (request line and header fields)."),
    key("server", "body_bytes_max", "33554432", "Largest request body."),
    key("server", "body_memory_bytes_max", "536870912", "Memory for all request bodies together; when it is used up, requests are answered 503 with Retry-After. Up to an eighth is kept for bodies of at most 64 KiB, and bodies of one key (where no key is required, of one client address) hold at most half together, or one largest body where that is more."),
    key("server", "answer_memory_bytes_max", "536870912", "Memory for all buffered parts of answers together: whole answers, events that have not ended, text that is collected to be stored. When it is used up, an answer that needs more gets 503 (with Retry-After, but not for an answer that a provider has made already: a retry may be billed again), and a stream ends with an error. Up to an eighth is kept for answers that hold at most 64 KiB, and answers of one key hold at most half together, or one answer of 64 MiB where that is more."),
    key("server", "event_bytes_max", "4194304", "Largest event of a text stream from a provider; a larger one ends the stream with an error."),
    key("server", "image_event_bytes_max", "33554432", "Largest event of a stream that can carry images (Gemini and Responses)."),
    key("server", "head_timeout_ms", "15000", "Longest time for a complete request head."),
    key("server", "body_timeout_ms", "30000", "Window in which a request body must bring body_rate_bytes_min bytes per second, or its rest."),
    key("server", "body_rate_bytes_min", "1024", "Slowest rate of a request body, in bytes per second, over body_timeout_ms."),
    key("server", "idle_timeout_ms", "75000", "An idle connection is closed after this long."),
    key("server", "write_stall_ms", "20000", "A client that reads nothing of its answer for this long is disconnected."),
    key("server", "request_timeout_ms", "0", "Longest time for one answer. 0: no limit."),
    key("server", "h2_streams_max", "128", "HTTP/2: concurrent requests (streams) of one connection."),
    key("server", "h2_header_list_bytes_max", "32768", "HTTP/2: largest decoded header list."),
    optional("server", "moderation_model", "\"assistant\"", "Model for /v1/moderations where a request names none. Without this key, such requests are answered 404."),
    key("server", "explain", "false", "Add the headers x-penstock-target (who answered) and x-penstock-attempts (number of attempts) to every answer of a [[models]] entry; otherwise only where there were several attempts."),
    key("server", "cost_header", "false", "Add the cost to every answer (header x-penstock-cost). A request with the header x-penstock-cost: 1 gets it in any case."),
    key("server", "watch", "true", "Reload the config file when it is written or replaced; SIGHUP reloads in any case. A file with a fault changes nothing."),
    key("server", "config_writes", "false", "Write configs applied by the admin API to the config file; where the file holds a text that has not been in force, a change is answered 409 until the file is reloaded. Otherwise they are in force until the file changes, is reloaded, or the gateway restarts."),
    key("server", "grace_ms", "30000", "Longest time for answers in progress after SIGTERM."),
    key("server", "upgrade_grace_ms", "3600000", "Longest time for answers in progress at the old process after an upgrade."),
    optional("server.tls", "certificate", "\"/etc/penstock/cert.pem\"", "Certificate chain (PEM). With it the TCP listener speaks TLS 1.2 and 1.3, with ALPN for HTTP/2, and nothing else."),
    optional("server.tls", "key", "\"/etc/penstock/key.pem\"", "Private key (PEM) of the certificate."),
    key("cors", "origins", "[]", "Allowed origins, as https://app.example or http://localhost:3000, compared exactly. \"*\": every origin, only where every request needs a credential."),
    key("cors", "max_age_seconds", "600", "Lifetime of a preflight answer in the browser's cache."),
    optional("admin", "listen", "\"127.0.0.1:8081\"", "Address and port of the admin API; \"off\": none. Beyond loopback it needs [[admin_keys]]. Default: 127.0.0.1:8081, or a free port where that is taken (penstock admin finds it)."),
    optional("admin", "unix", "\"/run/penstock/admin.sock\"", "Unix socket that also serves the admin API; only this user can open it."),
    key("admin", "hosts", "[]", "Host header names that are accepted, besides addresses and localhost."),
    key("admin", "origins", "[]", "Web origins, as https://console.example, whose pages may use the admin API, besides its own."),
    key("admin", "console", "true", "Serve the web console at /console/ of the admin listener; people sign in there with an admin key. docs/guide/console.md"),
    key("admin", "playground", "true", "Let operators and owners who are signed in at the console ask models there. Their requests are under the limits that apply to everyone, and in the ledger as the key console:ID."),
    optional("admin.oidc", "issuer", "\"https://sso.example.com/realms/main\"", "Issuer of the identity provider, whose /.well-known/openid-configuration names its addresses: https, or http on loopback."),
    optional("admin.oidc", "name", "\"Company login\"", "Name of the provider on the sign-in page, as in \"Sign in with Company login\". Default: the issuer's host."),
    optional("admin.oidc", "client_id", "\"penstock-console\"", "Id under which the gateway is registered at the provider, with the redirect URL https://HOST/console/."),
    optional("admin.oidc", "client_secret_env", "\"PENSTOCK_OIDC_SECRET\"", "Environment variable that holds the secret of the registration. Without a secret the client is public, and PKCE alone protects the sign-in."),
    optional("admin.oidc", "client_secret_file", "\"/run/secrets/penstock-oidc\"", "Instead of client_secret_env: file that holds the secret."),
    optional("admin.oidc", "client_auth", "\"client_secret_post\"", "How the secret is sent: client_secret_basic (a header) or client_secret_post (in the form). Default: client_secret_basic where the provider's discovery document lists it. Some providers take only the one that the client is registered with."),
    key("admin.oidc", "scopes", "[\"openid\", \"profile\", \"email\"]", "Scopes that are asked for; openid must be among them. Some providers give groups only for a scope of their own, and refresh tokens only for offline_access."),
    optional("admin.oidc", "parameters", "{ prompt = \"consent\" }", "Further parameters of the URL that the browser opens at the provider, as { access_type = \"offline\", prompt = \"consent\" } for refresh tokens of Google."),
    key("admin.oidc", "groups_claim", "\"groups\"", "Claim with the person's groups, of the ID token, or of the userinfo endpoint where the ID token has none. Dots lead into nested objects."),
    optional("admin.oidc", "roles", "{ \"penstock-admins\" = \"owner\", \"penstock-ops\" = \"operator\" }", "Map from groups to roles: viewer, operator or owner. The highest role of a person's groups counts; a person in none of them is refused."),
    optional("admin.oidc", "default_role", "\"viewer\"", "Role of everybody whom the provider signs in, also without a group: for providers that name none. Default: who is in no group of roles is refused."),
    optional("admin.oidc", "required", "{ hd = \"corp.example\" }", "Claims that the ID token must have, with their values."),
    optional("admin.oidc", "redirect_url", "\"https://penstock.example/console/\"", "URL of the console that the provider sends people back to. Default: the one at which the person has opened the console."),
    key("admin.oidc", "algorithms", "[\"RS256\", \"ES256\", \"EdDSA\"]", "Accepted signature algorithms of ID tokens, as for [[jwt]]."),
    optional("admin.oidc", "ca_file", "\"/etc/penstock/ca.pem\"", "Certificates (PEM) to trust instead of the system's at the provider's addresses."),
    key("admin.oidc", "session_minutes", "480", "Longest time of a session, 5 to 720. Where the groups cannot be read again, those of the sign-in are believed for so long."),
    key("admin.oidc", "refresh_seconds", "300", "Longest time until the groups of a session are read again at the provider, 5 to 7200: with a refresh token, or at the userinfo endpoint while the access token lives. 0: never."),
    key("admin.oidc", "refresh_stale_seconds", "1800", "Longest time that a session lasts after the provider last named its groups, while the provider does not answer; from refresh_seconds and 30 more to 43200."),
    key("admin.oidc", "sign_out_there", "false", "Lead people who sign out at the console to the provider, to sign out there (end_session_endpoint), and back. The console's address must be registered there as a post-logout redirect URL."),
    key("admin.oidc", "limits", "[]", "Ids of [[limits]] on what these people ask models at the console, besides those for everyone."),
    optional("admin_keys", "id", "\"ops\"", "Name of the key in the audit log."),
    optional("admin_keys", "digest", "\"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\"", "SHA-256 of the key in hex: printf %s \"$KEY\" | sha256sum."),
    optional("admin_keys", "key_env", "\"PENSTOCK_ADMIN_KEY\"", "Instead of digest: environment variable that holds the key."),
    optional("admin_keys", "key_file", "\"/run/secrets/penstock-admin\"", "Instead of digest: file that holds the key."),
    key("admin_keys", "role", "\"viewer\"", "Role of the key: viewer (reads everything but the audit log), operator (also cancels requests, drains workers, revokes keys), owner (also keys, limits and config)."),
    key("admin_keys", "limits", "[]", "Ids of [[limits]] on what the key's holder asks models at the console, besides those for everyone."),
    optional("server.tls", "client_ca", "\"/etc/penstock/clients.pem\"", "Certificate authorities (PEM) of client certificates; [[keys]] (certificate) maps a certificate to its key."),
    key("server.tls", "client_auth", "\"optional\"", "With client_ca, whether a client must have a certificate: optional or required."),
    optional("endpoint_picker", "listen", "\"0.0.0.0:9002\"", "Address and port of the service. It asks for no credential: only Envoy should reach it."),
    optional("endpoint_picker", "certificate", "\"/etc/penstock/picker.pem\"", "Certificate chain (PEM): the service speaks TLS. Without it: HTTP/2 with prior knowledge (h2c)."),
    optional("endpoint_picker", "key", "\"/etc/penstock/picker-key.pem\"", "Private key (PEM) of the certificate."),
    optional("endpoint_picker", "client_ca", "\"/etc/penstock/envoy-ca.pem\"", "Certificate authorities (PEM): Envoy must have a certificate of one of them."),
    key("endpoint_picker", "endpoints_max", "1", "Most endpoints named in an answer, 1 to 8: the chosen one, and those that Envoy shall try after it. More than one needs an Envoy with the override_host load balancing policy."),
    key("stream", "commit_ms", "300", "Longest wait for the first token before the status and headers of a stream are sent. Until then, an error still gets its own status."),
    key("stream", "heartbeat_ms", "15000", "A comment (Gemini: empty lines, Ollama: a blank) is sent on a stream that is silent for this long, so that proxies keep the connection open."),
    key("log", "level", "\"info\"", "Log level or filter directives (tracing syntax) for standard error."),
    key("log", "access", "\"-\"", "Access log, one JSON line per request: \"-\" for standard output, \"off\", or a path."),
    optional("telemetry", "otlp_url", "\"http://127.0.0.1:4318\"", "Base URL of an OpenTelemetry collector (OTLP over HTTP); traces go to /v1/traces there. Without this key requests carry no trace."),
    optional("telemetry", "otlp_headers", "{ \"x-team\" = \"search\" }", "Header fields sent with the traces."),
    optional("telemetry", "otlp_headers_env", "\"OTEL_EXPORTER_OTLP_HEADERS\"", "Environment variable with further header fields: name=value,name=value."),
    optional("telemetry", "otlp_ca_file", "\"/etc/penstock/ca.pem\"", "Certificates (PEM) to trust instead of the system's."),
    key("telemetry", "service_name", "\"penstock\"", "service.name of the traces."),
    key("telemetry", "sample_ratio", "1.0", "Share of requests that are traced where the client sends no traceparent."),
    key("telemetry", "follow_clients", "true", "Continue the trace of a client's traceparent; the client then decides whether the request is sampled."),
    optional("webhooks", "name", "\"ops\"", "Name in logs and metrics."),
    optional("webhooks", "url", "\"https://hooks.example/penstock\"", "URL that messages are posted to: https, or http on this machine. It is not shown; redirects are not followed."),
    optional("webhooks", "url_env", "\"OPS_HOOK_URL\"", "Instead of url: environment variable that holds the URL."),
    optional("webhooks", "secret_env", "\"OPS_HOOK_SECRET\"", "Environment variable with the secret of the signature: at least 24 bytes, as text or as whsec_ and base64."),
    optional("webhooks", "secret_file", "\"/run/secrets/ops-hook\"", "Instead of secret_env: file that holds the secret."),
    optional("webhooks", "events", "[\"budget.threshold\", \"provider.down\"]", "Events to send: budget.threshold, provider.down, worker.restart_loop, key.expiring. Default: all."),
    key("webhooks", "budget_percent", "80", "Percent of a budget (usd_per_… of a limit) at which it is told; 100 is told in any case."),
    key("webhooks", "expiring_days", "14", "A key is told this many days before it expires."),
    key("webhooks", "repeat_minutes", "60", "What lasts is told again at this interval. 0: once only."),
    key("webhooks", "timeout_ms", "5000", "Longest time of one attempt."),
    key("webhooks", "allow_http", "false", "Allow http:// to other machines; messages then cross the network in clear."),
    optional("webhooks", "ca_file", "\"/etc/penstock/ca.pem\"", "Certificates (PEM) to trust instead of the system's."),
    optional("store", "path", "\"/var/lib/penstock/penstock.db\"", "SQLite database file; \":memory:\" keeps nothing beyond the process. Default: penstock.db in server.state_dir."),
    optional("store", "url", "\"postgres://penstock@db.internal/penstock?sslmode=require\"", "Instead of path: URL of PostgreSQL, without the password."),
    optional("store", "url_env", "\"PENSTOCK_STORE_URL\"", "Instead of url: environment variable that holds the URL, which may have a password there."),
    optional("store", "password_file", "\"/run/secrets/postgres\"", "File that holds the password of PostgreSQL."),
    optional("store", "ca_file", "\"/etc/ssl/db-ca.pem\"", "Certificates (PEM) to verify PostgreSQL's with, instead of the system's."),
    key("store", "connections", "8", "Largest number of connections to PostgreSQL, beside two that only listen."),
    key("store", "bytes_max", "0", "Largest size of the SQLite database; beyond it, uploads are answered 507. 0: as far as the disk goes."),
    key("store", "file_bytes_max", "536870912", "Largest uploaded file; server.body_bytes_max bounds it too."),
    key("store", "key_bytes_max", "10737418240", "Largest sum of the uploaded files of one key."),
    key("store", "key_response_bytes_max", "1073741824", "Largest sum of the stored responses, chat completions and conversations of one key; beyond it, the oldest that have ended are deleted."),
    key("store", "response_bytes_max", "17179869184", "Largest sum of all stored responses, chat completions and conversations, at most half of bytes_max where that is set; beyond it, the oldest of the key that stores most are deleted."),
    key("store", "response_event_bytes_max", "8388608", "Largest sum of the events kept of one response that is streamed in the background; beyond it, the oldest are dropped."),
    key("store", "response_days", "30", "Stored responses, chat completions and conversations are deleted after this many days."),
    key("store", "ledger_days", "400", "Days until usage and cost of a request are deleted. Those of the running month stay while a limit counts months. 0: never."),
    key("store", "audit_days", "400", "Days until audit events are deleted. 0: never."),
    optional("counters", "url", "\"redis://10.0.0.7:6379/0\"", "URL of Redis or Valkey (redis://, rediss:// with TLS, redis+unix:///path), without the password; or \"store\": the PostgreSQL of [store]."),
    optional("counters", "url_env", "\"PENSTOCK_COUNTERS_URL\"", "Instead of url: environment variable that holds the URL, which may have a password there."),
    optional("counters", "password_file", "\"/run/secrets/redis\"", "File that holds the password of Redis."),
    optional("counters", "ca_file", "\"/etc/ssl/cache-ca.pem\"", "Certificates (PEM) to verify Redis's with (rediss://), instead of the system's."),
    key("counters", "prefix", "\"penstock:\"", "Prefix of every key in Redis, so that several installations can share a server."),
    optional("hub", "folder", "\"/var/lib/penstock/models\"", "Folder of pulled models (--models-dir). Default: models in server.state_dir."),
    optional("hub", "endpoint", "\"https://huggingface.co\"", "Address of the hub, which speaks Hugging Face's API. Default: HF_ENDPOINT of the environment, else https://huggingface.co."),
    key("hub", "mirrors", "[]", "Addresses that are asked before endpoint, in their order. The token is never sent there."),
    optional("hub", "token_env", "\"HF_TOKEN\"", "Environment variable that holds the hub's token. Default: HF_TOKEN, where it is set."),
    optional("hub", "token_file", "\"/run/secrets/hub\"", "Instead of token_env: file that holds the token."),
    optional("hub", "ca_file", "\"/etc/ssl/hub-ca.pem\"", "Certificates (PEM) to verify hub and mirrors with, instead of the system's."),
    key("hub", "connections", "8", "Requests at once while a model is pulled."),
    key("batches", "concurrency", "8", "Batch requests in flight at once; live requests go first in our own pools."),
    key("batches", "lines_max", "50000", "Largest number of requests in one batch."),
    key("batches", "open_max", "100", "Largest number of open batches of one key."),
    key("batches", "key_output_bytes_max", "10737418240", "Largest size in bytes of the results that the batches of one key keep: beyond it, lines are not run and new batches are refused until results are deleted or expire."),
    key("batches", "attempts_max", "20", "Attempts at a batch request that fails with a temporary error, with backoff that doubles up to a minute."),
    key("auth", "anonymous", "\"auto\"", "Requests without a credential. auto: served as long as the listener is on loopback, the config has no credentials and no key was ever issued. allow: served. deny: refused."),
    key("auth", "failures_per_minute", "20", "Wrong keys per minute from one address (IPv6: one /64) before the address gets 429; keys that were valid before are still served. 0: no limit."),
    key("auth", "trusted_proxies", "[]", "Addresses and networks of proxies whose X-Forwarded-For gives the client's address."),
    optional("auth", "pepper_file", "\"/etc/penstock/pepper\"", "File with the secret (at least 32 bytes) for digests of issued keys; several gateways on one store need the same secret. Default: pepper in the state folder, made with the first key."),
    optional("auth", "pepper_env", "\"PENSTOCK_PEPPER\"", "Instead of pepper_file: environment variable that holds the secret."),
    key("auth", "stale_minutes", "1440", "Time for which issued keys stay valid while the store does not answer; after that they are answered 503. 0: no limit."),
    optional("keys", "id", "\"team-a\"", "Name of the key in logs; separates prefix caches, files, batches and stored responses."),
    optional("keys", "digest", "\"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\"", "SHA-256 of the key in hex: printf %s \"$KEY\" | sha256sum."),
    optional("keys", "key_env", "\"TEAM_A_KEY\"", "Instead of digest: environment variable that holds the key."),
    optional("keys", "key_file", "\"/run/secrets/team-a\"", "Instead of digest: file that holds the key."),
    optional("keys", "certificate", "\"search.internal.example\"", "Instead of digest: a name in the client's certificate (DNS name, URI or e-mail address of its subject alternative names, else its common name); a trailing * matches any ending. Needs server.tls.client_ca."),
    key("keys", "models", "[]", "Models that the key may use; a trailing * matches any ending. Empty: all."),
    key("keys", "routes", "[]", "Routes that the key may use, as docs/reference/authentication.md lists them; a trailing * matches any ending. Empty: all but /metrics, which must be named."),
    key("keys", "dialects", "[]", "APIs that the key may use: openai, anthropic, gemini, ollama. Empty: all."),
    key("keys", "addresses", "[]", "Addresses and networks that the key may be used from. Empty: all."),
    optional("keys", "expires", "2027-01-31T18:00:00Z", "Expiry of the key: a date, or date and time."),
    optional("keys", "team", "\"search\"", "Team of the key, one of [[teams]]."),
    optional("keys", "user", "\"ada@example.com\"", "Person or service that uses the key."),
    key("keys", "limits", "[]", "Ids of [[limits]] that the key counts against."),
    key("keys", "weight", "0", "Weight in fair sharing of busy workers: a key with 2 gets twice the worker time of a key with 1. 0: the team's weight, else 1."),
    optional("teams", "id", "\"search\"", "Name of the team."),
    key("teams", "models", "[]", "Models that keys of the team may use."),
    key("teams", "routes", "[]", "Routes that keys of the team may use."),
    key("teams", "dialects", "[]", "APIs that keys of the team may use."),
    key("teams", "addresses", "[]", "Addresses and networks that keys of the team may be used from."),
    optional("teams", "expires", "2027-01-31", "Expiry of all keys of the team."),
    key("teams", "limits", "[]", "Ids of [[limits]] that the keys of the team share."),
    key("teams", "weight", "1", "Weight of each key (issued ones too) and user of the team in fair sharing of busy workers."),
    optional("limits", "id", "\"standard\"", "Name of the limit, as in keys, teams, answers and metrics."),
    key("limits", "for", "\"named\"", "Scope of the limit: named (keys and teams whose limits name it), everyone, or anonymous (requests without a key)."),
    key("limits", "by", "\"key\"", "Dimension with a counter of its own: key, team, user, model, provider, address (of IPv6: each /64), or all (one counter for everything). A request without that dimension counts by its key, and without a key by its address."),
    key("limits", "models", "[]", "Models whose requests count; a trailing * matches any ending. Empty: all."),
    optional("limits", "requests_per_second", "20", "Requests in any second."),
    optional("limits", "requests_per_minute", "600", "Requests in any minute."),
    optional("limits", "requests_per_hour", "10000", "Requests in any hour."),
    optional("limits", "requests_per_day", "50000", "Requests in a day (UTC)."),
    optional("limits", "requests_per_month", "1000000", "Requests in a month of the calendar (UTC)."),
    optional("limits", "tokens_per_minute", "200000", "Prompt and output tokens in any minute."),
    optional("limits", "tokens_per_hour", "4000000", "Prompt and output tokens in any hour."),
    optional("limits", "tokens_per_day", "20000000", "Prompt and output tokens in a day (UTC)."),
    optional("limits", "tokens_per_month", "200000000", "Prompt and output tokens in a month of the calendar (UTC)."),
    optional("limits", "input_tokens_per_minute", "150000", "Prompt tokens in any minute."),
    optional("limits", "input_tokens_per_hour", "3000000", "Prompt tokens in any hour."),
    optional("limits", "input_tokens_per_day", "15000000", "Prompt tokens in a day (UTC)."),
    optional("limits", "input_tokens_per_month", "150000000", "Prompt tokens in a month of the calendar (UTC)."),
    optional("limits", "output_tokens_per_minute", "50000", "Output tokens in any minute."),
    optional("limits", "output_tokens_per_hour", "1000000", "Output tokens in any hour."),
    optional("limits", "output_tokens_per_day", "5000000", "Output tokens in a day (UTC)."),
    optional("limits", "output_tokens_per_month", "50000000", "Output tokens in a month of the calendar (UTC)."),
    optional("limits", "usd_per_minute", "0.5", "Dollars in any minute."),
    optional("limits", "usd_per_hour", "5.0", "Dollars in any hour."),
    optional("limits", "usd_per_day", "20.0", "Dollars in a day (UTC)."),
    optional("limits", "usd_per_month", "50.0", "Dollars in a month of the calendar (UTC)."),
    optional("limits", "in_flight", "64", "Requests in flight at once."),
    optional("limits", "surge_times", "10", "Largest rise: requests in any minute, as a multiple of the mean minute of the last hour. Each gateway counts alone."),
    key("limits", "surge_above", "60", "Requests in a minute that never count as a surge."),
    optional("limits", "max_tokens_default", "4096", "max_tokens for requests that set none."),
    optional("limits", "max_tokens_max", "16384", "Upper bound of max_tokens; larger values are lowered to this one."),
    key("limits", "reserve", "\"likely\"", "Amount reserved for usage that is unknown before the answer: likely (the p98 of recent requests to the model), most (a token for every byte and every attempt that may bill: together with max_tokens_default and max_tokens_max, texts never exceed the limit)."),
    key("limits", "unmetered", "\"refuse\"", "Requests whose tokens or cost cannot be known (a provider's model without a price, audio, images) under a limit that counts them: refuse, or allow."),
    key("limits", "on_store_failure", "\"open\"", "Behaviour while the shared store does not answer: open (each gateway counts alone), or closed (requests are refused)."),
    optional("jwt", "id", "\"corp\"", "Name of the issuer in logs, metrics, and tenant names of its users."),
    optional("jwt", "issuer", "\"https://sso.example.com/realms/main\"", "Exact value of the claim iss. The signing keys are discovered from it (/.well-known/openid-configuration), unless jwks_url or jwks_file is given."),
    optional("jwt", "jwks_url", "\"https://sso.example.com/keys\"", "URL of the signing keys (JWKS): https, or http on loopback."),
    optional("jwt", "jwks_file", "\"/etc/penstock/jwks.json\"", "Instead of jwks_url: file with the signing keys (JWKS); read again when the file changes."),
    optional("jwt", "audience", "[\"penstock\"]", "Accepted values of the claim aud; a token needs one of them."),
    optional("jwt", "ca_file", "\"/etc/penstock/ca.pem\"", "Certificates (PEM) to trust instead of the system's when keys are fetched."),
    key("jwt", "algorithms", "[\"RS256\", \"ES256\", \"EdDSA\"]", "Accepted signature algorithms; also RS384, RS512, PS256, PS384, PS512, ES384. The key decides which algorithm a token has."),
    key("jwt", "stale_hours", "24", "Time for which signing keys stay in use when they cannot be fetched again; after that tokens are answered 503."),
    key("jwt", "user_claim", "\"sub\"", "Claim that names the user. Dots lead into nested objects."),
    optional("jwt", "team_claim", "\"groups\"", "Claim with the user's team, or with a list of which the first entry that is a team counts."),
    optional("jwt", "teams", "{ \"6f2a-group-id\" = \"search\" }", "Map from values of team_claim to teams. Without it, the values are the team names."),
    optional("jwt", "team", "\"search\"", "Team of users whom team_claim puts in none."),
    key("jwt", "team_required", "false", "Refuse users without a team."),
    optional("jwt", "models_claim", "\"penstock.models\"", "Claim that lists the models that the user may use, as [[keys]] does; a token without the claim may use none."),
    optional("jwt", "limits_claim", "\"penstock.limits\"", "Claim that lists ids of [[limits]] that the user counts against."),
    optional("jwt", "required", "{ scope = \"ai\" }", "Claims that a token must have, with their values."),
    key("jwt", "models", "[]", "Upper bound of the models that users of this issuer may use."),
    key("jwt", "routes", "[]", "Upper bound of the routes that users of this issuer may use."),
    key("jwt", "dialects", "[]", "Upper bound of the APIs that users of this issuer may use."),
    key("jwt", "addresses", "[]", "Addresses and networks that users of this issuer may come from."),
    optional("jwt", "expires", "2027-01-31", "Date after which the issuer is no longer trusted."),
    key("jwt", "limits", "[]", "Ids of [[limits]] that users of this issuer count against."),
    optional("models", "name", "\"assistant\"", "Model name in requests."),
    key("models", "aliases", "[]", "Further names for the model; /v1/models does not list them."),
    optional("models", "to", "[{ pool = \"chat\", weight = 9 }]", "Targets that answer: { pool = \"ID\" } or { provider = \"ID\", model = \"NAME THERE\" }, each with a weight (1). Without model, the name there is the same."),
    key("models", "fallback", "[]", "Targets to try, in order, when those of to fail before their first token; same form as to, without weights."),
    key("models", "fallback_on", "[\"error\", \"timeout\", \"rate_limit\"]", "Failures for which the fallback is used; also \"context_length\", \"content_policy\", \"unsupported\"."),
    key("models", "policy", "\"weighted\"", "Load balancing among to: weighted, order (the first healthy target), least_busy, latency (time to the first token), cost, cache_aware (where most of the prompt is cached, weighed against the load there)."),
    key("models", "sticky", "\"none\"", "Affinity to one target while that target is healthy: none, key (the API key), user (the request's user), header:NAME."),
    key("models", "retries", "1", "Further attempts within to, before the fallback."),
    key("models", "retry_budget_percent", "20", "Retries and hedges allowed per hundred requests, of all keys and of each; one per second is always allowed."),
    key("models", "hedge_after_ms", "0", "Hedge: when no first token has come after this long, a second target is asked too, and the first to speak answers. Both may bill. 0: never."),
    key("models", "first_token_timeout_ms", "0", "Longest time to the first token of a streamed attempt. 0: the target's own limits."),
    key("models", "idle_timeout_ms", "0", "Longest silence within an answer that has begun. 0: the target's own limits."),
    key("models", "timeout_ms", "0", "Longest time for all attempts and the whole answer. 0: server.request_timeout_ms."),
    optional("models", "mirror", "{ pool = \"chat\", percent = 5 }", "Mirror target, which gets copies of this share of the requests; its answers are discarded, but paid for."),
    key("models", "context_tokens", "0", "Context length that /v1/models reports. 0: the shortest of to, as far as the targets or the price table give one."),
    optional("models", "price", "{ input = 0.5, cached_input = 0.05, cache_write = 0.5, output = 1.5 }", "Dollars per million tokens, instead of the price table's. Multiples for the service tiers of providers: flex (1), priority (a limit of money refuses it without one)."),
    optional("plugins", "name", "\"headers\"", "Plugin name: docs/reference/plugins.md lists them."),
    optional("plugins", "id", "\"team-header\"", "Name of this entry in logs and metrics. Default: name."),
    key("plugins", "routes", "[]", "URLs that the plugin handles, as /v1/chat/completions; a trailing * matches any ending. Empty: all that a model answers."),
    key("plugins", "models", "[]", "Models that the plugin handles, as requests name them; a trailing * matches any ending. Empty: all."),
    key("plugins", "keys", "[]", "Ids of keys whose requests the plugin handles; a trailing * matches any ending. Empty: all, and requests without a key."),
    key("plugins", "teams", "[]", "Teams whose requests the plugin handles; a trailing * matches any ending. Empty: all, and requests without a team."),
    key("plugins", "on_fail", "\"closed\"", "Behaviour when the plugin fails (an error, a panic, a timeout): closed refuses the request, open goes on without the plugin."),
    key("plugins", "timeout_ms", "5000", "Longest time of one hook of the plugin; a longer one is a failure."),
    optional("plugins", "settings", "{ }", "Settings of the plugin itself, also written as a table [plugins.settings] below its entry."),
    optional("prices", "file", "\"/etc/penstock/prices.toml\"", "Price table to use instead of the embedded one (configs/prices.toml)."),
    optional("pools", "id", "\"chat\"", "Model name in requests. Default: the name of the model's folder or file."),
    optional("pools", "model", "\"/models/qwen3-0.6b\"", "Checkpoint folder in Hugging Face's layout, a GGUF file, or the name of a pulled model, as \"Qwen/Qwen3-0.6B\" (penstock models). Default: the embedded demo model."),
    optional("pools", "adapters", "{ sql = \"/models/sql-lora\" }", "Low-rank adapters (LoRA) of the model, each served under its own name beside the model: the name, and the PEFT folder (adapter_config.json, adapter_model.safetensors). With connect, the names under which the workers were started (--adapter); the folders are theirs. docs/guide/adapters.md"),
    key("pools", "quantize", "\"none\"", "Round matrices while they are loaded: int8 (8 bits, one scale per row: half of the memory of bf16), int4 (4 bits, one scale per 32 weights, the head in 8 bits: a third), or none."),
    key("pools", "task", "\"auto\"", "What the model makes: generate (text), embed (vectors), rerank (scores, by a classification head, or by the answers yes and no of Qwen3-Reranker). auto: vectors where the checkpoint is an encoder or has the files of sentence-transformers (in a GGUF file: the key pooling_type), scores where it is an encoder with a classification head, else text. docs/guide/models.md"),
    key("pools", "tool_call_parser", "\"auto\"", "Format in which the model writes tool calls, by its name in docs/reference/tool-calls.md (vLLM's names too). auto: the one that the chat template shows. none: calls stay text."),
    key("pools", "reasoning_parser", "\"auto\"", "Marks of the model's reasoning, by their name in docs/reference/tool-calls.md (vLLM's names too). auto: those of the checkpoint. none: reasoning stays text."),
    key("pools", "hold_tool_calls", "false", "Hold every call that the model begins to the schema of its tool, also of tools without strict, under tool_choice auto."),
    key("pools", "json_separators", "\"compact\"", "Blanks of JSON that an answer is held to: compact has none; spaced has one behind each comma and colon, as most models were trained to write it. A small model answers better under spaced."),
    key("pools", "foreign_reasoning", "\"refuse\"", "Thinking blocks of the Anthropic API that come back with a signature that no gateway of this store made for that text, key and model: refuse (400, as Anthropic's API does), or drop (leave them out of the prompt, where a model has providers beside the pool)."),
    key("pools", "workers", "1", "Number of local worker processes of the pool, on disjoint cores."),
    optional("pools", "connect", "[\"unix:///run/penstock/worker.sock\"]", "Instead of workers: addresses of workers that are started elsewhere, unix://PATH or tcp://HOST:PORT. Their settings (threads, device, quantize, memory for KV, context_tokens and others) are on their own command lines: penstock worker --help."),
    optional("pools", "key_file", "\"/run/secrets/pool\"", "File with the secret that the gateway and workers on TCP share."),
    optional("pools", "tls_certificate", "\"/etc/penstock/gateway.pem\"", "Certificate chain (PEM) shown to workers on TCP: with tls_key and tls_ca, connections to them are TLS with certificates at both ends (penstock worker --tls-certificate)."),
    optional("pools", "tls_key", "\"/etc/penstock/gateway-key.pem\"", "Private key (PEM) of tls_certificate."),
    optional("pools", "tls_ca", "\"/etc/penstock/pool-ca.pem\"", "Certificate authorities (PEM) of the workers' certificates; no others are trusted."),
    key("pools", "threads", "0", "Threads per worker. 0: the cores shared out among the workers, no more than the CPU quota of the cgroup (container) allows."),
    key("pools", "device", "\"auto\"", "Device of the workers: auto (an NVIDIA GPU whose kernels have been measured, or else the CPU), cpu, cuda, or reference (slow, obvious, for comparison)."),
    key("pools", "path", "\"auto\"", "CPU instruction set: auto, or one that penstock check lists; the others are for tests."),
    key("pools", "context_tokens", "0", "Longest sequence, in tokens. 0: the model's context length, as far as memory goes."),
    key("pools", "kv_format", "\"bf16\"", "Form of keys and values in the KV cache: bf16, or int8 (8 bits, with one scale per token, head and part: about half of the memory; on the CPU). docs/guide/models.md"),
    key("pools", "kv_bytes_max", "0", "Memory for KV blocks per worker, in bytes. 0: a share of the free memory of the machine and within the limits of its cgroups (containers)."),
    optional("pools", "gpu_memory_share", "0.45", "Share of its GPU's memory that a worker may take in all, for weights, activations and KV blocks: above 0, up to 1. (Elsewhere: gpu_memory_utilization.) Default: 90 % of what is free beside weights and activations becomes KV, shared out among the workers. Has no effect on a CPU. docs/guide/gpu.md"),
    optional("pools", "kv_disk_path", "\"/var/cache/penstock/kv\"", "Folder of the disk tier, for KV blocks that do not fit into memory. Restarted workers find them again. Needs kv_disk_bytes."),
    key("pools", "kv_disk_bytes", "0", "Disk space per worker for KV blocks. 0: no disk tier."),
    key("pools", "kv_host_bytes", "0", "Host memory per worker for KV blocks of a device with memory of its own. 0: no host tier."),
    optional("pools", "kv_remote", "\"redis://10.0.0.7:6379/1\"", "URL of the remote tier, for KV blocks that all workers share: Redis or Valkey (redis://, rediss:// with TLS, redis+unix:///path), which should evict by itself: maxmemory-policy allkeys-lru; or a bucket of S3 (s3://BUCKET/PREFIX?endpoint=URL&region=REGION; endpoint: of a server that is not Amazon's), whose lifecycle rule should delete old objects. Without the password."),
    optional("pools", "kv_remote_password_file", "\"/run/secrets/kv\"", "File that holds the password of kv_remote; for S3 ACCESS_KEY_ID:SECRET_ACCESS_KEY. Without it S3 takes AWS's environment variables, or the instance's role."),
    key("pools", "kv_prefetch", "true", "Prefetch KV blocks from a worker's tiers for requests that wait in the queue."),
    key("pools", "shared_weights", "true", "Pack the weights once into memory that all local workers of the model share, so that each further worker needs none for them, and a restarted one does not load them again. The CPU's alone. docs/guide/models.md"),
    key("pools", "sequences_max", "0", "Largest number of concurrent sequences in a worker. 0: the worker's default."),
    key("pools", "prompt_lookup", "0", "Most draft tokens per sequence and step that are copied from where its last tokens occurred before (prompt lookup), 0 to 64. 0: none. Outputs are the same bits either way. docs/guide/models.md"),
    key("pools", "prefill_workers", "0", "Number of workers that start with the prefill role: they compute long prompts, and the KV blocks move to other workers. 0: none, or as the workers were started."),
    key("pools", "roles", "\"fixed\"", "Whether a worker's role follows the load: fixed, dry_run (what would change is logged and shown), follow."),
    key("pools", "on_demand", "false", "Start the workers when a request needs them, which then waits for the load, and stop them when nobody has asked for keep_alive. docs/guide/models.md"),
    key("pools", "keep_alive", "\"5m\"", "With on_demand: time without a request after which the workers are stopped, as 30s, 5m, 1h or a number of seconds. \"0\": at once; \"-1\": never."),
    key("pools", "replicas", "\"fixed\"", "Whether the number of workers follows the load: fixed, dry_run (what would change is logged and shown), follow. Workers that are started here are started and stopped; for those of connect, replica_command or replica_url is asked. docs/guide/replicas.md"),
    key("pools", "workers_min", "1", "Smallest number of workers, where the number of workers follows the load."),
    key("pools", "workers_max", "0", "Largest number of workers; each gets its share of cores and memory as if all were running. 0: workers, or as many as connect has addresses."),
    key("pools", "replica_idle_seconds", "120", "A worker is drained and stopped when fewer workers would have been enough for this long."),
    optional("pools", "replica_command", "[\"systemctl\", \"{action}\", \"penstock-worker@{index}\"]", "Program and arguments that start or stop a worker of connect: {action} is start or stop, {index} its place in connect from 0, {worker} its address, {replicas} the wanted number of workers, {pool}, {reason}. The same values are in its environment (PENSTOCK_ACTION and so on) and, as JSON, on its standard input. No shell reads the command."),
    optional("pools", "replica_url", "\"https://scaler.internal/penstock\"", "Instead of replica_command: URL that is sent the same JSON by POST; with replica_api = \"kubernetes\", URL of a scale."),
    key("pools", "replica_api", "\"post\"", "Protocol of replica_url: post, or kubernetes (GET and PATCH of a scale; workers come and go at the end of connect)."),
    optional("pools", "replica_token_file", "\"/var/run/secrets/kubernetes.io/serviceaccount/token\"", "File with the bearer token for replica_url; read again for every call."),
    optional("pools", "replica_ca_file", "\"/var/run/secrets/kubernetes.io/serviceaccount/ca.crt\"", "Certificates (PEM) to verify replica_url's with, instead of the system's."),
    key("pools", "replica_timeout_ms", "30000", "Longest time for an answer of the command or the service. Failures are retried with backoff that doubles up to five minutes."),
    key("pools", "queue_max", "1024", "Largest number of open requests; further ones are answered 503 with Retry-After."),
    key("pools", "ready_wait_ms", "5000", "Longest wait of a request for a ready worker; after that it is answered 503."),
    key("pools", "resume_wait_ms", "30000", "Longest wait of a request whose worker was lost for a worker that continues it; after that it ends with an error."),
    key("pools", "queue_wait_ms", "120000", "Longest wait of a request for a free worker; after that it is answered 503."),
    key("pools", "wait_loads", "3", "Lower bound of the three waits above while a worker loads or restarts, as a multiple of its last load time. 0: no lower bound. docs/reference/recovery.md"),
    key("pools", "policy", "\"cache_aware\"", "Routing policy: cache_aware (cheapest in seconds), least_load, power_of_two, round_robin, session. docs/reference/routing.md"),
    optional("pools", "slo", "{ ttft_ms = 1000, ttft_per_1k_ms = 150, tpot_ms = 100, refuse_above_percent = 400 }", "Objectives: TTFT, what each thousand prompt tokens may add to it, and time between tokens. The queue is ordered by them. A request whose predicted TTFT is above refuse_above_percent of the objective is answered 503 with Retry-After; 0 or left out: no request is refused."),
    key("pools", "balance", "true", "Migrate running requests, with their KV blocks, from a worker with long steps to one where steps would be shorter."),
    key("pools", "explain", "false", "Answer a request that has the header x-penstock-route: explain with the chosen worker and the reason, in the same header."),
    optional("pools", "record", "\"/var/log/penstock/decisions.jsonl\"", "File for the router's decisions, one JSON line per request, 256 MB at most with its predecessor: a trace that penstock simulate replays. Prefixes and tenants are numbers in it; there are no tokens and no texts."),
    optional("providers", "id", "\"acme\"", "Name of the provider in routes, logs and metrics."),
    key("providers", "protocol", "\"openai\"", "Protocol of the provider: openai (and everything compatible with it), openai_responses, azure, anthropic, gemini, vertex, bedrock."),
    optional("providers", "base_url", "\"https://api.acme.example/v1\"", "Base URL: http://, https://, or unix:///PATH/TO/SOCKET:/BASE. Default: the protocol's own service."),
    optional("providers", "key_env", "\"ACME_KEY\"", "Environment variable that holds the key."),
    key("providers", "keys_env", "[]", "Environment variables with several keys: the gateway takes them in turn, and a key that is refused or rate limited is paused."),
    optional("providers", "key_file", "\"/run/secrets/acme\"", "File that holds the key, or one key per line; read again when the file changes."),
    key("providers", "models", "[]", "Models served under their own names. [[models]] can use others too."),
    key("providers", "resolve", "false", "The host name of base_url stands for several servers, such as the pods of a headless service: each of its addresses is a target of its own (ID@ADDRESS), looked up again every 5 s, 32 at most. kv_events and kv_replay then have the same host."),
    key("providers", "discover", "false", "Ask the provider for its models at start and every ten minutes, and serve them as ID/MODEL."),
    optional("providers", "headers", "{ \"x-team\" = \"search\" }", "Header fields sent with every request."),
    optional("providers", "ca_file", "\"/etc/penstock/ca.pem\"", "Certificates (PEM) to trust instead of the system's."),
    key("providers", "connect_timeout_ms", "5000", "Longest time to connect, TLS included."),
    key("providers", "first_token_timeout_ms", "60000", "Longest time to the first event of a stream."),
    key("providers", "idle_timeout_ms", "60000", "Longest silence within an answer."),
    key("providers", "answer_timeout_ms", "600000", "Longest time to the begin of an answer that is not streamed."),
    optional("providers", "api_version", "\"2024-10-21\"", "Azure: api-version of the URLs."),
    optional("providers", "region", "\"eu-central-1\"", "Bedrock and Vertex: region of the models."),
    optional("providers", "project", "\"my-project\"", "Vertex: project that is billed."),
    optional("providers", "health_path", "\"/models\"", "Path behind base_url for health checks, which are sent with a key; a status below 500 is healthy. Targets of an unhealthy provider in [[models]] are left out before requests have failed."),
    key("providers", "health_interval_ms", "10000", "Interval of health checks; an answer that takes longer counts as a failure."),
    key("providers", "in_flight_max", "4096", "Largest number of requests in flight; further ones are answered 503 with Retry-After."),
    key("providers", "requests_per_minute", "0", "Requests a minute that the provider allows each key, as it publishes them: the gateway sends requests at that pace. 0: not known."),
    key("providers", "tokens_per_minute", "0", "Tokens a minute that the provider allows each key, prompts and answers together: reserved before a request is sent, corrected by the usage of its answer. 0: not known."),
    key("providers", "pace_wait_ms", "5000", "Longest wait of a request for that pace; after that the next target is asked, or the client gets a 429 with Retry-After."),
    key("providers", "pace_gateways", "1", "Number of gateways that use the same keys: each takes its part of requests_per_minute and tokens_per_minute while it has no shared counters ([counters])."),
    optional("providers", "kv_events", "\"tcp://10.0.0.7:5557\"", "PUB socket of vLLM or SGLang where the server publishes what its prefix cache holds, for policy = \"cache_aware\"."),
    optional("providers", "kv_replay", "\"tcp://10.0.0.7:5558\"", "Replay socket of the same server, for KV events from before the connection and for lost ones."),
    optional("providers", "tokenizer", "\"/models/qwen3\"", "With kv_events: folder of the model with tokenizer.json and its chat template, as the server has it."),
    key("providers", "stream_usage", "true", "Ask the provider for the token counts of streams whose client did not (stream_options.include_usage), and remove them from the client's stream."),
];

/// Default of a key as TOML; `None` if it has none.
///
/// # Panics
/// The key is not in [`KEYS`]; a test reads every key.
pub(super) fn default_of(table: &str, name: &str) -> Option<&'static str> {
    let found = KEYS.iter().find(|key| key.table == table && key.name == name);
    found.expect("every key that is read is in KEYS (tested)").default.ok()
}

/// Text of `configs/penstock.toml`: every key with its default.
pub fn example() -> String {
    let mut out = String::from(
        "# Every key of penstock's config with its default. Keys without a default are commented out, with an example.\n\
         # Unknown keys are refused; `penstock check --config FILE` reports all faults of a file at once.\n",
    );
    for table in TABLES {
        let hash = if table.many { "# " } else { "" };
        let brackets = if table.many { ("[[", "]]") } else { ("[", "]") };
        let _ = write!(out, "\n# {}\n{hash}{}{}{}\n", table.doc, brackets.0, table.name, brackets.1);
        for key in KEYS.iter().filter(|key| key.table == table.name) {
            let _ = match key.default {
                Ok(default) => write!(out, "# {}\n{hash}{} = {default}\n", key.doc, key.name),
                Err(example) => write!(out, "# {}\n# {} = {example}\n", key.doc, key.name),
            };
        }
    }
    out
}

/// Text of the reference page `docs/reference/config.md`, rendered from [`TABLES`] and [`KEYS`].
pub fn reference() -> String {
    let mut out = String::from(
        "# Config\n\n`penstock serve --config FILE` reads one TOML file. It is checked whole: every fault is reported at once, with its\n\
         line; unknown keys are faults. Command line options win over the file. [`configs/penstock.toml`](../../configs/penstock.toml)\n\
         has every key with its default; this page and that file are made from one table (`gateway/config/src/keys.rs`).\n",
    );
    for table in TABLES {
        let brackets = if table.many { ("[[", "]]") } else { ("[", "]") };
        let _ = write!(
            out,
            "\n## `{}{}{}`\n\n{}\n\n| key | default | |\n|---|---|---|\n",
            brackets.0, table.name, brackets.1, table.doc
        );
        for key in KEYS.iter().filter(|key| key.table == table.name) {
            let default =
                key.default.map_or_else(|example| format!("none; `{example}`"), |default| format!("`{default}`"));
            let _ =
                writeln!(out, "| `{}` | {} | {} |", key.name, default.replace('|', "\\|"), key.doc.replace('|', "\\|"));
        }
    }
    out
}
