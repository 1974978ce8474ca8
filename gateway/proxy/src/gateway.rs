//! State of the running gateway that every request shares.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use penstock_machine::{Bound, Machine};
use penstock_store::Store;
use penstock_types::Surface;
use tokio::sync::{Notify, watch};

use crate::certificate::Certificate;
use crate::keeper::Keeper;
use crate::live_requests::LiveRequests;
use crate::plugins::Hub;
use crate::reload_marks::Marks;
use crate::serving::Serving;
use penstock_auth::{Desk, Guard, Guarded, Identity, Principal};
use penstock_base::clock::unix_seconds;
use penstock_config::{Members, Snapshot};
use penstock_governed::{Governor, LimitState};
use penstock_http::{BodyBudget, HttpLimits};
use penstock_pool::weights_cache::{CacheCounts, WeightsCache};
use penstock_provider::{Provider, ProviderError};
use penstock_telemetry::{AccessLog, Gauge, Metrics, Tracer};
use penstock_upstream::Upstream;
use penstock_upstream::answer_memory::{AnswerBudget, AnswerMemory};
use penstock_upstream::reasoning_signer::{self, Signer};

/// Warns of a body budget above half of the memory limit of this process's cgroup: the kernel would end the process
/// before the budget refuses anybody.
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

/// Work beside requests that must end before the process does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Beside {
    /// Runner of batches and background responses.
    Batches,
    /// Reports of settled reservations to the next process.
    Settling,
    /// Answer to the client that asked for the upgrade.
    Upgrade,
}

/// State of the running gateway that all requests share; a reload swaps its [`Serving`].
pub struct Gateway {
    serving: ArcSwap<Serving>,
    /// Addresses of the providers whose names stand for several servers.
    members: ArcSwap<Members>,
    /// Counters and histograms of the process, for `/metrics`.
    pub metrics: Arc<Metrics>,
    /// Authentication state that outlives configs, with the throttle of failed attempts.
    pub guard: Guard,
    /// Handle on the access log, one JSON line per request.
    pub access_log: AccessLog,
    /// Source of request traces; without a collector no request has one.
    pub tracer: Tracer,
    /// Memory budget for the bodies of all requests together.
    pub bodies: BodyBudget,
    /// Memory budget for answers, or parts of them, that are held.
    pub(crate) answers: AnswerBudget,
    /// Registry of the requests in flight, for the admin API and cancellation.
    pub live: Arc<LiveRequests>,
    /// State shared by all plugins: connections, cache, background work.
    pub hub: Arc<Hub>,
    /// Counters of all limits, with reservations of the requests in flight.
    pub governor: Arc<Governor>,
    /// Version and reload state of the config, for the metrics.
    pub marks: Marks,
    /// Certificate of the TCP listener; empty where it speaks plain HTTP.
    pub(crate) certificate: OnceLock<Arc<Certificate>>,
    /// Certificate of the endpoint picker; empty where that speaks plain HTTP/2.
    pub(crate) picker_certificate: OnceLock<Arc<Certificate>>,
    /// True when another process serves: this one ends when its answers have.
    leaving: AtomicBool,
    /// False once this process begins no background work any more: it ends, or another one serves.
    begins_work: AtomicBool,
    /// Notification of [`Gateway::begin_no_work`].
    work_over: Notify,
    /// Whether each kind of [`Beside`] work has ended.
    rested: [AtomicBool; 3],
    /// Number of configs that have come into force; watchers wake when it rises.
    swaps: watch::Sender<u64>,
    keeper: Option<Arc<Keeper>>,
    /// Files of packed weights, for the metrics; `None`: none are kept.
    weights_cache: Option<WeightsCache>,
    /// Key of the signatures of reasoning, once it was read from the store.
    signing_key: tokio::sync::OnceCell<Arc<[u8]>>,
    /// Unix seconds at which the log last said that reasoning is not signed.
    unsigned_said: AtomicU64,
}

/// Name of the store's secret that signs reasoning.
const SIGNING_KEY: &str = "reasoning";
/// Seconds between two lines of the log that say that reasoning is not signed.
const UNSIGNED_SECONDS: u64 = 60;

