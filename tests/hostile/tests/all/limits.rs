//! Every route, with every kind of credential, under used-up limits: a route is held to them, or [`held`] says that it
//! is not.
//!
//! A new route is in none of the arms of [`held`], so the compiler demands one.

use std::net::SocketAddr;

use http::Method;
use penstock_auth::NewKey;
use penstock_auth::route::{self, Route};
use penstock_base::clock;
use penstock_hostile::raw::{self, Client, Reply};
use penstock_hostile::{Folder, PATIENCE, Server};
use penstock_types::Surface;
use penstock_types::ask::Ask;

/// Effect of a used-up limit on a route.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Held {
    /// A model answers: all limits count.
    Whole,
    /// A model is used but generates no tokens: one request, and one in flight.
    Request,
    /// Forwarded without being understood: one request, one in flight, and refused where tokens or money are limited.
    Opaque,
    /// No model is used: nothing counts.
    Nothing,
}

fn held(route: &Route) -> Held {
    match route {
        Route::Ask(_) => Held::Whole,
        Route::Count(_) | Route::Tokenize | Route::Detokenize => Held::Request,
        Route::Forward(_) | Route::Realtime => Held::Opaque,
        // The stored bytes are bounded by `store`, and queued work counts when it is answered.
        Route::Stored(_) => Held::Nothing,
        Route::Models
        | Route::Model(_)
        | Route::Running
        | Route::Show
        | Route::Health
        | Route::Ready
        | Route::Ping
        | Route::Version
        | Route::Metrics
        | Route::Status => Held::Nothing,
    }
}

/// Limits, one of each kind, with the status of a route that is held to it.
const LIMITS: [(&str, &str, [u16; 3]); 3] = [
    // Statuses of `Whole`, `Request`, `Opaque`.
    ("requests", "requests_per_day = 1", [429, 429, 429]),
    ("places", "in_flight = 1", [429, 429, 429]),
    ("tokens", "tokens_per_day = 1", [429, 0, 403]),
];

/// Credentials and the limits that they are under.
const CONFIG: &str = r#"
[auth]
failures_per_minute = 0
anonymous = "allow"
[[teams]]
id = "crowd"
limits = ["held"]
[[keys]]
id = "named"
key_env = "NAMED"
limits = ["held"]
routes = ["*"]
[[keys]]
id = "teamed"
key_env = "TEAMED"
team = "crowd"
[[keys]]
id = "free"
key_env = "FREE"
routes = ["*"]
"#;

fn config(folder: &Folder, limit: &str) -> String {
    let limits = [("held", "named"), ("held-by-nobody", "anonymous")];
    let limits: String =
        limits.iter().map(|(id, applies)| format!("[[limits]]\nid = {id:?}\nfor = {applies:?}\n{limit}\n")).collect();
    folder.config(&format!("{CONFIG}{limits}"))
}

/// A request that a route would answer without limits.
fn request(method: &Method, target: &str, secret: Option<&str>) -> String {
    let route = Route::parse(method, target).expect("an example");
    let target = target.replace("models/m", "models/puppet");
    let (target, body) = match &route {
        Route::Realtime => (format!("{target}?model=puppet"), None),
        _ if *method != Method::POST => (target, None),
        route => (target, Some(body(route))),
    };
    let key = secret.map_or(String::new(), |secret| format!("Authorization: Bearer {secret}\r\n"));
    let upgrade = match route {
        Route::Realtime => {
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        }
        _ => "Connection: close\r\n",
    };
    let head = format!("{method} {target} HTTP/1.1\r\nHost: a\r\n{upgrade}{key}");
    match body {
        None => format!("{head}\r\n"),
        Some(body) => format!("{head}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len()),
    }
}

fn body(route: &Route) -> &'static str {
    match route {
        Route::Ask(Ask { surface, variant, .. }) | Route::Count(Ask { surface, variant, .. }) => match surface {
            Surface::Chat => r#"{"model":"puppet","messages":[{"role":"user","content":"say 1"}]}"#,
            Surface::Completions => r#"{"model":"puppet","prompt":"say 1"}"#,
            Surface::Responses => r#"{"model":"puppet","input":"say 1"}"#,
            Surface::Embeddings => r#"{"model":"puppet","input":"a"}"#,
            Surface::Rerank => r#"{"model":"puppet","query":"a","documents":["b"]}"#,
            Surface::Score => r#"{"model":"puppet","text_1":"a","text_2":"b"}"#,
            Surface::Messages | Surface::CountTokens => {
                r#"{"model":"puppet","max_tokens":5,"messages":[{"role":"user","content":"say 1"}]}"#
            }
            Surface::Generate => r#"{"contents":[{"role":"user","parts":[{"text":"say 1"}]}]}"#,
            Surface::Embed if *variant == penstock_types::ask::Variant::Batch => {
                r#"{"requests":[{"model":"models/puppet","content":{"parts":[{"text":"a"}]}}]}"#
            }
            Surface::Embed => r#"{"content":{"parts":[{"text":"a"}]}}"#,
            Surface::OllamaChat => r#"{"model":"puppet","messages":[{"role":"user","content":"say 1"}]}"#,
            Surface::OllamaGenerate => r#"{"model":"puppet","prompt":"say 1"}"#,
            Surface::OllamaEmbed => r#"{"model":"puppet","input":"a","prompt":"a"}"#,
        },
        Route::Tokenize => r#"{"model":"puppet","prompt":"a"}"#,
        Route::Show => r#"{"model":"puppet"}"#,
        Route::Detokenize => r#"{"model":"puppet","tokens":[1]}"#,
        Route::Forward(_) => r#"{"model":"puppet","input":"a"}"#,
        _ => "{}",
    }
}

