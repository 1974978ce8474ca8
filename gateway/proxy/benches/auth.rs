//! What it costs to know who asks: `cargo bench -p penstock-proxy --bench auth`. Nanoseconds per request, the best of seven runs.

use std::future::Future;
use std::hint::black_box;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use http::HeaderMap;
use jsonwebtoken::{Algorithm, EncodingKey, Header, jwk::Jwk};
use penstock_auth::{self, NewKey};
use penstock_base::clock;
use penstock_config::Overrides;
use penstock_proxy::{Gateway, stored};
use penstock_telemetry::AccessLog;
use serde_json::json;

const RUNS: usize = 7;
const REQUESTS: u32 = 20_000;
const RSA: &[u8] = include_bytes!("../../auth/src/jwt/test_keys/rsa.pem");

fn main() {
    let folder = std::env::temp_dir().join(format!("penstock-bench-auth-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let key = EncodingKey::from_rsa_pem(RSA).expect("a key");
    let mut jwk = serde_json::to_value(Jwk::from_encoding_key(&key, Algorithm::RS256).expect("a JWK")).expect("JSON");
    jwk["kid"] = "k".into();
    std::fs::write(folder.join("jwks.json"), json!({ "keys": [jwk] }).to_string()).expect("written");
    let text = format!(
        "[server]\nstate_dir = {folder:?}\n[[keys]]\nid = \"a\"\nkey_env = \"A\"\nteam = \"t\"\n[[teams]]\nid = \"t\"\n\
         [[jwt]]\nid = \"i\"\nissuer = \"i\"\naudience = [\"a\"]\njwks_file = {:?}\n",
        folder.join("jwks.json")
    );
    let env = |_: &str| Some("sk-a-key-of-the-config-0123456789".to_owned());
    let config = penstock_config::load(Some(("bench.toml", &text)), &Overrides::default(), &env).expect("a config");
    let log = AccessLog::open("off").expect("no log");
    let store = stored::open(&config).expect("a store");
    let gateway = Arc::new(Gateway::new(config, log, Vec::new(), Vec::new()).with_store(store));
    penstock_auth::start(&gateway, &gateway.serving().config.auth_settings()).expect("a thread");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let issue = async || gateway.desk().expect("a store").create(NewKey::default(), clock::unix_seconds()).await;
    let issued = runtime.block_on(issue()).expect("a key");
    for _ in 0..999 {
        runtime.block_on(issue()).expect("a key");
    }
    let groups: Vec<_> = (0..20).map(|number| format!("/engineering/group-{number}")).collect();
    let claims = json!({ "iss": "i", "aud": "a", "sub": "ada", "exp": clock::unix_seconds() + 9999, "groups": groups });
    let header = Header { kid: Some("k".into()), ..Header::new(Algorithm::RS256) };
    let token = jsonwebtoken::encode(&header, &claims, &key).expect("a token");
    println!("token of {} bytes, 1000 issued keys", token.len());
    for (name, secret) in [
        ("key of the config", "sk-a-key-of-the-config-0123456789"),
        ("issued key", issued.secret.expose()),
        ("remembered token", &token),
    ] {
        let mut headers = HeaderMap::new();
        headers.insert("authorization", format!("Bearer {secret}").parse().expect("a value"));
        let serving = gateway.serving();
        let identify = || gateway.guard.identify(&serving.identity, "/v1/chat/completions", &headers);
        runtime.block_on(identify()).expect("it is known");
        let mut best = u128::MAX;
        for _ in 0..RUNS {
            let began = Instant::now();
            for _ in 0..REQUESTS {
                // What is known is known at once.
                let mut future = pin!(identify());
                let Poll::Ready(found) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
                    panic!("it waits")
                };
                black_box(found.expect("it is known"));
            }
            best = best.min(began.elapsed().as_nanos() / u128::from(REQUESTS));
        }
        println!("{name:<20} {best:>6} ns");
    }
    // What is left in the folder for temporary files harms nobody.
    let _ = std::fs::remove_dir_all(&folder);
}
