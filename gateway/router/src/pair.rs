//! Disaggregated prefill: prefill at one worker, decode at another. The pair is priced together with the place, as one
//! more way to get the prompt there.
//!
//! ```text
//! cost(d, p) = price of d with own = move, and queue = max(queue_d, queue_p + prefill_p(what neither has))
//!            + what the prefill costs at p: own_p·β(1 + a·load) + γ·own_p·decoding_p
//! move       = seconds in which d takes the pages in, beside its decodes
//! ```
//! Blocks that `d` has are credited: only blocks after them are computed and moved. A pair is considered only when `d`
//! lacks a long part of the prompt ([`Weights::apart_tokens`](crate::Weights::apart_tokens), or `apart_tokens_decode`
//! where `d` has the role decode), and a mixed worker takes it only when it costs less than prefill at `d`, whose price
//! includes the harm to the sequences that decode there. A place is reserved at both: at `d` by the frame sent to it,
//! at `p` by a note that the next reports of `p` replace.

use crate::WorkerId;
use crate::cost::{Parts, Terms, Weights};
use crate::explain::{Candidate, Found};
use crate::place::Market;
use crate::view::View;
use crate::worker::WorkerView;
use penstock_proto::frames::Role;
use penstock_proto::{AdapterId, BLOCK_TOKENS};
use std::collections::BTreeMap;

/// Share of a step that the decode side gives to incoming pages; enforced by the worker.
const MOVE_SHARE: f64 = 0.1;

/// Factor on the TTFT up to which a worker of the role decode prefers a prefill worker over computing a long prompt itself.
const DECODE_PATIENCE: f64 = 3.0;

/// Worker that prefills for another, with the changed terms of the cost.
pub(crate) struct Pair {
    pub(crate) prefill: WorkerId,
    /// Changed terms of the decode side: own work and queue.
    pub(crate) own: f64,
    pub(crate) queue: f64,
    /// Cost at the prefill side, as parts of the decode side's price.
    pub(crate) beside: Parts,
}

impl WorkerView {
    /// Role that the worker reports: prefill, decode or mixed.
    pub(crate) fn role(&self) -> Role {
        self.member.state.role()
    }
}

impl Market<'_> {
    /// Returns true if a worker is reserved for prefill: another one that suits the request can decode for it.
    pub(crate) fn only_prefills(&self, worker: &WorkerView, suits: &dyn Fn(&WorkerView) -> bool) -> bool {
        let decodes = |other: &WorkerView| other.takes_requests() && other.role() != Role::Prefill && suits(other);
        worker.role() == Role::Prefill && self.workers.values().any(decodes)
    }

    /// The candidate with another worker's prefill, where that is cheaper; otherwise unchanged.
    pub(crate) fn apart(
        &self,
        candidate: Candidate,
        worker: &WorkerView,
        terms: &Terms,
        view: &View,
        all: &[(WorkerId, Found)],
    ) -> Candidate {
        let Some(pair) = self.pair((candidate.worker, worker), view, candidate.found, all) else { return candidate };
        let Pair { prefill, own, queue, beside } = pair;
        // Without a free place the request waits as before.
        let queue = queue.max(terms.queue);
        let mut parts = self.weights.price(&Terms { own, queue, ..*terms });
        (parts.later, parts.harm) = (parts.later + beside.later, parts.harm + beside.harm);
        let ttft = queue + own + terms.step;
        // A worker of the role decode is kept from long prefills unless the alternative takes very much longer; so is a
        // worker that decodes for sequences with a promised TPOT.
        let is_kept = worker.role() == Role::Decode || self.tpot.is_some() && worker.sequences() > 0;
        let takes =
            if is_kept { ttft <= DECODE_PATIENCE * candidate.ttft + 1.0 } else { parts.sum() < candidate.parts.sum() };
        if !takes {
            return candidate;
        }
        let found = Found { loaded: 0, ..candidate.found };
        Candidate { parts, found, pull_from: None, prefill: Some(prefill), ttft, ..candidate }
    }

    /// The cheapest worker to prefill for `decode`; `None` when there is none, or too little of the prompt is missing.
    pub(crate) fn pair(
        &self,
        (decode_id, decode): (WorkerId, &WorkerView),
        view: &View,
        found: Found,
        all: &[(WorkerId, Found)],
    ) -> Option<Pair> {
        let (tokens, adapter) = (view.tokens.len(), view.needs.adapter);
        let have = (found.device + found.promised) as usize;
        let lacks = tokens.saturating_sub(have);
        if lacks <= longer_than(self.weights, decode) {
            return None;
        }
        let mut best: Option<(f64, Pair)> = None;
        for (id, theirs) in all.iter().filter(|(id, _)| *id != decode_id) {
            let prefills = |worker: &&WorkerView| {
                worker.role() == Role::Prefill && worker.credits() > 0 && worker.has_adapter(adapter)
            };
            let Some(worker) = self.workers.get(id).filter(prefills) else { continue };
            // Bytes per second as in a pull; `None` where blocks cannot be moved.
            let Some(moved) = decode.pull_seconds(worker, lacks as u32) else { continue };
            // The prefill worker computes all that it lacks itself, whatever the decode side has.
            let known = (theirs.device + theirs.promised) as usize;
            let compute = worker.prefill_seconds(tokens, known.min(tokens));
            let ahead = worker.queue_seconds() + self.ahead[usize::from(id.0)];
            let (pace, decoding) = (self.pace_of(worker), f64::from(worker.sequences()));
            let terms = Terms { own: compute, pace, load: self.load, decoding, ..Terms::default() };
            let priced = self.weights.price(&terms);
            let beside = Parts { later: priced.later, harm: priced.harm, ..Parts::default() };
            // Most of the transfer overlaps with the prefill; the last block does not.
            let shown = moved * (BLOCK_TOKENS as f64 / lacks as f64).min(1.0);
            let own =
                moved * MOVE_SHARE + shown + decode.prefill_seconds(tokens, tokens.saturating_sub(BLOCK_TOKENS / 2));
            let queue = decode.queue_seconds().max(ahead + compute);
            let cost = queue + own + beside.sum();
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, Pair { prefill: *id, own, queue, beside }));
            }
        }
        best.map(|(_, pair)| pair)
    }
}

