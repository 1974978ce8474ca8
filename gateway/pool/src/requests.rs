//! The open requests of a pool by their number, with the counters of what became of them.

use super::failure::{Failure, Late};
use super::job::Job;
use super::patience::Patience;
use super::request::{Binding, Bound, Fate, Noted, Request, Taken};
use super::status::Counts;
use super::ticket::{Notes, Slot};
use penstock_proto::frames::Output;
use penstock_proto::{AdapterId, Epoch, RequestId};
use penstock_router::WorkerId;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

/// Requests that have come and have not ended, waiting or bound to a worker.
pub(super) struct Requests {
    open: HashMap<RequestId, Request>,
    /// Tokens that a choice may be ahead of its handler.
    window: u32,
    counts: Counts,
}

/// Way in which a request ends.
#[derive(Debug, PartialEq)]
pub(super) enum End {
    /// All choices have ended.
    Finished,
    /// The handler has dropped the ticket.
    Cancelled,
    /// The request cannot go on.
    Failed(Failure),
}

impl Requests {
    /// No requests yet; each choice of the coming ones may be `window` tokens ahead of its handler.
    pub(super) fn new(window: u32) -> Self {
        Self { open: HashMap::new(), window, counts: Counts::default() }
    }

    /// Counters of requests and tokens; those of decisions, moves and roles are 0 here.
    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(super) fn get(&self, request: RequestId) -> Option<&Request> {
        self.open.get(&request)
    }

    pub(super) fn get_mut(&mut self, request: RequestId) -> Option<&mut Request> {
        self.open.get_mut(&request)
    }

    /// Numbers of all open requests, in no order.
    pub(super) fn numbers(&self) -> Vec<RequestId> {
        self.open.keys().copied().collect()
    }

    /// Returns true if an open request has output of a worker already.
    pub(super) fn any_told(&self) -> bool {
        self.open.values().any(|request| request.truth.has_told())
    }

    /// Adapters that open requests run with.
    pub(super) fn adapters(&self) -> HashSet<AdapterId> {
        self.open.values().filter_map(|request| request.truth.job.adapter).collect()
    }

    /// Takes in a new request and returns its number.
    pub(super) fn submit(&mut self, job: Job, slot: Arc<Slot>, now: Instant) -> RequestId {
        let number = slot.id;
        self.counts.submitted += 1;
        self.open.insert(number, Request::new(job, slot, self.window, now));
        number
    }

    /// Takes in the notes of a request's handler; `None`: the request is over.
    pub(super) fn note(&mut self, request: RequestId, notes: Notes) -> Option<Noted> {
        Some(self.open.get_mut(&request)?.note(notes))
    }

    /// Notes the binding of a request; `None`: the request is over.
    pub(super) fn bind(&mut self, request: RequestId, binding: Binding, now: Instant) -> Option<Bound> {
        let bound = self.open.get_mut(&request)?.bind(binding, now);
        if let Some(exact) = bound.resumed {
            self.counts.resumed += 1;
            self.counts.resumed_inexact += u64::from(!exact);
        }
        Some(bound)
    }

