//! The running gateway: what every request can see.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use penstock_machine::{Bound, Machine};
use penstock_store::Store;
use tokio::sync::watch;

use crate::answer::ANSWER_BYTES_MAX;
use crate::answer_memory::AnswerMemory;
use crate::auth::{Desk, Guard};
use crate::config::Snapshot;
use crate::governed::Governor;
use crate::http::connection::{Handler, fault_failure};
use crate::http::head::HeadFault;
use crate::http::places::{Bounds, Refused};
use crate::http::{BodyBudget, Exchange, HttpLimits};
use crate::live::Marks;
use crate::live_requests::LiveRequests;
use crate::phases;
use crate::plugins::Hub;
use crate::provider::{self, Provider, ProviderError};
use crate::server::Certificate;
use crate::serving::Serving;
use crate::stored::Keeper;
use crate::telemetry::{AccessLog, Gauge, Metric, Metrics, Tracer};
use crate::upstream::Upstream;

/// Warns of a budget for bodies that is more than half of what the cgroup of this process allows: the kernel would end the process before the
/// budget refuses anybody.
fn warn_of_memory(config: &Snapshot) {
    let budget = config.http.body_memory_bytes_max;
    if let Bound::Cgroup(limit) = Machine::default().memory().bound
        && budget as u64 > limit / 2
    {
        tracing::warn!(
            body_memory_bytes_max = budget,
            cgroup_limit_bytes = limit,
            "request bodies may take more than half of the memory that the cgroup allows: lower server.body_memory_bytes_max"
        );
    }
}

/// What goes on beside requests.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Beside {
    /// Batches and responses in the background.
    Batches,
    /// Telling the next process what is settled here.
    Settling,
}

/// State shared by all requests.
pub struct Gateway {
    serving: ArcSwap<Serving>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Who is let in.
    pub guard: Guard,
    /// Request log.
    pub access_log: AccessLog,
    /// Traces.
    pub tracer: Tracer,
    /// Memory for request bodies.
    pub bodies: BodyBudget,
    /// Memory for what is held of answers.
    answers: BodyBudget,
    /// Requests in flight.
    pub live: Arc<LiveRequests>,
    /// What plugins share.
    pub hub: Arc<Hub>,
    /// Counters of the limits.
    pub governor: Arc<Governor>,
    /// What the metrics say about the config.
    pub marks: Marks,
    /// The server's certificate, where it speaks TLS.
    pub(crate) certificate: OnceLock<Arc<Certificate>>,
    /// Another process serves: this one ends when its answers have.
    leaving: AtomicBool,
    /// What runs beside requests, and what is settled elsewhere, has come to its end.
    rested: [AtomicBool; 2],
    /// Counts the configs that came into force.
    swaps: watch::Sender<u64>,
    keeper: Option<Arc<Keeper>>,
}

impl Gateway {
    /// A gateway in front of pools, each under the name of its card, of providers, and the config's models of them.
    pub fn new(
        config: Snapshot,
        access_log: AccessLog,
        pools: Vec<Arc<dyn Upstream>>,
        providers: Vec<Arc<Provider>>,
    ) -> Self {
        let metrics: Arc<Metrics> = Arc::default();
        let tracer = Tracer::new(&config.telemetry);
        warn_of_memory(&config);
        let bodies = BodyBudget::new(config.http.body_memory_bytes_max, config.http.body_bytes_max);
        let answers = BodyBudget::new(config.http.answer_memory_bytes_max, ANSWER_BYTES_MAX);
        let hub = Arc::default();
        let governor = Arc::new(Governor::new(metrics.clone()));
        let serving = ArcSwap::from_pointee(Serving::new(Arc::new(config), pools, providers, &metrics, &hub, None));
        Self {
            serving,
            guard: Guard::new(metrics.clone()),
            metrics,
            access_log,
            tracer,
            bodies,
            answers,
            live: Arc::default(),
            hub,
            governor,
            marks: Marks::default(),
            certificate: OnceLock::new(),
            leaving: AtomicBool::new(false),
            rested: [AtomicBool::new(true), AtomicBool::new(true)],
            swaps: watch::Sender::new(0),
            keeper: None,
        }
    }

    /// The same, with a store.
    pub fn with_store(self, store: Arc<dyn Store>) -> Self {
        Self { keeper: Some(Arc::new(Keeper::new(store))), ..self }
    }

    /// The same, with a ledger in its store: what was used before this process counts.
    ///
    /// # Errors
    /// The system has no thread for it.
    pub fn with_ledger(self) -> std::io::Result<Self> {
        if let Some(keeper) = &self.keeper {
            let serving = self.serving();
            let is_shared = serving.config.store.postgres.is_some();
            self.governor.keep_ledger(&keeper.store, &serving.in_force(), is_shared)?;
        }
        Ok(self)
    }

    /// The same, from where plugins can ask its models.
    pub fn shared(self) -> Arc<Self> {
        let gateway = Arc::new(self);
        gateway.hub.serve(&gateway);
        gateway
    }

    /// The providers of another config; those that are the same in both are.
    ///
    /// # Errors
    /// [`ProviderError`] of the first that cannot be used.
    pub fn providers_of(&self, config: &Snapshot) -> Result<Vec<Arc<Provider>>, ProviderError> {
        provider::after(config, self.serving.load().providers())
    }

