//! `[[limits]]`: rate limits and budgets.
//!
//! A limit that could never act is a fault: one without a measure, one for models that nobody serves, or one that
//! counts money where nothing has a price. Otherwise a budget without effect would first be noticed on the bill.

use std::sync::Arc;

use penstock_govern::{By, For, Limit, Measure, NAMES, NANO, OnStoreFailure, Reserve, Span, Surge, Unit, Unmetered};

use super::raw::{Document, Reader};
use super::{PoolConfig, Snapshot};
use penstock_relay::TargetConfig;

/// Largest amount of a measure, in its unit.
const AMOUNT_MAX: u64 = 1 << 50;
/// Longest id in characters; ids stand in header fields and metrics.
const ID_CHARS_MAX: usize = 64;

/// Reads all `[[limits]]` tables in the order of the file.
pub(super) fn read(document: &Document<'_>) -> Vec<Arc<Limit>> {
    document.tables("limits").iter().filter_map(limit).map(Arc::new).collect()
}

fn limit(table: &Reader<'_, '_>) -> Option<Limit> {
    let id = table.text("id");
    match &id {
        None => table.fault("id", "is missing"),
        Some(id) if id.len() > ID_CHARS_MAX || !id.bytes().all(|byte| byte.is_ascii_graphic()) => {
            table.fault("id", format!("must be at most {ID_CHARS_MAX} printable ASCII characters without spaces"));
        }
        Some(_) => {}
    }
    let measures: Vec<_> = NAMES.iter().filter_map(|(unit, span, name)| measure(table, *unit, *span, name)).collect();
    let applies =
        word(table, "for", &[("named", For::Named), ("everyone", For::Everyone), ("anonymous", For::Anonymous)]);
    let by: Vec<_> = By::ALL.into_iter().map(|by| (by.name(), by)).collect();
    let tokens = |name| table.has(name).then(|| table.number_or(name, 1..=u64::from(u32::MAX), 1) as u32);
    let (max_tokens_default, max_tokens_max) = (tokens("max_tokens_default"), tokens("max_tokens_max"));
    if max_tokens_default.zip(max_tokens_max).is_some_and(|(default, max)| default > max) {
        table.fault("max_tokens_default", "must be at most max_tokens_max");
    }
    let surge = surge(table);
    if measures.is_empty() && max_tokens_default.is_none() && max_tokens_max.is_none() && surge.is_none() {
        table.fault("id", "this limit limits nothing: give it a measure, as requests_per_minute");
    }
    Some(Limit {
        by: word(table, "by", &by),
        applies,
        models: table.texts("models"),
        reserve: word(table, "reserve", &[("likely", Reserve::Likely), ("most", Reserve::Most)]),
        unmetered: word(table, "unmetered", &[("refuse", Unmetered::Refuse), ("allow", Unmetered::Allow)]),
        on_store_failure: word(
            table,
            "on_store_failure",
            &[("open", OnStoreFailure::Open), ("closed", OnStoreFailure::Closed)],
        ),
        max_tokens_default,
        max_tokens_max,
        surge,
        measures,
        id: id?.into(),
    })
}

fn surge(table: &Reader<'_, '_>) -> Option<Surge> {
    let above = table.number("surge_above", 1..=AMOUNT_MAX);
    let times = table.has("surge_times").then(|| table.number_or("surge_times", 2..=10_000, 2))?;
    Some(Surge { times, above })
}

fn measure(table: &Reader<'_, '_>, unit: Unit, span: Span, name: &'static str) -> Option<Measure> {
    if !table.has(name) {
        return None;
    }
    let max = match unit {
        Unit::NanoUsd => {
            let usd = table.decimal(name)?;
            if usd > 0.0 && usd * (NANO as f64) < 1.0 {
                table.fault(name, "must be 0 or at least 0.000000001");
            }
            (usd * NANO as f64).round() as u64
        }
        _ => table.number_or(name, 0..=AMOUNT_MAX, 0),
    };
    Some(Measure { unit, span, max })
}

/// Reads a key with a fixed set of words; the first word is the fallback after a fault.
pub(super) fn word<T: Copy>(table: &Reader<'_, '_>, name: &'static str, words: &[(&'static str, T)]) -> T {
    let given = table.text(name).unwrap_or_default();
    let found = words.iter().find(|(word, _)| *word == given);
    found.map(|(_, value)| *value).unwrap_or_else(|| {
        let known: Vec<_> = words.iter().map(|(word, _)| *word).collect();
        table.fault(name, format!("{given:?} is none of {}", known.join(", ")));
        words[0].1
    })
}

