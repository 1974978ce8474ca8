//! Tokens against an issuer that rotates its keys, goes away, is slow, answers too much, or redirects; and forged or
//! stale tokens.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey};
use penstock_base::clock::unix_seconds;
use penstock_hostile::raw::{self, Client};
use penstock_hostile::{PATIENCE, Server, eventually};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

const ISSUER: &str = "https://idp.example";
const RSA: &[u8] = include_bytes!("../../../../gateway/auth/src/jwt/test_keys/rsa.pem");
const OTHER_RSA: &[u8] = include_bytes!("../../../../gateway/auth/src/jwt/test_keys/other_rsa.pem");

fn key(pem: &[u8]) -> EncodingKey {
    EncodingKey::from_rsa_pem(pem).expect("a key")
}

fn jwks(keys: &[(&str, &[u8])]) -> Vec<u8> {
    let jwk = |(kid, pem): &(&str, &[u8])| {
        let mut jwk =
            serde_json::to_value(Jwk::from_encoding_key(&key(pem), Algorithm::RS256).expect("a JWK")).expect("JSON");
        jwk["kid"] = (*kid).into();
        jwk
    };
    json!({ "keys": keys.iter().map(jwk).collect::<Vec<_>>() }).to_string().into_bytes()
}

fn token(kid: &str, pem: &[u8], change: impl FnOnce(&mut Value)) -> String {
    let mut claims = json!({ "iss": ISSUER, "aud": "penstock", "sub": "ada", "exp": unix_seconds() + 600 });
    change(&mut claims);
    let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let message = format!("{}.{}", part(&json!({ "alg": "RS256", "kid": kid })), part(&claims));
    let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &key(pem), Algorithm::RS256).expect("signed");
    format!("{message}.{signature}")
}

/// Behaviour of an issuer's key server.
#[derive(Clone)]
enum Manner {
    Answers(Vec<u8>),
    Hangs,
    Endless,
    SendsTo(SocketAddr),
    Fails,
}

/// An issuer's key server.
struct Idp {
    address: SocketAddr,
    manner: Arc<Mutex<Manner>>,
    asked: Arc<AtomicUsize>,
}

impl Idp {
    async fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (manner, asked) = (Arc::new(Mutex::new(manner)), Arc::new(AtomicUsize::new(0)));
        let (now, count) = (manner.clone(), asked.clone());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let manner = now.lock().expect("unpoisoned").clone();
                tokio::spawn(async move {
                    let mut head = [0; 4096];
                    let _ = stream.read(&mut head).await;
                    let answer = match manner {
                        Manner::Answers(body) => {
                            let head = format!(
                                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                                body.len()
                            );
                            [head.into_bytes(), body].concat()
                        }
                        Manner::SendsTo(other) => {
                            format!("HTTP/1.1 302 Found\r\nLocation: http://{other}/keys\r\nContent-Length: 0\r\n\r\n")
                                .into()
                        }
                        Manner::Fails => b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n".to_vec(),
                        Manner::Hangs => {
                            tokio::time::sleep(Duration::from_secs(60)).await;
                            Vec::new()
                        }
                        Manner::Endless => {
                            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n{\"keys\":[").await;
                            while stream.write_all(&[b' '; 65536]).await.is_ok() {}
                            Vec::new()
                        }
                    };
                    let _ = stream.write_all(&answer).await;
                });
            }
        });
        Self { address, manner, asked }
    }

    fn turn(&self, manner: Manner) {
        *self.manner.lock().expect("unpoisoned") = manner;
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    fn config(&self, more: &str) -> String {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder: PathBuf = std::env::temp_dir().join(format!("penstock-tokens-{}-{number}", std::process::id()));
        format!(
            "[server]\nstate_dir = {folder:?}\n[store]\npath = \":memory:\"\n[auth]\nfailures_per_minute = 0\n\
             [[teams]]\nid = \"search\"\nmodels = [\"puppet\"]\n[[teams]]\nid = \"poor\"\nmodels = [\"none\"]\n\
             [[jwt]]\nid = \"corp\"\nissuer = \"{ISSUER}\"\naudience = [\"penstock\"]\njwks_url = \"http://{}/keys\"\n{more}",
            self.address
        )
    }
}

