//! The gateway as a small program for profiling: with an upstream that costs nothing, and with the providers of a
//! config.
//!
//! ```text
//! cargo run --release -p penstock-hostile --example puppet -- 127.0.0.1:8080 [CONFIG.toml]
//! ```
//!
//! The model `puppet` follows the commands in its prompts (`src/upstream.rs`).
#![forbid(unsafe_code)]

use std::sync::Arc;

use penstock_config::Overrides;
use penstock_hostile::upstream::Puppet;
use penstock_proxy::{Gateway, server};
use penstock_telemetry::AccessLog;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    let listen = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:8080".into());
    let file = std::env::args().nth(2).unwrap_or_default();
    let text = if file.is_empty() { String::new() } else { std::fs::read_to_string(&file).expect("a config file") };
    let overrides = Overrides { listen: Some(listen), ..Overrides::default() };
    let mut config = penstock_config::load(Some((&file, &text)), &overrides, &|_| None).expect("a valid config");
    let listeners = server::Listeners::bind(&mut config, std::path::PathBuf::new(), None).expect("a free port");
    let log = AccessLog::open(&config.access_log).expect("an access log");
    let providers = penstock_provider::all(&config.providers).expect("providers that can be used");
    let gateway = Gateway::new(config.clone(), log, vec![Arc::new(Puppet::default())], providers);
    eprintln!("http://{}", config.listen);
    let hooks = server::Hooks {
        started: Box::new(|| {}),
        leave: server::Leave::default(),
        stops: server::Stops::catch().expect("signals"),
        ending: Box::new(|| {}),
        stop: Box::new(|| {}),
    };
    server::run(Arc::new(gateway), &config, Arc::new(listeners), hooks).expect("a server");
}
