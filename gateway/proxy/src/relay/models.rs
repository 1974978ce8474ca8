//! All names that requests can ask for.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use super::checks::{Checks, Probe};
use super::core::Core;
use super::target::Target;
use super::{Policy, Relay};
use crate::config::{ModelConfig, Snapshot, TargetConfig};
use crate::governed::Billing;
use crate::prices::Price;
use crate::provider::Provider;
use crate::telemetry::{Gauge, Metrics};
use crate::upstream::Upstream;

/// Targets of one model at most, fallbacks included.
pub(crate) const TARGETS_MAX: usize = crate::config::TARGETS_MAX;

/// What targets are made of.
pub trait Targets {
    /// Every pool, by its id.
    fn pools(&self) -> Vec<Arc<dyn Upstream>>;

    /// Models of providers that are served under their own names.
    fn provided(&self) -> Vec<Arc<dyn Upstream>>;

    /// That model of that provider.
    fn provider(&self, id: &str, model: &str) -> Option<Arc<dyn Upstream>>;

    /// Whoever can say whether that provider lives, if it is to be asked.
    fn probe(&self, id: &str) -> Option<Arc<dyn Probe>>;

    /// Whether that target is behind the same object as before the config changed.
    fn is_kept(&self, _target: &TargetConfig) -> bool {
        false
    }
}

/// Those that run.
pub struct Sources<'a> {
    /// Pools.
    pub pools: &'a [Arc<dyn Upstream>],
    /// Providers.
    pub providers: &'a [Arc<Provider>],
    /// Those of the config before.
    pub before: Option<Before<'a>>,
}

/// Pools and providers of an earlier config.
pub type Before<'a> = (&'a [Arc<dyn Upstream>], &'a [Arc<Provider>]);

impl Targets for Sources<'_> {
    fn pools(&self) -> Vec<Arc<dyn Upstream>> {
        self.pools.to_vec()
    }

    fn provided(&self) -> Vec<Arc<dyn Upstream>> {
        self.providers.iter().flat_map(Provider::upstreams).collect()
    }

    fn provider(&self, id: &str, model: &str) -> Option<Arc<dyn Upstream>> {
        let provider = self.providers.iter().find(|provider| provider.id() == id)?;
        Some(provider.upstream(model, model))
    }

    fn probe(&self, id: &str) -> Option<Arc<dyn Probe>> {
        let provider = self.providers.iter().find(|provider| provider.id() == id)?;
        provider.is_checked().then(|| provider.clone() as Arc<dyn Probe>)
    }

    fn is_kept(&self, target: &TargetConfig) -> bool {
        let Some((pools, providers)) = self.before else { return false };
        match target {
            TargetConfig::Pool(id) => {
                let named = |pools: &[Arc<dyn Upstream>]| pools.iter().find(|pool| pool.card().id == *id).cloned();
                named(pools).zip(named(self.pools)).is_some_and(|(old, new)| Arc::ptr_eq(&old, &new))
            }
            TargetConfig::Provider(id, _) => {
                let named = |all: &[Arc<Provider>]| all.iter().find(|provider| provider.id() == id).cloned();
                named(providers).zip(named(self.providers)).is_some_and(|(old, new)| Arc::ptr_eq(&old, &new))
            }
        }
    }
}

/// What all relays share.
pub(crate) struct Context {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) explain: bool,
}

/// Who answers a name.
#[derive(Clone)]
pub struct Entry {
    /// The upstream.
    pub upstream: Arc<dyn Upstream>,
    /// What it costs, where that does not depend on the attempt.
    pub price: Option<Price>,
    /// What its targets may cost.
    pub(crate) billing: Arc<Billing>,
    /// The name that `/v1/models` shows, and that metrics and logs are labelled with.
    pub name: Arc<str>,
}

/// How a target does, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetState {
    /// `pool` or `provider/model`.
    pub id: Arc<str>,
    /// Share among those that are asked first; 0: a fallback.
    pub weight: u32,
    /// Breaker: 0 closed, 1 probing, 2 open softly, 3 open hard.
    pub level: u8,
    /// Requests there now.
    pub in_flight: usize,
    /// Why it cannot take requests, by its own word.
    pub unready: Option<String>,
}

/// The names.
#[derive(Default)]
pub struct Models {
    entries: HashMap<String, Entry>,
    /// Those that are listed, in the order of the config.
    listed: Vec<Entry>,
    targets: BTreeMap<TargetConfig, Arc<Target>>,
    relays: Vec<Arc<Core>>,
    checks: Checks,
}

