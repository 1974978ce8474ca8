//! Use of providers of `fallback` under limits by provider, when several gateways count together.

use penstock_store::{Ask, Window};

use super::*;

/// Nothing is reserved for such a provider, so its use is known at the end of a request only.
#[tokio::test]
async fn what_a_provider_of_fallback_answers_counts_at_all_gateways() {
    let store = Arc::new(MemoryCounters::default());
    let day = Measure { unit: Unit::Requests, span: Span::Day, max: 2000 };
    let limit = Limit { by: By::Provider, measures: vec![day], ..limit() };
    for holder in ["one", "two"] {
        let bed = Bed::new(Way::RelayedProvider, Act::Answer, &limit);
        let shared = Arc::new(Shared::with_store(store.clone(), holder));
        assert!(bed.governor.shared.set(shared.clone()).is_ok());
        for _ in 0..5 {
            drop(bed.ask(&body("")).await.expect("room"));
        }
        shared.report_once(Instant::now()).await;
    }
    let now = clock::unix_seconds();
    let (counter, window) = (format!("it/a/{}", day.name()), Window::at(now, 86_400));
    let ask = Ask { counter, window, sliding: false, max: 2000, want: 0, least: 0, until: now + 1 };
    let used = store.take("reader", &[ask], false, now).await.expect("asked")[0].used;
    assert_eq!(used, 10, "of both gateways");
}
