//! A pool's place among the upstreams, which stays while the pool in it is replaced.

use std::sync::Arc;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use penstock_types::{DetokenizeRequest, TokenizeRequest};

use penstock_base::error::Failure;
use penstock_generate::PoolUpstream;
use penstock_kv_feed::Feed;
use penstock_telemetry::Gauge;
use penstock_upstream::Forward;
use penstock_upstream::Forwarded;
use penstock_upstream::call::Call;
use penstock_upstream::{Card, Events, Open, Origin, Prepared, Upstream};

/// Upstream that answers for a pool at the moment. An open answer keeps the upstream that it began with.
pub(super) struct Slot<U = PoolUpstream>(ArcSwap<U>);

impl<U: Upstream> Slot<U> {
    pub(super) fn new(first: Arc<U>) -> Arc<Self> {
        Arc::new(Self(ArcSwap::new(first)))
    }

    /// Puts another upstream in place for requests from now on, and returns the old one.
    pub(super) fn replace(&self, next: Arc<U>) -> Arc<U> {
        self.0.swap(next)
    }

    /// Upstream that answers at the moment.
    pub(super) fn now(&self) -> Arc<U> {
        self.0.load_full()
    }
}

/// Call that the upstream of a slot has measured.
struct SlotOpener<U> {
    slot: Arc<Slot<U>>,
    upstream: Arc<U>,
    opener: Box<dyn Open>,
}

#[async_trait]
impl<U: Upstream> Open for SlotOpener<U> {
    /// Starts the call over its measurement, unless the pool was replaced since: the old pool takes nothing new, and the prompt's tokens
    /// may be those of another model.
    async fn open(self: Box<Self>, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        let now = self.slot.now();
        match Arc::ptr_eq(&now, &self.upstream) {
            true => self.opener.open(call, origin).await,
            false => now.open(call, origin).await,
        }
    }
}

#[async_trait]
impl<U: Upstream> Upstream for Slot<U> {
    fn card(&self) -> Card {
        self.now().card()
    }

    fn unready(&self) -> Option<String> {
        self.now().unready()
    }

    fn is_loaded(&self) -> bool {
        self.now().is_loaded()
    }

    async fn open(&self, call: Arc<Call>, origin: Origin) -> Result<Box<dyn Events>, Failure> {
        self.now().open(call, origin).await
    }

    async fn count(&self, call: Arc<Call>) -> Result<Option<u64>, Failure> {
        self.now().count(call).await
    }

    async fn measure(self: Arc<Self>, call: &Call) -> Result<Prepared, Failure> {
        let upstream = self.now();
        let Prepared { measured, opener } = upstream.clone().measure(call).await?;
        let opener = opener.map(|opener| Box::new(SlotOpener { slot: self, upstream, opener }) as Box<dyn Open>);
        Ok(Prepared { measured, opener })
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

    fn worker_gauges(&self, out: &mut dyn FnMut(Gauge, &str, f64)) {
        self.now().worker_gauges(out);
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;
    use penstock_http::{Body, BodyBudget};
    use penstock_proto::ErrorKind;
    use penstock_types::Surface;
    use penstock_types::ask::Ask;
    use penstock_upstream::not_forwarded;

    use super::*;

    /// Upstream that refuses every call and says who refused it.
    struct Named(&'static str);

    /// Start of a call that the named upstream has measured.
    struct Over(&'static str);

    fn refused<T>(words: String) -> Result<T, Failure> {
        Err(Failure::new(ErrorKind::InvalidRequest, words))
    }

    #[async_trait]
    impl Open for Over {
        async fn open(self: Box<Self>, _: Arc<Call>, _: Origin) -> Result<Box<dyn Events>, Failure> {
            refused(format!("{} over its measurement", self.0))
        }
    }

    #[async_trait]
    impl Upstream for Named {
        fn card(&self) -> Card {
            Card { id: self.0.into(), created: 0, context_tokens: 0, task: None, parent: None }
        }

        fn unready(&self) -> Option<String> {
            None
        }

        async fn open(&self, _: Arc<Call>, _: Origin) -> Result<Box<dyn Events>, Failure> {
            refused(format!("{} anew", self.0))
        }

        async fn count(&self, _: Arc<Call>) -> Result<Option<u64>, Failure> {
            Ok(None)
        }

        async fn measure(self: Arc<Self>, _: &Call) -> Result<Prepared, Failure> {
            Ok(Prepared { measured: None, opener: Some(Box::new(Over(self.0))) })
        }

        async fn forward(&self, _: Arc<Forward>) -> Result<Forwarded, Failure> {
            Err(not_forwarded())
        }

        async fn tokenize(&self, _: TokenizeRequest) -> Result<Vec<u8>, Failure> {
            Err(not_forwarded())
        }

        async fn detokenize(&self, _: DetokenizeRequest) -> Result<Vec<u8>, Failure> {
            Err(not_forwarded())
        }

        fn feed(&self) -> Option<Arc<Feed>> {
            None
        }

        fn gauges(&self, _: &mut dyn FnMut(Gauge, f64)) {}
    }

    #[tokio::test]
    async fn a_call_that_was_measured_before_its_pool_was_replaced_is_opened_anew() {
        let lease = BodyBudget::new(1 << 20, 1 << 20).lease();
        let body = Body { bytes: r#"{"model":"m","messages":[]}"#.into(), lease };
        let call =
            Call::new(Ask::new(Surface::Chat), body, "req_1".into(), HeaderMap::new(), penstock_dialects::decode)
                .await
                .expect("a call");
        let (call, slot) = (Arc::new(call), Slot::new(Arc::new(Named("first"))));
        let measured = || async { slot.clone().measure(&call).await.expect("measured").opener.expect("an opener") };
        let answer = |opener: Box<dyn Open>| async {
            opener.open(call.clone(), Origin::default()).await.err().expect("refused").message
        };
        assert_eq!(&*answer(measured().await).await, "first over its measurement");
        let before = measured().await;
        slot.replace(Arc::new(Named("second")));
        assert_eq!(&*answer(before).await, "second anew");
        assert_eq!(&*answer(measured().await).await, "second over its measurement");
    }
}
