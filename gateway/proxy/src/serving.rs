//! One config in force, and everything that was made from it.
//!
//! The whole is made at once and swapped at once. A request takes it once and keeps it, so that a stream ends under the
//! rules that it began with.

use std::sync::Arc;

use penstock_proto::ErrorKind;

use crate::descriptors;
use crate::plugins::{Chain, Hub};
use penstock_auth::{Idempotency, Identity, Principal};
use penstock_base::error::Failure;
use penstock_config::{Members, Snapshot};
use penstock_governed::{Effect, InForce, Rules};
use penstock_provider::Provider;
use penstock_relay::models::{self, Entry, Models, Sources};
use penstock_relay::{Billing, Checks};
use penstock_telemetry::{Gauge, Metric, Metrics};
use penstock_upstream::call::Call;
use penstock_upstream::{Card, Upstream};

/// Config in force, with its pools, providers, models, plugins and limits.
pub struct Serving {
    /// Config that the pools, models, plugins and limits were built from.
    pub config: Arc<Snapshot>,
    /// Keys, certificates and tokens that the config accepts.
    pub identity: Arc<Identity>,
    pools: Vec<Arc<dyn Upstream>>,
    providers: Vec<Arc<Provider>>,
    models: Models,
    pub(crate) plugins: Arc<Chain>,
    pub(crate) idempotency: Idempotency,
    /// Limits of the config, with the choice of those that apply to a request.
    pub rules: Rules,
    /// Most connections of clients at once, as far as file descriptors allow.
    pub connections_max: usize,
}

impl Serving {
    /// Models of the config over those pools and providers, with a target for each of `members`. Targets that were there `before` keep their health and
    /// statistics.
    pub fn new(
        config: Arc<Snapshot>,
        pools: Vec<Arc<dyn Upstream>>,
        providers: Vec<Arc<Provider>>,
        metrics: &Arc<Metrics>,
        hub: &Arc<Hub>,
        members: &Members,
        before: Option<&Self>,
    ) -> Self {
        let known = before.map(|before| (before.pools(), before.providers()));
        let sources = Sources { pools: &pools, providers: &providers, before: known };
        let (relayed, members) = (members.models(&config.models), members.providers(&config.providers));
        let relay = config.relay(&relayed, &members);
        let models = Models::build(&relay, &sources, metrics, before.map(|before| &before.models));
        let identity = Arc::new(Identity::new(&config.auth_settings()));
        let plugins = Arc::new(Chain::new(&config, metrics, hub, before.map(|before| &*before.plugins)));
        let (rules, idempotency) = (Rules::new(&config.limits), Idempotency::new(identity.pepper()));
        let connections_max = descriptors::share(&config, descriptors::limit()).connections;
        Self { config, identity, pools, providers, models, plugins, idempotency, rules, connections_max }
    }

    /// Models that `/v1/models` lists, in the order of the config.
    pub fn entries(&self) -> &[Entry] {
        self.models.listed()
    }