async fn ask(address: SocketAddr, method: &Method, target: &str, secret: Option<&str>) -> Reply {
    let mut client = Client::connect(address).await;
    client.send(request(method, target, secret)).await;
    client.answer().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_is_held_to_limits_that_are_used_up() {
    for (kind, limit, statuses) in LIMITS {
        let folder = Folder::new();
        let server = Server::kept(&config(&folder, limit)).await;
        let desk = server.gateway.desk().expect("a store");
        let now = clock::unix_seconds();
        let wish = || NewKey { limits: vec!["held".into()], ..NewKey::default() };
        let issued = desk.create(wish(), now).await.expect("a key");
        let parent = desk.create(wish(), now).await.expect("a key");
        let child = NewKey { parent: Some(parent.record.id.clone()), ..NewKey::default() };
        let child = desk.create(child, now).await.expect("a key");
        let [issued, child] = [&issued, &child].map(|key| key.secret.expose().to_owned());
        let credentials: [(&str, Option<&str>); 5] = [
            ("a key", Some("secret-NAMED")),
            ("a team's key", Some("secret-TEAMED")),
            ("an issued key", Some(&issued)),
            ("a child of a key under the limit", Some(&child)),
            ("nobody", None),
        ];
        for (who, secret) in credentials {
            // Uses the limit up: a request that is answered, or one that stays in flight during the others.
            let mut first = Client::connect(server.address).await;
            let script = if kind == "places" { "hang" } else { "say 1" };
            let key = secret.map_or(String::new(), |secret| format!("Host: a\r\nAuthorization: Bearer {secret}"));
            let asked = raw::chat(script, kind == "places");
            first.send(if secret.is_some() { asked.replace("Host: a", &key) } else { asked }).await;
            if kind == "places" {
                first.until(PATIENCE, |text| text.contains("200 OK")).await;
            } else if kind == "requests" {
                assert_eq!(first.answer().await.status, 200, "the first of {who}");
            }
            for (method, target) in route::examples() {
                let route = Route::parse(&method, &target).expect("an example");
                let reply = ask(server.address, &method, &target, secret).await;
                let expected = match held(&route) {
                    Held::Whole => statuses[0],
                    Held::Request => statuses[1],
                    Held::Opaque => statuses[2],
                    Held::Nothing => 0,
                };
                // Queued work is answered, and held to limits, later; a metric is for operators.
                let is_named = target == "/metrics" && reply.status == 403;
                let status = if matches!(reply.status, 429 | 403) && !is_named { reply.status } else { 0 };
                assert_eq!(status, expected, "{method} {target}, {kind}, {who}: {}", reply.text);
                if expected == 429 {
                    let names = ["retry-after", "x-should-retry"];
                    let says = names.iter().any(|name| reply.header(name).is_some());
                    assert!(says && reply.text.contains("held"), "{method} {target}: {}", reply.text);
                }
            }
        }
        // A credential without limits is refused nowhere.
        for (method, target) in route::examples() {
            let reply = ask(server.address, &method, &target, Some("secret-FREE")).await;
            assert!(!matches!(reply.status, 429 | 403 | 401), "{method} {target}: {}", reply.text);
        }
        let text = server.gateway.render_metrics();
        assert!(text.contains("penstock_limit_decisions_total{limit=\"held\",decision=\"denied\"}"), "{text}");
    }
}
