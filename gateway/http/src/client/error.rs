//! Errors of requests to upstreams: no answer, or only a part of one.

use std::borrow::Cow;

use penstock_types::FaultClass;

/// Stage at which a request to an upstream failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// No connection; the request was not sent.
    Connect,
    /// No connection in time; the request was not sent.
    ConnectTimeout,
    /// The connection ended before the head of an answer was complete.
    Closed,
    /// Closed on a reused connection before any byte of an answer, and before or soon after the end of the request: the peer
    /// had already given the connection up. Such a request is sent once more.
    Stale,
    /// No head of an answer within the time limit; the request was sent.
    HeadTimeout,
    /// Body of the answer cut off before its end.
    Cut,
    /// Silence in the body for too long.
    IdleTimeout,
    /// Answer not complete by the deadline of the whole request.
    Deadline,
    /// Invalid HTTP, or an answer that is not supported: a redirect, a compressed body.
    Garbled,
}

impl Fault {
    /// Class by which the gateway decides about retries and status.
    pub fn class(self) -> FaultClass {
        match self {
            Fault::Connect | Fault::Closed | Fault::Stale => FaultClass::Server,
            Fault::ConnectTimeout | Fault::HeadTimeout | Fault::IdleTimeout | Fault::Deadline => FaultClass::Timeout,
            Fault::Cut => FaultClass::Truncated,
            Fault::Garbled => FaultClass::Garbled,
        }
    }

    /// Returns true if the upstream cannot have begun to work on the request.
    pub fn is_unsent(self) -> bool {
        matches!(self, Fault::Connect | Fault::ConnectTimeout)
    }
}

/// Error of a request, with a message for the log and, unless it reveals our setup, for the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ClientError {
    /// Stage at which the request failed, which decides whether a retry is safe.
    pub fault: Fault,
    /// Description of the failure for the log and the operator.
    pub message: Cow<'static, str>,
}

impl ClientError {
    pub(crate) fn new(fault: Fault, message: impl Into<Cow<'static, str>>) -> Self {
        Self { fault, message: message.into() }
    }

    pub(crate) fn garbled(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Fault::Garbled, message)
    }
}