impl Gateway {
    /// Gateway in front of the pools (each under the name of its card), the providers, and the config's models of them.
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
        let answers = AnswerBudget::new(config.http.answer_memory_bytes_max);
        let hub = Arc::default();
        let governor = Arc::new(Governor::new(metrics.clone()));
        let members = Members::default();
        let serving = Serving::new(Arc::new(config), pools, providers, &metrics, &hub, &members, None);
        Self {
            serving: ArcSwap::from_pointee(serving),
            members: ArcSwap::from_pointee(members),
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
            picker_certificate: OnceLock::new(),
            leaving: AtomicBool::new(false),
            begins_work: AtomicBool::new(true),
            work_over: Notify::new(),
            rested: [const { AtomicBool::new(true) }; 3],
            swaps: watch::Sender::new(0),
            keeper: None,
            weights_cache: None,
            signing_key: tokio::sync::OnceCell::new(),
            unsigned_said: AtomicU64::new(0),
        }
    }

    /// Adds a store to the gateway: files, batches and stored responses become available.
    pub fn with_store(self, store: Arc<dyn Store>) -> Self {
        Self { keeper: Some(Arc::new(Keeper::new(store))), ..self }
    }

    /// Adds the figures of the fleet's cache of packed weights to the metrics.
    pub fn with_weights_cache(self, weights_cache: Option<WeightsCache>) -> Self {
        Self { weights_cache, ..self }
    }

    /// Signer of a client's reasoning, for an API that has signatures. `None` without a store, and while it does not
    /// answer: reasoning is neither signed nor checked then.
    pub(crate) async fn signer(&self, surface: Surface, principal: &Principal) -> Option<Signer> {
        let store = match surface {
            Surface::Messages | Surface::CountTokens => &self.keeper.as_ref()?.store,
            _ => return None,
        };
        let key = self.signing_key.get_or_try_init(|| async {
            let mut fresh = [0; reasoning_signer::KEY_BYTES];
            getrandom::fill(&mut fresh).expect("the system has random numbers");
            store.secret(SIGNING_KEY, &fresh).await.map(Arc::<[u8]>::from)
        });
        match key.await {
            Ok(key) => Some(Signer::new(key.clone(), principal.tenant())),
            Err(error) => {
                if self.may_say_unsigned() {
                    tracing::warn!(%error, "the key that signs reasoning cannot be read from the store: thinking blocks are neither signed nor checked until it answers");
                }
                None
            }
        }
    }

    /// Returns true once a minute.
    fn may_say_unsigned(&self) -> bool {
        let now = unix_seconds();
        let said = self.unsigned_said.load(Ordering::Relaxed);
        now >= said + UNSIGNED_SECONDS
            && self.unsigned_said.compare_exchange(said, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// The gateway with a ledger in its store: amounts used before this process count against the limits.
    ///
    /// # Errors
    /// The system has no thread for the ledger.
    pub fn with_ledger(self) -> std::io::Result<Self> {
        if let Some(keeper) = &self.keeper {
            let serving = self.serving();
            let is_shared = serving.config.store.postgres.is_some();
            self.governor.keep_ledger(&keeper.store, serving.in_force(), is_shared)?;
        }
        Ok(self)
    }

    /// The gateway behind an `Arc`, with its models open to plugins.
    pub fn shared(self) -> Arc<Self> {
        let gateway = Arc::new(self);
        gateway.hub.serve(Arc::downgrade(&gateway) as _);
        gateway
    }

    /// Providers of another config; a provider that is the same in both configs is reused.
    ///
    /// # Errors
    /// [`ProviderError`] of the first that cannot be used.
    pub fn providers_of(&self, config: &Snapshot) -> Result<Vec<Arc<Provider>>, ProviderError> {
        let members = self.members.load().providers(&config.providers);
        penstock_provider::after(&members, self.serving.load().providers())
    }

    /// Puts another config in force, with its pools and providers. Open requests keep the config that they began with;
    /// targets that are the same in both keep their connections, health and counts.
    pub fn swap(&self, config: Snapshot, pools: Vec<Arc<dyn Upstream>>, providers: Vec<Arc<Provider>>) {
        warn_of_memory(&config);
        self.bodies.resize(config.http.body_memory_bytes_max, config.http.body_bytes_max);
        self.answers.resize(config.http.answer_memory_bytes_max);
        self.put(Arc::new(config), pools, providers);
    }

    /// Addresses of the providers whose names stand for several servers, as last looked up.
    pub fn members(&self) -> Arc<Members> {
        self.members.load_full()
    }

    /// Puts other addresses in force; the config stays. The caller lets no other config come into force meanwhile.
    ///
    /// # Errors
    /// [`ProviderError`] of the first that cannot be used; the addresses before stay.
    pub(crate) fn follow_members(&self, members: Members) -> Result<(), ProviderError> {
        let before = self.members.swap(Arc::new(members));
        let serving = self.serving();
        let providers = self.providers_of(&serving.config).inspect_err(|_| self.members.store(before))?;
        self.put(serving.config.clone(), serving.pools().to_vec(), providers);
        Ok(())
    }

    fn put(&self, config: Arc<Snapshot>, pools: Vec<Arc<dyn Upstream>>, providers: Vec<Arc<Provider>>) {
        let before = self.serving();
        let is_known = |new: &&Arc<Provider>| before.providers().iter().any(|old| Arc::ptr_eq(old, new));
        let new: Vec<_> = providers.iter().filter(|provider| !is_known(provider)).cloned().collect();
        self.pace_together(&new);
        let members = self.members.load();
        let serving = Serving::new(config, pools, providers, &self.metrics, &self.hub, &members, Some(&before));
        self.serving.store(Arc::new(serving));
        penstock_provider::discover::start(&new);
        penstock_provider::follow(&new);
        self.swaps.send_modify(|swaps| *swaps += 1);
    }

    /// Lets providers keep their pace together with other gateways, if counters are shared.
    pub fn pace_together(&self, providers: &[Arc<Provider>]) {
        if let Some(counters) = self.governor.shared_pace() {
            penstock_provider::pace_together(providers, &counters);
        }
    }

    /// Marks that another process serves from now on: background work is not begun here any more, open connections are
    /// still answered.
    pub(crate) fn leave(&self) {
        self.leaving.store(true, Ordering::SeqCst);
        self.begin_no_work();
    }

    /// Ends the begin of background work in this process: what waits is the next one's, or another gateway's.
    pub(crate) fn begin_no_work(&self) {
        self.begins_work.store(false, Ordering::SeqCst);
        self.work_over.notify_waiters();
        if let Some(keeper) = &self.keeper {
            keeper.wake.notify_one();
            keeper.wake_responses.notify_one();
        }
    }

    /// Reads the certificate again if its files have changed since.
    pub(crate) fn refresh_certificate(&self) {
        let certificates = self.certificate.get().into_iter().chain(self.picker_certificate.get());
        certificates.for_each(|certificate| certificate.refresh());
    }

    /// Returns true if another process has taken over and this one ends when its answers have.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::SeqCst)
    }

    /// Returns true if background work is begun here: this process does not end, and no other one has taken over.
    pub(crate) fn begins_work(&self) -> bool {
        self.begins_work.load(Ordering::SeqCst)
    }

    /// Waits until background work is not begun here any more. Cancel-safe.
    pub(crate) async fn work_over(&self) {
        let mut over = std::pin::pin!(self.work_over.notified());
        // Registered before the look, so that no notification is missed between the two.
        over.as_mut().enable();
        if self.begins_work() {
            over.await;
        }
    }

    /// Cancels the background work that runs here, because the process ends. To be called repeatedly: true once all of it
    /// is settled and handed on.
    pub(crate) fn stop_work(&self) -> bool {
        self.begin_no_work();
        self.live.stop_background() && self.is_rested(Beside::Batches)
    }

    /// Sets whether the work of kind `what` has ended.
    pub(crate) fn rest(&self, what: Beside, has_ended: bool) {
        self.rested[what as usize].store(has_ended, Ordering::SeqCst);
    }

    /// Returns true if the work of kind `what` has ended.
    pub(crate) fn is_rested(&self, what: Beside) -> bool {
        self.rested[what as usize].load(Ordering::SeqCst)
    }

    /// Channel that is notified of every config that comes into force.
    pub fn swaps(&self) -> watch::Receiver<u64> {
        self.swaps.subscribe()
    }

    /// Config in force; a request takes it once and keeps it.
    pub fn serving(&self) -> Arc<Serving> {
        self.serving.load_full()
    }

    /// Returns true if everything promised to clients is written: the limits' ledger, shared counters that answer, and the
    /// stored responses. For a gateway that ends: from the first call on, the limits keep nothing back.
    pub(crate) fn is_saved(&self) -> bool {
        self.governor.is_saved() && self.keeper.as_ref().is_none_or(|keeper| keeper.saving.is_idle())
    }

    /// Handle on the memory for held answers of a key; empty: no key is required.
    pub(crate) fn answer_memory(&self, key: &str, limits: &HttpLimits) -> AnswerMemory {
        AnswerMemory::new(&self.answers, key, limits)
    }

    /// All limits of the config in force, with reasons for those without effect.
    pub fn limits(&self) -> Vec<LimitState> {
        self.serving().effect().limits()
    }

    /// Desk that issues keys, if there is a store to keep them.
    pub fn desk(&self) -> Option<Desk> {
        self.keeper.as_ref().map(|keeper| Desk::new(keeper.store.clone(), &self.serving().config.auth_settings()))
    }

    /// Handle on the store; `None`: the gateway has no store.
    pub(crate) fn keeper(&self) -> Option<&Arc<Keeper>> {
        self.keeper.as_ref()
    }

    /// Wakes the runner of batches: one of them has changed in the store.
    pub fn wake_batches(&self) {
        self.keeper.iter().for_each(|keeper| keeper.wake.notify_one());
    }

    /// Writes out the buffers of the access log and of the plugins' files.
    pub(crate) fn flush_logs(&self) {
        self.access_log.flush();
        self.hub.flush();
    }

    /// All metrics as Prometheus text, gauges collected at this moment.
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
        if let Some(CacheCounts { hits, misses, bad, bytes }) = self.weights_cache.as_ref().map(WeightsCache::counts) {
            for (outcome, count) in [("hit", hits), ("miss", misses), ("bad", bad)] {
                gauges.push((Gauge::WeightsCacheReads, outcome.to_owned(), count as f64));
            }
            gauges.push((Gauge::WeightsCacheBytes, String::new(), bytes as f64));
        }
        self.metrics.render(&gauges)
    }
}

impl Guarded for Gateway {
    fn guard(&self) -> &Guard {
        &self.guard
    }

    fn identity(&self) -> Arc<Identity> {
        self.serving.load().identity.clone()
    }

    fn store(&self) -> Option<Arc<dyn Store>> {
        self.keeper.as_ref().map(|keeper| keeper.store.clone())
    }
}
