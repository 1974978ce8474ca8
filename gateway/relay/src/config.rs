//! Rules of the models with targets of their own (`[[models]]`).

use std::time::Duration;

use penstock_govern::prices::{Price, Prices};
use penstock_provider::ProviderConfig;

use super::{Policy, Reason};

/// Part of a config that the relay is made of.
#[derive(Clone, Copy, Debug)]
pub struct RelayConfig<'a> {
    /// Models with targets of their own, in the order of the file.
    pub models: &'a [ModelConfig],
    /// Price table for the models of providers.
    pub prices: &'a Prices,
    /// Providers, whose models are also served under their own names.
    pub providers: &'a [ProviderConfig],
    /// Send the target and the number of attempts with every relayed answer.
    pub explain: bool,
}

/// Most targets of one model, fallback included; the relay keeps the tried ones in a bit set of this size.
pub const TARGETS_MAX: usize = 32;

/// One `[[models]]` entry: a model name with its targets and rules.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Name by which requests ask for the model.
    pub name: String,
    /// Further names, which `/v1/models` does not list.
    pub aliases: Vec<String>,
    /// Targets that share the requests, each with its weight.
    pub to: Vec<(TargetConfig, u32)>,
    /// Targets that are asked when all of `to` failed, in order.
    pub fallback: Vec<TargetConfig>,
    /// Reasons of failure for which the targets of `fallback` are asked.
    pub fallback_on: Vec<Reason>,
    /// Load balancing policy among the targets of `to`.
    pub policy: Policy,
    /// Affinity: the attribute by which requests stay at one target.
    pub sticky: Sticky,
    /// Further attempts within `to` after the first, before the fallback.
    pub retries: u32,
    /// Retry budget: retries and hedges per hundred requests.
    pub retry_budget_percent: u32,
    /// Hedge delay: time without a first event after which a second target is asked too.
    pub hedge_after: Option<Duration>,
    /// Time limit to the first event of a streamed attempt.
    pub first_token_timeout: Option<Duration>,
    /// Longest silence of an answer that has begun; `None`: the target's own limits.
    pub idle_timeout: Option<Duration>,
    /// Time limit of all attempts and the whole answer; `None`: the server's limit.
    pub timeout: Option<Duration>,
    /// Target that gets copies of requests, and their share; `None`: no mirror.
    pub mirror: Option<MirrorConfig>,
    /// Longest sequence in tokens, as `/v1/models` reports it; 0: the shortest of `to`.
    pub context_tokens: u32,
    /// Price of the model; `None`: that of the price table.
    pub price: Option<Price>,
}

/// Target that a model's requests can go to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TargetConfig {
    /// Pool of local or connected workers, by its id.
    Pool(String),
    /// Provider's id, with the model's name at that provider.
    Provider(String, String),
}

impl TargetConfig {
    /// Id in headers, logs and metrics: `POOL` or `PROVIDER/MODEL`.
    pub fn id(&self) -> String {
        match self {
            TargetConfig::Pool(id) => id.clone(),
            TargetConfig::Provider(id, model) => format!("{id}/{model}"),
        }
    }
}

/// Attribute by which requests keep going to one target while it is healthy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sticky {
    /// No affinity: the policy alone chooses.
    None,
    /// Requests with the same API key go to the same target.
    Key,
    /// Requests that name the same user go to the same target.
    User,
    /// Requests with the same value of this header go to the same target.
    Header(http::HeaderName),
}

/// Mirror of a model: a target that gets copies of requests, whose answers are discarded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorConfig {
    /// Target that the copies are sent to.
    pub target: TargetConfig,
    /// Number of copies per hundred requests.
    pub percent: u32,
}
