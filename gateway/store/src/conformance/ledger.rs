//! Conformance of the ledger: each request counts once, and usage is summed by any group.

use std::sync::Arc;

use super::kept::page;
use crate::{
    ENTRY_TAGS_MAX, Entry, EntryFilter, Group, Held, LEDGER_BATCH_MAX, OpenEntry, Order, Store, StoreError, Subject,
    Tokens, UsageQuery, UsageRow,
};

pub(super) async fn all(store: &dyn Store) {
    a_request_counts_once(store).await;
    what_nobody_ended_is_an_orphan(store).await;
    usage_is_summed_by_anything(store).await;
    entries_are_listed_and_swept(store).await;
    what_cannot_be_is_refused(store).await;
    what_the_silent_left_is_found(store).await;
}

/// Length of a year in seconds: each test uses its own years, so that tests can share a store.
const YEAR: u64 = 366 * 86_400;

fn entry(request: &str, at: u64) -> Entry {
    let subject = Subject {
        key: "key_a".into(),
        team: "t".into(),
        user: "u".into(),
        model: "chat".into(),
        provider: "acme".into(),
        route: "/v1/chat/completions".into(),
        tags: vec!["a".into(), "b".into()],
    };
    Entry {
        opened: OpenEntry {
            at,
            request: request.into(),
            gateway: "g1".into(),
            subject: subject.into(),
            held: Held { input: 10, output: 100, micro_usd: 500 },
        },
        tokens: Tokens { input: 9, input_cached: 4, input_written: 1, output: 20, reasoning: 5 },
        micro_usd: 120,
        status: 200,
        outcome: "stop".into(),
        attempts: 2,
        first_ms: 30,
        total_ms: 900,
        assumed: false,
    }
}

fn opened(entry: &Entry) -> OpenEntry {
    entry.opened.clone()
}

fn during(from: u64) -> EntryFilter {
    EntryFilter { from, until: from + YEAR, ..EntryFilter::default() }
}

async fn sum(store: &dyn Store, filter: EntryFilter) -> UsageRow {
    let query = UsageQuery { filter, limit: 1, ..UsageQuery::default() };
    store.usage(&query).await.expect("summed").items.pop().unwrap_or_default()
}

/// Retries in any order count once.
async fn a_request_counts_once(store: &dyn Store) {
    let (one, two) = (entry("once-1", YEAR), entry("once-2", YEAR + 1));
    store.open_entries(vec![opened(&one)].into()).await.expect("opened");
    store.open_entries(vec![opened(&one)].into()).await.expect("again, after a failure");
    assert_eq!(store.entry(YEAR, "once-1").await, Ok(None), "it has not ended");
    assert_eq!(sum(store, during(YEAR)).await.requests, 0, "what is open is not summed");
    let both = vec![one.clone(), two.clone()];
    assert_eq!(store.settle_entries(both.clone().into()).await, Ok(vec![true, true]), "opened or not");
    assert_eq!(store.settle_entries(both.into()).await, Ok(vec![false, false]));
    let other = Entry { micro_usd: 7, ..one.clone() };
    assert_eq!(store.settle_entries(vec![other.clone(), other].into()).await, Ok(vec![false, false]));
    store.open_entries(vec![opened(&one)].into()).await.expect("late");
    assert_eq!(store.entry(YEAR, "once-1").await, Ok(Some(one.clone())));
    let want = UsageRow {
        values: vec![],
        requests: 2,
        failed: 0,
        tokens: Tokens { input: 18, input_cached: 8, input_written: 2, output: 40, reasoning: 10 },
        micro_usd: 240,
    };
    assert_eq!(sum(store, during(YEAR)).await, want);
    let thrice = vec![entry("once-3", YEAR); 3];
    assert_eq!(store.settle_entries(thrice.into()).await, Ok(vec![true, false, false]), "also within one batch");
    assert_eq!(sum(store, during(YEAR)).await.requests, 3);
}