/// Number of missing tokens above which a prompt may be computed elsewhere.
fn longer_than(weights: &Weights, decode: &WorkerView) -> usize {
    let tokens = match decode.role() {
        Role::Decode => weights.apart_tokens_decode,
        _ => weights.apart_tokens,
    };
    tokens.max(BLOCK_TOKENS)
}

/// Prefill workers for `decode` if `prefill` is lost on the way, least queue first; and the number of missing tokens
/// from which asking one is worth it. `adapter`: the adapter of the request.
pub(crate) fn next(
    workers: &BTreeMap<WorkerId, WorkerView>,
    weights: &Weights,
    (decode, prefill): (WorkerId, WorkerId),
    adapter: Option<AdapterId>,
) -> (Vec<WorkerId>, usize) {
    let Some(worker) = workers.get(&decode) else { return Default::default() };
    let can = |(id, other): &(&WorkerId, &WorkerView)| {
        ![decode, prefill].contains(id)
            && (other.role() == Role::Prefill && other.credits() > 0)
            && worker.pull_seconds(other, 0).is_some()
            && other.has_adapter(adapter)
    };
    let mut next: Vec<(f64, WorkerId)> =
        workers.iter().filter(can).map(|(id, other)| (other.queue_seconds(), *id)).collect();
    next.sort_by(|a, b| a.0.total_cmp(&b.0));
    (next.into_iter().map(|(_, id)| id).collect(), longer_than(weights, worker))
}

#[cfg(test)]
mod tests {
    use crate::fleet::{Choice, Fleet, Limits};
    use crate::view::{Needs, View};
    use crate::worker::Member;
    use crate::{Weights, WorkerId};
    use penstock_proto::frames::{EngineState, KvEvent, Role};
    use penstock_proto::{AdapterId, BlockHasher, Capabilities, RequestId};
    use std::sync::Arc;
    use std::time::Duration;

    fn member(role: Role) -> Member {
        let state = EngineState {
            credits: 8,
            blocks_total: 1000,
            blocks_free: 1000,
            running: if role == Role::Prefill { 0 } else { 6 },
            prefill_tokens_per_second: 1000.0,
            step_seconds: 0.02,
            role: role as i32,
            ..EngineState::default()
        };
        let (numerics_id, grammar, device) = ("n".into(), "".into(), "cpu".into());
        Member {
            numerics_id,
            grammar,
            capabilities: Capabilities::all(),
            adapters: Arc::default(),
            blocks_total: 1000,
            sequences_max: 16,
            state,
            device,
            block_bytes: 1 << 20,
        }
    }

    fn fleet(roles: &[Role]) -> Fleet {
        let mut fleet = Fleet::new(Weights::default(), Limits::default());
        for (at, role) in (0..).zip(roles) {
            fleet.join(WorkerId(at), member(*role), &[]);
        }
        fleet
    }

    /// Worker that decodes and worker that prefills a request of `tokens` tokens.
    fn place(fleet: &mut Fleet, request: u64, tokens: u32) -> (u8, Option<u8>) {
        place_view(fleet, request, View { tokens: (0..tokens).collect(), sequences: 1, ..View::default() })
    }

