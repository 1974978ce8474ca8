//! Retry budget of a model: token buckets that requests fill, one for the model and one for each client key that retries.
//! The requests of one key that fail use up that key's bucket; the retries of the others are left. Pure; takes the time as
//! an argument.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use penstock_upstream::Asker;

/// Initial tokens, and the level up to which one token per second is added, so that a model with few requests can retry at all.
/// The client keys with a bucket share that second's token.
const FLOOR: f64 = 10.0;
/// Capacity of the bucket, in retries: a quiet hour does not pay for a retry storm.
const MAX: f64 = 100.0;

/// Most client keys with a bucket of their own. Beyond that the key that was seen longest ago loses its bucket.
const OWN_MAX: usize = 1024;
/// Time without a request after which a client key loses its bucket.
const IDLE: Duration = Duration::from_secs(60);
/// Interval at which idle client keys are looked for.
const SWEEP: Duration = Duration::from_secs(1);

/// Buckets of one model: a retry or hedge takes a token of the model's and one of its client key's.
#[derive(Debug)]
pub(crate) struct Budgets {
    percent: u32,
    model: Budget,
    /// Buckets of the client keys that have retried; another's begins at the model's level, or at [`FLOOR`] if that is more.
    own: HashMap<Asker, Budget>,
    /// Time at which the idle client keys were last forgotten.
    swept: Option<Instant>,
}

impl Budgets {
    /// Budgets of `percent` retries per hundred requests, and one per second.
    pub(crate) fn new(percent: u32) -> Self {
        Self { percent, model: Budget::new(percent), own: HashMap::new(), swept: None }
    }

    /// Adds what time and one request of this client key earn, up to the buckets' capacity.
    pub(crate) fn earn(&mut self, asker: Asker, now: Instant) {
        self.model.earn(now, 1);
        if self.swept.is_none_or(|swept| now.saturating_duration_since(swept) >= SWEEP) {
            self.forget_idle(now);
        }
        let count = self.own.len();
        if let Some(own) = self.own.get_mut(&asker) {
            own.earn(now, count);
        }
    }

    /// Takes one retry; false when a bucket is used up.
    pub(crate) fn spend(&mut self, asker: Asker, now: Instant) -> bool {
        if !self.own.contains_key(&asker) {
            self.make_room(now);
        }
        // What the model has saved up is there for a key that has not retried before.
        let saved = self.model.tokens.max(FLOOR);
        let first = || Budget { tokens: saved, seen: Some(now), ..Budget::new(self.percent) };
        let own = self.own.entry(asker).or_insert_with(first);
        let is_enough = own.tokens >= 1.0 && self.model.spend();
        is_enough && own.spend()
    }

    /// Forgets the client keys that have sent no request for a while: they have no share in what time adds.
    fn forget_idle(&mut self, now: Instant) {
        self.swept = Some(now);
        self.own.retain(|_, own| own.seen.is_some_and(|seen| now.saturating_duration_since(seen) < IDLE));
    }

    /// Forgets the idle client keys, and where the others are too many, the one that was seen longest ago.
    fn make_room(&mut self, now: Instant) {
        self.forget_idle(now);
        if self.own.len() < OWN_MAX {
            return;
        }
        let oldest = self.own.iter().min_by_key(|(_, own)| own.seen).map(|(asker, _)| *asker);
        if let Some(oldest) = oldest {
            self.own.remove(&oldest);
        }
    }
}

/// Token bucket of one model or client key: each retry or hedge costs a token, each request earns a share of one.
#[derive(Debug)]
struct Budget {
    /// Tokens that one request earns (percent / 100).
    share: f64,
    tokens: f64,
    seen: Option<Instant>,
}

impl Budget {
    /// A budget of `percent` retries per hundred requests, and one per second.
    fn new(percent: u32) -> Self {
        Self { share: f64::from(percent) / 100.0, tokens: FLOOR, seen: None }
    }

