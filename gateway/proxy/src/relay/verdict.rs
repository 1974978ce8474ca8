//! What a failed attempt means for the request and for the target: the one place where that is decided.

use penstock_dialects::FaultClass;
use penstock_proto::ErrorKind;

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
    /// It counts against the target's health.
    pub(crate) sick: bool,
}

const fn verdict(reason: Option<Reason>, again: bool, sick: bool) -> Verdict {
    Verdict { reason, again, sick }
}

/// Judges by class and kind, never by words.
pub(crate) fn judge(failure: &Failure) -> Verdict {
    use Reason::*;
    let Some(upstream) = &failure.upstream else { return judge_own(failure.kind) };
    match upstream.class {
        FaultClass::Invalid | FaultClass::TooLarge => verdict(None, false, false),
        FaultClass::ContextLength => verdict(Some(ContextLength), false, false),
        FaultClass::ContentPolicy => verdict(Some(ContentPolicy), false, false),
        FaultClass::RateLimited => verdict(Some(RateLimit), false, false),
        FaultClass::Timeout => verdict(Some(Timeout), false, true),
        // The gateway's key, account or config is wrong there: asking again does not help, somebody else may.
        FaultClass::Unauthorized | FaultClass::Forbidden | FaultClass::NotFound | FaultClass::Quota => {
            verdict(Some(Error), false, true)
        }
        FaultClass::Overloaded => verdict(Some(Error), false, true),
        FaultClass::Server | FaultClass::Truncated | FaultClass::Garbled => verdict(Some(Error), true, true),
    }
}

/// Failures that are the gateway's own words: of a pool, or of a provider's client before anything was sent.
fn judge_own(kind: ErrorKind) -> Verdict {
    use Reason::*;
    match kind {
        ErrorKind::ContextLength => verdict(Some(ContextLength), false, false),
        ErrorKind::Unsupported => verdict(Some(Unsupported), false, false),
        // A full queue is no illness.
        ErrorKind::RateLimited | ErrorKind::Overloaded => verdict(Some(RateLimit), false, false),
        ErrorKind::DeadlineExceeded => verdict(Some(Timeout), false, true),
        ErrorKind::ProviderFailed | ErrorKind::Unavailable | ErrorKind::Draining | ErrorKind::Internal => {
            verdict(Some(Error), false, true)
        }
        // Not there again: the request may be what its workers died of.
        ErrorKind::WorkerFailed => verdict(Some(Error), false, true),
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
        | ErrorKind::UnsupportedMedia => verdict(None, false, false),
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
