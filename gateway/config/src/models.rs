//! `[[models]]`: reads and checks the model names in requests and their targets.

use std::time::Duration;

use super::raw::{Document, Reader};
use penstock_govern::prices::{Price, Prices, Tiers};
use penstock_relay::{MirrorConfig, ModelConfig, Policy, Reason, Sticky, TARGETS_MAX, TargetConfig};

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

#[cfg(test)]
mod tests {
    use crate::{Overrides, load};

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let pools = "[[pools]]\nid = \"a\"\n[[pools]]\nid = \"b\"\n";
        let check = |keys: &str, expected: &str| {
            let text = format!("{pools}[[models]]\nname = \"m\"\n{keys}\n");
            let faults = load(Some(("p.toml", &text)), &Overrides::default(), &|_| None).expect_err(keys).to_string();
            assert!(faults.contains(expected), "{expected} in {faults}");
        };
        check("", "models[0].to: is missing");
        check("to = [{}]", "p.toml:7: models[0].to[0].pool: exactly one of pool and provider is needed");
        check("to = [{ pool = \"a\", wight = 2 }]", "models[0].to[0].wight: unknown key; did you mean weight?");
        check("to = [{ pool = \"a\", model = \"x\" }]", "goes with provider");
        check("to = [{ pool = \"z\" }]", "there is no pool \"z\"");
        check("to = [{ provider = \"z\" }]", "there is no provider \"z\"");
        check("to = [{ pool = \"a\" }]\nfallback = [{ pool = \"a\" }]", "is there twice");
        check("to = [{ pool = \"a\" }]\naliases = [\"m\"]", "the name \"m\" is used twice");
        check("to = [{ pool = \"a\" }]\nfallback_on = [\"errors\"]", "\"errors\" is not one of error, timeout");
        check("to = [{ pool = \"a\" }]\npolicy = \"best\"", "\"best\" is not one of weighted, order");
        check("to = [{ pool = \"a\" }]\nsticky = \"header:\"", "\"header:\" is not one of");
        check("to = \"a\"", "models[0].to: must be a list of tables");
        check("to = [{ pool = \"a\" }]\nprice = { input = 1 }", "input and output are both needed");
        check("to = [{ pool = \"a\", weight = 0 }]", "must be a whole number from 1");
        check(
            "to = [{ provider = \"z\", model = \"nobody-knows\" }]\npolicy = \"cost\"",
            "needs a price of \"z/nobody-knows\"",
        );
        check(
            "to = [{ pool = \"a\" }]\npolicy = \"cost\"\nfallback = []\nmirror = { percent = 3 }",
            "models[0].mirror.pool",
        );
    }
}
