//! Prices of a model's requests, over all targets that may answer.

use std::sync::Arc;

use penstock_types::ServiceTier;

use penstock_govern::prices::{Price, Tiers};
use penstock_telemetry::Attempt;
use penstock_upstream::{Course, Facts};

/// Billionths per dollar: money is counted in nano-dollars.
const NANO: f64 = 1e9;

/// Prices of a model's targets, known before any is asked.
#[derive(Clone, Debug, Default)]
pub struct Billing {
    /// Providers of the targets in `to`, which limits by provider count. A fallback's provider is counted only for its answers.
    pub providers: Vec<Arc<str>>,
    /// Price of each target by the target's id; `None`: it has no price.
    pub targets: Vec<(Arc<str>, Option<Price>)>,
    /// Highest price of each part over all targets; `None`: no target has a price.
    pub dearest: Option<Price>,
    /// True if a provider's target has no price, so that its cost is unknown.
    pub unpriced: bool,
    /// True if all targets are our own pools, which bill their answers and nothing else.
    pub own: bool,
    /// True if a hedge may be sent beside the first attempt.
    pub hedged: bool,
    /// Upper bound on the attempts that one request can cause.
    pub attempts_max: u64,
}

impl Billing {
    /// Billing of a model with a single target, asked once.
    pub fn single(provider: Option<&str>, price: Option<Price>) -> Self {
        Self {
            providers: provider.into_iter().map(Arc::from).collect(),
            targets: Vec::new(),
            dearest: price,
            unpriced: provider.is_some() && price.is_none(),
            own: provider.is_none(),
            hedged: false,
            attempts_max: 1,
        }
    }

    /// Billing of several targets: (id, price, whether it is our own pool).
    pub fn several(
        providers: Vec<Arc<str>>,
        targets: Vec<(Arc<str>, Option<Price>, bool)>,
        attempts_max: u64,
        hedged: bool,
    ) -> Self {
        let dearest = targets.iter().filter_map(|(_, price, _)| *price).reduce(dearer);
        Self {
            providers,
            dearest,
            unpriced: targets.iter().any(|(_, price, own)| price.is_none() && !own),
            own: targets.iter().all(|(_, _, own)| *own),
            hedged,
            attempts_max,
            targets: targets.into_iter().map(|(id, price, _)| (id, price)).collect(),
        }
    }

    /// Upper bound, in nano-dollars, of attempts that may be billed without an answer: the price of their prompts.
    pub fn abandoned_nano(&self, course: &Course, prompt_tokens: u64, tier: ServiceTier) -> u64 {
        if self.own {
            return 0;
        }
        let billed = course.attempts.iter().filter(|attempt| may_bill(attempt));
        let prices = billed.filter_map(|attempt| self.price_of(&attempt.target));
        prices.map(|price| nano(&price.at(tier), prompt_tokens, 0, 0, 0)).sum()
    }

    /// Service tier of a request that asks for this one; our own pools have only the standard one.
    pub fn tier(&self, asked: ServiceTier) -> ServiceTier {
        if self.own { ServiceTier::Standard } else { asked }
    }

    /// Price of an answer by the target with this id; the dearest price for a target that the model has no more.
    pub fn price_of(&self, target: &str) -> Option<Price> {
        let found = self.targets.iter().find(|(id, _)| **id == *target);
        found.map_or(self.dearest, |(_, price)| *price)
    }
}

/// Outcome of an attempt whose answer was made and found no room in this gateway.
pub(crate) const UNHELD: &str = "unheld";

/// Outcomes of attempts that were given up while the target worked on them, or whose answers found no room.
const MAY_BILL: [&str; 4] = ["timeout", "abandoned", "overtaken", UNHELD];

/// Outcomes of attempts whose answers had begun.
const ANSWERED: [&str; 2] = ["answered", "broke"];

/// Returns true if an attempt had received the prompt when it was given up, or its answer found no room.
pub fn may_bill(attempt: &Attempt) -> bool {
    attempt.sent && MAY_BILL.contains(&attempt.outcome)
}

/// Returns true if an attempt's answer had begun, so that the target has computed the prompt.
pub fn has_begun(attempt: &Attempt) -> bool {
    ANSWERED.contains(&attempt.outcome)
}

fn dearer(one: Price, other: Price) -> Price {
    Price {
        input: one.input.max(other.input),
        cached_input: one.cached_input.max(other.cached_input),
        cache_write: one.cache_write.max(other.cache_write),
        output: one.output.max(other.output),
        // A factor unknown for one target is unknown for the dearest.
        tiers: Tiers {
            flex: if one.tiers.flex.min(other.tiers.flex) > 0.0 { one.tiers.flex.max(other.tiers.flex) } else { 0.0 },
            priority: match one.tiers.priority.min(other.tiers.priority) > 0.0 {
                true => one.tiers.priority.max(other.tiers.priority),
                false => 0.0,
            },
        },
    }
}

/// Price of these token counts in nano-dollars, rounded up.
pub fn nano(price: &Price, prompt: u64, cached: u64, written: u64, completion: u64) -> u64 {
    (price.usd(prompt, cached, written, completion) * NANO).ceil() as u64
}

/// Price of an answer in nano-dollars, in the service tier that the answer names or else in the one asked for.
pub fn nano_of(price: &Price, facts: &Facts, asked: ServiceTier) -> u64 {
    let price = &price.at(facts.tier.unwrap_or(asked));
    nano(price, facts.prompt_tokens, facts.cached_tokens, facts.cache_write_tokens, facts.completion_tokens)
}

/// Upper bound of a price in nano-dollars, with every prompt token at its dearest cache rate.
pub fn nano_at_most(price: &Price, prompt: u64, completion: u64) -> u64 {
    let input = price.input.max(price.cache_write).max(price.cached_input);
    nano(&Price { input, ..*price }, prompt, 0, 0, completion)
}
