//! Why a request to an upstream has no answer, or only a part of one.

use std::borrow::Cow;

use penstock_dialects::FaultClass;

/// How far a request came, and what ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// No connection: the request was not sent.
    Connect,
    /// No connection in time: the request was not sent.
    ConnectTimeout,
    /// The connection ended before the head of an answer was complete.
    Closed,
    /// As `Closed`, on a connection that had been used before, and without a byte of an answer: the other side had given it up.
    Stale,
    /// No head in time.
    HeadTimeout,
    /// The body ended before its end.
    Cut,
    /// Silence in the body.
    IdleTimeout,
    /// The whole answer took too long.
    Deadline,
    /// What came is not valid HTTP, or is a thing that is not followed: a redirect, a compressed body.
    Garbled,
}

impl Fault {
    /// The class by which the gateway decides.
    pub fn class(self) -> FaultClass {
        match self {
            Fault::Connect | Fault::Closed | Fault::Stale => FaultClass::Server,
            Fault::ConnectTimeout | Fault::HeadTimeout | Fault::IdleTimeout | Fault::Deadline => FaultClass::Timeout,
            Fault::Cut => FaultClass::Truncated,
            Fault::Garbled => FaultClass::Garbled,
        }
    }

    /// Whether the upstream cannot have begun to work on the request.
    pub fn is_unsent(self) -> bool {
        matches!(self, Fault::Connect | Fault::ConnectTimeout)
    }
}

/// A fault with words for the log and, where they say nothing of ours, for the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ClientError {
    /// What ended it.
    pub fault: Fault,
    /// What is wrong.
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
