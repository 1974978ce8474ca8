//! Refusals without an exchange, on a connection that never had a valid head and is closed afterwards.

use std::time::Duration;

use bytes::BytesMut;
use http::Method;
use pingora_core::protocols::Stream;

use penstock_types::Dialect;

use super::response::{Frame, Response, failure_fields};
use super::wire::Wire;
use penstock_base::error::Failure;

/// Writes the failure, closes the write side, discards what the client still sends (bounded), and closes.
pub(super) async fn refuse(stream: Stream, failure: &Failure, dialect: Dialect, request_id: &str, stall: Duration) {
    let body = failure.body(dialect, request_id);
    let frame = Frame { method: &Method::GET, http10: false, keep_alive: false, length: Some(body.len() as u64) };
    let own = [("x-request-id", request_id.as_bytes())];
    let response = Response::new(failure.status(), &frame, &own, &failure_fields(failure));
    let mut wire = Wire { stream, buf: BytesMut::new(), stall, response: Some(response) };
    if wire.send(body, true).await.is_ok() {
        wire.close(true).await;
    }
}
