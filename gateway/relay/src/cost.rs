//! Price of an answer for the client: a header field of a whole answer, an SSE comment behind the end of a stream.

use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use penstock_types::{ChatEvent, ServiceTier};

use penstock_base::error::Failure;
use penstock_govern::prices::Price;
use penstock_upstream::{Course, Events, Facts};

/// Header field `x-penstock-cost`. In a request `1` asks for the cost; in an answer it holds dollars.
const COST: HeaderName = HeaderName::from_static("x-penstock-cost");

/// Returns true if a request asks for the cost of its answer (`x-penstock-cost: 1`).
pub fn is_asked(headers: &HeaderMap) -> bool {
    headers.get(COST).is_some_and(|value| value.as_bytes() == b"1")
}

/// Cost of an answer in dollars, rounded to the billionth; `None` where no tokens were counted. `asked`: the service tier
/// that the request asks for, which counts where the answer names none.
pub fn cost(facts: Facts, price: Price, asked: ServiceTier) -> Option<f64> {
    let Facts { prompt_tokens, cached_tokens, cache_write_tokens, completion_tokens, .. } = facts;
    let usd =
        price.at(facts.tier.unwrap_or(asked)).usd(prompt_tokens, cached_tokens, cache_write_tokens, completion_tokens);
    facts.is_known().then(|| (usd * 1e9).round() / 1e9)
}

/// Events of an answer with the price added at the end, as a header field or an SSE comment.
pub struct Priced {
    events: Box<dyn Events>,
    price: Option<Price>,
    asked: ServiceTier,
    stream: bool,
    /// Price in dollars with nine decimals, known at the end.
    usd: Option<String>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl Priced {
    /// Wraps these events; `price` applies where they do not know their own, `asked` where the answer names no service tier.
    pub fn new(events: Box<dyn Events>, price: Option<Price>, asked: ServiceTier, stream: bool) -> Self {
        Self { events, price, asked, stream, usd: None, headers: Vec::new() }
    }

    fn end(&mut self) {
        let price = self.events.course().price.or(self.price);
        self.usd = price.and_then(|price| cost(self.events.facts(), price, self.asked)).map(|usd| format!("{usd:.9}"));
        self.headers = self.events.headers().to_vec();
        let value = self.usd.as_ref().and_then(|usd| HeaderValue::from_str(usd).ok());
        self.headers.extend(value.map(|value| (COST, value)));
    }
}

impl Events for Priced {
    fn poll_events(&mut self, context: &mut Context<'_>, out: &mut Vec<ChatEvent>) -> Poll<Result<bool, Failure>> {
        let polled = self.events.poll_events(context, out);
        if let Poll::Ready(Ok(false)) = polled {
            self.end();
        }
        polled
    }

    fn facts(&self) -> Facts {
        self.events.facts()
    }

    fn facts_at_end(&self) -> Facts {
        self.events.facts_at_end()
    }

    fn score(&self, choice: u32) -> Option<f32> {
        self.events.score(choice)
    }

    fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        match &self.usd {
            Some(_) if !self.stream => &self.headers,
            _ => self.events.headers(),
        }
    }

    fn course(&self) -> Course {
        self.events.course()
    }

    fn epilogue(&self) -> Option<Bytes> {
        self.usd.as_ref().filter(|_| self.stream).map(|usd| format!(": {COST}: {usd}\n\n").into())
    }
}

#[cfg(test)]
mod tests {
    use penstock_govern::prices::Tiers;

    use super::*;
    use crate::bill;

    /// The cost that a client reads is the amount that limits charge.
    #[track_caller]
    fn check(answered: Option<ServiceTier>, asked: ServiceTier, expected: f64) {
        let tiers = Tiers { flex: 0.5, priority: 2.0 };
        let price = Price { input: 1.0, cached_input: 1.0, cache_write: 1.0, output: 2.0, tiers };
        let facts = Facts { prompt_tokens: 100, completion_tokens: 50, tier: answered, ..Facts::default() };
        assert_eq!(cost(facts, price, asked), Some(expected));
        assert_eq!(bill::nano_of(&price, &facts, asked), (expected * 1e9).round() as u64);
    }

    #[test]
    fn the_tier_asked_for_counts_where_the_answer_names_none() {
        check(None, ServiceTier::Standard, 0.0002);
        check(None, ServiceTier::Priority, 0.0004);
        check(None, ServiceTier::Flex, 0.0001);
        check(Some(ServiceTier::Standard), ServiceTier::Priority, 0.0002);
        check(Some(ServiceTier::Flex), ServiceTier::Standard, 0.0001);
    }
}
