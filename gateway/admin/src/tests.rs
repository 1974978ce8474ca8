//! Tests of the API as its callers see it: over sockets, with every role on every route.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::Method;
use penstock_auth::Principal;
use penstock_config::{AdminConfig, AdminListen, Overrides, Role, Snapshot};
use penstock_pool::weights_cache::CopyLayout;
use penstock_proxy::Gateway;
use penstock_proxy::fleet::{Fleet, WorkerCommand};
use penstock_proxy::live_requests::About;
use penstock_proxy::reload::{Begin, Live, Source};
use penstock_store::{Entry, OpenEntry, Sqlite, SqliteOptions, Store, Subject, Tokens};
use penstock_telemetry::AccessLog;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::roles::{Access, Routes};
use crate::{LogFilter, Parts, Running, document, gate, routes, start};

mod connections;
mod dry_run;
mod entries;
mod stored;

/// Secret of a provider, which no answer may show.
const PROVIDER_KEY: &str = "sk-provider-secret-7f3a";
const BASE: &str = "
[[providers]]
id = \"acme\"
base_url = \"http://127.0.0.1:9/v1\"
headers = { x-key = \"sk-provider-secret-7f3a\" }
models = [\"big\", \"small\"]
[[limits]]
id = \"small\"
requests_per_minute = 60
[[models]]
name = \"chat\"
aliases = [\"default\"]
to = [{ provider = \"acme\", model = \"big\", weight = 3 }]
fallback = [{ provider = \"acme\", model = \"small\" }]
";

/// Config with a key per role; the key's text is the role's name.
fn config() -> String {
    let key = |role: Role| {
        let digest: String = Sha256::digest(role.name()).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[admin_keys]]\nid = \"{role}\"\ndigest = \"{digest}\"\nrole = \"{role}\"\n")
    };
    BASE.to_owned() + &Role::ALL.map(key).concat()
}

#[derive(Default)]
struct Log(Mutex<String>);

impl LogFilter for Log {
    fn get(&self) -> String {
        self.0.lock().expect("not poisoned").clone()
    }

    fn set(&self, filter: &str) -> Result<(), String> {
        if filter == "loud" {
            return Err("no such level".into());
        }
        filter.clone_into(&mut self.0.lock().expect("not poisoned"));
        Ok(())
    }
}

/// API over [`config`].
struct Api {
    running: Running,
    gateway: Arc<Gateway>,
    store: Arc<dyn Store>,
    address: SocketAddr,
    dir: PathBuf,
}

impl Api {
    fn start() -> Self {
        Self::with(&|_| ())
    }

    fn with(change: &dyn Fn(&mut AdminConfig)) -> Self {
        Self::of(&|config| change(&mut config.admin))
    }

    fn of(change: &dyn Fn(&mut Snapshot)) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("penstock-admin-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let source = Source::new(None, Overrides::default());
        let mut config = source.load(&config()).expect("valid");
        config.state_dir = Some(dir.clone());
        config.admin.listen = AdminListen::At(([127, 0, 0, 1], 0).into());
        change(&mut config);
        let command = WorkerCommand {
            program: "/bin/false".into(),
            identity: String::new(),
            args: |_| Vec::new(),
            inspect: |_| Ok(0),
            weights_key: |_, _| Ok(None),
            layout: CopyLayout { key: |_| None, fill: |_, _, _, _, _| Ok(false) },
            demo: &[],
        };
        let fleet = Arc::new(Fleet::start(&config, command).expect("no pools"));

        let access_log = AccessLog::open("off").expect("off");
        let providers = penstock_provider::all(&config.providers).expect("providers");
        let gateway = Arc::new(Gateway::new(config.clone(), access_log, fleet.upstreams(), providers));
        let options = SqliteOptions { path: ":memory:".into(), bytes_max: 0 };
        let store: Arc<dyn Store> = Arc::new(Sqlite::open(&options).expect("a store in memory"));
        let begin = Begin { text: self::config(), config: config.clone(), file: None };
        let live = Live::new(gateway.clone(), fleet.clone(), source, begin, Box::new(|_| Ok(())));
        let parts =
            Parts { gateway: gateway.clone(), fleet, live, store: store.clone(), log: Arc::new(Log::default()) };
        let running = start(parts, &config.admin, &dir, Duration::ZERO).expect("starts").expect("is on");
        let address = running.urls()[0].trim_start_matches("http://").parse().expect("an address");
        Self { running, gateway, store, address, dir }
    }

    /// Status, head and body of an answer; `fields` are whole lines.
    fn ask(&self, method: &str, path: &str, fields: &[&str], body: &str) -> (u16, String, String) {
        self.ask_from(Ipv4Addr::LOCALHOST, method, path, fields, body)
    }

    /// Answer to a request from another address of this machine: all of 127.0.0.0/8 is its own.
    fn ask_from(
        &self,
        source: Ipv4Addr,
        method: &str,
        path: &str,
        fields: &[&str],
        body: &str,
    ) -> (u16, String, String) {
        let mut stream = connect(source, self.address);
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        let host = if fields.iter().any(|field| field.starts_with("host:")) { "" } else { "host: localhost\r\n" };
        let fields: String = fields.iter().map(|field| format!("{field}\r\n")).collect();
        let length = body.len();
        let head =
            format!("{method} {path} HTTP/1.1\r\n{host}{fields}content-length: {length}\r\nconnection: close\r\n\r\n");
        // A refusal may come before all was sent.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
        let mut text = Vec::new();
        let _ = stream.read_to_end(&mut text);
        let text = String::from_utf8(text).expect("text");
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        let names = head.lines().map(|line| match line.split_once(':') {
            // The value of a cookie is told by its letters' case.
            Some((name, value)) if name.eq_ignore_ascii_case("set-cookie") => format!("set-cookie:{value}\n"),
            _ => format!("{}\n", line.to_ascii_lowercase()),
        });
        (status, names.collect(), body.to_owned())
    }

    fn call(&self, role: &str, method: &str, path: &str, body: &str) -> (u16, Value) {
        let key = format!("authorization: Bearer {role}");
        let (status, _, body) = self.ask(method, path, &[&key, "content-type: application/json"], body);
        (status, serde_json::from_str(&body).unwrap_or(Value::Null))
    }

    fn get(&self, path: &str) -> Value {
        let (status, body) = self.call("viewer", "GET", path, "");
        assert_eq!(status, 200, "{path}: {body}");
        body
    }
}

fn connect(source: Ipv4Addr, address: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let connected = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4()?;
        socket.bind((source, 0).into())?;
        socket.connect(address).await?.into_std()
    });
    let stream = connected.expect("connects");
    stream.set_nonblocking(false).expect("set");
    stream
}

impl Drop for Api {
    fn drop(&mut self) {
        self.running.stop();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn table() -> Vec<(String, Method, Access)> {
    let (_, document) = routes::all().split_for_parts();
    Routes::read(&document::complete(&document).expect("valid")).expect("every operation says who").all()
}

/// Path of that template that names nothing that exists.
fn concrete(template: &str) -> String {
    template.split('/').map(|part| if part.starts_with('{') { "999999" } else { part }).collect::<Vec<_>>().join("/")
}

#[test]
fn every_route_asks_for_its_role_and_no_less() {
    let api = Api::start();
    let table = table();
    assert!(table.len() > 15);
    for (at, (path, method, access)) in table.into_iter().enumerate() {
        let url = concrete(&path);
        // Wrong keys slow an address down: each route is tried from another.
        let source = Ipv4Addr::new(127, 0, 1, at as u8 + 1);
        let status = |key: &str| {
            let key = format!("authorization: {key}");
            // A body that no route takes: what is asked for must not happen.
            api.ask_from(source, method.as_str(), &url, &[&key, "content-type: application/json"], "{\"no\": 1}").0
        };
        let anonymous = api.ask_from(source, method.as_str(), &url, &[], "").0;
        let Access::Role(needed) = access else {
            // Signing in takes a key or a provider's answer, in a body that is JSON; here is no provider, who would sign people out.
            let open = [
                ("/admin/v1/health", 200),
                ("/admin/v1/session", 415),
                ("/admin/v1/sign-on", 200),
                ("/admin/v1/sign-on", 404),
                ("/admin/v1/sign-on/answer", 415),
                ("/admin/v1/sign-on/logout", 404),
            ];
            assert!(open.contains(&(path.as_str(), anonymous)), "{method} {path} is open: {anonymous}");
            continue;
        };
        assert_eq!(anonymous, 401, "{method} {path} without a key");
        for wrong in ["Bearer nobody", "Basic owner", "owner", "Bearer owner, Bearer owner"] {
            assert_eq!(status(wrong), 401, "{method} {path} with {wrong:?}");
        }
        for role in Role::ALL {
            let got = status(&format!("Bearer {role}"));
            if role < needed {
                assert_eq!(got, 403, "{method} {path} as {role}");
            } else {
                assert!(!matches!(got, 0 | 401 | 403 | 429 | 500..), "{method} {path} as {role}: {got}");
            }
        }
    }
}

#[test]
fn what_is_not_there_needs_a_key_too() {
    let api = Api::start();
    assert_eq!(api.ask("GET", "/admin/v1/nothing", &[], "").0, 401);
    assert_eq!(api.ask("GET", "/other", &[], "").0, 401);
    let (status, head, _) = api.ask("GET", "/", &[], "");
    assert!(status == 303 && head.contains("location: /console/"), "{head}");
    assert_eq!(api.call("viewer", "GET", "/admin/v1/nothing", "").0, 404);
    let key = "authorization: Bearer viewer";
    let (status, head, body) = api.ask("DELETE", "/admin/v1/status", &[key], "");
    assert_eq!(status, 405, "{body}");
    assert!(head.contains("allow: get,head"), "{head}");
    assert!(body.contains("\"method_not_allowed\""));
    for path in
        ["/admin/v1/../v1/status", "/admin/v1/status/", "//admin/v1/status", "/admin/v1/%73tatus", "/ADMIN/v1/status"]
    {
        let status = api.ask("GET", path, &[], "").0;
        assert_eq!(status, 401, "{path}");
    }
}

#[test]
fn other_sites_and_rebound_names_are_refused() {
    let api = Api::with(&|config| config.origins = vec!["https://console.example".into()]);
    let key = "authorization: Bearer owner";
    let with = |fields: &[&str]| api.ask("GET", "/admin/v1/status", &[fields, &[key]].concat(), "").0;
    assert_eq!(with(&[]), 200);
    assert_eq!(with(&["host: evil.example"]), 403);
    assert_eq!(with(&["host: localhost", "host: localhost"]), 403);
    assert_eq!(with(&["origin: https://evil.example"]), 403);
    assert_eq!(with(&["origin: null"]), 403);
    assert_eq!(with(&["origin: https://console.example"]), 200);
    assert_eq!(with(&["sec-fetch-site: cross-site"]), 403);
    // Also where no key is needed.
    assert_eq!(api.ask("GET", "/admin/v1/health", &["host: evil.example"], "").0, 403);
    let absolute = api.ask("GET", "http://evil.example/admin/v1/status", &[key], "").0;
    assert_eq!(absolute, 403, "the URL says another host than Host");
}

#[test]
fn guessing_is_slowed_down() {
    let api = Api::start();
    let with = |key: &str| api.ask("GET", "/admin/v1/status", &[&format!("authorization: Bearer {key}")], "");
    assert_eq!(with("owner").0, 200);
    let refused = (0..60).map(|_| with("psa_guess")).find(|(status, ..)| *status == 429).expect("slowed down");
    assert!(refused.1.contains("retry-after: 1"), "{}", refused.1);
    assert_eq!(with("owner").0, 200, "a key that has been good is let in");
    let unused = (0..10).find(|_| with("psa_guess").0 == 429 && with("viewer").0 == 429);
    assert!(unused.is_some(), "one that nobody has used waits: it could be the next guess");
    assert_eq!(api.ask("GET", "/admin/v1/health", &[], "").0, 200);
}

#[test]
fn bodies_are_bounded_and_checked() {
    let api = Api::start();
    let put = |kind: &str, body: &str| {
        let (key, kind) = ("authorization: Bearer owner", format!("content-type: {kind}"));
        api.ask("PUT", "/admin/v1/log-level", &[key, &kind], body).0
    };
    assert_eq!(put("application/json", "{\"level\": \"debug\"}"), 200);
    assert_eq!(api.get("/admin/v1/log-level")["level"], "debug");
    assert_eq!(put("application/json; charset=utf-8", "{\"level\": \"info\"}"), 200);
    assert_eq!(put("text/plain", "{\"level\": \"debug\"}"), 415);
    for wrong in [
        "",
        "[]",
        "{}",
        "{\"level\": 1}",
        "{\"level\": \"\"}",
        "{\"level\": \"loud\"}",
        "{\"level\": \"x\", \"y\": 1}",
        "{\"level\": \"a\", \"level\": \"b\"}",
    ] {
        assert_eq!(put("application/json", wrong), 400, "{wrong}");
    }
    assert_eq!(put("application/json", &" ".repeat(gate::BODY_BYTES_MAX + 1)), 413);
    assert_eq!(api.get("/admin/v1/log-level")["level"], "info", "nothing of it was done");
}

#[test]
fn models_and_providers_are_shown_without_secrets() {
    let api = Api::start();
    let models = api.get("/admin/v1/models");
    let names: Vec<_> = models["data"].as_array().expect("a list").iter().map(|model| model["name"].clone()).collect();
    assert_eq!(names, ["big", "chat", "small"]);
    let chat = api.get("/admin/v1/models/default");
    assert_eq!((&chat["targets"][0]["id"], &chat["targets"][0]["weight"]), (&"acme/big".into(), &3.into()));
    assert_eq!((&chat["targets"][1]["weight"], &chat["targets"][1]["breaker"]), (&0.into(), &"closed".into()));
    let provider = api.get("/admin/v1/providers/acme");
    assert_eq!((&provider["url"], &provider["keys"]), (&"http://127.0.0.1:9/v1".into(), &0.into()));
    for (path, method, _) in table() {
        if method == Method::GET {
            let text = api.ask("GET", &concrete(&path), &["authorization: Bearer owner"], "").2;
            assert!(!text.contains(PROVIDER_KEY), "{path}");
        }
    }
    let first = api.get("/admin/v1/models?limit=2");
    assert_eq!(
        (&first["next"], api.get("/admin/v1/models?limit=2&after=chat")["data"][0]["name"].clone()),
        (&"chat".into(), "small".into())
    );
    let long = format!("after={}", "x".repeat(513));
    for wrong in ["limit=0", "limit=x", "limit=1001", "nonsense=1", &long] {
        assert_eq!(api.call("viewer", "GET", &format!("/admin/v1/models?{wrong}"), "").0, 400, "{wrong}");
    }
}

#[test]
fn live_requests_are_listed_and_cancelled_once() {
    let api = Api::start();
    let about = About { request_id: "req_1".into(), route: "/v1/chat/completions", ..About::default() };
    let (entry, cancelled) = api.gateway.live.begin(about, &Principal::default());
    entry.asks("chat", true);
    let listed = api.get("/admin/v1/requests?model=chat");
    assert_eq!(listed["data"][0]["request_id"], "req_1");
    assert_eq!(api.get("/admin/v1/requests?model=other")["data"], Value::Array(Vec::new()));
    let id = listed["data"][0]["id"].as_str().expect("an id").to_owned();
    let path = format!("/admin/v1/requests/{id}/cancel");
    assert_eq!(api.call("viewer", "POST", &path, "").0, 403);
    assert_eq!(api.call("operator", "POST", &path, "").0, 200);
    assert_eq!(api.call("operator", "POST", &path, "").0, 404, "told once");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(cancelled);
    drop(entry);
    assert_eq!(api.call("viewer", "GET", &format!("/admin/v1/requests/{id}"), "").0, 404);
}

#[test]
fn slow_heads_and_many_connections_do_not_stop_it() {
    let api = Api::start();
    let idle: Vec<_> = (0..300).filter_map(|_| TcpStream::connect(api.address).ok()).collect();
    let deadline = Instant::now() + Duration::from_secs(60);
    // The first 256 say nothing and are closed when their time is over; until then more are told to come back.
    let told = api.ask("GET", "/admin/v1/health", &[], "");
    assert!(matches!(told.0, 503 | 200 | 0), "{told:?}");
    while api.ask("GET", "/admin/v1/health", &[], "").0 != 200 {
        assert!(Instant::now() < deadline, "idle connections hold all places");
        std::thread::park_timeout(Duration::from_millis(100));
    }
    drop(idle);
}

#[test]
fn it_stops_in_order() {
    let mut api = Api::start();
    let file = api.dir.join(crate::ADDRESS_FILE);
    assert_eq!(std::fs::read_to_string(&file).expect("written"), format!("http://{}\n", api.address));
    api.running.stop();
    assert!(TcpStream::connect(api.address).is_err() && !file.exists());
}

#[test]
fn a_unix_socket_serves_too() {
    let path = std::env::temp_dir().join(format!("penstock-admin-{}.sock", std::process::id()));
    let api = Api::with(&|config| config.unix = Some(path.clone()));
    let mut stream = std::os::unix::net::UnixStream::connect(&path).expect("connects");
    let head =
        "GET /admin/v1/whoami HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer viewer\r\nconnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).expect("written");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read");
    assert!(text.ends_with("{\"key\":\"viewer\",\"role\":\"viewer\"}"), "{text}");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).expect("there").permissions());
    assert_eq!(mode & 0o777, 0o600);
    drop(api);
    assert!(!path.exists());
}

#[test]
fn every_change_and_every_refusal_is_in_the_audit_log() {
    let api = Api::start();
    let level = "/admin/v1/log-level";
    assert_eq!(api.call("operator", "PUT", level, "{\"level\": \"debug\"}").0, 200);
    assert_eq!(api.call("viewer", "PUT", level, "{\"level\": \"debug\"}").0, 403);
    assert_eq!(api.call("operator", "PUT", level, "{\"level\": \"loud\"}").0, 400);
    assert_eq!(api.call("operator", "POST", "/admin/v1/requests/77/cancel", "").0, 404);
    assert_eq!(api.call("stranger", "GET", level, "").0, 401);
    assert_eq!(api.call("stranger", "GET", level, "").0, 401);
    assert_eq!(api.call("viewer", "GET", "/admin/v1/audit", "").0, 403);
    let events = api.call("owner", "GET", "/admin/v1/audit?order=asc", "").1;
    let seen: Vec<_> = events["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|event| {
            ["actor", "action", "target", "outcome"].map(|field| event[field].as_str().unwrap_or("?").to_owned())
        })
        .collect();
    let expected = [
        ["operator", "log_level.set", "", "done"],
        ["viewer", "log_level.set", "", "denied"],
        ["operator", "log_level.set", "", "failed"],
        ["operator", "request.cancel", "77", "failed"],
        ["", "log_level.get", "", "denied"],
        ["viewer", "audit.list", "", "denied"],
    ];
    assert_eq!(seen, expected.map(|event| event.map(str::to_owned)), "guesses are noted once a minute");
    assert_eq!(events["data"][0]["detail"]["after"]["level"], "debug", "and to what");
    assert_eq!(events["data"][1]["detail"]["status"], 403);
    let denied = api.call("owner", "GET", "/admin/v1/audit?outcome=denied&action=log_level.*&limit=1", "").1;
    assert_eq!(denied["data"][0]["action"], "log_level.get", "newest first");
    let next = denied["next"].as_str().expect("there is more");
    let rest =
        api.call("owner", "GET", &format!("/admin/v1/audit?outcome=denied&action=log_level.*&after={next}"), "").1;
    assert_eq!((&rest["data"][0]["actor"], &rest["next"]), (&"viewer".into(), &Value::Null));
}

#[test]
fn usage_is_summed_by_anything() {
    let api = Api::start();
    let opened = |at: u64, key: &str, model: &str| OpenEntry {
        at,
        request: format!("req_{at}"),
        subject: Subject { key: key.into(), model: model.into(), ..Subject::default() }.into(),
        ..OpenEntry::default()
    };
    let entry = |at: u64, key: &str, model: &str| Entry {
        opened: opened(at, key, model),
        tokens: Tokens { input: 10, input_written: 3, output: 5, ..Tokens::default() },
        micro_usd: 250_000,
        status: 200,
        ..Entry::default()
    };
    let entries = vec![entry(1000, "a", "big"), entry(2000, "a", "small"), entry(3000, "b", "big")];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(api.store.settle_entries(entries.into())).expect("kept");
    let all = api.get("/admin/v1/usage?from=0&until=4000");
    assert_eq!((&all["data"][0]["requests"], &all["data"][0]["usd"]), (&3.into(), &0.75.into()));
    let by_key = api.get("/admin/v1/usage?from=0&until=4000&group=key&limit=1");
    assert_eq!((&by_key["data"][0]["groups"]["key"], &by_key["data"][0]["input_tokens"]), (&"a".into(), &20.into()));
    let next = by_key["next"].as_str().expect("there is more");
    let rest = api.get(&format!("/admin/v1/usage?from=0&until=4000&group=key&after={next}"));
    assert_eq!(rest["data"][0]["groups"]["key"], "b");
    assert_eq!(api.get("/admin/v1/usage?from=0&until=4000&key=b")["data"][0]["requests"], 1);
    let requests = api.get("/admin/v1/usage/requests?from=1500&until=4000&order=asc&limit=1");
    let first = &requests["data"][0];
    assert_eq!((&first["request_id"], &first["input_written_tokens"]), (&"req_2000".into(), &3.into()));
    let next = requests["next"].as_str().expect("there is more");
    let rest = api.get(&format!("/admin/v1/usage/requests?from=1500&until=4000&order=asc&after={next}"));
    assert_eq!((&rest["data"][0]["request_id"], &rest["next"]), (&"req_3000".into(), &Value::Null));
    let (_, head, text) =
        api.ask("GET", "/admin/v1/usage.csv?from=0&until=4000&group=key,model", &["authorization: Bearer viewer"], "");
    assert!(head.contains("text/csv") && text.starts_with("key,model,requests,"), "{text}");
    assert_eq!(text.lines().count(), 4);
    for wrong in ["group=colour", "limit=0", "from=-1"] {
        assert_eq!(api.call("viewer", "GET", &format!("/admin/v1/usage?{wrong}"), "").0, 400, "{wrong}");
    }
}

/// Config text as JSON.
fn text(text: &str, more: &str) -> String {
    format!("{{\"text\": {}{more}}}", serde_json::to_string(text).expect("text is JSON"))
}

#[test]
fn a_config_is_checked_applied_and_taken_back() {
    let api = Api::start();
    let config = api.get("/admin/v1/config");
    assert_eq!(
        (&config["version"], &config["text"]),
        (&1.into(), &penstock_proxy::reload::shown(&self::config()).into())
    );
    let renamed = self::config().replace("name = \"chat\"", "name = \"talk\"");
    let verdict = api.call("owner", "POST", "/admin/v1/config/validate", &text(&renamed, "")).1;
    assert_eq!((&verdict["valid"], &verdict["changes"][0]["path"]), (&true.into(), &"-models[chat]".into()));
    let bad = api.call("owner", "POST", "/admin/v1/config/validate", &text("[server]\nlissten = 1\n", "")).1;
    assert!(bad["valid"] == false && bad["faults"][0].as_str().is_some_and(|fault| fault.contains("lissten")), "{bad}");
    assert_eq!(api.get("/admin/v1/config")["version"], 1, "looking changes nothing");
    let (status, refused) = api.call("owner", "PUT", "/admin/v1/config", &text("[server]\nlissten = 1\n", ""));
    assert_eq!((status, &refused["error"]["param"]), (400, &"text".into()));
    assert!(refused["error"]["details"][0].as_str().is_some_and(|fault| fault.contains("lissten")), "{refused}");
    let (status, stale) = api.call("owner", "PUT", "/admin/v1/config", &text(&renamed, ", \"expected_version\": 9"));
    assert_eq!((status, &stale["error"]["code"]), (412, &"version_mismatch".into()));
    assert_eq!(api.call("operator", "PUT", "/admin/v1/config", &text(&renamed, "")).0, 403);
    let (status, applied) =
        api.call("owner", "PUT", "/admin/v1/config", &text(&renamed, ", \"note\": \"a better name\""));
    assert_eq!((status, &applied["persisted"]), (200, &false.into()), "{applied}");
    assert_eq!(api.call("viewer", "GET", "/admin/v1/models/talk", "").0, 200);
    let history = api.get("/admin/v1/config/history");
    assert_eq!((&history["data"][0]["note"], &history["data"][0]["actor"]), (&"a better name".into(), &"owner".into()));
    let (status, _) = api.call("owner", "POST", "/admin/v1/config/rollback", "{\"version\": 1}");
    assert_eq!(status, 200);
    assert_eq!(api.call("viewer", "GET", "/admin/v1/models/talk", "").0, 404);
    assert_eq!(api.call("owner", "POST", "/admin/v1/config/rollback", "{\"version\": 99}").0, 404);
    let audit = api.call("owner", "GET", "/admin/v1/audit?action=config.*&outcome=done", "").1;
    assert_eq!(audit["data"][1]["action"], "config.apply");
    assert_eq!(audit["data"][1]["detail"]["changes"][0], "-models[chat]");
}

#[test]
fn of_many_changes_at_once_one_wins() {
    let api = Api::start();
    let wins = std::thread::scope(|scope| {
        let apply = |at: usize| {
            let own = self::config().replace("default", &format!("other-{at}"));
            api.call("owner", "PUT", "/admin/v1/config", &text(&own, ", \"expected_version\": 1")).0
        };
        let all: Vec<_> = (0..8).map(|at| scope.spawn(move || apply(at))).collect();
        let statuses: Vec<u16> = all.into_iter().map(|one| one.join().expect("no panic")).collect();
        assert!(statuses.iter().all(|status| matches!(status, 200 | 412)), "{statuses:?}");
        statuses.into_iter().filter(|status| *status == 200).count()
    });
    assert_eq!((wins, &api.get("/admin/v1/config")["version"]), (1, &2.into()));
}

#[test]
fn secrets_in_a_config_are_hidden_and_kept() {
    let api = Api::start();
    let shown = api.get("/admin/v1/config")["text"].as_str().expect("text").to_owned();
    assert!(!shown.contains(PROVIDER_KEY) && shown.contains("x-key = \"[hidden]\""), "{shown}");
    assert!(shown.contains("id = \"owner\"\ndigest = \"[hidden]\""), "{shown}");
    let edited = shown.replace("name = \"chat\"", "name = \"talk\"");
    let (status, body) = api.call("owner", "PUT", "/admin/v1/config", &text(&edited, ""));
    assert_eq!(status, 200, "{body}");
    let providers = &api.gateway.serving().config.providers;
    assert_eq!(providers[0].headers[0].1.expose(), PROVIDER_KEY, "what was hidden is what it was");
    let (status, body) = api.call("owner", "PUT", "/admin/v1/config", &text(&edited.replace("acme", "other"), ""));
    assert!(status == 400 && body.to_string().contains("providers[other].headers"), "{body}");
    for path in ["/admin/v1/config/history/1", "/admin/v1/config/history/2", "/admin/v1/audit"] {
        let (status, body) = api.call("owner", "GET", path, "");
        assert!(status == 200 && !body.to_string().contains(PROVIDER_KEY), "{path}: {body}");
    }
}

#[test]
fn keys_of_the_config_are_those_in_force() {
    let api = Api::start();
    let digest: String = Sha256::digest("fresh").iter().map(|byte| format!("{byte:02x}")).collect();
    let own = format!("{BASE}[[admin_keys]]\nid = \"fresh\"\ndigest = \"{digest}\"\nrole = \"owner\"\n");
    assert_eq!(api.call("owner", "PUT", "/admin/v1/config", &text(&own, "")).0, 200);
    assert_eq!(api.call("owner", "GET", "/admin/v1/whoami", "").0, 401, "it is not in the config any more");
    assert_eq!(api.call("fresh", "GET", "/admin/v1/whoami", "").1["role"], "owner");
    assert!(!api.call("fresh", "GET", "/admin/v1/config", "").1.to_string().contains(&digest));
    // Without any, the machine's own key counts.
    assert_eq!(api.call("fresh", "PUT", "/admin/v1/config", &text(BASE, "")).0, 200);
    assert_eq!(api.call("fresh", "GET", "/admin/v1/whoami", "").0, 401);
    let local = std::fs::read_to_string(crate::key_path(&api.dir)).expect("it was made");
    assert_eq!(api.call(local.trim(), "GET", "/admin/v1/whoami", "").1["key"], "local");
}

#[test]
fn a_key_lives_and_its_text_is_seen_once() {
    let api = Api::start();
    let wish = "{\"name\": \"search\", \"allowed\": {\"models\": [\"chat*\"], \"addresses\": [\"10.0.0.0/8\", \"::1\"]}, \"limits\": [\"small\"]}";
    assert_eq!(api.call("operator", "POST", "/admin/v1/keys", wish).0, 403, "an operator gives nobody rights");
    let (status, made) = api.call("owner", "POST", "/admin/v1/keys", wish);
    assert_eq!(status, 201, "{made}");
    let secret = made["secret"].as_str().expect("the text").to_owned();
    let id = made["key"]["id"].as_str().expect("an id").to_owned();
    let path = format!("/admin/v1/keys/{id}");
    let key = api.get(&path);
    assert_eq!((&key["state"], &key["allowed"]["addresses"][1]), (&"good".into(), &"::1/128".into()));
    let version = key["version"].clone();
    let patch = |body: &str| api.call("owner", "PATCH", &path, body);
    let (status, changed) = patch(&format!("{{\"name\": \"find\", \"expected_version\": {version}}}"));
    assert_eq!((status, &changed["name"], &changed["limits"][0]), (200, &"find".into(), &"small".into()), "{changed}");
    let (status, stale) = patch(&format!("{{\"name\": \"lost\", \"expected_version\": {version}}}"));
    assert_eq!((status, &stale["error"]["code"]), (412, &"version_mismatch".into()));
    let stale = format!("if-match: \"{version}\"");
    let fields = ["authorization: Bearer owner", "content-type: application/json", &stale];
    assert_eq!(api.ask("PATCH", &path, &fields, "{\"name\": \"lost\"}").0, 412);
    assert_eq!(patch("{\"limits\": [\"nowhere\"]}").0, 400);
    assert_eq!(patch("{\"team\": \"nobody\"}").0, 400);
    assert_eq!(patch("{\"expires\": 1}").0, 400, "it lies in the past");
    let (status, rotated) = api.call("owner", "POST", &format!("{path}/rotate"), "{\"grace_seconds\": 60}");
    assert!(
        status == 200 && rotated["secret"] != made["secret"] && rotated["key"]["previous_until"].is_u64(),
        "{rotated}"
    );
    let (status, revoked) = api.call("operator", "POST", &format!("{path}/revoke"), "");
    assert_eq!((status, &revoked["state"]), (200, &"revoked".into()), "taking away is an operator's");
    assert_eq!(api.call("owner", "POST", &format!("{path}/rotate"), "{}").0, 409);
    assert_eq!(api.get("/admin/v1/keys?revoked=false")["data"], Value::Array(Vec::new()));
    assert_eq!(api.get("/admin/v1/keys")["data"][0]["id"], id.as_str());
    for path in ["/admin/v1/keys", &path, "/admin/v1/audit", "/admin/v1/config"] {
        let text = api.ask("GET", path, &["authorization: Bearer owner"], "").2;
        for secret in [secret.as_str(), rotated["secret"].as_str().expect("a text")] {
            assert!(!text.contains(secret), "{path}");
        }
    }
    assert_eq!(api.call("viewer", "GET", "/admin/v1/keys/key_nothing", "").0, 404);
}

#[test]
fn teams_and_users_are_made_changed_and_removed() {
    let api = Api::start();
    for kind in ["teams", "users"] {
        let all = format!("/admin/v1/{kind}");
        let wish = "{\"id\": \"research lab\", \"allowed\": {\"models\": [\"chat\"]}}";
        assert_eq!(api.call("owner", "POST", &all, wish).0, 201);
        assert_eq!(api.call("owner", "POST", &all, wish).0, 409, "there is one");
        let one = format!("{all}/research%20lab");
        let owner = api.get(&one);
        assert_eq!((&owner["name"], &owner["blocked"]), (&"research lab".into(), &false.into()));
        let (status, changed) = api.call("owner", "PATCH", &one, "{\"blocked\": true}");
        assert_eq!(
            (status, &changed["blocked"], &changed["allowed"]["models"][0]),
            (200, &true.into(), &"chat".into())
        );
        let stale = format!("{{\"expected_version\": {}}}", owner["version"]);
        assert_eq!(api.call("owner", "PATCH", &one, &stale).0, 412);
        assert_eq!(api.get(&all)["data"][0]["id"], "research lab");
        assert_eq!(api.call("owner", "DELETE", &one, "").0, 204);
        assert_eq!(api.call("owner", "DELETE", &one, "").0, 404);
        for wrong in
            ["{\"id\": \"\"}", "{}", "{\"id\": \"x\", \"team\": \"nobody\"}", "{\"id\": \"x\", \"limits\": [\"none\"]}"]
        {
            assert_eq!(api.call("owner", "POST", &all, wrong).0, 400, "{wrong}");
        }
    }
}

#[test]
fn limits_say_whether_they_act() {
    let api = Api::start();
    let limit = api.get("/admin/v1/limits/small");
    assert_eq!(
        (&limit["measures"][0]["measure"], &limit["measures"][0]["max"]),
        (&"requests_per_minute".into(), &60.0.into()),
        "{limit}"
    );
    assert_eq!(limit["effective"], false, "nobody of the config names it");
    assert_eq!(api.get("/admin/v1/limits/small/counters")["data"], Value::Array(Vec::new()));
    assert_eq!(api.call("viewer", "GET", "/admin/v1/limits/other/counters", "").0, 404);
    assert_eq!(api.get("/admin/v1/status")["limits_ineffective"][0], "small");
}

/// Writes the table of routes into the page anew when `PENSTOCK_BLESS` is set.
#[test]
fn the_page_lists_every_route() {
    let (_, document) = routes::all().split_for_parts();
    let document = document::complete(&document).expect("valid");
    let mut lines = String::from("| route | role | |\n|---|---|---|\n");
    let paths = document["paths"].as_object().expect("paths");
    for (path, item) in paths {
        for (method, operation) in item.as_object().into_iter().flatten() {
            let role = operation["security"][0]["admin_key"][0].as_str().unwrap_or("none");
            let about = operation["summary"].as_str().unwrap_or_default();
            assert!(!about.is_empty(), "{method} {path} says nothing of itself");
            lines += &format!("| `{} {path}` | {role} | {about} |\n", method.to_ascii_uppercase());
        }
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/admin.md");
    let page = std::fs::read_to_string(path).expect("the page");
    let (front, rest) = page.split_once("<!-- routes -->\n").expect("where the table begins");
    let (_, back) = rest.split_once("<!-- end -->").expect("where it ends");
    let expected = format!("{front}<!-- routes -->\n{lines}<!-- end -->{back}");
    if std::env::var_os("PENSTOCK_BLESS").is_some() {
        std::fs::write(path, &expected).expect("written");
    } else {
        assert!(
            page == expected,
            "docs/reference/admin.md is not what the routes say; run the tests with PENSTOCK_BLESS=1"
        );
    }
}

/// Somebody who has signed in: the fields that a page of the console sends.
struct Session {
    cookie: String,
    token: String,
}

impl Session {
    fn open(api: &Api, role: &str) -> Self {
        let body = format!("{{\"key\": \"{role}\"}}");
        let (status, head, body) = api.ask("POST", "/admin/v1/session", &["content-type: application/json"], &body);
        assert_eq!(status, 201, "{body}");
        let cookie = head.lines().find_map(|line| line.strip_prefix("set-cookie: ")).expect("a cookie");
        let (pair, rest) = cookie.split_once("; ").expect("a pair, and attributes");
        assert_eq!(rest, "Path=/admin/v1; HttpOnly; SameSite=Strict");
        let body: Value = serde_json::from_str(&body).expect("JSON");
        assert_eq!((&body["key"], &body["role"]), (&role.into(), &role.into()));
        let token = body["token"].as_str().expect("a token").to_owned();
        Self { cookie: format!("cookie: {pair}"), token: format!("x-penstock-session: {token}") }
    }

    fn call(&self, api: &Api, method: &str, path: &str, body: &str) -> (u16, String) {
        let fields = [&self.cookie, &self.token, "origin: http://localhost", "content-type: application/json"];
        let (status, _, body) = api.ask(method, path, &fields, body);
        (status, body)
    }
}

#[test]
fn a_session_may_what_its_key_may_on_every_route() {
    let api = Api::start();
    let sessions = Role::ALL.map(|role| (role, Session::open(&api, role.name())));
    for (path, method, access) in table() {
        // Signing out would end the test's own session.
        let Access::Role(needed) = access else { continue };
        if path == "/admin/v1/session" {
            continue;
        }
        for (role, session) in &sessions {
            let (got, body) = session.call(&api, method.as_str(), &concrete(&path), "{\"no\": 1}");
            if *role < needed {
                assert_eq!(got, 403, "{method} {path} as {role}: {body}");
            } else {
                assert!(!matches!(got, 0 | 401 | 403 | 429 | 500..), "{method} {path} as {role}: {got} {body}");
            }
        }
    }
    for (role, session) in &sessions {
        let (status, body) = session.call(&api, "GET", "/admin/v1/session", "");
        assert!(status == 200 && body.contains(&format!("\"role\":\"{role}\"")), "{body}");
        assert_eq!(session.call(&api, "DELETE", "/admin/v1/session", "").0, 204);
        assert_eq!(session.call(&api, "GET", "/admin/v1/session", "").0, 401, "it is over");
    }
    assert_eq!(api.call("viewer", "GET", "/admin/v1/session", "").0, 404, "a key is no session");
    assert_eq!(api.call("viewer", "DELETE", "/admin/v1/session", "").0, 404);
}

#[test]
fn a_change_needs_cookie_token_and_a_page_of_this_origin() {
    let api = Api::with(&|config| config.origins = vec!["https://console.example".into()]);
    let session = Session::open(&api, "owner");
    let (cookie, token) = (session.cookie.as_str(), session.token.as_str());
    let put = |fields: &[&str]| {
        let fields = [fields, &["content-type: application/json"]].concat();
        api.ask("PUT", "/admin/v1/log-level", &fields, "{\"level\": \"debug\"}").0
    };
    assert_eq!(put(&[cookie, token, "origin: http://localhost"]), 200);
    assert_eq!(put(&[cookie, token, "sec-fetch-site: same-origin"]), 200);
    for fields in [
        &[][..],
        &[cookie],
        &[token],
        &["origin: http://localhost"],
        &[cookie, "origin: http://localhost"],
        &[cookie, token],
        &[cookie, token, "origin: http://localhost:3000"],
        &[cookie, token, "origin: http://evil.example"],
        &[cookie, token, "origin: null"],
        &[cookie, token, "origin: http://localhost", "origin: http://localhost"],
        &[cookie, token, "sec-fetch-site: same-site"],
        &[cookie, token, "sec-fetch-site: none"],
        // An origin that may use the API with a key of its own has no part in others' sessions.
        &[cookie, token, "origin: https://console.example"],
        &[cookie, "x-penstock-session: ", "origin: http://localhost"],
        &[cookie, token, "origin: http://localhost", "authorization: Basic x"],
    ] {
        assert!(matches!(put(fields), 401 | 403), "{fields:?}");
    }
    // What reads needs the token as well.
    assert_eq!(api.ask("GET", "/admin/v1/status", &[cookie], "").0, 403);
    assert_eq!(api.ask("GET", "/admin/v1/status", &[cookie, token], "").0, 200);
    let other = cookie.replace("penstock_session", "penstock_session_1");
    assert_eq!(api.ask("GET", "/admin/v1/status", &[&other, token], "").0, 401, "another gateway's cookie");
}

#[test]
fn signing_in_is_slowed_down_and_noted_like_guessing() {
    let api = Api::start();
    let sign_in = |key: &str| {
        let body = format!("{{\"key\": \"{key}\"}}");
        api.ask("POST", "/admin/v1/session", &["content-type: application/json"], &body).0
    };
    assert_eq!(sign_in("owner"), 201);
    let refused = (0..60).map(|_| sign_in("psa_guess")).find(|status| *status != 401);
    assert_eq!(refused, Some(429));
    let key = "authorization: Bearer psa_guess";
    assert_eq!(api.ask("GET", "/admin/v1/status", &[key], "").0, 429, "one count for both ways");
    assert_eq!(sign_in("owner"), 201, "a key that has been good is let in");
    let events = api.call("owner", "GET", "/admin/v1/audit?action=session.*&order=asc", "").1;
    let seen: Vec<_> = events["data"].as_array().expect("a list").iter().map(|one| one["outcome"].clone()).collect();
    assert_eq!(seen, ["done", "denied", "done"], "{events}");
    assert_eq!(events["data"][0]["actor"], "owner");
}

#[test]
fn the_console_is_strict_and_can_be_off() {
    let api = Api::start();
    let (status, head, page) = api.ask("GET", "/console/", &[], "");
    assert!(status == 200 && page.contains("<title>"), "{head}");
    for field in [
        "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
         img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
        "x-frame-options: deny",
        "x-content-type-options: nosniff",
        "referrer-policy: no-referrer",
    ] {
        assert!(head.lines().any(|line| line == field), "{field} in {head}");
    }
    assert_eq!(api.ask("GET", "/console/", &["host: evil.example"], "").0, 403);
    assert_eq!(api.ask("GET", "/console/../admin/v1/status", &[], "").0, 404);
    assert_eq!(api.ask("PUT", "/console/", &[], "").0, 405);
    let session = Session::open(&api, "owner");
    let off = format!("{}\n[admin]\nconsole = false\n", self::config());
    assert_eq!(session.call(&api, "PUT", "/admin/v1/config", &text(&off, "")).0, 200);
    assert_eq!(session.call(&api, "GET", "/admin/v1/status", "").0, 401);
    assert_eq!(api.ask("GET", "/console/", &[], "").0, 404);
    let sign_in = api.ask("POST", "/admin/v1/session", &["content-type: application/json"], "{\"key\": \"owner\"}");
    assert_eq!(sign_in.0, 404);
    assert_eq!(api.call("owner", "GET", "/admin/v1/whoami", "").0, 200, "keys are what they were");
}

#[test]
fn a_session_follows_its_key() {
    let api = Api::start();
    let session = Session::open(&api, "owner");
    // The same key is a viewer's now.
    let digest: String = Sha256::digest("owner").iter().map(|byte| format!("{byte:02x}")).collect();
    let own = format!("{BASE}[[admin_keys]]\nid = \"less\"\ndigest = \"{digest}\"\nrole = \"viewer\"\n");
    assert_eq!(session.call(&api, "PUT", "/admin/v1/config", &text(&own, "")).0, 200);
    let (status, body) = session.call(&api, "GET", "/admin/v1/whoami", "");
    assert_eq!((status, body.as_str()), (200, "{\"key\":\"less\",\"role\":\"viewer\"}"));
    assert_eq!(session.call(&api, "GET", "/admin/v1/audit", "").0, 403);
}

#[test]
fn a_stream_ends_with_its_session_and_with_the_process() {
    let mut api = Api::start();
    let stream = |session: &Session| {
        let mut stream = connect(Ipv4Addr::LOCALHOST, api.address);
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        let Session { cookie, token } = session;
        let head = format!(
            "GET /admin/v1/live HTTP/1.1\r\nhost: localhost\r\n{cookie}\r\n{token}\r\naccept: text/event-stream\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).expect("sent");
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains("\n\n\r\n") {
            let mut piece = [0; 4096];
            let count = stream.read(&mut piece).expect("an event");
            assert!(count > 0, "{}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&piece[..count]);
        }
        assert!(String::from_utf8_lossy(&seen).starts_with("HTTP/1.1 200"), "{}", String::from_utf8_lossy(&seen));
        stream
    };
    let session = Session::open(&api, "viewer");
    let mut ended = stream(&session);
    assert_eq!(session.call(&api, "DELETE", "/admin/v1/session", "").0, 204);
    let mut rest = String::new();
    let mut piece = [0; 4096];
    while !rest.contains("0\r\n\r\n") {
        let count = ended.read(&mut piece).expect("the end");
        assert!(count > 0, "{rest}");
        rest += &String::from_utf8_lossy(&piece[..count]);
    }
    assert!(rest.contains("event: end"), "{rest}");
    let session = Session::open(&api, "viewer");
    let mut open = stream(&session);
    api.running.stop();
    let mut rest = Vec::new();
    open.read_to_end(&mut rest).expect("closed");
}
