//! Meaning of a failed attempt for the request and for the target, decided in this module alone.

use penstock_proto::ErrorKind;
use penstock_types::FaultClass;

use penstock_base::error::Failure;
use penstock_upstream::lane::Why;

/// Reason that a request goes to another target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The target failed, cannot be reached, or rejects the gateway.
    Error,
    /// The target took longer than its time limit.
    Timeout,
    /// The target asks for fewer requests (rate limit).
    RateLimit,
    /// The request does not fit the target's context length.
    ContextLength,
    /// The target declines the content of the request.
    ContentPolicy,
    /// The target cannot do what the request asks for.
    Unsupported,
}

impl Reason {
    /// All reasons, in the order of the config reference.
    pub const ALL: [Reason; 6] = [
        Reason::Error,
        Reason::Timeout,
        Reason::RateLimit,
        Reason::ContextLength,
        Reason::ContentPolicy,
        Reason::Unsupported,
    ];

    /// Name in the config, the log and the metrics.
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

    /// Returns true if an equal target could do better; otherwise only the fallback list can.
    pub(crate) fn is_target_fault(self) -> bool {
        matches!(self, Reason::Error | Reason::Timeout | Reason::RateLimit)
    }
}

/// Judgement of a failure: whether to try again, where, and what it says of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Reason to ask another target; `None`: the request itself is at fault, and no other target is asked.
    pub reason: Option<Reason>,
    /// True if the same target may succeed a moment later.
    pub again: bool,
    /// Evidence that the failure gives on the target's health.
    pub health: Health,
}

/// Evidence of a failure on the target's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// No evidence: the target was not asked, or only its queue was.
    Unknown,
    /// The target works: it answers, though not this request.
    Works,
    /// The target failed, for the given reason.
    Sick(Why),
}

const fn verdict(reason: Option<Reason>, again: bool, health: Health) -> Verdict {
    Verdict { reason, again, health }
}

/// Judges a failure by its class and kind, never by its text.
pub fn judge(failure: &Failure) -> Verdict {
    use Health::{Sick, Unknown, Works};
    use Reason::*;
    // The answer was made: another target, or the same one again, would make and bill it once more.
    if failure.is_unheld() {
        return verdict(None, false, Works);
    }
    let Some(upstream) = &failure.upstream else { return judge_own(failure.kind) };
    let judged = match upstream.class {
        FaultClass::Invalid | FaultClass::TooLarge | FaultClass::AnswerTooLarge => verdict(None, false, Works),
        FaultClass::ContextLength => verdict(Some(ContextLength), false, Works),
        FaultClass::ContentPolicy => verdict(Some(ContentPolicy), false, Works),
        FaultClass::RateLimited => verdict(Some(RateLimit), false, Works),
        FaultClass::Timeout => verdict(Some(Timeout), false, Sick(Why::Silence)),
        // The gateway's key, account or config is wrong there: a retry does not help, another target may.
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

/// Judges a failure that the gateway itself reports: of a pool, or of a provider's client before anything was sent.
fn judge_own(kind: ErrorKind) -> Verdict {
    use Health::{Sick, Unknown};
    use Reason::*;
    match kind {
        ErrorKind::ContextLength => verdict(Some(ContextLength), false, Unknown),
        ErrorKind::Unsupported => verdict(Some(Unsupported), false, Unknown),
        // A full queue is no illness, and a refusal before sending says nothing of the target.
        ErrorKind::RateLimited | ErrorKind::Overloaded => verdict(Some(RateLimit), false, Unknown),
        ErrorKind::DeadlineExceeded => verdict(Some(Timeout), false, Sick(Why::Silence)),
        ErrorKind::ProviderFailed | ErrorKind::Unavailable | ErrorKind::Draining | ErrorKind::Internal => {
            verdict(Some(Error), false, Sick(Why::Errors))
        }
        // No retry at the same pool: the request may be what its workers died of.
        ErrorKind::WorkerFailed => verdict(Some(Error), false, Sick(Why::Errors)),
        // Either the model has no answer to this text, or the model is faulty: the pool tells the two apart.
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

/// Rank of a failure for a client that gets one of several: failures it can act on come first.
pub(crate) fn rank(failure: &Failure) -> u8 {
    match judge(failure).reason {
        // The answer was made, so that a retry is not advised, whatever other targets said.
        _ if failure.is_unheld() => 6,
        Some(Reason::ContextLength) => 5,
        Some(Reason::ContentPolicy) => 4,
        Some(Reason::RateLimit) => 3,
        Some(Reason::Timeout) => 2,
        Some(Reason::Error) => 1,
        // Of a later target only: the request may be right for the first one.
        Some(Reason::Unsupported) | None => 0,
    }
}
