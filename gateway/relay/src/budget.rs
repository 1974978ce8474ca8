//! Retry budget of a model: a token bucket that requests fill. Pure; takes the time as an argument.

use std::time::Instant;

/// Initial tokens, and the level up to which one token per second is added, so that a model with few requests can retry at all.
const FLOOR: f64 = 10.0;
/// Capacity of the bucket, in retries: a quiet hour does not pay for a retry storm.
const MAX: f64 = 100.0;

/// Token bucket of one model: each retry or hedge costs a token, each request earns a share of one.
#[derive(Debug)]
pub(crate) struct Budget {
    /// Tokens that one request earns (percent / 100).
    share: f64,
    tokens: f64,
    seen: Option<Instant>,
}

impl Budget {
    /// A budget of `percent` retries per hundred requests, and one per second.
    pub(crate) fn new(percent: u32) -> Self {
        Self { share: f64::from(percent) / 100.0, tokens: FLOOR, seen: None }
    }

    /// Adds what time and one request earn to the bucket, up to its capacity.
    pub(crate) fn earn(&mut self, now: Instant) {
        let seen = self.seen.replace(now).unwrap_or(now);
        let idle = now.saturating_duration_since(seen).as_secs_f64();
        if self.tokens < FLOOR {
            self.tokens = (self.tokens + idle).min(FLOOR);
        }
        self.tokens = (self.tokens + self.share).min(MAX);
    }

    /// Takes one retry; false when the budget is used up.
    pub(crate) fn spend(&mut self) -> bool {
        let enough = self.tokens >= 1.0;
        if enough {
            self.tokens -= 1.0;
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn spent(budget: &mut Budget, now: Instant, requests: usize) -> usize {
        (0..requests)
            .filter(|_| {
                budget.earn(now);
                budget.spend()
            })
            .count()
    }

    #[test]
    fn an_outage_adds_a_fifth_and_the_floor() {
        let (mut budget, now) = (Budget::new(20), Instant::now());
        let retries = spent(&mut budget, now, 1000);
        assert!((205..=210).contains(&retries), "{retries}");
    }

    #[test]
    fn few_requests_can_always_retry_and_savings_are_bounded() {
        let (mut budget, mut now) = (Budget::new(0), Instant::now());
        assert_eq!(spent(&mut budget, now, 50), 10);
        for _ in 0..100 {
            now += Duration::from_secs(1);
            assert_eq!(spent(&mut budget, now, 1), 1);
        }
        let (mut budget, now) = (Budget::new(100), Instant::now());
        (0..10_000).for_each(|_| budget.earn(now));
        assert_eq!((0..10_000).filter(|_| budget.spend()).count(), 100);
    }
}