    /// Puts another config in force, with its pools and providers. Requests that have begun stay with what they began with; what is the
    /// same in both goes on with its connections, its health and its counts.
    pub fn swap(&self, config: Snapshot, pools: Vec<Arc<dyn Upstream>>, providers: Vec<Arc<Provider>>) {
        let before = self.serving();
        let is_known = |new: &&Arc<Provider>| before.providers().iter().any(|old| Arc::ptr_eq(old, new));
        let new: Vec<_> = providers.iter().filter(|provider| !is_known(provider)).cloned().collect();
        warn_of_memory(&config);
        self.bodies.resize(config.http.body_memory_bytes_max, config.http.body_bytes_max);
        self.answers.resize(config.http.answer_memory_bytes_max, ANSWER_BYTES_MAX);
        let serving = Serving::new(Arc::new(config), pools, providers, &self.metrics, &self.hub, Some(&before));
        self.serving.store(Arc::new(serving));
        provider::discover::start(&new);
        provider::follow(&new);
        self.swaps.send_modify(|swaps| *swaps += 1);
    }

    /// Another process serves from now on: nothing new is begun here but what open connections still ask for.
    pub(crate) fn leave(&self) {
        self.leaving.store(true, Ordering::SeqCst);
        if let Some(keeper) = &self.keeper {
            keeper.wake.notify_one();
            keeper.wake_responses.notify_one();
        }
    }

    /// Reads the certificate again, if its files are others.
    pub(crate) fn refresh_certificate(&self) {
        self.certificate.get().iter().for_each(|certificate| certificate.refresh());
    }

    /// Whether another process serves.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::SeqCst)
    }

    /// Something beside requests has to come to its end before this process does; or has.
    pub(crate) fn rest(&self, what: Beside, has_ended: bool) {
        self.rested[what as usize].store(has_ended, Ordering::SeqCst);
    }

    /// Whether that has come to its end.
    pub(crate) fn is_rested(&self, what: Beside) -> bool {
        self.rested[what as usize].load(Ordering::SeqCst)
    }

    /// Tells of every config that comes into force.
    pub fn swaps(&self) -> watch::Receiver<u64> {
        self.swaps.subscribe()
    }

    /// What is in force; a request takes it once.
    pub fn serving(&self) -> Arc<Serving> {
        self.serving.load_full()
    }

    /// Whether all that clients have been told is kept is kept.
    pub(crate) fn is_saved(&self) -> bool {
        self.governor.is_saved() && self.keeper.as_ref().is_none_or(|keeper| keeper.saving.is_idle())
    }

    /// Memory for an answer.
    pub(crate) fn answer_memory(&self, limits: &HttpLimits) -> AnswerMemory {
        AnswerMemory::new(&self.answers, limits)
    }

    /// Where keys are issued, if there is a store to keep them.
    pub fn desk(&self) -> Option<Desk> {
        self.keeper.as_ref().map(|keeper| Desk::new(keeper.store.clone(), self.serving().config.clone()))
    }

    /// The gateway's hold on its store, if it has one.
    pub(crate) fn keeper(&self) -> Option<&Arc<Keeper>> {
        self.keeper.as_ref()
    }

    /// Writes what is left of the access log and of the files of plugins.
    pub(crate) fn flush_logs(&self) {
        self.access_log.flush();
        self.hub.flush();
    }

    /// Prometheus text.
    pub fn render_metrics(&self) -> String {
        let mut gauges = vec![
            (Gauge::BodyBytes, String::new(), self.bodies.bytes_held() as f64),
            (Gauge::AnswerBytes, String::new(), self.answers.bytes_held() as f64),
            (Gauge::AccessLinesLost, String::new(), (self.access_log.lost() + self.hub.lines_lost()) as f64),
            (Gauge::SpansSent, String::new(), self.tracer.counts().0 as f64),
            (Gauge::SpansLost, String::new(), self.tracer.counts().1 as f64),
        ];
        self.serving.load().gauges(&self.metrics, &mut gauges);
        self.guard.gauges(&self.serving.load().identity, &mut gauges);
        self.keeper.iter().for_each(|keeper| keeper.gauges(&mut gauges));
        self.governor.gauges(&mut gauges);
        self.marks.gauges(&mut gauges);
        self.metrics.render(&gauges)
    }
}

#[async_trait]
impl Handler for Gateway {
    fn limits(&self) -> Arc<HttpLimits> {
        self.serving.load().config.http.clone()
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

    fn is_leaving(&self) -> bool {
        Gateway::is_leaving(self)
    }

    fn connections(&self, change: i64) {
        self.metrics.connections(change);
    }

    /// Loopback and trusted proxies stand for many clients, and Unix sockets have no addresses.
    fn bounds(&self, peer: Option<IpAddr>) -> Bounds {
        let serving = self.serving.load();
        let (http, proxies) = (&serving.config.http, &serving.config.auth.trusted_proxies);
        let peer = peer.map(|peer| peer.to_canonical());
        let is_client = |peer: &IpAddr| !peer.is_loopback() && !proxies.iter().any(|net| net.contains(peer));
        let (address_max, address_rate) = match peer.filter(is_client) {
            Some(_) => (http.address_connections_max, http.address_connections_per_second),
            None => (0, 0),
        };
        Bounds { connections_max: serving.connections_max, address_max, address_rate }
    }

    fn refused_connection(&self, why: Refused) {
        self.metrics.count(Metric::ConnectionsRefused, &[("reason", why.name())]);
    }
}