/// The reservation stands in for an entry that a dead gateway left open, until the real one arrives.
async fn what_nobody_ended_is_an_orphan(store: &dyn Store) {
    let at = 2 * YEAR;
    let entries: Vec<Entry> = (0..4).map(|number| entry(&format!("orphan-{number}"), at + number)).collect();
    let mut open: Vec<OpenEntry> = entries.iter().map(opened).collect();
    open[3].gateway = "g2".into();
    store.open_entries(open.clone().into()).await.expect("opened");
    store.settle_entries(vec![entries[1].clone()].into()).await.expect("settled");
    let all = store.orphans(at + 10, None, 100).await.expect("found");
    assert_eq!(all, [open[0].clone(), open[2].clone(), open[3].clone()]);
    assert_eq!(store.orphans(at + 2, None, 100).await, Ok(vec![open[0].clone()]));
    assert_eq!(store.orphans(at + 10, Some("g2"), 100).await, Ok(vec![open[3].clone()]));
    assert_eq!(store.orphans(at + 10, None, 1).await, Ok(vec![open[0].clone()]));
    let assumed = Entry { assumed: true, tokens: Tokens::default(), micro_usd: 500, ..entries[0].clone() };
    assert_eq!(store.settle_entries(vec![assumed.clone()].into()).await, Ok(vec![true]));
    assert_eq!(store.settle_entries(vec![assumed.clone()].into()).await, Ok(vec![false]));
    assert_eq!(sum(store, during(at)).await.micro_usd, 620);
    assert_eq!(store.settle_entries(vec![entries[0].clone()].into()).await, Ok(vec![true]), "the truth came late");
    assert_eq!(store.settle_entries(vec![assumed].into()).await, Ok(vec![false]), "and stays");
    assert_eq!(store.entry(at, "orphan-0").await, Ok(Some(entries[0].clone())));
    assert_eq!((sum(store, during(at)).await.requests, sum(store, during(at)).await.micro_usd), (2, 240));
}

/// Open entries of silent gateways are found; those of live ones, and of ones that never reported, are not.
async fn what_the_silent_left_is_found(store: &dyn Store) {
    let at = 7 * YEAR;
    let mut open: Vec<OpenEntry> =
        (0..4).map(|number| opened(&entry(&format!("left-{number}"), at + number))).collect();
    for (entry, gateway) in open.iter_mut().zip(["dead", "lives", "never", "dead"]) {
        entry.gateway = gateway.into();
    }
    store.open_entries(open.clone().into()).await.expect("opened");
    assert_eq!(store.left(at + 1000, 0, 10).await, Ok(vec![]), "nobody has said anything");
    for (gateway, now) in [("dead", at), ("lives", at), ("lives", at + 100), ("lives", at + 50)] {
        store.alive(gateway, now).await.expect("noted");
    }
    assert_eq!(store.left(at, 0, 10).await, Ok(vec![]));
    assert_eq!(store.left(at + 60, 0, 10).await, Ok(vec![open[0].clone(), open[3].clone()]));
    assert_eq!(store.left(at + 60, 0, 1).await, Ok(vec![open[0].clone()]));
    assert_eq!(store.left(at + 101, 0, 10).await.expect("found").len(), 3, "a clock that went back does not count");
    let never = store.left(at + 60, at + 3, 100).await.expect("found");
    let never: Vec<_> = never.into_iter().filter(|one| one.at >= at).collect();
    assert_eq!(never, [open[0].clone(), open[2].clone(), open[3].clone()], "too old for anybody but the living");
    let truth = Entry { opened: open[0].clone(), ..entry("left-0", at) };
    assert_eq!(store.settle_entries([truth].into()).await, Ok(vec![true]));
    assert_eq!(store.left(at + 60, 0, 10).await, Ok(vec![open[3].clone()]));
    store.alive("lives", at + 200_000).await.expect("noted");
    assert_eq!(store.left(at + 60, 0, 10).await, Ok(vec![]), "after a day nobody asks any more");
    assert!(matches!(store.alive("", at).await, Err(StoreError::Misuse(_))));
}

