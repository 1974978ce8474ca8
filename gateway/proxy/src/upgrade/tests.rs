//! Hand-over between two gateways of this process, up to the moment when the next one would serve.

use std::fs;
use std::sync::Arc;

use penstock_config::Overrides;
use penstock_pool::{Leave, Steer};
use penstock_telemetry::AccessLog;

use super::*;
use crate::fleet::Fleet;
use crate::fleet::tests::{Scratch, command};
use crate::gateway::Gateway;
use crate::reload::{ApplyError, Begin, By, Live, Source};
use crate::server::Listeners;

/// Longest wait for what comes within moments.
const SOON: Duration = Duration::from_secs(60);

#[test]
fn an_upgrade_hands_over_the_operators_holds_and_loses_no_change_of_the_config() {
    let scratch = Scratch::new("upgrade");
    let [one, two] = ["one", "two"].map(|name| format!("unix:{}/{name}.sock", scratch.0.display()));
    let state_dir = scratch.0.join("state");
    let text = |queue_max: u32| {
        let server = format!("[server]\nlisten = \"127.0.0.1:0\"\nstate_dir = {state_dir:?}\n");
        let (model, workers) = (scratch.0.join("model"), [&one, &two]);
        format!("{server}[[pools]]\nid = \"own\"\nmodel = {model:?}\nconnect = {workers:?}\nqueue_max = {queue_max}\n")
    };
    let file = scratch.0.join("penstock.toml");
    fs::write(&file, text(8)).expect("written");
    let source = Source::new(Some(file), Overrides::default());
    let mut config = source.load(&text(8)).expect("valid");
    let lock = StateLock::take(&state_dir, None).expect("nobody has it");
    let listeners = Arc::new(Listeners::bind(&mut config, PathBuf::new(), None).expect("a free port"));
    let start = || Arc::new(Fleet::start(&config, command()).expect("started"));
    let gateway = |fleet: &Fleet| {
        let log = AccessLog::open("off").expect("off");
        Gateway::new(config.clone(), log, fleet.upstreams(), Vec::new()).shared()
    };
    let old = start();
    let serving = gateway(&old);
    let begin = Begin { text: text(8), config: config.clone(), file: None };
    let live = Live::new(serving.clone(), old.clone(), source, begin, Box::new(|_| Ok(())));
    listen(&state_dir, (serving, live.clone()), (listeners, lock), "build".into(), || {}).expect("a socket");

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let steer = |at: usize, order| {
        let pool = old.pools().remove(0).1;
        let worker = pool.status().workers[at].name.clone();
        runtime.block_on(pool.steer(&worker, order)).expect("an order");
    };
    let apply = |queue_max| live.apply(&text(queue_max), &By::new("ops"), None);
    apply(9).expect("applied");
    steer(0, Steer::Hold);
    let taken = take_over(&state_dir).expect("an offer");
    assert_eq!((taken.config(), taken.file()), (Some(&*text(9)), Some(&*text(8))));
    assert!(matches!(apply(10), Err(ApplyError::Upgrading)), "the next process would not hear of it");
    let next = start();
    taken.hold(&next);
    assert_eq!((next.held().len(), next.held()), (1, old.held()));
    // Drained while models load.
    steer(1, Steer::Hold);
    steer(0, Steer::Release);
    assert_ne!(next.held(), old.held());
    let prepared = taken.prepared(&gateway(&next), &next).expect("a book");
    assert_eq!((next.held().len(), next.held()), (1, old.held()));
    assert!(matches!(apply(10), Err(ApplyError::Upgrading)));

    // The next process dies.
    drop(prepared);
    let until = Instant::now() + SOON;
    while let Err(refused) = apply(10) {
        assert!(matches!(refused, ApplyError::Upgrading) && Instant::now() < until, "{refused}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    assert_eq!(live.current().1, text(10), "the old process goes on");
    [old, next].iter().for_each(|fleet| fleet.stop(Leave::Exit, Duration::ZERO));
}
