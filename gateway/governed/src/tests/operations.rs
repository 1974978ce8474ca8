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
    assert_eq!(bed.reserved(), [1, 0, 0, 0, 0, 1]);
    close(held, None);
    assert_eq!(bed.used(), [1, 0, 0, 0, 0, 0], "no tokens and no money");
}

/// Limits that leave nothing while a request of these amounts is open, or one more of their unit.
#[tokio::test]
async fn an_operation_of_a_plugin_is_refused_where_a_limit_is_used_up() {
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
        for (more, status) in [(0, Some(429)), (1, None)] {
            let limit = Limit { measures: vec![Measure { unit, span, max: max + more }], ..limit() };
            let bed = Bed::new(Way::Pool, Act::Silence, &limit);
            let open = bed.ask(&body(r#","max_tokens":100"#)).await.expect("let in");
            let refused = unread(&bed, Uses::ByPlugin).await.err().map(|failure| failure.status());
            assert_eq!(refused, status, "{unit:?} with room for {more}");
            drop(open);
        }
    }
}