/// Days of the usage below, in Unix seconds.
const DAYS: [u64; 2] = [3 * YEAR - 3 * YEAR % 86_400 + 86_400, 3 * YEAR - 3 * YEAR % 86_400 + 2 * 86_400];

async fn usage_is_summed_by_anything(store: &dyn Store) {
    let mut entries = Vec::new();
    for number in 0..12u64 {
        let mut one = entry(&format!("usage-{number}"), DAYS[(number % 2) as usize] + number * 600);
        let who = Arc::make_mut(&mut one.opened.subject);
        who.key = format!("key_{}", number % 3);
        who.model = ["chat", "Chat", "é"][(number % 3) as usize].into();
        who.tags = [vec![], vec!["x".into()], vec!["y".into(), "x".into(), "x".into()]][(number / 4) as usize].clone();
        one.status = if number == 5 { 500 } else { 200 };
        one.micro_usd = 1 << number;
        entries.push(one);
    }
    store.settle_entries(entries.into()).await.expect("settled");
    let filter = || during(DAYS[0]);
    let table = |groups: Vec<Group>, filter: EntryFilter| async move {
        let query = UsageQuery { filter, groups, after: None, limit: 100 };
        let rows = store.usage(&query).await.expect("summed").items;
        rows.into_iter().map(|row| (row.values.join("|"), row.requests, row.micro_usd)).collect::<Vec<_>>()
    };
    let row = |values: &str, requests, usd| (values.to_owned(), requests, usd);
    assert_eq!(table(vec![], filter()).await, [row("", 12, 4095)]);
    assert_eq!(
        table(vec![Group::Key], filter()).await,
        [row("key_0", 4, 0x249), row("key_1", 4, 0x492), row("key_2", 4, 0x924)]
    );
    let models = table(vec![Group::Model], filter()).await;
    assert_eq!(models, [row("Chat", 4, 0x492), row("chat", 4, 0x249), row("é", 4, 0x924)], "in the order of bytes");
    let days = table(vec![Group::Day], filter()).await;
    assert_eq!(days, [row(&DAYS[0].to_string(), 6, 0x555), row(&DAYS[1].to_string(), 6, 0xaaa)]);
    let tags = table(vec![Group::Tag], filter()).await;
    assert_eq!(
        tags,
        [row("", 4, 0x00f), row("x", 8, 0xff0), row("y", 4, 0xf00)],
        "each tag of an entry counts it once"
    );
    let hours = table(vec![Group::Hour], EntryFilter { key: Some("key_0".into()), ..filter() }).await;
    let hour = |day: usize, hour: u64| (DAYS[day] + hour * 3600).to_string();
    let want = [row(&hour(0, 0), 1, 1), row(&hour(0, 1), 1, 64), row(&hour(1, 0), 1, 8), row(&hour(1, 1), 1, 512)];
    assert_eq!(hours, want);
    for (filter, requests) in [
        (EntryFilter { until: DAYS[1], ..filter() }, 6),
        (EntryFilter { from: DAYS[0] + 1, ..filter() }, 11),
        (EntryFilter { model: Some("Chat".into()), ..filter() }, 4),
        (EntryFilter { tag: Some("x".into()), ..filter() }, 8),
        (EntryFilter { tag: Some(String::new()), ..filter() }, 4),
        (EntryFilter { team: Some("t".into()), user: Some("u".into()), provider: Some("acme".into()), ..filter() }, 12),
        (EntryFilter { route: Some("/v1/embeddings".into()), ..filter() }, 0),
        (EntryFilter { until: u64::MAX, ..filter() }, 12),
    ] {
        assert_eq!(sum(store, filter.clone()).await.requests, requests, "{filter:?}");
    }
    assert_eq!(sum(store, filter()).await.failed, 1);
    let groups = vec![Group::Model, Group::Day];
    let whole = store.usage(&UsageQuery { filter: filter(), groups: groups.clone(), after: None, limit: 100 }).await;
    let whole = whole.expect("summed").items;
    assert_eq!(whole.len(), 6);
    let (mut have, mut after) = (Vec::new(), None);
    loop {
        let query = UsageQuery { filter: filter(), groups: groups.clone(), after, limit: 4 };
        let listing = store.usage(&query).await.expect("summed");
        have.extend(listing.items);
        after = have.last().map(|row: &UsageRow| row.values.clone());
        if !listing.more {
            break;
        }
    }
    assert_eq!(have, whole, "pages have no gaps and no doubles");
}

