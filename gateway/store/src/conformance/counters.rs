//! Conformance of shared counters and of the cache.

use bytes::Bytes;

use super::nth;
use crate::{Ask, CACHE_VALUE_BYTES_MAX, Cache, Counters, Grant, Kept, Settlement, StoreError, Window};

/// Checks the contract of [`Counters`]. `name` is part of the name of each counter, so that tests can share a server.
pub async fn counters(store: &dyn Counters, name: &str) {
    nobody_gets_what_another_has(store, name).await;
    a_dead_holder_gives_back(store, name).await;
    what_is_spent_stays_spent(store, name).await;
    what_is_settled_twice_counts_once(store, name).await;
    what_nobody_heard_of_is_given_back(store, name).await;
    all_or_nothing(store, name).await;
    windows_slide(store, name).await;
    what_cannot_be_is_refused(store, name).await;
}

const WINDOW: Window = Window { start: 1_000_000, seconds: 60 };
const NOW: u64 = 1_000_010;

fn ask(name: &str, counter: &str, max: u64, want: u64) -> Ask {
    let counter = format!("{name}:{counter}");
    Ask { counter, window: WINDOW, sliding: false, max, want, least: 0, until: NOW + 5 }
}

fn grant(granted: u64, leased: u64, used: u64) -> Grant {
    Grant { granted, leased, used }
}

async fn take(store: &dyn Counters, holder: &str, asks: &[Ask], now: u64) -> Vec<Grant> {
    store.take(holder, asks, false, now).await.expect("taken")
}

async fn nobody_gets_what_another_has(store: &dyn Counters, name: &str) {
    let ask = |want| [ask(name, "shared", 100, want)];
    assert_eq!(take(store, "g1", &ask(60), NOW).await, [grant(60, 60, 60)]);
    assert_eq!(take(store, "g2", &ask(60), NOW).await, [grant(40, 40, 100)], "what is left");
    assert_eq!(take(store, "g2", &ask(1), NOW).await, [grant(0, 40, 100)]);
    let [picky] = &ask(60);
    let picky = Ask { least: 60, max: 130, ..picky.clone() };
    assert_eq!(take(store, "g1", &[picky], NOW).await, [grant(0, 60, 100)], "less than the least is nothing");
    let other = Ask { window: Window { start: WINDOW.start + 60, ..WINDOW }, ..ask(70)[0].clone() };
    assert_eq!(take(store, "g1", &[other], NOW).await, [grant(70, 70, 70)], "another window is another counter");
    assert_eq!(take(store, "g1", &[], NOW).await, []);
}

async fn a_dead_holder_gives_back(store: &dyn Counters, name: &str) {
    let ask = |want, until| [Ask { until, ..ask(name, "dead", 10, want) }];
    assert_eq!(take(store, "g1", &ask(10, NOW + 5), NOW).await, [grant(10, 10, 10)]);
    assert_eq!(take(store, "g2", &ask(4, NOW + 9), NOW + 4).await, [grant(0, 0, 10)], "not yet");
    assert_eq!(take(store, "g1", &ask(0, NOW + 8), NOW + 4).await, [grant(0, 10, 10)], "renewed");
    assert_eq!(take(store, "g2", &ask(4, NOW + 9), NOW + 7).await, [grant(0, 0, 10)], "not yet");
    assert_eq!(take(store, "g2", &ask(4, NOW + 20), NOW + 8).await, [grant(4, 4, 4)], "lapsed");
    assert_eq!(take(store, "g1", &ask(1, NOW + 20), NOW + 8).await, [grant(1, 1, 5)], "and not revived");
}

