//! Answers to calls without a connected client: the same stages from the route on, and no client to write to.
//!
//! Batches and responses in the background use them. The rights of the key and the form of the answer are decided by
//! the same code as for live requests; only the pump differs.

use std::future::poll_fn;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, Method};
use penstock_proto::ErrorKind;
use penstock_types::{ChatEvent, Dialect};

use crate::admit::admit;
use crate::answer::Answer;
use crate::gateway::Gateway;
use crate::live_requests::{About, Entry};
use crate::plugins::{Chain, Models};
use penstock_auth::Principal;
use penstock_auth::route::Route;
use penstock_base::error::Failure;
use penstock_governed::{Plain, Reservation, Uses};
use penstock_http::{BodyLease, cancel};
use penstock_relay::models::Entry as ModelEntry;
use penstock_telemetry::Trace;
use penstock_telemetry::trace::Value;
use penstock_upstream::Origin;
use penstock_upstream::answer_memory::{AnswerMemory, Hold};
use penstock_upstream::call::Call;

/// The whole answer to `call`, by `deadline`. Dropping the future cancels the call upstream, wherever it is.
///
/// # Errors
/// The failure that a client would have been told; a call for a stream is one.
pub(crate) async fn answer_whole(
    gateway: &Gateway,
    principal: &Arc<Principal>,
    call: Call,
    deadline: Option<Instant>,
) -> Result<Whole, Failure> {
    answer_events(gateway, principal, call, deadline, &mut |_| Ok(())).await
}

/// Whole answer of a call that runs in the background.
pub(crate) struct Whole {
    /// Body of the answer as the client would have got it.
    body: Bytes,
    /// Memory charge of the body, of no bytes so far.
    hold: Hold,
    /// Most bytes that the charge can ever be.
    hold_bytes_max: usize,
}

impl Whole {
    /// An answer whose body is to be charged to `memory`, which is of no key.
    fn new(body: Bytes, memory: &AnswerMemory) -> Self {
        Self { body, hold: memory.hold(), hold_bytes_max: memory.hold_bytes_max() }
    }

    /// The body, once there is memory for it, and the charge, to be kept as long as the body is. A body that is larger
    /// than the whole memory is charged as all of it. The wait has no bound, and neither a deadline nor a cancel of the
    /// call ends it: the answer was paid for, and no client waits for it.
    pub(crate) async fn charged(self) -> (Bytes, Hold) {
        let Self { body, mut hold, hold_bytes_max } = self;
        hold.wait(body.len().min(hold_bytes_max)).await;
        (body, hold)
    }
}

/// Observer of every event; its error ends the answer.
pub(crate) type Take<'a> = &'a mut (dyn FnMut(&ChatEvent) -> Result<(), Failure> + Send);

/// The whole answer to `call`, like [`answer_whole`], with every event shown to `take`.
pub(crate) async fn answer_events(
    gateway: &Gateway,
    principal: &Arc<Principal>,
    call: Call,
    deadline: Option<Instant>,
    take: Take<'_>,
) -> Result<Whole, Failure> {
    if call.stream {
        let failure = Failure::new(ErrorKind::InvalidRequest, "stream: only false is possible without a connection.");
        return Err(failure.param("stream"));
    }
    let about = About {
        request_id: call.request_id.clone(),
        route: Route::Ask(call.ask.clone()).label(),
        client: None,
        background: true,
    };
    let (entry, cancelled) = gateway.live.begin(about, principal);
    tokio::select! {
        biased;
        answered = timed(gateway, principal, call, deadline, take, &entry) => answered,
        by = cancelled => Err(cancel::failure(by)),
    }
}

async fn timed(
    gateway: &Gateway,
    principal: &Arc<Principal>,
    call: Call,
    deadline: Option<Instant>,
    take: Take<'_>,
    entry: &Entry,
) -> Result<Whole, Failure> {
    let answered = collect(gateway, principal, call, deadline, take, entry);
    let Some(deadline) = deadline else { return answered.await };
    let over = |_| Failure::new(ErrorKind::DeadlineExceeded, "There was no answer before the deadline.");
    tokio::time::timeout_at(deadline.into(), answered).await.map_err(over)?
}