async fn entries_are_listed_and_swept(store: &dyn Store) {
    let at = 5 * YEAR;
    let entries: Vec<Entry> = (0..5).map(|number| entry(&format!("listed-{number}"), at + number)).collect();
    store
        .open_entries([OpenEntry { gateway: "g9".into(), ..opened(&entry("listed-open", at)) }].into())
        .await
        .expect("opened");
    store.settle_entries(entries.clone().into()).await.expect("settled");
    let first = store.entries(&during(at), &page(3, Order::Descending, None)).await.expect("listed");
    assert_eq!(
        (first.items.as_slice(), first.more),
        (&[entries[4].clone(), entries[3].clone(), entries[2].clone()][..], true)
    );
    let place = entries[2].opened.place();
    let rest = store.entries(&during(at), &page(3, Order::Descending, Some(&place))).await.expect("listed");
    assert_eq!((rest.items.as_slice(), rest.more), (&[entries[1].clone(), entries[0].clone()][..], false));
    let rest = store.entries(&during(at), &page(1, Order::Ascending, Some(&place))).await.expect("listed");
    assert_eq!((rest.items.as_slice(), rest.more), (&[entries[3].clone()][..], true));
    for nowhere in ["", "listed-2", "x.listed-2"] {
        let none = store.entries(&during(at), &page(3, Order::Descending, Some(nowhere))).await.expect("listed");
        assert!(none.items.is_empty() && !none.more, "{nowhere:?} is no place");
    }
    while store.sweep_entries(at + 3).await.expect("swept") > 0 {}
    assert_eq!(store.entry(at + 2, "listed-2").await, Ok(None));
    assert_eq!(store.entry(at + 3, "listed-3").await, Ok(Some(entries[3].clone())));
    assert_eq!(store.orphans(at + 1, Some("g9"), 10).await.expect("found").len(), 1, "what is open stays");
}

async fn what_cannot_be_is_refused(store: &dyn Store) {
    let query = |groups: Vec<Group>, after, limit| UsageQuery { filter: during(0), groups, after, limit };
    for bad in [
        query(vec![Group::Key, Group::Key], None, 1),
        query(vec![Group::Key, Group::Team, Group::User, Group::Model, Group::Route], None, 1),
        query(vec![Group::Key], Some(vec![]), 1),
        query(vec![Group::Key], None, 0),
    ] {
        assert!(matches!(store.usage(&bad).await, Err(StoreError::Misuse(_))), "{bad:?}");
    }
    let many = vec![entry("many", 0); LEDGER_BATCH_MAX + 1];
    assert!(matches!(store.settle_entries(many.into()).await, Err(StoreError::Misuse(_))));
    assert!(matches!(store.settle_entries(vec![entry("", 0)].into()).await, Err(StoreError::Misuse(_))));
    // Client-chosen texts are truncated, not refused: the request was served.
    let mut wild = entry("wild", 6 * YEAR);
    let who = Arc::make_mut(&mut wild.opened.subject);
    who.model = format!("a\0{}", "ä".repeat(5000));
    who.tags = (0..100).map(|number| format!("t{number:03}")).collect();
    assert_eq!(store.settle_entries(vec![wild].into()).await, Ok(vec![true]));
    let kept = store.entry(6 * YEAR, "wild").await.expect("read").expect("there");
    assert!(kept.opened.subject.model.starts_with("a\u{fffd}ä") && kept.opened.subject.model.len() < 300);
    assert_eq!(kept.opened.subject.tags.len(), ENTRY_TAGS_MAX);
}
