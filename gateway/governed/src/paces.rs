//! Pace of providers' keys, counted by all gateways together: the shared counters behind the providers' seam.

use std::sync::Arc;

use async_trait::async_trait;
use penstock_govern::{Claim, Measure, OnStoreFailure, Span, Unit};
use penstock_provider::{SharedAnswer, SharedAsk, SharedHold, SharedPace};

use super::Governor;
use super::shared::{Portion, Shared};

/// Name of the pace among the limits' counters; ids of limits have no spaces.
const NAME: &str = "provider pace";

struct Paces {
    shared: Arc<Shared>,
    name: Arc<str>,
}

struct Held {
    shared: Arc<Shared>,
    portions: Vec<Portion>,
}

impl Governor {
    /// Counters by which providers pace together; `None`: this gateway counts alone.
    pub fn shared_pace(&self) -> Option<Arc<dyn SharedPace>> {
        Some(Arc::new(Paces { shared: self.shared.get()?.clone(), name: NAME.into() }))
    }
}

#[async_trait]
impl SharedPace for Paces {
    fn is_up(&self) -> bool {
        self.shared.is_up()
    }

    async fn take(&self, asked: &SharedAsk<'_>) -> SharedAnswer {
        let claim = |unit, max, amount| Claim {
            limit: &self.name,
            subject: asked.key,
            measure: Measure { unit, span: Span::Minute, max },
            amount,
            tag: 0,
        };
        let mut claims = Vec::with_capacity(2);
        if asked.requests_per_minute > 0 {
            claims.push(claim(Unit::Requests, asked.requests_per_minute, 1));
        }
        if asked.tokens_per_minute > 0 {
            claims.push(claim(Unit::Tokens, asked.tokens_per_minute, asked.tokens));
        }
        let Ok(portions) = self.shared.take(&claims, |_| OnStoreFailure::Open).await else { return SharedAnswer::Full };
        let is_counted = portions.iter().all(Portion::is_counted);
        let held = Box::new(Held { shared: self.shared.clone(), portions });
        if is_counted { SharedAnswer::Counted(held) } else { SharedAnswer::Away(held) }
    }
}

impl SharedHold for Held {
    fn settle(self: Box<Self>, is_sent: bool, tokens: Option<u64>) {
        let requests = u64::from(is_sent);
        self.shared.settle(self.portions, |_, unit| match unit {
            Unit::Requests => Some(requests),
            _ => tokens,
        });
    }
}
