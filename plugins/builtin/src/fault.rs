//! Plugin `fault`: faults on purpose, to test clients: delays, refusals, answers that break off.
//!
//! The requests that it meets are drawn from a seed and the number of the request, so that a test meets the same ones
//! every time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use penstock_plugins::{
    After, Flow, Hooks, Host, Kind, Plugin, PluginError, Rejection, RejectionKind, RequestContext, Sees, Settings,
    Verdict,
};
use penstock_types::ChatEvent;

/// Plugin kind `fault`: builds plugins that delay, refuse or break answers on purpose.
pub(crate) struct Fault;

struct Config {
    percent: f64,
    seed: u64,
    latency: Duration,
    event_latency: Duration,
    status: Option<u16>,
    message: String,
    cut_after: Option<u64>,
    requests: AtomicU64,
}

impl Kind for Fault {
    fn name(&self) -> &'static str {
        "fault"
    }

    fn build(&self, settings: &Settings<'_>) -> Option<Arc<dyn Plugin>> {
        let config = Config {
            percent: settings.decimal("percent", 0.0..=100.0, 100.0),
            seed: settings.number("seed", 0..=u64::MAX >> 1, 0),
            latency: settings.millis("latency_ms", 0..=600_000, 0),
            event_latency: settings.millis("event_latency_ms", 0..=600_000, 0),
            status: settings.has("status").then(|| settings.number("status", 400..=599, 503) as u16),
            message: settings.text("message").unwrap_or_else(|| "A fault on purpose.".into()),
            cut_after: settings.has("cut_after").then(|| settings.number("cut_after", 0..=1_000_000, 0)),
            requests: AtomicU64::new(0),
        };
        Some(Arc::new(Faulty(Arc::new(config))))
    }
}

/// Well mixed bits of a number (SplitMix64, Steele et al. 2014).
fn mixed(number: u64) -> u64 {
    let mut bits = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

impl Config {
    /// Returns true if the draw injects a fault into the next request; a dry run does not advance the draw.
    fn draws(&self, dry_run: bool) -> bool {
        let number = self.requests.fetch_add(u64::from(!dry_run), Ordering::Relaxed);
        let drawn = mixed(self.seed ^ mixed(number)) >> 11;
        (drawn as f64) / ((1u64 << 53) as f64) * 100.0 < self.percent
    }
}

struct Faulty(Arc<Config>);

impl Plugin for Faulty {
    fn can_dry_run(&self) -> bool {
        true
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(Failing { config: self.0.clone(), host: None, events: 0 })
    }
}

struct Failing {
    config: Arc<Config>,
    /// Host, set where this request was drawn.
    host: Option<Arc<dyn Host>>,
    events: u64,
}

#[async_trait]
impl Hooks for Failing {
    async fn on_request(&mut self, request: &mut RequestContext) -> Result<Verdict, PluginError> {
        if !self.config.draws(request.info.dry_run) {
            return Ok(Verdict::Pass);
        }
        self.host = Some(request.host.clone());
        if self.config.latency > Duration::ZERO {
            request.host.sleep(self.config.latency).await;
        }
        Ok(match self.config.status {
            Some(status) => {
                Verdict::Reject(Rejection::new(RejectionKind::Unavailable, self.config.message.clone()).status(status))
            }
            None => Verdict::Pass,
        })
    }

    fn sees(&self) -> Sees {
        let looks = self.config.cut_after.is_some() || self.config.event_latency > Duration::ZERO;
        if looks && self.host.is_some() { Sees::Events } else { Sees::Nothing }
    }

    fn on_event(&mut self, events: &mut Vec<ChatEvent>, _: bool) -> Result<Flow, PluginError> {
        let left = self.config.cut_after.map(|cut| cut.saturating_sub(self.events));
        self.events += events.len() as u64;
        if let Some(left) = left.filter(|left| *left < events.len() as u64) {
            events.truncate(left as usize);
            return Ok(Flow::Reject(Rejection::new(RejectionKind::Internal, self.config.message.clone())));
        }
        match &self.host {
            Some(host) if self.config.event_latency > Duration::ZERO && !events.is_empty() => {
                let slept = host.sleep(self.config.event_latency);
                Ok(Flow::Wait(Box::pin(async move {
                    slept.await;
                    Ok(After::Go(Vec::new()))
                })))
            }
            _ => Ok(Flow::Go),
        }
    }
}

#[cfg(test)]
mod tests {
    use penstock_plugins::testing::{FakeHost, build, now, request};
    use penstock_types::Surface;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::streamed;

    fn asked(plugin: &Arc<dyn Plugin>, host: &Arc<FakeHost>) -> (Verdict, Box<dyn Hooks>) {
        let body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }] });
        let mut context = request(Surface::Chat, &body, host.clone());
        let mut hooks = plugin.begin();
        (now(hooks.on_request(&mut context)).expect("no failure"), hooks)
    }

    fn drawn(settings: &Value) -> Vec<bool> {
        let (plugin, host) = (build(&Fault, settings).expect("valid"), Arc::default());
        (0..400).map(|_| matches!(asked(&plugin, &host).0, Verdict::Reject(_))).collect()
    }

    #[test]
    fn a_seed_draws_the_same_requests() {
        let settings = json!({ "percent": 25, "status": 503, "seed": 7 });
        let first = drawn(&settings);
        assert_eq!(first, drawn(&settings));
        let share = first.iter().filter(|hit| **hit).count();
        assert!((70..130).contains(&share), "{share} of 400");
        assert_ne!(first, drawn(&json!({ "percent": 25, "status": 503, "seed": 8 })));
    }

    #[test]
    fn a_dry_run_takes_no_number() {
        let settings = json!({ "percent": 50, "status": 503, "seed": 7 });
        let expected = drawn(&settings);
        let (plugin, host) = (build(&Fault, &settings).expect("valid"), Arc::<FakeHost>::default());
        let is_hit = |dry_run: bool| {
            let body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }] });
            let mut context = request(Surface::Chat, &body, host.clone());
            let info = penstock_plugins::RequestInfo { dry_run, ..(*context.info).clone() };
            context.info = Arc::new(info);
            matches!(now(plugin.begin().on_request(&mut context)).expect("no failure"), Verdict::Reject(_))
        };
        for (at, expected) in expected.into_iter().enumerate() {
            assert_eq!([is_hit(true), is_hit(true), is_hit(false)], [expected; 3], "request {at}");
        }
    }

    #[test]
    fn a_request_waits_and_an_answer_breaks() {
        let host: Arc<FakeHost> = Arc::default();
        let plugin = build(&Fault, &json!({ "latency_ms": 70, "cut_after": 2 })).expect("valid");
        let (verdict, hooks) = asked(&plugin, &host);
        assert!(matches!(verdict, Verdict::Pass));
        assert_eq!(*host.slept.lock().expect("a test"), [Duration::from_millis(70)]);
        let got = streamed(hooks, &["a", "b", "c"]);
        assert_eq!(got.text, "ab");
        assert!(got.flow.starts_with("Reject"), "{}", got.flow);
    }
}
