//! The gateway with an upstream that costs nothing, to profile the client's side alone:
//!
//! ```text
//! cargo run --release -p penstock-hostile --example puppet -- 127.0.0.1:8080
//! ```
//!
//! The model is `puppet`; prompts say what it does (`src/upstream.rs`).
#![forbid(unsafe_code)]

use std::sync::Arc;

use penstock_hostile::upstream::Puppet;
use penstock_proxy::config::{self, Overrides};
use penstock_proxy::telemetry::AccessLog;
use penstock_proxy::{Gateway, server};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    let listen = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:8080".into());
    let log = std::env::args().nth(2).unwrap_or_else(|| "off".into());
    let overrides = Overrides { listen: Some(listen), access_log: Some(log), ..Overrides::default() };
    let mut config = config::load(None, &overrides, &|_| None).expect("the defaults");
    server::reserve(&mut config).expect("a free port");
    let log = AccessLog::open(&config.access_log).expect("an access log");
    let gateway = Arc::new(Gateway::new(config.clone(), log, vec![Arc::new(Puppet::default())]));
    println!("http://{}", config.listen);
    server::run(gateway, &config, || {}).expect("a server");
}
