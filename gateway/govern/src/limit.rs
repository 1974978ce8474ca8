//! Configured limits: measures, the subject of each counter, and the treatment of requests without a bound of their own.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Unit in which a limit counts the use of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Number of admitted requests.
    Requests,
    /// Number of prompt and output tokens.
    Tokens,
    /// Number of prompt tokens.
    InputTokens,
    /// Number of output tokens.
    OutputTokens,
    /// Cost in billionths of a dollar (nano-dollars).
    NanoUsd,
    /// Number of requests in flight, counted until they end.
    InFlight,
}

/// Time span over which a measure sums up use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Span {
    /// No span: the level at present.
    Now,
    /// Sliding window of the last second, in slices of 50 ms.
    Second,
    /// Sliding window of the last minute, in slices of 1 s.
    Minute,
    /// Sliding window of the last hour, in slices of 1 min.
    Hour,
    /// Calendar day, UTC.
    Day,
    /// Calendar month, UTC.
    Month,
}

/// Bound on a unit in a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Measure {
    /// Unit in which use is counted.
    pub unit: Unit,
    /// Span of time over which use is summed up.
    pub span: Span,
    /// Largest amount of the unit within the span.
    pub max: u64,
}

impl Measure {
    /// Key of the config: `requests_per_minute`, `in_flight`, `usd_per_month`.
    pub fn name(&self) -> &'static str {
        NAMES.iter().find(|(unit, span, _)| (*unit, *span) == (self.unit, self.span)).map_or("in_flight", |row| row.2)
    }
}

impl Unit {
    /// Returns true if a request's amount of the unit is known only at its end.
    pub fn is_metered(self) -> bool {
        !matches!(self, Unit::Requests | Unit::InFlight)
    }

    /// An amount as text: `7 tokens`, `0.25 USD`.
    pub fn shown(self, amount: u64) -> String {
        match self {
            Unit::NanoUsd => format!("{} USD", usd(amount)),
            Unit::Requests | Unit::InFlight => format!("{amount} requests"),
            Unit::Tokens => format!("{amount} tokens"),
            Unit::InputTokens => format!("{amount} input tokens"),
            Unit::OutputTokens => format!("{amount} output tokens"),
        }
    }
}

/// Amount of nano-dollars as text in dollars, without trailing zeros.
pub fn usd(nano: u64) -> String {
    let text = format!("{}.{:09}", nano / NANO, nano % NANO);
    let text = text.trim_end_matches('0').trim_end_matches('.');
    text.to_owned()
}

/// Nano-dollars per dollar: the fixed point of costs.
pub const NANO: u64 = 1_000_000_000;

/// All measures that a limit can have, with their config keys.
#[rustfmt::skip]
pub const NAMES: &[(Unit, Span, &str)] = &[
    (Unit::Requests, Span::Second, "requests_per_second"),
    (Unit::Requests, Span::Minute, "requests_per_minute"),
    (Unit::Requests, Span::Hour, "requests_per_hour"),
    (Unit::Requests, Span::Day, "requests_per_day"),
    (Unit::Requests, Span::Month, "requests_per_month"),
    (Unit::Tokens, Span::Minute, "tokens_per_minute"),
    (Unit::Tokens, Span::Hour, "tokens_per_hour"),
    (Unit::Tokens, Span::Day, "tokens_per_day"),
    (Unit::Tokens, Span::Month, "tokens_per_month"),
    (Unit::InputTokens, Span::Minute, "input_tokens_per_minute"),
    (Unit::InputTokens, Span::Hour, "input_tokens_per_hour"),
    (Unit::InputTokens, Span::Day, "input_tokens_per_day"),
    (Unit::InputTokens, Span::Month, "input_tokens_per_month"),
    (Unit::OutputTokens, Span::Minute, "output_tokens_per_minute"),
    (Unit::OutputTokens, Span::Hour, "output_tokens_per_hour"),
    (Unit::OutputTokens, Span::Day, "output_tokens_per_day"),
    (Unit::OutputTokens, Span::Month, "output_tokens_per_month"),
    (Unit::NanoUsd, Span::Minute, "usd_per_minute"),
    (Unit::NanoUsd, Span::Hour, "usd_per_hour"),
    (Unit::NanoUsd, Span::Day, "usd_per_day"),
    (Unit::NanoUsd, Span::Month, "usd_per_month"),
    (Unit::InFlight, Span::Now, "in_flight"),
];

/// Kind of subject for which a limit keeps separate counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// Key of the client; for requests without one, their address.
    Key,
    /// One counter for each team that keys belong to.
    Team,
    /// One counter for each user that keys belong to.
    User,
    /// One counter for each model that requests ask for.
    Model,
    /// One counter for each provider that answers requests.
    Provider,
    /// Address of the client; of IPv6 its /64.
    Address,
    /// One counter for all requests that the limit applies to.
    All,
}