    /// Limits in force, with the models and the keys, teams and admin keys of the config that they can have an effect on.
    pub fn effect(&self) -> Effect<'_> {
        let teams = self.config.auth.teams.iter().map(|team| team.limits.as_slice());
        let people = self.config.admin.keys.iter().map(|key| key.limits.as_slice());
        let named = self.config.auth.keys.iter().map(|key| key.limits.as_slice()).chain(teams).chain(people);
        Effect { rules: &self.rules, models: self.entries(), named: named.collect() }
    }

    /// Limits in force, and the limits of each team in the config.
    pub fn in_force(&self) -> InForce {
        let teams = self.config.auth.teams.iter().map(|team| (team.id.clone(), team.limits.clone())).collect();
        InForce { limits: self.rules.limits().to_vec(), teams }
    }

    /// Pools that the config has, in its order.
    pub fn pools(&self) -> &[Arc<dyn Upstream>] {
        &self.pools
    }

    /// Providers that the config has, in its order.
    pub fn providers(&self) -> &[Arc<Provider>] {
        &self.providers
    }

    /// Table of the model names that requests can ask for.
    pub fn models(&self) -> &Models {
        &self.models
    }

    /// Active health checks of the providers that models use.
    pub fn checks(&self) -> &Checks {
        self.models.checks()
    }

    /// Upstream of a model that the principal may use.
    pub fn upstream(&self, model: &str, principal: &Principal) -> Result<Arc<dyn Upstream>, Failure> {
        self.entry(model, principal).map(|entry| entry.upstream)
    }

    /// Target of a name that the principal may use; an alias counts as the name that it stands for. A model that the
    /// principal may not use fails as one that does not exist.
    pub fn entry(&self, model: &str, principal: &Principal) -> Result<Entry, Failure> {
        let found = self.models.find(model).cloned().or_else(|| self.discovered(model));
        found.filter(|entry| principal.may_use(model) || principal.may_use(&entry.name)).ok_or_else(|| {
            let shown: String = model.chars().take(80).collect();
            let known: Vec<_> = self.cards(principal).into_iter().map(|card| card.id).take(5).collect();
            let message = format!("The model {shown:?} does not exist. Served here: {}.", known.join(", "));
            Failure::new(ErrorKind::ModelNotFound, message).param("model")
        })
    }

    /// Target of a call. Where a plugin chose another model than the client asked for, the principal need be allowed
    /// only one of the two: the choice is the config's.
    pub fn entry_of(&self, call: &Call, principal: &Principal) -> Result<Entry, Failure> {
        principal.check_other_models(call.other_models)?;
        match &call.asked_for {
            Some(asked) if principal.may_use(asked) => self.entry(&call.model, &Principal::default()),
            _ => self.entry(&call.model, principal),
        }
    }

    /// Entry of a model that a provider's own list contains.
    fn discovered(&self, model: &str) -> Option<Entry> {
        let upstream = self.providers.iter().find_map(|provider| provider.discovered(model))?;
        let (provider, there) = model.split_once('/')?;
        let price = models::price(&self.config.prices, there);
        let billing = Arc::new(Billing::single(Some(provider), price));
        Some(Entry { upstream, price, billing, name: model.into() })
    }

    /// Target of a request that may leave the model out, which works only where one model is served.
    pub fn entry_or_only(&self, model: Option<&str>, principal: &Principal) -> Result<Entry, Failure> {
        match (model, self.cards(principal).as_slice()) {
            (Some(model), _) => self.entry(model, principal),
            (None, [only]) => self.entry(&only.id, principal),
            (None, _) => {
                let message = "Several models are served: name one.";
                Err(Failure::new(ErrorKind::InvalidRequest, message).param("model"))
            }
        }
    }

    /// Cards of the models that the principal may use, those found at providers included, for `/v1/models`.
    pub fn cards(&self, principal: &Principal) -> Vec<Card> {
        let found = self.providers.iter().flat_map(Provider::found_cards);
        self.models
            .listed()
            .iter()
            .map(|entry| entry.upstream.card())
            .chain(found)
            .filter(|card| principal.may_use(&card.id))
            .collect()
    }

    /// Cards of the models that the principal may use and that a request would be served by now.
    pub fn loaded(&self, principal: &Principal) -> Vec<Card> {
        let ready = self.models.listed().iter().filter(|entry| entry.upstream.is_loaded());
        ready.map(|entry| entry.upstream.card()).filter(|card| principal.may_use(&card.id)).collect()
    }

    /// Reasons why requests cannot be served; empty: they can.
    pub fn unready(&self) -> Vec<String> {
        let mut out = Vec::new();
        for entry in self.models.listed() {
            if let Some(why) = entry.upstream.unready() {
                out.push(format!("{}: {why}", entry.name));
            }
        }
        out
    }

    /// Gauges of the upstreams behind the names, for `/metrics`.
    pub fn gauges(&self, metrics: &Metrics, gauges: &mut Vec<(Gauge, String, f64)>) {
        for entry in self.models.listed() {
            entry.upstream.gauges(&mut |gauge, value| gauges.push((gauge, entry.name.to_string(), value)));
            entry.upstream.worker_gauges(&mut |gauge, worker, value| gauges.push((gauge, worker.to_owned(), value)));
        }
        self.models.gauges(&mut |gauge, target, value| gauges.push((gauge, target.to_owned(), value)));
        self.plugins.values(&mut |name, value| gauges.push((Gauge::PluginValue, name, value)));
        for feed in self.providers.iter().filter_map(|provider| provider.feed()) {
            let state = feed.state();
            for (gauge, value) in [
                (Gauge::KvConnected, u64::from(state.connected)),
                (Gauge::KvBlocksEvents, state.blocks as u64),
                (Gauge::KvBatches, state.batches),
                (Gauge::KvGaps, state.gaps),
                (Gauge::KvSkipped, state.skipped + state.malformed),
            ] {
                gauges.push((gauge, feed.id().to_owned(), value as f64));
            }
        }
        for provider in &self.providers {
            for (outcome, count) in provider.counts().each() {
                let labels = [("provider", provider.id()), ("outcome", outcome)];
                metrics.set(Metric::UpstreamRequests, &labels, count);
            }
            for (outcome, count) in provider.counts().paces() {
                metrics.set(Metric::PacedRequests, &[("provider", provider.id()), ("outcome", outcome)], count);
            }
        }
    }
}
