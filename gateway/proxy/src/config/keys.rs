//! Table of all config keys with default and description. The example file and the reference page are rendered from it.

use std::fmt::Write;

/// Key of the config.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Name of the table, as `server`; `pools` for an array of tables.
    pub table: &'static str,
    /// Name of the key within the table.
    pub name: &'static str,
    /// Default as TOML; `Err`: an example, for a key without a default.
    pub default: Result<&'static str, &'static str>,
    /// Description in one or two sentences.
    pub doc: &'static str,
}

/// Table of the config.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// Name of the table; dots lead to nested tables.
    pub name: &'static str,
    /// Array of tables: written `[[name]]`, any number of times.
    pub many: bool,
    /// Description in one sentence.
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
    table("server", false, "Listeners and the limits of what clients may do."),
    table("server.tls", false, "TLS of the TCP listener; off without a certificate."),
    table("cors", false, "Web pages of other origins that may use the gateway from a browser (CORS). None without it. docs/reference/http.md"),
    table("admin", false, "The admin API, on a listener of its own. docs/reference/admin.md"),
    table("admin_keys", true, "A key of the admin API. Without any, one is made at the first start and kept in server.state_dir, for this machine alone."),
    table("stream", false, "How streamed answers are sent."),
    table("log", false, "What is written where. Prompts, completions and keys are never logged."),
    table("telemetry", false, "Traces, by OpenTelemetry's names. Prompts, completions and keys are never in them."),
    table("store", false, "Where issued keys, the ledger, files, batches and stored responses are kept: one SQLite database, or PostgreSQL, which several gateways can share. docs/reference/stores.md"),
    table("counters", false, "Where several gateways count together what limits count. Without a URL each counts by itself."),
    table("batches", false, "How batches are run."),
    table("auth", false, "Who is let in. Keys are in [[keys]], or issued (penstock keys)."),
    table("keys", true, "An API key. What it may do is what its own lists and its team's allow; an empty list allows everything."),
    table("teams", true, "People and services that share a scope and limits."),
    table("limits", true, "How much may be used: all measures of a limit hold at once. Reserved before a request is sent on, settled with what it really used."),
    table("jwt", true, "An identity provider (OpenID Connect) whose access tokens are credentials."),
    table("models", true, "A name in requests, and who answers it. Pools and the models of providers need none: they are served under their own names."),
    table("plugins", true, "Something that is done to requests and answers, in the order of the file for requests and the other way round for answers."),
    table("prices", false, "What providers' models cost."),
    table("pools", true, "A model and the workers that serve it. Without any, and without providers, the embedded demo model is served."),
    table("providers", true, "Somebody else's service that answers requests."),
];