    /// Hands an output to the request that it belongs to.
    ///
    /// # Errors
    /// A breach of the contract by the worker, in words.
    pub(super) fn accept(
        &mut self,
        worker: WorkerId,
        output: Output,
        numerics_id: &Arc<str>,
        vocab_size: u32,
        now: Instant,
    ) -> Result<Option<Taken>, &'static str> {
        let Some(request) = self.open.get_mut(&RequestId(output.request)) else { return Ok(None) };
        let taken = request.accept(worker, output, numerics_id, vocab_size, now)?;
        match taken {
            Taken::Dropped(tokens) => self.counts.tokens_dropped += tokens as u64,
            Taken::Delivered { tokens, cached_tokens, first } => {
                self.counts.tokens += u64::from(tokens);
                self.counts.cached_tokens_told += u64::from(cached_tokens);
                first.into_iter().for_each(|first| self.counts.first_token(first.took, first.predicted));
            }
            Taken::Elsewhere | Taken::Full => {}
        }
        Ok(Some(taken))
    }

    /// Returns true if all choices of a request have ended.
    pub(super) fn is_complete(&self, request: RequestId) -> bool {
        self.open.get(&request).is_some_and(|request| request.truth.open() == 0)
    }

    /// Takes a request from the worker that it was bound to; `None`: the request is over.
    pub(super) fn lose(&mut self, request: RequestId, died: Option<Epoch>, now: Instant) -> Option<Fate> {
        Some(self.open.get_mut(&request)?.lose(died, now))
    }

    /// Takes a request from a worker that has no room for it; false: the request is over.
    pub(super) fn turn_away(&mut self, request: RequestId, now: Instant) -> bool {
        self.open.get_mut(&request).map(|request| request.turn_away(now)).is_some()
    }

    /// Requests that have missed a deadline. `nobody`: no worker serves.
    pub(super) fn late(&self, patience: &Patience, nobody: bool, now: Instant) -> Vec<(RequestId, Late)> {
        let late = |(number, request): (&RequestId, &Request)| Some((*number, request.late(patience, nobody, now)?));
        self.open.iter().filter_map(late).collect()
    }

    /// Ends a request: counts the end and reports a failure to the handler. Returns the request; its slot is not ended yet.
    pub(super) fn close(&mut self, request: RequestId, end: End) -> Option<Request> {
        let request = self.open.remove(&request)?;
        match end {
            End::Finished => self.counts.finished += 1,
            End::Cancelled => self.counts.cancelled += 1,
            End::Failed(failure) => {
                self.counts.failed += 1;
                request.fail(failure);
            }
        }
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::PoolEvent;
    use super::super::job::tests::job;
    use super::super::patience::tests::patience;
    use super::super::request::tests::{binding, output};
    use super::*;
    use penstock_proto::ErrorKind;
    use std::time::Duration;

    const REQUEST: RequestId = RequestId(7);

    fn requests(now: Instant) -> (Requests, Arc<Slot>) {
        let slot = Arc::new(Slot::new(REQUEST, 10));
        let mut requests = Requests::new(10);
        assert_eq!(requests.submit(job(1), Arc::clone(&slot), now), REQUEST);
        (requests, slot)
    }

    fn accept(requests: &mut Requests, output: Output, now: Instant) -> Option<Taken> {
        requests.accept(WorkerId(0), output, &"n".into(), 100, now).expect("within the contract")
    }

    #[test]
    fn each_end_is_counted_once_and_nothing_comes_after_it() {
        let now = Instant::now();
        let failure = || Failure::new(ErrorKind::WorkerFailed, "as a test");
        for (end, expected) in [
            (End::Finished, Counts { submitted: 1, finished: 1, ..Counts::default() }),
            (End::Cancelled, Counts { submitted: 1, cancelled: 1, ..Counts::default() }),
            (End::Failed(failure()), Counts { submitted: 1, failed: 1, ..Counts::default() }),
        ] {
            let (mut requests, slot) = requests(now);
            let has_failed = matches!(end, End::Failed(_));
            assert!(requests.close(REQUEST, end).is_some() && requests.is_empty());
            assert!(requests.close(REQUEST, End::Finished).is_none());
            assert_eq!(requests.counts(), expected);
            let (kind, message) = (ErrorKind::WorkerFailed, "as a test".into());
            let failed = PoolEvent::Failed { kind, message, retry_after: None };
            assert_eq!(slot.take_events(), if has_failed { vec![failed] } else { vec![] });
            assert_eq!(accept(&mut requests, output(0, 0, &[5]), now), None);
            assert!(
                requests.bind(REQUEST, binding(WorkerId(0)), now).is_none()
                    && requests.lose(REQUEST, None, now).is_none()
            );
        }
    }

    #[test]
    fn tokens_and_first_tokens_are_counted() {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let (mut requests, _slot) = requests(now);
        requests.bind(REQUEST, binding(WorkerId(0)), now).expect("open");
        let told = Output { cached_tokens: Some(2), ..output(0, 0, &[5, 6]) };
        assert!(!requests.any_told());
        accept(&mut requests, told, now + 3 * second).expect("open");
        assert!(requests.any_told(), "also while it waits for another worker");
        accept(&mut requests, output(0, 1, &[6]), now).expect("open");
        let counts = Counts {
            submitted: 1,
            tokens: 2,
            tokens_dropped: 1,
            cached_tokens_told: 2,
            first_tokens: 1,
            ttft_us: 3_000_000,
            ttft_predicted_us: 1_000_000,
            ttft_error_us: 2_000_000,
            ..Counts::default()
        };
        assert_eq!(requests.counts(), counts);
        assert!(!requests.is_complete(REQUEST));
    }

    #[test]
    fn a_resumed_request_is_counted_when_it_is_bound_again() {
        let now = Instant::now();
        let (mut requests, _slot) = requests(now);
        requests.bind(REQUEST, binding(WorkerId(0)), now);
        accept(&mut requests, output(0, 0, &[5]), now);
        assert_eq!(requests.lose(REQUEST, None, now), Some(Fate::Waits));
        assert_eq!(requests.counts().resumed, 0);
        requests.bind(REQUEST, Binding { exact: false, ..binding(WorkerId(1)) }, now);
        assert_eq!((requests.counts().resumed, requests.counts().resumed_inexact), (1, 1));
    }

    #[test]
    fn late_requests_are_found() {
        let now = Instant::now();
        let (requests, _slot) = requests(now);
        let patience = patience();
        assert_eq!(requests.late(&patience, false, now), []);
        assert_eq!(requests.late(&patience, false, now + patience.queue), [(REQUEST, Late::Queue)]);
    }
}
