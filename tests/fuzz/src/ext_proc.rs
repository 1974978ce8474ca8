//! Bytes of a proxy's stream to the endpoint picker: nothing panics, no memory of a body is left behind, a body goes back as
//! it came, the replies are messages, and a request leaves one record for the access log.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use penstock_base::error::Failure;
use penstock_http::{BodyBudget, BodyLease, HttpLimits};
use penstock_picker::conversation::Conversation;
use penstock_picker::framing::{Reader, framed};
use penstock_picker::messages::{Mutation, ProcessingRequest, Reply, Step};
use penstock_picker::{Asked, Chooser, Chosen, Outcome, Picked, Refusal};
use penstock_proto::ErrorKind;
use penstock_telemetry::{Attempt, Record};
use penstock_types::Surface;
use penstock_upstream::Facts;
use prost::Message;

/// Largest body in the target.
const BODY_BYTES_MAX: usize = 4096;

/// Double of the gateway: its memory for bodies, and the number of records that it was given.
struct Double(BodyBudget, AtomicUsize);

struct Endpoint;

impl Picked for Endpoint {
    fn entry(&self) -> &str {
        "m"
    }

    fn reason(&self) -> &'static str {
        "only"
    }

    fn endpoints(&self) -> Vec<SocketAddr> {
        vec![SocketAddr::from(([10, 0, 0, 7], 8000))]
    }

    fn served(&mut self, _: SocketAddr, _: Instant) {}

    fn answered(&mut self, _: Instant) {}

    fn refused(&mut self, status: u16, _: Option<Duration>, _: Instant) {
        assert!(!(200..300).contains(&status));
    }

    fn ended(&mut self, _: Option<u64>) {}

    fn target(&self) -> Arc<str> {
        "a/m".into()
    }

    fn cost(&self, _: Facts) -> Option<f64> {
        None
    }

    fn attempts(&mut self, _: Instant) -> Vec<Attempt> {
        Vec::new()
    }
}

#[async_trait::async_trait]
impl Chooser for Double {
    fn limits(&self) -> Arc<HttpLimits> {
        Arc::new(HttpLimits { body_bytes_max: BODY_BYTES_MAX, ..HttpLimits::default() })
    }

    fn lease(&self, _: Option<std::net::IpAddr>) -> BodyLease {
        self.0.lease()
    }

    fn answer_lease(&self) -> BodyLease {
        self.0.lease()
    }

    fn is_ready(&self) -> bool {
        true
    }

    async fn choose(&self, asked: Asked) -> Result<Chosen, Refusal> {
        let length = asked.body.as_ref().map_or(0, |body| body.bytes.len());
        assert!(length <= BODY_BYTES_MAX);
        if length % 7 == 6 {
            return Err(Failure::new(ErrorKind::Unavailable, "none").into());
        }
        Ok(Chosen { pick: Box::new(Endpoint), surface: Some(Surface::Chat), stream: None, body: None, hold: None })
    }

    fn count(&self, _: Outcome<'_>) {}

    fn ended(&self, record: &Record<'_>) {
        let is_known = ["complete", "failed", "client_gone", "cut", "unseen"].contains(&record.end);
        assert!(is_known && (record.end == "failed") == record.error.is_some());
        assert!((1..=128).contains(&record.request_id.len()));
        self.1.fetch_add(1, Ordering::Relaxed);
    }

    fn panicked(&self) {}
}

/// The double never waits.
fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(out) => out,
        Poll::Pending => unreachable!("nothing is waited for"),
    }
}

pub(crate) fn run(input: &[u8]) {
    let double = Arc::new(Double(BodyBudget::new(1 << 20, BODY_BYTES_MAX), AtomicUsize::new(0)));
    let (mut reader, mut talk) = (Reader::default(), Conversation::new(double.clone()));
    let mut has_request = false;
    let (mut came, mut back): (Vec<u8>, Vec<u8>) = Default::default();
    reader.add(input);
    while let Ok(Some(bytes)) = reader.next(2 * BODY_BYTES_MAX) {
        let Ok(message) = ProcessingRequest::decode(bytes) else { break };
        assert_eq!(ProcessingRequest::decode(message.encode_to_vec().as_slice()).as_ref(), Ok(&message));
        if let Some(Step::RequestBody(part)) = message.request.as_ref().filter(|_| talk.awaits_body()) {
            came.extend_from_slice(&part.body);
        }
        let begins = matches!(message.request, Some(Step::RequestHeaders(_) | Step::RequestBody(_)));
        has_request |= begins && !message.observability_mode;
        let replies = now(talk.take(message));
        let mut is_streamed = false;
        for reply in &replies.messages {
            assert!(framed(reply).len() > 5);
            if let Some(Reply::RequestBody(body)) = &reply.response {
                let mutation =
                    body.response.as_ref().and_then(|response| response.body_mutation.as_ref()?.mutation.as_ref());
                if let Some(Mutation::Streamed(part)) = mutation {
                    is_streamed = true;
                    back.extend_from_slice(&part.body);
                }
            }
        }
        assert!(!is_streamed || back == came, "the body as it came");
        if replies.is_over {
            break;
        }
    }
    drop(talk);
    assert_eq!(double.1.load(Ordering::Relaxed), usize::from(has_request), "one record for a request");
    assert_eq!(double.0.bytes_held(), 0);
}