impl Models {
    /// What the config says. A target that does not exist, which a checked config has none of, is left out. What is known of the health
    /// of a target that was there `before` goes on, unless its pool or provider is another.
    pub fn build(config: &Snapshot, sources: &dyn Targets, metrics: &Arc<Metrics>, before: Option<&Self>) -> Self {
        let context = Context { metrics: metrics.clone(), explain: config.explain };
        let pools = sources.pools();
        let mut models = Self::default();
        let mut made: BTreeMap<TargetConfig, Arc<Target>> = BTreeMap::new();
        let mut target = |asked: &TargetConfig| {
            if let Some(have) = made.get(asked) {
                return Some(have.clone());
            }
            let (upstream, facts) = match asked {
                TargetConfig::Pool(id) => (pools.iter().find(|pool| pool.card().id == *id).cloned(), None),
                TargetConfig::Provider(id, model) => (sources.provider(id, model), config.prices.find(model)),
            };
            let known = before.and_then(|before| before.targets.get(asked)).filter(|_| sources.is_kept(asked));
            let target = Arc::new(match known {
                Some(known) => known.carried(upstream?, facts),
                None => Target::new(&asked.id(), upstream?, facts),
            });
            made.insert(asked.clone(), target.clone());
            Some(target)
        };
        for rules in &config.models {
            let all: Option<Vec<_>> =
                rules.to.iter().map(|(asked, _)| asked).chain(&rules.fallback).map(&mut target).collect();
            let Some(all) = all else { continue };
            let mirror = rules.mirror.as_ref().and_then(|mirror| target(&mirror.target));
            let core = Core::new(rules.clone(), all, mirror, &context);
            let known = before.and_then(|before| before.relays.iter().find(|known| known.rules.name == rules.name));
            let core = Arc::new(match known {
                Some(known) => core.after(known),
                None => core,
            });
            models.relays.push(core.clone());
            let billing = billing(config, rules);
            models.serve(rules.name.clone(), &rules.aliases, Arc::new(Relay(core)), rules.price, billing);
        }
        let provided = sources.provided().into_iter().map(|upstream| {
            let name = upstream.card().id;
            let provider = config.providers.iter().find(|provider| provider.models.contains(&name));
            (price(config, &name), Some(provider.map_or("", |provider| provider.id.as_str())), upstream)
        });
        for (price, provider, upstream) in pools.into_iter().map(|pool| (None, None, pool)).chain(provided) {
            let name = upstream.card().id;
            if !models.entries.contains_key(&name) {
                models.serve(name, &[], upstream, price, Billing::single(provider, price));
            }
        }
        models.checks = checks(&made, sources);
        models.targets = made;
        models
    }

    fn serve(
        &mut self,
        name: String,
        aliases: &[String],
        upstream: Arc<dyn Upstream>,
        price: Option<Price>,
        billing: Billing,
    ) {
        let entry = Entry { upstream, price, billing: Arc::new(billing), name: name.as_str().into() };
        for name in aliases.iter().cloned().chain([name]) {
            self.entries.insert(name, entry.clone());
        }
        self.listed.push(entry);
    }

    /// Who answers that name.
    pub fn find(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }

    /// Those that are listed.
    pub fn listed(&self) -> &[Entry] {
        &self.listed
    }

    /// The active checks.
    pub fn checks(&self) -> &Checks {
        &self.checks
    }

    /// The relays, in the order of the config.
    #[cfg(test)]
    pub(super) fn relays(&self) -> &[Arc<Core>] {
        &self.relays
    }

    /// The targets of a `[[models]]` entry, fallbacks last; `None`: the name has none of its own.
    pub fn targets_of(&self, name: &str) -> Option<Vec<TargetState>> {
        let now = Instant::now();
        let core = self.relays.iter().find(|core| core.rules.name == name)?;
        let weights = core.rules.to.iter().map(|(_, weight)| *weight).chain(std::iter::repeat(0));
        Some(core.targets.iter().zip(weights).map(|(target, weight)| target.state(weight, now)).collect())
    }

    /// All targets, once each.
    pub fn targets(&self) -> Vec<TargetState> {
        let now = Instant::now();
        self.targets.values().map(|target| target.state(0, now)).collect()
    }

    /// State of the targets, for `/metrics`.
    pub fn gauges(&self, out: &mut dyn FnMut(Gauge, &str, f64)) {
        let now = Instant::now();
        for relay in self.relays.iter().filter(|relay| relay.rules.policy == Policy::CacheAware) {
            out(Gauge::KvBlocksApproximate, &relay.rules.name, relay.sent.blocks() as f64);
        }
        for target in self.targets.values() {
            out(Gauge::TargetState, &target.id, f64::from(target.level(now)));
            out(Gauge::TargetInFlight, &target.id, target.in_flight() as f64);
        }
    }
}

/// What the targets of a model may cost.
fn billing(config: &Snapshot, rules: &ModelConfig) -> Billing {
    let all = rules.to.iter().map(|(asked, _)| asked).chain(&rules.fallback);
    let targets = all.map(|asked| {
        let own = matches!(asked, TargetConfig::Pool(_));
        let price = match asked {
            TargetConfig::Pool(_) => None,
            TargetConfig::Provider(_, model) => price(config, model),
        };
        (asked.id().as_str().into(), rules.price.or(price), own)
    });
    let mut providers: Vec<Arc<str>> = Vec::new();
    for (asked, _) in &rules.to {
        if let TargetConfig::Provider(id, _) = asked
            && !providers.iter().any(|have| **have == **id)
        {
            providers.push(id.as_str().into());
        }
    }
    let hedged = rules.hedge_after.is_some();
    let attempts = 1 + rules.retries as usize + rules.fallback.len() + usize::from(hedged);
    Billing::several(providers, targets.collect(), attempts as u64, hedged)
}

/// By the table.
pub(crate) fn price(config: &Snapshot, model: &str) -> Option<Price> {
    config.prices.find(model).map(|facts| facts.price)
}

/// One check for all targets of a provider.
fn checks(made: &BTreeMap<TargetConfig, Arc<Target>>, sources: &dyn Targets) -> Checks {
    let mut by_provider: BTreeMap<&str, Vec<Arc<Target>>> = BTreeMap::new();
    for (asked, target) in made {
        if let TargetConfig::Provider(id, _) = asked {
            by_provider.entry(id).or_default().push(target.clone());
        }
    }
    let probed = by_provider.into_iter().filter_map(|(id, targets)| Some((sources.probe(id)?, targets)));
    Checks(probed.collect())
}