    fn place_view(fleet: &mut Fleet, request: u64, view: View) -> (u8, Option<u8>) {
        fleet.enqueue(RequestId(request), view, Duration::ZERO).expect("taken");
        match fleet.next(Duration::ZERO) {
            Choice::Bind { worker, prefill, .. } => (worker.0, prefill.map(|prefill| prefill.0)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn long_prompts_are_computed_apart_and_short_ones_are_not() {
        let mut fleet = fleet(&[Role::Prefill, Role::Decode]);
        assert_eq!(place(&mut fleet, 1, 4000), (1, Some(0)));
        assert_eq!(place(&mut fleet, 2, 300), (1, None));
    }

    #[test]
    fn what_the_decode_side_has_is_not_asked_for() {
        let mut fleet = fleet(&[Role::Prefill, Role::Decode]);
        let hashes = BlockHasher::for_request(b"", "n").chain(&(0..4000).collect::<Vec<_>>());
        let stored = hashes[..120].iter().map(|hash| hash.to_bytes().to_vec()).collect();
        fleet.update(WorkerId(1), None, &[KvEvent { stored, ..KvEvent::default() }], 0);
        assert_eq!(place(&mut fleet, 1, 4000), (1, None), "only 160 tokens are missing");
    }

    #[test]
    fn without_roles_nothing_is_apart_and_without_decoders_prefill_workers_decode() {
        assert_eq!(place(&mut fleet(&[Role::Mixed, Role::Mixed]), 1, 4000).1, None);
        assert_eq!(place(&mut fleet(&[Role::Prefill]), 1, 4000), (0, None));
    }

    #[test]
    fn who_loses_a_prefill_worker_may_ask_those_that_have_least_ahead() {
        let mut fleet = fleet(&[Role::Prefill, Role::Prefill, Role::Decode, Role::Prefill, Role::Mixed]);
        let ids = |next: (Vec<WorkerId>, usize)| (next.0.into_iter().map(|id| id.0).collect::<Vec<_>>(), next.1);
        let next = |fleet: &Fleet, decode, prefill| ids(fleet.prefills_next(WorkerId(decode), WorkerId(prefill), None));
        let busy = EngineState { queue_seconds: 3.0, ..member(Role::Prefill).state };
        fleet.update(WorkerId(1), Some(&busy), &[], 0);
        assert_eq!(next(&fleet, 2, 0), (vec![3, 1], 512));
        assert_eq!(next(&fleet, 4, 3), (vec![0, 1], 2048));
        fleet.suspend(WorkerId(3), true);
        assert_eq!(next(&fleet, 2, 0), (vec![1], 512));
        fleet.leave(WorkerId(2));
        assert_eq!(next(&fleet, 2, 0), (vec![], 0));
    }

    #[test]
    fn a_worker_without_the_adapter_neither_decodes_nor_prefills_for_it() {
        let loaded = |id: u128| Arc::from([AdapterId(id)]);
        let mut fleet = Fleet::new(Weights::default(), Limits::default());
        let roles = [Role::Prefill, Role::Decode, Role::Prefill, Role::Decode, Role::Prefill];
        for (at, (role, adapters)) in
            (0..).zip(roles.into_iter().zip([Arc::default(), Arc::default(), loaded(8), loaded(7), loaded(7)]))
        {
            fleet.join(WorkerId(at), Member { adapters, ..member(role) }, &[]);
        }
        let view = |adapter| View {
            tokens: (0..4000).collect(),
            sequences: 1,
            needs: Needs { adapter, ..Needs::default() },
            ..View::default()
        };
        let adapter = Some(AdapterId(7));
        assert_eq!(place_view(&mut fleet, 1, view(adapter)), (3, Some(4)));
        assert_eq!(fleet.prefills_next(WorkerId(3), WorkerId(4), adapter).0, []);
        assert_eq!(fleet.prefills_next(WorkerId(3), WorkerId(4), None).0.len(), 2);
        fleet.leave(WorkerId(4));
        assert_eq!(place_view(&mut fleet, 2, view(adapter)), (3, None), "the other prefill workers would be wrong");
        fleet.leave(WorkerId(3));
        fleet.enqueue(RequestId(3), view(adapter), Duration::ZERO).expect("taken");
        assert!(matches!(fleet.next(Duration::ZERO), Choice::Hold), "it waits for a worker that has the adapter");
    }

    #[test]
    fn several_prefill_workers_share() {
        let mut fleet = fleet(&[Role::Prefill, Role::Prefill, Role::Decode]);
        let first = place(&mut fleet, 1, 4000);
        let view = View { tokens: (9..4009).collect(), sequences: 1, ..View::default() };
        fleet.enqueue(RequestId(2), view, Duration::ZERO).expect("taken");
        let Choice::Bind { worker, prefill, .. } = fleet.next(Duration::ZERO) else { panic!("held") };
        assert_eq!((first.0, worker.0), (2, 2));
        assert_ne!(first.1, prefill.map(|prefill| prefill.0));
    }
}
