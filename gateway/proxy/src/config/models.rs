//! `[[models]]`: model names in requests, and the targets that answer them.

use std::time::Duration;

use super::raw::{Document, Reader};
use crate::relay::{Policy, Reason};
use penstock_govern::prices::{Price, Prices, Tiers};

/// Most targets of one model, fallback included; the relay keeps the tried ones in a bit set of this size.
pub(crate) const TARGETS_MAX: usize = 32;

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

/// Reads all `[[models]]` tables in the order of the file.
pub(super) fn read(document: &Document<'_>) -> Vec<ModelConfig> {
    document.tables("models").iter().filter_map(model).collect()
}

fn model(table: &Reader<'_, '_>) -> Option<ModelConfig> {
    let name = table.text("name");
    if name.is_none() {
        table.fault("name", "is missing");
    }
    let own = name.clone().unwrap_or_default();
    let to: Vec<_> = table
        .inline("to", &["pool", "provider", "model", "weight"])
        .iter()
        .filter_map(|item| Some((target(item, &own)?, item.number_or("weight", 1..=1_000_000, 1) as u32)))
        .collect();
    if to.is_empty() {
        table.fault("to", "is missing: { pool = \"ID\" } or { provider = \"ID\", model = \"NAME\" }");
    }
    let fallback: Vec<_> =
        table.inline("fallback", &["pool", "provider", "model"]).iter().filter_map(|item| target(item, &own)).collect();
    if to.len() + fallback.len() > TARGETS_MAX {
        table.fault("to", format!("at most {TARGETS_MAX} targets, fallback included"));
    }
    let limit = |name| Some(Duration::from_millis(table.number(name, 0..=86_400_000))).filter(|time| !time.is_zero());
    Some(ModelConfig {
        aliases: table.texts("aliases"),
        to,
        fallback,
        fallback_on: reasons(table),
        policy: policy(table),
        sticky: sticky(table),
        retries: table.number("retries", 0..=10) as u32,
        retry_budget_percent: table.number("retry_budget_percent", 0..=100) as u32,
        hedge_after: limit("hedge_after_ms"),
        first_token_timeout: limit("first_token_timeout_ms"),
        idle_timeout: limit("idle_timeout_ms"),
        timeout: limit("timeout_ms"),
        mirror: mirror(table, &own),
        context_tokens: table.number("context_tokens", 0..=1 << 24) as u32,
        price: price(table),
        name: name?,
    })
}

fn target(item: &Reader<'_, '_>, own: &str) -> Option<TargetConfig> {
    match (item.text("pool"), item.text("provider"), item.text("model")) {
        (Some(pool), None, None) => return Some(TargetConfig::Pool(pool)),
        (None, Some(provider), model) => {
            return Some(TargetConfig::Provider(provider, model.unwrap_or_else(|| own.to_owned())));
        }
        (Some(_), None, Some(_)) => item.fault("model", "goes with provider; a pool has one model"),
        _ => item.fault("pool", "exactly one of pool and provider is needed"),
    }
    None
}

fn reasons(table: &Reader<'_, '_>) -> Vec<Reason> {
    let mut out = Vec::new();
    for name in table.texts("fallback_on") {
        match Reason::ALL.into_iter().find(|reason| reason.name() == name) {
            Some(reason) => out.push(reason),
            None => {
                let known = Reason::ALL.map(Reason::name).join(", ");
                table.fault("fallback_on", format!("{name:?} is not one of {known}"));
            }
        }
    }
    out
}

fn policy(table: &Reader<'_, '_>) -> Policy {
    match table.text("policy").unwrap_or_default().as_str() {
        "weighted" => Policy::Weighted,
        "order" => Policy::Order,
        "least_busy" => Policy::LeastBusy,
        "latency" => Policy::Latency,
        "cost" => Policy::Cost,
        "cache_aware" => Policy::CacheAware,
        other => {
            table.fault(
                "policy",
                format!("{other:?} is not one of weighted, order, least_busy, latency, cost, cache_aware"),
            );
            Policy::Weighted
        }
    }
}

fn sticky(table: &Reader<'_, '_>) -> Sticky {
    let text = table.text("sticky").unwrap_or_default();
    match (text.as_str(), text.strip_prefix("header:").map(str::parse)) {
        ("none", _) => return Sticky::None,
        ("key", _) => return Sticky::Key,
        ("user", _) => return Sticky::User,
        (_, Some(Ok(name))) => return Sticky::Header(name),
        (other, _) => table.fault("sticky", format!("{other:?} is not one of none, key, user, header:NAME")),
    }
    Sticky::None
}