async fn what_is_spent_stays_spent(store: &dyn Counters, name: &str) {
    let ask = |want, until| [Ask { until, ..ask(name, "spent", 100, want) }];
    let settle = |leased, spent| async move {
        let one = Settlement { counter: format!("{name}:spent"), window: WINDOW, leased, spent };
        store.settle("g1", nth(), &[one], NOW).await.expect("settled");
    };
    assert_eq!(take(store, "g1", &ask(50, NOW + 5), NOW).await, [grant(50, 50, 50)]);
    settle(20, 15).await;
    assert_eq!(take(store, "g1", &ask(0, NOW + 5), NOW).await, [grant(0, 30, 45)], "less than was held");
    settle(30, 90).await;
    assert_eq!(take(store, "g2", &ask(1, NOW + 5), NOW).await, [grant(0, 0, 105)], "more than was held, and noted");
    settle(40, 0).await;
    assert_eq!(take(store, "g2", &ask(1, NOW + 9), NOW + 6).await, [grant(0, 0, 105)], "spent does not lapse");
    store.settle("g1", nth(), &[], NOW).await.expect("nothing to settle");
}

/// A settlement is retried because its answer was lost, perhaps while the first one is still under way.
async fn what_is_settled_twice_counts_once(store: &dyn Counters, name: &str) {
    let (holder, other) = (format!("{name}:once"), format!("{name}:other"));
    let ask = |want| [ask(name, "once", 100, want)];
    let settle = async |holder: &str, nth, leased, spent| {
        let one = Settlement { counter: format!("{name}:once"), window: WINDOW, leased, spent };
        store.settle(holder, nth, &[one], NOW).await.expect("settled");
    };
    let [first, never, second, third] = [nth(), nth(), nth(), nth()];
    assert_eq!(take(store, &holder, &ask(50), NOW).await, [grant(50, 50, 50)]);
    for _ in 0..3 {
        settle(&holder, first, 20, 15).await;
    }
    assert_eq!(take(store, &holder, &ask(0), NOW).await, [grant(0, 30, 45)]);
    settle(&holder, second, 10, 10).await;
    for late in [first, never, second] {
        settle(&holder, late, 20, 15).await;
    }
    assert_eq!(take(store, &holder, &ask(0), NOW).await, [grant(0, 20, 45)], "what comes behind a later one was done");
    settle(&other, first, 0, 5).await;
    assert_eq!(take(store, &other, &ask(0), NOW).await, [grant(0, 0, 50)], "each holder has numbers of its own");
    let kept = [Kept { counter: format!("{name}:once"), window: WINDOW, amount: 3, until: NOW + 5 }];
    store.lease(&holder, &kept, NOW).await.expect("leased");
    settle(&holder, second, 3, 3).await;
    settle(&holder, third, 1, 1).await;
    assert_eq!(take(store, &holder, &ask(0), NOW).await, [grant(0, 2, 33)], "also after it was said what is leased");
}

/// The answer to an ask was lost: the holder sets its leases to those it knows, and the rest is free again, long before
/// the window ends.
async fn what_nobody_heard_of_is_given_back(store: &dyn Counters, name: &str) {
    let holder = format!("{name}:late");
    let ask = |want| [Ask { until: NOW + 50, ..ask(name, "late", 100, want) }];
    let holds = |amount| {
        let kept = [Kept { counter: format!("{name}:late"), window: WINDOW, amount, until: NOW + 50 }];
        let holder = &holder;
        async move { store.lease(holder, &kept, NOW).await.expect("leased") }
    };
    assert_eq!(take(store, &holder, &ask(60), NOW).await, [grant(60, 60, 60)]);
    holds(20).await;
    assert_eq!(take(store, "g2", &ask(90), NOW).await, [grant(80, 80, 100)]);
    assert_eq!(take(store, &holder, &ask(1), NOW).await, [grant(0, 20, 100)], "it has what it said");
    holds(0).await;
    assert_eq!(take(store, "g2", &ask(30), NOW).await, [grant(20, 100, 100)]);
    // The holder sets this lease rather than asking for it: it was granted before the store lost it.
    holds(10).await;
    assert_eq!(take(store, &holder, &ask(0), NOW).await, [grant(0, 10, 110)]);
    let one = Settlement { counter: format!("{name}:late"), window: WINDOW, leased: 10, spent: 4 };
    store.settle(&holder, nth(), &[one], NOW).await.expect("settled");
    assert_eq!(take(store, "g2", &ask(0), NOW).await, [grant(0, 100, 104)]);
}

