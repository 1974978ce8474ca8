//! Shared counters when answers are lost and questions arrive late; the same checks on every server.

use std::time::Duration;

use penstock_store::conformance::nth;
use penstock_store::{Ask, Counters, Kept, Settlement, StoreError, Window};

use crate::faults::until_it_works;
use crate::harness::{PostgresServer, RedisServer};
use crate::relay::Relay;

const WINDOW: Window = Window { start: 0, seconds: 1_000_000 };
const NOW: u64 = 1;
const UNTIL: u64 = 900_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_counts_once_and_grants_nothing_late() {
    let server = PostgresServer::start("relay");
    let (mut relay, options) = server.relayed(1);
    let store = penstock_store::Postgres::open(&options).await.expect("opens");
    check(&store, &server.open(2).await, &mut relay).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_counts_once_and_grants_nothing_late() {
    let server = RedisServer::start("relay");
    let (mut relay, options) = server.relayed("r:");
    let store = penstock_store::Redis::open(&options).await.expect("opens");
    check(&store, &server.open("r:").await, &mut relay).await;
}

/// Runs the checks. `store` is connected through the relay, `direct` to the same server without it.
async fn check(store: &dyn Counters, direct: &dyn Counters, relay: &mut Relay) {
    a_settlement_whose_answer_is_lost_counts_once(store, direct, relay).await;
    what_is_asked_before_the_last_word_grants_nothing(store, direct, relay).await;
}

fn ask(counter: &str, want: u64) -> [Ask; 1] {
    [Ask { counter: counter.into(), window: WINDOW, sliding: false, max: 100, want, least: 0, until: UNTIL }]
}

fn settlement(counter: &str, leased: u64, spent: u64) -> [Settlement; 1] {
    [Settlement { counter: counter.into(), window: WINDOW, leased, spent }]
}

async fn a_settlement_whose_answer_is_lost_counts_once(store: &dyn Counters, direct: &dyn Counters, relay: &Relay) {
    let settle =
        async |number, leased, spent| store.settle("teller", number, &settlement("told", leased, spent), NOW).await;
    assert_eq!(store.take("teller", &ask("told", 60), false, NOW).await.expect("taken")[0].granted, 60);
    // The connection is prepared now: from here on, a settlement is one question.
    settle(nth(), 10, 9).await.expect("settled");
    let mut used = 59;
    for _ in 0..3 {
        let number = nth();
        relay.lose("teller");
        let lost = settle(number, 10, 8).await.expect_err("its answer is lost");
        assert!(matches!(lost, StoreError::Broken(_) | StoreError::Busy), "{lost}");
        used -= 2;
        let counts = direct.take("h", &ask("told", 0), false, NOW).await.expect("asked")[0].used;
        assert_eq!(counts, used, "it was done all the same");
        until_it_works(async || settle(number, 10, 8).await).await;
        until_it_works(async || settle(number, 10, 8).await).await;
        let counts = direct.take("h", &ask("told", 0), false, NOW).await.expect("asked")[0].used;
        assert_eq!(counts, used, "and counts once");
    }
    let grant = direct.take("teller", &ask("told", 0), false, NOW).await.expect("asked")[0];
    assert_eq!((grant.leased, grant.used), (20, 53));
}

async fn what_is_asked_before_the_last_word_grants_nothing(
    store: &dyn Counters,
    direct: &dyn Counters,
    relay: &mut Relay,
) {
    let first = until_it_works(async || store.take("asker", &ask("late", 10), false, NOW).await).await;
    assert_eq!(first[0].granted, 10);
    relay.hold("asker");
    let more = ask("late", 90);
    let asked = tokio::time::timeout(Duration::from_millis(300), store.take("asker", &more, false, NOW));
    assert!(asked.await.is_err(), "nobody answers");
    // The ask is under way when its holder sets its leases.
    let kept = [Kept { counter: "late".into(), window: WINDOW, amount: 10, until: UNTIL }];
    direct.lease("asker", &kept, NOW).await.expect("leased");
    relay.let_go().await;
    let grant = direct.take("other", &ask("late", 100), false, NOW).await.expect("taken")[0];
    assert_eq!((grant.granted, grant.used), (90, 100), "what came late was granted nothing");
    let grant = direct.take("asker", &ask("else", 5), false, NOW).await.expect("its word is the last")[0];
    assert_eq!(grant.granted, 5);
}
