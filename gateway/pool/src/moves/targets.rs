//! Which requests may move, and where to: a view of workers, requests and step times that decides nothing by itself.

use super::super::member::{Member, Session};
use super::super::members::Members;
use super::super::requests::Requests;
use super::{MoveError, Moves};
use penstock_proto::frames::Role;
use penstock_proto::{RequestId, SessionId};
use penstock_router::{Fleet, WorkerId};
use std::time::Instant;

/// Factor by which steps must be longer than elsewhere before a request moves.
const UNEVEN: f64 = 1.3;

/// Output tokens that a request must have left to be worth a move, and the most that are assumed to come.
const LEFT_MIN: u32 = 64;
const LEFT_MAX: u32 = 512;

/// View of all that the choice of a request to move, and of its new worker, depends on.
#[derive(Clone, Copy)]
pub(in super::super) struct Targets<'a> {
    pub(in super::super) members: &'a Members,
    pub(in super::super) requests: &'a Requests,
    pub(in super::super) moves: &'a Moves,
    /// Step times of the workers with requests added.
    pub(in super::super) router: &'a Fleet,
}

impl Targets<'_> {
    /// Sessions of two workers, `None` for one without.
    pub(in super::super) fn sessions(&self, from: WorkerId, to: WorkerId) -> [Option<SessionId>; 2] {
        [from, to].map(|at| self.members[at].link.as_ref().map(|link| link.session))
    }

    /// Returns true if a migration that began with these sessions can go on: both sessions still exist, and the new worker still takes requests.
    pub(in super::super) fn is_on(&self, from: WorkerId, to: WorkerId, sessions: [Option<SessionId>; 2]) -> bool {
        self.sessions(from, to) == sessions && self.members[to].takes_requests()
    }

    /// The worker that a request would leave, if the request can move to `to`.
    pub(in super::super) fn movable(&self, request: RequestId, to: WorkerId) -> Result<WorkerId, MoveError> {
        let live = self.requests.get(request).ok_or(MoveError::NotDecoding)?;
        let from = live.worker().ok_or(MoveError::NotDecoding)?;
        if !live.truth.decodes() || self.moves.is_moving(request) {
            return Err(MoveError::NotDecoding);
        }
        let [old, new] = [from, to].map(|at| &self.members[at]);
        let (Some(old_ready), Some(new_ready)) = (&old.ready, &new.ready) else { return Err(MoveError::NoWorker) };
        if from == to || !new.takes_requests() || old.link.is_none() {
            return Err(MoveError::NoWorker);
        }
        let same =
            live.truth.numerics_id.as_ref() == Some(&new.numerics_id) && old_ready.block_bytes == new_ready.block_bytes;
        let adapters = new_ready.loaded().map(|(_, id)| id);
        let is_able = live.truth.job.needs().are_met_by(&new_ready.grammar, new_ready.has(), adapters);
        if !same || !is_able || old_ready.transfer.is_empty() || new_ready.transfer.is_empty() {
            return Err(MoveError::Unlike);
        }
        Ok(from)
    }

    /// Returns true if the requests that decode at a worker should go elsewhere.
    pub(in super::super) fn is_left(&self, worker: WorkerId) -> bool {
        let member = &self.members[worker];
        let decodes = |other: &Member| other.takes_requests() && other.state.role() != Role::Prefill;
        let decodes_elsewhere = || self.members.any_other(worker, decodes);
        member.link.is_some()
            && member.session == Session::Ready
            && !member.bound.is_empty()
            && (!member.takes_requests() || member.state.role() == Role::Prefill && decodes_elsewhere())
    }

    /// Requests at a worker that decode and were not moved a moment ago, in descending order of the tokens they have left.
    pub(in super::super) fn rested(&self, worker: WorkerId, now: Instant) -> impl Iterator<Item = RequestId> + use<> {
        let bound = self.members[worker].bound.iter();
        let mut rested: Vec<(u32, RequestId)> = bound
            .filter_map(|request| {
                let live = self.requests.get(*request)?;
                let is_due = live.may_move(now) && !self.moves.is_moving(*request);
                is_due.then(|| (live.truth.left(), *request))
            })
            .collect();
        rested.sort_unstable_by_key(|(left, request)| (std::cmp::Reverse(*left), *request));
        rested.into_iter().map(|(_, request)| request)
    }

    /// The worker whose decode steps would be shortest with a request added, and the length of these steps in seconds.
    pub(in super::super) fn best_place(&self, request: RequestId, from: WorkerId) -> Option<(WorkerId, f64)> {
        let live = self.requests.get(request)?;
        let (sequences, tokens) = (live.truth.open(), live.truth.tokens().len());
        let others = self.members.ids().filter(|at| *at != from);
        others
            .filter(|to| self.members[*to].state.role() != Role::Prefill)
            .filter(|to| self.movable(request, *to).is_ok())
            .filter_map(|to| Some((to, self.router.step_with(to, sequences, tokens)?)))
            .min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The worker with the longest decode steps and their length in seconds; `None` while none serves.
    pub(in super::super) fn slowest(&self) -> Option<(WorkerId, f64)> {
        let serving = self.members.ids().filter(|at| self.members[*at].takes_requests());
        let steps = serving.filter_map(|at| Some((at, self.router.step_with(at, 0, 0)?)));
        steps.max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The request with most tokens left that gains enough by leaving a worker with steps of `step` seconds, and where it would go.
    pub(in super::super) fn gains(&self, from: WorkerId, step: f64, now: Instant) -> Option<(RequestId, WorkerId)> {
        let busy = self.members[from].bound.len();
        self.rested(from, now).find_map(|request| {
            let (to, there) = self.best_place(request, from)?;
            let left = self.requests.get(request)?.truth.left();
            let gain = (step - there) * f64::from(left.min(LEFT_MAX));
            // The gain has to pay for the pull and for the step that computes the missing blocks.
            let is_worth = left >= LEFT_MIN && step > UNEVEN * there && gain > 8.0 * step;
            let is_crowded = busy >= self.members[to].bound.len() + 2;
            (is_worth && is_crowded).then_some((request, to))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::job::tests::job;
    use super::super::super::members::tests::{absent, connect};
    use super::super::super::request::tests::{binding, output};
    use super::super::super::steering::Steering;
    use super::super::super::ticket::Slot;
    use super::super::{Cause, Move};
    use super::*;
    use penstock_proto::frames::{Down, EngineState};
    use penstock_router::{Limits, Member as RouterMember, Weights};
    use std::sync::Arc;
    use tokio::sync::mpsc::Receiver;

    const HERE: WorkerId = WorkerId(0);
    const THERE: WorkerId = WorkerId(1);
    const REQUEST: RequestId = RequestId(7);

    /// Two workers that serve, of which the first decodes a request.
    struct Pair {
        members: Members,
        requests: Requests,
        moves: Moves,
        router: Fleet,
        now: Instant,
        _far: [Receiver<Down>; 2],
    }

    impl Pair {
        fn new() -> Self {
            let now = Instant::now();
            let mut members = absent(2, now);
            let far = [HERE, THERE].map(|worker| connect(&mut members, worker, 4, now));
            let mut router = Fleet::new(Weights::default(), Limits::default());
            for worker in [HERE, THERE] {
                let state = EngineState { credits: 8, blocks_free: 64, ..EngineState::default() };
                let member = RouterMember { sequences_max: 8, blocks_total: 64, state, ..RouterMember::default() };
                router.join(worker, member, &[]);
            }
            let mut requests = Requests::new(10);
            requests.submit(job(1), Arc::new(Slot::new(REQUEST, 10)), now);
            requests.bind(REQUEST, binding(HERE), now).expect("open");
            let numerics_id = Arc::clone(&members[HERE].numerics_id);
            requests.accept(HERE, output(0, 0, &[5]), &numerics_id, 100, now).expect("within the contract");
            members[HERE].bound.insert(REQUEST);
            Self { members, requests, moves: Moves::default(), router, now, _far: far }
        }

        fn targets(&self) -> Targets<'_> {
            Targets { members: &self.members, requests: &self.requests, moves: &self.moves, router: &self.router }
        }
    }

    #[test]
    fn a_request_can_move_to_a_worker_that_is_alike() {
        let mut pair = Pair::new();
        let check = |pair: &Pair, to, expected| assert_eq!(pair.targets().movable(REQUEST, to), expected);
        check(&pair, THERE, Ok(HERE));
        check(&pair, HERE, Err(MoveError::NoWorker));
        assert_eq!(pair.targets().movable(RequestId(REQUEST.0 + 1), THERE), Err(MoveError::NotDecoding));
        pair.members[THERE].numerics_id = "other".into();
        check(&pair, THERE, Err(MoveError::Unlike));
        pair.members[THERE].steering = Steering::Held;
        check(&pair, THERE, Err(MoveError::NoWorker));
        let one = Move::new((HERE, THERE), [None; 2], Cause::Asked, None, pair.now);
        pair.moves.begin(REQUEST, one);
        check(&pair, THERE, Err(MoveError::NotDecoding));
        assert_eq!(pair.targets().rested(HERE, pair.now).count(), 0, "it moves already");
    }

    #[test]
    fn a_held_worker_is_left_for_the_other_one() {
        let mut pair = Pair::new();
        assert!(!pair.targets().is_left(HERE));
        pair.members[HERE].steering = Steering::Held;
        assert!(pair.targets().is_left(HERE) && !pair.targets().is_left(THERE), "nothing is bound there");
        assert_eq!(pair.targets().rested(HERE, pair.now).collect::<Vec<_>>(), [REQUEST]);
        let place = pair.targets().best_place(REQUEST, HERE);
        assert_eq!(place.map(|(to, _)| to), Some(THERE));
        pair.members[THERE].state.role = Role::Prefill as i32;
        assert_eq!(pair.targets().best_place(REQUEST, HERE), None);
    }

    #[test]
    fn a_new_session_ends_a_move() {
        let mut pair = Pair::new();
        let sessions = pair.targets().sessions(HERE, THERE);
        assert!(pair.targets().is_on(HERE, THERE, sessions));
        pair.members[HERE].link = None;
        assert!(!pair.targets().is_on(HERE, THERE, sessions));
    }

    #[test]
    fn a_request_gains_nothing_where_steps_are_no_shorter() {
        let pair = Pair::new();
        let (_, step) = pair.targets().slowest().expect("both serve");
        assert_eq!(pair.targets().gains(HERE, step, pair.now), None);
        assert_eq!(pair.targets().gains(HERE, 1e9, pair.now), None, "one request alone is not crowded");
    }
}
