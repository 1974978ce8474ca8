//! Two gateways on one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use penstock_store::conformance::nth;
use penstock_store::{
    Ask, Counters, Entry, EntryFilter, KeyDigest, KeyId, KeyRecord, Keys, Ledger, OpenEntry, Settlement, Store,
    UsageQuery, Window,
};

use crate::harness::{PostgresServer, RedisServer};

const NOW: u64 = 1_000_000;
const WINDOW: Window = Window { start: NOW, seconds: 3600 };
/// Bound of the counter that both gateways share.
const MAX: u64 = 500;

pub(crate) async fn two_gateways_share_redis(server: &RedisServer) {
    let gateways: [Arc<dyn Counters>; 2] = [Arc::new(server.open("s:").await), Arc::new(server.open("s:").await)];
    nothing_is_granted_twice(gateways).await;
}

pub(crate) async fn two_gateways_share_postgres(server: &PostgresServer) {
    let (one, two) = (Arc::new(server.open(4).await), Arc::new(server.open(4).await));
    nothing_is_granted_twice([one.clone(), two.clone()]).await;
    one_leads(&*one, &*two).await;
    a_revocation_is_seen(&*one, &two).await;
    what_both_settle_counts_once(&one, &two).await;
}

fn ask(counter: &str, want: u64) -> Ask {
    Ask { counter: counter.into(), window: WINDOW, sliding: false, max: MAX, want, least: 0, until: NOW + 60 }
}

/// Forty tasks of two gateways take, spend, return and die, on two counters in both orders.
async fn nothing_is_granted_twice(gateways: [Arc<dyn Counters>; 2]) {
    let (spent, died) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..40u64 {
        let (store, spent, died) = (gateways[(task % 2) as usize].clone(), spent.clone(), died.clone());
        tasks.spawn(async move {
            let holder = format!("g{task}");
            for round in 0..10 {
                let mut asks = vec![ask("both-a", 1 + (task + round) % 7), ask("both-b", 3)];
                if task % 3 == 0 {
                    asks.reverse();
                }
                let grants = store.take(&holder, &asks, false, NOW + round).await.expect("taken");
                assert!(grants.iter().all(|grant| grant.used <= MAX), "{grants:?}");
                if task % 10 == 9 {
                    // The task dies with its lease.
                    died.fetch_add(grants[usize::from(task % 3 == 0)].granted, Ordering::Relaxed);
                    return;
                }
                let of = |at: usize, spent| Settlement {
                    counter: asks[at].counter.clone(),
                    window: WINDOW,
                    leased: grants[at].granted,
                    spent,
                };
                // The first portion is spent completely, the second not at all.
                let first = usize::from(task % 3 == 0);
                let settled = [of(first, grants[first].granted), of(1 - first, 0)];
                store.settle(&holder, nth(), &settled, NOW + round).await.expect("settled");
                spent.fetch_add(grants[first].granted, Ordering::Relaxed);
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("no panic");
    }
    let (spent, died) = (spent.load(Ordering::Relaxed), died.load(Ordering::Relaxed));
    assert!(spent + died <= MAX, "granted {spent} + {died}");
    let [store, _] = &gateways;
    let now = store.take("last", &[ask("both-a", MAX)], false, NOW + 20).await.expect("taken")[0];
    assert_eq!(now.granted, MAX - spent - died, "all that is left, and no more");
    // The leases of the dead tasks are free again once they have lapsed; spent amounts are not.
    let later = Ask { until: NOW + 200, ..ask("both-a", MAX) };
    let later = store.take("later", &[later], false, NOW + 61).await.expect("taken")[0];
    assert_eq!(later.granted, MAX - spent);
    assert!(died > 0, "some died");
}

async fn one_leads(one: &impl Store, two: &impl Store) {
    assert_eq!((one.lead().await, two.lead().await, one.lead().await), (Ok(true), Ok(false), Ok(true)));
    one.resign().await.expect("resigned");
    assert_eq!((two.lead().await, one.lead().await), (Ok(true), Ok(false)));
}

/// Measures the delay until a revocation is seen: well within the promised second. A machine that stalls for a moment
/// does not do so every time.
async fn a_revocation_is_seen(one: &impl Keys, two: &Arc<impl Keys>) {
    let mut took = Vec::new();
    while took.last().is_none_or(|last| *last >= Duration::from_millis(900)) {
        assert!(took.len() < 5, "{took:?}");
        took.push(seen_after(one, two, 42 + took.len() as u8).await);
    }
}

/// Key with nothing but a digest.
pub(crate) fn new_key(digest: u8) -> KeyRecord {
    KeyRecord {
        id: KeyId::random(),
        name: "a".into(),
        digest: KeyDigest([digest; 32]),
        previous: None,
        hint: "abcd".into(),
        team: None,
        user: None,
        parent: None,
        scope: Default::default(),
        limits: vec![],
        tags: vec![],
        created: 1,
        rotated: None,
        expires: None,
        revoked: None,
        version: 0,
    }
}

async fn seen_after(one: &impl Keys, two: &Arc<impl Keys>, digest: u8) -> Duration {
    let made = one.create_key(new_key(digest)).await.expect("created").expect("new");
    let seen = two.directory_version().await.expect("a version");
    assert_eq!(seen, made.version);
    let follower = two.clone();
    let follows = tokio::spawn(async move {
        let version = follower.directory_changed(seen, Duration::from_secs(20)).await.expect("a version");
        (Instant::now(), version)
    });
    let revoked = one.revoke_key(&made.id, 9).await.expect("revoked").expect("there");
    let told = Instant::now();
    let (when, version) = follows.await.expect("no panic");
    assert_eq!(version, revoked.version);
    let changes = two.directory_since(seen, 10).await.expect("read");
    assert_eq!(changes.keys, [revoked]);
    when.saturating_duration_since(told)
}

/// Two gateways settle overlapping batches repeatedly; each entry counts once.
async fn what_both_settle_counts_once(one: &Arc<impl Ledger>, two: &Arc<impl Ledger>) {
    let at = 20 * 366 * 86_400;
    let entry = |number: u64| {
        let opened = OpenEntry { at, request: format!("both-{number}"), ..OpenEntry::default() };
        Entry { opened, micro_usd: 1, ..Entry::default() }
    };
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..16u64 {
        // Batches that overlap, in different orders.
        let mut batch: Vec<Entry> = (task * 10..task * 10 + 100).map(entry).collect();
        if task % 2 == 0 {
            batch.reverse();
        }
        let (one, two) = (one.clone(), two.clone());
        tasks.spawn(async move {
            let opened = batch.iter().map(|entry| entry.opened.clone()).collect();
            if task % 2 == 0 {
                one.open_entries(opened).await.expect("opened");
                one.settle_entries(batch.into()).await.expect("settled")
            } else {
                two.open_entries(opened).await.expect("opened");
                two.settle_entries(batch.into()).await.expect("settled")
            }
        });
    }
    let mut counted = 0;
    while let Some(done) = tasks.join_next().await {
        counted += done.expect("no panic").into_iter().filter(|counts| *counts).count();
    }
    assert_eq!(counted, 250);
    let filter = EntryFilter { from: at, until: at + 1, ..EntryFilter::default() };
    let sum = one.usage(&UsageQuery { filter, limit: 1, ..UsageQuery::default() }).await.expect("summed");
    assert_eq!((sum.items[0].requests, sum.items[0].micro_usd), (250, 250));
}
