//! Placement of requests: the pool's router with its clock, the frames that bind a request to the chosen worker, and the log of decisions.

use super::config::PoolConfig;
use super::decision::Decision;
use super::members::Members;
use super::recorder::Recorder;
use super::request::Request;
use super::status::Counts;
use penstock_proto::codec::FRAME_BYTES_MAX;
use penstock_proto::frames::{DownBody, Window};
use penstock_proto::{AdapterId, RequestId};
use penstock_router::{Choice, Fleet, Limits, Record, Reject, View, WorkerId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Prefill workers named beside the first. After two losses the decode worker is better off computing the prompt itself.
const PREFILLS_NEXT_MAX: usize = 2;

/// Router of one pool, with its clock, its counters and its log; see the module header.
pub(super) struct Placement {
    pub(super) router: Fleet,
    /// Instant at which the router's clock began.
    pub(super) began: Instant,
    /// Log of the decisions; `None`: none are recorded.
    recorder: Option<Recorder>,
    /// Counters of decisions; those of requests, moves and roles are 0 here.
    counts: Counts,
}

/// Binding that the router has chosen for a waiting request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Chosen {
    pub(super) request: RequestId,
    pub(super) worker: WorkerId,
    pub(super) exact: bool,
    /// Predicted time from now to the first token.
    pub(super) ttft: Duration,
    cached_tokens: u32,
    turn: i64,
    pull_from: Option<WorkerId>,
    prefill: Option<WorkerId>,
}

/// Outcome of one look at the router's queue.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// The request has left the queue and is to be sent to its worker.
    Bind(Chosen),
    /// The request has left the queue without a worker.
    Refuse(RequestId, Reject),
    /// No request can be bound until a worker reports.
    Hold,
}

/// Frames that start or continue a request at its worker.
#[derive(Debug, PartialEq)]
pub(super) struct Frames {
    pub(super) generate: DownBody,
    pub(super) windows: Vec<Window>,
    /// True if another worker computes the prompt.
    is_apart: bool,
}

impl Placement {
    /// Router without workers and requests, with random choices drawn from `seed`.
    pub(super) fn new(config: &PoolConfig, seed: u64, recorder: Option<Recorder>, now: Instant) -> Self {
        let limits = Limits { wait_max: Some(config.wait_max), ..config.limits };
        let router = Fleet::new(config.weights, limits).with_policy(config.policy).seeded(seed);
        Self { router, began: now, recorder, counts: Counts::default() }
    }

