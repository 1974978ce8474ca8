//! One entry of the config: the gateway's hooks on one side, the ABI's callbacks on the other.
//!
//! ```text
//! on_request   proxy_on_context_create, proxy_on_request_headers, proxy_on_request_body (whole, at once)
//! on_head      proxy_on_response_headers
//! on_event     proxy_on_response_body, piece by piece, in the client's dialect
//! on_end       proxy_on_done, proxy_on_log, proxy_on_delete
//! tick         proxy_on_tick
//! ```
//!
//! A plugin waits for answers to its own calls, which are made here while nothing is locked. A plugin that pauses a
//! request without a call wants to see the body first, or waits for its timer.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::{HeaderMap, HeaderName, HeaderValue};
use penstock_plugins::{Hooks, Host, Needs, Plugin, RequestContext, Sees};

use super::fields::Fields;
use super::hooks::WasmHooks;
use super::outgoing::{OF_CONNECTIONS, Outgoing, Upstreams};
use super::pool::{Member, Pool};
use super::program::Program;
use super::shared::MetricKind;
use crate::WasmError;

/// Shortest period of a timer; the gateway may have a longer one.
const TICK_PERIOD_MIN: Duration = Duration::from_millis(10);
/// Interval at which a plugin without a timer is checked for one.
const TICK_PERIOD_IDLE: Duration = Duration::from_secs(1);

/// Part of an answer that a plugin sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Headers and body.
    Body,
    /// Headers.
    Headers,
    /// Only the end of the answer.
    Nothing,
}

/// Settings for what the plugin is shown. Kits export every callback, wanted or not, so the exports do not tell.
#[derive(Clone, Copy, Debug)]
pub struct Wishes {
    /// True where the plugin sees the bodies of requests.
    pub request_body: bool,
    /// Part of the answer that the plugin sees.
    pub answer: Shown,
}

/// One entry of the config.
pub struct WasmPlugin {
    core: Arc<Core>,
    /// Timer period that the plugin set on trial.
    period: Duration,
    revision: u64,
}

/// State that all requests of a plugin share.
pub(super) struct Core {
    pub(super) pool: Pool,
    pub(super) upstreams: Arc<Upstreams>,
    wishes: Wishes,
}

impl WasmPlugin {
    /// Plugin of a module that was started on trial.
    pub fn new(program: Arc<Program>, upstreams: Upstreams, wishes: Wishes, period: Duration, revision: u64) -> Self {
        Self {
            core: Arc::new(Core { pool: Pool::new(program), upstreams: Arc::new(upstreams), wishes }),
            period,
            revision,
        }
    }
}

impl Core {
    pub(super) fn has(&self, callback: &str) -> bool {
        self.pool.program().has(callback)
    }

    pub(super) fn name(&self) -> &str {
        &self.pool.program().identity().name
    }

    pub(super) fn wants_request_body(&self) -> bool {
        self.wishes.request_body && self.has("proxy_on_request_body")
    }

    pub(super) fn sees(&self) -> Sees {
        match self.wishes.answer {
            Shown::Body if self.has("proxy_on_response_body") => Sees::Bytes,
            Shown::Body | Shown::Headers if self.has("proxy_on_response_headers") => Sees::Head,
            _ => Sees::End,
        }
    }
}

#[async_trait]
impl Plugin for WasmPlugin {
    fn needs(&self) -> Needs {
        if self.core.wants_request_body() { Needs::Body } else { Needs::Facts }
    }

    fn begin(&self) -> Box<dyn Hooks> {
        Box::new(WasmHooks::new(self.core.clone()))
    }

    fn revision(&self) -> u64 {
        self.revision
    }

    fn tick_period(&self) -> Option<Duration> {
        if !self.core.has("proxy_on_tick") && !self.core.has("proxy_on_queue_ready") {
            return None;
        }
        Some(if self.period.is_zero() { TICK_PERIOD_IDLE } else { self.period.max(TICK_PERIOD_MIN) })
    }