async fn all_or_nothing(store: &dyn Counters, name: &str) {
    let exactly = |counter, max, want| Ask { least: want, ..ask(name, counter, max, want) };
    let asks = [exactly("whole-a", 10, 6), exactly("whole-b", 5, 6)];
    let refused = store.take("g1", &asks, true, NOW).await.expect("asked");
    assert_eq!(refused, [grant(0, 0, 0), grant(0, 0, 0)]);
    let asks = [exactly("whole-b", 5, 5), exactly("whole-a", 10, 6)];
    assert_eq!(store.take("g1", &asks, true, NOW).await, Ok(vec![grant(5, 5, 5), grant(6, 6, 6)]));
    assert_eq!(store.take("g1", &asks, true, NOW).await, Ok(vec![grant(0, 5, 5), grant(0, 6, 6)]));
    assert_eq!(store.take("g1", &asks, false, NOW).await, Ok(vec![grant(0, 5, 5), grant(0, 6, 6)]));
    let third = [exactly("whole-c", 1, 1), exactly("whole-a", 11, 6)];
    assert_eq!(take(store, "g2", &third, NOW).await, [grant(1, 1, 1), grant(0, 0, 6)], "each for itself");
}

async fn windows_slide(store: &dyn Counters, name: &str) {
    let at = |start, want| Ask {
        window: Window { start, seconds: 60 },
        sliding: true,
        until: start + 60,
        ..ask(name, "slides", 100, want)
    };
    assert_eq!(take(store, "g1", &[at(1_000_020, 50)], 1_000_030).await, [grant(50, 50, 50)]);
    let spent =
        Settlement { counter: format!("{name}:slides"), window: at(1_000_020, 0).window, leased: 50, spent: 50 };
    store.settle("g1", nth(), &[spent], 1_000_040).await.expect("settled");
    // 50 s of the previous window are among the last 60 s: 50 · 50/60 = 41⅔.
    assert_eq!(take(store, "g1", &[at(1_000_080, 0)], 1_000_090).await, [grant(0, 0, 42)]);
    assert_eq!(take(store, "g1", &[at(1_000_080, 90)], 1_000_090).await, [grant(58, 58, 100)]);
    assert_eq!(
        take(store, "g2", &[at(1_000_080, 90)], 1_000_139).await,
        [grant(41, 41, 100)],
        "1 s is left: 50/60, up"
    );
    assert_eq!(Window::at(1_000_090, 60).start, 1_000_080);
}

async fn what_cannot_be_is_refused(store: &dyn Counters, name: &str) {
    let twice = [ask("", "twice", 1, 1), ask("", "twice", 1, 1)];
    let long = [ask("", &"x".repeat(5000), 1, 1)];
    let huge = [ask("", "huge", u64::MAX, u64::MAX)];
    for asks in [&twice[..], &long, &huge] {
        assert!(matches!(store.take("g1", asks, false, NOW).await, Err(StoreError::Misuse(_))));
    }
    assert!(matches!(store.take("", &[], false, NOW).await, Err(StoreError::Misuse(_))));
    assert!(matches!(store.settle("g1", 0, &[], NOW).await, Err(StoreError::Misuse(_))));
    let unlimited = Ask { max: u64::MAX, ..ask(name, "unlimited", 0, 1 << 52) };
    assert_eq!(take(store, "g1", &[unlimited], NOW).await[0].granted, 1 << 52, "no maximum");
}

/// Checks the contract of [`Cache`]. `name` is part of each key, so that tests can share a server.
pub async fn cache(store: &dyn Cache, name: &str) {
    let key = format!("{name}:key");
    assert_eq!(store.get(&key).await, Ok(None));
    let value: Bytes = (0..=255u8).cycle().take(100_000).collect();
    store.put(&key, value.clone(), 60).await.expect("put");
    assert_eq!(store.get(&key).await, Ok(Some(value)));
    store.put(&key, Bytes::new(), 60).await.expect("put");
    assert_eq!(store.get(&key).await, Ok(Some(Bytes::new())));
    let long = store.put(&key, vec![0; CACHE_VALUE_BYTES_MAX + 1].into(), 60).await;
    assert!(matches!(long, Err(StoreError::Misuse(_))));
    assert!(matches!(store.get(&"k".repeat(5000)).await, Err(StoreError::Misuse(_))));
}
