//! Operations that nobody here reads, and whose tokens and cost are not counted.

use penstock_types::Dialect;

use super::*;

/// Reservation of an operation with that use.
async fn unread(bed: &Bed, uses: Uses) -> Result<Option<Reservation>, Failure> {
    let plain = Plain { uses, dialect: Dialect::OpenAi, from: None, route: "/v1/moderations" };
    admit_plain(&bed.governor, &bed.rules, &Principal::default(), &bed.entry, &plain).await
}

#[tokio::test]
async fn an_operation_of_a_plugin_counts_as_a_request() {
    let bed = Bed::new(Way::Provider, Act::Answer, &limit());
    assert_eq!(unread(&bed, Uses::Unknown).await.err().expect("refused").status(), 403);
    let held = unread(&bed, Uses::ByPlugin).await.expect("let in");
    assert_eq!(bed.reserved(), [1, 0, 0, 0, 0, 0], "the request that it belongs to has the place in flight");
    close(held, None);
    assert_eq!(bed.used(), [1, 0, 0, 0, 0, 0], "no tokens and no money");
}

/// Limits that leave nothing while a request of these amounts is open, or one more of their unit.
#[tokio::test]
async fn an_operation_of_a_plugin_is_refused_by_limits_of_requests_alone() {
    let [requests, tokens, input, output, nano_usd, in_flight] = units(PROMPT, 100, 1);
    for (unit, max) in [
        (Unit::Requests, requests),
        (Unit::Tokens, tokens),
        (Unit::InputTokens, input),
        (Unit::OutputTokens, output),
        (Unit::NanoUsd, nano_usd),
        (Unit::InFlight, in_flight),
    ] {
        let span = if unit == Unit::InFlight { Span::Now } else { Span::Day };
        for more in [0, 1] {
            let limit = Limit { measures: vec![Measure { unit, span, max: max + more }], ..limit() };
            let bed = Bed::new(Way::Pool, Act::Silence, &limit);
            let open = bed.ask(&body(r#","max_tokens":100"#)).await.expect("let in");
            let refused = unread(&bed, Uses::ByPlugin).await.err();
            let expected = (unit == Unit::Requests && more == 0).then_some((429, true));
            let told = refused.map(|failure| (failure.status(), failure.refusal.is_some()));
            assert_eq!(told, expected, "{unit:?} with room for {more}");
            drop(open);
        }
    }
}

/// A chat that a plugin asks for within a request needs no place in flight of its own, and counts in all else.
#[tokio::test]
async fn a_chat_of_a_plugin_takes_no_place_in_flight() {
    let in_flight = Measure { unit: Unit::InFlight, span: Span::Now, max: 1 };
    let measures = limit().measures.into_iter().filter(|measure| measure.unit != Unit::InFlight).chain([in_flight]);
    let bed = Bed::new(Way::Pool, Act::Silence, &Limit { measures: measures.collect(), ..limit() });
    let open = bed.ask(&body(r#","max_tokens":100"#)).await.expect("let in");
    for (by_plugin, status) in [(false, Some(429)), (true, None)] {
        let mut call = Bed::call(&body(r#","max_tokens":100"#)).await.expect("read");
        call.asked_by_plugin = by_plugin;
        let principal = Principal::default();
        let held = admit(&bed.governor, &bed.rules, &principal, &mut call, &bed.entry, false).await;
        assert_eq!(held.as_ref().err().map(Failure::status), status, "{by_plugin}");
        let [requests, tokens, .., nano_usd, in_flight] = bed.reserved();
        let [_, each, .., cost, _] = units(PROMPT, 100, 1);
        let count = 1 + u64::from(by_plugin);
        assert_eq!([requests, tokens, nano_usd, in_flight], [count, count * each, count * cost, 1], "{by_plugin}");
        drop(held);
    }
    drop(open);
}
