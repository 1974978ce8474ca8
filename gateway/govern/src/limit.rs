//! What a limit says: measures, whom each counter belongs to, and what it does with requests that name no bound of their own.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Requests that were let in.
    Requests,
    /// Prompt and output tokens.
    Tokens,
    /// Prompt tokens.
    InputTokens,
    /// Output tokens.
    OutputTokens,
    /// Billionths of a dollar.
    NanoUsd,
    /// Requests at once.
    InFlight,
}

/// In which time it is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Span {
    /// What is there at this moment.
    Now,
    /// Any second.
    Second,
    /// Any minute.
    Minute,
    /// Any hour.
    Hour,
    /// A day of the calendar, UTC.
    Day,
    /// A month of the calendar, UTC.
    Month,
}

/// So much of a unit in a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Measure {
    /// What is counted.
    pub unit: Unit,
    /// In which time.
    pub span: Span,
    /// How much of it there may be.
    pub max: u64,
}

impl Measure {
    /// Key of the config: `requests_per_minute`, `in_flight`, `usd_per_month`.
    pub fn name(&self) -> &'static str {
        NAMES.iter().find(|(unit, span, _)| (*unit, *span) == (self.unit, self.span)).map_or("in_flight", |row| row.2)
    }
}

impl Unit {
    /// Whether how much of it a request uses is known when it has ended.
    pub fn is_metered(self) -> bool {
        !matches!(self, Unit::Requests | Unit::InFlight)
    }

    /// An amount in words: `7 tokens`, `0.25 USD`.
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

/// Billionths of a dollar as dollars, without zeros at the end.
pub fn usd(nano: u64) -> String {
    let text = format!("{}.{:09}", nano / NANO, nano % NANO);
    let text = text.trim_end_matches('0').trim_end_matches('.');
    text.to_owned()
}

/// Parts of a dollar.
pub const NANO: u64 = 1_000_000_000;

/// Every measure that a limit can have, by the key that says it.
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

/// What has a counter of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// Each key; requests without one by their address.
    Key,
    /// Each team.
    Team,
    /// Each user.
    User,
    /// Each model.
    Model,
    /// Each provider.
    Provider,
    /// Each address; of IPv6 each /64.
    Address,
    /// Everything together.
    All,
}

impl By {
    /// All of them.
    pub const ALL: [By; 7] = [By::Key, By::Team, By::User, By::Model, By::Provider, By::Address, By::All];

    /// As it is written.
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

/// Whom a limit is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum For {
    /// Who names it.
    #[default]
    Named,
    /// Every request.
    Everyone,
    /// Requests without a key.
    Anonymous,
}

/// What happens to requests while the store that several gateways share does not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnStoreFailure {
    /// They are let in, counted by this gateway alone.
    #[default]
    Open,
    /// They are refused.
    Closed,
}

/// How much is reserved for what is not known before the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reserve {
    /// What nearly all requests to the model have needed.
    #[default]
    Likely,
    /// What no request in text can exceed: a token for every byte, every attempt that may bill.
    Most,
}

/// What happens to requests whose tokens or cost nobody can know, under a limit that counts them: a model without a price, audio, images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unmetered {
    /// They are refused: else the limit could be walked around.
    #[default]
    Refuse,
    /// They are let in, and count as nothing.
    Allow,
}

/// A limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Its name.
    pub id: Arc<str>,
    /// What it measures; at least one, each unit and span once.
    pub measures: Vec<Measure>,
    /// What has a counter of its own.
    pub by: By,
    /// Whom it is for.
    pub applies: For,
    /// Only for these: names, or prefixes that end in `*`. Empty: all.
    pub models: Vec<String>,
    /// How unknown usage is reserved.
    pub reserve: Reserve,
    /// What cannot be counted.
    pub unmetered: Unmetered,
    /// While the shared store is away.
    pub on_store_failure: OnStoreFailure,
    /// Output tokens for requests that name no bound.
    pub max_tokens_default: Option<u32>,
    /// Bound that larger ones are lowered to.
    pub max_tokens_max: Option<u32>,
    /// How sudden a rise may be.
    pub surge: Option<Surge>,
}

/// How many requests a minute may bring to somebody who usually brings fewer: whoever has got hold of a key asks all at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Surge {
    /// So many times the mean minute of the last hour.
    pub times: u64,
    /// So many are always let in.
    pub above: u64,
}

impl Surge {
    /// Requests that the last minute may have had, by those of the last hour and of the last minute. The minute itself is not usual.
    pub fn max(&self, hour: u64, minute: u64) -> u64 {
        let usual = hour.saturating_sub(minute).saturating_mul(self.times) / 59;
        usual.max(self.above)
    }
}

impl Limit {
    /// Whether it counts requests to that model.
    pub fn covers(&self, model: &str) -> bool {
        self.models.is_empty() || self.models.iter().any(|rule| crate::scope::covers(rule, model))
    }

    /// Whether one of its measures is of that unit.
    pub fn measures(&self, unit: Unit) -> bool {
        self.measures.iter().any(|measure| measure.unit == unit)
    }

    /// Whether it needs to know how many tokens a request has.
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
