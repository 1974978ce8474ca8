//! A pool's place among the upstreams, which stays while the pool in it is replaced.

use std::sync::Arc;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use penstock_dialects::openai::{DetokenizeRequest, TokenizeRequest};

use penstock_base::error::Failure;
use penstock_generate::PoolUpstream;
use penstock_kv_feed::Feed;
use penstock_telemetry::Gauge;
use penstock_upstream::Forward;
use penstock_upstream::Forwarded;
use penstock_upstream::call::Call;
use penstock_upstream::{Card, Events, Origin, Prepared, Upstream};

/// Upstream that answers for a pool at the moment. An open answer keeps the upstream that it began with.
pub(super) struct Slot(ArcSwap<PoolUpstream>);

impl Slot {
    pub(super) fn new(first: Arc<PoolUpstream>) -> Arc<Self> {
        Arc::new(Self(ArcSwap::new(first)))
    }

    /// Puts another upstream in place for requests from now on, and returns the old one.
    pub(super) fn replace(&self, next: Arc<PoolUpstream>) -> Arc<PoolUpstream> {
        self.0.swap(next)
    }

    fn now(&self) -> Arc<PoolUpstream> {
        self.0.load_full()
    }
}

#[async_trait]
impl Upstream for Slot {
    fn card(&self) -> Card {
        self.now().card()
    }

    fn unready(&self) -> Option<String> {
        self.now().unready()
    }

    async fn open(&self, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        self.now().open(call, origin).await
    }

    async fn count(&self, call: Arc<Call>) -> Result<Option<u64>, Failure> {
        self.now().count(call).await
    }

    async fn measure(self: Arc<Self>, call: &Call) -> Result<Prepared, Failure> {
        self.now().measure(call).await
    }

    async fn forward(&self, forward: Arc<Forward>) -> Result<Forwarded, Failure> {
        self.now().forward(forward).await
    }

    async fn tokenize(&self, request: TokenizeRequest) -> Result<Vec<u8>, Failure> {
        self.now().tokenize(request).await
    }

    async fn detokenize(&self, request: DetokenizeRequest) -> Result<Vec<u8>, Failure> {
        self.now().detokenize(request).await
    }

    fn feed(&self) -> Option<Arc<Feed>> {
        self.now().feed()
    }

    fn gauges(&self, out: &mut dyn FnMut(Gauge, f64)) {
        self.now().gauges(out);
    }
}