    /// Counters of decisions and bindings.
    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// Time of the router's clock.
    pub(super) fn clock(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.began)
    }

    /// Takes the next request that can be bound or must be refused off the queue.
    pub(super) fn next(&mut self, now: Instant) -> Next {
        match self.router.next(self.clock(now)) {
            Choice::Bind { request, worker, cached_tokens, exact, turn, pull_from, prefill, ttft } => {
                Next::Bind(Chosen { request, worker, exact, ttft, cached_tokens, turn, pull_from, prefill })
            }
            Choice::Refuse { request, reject } => Next::Refuse(request, reject),
            Choice::Hold => Next::Hold,
        }
    }

    /// Counts a decision that took this long.
    pub(super) fn decided(&mut self, took: Duration) {
        self.counts.decisions += 1;
        self.counts.decision_ns += took.as_nanos() as u64;
    }

    /// Frames for the chosen worker. `None`: they are too long, and the request is to fail.
    pub(super) fn frames(&mut self, chosen: &Chosen, request: &mut Request, members: &Members) -> Option<Frames> {
        let at = |worker: Option<WorkerId>| worker.map_or("", |worker| members[worker].transfer_address()).to_owned();
        let (mut generate, windows) = request.truth.generate(chosen.request);
        generate.turn = chosen.turn;
        generate.waiting = u32::try_from(self.router.waiting()).unwrap_or(u32::MAX);
        let adapter = request.truth.job.adapter;
        (generate.pull_from, generate.prefill_at) = (at(chosen.pull_from), at(chosen.prefill));
        let is_apart = !generate.prefill_at.is_empty();
        if let Some(prefill) = chosen.prefill.filter(|_| is_apart) {
            (generate.prefill_next, generate.prefill_next_tokens) =
                self.prefills_next(chosen.worker, prefill, adapter, members);
        }
        let generate = DownBody::Generate(generate);
        if generate.encoded_len() > FRAME_BYTES_MAX {
            self.router.unsent(chosen.request);
            return None;
        }
        Some(Frames { generate, windows, is_apart })
    }

    /// Counts a binding whose frames go out.
    pub(super) fn bound(&mut self, chosen: &Chosen, frames: &Frames) {
        self.counts.prefilled_apart += u64::from(frames.is_apart);
        self.counts.cached_tokens_predicted += u64::from(chosen.cached_tokens);
    }

    /// Addresses of the prefill workers to ask next when `prefill` is lost, and the number of missing tokens from which asking is worth it.
    fn prefills_next(
        &self,
        worker: WorkerId,
        prefill: WorkerId,
        adapter: Option<AdapterId>,
        members: &Members,
    ) -> (Vec<String>, u32) {
        let (next, tokens) = self.router.prefills_next(worker, prefill, adapter);
        let address = |worker: WorkerId| members[worker].transfer_address();
        let addresses = next.into_iter().map(address).filter(|address| !address.is_empty());
        (addresses.take(PREFILLS_NEXT_MAX).map(str::to_owned).collect(), u32::try_from(tokens).unwrap_or(u32::MAX))
    }

    /// Reasons of the last decision, if it was made about this request.
    pub(super) fn route(&self, request: RequestId, members: &Members, now: Instant) -> Option<Arc<str>> {
        let made = self.router.decisions().next_back().filter(|made| made.request == request)?;
        Some(Decision::new(made, members, self.clock(now)).line().into())
    }

    /// The last `count` decisions, newest first.
    pub(super) fn decisions(&self, count: usize, members: &Members, now: Instant) -> Vec<Decision> {
        let decision = |made| Decision::new(made, members, self.clock(now));
        self.router.decisions().rev().take(count).map(decision).collect()
    }

    /// The decision that would be made about a request now.
    pub(super) fn explain(&self, view: View, members: &Members, now: Instant) -> Decision {
        Decision::new(&self.router.explain(view, self.clock(now)), members, self.clock(now))
    }

    /// Record of the decision about a request, to be completed as the request runs; `None`: none are recorded.
    pub(super) fn begin_record(&self, request: RequestId) -> Option<Box<Record>> {
        self.recorder.as_ref()?;
        self.router.record(request).map(Box::new)
    }

    /// Writes the completed record of a request of this tenant.
    pub(super) fn end_record(&mut self, record: Option<Box<Record>>, tenant: &Arc<str>) {
        if let (Some(recorder), Some(record)) = (&mut self.recorder, record) {
            recorder.write(*record, tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::job;
    use super::super::members::tests::{absent, connect};
    use super::super::ticket::Slot;
    use super::*;
    use penstock_proto::frames::EngineState;
    use penstock_router::Member as RouterMember;

    const ONE: WorkerId = WorkerId(0);

    /// Placement with one worker that has room, and a request in the queue.
    fn placement(config: &PoolConfig, now: Instant) -> (Placement, Request) {
        let mut placement = Placement::new(config, 0, None, now);
        let state = EngineState { blocks_free: 64, credits: 8, ..EngineState::default() };
        let member = RouterMember { sequences_max: 8, blocks_total: 64, state, ..RouterMember::default() };
        placement.router.join(ONE, member, &[]);
        let request = Request::new(job(1), Arc::new(Slot::new(RequestId(7), 10)), 10, now);
        placement.router.enqueue(RequestId(7), request.view(now), placement.clock(now)).expect("a place in the queue");
        (placement, request)
    }

    #[test]
    fn a_waiting_request_is_bound_with_its_frames_and_reasons() {
        let now = Instant::now();
        let (mut placement, mut request) = placement(&PoolConfig::new("a"), now);
        let mut members = absent(1, now);
        let _far = connect(&mut members, ONE, 1, now);
        let Next::Bind(chosen) = placement.next(now) else { panic!("nothing is bound") };
        assert_eq!((chosen.request, chosen.worker, chosen.exact), (RequestId(7), ONE, true));
        let frames = placement.frames(&chosen, &mut request, &members).expect("a small request");
        let DownBody::Generate(generate) = &frames.generate else { panic!("no generate") };
        assert_eq!((generate.request, generate.turn, generate.window), (7, chosen.turn, 10));
        assert!(!frames.is_apart && generate.prefill_at.is_empty() && generate.pull_from.is_empty());
        placement.bound(&chosen, &frames);
        placement.decided(Duration::from_nanos(5));
        let counts = Counts { decisions: 1, decision_ns: 5, ..Counts::default() };
        assert_eq!(placement.counts(), counts);
        assert!(placement.route(RequestId(7), &members, now).expect("decided").starts_with("worker=a-0 "));
        assert_eq!(placement.route(RequestId(8), &members, now), None);
        assert_eq!(placement.decisions(5, &members, now).len(), 1);
        assert_eq!(placement.next(now), Next::Hold);
        assert!(placement.begin_record(RequestId(7)).is_none(), "no log");
    }

    #[test]
    fn a_prefill_worker_is_named_by_its_address() {
        let now = Instant::now();
        let (mut placement, mut request) = placement(&PoolConfig::new("a"), now);
        let mut members = absent(2, now);
        let _far = [ONE, WorkerId(1)].map(|worker| connect(&mut members, worker, 1, now));
        let Next::Bind(chosen) = placement.next(now) else { panic!("nothing is bound") };
        let apart = Chosen { prefill: Some(WorkerId(1)), ..chosen };
        let frames = placement.frames(&apart, &mut request, &members).expect("a small request");
        let DownBody::Generate(generate) = &frames.generate else { panic!("no generate") };
        assert!(frames.is_apart);
        assert_eq!(generate.prefill_at, members[WorkerId(1)].transfer_address());
        placement.bound(&apart, &frames);
        assert_eq!(placement.counts().prefilled_apart, 1);
    }

    #[test]
    fn a_request_too_long_for_a_frame_is_not_sent() {
        let now = Instant::now();
        let (mut placement, mut request) = placement(&PoolConfig::new("a"), now);
        let members = absent(1, now);
        let Next::Bind(chosen) = placement.next(now) else { panic!("nothing is bound") };
        request.truth.job.salt = vec![0; FRAME_BYTES_MAX].into();
        assert_eq!(placement.frames(&chosen, &mut request, &members), None);
    }
}
