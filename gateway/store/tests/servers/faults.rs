//! Servers that are killed, hang and return.

use std::time::{Duration, Instant};

use penstock_store::conformance::nth;
use penstock_store::{
    Ask, Begun, Cache, Counters, Entry, EntryFilter, Kept, Keys, Ledger, OpenEntry, Postgres, Redis, Settlement, Store,
    StoreError, UsageQuery, Window,
};

use crate::harness::{PASSWORD, PostgresServer, RedisServer};
use crate::shared::new_key;

/// Longest duration of any operation, whatever the server does: a deadline, and time to be scheduled on a busy machine.
const PATIENCE: Duration = Duration::from_secs(12);
/// Longest time until a server that works again is used again.
const RECOVERY: Duration = Duration::from_secs(30);

fn entry(number: u64) -> Entry {
    let opened = OpenEntry { at: 1000, request: format!("fault-{number}"), ..OpenEntry::default() };
    Entry { opened, micro_usd: 1, ..Entry::default() }
}

fn is_outage(error: &StoreError) -> bool {
    matches!(error, StoreError::Busy | StoreError::Broken(_)) && !error.to_string().contains(PASSWORD)
}

/// Repeats the work while it fails for an outage of the server; another error, or a long outage, fails the test.
pub(crate) async fn until_it_works<T>(mut work: impl AsyncFnMut() -> Result<T, StoreError>) -> T {
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

    // Work sent before, and work whose outcome is unknown, is sent again: each counts once.
    until_it_works(async || store.settle_entries((0..400).map(entry).collect()).await).await;
    let filter = EntryFilter { until: 2000, ..EntryFilter::default() };
    let sum = store.usage(&UsageQuery { filter, limit: 1, ..UsageQuery::default() }).await.expect("summed");
    assert_eq!((sum.items[0].requests, sum.items[0].micro_usd), (400, 400));
    // The old leader's lock ended with its connection; exactly one of the two leads.
    let leads = until_it_works(async || Ok([other.lead().await?, store.lead().await?])).await;
    assert_eq!(leads.iter().filter(|leads| **leads).count(), 1, "{leads:?}");
    // Callers that wait for changes are woken again.
    let seen = store.directory_version().await.expect("a version");
    assert_eq!(store.directory_changed(seen, Duration::ZERO).await, Ok(seen));
}

/// A gateway is cut off within a transaction: neither its questions nor the end of its connections reach the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_lost_gateway_holds_is_free_again() {
    let server = PostgresServer::start("cut");
    let (relay, options) = server.relayed(2);
    let (lost, other) = (Postgres::open(&options).await.expect("opens"), server.open(2).await);
    assert_eq!((lost.lead().await, other.lead().await), (Ok(true), Ok(false)));
    relay.hold("COMMIT");
    let error = lost.create_key(new_key(1)).await.expect_err("nobody answers");
    assert!(is_outage(&error), "{error}");
    relay.cut();
    let end = Instant::now() + RECOVERY;
    let key = until_it_works(async || other.create_key(new_key(1)).await).await;
    assert!(key.is_some(), "the other was not committed");
    while !other.lead().await.expect("an answer") {
        assert!(Instant::now() < end, "the lost gateway still leads");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// The server's host is gone without a word, and another has its address: the connection stays open, and silent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_is_asked_on_another_connection_where_the_first_is_silent() {
    let server = RedisServer::start("silent");
    let (relay, options) = server.relayed("s:");
    let store = Redis::open(&options).await.expect("opens");
    relay.abandon();
    let error = Counters::begin(&store).await.expect_err("nobody answers");
    assert!(is_outage(&error), "{error}");
    assert_eq!(Counters::begin(&store).await, Ok(Begun::Whole), "the next call");
}

/// Nothing is leased and nothing to be told, so that no other call finds out that the server cannot count.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_begins_to_count_only_where_it_can_count() {
    let mut server = PostgresServer::start("begin");
    let store = server.open(2).await;
    assert_eq!(Counters::begin(&store).await, Ok(Begun::Whole));
    server.hang(true);
    assert!(Counters::begin(&store).await.is_err_and(|error| is_outage(&error)), "nobody answers");
    server.hang(false);
    until_it_works(async || Counters::begin(&store).await).await;

    // As of a former primary that another server has replaced.
    let (client, connection) =
        tokio_postgres::connect(&server.options(1).url, tokio_postgres::NoTls).await.expect("a connection");
    tokio::spawn(connection);
    client.batch_execute("ALTER SYSTEM SET default_transaction_read_only = on").await.expect("set");
    client.batch_execute("SELECT pg_reload_conf()").await.expect("read again");
    let end = Instant::now() + RECOVERY;
    while !Counters::begin(&store).await.is_err_and(|error| error.to_string().contains("only reads")) {
        assert!(Instant::now() < end, "it begins to count");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    server.kill();
    assert!(Counters::begin(&store).await.is_err_and(|error| is_outage(&error)), "nobody is there");
}

