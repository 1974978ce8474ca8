//! The running gateway: what every request can see.

use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use penstock_proto::ErrorKind;
use penstock_store::Store;

use crate::auth::Principal;
use crate::config::Snapshot;
use crate::error::Failure;
use crate::http::connection::{Handler, fault_failure};
use crate::http::head::HeadFault;
use crate::http::{BodyBudget, Exchange, HttpLimits};
use crate::phases;
use crate::provider::Provider;
use crate::relay::Checks;
use crate::relay::models::{Entry, Models, Sources};
use crate::stored::Keeper;
use crate::telemetry::{AccessLog, Gauge, Metric, Metrics};
use crate::upstream::{Card, Upstream};

/// State shared by all requests.
pub struct Gateway {
    snapshot: ArcSwap<Snapshot>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Request log.
    pub access_log: AccessLog,
    /// Memory for request bodies.
    pub bodies: BodyBudget,
    pools: Vec<Arc<dyn Upstream>>,
    providers: Vec<Arc<Provider>>,
    models: Models,
    /// Active checks; whoever runs them takes them.
    pub checks: Mutex<Checks>,
    keeper: Option<Arc<Keeper>>,
}

impl Gateway {
    /// A gateway in front of pools, each under the name of its card, and the config's models of them.
    pub fn new(snapshot: Snapshot, access_log: AccessLog, pools: Vec<Arc<dyn Upstream>>) -> Self {
        Self {
            bodies: BodyBudget::new(snapshot.http.body_memory_bytes_max, snapshot.http.body_bytes_max),
            snapshot: ArcSwap::from_pointee(snapshot),
            metrics: Arc::default(),
            access_log,
            pools,
            providers: Vec::new(),
            models: Models::default(),
            checks: Mutex::default(),
            keeper: None,
        }
        .with_providers(Vec::new())
    }

    /// ... and in front of providers.
    pub fn with_providers(mut self, providers: Vec<Arc<Provider>>) -> Self {
        self.providers = providers;
        let sources = Sources { pools: &self.pools, providers: &self.providers };
        self.models = Models::build(&self.snapshot.load(), &sources, &self.metrics);
        self.checks = Mutex::new(self.models.take_checks());
        self
    }

    /// The providers.
    pub fn providers(&self) -> &[Arc<Provider>] {
        &self.providers
    }

    /// The same, with a store.
    pub fn with_store(self, store: Arc<dyn Store>) -> Self {
        Self { keeper: Some(Arc::new(Keeper::new(store))), ..self }
    }

    /// Whether all that clients have been told is kept is kept.
    pub(crate) fn is_saved(&self) -> bool {
        self.keeper.as_ref().is_none_or(|keeper| keeper.saving.is_idle())
    }

    /// The gateway's hold on its store, if it has one.
    pub(crate) fn keeper(&self) -> Option<&Arc<Keeper>> {
        self.keeper.as_ref()
    }

    /// The config in force; a request takes it once.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }

    /// The upstream of a model that the principal may use.
    pub fn upstream(&self, model: &str, principal: &Principal) -> Result<Arc<dyn Upstream>, Failure> {
        self.entry(model, principal).map(|entry| entry.upstream)
    }

    /// Who answers a name that the principal may use; an alias is as good as what it stands for. Models it may not use are as unknown
    /// as those that do not exist.
    pub fn entry(&self, model: &str, principal: &Principal) -> Result<Entry, Failure> {
        let found = self.models.find(model).cloned().or_else(|| self.discovered(model));
        found.filter(|entry| principal.may_use(model) || principal.may_use(&entry.name)).ok_or_else(|| {
            let shown: String = model.chars().take(80).collect();
            let known: Vec<_> = self.cards(principal).into_iter().map(|card| card.id).take(5).collect();
            let message = format!("The model {shown:?} does not exist. Served here: {}.", known.join(", "));
            Failure::new(ErrorKind::ModelNotFound, message).param("model")
        })
    }

    /// A model that a provider said it has.
    fn discovered(&self, model: &str) -> Option<Entry> {
        let upstream = self.providers.iter().find_map(|provider| provider.discovered(model))?;
        let price = crate::relay::models::price(&self.snapshot.load(), model.split_once('/')?.1);
        Some(Entry { upstream, price, name: model.into() })
    }

    /// The same where a request may leave the model out: then it is the only one.
    pub fn upstream_or_only(&self, model: Option<&str>, principal: &Principal) -> Result<Arc<dyn Upstream>, Failure> {
        match (model, self.cards(principal).as_slice()) {
            (Some(model), _) => self.upstream(model, principal),
            (None, [only]) => self.upstream(&only.id, principal),
            (None, _) => {
                let message = "Several models are served: name one.";
                Err(Failure::new(ErrorKind::InvalidRequest, message).param("model"))
            }
        }
    }

    /// The models that the principal may use.
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

    /// Why requests cannot be served; empty: they can.
    pub fn unready(&self) -> Vec<String> {
        let mut out = Vec::new();
        for entry in self.models.listed() {
            if let Some(why) = entry.upstream.unready() {
                out.push(format!("{}: {why}", entry.name));
            }
        }
        out
    }

    /// Prometheus text.
    pub fn render_metrics(&self) -> String {
        let mut gauges = vec![
            (Gauge::BodyBytes, String::new(), self.bodies.bytes_held() as f64),
            (Gauge::AccessLinesLost, String::new(), self.access_log.lost() as f64),
        ];
        for entry in self.models.listed() {
            entry.upstream.gauges(&mut |gauge, value| gauges.push((gauge, entry.name.to_string(), value)));
        }
        self.models.gauges(&mut |gauge, target, value| gauges.push((gauge, target.to_owned(), value)));
        for provider in &self.providers {
            for (outcome, count) in provider.counts().each() {
                let labels = [("provider", provider.id()), ("outcome", outcome)];
                self.metrics.set(Metric::UpstreamRequests, &labels, count);
            }
        }
        self.keeper.iter().for_each(|keeper| keeper.gauges(&mut gauges));
        self.metrics.render(&gauges)
    }
}

#[async_trait]
impl Handler for Gateway {
    fn limits(&self) -> Arc<HttpLimits> {
        self.snapshot.load().http.clone()
    }

    async fn serve(&self, exchange: &mut Exchange) {
        phases::serve(self, exchange).await;
    }

    async fn refuse(&self, exchange: &mut Exchange, fault: HeadFault) {
        self.refused_head(fault);
        // A client that does not wait for its refusal has lost nothing.
        let _ = exchange.refuse(&fault_failure(fault)).await;
    }

    fn refused_head(&self, fault: HeadFault) {
        self.metrics.count(Metric::MalformedHeads, &[("status", &fault.status.to_string())]);
    }

    fn connections(&self, change: i64) {
        self.metrics.connections(change);
    }
}