async fn collect(
    gateway: &Gateway,
    principal: &Arc<Principal>,
    mut call: Call,
    deadline: Option<Instant>,
    take: Take<'_>,
    live: &Entry,
) -> Result<Whole, Failure> {
    call.signer = gateway.signer(call.ask.surface, principal).await;
    let admitted = admit(gateway, &gateway.serving(), principal, call).await?;
    live.asks(&admitted.entry.name, false);
    let memory = gateway.answer_memory(principal.tenant(), &gateway.serving().config.http);
    let mut answer = Answer::new(admitted.call.clone(), memory.hold());
    let trace = gateway.tracer.begin(&HeaderMap::new(), Instant::now());
    let root = trace.map(|trace| Root {
        gateway,
        name: format!("{} {}", admitted.call.ask.surface.operation(), admitted.entry.name),
        trace,
    });
    let trace = root.as_ref().map(|root| root.trace.clone());
    let (tenant, weight) = (principal.tenant().to_owned(), principal.weight);
    let mut events =
        admitted.open(Origin { tenant, weight, deadline, trace, memory: memory.clone(), ..Origin::default() }).await?;
    let (mut batch, mut finished) = (Vec::new(), 0);
    loop {
        let more = poll_fn(|context| events.poll_events(context, &mut batch)).await?;
        finished += batch.iter().filter(|event| matches!(event, ChatEvent::Finish { .. })).count();
        batch.iter().try_for_each(&mut *take).map_err(|failure| events.course().not_held(failure))?;
        live.progress(events.facts());
        if live.answers() {
            live.answered_by(events.course().target);
        }
        let made = answer.events(&mut batch, events.facts(), more);
        made.map_err(|failure| events.course().not_held(failure))?;
        if !more {
            break;
        }
    }
    if !answer.is_raw() && finished < answer.choices() {
        return Err(Failure::internal("the upstream ended before all choices had finished"));
    }
    let body = answer.whole(&|choice| events.score(choice));
    let body = body.ok_or_else(|| Failure::internal("an answer without all its choices"))?;
    // Of no key's share: a body that is larger than the share would be waited for in vain.
    Ok(Whole::new(body, &gateway.answer_memory("", &gateway.serving().config.http)))
}

#[async_trait]
impl Models for Gateway {
    fn lease(&self) -> BodyLease {
        self.bodies.lease()
    }

    async fn events(
        &self,
        principal: &Arc<Principal>,
        call: Call,
        deadline: Instant,
    ) -> Result<Vec<ChatEvent>, Failure> {
        let mut events = Vec::new();
        let mut take = |event: &ChatEvent| {
            events.push(event.clone());
            Ok(())
        };
        answer_events(self, principal, call, Some(deadline), &mut take).await?;
        Ok(events)
    }

    async fn admit_operation(
        &self,
        path: &str,
        model: &str,
        principal: &Principal,
        from: Option<IpAddr>,
    ) -> Result<(ModelEntry, Option<Reservation>), Failure> {
        let serving = self.serving();
        let entry = serving.entry(model, principal)?;
        let route = Route::parse(&Method::POST, path)?.label();
        let plain = Plain { uses: Uses::ByPlugin, dialect: Dialect::OpenAi, from, route };
        let held = penstock_governed::admit_plain(&self.governor, &serving.rules, principal, &entry, &plain).await?;
        Ok((entry, held))
    }

    fn plugins(&self) -> Arc<Chain> {
        self.serving().plugins.clone()
    }
}

/// Guard that ends the trace of such an answer, however it ends.
struct Root<'a> {
    gateway: &'a Gateway,
    name: String,
    trace: Arc<Trace>,
}

impl Drop for Root<'_> {
    fn drop(&mut self) {
        let attributes = vec![("penstock.background", Value::Bool(true))];
        self.gateway.tracer.end(&self.trace, std::mem::take(&mut self.name), attributes, None);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use penstock_http::HttpLimits;
    use penstock_upstream::answer_memory::{ANSWER_BYTES_MAX, AnswerBudget};

    use super::*;

    #[tokio::test]
    async fn a_body_larger_than_the_whole_memory_waits_for_all_of_it_and_no_longer() {
        let budget = AnswerBudget::new(ANSWER_BYTES_MAX);
        let memory = AnswerMemory::new(&budget, "", &HttpLimits::default());
        let mut other = memory.hold();
        other.cover(1 << 20).expect("memory");
        let whole = Whole::new(Bytes::from(vec![0_u8; ANSWER_BYTES_MAX + 1]), &memory);
        let charged = tokio::spawn(whole.charged());
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(!charged.is_finished(), "another answer holds some");
        drop(other);
        let charged = tokio::time::timeout(Duration::from_secs(30), charged).await.expect("in time");
        let (body, hold) = charged.expect("no panic");
        assert_eq!((body.len(), budget.bytes_held()), (ANSWER_BYTES_MAX + 1, ANSWER_BYTES_MAX));
        drop(hold);
        assert_eq!(budget.bytes_held(), 0);
    }
}
