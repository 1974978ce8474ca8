//! Conversion of the parsed file and the command line into a [`Snapshot`], or into the list of all faults.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use penstock_govern::prices::{EMBEDDED, Prices};
use penstock_http::HttpLimits;

use super::hub::{Shelf, hub};
use super::pools::{self, pool};
use super::raw::{Document, Reader};
use super::snapshot::{BatchesConfig, PoolConfig, Snapshot, TlsFiles};
use super::{Faults, Overrides, adapters, identity, models};

/// Checks a config text and returns the snapshot, or every fault found. `file` is a name for messages and the text;
/// `None`: all defaults. `env` resolves environment variables.
pub fn load(
    file: Option<(&str, &str)>,
    overrides: &Overrides,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Snapshot, Faults> {
    load_needed(file, overrides, env, None)
}

/// Checks a config text as [`load`] does, for a command beside the gateway, whose environment lacks what the gateway's has: only the
/// tables of `needed` must have their variables set. Secrets of other tables are left out or replaced, so nothing can be served with
/// this snapshot.
pub fn load_beside(
    file: Option<(&str, &str)>,
    overrides: &Overrides,
    env: &dyn Fn(&str) -> Option<String>,
    needed: &[&str],
) -> Result<Snapshot, Faults> {
    load_needed(file, overrides, env, Some(needed))
}

fn load_needed(
    file: Option<(&str, &str)>,
    overrides: &Overrides,
    env: &dyn Fn(&str) -> Option<String>,
    needed: Option<&[&str]>,
) -> Result<Snapshot, Faults> {
    let (name, text) = file.unwrap_or(("command line", ""));
    let document = Document::parse(name, text, needed);
    document.check_tables();
    let snapshot = read(&document, overrides, env);
    unique(&document, "keys", snapshot.auth.keys.iter().map(|key| key.id.as_str()));
    unique(&document, "admin_keys", snapshot.admin.keys.iter().map(|key| key.id.as_str()));
    unique(&document, "teams", snapshot.auth.teams.iter().map(|team| team.id.as_str()));
    unique(&document, "jwt", snapshot.auth.issuers.iter().map(|issuer| issuer.id.as_str()));
    identity::check(&document, &snapshot.auth, snapshot.tls.as_ref());
    unique(&document, "providers", snapshot.providers.iter().map(|provider| provider.id.as_str()));
    unique(&document, "pools", snapshot.pools.iter().map(|pool| pool.id.as_str()));
    adapters::unique(&document, &snapshot.pools);
    unique(&document, "plugins", snapshot.plugins.iter().map(|plugin| &*plugin.id));
    let known = models::Known {
        pools: snapshot.pools.iter().flat_map(PoolConfig::served).collect(),
        providers: snapshot
            .providers
            .iter()
            .map(|provider| (provider.id.as_str(), provider.models.iter().map(String::as_str).collect()))
            .collect(),
    };
    models::check(&document, &snapshot.models, &known, &snapshot.prices);
    if let Some(name) = &snapshot.moderation_model
        && !models::is_known(name, &snapshot.models, &known)
    {
        document.table("server").fault("moderation_model", format!("there is no model {name:?}"));
    }
    super::limits::check(&document, &snapshot);
    super::web::check(&document, &snapshot);
    document.finish().map(|()| snapshot)
}

/// Reads every table. Faults are collected in the document; the values in their place are placeholders that are never
/// used.
fn read(document: &Document<'_>, overrides: &Overrides, env: &dyn Fn(&str) -> Option<String>) -> Snapshot {
    let (server, stream, log) = (document.table("server"), document.table("stream"), document.table("log"));
    let listen = listen(document, &server, overrides);
    let (unix, tls) = (server.text("unix").map(PathBuf::from), tls(&document.table("server.tls")));
    let request_timeout = Some(server.number("request_timeout_ms", 0..=86_400_000)).filter(|ms| *ms > 0).map(millis);
    let keys = document.tables("keys").iter().filter_map(|table| identity::key(table, env)).collect();
    let teams = document.tables("teams").iter().filter_map(identity::team).collect();
    let typed = server.text("state_dir").map(PathBuf::from);
    let state_dir = overrides.state_dir.clone().or(typed);
    let hub = hub(document, overrides.models_dir.as_ref());
    let shelf = Shelf::new(&hub, state_dir.as_ref());
    let mut pools: Vec<_> = document.tables("pools").iter().map(|table| pool(table, &shelf)).collect();
    let tables = document.tables("providers");
    let providers = tables.iter().filter_map(|table| super::providers::provider(table, env)).collect();
    if pools.is_empty() && (tables.is_empty() || overrides.model.is_some()) {
        pools.push(pool(&document.table("pools"), &shelf));
    }
    pools::apply(document, &mut pools, overrides, &shelf);
    let (store, counters) = super::store::read(document, env);
    Snapshot {
        listen,
        unix,
        hosts: super::web::hosts(&server),
        moderation_model: server.text("moderation_model"),
        cors: super::web::cors(document),
        tls,
        state_dir,
        weights_cache_bytes_max: server.number("weights_cache_bytes_max", 0..=1 << 50),
        watch: server.flag("watch"),
        config_writes: server.flag("config_writes"),
        threads: threads(&server),
        http: Arc::new(http(&server)),
        request_timeout,
        grace: millis(server.number("grace_ms", 0..=86_400_000)),
        upgrade_grace: millis(server.number("upgrade_grace_ms", 0..=7 * 86_400_000)),
        commit: millis(stream.number("commit_ms", 0..=60_000)),
        heartbeat: millis(stream.number("heartbeat_ms", 100..=3_600_000)),
        log_level: log
            .text("level")
            .filter(|_| overrides.log_level.is_none())
            .or(overrides.log_level.clone())
            .unwrap_or_default(),
        access_log: log
            .text("access")
            .filter(|_| overrides.access_log.is_none())
            .or(overrides.access_log.clone())
            .unwrap_or_default(),
        telemetry: super::telemetry::telemetry(&document.table("telemetry"), env),
        hub,
        store,
        counters,
        batches: batches(&document.table("batches")),
        admin: super::admin::read(document, overrides, env),
        endpoint_picker: super::endpoint_picker::read(document),
        auth: identity::auth(document, env, keys, teams),
        limits: super::limits::read(document),
        models: models::read(document),
        plugins: document.tables("plugins").iter().filter_map(|table| super::plugins::plugin(table, env)).collect(),
        prices: Arc::new(prices(&document.table("prices"))),
        explain: server.flag("explain"),
        cost_header: server.flag("cost_header"),
        pools,
        webhooks: super::webhooks::read(document, env),
        providers,
    }
}

fn batches(table: &Reader<'_, '_>) -> BatchesConfig {
    BatchesConfig {
        concurrency: table.number("concurrency", 1..=4096) as usize,
        lines_max: table.number("lines_max", 1..=10_000_000) as u32,
        open_max: table.number("open_max", 1..=1_000_000),
        key_output_bytes_max: table.number("key_output_bytes_max", 1024..=1 << 50),
        attempts_max: table.number("attempts_max", 1..=1000) as u32,
    }
}

const fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn listen(document: &Document<'_>, server: &Reader<'_, '_>, overrides: &Overrides) -> SocketAddr {
    let typed = server.text("listen").unwrap_or_default();
    let text = overrides.listen.clone().unwrap_or(typed);
    // A bare port means loopback.
    let full = if text.bytes().all(|byte| byte.is_ascii_digit()) { format!("127.0.0.1:{text}") } else { text };
    if let Some(address) = full.to_socket_addrs().ok().and_then(|mut all| all.next()) {
        return address;
    }
    let message = format!("{full:?} is not ADDRESS:PORT, as 127.0.0.1:8080 or [::]:8080");
    match overrides.listen {
        Some(_) => document.fault_at("--listen", "", message),
        None => server.fault("listen", message),
    }
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn tls(table: &Reader<'_, '_>) -> Option<TlsFiles> {
    let (client_ca, client_required) = (table.text("client_ca").map(PathBuf::from), client_required(table));
    match (table.text("certificate"), table.text("key")) {
        (Some(cert), Some(key)) => {
            return Some(TlsFiles { cert: cert.into(), key: key.into(), client_ca, client_required });
        }
        (None, None) if client_ca.is_some() => table.fault("client_ca", "needs certificate and key"),
        (None, None) => {}
        (Some(_), None) => table.fault("certificate", "needs key too"),
        (None, Some(_)) => table.fault("key", "needs certificate too"),
    }
    None
}

fn client_required(table: &Reader<'_, '_>) -> bool {
    let text = table.text("client_auth").unwrap_or_default();
    if !["optional", "required"].contains(&text.as_str()) {
        table.fault("client_auth", format!("{text:?} is neither optional nor required"));
    }
    text == "required"
}

fn threads(server: &Reader<'_, '_>) -> usize {
    match server.number("threads", 0..=256) as usize {
        0 => std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4)),
        given => given,
    }
}