/// The session of a leader that does nothing is not taken for one of a lost gateway.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_is_idle_keeps_the_lead() {
    let server = PostgresServer::start("idle");
    let (store, other) = (server.open(1).await, server.open(1).await);
    assert_eq!(store.lead().await, Ok(true));
    // Longer than the server waits for a silent leader.
    tokio::time::sleep(Duration::from_secs(18)).await;
    assert_eq!((other.lead().await, store.lead().await), (Ok(false), Ok(true)));
}

/// An ask waits for a locked row; its caller gives up and sets its leases. Then the row is released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_postgres_grants_too_late_is_nobody_s() {
    let server = PostgresServer::start("late");
    let (store, other) = (server.open(4).await, server.open(2).await);
    let window = Window { start: 0, seconds: 1_000_000 };
    let ask = |counter: &str, want| Ask {
        counter: counter.into(),
        window,
        sliding: false,
        max: 10,
        want,
        least: 0,
        until: 900_000,
    };
    assert_eq!(store.take("g", &[ask("a", 1)], false, 1).await.expect("taken")[0].granted, 1);

    let (client, connection) =
        tokio_postgres::connect(&server.options(1).url, tokio_postgres::NoTls).await.expect("a connection");
    tokio::spawn(connection);
    client.batch_execute("BEGIN; SELECT FROM penstock.counters WHERE name = 'a' FOR UPDATE").await.expect("locked");
    let waiting = async || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%penstock%'";
        let row = client.query_one(sql, &[]).await.expect("asked");
        row.get::<_, i64>(0)
    };
    for late in [&ask("a", 9), &Ask { want: 2, ..ask("a", 9) }] {
        let asked =
            tokio::time::timeout(Duration::from_millis(300), store.take("g", std::slice::from_ref(late), false, 1));
        assert!(asked.await.is_err(), "the row is locked");
    }
    assert_eq!(waiting().await, 2, "nobody waits for them, and they wait");
    // The lease of the locked counter cannot be set now; that of the next one is set at once.
    let kept = [Kept { counter: "b".into(), window, amount: 3, until: 900_000 }];
    store.lease("g", &kept, 1).await.expect("leased");
    client.batch_execute("COMMIT").await.expect("free");
    until_it_works(async || if waiting().await == 0 { Ok(()) } else { Err(StoreError::Busy) }).await;

    let grant = other.take("h", &[ask("a", 10), ask("b", 10)], false, 1).await.expect("taken");
    assert_eq!([grant[0].granted, grant[1].granted], [9, 7], "what was heard of and said is all that is leased");
    let grant = store.take("g", &[ask("a", 0), ask("c", 5)], false, 1).await.expect("its word is the last");
    assert_eq!((grant[0].leased, grant[1].granted), (1, 5));
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
    // The server may have processed the ask before it hung: that is a lease, and counts.
    let grant = until_it_works(async || store.take("g", &ask, false, 1).await).await[0];
    assert!(grant.used <= 10 && grant.leased <= 10, "{grant:?}");

    server.kill();
    let began = Instant::now();
    let error = store.take("g", &ask, false, 1).await.expect_err("nobody is there");
    assert!(is_outage(&error) && began.elapsed() < PATIENCE, "{error}");
    assert!(store.get("a").await.is_err_and(|error| is_outage(&error)));
    assert!(Redis::open(&server.options("")).await.is_err_and(|error| is_outage(&error)));
    server.restart();
    let lost = until_it_works(async || is_lost(store.take("g", &ask, false, 1).await));
    assert!(lost.await, "it has forgotten, and nobody goes on as if it had not");
    assert!(matches!(store.begin().await, Ok(Begun::Anew(_))));
}

