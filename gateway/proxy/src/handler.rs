//! What every handler of a route does alike: read a body, decode it, stop when the client leaves, survive a panic.

use http::HeaderMap;
use penstock_base::error::Failure;
use penstock_http::exchange::BodyFault;
use penstock_http::{Body, BodyBudget, BodyLease, Exchange, Gone};
use penstock_proto::ErrorKind;
use penstock_types::{ApiError, Bounds};

use crate::web::Content;

/// Reason why a request ended before its answer did.
#[derive(Debug)]
pub enum End {
    /// The client left; there is nobody to answer.
    Gone,
    /// A failure that the client is told: as an answer, or as a broken stream once the answer has begun.
    Failed(Failure),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        End::Failed(failure)
    }
}

impl From<Gone> for End {
    fn from(_: Gone) -> Self {
        End::Gone
    }
}

impl From<BodyFault> for End {
    fn from(fault: BodyFault) -> Self {
        match fault {
            BodyFault::Gone => End::Gone,
            BodyFault::Refuse(failure) => End::Failed(failure),
        }
    }
}

/// Checks that the body's content type is read as JSON, and reads the body.
pub(crate) async fn read_body(bodies: &BodyBudget, exchange: &mut Exchange, headers: &HeaderMap) -> Result<Body, End> {
    if !Content::of(headers).is_json() {
        let message = "The body must be JSON: send \"Content-Type: application/json\".";
        return Err(Failure::new(ErrorKind::UnsupportedMedia, message).into());
    }
    if headers
        .get(http::header::CONTENT_ENCODING)
        .is_some_and(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity"))
    {
        return Err(Failure::new(ErrorKind::UnsupportedMedia, "Compressed request bodies are not accepted.").into());
    }
    Ok(exchange.read_body(bodies).await?)
}

/// Size of a body above which it is decoded off the I/O threads: about a millisecond of one core.
const INLINE_BODY_BYTES_MAX: usize = 256 * 1024;

/// Result of `decode` on a body, with the body's lease on the memory budget, since the result is about as large. The
/// bytes are dropped.
pub(crate) async fn decoded<T: Send + 'static>(
    body: Body,
    decode: impl FnOnce(&[u8], &Bounds) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, BodyLease), Failure> {
    let small = body.bytes.len() <= INLINE_BODY_BYTES_MAX;
    let now = move || Ok((decode(&body.bytes, &Bounds::default())?, body.lease));
    if small {
        return now();
    }
    let task = tokio::task::spawn_blocking(now);
    task.await.map_err(|error| Failure::internal(format!("decoding: {error}")))?
}

/// Awaits `work` unless the client leaves first.
pub(crate) async fn watched<T>(exchange: &mut Exchange, work: impl Future<Output = T>) -> Result<T, Gone> {
    tokio::select! {
        biased;
        done = work => Ok(done),
        gone = exchange.gone() => Err(gone),
    }
}