/// All keys, in the order of the file.
#[rustfmt::skip]
pub const KEYS: &[Key] = &[
    key("server", "listen", "\"127.0.0.1:8080\"", "Address and port for HTTP/1.1 and HTTP/2 (on one port; without TLS, HTTP/2 with prior knowledge)."),
    optional("server", "unix", "\"/run/penstock/http.sock\"", "Also listen on this Unix socket."),
    key("server", "hosts", "[]", "Names in the Host header that are accepted where no credential is needed, besides addresses and localhost; *.example stands for every name below example."),
    optional("server", "state_dir", "\"/var/lib/penstock\"", "Sockets, leases and logs of local workers. Default: penstock in $XDG_STATE_HOME or ~/.local/state."),
    key("server", "threads", "0", "Threads for connections. 0: one per core, at most 4."),
    key("server", "connections_max", "16384", "Client connections at once, as far as the limit of file descriptors goes (the log and penstock check say). Beyond it the connection that has waited longest for a request gives way; where all are busy, new ones are answered 503."),
    key("server", "address_connections_max", "2048", "Connections of one address (IPv6: one /64) at once; more are closed. Not for loopback and auth.trusted_proxies. 0: no limit."),
    key("server", "address_connections_per_second", "200", "New connections of one address in a second, over ten seconds; more are closed. Not for loopback and auth.trusted_proxies. 0: no limit."),
    key("server", "head_bytes_max", "32768", "Largest request head (request line and header fields)."),
    key("server", "body_bytes_max", "33554432", "Largest request body."),
    key("server", "body_memory_bytes_max", "536870912", "Memory for all request bodies together; when it is used up, requests are answered 503 with Retry-After. Up to an eighth is kept for bodies of at most 64 KiB."),
    key("server", "answer_memory_bytes_max", "536870912", "Memory for all that is held of answers together: whole answers, events that have not ended, what is collected to be kept. When it is used up, what would need more is answered 503 with Retry-After, and a stream ends as broken. Up to an eighth is kept for answers that hold at most 64 KiB."),
    key("server", "event_bytes_max", "4194304", "Largest event of a stream of text that a provider may send; a larger one ends the stream as broken."),
    key("server", "image_event_bytes_max", "33554432", "The same where an event can carry an image: Gemini and Responses."),
    key("server", "head_timeout_ms", "15000", "A request head must be complete after this long, however slowly it comes."),
    key("server", "body_timeout_ms", "30000", "Every window of this length must bring body_rate_bytes_min times it, or the rest of the request body."),
    key("server", "body_rate_bytes_min", "1024", "Slowest sender that is waited for, in bytes per second."),
    key("server", "idle_timeout_ms", "75000", "A connection without a request is closed after this long."),
    key("server", "write_stall_ms", "20000", "A client that takes nothing of its answer for this long is cut off."),
    key("server", "request_timeout_ms", "0", "Longest time for one answer. 0: no limit."),
    key("server", "h2_streams_max", "128", "HTTP/2: requests at once on one connection."),
    key("server", "h2_header_list_bytes_max", "32768", "HTTP/2: largest decoded header list."),
    optional("server", "moderation_model", "\"assistant\"", "The model that /v1/moderations asks where a request names none, by its name in requests. Without it, such requests are 404."),
    key("server", "explain", "false", "Say on every answer of a [[models]] entry who gave it (x-penstock-target) and after how many attempts (x-penstock-attempts); else only when there were several."),
    key("server", "cost_header", "false", "Say on every answer what it cost (x-penstock-cost), as the request header x-penstock-cost: 1 does for one."),
    key("server", "watch", "true", "Take up changes of the config file when it is written or replaced; SIGHUP does so in any case. A file with a fault changes nothing."),
    key("server", "config_writes", "false", "Write to the config file what the admin API applies. Otherwise it is in force until the file changes, is reloaded, or the gateway restarts."),
    key("server", "grace_ms", "30000", "After SIGTERM, answers in progress may take this long."),
    key("server", "upgrade_grace_ms", "3600000", "After an upgrade, answers that the old process began may take this long there."),
    optional("server.tls", "certificate", "\"/etc/penstock/cert.pem\"", "Certificate chain (PEM). With it the TCP listener speaks TLS 1.2 and 1.3, with ALPN for HTTP/2, and nothing else."),
    optional("server.tls", "key", "\"/etc/penstock/key.pem\"", "Private key (PEM) of the certificate."),
    key("cors", "origins", "[]", "Origins, as https://app.example or http://localhost:3000, compared exactly. \"*\": every one, only where everybody needs a credential."),
    key("cors", "max_age_seconds", "600", "How long a browser may remember what a preflight was told."),
    optional("admin", "listen", "\"127.0.0.1:8081\"", "Address and port of the admin API; \"off\": none. Beyond loopback it needs [[admin_keys]]. Default: 127.0.0.1:8081, or a free port where that is taken (penstock admin finds it)."),
    optional("admin", "unix", "\"/run/penstock/admin.sock\"", "Also serve it on this Unix socket, which only this user can open."),
    key("admin", "hosts", "[]", "Names in the Host header that are accepted, besides addresses and localhost."),
    key("admin", "origins", "[]", "Web origins, as https://console.example, whose pages may use it, besides its own."),
    optional("admin_keys", "id", "\"ops\"", "Name of the key in the audit log."),
    optional("admin_keys", "digest", "\"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\"", "SHA-256 of the key in hex: printf %s \"$KEY\" | sha256sum."),
    optional("admin_keys", "key_env", "\"PENSTOCK_ADMIN_KEY\"", "Instead of digest: environment variable that holds the key."),
    optional("admin_keys", "key_file", "\"/run/secrets/penstock-admin\"", "Instead of digest: file that holds the key."),
    key("admin_keys", "role", "\"viewer\"", "viewer (sees everything but the audit log), operator (also cancels requests, drains workers, revokes keys), owner (also keys, limits and config)."),
    optional("server.tls", "client_ca", "\"/etc/penstock/clients.pem\"", "Authorities (PEM) of clients' certificates; whose they are is in [[keys]] (certificate)."),
    key("server.tls", "client_auth", "\"optional\"", "With client_ca, whether a client must have a certificate: optional or required."),
    key("stream", "commit_ms", "300", "Status and headers of a stream wait for its first token, but not longer than this; before that, an error still has its own status."),
    key("stream", "heartbeat_ms", "15000", "A comment is sent on a stream that is silent for this long, so that proxies keep it open."),
    key("log", "level", "\"info\"", "Log level or filter directives (tracing syntax) for standard error."),
    key("log", "access", "\"-\"", "One JSON line per request: \"-\" for standard output, \"off\", or a path."),
    optional("telemetry", "otlp_url", "\"http://127.0.0.1:4318\"", "Base URL of an OpenTelemetry collector (OTLP over HTTP): traces go to /v1/traces there. Without it requests carry no trace."),
    optional("telemetry", "otlp_headers", "{ \"x-team\" = \"search\" }", "Header fields sent with them."),
    optional("telemetry", "otlp_headers_env", "\"OTEL_EXPORTER_OTLP_HEADERS\"", "Environment variable with more of them: name=value,name=value."),
    optional("telemetry", "otlp_ca_file", "\"/etc/penstock/ca.pem\"", "Certificates (PEM) to trust instead of the system's."),
    key("telemetry", "service_name", "\"penstock\"", "service.name of the traces."),
    key("telemetry", "sample_ratio", "1.0", "Share of the requests that are traced, where the client does not say."),
    key("telemetry", "follow_clients", "true", "Go on with the trace that a client's traceparent names; whether the request is traced is then the client's choice."),
    optional("store", "path", "\"/var/lib/penstock/penstock.db\"", "The database; \":memory:\" keeps nothing beyond the process. Default: penstock.db in server.state_dir."),
    optional("store", "url", "\"postgres://penstock@db.internal/penstock?sslmode=require\"", "Instead of path: PostgreSQL, without its password."),
    optional("store", "url_env", "\"PENSTOCK_STORE_URL\"", "Instead of url: environment variable that holds it; here it may have a password."),
    optional("store", "password_file", "\"/run/secrets/postgres\"", "File that holds the password of PostgreSQL."),
    optional("store", "ca_file", "\"/etc/ssl/db-ca.pem\"", "Certificates that PostgreSQL's is checked against, instead of the system's."),
    key("store", "connections", "8", "Connections to PostgreSQL at most, beside two that only wait."),
    key("store", "bytes_max", "0", "Size that the SQLite database may have; when it is used up, uploads are answered 507. 0: the disk's."),
    key("store", "file_bytes_max", "536870912", "Largest file; server.body_bytes_max bounds it too."),
    key("store", "key_bytes_max", "10737418240", "All uploaded files of one key together."),
    key("store", "key_response_bytes_max", "1073741824", "All stored responses of one key together; when it is used up, the oldest that have ended are deleted."),
    key("store", "response_bytes_max", "17179869184", "All stored responses of all keys together, at most half of bytes_max where that is set; when it is used up, the oldest of the key that keeps most are deleted."),
    key("store", "response_days", "30", "Stored responses are deleted after this many days."),
    key("store", "ledger_days", "400", "What requests used and cost is forgotten after this many days; longer than any budget's window. 0: never."),
    key("store", "audit_days", "400", "The audit log forgets after this many days. 0: never."),
    optional("counters", "url", "\"redis://10.0.0.7:6379/0\"", "Redis or Valkey (redis://, rediss:// with TLS, redis+unix:///path), without its password; or \"store\": the PostgreSQL of [store]."),
    optional("counters", "url_env", "\"PENSTOCK_COUNTERS_URL\"", "Instead of url: environment variable that holds it; here it may have a password."),
    optional("counters", "password_file", "\"/run/secrets/redis\"", "File that holds the password of Redis."),
    optional("counters", "ca_file", "\"/etc/ssl/cache-ca.pem\"", "Certificates that the Redis's is checked against (rediss://), instead of the system's."),
    key("counters", "prefix", "\"penstock:\"", "Before every key in Redis, so that several installations can share a server."),
    key("batches", "concurrency", "8", "Requests of batches that are answered at once; live requests go first in our own pools."),
    key("batches", "lines_max", "50000", "Requests of one batch."),
    key("batches", "open_max", "100", "Batches of one key that have not ended."),
    key("batches", "attempts_max", "20", "A request that fails in a way that can pass is tried this often, with pauses that double up to a minute."),
    key("auth", "anonymous", "\"auto\"", "Who is served without a credential. auto: everybody, as long as the listener is on loopback, the config knows no credentials and no key was ever issued. allow: everybody. deny: nobody."),
    key("auth", "failures_per_minute", "20", "Wrong keys from one address (IPv6: one /64) before it is answered 429; keys that have been good before are served all the same. 0: no limit."),
    key("auth", "trusted_proxies", "[]", "Addresses and networks of proxies whose X-Forwarded-For says who the client is."),
    optional("auth", "pepper_file", "\"/etc/penstock/pepper\"", "File with the secret (at least 32 bytes) under which issued keys are digested; several gateways on one store need the same. Default: pepper in the state folder, made with the first key."),
    optional("auth", "pepper_env", "\"PENSTOCK_PEPPER\"", "Instead of pepper_file: environment variable that holds it."),
    key("auth", "stale_minutes", "1440", "For how long issued keys are good while the store does not answer; then they are answered 503. 0: for ever."),
    optional("keys", "id", "\"team-a\"", "Name of the key in logs; separates prefix caches, files, batches and stored responses."),
    optional("keys", "digest", "\"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\"", "SHA-256 of the key in hex: printf %s \"$KEY\" | sha256sum."),
    optional("keys", "key_env", "\"TEAM_A_KEY\"", "Instead of digest: environment variable that holds the key."),
    optional("keys", "key_file", "\"/run/secrets/team-a\"", "Instead of digest: file that holds the key."),
    optional("keys", "certificate", "\"search.internal.example\"", "Instead of digest: a name in the client's certificate (DNS name, URI or e-mail address of its subject alternative names, else its common name); a trailing * matches any ending. Needs server.tls.client_ca."),
    key("keys", "models", "[]", "Models that the key may use; a trailing * matches any ending. Empty: all."),
    key("keys", "routes", "[]", "Routes that the key may use, as docs/reference/authentication.md lists them; a trailing * matches any ending. Empty: all but /metrics, which must be named."),
    key("keys", "dialects", "[]", "APIs that the key may use: openai, anthropic, gemini. Empty: all."),
    key("keys", "addresses", "[]", "Addresses and networks that the key may be used from. Empty: all."),
    optional("keys", "expires", "2027-01-31T18:00:00Z", "When the key stops being good: a date, or date and time."),
    optional("keys", "team", "\"search\"", "Team of the key, one of [[teams]]."),
    optional("keys", "user", "\"ada@example.com\"", "The person or service behind the key."),
    key("keys", "limits", "[]", "Ids of [[limits]] that the key is under."),
    key("keys", "weight", "0", "Share of busy workers against other keys': with 2, twice as much of their time. 0: its team's, else 1."),
    optional("teams", "id", "\"search\"", "Name of the team."),
    key("teams", "models", "[]", "Models that its keys may use."),
    key("teams", "routes", "[]", "Routes that its keys may use."),
    key("teams", "dialects", "[]", "APIs that its keys may use."),
    key("teams", "addresses", "[]", "Addresses and networks that its keys may be used from."),
    optional("teams", "expires", "2027-01-31", "When none of its keys is good any more."),
    key("teams", "limits", "[]", "Ids of [[limits]] that its keys share."),
    key("teams", "weight", "1", "Share of busy workers that each of its keys (issued ones too) and users has against others'."),
    optional("limits", "id", "\"standard\"", "Name of the limit: keys and teams name it, answers and metrics say it."),
    key("limits", "for", "\"named\"", "named (the keys and teams whose limits name it), everyone, or anonymous (requests without a key)."),
    key("limits", "by", "\"key\"", "What has a counter of its own: key, team, user, model, provider, address (of IPv6: each /64), or all (one counter for everything). What a request lacks is its key, and without a key its address."),
    key("limits", "models", "[]", "Count only requests for these; a trailing * matches any ending. Empty: all."),
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
    optional("limits", "in_flight", "64", "Requests at once."),
    optional("limits", "surge_times", "10", "Slow down sudden rises: in any minute, at most so many times the requests of the mean minute of the last hour. Counted by each gateway for itself."),
    key("limits", "surge_above", "60", "Requests in a minute that are no sudden rise, whatever is usual."),
    optional("limits", "max_tokens_default", "4096", "Output tokens for requests that name no bound: they are sent on with this one."),
    optional("limits", "max_tokens_max", "16384", "Larger bounds are lowered to this one."),
    key("limits", "reserve", "\"likely\"", "How much is reserved for what is not known before the answer: likely (what 98 of 100 requests to the model have needed), most (a token for every byte and every attempt that may bill: together with max_tokens_default and max_tokens_max, texts never exceed the limit)."),
    key("limits", "unmetered", "\"refuse\"", "Requests whose tokens or cost nobody can know (a provider's model without a price, audio, images) under a limit that counts them: refuse, or allow."),
    key("limits", "on_store_failure", "\"open\"", "While the store that several gateways share does not answer: open (each gateway goes on with counters of its own), or closed (requests are refused)."),
    optional("jwt", "id", "\"corp\"", "Name in logs and metrics, and in the names of its users' tenants."),
    optional("jwt", "issuer", "\"https://sso.example.com/realms/main\"", "What the claim iss of its tokens is, to the letter. Its keys are found behind it (/.well-known/openid-configuration), unless one of the next two is given."),
    optional("jwt", "jwks_url", "\"https://sso.example.com/keys\"", "Where its keys (JWKS) are. https, or http on loopback."),
    optional("jwt", "jwks_file", "\"/etc/penstock/jwks.json\"", "Instead of jwks_url: file with its keys; read again when it changes."),
    optional("jwt", "audience", "[\"penstock\"]", "What the claim aud must be, or have one of."),
    optional("jwt", "ca_file", "\"/etc/penstock/ca.pem\"", "Certificates (PEM) to trust instead of the system's when keys are fetched."),
    key("jwt", "algorithms", "[\"RS256\", \"ES256\", \"EdDSA\"]", "What its keys may be for; also RS384, RS512, PS256, PS384, PS512, ES384. The key decides which one a token has."),
    key("jwt", "stale_hours", "24", "For how long its keys are used when they cannot be fetched anew; then its tokens are answered 503."),
    key("jwt", "user_claim", "\"sub\"", "Claim that names the user. Dots lead into objects."),
    optional("jwt", "team_claim", "\"groups\"", "Claim with the user's team, or with a list of which the first that is a team counts."),
    optional("jwt", "teams", "{ \"6f2a-group-id\" = \"search\" }", "Values of team_claim, and the teams that they mean. Without it, they are the teams."),
    optional("jwt", "team", "\"search\"", "Team of everybody whom team_claim puts in none."),
    key("jwt", "team_required", "false", "Refuse users without a team."),
    optional("jwt", "models_claim", "\"penstock.models\"", "Claim that lists the models that the user may use, as [[keys]] does; without it in the token, none."),
    optional("jwt", "limits_claim", "\"penstock.limits\"", "Claim that lists ids of [[limits]] that the user is under."),
    optional("jwt", "required", "{ scope = \"ai\" }", "Claims, and what they must be or have."),
    key("jwt", "models", "[]", "Models that its users may use at most."),
    key("jwt", "routes", "[]", "Routes that its users may use at most."),
    key("jwt", "dialects", "[]", "APIs that its users may use at most."),
    key("jwt", "addresses", "[]", "Addresses and networks that its users may come from."),
    optional("jwt", "expires", "2027-01-31", "When it is not trusted any more."),
    key("jwt", "limits", "[]", "Ids of [[limits]] that its users are under."),
    optional("models", "name", "\"assistant\"", "Name in requests."),
    key("models", "aliases", "[]", "Other names that mean the same; not listed by /v1/models."),
    optional("models", "to", "[{ pool = \"chat\", weight = 9 }]", "Who answers: { pool = \"ID\" } or { provider = \"ID\", model = \"NAME THERE\" }, each with a weight (1). Without model, the name there is the same."),
    key("models", "fallback", "[]", "Who answers when these fail before their first token, in order; as to, without weights."),
    key("models", "fallback_on", "[\"error\", \"timeout\", \"rate_limit\"]", "For which failures the fallback is used; also \"context_length\", \"content_policy\", \"unsupported\"."),
    key("models", "policy", "\"weighted\"", "How requests are shared among to: weighted, order (the first that is healthy), least_busy, latency (time to the first token), cost, cache_aware (where most of the prompt is cached, weighed against what is there already)."),
    key("models", "sticky", "\"none\"", "What stays at one target while that is healthy: none, key (the API key), user (the request's user), header:NAME."),
    key("models", "retries", "1", "Further attempts within to, before the fallback."),
    key("models", "retry_budget_percent", "20", "Retries and hedges per hundred requests; besides, one per second is always allowed."),
    key("models", "hedge_after_ms", "0", "When no first token came for this long, a second target is asked too and the first to speak answers. Both may bill. 0: never."),
    key("models", "first_token_timeout_ms", "0", "A streamed attempt without a first token fails after this long. 0: the target's own limits."),
    key("models", "idle_timeout_ms", "0", "An answer that has begun and is silent for this long fails. 0: the target's own limits."),
    key("models", "timeout_ms", "0", "Longest time for all attempts and the whole answer. 0: server.request_timeout_ms."),
    optional("models", "mirror", "{ pool = \"chat\", percent = 5 }", "Who gets copies of this share of the requests; the answers are thrown away, but paid for."),
    key("models", "context_tokens", "0", "Longest sequence, as /v1/models says it. 0: the shortest of to, as far as they or the price table say it."),
    optional("models", "price", "{ input = 0.5, cached_input = 0.05, cache_write = 0.5, output = 1.5 }", "Dollars per million tokens, instead of the price table's. Multiples for the service tiers of providers: flex (1), priority (a limit of money refuses it without one)."),
    optional("plugins", "name", "\"headers\"", "Which plugin: docs/reference/plugins.md lists them."),
    optional("plugins", "id", "\"team-header\"", "Name of this entry in logs and metrics. Default: name."),
    key("plugins", "routes", "[]", "URLs that it is for, as /v1/chat/completions; a trailing * matches any ending. Empty: all that a model answers."),
    key("plugins", "models", "[]", "Models that it is for, as requests name them; a trailing * matches any ending. Empty: all."),
    key("plugins", "keys", "[]", "Keys that it is for, by their ids; a trailing * matches any ending. Empty: all, and requests without a key."),
    key("plugins", "teams", "[]", "Teams that it is for; a trailing * matches any ending. Empty: all, and requests without a team."),
    key("plugins", "on_fail", "\"closed\"", "What becomes of a request when the plugin fails (an error, a panic, no end in time): closed refuses it, open goes on without the plugin."),
    key("plugins", "timeout_ms", "5000", "Longest time of one step of the plugin; more is a failure."),
    optional("plugins", "settings", "{ }", "Settings of the plugin itself, also written as a table [plugins.settings] below its entry."),
    optional("prices", "file", "\"/etc/penstock/prices.toml\"", "Price table to use instead of the embedded one (configs/prices.toml)."),
    optional("pools", "id", "\"chat\"", "Model name in requests. Default: the folder name of the model."),
    optional("pools", "model", "\"/models/qwen3-0.6b\"", "Checkpoint folder in Hugging Face's layout. Default: the embedded demo model."),
    key("pools", "workers", "1", "Worker processes started for the pool, on disjoint cores."),
    optional("pools", "connect", "[\"unix:///run/penstock/worker.sock\"]", "Instead of workers: addresses of workers that are started elsewhere, unix://PATH or tcp://HOST:PORT."),
    optional("pools", "key_file", "\"/run/secrets/pool\"", "File with the secret shared with workers on TCP."),
    optional("pools", "tls_certificate", "\"/etc/penstock/gateway.pem\"", "Certificate chain (PEM) shown to workers on TCP: with tls_key and tls_ca, connections to them are TLS with certificates at both ends (penstock worker --tls-certificate)."),
    optional("pools", "tls_key", "\"/etc/penstock/gateway-key.pem\"", "Private key (PEM) of that certificate."),
    optional("pools", "tls_ca", "\"/etc/penstock/pool-ca.pem\"", "Authorities (PEM) of workers' certificates; nobody else is trusted."),
    key("pools", "threads", "0", "Threads per worker. 0: the cores shared out among the workers, no more than the CPU quota of the cgroup (container) allows."),
    key("pools", "device", "\"auto\"", "auto, cpu, or reference (slow, obvious, for comparison)."),
    key("pools", "path", "\"auto\"", "CPU instructions: auto, or one that penstock check lists; the others are for tests."),
    key("pools", "context_tokens", "0", "Longest sequence served. 0: what the model was trained for, as far as memory goes."),
    key("pools", "kv_bytes_max", "0", "Memory for KV blocks per worker. 0: a share of what is free, on the machine and within the limits of its cgroups (containers)."),
    optional("pools", "kv_disk_path", "\"/var/cache/penstock/kv\"", "Folder for KV blocks that memory has no room for. Workers that start again find them. Needs kv_disk_bytes."),
    key("pools", "kv_disk_bytes", "0", "How much of that disk each worker uses. 0: none."),
    key("pools", "kv_host_bytes", "0", "Memory of the host per worker for KV blocks of a device that has its own. 0: none."),
    optional("pools", "kv_remote", "\"redis://10.0.0.7:6379/1\"", "KV blocks that all workers share, in Redis or Valkey (redis://, rediss:// with TLS, redis+unix:///path), which should evict by itself: maxmemory-policy allkeys-lru; or in a bucket of S3 (s3://BUCKET/PREFIX?endpoint=URL&region=REGION; endpoint: of a server that is not Amazon's), whose lifecycle rule should delete what is old. Without its password."),
    optional("pools", "kv_remote_password_file", "\"/run/secrets/kv\"", "File that holds its password; for S3 ACCESS_KEY_ID:SECRET_ACCESS_KEY. Without it S3 takes AWS's environment variables, or the instance's role."),
    key("pools", "kv_prefetch", "true", "Blocks of requests that wait for their turn are loaded from a worker's tiers meanwhile."),
    key("pools", "sequences_max", "0", "Sequences that run at once in a worker. 0: the worker's default."),
    key("pools", "prefill_workers", "0", "Workers that prefill for the others at the start: long prompts are computed there, and their KV moves. 0: none, or as the workers were started."),
    key("pools", "roles", "\"fixed\"", "Whether a worker's role follows the load: fixed, dry_run (what would change is logged and shown), follow."),
    key("pools", "replicas", "\"fixed\"", "Whether the number of workers follows the load: fixed, dry_run (what would change is logged and shown), follow. Workers that are started here are started and stopped; for those of connect, replica_command or replica_url is asked. docs/guide/replicas.md"),
    key("pools", "workers_min", "1", "Workers at least, where their number follows the load."),
    key("pools", "workers_max", "0", "Workers at most; each has its share of cores and memory as if all were there. 0: workers, or as many as connect has addresses."),
    key("pools", "replica_idle_seconds", "120", "A worker is stopped when fewer would have been enough for this long. Nothing is cut off: it is emptied first."),
    optional("pools", "replica_command", "[\"systemctl\", \"{action}\", \"penstock-worker@{index}\"]", "Program and arguments that start or stop a worker of connect: {action} is start or stop, {index} its place in connect from 0, {worker} its address, {replicas} how many there should be then, {pool}, {reason}. The same is in its environment (PENSTOCK_ACTION and so on) and, as JSON, on its standard input. No shell reads it."),
    optional("pools", "replica_url", "\"https://scaler.internal/penstock\"", "Instead of replica_command: URL that is sent the same JSON by POST; with replica_api = \"kubernetes\", URL of a scale."),
    key("pools", "replica_api", "\"post\"", "What replica_url speaks: post, or kubernetes (GET and PATCH of a scale; workers come and go at the end of connect)."),
    optional("pools", "replica_token_file", "\"/var/run/secrets/kubernetes.io/serviceaccount/token\"", "File with the bearer token for replica_url; read again for every call."),
    optional("pools", "replica_ca_file", "\"/var/run/secrets/kubernetes.io/serviceaccount/ca.crt\"", "Certificates (PEM) that replica_url's is checked against, instead of the system's."),
    key("pools", "replica_timeout_ms", "30000", "The command or the service must have answered after this long. What fails is tried again later, with pauses that double up to five minutes."),
    key("pools", "queue_max", "1024", "Requests open at once; more are answered 503 with Retry-After."),
    key("pools", "ready_wait_ms", "5000", "A request waits this long for a worker when none is ready; then it is answered 503."),
    key("pools", "resume_wait_ms", "30000", "A request whose worker was lost waits this long for one that goes on with it; then it ends with an error."),
    key("pools", "queue_wait_ms", "120000", "A request waits this long for a free worker; then it is answered 503."),
    key("pools", "wait_loads", "3", "While a worker loads or is started again, these three are at least so many times what its last load took. 0: they are not. docs/reference/recovery.md"),
    key("pools", "policy", "\"cache_aware\"", "Which worker gets a request: cache_aware (cheapest in seconds), least_load, power_of_two, round_robin, session. docs/reference/routing.md"),
    optional("pools", "slo", "{ ttft_ms = 1000, ttft_per_1k_ms = 150, tpot_ms = 100, refuse_above_percent = 400 }", "Objectives: time to the first token, what each thousand prompt tokens may add to it, time between tokens. The queue is ordered by them. A request that is predicted to miss its first one by more than that many hundredths is answered 503 with Retry-After; 0 or left out: none is."),
    key("pools", "balance", "true", "Move requests that run, with their KV, from a worker whose steps have become long to one where they would be shorter."),
    key("pools", "explain", "false", "A request with the header x-penstock-route: explain is told in the same header of its answer who was chosen and why."),
    optional("pools", "record", "\"/var/log/penstock/decisions.jsonl\"", "File that the router's decisions are written to, one JSON line a request, 256 MB at most with its predecessor: a trace that penstock simulate replays. Prefixes and tenants are numbers in it; there are no tokens and no texts."),
    optional("providers", "id", "\"acme\"", "Name in routes, logs and metrics."),
    key("providers", "protocol", "\"openai\"", "API that it speaks: openai (and everything compatible with it), openai_responses, azure, anthropic, gemini, vertex, bedrock."),
    optional("providers", "base_url", "\"https://api.acme.example/v1\"", "http://, https://, or unix:///PATH/TO/SOCKET:/BASE. Default: the protocol's own service."),
    optional("providers", "key_env", "\"ACME_KEY\"", "Environment variable that holds the key."),
    key("providers", "keys_env", "[]", "Several: they take turns, and one that is refused or limited rests."),
    optional("providers", "key_file", "\"/run/secrets/acme\"", "File that holds the key; several in lines. It is read again when it changes."),
    key("providers", "models", "[]", "Models served under their own names. Routes can use others."),
    key("providers", "discover", "false", "Ask it for its models at start and every ten minutes, and serve them as ID/MODEL."),
    optional("providers", "headers", "{ \"x-team\" = \"search\" }", "Header fields sent with every request."),
    optional("providers", "ca_file", "\"/etc/penstock/ca.pem\"", "Certificates (PEM) to trust instead of the system's."),
    key("providers", "connect_timeout_ms", "5000", "Longest time to a connection, TLS included."),
    key("providers", "first_token_timeout_ms", "60000", "A stream must have said something after this long."),
    key("providers", "idle_timeout_ms", "60000", "Longest silence within an answer."),
    key("providers", "answer_timeout_ms", "600000", "An answer that is not streamed must have begun after this long."),
    optional("providers", "api_version", "\"2024-10-21\"", "Azure: api-version of the URLs."),
    optional("providers", "region", "\"eu-central-1\"", "Bedrock and Vertex: where the models are."),
    optional("providers", "project", "\"my-project\"", "Vertex: project that pays."),
    optional("providers", "health_path", "\"/models\"", "Ask for this path behind base_url, with a key, whether the provider lives; a status below 500 says so. Its targets in [[models]] are then left alone before requests have failed."),
    key("providers", "health_interval_ms", "10000", "How often; an answer that takes longer is none."),
    key("providers", "in_flight_max", "4096", "Requests at once; more are answered 503 with Retry-After."),
    key("providers", "requests_per_minute", "0", "Requests a minute that the provider allows each key, as it publishes them: requests are sent at that pace. 0: not known."),
    key("providers", "tokens_per_minute", "0", "Tokens a minute that it allows each key, prompts and answers together: reserved before a request is sent, corrected by what its answer used. 0: not known."),
    key("providers", "pace_wait_ms", "5000", "Longest wait of a request for that pace; then the next target is asked, or the client gets a 429 with Retry-After."),
    key("providers", "pace_gateways", "1", "Gateways that use the same keys: each takes its part of both."),
    optional("providers", "kv_events", "\"tcp://10.0.0.7:5557\"", "PUB socket of vLLM or SGLang where the server publishes what its prefix cache holds, for policy = \"cache_aware\"."),
    optional("providers", "kv_replay", "\"tcp://10.0.0.7:5558\"", "Its replay socket: what was published before, and what was lost, is asked for there."),
    optional("providers", "tokenizer", "\"/models/qwen3\"", "With kv_events: the model's folder with tokenizer.json and its chat template, as the server has it."),
    key("providers", "stream_usage", "true", "Ask for the token counts of streams whose client did not (stream_options.include_usage), and keep them from the client."),
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

/// Text of `docs/reference/config.md`.
pub fn reference() -> String {
    let mut out = String::from(
        "# Config\n\n`penstock serve --config FILE` reads one TOML file. It is checked whole: every fault is reported at once, with its\n\
         line; unknown keys are faults. Command line options win over the file. [`configs/penstock.toml`](../../configs/penstock.toml)\n\
         has every key with its default; this page and that file are made from one table (`gateway/proxy/src/config/keys.rs`).\n",
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
