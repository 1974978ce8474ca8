//! Calls that plugins make: each goes to an endpoint that the settings name, by the gateway's client, and its answer
//! comes back to the machine that asked. Dropped calls are answered as failed, so a plugin never keeps a call that is
//! not under way.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method};
use penstock_plugins::{BoxFuture, Endpoint, Host, HttpAsk};

use super::fields::Fields;
use super::pool::Member;
use super::state::{Call, CallAnswer};
use crate::WasmError;

/// Largest answer to a call, in bytes.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// Timeout of a call that names none.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(5);
const TIMEOUT_MAX: Duration = Duration::from_secs(60);

/// Header fields that belong to a connection, which is the gateway's.
pub(super) const OF_CONNECTIONS: [&str; 8] =
    ["host", "content-length", "connection", "transfer-encoding", "te", "trailer", "upgrade", "keep-alive"];

/// Endpoints by the names that the settings give them.
pub(super) type Upstreams = Vec<(String, Endpoint)>;

/// Calls under way for one machine.
pub(super) struct Outgoing {
    member: Arc<Member>,
    upstreams: Arc<Upstreams>,
    host: Arc<dyn Host>,
    calls: Vec<(u32, BoxFuture<CallAnswer>)>,
}

impl Outgoing {
    /// Set of calls without any.
    pub(super) fn new(member: Arc<Member>, upstreams: Arc<Upstreams>, host: Arc<dyn Host>) -> Self {
        Self { member, upstreams, host, calls: Vec::new() }
    }

    /// Returns true if there are no calls.
    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Adds calls; they are started when they are polled.
    pub(super) fn begin(&mut self, calls: Vec<Call>) {
        for call in calls {
            let id = call.id;
            let (upstreams, host) = (self.upstreams.clone(), self.host.clone());
            self.calls.push((id, Box::pin(async move { perform(call, &upstreams, &host).await.unwrap_or_default() })));
        }
    }

    /// Moves all calls into a new set.
    pub(super) fn take(&mut self) -> Outgoing {
        let calls = std::mem::take(&mut self.calls);
        let (member, upstreams, host) = (self.member.clone(), self.upstreams.clone(), self.host.clone());
        Outgoing { member, upstreams, host, calls }
    }

    /// Lets the calls run in the background, if the gateway has room for that.
    pub(super) fn detach(&mut self) {
        if self.calls.is_empty() {
            return;
        }
        let (host, calls) = (self.host.clone(), self.take());
        if !host.spawn(Box::pin(calls.finish())) {
            tracing::debug!("background call of a plugin dropped: too many are open");
        }
    }

    /// Waits for the first answer. Cancel-safe: a call that has not been answered stays.
    pub(super) async fn next(&mut self) -> Option<(u32, CallAnswer)> {
        if self.calls.is_empty() {
            return None;
        }
        let calls = &mut self.calls;
        let (index, answer) = poll_fn(|context| {
            for (index, (_, call)) in calls.iter_mut().enumerate() {
                if let Poll::Ready(answer) = Pin::new(call).poll(context) {
                    return Poll::Ready((index, answer));
                }
            }
            Poll::Pending
        })
        .await;
        let (id, _) = self.calls.swap_remove(index);
        Some((id, answer))
    }

    /// Runs all calls to the end, and those that follow from their answers. For background work.
    pub(super) async fn finish(mut self) {
        while let Some((id, answer)) = self.next().await {
            match self.tell(id, answer) {
                Ok(()) => {}
                Err(error) => {
                    tracing::warn!(%error, "plugin trapped on the answer to its own call");
                    return;
                }
            }
        }
    }

    /// Tells the plugin of an answer, and begins the calls that follow from it.
    pub(super) fn tell(&mut self, id: u32, answer: CallAnswer) -> Result<(), WasmError> {
        let calls =
            self.member.with(&self.host, |machine| machine.call_answered(id, answer).map(|()| machine.take_calls()))?;
        self.begin(calls);
        Ok(())
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        for (id, _) in std::mem::take(&mut self.calls) {
            // No request waits for this callback; a plugin that breaks in it shows that at the next one.
            let _: Result<(), WasmError> =
                self.member.with(&self.host, |machine| machine.call_answered(id, CallAnswer::default()));
        }
    }
}

async fn perform(call: Call, upstreams: &Upstreams, host: &Arc<dyn Host>) -> Option<CallAnswer> {
    let (_, endpoint) = upstreams.iter().find(|(name, _)| *name == call.upstream)?;
    let ask = ask(call)?;
    let answer = host
        .http(endpoint, ask)
        .await
        .inspect_err(|error| tracing::debug!(%error, "HTTP call of a plugin failed"))
        .ok()?;
    let mut headers = Fields::default();
    headers.push(":status", answer.status.to_string());
    for (name, value) in &answer.headers {
        headers.add(name.as_str().as_bytes(), Bytes::copy_from_slice(value.as_bytes())).ok()?;
    }
    Some(CallAnswer { headers, trailers: Fields::default(), body: answer.body })
}

fn ask(call: Call) -> Option<HttpAsk> {
    let method = Method::from_bytes(&call.headers.get(":method")?).ok()?;
    let path = std::str::from_utf8(&call.headers.get(":path")?).ok()?.to_owned();
    let fields = call.headers.iter().filter(|(name, _)| !name.starts_with(':') && !OF_CONNECTIONS.contains(name));
    let read =
        |(name, value): (&str, &Bytes)| Some((HeaderName::try_from(name).ok()?, HeaderValue::from_bytes(value).ok()?));
    let headers: Option<Vec<_>> = fields.map(read).collect();
    let timeout = match call.timeout_ms {
        0 => TIMEOUT_DEFAULT,
        timeout_ms => Duration::from_millis(timeout_ms.into()).min(TIMEOUT_MAX),
    };
    Some(HttpAsk { method, path, headers: headers?, body: call.body, timeout, bytes_max: ANSWER_BYTES_MAX })
}
