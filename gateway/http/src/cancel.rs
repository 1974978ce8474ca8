//! Cancellation of a request by somebody who is not its client: a one-shot that is awaited beside the client's socket.

use std::pin::Pin;
use std::task::{Context, Poll};

use penstock_base::Failure;
use penstock_proto::ErrorKind;
use tokio::sync::oneshot;

/// Cause for which a request in flight was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ender {
    /// An operator cancelled the request through the admin API.
    Operator,
    /// The process ends and its grace time is over.
    Process,
}

/// Future of a request's cancellation. Pending for ever where the request cannot be cancelled, and after it was ready
/// once.
#[derive(Debug, Default)]
pub struct Cancelled(Option<oneshot::Receiver<Ender>>);

impl Cancelled {
    /// Future that is ready once the cause is sent.
    pub fn by(sent: oneshot::Receiver<Ender>) -> Self {
        Self(Some(sent))
    }
}

impl Future for Cancelled {
    type Output = Ender;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Ender> {
        let Some(receiver) = &mut self.0 else { return Poll::Pending };
        match Pin::new(receiver).poll(context) {
            Poll::Ready(Ok(by)) => {
                self.0 = None;
                Poll::Ready(by)
            }
            Poll::Ready(Err(_)) => {
                self.0 = None;
                Poll::Pending
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

/// Failure that the client of a cancelled request is told.
pub fn failure(by: Ender) -> Failure {
    match by {
        Ender::Operator => {
            Failure::new(ErrorKind::Cancelled, "The request was cancelled by an operator of this gateway.")
        }
        Ender::Process => Failure::new(ErrorKind::Draining, "The server is shutting down."),
    }
}
