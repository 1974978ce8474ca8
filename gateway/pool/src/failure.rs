//! Errors for the clients of requests that the pool cannot serve: kind, message, time until a retry.

use penstock_proto::ErrorKind;
use penstock_router::{Refusal, Reject};
use std::borrow::Cow;
use std::time::Duration;

/// Value of Retry-After of a request for which no worker was free in time.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// Error of a request, as its client gets it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Failure {
    pub(super) kind: ErrorKind,
    pub(super) message: Cow<'static, str>,
    /// Time after which the client may retry; `None`: the gateway suggests none.
    pub(super) retry_after: Option<Duration>,
}

/// Deadline that a request has missed; it decides the error that the client gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Late {
    /// The deadline that the request itself carries ([`Job::deadline`](crate::Job::deadline)).
    Deadline,
    /// The deadline for any worker to be ready.
    Nobody { interrupted: bool },
    /// The longest wait in the router's queue while workers are ready
    /// ([`PoolConfig::wait_max`](crate::PoolConfig::wait_max)).
    Queue,
}

impl Failure {
    /// Failure without a time for a retry.
    pub(super) fn new(kind: ErrorKind, message: &'static str) -> Self {
        Self { kind, message: message.into(), retry_after: None }
    }

    /// Failure of a request that the router refuses.
    pub(super) fn refused(reject: Reject) -> Self {
        let message = match reject.refusal {
            Refusal::Full => "too many requests are waiting",
            Refusal::Late => "an answer would come too late: too much is waiting",
            Refusal::Impatient => {
                "the answer would not begin within the time that the request gives it: too much is waiting"
            }
            Refusal::Deadline => return Self::deadline(),
        };
        Self { retry_after: Some(reject.retry_after), ..Self::new(ErrorKind::Overloaded, message) }
    }

    /// Failure of a request that has missed a deadline. `last_end`: description of a worker's end, if one has ended;
    /// `retry_after`: time until a worker is expected.
    pub(super) fn late(late: Late, last_end: Option<&str>, retry_after: Duration) -> Self {
        let ended = || last_end.map_or_else(String::new, |how| format!(" (the last one ended: {how})"));
        let (kind, message, retry_after) = match late {
            Late::Deadline => return Self::deadline(),
            Late::Queue => (ErrorKind::Overloaded, "no worker was free in time".into(), Some(RETRY_AFTER)),
            Late::Nobody { interrupted: true } => {
                let message = format!("the worker was lost and no other could continue the request in time{}", ended());
                (ErrorKind::WorkerFailed, message.into(), None)
            }
            Late::Nobody { interrupted: false } => {
                (ErrorKind::Unavailable, format!("no worker is ready{}", ended()).into(), Some(retry_after))
            }
        };
        Self { kind, message, retry_after }
    }

    fn deadline() -> Self {
        Self::new(ErrorKind::DeadlineExceeded, "the request took too long")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_refusal_says_when_to_retry_unless_the_request_is_over() {
        let check = |refusal, kind, retry_after, part| {
            let failure = Failure::refused(Reject { retry_after: SECOND, refusal });
            assert_eq!((failure.kind, failure.retry_after), (kind, retry_after), "{refusal:?}");
            assert!(failure.message.contains(part), "{failure:?}");
        };
        check(Refusal::Full, ErrorKind::Overloaded, Some(SECOND), "too many requests");
        check(Refusal::Late, ErrorKind::Overloaded, Some(SECOND), "come too late");
        check(Refusal::Impatient, ErrorKind::Overloaded, Some(SECOND), "that the request gives it");
        check(Refusal::Deadline, ErrorKind::DeadlineExceeded, None, "took too long");
    }

    #[test]
    fn a_late_request_learns_how_the_last_worker_ended() {
        let check = |late, last_end, kind, retry_after, message: &str| {
            let failure = Failure::late(late, last_end, SECOND);
            assert_eq!((failure.kind, failure.retry_after), (kind, retry_after));
            assert_eq!(failure.message, message);
        };
        let ended = Some("exit status: 1");
        check(Late::Deadline, ended, ErrorKind::DeadlineExceeded, None, "the request took too long");
        check(Late::Queue, ended, ErrorKind::Overloaded, Some(RETRY_AFTER), "no worker was free in time");
        let message = "no worker is ready (the last one ended: exit status: 1)";
        check(Late::Nobody { interrupted: false }, ended, ErrorKind::Unavailable, Some(SECOND), message);
        let message = "the worker was lost and no other could continue the request in time";
        check(Late::Nobody { interrupted: true }, None, ErrorKind::WorkerFailed, None, message);
    }
}
