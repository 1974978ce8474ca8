//! Sudden rises: somebody who asks far more than is usual for it is slowed down before any budget notices.
//!
//! What is usual is what the last hour has seen without its last minute, counted by this gateway: a rise is seen where it comes in.

use penstock_govern::{Claim, Limit, Measure, Span, Unit};

use super::Governor;

/// No limit: only counted.
const COUNTED: u64 = u64::MAX >> 8;

/// What a request adds to the counters that tell a rise. A measure that the limit has by itself is made stricter instead.
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