impl By {
    /// Every kind of subject that may have counters of its own.
    pub const ALL: [By; 7] = [By::Key, By::Team, By::User, By::Model, By::Provider, By::Address, By::All];

    /// Name of the kind as the config writes it.
    pub fn name(self) -> &'static str {
        match self {
            By::Key => "key",
            By::Team => "team",
            By::User => "user",
            By::Model => "model",
            By::Provider => "provider",
            By::Address => "address",
            By::All => "all",
        }
    }
}

impl fmt::Display for By {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

/// Requests that a limit applies to, by the way they are named in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum For {
    /// Requests whose key or team names the limit.
    #[default]
    Named,
    /// Every request, with a key or without.
    Everyone,
    /// Requests that come without a key.
    Anonymous,
}

/// Behaviour of a limit while the store that gateways share does not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnStoreFailure {
    /// Requests are admitted, counted by this gateway alone.
    #[default]
    Open,
    /// Requests under the limit are refused until the store answers.
    Closed,
}

/// Amount reserved for a use that is unknown before the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reserve {
    /// Likely use: an amount that nearly all requests to the model have stayed below.
    #[default]
    Likely,
    /// Upper bound for text: a token per byte of the prompt, every attempt that may bill.
    Most,
}

/// Behaviour towards requests whose tokens or cost cannot be known (a model without a price, audio, images), under a
/// limit that counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unmetered {
    /// Refused, or the limit could be bypassed.
    #[default]
    Refuse,
    /// Admitted, and counted as no tokens and no cost.
    Allow,
}

/// Limit as the config or the key directory describes it: measures, subjects, and the requests that it applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Name of the limit, by which keys and teams refer to it.
    pub id: Arc<str>,
    /// Measures of the limit: at least one, each unit and span once.
    pub measures: Vec<Measure>,
    /// Kind of subject (key, team, address, …) that has a counter of its own under the limit.
    pub by: By,
    /// Requests that the limit applies to.
    pub applies: For,
    /// Models that the limit covers: names, or prefixes that end in `*`. Empty: all.
    pub models: Vec<String>,
    /// Amount reserved where a request's use is unknown before its answer.
    pub reserve: Reserve,
    /// Behaviour towards requests whose tokens or cost cannot be known.
    pub unmetered: Unmetered,
    /// Behaviour while the shared store is away.
    pub on_store_failure: OnStoreFailure,
    /// Output bound in tokens for requests that name none.
    pub max_tokens_default: Option<u32>,
    /// Largest output bound in tokens; larger ones are lowered to it.
    pub max_tokens_max: Option<u32>,
    /// Bound on sudden rises of a client's requests; `None`: no such bound.
    pub surge: Option<Surge>,
}

/// Surge detection: bound on the requests of a minute for a client that usually sends fewer, for example with a stolen key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Surge {
    /// Factor on the mean minute of the last hour.
    pub times: u64,
    /// Requests per minute that are admitted in any case.
    pub above: u64,
}

impl Surge {
    /// Largest number of requests in the last minute, given those of the last hour and of the last minute. The usual
    /// rate leaves the last minute out.
    pub fn max(&self, hour: u64, minute: u64) -> u64 {
        let usual = hour.saturating_sub(minute).saturating_mul(self.times) / 59;
        usual.max(self.above)
    }
}

impl Limit {
    /// Returns true if the limit covers requests to this model.
    pub fn covers(&self, model: &str) -> bool {
        self.models.is_empty() || self.models.iter().any(|rule| crate::scope::covers(rule, model))
    }

    /// Returns true if one of the measures is of this unit.
    pub fn measures(&self, unit: Unit) -> bool {
        self.measures.iter().any(|measure| measure.unit == unit)
    }

    /// Returns true if the limit needs the tokens or the cost of a request.
    pub fn needs_tokens(&self) -> bool {
        self.measures.iter().any(|measure| measure.unit.is_metered())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dollars_have_no_zeros_at_the_end() {
        assert_eq!([usd(0), usd(NANO), usd(1_500_000_000), usd(7)], ["0", "1", "1.5", "0.000000007"]);
    }

    #[test]
    fn a_rise_is_measured_by_what_was_usual_before_it() {
        let surge = Surge { times: 10, above: 60 };
        assert_eq!((surge.max(0, 0), surge.max(60, 60)), (60, 60), "somebody new has no usual minute");
        assert_eq!(surge.max(59 * 20, 0), 200, "ten times twenty a minute");
        assert_eq!(surge.max(59 * 20 + 500, 500), 200, "the rise itself raises nothing");
        assert_eq!(Surge { times: u64::MAX, above: 0 }.max(u64::MAX, 0), u64::MAX / 59);
    }

    #[test]
    fn every_measure_has_one_name() {
        let mut names: Vec<_> =
            NAMES.iter().map(|(unit, span, _)| Measure { unit: *unit, span: *span, max: 1 }.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), NAMES.len());
    }
}