/// However a server loses its counts: nothing is granted until all clients have restored theirs, and then it counts
/// again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_is_told_what_it_has_lost() {
    let mut server = RedisServer::start("lost");
    let (one, two) = (server.open("l:").await, server.open("l:").await);
    let window = Window { start: 0, seconds: 1000 };
    let ask = |want| [Ask { counter: "a".into(), window, sliding: false, max: 10, want, least: 0, until: 900 }];
    let kept = |amount, until| [Kept { counter: "a".into(), window, amount, until }];
    for round in 0..2 {
        one.take("g1", &ask(3), false, 1).await.expect("taken");
        match round {
            0 => server.command(&["FLUSHALL"]),
            _ => {
                server.kill();
                server.restart();
            }
        }
        let settled = [Settlement { counter: "a".into(), window, leased: 1, spent: 1 }];
        assert!(until_it_works(async || is_lost(two.settle("g2", nth(), &settled, 1).await)).await);
        assert!(until_it_works(async || is_lost(one.take("g1", &ask(1), false, 1).await)).await);
        let Ok(Begun::Anew(wait)) = one.begin().await else { panic!("a new era") };
        assert_eq!(one.begin().await, Ok(Begun::Whole), "it is its own by now");
        assert_eq!(one.take("g1", &ask(1), false, 1).await, Err(StoreError::Busy), "the other has had no time yet");
        assert!(is_lost(two.take("g2", &ask(1), false, 1).await).expect("an answer"));
        assert!(matches!(two.begin().await, Ok(Begun::Anew(left)) if left <= wait));
        for told in [&one, &two, &one] {
            told.restore(&kept(4, 0), 1).await.expect("restored");
            told.lease("g1", &kept(3, 900), 1).await.expect("leased");
        }
        let late = server.open("l:").await;
        assert_eq!(late.begin().await, Ok(Begun::Whole), "whoever comes later finds it whole");
        let grant = two.take("g2", &ask(9), false, 1).await.expect("taken")[0];
        assert_eq!((grant.granted, grant.used), (3, 10), "four were spent, three are leased");
        // A holder gives back grants whose answers it never got by setting its leases.
        two.lease("g2", &kept(1, 900), 1).await.expect("leased");
        assert_eq!(two.take("g3", &ask(9), false, 1).await.expect("taken")[0].granted, 2);
        two.lease("g2", &kept(0, 900), 1).await.expect("leased");
        assert_eq!(two.take("g3", &ask(9), false, 1).await.expect("taken")[0].granted, 1);
        // A restored amount never lowers a counter.
        one.restore(&kept(1, 0), 1).await.expect("restored");
        assert_eq!(two.take("g2", &ask(1), false, 1).await.expect("taken")[0].granted, 0);
        server.command(&["DEL", "l:c:0:1000:a"]);
    }
}

/// A client that dies before it has restored what a server lost leaves that to the next one, also when the era grants by then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_is_to_be_restored_until_a_client_has_done_it() {
    let server = RedisServer::start("owed");
    let lazy = || Redis::lazy(&server.options("o:")).expect("a client");
    let began = Instant::now();
    let next = async || loop {
        let client = lazy();
        match client.begin().await.expect("asked") {
            Begun::Anew(left) if left.is_zero() => return client,
            told => assert!(told != Begun::Whole && began.elapsed() < PATIENCE, "{told:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    // Each of them finds the era that the first one began, and dies.
    drop(next().await);
    let second = next().await;
    let window = Window { start: 0, seconds: 1000 };
    second.restore(&[Kept { counter: "a".into(), window, amount: 4, until: 0 }], 1).await.expect("restored");
    assert!(matches!(lazy().begin().await, Ok(Begun::Anew(_))), "there may be more");
    second.restored().await.expect("told");
    let third = lazy();
    assert_eq!(third.begin().await, Ok(Begun::Whole));
    let ask = [Ask { counter: "a".into(), window, sliding: false, max: 10, want: 9, least: 0, until: 900 }];
    assert_eq!(third.take("g3", &ask, false, 1).await.expect("taken")[0].granted, 6);
    // As a gateway of an earlier version leaves the field of the era before, when it begins one.
    server.command(&["HSET", "o:era", "owed", "another"]);
    assert_eq!(lazy().begin().await, Ok(Begun::Whole));

    server.command(&["FLUSHALL"]);
    assert!(matches!(lazy().begin().await, Ok(Begun::Anew(_))));
    assert_eq!(second.restored().await, Err(StoreError::Lost), "it restored the era before");
    assert!(matches!(lazy().begin().await, Ok(Begun::Anew(_))));
}

/// Whether an error reports the loss; other errors are returned.
fn is_lost<T>(told: Result<T, StoreError>) -> Result<bool, StoreError> {
    match told {
        Err(StoreError::Lost) => Ok(true),
        told => told.map(|_| false),
    }
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
