//! Estimate of a call's use, made before the call is sent on.

use penstock_govern::{Learned, Reserve, Unit};
use penstock_types::{ServiceTier, Surface};

use penstock_relay::bill;
use penstock_relay::models::Entry;
use penstock_types::ask::Variant;
use penstock_upstream::Measured;
use penstock_upstream::call::Call;

/// Default output bound of OpenAI's completions API, in tokens.
const COMPLETION_TOKENS: u64 = 16;

/// Estimated use of a call, with a likely value and an upper bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Guess {
    /// True if a limit counts tokens or money of the call, so that they were estimated.
    pub(super) metered: bool,
    /// Bytes of the prompt that the estimate is based on.
    pub(super) body_bytes: u64,
    likely: Parts,
    most: Parts,
    /// True if the prompt's tokens were counted, not estimated.
    pub(super) counted: bool,
    /// True if the client or a limit bounds the output.
    pub(super) bounded: bool,
    /// True if every server obeys the output bound, so that it is an upper bound in fact.
    pub(super) obeyed: bool,
    /// Number of answers that the call asks for: choices times prompts.
    pub(super) choices: u64,
    /// Amount to hold: the upper bound if any limit reserves that, else the likely value.
    pub(super) reserve: Reserve,
    /// Service tier that the call asks for, which decides the price.
    pub(super) tier: ServiceTier,
}

/// Service tier that a call asks for; our own pools have only the standard one.
pub(super) fn tier_of(call: &Call, entry: &Entry) -> ServiceTier {
    entry.billing.tier(call.peek.service_tier)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Parts {
    input: u64,
    output: u64,
    nano_usd: u64,
}

impl Guess {
    pub(super) fn of(call: &Call, entry: &Entry, learned: &Learned, measured: Option<Measured>) -> Self {
        let body_bytes = call.prompt_bytes();
        let choices = u64::from(call.peek.choices.max(1)) * u64::from(call.peek.prompts.max(1));
        let bound = call.output_bound();
        let each = match (call.ask.surface, bound) {
            (
                Surface::Embeddings
                | Surface::Embed
                | Surface::OllamaEmbed
                | Surface::Rerank
                | Surface::Score
                | Surface::CountTokens,
                _,
            ) => 0,
            _ if call.ask.variant == Variant::Count => 0,
            (_, Some(bound)) => u64::from(bound),
            (Surface::Completions, None) => COMPLETION_TOKENS,
            (_, None) => learned.output_tokens(),
        };
        let likely = each.saturating_mul(choices);
        let (likely, most) = match measured {
            // A pool has planned the output: the bound, or the rest of the context if that is less, for every choice.
            Some(Measured { completion_tokens_max: most, .. }) if bound.is_some() => (most, most),
            Some(Measured { completion_tokens_max: most, .. }) => (likely.min(most), most),
            None => (likely, likely),
        };
        let counted = measured.map(|measured| measured.prompt_tokens);
        let billing = &entry.billing;
        let tier = tier_of(call, entry);
        let price = |input: u64, output: u64, attempts: u64| {
            // Our own pools bill only their answers.
            let attempts = if billing.own { 1 } else { attempts };
            let price = billing.dearest.as_ref();
            price.map_or(0, |price| {
                let price = &price.at(tier);
                let extra = bill::nano_at_most(price, input, 0).saturating_mul(attempts.saturating_sub(1));
                bill::nano_at_most(price, input, output).saturating_add(extra)
            })
        };
        let parts =
            |input: u64, output: u64, attempts: u64| Parts { input, output, nano_usd: price(input, output, attempts) };
        Self {
            metered: true,
            body_bytes,
            likely: parts(
                counted.unwrap_or_else(|| learned.prompt_tokens(body_bytes)),
                likely,
                1 + u64::from(billing.hedged),
            ),
            most: parts(counted.unwrap_or(body_bytes), most, billing.attempts_max),
            counted: counted.is_some(),
            bounded: bound.is_some(),
            obeyed: call.is_bound_obeyed(),
            choices,
            reserve: Reserve::Likely,
            tier,
        }
    }

    /// Estimate of a call whose tokens and money no limit counts.
    pub(super) fn unguessed(call: &Call, entry: &Entry) -> Self {
        let choices = u64::from(call.peek.choices.max(1)) * u64::from(call.peek.prompts.max(1));
        Self { body_bytes: call.prompt_bytes(), choices, tier: tier_of(call, entry), ..Self::default() }
    }

    /// Amount of `unit` to hold for the call under this reserve.
    pub(super) fn of_unit(&self, unit: Unit, reserve: Reserve) -> u64 {
        let parts = if reserve == Reserve::Most { &self.most } else { &self.likely };
        match unit {
            Unit::Requests | Unit::InFlight => 1,
            Unit::Tokens => parts.input + parts.output,
            Unit::InputTokens => parts.input,
            Unit::OutputTokens => parts.output,
            Unit::NanoUsd => parts.nano_usd,
        }
    }

    /// Amount of a unit that is held: by the strictest reserve of the limits.
    pub(super) fn held(&self, unit: Unit) -> u64 {
        self.of_unit(unit, self.reserve)
    }

    /// Likely prompt tokens of the call, all prompts together.
    pub(super) fn input(&self) -> u64 {
        self.likely.input
    }

    /// Likely output tokens of the call, all answers together.
    pub(super) fn output(&self) -> u64 {
        self.likely.output
    }
}
