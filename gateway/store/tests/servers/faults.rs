//! Servers that die, hang and come back.

use std::time::{Duration, Instant};

use penstock_store::{
    Ask, Cache, Counters, Entry, EntryFilter, Keys, Ledger, OpenEntry, Postgres, Redis, Store, StoreError, UsageQuery,
    Window,
};

use crate::harness::{PASSWORD, PostgresServer, RedisServer};

/// No operation lasts longer, whatever the server does: a deadline, and time to be scheduled on a busy machine.
const PATIENCE: Duration = Duration::from_secs(12);
/// How soon what works again is used again.
const RECOVERY: Duration = Duration::from_secs(30);

fn entry(number: u64) -> Entry {
    let opened = OpenEntry { at: 1000, request: format!("fault-{number}"), ..OpenEntry::default() };
    Entry { opened, micro_usd: 1, ..Entry::default() }
}

fn is_outage(error: &StoreError) -> bool {
    matches!(error, StoreError::Busy | StoreError::Broken(_)) && !error.to_string().contains(PASSWORD)
}

/// Tries until it works.
async fn until_it_works<T>(mut work: impl AsyncFnMut() -> Result<T, StoreError>) -> T {
    let end = Instant::now() + RECOVERY;
    loop {
        match work().await {
            Ok(done) => return done,
            Err(error) => {
                assert!(is_outage(&error), "{error}");
                assert!(Instant::now() < end, "{error}");
                tokio::task::yield_now().await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_dies_hangs_and_comes_back() {
    let mut server = PostgresServer::start("faults");
    let store = server.open(2).await;
    let other = server.open(2).await;
    assert_eq!((store.lead().await, other.lead().await), (Ok(true), Ok(false)));
    store.settle_entries((0..100).map(entry).collect()).await.expect("settled");

    server.hang(true);
    for _ in 0..2 {
        let began = Instant::now();
        let error = store.settle_entries([entry(100)].into()).await.expect_err("nobody answers");
        assert!(is_outage(&error) && began.elapsed() < PATIENCE, "{error} after {:?}", began.elapsed());
    }
    let error = store.directory_version().await.expect_err("nobody answers");
    assert!(is_outage(&error), "{error}");
    server.hang(false);
    until_it_works(async || store.settle_entries((0..200).map(entry).collect()).await).await;

    server.kill();
    let began = Instant::now();
    for _ in 0..3 {
        let error = store.settle_entries([entry(300)].into()).await.expect_err("nobody is there");
        assert!(is_outage(&error), "{error}");
    }
    assert!(began.elapsed() < PATIENCE, "what is not there is noticed at once");
    assert!(store.stats().errors >= 6);
    assert!(Postgres::open(&server.options(1)).await.is_err_and(|error| is_outage(&error)));
    server.restart();

    // What was sent before and what nobody knows was done is sent again: each counts once.
    until_it_works(async || store.settle_entries((0..400).map(entry).collect()).await).await;
    let filter = EntryFilter { until: 2000, ..EntryFilter::default() };
    let sum = store.usage(&UsageQuery { filter, limit: 1, ..UsageQuery::default() }).await.expect("summed");
    assert_eq!((sum.items[0].requests, sum.items[0].micro_usd), (400, 400));
    // The old leader's lock went with its connection; one of the two leads, not both.
    let leads = until_it_works(async || Ok([other.lead().await?, store.lead().await?])).await;
    assert_eq!(leads.iter().filter(|leads| **leads).count(), 1, "{leads:?}");
    // Whoever waits for changes hears of them again.
    let seen = store.directory_version().await.expect("a version");
    assert_eq!(store.directory_changed(seen, Duration::ZERO).await, Ok(seen));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_dies_hangs_and_comes_back() {
    let mut server = RedisServer::start("faults");
    let store = server.open("").await;
    let window = Window { start: 0, seconds: 1000 };
    let ask = [Ask { counter: "a".into(), window, sliding: false, max: 10, want: 4, least: 0, until: 900 }];
    assert_eq!(store.take("g", &ask, false, 1).await.expect("taken")[0].granted, 4);

    server.hang(true);
    let began = Instant::now();
    let error = store.take("g", &ask, false, 1).await.expect_err("nobody answers");
    assert!(is_outage(&error) && began.elapsed() < PATIENCE, "{error} after {:?}", began.elapsed());
    server.hang(false);
    // It may have done what it was asked before it hung: that is a lease, and counts.
    let grant = until_it_works(async || store.take("g", &ask, false, 1).await).await[0];
    assert!(grant.used <= 10 && grant.leased <= 10, "{grant:?}");

    server.kill();
    let began = Instant::now();
    let error = store.take("g", &ask, false, 1).await.expect_err("nobody is there");
    assert!(is_outage(&error) && began.elapsed() < PATIENCE, "{error}");
    assert!(store.get("a").await.is_err_and(|error| is_outage(&error)));
    assert!(Redis::open(&server.options("")).await.is_err_and(|error| is_outage(&error)));
    server.restart();
    let grant = until_it_works(async || store.take("g", &ask, false, 1).await).await[0];
    assert_eq!((grant.granted, grant.used), (4, 4), "it has forgotten, and whoever keeps the ledger restores");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_are_in_no_error() {
    let (postgres, redis) = (PostgresServer::start("secrets"), RedisServer::start("secrets"));
    let secret = "0ther-secret";
    for url in [
        format!("postgres://penstock:{secret}@%2fnowhere/postgres"),
        format!("postgres://penstock:{secret}@127.0.0.1:1/postgres"),
        format!("postgres://penstock:{secret}@127.0.0.1:x/postgres"),
        format!("postgres://penstock:{secret}@127.0.0.1/postgres?sslmode=require"),
        postgres.options(1).url.replacen("penstock:", &format!("penstock:{secret}"), 1),
    ] {
        let options = penstock_store::PostgresOptions { url, ..postgres.options(1) };
        let error = Postgres::open(&options).await.err().expect("refused").to_string();
        assert!(!error.contains(secret) && !error.contains(PASSWORD), "{error}");
    }
    for url in [
        format!("redis://:{secret}@127.0.0.1:1"),
        format!("redis://:{secret}@127.0.0.1:x"),
        redis.options("").url.replace("pass=", &format!("pass={secret}")),
    ] {
        let options = penstock_store::RedisOptions { url, ..redis.options("") };
        let error = Redis::open(&options).await.err().expect("refused").to_string();
        assert!(!error.contains(secret) && !error.contains(PASSWORD), "{error}");
    }
}