    /// Adds what time, shared with other buckets, and one request earn to the bucket, up to its capacity.
    fn earn(&mut self, now: Instant, shared: usize) {
        let seen = self.seen.replace(now).unwrap_or(now);
        let idle = now.saturating_duration_since(seen).as_secs_f64();
        if self.tokens < FLOOR {
            self.tokens = (self.tokens + idle / shared.max(1) as f64).min(FLOOR);
        }
        self.tokens = (self.tokens + self.share).min(MAX);
    }

    /// Takes one retry; false when the bucket is used up.
    fn spend(&mut self) -> bool {
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
                budget.earn(now, 1);
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
    fn a_key_whose_requests_all_fail_leaves_the_others_their_retries() {
        let (mut budgets, start) = (Budgets::new(20), Instant::now());
        let (fails, other) = (Asker::new("fails", None), Asker::new("other", None));
        let (mut taken, mut left) = (0, 0);
        for at in 0..1000 {
            let now = start + Duration::from_millis(at * 10);
            budgets.earn(fails, now);
            taken += usize::from(budgets.spend(fails, now));
            // One of ten requests of the other key fails.
            budgets.earn(other, now);
            left += usize::from(at % 10 == 0 && budgets.spend(other, now));
        }
        assert_eq!(left, 100);
        assert!((205..=225).contains(&taken), "a fifth of its own requests, and the floor: {taken}");
    }

    /// Whatever two keys whose requests all fail do, at whatever budget, slow others have their retries.
    #[test]
    fn keys_whose_requests_all_fail_share_what_time_adds() {
        for percent in [0, 20] {
            let (mut budgets, start) = (Budgets::new(percent), Instant::now());
            let [one, two, other] = ["one", "two", "other"].map(|key| Asker::new(key, None));
            let (mut asked, mut left) = (0, 0);
            for ms in (0..200_000).step_by(100) {
                let now = start + Duration::from_millis(ms);
                for fails in [one, two] {
                    budgets.earn(fails, now);
                    budgets.spend(fails, now);
                }
                // A request a second, of which one in ten fails.
                if ms % 1000 == 0 {
                    budgets.earn(other, now);
                }
                // Until its bucket has been there for a while, what the two have saved up may go first.
                if ms % 10_000 == 0 && budgets.spend(other, now) | (ms < 60_000) {
                    left += 1;
                }
                asked += usize::from(ms % 10_000 == 0);
            }
            assert_eq!(left, asked, "{percent}");
        }
    }

    /// Keys that were there in an outage and have gone take nothing from one that is still there.
    #[test]
    fn who_has_gone_has_no_share_in_what_time_adds() {
        let (mut budgets, start) = (Budgets::new(0), Instant::now());
        for key in 0..500 {
            let asker = Asker::new(&key.to_string(), None);
            budgets.earn(asker, start);
            budgets.spend(asker, start);
        }
        let (later, stays) = (start + 2 * IDLE, Asker::new("7", None));
        let mut taken = 0;
        for second in 0..100 {
            let now = later + Duration::from_secs(second);
            budgets.earn(stays, now);
            taken += usize::from(budgets.spend(stays, now));
        }
        assert!(taken >= 99, "one per second: {taken}");
    }

    #[test]
    fn a_key_alone_has_what_the_model_has_saved() {
        let (mut budgets, now, alone) = (Budgets::new(100), Instant::now(), Asker::new("alone", None));
        (0..1000).for_each(|_| budgets.earn(alone, now));
        assert_eq!((0..1000).filter(|_| budgets.spend(alone, now)).count(), MAX as usize);
    }

    #[test]
    fn the_keys_with_a_bucket_are_bounded() {
        let (mut budgets, start) = (Budgets::new(20), Instant::now());
        for key in 0..2 * OWN_MAX as u64 {
            let now = start + Duration::from_millis(key);
            budgets.spend(Asker::new(&key.to_string(), None), now);
        }
        assert_eq!(budgets.own.len(), OWN_MAX);
        assert!(!budgets.own.contains_key(&Asker::new("0", None)));
        budgets.spend(Asker::new("later", None), start + 2 * IDLE);
        assert_eq!(budgets.own.len(), 1, "those that send nothing are forgotten");
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
        (0..10_000).for_each(|_| budget.earn(now, 1));
        assert_eq!((0..10_000).filter(|_| budget.spend()).count(), 100);
    }
}