fn http(server: &Reader<'_, '_>) -> HttpLimits {
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    let limits = HttpLimits {
        head_bytes_max: server.number("head_bytes_max", 1024..=1 << 20) as usize,
        body_bytes_max: server.number("body_bytes_max", 1024..=4 * GIB) as usize,
        body_memory_bytes_max: server.number("body_memory_bytes_max", 1024..=1024 * GIB) as usize,
        answer_memory_bytes_max: server.number("answer_memory_bytes_max", 64 * MIB..=1024 * GIB) as usize,
        event_bytes_max: server.number("event_bytes_max", 64 * 1024..=32 * MIB) as usize,
        image_event_bytes_max: server.number("image_event_bytes_max", 64 * 1024..=32 * MIB) as usize,
        connections_max: server.number("connections_max", 1..=10_000_000) as usize,
        address_connections_max: server.number("address_connections_max", 0..=10_000_000) as usize,
        address_connections_per_second: server.number("address_connections_per_second", 0..=1_000_000) as u32,
        head_timeout: millis(server.number("head_timeout_ms", 10..=3_600_000)),
        body_timeout: millis(server.number("body_timeout_ms", 10..=3_600_000)),
        body_rate_bytes_min: server.number("body_rate_bytes_min", 1..=GIB),
        idle_timeout: millis(server.number("idle_timeout_ms", 10..=86_400_000)),
        write_stall: millis(server.number("write_stall_ms", 10..=3_600_000)),
        h2_streams_max: server.number("h2_streams_max", 1..=10_000) as u32,
        h2_header_list_bytes_max: server.number("h2_header_list_bytes_max", 1024..=1 << 20) as u32,
    };
    if limits.body_memory_bytes_max < limits.body_bytes_max {
        server.fault("body_memory_bytes_max", "must be at least body_bytes_max, or such a body could never be read");
    }
    limits
}