async fn models(server: &Server, token: &str) -> (u16, String) {
    let request =
        format!("GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n");
    let reply = raw::send(server.address, request).await;
    (reply.status, reply.text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_is_good_for_whom_and_what_it_says() {
    let idp = Idp::start(Manner::Answers(jwks(&[("k1", RSA)]))).await;
    let more = "team_claim = \"groups\"\nteams = { g1 = \"search\", g2 = \"poor\" }\nrequired = { scope = \"ai\" }\n";
    let server = Server::kept(&idp.config(more)).await;
    let with = |groups: Value| {
        token("k1", RSA, |claims| {
            claims["groups"] = groups;
            claims["scope"] = "mail ai".into();
        })
    };
    let (status, text) = models(&server, &with(json!(["g0", "g1"]))).await;
    assert!(status == 200 && text.contains("\"puppet\""), "{text}");
    let (status, text) = models(&server, &with(json!(["g2", "g1"]))).await;
    assert!(status == 200 && !text.contains("\"puppet\""), "the team's models bound the user's: {text}");
    assert_eq!(models(&server, &with(json!("unknown"))).await.0, 401, "a team that is not known is not no team");
    assert_eq!(models(&server, &token("k1", RSA, |_| ())).await.0, 401, "without the scope");
    assert_eq!(models(&server, "eyJhbGciOiJub25lIn0.e30.").await.0, 401);
    assert_eq!(models(&server, &"eyJ".repeat(6000)).await.0, 401);
    assert_eq!(idp.asked(), 1, "keys are fetched once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_remembered_token_vouches_for_no_other() {
    let idp = Idp::start(Manner::Answers(jwks(&[("k1", RSA)]))).await;
    let server = Server::kept(&idp.config("")).await;
    let good = token("k1", RSA, |_| ());
    assert_eq!(models(&server, &good).await.0, 200);
    let parts: Vec<&str> = good.split('.').collect();
    let claims = json!({ "iss": ISSUER, "aud": "penstock", "sub": "eve", "exp": unix_seconds() + 600 });
    let swapped = format!("{}.{}.{}", parts[0], URL_SAFE_NO_PAD.encode(claims.to_string()), parts[2]);
    let unsigned = format!("{}.{}.", parts[0], parts[1]);
    let mut last = good.clone().into_bytes();
    let end = last.len() - 2;
    last[end] = if last[end] == b'A' { b'B' } else { b'A' };
    for altered in [swapped, unsigned, String::from_utf8(last).expect("ASCII"), good[..good.len() - 1].to_owned()] {
        assert_eq!(models(&server, &altered).await.0, 401);
        assert_eq!(models(&server, &good).await.0, 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_turn_and_unknown_ones_cost_few_fetches() {
    let idp = Idp::start(Manner::Answers(jwks(&[("k1", RSA)]))).await;
    let server = Server::kept(&idp.config("")).await;
    let (old, new) = (token("k1", RSA, |_| ()), token("k2", OTHER_RSA, |_| ()));
    assert_eq!(models(&server, &old).await.0, 200);
    idp.turn(Manner::Answers(jwks(&[("k2", OTHER_RSA)])));
    assert_eq!(models(&server, &new).await.0, 200, "the new key is fetched for the first token that has it");
    assert_eq!(models(&server, &old).await.0, 401, "the dropped key is worth nothing, remembered or not");
    let asked = idp.asked();
    let server = Arc::new(server);
    let mut strangers = JoinSet::new();
    for number in 0..20 {
        let (server, token) = (server.clone(), token(&format!("x{number}"), RSA, |_| ()));
        strangers.spawn(async move { models(&server, &token).await.0 });
    }
    assert!(strangers.join_all().await.iter().all(|status| *status == 401), "each waits for a fetch behind it");
    assert!(idp.asked() - asked <= 3, "tokens that come together share fetches: {} then {}", asked, idp.asked());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_issuer_that_fails_leaves_its_keys_good() {
    let idp = Idp::start(Manner::Answers(jwks(&[("k1", RSA)]))).await;
    let server = Server::kept(&idp.config("")).await;
    assert_eq!(models(&server, &token("k1", RSA, |_| ())).await.0, 200);
    for manner in [Manner::Fails, Manner::Endless, Manner::Answers(b"<html>".to_vec()), Manner::Answers(jwks(&[]))] {
        idp.turn(manner);
        let asked = idp.asked();
        // An unknown key waits for a fetch, which fails.
        models(&server, &token("unknown", RSA, |_| ())).await;
        let another = token("k1", RSA, |claims| claims["jti"] = asked.into());
        assert_eq!(models(&server, &another).await.0, 200, "a token that is not remembered, by the keys that are held");
    }
    let text = server.gateway.render_metrics();
    assert!(text.contains("penstock_auth_key_set_fetches_total{issuer=\"corp\",outcome=\"failed\"}"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_issuer_that_never_answered_lets_nobody_in_and_holds_nobody_up() {
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let elsewhere = silent.local_addr().expect("an address");
    for manner in [Manner::Hangs, Manner::Endless, Manner::SendsTo(elsewhere), Manner::Fails] {
        let idp = Idp::start(manner).await;
        let server = Server::kept(&idp.config("[[keys]]\nid = \"a\"\nkey_env = \"A\"\n")).await;
        let began = Instant::now();
        let (status, text) = models(&server, &token("k1", RSA, |_| ())).await;
        assert!(status == 503 && text.to_ascii_lowercase().contains("retry-after"), "{text}");
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
        assert_eq!(models(&server, "secret-A").await.0, 200, "keys do not need it");
    }
    let followed = tokio::time::timeout(Duration::from_millis(1), silent.accept()).await;
    assert!(followed.is_err(), "a redirect is not followed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_issuer_that_comes_back_is_asked_again() {
    let idp = Idp::start(Manner::Fails).await;
    let server = Server::kept(&idp.config("")).await;
    let good = token("k1", RSA, |_| ());
    assert_eq!(models(&server, &good).await.0, 503);
    idp.turn(Manner::Answers(jwks(&[("k1", RSA)])));
    let began = Instant::now();
    while models(&server, &good).await.0 != 200 {
        assert!(began.elapsed() < PATIENCE, "it is asked again");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_outlives_its_token() {
    let idp = Idp::start(Manner::Answers(jwks(&[("k1", RSA)]))).await;
    let server = Server::kept(&idp.config("")).await;
    // Valid for two more seconds, within the minute of clock skew.
    let short = token("k1", RSA, |claims| claims["exp"] = (unix_seconds() - 58).into());
    let request = raw::chat("pace 1000", true).replacen("\r\n", &format!("\r\nAuthorization: Bearer {short}\r\n"), 1);
    let mut client = Client::connect(server.address).await;
    client.send(request).await;
    eventually("it has begun", || server.puppet.open() == 1).await;
    let began = Instant::now();
    while models(&server, &short).await.0 != 401 {
        assert!(began.elapsed() < PATIENCE, "the token ends");
    }
    assert_eq!(server.puppet.open(), 1, "what it began goes on");
    let reply = client.until(PATIENCE, |text| text.ends_with("0\r\n\r\n")).await;
    assert!(reply.status == 200 && reply.text.contains("[DONE]"), "{}", reply.text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn discovery_believes_only_its_own_issuer() {
    let idp = Idp::start(Manner::Fails).await;
    let url = format!("http://{}", idp.address);
    let document = |issuer: &str| {
        Manner::Answers(json!({ "issuer": issuer, "jwks_uri": format!("{url}/keys") }).to_string().into())
    };
    idp.turn(document("https://evil.example"));
    let config =
        format!("[store]\npath = \":memory:\"\n[[jwt]]\nid = \"d\"\nissuer = \"{url}\"\naudience = [\"penstock\"]\n");
    let server = Server::kept(&config).await;
    let good = token("k1", RSA, |claims| claims["iss"] = url.clone().into());
    assert_eq!(models(&server, &good).await.0, 503);
    let text = server.gateway.render_metrics();
    assert!(text.contains("penstock_auth_key_set_fetches_total{issuer=\"d\",outcome=\"failed\"}"), "{text}");
}
