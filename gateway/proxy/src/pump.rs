//! Events out to the client, whole or streamed: one loop.
//!
//! The head of a stream waits for the first token, or the commit time, so that a failure before it keeps its own
//! status. Events that are there at once go out in one write; the next events are taken only when the write is done, so
//! a slow reader slows its own sequence and nothing else (backpressure). The client is watched in every state. A stream
//! that fails after its head ends in an error event and broken framing, never cleanly.

use std::future::poll_fn;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};
use penstock_types::ChatEvent;
use tokio::time::{Instant, sleep_until};

use crate::answer::Answer;
use crate::handler::End;
use crate::request_log::Trail;
use penstock_base::error::Failure;
use penstock_http::Exchange;
use penstock_http::cancel;
use penstock_http::exchange::Sent;
use penstock_upstream::{Events, Facts};

/// Sends the answer; returns `Ok` when the client has all of it.
pub async fn run(
    exchange: &mut Exchange,
    events: &mut dyn Events,
    answer: &mut Answer,
    trail: &mut Trail,
    commit: Duration,
    heartbeat: Duration,
) -> Result<(), End> {
    let mut batch = Vec::new();
    let mut due = exchange.started + commit;
    let mut timer = Box::pin(sleep_until(due));
    loop {
        let more = tokio::select! {
            biased;
            more = poll_fn(|context| events.poll_events(context, &mut batch)) => more,
            _ = exchange.gone() => return Err(gone(exchange, answer, trail, events.facts()).await),
            () = timer.as_mut(), if answer.is_stream() => {
                // The timer is moved only when it fires: a busy stream never touches it.
                if Instant::now() >= due {
                    let sign = match exchange.sent() {
                        Sent::Nothing => answer.opening(),
                        _ => answer.sign_of_life(),
                    };
                    signal_life(exchange, answer.content_type(), sign, events.headers()).await?;
                    due = Instant::now() + heartbeat;
                }
                timer.as_mut().reset(due);
                continue;
            }
        };
        let more = match more {
            Ok(more) => more,
            Err(failure) => return Err(fail(exchange, answer, &mut batch, trail, failure, events.facts()).await),
        };
        trail.events(&batch);
        note(trail, events);
        let bytes = match answer.events(&mut batch, events.facts(), more) {
            Ok(bytes) => bytes,
            Err(failure) => {
                batch.clear();
                let failure = events.course().not_held(failure);
                return Err(fail(exchange, answer, &mut batch, trail, failure, events.facts()).await);
            }
        };
        if let Some(bytes) = bytes {
            begin(exchange, answer.content_type(), events.headers()).await?;
            exchange.write(bytes, false).await?;
            due = Instant::now() + heartbeat;
        }
        if !more {
            return end(exchange, events, answer, trail).await;
        }
    }
}

/// Ends the answer; an upstream that stopped before all choices had finished is a failure.
async fn end(
    exchange: &mut Exchange,
    events: &mut dyn Events,
    answer: &mut Answer,
    trail: &mut Trail,
) -> Result<(), End> {
    if !answer.is_raw() && trail.finished() < answer.choices() {
        let failure = Failure::internal("the upstream ended before all choices had finished");
        return Err(fail(exchange, answer, &mut Vec::new(), trail, failure, events.facts()).await);
    }
    if answer.is_stream() {
        begin(exchange, answer.content_type(), events.headers()).await?;
        let mut last = answer.done();
        if let Some(epilogue) = events.epilogue().filter(|_| answer.takes_comments()) {
            last = [last, epilogue].concat().into();
        }
        return Ok(exchange.write(last, true).await?);
    }
    let mut headers = vec![(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    headers.extend_from_slice(events.headers());
    let body = answer
        .whole(&|choice| events.score(choice))
        .ok_or_else(|| Failure::internal("an answer without all its choices"))?;
    Ok(exchange.respond(200, &headers, body).await?)
}

/// Sends a failure. Before the head, the failure has its own status; after it, the failure is the stream's last event,
/// behind the text that came before it, and the framing breaks.
async fn fail(
    exchange: &mut Exchange,
    answer: &mut Answer,
    batch: &mut Vec<ChatEvent>,
    trail: &mut Trail,
    failure: Failure,
    facts: Facts,
) -> End {
    trail.events(batch);
    if exchange.sent() == Sent::Begun {
        if let Ok(Some(text)) = answer.events(batch, facts, true)
            && exchange.write(text, false).await.is_err()
        {
            return End::Gone;
        }
        let last: Bytes = answer.fail(&failure);
        if exchange.write(last, false).await.is_err() {
            return End::Gone;
        }
    }
    End::Failed(failure)
}

/// End of a request whose client left, or which was cancelled; a cancelled one is told so.
async fn gone(exchange: &mut Exchange, answer: &mut Answer, trail: &mut Trail, facts: Facts) -> End {
    match exchange.ended_by() {
        Some(by) => fail(exchange, answer, &mut Vec::new(), trail, cancel::failure(by), facts).await,
        None => End::Gone,
    }
}

/// Copies the counts and the target into the list of live requests.
fn note(trail: &Trail, events: &dyn Events) {
    let Some(live) = &trail.live else { return };
    live.progress(events.facts());
    if live.answers() {
        live.answered_by(events.course().target);
    }
}

async fn signal_life(
    exchange: &mut Exchange,
    kind: HeaderValue,
    sign: Bytes,
    headers: &[(HeaderName, HeaderValue)],
) -> Result<(), End> {
    begin(exchange, kind, headers).await?;
    Ok(exchange.write(sign, false).await?)
}

async fn begin(exchange: &mut Exchange, kind: HeaderValue, more: &[(HeaderName, HeaderValue)]) -> Result<(), End> {
    if exchange.sent() != Sent::Nothing {
        return Ok(());
    }
    let mut headers = Vec::with_capacity(3 + more.len());
    headers.push((header::CONTENT_TYPE, kind));
    headers.push((header::CACHE_CONTROL, HeaderValue::from_static("no-cache")));
    headers.push((HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")));
    headers.extend_from_slice(more);
    Ok(exchange.begin_stream(&headers).await?)
}
