//! Surge detection: a client that sends far more requests than usual is slowed down before a budget is used up.
//!
//! The usual rate is the last hour's without its last minute, counted by this gateway alone: a surge is detected where it arrives.

use penstock_govern::{Claim, Limit, Measure, Span, Unit};

use super::Governor;

/// Bound of a measure that is counted and never refuses.
const COUNTED: u64 = u64::MAX >> 8;

/// Adds the counters of the surge detection to a request's claims in this gateway's own book. A measure that the limit has itself gets
/// the stricter bound, since the book counts each measure of a limit once.
pub(super) fn add<'a>(governor: &Governor, limit: &'a Limit, subject: &'a str, claims: &mut Vec<Claim<'a>>, tag: u16) {
    let Some(surge) = limit.surge else { return };
    let measure = |span| Measure { unit: Unit::Requests, span, max: COUNTED };
    let used = |span| governor.standing(&limit.id, subject, measure(span)).used;
    let max = surge.max(used(Span::Hour), used(Span::Minute));
    for (span, max) in [(Span::Hour, COUNTED), (Span::Minute, max)] {
        let have = claims.iter_mut().find(|claim| {
            claim.limit == &limit.id
                && claim.subject == subject
                && (claim.measure.unit, claim.measure.span) == (Unit::Requests, span)
        });
        match have {
            Some(claim) => claim.measure.max = claim.measure.max.min(max),
            None => claims.push(Claim {
                limit: &limit.id,
                subject,
                measure: Measure { max, ..measure(span) },
                amount: 1,
                tag,
            }),
        }
    }
}
