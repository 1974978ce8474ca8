//! All model names that requests can ask for, and the upstreams behind them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use super::bill::Billing;
use super::checks::Checks;
use super::config::{ModelConfig, RelayConfig, TargetConfig};
use super::core::Core;
use super::target::{Endpoint, Target};
use super::{Policy, Relay};
use penstock_govern::prices::{Price, Prices};
use penstock_provider::Provider;
use penstock_telemetry::{Gauge, Metrics};
use penstock_upstream::Probe;
use penstock_upstream::Upstream;

/// Source of the upstreams that targets refer to.
pub trait Targets {
    /// All pools that run for the config.
    fn pools(&self) -> Vec<Arc<dyn Upstream>>;

    /// Models of providers that are served under their own names.
    fn provided(&self) -> Vec<Arc<dyn Upstream>>;

    /// Upstream of `model` at the provider with id `id`; `None`: no such provider.
    fn provider(&self, id: &str, model: &str) -> Option<Arc<dyn Upstream>>;

    /// Health probe of this provider, if its config asks for one.
    fn probe(&self, id: &str) -> Option<Arc<dyn Probe>>;

    /// Address of the provider with id `id` for a proxy that forwards requests itself; `None`: it has no single one.
    fn endpoint(&self, _id: &str) -> Option<Endpoint> {
        None
    }

    /// Returns true if the target's pool or provider is the same object as before the config changed.
    fn is_kept(&self, _target: &TargetConfig) -> bool {
        false
    }
}

/// Running pools and providers, with those of the config before.
pub struct Sources<'a> {
    /// Pools of the config that is being built.
    pub pools: &'a [Arc<dyn Upstream>],
    /// Providers of the config that is being built.
    pub providers: &'a [Arc<Provider>],
    /// Pools and providers of the config before, if any.
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

    fn endpoint(&self, id: &str) -> Option<Endpoint> {
        let provider = self.providers.iter().find(|provider| provider.id() == id)?;
        let (address, places) = provider.endpoint()?;
        Some(Endpoint { address, places })
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

/// Settings that all relays of a config share.
pub(crate) struct Context {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) explain: bool,
}

/// Entry of one model name: the upstream behind it, its price and its billing.
#[derive(Clone)]
pub struct Entry {
    /// Upstream that answers requests for the name.
    pub upstream: Arc<dyn Upstream>,
    /// Price, where it does not depend on the attempt.
    pub price: Option<Price>,
    /// Prices that the targets behind the name may cost, for reservations.
    pub billing: Arc<Billing>,
    /// Name in `/v1/models`, and label of metrics and logs.
    pub name: Arc<str>,
}

/// Health of a target for the admin API and the metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetState {
    /// Id of the target: `pool` or `provider/model`.
    pub id: Arc<str>,
    /// Share among the first targets of the model; 0 for a fallback, and where no model is asked about.
    pub weight: u32,
    /// State of the breaker: 0 closed, 1 probing, 2 open softly, 3 open hard.
    pub level: u8,
    /// Requests in flight at the target, over all models.
    pub in_flight: usize,
    /// Reason that the target cannot take requests, by its own report.
    pub unready: Option<String>,
}

/// Table of all model names that requests can ask for, aliases included.
#[derive(Default)]
pub struct Models {
    entries: HashMap<String, Entry>,
    /// Entries of `/v1/models`, in the order of the config.
    listed: Vec<Entry>,
    targets: BTreeMap<TargetConfig, Arc<Target>>,
    relays: Vec<Arc<Core>>,
    checks: Checks,
}

impl Models {
    /// Builds the table of a config. A target that does not exist is left out (a checked config has none). The health
    /// of a target that was there `before` is carried over, unless its pool or provider is another object.
    pub fn build(
        config: &RelayConfig<'_>,
        sources: &dyn Targets,
        metrics: &Arc<Metrics>,
        before: Option<&Self>,
    ) -> Self {
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
            let endpoint = match asked {
                TargetConfig::Pool(_) => None,
                TargetConfig::Provider(id, _) => sources.endpoint(id),
            };
            let target = match known {
                Some(known) => known.carried(upstream?, facts),
                None => Target::new(&asked.id(), upstream?, facts),
            };
            let target = Arc::new(target.at(endpoint));
            made.insert(asked.clone(), target.clone());
            Some(target)
        };
        for rules in config.models {
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
            let billing = billing(config.prices, rules);
            models.serve(rules.name.clone(), &rules.aliases, Arc::new(Relay(core)), rules.price, billing);
        }
        let provided = sources.provided().into_iter().map(|upstream| {
            let name = upstream.card().id;
            let provider = config.providers.iter().find(|provider| provider.models.contains(&name));
            (price(config.prices, &name), Some(provider.map_or("", |provider| provider.id.as_str())), upstream)
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

    /// Entry of the model name or alias `name`; `None`: no such model.
    pub fn find(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }

    /// Entries of `/v1/models`, in the order of the config.
    pub fn listed(&self) -> &[Entry] {
        &self.listed
    }

    /// Active health checks of the providers that models of this config use.
    pub fn checks(&self) -> &Checks {
        &self.checks
    }

    /// Relays of the `[[models]]` entries, in the order of the config.
    pub(super) fn relays(&self) -> &[Arc<Core>] {
        &self.relays
    }

    /// State of the targets of a `[[models]]` entry, fallbacks last; `None`: the name has no entry.
    pub fn targets_of(&self, name: &str) -> Option<Vec<TargetState>> {
        let now = Instant::now();
        let core = self.relays.iter().find(|core| core.rules.name == name)?;
        let weights = core.rules.to.iter().map(|(_, weight)| *weight).chain(std::iter::repeat(0));
        Some(core.targets.iter().zip(weights).map(|(target, weight)| target.state(weight, now)).collect())
    }

    /// State of all targets, each once, with weight 0.
    pub fn targets(&self) -> Vec<TargetState> {
        let now = Instant::now();
        self.targets.values().map(|target| target.state(0, now)).collect()
    }

    /// Reports the state of the targets for `/metrics`.
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

/// Prices that the targets of a model may cost.
fn billing(prices: &Prices, rules: &ModelConfig) -> Billing {
    let all = rules.to.iter().map(|(asked, _)| asked).chain(&rules.fallback);
    let targets = all.map(|asked| {
        let own = matches!(asked, TargetConfig::Pool(_));
        let price = match asked {
            TargetConfig::Pool(_) => None,
            TargetConfig::Provider(_, model) => price(prices, model),
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

/// Price of a model by the price table.
pub fn price(prices: &Prices, model: &str) -> Option<Price> {
    prices.find(model).map(|facts| facts.price)
}

/// Health checks: one probe per provider, for all its targets.
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