/// Checks references between tables: limits named by keys and teams, and models with prices.
pub(super) fn check(document: &Document<'_>, config: &Snapshot) {
    let named = |limits: &[String], table: &str, id: &str| {
        for name in limits.iter().filter(|name| !config.limits.iter().any(|limit| *limit.id == ***name)) {
            document.fault_at(table, "limits", format!("{id:?} is under {name:?}, which is none of [[limits]]"));
        }
    };
    config.auth.keys.iter().for_each(|key| named(&key.limits, "keys", &key.id));
    config.auth.teams.iter().for_each(|team| named(&team.limits, "teams", &team.id));
    config.admin.keys.iter().for_each(|key| named(&key.limits, "admin_keys", &key.id));
    config.admin.oidc.iter().for_each(|oidc| named(&oidc.limits, "admin.oidc", &oidc.provider.client_id));
    let mut seen = std::collections::BTreeSet::new();
    for (at, limit) in config.limits.iter().enumerate() {
        let path = |name: &str| format!("limits[{at}].{name}");
        if !seen.insert(&*limit.id) {
            document.fault_at("limits", "id", format!("{:?} is used twice", limit.id));
        }
        let mut served = Served::of(config);
        for rule in &limit.models {
            let known = served.0.iter().any(|(name, _)| covers(rule, name));
            if !known && !served.1 {
                document.fault_at("limits", &path("models"), format!("{rule:?} is no model that is served here"));
            }
        }
        served.0.retain(|(name, _)| limit.covers(name));
        let free = !served.0.is_empty() && served.0.iter().all(|(_, priced)| !priced) && !served.1;
        if limit.measures(Unit::NanoUsd) && free {
            let message = "this limit counts money, and no model that it is for has a price: give one with [[models]] price, or in [prices]";
            document.fault_at("limits", &path("models"), message);
        }
    }
}

fn covers(rule: &str, name: &str) -> bool {
    rule.strip_suffix('*').map_or(rule == name, |prefix| name.starts_with(prefix))
}

/// Model names that requests can use, each with whether it has a price; the flag says that discovery may add more.
struct Served<'a>(Vec<(&'a str, bool)>, bool);

impl<'a> Served<'a> {
    fn of(config: &'a Snapshot) -> Self {
        let by_table = |model: &str| config.prices.find(model).is_some();
        let mut names: Vec<(&str, bool)> = Vec::new();
        for model in &config.models {
            let targets = model.to.iter().map(|(target, _)| target).chain(&model.fallback);
            let priced = model.price.is_some()
                || targets.into_iter().any(|target| match target {
                    TargetConfig::Provider(_, name) => by_table(name),
                    TargetConfig::Pool(_) => false,
                });
            names.extend(model.aliases.iter().chain([&model.name]).map(|name| (name.as_str(), priced)));
        }
        names.extend(config.pools.iter().flat_map(PoolConfig::served).map(|name| (name, false)));
        let provided = config.providers.iter().flat_map(|provider| &provider.models);
        names.extend(provided.map(|name| (name.as_str(), by_table(name))));
        Self(names, config.providers.iter().any(|provider| provider.discover))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Overrides, load};
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Result<usize, &str>) {
        let read = load(Some(("p.toml", text)), &Overrides::default(), &|_| None);
        match (read, expected) {
            (Ok(config), Ok(count)) => assert_eq!(config.limits.len(), count),
            (Err(faults), Err(words)) => assert!(faults.to_string().contains(words), "{words} in {faults}"),
            (read, expected) => panic!("{text}: {:?}, expected {expected:?}", read.map(|config| config.limits)),
        }
    }

    #[test]
    fn a_limit_that_could_not_act_is_a_fault() {
        let limit = |rest: &str| format!("[[limits]]\nid = \"x\"\n{rest}\n");
        check(&limit("requests_per_minute = 5"), Ok(1));
        check(&limit(""), Err("limits nothing"));
        check(&limit("usd_per_day = 5"), Err("no model that it is for has a price"));
        check(&limit("tokens_per_day = 5\nmodels = [\"gpt-*\"]"), Err("\"gpt-*\" is no model"));
        check(&limit("in_flight = 1\nby = \"moon\""), Err("\"moon\" is none of key, team"));
        check(&limit("in_flight = 1\nmax_tokens_default = 9\nmax_tokens_max = 8"), Err("at most max_tokens_max"));
        check(&(limit("in_flight = 1") + &limit("in_flight = 1")), Err("used twice"));
        let provider = "[[providers]]\nid = \"a\"\nkey_env = \"X\"\nmodels = [\"gpt-4o\"]\nbase_url = \"http://h\"\n";
        let env = |_: &str| Some("k".to_owned());
        let text = limit("usd_per_day = 0.5") + provider;
        let config = load(Some(("p.toml", &text)), &Overrides::default(), &env).expect("valid");
        assert_eq!(config.limits[0].measures, [Measure { unit: Unit::NanoUsd, span: Span::Day, max: NANO / 2 }]);
    }
}
