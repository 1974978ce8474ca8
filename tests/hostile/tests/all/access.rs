//! Access: every route with every kind of credential, guessing, revocation, and one tenant looking for another's
//! things.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use penstock_auth::route;
use penstock_auth::{Desk, Issued, NewKey};
use penstock_base::clock;
use penstock_hostile::raw::{self, Reply};
use penstock_hostile::{Folder, PATIENCE, Server, eventually, promised};

/// Sends a request with these header lines; the connection closes after it.
async fn ask(address: SocketAddr, method: &str, target: &str, headers: &[&str]) -> Reply {
    let lines: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    let head = format!("{method} {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{lines}");
    let body = if method == "POST" { "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}" } else { "\r\n" };
    raw::send(address, format!("{head}{body}")).await
}

async fn models(address: SocketAddr, secret: &str) -> u16 {
    ask(address, "GET", "/v1/models", &[&format!("Authorization: Bearer {secret}")]).await.status
}

/// Waits until a new secret is accepted, which may have been made at another gateway: a gateway learns of it within a
/// second.
async fn soon_good(address: SocketAddr, secret: &str) {
    let began = std::time::Instant::now();
    while models(address, secret).await != 200 {
        assert!(began.elapsed() < Duration::from_secs(5), "not good within a second");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn desk(server: &Server) -> Desk {
    server.gateway.desk().expect("a store")
}

async fn issue(server: &Server, wish: NewKey) -> Issued {
    desk(server).create(wish, clock::unix_seconds()).await.expect("a key")
}

const KEYS: &str = r#"
[auth]
failures_per_minute = 0
[[teams]]
id = "narrow"
routes = ["/health"]
[[keys]]
id = "all"
key_env = "ALL"
[[keys]]
id = "operator"
key_env = "OPERATOR"
routes = ["*"]
[[keys]]
id = "routed"
key_env = "ROUTED"
routes = ["/health"]
[[keys]]
id = "spoken"
key_env = "SPOKEN"
dialects = ["anthropic"]
[[keys]]
id = "placed"
key_env = "PLACED"
addresses = ["192.0.2.0/24"]
[[keys]]
id = "over"
key_env = "OVER"
expires = 2020-01-01
[[keys]]
id = "teamed"
key_env = "TEAMED"
team = "narrow"
"#;

/// Value of a credential on a route that needs one.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Worth {
    /// Access, with whatever answer the route gives.
    In,
    /// Access, except where a route must be granted by name.
    InUnnamed,
    Unauthorized,
    Forbidden,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_holds_every_credential_to_what_it_may() {
    let folder = Folder::new();
    let server = Server::kept(&folder.config(KEYS)).await;
    let good = issue(&server, NewKey::default()).await;
    let parent = issue(&server, NewKey::default()).await;
    let child = issue(&server, NewKey { parent: Some(parent.record.id.clone()), ..NewKey::default() }).await;
    let gone = issue(&server, NewKey::default()).await;
    for id in [&gone.record.id, &parent.record.id] {
        desk(&server).revoke(id, clock::unix_seconds()).await.expect("revoked");
    }
    let bearer = |secret: &str| format!("Authorization: Bearer {secret}");
    let issued = |key: &Issued| bearer(key.secret.expose());
    let typo = bearer(&good.secret.expose().replace("sk-ps-", "sk-ps-x"));
    let cases: Vec<(&str, Vec<String>, Worth)> = vec![
        ("none", vec![], Worth::Unauthorized),
        ("empty", vec!["Authorization:".into()], Worth::Unauthorized),
        ("empty bearer", vec![bearer("")], Worth::Unauthorized),
        ("basic", vec!["Authorization: Basic c2VjcmV0LUFMTA==".into()], Worth::Unauthorized),
        ("no scheme", vec!["Authorization: secret-ALL".into()], Worth::Unauthorized),
        ("wrong", vec![bearer("secret-ALl")], Worth::Unauthorized),
        ("prefix", vec![bearer("secret-AL")], Worth::Unauthorized),
        ("longer", vec![bearer("secret-ALL ALL")], Worth::Unauthorized),
        ("digest", vec![bearer("[digest]")], Worth::Unauthorized),
        ("id", vec![bearer("all")], Worth::Unauthorized),
        ("issued id", vec![bearer(good.record.id.as_str())], Worth::Unauthorized),
        ("twice", vec![bearer("secret-ALL"), bearer("secret-ALL")], Worth::Unauthorized),
        ("two kinds", vec![bearer("secret-ALL"), "x-api-key: secret-ALL".into()], Worth::Unauthorized),
        ("typo", vec![typo], Worth::Unauthorized),
        ("sql", vec![bearer("' OR '1'='1' --")], Worth::Unauthorized),
        ("sql issued", vec![bearer("sk-ps-'; DROP TABLE keys; --")], Worth::Unauthorized),
        ("token", vec![bearer("eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbGwifQ.")], Worth::Unauthorized),
        ("huge", vec![bearer(&"k".repeat(20_000))], Worth::Unauthorized),
        ("cookie", vec!["Cookie: key=secret-ALL".into()], Worth::Unauthorized),
        ("expired", vec![bearer("secret-OVER")], Worth::Unauthorized),
        ("revoked", vec![issued(&gone)], Worth::Unauthorized),
        ("child of a revoked one", vec![issued(&child)], Worth::Unauthorized),
        ("other routes", vec![bearer("secret-ROUTED")], Worth::Forbidden),
        ("other routes of its team", vec![bearer("secret-TEAMED")], Worth::Forbidden),
        ("other addresses", vec![bearer("secret-PLACED")], Worth::Forbidden),
        ("said to be elsewhere", vec![bearer("secret-PLACED"), "X-Forwarded-For: 192.0.2.1".into()], Worth::Forbidden),
        ("good", vec![bearer("secret-ALL")], Worth::InUnnamed),
        ("issued", vec![issued(&good)], Worth::InUnnamed),
        ("x-api-key", vec![format!("x-api-key: {}", good.secret.expose())], Worth::InUnnamed),
        ("operator", vec![bearer("secret-OPERATOR")], Worth::In),
    ];
    eventually("the revocations are seen", || server.gateway.render_metrics().contains("penstock_auth_issued_keys 2"))
        .await;
    let open = ["/health", "/ready", "/ping"];
    for (method, target) in route::examples() {
        for (name, headers, worth) in &cases {
            let headers: Vec<&str> = headers.iter().map(String::as_str).collect();
            let reply = ask(server.address, method.as_str(), &target, &headers).await;
            let refused = match reply.status {
                401 => Worth::Unauthorized,
                403 => Worth::Forbidden,
                _ => Worth::In,
            };
            let expected = match worth {
                _ if open.contains(&target.as_str()) => Worth::In,
                Worth::InUnnamed if target == "/metrics" => Worth::Forbidden,
                Worth::InUnnamed => Worth::In,
                worth => *worth,
            };
            assert_eq!(refused, expected, "{method} {target} with {name}: {}", reply.text);
            assert_ne!(reply.status, 0, "{method} {target} with {name} has an answer");
            assert!(!reply.text.contains("secret-"), "no answer repeats a key: {}", reply.text);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_for_one_api_speaks_no_other() {
    let server = Server::start(KEYS).await;
    let key = "x-api-key: secret-SPOKEN";
    let version = "anthropic-version: 2023-06-01";
    assert_eq!(ask(server.address, "GET", "/v1/models", &[key]).await.status, 403);
    assert_eq!(ask(server.address, "GET", "/v1/models", &[key, version]).await.status, 200);
    assert_eq!(ask(server.address, "GET", "/v1beta/models", &[key, version]).await.status, 403);
    assert_eq!(ask(server.address, "POST", "/v1/chat/completions", &[key, version]).await.status, 403);
    assert_eq!(ask(server.address, "POST", "/v1/messages", &[key]).await.status, 400, "in, and told what is missing");
}

/// Variants of a route's spelling: each is no route, or the same route with the same check.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_other_way_to_write_a_route_gets_in() {
    let server = Server::start(KEYS).await;
    for target in [
        "/v1/../v1/models",
        "//v1/models",
        "/v1//models",
        "/V1/models",
        "/v1/models/",
        "/%761/models",
        "/v1%2fmodels",
        "/health/../v1/models",
        "/health?/v1/models",
        "/v1/models?x=/health",
        "/v1/models;x=1",
        "/metrics/",
        "/health/metrics",
        "/v1/models#/health",
    ] {
        for headers in
            [&[][..], &["X-Original-URL: /health"], &["X-HTTP-Method-Override: GET"], &["X-Rewrite-Url: /health"]]
        {
            let reply = ask(server.address, "GET", target, headers).await;
            let is_health = target.starts_with("/health?");
            assert_eq!(reply.status == 200, is_health, "{target} {headers:?}: {}", reply.text);
            assert!(!reply.text.contains("\"puppet\"") && !reply.text.contains("penstock_requests_total"), "{target}");
        }
    }
    let other_host = "GET /v1/models HTTP/1.1\r\nHost: localhost/health\r\nConnection: close\r\n\r\n";
    assert!([400, 401].contains(&raw::send(server.address, other_host).await.status));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guessing_is_slowed_down_and_keeps_nobody_out() {
    let config = "[auth]\nfailures_per_minute = 10\n[[keys]]\nid = \"a\"\nkey_env = \"A\"\n[[keys]]\nid = \"b\"\nkey_env = \"B\"\n";
    let server = Server::start(config).await;
    assert_eq!(models(server.address, "secret-A").await, 200);
    let mut statuses = Vec::new();
    for number in 0..30 {
        let forwarded = format!("X-Forwarded-For: 198.51.100.{number}");
        let key = format!("Authorization: Bearer guess-{number}");
        let reply = ask(server.address, "GET", "/v1/models", &[&key, &forwarded]).await;
        if reply.status == 429 {
            let seconds: u64 = reply.header("retry-after").and_then(|text| text.parse().ok()).expect("Retry-After");
            assert!((1..=60).contains(&seconds), "{seconds}");
        }
        statuses.push(reply.status);
    }
    assert!(statuses[..10].iter().all(|status| *status == 401), "{statuses:?}");
    assert!(
        statuses[12..].iter().all(|status| *status == 429),
        "another X-Forwarded-For is no other client: {statuses:?}"
    );
    assert_eq!(models(server.address, "secret-A").await, 200, "a key that has been good is let in");
    assert_eq!(
        models(server.address, "secret-B").await,
        429,
        "one that nobody has seen waits: it could be the next guess"
    );
    assert_eq!(ask(server.address, "GET", "/v1/models", &[]).await.status, 401, "no key is no guess");
    assert_eq!(ask(server.address, "GET", "/health", &[]).await.status, 200);
    let text = server.gateway.render_metrics();
    assert!(text.contains("penstock_auth_failures_total{reason=\"throttled\"}"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_a_trusted_proxy_each_client_has_its_own_guesses() {
    let config = "[auth]\nfailures_per_minute = 5\ntrusted_proxies = [\"127.0.0.1\"]\n\
                  [[keys]]\nid = \"a\"\nkey_env = \"A\"\naddresses = [\"192.0.2.0/24\"]\n";
    let server = Server::start(config).await;
    let from = async |address: &str, secret: &str| {
        let headers = [format!("X-Forwarded-For: 6.6.6.6, {address}"), format!("Authorization: Bearer {secret}")];
        ask(server.address, "GET", "/v1/models", &[&headers[0], &headers[1]]).await.status
    };
    for _ in 0..10 {
        from("198.51.100.1", "guess").await;
    }
    assert_eq!(from("198.51.100.1", "guess").await, 429);
    assert_eq!(from("198.51.100.2", "guess").await, 401);
    assert_eq!(from("192.0.2.7", "secret-A").await, 200, "its network, as the proxy says");
    assert_eq!(from("198.51.100.3", "secret-A").await, 403);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_key_is_worth_nothing_within_a_second() {
    let folder = Folder::new();
    let (one, two) = (Server::kept(&folder.config("")).await, Server::kept(&folder.config("")).await);
    promised(Duration::from_secs(1), async || {
        let key = issue(&one, NewKey::default()).await;
        let child = issue(&one, NewKey { parent: Some(key.record.id.clone()), ..NewKey::default() }).await;
        for server in [&one, &two] {
            for issued in [&key, &child] {
                assert_eq!(models(server.address, issued.secret.expose()).await, 200, "good at once, at every gateway");
            }
        }
        desk(&one).revoke(&key.record.id, clock::unix_seconds()).await.expect("revoked");
        let revoked = Instant::now();
        for server in [&one, &two] {
            for issued in [&key, &child] {
                while models(server.address, issued.secret.expose()).await != 401 {
                    assert!(revoked.elapsed() < PATIENCE, "still good after {:?}", revoked.elapsed());
                }
            }
        }
        revoked.elapsed()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotated_key_is_good_beside_the_new_one_for_its_grace() {
    let folder = Folder::new();
    let server = Server::kept(&folder.config("")).await;
    let old = issue(&server, NewKey::default()).await;
    let id = &old.record.id;
    let now = clock::unix_seconds();
    let new = desk(&server).rotate(id, Duration::from_secs(3600), now).await.expect("rotated");
    assert_ne!(old.secret, new.secret);
    soon_good(server.address, new.secret.expose()).await;
    assert_eq!(models(server.address, old.secret.expose()).await, 200);
    let newest = desk(&server).rotate(id, Duration::ZERO, now).await.expect("rotated");
    soon_good(server.address, newest.secret.expose()).await;
    for dead in [&old, &new] {
        assert_eq!(models(server.address, dead.secret.expose()).await, 401);
    }
    let far = desk(&server).rotate(id, Duration::from_secs(365 * 86_400), now).await;
    assert!(far.is_err_and(|error| error.to_string().contains("at most")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_never_does_more_than_its_parent() {
    let folder = Folder::new();
    let server = Server::kept(&folder.config("[[teams]]\nid = \"t\"\n")).await;
    let now = clock::unix_seconds();
    let scoped = |models: &[&str]| {
        let mut wish = NewKey::default();
        wish.scope.models = models.iter().map(|model| (*model).to_owned()).collect();
        wish
    };
    let parent = issue(&server, NewKey { team: Some("t".into()), ..scoped(&["chat-*"]) }).await;
    let from = |wish: NewKey| NewKey { parent: Some(parent.record.id.clone()), ..wish };
    for wider in [scoped(&["*"]), scoped(&["chat-1", "other"]), scoped(&["cha*"])] {
        let refused = desk(&server).create(from(wider), now).await.expect_err("wider");
        assert!(refused.to_string().contains("its parent"), "{refused}");
    }
    let mut routes = NewKey::default();
    routes.scope.routes = vec!["/*".into()];
    assert!(desk(&server).create(from(routes), now).await.is_ok(), "narrower than all is within all");
    let inherits = issue(&server, from(NewKey::default())).await;
    assert_eq!(inherits.record.scope.models, ["chat-*"], "what is left open is the parent's");
    assert_eq!(inherits.record.team.as_deref(), Some("t"));
    assert_eq!(ask_model(server.address, &inherits).await, 404, "the only model here is not one of chat-*");
    let other = desk(&server).create(NewKey { team: Some("none".into()), ..NewKey::default() }, now).await;
    assert!(other.is_err_and(|error| error.to_string().contains("no team")));
    let mut late = scoped(&[]);
    late.scope.expires = Some(now - 1);
    assert!(desk(&server).create(late, now).await.is_err_and(|error| error.to_string().contains("past")));
}

async fn ask_model(address: SocketAddr, key: &Issued) -> u16 {
    let request = raw::chat("say 1", false).replacen("\r\n", "\r\nConnection: close\r\nx-api-key: KEY\r\n", 1);
    raw::send(address, request.replace("KEY", key.secret.expose())).await.status
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_key_closes_an_open_gateway_for_good() {
    let folder = Folder::new();
    let server = Server::kept(&folder.config("")).await;
    assert_eq!(ask(server.address, "GET", "/v1/models", &[]).await.status, 200, "open on loopback");
    assert_eq!(models(server.address, "none").await, 200, "SDKs send something");
    let key = issue(&server, NewKey::default()).await;
    assert_eq!(models(server.address, key.secret.expose()).await, 200);
    assert_eq!(models(server.address, "none").await, 401);
    desk(&server).revoke(&key.record.id, clock::unix_seconds()).await.expect("revoked");
    let revoked = "penstock_auth_issued_keys 0";
    eventually("the revocation is seen", || server.gateway.render_metrics().contains(revoked)).await;
    assert_eq!(
        ask(server.address, "GET", "/v1/models", &[]).await.status,
        401,
        "without keys left it is not open again"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_keys_things_are_not_there() {
    let folder = Folder::new();
    let server = Server::kept(&folder.config("")).await;
    let (alice, mallory) = (issue(&server, NewKey::default()).await, issue(&server, NewKey::default()).await);
    let key = |issued: &Issued| format!("Authorization: Bearer {}", issued.secret.expose());
    let form = "--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\n\
                Content-Disposition: form-data; name=\"file\"; filename=\"f.jsonl\"\r\n\r\n{}\n\r\n--b--\r\n";
    let upload = format!(
        "POST /v1/files HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{}\r\nContent-Type: multipart/form-data; boundary=b\r\n\
         Content-Length: {}\r\n\r\n{form}",
        key(&alice),
        form.len()
    );
    let reply = raw::send(server.address, upload).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let at = reply.text.find("file-").expect("an id");
    let id: String = reply.text[at..].chars().take_while(|c| c.is_ascii_alphanumeric() || "-_".contains(*c)).collect();
    for (method, target) in [
        ("GET", format!("/v1/files/{id}")),
        ("GET", format!("/v1/files/{id}/content")),
        ("DELETE", format!("/v1/files/{id}")),
    ] {
        assert_eq!(ask(server.address, method, &target, &[&key(&mallory)]).await.status, 404, "{method} {target}");
    }
    let listed = ask(server.address, "GET", "/v1/files", &[&key(&mallory)]).await;
    assert!(listed.status == 200 && !listed.text.contains(&id), "{}", listed.text);
    assert_eq!(ask(server.address, "GET", &format!("/v1/files/{id}"), &[&key(&alice)]).await.status, 200);
    let rotated = desk(&server).rotate(&alice.record.id, Duration::ZERO, clock::unix_seconds()).await.expect("rotated");
    let again = ask(server.address, "GET", &format!("/v1/files/{id}"), &[&key(&rotated)]).await;
    assert_eq!(again.status, 200, "a key's things outlive its text");
}
