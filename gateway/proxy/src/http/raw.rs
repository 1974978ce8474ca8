//! Answers written without a session: refusals on a connection that is closed afterwards.

use std::time::Duration;

use pingora_core::protocols::Stream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use penstock_dialects::Dialect;

use crate::error::Failure;

/// After a refusal, this much is read over so that the client gets the answer instead of a reset.
const LINGER_BYTES_MAX: usize = 1024 * 1024;
/// ... and for this long.
const LINGER: Duration = Duration::from_secs(2);

/// Writes the failure, closes the write side, reads over what the client still sends (bounded), closes.
pub(super) async fn refuse(
    mut stream: Stream,
    failure: &Failure,
    dialect: Dialect,
    request_id: &str,
    write_stall: Duration,
) {
    let answer = serialize(failure, dialect, request_id);
    let write = async {
        stream.write_all(&answer).await?;
        stream.flush().await?;
        AsyncWriteExt::shutdown(&mut stream).await
    };
    if !matches!(timeout(write_stall, write).await, Ok(Ok(()))) {
        return;
    }
    let drain = async {
        let (mut scratch, mut read) = ([0u8; 4096], 0);
        while read < LINGER_BYTES_MAX {
            match stream.read(&mut scratch).await {
                Ok(1..) => read += scratch.len(),
                _ => break,
            }
        }
    };
    let _ = timeout(LINGER, drain).await;
}

fn serialize(failure: &Failure, dialect: Dialect, request_id: &str) -> Vec<u8> {
    use std::fmt::Write;
    let (status, body) = (failure.status(), failure.body(dialect, request_id));
    let reason = http::StatusCode::from_u16(status).ok().and_then(|code| code.canonical_reason()).unwrap_or("Error");
    let mut head = format!(
        "HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nx-request-id: {request_id}\r\n\
         x-should-retry: {}\r\nx-penstock-error-source: {}\r\nconnection: close\r\n",
        body.len(),
        failure.should_retry(),
        failure.source(),
    );
    if let Some(seconds) = failure.retry_after_seconds() {
        let _ = write!(head, "retry-after: {seconds}\r\n");
    }
    if let Some(methods) = failure.allow {
        let _ = write!(head, "allow: {}\r\n", methods.header());
    }
    head.push_str("\r\n");
    let mut answer = head.into_bytes();
    answer.extend_from_slice(&body);
    answer
}
