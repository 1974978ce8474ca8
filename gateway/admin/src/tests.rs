//! Tests of the API as its callers see it: over sockets, with every role on every route.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Method;
use penstock_config::{AdminConfig, AdminListen, Overrides, Role, Snapshot};
use penstock_pool::weights_cache::CopyLayout;
use penstock_proxy::Gateway;
use penstock_proxy::fleet::{Fleet, WorkerCommand};
use penstock_proxy::reload::{Begin, Live, Source};
use penstock_store::{Sqlite, SqliteOptions, Store};
use penstock_telemetry::AccessLog;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::roles::{Access, Routes};
use crate::{LogFilter, Parts, Running, document, routes, start};

mod audit;
mod config;
mod connections;
mod dry_run;
mod entries;
mod gate;
mod keys;
mod server;
mod session;
mod state;
mod stored;
mod usage;

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
            is_on_gpu: |_| Ok(false),
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

/// Config text as JSON.
fn text(text: &str, more: &str) -> String {
    format!("{{\"text\": {}{more}}}", serde_json::to_string(text).expect("text is JSON"))
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