fn mirror(table: &Reader<'_, '_>, own: &str) -> Option<MirrorConfig> {
    let item = table.inline_one("mirror", &["pool", "provider", "model", "percent"])?;
    let percent = item.number_or("percent", 1..=100, 100) as u32;
    Some(MirrorConfig { target: target(&item, own)?, percent })
}

fn price(table: &Reader<'_, '_>) -> Option<Price> {
    let item = table.inline_one("price", &["input", "cached_input", "cache_write", "output", "flex", "priority"])?;
    let (Some(input), Some(output)) = (item.decimal("input"), item.decimal("output")) else {
        item.fault("input", "input and output are both needed, in dollars per million tokens");
        return None;
    };
    let or_input = |name| item.decimal(name).unwrap_or(input);
    let times = |name| item.decimal(name).unwrap_or_default();
    let tiers = Tiers { flex: times("flex"), priority: times("priority") };
    Some(Price { input, cached_input: or_input("cached_input"), cache_write: or_input("cache_write"), output, tiers })
}

/// Names of pools and providers that exist besides the models, for [`check`].
pub(super) struct Known<'a> {
    pub(super) pools: Vec<&'a str>,
    /// Providers with the models that they serve under their own names.
    pub(super) providers: Vec<(&'a str, Vec<&'a str>)>,
}

/// Returns true if a request can address a model as `name`. Models that a provider reports itself are not known yet, so any
/// `provider/model` with a known provider counts.
pub(super) fn is_known(name: &str, models: &[ModelConfig], known: &Known<'_>) -> bool {
    let there = |(id, served): &(&str, Vec<&str>)| {
        served.contains(&name) || name.split_once('/').is_some_and(|(provider, _)| provider == *id)
    };
    models.iter().any(|model| model.name == name || model.aliases.iter().any(|alias| alias == name))
        || known.pools.contains(&name)
        || known.providers.iter().any(there)
}

/// Checks that every name is unique and unambiguous, that every target exists, and that `policy = "cost"` has prices.
pub(super) fn check(document: &Document<'_>, models: &[ModelConfig], known: &Known<'_>, prices: &Prices) {
    let fault = |message: String| document.fault_at("models", "", message);
    let mut names = std::collections::BTreeSet::new();
    for model in models {
        for name in std::iter::once(&model.name).chain(&model.aliases) {
            if !names.insert(name.as_str()) {
                fault(format!("the name {name:?} is used twice"));
            }
        }
        let targets = model.to.iter().map(|(target, _)| target).chain(&model.fallback);
        let mut seen = std::collections::BTreeSet::new();
        for target in targets.clone() {
            if !seen.insert(target) {
                fault(format!("{}: the target {:?} is there twice", model.name, target.id()));
            }
        }
        for target in targets.clone().filter(|_| model.policy == Policy::Cost && model.price.is_none()) {
            if let TargetConfig::Provider(_, name) = target
                && prices.find(name).is_none()
            {
                let id = target.id();
                fault(format!("{}: policy = \"cost\" needs a price of {id:?}: put it into [prices] file", model.name));
            }
        }
        for target in targets.chain(model.mirror.iter().map(|mirror| &mirror.target)) {
            let missing = match target {
                TargetConfig::Pool(id) => (!known.pools.contains(&id.as_str())).then_some(("pool", id)),
                TargetConfig::Provider(id, _) => {
                    (!known.providers.iter().any(|(have, _)| have == id)).then_some(("provider", id))
                }
            };
            if let Some((kind, id)) = missing {
                fault(format!("{}: there is no {kind} {id:?}", model.name));
            }
        }
    }
    let mut claimed = std::collections::BTreeMap::new();
    let pools = known.pools.iter().map(|pool| (*pool, "a pool"));
    let served = known.providers.iter().flat_map(|(id, models)| models.iter().map(move |model| (*model, *id)));
    for (name, owner) in pools.chain(served).filter(|(name, _)| !names.contains(name)) {
        if let Some(other) = claimed.insert(name, owner) {
            fault(format!("{name:?} is served by {other} and by {owner}: say which one is meant in [[models]]"));
        }
    }
}