fn prices(table: &Reader<'_, '_>) -> Prices {
    let embedded = || Prices::parse(EMBEDDED).expect("the embedded table is valid (tested)");
    let Some(file) = table.text("file") else { return embedded() };
    let parsed = std::fs::read_to_string(&file).map_err(|error| error.to_string());
    parsed.and_then(|text| Prices::parse(&text)).unwrap_or_else(|message| {
        table.fault("file", format!("{file}: {message}"));
        embedded()
    })
}

fn unique<'a>(document: &Document<'_>, table: &'static str, ids: impl Iterator<Item = &'a str>) {
    let mut seen = std::collections::BTreeSet::new();
    for id in ids {
        if !seen.insert(id) {
            document.fault_at(table, "id", format!("{id:?} is used twice"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DEMO_MODEL, keys};

    fn read(text: &str) -> Result<Snapshot, Vec<String>> {
        let env = |name: &str| match name {
            "SET" => Some("secret".to_owned()),
            "OPS_HOOK_SECRET" => Some("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".to_owned()),
            _ => None,
        };
        load(Some(("p.toml", text)), &Overrides::default(), &env)
            .map_err(|faults| faults.0.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn the_model_of_moderations_is_there() {
        let models = "[[providers]]\nid = \"p\"\nbase_url = \"http://127.0.0.1:1/v1\"\nmodels = [\"own\"]\n\
                      [[models]]\nname = \"a\"\naliases = [\"b\"]\nto = [{ provider = \"p\", model = \"x\" }]\n";
        let read = |name: &str| read(&format!("[server]\nmoderation_model = {name:?}\n{models}"));
        for name in ["a", "b", "own", "p/found"] {
            assert_eq!(read(name).expect(name).moderation_model.as_deref(), Some(name));
        }
        for name in ["c", "q/found"] {
            assert!(read(name).expect_err(name)[0].contains("server.moderation_model"), "{name}");
        }
    }

    #[test]
    fn the_example_is_the_default() {
        let (example, default) = (read(&keys::example()).expect("valid"), read("").expect("valid"));
        assert_eq!(format!("{example:?}"), format!("{default:?}"));
        assert_eq!(default.pools[0].id, DEMO_MODEL);
        assert_eq!(format!("{:?}", default.http), format!("{:?}", Arc::new(HttpLimits::default())));
    }

    #[test]
    fn every_key_of_the_table_is_read_and_every_example_is_accepted() {
        let mut text = String::new();
        for table in keys::TABLES {
            text += &if table.many { format!("[[{}]]\n", table.name) } else { format!("[{}]\n", table.name) };
            for key in keys::KEYS.iter().filter(|key| key.table == table.name) {
                let exclusive = [
                    ("keys", "key_env"),
                    ("keys", "key_file"),
                    ("admin.oidc", "client_secret_env"),
                    ("admin.oidc", "client_secret_file"),
                    ("admin_keys", "key_env"),
                    ("admin_keys", "key_file"),
                    ("keys", "certificate"),
                    ("auth", "pepper_file"),
                    ("auth", "pepper_env"),
                    ("jwt", "jwks_file"),
                    ("pools", "workers"),
                    ("pools", "gpu_memory_share"),
                    ("pools", "replica_command"),
                    ("providers", "key_env"),
                    ("providers", "key_file"),
                    ("store", "path"),
                    ("store", "url_env"),
                    ("store", "password_file"),
                    ("counters", "url_env"),
                    ("counters", "password_file"),
                    ("counters", "ca_file"),
                    ("prices", "file"),
                    ("pools", "kv_disk_path"),
                    ("pools", "kv_remote"),
                    ("pools", "kv_remote_password_file"),
                    ("hub", "token_file"),
                    ("telemetry", "otlp_headers_env"),
                    ("webhooks", "url_env"),
                    ("webhooks", "secret_file"),
                    ("webhooks", "ca_file"),
                ]
                .contains(&(table.name, key.name));
                if !exclusive {
                    text += &format!("{} = {}\n", key.name, key.default.unwrap_or_else(|example| example));
                }
            }
        }
        read(&text).expect("valid");
    }

    #[test]
    fn all_faults_come_at_once_with_lines() {
        let faults = read(
            "[server]\nlisten = 8080\nbody_byte = 1\nconnections_max = 0\n[[pools]]\ndevice = \"tpu\"\nworkers = \"two\"\n\
             [[keys]]\nid = \"a\"\n[[keys]]\nid = \"b\"\nkey_env = \"UNSET\"\n[nonsense]\nx = 1\n",
        )
        .expect_err("faults");
        let expect = [
            "p.toml:2: server.listen: must be text",
            "p.toml:3: server.body_byte: unknown key; did you mean body_bytes_max?",
            "p.toml:4: server.connections_max: must be a whole number from 1",
            "p.toml:6: pools[0].device: \"tpu\" is not a device",
            "p.toml:7: pools[0].workers: must be a whole number",
            "p.toml:9: keys[0].digest: exactly one of",
            "p.toml:12: keys[1].key_env: the environment variable UNSET",
            "p.toml:13: nonsense: unknown key; known are: server",
        ];
        for start in expect {
            assert!(faults.iter().any(|fault| fault.starts_with(start)), "{start} in {faults:#?}");
        }
        assert_eq!(faults.len(), expect.len(), "{faults:#?}");
    }

    /// A service manager gives variables to the gateway, and not to the shell in which an operator types a command.
    #[test]
    fn a_command_beside_the_gateway_needs_the_variables_of_its_own_tables() {
        let text = "[auth]\npepper_env = \"A\"\n[store]\nurl_env = \"B\"\n[counters]\nurl = \"store\"\n\
                    [telemetry]\notlp_headers_env = \"C\"\n[admin]\nlisten = \"0.0.0.0:8081\"\n\
                    [admin.oidc]\nissuer = \"https://sso.example\"\nclient_id = \"c\"\nroles = { a = \"viewer\" }\nclient_secret_env = \"D\"\n\
                    [[admin_keys]]\nid = \"ops\"\nrole = \"owner\"\nkey_env = \"E\"\n[[keys]]\nid = \"k\"\nkey_env = \"F\"\n\
                    [[providers]]\nid = \"p\"\nbase_url = \"http://h\"\nmodels = [\"m\"]\nkeys_env = [\"G\"]\n\
                    [[webhooks]]\nname = \"w\"\nurl_env = \"H\"\nsecret_env = \"I\"\n\
                    [[plugins]]\nname = \"http_hook\"\nkeys = [\"k\"]\nsettings = { url = \"http://h\", secret_env = \"J\" }\n";
        let faults = |needed: &[&str]| {
            let read = load_beside(Some(("p.toml", text)), &Overrides::default(), &|_| None, needed);
            read.err().map_or(Vec::new(), |faults| faults.0.into_iter().map(|fault| fault.key).collect())
        };
        assert_eq!(faults(&[]), Vec::<String>::new());
        assert_eq!(faults(&["store", "auth"]), ["store.url_env", "counters.url", "auth.pepper_env"]);
        let all = read(text).expect_err("what serves needs them all");
        for name in ["A", "B", "C", "D", "E", "F", "G", "H", "I", "J"] {
            assert!(all.iter().any(|fault| fault.contains(name)), "{name} in {all:#?}");
        }
    }

    #[test]
    fn syntax_errors_have_lines() {
        let faults = read("[server]\nlisten = \n").expect_err("faults");
        assert!(faults[0].starts_with("p.toml:2"), "{faults:?}");
    }

    #[test]
    fn every_example_passes() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/examples");
        let env = |_: &str| Some("set".to_owned());
        let mut count = 0;
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let (name, text) = (path.display().to_string(), std::fs::read_to_string(&path).expect("text"));
            load(Some((&name, &text)), &Overrides::default(), &env).unwrap_or_else(|faults| panic!("{faults}"));
            count += 1;
        }
        assert!(count > 0);
    }

    #[test]
    fn prices_come_from_a_file_if_one_is_named() {
        let path = std::env::temp_dir().join(format!("penstock-prices-{}.toml", std::process::id()));
        let config = format!("[prices]\nfile = {path:?}\n");
        assert!(read(&config).expect_err("no file")[0].contains("prices.file"));
        std::fs::write(&path, "[[price]]\nmodels = [\"own-*\"]\ninput = 1.0\noutput = 2.0\n").expect("write");
        let prices = read(&config).expect("valid").prices;
        assert!(prices.find("own-7").is_some() && prices.find("gpt-4o").is_none(), "it replaces the table whole");
        std::fs::write(&path, "[[price]]\nmodels = []\nin = 1.0\n").expect("write");
        assert!(read(&config).expect_err("a fault")[0].contains("unknown field"));
        std::fs::remove_file(&path).expect("remove");
    }

    /// Rewrites the files when `PENSTOCK_BLESS` is set.
    #[test]
    fn files_made_from_the_table_are_current() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
        for (path, text) in
            [("configs/penstock.toml", keys::example()), ("docs/reference/config.md", keys::reference())]
        {
            let path = format!("{root}{path}");
            if std::env::var_os("PENSTOCK_BLESS").is_some() {
                std::fs::write(&path, &text).expect("write");
            }
            let have = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(have == text, "{path} is not what config/keys.rs says; run the tests with PENSTOCK_BLESS=1");
        }
    }
}
