//! What a model's requests may cost, whoever of its targets answers.

use std::sync::Arc;

use penstock_dialects::ServiceTier;

use crate::prices::{Price, Tiers};
use crate::upstream::{Attempt, Course, Facts};

/// Billionths in a dollar.
const NANO: f64 = 1e9;

/// What is known of a model's targets before any is asked.
#[derive(Clone, Debug, Default)]
pub(crate) struct Billing {
    /// Providers that requests go to at first: those of `to`. A fallback's counts only what it has answered.
    pub(crate) providers: Vec<Arc<str>>,
    /// Prices of targets, by id.
    pub(crate) targets: Vec<(Arc<str>, Option<Price>)>,
    /// Each part at the dearest target; `None`: none has a price.
    pub(crate) dearest: Option<Price>,
    /// A target of somebody else's has no price.
    pub(crate) unpriced: bool,
    /// Only our own pools answer: they bill nothing but what they have answered.
    pub(crate) own: bool,
    /// A second target may be asked beside the first.
    pub(crate) hedged: bool,
    /// How many may be asked for one request.
    pub(crate) attempts_max: u64,
}

impl Billing {
    /// One target, which is asked once.
    pub(crate) fn single(provider: Option<&str>, price: Option<Price>) -> Self {
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

    /// Several.
    pub(crate) fn several(
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

    /// What attempts that may have been billed without an answer cost at most: their prompts.
    pub(crate) fn abandoned_nano(&self, course: &Course, prompt_tokens: u64, tier: ServiceTier) -> u64 {
        if self.own {
            return 0;
        }
        let billed = course.attempts.iter().filter(|attempt| may_bill(attempt));
        let prices = billed.filter_map(|attempt| self.price_of(&attempt.target));
        prices.map(|price| nano(&price.at(tier), prompt_tokens, 0, 0, 0)).sum()
    }

    pub(super) fn price_of(&self, target: &str) -> Option<Price> {
        let found = self.targets.iter().find(|(id, _)| **id == *target);
        found.map_or(self.dearest, |(_, price)| *price)
    }
}

/// Outcomes of attempts that were at work when they were given up.
const MAY_BILL: [&str; 3] = ["timeout", "abandoned", "overtaken"];

/// Whether an attempt had the prompt when it was given up.
pub(super) fn may_bill(attempt: &Attempt) -> bool {
    attempt.sent && MAY_BILL.contains(&attempt.outcome)
}

fn dearer(one: Price, other: Price) -> Price {
    Price {
        input: one.input.max(other.input),
        cached_input: one.cached_input.max(other.cached_input),
        cache_write: one.cache_write.max(other.cache_write),
        output: one.output.max(other.output),
        // What is not known of one of them is not known of the dearest.
        tiers: Tiers {
            flex: if one.tiers.flex.min(other.tiers.flex) > 0.0 { one.tiers.flex.max(other.tiers.flex) } else { 0.0 },
            priority: match one.tiers.priority.min(other.tiers.priority) > 0.0 {
                true => one.tiers.priority.max(other.tiers.priority),
                false => 0.0,
            },
        },
    }
}

/// Billionths of a dollar, rounded up.
pub(super) fn nano(price: &Price, prompt: u64, cached: u64, written: u64, completion: u64) -> u64 {
    (price.usd(prompt, cached, written, completion) * NANO).ceil() as u64
}

/// The same of an answer, in the tier that it says, or else the one that was asked for.
pub(super) fn nano_of(price: &Price, facts: &Facts, asked: ServiceTier) -> u64 {
    let price = &price.at(facts.tier.unwrap_or(asked));
    nano(price, facts.prompt_tokens, facts.cached_tokens, facts.cache_write_tokens, facts.completion_tokens)
}

/// At most, whatever the cache does.
pub(super) fn nano_at_most(price: &Price, prompt: u64, completion: u64) -> u64 {
    let input = price.input.max(price.cache_write).max(price.cached_input);
    nano(&Price { input, ..*price }, prompt, 0, 0, completion)
}
