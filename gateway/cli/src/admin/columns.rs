//! Columns of lists: a heading, and the path of the value. A `*` marks a time.

pub(super) const MODELS: &[(&str, &str)] = &[
    ("name", "name"),
    ("aliases", "aliases"),
    ("ready", "ready"),
    ("context", "context_tokens"),
    ("why not", "unready"),
];
pub(super) const PROVIDERS: &[(&str, &str)] = &[
    ("id", "id"),
    ("protocol", "protocol"),
    ("in flight", "in_flight"),
    ("keys", "keys"),
    ("resting", "keys_resting"),
    ("outcomes", "outcomes"),
    ("url", "url"),
];
pub(super) const ROUTES: &[(&str, &str)] = &[
    ("name", "id"),
    ("to", "value.to"),
    ("fallback", "value.fallback"),
    ("policy", "value.policy"),
    ("aliases", "value.aliases"),
];
pub(super) const TARGETS: &[(&str, &str)] = &[
    ("target", "id"),
    ("weight", "weight"),
    ("breaker", "breaker"),
    ("in flight", "in_flight"),
    ("why not", "unready"),
];
pub(super) const PLUGINS: &[(&str, &str)] = &[
    ("id", "id"),
    ("plugin", "name"),
    ("routes", "routes"),
    ("models", "models"),
    ("keys", "keys"),
    ("teams", "teams"),
    ("on fail", "on_fail"),
];
pub(super) const LIMITS: &[(&str, &str)] = &[
    ("id", "id"),
    ("for", "applies"),
    ("by", "by"),
    ("acts", "effective"),
    ("why not", "why_not"),
    ("models", "models"),
    ("measures", "measures"),
];
pub(super) const COUNTERS: &[(&str, &str)] = &[
    ("whose", "subject"),
    ("measure", "measure"),
    ("used", "used"),
    ("reserved", "reserved"),
    ("remaining", "remaining"),
    ("max", "max"),
    ("over in ms", "reset_ms"),
];
pub(super) const REQUESTS: &[(&str, &str)] = &[
    ("id", "id"),
    ("age ms", "age_ms"),
    ("key", "key"),
    ("model", "model"),
    ("target", "target"),
    ("tokens", "completion_tokens"),
    ("stream", "stream"),
    ("answering", "answering"),
    ("client", "client"),
    ("route", "route"),
    ("request id", "request_id"),
];
pub(super) const POOLS: &[(&str, &str)] = &[
    ("id", "id"),
    ("ready", "workers_ready"),
    ("running", "replicas.running"),
    ("wanted", "replicas.wanted"),
    ("min", "replicas.min"),
    ("max", "replicas.max"),
    ("paused", "replicas.paused"),
    ("dry run", "replicas.dry_run"),
    ("why", "replicas.reason"),
    ("last change", "replicas.last_change"),
    ("last failure", "replicas.last_failure"),
];

pub(super) const WORKERS: &[(&str, &str)] = &[
    ("name", "name"),
    ("phase", "phase"),
    ("role", "role"),
    ("pid", "pid"),
    ("requests", "requests"),
    ("running", "sequences_running"),
    ("waiting", "sequences_waiting"),
    ("blocks free", "blocks_free"),
    ("of", "blocks_total"),
    ("deaths", "deaths"),
    ("starts", "starts"),
    ("detail", "detail"),
];
pub(super) const ADAPTERS: &[(&str, &str)] = &[
    ("pool", "pool"),
    ("name", "name"),
    ("state", "state"),
    ("ready at", "workers_ready"),
    ("of", "workers"),
    ("path", "path"),
];
pub(super) const BATCHES: &[(&str, &str)] = &[
    ("id", "id"),
    ("status", "status"),
    ("key", "key"),
    ("endpoint", "endpoint"),
    ("requests", "requests"),
    ("completed", "requests_completed"),
    ("failed", "requests_failed"),
    ("created", "created_at*"),
    ("expires", "expires_at*"),
];
pub(super) const FILES: &[(&str, &str)] = &[
    ("id", "id"),
    ("key", "key"),
    ("purpose", "purpose"),
    ("name", "name"),
    ("bytes", "bytes"),
    ("created", "created_at*"),
    ("expires", "expires_at*"),
    ("in use", "in_use"),
];
pub(super) const STEPS: &[(&str, &str)] = &[
    ("plugin", "plugin"),
    ("kind", "name"),
    ("outcome", "outcome"),
    ("edits", "edits"),
    ("ms", "ms"),
    ("waits s", "waits_seconds"),
    ("sees answer", "sees_answer"),
];
pub(super) const KEYS: &[(&str, &str)] = &[
    ("id", "id"),
    ("name", "name"),
    ("state", "state"),
    ("ends with", "ends_with"),
    ("team", "team"),
    ("user", "user"),
    ("limits", "limits"),
    ("expires", "expires*"),
];
pub(super) const OWNERS: &[(&str, &str)] = &[
    ("id", "id"),
    ("name", "name"),
    ("team", "team"),
    ("blocked", "blocked"),
    ("limits", "limits"),
    ("models", "allowed.models"),
];
pub(super) const SUMS: &[(&str, &str)] = &[
    ("requests", "requests"),
    ("failed", "failed"),
    ("input", "input_tokens"),
    ("cached", "input_cached_tokens"),
    ("output", "output_tokens"),
    ("usd", "usd"),
];
pub(super) const ENTRIES: &[(&str, &str)] = &[
    ("at", "at*"),
    ("request id", "request_id"),
    ("key", "key"),
    ("model", "model"),
    ("provider", "provider"),
    ("input", "input_tokens"),
    ("output", "output_tokens"),
    ("usd", "usd"),
    ("status", "status"),
    ("outcome", "outcome"),
    ("ms", "total_ms"),
];
pub(super) const CHANGES: &[(&str, &str)] =
    &[("change", "path"), ("before", "before"), ("after", "after"), ("applies", "when")];
pub(super) const HISTORY: &[(&str, &str)] = &[
    ("version", "version"),
    ("at", "at*"),
    ("by", "actor"),
    ("outcome", "outcome"),
    ("bytes", "bytes"),
    ("note", "note"),
];
pub(super) const EVENTS: &[(&str, &str)] = &[
    ("at", "at*"),
    ("actor", "actor"),
    ("address", "address"),
    ("action", "action"),
    ("target", "target"),
    ("outcome", "outcome"),
    ("status", "detail.status"),
];
pub(super) const DECISIONS: &[(&str, &str)] = &[
    ("request", "request"),
    ("worker", "worker"),
    ("why", "why"),
    ("tokens", "prompt_tokens"),
    ("waited s", "waited_seconds"),
    ("age s", "age_seconds"),
    ("policy", "policy"),
];
pub(super) const CANDIDATES: &[(&str, &str)] = &[
    ("worker", "worker"),
    ("free", "free"),
    ("cost s", "cost"),
    ("queue", "queue"),
    ("own", "own"),
    ("later", "later"),
    ("harm", "harm"),
    ("decode", "decode"),
    ("pressure", "pressure"),
    ("cached", "on_device"),
    ("promised", "on_promised"),
    ("loads", "on_loaded"),
];