    fn values(&self) -> Vec<(String, f64)> {
        let mut values = Vec::new();
        for metric in self.core.pool.program().metrics() {
            if metric.kind == MetricKind::Histogram {
                values.push((format!("{}_sum", metric.name), metric.value as f64));
                values.push((format!("{}_count", metric.name), metric.count as f64));
            } else {
                values.push((metric.name, metric.value as f64));
            }
        }
        values
    }

    async fn tick(&self, host: Arc<dyn Host>) {
        let plugin = self.core.name();
        if !self.period.is_zero()
            && let Err(error) = self.core.pool.wake(&host)
        {
            tracing::warn!(plugin, %error, "plugin could not be started");
        }
        let now = host.since_epoch();
        for member in self.core.pool.members() {
            match ring(&member, now, &self.core.upstreams, &host) {
                Ok(()) | Err(WasmError::Gone) => {}
                Err(error) => tracing::warn!(plugin, %error, "plugin trapped on its timer"),
            }
        }
    }
}

/// Runs the timer of a machine that is due; its calls run in the background.
fn ring(
    member: &Arc<Member>,
    now: Duration,
    upstreams: &Arc<Upstreams>,
    host: &Arc<dyn Host>,
) -> Result<(), WasmError> {
    let calls = member.with(host, |machine| {
        let period = Duration::from_millis(machine.tick_period_ms().into());
        if !period.is_zero() && member.due(now, period) {
            machine.tick()?;
        }
        Ok(machine.take_calls())
    })?;
    let mut outgoing = Outgoing::new(member.clone(), upstreams.clone(), host.clone());
    outgoing.begin(calls);
    outgoing.detach();
    Ok(())
}

/// Headers of the request, with the pseudo headers of HTTP/2, which plugins expect.
pub(super) fn request_fields(request: &RequestContext) -> Fields {
    let mut fields = Fields::default();
    fields.push(":method", "POST");
    fields.push(":path", request.info.route);
    fields.push(":scheme", "http");
    let authority = request.headers.get(http::header::HOST).map_or(&b"penstock"[..], |host| host.as_bytes());
    fields.push(":authority", authority.to_vec());
    for (name, value) in &request.headers {
        fields.push(name.as_str(), value.as_bytes().to_vec());
    }
    fields
}

/// Headers that go on, made of those that a plugin left. Headers of the connection stay as they were.
pub(super) fn request_headers(fields: &Fields, before: &HeaderMap) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(fields.len());
    for (name, value) in before.iter().filter(|(name, _)| OF_CONNECTIONS.contains(&name.as_str())) {
        headers.append(name.clone(), value.clone());
    }
    headers.extend(plain_fields(fields).map(|(name, value)| (Some(name), value)));
    headers
}

/// Further headers for providers, after a plugin has made `after` of `before`: those it added or changed, without those
/// it removed.
pub(super) fn sent(before: &HeaderMap, after: &HeaderMap, send: &mut Vec<(HeaderName, HeaderValue)>) {
    send.retain(|(name, _)| after.contains_key(name) || !before.contains_key(name));
    for name in after.keys().filter(|name| !before.get_all(*name).iter().eq(after.get_all(*name))) {
        send.retain(|(have, _)| have != name);
        send.extend(after.get_all(name).iter().map(|value| (name.clone(), value.clone())));
    }
}

/// Fields that can stand in a head that the gateway writes.
pub(super) fn plain_fields(fields: &Fields) -> impl Iterator<Item = (HeaderName, HeaderValue)> + '_ {
    let own = fields.iter().filter(|(name, _)| !name.starts_with(':') && !OF_CONNECTIONS.contains(name));
    own.filter_map(|(name, value)| Some((HeaderName::try_from(name).ok()?, HeaderValue::from_bytes(value).ok()?)))
}
