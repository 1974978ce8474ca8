//! What a failed attempt means for the request and for the target: the one place where that is decided.

use penstock_dialects::FaultClass;
use penstock_proto::ErrorKind;

use super::lane::Why;
use crate::error::Failure;

/// Why a request goes to another target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The target failed, or cannot be reached, or refuses the gateway.
    Error,
    /// It took too long.
    Timeout,
    /// It wants fewer requests.
    RateLimit,
    /// The request does not fit its context.
    ContextLength,
    /// It declines the content.
    ContentPolicy,
    /// It cannot do what is asked.
    Unsupported,
}

impl Reason {
    /// All of them.
    pub const ALL: [Reason; 6] = [
        Reason::Error,
        Reason::Timeout,
        Reason::RateLimit,
        Reason::ContextLength,
        Reason::ContentPolicy,
        Reason::Unsupported,
    ];

    /// As in the config, the log and the metrics.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Error => "error",
            Reason::Timeout => "timeout",
            Reason::RateLimit => "rate_limit",
            Reason::ContextLength => "context_length",
            Reason::ContentPolicy => "content_policy",
            Reason::Unsupported => "unsupported",
        }
    }

    /// Whether an equal target could do better: else only the fallback list can.
    pub(crate) fn is_target_fault(self) -> bool {
        matches!(self, Reason::Error | Reason::Timeout | Reason::RateLimit)
    }
}

/// The judgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Why another target may be asked; `None`: the request itself is at fault, nobody else is asked.
    pub(crate) reason: Option<Reason>,
    /// The same target may succeed a moment later.
    pub(crate) again: bool,
    /// What it says of the target.
    pub(crate) health: Health,
}

/// What a failure says of the target's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    /// Nothing: the target was not asked, or only its queue was.
    Unknown,
    /// It answers, though not this request.
    Works,
    /// It failed.
    Sick(Why),
}

const fn verdict(reason: Option<Reason>, again: bool, health: Health) -> Verdict {
    Verdict { reason, again, health }
}

/// Judges by class and kind, never by words.
pub(crate) fn judge(failure: &Failure) -> Verdict {
    use Health::{Sick, Unknown, Works};
    use Reason::*;
    let Some(upstream) = &failure.upstream else { return judge_own(failure.kind) };
    let judged = match upstream.class {
        FaultClass::Invalid | FaultClass::TooLarge => verdict(None, false, Works),
        FaultClass::ContextLength => verdict(Some(ContextLength), false, Works),
        FaultClass::ContentPolicy => verdict(Some(ContentPolicy), false, Works),
        FaultClass::RateLimited => verdict(Some(RateLimit), false, Works),
        FaultClass::Timeout => verdict(Some(Timeout), false, Sick(Why::Silence)),
        // The gateway's key, account or config is wrong there: asking again does not help, somebody else may.
        FaultClass::Unauthorized | FaultClass::Forbidden => verdict(Some(Error), false, Sick(Why::Refused)),
        FaultClass::Quota => verdict(Some(Error), false, Sick(Why::Credit)),
        FaultClass::NotFound => verdict(Some(Error), false, Sick(Why::Absent)),
        FaultClass::Overloaded => verdict(Some(Error), false, Sick(Why::Busy)),
        FaultClass::Server | FaultClass::Truncated | FaultClass::Garbled => {
            verdict(Some(Error), true, Sick(Why::Errors))
        }
    };
    if upstream.sent { judged } else { Verdict { health: Unknown, ..judged } }
}

/// Failures that are the gateway's own words: of a pool, or of a provider's client before anything was sent.
fn judge_own(kind: ErrorKind) -> Verdict {
    use Health::{Sick, Unknown};
    use Reason::*;
    match kind {
        ErrorKind::ContextLength => verdict(Some(ContextLength), false, Unknown),
        ErrorKind::Unsupported => verdict(Some(Unsupported), false, Unknown),
        // A full queue is no illness, and what is refused before it is sent says nothing of who would have answered.
        ErrorKind::RateLimited | ErrorKind::Overloaded => verdict(Some(RateLimit), false, Unknown),
        ErrorKind::DeadlineExceeded => verdict(Some(Timeout), false, Sick(Why::Silence)),
        ErrorKind::ProviderFailed | ErrorKind::Unavailable | ErrorKind::Draining | ErrorKind::Internal => {
            verdict(Some(Error), false, Sick(Why::Errors))
        }
        // Not there again: the request may be what its workers died of.
        ErrorKind::WorkerFailed => verdict(Some(Error), false, Sick(Why::Errors)),
        // A text that the model has no answer to, or the model is ill: the pool tells the two apart.
        ErrorKind::ModelFailed => verdict(Some(Error), false, Unknown),
        ErrorKind::InvalidRequest
        | ErrorKind::ModelNotFound
        | ErrorKind::NotFound
        | ErrorKind::MethodNotAllowed
        | ErrorKind::Unauthorized
        | ErrorKind::Forbidden
        | ErrorKind::TooLarge
        | ErrorKind::ClientTimeout
        | ErrorKind::Malformed
        | ErrorKind::Cancelled
        | ErrorKind::UnsupportedMedia => verdict(None, false, Unknown),
    }
}

/// How much a failure tells a client that gets one of several: what it can act on before what it cannot.
pub(crate) fn rank(failure: &Failure) -> u8 {
    match judge(failure).reason {
        Some(Reason::ContextLength) => 5,
        Some(Reason::ContentPolicy) => 4,
        Some(Reason::RateLimit) => 3,
        Some(Reason::Timeout) => 2,
        Some(Reason::Error) => 1,
        // Of a later target only: the request may be right for the first.
        Some(Reason::Unsupported) | None => 0,
    }
}
