//! Clients that follow a response that is streamed in the background: live from its log, and from the store once it has
//! ended.
//!
//! The process that answers a response keeps its events in a log (`event_log`); when the response ends, they go into the
//! store together with it. A client that follows at another gateway of the store, or after a restart, gets the events
//! from there.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderName, HeaderValue, header};
use penstock_proto::ErrorKind;
use penstock_store::{ResponseId, ResponseStatus, StoreError, Tenant};
use penstock_types::{ApiError, Dialect, error_body};
use tokio::time::{Instant, sleep_until};

use super::{Keeper, absent, failed};
use crate::event_log::{Behind, Log, rest};
use crate::gateway::Gateway;
use crate::handler::End;
use penstock_base::error::Failure;
use penstock_http::Exchange;
use penstock_http::exchange::Sent;
use penstock_upstream::answer_memory::Hold;

/// Interval at which the store is asked for the end of a response that another gateway may answer.
const LOOK: Duration = Duration::from_secs(2);

fn gone(next: u64) -> Failure {
    let (param, what) = match next.checked_sub(1) {
        None => ("stream", "the first events".to_owned()),
        Some(last) => ("starting_after", format!("the events behind {last}")),
    };
    let message = format!(
        "{param}: {what} are not kept any more (store.response_event_bytes_max); ask for the response without stream."
    );
    ApiError::invalid(param, message).into()
}

/// Client that follows a response.
pub(super) struct Follower<'a> {
    /// The gateway that serves the client.
    pub(super) gateway: &'a Gateway,
    /// Handle on the store.
    pub(super) keeper: &'a Keeper,
    /// Tenant of the client.
    pub(super) tenant: &'a Tenant,
    /// Response that is followed.
    pub(super) id: &'a ResponseId,
}

impl Follower<'_> {
    /// Sends the events of the response from number `next` on until it has ended. The client's leaving changes nothing
    /// for the response.
    pub(super) async fn follow(
        &self,
        exchange: &mut Exchange,
        mut log: Option<Arc<Log>>,
        mut next: u64,
    ) -> Result<(), End> {
        let heartbeat = self.gateway.serving().config.heartbeat;
        // The log is asked first, the store when it says no more.
        let mut changed = log.as_ref().map(|log| log.changes());
        let mut look = Instant::now();
        let mut life = Instant::now() + heartbeat;
        loop {
            if let Some(now) = &log {
                changed.iter_mut().for_each(|changed| drop(changed.borrow_and_update()));
                let Some(read) = now.read(next) else { return Err(self.broken(exchange, gone(next)).await) };
                next = read.next;
                // A client that has seen more than there is learns the end from the store.
                if read.behind == Behind::Nothing && !read.bytes.is_empty() {
                    begin(exchange).await?;
                    return Ok(exchange.write(read.bytes, true).await?);
                }
                if !read.bytes.is_empty() {
                    begin(exchange).await?;
                    exchange.write(read.bytes, false).await?;
                    life = Instant::now() + heartbeat;
                    look = Instant::now() + LOOK;
                    continue;
                }
                if read.behind != Behind::More {
                    (log, changed, look) = (None, None, Instant::now());
                }
            }
            if Instant::now() >= look {
                if self.ended(exchange, next, log.is_some()).await? {
                    return Ok(());
                }
                look = Instant::now() + LOOK;
                if log.is_none() {
                    log = self.keeper.logs.find(self.id);
                    changed = log.as_ref().map(|log| log.changes());
                    if log.is_some() {
                        continue;
                    }
                }
            }
            begin(exchange).await?;
            let more = async {
                match &mut changed {
                    Some(changed) => drop(changed.changed().await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = more => {}
                () = sleep_until(look.min(life)) => {}
                _ = exchange.gone() => return Err(End::Gone),
            }
            if Instant::now() >= life {
                exchange.write(Bytes::from_static(b": keep-alive\n\n"), false).await?;
                life = Instant::now() + heartbeat;
            }
        }
    }

    /// Sends the rest of a response that has ended; `false`: it has not, as far as the store says. A stream that has begun, or
    /// whose response is made in this process (`is_live`), goes on while the store is away.
    async fn ended(&self, exchange: &mut Exchange, next: u64, is_live: bool) -> Result<bool, End> {
        let waits = is_live || exchange.sent() == Sent::Begun;
        match self.replay(next, waits).await {
            Ok(None) => Ok(false),
            Ok(Some((rest, _hold))) => {
                begin(exchange).await?;
                exchange.write(rest, true).await?;
                Ok(true)
            }
            Err(failure) => Err(self.broken(exchange, failure).await),
        }
    }

    /// The events of a response that has ended, from number `next` on, and their memory; `None`: it has not ended, or the
    /// store does not say and `waits` for it.
    async fn replay(&self, next: u64, waits: bool) -> Result<Option<(Bytes, Hold)>, Failure> {
        let store = &self.keeper.store;
        let said = |error: StoreError| if waits { Ok(None) } else { Err(failed(error)) };
        let found = match store.response_state(self.tenant, self.id).await {
            Ok(found) => found.ok_or_else(|| absent("Response", self.id.as_str()))?,
            Err(error) => return said(error),
        };
        if found.status != ResponseStatus::Ended {
            return Ok(None);
        }
        let mut hold = self.gateway.answer_memory(self.tenant.as_str(), &self.gateway.serving().config.http).hold();
        hold.cover(2 * found.event_bytes as usize)?;
        let kept = match store.response_events(self.tenant, self.id).await {
            Ok(kept) => kept.filter(|kept| !kept.is_empty()).ok_or_else(not_streamed)?,
            Err(error) => return said(error),
        };
        Ok(Some((rest(&kept, next).ok_or_else(|| gone(next))?, hold)))
    }

    /// Tells a client of a failure: as an answer, or as the last event of a stream that breaks.
    async fn broken(&self, exchange: &mut Exchange, failure: Failure) -> End {
        if exchange.sent() == Sent::Begun {
            let mut last = BytesMut::new();
            error_body::error_event(Dialect::OpenAi, failure.shape(), &failure.message, &mut last);
            if exchange.write(last.freeze(), false).await.is_err() {
                return End::Gone;
            }
        }
        End::Failed(failure)
    }
}

/// Refusal to stream a response that was not made for it.
pub(super) fn not_streamed() -> Failure {
    let message = "stream: only a response that was made with background and stream can be streamed again.";
    Failure::new(ErrorKind::InvalidRequest, message).param("stream")
}

async fn begin(exchange: &mut Exchange) -> Result<(), End> {
    if exchange.sent() != Sent::Nothing {
        return Ok(());
    }
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    exchange.begin_stream(&headers).await?;
    Ok(exchange.write(Bytes::new(), false).await?)
}
